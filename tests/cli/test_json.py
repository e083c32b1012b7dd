"""What `--json` prints: one document of one shape for each command, also if it fails."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import click
import psycopg
import pytest
from commands import items, pgqueue

from pgqueue.cli import COMMANDS, main

Conn = psycopg.Connection[Any]

ASKED = {
    "migrate": ["migrate", "--check"],
    "migrate-sql": ["migrate", "--sql"],
    "enqueue": ["enqueue", "t"],
    "status": ["status"],
    "tasks": ["tasks"],
    "queues": ["queues"],
    "jobs": ["jobs"],
    "jobs-one": ["jobs", "4711"],
    "flows": ["flows"],
    "flows-one": ["flows", "4711"],
    "why": ["why", "4711"],
    "doctor": ["doctor"],
    "cancel": ["cancel", "4711"],
    "retry": ["retry", "--task", "nothing", "--yes"],
    "discard": ["discard", "--task", "nothing", "--yes"],
    "reschedule": ["reschedule", "4711", "--now"],
    "bulk": ["bulk"],
    "bulk-retry": ["bulk", "retry", "--task", "nothing", "--yes"],
    "audit": ["audit"],
    "pause": ["pause", "mail"],
    "resume": ["resume", "mail"],
    "locks": ["locks"],
    "locks-release": ["locks", "release", "k", "--yes"],
    "limits": ["limits"],
    "history": ["history"],
    "errors": ["errors"],
    "workers": ["workers"],
    "health": ["health"],
    "systemd": ["systemd", "shop.tasks"],
    "schedules": ["schedules"],
    "schedules-add": ["schedules", "add", "n", "t", "--every", "1h"],
    "prune": ["prune"],
    "grants": ["grants", "r", "--for", "read", "--sql"],
    "version": ["version"],
}
ELSEWHERE = {
    *("work", "web", "dev"),  # serve, and answer nothing
    "stack",  # no job runs: test_stack
    *("restart", "quiet", "scale"),  # no supervisor is here: an error
    *("relay", "demo"),  # need databases of their own: test_relay, test_demo
}


def shape(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """The document that was printed, if it is one and has the shape."""
    [line] = done.stdout.splitlines()
    assert line.isascii()
    found: dict[str, Any] = json.loads(line)
    assert isinstance(found["items"], list)
    return found


def test_every_command_is_asked() -> None:
    assert {name.partition("-")[0] for name in ASKED} == set(COMMANDS) - ELSEWHERE
    context = click.Context(main)
    for name in COMMANDS:
        command = main.get_command(context, name)
        nested = list(command.commands.values()) if isinstance(command, click.Group) else []
        for each in [command, *nested]:
            assert each is not None
            has = any("--json" in parameter.opts for parameter in each.params)
            assert has == (name not in ("work", "web", "dev")), f"{name} {each.name}"


@pytest.mark.second
@pytest.mark.promise("F70")
@pytest.mark.parametrize("name", ASKED)
def test_each_command_prints_one_document_of_one_shape(conn: Conn, dsn: str, name: str) -> None:
    conn.execute(
        "INSERT INTO pgqueue.job (id, task, args, node) "
        "VALUES (4711, 't', '{\"x\": \"\\u009b\"}', 4711::bigint << 20 | 1)"
    )
    conn.execute("INSERT INTO pgqueue.flow (id, name) VALUES (4711, 'one')")
    conn.commit()
    found = shape(pgqueue(*ASKED[name], "--json", dsn=dsn))
    assert "error" not in found
    assert all(isinstance(item, dict) for item in found["items"])


def test_times_in_a_document_say_their_offset(conn: Conn, dsn: str) -> None:
    conn.execute("INSERT INTO pgqueue.job (id, task) VALUES (7, 't')")
    conn.commit()
    [job] = items(pgqueue("jobs", "7", "--json", dsn=dsn, PGTZ="America/New_York"))
    assert job["enqueued_at"].endswith("+00:00")


FAILS: list[tuple[list[str], int, str]] = [
    (["jobs", "4711"], 1, "4711"),
    (["cancel", "--task", "t"], 1, "--yes"),
    (["restart"], 1, "no supervisor"),
    (["limits", "set", "nothing", "5"], 1, "nothing"),
    (["jobs", "--nonsense"], 2, "--nonsense"),
    (["jobs", "x"], 2, "x"),
    (["nonsense"], 2, "nonsense"),
    (["schedules", "nonsense"], 2, "nonsense"),
    (["status", "--dsn", "host=127.0.0.1 port=1 password=hush-hush"], 3, "127.0.0.1"),
]


@pytest.mark.promise("F70")
@pytest.mark.parametrize(("arguments", "code", "why"), FAILS, ids=str)
def test_an_error_has_the_same_shape(conn: Conn, dsn: str, arguments: list[str], code: int, why: str) -> None:
    conn.execute("INSERT INTO pgqueue.job (task) VALUES ('t')")
    conn.commit()
    done = pgqueue(*arguments, "--json", dsn=dsn, stdin="")
    found = shape(done)
    assert (done.returncode, found["items"], found["error"]["code"]) == (code, [], code)
    assert why in found["error"]["message"] and "hush-hush" not in done.stdout
    assert why in done.stderr, "people see it, too"


def test_without_the_schema_an_error_has_the_same_shape(empty_dsn: str) -> None:
    assert shape(pgqueue("jobs", "--json", dsn=empty_dsn))["error"]["code"] == 4


def test_a_value_that_looks_like_the_option_is_none(dsn: str) -> None:
    done = pgqueue("enqueue", "--", "t", "--json", dsn=dsn)
    assert (done.returncode, done.stdout) == (2, "")


@pytest.mark.promise("F70")
@pytest.mark.parametrize("arguments", [["scale", "2"], ["restart"], ["quiet"]], ids=str)
def test_an_order_names_the_supervisors_that_got_it(conn: Conn, dsn: str, arguments: list[str]) -> None:
    conn.execute("INSERT INTO pgqueue.supervisor (host, pid, size, state) VALUES ('h', 7, 2, 'running')")
    conn.commit()
    [told] = shape(pgqueue(*arguments, "--json", dsn=dsn))["items"]
    assert (told["host"], told["pid"], "problem" in told) == ("h", 7, False)
