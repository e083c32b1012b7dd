"""Where the rows of a key are begun to be read: no holder is ever left out, nobody in line for longer than is said."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import psycopg
import pytest
from keyed import Desk
from workers import Eyes

from pgqueue import starts
from pgqueue.moves import Moves
from pgqueue.sessions import Link, Session
from pgqueue.starts import BUSY_RATE, BUSY_TAKEN, FRONT, KEYS_MOST, LINE_SECONDS, SENT_LEAST, SENT_MOST, Starts
from pgqueue.statements import text, texts

Desks = Callable[..., Desk]


@pytest.fixture
async def desks(dsn: str) -> AsyncIterator[Desks]:
    """Makes desks; closed at the end."""
    made: list[Desk] = []

    def make(**options: Any) -> Desk:
        made.append(Desk(dsn, link=Link(dsn, "pgqueue", **options)))
        return made[-1]

    yield make
    for desk in made:
        await desk.close()


@pytest.fixture
def memory() -> Starts:
    """One that remembers, on connection 1."""
    made = Starts()
    made.on(1)
    return made


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time for lines: its one value."""
    now = [100.0]
    monkeypatch.setattr(starts, "monotonic", lambda: now[0])
    return now


def put(eyes: Eyes, number: int, key: str = "a", **columns: Any) -> list[int]:
    names = ", ".join(["lock_key", *columns])
    values = ", ".join(["%s"] * (1 + len(columns)))
    insert = f"INSERT INTO pgqueue.job (task, {names}) SELECT 'x', {values} FROM generate_series(1, %s) RETURNING id"  # noqa: S608
    return [job_id for (job_id,) in eyes.all(insert, key, *columns.values(), number)]


async def pass_through(desk: Desk, eyes: Eyes, number: int, key: str = "a") -> None:
    """Let so many jobs of the key run here, one after another, all but the first from its line."""
    put(eyes, number, key)
    await desk.take()
    while jobs := list(desk.jobs):
        await desk.complete(*jobs)
        await desk.let_in()


# What is remembered ---------------------------------------------------------------------------------------------------


def test_holders_begin_before_the_lowest_of_those_let_in_last(memory: Starts) -> None:
    assert memory.after("a") == 0
    memory.given(["a", "b"], 10)
    memory.given(["a"], 20)
    assert (memory.after("a"), memory.after("b"), memory.after("c")) == (19, 9, 0)


@pytest.mark.parametrize("connection", [None, 2])
def test_what_was_learned_on_one_connection_is_forgotten_on_another(memory: Starts, connection: int | None) -> None:
    for number in range(1 + SENT_LEAST):
        memory.given(["a"], 10 + number)
    busy(memory)
    last = 9 + SENT_LEAST
    assert (memory.after("a"), memory.often(), memory.behind("a")) == (last, f'{{"a":{last}}}', (11, BUSY_TAKEN))
    memory.on(connection)
    assert (memory.after("a"), memory.often(), memory.behind("a")) == (0, "{}", FRONT)


def test_behind_a_pooler_nothing_is_remembered(memory: Starts) -> None:
    memory.on(None)
    for number in range(BUSY_TAKEN + SENT_LEAST):
        memory.given(["a"], 10 + number)
        memory.let_in("a", 11, number)
    assert (memory.after("a"), memory.often(), memory.behind("a")) == (0, "{}", FRONT)


def test_with_a_claim_go_the_keys_given_often_and_not_too_many(memory: Starts) -> None:
    for number in range(1, SENT_LEAST + 1):
        memory.given(["a"], number)
        assert memory.often() == "{}"
    memory.given(["a"], 100)
    assert memory.often() == '{"a":99}'
    for number in range(SENT_LEAST + 1):
        memory.given([f"k{place}" for place in range(SENT_MOST)], 200 + number)
    assert '"a"' not in memory.often()
    assert memory.often().count(f":{199 + SENT_LEAST}") == SENT_MOST


def test_numbers_that_go_back_are_of_another_time_and_all_is_forgotten(memory: Starts) -> None:
    memory.given(["a", "b"], 10)
    memory.given(["b"], 10)
    assert (memory.after("a"), memory.after("b")) == (0, 9)
    memory.given(["c"], 3)
    assert (memory.after("b"), memory.after("c")) == (0, 2)


