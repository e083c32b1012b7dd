"""absurd-sdk: each job is a task of one step-less function. Its schema comes with absurdctl, which needs psql."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

from absurd_sdk import AsyncAbsurd

from bench.peers.adapters import handler
from bench.peers.adapters.handler import DSN, SETTINGS

logging.disable(logging.INFO)
ABSURDCTL = Path(sys.executable).with_name("absurdctl")


async def noop(params: Any, ctx: Any) -> None:
    handler.ran(params["number"])


async def application(params: Any, ctx: Any) -> None:
    handler.ran(params["number"])
    await asyncio.sleep(handler.WORK_SECONDS)


class Peer:
    async def setup(self) -> None:
        await asyncio.to_thread(subprocess.run, [str(ABSURDCTL), "init", "--database", DSN], check=True)
        await self.open()
        for queue in ("bench", "elsewhere"):
            await self._app.create_queue(queue)
        await self.close()

    async def open(self) -> None:
        self._app = AsyncAbsurd(DSN, queue_name="bench")

    async def close(self) -> None:
        await self._app.close()

    async def one(self, task: str, job: dict[str, Any]) -> None:
        await self._app.spawn(task, job, queue="elsewhere" if task == "elsewhere" else "bench")

    async def many(self, task: str, jobs: list[dict[str, Any]]) -> None:
        for job in jobs:
            await self.one(task, job)

    async def work(self) -> None:
        await self.open()
        for fn in (noop, application):
            self._app.register_task(name=fn.__name__)(fn)
        await self._app.start_worker(
            concurrency=SETTINGS["concurrency"],
            batch_size=SETTINGS["batch_size"],
            poll_interval=SETTINGS["poll_interval"],
        )
