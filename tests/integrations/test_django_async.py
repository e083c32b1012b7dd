"""Async views: `await task.aenqueue("default", …)` is in the thread and the transaction in which `acreate` is."""

from __future__ import annotations

from pathlib import Path

import pytest
from django_projects import TABLE, DjangoProject, database
from workers import Eyes

pytestmark = pytest.mark.promise("F274")

TASKS = """
import pgqueue
from shop.models import Letter

@pgqueue.task
def greet(name: str) -> str:
    return name

@pgqueue.task(unique=lambda name: name)
def once(name: str) -> None: ...

@pgqueue.task
async def awrite(customer: int) -> None:
    await Letter.objects.acreate(customer=customer)

@pgqueue.task
async def acomplete(job: pgqueue.Job) -> None:
    await job.acomplete("default")

@pgqueue.task
def complete(job: pgqueue.Job) -> None:
    job.complete("default")
"""
SCRIPT = """
import asyncio, pgqueue
from django.db import connection, connections
from shop.tasks import greet, once

async def main():
    first = await greet.aenqueue("default", "Ann")
    await greet.aenqueue(connection, "Bob")
    await greet.aenqueue(connections["default"], "Cleo")
    await pgqueue.aenqueue_many("default", [greet.new("Dora"), greet.new("Eve")])
    kept = await once.aenqueue("default", "Ann")
    assert (await once.aenqueue("default", "Ann")).id == kept.id
    assert (await pgqueue.aget("default", first.id)).state == "available"
    assert (await pgqueue.acancel("default", first.id))[0].did == "cancelled"
    assert (await pgqueue.aretry("default", first.id))[0].did == "retried"
    try:
        await greet.aenqueue("postgresql://me:secret@db/shop", "Ann")
    except pgqueue.UnsupportedConnection as error:
        assert "it has default" in str(error) and "secret" not in str(error)
    else:
        raise AssertionError

asyncio.run(main())
"""
TESTS = """
from asgiref.sync import sync_to_async
from django.db import connection
from django.test import TestCase
from pgqueue.testing import adrain
from shop.models import Letter
from shop.tasks import awrite, greet

class Views(TestCase):
    def jobs(self):
        with connection.cursor() as cursor:
            cursor.execute("SELECT count(*) FROM pgqueue.job")
            return cursor.fetchone()[0]

    async def test_a_view(self):
        self.assertEqual(await sync_to_async(self.jobs)(), 0)
        await greet.aenqueue("default", "Ann")
        self.assertEqual(await sync_to_async(self.jobs)(), 1)

    async def test_another(self):
        self.assertEqual(await sync_to_async(self.jobs)(), 0)
        await awrite.aenqueue("default", 7)
        await adrain("default")
        self.assertEqual([each.customer async for each in Letter.objects.all()], [7])
"""


def test_an_async_view_enqueues_on_an_alias(tmp_path: Path, dsn: str, eyes: Eyes) -> None:
    project = DjangoProject(tmp_path, {"default": database(dsn)}, TASKS)
    project.python(SCRIPT)
    names = [name for (name,) in eyes.all("SELECT args ->> 'name' FROM pgqueue.job WHERE task ~ 'greet' ORDER BY id")]
    assert names == ["Ann", "Bob", "Cleo", "Dora", "Eve"]


def test_in_a_test_case_the_job_is_rolled_back_with_the_test_and_can_be_drained(tmp_path: Path, dsn: str) -> None:
    project = DjangoProject(tmp_path, {"default": database(dsn)}, TASKS)
    (tmp_path / "shop" / "tests.py").write_text(TESTS)
    assert "Ran 2 tests" in project.manage("test")


def test_a_completion_outside_of_a_transaction_is_refused_because_it_would_be_at_once(
    tmp_path: Path, dsn: str, eyes: Eyes
) -> None:
    eyes.do(TABLE)
    project = DjangoProject(tmp_path, {"default": database(dsn)}, TASKS)
    project.python("""
from shop.tasks import acomplete, complete
complete.using(retry=1).enqueue("default")
acomplete.using(retry=1).enqueue("default")
""")
    with project.working() as worker:
        worker.says("Django has no async transactions")
        worker.says("outside of a transaction would complete it at once")
    assert eyes.one("SELECT count(*) FROM pgqueue.job_done") == 0
