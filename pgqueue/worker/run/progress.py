"""Writes down what handlers say of how far they are (`job.progress`), and tidies up after jobs that leave such rows.

A handler only puts two numbers into a dict; once a second, if one has said something, one statement writes the
last of all jobs of this worker, by their fence. If none says anything: no statement. Jobs that are over are named by
the worker (`over`), in one call per flush of the completer; their rows go with the next statement, so completions pay
nothing. What a dead worker leaves is found by maintenance (`sweep`). A row that is left is never shown: control
shows only what was said since the job was claimed.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pgqueue.database.backoff import persist
from pgqueue.database.sessions import Session
from pgqueue.database.statements import Statement
from pgqueue.jobs.job import Job
from pgqueue.worker.state import WorkerState

ROUND_SECONDS = 1.0
SWEPT_MOST = 1_000

Said = tuple[float, float | None]


class Progress:
    """Takes what jobs say, from any thread. `iterated` is told which jobs are over, and says which of them have gone
    through an iteration."""

    def __init__(
        self,
        session: Session,
        state: WorkerState,
        *,
        iterated: Callable[[Iterable[Job]], list[int]],
    ) -> None:
        self._session = session
        self._state = state
        self._iterated = iterated
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._wake = asyncio.Event()
        self._signalled = False
        # Never replaced, only emptied: a thread may be in the middle of saying something.
        self._said: dict[Job, Said] = {}
        self._written: set[Job] = set()
        self._silent: set[int] = set()
        """Jobs that are over and may have a row in `job_progress`."""
        self._through: set[int] = set()
        """Jobs that are over and may have rows in `job_cursor`."""
        self._swept_to = 0

    def report(self, job: Job, done: float, total: float | None) -> None:
        """Take what this job says. No I/O but, at most once a second, a signal to the loop."""
        self._said[job] = (done, total)
        self._signal()

    def ended(self, jobs: Sequence[Job]) -> None:
        """These jobs are not ours any more. Called on the loop."""
        iterated = self._iterated(jobs)
        silent = self._written.intersection(jobs) if self._written else ()
        if iterated or silent:
            self._written.difference_update(silent)
            self._silent.update(job.id for job in silent)
            self._through.update(iterated)
            self._signal()

    async def run(self) -> None:
        """Write until cancelled, at most once a second."""
        await persist(self._step, name="progress")

    async def sweep(self) -> None:
        """Throw away what is left of jobs that others ran."""
        link = self._session.link
        _, [(last,)] = await self._session.run(
            link.statement("progress_sweep", n=SWEPT_MOST),
            link.statement("progress_sweep_cursors", after=self._swept_to, n=SWEPT_MOST),
        )
        self._swept_to = last or 0

    async def _step(self) -> None:
        await self._wake.wait()
        self._wake.clear()
        self._signalled = False
        await self._write()
        await asyncio.sleep(ROUND_SECONDS)

    async def _write(self) -> None:
        said = dict(self._said.popitem() for _ in range(len(self._said)))
        said = {job: numbers for job, numbers in said.items() if self._state.holds(job)}
        silent, self._silent = self._silent, set()
        through, self._through = self._through, set()
        self._written.update(said)
        try:
            await self._session.run(*self._statements(said, silent, through))
        except BaseException:
            for job, numbers in said.items():
                self._said.setdefault(job, numbers)
            self._silent |= silent
            self._through |= through
            self._signal()
            raise

    def _statements(self, said: dict[Job, Said], silent: set[int], through: set[int]) -> list[Statement[Any]]:
        link = self._session.link
        made: list[Statement[Any]] = []
        if said:
            columns = {
                "ids": [job.id for job in said],
                "claims": [job.claim for job in said],
                "dones": [float(done) for done, _ in said.values()],
                "totals": [None if total is None else float(total) for _, total in said.values()],
            }
            made.append(link.statement("progress_write", worker_id=self._state.id, **columns))
        if silent:
            made.append(link.statement("progress_forget", ids=sorted(silent)))
        if through:
            made.append(link.statement("iteration_forget", ids=sorted(through)))
        return made

    def _signal(self) -> None:
        if not self._signalled:
            self._signalled = True
            if threading.get_ident() == self._thread:
                self._wake.set()
            elif not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._wake.set)
