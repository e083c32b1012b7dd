"""Dramatiq on Redis."""

from __future__ import annotations

import time
from typing import Any

import dramatiq
from dramatiq.brokers.redis import RedisBroker

from bench.peers.adapters import handler
from bench.peers.adapters.handler import BROKER, SETTINGS

dramatiq.set_broker(RedisBroker(url=BROKER))


def noop(number: int) -> None:
    handler.ran(number)


def application(number: int, text: str) -> None:
    handler.ran(number)
    time.sleep(handler.WORK_SECONDS)


ACTORS = {fn.__name__: dramatiq.actor(fn) for fn in (noop, application)}
ACTORS["elsewhere"] = dramatiq.actor(noop, actor_name="elsewhere", queue_name="elsewhere")


class Peer:
    def setup(self) -> None:
        """There is nothing to set up."""

    def open(self) -> None:
        """The connection is made with the first job."""

    def close(self) -> None:
        dramatiq.get_broker().close()

    def one(self, task: str, job: dict[str, Any]) -> None:
        ACTORS[task].send(**job)

    def many(self, task: str, jobs: list[dict[str, Any]]) -> None:
        for job in jobs:
            ACTORS[task].send(**job)

    def work(self) -> None:
        handler.become(
            "dramatiq", __name__, "--processes", "1", "--threads", str(SETTINGS["threads"]), "--queues", "default"
        )
