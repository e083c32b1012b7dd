"""Where the holders of a key are begun to be read: none is ever left out."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import psycopg
import pytest
from lock_desk import ALLOW, Desk, Desks, desks, ending, put
from workers import Eyes

from pgqueue.database.sessions import Link, Session
from pgqueue.database.statements import text, texts
from pgqueue.worker.concurrency.holder_cursors import KEYS_MOST, SENT_LEAST, SENT_MOST, HolderCursors
from pgqueue.worker.concurrency.semaphores import Semaphores
from pgqueue.worker.concurrency.waiter_cursors import FRONT

__all__ = ["desks"]


@pytest.fixture
def memory() -> HolderCursors:
    """One that remembers, on connection 1."""
    made = HolderCursors()
    made.on(1)
    return made


def limited(eyes: Eyes, number: int, **columns: Any) -> list[int]:
    """So many jobs under the limit `k`; their ids."""
    names = ", ".join(["limit_key", *columns])
    values = ", ".join(["%s"] * (1 + len(columns)))
    insert = f"INSERT INTO pgqueue.job (task, {names}) SELECT 'x', {values} FROM generate_series(1, %s) RETURNING id"  # noqa: S608
    return [job_id for (job_id,) in eyes.all(insert, "k", *columns.values(), number)]


async def pass_through(desk: Desk, eyes: Eyes, number: int, key: str = "a") -> None:
    """Let so many jobs of the key run here, one after another, all but the first from its line."""
    put(eyes, number, key)
    await desk.take()
    while jobs := list(desk.jobs):
        await desk.complete(*jobs)
        await desk.let_in()


# What is remembered ---------------------------------------------------------------------------------------------------


def test_holders_begin_before_the_lowest_of_those_let_in_last(memory: HolderCursors) -> None:
    assert memory.after("a") == 0
    memory.granted(["a", "b"], 10)
    memory.granted(["a"], 20)
    assert (memory.after("a"), memory.after("b"), memory.after("c")) == (19, 9, 0)


@pytest.mark.parametrize("connection", [None, 2])
def test_what_was_learned_on_one_connection_is_forgotten_on_another(
    memory: HolderCursors, connection: int | None
) -> None:
    for number in range(1 + SENT_LEAST):
        memory.granted(["a"], 10 + number)
    last = 9 + SENT_LEAST
    assert (memory.after("a"), memory.often()) == (last, f'{{"a":{last}}}')
    memory.on(connection)
    assert (memory.after("a"), memory.often()) == (0, "{}")


def test_behind_a_pooler_nothing_is_remembered(memory: HolderCursors) -> None:
    memory.on(None)
    for number in range(1 + SENT_LEAST):
        memory.granted(["a"], 10 + number)
    assert (memory.after("a"), memory.often()) == (0, "{}")


def test_with_a_claim_go_the_keys_given_often_and_not_too_many(memory: HolderCursors) -> None:
    for number in range(1, SENT_LEAST + 1):
        memory.granted(["a"], number)
        assert memory.often() == "{}"
    memory.granted(["a"], 100)
    assert memory.often() == '{"a":99}'
    for number in range(SENT_LEAST + 1):
        memory.granted([f"k{place}" for place in range(SENT_MOST)], 200 + number)
    assert '"a"' not in memory.often()
    assert memory.often().count(f":{199 + SENT_LEAST}") == SENT_MOST


def test_numbers_that_go_back_are_of_another_time_and_all_is_forgotten(memory: HolderCursors) -> None:
    memory.granted(["a", "b"], 10)
    memory.granted(["b"], 10)
    assert (memory.after("a"), memory.after("b")) == (0, 9)
    memory.granted(["c"], 3)
    assert (memory.after("b"), memory.after("c")) == (0, 2)


def test_however_many_keys_there_are_not_more_than_some_are_remembered(memory: HolderCursors) -> None:
    for number in range(4 * KEYS_MOST):
        memory.granted([f"k{number}"], number + 1)
    kept = [number for number in range(4 * KEYS_MOST) if memory.after(f"k{number}")]
    assert KEYS_MOST <= len(kept) <= 2 * KEYS_MOST + 1
    assert kept[-1] == 4 * KEYS_MOST - 1


# No holder is left out ------------------------------------------------------------------------------------------------


@pytest.mark.promise("L04")
@pytest.mark.parametrize("naive", [False, True])
async def test_who_was_let_in_beside_others_hides_none_of_them(
    desks: Desks, eyes: Eyes, naive: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Limit 2, one runs, another comes in beside it: from there on the first would not be seen."""
    if naive:
        learn = Semaphores._learn
        hide = lambda moves, rows, summary: learn(moves, rows, msgspec.structs.replace(summary, held=[]))  # noqa: E731
        monkeypatch.setattr(Semaphores, "_learn", hide)
    desk = desks()
    ids = put(eyes, 1, lock_limit=2)
    assert await desk.take() == ids
    [first] = desk.jobs
    ids += put(eyes, 3, lock_limit=2)
    assert await desk.take() == ids[1:2], "beside the first"
    desk.admit.swept(["lock:a"])
    came = [job.id for job in await desk.let_in()]
    assert came == (ids[2:3] if naive else []), "the naive one lets a third in"
    assert eyes.states()["running"] == (3 if naive else 2)
    await desk.complete(first)


