"""No password of a DSN is seen: not in the process list, not in a message, however the DSN is malformed."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest
from commands import pgqueue, working

import pgqueue as library
from pgqueue.cli import main
from pgqueue.config import configure
from pgqueue.errors import InvalidOption, NotConfigured
from pgqueue.relay.relay import Relay
from pgqueue.worker.worker import Worker

SECRET = "hunter2"

MALFORMED = {
    "a bracket": f"postgresql://app:{SECRET}@[::1/db",
    "a percent sign": f"postgresql://app:{SECRET}%zz@h/db",
    "a percent sign before": f"postgresql://app:%{SECRET}@h/db",
    "an @": f"postgresql://app:a@{SECRET}@h/db",
    "a slash": f"postgresql://app:{SECRET}/x@h/db",
    "a space": f"postgresql://app:{SECRET} x@h/db",
    "a word without its name": f"host=h {SECRET} password=x",
    "a space in a value": f"host=h password=x {SECRET}",
    "quotes in it": f'host=h "{SECRET} x"',
    "an open quote": f"host=h password='{SECRET}",
    "no scheme": f"app:{SECRET}@h/db",
    "another driver and a bracket": f"postgresql+asyncpg://app:{SECRET}@[::1/db?ssl=x",
    "another driver and a port": f"postgresql+asyncpg://app@h/db?host=a:{SECRET}",
    "a word for a port": f"postgresql://app:x@h:{SECRET}/db",
    "a surrogate": f"postgresql://app:{SECRET}\udcff@h/db",
}


def aconnect() -> object:
    async def connect() -> object:
        return await library.aconnect()

    return asyncio.run(connect())


def work(dsn: str) -> Callable[[], object]:
    async def begin() -> None:
        await Worker(dsn=dsn, tasks=[]).start()

    return lambda: asyncio.run(begin())


def relay(dsn: str) -> Callable[[], object]:
    async def once() -> None:
        await Relay(dsn, dsn).once()

    return lambda: asyncio.run(once())


@pytest.mark.promise("F66")
@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_dsn_is_quoted_in_no_traceback(name: str) -> None:
    """The library's own functions: their errors name what is wrong, and not what stands there."""
    dsn = MALFORMED[name]
    calls: dict[str, Callable[[], object]] = {
        "configure": lambda: configure(dsn=dsn),
        "connect": library.connect,
        "aconnect": aconnect,
        "migrate": lambda: library.migrate(dsn),
        "result": lambda: library.result(1, timeout=1),
        "a worker": work(dsn),
        "a relay": relay(dsn),
    }
    for what, call in calls.items():
        try:
            call()
        except Exception as error:
            said = "".join(traceback.format_exception(error))
            assert SECRET not in said, what
            assert isinstance(error, InvalidOption | NotConfigured), (what, said)  # `configure` has refused it, perhaps
        else:
            assert what == "configure"  # it does not ask libpq


COMMANDS = (
    "status", "jobs", "health", "migrate", "migrate --check", "work json", "enqueue x", "workers", "locks", "limits",
    "schedules", "pause q", "prune", "config", "history", "errors",
)  # fmt: skip


@pytest.mark.promise("F66")
@pytest.mark.parametrize("name", ["an @", "a percent sign", "a word without its name", "no scheme"])
def test_a_malformed_dsn_is_quoted_by_no_command(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from click.testing import CliRunner

    monkeypatch.setenv("PGQUEUE_DSN", MALFORMED[name])
    for command in map(str.split, COMMANDS):
        if command[0] in main.commands:
            ran = CliRunner().invoke(main, command)
            assert SECRET not in ran.output, command
            assert ran.exit_code == 2, (command, ran.output, ran.exception)


def titled(dsn: str) -> str:
    return dsn.replace("postgres@", f"postgres:{SECRET}@")


@pytest.mark.promise("F66")
def test_a_password_on_the_command_line_is_not_in_the_process_list(dsn: str, tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text("import pgqueue\n\n@pgqueue.task\ndef buys() -> None: ...\n")
    with working("shop", "--dsn", titled(dsn), dsn=None, cwd=tmp_path) as worker:
        worker.says("ready")
        command = Path(f"/proc/{worker.process.pid}/cmdline").read_bytes().decode()
        assert SECRET not in command
        assert "pgqueue work shop --dsn postgresql://postgres:***@" in command


def test_a_dsn_with_a_password_that_is_written_as_a_url_wants_it_still_works(dsn: str) -> None:
    assert titled(dsn) != dsn
    with psycopg.connect(titled(dsn)):
        pass
    assert pgqueue("status", "--dsn", titled(dsn)).returncode == 0
