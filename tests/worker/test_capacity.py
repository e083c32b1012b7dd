"""Which service may fill the free slots: one pure function, as a table of cases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from pgqueue.worker.capacity import Filler, GroupLoad, WorkerLoad, rooms
from pgqueue.worker.run.slots import Room

FETCHER, UNBLOCKER, RATE_LIMITER = Filler.FETCHER, Filler.UNBLOCKER, Filler.RATE_LIMITER
A, B = ("a",), ("b",)
# Ten free slots; ten more jobs may wait at hand.
GROUP = GroupLoad(A, wanted=20, fitting=20, free=10)
BUSY = GroupLoad(A, wanted=0, fitting=3, free=0)
WORKER = WorkerLoad(idle=True)


def case(
    name: str, filler: Filler, found: Sequence[Room], group: GroupLoad = GROUP, worker: WorkerLoad = WORKER
) -> object:
    return pytest.param(filler, group, worker, found, id=f"{filler.name}: {name}")


@pytest.mark.parametrize(
    ("filler", "group", "worker", "found"),
    [
        case("all that fits", FETCHER, [Room(A, 20)]),
        case("before the worker has begun", FETCHER, [Room(A, 20)], worker=replace(WORKER, running=False)),
        case("nothing while enough is at hand", FETCHER, [Room(A, 0)], BUSY),
        case("not the slot kept for a rate", FETCHER, [Room(A, 19)], replace(GROUP, reserved=1)),
        case("not what was promised", FETCHER, [Room(A, 15)], replace(GROUP, promised=5)),
        case("never less than nothing", FETCHER, [Room(A, 0)], replace(GROUP, promised=50)),
        case("not what keys are about to want", FETCHER, [Room(A, 17)], worker=replace(WORKER, pending=3)),
        case("nothing, if they want all", FETCHER, [Room(A, 0)], worker=replace(WORKER, pending=50)),
        case(
            "its turn, if they want all",
            FETCHER,
            [Room(A, 1)],
            replace(GROUP, fetchers_turn=True),
            replace(WORKER, pending=50),
        ),
        case(
            "no turn without room",
            FETCHER,
            [Room(A, 0)],
            replace(BUSY, fetchers_turn=True),
            replace(WORKER, pending=50),
        ),
        case("nothing beside a lone poison job", FETCHER, [], worker=replace(WORKER, alone=True)),
        case("nothing over a backlog of outcomes", FETCHER, [], worker=replace(WORKER, backlog=True)),
        case("nothing when late", FETCHER, [], worker=replace(WORKER, late=True)),
        case("nothing while draining", FETCHER, [], worker=replace(WORKER, draining=True, idle=False)),
        case(
            "the poison job when drained",
            FETCHER,
            [Room(list(A), 1, alone=True)],
            worker=replace(WORKER, draining=True),
        ),
        case(
            "not if that one waits for a rate",
            FETCHER,
            [],
            worker=replace(WORKER, draining=True, drains_for_rate=True),
        ),
        case("all that fits", UNBLOCKER, [Room(A, 20)]),
        case("also behind what waits at hand", UNBLOCKER, [Room(A, 3)], BUSY),
        case("in chains", UNBLOCKER, [Room(A, 20, behind=7)], replace(GROUP, behind=7)),
        case("not what a fetch has asked for", UNBLOCKER, [Room(A, 12, fetching=8)], replace(GROUP, fetching=8)),
        case("not the slot kept for a rate", UNBLOCKER, [Room(A, 19)], replace(GROUP, reserved=1)),
        case("half is left to the next fetch", UNBLOCKER, [Room(A, 20, left=10)], replace(GROUP, hungry=True)),
        case("the last one by turns", UNBLOCKER, [Room(A, 1)], replace(GROUP, fitting=1, hungry=True)),
        case(
            "the last one is the fetcher's",
            UNBLOCKER,
            [Room(A, 1, left=1)],
            replace(GROUP, fitting=1, hungry=True, fetchers_turn=True),
        ),
        case("none beside a lone poison job", UNBLOCKER, [Room(A, 0)], worker=replace(WORKER, alone=True)),
        case("none while draining", UNBLOCKER, [Room(A, 0)], worker=replace(WORKER, draining=True)),
        case("also over a backlog", UNBLOCKER, [Room(A, 20)], worker=replace(WORKER, backlog=True)),
        case("nothing when quiet", UNBLOCKER, [], worker=replace(WORKER, running=False)),
        case("nothing when late", UNBLOCKER, [], worker=replace(WORKER, late=True)),
        case("free slots at once, others at hand", RATE_LIMITER, [Room(A, 10, spare=10)]),
        case("none, but one at hand", RATE_LIMITER, [Room(A, 0, spare=3)], BUSY),
        case("not what a fetch has asked for", RATE_LIMITER, [Room(A, 2, spare=10)], replace(GROUP, fetching=8)),
        case(
            "not what keys are about to want", RATE_LIMITER, [Room(A, 7, spare=10)], worker=replace(WORKER, pending=3)
        ),
        case("not the fetcher's turn", RATE_LIMITER, [Room(A, 9, spare=10)], replace(GROUP, fetchers_turn=True)),
        case(
            "the slot that is kept for it, in any case",
            RATE_LIMITER,
            [Room(A, 10, spare=0)],
            replace(GROUP, reserved=1, fetching=20),
        ),
        case("none beside a lone poison job", RATE_LIMITER, [Room(A, 0, spare=20)], worker=replace(WORKER, alone=True)),
        case("none while draining", RATE_LIMITER, [Room(A, 0)], worker=replace(WORKER, draining=True, idle=False)),
        case("one poison job when drained", RATE_LIMITER, [Room(A, 1)], worker=replace(WORKER, draining=True)),
        case("nothing when quiet", RATE_LIMITER, [], worker=replace(WORKER, running=False)),
        case("nothing when late", RATE_LIMITER, [], worker=replace(WORKER, late=True)),
    ],
)
def test_which_room_a_service_may_fill(
    filler: Filler, group: GroupLoad, worker: WorkerLoad, found: Sequence[Room]
) -> None:
    assert rooms([group], worker, filler) == found


def test_groups_are_filled_each_by_itself() -> None:
    groups = [GROUP, replace(BUSY, queues=B)]
    assert rooms(groups, WORKER, FETCHER) == [Room(A, 20), Room(B, 0)]
    assert rooms(groups, WORKER, UNBLOCKER) == [Room(A, 20), Room(B, 3)]
    assert rooms(groups, WORKER, RATE_LIMITER) == [Room(A, 10, spare=10), Room(B, 0, spare=3)]


def test_a_poison_job_that_runs_alone_is_looked_for_in_all_queues_at_once() -> None:
    groups = [GROUP, replace(BUSY, queues=B)]
    assert rooms(groups, replace(WORKER, draining=True), FETCHER) == [Room(["a", "b"], 1, alone=True)]
