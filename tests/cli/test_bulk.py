"""`pgqueue bulk`: says how many jobs fit, asks, does it, shows how far it is; goes on where a command was killed."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
from commands import COMMAND, items, on_terminal
from commands import pgqueue as command
from roles import Role, role
from workers import Eyes, wait_until

import pgqueue
from pgqueue.admin.bulk import runner

__all__ = ["role"]

Conn = psycopg.Connection[Any]


def put(eyes: Eyes, n: int, task: str = "bulk.task", queue: str = "default") -> list[int]:
    rows = eyes.all(
        "INSERT INTO pgqueue.job (task, queue, state, finished_at, reason, bin) "
        "SELECT %s, %s, 'failed', pgqueue.now(), 'error', 0 FROM generate_series(1, %s) RETURNING id",
        task,
        queue,
        n,
    )
    return [id for (id,) in rows]


@pytest.mark.promise("F89")
def test_it_says_how_many_asks_and_does_it_without_a_worker(dsn: str, eyes: Eyes) -> None:
    ids = put(eyes, 1_200)
    put(eyes, 2, "another")
    no = command("bulk", "retry", "--task", "bulk.task", dsn=dsn, stdin="n\n")
    assert (
        no.returncode == 1 and "Retry 1,200 jobs of task bulk.task" in no.stderr and f"such as {ids[0]}, " in no.stderr
    )
    assert eyes.states() == {"failed": 1_202} and pgqueue.bulks(eyes.conn) == []
    done = command("bulk", "retry", "--task", "bulk.task", "--actor", "ann", dsn=dsn, stdin="y\n")
    assert (done.returncode, eyes.states()) == (0, {"failed": 2, "available": 1_200})
    [bulk] = pgqueue.bulks(eyes.conn)
    assert bulk.actor == "ann" and f"operation {bulk.id} is done: 1,200 retried" in done.stdout
    assert f"  1,200 retried: {ids[0]}, " in done.stdout and f"operation {bulk.id} has begun" in done.stderr


@pytest.mark.promise("F89")
def test_each_action_and_its_options(dsn: str, eyes: Eyes) -> None:
    eyes.do("INSERT INTO pgqueue.job (task, queue) SELECT 'bulk.task', 'mail' FROM generate_series(1, 5)")
    at = "2099-12-24T18:00+01:00"
    [found] = items(command("bulk", "reschedule", "--queue", "mail", "--at", at, "--yes", "--json", dsn=dsn))
    assert found["counts"] == {"rescheduled": 5} and eyes.states() == {"scheduled": 5}
    [found] = items(command("bulk", "reschedule", "--queue", "mail", "--now", "--yes", "--json", dsn=dsn))
    assert found["counts"] == {"rescheduled": 5} and eyes.states() == {"available": 5}
    cancel = ["bulk", "cancel", "--state", "available", "--reason", "no more", "--yes", "--json"]
    [found] = items(command(*cancel, dsn=dsn))
    assert found["counts"] == {"cancelled": 5} and len(found["ids"]["cancelled"]) == 5
    assert eyes.one("SELECT DISTINCT reason FROM pgqueue.job") == "no more"
    none = command("bulk", "discard", "--queue", "mail", "--older-than", "1h", "--yes", dsn=dsn)
    assert (none.returncode, none.stdout) == (0, "No job fits.\n")
    [found] = items(command("bulk", "discard", "--older-than", "0s", "--yes", "--json", dsn=dsn))
    assert found["counts"] == {"discarded": 5} and eyes.states() == {}


@pytest.mark.promise("F301")
def test_the_jobs_of_a_cause_with_a_note(dsn: str, eyes: Eyes) -> None:
    failed, _ = put(eyes, 2)
    eyes.do(
        "INSERT INTO pgqueue.attempt (job_id, enqueued_at, claim, attempt, worker_id, started_at, finished_at, bin, "
        "outcome, error_type) SELECT id, enqueued_at, 1, 1, 1, now(), now(), 0, 'error', 'KeyError' FROM pgqueue.job "
        "WHERE id = %s",
        failed,
    )
    chosen = ["bulk", "retry", "--error-type", "KeyError", "--note", "the key is there"]
    no = command(*chosen, dsn=dsn, stdin="n\n")
    assert "Retry 1 job with KeyError" in no.stderr
    [found] = items(command(*chosen, "--yes", "--json", dsn=dsn))
    assert (found["ids"], found["note"]) == ({"retried": [failed]}, "the key is there")


@pytest.mark.promise("F89")
@pytest.mark.parametrize(
    "arguments",
    [
        ["retry"],
        ["cancel", "--yes"],
        ["retry", "--again"],
        ["reschedule", "--queue", "mail"],
        ["reschedule", "--now", "--yes"],
        ["retry", "--queue", "mail", "--pace", "fast"],
        ["retry", "--state", "completed"],
        ["cancel", "--state", "failed"],
        ["cancel", "--queue", "mail", "--older-than", "2h"],
    ],
    ids=" ".join,
)
def test_what_it_cannot_do_is_usage(arguments: list[str], dsn: str, eyes: Eyes) -> None:
    put(eyes, 1, queue="mail")
    done = command("bulk", *arguments, dsn=dsn, stdin="y\n")
    assert done.returncode == 2 and "Traceback" not in done.stderr and pgqueue.bulks(eyes.conn) == []


@pytest.mark.promise("F89")
def test_a_list_a_look_and_a_stop(dsn: str, eyes: Eyes) -> None:
    assert command("bulk", dsn=dsn).stdout == "There is no operation.\n"
    put(eyes, 500)
    begun = command("bulk", "retry", "--task", "bulk.task", "--pace", "100/s", "--detach", "--yes", dsn=dsn)
    assert begun.returncode == 0
    [bulk] = pgqueue.bulks(eyes.conn)
    assert f"operation {bulk.id} is under way: no job yet" in begun.stdout and bulk.pace == 100
    made = runner.take(eyes.conn, "test", bulk.id)
    assert made is not None
    runner.step(eyes.conn, made)
    assert "100 retried" in command("bulk", "show", str(bulk.id), dsn=dsn).stdout
    stopped = command("bulk", "stop", str(bulk.id), "--actor", "bob", dsn=dsn)
    assert stopped.returncode == 0 and f"operation {bulk.id} was stopped by bob: 100 retried" in stopped.stdout
    again = command("bulk", "stop", str(bulk.id), dsn=dsn)
    assert again.returncode == 1 and "was stopped by bob" in again.stdout
    [listed] = items(command("bulk", "list", "--json", dsn=dsn))
    assert (listed["state"], listed["changed"]) == ("stopped", 100)
    screen = on_terminal("bulk", dsn=dsn).stdout.splitlines()
    assert screen[0].split() == ["ID", "STARTED", "ACTION", "STATE", "CHANGED", "LEFT", "BY", "ON"]
    assert all(len(line) <= 80 for line in screen) and "stopped" in screen[1]
    missing = command("bulk", "show", "4711", dsn=dsn)
    assert missing.returncode == 1 and "4711" in missing.stderr


@pytest.mark.promise("F89")
def test_what_was_left_out_is_told(dsn: str, eyes: Eyes) -> None:
    ids = put(eyes, 5)
    eyes.do(f"ALTER TABLE pgqueue.job_available ADD CONSTRAINT no CHECK (id <> {ids[3]})")
    done = command("bulk", "retry", "--task", "bulk.task", "--yes", dsn=dsn)
    assert done.returncode == 0 and f"job {ids[3]} was left out" in done.stderr
    assert f"  1 refused: {ids[3]}\n" in done.stdout and "4 retried" in done.stdout


@pytest.mark.promise("F89")
def test_on_a_terminal_it_shows_how_far_it_is(dsn: str, eyes: Eyes) -> None:
    put(eyes, 30)
    ours, terminal = pty.openpty()
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PGQUEUE_")}
    arguments = [COMMAND, "bulk", "retry", "--task", "bulk.task", "--pace", "20/s", "--yes"]
    with subprocess.Popen(arguments, env=environ | {"PGQUEUE_DSN": dsn}, stdout=terminal, stderr=terminal) as process:
        os.close(terminal)
        said = ""
        while "is done" not in said:
            said += os.read(ours, 1 << 16).decode()
        assert process.wait(60) == 0
    os.close(ours)
    shown = [line for line in said.replace("\n", "\r").split("\r") if " jobs; " in line]
    assert "20 of 30 jobs; 20 retried" in shown[0] and "30 of 30 jobs; 30 retried" in shown[-1]
    assert max(map(len, shown)) < 80


# Commands that end early ---------------------------------------------------------------------------------------------


@contextmanager
def running(dsn: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PGQUEUE_")}
    process = subprocess.Popen(
        [COMMAND, "bulk", *arguments],
        env=environ | {"PGQUEUE_DSN": dsn},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def goes_on(eyes: Eyes) -> int:
    """Wait for a step of the newest operation; its id."""
    wait_until(lambda: eyes.one("SELECT changed FROM pgqueue.bulk ORDER BY id DESC LIMIT 1"))
    return int(eyes.one("SELECT max(id) FROM pgqueue.bulk"))


@pytest.mark.second
@pytest.mark.promise("F87")
def test_a_command_that_is_killed_is_gone_on_with_where_it_was(dsn: str, eyes: Eyes) -> None:
    """kill -9; another command waits for the operation, and takes it when the lease of the dead one is over."""
    put(eyes, 2_000)
    with running(dsn, "retry", "--task", "bulk.task", "--pace", "500/s", "--yes") as process:
        id = goes_on(eyes)
        process.kill()
        process.wait()
    assert pgqueue.get_bulk(eyes.conn, id).state == "running"
    with running(dsn, "show", str(id), "--wait") as other:
        eyes.do("UPDATE pgqueue.bulk SET leased_until = pgqueue.now()")
        assert other.wait(60) == 0
    done = pgqueue.get_bulk(eyes.conn, id)
    assert done.counts == {"retried": 2_000} and eyes.states() == {"available": 2_000}


@pytest.mark.second
@pytest.mark.promise("F89")
def test_an_interrupted_command_says_what_becomes_of_the_operation(dsn: str, eyes: Eyes) -> None:
    put(eyes, 2_000)
    with running(dsn, "retry", "--task", "bulk.task", "--pace", "100/s", "--yes") as process:
        id = goes_on(eyes)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130 and f"pgqueue bulk stop {id}" in said and "Traceback" not in said
    assert pgqueue.get_bulk(eyes.conn, id).state == "running"


@pytest.mark.promise("F89")
def test_an_operators_role_has_the_rights(dsn: str, eyes: Eyes, role: Role) -> None:
    put(eyes, 3)
    mine = role("operate")
    done = command("bulk", "retry", "--task", "bulk.task", "--yes", dsn=mine)
    assert (done.returncode, eyes.states()) == (0, {"available": 3}), done.stderr
    assert command("bulk", "stop", "1", dsn=role("read")).returncode == 3
