"""Faults of the first seconds: a server that is starting up, and processes that are killed while they start.

A `StartingServer` is a TCP port that refuses each client as a server in recovery does, until it is `opened`. Then it
leads to the real server. `kill_starting` kills one process of a supervisor that has not announced itself.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
from contextlib import suppress
from signal import SIGKILL

from psycopg.conninfo import conninfo_to_dict, make_conninfo
from supervised import Supervised
from workers import wait_until

STARTING = b"SFATAL\0VFATAL\0C57P03\0Mthe database system is starting up\0\0"


class StartingServer:
    """The way to the server of `dsn`; `refused` counts the clients that came too early."""

    def __init__(self, dsn: str) -> None:
        self.refused = 0
        self.opened = threading.Event()
        self._target = {name: str(value) for name, value in conninfo_to_dict(dsn).items()}
        self._server = socket.create_server(("127.0.0.1", 0))
        port = self._server.getsockname()[1]
        self.dsn = make_conninfo(dsn, host="127.0.0.1", port=port, sslmode="disable", gssencmode="disable")
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def __enter__(self) -> StartingServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown(socket.SHUT_RDWR)  # it wakes the thread that accepts
        for thread in self._threads:
            thread.join()
        self._server.close()

    def _accept(self) -> None:
        with suppress(OSError):  # shut down: the test is over
            while True:
                client, _ = self._server.accept()
                self._threads.append(threading.Thread(target=self._serve, args=[client], daemon=True))
                self._threads[-1].start()

    def _serve(self, client: socket.socket) -> None:
        with suppress(OSError), client:
            if not self.opened.is_set():
                client.recv(65536)
                client.sendall(b"E" + struct.pack("!i", len(STARTING) + 4) + STARTING)
                self.refused += 1
                return
            with self._connect() as there:
                back = threading.Thread(target=_pump, args=[there, client], daemon=True)
                back.start()
                _pump(client, there)
                back.join()

    def _connect(self) -> socket.socket:
        host, port = self._target["host"], self._target.get("port", "5432")
        if not host.startswith("/"):
            return socket.create_connection((host, int(port)))
        there = socket.socket(socket.AF_UNIX)
        there.connect(f"{host}/.s.PGSQL.{port}")
        return there


def _pump(one: socket.socket, other: socket.socket) -> None:
    try:
        while data := one.recv(65536):
            other.sendall(data)
    except OSError:
        """One side is gone: so is the other, then."""
    finally:
        with suppress(OSError):
            other.shutdown(socket.SHUT_RDWR)


def kill_starting(one: Supervised, number: int) -> int:
    """kill -9 of this process, counted from 1, as soon as it is started; its pid."""
    line = one.worker.says(f"process {number} (pid ")
    pid = int(line.partition("(pid ")[2].partition(")")[0])
    os.kill(pid, SIGKILL)
    wait_until(lambda: one.counts(f"process {number} (pid {pid}): was killed by SIGKILL"))
    return pid
