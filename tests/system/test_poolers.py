"""Workers and applications behind a pooler in transaction mode: nothing is lost, doubled, or left to a session."""

from __future__ import annotations

import asyncio
from collections import Counter

import psycopg
import pytest
from pgbouncers import PgBouncer, needs_pgbouncer
from poolers import Pooler
from workers import Eyes, until

import pgqueue
from pgqueue import Job, task
from pgqueue.worker.fetch import notifier
from pgqueue.worker.worker import Worker

ran: Counter[int] = Counter()
together: Counter[str] = Counter()
most: Counter[str] = Counter()


@task(name="pooler.plain")
async def plain(n: int) -> None:
    ran[n] += 1


async def _alone(key: str, n: int) -> None:
    together[key] += 1
    most[key] = max(most[key], together[key])
    await asyncio.sleep(0.002)
    together[key] -= 1
    ran[n] += 1


@task(name="pooler.locked", lock=lambda n: f"l{n % 3}", timeout=60)
async def locked(n: int) -> None:
    await _alone(f"l{n % 3}", n)


@task(name="pooler.limited", limit=pgqueue.Limit(2, name="pooler"), timeout=60)
async def limited(n: int) -> None:
    await _alone("limit", n)


@task(name="pooler.effect", transactional=True)
def effect(job: Job, n: int) -> None:
    job.connection.execute("INSERT INTO effect VALUES (%s)", [n])
    ran[n] += 1


@pytest.mark.second
@pytest.mark.promise("F16", "F121")
@pytest.mark.parametrize("kind", [Pooler, pytest.param(PgBouncer, marks=needs_pgbouncer)])
@pytest.mark.parametrize("listens", [True, False], ids=["listens directly", "polls"])
async def test_two_workers_behind_a_pooler_run_everything_once(
    dsn: str, eyes: Eyes, monkeypatch: pytest.MonkeyPatch, listens: bool, kind: type[Pooler] | type[PgBouncer]
) -> None:
    """Four sessions for two workers and the application: each client gets another one again and again."""
    for counter in (ran, together, most):
        counter.clear()
    monkeypatch.setenv("PGQUEUE_PREPARE", "off")
    monkeypatch.setenv("PGQUEUE_LISTEN_DSN", dsn if listens else "off")
    eyes.do("CREATE TABLE effect (n integer)")
    tasks, number = (plain, locked, limited, effect), 120
    with kind(dsn, 4) as pooler:
        options = {"dsn": pooler.dsn, "tasks": tasks, "poll": 0.2}
        async with Worker(**options), Worker(**options):  # type: ignore[arg-type]
            with psycopg.connect(pooler.dsn, prepare_threshold=None) as conn:
                for first in range(0, number, 12):
                    with conn.transaction():
                        pgqueue.enqueue_many(conn, [tasks[n % 4].new(n=n) for n in range(first, first + 12)])
            await until(eyes.done(number))
        if isinstance(pooler, Pooler):
            assert pooler.named == 0 and pooler.moved > number / 4
    assert ran == Counter(range(number))
    assert eyes.one("SELECT array_agg(n ORDER BY n) FROM effect") == [n for n in range(number) if n % 4 == 3]
    assert max(most[f"l{key}"] for key in range(3)) == 1 and most["limit"] <= 2
    assert eyes.all("SELECT * FROM pgqueue.worker") == []


LOCKED = """
    SELECT count(*) FROM pg_locks
    WHERE locktype = 'advisory' AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""


@pytest.mark.promise("F32", "F121")
@pytest.mark.parametrize("kind", [Pooler, pytest.param(PgBouncer, marks=needs_pgbouncer)])
async def test_a_listen_through_a_pooler_in_transaction_mode_is_noticed_and_nobody_leads(
    dsn: str,
    eyes: Eyes,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kind: type[Pooler] | type[PgBouncer],
) -> None:
    """Naive: both listen, and both take the leader's lock, which stays in a session of the pooler."""
    monkeypatch.setattr(notifier, "ECHO_SECONDS", 0.3)
    monkeypatch.setenv("PGQUEUE_PREPARE", "off")
    ran.clear()
    with kind(dsn, 4) as pooler:
        options = {"dsn": pooler.dsn, "tasks": (plain,), "poll": 0.2}
        async with Worker(**options) as one, Worker(**options) as two:  # type: ignore[arg-type]
            await until(lambda: caplog.text.count("--listen-dsn") == 2)
            assert not any(worker.services.election.elected for worker in (one, two))
            assert all(worker.services.election.leads() for worker in (one, two))
            assert eyes.one(LOCKED) == 0
            with psycopg.connect(pooler.dsn, prepare_threshold=None) as conn:
                pgqueue.enqueue_many(conn, [plain.new(n=0), plain.using(delay=0.3).new(n=1)])
            await until(eyes.done(2), 5.0)
    assert ran == Counter(range(2))


@pytest.mark.promise("F32")
async def test_a_listen_through_a_pooler_in_session_mode_works(
    dsn: str, eyes: Eyes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There, too, the pid that the connection was told is no backend's."""

    async def unknown(*_: object, **options: object) -> None: ...

    monkeypatch.setattr(notifier, "identify", unknown)
    async with Worker(dsn=dsn, tasks=(plain,)) as worker:
        await until(lambda: worker.services.election.elected)
        assert eyes.one(LOCKED) == 1
