"""Who gets a key: parked by the claim, let in by admit, one step after another, and many at once."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable
from typing import Any

import psycopg
import pytest
from lock_desk import Desk, OneStatement, Uncounted, Unlocked, race, rush
from statement_plans import buffers, nodes
from workers import Eyes

from pgqueue.database.sessions import Link
from pgqueue.database.statements import text
from pgqueue.jobs.job import Job

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


def keyed(eyes: Eyes, *keys: str | None, **columns: Any) -> list[int]:
    """Jobs with these keys, in this order; their ids."""
    names = ", ".join(["lock_key", *columns])
    places = ", ".join(["%s"] * (1 + len(columns)))
    insert = f"INSERT INTO pgqueue.job (task, {names}) VALUES ('x', {places}) RETURNING id"  # noqa: S608
    return [eyes.one(insert, key, *columns.values()) for key in keys]


def holders(eyes: Eyes) -> list[tuple[int, str]]:
    return eyes.all("SELECT id, state FROM pgqueue.job WHERE holds ORDER BY id")


# One step after another ----------------------------------------------------------------------------------------------


@pytest.mark.promise("L02")
async def test_a_claim_parks_what_needs_a_key_and_takes_the_rest(desks: Desks, eyes: Eyes) -> None:
    a1, a2, b1, free = keyed(eyes, "a", "a", "b", None)
    desk = desks()
    assert [job.id for job in await desk.park()] == [free]
    assert eyes.all("SELECT id, key, rank, attempt, holds FROM pgqueue.job_blocked ORDER BY id") == [
        (id, key, 11, 0, False) for id, key in ((a1, "lock:a"), (a2, "lock:a"), (b1, "lock:b"))
    ]
    let_in = await desk.let_in()
    assert sorted((job.id, job.lock_key, job.attempt) for job in let_in) == [(a1, "a", 1), (b1, "b", 1)]
    assert holders(eyes) == [(a1, "running"), (b1, "running")]
    assert eyes.state(a2) == "blocked"
    assert desk.fetcher._state.claims.settled == 3  # of plain jobs, of jobs with keys, of what was unblocked


@pytest.mark.promise("L08")
async def test_a_completion_lets_the_next_in_by_arrival(desks: Desks, eyes: Eyes) -> None:
    ids = keyed(eyes, *["a"] * 5, lock_limit=2)
    desk = desks()
    await desk.park()
    first = await desk.let_in()
    assert [job.id for job in first] == ids[:2]
    await desk.complete(first[1])
    [third] = await desk.let_in()
    assert third.id == ids[2]
    await desk.complete(first[0], third)
    assert [job.id for job in await desk.let_in()] == ids[3:]


async def test_urgent_jobs_come_first_among_those_that_wait(desks: Desks, eyes: Eyes) -> None:
    holder, slow, urgent = keyed(eyes, "a", "a") + keyed(eyes, "a", priority=0, rank=1)
    [slow, holder] = [holder, slow]
    desk = desks()
    await desk.park()
    order = []
    while jobs := await desk.let_in():
        order += [job.id for job in jobs]
        await desk.complete(*jobs)
    assert order == [urgent, slow, holder]


async def test_each_job_has_its_own_limit_and_the_first_in_line_holds_up_the_others(desks: Desks, eyes: Eyes) -> None:
    [two], [one], [three] = (keyed(eyes, "a", lock_limit=limit) for limit in (2, 1, 3))
    desk = desks()
    await desk.park()
    running = await desk.let_in()
    assert [job.id for job in running] == [two]  # `one` would be beside another, and `three` would pass it
    await desk.complete(*running)
    running = await desk.let_in()
    assert [job.id for job in running] == [one]
    desk.admit.blocked({"lock:a": ()})
    assert [job.id for job in await desk.let_in()] == [three]


async def test_without_a_slot_here_a_job_is_granted_to_the_front_and_the_key_is_taken(desks: Desks, eyes: Eyes) -> None:
    first, second, plain = keyed(eyes, "a", "a", None)
    desk, other = desks(), desks()
    desk.slots = 0
    assert await desk.take() == [plain]
    assert eyes.all("SELECT id, rank, holds FROM pgqueue.job_available") == [(first, 10, True)]
    other.admit.blocked({"lock:a": ()})
    assert await other.let_in() == []
    [job] = await other.park()
    assert (job.id, job.lock_key) == (first, "a")
    assert eyes.all("SELECT id, holds FROM pgqueue.job_running WHERE lock_key IS NOT NULL") == [(first, True)]
    assert eyes.state(second) == "blocked"


async def test_slots_are_counted_by_pool(desks: Desks, eyes: Eyes) -> None:
    ids = keyed(eyes, "a", "b", "c")
    desk = desks()
    desk.slots = 2

    def deliver(jobs: list[Job]) -> None:
        desk.jobs += jobs
        desk.slots -= len(jobs)

    desk.admit._deliver = deliver
    assert await desk.take() == ids[:2]
    assert holders(eyes) == [(ids[0], "running"), (ids[1], "running"), (ids[2], "available")]


async def test_queues_that_are_paused_or_not_served_are_passed_over(desks: Desks, eyes: Eyes) -> None:
    desk = desks("default", "paused")
    [paused], [unserved], [mine] = (keyed(eyes, "a", queue=queue) for queue in ("paused", "nobody", "default"))
    assert await desk.take() == [paused]
    eyes.do("DELETE FROM pgqueue.job_running")
    eyes.do("INSERT INTO pgqueue.job_available (task, queue, lock_key) VALUES ('x', 'paused', 'a')")
    await desk.park()
    eyes.do("INSERT INTO pgqueue.queue (name, paused_at) VALUES ('paused', now())")
    eyes.do(
        "WITH gone AS (DELETE FROM pgqueue.job_available WHERE id = %s RETURNING *) "
        "INSERT INTO pgqueue.job_blocked (state, id, key, lock_key, queue, rank, task) "
        "SELECT 'blocked', id, 'lock:a', 'a', queue, rank, task FROM gone",
        unserved,
    )
    desk.admit.blocked({"lock:a": ()})
    assert [job.id for job in await desk.let_in()] == [mine]


async def test_a_job_of_a_queue_that_another_worker_serves_is_granted_to_it(desks: Desks, eyes: Eyes) -> None:
    here, there = desks(), desks("other")
    [first], [second] = keyed(eyes, "a"), keyed(eyes, "a", queue="other")
    assert await here.take() == [first]
    assert await there.take() == []
    [job] = here.jobs
    await here.complete(job)
    assert await here.let_in() == []
    assert [job.id for job in await there.park()] == [second]


@pytest.mark.promise("L10")
async def test_a_retry_gives_the_key_up_unless_it_is_to_be_held(desks: Desks, eyes: Eyes) -> None:
    first, second, third = keyed(eyes, "a", "a", "a")
    desk = desks()
    await desk.park()

    async def fail(holding: bool) -> None:
        one: dict[str, Any] = {
            "delays": [60.0],
            "spents": [True],
            "snoozeds": [False],
            "holdings": [holding],
            "outcomes": ["failed"],
        }
        await desk.end("complete_retry", jobs, **one, error_types=["E"], messages=["m"], tracebacks=[None])

    jobs = await desk.let_in()
    await fail(False)
    jobs = await desk.let_in()
    assert [job.id for job in jobs] == [second]
    await fail(True)
    assert await desk.let_in() == []
    assert holders(eyes) == [(second, "scheduled")]
    assert (eyes.state(first), eyes.state(third)) == ("scheduled", "blocked")
    # When its time comes it runs, without waiting for itself.
    promote = desk.link.statement("scheduler_promote", after="-infinity", passed="{}", n=10, notify=False)
    eyes.do(
        "WITH due AS (DELETE FROM pgqueue.job_scheduled WHERE id = %s RETURNING *) "
        "INSERT INTO pgqueue.job_scheduled (state, id, task, lock_key, holds, attempt, run_at) "
        "SELECT state, id, task, lock_key, holds, attempt, now() FROM due",
        second,
    )
    await desk.session.run(promote)
    assert await desk.take() == [second]


@pytest.mark.promise("L07")
async def test_rescue_and_release_keep_the_key_with_the_job(desks: Desks, eyes: Eyes) -> None:
    first, second = keyed(eyes, "a", "a")
    desk, other = desks(), desks()
    assert await desk.take() == [first]
    asked = {"n": 10, "first": True, "passed": "{}", "notify": True}
    await desk.session.run(desk.link.statement("rescue_jobs", worker_id=desk.worker_id, **asked))
    assert holders(eyes) == [(first, "available")]
    other.admit.blocked({"lock:a": ()})
    assert await other.let_in() == []
    assert await other.take() == [first]
    await other.end("complete_release", list(other.jobs))
    assert holders(eyes) == [(first, "available")]
    assert await other.take() == [first]
    assert eyes.state(second) == "blocked"


async def test_a_suspect_is_granted_to_its_lane_so_that_it_comes_alone(desks: Desks, eyes: Eyes) -> None:
    [suspect] = keyed(eyes, "a", crashes=1, rank=-2)
    desk = desks()
    assert await desk.take() == []
    assert eyes.all("SELECT id, rank, holds FROM pgqueue.job_available") == [(suspect, -2, True)]
    assert await desk.take() == [suspect]


async def test_a_worker_that_was_taken_for_dead_admits_nobody(desks: Desks, eyes: Eyes) -> None:
    [job] = keyed(eyes, "a")
    desk, other = desks(), desks()
    await desk.park()
    eyes.do("UPDATE pgqueue.worker SET dead_at = now() WHERE id = %s", desk.worker_id)
    assert await desk.let_in() == []
    assert await other.sweep() == [job]


async def test_the_table_refuses_to_run_a_keyed_job_that_does_not_hold_its_key(desks: Desks, eyes: Eyes) -> None:
    """What a worker of an older version, or a naive claim, would do."""
    desk = desks()
    with pytest.raises(psycopg.errors.CheckViolation, match="job_running_is_held"):
        eyes.do(
            "INSERT INTO pgqueue.job_running (state, id, task, worker_id, claim, started_at, lock_key) "
            "VALUES ('running', 1, 'x', %s, 1, now(), 'a')",
            desk.worker_id,
        )


# What a key that has no room does -------------------------------------------------------------------------------------


@pytest.mark.promise("L09")
async def test_skip_ends_what_finds_no_room_and_leaves_the_holder_alone(desks: Desks, eyes: Eyes) -> None:
    first, second, third = keyed(eyes, "a", "a", "a", on_locked="skip", lock_limit=2)
    desk = desks()
    await desk.park()
    running = await desk.let_in()
    assert [job.id for job in running] == [first, second]
    assert eyes.all("SELECT id, state, reason, attempt, started_at FROM pgqueue.job_done") == [
        (third, "skipped", "locked", 0, None)
    ]
    assert holders(eyes) == [(first, "running"), (second, "running")]
    waiting = keyed(eyes, "a", lock_limit=2)
    assert await desk.take() == []
    assert [eyes.state(id) for id in waiting] == ["blocked"]
    assert desk.admit.skipped == 1


async def test_skip_never_ends_a_job_that_has_started_before(desks: Desks, eyes: Eyes) -> None:
    holder, again = keyed(eyes, "a") + keyed(eyes, "a", on_locked="skip", attempt=1)
    desk = desks()
    assert await desk.take() == [holder]
    assert eyes.state(again) == "blocked"


async def test_skip_gives_room_first_in_order(desks: Desks, eyes: Eyes) -> None:
    """A claim brings three at once to a free key: the first runs, the others are skipped, none of them runs later."""
    ids = keyed(eyes, "a", "a", "a", on_locked="skip")
    desk = desks()
    assert await desk.take() == ids[:1]
    assert [eyes.state(id) for id in ids] == ["running", "skipped", "skipped"]


@pytest.mark.promise("L16")
async def test_once_keeps_one_that_waits_and_skips_the_others(desks: Desks, eyes: Eyes) -> None:
    ids = keyed(eyes, "a", "a", "a", on_locked="once")
    desk = desks()
    assert await desk.take() == ids[:1]
    running = list(desk.jobs)
    assert [eyes.state(id) for id in ids] == ["running", "blocked", "skipped"]
    [late] = keyed(eyes, "a", on_locked="once")
    await desk.take()
    assert (eyes.state(ids[1]), eyes.state(late)) == ("blocked", "skipped")
    desk.jobs.clear()
    await desk.complete(*running)
    assert [job.id for job in await desk.let_in()] == [ids[1]]


@pytest.mark.promise("L16")
async def test_once_counts_only_on_one_of_its_own_task(desks: Desks, eyes: Eyes) -> None:
    """Another task's run would not serve it."""
    desk = desks()
    holder = keyed(eyes, "a")
    other = eyes.one("INSERT INTO pgqueue.job (task, lock_key, on_locked) VALUES ('other', 'a', 'once') RETURNING id")
    [mine] = keyed(eyes, "a", on_locked="once")
    assert await desk.take() == holder
    assert (eyes.state(other), eyes.state(mine)) == ("blocked", "blocked")


