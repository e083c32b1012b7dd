"""The backend of Django's tasks: with the backport on this Django, and with Django 6 on another Python."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from signal import SIGTERM
from typing import Any

import pytest
from django_projects import DjangoProject, database
from pythons import python
from workers import Eyes, wait_until

pytestmark = pytest.mark.promise("F295")

ROOT = Path(__file__).parents[2]
SETTINGS = """
TASKS = {"default": {
    "BACKEND": "pgqueue.integrations.django.task_backend.Backend",
    "QUEUES": ["default", "mail"],
}}
"""
BACKPORT = f'INSTALLED_APPS += ["django_tasks"]\n{SETTINGS}'
TASKS = """
import logging
from django_tasks import task
from django_tasks.signals import task_enqueued, task_finished, task_started
from shop.models import Letter

class Refused(Exception): ...

@task
def add(a, b=1, *, c=0):
    return a + b + c

@task(queue_name="mail", priority=50)
async def write(customer):
    await Letter.objects.acreate(customer=customer)
    return [customer]

@task(takes_context=True)
def attempts(context, fails):
    result = context.task_result
    if context.attempt <= fails:
        raise Refused(f"attempt {context.attempt}\\nof {fails + 1}")
    errors = [each.exception_class_path for each in result.errors]
    return [context.attempt, len(result.worker_ids), result.status, errors]

@task
def breaks():
    raise LookupError("gone")

@task
def unstorable():
    return object()

told = []
for signal, name in (task_enqueued, "enqueued"), (task_started, "started"), (task_finished, "finished"):
    def tell(sender, task_result, name=name, **_):
        told.append((name, sender.__name__, task_result.task.name, str(task_result.status)))
        logging.getLogger("shop").error("TOLD %s %s %s", name, task_result.id, task_result.status)
        if name != "enqueued":
            Letter.objects.count()
    signal.connect(tell, weak=False)
"""
TESTS = """
import asyncio
import datetime as dt
from django.db import connection, transaction
from django.test import TestCase, TransactionTestCase, override_settings
from django.utils import timezone
from django_tasks import TaskResultStatus as S, task_backends
from django_tasks.exceptions import TaskResultDoesNotExist, TaskResultMismatch
from pgqueue.database.migrations import as_sql
from pgqueue.testing import Clock, adrain, drain
import pgqueue
from shop.models import Letter
from shop import tasks
from shop.tasks import add, attempts, breaks, told, unstorable, write

def setUpModule():
    with connection.cursor() as cursor:
        cursor.execute("CREATE SCHEMA IF NOT EXISTS pgqueue; DROP SCHEMA pgqueue CASCADE")
        cursor.execute(as_sql("pgqueue"))

class Undo(Exception): ...

