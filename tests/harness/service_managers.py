"""A real systemd for the tests: a user's instance in directories of its own, which starts the units that a test puts
there.

systemd starts only where /run/systemd/system is. Where it is not, as in a container, the instance has a /run of its
own, in a namespace of its own. Its units, its socket and its sessions are below one directory, and it sees no others.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from workers import wait_until

PROGRAM = Path("/lib/systemd/systemd")
BOOTED = Path("/run/systemd/system")
UNITS = "/usr/lib/systemd/user"
FIRST = "basic.target"
ROOM = 'mount -t tmpfs tmpfs /run && mkdir -p /run/systemd/system && exec "$@"'


class ServiceManager:
    """systemd, as `systemctl --user` reaches it. `units` is the directory of the test's own units."""

    def __init__(self, directory: Path) -> None:
        self.units = directory / "units"
        self.log = directory / "log"
        self._environ = {**os.environ, "XDG_RUNTIME_DIR": str(directory), "SYSTEMD_UNIT_PATH": f"{self.units}:{UNITS}"}

    def start(self) -> subprocess.Popen[bytes]:
        """Start systemd itself."""
        self.units.mkdir()
        command = [str(PROGRAM), "--user", f"--unit={FIRST}", "--log-target=console"]
        if not BOOTED.exists():
            command = ["unshare", "--mount", "sh", "-c", ROOM, "sh", *command]
        with self.log.open("wb") as log:
            return subprocess.Popen(
                command, env=self._environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def __call__(self, *words: str, check: bool = True) -> str:
        """What `systemctl` answers; an error of it is one of the test, unless it is not to `check`."""
        done = subprocess.run(
            ["systemctl", "--user", "--no-pager", *words], env=self._environ, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0 or not check, f"systemctl {' '.join(words)}: {done.stderr}\n{self.log.read_text()}"
        return done.stdout

    def answers(self) -> bool:
        """Whether it can be asked, and has begun."""
        return self("is-active", FIRST, check=False).strip() == "active"

    def shows(self, unit: str, name: str) -> str:
        """The value of this property of the unit."""
        return self("show", unit, f"--property={name}", "--value").strip()


@contextmanager
def service_manager() -> Iterator[ServiceManager]:
    """A systemd that runs nothing yet, where there can be one; its units end with it."""
    if not PROGRAM.exists() or shutil.which("systemctl") is None:
        pytest.skip("no systemd here")
    if not BOOTED.exists() and os.geteuid() != 0:
        pytest.skip("systemd is not running here, and we are not root")
    with tempfile.TemporaryDirectory(prefix="pgqueue-systemd-") as name:  # short, for the path of a socket
        made = ServiceManager(Path(name))
        process = made.start()
        try:
            wait_until(lambda: process.poll() is not None or made.answers())
            if process.poll() is not None:
                pytest.skip(f"systemd does not run here: {made.log.read_text()}")
            yield made
        finally:
            process.send_signal(signal.SIGTERM)  # ends all units
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
