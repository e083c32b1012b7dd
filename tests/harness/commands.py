"""The real command for the tests: `pgqueue …` in a process of its own; a worker is waited for by what it says."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import struct
import subprocess
import termios
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from signal import Signals
from time import monotonic, sleep
from typing import Any, TextIO

import forks
from forks import COMMAND as COMMAND

PATIENCE = 60.0


def pgqueue(
    *arguments: str,
    dsn: str | None = None,
    stdin: str | None = None,
    cwd: Path | None = None,
    where: Sequence[str] = (),
    **environ: str,
) -> subprocess.CompletedProcess[str]:
    """Run `pgqueue …` to its end; `dsn` goes to PGQUEUE_DSN, `where` comes before it (hosts.py)."""
    if where:
        command, env = [*where, COMMAND, *arguments], _environ(dsn, environ)
        return subprocess.run(
            command, input=stdin, capture_output=True, text=True, cwd=cwd, env=env, timeout=120, start_new_session=True
        )
    pipes = {} if stdin is None else {"stdin": subprocess.PIPE}
    with forks.start(
        COMMAND,
        *arguments,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=cwd,
        env=_environ(dsn, environ),
        **pipes,
    ) as process:
        try:
            stdout, stderr = process.communicate(stdin, timeout=120)
        except BaseException:
            process.kill()
            raise
        return subprocess.CompletedProcess([COMMAND, *arguments], process.wait(), stdout, stderr)


def on_terminal(*arguments: str, dsn: str | None = None, columns: int = 80) -> subprocess.CompletedProcess[str]:
    """Run `pgqueue …` to its end with a terminal of this width as its standard output."""
    ours, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    command, env = [COMMAND, *arguments], _environ(dsn, {})
    with subprocess.Popen(command, stdout=terminal, stderr=subprocess.PIPE, text=True, env=env) as process:
        os.close(terminal)
        written = b"".join(iter(partial(_read, ours), b""))
        os.close(ours)
        assert process.stderr is not None
        stderr = process.stderr.read()
    stdout = written.decode().replace("\r\n", "\n")
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 1 << 16)
    except OSError:  # the other side is closed
        return b""


def items(done: subprocess.CompletedProcess[str]) -> list[Any]:
    """What a command has printed with --json; it prints one document."""
    found: list[Any] = json.loads(done.stdout)["items"]
    return found


class Worker:
    """A running `pgqueue work`; reads what it says on stderr."""

    def __init__(self, process: subprocess.Popen[str], stderr: TextIO) -> None:
        self.process = process
        self._stderr = stderr
        self.lines: list[str] = []
        self._news = threading.Condition()
        self._ended = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def says(self, text: str) -> str:
        """Wait for a line with this text and return it."""
        with self._news:
            found = self._news.wait_for(lambda: self._ended or self._find(text), PATIENCE)
            line = self._find(text)
        assert found and line, f"the worker never said {text!r}:\n{self.output}"
        return line

    def signal(self, number: Signals) -> None:
        self.process.send_signal(number)

    def insist(self, number: Signals) -> None:
        """Signal until it has ended: one may come before the process is ready to hear it as another."""
        deadline = monotonic() + PATIENCE
        while self.process.poll() is None and monotonic() < deadline:
            self.process.send_signal(number)
            sleep(0.05)

    def ends(self) -> int:
        """Wait for its end and return the exit code."""
        return self.process.wait(PATIENCE)

    def close(self) -> None:
        """Kill it if it still runs, and read the rest of what it said."""
        self.process.kill()
        self.process.wait()
        self._reader.join()

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    def _find(self, text: str) -> str | None:
        return next((line for line in self.lines if text in line), None)

    def _read(self) -> None:
        with self._stderr as stderr, suppress(OSError):  # of a terminal whose other side is closed
            for line in stderr:
                with self._news:
                    self.lines.append(line.rstrip("\n"))
                    self._news.notify_all()
        with self._news:
            self._ended = True
            self._news.notify_all()


@contextmanager
def working(
    *arguments: str, dsn: str | None, cwd: Path, where: Sequence[str] = (), terminal: bool = False, **environ: str
) -> Iterator[Worker]:
    """A `pgqueue work …` that is killed at the end if it still runs; `where` comes before it (hosts.py). Its stderr may
    be a terminal."""
    command, env = [*where, COMMAND, "work", *arguments], _environ(dsn, environ)

    def start(stderr: int) -> subprocess.Popen[str]:
        null, apart = subprocess.DEVNULL, bool(where)
        return subprocess.Popen(
            command, stdout=null, stderr=stderr, cwd=cwd, env=env, text=True, start_new_session=apart
        )

    with heard(start, terminal=terminal) as worker:
        yield worker


@contextmanager
def heard(start: Callable[[int], subprocess.Popen[str]], *, terminal: bool = False) -> Iterator[Worker]:
    """The worker that is started with this file as its stderr: a pipe, or a terminal."""
    ours, theirs = pty.openpty() if terminal else os.pipe()
    process = start(theirs)
    os.close(theirs)
    worker = Worker(process, os.fdopen(ours, encoding="utf-8"))
    try:
        yield worker
    finally:
        worker.close()


def _environ(dsn: str | None, more: dict[str, str]) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PGQUEUE_", "COLUMNS"))}
    patient = {"PGCONNECT_TIMEOUT": str(int(PATIENCE))}  # the command's own 10 s are too short for a busy server
    return kept | patient | ({} if dsn is None else {"PGQUEUE_DSN": dsn}) | more
