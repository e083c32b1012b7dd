"""A timeout of a job's own: how it comes into the headers, in every way of enqueuing, and what is read out of them."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from workers import Eyes, until, work

import pgqueue
from pgqueue import Cron, Job
from pgqueue.client import schedules
from pgqueue.client.tasks import Task, task
from pgqueue.jobs.headers import TIMEOUT, timeout_of, with_timeout


@task(name="headers.plain")
def plain(n: int = 0) -> None: ...


@task(name="headers.follows")
def follows(job: Job) -> None:
    job.enqueue(plain.using(timeout=4))


def headers(asked: Task[..., Any]) -> Any:
    given = asked.new().headers
    return None if given is None else json.loads(given)


def test_a_copy_has_the_timeout_in_the_headers_of_its_jobs_and_the_task_has_none() -> None:
    assert headers(plain.using(timeout=timedelta(minutes=5))) == {TIMEOUT: 300.0}
    assert headers(plain.using(timeout=5).using(priority=0)) == {TIMEOUT: 5.0}
    assert headers(plain.using(timeout=5).using(timeout=0.5)) == {TIMEOUT: 0.5}
    assert headers(plain) is None
    assert headers(plain.using(priority=0)) is None


def test_headers_and_a_timeout_keep_each_other_in_either_order() -> None:
    both = {"trace": "é\u2028", "n": [1 << 70, {"a": 0.1}], TIMEOUT: 5.0}
    said = {name: value for name, value in both.items() if name != TIMEOUT}
    assert headers(plain.using(timeout=5).using(headers=said)) == both
    assert headers(plain.using(headers=said).using(timeout=5)) == both
    assert headers(plain.using(headers=said, timeout=5)) == both
    assert headers(plain.using(timeout=5).using(headers=said).using(headers={})) == {TIMEOUT: 5.0}
    assert headers(plain.using(headers=said).using(headers={"a": 1}).using(timeout=7)) == {"a": 1, TIMEOUT: 7.0}


def test_a_header_of_the_reserved_name_is_taken_as_it_is_and_gives_way_to_the_option() -> None:
    """As one that names a tick does."""
    assert headers(plain.using(headers={TIMEOUT: 9})) == {TIMEOUT: 9}
    assert headers(plain.using(headers={TIMEOUT: 9}).using(headers={"a": 1})) == {"a": 1}
    for asked in (plain.using(headers={TIMEOUT: 9}, timeout=5), plain.using(timeout=5).using(headers={TIMEOUT: "x"})):
        assert headers(asked) == {TIMEOUT: 5.0}


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        (None, None),
        ("{}", None),
        ('{"a": 1}', None),
        ('{"a": "pgqueue:timeout"}', None),
        ('{"a": {"pgqueue:timeout": 5}}', None),
        ('{"pgqueue:timeout": null}', None),
        ('{"a": 1, "pgqueue:timeout": 5}', 5.0),
        ('{"pgqueue:timeout": 0.25}', 0.25),
        ('{"pgqueue:timeout": 3153600000}', 3_153_600_000.0),
    ],
)
def test_what_headers_name(given: str | None, seconds: float | None) -> None:
    assert timeout_of(given) == seconds
    if seconds:
        assert timeout_of(with_timeout(given, 7.0)) == 7.0


DEEP = "[" * 100_000 + "]" * 100_000
BAD = ["0", "-1", '"5"', "true", "[5]", "{}", "3153600001", "1" + "0" * 400, "1" + "0" * 10_000, '"NaN"', "-0.5"]


@pytest.mark.parametrize("value", BAD)
def test_what_cannot_be_a_timeout_is_said(value: str) -> None:
    with pytest.raises(ValueError):
        timeout_of(f'{{"a": 1, "pgqueue:timeout": {value}}}')


@pytest.mark.parametrize(
    "given", ['["pgqueue:timeout"]', '"pgqueue:timeout"', '{"a": ' + DEEP + ', "pgqueue:timeout": 5}']
)
def test_headers_that_are_no_object_or_too_deep_are_said(given: str) -> None:
    with pytest.raises(ValueError):
        timeout_of(given)


async def test_the_row_has_it_however_it_was_enqueued(
    dsn: str, conn: psycopg.Connection, aconn: psycopg.AsyncConnection, eyes: Eyes
) -> None:
    own = plain.using(timeout=4)
    own.enqueue(conn)
    pgqueue.enqueue(conn, own)
    own.enqueue_many(conn, [(1,), {"n": 2}])
    pgqueue.enqueue_many(conn, [own.new(3), plain.using(delay=60, timeout=4, unique="u{n}").new(4)])
    unique = pgqueue.Unique("r", on_duplicate="replace")
    plain.using(timeout=9, unique=unique, delay=60).enqueue(conn)
    own.using(unique=unique).enqueue(conn)
    schedules.add(conn, "yearly", Cron("0 0 1 1 *"), own)
    schedules.run(conn, "yearly")
    conn.execute("SELECT pgqueue.enqueue('headers.plain', headers => '{\"pgqueue:timeout\": 4}')")
    follows.enqueue(conn)
    conn.commit()
    await own.aenqueue(aconn)
    await aconn.commit()
    async with work(dsn, plain, follows, poll=0.05):
        await until(lambda: eyes.one("SELECT count(*) FROM pgqueue.job WHERE task = 'headers.plain'") == 11)
    said = "SELECT DISTINCT (headers ->> 'pgqueue:timeout')::float8 FROM pgqueue.job WHERE task = 'headers.plain'"
    assert eyes.all(said) == [(4.0,)]


def test_a_job_that_is_run_again_has_it_still(conn: psycopg.Connection, eyes: Eyes) -> None:
    job = plain.using(timeout=4).enqueue(conn)
    pgqueue.testing.drain(conn)
    [answer] = pgqueue.retry(conn, job.id, again=True)
    assert answer.did == "again"
    found = conn.execute("SELECT headers FROM pgqueue.job WHERE state = 'available'").fetchall()
    assert found == [({TIMEOUT: 4.0, "retry_of": job.id},)]
