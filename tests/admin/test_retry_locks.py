"""A retry of many jobs answers what a retry of few answers, and leaves the same keys behind."""

from __future__ import annotations

from random import Random
from typing import Any

import asyncpg
import psycopg
import pytest
from roles import Role, role
from unique_jobs import Conn
from workers import Eyes

import pgqueue
from pgqueue.admin import actions, retry_locks

__all__ = ["role"]

NAMES = ("k", "ü", "a\nb", 'say "k"', "K")
KEYS = """
    SELECT k.key, k.job_id, k.hold, k.expires_at IS NULL FROM pgqueue.unique_key k
    WHERE starts_with(split_part(k.key, ':', 2), %s) AND pgqueue.key_state(k) <> 'free' ORDER BY k.key
"""
SHORT = "UPDATE pgqueue.unique_key SET seconds = 0 WHERE job_id = %s AND hold = 'after' AND seconds < 1"
"""The key of a job that has ended is free at once, not a millisecond later: the test must not depend on that time."""


def make_jobs(conn: Conn, seed: int, prefix: str) -> list[int]:
    """Jobs that want few keys, most of them cancelled, in an order that the seed decides. The ids of all."""
    random = Random(seed)
    ids: list[int] = []
    for _ in range(25):
        given = pgqueue.remote("unique.mail")
        if random.random() < 0.7:
            name = prefix + random.choice(NAMES)
            hold: Any = random.choice(["live", "pending", 3600, 0.001])
            given = given.using(unique=pgqueue.Unique(lambda name=name, **_: name, hold=hold))
        if random.random() < 0.4:
            given = given.using(idempotency_key=prefix + random.choice(NAMES))
        [handle] = pgqueue.enqueue_many(conn, [given.new()])
        if handle.created:
            ids.append(handle.id)
            conn.execute(SHORT, [handle.id])
            if random.random() < 0.8:
                pgqueue.cancel(conn, handle.id)
        if random.random() < 0.3:
            conn.execute("DELETE FROM pgqueue.unique_key WHERE job_id = %s", [random.choice(ids or [0])])
    return ids


@pytest.mark.promise("F120")
@pytest.mark.parametrize("seed", range(8))
def test_many_are_answered_as_few(conn: Conn, eyes: Eyes, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """The same jobs twice, with other keys. The first are retried by one statement, the others by statements of three
    jobs, and their keys are locked two at a time."""
    found: list[Any] = []
    for prefix, most in [("X", 1_000), ("Y", 3)]:
        ids = make_jobs(conn, seed, prefix)
        conn.commit()
        monkeypatch.setattr(actions, "BATCH", most)
        monkeypatch.setattr(retry_locks, "KEYS_MOST", min(most, 2))
        answers = pgqueue.retry(conn, *Random(seed).sample(ids, len(ids)))
        conn.commit()
        place = {id: n for n, id in enumerate(ids)}
        told = sorted((place[each.id], each.did, each.state, place.get(each.holder or 0)) for each in answers)
        held = [(key.replace(prefix, "", 1), place[id], *rest) for key, id, *rest in eyes.all(KEYS, prefix)]
        found.append((told, held))
    assert found[0] == found[1]
    assert {did for _, did, *_ in found[0][0]} <= {"retried", "held", "alive"}


@pytest.mark.promise("F120")
def test_completed_and_missing_jobs_of_many_have_their_answers(
    conn: Conn, eyes: Eyes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actions, "BATCH", 2)
    with conn.transaction():
        dead, alive, done = (pgqueue.remote("t").enqueue(conn).id for _ in range(3))
        pgqueue.cancel(conn, dead)
        conn.execute("DELETE FROM pgqueue.job_available WHERE id = %s", [done])
        conn.execute(
            "INSERT INTO pgqueue.job_done (id, state, task, finished_at, bin) "
            "VALUES (%s, 'completed', 't', pgqueue.now(), (SELECT bin FROM pgqueue.ring WHERE kind = 'done'))",
            [done],
        )
    steps = pgqueue.retry(conn, done, alive, dead)
    assert [(each.id, each.did) for each in steps] == [(done, "completed"), (alive, "alive"), (dead, "retried")]
    [again, *_] = pgqueue.retry(conn, done, alive, dead, again=True)
    assert again.did == "again"
    with pytest.raises(pgqueue.JobNotFound, match="no job 99"):
        pgqueue.retry(conn, 99, alive, dead)


@pytest.mark.promise("F120")
@pytest.mark.parametrize("alone", [True, False], ids=["autocommit", "transaction"])
async def test_locks_are_taken_first_in_a_transaction_only(
    dsn: str, conn: Conn, eyes: Eyes, monkeypatch: pytest.MonkeyPatch, alone: bool
) -> None:
    """In autocommit mode they would be gone at once, and leave rows of keys behind that name no job."""
    monkeypatch.setattr(actions, "BATCH", 2)
    ids = make_jobs(conn, 3, "p")
    conn.execute("DELETE FROM pgqueue.unique_key")
    conn.commit()
    db = await asyncpg.connect(dsn)
    try:
        await db.execute("SET track_functions = 'all'")
        if alone:
            await pgqueue.aretry(db, *ids)
        else:
            async with db.transaction():
                await pgqueue.aretry(db, *ids)
        await db.execute("SELECT pg_stat_force_next_flush()")
        calls = await db.fetchval("SELECT sum(calls) FROM pg_stat_user_functions WHERE funcname = 'lock_keys'")
    finally:
        await db.close()
    assert bool(calls) is not alone
    assert eyes.one("SELECT count(*) > 0 FROM pgqueue.job WHERE state = 'available' AND id = ANY (%s)", ids)


@pytest.mark.promise("F120")
@pytest.mark.parametrize("most", [1_000, 2], ids=["few", "many"])
def test_a_key_that_is_just_being_taken_is_waited_for_with_patience(
    dsn: str, conn: Conn, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """Then the error says what it may be about, and the transaction's own patience is as it was."""
    monkeypatch.setattr(actions, "BATCH", most)
    plain = pgqueue.remote("unique.mail")
    jobs = [plain.using(unique=pgqueue.Unique(lambda: "k")).new(), plain.new(), plain.new()]
    ids = [handle.id for handle in pgqueue.enqueue_many(conn, jobs)]
    pgqueue.cancel(conn, *ids)
    conn.execute("DELETE FROM pgqueue.unique_key")
    conn.commit()
    with psycopg.connect(dsn) as other, pytest.raises(psycopg.errors.LockNotAvailable) as caught:
        other.execute("INSERT INTO pgqueue.unique_key VALUES ('unique:k', -1, 'live', 0, NULL, now())")
        conn.execute("SET lock_timeout = '50ms'")
        pgqueue.retry(conn, *ids)
    assert "unique keys" in caught.value.__notes__[0]
    conn.rollback()
    conn.execute("SET lock_timeout = '7s'")
    assert [answer.did for answer in pgqueue.retry(conn, *ids)] == ["retried"] * 3
    assert conn.execute("SHOW lock_timeout").fetchone() == ("7s",)


@pytest.mark.promise("F120")
def test_an_operator_may_retry_many(conn: Conn, role: Role, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actions, "BATCH", 2)
    ids = make_jobs(conn, 5, "X")
    conn.commit()
    with psycopg.connect(role("operate")) as mine:
        assert "retried" in {answer.did for answer in pgqueue.retry(mine, *ids)}
