"""How much memory a process has, as the system counts it."""

from __future__ import annotations

import os
import subprocess
import sys

import psutil
import pytest

from pgqueue.worker.liveness import memory

WHOSE = {"unnamed": lambda: None, "own": os.getpid, "parent": os.getppid}


@pytest.mark.parametrize("whose", WHOSE)
def test_it_is_what_the_system_says(whose: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The two ways to ask agree: a process may grow between them."""
    pid = WHOSE[whose]()
    expected = psutil.Process(pid).memory_info().rss
    assert memory.rss(pid) == pytest.approx(expected, rel=0.1)
    monkeypatch.setattr(memory, "_PROC", False)
    assert memory.rss(pid) == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("proc", [True, False])
def test_a_process_that_is_gone_has_none(proc: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_PROC", proc and memory._PROC)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert memory.rss(gone.pid) == 0
