"""What is written by hand is recorded: by which actor, what, on what, which jobs; and the record stays short."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from commands import pgqueue as command
from roles import Role, role
from workers import Eyes

import pgqueue
from pgqueue.admin import limits, locks, workers
from pgqueue.client import schedules
from pgqueue.database.statements import text

__all__ = ["role"]

Conn = psycopg.Connection[Any]


def put(eyes: Eyes, state: str = "available", task: str = "audit.task") -> int:
    more = {
        "failed": ", finished_at, reason, bin) VALUES (%s, %s, now(), 'error', 0)",
        "completed": ", finished_at, bin) VALUES (%s, %s, now(), 0)",
        "running": ", worker_id, claim, started_at) VALUES (%s, %s, 1, 1, now())",
    }.get(state, ") VALUES (%s, %s)")
    [[id]] = eyes.conn.execute(
        f"INSERT INTO pgqueue.job (state, task{more} RETURNING id".encode(),
        [state, task],
    ).fetchall()
    return int(id)


def rows(conn: Conn) -> list[tuple[Any, ...]]:
    found = "SELECT actor, action, target, cardinality(jobs), count FROM pgqueue.audit ORDER BY at, id"
    return conn.execute(found.encode()).fetchall()


def supervisor(conn: Conn) -> object:
    return conn.execute(
        "INSERT INTO pgqueue.supervisor (id, host, pid, state, size) OVERRIDING SYSTEM VALUE"
        " VALUES (7, 'here', 1, 'running', 1)"
    )


WRITES: dict[str, tuple[Callable[[Conn, Eyes], object], str, dict[str, Any], int, int]] = {
    "cancel": (lambda conn, eyes: pgqueue.cancel(conn, put(eyes), put(eyes, "running")), "cancel", {}, 2, 2),
    "cancel by filter": (
        lambda conn, eyes: (put(eyes), pgqueue.cancel(conn, task="audit.task", state="available")),
        "cancel",
        {"states": ["available"], "task": "audit.task"},
        1,
        1,
    ),
    "retry": (lambda conn, eyes: pgqueue.retry(conn, put(eyes, "failed")), "retry", {}, 1, 1),
    "retry again": (lambda conn, eyes: pgqueue.retry(conn, put(eyes, "completed"), again=True), "retry", {}, 1, 1),
    "discard": (lambda conn, eyes: pgqueue.discard(conn, put(eyes, "failed")), "discard", {}, 1, 1),
    "pause": (lambda conn, eyes: pgqueue.pause(conn, "q"), "pause", {"queue": "q"}, 0, 1),
    "pause task": (lambda conn, eyes: pgqueue.pause(conn, task="t"), "pause", {"task": "t"}, 0, 1),
    "add schedule": (
        lambda conn, eyes: schedules.add(conn, "s", pgqueue.Every(60), "t"),
        "schedules add",
        {"schedule": "s"},
        0,
        1,
    ),
    "tell": (
        lambda conn, eyes: (supervisor(conn), workers.tell(conn, "scale", size=3)),
        "scale",
        {"supervisors": [7]},
        0,
        1,
    ),
    "lock": (
        lambda conn, eyes: (
            eyes.do("INSERT INTO pgqueue.job (task, lock_key, holds) VALUES ('t', 'k', true)"),
            locks.release(conn, "k"),
        ),
        "locks release",
        {"lock": "k"},
        1,
        1,
    ),
    "limit": (
        lambda conn, eyes: (
            eyes.do("INSERT INTO pgqueue.key_limit (name, n, declared) VALUES ('l', 1, 1)"),
            limits.change(conn, "l", 7),
        ),
        "limits set",
        {"limit": "l"},
        0,
        1,
    ),
}


@pytest.mark.promise("F111")
@pytest.mark.parametrize("name", WRITES)
def test_a_write_by_hand_is_a_row_of_its_own_transaction(name: str, dsn: str, conn: Conn, eyes: Eyes) -> None:
    write, action, target, jobs, count = WRITES[name]
    with psycopg.connect(dsn) as undone:
        with pgqueue.acting("nobody else"):
            write(undone, eyes)
        assert len(rows(undone)) == 1
        undone.rollback()
    assert rows(conn) == []
    conn.commit()
    eyes.do("DELETE FROM pgqueue.job; DELETE FROM pgqueue.key_limit")
    with pgqueue.acting("ann"):
        write(conn, eyes)
    assert rows(conn) == [("ann", action, target, jobs, count)]


@pytest.mark.promise("F111")
def test_what_is_done_to_a_schedule_is_recorded_in_order(conn: Conn) -> None:
    schedules.add(conn, "s", pgqueue.Every(60), "t")
    assert schedules.pause(conn, "s", actor="ann") and not schedules.pause(conn, "s", actor="ann")
    assert schedules.resume(conn, "s", actor="ann")
    job = schedules.run(conn, "s", actor="bob")
    schedules.remove(conn, "s", actor="ann")
    [[me]] = conn.execute("SELECT session_user").fetchall()
    assert [(who, what) for who, what, *_ in rows(conn)] == [
        (me, "schedules add"),
        ("ann", "schedules pause"),
        ("ann", "schedules resume"),
        ("bob", "schedules run"),
        ("ann", "schedules remove"),
    ]
    [entry] = pgqueue.audit(conn, job=job.id)
    assert (entry.actor, entry.action, entry.target) == ("bob", "schedules run", {"schedule": "s"})


@pytest.mark.promise("F111")
def test_what_changes_nothing_is_not_recorded(conn: Conn, eyes: Eyes) -> None:
    pgqueue.cancel(conn, put(eyes, "failed"))
    pgqueue.retry(conn, put(eyes), put(eyes, "completed"))
    pgqueue.discard(conn, put(eyes))
    assert pgqueue.cancel(conn, queue="nothing") == []
    assert not pgqueue.resume(conn, "q") and not pgqueue.resume(conn, task="t")
    assert workers.tell(conn, "quiet") == [] and locks.release(conn, "k").ids == ()
    with pytest.raises(pgqueue.Error):
        limits.change(conn, "none", 1)
    assert rows(conn) == []


@pytest.mark.promise("F111")
def test_the_actor_is_said_or_is_the_role_and_the_role_is_always_kept(role: Role, dsn: str, eyes: Eyes) -> None:
    mine = role("operate")
    with psycopg.connect(mine) as conn:
        user = conn.info.user
        pgqueue.pause(conn, "a")
        pgqueue.pause(conn, "b", actor="ann")
        with pgqueue.acting("bob"):
            pgqueue.pause(conn, "c")
            pgqueue.pause(conn, "d", actor="cy")
        pgqueue.pause(conn, "e")
        found = pgqueue.audit(conn)
        assert [(each.actor, each.role) for each in reversed(found)] == [
            (actor, user) for actor in (user, "ann", "bob", "cy", user)
        ]
        by = conn.execute("SELECT name::text, paused_by FROM pgqueue.queue ORDER BY name").fetchall()
        assert by == [("a", user), ("b", "ann"), ("c", "bob"), ("d", "cy"), ("e", user)]
        for bad in ("", "two\nlines", "x" * 201, 7):
            with pytest.raises(pgqueue.InvalidOption, match="actor"):
                pgqueue.pause(conn, "f", actor=bad)  # type: ignore[arg-type]


@pytest.mark.promise("F111")
async def test_async_connections_write_and_read_the_record(aconn: psycopg.AsyncConnection[Any], eyes: Eyes) -> None:
    job = put(eyes)
    await pgqueue.acancel(aconn, job, actor="ann")
    await pgqueue.apause(aconn, task="t", actor="ann")
    await pgqueue.aresume(aconn, task="t", actor="ann")
    assert [each.action for each in await pgqueue.aaudit(aconn, actor="ann")] == ["resume", "pause", "cancel"]
    [entry] = await pgqueue.aaudit(aconn, job=job)
    assert entry.jobs == (job,) and entry.details == {"reason": "cancelled by hand"}


@pytest.mark.promise("F111")
@pytest.mark.parametrize("walked", [1, 2, 20_000])
def test_pages_of_the_record(conn: Conn, walked: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a statement looks at: each row once, the newest first."""
    monkeypatch.setattr("pgqueue.admin.audit.WALKED_MOST", walked)
    for number in range(7):
        pgqueue.pause(conn, f"q{number}", actor="ann" if number % 2 else "bob")
        pgqueue.resume(conn, f"q{number}", actor="cy")
    found, page = list[str](), pgqueue.audit(conn, action="pause", limit=3)
    while page:
        found += [entry.target["queue"] for entry in page]
        page = pgqueue.audit(conn, action="pause", limit=3, before=page[-1])
    assert found == [f"q{number}" for number in reversed(range(7))]
    assert len(pgqueue.audit(conn, actor="ann")) == 3 and len(pgqueue.audit(conn)) == 14
    assert pgqueue.audit(conn, since=datetime.now(UTC) + timedelta(hours=1)) == []
    assert len(pgqueue.audit(conn, since=datetime.now(UTC) - timedelta(hours=1), limit=100)) == 14
    wrong: list[dict[str, Any]] = [{"limit": 0}, {"limit": True}, {"job": 1, "actor": "ann"}]
    wrong.append({"since": datetime(2026, 1, 1)})
    for bad in wrong:
        with pytest.raises(pgqueue.InvalidOption):
            pgqueue.audit(conn, **bad)


