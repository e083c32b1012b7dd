"""Commands for several databases: what looks goes over all, what changes is for one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner, Result

import pgqueue as library
from pgqueue.cli import main
from pgqueue.config import config
from pgqueue.databases import Database, current, without_databases
from pgqueue.pytest_plugin import Databases

AWAY = "postgresql://nobody@127.0.0.1:1/away?connect_timeout=2"


@pytest.fixture
def other_dsn(pgqueue_databases: Databases) -> Iterator[str]:
    """A second database, which has the number 1."""
    with pgqueue_databases.copy() as made:
        library.migrate(made, number=1)
        yield made


@pytest.fixture
def both(dsn: str, other_dsn: str) -> str:
    return f"a={dsn} bb={other_dsn}"


def asked(databases: str, *arguments: str, **environ: str) -> Result:
    return CliRunner().invoke(main, list(arguments), env={"PGQUEUE_DATABASES": databases} | environ)


def document(databases: str, *arguments: str) -> tuple[int, dict[str, Any]]:
    done = asked(databases, *arguments, "--json")
    return done.exit_code, json.loads(done.stdout)


def enqueue(dsn: str) -> int:
    with psycopg.connect(dsn) as conn:
        return library.enqueue(conn, "t").id


@pytest.mark.second
@pytest.mark.promise("F399")
def test_what_looks_goes_over_all_and_names_each(dsn: str, other_dsn: str, both: str) -> None:
    ids = [enqueue(dsn), enqueue(other_dsn)]
    done = asked(both, "jobs")
    assert (done.exit_code, done.stderr) == (0, "")
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [(line[0], line[1]) for line in lines] == [("a", "ID"), ("a", "1"), ("bb", "ID"), ("bb", str(ids[1]))]
    code, found = document(both, "jobs")
    assert (code, [(item["database"], item["id"]) for item in found["items"]]) == (0, [("a", 1), ("bb", ids[1])])
    assert found["databases"]["bb"]["complete"] is True and found["errors"] == []
    code, found = document(both, "status")
    assert [(item["database"], item["number"]) for item in found["items"]] == [("a", 0), ("bb", 1)]
    code, found = document(both, "migrate")
    assert (code, [item["database"] for item in found["items"]]) == (0, ["a", "bb"])
    assert [line.split()[0] for line in asked(both, "doctor").stdout.splitlines() if "No finding" in line] == [
        "a",
        "bb",
    ]
    assert asked(both, "health").exit_code == 1
    for command in (
        *("queues", "tasks", "locks", "limits", "errors", "history", "workers", "schedules", "audit", "bulk", "flows"),
        *("schedules list", "bulk list"),
    ):
        code, found = document(both, *command.split())
        assert code == 0 and found["databases"].keys() == {"a", "bb"}, command


@pytest.mark.promise("F399")
def test_one_that_is_away_is_a_line_and_the_rest_is_shown(dsn: str) -> None:
    job, databases = enqueue(dsn), f"away={AWAY} here={dsn}"
    done = asked(databases, "jobs")
    assert (done.exit_code, done.stdout.split()[:2]) == (3, ["here", "ID"])
    [line] = done.stderr.splitlines()
    assert line.startswith("away  Error: database unreachable")
    code, found = document(databases, "jobs")
    assert (code, [item["id"] for item in found["items"]]) == (3, [job])
    assert [(error["database"], error["code"]) for error in found["errors"]] == [("away", 3)]
    for command in ("status", "doctor", "health", "migrate"):
        assert asked(databases, command).exit_code == 3, command


@pytest.mark.promise("F400")
def test_an_id_finds_its_database(dsn: str, other_dsn: str, both: str) -> None:
    ids = [enqueue(dsn), enqueue(other_dsn)]
    code, found = document(both, "jobs", str(ids[1]))
    assert (code, [item["id"] for item in found["items"]]) == (0, ids[1:])
    assert str(ids[1]) in asked(both, "why", str(ids[1])).stdout
    assert asked(both, "cancel", *map(str, ids)).exit_code == 0
    for each, id in zip((dsn, other_dsn), ids, strict=True):
        with psycopg.connect(each) as conn:
            assert library.get(conn, id).state == "cancelled"
    assert asked(both, "retry", str(ids[1])).exit_code == 0
    assert asked(both, "reschedule", str(ids[1]), "--at", "2099-01-01T00:00Z").exit_code == 0
    assert asked(both, "discard", str(ids[0])).exit_code == 0
    with psycopg.connect(dsn) as here, psycopg.connect(other_dsn) as there:
        assert library.find(here) == [] and library.get(there, ids[1]).state == "scheduled"
    assert f"job {ids[1]}" in asked(both, "stack", str(ids[1])).output
    nowhere = asked(both, "jobs", str(5 << 43))
    assert (nowhere.exit_code, "number 4" in nowhere.stderr) == (1, True)
    away = asked(f"a={dsn} away={AWAY}", "cancel", str(ids[1]))
    assert (away.exit_code, "away: " in away.stderr) == (3, True)
    twins = asked(f"a={dsn} b={dsn}", "cancel", "1")
    assert (twins.exit_code, "'a' and 'b' have one number, 0" in twins.stderr) == (2, True)


@pytest.mark.promise("F400")
def test_a_change_without_an_id_is_for_one(dsn: str, other_dsn: str, both: str) -> None:
    for arguments in (
        ["pause", "q"],
        ["enqueue", "t"],
        ["cancel", "--task", "t", "--yes"],
        ["migrate", "--number", "3"],
        ["jobs", "--after", "7"],
        ["flows", "--before", "7"],
    ):
        refused = asked(both, *arguments)
        assert (refused.exit_code, "--only NAME, one of a, bb" in refused.stderr) == (2, True), arguments
        assert asked(both, *arguments, "--only", "bb").exit_code == 0, arguments
    for each, paused, jobs in ((dsn, 0, 0), (other_dsn, 1, 1)):
        with psycopg.connect(each) as conn:
            assert sum(queue.paused_at is not None for queue in library.queues(conn)) == paused
            assert len(library.find(conn)) == jobs
    assert asked(both, "jobs", "--only", "a").stdout == ""


@pytest.mark.promise("F400")
def test_a_dsn_of_key_words_is_refused_in_the_variable_without_its_password(dsn: str) -> None:
    """Naive is to split it at its blanks: `password` would be the name of a database, and its DSN be shown."""
    for value in ("a=host=x password=s3cret dbname=y", "a=host=x", "password=s3cret", "a=s3cret"):
        done = asked(value, "status", PGQUEUE_DSN=dsn)
        assert (done.exit_code, "s3cret" in done.output, "NAME=" in done.stderr) == (2, False, True), done.output


@pytest.mark.promise("F399")
def test_what_needs_no_database_or_names_its_own_is_called_once(dsn: str, both: str) -> None:
    alone = asked("", "migrate", "--sql")
    assert asked(both, "migrate", "--sql").stdout == alone.stdout != ""
    code, found = document(both, "version", "--check")
    assert (code, [item["database"] for item in found["items"]]) == (0, ["a", "bb"])
    once = asked(both, "relay", "--from", dsn, "--to", dsn, "--once")
    assert "--only" not in once.stderr
    assert "PGQUEUE_DATABASES" not in without_databases({"PGQUEUE_DATABASES": both, "PGQUEUE_LISTEN_DSN": "x"})


@pytest.mark.promise("F399")
def test_without_listen_is_without_listen_in_each_database(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGQUEUE_LISTEN_DSN", "off")
    token = current.set(Database("a", dsn))
    try:
        assert (config().dsn, config().listen_dsn) == (dsn, None)
    finally:
        current.reset(token)
    elsewhere = asked(f"a={dsn}", "work", "shop", PGQUEUE_LISTEN_DSN="postgresql://elsewhere/x")
    assert (elsewhere.exit_code, "each has a DSN of its own" in elsewhere.stderr) == (2, True)


@pytest.mark.promise("F400")
def test_wrong_uses_say_what_is_right(dsn: str, both: str) -> None:
    for arguments, said in (
        (["status", "--dsn", dsn, "--dsn", dsn], "given twice"),
        (["status", "--dsn", dsn, "--database", f"a={dsn}"], "exclude each other"),
        (["status", "--only", "c"], "there are: a, bb"),
        (["work", "shop", "--only", "c"], "there are: a, bb"),
        (["status", "--watch"], "--only NAME"),
        (["status", "--database", "a=x", "--database", "a=y"], "named twice"),
    ):
        done = asked(both, *arguments)
        assert (done.exit_code, said in done.stderr) == (2, True), (arguments, done.stderr)
    for blank in ("", " \n"):
        assert asked(blank, "status", PGQUEUE_DSN=dsn).exit_code == 0
    unit = asked(both, "systemd", "shop.tasks", "--only", "a")
    assert (unit.exit_code, "one database" in unit.stderr) == (2, True)
    for arguments in (["jobs", "--after", "7"], ["jobs", "--flow", "1"], ["migrate", "--outbox"]):
        done = asked(both, *arguments)
        assert (done.exit_code, "--only NAME" in done.stderr) == (2, True), (arguments, done.stderr)
    alone = asked("", "status", "--only", "a", PGQUEUE_DSN=dsn)
    assert (alone.exit_code, "PGQUEUE_DATABASES" in alone.stderr) == (2, True)
    assert asked(both, "status", "--dsn", dsn).exit_code == 0  # --dsn comes before the environment
