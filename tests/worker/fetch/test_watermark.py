"""No row is left behind: every rule at its edges, then all of them against schedules that try to strand one.

Each naive reading of a rule runs in the same simulator and must be caught there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from random import Random
from time import thread_time
from timeit import repeat

import pytest
from simulator import POLL, Schedule, World, first_stranding_seed, stranding_seeds

from pgqueue.jobs.job import Lane
from pgqueue.worker.fetch.passed_over import ASK_MOST, READ_EVERY
from pgqueue.worker.fetch.watermark import (
    LOOK_AGAIN,
    MOST_FLOORS,
    MOST_TAKEN,
    SWEEP_EVERY,
    SWEEP_MOST,
    Fetch,
    Reading,
    Watermark,
)

A: Lane = ("a", 11, False)
B: Lane = ("b", 11, False)
C: Lane = ("a", 13, False)
K: Lane = ("a", 11, True)
EVERYDAY = 1_000
LONG = 20_000
LOCKS = World(deaths=True, cancels=True)


# Schedules


def without_floors(reading: Reading) -> Reading:
    xid = reading.xid or int(reading.snapshot.split(":")[1])
    return replace(reading, snapshot=f"{xid}:{xid}:")


def blind_above_xmax(reading: Reading) -> Reading:
    xmin, xmax, listed = reading.snapshot.split(":")
    return replace(reading, snapshot=f"{xmin}:{reading.xid or xmax}:{listed}")


EXACT = {
    "nobody dies": World(),
    "failovers": World(rewinds=True),
    "failovers, and positions drawn again": World(kinds=True, rewinds=True, drawn_again=True),
    "one kind of jobs at a time": World(kinds=True),
    "claimers that die": World(deaths=True),
    "cancels undone": World(cancels=True),
    "both kinds, deaths and cancels": World(kinds=True, deaths=True, cancels=True),
    "glances, deaths and cancels": World(glances=True, deaths=True, cancels=True),
}

# Three of them strand nothing while what was passed is read again: that second look heals them.
NAIVE = {
    "a cursor without floors": World(reads=without_floors),
    "w before h": World(order="snapshot xid head claim"),
    "snapshot after the claim": World(order="head xid claim snapshot", passed_forgotten=True),
    "head after the claim": World(order="snapshot xid claim head"),
    "a paused lane taken as exhausted": World(paused_is_exhausted=True, passed_forgotten=True),
    "ids above xmax ignored": World(reads=blind_above_xmax),
    "a probe that stores its head": World(probe_stores_head=True),
    "a failed fetch taken as processed": World(failed_is_processed=True, passed_forgotten=True),
    "dead claimers, and what was passed is not read again": World(deaths=True, passed_forgotten=True),
    "cancels undone, and what was passed is not read again": World(cancels=True, passed_forgotten=True),
    "a remembered position that is asked for once only": World(cancels=True, deaths=True, read_once=True),
    "paused lanes of the other kind taken as empty": World(kinds=True, paused_is_empty=True),
    "rows that were taken are counted": World(rows_counted=True),
    "rows that were taken are counted, also by glances": World(glances=True, rows_counted=True),
    "an account that nothing empties": World(kinds=True, rewinds=True, drawn_again=True, account_outlives_forget=True),
    "a glance that moves its cursor": World(glances=True, glance_moves_cursor=True),
    "lanes that were not asked taken as exhausted at a later head": World(kinds=True, unasked_stay_exhausted=True),
}


def longest_wait(world: World, seeds: Iterable[int]) -> float:
    outcomes = [Schedule(seed, world).run() for seed in seeds]
    assert [outcome.stranded for outcome in outcomes if outcome.stranded] == []
    return max(outcome.longest for outcome in outcomes)


@pytest.mark.second
@pytest.mark.promise("F21")
@pytest.mark.parametrize("world", EXACT.values(), ids=EXACT)
def test_no_committed_row_is_left_behind(world: World) -> None:
    assert list(stranding_seeds(world, range(EVERYDAY))) == []


@pytest.mark.long
@pytest.mark.promise("F21")
@pytest.mark.parametrize("world", EXACT.values(), ids=EXACT)
def test_no_committed_row_is_left_behind_in_many_schedules(world: World) -> None:
    assert list(stranding_seeds(world, range(EVERYDAY, EVERYDAY + LONG))) == []


@pytest.mark.second
@pytest.mark.promise("F21")
def test_a_row_passed_while_locked_is_found_soon() -> None:
    """By a poll, a reading, and the delay after which its position is asked for; a sweep has no part in it."""
    assert 0 < longest_wait(LOCKS, range(EVERYDAY // 2)) <= POLL + READ_EVERY + ASK_MOST + LOOK_AGAIN


@pytest.mark.long
@pytest.mark.promise("F21")
def test_a_row_passed_while_locked_is_found_in_many_schedules() -> None:
    assert longest_wait(LOCKS, range(LONG)) <= POLL + READ_EVERY + ASK_MOST + LOOK_AGAIN


@pytest.mark.second
@pytest.mark.promise("F21")
def test_a_failover_that_no_worker_was_told_of_is_healed_by_the_sweep() -> None:
    """At four lanes at most, and as many of the other kind, one a minute. In these schedules nothing else heals it."""
    naive = World(rewinds=True, told=False)
    seeds = list(islice(stranding_seeds(naive, range(5_000)), 2))
    assert len(seeds) == 2
    assert 0 < longest_wait(replace(naive, sweep_every=SWEEP_EVERY), seeds) <= 8 * SWEEP_EVERY + LOOK_AGAIN


@pytest.mark.promise("F21")
@pytest.mark.parametrize("world", NAIVE.values(), ids=NAIVE)
def test_the_simulator_catches_the_naive_version(world: World) -> None:
    assert first_stranding_seed(world, 5_000) is not None


def test_a_schedule_can_be_played_again() -> None:
    assert Schedule(7, LOCKS).run() == Schedule(7, LOCKS).run()


# One fetch at a time


@dataclass(slots=True)
class Fetcher:
    """Asks a watermark as the fetcher does; ids grow by 100 per fetch, so there is room between them."""

    mark: Watermark = field(default_factory=Watermark)
    xid: int = 0
    now: float = 0.0

    def fetch(
        self,
        head: int,
        lanes: Sequence[Lane] = (A,),
        *,
        taken: Mapping[Lane, tuple[int, int]] | None = None,
        limits: Sequence[int] | None = None,
        n: int = 10,
        shut: Collection[Lane] = (),
        xmax: int | None = None,
        listed: Sequence[int] = (),
        seconds: float = 0.0,
        workers: int = 1,
        looked: Mapping[Lane, int] | None = None,
        positions: Collection[int] = (),
    ) -> bool:
        self.mark.starts(lanes, self.now)
        self.xid += 100
        opened = [lane for lane in lanes if lane not in shut]
        reading = Reading(head, self.xid, snapshot(xmax or self.xid, listed))
        fetch = Fetch(reading, lanes, limits or [n] * len(lanes), opened, taken or {}, n, looked or {}, positions)
        return self.mark.fetched(fetch, self.now, seconds * workers)

    def starts(self, *lanes: Lane) -> list[int]:
        return self.mark.starts(lanes or (A,), self.now)

    def idle(
        self,
        head: int,
        lanes: Sequence[Lane] = (A,),
        *,
        paused: frozenset[str] = frozenset(),
        xmax: int | None = None,
        listed: Sequence[int] = (),
    ) -> bool:
        return self.mark.idle(Reading(head, None, snapshot(xmax or self.xid + 1, listed)), paused, lanes, self.now)


def snapshot(xmax: int, listed: Sequence[int]) -> str:
    return f"{min([*listed, xmax])}:{xmax}:{','.join(map(str, listed))}"


@pytest.fixture
def fetcher() -> Fetcher:
    return Fetcher()


# Rules 2 and 3: who is in progress, and the floors


def test_a_lane_never_seen_starts_at_zero(fetcher: Fetcher) -> None:
    fetcher.fetch(10)
    assert fetcher.starts(A, B) == [10, 0]


def test_the_floor_of_an_id_is_the_head_of_the_fetch_before_the_one_that_saw_it_first(fetcher: Fetcher) -> None:
    fetcher.fetch(10)
    fetcher.fetch(20, listed=[150])
    fetcher.fetch(30, listed=[150])
    assert fetcher.starts() == [30]
    fetcher.fetch(40)
    assert fetcher.starts() == [10]


def test_an_id_the_first_fetch_saw_sends_everybody_to_zero(fetcher: Fetcher) -> None:
    fetcher.fetch(10, listed=[50])
    fetcher.fetch(20)
    assert fetcher.starts() == [0]


def test_of_several_ids_that_ended_the_lowest_floor_counts(fetcher: Fetcher) -> None:
    fetcher.fetch(10)
    fetcher.fetch(20, listed=[150])
    fetcher.fetch(30, listed=[150, 250])
    fetcher.fetch(40, listed=[350])
    assert fetcher.starts() == [10]


def test_an_id_not_below_xmax_is_in_progress_though_unlisted(fetcher: Fetcher) -> None:
    fetcher.fetch(10)
    fetcher.fetch(20, xmax=197)
    fetcher.fetch(30, listed=[197, 198, 199])
    assert fetcher.starts() == [30]
    fetcher.fetch(40, listed=[197, 199])
    assert fetcher.starts() == [10]


def test_an_id_still_not_below_xmax_has_not_ended(fetcher: Fetcher) -> None:
    fetcher.fetch(10)
    fetcher.fetch(20, xmax=150)
    fetcher.fetch(30, xmax=150)
    assert fetcher.starts() == [30]


def test_a_million_ids_above_xmax_cost_nothing(fetcher: Fetcher) -> None:
    fetcher.fetch(10)
    fetcher.xid = 10_000_000
    fetcher.fetch(20, xmax=150)
    fetcher.fetch(30, xmax=9_000_000, listed=[150])
    assert fetcher.starts() == [10]


@pytest.mark.second
def test_floors_are_those_of_a_table_kept_id_by_id() -> None:
    """The step function against rule 3 word for word, over ids that live for one fetch or for hundreds."""
    dice, fetcher = Random(0), Fetcher()
    running: set[int] = set()
    floors: dict[int, int] = {}
    head = previous = cursor = 0
    for _ in range(5 * MOST_FLOORS // 2):
        running |= set(dice.sample(range(fetcher.xid + 1, fetcher.xid + 100), 3))
        ended = {xid for xid in running if dice.random() < (0.7 if xid % 3 else 0.005)}
        running -= ended
        head += dice.choice((0, 1, 5))
        xmax = dice.choice((fetcher.xid + 100, max(ended, default=0) + 1, fetcher.xid + 1))
        xmax = max(xmax, fetcher.xid + 1, *(xid + 1 for xid in ended), 1)
        fetcher.fetch(head, xmax=xmax, listed=sorted(xid for xid in running if xid < xmax))
        low = min((floors.pop(xid) for xid in list(floors) if xid not in running), default=head)
        for xid in running - floors.keys():
            floors[xid] = previous
        for xid in range(xmax, fetcher.xid):  # unlisted, so in progress for all anybody knows
            floors.setdefault(xid, previous)
            running.add(xid)
        cursor, previous = (low if cursor > low else head), head
        assert fetcher.starts() == [cursor]


@pytest.mark.second
def test_beyond_a_thousand_floors_the_oldest_are_merged_downwards(fetcher: Fetcher) -> None:
    open_ids: list[int] = []
    for i in range(3 * MOST_FLOORS):
        open_ids.append(fetcher.xid + 50)
        fetcher.fetch(10 * i, listed=open_ids)
    assert len(fetcher.mark._floor_xids) <= 2 * MOST_FLOORS
    for ended in (open_ids[-10], open_ids[-1900], open_ids[0]):
        exact = max(0, 10 * ((ended - 50) // 100 - 1))
        floor = fetcher.mark._lowest_floor_of_ended(10**9, fetcher.xid, [xid for xid in open_ids if xid != ended])
        assert floor <= exact
        assert floor == exact or ended != open_ids[-10]


# Rule 4: where the cursors go


def test_with_fewer_than_asked_every_open_lane_is_exhausted(fetcher: Fetcher) -> None:
    fetcher.fetch(50, [A, B], taken={A: (3, 20)})
    assert fetcher.starts(A, B) == [50, 50]


def test_when_full_the_last_lane_that_gave_stops_there_and_later_ones_stay(fetcher: Fetcher) -> None:
    fetcher.fetch(50, [A, B, C])
    fetcher.fetch(90, [A, B, C], taken={A: (3, 80), B: (7, 70)})
    assert fetcher.starts(A, B, C) == [90, 70, 50]


def test_the_cursor_never_passes_the_head(fetcher: Fetcher) -> None:
    fetcher.fetch(50, taken={A: (10, 57)})
    assert fetcher.starts() == [50]


def test_a_lane_that_gave_its_own_limit_is_not_exhausted(fetcher: Fetcher) -> None:
    fetcher.fetch(50, [A, B], taken={A: (2, 20)}, limits=[2, 10])
    assert fetcher.starts(A, B) == [20, 50]


def test_a_lane_that_gave_less_than_its_own_limit_is_exhausted(fetcher: Fetcher) -> None:
    fetcher.fetch(50, [A, B], taken={A: (1, 20), B: (9, 30)}, limits=[2, 10])
    assert fetcher.starts(A, B) == [50, 30]


def test_a_paused_lane_keeps_its_start(fetcher: Fetcher) -> None:
    fetcher.fetch(50, [A, B])
    fetcher.fetch(90, [A, B], shut=[A])
    assert fetcher.starts(A, B) == [50, 90]


def test_a_lane_not_asked_keeps_its_start_and_falls_to_the_floors(fetcher: Fetcher) -> None:
    fetcher.fetch(50, [A, B])
    fetcher.fetch(90, [A, B], listed=[150])
    fetcher.fetch(95, [A], listed=[150])
    assert fetcher.starts(A, B) == [95, 90]
    fetcher.fetch(99, [A])
    assert fetcher.starts(A, B) == [50, 50]


def test_a_lane_whose_claim_began_below_the_floor_need_not_fall(fetcher: Fetcher) -> None:
    fetcher.fetch(50, [A])
    fetcher.fetch(90, [A], listed=[150])
    fetcher.fetch(95, [A, B])
    assert fetcher.starts(A, B) == [50, 95]


def test_a_lane_that_was_looked_at_is_exhausted_at_the_head(fetcher: Fetcher) -> None:
    fetcher.fetch(50, [A, B])
    fetcher.fetch(90, [A], looked={B: 90})
    assert fetcher.starts(A, B) == [90, 90]
    assert fetcher.idle(90, [A, B])


def test_a_lane_in_which_a_job_was_seen_is_looked_at_up_to_that(fetcher: Fetcher) -> None:
    fetcher.fetch(50, [A, B])
    fetcher.fetch(90, [A], looked={B: 69})
    assert fetcher.starts(A, B) == [90, 69]
    assert not fetcher.idle(90, [A, B])


def test_a_lane_that_was_looked_at_falls_to_the_floors_like_any_other(fetcher: Fetcher) -> None:
    fetcher.fetch(50, [A, B])
    fetcher.fetch(90, [A], listed=[150], looked={B: 90})
    fetcher.fetch(95, [A], looked={B: 95})
    assert fetcher.starts(A, B) == [50, 50]
    assert not fetcher.idle(95, [A, B])


# Rule 5: repeats


@pytest.fixture
def falling(fetcher: Fetcher) -> Fetcher:
    """A fetcher whose floors, 30, 20 and 10, can end one by one: 350, 250, 150."""
    fetcher.fetch(10)
    fetcher.fetch(20, listed=[150])
    fetcher.fetch(30, listed=[150, 250])
    fetcher.fetch(40, listed=[150, 250, 350])
    return fetcher


def test_a_fetch_that_lowers_cursors_is_repeated_at_once_but_only_once(falling: Fetcher) -> None:
    assert falling.fetch(50, listed=[150, 250])
    assert falling.mark.next_look(0.0) == SWEEP_EVERY
    assert not falling.fetch(50, listed=[150])
    assert falling.mark.next_look(0.0) == LOOK_AGAIN
    assert falling.mark.next_look(2 * LOOK_AGAIN) == 2 * LOOK_AGAIN
    assert not falling.fetch(50)
    assert falling.starts() == [10]


def test_a_fetch_that_lowers_nothing_ends_the_chain(falling: Fetcher) -> None:
    assert falling.fetch(50, listed=[150, 250])
    assert not falling.fetch(50, listed=[150, 250])
    assert falling.mark.next_look(0.0) == SWEEP_EVERY
    assert falling.fetch(50)


def test_a_full_fetch_is_not_repeated_for_it_has_no_slot(falling: Fetcher) -> None:
    assert not falling.fetch(50, taken={A: (10, 45)}, listed=[150, 250])
    assert falling.starts() == [30]
    assert falling.mark.next_look(0.0) == LOOK_AGAIN


# Rule 6: the probe


def test_a_probe_lets_skip_when_all_lanes_were_exhausted_and_nothing_moved(fetcher: Fetcher) -> None:
    fetcher.fetch(10, [A, B])
    assert fetcher.idle(10, [A, B])
    assert fetcher.idle(10, [A])


def test_a_probe_does_not_let_skip_before_the_first_fetch(fetcher: Fetcher) -> None:
    assert not fetcher.idle(0, [])


def test_a_probe_does_not_let_skip_when_the_head_moved(fetcher: Fetcher) -> None:
    fetcher.fetch(10)
    assert not fetcher.idle(11)
    assert fetcher.idle(10), "it stored something"


def test_a_probe_does_not_let_skip_a_lane_the_last_fetch_did_not_exhaust(fetcher: Fetcher) -> None:
    fetcher.fetch(10, [A, B], taken={A: (10, 7)})
    assert not fetcher.idle(10, [A, B])
    fetcher.fetch(10, [A])
    assert not fetcher.idle(10, [A, B])


def test_a_probe_does_not_let_skip_a_queue_that_was_paused_and_is_not(fetcher: Fetcher) -> None:
    fetcher.fetch(10, [A, B], shut=[B])
    assert fetcher.idle(10, [A, B], paused=frozenset("b"))
    assert fetcher.idle(10, [A, B], paused=frozenset({"b", "of others"}))
    assert not fetcher.idle(10, [A, B])
    assert fetcher.idle(10, [A, B], paused=frozenset("ab"))


def test_a_probe_does_not_let_skip_when_an_id_with_a_floor_has_ended(fetcher: Fetcher) -> None:
    fetcher.fetch(10, xmax=98, listed=[50])
    assert fetcher.idle(10, xmax=98, listed=[50])
    assert fetcher.idle(10, xmax=101, listed=[50, 98, 99])
    assert not fetcher.idle(10, xmax=101, listed=[50, 98])
    assert not fetcher.idle(10, xmax=98)


def test_a_probe_does_not_let_skip_what_was_lowered_and_not_yet_looked_at(falling: Fetcher) -> None:
    falling.fetch(50)
    assert not falling.idle(50)


# The account: where each position was taken, nothing is left


def ended(fetcher: Fetcher, head: int) -> tuple[bool, int]:
    """What a fetch at this head does if 150 has ended: whether it is to be repeated, and where the next one begins."""
    assert fetcher.mark.missed(snapshot(fetcher.xid + 1, [])) is not fetcher.idle(head)
    return fetcher.fetch(head), fetcher.starts()[0]


@pytest.mark.promise("F256")
@pytest.mark.parametrize(
    ("positions", "left"),
    [
        ([11, 12, 13], False),
        ([9, 10, 13, 12, 11], False),
        ([11, 12], True),
        ([11, 13], True),
        ([12, 13], True),
        ([10, 11, 12], True),
        ([12, 13, 14], True),
        ([], True),
    ],
)
def test_no_cursor_falls_where_this_worker_took_each_position(
    fetcher: Fetcher, positions: list[int], left: bool
) -> None:
    fetcher.fetch(10)
    fetcher.fetch(13, listed=[150], positions=positions)
    assert not fetcher.mark.missed(snapshot(fetcher.xid + 1, [150]))
    assert ended(fetcher, 13) == ((True, 10) if left else (False, 13))


@pytest.mark.promise("F256")
def test_what_a_glance_took_counts_and_what_lies_above_the_head_need_not(fetcher: Fetcher) -> None:
    fetcher.fetch(10)
    fetcher.mark.took([11])
    fetcher.fetch(12, listed=[150], positions=[12])
    fetcher.mark.took([13])
    assert not fetcher.mark.missed(snapshot(fetcher.xid + 1, []))
    assert not fetcher.idle(13), "the id that drew 13 might have drawn more"
    assert fetcher.fetch(20) is False
    assert fetcher.starts() == [20]


@pytest.mark.promise("F256")
def test_an_id_that_has_drawn_nothing_causes_nothing(fetcher: Fetcher) -> None:
    fetcher.fetch(10)
    fetcher.fetch(10, listed=[150])
    assert ended(fetcher, 10) == (False, 10)


@pytest.mark.promise("F256")
def test_the_oldest_id_that_ended_decides(fetcher: Fetcher) -> None:
    fetcher.fetch(10)
    fetcher.fetch(20, listed=[150])
    fetcher.fetch(21, listed=[150, 250], positions=[21])
    assert fetcher.fetch(21, listed=[150], positions=[]) is False
    assert fetcher.starts() == [21]
    assert ended(fetcher, 21) == (True, 10)


@pytest.mark.promise("F256")
@pytest.mark.parametrize("how", ["forgotten", "another server", "an answer that came too late"])
def test_the_account_is_empty_after_any_doubt(fetcher: Fetcher, how: str) -> None:
    fetcher.fetch(10)
    fetcher.mark.took([11, 12, 13])
    if how == "forgotten":
        fetcher.mark.forget()
    elif how == "another server":
        fetcher.fetch(9, positions=[11, 12, 13])
    else:
        fetcher.mark.starts([A], 0.0)
        fetcher.mark.forget()
        reading = Reading(13, fetcher.xid + 1, "200:200:")
        fetcher.mark.fetched(Fetch(reading, [A], [10], [A], {}, 10, {}, [11, 12, 13]), 0.0)
    fetcher.fetch(10)
    between = fetcher.xid + 50
    fetcher.fetch(13, listed=[between])
    assert ended(fetcher, 13) == (True, 10)


@pytest.mark.promise("F256")
def test_the_account_has_a_thousand_positions_at_most(fetcher: Fetcher) -> None:
    for pos in range(1, 3 * MOST_TAKEN):
        fetcher.mark.took([pos])
        assert 0 < len(fetcher.mark._taken) <= MOST_TAKEN
        assert pos in fetcher.mark._taken
    fetcher.mark.took(range(MOST_TAKEN + 1))
    assert not fetcher.mark._taken


# Rule 7: forgetting


def test_forgetting_begins_anew(fetcher: Fetcher) -> None:
    fetcher.fetch(10)
    fetcher.mark.forget()
    assert not fetcher.idle(10)
    assert fetcher.starts() == [0]
    fetcher.fetch(20, listed=[150])
    fetcher.fetch(30)
    assert fetcher.starts() == [0], "the floor of 150 is from before anything is known"


@pytest.mark.parametrize(("head", "xid"), [(9, 300), (10, 200), (42, 150)])
def test_another_server_is_recognised_and_everything_forgotten(fetcher: Fetcher, head: int, xid: int) -> None:
    fetcher.fetch(10)
    fetcher.fetch(10)
    fetcher.xid = xid - 100
    assert fetcher.fetch(head)
    assert fetcher.starts() == [0]


def test_an_answer_on_its_way_when_all_was_forgotten_is_not_believed(fetcher: Fetcher) -> None:
    fetcher.fetch(10)
    fetcher.mark.starts([A], 0.0)
    fetcher.mark.forget()
    assert fetcher.mark.fetched(Fetch(Reading(20, 200, "200:200:"), [A], [10], [A], {}, 10), 0.0)
    assert fetcher.starts() == [0]


# Rule 8: the cursor falls for what was passed over; and the sweep


def test_a_cursor_falls_to_a_position_and_never_rises_to_one(fetcher: Fetcher) -> None:
    fetcher.fetch(10, [A, B])
    fetcher.mark.fall(A, 4)
    fetcher.mark.fall(B, 12)
    assert not fetcher.idle(10, [A, B])
    assert fetcher.idle(10, [B])
    assert fetcher.starts(A, B) == [4, 10]


def test_a_row_that_was_passed_over_does_not_lower_the_cursor(fetcher: Fetcher) -> None:
    fetcher.fetch(50, [A, B])
    fetcher.fetch(90, [A, B], taken={B: (10, 3)})
    assert fetcher.starts(A, B) == [90, 50]


def test_one_lane_a_minute_starts_at_zero_idle_or_not(fetcher: Fetcher) -> None:
    fetcher.fetch(10, [A, B])
    fetcher.now = SWEEP_EVERY - 0.1
    assert fetcher.starts(A, B) == [10, 10]
    assert fetcher.mark.next_look(fetcher.now) == SWEEP_EVERY
    assert fetcher.idle(10, [A, B])
    fetcher.now = SWEEP_EVERY
    assert fetcher.mark.next_look(fetcher.now) == fetcher.now
    assert not fetcher.idle(10, [A, B])
    fetcher.fetch(10, [A, B])
    swept = fetcher.mark._swept
    for number in range(2, 5):
        fetcher.now = number * SWEEP_EVERY
        fetcher.fetch(10, [A, B])
    other_kind = (A[0], A[1], True), (B[0], B[1], True)
    assert sorted(swept[lane] / SWEEP_EVERY for lane in (A, B, *other_kind)) == [1, 2, 3, 4], "each once"


def test_the_sweep_comes_to_lanes_of_the_other_kind_and_a_reading_is_enough(fetcher: Fetcher) -> None:
    fetcher.fetch(10, [A], looked={K: 10})
    fetcher.now = SWEEP_EVERY
    fetcher.fetch(10, [A], looked={K: 10})
    assert (fetcher.mark._swept[A], K in fetcher.mark._swept) == (0.0, True), "the one that was never swept"
    assert fetcher.mark.cursors([K]) == [10]
    assert fetcher.idle(10, [A, K])
    fetcher.now = 2 * SWEEP_EVERY
    fetcher.starts(A)
    assert fetcher.mark.cursors([A, K]) == [0, 10]


@pytest.mark.parametrize(
    ("seconds", "workers", "due"), [(0.1, 3, 60.0), (0.2, 3, 60.0), (0.7, 1, 70.0), (2.0, 3, 600.0)]
)
def test_after_a_dear_start_at_zero_the_sweep_comes_later(
    fetcher: Fetcher, seconds: float, workers: int, due: float
) -> None:
    """All workers together spend one core's 1 % on it at most."""
    fetcher.fetch(10, seconds=seconds, workers=workers)
    assert fetcher.mark.next_look(0.0) == pytest.approx(due)


