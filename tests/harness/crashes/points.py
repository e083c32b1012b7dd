"""Where a process can be made to die: before and after every statement it sends, by its own hand.

Used in forked children only (lives.py). `arm` turns pipelines off, so that the messages of a transaction go one
at a time, each with its own answer; and it stands in front of the two generators of psycopg through which every
statement goes, of sync and async connections alike. So a point needs no sleep and no guess, and no statement can be
forgotten: the worker's own, the handler's, the application's.

A point reads `session: statement side`; a statement may name itself, as in `/* debit */ UPDATE …`. Sides: `before` it
is sent; `sent`, the server has it and nobody reads the answer; `after`, the answer has been read and nobody has acted
on it. The last two exist for what commits: between two statements of a transaction "after" one is "before" the next.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import wraps
from pathlib import Path
from time import monotonic, sleep
from typing import Any
from weakref import WeakKeyDictionary

import psycopg
from psycopg import AsyncCursor
from psycopg._connection_base import BaseConnection
from psycopg._cursor_base import BaseCursor
from psycopg.pq import TransactionStatus

from pgqueue.database import statements
from pgqueue.database.pipeline import Wire
from pgqueue.worker.transactions.commit_message import answers
from pgqueue.worker.transactions.handler_connection import AsyncHandlerConnection, HandlerConnection, answered

LINE_MOST = 40  # points in a line: what several processes write to one pipe stays whole up to 4,096 bytes
NAMES = {statements.text(name, "pgqueue"): name for name in statements.names()}
OPENING = ("BEGIN", "RESET ROLE")
"""How messages begin that begin a transaction."""
BESIDE = ("election_", "scheduler_", "passed_over")
"""Statements that go with a claim now and then. Its COMMIT keeps the name of the claim."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens at the nth crossing of a point: the process kills itself, or cuts that connection and lives on, or
    crashes the server with this process id and lives on.

    `shutdown, *` is any point whose name begins so, `*` any at all.
    """

    point: str
    nth: int = 1
    cut: bool = False
    server: int = 0

    def meets(self, point: str) -> bool:
        return fnmatchcase(point, self.point)


def say(event: str, **facts: Any) -> None:
    """Report to the harness: one line, written at once."""
    os.write(1, (json.dumps({"event": event, **facts}) + "\n").encode())


class Points:
    """The points this process crosses, and the faults it meets there."""

    def __init__(self, life: int, faults: list[Fault]) -> None:
        self.seen: Counter[str] = Counter()
        self.phase = ""
        self.late: Callable[[], int] = lambda: 0
        """How many outcomes of this worker were fenced."""
        self.promised: list[int] = []
        """Tokens whose COMMIT has been answered."""
        self._life = life
        self._exact: defaultdict[str, list[Fault]] = defaultdict(list)  # there may be a hundred, at every crossing
        self._patterns: list[Fault] = []
        for fault in faults:
            (self._patterns if "*" in fault.point else self._exact[fault.point]).append(fault)
        self._met: Counter[Fault] = Counter()
        self._last: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
        self._lock = threading.Lock()

    def statement(self, conn: Any, sql: Any) -> Statement:
        """This statement, about to be sent on this connection."""
        if isinstance(sql, psycopg.sql.Composable):
            sql = sql.as_string(conn)
        text = sql.decode() if isinstance(sql, bytes) else str(sql)
        words = text.split()
        if text.startswith(OPENING):
            name = "BEGIN"
        else:
            name = NAMES.get(text) or " ".join(words[1:2] if words[0] == "/*" else words[:3]).strip(';"')
        idle = conn.pgconn.transaction_status == TransactionStatus.IDLE
        ends = name.startswith("COMMIT")
        if ends:
            name = f"COMMIT {self._last.get(conn, '')}".strip()
        elif name == "BEGIN":
            self._last[conn] = ""
        elif name != "sessions_settings" and not (self._last.get(conn) and name.startswith(BESIDE)):
            self._last[conn] = name
        session = (conn.pgconn.parameter_status(b"application_name") or b"").decode().removeprefix("pgqueue ")
        commits = ends or (idle and name != "BEGIN")
        return Statement(self, conn, f"{self.phase}{session}: {name}", commits)

    def cross(self, point: str, conn: Any = None) -> None:
        """We stand at this point."""
        with self._lock:
            self.seen[point] += 1
            for fault in *self._exact.get(point, ()), *(fault for fault in self._patterns if fault.meets(point)):
                self._met[fault] += 1
                if self._met[fault] == fault.nth:
                    self._meet(fault, point, conn)

    def say_seen(self) -> None:
        """Report the points crossed so far."""
        points = sorted(self.seen)
        for start in range(0, len(points), LINE_MOST):
            say("seen", life=self._life, points=points[start : start + LINE_MOST])

    def around(self, cls: type, name: str) -> None:
        """Make the beginning and the end of a method of the worker points, too."""
        real = getattr(cls, name)

        @wraps(real)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.cross(f"{self.phase}{cls.__name__}.{name} before")
            answer = real(*args, **kwargs)
            if hasattr(answer, "__await__"):
                return self._awaited(answer, f"{self.phase}{cls.__name__}.{name} after")
            self.cross(f"{self.phase}{cls.__name__}.{name} after")
            return answer

        setattr(cls, name, call)

    async def _awaited(self, answer: Any, point: str) -> Any:
        got = await answer
        self.cross(point)
        return got

    def _meet(self, fault: Fault, point: str, conn: Any) -> None:
        if fault.cut:
            say("cut", life=self._life, point=point)
            with socket.socket(fileno=os.dup(conn.pgconn.socket)) as link:
                link.shutdown(socket.SHUT_RDWR)
                while link.recv(65536):  # an answer that had come already is lost, too
                    pass
            return
        if fault.server:
            # Said first: while we wait, the lease may be over, and the run that stands here is stopped.
            say("crashed", life=self._life, point=point)
            os.kill(fault.server, signal.SIGQUIT)
            while _lives(fault.server):
                sleep(0.002)
            return
        say("killed", life=self._life, point=point, late=self.late(), promised=self.promised, at=monotonic())
        os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()  # other threads may run until the signal has arrived, this one not


@dataclass(frozen=True, slots=True)
class Statement:
    """One statement on its way."""

    points: Points
    conn: Any
    name: str
    commits: bool

    def cross(self, side: str) -> None:
        if side == "before" or self.commits:
            self.points.cross(f"{self.name} {side}", self.conn)


def _lives(pid: int) -> bool:
    """Whether this process lives: one that has ended and was not waited for has no command line any more."""
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except OSError:
        return False


def arm(points: Points) -> None:
    """From now on every statement of this process crosses its points."""
    execute, command = BaseCursor._execute_gen, BaseConnection._exec_command

    def execute_gen(cursor: Any, query: Any, *args: Any, **kwargs: Any) -> Generator[Any, Any, None]:
        statement = points.statement(cursor._conn, query)
        statement.cross("before")
        cursor._conn._crash_statement = statement
        yield from execute(cursor, query, *args, **kwargs)
        statement.cross("after")

    def exec_command(conn: Any, sql: Any, *args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        statement = points.statement(conn, sql)
        statement.cross("before")
        running = command(conn, sql, *args, **kwargs)
        try:
            wanted = next(running)
            statement.cross("sent")
            while True:
                wanted = running.send((yield wanted))
        except StopIteration as end:
            statement.cross("after")
            return end.value

    def crossing(conn: Any, message: bytes) -> Generator[Any, Any, Any]:
        """Send this as one message, and cross the points of all that may be lost by itself; the last answer."""
        if message.startswith(b"EXECUTE"):
            points.statement(conn, statements.text("complete_within", "pgqueue")).cross("before")
            statement = points.statement(conn, message.partition(b"; ")[2])
        else:
            statement = points.statement(conn, message)
        statement.cross("before")
        conn.pgconn.send_query(message)
        conn.pgconn.flush()
        statement.cross("sent")
        found = yield from answers(conn.pgconn)
        statement.cross("after")
        return found[-1]

    def last(conn: HandlerConnection, message: bytes) -> Any:
        with answered(conn):
            return conn.wait(crossing(conn, message))

    async def alast(conn: AsyncHandlerConnection, message: bytes) -> Any:
        with answered(conn):
            return await conn.wait(crossing(conn, message))

    def sends(name: str) -> None:
        real = getattr(BaseCursor, name)

        def send(cursor: Any, *args: Any, **kwargs: Any) -> None:
            real(cursor, *args, **kwargs)
            cursor._pgconn.flush()
            cursor._conn._crash_statement.cross("sent")

        setattr(BaseCursor, name, send)

    BaseCursor._execute_gen = execute_gen  # type: ignore[method-assign,assignment]
    BaseConnection._exec_command = exec_command  # type: ignore[method-assign,assignment]
    sends("_execute_send")
    sends("_send_query_prepared")
    HandlerConnection._last = last  # type: ignore[method-assign,assignment]
    AsyncHandlerConnection._last = alast  # type: ignore[method-assign,assignment]
    psycopg.Connection.pipeline = _no_pipeline  # type: ignore[method-assign,assignment]
    psycopg.AsyncConnection.pipeline = _no_async_pipeline  # type: ignore[method-assign,assignment]
    Wire.ask = _one_by_one  # type: ignore[method-assign,assignment]


async def _one_by_one(wire: Wire, messages: Sequence[statements.Statement[Any]]) -> list[list[statements.Row]]:
    """Each statement on its way by itself, by a cursor."""
    rows: list[list[statements.Row]] = []
    for message in messages:
        cursor = await AsyncCursor(wire).execute(message.sql, message.params or None, binary=True)
        rows.append(await cursor.fetchall() if cursor.description else [])
    return rows


@contextmanager
def _no_pipeline(conn: Any) -> Iterator[None]:
    yield


@asynccontextmanager
async def _no_async_pipeline(conn: Any) -> AsyncIterator[None]:
    yield
