"""A pooler in transaction mode on loopback: each transaction of a client may run in another session of the server.

It does what PgBouncer does in that mode, and as little:

1. It answers the client's startup by itself, with the pid of no backend.
2. With the first message of a transaction a client gets a session of the server that is free; others wait for one.
3. When the server says that it is idle, outside of a transaction, and no answer is missing, the session is free again.
4. Nothing is reset in between: a setting, a LISTEN or a session lock stays with the session, and so with other clients.
5. A prepared statement that has a name is refused: PgBouncer before 1.21 cannot follow it to another session.
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque

from loop_thread import LoopThread
from psycopg.conninfo import conninfo_to_dict, make_conninfo

SSL, GSS, CANCEL = 80877103, 80877104, 80877102
NAMED = b"E\x00\x00\x00\x4bSERROR\x00VERROR\x00C0A000\x00Mthis pooler has no prepared statements with names\x00\x00"


class Pooler:
    """`dsn` leads through the pooler, to at most `size` sessions of the server; `port` is free unless it is given."""

    def __init__(self, dsn: str, size: int, port: int = 0) -> None:
        self.moved = 0
        """How often a client got another session than it had before."""
        self.named = 0
        """How many statements with names were asked for."""
        self._target = {name: str(value) for name, value in conninfo_to_dict(dsn).items()}
        self._size = size
        self._made = 0
        self._free: deque[_Session] = deque()
        self._loop = LoopThread()
        self._returned = asyncio.Condition()
        self.port = self._loop.listen(self._serve, port)
        self.dsn = make_conninfo(dsn, host="127.0.0.1", port=self.port, sslmode="disable", gssencmode="disable")

    def __enter__(self) -> Pooler:
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if await self._greet(reader, writer):
                await self._relay(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            """The client is gone."""
        finally:
            writer.close()

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer the startup; False if the client wants no session."""
        while True:
            (length,) = struct.unpack("!i", await reader.readexactly(4))
            (code,) = struct.unpack("!i", (await reader.readexactly(length - 4))[:4])
            if code not in (SSL, GSS):
                break
            writer.write(b"N")
        if code == CANCEL:
            return False
        session = await self._take()
        writer.write(session.greeting)
        await self._give(session)
        return True

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One transaction after another, each in a session that is free."""
        before: _Session | None = None
        while True:
            kind, message = await _message(reader)
            if kind == b"X":
                return
            session = await self._take()
            self.moved += before is not None and session is not before
            before = session
            try:
                await self._transaction(session, reader, writer, kind, message)
            except BaseException:
                session.writer.close()  # what it was in the middle of is rolled back
                await self._lost()
                raise
            await self._give(session)

    async def _transaction(
        self, session: _Session, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kind: bytes, message: bytes
    ) -> None:
        missing, hearing = 0, asyncio.ensure_future(_message(session.reader))
        asking: asyncio.Future[tuple[bytes, bytes]] | None = None
        try:
            while True:
                if kind == b"P" and message[5:6] != b"\0":
                    self.named += 1
                    writer.write(NAMED)
                    raise ConnectionError("a statement with a name")
                session.writer.write(message)
                missing += kind in (b"S", b"Q")
                asking = asyncio.ensure_future(_message(reader))
                while True:
                    await asyncio.wait([hearing, asking], return_when=asyncio.FIRST_COMPLETED)
                    if hearing.done():
                        said, answer = hearing.result()
                        writer.write(answer)
                        if said == b"Z":
                            missing -= 1
                            if not missing and answer[5:6] == b"I" and not asking.done():
                                self._keep(reader, asking)
                                asking = None
                                return
                        hearing = asyncio.ensure_future(_message(session.reader))
                    if asking.done():
                        kind, message = asking.result()
                        if kind == b"X":
                            raise ConnectionError("the client left in the middle")
                        break
        finally:
            for waiting in (hearing, asking):
                if waiting is not None and not waiting.done():
                    waiting.cancel()
                    await asyncio.gather(waiting, return_exceptions=True)

    def _keep(self, reader: asyncio.StreamReader, asking: asyncio.Future[tuple[bytes, bytes]]) -> None:
        """A read of the client that is under way goes on into its next transaction."""
        reader.pooler_asking = asking  # type: ignore[attr-defined]

    async def _take(self) -> _Session:
        async with self._returned:
            while not self._free:
                if self._made < self._size:
                    self._made += 1
                    return await self._connect()
                await self._returned.wait()
            return self._free.popleft()

    async def _connect(self) -> _Session:
        target = self._target
        reader, writer = await self._loop.connect(target)
        words = ["user", target.get("user", "postgres"), "database", target["dbname"], "application_name", "pooler"]
        startup = struct.pack("!i", 196608) + b"".join(word.encode() + b"\0" for word in words) + b"\0"
        writer.write(struct.pack("!i", len(startup) + 4) + startup)
        greeting, kind = b"", b""
        while kind != b"Z":
            kind, message = await _message(reader)
            if kind == b"E":
                raise ConnectionError(message)
            greeting += b"K\x00\x00\x00\x0c" + bytes(8) if kind == b"K" else message
        return _Session(reader, writer, greeting)

    async def _give(self, session: _Session) -> None:
        async with self._returned:
            self._free.append(session)
            self._returned.notify()

    async def _lost(self) -> None:
        async with self._returned:
            self._made -= 1
            self._returned.notify()


class _Session:
    """A session of the server, and what a client is told at its startup."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, greeting: bytes) -> None:
        self.reader, self.writer, self.greeting = reader, writer, greeting


async def _message(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """The kind and the whole of the next message."""
    kept = getattr(reader, "pooler_asking", None)
    if kept is not None:
        del reader.pooler_asking  # type: ignore[attr-defined]
        found: tuple[bytes, bytes] = await kept
        return found
    head = await reader.readexactly(5)
    (length,) = struct.unpack("!i", head[1:])
    return head[:1], head + await reader.readexactly(length - 4)