def test_a_scan_that_began_elsewhere_counts_for_nothing(fetcher: Fetcher) -> None:
    fetcher.fetch(10)
    fetcher.fetch(20, seconds=9.0)
    assert fetcher.mark.next_look(0.0) == SWEEP_EVERY


def test_a_lane_not_reached_stays_at_zero_and_its_scan_counts_when_it_comes(fetcher: Fetcher) -> None:
    fetcher.fetch(10, [A, B], taken={A: (10, 9)}, seconds=0.1)
    assert fetcher.starts(A, B) == [9, 0]
    fetcher.fetch(10, [A, B], seconds=3.0)
    assert fetcher.starts(A, B) == [10, 10]
    assert fetcher.mark.next_look(0.0) == pytest.approx(300.0)


def test_a_cheap_scan_of_one_lane_does_not_hide_the_dear_one_of_another(fetcher: Fetcher) -> None:
    fetcher.fetch(10, [A, B], taken={A: (10, 9)}, seconds=3.0)
    fetcher.fetch(10, [A, B], seconds=0.001)
    assert fetcher.mark.next_look(0.0) == pytest.approx(300.0)


def test_a_rescue_makes_the_next_claim_start_at_zero(fetcher: Fetcher) -> None:
    fetcher.fetch(10)
    fetcher.mark.start_at_zero()
    assert not fetcher.idle(10)
    assert fetcher.mark.next_look(1.0) == 1.0
    assert fetcher.starts() == [0]


