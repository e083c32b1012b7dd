"""Claims that take jobs of free keys at once: when they may, when they must not, and what that costs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import psycopg
import pytest
from lock_desk import Desk, EarlyClaim, UnlockedClaim, race_of_pairs
from workers import Eyes, until, work

from pgqueue.client.tasks import task
from pgqueue.database.sessions import Link
from pgqueue.database.statements import text
from pgqueue.worker.fetch.fetcher import RANKS
from pgqueue.worker.fetch.keyed_claim import KEYED_CLAIMS, KEYED_LEAST, KEYED_MOST
from pgqueue.worker.fetch.kinds import NO_RANK

HOLDERS = {
    "running": "INSERT INTO pgqueue.job_running (state, task, lock_key, holds, worker_id, claim, started_at) "
    "VALUES ('running', 'x', 'a', true, 77, 1, now())",
    "granted": "INSERT INTO pgqueue.job_available (task, queue, rank, lock_key, holds) "
    "VALUES ('x', 'q', 10, 'a', true)",
    "held for a retry": "INSERT INTO pgqueue.job_scheduled (state, task, lock_key, holds, run_at) "
    "VALUES ('scheduled', 'x', 'a', true, now() + interval '1 hour')",
    "parked with it": "INSERT INTO pgqueue.job_blocked (state, task, key, lock_key, holds) "
    "VALUES ('blocked', 'x', 'limit:l', 'a', true)",
    "in line": "INSERT INTO pgqueue.job_blocked (state, task, key, lock_key) VALUES ('blocked', 'x', 'lock:a', 'a')",
}
LOCK = "SELECT pg_advisory_xact_lock(hashtextextended('pgqueue.lock:a', 7))"


@pytest.fixture
async def desks(dsn: str) -> AsyncIterator[Callable[[], Desk]]:
    """Makes desks that look for keys; closed at the end."""
    made: list[Desk] = []

    def make() -> Desk:
        made.append(desk := Desk(dsn))
        desk.fetcher.keyed_claim.left = KEYED_CLAIMS
        return desk

    yield make
    for desk in made:
        await desk.close()


def put(eyes: Eyes, *keys: str | None, **columns: Any) -> list[int]:
    names = ", ".join(["lock_key", *columns])
    places = ", ".join(["%s"] * (1 + len(columns)))
    insert = f"INSERT INTO pgqueue.job (task, {names}) VALUES ('x', {places}) RETURNING id"  # noqa: S608
    return [eyes.one(insert, key, *columns.values()) for key in keys]


def put_distinct(eyes: Eyes, number: int) -> None:
    eyes.do("INSERT INTO pgqueue.job (task, lock_key) SELECT 'x', 'k' || n FROM generate_series(1, %s) AS n", number)


def eighth(eyes: Eyes) -> int:
    """How many keys all workers together may lock."""
    settings = "current_setting('max_locks_per_transaction')::integer * current_setting('max_connections')::integer / 8"
    return int(eyes.one(f"SELECT {settings}"))


async def test_the_first_job_of_a_free_key_runs_at_once_and_the_next_is_parked(
    desks: Callable[[], Desk], eyes: Eyes
) -> None:
    a1, a2, b, plain = put(eyes, "a", "a", "b", None)
    desk = desks()
    assert [job.id for job in await desk.park()] == [plain, a1, b]
    assert eyes.all("SELECT id, holds, attempt FROM pgqueue.job_running ORDER BY id") == [
        (a1, True, 1),
        (b, True, 1),
        (plain, False, 1),
    ]
    assert eyes.all("SELECT id, key FROM pgqueue.job_blocked") == [(a2, "lock:a")]
    assert await desk.let_in() == []


@pytest.mark.parametrize("more", ["limit_key", "rate_key"])
async def test_one_that_needs_more_than_the_key_goes_the_long_way_and_is_not_overtaken(
    desks: Callable[[], Desk], eyes: Eyes, more: str
) -> None:
    first = put(eyes, "a", **{more: "x"}) + put(eyes, "a")
    assert await desks().park() == []
    assert eyes.all("SELECT id, key FROM pgqueue.job_blocked ORDER BY id") == [(id, "lock:a") for id in first]


async def test_when_it_ends_the_next_in_line_is_let_in(desks: Callable[[], Desk], eyes: Eyes) -> None:
    first, second = put(eyes, "a", "a")
    desk = desks()
    [job] = await desk.park()
    assert job.id == first
    await desk.let_in()
    await desk.complete(job)
    assert [job.id for job in await desk.let_in()] == [second]


@pytest.mark.parametrize("holder", HOLDERS)
async def test_a_key_that_is_held_or_waited_for_is_not_free(desks: Callable[[], Desk], eyes: Eyes, holder: str) -> None:
    eyes.do(HOLDERS[holder])
    job, free = put(eyes, "a", "b")
    assert [job.id for job in await desks().park()] == [free]
    assert eyes.state(job) == "blocked"


async def test_a_key_that_somebody_has_locked_is_not_waited_for(
    desks: Callable[[], Desk], eyes: Eyes, conn: psycopg.Connection
) -> None:
    job, free = put(eyes, "a", "b")
    conn.execute(LOCK)
    assert [job.id for job in await desks().park()] == [free]
    assert eyes.state(job) == "blocked"


async def test_the_lowest_id_of_a_key_goes_first_whatever_lane_is_asked_first(
    desks: Callable[[], Desk], eyes: Eyes
) -> None:
    [late] = put(eyes, "a", id=9)
    [early] = put(eyes, "a", id=3)
    assert [job.id for job in await desks().park()] == [early]
    assert eyes.state(late) == "blocked"


async def test_skip_ends_the_second_and_not_the_first(desks: Callable[[], Desk], eyes: Eyes) -> None:
    first, second = put(eyes, "a", "a", on_locked="skip")
    desk = desks()
    assert [job.id for job in await desk.park()] == [first]
    await desk.let_in()
    assert eyes.state(second) == "skipped"


async def test_claims_lock_keys_only_while_jobs_have_locks(desks: Callable[[], Desk], eyes: Eyes) -> None:
    desk = desks()
    desk.fetcher.keyed_claim.left = 0
    [first] = put(eyes, "a")
    assert await desk.park() == []
    [second] = put(eyes, "b")
    assert [job.id for job in await desk.park()] == [second]
    for _ in range(KEYED_CLAIMS):
        assert desk.fetcher.keyed_claim.left
        put(eyes, None, rate_key="r")  # a claim blocks it, and needs no lock for that
        await desk.park()
    assert not desk.fetcher.keyed_claim.left
    assert [job.id for job in await desk.let_in()] == [first]


async def test_all_workers_together_have_an_eighth_of_the_lock_table(
    desks: Callable[[], Desk], eyes: Eyes, conn: psycopg.Connection
) -> None:
    put(eyes, *"abcdefghij")
    share = eighth(eyes)
    lanes = {
        "queues": ["default"] * 20,
        "ranks": list(RANKS),
        "afters": [0] * 20,
        "uptos": [2**63 - 1] * 20,
        "n": 100,
        "tasks": ["x"],
    }
    said = conn.execute(text("keyed_claim_lock", "pgqueue").encode(), {**lanes, "workers": share // 3}).fetchone()
    assert said is not None and said[0] == share
    assert eyes.one("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND mode = 'ExclusiveLock'") == 3


@pytest.mark.parametrize("naive", [False, True])
async def test_a_claim_asks_for_no_more_jobs_than_it_may_lock_keys_so_nobody_is_parked_for_nothing(
    desks: Callable[[], Desk], eyes: Eyes, monkeypatch: pytest.MonkeyPatch, naive: bool
) -> None:
    """The naive version asks for as many as if nobody else took locks."""
    put_distinct(eyes, 300)
    desk, workers = desks(), eighth(eyes) // 40
    desk.state.other_workers = workers - 1
    if naive:
        real = desk.fetcher.keyed_claim.room
        monkeypatch.setattr(desk.fetcher.keyed_claim, "room", lambda n, workers: real(n, 1))
    taken = [len(await desk.park()) for _ in range(9)]
    if naive:
        assert eyes.states()["blocked"] > 100
    else:
        assert eyes.states() == {"running": 300}
        assert taken == [KEYED_LEAST, 40, 40, 40, 40, 40, 40, 28, 0]  # the first is told how many


async def test_where_the_lock_table_is_large_a_claim_of_jobs_with_keys_is_as_large_as_others(
    desks: Callable[[], Desk], eyes: Eyes
) -> None:
    assert eighth(eyes) > KEYED_MOST
    put_distinct(eyes, KEYED_LEAST + KEYED_MOST + 5)
    desk = desks()
    assert [len(await desk.park(2 * KEYED_MOST)) for _ in range(3)] == [KEYED_LEAST, KEYED_MOST, 5]


async def test_where_each_may_lock_very_few_keys_claims_do_not_become_tiny(
    desks: Callable[[], Desk], eyes: Eyes
) -> None:
    put_distinct(eyes, 3 * KEYED_LEAST)
    desk, workers = desks(), eighth(eyes)
    desk.state.other_workers = workers - 1
    for _ in range(2):
        assert len(await desk.park()) == 1
    assert eyes.states() == {"running": 2, "blocked": 2 * (KEYED_LEAST - 1), "available": KEYED_LEAST}


@pytest.mark.second
@pytest.mark.promise("L04")
async def test_claimers_who_meet_at_a_key_never_run_both(dsn: str, eyes: Eyes) -> None:
    assert await race_of_pairs(dsn, eyes, claimers=8, pairs=150) == 1
    assert eyes.states() == {"completed": 300}


@pytest.mark.promise("L04")
@pytest.mark.parametrize(("link", "running"), [(Link, 1), (EarlyClaim, 2), (UnlockedClaim, 2)])
async def test_a_claim_counts_in_a_snapshot_from_after_its_locks(
    dsn: str, eyes: Eyes, conn: psycopg.Connection, link: type[Link], running: int
) -> None:
    """One claim is stopped between its snapshot and its look at the key; another takes that key, if it can."""
    slow, quick = (Desk(dsn, (queue,), link=link(dsn, "pgqueue")) for queue in "ab")
    for queue in "ab":
        put(eyes, "k", queue=queue)
    try:
        for desk in (slow, quick):
            desk.fetcher.keyed_claim.left = KEYED_CLAIMS
        conn.execute("SELECT FROM pgqueue.worker WHERE id = %s FOR UPDATE", [slow.worker_id])
        claim = asyncio.create_task(slow.park())
        blocked = "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE %s = ANY (pg_blocking_pids(pid)))"
        await until(lambda: eyes.one(blocked, conn.info.backend_pid))
        await quick.park()
        conn.rollback()
        await claim
        assert eyes.states().get("running") == running
    finally:
        await slow.close()
        await quick.close()


@pytest.mark.promise("L19")
async def test_a_free_key_is_looked_up_whatever_waits_for_others(
    desks: Callable[[], Desk], eyes: Eyes, conn: psycopg.Connection
) -> None:
    eyes.do(
        "INSERT INTO pgqueue.job_blocked (state, task, key, lock_key) "
        "SELECT 'blocked', 'x', 'lock:busy' || n % 7, 'busy' || n % 7 FROM generate_series(1, 20000) AS n"
    )
    eyes.do("ANALYZE pgqueue.job_blocked, pgqueue.job_available")
    put(eyes, *(f"k{n}" for n in range(50)))
    desk = desks()
    lanes = {
        "queues": ["default"] * 20,
        "ranks": list(RANKS),
        "afters": [0] * 20,
        "uptos": [2**63 - 1] * 20,
        "n": 50,
        "tasks": ["x"],
    }
    conn.execute(text("sessions_settings", "pgqueue").encode())
    reading = {"queues": lanes["queues"], "ranks": lanes["ranks"], "others": [0] * 20, "beyond": NO_RANK}
    reading |= {"tasks": lanes["tasks"]}
    conn.execute(text("keyed_claim_reading", "pgqueue").encode(), reading)
    conn.execute(text("keyed_claim_lock", "pgqueue").encode(), {**lanes, "workers": 1})
    claim = {
        **lanes,
        "mosts": [50] * 20,
        "starts": "{}",
        "lines": "{}",
        "worker_id": desk.worker_id,
        "claim": 1,
    }
    explain = "EXPLAIN (ANALYZE, TIMING OFF) " + text("keyed_claim_move", "pgqueue")
    plan = [line for (line,) in conn.execute(explain.encode(), claim)]
    blocked = [line for line in plan if "Scan" in line and "job_blocked" in line and "CTE" not in line]
    assert len(blocked) == 2
    assert all("Index" in line and "loops=50" in line for line in blocked), blocked
    assert not [line for line in plan if "Seq Scan" in line]
    [ids] = [line for line in plan if "lock_key IS NOT NULL" in line and "IS TRUE" in line]
    assert "hashed SubPlan" in ids, ids


@pytest.mark.promise("F179")
async def test_an_unblocking_that_hangs_does_not_starve_other_jobs(
    dsn: str, eyes: Eyes, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[None] = []

    @task(name="hangs.limited", limit=1)
    async def limited() -> None: ...

    @task(name="hangs.plain")
    async def plain() -> None:
        ran.append(None)

    async def hangs(*args: Any) -> Any:
        await asyncio.Event().wait()

    async with work(dsn, limited, plain, concurrency=1) as worker:
        limited.enqueue(eyes.conn)
        await until(eyes.done(1))
        monkeypatch.setattr(worker.services.unblock_session, "_exchange", hangs)
        limited.using(priority=0).enqueue(eyes.conn)
        plain.enqueue_many(eyes.conn, [()] * 20)
        await until(lambda: len(ran) == 20, 10.0)
