"""What surrounds a worker's jobs: entered before the first, left after the last, yielded to each."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import psycopg
import pytest
from workers import Eyes, until, work

import pgqueue
from pgqueue.client.lifespan import _declared, declared, lifespan
from pgqueue.client.tasks import task
from pgqueue.errors import InvalidOption
from pgqueue.jobs.job import Job, current_job
from pgqueue.worker.worker import Worker

events: list[str] = []


@pytest.fixture(autouse=True)
def no_lifespan() -> Iterator[None]:
    events.clear()
    before = list(_declared)
    _declared.clear()
    yield
    _declared[:] = before


@task(name="lifespan.uses")
async def uses(job: Job) -> Any:
    events.append("job")
    return [job.resources, current_job().resources]


@task(name="lifespan.uses_in_thread")
def uses_in_thread(job: Job) -> Any:
    events.append("job")
    return job.resources


@task(name="lifespan.slow")
async def slow() -> None:
    events.append("began")
    await asyncio.sleep(0.1)
    events.append("ended")


def enqueue(dsn: str, *jobs: Any) -> None:
    with psycopg.connect(dsn) as conn:
        pgqueue.enqueue_many(conn, jobs)


async def test_it_is_entered_once_before_the_first_job_and_left_after_the_last(dsn: str, eyes: Eyes) -> None:
    @lifespan
    async def resources() -> AsyncIterator[str]:
        events.append("enter")
        yield "pool"
        events.append("exit")

    enqueue(dsn, uses.new(), uses_in_thread.new())
    async with work(dsn, uses, uses_in_thread):
        await until(eyes.done(2))
    assert events == ["enter", "job", "job", "exit"]
    assert dict(eyes.all("SELECT task, result FROM pgqueue.job")) == {
        "lifespan.uses": ["pool", "pool"],
        "lifespan.uses_in_thread": "pool",
    }


async def test_it_is_left_after_what_still_runs_at_the_stop(dsn: str, eyes: Eyes) -> None:
    @lifespan
    async def resources() -> AsyncIterator[None]:
        yield
        events.append("exit")

    enqueue(dsn, slow.new())
    async with work(dsn, slow) as worker:
        await until(lambda: events == ["began"])
        await worker.stop(30.0)
    assert events == ["began", "ended", "exit"]


async def test_without_one_resources_are_none(dsn: str, eyes: Eyes) -> None:
    enqueue(dsn, uses.new())
    async with work(dsn, uses):
        await until(eyes.done(1))
    assert eyes.all("SELECT result FROM pgqueue.job") == [([None, None],)]


async def test_one_that_fails_to_set_up_keeps_the_worker_from_starting_and_leaves_nothing_behind(
    dsn: str, eyes: Eyes
) -> None:
    @lifespan
    async def resources() -> AsyncIterator[None]:
        if not events:
            raise ConnectionError("no redis")
        yield

    worker = Worker(dsn=dsn, tasks=[uses])
    with pytest.raises(ConnectionError, match="no redis"):
        await worker.start()
    await worker.stop()
    assert eyes.all("SELECT * FROM pgqueue.worker") == []
    await until(lambda: eyes.backends() == [])


async def test_one_that_fails_to_take_down_says_so_and_the_worker_has_left(dsn: str, eyes: Eyes) -> None:
    @lifespan
    async def resources() -> AsyncIterator[None]:
        yield
        raise ConnectionError("on the way out")

    worker = Worker(dsn=dsn, tasks=[uses])
    await worker.start()
    with pytest.raises(ConnectionError, match="on the way out"):
        await worker.stop()
    assert eyes.all("SELECT * FROM pgqueue.worker") == []
    await until(lambda: eyes.backends() == [])


def test_what_is_no_lifespan_is_refused_at_the_declaration() -> None:
    def plain() -> None: ...

    async def no_yield() -> None: ...

    for function in (plain, no_yield, 7):
        with pytest.raises(InvalidOption, match="async function that yields once"):
            lifespan(function)  # type: ignore[type-var]


def test_a_second_one_is_refused_and_the_same_imported_again_is_not() -> None:
    def declare() -> None:
        @lifespan
        async def resources() -> AsyncIterator[None]:
            yield

    declare()
    declare()

    async def other() -> AsyncIterator[None]:
        yield

    with pytest.raises(InvalidOption, match="is declared already"):
        lifespan(other)


async def test_nothing_declared_is_entered_all_the_same() -> None:
    async with declared() as resources:
        assert resources is None
