"""The next of a key whose holder has ended here: the short way in, where it ends, and which keys are not asked for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import psycopg
import pytest
from lock_desk import Desk, OneStatement, Unlocked
from workers import Eyes, until

from pgqueue.database.sessions import Link
from pgqueue.database.statements import Statement
from pgqueue.worker.fetch.keyed_claim import KEYED_CLAIMS

BLOCKED = "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE %s = ANY (pg_blocking_pids(pid)))"
WAITS = """SELECT EXISTS (SELECT FROM pg_locks l JOIN pg_database d ON d.oid = l.database
                          WHERE d.datname = current_database() AND l.locktype = 'advisory' AND NOT l.granted)"""
LOCK = "SELECT pg_advisory_xact_lock(hashtextextended('pgqueue.lock:a', 7))"
MOVE = """
WITH taken AS (DELETE FROM pgqueue.job_blocked WHERE id = %s RETURNING *)
INSERT INTO pgqueue.job_running (state, id, task, lock_key, holds, worker_id, claim, started_at)
SELECT 'running', id, task, lock_key, true, 77, 1, now() FROM taken
"""


class Counting(Link):
    """Remembers what is sent."""

    sent: list[str]

    def statement(self, name: str, **params: object) -> Statement[list[tuple[Any, ...]]]:
        self.sent.append(name)
        return super().statement(name, **params)


@pytest.fixture
async def desks(dsn: str) -> AsyncIterator[Callable[..., Desk]]:
    """Makes desks; closed at the end."""
    made: list[Desk] = []

    def make(link: type[Link] = Link) -> Desk:
        made.append(Desk(dsn, link=link(dsn, "pgqueue")))
        return made[-1]

    yield make
    for desk in made:
        await desk.close()


@pytest.fixture
def desk(desks: Callable[..., Desk]) -> Desk:
    """One that remembers what it sends."""
    made = desks(Counting)
    object.__setattr__(made.link, "sent", [])
    return made


def admits(desk: Desk) -> list[str]:
    """What it has asked for keys since the last call."""
    assert isinstance(desk.link, Counting)
    names = [
        name for name in desk.link.sent if name in ("unblock_next", "unblock_move", "unblock_waiters", "unblock_read")
    ]
    desk.link.sent.clear()
    return names


def put(eyes: Eyes, key: str, number: int, **columns: Any) -> list[int]:
    names = ", ".join(["lock_key", *columns])
    places = ", ".join(["%s"] * (1 + len(columns)))
    insert = f"INSERT INTO pgqueue.job (task, {names}) VALUES ('x', {places}) RETURNING id"  # noqa: S608
    return [eyes.one(insert, key, *columns.values()) for _ in range(number)]


# The short way --------------------------------------------------------------------------------------------------------


@pytest.mark.promise("L08")
async def test_whoever_ends_a_holder_lets_the_next_in_by_one_short_statement(desk: Desk, eyes: Eyes) -> None:
    ids = put(eyes, "a", 3) + put(eyes, "b", 2)
    a1, b1 = ids[0], ids[3]
    assert await desk.take() == [a1, b1]
    admits(desk)
    order = []
    while jobs := list(desk.jobs):
        order.append([job.id for job in jobs])
        await desk.complete(*jobs)
        await desk.let_in()
    assert order == [[a1, b1], [ids[1], ids[4]], [ids[2]]]
    assert admits(desk) == ["unblock_next"] * 3
    await desk.let_in()
    assert (desk.admit._with_waiters, desk.admit._ours, desk.admit._holding) == (set(), {}, {})


async def test_the_job_that_came_in_says_what_it_carries(desk: Desk, eyes: Eyes) -> None:
    columns = {"args": '{"n": 1}', "headers": '{"h": "v"}', "priority": 3, "rank": 7, "attempt": 2}
    [first] = put(eyes, "a", 1)
    assert await desk.take() == [first]
    running = list(desk.jobs)
    [second] = put(eyes, "a", 1, idempotency_key="i", **columns)
    await desk.park()
    await desk.complete(*running)
    [job] = await desk.let_in()
    assert job.id == second
    assert (job.task, job.queue, job.args, job.headers) == ("x", "default", '{"n": 1}', {"h": "v"})
    assert (job.priority, job.attempt, job.lock_key, job._row[16]) == (3, 3, "a", '[null, "i"]')
    row = "SELECT rank, attempt, holds, claim, worker_id FROM pgqueue.job_running WHERE id = %s"
    assert eyes.all(row, second) == [(6, 3, True, job.claim, desk.worker_id)]


@pytest.mark.parametrize("size", [100, 40_000])
async def test_what_is_too_large_to_travel_while_a_key_is_locked_travels_afterwards(
    desk: Desk, eyes: Eyes, size: int
) -> None:
    args = '{"text": "' + size * "x" + '"}'
    first, second = put(eyes, "a", 2, args=args)
    assert await desk.take() == [first]
    admits(desk)
    await desk.complete(*desk.jobs)
    [job] = await desk.let_in()
    assert (job.id, job.args) == (second, args)
    assert admits(desk) == (["unblock_next"] if size == 100 else ["unblock_next", "unblock_read"])


@pytest.mark.promise("L08")
async def test_of_a_key_with_a_limit_above_one_all_who_may_come_in(desk: Desk, eyes: Eyes) -> None:
    ids = put(eyes, "a", 7, lock_limit=3)
    assert await desk.take() == ids[:3]
    await desk.complete(*desk.jobs)
    assert sorted(job.id for job in await desk.let_in()) == ids[3:6]


async def test_one_that_needs_more_than_the_lock_goes_on_to_that_line(desk: Desk, eyes: Eyes) -> None:
    [first], [second], [third] = put(eyes, "a", 1), put(eyes, "a", 1, limit_key="l"), put(eyes, "a", 1)
    assert await desk.take() == [first]
    await desk.complete(*desk.jobs)
    assert await desk.let_in() == []
    waits = "SELECT id, key, holds FROM pgqueue.job_blocked ORDER BY id"
    assert eyes.all(waits) == [(second, "limit:l", True), (third, "lock:a", False)]


async def test_one_that_has_no_slot_here_is_granted_to_the_others(desk: Desk, eyes: Eyes) -> None:
    first, second = put(eyes, "a", 2)
    assert await desk.take() == [first]
    running = list(desk.jobs)
    desk.slots = 0
    await desk.complete(*running)
    assert await desk.let_in() == []
    assert eyes.all("SELECT id, holds FROM pgqueue.job_available") == [(second, True)]


async def test_a_suspect_is_granted_to_its_lane(desk: Desk, eyes: Eyes) -> None:
    [first] = put(eyes, "a", 1)
    assert await desk.take() == [first]
    running = list(desk.jobs)
    [suspect] = put(eyes, "a", 1, crashes=1, rank=-2)
    await desk.park()
    await desk.complete(*running)
    assert await desk.let_in() == []
    assert eyes.all("SELECT id, rank, holds FROM pgqueue.job_available") == [(suspect, -2, True)]


async def test_a_worker_that_was_taken_for_dead_lets_nobody_in(desk: Desk, eyes: Eyes) -> None:
    first, second = put(eyes, "a", 2)
    assert await desk.take() == [first]
    eyes.do("UPDATE pgqueue.worker SET dead_at = now() WHERE id = %s", desk.worker_id)
    await desk.complete(*desk.jobs)
    assert await desk.let_in() == []
    assert eyes.state(second) == "blocked"


# Never more than the limit --------------------------------------------------------------------------------------------


async def with_a_line(desks: Callable[..., Desk], eyes: Eyes, link: type[Link]) -> tuple[Desk, list[int]]:
    """A desk that has ended the holder of `a`, and not yet asked for the next; the ids of those in line."""
    ids = put(eyes, "a", 4)
    desk = desks(link)
    assert await desk.take() == ids[:1]
    await desk.complete(*desk.jobs)
    return desk, ids[1:]


@pytest.mark.promise("L04")
@pytest.mark.parametrize(("link", "running"), [(Link, 1), (Unlocked, 2)])
async def test_two_who_let_the_next_in_lock_the_key_first(
    desks: Callable[..., Desk], eyes: Eyes, conn: psycopg.Connection, link: type[Link], running: int
) -> None:
    """One is stopped between its snapshot and the line; another asks for the same key meanwhile."""
    slow, _ = await with_a_line(desks, eyes, link)
    other = desks(link)
    other.admit.blocked({"lock:a": ()})
    conn.execute("SELECT FROM pgqueue.worker WHERE id = %s FOR UPDATE", [slow.worker_id])
    first = asyncio.create_task(slow.let_in())
    await until(lambda: eyes.one(BLOCKED, conn.info.backend_pid))
    second = asyncio.create_task(other.let_in())
    await until(lambda: second.done() or eyes.one(WAITS))
    conn.rollback()
    await asyncio.gather(first, second)
    assert eyes.states() == {"completed": 1, "running": running, "blocked": 3 - running}


@pytest.mark.promise("L04")
@pytest.mark.parametrize(("link", "running"), [(Link, 1), (OneStatement, 2)])
async def test_the_holders_are_counted_in_a_snapshot_from_after_the_lock(
    desks: Callable[..., Desk], eyes: Eyes, conn: psycopg.Connection, link: type[Link], running: int
) -> None:
    """Somebody else has the key's lock and lets one in, while we wait for that lock."""
    desk, line = await with_a_line(desks, eyes, link)
    conn.execute(LOCK)
    asking = asyncio.create_task(desk.let_in())
    await until(lambda: eyes.one(BLOCKED, conn.info.backend_pid))
    conn.execute(MOVE, [line[0]])
    conn.commit()
    await asking
    assert eyes.states() == {"completed": 1, "running": running, "blocked": 3 - running}


