"""The first process of a container: it passes signals on to the command, collects what has ended, and ends with it.

The kernel treats process 1 as no other one:

- A signal for which it has no handler does nothing. So until a command has imported all and made its handlers, SIGTERM
  would be lost; the worker would take jobs, and be killed with them when the grace of the container is over.
- It becomes the parent of each process whose own parent has ended. These stay zombies until it waits for them. A worker
  must not wait for all of them: it would take the exit codes of those that its handlers wait for.

So process 1 forks before it imports anything else. The child is the command, and a process like any other. Its parent
runs nothing of it.

Why each signal reaches the command, and once:

1. All signals are blocked before the fork. One that comes from then on is kept, for process 1, too.
2. The child does not inherit what is kept. It unblocks before it imports anything. Until it has handlers, SIGTERM ends
   it: it holds no job yet.
3. The parent unblocks when it has its handlers. What was kept comes now. Each signal becomes a byte in a pipe, also
   where another thread takes it. For each byte the signal is sent to the child.
4. Only the parent waits for the child. So the pid is the child's, until the parent has its exit code and ends.
5. One SIGCHLD may stand for several processes. So after each, all that have ended are collected.
6. A terminal signals a group of processes, and so does `timeout`. The two are in different groups, and the terminal is
   the command's: what is sent to a group reaches the command directly or through its parent, never in both ways.
7. Process 1 may lead its group: that of its session, or another one, as a shell with job control makes it. Nothing can
   leave a group or a session that it leads. So the command leaves the group, and takes the terminal with it if it was
   that group's.
8. Process 1 may be in the group of others, as with `unshare`. Then the command stays in that, and process 1 leaves
   their session, not only the group. If it stayed, the command would tie that group to another one of the session. At
   the end of the command the kernel may take the group for orphaned, and sends SIGHUP to all others in it.

Where process 1 ends, also by SIGKILL, the kernel kills all others of the container.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from types import FrameType

TASKS = "/proc/self/task"


def fork_if_first() -> None:
    """As the first process of a container, fork and return in the child. In any other process do nothing."""
    if os.getpid() != 1:
        return
    leads = os.getpgrp() == 1
    is_alone = _is_alone()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # inherited as ignored, it would leave no exit code to wait for
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    child = os.fork()
    if child:
        os._exit(_pass_on(child, leads))
    if leads:
        _leave_group()
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if not is_alone:
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _is_alone() -> bool:
    """Whether this is the only thread. A `sitecustomize` may have started others, as `opentelemetry-instrument` does.

    A fork would have their locks, and not them. Then the child begins anew as a program.
    """
    return not os.path.isdir(TASKS) or len(os.listdir(TASKS)) == 1


def _leave_group() -> None:
    """In the child: a group of its own. A terminal of the group before is this one's from now on."""
    before = os.getpgrp()
    os.setpgid(0, 0)
    with suppress(OSError):  # there is none. SIGTTOU, which a group in the background gets for this, is blocked
        if os.tcgetpgrp(0) == before:
            os.tcsetpgrp(0, os.getpgrp())


def _pass_on(child: int, leads: bool) -> int:
    """In the parent: pass signals on until the child has ended; its exit code, as a shell has it."""
    if not leads:  # else the child has left the group
        os.setsid()
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    for number in {*_passed_on(), signal.SIGCHLD}:
        signal.signal(number, _write_to_the_pipe)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    _show_title()
    while True:
        for came in os.read(reading, 1024):
            if came != signal.SIGCHLD:
                os.kill(child, came)
        if (code := _collect(child)) is not None:
            return code if code >= 0 else 128 - code


def _show_title() -> None:
    """The process list shows two processes of one command otherwise; and its line may have a password."""
    import setproctitle

    setproctitle.setproctitle("pgqueue: init")


def _passed_on() -> set[signal.Signals]:
    """All but those that cannot be handled, those that Python ignores, and those that a fault of the process raises."""
    cannot = {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}
    ignored = {signal.SIGPIPE, signal.SIGXFSZ}
    faults = {
        signal.SIGSEGV,
        signal.SIGBUS,
        signal.SIGFPE,
        signal.SIGILL,
        signal.SIGABRT,
        signal.SIGTRAP,
        signal.SIGSYS,
    }
    return {*signal.valid_signals()} - cannot - ignored - faults


def _write_to_the_pipe(number: int, _: FrameType | None) -> None:
    """Python has done so already."""


def _collect(child: int) -> int | None:
    """Wait for each process that has ended. The child's exit code, if it is one of them, as `subprocess` has it."""
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG)  # there is always the child
        if pid == child:
            return os.waitstatus_to_exitcode(status)
        if not pid:
            return None
