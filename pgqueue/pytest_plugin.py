"""The fixtures for tests of applications: `pgqueue_db`, `pgqueue_conn`, `pgqueue_drain` and others.

pytest finds this module by its entry point, in every project that has pgqueue installed. Until a test asks for one of
the fixtures, it imports only pytest and does nothing.

The server is that of PGQUEUE_TEST_DSN; there, databases named pgqueue_… are made and dropped. Without this variable it
is an embedded server (extra `embedded`) in a temporary directory. It is started and migrated once per run; each test
gets a copy of the database.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import psycopg

    from pgqueue.testing import Clock, Drained

# Nothing here outlives the run: no flush to disk is needed.
SETTINGS = {"fsync": "off", "full_page_writes": "off", "synchronous_commit": "off", "max_connections": "200"}
FOR_TESTS = "for these tests: PGQUEUE_TEST_DSN=postgresql://… with a role that may make databases"
LINGER = 3  # this many used databases are kept until later tests drop them


class Databases:
    """Makes databases on one server, named after our session there, so that runs side by side do not meet.

    A used database is dropped a few tests later. Right after its test its sessions are still ending, and DROP DATABASE
    would wait for them. `strategy` is how CREATE DATABASE copies; None leaves that to the server.
    """

    def __init__(self, dsn: str, strategy: str | None = None) -> None:
        import psycopg

        self._dsn = dsn
        self._strategy = f" STRATEGY {strategy}" if strategy else ""
        self._admin = psycopg.connect(dsn, autocommit=True)
        self._prefix = f"pgqueue_run_{self._admin.info.backend_pid}"
        self._made = 0
        self._left: list[str] = []
        self._template: str | None = None

    def close(self) -> None:
        """Drop the databases that are left, and disconnect."""
        if self._template is not None:
            self._left.append(self._template)
        self._drop_left(0)
        self._admin.close()

    @property
    def template(self) -> str:
        """The name of a migrated database. Copy it, never connect to it."""
        if self._template is None:
            from pgqueue.database import migrations

            name = self._create("template0")
            migrations.migrate(self.address(name))
            self._template = name
        return self._template

    @contextmanager
    def copy(self, template: str | None = None) -> Iterator[str]:
        """Make a copy of `template` (default: the migrated database), give its DSN, and drop it later."""
        name = self._create(template or self.template)
        try:
            yield self.address(name)
        finally:
            self._left.append(name)

    def address(self, name: str) -> str:
        """The DSN of that database, as a URL: psycopg, psycopg2, asyncpg and SQLAlchemy read it alike."""
        from urllib.parse import quote, urlencode

        from psycopg.conninfo import conninfo_to_dict

        given = {key: str(value) for key, value in conninfo_to_dict(self._dsn).items() if value is not None}
        user, password = quote(given.pop("user", ""), safe=""), quote(given.pop("password", ""), safe="")
        account = f"{user}{password and f':{password}'}@" if user else ""
        rest = {key: value for key, value in given.items() if key != "dbname"}
        return f"postgresql://{account}/{name}?{urlencode(rest, quote_via=quote, safe='/,:')}"

    def _create(self, template: str) -> str:
        self._drop_left(LINGER)
        self._made += 1
        name = f"{self._prefix}_{self._made}"
        import psycopg

        try:
            self._admin.execute(f"CREATE DATABASE {name} TEMPLATE {template}{self._strategy}".encode())
        except psycopg.errors.InsufficientPrivilege as error:
            error.add_note(FOR_TESTS)
            raise
        return name

    def _drop_left(self, linger: int) -> None:
        """Drop the oldest used databases, until only `linger` are left."""
        while len(self._left) > linger:
            self._admin.execute(f"DROP DATABASE IF EXISTS {self._left.pop(0)} WITH (FORCE)".encode())


@pytest.fixture(scope="session")
def pgqueue_databases() -> Iterator[Databases]:
    """The server of the run. Tests do not use it: they ask for `pgqueue_db`."""
    with ExitStack() as stack:
        databases = _databases(stack)
        stack.callback(databases.close)
        yield databases


@pytest.fixture
def pgqueue_db(pgqueue_databases: Databases, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The DSN of a migrated database that only this test uses. It is the configured one while the test lasts."""
    from pgqueue import config

    with pgqueue_databases.copy() as dsn:
        configured = {name: value for name, value in config._configured.items() if name != "listen_dsn"}
        monkeypatch.setattr(config, "_configured", {**configured, "dsn": dsn})
        monkeypatch.setattr(config, "_find_database_of_tests", lambda: config.DatabaseOfTests(dsn))
        monkeypatch.delenv("PGQUEUE_LISTEN_DSN", raising=False)
        yield dsn


