"""Where a drain works: on the connection that it is given, else on a database that is there for tests, and no other.

What is configured may be the database of a developer. Its jobs would run against rows of the test database, and would
be completed there: their effects would be lost.
"""

from __future__ import annotations

from dataclasses import dataclass

from pgqueue.config import config, database_of_tests, safe
from pgqueue.database import drivers
from pgqueue.errors import Error, InvalidOption


@dataclass(frozen=True, slots=True)
class Place:
    """A connection; None if the drain opens one of its own, to this DSN."""

    conn: object
    dsn: str = ""


def place(conn: object, dsn: str | None) -> Place:
    """Where a drain works that was given these. Raises Error if that would be no database of tests."""
    alias, found = _chosen(conn, dsn)
    return Place(alias) if alias is not None and not drivers.alone(alias) else found


async def aplace(conn: object, dsn: str | None) -> Place:
    """`place` for async tests: Django's connection is in the thread of its async ORM."""
    alias, found = _chosen(conn, dsn)
    if alias is None:
        return found
    from asgiref.sync import sync_to_async

    return found if await sync_to_async(drivers.alone)(alias) else Place(alias)


def _chosen(conn: object, dsn: str | None) -> tuple[str | None, Place]:
    """The place, and an alias of Django that comes before it if it is in a transaction."""
    if dsn is not None:
        if conn is not None:
            raise InvalidOption("drain: give a connection or dsn, not both")
        return None, Place(None, config(dsn=dsn).require_dsn())
    if conn is not None:
        return None, Place(conn)
    tests = database_of_tests()
    if tests is None:
        raise Error(_refusal())
    return tests.alias, Place(None, tests.dsn)


def _refusal() -> str:
    configured = config().dsn
    told = f" It does not touch the configured one, {safe(configured)}." if configured else ""
    return (
        f"drain() works on a database of tests, and there is none here.{told} Give the connection of your test, "
        "drain(conn), name a database for tests, drain(dsn=…), or use the fixture pgqueue_db"
    )
