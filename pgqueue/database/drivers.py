"""Run a statement on a connection that the application already holds.

The client side (`enqueue`, `queries`, `JobHandle`) builds a `Statement` and runs it here on the caller's connection:
psycopg, psycopg2, asyncpg, SQLAlchemy (also SQLModel) or Django. The kind is recognised by the names of the
connection's classes: none of these libraries is imported for that. A kind is looked up once per type.

The statement joins the connection's transaction as it is. This module never commits, never rolls back and never changes
a setting of the connection. Only `connect` and `aconnect` open a connection, for callers that ask for it.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Awaitable, Callable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

from pgqueue.config import config
from pgqueue.database.conninfo import connect_timeout
from pgqueue.database.foreign_errors import said
from pgqueue.database.notify_queue import is_full, silent
from pgqueue.database.own_adapters import adapted
from pgqueue.database.statements import Row, Statement
from pgqueue.database.triggers import trigger_of
from pgqueue.errors import SchemaBehind, SchemaMissing, UnsupportedConnection
from pgqueue.options import no_option

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

    import psycopg

R = TypeVar("R")
Params = Mapping[str, object]
Run = Callable[[Any, str, Params], list[Row]]
ARun = Callable[[Any, str, Params], Awaitable[list[Row]]]

ACCEPTED = (
    "a connection or cursor of psycopg or psycopg2; a connection of asyncpg; a Connection, Session, AsyncConnection or "
    "AsyncSession of SQLAlchemy (on psycopg, psycopg2 or asyncpg); Django's connection or its alias"
)

_PLACEHOLDER = re.compile(r"%\((\w+)\)s|%%")
_BEHIND = {"42883", "42704"}  # undefined_function; undefined_object: a type
_MISSING = frozenset({"42P01", "3F000"})  # undefined_table, invalid_schema_name
_POOLED = (
    "a pooler is in between that cannot do prepared statements. A connection of psycopg needs prepare_threshold=None, "
    "pgqueue's own need PGQUEUE_PREPARE=off"
)
_NOTES = {
    "42501": "the role lacks a right. To enqueue it needs the rights of `pgqueue grants ROLE --for enqueue`; to read "
    "jobs and results, those of `--for read`, too; to change or replace jobs, those of `--for operate`, too",
    "42P05": _POOLED,
    "26000": _POOLED,
}
"""By SQLSTATE: what a server's error means here. The error stays the same."""


def run(conn: object, statement: Statement[R]) -> R:
    """Run the statement in the connection's transaction; return what the statement's `read` makes of its rows.

    Raises UnsupportedConnection and SchemaMissing. All other errors are the driver's own. If the statement is a
    transaction of its own, and the server's NOTIFY queue is full, it is sent again without its NOTIFY.
    """
    execute = _find(conn, _SYNC, _ASYNC)
    try:
        rows = execute(conn, statement.sql, statement.params)
    except Exception as error:
        if not _only_told_nothing(conn, error):
            _explain(error)
            raise
        rows = execute(conn, statement.sql, silent(statement).params)
    return statement.read(rows)


async def arun(conn: object, statement: Statement[R]) -> R:
    """`run` for async connections, and for Django, in the thread of Django's async methods (`acreate`)."""
    if is_django(conn):
        answer: R = await _in_thread_of_django(run, conn, statement)
        return answer
    execute = _find(conn, _ASYNC, _SYNC)
    try:
        rows = await execute(conn, statement.sql, statement.params)
    except Exception as error:
        if not _only_told_nothing(conn, error):
            _explain(error)
            raise
        rows = await execute(conn, statement.sql, silent(statement).params)
    return statement.read(rows)


def alone(conn: Any) -> bool:
    """Whether a statement on this connection is a transaction of its own: in autocommit mode, outside of a block.

    For a connection of SQLAlchemy only SQLAlchemy knows that: it counts as in a transaction. So does one of Django on a
    loop, whose statements are sent in another thread.
    """
    kind = _kind(conn.__class__) or ""
    if kind == "builtins.str":
        conn, kind = _of_alias(conn), "django.BaseDatabaseWrapper"
    if kind.startswith("asyncpg."):
        return not conn.is_in_transaction()
    if kind.startswith("django."):
        return running_loop() is None and bool(conn.get_autocommit())
    if not kind.startswith(("psycopg.", "psycopg2.")):
        return False
    driver = getattr(conn, "connection", conn)
    return bool(driver.autocommit and driver.info.transaction_status == 0)


