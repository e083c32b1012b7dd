"""Celery on Redis and on RabbitMQ. Results are kept on Redis only: on RabbitMQ each is a message, read once."""

from __future__ import annotations

import time
from typing import Any

from celery import Celery

from bench.peers.adapters import handler
from bench.peers.adapters.handler import BROKER, HISTORY, SETTINGS

KEEPS = HISTORY and BROKER.startswith("redis:")
app = Celery("bench", broker=BROKER, backend=BROKER if KEEPS else None)
app.conf.update(
    task_default_queue="bench",
    task_ignore_result=not KEEPS,
    broker_transport_options={"confirm_publish": True} if SETTINGS.get("confirm_publish") else {},
    worker_prefetch_multiplier=SETTINGS.get("prefetch", 4),
    broker_connection_retry_on_startup=True,
)


def noop(number: int) -> None:
    handler.ran(number)


def application(number: int, text: str) -> None:
    handler.ran(number)
    time.sleep(handler.WORK_SECONDS)


TASKS = {fn.__name__: app.task(name=fn.__name__)(fn) for fn in (noop, application)}
TASKS["elsewhere"] = app.task(name="elsewhere", queue="elsewhere")(noop)


class Peer:
    def setup(self) -> None:
        """There is nothing to set up."""

    def open(self) -> None:
        """The connection is made with the first job."""

    def close(self) -> None:
        app.close()

    def one(self, task: str, job: dict[str, Any]) -> None:
        TASKS[task].apply_async(kwargs=job)

    def many(self, task: str, jobs: list[dict[str, Any]]) -> None:
        with app.producer_or_acquire() as producer:
            for job in jobs:
                TASKS[task].apply_async(kwargs=job, producer=producer)

    def work(self) -> None:
        options = ["--pool", "prefork", "--concurrency", str(SETTINGS["concurrency"]), "--loglevel", "WARNING"]
        alone = ["--without-gossip", "--without-mingle", "--without-heartbeat"]
        handler.become("celery", "-A", __name__, "worker", *options, *alone)
