"""PgQueuer, with asyncpg."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import asyncpg
from pgqueuer import PgQueuer
from pgqueuer.db import AsyncpgDriver
from pgqueuer.queries import Queries

from bench.peers.adapters import handler
from bench.peers.adapters.handler import DSN, SETTINGS

logging.disable(logging.INFO)


async def noop(job: Any) -> None:
    handler.ran(json.loads(job.payload)["number"])


async def application(job: Any) -> None:
    handler.ran(json.loads(job.payload)["number"])
    await asyncio.sleep(handler.WORK_SECONDS)


class Peer:
    async def setup(self) -> None:
        await self.open()
        await self._queries.install()
        await self.close()

    async def open(self) -> None:
        self._conn = await asyncpg.connect(DSN)
        self._queries = Queries(AsyncpgDriver(self._conn))

    async def close(self) -> None:
        await self._conn.close()

    async def one(self, task: str, job: dict[str, Any]) -> None:
        await self._queries.enqueue(task, json.dumps(job).encode())

    async def many(self, task: str, jobs: list[dict[str, Any]]) -> None:
        for low in range(0, len(jobs), SETTINGS["bulk"]):
            payloads = [json.dumps(job).encode() for job in jobs[low : low + SETTINGS["bulk"]]]
            await self._queries.enqueue([task] * len(payloads), payloads, [0] * len(payloads))

    async def work(self) -> None:
        app = PgQueuer.from_asyncpg_connection(await asyncpg.connect(DSN))
        for fn in (noop, application):
            app.entrypoint(fn.__name__)(fn)
        await app.run(batch_size=SETTINGS["batch_size"], max_concurrent_tasks=SETTINGS.get("max_concurrent_tasks"))
