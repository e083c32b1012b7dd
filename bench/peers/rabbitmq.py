"""A RabbitMQ of our own for the peers that need one: on loopback, on free ports, in a folder of its own.

Its Erlang node has a port mapper (epmd) of its own, too. Else the node would start one that outlives it, and that the
whole machine shares. The node runs as the user that runs the bench, with all its files in the folder.

1. A sample leaves durable queues behind, and their names are known. `empty` deletes them.
2. The number of messages that are ready comes from a passive declaration. The numbers of RabbitMQ's own statistics are
   some seconds old.
3. A question that is given up half-way leaves its answer in the connection, where the next one would take it for its
   own. So the connection is closed at any error, and another one is opened.
4. A message that is delivered and not acknowledged is not counted: no question about a queue says it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic, sleep

from bench.peers import amqp
from bench.peers.install import NotInstalled, server_program
from bench.peers.redis import free_port

QUEUES = ("bench", "elsewhere")
PATIENCE_SECONDS = 120.0
END_SECONDS = 30.0


class RabbitMQ:
    """The server; it ends with `close`."""

    def __init__(self, folder: Path) -> None:
        program, epmd = server_program("rabbitmq"), shutil.which("epmd")
        if program is None or epmd is None:
            raise NotInstalled(
                "it needs RabbitMQ, and there is no rabbitmq-server on this machine, or no epmd of Erlang"
            )
        folder.mkdir()
        self.port, mapper = free_port(), free_port()
        self._connection: amqp.Connection | None = None
        environment = _environment(folder, self.port, mapper)
        self._log = folder / "output"
        with self._log.open("wb") as log:
            command = [epmd, "-port", str(mapper), "-address", "127.0.0.1"]
            self._mapper = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
            # A group of its own: Ctrl-C of the bench must reach it through `close` only.
            self._server = subprocess.Popen(
                [program], env=environment, cwd=folder, stdout=log, stderr=log, start_new_session=True
            )
        try:
            self._wait()
        except BaseException:
            self.close()
            raise

    @property
    def url(self) -> str:
        return f"amqp://guest:guest@127.0.0.1:{self.port}//"

    @property
    def pid(self) -> int:
        return self._server.pid

    def empty(self) -> None:
        """Delete the queues of the peers."""
        with self._asked() as link:
            for name in QUEUES:
                link.delete(name)

    def numbers(self, commands: Iterable[str]) -> list[int]:
        """How many messages are ready in each of these queues: `READY NAME`. One that there is not has none."""
        with self._asked() as link:
            return [link.ready(command.removeprefix("READY ")) for command in commands]

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        for process in (self._server, self._mapper):
            process.terminate()
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    @contextmanager
    def _asked(self) -> Iterator[amqp.Connection]:
        """The connection, opened when there is none, and closed at an error."""
        if self._connection is None:
            self._connection = amqp.Connection(self.port, PATIENCE_SECONDS)
        try:
            yield self._connection
        except BaseException:
            self._connection.close()
            self._connection = None
            raise

    def _wait(self) -> None:
        """Until it lets us in: it listens a little earlier."""
        deadline = monotonic() + PATIENCE_SECONDS
        while True:
            with suppress(OSError, amqp.Refused), self._asked():  # it starts; the next look says more
                return
            if self._server.poll() is not None or monotonic() > deadline:
                raise NotInstalled(f"RabbitMQ did not start: {self._log.read_text(errors='replace')[-500:]}")
            sleep(0.1)


def _environment(folder: Path, port: int, mapper: int) -> dict[str, str]:
    """The variables of the node: what it would else take from the machine's own RabbitMQ is named here."""
    return {
        "PATH": os.environ.get("PATH", os.defpath),
        "HOME": str(folder),  # the cookie
        "LANG": "C.UTF-8",
        "RABBITMQ_NODENAME": "bench@localhost",
        "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
        "RABBITMQ_NODE_PORT": str(port),
        "RABBITMQ_DIST_PORT": str(free_port()),
        "RABBITMQ_MNESIA_BASE": str(folder / "mnesia"),
        "RABBITMQ_LOG_BASE": str(folder / "log"),
        "RABBITMQ_PID_FILE": str(folder / "pid"),
        "RABBITMQ_CONF_ENV_FILE": str(folder / "environment"),
        "RABBITMQ_CONFIG_FILE": str(folder / "rabbitmq"),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "plugins"),
        "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-start_epmd false -kernel inet_dist_use_interface {127,0,0,1}",
        "ERL_EPMD_PORT": str(mapper),
        "ERL_EPMD_ADDRESS": "127.0.0.1",
    }
