"""A row that a claim passed over while it was locked is found: what is remembered of it, then with a server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from math import inf
from typing import Any

import psycopg
import pytest
from claim_plans import explain, put
from workers import Eyes, Taker, until

from pgqueue.jobs.job import Lane
from pgqueue.worker.fetch.passed_over import (
    ASK_FIRST,
    ASK_MOST,
    ASKED_MOST,
    FALL_SHARE,
    POSITIONS_MOST,
    READ_EVERY,
    Passed,
    PassedOver,
    PassedRead,
)
from pgqueue.worker.fetch.watermark import Watermark

A: Lane = ("a", 11, False)
B: Lane = ("b", 11, False)
K: Lane = ("a", 11, True)
BOTH = ("a", "b")


@pytest.fixture
def over() -> PassedOver:
    return PassedOver()


def read(over: PassedOver, now: float, *found: int) -> list[Passed]:
    """Read what is due, and find these positions in the first range."""
    ranges = over.to_read(now)
    over.read(PassedRead(ranges, [(0, pos) for pos in found], 0.0), now)
    return ranges


# What is remembered ---------------------------------------------------------------------------------------------------


def test_a_range_is_read_when_it_is_old_enough_and_once(over: PassedOver) -> None:
    assert over.next_reading() == inf
    over.passed(A, 0, 10, 1.0)
    assert over.next_reading() == 1.0 + READ_EVERY
    assert over.to_read(1.0 + READ_EVERY - 0.001) == []
    assert read(over, 1.0 + READ_EVERY) == [Passed(A, 0, 10, 1.0)]
    assert over.to_read(9.0) == [] and over.next_reading() == inf


def test_ranges_that_touch_are_read_as_one_and_young_ones_later(over: PassedOver) -> None:
    over.passed(A, 10, 20, 1.05)
    over.passed(A, 0, 10, 1.0)
    over.passed(K, 0, 10, 1.0)
    over.passed(A, 30, 40, 1.0)
    over.passed(A, 20, 25, 1.2)
    expected = [Passed(A, 0, 20, 1.05), Passed(A, 30, 40, 1.0), Passed(K, 0, 10, 1.0)]
    assert read(over, 1.25) == expected
    assert [one.low for one in read(over, 9.0)] == [20]


def test_a_reading_that_was_not_answered_is_repeated(over: PassedOver) -> None:
    over.passed(A, 0, 10, 0.0)
    assert over.to_read(1.0) == over.to_read(2.0) != []


def test_what_was_visible_is_asked_for_with_a_delay_that_doubles_until_it_is_gone(over: PassedOver) -> None:
    over.passed(A, 0, 10, 0.0)
    now, delays = 1.0, []
    read(over, now, 7)
    for _ in range(12):
        at = over.next_look(BOTH)
        delays.append(round(at - now, 6))
        assert over.due({A: 10}, at - 0.001) == []
        assert over.due({A: 10}, at) == [(A, 7)]
        over.asked([(A, 7)], at)
        assert over.next_look(BOTH) == inf
        now = at + READ_EVERY
        assert read(over, now, 7) == [Passed(A, 6, 7, at, delays[-1])]
    assert delays == [min(ASK_FIRST * 2**number, ASK_MOST) for number in range(12)]
    over.asked(over.due({A: 10}, now + ASK_MOST), now + ASK_MOST)
    read(over, now + 2 * ASK_MOST)
    assert over.next_look(BOTH) == over.next_reading() == inf


def test_a_position_above_its_cursor_is_left_to_its_lane(over: PassedOver) -> None:
    over.passed(A, 0, 10, 0.0)
    read(over, 1.0, 7)
    assert over.due({A: 6}, 2.0) == []
    assert over.due({A: 10}, 2.0) == []


def test_only_lanes_that_are_asked_and_no_more_than_so_many(over: PassedOver) -> None:
    over.passed(A, 0, 1000, 0.0)
    read(over, 1.0, *range(1, 301))
    assert over.due({B: 1000, K: 1000}, 2.0) == []
    assert over.next_look(["b"]) == inf
    assert len(over.due({A: 1000}, 2.0)) == ASKED_MOST


def test_of_too_many_rows_the_cursor_falls_below_the_lowest(over: PassedOver) -> None:
    over.passed(A, 0, 9_000, 0.0)
    over.passed(B, 50, 80, 0.0)
    ranges = over.to_read(1.0)
    over.read(PassedRead(ranges, [(0, pos) for pos in range(400, 401 + POSITIONS_MOST)], 0.5), 1.0)
    assert over.due({A: 9_000, B: 80}, 99.0) == []
    assert over.next_look(BOTH) == 1.0 + FALL_SHARE * 0.5
    assert over.falls(50.9) == {}
    assert over.falls(51.0) == {A: 399, B: 50}, "what the reading did not come to falls as well"
    assert over.falls(51.0) == {}


def test_the_delay_of_a_fall_doubles_while_there_are_too_many(over: PassedOver) -> None:
    now, delays = 1.0, []
    for _ in range(11):
        over.passed(A, 0, 9_000, now)
        found = [(0, pos) for pos in range(1, 2 + POSITIONS_MOST)]
        over.read(PassedRead(over.to_read(now + 1), found, 0.0), now + 1)
        delays.append(round(over.next_look(BOTH) - now - 1, 6))
        now = over.next_look(BOTH)
        assert over.falls(now) == {A: 0}
    assert delays == [min(ASK_FIRST * 2**number, ASK_MOST) for number in range(11)]


# With a server --------------------------------------------------------------------------------------------------------


@pytest.fixture
async def taker(dsn: str) -> AsyncIterator[Taker]:
    made = Taker(dsn)
    made.fetcher.watermark = Watermark(sweep_every=1e9)
    yield made
    await made.close()


async def head(taker: Taker) -> None:
    """A fetch that may take nothing: so the floor of a transaction that begins now lies above all rows."""
    await taker.fetch(0)
    taker.room = 1000


async def rounds(taker: Taker, seconds: float) -> list[int]:
    """What the fetcher brings, left to itself for so long."""
    taker.jobs.clear()
    running = asyncio.create_task(taker.fetcher.run())
    await asyncio.sleep(seconds)  # a time is what is tested: nothing must come, or nothing must come before
    taker.fetcher.quiet()
    await running
    taker.fetcher._quiet = False
    return sorted(job.id for job in taker.jobs)


async def until_taken(taker: Taker, number: int) -> list[int]:
    running = asyncio.create_task(taker.fetcher.run())
    await until(lambda: len(taker.jobs) >= number)
    taker.fetcher.quiet()
    await running
    return sorted(job.id for job in taker.jobs)


KINDS = {"plain": "NULL, false", "a lock, granted": "'k' || n, true"}


@pytest.mark.promise("F21")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("naive", [False, True])
async def test_a_row_that_was_locked_is_taken_soon_after_the_lock_is_undone(
    dsn: str, taker: Taker, eyes: Eyes, kind: str, naive: bool
) -> None:
    """The naive version forgets what it has passed."""
    if naive:
        taker.fetcher.passed_over.passed = lambda *what: None  # type: ignore[method-assign]
    insert = f"""INSERT INTO pgqueue.job_available (task, rank, lock_key, holds)
                 SELECT 'x', 11, {KINDS[kind]} FROM generate_series(1, 3) AS n RETURNING id"""  # noqa: S608
    ids = [id for (id,) in eyes.conn.execute(insert).fetchall()]
    await head(taker)
    with psycopg.connect(dsn) as holder:
        holder.execute("SELECT FROM pgqueue.job_available WHERE id = %s FOR KEY SHARE", [ids[1]])
        assert await rounds(taker, 0.6) == [ids[0], ids[2]]
        holder.rollback()
    taker.jobs.clear()
    if naive:
        assert await rounds(taker, 2.0) == []
    else:
        assert await until_taken(taker, 1) == [ids[1]]


@pytest.mark.promise("F21")
async def test_while_a_row_is_locked_the_worker_comes_to_rest(dsn: str, taker: Taker, eyes: Eyes) -> None:
    put(eyes, "x", number=2)
    with psycopg.connect(dsn) as holder:
        holder.execute("SELECT FROM pgqueue.job_available ORDER BY pos LIMIT 1 FOR KEY SHARE")
        await rounds(taker, 3.0)
        assert taker.fetcher.fetches < 40  # 10 ms, 20, 40 …: two fetches each, one of each kind


@pytest.mark.promise("F21")
async def test_more_locked_rows_than_are_remembered_are_taken_all(dsn: str, taker: Taker, eyes: Eyes) -> None:
    put(eyes, "x", number=POSITIONS_MOST + 500)
    await head(taker)
    taker.room = 10_000
    running = asyncio.create_task(taker.fetcher.run())
    with psycopg.connect(dsn) as holder:
        holder.execute("SELECT FROM pgqueue.job_available FOR KEY SHARE")
        await until(lambda: bool(taker.fetcher.passed_over._fall_delays))
        assert taker.jobs == []
        holder.rollback()
    await until(lambda: len(taker.jobs) == POSITIONS_MOST + 500)
    taker.fetcher.quiet()
    await running


async def test_a_position_asked_for_by_itself_is_looked_up_in_the_index(
    taker: Taker, eyes: Eyes, conn: psycopg.Connection[Any]
) -> None:
    put(eyes, "x", number=2_000)
    upto = eyes.one("SELECT pos FROM pgqueue.job_available ORDER BY pos OFFSET 1000 LIMIT 1")
    plan = json.dumps(explain(conn, taker, afters=upto - 1, uptos=upto, n=100, queues=1))
    assert "(pos > lane.after) AND (pos <= lane.upto)" in plan.replace("j.pos", "pos")
