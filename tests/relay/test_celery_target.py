"""Celery as the target, with a redis-server of the test's own on loopback: each job comes, with its uid, in time."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from relays import Sides, app_dsn, eventually, relaying, sides
from workers import wait_until

import pgqueue
from pgqueue.relay.callable_target import StagedJob
from pgqueue.relay.celery_target import CeleryTarget
from pgqueue.relay.relay import Relay

__all__ = ["app_dsn", "sides"]

celery = pytest.importorskip("celery", reason="Celery is not installed")
SERVER = shutil.which("redis-server")
pytestmark = [
    pytest.mark.second,
    pytest.mark.skipif(SERVER is None, reason="redis-server is not installed: apt-get install redis-server"),
]

mail = pgqueue.remote("shop.mail")
THEN = datetime(2040, 1, 1, tzinfo=UTC)

WORKER = """
import sys
from pathlib import Path
from celery import Celery

app = Celery("shop", broker=sys.argv[1])

@app.task(name="shop.mail", bind=True)
def mail(self, x):
    with Path(sys.argv[2]).open("a") as file:
        file.write(f"{self.request.id} {x}\\n")

app.worker_main(["worker", "--pool", "solo", "--without-gossip", "--without-mingle", "--loglevel", "WARNING"])
"""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def answers(port: int) -> bool:
    with socket.socket() as tried:
        return tried.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def redis(port: int, directory: Path) -> Iterator[None]:
    """A server that keeps nothing on disk. Ended afterwards."""
    assert SERVER is not None
    only_here = ["--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", str(directory)]
    with (directory / "redis.log").open("ab") as log:
        process = subprocess.Popen([SERVER, "--port", str(port), *only_here], stdout=log, stderr=log)
    try:
        wait_until(lambda: answers(port), 20.0)
        yield
    finally:
        process.kill()
        process.wait()


@contextmanager
def celery_worker(broker: str, done: Path, directory: Path) -> Iterator[None]:
    """A Celery worker that writes down what it runs. Ended afterwards."""
    (directory / "worker.py").write_text(WORKER)
    command = [sys.executable, str(directory / "worker.py"), broker, str(done)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with (directory / "worker.log").open("wb") as log:
        worker = subprocess.Popen(command, env=environment, cwd=directory, stdout=log, stderr=log)
    try:
        yield
    finally:
        worker.kill()
        worker.wait()


def messages(app: Any, queue: str) -> list[Any]:
    """The messages of this queue, in their order; they are taken from it."""
    found = []
    with app.connection_for_read() as connection, connection.channel() as channel:
        while (message := channel.basic_get(queue, no_ack=True)) is not None:
            found.append(message)
    return found


async def test_a_job_becomes_a_celery_task_with_all_that_celery_has(app_dsn: str, sides: Sides, tmp_path: Path) -> None:
    port = free_port()
    app = celery.Celery("shop", broker=f"redis://127.0.0.1:{port}/0")
    full = mail.using(queue="post", priority=3, run_at=THEN, deadline=THEN + timedelta(hours=1), headers={"trace": "t"})
    pgqueue.enqueue_many(pgqueue.Outbox(sides.app), [mail.new(x="plain"), full.new(x="full")])
    pgqueue.enqueue_many(pgqueue.Outbox(sides.app), [mail.using(lock="l", retry=3).new(), mail.using(unique="u").new()])
    uids = [uid for (uid,) in sides.app.execute("SELECT uid::text FROM pgqueue.outbox ORDER BY id").fetchall()]
    with redis(port, tmp_path):
        assert await Relay(app_dsn, CeleryTarget(app)).once()
        [plain] = messages(app, "celery")
        [late] = messages(app, "post")
    assert (plain.headers["id"], plain.headers["task"], plain.headers["eta"]) == (uids[0], "shop.mail", None)
    assert json.loads(plain.body)[:2] == [[], {"x": "plain"}] and plain.properties["priority"] == 0
    assert (late.headers["id"], late.headers["trace"], late.properties["priority"]) == (uids[1], "t", 3)
    assert datetime.fromisoformat(late.headers["eta"]) == THEN
    assert datetime.fromisoformat(late.headers["expires"]) == THEN + timedelta(hours=1)
    assert [reason.split(":")[0] for _, reason in sides.refused()] == [
        "Celery has no lock, max_attempts",
        "Celery has no unique key",
    ]
    assert sides.left() == 0


@pytest.mark.parametrize(("broker", "priority"), [("redis://", 2), ("amqp://", 7)])
def test_the_first_priority_is_the_first_of_the_broker(broker: str, priority: int) -> None:
    """Without a broker: what would be sent."""
    sent: list[dict[str, Any]] = []
    app = celery.Celery("shop", broker=f"{broker}127.0.0.1:1//")
    app.send_task = lambda name, **options: sent.append(options)
    new = mail.using(priority=2).new(x="a")
    job = StagedJob("u", 1, new.task, new.args, "default", 2, None, None, None, None, THEN, new)
    CeleryTarget(app)._send(job)
    assert sent[0]["priority"] == priority and "queue" not in sent[0]


@pytest.mark.promise("E11")
async def test_a_celery_worker_runs_what_was_staged_also_while_the_broker_was_away(
    app_dsn: str, sides: Sides, tmp_path: Path
) -> None:
    port, done = free_port(), tmp_path / "done"
    broker = f"redis://127.0.0.1:{port}/0"
    done.touch()
    sides.app.execute("INSERT INTO pgqueue.outbox (task, args) VALUES ('shop.mail', '{\"x\": \"early\"}')")
    relay = Relay(app_dsn, CeleryTarget(celery.Celery("shop", broker=broker)))
    async with relaying(relay) as running:
        pgqueue.enqueue(pgqueue.Outbox(sides.app), mail, x="second")
        await eventually(lambda: relay.counts.rounds >= 1)
        assert sides.left() == 2 and not running.done()  # no broker yet, and nothing is lost
        with redis(port, tmp_path), celery_worker(broker, done, tmp_path):
            pgqueue.enqueue(pgqueue.Outbox(sides.app), mail, x="third")
            await eventually(lambda: len(done.read_text().split()) == 6, 60.0)
    assert sides.left() == 0
    ran = [line.split() for line in done.read_text().splitlines()]
    assert sorted(value for _, value in ran) == ["early", "second", "third"]
    assert len({uid for uid, _ in ran}) == 3
