"""Which services one worker has, what each is told about the others, and where they meet: the wiring of `worker`.

    enqueue -> row -NOTIFY-> notifier -wake-> fetcher -Job-> executor -Outcome-> completer -> row

The fetcher asks the executor's pools for their room and delivers jobs; the executor hands outcomes to the completer;
the heartbeat (a thread of its own) says that we live and watches the others; duties that nobody has to run
(promotion, rescue, pruning) run in whichever worker leads. Whom they ask for room, and tell of jobs that come and go,
is in `held_jobs`.

Nothing here starts, waits or ends: that is the life of a worker, in `worker`.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from pgqueue.client.middleware import declared, unstored
from pgqueue.client.tasks import Task, holding, scheduled
from pgqueue.database import embedded
from pgqueue.database.backoff import persist
from pgqueue.database.sessions import Link, Session
from pgqueue.worker.claims import Claims
from pgqueue.worker.complete.completer import Completer
from pgqueue.worker.complete.job_logger import with_lines
from pgqueue.worker.complete.outcome_sql import OutcomeSql
from pgqueue.worker.concurrency.declared_limits import DeclaredLimits, UndeclaredLimits, limits_of, rates_of
from pgqueue.worker.concurrency.rate_limiter import HANDED, RateLimiter
from pgqueue.worker.concurrency.sweep import SWEEP, Sweep
from pgqueue.worker.concurrency.unblocker import Unblocker
from pgqueue.worker.context import WorkerContext
from pgqueue.worker.fetch.fetcher import Fetcher
from pgqueue.worker.fetch.notifier import CONTROL, LED, PING_ANSWER_SECONDS, SCHEDULED, Notifier
from pgqueue.worker.fetch.poison_jobs import PoisonDrain
from pgqueue.worker.fetch.reconciler import Reconciler
from pgqueue.worker.held_jobs import HeldJobs
from pgqueue.worker.leader.election import Election
from pgqueue.worker.leader.pruner import Pruner
from pgqueue.worker.leader.scheduler import Scheduler
from pgqueue.worker.leader.ticks import CHANGED, Ticks
from pgqueue.worker.leader.unknown_tasks import UnknownTasks
from pgqueue.worker.liveness.heartbeat import Heartbeat, Identity
from pgqueue.worker.liveness.lease_guard import LeaseGuard
from pgqueue.worker.liveness.loop_monitor import BLOCKED_SECONDS, LoopMonitor
from pgqueue.worker.liveness.registration import enter
from pgqueue.worker.liveness.rescue import Rescue
from pgqueue.worker.run.cancellation import SIGNAL, Cancellation
from pgqueue.worker.run.executor import Executor
from pgqueue.worker.run.progress import Progress
from pgqueue.worker.run.serialization_retries import SerializationRetries
from pgqueue.worker.run.slots import SlotTurns, slot_groups
from pgqueue.worker.settings import Settings
from pgqueue.worker.transactions.handler_pool import HandlerPool
from pgqueue.worker.transactions.iteration import Iterations
from pgqueue.worker.transactions.transaction import TransactionServices
from pgqueue.worker.transactions.transactional import Transactional

log = logging.getLogger("pgqueue")


class Services(HeldJobs, ABC):
    """The services of one worker, made by `_build`, and the callbacks through which they meet."""

    _link: Link

    def __init__(self, settings: Settings, tasks: Mapping[str, Task[..., Any]]) -> None:
        self.worker_id = 0
        """This worker's id in the database; another one after it was taken for dead and came back."""
        super().__init__(settings)
        self._tasks = tasks
        self._limits, self._paces = limits_of(tasks.values()), rates_of(tasks.values())

    @abstractmethod
    def quiet(self) -> None:
        """Take no more jobs."""

    @abstractmethod
    def _serve(self, service: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Let a service run for as long as we live."""

    # Building --------------------------------------------------------------------------------------------------------

    def _check_and_register(self) -> None:
        self.worker_id = enter(self._link, self.settings, self._tasks)

    def _build(self) -> None:
        settings = self.settings
        self._take = Session(self._link, "fetch", lambda: self._heartbeat.listed())
        self._give = Session(self._link, "complete", lambda: self._heartbeat.listed(0.0))
        self._keys = Session(self._link, "admit", lambda: self._heartbeat.listed())
        self._pace = Session(self._link, "rates", lambda: self._heartbeat.listed())
        self._endings = OutcomeSql(settings.schema, settings.version_tag, settings.notify, holding=holding(self._tasks))
        self._completer = Completer(
            self._give,
            lambda: self.worker_id,
            self._endings,
            written=self._written,
            kept=self._cut,
        )
        self._claims = claims = Claims()
        self._unblocker = Unblocker(
            self._keys,
            lambda: self.worker_id,
            claims=claims,
            tasks=self._tasks,
            slots=self._slots,
            deliver=self._let_in,
            done=self._unblocked,
            in_doubt=lambda: self._reconciler.doubt(),
            notify=settings.notify,
            rated=self._rated,
        )
        self._rates = RateLimiter(
            self._pace,
            lambda: self.worker_id,
            claims=claims,
            tasks=self._tasks,
            free=self._free,
            reserve=self._reserve,
            deliver=self._start_rated,
            in_doubt=lambda: self._reconciler.doubt(),
            notify=settings.notify,
        )
        self._sweep = Sweep(self._take, found=self._swept, leads=self._leads)
        self._declarer = DeclaredLimits(
            self._take,
            limits=self._limits,
            rates=self._paces,
            changed=self._sweep.sweep_soon,
            notify=settings.notify,
        )
        self._warner = UndeclaredLimits(self._take)
        self._election = Election(self._link)
        self._fetcher = Fetcher(
            self._take,
            lambda: self.worker_id,
            tasks=self._tasks,
            shares=self._shares,
            deliver=self._deliver,
            poison=lambda: self._poison_jobs.ranks(idle=not self._held),
            live_workers=lambda: 1 + self._heartbeat.judge.live(),
            in_doubt=lambda: self._reconciler.doubt(),
            poll=settings.poll,
            claims=claims,
            blocked=self._unblocker.blocked,
            holding=self._unblocker.granted,
            answered=self._answered,
            beside=self._election.statements,
            fronts=self._unblocker.waiter_cursors,
        )
        slots = slot_groups(settings.queues, settings.concurrency)
        hungry, fetches = self._fetcher.hungry, lambda: self._fetcher.fetches
        self._turns = {pool.queues: SlotTurns(fetches, partial(hungry, pool.queues)) for pool in slots}
        self._lender = HandlerPool(
            self._link, sum(pool.slots for pool in slots), lambda: self._heartbeat.listed(), size=settings.pool_size
        )
        around = TransactionServices(
            self._lender,
            self._endings,
            lambda: self.worker_id,
            lambda job, **how: self._executor.uninterruptible(job, **how),
            lambda job, **how: self._executor.auninterruptible(job, **how),
            lambda job: self._executor.interruptible(job),
            lambda job, **how: self._executor.shield(job, **how),
            lambda job: self._executor.checkpoint(job),
            self._settled_if_next,
        )
        self._transactions = transactions = Transactional(around)
        iterations = Iterations(transactions, self._endings, lambda job: self._executor.checkpoint(job))
        self._progress = Progress(
            self._take,
            lambda: self.worker_id,
            holds=lambda job: self._held.get(job.id) is job,
            iterated=iterations.drop,
        )
        self._means = WorkerContext(
            transactions,
            iterations,
            self._endings,
            lambda: self.worker_id,
            stops=lambda job: self._executor.checkpoint(job),
            stopping=lambda job: self._executor.stopping(job),
            says=self._progress.report,
        )
        hooks = with_lines(declared())
        self._lost_lease = LeaseGuard(
            settings.lease,
            last_beat=lambda: self._heartbeat.last_beat,
            stop=lambda job, outcome: self._executor.interrupt_run(job, outcome),
        )
        self._executor = Executor(
            slots,
            self._lost_lease.guarded(hooks.around(transactions.transactional(unstored(self._tasks)))),
            finish=hooks.finishing(self._completer.finish),
            low=self._roomier,
            half_lost=self.quiet,
            means=self._means,
            aborts=SerializationRetries(self._give, lambda: self.worker_id, version_tag=settings.version_tag),
        )
        self._signals = Cancellation(self._take, lambda: self.worker_id, self._held.__len__, self._executor.interrupt)
        self._notifier = Notifier(
            replace(self._link, dsn=embedded.resolve(settings.listen_dsn or settings.dsn)),
            list(settings.queues),
            self._election,
            heard=self._heard,
            listed=lambda: self._heartbeat.listed(PING_ANSWER_SECONDS),
        )
        self._ticks = Ticks(
            self._take,
            lambda: self.worker_id,
            declared=scheduled(self._tasks.values()),
            notify=settings.notify,
            leads=self._leads,
        )
        self._scheduler = Scheduler(self._take, notify=settings.notify, leads=self._leads, overdue=self._ticks.overdue)
        self._rescue = Rescue(self._take, notify=settings.notify, rescued=self._rescued, acted=self._election.try_now)
        self._reconciler = Reconciler(
            self._take,
            lambda: self.worker_id,
            settled=lambda: claims.settled,
            knows=self._knows,
            notify=settings.notify,
        )
        self._isolation = PoisonDrain(
            self._take,
            list(settings.queues),
            self._tasks,
            leads=self._leads,
            asked=lambda: self._poison_jobs.asked,
            make_way=self._make_way,
        )
        self._unknown_tasks = UnknownTasks(
            self._take,
            lambda: self.worker_id,
            fail_after=settings.fail_unknown,
            version_tag=settings.version_tag,
            notify=settings.notify,
            ended=self._sweep.sweep_soon,
        )
        self._maintenance = Pruner(self._take, leads=self._leads, also=self._leftovers)
        self._pulse = LoopMonitor(self._loop, min(BLOCKED_SECONDS, settings.lease / 3))
        self._heartbeat = self._new_heartbeat()

    def _new_heartbeat(self) -> Heartbeat:
        call = self._loop.call_soon_threadsafe
        return Heartbeat(
            self._link,
            self.worker_id,
            self.settings.lease,
            state=lambda: self._state,
            running=lambda: list(self._executor.running),
            lost=lambda: self._executor.lost,
            sessions=self._identities,
            dead=lambda dead: call(self._seen_dead, dead),
            declared_dead=lambda: call(self._declared_dead),
            again=lambda: call(self._fetcher.slots_freed),
            pulse=self._pulse,
        )

    # What is heard and looked for ------------------------------------------------------------------------------------

    def _heard(self, channel: str, payload: str) -> None:
        if channel == SCHEDULED and payload == CHANGED:
            self._ticks.wake()
        elif channel == SCHEDULED:
            self._scheduler.wake()
        elif channel == LED:
            self._scheduler.wake()
            self._ticks.wake()
            self._sweep.wake()
            self._maintenance.wake()
        elif channel == CONTROL and payload == SIGNAL:
            self._signals.wake()
        elif channel == CONTROL and payload == SWEEP:
            self._sweep.sweep_soon()
        elif channel == CONTROL and payload.startswith(HANDED):
            self._rates.handed_on(payload.removeprefix(HANDED))
        elif channel == CONTROL or not channel:
            self._signals.wake()
            self._sweep.sweep_soon()
            self._fetcher.wake()
            self._scheduler.wake()
            self._ticks.wake()
        else:
            self._fetcher.wake(zero=payload == "zero")

    async def _leftovers(self) -> None:
        await self._rescue.strays()
        await self._signals.settle()
        await self._progress.sweep()
        if self._leads():
            await self._warner.look()
        await self._unknown_tasks.look()

    def _leads(self) -> bool:
        """Without a connection for LISTEN nobody can hold the leader's lock: then everybody does the duties."""
        return self._election.leads or not self.settings.listen

    def _settled_if_next(self, is_async: bool) -> int | None:
        """The claims that have been answered, if a transactional job of this kind is about to run."""
        for pool in self._executor.groups:
            task = pool.next()
            if task is not None and task.transactional and task.is_async is is_async:
                return self._claims.settled
        return None

    def _identities(self) -> list[Identity]:
        self._transactions.cut_overdue()
        found = [each.identity for each in (self._take, self._give, self._keys, self._pace, self._notifier)]
        return [identity for identity in found if identity is not None] + self._lender.identities()

    # Death, ours and others' -----------------------------------------------------------------------------------------

    def _rescued(self) -> None:
        self._fetcher.wake(zero=True)
        self._sweep.sweep_soon()

    def _seen_dead(self, dead: list[tuple[int, int]]) -> None:
        self._serve(self._rescue.seen(dead, leads=self._leads()), "rescue")

    def _declared_dead(self) -> None:
        """Others took us for dead: our jobs are theirs now. Begin anew under another id; late outcomes are fenced."""
        if self._state != "stopped":
            log.error(
                "worker %d was taken for dead (no sign of life for its lease); its jobs run elsewhere", self.worker_id
            )
            self._lost_lease.lost()
            self._claims.void_all()  # one may be under way still, and its answer come when we have another id
            dropped = self._executor.hand_back()
            for job in dropped:
                self._held.pop(job.id, None)
            self._poison_jobs.ended(dropped)
            self._unblocker.ended(dropped)
            self._serve(self._register_anew(), "register")

    async def _register_anew(self) -> None:
        old = self.worker_id
        register = partial(asyncio.to_thread, self._check_and_register)
        await persist(register, name="register", until=lambda: self.worker_id != old)
        self._heartbeat = self._new_heartbeat()
        self._heartbeat.start()
        self._fetcher.wake(zero=True)
        self._ticks.wake()

    def _knows(self, job_id: int, claim: int) -> bool:
        job = self._held.get(job_id)
        return job is not None and job.claim == claim
