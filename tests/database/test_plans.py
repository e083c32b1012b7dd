"""Statements find jobs and keys by the same index, whatever the statistics say of a table.

A plan is kept until the next VACUUM or ANALYZE, and one that was made while a table was empty may be carried out when
it is no more: after a quiet night a million jobs may come before anybody analyses again.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

import pgqueue
from pgqueue import Unique
from pgqueue.database import migrations
from pgqueue.database.statements import _files, home, names, text

NAMES = [name for name in names() if _files()[home(name)].parent.name != "testing"]
ELSE = {
    "locks_release", "workers_list",  # by hand: as many jobs as run
    "unblock_refuse_unfit",  # after a row that fits nowhere was restored
    "doubles_resolve",  # seldom
    # In sessions that are not ours:
    "actions_cancel", "queries_find", "queries_find_after",
    "queries_find_ended", "queries_find_ended_after", "queries_find_scheduled", "queries_find_scheduled_after",
}  # fmt: skip
"""They may read as they like."""
SCANS = {"Seq Scan", "Index Scan", "Index Only Scan"}
WHOLE = {
    "queries_find", "queries_find_after",
    "queries_find_ended", "queries_find_ended_after", "queries_find_scheduled", "queries_find_scheduled_after",
    "locks_list", "lag_outbox",  # pages: with a LIMIT
    "depth_others", "depth_read_live", "depth_read_history",  # with a LIMIT, or where the tables are small
    "source_waiting", "tasks_list",  # the refused rows, the jobs of each state, with a LIMIT
    "unblock_refuse_unfit",
    "cancellation_read", "cancellation_settle", "rescue_strays",  # as many as are cancelled, as many as run
    "workers_longest",  # as many as run, for a page of the dashboard
    "activity_mark",  # as many as run, once a second for all open pages of a dashboard
    "sweep_due", "sweep_stuck",  # whether there is any at all; those that hold a key and wait
    "refused_list", "refused_retry",  # by hand
    "source_head",  # the end of an index, once for `pgqueue relay --once`
    "pruner_waiters", "progress_sweep", "pruner_rates", "pruner_discarded_keys",
    "pruner_flow_kept",  # tidy up, once a minute or an hour
}  # fmt: skip
"""They read an index, or a table, from its beginning."""
INDEXES = """
    SELECT relname FROM pg_index JOIN pg_class ON pg_class.oid = indexrelid
    WHERE indrelid IN ('pgqueue.job_available'::regclass, 'pgqueue.job_blocked'::regclass,
                       'pgqueue.job_running'::regclass, 'pgqueue.job_scheduled'::regclass)
"""
FILL = """
    INSERT INTO pgqueue.job (task) SELECT 'x' FROM generate_series(1, %(n)s);
    INSERT INTO pgqueue.job (task, state, run_at)
    SELECT 'x', 'scheduled', pgqueue.now() + make_interval(secs => 900 + g) FROM generate_series(1, %(n)s) AS g;
    INSERT INTO pgqueue.job (task, state, worker_id, claim, started_at, holds, lock_key)
    SELECT 'x', 'running', mod(g, 9), g, pgqueue.now(), true, 'k' || g FROM generate_series(1, %(n)s) AS g;
    INSERT INTO pgqueue.job (task, state, limit_key, key)
    SELECT 'x', 'blocked', 'k', 'limit:k' FROM generate_series(1, %(n)s);
    DELETE FROM pgqueue.job_available; DELETE FROM pgqueue.job_scheduled; DELETE FROM pgqueue.job_running;
