"""Tests that commit: Django's flush empties the queue, too, so that no test runs the jobs of the one before."""

from __future__ import annotations

from pathlib import Path

import psycopg
import pytest
from django_projects import DjangoProject, database

pytestmark = pytest.mark.promise("F294")

TASKS = """
import pgqueue

@pgqueue.task(lock="one", limit=2, unique=lambda name: name)
def greet(name: str) -> str:
    return f"hello {name}"

@pgqueue.task
def fails() -> None:
    raise LookupError
"""
QUEUES = """
from django.db import connections
import pgqueue
from pgqueue.config import config
from pgqueue.database.migrations import OUTBOX, as_sql
from pgqueue.integrations.django.databases import dsn_of
from pgqueue.testing import drain
from shop.models import Letter
from shop.tasks import fails, greet

TABLES = "SELECT c.oid::regclass::text FROM pg_class c WHERE relnamespace = 'pgqueue'::regnamespace AND relkind = 'r'"

def rows(alias):
    with connections[alias].cursor() as cursor:
        cursor.execute(TABLES)
        tables = [name for (name,) in cursor.fetchall()]
        cursor.execute(" UNION ALL ".join(f"SELECT '{name}', t::text FROM {name} t" for name in tables))
        return sorted(cursor.fetchall())

INSTALLED = {}

def install(*aliases):
    for alias in aliases:
        with connections[alias].cursor() as cursor:
            cursor.execute("CREATE SCHEMA IF NOT EXISTS pgqueue; DROP SCHEMA pgqueue CASCADE")
            cursor.execute(as_sql("pgqueue") + as_sql("pgqueue", line=OUTBOX))
        INSTALLED[alias] = rows(alias)

def fill(alias):
    greet.enqueue(alias, "Ann")
    fails.enqueue(alias)
    drain(dsn=dsn_of(alias))
    greet.using(delay=60).enqueue(alias, "Bob")
    pgqueue.pause(alias, "default")
    pgqueue.schedules.add(alias, "hourly", pgqueue.Cron("0 * * * *"), fails)
    Letter.objects.using(alias).create(customer=1)
    assert len(rows(alias)) > len(INSTALLED[alias]) + 8, rows(alias)

def check_and_fill(test, *aliases):
    for alias in aliases:
        test.assertEqual(rows(alias), INSTALLED[alias])
        test.assertFalse(Letter.objects.using(alias).exists())
        fill(alias)
"""
TESTS = """
from django.test import LiveServerTestCase, TransactionTestCase
from shop.queues import check_and_fill, fill, install, rows

def setUpModule():
    install("default", "jobs")

class Twice:
    def test_1(self):
        check_and_fill(self, *sorted(self.databases))

    def test_2(self):
        check_and_fill(self, *sorted(self.databases))

class One(Twice, TransactionTestCase): ...

class Both(Twice, TransactionTestCase):
    databases = {"default", "jobs"}

class FewApps(Twice, TransactionTestCase):
    available_apps = ["shop", "pgqueue.integrations.django"]

class Serialized(Twice, TransactionTestCase):
    serialized_rollback = True

class Live(Twice, LiveServerTestCase): ...

class Other(TransactionTestCase):
    databases = {"default", "jobs"}

    def test_only_the_database_that_is_flushed(self):
        from django.core.management import call_command
        fill("jobs")
        before = rows("jobs")
        call_command("flush", interactive=False, verbosity=0)
        self.assertEqual(rows("jobs"), before)
"""
CONFTEST = """
import pytest

@pytest.fixture(scope="session")
def django_db_setup(django_db_setup, django_db_blocker):
    from shop.queues import install
    with django_db_blocker.unblock():
        install("default", "jobs")
"""
PYTESTS = """

import pytest
from unittest import TestCase
from shop.queues import check_and_fill

@pytest.mark.parametrize("run", [1, 2])
@pytest.mark.django_db(transaction=True)
def test_one(run):
    check_and_fill(TestCase(), "default")

@pytest.mark.parametrize("run", [1, 2])
@pytest.mark.django_db(transaction=True, databases=["default", "jobs"])
def test_both(run):
    check_and_fill(TestCase(), "default", "jobs")

@pytest.mark.parametrize("run", [1, 2])
@pytest.mark.django_db(transaction=True, serialized_rollback=True)
def test_serialized(run, live_server):
    check_and_fill(TestCase(), "default")
"""


@pytest.fixture
def project(tmp_path: Path, dsn: str, empty_dsn: str) -> DjangoProject:
    made = DjangoProject(tmp_path, {"default": database(dsn), "jobs": database(empty_dsn)}, TASKS)
    (tmp_path / "shop" / "queues.py").write_text(QUEUES)
    (tmp_path / "shop" / "migrations").mkdir()
    (tmp_path / "shop" / "migrations" / "__init__.py").touch()
    made.manage("makemigrations", "shop")
    return made


def test_each_test_that_commits_begins_with_an_empty_queue(project: DjangoProject) -> None:
    (project.home / "shop" / "tests.py").write_text(TESTS)
    assert "Ran 11 tests" in project.manage("test")


def test_so_does_each_of_pytest_django(project: DjangoProject) -> None:
    (project.home / "pytest.ini").write_text("[pytest]\nDJANGO_SETTINGS_MODULE = shop.settings\n")
    (project.home / "conftest.py").write_text(CONFTEST)
    (project.home / "test_queue.py").write_text(PYTESTS)
    assert "6 passed" in project.python("import pytest\npytest.main(['-p', 'no:cacheprovider'])")


def test_by_hand_it_empties_what_was_confirmed(project: DjangoProject, dsn: str) -> None:
    jobs = "SELECT count(*) FROM pgqueue.job"
    project.manage("migrate", "--database", "default")
    project.python("from shop.tasks import greet\ngreet.enqueue('default', 'Ann')")
    with psycopg.connect(dsn, autocommit=True) as conn:
        for said, left in (("no", 1), ("yes", 0)):
            answer = f"import builtins\nbuiltins.input = lambda _: {said!r}\n"
            project.python(f"{answer}from django.core.management import call_command\ncall_command('flush')")
            assert conn.execute(jobs).fetchone() == (left,)


def test_without_a_queue_or_postgresql_it_is_djangos_own(tmp_path: Path, empty_dsn: str) -> None:
    lite = {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}
    project = DjangoProject(tmp_path, {"default": database(empty_dsn), "lite": lite})
    for alias in ("default", "lite"):
        project.manage("flush", "--no-input", "--database", alias)
