"""What the supervisor makes of decisions and of what happens meanwhile, with processes that exist in the test only."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from time import monotonic
from typing import Any

import pytest
import pytest_asyncio
from workers import until

from pgqueue.supervisor import supervisor as keeping
from pgqueue.supervisor.fleet import YOUNG_SECONDS, Child, State
from pgqueue.supervisor.recycling import BOOT_SECONDS, Terms
from pgqueue.supervisor.supervisor import DEADLINE, DONE, GAP_SECONDS, INTERRUPTED, LOOK_SECONDS, Supervisor


class Made:
    """A process as the supervisor sees it: it says and does what the test lets it."""

    def __init__(self, child: Child) -> None:
        self.child, self.pid = child, 1000 + child.number
        self.code: int | None = None
        self.workers: set[int] = set()
        self.vitals: dict[str, Any] = {"lost": 0, "ended": 0}
        self.place, self.failure = 0, ""
        self.ended = asyncio.Event()
        self.told: list[str] = []
        self._words: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()

    def __str__(self) -> str:
        return f"process {self.child.number}"

    @property
    def pipe(self) -> Any:
        return self

    def say(self, what: str, **facts: object) -> None:
        if what != "place":
            self.told.append(what)

    def close(self) -> None:
        pass

    def kill(self) -> None:
        if self.code is None:
            self.told.append("kill")
            self.dies(-9)

    def how(self, when: str = "") -> str:
        return f"ended with {self.code}{when}"

    async def listen(self, said: Any) -> None:
        while (message := await self._words.get()) is not None:
            said(self, message)

    # What the test lets it do

    def announces(self) -> None:
        self._words.put_nowait({"say": "announce", "worker": self.child.number})

    def says(self, what: str, state: str = "running", **facts: object) -> None:
        vitals = {"worker_id": self.child.number, "busy": 0, "lost": 0, "ended": 0, "state": state}
        self._words.put_nowait({"say": what, **vitals, **facts})

    def leaves(self) -> None:
        self._words.put_nowait({"say": "empty"})
        self.dies(0)

    def dies(self, code: int) -> None:
        self.code = code
        self._words.put_nowait(None)


class Kept:
    """A supervisor and its processes. Those are made at once, or when the test opens the `door`."""

    def __init__(self, size: int, **terms: Any) -> None:
        self.supervisor = Supervisor(Terms(size, (), **terms))
        self.all: list[Made] = []
        self.door = asyncio.Event()
        self.door.set()
        self.asked = 0
        self.supervisor._starter = self  # type: ignore[assignment]
        self.supervisor._open_orders.connect = lambda *_: None  # type: ignore[method-assign]

    async def start(self, child: Child) -> Made:
        self.asked += 1
        await self.door.wait()
        self.all.append(Made(child))
        return self.all[-1]

    async def rest(self, rounds: int = 3) -> None:
        """Let the supervisor go round, and everything happen that needs no time."""
        for _ in range(rounds):
            await self.supervisor._round()
            for _ in range(20):
                await asyncio.sleep(0)

    async def ready(self, since: float = 60.0) -> list[Made]:
        """All that are to work, at work for so long."""
        await self.rest()
        for one in self.all:
            one.announces()
        await self.rest()
        for one in self.all:
            one.says("running")
        await self.rest()
        for one in self.all:
            assert one.child.state is State.RUNNING
            one.child.since = monotonic() - since
        return list(self.all)

    async def shut(self) -> asyncio.Task[None]:
        """A round that stands before the closed door."""
        self.door.clear()
        standing = asyncio.ensure_future(self.supervisor._round())
        for _ in range(20):
            await asyncio.sleep(0)
        assert not standing.done()
        return standing


@pytest_asyncio.fixture
async def made() -> AsyncIterator[list[Kept]]:
    """Those that a test makes; their tasks end with it."""
    all_made: list[Kept] = []
    yield all_made
    for kept in all_made:
        for task in list(kept.supervisor._tasks):
            task.cancel()
        await asyncio.gather(*kept.supervisor._tasks, return_exceptions=True)


# Decisions, and what happens meanwhile -------------------------------------------------------------------------------


@pytest.mark.promise("S02")
async def test_one_that_dies_while_another_is_started_does_not_end_the_supervisor(made: list[Kept]) -> None:
    """Of three two are to be replaced, and one of those may be quieted at once: it dies while one is started."""
    kept = Kept(2)
    made.append(kept)
    first, second = await kept.ready()
    supervisor = kept.supervisor
    supervisor.fleet.scale(3)
    await kept.rest()
    kept.all[2].announces()
    await kept.rest()
    kept.all[2].says("running")
    await kept.rest()
    kept.all[2].child.since -= 60.0
    supervisor.fleet.unfit(first.child.number, "fat")
    supervisor.fleet.unfit(second.child.number, "fat")
    supervisor.fleet.size = 2
    round_ = await kept.shut()
    assert first.told[-1] == "quiet", "it waits for nothing: nothing may come between the decision and the deed"
    first.dies(-9)
    second.dies(-9)
    for one in (first, second):
        one.ended.set()
    await asyncio.sleep(0.01)
    kept.door.set()
    await round_
    await kept.rest()
    assert supervisor._code is None
    assert [one.child.state for one in kept.all[2:]] == [State.RUNNING, State.STARTING]
    assert "quiet" not in kept.all[2].told


@pytest.mark.promise("S02")
async def test_nothing_is_decided_as_long_as_one_that_has_ended_still_counts(made: list[Kept]) -> None:
    """Else one too many is quieted: the new one works already, and the dead one seems to."""
    kept = Kept(2)
    made.append(kept)
    first, second = await kept.ready()
    fleet = kept.supervisor.fleet
    fleet.unfit(first.child.number, "fat")
    await kept.rest()
    kept.all[2].announces()
    await kept.rest()
    kept.all[2].says("running")
    for _ in range(20):
        await asyncio.sleep(0)
    assert fleet.active == 3
    kept.all[2].child.since -= 60.0
    second.dies(-9)  # before the next look
    await kept.supervisor._round()
    assert first.told == ["work"] and fleet.active == 3
    await kept.rest()
    assert first.child.state is State.RUNNING and fleet.active == 2 and kept.asked == 4


@pytest.mark.parametrize("stop", ["once", "twice", "the first failed"])
async def test_one_that_was_being_started_when_we_were_told_to_stop_is_stopped_too(stop: str, made: list[Kept]) -> None:
    kept = Kept(3)
    made.append(kept)
    round_ = await kept.shut()
    supervisor = kept.supervisor
    if stop == "the first failed":
        supervisor._code = 2
    else:
        supervisor._stop("SIGTERM")
        if stop == "twice":
            supervisor._stop("SIGTERM")
    kept.door.set()
    await round_
    assert kept.asked == 1, "no other is started"
    assert kept.all[0].told == ["kill"]
    if stop == "once":
        await kept.rest()
        assert not supervisor._processes
    assert supervisor._code == {"once": DONE, "twice": INTERRUPTED, "the first failed": 2}[stop]


async def test_one_that_cannot_be_made_is_tried_again(made: list[Kept], monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Kept(1)
    made.append(kept)

    async def refused(child: Child) -> Made:
        kept.asked += 1
        raise OSError("no memory")

    monkeypatch.setattr(kept, "start", refused)
    await kept.rest(2)
    assert kept.asked == 2 and not kept.supervisor.fleet.children and kept.supervisor.fleet.not_before > monotonic()
    assert 0 < kept.supervisor._pause() < LOOK_SECONDS, "as soon as it may be tried again"


# When it looks -------------------------------------------------------------------------------------------------------


@pytest.mark.promise("S13")
@pytest.mark.parametrize(("every", "most"), [(0.1, 0.1), (0.5, 0.5), (300.0, LOOK_SECONDS)])
async def test_memory_is_looked_at_as_often_as_was_said_below_a_second_too(
    every: float, most: float, made: list[Kept], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Kept(1, memory_limit=1, check_every=every)
    made.append(kept)
    monkeypatch.setattr("pgqueue.supervisor.recycling.rss", lambda pid: 0)
    assert kept.supervisor._pause() == LOOK_SECONDS
    await kept.rest()
    assert most * 0.5 < kept.supervisor._pause() <= most
    kept.supervisor._recycling.due = monotonic() + 0.01
    kept.supervisor._stop("SIGTERM")
    assert kept.supervisor._pause() == LOOK_SECONDS, "at the end nothing is weighed"


async def test_it_goes_on_as_soon_as_the_next_may_take_over(made: list[Kept]) -> None:
    kept = Kept(1)
    made.append(kept)
    await kept.ready(since=GAP_SECONDS / 2)
    assert 0 < kept.supervisor._pause() <= GAP_SECONDS / 2


async def test_without_a_memory_limit_nothing_is_looked_at_more_often(made: list[Kept]) -> None:
    kept = Kept(1, check_every=0.1)
    made.append(kept)
    await kept.rest()
    assert kept.supervisor._pause() == LOOK_SECONDS


# What they say -------------------------------------------------------------------------------------------------------


async def test_one_that_leaves_by_itself_is_replaced_at_once_and_is_no_error(
    made: list[Kept], caplog: pytest.LogCaptureFixture
) -> None:
    """Told so by somebody else, with nothing to do: it is gone before it has said that it is quiet. Again and again."""
    caplog.set_level(logging.INFO, "pgqueue")
    kept = Kept(1)
    made.append(kept)
    await kept.ready(since=0.0)
    for number in range(1, 6):
        kept.all[-1].leaves()
        await kept.rest()
        assert kept.asked == number + 1, "at once"
        kept.all[-1].announces()
        await kept.rest()
        kept.all[-1].says("running")
        await kept.rest()
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_one_that_is_killed_as_soon_as_it_works_is_replaced_later_and_later(
    made: list[Kept], caplog: pytest.LogCaptureFixture
) -> None:
    kept = Kept(1)
    made.append(kept)
    for asked in (2, 2):
        for one in await kept.ready(since=0.0):
            one.dies(-9)
        await kept.rest()
        assert kept.asked == asked
        kept.all = kept.all[-1:]
    assert kept.supervisor.fleet.not_before > monotonic()
    assert [record.levelname for record in caplog.records].count("ERROR") == 2


async def test_one_that_is_quiet_when_it_says_that_it_works_does_not_count(made: list[Kept]) -> None:
    kept = Kept(1)
    made.append(kept)
    await kept.rest()
    kept.all[0].announces()
    await kept.rest()
    kept.all[0].says("running", state="quiet")
    await kept.rest()
    assert kept.all[0].child.state is State.QUIET and kept.supervisor.fleet.active == 0 and kept.asked == 2


async def test_one_that_is_done_and_does_not_go_is_ended(made: list[Kept], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "LEAVE_SECONDS", 0.01)
    kept = Kept(1)
    made.append(kept)
    [one] = await kept.ready()
    one.says("empty", state="quiet")
    await kept.rest()
    await until(lambda: one.told[-1] == "kill", 30)


# The end -------------------------------------------------------------------------------------------------------------


@pytest.mark.promise("F41")
async def test_the_supervisor_ends_with_the_code_of_the_last_one_if_none_of_the_first_starts(made: list[Kept]) -> None:
    kept = Kept(2)
    made.append(kept)
    await kept.rest()
    kept.all[0].dies(-9)
    await kept.rest()
    assert len(kept.all) == 3 and kept.all[1].told == [], "it is replaced"
    kept.all[1].dies(2)
    await kept.rest()
    assert kept.supervisor._code == 2 and kept.all[2].told == ["kill"]


@pytest.mark.promise("F41")
@pytest.mark.parametrize("killed", [[0], [0, 1], [2, 3, 0]])
async def test_one_of_the_first_that_dies_while_it_starts_is_replaced(killed: list[int], made: list[Kept]) -> None:
    kept = Kept(4)
    made.append(kept)
    await kept.rest()
    for number in killed:
        kept.all[number].dies(-9)
    await kept.rest()
    assert kept.supervisor._code is None and len(kept.all) == 4 + len(killed)
    for one in kept.all:
        one.announces()
    await kept.rest()
    for one in kept.all:
        if one.code is None:
            one.says("running")
    await kept.rest()
    assert kept.supervisor.fleet.active == 4 and "kill" not in [word for one in kept.all for word in one.told]


@pytest.mark.promise("F41")
async def test_one_that_waits_for_a_server_that_is_starting_up_does_not_hang(made: list[Kept]) -> None:
    kept = Kept(1)
    made.append(kept)
    await kept.rest()
    [one] = kept.all
    one.child.since -= BOOT_SECONDS + 1
    one._words.put_nowait({"say": "waits"})
    for _ in range(20):
        await asyncio.sleep(0)
    await kept.rest()
    assert one.told == []
    one.child.since -= BOOT_SECONDS + 1
    await kept.rest()
    assert one.told == ["kill"], "if it does not say so again"


@pytest.mark.promise("S01")
async def test_at_the_end_those_at_work_have_the_grace_and_the_others_go_at_once(
    made: list[Kept], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Kept(1, grace=7.0)
    made.append(kept)
    [busy] = await kept.ready()
    kept.supervisor.fleet.restart()
    await kept.rest()
    _, starting = kept.all
    kept.supervisor._stop("SIGTERM")
    assert busy.told == ["work", "stop"] and starting.told == ["kill"]
    await kept.rest()
    assert kept.supervisor._code is None and kept.asked == 2
    kept.supervisor._deadline = monotonic() - 1.0
    await kept.rest()
    assert busy.told[-1] == "kill" and kept.supervisor._code == DEADLINE


async def test_the_young_and_the_old_are_told_apart_by_what_the_fleet_says(made: list[Kept]) -> None:
    """One that had worked for a while before it was killed is no reason for a pause, however often."""
    kept = Kept(1)
    made.append(kept)
    for asked in (2, 3, 4):
        for one in await kept.ready(since=YOUNG_SECONDS + 1):
            one.dies(-9)
        await kept.rest()
        assert kept.asked == asked
        kept.all = kept.all[-1:]
