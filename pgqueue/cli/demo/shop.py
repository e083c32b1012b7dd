"""The demo's shop: its two tasks, and the transaction that takes an order. An application would look like this.

Imported by the demo's workers (`pgqueue work pgqueue.cli.demo.shop`) and its producers. Each handler notes its run, one
row per run, for the account at the end.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg_pool import AsyncConnectionPool, ConnectionPool

from pgqueue.client.lifespan import lifespan
from pgqueue.client.tasks import task
from pgqueue.config import config
from pgqueue.jobs.job import Job

QUEUE = "shop"
DECLINED = 8  # one card in eight is declined
WORK = (0.02, 0.12)  # seconds one job takes, at least and at most

NOTE = """
INSERT INTO shop_run (job_id, order_id, task, order_seen)
VALUES (%(job)s, %(order)s, %(task)s, EXISTS (SELECT FROM shop_order WHERE id = %(order)s))
"""


@dataclass(frozen=True, slots=True)
class Resources:
    """What the handlers of one worker share: connections for handlers on the loop, and for handlers in threads."""

    loop: AsyncConnectionPool[psycopg.AsyncConnection[Any]]
    threads: ConnectionPool[psycopg.Connection[Any]]


@lifespan
async def resources() -> AsyncIterator[Resources]:
    """Connections to the shop. Also ends this worker when the demo that started it is gone."""
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), _end_with_the_demo)
    dsn, options = config().require_dsn(), {"autocommit": True}
    with ConnectionPool(dsn, kwargs=options, min_size=1, max_size=4, open=True) as threads:
        async with AsyncConnectionPool(dsn, kwargs=options, min_size=1, max_size=4, open=False) as loop:
            yield Resources(loop, threads)


def _end_with_the_demo() -> None:
    """The demo has closed our stdin, or has died: end this worker."""
    os._exit(1)


@task(name="shop.send_receipt", queue=QUEUE)
async def send_receipt(job: Job, order_id: int) -> None:
    """An async task: runs on the worker's event loop."""
    async with job.resources.loop.connection() as conn:
        await conn.execute(NOTE, {"job": job.id, "order": order_id, "task": job.task})
    await asyncio.sleep(random.uniform(*WORK))


@task(name="shop.pack_parcel", queue=QUEUE)
def pack_parcel(job: Job, order_id: int) -> None:
    """A sync task: runs in a thread, at the same time."""
    with job.resources.threads.connection() as conn:
        conn.execute(NOTE, {"job": job.id, "order": order_id, "task": job.task})
    time.sleep(random.uniform(*WORK))


TASKS = (send_receipt, pack_parcel)


class Declined(Exception):
    """The card was declined: the order's transaction is rolled back, and its jobs with it."""


def take_order(conn: psycopg.Connection[Any], card: random.Random) -> None:
    """Take one order and enqueue its jobs in one transaction. If the card is declined, Declined rolls it back."""
    with conn.transaction():
        row = conn.execute(
            "INSERT INTO shop_order (cents) VALUES (%s) RETURNING id", [card.randrange(100, 10_000)]
        ).fetchone()
        assert row is not None
        for each in TASKS:
            each.enqueue(conn, order_id=row[0])
        if card.randrange(DECLINED) == 0:
            raise Declined
