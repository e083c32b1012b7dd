"""One worker process in its supervisor: starts it, sends and reads messages, and notices its end.

- It is started as a new program, not forked: it has the newest code, and no thread, lock or connection of ours.
- It has a session of its own: Ctrl-C at a terminal reaches only the supervisor.
- It is started in the directory with the name that our own had. If that name is a link to another release by now, it
  starts there.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from signal import SIGKILL, Signals

from pgqueue.supervisor.fleet import Child
from pgqueue.supervisor.pipe import Message, Pipe

log = logging.getLogger("pgqueue")


class Process:
    """The process of `child`."""

    def __init__(self, child: Child, popen: subprocess.Popen[bytes], pipe: Pipe) -> None:
        self.child = child
        self.pid = popen.pid
        self.pipe = pipe
        self.workers: set[int] = set()
        """The worker ids that the process has had in the database."""
        self.vitals: Message = {}
        self.place = 0
        self.failure = ""
        self.ended = asyncio.Event()
        self._popen = popen

    def __str__(self) -> str:
        worker = f", worker {max(self.workers)}" if self.workers else ""
        return f"process {self.child.number} (pid {self.pid}{worker})"

    @property
    def code(self) -> int | None:
        """Its exit code; None while it lives. If a signal has killed it, minus the signal's number."""
        return self._popen.poll()

    def how(self, when: str = "") -> str:
        """A text for people: how the process has ended."""
        code = self.code
        if code is None:
            return "lives"
        ended = f"was killed by {_signal(-code)}" if code < 0 else f"ended with exit code {code}"
        return f"{ended}{when}: {self.failure}" if self.failure else f"{ended}{when}"

    def kill(self) -> None:
        self._popen.send_signal(SIGKILL)

    async def listen(self, said: Callable[[Process, Message], None]) -> None:
        """Pass its messages to `said`, until it is gone."""
        async for message in self.pipe.heard():
            said(self, message)


class ProcessStarter:
    """Starts processes with these arguments."""

    def __init__(self, arguments: Sequence[str]) -> None:
        # -P: as in the console script, a file of the working directory hides no module of Python's, and not pgqueue.
        self._command = [sys.executable, "-P", "-m", "pgqueue", *arguments]
        self._directory = _here()

    async def start(self, child: Child) -> Process:
        """Start a process, which takes a few milliseconds."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs:
            popen = self._popen(theirs.fileno())
        return Process(child, popen, await Pipe.open(ours))

    def _popen(self, fd: int) -> subprocess.Popen[bytes]:
        command = [*self._command, "--supervised", str(fd)]
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, cwd=self._directory, pass_fds=[fd], start_new_session=True
        )


def _here() -> Path:
    """The working directory, with the name it had when we were started."""
    named = os.environ.get("PWD", "")
    try:
        return Path(named) if named and os.path.samefile(named, ".") else Path.cwd()
    except OSError:
        return Path.cwd()


def _signal(number: int) -> str:
    try:
        return Signals(number).name
    except ValueError:
        return f"signal {number}"