@pytest.mark.promise("L04")
@pytest.mark.parametrize("naive", [False, True])
async def test_on_another_server_the_numbers_may_begin_again(
    desks: Desks, eyes: Eyes, naive: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a failover that has lost the end of the sequence: whoever holds the key then has a lower number."""
    if naive:
        monkeypatch.setattr(HolderCursors, "on", lambda memory, connection: setattr(memory, "_on", 1))
    one, other = desks(), desks()
    await pass_through(one, eyes, 3 + SENT_LEAST)
    eyes.do("SELECT setval('pgqueue.job_hold_seq', 1)")
    await one.keys.close()
    await one.session.close()
    holder, waiting = put(eyes, 2)
    assert await other.take() == [holder]
    one.admit.swept(["lock:a"])
    await one.let_in()
    assert eyes.state(waiting) == ("running" if naive else "blocked")


@pytest.mark.promise("L04")
@pytest.mark.parametrize("naive", [False, True])
async def test_a_claim_knows_no_numbers_of_another_server(
    desks: Desks, eyes: Eyes, naive: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same of a claim that finds the key unlocked."""
    if naive:
        monkeypatch.setattr(HolderCursors, "on", lambda memory, connection: setattr(memory, "_on", 1))
    one, other = desks(), desks()
    for _ in range(3 + SENT_LEAST):
        [job_id] = put(eyes, 1)
        assert await one.take() == [job_id]
        await one.complete(*one.jobs)
        await one.let_in()
    assert one.fetcher._holder_cursors.often() != "{}"
    eyes.do("SELECT setval('pgqueue.job_hold_seq', 1)")
    await one.session.close()
    [holder] = put(eyes, 1)
    assert await other.take() == [holder]
    [second] = put(eyes, 1)
    assert [job.id for job in await one.park()] == ([second] if naive else [])


@pytest.mark.promise("L04")
async def test_what_was_made_for_one_connection_is_sent_on_no_other(dsn: str, eyes: Eyes) -> None:
    session = Session(Link(dsn, "pgqueue"), "unblock")
    on = await session.ready()
    assert on == session.lasting
    insert = session.link.statement("unblock_lock", keys=texts(["lock:a"]))
    await session.run(insert, on=on)
    await session.close()
    with pytest.raises(psycopg.OperationalError, match="not there any more"):
        await session.run(type(insert)("INSERT INTO pgqueue.job (task) VALUES ('x')", {}, list), on=on)
    assert eyes.states() == {}
    await session.run(insert, on=await session.ready())
    await session.close()


async def test_behind_a_pooler_no_session_is_a_lasting_one(desks: Desks, eyes: Eyes) -> None:
    desk = desks(prepare=False)
    await pass_through(desk, eyes, 3)
    assert (desk.session.lasting, desk.keys.lasting) == (None, None)
    assert desk.admit._semaphores.holder_cursors.after("lock:a") == 0


async def test_every_holder_of_a_lock_has_a_number_however_it_came(desks: Desks, eyes: Eyes) -> None:
    """Found free, let in the long way, the short way, and as granted; a plain job has none."""
    desk = desks()
    ids = [*put(eyes, 1, "free"), *put(eyes, 2, "long", lock_limit=2), *put(eyes, 2, "short")]
    plain = eyes.one("INSERT INTO pgqueue.job (task) VALUES ('x') RETURNING id")
    await desk.take()
    [short] = [job for job in desk.jobs if job.id == ids[3]]
    await desk.complete(short)
    assert [job.id for job in await desk.let_in()] == [ids[4]]
    [granted] = put(eyes, 1, "granted", holds=True)
    assert [job.id for job in await desk.park()] == [granted]
    numbered = dict(eyes.all("SELECT id, hold_pos IS NOT NULL FROM pgqueue.job_running"))
    running = [*ids[:3], ids[4], granted]
    assert numbered == {plain: False, **dict.fromkeys(running, True)}


async def test_a_holder_that_was_put_in_by_hand_has_a_number_too(eyes: Eyes) -> None:
    eyes.do(
        "INSERT INTO pgqueue.job_running (state, task, worker_id, claim, started_at, lock_key, holds) "
        "VALUES ('running', 'x', 1, 1, now(), 'a', true)"
    )
    assert eyes.one("SELECT hold_pos FROM pgqueue.job_running") is not None


@pytest.mark.promise("L04")
async def test_a_holder_without_a_number_is_always_seen(desks: Desks, eyes: Eyes) -> None:
    desk = desks()
    await pass_through(desk, eyes, 3)
    eyes.do(
        "INSERT INTO pgqueue.job_running (state, task, worker_id, claim, started_at, lock_key, holds, hold_pos) "
        "VALUES ('running', 'x', 1, 1, now(), 'a', true, NULL)"
    )
    put(eyes, 1)
    await desk.park()
    desk.admit.swept(["lock:a"])
    assert await desk.let_in() == []


@pytest.mark.promise("L04")
@pytest.mark.parametrize("naive", [False, True])
async def test_of_a_limit_the_oldest_holder_is_seen_however_many_came_and_went_beside_it(
    desks: Desks, eyes: Eyes, naive: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Limit 2, one runs for long. The naive one begins before those it has let in last, as for a lock that was free."""
    if naive:
        beside = HolderCursors.counted
        last = lambda starts, oldest, lowest: beside(starts, [(key, lowest or 1) for key, _ in oldest], lowest)  # noqa: E731
        monkeypatch.setattr(HolderCursors, "counted", last)
    desk = desks()
    eyes.do(ALLOW, 2)
    ids = limited(eyes, 6)
    assert await desk.take() == ids[:2]
    first, other = desk.jobs
    for job_id in ids[2:4]:
        await desk.complete(other)
        came = await desk.let_in()
        assert [job.id for job in came][:1] == [job_id]
        other = came[0]
        desk.admit.swept(["limit:k"])
        more = await desk.let_in()
        assert (more != []) is naive, "the naive one does not see the first, and lets a third in"
        if naive:
            return
    assert (
        desk.admit._semaphores.holder_cursors.after("limit:k")
        == eyes.one("SELECT hold_pos FROM pgqueue.job_running WHERE id = %s", first.id) - 1
    )


@pytest.mark.promise("L04")
async def test_of_a_limit_whoever_has_a_number_from_after_they_went_back_is_seen(desks: Desks, eyes: Eyes) -> None:
    """Beside one with a number from before: of all holders the lowest counts, whichever came last."""
    desk = desks()
    eyes.do(ALLOW, 3)
    ids = limited(eyes, 1)
    eyes.do("SELECT setval('pgqueue.job_hold_seq', 5000)")
    assert await desk.take() == ids
    eyes.do("SELECT setval('pgqueue.job_hold_seq', 1)")
    for _ in range(2):
        ids += limited(eyes, 1)
        assert await desk.take() == ids[-1:]
    limited(eyes, 1)
    assert await desk.take() == []
    assert eyes.states() == {"running": 3, "blocked": 1}


@pytest.mark.promise("L04")
@pytest.mark.parametrize("column", ["lock_key", "limit_key"])
async def test_a_holder_is_seen_wherever_it_was_put(desks: Desks, eyes: Eyes, column: str) -> None:
    """Handed back, interrupted, waiting for its retry with the key, due again: it is still read. One that is handed
    back has given its limit up."""
    desk = desks()
    eyes.do(ALLOW, 1)
    key = "lock:k" if column == "lock_key" else "limit:k"
    for _ in range(6):
        eyes.do(f"INSERT INTO pgqueue.job (task, {column}) VALUES ('x', 'k')")  # noqa: S608
    await desk.take()
    for _ in range(3):
        await desk.complete(*desk.jobs)
        await desk.let_in()
    [job] = desk.jobs
    starts = desk.admit._semaphores.holder_cursors
    later = {
        "delays": [0.0], "spents": [True], "snoozeds": [False], "holdings": [True], "outcomes": ["failed"],
        "error_types": ["E"], "messages": ["no"], "tracebacks": [None],
    }  # fmt: skip
    ways: list[tuple[str, dict[str, Any]]] = [
        *([("complete_release", {})] if column == "lock_key" else []),
        ("complete_interrupt", {"outcomes": ["interrupted"], "messages": [None]}),
        ("complete_retry", later),
    ]
    for name, params in ways:
        assert starts.after(key) > 0
        await desk.session.run(ending(desk.link, name, [job], desk.worker_id, **params))
        for _ in range(2):
            [(place, number)] = eyes.all("SELECT state, hold_pos FROM pgqueue.job WHERE holds")
            assert number > starts.after(key), (name, place)
            desk.admit.swept([key])
            assert await desk.let_in() == [], (name, place)
            if place == "scheduled":
                promote = desk.link.statement("scheduler_promote", after="-infinity", passed="{}", n=10, notify=True)
                [[(moved, *_)]] = await desk.session.run(promote)
                assert moved == 1
        [job] = await desk.park()
    await desk.complete(job)
    assert len(await desk.let_in()) == 1, "and when it has ended the next one comes"


# What it costs --------------------------------------------------------------------------------------------------------


def read(conn: psycopg.Connection, statement: str, params: dict[str, Any]) -> int:
    """Pages it touches; it is undone."""
    conn.execute(text("sessions_settings", "pgqueue").encode())
    return pages(conn, text(statement, "pgqueue"), params)


def pages(conn: psycopg.Connection, sql: str, params: dict[str, Any]) -> int:
    [(found,)] = conn.execute(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {sql}".encode(), params).fetchall()
    conn.rollback()
    plan = found[0]["Plan"]
    return int(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])


@pytest.mark.second
@pytest.mark.promise("F08")
@pytest.mark.parametrize("remembers", [True, False])
async def test_under_a_snapshot_the_past_of_a_key_is_not_read_again(
    desks: Desks, dsn: str, eyes: Eyes, conn: psycopg.Connection, remembers: bool
) -> None:
    """An admit of a key of which 150 have gone, and of which 600 have. Naive is who begins at the first row always."""
    desk = desks()
    starts, fronts = desk.admit._semaphores.holder_cursors, desk.admit.waiter_cursors
    put(eyes, 700, args=json.dumps({"pad": "x" * 1500}))  # so that few rows fit on a page
    costs = []
    with psycopg.connect(dsn) as holder:
        holder.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        holder.execute("SELECT 1")
        await desk.take()
        for number in (150, 450):
            for _ in range(number):
                await desk.complete(*desk.jobs)
                await desk.let_in()
            rank, job_id = fronts.position("lock:a") if remembers else FRONT
            params = {
                "keys": ["lock:a"], "queues": ["default"], "pools": [1], "slots": [1], "worker_id": desk.worker_id,
                "claim": 1, "afters": [starts.after("lock:a") if remembers else 0], "ranks": [rank], "ids": [job_id],
                "behind": [0], "tasks": ["x"],
            }  # fmt: skip
            costs.append(read(conn, "unblock_next", params))
    assert (costs[1] <= 1.5 * costs[0]) is remembers, costs


@pytest.mark.second
@pytest.mark.promise("F08")
@pytest.mark.parametrize("statement", ["unblock_limits", "unblock_read_limits"])
@pytest.mark.parametrize("remembers", [True, False])
async def test_under_a_snapshot_the_past_of_a_limit_is_not_read_again(
    desks: Desks, dsn: str, eyes: Eyes, conn: psycopg.Connection, remembers: bool, statement: str
) -> None:
    """The same of a limit: an admit, and the reading of those let in. Naive is who begins at the first row."""
    desk = desks()
    starts, fronts = desk.admit._semaphores.holder_cursors, desk.admit.waiter_cursors
    eyes.do(ALLOW, 2)
    limited(eyes, 700, args=json.dumps({"pad": "x" * 1500}))
    costs = []
    with psycopg.connect(dsn) as holder:
        holder.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        holder.execute("SELECT 1")
        await desk.take()
        for number in (75, 225):
            for _ in range(number):
                await desk.complete(*desk.jobs)
                await desk.let_in()
            if statement == "unblock_limits":
                rank, job_id = fronts.position("limit:k") if remembers else FRONT
                after = starts.after("limit:k") if remembers else 0
                params = {
                    "keys": ["limit:k"], "queues": ["default"], "pools": [1], "slots": [1], "worker_id": desk.worker_id,
                    "claim": 1, "afters": [after], "ranks": [rank], "ids": [job_id], "notify": False,
                    "tasks": ["x"],
                }  # fmt: skip
                costs.append(read(conn, statement, params))
            else:
                [job, _] = desk.jobs
                sql = text(statement, "pgqueue")
                if not remembers:
                    sql = sql.replace("r.claim = %(claim)s", "r.claim + 0 = %(claim)s")
                costs.append(pages(conn, sql, {"worker_id": desk.worker_id, "claim": job.claim}))
    assert (costs[1] <= 1.5 * costs[0]) is remembers, costs


PAST = """
WITH past AS (SELECT jsonb_build_object('pad', repeat('x', 1500)) AS args FROM generate_series(1, 500)), available AS (
    INSERT INTO pgqueue.job_available (state, task, lock_key, holds, hold_pos, args)
    SELECT 'available', 'past', 'a', true, nextval('pgqueue.job_hold_seq'), args FROM past
), scheduled AS (
    INSERT INTO pgqueue.job_scheduled (state, task, lock_key, holds, hold_pos, args, run_at)
    SELECT 'scheduled', 'past', 'a', true, nextval('pgqueue.job_hold_seq'), args, now() FROM past
)
INSERT INTO pgqueue.job_blocked (state, task, lock_key, holds, hold_pos, args, key)
SELECT 'blocked', 'past', 'a', true, nextval('pgqueue.job_hold_seq'), args, 'rate:r' FROM past;
DELETE FROM pgqueue.job WHERE task = 'past'
"""


@pytest.mark.promise("F08")
@pytest.mark.parametrize("statement", ["unblock_next", "unblock_move"])
async def test_under_a_snapshot_grants_of_long_ago_are_not_read_again(
    desks: Desks, dsn: str, eyes: Eyes, conn: psycopg.Connection, statement: str
) -> None:
    """Nor what waited for its retry with the key, or for a rate: holders elsewhere have numbers as well."""
    desk = desks()
    with psycopg.connect(dsn) as holder:
        holder.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        holder.execute("SELECT 1")
        put(eyes, 400)
        eyes.do(PAST)
        await desk.take()
        after = desk.admit._semaphores.holder_cursors.after("lock:a") or desk.fetcher._holder_cursors.after("a")
        params = {
            "keys": ["lock:a"], "queues": ["default"], "pools": [1], "slots": [1], "worker_id": desk.worker_id,
            "claim": 1, "ranks": [FRONT[0]], "ids": [FRONT[1]], "fresh": [], "heads": False, "notify": False,
            "behind": [0], "tasks": ["x"],
        }  # fmt: skip
        await desk.complete(*desk.jobs)
        knowing, naive = (read(conn, statement, params | {"afters": [begin]}) for begin in (after, 0))
    assert knowing + 200 <= naive, "five on a page, in three tables"
