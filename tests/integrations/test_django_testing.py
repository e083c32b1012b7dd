"""Tests of a Django project: a drain works on the database of the tests, with the connection of the test."""

from __future__ import annotations

from pathlib import Path

import psycopg
import pytest
from django_projects import DjangoProject, database

TASKS = """
import pgqueue
from shop.models import Letter

@pgqueue.task
def write(customer: int) -> None:
    Letter.objects.get_or_create(customer=customer)
"""
DRAINS = """
from django.db import connection
from django.test import SimpleTestCase, TestCase, TransactionTestCase
from pgqueue.database.migrations import as_sql
from pgqueue.testing import adrain, drain
from shop.models import Letter
from shop.tasks import write

def install():
    with connection.cursor() as cursor:
        cursor.execute("CREATE SCHEMA IF NOT EXISTS pgqueue; DROP SCHEMA pgqueue CASCADE")
        cursor.execute(as_sql("pgqueue"))

class InTransaction(TestCase):
    def setUp(self):
        install()
        write.enqueue("default", customer=1)

    def test_sync(self):
        self.assertEqual(drain().check().completed, 1)
        self.assertEqual([each.customer for each in Letter.objects.all()], [1])

    async def test_async(self):
        self.assertEqual((await adrain()).check().completed, 1)

class Committed(TransactionTestCase):
    def test_sync(self):
        install()
        write.enqueue("default", customer=2)
        self.assertEqual(drain().check().completed, 1)
        self.assertEqual([each.customer for each in Letter.objects.all()], [2])
"""
OUTSIDE = """
import pgqueue, shop.tasks
from pgqueue.testing import drain

try:
    drain()
except pgqueue.Error as error:
    print(error)
"""


@pytest.mark.promise("F292")
def test_a_drain_without_a_connection_is_on_the_database_of_the_tests(tmp_path: Path, dsn: str) -> None:
    """Neither the alias of the settings nor PGQUEUE_DSN is touched, both of which are that of development here."""
    project = DjangoProject(tmp_path, {"default": database(dsn)}, TASKS)
    (tmp_path / "shop" / "tests.py").write_text(DRAINS)
    with psycopg.connect(dsn, autocommit=True) as development:
        development.execute("SELECT pgqueue.enqueue('shop.tasks.write', '{\"customer\": 1}')")
        assert "Ran 3 tests" in project.manage("test", PGQUEUE_DSN=dsn)
        said = project.python(OUTSIDE, environ={"PGQUEUE_DSN": dsn})
        assert development.execute("SELECT state FROM pgqueue.job").fetchall() == [("available",)]
        name = development.info.dbname
    assert f"dbname={name}" in said and "there is none here. It does not touch the configured one" in said


KINDS = """
import pgqueue
from shop.models import Letter

@pgqueue.lifespan
async def lifespan():
    yield await Letter.objects.acount()

@pgqueue.task
async def asynchronous(customer: int) -> int:
    letter = await Letter.objects.aget(customer=customer)
    await Letter.objects.acreate(customer=customer + 1)
    return letter.customer

@pgqueue.task
async def fails(customer: int) -> None:
    await asynchronous.fn(customer)
    raise LookupError

@pgqueue.task
def sync(customer: int) -> int:
    Letter.objects.create(customer=customer + 1)
    return Letter.objects.get(customer=customer).customer
"""
HANDLERS = """
from django.db import connection
from django.test import TestCase
from pgqueue.database.migrations import as_sql
from pgqueue.testing import adrain, arun, drain, run
from shop.models import Letter
from shop.tasks import asynchronous, fails, sync

class OfTheTest(TestCase):
    def setUp(self):
        with connection.cursor() as cursor:
            cursor.execute("CREATE SCHEMA IF NOT EXISTS pgqueue; DROP SCHEMA pgqueue CASCADE")
            cursor.execute(as_sql("pgqueue"))
        Letter.objects.create(customer=7)
        for each in (asynchronous, sync):
            each.enqueue("default", customer=7)
        fails.using(retry=1).enqueue("default", customer=7)

    def customers(self):
        return sorted(each.customer for each in Letter.objects.all())

    def drained(self, done):
        self.assertEqual((done.completed, done.failed, [type(error) for error in done.errors]), (2, 1, [LookupError]))

    def test_sync(self):
        self.drained(drain(resources=None))
        self.assertEqual(self.customers(), [7, 8, 8])

    def test_on_the_loop_of_a_lifespan(self):
        self.drained(drain(connection))
        self.assertEqual(self.customers(), [7, 8, 8])

    async def test_async(self):
        self.drained(await adrain())
        self.assertEqual([each.customer async for each in Letter.objects.order_by("customer")], [7, 8, 8])

    async def test_async_without_a_lifespan(self):
        self.drained(await adrain("default", resources=None))

    def test_one_handler(self):
        self.assertEqual((run(asynchronous, 7), run(sync, 7), run(asynchronous, 7, resources=1)), (7, 7, 7))

    async def test_one_handler_of_an_async_test(self):
        self.assertEqual((await arun(asynchronous, 7), await arun(sync, 7)), (7, 7))
"""


@pytest.mark.promise("F293")
def test_handlers_of_the_other_kind_have_the_connection_of_the_test(tmp_path: Path, dsn: str) -> None:
    """They see its rows, its rollback undoes theirs, and no connection is left that would keep the database."""
    project = DjangoProject(tmp_path, {"default": database(dsn)}, KINDS)
    (tmp_path / "shop" / "tests.py").write_text(HANDLERS)
    assert "Ran 6 tests" in project.manage("test")