@pytest.mark.promise("L16")
async def test_once_does_not_count_on_one_that_is_being_cancelled(desks: Desks, eyes: Eyes, dsn: str) -> None:
    desk = desks()
    holder, kept = keyed(eyes, "a", "a", on_locked="once")
    assert await desk.take() == [holder]
    with psycopg.connect(dsn) as conn:
        conn.execute("SELECT FROM pgqueue.job_blocked WHERE id = %s FOR UPDATE", [kept])
        [late] = keyed(eyes, "a", on_locked="once")
        await desk.take()
        assert eyes.state(late) == "blocked"
        conn.execute("DELETE FROM pgqueue.job_blocked WHERE id = %s", [kept])


async def test_one_whose_claimer_died_before_it_could_decide_is_skipped_by_the_sweep(desks: Desks, eyes: Eyes) -> None:
    desk, dead = desks(), desks()
    [holder] = keyed(eyes, "a")
    assert await desk.take() == [holder]
    [orphan] = keyed(eyes, "a", on_locked="skip")
    await dead.park()
    assert await desk.sweep() == []
    assert eyes.state(orphan) == "skipped"


async def test_those_who_wait_for_the_result_of_a_skipped_job_are_told(desks: Desks, eyes: Eyes, dsn: str) -> None:
    holder, skipped = keyed(eyes, "a", "a", on_locked="skip")
    eyes.do("INSERT INTO pgqueue.job_waiter (job_id) VALUES (%s)", skipped)
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute(f'LISTEN "pgqueue.:ended.{skipped}"'.encode())
        assert await desks().take() == [holder]
        assert len(list(conn.notifies(timeout=30, stop_after=1))) == 1