class Backend(TestCase):
    def setUp(self):
        told.clear()

    def row(self, result, what):
        with connection.cursor() as cursor:
            cursor.execute(f"SELECT {what} FROM pgqueue.job WHERE id = %s", [result.id])
            [row] = cursor.fetchall()
        return row if len(row) > 1 else row[0]

    def test_all_capabilities(self):
        backend = task_backends["default"]
        self.assertTrue(all(getattr(backend, f"supports_{each}") for each in
            ("defer", "async_task", "get_result", "priority")))

    def test_a_call_runs_with_its_arguments_apart(self):
        result = add.enqueue(1, 2, c=3)
        self.assertEqual((result.status, result.args, result.kwargs, result.attempts), (S.READY, [1, 2], {"c": 3}, 0))
        self.assertTrue(timezone.is_aware(result.enqueued_at))
        self.assertEqual(self.row(result, "task, queue, priority, args"),
            ("shop.tasks.add", "default", 5, '{"args": [1, 2], "kwargs": {"c": 3}}'))
        drain().check()
        self.assertRaises(ValueError, lambda: result.return_value)
        result.refresh()
        self.assertEqual((result.status, result.return_value, result.attempts), (S.SUCCESSFUL, 6, 1))
        self.assertEqual((result.is_finished, result.errors), (True, []))
        self.assertTrue(result.enqueued_at <= result.started_at == result.last_attempted_at <= result.finished_at)
        again = add.get_result(result.id)
        self.assertEqual((again.args, again.kwargs, again.task, again.return_value), ([1, 2], {"c": 3}, add, 6))

    def test_get_result_is_one_statement(self):
        result = attempts.using(retry=1).enqueue(9)
        drain()
        with self.assertNumQueries(1):
            attempts.get_result(result.id)
        with self.assertNumQueries(1):
            add.enqueue(1)

    def test_what_is_no_result(self):
        result = add.enqueue(1)
        self.assertRaises(TaskResultMismatch, write.get_result, result.id)
        try:
            with transaction.atomic():
                undone = add.enqueue(1)
                self.assertEqual(add.get_result(undone.id).status, S.READY)
                raise Undo
        except Undo: ...
        mine = pgqueue.enqueue("default", "elsewhere", x=1)
        for id in (undone.id, str(mine.id), "", "x", "-1", "0", "1" * 40, "²", 10**9):
            self.assertRaises(TaskResultDoesNotExist, add.get_result, id)

    def test_priorities_and_queues(self):
        for given, band in (100, 0), (81, 0), (80, 1), (1, 4), (0, 5), (-1, 6), (-25, 6), (-26, 7), (-100, 9):
            result = add.using(priority=given, queue_name="mail").enqueue(1)
            self.assertEqual(self.row(result, "priority, queue"), (band, "mail"))
            found = add.get_result(result.id).task
            self.assertEqual((found.queue_name, found.get_backend().database), ("mail", "default"))
            again = found.using().enqueue(1)
            self.assertEqual(self.row(again, "priority"), band)
        result = write.enqueue(1)
        self.assertEqual(self.row(result, "priority, queue"), (2, "mail"))
        self.assertEqual(write.get_result(result.id).task, write)
        self.assertRaises(Exception, add.using, queue_name="other")
        self.assertRaises(Exception, add.using, priority=101)

    def test_run_after(self):
        at = timezone.now() + dt.timedelta(hours=1)
        with Clock(connection) as clock:
            result = add.using(run_after=at).enqueue(1)
            self.assertEqual(drain().completed, 0)
            found = add.get_result(result.id)
            self.assertEqual((found.status, found.task.run_after), (S.READY, at))
            clock.advance(hours=2)
            self.assertEqual(drain().completed, 1)
        with override_settings(USE_TZ=False):
            result = add.using(run_after=dt.datetime(2099, 1, 1)).enqueue(1)
            found = add.get_result(result.id)
            self.assertEqual(found.task.run_after, dt.datetime(2099, 1, 1))
            self.assertTrue(timezone.is_naive(found.enqueued_at))
        self.assertEqual(self.row(result, "run_at"), timezone.make_aware(dt.datetime(2099, 1, 1)))

    def test_attempts(self):
        with Clock(connection) as clock:
            result = attempts.enqueue(2)
            drain()
            result.refresh()
            self.assertEqual((result.status, result.attempts, result.finished_at), (S.READY, 1, None))
            self.assertTrue(result.started_at)
            drain(clock=clock)
            result.refresh()
            clock.advance(days=1)
            drain(clock=clock)
        result.refresh()
        path = "shop.tasks.Refused"
        self.assertEqual(result.return_value, [3, 3, "RUNNING", [path, path]])
        self.assertEqual((result.attempts, [each.exception_class for each in result.errors]), (3, 2 * [tasks.Refused]))
        self.assertIn("attempt 1\\nof 3", result.errors[0].traceback)
        self.assertTrue(result.started_at < result.last_attempted_at)

    def test_errors(self):
        for task, kind in (breaks, LookupError), (unstorable, TypeError):
            result = task.using(retry=1).enqueue()
            drain()
            result.refresh()
            self.assertEqual((result.status, result.attempts), (S.FAILED, 1))
            self.assertEqual([each.exception_class for each in result.errors], [kind])
        cancelled = add.enqueue(1)
        pgqueue.cancel("default", int(cancelled.id))
        cancelled.refresh()
        self.assertEqual((cancelled.status, cancelled.errors), (S.FAILED, []))
        self.assertRaises(TypeError, add.enqueue, object())

    def test_signals(self):
        add.enqueue(1)
        breaks.using(retry=2).enqueue()
        with Clock(connection) as clock:
            drain(clock=clock)
        mine = [(name, status) for name, sender, task, status in told if task == "breaks"]
        started = ("started", "RUNNING")
        self.assertEqual(mine, [("enqueued", "READY"), started, started, ("finished", "FAILED")])
        mine = [(name, status) for name, sender, task, status in told if task == "add"]
        self.assertEqual(mine, [("enqueued", "READY"), ("started", "RUNNING"), ("finished", "SUCCESSFUL")])
        self.assertEqual({sender for _, sender, _, _ in told}, {"Backend"})

    async def test_async(self):
        result = await write.aenqueue(7)
        await adrain()
        await result.arefresh()
        await asyncio.sleep(0)
        self.assertEqual((result.status, result.return_value), (S.SUCCESSFUL, [7]))
        self.assertEqual([each.customer async for each in Letter.objects.all()], [7])
        self.assertEqual((await write.aget_result(result.id)).return_value, [7])
        with self.assertRaises(TaskResultDoesNotExist):
            await write.aget_result("99")
        while len(told) < 3:
            await asyncio.sleep(0.01)
        self.assertEqual([name for name, *_ in told], ["enqueued", "started", "finished"])

    def test_async_in_a_sync_test(self):
        result = write.enqueue(7)
        drain().check()
        self.assertEqual(write.get_result(result.id).return_value, [7])

class Committed(TransactionTestCase):
    def test_a_job_is_there_after_the_commit_only(self):
        with transaction.atomic():
            result = add.enqueue(1)
        drain().check()
        self.assertEqual(add.get_result(result.id).return_value, 2)
