"""What a handler asks for, returned or raised, and what becomes of it in the database."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from executor_bench import Bench, made
from workers import Eyes, until, work

import pgqueue
from pgqueue import Cancel, Fail, InvalidOption, Retry, RetryPolicy, Snooze, testing
from pgqueue.client.tasks import Task, task
from pgqueue.jobs.job import Job
from pgqueue.jobs.outcomes import MESSAGE_MOST, Cancelled, Completed, Failed, Outcome, Problem, Retried
from pgqueue.testing import Clock, Drained

Conn = psycopg.Connection[Any]
Drain = Callable[..., Drained]


def gives(what: Any, raised: bool, on_loop: bool, **options: Any) -> Task[..., Any]:
    """A task whose handler returns `what`, or raises it."""

    def in_thread() -> Any:
        if raised:
            raise what
        return what

    async def loop() -> Any:
        return in_thread()

    return made(loop if on_loop else in_thread, "gives", **options)


async def outcome_of(given: Task[..., Any], **values: Any) -> Outcome:
    return await Bench(given).run("gives", **values)


@pytest.mark.parametrize("raised", [False, True], ids=["returned", "raised"])
@pytest.mark.parametrize("on_loop", [False, True], ids=["thread", "loop"])
@pytest.mark.parametrize(
    ("ask", "expected"),
    [
        (Snooze(60), Retried(60.0, Problem("snoozed"), spent=False, snoozed=True)),
        (Snooze(timedelta(minutes=2)), Retried(120.0, Problem("snoozed"), spent=False, snoozed=True)),
        (Retry(5), Retried(5.0, Problem("retried", "Retry", "again in 5 s"))),
        (Retry(), Retried(40.0, Problem("retried", "Retry", "again as the policy says"))),
        (Cancel("sold\x00 out"), Cancelled("sold\\0 out")),
        (Fail("no such card"), Failed("error", Problem("failed", "Fail", "no such card"))),
    ],
)
async def test_returned_and_raised_mean_the_same(
    ask: Exception, expected: Outcome, raised: bool, on_loop: bool
) -> None:
    given = gives(ask, raised, on_loop, retry=RetryPolicy(function=lambda attempt, error: 40.0))
    assert await outcome_of(given) == expected


GROUPS: dict[str, tuple[list[BaseException], type[Outcome]]] = {
    "snoozes": ([Snooze(60), Snooze(70)], Retried),
    "a cancel": ([Cancel("gone")], Cancelled),
    "a group of cancels": ([ExceptionGroup("in it", [Cancel("gone")]), Cancel("gone, too")], Cancelled),
    "a fail": ([Fail("no")], Failed),
    "mixed": ([Cancel("gone"), ValueError("x")], Retried),
    "mixed asks": ([Cancel("gone"), Snooze(60)], Retried),
}


@pytest.mark.promise("F48")
@pytest.mark.parametrize("on_loop", [False, True], ids=["thread", "loop"])
@pytest.mark.parametrize("name", GROUPS)
async def test_what_tasks_of_a_group_ask_for_is_heard_if_all_ask_for_the_same(name: str, on_loop: bool) -> None:
    errors, kind = GROUPS[name]
    outcome = await outcome_of(gives(BaseExceptionGroup("many", errors), raised=True, on_loop=on_loop))
    assert isinstance(outcome, kind)
    if name == "snoozes":
        assert outcome == Retried(60.0, Problem("snoozed"), spent=False, snoozed=True)
    if name.startswith("mixed"):
        assert isinstance(outcome, Retried) and outcome.problem.error_type == "ExceptionGroup"


async def test_a_task_group_passes_on_what_its_task_asks_for() -> None:
    async def asks() -> None:
        raise Cancel("sold out")

    async def handler() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(asks())

    assert await outcome_of(made(handler, "gives")) == Cancelled("sold out")


@pytest.mark.parametrize("ask", [Retry(5), Retry()])
async def test_retry_on_the_last_attempt_fails_the_job_and_snooze_goes_on_for_ever(ask: Retry) -> None:
    last = await outcome_of(gives(ask, True, True, retry=3), attempt=3)
    assert isinstance(last, Failed)
    assert last.reason == "error"
    assert isinstance(await outcome_of(gives(ask, True, True, retry=3), attempt=2), Retried)
    assert isinstance(await outcome_of(gives(ask, True, True, retry=9), attempt=2, max_attempts=2), Failed)
    assert isinstance(await outcome_of(gives(Snooze(1), True, True, retry=1), attempt=1), Retried)


async def test_retry_is_asked_for_whatever_the_policy_retries() -> None:
    for policy in (RetryPolicy(retry_on=(OSError,)), RetryPolicy(fail_on=(Exception,))):
        assert isinstance(await outcome_of(gives(Retry(), True, True, retry=policy)), Retried)
    given_up = gives(Retry(), True, True, retry=lambda attempt, error: None)
    assert isinstance(await outcome_of(given_up), Failed)


async def test_retry_from_an_error_keeps_that_error() -> None:
    def translates() -> None:
        try:
            raise KeyError("stock")
        except KeyError as error:
            raise Retry(5) from error

    outcome = await Bench(made(translates, "translates")).run("translates")
    assert isinstance(outcome, Retried)
    assert (outcome.problem.outcome, outcome.problem.error_type) == ("retried", "KeyError")
    assert "in translates" in (outcome.problem.traceback or "")


async def test_an_exception_that_is_returned_is_a_result_like_any_other() -> None:
    outcome = await outcome_of(gives(ValueError("no"), False, True))
    assert isinstance(outcome, Failed)
    assert "cannot be stored" in (outcome.problem.message or "")
    assert await outcome_of(gives(0, False, True)) == Completed("0")


async def test_a_long_reason_is_cut() -> None:
    assert await outcome_of(gives(Cancel("x" * 9_999), True, True)) == Cancelled("x" * MESSAGE_MOST)


@pytest.mark.parametrize("wrong", [lambda: Snooze(-1), lambda: Retry("soon"), lambda: Cancel(7), lambda: Fail(None)])  # type: ignore[arg-type]
def test_what_makes_no_sense_is_refused(wrong: Callable[[], Exception]) -> None:
    with pytest.raises(InvalidOption):
        wrong()


# In the database -----------------------------------------------------------------------------------------------------


@task(name="asks.snoozes", retry=1)
async def snoozes(job: Job) -> int | Snooze:
    return job.attempt if job.snoozes == 3 else Snooze(0.01)


@task(name="asks.naps", retry=1)
async def naps(job: Job) -> int | Snooze:
    return job.attempt if job.snoozes == 3 else Snooze(timedelta(days=7))


@task(name="asks.transfer", retry=5)
def transfer(cents: int) -> str:
    return "transferred" if cents <= 40 else "refused: balance 40"


@task(name="asks.card", retry=5)
def card(number: str) -> None:
    raise Fail("no such card") if number == "0" else Cancel("the customer left")


@pytest.mark.promise("F14")
async def test_snoozes_are_counted_apart_and_spend_no_attempt(dsn: str, eyes: Eyes, conn: psycopg.Connection) -> None:
    snoozes.enqueue(conn)
    conn.commit()
    async with work(dsn, snoozes, poll=0.05):
        await until(eyes.done(1))
    assert eyes.all("SELECT state, attempt, snoozes, crashes, result FROM pgqueue.job") == [("completed", 1, 3, 0, 1)]
    assert eyes.all("SELECT outcome, count(*) FROM pgqueue.attempt GROUP BY 1") == [("snoozed", 3)]


def test_a_snooze_lasts_as_long_as_it_says(pgqueue_conn: Conn, pgqueue_drain: Drain) -> None:
    with Clock(pgqueue_conn) as clock:
        job = naps.enqueue(pgqueue_conn)
        assert pgqueue_drain().retried == 1
        clock.advance(days=6, hours=23)
        assert pgqueue_drain() == Drained()
        clock.advance(hours=1)
        drained = pgqueue_drain(clock)  # which turns it on over the two that follow
        assert (drained.retried, drained.completed) == (2, 1)
        assert clock.now - pgqueue.get(pgqueue_conn, job.id).enqueued_at == timedelta(days=21)
    found = pgqueue.get(pgqueue_conn, job.id)
    assert (found.attempt, found.snoozes, found.result) == (1, 3, 1)
    assert [each.outcome for each in found.attempts] == ["snoozed"] * 3


@pytest.mark.promise("T14")
def test_a_business_refusal_is_an_early_success_and_an_end_asked_for_is_final(
    pgqueue_conn: Conn, pgqueue_drain: Drain
) -> None:
    conn = pgqueue_conn
    jobs = transfer.enqueue(conn, 50), card.enqueue(conn, "0"), card.enqueue(conn, "1")
    done = pgqueue_drain()
    assert (done.completed, done.failed, done.cancelled, done.retried) == (1, 1, 1, 0)
    found = [pgqueue.get(conn, job.id) for job in jobs]
    assert [(each.state, each.attempt, each.result, each.reason) for each in found] == [
        ("completed", 1, "refused: balance 40", None),
        ("failed", 1, None, "error"),
        ("cancelled", 1, None, "the customer left"),
    ]
    assert [(each.outcome, each.message) for job in found for each in job.attempts] == [
        ("failed", "no such card"),
        ("cancelled", "the customer left"),
    ]


sent: list[int] = []


@task(name="asks.notify", retry=RetryPolicy(attempts=3, first=0))
def notify(job: Job, order: int) -> None:
    """The pattern of the docs: look first, mark only after the effect."""
    with pgqueue.connect() as conn:
        row = conn.execute("SELECT delivered FROM shop WHERE id = %s", [order]).fetchone()
        if row is None or row[0]:
            return
        if job.attempt == 1:
            raise ConnectionError("the sender is down")
        sent.append(order)
        conn.execute("UPDATE shop SET delivered = true WHERE id = %s", [order])


@pytest.mark.promise("I03", "I07")
@pytest.mark.usefixtures("pgqueue_db")
def test_a_missing_record_is_a_quiet_end_and_a_failed_sender_is_tried_again_unmarked(conn: Conn) -> None:
    sent.clear()
    conn.execute("CREATE TABLE shop (id int PRIMARY KEY, delivered boolean NOT NULL DEFAULT false)")
    conn.execute("INSERT INTO shop (id) VALUES (1)")
    gone, there = notify.enqueue(conn, 2), notify.enqueue(conn, 1)
    conn.commit()
    done = testing.drain()
    assert (done.completed, done.retried, [str(error) for error in done.errors]) == (2, 1, ["the sender is down"])
    assert [pgqueue.get(conn, job.id).attempt for job in (gone, there)] == [1, 2]
    assert [each.message for each in pgqueue.get(conn, there.id).attempts] == ["the sender is down"]
    assert (sent, conn.execute("SELECT id, delivered FROM shop").fetchall()) == ([1], [(1, True)])


def test_the_public_names() -> None:
    assert {"Snooze", "Retry", "Cancel", "Fail"} <= set(pgqueue.__all__)
