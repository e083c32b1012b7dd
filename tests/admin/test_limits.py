"""Limits: so many at once of all that name one, over all workers; declared, set by hand, beside locks; their cost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from time import monotonic
from typing import Any

import psycopg
import pytest
from commands import items
from commands import pgqueue as command
from lock_desk import ALLOW, BOTH, LIMITED, Desk, OneStatement, Uncounted, Unlocked, ending, racing
from spans import Spans
from statement_plans import buffers
from workers import Eyes, until, wait_until, work, workers

import pgqueue
from pgqueue import Job, Limit, Lock
from pgqueue.admin import actions
from pgqueue.admin import queues as queue_switch
from pgqueue.admin.limits import LimitInfo, Setting, Undeclared, change, limits, undeclared
from pgqueue.admin.locks import locks, release
from pgqueue.client.tasks import task
from pgqueue.database.sessions import Link
from pgqueue.database.statements import text
from pgqueue.errors import InvalidOption, LimitNotFound
from pgqueue.jobs.retry import RetryPolicy
from pgqueue.worker.concurrency.sweep import Sweep
from pgqueue.worker.concurrency.waiter_cursors import BUSY_TAKEN, FRONT
from pgqueue.worker.liveness.rescue import Rescue
from pgqueue.worker.worker import Worker

Desks = Callable[..., Desk]


@pytest.fixture
async def desks(dsn: str) -> AsyncIterator[Desks]:
    """Makes desks; closed at the end."""
    made: list[Desk] = []

    def make(*queues: str, **options: Any) -> Desk:
        made.append(Desk(dsn, queues or ("default",), **options))
        return made[-1]

    yield make
    for desk in made:
        await desk.close()


def limited(eyes: Eyes, number: int, **columns: Any) -> list[int]:
    """So many jobs under the limit `k`; their ids."""
    columns = {"task": "x", "limit_key": "k"} | columns
    places = ", ".join(["%s"] * len(columns))
    insert = f"INSERT INTO pgqueue.job ({', '.join(columns)}) VALUES ({places}) RETURNING id"  # noqa: S608
    return [eyes.one(insert, *columns.values()) for _ in range(number)]


def holders(eyes: Eyes) -> list[tuple[int, str]]:
    return eyes.all("SELECT id, state FROM pgqueue.job WHERE holds ORDER BY id")


def parked(eyes: Eyes) -> list[tuple[int, str, bool]]:
    return eyes.all("SELECT id, key, holds FROM pgqueue.job_blocked ORDER BY id")


# One step after another ----------------------------------------------------------------------------------------------


@pytest.mark.promise("L08")
async def test_as_many_as_the_limit_run_and_the_next_come_by_arrival(desks: Desks, eyes: Eyes) -> None:
    eyes.do(ALLOW, 2)
    ids = limited(eyes, 5)
    desk = desks()
    assert await desk.park() == []
    assert parked(eyes) == [(id, "limit:k", False) for id in ids]
    first = await desk.let_in()
    assert [(job.id, job.limit_key, job.lock_key, job.attempt) for job in first] == [
        (id, "k", None, 1) for id in ids[:2]
    ]
    assert holders(eyes) == [(id, "running") for id in ids[:2]]
    await desk.complete(first[1])
    [third] = await desk.let_in()
    assert third.id == ids[2]
    await desk.complete(first[0], third)
    assert [job.id for job in await desk.let_in()] == ids[3:]


async def test_urgent_jobs_come_first_among_those_that_wait(desks: Desks, eyes: Eyes) -> None:
    eyes.do(ALLOW, 1)
    slow = limited(eyes, 2)
    [urgent] = limited(eyes, 1, priority=0, rank=1)
    desk = desks()
    order = []
    jobs = await desk.park() + await desk.let_in()
    while jobs:
        order += [job.id for job in jobs]
        await desk.complete(*jobs)
        jobs = await desk.let_in()
    assert order == [urgent, *slow]


async def test_a_limit_that_nobody_has_declared_lets_nobody_in_until_somebody_does(desks: Desks, eyes: Eyes) -> None:
    ids = limited(eyes, 2)
    desk = desks()
    assert await desk.take() == []
    assert await desk.sweep() == []
    eyes.do(ALLOW, 5)
    assert await desk.sweep() == ids


async def test_without_slots_here_only_so_many_are_granted_as_others_can_take(desks: Desks, eyes: Eyes) -> None:
    """Else an urgent job would find the whole limit in the hands of those that wait for a slot."""
    eyes.do(ALLOW, 100)
    ids = limited(eyes, 30)
    full, other = desks(), desks()
    eyes.do("UPDATE pgqueue.worker SET concurrency = 0")
    full.slots = 2
    assert await full.take() == ids[:2]
    full.slots = 0
    assert await full.sweep() == []
    assert [state for _, state in holders(eyes)] == ["running", "running", "available"]
    assert await full.sweep() == [], "one that nobody has taken is enough"
    assert eyes.states() == {"running": 2, "available": 1, "blocked": 27}
    beat = "UPDATE pgqueue.worker SET concurrency = 5, running = '{7}', state = 'running' WHERE id = %s"
    eyes.do(beat, other.worker_id)
    assert await full.sweep() == []
    assert eyes.states()["available"] == 4
    [urgent] = limited(eyes, 1, priority=0, rank=1)
    other.slots = 1
    taken = await other.park(3)
    assert [job.id for job in taken] == ids[2:4]
    assert [job.id for job in await other.let_in()] == [urgent]


@pytest.mark.promise("F13")
async def test_those_who_have_no_slot_hold_up_nobody_of_another_queue(desks: Desks, eyes: Eyes) -> None:
    eyes.do(ALLOW, 5)
    full, free = desks("a"), desks("b")
    eyes.do("UPDATE pgqueue.worker SET concurrency = 0 WHERE id = %s", full.worker_id)
    limited(eyes, 20, queue="a")
    b1, b2 = limited(eyes, 2, queue="b")
    full.slots = 0
    assert await full.take() == []
    assert eyes.states() == {"available": 3, "blocked": 19}, "one of queue a is granted, and waits for its slot"
    assert await free.take() == [b1, b2]


@pytest.mark.promise("F13")
async def test_who_has_no_slot_stays_behind_where_the_line_begins_to_be_read(desks: Desks, eyes: Eyes) -> None:
    """However many of another queue pass it: nobody loses sight of it."""
    eyes.do(ALLOW, 2)
    full, free = desks("a"), desks("b")
    eyes.do("UPDATE pgqueue.worker SET concurrency = 0 WHERE id = %s", full.worker_id)
    granted, waits = limited(eyes, 2, queue="a")
    ids = limited(eyes, BUSY_TAKEN + 20, queue="b")
    full.slots = 0
    assert await full.take() == []
    assert holders(eyes) == [(granted, "available")]
    came = await free.take()
    while jobs := list(free.jobs):
        await free.complete(*jobs)
        came += [job.id for job in await free.let_in()]
    assert came == ids
    place = free.admit.waiter_cursors.position("limit:k")
    assert FRONT < place < (11, waits)


@pytest.mark.promise("F13")
@pytest.mark.parametrize(
    ("most", "free", "granted"),
    [(1, [0, 4], False), (2, [0, 4], False), (1, [1, 0], True), (1, [], True)],
    ids=["full", "full, of two", "free", "one that has not said so yet"],
)
async def test_slots_of_another_queue_of_that_worker_are_no_reason_to_grant(
    most: int, free: list[int], granted: bool, desks: Desks, eyes: Eyes
) -> None:
    """Queue a has one slot of its own in a worker whose four others are free. What is behind it can run here."""
    eyes.do(ALLOW, most)
    elsewhere, here = desks("a"), desks("b")
    beat = "UPDATE pgqueue.worker SET queues = '{a,c}', concurrency = 5, running = '{7}', state = 'running'"
    eyes.do(f"{beat}, free = %s WHERE id = %s", free, elsewhere.worker_id)
    limited(eyes, 1, queue="a")
    ids = limited(eyes, 2, queue="b")
    assert await elsewhere.park() == await here.park() == []
    came = await here.let_in()
    assert [job.id for job in came] == ([] if granted else ids[:most])
    assert len(holders(eyes)) == most


FULL, ONE, TWO = (0, None), (1, None), (2, None)
"""What a heartbeat says of a queue: how many slots are free, and how many it has of its own, if not the common ones."""
SHARED = {
    "full common slots": ([{"a": FULL, "b": FULL}], "abab", "a..."),
    "one common slot": ([{"a": ONE, "b": ONE}], "abab", "a..."),
    "two common slots": ([{"a": TWO, "b": TWO}], "aabb", "aa.."),
    "as many workers": ([{"a": ONE, "b": ONE}] * 2, "abab", "ab.."),
    "slots of their own": ([{"a": (1, 1), "b": (1, 1), "c": FULL}], "abab", "ab.."),
    "full slots of their own": ([{"a": (0, 1), "b": (0, 1)}], "abab", "ab.."),
    "common and own": ([{"a": ONE, "b": (1, 1), "c": ONE}], "aabbcc", "a.b..."),
    "one of two queues of another worker, too": ([{"a": ONE, "b": ONE}, {"b": FULL}], "abab", "a..."),
    "the free one for one of them": ([{"a": FULL, "b": FULL}, {"b": ONE}], "abab", "ab.."),
    "both free": ([{"a": ONE, "b": ONE}, {"b": ONE}], "aabb", "a.b."),
    "others for each of them": ([{"a": FULL, "b": FULL}, {"a": FULL}, {"b": FULL}], "abab", "ab.."),
}
"""Other workers with what each says of its queues, the queues of the waiting jobs, and which are granted."""


@pytest.mark.promise("F241")
@pytest.mark.parametrize(("others", "waiting", "granted"), SHARED.values(), ids=SHARED)
async def test_a_slot_that_queues_share_is_granted_once(
    others: list[dict[str, tuple[int, int | None]]], waiting: str, granted: str, desks: Desks, eyes: Eyes
) -> None:
    """Again and again, while no job is taken: the rest of the limit is for workers with free slots."""
    eyes.do(ALLOW, 10)
    parks, asks = desks("a", "b", "c"), desks("z")
    ids = [limited(eyes, 1, queue=queue)[0] for queue in waiting]
    await parks.park()
    eyes.do("UPDATE pgqueue.worker SET state = 'quiet' WHERE id = %s", parks.worker_id)
    beat = "UPDATE pgqueue.worker SET state = 'running', queues = %s, free = %s, slots = %s WHERE id = %s"
    for each in others:
        free, slots = zip(*each.values(), strict=True)
        eyes.do(beat, list(each), list(free), list(slots), desks(*each).worker_id)
    for _ in range(3):
        await asks.sweep()
        inside = {id for id, _ in holders(eyes)}
        assert "".join(queue if id in inside else "." for id, queue in zip(ids, waiting, strict=True)) == granted


@pytest.mark.promise("F241")
async def test_common_slots_that_are_full_take_no_place_from_a_worker_that_is_idle(dsn: str, eyes: Eyes) -> None:
    gate = asyncio.Event()

    @task(name="limits.long", limit=Limit(4, name="k"))
    async def long() -> None:
        await gate.wait()

    @task(name="limits.plain")
    async def plain() -> None:
        await gate.wait()

    async with work(dsn, long, plain, queues=["a", "b", "c", "d"], lease=1.0, concurrency=4) as full:
        await until(lambda: full.services.declared_limits.declared)
        change(eyes.conn, "k", 0)
        for queue in "abcd":
            long.using(queue=queue).enqueue(eyes.conn)
        await until(lambda: eyes.states() == {"blocked": 4})
        plain.using(queue="a").enqueue_many(eyes.conn, [()] * 4)
        async with work(dsn, long, queues=["z"], lease=1.0):
            await until(lambda: [0] * 4 in [free for (free,) in eyes.all("SELECT free FROM pgqueue.worker")])
            change(eyes.conn, "k", 4)
            await until(lambda: holders(eyes))
            last = [long.using(queue="z").enqueue(eyes.conn).id for _ in range(3)]
            await until(lambda: {(job, "running") for job in last} <= set(holders(eyes)), 10)
            assert eyes.states() == {"running": 7, "available": 1, "blocked": 3}
            gate.set()
            await until(eyes.done(11))


@pytest.mark.promise("F13")
async def test_a_heartbeat_says_how_many_slots_each_queue_has_left(dsn: str, eyes: Eyes) -> None:
    gate = asyncio.Event()

    @task(name="limits.holds")
    async def holds() -> None:
        await gate.wait()

    async with work(dsn, holds, queues=["b", "a:2", "c"], concurrency=3, lease=1.0):
        await until(lambda: eyes.one("SELECT free FROM pgqueue.worker") == [3, 2, 3])
        holds.using(queue="a").enqueue_many(eyes.conn, [()] * 3)
        await until(lambda: eyes.one("SELECT free FROM pgqueue.worker") == [3, 0, 3])
        holds.using(queue="c").enqueue(eyes.conn)
        await until(lambda: eyes.one("SELECT free FROM pgqueue.worker") == [2, 0, 2])
        gate.set()
        await until(lambda: eyes.one("SELECT free FROM pgqueue.worker") == [3, 2, 3])


async def test_the_last_place_goes_to_one_who_can_go(desks: Desks, eyes: Eyes) -> None:
    eyes.do(ALLOW, 1)
    full, free = desks("a"), desks("b")
    eyes.do("UPDATE pgqueue.worker SET concurrency = 0 WHERE id = %s", full.worker_id)
    limited(eyes, 1, queue="a")
    [can] = limited(eyes, 1, queue="b")
    full.slots = 0
    await full.park()
    assert await free.take() == [can]


async def test_suspects_hold_up_none_that_are_not(desks: Desks, eyes: Eyes) -> None:
    eyes.do(ALLOW, 5)
    suspects = limited(eyes, 10, crashes=1, rank=-2)
    ids = limited(eyes, 3)
    desk = desks()
    desk.slots = 3
    assert set(await desk.take()) >= set(ids)
    assert [id for id, state in holders(eyes) if state == "available"] == suspects[:1]


@pytest.mark.promise("F13")
async def test_a_suspect_comes_before_a_backlog(desks: Desks, eyes: Eyes) -> None:
    """However many of those there are who could run here at once."""
    eyes.do(ALLOW, 1)
    ids = limited(eyes, 20)
    desk = desks()
    desk.slots = 1
    await desk.park(20)
    [suspect] = limited(eyes, 1, crashes=1, rank=-2)
    order = []
    for _ in range(5):
        jobs = await desk.park(1)
        desk.slots -= len(jobs)
        jobs += await desk.let_in()
        order += [job.id for job in jobs]
        await desk.complete(*jobs)
        desk.slots = 1
    assert suspect in order[:3] and [id for id in order if id != suspect] == ids[: len(order) - 1]


@pytest.mark.promise("L08")
@pytest.mark.parametrize(
    ("room", "slots", "waiting", "came"),
    [
        # Nobody goes on to a rate past one who waits for a slot.
        (1, 0, "aB", "a."),
        (2, 1, "aaB", "a.."),
        (3, 1, "aaa", "a.."),
        (2, 1, "BBa", "BB."),
        (3, 1, "BBa", "BBa"),
        (3, 1, "BBBa", "BBB."),
        (3, 2, "BBa", "BBa"),
        (2, 2, "BaB", "Ba."),
        # Who goes on to a rate takes no turn of those behind it in its queue.
        (2, 0, "Aab", "Aa."),
        (4, 0, "AAabab", "AAa..."),
        (3, 1, "Aab", "Aa."),
        (3, 2, "Aaab", "Aaa."),
        (9, 2, "aaAbB", "aaAbB"),
        (9, 0, "aaAb", "a..."),
        (2, 0, "Abab", "Ab.."),
    ],
)
async def test_a_rate_that_comes_next_changes_nothing_in_the_order(
    desks: Desks, eyes: Eyes, room: int, slots: int, waiting: str, came: str
) -> None:
    """Two queues of one worker, `a` and `b`; capitals need a rate, too; a dot waits on."""
    eyes.do(ALLOW, room)
    rates = [("x" if kind.isupper() else None) for kind in waiting]
    ids = [limited(eyes, 1, queue=kind.lower(), rate_key=rate)[0] for kind, rate in zip(waiting, rates, strict=True)]
    desk = desks("a", "b")
    eyes.do("UPDATE pgqueue.worker SET concurrency = 0")
    desk.slots = slots
    await desk.park()
    await desk.let_in()
    inside = {id for id, _ in holders(eyes)}
    assert "".join(kind if id in inside else "." for id, kind in zip(ids, waiting, strict=True)) == came


@pytest.mark.promise("F13")
@pytest.mark.parametrize("names", [("1", "2"), ("a", "b")])
async def test_a_job_of_another_worker_holds_up_nobody_here_whatever_its_queue_is_called(
    desks: Desks, eyes: Eyes, names: tuple[str, str]
) -> None:
    """Pools have numbers, queues may."""
    eyes.do(ALLOW, 5)
    granted, *waits = limited(eyes, 3, queue=names[0])
    [second] = limited(eyes, 1, queue=names[1])
    other, desk = desks(names[0]), desks(names[1])
    eyes.do("UPDATE pgqueue.worker SET concurrency = 0")
    other.slots = 0
    await other.take()
    assert holders(eyes) == [(granted, "available")]
    assert parked(eyes) == [(id, "limit:k", False) for id in waits]
    assert await desk.take() == [second]


@pytest.mark.promise("F13")
async def test_a_suspect_that_is_granted_and_may_not_run_yet_holds_up_nobody_of_its_queue(
    desks: Desks, eyes: Eyes
) -> None:
    """Who runs another one takes none, and may have a slot."""
    eyes.do(ALLOW, 5)
    [suspect] = limited(eyes, 1, crashes=1, rank=-2)
    worker, sweeper = desks(), desks("other")
    eyes.do("UPDATE pgqueue.worker SET concurrency = 0")
    worker.slots = 0
    await worker.take()
    assert holders(eyes) == [(suspect, "available")]
    plain, rated = (limited(eyes, 1, rate_key=rate)[0] for rate in (None, "x"))
    worker.hands.poison_ranks = lambda: ()
    await worker.park()
    eyes.do("UPDATE pgqueue.worker SET state = 'running', concurrency = 1 WHERE id = %s", worker.worker_id)
    await sweeper.sweep()
    assert holders(eyes) == [(suspect, "available"), (plain, "available"), (rated, "blocked")]


@pytest.mark.promise("L08")
async def test_what_others_have_slots_for_is_granted_beside_what_runs_here(desks: Desks, eyes: Eyes) -> None:
    eyes.do(ALLOW, 5)
    ids = limited(eyes, 5)
    desk, other = desks(), desks()
    eyes.do("UPDATE pgqueue.worker SET state = 'running', concurrency = 2 WHERE id = %s", other.worker_id)
    desk.slots = 2
    await desk.take()
    assert [state for _, state in holders(eyes)] == ["running", "running", "available", "available"]
    assert [id for id, _ in holders(eyes)] == ids[:4]


@pytest.mark.promise("F13")
async def test_who_has_no_slot_and_may_not_be_granted_yet_holds_up_nobody_who_goes_on(desks: Desks, eyes: Eyes) -> None:
    """Another worker may have a slot for that one soon."""
    eyes.do(ALLOW, 5)
    first, _ = limited(eyes, 2, queue="plain")
    [rated] = limited(eyes, 1, queue="rated", rate_key="x")
    [other] = limited(eyes, 1, queue="more")
    desk, elsewhere = desks("plain", "rated"), desks("more")
    eyes.do("UPDATE pgqueue.worker SET concurrency = 0")
    desk.slots = 0
    await desk.park(), await elsewhere.park()
    await desk.let_in()
    assert [id for id, _ in holders(eyes)] == [first, rated, other]


@pytest.mark.promise("F13")
async def test_who_goes_on_to_a_rate_is_not_held_up_by_the_backlog_of_another_worker(desks: Desks, eyes: Eyes) -> None:
    eyes.do(ALLOW, 1)
    [rated] = limited(eyes, 1, queue="rated", rate_key="x")
    limited(eyes, 3, queue="plain")
    desk, other = desks("plain"), desks("rated")
    eyes.do("UPDATE pgqueue.worker SET concurrency = 0")
    desk.slots = 1
    await other.park()
    await desk.park()
    await desk.let_in()
    assert [id for id, _ in holders(eyes)] == [rated]


def test_locks_that_are_wanted_all_the_time_do_not_keep_a_limit_waiting(desks: Desks, dsn: str) -> None:
    admit = Desk(dsn).admit
    admit.blocked({"lock:a": (), "limit:k": ()})
    asked = []
    for _ in range(3):
        asked.append([*admit._some_wanted()])
        admit.blocked({"lock:a": ()})
    assert asked == [["lock:a"], ["limit:k"], ["lock:a"]]


async def test_what_a_fetch_had_asked_for_and_not_got_is_not_left_idle(desks: Desks, eyes: Eyes) -> None:
    eyes.do(ALLOW, 10)
    ids = limited(eyes, 10)
    desk = desks()
    assert await desk.park(10) == []
    desk.asked, desk.slots = 9, 1
    assert [job.id for job in await desk.let_in()] == ids[:1]
    desk.asked, desk.slots = 0, 9
    assert await desk.let_in() == []
    desk.admit.fetched()
    assert {job.id for job in await desk.let_in()} | {id for id, _ in holders(eyes)} == set(ids)


async def test_a_job_that_was_granted_and_is_taken_makes_room_for_another_grant(desks: Desks, eyes: Eyes) -> None:
    eyes.do(ALLOW, 10)
    first, second, *_ = limited(eyes, 10)
    desk = desks()
    eyes.do("UPDATE pgqueue.worker SET concurrency = 0")
    desk.slots = 0
    await desk.take()
    [job] = await desk.park(1)
    assert job.id == first
    desk.admit.granted([job])
    await desk.let_in()
    assert holders(eyes) == [(first, "running"), (second, "available")]


async def test_a_worker_that_declares_nothing_new_waits_for_nobody(desks: Desks, eyes: Eyes, dsn: str) -> None:
    declare = {"names": ["k"], "ns": [5], "notify": True}
    desk = desks()
    await desk.session.run(desk.link.statement("declared_limits_put", **declare))
    with psycopg.connect(dsn) as someone:
        someone.execute("UPDATE pgqueue.key_limit SET n = 7, set_at = now() WHERE name = 'k'")
        async with asyncio.timeout(1.5):
            assert await desk.session.run(desk.link.statement("declared_limits_put", **declare)) == [[(None, None)]]


async def test_limits_that_disagree_are_told_before_anything_is_written(dsn: str, eyes: Eyes) -> None:
    tasks = [task(name=f"x{n}", limit=Limit(n, name="shared"))(lambda: None) for n in (1, 2)]
    with pytest.raises(InvalidOption, match="is 2 here and 1 elsewhere"):
        Worker(tasks=tasks, dsn=dsn)
    assert eyes.one("SELECT count(*) FROM pgqueue.worker") == 0


@pytest.mark.promise("F13")
async def test_a_long_line_of_a_limit_takes_turns_with_other_jobs(
    dsn: str, eyes: Eyes, conn: psycopg.Connection
) -> None:
    """The worker is full: each slot that is free is wanted by both, and the line is quicker."""
    limited_ran: list[int] = []
    plain_ran: list[int] = []

    @task(name="limits.line", limit=10)
    async def line_up() -> None:
        limited_ran.append(1)
        await asyncio.sleep(0.06)

    @task(name="limits.other", priority=0)
    async def other() -> None:
        plain_ran.append(len(limited_ran))
        await asyncio.sleep(0.06)

    line_up.enqueue_many(conn, [()] * 100)
    conn.commit()
    async with work(dsn, line_up, other, concurrency=1):
        await until(lambda: len(limited_ran) > 2)
        other.enqueue_many(conn, [()] * 5)
        conn.commit()
        since = len(limited_ran)
        await until(lambda: len(plain_ran) == 5)
        assert plain_ran[-1] - since < 20


@pytest.mark.promise("F12")
async def test_a_job_gets_its_lock_then_its_limit_and_keeps_the_lock_meanwhile(desks: Desks, eyes: Eyes) -> None:
    eyes.do(ALLOW, 1)
    [a1] = limited(eyes, 1, lock_key="a")
    [a2] = limited(eyes, 1, lock_key="a")
    [b1] = limited(eyes, 1, lock_key="b")
    desk = desks()
    await desk.park()
    assert parked(eyes) == [(a1, "lock:a", False), (a2, "lock:a", False), (b1, "lock:b", False)]
    [job] = await desk.let_in()
    assert job.id == a1
    # b1 has its lock and waits for the limit; a2 waits for its lock and holds nothing.
    assert parked(eyes) == [(a2, "lock:a", False), (b1, "limit:k", True)]
    await desk.complete(job)
    [job] = await desk.let_in()
    assert job.id == a2, "it came before"
    assert parked(eyes) == [(b1, "limit:k", True)]
    await desk.complete(job)
    assert [job.id for job in await desk.let_in()] == [b1]


async def test_who_needs_a_rate_too_goes_on_to_its_line_with_the_limit(desks: Desks, eyes: Eyes) -> None:
    """Such a job holds the limit while it waits for the rate; it is never claimed nor granted, whatever it holds."""
    eyes.do(ALLOW, 2)
    ids = limited(eyes, 3, rate_key="r:1", lock_key="a", lock_limit=9)
    [only_rate] = limited(eyes, 1, limit_key=None, rate_key="r")
    told: list[str] = []
    desk = desks()
    desk.admit._rates_wanted = told.extend
    assert await desk.take() == []
    assert parked(eyes) == [
        (ids[0], "rate:r:1", True), (ids[1], "rate:r:1", True), (ids[2], "limit:k", True), (only_rate, "rate:r", False),
    ]  # fmt: skip
    assert set(told) == {"rate:r", "rate:r:1"}
    told.clear()
    assert await desk.sweep() == []
    assert set(told) == {"rate:r", "rate:r:1"}
    actions.cancel(eyes.conn, ids[0])
    assert await desk.sweep() == []
    assert [key for _, key, _ in parked(eyes)] == ["rate:r:1", "rate:r:1", "rate:r"]
    eyes.do(
        "WITH gone AS (DELETE FROM pgqueue.job_blocked WHERE id = %s RETURNING *) INSERT INTO pgqueue.job_available "
        "(id, task, lock_key, limit_key, rate_key, holds) "
        "SELECT id, task, lock_key, limit_key, rate_key, true FROM gone",
        ids[1],
    )
    assert await desk.park() == []
    assert (ids[1], "rate:r:1", True) in parked(eyes)


async def test_what_moves_with_its_keys_and_what_gives_them_up(desks: Desks, eyes: Eyes) -> None:
    """A job that is interrupted or loses its worker has its limit still. One that is handed back has given it up, and
    is the first to get it; a retry waits for its time."""
    eyes.do(ALLOW, 1)
    limited(eyes, 2)
    desk = desks()
    await desk.park()
    [job] = await desk.let_in()
    stopped = {"outcomes": ["interrupted"], "messages": [None]}
    await desk.session.run(ending(desk.link, "complete_interrupt", [job], desk.worker_id, **stopped))
    assert holders(eyes) == [(job.id, "available")]
    assert await desk.sweep() == []
    [job] = await desk.park()
    await desk.end("complete_release", [job], keeping=True)
    assert holders(eyes) == []
    assert parked(eyes)[0] == (job.id, "limit:k", False)
    before = job.id
    [job] = await desk.let_in()
    assert job.id == before
    assert job.attempt == 1, "none was spent"
    late: dict[str, Any] = {
        "delays": [3600.0], "spents": [True], "snoozeds": [False], "holdings": [False], "outcomes": ["failed"],
        "error_types": ["E"], "messages": ["no"], "tracebacks": [None],
    }  # fmt: skip
    await desk.end("complete_retry", [job], **late)
    [second] = await desk.let_in()
    assert holders(eyes) == [(second.id, "running")]


async def test_rescue_keeps_the_limit_with_the_job(desks: Desks, eyes: Eyes) -> None:
    eyes.do(ALLOW, 1)
    limited(eyes, 2)
    dead, alive = desks(), desks()
    await dead.park()
    [job] = await dead.let_in()
    eyes.do("UPDATE pgqueue.worker SET dead_at = now(), state = 'stopped' WHERE id = %s", dead.worker_id)
    await Rescue(alive.session, notify=True, rescued=lambda: None)._move(dead.worker_id)
    assert holders(eyes) == [(job.id, "available")]
    assert await alive.sweep() == [], "it has the limit, and nobody else"
    [again] = await alive.park()
    assert (again.id, again.attempt) == (job.id, 2 if again.crashes else 1)


@pytest.mark.promise("F22")
@pytest.mark.parametrize("lock", [None, "a"])
async def test_what_was_granted_to_a_paused_queue_gives_way(desks: Desks, eyes: Eyes, lock: str | None) -> None:
    """Of a lock and the limit as well; and who holds a lock while it waits for the limit gives that up."""
    eyes.do(ALLOW, 1)
    [first, second] = limited(eyes, 2, queue="other", lock_key=lock, lock_limit=lock and 2)
    desk, other = desks("default"), desks("other")
    desk.slots = 0
    desk.hands.to_fetch = other.fetcher._capacity.to_fetch
    await other.park()
    other.slots = 0
    await other.let_in()
    assert holders(eyes) == [(first, "available"), *([(second, "blocked")] if lock else [])]
    [mine] = limited(eyes, 1, lock_key=lock)
    queue_switch.pause(eyes.conn, "other")
    await desk.park()
    desk.slots = 1
    for _ in range(2):
        if await desk.sweep():
            break
    assert (mine, "running") in holders(eyes)
    assert [key for id, key, _ in parked(eyes) if id != mine] == [f"lock:{lock}" if lock else "limit:k"] * 2
    assert [id for id, _ in holders(eyes)] == [mine]


@pytest.mark.promise("F22")
async def test_a_head_whose_cancel_rolls_back_is_found_by_the_sweep(desks: Desks, eyes: Eyes, dsn: str) -> None:
    eyes.do(ALLOW, 1)
    _, second = limited(eyes, 2)
    desk = desks()
    await desk.park()
    [job] = await desk.let_in()
    with psycopg.connect(dsn) as conn:
        actions.cancel(conn, second)
        await desk.complete(job)
        assert await desk.let_in() == []
        conn.rollback()
    assert await desk.sweep() == [second]


async def test_releasing_a_lock_by_hand_takes_it_from_who_waits_for_the_limit(desks: Desks, eyes: Eyes) -> None:
    eyes.do(ALLOW, 1)
    limited(eyes, 1)
    waiting, behind = limited(eyes, 2, lock_key="a")
    desk = desks()
    await desk.park()
    await desk.let_in()
    assert parked(eyes) == [(waiting, "limit:k", True), (behind, "lock:a", False)]
    [lock] = locks(eyes.conn)
    assert (lock.key, [(holder.id, holder.state) for holder in lock.holders]) == ("a", [(waiting, "blocked")])
    assert release(eyes.conn, "a").ids == (waiting,)
    assert parked(eyes) == [(waiting, "lock:a", False), (behind, "lock:a", False)]
    await desk.sweep()
    assert parked(eyes) == [(waiting, "limit:k", True), (behind, "lock:a", False)]


# Set at run time ------------------------------------------------------------------------------------------------------


@pytest.mark.promise("F22")
async def test_a_raised_limit_lets_more_in_and_a_lowered_one_nobody_until_below(desks: Desks, eyes: Eyes) -> None:
    eyes.do(ALLOW, 2)
    ids = limited(eyes, 8)
    desk = desks()
    await desk.park()
    running = await desk.let_in()
    assert change(eyes.conn, "k", 4) == Setting("k", 4, None, True)
    assert await desk.sweep() == ids[2:4]
    running += desk.jobs
    change(eyes.conn, "k", 2)
    await desk.complete(running.pop(), running.pop())
    assert await desk.let_in() == []
    await desk.complete(running.pop())
    assert [job.id for job in await desk.let_in()] == [ids[4]]
    change(eyes.conn, "k", 0)
    await desk.complete(*running, *desk.jobs)
    assert await desk.let_in() == [] and await desk.sweep() == []
    change(eyes.conn, "k", 10)
    assert await desk.sweep() == ids[5:]


@pytest.mark.promise("F22")
async def test_a_raised_limit_is_heard_of_at_once(dsn: str, eyes: Eyes, conn: psycopg.Connection) -> None:
    gate = asyncio.Event()

    @task(name="limits.heard", limit=1)
    async def heard() -> None:
        await gate.wait()

    async with work(dsn, heard, concurrency=3) as worker:
        heard.enqueue_many(conn, [()] * 3)
        conn.commit()
        await until(lambda: eyes.states() == {"running": 1, "blocked": 2}, 30)
        worker.services.sweep._last = monotonic() + 60  # not by its turn
        assert change(conn, "limits.heard", 2) == Setting("limits.heard", 2, 1, True)
        conn.commit()
        await until(lambda: eyes.states() == {"running": 2, "blocked": 1}, 5)
        assert change(conn, "limits.heard", None) == Setting("limits.heard", 1, 1, False)
        conn.commit()
        gate.set()
        await until(eyes.done(3), 30)


async def test_what_was_set_by_hand_stays_and_the_code_decides_again_when_told(dsn: str, eyes: Eyes) -> None:
    @task(name="limits.three", limit=Limit(3, "shared"))
    async def three() -> None: ...

    @task(name="limits.five", limit=Limit(5, "shared"))
    async def five() -> None: ...

    def shared() -> Any:
        return eyes.all("SELECT n, declared, set_at IS NOT NULL FROM pgqueue.key_limit WHERE name = 'shared'")

    async def started(*tasks: Any) -> None:
        async with work(dsn, *tasks) as worker:
            await until(lambda: worker.services.declared_limits.declared, 30)

    await started(three)
    assert shared() == [(3, 3, False)]
    await started(five)
    assert shared() == [(5, 5, False)]
    change(eyes.conn, "shared", 7)
    await started(three)
    assert shared() == [(7, 3, True)]
    change(eyes.conn, "shared", None)
    assert shared() == [(3, 3, False)]
    with pytest.raises(InvalidOption, match="'shared' is 3 here and 5 elsewhere"):
        await started(three, five)


async def test_the_worker_says_which_limits_have_no_timeout(dsn: str, caplog: pytest.LogCaptureFixture) -> None:
    @task(name="limits.endless", limit=3)
    def endless() -> None: ...

    @task(name="limits.bounded", limit=3, timeout=5, on_lost_lease="keep")
    def bounded() -> None: ...

    assert (endless.on_lost_lease, bounded.on_lost_lease) == ("cancel", "keep")
    async with work(dsn, endless, bounded):
        said = [record.getMessage() for record in caplog.records if "without a timeout" in record.getMessage()]
    assert len(said) == 1 and "limits.endless" in said[0] and "bounded" not in said[0]


async def test_a_worker_that_only_prepares_declares_nothing(dsn: str, eyes: Eyes) -> None:
    @task(name="limits.prepared", limit=3)
    async def prepared() -> None: ...

    worker = Worker(dsn=dsn, tasks=[prepared])
    await worker.prepare()
    assert eyes.all("SELECT FROM pgqueue.key_limit") == []
    worker.begin()
    await until(lambda: eyes.all("SELECT n FROM pgqueue.key_limit") == [(3,)], 30)
    await worker.stop(1.0)


# Many at once ---------------------------------------------------------------------------------------------------------


@pytest.mark.second
@pytest.mark.promise("L08", "F12")
@pytest.mark.parametrize(("limit", "jobs"), [(1, 80), (3, 150), (10, 150)])
async def test_many_claimers_never_exceed_a_limit(dsn: str, eyes: Eyes, limit: int, jobs: int) -> None:
    """The naive versions below exceed a limit of one within 25 jobs."""
    eyes.do(ALLOW, limit)
    eyes.do(LIMITED, jobs)
    assert (await racing(dsn, 12, jobs, {"limit:k": limit})).most["limit:k"] <= limit
    assert eyes.states() == {"completed": jobs}


@pytest.mark.second
@pytest.mark.promise("F12")
async def test_nor_a_lock_and_a_limit_of_the_same_jobs(dsn: str, eyes: Eyes) -> None:
    eyes.do(ALLOW, 3)
    eyes.do(BOTH, 150)
    most = {"limit:k": 3} | {f"lock:k{n}": 1 for n in range(5)}
    ran = await racing(dsn, 8, 150, most)
    assert ran.most <= type(ran.most)(most)
    assert eyes.states() == {"completed": 150}


@pytest.mark.promise("F12")
@pytest.mark.parametrize("naive", [Unlocked, OneStatement, Uncounted])
async def test_the_naive_versions_exceed_it(dsn: str, eyes: Eyes, naive: type[Link]) -> None:
    """Without the lock, or counting in the statement that takes it, or not counting: what the test above would see."""
    eyes.do(ALLOW, 1)
    eyes.do(LIMITED, 400)
    assert (await racing(dsn, 12, 400, {"limit:k": 1}, naive)).most["limit:k"] > 1


SPANS = """
@pgqueue.task(name="span", limit={limit}, lock=pgqueue.Lock("{{lock}}", limit={limit}))
async def span(key: str, seconds: float, lock: str | None = None) -> None:
    began = time.monotonic()
    await asyncio.sleep(seconds)
    say("ran", key=key, began=began)
