"""A standby as the only address: each command that writes says so in one line, and ends with 3."""

from __future__ import annotations

from collections.abc import Iterator

import click
import psycopg
import pytest
from click.testing import CliRunner, Result
from servers import embedded_server
from standby import catch_up, standby

import pgqueue
from pgqueue import config
from pgqueue.cli import COMMANDS, main
from pgqueue.database import migrations

WRITING = [
    "migrate",
    "migrate --outbox",
    "enqueue failover.away {}",
    "cancel 1",
    "cancel --state available --yes",
    "retry 2",
    "retry --state failed",
    "discard 2",
    "discard --state failed",
    "reschedule 1 --now",
    "bulk cancel --state available --yes",
    "bulk retry --state failed",
    "bulk discard --state failed --yes",
    "bulk reschedule --state available --now --yes",
    "bulk stop 1",
    "bulk show 1 --wait",
    "pause default",
    "resume --task failover.away",
    "locks release some --yes",
    "limits set some 3",
    "limits set some 3/minute",
    "limits set some default",
    "schedules add nightly failover.away --every 1h",
    "schedules pause nightly",
    "schedules resume nightly",
    "schedules run nightly",
    "schedules remove nightly",
    "prune",
    "quiet",
    "restart",
    "scale 2",
    "stack 1",
    "grants some --for work",
    "relay --from {dsn} --retry-refused",
]
READING = [
    *("status", "queues", "tasks", "jobs", "jobs 1", "why 1", "flows", "doctor", "audit", "history", "errors"),
    *("locks", "limits", "schedules", "schedules list", "bulk", "bulk list", "workers", "version"),
    *("migrate --check", "relay --from {dsn} --list-refused"),
]
NO_WORKER = ["health"]
"""It reads, too. No worker of this machine has given a sign of life, so it answers no."""
WAITING = ["work", "relay"]
"""They wait for a primary: test_between_primaries.py."""
ELSEWHERE = ["dev", "demo", "web", "systemd"]
"""They need a server of their own, or none; what the dashboard says of a standby: web/test_pages.py."""


@pytest.fixture(autouse=True)
def forget_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands run in this process configure it."""
    monkeypatch.setattr(config, "_configured", {})


@pytest.fixture(scope="module")
def only_standby() -> Iterator[str]:
    """The DSN of a standby with two jobs that wait. No job has failed, so some commands find nothing to do."""
    own = embedded_server()
    assert own.cluster is not None
    dsn = own.dsn("postgres")
    migrations.migrate(dsn)
    migrations.migrate(dsn, line=migrations.OUTBOX)
    with psycopg.connect(dsn, autocommit=True) as conn:
        pgqueue.enqueue_many(conn, [pgqueue.remote("failover.away").new() for _ in range(2)])
    with standby(own.cluster) as second:
        catch_up(own.cluster, second)
        yield second.dsn()
    own.end()


def commands(group: click.Group, *above: str) -> Iterator[str]:
    """Each command with those in its group, as they are typed."""
    for name, command in group.commands.items():
        yield " ".join([*above, name])
        if isinstance(command, click.Group):
            yield from commands(command, *above, name)


def invoked(command: str, dsn: str) -> Result:
    arguments = [each.format(dsn=dsn) if each == "{dsn}" else each for each in command.split()]
    return CliRunner().invoke(main, arguments, env={"PGQUEUE_DSN": dsn})


def test_each_command_is_tried_or_named() -> None:
    known = [*WRITING, *READING, *NO_WORKER, *WAITING, *ELSEWHERE]
    groups = {name: main.get_command(click.Context(main), name) for name in COMMANDS}
    listed = click.Group(commands={name: command for name, command in groups.items() if command})
    assert [each for each in commands(listed) if not any(f"{one} ".startswith(f"{each} ") for one in known)] == []


@pytest.mark.promise("F341")
@pytest.mark.parametrize("command", WRITING)
def test_a_command_that_writes_names_the_standby(command: str, only_standby: str) -> None:
    """Naive: one that finds nothing to change says that, and asks before it finds out that it may not write."""
    result = invoked(command, only_standby)
    assert "is a standby and cannot be written" in result.stderr, (result.stderr, result.stdout)
    assert (result.exit_code, len(result.stderr.strip().splitlines())) == (3, 1)


@pytest.mark.promise("F341")
@pytest.mark.parametrize("command", [*READING, *NO_WORKER])
def test_a_command_that_reads_goes_on(command: str, only_standby: str) -> None:
    result = invoked(command, only_standby)
    assert result.exit_code == (command in NO_WORKER), result.stderr
    assert "standby" not in result.stderr
