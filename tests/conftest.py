"""The fixtures of all tests: a real PostgreSQL, migrated once, and a copy of that database for every test.

`dsn` is a migrated database of the test's own, `empty_dsn` an empty one, `conn` and `aconn` connections to `dsn` (not
autocommit), `eyes` looks at its queue. `own_server` is a server of the test's own, to stop, crash and restart.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from itertools import count

import psycopg
import pytest
from servers import Server, embedded_server, shared_server
from workers import Eyes

from pgqueue import migrations

pytest_plugins = ["promises"]


class Databases:
    """Makes and drops the tests' databases.

    A database is dropped when the next one is made: right after a test its sessions are still ending, and DROP DATABASE
    would wait 100 ms for them.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._admin = psycopg.connect(server.dsn("postgres"), autocommit=True)
        self._numbers = count(1)
        self._left: list[str] = []
        # Unique on a server shared with other runs.
        self._prefix = f"pgqueue_test_{self._admin.info.backend_pid}"

    def create(self, template: str = "template0") -> str:
        """Make a database like `template` (nobody may be connected to that one) and return its name."""
        self.drop_left()
        name = f"{self._prefix}_{next(self._numbers)}"
        self._admin.execute(
            f"CREATE DATABASE {name} TEMPLATE {template} STRATEGY {self._server.copy_strategy}".encode()
        )
        return name

    def leave(self, name: str) -> None:
        """The test is done with it."""
        self._left.append(name)

    def drop_left(self) -> None:
        while self._left:
            self._admin.execute(f"DROP DATABASE IF EXISTS {self._left.pop()} WITH (FORCE)".encode())

    def close(self) -> None:
        self.drop_left()
        self._admin.close()


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
def databases(server: Server) -> Iterator[Databases]:
    made = Databases(server)
    yield made
    made.close()


@pytest.fixture(scope="session")
def template(server: Server, databases: Databases) -> Iterator[str]:
    """The name of a database migrated once; never connect to it, copy it."""
    name = databases.create()
    migrations.migrate(server.dsn(name))
    yield name
    databases.leave(name)


@pytest.fixture
def dsn(server: Server, databases: Databases, template: str) -> Iterator[str]:
    """A migrated database of the test's own."""
    name = databases.create(template)
    yield server.dsn(name)
    databases.leave(name)


@pytest.fixture
def empty_dsn(server: Server, databases: Databases) -> Iterator[str]:
    """An empty database of the test's own."""
    name = databases.create()
    yield server.dsn(name)
    databases.leave(name)


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