# What is not asked for ------------------------------------------------------------------------------------------------


async def test_a_key_that_we_hold_is_not_asked_for_until_it_is_free(desk: Desk, eyes: Eyes) -> None:
    [first] = put(eyes, "a", 1)
    assert await desk.take() == [first]
    running = list(desk.jobs)
    admits(desk)
    second, _ = put(eyes, "a", 2)
    assert await desk.take() == []
    assert admits(desk) == []
    await desk.complete(*running)
    assert [job.id for job in await desk.let_in()] == [second]
    assert admits(desk) == ["unblock_next"]


@pytest.mark.parametrize(("column", "state"), [({"lock_limit": 2}, "running"), ({"on_locked": "skip"}, "skipped")])
@pytest.mark.parametrize("naive", [False, True])
@pytest.mark.parametrize("ahead", [False, True])
async def test_one_that_may_be_beside_the_holder_or_is_skipped_is_asked_for_at_once(
    desk: Desk, eyes: Eyes, column: dict[str, Any], state: str, naive: bool, ahead: bool
) -> None:
    [holder] = put(eyes, "a", 1, lock_limit=2)
    assert await desk.take() == [holder]
    desk.fetcher.keyed_claim.long_rows = ahead
    [other] = put(eyes, "a", 1, **column)
    if naive:  # what is held here is never asked for
        desk.hands.blocked = lambda keys, singly, lowest: desk.admit.blocked(dict.fromkeys(keys, ()), keys.keys())
    await desk.take()
    assert eyes.state(other) == ("blocked" if naive else state)