"""
"""Jobs in each state were there, and are gone, but for those that wait for a limit."""
GROWS = re.compile(
    r"job_(available|blocked|running|scheduled|cursor|progress|waiter|signal)|flow|node|flow_kept|unique_key|discarded_key"
    r"|limiter|outbox|outbox_refused|relayed"
    r"|(job_done|job_dead|attempt)_\d+"
)
"""Tables with a row for each job, or for each key."""
COLUMNS = re.compile(r"\b(?:key|node|queue|id|uid|source|relayed_at|\w+_key|\w+_id|rank|pos|run_at|waiter)\b")
MODES = (
    "SET LOCAL enable_seqscan = off; SET LOCAL enable_bitmapscan = off; SET LOCAL plan_cache_mode = force_generic_plan"
)


def scans(conn: psycopg.Connection, name: str) -> set[tuple[str, str]]:
    """The indexes by which this statement finds jobs, each with what it looks up there; as a worker has it planned."""
    places: dict[str, int] = {}
    sql = re.sub(r"%\((\w+)\)s", lambda one: f"${places.setdefault(one[1], len(places) + 1)}", text(name, "pgqueue"))
    with conn.transaction(force_rollback=True):
        conn.execute(MODES)
        conn.execute(f"PREPARE planned AS {sql.replace('%%', '%')}".encode())
        nulls = f"({', '.join(['NULL'] * len(places))})" if places else ""
        [[[plan]]] = conn.execute(f"EXPLAIN (FORMAT json) EXECUTE planned {nulls}".encode()).fetchall()
    conn.execute("DEALLOCATE ALL")
    found: set[tuple[str, str]] = set()

    def walk(node: dict[str, Any]) -> None:
        if GROWS.fullmatch(node.get("Relation Name", "")) and node["Node Type"] in SCANS:
            index = node.get("Index Name", "all of " + node["Relation Name"])
            found.add((index, "; ".join(COLUMNS.findall(node.get("Index Cond", "")))))
        for below in node.get("Plans", ()):
            walk(below)

    walk(plan["Plan"])
    return found


@pytest.mark.promise("F07")
@pytest.mark.each_value
@pytest.mark.parametrize("order", ["as migrated", "as restored", "the other way round"])
@pytest.mark.parametrize("state", ["vacuumed while empty", "one line analysed", "a few analysed"])
def test_what_is_read_does_not_depend_on_when_it_was_planned(dsn: str, state: str, order: str) -> None:
    """Nor on the order in which indexes were made, which decides between those that cost the same."""
    migrations.migrate(dsn, line=migrations.OUTBOX)
    with psycopg.connect(dsn, autocommit=True) as conn:
        fresh = {name: scans(conn, name) for name in NAMES}
        assert {name for name, found in fresh.items() if any(not key for _, key in found)} <= WHOLE
        psycopg.ClientCursor(conn).execute(FILL, {"n": 1 if state == "a few analysed" else 2_000})
        if state == "vacuumed while empty":
            conn.execute("DELETE FROM pgqueue.job_blocked")
            conn.execute("VACUUM ANALYZE")
        conn.execute("ANALYZE")
        if order != "as migrated":
            indexes = sorted(name for (name,) in conn.execute(INDEXES).fetchall())
            for name in indexes if order == "as restored" else reversed(indexes):
                conn.execute(f"REINDEX INDEX CONCURRENTLY pgqueue.{name}".encode())
        other = {name: scans(conn, name) ^ fresh[name] for name in NAMES}
        assert {name: found for name, found in other.items() if found and name not in ELSE} == {}


mail = pgqueue.remote("plans.mail")
ASKS: dict[str, Callable[[psycopg.Connection], object]] = {
    "one": lambda app: mail.using(unique="9").enqueue(app),
    "several": lambda app: pgqueue.enqueue_many(app, [mail.using(unique=key).new() for key in "789"]),
    "one that is pending": lambda app: mail.using(unique=Unique("9", hold="pending")).enqueue(app),
    "a replacement": lambda app: mail.using(unique=Unique("9", on_duplicate="replace")).enqueue(app),
    "SQL": lambda app: app.execute("SELECT pgqueue.enqueue('plans.mail', unique_key => '9')").fetchone(),
}
"""What an application says of keys that are held."""
READ = """
    SELECT (SELECT sum(seq_tup_read) FROM pg_stat_user_tables WHERE schemaname = 'pgqueue')
         + (SELECT sum(idx_tup_read) FROM pg_stat_user_indexes WHERE schemaname = 'pgqueue')
"""
"""How many rows and entries of indexes have been read, ever."""


@pytest.mark.promise("F11")
@pytest.mark.each_value
@pytest.mark.parametrize("ask", ASKS)
@pytest.mark.parametrize("state", ["available", "scheduled"])
def test_a_duplicate_reads_a_few_rows_whenever_its_session_planned(dsn: str, state: str, ask: str) -> None:
    """An application's session is free to read whole tables, and keeps what it planned while they were empty."""
    delay = 3600 if state == "scheduled" else None
    fill = [mail.using(unique=Unique(str(key), hold="pending"), delay=delay).new() for key in range(2_000)]
    with psycopg.connect(dsn, autocommit=True) as conn, psycopg.connect(dsn, autocommit=True) as app:

        def read() -> int:
            for each in (app, conn):
                each.execute("SELECT pg_stat_force_next_flush()")
            [[rows]] = conn.execute(READ.encode()).fetchall()
            return int(rows)

        pgqueue.enqueue_many(conn, fill)
        conn.execute("DELETE FROM pgqueue.job; DELETE FROM pgqueue.unique_key")
        conn.execute("VACUUM ANALYZE")
        for _ in range(20):  # psycopg prepares, and PostgreSQL makes its mind up
            ASKS[ask](app)
        pgqueue.enqueue_many(conn, fill)
        before = read()
        ASKS[ask](app)
        assert 0 < read() - before < 100
