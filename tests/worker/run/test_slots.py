"""Slots and room: what a group asks for, when, and that a worker never claims more than its groups can hold."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from workers import Eyes, until, work

from pgqueue.client.tasks import task
from pgqueue.errors import InvalidOption
from pgqueue.jobs.job import Job
from pgqueue.worker.run.slots import PREFETCH_MOST, PREFETCH_SECONDS, SlotGroup, slot_groups
from pgqueue.worker.settings import at_least, queue_slots

ran: list[str] = []


@task(name="group.quick")
async def quick(job: Job) -> None:
    ran.append(job.queue)


@dataclass(eq=False)
class Waiting:
    """What a group asks of a job that waits at hand."""

    start_by: float | None = None


def waiting(number: int) -> list[Any]:
    return [(None, quick)] * number


def test_room_is_what_fits_and_none_while_there_is_enough_at_hand() -> None:
    group = SlotGroup(["a"], 4)
    assert (group.room(), group.low()) == (4, True)
    group.waiting.extend(waiting(3))
    assert [group.start() is not None for _ in range(5)] == [True] * 3 + [False] * 2
    assert group.room() == 1
    group.waiting.extend(waiting(1))
    group.start()
    assert (group.room(), group.running) == (0, 4)
    group.prefetch = 10
    group.waiting.extend(waiting(6))
    assert (group.room(), group.asked()) == (0, 4)  # more than half is left
    group.waiting.popleft()
    assert group.room() == 5
    group.note(0.1)
    group.end()
    assert group.room() == 6
    group.prefetch = 0
    group.waiting.extend(waiting(20))
    assert group.asked() == 0


@pytest.mark.parametrize(
    ("slots", "jobs", "seconds", "prefetch"),
    [
        (4, 100, 1 / 128, 25),
        (10, 100, 1 / 128, 64),
        (4, 100, 1.0, 0),
        (4, 3, 1e-4, 6),
        (1000, 90_000, 1e-9, PREFETCH_MOST),
    ],
)
def test_the_prefetch_is_fifty_milliseconds_of_work(slots: int, jobs: int, seconds: float, prefetch: int) -> None:
    group = SlotGroup(["a"], slots)
    group.running = jobs
    for _ in range(jobs):
        group.note(seconds)
        group.end()
    group.adapt()
    assert group.prefetch == prefetch
    group.adapt()  # nothing new to go by
    assert group.prefetch == prefetch
    assert group.running == 0
    assert PREFETCH_SECONDS == 0.05


def test_the_prefetch_is_at_most_what_may_be_done_in_one_step() -> None:
    for group in slot_groups({"a": None, "mail": 5}, 1000, 250):
        group.running = 90_000
        for _ in range(90_000):
            group.note(1e-9)
            group.end()
        group.adapt()
        assert group.prefetch == 250


def test_of_jobs_left_since_the_last_look_as_many_stay_as_have_started_since() -> None:
    group = SlotGroup(["a"], 4)
    group.running, group.prefetch = 100, 25
    for _ in range(100):
        group.note(0.001)
        group.end()
    group.running = 4
    jobs: list[Any] = [Waiting() for _ in range(8)]
    group.put([(job, quick) for job in jobs[:4]])
    assert group.surplus() == []
    assert group.asked() == 21
    assert [group.take(True, 0.001), group.take(True, 0.001)] == [(jobs[0], quick), (jobs[1], quick)]
    group.put([(job, quick) for job in jobs[4:]])
    jobs[5].start_by = 1.0  # of a rate: it goes back at a moment of its own
    assert group.surplus() == [jobs[4], *jobs[6:]], "the newest go: none starts before an older one"
    assert [job for job, _ in group.waiting] == [jobs[2], jobs[3], jobs[5]]
    group.adapt()  # what was quick before says nothing any more
    assert (group.prefetch, group.asked()) == (2, 0)
    assert group.surplus() == jobs[2:4], "none has started since"
    assert group.prefetch == 0
    assert group.surplus() == []


def test_for_what_gathers_more_is_fetched_while_a_slot_is_free_and_none_has_gone_back() -> None:
    group = SlotGroup(["a"], 2)
    group.beyond, group.gathering = 1, 8  # one batch
    assert (group.room(), group.asked()) == (9, 1)
    group.beyond = 3  # three of them take no slot from the next job
    assert (group.room(), group.asked()) == (9, 1)
    jobs: list[Any] = [Waiting() for _ in range(3)]
    group.put([(job, quick) for job in jobs])
    assert group.start() and group.start()
    assert (group.room(), group.asked()) == (0, 0)
    assert group.surplus() == []
    assert group.surplus() == jobs[2:]
    group.end()
    assert (group.room(), group.asked()) == (1, 1), "what came for it has waited in vain"


def test_a_flow_of_quick_jobs_gives_none_back() -> None:
    group = SlotGroup(["a"], 4)
    for _ in range(5):
        jobs: list[Any] = [Waiting() for _ in range(20)]
        group.put([(job, quick) for job in jobs])
        assert group.surplus() == []
        while group.waiting:
            group.take(True, 0.001)


def test_each_queue_with_slots_of_its_own_has_its_pool_and_the_others_share() -> None:
    named = queue_slots(["mail:5", "a", "b"], [])
    assert named == {"mail": 5, "a": None, "b": None}
    assert [(group.queues, group.slots) for group in slot_groups(named, 7)] == [(("a", "b"), 7), (("mail",), 5)]
    assert [(group.queues, group.slots) for group in slot_groups({"mail": 5}, 7)] == [(("mail",), 5)]
    assert queue_slots(None, [quick]) == queue_slots(None, []) == {"default": None}


@pytest.mark.parametrize(
    "call",
    [
        lambda: queue_slots(["mail:"], []),
        lambda: queue_slots(["mail:0"], []),
        lambda: queue_slots(["mail:-1"], []),
        lambda: queue_slots(["mail:x"], []),
        lambda: queue_slots([":5"], []),
        lambda: at_least("lease", math.nan, 1.0),
        lambda: at_least("lease", math.inf, 1.0),
        lambda: at_least("lease", 0.99, 1.0),
    ],
)
def test_what_makes_no_sense_is_refused(call: Callable[[], object]) -> None:
    with pytest.raises(InvalidOption):
        call()


@pytest.mark.parametrize("queues", [["mail:1", "bulk"], ["mail:3", "bulk:2", "other:5"]], ids=str)
async def test_beside_an_idle_pool_a_queue_is_given_no_more_than_it_has_slots_for(
    queues: list[str], dsn: str, eyes: Eyes
) -> None:
    """Each of its ten lanes could give all the room there is, its own and that of the other group."""
    ran.clear()
    eyes.do(
        "INSERT INTO pgqueue.job (task, queue, priority, rank) "
        "SELECT 'group.quick', 'mail', n %% 10, 2 * (n %% 10) + 1 FROM generate_series(1, %s) n",
        100,
    )
    async with work(dsn, quick, queues=queues):
        await until(eyes.done(100))
    assert ran == ["mail"] * 100
    # A position is drawn each time a job becomes available: nobody did a second time.
    assert eyes.one("SELECT last_value FROM pgqueue.job_pos_seq") == 100
