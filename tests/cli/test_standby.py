"""A standby as the only address: each command that writes says so in one line, and ends with 3."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest
from click.testing import CliRunner
from servers import embedded_server
from standby import catch_up, standby

import pgqueue
from pgqueue import config
from pgqueue.cli import main
from pgqueue.database import migrations

WRITING = [
    "migrate",
    "cancel 1",
    "retry 2",
    "discard 2",
    "reschedule 1 --now",
    "enqueue failover.away {}",
    "pause default",
    "resume default",
    "limits set some 3",
    "prune",
    "quiet",
    "restart",
    "schedules pause nightly",
    "bulk cancel --state available --yes",
]
READING = ["status", "jobs", "queues", "workers", "why 1"]


@pytest.fixture(autouse=True)
def forget_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands run in this process configure it."""
    monkeypatch.setattr(config, "_configured", {})


@pytest.fixture(scope="module")
def only_standby() -> Iterator[str]:
    """The DSN of a standby with a job that waits and one that has failed."""
    own = embedded_server()
    assert own.cluster is not None
    dsn = own.dsn("postgres")
    migrations.migrate(dsn)
    with psycopg.connect(dsn, autocommit=True) as conn:
        pgqueue.enqueue_many(conn, [pgqueue.remote("failover.away").new() for _ in range(2)])
    with standby(own.cluster) as second:
        catch_up(own.cluster, second)
        yield second.dsn()
    own.end()


@pytest.mark.promise("F341")
@pytest.mark.parametrize("command", WRITING)
def test_a_command_that_writes_names_the_standby(command: str, only_standby: str) -> None:
    result = CliRunner().invoke(main, command.split(), env={"PGQUEUE_DSN": only_standby})
    assert "is a standby and cannot be written" in result.stderr, (result.stderr, result.stdout)
    assert (result.exit_code, len(result.stderr.strip().splitlines())) == (3, 1)


@pytest.mark.promise("F341")
@pytest.mark.parametrize("command", READING)
def test_a_command_that_reads_goes_on(command: str, only_standby: str) -> None:
    result = CliRunner().invoke(main, command.split(), env={"PGQUEUE_DSN": only_standby})
    assert result.exit_code == 0, result.stderr
