"""An executor alone, without a database: jobs are made up, outcomes collected."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

from worker_states import worker_state

from pgqueue.client.tasks import Task, task
from pgqueue.database.sessions import Link, Session
from pgqueue.jobs.context import JobContext
from pgqueue.jobs.fields import claimed
from pgqueue.jobs.job import Job
from pgqueue.jobs.outcomes import (
    Outcome,
)
from pgqueue.worker.run.executor import Executor
from pgqueue.worker.run.running_jobs import RunningJobs
from pgqueue.worker.run.serialization_retries import SerializationRetries
from pgqueue.worker.run.slots import SlotGroup

EPOCH = datetime(2000, 1, 1, tzinfo=UTC)


class Bench:
    """An executor with made-up jobs; `outcomes` are what it reported, in order."""

    def __init__(self, *tasks: Task[..., Any], slots: int = 2) -> None:
        self.pool = SlotGroup(["default"], slots)
        self.outcomes: dict[int, Outcome] = {}
        self.order: list[int] = []
        self.lows = 0
        self._tasks = {task.name: task for task in tasks}
        link = Link("", "pgqueue")
        self.running = RunningJobs([self.pool])
        self.executor = Executor(
            self.running,
            self._tasks,
            JobContext("the lifespan's"),
            SerializationRetries(Session(link, "bench"), worker_state(link)),
            finish=self._finish,
            slots_freed=self._low,
        )
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        self._last = 0

    def offer(self, name: str | Task[..., Any], number: int = 1, **values: Any) -> list[int]:
        task_name = name if isinstance(name, str) else name.name
        jobs = [self.job(task_name, **values) for _ in range(number)]
        self.executor.offer(self.pool, jobs)
        return [job.id for job in jobs]

    def job(
        self, name: str, args: str = "{}", attempt: int = 1, max_attempts: int | None = None, age: float = 0.0
    ) -> Job:
        self._last += 1
        enqueued = datetime.now(UTC) - timedelta(seconds=age) - EPOCH
        micros = enqueued // timedelta(microseconds=1)
        numbers = {"id": self._last, "pos": self._last, "attempt": attempt, "max_attempts": max_attempts}
        return Job(claimed(task=name, args=args, enqueued_at=micros, **numbers), claim=1)

    async def outcome(self, job: int) -> Outcome:
        await self.until(lambda: job in self.outcomes)
        return self.outcomes[job]

    async def run(self, name: str | Task[..., Any], **values: Any) -> Outcome:
        """Offer one job and wait for its outcome."""
        [job] = self.offer(name, **values)
        return await self.outcome(job)

    async def until(self, condition: Callable[[], bool], seconds: float = 5.0) -> None:
        async with asyncio.timeout(seconds):
            while not condition():
                self._news.clear()
                await self._news.wait()

    def _finish(self, job: Job, outcome: Outcome) -> None:
        self.outcomes[job.id] = outcome
        self.order.append(job.id)
        self._loop.call_soon_threadsafe(self._news.set)

    def _low(self) -> None:
        self.lows += 1
        self._news.set()


@task(name="executor.plain")
async def plain() -> None: ...


def made(function: Callable[..., Any], name: str, **options: Any) -> Task[..., Any]:
    """A task of a function made in the test, not in the registry."""
    from pgqueue.client.tasks import _declare

    return _declare(function, {"name": name, **options})  # type: ignore[typeddict-item]