# The sweep ------------------------------------------------------------------------------------------------------------


@pytest.mark.promise("F22")
async def test_a_kill_between_completion_and_admit_costs_a_sweep(desks: Desks, eyes: Eyes) -> None:
    desk, dead = desks(), desks()
    first, second = keyed(eyes, "a", "a")
    assert await dead.take() == [first]
    await dead.complete(*dead.jobs)  # and dies, before it lets anybody in
    assert eyes.state(second) == "blocked"
    assert await desk.take() == []
    assert await desk.sweep() == [second]


@pytest.mark.promise("F22")
async def test_a_head_whose_cancel_rolls_back_is_found_by_the_sweep(desks: Desks, eyes: Eyes, dsn: str) -> None:
    desk = desks()
    first, second = keyed(eyes, "a", "a")
    assert await desk.take() == [first]
    running = list(desk.jobs)
    with psycopg.connect(dsn) as conn:
        conn.execute("SELECT FROM pgqueue.job_blocked WHERE id = %s FOR UPDATE", [second])
        await desk.complete(*running)
        assert await desk.let_in() == []
        conn.rollback()
    assert await desk.sweep() == [second]


@pytest.mark.promise("F22")
async def test_a_grant_of_a_paused_queue_goes_back_to_its_place_and_others_get_the_key(
    desks: Desks, eyes: Eyes
) -> None:
    desk = desks("default", "stopped")
    desk.slots = 0
    [granted], [behind], [other] = (keyed(eyes, "a", queue=queue) for queue in ("stopped", "stopped", "default"))
    await desk.take()
    assert holders(eyes) == [(granted, "available")]
    eyes.do("INSERT INTO pgqueue.queue (name, paused_at) VALUES ('stopped', now())")
    desk.slots = 1
    assert await desk.sweep() == [other]
    eyes.do("DELETE FROM pgqueue.queue")
    assert eyes.all("SELECT id, rank FROM pgqueue.job_blocked ORDER BY rank, id") == [(granted, 10), (behind, 11)]


