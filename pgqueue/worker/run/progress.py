"""Writes down the progress that handlers report (`job.progress`), and deletes the rows when the jobs are over.

A handler only puts two numbers into a dict. Once a second one statement writes the last numbers of all jobs of this
worker, by their fence. If no handler reported anything, there is no statement. The worker names the jobs that are over
(`ended`) once per flush of the completer. Their rows go with the next statement, so completions pay nothing.
Housekeeping finds the rows that a dead worker leaves (`sweep`). No reader sees such a row: only progress since the job
was claimed is shown.
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

Report = tuple[float, float | None]


class Progress:
    """Takes progress from handlers, in any thread. `iterated` is given jobs that are over, and answers which of them
    have gone through an iteration. `late` is the session of housekeeping."""

    def __init__(
        self,
        session: Session,
        late: Session,
        state: WorkerState,
        *,
        iterated: Callable[[Iterable[Job]], list[int]],
    ) -> None:
        self._session = session
        self._late = late
        self._state = state
        self._iterated = iterated
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._wake = asyncio.Event()
        self._signalled = False
        # Never replaced, only emptied: a thread may be in the middle of a report.
        self._reports: dict[Job, Report] = {}
        self._written: set[Job] = set()
        self._rows_left: set[int] = set()
        """Jobs that are over and may have a row in `job_progress`."""
        self._cursors_left: set[int] = set()
        """Jobs that are over and may have rows in `job_cursor`."""
        self._swept_to = 0

    def report(self, job: Job, done: float, total: float | None) -> None:
        """Take the progress of this job. No I/O but, at most once a second, a signal to the loop."""
        self._reports[job] = (done, total)
        self._signal()

    def ended(self, jobs: Sequence[Job]) -> None:
        """These jobs are not ours any more. Called on the loop."""
        iterated = self._iterated(jobs)
        rows_left = self._written.intersection(jobs) if self._written else ()
        if iterated or rows_left:
            self._written.difference_update(rows_left)
            self._rows_left.update(job.id for job in rows_left)
            self._cursors_left.update(iterated)
            self._signal()

    async def run(self) -> None:
        """Write until cancelled, at most once a second."""
        await persist(self._step, name="progress", answers=self._session.answers, past_data=True)

    async def sweep(self) -> None:
        """Delete the rows that are left of jobs that other workers ran: housekeeping."""
        await self._late.run(self._late.link.statement("progress_sweep", n=SWEPT_MOST))

    async def sweep_cursors(self) -> None:
        """The same for the cursors of iterations."""
        sweep = self._late.link.statement("progress_sweep_cursors", after=self._swept_to, n=SWEPT_MOST)
        [[(last,)]] = await self._late.run(sweep)
        self._swept_to = last or 0

    async def _step(self) -> None:
        await self._wake.wait()
        self._wake.clear()
        self._signalled = False
        await self._write()
        await asyncio.sleep(ROUND_SECONDS)

    async def _write(self) -> None:
        reports = dict(self._reports.popitem() for _ in range(len(self._reports)))
        reports = {job: numbers for job, numbers in reports.items() if self._state.holds(job)}
        rows_left, self._rows_left = self._rows_left, set()
        cursors_left, self._cursors_left = self._cursors_left, set()
        self._written.update(reports)
        try:
            await self._session.run(*self._statements(reports, rows_left, cursors_left))
        except BaseException:
            for job, numbers in reports.items():
                self._reports.setdefault(job, numbers)
            self._rows_left |= rows_left
            self._cursors_left |= cursors_left
            self._signal()
            raise

    def _statements(
        self, reports: dict[Job, Report], rows_left: set[int], cursors_left: set[int]
    ) -> list[Statement[Any]]:
        link = self._session.link
        made: list[Statement[Any]] = []
        if reports:
            columns = {
                "ids": [job.id for job in reports],
                "claims": [job.claim for job in reports],
                "dones": [float(done) for done, _ in reports.values()],
                "totals": [None if total is None else float(total) for _, total in reports.values()],
            }
            made.append(link.statement("progress_write", worker_id=self._state.id, **columns))
        if rows_left:
            made.append(link.statement("progress_forget", ids=sorted(rows_left)))
        if cursors_left:
            made.append(link.statement("iteration_forget", ids=sorted(cursors_left)))
        return made

    def _signal(self) -> None:
        if not self._signalled:
            self._signalled = True
            if threading.get_ident() == self._thread:
                self._wake.set()
            elif not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._wake.set)
