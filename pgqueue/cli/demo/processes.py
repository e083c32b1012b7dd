"""What the demo starts: the server with a database of its own, the worker processes, the producers' threads.

Each is a context that ends what it started. A worker is `pgqueue work` in a session of its own, so that Ctrl-C reaches
only the demo. When the demo ends in any way, the worker's stdin ends, and the worker ends, too.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psycopg

from pgqueue.config import config
from pgqueue.database import embedded, migrations
from pgqueue.databases import without_databases

DATABASE = "pgqueue_demo"
CONCURRENCY = 20
LEASE = "2s"
ORDER_SECONDS = 0.02  # between two orders of one producer


@contextmanager
def running_server(directory: str | None) -> Iterator[embedded.Embedded]:
    """The server of `directory`, whose files stay. Without it, of a temporary directory, removed at the end."""
    home = directory or tempfile.mkdtemp(prefix="pgqueue-demo-")
    try:
        server = embedded.start(home, keep=directory is not None)
    except BaseException:
        if directory is None:
            shutil.rmtree(home, ignore_errors=True)
        raise
    with server:
        yield server


def fresh_database(server: embedded.Embedded) -> str:
    """Make a new, migrated database for the demo. Other databases of the directory's server are not touched."""
    with psycopg.connect(server.dsn, autocommit=True) as conn:
        conn.execute(f"DROP DATABASE IF EXISTS {DATABASE} WITH (FORCE)".encode())
        conn.execute(f"CREATE DATABASE {DATABASE}".encode())
    dsn = server.cluster.dsn(DATABASE)
    migrations.migrate(dsn)
    return dsn


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker process we started."""

    number: int
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def lives(self) -> bool:
        return self.process.poll() is None

    def last_words(self) -> str:
        """The end of its log."""
        return self.log.read_text(encoding="utf-8", errors="replace")[-2_000:].strip()


@contextmanager
def running_worker(dsn: str, directory: Path, number: int) -> Iterator[Worker]:
    """A worker process in a session of its own (Ctrl-C is ours to handle), stopped at the end."""
    log = directory / f"worker-{number}.log"
    environment = without_databases(os.environ)
    arguments = ["work", "pgqueue.cli.demo.shop", "--lease", LEASE, "--concurrency", str(CONCURRENCY)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "pgqueue", *arguments],
            stdin=subprocess.PIPE,  # never written to; when it ends, the worker knows that we are gone
            stdout=output,
            stderr=output,
            env=environment | {"PGQUEUE_DSN": dsn, "PGQUEUE_SCHEMA": config().schema},
            start_new_session=True,
        )
    try:
        yield Worker(number, process, log)
    finally:
        _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.terminate()
    try:
        process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdin.close()


class Producer:
    """A thread that takes orders on its own connection until `stop`, and counts commits and rollbacks."""

    def __init__(self, dsn: str, number: int) -> None:
        self.committed = 0
        self.rolled_back = 0
        self.error: BaseException | None = None
        self._dsn = dsn
        self._cards = random.Random(number)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"producer-{number + 1}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Let the thread finish its present order. If an error ended it before, raise that."""
        self._stop.set()
        self._thread.join()
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        from pgqueue.cli.demo import shop

        try:
            with psycopg.connect(self._dsn, autocommit=True) as conn:
                while not self._stop.wait(ORDER_SECONDS):
                    try:
                        shop.take_order(conn, self._cards)
                        self.committed += 1
                    except shop.Declined:
                        self.rolled_back += 1
        except Exception as error:
            self.error = error


@contextmanager
def all_at_work(producers: list[Producer]) -> Iterator[None]:
    for producer in producers:
        producer.start()
    try:
        yield
    finally:
        for producer in producers:
            producer.stop()
