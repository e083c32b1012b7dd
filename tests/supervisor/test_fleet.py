"""What a supervisor decides, without processes: never fewer than N by its own will, none ended that may be at work."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pgqueue.supervisor.fleet import (
    BACKOFF_FIRST,
    BACKOFF_MOST,
    BEGIN_SECONDS,
    MOVES,
    YOUNG_SECONDS,
    Action,
    Child,
    End,
    Fleet,
    IllegalMove,
    Quiet,
    Spawn,
    State,
    Work,
)


class Life:
    """A fleet with processes that do what they are told, when `step` lets them."""

    def __init__(self, size: int, **options: Any) -> None:
        self.fleet = Fleet(size, **options)
        self.now = 0.0
        self.done: list[Action] = []

    def decide(self) -> list[Action]:
        actions = self.fleet.decide(self.now)
        self.done += actions
        for action in actions:
            if isinstance(action, End):
                self.fleet.died(action.child.number, self.now)
        return actions

    def announce(self, child: Child) -> None:
        if child.state is State.STARTING and not child.announced:
            self.fleet.announced(child.number)

    def work(self, child: Child) -> None:
        if child.state is State.STARTING and child.at_work:
            self.fleet.runs(child.number, self.now)

    def settle(self) -> None:
        """Let everything happen that happens by itself."""
        for _ in range(200):
            actions, before = self.decide(), str(self.fleet.children)
            for child in list(self.fleet.children.values()):
                self.announce(child)
                self.work(child)
            still = not actions and before == str(self.fleet.children) and not self.fleet.of(State.STARTING)
            if still and self.fleet.due(self.now) == inf:
                return
            self.now += 1.0
        raise AssertionError("it does not settle")

    def count(self, kind: type) -> int:
        return sum(isinstance(action, kind) for action in self.done)


def settled(size: int, **options: Any) -> Life:
    life = Life(size, **options)
    life.settle()
    life.now += YOUNG_SECONDS + 1
    life.done.clear()
    return life


# The states ----------------------------------------------------------------------------------------------------------


@pytest.mark.promise("S14")
@pytest.mark.parametrize("before", State)
@pytest.mark.parametrize("after", State)
def test_a_process_starts_runs_is_quieted_and_stops_in_this_order_only(before: State, after: State) -> None:
    child = Child(1, 1, state=before)
    order = list(State)
    legal = order.index(after) == order.index(before) + 1 or (after is State.STOPPED and before is not State.STOPPED)
    legal = legal and not (before is State.STARTING and after is State.QUIET)
    assert (after in MOVES[before]) == legal
    if legal:
        child.move(after, 7.0)
        assert (child.state, child.since) == (after, 7.0)
    else:
        with pytest.raises(IllegalMove, match=f"from {before} to {after}"):
            child.move(after, 7.0)
        assert child.state is before


# What is done --------------------------------------------------------------------------------------------------------


def test_so_many_are_started_at_once_and_let_work_as_they_announce_themselves() -> None:
    life = Life(3)
    assert [type(action) for action in life.decide()] == [Spawn] * 3
    assert life.decide() == []
    [first, *_] = life.fleet.children.values()
    life.announce(first)
    assert life.decide() == [Work(first)]
    assert life.fleet.active == 0
    life.work(first)
    assert (life.decide(), life.fleet.active) == ([], 1)


@pytest.mark.promise("S17")
def test_the_dead_are_replaced_at_once() -> None:
    life = settled(3)
    for number in list(life.fleet.children)[:2]:
        life.fleet.died(number, life.now)
    assert [type(action) for action in life.decide()] == [Spawn] * 2
    life.settle()
    assert life.fleet.settled()


@pytest.mark.promise("S04", "S18")
def test_a_restart_starts_all_new_ones_then_quiets_all_old_ones() -> None:
    life = settled(3)
    old = list(life.fleet.children.values())
    generation = life.fleet.restart()
    new = [action.child for action in life.decide() if isinstance(action, Spawn)]
    assert len(new) == 3 and life.decide() == []
    for child in new[:2]:
        life.announce(child)
    assert life.decide() == [], "one has not announced itself: the others wait, and the old ones work"
    life.announce(new[2])
    assert life.decide() == [Work(child) for child in new]
    assert not life.fleet.in_effect(generation)
    for child in new:
        life.work(child)
    assert [action.child for action in life.decide() if isinstance(action, Quiet)] == old
    assert life.fleet.in_effect(generation)
    assert {child.state for child in new} == {State.RUNNING}


@pytest.mark.promise("S19")
@pytest.mark.parametrize("announced", [0, 2])
def test_one_that_fails_to_start_takes_the_whole_restart_back(announced: int) -> None:
    life = settled(3)
    old = list(life.fleet.children.values())
    generation = life.fleet.restart()
    new = [action.child for action in life.decide() if isinstance(action, Spawn)]
    for child in new[:announced]:
        life.announce(child)
    life.fleet.died(new[2].number, life.now, "its code is broken")
    ended = life.decide()
    assert [action.child for action in ended if isinstance(action, End)] == new[:2] and len(ended) == 2
    assert life.fleet.problem == "its code is broken"
    assert {child.state for child in old} == {State.RUNNING} and not life.fleet.in_effect(generation)
    assert life.decide() == []


@pytest.mark.promise("S20")
def test_a_restart_during_a_restart_takes_its_place() -> None:
    life = settled(2)
    old = list(life.fleet.children.values())
    life.fleet.restart()
    second = [action.child for action in life.decide() if isinstance(action, Spawn)]
    life.announce(second[0])
    newest = life.fleet.restart()
    actions = life.decide()
    assert [action.child for action in actions if isinstance(action, End)] == second
    assert life.count(Quiet) == 0 and {child.state for child in old} == {State.RUNNING}
    life.settle()
    assert [child.generation for child in life.fleet.of(State.RUNNING)] == [newest] * 2
    assert {child.state for child in old} == {State.QUIET}


@pytest.mark.promise("S15", "S18")
def test_one_that_is_unfit_is_quieted_when_its_replacement_works() -> None:
    life = settled(2)
    fat, _ = life.fleet.children.values()
    life.fleet.unfit(fat.number, "fat")
    [spawn] = life.decide()
    assert isinstance(spawn, Spawn) and fat.state is State.RUNNING
    life.announce(spawn.child)
    assert life.decide() == [Work(spawn.child)]
    life.work(spawn.child)
    assert life.decide() == [Quiet(fat, "fat")]


@pytest.mark.promise("S03")
def test_another_number_is_reached_by_starting_or_by_quieting_the_least_busy() -> None:
    life = settled(2)
    life.fleet.scale(4)
    life.settle()
    assert life.fleet.active == 4
    for number, child in enumerate(life.fleet.children.values()):
        child.busy = number
    life.fleet.scale(1)
    quieted = [action.child.busy for action in life.decide() if isinstance(action, Quiet)]
    assert quieted == [0, 1, 2] and life.fleet.settled()


def test_what_dies_at_its_start_is_started_again_later_and_later() -> None:
    life = Life(1)
    pauses = []
    for _ in range(12):
        while not (actions := life.decide()):
            life.now += 0.1
        [spawn] = actions
        assert isinstance(spawn, Spawn)
        life.fleet.died(spawn.child.number, life.now)
        pauses.append(max(0.0, life.fleet.not_before - life.now))
    assert pauses[:4] == pytest.approx([0.0, BACKOFF_FIRST, 2 * BACKOFF_FIRST, 4 * BACKOFF_FIRST])
    assert pauses[-1] == pytest.approx(BACKOFF_MOST)
    life.now += BACKOFF_MOST
    life.settle()
    life.now += YOUNG_SECONDS
    life.fleet.died(next(iter(life.fleet.children)), life.now)
    assert life.fleet.not_before <= life.now, "it had run for a while: no pause"


def broken(life: Life, times: int) -> None:
    """The one that is missing is started, and dies at its start, so many times."""
    for _ in range(times):
        while not (spawned := [action for action in life.decide() if isinstance(action, Spawn)]):
            life.now += 0.1
        [spawn] = spawned
        life.fleet.died(spawn.child.number, life.now)


@pytest.mark.promise("S17")
@pytest.mark.parametrize("before", [1_023, 1_024, 1_025, 10_000, 10**9])
def test_what_dies_for_days_is_still_started_again(before: int) -> None:
    """Nine hours of pauses are a thousand deaths."""
    life = Life(1)
    life.fleet._failures = before
    broken(life, 1)
    assert life.fleet.not_before - life.now == pytest.approx(BACKOFF_MOST)
    broken(life, 1)
    assert life.fleet.not_before - life.now == pytest.approx(BACKOFF_MOST)


@pytest.mark.promise("S17")
@pytest.mark.parametrize("how", ["killed", "left", "max-jobs"])
def test_the_pauses_are_of_those_that_broke_and_of_no_others(how: str) -> None:
    """One place is broken. Who works elsewhere ends no pause, and is replaced at once when it ends."""
    life = settled(3)
    fleet = life.fleet
    first, other, _ = fleet.children.values()
    fleet.died(first.number, life.now)
    broken(life, 5)
    pause = fleet.not_before - life.now
    assert pause == pytest.approx(BACKOFF_FIRST * 2**3) and life.decide() == []
    if how == "left":
        fleet.leaves(other.number, "told so")
    if how == "max-jobs":
        fleet.unfit(other.number, "enough jobs")
    else:
        fleet.died(other.number, life.now)
    [spawn] = life.decide()
    assert isinstance(spawn, Spawn) and fleet.not_before - life.now == pause
    life.announce(spawn.child)
    life.decide()
    life.work(spawn.child)
    life.decide()
    assert life.decide() == [], "the broken one still waits"
    broken(life, 1)
    assert fleet.not_before - life.now == pytest.approx(2 * pause)


def test_the_pauses_begin_anew_when_one_has_worked_that_was_started_after_the_last_failure() -> None:
    life = settled(2)
    fleet = life.fleet
    fleet.died(next(iter(fleet.children)), life.now)
    broken(life, 6)
    life.now = fleet.not_before
    [spawn] = life.decide()
    life.announce(spawn.child)
    life.decide()
    life.work(spawn.child)
    life.now += YOUNG_SECONDS
    life.decide()
    life.fleet.leaves(spawn.child.number, "told so")  # what it has proved stays proved
    broken(life, 1)
    assert fleet.not_before <= life.now
    broken(life, 1)
    assert fleet.not_before - life.now == pytest.approx(BACKOFF_FIRST)


def test_those_that_were_started_together_and_break_count_once() -> None:
    life = Life(8)
    for pause in (0.0, BACKOFF_FIRST, 2 * BACKOFF_FIRST):
        started = life.decide()
        assert [type(action) for action in started] == [Spawn] * 8
        for action in started:
            life.fleet.died(action.child.number, life.now)
        assert max(0.0, life.fleet.not_before - life.now) == pytest.approx(pause)
        life.now += pause


def test_a_smaller_number_forgets_what_broke() -> None:
    life = settled(2)
    fleet = life.fleet
    first, other = fleet.children.values()
    fleet.died(first.number, life.now)
    broken(life, 5)
    fleet.scale(1)
    assert life.decide() == []
    fleet.died(other.number, life.now)
    assert [type(action) for action in life.decide()] == [Spawn]


def test_all_are_quieted_and_none_is_started_until_a_restart() -> None:
    life = settled(2)
    life.fleet.quiet()
    assert [type(action) for action in life.decide()] == [Quiet] * 2
    for number in list(life.fleet.children):
        life.fleet.died(number, life.now)
    assert life.decide() == []
    life.fleet.restart()
    [broken, _] = [action.child for action in life.decide() if isinstance(action, Spawn)]
    life.fleet.died(broken.number, life.now, "its code is broken")
    assert [type(action) for action in life.decide()] == [End] and life.decide() == []
    assert life.fleet.quieted and life.fleet.problem == "its code is broken"
    life.fleet.restart()
    life.settle()
    assert life.fleet.settled() and life.count(Spawn) == 4


@pytest.mark.promise("S02")
@pytest.mark.parametrize(("together", "gap"), [(1, 0.0), (1, 0.5), (2, 0.5)])
def test_no_more_start_and_take_over_at_once_in_a_restart_than_may(together: int, gap: float) -> None:
    """All announce themselves; then they take over from the old ones, so many at once, each after the gap."""
    life = settled(4, together=together, gap=gap)
    old = list(life.fleet.children.values())
    life.fleet.restart()
    new: list[Child] = []
    while len(new) < 4:
        started = life.decide()
        assert [type(action) for action in started] == [Spawn] * together
        new += [action.child for action in started]
        for action in started:
            life.announce(action.child)
    for number in range(0, 4 + together, together):
        actions = life.decide()
        begun = [action.child for action in actions if isinstance(action, Work)]
        assert begun == new[number : number + together]
        quieted = [action.child for action in actions if isinstance(action, Quiet)]
        assert quieted == old[max(0, number - together) : number]
        assert life.decide() == []
        for child in begun:
            life.work(child)
        if gap and begun:
            assert life.decide() == [] and life.fleet.due(life.now) == life.now + gap
        life.now += gap
    assert life.fleet.settled() and life.fleet.due(life.now) == inf


@pytest.mark.promise("S17")
def test_who_is_needed_waits_for_nobody() -> None:
    """Those that died leave too few: whoever has announced itself works at once."""
    life = settled(3, together=1, gap=60.0)
    for number in list(life.fleet.children):
        life.fleet.died(number, life.now)
    started = [action.child for action in life.decide()]
    for child in started:
        life.announce(child)
    assert life.decide() == [Work(child) for child in started]


def test_one_that_never_says_that_it_works_keeps_nobody_from_it() -> None:
    life = settled(2, together=1)
    life.fleet.restart()
    for _ in range(2):
        [spawn] = [action for action in life.decide() if isinstance(action, Spawn)]
        life.announce(spawn.child)
    assert len(life.decide()) == 1 and life.decide() == []
    life.now += BEGIN_SECONDS
    assert [type(action) for action in life.decide()] == [Work]


# Whatever happens ----------------------------------------------------------------------------------------------------

EVENTS = st.lists(
    st.tuples(
        st.sampled_from(
            [
                *["announce", "work", "die", "die young", "unfit", "leave", "gone", "restart", "scale", "tick"],
                *["decide", "quiet"],
            ]
        ),
        st.integers(0, 40),
    ),
    max_size=80,
)


def happen(life: Life, event: str, n: int) -> None:
    fleet = life.fleet
    children = list(fleet.children.values())
    child = children[n % len(children)] if children else None
    if event == "restart":
        fleet.restart()
    elif event == "quiet":
        fleet.quiet()
    elif event == "scale":
        fleet.scale(1 + n % 4)
    elif event == "tick":
        life.now += n
    elif child is None or event == "decide":
        pass
    elif event == "announce":
        life.announce(child)
    elif event == "work":
        life.work(child)
    elif event == "unfit":
        fleet.unfit(child.number, "fat")
    elif event == "leave":
        fleet.leaves(child.number, "told so")
    elif event == "gone":
        if child.state is State.QUIET:
            fleet.died(child.number, life.now)
    elif (event == "die") == (child.state is State.RUNNING):
        fleet.died(child.number, life.now)


class NaiveQuietsFirst(Fleet):
    """Quiets the old as soon as a restart comes."""

    def restart(self) -> int:
        self.current = super().restart()
        return self.current

    @property
    def active(self) -> int:
        return 1_000


class NaiveOneByOne(Fleet):
    """Lets each new one work, and an old one leave for it, before all have announced themselves."""

    def _restart(self) -> list[Action]:
        actions = super()._restart()
        for child in self._coming():
            if child.generation == self.wanted and child.announced:
                self.current = self.wanted
        return actions


def check(life: Life, events: list[tuple[str, int]]) -> None:
    fleet = life.fleet
    for event, n in [*events, ("tick", 40)]:
        happen(life, event, n)
        was = fleet.current
        before, size, new = Fleet.active.fget(fleet), fleet.size, fleet.wanted  # type: ignore[attr-defined]
        waiting = {child.number for child in fleet.children.values() if child.generation == new and not child.announced}
        actions = life.decide()
        if fleet.current != was:
            ready = [
                child for child in fleet.children.values() if child.generation == fleet.current and child.announced
            ]
            assert len(ready) >= size, "not all of the new ones have announced themselves"
        running = len(fleet.of(State.RUNNING))
        assert running >= min(before, size) or fleet.quieted, "we made them too few"
        for action in actions:
            if isinstance(action, End):
                assert not action.child.at_work, "it may run a job"
            if isinstance(action, Quiet):
                child = action.child
                surplus = action.why == "there shall be fewer"
                assert surplus or child.unfit or fleet.quieted or child.generation < fleet.current, (
                    "a new one is quieted"
                )
                assert child.generation == new or fleet.current == new or child.unfit or surplus or fleet.quieted, (
                    "too early"
                )
            if isinstance(action, Work) and action.child.generation == new and fleet.current == new:
                assert action.child.number not in waiting
        for generation in {fleet.current, fleet.wanted}:
            starting = [
                child
                for child in fleet.of(State.STARTING)
                if child.generation == generation and not child.ended and not child.at_work
            ]
            assert len(starting) <= max(size, fleet.size)


@pytest.mark.promise("S01", "S02", "S04", "S19", "S20")
@settings(max_examples=300, deadline=None)
@given(size=st.integers(1, 4), together=st.integers(1, 4), gap=st.sampled_from([0.0, 0.5, 3.0]), events=EVENTS)
def test_whatever_happens_no_decision_leaves_fewer_than_n_or_touches_a_new_or_a_busy_one(
    size: int, together: int, gap: float, events: list[tuple[str, int]]
) -> None:
    life = Life(size, together=together, gap=gap)
    check(life, events)
    if life.fleet.quieted:
        life.fleet.restart()
    life.settle()
    fleet = life.fleet
    assert fleet.settled() and {child.generation for child in fleet.of(State.RUNNING)} == {fleet.current}
    assert fleet.current == fleet.wanted


@pytest.mark.second
@pytest.mark.parametrize("naive", [NaiveQuietsFirst, NaiveOneByOne])
def test_the_naive_ones_fail(naive: type[Fleet]) -> None:
    @settings(max_examples=1000, deadline=None, database=None)
    @given(size=st.integers(1, 4), events=EVENTS)
    def tried(size: int, events: list[tuple[str, int]]) -> None:
        life = Life(size)
        life.fleet = naive(size)
        check(life, events)

    with pytest.raises(AssertionError):
        tried()