def connect(**options: Any) -> psycopg.Connection[tuple[Any, ...]]:
    """Open a psycopg connection to the configured database. `options` are those of `psycopg.connect`.

    To connect with one host may take 10 s, unless `connect_timeout` is an option, or in the DSN or the environment.

    The caller owns it: `with pgqueue.connect() as conn:` commits at the end and closes it. Raises NotConfigured.

    As any connection of psycopg it begins a transaction at its first statement, also at one that only reads. An open
    transaction keeps the server from removing dead rows. So a loop that only reads asks for `autocommit=True`.
    """
    return connect_to(config().require_dsn(), **options)


def connect_to(dsn: str, **options: Any) -> psycopg.Connection[tuple[Any, ...]]:
    """`connect` to this database."""
    import psycopg

    from pgqueue.database import embedded

    options = _prepared(options, psycopg.connect)
    address = embedded.resolve(dsn)
    return psycopg.connect(address, **(connect_timeout(address) | options))


async def aconnect(**options: Any) -> psycopg.AsyncConnection[tuple[Any, ...]]:
    """`connect` for asyncio: `async with await pgqueue.aconnect() as conn:`. It, too, begins a transaction by itself: a
    loop that only reads asks for `autocommit=True`."""
    return await aconnect_to(config().require_dsn(), **options)


async def aconnect_to(dsn: str, **options: Any) -> psycopg.AsyncConnection[tuple[Any, ...]]:
    """`aconnect` to this database."""
    import psycopg

    from pgqueue.database import embedded

    options = _prepared(options, psycopg.AsyncConnection.connect)
    address = await embedded.aresolve(dsn)
    return await psycopg.AsyncConnection.connect(address, **(connect_timeout(address) | options))


def _prepared(options: dict[str, Any], connect: Callable[..., Any]) -> dict[str, Any]:
    import psycopg

    words = {word.decode() for one in psycopg.pq.Conninfo.get_defaults() for word in [one.keyword]}
    known = [name for name in inspect.signature(connect).parameters if name not in ("conninfo", "kwargs")]
    if unknown := options.keys() - words - set(known):
        raise no_option("connect", unknown, [*known, *sorted(words)])
    return {"client_encoding": "utf8"} | ({} if config().prepare else {"prepare_threshold": None}) | options


def is_django(conn: object) -> bool:
    """Whether this is a connection of Django, or its alias."""
    cls: Any = conn.__class__
    return _kind(cls) in _DJANGO


def check_connection(conn: object) -> None:
    """Raise UnsupportedConnection if this is no connection of any kind that pgqueue knows."""
    classes: list[Any] = [type(conn), conn.__class__]
    if all(_kind(cls) is None for cls in classes):
        raise UnsupportedConnection(_refusal(conn, is_async=False, other=False))


# Which kind -----------------------------------------------------------------------------------------------------------


def _find(conn: object, wanted: Mapping[str, Any], others: Mapping[str, Any]) -> Any:
    """The function that serves this connection, or UnsupportedConnection."""
    cls: Any = type(conn)
    kind = _kind(cls)
    if kind is None:  # an instrumenting proxy has the class it replaces in __class__
        cls = conn.__class__
        kind = _kind(cls)
    execute = None if kind is None else wanted.get(kind)
    if execute is None:
        raise UnsupportedConnection(_refusal(conn, is_async=wanted is _ASYNC, other=kind in others))
    return execute


@lru_cache(maxsize=256)
def _kind(cls: Any) -> str | None:
    """The first known name among this class and its bases, as `package.Class`."""
    names = (f"{base.__module__.partition('.')[0]}.{base.__name__}" for base in cls.__mro__)
    return next((name for name in names if name in _SYNC or name in _ASYNC), None)


def _refusal(conn: object, *, is_async: bool, other: bool) -> str:
    given = f"{type(conn).__module__}.{type(conn).__qualname__}"
    if not other:
        said = f"{given} is no connection pgqueue can use; give {ACCEPTED}, as the first argument"
        return f"{said}. In a handler it is job.enqueue(task, …)" if given == "pgqueue.jobs.job.Job" else said
    if is_async:
        return (
            f"{given} is not async: call the function without the a (enqueue, not aenqueue), from async code in a "
            f"thread. The async functions take {ACCEPTED}, of the async kinds, or of Django"
        )
    return (
        f"{given} is async: await the function with the a (aenqueue, not enqueue). "
        f"The plain functions take {ACCEPTED}, of the sync kinds"
    )


