"""One worker process, seen from its supervisor: started, told, heard, and seen to end.

Started anew and not forked: so its code is the newest, and no thread, lock or connection of ours is in it. In a session
of its own: Ctrl-C at a terminal reaches the supervisor only, which knows what is to be done. Where it is started is the
directory by its name, as we were started in it: a name that leads to another release now leads there.
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
    """The process that is `child`. `said` is told what it says, before it is gone; `code` is its exit code then."""

    def __init__(self, child: Child, popen: subprocess.Popen[bytes], pipe: Pipe) -> None:
        self.child = child
        self.pid = popen.pid
        self.pipe = pipe
        self.workers: set[int] = set()
        """The ids it has had in the database."""
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
        """How it has ended; None as long as it lives. Minus the number of a signal."""
        return self._popen.poll()

    def how(self, when: str = "") -> str:
        """Its end, for people."""
        code = self.code
        if code is None:
            return "lives"
        ended = f"was killed by {_signal(-code)}" if code < 0 else f"ended with exit code {code}"
        return f"{ended}{when}: {self.failure}" if self.failure else f"{ended}{when}"

    def kill(self) -> None:
        self._popen.send_signal(SIGKILL)

    async def listen(self, said: Callable[[Process, Message], None]) -> None:
        """Pass on what it says, until it is gone."""
        async for message in self.pipe.heard():
            said(self, message)


class ProcessStarter:
    """Starts processes with this command line."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._command = [sys.executable, "-m", "pgqueue", *arguments]
        self._directory = _here()

    async def start(self, child: Child) -> Process:
        """Start a process; a few milliseconds."""
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
    """The working directory, by the name under which we were started in it."""
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
