"""A worker's messages, sent directly through libpq: several statements in one pipeline and one round trip.

Used by `sessions`, for everything that a worker sends on its own connections. psycopg still connects, reads values and
knows the errors. Its cursors are not used: they take more of the client's CPU than the rest of a message.

Parameters are sent as text and without a type: every statement of ours names their types (`%(ids)s::bigint[]`). One
text has therefore one plan for all values. With `prepares` it is parsed once on each connection, under our name.

Why answers cannot be mixed up:
1. The answers to a pipeline end with its sync. They are read up to it, also if a statement failed.
2. If a call cannot read that far, because it was cancelled or the link broke, it closes the connection. No other
   message follows on it.
3. If the connection is closed while a call waits for an answer, that call gets an error.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

from psycopg import AsyncConnection, DataError, Error, OperationalError
from psycopg.adapt import Transformer
from psycopg.errors import error_from_result
from psycopg.pq import ConnStatus, ExecStatus, Format
from psycopg.pq.abc import PGresult

from pgqueue.database.drivers import placed
from pgqueue.database.statements import Row, Statement

_BARE = re.compile(r"(?!null$)[\w.:-]+", re.ASCII | re.IGNORECASE)
_GOOD = (ExecStatus.TUPLES_OK, ExecStatus.COMMAND_OK)


class Wire(AsyncConnection[Any]):
    """One connection of a worker. `ask` sends statements on it."""

    prepares = True
    """Whether statements are prepared. Not behind a pooler: each transaction may have another session there."""
    keeps = False
    """Whether the session has the settings of a worker's transactions, set once for all of its life."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._names: dict[str, bytes] = {}
        self._named = 0
        self._reading = Transformer(self)
        self._waiting: asyncio.Future[None] | None = None

    async def ask(self, messages: Sequence[Statement[Any]]) -> list[list[Row]]:
        """Send these statements in one round trip; return the rows of each.

        If a statement failed, the server's error is raised; the server executes none after it. If the link broke,
        OperationalError is raised. Then, and after any exception but a server's error, the connection is closed.
        """
        async with self.lock:
            if self.closed:
                raise OperationalError("the connection is closed")
            known, answers = dict(self._names), list[list[Row]]()
            failed: Error | None = None
            try:
                self.pgconn.enter_pipeline_mode()
                sent = [self.put(message) for message in messages]
                self._sync()
                await self._flush()
                try:
                    answers = [await self._answer(parts) for parts in sent]
                except Refused as refused:
                    failed = refused.error
                while (result := await self._result()) is None or result.status != ExecStatus.PIPELINE_SYNC:
                    if self.pgconn.status != ConnStatus.OK:  # libpq has given up: it would return nothing for ever
                        raise OperationalError("the connection is lost")
                self.pgconn.exit_pipeline_mode()
                self._hear()  # notifications behind the last answer were read with it: the socket stays silent for them
            except BaseException as error:
                self.pgconn.finish()
                if failed is not None and isinstance(error, OperationalError):  # the server's last answer
                    raise failed from None
                raise
            if failed is not None:
                self._names = known  # the server may not have prepared the new ones of this message
                raise failed
            return answers

    def put(self, message: Statement[Any]) -> int:
        """Add a statement to the message; return how many answers it will have."""
        command, places = compiled(message.sql) if message.params else (message.sql.encode(), ())
        values = [literal(message.params[place]) for place in places]
        if not self.prepares:
            self.pgconn.send_query_params(command, values, result_format=Format.BINARY)
            return 1
        name = self._names.get(message.sql)
        if name is not None:
            self.pgconn.send_query_prepared(name, values, result_format=Format.BINARY)
            return 1
        self._named += 1
        name = self._names[message.sql] = b"pgqueue_%d" % self._named
        self.pgconn.send_prepare(name, command)
        self.pgconn.send_query_prepared(name, values, result_format=Format.BINARY)
        return 2

    @contextmanager
    def hears(self) -> Iterator[asyncio.Future[None]]:
        """Have the loop read notifications as they come, with no task in between; `ask` reads them at other times.

        The future is done if the link broke, or if the connection was closed: it raises what happened. Nothing may be
        asked meanwhile: an answer would be read here.
        """
        loop, file = asyncio.get_running_loop(), self.pgconn.socket
        self._waiting = broken = loop.create_future()

        def readable() -> None:
            try:
                self._take_in()
            except Exception as error:  # a broken link has no socket any more: another one may get its number soon
                loop.remove_reader(file)
                if not broken.done():
                    broken.set_exception(error)

        loop.add_reader(file, readable)
        try:
            yield broken
        finally:
            if self._waiting is broken:  # else `close` has done it
                self._waiting = None
                if not broken.done():  # else the number may be another socket's by now
                    loop.remove_reader(file)

    async def close(self) -> None:
        """Close the connection. A call that waits for an answer gets an OperationalError."""
        waiting = self._waiting
        if waiting is not None and not waiting.done():
            waiting.set_exception(OperationalError("the connection was closed before the answer had come"))
        self._unwatch()  # before another file gets the socket's number
        await super().close()

    def _sync(self) -> None:
        """End the message. If the link breaks here, psycopg says that there is no pipeline; libpq says why."""
        try:
            self.pgconn.pipeline_sync()
        except OperationalError as error:
            raise OperationalError(self.pgconn.get_error_message() or "the connection is lost") from error

    async def _answer(self, parts: int) -> list[Row]:
        result: PGresult | None = None
        for _ in range(parts):
            result = await self._result()
            if result is None:
                raise OperationalError("no answer")
            if result.status not in _GOOD:
                error = error_from_result(result)
                # An error without a code is libpq's own: the link is lost, or the protocol is out of step.
                raise OperationalError(str(error)) if error.sqlstate is None else Refused(error)
            await self._result()  # each answer ends with an empty result
        assert result is not None
        if result.status == ExecStatus.COMMAND_OK:
            return []
        self._reading.set_pgresult(result)
        return self._reading.load_rows(0, result.ntuples, tuple)

    async def _result(self) -> PGresult | None:
        while self.pgconn.is_busy():
            await self._stirs(writing=False)
            self._take_in()
        return self.pgconn.get_result()

    async def _flush(self) -> None:
        while self.pgconn.flush():
            await self._stirs(writing=True)
            self._take_in()  # a server whose answers are not read takes no more input

    def _take_in(self) -> None:
        self.pgconn.consume_input()
        self._hear()

    def _hear(self) -> None:
        while (note := self.pgconn.notifies()) is not None:
            if self.pgconn.notify_handler is not None:
                self.pgconn.notify_handler(note)

    async def _stirs(self, *, writing: bool) -> None:
        """Wait until the socket can be read, or with `writing` also written."""
        loop, file = asyncio.get_running_loop(), self.pgconn.socket
        self._waiting = loop.create_future()
        loop.add_reader(file, _wake, self._waiting)
        if writing:
            loop.add_writer(file, _wake, self._waiting)
        try:
            await self._waiting
        finally:
            self._unwatch()

    def _unwatch(self) -> None:
        if self._waiting is not None:
            loop, self._waiting = self._waiting.get_loop(), None
            loop.remove_reader(self.pgconn.socket)
            loop.remove_writer(self.pgconn.socket)


