"""Where a line is begun to be read: nobody in it waits for longer than is said, and none is left there."""

from __future__ import annotations

import asyncio
import json
from time import monotonic
from typing import Any

import psycopg
import pytest
from lock_desk import Desk, Desks, desks, ending, put
from workers import Eyes, until

from pgqueue.database.statements import text
from pgqueue.worker.concurrency import waiter_cursors
from pgqueue.worker.concurrency.waiter_cursors import (
    BUSY_RATE,
    BUSY_TAKEN,
    FRONT,
    HINT_SECONDS,
    KEYS_MOST,
    SENT_MOST,
    SLOW_LOOKS,
    SLOW_SECONDS,
    Position,
    WaiterCursors,
)
from pgqueue.worker.fetch.fetcher import _positions
from pgqueue.worker.fetch.kinds import NO_RANK

__all__ = ["desks"]


@pytest.fixture
def memory() -> WaiterCursors:
    return WaiterCursors()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time for lines: its one value."""
    now = [100.0]
    monkeypatch.setattr(waiter_cursors, "monotonic", lambda: now[0])
    return now


# What is remembered ---------------------------------------------------------------------------------------------------


def busy(memory: WaiterCursors) -> None:
    for number in range(BUSY_TAKEN + 1):
        memory.unblocked("a", (11, number))


def test_only_the_line_of_a_busy_key_is_begun_behind_its_front(memory: WaiterCursors, clock: list[float]) -> None:
    for number in range(1, BUSY_TAKEN):
        memory.unblocked("a", (11, number))
        assert memory.position("a") == FRONT
    memory.unblocked("a", (11, 1000))
    assert memory.position("a") == (11, 1000)


def test_claims_are_told_of_the_lines_of_busy_keys_while_those_are_known(
    memory: WaiterCursors, clock: list[float]
) -> None:
    """However quick reading was: with a backlog nobody looks, so nobody would know that it has become slow."""
    busy(memory)
    memory.unblocked("b", (11, 1))
    assert not memory.slow
    memory.position("a")
    memory.unblocked("a", (11, 1000))
    assert memory.known("") == {"a": (11, 1000)}
    memory.doubt("a")
    assert memory.known("") == {}
    memory.position("a")
    memory.unblocked("a", (11, 1001))
    assert memory.known("") == {"a": (11, 1001)}
    clock[0] += HINT_SECONDS
    assert memory.known("") == {}


def test_one_from_which_few_were_let_in_lately_is_busy_no_more(memory: WaiterCursors, clock: list[float]) -> None:
    busy(memory)
    for few in (BUSY_RATE, BUSY_RATE - 1):
        clock[0] += HINT_SECONDS
        assert memory.position("a") == FRONT
        for number in range(few):
            memory.unblocked("a", (11, 1000 + number))
        assert memory.position("a") == (11, 999 + few)
    clock[0] += HINT_SECONDS
    assert memory.position("a") == FRONT
    memory.unblocked("a", (11, 2000))
    assert memory.position("a") == FRONT


def test_one_that_was_busy_once_is_not_for_ever_because_it_is_found_empty(
    memory: WaiterCursors, clock: list[float]
) -> None:
    """The naive one judges only when an admit reads the line, and claims see to it that none has to."""
    busy(memory)
    for _ in range(8):
        clock[0] += HINT_SECONDS / 4
        memory.empty(["a"], clock[0])
    assert memory.known("") == {}


def test_it_is_read_from_the_front_once_in_a_while(memory: WaiterCursors, clock: list[float]) -> None:
    busy(memory)
    assert memory.position("a") == (11, BUSY_TAKEN)
    clock[0] += HINT_SECONDS
    assert memory.position("a") == FRONT, "and until a job was found there"
    assert memory.position("a") == FRONT
    memory.unblocked("a", (11, 1000))
    assert memory.position("a") == (11, 1000)


@pytest.mark.parametrize(
    ("lowest", "read"),
    [((11, 1001), (11, 1000)), ((12, 1), (11, 1000)), ((11, 1000), FRONT), ((11, 7), FRONT), ((1, 2000), FRONT)],
)
def test_what_we_park_before_it_is_seen(memory: WaiterCursors, lowest: tuple[int, int], read: tuple[int, int]) -> None:
    busy(memory)
    memory.unblocked("a", (11, 1000))
    memory.blocked(["a", "b"], lowest)
    assert memory.position("a") == read


@pytest.mark.parametrize("first", [(11, 1000), FRONT])
def test_what_we_park_while_a_line_is_asked_is_seen_by_the_next(memory: WaiterCursors, first: tuple[int, int]) -> None:
    """The answer may be from before it."""
    busy(memory)
    memory.unblocked("a", (11, 1000))
    if first == FRONT:
        memory.blocked(["a"], (1, 1))
    assert memory.position("a") == first
    memory.blocked(["a"], (11, 1001))
    memory.unblocked("a", (11, 1002))
    assert memory.position("a") == FRONT
    memory.unblocked("a", (11, 1003))
    assert memory.position("a") == (11, 1003)


def slow(memory: WaiterCursors) -> None:
    for _ in range(SLOW_LOOKS):
        memory.took(2 * SLOW_SECONDS, 1)


def first(memory: WaiterCursors) -> None:
    """The line of "a" was read, and its first has gone."""
    assert memory.position("a") == FRONT
    memory.unblocked("a", (11, 7))


def test_reading_is_slow_when_each_of_several_looks_was(memory: WaiterCursors) -> None:
    first(memory)
    for _ in range(SLOW_LOOKS):
        assert (memory.slow, memory.position_to_look("a"), memory.known("")) == (False, FRONT, {})
        memory.took(10 * SLOW_SECONDS, 10)
    assert (memory.slow, memory.position_to_look("a"), memory.known("")) == (True, (11, 7), {"a": (11, 7)})
    memory.took(9 * SLOW_SECONDS, 10)
    assert (memory.slow, memory.position_to_look("a"), memory.known("")) == (False, FRONT, {})


def test_where_it_is_slow_every_line_is_read_from_its_front_once_in_a_while(
    memory: WaiterCursors, clock: list[float]
) -> None:
    slow(memory)
    first(memory)
    assert memory.position("a") == memory.position_to_look("a") == (11, 7)
    clock[0] += HINT_SECONDS
    assert memory.known("") == {}
    assert memory.position_to_look("a") == FRONT, "and until it is known which job was found there"
    assert (memory.position_to_look("a"), memory.known("")) == (FRONT, {})
    memory.empty(["a", "b"], clock[0])
    assert (memory.position_to_look("a"), memory.known("")) == ((11, 7), {"a": (11, 7)})


def test_a_line_that_a_claim_found_empty_need_not_be_read_from_its_front_for_a_while(
    memory: WaiterCursors, clock: list[float]
) -> None:
    slow(memory)
    first(memory)
    clock[0] += HINT_SECONDS
    memory.empty(["a"], clock[0] - 0.1)
    assert memory.position_to_look("a") == (11, 7)
    assert memory.read_since("a", clock[0] - 0.2)
    assert not memory.read_since("a", clock[0] - 0.1)
    clock[0] += HINT_SECONDS - 0.1
    assert memory.position_to_look("a") == FRONT
    assert not memory.read_since("a", clock[0] - 0.2), "it is not known yet who was found"


def test_what_we_park_while_a_line_is_looked_at_is_not_taken_for_nobody(
    memory: WaiterCursors, clock: list[float]
) -> None:
    slow(memory)
    first(memory)
    clock[0] += HINT_SECONDS
    assert memory.position_to_look("a") == FRONT
    memory.blocked(["a"], (11, 5))
    memory.empty(["a"], clock[0])
    assert (memory.position_to_look("a"), memory.known("")) == (FRONT, {})


@pytest.mark.parametrize("place", [(11, 5), (1, 60)])
def test_what_we_park_while_a_line_is_read_for_the_first_time_is_not_forgotten(
    memory: WaiterCursors, place: Position
) -> None:
    slow(memory)
    assert memory.position("a") == FRONT
    memory.blocked(["a"], place)
    memory.unblocked("a", (11, 7))
    assert (memory.position("a"), memory.known("")) == (FRONT, {})


def test_an_answer_from_before_says_nothing_of_a_line_that_is_being_read(
    memory: WaiterCursors, clock: list[float]
) -> None:
    slow(memory)
    first(memory)
    clock[0] += HINT_SECONDS
    assert memory.position("a") == FRONT
    memory.empty(["a"], clock[0] - 0.1)
    assert memory.position("a") == FRONT


def test_the_end_of_a_line_is_believed_at_once_only_where_reading_is_quick(memory: WaiterCursors) -> None:
    busy(memory)
    assert memory.position("a") == (11, BUSY_TAKEN)
    assert memory.ended("a")
    assert memory.position("a") == FRONT, "at once, from there"
    memory.unblocked("a", (11, BUSY_TAKEN))
    slow(memory)
    assert memory.position("a") == (11, BUSY_TAKEN)
    assert not memory.ended("a")
    assert memory.position("a") == (11, BUSY_TAKEN)


def test_however_many_lines_there_are_some_are_remembered_and_fewer_sent(memory: WaiterCursors) -> None:
    slow(memory)
    for number in range(2 * KEYS_MOST):
        memory.position(f"k{number}")
        memory.unblocked(f"k{number}", (11, number))
    assert len(memory._cursors) == KEYS_MOST
    last = range(2 * KEYS_MOST - SENT_MOST, 2 * KEYS_MOST)
    assert memory.known("") == {f"k{number}": (11, number) for number in last}


# In the database -----------------------------------------------------------------------------------------------------


async def test_one_parked_by_another_worker_waits_for_a_second_at_most(
    desks: Desks, eyes: Eyes, monkeypatch: pytest.MonkeyPatch, clock: list[float]
) -> None:
    """Of a busy key; an urgent one at that. By whoever parks it himself it is seen at once."""
    monkeypatch.setattr(waiter_cursors, "BUSY_TAKEN", 2)
    here, there = desks(), desks()
    ids = put(eyes, 8)
    await here.take()

    async def next_one() -> int:
        await here.complete(*here.jobs)
        [job] = await here.let_in()
        return job.id

    assert [await next_one() for _ in range(3)] == ids[1:4]
    [urgent] = put(eyes, 1, priority=0, rank=1)
    await there.park()
    there.admit._wanted.clear()
    assert await next_one() == ids[4]
    clock[0] += HINT_SECONDS
    assert await next_one() == urgent
    assert await next_one() == ids[5]
    [running] = here.jobs
    [urgent] = put(eyes, 1, priority=0, rank=1)
    await here.park()
    here.jobs.append(running)
    assert await next_one() == urgent


async def test_at_the_end_of_its_line_one_parked_before_it_is_found(
    desks: Desks, eyes: Eyes, monkeypatch: pytest.MonkeyPatch, clock: list[float]
) -> None:
    monkeypatch.setattr(waiter_cursors, "BUSY_TAKEN", 2)
    here, there = desks(), desks()
    ids = put(eyes, 4)
    await here.take()
    for _ in range(3):
        await here.complete(*here.jobs)
        await here.let_in()
    assert [job.id for job in here.jobs] == ids[3:]
    [urgent] = put(eyes, 1, priority=0, rank=1)
    await there.park()
    there.admit._wanted.clear()
    await here.complete(*here.jobs)
    assert [job.id for job in await here.let_in()] == [urgent]
    assert not here.admit.wants


async def test_the_long_way_begins_behind_those_it_has_let_in_too(
    desks: Desks, eyes: Eyes, monkeypatch: pytest.MonkeyPatch, clock: list[float]
) -> None:
    """Of a key with a limit above 1; but whom the sweep has seen is looked for from the front."""
    monkeypatch.setattr(waiter_cursors, "BUSY_TAKEN", 4)
    here, there = desks(), desks()
    ids = put(eyes, 10, lock_limit=2)
    assert await here.take() == ids[:2]

    async def next_two() -> list[int]:
        await here.complete(*here.jobs)
        return [job.id for job in await here.let_in()]

    assert [await next_two() for _ in range(2)] == [ids[2:4], ids[4:6]]
    [line] = here.admit.waiter_cursors._cursors.values()
    assert (line.last, line.unblocked) == ((11, ids[5]), 6)
    urgent = put(eyes, 2, priority=0, rank=1, lock_limit=2)
    await there.park()
    there.admit._wanted.clear()
    assert await next_two() == ids[6:8]
    here.admit.swept(["lock:a"])
    assert await next_two() == urgent
    assert await next_two() == ids[8:]


async def test_the_long_way_does_not_believe_that_a_line_has_no_more_while_there_is_room(
    desks: Desks, eyes: Eyes, monkeypatch: pytest.MonkeyPatch, clock: list[float]
) -> None:
    """Of three places two go to those who are known to wait; the third to one parked in front of them."""
    monkeypatch.setattr(waiter_cursors, "BUSY_TAKEN", 3)
    here, there = desks(), desks()
    ids = put(eyes, 8, lock_limit=3)
    assert await here.take() == ids[:3]
    await here.complete(*here.jobs)
    assert [job.id for job in await here.let_in()] == ids[3:6]
    [urgent] = put(eyes, 1, priority=0, rank=1, lock_limit=3)
    await there.park()
    assert await there.let_in() == []
    await here.complete(*here.jobs)
    assert sorted(job.id for job in await here.let_in()) == [*ids[6:], urgent]
    assert not here.admit.wants


async def test_at_the_end_of_its_line_the_long_way_too_finds_one_parked_before_it(
    desks: Desks, eyes: Eyes, monkeypatch: pytest.MonkeyPatch, clock: list[float]
) -> None:
    monkeypatch.setattr(waiter_cursors, "BUSY_TAKEN", 2)
    here, there = desks(), desks()
    put(eyes, 4, lock_limit=2)
    await here.take()
    await here.complete(*here.jobs)
    await here.let_in()
    [urgent] = put(eyes, 1, priority=0, rank=1, lock_limit=2)
    await there.park()
    there.admit._wanted.clear()
    await here.complete(*here.jobs)
    here.admit._wanted |= dict.fromkeys(here.admit._followed, ([], False))
    here.admit._followed.clear()
    assert [job.id for job in await here.let_in()] == [urgent]
    assert not here.admit.wants


@pytest.mark.promise("F22")
async def test_who_was_parked_in_front_comes_after_a_claim_that_did_not_see_him(
    desks: Desks, eyes: Eyes, monkeypatch: pytest.MonkeyPatch, clock: list[float]
) -> None:
    monkeypatch.setattr(waiter_cursors, "BUSY_TAKEN", 2)
    here, there = desks(), desks()
    put(eyes, 4)
    await here.take()
    for _ in range(3):
        await here.complete(*here.jobs)
        await here.let_in()
    [urgent] = put(eyes, 1, priority=0, rank=1)
    await there.park()
    assert await there.let_in() == []
    ended = list(here.jobs)
    await here.session.run(ending(here.link, "complete_plain", ended, here.worker_id))
    [later] = put(eyes, 1)
    here.fetcher.keyed_claim.left, here.fetcher.keyed_claim.long_rows = 1, False
    [claimed] = await here.park()
    assert claimed.id == later, "nobody was seen in line"
    here.admit.granted([claimed])
    here.admit.ended(ended)
    assert await here.let_in() == []
    await here.complete(claimed)
    assert [job.id for job in await here.let_in()] == [urgent]


@pytest.mark.parametrize("size", [10, 40_000])
async def test_of_large_jobs_as_of_small_ones_the_line_is_remembered(desks: Desks, eyes: Eyes, size: int) -> None:
    """Their rows come in a message of their own, without their places."""
    desk = desks()
    ids = put(eyes, 3, args=json.dumps({"pad": "x" * size}))
    assert await desk.take() == ids[:1]
    for job_id in ids[1:]:
        await desk.complete(*desk.jobs)
        assert [job.id for job in await desk.let_in()] == [job_id]
    [line] = desk.admit.waiter_cursors._cursors.values()
    assert (line.last, line.unblocked) == ((11, ids[2]), 3)


async def left_behind(here: Desk, there: Desk, eyes: Eyes) -> int:
    """A job that `there` parked before those whom `here` knows, which held the key; by its hint nobody is left."""
    slow(here.admit.waiter_cursors)
    ids = put(eyes, 2)
    await here.take()
    await here.complete(*here.jobs)
    assert [job.id for job in await here.let_in()] == ids[1:]
    [urgent] = put(eyes, 1, priority=0, rank=1)
    await there.park()
    assert await there.let_in() == []
    await here.complete(*here.jobs)
    assert await here.let_in() == [], "not read from its front yet"
    return urgent


@pytest.mark.promise("F22")
@pytest.mark.parametrize("naive", [False, True])
async def test_where_reading_is_slow_who_was_parked_in_front_is_come_back_to(
    desks: Desks, eyes: Eyes, naive: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The naive one believes that nobody is there, and leaves it to the sweep."""
    monkeypatch.setattr("pgqueue.worker.concurrency.unblocker.HINT_SECONDS", 0.2)
    if naive:
        monkeypatch.setattr("pgqueue.worker.concurrency.unblocker.Unblocker._come_back_to", lambda admit, keys: None)
    here = desks()
    urgent = await left_behind(here, desks(), eyes)
    if naive:
        assert not here.admit.wants
        assert here.admit._timer is None, "nothing will wake it"
        return
    await until(lambda: here.admit.wants)
    assert [job.id for job in await here.let_in()] == [urgent]
    assert not here.admit._unsure


