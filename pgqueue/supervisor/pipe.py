"""The pipe between the supervisor and a worker process: one JSON object per line, in both directions.

From the worker process:
- `announce`: it is ready to take jobs; names its worker.
- `running`: it takes jobs.
- `vitals`: its state, once a second.
- `quiet`: it takes no more jobs.
- `empty`: no job runs in it, and it is about to leave.
- `waits`: it cannot start yet, because the server is starting up, or read only.
- `failed`: why it could not start.
- `counted`: what it has counted, in several lines, the last one marked. The answer to `count`; also sent at the end.

To the worker process: `work`, `quiet`, `stop` (with its grace), `place` (for its title), `over` (its memory limit),
`count`.

A line has less than 64 kB: a longer one could not be read.

An end of file means that the other process is gone. The two may be of different versions: an unknown message is
ignored.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

from pgqueue.database import forks

Message = dict[str, Any]


def line(say: str, **facts: object) -> bytes:
    return json.dumps({"say": say, **facts}).encode() + b"\n"


def inherited(fd: int) -> socket.socket:
    """The end of the pipe that this process was started with. Processes that it starts or forks do not have it."""
    os.set_inheritable(fd, False)
    end = socket.socket(fileno=fd)
    forks.cut_in_children(end)
    return end


class Pipe:
    """One end of a pipe, on an event loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, end: socket.socket) -> Pipe:
        return cls(*await asyncio.open_connection(sock=end))

    def say(self, say: str, **facts: object) -> None:
        """Send a message; it is lost if the other end is gone."""
        if not self._writer.is_closing():
            self._writer.write(line(say, **facts))

    async def heard(self) -> AsyncIterator[Message]:
        """The messages of the other process, until it is gone."""
        with suppress(OSError, ValueError):
            while text := await self._reader.readline():
                if text.endswith(b"\n"):
                    yield json.loads(text)

    def close(self) -> None:
        self._writer.close()
