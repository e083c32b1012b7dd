"""A worker's own connections: opened when first needed, opened again after they broke, independent of settings.

Every message of a worker is one pipeline and one READ COMMITTED transaction. It sets the settings that it needs, for
this transaction only. Defaults of role and database therefore cannot break a worker, and a transaction pooler cannot
mix it up with other clients. If a session is ours alone (known by its pid and its age), its settings are set once.

One default is an order, and is obeyed: `default_transaction_read_only`. A switchover sets it, so that nothing is
written to the old server any more. A session that may not write is closed at once, and opened anew until it may.

If a connection breaks with a message under way, its session in the server may not notice:
- The link may be dead. Then the server waits for the COMMIT for hours, with our rows locked. None of its own timeouts
  counts in the middle of a pipeline.
- The server may have the whole message. Then it commits the message when it comes to it.

A session in this state is called *left*. Before any session of this worker sends anything else, the left session is
ended, and its end is awaited. After that its transaction is committed or undone: a question about its outcome gets a
final answer, and no session waits for its locks. A session behind a pooler is not ours alone: it is not ended.

A server may freeze, and another one be promoted. So while a message is overdue, a new connection looks every second
which server can be written now. If it is another one, all sessions leave the frozen one (see primary).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from psycopg import AsyncConnection, Connection, Error, Notify, OperationalError, errors, sql
from psycopg.types.numeric import Int8BinaryLoader

from pgqueue.database import alarms, forks, notify_queue, primary, statements
from pgqueue.database.backoff import is_loss, one_line
from pgqueue.database.conninfo import connect_timeout
from pgqueue.database.dead_link import hang_up, opened
from pgqueue.database.outage import Outage
from pgqueue.database.pipeline import Wire
from pgqueue.database.primary import Primary
from pgqueue.database.sequences import advancing
from pgqueue.database.statements import Statement
from pgqueue.steady_clock import monotonic

log = logging.getLogger("pgqueue")

Identity = tuple[int, str]
"""(pid, backend_start): identifies a session for all time."""

# If a round trip takes longer than this, the link is dead: statement_timeout (30 s) would have answered before.
ROUND_TRIP_SECONDS = 45.0
OVERDUE_SECONDS = 2.0
"""A message without an answer for so long is overdue: no statement waits longer than this for a lock."""
AGAIN_SECONDS = 30.0
"""A session that was told to end, and has not ended, is told again after this time."""
LOOK_SECONDS = 1.0
"""While a message is overdue, a look ends or begins so often."""
# If the database is away, a session is opened again after this time at most.
PAUSE_MOST = 5.0
# A session that looks older than its connection by at most this time still counts as that connection's own.
TRAVEL_SECONDS = 1.0

BEGIN = Statement("BEGIN ISOLATION LEVEL READ COMMITTED", {}, lambda rows: None)
COMMIT = Statement("COMMIT", {}, lambda rows: None)
ROLLBACK = Statement("ROLLBACK", {}, lambda rows: None)


class ReadOnly(errors.ReadOnlySqlTransaction):
    """This session began read only. Nothing was done in it, and it is of no use any more."""

    def __init__(self, where: str = "here") -> None:
        super().__init__(f"default_transaction_read_only is on {where}, or it is a standby")


class Away(OperationalError):
    """No connection could be made for a job: the database takes none. Nothing was done."""


class Silent(OperationalError):
    """The connection was made, and no answer came in time. It is broken."""


class Replaced(OperationalError):
    """Nothing was sent: the connection that the message was made for has been replaced by another one."""


@dataclass(frozen=True, slots=True)
class Link:
    """The database of a worker's sessions, and how statements are sent there."""

    dsn: str
    schema: str
    prepare: bool = True
    left: set[Identity] = field(default_factory=set, compare=False, repr=False)
    """Sessions of this worker that lost their connection with a message under way, and were not ended yet."""
    stuck: dict[Identity, float] = field(default_factory=dict, compare=False, repr=False)
    """Those of them, and of its handlers, that have not ended in time: when they are told again, by `monotonic`."""
    outage: Outage = field(default_factory=Outage, compare=False, repr=False)
    """Which sessions of this worker are lost: it paces their connections."""
    primary: Primary = field(default_factory=Primary, compare=False, repr=False)
    """The server that the connections of this worker lead to."""

    def address(self) -> str:
        """The DSN to connect with now."""
        return self.primary.address(self.dsn)

    def statement(self, name: str, **params: object) -> Statement[list[tuple[Any, ...]]]:
        """The named statement of `sql/` with its parameters. Its answer is a list of its rows."""
        return Statement(statements.text(name, self.schema), params, list)

    def listen(self, channel: str) -> Statement[list[tuple[Any, ...]]]:
        """The LISTEN for this channel of the schema."""
        name = sql.Identifier(f"{self.schema}.{channel}")
        return Statement(sql.SQL("LISTEN {}").format(name).as_string(), {}, list)


