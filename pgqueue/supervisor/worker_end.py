"""The worker process's end of the pipe to its supervisor: announces itself, reports its state, carries out orders.

Used by the process around the worker (`pgqueue work`). If the supervisor is gone for any reason, the worker takes no
more jobs, finishes those it has, and leaves. A new supervisor starts new workers.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from pgqueue.database import forks
from pgqueue.database.backoff import described, transient
from pgqueue.jobs.totals import Numbers, Sample
from pgqueue.supervisor.pipe import Message, Pipe, inherited, line
from pgqueue.supervisor.process_title import show, worker_title
from pgqueue.worker.worker import Worker

log = logging.getLogger("pgqueue")

VITALS_SECONDS = 1.0
GAUGES_SECONDS = 2.0
LINE_MOST = 32_768
"""Bytes of a line with numbers, about; the other end reads no line of more than 65,536."""


class WorkerEnd:
    """Our end of the pipe, with this file descriptor. `stop` is called with the grace that the supervisor gives us."""

    def __init__(self, fd: int) -> None:
        self._socket: socket.socket = inherited(fd)
        self._place, self._of = 0, 0
        self._let_work = asyncio.Event()
        self._gone = False
        for number in (signal.SIGHUP, signal.SIGTTIN, signal.SIGTTOU):  # only the supervisor handles them
            forks.handle_signal(number, signal.SIG_IGN)
        self._tasks: set[asyncio.Task[None]] = set()
        self.stop: Callable[[float], None] = lambda grace: None
        self.gauges: Callable[[bool], Future[Sequence[Sample]]] | None = None
        """Begins to read the gauges of the database, in a thread of its own, if this worker leads."""
        self._counting = False

    @property
    def first(self) -> bool:
        """Whether this is the first of its fellow processes: it logs what is the same for all."""
        return self._place <= 1

    def failed(self, why: str) -> None:
        """Report why this process could not start. May be called without an event loop."""
        with suppress(OSError):
            self._socket.sendall(line("failed", why=why))

    def waits(self) -> None:
        """Report that the server is starting up, or read only. May be called without an event loop."""
        with suppress(OSError):
            self._socket.sendall(line("waits"))

    async def start(self, worker: Worker) -> None:
        """Start the worker in two steps: it announces itself, and takes jobs when the supervisor lets it work."""
        self._socket.setblocking(False)
        self._pipe = await Pipe.open(self._socket)
        self._worker = worker
        self._serve(self._listen())
        self._serve(self._show())
        await worker.prepare()
        await worker.warm()
        settings = worker.settings
        where: Message = {"dsn": settings.dsn, "listen_dsn": settings.listen_dsn, "schema": settings.schema}
        where |= {"prepare": settings.prepare, "notify": settings.notify}
        self._pipe.say("announce", worker=worker.worker_id, tag=settings.version_tag, **where)
        await self._let_work.wait()
        worker.begin()
        self._title()
        await worker.seen()  # before `running` is reported: a count of workers in the database must not find too few
        self._pipe.say("running", **self._vitals())

    def empty(self) -> None:
        """Report that no job runs and all outcomes are written: what is still in this process hangs."""
        self.count()
        self._pipe.say("empty")

    def count(self) -> None:
        """Report what was counted since the last report: the process is about to end."""
        self._say_counted(self._worker.numbers(), 0)

    def _serve(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _listen(self) -> None:
        async for message in self._pipe.heard():
            self._told(message)
        self._gone = True
        if not self._let_work.is_set():
            self.stop(0.0)
        else:
            log.warning(
                "the supervisor is gone: no more jobs are taken; this process leaves when those it has are done"
            )
            self._quiet()

    def _told(self, message: Message) -> None:
        match message:
            case {"say": "work"}:
                self._let_work.set()
            case {"say": "quiet"}:
                self._quiet()
            case {"say": "stop", "grace": grace}:
                self.stop(float(grace))
            case {"say": "place", "place": int(place), "of": int(of)}:
                self._place, self._of = place, of
                self._title()
            case {"say": "over", "rss": int(size), "limit": int(limit)}:
                self._serve(self._over(size, limit))
            case {"say": "count", "ask": int(ask)} if not self._counting:
                self._serve(self._count(ask))

    def _quiet(self) -> None:
        self._worker.quiet()
        self._serve(self._acknowledge())

    async def _acknowledge(self) -> None:
        await self._worker.quieted()
        self._pipe.say("quiet", **self._vitals())
        self._title()

    async def _over(self, size: int, limit: int) -> None:
        """Name the jobs that run when the memory limit was crossed: in the log, and in their attempts."""
        text = f"its process was over its memory limit: {_mib(size)} of {_mib(limit)}"
        try:
            jobs = await self._worker.remark("memory", text)
        except Exception as error:
            if not transient(error):
                raise
            log.warning("could not note it: %s", described(error))
            jobs = []
        names = ", ".join(f"{job.id} ({job.task})" for job in jobs) or "none"
        log.warning("over the memory limit: %s of %s; jobs running just now: %s", _mib(size), _mib(limit), names)

    async def _count(self, ask: int) -> None:
        """Answer what this worker has counted, and if it leads, the gauges of the database.

        It answers in every case: a process that has not answered is not asked again.
        """
        self._counting = True
        gauges: Sequence[Sample] = ()
        try:
            if self.gauges is not None:
                reading = asyncio.wrap_future(self.gauges(self._worker.numbers().leads))
                gauges = await asyncio.wait_for(reading, GAUGES_SECONDS)
        except TimeoutError:
            pass  # the numbers are shown without the gauges
        except Exception:
            log.exception("the gauges of the database are left out")
        finally:
            self._counting = False
        numbers = self._worker.numbers()
        numbers.gauges = gauges if numbers.leads else ()  # it may have lost the lead meanwhile
        self._say_counted(numbers, ask)

    def _say_counted(self, numbers: Numbers, ask: int) -> None:
        lines = list(numbers.lines(LINE_MOST))
        for each in lines:
            self._pipe.say("counted", ask=ask, last=each is lines[-1], **each)

    async def _show(self) -> None:
        """Report our state once a second: to the supervisor, and in the process's title."""
        while not self._gone:
            self._title()
            if self._let_work.is_set():
                self._pipe.say("vitals", **self._vitals())
            await asyncio.sleep(VITALS_SECONDS)

    def _vitals(self) -> Message:
        return asdict(self._worker.vitals())

    def _title(self) -> None:
        how = self._worker.vitals() if self._let_work.is_set() else None
        busy, slots, state = (how.busy, how.slots, how.state) if how else (0, 0, "starting")
        show(worker_title(self._place, self._of, busy, slots, state))


def _mib(size: int) -> str:
    return f"{size / 2**20:.0f} MiB"
