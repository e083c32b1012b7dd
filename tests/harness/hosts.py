"""Other hosts and other containers for the tests: what comes before a command so that it runs there.

A container has a host name and pids of its own: its first process is pid 1, and nobody outside is seen from there. That
takes the kernel's namespaces; where it does not give us any, the test is skipped and says why, and fails where CI is
set. A host is only a name that the process takes its own for, so that works everywhere.

What is started in a container has a session of its own (`start_new_session`). In the session of the tests a first
process that leaves its group there, and not the session, would send SIGHUP to the tests now and then (init_process.py
says why). So no test hangs on that, but the one which proves it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import cache

import pytest

NAMED = "import os, socket, sys; socket.sethostname(sys.argv[1]); os.execvp(sys.argv[2], sys.argv[2:])"
CLAIMED = """
import runpy, socket, sys
from pgqueue.supervisor import orders
name, beat, *sys.argv = sys.argv[1:]
socket.gethostname = lambda: name
orders.BEAT_SECONDS = float(beat)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def container(name: str) -> list[str]:
    """A container of this host name. Who is killed is the way into it, and all in it die with that."""
    return [*namespaces(), sys.executable, "-c", NAMED, name]


def host(name: str, beat: float = 5.0) -> list[str]:
    """A host of this name, as a supervisor sees it; it looks for orders by itself every `beat` seconds."""
    return [sys.executable, "-c", CLAIMED, name, str(beat)]


@cache
def _ways() -> tuple[list[str] | None, str]:
    program = shutil.which("unshare")
    if program is None:
        return None, "no unshare here"
    said = ""
    for rights in ([], ["--user", "--map-root-user"]):
        way = [program, *rights, "--uts", "--pid", "--mount-proc", "--kill-child"]
        done = subprocess.run([*way, sys.executable, "-c", NAMED, "some", "true"], capture_output=True, text=True)
        if done.returncode == 0:
            return way, ""
        said = done.stderr.strip()
    return None, f"no namespaces here: {said}"


def namespaces() -> list[str]:
    """The way into a container without a name of its own: what comes after it is its process 1 from the start."""
    way, why = _ways()
    if way is None:
        if os.environ.get("CI"):
            pytest.fail(why)
        pytest.skip(why)
    return way
