"""An application's database with an outbox beside the queue of a test, and a relay between them.

`app_dsn` is the application's database; `sides` looks at both. A relay of a test runs in its event loop, or as a
process of its own (`relay_process`), to be stopped and killed.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest
from workers import wait_until

from pgqueue.database import migrations
from pgqueue.pytest_plugin import Databases
from pgqueue.relay.relay import Relay

PROCESS = """
import asyncio, logging, sys
from pgqueue.relay.relay import Relay
logging.basicConfig(level="INFO", format="%(asctime)s %(message)s")
asyncio.run(Relay(sys.argv[1], sys.argv[2], batch=int(sys.argv[3])).run())
"""


@dataclass(slots=True)
class Sides:
    """Both databases, looked at from outside."""

    app: psycopg.Connection[Any]
    queue: psycopg.Connection[Any]

    def stage(self, *values: str) -> None:
        """Stage a job for each of these texts, committed."""
        rows = ", ".join(["('t', json_build_object('x', %s::text)::jsonb)"] * len(values))
        self.app.execute(f"INSERT INTO pgqueue.outbox (task, args) VALUES {rows}".encode(), values)  # noqa: S608

    def delivered(self) -> list[str]:
        """What the jobs of the queue say, in the order of their ids."""
        rows = self.queue.execute("SELECT args ->> 'x' FROM pgqueue.job ORDER BY id").fetchall()
        return [value for (value,) in rows]

    def doubled(self) -> list[str]:
        return [value for value, count in Counter(self.delivered()).items() if count > 1]

    def left(self) -> int:
        """How many rows wait in the outbox."""
        [(number,)] = self.app.execute("SELECT count(*) FROM pgqueue.outbox").fetchall()
        return int(number)

    def refused(self) -> list[tuple[str, str]]:
        """Task and reason of each refused row."""
        return self.app.execute("SELECT task, reason FROM pgqueue.outbox_refused ORDER BY id").fetchall()


@pytest.fixture
def app_dsn(pgqueue_databases: Databases) -> Iterator[str]:
    """An application's database: an outbox, and no queue."""
    with pgqueue_databases.copy("template0") as made:
        migrations.migrate(made, line=migrations.OUTBOX)
        yield made


@pytest.fixture
def sides(app_dsn: str, dsn: str) -> Iterator[Sides]:
    with psycopg.connect(app_dsn, autocommit=True) as app, psycopg.connect(dsn, autocommit=True) as queue:
        yield Sides(app, queue)


@asynccontextmanager
async def relaying(relay: Relay) -> AsyncIterator[asyncio.Task[None]]:
    """The relay runs meanwhile."""
    running = asyncio.create_task(relay.run())
    try:
        yield running
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


@dataclass(slots=True)
class RelayProcess:
    """A relay as a process of its own, and what it logs."""

    process: subprocess.Popen[bytes]
    log: Path

    def works(self) -> bool:
        """Whether it has the lock, or had it once."""
        return "this relay delivers" in self.log.read_text()

    def signal(self, number: int) -> None:
        self.process.send_signal(number)


@contextmanager
def relay_process(app_dsn: str, dsn: str, directory: Path, batch: int = 500) -> Iterator[RelayProcess]:
    """Killed at the end."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", PROCESS, app_dsn, dsn, str(batch)]
    log = directory / f"relay-{secrets.token_hex(4)}.log"
    with log.open("wb") as file:
        process = subprocess.Popen(command, env=environment, stdout=file, stderr=file)
    try:
        yield RelayProcess(process, log)
    finally:
        process.kill()
        process.wait()


async def eventually(question: Any, seconds: float = 20.0) -> None:
    """Ask until the answer is true; the event loop goes on."""
    await asyncio.to_thread(wait_until, question, seconds)
