"""A worker's own connections: opened when first needed, opened again when they broke, dependent on no setting.

Every message of a worker is one pipeline, one READ COMMITTED transaction, that sets what it needs for itself only: so
the defaults of role and database cannot break a worker, and a transaction pooler cannot mix it up with its
neighbours. A session that is ours alone, by its pid and its age, has them set once instead.

A connection that breaks with a message under way leaves a session in the server that may not have noticed: the wire
went dead, and the server waits for the COMMIT, for hours, with our rows locked (no timeout of its own counts in the
middle of a pipeline); or it has all of the message, and commits it when it comes to it. So such a session is *left*:
before anything else is sent, on whichever session of this worker, it is ended, and waited for. Then what it was doing
is committed or undone: a question about its outcome gets an answer that holds, and no session waits for its locks.
That takes a way past poolers: a session that is not ours alone is not ended.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from psycopg import AsyncConnection, Connection, Error, Notify, OperationalError
from psycopg.types.numeric import Int8BinaryLoader

from pgqueue.database import statements
from pgqueue.database.pipeline import Wire
from pgqueue.database.statements import Statement

log = logging.getLogger("pgqueue")

Identity = tuple[int, str]
"""(pid, backend_start): a session, unmistakably."""

# A round trip that takes longer than this is taken for a dead link: statement_timeout (30 s) has long answered.
ROUND_TRIP_SECONDS = 45.0
# So much older than its connection a session may be when it is asked, and be that connection's own.
TRAVEL_SECONDS = 1.0

BEGIN = Statement("BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE", {}, lambda rows: None)
COMMIT = Statement("COMMIT", {}, lambda rows: None)


@dataclass(frozen=True, slots=True)
class Link:
    """Where a worker's sessions go, and how statements are sent there."""

    dsn: str
    schema: str
    prepare: bool = True
    left: set[Identity] = field(default_factory=set, compare=False, repr=False)
    """Sessions of this worker that lost their connection with something under way, and have not been ended yet."""

    def statement(self, name: str, **params: object) -> Statement[list[tuple[Any, ...]]]:
        """The named statement of `sql/` with its parameters; its answer is the rows as they come."""
        return Statement(statements.text(name, self.schema), params, list)


