"""One worker process: nests the services, and is the only place where they meet.

    enqueue -> row -NOTIFY-> notifier -wake-> fetcher -Job-> executor -Outcome-> completer -> row

The fetcher asks the executor's pools for their room and delivers jobs; the executor hands outcomes to the completer;
the heartbeat (a thread of its own) says that we live and watches the others; duties that nobody has to run
(promotion, rescue, pruning) run in whichever worker leads. `_held` is what we have claimed and not yet written down:
the truth is in the database, and reconciliation hands back what we do not know of.

Three connections when idle: fetch (with the duties), listen, beat; the completer opens the fourth at its first outcome.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import Any

from pgqueue import embedded
from pgqueue.completer import Completer
from pgqueue.executor import Executor
from pgqueue.fetcher import UNWRITTEN_MOST, Fetcher, Share
from pgqueue.heartbeat import Heartbeat, Identity, enter
from pgqueue.isolation import Isolation
from pgqueue.job import Job
from pgqueue.lifespan import declared as declared_lifespan
from pgqueue.loops import persist, within
from pgqueue.maintenance import Maintenance
from pgqueue.notifier import CONTROL, LED, SCHEDULED, Notifier
from pgqueue.outcome import RELEASED
from pgqueue.pool import pools
from pgqueue.pulse import BLOCKED_SECONDS, Pulse
from pgqueue.reconciler import Reconciler
from pgqueue.rescue import Rescue
from pgqueue.scheduler import Scheduler
from pgqueue.sessions import Link, Session
from pgqueue.settings import by_name, settle
from pgqueue.signals import SIGNAL, Signals
from pgqueue.suspects import Suspects
from pgqueue.tasks import Task

log = logging.getLogger("pgqueue")

FLUSH_SECONDS = 10.0


class Worker:
    """A worker inside this process: takes jobs of its queues and runs them, until it is stopped.

    `queues` is a sequence of names, each with slots of its own if written `name:slots`; default: every queue an
    imported task names. `concurrency` is how many jobs run at once. `tasks` defaults to all that are declared.
    `lease` (seconds) is how long this worker may give no sign of life before its jobs are given to others; `poll`
    (seconds) how often it looks without being told. Jobs of any name are taken from its queues; one whose task is not
    imported here is put back.

    Raises NotConfigured without a DSN, SchemaMissing, SchemaBehind or SchemaTooNew when the database does not fit.

    >>> async with pgqueue.Worker(queues=["mail"], concurrency=20):
    ...     yield
    """

    def __init__(
        self,
        *,
        queues: Sequence[str] | None = None,
        concurrency: int = 10,
        tasks: Iterable[Task[..., Any]] | None = None,
        dsn: str | None = None,
        listen_dsn: str | None = None,
        schema: str | None = None,
        poll: float = 1.0,
        lease: float = 15.0,
        version_tag: str | None = None,
    ) -> None:
        self.worker_id = 0
        """This worker's id in the database; another one after it was taken for dead and came back."""
        self._tasks = by_name(tasks)
        self.settings = settle(
            self._tasks.values(),
            queues=queues,
            concurrency=concurrency,
            dsn=dsn,
            listen_dsn=listen_dsn,
            schema=schema,
            poll=poll,
            lease=lease,
            version_tag=version_tag,
        )
        self._state = "starting"
        self._stopping = False
        self._held: dict[int, Job] = {}
        self._suspects = Suspects()
        self._services: set[asyncio.Task[None]] = set()
        self._stack = AsyncExitStack()
        self._ended: asyncio.Future[None] | None = None

    # Life ------------------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Worker:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Check the schema, register, enter the lifespan and start the services."""
        self._loop = loop = asyncio.get_running_loop()
        self._ended = loop.create_future()
        dsn = await asyncio.to_thread(embedded.resolve, self.settings.dsn)
        self._link = Link(dsn, self.settings.schema, self.settings.prepare)
        await asyncio.to_thread(self._check_and_register)
        self._build()
        self._heartbeat.start()
        try:
            self._executor.resources = await self._stack.enter_async_context(declared_lifespan())
        except BaseException:
            await self._leave()
            raise
        self._state = "running"
        self._fetching = self._serve(self._fetcher.run(), "fetcher")
        services: list[Any] = [self._completer, self._scheduler, self._maintenance, self._reconciler, self._signals]
        for service in [*services, self._isolation, *([self._notifier] if self.settings.listen else [])]:
            self._serve(service.run(), type(service).__name__.lower())

    async def run(self) -> None:
        """Work until stopped, or quiet and everything that ran is written, or a service fails for good (raised)."""
        if self._ended is None:
            await self.start()
        assert self._ended is not None
        await asyncio.shield(self._ended)

    def quiet(self) -> None:
        """Take no more jobs, hand back those that have not started; `run` returns when what runs has ended."""
        if self._state == "running":
            self._state = "quiet"
            self._fetcher.quiet()
            self._give_back(self._executor.hand_back())
            self._serve(self._drain(), "drain")

    async def _drain(self) -> None:
        await asyncio.wait([self._fetching])
        await self._executor.idle()
        await self._completer.flushed()
        if not self._stopping:  # else it goes on until we have left
            self._end()

    def _end(self) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    def completing(self) -> int | None:
        """What changes as long as the completer moves, None if it has nothing to do: for the watchdog."""
        return self._give.ended if self._completer.unwritten() else None

    async def stop(self, timeout: float = 25.0) -> int:
        """Stop within `timeout` seconds; how many jobs were still running at the deadline.

        In this order: take no more, hand back what has not started, wait for what runs, cancel what is left and release
        what has really stopped (its attempt is not spent), write all outcomes down, leave. A thread that cannot be
        stopped keeps its job until the lease is over; rescue gives it back then. Killing the process at any moment
        loses nothing.
        """
        if self._state in ("starting", "stopped"):
            await self._stack.aclose()
            self._state = "stopped"
            return 0
        deadline, self._stopping = monotonic() + timeout, True
        self.quiet()
        await within(asyncio.wait([self._fetching]), max(0.1, deadline - monotonic()))
        self._give_back(self._executor.hand_back())
        left = await self._wait_for_jobs(deadline)
        await within(self._completer.flushed(), FLUSH_SECONDS)
        await self._leave()
        return left

    async def _wait_for_jobs(self, deadline: float) -> int:
        if await within(self._executor.idle(), deadline - monotonic()):
            return 0
        left = len(self._executor.running)
        self._executor.cancel()
        await within(self._executor.idle(), 1.0)
        for job in list(self._executor.running.values()):
            log.error(
                "job %d (%s) could not be stopped; it is given back when this worker's lease is over", job.id, job.task
            )
        return left

    async def _leave(self) -> None:
        self._state = "stopped"
        await asyncio.to_thread(self._heartbeat.stop)
        services = list(self._services)
        for service in services:
            service.cancel()
        await asyncio.gather(*services, return_exceptions=True)
        try:
            async with asyncio.timeout(5):
                await self._reconciler.reconcile()
                await self._take.run(
                    self._link.statement("heartbeat_leave", worker_id=self.worker_id),
                    self._link.statement("heartbeat_abandon", worker_id=self.worker_id),
                )
        except Exception as error:  # whatever it is, what follows must be taken down
            log.warning("could not sign off: %s; rescue will notice", error)
        await self._take.close()
        await self._give.close()
        self._executor.close()
        await self._stack.aclose()
        self._end()

    # Building --------------------------------------------------------------------------------------------------------

    def _check_and_register(self) -> None:
        self.worker_id = enter(self._link, self.settings)

    def _build(self) -> None:
        settings = self.settings
        self._take = Session(self._link, "fetch", lambda: self._heartbeat.listed())
        self._give = Session(self._link, "complete", lambda: self._heartbeat.listed(0.0))
        self._completer = Completer(
            self._give,
            lambda: self.worker_id,
            version_tag=settings.version_tag,
            notify=settings.notify,
            written=self._written,
        )
        self._fetcher = Fetcher(
            self._take,
            lambda: self.worker_id,
            shares=self._shares,
            deliver=self._deliver,
            suspects=lambda: self._suspects.ranks(idle=not self._held),
            live_workers=lambda: 1 + self._heartbeat.judge.live(),
            in_doubt=lambda: self._reconciler.doubt(),
            poll=settings.poll,
        )
        self._executor = Executor(
            pools(settings.queues, settings.concurrency),
            self._tasks,
            finish=self._completer.finish,
            low=self._fetcher.roomier,
            half_lost=self.quiet,
        )
        self._signals = Signals(self._take, lambda: self.worker_id, self._held.__len__, self._executor.interrupt)
        self._notifier = Notifier(
            replace(self._link, dsn=embedded.resolve(settings.listen_dsn or settings.dsn)),
            list(settings.queues),
            heard=self._heard,
        )
        self._scheduler = Scheduler(self._take, notify=settings.notify, leads=self._leads)
        self._rescue = Rescue(self._take, notify=settings.notify, rescued=lambda: self._fetcher.news(zero=True))
        self._reconciler = Reconciler(
            self._take,
            lambda: self.worker_id,
            settled=lambda: self._fetcher.settled,
            knows=self._knows,
            notify=settings.notify,
        )
        self._isolation = Isolation(
            self._take,
            list(settings.queues),
            leads=self._leads,
            asked=lambda: self._suspects.asked,
            make_way=self._make_way,
        )
        self._maintenance = Maintenance(self._take, leads=self._leads, also=self._leftovers)
        self._pulse = Pulse(self._loop, min(BLOCKED_SECONDS, settings.lease / 3))
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
            again=lambda: call(self._fetcher.roomier),
            pulse=self._pulse,
        )

    def _serve(self, service: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = self._loop.create_task(service, name=f"pgqueue-{name}")
        self._services.add(task)  # the loop itself keeps no task alive
        task.add_done_callback(self._service_ended)
        return task

    def _service_ended(self, task: asyncio.Task[None]) -> None:
        self._services.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and self._ended is not None and not self._ended.done():
            log.critical("%s failed for good: %s", task.get_name(), error)
            self._ended.set_exception(error)
            # Half a worker must not look alive: without beats its jobs are given to others.
            self.quiet()
            self._heartbeat.abandon()

    # Where the services meet -----------------------------------------------------------------------------------------

    def _shares(self) -> list[Share]:
        if self._suspects.alone or self._completer.unwritten() > UNWRITTEN_MOST or self._heartbeat.late():
            return []
        if self._suspects.making_way:
            return [] if self._held else [Share(list(self.settings.queues), 1, alone=True)]
        return [Share(pool.queues, pool.room()) for pool in self._executor.pools]

    def _make_way(self, wanted: bool) -> None:
        if wanted is not self._suspects.making_way:
            self._suspects.making_way = wanted
            self._fetcher.news()

    def _deliver(self, jobs: list[Job]) -> None:
        for job in jobs:
            self._held[job.id] = job
        # A fetch was under way when we were told to take no more; or it brought suspects, who come one at a time.
        kept = self._suspects.keep(jobs) if self._state == "running" else []
        if len(kept) < len(jobs):
            self._give_back(set(jobs).difference(kept))
        for pool in self._executor.pools:
            mine = kept if len(self._executor.pools) == 1 else [job for job in kept if job.queue in pool.queues]
            if mine:
                pool.adapt()
                self._executor.offer(pool, mine)

    def _written(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            if self._held.get(job.id) is job:
                del self._held[job.id]
        self._fetcher.roomier()
        if self._suspects.ended(jobs):
            self._fetcher.news()

    def _give_back(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            self._completer.finish(job, RELEASED)

    def _heard(self, channel: str, payload: str) -> None:
        if channel == SCHEDULED:
            self._scheduler.news()
        elif channel == LED:
            self._scheduler.news()
            self._maintenance.news()
        elif channel == CONTROL and payload == SIGNAL:
            self._signals.news()
        elif channel == CONTROL or not channel:
            self._signals.news()
            self._fetcher.news()
            self._scheduler.news()
        else:
            self._fetcher.news(zero=payload == "zero")

    async def _leftovers(self) -> None:
        await self._rescue.strays()
        await self._signals.settle()

    def _leads(self) -> bool:
        """Without a connection for LISTEN nobody can hold the leader's lock: then everybody does the duties."""
        return self._notifier.leads or not self.settings.listen

    def _identities(self) -> list[Identity]:
        found = (self._take.identity, self._give.identity, self._notifier.identity)
        return [identity for identity in found if identity is not None]

    # Death, ours and others' -----------------------------------------------------------------------------------------

    def _seen_dead(self, dead: list[tuple[int, int]]) -> None:
        self._serve(self._rescue.seen(dead, leads=self._leads()), "rescue")

    def _declared_dead(self) -> None:
        """Others took us for dead: our jobs are theirs now. Begin anew under another id; late outcomes are fenced."""
        if self._state != "stopped":
            log.error(
                "worker %d was taken for dead (no sign of life for its lease); its jobs run elsewhere", self.worker_id
            )
            dropped = self._executor.hand_back()
            for job in dropped:
                self._held.pop(job.id, None)
            self._suspects.ended(dropped)
            self._serve(self._register_anew(), "register")

    async def _register_anew(self) -> None:
        old = self.worker_id
        register = partial(asyncio.to_thread, self._check_and_register)
        await persist(register, name="register", until=lambda: self.worker_id != old)
        self._heartbeat = self._new_heartbeat()
        self._heartbeat.start()
        self._fetcher.news(zero=True)

    def _knows(self, job_id: int, claim: int) -> bool:
        job = self._held.get(job_id)
        return job is not None and job.claim == claim
