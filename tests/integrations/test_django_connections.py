"""Django's connections in a worker: after all sessions were ended no job fails, and healthy connections are kept."""

from __future__ import annotations

from pathlib import Path
from signal import SIGTERM
from typing import Any

import psycopg
import pytest
from django_projects import TABLE, DjangoProject, database
from psycopg import sql
from workers import Eyes, wait_until

TASKS = """
import threading
import pgqueue
from django.db import connection, transaction
from shop.models import Letter

PID = "SELECT pg_backend_pid()"

@pgqueue.middleware
def first(job, call):
    Letter.objects.exists()  # middleware of the application has connections that work, too
    return call()

@pgqueue.task(retry=1)
def write(n: int) -> dict[str, int]:
    logged = len(connection.queries_log) - 1
    Letter.objects.create(customer=n)
    with connection.cursor() as cursor:
        cursor.execute(PID)
        return {"logged": logged, "pid": cursor.fetchone()[0], "thread": threading.get_ident()}

@pgqueue.task(retry=1)
async def awrite(n: int) -> None:
    await Letter.objects.acreate(customer=n)
    await Letter.objects.aget(customer=n)

@pgqueue.task(retry=1)
def leave_open() -> None:
    transaction.atomic().__enter__()
    Letter.objects.create(customer=-1)
"""
NUMBER = 24
AGES: dict[str, dict[str, Any]] = {
    "none": {},
    "600": {"CONN_MAX_AGE": 600},
    "600, checked": {"CONN_MAX_AGE": 600, "CONN_HEALTH_CHECKS": True},
    "pool": {"OPTIONS": {"pool": {"min_size": 4, "max_size": 5}}},
}


def project_of(home: Path, dsn: str, eyes: Eyes, ages: dict[str, Any], more: str = "") -> DjangoProject:
    eyes.do(TABLE)
    return DjangoProject(home, {"default": database(dsn, **ages)}, TASKS, more)


def enqueue(dsn: str, task: str, first: int = 0, number: int = NUMBER) -> None:
    with psycopg.connect(dsn) as conn:
        conn.execute(
            "SELECT pgqueue.enqueue(%s, jsonb_build_object('n', n)) FROM generate_series(%s::int, %s) n",
            [f"shop.tasks.{task}", first, first + number - 1],
        )


def end_sessions(eyes: Eyes, whose: str) -> None:
    """End these sessions of the test's database, and wait until they are gone."""
    others = sql.SQL("FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() AND {}")
    those = others.format(sql.SQL(whose)).as_string()
    eyes.all(f"SELECT pg_terminate_backend(pid) {those}")
    pids = [pid for (pid,) in eyes.all(f"SELECT pid {those}")]
    wait_until(lambda: not eyes.one("SELECT count(*) FROM pg_stat_activity WHERE pid = ANY (%s)", pids))


def failures(eyes: Eyes) -> list[Any]:
    return eyes.all("SELECT task, attempt, state FROM pgqueue.job WHERE state <> 'completed' OR attempt > 1")


def ended(eyes: Eyes, number: int) -> None:
    ends = "SELECT count(*) FROM pgqueue.job WHERE state IN ('completed', 'failed')"
    wait_until(lambda: eyes.one(ends) >= number)


def no_job_fails(home: Path, dsn: str, eyes: Eyes, ages: dict[str, Any], whose: str) -> None:
    project = project_of(home, dsn, eyes, ages)
    with project.working("-c", "4") as worker:
        worker.says("ready")
        done = 0
        for task in ("write", "awrite"):
            for first in (0, NUMBER):
                if first:
                    end_sessions(eyes, whose)
                done += NUMBER
                enqueue(dsn, task, first + 2 * NUMBER * (task == "awrite"))
                ended(eyes, done)
        assert failures(eyes) == []
        worker.signal(SIGTERM)
        assert worker.ends() == 0, worker.output


DJANGO = "datname = current_database() AND pid <> pg_backend_pid() AND application_name NOT LIKE 'pgqueue%'"


@pytest.mark.promise("F271")
def test_no_job_fails_after_the_sessions_of_django_were_ended(tmp_path: Path, dsn: str, eyes: Eyes) -> None:
    no_job_fails(tmp_path, dsn, eyes, AGES["600"], DJANGO)


@pytest.mark.second
@pytest.mark.promise("F271")
@pytest.mark.parametrize("ages", AGES)
def test_no_job_fails_after_all_sessions_were_ended(ages: str, tmp_path: Path, dsn: str, eyes: Eyes) -> None:
    no_job_fails(tmp_path, dsn, eyes, AGES[ages], "true")


@pytest.mark.promise("F271")
def test_a_healthy_connection_is_kept_and_debug_keeps_no_query(tmp_path: Path, dsn: str, eyes: Eyes) -> None:
    project = project_of(tmp_path, dsn, eyes, AGES["600"], "DEBUG = True")
    enqueue(dsn, "write", number=100)
    with project.working("-c", "4") as worker:
        ended(eyes, 100)
        worker.signal(SIGTERM)
        assert worker.ends() == 0, worker.output
    assert failures(eyes) == []
    results = [result for (result,) in eyes.all("SELECT result FROM pgqueue.job_done")]
    assert {each["logged"] for each in results} <= {0, 1}  # of this job: the check of the connection
    threads = {each["thread"] for each in results}
    assert len({each["pid"] for each in results}) == len(threads) <= 4


@pytest.mark.promise("F271")
def test_a_block_that_a_job_left_open_is_not_the_next_jobs(tmp_path: Path, dsn: str, eyes: Eyes) -> None:
    project = project_of(tmp_path, dsn, eyes, AGES["600"])
    with psycopg.connect(dsn) as conn:
        conn.execute("SELECT pgqueue.enqueue('shop.tasks.leave_open', '{}')")
    with project.working("-c", "1") as worker:
        ended(eyes, 1)
        enqueue(dsn, "write", number=3)
        ended(eyes, 4)
        worker.signal(SIGTERM)
        assert worker.ends() == 0, worker.output
    assert failures(eyes) == []
    assert eyes.all("SELECT customer FROM shop_letter ORDER BY 1") == [(0,), (1,), (2,)]


@pytest.mark.promise("F271")
def test_a_thread_outside_of_requests_and_jobs_has_a_connection_that_works(
    tmp_path: Path, dsn: str, eyes: Eyes
) -> None:
    """As that in which a mounted dashboard asks which user it is."""
    project = project_of(tmp_path, dsn, eyes, AGES["600"])
    project.python(f"""
import psycopg
from django.db import connection
from pgqueue.integrations.django.connections import fresh_connections
from shop.models import Letter

def page():
    with fresh_connections():
        Letter.objects.exists()
        return connection.connection.info.backend_pid

pid = page()
assert page() == pid
with psycopg.connect({dsn!r}, autocommit=True) as conn:
    conn.execute("SELECT pg_terminate_backend(%s, 60000)", [pid])
assert page() != pid
""")
