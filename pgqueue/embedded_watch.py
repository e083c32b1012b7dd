"""The watchman of an embedded server: stops it when the last process that uses it is gone, however it went.

Started by `embedded.py` as a script of its own, without pgqueue, so it costs a bare interpreter. Every user of the
server holds a shared file lock, which the kernel drops even after a kill -9; the watchman waits for the exclusive one.

    python embedded_watch.py DIRECTORY POSTMASTER_PID keep|remove UID GID PG_CTL…

It never starts anything, and leaves at once when the server it was started for is not the one that runs.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys


def main(directory: str, server: int, keep: bool, user: tuple[int, int] | None, stop: list[str]) -> None:
    """Wait until nobody uses `directory`, then stop the server and, if asked, remove the directory."""
    while True:
        with open(os.path.join(directory, "users.lock"), "rb") as users:
            fcntl.flock(users, fcntl.LOCK_EX)
        if not os.path.exists(users.name):
            return  # the last user has removed it all
        # Let go before the door is taken: whoever starts takes the door first, then the users' lock.
        with open(os.path.join(directory, "door.lock"), "rb") as door, open(users.name, "rb") as again:
            fcntl.flock(door, fcntl.LOCK_EX)
            running = postmaster(os.path.join(directory, "data"))
            if running not in (server, None):
                return
            if _free(again.fileno()):
                if running == server:
                    _stop(stop, directory, user)
                if not keep:
                    shutil.rmtree(directory)
                return


def postmaster(data: str) -> int | None:
    """The pid of the server that runs on this data directory.

    The pid in a dead server's file may be somebody else's by now, whom `pg_ctl stop` would interrupt: so it counts only
    if that process is a server started for this directory.
    """
    try:
        with open(os.path.join(data, "postmaster.pid"), encoding="utf-8") as file:
            pid = int(file.readline())
    except (FileNotFoundError, ValueError):
        return None
    return pid if f"postgres -D {data} " in f"{_command_line(pid)} " else None


def _command_line(pid: int) -> str:
    """What process `pid` was started as; empty if there is none."""
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


def _stop(command: list[str], directory: str, user: tuple[int, int] | None) -> None:
    if user is None:
        subprocess.run(command, check=False, cwd=directory)
    else:
        subprocess.run(command, check=False, cwd=directory, user=user[0], group=user[1], extra_groups=[])


if __name__ == "__main__":
    if os.fork() == 0:  # nobody's child: whoever started it need not wait for it
        os.setsid()
        account = None if sys.argv[4] == "-" else (int(sys.argv[4]), int(sys.argv[5]))
        main(sys.argv[1], int(sys.argv[2]), sys.argv[3] == "keep", account, sys.argv[6:])