def test_however_many_keys_there_are_not_more_than_some_are_remembered(memory: Starts) -> None:
    for number in range(4 * KEYS_MOST):
        memory.given([f"k{number}"], number + 1)
        memory.let_in(f"k{number}", 11, number)
    kept = [number for number in range(4 * KEYS_MOST) if memory.after(f"k{number}")]
    assert KEYS_MOST <= len(kept) <= 2 * KEYS_MOST + 1
    assert kept[-1] == 4 * KEYS_MOST - 1
    assert len(memory._lines) <= KEYS_MOST


def busy(memory: Starts) -> None:
    for number in range(BUSY_TAKEN + 1):
        memory.let_in("a", 11, number)


def test_only_the_line_of_a_busy_key_is_begun_behind_its_front(memory: Starts, clock: list[float]) -> None:
    for number in range(1, BUSY_TAKEN):
        memory.let_in("a", 11, number)
        assert memory.behind("a") == FRONT
    memory.let_in("a", 11, 1000)
    assert memory.behind("a") == (11, 1000)


def test_one_from_which_few_were_let_in_lately_is_busy_no_more(memory: Starts, clock: list[float]) -> None:
    busy(memory)
    for few in (BUSY_RATE, BUSY_RATE - 1):
        clock[0] += LINE_SECONDS
        assert memory.behind("a") == FRONT
        for number in range(few):
            memory.let_in("a", 11, 1000 + number)
        assert memory.behind("a") == (11, 999 + few)
    clock[0] += LINE_SECONDS
    assert memory.behind("a") == FRONT
    memory.let_in("a", 11, 2000)
    assert memory.behind("a") == FRONT


def test_it_is_read_from_the_front_once_in_a_while(memory: Starts, clock: list[float]) -> None:
    busy(memory)
    assert memory.behind("a") == (11, BUSY_TAKEN)
    clock[0] += LINE_SECONDS
    assert memory.behind("a") == FRONT, "and until somebody was found there"
    assert memory.behind("a") == FRONT
    memory.let_in("a", 11, 1000)
    assert memory.behind("a") == (11, 1000)


@pytest.mark.parametrize(
    ("lowest", "read"),
    [((11, 1001), (11, 1000)), ((12, 1), (11, 1000)), ((11, 1000), FRONT), ((11, 7), FRONT), ((1, 2000), FRONT)],
)
def test_what_we_park_before_it_is_seen(memory: Starts, lowest: tuple[int, int], read: tuple[int, int]) -> None:
    busy(memory)
    memory.let_in("a", 11, 1000)
    memory.parked(["a", "b"], lowest)
    assert memory.behind("a") == read


@pytest.mark.parametrize("first", [(11, 1000), FRONT])
def test_what_we_park_while_a_line_is_asked_is_seen_by_the_next(memory: Starts, first: tuple[int, int]) -> None:
    """The answer may be from before it."""
    busy(memory)
    memory.let_in("a", 11, 1000)
    if first == FRONT:
        memory.parked(["a"], (1, 1))
    assert memory.behind("a") == first
    memory.parked(["a"], (11, 1001))
    memory.let_in("a", 11, 1002)
    assert memory.behind("a") == FRONT
    memory.let_in("a", 11, 1003)
    assert memory.behind("a") == (11, 1003)


def test_a_line_that_seems_to_be_at_its_end_is_read_once_more(memory: Starts) -> None:
    busy(memory)
    assert memory.ended("a")
    assert memory.behind("a") == FRONT
    assert not memory.ended("a"), "this time from the front"
    assert not memory.ended("b")


# No holder is left out ------------------------------------------------------------------------------------------------


