"""The tests' own supervisor cleans up after itself, and nothing else: a pid may be somebody else's by then."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import psutil
import pytest
from supervised import CLOCKS, Supervised, gone, started, theirs
from workers import wait_until

NOBODY = 2**22 + 1
"""A pid that no process has."""


class Ended:
    """A supervisor that has ended, and what it had said."""

    def __init__(self, output: str) -> None:
        self.output, self.process = output, self
        self.pid = NOBODY

    def poll(self) -> int:
        return 0

    def kill(self) -> None:
        pass

    wait = close = kill


@pytest.fixture
def stranger() -> Iterator[psutil.Process]:
    """A process that looks as if it were one of pgqueue's."""
    with subprocess.Popen([sys.executable, "-c", "input()", "pgqueue"], stdin=subprocess.PIPE) as popen:
        found = psutil.Process(popen.pid)
        wait_until(lambda: "pgqueue" in " ".join(found.cmdline()))
        yield found
        popen.kill()


def line(pid: int, at: float) -> str:
    return f"{datetime.fromtimestamp(at).astimezone().isoformat()} INFO pgqueue[3]: process 7 (pid {pid}): is started"


@pytest.mark.parametrize("how", ["seen", "said"])
@pytest.mark.parametrize(("earlier", "ended"), [(3600.0, False), (0.0, True)])
def test_only_who_was_created_at_that_time_is_ended(
    how: str, earlier: float, ended: bool, stranger: psutil.Process, tmp_path: Path
) -> None:
    """An hour before, somebody else had this pid."""
    at = stranger.create_time() - earlier
    one = Supervised(Ended(line(stranger.pid, at) if how == "said" else ""), tmp_path)  # type: ignore[arg-type]
    if how == "seen":
        one.seen[stranger.pid] = at
    one.close()
    assert gone({stranger.pid})() == ended


def test_who_is_gone_already_is_no_error(stranger: psutil.Process, tmp_path: Path) -> None:
    """Before we look, or after."""
    one = Supervised(Ended(line(NOBODY, 0.0)), tmp_path)  # type: ignore[arg-type]
    one.seen[NOBODY + 1] = 0.0
    one.seen[stranger.pid] = stranger.create_time()
    stranger.kill()
    stranger.wait()
    assert theirs((stranger.pid, stranger.create_time())) is None
    one.close()


def test_what_the_log_says_is_understood(tmp_path: Path) -> None:
    text = f"{line(12, 1e9)}\nworker 3\n{line(13, 2e9)}"
    assert list(started(text)) == [(12, 1e9), (13, 2e9)] and CLOCKS < 10
