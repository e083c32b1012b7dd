"""`@transactional`: what the ORM writes and the end of the job are one commit; what is mistaken for it is named."""

from __future__ import annotations

from pathlib import Path
from signal import SIGTERM

import psycopg
import pytest
from django_projects import TABLE, DjangoProject, database
from workers import Eyes, wait_until

pytestmark = pytest.mark.promise("F272")

TASKS = """
import pgqueue
from django.db import connection, transaction
from pgqueue.integrations.django.transactions import transactional
from shop.models import Letter

once = pgqueue.RetryPolicy(attempts=1)

@pgqueue.task
def follow() -> None: ...

@pgqueue.task(retry=once)
@transactional
def write(job: pgqueue.Job, customer: int) -> dict[str, int]:
    job.enqueue(follow)
    return {"customer": Letter.objects.create(customer=customer).customer}

@pgqueue.task(retry=once)
@transactional
def fail(customer: int) -> None:
    Letter.objects.create(customer=customer)
    raise LookupError

@pgqueue.task(retry=once)
@transactional
def cancel(customer: int) -> pgqueue.Cancel:
    Letter.objects.create(customer=customer)
    return pgqueue.Cancel("not wanted")

@pgqueue.task(retry=once)
@transactional(using="other")
def elsewhere(customer: int) -> None:
    Letter.objects.using("other").create(customer=customer)

@pgqueue.task(retry=once)
@transactional
def lost(job: pgqueue.Job, customer: int) -> None:
    Letter.objects.create(customer=customer)
    with pgqueue.connect(autocommit=True) as conn:
        conn.execute("UPDATE pgqueue.job_running SET claim = claim + 1 WHERE id = %s", [job.id])

@pgqueue.task(retry=once, transactional=True)
def mistaken(job: pgqueue.Job, customer: int) -> None:
    job.connection.execute("SELECT 1")
    Letter.objects.create(customer=customer)
    raise LookupError
"""


def enqueue(dsn: str, task: str, customer: int) -> int:
    with psycopg.connect(dsn) as conn:
        sql = "SELECT pgqueue.enqueue(%s, jsonb_build_object('customer', %s::int))"
        [[job]] = conn.execute(sql, [f"shop.tasks.{task}", customer])
        return int(job)


def test_the_rows_of_the_orm_and_the_completion_are_one_commit(
    tmp_path: Path, dsn: str, empty_dsn: str, eyes: Eyes
) -> None:
    eyes.do(TABLE)
    aliases = {"default": database(dsn), "other": database(empty_dsn)}
    project = DjangoProject(tmp_path, aliases, TASKS)
    ends = {"write": "completed", "fail": "failed", "cancel": "cancelled", "elsewhere": "failed", "mistaken": "failed"}
    jobs = {task: enqueue(dsn, task, customer) for customer, task in enumerate(ends)}
    with project.working("-c", "1") as worker:
        wait_until(lambda: all(eyes.state(job) == ends[task] for task, job in jobs.items()), 20)
        warning = worker.says("and it writes through Django's connection 'default'")
        worker.signal(SIGTERM)
        assert worker.ends() == 0, worker.output
    assert f"job {jobs['mistaken']} (shop.tasks.mistaken)" in warning
    customers = [customer for (customer,) in eyes.all("SELECT customer FROM shop_letter ORDER BY 1")]
    assert customers == [0, 4]  # that of `write`, and that of which the log has warned
    same = (
        "SELECT (SELECT xmin FROM pgqueue.job_done WHERE id = %s) = (SELECT xmin FROM shop_letter WHERE customer = 0)"
    )
    assert eyes.one(same, jobs["write"])
    assert eyes.one("SELECT result FROM pgqueue.job_done WHERE id = %s", jobs["write"]) == {"customer": 0}
    assert eyes.one("SELECT count(*) FROM pgqueue.job WHERE task = 'shop.tasks.follow'") == 1
    said = eyes.one("SELECT message FROM pgqueue.attempt WHERE job_id = %s", jobs["elsewhere"])
    assert "the alias 'other' is another database than 'default'" in said


def test_a_job_that_was_taken_away_keeps_nothing(tmp_path: Path, dsn: str, eyes: Eyes) -> None:
    eyes.do(TABLE)
    project = DjangoProject(tmp_path, {"default": database(dsn)}, TASKS)
    enqueue(dsn, "lost", 7)
    with project.working() as worker:
        worker.says("lost")
        worker.signal(SIGTERM)
        worker.ends()
    assert eyes.one("SELECT count(*) FROM shop_letter") == 0


def test_a_drain_in_a_test_runs_the_same_handler(tmp_path: Path, dsn: str) -> None:
    project = DjangoProject(tmp_path, {"default": database(dsn)}, TASKS)
    (tmp_path / "shop" / "tests.py").write_text("""
from django.db import connection
from django.test import TestCase
from pgqueue.testing import drain
from shop.models import Letter
from shop.tasks import cancel, fail, write

class Drained(TestCase):
    def test_it(self):
        write.enqueue("default", customer=1)
        fail.enqueue("default", customer=2)
        cancel.enqueue("default", customer=3)
        drained = drain(connection)
        self.assertEqual([each.customer for each in Letter.objects.all()], [1])

""")
    assert "Ran 1 test" in project.manage("test")


@pytest.mark.parametrize("function", ["async def fn(): ...", "class fn: ..."])
def test_what_cannot_be_in_a_transaction_is_refused(function: str, tmp_path: Path, dsn: str) -> None:
    tasks = f"from pgqueue.integrations.django.transactions import transactional\n\n@transactional\n{function}\n"
    project = DjangoProject(tmp_path, {"default": database(dsn)}, tasks)
    assert "@transactional stands below @pgqueue.task, above a plain def" in project.manage("check", code=1)
