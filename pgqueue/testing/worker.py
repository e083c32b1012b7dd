"""A real worker for one test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from pgqueue.client.tasks import Task
from pgqueue.worker.worker import Worker

GRACE = 5.0


@asynccontextmanager
async def working(dsn: str, tasks: Sequence[Task[..., Any]], options: Mapping[str, Any]) -> AsyncIterator[Worker]:
    """A worker of these tasks, or of all that are declared. At the end it is stopped."""
    options = {"grace": GRACE, **options}
    grace = options.pop("grace")
    worker = Worker(dsn=dsn, tasks=list(tasks) or None, **options)
    async with worker:
        try:
            yield worker
        finally:
            await worker.stop(grace)
