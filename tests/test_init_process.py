"""`pgqueue` as the first process of a container: a stop that comes while it starts ends it, and it leaves no zombies.

The small tests run a few lines of Python between the fork and its end; the large ones run `work`, `relay` and `web`.
"""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from signal import (
    SIGCONT,
    SIGHUP,
    SIGINT,
    SIGQUIT,
    SIGTERM,
    SIGTSTP,
    SIGTTIN,
    SIGTTOU,
    SIGUSR1,
    SIGUSR2,
    SIGWINCH,
)
from time import sleep
from typing import Any

import psutil
import pytest
from commands import COMMAND, PATIENCE, working
from hosts import namespaces
from relays import app_dsn
from workers import Eyes, wait_until

from pgqueue import init_process

__all__ = ["app_dsn"]

HEAD = "import os, signal, subprocess, sys, time; from pgqueue import init_process; "
FORKED = f"{HEAD}init_process.fork_if_first(); "
HEARS = (
    FORKED + "signal.pthread_sigmask(signal.SIG_BLOCK, {0}); print('hears', flush=True)\n"
    "while True: print(int(signal.sigwait({0})), flush=True)"  # a handler may come just before a `pause`, unseen
)
ON_TERMINAL = """
import fcntl, os, sys, termios
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execvp(sys.argv[1], sys.argv[1:])
"""
AS_GROUP = """
import os, signal, sys
os.setpgid(0, 0)
if os.isatty(0):
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTTOU])
    os.tcsetpgrp(0, os.getpgrp())
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTTOU])
os.execvp(sys.argv[1], sys.argv[1:])
"""
"""As a shell with job control does it, before it becomes another program: `bash -i -c 'exec pgqueue …'`."""

LEADS = ["its session", "its group", "nothing"]
"""What process 1 may lead."""


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Python as the first process of a container, to its end."""
    command = [*namespaces(), sys.executable, *arguments, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, start_new_session=True)


def keeps(process: psutil.Process, *masks: str, number: int = SIGTERM) -> bool:
    """Whether this signal is in one of these masks of the kernel: blocked, so that it is kept, or has a handler."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    values = dict(line.split(":\t") for line in status.splitlines() if line.startswith("Sig"))
    return any(int(values[mask], 16) >> (number - 1) & 1 for mask in masks)


def is_first(process: psutil.Process) -> bool:
    """Whether process 1 keeps signals. It is asked for SIGHUP: `unshare` blocks SIGTERM itself for a moment, in the
    process that then becomes the command, and one that comes there is lost."""
    return keeps(process, "SigBlk", "SigCgt", number=SIGHUP)


class First:
    """Process 1 of a container, seen from outside. It is killed after a while, so that no test waits for ever."""

    def __init__(self, command: Sequence[str], before: Sequence[str] = (), **options: Any) -> None:
        alone = not before  # else that makes the session
        self.popen = subprocess.Popen([*before, *namespaces(), *command], text=True, start_new_session=alone, **options)
        self._end = threading.Timer(PATIENCE, self.popen.kill)
        self._end.start()
        self.process = wait_until(psutil.Process(self.popen.pid).children)[0]

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def line(self) -> str:
        assert self.popen.stdout is not None
        return str(self.popen.stdout.readline())

    def ends(self) -> int:
        return self.popen.wait(PATIENCE)

    def close(self) -> None:
        self._end.cancel()
        self.popen.kill()  # with it goes all that it has started
        self.popen.wait()
        for stream in (self.popen.stdout, self.popen.stderr):
            if stream is not None:
                stream.close()


@contextmanager
def first(*command: str, before: Sequence[str] = (), **options: Any) -> Iterator[First]:
    """Run this as process 1; what it prints can be read. `before` comes before the way into the container."""
    one = First(command, before, stdout=subprocess.PIPE, **options)
    try:
        yield one
    finally:
        one.close()


@contextmanager
def on_terminal(leads: str, code: str) -> Iterator[tuple[First, int]]:
    """Python as process 1, and the terminal that it is on. It leads the session, as with `docker run -it`, or is one
    of the foreground of another's, and may lead that group."""
    ours, terminal = pty.openpty()
    in_session, as_group = [sys.executable, "-c", ON_TERMINAL], [sys.executable, "-c", AS_GROUP]
    ways = {"its session": ([], in_session), "its group": (in_session, as_group), "nothing": (in_session, [])}
    before, within = ways[leads]
    try:
        with first(*within, sys.executable, "-c", code, before=before, stdin=terminal) as one:
            yield one, ours
    finally:
        os.close(ours)
        os.close(terminal)


# The fork ------------------------------------------------------------------------------------------------------------


@pytest.mark.promise("F232")
@pytest.mark.parametrize(
    ("code", "expected"),
    [("sys.exit(7)", 7), ("sys.exit()", 0), ("os.kill(os.getpid(), 9)", 137), ("os.kill(os.getpid(), 15)", 143)],
)
def test_the_container_ends_with_the_code_of_the_command(code: str, expected: int) -> None:
    done = run(FORKED + code)
    assert (done.returncode, done.stderr) == (expected, "")