def _explain(error: Exception) -> None:
    """Raise SchemaMissing or SchemaBehind if the error means that; else add a note if there is one.

    SQLAlchemy and Django wrap the driver's error.

    A trigger of the application on our tables may lack a table of its own: its error stays as it is.
    """
    for each in (error, getattr(error, "orig", None), error.__cause__):
        state = getattr(each, "sqlstate", None) or getattr(each, "pgcode", None)
        if state in _MISSING and trigger_of(error) is None:
            schema = config().schema
            if ".outbox" in str(each):
                raise SchemaMissing(
                    f"this database has no outbox in schema {schema!r}: run `pgqueue migrate --outbox` against it; "
                    f"{said(each)}"
                ) from error
            raise SchemaMissing(
                f"this database has no pgqueue tables in schema {schema!r}: run `pgqueue migrate` against it, or name "
                f"the schema they are in (PGQUEUE_SCHEMA, pgqueue.configure(schema=…)); {said(each)}"
            ) from error
        if state in _BEHIND and f"{config().schema}." in str(each) and trigger_of(error) is None:
            raise SchemaBehind(
                f"schema {config().schema!r} of this database is older than this pgqueue: run `pgqueue migrate`; "
                f"{said(each)}"
            ) from error
        if state in _NOTES and trigger_of(error) is None:
            error.add_note(f"pgqueue: {_NOTES[state]}")
            return


def _only_told_nothing(conn: Any, error: Exception) -> bool:
    """Whether only the NOTIFY of a statement was refused, which was a transaction of its own.

    In a pipeline it may have been one with statements of the application.
    """
    if not is_full(error) or not alone(conn):
        return False
    return not getattr(getattr(getattr(conn, "connection", conn), "pgconn", None), "pipeline_status", 0)


# One function per kind ------------------------------------------------------------------------------------------------


def _tuples(_cursor: object) -> type[tuple[Any, ...]]:
    """psycopg's row factory for plain tuples, without importing it: the application may have set dicts."""
    return tuple


def _psycopg(conn: Any, sql: str, params: Params) -> list[Row]:
    cursor = conn.cursor(row_factory=_tuples)
    asked, values = numbered(sql, params) if is_raw(cursor.__class__) else (sql, params)
    cursor.execute(adapted(cursor, asked), values)
    return list(cursor.fetchall())


async def _psycopg_async(conn: Any, sql: str, params: Params) -> list[Row]:
    cursor = conn.cursor(row_factory=_tuples)
    asked, values = numbered(sql, params) if is_raw(cursor.__class__) else (sql, params)
    await cursor.execute(adapted(cursor, asked), values)
    return list(await cursor.fetchall())


def _psycopg_cursor(cursor: Any, sql: str, params: Params) -> list[Row]:
    """Run it on a new cursor: the application's cursor may hold rows that it has not read yet."""
    return _psycopg(cursor.connection, sql, params)


async def _psycopg_async_cursor(cursor: Any, sql: str, params: Params) -> list[Row]:
    return await _psycopg_async(cursor.connection, sql, params)


def _psycopg2(conn: Any, sql: str, params: Params) -> list[Row]:
    if conn.async_:
        raise UnsupportedConnection("a psycopg2 connection with async_=1 runs nothing by itself; give one without it")
    with conn.cursor(cursor_factory=sys.modules["psycopg2.extensions"].cursor) as cursor:
        cursor.execute(sql, params)
        return list(cursor.fetchall())


def _psycopg2_cursor(cursor: Any, sql: str, params: Params) -> list[Row]:
    return _psycopg2(cursor.connection, sql, params)


async def _asyncpg(conn: Any, sql: str, params: Params) -> list[Row]:
    text, values = numbered(sql, params)
    return [tuple(record) for record in await conn.fetch(text, *values)]


# The application may have set these for its own statements. A cursor on the server takes only a SELECT: ours would
# fail, and the transaction with it.
_PLAIN = {"stream_results": False, "yield_per": None, "no_parameters": False}


def _sqlalchemy(conn: Any, sql: str, params: Params) -> list[Row]:
    result = conn.exec_driver_sql(*_driver_sql(conn, sql, params), execution_options=_PLAIN)
    return [tuple(row) for row in result]


def _sqlalchemy_session(session: Any, sql: str, params: Params) -> list[Row]:
    return _sqlalchemy(session.connection(), sql, params)


async def _sqlalchemy_async(conn: Any, sql: str, params: Params) -> list[Row]:
    result = await conn.exec_driver_sql(*_driver_sql(conn, sql, params), execution_options=_PLAIN)
    return [tuple(row) for row in result]


