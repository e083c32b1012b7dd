"""Transactional tasks that tests declare and enqueue, and what became of their attempts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from workers import Eyes

from pgqueue import Job
from pgqueue.client.tasks import Task, task
from pgqueue.jobs.retry import RetryPolicy

BOTH = pytest.mark.parametrize("on_loop", [False, True], ids=["thread", "loop"])
WRITE = "UPDATE account SET balance = balance + 1 WHERE id = 1"
SOON = RetryPolicy(attempts=5, first=0.01, most=0.05)


def outcomes(eyes: Eyes) -> list[str]:
    return [outcome for (outcome,) in eyes.all("SELECT outcome FROM pgqueue.attempt ORDER BY finished_at")]


def declared(fn: Callable[..., Any], **options: Any) -> Task[..., Any]:
    name = f"tx.{fn.__qualname__.replace('.<locals>', '')}"
    made: Task[..., Any] = task(name=name, transactional=True, retry=SOON, **options)(fn)
    return made


def enqueued(dsn: str, asked: Any, *args: Any) -> int:
    with psycopg.connect(dsn) as conn:
        handle: Any = asked.enqueue(conn, *args)
    return int(handle.id)


def writer(on_loop: bool) -> Any:
    """A task that writes a little."""

    def writes(job: Job) -> None:
        job.connection.execute(WRITE)

    async def awrites(job: Job) -> None:
        await (await job.aconnection()).execute(WRITE)

    return declared(awrites if on_loop else writes)
