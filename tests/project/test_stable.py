"""What docs/stable.md promises to keep is there."""

from __future__ import annotations

import copy

import psycopg
import pytest
import stable

pytestmark = pytest.mark.promise("F369")


@pytest.mark.second
def test_nothing_that_stays_has_gone(dsn: str) -> None:
    _, was = stable.recorded()
    there = stable.now(dsn)
    assert stable.gone(was, there) == []
    for part in was:  # each part is looked at: what goes away in it is found
        for name, members in was[part].items():
            less = copy.deepcopy(there)
            if members:
                less[part][name].remove(members[-1])
                assert stable.gone(was, less) == [f"{part}: {name}: {members[-1]}"]


def test_the_list_is_that_of_this_version_and_has_all_parts() -> None:
    version, was = stable.recorded()
    assert version == stable.version(), "write down what is new: tests/harness/stable.py"
    assert {part: len(names) > 2 for part, names in was.items() if part != "tables"} == dict.fromkeys(
        ("python", "functions", "exit codes", "json"), True
    )
    assert "enqueue" in was["python"] and set(was["tables"]) == {"job", "attempt"}


def test_a_name_that_is_gone_is_told() -> None:
    was = {"python": {"get": ["conn"], "find": []}}
    assert stable.gone(was, {"python": {"get": ["conn"]}}) == ["python: find"]
    assert stable.gone(was, {}) == ["python: get", "python: find"]
    assert stable.gone(was, {"python": {"get": ["conn", "id"], "find": ["conn"]}}) == []


def test_what_may_be_written_can_be_written(conn: psycopg.Connection) -> None:
    conn.execute(
        """INSERT INTO pgqueue.job (task, args, queue, priority, run_at) VALUES ('t', '{"n": 1}', 'q', 3, now())"""
    )
    conn.execute("UPDATE pgqueue.ring SET retention = retention WHERE kind = 'done'")
    assert conn.execute("SELECT task, queue, priority FROM pgqueue.job").fetchall() == [("t", "q", 3)]
