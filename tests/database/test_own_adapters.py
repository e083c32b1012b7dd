"""pgqueue's statements are read and written the same way, whatever the application has registered with psycopg."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from psycopg.types.numeric import IntDumper
from psycopg.types.string import StrDumper, TextLoader

import pgqueue
from pgqueue.database import own_adapters
from pgqueue.pytest_plugin import Databases

TYPES = "text text[] varchar varchar[] int8 int8[] int4 int2 bool float8 timestamptz pg_lsn"
"""What our statements answer."""


class Shout(TextLoader):
    def load(self, data: Any) -> str:
        return "X" + bytes(data).decode()


class Loud(StrDumper):
    def dump(self, obj: str) -> bytes:
        return b"X" + obj.encode()


class Next(IntDumper):
    def dump(self, obj: int) -> bytes:
        return b"%d" % (obj + 1)


def adapt(conn: Any) -> None:
    for name in ("text", "varchar", "int8", "int4", "bool", "timestamptz", "jsonb"):
        conn.adapters.register_loader(name, Shout)
    conn.adapters.register_dumper(str, Loud)
    conn.adapters.register_dumper(int, Next)


@pytest.fixture(scope="module")
def shop(pgqueue_databases: Databases) -> Iterator[str]:
    with pgqueue_databases.copy() as dsn:
        yield dsn


@pytest.mark.promise("F483")
@pytest.mark.parametrize("encoding", ["UTF8", "SQL_ASCII"])
@pytest.mark.parametrize("cursors", [psycopg.Cursor, psycopg.ClientCursor, psycopg.RawCursor])
def test_a_connection_with_adapters_of_the_application_enqueues_and_reads(
    shop: str, cursors: Any, encoding: str
) -> None:
    """Naive: the id is 'X1', the arguments are no JSON. What the application has registered stays."""
    with psycopg.connect(shop, cursor_factory=cursors, client_encoding=encoding) as conn:
        adapt(conn)
        asked = pgqueue.remote("app.receipt")
        one = asked.using(priority=1).enqueue(conn, order=7, name="ü")
        many = asked.enqueue_many(conn, [{"order": 1}, {"order": 2}])
        assert [type(each.id) for each in (one, *many)] == [int] * (1 + len(many))
        info = pgqueue.get(conn, one.id)
        assert (info.id, info.args, info.priority) == (one.id, {"order": 7, "name": "ü"}, 1)
        with psycopg.Cursor(conn) as cursor:
            assert cursor.execute("SELECT 'a'::text").fetchone() == ("Xa",)


@pytest.mark.promise("F483")
async def test_an_async_connection_with_adapters_of_the_application_enqueues_and_reads(shop: str) -> None:
    async with await psycopg.AsyncConnection.connect(shop) as conn:
        adapt(conn)
        handle = await pgqueue.aenqueue(conn, "app.receipt", order=7)
        info = await pgqueue.aget(conn, handle.id)
        assert (info.id, info.args) == (handle.id, {"order": 7})


@pytest.mark.promise("F483")
def test_they_are_psycopgs_defaults_also_if_those_were_changed_before() -> None:
    changed = textwrap.dedent(
        f"""
        import psycopg
        from psycopg import pq
        types = [psycopg.adapters.types[name.removesuffix("[]")] for name in {TYPES!r}.split()]
        oids = [t.array_oid if name.endswith("[]") else t.oid for t, name in zip(types, {TYPES!r}.split())]
        before = [psycopg.adapters.get_loader(oid, pq.Format.TEXT) for oid in oids]
        psycopg.adapters.register_loader("text", psycopg.types.string.ByteaLoader)
        psycopg.adapters.register_loader("int8[]", psycopg.types.string.ByteaLoader)
        from pgqueue.database.own_adapters import _adapters
        assert [_adapters(False).get_loader(oid, pq.Format.TEXT) for oid in oids] == before
        """
    )
    changed = changed.replace('register_loader("int8[]"', 'register_loader(psycopg.adapters.types["int8"].array_oid')
    subprocess.run([sys.executable, "-c", changed], check=True)


def test_they_are_made_once() -> None:
    assert own_adapters._adapters(False) is own_adapters._adapters(False) is not own_adapters._adapters(True)
