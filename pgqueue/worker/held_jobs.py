"""The jobs that one worker holds: what becomes of them when they come, and what is told when they go.

The fetcher, the unblocker and the rate limiter deliver jobs here; from here they go to the executor. The completer says
here that jobs are written, and their keys go to the unblocker. What may be delivered is for `capacity`.

The database may give this worker a job that it holds already. A crash of the server takes claims back that were not
durable, those of plain jobs. Or this worker had seemed dead. Then the job does not start beside itself:

1. If the earlier claim has not started, it is forgotten, and the job starts under the new claim.
2. If it runs, the run goes on under the new claim. Its outcome ends the row that is there now.
3. If it is transactional, its transaction is bound to the earlier claim and cannot commit. If it is told to stop, it
   ends without an effect. So the new claim waits until that run has ended, and starts then.

A worker takes 50 ms of work beyond its slots. How long jobs last is only known of those that have ended, so longer ones
may have come, and what waits at hand would wait for them. Why no job waits here for long, nor goes to and fro for ever:

1. While jobs wait at hand, there is a look every `AT_HAND_SECONDS`. If jobs are left of those that waited at the last
   look, only so many stay as have started since. The others go back to the front of their lanes, or of the waiters of
   their lock or limit. Any worker may take them there.
2. So if no job starts, none stays. Those that go back are the last: no job that came later starts here before them.
3. The group of slots that gave jobs back takes no more beyond its slots than it kept, until jobs have ended there.
4. Jobs of a batch that has failed stay until each has run by itself. Others could not tell that it must, and would
   make a batch with them that fails again, one a second.
5. If the loop is blocked, no look comes. Then `liveness/blocked_loop` gives these jobs away.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence

from pgqueue.jobs.job import STARTED, Job, fields
from pgqueue.jobs.keys import RATE
from pgqueue.jobs.outcomes import RELEASED, Outcome, interrupted
from pgqueue.plain_text import plural
from pgqueue.steady_clock import monotonic
from pgqueue.worker.capacity import Capacity
from pgqueue.worker.concurrency.chains import LONGEST_SECONDS, Chain, Chains
from pgqueue.worker.neighbours import Neighbours
from pgqueue.worker.run.slots import SlotGroup

log = logging.getLogger("pgqueue")

TAKEN = interrupted("its row was taken from its worker")

AT_HAND_SECONDS = 1.0
"""How often to look at the jobs that wait for a slot. If no slot is freed, none waits for more than twice as long."""


class HeldJobs:
    """Takes jobs in, gives them back, and passes on what their ends make free. Everything but `take_out_waiting` is
    called on the loop.

    `state.held` has the jobs by id.
    """

    def __init__(self, services: Neighbours, capacity: Capacity) -> None:
        self.chains = Chains()
        self._later: dict[int, Job] = {}
        """By id, jobs that start when their earlier run has ended."""
        self._services = services
        self._capacity = capacity
        self._state = services.state
        self._loop = asyncio.get_running_loop()
        self._looks = False
        """Whether a look at the jobs at hand is to come."""

    # Jobs that come --------------------------------------------------------------------------------------------------

    def deliver(self, jobs: list[Job], moved: bool = False, *, first: bool = False) -> None:
        """Hold these jobs and let them start as slots are free. `moved`: they waited for a key; `first`: they start
        before others."""
        services, state = self._services, self._state
        if jobs and state.claims.void(jobs[0].claim):
            said = "%s to others: the claim was given up, as this worker seemed dead or its event loop was blocked"
            log.warning(said, plural(len(jobs), "job is left", "jobs are left"))
            state.in_doubt()  # a row that was not there when others were told is handed back
            state.claims.forget(jobs[0].claim)
            jobs = []
        if not state.held.keys().isdisjoint([job.id for job in jobs]):
            jobs = [job for job in jobs if job.id not in state.held or self._starts_anew(state.held[job.id], job)]
        for job in jobs:
            state.held[job.id] = job
        # A fetch was under way when the worker was told to be quiet; or it brought poison jobs, which come one by one.
        idle = len(state.held) == len(jobs)
        kept = services.poison_jobs.keep(jobs, idle=idle) if state.phase == "running" else []
        if len(kept) < len(jobs):
            self.give_back(set(jobs).difference(kept))
        for group, mine in self._by_group(kept):
            group.adapt(group.prefetch // 2 if moved else 0)
            self._offer(group, mine, first=first)
        services.rate_limiter.slots_freed()  # it was the fetcher's turn

    def _offer(self, group: SlotGroup, jobs: list[Job], *, first: bool = False) -> None:
        self.offer(group, self._services.batches.gather(group, jobs), first=first)

    def offer(self, group: SlotGroup, jobs: list[Job], *, first: bool = False) -> None:
        """Let these jobs, held already, start as slots are free."""
        self._services.executor.offer(group, jobs, first=first)
        if group.waiting and not self._looks:
            self._looks = True
            self._loop.call_later(AT_HAND_SECONDS, self._look)

    def _look(self) -> None:
        """Give back what has waited at hand since the last look."""
        groups = self._services.running.groups
        for group in groups:
            self.give_back(group.surplus())
        self._looks = any(group.waiting for group in groups)
        if self._looks:
            self._loop.call_later(AT_HAND_SECONDS, self._look)

    def _starts_anew(self, before: Job, job: Job) -> bool:
        """Whether a job that is held as `before` starts now under its new claim (the three cases above)."""
        running = self._services.running
        if before is job:  # of a chain, or it has waited for the end of its earlier run
            return True
        if self._take_out(job.id):
            self._services.poison_jobs.ended([before])
            return True
        if running.is_running(before):
            log.warning("job %d (%s) was claimed again while it runs here", job.id, job.task, extra=fields(job))
            if not (running.stopping(before) or before.written or self._state.tasks[job.task].transactional):
                before.claim, before.attempt = job.claim, job.attempt
                return False
        self._state.held[job.id] = self._later[job.id] = job
        return False

    def _take_out(self, job_id: int) -> bool:
        """Forget this job if it has not started."""
        batches = self._services.batches
        found = [
            self.chains.remove(job_id),
            batches.remove(job_id),
            *(group.remove(job_id) for group in self._services.running.groups),
        ]
        return any(job is not None for job in found)

    def fetched(self) -> None:
        """A fetch has been answered: the slots that it did not fill are free for others."""
        self._services.unblocker.fetched()
        self._services.rate_limiter.slots_freed()

    def unblocked(self, jobs: list[Job]) -> None:
        """Take jobs that have got their key. They come few at a time: they do not measure how many to have at hand."""
        firsts = [job for job in jobs if not job.chained]
        if len(firsts) < len(jobs) and not self._state.claims.void(jobs[0].claim):
            doubles = [job for job in jobs if job.chained and job.id in self._state.held]
            chains = self.chains.add([job for job in jobs if job not in doubles] if doubles else jobs)
            self._state.held.update((job.id, job) for chain in chains for job in chain)
            self.give_back(doubles)
            self._loop.call_later(LONGEST_SECONDS, self._shorten, chains)
        self.deliver(firsts, moved=True)
        self._capacity.filled(firsts)

    def keys_asked(self) -> None:
        """An unblocking has been answered."""
        self._services.fetcher.slots_freed()
        self._services.sweep.keys_in_use()

    def start_rated(self, jobs: list[Job]) -> None:
        """Start these under a rate, before what waits at hand. A job that cannot goes back once it is too late."""
        services = self._services
        if jobs:
            self._capacity.filled(jobs)
            services.executor.reserve(())
            last = max(job.start_by or 0.0 for job in jobs)
            self._loop.call_later(max(0.0, last - monotonic()), self._take_back, jobs)
        services.unblocker.holding(jobs)
        draining = services.poison_jobs.draining
        self.deliver(jobs, moved=True, first=True)
        services.fetcher.wake() if draining else services.fetcher.slots_freed()

    def _take_back(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            if (job.start_by or STARTED) > STARTED and self._state.holds(job):  # it has not started, nor come anew
                found = [group.remove(job.id) for group in self._services.running.groups]
                self.give_back([waiting for waiting in found if waiting is not None])

    def _by_group(self, jobs: list[Job]) -> list[tuple[SlotGroup, list[Job]]]:
        """These jobs with the groups of the slots that they use."""
        groups = self._services.running.groups
        if len(groups) == 1:
            return [(groups[0], jobs)] if jobs else []
        return [(group, mine) for group in groups if (mine := [job for job in jobs if job.queue in group.queues])]

    def replaced(self, before: Job, after: Job) -> None:
        """The second goes on for the first, under the same claim: a handler that does not stop still has the first."""
        services = self._services
        if self._state.holds(before):
            self._state.held[after.id] = after
        services.unblocker.handed_on(before, after)
        services.progress.ended([before])

    # Keys that jobs wait for -----------------------------------------------------------------------------------------

    def rates_wanted(self, keys: Iterable[str]) -> None:
        """Jobs wait for these rates."""
        self._services.rate_limiter.wanted(keys)
        self._services.sweep.keys_in_use()

    def swept(self, keys: Iterable[str]) -> None:
        """A sweep has found waiting jobs for these keys."""
        rates = [key for key in keys if key.startswith(RATE)]
        self._services.rate_limiter.swept(rates)
        self._services.unblocker.swept(set(keys).difference(rates))

    # Jobs that go ----------------------------------------------------------------------------------------------------

    def written(self, jobs: Sequence[Job]) -> None:
        """The ends of these jobs are written: they are not this worker's any more."""
        services, state = self._services, self._state
        for job in jobs:
            state.ended_jobs += hasattr(job, "began")
            if state.held.get(job.id) is job:
                del state.held[job.id]
        services.progress.ended(jobs)
        services.releaser.ended(jobs)
        services.unblocker.ended(self._go_on(jobs))
        if services.poison_jobs.draining or any([group.low() for group in services.running.groups]):
            services.fetcher.slots_freed()
        services.rate_limiter.slots_freed()
        if services.poison_jobs.ended(jobs):
            services.fetcher.wake()
        if self._later:
            self._start_later(jobs)

    def _start_later(self, ended: Iterable[Job]) -> None:
        """Start the jobs that were claimed again while these runs of them had not ended."""
        for job in ended:
            if self._later.get(job.id, job) is not job:
                self.deliver([self._later.pop(job.id)], moved=True)

    def kept_keys(self, jobs: Iterable[Job]) -> None:
        """These jobs end here, and their keys are not free, or perhaps not: no job of their chains goes on."""
        for job in jobs:
            self._services.unblocker.blocked_again(job)  # again: it may have been looked for before it was there
            if job.lock_key is not None:
                self.give_back(self.chains.cut(job))

    def slots_freed(self) -> None:
        """The executor has room, or is worn out: then no more jobs are taken, and what waits is given back."""
        if self._services.running.worn_out:
            self._services.quiet()
        self._services.rate_limiter.slots_freed()
        self._services.fetcher.slots_freed()

    def interrupt(self, job_id: int, outcome: Outcome) -> bool:
        """Stop this job, wherever it is; False if it is not here (see `Executor.interrupt`)."""
        batches, interrupt = self._services.batches, self._services.executor.interrupt
        waiting = self._later.pop(job_id, None) or self.chains.remove(job_id) or batches.remove(job_id)
        if waiting is None:
            stopped = batches.note(job_id, outcome, interrupt)
            return interrupt(job_id, outcome) if stopped is None else stopped
        self._services.finish(waiting, outcome)
        return True

    def hand_back(self) -> list[Job]:
        """Take out all jobs that have not started; the caller gives them back."""
        later = list(self._later.values())
        self._later.clear()
        batches = self._services.batches
        handed = batches.with_others(self._services.executor.hand_back()) + batches.take_out()
        return handed + self.chains.empty() + later

    def gone(self, jobs: Iterable[Job]) -> None:
        """These jobs had a lock or a limit, and have no row here any more: those that have not ended are stopped."""
        said = "job %d (%s) is not this worker's any more, and another job of its key may run: it is stopped"
        for job in jobs:
            if self._state.holds(job) and not job.written and self.interrupt(job.id, TAKEN):
                log.error(said, job.id, job.task, extra=fields(job))

    def take_out_waiting(self) -> list[Job]:
        """Take out the jobs that wait for a slot, and those of chains behind them, while the loop is blocked. From any
        thread. `give_back` must follow, on the loop."""
        batches = self._services.batches
        firsts = batches.with_others(job for group in self._services.running.groups for job, _ in group.empty())
        firsts += batches.take_out()
        return [each for job in firsts for each in (job, *self.chains.cut(job))]

    def lose(self) -> None:
        """Other workers have taken this one for dead. What has not started is theirs; what runs ends by its fence."""
        self._state.claims.void_all()  # one may be under way still, and its answer come under another id
        handed = self.hand_back()
        dropped = [job for job in handed if not hasattr(job, "began")]
        for job in dropped:
            self._state.held.pop(job.id, None)
        self._services.poison_jobs.ended(dropped)
        self._services.unblocker.ended(dropped)
        for job in handed:
            if hasattr(job, "began"):  # its release finds no row: the job leaves, and its hooks are told
                self._services.finish(job, RELEASED)

    def give_back(self, jobs: Iterable[Job]) -> None:
        """Release these jobs: no attempt is spent. Hooks are told of those that have begun, in a batch that failed."""
        for job in self._services.batches.with_others(jobs):
            self._services.unblocker.blocked_again(job)
            finish = self._services.finish if hasattr(job, "began") else self._services.completer.finish
            finish(job, RELEASED)

    def _go_on(self, ended: Sequence[Job]) -> Sequence[Job]:
        """Start the next of the chains of these jobs, which has the lock now; the jobs without a next one."""
        if not self.chains:
            return ended
        rest, started = [], []
        for job in ended:
            after = self.chains.next(job)
            if after is None:
                rest.append(job)
            else:
                self._services.unblocker.handed_on(job, after)
                started.append(after)
        for group, mine in self._by_group(started):
            self._offer(group, mine)
        return rest

    def _shorten(self, chains: Iterable[Chain]) -> None:
        """Give back what has not started of these: it was to be soon, and other jobs may be more urgent."""
        self.give_back(self.chains.shorten(chains))
