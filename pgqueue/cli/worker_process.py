"""The process around a worker: event loop, signals, banner, exit code.

Called by `pgqueue work` after everything is imported. A signal works even while a handler blocks the loop, because
Python's own signal handlers run between bytecodes.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

import click
import psycopg
from psycopg.pq import Ping

from pgqueue import early_signals
from pgqueue import logs as line_format
from pgqueue.admin.tasks import taken
from pgqueue.cli import logs
from pgqueue.cli.database import ASK_SECONDS, between_primaries, connected, place, server_state
from pgqueue.cli.exit_codes import DEADLINE, DONE, INTERRUPTED, code_of, line_of
from pgqueue.cli.known_names import did_you_mean
from pgqueue.cli.process_end import (
    FLUSH_SECONDS,
    LAST_SECONDS,
    ORDERLY_SECONDS,
    STANDS_SECONDS,
    TELEMETRY_SECONDS,
    ProcessEnd,
    flush,
    write,
)
from pgqueue.client import tasks
from pgqueue.config import config, safe
from pgqueue.database import forks, migrations
from pgqueue.database.backoff import Backoff, described, is_loss, starved
from pgqueue.database.outage import Outage
from pgqueue.database.sessions import ReadOnly, Silent
from pgqueue.plain_text import plural
from pgqueue.supervisor.worker_end import WorkerEnd
from pgqueue.worker.last_message import LastMessage
from pgqueue.worker.liveness.watchdog import STUCK, Watchdog
from pgqueue.worker.worker import Worker

log = logging.getLogger("pgqueue")

IDLE_CONNECTIONS = 3
START = "start"
"""Of what looks at the database before there is a worker."""


@contextmanager
def worker_end_of(fd: int | None) -> Iterator[WorkerEnd | None]:
    """The pipe to our supervisor, if there is one. An error of this process is reported there."""
    worker_end = None if fd is None else WorkerEnd(fd)
    try:
        yield worker_end
    except Exception as error:
        if worker_end is not None:
            worker_end.failed(
                safe(error.format_message() if isinstance(error, click.ClickException) else line_of(error))
            )
        raise


def serve(worker: Worker, grace: float, stuck: float, worker_end: WorkerEnd | None = None) -> int:
    """Run the worker until a signal, or until its start or a service fails for good; return the exit code.

    With a `worker_end` the worker belongs to a supervisor: this one lets it work, and may stop it, too.
    """
    done: int | None = None
    try:
        facts = _first_look(worker, worker_end)
        name, factory = loop_of()
        # Imported objects stay. Else each full garbage collection would look through them, and all handlers wait for
        # it. One more look comes at the end of the process, and takes CPU time from other processes.
        gc.freeze()
        with asyncio.Runner(loop_factory=factory) as runner:
            done = runner.run(_serve(worker, grace, stuck, facts | {"loop": name}, worker_end))
        return done
    except Exception as error:
        if done is not None and starved(error):  # the worker has ended, and to end the loop takes a thread
            return done
        code = code_of(error)
        if code is None:
            raise
        # Written to the log, so that a JSON log contains only JSON.
        logs.last_words(safe(line_of(error)))
        if worker_end is not None:
            worker_end.failed(safe(line_of(error)))
        return code


def _first_look(worker: Worker, worker_end: WorkerEnd | None) -> dict[str, Any]:
    """Check the schema; what the banner says. Waits for a server that is starting up, or read only, or silent, and
    between two primaries (`between_primaries`), as long as that takes."""
    backoff, state, outage = Backoff(), None, Outage()
    while True:
        try:
            with connected("work", needs="work", patience=ASK_SECONDS) as conn:
                if conn.execute("SHOW transaction_read_only").fetchone() == ("on",):
                    raise ReadOnly
                outage.answered(START)
                return facts_of(conn, worker)
        except ReadOnly as error:
            pause = outage.lost(START, error)
        except psycopg.OperationalError as error:
            if isinstance(error, Silent) or between_primaries():
                pause = outage.lost(START, error)
            else:
                before, state = state, server_state()
                # If it takes connections by now, it may just have come up: then the next error is another one.
                if state not in (Ping.REJECT, Ping.OK) or before == state == Ping.OK:
                    raise
                if before is None and state == Ping.REJECT:
                    log.warning("waiting for the server: %s", safe(line_of(error)))
                pause = backoff.pause()
        if worker_end is not None:
            worker_end.waits()
        time.sleep(pause)


async def _serve(
    worker: Worker, grace: float, stuck: float, facts: dict[str, Any], worker_end: WorkerEnd | None
) -> int:
    """Work until told to stop. What then keeps the process is given `ORDERLY_SECONDS`.

    What telemetry keeps back is sent here, not by a hook of `atexit` alone: a thread that is left keeps all hooks."""
    end, code = ProcessEnd(), 1
    try:
        code = await _work(worker, grace, stuck, facts, worker_end, end)
    except Exception as error:
        code = code_of(error) or 1
        raise
    finally:
        end.within(ORDERLY_SECONDS, code)
        flush(TELEMETRY_SECONDS, logs=False)
    return code


async def _work(
    worker: Worker,
    grace: float,
    stuck: float,
    facts: dict[str, Any],
    worker_end: WorkerEnd | None,
    end: ProcessEnd,
) -> int:
    signals = Signals(asyncio.get_running_loop(), worker.quiet, grace, end)
    if worker_end is not None:
        worker_end.stop = signals.stop
    started = asyncio.create_task(begin(worker) if worker_end is None else worker_end.start(worker))
    await _first(started, signals.received)
    if not started.done():
        started.cancel()
        await asyncio.wait([started])
        last = await worker.stop_process(signals.grace or 0.0)  # it may just have begun
        if last is not None:
            await _end(last, end, DEADLINE, worker_end)
        return DONE
    started.result()
    line_format.worker_id = worker.worker_id
    first = worker_end is None or worker_end.first
    unknown_queues = facts.pop("unknown_queues")
    for problem in unknown_queues if first else ():
        log.warning("%s", problem)
    log.log(logging.INFO if first else logging.DEBUG, banner(facts), extra=facts | {"worker_id": worker.worker_id})
    Watchdog(worker.completing, stuck).start()
    ended = asyncio.create_task(worker.run())
    await _first(ended, signals.received)
    if ended.done():
        await _give_up(worker, grace, ended.exception(), end, worker_end)
        if worker_end is not None:
            worker_end.empty()
        ended.result()
        if worker.worn_out:
            log.error("this process ends (exit code %d), so that it is replaced", STUCK)
        return STUCK if worker.worn_out else DONE
    ended.cancel()
    grace = grace if signals.grace is None else signals.grace
    by = signals.name or "ordered by the supervisor"
    log.info("%s: no more jobs are taken; those that run have %g s. Again to leave at once", by, grace)
    last = await worker.stop_process(grace)
    if last is not None:
        jobs, are = plural(last.left, "job was", "jobs were"), "is" if last.left == 1 else "are"
        log.error("%s still running after %g s and %s given back as this process ends", jobs, grace, are)
        await _end(last, end, DEADLINE, worker_end)
    await worker.run()  # it has ended; raises if a service had failed by then
    if worker_end is not None:
        worker_end.empty()
    log.info("stopped in order")
    return DONE


async def begin(worker: Worker) -> None:
    """Start the worker. If the database goes away between the first look and its row, try again until it is back."""
    backoff, outage = Backoff(), Outage()
    while True:
        try:
            await worker.start()
        except psycopg.Error as error:
            if worker.worker_id or not is_loss(error):
                raise
            outage.lost(START, error)
        else:
            outage.answered(START)
            return
        await asyncio.sleep(backoff.pause())


async def _end(last: LastMessage, end: ProcessEnd, code: int, worker_end: WorkerEnd | None) -> NoReturn:
    """End this process at once: handlers that were stopped may still be at work in it."""
    seconds = await last.prepare()
    if worker_end is not None:
        worker_end.count()
    flush(seconds)
    if not await last.send():
        flush(FLUSH_SECONDS, telemetry=False)
    end.at_once(code)


async def _first(task: asyncio.Task[Any], event: asyncio.Event) -> None:
    """Wait until the task has ended or the event is set."""
    told = asyncio.create_task(event.wait())
    await asyncio.wait({task, told}, return_when=asyncio.FIRST_COMPLETED)
    told.cancel()


async def _give_up(
    worker: Worker, grace: float, failure: BaseException | None, end: ProcessEnd, worker_end: WorkerEnd | None
) -> None:
    """A service failed for good, or nothing is left to do: stop what can be stopped. The caller logs the error itself,
    if the process does not end here."""
    try:
        last = await worker.stop_process(min(grace, 5.0))
    except Exception as error:
        log.warning("could not stop in order: %s; the jobs run again when the lease is over", described(error))
        return
    if last is not None:
        code = 0 if failure is None else code_of(failure)
        if failure is not None:
            log.critical("%s", safe(line_of(failure)), exc_info=None if code else failure)
            if worker_end is not None:
                worker_end.failed(safe(line_of(failure)))
        await _end(last, end, 1 if code is None else code, worker_end)


class Signals:
    """The signals of a worker process.

    - SIGTERM and SIGINT: the first sets `received`, the second ends the process at once.
    - SIGUSR1 calls `quiet`.
    - A supervisor's order to `stop` works as a first signal. A signal after it does not count as the second one.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, quiet: Callable[[], object], grace: float, end: ProcessEnd
    ) -> None:
        self.received = asyncio.Event()
        self.name = ""
        self.grace: float | None = None
        self._loop = loop
        self._grace = grace
        self._end = end
        for number in (signal.SIGTERM, signal.SIGINT):
            forks.handle_signal(number, self._handle)
        forks.handle_signal(signal.SIGUSR1, lambda *_: loop.call_soon_threadsafe(quiet))
        if signal.SIGUSR1 in early_signals.take():
            quiet()

    def stop(self, grace: float) -> None:
        if not self.received.is_set():
            self.grace = grace
            self._end.within(grace + LAST_SECONDS, DEADLINE, standing=grace + STANDS_SECONDS)
            self.received.set()

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self.name:
            write("second signal: leaving at once; what ran will run again when the lease is over")
            self._end.at_once(INTERRUPTED)
        self.name = signal.Signals(number).name
        if self.grace is None:
            self._end.within(self._grace + LAST_SECONDS, DEADLINE, standing=self._grace + STANDS_SECONDS)
        self._loop.call_soon_threadsafe(self.received.set)


