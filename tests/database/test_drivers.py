"""Every kind of connection an application may hold: the job is part of its transaction, exactly.

The table is kind x outcome x isolation. Each kind opens a connection the way its library's users do and yields an
`App`; a scenario is written once, as a coroutine: for async kinds it runs in a loop of its own, for the others it never
waits.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psycopg
import psycopg2
import psycopg2.extensions
import psycopg2.extras
import pytest
import sqlalchemy
from django.db import transaction as django_transaction
from driver_kinds import ASYNC, KINDS, App, asyncpg_options, django_database, drive, url
from psycopg.conninfo import conninfo_to_dict
from psycopg.pq import TransactionStatus
from psycopg_pool import ConnectionPool
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

import pgqueue
from pgqueue.database import drivers
from pgqueue.pytest_plugin import Databases

TASK = "app.receipt"
ISOLATIONS = ("read committed", "repeatable read", "serializable")
OUTCOMES = ("commit", "rollback", "savepoint rollback", "autocommit")
numbers = itertools.count(1)


# The kinds -----------------------------------------------------------------------------------------------------------


async def enqueue(kind: str, app: App, task: Any, **arguments: Any) -> pgqueue.JobHandle[Any]:
    if kind in ASYNC:
        return await pgqueue.aenqueue(app.conn, task, **arguments)
    return pgqueue.enqueue(app.conn, task, **arguments)


async def enqueue_many(kind: str, app: App, jobs: list[pgqueue.NewJob[Any]]) -> list[pgqueue.JobHandle[Any]]:
    if kind in ASYNC:
        return await pgqueue.aenqueue_many(app.conn, jobs)
    return pgqueue.enqueue_many(app.conn, jobs)


# The table -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Witness:
    """Another session, which sees what is committed."""

    conn: psycopg.Connection[Any]

    def jobs(self, *orders: int) -> list[int]:
        """Those of these orders that have a job."""
        return self._found("SELECT (args ->> 'order')::int FROM pgqueue.job", orders)

    def orders(self, *orders: int) -> list[int]:
        """Those of these orders that the application wrote."""
        return self._found("SELECT id FROM app_order", orders)

    def _found(self, sql: str, orders: tuple[int, ...]) -> list[int]:
        return sorted({row[0] for row in self.conn.execute(sql.encode())} & set(orders))


@pytest.fixture(scope="module")
def shop(pgqueue_databases: Databases) -> Iterator[str]:
    """One database for all tests of this module, with a table of the application."""
    with pgqueue_databases.copy() as dsn:
        with psycopg.connect(dsn) as conn:
            conn.execute("CREATE TABLE app_order (id integer PRIMARY KEY)")
        yield dsn


@pytest.fixture
def witness(shop: str) -> Iterator[Witness]:
    with psycopg.connect(shop, autocommit=True) as conn:
        yield Witness(conn)


@pytest.mark.promise("E01", "E04", "E07", "I13")
@pytest.mark.each_value
@pytest.mark.parametrize("isolation", ISOLATIONS)
@pytest.mark.parametrize("outcome", OUTCOMES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_job_shares_the_fate_of_its_transaction(
    shop: str, witness: Witness, kind: str, outcome: str, isolation: str
) -> None:
    async def scenario() -> None:
        async with KINDS[kind](shop, outcome == "autocommit") as app:
            await app.execute(f"SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL {isolation}")
            await app.commit() if outcome != "autocommit" else None
            kept, lost, late = (next(numbers) for _ in range(3))

            await buy(app, kept)
            assert await shown(app, "transaction_isolation") == isolation
            if outcome == "autocommit":
                assert witness.jobs(kept) == witness.orders(kept) == [kept]
                return
            if outcome == "savepoint rollback":
                await app.execute("SAVEPOINT here")
                await buy(app, lost)
                await app.execute("ROLLBACK TO SAVEPOINT here")
                await buy(app, late)

            assert witness.jobs(kept, lost, late) == witness.orders(kept, lost, late) == []
            await (app.rollback() if outcome == "rollback" else app.commit())
            there = {"commit": [kept], "rollback": [], "savepoint rollback": [kept, late]}[outcome]
            assert witness.jobs(kept, lost, late) == witness.orders(kept, lost, late) == there

    async def buy(app: App, order: int) -> None:
        await app.execute(f"INSERT INTO app_order VALUES ({order})")  # noqa: S608
        await enqueue(kind, app, TASK, order=order)

    async def shown(app: App, setting: str) -> Any:
        (row,) = await app.execute(f"SHOW {setting}")
        return next(iter(row.values() if isinstance(row, dict) else row))

    drive(kind, scenario())


@pytest.mark.promise("E07")
@pytest.mark.parametrize("kind", KINDS)
def test_every_statement_works_on_every_kind(shop: str, witness: Witness, kind: str) -> None:
    """One and many, at once and later, with awkward text; ids come back as plain ints, in order."""

    async def scenario() -> None:
        async with KINDS[kind](shop, True) as app:
            plain = pgqueue.remote(TASK)
            handles = [
                await enqueue(kind, app, plain, order=next(numbers), text=AWKWARD),
                await enqueue(kind, app, plain.using(delay=60, headers={"trace": AWKWARD}), order=next(numbers)),
                *await enqueue_many(kind, app, [plain.new(order=next(numbers), text=AWKWARD) for _ in range(3)]),
                *await enqueue_many(kind, app, [plain.using(delay=n * 60).new(order=next(numbers)) for n in range(3)]),
            ]
            ids = [handle.id for handle in handles]
            assert {type(number) for number in ids} == {int}
            assert await enqueue_many(kind, app, []) == []
            found = witness.conn.execute(
                """SELECT id, state, args ->> 'text', headers ->> 'trace' FROM pgqueue.job
                   WHERE id = ANY(%s) ORDER BY id""",
                [ids],
            ).fetchall()
            states = ["available", "scheduled", *["available"] * 3, "available", "scheduled", "scheduled"]
            assert [(row[0], row[1]) for row in found] == list(zip(ids, states, strict=True))
            assert [row[2] for row in found] == [AWKWARD, None, *[AWKWARD] * 3, None, None, None]
            assert found[1][3] == AWKWARD

    drive(kind, scenario())


@pytest.mark.promise("T13")
@pytest.mark.each_value
@pytest.mark.parametrize("outcome", OUTCOMES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_unique_key_is_taken_once_on_every_kind(shop: str, witness: Witness, kind: str, outcome: str) -> None:
    """One and many, by either key, replaced; in a transaction, and where each statement is one."""

    async def scenario() -> None:
        async with KINDS[kind](shop, outcome == "autocommit") as app:
            order = next(numbers)
            key = f"{order} {AWKWARD}"
            plain = pgqueue.remote(TASK)
            keyed = plain.using(unique=lambda **_: key, idempotency_key=key)
            await app.execute("SELECT 1")
            if outcome == "savepoint rollback":
                await app.execute("SAVEPOINT here")
            first = await enqueue(kind, app, keyed, order=order)
            again = [
                await enqueue(kind, app, keyed, order=order),
                await enqueue(kind, app, plain.using(idempotency_key=key), order=order),
                *await enqueue_many(kind, app, [keyed.new(order=order), keyed.new(order=order)]),
            ]
            assert first.created and again == [pgqueue.JobHandle(first.id, created=False)] * 4
            newest = plain.using(unique=pgqueue.Unique(lambda **_: key, on_duplicate="replace"), headers={"n": 2})
            replaced: pgqueue.JobHandle[Any] = pgqueue.JobHandle(first.id, created=False, replaced=True)
            assert await enqueue(kind, app, newest, order=order) == replaced
            assert await enqueue_many(kind, app, [newest.new(order=order)]) == [replaced]
            with pytest.raises(pgqueue.DuplicateJob):
                raising = pgqueue.Unique(lambda **_: key, on_duplicate="raise")
                await enqueue(kind, app, plain.using(unique=raising), order=order)
            if outcome == "savepoint rollback":
                await app.execute("ROLLBACK TO SAVEPOINT here")
            if outcome != "autocommit":
                await (app.rollback() if outcome == "rollback" else app.commit())
            there = outcome in ("commit", "autocommit")
            assert witness.jobs(order) == [order] * there
            assert (await enqueue(kind, app, keyed, order=order)).created != there
            await app.rollback()

    drive(kind, scenario())


AWKWARD = "100% :name %(task)s $1 \\ ' \" \n\t {} 'äöü' 日本 🙂"


# What libraries do beyond that ---------------------------------------------------------------------------------------


def test_django_atomic_blocks(shop: str, witness: Witness) -> None:
    kept, lost, outer = (next(numbers) for _ in range(3))
    wrapper = django_database(shop)

    class Undo(Exception):
        pass

    with django_transaction.atomic():
        pgqueue.enqueue(wrapper, TASK, order=kept)
        with pytest.raises(Undo), django_transaction.atomic():
            pgqueue.enqueue("default", TASK, order=lost)
            raise Undo
        assert witness.jobs(kept) == []
    with pytest.raises(Undo), django_transaction.atomic():
        pgqueue.enqueue(wrapper, TASK, order=outer)
        raise Undo
    wrapper.close()
    assert witness.jobs(kept, lost, outer) == [kept]


def test_session_begin_nested_and_the_orm(shop: str, witness: Witness) -> None:
    engine = sqlalchemy.create_engine(url(shop, "psycopg"))
    kept, lost = next(numbers), next(numbers)
    with Session(engine) as session, session.begin():
        pgqueue.enqueue(session, TASK, order=kept)
        with session.begin_nested() as nested:
            pgqueue.enqueue(session, TASK, order=lost)
            nested.rollback()
    engine.dispose()
    assert witness.jobs(kept, lost) == [kept]


@pytest.mark.promise("F222")
@pytest.mark.parametrize("driver", ["psycopg", "psycopg2", "asyncpg"])
@pytest.mark.parametrize("options", [{"stream_results": True}, {"yield_per": 10}, {"no_parameters": True}], ids=str)
async def test_execution_options_of_sqlalchemy_are_for_the_applications_statements(
    driver: str, options: dict[str, Any], shop: str, witness: Witness
) -> None:
    """With a cursor on the server an enqueue failed, and took the transaction with it."""
    kept, many = next(numbers), sqlalchemy.text("SELECT generate_series(1, 30)")
    if driver == "asyncpg":
        async_engine = create_async_engine(url(shop, driver)).execution_options(**options)
        async with async_engine.connect() as aconn:
            assert (await pgqueue.aenqueue(aconn, TASK, order=kept)).created
            assert [job.task for job in await pgqueue.afind(aconn, limit=1)] == [TASK]
            assert len([row async for row in await aconn.stream(many)]) == 30
            await aconn.commit()
        await async_engine.dispose()
    else:
        engine = sqlalchemy.create_engine(url(shop, driver)).execution_options(**options)
        with engine.connect() as conn:
            assert pgqueue.enqueue(conn, TASK, order=kept).created
            assert [job.task for job in pgqueue.find(conn, limit=1)] == [TASK]
            assert len(list(conn.execute(many))) == 30
            conn.commit()
        engine.dispose()
    assert witness.jobs(kept) == [kept]


async def test_run_sync_gives_a_sync_session_of_an_async_driver(shop: str, witness: Witness) -> None:
    engine = create_async_engine(url(shop, "asyncpg"))
    order = next(numbers)
    async with AsyncSession(engine) as session:
        await session.run_sync(lambda inner: pgqueue.enqueue(inner, TASK, order=order))
        await session.commit()
    await engine.dispose()
    assert witness.jobs(order) == [order]


def test_psycopg_transactions_pipelines_and_pools(shop: str, witness: Witness) -> None:
    blocks, piped, pooled = (next(numbers) for _ in range(3))
    with ConnectionPool(shop, min_size=1, open=True) as pool, pool.connection() as conn:
        pgqueue.enqueue(conn, TASK, order=pooled)
        with conn.transaction():
            pgqueue.enqueue(conn, TASK, order=blocks)
        with conn.pipeline():
            conn.execute("SELECT 1")
            handle = pgqueue.enqueue(conn, TASK, order=piped)
            assert handle.id > 0
    assert witness.jobs(blocks, piped, pooled) == [blocks, piped, pooled]


def test_the_cursor_given_keeps_its_rows(shop: str) -> None:
    with psycopg.connect(shop) as conn:
        cursor = conn.execute("SELECT generate_series(1, 3)")
        cursor.fetchone()
        pgqueue.enqueue(cursor, TASK, order=next(numbers))
        assert cursor.fetchall() == [(2,), (3,)]
        with conn.cursor(name="on_the_server") as named:
            named.execute("SELECT generate_series(1, 3)")
            pgqueue.enqueue(named, TASK, order=next(numbers))
            assert named.fetchall() == [(1,), (2,), (3,)]


def test_a_subclass_or_a_proxy_works_as_what_it_stands_for(shop: str) -> None:
    class Traced(psycopg.Connection[Any]):
        pass

    class Proxy:
        """As instrumentation makes them: everything of the wrapped object, also its class."""

        def __init__(self, wrapped: Any) -> None:
            self._wrapped = wrapped

        def __getattr__(self, name: str) -> Any:
            return getattr(self._wrapped, name)

        @property  # type: ignore[misc]
        def __class__(self) -> type:
            return type(self._wrapped)

    with Traced.connect(shop) as conn:
        assert pgqueue.enqueue(conn, TASK, order=next(numbers)).id
        assert pgqueue.enqueue(Proxy(conn), TASK, order=next(numbers)).id


# What is refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [None, 7, object(), {"dsn": "x"}, psycopg.Connection, sqlalchemy.create_mock_engine])
def test_what_is_no_connection_is_refused_with_what_is_accepted(wrong: object) -> None:
    with pytest.raises(pgqueue.UnsupportedConnection, match=rf"{type(wrong).__qualname__} is no connection.*psycopg2"):
        pgqueue.enqueue(wrong, TASK, order=1)


async def test_async_given_to_sync_names_aenqueue_and_the_reverse(shop: str) -> None:
    async with await psycopg.AsyncConnection.connect(shop) as conn:
        with pytest.raises(pgqueue.UnsupportedConnection, match=r"psycopg\.AsyncConnection is async.*aenqueue"):
            pgqueue.enqueue(conn, TASK, order=1)
        assert conn.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
    with psycopg.connect(shop) as plain, pytest.raises(pgqueue.UnsupportedConnection, match=r"is not async.*call"):
        await pgqueue.aenqueue(plain, TASK, order=1)


def test_other_databases_and_drivers_are_refused() -> None:
    engine = sqlalchemy.create_engine("sqlite://")
    with engine.connect() as conn, pytest.raises(pgqueue.UnsupportedConnection, match="sqlite"):
        pgqueue.enqueue(conn, TASK, order=1)
    engine.dispose()


def test_an_alias_django_does_not_have_is_refused_and_not_repeated(shop: str) -> None:
    django_database(shop)
    with pytest.raises(pgqueue.UnsupportedConnection, match="it has default") as refused:
        pgqueue.enqueue("postgresql://me:secret@db/shop", TASK, order=1)
    assert "secret" not in str(refused.value)


def test_an_asynchronous_psycopg2_connection_is_refused(shop: str) -> None:
    conn = psycopg2.connect(shop, async_=1)
    while conn.poll() != psycopg2.extensions.POLL_OK:
        pass
    with pytest.raises(pgqueue.UnsupportedConnection, match="async_"):
        pgqueue.enqueue(conn, TASK, order=1)
    conn.close()


@pytest.mark.parametrize(
    "kind", ["psycopg", "psycopg2", "session-psycopg", "django", "asyncpg", "async_session-asyncpg"]
)
def test_a_database_without_the_schema_says_what_to_do(empty_dsn: str, kind: str) -> None:
    async def scenario() -> None:
        async with KINDS[kind](empty_dsn, True) as app:
            with pytest.raises(pgqueue.SchemaMissing, match="pgqueue migrate") as missing:
                await enqueue(kind, app, TASK, order=1)
            assert missing.value.__cause__ is not None

    drive(kind, scenario())


# No library is imported ----------------------------------------------------------------------------------------------


def in_a_process(code: str) -> list[str]:
    """Run the code in a fresh interpreter; what it printed, as words."""
    done = subprocess.run([sys.executable, "-W", "error", "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_enqueue_imports_no_library_the_application_did_not_bring(shop: str) -> None:
    code = f"""
        import sys, pgqueue
        print("before", *sorted({{"psycopg", "psycopg2", "asyncpg", "sqlalchemy", "django"}} & set(sys.modules)))
        import psycopg
        with psycopg.connect({shop!r}) as conn:
            pgqueue.enqueue(conn, {TASK!r}, order=0)
            pgqueue.enqueue_many(conn, [pgqueue.remote({TASK!r}).new(order=0)])
        print("after", *sorted({{"psycopg2", "asyncpg", "sqlalchemy", "sqlmodel", "django"}} & set(sys.modules)))
    """
    assert in_a_process(code) == ["before", "after"]


def test_asyncpg_alone_needs_no_psycopg(shop: str) -> None:
    code = f"""
        import asyncio, sys
        sys.modules["psycopg"] = None
        import asyncpg, pgqueue
        async def main():
            conn = await asyncpg.connect(**{asyncpg_options(shop)!r})
            print((await pgqueue.aenqueue(conn, {TASK!r}, order=0)).created)
            await conn.close()
        asyncio.run(main())
    """
    assert in_a_process(code) == ["True"]


def test_django_on_psycopg2(shop: str) -> None:
    """Django takes psycopg2 where psycopg is not installed."""
    options = asyncpg_options(shop)
    code = f"""
        import sys
        sys.modules["psycopg"] = None
        from django.conf import settings
        settings.configure(DATABASES={{"default": {{
            "ENGINE": "django.db.backends.postgresql", "NAME": {options["database"]!r}, "USER": {options["user"]!r},
            "HOST": {options["host"]!r}, "PORT": {options["port"]!r}, "PASSWORD": {options.get("password")!r}}}}})
        import django
        django.setup()
        from django.db import connection, transaction
        import pgqueue
        with transaction.atomic():
            for given in connection, "default":
                print(pgqueue.enqueue(given, {TASK!r}, order=0).created)
        print(connection.Database.__name__)
        connection.close()
    """
    assert in_a_process(code) == ["True", "True", "psycopg2"]


# connect, and the small parts ----------------------------------------------------------------------------------------


async def test_connect_goes_to_the_configured_database(shop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGQUEUE_DSN", shop)
    with pgqueue.connect(autocommit=True) as conn:
        assert conn.info.dbname == conninfo_to_dict(shop)["dbname"] and conn.autocommit
    async with await pgqueue.aconnect() as aconn:
        assert aconn.info.dbname == conninfo_to_dict(shop)["dbname"]
    monkeypatch.setenv("PGQUEUE_PREPARE", "off")
    with pgqueue.connect() as conn:
        assert conn.prepare_threshold is None


def test_connect_without_a_dsn_names_the_ways_to_give_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PGQUEUE_DSN", raising=False)
    with pytest.raises(pgqueue.NotConfigured, match="PGQUEUE_DSN"):
        pgqueue.connect()


def test_numbered_placeholders_are_shared_by_equal_names() -> None:
    sql = "SELECT %(a)s::text, %(b)s::int, %(a)s::text, 5 %% 2"
    assert drivers.numbered(sql, {"b": 2, "a": "x"}) == ("SELECT $1::text, $2::int, $1::text, 5 % 2", ("x", 2))


@pytest.mark.promise("F75")
async def test_connect_and_aconnect_hold_a_transaction_unless_they_are_asked_not_to(
    shop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As psycopg's own do, and as the docs say. A loop that only reads would hold one snapshot for ever."""
    monkeypatch.setenv("PGQUEUE_DSN", shop)
    for autocommit, status in ((False, TransactionStatus.INTRANS), (True, TransactionStatus.IDLE)):
        with pgqueue.connect(autocommit=autocommit) as conn:
            conn.execute("SELECT 1")
            assert conn.info.transaction_status == status
        async with await pgqueue.aconnect(autocommit=autocommit) as aconn:
            await aconn.execute("SELECT 1")
            assert aconn.info.transaction_status == status
    with pgqueue.connect() as conn:
        assert not conn.autocommit
    async with await pgqueue.aconnect() as aconn:
        assert not aconn.autocommit
