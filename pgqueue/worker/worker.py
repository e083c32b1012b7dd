"""One worker: its life from start to stop. The services it nests, and how they meet, are in `services`.

Three connections when idle: fetch (with the duties), listen, beat; the completer opens the fourth at its first outcome.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from time import monotonic
from typing import Any

from pgqueue.client.lifespan import declared as declared_lifespan
from pgqueue.client.tasks import Task
from pgqueue.database import embedded
from pgqueue.database.backoff import transient, within
from pgqueue.database.sessions import Link
from pgqueue.database.statements import integers
from pgqueue.jobs.job import Job, fields
from pgqueue.worker.liveness.registration import withdraw
from pgqueue.worker.services import Services
from pgqueue.worker.settings import by_name, settle

log = logging.getLogger("pgqueue")

FLUSH_SECONDS = 10.0
HAND_ON_SECONDS = 1.0  # the keys of our last jobs; whom we miss, the sweep finds
GIVE_BACK_SECONDS = 1.0  # what was brought while we left; what we miss, rescue finds
# How long handlers may take to leave when they are stopped at the shutdown's deadline.
STOP_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Vitals:
    """How a worker is: `busy` of `slots` run, `lost` are taken by handlers that do not stop, `ended` jobs it is done
    with."""

    worker_id: int
    state: str
    busy: int
    slots: int
    lost: int
    ended: int


class Worker(Services):
    """A worker inside this process: takes jobs of its queues and runs them, until it is stopped.

    `queues` is a sequence of names, each with slots of its own if written `name:slots`; default: every queue an
    imported task names. `concurrency` is how many jobs run at once. `tasks` defaults to all that are declared.
    `lease` (seconds) is how long this worker may give no sign of life before its jobs are given to others; `poll`
    (seconds) how often it looks without being told. `pool_size` is how many connections sync handlers are lent at once
    at most, and async ones as many; default: one for each slot. Only jobs of its tasks are taken from its queues. The
    worker that leads fails a job whose task no live worker has known for `fail_unknown` seconds.

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
        pool_size: int | None = None,
        fail_unknown: float = 86_400.0,
    ) -> None:
        named = by_name(tasks)
        settings = settle(
            named.values(),
            queues=queues,
            concurrency=concurrency,
            dsn=dsn,
            listen_dsn=listen_dsn,
            schema=schema,
            poll=poll,
            lease=lease,
            version_tag=version_tag,
            pool_size=pool_size,
            fail_unknown=fail_unknown,
        )
        super().__init__(settings, named)
        self._prepared = self._stopping = False
        self._services: set[asyncio.Task[None]] = set()
        self._writing: asyncio.Task[None] | None = None
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
        await self.prepare()
        self.begin()

    async def prepare(self) -> None:
        """All of `start` that can fail: after it the worker lives, and takes no jobs before `begin`."""
        self._loop = loop = asyncio.get_running_loop()
        self._ended = loop.create_future()
        dsn = await asyncio.to_thread(embedded.resolve, self.settings.dsn)
        self._link = Link(dsn, self.settings.schema, self.settings.prepare)
        await self._enter()
        self._build()
        self._heartbeat.start()
        self._lost_lease.start()
        try:
            self._means.resources = await self._stack.enter_async_context(declared_lifespan())
        except BaseException:
            await self._leave()
            raise
        self._warn_of_locks()
        self._prepared = True

    async def warm(self) -> None:
        """Do once, for no job, what the first jobs of a prepared worker would wait for: connect, plan, fill caches.

        For whoever lets others work meanwhile. That the database is away is no matter: the services wait for it.
        """
        plain = self._endings.about("complete_plain", [], self.worker_id)
        try:
            await self._fetcher.warm()
            await self._give.run(plain)
        except Exception as error:
            if not transient(error):
                raise
            log.warning("not warm yet: %s", str(error).strip() or type(error).__name__)

    async def _enter(self) -> None:
        """Check and register. Whoever cancels it leaves no row behind: a thread goes on, so it is waited for."""
        entering = asyncio.ensure_future(asyncio.to_thread(self._check_and_register))
        try:
            await asyncio.shield(entering)
        except asyncio.CancelledError:
            await asyncio.wait([entering])
            if not entering.cancelled() and entering.exception() is None:
                await asyncio.to_thread(withdraw, self._link, self.worker_id)
            raise

    def begin(self) -> None:
        """Start the services of a prepared worker."""
        self._state = "running"  # said by the beat that lists the fetcher's connection
        self._fetching = self._serve(self._fetcher.run(), "fetcher")
        self._writing = self._serve(self._completer.run(), "completer")
        services: list[Any] = [self._scheduler, self._maintenance, self._reconciler, self._signals]
        services += [self._unblocker, self._sweep, self._ticks, self._declarer, self._rates]
        for service in [
            *services,
            self._isolation,
            self._progress,
            *([self._notifier] if self.settings.listen else []),
        ]:
            self._serve(service.run(), type(service).__name__.lower())

    def _warn_of_locks(self) -> None:
        keyed = [task for task in self._tasks.values() if task.locking or (task.limiting and task.limiting.limit)]
        endless = sorted({task.name for task in keyed if task.timeout is None})
        if endless:
            said = (
                "tasks with a lock or limit, without a timeout: %s; a job that hangs keeps it for as long as it hangs, "
                "unless it was enqueued with a timeout of its own"
            )
            log.warning(said, ", ".join(endless))

    async def seen(self) -> None:
        """Wait until others can see our state in the database; a second at most."""
        await self._heartbeat.listed()

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
            self._heartbeat.beat_soon()
            self._fetcher.quiet()
            self._give_back(self._executor.hand_back())
            self._serve(self._drain(), "drain")

    async def quieted(self) -> None:
        """Wait until it takes no more jobs: the last claim it had sent has been answered, too."""
        await asyncio.wait([self._fetching])

    def vitals(self) -> Vitals:
        """How it is just now."""
        slots = sum(pool.slots for pool in self._executor.groups)
        return Vitals(
            self.worker_id, self._state, len(self._executor.running), slots, self._executor.lost, self._ended_jobs
        )

    async def remark(self, outcome: str, message: str) -> list[Job]:
        """Append a row to the attempts of what runs now, which go on; those jobs."""
        jobs = [run.job for run in list(self._executor.running.values()) if run.job is not None]
        ids, claims = [job.id for job in jobs], integers([job.claim for job in jobs])
        about = {"worker_id": self.worker_id, "ids": ids, "claims": claims, "version_tag": self.settings.version_tag}
        await self._take.run(self._link.statement("heartbeat_remark", outcome=outcome, message=message, **about))
        return jobs

    async def _drain(self) -> None:
        await asyncio.wait([self._fetching])
        await self._rates.idle()
        await self._executor.idle()
        await self._completer.flushed()
        if not self._stopping:  # else it goes on until we have left
            self._end()

    def _end(self) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    def completing(self) -> int | None:
        """What changes as long as the completer moves, None if it has nothing to do: for the watchdog."""
        return self._give.ended + self._completer.ended if self._completer.unwritten() else None

    async def stop(self, timeout: float = 25.0) -> int:
        """Stop within `timeout` seconds; how many jobs were still running at the deadline.

        In this order: take no more, hand back what has not started, wait for what runs, stop what is left and give back
        what has really stopped (its attempt is not spent, a row says `interrupted`), write all outcomes down, leave. A
        handler that cannot be stopped, in a call into C, keeps its job until the lease is over; rescue gives it back
        then. Killing the process at any moment loses nothing.
        """
        if self._state in ("starting", "stopped"):
            await (self._leave() if self._prepared and self._state == "starting" else self._stack.aclose())
            self._state = "stopped"
            return 0
        deadline, self._stopping = monotonic() + timeout, True
        self.quiet()
        await within(asyncio.wait([self._fetching]), max(0.1, deadline - monotonic()))
        await within(self._rates.idle(), max(0.1, deadline - monotonic()))
        self._give_back(self._executor.hand_back())
        left = await self._wait_for_jobs(deadline)
        await within(self._completer.flushed(), FLUSH_SECONDS)
        await within(self._unblocker.idle(), HAND_ON_SECONDS)
        await self._leave()
        return left

    async def _wait_for_jobs(self, deadline: float) -> int:
        if await within(self._executor.idle(), deadline - monotonic()):
            return 0
        left = len(self._executor.running)
        self._executor.cancel()
        await within(self._executor.idle(), STOP_SECONDS)
        for job in [run.job for run in list(self._executor.running.values()) if run.job is not None]:
            said = "job %d (%s) could not be stopped; it is given back when this worker's lease is over"
            log.error(said, job.id, job.task, extra=fields(job))
        return left

    async def _leave(self) -> None:
        self._state = "stopped"
        self._lost_lease.close()
        await asyncio.to_thread(self._heartbeat.stop)
        await self._cancel(*self._services - {self._writing})
        # A claim or an admit may have been answered up to now: what it brought is given back before the completer goes.
        await within(self._completer.flushed(), GIVE_BACK_SECONDS)
        await self._cancel(*self._services)
        try:
            async with asyncio.timeout(5):
                await self._sign_off()
        except Exception as error:  # whatever it is, what follows must be taken down
            log.warning("could not sign off: %s; rescue will notice", error)
        await self._take.close()
        await self._give.close()
        await self._keys.close()
        await self._pace.close()
        await self._lender.close()
        self._executor.close()
        await self._stack.aclose()
        self._end()

    async def _cancel(self, *services: asyncio.Task[None]) -> None:
        for service in services:
            service.cancel()
        await asyncio.gather(*services, return_exceptions=True)

    async def _sign_off(self) -> None:
        """Hand back what we do not know, and take our row away.

        A claim that was cut off may still be under way in the server. It holds our row FOR KEY SHARE, so the DELETE
        waits for it; or it comes later, finds no row and takes nothing. What is found after the DELETE is all there is.
        """
        leave = self._link.statement("registration_leave", worker_id=self.worker_id)
        await self._reconciler.reconcile()
        if await self._take.run(leave) == [[]]:  # a claim was committed in between, or handlers could not be stopped
            await self._reconciler.reconcile()
            await self._take.run(leave)
        await self._reconciler.reconcile()
        stuck = integers(self._executor.running)
        await self._take.run(self._link.statement("registration_abandon", worker_id=self.worker_id, stuck=stuck))

    # Services ---------------------------------------------------------------------------------------------------------

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