@pytest.fixture
def pgqueue_conn(pgqueue_db: str) -> Iterator[psycopg.Connection[tuple[Any, ...]]]:
    """A psycopg connection to `pgqueue_db`, in a transaction that is rolled back after the test."""
    import psycopg

    conn = psycopg.connect(pgqueue_db)
    yield conn
    conn.close()


@pytest.fixture
def pgqueue_drain(pgqueue_conn: psycopg.Connection[tuple[Any, ...]]) -> Callable[..., Drained]:
    """`pgqueue.testing.drain` on `pgqueue_conn`: `pgqueue_drain()`, or `pgqueue_drain(clock)`."""
    from pgqueue.testing import drain

    def drain_here(clock: Clock | None = None, **options: Any) -> Drained:
        return drain(pgqueue_conn, clock, **options)

    return drain_here


@pytest.fixture
def pgqueue_url(pgqueue_db: str) -> str:
    """The URL of `pgqueue_db` for SQLAlchemy, with the driver psycopg; for asyncpg replace `+psycopg` by `+asyncpg`."""
    return pgqueue_db.replace("postgresql://", "postgresql+psycopg://", 1)


@pytest.fixture
def pgqueue_worker(pgqueue_db: str) -> Iterator[Callable[..., None]]:
    """Starts a real worker on `pgqueue_db`, in a thread: `pgqueue_worker()`, or `pgqueue_worker(task, …)`.

    It takes the tasks that are given, or all that are declared, and options of `pgqueue.Worker`. It is stopped at the
    end of the test; jobs that still run have its `grace`, else 5 s.
    """
    from functools import partial

    from pgqueue.testing.loop_thread import LoopThread
    from pgqueue.testing.worker import working

    with ExitStack() as stack:

        def start(*tasks: Any, **options: Any) -> None:
            loop = LoopThread(partial(working, pgqueue_db, tasks, options))
            stack.callback(loop.close)
            loop.value()

        yield start


@pytest.fixture
def pgqueue_aconn() -> None:
    """An async psycopg connection to `pgqueue_db`, in a transaction that is rolled back after the test."""
    pytest.fail(
        "pgqueue_aconn is an async fixture: it needs the plugin pytest-asyncio, or that of anyio", pytrace=False
    )


def pytest_configure(config: pytest.Config) -> None:
    """Replace `pgqueue_aconn` by the one that is async, if a plugin can run it. All plugins are loaded by now."""
    plugins = config.pluginmanager
    if plugins.has_plugin("asyncio"):
        import pytest_asyncio

        plugins.register(_async_fixture(pytest_asyncio.fixture), "pgqueue-async")
    elif plugins.has_plugin("anyio"):
        plugins.register(_async_fixture(pytest.fixture), "pgqueue-async")


def _async_fixture(make: Any) -> object:
    """A plugin with the async fixture, made by this decorator: pytest-asyncio runs only those of its own, if strict."""

    @make(name="pgqueue_aconn")  # type: ignore[untyped-decorator]
    async def aconn(pgqueue_db: str) -> AsyncIterator[psycopg.AsyncConnection[tuple[Any, ...]]]:
        """An async psycopg connection to `pgqueue_db`, in a transaction that is rolled back after the test."""
        import psycopg

        conn = await psycopg.AsyncConnection.connect(pgqueue_db)
        yield conn
        await conn.close()

    plugin = ModuleType("pgqueue_async_fixture")
    vars(plugin)["pgqueue_aconn"] = aconn
    return plugin


def _databases(stack: ExitStack) -> Databases:
    """Databases on the server that PGQUEUE_TEST_DSN names, else on an embedded one."""
    from pgqueue.config import normalize
    from pgqueue.database import embedded
    from pgqueue.errors import Error

    given = os.environ.get("PGQUEUE_TEST_DSN")
    if given:
        return Databases(normalize(given))
    directory = tempfile.mkdtemp(prefix="pgqueue-test-")
    try:
        started = stack.enter_context(embedded.start(directory, settings=SETTINGS, keep=False))
    except Error as error:
        shutil.rmtree(directory, ignore_errors=True)
        error.add_note(FOR_TESTS)
        raise
    return Databases(started.dsn)
