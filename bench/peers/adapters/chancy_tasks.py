"""Chancy."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from chancy import Chancy, Job, Queue, Worker

from bench.peers.adapters import handler
from bench.peers.adapters.handler import DSN, SETTINGS

logging.disable(logging.INFO)


async def noop(*, number: int) -> None:
    handler.ran(number)


async def application(*, number: int, text: str) -> None:
    handler.ran(number)
    await asyncio.sleep(handler.WORK_SECONDS)


TASKS = {fn.__name__: fn for fn in (noop, application)} | {"elsewhere": noop}


class Peer:
    def __init__(self) -> None:
        self._app = Chancy(DSN)

    async def setup(self) -> None:
        queue = Queue(
            "bench",
            concurrency=SETTINGS["concurrency"],
            executor=SETTINGS["executor"],
            polling_interval=SETTINGS["polling_interval"],
            eager_polling=SETTINGS["eager_polling"],
        )
        async with self._app as app:
            await app.migrate()
            await app.declare(queue)

    async def open(self) -> None:
        await self._app.__aenter__()

    async def close(self) -> None:
        await self._app.__aexit__(None, None, None)

    async def one(self, task: str, job: dict[str, Any]) -> None:
        await self._app.push(self._job(task, job))

    async def many(self, task: str, jobs: list[dict[str, Any]]) -> None:
        async for _ in self._app.push_many([self._job(task, job) for job in jobs], batch_size=SETTINGS["bulk"]):
            pass  # the references to the jobs

    async def work(self) -> None:
        async with self._app, Worker(self._app) as worker:
            await worker.wait_for_shutdown()

    def _job(self, task: str, job: dict[str, Any]) -> Any:
        return Job.from_func(TASKS[task], kwargs=job, queue="elsewhere" if task == "elsewhere" else "bench")
