"""The pipe between the supervisor and a worker process: one JSON object per line, in both directions.

From the process: `announce` (ready to take jobs; which worker it is), `running`, `vitals` (how it is, once a second),
`quiet` (takes no more), `empty` (nothing runs, about to leave), `failed` (why it could not start).
To it: `work`, `quiet`, `stop` (with its grace), `place` (for its title), `over` (its memory limit).
An end of file says that the other one is gone. Either may be of another version: what is not known is passed over.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

Message = dict[str, Any]


def line(say: str, **facts: object) -> bytes:
    return json.dumps({"say": say, **facts}).encode() + b"\n"


def inherited(fd: int) -> socket.socket:
    """The end of the pipe that this process was started with; what it starts itself does not get it."""
    os.set_inheritable(fd, False)
    return socket.socket(fileno=fd)


class Pipe:
    """One end, on a loop."""

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
        """What the other one says, until it is gone."""
        with suppress(OSError, ValueError):
            while text := await self._reader.readline():
                if text.endswith(b"\n"):
                    yield json.loads(text)

    def close(self) -> None:
        self._writer.close()
