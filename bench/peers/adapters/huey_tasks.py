"""huey on Redis."""

from __future__ import annotations

import time
from typing import Any

from huey import RedisHuey

from bench.peers.adapters import handler
from bench.peers.adapters.handler import BROKER, HISTORY, SETTINGS

huey = RedisHuey("bench", url=BROKER, results=HISTORY, store_none=HISTORY)
unserved = RedisHuey("elsewhere", url=BROKER)


def noop(number: int) -> None:
    handler.ran(number)


def application(number: int, text: str) -> None:
    handler.ran(number)
    time.sleep(handler.WORK_SECONDS)


TASKS = {fn.__name__: huey.task(name=fn.__name__)(fn) for fn in (noop, application)}
TASKS["elsewhere"] = unserved.task(name="elsewhere")(noop)


class Peer:
    def setup(self) -> None:
        """There is nothing to set up."""

    def open(self) -> None:
        """The connection is made with the first job."""

    def close(self) -> None:
        huey.storage.close()
        unserved.storage.close()

    def one(self, task: str, job: dict[str, Any]) -> None:
        TASKS[task](**job)

    def many(self, task: str, jobs: list[dict[str, Any]]) -> None:
        for job in jobs:
            TASKS[task](**job)

    def work(self) -> None:
        options = ["--workers", str(SETTINGS["workers"]), "--worker-type", "thread", "--quiet"]
        handler.become("huey.bin.huey_consumer", f"{__name__}.huey", *options)
