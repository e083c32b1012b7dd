"""A Redis of our own for the peers that need one: on loopback, on a free port, in a folder of its own.

It appends every change to a file and flushes that file each second, as its documentation recommends for durability.
"""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterable
from pathlib import Path
from time import monotonic, sleep

from bench.peers.install import NotInstalled, server_program

SETTINGS = {"appendonly": "yes", "appendfsync": "everysec", "save": ""}
PATIENCE_SECONDS = 20.0


class Redis:
    """The server; it ends with `close`."""

    def __init__(self, folder: Path) -> None:
        program = server_program("redis")
        if program is None:
            raise NotInstalled("it needs Redis, and there is no redis-server on the PATH (Debian: redis-server)")
        folder.mkdir()
        self.port = free_port()
        options = [word for name, value in SETTINGS.items() for word in (f"--{name}", value)]
        place = ["--bind", "127.0.0.1", "--port", str(self.port), "--dir", str(folder)]
        self._log = folder / "log"
        with self._log.open("wb") as log:
            self._server = subprocess.Popen([program, *place, *options], stdout=log, stderr=log)
        self._wait()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def empty(self) -> None:
        """Forget everything."""
        self.numbers(["FLUSHALL"])

    def numbers(self, commands: Iterable[str]) -> list[int]:
        """What these commands have answered; an answer that is no number counts as 0."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_SECONDS) as link:
            lines = link.makefile("rb")
            found = []
            for command in commands:
                link.sendall(command.encode() + b"\r\n")
                answer = lines.readline()
                if answer.startswith(b"-"):
                    raise RuntimeError(f"Redis, {command}: {answer.decode().strip()}")
                found.append(int(answer[1:]) if answer.startswith(b":") else 0)
            return found

    def version(self) -> str:
        """The first line of `redis-server --version`."""
        return subprocess.run(["redis-server", "--version"], capture_output=True, text=True, check=True).stdout.strip()

    @property
    def pid(self) -> int:
        return self._server.pid

    def close(self) -> None:
        self._server.terminate()
        self._server.wait()

    def _wait(self) -> None:
        deadline = monotonic() + PATIENCE_SECONDS
        while True:
            try:
                self.numbers(["PING"])
            except ConnectionRefusedError:
                if monotonic() > deadline or self._server.poll() is not None:
                    raise NotInstalled(f"Redis did not start: {self._log.read_text(errors='replace')[-500:]}") from None
                sleep(0.02)
            else:
                return


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
