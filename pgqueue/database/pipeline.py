"""A worker's messages, straight through libpq: some statements in one pipeline, one round trip, rows as they come.

Used by `sessions`, for all that a worker says on its own connections. psycopg still connects, reads values and knows
the errors; its cursors are left out, for they take more CPU of the client than all else that a message costs it.

Parameters travel as text and without a type: every statement of ours says itself what they are (`%(ids)s::bigint[]`).
So one text has one plan, whatever the values. With `prepares` it is parsed once on each connection, under our name.

Why answers cannot be mixed up: the answers to a pipeline end with its sync, and are read up to it, also if a statement
failed. If a call cannot read so far (it was cancelled, the link broke), it closes the connection, so there is no next
message on it. If the connection is closed while a call waits for an answer, that call is woken with an error.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
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
    """One connection of a worker; `ask` is how it talks."""

    prepares = True
    """Whether statements are prepared: not behind a pooler, where each transaction may have another session."""
    keeps = False
    """Whether its session has the settings of a worker's transactions, for as long as it lives."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._names: dict[str, bytes] = {}
        self._named = 0
        self._reading = Transformer(self)
        self._waiting: asyncio.Future[None] | None = None

    async def ask(self, messages: Sequence[Statement[Any]]) -> list[list[Row]]:
        """The rows of each of these statements, sent in one round trip.

        Raises what the server said of the first that failed: it executes none after that. OperationalError if the link
        broke; then, and if anything else is raised, the connection is closed.
        """
        async with self.lock:
            if self.closed:
                raise OperationalError("the connection is closed")
            known, answers = dict(self._names), list[list[Row]]()
            failed: Error | None = None
            try:
                self.pgconn.enter_pipeline_mode()
                sent = [self.put(message) for message in messages]
                self.pgconn.pipeline_sync()
                await self._flush()
                try:
                    answers = [await self._answer(parts) for parts in sent]
                except Refused as refused:
                    failed = refused.error
                while (result := await self._result()) is None or result.status != ExecStatus.PIPELINE_SYNC:
                    if self.pgconn.status != ConnStatus.OK:  # libpq has given up, and would answer nothing for ever
                        raise OperationalError("the connection is lost")
                self.pgconn.exit_pipeline_mode()
                self._hear()  # what came behind the last answer was read with it: nothing would announce it
            except BaseException as error:
                self.pgconn.finish()
                if failed is not None and isinstance(error, OperationalError):  # it was the server's last word
                    raise failed from None
                raise
            if failed is not None:
                self._names = known  # those that this message brought may have been left out
                raise failed
            return answers

    def put(self, message: Statement[Any]) -> int:
        """Put a statement into the message that is made; how many answers it will have."""
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

    async def close(self) -> None:
        """Close it; a call that waits for an answer gets an OperationalError."""
        waiting = self._waiting
        if waiting is not None and not waiting.done():
            waiting.set_exception(OperationalError("the connection was closed before the answer had come"))
        self._unwatch()  # before another file has its number
        await super().close()

    async def _answer(self, parts: int) -> list[Row]:
        result: PGresult | None = None
        for _ in range(parts):
            result = await self._result()
            if result is None:
                raise OperationalError("no answer")
            if result.status not in _GOOD:
                error = error_from_result(result)
                # Without a code it is not the server's word, but libpq's: it has lost the link, or its thread.
                raise OperationalError(str(error)) if error.sqlstate is None else Refused(error)
            await self._result()  # each ends with nothing
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
            self._take_in()  # a server that waits to be heard takes no more

    def _take_in(self) -> None:
        self.pgconn.consume_input()
        self._hear()

    def _hear(self) -> None:
        while (note := self.pgconn.notifies()) is not None:
            if self.pgconn.notify_handler is not None:
                self.pgconn.notify_handler(note)

    async def _stirs(self, *, writing: bool) -> None:
        """Wait until there is something to read, or, if wanted, room to write."""
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
    """A statement failed; what the server said of it."""

    def __init__(self, error: Error) -> None:
        self.error = error


def _wake(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)


@cache
def compiled(sql: str) -> tuple[bytes, tuple[str, ...]]:
    """The statement with the server's places ($1) instead of psycopg's (`%(name)s`), and the names that have them."""
    text, names = placed(sql)
    return text.encode(), names


def literal(value: object) -> bytes | None:
    """A value as the server reads it. DataError for text it cannot store, TypeError for what no statement takes."""
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
    if "\0" in value:  # the server would take what comes before it for the whole
        raise DataError("PostgreSQL text cannot contain NUL (0x00)")
    return value