def test_a_rescue_during_a_claim_is_not_forgotten(fetcher: Fetcher) -> None:
    fetcher.mark.starts([A], 0.0)
    fetcher.mark.start_at_zero()
    fetcher.mark.fetched(Fetch(Reading(10, 100, "100:100:"), [A], [10], [A], {}, 10), 0.0, 0.1)
    assert fetcher.starts() == [0]


def test_a_start_at_zero_whose_claim_failed_is_still_owed(fetcher: Fetcher) -> None:
    fetcher.fetch(10)
    fetcher.mark._swept[K] = 1.0
    fetcher.now = SWEEP_EVERY
    fetcher.starts()
    assert not fetcher.idle(10)
    assert fetcher.starts() == [0]


def test_it_is_cheap_enough_for_every_fetch() -> None:
    lanes = [(f"queue{i // 2}", i, False) for i in range(22)]
    taken = {lane: (5, 90) for lane in lanes[:8]}
    fetcher, n = Fetcher(), 1_000
    limits = [n] * len(lanes)

    def one() -> None:
        fetcher.xid += 100
        listed = ",".join(str(fetcher.xid - 150 + 7 * i) for i in range(20))
        reading = Reading(fetcher.xid, fetcher.xid, f"{fetcher.xid - 150}:{fetcher.xid - 10}:{listed}")
        fetcher.mark.starts(lanes, 0.0)
        fetcher.mark.fetched(Fetch(reading, lanes, limits, lanes, taken, n), 0.0)

    seconds = min(repeat(one, timer=thread_time, number=200, repeat=10)) / 200  # of CPU: the machine may be busy
    assert seconds < 100e-6


def test_one_slow_answer_does_not_cancel_the_next_start_at_zero(fetcher: Fetcher) -> None:
    fetcher.fetch(10, seconds=45.0, workers=100)
    assert fetcher.mark.next_look(0.0) == SWEEP_MOST
    fetcher.mark._swept[K] = 1.0
    fetcher.now = SWEEP_MOST
    assert fetcher.starts(A) == [0]


def test_a_look_at_no_lane_takes_no_turn_to_start_at_zero() -> None:
    """So it is if a poison job comes in between the two kinds of a fetch that asks for such jobs only."""
    watermark = Watermark()
    lane = ("q", 11, False)
    assert watermark.starts([lane], 0.0) == [0]
    assert watermark.starts([], SWEEP_EVERY + 1.0) == []
    watermark.starts([lane], SWEEP_EVERY + 2.0)
    assert watermark._sweep_due == 2 * SWEEP_EVERY + 2.0
