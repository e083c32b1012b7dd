"""What ends in a container of the tests leaves the group of the tests alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from hosts import namespaces

IN_A_GROUP = """
import signal, subprocess, sys
from commands import pgqueue, working
from hosts import container
from pathlib import Path

heard = []
signal.signal(signal.SIGHUP, lambda *_: heard.append("SIGHUP"))
with subprocess.Popen(["sleep", "600"]) as stopped:
    stopped.send_signal(signal.SIGSTOP)
    while Path(f"/proc/{stopped.pid}/stat").read_text().split()[2] != "T":
        pass
    print(pgqueue("--version", where=container("box")).returncode)
    with working("--help", dsn=None, cwd=Path("."), where=container("box")) as worker:
        print(worker.ends())
    stopped.kill()
print(*heard)
"""


def test_no_end_in_a_container_hangs_up_the_tests() -> None:
    """The tests as the first processes of a session, one of them stopped.

    Naive: the container is in the session of the tests. The end of its command is a SIGHUP to each of them.
    """
    namespaces()
    done = subprocess.run(
        [sys.executable, "-c", IN_A_GROUP],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        start_new_session=True,
        timeout=120,
    )
    assert (done.stdout, done.stderr) == ("0\n0\n\n", "")