async def test_a_grant_that_only_waits_for_a_slot_stays(desks: Desks, eyes: Eyes) -> None:
    desk = desks()
    desk.slots = 0
    [granted] = keyed(eyes, "a")
    await desk.take()
    assert await desk.sweep() == []
    assert holders(eyes) == [(granted, "available")]


async def test_one_worker_sweeps_at_a_time(desks: Desks) -> None:
    one, two = desks(), desks()
    assert await one.sweeping.sweep(4.5)
    assert not await two.sweeping.sweep(4.5)
    assert await two.sweeping.sweep(0.0)


async def test_a_clock_that_stepped_back_does_not_stop_the_sweep(desks: Desks, eyes: Eyes) -> None:
    eyes.do("UPDATE pgqueue.duty SET done_at = now() + interval '1 hour'")
    assert await desks().sweeping.sweep(4.5)


async def test_a_sweep_goes_through_all_keys(desks: Desks, eyes: Eyes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pgqueue.worker.concurrency.sweep.KEYS_MOST", 7)
    ids = keyed(eyes, *[f"k{number:03}" for number in range(100)])
    desk, dead = desks(), desks()
    await dead.park()
    assert await desk.sweep() == ids


# Two that meet --------------------------------------------------------------------------------------------------------


@pytest.mark.second
async def test_a_key_that_somebody_holds_in_an_admit_that_hangs_keeps_nobody_else_out(
    desks: Desks, eyes: Eyes, dsn: str
) -> None:
    ids = keyed(eyes, *"abcdefgh")
    desk = desks()
    await desk.park()
    with psycopg.connect(dsn) as conn:
        conn.execute("SELECT pg_advisory_xact_lock(hashtextextended('pgqueue.lock:c', 7))")
        let_in = await desk.let_in()
        assert sorted(job.id for job in let_in) == ids[:2] + ids[3:]
        assert desk.fetcher._state.claims.settled == desk.fetcher._state.claims._last
    assert await desk.sweep() == [ids[2]]


async def test_a_second_row_of_a_running_id_is_put_aside(desks: Desks, eyes: Eyes) -> None:
    desk = desks()
    first = keyed(eyes, "a")
    assert await desk.take() == first
    eyes.do(
        "INSERT INTO pgqueue.job_available (id, enqueued_at, task, lock_key) "
        "SELECT id, enqueued_at, 'double', 'b' FROM pgqueue.job_running"
    )
    await desk.park()
    assert await desk.let_in() == []
    assert eyes.all("SELECT task, reason FROM pgqueue.job_dead") == [("double", "refused")]


@pytest.mark.promise("F29")
async def test_a_granted_job_is_blocked_again_beside_a_waiting_one_with_its_id(desks: Desks, eyes: Eyes) -> None:
    """Its queue is paused. Before, no sweep came to its end while the two stood there."""
    desk = desks()
    eyes.do("INSERT INTO pgqueue.queue (name, paused_at) VALUES ('paused', now())")
    eyes.do(
        "INSERT INTO pgqueue.job_available (id, task, queue, lock_key, holds, hold_pos, rank) "
        "VALUES (5, 'granted', 'paused', 'a', true, 1, 10)"
    )
    eyes.do(
        "INSERT INTO pgqueue.job_blocked (id, state, key, task, lock_key) VALUES (5, 'blocked', 'lock:a', 'x', 'a')"
    )
    assert await desk.sweep() == [5]
    [(id, key, holds)] = eyes.all("SELECT id, key, holds FROM pgqueue.job_blocked WHERE task = 'granted'")
    assert (key, holds) == ("lock:a", False) and id > 5


async def test_long_rows_of_one_key_are_parked_ahead_and_take_nobodys_place(desks: Desks, eyes: Eyes) -> None:
    eyes.do("INSERT INTO pgqueue.job (task, lock_key) SELECT 'x', 'busy' FROM generate_series(1, 5000)")
    free = keyed(eyes, *[None] * 20)
    desk = desks()
    got = [job.id for _ in range(2) for job in await desk.park(10)]
    assert got == free
    for _ in range(6):
        await desk.park(10)
    assert eyes.states() == {"blocked": 5000, "running": 20}
    assert len(await desk.let_in()) == 1


async def test_what_is_parked_beyond_the_watermark_stays_found(desks: Desks, eyes: Eyes) -> None:
    """A lane full of keyed jobs moves the cursor as if they had been taken; none is left, none is walked over again."""
    ids = keyed(eyes, "a", None, "a", None, "b", None)
    desk = desks()
    got: set[int] = set()
    for _ in range(12):
        got |= {job.id for job in await desk.park(1)}
        got |= {job.id for job in await desk.let_in()}
    assert got == {ids[0], ids[1], ids[3], ids[4], ids[5]}
    assert eyes.states() == {"running": 5, "blocked": 1}


# Many at once ---------------------------------------------------------------------------------------------------------


@pytest.mark.second
@pytest.mark.promise("L04")
@pytest.mark.promise("L08")
@pytest.mark.parametrize(("limit", "jobs"), [(1, 80), (3, 150)])
async def test_many_claimers_of_one_key_never_exceed_its_limit(dsn: str, eyes: Eyes, limit: int, jobs: int) -> None:
    assert await race(dsn, eyes, claimers=8, rounds=jobs, limit=limit) <= limit
    assert eyes.states() == {"completed": jobs}


@pytest.mark.promise("L04")
@pytest.mark.parametrize("naive", [Unlocked, OneStatement, Uncounted])
async def test_the_naive_versions_exceed_it(dsn: str, eyes: Eyes, naive: type[Link]) -> None:
    """Without the lock, or counting in the statement that takes it, or not counting: what the test above would see."""
    assert await race(dsn, eyes, claimers=12, rounds=400, limit=1, link=naive) > 1


@pytest.mark.second
@pytest.mark.promise("L04", "L08")
@pytest.mark.parametrize("rounds", [10, pytest.param(10_000, marks=pytest.mark.long)])
@pytest.mark.parametrize("limit", [1, 3, 10])
async def test_of_64_who_ask_at_once_again_and_again_never_more_than_the_limit_run(
    dsn: str, eyes: Eyes, limit: int, rounds: int
) -> None:
    assert await rush(dsn, eyes, claimers=64, rounds=rounds, limit=limit) == limit


@pytest.mark.second
@pytest.mark.promise("L04")
@pytest.mark.parametrize("naive", [Unlocked, OneStatement, Uncounted])
async def test_of_64_who_ask_the_naive_versions_let_too_many_run(dsn: str, eyes: Eyes, naive: type[Link]) -> None:
    """Who looks first and takes then, whether in two round trips or in one statement, and who does not look."""
    assert await rush(dsn, eyes, claimers=64, rounds=200, limit=1, link=naive) > 1


# What it costs --------------------------------------------------------------------------------------------------------


@pytest.mark.second
@pytest.mark.promise("L19")
@pytest.mark.promise("F07")
async def test_an_admit_costs_the_same_however_many_keys_and_waiting_jobs_there_are(
    desks: Desks, eyes: Eyes, conn: psycopg.Connection
) -> None:
    desk = desks()
    params = {
        "keys": ["lock:mine"], "afters": [0], "ranks": [-32768], "ids": [0], "fresh": [], "heads": True,
        "queues": ["default"], "pools": [1], "slots": [1],
        "worker_id": desk.worker_id, "claim": 1, "notify": False, "tasks": ["x"],
    }  # fmt: skip
    blocked = (
        "INSERT INTO pgqueue.job_blocked (state, task, key, lock_key) SELECT 'blocked', 'x', 'lock:' || k, k "
        "FROM (SELECT coalesce(%s, 'k' || n) FROM generate_series(1, %s) n) AS t (k)"
    )
    running = (
        "INSERT INTO pgqueue.job_running (state, task, worker_id, claim, started_at, lock_key, holds) "
        "SELECT 'running', 'x', 1, 1, now(), 'k' || n, true FROM generate_series(1, %s) n"
    )
    costs = []
    for number in (100, 20_000):
        eyes.do(running, number)
        eyes.do(blocked, None, number)
        eyes.do(blocked, "mine", number)
        eyes.do("ANALYZE")
        cost, plan = buffers(conn, text("unblock_move", "pgqueue"), params)
        costs.append(cost)
        scans = {node.get("Relation Name"): node["Node Type"] for node in plan if "Scan" in node["Node Type"]}
        for table in ("job_blocked", "job_running", "job_available", "job_scheduled"):
            assert scans[table] in ("Index Scan", "Index Only Scan", "Tid Scan"), (table, scans)
    assert costs[1] <= 2 * costs[0], costs


STATEMENTS = [
    "unblock_move",
    "unblock_skip",
    "unblock_next",
    "unblock_read",
    "unblock_limits",
    "unblock_read_limits",
    "unblock_waiters",
    "sweep_keys",
    "locks_release",
]


@pytest.mark.parametrize("statement", STATEMENTS)
def test_a_planner_that_knows_nothing_takes_the_right_indexes(conn: psycopg.Connection, statement: str) -> None:
    """As the worker plans it, on tables that have been empty so far: the plan may be kept for a while."""
    sql = text(statement, "pgqueue")
    names = list(dict.fromkeys(re.findall(r"%\((\w+)\)s", sql)))
    numbered = re.sub(r"%\((\w+)\)s", lambda match: f"${names.index(match[1]) + 1}", sql)
    for setting in ("enable_seqscan = off", "enable_bitmapscan = off", "plan_cache_mode = force_generic_plan"):
        conn.execute(f"SET {setting}".encode())
    conn.execute(f"PREPARE one AS {numbered}".encode())
    values = ", ".join(["NULL"] * len(names))
    [(plan,)] = conn.execute(f"EXPLAIN (FORMAT JSON) EXECUTE one ({values})".encode()).fetchall()
    found = nodes(plan[0]["Plan"])
    used = {node["Index Name"] for node in found if node.get("Index Name", "").startswith("job_")}
    assert used <= {
        "job_blocked_line", "job_blocked_id", "job_blocked_lock_holds", "job_running_lock", "job_available_lock_holds",
        "job_scheduled_lock_holds", "job_waiter_job", "job_running_limit", "job_available_limit_holds",
        "job_scheduled_limit_holds", "job_blocked_limit_holds", "job_blocked_limit_line",
        *(["job_running_worker"] if statement == "unblock_read_limits" else []),
    }  # fmt: skip
    walked = [node for node in found if node.get("Index Name", "").startswith("job_") and "Index Cond" not in node]
    assert walked == []


async def test_a_sweep_jumps_from_key_to_key(desks: Desks, eyes: Eyes, conn: psycopg.Connection) -> None:
    desks()
    eyes.do(
        "INSERT INTO pgqueue.job_blocked (state, task, key, lock_key) "
        "SELECT 'blocked', 'x', 'lock:' || n % 10, (n % 10)::text FROM generate_series(1, 20000) n"
    )
    eyes.do(
        "INSERT INTO pgqueue.job_running (state, task, worker_id, claim, started_at, lock_key, holds) "
        "SELECT 'running', 'x', 1, 1, now(), n::text, true FROM generate_series(0, 9) n"
    )
    eyes.do("ANALYZE")
    cost, _ = buffers(conn, text("sweep_keys", "pgqueue"), {"after": "", "n": 1000})
    assert cost < 400, "ten keys, some pages each"


@pytest.mark.second
@pytest.mark.promise("L17")
async def test_a_job_that_waits_is_claimed_once(dsn: str, eyes: Eyes) -> None:
    """It enters the lane when it is enqueued and at most once more, when it is granted: no spin."""
    before = eyes.one("SELECT last_value FROM pgqueue.job_pos_seq")
    await race(dsn, eyes, claimers=4, rounds=50, limit=1)
    assert eyes.one("SELECT last_value FROM pgqueue.job_pos_seq") - before <= 2 * 50


async def test_a_plain_job_takes_no_lock_of_a_key(desks: Desks, eyes: Eyes) -> None:
    desk = desks()
    ids = keyed(eyes, *[None] * 10)
    assert await desk.take() == ids
    await desk.complete(*desk.jobs)
    assert (desk.admit.moves, desk.admit.pending, desk.keys.generation) == (0, 0, 0)


async def test_the_lock_on_keys_has_its_own_timeout(desks: Desks, dsn: str) -> None:
    desk = desks()
    lock = desk.link.statement("unblock_lock", keys=["lock:z", "lock:a"])
    shown = desk.link.statement("sessions_identity")
    [_, [(timeout, commit)], _] = await desk.keys.run(
        lock,
        type(lock)("SELECT current_setting('lock_timeout'), current_setting('synchronous_commit')", {}, list),
        shown,
    )
    assert (timeout, commit) == ("1s", "on")
