"""What is not declared: said in the log of who leads, after a while, and not again and again."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator

import pytest
from workers import Eyes, until, work

from pgqueue.admin.limits import KEYS_MOST
from pgqueue.client.tasks import task
from pgqueue.database.sessions import Link, Session
from pgqueue.worker.concurrency import declared_limits
from pgqueue.worker.concurrency.declared_limits import AGAIN_SECONDS, PATIENCE_SECONDS, UndeclaredLimits
from pgqueue.worker.leader import pruner

PUT = "INSERT INTO pgqueue.job_blocked (state, task, key) SELECT 'blocked', 'x', key FROM unnest(%s::text[]) AS key"


class Time:
    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    time = Time()
    monkeypatch.setattr(declared_limits, "monotonic", time)
    return time


@pytest.fixture
async def warner(dsn: str, time: Time) -> AsyncIterator[UndeclaredLimits]:
    session = Session(Link(dsn, "pgqueue"), "fetch")
    yield UndeclaredLimits(session)
    await session.close()


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    caplog.clear()
    return found


async def test_what_is_undeclared_for_a_while_is_said_once_in_ten_minutes(
    warner: UndeclaredLimits, time: Time, eyes: Eyes, caplog: pytest.LogCaptureFixture
) -> None:
    eyes.do(PUT, ["limit:warehouse", "limit:warehouse", "rate:mail:7", "lock:k"])
    await warner.look()
    assert said(caplog) == []  # the workers that declare it may just be coming
    time.now += PATIENCE_SECONDS - 1
    await warner.look()
    assert said(caplog) == []
    time.now += 1
    await warner.look()
    both = [
        "2 jobs wait for the limit warehouse, which no worker has declared; none starts until one does",
        "1 job waits for the rate mail, which no worker has declared; none starts until one does",
    ]
    assert said(caplog) == both
    time.now += AGAIN_SECONDS - 1
    await warner.look()
    assert said(caplog) == []
    time.now += 1
    await warner.look()
    assert said(caplog) == both


async def test_what_was_declared_meanwhile_is_forgotten(
    warner: UndeclaredLimits, time: Time, eyes: Eyes, caplog: pytest.LogCaptureFixture
) -> None:
    eyes.do(PUT, ["limit:late"])
    await warner.look()
    eyes.do("INSERT INTO pgqueue.key_limit (name, n, declared) VALUES ('late', 1, 1)")
    time.now += 3600
    await warner.look()
    eyes.do("DELETE FROM pgqueue.key_limit")
    await warner.look()
    assert said(caplog) == []  # it is new again
    time.now += PATIENCE_SECONDS
    await warner.look()
    assert len(said(caplog)) == 1


async def test_of_very_many_keys_each_look_goes_on_where_the_last_one_stopped(
    warner: UndeclaredLimits, time: Time, eyes: Eyes, caplog: pytest.LogCaptureFixture
) -> None:
    eyes.do("INSERT INTO pgqueue.key_rate (name, count, period, set_at) VALUES ('a', 1, 60, now())")
    eyes.do(PUT, [*(f"rate:a:{number:05}" for number in range(2 * KEYS_MOST)), "rate:b"])
    for _ in range(6):
        await warner.look()
        time.now += PATIENCE_SECONDS
    assert ["rate b" in line for line in said(caplog)] == [True]


async def test_a_worker_says_it(
    dsn: str, eyes: Eyes, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(declared_limits, "PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr(pruner, "ROUND_SECONDS", 0.1)

    @task(name="declarer.known", limit=1)
    async def known() -> None: ...

    eyes.do("INSERT INTO pgqueue.job (task, limit_key) VALUES ('declarer.known', 'unknown')")
    async with work(dsn, known):
        eyes.do("INSERT INTO pgqueue.job (task, limit_key) VALUES ('declarer.known', 'declarer.known')")
        await until(eyes.done(1))
        await until(lambda: "1 job waits for the limit unknown, which no worker has declared" in caplog.text)
    assert "declarer.known, which no worker" not in caplog.text
