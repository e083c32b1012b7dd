"""The extremes of its type in each column: the row is refused, or all goes on. The columns come from the catalog.

Such rows come from a restore, from a subscriber, or from a person with psql. Each row here has one odd value beside
plain ones. The owner writes it, without triggers: what refuses it is its type, or a constraint.

All columns are meant but the ids that sequences and workers give: no person changes these, and the highest one ends its
sequence. All rows are there at once. If something fails, its message names the value, or the table can be tried alone.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from commands import pgqueue as command
from dashboards import reading
from psycopg import sql
from workers import until, work

import pgqueue
from pgqueue.client.tasks import task
from pgqueue.worker.leader import bulks, depth, history_fold, pruner, unknown_tasks

LONG, ODD = "x" * 10_000, "a\x01\x1b[31m\n\u202e\ud7ff"
DEEP = json.loads("[" * 900 + "]" * 900)
TYPES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "timestamp with time zone": (
        "now",
        ("infinity", "-infinity", "10000-01-01 UTC", "294276-12-31 UTC", "4714-11-24 UTC BC"),
    ),
    "interval": ("1 hour", ("178000000 years", "-178000000 years", "-1 second", "0", "1000000 years", "infinity")),
    "smallint": (1, (-(2**15), 2**15 - 1, -1, 0)),
    "integer": (1, (-(2**31), 2**31 - 1, -1, 0)),
    "bigint": (1, (-(2**63), 2**63 - 1, -1, 0)),
    "double precision": (1, ("NaN", "infinity", "-infinity", "1e308", "-1e308", "5e-324", -1)),
    "text": ("x", ("", LONG, ODD)),
    "boolean": (False, (True, False)),
    "jsonb": ({}, ([], {}, "", -1, "\ud7ff" * 300, [{}], [[]], [None], 10**400, {"": None}, DEEP)),
    "text[]": ("{}", ("{}", "{NULL}", '{"",NULL}', f"{{{LONG}}}")),
    "bigint[]": ("{}", ("{}", "{NULL}", f"{{{-(2**63)},{2**63 - 1}}}", "{{1},{2}}")),
    "integer[]": ("{}", ("{}", "{NULL}", f"{{{-(2**31)},{2**31 - 1}}}", "{{1},{2}}")),
    "uuid": ("12345678-1234-1234-1234-123456789012", ("00000000-0000-0000-0000-000000000000",)),
    "bytea": ("\\x" + "00" * 32, ("\\x", "\\x00")),
}
"""Of each type a plain value, and the extremes."""
NOW, LONG_AGO = "now", "2020-01-01"
ENDED = {"finished_at": NOW, "reason": "x"}
PLAIN: dict[str, tuple[dict[str, Any], ...]] = {
    "job": (
        {"state": "available"},
        {"state": "scheduled", "run_at": NOW},
        {"state": "scheduled", "run_at": "2100-01-01"},
        {"state": "blocked", "key": "lock:k", "lock_key": "k"},
        {"state": "blocked", "key": "limit:l", "limit_key": "l"},
        {"state": "blocked", "key": "rate:r", "rate_key": "r"},
        {"state": "running", "worker_id": 77_777, "claim": 1, "started_at": NOW},
        {"state": "completed", "finished_at": NOW},
        {"state": "failed", **ENDED},
        {"state": "cancelled", **ENDED},
    ),
    "schedule": ({"line": "every 1", "task": "extremes.any"}, {"line": "0 0 * * *", "task": "extremes.any"}),
    "unique_key": ({"hold": "live"}, {"hold": "after"}, {"hold": "pending"}),
    "key_limit": ({"n": 1, "declared": 1}, {"n": 1, "set_at": NOW}),
    "key_rate": ({"count": 1, "period": 1, "set_at": NOW},),
    "worker": (
        {"queues": "{default}", "lease": "1 hour"},
        {"queues": "{default}", "lease": "1 hour", "dead_at": LONG_AGO, "state": "stopped"},
        {"queues": "{default}", "lease": "1 second", "beat_at": LONG_AGO},
    ),
    "supervisor": ({"state": "running"}, {"state": "running", "beat_at": LONG_AGO}),
    "supervisor_order": ({"kind": "quiet"}, {"kind": "scale", "size": 1}),
    "bulk": (
        {"action": "cancel", "states": "{available}", "queue": "none", "options": {"reason": "x"}},
        {"action": "retry", "states": "{failed}", "queue": "none", "options": {"again": False}},
        {"action": "reschedule", "states": "{scheduled}", "queue": "none", "options": {"at": "2100-01-01"}},
        {"action": "discard", "states": "{failed}", "queue": "none", "ended_at": NOW},
    ),
    "history_part": ({"counts": [], "errors": []},),
    "history_minute": ({"bin": 0}, {"bin": 0, "state": "available", "n": 3, "exact": True}),
    "history_hour": ({"bin": 0}, {"bin": 0, "state": "available", "n": 3, "exact": True}),
    "attempt": ({"bin": 0},),
    "job_signal": ({"kind": "cancel", "reason": "x"},),
    "queue": ({}, {"paused_at": NOW}),
    "depth": ({"state": "available", "reason": "slot"}, {"state": "blocked", "reason": "lock"}, {"state": "scheduled"}),
}
"""The rows that are plain but for one value. Other tables have one, of what cannot be NULL."""
GIVEN = {"id", "pos", "hold_pos", "audit_id", "waiter"}
COUNTED = {"bigint", "integer", "uuid", "bytea"}
"""A key of these types is a number that something gives."""
COLUMNS = """
    SELECT c.relname, json_agg(json_build_array(
        a.attname, regexp_replace(replace(format_type(a.atttypid, NULL), 'character varying', 'text'), '\\(.*', ''),
        a.attnotnull AND NOT a.atthasdef AND a.attidentity = '', a.attnum = ANY (i.indkey) IS TRUE) ORDER BY a.attnum)
    FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
    LEFT JOIN pg_index i ON i.indrelid = c.oid AND i.indisprimary
    WHERE c.relnamespace = 'pgqueue'::regnamespace AND NOT c.relispartition AND c.relkind IN ('r', 'p')
      AND c.relname NOT IN ('migration', 'ring', 'duty', 'relay_target') -- as many rows as they have
    GROUP BY c.relname ORDER BY c.relname
