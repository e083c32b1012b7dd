"""Sessions of dead workers that do not end keep the jobs of no other worker from being given back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
from stopped import stopped
from workers import Eyes, Taker, until

from pgqueue.worker.liveness import rescue as rescues
from pgqueue.worker.liveness.rescue import Rescue

STUCK = 3
WHY = "gave no sign of life"


async def victim(dsn: str, eyes: Eyes) -> Taker:
    """A worker with two jobs, whose row names its session."""
    taker = Taker(dsn)
    eyes.do("INSERT INTO pgqueue.job (task) VALUES ('x'), ('x')")
    assert len(await taker.fetch()) == 2
    assert taker.session.identity is not None
    eyes.do(
        "UPDATE pgqueue.worker SET sessions = jsonb_build_array("
        "jsonb_build_object('pid', %s, 'backend_start', %s::text)) WHERE id = %s",
        *taker.session.identity,
        taker.worker_id,
    )
    return taker


def stuck(takers: list[Taker]) -> AbstractContextManager[None]:
    """The server's processes for their sessions are stopped."""
    return stopped(taker.session.identity[0] for taker in takers if taker.session.identity is not None)


@pytest.fixture
async def victims(dsn: str, eyes: Eyes, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[list[Taker]]:
    """Some workers, the last one ordinary. A session is waited for longer than this test lasts."""
    monkeypatch.setattr(rescues, "END_PAUSES", (0.05,) * 72_000)
    all = [await victim(dsn, eyes) for _ in range(STUCK + 1)]
    yield all
    for each in all:
        await each.close()


def given_back(eyes: Eyes) -> int:
    return eyes.states().get("available", 0)


@pytest.mark.promise("F24")
@pytest.mark.parametrize("caller", ["seen", "rescue_all"])
async def test_stuck_sessions_delay_no_other_worker_and_no_worker_is_rescued_twice_at_once(
    caller: str, dsn: str, eyes: Eyes, victims: list[Taker], caplog: pytest.LogCaptureFixture
) -> None:
    """The naive rescue waits for the sessions of each worker in turn, and each report begins it anew."""
    taker = Taker(dsn)
    rescue = Rescue(taker.session, notify=True, rescued=lambda: None)

    def report(dead: list[tuple[int, int]]) -> asyncio.Task[Any]:
        told = rescue.seen(dead, leads=True) if caller == "seen" else rescue.rescue_all(dead, WHY)
        return asyncio.ensure_future(told)

    dead = [(each.worker_id, 0) for each in victims]
    with stuck(victims[:STUCK]):
        rounds = [report(dead)]
        await until(lambda: given_back(eyes) == 2)
        rounds += [report(dead[:STUCK]), report(dead[:STUCK])]
        await asyncio.wait_for(rounds[1], 60.0)  # nothing is left to begin
        await rescue.strays()
        assert not rounds[0].done()
        assert eyes.states() == {"available": 2, "running": 2 * STUCK}
    await asyncio.gather(*rounds)
    assert eyes.states() == {"available": 2 * len(victims)}
    assert caplog.text.count(WHY) == len(victims)
    await taker.close()


@pytest.mark.promise("F24")
async def test_after_the_last_pause_the_jobs_of_all_workers_with_stuck_sessions_are_given_back(
    dsn: str, eyes: Eyes, victims: list[Taker], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rescues, "END_PAUSES", (0.01, 0.01))
    taker = Taker(dsn)
    rescue = Rescue(taker.session, notify=True, rescued=lambda: None)
    with stuck(victims[:STUCK]):
        await rescue.seen([(each.worker_id, 0) for each in victims], leads=True)
        assert eyes.states() == {"available": 2 * len(victims)}
    for each in victims[:STUCK]:
        assert f"worker {each.worker_id}: 1 session of it has not ended" in caplog.text
    await taker.close()


@pytest.mark.promise("F24")
async def test_an_error_of_one_rescue_ends_no_other(dsn: str, eyes: Eyes, victims: list[Taker]) -> None:
    taker = Taker(dsn)
    rescue = Rescue(taker.session, notify=True, rescued=lambda: None)
    disarm, broken = rescue._disarm, victims[0].worker_id

    async def disarms(worker_id: int, beat: int) -> None:
        if worker_id == broken:
            raise RuntimeError("broken")
        await disarm(worker_id, beat)

    rescue._disarm = disarms  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="broken"):
        await rescue.seen([(each.worker_id, 0) for each in victims], leads=True)
    assert eyes.states() == {"available": 2 * STUCK, "running": 2}
    rescue._disarm = disarm  # type: ignore[method-assign]
    await rescue.seen([(broken, 0)], leads=True)  # it is under way no more
    assert eyes.states() == {"available": 2 * len(victims)}
    await taker.close()
