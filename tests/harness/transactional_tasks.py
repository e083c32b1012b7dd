"""Transactional tasks that tests declare and enqueue, and what became of their attempts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from workers import Eyes, until

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


def together(dsn: str, worker: Any, *tasks: Any) -> int:
    """Enqueue a job of each in one transaction, so that one claim brings them all; the last id."""
    for pool in worker.services.running.groups:
        pool.prefetch = 20
    with psycopg.connect(dsn) as conn:
        return [int(asked.enqueue(conn).id) for asked in tasks][-1]


def writer(on_loop: bool) -> Any:
    """A task that writes a little."""

    def writes(job: Job) -> None:
        job.connection.execute(WRITE)

    async def awrites(job: Job) -> None:
        await (await job.aconnection()).execute(WRITE)

    return declared(awrites if on_loop else writes)


def laster(on_loop: bool, begun: threading.Event, going: threading.Event) -> Any:
    """A transactional task that never asks for its connection, and lasts until it may go on."""

    def lasts(job: Job) -> None:
        begun.set()
        going.wait(60)

    async def alasts(job: Job) -> None:
        begun.set()
        await until(going.is_set, 60)

    return declared(alasts if on_loop else lasts)
