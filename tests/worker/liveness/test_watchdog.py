"""What counts as seized up: no change in ten looks of what ought to move."""

from __future__ import annotations

import asyncio
from typing import Any

import psycopg
import pytest
from workers import until, work

import pgqueue
from pgqueue.client.tasks import task
from pgqueue.jobs.job import Job
from pgqueue.worker.complete import completer
from pgqueue.worker.liveness.watchdog import LOOKS, Watchdog


async def looks(dog: Watchdog, number: int) -> list[str | None]:
    found = []
    for _ in range(number):
        found.append(dog.look())
        await asyncio.sleep(0)
    return found


async def test_a_completer_that_has_something_to_write_and_does_not_move_is_stuck() -> None:
    value: int | None = 7
    dog = Watchdog(lambda: value)
    assert await looks(dog, LOOKS) == [None] * LOOKS
    assert dog.look() == "completer"
    value = 8
    assert await looks(dog, LOOKS) == [None] * LOOKS
    value = None
    assert await looks(dog, 3 * LOOKS) == [None] * 3 * LOOKS
    value = 8
    assert await looks(dog, LOOKS + 1) == [None] * LOOKS + ["completer"]


async def test_of_several_workers_the_one_that_does_not_move_is_named_until_it_is_forgotten() -> None:
    values: dict[str, int | None] = {"a": 1, "b": 1}
    dog = Watchdog(lambda: None)
    for name in values:
        dog.watch(name, lambda name=name: values[name])  # type: ignore[misc]
    found: list[str | None] = []
    for n in range(LOOKS + 1):
        values["a"] = n  # this one moves
        found += await looks(dog, 1)
    assert found == [None] * LOOKS + ["b"]
    dog.forget("b")
    values["a"] = None
    assert await looks(dog, 3 * LOOKS) == [None] * 3 * LOOKS
    dog.watch("b", lambda: 1)  # as new: its ten looks begin again
    assert await looks(dog, LOOKS + 1) == [None] * LOOKS + ["b"]


async def test_a_loop_that_does_not_turn_for_ten_looks_is_stuck_and_one_that_turns_late_is_not() -> None:
    dog = Watchdog(lambda: None)
    for _ in range(3):
        assert [dog.look() for _ in range(LOOKS)] == [None] * LOOKS
        await asyncio.sleep(0)
    found = [dog.look() for _ in range(LOOKS + 2)]
    assert found[-1] == "event loop" and not any(found[:LOOKS])


@task(name="watchdog.says")
async def says() -> None: ...


@pytest.mark.promise("F06")
async def test_a_completer_that_cannot_write_but_tries_moves(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with work(dsn, says) as worker:
        assert worker.completing() is None

        async def refuse(*_: Any, **__: Any) -> Any:
            raise psycopg.OperationalError("away")

        monkeypatch.setattr(worker.services.complete_session, "_connected", refuse)
        with psycopg.connect(dsn) as conn:
            pgqueue.enqueue_many(conn, [says.new()])
        await until(lambda: worker.completing())
        tried = worker.completing()
        await until(lambda: worker.completing() != tried)
        monkeypatch.undo()
        await until(lambda: worker.completing() is None)


@task(name="watchdog.writes", transactional=True)
def writes(job: Job) -> None:
    job.connection.execute("SELECT 1")


@pytest.mark.promise("F06")
async def test_a_completer_that_has_only_transactional_jobs_moves(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It sends nothing, and some are nearly always about to be told."""
    monkeypatch.setattr(completer, "CALM_SECONDS", 3_600)
    seen = []
    async with work(dsn, writes, concurrency=1) as worker:
        for jobs in (2, 1, 1):  # the first is told at once; from then on it looks by itself
            with psycopg.connect(dsn) as conn:
                pgqueue.enqueue_many(conn, [writes.new()] * jobs)
            await until(lambda: worker.services.completer._calm and worker.completing() is not None)
            seen.append(worker.completing())
            worker.services.completer._wake.set()  # it looks
            await until(lambda: worker.completing() is None)
    assert len(set(seen)) == 3
