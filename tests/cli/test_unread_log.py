"""A log pipe that nothing reads: it stops what writes to it, and keeps no process from its end."""

from __future__ import annotations

import fcntl
import os
import signal
import struct
import subprocess
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest
from commands import COMMAND, pgqueue, working
from workers import Eyes, wait_until

APP = """
import asyncio, logging, os, pathlib, time
import pgqueue
from pgqueue.cli import process_end, worker_process

worker_process.STANDS_SECONDS, process_end.TURN_SECONDS = 1.0, 0.5

if os.environ.get("DEADLINE"):
    worker_process.LAST_SECONDS, worker_process.STANDS_SECONDS = 1.0, 60.0

@pgqueue.task(name="talks", timeout=600)
async def talks() -> None:
    pathlib.Path("begun").touch()
    while True:
        logging.getLogger("app").warning("x" * 4000)

@pgqueue.task(name="blocks", timeout=600)
async def blocks() -> None:
    pathlib.Path("begun").touch()
    while True:
        try:
            time.sleep(600)
        except BaseException:
            continue

@pgqueue.task(name="turns", timeout=600)
async def turns() -> None:
    pathlib.Path("begun").touch()
    while True:
        try:
            await asyncio.sleep(0.01)
        except BaseException:
            continue
"""
FULL = 60_000
"""Bytes in a pipe of 64 KiB in which no other line has room."""
PATIENCE = 30.0


@contextmanager
def unread(*options: str, dsn: str, cwd: Path, **environ: str) -> Iterator[subprocess.Popen[bytes]]:
    """A worker whose loop stands in the write of a log line."""
    (cwd / "shop.py").write_text(APP)
    pgqueue("enqueue", "talks", dsn=dsn)
    command = [COMMAND, "work", "shop", "--dsn", dsn, *options]
    with subprocess.Popen(command, cwd=cwd, stderr=subprocess.PIPE, env={**os.environ, **environ}) as process:
        try:
            wait_until((cwd / "begun").exists)
            wait_until(lambda: in_pipe(process.stderr) > FULL)
            yield process
        finally:
            process.kill()


@pytest.mark.second
@pytest.mark.promise("F233")
@pytest.mark.parametrize(("stops", "code", "bound"), [(1, 5, ""), (1, 5, "deadline"), (2, 130, "")])
def test_a_stop_ends_a_worker_whose_log_is_not_read(
    stops: int, code: int, bound: str, dsn: str, tmp_path: Path, eyes: Eyes
) -> None:
    with unread("--grace", "0", "--lease", "2s", dsn=dsn, cwd=tmp_path, DEADLINE=bound) as process:
        for _ in range(stops):
            process.send_signal(signal.SIGTERM)
            wait_until(lambda: not signal_is_due(process.pid))
        assert process.wait(15 if stops == 1 else PATIENCE) == code, "not the deadline, which is 19.5 s"
    assert eyes.states() == {"running": 1}  # until its lease is over


@pytest.mark.second
@pytest.mark.promise("F233")
@pytest.mark.parametrize(("task", "state"), [("blocks", "running"), ("turns", "available")])
def test_a_loop_that_a_handler_blocks_has_less_time_than_one_that_turns(
    task: str, state: str, dsn: str, tmp_path: Path, eyes: Eyes
) -> None:
    """The loop turns on while a stop takes longer than that: all is done in order."""
    (tmp_path / "shop.py").write_text(APP)
    with working("shop", "--grace", "0", dsn=dsn, cwd=tmp_path) as one:
        pgqueue("enqueue", task, dsn=dsn)
        wait_until((tmp_path / "begun").exists)
        one.signal(signal.SIGTERM)
        assert one.process.wait(15) == 5, "not the deadline, which is 19.5 s"
    assert eyes.states() == {state: 1}


@pytest.mark.second
@pytest.mark.promise("F233")
def test_the_watchdog_ends_a_worker_whose_log_is_not_read(dsn: str, tmp_path: Path) -> None:
    with unread("--stuck", "1s", dsn=dsn, cwd=tmp_path) as process:
        assert process.wait(PATIENCE) == 6


def in_pipe(pipe: IO[bytes] | None) -> int:
    """How many bytes wait in it."""
    assert pipe is not None
    return struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)))[0]  # type: ignore[no-any-return]


def signal_is_due(pid: int) -> bool:
    """Whether SIGTERM was sent and not yet taken."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False
    masks = dict(line.split(":\t") for line in status.splitlines() if line.startswith("ShdPnd"))
    return bool(int(masks.get("ShdPnd", "0"), 16) >> (signal.SIGTERM - 1) & 1)
