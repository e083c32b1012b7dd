"""What people read of the history: by minute and by hour, on every kind of connection, in Python and on the screen."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

import psycopg
import pytest
from commands import items, on_terminal
from commands import pgqueue as command
from driver_kinds import ASYNC, KINDS, drive
from roles import Role, refused, role
from workers import Eyes

import pgqueue
from pgqueue.cli import tables
from pgqueue.cli.commands.history import _screen
from pgqueue.errors import InvalidOption

ROW = (
    "INSERT INTO pgqueue.TABLE "
    "(at, bin, queue, task, started, completed, failed, wait, run, wait_seconds, run_seconds) "
    "VALUES (date_bin('1 minute', AT, '2000-01-01 00:00+00'), 0, %s, %s, %s, %s, %s, %s, %s, 1.5, 2.5)"
)


def add(
    eyes: Eyes, at: str = "now()", *, table: str = "history_minute", queue: str = "q", task: str = "t", n: int = 1
) -> None:
    """A row as the leader makes them: n jobs, of which one has failed."""
    wait, run = [n], [0, 0, n]
    eyes.do(ROW.replace("TABLE", table).replace("AT", at), queue, task, n, n - 1, 1, wait, run)


__all__ = ["role"]


@pytest.mark.promise("F95")
def test_rows_of_one_minute_are_added_up(eyes: Eyes, conn: psycopg.Connection) -> None:
    for _ in range(2):  # as a late part adds one
        add(eyes, n=3)
    add(eyes, task="u")
    add(eyes, queue="r", task="u")
    first, other, last = pgqueue.history(conn)
    assert (first.queue, first.task, first.started, first.completed, first.failed) == ("q", "t", 6, 4, 2)
    assert (first.wait, first.run, first.wait_seconds, first.run_seconds) == ((6,), (0, 0, 6), 3.0, 5.0)
    assert first.at.utcoffset() == timedelta(0) and first.at.second == 0
    assert [(row.queue, row.task) for row in (other, last)] == [("q", "u"), ("r", "u")]
    assert [(row.queue, row.task, row.started) for row in pgqueue.history(conn, by="queue")] == [
        ("q", None, 7),
        ("r", None, 1),
    ]
    [together] = pgqueue.history(conn, by="all")
    assert (together.queue, together.task, together.started) == (None, None, 8)
    assert [row.started for row in pgqueue.history(conn, task="u")] == [1, 1]
    assert [row.started for row in pgqueue.history(conn, queue="r", task="t")] == []


@pytest.mark.promise("F95")
def test_it_answers_the_time_that_it_is_asked_for(eyes: Eyes, conn: psycopg.Connection) -> None:
    now = eyes.one("SELECT date_bin('1 minute', now(), '2000-01-01 00:00+00')")
    for minutes in (0, 59, 90):
        add(eyes, f"now() - interval '{minutes} minutes'")

    def ages(**asked: Any) -> list[int]:
        return [round((now - row.at).total_seconds() / 60) for row in pgqueue.history(conn, **asked)]

    assert ages() == [59, 0]
    assert ages(since=now - timedelta(hours=2)) == [90, 59, 0]
    assert ages(since=now - timedelta(hours=2), until=now) == [90, 59]
    assert ages(since=now + timedelta(seconds=30)) == [0]  # the minute of this time is whole


@pytest.mark.promise("F95")
def test_an_hour_that_is_not_made_yet_comes_from_its_minutes(eyes: Eyes, conn: psycopg.Connection) -> None:
    done = eyes.one(
        "UPDATE pgqueue.duty SET done_at = date_bin('1 hour', now(), '2000-01-01 00:00+00') "
        "WHERE name = 'history' RETURNING done_at"
    )
    add(eyes, "now() - interval '3 hours'", table="history_hour", n=5)
    eyes.do("UPDATE pgqueue.history_hour SET at = date_bin('1 hour', at, '2000-01-01 00:00+00')")
    add(eyes, "now() - interval '3 hours'", n=5)  # its minutes are there still: they count once
    add(eyes, n=2)
    found = pgqueue.history(conn, step="hour")
    assert [row.started for row in found] == [5, 2]
    assert found[1].at == done


@pytest.mark.promise("F95")
@pytest.mark.parametrize("kind", KINDS)
def test_on_every_kind_of_connection(kind: str, eyes: Eyes, dsn: str) -> None:
    add(eyes, n=3)
    eyes.do(GROUP, "a", 3)
    since = datetime.now(UTC) - timedelta(hours=1)

    async def look() -> None:
        async with KINDS[kind](dsn, False) as app:
            if kind in ASYNC:
                rows, hours = (
                    await pgqueue.ahistory(app.conn, since=since),
                    await pgqueue.ahistory(app.conn, step="hour"),
                )
                groups = await pgqueue.aerror_groups(app.conn, task="t")
            else:
                rows, hours = pgqueue.history(app.conn, since=since), pgqueue.history(app.conn, step="hour")
                groups = pgqueue.error_groups(app.conn, task="t")
        assert [(row.started, row.run) for row in rows] == [(3, (0, 0, 3))]
        assert ([row.started for row in hours], [group.fingerprint for group in groups]) == ([3], ["a"])

    drive(kind, look())


@pytest.mark.promise("F95")
@pytest.mark.parametrize(
    ("ask", "says"),
    [
        (lambda conn: pgqueue.history(conn, step="day"), "minute or hour"),  # type: ignore[arg-type]
        (lambda conn: pgqueue.history(conn, by="key"), "task, queue, all"),  # type: ignore[arg-type]
        (lambda conn: pgqueue.history(conn, since=datetime(2026, 1, 1)), "time zone"),
        (lambda conn: pgqueue.error_groups(conn, since="today"), "time zone"),  # type: ignore[arg-type]
        (lambda conn: pgqueue.error_groups(conn, limit=0), "1 to 2000"),
    ],
    ids=["step", "by", "since", "no time", "limit"],
)
def test_what_cannot_be_asked_is_refused(ask: Callable[[Any], object], says: str, conn: psycopg.Connection) -> None:
    with pytest.raises(InvalidOption, match=says):
        ask(conn)


# Failures ------------------------------------------------------------------------------------------------------------

GROUP = (
    "INSERT INTO pgqueue.error_group VALUES "
    "(%s, 'q', 't', 'ValueError', 'shop.cards.charge', 'no', now() - interval '1 hour', now(), %s, '{7, 3}', 'v1')"
)


@pytest.mark.promise("F95")
def test_groups_come_in_the_order_of_their_last_failure(eyes: Eyes, conn: psycopg.Connection) -> None:
    for name, n in (("a", 1), ("b", 2)):
        eyes.do(GROUP, name, n)
    eyes.do("UPDATE pgqueue.error_group SET last_at = now() - interval '30 minutes' WHERE fingerprint = 'a'")
    groups = pgqueue.error_groups(conn)
    assert [(group.fingerprint, group.count, group.job_ids) for group in groups] == [("b", 2, (7, 3)), ("a", 1, (7, 3))]
    assert groups[0].last_at - groups[0].first_at == timedelta(hours=1)
    assert [group.fingerprint for group in pgqueue.error_groups(conn, limit=1)] == ["b"]
    assert [group.fingerprint for group in pgqueue.error_groups(conn, since=groups[0].last_at)] == ["b"]
    assert pgqueue.error_groups(conn, task="u") == []


# On the screen -------------------------------------------------------------------------------------------------------


@pytest.mark.promise("F95")
@pytest.mark.parametrize("by", ["all", "queue", "task"])
def test_on_a_narrow_terminal_columns_are_left_out_and_no_time_is_cut(
    eyes: Eyes, conn: psycopg.Connection, monkeypatch: pytest.MonkeyPatch, by: Literal["all", "queue", "task"]
) -> None:
    add(eyes, n=3, task="mail.send" * 5, queue="q" * 40)
    slow = [*[0] * 12, 99_999]  # hundreds of milliseconds: five characters
    eyes.do(ROW.replace("TABLE", "history_minute").replace("AT", "now()"), "q", "t", 99_999, 99_998, 1, slow, slow)
    [*_, row] = rows = pgqueue.history(conn, by=by)
    at = f"{row.at.astimezone(UTC):%m-%d %H:%M}"
    for columns, whole in ((80, False), (200, True), (None, True)):
        monkeypatch.setattr(tables, "width", lambda columns=columns: columns)
        head, *lines = _screen(rows, by)
        assert ("RETRIED" in head, "OTHER" in head) == (whole, whole), columns
        assert max(map(len, (head, *lines))) <= (columns or 500)
        assert [line for line in lines if line.startswith(at)], lines


@pytest.mark.promise("F95")
def test_the_commands_print_tables_and_documents(eyes: Eyes, dsn: str) -> None:
    add(eyes, n=3, task="mail.send")
    eyes.do(GROUP, "a", 3)
    screen = command("history", "--by", "task", dsn=dsn).stdout.splitlines()
    assert screen[0].split() == ["AT", "QUEUE", "TASK", "STARTED", "DONE", "FAILED", "RETRIED", "OTHER", "WAIT", "RUN"]
    assert screen[1].split()[2:] == ["q", "mail.send", "3", "2", "1", "0", "0", "1ms", "2ms"]
    [row] = items(command("history", "--by", "task", "--json", dsn=dsn))
    assert (row["started"], row["run_p50"]) == (3, pytest.approx(0.00175))
    assert {"wait_p95", "run_p99", "wait", "run", "at"} <= row.keys()
    [row] = items(command("history", "--hours", "--json", dsn=dsn))
    assert (row["queue"], row["task"]) == (None, None)
    [group] = items(command("errors", "--json", dsn=dsn))
    assert (group["error_type"], group["job_ids"]) == ("ValueError", [7, 3])
    assert "shop.cards.charge" in command("errors", dsn=dsn).stdout
    nothing = command("errors", "--task", "none", dsn=dsn).stdout
    assert "Nothing" in nothing and "about two minutes after it" in nothing
    asked = nothing.splitlines()[1].partition(": pgqueue ")[2].split()
    assert command(*asked, dsn=dsn).returncode == 0
    assert "Nothing" in command("history", "--task", "none", dsn=dsn).stdout


@pytest.mark.promise("F95")
def test_a_role_that_reads_sees_the_history_and_writes_none(role: Role, eyes: Eyes) -> None:
    add(eyes)
    eyes.do(GROUP, "a", 3)
    mine = role("read")
    with psycopg.connect(mine) as conn:
        assert (len(pgqueue.history(conn)), len(pgqueue.history(conn, step="hour"))) == (1, 1)
        assert len(pgqueue.error_groups(conn)) == 1
        conn.execute("SELECT pgqueue.run_quantile('t', 0.95)")
    refused(
        mine,
        "INSERT INTO pgqueue.history_part (at) VALUES (now())",
        "INSERT INTO pgqueue.history_minute (at, bin, queue, task) VALUES (now(), 0, 'q', 't')",
        "DELETE FROM pgqueue.error_group",
        "UPDATE pgqueue.duty SET done_at = now()",
    )


# How many jobs there were --------------------------------------------------------------------------------------------


def note(
    eyes: Eyes,
    state: str,
    n: int,
    oldest: float | None = None,
    *,
    at: str = "now()",
    queue: str = "q",
    table: str = "minute",
) -> None:
    """A row as the leader makes them of a measurement."""
    eyes.do(
        f"INSERT INTO pgqueue.history_{table} (at, bin, queue, task, state, n, exact, oldest) "  # noqa: S608
        f"VALUES (date_bin('1 minute', {at}, '2000-01-01 00:00+00'), 0, %s, '', %s, %s, true, %s)",
        queue, state, n, oldest,
    )  # fmt: skip


@pytest.mark.promise("F96")
def test_rows_of_queues_say_how_many_jobs_there_were(eyes: Eyes, conn: psycopg.Connection) -> None:
    add(eyes, n=3)
    add(eyes, task="u", queue="busy")
    note(eyes, "available", 40, 7.5)
    note(eyes, "available", 30, 8.5)  # as two leaders note one minute
    note(eyes, "blocked", 2, 90.0)
    note(eyes, "available", 4, 500.0, queue="still")
    note(eyes, "scheduled", 1, 600.0, queue="still")  # overdue
    busy, q, still = pgqueue.history(conn, by="queue")
    assert (busy.queue, busy.started, busy.available, busy.running, busy.oldest) == ("busy", 1, None, None, None)
    assert (q.started, q.available, q.scheduled, q.blocked, q.running) == (3, 40, 0, 2, 0)
    assert (q.oldest, q.longest_blocked) == (8.5, 90.0)
    assert (still.queue, still.started, still.available, still.oldest, still.wait) == ("still", None, 4, 600.0, ())
    [together] = pgqueue.history(conn, by="all")
    assert (together.started, together.available, together.blocked, together.oldest) == (4, 44, 2, 600.0)
    assert [(row.queue, row.task, row.available) for row in pgqueue.history(conn)] == [
        ("busy", "u", None),
        ("q", "t", None),
    ]
    [of_task] = pgqueue.history(conn, task="u", by="all")
    assert (of_task.started, of_task.available) == (1, None)
    [one] = pgqueue.history(conn, queue="still", by="all")
    assert (one.started, one.available) == (None, 4)  # what is not counted yet is not 0


@pytest.mark.promise("F96")
def test_the_command_shows_how_many_jobs_waited(eyes: Eyes, dsn: str) -> None:
    add(eyes, n=99_999)
    note(eyes, "available", 9_999_999, 864_000.0)
    note(eyes, "blocked", 2, 90.0)
    done = command("history", dsn=dsn)
    assert done.returncode == 0, done.stderr
    head, row = done.stdout.splitlines()
    assert head.split()[-2:] == ["WAITING", "OLDEST"] and row.split()[-2:] == ["10000001", "10d"]
    for by in ("all", "queue", "task"):
        shown = on_terminal("history", "--by", by, dsn=dsn).stdout
        assert max(map(len, shown.splitlines())) <= 80
        assert ("10M" in shown) == (by != "task")
        assert "q" in shown or by == "all"
    [item] = items(command("history", "--json", dsn=dsn))
    assert (item["available"], item["blocked"], item["oldest"], item["longest_blocked"]) == (
        9_999_999,
        2,
        864_000.0,
        90.0,
    )


@pytest.mark.promise("F96")
def test_a_minute_that_is_not_counted_yet_is_not_zero(eyes: Eyes, conn: psycopg.Connection, dsn: str) -> None:
    """It is measured at once, and counted about two minutes later. Then nothing happened if there is no count."""
    for at in ("now()", "now() - interval '1 minute'", "now() - interval '3 minutes'", "now() - interval '4 minutes'"):
        note(eyes, "available", 4, at=at)
    add(eyes, "now() - interval '1 minute'", n=3)  # a worker that was stopped has written at once
    add(eyes, "now() - interval '4 minutes'", n=2)
    for by in ("queue", "all"):
        found = [(row.started, row.run_seconds) for row in pgqueue.history(conn, by=by)]
        assert found == [(2, 2.5), (0, 0.0), (3, 2.5), (None, None)]
    note(eyes, "available", 4, table="hour")
    assert [row.started for row in pgqueue.history(conn, by="all", step="hour")][-1:] == [None]
    rows = [line.split() for line in command("history", dsn=dsn).stdout.splitlines()[1:]]
    assert [row[2:7] for row in rows[1::2]] == [["0"] * 5, ["?"] * 5]
    assert [item["failed"] for item in items(command("history", "--json", dsn=dsn))] == [1, 0, 1, None]