@pytest.mark.promise("F22")
async def test_who_leaves_comes_back_at_once(desks: Desks, eyes: Eyes) -> None:
    """Not in a second: it is not there any more then."""
    here = desks()
    urgent = await left_behind(here, desks(), eyes)
    began = monotonic()
    running = asyncio.ensure_future(here.admit.run())
    await here.admit.idle()
    running.cancel()
    assert [job.id for job in here.jobs] == [urgent]
    assert monotonic() - began < HINT_SECONDS


@pytest.mark.second
@pytest.mark.promise("F08")
async def test_under_a_snapshot_claims_looks_and_admits_do_not_read_those_that_have_gone(
    desks: Desks, dsn: str, eyes: Eyes, conn: psycopg.Connection
) -> None:
    """Of a key whose line 600 have left, and where nobody waits. The naive ones begin at the front."""
    desk = desks()
    slow(desk.admit.waiter_cursors)
    with psycopg.connect(dsn) as holder:
        holder.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        holder.execute("SELECT 1")
        ids = put(eyes, 601, args=json.dumps({"pad": "x" * 1500}))  # five on a page
        await desk.take()
        while desk.jobs:
            await desk.complete(*desk.jobs)
            await desk.let_in()
        known = desk.admit.waiter_cursors.known("")
        assert known == {"lock:a": (11, ids[-1])}
        assert look(conn, desk.admit.waiter_cursors.position_to_look("lock:a")) + 100 <= look(conn, FRONT)
        assert move(conn, desk, known["lock:a"]) + 100 <= move(conn, desk, FRONT)
        put(eyes, 1)
        assert claim(conn, desk, known) + 50 <= claim(conn, desk, {})