@pytest.mark.promise("L04")
@pytest.mark.parametrize("naive", [False, True])
async def test_who_was_let_in_beside_others_hides_none_of_them(
    desks: Desks, eyes: Eyes, naive: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Limit 2, one runs, another comes in beside it: from there on the first would not be seen."""
    if naive:
        learn = Moves._learn
        monkeypatch.setattr(Moves, "_learn", lambda moves, rows, lowest, held: learn(moves, rows, lowest, ()))
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
        monkeypatch.setattr(Starts, "on", lambda memory, connection: setattr(memory, "_on", 1))
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
        monkeypatch.setattr(Starts, "on", lambda memory, connection: setattr(memory, "_on", 1))
    one, other = desks(), desks()
    for _ in range(3 + SENT_LEAST):
        [job_id] = put(eyes, 1)
        assert await one.take() == [job_id]
        await one.complete(*one.jobs)
        await one.let_in()
    assert one.fetcher._starts.often() != "{}"
    eyes.do("SELECT setval('pgqueue.job_hold_seq', 1)")
    await one.session.close()
    [holder] = put(eyes, 1)
    assert await other.take() == [holder]
    [second] = put(eyes, 1)
    assert [job.id for job in await one.park()] == ([second] if naive else [])


@pytest.mark.promise("L04")
async def test_what_was_made_for_one_connection_is_sent_on_no_other(dsn: str, eyes: Eyes) -> None:
    session = Session(Link(dsn, "pgqueue"), "admit")
    on = await session.ready()
    assert on == session.lasting
    insert = session.link.statement("admit_lock", keys=texts(["lock:a"]))
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
    assert desk.admit._moves.starts.after("lock:a") == 0


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


async def test_a_worker_of_the_version_before_draws_a_number_too(eyes: Eyes) -> None:
    """It names no such column."""
    eyes.do(
        "INSERT INTO pgqueue.job_running (state, task, worker_id, claim, started_at, lock_key, holds) "
        "VALUES ('running', 'x', 1, 1, now(), 'a', true)"
    )
    assert eyes.one("SELECT hold_pos FROM pgqueue.job_running") is not None


@pytest.mark.promise("L04")
async def test_a_holder_from_before_there_were_numbers_is_always_seen(desks: Desks, eyes: Eyes) -> None:
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


# Lines ----------------------------------------------------------------------------------------------------------------


async def test_one_parked_by_another_worker_waits_for_a_second_at_most(
    desks: Desks, eyes: Eyes, monkeypatch: pytest.MonkeyPatch, clock: list[float]
) -> None:
    """Of a busy key; an urgent one at that. By whoever parks it himself it is seen at once."""
    monkeypatch.setattr(starts, "BUSY_TAKEN", 2)
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
    clock[0] += LINE_SECONDS
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
    monkeypatch.setattr(starts, "BUSY_TAKEN", 2)
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


@pytest.mark.parametrize("size", [10, 40_000])
async def test_of_large_jobs_as_of_small_ones_the_line_is_remembered(desks: Desks, eyes: Eyes, size: int) -> None:
    """Their rows come in a message of their own, without their places."""
    desk = desks()
    ids = put(eyes, 3, args=json.dumps({"pad": "x" * size}))
    assert await desk.take() == ids[:1]
    for job_id in ids[1:]:
        await desk.complete(*desk.jobs)
        assert [job.id for job in await desk.let_in()] == [job_id]
    [line] = desk.admit._moves.starts._lines.values()
    assert (line.behind, line.taken) == ((11, ids[2]), 2)


# What it costs --------------------------------------------------------------------------------------------------------


def read(conn: psycopg.Connection, statement: str, params: dict[str, Any]) -> int:
    """Pages it touches; it is undone."""
    conn.execute(text("session_settings", "pgqueue").encode())
    explain = f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {text(statement, 'pgqueue')}"
    [(found,)] = conn.execute(explain.encode(), params).fetchall()
    conn.rollback()
    plan = found[0]["Plan"]
    return int(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])


@pytest.mark.promise("F08")
@pytest.mark.parametrize("remembers", [True, False])
async def test_under_a_snapshot_the_past_of_a_key_is_not_read_again(
    desks: Desks, dsn: str, eyes: Eyes, conn: psycopg.Connection, remembers: bool
) -> None:
    """An admit of a key of which 150 have gone, and of which 600 have. Naive is who begins at the first row always."""
    desk = desks()
    memory = desk.admit._moves.starts
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
            rank, job_id = memory.behind("lock:a") if remembers else FRONT
            params = {
                "keys": ["lock:a"], "queues": ["default"], "pools": [1], "slots": [1], "worker_id": desk.worker_id,
                "claim": 1, "afters": [memory.after("lock:a") if remembers else 0], "ranks": [rank], "ids": [job_id],
            }  # fmt: skip
            costs.append(read(conn, "admit_next", params))
    assert (costs[1] <= 1.5 * costs[0]) is remembers, costs
