"""One worker: its life from start to stop. Its parts are in `services`.

Three connections when idle: fetch (with the duties that jobs wait for), listen, heartbeat. The worker that leads has
one more, for housekeeping. The completer opens another one at its first outcome.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from pgqueue.client.lifespan import declared as declared_lifespan
from pgqueue.client.tasks import Task, limitings
from pgqueue.database import embedded
from pgqueue.database.backoff import one_line, starved, transient, within
from pgqueue.database.sessions import Link
from pgqueue.database.statements import integers
from pgqueue.jobs.concurrency import limits_of, rates_of
from pgqueue.jobs.job import Job, fields
from pgqueue.jobs.totals import Numbers
from pgqueue.jobs.values import Duration, seconds
from pgqueue.manual import Symptom, at_night
from pgqueue.options import names_options
from pgqueue.steady_clock import monotonic
from pgqueue.worker.last_message import LastMessage
from pgqueue.worker.liveness.registration import entered
from pgqueue.worker.run.executor import STOPPED
from pgqueue.worker.services import Services
from pgqueue.worker.settings import Settings, by_name, settle
from pgqueue.worker.state import WorkerState

log = logging.getLogger("pgqueue")

FLUSH_SECONDS = 10.0
HAND_ON_SECONDS = 1.0  # for the keys of our last jobs, and for their nodes; the sweep finds those that we miss
GIVE_BACK_SECONDS = 1.0  # for jobs that came while we left; rescue finds those that we miss
HISTORY_SECONDS = 2.0  # for the last part of the history
# How long handlers may take to leave when they are stopped at the shutdown's deadline.
STOP_SECONDS = 1.0
# How long the lifespan's end may take beyond the grace, in a process that ends with its worker.
LIFESPAN_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Vitals:
    """The state of a worker. `busy` of `slots` run, `lost` belong to handlers that do not stop, `ended` jobs have left
    it."""

    worker_id: int
    state: str
    busy: int
    slots: int
    lost: int
    ended: int


@names_options
class Worker:
    """A worker inside this process: takes jobs of its queues and runs them, until it is stopped.

    - `queues`: names, each with slots of its own if written `name:slots`. Default: every queue of an imported task.
    - `concurrency`: how many jobs run at once.
    - `tasks`: only jobs of these tasks are taken. Default: all that are declared.
    - `lease`: how long there is no sign of life of this worker before its jobs go to other workers.
    - `poll`: how often it looks for jobs without being notified.
    - `pool_size`: how many connections sync handlers may have at once, and async ones as many. Default: one for each
      slot.
    - `fail_unknown`: a job fails when no live worker has known its task for this long.
    - `idle`: for a database that sleeps: while nothing happens, the worker sends nothing for this long.
    - `dsn`, `listen_dsn`, `schema`: the database, in the place of `pgqueue.configure`.
    - `version_tag`: the version of your code, kept with each attempt. Default: pgqueue's version.

    `lease`, `poll`, `fail_unknown` and `idle` are durations: seconds, a timedelta, or a text such as "30s".

    Raises NotConfigured without a DSN, and SchemaMissing, SchemaForeign, SchemaBehind or SchemaTooNew if the database
    does not fit.

    >>> async def lifespan(app):
    ...     async with pgqueue.Worker(queues=["mail"], concurrency=20):
    ...         yield
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
        poll: Duration = 1.0,
        lease: Duration = 15.0,
        version_tag: str | None = None,
        pool_size: int | None = None,
        fail_unknown: Duration = 86_400.0,
        idle: Duration = 0.0,
    ) -> None:
        named = by_name(tasks)
        settings = settle(
            named.values(),
            queues=queues,
            concurrency=concurrency,
            dsn=dsn,
            listen_dsn=listen_dsn,
            schema=schema,
            poll=seconds(poll, "poll"),
            lease=seconds(lease, "lease"),
            version_tag=version_tag,
            pool_size=pool_size,
            fail_unknown=seconds(fail_unknown, "fail_unknown"),
            idle=seconds(idle, "idle"),
        )
        limits_of(limitings(named.values())), rates_of(limitings(named.values()))  # raises if two tasks disagree
        self.state = WorkerState(settings, named)
        self.services: Services
        """Made by `prepare`, when this worker has its id."""
        self._prepared = self._stopping = self._quiet_soon = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._writing: asyncio.Task[None] | None = None
        self._stack = AsyncExitStack()
        self._lifespan_until: float | None = None
        self._ended: asyncio.Future[None] | None = None

    @property
    def worker_id(self) -> int:
        """This worker's id in the database, 0 before `prepare`; another one after it had seemed dead."""
        return self.state.id

    @property
    def settings(self) -> Settings:
        """The settings of this worker."""
        return self.state.settings

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
        self.state.link = Link(dsn, self.settings.schema, self.settings.prepare)
        self.state.id = await entered(self.state)
        self.services = services = Services(self.state, serve=self._serve, quiet=self.quiet)
        services.heartbeat.start()
        services.lease_guard.start()
        try:
            services.context.resources = await self._stack.enter_async_context(declared_lifespan())
        except BaseException:
            await self._leave()
            raise
        self._warn_of_locks()
        self._prepared = True

    async def warm(self) -> None:
        """Do once, for no job, what the first jobs of a prepared worker would wait for: connect, plan, fill caches.

        For a caller with other workers that go on meanwhile. If the database is away, the services wait for it.
        """
        services = self.services
        plain = services.outcome_sql.about("complete_plain", [], self.worker_id)
        try:
            await services.fetcher.warm()
            await services.complete_session.run(plain)
        except Exception as error:
            if not transient(error):
                raise
            log.warning("not warm yet: %s", one_line(error))

    def begin(self) -> None:
        """Start the services of a prepared worker."""
        services = self.services
        self.state.phase = "running"  # written by the heartbeat that lists the fetcher's connection
        self._fetching = self._serve(services.fetcher.run(), "fetcher")
        self._writing = self._serve(services.completer.run(), "completer")
        others: list[Any] = [services.renewal, services.unblocker, services.declared_limits, services.rate_limiter]
        others += [services.releaser, services.progress, *([services.notifier] if self.settings.listen else [])]
        for service in others:
            self._serve(service.run(), type(service).__name__.lower())
        for loop in services.duties.loops:
            self._serve(loop.run(), loop.duty.name)
        if self._quiet_soon:
            self.quiet()

    def _warn_of_locks(self) -> None:
        keyed = [task for task in self.state.tasks.values() if task.locking or (task.limiting and task.limiting.limit)]
        endless = sorted({task.name for task in keyed if task.timeout is None})
        if endless:
            message = (
                "tasks with a lock or limit, without a timeout: %s; a job that hangs keeps it for as long as it hangs, "
                "unless it was enqueued with a timeout of its own"
            )
            log.warning(message, ", ".join(endless))

    async def seen(self) -> None:
        """Wait until other workers can see our state in the database; a second at most."""
        await self.services.listed()

    async def run(self) -> None:
        """Work until stopped. It also ends when it is quiet and all its jobs are written, or a service fails for good
        (raised)."""
        if self._ended is None:
            await self.start()
        assert self._ended is not None
        await asyncio.shield(self._ended)

    def quiet(self) -> None:
        """Take no more jobs, hand back those that have not started; `run` returns when the running jobs have ended.

        While the worker starts, this is kept until it has started.
        """
        self._quiet_soon = self.state.phase == "starting"
        if self.state.phase == "running":
            services = self.services
            self.state.phase = "quiet"
            services.heartbeat.beat_soon()
            services.fetcher.quiet()
            services.held_jobs.give_back(services.held_jobs.hand_back())
            self._serve(self._drain(), "drain")

    @property
    def worn_out(self) -> bool:
        """Whether it has become quiet by itself, since half of its slots are lost, or no thread can be had."""
        return self._prepared and self.services.running.worn_out

    async def quieted(self) -> None:
        """Wait until it takes no more jobs: the last claim it had sent has been answered, too."""
        await asyncio.wait([self._fetching])

    def vitals(self) -> Vitals:
        """The state of this worker just now."""
        state, running = self.state, self.services.running
        return Vitals(state.id, state.phase, len(running.runs), running.slots, running.lost, state.ended_jobs)

    def numbers(self) -> Numbers:
        """What this worker has done since it was prepared, as numbers that can be added up. On the loop."""
        return self.services.numbers() if self._prepared else Numbers()

    def ask_numbers(self) -> Future[Numbers]:
        """`numbers` for other threads: they are read on the loop, as soon as it comes to it."""
        asked: Future[Numbers] = Future()

        def answer() -> None:
            if asked.set_running_or_notify_cancel():
                asked.set_result(self.numbers())

        try:
            if self._prepared:
                self._loop.call_soon_threadsafe(answer)
                return asked
        except RuntimeError:  # the loop is closed: nothing changes any more
            pass
        answer()
        return asked

    async def remark(self, outcome: str, message: str) -> list[Job]:
        """Append a row to the attempts of the jobs that run now, which go on. Answers these jobs."""
        jobs = self.services.running.jobs()
        ids, claims = [job.id for job in jobs], integers([job.claim for job in jobs])
        about = {"worker_id": self.worker_id, "ids": ids, "claims": claims, "version_tag": self.settings.version_tag}
        remark = self.state.link.statement("heartbeat_remark", outcome=outcome, message=message, **about)
        await self.services.fetch_session.run(remark)
        return jobs

    async def _drain(self) -> None:
        await asyncio.wait([self._fetching])
        await self.services.rate_limiter.idle()
        self.services.batches.start_all()
        await self.services.executor.idle()
        await self.services.completer.flushed()
        if not self._stopping:  # else the worker goes on until it has left
            self._end()

    def _end(self) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    def completing(self) -> int | None:
        """For the watchdog: a number that changes as long as the completer moves, None if it has nothing to do."""
        services = self.services
        return services.complete_session.ended + services.completer.ended if services.completer.unwritten() else None

    async def stop(self, timeout: Duration = 25.0) -> int:
        """Stop within `timeout`, a duration; how many jobs were still running at the deadline.

        1. Take no more jobs, and hand back those that have not started.
        2. Wait for the running jobs until the deadline, then stop those that are left.
        3. Give back the jobs that have really stopped: the attempt is not spent, a row says `interrupted`.
        4. Write all outcomes, and leave.

        If a handler cannot be stopped, in a call into C, it keeps its job until the lease is over. Then rescue
        gives the job back. Killing the process at any moment loses nothing.
        """
        left = await self._wait_for_jobs(monotonic() + seconds(timeout, "timeout"))
        if left is None:
            return 0
        if left:
            await self._stop_jobs("it is given back when this worker's lease is over")
        await self._write_ends()
        await self._leave()
        return left

    async def stop_process(self, grace: float) -> LastMessage | None:
        """`stop` for a process that ends with its worker; None if no job had to be stopped.

        Else nothing of what was stopped is given back yet: the caller prepares the message and sends it, and then ends
        the process at once.
        """
        deadline = monotonic() + grace
        self._lifespan_until = deadline + LIFESPAN_SECONDS
        left = await self._wait_for_jobs(deadline)
        if left:
            self.services.completer.leave_out(STOPPED)
            await self._stop_jobs("it is given back as this process ends")
            await self._write_ends()
            return LastMessage(self.services, left, end_lifespan=self._stack.aclose, cancel=self._end_services)
        if left is not None:
            await self._write_ends()
            await self._leave()
        return None

    async def _wait_for_jobs(self, deadline: float) -> int | None:
        """Take no more jobs, and wait for those that run; how many still do at the deadline. None: it is over, or had
        not begun."""
        if self.state.phase in ("starting", "stopped"):
            await (self._leave() if self._prepared and self.state.phase == "starting" else self._end_lifespan())
            self.state.phase = "stopped"
            return None
        self._stopping = True
        self.quiet()
        await within(asyncio.wait([self._fetching]), max(0.1, deadline - monotonic()))
        await within(self.services.rate_limiter.idle(), max(0.1, deadline - monotonic()))
        services = self.services
        services.held_jobs.give_back(services.held_jobs.hand_back())
        if await within(services.executor.idle(), deadline - monotonic()):
            return 0
        return len(services.running.runs)

    async def _stop_jobs(self, then: str) -> None:
        self.services.executor.cancel()
        await within(self.services.executor.idle(), STOP_SECONDS)
        for job in self.services.running.jobs():
            where = at_night(Symptom.RUNS_LONG)
            log.error("job %d (%s) could not be stopped; %s; see %s", job.id, job.task, then, where, extra=fields(job))

    async def _write_ends(self) -> None:
        if self._writing is not None and self._writing.done():  # the application has cancelled it, or it has failed
            self._writing = self._serve(self.services.completer.run(), "completer")
        await self._flushed(FLUSH_SECONDS)
        await within(self.services.unblocker.idle(), HAND_ON_SECONDS)
        await within(self.services.releaser.idle(), HAND_ON_SECONDS)

    async def _flushed(self, seconds: float) -> None:
        """Wait until all outcomes are written, at most so many seconds. If the completer has ended, none is written
        any more."""
        flushed = asyncio.ensure_future(self.services.completer.flushed())
        waited = [flushed] if self._writing is None else [flushed, self._writing]
        await asyncio.wait(waited, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        flushed.cancel()

    async def _end_services(self) -> None:
        """End all but the heartbeat. One that does not end does not keep the others."""
        self.state.phase = "stopped"
        self.services.lease_guard.close()
        services = list(self._tasks)
        for service in services:
            service.cancel()
        await asyncio.wait([*services, asyncio.ensure_future(asyncio.sleep(0))], timeout=STOP_SECONDS)

    async def _end_lifespan(self) -> None:
        """Let the application take down what it has set up; for a process that ends until a deadline."""
        if self._lifespan_until is None:
            await self._stack.aclose()
            return
        ending = asyncio.ensure_future(self._stack.aclose())
        done, _ = await asyncio.wait([ending], timeout=max(0.0, self._lifespan_until - monotonic()))
        if done:
            ending.result()
        else:
            log.error("the lifespan has not ended %g s after the grace, and ends with this process", LIFESPAN_SECONDS)

    async def _leave(self) -> None:
        self.state.phase = "stopped"
        self.services.lease_guard.close()
        await self._stop_heartbeat()
        await self._cancel(*self._tasks - {self._writing})
        # The answer to a claim or an unblocking may have come until now: its jobs are given back before the completer
        # goes.
        await self._flushed(GIVE_BACK_SECONDS)
        await self._cancel(*self._tasks)
        await self._stop_heartbeat()  # a worker that was taken for dead may have begun another
        try:
            async with asyncio.timeout(HISTORY_SECONDS):
                await self.services.counters.write_rest()
        except Exception as error:
            log.warning("the last minute of the history could not be written: %s", one_line(error))
        try:
            async with asyncio.timeout(5):
                await self._sign_off()
        except Exception as error:  # whatever the error is, what follows must be taken down
            log.warning("could not sign off: %s; rescue will notice", one_line(error))
        await self.services.close_sessions()
        self.services.executor.close()
        await self._end_lifespan()
        self._end()

    async def _stop_heartbeat(self) -> None:
        """Stop it and wait for its end. If there is no thread to wait in, it ends by itself."""
        try:
            await asyncio.to_thread(self.services.heartbeat.stop)
        except Exception as error:
            if not starved(error):
                raise
            self.services.heartbeat.abandon()

    async def _cancel(self, *services: asyncio.Task[None]) -> None:
        for service in services:
            service.cancel()
        await asyncio.gather(*services, return_exceptions=True)

    async def _sign_off(self) -> None:
        """Hand back the rows that we do not know, and delete our row.

        A claim that was cut off may still be under way in the server. It holds our row FOR KEY SHARE, so the DELETE
        waits for it. Or it comes later, finds no row and takes nothing. So no row comes after the DELETE.
        """
        session, link = self.services.fetch_session, self.state.link
        await self.services.leave()
        stuck = integers(self.services.running.ids())
        await session.run(link.statement("registration_abandon", worker_id=self.worker_id, stuck=stuck))

    # Services ---------------------------------------------------------------------------------------------------------

    def _serve(self, service: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        # Not by a task factory of the application: an eager one would begin in the middle of what starts it.
        task = asyncio.Task(service, loop=self._loop, name=f"pgqueue-{name}")
        self._tasks.add(task)  # the loop itself keeps no task alive
        task.add_done_callback(self._service_ended)
        return task

    def _service_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error: BaseException | None
        if not task.cancelled():
            error = task.exception()
        elif self.state.phase != "stopped":
            error = RuntimeError("the application has cancelled it: it cancels tasks that are not its own")
        else:
            error = None
        if error is not None and self._ended is not None and not self._ended.done():
            self._ended.set_exception(error)
            # Half a worker must not look alive: without heartbeats its jobs are given to others. If there is no memory,
            # what follows may fail.
            self.services.heartbeat.abandon()
            log.critical("%s failed for good: %s", task.get_name(), one_line(error))
            self.quiet()
