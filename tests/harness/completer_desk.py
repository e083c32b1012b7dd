"""A completer at work, without a worker around it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from workers import Eyes, Taker

from pgqueue.database.sessions import Session
from pgqueue.jobs.job import Job
from pgqueue.jobs.outcomes import (
    Outcome,
)
from pgqueue.worker.complete.completer import Completer
from pgqueue.worker.complete.outcome_sql import OutcomeSql


class Desk:
    """A completer at work, and the jobs it may end."""

    def __init__(self, taker: Taker, eyes: Eyes) -> None:
        self.taker, self.eyes = taker, eyes
        self.session = Session(taker.link, "complete")
        endings = OutcomeSql(taker.link.schema, "v1", notify=True)
        self.completer = Completer(self.session, taker.state, endings, written=self._written)
        self.written: list[int] = []
        self.messages = 0
        self._run, self.session.run = self.session.run, self._counted  # type: ignore[method-assign]

    async def _counted(self, *messages: Any, **options: Any) -> list[Any]:
        answers = await self._run(*messages, **options)
        self.messages += 1
        return answers

    def _written(self, jobs: Sequence[Job]) -> None:
        self.written += [job.id for job in jobs]

    async def jobs(self, number: int) -> list[Job]:
        """So many running jobs."""
        self.eyes.do("INSERT INTO pgqueue.job (task) SELECT 'x' FROM generate_series(1, %s)", number)
        self.taker.fetcher.wake(zero=True)
        return await self.taker.fetch(number)

    async def end(self, *outcomes: Outcome) -> list[Job]:
        """Jobs with these outcomes, written down."""
        jobs = await self.jobs(len(outcomes))
        for job, outcome in zip(jobs, outcomes, strict=True):
            self.completer.finish(job, outcome)
        await asyncio.wait_for(self.completer.flushed(), 30)
        return jobs


@asynccontextmanager
async def desk_of(dsn: str, eyes: Eyes) -> AsyncIterator[Desk]:
    taker = Taker(dsn)
    desk = Desk(taker, eyes)
    running = asyncio.ensure_future(desk.completer.run())
    try:
        yield desk
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await desk.session.close()
        await taker.close()
