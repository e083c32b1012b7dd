"""How often who asks whether to sweep: where keys are in use somebody does all the time, elsewhere next to nobody."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from pgqueue.worker.concurrency.sweep import EVERY_SECONDS, LEADER_TIMES, OTHERS_TIMES, Sweep

NOT_OURS: list[Any] = []
NOBODY, SOMEBODY = [(False,)], [(True,)]


class Desk:
    """A session that answers what it is told to, and a sweep over it."""

    def __init__(self) -> None:
        self.link = self
        self.asked: list[float] = []
        self.due: list[Any] = NOBODY
        self.meanwhile: Callable[[], None] = lambda: None
        self.leads = False
        self.sweep = Sweep(self, found=lambda keys: None, leads=lambda: self.leads)  # type: ignore[arg-type]

    def statement(self, name: str, **params: Any) -> tuple[str, dict[str, Any]]:
        return name, params

    async def run(self, *messages: tuple[str, dict[str, Any]]) -> list[Any]:
        await asyncio.sleep(0)
        self.meanwhile()
        if messages[0][0] == "sweep_due":
            self.asked.append(messages[0][1]["seconds"])
            return [self.due]
        return [[], [([], None)]][-len(messages) :]

    async def step(self) -> None:
        """One step that is due."""
        self.sweep._last -= 1000
        await self.sweep.round()

    def pause(self) -> float:
        """So long until it asks again, in seconds."""
        return self.sweep._due() - self.sweep._last


@pytest.fixture
def desk() -> Desk:
    return Desk()


@pytest.mark.promise("F09")
async def test_where_keys_are_not_used_the_leader_asks_seldom_and_others_now_and_then(desk: Desk) -> None:
    await desk.step()
    assert OTHERS_TIMES * EVERY_SECONDS <= desk.pause() <= 2 * OTHERS_TIMES * EVERY_SECONDS
    pauses = set()
    for _ in range(5):
        await desk.step()
        pauses.add(desk.pause())
    assert len(pauses) == 5, "a fleet that was started together stays in step"
    desk.leads = True  # decided anew at each wait: nobody leads at the start
    await desk.sweep.round()
    assert desk.pause() == LEADER_TIMES * EVERY_SECONDS
    assert len(desk.asked) == 6


async def test_who_has_admitted_goes_on_until_nobody_waits(desk: Desk) -> None:
    await desk.step()
    desk.sweep.keys_in_use()
    assert desk.pause() == EVERY_SECONDS
    desk.due = SOMEBODY
    await desk.step()
    assert desk.pause() == EVERY_SECONDS
    desk.due = NOBODY
    await desk.step()
    assert desk.pause() > LEADER_TIMES * EVERY_SECONDS


async def test_who_finds_somebody_waiting_goes_on(desk: Desk) -> None:
    desk.due = SOMEBODY
    await desk.step()
    assert desk.pause() == EVERY_SECONDS


async def test_who_was_not_first_leaves_it_to_who_was(desk: Desk) -> None:
    desk.sweep.keys_in_use()
    desk.due = NOT_OURS
    await desk.step()
    assert desk.pause() > LEADER_TIMES * EVERY_SECONDS


async def test_a_key_that_comes_into_use_while_it_looks_is_not_forgotten(desk: Desk) -> None:
    desk.meanwhile = desk.sweep.keys_in_use
    await desk.step()
    assert desk.pause() == EVERY_SECONDS


async def test_a_key_in_use_shortens_a_wait_that_has_begun_and_does_not_end_it(desk: Desk) -> None:
    await desk.step()
    desk.sweep.keys_in_use()
    assert desk.sweep.woken.is_set()
    assert 0.0 < await desk.sweep.round() <= EVERY_SECONDS
    assert len(desk.asked) == 1
    assert desk.pause() == EVERY_SECONDS


async def test_who_is_told_asks_at_once_and_again_where_somebody_just_did(desk: Desk) -> None:
    await desk.step()
    desk.sweep.sweep_soon()
    await desk.sweep.round()
    assert len(desk.asked) == 2
    desk.due = NOT_OURS
    desk.sweep.sweep_soon()
    await desk.sweep.round()
    assert len(desk.asked) == 4
    assert max(desk.asked[1:]) < desk.asked[0]


@pytest.mark.promise("F183")
@pytest.mark.parametrize("asked", [True, False], ids=["asked for", "due"])
async def test_a_sweep_that_failed_is_made_with_the_next_round(desk: Desk, asked: bool) -> None:
    """Naive: the round forgets what was asked for, and the next one does nothing and counts as a success."""
    await desk.step()
    before = len(desk.asked)

    def lost() -> None:
        raise OSError("the session is lost")

    desk.meanwhile = lost
    with pytest.raises(OSError):
        if asked:
            desk.sweep.sweep_soon()
            await desk.sweep.round()
        else:
            await desk.step()
    desk.meanwhile, desk.due = lambda: None, SOMEBODY
    await desk.sweep.round()
    assert len(desk.asked) == before + 1