class Session:
    """One connection of a worker. `run` sends statements as one transaction in one round trip.

    `opened` is awaited for each new connection before it is used: other workers must know its session before
    it holds a lock.
    """

    def __init__(self, link: Link, name: str, opened: Callable[[], Awaitable[object]] | None = None) -> None:
        self.link = link
        self._opened = opened
        self.identity: Identity | None = None
        self.generation = 0
        """How many connections this session has had; what was learned on an earlier one may not hold on this one."""
        self.ended = 0
        """How many round trips were answered or failed: none hangs for ever."""
        self.sent = 0.0
        """When the last message was sent, by `monotonic`."""
        self.took = 0.0
        """Seconds the last answer took, without the wait for our turn and for a connection."""
        self._name = name
        self._connection: Wire | None = None
        self._turn = asyncio.Lock()
        self._noted = asyncio.Event()

    async def run(self, *messages: Statement[Any], on: int | None = None) -> list[Any]:
        """Send the statements in one transaction of their own and return what each read.

        Whatever goes wrong closes the connection: the next call starts on a new one. psycopg's errors come through; the
        transaction may then have been committed or not. What was made for one connection, by its generation, is sent
        `on` no other: an OperationalError, and nothing was sent.
        """
        return await self._send(messages, on=on)

    async def run_then(
        self, *messages: Statement[Any], then: Sequence[Statement[Any]], on: int | None = None
    ) -> list[Any]:
        """`run`, and in the same round trip `then`, in a transaction of its own after that COMMIT; what each read."""
        return await self._send(messages, then, on)

    async def _send(
        self, messages: Sequence[Statement[Any]], after: Sequence[Statement[Any]] = (), on: int | None = None
    ) -> list[Any]:
        async with self._turn:
            try:
                connection = await self._connected()
                if on not in (None, self.generation):
                    raise OperationalError("what was to be sent was made for a connection that is not there any more")
                if self.link.left:
                    await end_left(connection, self.link)
                return await self._exchange(connection, messages, after)
            except BaseException:
                await self.close()
                raise
            finally:
                self.ended += 1

    async def _exchange(self, connection: Wire, messages: Sequence[Statement[Any]], after: Any) -> list[Any]:
        identity = self.identity  # not there any more if `close` is called meanwhile
        self.sent = monotonic()
        self._noted.clear()
        try:
            answers = await send(connection, self.link, *messages, after=after)
        except BaseException as error:
            if identity is not None and not answered(error, connection):
                self.link.left.add(identity)
            raise
        self.took = monotonic() - self.sent
        return answers

    async def ready(self) -> int:
        """Connect if need be; the generation of the connection that the next `run` will use."""
        if self._connection is None or self._connection.closed:
            async with self._turn:
                await self._connected()
        return self.generation

    @property
    def lasting(self) -> int | None:
        """The generation of the connection, if its session in the server is ours alone and as young as it; else None.

        Then all that is sent on it goes to one server process, which began with it; behind a pooler it may not.
        """
        connection = self._connection
        return self.generation if connection is not None and connection.keeps else None

    async def stirs(self) -> None:
        """Wait until the server says something unasked: a notification came, or the connection broke. Then `run`."""
        connection, loop = self._connection, asyncio.get_running_loop()
        if connection is None or connection.closed:
            return
        file = connection.fileno()
        loop.add_reader(file, self._noted.set)
        try:
            await self._noted.wait()
        finally:
            loop.remove_reader(file)

    async def rest(self) -> None:
        """Give the connection back to the server for now; not in the middle of a message."""
        async with self._turn:
            await self.close()

    async def close(self) -> None:
        """Close the connection, if there is one, at once: a message under way fails."""
        connection, self._connection, self.identity = self._connection, None, None
        if connection is not None:
            await connection.close()

    def _note(self, _: Notify) -> None:
        self._noted.set()

    async def _connected(self) -> Wire:
        if self._connection is None or self._connection.closed:
            began = monotonic()
            self._connection = await connect(self.link, f"pgqueue {self._name}")
            self._connection.add_notify_handler(self._note)
            self.generation += 1
            try:
                self.identity = await identify(self._connection, self.link)
                if self.identity is not None and self.link.prepare:  # else there is a pooler, whatever it says
                    age = monotonic() - began + TRAVEL_SECONDS
                    keep = self.link.statement("sessions_keep", pid=self.identity[0], seconds=age)
                    [kept] = await send(self._connection, self.link, keep)
                    self._connection.keeps = bool(kept)
                if self._opened is not None:
                    await self._opened()
            except BaseException:  # else the next call would use it half set up, and unknown to others
                await self.close()
                raise
        return self._connection


def options(link: Link, application_name: str) -> dict[str, Any]:
    """How a worker's connections are made: autocommit, statements prepared at first use, dead links noticed."""
    return {
        "autocommit": True,
        "application_name": application_name,
        "client_encoding": "utf8",
        "prepare_threshold": 0 if link.prepare else None,
        "connect_timeout": 10,
        "keepalives_idle": 10,
        "keepalives_interval": 5,
        "keepalives_count": 3,
        "tcp_user_timeout": 20_000,
    }


async def connect(link: Link, application_name: str) -> Wire:
    """A connection in autocommit mode; timestamps arrive as microseconds since 2000, read only where asked for."""
    opening = asyncio.ensure_future(Wire.connect(link.dsn, **options(link, application_name)))
    try:
        conn = await asyncio.shield(opening)
    except asyncio.CancelledError:
        opening.add_done_callback(_finish)  # cancelled half-way, psycopg would leave the socket open
        raise
    conn.adapters.register_loader("timestamptz", Int8BinaryLoader)
    conn.prepares = link.prepare
    return conn