"""
INSERT = """
    INSERT INTO pgqueue.{table} ({names}) OVERRIDING SYSTEM VALUE
    SELECT {values} FROM jsonb_populate_record(NULL::pgqueue.{table}, $1) AS r
"""
CHANGE = """
    UPDATE pgqueue.{table} SET {name} = r.{name} FROM jsonb_populate_record(NULL::pgqueue.{table}, $1) AS r {where}
"""
PUT = """
    CREATE FUNCTION pg_temp.put(statement text, given jsonb) RETURNS boolean LANGUAGE plpgsql AS $$
    BEGIN
        EXECUTE statement USING given;
        RETURN true;
    EXCEPTION WHEN OTHERS THEN
        RETURN false;
    END $$
"""
HAVE_ROWS = (("ring", "WHERE kind = 'dead'"), ("duty", "WHERE name = 'sweep'"))
THEIRS = "SELECT attname, format_type(atttypid, NULL) FROM pg_attribute WHERE attrelid = %s::regclass AND attnum > 1"
LISTS = ("jobs", "jobs?state=failed", "jobs?state=running", "jobs?state=completed", "jobs?state=scheduled", "queues")
OTHERS = ("limits", "limits/jobs?limit=l", "limits/jobs?rate=r", "workers", "schedules", "errors", "history", "bulk")
PAGES = ("", *LISTS, *OTHERS, "outbox", "metrics")
COMMANDS = ("status", "queues", "limits", "locks", "jobs", "doctor", "workers", "schedules", "errors", "history")
MORE_COMMANDS = ("audit", "tasks", "bulk", "health")


ran: list[int] = []


@task(name="extremes.mine")
async def mine(n: int) -> None:
    ran.append(n)


@task(name="extremes.any")
async def anything() -> None: ...


def odd_rows(table: str, columns: list[tuple[str, str, bool, bool]]) -> Iterator[dict[str, Any]]:
    """The rows of this table that are plain but for one value, each with a key of its own."""
    kinds = {name: kind for name, kind, _, _ in columns}
    keys = [name for name, _, _, key in columns if key and name not in GIVEN]
    n = 0
    for plain in PLAIN.get(table, ({},)):
        needed = {name: TYPES[kind][0] for name, kind, need, _ in columns if need} | plain
        for name, kind, _, key in columns:
            if name in GIVEN or (key and kind in COUNTED):
                continue
            for value in TYPES[kind][1]:
                n += 1
                own = {
                    "text": f"k{n}",
                    "uuid": f"00000000-0000-0000-0000-{n:012}",
                    "bytea": f"\\x{n:064}",
                    "timestamp with time zone": NOW,
                }
                own_keys = {each: own.get(kinds[each], 1_000_000 + n) for each in keys if each not in plain}
                yield needed | own_keys | {name: value}


def put(conn: psycopg.Connection[Any]) -> tuple[int, int]:
    """Put all odd rows in; how many there are, and how many were refused."""
    statements: list[tuple[sql.Composed, dict[str, Any]]] = []
    for table, columns in conn.execute(COLUMNS).fetchall():
        for row in odd_rows(table, columns):
            names = [sql.Identifier(name) for name in row]
            values = sql.SQL(", ").join(sql.SQL("r.") + name for name in names)
            insert = sql.SQL(INSERT).format(table=sql.Identifier(table), names=sql.SQL(", ").join(names), values=values)
            statements.append((insert, row))
    for table, where in HAVE_ROWS:
        for name, kind in conn.execute(THEIRS, [f"pgqueue.{table}"]).fetchall():
            change = sql.SQL(CHANGE).format(
                table=sql.Identifier(table), name=sql.Identifier(name), where=sql.SQL(where)
            )
            statements += [(change, {name: value}) for value in TYPES[kind][1]]
    conn.execute(PUT)
    with conn.transaction(), conn.cursor() as cursor:
        conn.execute("SET LOCAL session_replication_role = replica")
        asked = [(statement.as_string(conn), json.dumps(row)) for statement, row in statements]
        cursor.executemany("SELECT pg_temp.put(%s, %s)", asked, returning=True)
        done = list(cursor.fetchone() or ())
        while cursor.nextset():
            done += cursor.fetchone() or ()
    return sum(done), len(done) - sum(done)


@pytest.mark.second
@pytest.mark.promise("F211")
async def test_the_extremes_of_a_column_are_refused_or_end_nothing(
    dsn: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Naive is to read what is there: a time beyond Python's ended workers, and every page that shows it."""
    ran.clear()
    pgqueue.configure(dsn=dsn)
    for module, name, value in (
        (pruner, "ROUND_SECONDS", 0.3),
        (pruner, "TIDY_SECONDS", 0.01),
        (history_fold, "ROUND_SECONDS", 0.3),
        (bulks, "LOOK_SECONDS", 0.3),
        (unknown_tasks, "DEAR_SHARE", 0),
        (depth, "FIRST_SECONDS", 0.01),
        (depth, "PAUSE_LEAST", 0.05),
    ):
        monkeypatch.setattr(module, name, value)
    with psycopg.connect(dsn, autocommit=True) as conn:
        there, refused = put(conn)
        assert there > 1_500 and refused > 500, (there, refused)
        pgqueue.schedules.add(conn, "mine", pgqueue.Every(1), mine, n=0)
        mine.enqueue_many(conn, [(n,) for n in range(1, 6)])
    with caplog.at_level(logging.ERROR, "pgqueue"):
        async with work(dsn, mine, anything, poll=0.5, concurrency=20) as worker:
            loops = [loop for loop in worker.services.duties.loops if loop.duty.name != "undeclared"]
            await until(lambda: set(ran) == set(range(6)))
            await until(lambda: all(loop.report.ran_at or loop.report.error for loop in loops))
            await until(lambda: ran.count(0) >= 3)
            failing = {loop.duty.name: loop.report.error for loop in loops if loop.report.failing_since}
            assert (worker.state.phase, failing) == ("running", {})
            await every_page_answers(dsn)
    every_command_answers(dsn)
    assert not [record for record in caplog.records if record.exc_info], caplog.text


async def every_page_answers(dsn: str) -> None:
    async with reading(dsn) as browser:
        for path in PAGES:
            for kind in ("text/html", "application/json"):
                page = await browser.get(f"/{path}", headers={"accept": kind})
                assert page.status_code == 200, (path, kind, page.text)
                if kind == "application/json" and path != "metrics":
                    json.loads(page.text, parse_constant=pytest.fail)


def every_command_answers(dsn: str) -> None:
    for name in COMMANDS + MORE_COMMANDS:
        for more in ((), ("--json",)):
            done = command(name, *more, dsn=dsn)
            assert "Traceback" not in done.stderr and done.returncode in (0, 1), (name, done.stderr)
            if more:
                json.loads(done.stdout, parse_constant=pytest.fail)
