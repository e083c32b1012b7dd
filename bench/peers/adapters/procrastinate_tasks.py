"""Procrastinate."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import procrastinate

from bench.peers.adapters import handler
from bench.peers.adapters.handler import DSN, SETTINGS

logging.disable(logging.INFO)


async def noop(number: int) -> None:
    handler.ran(number)


async def application(number: int, text: str) -> None:
    handler.ran(number)
    await asyncio.sleep(handler.WORK_SECONDS)


class Peer:
    def __init__(self) -> None:
        connector = procrastinate.PsycopgConnector(conninfo=DSN, max_size=SETTINGS["max_size"])
        self._app = procrastinate.App(connector=connector)
        self._tasks = {fn.__name__: self._app.task(name=fn.__name__)(fn) for fn in (noop, application)}
        self._tasks["elsewhere"] = self._app.task(name="elsewhere", queue="elsewhere")(noop)

    async def setup(self) -> None:
        async with self._app.open_async():
            await self._app.schema_manager.apply_schema_async()

    async def open(self) -> None:
        await self._app.open_async()

    async def close(self) -> None:
        await self._app.close_async()

    async def one(self, task: str, job: dict[str, Any]) -> None:
        await self._tasks[task].defer_async(**job)

    async def many(self, task: str, jobs: list[dict[str, Any]]) -> None:
        for low in range(0, len(jobs), SETTINGS["bulk"]):
            await self._tasks[task].batch_defer_async(*jobs[low : low + SETTINGS["bulk"]])

    async def work(self) -> None:
        async with self._app.open_async():
            await self._app.run_worker_async(queues=["default"], concurrency=SETTINGS["concurrency"])
