"""Processes for the tests that need not import everything anew: forked from one that has, started at the first use.

A worker's imports cost half a second of CPU, a command's a fifth to two fifths; the tests start hundreds. What is
forked is a process like any other: its own pid, environment, directory, standard streams, signals, exit code and end of
the interpreter. What differs is its parent, so tests about the start itself execute the program; so does whatever the
interpreter reads from its environment at its start (PYTHON…, the locale).

The preloaded process has one thread, has opened nothing but its socket, and runs nothing of ours before the fork. A
child that has ended stays a zombie until whoever started it has heard its exit code and hung up, as with `subprocess`:
so nobody signals a pid that is somebody else's by now.

As a program (`python forks.py SOCKET`) it is the preloaded process, and then each of its children.
"""

from __future__ import annotations

import atexit
import json
import os
import selectors
import socket
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

MOST = 1 << 20  # bytes of a request: the environment is most of it
COMMAND = str(Path(sys.executable).with_name("pgqueue"))
WORKER = str(Path(__file__).with_name("workers.py"))
SCRIPT = sys.executable
PROGRAMS = {COMMAND: [COMMAND], WORKER: [sys.executable, WORKER], SCRIPT: [SCRIPT]}
AT_THE_START = "PYTHON", "LC_", "LANG", "LD_"
WINGS = "jobs", "database", "client", "admin", "worker"
APART = "__init__", "sqlalchemy"
"""Modules that are not preloaded: SQLAlchemy is an application's, and not every process has it."""


def start(program: str, *arguments: str, env: dict[str, str], **options: Any) -> subprocess.Popen[Any]:
    """`subprocess.Popen` of `pgqueue` (COMMAND), of a worker process (WORKER) or of a script in its directory (SCRIPT),
    forked where that is the same."""
    if not hasattr(os, "pidfd_open") or _at_the_start(env) != _at_the_start(os.environ):
        return subprocess.Popen([*PROGRAMS[program], *arguments], env=env, **options)
    return Forked([program, *arguments], env=env, **options)


def _at_the_start(environ: Any) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name.startswith(AT_THE_START)}


class Forked(subprocess.Popen[Any]):
    """A Popen whose process is a child of the preloaded one: how it is made and how its end is heard are other."""

    def _execute_child(self, args: list[str], *how: Any) -> None:
        cwd, env = how[4], how[5]
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite = how[9:15]
        self._status, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            request = {"args": args, "cwd": str(cwd or os.getcwd()), "env": env}
            streams = [given if given != -1 else number for number, given in enumerate((p2cread, c2pwrite, errwrite))]
            socket.send_fds(_preloaded(), [json.dumps(request).encode()], [*streams, theirs.fileno()])
        self.pid = int(self._status.recv(64))
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        if self.returncode is None and self._waitpid_lock.acquire(False):  # type: ignore[attr-defined]
            try:
                if self.returncode is None:
                    pid, status = self._try_wait(os.WNOHANG)
                    if pid:
                        self._handle_exitstatus(status)  # type: ignore[attr-defined]
            finally:
                self._waitpid_lock.release()  # type: ignore[attr-defined]
        return self.returncode

    def _try_wait(self, flags: int) -> tuple[int, int]:
        self._status.setblocking(not flags & os.WNOHANG)
        try:
            status = int(self._status.recv(64))
        except BlockingIOError:
            return 0, 0
        self._status.close()
        return self.pid, status


@cache
def _preloaded() -> socket.socket:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for each in (ours, theirs):
        each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MOST)
    with theirs:
        command = [sys.executable, __file__, str(theirs.fileno())]
        null = subprocess.DEVNULL
        process = subprocess.Popen(command, stdin=null, stdout=null, pass_fds=[theirs.fileno()])

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours


# The preloaded process -----------------------------------------------------------------------------------------------


def preload() -> None:
    import gc
    from importlib import import_module

    import pgqueue
    from pgqueue.cli import COMMANDS

    for name in COMMANDS:
        import_module(f"pgqueue.cli.commands.{name}")
    package = Path(pgqueue.__file__).parent
    for wing in WINGS:
        for path in sorted((package / wing).rglob("*.py")):
            if path.stem not in APART:
                import_module(".".join(["pgqueue", *path.relative_to(package).with_suffix("").parts]))
    import_module("workers")
    import_module("psycopg_pool")
    gc.freeze()  # else the first collection in a child copies every page


def serve(requests: socket.socket) -> dict[str, Any]:
    """Fork for each request until nobody can ask any more; returns in the child, with its request."""
    selector = selectors.DefaultSelector()
    selector.register(requests, selectors.EVENT_READ)
    children: dict[int, tuple[int, socket.socket]] = {}  # pid -> what becomes readable at its end, who wants to hear
    while True:
        for key, _ in selector.select():
            if key.fileobj is requests:
                data, fds, _, _ = socket.recv_fds(requests, MOST, 4)
                if not data:
                    sys.exit()
                told = socket.socket(fileno=fds.pop())
                pid = os.fork()
                if not pid:
                    selector.close()
                    for pidfd, other in children.values():
                        os.close(pidfd)
                        other.close()
                    for number, fd in enumerate(fds):
                        os.dup2(fd, number)
                        os.close(fd)
                    told.close()
                    requests.close()
                    request: dict[str, Any] = json.loads(data)
                    return request
                for fd in fds:
                    os.close(fd)
                children[pid] = os.pidfd_open(pid), told
                selector.register(children[pid][0], selectors.EVENT_READ, pid)
                told.send(str(pid).encode())
            elif isinstance(key.fileobj, socket.socket):  # whoever started it knows, or is gone
                selector.unregister(key.fileobj)
                key.fileobj.close()
                os.waitpid(key.data, 0)
            else:
                pidfd, told = children.pop(key.data)
                selector.unregister(pidfd)
                os.close(pidfd)
                _tell(told, key.data)
                selector.register(told, selectors.EVENT_READ, key.data)


def _tell(told: socket.socket, pid: int) -> None:
    """Its exit status, as wait() puts it; the zombie stays."""
    ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert ended is not None
    status = ended.si_status << 8 if ended.si_code == os.CLD_EXITED else ended.si_status
    try:
        told.send(str(status).encode())
    except BrokenPipeError:
        """Whoever started it is gone."""


def become(request: dict[str, Any]) -> None:
    """The process that was asked for."""
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    program, *_ = sys.argv = request["args"]
    sys.path[0] = str(Path(program).parent)
    if program == SCRIPT:
        import runpy

        sys.argv = sys.argv[1:]
        sys.path[0] = request["cwd"]
        runpy.run_path(sys.argv[0], run_name="__main__")
    elif program == COMMAND:
        from pgqueue.__main__ import main

        main()
    else:
        import workers

        workers.main()


if __name__ == "__main__":
    connected = socket.socket(fileno=int(sys.argv[1]))
    connected.set_inheritable(False)
    preload()
    become(serve(connected))