async def _sqlalchemy_async_session(session: Any, sql: str, params: Params) -> list[Row]:
    return await _sqlalchemy_async(await session.connection(), sql, params)


def _driver_sql(conn: Any, sql: str, params: Params) -> tuple[str, Any]:
    """The statement with the driver's placeholders: SQLAlchemy's text() would take colons of casts for parameters."""
    driver = conn.dialect.driver
    if driver == "asyncpg":
        return numbered(sql, params)
    if driver in {"psycopg", "psycopg_async", "psycopg2"}:
        return sql, dict(params)
    raise UnsupportedConnection(
        f"SQLAlchemy on {conn.dialect.name}+{driver} is not supported; use postgresql+psycopg, +psycopg2 or +asyncpg"
    )


def _django(conn: Any, sql: str, params: Params) -> list[Row]:
    if conn.vendor != "postgresql":
        raise UnsupportedConnection(f"Django's database {conn.alias!r} is {conn.vendor}; pgqueue needs PostgreSQL")
    with conn.cursor() as cursor:
        cursor.execute(sql, params)
        return list(cursor.fetchall())


def _django_alias(alias: str, sql: str, params: Params) -> list[Row]:
    return _django(_of_alias(alias), sql, params)


def running_loop() -> AbstractEventLoop | None:
    """The loop that runs in this thread; None if none does."""
    from asyncio import _get_running_loop  # imported here: Django has imported it, others may do without

    return _get_running_loop()


def _of_alias(alias: str) -> Any:
    if "django" not in sys.modules:  # the given text is not shown: it may be a DSN with a password
        raise UnsupportedConnection(
            f"a str is a connection only as an alias of Django, which is not loaded; for a DSN use `with "
            f"pgqueue.connect() as conn`; give {ACCEPTED}"
        )
    from django.db import connections

    if alias not in connections.settings:
        raise UnsupportedConnection(f"Django has no database of this alias; it has {', '.join(connections)}")
    return connections[alias]


async def _in_thread_of_django(call: Callable[..., Any], conn: Any, *args: Any) -> Any:
    """Call this with the connection of the thread that has those of the async ORM.

    A connection of Django belongs to a thread, so only the alias of the given one counts.
    """
    alias = conn if isinstance(conn, str) else conn.alias
    _of_alias(alias)  # raises what is wrong with a text that is no alias
    from asgiref.sync import sync_to_async

    return await sync_to_async(call)(alias, *args)


@lru_cache(maxsize=64)
def is_raw(cursor: Any) -> bool:
    """True for psycopg's RawCursor, which takes $1 instead of %(name)s."""
    return any(base.__name__ == "RawCursorMixin" for base in cursor.__mro__)


def numbered(sql: str, params: Params) -> tuple[str, tuple[object, ...]]:
    """The statement with $1, $2 … instead of %(name)s, and its parameters in that order."""
    text, names = placed(sql)
    return text, tuple(params[name] for name in names)


@lru_cache(maxsize=256)
def placed(sql: str) -> tuple[str, tuple[str, ...]]:
    """The statement with $1, $2 … instead of %(name)s, and the names that belong to these places, in that order."""
    names: dict[str, int] = {}

    def place(found: re.Match[str]) -> str:
        return f"${names.setdefault(found[1], len(names) + 1)}" if found[1] else "%"

    return _PLACEHOLDER.sub(place, sql), tuple(names)


_SYNC: dict[str, Run] = {
    "psycopg.Connection": _psycopg,
    "psycopg.Cursor": _psycopg_cursor,
    "psycopg2.connection": _psycopg2,
    "psycopg2.cursor": _psycopg2_cursor,
    "sqlalchemy.Connection": _sqlalchemy,
    "sqlalchemy.Session": _sqlalchemy_session,
    "sqlalchemy.scoped_session": _sqlalchemy_session,
    "django.BaseDatabaseWrapper": _django,
    "django.ConnectionProxy": _django,
    "builtins.str": _django_alias,
}
_DJANGO = frozenset(("django.BaseDatabaseWrapper", "django.ConnectionProxy", "builtins.str"))
_ASYNC: dict[str, ARun] = {
    "psycopg.AsyncConnection": _psycopg_async,
    "psycopg.AsyncCursor": _psycopg_async_cursor,
    "asyncpg.Connection": _asyncpg,
    "asyncpg.PoolConnectionProxy": _asyncpg,
    "sqlalchemy.AsyncConnection": _sqlalchemy_async,
    "sqlalchemy.AsyncSession": _sqlalchemy_async_session,
    "sqlalchemy.async_scoped_session": _sqlalchemy_async_session,
}
