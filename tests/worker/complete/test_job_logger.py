"""What is logged of jobs: each attempt that did not succeed, once, with its job's fields; good ends if asked for."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from functools import partial
from time import perf_counter
from typing import Any

import psycopg
import pytest
from handlers import begins, begun
from workers import Eyes, until, work

import pgqueue
from pgqueue.client import middleware
from pgqueue.client.middleware import Hooks
from pgqueue.client.tasks import task
from pgqueue.errors import JobLost
from pgqueue.jobs.fields import claimed
from pgqueue.jobs.job import Job
from pgqueue.jobs.outcomes import (
    COMPLETED,
    LATE,
    RELEASED,
    WRITTEN,
    Cancelled,
    Completed,
    Failed,
    Outcome,
    Problem,
    Retried,
    interrupted,
    problem,
)
from pgqueue.worker.complete import job_logger


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[logging.LogRecord]]]:
    """What was logged of jobs so far."""
    caplog.set_level(logging.INFO, "pgqueue.job")
    yield lambda: [record for record in caplog.records if record.name == "pgqueue.job"]


def a_job(began: float | None = None) -> Job:
    job = Job(claimed(id=7, queue="mail", task="mail.send", attempt=2), claim=1)
    if began is not None:
        job.began = began
    return job


PROBLEM = Problem("failed", "KeyError", "'sku'", "Traceback …")
GIVEN_BACK = Retried(1, Problem("interrupted", "Away", "x", "Traceback …"), spent=False)


@pytest.mark.parametrize(
    ("outcome", "level", "said"),
    [
        (Retried(9.71, PROBLEM), "WARNING", "failed, again in 9.7 s: KeyError: 'sku'"),
        (Failed("error", PROBLEM), "ERROR", "failed and is given up: KeyError: 'sku'"),
        (Failed("error", Problem("failed", "Fail", "no\n  use")), "ERROR", "failed and is given up: Fail: no use"),
        (Failed("error", Problem("failed", "KeyError", "")), "ERROR", "failed and is given up: KeyError"),
        (Failed("error", Problem("failed", None, "too large")), "ERROR", "failed and is given up: too large"),
        (Retried(5, Problem("timeout", "JobTimeout", "x")), "WARNING", "timed out, again in 5.0 s: JobTimeout: x"),
        (Failed("timeout", Problem("timeout", "JobTimeout", "x")), "ERROR", "timed out and is given up: JobTimeout: x"),
        (Retried(10, Problem("unknown", None, "no task"), spent=False), "WARNING", "failed, again in 10.0 s: no task"),
        (GIVEN_BACK, "WARNING", "is given back, again in 1.0 s: Away: x"),
        (Cancelled("not wanted"), "WARNING", "cancelled: not wanted"),
        (LATE, "WARNING", "cancelled: deadline"),
        (interrupted("its worker stops"), "WARNING", "released: its worker stops"),
    ],
)  # fmt: skip
def test_what_did_not_succeed_is_told_in_one_sentence(
    outcome: Outcome, level: str, said: str, lines: Callable[[], list[logging.LogRecord]]
) -> None:
    job_logger.report(a_job(), outcome)
    [line] = lines()
    assert (line.levelname, line.getMessage()) == (level, f"job 7 (mail.send, queue mail, attempt 2) {said}")
    assert bool(line.exc_text) == (outcome in (Retried(9.71, PROBLEM), Failed("error", PROBLEM)))


@pytest.mark.promise("F343")
@pytest.mark.parametrize("end", [partial(Retried, 8.6), partial(Failed, "error")])
def test_a_run_whose_job_was_taken_over_is_left_to_the_completer(
    end: Callable[[Problem], Outcome], lines: Callable[[], list[logging.LogRecord]]
) -> None:
    """Naive: it says "failed, again in 8.6 s" with a traceback, and nothing of that is true."""
    job_logger.report(a_job(), end(problem("failed", JobLost("taken over", job_id=7))))
    assert lines() == []


@pytest.mark.parametrize(
    "outcome",
    [COMPLETED, Completed("1"), WRITTEN, RELEASED, Retried(5, Problem("snoozed"), spent=False, snoozed=True)],
    ids=str,
)
def test_what_went_well_is_not_told(outcome: Outcome, lines: Callable[[], list[logging.LogRecord]]) -> None:
    job_logger.report(a_job(), outcome)
    assert lines() == []


def test_the_fields_are_there_for_the_formatters_of_the_application(
    lines: Callable[[], list[logging.LogRecord]],
) -> None:
    job_logger.report(a_job(perf_counter() - 2), Retried(9.7, PROBLEM))
    [line] = lines()
    assert 2 <= line.__dict__["seconds"] < 30
    assert "attempt 2) failed after " in line.getMessage()
    wanted = {"job_id": 7, "task": "mail.send", "queue": "mail", "attempt": 2, "outcome": "retried", "reason": "error"}
    wanted |= {"error_type": "KeyError", "error": "'sku'", "delay": 9.7}
    assert wanted.items() <= vars(line).items()
    assert logging.Formatter("%(job_id)d %(message)s").format(line).endswith("\nTraceback …")


def test_one_that_never_started_has_no_seconds(lines: Callable[[], list[logging.LogRecord]]) -> None:
    job_logger.report(a_job(), LATE)
    [line] = lines()
    assert "seconds" not in vars(line)


def test_a_filter_that_fails_is_shown_and_takes_no_slot(capsys: pytest.CaptureFixture[str]) -> None:
    def fails(record: logging.LogRecord) -> bool:
        raise RuntimeError("the filter's own")

    job_logger.log.addFilter(fails)
    try:
        job_logger.report(a_job(), LATE)
    finally:
        job_logger.log.removeFilter(fails)
    assert "the filter's own" in capsys.readouterr().err


def test_nothing_is_made_of_a_line_that_nobody_wants(
    monkeypatch: pytest.MonkeyPatch, lines: Callable[[], list[logging.LogRecord]]
) -> None:
    monkeypatch.setattr(job_logger.log, "level", logging.CRITICAL)
    job_logger.log.manager._clear_cache()  # type: ignore[attr-defined]
    job_logger.report(a_job(), LATE)
    assert lines() == []


def test_hooks_for_good_ends_are_there_only_where_somebody_listens(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pgqueue.job")
    none = Hooks()
    assert job_logger.with_lines(none) is none
    caplog.set_level(logging.DEBUG, "pgqueue.job")
    assert len(job_logger.with_lines(none).on_start) == len(job_logger.with_lines(none).on_finish) == 1


# In a worker ---------------------------------------------------------------------------------------------------------


@task(name="joblog.fails", retry=1)
def fails() -> None:
    raise KeyError("sku")


@task(name="joblog.slow", timeout=0.1, retry=1)
async def slow() -> None:
    await asyncio.sleep(60)


@task(name="joblog.slow_thread", timeout=0.1, retry=1)
def slow_thread() -> None:
    ends = perf_counter() + 60
    while perf_counter() < ends:
        pass


@task(name="joblog.waits")
async def waits(job: Job) -> None:
    begins(job)
    await asyncio.sleep(60)


@task(name="joblog.fine")
async def fine() -> int:
    return 1


async def test_each_failed_attempt_timeout_and_cancellation_is_told_once(
    dsn: str, eyes: Eyes, lines: Callable[[], list[logging.LogRecord]]
) -> None:
    with psycopg.connect(dsn) as conn:
        made: list[pgqueue.JobHandle[Any]] = [
            fails.enqueue(conn),
            slow.enqueue(conn),
            slow_thread.enqueue(conn),
            fine.enqueue(conn),
        ]
        late, waiting = fine.using(deadline=1e-6).enqueue(conn), waits.enqueue(conn)
    async with work(dsn, fails, slow, slow_thread, fine, waits):
        await until(lambda: eyes.states() == {"failed": 3, "completed": 1, "cancelled": 1, "running": 1})
        await begun(waiting.id)
        with psycopg.connect(dsn) as conn:
            pgqueue.cancel(conn, waiting.id, reason="not wanted")
        await until(eyes.is_in(waiting.id, "cancelled"))
    told = {line.__dict__["job_id"]: line for line in lines()}
    assert len(told) == len(lines())
    assert set(told) == {*(job.id for job in made[:3]), late.id, waiting.id}
    assert [told[job.id].__dict__["reason"] for job in made[:3]] == ["error", "timeout", "timeout"]
    assert told[waiting.id].__dict__["reason"] == "not wanted"
    assert all(told[job.id].__dict__["seconds"] >= 0.1 for job in made[1:3])
    assert "seconds" not in told[late.id].__dict__
    assert "KeyError" in (told[made[0].id].exc_text or "")


async def test_what_a_transaction_has_written_is_told_as_what_it_is(
    dsn: str, eyes: Eyes, lines: Callable[[], list[logging.LogRecord]]
) -> None:
    @task(name="joblog.commits", transactional=True)
    async def commits(job: Job, what: str) -> Any:
        await job.aconnection()
        return {"fail": pgqueue.Fail("cannot be"), "snooze": pgqueue.Snooze(60)}.get(what)

    with psycopg.connect(dsn) as conn:
        failing = commits.enqueue(conn, "fail")
        commits.enqueue_many(conn, [("snooze",), ("fine",)])
    async with work(dsn, commits):
        await until(lambda: eyes.states() == {"failed": 1, "scheduled": 1, "completed": 1})
    [line] = lines()
    assert (line.levelname, line.__dict__["job_id"], line.__dict__["error"]) == ("ERROR", failing.id, "cannot be")


async def test_started_and_finished_are_told_of_a_worker_that_began_with_debug(
    dsn: str, eyes: Eyes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "pgqueue.job")

    @middleware.on_finish
    def also(job: Job, outcome: pgqueue.JobOutcome) -> None:
        caplog.set_level(logging.DEBUG, "pgqueue.job")

    with psycopg.connect(dsn) as conn:
        fine.enqueue(conn)
        fails.enqueue(conn)
    async with work(dsn, fails, fine):
        await until(lambda: eyes.states() == {"completed": 1, "failed": 1})
    middleware._on_finish.remove(also)
    said = sorted(
        (record.__dict__["task"], record.levelname, record.__dict__.get("outcome", "started"))
        for record in caplog.records
        if record.name == "pgqueue.job"
    )
    assert said == [
        ("joblog.fails", "DEBUG", "started"),
        ("joblog.fails", "ERROR", "failed"),
        ("joblog.fine", "DEBUG", "completed"),
        ("joblog.fine", "DEBUG", "started"),
    ]
