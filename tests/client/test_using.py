"""What `using` gives to one job: a retry policy whose waits travel with it, a limit and a rate under their names."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise
from typing import Any

import psycopg
import pytest
from executor_bench import Bench, made
from workers import Eyes, until, work

import pgqueue
from pgqueue import InvalidOption, Limit, Rate, Retry, RetryPolicy
from pgqueue.client import tasks
from pgqueue.client.tasks import Task, limitings, remote, task
from pgqueue.jobs.concurrency import limits_of, rates_of
from pgqueue.jobs.headers import RETRY, TIMEOUT, waits_of
from pgqueue.jobs.outcomes import Outcome, Retried
from pgqueue.testing import Clock, Drained

Conn = psycopg.Connection[Any]


@task(name="using.fails", retry=RetryPolicy(attempts=7, first=1_000, fail_on=(KeyError,)))
def fails(kind: str = "os") -> None:
    raise KeyError("no") if kind == "key" else OSError("no")


@task(name="using.limited", limit=3, rate=Rate("5/s", name="using.api"))
def limited(n: int = 0) -> None: ...


@task(name="using.plain")
def plain(n: int = 0) -> None: ...


POLICY = RetryPolicy(attempts=3, first=10, factor=2, most="15s")


@pytest.mark.promise("F61")
def test_attempts_and_waits_travel_with_the_job() -> None:
    waits = {"first": 10.0, "factor": 2.0, "most": 15.0}
    new = fails.using(retry=POLICY, timeout=5, headers={"trace": "x"}).new()
    assert new.max_attempts == 3
    assert json.loads(new.headers or "") == {"trace": "x", TIMEOUT: 5.0, RETRY: waits}
    again = fails.using(retry=POLICY).using(headers={"a": 1}).using(retry=5).new()
    assert (again.max_attempts, json.loads(again.headers or "")) == (5, {"a": 1, RETRY: waits})
    assert fails.using(retry=5).new().headers is None


@pytest.mark.promise("F61")
@pytest.mark.parametrize(
    "policy",
    [RetryPolicy(retry_on=(OSError,)), RetryPolicy(fail_on=(OSError,)), RetryPolicy.of(lambda attempt, error: 1.0)],
)
def test_what_is_of_the_code_is_refused(policy: RetryPolicy) -> None:
    with pytest.raises(InvalidOption, match=r"using\.fails.*retry_on, fail_on and a function belong to the code"):
        fails.using(retry=policy)


@pytest.mark.promise("F61")
def test_the_job_waits_as_it_was_told(pgqueue_conn: Conn, pgqueue_drain: Callable[..., Drained]) -> None:
    job = fails.using(retry=POLICY).enqueue(pgqueue_conn)
    other = fails.using(retry=POLICY).enqueue(pgqueue_conn, "key")
    with Clock(pgqueue_conn) as clock:
        done = pgqueue_drain(clock)
    assert (done.retried, done.failed) == (2, 2)
    found = pgqueue.get(pgqueue_conn, job.id)
    waits = [after.started_at - before.finished_at for before, after in pairwise(found.attempts)]
    assert timedelta(seconds=4.9) < waits[0] < timedelta(seconds=11) and waits[1] < timedelta(seconds=16)
    assert pgqueue.get(pgqueue_conn, other.id).attempt == 1  # fail_on is the task's


async def run_with(headers: str, given: Task[..., Any]) -> Outcome:
    bench = Bench(given)
    job = bench.job(given.name)
    job._row = (*job._row[:14], headers, *job._row[15:])
    bench.executor.offer(bench.pool, [job])
    return await bench.outcome(job.id)


async def test_a_retry_that_the_handler_asks_for_waits_so_too() -> None:
    def asks() -> None:
        raise Retry

    given = made(asks, "asks", retry=RetryPolicy(first=1_000))
    outcome = await run_with(json.dumps({RETRY: {"first": 1.0}}), given)
    assert isinstance(outcome, Retried) and 0.5 <= outcome.delay <= 1.0


@pytest.mark.promise("F61")
@pytest.mark.parametrize("value", ["5", "[]", '{"first":-1}', '{"factor":0.5}', '{"first":"1s"}', '{"other":1}'])
async def test_a_header_that_is_no_policy_harms_no_job(value: str, caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> None:
        raise OSError("no")

    headers = f'{{"{RETRY}": {value}}}'
    with pytest.raises(ValueError):
        waits_of(headers)
    outcome = await run_with(headers, made(broken, "broken", retry=RetryPolicy(first=1_000)))
    assert isinstance(outcome, Retried) and outcome.delay >= 500
    assert "cannot be a retry policy" in caplog.text


@pytest.mark.parametrize("given", [None, "{}", '{"a": "pgqueue:retry"}', '{"pgqueue:retry": null}'])
def test_headers_without_waits(given: str | None) -> None:
    assert waits_of(given) is None


# Limits and rates -----------------------------------------------------------------------------------------------------


@pytest.mark.promise("F62")
def test_the_names_travel_with_the_job_and_the_rest_stays() -> None:
    new = plain.using(limit=Limit(2, name="using.bulk"), rate=Rate("5/s", name="using.bulk", key="n:{n}")).new(7)
    assert (new.limit_key, new.rate_key) == ("using.bulk", "using.bulk:n:7")
    one = limited.using(limit=Limit(2, name="using.bulk")).new()
    assert (one.limit_key, one.rate_key) == ("using.bulk", "using.api")
    assert limited.new().limit_key == "using.limited"
    far = remote("using.elsewhere").using(rate="5/s").new(a=1)
    assert (far.limit_key, far.rate_key) == (None, "using.elsewhere")


@pytest.mark.promise("F62")
def test_two_numbers_for_one_name_are_refused() -> None:
    with pytest.raises(InvalidOption, match=r"limit 'using\.limited' is"):
        limited.using(limit=4)
    with pytest.raises(InvalidOption, match=r"rate 'using\.api' is"):
        plain.using(rate=Rate("6/s", name="using.api"))
    plain.using(limit=Limit(2, name="using.two"))
    with pytest.raises(InvalidOption, match=r"limit 'using\.two' is"):
        limited.using(limit=Limit(3, name="using.two"))
    assert limited.using(limit=3).new().limit_key == "using.limited"


def test_names_without_end_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would be kept for workers, which could never know them."""
    monkeypatch.setattr(tasks, "USED_MOST", len(tasks.used_limitings) + 1)
    for _ in range(2):
        plain.using(limit=Limit(2, name="user:1"))
    with pytest.raises(InvalidOption, match="use a lock, or the key of a rate"):
        plain.using(limit=Limit(2, name="user:2"))


def test_wrong_values_are_refused() -> None:
    wrongs: list[dict[str, Any]] = [{"limit": 0}, {"rate": "often"}, {"rate": Rate("5/s", key="{nothing}")}]
    for wrong in wrongs:
        with pytest.raises(InvalidOption):
            plain.using(**wrong)


@pytest.mark.promise("F62")
async def test_workers_declare_what_using_has_named(dsn: str, eyes: Eyes, conn: Conn) -> None:
    job = plain.using(limit=Limit(2, name="using.bulk"), rate=Rate("50/s", name="using.bulk"))
    said = limitings([plain])
    assert (limits_of(said), rates_of(said)["using.bulk"].count) == ({"using.bulk": 2}, 50)
    assert limitings([limited]) == [limited.limiting]
    job.enqueue_many(conn, [(1,), (2,), (3,)])
    conn.commit()
    async with work(dsn, plain):
        await until(eyes.done(3))
    assert eyes.all("SELECT name, n FROM pgqueue.key_limit") == [("using.bulk", 2)]
    keys = "SELECT DISTINCT limit_key, rate_key, state FROM pgqueue.job"
    assert eyes.all(keys) == [("using.bulk", "using.bulk", "completed")]