"""


@pytest.mark.second
@pytest.mark.promise("L08", "F12")
@pytest.mark.parametrize(("limit", "lock"), [(1, None), (3, None), (10, None), (3, "k")])
def test_over_four_processes_as_many_as_the_limit_and_never_one_more(
    tmp_path: Path, dsn: str, eyes: Eyes, limit: int, lock: str | None
) -> None:
    number = 40 * limit
    # The first of the line run long enough to be at it together, on however busy a machine.
    eyes.do(
        "INSERT INTO pgqueue.job (task, args, limit_key, lock_key, lock_limit) "
        "SELECT 'span', jsonb_build_object('key', 'k', 'seconds', CASE WHEN n <= %s THEN 2.5 ELSE 0.02 END), 'span', "
        "%s::text || n %% 5, CASE WHEN %s::text IS NULL THEN NULL ELSE 1 END FROM generate_series(1, %s) n ORDER BY n",
        limit,
        lock,
        lock,
        number,
    )
    with workers(tmp_path, dsn, SPANS.format(limit=limit)) as processes:
        four = processes.ready(4, concurrency=5)
        wait_until(eyes.done(number), 90)
        wait_until(lambda: len(Spans.told(four).all) >= number)  # a pipe may be slower than the database
        spans = Spans.told(four)
    assert len(spans.all) == number
    assert spans.most() == {"k": limit}


@pytest.mark.promise("F13", "L18")
async def test_a_busy_limit_does_not_starve_free_jobs(dsn: str, eyes: Eyes, conn: psycopg.Connection) -> None:
    """5,000 limited ones ahead of 100 free ones: these have ended while the first of those runs."""
    gate = asyncio.Event()

    @task(name="limits.busy", limit=1)
    async def busy() -> None:
        await gate.wait()

    @task(name="limits.free")
    async def free() -> None: ...

    busy.enqueue_many(conn, [()] * 5_000)
    free.enqueue_many(conn, [()] * 100)
    conn.commit()
    async with work(dsn, busy, free, concurrency=5):
        await until(eyes.done(100), 30)
        gate.set()
        assert eyes.one("SELECT count(*) FROM pgqueue.job_done WHERE task = 'limits.busy'") == 0


@pytest.mark.second
@pytest.mark.promise("F14")
@pytest.mark.parametrize("swept", [False, True], ids=["", "a sweep finds them served by nobody"])
async def test_waiting_for_a_limit_and_a_shutdown_spend_no_attempt(
    dsn: str, eyes: Eyes, conn: psycopg.Connection, monkeypatch: pytest.MonkeyPatch, swept: bool
) -> None:
    """Stopped after they had begun, they have the limit still. Where the sweep comes then, before another worker does,
    they are put in line, before all who have not had it. A worker that leaves right after its start sweeps just then,
    at times."""
    gate, began = asyncio.Event(), set[int]()
    write_ends = Worker._write_ends

    @task(name="limits.waits", limit=2, retry=RetryPolicy(attempts=1))
    async def waits(job: Job) -> None:
        began.add(job.id)
        await gate.wait()

    async def not_now(self: Sweep, seconds: float = 0.0) -> bool:
        return True

    async def then_sweep(self: Worker) -> None:
        await write_ends(self)
        served = "SELECT FROM pgqueue.worker WHERE state <> 'quiet'"
        await until(lambda: "running" not in eyes.states() and not eyes.all(served), 10)
        assert await self.services.sweep.sweep()

    jobs = waits.enqueue_many(conn, [()] * 6)
    conn.commit()
    with monkeypatch.context() as patched:
        if swept:
            patched.setattr(Worker, "_write_ends", then_sweep)
        else:
            patched.setattr(Sweep, "sweep", not_now)
        for _ in range(2):
            async with work(dsn, waits, concurrency=4):
                await until(lambda: len(began) == 2 and eyes.states() == {"running": 2, "blocked": 4}, 30)
            began.clear()
            first = [job.id for job in jobs[:2]]
            assert [id for id, _ in holders(eyes)] == ([] if swept else first)
            assert eyes.states() == ({"blocked": 6} if swept else {"available": 2, "blocked": 4})
            by_place = eyes.all("SELECT id FROM pgqueue.job ORDER BY rank, id")
            assert [id for (id,) in by_place] == [job.id for job in jobs], "those that ran come before all others"
    gate.set()
    async with work(dsn, waits, concurrency=4):
        await until(eyes.done(6), 30)
    assert eyes.all("SELECT DISTINCT attempt, snoozes, crashes FROM pgqueue.job_done") == [(1, 0, 0)]


async def test_a_transactional_task_gives_its_limit_up_with_its_own_commit(
    dsn: str, eyes: Eyes, conn: psycopg.Connection
) -> None:
    eyes.do("CREATE TABLE ran (id bigint)")
    together = most = 0

    @task(name="limits.transactional", limit=2, transactional=True)
    async def transactional(job: Job) -> None:
        nonlocal together, most
        together += 1
        most = max(most, together)
        await (await job.aconnection()).execute("INSERT INTO ran VALUES (%s)", [job.id])
        together -= 1

    transactional.enqueue_many(conn, [()] * 30)
    conn.commit()
    async with work(dsn, transactional, concurrency=6):
        await until(eyes.done(30), 60)
    assert most <= 2
    assert eyes.one("SELECT count(DISTINCT id) FROM ran") == 30


# What it costs --------------------------------------------------------------------------------------------------------


@pytest.mark.promise("F07")
async def test_an_admit_costs_the_same_however_many_wait(desks: Desks, eyes: Eyes, conn: psycopg.Connection) -> None:
    """Also however many hold a lock and wait for the limit: those do not have it yet."""
    eyes.do(ALLOW, 3)
    desk = desks()
    params = {
        "keys": ["limit:k"], "afters": [0], "ranks": [-32768], "ids": [0], "queues": ["default"],
        "pools": [1], "slots": [1], "worker_id": desk.worker_id, "claim": 1, "notify": False, "tasks": ["x"],
    }  # fmt: skip
    blocked = (
        "INSERT INTO pgqueue.job_blocked (state, task, key, limit_key, lock_key, holds) "
        "SELECT 'blocked', 'x', 'limit:k', 'k', 'l' || n, true FROM generate_series(1, %s) n"
    )
    costs: dict[str, list[int]] = {}
    for number in (100, 20_000):
        eyes.do(blocked, number)
        eyes.do("ANALYZE")
        for name in ("unblock_limits", "sweep_keys", "sweep_stuck"):
            given = params if name == "unblock_limits" else {"after": "", "n": 1000, "passed": []}
            cost, plan = buffers(conn, text(name, "pgqueue"), given)
            costs.setdefault(name, []).append(cost)
            kinds = {node["Node Type"] for node in plan if node.get("Relation Name") == "job_blocked"}
            assert kinds <= {"Index Scan", "Index Only Scan", "Tid Scan", "ModifyTable"}, (name, kinds)
    for name, (few, many) in costs.items():
        assert many <= 2 * few + 20, (name, few, many)


@pytest.mark.promise("F07")
async def test_a_claim_costs_the_same_however_many_wait_for_a_limit(desks: Desks, eyes: Eyes) -> None:
    eyes.do(ALLOW, 1)
    desk = desks()
    costs = []
    for number in (100, 20_000):
        eyes.do(
            "INSERT INTO pgqueue.job_blocked (state, task, key, limit_key) "
            "SELECT 'blocked', 'x', 'limit:k', 'k' FROM generate_series(1, %s)",
            number,
        )
        eyes.do("INSERT INTO pgqueue.job_available (task) SELECT 'x' FROM generate_series(1, 10)")
        asked = desk.fetcher._asked(desk.fetcher._capacity.to_fetch()[0], desk.fetcher.kinds.plain)
        claim = {
            "queues": [queue for queue, _, _ in asked.lanes], "ranks": [rank for _, rank, _ in asked.lanes],
            "afters": [0] * len(asked.lanes), "uptos": [2**63 - 1] * len(asked.lanes),
            "mosts": [10] * len(asked.lanes), "worker_id": desk.worker_id, "claim": 1,
            "n": 10, "tasks": ["x"],
        }  # fmt: skip
        with eyes.conn.transaction(force_rollback=True):
            for setting in ("enable_seqscan", "enable_bitmapscan"):
                eyes.do(f"SET LOCAL {setting} = off")
            sql = "EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) " + text("fetch_claim", "pgqueue")
            [(found,)] = eyes.conn.execute(sql.encode(), claim).fetchall()
            plan = found[0]["Plan"]
            costs.append(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])
        eyes.do("DELETE FROM pgqueue.job_available")
    assert costs[1] <= 2 * costs[0], costs


# People ---------------------------------------------------------------------------------------------------------------


def test_people_see_limits_and_set_them(dsn: str, eyes: Eyes) -> None:
    assert command("limits", "--dsn", dsn).stdout == "There is no limit and no rate.\n"
    eyes.do("INSERT INTO pgqueue.key_limit (name, n, declared, declared_at) VALUES ('warehouse', 5, 5, now())")
    eyes.do(
        "INSERT INTO pgqueue.job_running (state, task, worker_id, claim, started_at, limit_key, holds) "
        "VALUES ('running', 'x', 1, 1, now(), 'warehouse', true)"
    )
    eyes.do("INSERT INTO pgqueue.job_available (task, limit_key, holds) VALUES ('x', 'warehouse', true)")
    eyes.do(
        "INSERT INTO pgqueue.job_blocked (state, task, key, limit_key) VALUES "
        "('blocked', 'x', 'limit:warehouse', 'warehouse'), ('blocked', 'x', 'limit:later', 'later')"
    )
    later, warehouse = limits(eyes.conn)
    assert later.waited is not None and warehouse.waited is not None
    assert later == LimitInfo("later", None, None, False, 0, 0, 1, later.waited, undeclared=True)
    assert warehouse == LimitInfo("warehouse", 5, 5, False, 1, 1, 1, warehouse.waited)
    assert [each["name"] for each in items(command("limits", "--json", "--dsn", dsn))] == [
        "later", "warehouse",
    ]  # fmt: skip
    done = command("limits", "set", "warehouse", "20", "--dsn", dsn)
    assert (done.returncode, done.stdout) == (0, "warehouse: 20 at once (set by hand; the code says 5)\n")
    assert command("limits", "set", "later", "0", "--dsn", dsn).stdout == "later: 0 at once (set by hand)\n"
    shown = command("limits", "--dsn", dsn).stdout.splitlines()
    assert [line.split()[:6] for line in shown] == [
        ["LIMIT", "AT", "ONCE", "RUNNING", "HELD", "WAITING"],
        ["later", "0", "(by", "hand)", "0", "0"],
        ["warehouse", "20", "(code:", "5)", "1", "1"],
    ]
    assert max(map(len, shown)) <= 80
    told = items(command("limits", "set", "warehouse", "default", "--json", "--dsn", dsn))
    assert told == [{"name": "warehouse", "n": 5, "declared": 5, "by_hand": False}]
    for arguments, code, why in (
        (("nothing", "5"), 1, "no worker has declared it and no job waits for it"),
        (("later", "default"), 1, "no worker has declared it"),
        (("warehouse", "many"), 2, "neither a whole number, nor a rate such as 50/minute"),
        (("warehouse", "99999999999"), 2, "use a whole number from 0 to 2147483647"),
    ):
        refused = command("limits", "set", *arguments, "--dsn", dsn)
        assert refused.returncode == code and why in refused.stderr, refused.stderr
    with pytest.raises(LimitNotFound):
        change(eyes.conn, "nothing", 5)


def test_what_nobody_has_declared_comes_first_and_says_so(dsn: str, eyes: Eyes) -> None:
    eyes.do("INSERT INTO pgqueue.key_limit (name, n, set_at) SELECT 'a' || g, 0, now() FROM generate_series(1, 120) g")
    eyes.do("INSERT INTO pgqueue.key_rate (name, count, period, set_at) VALUES ('a', 1, 60, now())")
    eyes.do(
        "INSERT INTO pgqueue.job_blocked (state, task, key) SELECT 'blocked', 'x', key FROM unnest(%s::text[]) AS key",
        ["limit:a1", "limit:zoo", "rate:a", "rate:zoo:1", "rate:zoo:2"],
    )
    shown = [line.split() for line in command("limits", "--dsn", dsn).stdout.splitlines()]
    assert shown[1][:5] == ["zoo", "undeclared", "0", "0", "1"]
    rates = shown[shown.index(["RATE", "STARTS", "BURST", "LINES", "WAITING", "WAITED"]) :]
    assert rates[1][:5] == ["zoo", "undeclared", "-", "2", "2"] and rates[2][0] == "a"
    told = items(command("limits", "--json", "--dsn", dsn))
    assert [each["name"] for each in told if each["undeclared"]] == ["zoo", "zoo"]
    assert undeclared(eyes.conn) == [Undeclared("limit", "zoo", 1), Undeclared("rate", "zoo", 2)]


def test_many_lines_are_counted_no_further_than_ten_thousand(eyes: Eyes) -> None:
    eyes.do(
        "INSERT INTO pgqueue.job_blocked (state, task, key) "
        "SELECT 'blocked', 'x', 'rate:r:' || g %% 3 FROM generate_series(1, 10500) g WHERE %s",
        True,
    )
    assert undeclared(eyes.conn) == [Undeclared("rate", "r", 10_001)]


def test_drain_passes_limits_one_job_at_a_time(conn: psycopg.Connection) -> None:
    from pgqueue.testing import drain

    @task(name="limits.drained", limit=1, lock=Lock("{n}"))
    def drained(n: int) -> None: ...

    drained.enqueue_many(conn, [(1,), (1,), (2,)])
    pgqueue.enqueue(conn, drained.using(priority=0), 3)
    assert drain(conn).check().completed == 4
    conn.rollback()