class Refused(Exception):
    """A statement failed; `error` is the server's."""

    def __init__(self, error: Error) -> None:
        self.error = error


def _wake(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)


@cache
def compiled(sql: str) -> tuple[bytes, tuple[str, ...]]:
    """The statement with the server's places ($1) instead of psycopg's (`%(name)s`), and the names for these places."""
    text, names = placed(sql)
    return text.encode(), names


def literal(value: object) -> bytes | None:
    """A value as the server reads it. Raises DataError for text it cannot store, TypeError for an unsupported type."""
    match value:
        case None:
            return None
        case bool():
            return b"t" if value else b"f"
        case int():
            return b"%d" % value
        case float():
            return str(value).encode()
        case str():
            return _text(value).encode()
        case list() | tuple():
            return ("{" + ",".join([_element(each) for each in value]) + "}").encode()
    raise TypeError(f"a statement cannot take {type(value).__name__}")


def _element(value: object) -> str:
    match value:
        case str():
            bare = _BARE.fullmatch(value)
            return value if bare else '"' + _text(value).replace("\\", "\\\\").replace('"', '\\"') + '"'
        case None:
            return "NULL"
        case bool():
            return "t" if value else "f"
        case int() | float():
            return str(value)
    raise TypeError(f"a statement cannot take a list of {type(value).__name__}")


def _text(value: str) -> str:
    if "\0" in value:  # the server would read the text only up to it
        raise DataError("PostgreSQL text cannot contain NUL (0x00)")
    return value
