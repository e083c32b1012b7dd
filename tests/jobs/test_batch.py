"""The option `Batch`: what can be declared, what one job's argument is, and what an answer means."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, timedelta
from typing import Any

import psycopg
import pytest
from workers import Eyes

import pgqueue
from pgqueue import Batch, Job, testing
from pgqueue.client.tasks import Task, task

TEN = Batch(10)


@dataclass
class Document:
    number: int
    day: date


def numbers(numbers: list[int]) -> None: ...


def two_lists(a: list[int], b: list[int]) -> None: ...


def no_list(number: int) -> None: ...


def with_default(numbers: list[int] = []) -> None: ...  # noqa: B006


def only_jobs(jobs: list[Job]) -> None: ...


def nothing() -> None: ...


def many(*numbers: list[int]) -> None: ...


def a_job(job: Job, numbers: list[int]) -> None: ...


@pytest.mark.promise("F284")
@pytest.mark.parametrize("size", [0, -1, 10_001, 2.5, True, "100", None])
def test_a_size_is_a_number_of_jobs(size: Any) -> None:
    with pytest.raises(pgqueue.InvalidOption, match="use a whole number of jobs, from 1 to 10,000"):
        Batch(size)
    assert Batch(1).size == 1 and Batch(10_000).size == 10_000


@pytest.mark.promise("F284")
@pytest.mark.parametrize("wait", [-1, "soon", None, 61, timedelta(minutes=2), float("nan")])
def test_a_wait_is_a_duration_of_a_minute_at_most(wait: Any) -> None:
    with pytest.raises(pgqueue.InvalidOption, match="wait"):
        Batch(10, wait=wait)
    assert [Batch(10, wait=each).seconds for each in ("200ms", 0, timedelta(seconds=60))] == [0.2, 0.0, 60.0]


def test_an_unknown_option_is_named() -> None:
    with pytest.raises(pgqueue.InvalidOption, match=r"no option sice \(did you mean size\?\)"):
        Batch(sice=10)  # type: ignore[call-arg]


@pytest.mark.promise("F284")
@pytest.mark.parametrize("fn", [two_lists, no_list, with_default, only_jobs, nothing, many, a_job])
def test_a_handler_that_takes_no_list_is_refused(fn: Callable[..., Any]) -> None:
    with pytest.raises(pgqueue.InvalidOption, match="has one parameter, a list of the jobs' arguments"):
        task(name="batch.bad", batch=TEN)(fn)


@pytest.mark.promise("F284")
@pytest.mark.parametrize(("option", "value"), [("lock", "a:{numbers}"), ("rate", "10/s")])
def test_a_lock_or_a_rate_is_refused_at_the_declaration_and_in_using(option: str, value: str) -> None:
    options: dict[str, Any] = {option: value}
    with pytest.raises(pgqueue.InvalidOption, match=f"its jobs cannot have a {option}"):
        task(name="batch.bad", batch=TEN, **options)(numbers)
    declared = task(name="batch.numbers", batch=TEN)(numbers)
    with pytest.raises(pgqueue.InvalidOption, match=f"task 'batch.numbers': .* cannot have a {option}"):
        declared.using(**options)
    assert declared.using(queue="other", limit=3).batch == TEN


@pytest.mark.promise("F284")
def test_what_is_no_batch_is_refused() -> None:
    with pytest.raises(pgqueue.InvalidOption, match=r"batch 100: use pgqueue.Batch"):
        task(name="batch.bad", batch=100)(numbers)  # type: ignore[call-overload]
    with pytest.raises(pgqueue.InvalidOption, match="its jobs have no arguments"):
        task(name="batch.bad", batch=TEN, schedule=pgqueue.Every(60))(numbers)
    assert task(name="batch.none", batch=None)(no_list).batch is None  # type: ignore[call-overload]


@pytest.mark.promise("F284")
def test_the_argument_of_one_job_is_one_element_checked_at_its_enqueue() -> None:
    @task(name="batch.documents", batch=TEN)
    def index(jobs: list[Job], documents: list[Document]) -> None: ...

    document = Document(7, date(2026, 1, 2))
    assert index.wants_job
    by_name = pgqueue.remote("batch.documents").new(documents={"number": 7, "day": "2026-01-02"})
    assert index.new(document).args == by_name.args == '{"documents":{"number":7,"day":"2026-01-02"}}'
    assert index.codec.decode(index.new(document).args) == ((document,), {})
    for bad in (7, [document], None):
        with pytest.raises(pgqueue.InvalidArguments, match=r"task 'batch\.documents': parameter documents"):
            index.new(bad)  # type: ignore[arg-type]
    with pytest.raises(pgqueue.InvalidArguments, match="missing"):
        index.new()  # type: ignore[call-arg]


def test_a_bare_list_takes_anything_and_a_bare_jobs_is_no_argument() -> None:
    def bare(jobs, rows: list):  # type: ignore[no-untyped-def,type-arg]
        return [(len(jobs), row) for row in rows]

    made: Task[..., Any] = task(name="batch.bare", batch=TEN)(bare)
    assert made.new({"a": [1]}).args == '{"rows":{"a":[1]}}'
    assert testing.run(made, 5) == (1, 5)


@pytest.mark.promise("F281")
def test_a_test_runs_one_job_as_a_batch_of_its_own(dsn: str, eyes: Eyes) -> None:
    seen: list[tuple[int, list[int]]] = []

    @task(name="batch.doubles", batch=TEN, retry=1)
    def doubles(jobs: list[Job], numbers: list[int]) -> list[Any]:
        seen.append((len(jobs), numbers))
        return [ValueError("three") if number == 3 else 2 * number for number in numbers]

    assert testing.run(doubles, 4) == 8
    with pytest.raises(ValueError, match="three"):
        testing.run(doubles, 3)
    with psycopg.connect(dsn) as conn:
        for number in (1, 2, 3):
            doubles.enqueue(conn, number)
        drained = testing.drain(conn)
        assert (drained.completed, drained.failed) == (2, 1)
        results = conn.execute("SELECT result FROM pgqueue.job_done ORDER BY id").fetchall()
    assert results == [(2,), (4,)]
    assert seen == [(1, [4]), (1, [3]), (1, [1]), (1, [2]), (1, [3])]


@pytest.mark.promise("F281")
async def test_an_async_handler_of_a_batch_runs_in_a_test() -> None:
    @task(name="batch.triples", batch=TEN)
    async def triples(numbers: list[int]) -> list[int]:
        return [3 * number for number in numbers]

    assert await testing.arun(triples, 4) == 12
    assert testing.run(triples, 5) == 15
    assert await triples([1, 2]) == [3, 6]