async def test_a_key_whose_holder_ended_before_we_know_who_was_parked_is_asked_for(desk: Desk, eyes: Eyes) -> None:
    [first] = put(eyes, "a", 1)
    assert await desk.take() == [first]
    running = list(desk.jobs)
    [second] = put(eyes, "a", 1)
    told: list[Any] = []
    desk.hands.blocked = lambda *parked: told.append(parked)
    await desk.park()
    await desk.complete(*running)
    desk.admit._freed.clear()  # it looked before that was parked, and found nobody
    desk.admit.blocked(*told[0])
    assert [job.id for job in await desk.let_in()] == [second]


async def test_of_many_busy_keys_half_are_asked_for_at_a_time(desk: Desk) -> None:
    """While the jobs of the others run; of few all, and never more than the server's lock table has room for."""
    admit = desk.admit
    for number, asked in ((10, 10), (20, 16), (100, 50), (1_000, 64)):
        keys = [f"lock:{place}" for place in range(number)]
        admit._with_waiters, admit._followed = set(keys), dict.fromkeys(keys)
        assert list(admit._some_followed()) == keys[:asked]
        assert list(admit._followed) == keys[asked:]
    admit._followed.clear()


async def test_what_a_claim_of_a_dead_id_brings_is_not_ours(desk: Desk, eyes: Eyes) -> None:
    """It will not end here: a key that we took for ours would be asked for by the sweep only."""
    [first] = put(eyes, "a", 1)
    real, claims = desk.keys.run, desk.admit._state.claims

    async def meanwhile(*messages: Any, **options: Any) -> list[Any]:
        answers = await real(*messages, **options)
        claims.void_all()
        return answers

    desk.keys.run = meanwhile  # type: ignore[method-assign]
    assert await desk.take() == [first]
    desk.keys.run = real  # type: ignore[method-assign]
    admits(desk)
    put(eyes, "a", 1)
    await desk.take()
    assert admits(desk) == ["unblock_next"]


