"""The services of one worker: what each is made of, and which calls which.

    enqueue -> row -NOTIFY-> notifier -wake-> fetcher -Job-> executor -Outcome-> completer -> row

- The flow: the fetcher asks `capacity` for room and delivers jobs to `held_jobs`. The executor runs them, and hands
  their outcomes to the completer.
- Concurrency: the unblocker and the rate limiter bring jobs that waited for a key; the sweep finds what they missed.
- Handlers: what stands behind a handler's `Job`, and the chain of layers around the handler.
- Duties: what is done now and then, by the worker that leads or by each. `_table` has them all.
- Liveness: the heartbeat, a thread of its own, says that this worker lives and watches the others.

This is the only module that knows two of these. A service calls another one by a method that it was given here, or
through `held_jobs` and `capacity`, which ask here. When a service starts and ends is for `worker`.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator
from copy import deepcopy
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any

from pgqueue.client.middleware import RESULTS, declared, wrapped
from pgqueue.client.tasks import holding, scheduled
from pgqueue.database import embedded, forks
from pgqueue.database.backoff import described, is_loss, one_line, persist, transient, within
from pgqueue.database.row_errors import refuses_move
from pgqueue.database.sessions import Identity, Session
from pgqueue.database.statements import Statement
from pgqueue.jobs.job import Job
from pgqueue.jobs.keys import NODE
from pgqueue.jobs.outcomes import Outcome
from pgqueue.jobs.totals import Numbers
from pgqueue.manual import Symptom, at_night
from pgqueue.worker.capacity import Capacity
from pgqueue.worker.complete.completer import Completer
from pgqueue.worker.complete.job_logger import with_lines
from pgqueue.worker.complete.outcome_sql import OutcomeSql
from pgqueue.worker.concurrency.declared_limits import DeclaredLimits, UndeclaredLimits
from pgqueue.worker.concurrency.rate_limiter import HANDED, RateLimiter
from pgqueue.worker.concurrency.sweep import SWEEP, Sweep
from pgqueue.worker.concurrency.unblocker import Unblocker
from pgqueue.worker.context import LoopServices, WorkerContext
from pgqueue.worker.counters import Counters
from pgqueue.worker.duties import Duties, Duty
from pgqueue.worker.fetch import reconciler
from pgqueue.worker.fetch.fetcher import Fetcher
from pgqueue.worker.fetch.glance import TOLD
from pgqueue.worker.fetch.notifier import CONTROL, LED, PING_ANSWER_SECONDS, SCHEDULED, Notifier
from pgqueue.worker.fetch.notify_watch import HALF, NotifyWatch
from pgqueue.worker.fetch.poison_jobs import PoisonDrain, PoisonJobs
from pgqueue.worker.fetch.reconciler import Reconciler
from pgqueue.worker.flows.releaser import Releaser
from pgqueue.worker.held_jobs import HeldJobs
from pgqueue.worker.leader import depth, history_fold, pruner, scheduler
from pgqueue.worker.leader.bulks import BULK, Bulks
from pgqueue.worker.leader.depth import Depth
from pgqueue.worker.leader.election import Election
from pgqueue.worker.leader.history_fold import HistoryFold
from pgqueue.worker.leader.lead_watch import LeadWatch
from pgqueue.worker.leader.pruner import Pruner
from pgqueue.worker.leader.scheduler import Scheduler
from pgqueue.worker.leader.ticks import CHANGED, Ticks
from pgqueue.worker.leader.unknown_tasks import UnknownTasks
from pgqueue.worker.liveness.blocked_loop import BlockedLoop
from pgqueue.worker.liveness.heartbeat import LISTED_SECONDS, Heartbeat
from pgqueue.worker.liveness.lease_guard import LeaseGuard
from pgqueue.worker.liveness.loop_monitor import BLOCKED_SECONDS, LoopMonitor
from pgqueue.worker.liveness.registration import entered
from pgqueue.worker.liveness.renewal import Renewal
from pgqueue.worker.liveness.rescue import Rescue
from pgqueue.worker.liveness.stacks import STACK, Stacks
from pgqueue.worker.run.cancellation import SIGNAL, Cancellation
from pgqueue.worker.run.executor import Executor
from pgqueue.worker.run.forked_child import ForkGuard, guarded
from pgqueue.worker.run.job_batches import UNSTOPPED, JobBatches
from pgqueue.worker.run.node_results import NodeResults
from pgqueue.worker.run.progress import Progress
from pgqueue.worker.run.running_jobs import RunningJobs
from pgqueue.worker.run.serialization_retries import SerializationRetries
from pgqueue.worker.run.slots import SlotGroup, slot_groups
from pgqueue.worker.run.threads import START_SECONDS
from pgqueue.worker.state import WorkerState
from pgqueue.worker.transactions.commit import TransactionServices
from pgqueue.worker.transactions.handler_connection import EARLY_SECONDS
from pgqueue.worker.transactions.handler_pool import HandlerPool
from pgqueue.worker.transactions.iteration import Iterations
from pgqueue.worker.transactions.transactional import Transactional

log = logging.getLogger("pgqueue")

START = "start"
"""Of the session that registers this worker anew."""

Serve = Callable[[Coroutine[Any, Any, None], str], object]
"""Lets a service run, under a name, for as long as the worker lives."""


class Services:
    """The services of a worker that has an id. `quiet` lets the worker take no more jobs. Made on the loop."""

    def __init__(self, state: WorkerState, *, serve: Serve, quiet: Callable[[], None]) -> None:
        self.state = state
        state.doubt = asyncio.Event()
        self.quiet = quiet
        self._serve = serve
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        forks.end_loop_in_children(self._loop)
        settings = state.settings
        self.running = RunningJobs(slot_groups(settings.queues, settings.concurrency, settings.batch_most))
        self.capacity = Capacity(self)
        self.held_jobs = HeldJobs(self, self.capacity)
        self.blocked_loop = BlockedLoop(
            state,
            LoopMonitor(self._loop, self.running, min(BLOCKED_SECONDS, state.settings.lease / 3)),
            take_out=self.held_jobs.take_out_waiting,
            give_back=self.held_jobs.give_back,
            step_down=self._step_down,
        )
        self.heartbeat = self._new_heartbeat()
        self._registering = asyncio.Lock()
        self._left = 0
        """The id under which this worker has signed off, or is about to."""
        self._make_flow()
        self._make_concurrency()
        self._make_handlers()
        self._make_duties()

    # Making ----------------------------------------------------------------------------------------------------------

    def _make_flow(self) -> None:
        state, link, settings = self.state, self.state.link, self.state.settings
        self.fetch_session = Session(link, "fetch", self.listed)
        self.complete_session = Session(link, "complete", partial(self.listed, 0.0))
        self.housekeeping_session = Session(link, "housekeeping", partial(self.listed, 0.0))
        self.outcome_sql = OutcomeSql(
            settings.schema, settings.version_tag, settings.notify, holding=holding(state.tasks)
        )
        self.counters = Counters(self.housekeeping_session, self.fetch_session, state, self.running)
        self.completer = Completer(
            self.complete_session,
            state,
            self.outcome_sql,
            written=self.held_jobs.written,
            kept=self.held_jobs.kept_keys,
            goes_on=self.held_jobs.chains.goes_on,
        )
        self.completer.counted = self.counters.ended
        self.poison_jobs = PoisonJobs()
        self.election = Election(link, held=settings.listen)
        self.reconciler = Reconciler(self.fetch_session, state, gone=self.held_jobs.gone)
        self.unblock_session = Session(link, "unblock", self.listed)
        self.unblocker = Unblocker(
            self.unblock_session,
            state,
            rooms=self.capacity.to_unblock,
            deliver=self.held_jobs.unblocked,
            done=self.held_jobs.keys_asked,
            rates_wanted=self.held_jobs.rates_wanted,
        )
        self.fetcher = Fetcher(self.fetch_session, state, self.capacity, self.held_jobs, self.unblocker, self._beside)
        self.notifier = Notifier(
            replace(link, dsn=embedded.resolve(settings.listen_dsn or settings.dsn)),
            list(settings.queues),
            self.election,
            heard=self._heard,
            listed=self._listed_to_listen,
            idle=settings.idle,
        )
        self.notify_watch = NotifyWatch(
            self.fetch_session, state, told_nothing=self._told_nothing, leads=self.election.leads
        )

    def _make_concurrency(self) -> None:
        state, session = self.state, self.fetch_session
        self.rates_session = Session(state.link, "rates", self.listed)
        self.rate_limiter = RateLimiter(
            self.rates_session,
            state,
            openings=self.capacity.to_start,
            reserve=self.capacity.reserve,
            deliver=self.held_jobs.start_rated,
        )
        told = state.settings.listen and state.settings.notify
        state.pace.hears = self._hears
        self.release_session = Session(state.link, "release", partial(self.listed, 0.0))
        self.releaser = Releaser(self.release_session, state)
        self.sweep = Sweep(
            session,
            found=self.held_jobs.swept,
            swept=self.releaser.swept,
            leads=self.election.leads,
            told=told,
        )
        self.declared_limits = DeclaredLimits(session, state, changed=self.sweep.sweep_soon)
        self.undeclared_limits = UndeclaredLimits(self.housekeeping_session)
        self.poison_drain = PoisonDrain(
            session, state, self.poison_jobs, leads=self.election.leads, drain=self.capacity.drain
        )

    def _make_handlers(self) -> None:
        state, running = self.state, self.running
        hooks = guarded(with_lines(declared()))

        def replaced(before: Job, after: Job) -> None:
            self.held_jobs.replaced(before, after)
            self.counters.handed_on(before, after)
            hooks.finished(before, UNSTOPPED)

        self.batches = JobBatches(
            state,
            running,
            offer=self._offer_first,
            wake=self.held_jobs.slots_freed,
            replaced=replaced,
            began=hooks.begin,
        )
        self.finish = self.batches.finishing(hooks.finishing(self.completer.finish))
        self.leaves = hooks.left
        self.handler_pool = HandlerPool(state.link, running.slots, self.listed, size=state.settings.pool_size)
        self.transactional = Transactional(
            TransactionServices(self.handler_pool, self.outcome_sql, state, running, self._begin_early)
        )
        iterations = Iterations(self.transactional, self.outcome_sql, running.checkpoint)
        self.progress = Progress(self.fetch_session, self.housekeeping_session, state, iterated=iterations.drop)
        self.context = WorkerContext(
            state,
            running,
            self.transactional,
            iterations,
            self.outcome_sql,
            LoopServices(self.progress.report, NodeResults(self.housekeeping_session, self._loop)),
        )
        self.lease_guard = LeaseGuard(state.settings.lease, last_beat=self._last_beat, stop=self._stop_run)
        self.batches.context = self.context
        others = (self.batches, RESULTS, self.transactional, hooks, self.lease_guard)
        layers = (ForkGuard(others), *others)
        self.executor = Executor(
            running,
            {name: wrapped(task, *layers) for name, task in state.tasks.items()},
            self.context,
            SerializationRetries(self.complete_session, state),
            finish=self.finish,
            slots_freed=self.held_jobs.slots_freed,
        )
        self.cancellation = Cancellation(
            self.fetch_session, self.housekeeping_session, state, interrupt=self.held_jobs.interrupt
        )

    def _make_duties(self) -> None:
        state, session, leads, spare = self.state, self.fetch_session, self.election.leads, self.housekeeping_session
        self.ticks = Ticks(session, state, declared=scheduled(state.tasks.values()), leads=leads)
        self.scheduler = Scheduler(session, state, leads=leads, overdue=self.ticks.overdue, promoted=self._promoted)
        self.lead_watch = LeadWatch(session, leads=leads, free=self.election.statements)
        self.rescue = Rescue(session, notify=state.settings.notify, rescued=self._rescued, acted=self.election.try_now)
        self.unknown_tasks = UnknownTasks(spare, state, ended=self.sweep.sweep_soon)
        self.history_fold = HistoryFold(spare)
        self.pruner = Pruner(spare)
        self.depth = Depth(spare, leads=leads)
        self.bulks = Bulks(spare, state, leads=leads)
        self.duties = Duties(self._table(), spare, leads=leads, role=lambda: session.role, rests=state.pace.rests)
        state.duties = self.duties.said
        self.renewal = Renewal(
            state,
            early=EARLY_SECONDS,
            unwritten=self.completer.unwritten,
            renew=self._renew,
            renewed=self._renewed,
        )

    def _table(self) -> Iterator[Duty]:
        """The duties of this worker. Those without `keeps` share the session that claims: jobs wait for them.

        Each worker for itself; then the leader's that jobs wait for, in bounded batches; then housekeeping.
        """
        keeps = partial(Duty, housekeeping=True, rests=True)
        yield Duty(
            "reconcile", self.reconciler.round, others=None, first=reconciler.EVERY_SECONDS, woken=self.state.doubt
        )
        yield Duty("cancellation", self.cancellation.round, others=None, woken=self.cancellation.woken)
        yield Duty("notify_queue", self.notify_watch.round, others=None, woken=self.notify_watch.woken)
        yield Duty("poison_jobs", self.poison_drain.round, others=None)
        yield Duty("sweep", self.sweep.round, others=None, woken=self.sweep.woken, rests=True)
        yield Duty("ticks", self.ticks.round, others=None, woken=self.ticks.woken)

        yield Duty("lead_watch", self.lead_watch.round, others=None, woken=self.lead_watch.woken)
        yield Duty("promotion", self.scheduler.round, others=4 * scheduler.LOOK_SECONDS, woken=self.scheduler.woken)
        yield Duty("strays", self.rescue.strays, pruner.ROUND_SECONDS, woken=self.rescue.woken, rests=True)

        yield Duty("counts", self.counters.round, others=None, housekeeping=True)
        yield keeps("depth", self.depth.round, first=depth.FIRST_SECONDS)
        yield keeps("history", self.history_fold.round, history_fold.ROUND_SECONDS)
        yield Duty("operations", self.bulks.round, woken=self.bulks.woken, housekeeping=True)
        yield keeps("rings", self.pruner.rings, pruner.ROUND_SECONDS)
        yield keeps("late_cancellation", self.cancellation.settle, pruner.ROUND_SECONDS)
        yield keeps("unknown_tasks", self.unknown_tasks.look, pruner.ROUND_SECONDS)
        tidies = partial(keeps, every=pruner.ROUND_SECONDS, first=pruner.TIDY_SECONDS)
        yield tidies("progress", self.progress.sweep)
        yield tidies("cursors", self.progress.sweep_cursors)
        yield tidies("unique_keys", self.pruner.keys)
        yield tidies("flows", self.pruner.flows)
        yield tidies("kept_of_flows", self.pruner.kept_of_flows)
        yield tidies("steps", self.pruner.steps)
        yield from (tidies(what, partial(self.pruner.forget, what)) for what in pruner.FORGOTTEN)
        yield keeps("undeclared", self.undeclared_limits.look, pruner.ROUND_SECONDS, others=inf)

    def _new_heartbeat(self) -> Heartbeat:
        stacks = Stacks(self.state, self.running, self._loop, self._thread)
        return Heartbeat(
            self.state,
            self.running,
            self.blocked_loop,
            self,
            sessions=self._identities,
            stacks=stacks,
        )

    # What the parts share --------------------------------------------------------------------------------------------

    async def listed(self, most: float = LISTED_SECONDS) -> bool:
        """Wait, at most so many seconds, until a heartbeat has told of the sessions that there are now."""
        return await self.heartbeat.listed(most)

    async def _listed_to_listen(self) -> bool:
        """`listed` for the notifier. While the worker leaves, no heartbeat is sent, which is no loss of the database:
        then it waits to be cancelled."""
        listed = await self.listed(PING_ANSWER_SECONDS)
        if not listed and self.state.phase == "stopped":
            await asyncio.Event().wait()
        return listed

    def _step_down(self) -> bool:
        return self.notifier.step_down()

    def _last_beat(self) -> float:
        return self.heartbeat.last_beat

    def _stop_run(self, job: Job, outcome: Outcome) -> None:
        self.executor.interrupt_run(job, outcome)

    def _offer_first(self, group: SlotGroup, jobs: list[Job]) -> None:
        self.held_jobs.offer(group, jobs, first=True)

    def _begin_early(self, is_async: bool) -> int | None:
        """The claims that have been answered, if a transactional job of this kind is about to run; else None."""
        for group in self.running.groups:
            task = group.next()
            if task is not None and task.transactional and task.is_async is is_async:
                return self.state.claims.settled
        return None

    def _identities(self) -> dict[Identity, int | None]:
        """The sessions that a rescue of this worker would have to end, each with the job that has its transaction
        there, if one has. In the heartbeat's thread."""
        self.transactional.cut_overdue()
        found = [*(session.identity for session in self._sessions()), self.notifier.identity]
        of_jobs = self.transactional.jobs_by_session()
        known = [identity for identity in found if identity is not None]
        known += self.handler_pool.identities() + self.handler_pool.stuck()
        return {identity: of_jobs.get(identity) for identity in known}

    def _sessions(self) -> Iterable[Session]:
        yield from (self.fetch_session, self.complete_session, self.unblock_session, self.rates_session)
        yield from (self.housekeeping_session, self.release_session)

    async def close_sessions(self) -> None:
        """Close the connections of all services."""
        for session in self._sessions():
            await session.close()
        await self.handler_pool.close()

    def numbers(self) -> Numbers:
        """What this worker has done since it began, and what its slots do now. On the loop."""
        running, totals = self.running, self.counters.totals()
        totals.claims, totals.flushes = deepcopy(self.fetcher.claim_times), deepcopy(self.completer.flush_times)
        totals.fenced, totals.rescued = self.completer.fenced, self.rescue.jobs
        totals.swept_nodes = self.releaser.found_by_sweep
        totals.lost_slots = running.lost_ever
        busy, lost = len(running.runs), running.lost
        slots = {"busy": busy, "free": max(0, running.slots - busy - lost), "lost": lost}
        return Numbers(totals, slots, self.election.leads() and self.state.phase in ("running", "quiet"))

    # What is heard ---------------------------------------------------------------------------------------------------

    def _heard(self, channel: str, payload: str) -> None:
        """A notification came; with no channel: the notifier listens, and what came before was not heard."""
        if channel not in ("", LED):  # not a new LISTEN: a database that has slept ends each
            self.state.pace.stirred()
        if channel == SCHEDULED:
            (self.ticks if payload == CHANGED else self.scheduler).wake()
            self.lead_watch.wake()
        elif channel == LED:
            for service in (self.scheduler, self.ticks, self.sweep):
                service.wake()
            self.duties.led()
        elif channel == CONTROL and payload == SIGNAL:
            self.cancellation.wake()
        elif channel == CONTROL and payload == BULK:
            self.bulks.wake()
        elif channel == CONTROL and payload == STACK:
            self.heartbeat.beat_soon()
        elif channel == CONTROL and payload == SWEEP:
            self.sweep.sweep_soon()
        elif channel == CONTROL and payload.startswith(NODE):
            if self.election.leads():
                self.releaser.told(payload)
        elif channel == CONTROL and payload.startswith(HANDED):
            self.rate_limiter.handed_on(payload.removeprefix(HANDED))
        elif channel == CONTROL or not channel:
            if not channel:  # the listener's session is a new one: the server may have forgotten claims
                self.state.in_doubt()
            self._told_nothing()
            self.fetcher.wake()
        elif payload in TOLD:
            self.fetcher.told(channel, TOLD[payload])
        else:
            self.fetcher.wake(zero=payload == "zero")

    def _hears(self) -> bool:
        """Whether notifications are known to come."""
        return self.election.entered and self.state.settings.notify and self.notify_watch.usage < HALF

    def _told_nothing(self) -> None:
        """Notifications may have been lost, or left out: what sleeps until it is told looks. The fetcher polls."""
        self.cancellation.wake()
        self.sweep.sweep_soon()
        self.scheduler.wake()
        self.ticks.wake()
        self.lead_watch.wake()

    def _beside(self) -> list[Statement[None]]:
        """What the fetcher sends beside its own statements."""
        return [*self.election.statements(), *self.scheduler.statements(), *self.notify_watch.statements()]

    def _promoted(self) -> None:
        """Jobs have become available: their notification may not be heard here."""
        if not self.election.entered or not self.state.settings.notify:
            self.fetcher.wake()

    def _rescued(self) -> None:
        """Jobs of a dead worker are available again, behind the watermark too."""
        self.state.pace.stirred()
        self.fetcher.wake(zero=True)
        self.sweep.sweep_soon()
        self.releaser.rescued()

    # Death, of this worker and of others: told by the heartbeat, in its thread ---------------------------------------

    def workers_died(self, dead: list[tuple[int, int]]) -> None:
        """Rescue the jobs of these workers."""
        self._loop.call_soon_threadsafe(self._rescue, dead)

    def declared_dead(self, worker_id: int) -> None:
        """Begin anew under another id: the jobs that were held are other workers' now. Late outcomes are fenced."""
        self._loop.call_soon_threadsafe(self._begin_anew, worker_id)

    def punctual_again(self) -> None:
        """Jobs may be taken again."""
        self._loop.call_soon_threadsafe(self.fetcher.slots_freed)

    def reconnected(self) -> None:
        """The server may have forgotten claims, and have jobs again that were taken."""
        self._loop.call_soon_threadsafe(self.state.in_doubt)
        self._loop.call_soon_threadsafe(self.fetcher.wake)

    def probed(self, head: int, snapshot: str, usage: float, sent: float) -> None:
        """A heartbeat has asked whether anything has happened to jobs."""
        self._loop.call_soon_threadsafe(self._probed, head, snapshot, usage, sent)

    def _probed(self, head: int, snapshot: str, usage: float, sent: float) -> None:
        self.state.pace.beat(sent)
        self.notify_watch.heard(usage)
        self.depth.heard(head)
        self.fetcher.probed(head, snapshot, sent)

    def _rescue(self, dead: list[tuple[int, int]]) -> None:
        self._serve(self.rescue.seen(dead, leads=self.election.leads()), "rescue")

    def _begin_anew(self, worker_id: int) -> None:
        if self.state.phase != "stopped" and worker_id != self._left:
            log.error(
                "worker %d was taken for dead (no sign of life for its lease); its jobs run elsewhere; see %s",
                worker_id,
                at_night(Symptom.WORKERS_RESTART),
            )
            self.lease_guard.lost()
            self.held_jobs.lose()
            self._serve(self._register_anew(worker_id), "register")

    async def _register_anew(self, old: int) -> None:
        async with self._registering:
            if self.state.id == old:
                await persist(self._register, name="register", until=lambda: self.state.id != old, past_data=True)
                self.heartbeat = self._new_heartbeat()
                await self._start_heartbeat()
        self.fetcher.wake(zero=True)
        self.ticks.wake()

    async def _start_heartbeat(self) -> None:
        """Start its thread off the loop: where memory is at its limit this may never return."""
        if not await within(asyncio.to_thread(self.heartbeat.start), START_SECONDS):
            raise RuntimeError(f"the thread of the heartbeat did not begin within {START_SECONDS:g} s")

    async def _register(self) -> None:
        outage = self.state.link.outage
        await asyncio.sleep(outage.pause(START))
        try:
            self.state.id = await entered(self.state)
        except Exception as error:
            if is_loss(error):
                outage.lost(START, error)
            raise
        outage.answered(START)

    # Another id, in order --------------------------------------------------------------------------------------------

    async def leave(self) -> None:
        """Hand back the rows of this worker's id that are not known here, and delete its row.

        A worker that still has jobs leaves its row for rescue."""
        await self.reconciler.reconcile()
        if not await self._leave():  # a claim was committed in between, or handlers did not stop
            await self.reconciler.reconcile()
            await self._leave()
        await self.reconciler.reconcile()

    async def _leave(self) -> bool:
        """Delete the row of this worker's id; if the application keeps it, leave it as that of a dead worker. Whether
        that is done."""
        link, mine = self.state.link, self.state.id
        try:
            [left] = await self.fetch_session.run(link.statement("registration_leave", worker_id=mine))
        except Exception as error:
            if not refuses_move(error):
                raise
            log.warning(
                "the row of worker %d cannot be deleted, and stays as that of a dead one: %s", mine, described(error)
            )
            [left] = await self.fetch_session.run(link.statement("registration_retire", worker_id=mine))
        return bool(left)

    async def _renew(self) -> None:
        """Sign off, and register anew; no job is held, and no claim can begin (see `claims`)."""
        async with self._registering:
            self._left = old = self.state.id
            await asyncio.to_thread(self.heartbeat.stop)
            try:
                await self.leave()
            except Exception as error:
                if not transient(error):
                    raise
                log.warning("worker %d could not sign off: %s; rescue will notice", old, one_line(error))
            await persist(self._register, name="register", until=lambda: self.state.id != old, past_data=True)
            self.state.claims.begin_anew()
            self.completer.begin_anew()
            self.heartbeat = self._new_heartbeat()
            await self._start_heartbeat()
            await self.listed()

    def _renewed(self) -> None:
        """What slept while no jobs were taken looks."""
        self._told_nothing()
        self.fetcher.wake()
