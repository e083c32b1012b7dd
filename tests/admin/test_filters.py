"""One filter: lists, changes and operations that are asked for by the same parts mean the same jobs."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import psycopg
import pytest

import pgqueue
from pgqueue.admin import filters, queries
from pgqueue.database import statements
from pgqueue.database.steps import drive
from pgqueue.jobs.states import STATES

Conn = psycopg.Connection[Any]

FILTERS: list[dict[str, Any]] = [
    {"state": ["available"]},
    {"state": ["scheduled", "available"], "queue": "a"},
    {"state": ["retrying"]},
    {"state": ["retrying", "blocked"], "task": "t1"},
    {"state": ["retrying", "scheduled"], "queue": "b", "task": "t0"},
    {"state": ["running"], "queue": "b"},
    {"queue": "none"},
]


def fill(conn: Conn) -> None:
    """Some jobs of each live state, queue and task; of the scheduled ones some wait for another attempt."""
    conn.execute(
        "INSERT INTO pgqueue.job (state, queue, task, run_at, attempt, key, lock_key, worker_id, claim, started_at, "
        "holds) "
        "SELECT s, CASE WHEN g %% 2 = 0 THEN 'a' ELSE 'b' END, 't' || g / 2 %% 2, "
        "CASE WHEN s = 'scheduled' THEN now() + interval '1 h' END, g / 4, "
        "CASE WHEN s = 'blocked' THEN 'lock:k' END, 'k', "
        "r, r, CASE WHEN r > 0 THEN now() END, coalesce(r > 0, false) "
        "FROM unnest(%s::text[]) AS s, generate_series(0, 7) AS g, "
        "LATERAL (SELECT CASE WHEN s = 'running' THEN 1 END) AS a (r)",
        [["available", "scheduled", "blocked", "running"]],
    )
    conn.commit()


@pytest.mark.promise("F85")
@pytest.mark.parametrize("asked", FILTERS, ids=str)
def test_lists_changes_and_operations_mean_the_same_jobs(conn: Conn, asked: dict[str, Any]) -> None:
    fill(conn)
    live = {"state": ["available", "scheduled", "blocked", "running"]} | asked
    listed = sorted(job.id for job in pgqueue.find(conn, **live))
    preview = pgqueue.preview_bulk(conn, "cancel", **asked)
    assert (preview.count.n, list(preview.ids)) == (len(listed), listed[:10])
    changed = [(answer.id, answer.did) for answer in pgqueue.cancel(conn, **asked)]
    assert [id for id, _ in changed] == listed and {did for _, did in changed} <= {"cancelled", "requested"}


@pytest.mark.promise("F113")
def test_the_condition_is_put_into_each_plan(conn: Conn) -> None:
    """Else a search of 20,000 jobs makes as many calls. With a setting of its own the function would be called."""
    asked = filters.Filter(STATES, "a", "t")
    matching = statements.text("filters_matching", "pgqueue")
    walk = statements.Statement(matching, asked.params() | {"after": 0, "most": 10}, list)
    for each in (queries.newest(asked, "pgqueue"), queries.newest(asked, "pgqueue", 7), walk):
        plan = conn.execute(f"EXPLAIN (VERBOSE) {each.sql}".encode(), each.params).fetchall()
        assert plan and "fits(" not in str(plan)


@pytest.mark.promise("F85")
@pytest.mark.parametrize("part", filters.OF_LISTS)
def test_a_change_does_not_pass_over_what_only_lists_know(part: str) -> None:
    """Else it would change all jobs that the other parts choose."""
    asked: Any = {part: "x"}
    with pytest.raises(pgqueue.InvalidOption, match=f"{part}: lists can ask for this"):
        filters.Filter(("failed",), "mail", **asked).params()


def test_the_end_of_a_job_is_compared_with_its_age(conn: Conn) -> None:
    conn.execute(
        "INSERT INTO pgqueue.job (state, task, finished_at, reason, bin) "
        "SELECT 'failed', 't', now() - make_interval(hours => g), 'error', 0 FROM generate_series(1, 4) AS g"
    )
    asked = filters.filtered((), ("failed",), state=None, older_than=timedelta(hours=2.5))
    assert asked is not None and asked.older_than == 9_000.0
    assert drive(conn, filters.finding(asked)) == [3, 4]
    assert pgqueue.preview_bulk(conn, "retry", older_than="150m").ids == (3, 4)