def look(conn: psycopg.Connection, place: Position) -> int:
    """Pages that a look at the line of "a" touches."""
    params = {"keys": ["lock:a"], "ranks": [place[0]], "ids": [place[1]], "front": FRONT[0]}
    return pages(conn, "unblock_waiters", params)


def move(conn: psycopg.Connection, desk: Desk, place: Position) -> int:
    """Pages that an admit of "a" by the long way touches; where holders begin it knows."""
    params = {
        "keys": ["lock:a"], "afters": [10**9], "ranks": [place[0]], "ids": [place[1]], "fresh": [], "heads": False,
        "queues": ["default"], "pools": [1], "slots": [1], "worker_id": desk.worker_id, "claim": 1, "notify": False,
        "tasks": ["x"],
    }  # fmt: skip
    return pages(conn, "unblock_move", params)


def claim(conn: psycopg.Connection, desk: Desk, lines: dict[str, Position]) -> int:
    """Pages that a claim of the one available job, which needs "a", touches; where holders begin it knows."""
    lanes = {"queues": ["default"], "ranks": [11], "afters": [0], "uptos": [2**63 - 1], "n": 1, "tasks": ["x"]}
    reading = {"queues": ["default"], "ranks": [11], "others": [0], "beyond": NO_RANK, "tasks": ["x"]}
    conn.execute(text("keyed_claim_reading", "pgqueue").encode(), reading)
    conn.execute(text("keyed_claim_lock", "pgqueue").encode(), {**lanes, "workers": 1})
    params = {
        **lanes, "mosts": [1], "starts": json.dumps({"a": 10**9}), "lines": _positions(lines),
        "worker_id": desk.worker_id, "claim": 1,
    }  # fmt: skip
    return pages(conn, "keyed_claim_move", params)


def pages(conn: psycopg.Connection, statement: str, params: dict[str, Any]) -> int:
    """Pages it touches; it is undone."""
    explain = f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {text(statement, 'pgqueue')}"
    [(found,)] = conn.execute(explain.encode(), params).fetchall()
    conn.rollback()
    plan = found[0]["Plan"]
    return int(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])