"""
OPTIONS = """
import pgqueue

@task(retry=pgqueue.RetryPolicy(attempts=1), timeout=30)
def once():
    raise LookupError
"""
OF_OPTIONS = """
class Options(TestCase):
    def test_those_of_the_decorator_reach_the_job(self):
        result = tasks.once.enqueue()
        self.assertEqual(drain().failed, 1)
        result.refresh()
        self.assertEqual(result.status, S.FAILED)
        self.assertEqual(tasks.once.using(retry=2, timeout=None).retry, 2)
"""


def test_the_backport_on_this_django(tmp_path: Path, dsn: str) -> None:
    project = DjangoProject(tmp_path, {"default": database(dsn)}, TASKS + OPTIONS, BACKPORT)
    (tmp_path / "shop" / "tests.py").write_text(TESTS + OF_OPTIONS)
    said = project.manage("test")
    assert "Ran 13 tests" in said and "OK" in said


def test_a_worker_runs_the_tasks_and_tells_the_signals(tmp_path: Path, dsn: str, eyes: Eyes) -> None:
    project = DjangoProject(tmp_path, {"default": database(dsn)}, TASKS, BACKPORT)
    project.manage("migrate", "--run-syncdb")
    script = "from shop.tasks import *\nprint(add.enqueue(1).id, attempts.enqueue(0).id, write.enqueue(7).id)"
    jobs = [int(each) for each in project.python(script).split()[-3:]]
    with project.working() as worker:
        wait_until(lambda: all(eyes.state(job) == "completed" for job in jobs), 20)
        worker.signal(SIGTERM)
        assert worker.ends() == 0, worker.output
    results = [eyes.one("SELECT result FROM pgqueue.job_done WHERE id = %s", job) for job in jobs]
    assert results == [2, [1, 1, "RUNNING", []], [7]]
    told = [line.split("TOLD ")[1].split() for line in worker.output.splitlines() if "TOLD " in line]
    ends = [
        [name, str(job), status]
        for job in jobs
        for name, status in (("started", "RUNNING"), ("finished", "SUCCESSFUL"))
    ]
    assert sorted(told) == sorted(ends)


def test_a_wrong_option_is_named(tmp_path: Path, dsn: str) -> None:
    wrong = BACKPORT + 'TASKS["default"]["OPTIONS"] = {"alias": "default"}\n'
    project = DjangoProject(tmp_path, {"default": database(dsn)}, TASKS, wrong)
    assert "has OPTIONS alias; it may have database" in project.manage("check", code=1)


def test_a_job_that_would_be_staged_is_refused(tmp_path: Path, dsn: str) -> None:
    project = DjangoProject(tmp_path, {"default": database(dsn)}, TASKS, BACKPORT)
    script = "import pgqueue\npgqueue.configure(outbox=True)\nfrom shop.tasks import add\nadd.enqueue(1)"
    assert "a staged job has no result" in project.python(script, code=1)


@pytest.mark.second
@pytest.mark.parametrize("version", ["6.0", "6.1"])
def test_django_6_on_another_python(version: str, tmp_path: Path, tmp_path_factory: Any, dsn: str) -> None:
    """In Django 6.0 `@task` takes no options of a backend."""
    python = with_django(version, tmp_path_factory)
    options = version != "6.0"
    DjangoProject(tmp_path, {"default": database(dsn)}, own(TASKS + OPTIONS * options), SETTINGS)
    (tmp_path / "shop" / "tests.py").write_text(own(TESTS + OF_OPTIONS * options))
    given = {name: value for name, value in os.environ.items() if not name.startswith(("PGQUEUE_", "DJANGO_"))}
    env = given | {"DJANGO_SETTINGS_MODULE": "shop.settings"}
    command = [python, "manage.py", "test"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"Ran {12 + options} tests" in done.stderr


def own(source: str) -> str:
    """The same with Django's own tasks."""
    return source.replace("django_tasks", "django.tasks")


@cache
def newer_python() -> str | None:
    """A Python from 3.12 on: this one, one on the path, or one of pyenv's, whose shims may lead nowhere."""
    if sys.version_info >= (3, 12):
        return sys.executable
    return next(filter(None, map(python, ("3.12", "3.13", "3.14"))), None)


def with_django(version: str, tmp_path_factory: Any) -> str:
    """A Python with this version of Django, and with the checkout. Skips if no Python is new enough."""
    python = newer_python()
    if python is None:
        pytest.skip(f"not run: Django {version} needs Python 3.12, and none is found")
    home = tmp_path_factory.mktemp(f"django-{version}")
    subprocess.run([python, "-m", "venv", home], check=True)
    install = [home / "bin" / "pip", "install", "-q", f"django~={version}.0", f"{ROOT}[binary]"]
    done = subprocess.run(install, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return str(home / "bin" / "python")