def test_only_process_1_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("a process that is not the first has forked"))
    init_process.fork_if_first()


@pytest.mark.promise("F230")
@pytest.mark.parametrize("of", ["parent", "child"])
def test_a_signal_at_the_moment_of_the_fork_ends_the_command(of: str) -> None:
    """It is sent to process 1 before it has a handler, and to its child before that has gone on."""
    at_the_fork = (
        "fork = os.fork\n"
        "def hit():\n"
        "    if '{of}' == 'parent': os.kill(1, 15)\n"
        "    child = fork()\n"
        "    if '{of}' == 'child' and not child: os.kill(os.getpid(), 15)\n"
        "    return child\n"
        "os.fork = hit\n"
    )
    code = f"{HEAD}\n{at_the_fork.format(of=of)}init_process.fork_if_first()\ntime.sleep(60)"
    assert run(code).returncode == 128 + SIGTERM


@pytest.mark.promise("F230")
def test_without_the_fork_the_kernel_drops_the_signal() -> None:
    assert run(f"{HEAD}os.kill(1, 15); sys.exit(7)").returncode == 7


@pytest.mark.promise("F230")
def test_another_thread_takes_no_signal_from_it_and_is_there_in_the_command(tmp_path: Path) -> None:
    """A `sitecustomize` starts it. The fork has not got it, so the command begins anew, and starts its own."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, threading, time; threading.Thread(target=time.sleep, args=[60], daemon=True, name='its').start()"
    )
    threads = "import threading; print(os.getpid(), *[t.name for t in threading.enumerate()], flush=True); "
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    code = f"{FORKED}{threads}time.sleep(60)"
    with first(sys.executable, "-c", code, env=env) as one:
        pid, *names = one.line().split()
        assert int(pid) > 1 and names == ["MainThread", "its"]
        for _ in range(20):
            one.signal(SIGWINCH)
        one.signal(SIGTERM)
        assert one.ends() == 128 + SIGTERM


# Signals -------------------------------------------------------------------------------------------------------------


@pytest.mark.promise("F232")
def test_every_signal_comes_once_and_in_its_order() -> None:
    numbers = [SIGINT, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGWINCH, SIGTSTP, SIGCONT, SIGTTIN, SIGTTOU, SIGTERM]
    numbers += [signal.SIGALRM, signal.SIGRTMIN + 1, signal.SIGRTMAX, SIGTERM]  # type: ignore[list-item]
    code = HEARS.format([int(number) for number in numbers])
    with first(sys.executable, "-c", code) as one:
        assert one.line() == "hears\n"
        wait_until(lambda: keeps(one.process, "SigCgt"))
        for number in numbers:
            one.signal(number)
            assert one.line() == f"{int(number)}\n"
        assert " ".join(one.process.cmdline()).strip() == "pgqueue: init"


@pytest.mark.promise("F232", "F471")
@pytest.mark.parametrize("leads", LEADS)
def test_ctrl_c_at_a_terminal_comes_once(leads: str) -> None:
    with on_terminal(leads, HEARS.format([2, 10])) as (one, terminal):
        assert one.line() == "hears\n"
        wait_until(lambda: keeps(one.process, "SigCgt"))
        for _ in range(3):
            os.write(terminal, b"\x03")
            assert one.line() == "2\n"
            one.signal(SIGUSR1)  # what process 1 would pass on comes before this
            assert one.line() == "10\n"


@pytest.mark.promise("F232", "F471")
@pytest.mark.parametrize("leads", LEADS)
def test_the_command_reads_from_the_terminal(leads: str) -> None:
    with on_terminal(leads, f"{FORKED}print('asks', flush=True); print('has', sys.stdin.readline())") as (
        one,
        terminal,
    ):
        assert one.line() == "asks\n"
        os.write(terminal, b"yes\n")
        assert (one.line(), one.ends()) == ("has yes\n", 0)


@pytest.mark.promise("F232", "F471")
@pytest.mark.parametrize("leads", [True, False])
def test_a_signal_to_the_group_of_process_1_comes_once(leads: bool) -> None:
    """As `timeout` sends it: to what it has started, and to its whole group. If process 1 leads that, the naive one
    cannot leave it: then the command is in it, too, and hears the signal twice."""
    as_group = [sys.executable, "-c", AS_GROUP] if leads else []
    with first(*as_group, sys.executable, "-c", HEARS.format([15, 10])) as one:
        assert one.line() == "hears\n"
        wait_until(lambda: keeps(one.process, "SigCgt"))
        for _ in range(3):
            os.killpg(one.process.pid if leads else one.popen.pid, SIGTERM)
            assert one.line() == "15\n"
            one.signal(SIGUSR1)
            assert one.line() == "10\n"


@pytest.mark.promise("F471")
def test_a_command_in_the_background_leaves_the_terminal_to_the_foreground() -> None:
    """Naive: it takes the terminal from what is typed there for others."""
    ours, terminal = pty.openpty()
    in_background = f"import os; os.setpgid(0, 0); os.execv({sys.executable!r}, [{sys.executable!r}, '-c', {SAYS!r}])"
    try:
        before = [sys.executable, "-c", ON_TERMINAL]
        with first(sys.executable, "-c", in_background, before=before, stdin=terminal) as one:
            assert one.line() == "1 2 0\n"  # the foreground is not of this container
            assert one.ends() == 0
    finally:
        os.close(ours)
        os.close(terminal)


SAYS = f"{HEAD}print(os.getpgrp(), end=' '); sys.stdout.flush(); init_process.fork_if_first(); "
SAYS += "print(os.getpgrp(), os.tcgetpgrp(0), flush=True)"

IN_A_GROUP = """
import os, signal, subprocess, sys
heard = []
signal.signal(signal.SIGHUP, lambda *_: heard.append("SIGHUP"))
sibling = subprocess.Popen(["sleep", "600"])
try:
    os.kill(sibling.pid, signal.SIGSTOP)
    os.waitpid(sibling.pid, os.WUNTRACED)
    code = subprocess.run(sys.argv[1:]).returncode
    print(code, heard, sibling.poll())
