"""The watchman of an embedded server: stops it when the last process that uses it is gone, even after a kill -9.

Started by `embedded.py` as a script that does not import pgqueue: it costs only a bare interpreter. Every user of the
server holds a shared file lock, which the kernel drops when the process ends. The watchman waits for the exclusive
lock. It removes only the directory it was started for: see the head of `embedded.py`.

    python embedded_watch.py '{"directory": …, "server": pid, "stop": [pg_ctl …], "account": null, "remains": []}'

It never starts anything. If another server runs than the one it was started for, it ends at once.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys


def main(
    door: int, directory: str, server: int, stop: list[str], account: list[int] | None, remains: list[str]
) -> None:
    """Wait until no process uses `directory`. Then stop the server (as `account`), and remove what `remains`.

    `door` is the directory, open since the server was started: another one may have its name by now.
    """
    try:
        file = os.open("users.lock", os.O_RDONLY, dir_fd=door)
    except FileNotFoundError:
        return  # the last user has removed the directory
    with os.fdopen(file) as users:
        while True:
            fcntl.flock(users, fcntl.LOCK_EX)
            fcntl.flock(users, fcntl.LOCK_UN)  # before the door is taken: a process that starts takes the door first
            fcntl.flock(door, fcntl.LOCK_EX)
            if not is_still(door, directory):
                return
            running = postmaster(os.path.join(directory, "data"))
            if running not in (server, None):
                return
            if _free(users.fileno()):
                if running == server:
                    _stop(stop, directory, account)
                remove(remains)
                return
            fcntl.flock(door, fcntl.LOCK_UN)


def is_still(file: int, path: str | os.PathLike[str]) -> bool:
    """Whether this open file or directory is still the one with this name."""
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        return False


def remove(directories: list[str]) -> None:
    """Remove these directories, behind the door. Each gets a name that no other has: if a process is killed while it
    removes one, the next start finds none, and not a half of one."""
    for directory in directories:
        renamed = f"{directory}.{os.urandom(8).hex()}.removed"
        try:
            os.rename(directory, renamed)
        except FileNotFoundError:
            continue
        except OSError:  # it is a mount, or the one above it is of others, or the name is too long
            renamed = directory
        shutil.rmtree(renamed, ignore_errors=True)


def postmaster(data: str) -> int | None:
    """The pid of the server that runs on this data directory.

    The pid in a dead server's file may belong to another process by now, which `pg_ctl stop` would interrupt. The pid
    counts only if its process is a server started for this directory.
    """
    try:
        with open(os.path.join(data, "postmaster.pid"), encoding="utf-8") as file:
            pid = int(file.readline())
    except (FileNotFoundError, ValueError):
        return None
    return pid if f"postgres -D {data} " in f"{_command_line(pid)} " else None


def _command_line(pid: int) -> str:
    """The command line of process `pid`; empty if there is none."""
    if os.path.exists("/proc/self/cmdline"):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                return file.read().replace(b"\0", b" ").decode(errors="surrogateescape")
        except OSError:
            return ""
    command = ["ps", "-ww", "-o", "command=", "-p", str(pid)]
    return subprocess.run(command, check=False, capture_output=True, text=True).stdout


def _free(users: int) -> bool:
    try:
        fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _stop(command: list[str], directory: str, account: list[int] | None) -> None:
    if account is None:
        subprocess.run(command, check=False, cwd=directory)
    else:
        subprocess.run(command, check=False, cwd=directory, user=account[0], group=account[1], extra_groups=[])


if __name__ == "__main__":
    task = json.loads(sys.argv[1])
    start_door = os.open(task["directory"], os.O_RDONLY)  # the process that waits for the parent holds it still
    if os.fork() == 0:  # the parent ends now, and the process that started it need not wait for the watchman
        os.setsid()
        main(start_door, **task)