def loop_of() -> tuple[str, Callable[[], asyncio.AbstractEventLoop] | None]:
    """The name of the event loop to use, and what makes it; None is asyncio's own."""
    try:
        import uvloop
    except ImportError:
        return "asyncio", None
    return f"uvloop {uvloop.__version__}", uvloop.new_event_loop  # type: ignore[attr-defined]  # said in a module of its own


def facts_of(conn: psycopg.Connection[Any], worker: Worker) -> dict[str, Any]:
    """What the banner says of this worker and its database."""
    settings = worker.settings
    version = migrations.check(conn, config().schema).version
    return {
        "database": place(conn),
        "postgresql": conn.info.parameter_status("server_version"),
        "schema": config().schema,
        "schema_version": version,
        "queues": [name if slots is None else f"{name}:{slots}" for name, slots in settings.queues.items()],
        "tasks": sorted(task.name for task in tasks.declared()),
        "concurrency": settings.concurrency,
        "connections": _connections(worker),
        "unknown_queues": _unknown_queues(conn, worker),
    }


def _unknown_queues(conn: psycopg.Connection[Any], worker: Worker) -> list[str]:
    """What is strange about queues that -q names: no other worker serves them, and no task here names them."""
    named = {task.queue for task in tasks.declared()}
    strange = [queue for queue in worker.settings.queues if queue not in named]
    served = {queue for queue, _ in taken(conn)} if strange else set()
    return [
        f"no task here names queue {queue!r}, and no other live worker serves it{did_you_mean(queue, served | named)}"
        for queue in strange
        if queue not in served
    ]


def _connections(worker: Worker) -> str:
    """How many connections: when idle, the completer's, and at most those of handlers, which have a pool for each kind.

    Each pool may have one for each slot at the same time, because it keeps those that are idle for a minute.
    """
    settings = worker.settings
    own = f"{IDLE_CONNECTIONS if settings.listen else IDLE_CONNECTIONS - 1} idle + 1"
    kinds = {task.is_async for task in tasks.declared() if task.transactional}
    handlers = len(kinds) * settings.handler_connections
    return f"{own}, and up to {handlers} for transactional tasks" if handlers else own


def banner(facts: dict[str, Any]) -> str:
    """What a worker says when it is ready."""
    shown = {
        "database": f"{facts['database']} (PostgreSQL {facts['postgresql']})",
        "schema": f"{facts['schema']}, version {facts['schema_version']}",
        "queues": ", ".join(facts["queues"]),
        "tasks": ", ".join(facts["tasks"]),
        "concurrency": facts["concurrency"],
        "connections": facts["connections"],
        "loop": facts["loop"],
    }
    return "ready\n" + "\n".join(f"  {name + ':':<13}{value}" for name, value in shown.items())