class Session:
    """One connection of a worker. `run` sends statements as one transaction in one round trip.

    `opened` is awaited for each new connection before it is used: other workers must know its session before it holds a
    lock. If the database is away, the next call waits before it connects: 50 ms, growing to `most` seconds.
    """

    def __init__(
        self,
        link: Link,
        name: str,
        opened: Callable[[], Awaitable[object]] | None = None,
        *,
        most: float = PAUSE_MOST,
    ) -> None:
        self.link = link
        self._opened = opened
        self._most = most
        self.identity: Identity | None = None
        self.role = ""
        """The role of the last connection."""
        self.generation = 0
        """Number of connections this session has had. Facts learned on an earlier connection may be wrong on this."""
        self.ended = 0
        """Number of round trips that were answered or failed. No round trip hangs for ever."""
        self._answers = 0
        self.sent = 0.0
        """When the last message was sent, by `monotonic`."""
        self.took = 0.0
        """Seconds until the last answer, without the waits for our turn and for a connection."""
        self._heard_at: float | None = None
        """When this connection answered last; None if it has answered no message yet."""
        self._name = name
        self._connection: Wire | None = None
        self._server: str | None = None
        """When the server began that this session was connected to last."""
        self._turn = asyncio.Lock()
        self._noted = asyncio.Event()

    async def run(self, *messages: Statement[Any], on: int | None = None) -> list[Any]:
        """Send the statements in one transaction of their own; return the answer of each.

        Every error closes the connection: the next call starts on a new one. After one of psycopg's errors the
        transaction may have been committed or not. `on` is the generation of the only connection to use. If there is
        another one by now, OperationalError is raised, and nothing was sent.
        """
        return await self._send(messages, on=on)

    async def run_then(
        self, *messages: Statement[Any], then: Sequence[Statement[Any]], on: int | None = None
    ) -> list[Any]:
        """`run`, followed in the same round trip by `then`, in a transaction of its own; return all answers."""
        return await self._send(messages, then, on)

    async def _send(
        self, messages: Sequence[Statement[Any]], after: Sequence[Statement[Any]] = (), on: int | None = None
    ) -> list[Any]:
        async with self._turn:
            try:
                connection = await self._connected()
                if on not in (None, self.generation):
                    raise Replaced("what was to be sent was made for a connection that is not there any more")
                if self.link.left:
                    await end_left(connection, self.link)
                if self.link.stuck:
                    await tell_stuck(connection, self.link)
                return await self._exchange(connection, messages, after)
            except BaseException as error:
                await self.close()
                self._failed(error)
                raise
            finally:
                self.ended += 1

    async def _exchange(self, connection: Wire, messages: Sequence[Statement[Any]], after: Any) -> list[Any]:
        identity = self.identity  # kept here, because `close` may be called meanwhile
        self.sent = monotonic()
        self._noted.clear()
        try:
            answers = await send(connection, self.link, *messages, after=after)
        except BaseException as error:
            if identity is not None and not answered(error, connection):
                self.link.left.add(identity)
            raise
        self.took = monotonic() - self.sent
        self._answers += 1
        self.link.outage.answered(self._name)
        self._heard_at = monotonic()  # later than the end of the outage that it has ended
        return answers

    def _failed(self, error: BaseException) -> None:
        if is_loss(error) and not isinstance(error, Replaced):
            self.link.outage.lost(self._name, error, self._most, heard_at=self._heard_at)

    async def ready(self) -> int:
        """Connect if needed; return the generation of the connection that the next `run` will use."""
        if self._connection is None or self._connection.closed:
            async with self._turn:
                try:
                    await self._connected()
                except BaseException as error:
                    self._failed(error)
                    raise
        return self.generation

    def answers(self) -> int:
        """Number of round trips that were answered."""
        return self._answers

    @property
    def lasting(self) -> int | None:
        """The generation of the connection, if its session in the server is ours alone and began with it; else None.

        Then everything sent on it goes to the same server process. Behind a pooler it may not.
        """
        connection = self._connection
        return self.generation if connection is not None and connection.keeps else None

    async def stirs(self) -> None:
        """Wait until a notification comes or the connection breaks. After that call `run`."""
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
        """Close the connection for now, but not in the middle of a message. The next `run` opens another one."""
        async with self._turn:
            await self.close()

    async def close(self) -> None:
        """Close the connection at once, if there is one. A message under way fails."""
        connection, self._connection, self.identity = self._connection, None, None
        if connection is not None:
            await connection.close()

    def _note(self, _: Notify) -> None:
        self._noted.set()

    async def _connected(self) -> Wire:
        if self._connection is None or self._connection.closed:
            await self.link.outage.waited(self._name)
            self._heard_at, began = None, monotonic()
            self._connection = await connect(self.link, f"pgqueue {self._name}")
            self._connection.add_notify_handler(self._note)
            self.role = self._connection.info.user
            self.generation += 1
            try:
                self.identity = await identify(self._connection, self.link)
                if self.identity is not None and self.link.prepare:  # prepare=False is set for a pooler
                    await keep(self._connection, self.link, self.identity, began)
                await self._recognize(self._connection)
                if self._opened is not None:
                    await self._opened()
            except BaseException:  # else the next call would use a connection half set up and unknown to other workers
                await self.close()
                raise
        return self._connection

    async def _recognize(self, connection: Wire) -> None:
        """Have sequences advanced that lag, if this is another server than the one before: a switchover, a restart."""
        server = await writable(connection, self.link)
        if self._server not in (None, server):
            await send(connection, self.link, advancing(self.link.schema, whole=False))
        self._server = server


