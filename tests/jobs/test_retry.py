"""Retry policies: how long until the next attempt, and when there is none."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from itertools import pairwise
from typing import Any

import psycopg
import pytest

import pgqueue
from pgqueue.client.tasks import task
from pgqueue.errors import InvalidOption
from pgqueue.jobs.retry import MAX_ATTEMPTS, RetryPolicy
from pgqueue.jobs.values import MAX_SECONDS
from pgqueue.testing import Clock, Drained

ALMOST_ONE = 1 - 2**-53


def span(policy: RetryPolicy, jitter: float) -> float:
    """Seconds from the first to the last attempt, all waits drawn alike."""
    waits = [policy.decide(attempt, OSError(), uniform=lambda: jitter) for attempt in range(1, policy.attempts + 1)]
    assert waits.pop() is None
    return sum(wait for wait in waits if wait is not None)


def test_ten_attempts_of_the_default_span_7_to_15_hours() -> None:
    assert span(RetryPolicy(), 0.0) == 27_065  # 7 h 31 min
    assert span(RetryPolicy(), ALMOST_ONE) == pytest.approx(54_130)  # 15 h 2 min
    assert 7 * 3600 < span(RetryPolicy(), 0.0) < span(RetryPolicy(), ALMOST_ONE) < 15.1 * 3600


@pytest.mark.parametrize(("attempt", "most"), [(1, 10), (2, 30), (3, 90), (7, 7290), (8, 21_600), (30_000, 21_600)])
def test_the_wait_grows_to_its_most_and_jitter_takes_up_to_half(attempt: int, most: float) -> None:
    policy = RetryPolicy()
    assert policy.delay(attempt, lambda: 0.0) == most / 2
    assert policy.delay(attempt, lambda: 0.5) == most * 0.75
    assert policy.delay(attempt, lambda: ALMOST_ONE) == pytest.approx(most)
    assert most / 2 <= policy.delay(attempt) <= most


@pytest.mark.parametrize("attempt", [1, 5, 32_000])
def test_no_wait_stays_no_wait(attempt: int) -> None:
    assert RetryPolicy(attempts=MAX_ATTEMPTS, first=0, factor=1e9).delay(attempt) == 0


def test_exceptions_decide() -> None:
    policy = RetryPolicy(retry_on=(OSError, ValueError), fail_on=(FileNotFoundError,))
    assert policy.decide(1, ConnectionError()) is not None
    assert policy.decide(1, ValueError()) is not None
    assert policy.decide(1, FileNotFoundError()) is None, "fail_on goes before retry_on"
    assert policy.decide(1, KeyError()) is None
    assert RetryPolicy().decide(1, KeyboardInterrupt()) is None, "no Exception: the process is to end"


@pytest.mark.parametrize("attempts", [1, 4])
def test_the_last_attempt_is_the_last(attempts: int) -> None:
    policy = RetryPolicy.of(attempts)
    assert [policy.decide(n, OSError()) is None for n in (attempts - 1, attempts, attempts + 1)] == [False, True, True]


@pytest.mark.parametrize("given", [2, 20])
def test_a_number_given_with_the_job_goes_first(given: int) -> None:
    policy = RetryPolicy(attempts=10)
    assert policy.decide(given - 1, OSError(), max_attempts=given) is not None
    assert policy.decide(given, OSError(), max_attempts=given) is None


def test_a_function_decides_alone() -> None:
    asked: list[tuple[int, BaseException]] = []

    def decide(attempt: int, exc: BaseException) -> float | timedelta | None:
        asked.append((attempt, exc))
        answers: dict[int, float | timedelta] = {1: 5, 2: timedelta(minutes=1)}
        return answers.get(attempt)

    policy, error = RetryPolicy.of(decide), OSError()
    assert [policy.decide(n, error) for n in (1, 2, 3, 50)] == [5.0, 60.0, None, None]
    assert asked == [(1, error), (2, error), (3, error), (50, error)]
    assert policy.decide(2, error, max_attempts=2) is None


@pytest.mark.parametrize("answer", [-1, float("nan"), "soon", True])
def test_a_functions_answer_that_is_no_duration_is_said(answer: Any) -> None:
    with pytest.raises(InvalidOption, match="the function's answer"):
        RetryPolicy.of(lambda attempt, exc: answer).decide(1, OSError())


async def on_loop(attempt: int, exc: BaseException) -> float:
    return 1


class Waits:
    """A callable object: its answer is not there when it returns."""

    async def __call__(self, attempt: int, exc: BaseException) -> float:
        return 1


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (on_loop, "called for its answer: use a plain def"),
        (Waits(), "called for its answer: use a plain def"),
        (partial(on_loop), "called for its answer: use a plain def"),
        (lambda attempt, exc: (yield 1), "called for its answer: use a plain def"),
        (lambda attempt: 1, r"called with \(attempt, exc\): too many positional"),
        (lambda attempt, exc, job: 1, r"called with \(attempt, exc\): missing a required argument: 'job'"),
        (lambda attempt, exc, *, job: 1, r"called with \(attempt, exc\): missing a required .*'job'"),
    ],
)
def test_a_function_that_cannot_answer_is_said_at_declaration(function: Any, why: str) -> None:
    """Else a job would end at its first error, for another reason."""

    def handler() -> None: ...

    for declare in (
        RetryPolicy.of,
        lambda given: RetryPolicy(function=given),
        lambda given: task(retry=given)(handler),
    ):
        with pytest.raises(InvalidOption, match=rf"retry .*{why}"):
            declare(function)


@pytest.mark.parametrize("function", [lambda *given: 1, lambda attempt, exc, most=5: 1, max, partial(min, 3)])
def test_a_function_that_can_be_called_so_is_taken(function: Any) -> None:
    assert RetryPolicy.of(function).function is function


def test_short_forms_and_durations() -> None:
    policy = RetryPolicy(first=timedelta(minutes=1), most=timedelta(hours=1))
    assert (policy.first, policy.most) == (60.0, 3600.0)
    assert RetryPolicy.of(policy) is policy
    assert RetryPolicy.of(3) == RetryPolicy(attempts=3)


@pytest.mark.parametrize("bad", ["3", None, 2.5, True, 0, -1, MAX_ATTEMPTS + 1, OSError, [1]])
def test_a_short_form_that_is_none(bad: Any) -> None:
    with pytest.raises(InvalidOption, match="retry"):
        RetryPolicy.of(bad)


@pytest.mark.parametrize(
    "options",
    [
        {"attempts": 0},
        {"attempts": 1.5},
        {"attempts": True},
        {"first": -1},
        {"first": float("inf")},
        {"first": "10"},
        {"factor": 0.5},
        {"factor": float("nan")},
        {"factor": float("inf")},
        {"factor": True},
        {"most": float("nan")},
        {"most": timedelta(seconds=-1)},
        {"most": MAX_SECONDS + 1},
        {"retry_on": OSError},
        {"retry_on": ["OSError"]},
        {"fail_on": (OSError(),)},
        {"fail_on": (int,)},
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidOption, match=f"retry: {next(iter(options))}"):
        RetryPolicy(**options)


@task(name="retry.never")
def never() -> None:
    raise OSError("no")


def test_a_job_that_always_fails_is_tried_ten_times_over_7_to_15_hours(
    pgqueue_conn: psycopg.Connection[Any], pgqueue_drain: Callable[..., Drained]
) -> None:
    with Clock(pgqueue_conn) as clock:
        job, began = never.enqueue(pgqueue_conn), clock.now
        done = pgqueue_drain(clock)
        assert (done.retried, done.failed, len(done.errors)) == (9, 1, 10)
        assert timedelta(hours=7) < clock.now - began < timedelta(hours=15.1)
    found = pgqueue.get(pgqueue_conn, job.id)
    assert (found.state, found.attempt, found.reason) == ("failed", 10, "error")
    waits = [after.started_at - before.finished_at for before, after in pairwise(found.attempts)]
    assert all(shorter < longer for shorter, longer in pairwise(waits[:7]))