finally:
    sibling.kill()
"""


@pytest.mark.promise("F232")
def test_the_end_of_the_command_hangs_up_no_other_process_of_the_group() -> None:
    """One of them is stopped. The naive process 1 leaves its group alone: the kernel takes that for orphaned then."""
    inner = [*namespaces(), sys.executable, "-c", f"{FORKED}sys.exit(7)"]
    command = [sys.executable, "-c", IN_A_GROUP, *inner]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, start_new_session=True)
    assert (done.stdout, done.stderr) == ("7 [] None\n", "")


# Commands ------------------------------------------------------------------------------------------------------------

TASKS = """
import asyncio, subprocess
import pgqueue

@pgqueue.task(name="leaves")
def leaves() -> int:
    return subprocess.run(["sh", "-c", "sleep 0.3 & exit 3"]).returncode

@pgqueue.task(name="long")
async def long() -> None:
    await asyncio.sleep(600)
"""
STEP, LAST = 0.05, 2.0
AT_ONCE = 4
ENDS = {128 + SIGTERM, 0}
"""By the signal, before the command has handlers; in order."""


@pytest.fixture
def app(tmp_path: Path) -> Path:
    (tmp_path / "tasks.py").write_text(TASKS)
    return tmp_path


def stopped(after: float | None, command: Sequence[str], app: Path) -> int:
    """The exit code of a command that gets SIGTERM so long after its process 1 keeps signals; None: when the command
    has a handler of its own."""
    with first(COMMAND, *command, cwd=app, stderr=subprocess.DEVNULL) as one:
        wait_until(lambda: is_first(one.process))
        if after is None:
            [its] = wait_until(one.process.children)
            wait_until(lambda: keeps(its, "SigCgt"))
        sleep(after or 0)
        one.signal(SIGTERM)
        return one.ends()


@pytest.mark.promise("F231")
def test_a_worker_leaves_no_zombies_and_takes_no_exit_code_of_a_handler(app: Path, dsn: str, eyes: Eyes) -> None:
    with working("tasks", dsn=dsn, cwd=app, where=namespaces()) as worker:
        worker.says("ready")
        eyes.do("SELECT pgqueue.enqueue('leaves') FROM generate_series(1, 20)")
        wait_until(lambda: eyes.all("SELECT result FROM pgqueue.job_done") == [(3,)] * 20)
        [one] = psutil.Process(worker.process.pid).children()
        wait_until(lambda: len(one.children()) == 1)  # the command itself: all that were orphaned have ended
        assert eyes.one("SELECT pid FROM pgqueue.worker") == 2
        one.send_signal(SIGTERM)
        assert worker.ends() == 0
        worker.says("stopped in order")


@pytest.mark.promise("F230")
def test_a_stop_in_the_first_moment_ends_a_worker(app: Path, dsn: str) -> None:
    assert stopped(0, ["work", "tasks", "--dsn", dsn], app) == 128 + SIGTERM


@pytest.mark.second
@pytest.mark.promise("F230")
@pytest.mark.parametrize("name", ["work", "relay", "web"])
def test_a_stop_at_each_moment_of_the_start_ends_it_and_costs_no_job(
    name: str, app: Path, app_dsn: str, dsn: str, eyes: Eyes
) -> None:
    eyes.do("SELECT pgqueue.enqueue('long') FROM generate_series(1, 3)")
    commands = {
        "work": ["work", "tasks", "--grace", "0", "--dsn", dsn],
        "relay": ["relay", "--from", app_dsn, "--to", dsn],
        "web": ["web", "--open", "--bind", "127.0.0.1:0", "--dsn", dsn],
    }
    moments = [*(n * STEP for n in range(round(LAST / STEP) + 1)), None]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        codes = dict(zip(moments, pool.map(lambda after: stopped(after, commands[name], app), moments), strict=True))
    ends = ENDS | ({5} if name == "work" else set())  # a job that runs is stopped: the grace is 0
    assert {after: code for after, code in codes.items() if code not in ends} == {}
    assert codes[0] == 128 + SIGTERM and codes[None] != 128 + SIGTERM, codes
    assert eyes.all("SELECT state, attempt, crashes FROM pgqueue.job") == [("available", 0, 0)] * 3