def options(link: Link, application_name: str) -> dict[str, Any]:
    """The options of a worker's connections: autocommit, statements prepared at first use, dead links noticed."""
    return connect_timeout(link.dsn) | {
        "autocommit": True,
        "application_name": application_name,
        "client_encoding": "utf8",
        "prepare_threshold": 0 if link.prepare else None,
        "keepalives_idle": 10,
        "keepalives_interval": 5,
        "keepalives_count": 3,
        "tcp_user_timeout": 20_000,
    }


async def connect(link: Link, application_name: str) -> Wire:
    """Open a connection in autocommit mode. Timestamps arrive as microseconds since 2000."""
    conn = await opened(primary.aconnect(Wire, link.address(), **options(link, application_name)))
    forks.cut_in_children(conn)
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

    If the server's NOTIFY queue is full, they are sent again without their NOTIFY; not if `after` may have met that,
    for then the first transaction may have been committed.
    If there is no answer within `patience` seconds, the connection is broken and OperationalError is raised.
    """
    first: list[Statement[Any]] = [BEGIN] if conn.keeps else [BEGIN, link.statement("sessions_settings")]
    seconds = ROUND_TRIP_SECONDS if patience is None else patience
    with overdue(conn, link, seconds):
        try:
            answers = await conn.ask(_message(first, messages, after))
        except Error as error:
            if not notify_queue.is_full(error) or notify_queue.notifies(after):
                raise
            answers = await conn.ask(_message(first, [notify_queue.silent(each) for each in messages], after))
    begin = len(first)
    rows = answers[begin : begin + len(messages)]
    if after:
        rows += answers[-1 - len(after) : -1]
    return [message.read(got) for message, got in zip((*messages, *after), rows, strict=True)]


@contextmanager
def overdue(conn: Wire, link: Link, seconds: float) -> Iterator[None]:
    """If this block lasts too long, look whether another server can be written now. After so many seconds the
    connection is broken anyhow."""
    loop = asyncio.get_running_loop()
    ends: list[asyncio.TimerHandle | asyncio.Future[None]] = []

    def begin() -> None:
        ends.append(loop.call_later(max(0.0, seconds - OVERDUE_SECONDS), hang_up, conn))
        if seconds > OVERDUE_SECONDS and not primary.is_local(link.dsn):
            ends.append(asyncio.ensure_future(_look_around(link)))

    ends.append(loop.call_later(min(seconds, OVERDUE_SECONDS), begin))
    try:
        yield
    finally:
        for each in ends:
            each.cancel()


async def _look_around(link: Link) -> None:
    """Look until cancelled. Of all sessions of a worker with an overdue message one looks at a time."""
    while True:
        began = monotonic()
        if link.primary.looking.acquire(blocking=False):
            try:
                await look(link)
            except (Error, OSError) as error:
                log.debug("no other server can be written: %s", one_line(error))
            finally:
                link.primary.looking.release()
        await asyncio.sleep(max(0.05, began + LOOK_SECONDS - monotonic()))


async def look(link: Link) -> None:
    """Connect anew. If that leads to another server that can be written, all connections to the one before break."""
    conn = await connect(link, "pgqueue look")
    try:
        await writable(conn, link, patience=OVERDUE_SECONDS)
    finally:
        await conn.close()


def _message(
    first: Sequence[Statement[Any]], messages: Sequence[Statement[Any]], after: Sequence[Statement[Any]]
) -> list[Statement[Any]]:
    return [*first, *messages, COMMIT, *((*first, *after, COMMIT) if after else ())]


@contextmanager
def transaction(conn: Connection[Any], link: Link) -> Iterator[None]:
    """A transaction of a worker on a sync connection in autocommit mode.

    If it takes too long, the link is dead: the connection is broken, and OperationalError is raised. After any error
    the connection is closed, which undoes the transaction. The driver's own blocks would log what they ignore then.
    """
    try:
        with alarms.after(ROUND_TRIP_SECONDS, partial(hang_up, conn)):
            conn.execute(BEGIN.sql)
            conn.execute(link.statement("sessions_settings").sql)
            yield
            conn.execute(COMMIT.sql)
    except BaseException:
        conn.close()
        raise


async def writable(conn: Wire, link: Link, where: str = "here", *, patience: float | None = None) -> str:
    """When the server of this connection began. Raises ReadOnly if nothing may be written on it.

    If it is another one than before, the worker's other connections leave theirs.
    """
    [[(server, read_only)]] = await send(conn, link, link.statement("sessions_server"), patience=patience)
    if read_only:
        raise ReadOnly(where)
    link.primary.met(conn, str(server))
    return str(server)


async def identify(conn: Wire, link: Link, *, patience: float | None = None) -> Identity | None:
    """The session of a connection; None if it is not ours alone."""
    [rows] = await send(conn, link, link.statement("sessions_identity"), patience=patience)
    return own(conn, rows)


async def keep(conn: Wire, link: Link, identity: Identity, began: float) -> None:
    """Set the settings of a worker's transactions once, if this session is no older than its connection, which was
    opened since `began`."""
    age = monotonic() - began + TRAVEL_SECONDS
    [kept] = await send(conn, link, link.statement("sessions_keep", pid=identity[0], seconds=age))
    conn.keeps = bool(kept)


def own(conn: AsyncConnection[Any] | Connection[Any], rows: Sequence[tuple[int, str]]) -> Identity | None:
    """The answer of `sessions_identity` if the session is ours alone, else None: poolers give clients a made-up pid."""
    return rows[0] if rows and rows[0][0] == conn.info.backend_pid else None


def answered(error: BaseException, conn: AsyncConnection[Any]) -> bool:
    """Whether the server itself has refused the message: then it is no longer under way."""
    return isinstance(error, Error) and error.sqlstate is not None and not conn.closed


async def end_left(conn: Wire, link: Link) -> None:
    """End the left sessions one after the other, and wait for the end of each, 10 s at most."""
    for left in list(link.left):
        [rows] = await send(conn, link, ending(link, left))
        if rows and rows[0][0] is False:  # the session has not ended in time, or just now by itself
            [rows] = await send(conn, link, ending(link, left))
        if rows and not rows[0][0]:
            log.warning(
                "session %d of this worker has lost its connection and could not be ended: its locks stay", left[0]
            )
            if rows[0][0] is False:  # else it is not ours to end
                link.stuck[left] = monotonic() + AGAIN_SECONDS
        link.left.discard(left)


async def tell_stuck(conn: Wire, link: Link) -> None:
    """Tell those sessions again to end whose time it is, and wait for none: messages would come late each time."""
    now = monotonic()
    for stuck, at in list(link.stuck.items()):
        if at <= now:
            link.stuck[stuck] = now + AGAIN_SECONDS
            tell = link.statement("sessions_tell", pid=stuck[0], backend_start=stuck[1])
            [rows] = await send(conn, link, tell)
            if rows in ([], [(None,)]):  # it is gone, or not ours to end any more
                link.stuck.pop(stuck, None)


def ending(link: Link, session: Identity) -> Statement[list[tuple[Any, ...]]]:
    """The statement that ends a session of ours, `sessions_end`."""
    return link.statement("sessions_end", pid=session[0], backend_start=session[1])
