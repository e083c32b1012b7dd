"""Faults of the first seconds: a server that is starting up, and processes that are killed while they start.

A `StartingServer` is a TCP port that refuses each client as a server in recovery does, until it is `opened`. Then it
leads to the real server. `kill_starting` kills one process of a supervisor that has not announced itself.
"""

from __future__ import annotations

import asyncio
import os
import struct
import threading
from signal import SIGKILL

from loop_thread import LoopThread, pump
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from supervised import Supervised
from workers import wait_until

STARTING = b"SFATAL\0VFATAL\0C57P03\0Mthe database system is starting up\0\0"


class StartingServer:
    """The way to the server of `dsn`; `refused` counts the clients that came too early."""

    def __init__(self, dsn: str) -> None:
        self.refused = 0
        self.opened = threading.Event()
        self._target = conninfo_to_dict(dsn)
        self._loop = LoopThread()
        port = self._loop.listen(self._serve)
        self.dsn = make_conninfo(dsn, host="127.0.0.1", port=port, sslmode="disable", gssencmode="disable")

    def __enter__(self) -> StartingServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.opened.is_set():
            theirs, ours = await self._loop.connect(self._target)
            self._loop.start(pump(reader, ours))
            self._loop.start(pump(theirs, writer))
            return
        await reader.read(65536)
        writer.write(b"E" + struct.pack("!i", len(STARTING) + 4) + STARTING)
        writer.close()
        self.refused += 1


def kill_starting(one: Supervised, number: int) -> int:
    """kill -9 of this process, counted from 1, as soon as it is started; its pid."""
    line = one.worker.says(f"process {number} (pid ")
    pid = int(line.partition("(pid ")[2].partition(")")[0])
    os.kill(pid, SIGKILL)
    wait_until(lambda: one.counts(f"process {number} (pid {pid}): was killed by SIGKILL"))
    return pid