async def send(
    conn: Wire,
    link: Link,
    *messages: Statement[Any],
    after: Sequence[Statement[Any]] = (),
    patience: float | None = None,
) -> list[Any]:
    """Send the statements as one transaction in one round trip, with the settings of a worker's transactions.

    Without an answer within `patience` seconds the connection is broken: an OperationalError.
    """
    first = [BEGIN] if conn.keeps else [BEGIN, link.statement("sessions_settings")]
    seconds = ROUND_TRIP_SECONDS if patience is None else patience
    timer = asyncio.get_running_loop().call_later(seconds, hang_up, conn)
    try:
        answers = await conn.ask([*first, *messages, COMMIT, *((*first, *after, COMMIT) if after else ())])
    finally:
        timer.cancel()
    begin = len(first)
    rows = answers[begin : begin + len(messages)]
    if after:
        rows += answers[-1 - len(after) : -1]
    return [message.read(got) for message, got in zip((*messages, *after), rows, strict=True)]


def hang_up(conn: AsyncConnection[Any] | Connection[Any]) -> None:
    """Break a connection from outside: a call that waits for it, in any thread, gets an OperationalError at once."""
    with (
        suppress(OSError, OperationalError),
        _socket(conn) as link,
    ):  # errors: it broke by itself, or was closed just now
        link.shutdown(socket.SHUT_RDWR)


@contextmanager
def transaction(conn: Connection[Any], link: Link, *, pipeline: bool = False) -> Iterator[None]:
    """A transaction of a worker on a sync connection, as a pipeline if wanted.

    One that takes too long waits over a dead link: the connection is broken, an OperationalError. That holds to the
    last answer, so the pipeline is ours: leaving it is a round trip, too.
    """
    timer = threading.Timer(ROUND_TRIP_SECONDS, hang_up, [conn])
    timer.daemon = True
    timer.start()
    try:
        with conn.pipeline() if pipeline else nullcontext(), conn.transaction():
            conn.execute("SET TRANSACTION ISOLATION LEVEL READ COMMITTED, READ WRITE")
            conn.execute(link.statement("sessions_settings").sql)
            yield
    finally:
        timer.cancel()


async def identify(conn: Wire, link: Link, *, patience: float | None = None) -> Identity | None:
    """Which session a connection has, or None if it is not ours alone."""
    [rows] = await send(conn, link, link.statement("sessions_identity"), patience=patience)
    return own(conn, rows)


def own(conn: AsyncConnection[Any] | Connection[Any], rows: Sequence[tuple[int, str]]) -> Identity | None:
    """What `sessions_identity` answered, if the session is ours alone: a pooler makes up the pid it tells clients."""
    return rows[0] if rows and rows[0][0] == conn.info.backend_pid else None


def answered(error: BaseException, conn: AsyncConnection[Any]) -> bool:
    """Whether the server itself has refused what was sent, so that there is nothing under way any more."""
    return isinstance(error, Error) and error.sqlstate is not None and not conn.closed


async def end_left(conn: Wire, link: Link) -> None:
    """End the sessions that were left, one after the other, and wait until they have ended, 10 s at most for each."""
    for left in list(link.left):
        [rows] = await send(conn, link, ending(link, left))
        if rows and rows[0][0] is False:  # it has not ended in time, or just now by itself
            [rows] = await send(conn, link, ending(link, left))
        if rows and not rows[0][0]:
            log.warning(
                "session %d of this worker, which broke off, could not be ended: what it holds is locked", left[0]
            )
        link.left.discard(left)


def ending(link: Link, session: Identity) -> Statement[list[tuple[Any, ...]]]:
    """What ends a session of ours; it answers as `sessions_end` does."""
    return link.statement("sessions_end", pid=session[0], backend_start=session[1])


def _socket(conn: AsyncConnection[Any] | Connection[Any]) -> socket.socket:
    """The connection's socket under a second handle; of what kind it is does not matter to a shutdown."""
    return socket.fromfd(conn.fileno(), socket.AF_INET, socket.SOCK_STREAM)


def _finish(opening: asyncio.Future[Wire]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().pgconn.finish()
