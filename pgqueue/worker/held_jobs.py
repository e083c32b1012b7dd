"""Where the services of one worker meet: what has room for how many jobs, what is told of those that come and go.

The lower half of `services`. The fetcher, admit and the rates ask for the room of the executor's groups, and deliver
jobs there; a slot that one of them has asked for is no room for the others. `_held` is what we have claimed and not yet
written down: the truth is in the database, and reconciliation hands back what we do not know of.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from time import monotonic

from pgqueue.jobs.job import STARTED, Job
from pgqueue.jobs.keys import RATE
from pgqueue.jobs.outcomes import RELEASED
from pgqueue.worker.claims import Claims
from pgqueue.worker.complete.completer import Completer
from pgqueue.worker.concurrency.chains import LONGEST_SECONDS, Chain
from pgqueue.worker.concurrency.rate_limiter import Free, RateLimiter
from pgqueue.worker.concurrency.semaphores import Slots
from pgqueue.worker.concurrency.sweep import Sweep
from pgqueue.worker.concurrency.unblocker import Unblocker
from pgqueue.worker.fetch.fetcher import UNWRITTEN_MOST, Fetcher, Share
from pgqueue.worker.fetch.poison_jobs import PoisonJobs
from pgqueue.worker.liveness.heartbeat import Heartbeat
from pgqueue.worker.run.executor import Executor
from pgqueue.worker.run.progress import Progress
from pgqueue.worker.run.slots import SlotGroup, SlotTurns
from pgqueue.worker.settings import Settings

log = logging.getLogger("pgqueue")


class HeldJobs:
    """The room there is in this worker, and the jobs it holds."""

    _loop: asyncio.AbstractEventLoop
    _unblocker: Unblocker
    _claims: Claims
    _completer: Completer
    _executor: Executor
    _fetcher: Fetcher
    _heartbeat: Heartbeat
    _progress: Progress
    _rates: RateLimiter
    _sweep: Sweep
    _turns: Mapping[Sequence[str], SlotTurns]

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._state = "starting"
        self._held: dict[int, Job] = {}
        self._ended_jobs = 0
        self._poison_jobs = PoisonJobs()
        self._way_for: str | None = None
        """The rate that a poison job waits for, while way is made for that one."""

    # Room ------------------------------------------------------------------------------------------------------------

    def _shares(self) -> list[Share]:
        if self._poison_jobs.alone or self._completer.unwritten() > UNWRITTEN_MOST or self._heartbeat.late():
            return []
        if self._poison_jobs.draining:
            return [] if self._held or self._way_for else [Share(list(self.settings.queues), 1, alone=True)]
        return [Share(group.queues, self._room(group)) for group in self._executor.groups]

    def _room(self, group: SlotGroup) -> int:
        """What the fetcher may ask for: not what an admit under way was given, nor what one is about to want."""
        room = max(0, group.room() - group.reserved - self._unblocker.slots_promised(group.queues))
        ours = room > 0 and self._turns[group.queues].fetchers
        return room - min(self._unblocker.pending, room - ours)

    def _slots(self) -> list[Slots]:
        """Where admit may put jobs: what a fetch under way has asked for is taken, and the next one has its share."""
        if self._state != "running" or self._heartbeat.late():
            return []
        if self._poison_jobs.alone or self._poison_jobs.draining:
            return [Slots(group.queues, 0) for group in self._executor.groups]
        queues, asked = self._fetcher.asking
        found = []
        for group in self._executor.groups:
            coming = asked if group.queues[0] in queues else 0
            free = max(0, group.asked() - group.reserved - coming)
            left = 0
            if self._fetcher.hungry(group.queues):  # half, the last one in turn
                left = free // 2 if free != 1 else int(self._turns[group.queues].fetchers)
            found.append(Slots(group.queues, free, coming, left, group.behind))
        return found

    def _free(self) -> Free:
        """What may start at once, under a rate. One slot is left for the fetcher if it is its turn."""
        groups, slots = self._executor.groups, self._slots()
        if not slots:
            return Free([])
        if self._poison_jobs.draining:
            nobody = not self._held
            return Free(
                [(group.queues, int(nobody), 0) for group in groups], self._poison_jobs.ranks(idle=nobody), False
            )
        coming_for, coming = self._fetcher.asking
        found = []
        for group in groups:
            left = self._unblocker.pending + self._turns[group.queues].fetchers
            left += coming if group.queues[0] in coming_for else 0
            now = 0 if self._poison_jobs.alone else max(group.reserved and group.free(), group.free() - left)
            found.append((group.queues, now, max(0, group.asked() - now - left)))
        return Free(found, self._poison_jobs.ranks(idle=not self._held and not coming))

    def _reserve(self, places: set[int]) -> None:
        groups = enumerate(self._executor.groups, 1)
        theirs = {place for place, group in groups if self._turns[group.queues].fetchers}
        self._executor.reserve(places - theirs if self._state == "running" else ())

    def _make_way(self, wanted: bool, rate: str | None) -> None:
        if wanted is not self._poison_jobs.draining:
            self._poison_jobs.draining = wanted
            self._way_for = rate
            self._fetcher.wake()
            if wanted and rate:
                self._rates.wanted([rate], anew=True)

    # Jobs that come and go ------------------------------------------------------------------------------------------

    def _deliver(self, jobs: list[Job], let_in: bool = False, *, first: bool = False) -> None:
        if jobs and self._claims.void(jobs[0].claim):
            log.warning("%d jobs of a claim from before this worker was taken for dead are left to others", len(jobs))
            jobs = []
        for job in jobs:
            self._held[job.id] = job
        # A fetch was under way when we were told to take no more; or it brought poison jobs, which come one at a time.
        kept = self._poison_jobs.keep(jobs, idle=len(self._held) == len(jobs)) if self._state == "running" else []
        if len(kept) < len(jobs):
            self._give_back(set(jobs).difference(kept))
        for group, mine in self._by_pool(kept):
            group.adapt(group.prefetch // 2 if let_in else 0)
            self._executor.offer(group, mine, first=first)
        self._rates.slots_freed()  # it was the fetcher's turn

    def _by_pool(self, jobs: list[Job]) -> list[tuple[SlotGroup, list[Job]]]:
        """These jobs with the groups of the slots that they use."""
        groups = self._executor.groups
        if len(groups) == 1:
            return [(groups[0], jobs)] if jobs else []
        return [(group, mine) for group in groups if (mine := [job for job in jobs if job.queue in group.queues])]

    def _let_in(self, jobs: list[Job]) -> None:
        """Admits bring few at a time: they make no measure of how many to have at hand."""
        firsts = [job for job in jobs if not job.chained]
        if len(firsts) < len(jobs) and not self._claims.void(jobs[0].claim):
            chains = self._executor.chains.add(jobs)
            self._held.update((job.id, job) for chain in chains for job in chain)
            self._loop.call_later(LONGEST_SECONDS, self._shorten, chains)
        self._deliver(firsts, let_in=True)
        self._took(firsts)

    def _took(self, jobs: Iterable[Job]) -> None:
        """Lines have had slots of the groups of these jobs."""
        queues = {job.queue for job in jobs}
        for group in self._executor.groups:
            if queues.intersection(group.queues):
                self._turns[group.queues].taken()

    def _answered(self) -> None:
        """A fetch has been answered: what it has left is there for others."""
        self._unblocker.fetched()
        self._rates.slots_freed()

    def _start_rated(self, jobs: list[Job]) -> None:
        """They start before what waits at hand; one that cannot goes back when it would be too late."""
        if jobs:
            self._took(jobs)
            self._executor.reserve(())
            last = max(job.start_by or 0.0 for job in jobs)
            self._loop.call_later(max(0.0, last - monotonic()), self._take_back, jobs)
        self._unblocker.holding(jobs)
        way = self._poison_jobs.draining
        self._deliver(jobs, let_in=True, first=True)
        self._fetcher.wake() if way else self._fetcher.slots_freed()

    def _take_back(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            if (job.start_by or STARTED) > STARTED:  # its turn has not come
                found = [group.remove(job.id) for group in self._executor.groups]
                self._give_back([waiting for waiting in found if waiting is not None])

    def _rated(self, keys: Iterable[str]) -> None:
        self._rates.wanted(keys)
        self._sweep.keys_in_use()

    def _swept(self, keys: Iterable[str]) -> None:
        rates = [key for key in keys if key.startswith(RATE)]
        self._rates.swept(rates)
        self._unblocker.swept(set(keys).difference(rates))

    def _unblocked(self) -> None:
        self._fetcher.slots_freed()
        self._sweep.keys_in_use()

    def _written(self, jobs: Sequence[Job]) -> None:
        self._ended_jobs += len(jobs)
        for job in jobs:
            if self._held.get(job.id) is job:
                del self._held[job.id]
        self._progress.ended(jobs)
        self._unblocker.ended(self._go_on(jobs))
        if self._poison_jobs.draining or any([group.low() for group in self._executor.groups]):
            self._fetcher.slots_freed()
        self._rates.slots_freed()
        if self._poison_jobs.ended(jobs):
            self._fetcher.wake()

    def _go_on(self, ended: Sequence[Job]) -> Sequence[Job]:
        """Where another one comes after one of these in its chain, that has the lock now, and starts. The rest."""
        chains = self._executor.chains
        if not chains:
            return ended
        rest, started = [], []
        for job in ended:
            after = chains.next(job)
            if after is None:
                rest.append(job)
            else:
                self._unblocker.handed_on(job, after)
                started.append(after)
        for group, mine in self._by_pool(started):
            self._executor.offer(group, mine)
        return rest

    def _cut(self, jobs: Iterable[Job]) -> None:
        """These are not ours any more, and their locks, if they have any, not free: no job goes on after them."""
        for job in jobs:
            if job.lock_key is not None:
                self._unblocker.blocked_again(
                    job
                )  # again, if it was in a chain: a look may have come before it was there
                self._give_back(self._executor.chains.cut(job))

    def _shorten(self, chains: Iterable[Chain]) -> None:
        """What has not started of these goes back to its line: it was to be soon, and others may be more urgent."""
        self._give_back(self._executor.chains.shorten(chains))

    def _roomier(self) -> None:
        self._rates.slots_freed()
        self._fetcher.slots_freed()

    def _give_back(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            if job.chained:
                self._unblocker.blocked_again(job)
            self._completer.finish(job, RELEASED)
