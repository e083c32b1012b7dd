"""awa-pg. Its engine is in Rust; the handlers are coroutines of Python."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from awa import AsyncClient

from bench.peers.adapters import handler
from bench.peers.adapters.handler import DSN, SETTINGS

logging.disable(logging.INFO)
_PARTS = urlsplit(DSN)
# Its driver takes a socket from the query, but only from an address without a user.
URL = f"postgresql://{_PARTS.path}?{_PARTS.query}&user={_PARTS.username}"


@dataclass
class Noop:
    number: int


@dataclass
class Application:
    number: int
    text: str


@dataclass
class Elsewhere:
    number: int


KINDS: dict[str, Any] = {"noop": Noop, "application": Application, "elsewhere": Elsewhere}


async def noop(job: Any) -> None:
    handler.ran(job.args.number)


async def application(job: Any) -> None:
    handler.ran(job.args.number)
    await asyncio.sleep(handler.WORK_SECONDS)


class Peer:
    async def setup(self) -> None:
        """The first worker of a fresh installation chooses the engine that its documentation recommends."""
        async with AsyncClient(URL) as client:
            await client.migrate()
            client.task(Noop, queue="bench")(noop)
            await client.start([("bench", 1)])
            while json.loads(await client.storage_status())["active_engine"] != "queue_storage":  # noqa: ASYNC110 - only told
                await asyncio.sleep(0.1)
            await client.shutdown()

    async def open(self) -> None:
        self._client = AsyncClient(URL)

    async def close(self) -> None:
        await self._client.close()

    async def one(self, task: str, job: dict[str, Any]) -> None:
        await self._client.insert(KINDS[task](**job), queue=_queue(task))

    async def many(self, task: str, jobs: list[dict[str, Any]]) -> None:
        for low in range(0, len(jobs), SETTINGS["bulk"]):
            batch = [KINDS[task](**job) for job in jobs[low : low + SETTINGS["bulk"]]]
            await self._client.enqueue_many_copy(batch, queue=_queue(task))

    async def work(self) -> None:
        ended = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
        client = AsyncClient(URL, max_connections=SETTINGS["max_connections"])
        for kind, handle in ((Noop, noop), (Application, application)):
            client.task(kind, queue="bench")(handle)
        await client.start([("bench", SETTINGS["workers"])])
        await ended.wait()
        await client.shutdown()
        await client.close()


def _queue(task: str) -> str:
    return "elsewhere" if task == "elsewhere" else "bench"
