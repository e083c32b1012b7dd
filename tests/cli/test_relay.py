"""`pgqueue relay` as a process: once, for ever, and what it says of refused rows."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from pathlib import Path

from commands import COMMAND, items, pgqueue
from psycopg.conninfo import make_conninfo
from relays import Sides, app_dsn, relaying, sides
from workers import wait_until

from pgqueue.relay.relay import Relay

__all__ = ["app_dsn", "sides"]


def test_once_delivers_and_says_what(app_dsn: str, dsn: str, sides: Sides) -> None:
    sides.stage("a", "b")
    sides.app.execute("INSERT INTO pgqueue.outbox (task) VALUES ('two words')")
    done = pgqueue("relay", "--from", app_dsn, "--to", dsn, "--once", "--json")
    assert done.returncode == 0, done.stderr
    assert {"delivered": 2, "refused": 1, "worked": True}.items() <= items(done)[0].items()
    listed = pgqueue("relay", "--from", app_dsn, "--list-refused")
    assert "two words" in listed.stdout and "task name 'two words'" in listed.stdout
    [row] = items(pgqueue("relay", "--from", app_dsn, "--list-refused", "--json"))
    assert (row["id"], row["task"]) == (3, "two words")
    sides.app.execute("UPDATE pgqueue.outbox_refused SET task = 't', args = '{\"x\": \"c\"}'")
    assert pgqueue("relay", "--from", app_dsn, "--retry-refused").stdout == "1 row is tried again\n"
    assert pgqueue("relay", "--from", app_dsn, "--once", dsn=dsn).stdout.endswith(": 1 delivered, 0 refused\n")
    assert sides.delivered() == ["a", "b", "c"]
    assert pgqueue("relay", "--from", app_dsn, "--list-refused").stdout == "No row is refused.\n"


async def test_beside_a_working_relay_once_is_refused(app_dsn: str, dsn: str, sides: Sides) -> None:
    async with relaying(Relay(app_dsn, dsn)):
        sides.stage("a")
        await asyncio.to_thread(wait_until, lambda: sides.left() == 0)
        done = await asyncio.to_thread(pgqueue, "relay", "--from", app_dsn, "--to", dsn, "--once")
    assert (done.returncode, done.stdout.endswith("another relay works\n")) == (1, True), done.stderr


def test_a_source_in_trouble_delays_no_other_and_a_signal_ends_it(
    app_dsn: str, dsn: str, sides: Sides, tmp_path: Path
) -> None:
    nowhere = make_conninfo(app_dsn, dbname="nowhere")
    command = [COMMAND, "relay", "--from", nowhere, "--from", app_dsn, "--to", dsn]
    with (tmp_path / "log").open("wb") as log, subprocess.Popen(command, stderr=log) as process:
        sides.stage("a")
        wait_until(lambda: sides.left() == 0)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    assert "nowhere" in (tmp_path / "log").read_text()
    assert sides.delivered() == ["a"]


def test_what_does_not_fit_together_is_refused(app_dsn: str, empty_dsn: str) -> None:
    assert pgqueue("relay", "--from", app_dsn, "--once", "--list-refused").returncode == 2
    assert pgqueue("relay", "--from", app_dsn, "--once").returncode == 2
    missing = pgqueue("relay", "--from", empty_dsn, "--list-refused")
    assert (missing.returncode, "migrate --outbox" in missing.stderr) == (4, True)
    once = pgqueue("relay", "--from", empty_dsn, "--to", app_dsn, "--once")
    assert (once.returncode, "migrate --outbox" in once.stderr) == (4, True)
    assert pgqueue("grants", "r", "--for", "read", "--outbox", "--sql").returncode == 2
