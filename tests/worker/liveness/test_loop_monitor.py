"""A blocked event loop is named while it is blocked, with the job that blocks it, and nothing else is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest
from workers import Eyes, until, work

from pgqueue.client.tasks import task
from pgqueue.worker.liveness import loop_monitor
from pgqueue.worker.liveness.loop_monitor import LoopMonitor
from pgqueue.worker.run.running_jobs import RunningJobs


@task(name="pulse.blocks")
async def blocks(seconds: float) -> None:
    await asyncio.sleep(0)
    time.sleep(seconds)  # noqa: ASYNC251  # this is what must be noticed


@task(name="pulse.waits")
async def waits(seconds: float) -> None:
    await asyncio.sleep(seconds)


@task(name="pulse.in_thread")
def in_thread(seconds: float) -> None:
    time.sleep(seconds)


PUT = "INSERT INTO pgqueue.job (task, args) VALUES (%s, jsonb_build_object('seconds', %s::float8)) RETURNING id"


@pytest.mark.second
@pytest.mark.promise("F03")
async def test_the_job_that_blocks_the_loop_is_named_once_and_long_ones_are_not(
    dsn: str, eyes: Eyes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("pgqueue.worker.services.BLOCKED_SECONDS", 0.5)  # a busy machine keeps a loop for less
    async with work(dsn, blocks, waits, in_thread):
        for name in ("pulse.waits", "pulse.in_thread"):
            eyes.do(PUT, name, 1.2)
        await until(eyes.done(2))
        assert "blocked" not in caplog.text
        eyes.do(PUT, "pulse.blocks", 0.01)
        await until(eyes.done(3))
        assert "blocked" not in caplog.text
        first, second = (eyes.one(PUT, "pulse.blocks", seconds) for seconds in (1.5, 1.0))
        await until(eyes.done(5))
    said = [record.getMessage() for record in caplog.records if "blocked" in record.getMessage()]
    assert len(said) == 2
    assert f"job {first} (pulse.blocks) has blocked the event loop for " in said[0]
    assert "now in blocks (" in said[0]
    assert f"job {second} (pulse.blocks)" in said[1]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    now = [0.0]
    monkeypatch.setattr(loop_monitor, "monotonic", lambda: now[0])
    yield now


def test_a_process_that_was_stopped_blames_nobody(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.new_event_loop()
    felt, named = LoopMonitor(loop, RunningJobs([]), 1.0), list[float]()
    monkeypatch.setattr(felt, "_name", named.append)
    for clock[0], late in ((0.0, 0.0), (0.5, 0.0), (60.0, 59.0), (60.5, 0.0)):
        felt.look(late)
    assert named == []
    for clock[0] in (61.0, 61.5):
        felt.look()
    assert named == [1.0, 1.5]
    loop.close()


def test_looks_that_are_far_apart_for_another_reason_see_how_long_it_is(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The heartbeat's thread does not look while it waits for the database."""
    loop = asyncio.new_event_loop()
    felt, named = LoopMonitor(loop, RunningJobs([]), 1.0), list[float]()
    monkeypatch.setattr(felt, "_name", named.append)
    for clock[0] in (0.0, 0.5, 6.0):
        felt.look()
    assert named == [6.0]
    assert (felt.owed(), felt.blocked()) == (1, 6.0)
    loop.call_soon(loop.stop)
    loop.run_forever()
    assert (felt.owed(), felt.blocked()) == (None, 0.0)
    loop.close()


def test_a_loop_that_is_closed_is_asked_nothing(clock: list[float]) -> None:
    loop = asyncio.new_event_loop()
    felt = LoopMonitor(loop, RunningJobs([]), 1.0)
    loop.close()
    for clock[0] in (0.0, 0.5, 1.0, 1.5):
        felt.look()
    assert felt.turns == 0
