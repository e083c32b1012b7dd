"""Queues of DBOS: each job is a workflow of one function."""

from __future__ import annotations

import asyncio
import signal
import threading
from typing import Any

from dbos import DBOS, DBOSClient

from bench.peers.adapters import handler
from bench.peers.adapters.handler import DSN, SETTINGS


async def noop(number: int) -> None:
    handler.ran(number)


async def application(number: int, text: str) -> None:
    handler.ran(number)
    await asyncio.sleep(handler.WORK_SECONDS)


class Peer:
    def setup(self) -> None:
        self._launch()
        DBOS.destroy()

    def open(self) -> None:
        self._client = DBOSClient(system_database_url=DSN)

    def close(self) -> None:
        self._client.destroy()

    def one(self, task: str, job: dict[str, Any]) -> None:
        self._client.enqueue(
            {"queue_name": "elsewhere" if task == "elsewhere" else "bench", "workflow_name": task}, **job
        )

    def many(self, task: str, jobs: list[dict[str, Any]]) -> None:
        for job in jobs:
            self.one(task, job)

    def work(self) -> None:
        ended = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: ended.set())
        self._launch()
        ended.wait()
        DBOS.destroy()

    def _launch(self) -> None:
        DBOS(config={"name": "bench", "system_database_url": DSN, "log_level": "ERROR"})
        for fn in (noop, application):
            DBOS.workflow(name=fn.__name__)(fn)
        DBOS.launch()
        DBOS.register_queue(
            "bench",
            worker_concurrency=SETTINGS.get("worker_concurrency"),
            polling_interval_sec=SETTINGS["polling_interval_sec"],
        )
