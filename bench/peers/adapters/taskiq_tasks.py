"""taskiq on a Redis stream."""

from __future__ import annotations

import asyncio
from typing import Any

from taskiq_redis import RedisAsyncResultBackend, RedisStreamBroker

from bench.peers.adapters import handler
from bench.peers.adapters.handler import BROKER, HISTORY, SETTINGS

broker = RedisStreamBroker(url=BROKER, queue_name="bench", consumer_group_name="workers")
unserved = RedisStreamBroker(url=BROKER, queue_name="elsewhere", consumer_group_name="workers")
if HISTORY:
    broker = broker.with_result_backend(RedisAsyncResultBackend(redis_url=BROKER, result_ex_time=86_400))


async def noop(number: int) -> None:
    handler.ran(number)


async def application(number: int, text: str) -> None:
    handler.ran(number)
    await asyncio.sleep(handler.WORK_SECONDS)


TASKS = {fn.__name__: broker.task(task_name=fn.__name__)(fn) for fn in (noop, application)}
TASKS["elsewhere"] = unserved.task(task_name="elsewhere")(noop)


class Peer:
    async def setup(self) -> None:
        await self.open()
        await self.close()

    async def open(self) -> None:
        await broker.startup()
        await unserved.startup()

    async def close(self) -> None:
        await broker.shutdown()
        await unserved.shutdown()

    async def one(self, task: str, job: dict[str, Any]) -> None:
        await TASKS[task].kiq(**job)

    async def many(self, task: str, jobs: list[dict[str, Any]]) -> None:
        for low in range(0, len(jobs), SETTINGS["at_once"]):
            await asyncio.gather(*(TASKS[task].kiq(**job) for job in jobs[low : low + SETTINGS["at_once"]]))

    def work(self) -> None:
        options = ["--workers", "1", "--max-async-tasks", str(SETTINGS["max_async_tasks"]), "--log-level", "WARNING"]
        handler.become("taskiq", "worker", f"{__name__}:broker", *options)