# Long rows ------------------------------------------------------------------------------------------------------------


async def test_rows_of_some_keys_are_parked_many_at_once(desk: Desk, eyes: Eyes) -> None:
    """After two claims that could take little of what they found; until the rows are at their end."""
    eyes.do("INSERT INTO pgqueue.job (task, lock_key) SELECT 'x', n % 50 FROM generate_series(1, 2500) AS n")
    desk.fetcher.keyed_claim.left = KEYED_CLAIMS
    taken = [len(await desk.park(100)) for _ in range(3)]
    assert sum(taken) == 50
    assert eyes.states()["blocked"] > 2000
    while eyes.states().get("available"):
        await desk.park(100)
    assert eyes.states() == {"running": 50, "blocked": 2450}


async def test_when_rows_are_short_again_free_keys_are_taken_at_once_again(desk: Desk, eyes: Eyes) -> None:
    eyes.do("INSERT INTO pgqueue.job (task, lock_key) SELECT 'x', 'busy' FROM generate_series(1, 300)")
    await desk.park(100)
    long = desk.fetcher.keyed_claim.long_rows
    assert long
    eyes.do("INSERT INTO pgqueue.job (task, lock_key) SELECT 'x', 'k' || n FROM generate_series(1, 300) AS n")
    for _ in range(3):
        await desk.park(100)
    long = desk.fetcher.keyed_claim.long_rows
    assert not long
    eyes.do("INSERT INTO pgqueue.job (task, lock_key) SELECT 'x', 'l' || n FROM generate_series(1, 50) AS n")
    blocked = eyes.states()["blocked"]
    taken = [len(await desk.park(100)) for _ in range(2)]  # how many it may lock the first of them says
    assert sum(taken) == 50 and eyes.states()["blocked"] == blocked


@pytest.mark.promise("F13")
async def test_plain_jobs_behind_a_long_row_are_taken_at_once(desk: Desk, eyes: Eyes) -> None:
    """They have lanes of their own, and do not stand behind it."""
    eyes.do("INSERT INTO pgqueue.job (task, lock_key) SELECT 'x', 'busy' FROM generate_series(1, 12000)")
    eyes.do("INSERT INTO pgqueue.job (task) SELECT 'x' FROM generate_series(1, 40)")
    assert len(await desk.park(40)) == 40
    assert eyes.states() == {"available": 12_000, "running": 40}


async def test_what_skips_jobs_is_sent_only_where_one_may_have_to_be_skipped(desk: Desk, eyes: Eyes) -> None:
    put(eyes, "a", 3, lock_limit=2)
    await desk.take()
    assert isinstance(desk.link, Counting)
    assert "unblock_move" in desk.link.sent
    assert "unblock_skip" not in desk.link.sent
    [late] = put(eyes, "a", 1, lock_limit=2, on_locked="skip")
    await desk.take()
    assert "unblock_skip" in desk.link.sent
    assert eyes.state(late) == "skipped"
    desk.link.sent.clear()
    desk.admit.swept(["lock:a"])  # the head may be one that its claimer did not live to decide on
    await desk.let_in()
    assert "unblock_skip" in desk.link.sent


async def test_a_job_is_skipped_by_its_own_limit_whatever_the_first_waiter_allows(desk: Desk, eyes: Eyes) -> None:
    put(eyes, "a", 3, lock_limit=3)
    assert len(await desk.take()) == 3
    [first] = put(eyes, "a", 1, lock_limit=2)
    assert await desk.take() == []
    late, fits = put(eyes, "a", 1, lock_limit=3, on_locked="skip") + put(eyes, "a", 1, lock_limit=4, on_locked="skip")
    assert await desk.take() == []
    assert [eyes.state(job) for job in (first, late, fits)] == ["blocked", "skipped", "blocked"]
