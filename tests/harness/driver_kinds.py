"""Every kind of connection that an application may give to pgqueue."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass
from typing import Any

import asyncpg
import django.db
import django_settings
import psycopg
import psycopg2
import psycopg2.extensions
import psycopg2.extras
import pytest
import sqlalchemy
import sqlmodel
from django.db import connections as django_connections
from psycopg.conninfo import conninfo_to_dict
from psycopg.rows import dict_row, namedtuple_row
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker


@dataclass(frozen=True, slots=True)
class App:
    """An application's connection: what it gives to pgqueue, and its own way to execute, commit and roll back."""

    conn: Any
    execute: Callable[[str], Awaitable[Any]]
    commit: Callable[[], Awaitable[Any]]
    rollback: Callable[[], Awaitable[Any]]


Open = Callable[[str, bool], AbstractAsyncContextManager[App]]


def at_once(function: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
    """A plain function as one that can be awaited, which never really waits."""

    async def awaitable(*args: Any) -> Any:
        return function(*args)

    return awaitable


def rows_of(cursor: Any) -> list[Any]:
    return list(cursor.fetchall()) if cursor.description else []


def psycopg_kind(what: str = "connection", **options: Any) -> Open:
    @asynccontextmanager
    async def opened(dsn: str, autocommit: bool) -> AsyncIterator[App]:
        conn = psycopg.connect(dsn, autocommit=autocommit, **options)
        given = conn.cursor() if what == "cursor" else conn
        with closing(conn):
            yield App(
                given, at_once(lambda sql: rows_of(conn.execute(sql))), at_once(conn.commit), at_once(conn.rollback)
            )

    return opened


def psycopg_async_kind(what: str = "connection", **options: Any) -> Open:
    @asynccontextmanager
    async def opened(dsn: str, autocommit: bool) -> AsyncIterator[App]:
        conn = await psycopg.AsyncConnection.connect(dsn, autocommit=autocommit, **options)

        async def execute(sql: str) -> list[Any]:
            cursor = await conn.execute(sql)
            return await cursor.fetchall() if cursor.description else []

        try:
            yield App(conn.cursor() if what == "cursor" else conn, execute, conn.commit, conn.rollback)
        finally:
            await conn.close()

    return opened


def psycopg2_kind(what: str = "connection", **options: Any) -> Open:
    @asynccontextmanager
    async def opened(dsn: str, autocommit: bool) -> AsyncIterator[App]:
        conn = psycopg2.connect(dsn, **options)
        conn.autocommit = autocommit

        def execute(sql: str) -> list[Any]:
            with conn.cursor() as cursor:
                cursor.execute(sql)
                return rows_of(cursor)

        given = conn.cursor() if what == "cursor" else conn
        with closing(conn):
            yield App(given, at_once(execute), at_once(conn.commit), at_once(conn.rollback))

    return opened


def asyncpg_kind(*, pooled: bool = False) -> Open:
    @asynccontextmanager
    async def opened(dsn: str, autocommit: bool) -> AsyncIterator[App]:
        async with AsyncExitStack() as stack:
            if pooled:
                pool = await stack.enter_async_context(asyncpg.create_pool(**asyncpg_options(dsn), min_size=1))
                conn = await stack.enter_async_context(pool.acquire())
            else:
                conn = await asyncpg.connect(**asyncpg_options(dsn))
                stack.push_async_callback(conn.close)
            for name in ("json", "jsonb"):  # as many applications do: pgqueue passes text, so it must not matter
                await conn.set_type_codec(name, encoder=json.dumps, decoder=json.loads, schema="pg_catalog")
            transactions: list[Any] = []

            async def execute(sql: str) -> list[Any]:
                if not (autocommit or transactions or sql.startswith("SET SESSION")):
                    transactions.append(conn.transaction())
                    await transactions[0].start()
                return list(await conn.fetch(sql))

            async def commit() -> None:
                while transactions:
                    await transactions.pop().commit()

            async def rollback() -> None:
                while transactions:
                    await transactions.pop().rollback()

            yield App(conn, execute, commit, rollback)

    return opened


def sqlalchemy_kind(driver: str, what: str) -> Open:
    @asynccontextmanager
    async def opened(dsn: str, autocommit: bool) -> AsyncIterator[App]:
        options = {"isolation_level": "AUTOCOMMIT"} if autocommit else {}
        engine = sqlalchemy.create_engine(url(dsn, driver), **options)
        kinds: dict[str, Callable[[], Any]] = {
            "connection": engine.connect,
            "session": lambda: Session(engine),
            "scoped_session": lambda: scoped_session(sessionmaker(engine)),
            "sqlmodel": lambda: sqlmodel.Session(engine),
        }
        conn = kinds[what]()

        def execute(sql: str) -> list[Any]:
            run = conn.exec_driver_sql if what == "connection" else conn.connection().exec_driver_sql
            result = run(sql)
            return list(result) if result.returns_rows else []

        try:
            yield App(conn, at_once(execute), at_once(conn.commit), at_once(conn.rollback))
        finally:
            conn.close()
            engine.dispose()

    return opened


def sqlalchemy_async_kind(driver: str, what: str) -> Open:
    @asynccontextmanager
    async def opened(dsn: str, autocommit: bool) -> AsyncIterator[App]:
        options = {"isolation_level": "AUTOCOMMIT"} if autocommit else {}
        engine = create_async_engine(url(dsn, driver), **options)
        conn: Any
        if what == "connection":
            conn = await engine.connect()
        elif what == "session":
            conn = AsyncSession(engine)
        else:
            conn = async_scoped_session(async_sessionmaker(engine), asyncio.current_task)

        async def execute(sql: str) -> list[Any]:
            result = await (conn if what == "connection" else await conn.connection()).exec_driver_sql(sql)
            return list(result) if result.returns_rows else []

        try:
            yield App(conn, execute, conn.commit, conn.rollback)
        finally:
            await conn.close()
            await engine.dispose()

    return opened


def django_kind(what: str) -> Open:
    @asynccontextmanager
    async def opened(dsn: str, autocommit: bool) -> AsyncIterator[App]:
        wrapper = django_database(dsn)
        wrapper.set_autocommit(autocommit)

        def execute(sql: str) -> list[Any]:
            with wrapper.cursor() as cursor:
                cursor.execute(sql)
                return rows_of(cursor)

        given = {"connection": wrapper, "proxy": django.db.connection, "alias": "default"}[what]
        with closing(wrapper):
            yield App(given, at_once(execute), at_once(wrapper.commit), at_once(wrapper.rollback))

    return opened


def url(dsn: str, driver: str) -> sqlalchemy.URL:
    parts = conninfo_to_dict(dsn)
    query: dict[str, str] = {name: str(value) for name, value in parts.items() if name in ("host", "port")}
    password = None if parts.get("password") is None else str(parts["password"])
    return sqlalchemy.URL.create(
        f"postgresql+{driver}", str(parts["user"]), password, database=str(parts["dbname"]), query=query
    )


def asyncpg_options(dsn: str) -> dict[str, Any]:
    parts = conninfo_to_dict(dsn)
    names = {"host": "host", "port": "port", "user": "user", "password": "password", "dbname": "database"}
    return {names[name]: value for name, value in parts.items() if name in names}


def django_database(dsn: str) -> Any:
    """Django's connection "default", on this database."""
    django_settings.configure()
    parts = conninfo_to_dict(dsn)
    names = {"host": "HOST", "port": "PORT", "user": "USER", "password": "PASSWORD", "dbname": "NAME"}
    wrapper = django_connections["default"]
    wrapper.close()
    wrapper.settings_dict.update({names[name]: str(value) for name, value in parts.items() if name in names})
    return wrapper


SYNC: dict[str, Open] = {
    "psycopg": psycopg_kind(),
    "psycopg-dict_row": psycopg_kind(row_factory=dict_row),
    "psycopg-cursor": psycopg_kind("cursor", row_factory=namedtuple_row),
    "psycopg-client_cursor": psycopg_kind(cursor_factory=psycopg.ClientCursor),
    "psycopg-raw_cursor": psycopg_kind(cursor_factory=psycopg.RawCursor),
    "psycopg-unprepared": psycopg_kind(prepare_threshold=None),
    "psycopg-always_prepared": psycopg_kind(prepare_threshold=0),
    "psycopg2": psycopg2_kind(),
    "psycopg2-real_dict": psycopg2_kind(cursor_factory=psycopg2.extras.RealDictCursor),
    "psycopg2-dict_connection": psycopg2_kind(connection_factory=psycopg2.extras.DictConnection),
    "psycopg2-cursor": psycopg2_kind("cursor"),
    "sqlalchemy-psycopg": sqlalchemy_kind("psycopg", "connection"),
    "sqlalchemy-psycopg2": sqlalchemy_kind("psycopg2", "connection"),
    "session-psycopg": sqlalchemy_kind("psycopg", "session"),
    "session-psycopg2": sqlalchemy_kind("psycopg2", "session"),
    "scoped_session": sqlalchemy_kind("psycopg", "scoped_session"),
    "sqlmodel": sqlalchemy_kind("psycopg", "sqlmodel"),
    "django": django_kind("connection"),
    "django-proxy": django_kind("proxy"),
    "django-alias": django_kind("alias"),
}


ASYNC: dict[str, Open] = {
    "psycopg_async": psycopg_async_kind(),
    "psycopg_async-dict_row": psycopg_async_kind(row_factory=dict_row),
    "psycopg_async-cursor": psycopg_async_kind("cursor"),
    "psycopg_async-raw_cursor": psycopg_async_kind(cursor_factory=psycopg.AsyncRawCursor),
    "asyncpg": asyncpg_kind(),
    "asyncpg-pooled": asyncpg_kind(pooled=True),
    "sqlalchemy_async-psycopg": sqlalchemy_async_kind("psycopg", "connection"),
    "sqlalchemy_async-asyncpg": sqlalchemy_async_kind("asyncpg", "connection"),
    "async_session-psycopg": sqlalchemy_async_kind("psycopg", "session"),
    "async_session-asyncpg": sqlalchemy_async_kind("asyncpg", "session"),
    "async_scoped_session": sqlalchemy_async_kind("asyncpg", "scoped_session"),
}


KINDS = SYNC | ASYNC


def drive(kind: str, scenario: Coroutine[Any, Any, None]) -> None:
    """Run the scenario: in a loop for async kinds, without one for the others (Django refuses to run inside one)."""
    if kind in ASYNC:
        asyncio.run(scenario)
        return
    with pytest.raises(StopIteration):
        scenario.send(None)
