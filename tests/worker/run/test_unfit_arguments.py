"""Arguments that do not fit the function of this worker: another version may take them, so no attempt is spent."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from executor_bench import Bench, made
from workers import Eyes, until, work

import pgqueue
from pgqueue import InvalidArguments, RetryPolicy
from pgqueue.client.tasks import Task, task
from pgqueue.jobs import outcomes
from pgqueue.jobs.outcomes import UNFIT_FIRST, UNFIT_MOST, UNFIT_SECONDS, Failed, Retried
from pgqueue.testing import Clock, Drained

Conn = psycopg.Connection[Any]
CALLED: list[tuple[Any, ...]] = []


def charge(order: int) -> None:
    CALLED.append((order,))


async def charge_on_loop(order: int) -> None:
    CALLED.append((order,))


def charge_newly(order: int, currency: str) -> None:
    CALLED.append((order, currency))


def old(on_loop: bool = False, **options: Any) -> Task[..., Any]:
    return made(charge_on_loop if on_loop else charge, "unfit.charge", **options)


@pytest.fixture(autouse=True)
def nothing_called() -> None:
    CALLED.clear()


@pytest.mark.promise("F59")
@pytest.mark.parametrize("on_loop", [False, True], ids=["thread", "loop"])
@pytest.mark.parametrize("retry", [1, RetryPolicy(retry_on=(OSError,)), lambda attempt, error: None])
async def test_no_attempt_is_spent_whatever_the_policy_says(on_loop: bool, retry: Any) -> None:
    outcome = await Bench(old(on_loop, retry=retry)).run("unfit.charge", args='{"order":1,"currency":"EUR"}')
    assert isinstance(outcome, Retried) and not outcome.spent and not outcome.snoozed
    assert UNFIT_FIRST / 2 <= outcome.delay <= UNFIT_FIRST
    assert (outcome.problem.error_type, outcome.problem.traceback, CALLED) == ("InvalidArguments", None, [])
    assert "currency" in (outcome.problem.message or "")


@pytest.mark.promise("F59")
@pytest.mark.parametrize(("age", "most"), [(0.0, UNFIT_FIRST), (60.0, 60.5), (1_500.0, UNFIT_MOST), (3_590.0, 10.0)])
async def test_the_waits_grow_with_the_age_of_the_job_and_end_with_the_hour(age: float, most: float) -> None:
    outcome = await Bench(old()).run("unfit.charge", args='{"order":"x"}', age=age)
    assert isinstance(outcome, Retried) and 0 <= outcome.delay <= most


@pytest.mark.promise("F59")
async def test_after_the_hour_it_has_failed_for_its_arguments() -> None:
    outcome = await Bench(old()).run("unfit.charge", args='{"order":"x"}', age=UNFIT_SECONDS + 1)
    assert isinstance(outcome, Failed) and outcome.reason == "arguments"
    assert outcome.problem.error_type == "InvalidArguments"


async def test_fail_on_ends_it_at_once() -> None:
    for kind in (InvalidArguments, TypeError, Exception):
        outcome = await Bench(old(retry=RetryPolicy(fail_on=(kind,)))).run("unfit.charge", args="{}")
        assert isinstance(outcome, Failed) and outcome.reason == "arguments"


@pytest.mark.promise("F59")
async def test_a_handler_that_enqueues_wrongly_is_a_failed_attempt_like_any_other() -> None:
    def wrong(order: int) -> None:
        charge_task.new("x")

    charge_task = made(charge, "unfit.other")
    outcome = await Bench(made(wrong, "unfit.wrong")).run("unfit.wrong", args='{"order":1}')
    assert isinstance(outcome, Retried) and outcome.spent
    last = await Bench(made(wrong, "unfit.wrong", retry=1)).run("unfit.wrong", args='{"order":1}')
    assert isinstance(last, Failed) and last.reason == "error"


@task(name="unfit.drained", retry=2)
def drained(order: int) -> None:
    CALLED.append((order,))


@pytest.mark.promise("F59")
def test_by_the_database_it_lasts_an_hour(pgqueue_conn: Conn, pgqueue_drain: Callable[..., Drained]) -> None:
    [(job,)] = pgqueue_conn.execute("SELECT pgqueue.enqueue('unfit.drained', '{\"order\": \"x\"}')").fetchall()
    with Clock(pgqueue_conn) as clock:
        began = clock.now
        done = pgqueue_drain(clock)
        assert timedelta(minutes=59) < clock.now - began < timedelta(minutes=62)
    assert (done.failed, CALLED) == (1, []) and 8 < done.retried < 60
    found = pgqueue.get(pgqueue_conn, job)
    assert (found.state, found.reason, found.attempt) == ("failed", "arguments", 1)


@pytest.mark.promise("F59")
async def test_a_new_application_beside_old_workers_loses_nothing(
    dsn: str, eyes: Eyes, conn: Conn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outcomes, "UNFIT_FIRST", 0.2)
    new = made(charge_newly, "unfit.charge", retry=1)
    new.enqueue(conn, 1, "EUR")
    conn.commit()
    tried = "SELECT count(*) FROM pgqueue.attempt WHERE error_type = 'InvalidArguments'"
    async with work(dsn, old(retry=1), poll=0.05):
        await until(lambda: eyes.one(tried) >= 2)
    async with work(dsn, new, poll=0.05):
        await until(eyes.done(1))
    assert eyes.all("SELECT state, attempt FROM pgqueue.job") == [("completed", 1)]
    assert CALLED == [(1, "EUR")]
