"""A process of a peer. A client answers lines of JSON; a worker works until it is told to end, and is watched.

Each is a session of its own, so that ending it also ends what it has forked.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

END_SECONDS = 5.0
LAST_LINES = 12


class Died(Exception):
    """A process of a peer has ended, or did not answer; with the end of what it wrote."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise Died where the block takes longer, whatever it waits for. For the main thread only."""

    def over(number: int, frame: FrameType | None) -> None:
        raise Died(f"it was given up after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def ending_at_sigterm() -> Iterator[None]:
    """Leave the block by SystemExit at SIGTERM, so that what it has started ends with it."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class Child:
    """One process, and all that it forks. What it writes to standard error goes to a file."""

    def __init__(self, command: list[str], environment: Mapping[str, str], log: Path, *, folder: Path) -> None:
        self._name = " ".join(command[-2:])
        self._log = log
        pipe = subprocess.PIPE
        with log.open("wb") as file:
            self._child = subprocess.Popen(
                command,
                env={**os.environ, **environment},
                cwd=folder,
                stdin=pipe,
                stdout=pipe if command[-1] == "client" else file,
                stderr=file,
                text=True,
                start_new_session=True,
            )
        self._observed = psutil.Process(self._child.pid)

    def ask(self, timeout: float = 120.0, **message: Any) -> dict[str, Any]:
        """Send a line and wait for its answer."""
        self.say(**message)
        return self.hear(timeout)

    def say(self, **message: Any) -> None:
        """Send a line."""
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(json.dumps(message) + "\n")
            self._child.stdin.flush()
        except BrokenPipeError:
            raise self._died("ended") from None

    def hear(self, timeout: float = 120.0) -> dict[str, Any]:
        """Wait for the next line; Died when there is none."""
        assert self._child.stdout is not None
        ready, _, _ = select.select([self._child.stdout], [], [], timeout)
        line = self._child.stdout.readline() if ready else ""
        if not line:
            raise self._died("ended" if ready else f"did not answer within {timeout:g} s")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def wait(self, timeout: float = 120.0) -> None:
        """Wait until it has ended by itself, and well."""
        try:
            status = self._child.wait(timeout)
        except subprocess.TimeoutExpired:
            raise self._died(f"did not end within {timeout:g} s") from None
        if status:
            raise self._died(f"ended with {status}")

    def check(self) -> None:
        """Raise Died if it has ended."""
        if self._child.poll() is not None:
            raise self._died(f"ended with {self._child.returncode}")

    def ended(self) -> bool:
        """Whether it has ended by itself."""
        return self._child.poll() is not None

    def cpu(self) -> float:
        """CPU seconds of it and of all it has forked (10 ms steps)."""
        try:
            return family_cpu(self._observed)
        except psutil.NoSuchProcess:
            raise self._died("ended") from None

    def rss(self) -> float:
        """Resident memory in MiB, of it and of all it has forked; shared pages count for each."""
        return sum(_rss(process) for process in self._family()) / (1 << 20)

    def end(self, sign: signal.Signals = signal.SIGTERM) -> None:
        """End it, and what it has forked; with SIGKILL after a few seconds."""
        assert self._child.stdin is not None
        with suppress(BrokenPipeError):  # it ended before it had read the last line
            self._child.stdin.close()
        if self._child.poll() is None:
            self._child.send_signal(sign)
            with suppress(subprocess.TimeoutExpired):  # it is killed below
                self._child.wait(END_SECONDS)
        with suppress(ProcessLookupError):  # there is nothing left of it
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait()
        if self._child.stdout is not None:
            self._child.stdout.close()

    def kill(self) -> None:
        """End it, and what it has forked, by SIGKILL and without a word."""
        os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait()

    def _family(self) -> list[psutil.Process]:
        try:
            return [self._observed, *self._observed.children(recursive=True)]
        except psutil.NoSuchProcess:
            raise self._died("ended") from None

    def _died(self, what: str) -> Died:
        lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-LAST_LINES:]
        return Died(f"{self._name} {what}" + ("".join(f"\n    {line[:200]}" for line in lines)))


def family_cpu(process: psutil.Process) -> float:
    """CPU seconds of it and of all it has forked (10 ms steps)."""
    return sum(map(_cpu, [process, *process.children(recursive=True)]))


def _cpu(process: psutil.Process) -> float:
    with suppress(psutil.NoSuchProcess):  # it ended just now
        times = process.cpu_times()
        return float(times.user + times.system)
    return 0.0


def _rss(process: psutil.Process) -> float:
    with suppress(psutil.NoSuchProcess):  # it ended just now
        return float(process.memory_info().rss)
    return 0.0
