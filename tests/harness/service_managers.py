"""A real systemd for the tests: a user's instance in directories of its own, which starts the units that a test puts
there.

systemd starts only where /run/systemd/system is. Where it is not, as in a container, the instance has a /run, pids and
a control group of its own. All that it has started dies with the way into that room, and this dies with the tests. A
systemd without a group of its own would move all processes of the machine into one of its groups.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import psutil
import pytest
from workers import wait_until

PROGRAM = Path("/lib/systemd/systemd")
BOOTED = Path("/run/systemd/system")
GROUPS = Path("/sys/fs/cgroup")
UNITS = "/usr/lib/systemd/user"
FIRST = "basic.target"
WAY = ["setpriv", "--pdeathsig", "KILL", "unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
ROOM = """
mount -t tmpfs tmpfs /run && mkdir -p /run/systemd/system || exit
for top in /sys/fs/cgroup /sys/fs/cgroup/systemd /sys/fs/cgroup/unified; do
    if [ -e "$top/cgroup.procs" ]; then
        mkdir "$top/$0" && echo 0 > "$top/$0/cgroup.procs" || exit
    fi
done
"$@" & wait
"""


class ServiceManager:
    """systemd, as `systemctl --user` reaches it. `units` is the directory of the test's own units."""

    def __init__(self, directory: Path) -> None:
        self.units = directory / "units"
        self.log = directory / "log"
        self._group = directory.name
        kept = {name: value for name, value in os.environ.items() if name != "DBUS_SESSION_BUS_ADDRESS"}
        self._environ = {**kept, "XDG_RUNTIME_DIR": str(directory), "SYSTEMD_UNIT_PATH": f"{self.units}:{UNITS}"}
        self.units.mkdir()
        command = [str(PROGRAM), "--user", f"--unit={FIRST}", "--log-target=console"]
        if not BOOTED.exists():
            command = [*WAY, "sh", "-c", ROOM, self._group, *command]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                command, env=self._environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def __call__(self, *words: str, check: bool = True) -> str:
        """What `systemctl` answers; an error of it is one of the test, unless it is not to `check`."""
        command = [*self._inside(), "systemctl", "--user", "--no-pager", *words]
        done = subprocess.run(command, env=self._environ, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0 or not check, f"systemctl {' '.join(words)}: {done.stderr}\n{self.log.read_text()}"
        return done.stdout

    def _inside(self) -> list[str]:
        """What comes before a command so that it runs in the room: systemd answers no process that it cannot see."""
        if BOOTED.exists():
            return []
        [first, *_] = psutil.Process(self._process.pid).children() or [None]
        return [] if first is None else ["nsenter", f"--target={first.pid}", "--pid", "--mount"]

    def ended(self) -> bool:
        return self._process.poll() is not None

    def answers(self) -> bool:
        """Whether it can be asked, and has begun."""
        return self("is-active", FIRST, check=False).strip() == "active"

    def shows(self, unit: str, name: str) -> str:
        """The value of this property of the unit."""
        return self("show", unit, f"--property={name}", "--value").strip()

    def main(self, unit: str) -> psutil.Process:
        """The main process of the unit, which systemd knows by its pid in the room."""
        pid = self.shows(unit, "MainPID")
        for each in psutil.Process(self._process.pid).children(recursive=True):
            with suppress(OSError):
                lines = Path(f"/proc/{each.pid}/status").read_text().splitlines()
                if any(line.startswith("NSpid:") and line.split()[-1] == pid for line in lines):
                    return each
        raise AssertionError(f"{unit} has no process {pid}")

    def close(self) -> None:
        """End it, and all that it has started."""
        self._process.kill() if not BOOTED.exists() else self._process.terminate()
        self._process.wait(60)
        for top in [GROUPS, *GROUPS.iterdir()]:
            for group, _, _ in os.walk(top / self._group, topdown=False):
                wait_until(partial(_removed, group), 30)


def _removed(group: str) -> bool:
    """Remove a group as soon as its last process is gone."""
    try:
        os.rmdir(group)
    except OSError:
        return False
    return True


@contextmanager
def service_manager() -> Iterator[ServiceManager]:
    """A systemd that runs nothing yet, where there can be one; its units end with it."""
    if not PROGRAM.exists() or not all(map(shutil.which, ("systemctl", "setpriv", "unshare", "nsenter"))):
        pytest.skip("no systemd here")
    if not BOOTED.exists() and os.geteuid() != 0:
        pytest.skip("systemd is not running here, and we are not root")
    with tempfile.TemporaryDirectory(prefix="pgqueue-systemd-") as name:  # short, for the path of a socket
        made = ServiceManager(Path(name))
        try:
            wait_until(lambda: made.ended() or made.answers())
            if made.ended():
                pytest.skip(f"systemd does not run here: {made.log.read_text()}")
            yield made
        finally:
            made.close()