@pytest.mark.promise("F111")
def test_the_record_keeps_ninety_days_and_the_newest(conn: Conn) -> None:
    for days in (1, 89, 91, 200):
        conn.execute(
            "INSERT INTO pgqueue.audit (actor, action, at) VALUES ('a', 'x', now() - make_interval(days => %s))", [days]
        )
    prune = text("pruner_audit", "pgqueue")
    assert conn.execute(prune, {"n": 1, "days": 90, "most": 1000}).fetchone() == (1, 0, None, None)
    assert conn.execute(prune, {"n": 10, "days": 90, "most": 1000}).fetchone() == (1, 0, None, None)
    assert conn.execute(prune, {"n": 10, "days": 90, "most": 1000}).fetchone() == (0, 0, None, None)
    for number in range(5):
        pgqueue.pause(conn, f"q{number}")
    assert conn.execute(prune, {"n": 10, "days": 90, "most": 3}).fetchone() == (4, 0, None, None)
    assert [entry.target["queue"] for entry in pgqueue.audit(conn)] == ["q4", "q3", "q2"]


@pytest.mark.promise("F111")
def test_commands_say_their_actor(dsn: str, conn: Conn, eyes: Eyes) -> None:
    job = put(eyes)
    assert command("cancel", str(job), "--actor", "ann", dsn=dsn).returncode == 0
    assert command("pause", "--task", "t", dsn=dsn, PGQUEUE_ACTOR="bob").returncode == 0
    assert command("prune", "--all", dsn=dsn).returncode == 0
    bad = command("pause", "q", "--actor", "", dsn=dsn)
    assert bad.returncode == 2 and "actor" in bad.stderr
    items = json.loads(command("audit", "--json", dsn=dsn).stdout)["items"]
    [[me, rings]] = conn.execute("SELECT session_user, (SELECT count(*) FROM pgqueue.ring)").fetchall()
    assert [(each["actor"], each["action"]) for each in items] == [
        *[(me, "prune")] * rings,
        ("bob", "pause"),
        ("ann", "cancel"),
    ]
    assert {each["role"] for each in items} == {me} and items[-1]["jobs"] == [job]
    said = command("audit", "--job", str(job), dsn=dsn).stdout
    assert "ann" in said and f"jobs {job}" in said and "bob" not in said
    assert command("audit", "--by", "nobody", dsn=dsn).stdout == "Nothing was changed by hand.\n"
    assert command("audit", "--job", "1", "--by", "ann", dsn=dsn).returncode == 2
