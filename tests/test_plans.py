"""Statements that run all the time find their rows by the same index, whatever the statistics say of a table.

A plan is kept until the next VACUUM or ANALYZE, and one that was made while a table was empty may be carried out when
it is no more: after a quiet night a million jobs may come before anybody analyses again.
"""

from __future__ import annotations

import re
from typing import Any

import psycopg
import pytest

from pgqueue.statements import text

HOT = (
    "fetch_claim", "fetch_lock", "fetch_park", "admit_next", "admit_move", "admit_limits", "admit_lines", "admit_read",
    "admit_read_limits", "complete_plain", "complete_result", "complete_successors", "complete_within", "complete_mine",
    "complete_retry", "complete_fail", "complete_release", "complete_interrupt", "schedule_promote", "heartbeat_remark",
    "progress_write", "iterate_append", "sweep_park",
)  # fmt: skip
"""Statements whose cost must not depend on how many other jobs there are."""
JOBS = {"job_available", "job_blocked", "job_running", "job_scheduled"}
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
        if node.get("Relation Name") in JOBS and "Index Name" in node:
            found.add((node["Index Name"], "; ".join(re.findall(r"\b(?:key|queue|id|\w+_key|rank|pos)\b", cond(node)))))
        for below in node.get("Plans", ()):
            walk(below)

    walk(plan["Plan"])
    return found


def cond(node: dict[str, Any]) -> str:
    said: str = node.get("Index Cond", "")
    return said


@pytest.mark.promise("F07")
@pytest.mark.parametrize("state", ["vacuumed while empty", "one line analysed", "a few analysed"])
def test_what_is_read_does_not_depend_on_when_it_was_planned(dsn: str, state: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as conn:
        fresh = {name: scans(conn, name) for name in HOT}
        fill = (
            "INSERT INTO pgqueue.job_blocked (state, task, limit_key, key) "
            "SELECT 'blocked', 'x', 'k', 'limit:k' FROM generate_series(1, %s)"
        )
        conn.execute(fill, [1 if state == "a few analysed" else 2_000])
        conn.execute("INSERT INTO pgqueue.job (task) SELECT 'x' FROM generate_series(1, 2000)")
        conn.execute("DELETE FROM pgqueue.job_available")
        if state == "vacuumed while empty":
            conn.execute("DELETE FROM pgqueue.job_blocked")
            conn.execute("VACUUM ANALYZE")
        conn.execute("ANALYZE")
        other = {name: scans(conn, name) ^ fresh[name] for name in HOT}
        assert {name: found for name, found in other.items() if found} == {}
