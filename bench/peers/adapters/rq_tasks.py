"""RQ on Redis."""

from __future__ import annotations

import time
from typing import Any

from redis import Redis
from rq import Queue

from bench.peers.adapters import handler
from bench.peers.adapters.handler import BROKER, HISTORY, SETTINGS


def noop(number: int) -> None:
    handler.ran(number)


def application(number: int, text: str) -> None:
    handler.ran(number)
    time.sleep(handler.WORK_SECONDS)


TASKS = {fn.__name__: fn for fn in (noop, application)} | {"elsewhere": noop}
KEPT_SECONDS = 86_400 if HISTORY else 0


class Peer:
    def setup(self) -> None:
        """There is nothing to set up."""

    def open(self) -> None:
        self._redis = Redis.from_url(BROKER)
        queue, elsewhere = (Queue(name, connection=self._redis) for name in ("bench", "elsewhere"))
        self._queues = {task: elsewhere if task == "elsewhere" else queue for task in TASKS}

    def close(self) -> None:
        self._redis.close()

    def one(self, task: str, job: dict[str, Any]) -> None:
        self._queues[task].enqueue(TASKS[task], kwargs=job, result_ttl=KEPT_SECONDS)

    def many(self, task: str, jobs: list[dict[str, Any]]) -> None:
        for low in range(0, len(jobs), SETTINGS["bulk"]):
            batch = jobs[low : low + SETTINGS["bulk"]]
            prepared = [Queue.prepare_data(TASKS[task], kwargs=job, result_ttl=KEPT_SECONDS) for job in batch]
            self._queues[task].enqueue_many(prepared)

    def work(self) -> None:
        options = ["--url", BROKER, "--worker-class", SETTINGS["worker_class"], "--quiet"]
        handler.become("rq.cli", "worker", "bench", *options)
