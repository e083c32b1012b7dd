"""Oban for Python."""

from __future__ import annotations

import asyncio
import logging
import signal
from typing import Any

from oban import Oban
from oban.decorators import job as oban_job
from oban.schema import install

from bench.peers.adapters import handler
from bench.peers.adapters.handler import DSN, SETTINGS

logging.disable(logging.INFO)


async def noop(number: int) -> None:
    handler.ran(number)


async def application(number: int, text: str) -> None:
    handler.ran(number)
    await asyncio.sleep(handler.WORK_SECONDS)


async def elsewhere(number: int) -> None:
    """No worker serves its queue."""


TASKS: dict[str, Any] = {fn.__name__: oban_job(queue="bench")(fn) for fn in (noop, application)}
TASKS["elsewhere"] = oban_job(queue="elsewhere")(elsewhere)


class Peer:
    async def setup(self) -> None:
        pool = await Oban.create_pool(DSN)
        await install(pool)
        await pool.close()

    async def open(self) -> None:
        self._pool = await Oban.create_pool(DSN, max_size=SETTINGS["max_size"])
        self._oban = Oban(pool=self._pool)

    async def close(self) -> None:
        await self._pool.close()

    async def one(self, task: str, job: dict[str, Any]) -> None:
        await self._oban.enqueue(TASKS[task].new(**job))

    async def many(self, task: str, jobs: list[dict[str, Any]]) -> None:
        for low in range(0, len(jobs), SETTINGS["bulk"]):
            await self._oban.enqueue_many([TASKS[task].new(**job) for job in jobs[low : low + SETTINGS["bulk"]]])

    async def work(self) -> None:
        ended = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
        pool = await Oban.create_pool(DSN, max_size=SETTINGS["max_size"])
        async with Oban(pool=pool, queues={"bench": SETTINGS["limit"]}):
            await ended.wait()
        await pool.close()
