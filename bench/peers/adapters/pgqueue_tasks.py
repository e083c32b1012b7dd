"""pgqueue, as it is installed beside this bench."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import psycopg

import pgqueue
from bench.peers.adapters import handler
from bench.peers.adapters.handler import DSN, SETTINGS
from pgqueue.database import migrations

logging.disable(logging.INFO)


@pgqueue.task(name="noop")
async def noop(number: int) -> None:
    handler.ran(number)


@pgqueue.task(name="application")
async def application(number: int, text: str) -> None:
    handler.ran(number)
    await asyncio.sleep(handler.WORK_SECONDS)


@pgqueue.task(name="elsewhere", queue="elsewhere")
async def elsewhere(number: int) -> None:
    """No worker serves its queue."""


TASKS: dict[str, Any] = {"noop": noop, "application": application, "elsewhere": elsewhere}


class Peer:
    def setup(self) -> None:
        migrations.migrate(DSN)

    async def open(self) -> None:
        self._conn = await psycopg.AsyncConnection.connect(DSN, autocommit=True)

    async def close(self) -> None:
        await self._conn.close()

    async def one(self, task: str, job: dict[str, int | str]) -> None:
        await TASKS[task].aenqueue(self._conn, **job)

    async def many(self, task: str, jobs: list[dict[str, int | str]]) -> None:
        size = SETTINGS["bulk"]
        for low in range(0, len(jobs), size):
            batch = [TASKS[task].new(**job) for job in jobs[low : low + size]]
            await pgqueue.aenqueue_many(self._conn, batch)

    async def work(self) -> None:
        worker = pgqueue.Worker(dsn=DSN, queues=["default"], concurrency=SETTINGS["concurrency"])
        await worker.start()
        await worker.run()
