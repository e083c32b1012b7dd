"""What docs/stable.md promises to keep is there."""

from __future__ import annotations

import copy
import re

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
    assert {part: len(names) > 2 for part, names in was.items() if part not in ("tables", "codes")} == dict.fromkeys(
        ("python", "methods", "functions", "commands", "exit codes", "json", "variables"), True
    )
    assert "enqueue" in was["python"] and set(was["tables"]) == {"job", "attempt"}
    assert {name: len(codes) > 20 for name, codes in was["codes"].items()} == {"why": True, "doctor": True}
    assert was["exit codes"]["STUCK"] == ["6"] and "--dsn" in was["commands"]["pgqueue jobs"]


@pytest.mark.promise("F465")
def test_the_codes_of_the_pages_are_those_of_the_list() -> None:
    _, was = stable.recorded()
    page = (stable.ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    findings = page.split("## What `pgqueue doctor` finds", 1)[1].split("\n## ", 1)[0]
    assert sorted(re.findall(r"^\| `(\w+)` \|", findings, re.MULTILINE)) == was["codes"]["doctor"]
    exits = page.split("| exit code | means |", 1)[1].split("\n\n", 1)[0]
    listed = {code for [code] in was["exit codes"].values()} | {"143"}  # the last one is SIGTERM's own
    assert set(re.findall(r"^\| (\d+) \|", exits, re.MULTILINE)) == listed


@pytest.mark.promise("F465")
@pytest.mark.parametrize(
    ("part", "name", "member"),
    [
        ("methods", "JobHandle", "result"),
        ("commands", "pgqueue jobs", "--json"),
        ("codes", "why", "deadline"),
        ("exit codes", "STUCK", "6"),
    ],
)
def test_what_goes_away_in_a_part_is_found(part: str, name: str, member: str) -> None:
    _, was = stable.recorded()
    less = copy.deepcopy(was)
    less[part][name].remove(member)
    assert stable.gone(was, less) == [f"{part}: {name}: {member}"]
    assert stable.gone(was, {**was, "variables": {}}) == [f"variables: {each}" for each in was["variables"]]


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
