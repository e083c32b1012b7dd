"""The fixtures of all tests: a real PostgreSQL, migrated once, and a copy of that database for every test.

They stand on the plugin that applications test with: its databases are made on our server, and its `pgqueue_db`,
`pgqueue_conn` and `pgqueue_drain` are for tests that need no worker. `dsn` is a migrated database of the test's own
(the configured one if it asks for `pgqueue_db`, too), `empty_dsn` an empty one, `conn` and `aconn` connections to
`dsn` (not autocommit), `eyes` looks at its queue. `own_server` is a server of the test's own, to stop, crash, restart.
"""

from __future__ import annotations

import sys

if LEAN := sys.dont_write_bytecode:  # before the imports below, which pytest compiles in its own way
    sys.dont_write_bytecode = False

import gc
import signal
from collections.abc import AsyncIterator, Generator, Iterator
from compileall import compile_dir
from pathlib import Path

import cases
import handlers
import psycopg
import pytest
from hypothesis import HealthCheck, settings
from servers import Server, embedded_server, shared_server
from workers import Eyes

import pgqueue
from pgqueue import config
from pgqueue.client import tasks
from pgqueue.pytest_plugin import Databases

pytest_plugins = ["promises"]

# The same examples each time, and no example fails because the machine is slow: the clock is not what they are about.
settings.register_profile(
    "pgqueue", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
settings.load_profile("pgqueue")

# Whoever starts the tests in the background of a shell has them ignore SIGINT, and all the processes they start, those
# that are to be interrupted among them.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# If PYTHONDONTWRITEBYTECODE is set (`LEAN`), each of a thousand processes would compile all that it imports. So the
# package and the helpers are compiled ahead, and the tests as they are collected. What a test writes and imports is
# not: a module that changes twice in a second would be taken for what it was.
HERE = Path(__file__).parent


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # one process for all
        for directory in (Path(pgqueue.__file__).parent, HERE / "harness"):
            compile_dir(directory, quiet=2)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is collected stays to the end, so no collection of garbage looks at it: that was two fifths of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_finish() -> None:
    sys.dont_write_bytecode = LEAN


@pytest.hookimpl(tryfirst=True)  # before -m looks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A long size of a test of the second stage is `long` only: `-m second` does not take it."""
    cases.choose(items)
    for item in items:
        if item.get_closest_marker("long"):
            item.own_markers[:] = [mark for mark in item.own_markers if mark.name != "second"]


@pytest.fixture(autouse=True)
def configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test configures ends with it."""
    monkeypatch.setattr(config, "_configured", dict(config._configured))


@pytest.fixture(autouse=True)
def declarations() -> Iterator[None]:
    """What tasks a test declares end with it: a worker without `tasks` serves all there are."""
    before, used = dict(tasks.registry), dict(tasks.used_limitings)
    yield
    tasks.registry.clear()
    tasks.registry.update(before)
    tasks.used_limitings.clear()
    tasks.used_limitings.update(used)


@pytest.fixture(autouse=True)
def begun_handlers() -> None:
    """No handler has begun yet in this test."""
    handlers.forget()


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """The server of the whole run."""
    running = shared_server()
    yield running
    running.end()


@pytest.fixture
def own_server() -> Iterator[Server]:
    """A server nobody else uses, for tests that stop it (0.7 s)."""
    running = embedded_server()
    yield running
    running.end()


@pytest.fixture(scope="session")
def pgqueue_databases(server: Server) -> Iterator[Databases]:
    """The plugin's, on our server."""
    made = Databases(server.dsn("postgres"), server.copy_strategy)
    yield made
    made.close()


@pytest.fixture
def dsn(request: pytest.FixtureRequest, pgqueue_databases: Databases) -> Iterator[str]:
    """A migrated database of the test's own; the configured one only if the test asks for `pgqueue_db`."""
    if "pgqueue_db" in request.fixturenames:
        yield request.getfixturevalue("pgqueue_db")
        return
    with pgqueue_databases.copy() as made:
        yield made


@pytest.fixture(scope="session")
def unchanged_dsn(pgqueue_databases: Databases) -> Iterator[str]:
    """A migrated database for all tests that change nothing: the server refuses every change."""
    with pgqueue_databases.copy() as made:
        with psycopg.connect(made, autocommit=True) as conn:
            conn.execute(f"ALTER DATABASE {conn.info.dbname} SET default_transaction_read_only = on".encode())
        yield made


@pytest.fixture
def empty_dsn(pgqueue_databases: Databases) -> Iterator[str]:
    """An empty database of the test's own."""
    with pgqueue_databases.copy("template0") as made:
        yield made


@pytest.fixture
def conn(dsn: str) -> Iterator[psycopg.Connection]:
    """A psycopg connection to `dsn`; what a test leaves open is rolled back."""
    connection = psycopg.connect(dsn)
    yield connection
    connection.close()


@pytest.fixture
def eyes(dsn: str) -> Iterator[Eyes]:
    """Looks at the queue of `dsn` from outside, each time in a new transaction."""
    looking = Eyes(dsn)
    yield looking
    looking.close()


@pytest.fixture
async def aconn(dsn: str) -> AsyncIterator[psycopg.AsyncConnection]:
    """An async psycopg connection to `dsn`."""
    connection = await psycopg.AsyncConnection.connect(dsn)
    yield connection
    await connection.close()
