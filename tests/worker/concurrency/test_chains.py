"""Chains: several of a line come in at once, run one after the other, and go back if the one before keeps the key."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any

import psycopg
import pytest
from lock_desk import Desk, race
from spans import Spans
from workers import Eyes, until, wait_until, work, workers

import pgqueue
from pgqueue import Lock, Worker
from pgqueue.admin import actions
from pgqueue.admin.locks import locks, release
from pgqueue.client.tasks import Task, task
from pgqueue.database.sessions import Link
from pgqueue.database.statements import Statement
from pgqueue.jobs.fields import claimed
from pgqueue.jobs.job import Job
from pgqueue.jobs.retry import RetryPolicy
from pgqueue.worker.concurrency.chains import Chains
from pgqueue.worker.held_jobs import HeldJobs
from pgqueue.worker.liveness.rescue import Rescue

BEHIND = 3
Desks = Callable[..., Desk]


@pytest.fixture
async def desks(dsn: str) -> AsyncIterator[Desks]:
    """Makes desks that let three in behind each holder; closed at the end."""
    made: list[Desk] = []

    def make(queues: tuple[str, ...] = ("default",), link: type[Link] = Link) -> Desk:
        made.append(Desk(dsn, queues, link(dsn, "pgqueue")))
        made[-1].behind = BEHIND
        return made[-1]

    yield make
    for desk in made:
        await desk.close()


def put(eyes: Eyes, number: int, key: str = "a", **columns: Any) -> list[int]:
    names = ", ".join(["lock_key", *columns])
    places = ", ".join(["%s"] * (1 + len(columns)))
    insert = f"INSERT INTO pgqueue.job (task, {names}) VALUES ('x', {places}) RETURNING id"  # noqa: S608
    return [eyes.one(insert, key, *columns.values()) for _ in range(number)]


def ids(jobs: list[Job]) -> list[int]:
    return [job.id for job in jobs]


def running(eyes: Eyes) -> list[tuple[int, bool, str | None]]:
    return eyes.all("SELECT id, holds, key FROM pgqueue.job_running ORDER BY id")


def line(eyes: Eyes) -> list[tuple[int, int]]:
    """Who is parked, in order: id and rank."""
    return eyes.all("SELECT id, rank FROM pgqueue.job_blocked ORDER BY rank, id")


# Who comes in ---------------------------------------------------------------------------------------------------------


@pytest.mark.promise("L08")
@pytest.mark.parametrize("size", [10, 20_000])
async def test_those_next_in_line_come_in_behind_the_first_and_run_one_after_the_other(
    desks: Desks, eyes: Eyes, size: int
) -> None:
    """Also if they are so large that they are read apart."""
    desk = desks()
    jobs = put(eyes, 6, args=f'{{"text": "{size * "x"}"}}')
    assert await desk.take() == jobs[:1]
    assert running(eyes) == [(jobs[0], True, None)] + [(job, False, "lock:a") for job in jobs[1:4]]
    admits = desk.admit.moves
    for nth in range(3):
        assert ids(await desk.complete(*desk.jobs)) == [jobs[nth + 1]]
        desk.jobs[:] = desk.jobs[1:]
        assert desk.admit.moves == admits, "no statement asked for the key"
    assert await desk.complete(*desk.jobs) == []
    assert ids(await desk.let_in()) == jobs[4:5]
    assert await desk.complete(*desk.jobs) == desk.chains.all() + desk.jobs[1:]
    await desk.complete(*desk.jobs[1:])
    await desk.let_in()
    assert eyes.states() == {"completed": 6}
    assert (desk.admit._with_waiters, desk.admit._ours, desk.admit._holding) == (set(), {}, {})


@pytest.mark.parametrize(
    "unlike",
    [
        {"queue": "other"},
        {"lock_limit": 2},
        {"on_locked": "skip"},
        {"on_locked": "once"},
        {"limit_key": "l"},
        {"rate_key": "r"},
        {"crashes": 1, "rank": -2},
    ],
)
async def test_the_first_that_is_of_another_kind_ends_a_chain(desks: Desks, eyes: Eyes, unlike: dict[str, Any]) -> None:
    """And nobody behind that one is in it, though he may be of the same kind."""
    desk = desks(("default", "other"))
    first, second = put(eyes, 2)
    put(eyes, 1, **unlike)
    put(eyes, 1)
    desk.admit.blocked({}, ())
    await desk.park()
    eyes.do("UPDATE pgqueue.worker SET queues = '{default,other}'")
    desk.admit._wanted.clear()
    desk.admit._followed = {"lock:a": None}
    suspect = unlike.get("crashes", 0)
    assert ids(await desk.let_in()) == ([] if suspect else [first])
    assert ids(desk.chains.all()) == ([] if suspect else [second])


async def test_of_a_limit_above_one_nobody_comes_in_behind_another(desks: Desks, eyes: Eyes) -> None:
    desk = desks()
    jobs = put(eyes, 5, lock_limit=2)
    assert await desk.take() == jobs[:2]
    assert not desk.chains.all() and eyes.states() == {"running": 2, "blocked": 3}


async def test_who_is_locked_by_somebody_is_passed_over_and_comes_later(
    desks: Desks, eyes: Eyes, conn: psycopg.Connection
) -> None:
    desk = desks()
    jobs = put(eyes, 3)
    await desk.park()
    actions.cancel(conn, jobs[1])
    assert ids(await desk.let_in()) == jobs[:1]
    assert ids(desk.chains.all()) == jobs[2:]
    conn.rollback()
    [last] = await desk.complete(*desk.jobs)
    await desk.complete(last)
    assert ids(await desk.let_in()) == [] or ids(desk.jobs) == jobs[1:2]
    assert await desk.sweep() in ([], jobs[1:2]) and eyes.state(jobs[1]) == "running"


@pytest.mark.parametrize("size", [100, 20_000])
async def test_a_chain_is_in_order_however_its_payloads_travel(desks: Desks, eyes: Eyes, size: int) -> None:
    """What is too large to be answered with the admit is read after it; also those that were urgent first."""
    desk = desks()
    args = '{"text": "' + size * "x" + '"}'
    late, urgent = put(eyes, 2, args=args), put(eyes, 2, args=args, priority=1, rank=3)
    assert await desk.take() == urgent[:1]
    assert ids(desk.chains.all()) == [urgent[1], *late]
    assert {job.args for job in desk.chains.all()} == {args}


# Never two at once ----------------------------------------------------------------------------------------------------


def idle(worker: Worker) -> bool:
    """Whether it asks for nothing just now."""
    return worker.services.fetcher.asking == ((), 0) and not worker.services.unblocker.wants


class HoldersOnly(Link):
    """What a naive admit sends: it counts those that hold the key, and not those behind them."""

    def statement(self, name: str, **params: object) -> Statement[list[tuple[Any, ...]]]:
        made = super().statement(name, **params)
        if name not in ("unblock_next", "unblock_move"):
            return made
        sql = made.sql.replace("WHERE r.lock_key = substr", "WHERE r.holds AND r.lock_key = substr")
        assert sql != made.sql
        return replace(made, sql=sql)


@pytest.mark.promise("L04")
@pytest.mark.parametrize(("link", "most"), [(Link, 1), (HoldersOnly, 2)])
async def test_nobody_comes_in_beside_what_is_left_of_a_chain(
    desks: Desks, eyes: Eyes, link: type[Link], most: int
) -> None:
    """The holder has ended, and one that was behind it runs; another worker asks for the key."""
    desk, other = desks(), desks(link=link)
    jobs = put(eyes, 6)
    await desk.take()
    [second] = await desk.complete(*desk.jobs)
    other.admit.blocked({"lock:a": ()})
    came = await other.let_in()
    assert second.id == jobs[1]
    assert 1 + len(came) == most, ids(came)


@pytest.mark.promise("L08")
async def test_one_with_a_higher_limit_waits_for_the_end_of_a_chain(desks: Desks, eyes: Eyes) -> None:
    """There is one with the limit 1 in it that has not started yet: beside whoever came in now it could not."""
    desk = desks()
    jobs = put(eyes, 2)
    assert await desk.take() == jobs[:1] and ids(desk.chains.all()) == jobs[1:]
    running = list(desk.jobs)
    [wide] = put(eyes, 1, lock_limit=3)
    assert await desk.take() == [] and await desk.sweep() == []
    [last] = await desk.complete(*running)
    await desk.complete(last)
    assert ids(await desk.let_in()) == [wide]


@pytest.mark.second
@pytest.mark.promise("L04", "F12")
async def test_racing_claimers_never_run_two_of_a_key(dsn: str, eyes: Eyes) -> None:
    """With the naive versions of test_unblocker.py, two run at once within 25 jobs."""
    assert await race(dsn, eyes, claimers=8, rounds=100, limit=1, behind=BEHIND) == 1


# When it does not go on -----------------------------------------------------------------------------------------------

PROBLEM: dict[str, Any] = {
    "delays": [60.0], "spents": [True], "snoozeds": [False], "outcomes": ["failed"], "error_types": ["E"],
    "messages": ["no"], "tracebacks": [None],
}  # fmt: skip


@pytest.mark.promise("L10")
async def test_after_a_job_that_waits_for_its_retry_the_chain_goes_on(desks: Desks, eyes: Eyes) -> None:
    desk = desks()
    jobs = put(eyes, 3)
    await desk.take()
    assert ids(await desk.end("complete_retry", desk.jobs[:1], **PROBLEM, holdings=[False])) == jobs[1:2]


@pytest.mark.promise("L04")
@pytest.mark.parametrize(
    ("ending", "params"), [("complete_release", {}), ("complete_retry", PROBLEM | {"holdings": [True]})]
)
async def test_after_one_that_keeps_the_key_the_rest_goes_back_to_its_line(
    desks: Desks, eyes: Eyes, ending: str, params: dict[str, Any]
) -> None:
    """In its order, before the others; and it comes in when that one has ended."""
    desk = desks()
    jobs = put(eyes, 6)
    await desk.take()
    assert await desk.end(ending, desk.jobs[:1], keeping=True, **params) == []
    assert line(eyes) == [(job, 10) for job in jobs[1:4]] + [(job, 11) for job in jobs[4:]]
    assert eyes.all("SELECT DISTINCT attempt FROM pgqueue.job_blocked") == [(0,)], "none was spent"
    assert await desk.let_in() == []
    assert await desk.sweep() == [], "the key is held"
    if ending == "complete_retry":
        assert release(eyes.conn, "a").ids == (jobs[0],)
        assert await desk.sweep() == jobs[1:2]
    else:
        [first] = await desk.park()
        assert first.id == jobs[0]
        assert await desk.complete(first) == []
        assert ids(await desk.let_in()) == jobs[1:2]
        assert ids(desk.chains.all()) == jobs[2:5]


@pytest.mark.promise("F22")
async def test_what_goes_back_after_the_one_before_it_has_ended_is_asked_for(desks: Desks, eyes: Eyes) -> None:
    """Who asked when that one ended found the key taken by those behind it, and asks no more."""
    desk = desks()
    jobs = put(eyes, 4)
    await desk.take()
    back = desk.chains.empty()
    assert await desk.complete(*desk.jobs) == []
    assert await desk.let_in() == []
    await desk.put_back(back)
    assert ids(await desk.let_in()) == jobs[1:2]


@pytest.mark.parametrize("by_hand", [False, True])
async def test_a_holder_that_waits_for_the_key_again_does_so_before_those_behind_it(
    desks: Desks, eyes: Eyes, by_hand: bool
) -> None:
    """It had not started, was given back, and its queue is served by nobody any more, or its key was taken by hand."""
    desk, other = desks(), desks(("elsewhere",))
    jobs = put(eyes, 6)
    await desk.take()
    await desk.end("complete_release", desk.jobs[:1], keeping=True)
    eyes.do("DELETE FROM pgqueue.worker WHERE id = %s", desk.worker_id)
    if by_hand:
        assert release(eyes.conn, "a").ids == (jobs[0],)
    else:
        await other.sweep()
    assert [job for job, _ in line(eyes)] == jobs


@pytest.mark.promise("F24")
@pytest.mark.parametrize("started", [False, True])
async def test_of_a_dead_worker_the_holder_keeps_the_key_and_the_rest_its_place(
    desks: Desks, eyes: Eyes, started: bool
) -> None:
    """Naive is a rescue that lets all of them keep the key: two run at once then. Only the first can have started."""
    dead, desk = desks(), desks()
    jobs = put(eyes, 6)
    await dead.take()
    died = "UPDATE pgqueue.worker SET dead_at = now(), beat_at = %s, concurrency = 10 WHERE id = %s"
    eyes.do(died, "epoch" if started else "2500-01-01", dead.worker_id)
    await Rescue(desk.session, notify=True, rescued=lambda: None)._move(dead.worker_id)
    rank = -2 if started else 10
    assert eyes.all("SELECT id, holds, rank, crashes FROM pgqueue.job_available") == [(jobs[0], True, rank, started)]
    assert line(eyes) == [(job, 10) for job in jobs[1:4]] + [(job, 11) for job in jobs[4:]]
    assert eyes.all("SELECT DISTINCT crashes, attempt FROM pgqueue.job_blocked") == [(0, 0)]
    assert await desk.sweep() == []
    [first] = await desk.park()
    await desk.complete(first)
    assert ids(await desk.let_in()) == jobs[1:2]


@pytest.mark.promise("F04", "L07")
async def test_one_that_ran_behind_a_holder_that_has_ended_carries_the_crash(desks: Desks, eyes: Eyes) -> None:
    """It is the first of what is left: a killer is found out wherever it stands in a chain."""
    dead, desk = desks(), desks()
    jobs = put(eyes, 4)
    await dead.take()
    await dead.complete(*dead.jobs)
    eyes.do("UPDATE pgqueue.worker SET dead_at = now(), beat_at = 'epoch' WHERE id = %s", dead.worker_id)
    await Rescue(desk.session, notify=True, rescued=lambda: None)._move(dead.worker_id)
    crashes = "SELECT id, rank, crashes, attempt FROM pgqueue.job_blocked ORDER BY rank, id"
    assert eyes.all(crashes) == [(jobs[1], -2, 1, 1), (jobs[2], 10, 0, 0), (jobs[3], 10, 0, 0)]
    assert eyes.all("SELECT job_id, outcome FROM pgqueue.attempt") == [(jobs[1], "crashed")]
    assert await desk.sweep() == [], "a suspect is granted to its lane"
    assert ids(await desk.park()) == jobs[1:2]


async def test_a_second_row_with_its_id_in_the_line_harms_only_itself(desks: Desks, eyes: Eyes) -> None:
    """Restored by hand, it stands where a job would be put back."""
    dead, desk = desks(), desks()
    jobs = put(eyes, 2)
    await dead.take()
    eyes.do(
        "INSERT INTO pgqueue.job_blocked (state, id, enqueued_at, task, key) "
        "SELECT 'blocked', id, enqueued_at, 'twin', 'lock:z' FROM pgqueue.job WHERE id = %s",
        jobs[1],
    )
    eyes.do("UPDATE pgqueue.worker SET dead_at = now() WHERE id = %s", dead.worker_id)
    await Rescue(desk.session, notify=True, rescued=lambda: None)._move(dead.worker_id)
    assert eyes.all("SELECT id, task, reason FROM pgqueue.job_dead") == [(jobs[1], "twin", "refused")]
    assert line(eyes) == [(jobs[1], 10)]


def test_the_table_refuses_a_keyed_job_that_was_not_let_in(eyes: Eyes) -> None:
    insert = (
        "INSERT INTO pgqueue.job_running (state, task, worker_id, claim, started_at, lock_key, key) "
        "VALUES ('running', 'x', 1, 1, now(), 'a', %s)"
    )
    with pytest.raises(psycopg.errors.CheckViolation, match="job_running_is_held"):
        eyes.do(insert, None)
    eyes.do(insert, "lock:a")


# Who comes after whom -------------------------------------------------------------------------------------------------


def job(number: int, key: str = "a", place: int = 0) -> Job:
    return Job(claimed(id=number, pos=-place, rank=10, task="x", lock_key=key), 1)


def test_each_end_gives_out_one() -> None:
    made = Chains()
    a, b, c, other, last = job(1), job(2, place=1), job(3, place=2), job(4, "b"), job(5, "b", 1)
    made.add([a, other, b, c, last])
    assert made.all() == [b, c, last]
    assert made.next(b) is None, "it has not started"
    assert [made.next(a), made.next(other), made.next(b), made.next(c), made.next(last)] == [b, last, c, None, None]
    assert not made


def test_what_is_taken_out_does_not_come() -> None:
    made = Chains()
    a, b, c, d = job(1), job(2, place=1), job(3, place=2), job(4, place=3)
    [chain] = made.add([a, b, c, d])
    assert made.remove(3) is c and made.remove(3) is None and made.remove(1) is None
    assert made.next(a) is b
    assert made.shorten([chain]) == [d] and made.next(b) is None
    made.add([a, b, c, d])
    assert made.cut(a) == [b, c, d] and made.next(a) is None
    made.add([a, b])
    assert made.empty() == [b] and not made
    assert made.add([b, c]) == [], "without the first they are not ours"


# In a worker ----------------------------------------------------------------------------------------------------------


class Gates:
    """A task of one lock whose job 0 waits for one event, and all others for another; what ran, in order."""

    def __init__(self, **options: Any) -> None:
        self.first, self.others = asyncio.Event(), asyncio.Event()
        self.order: list[int] = []

        async def waits(n: int) -> None:
            self.order.append(n)
            await (self.others if n else self.first).wait()

        self.task = task(name="chains.gates", lock="k", **options)(waits)

    def put(self, conn: psycopg.Connection, number: int) -> list[int]:
        jobs = self.task.enqueue_many(conn, [(n,) for n in range(number)])
        conn.commit()
        return [job.id for job in jobs]

    async def chain(self, worker: Worker) -> None:
        """Let job 0 end while nothing else is going on: what comes in then are a holder and those behind it."""
        # The sweep of the start is over: a key that it names goes another way, one waiter at a time.
        await until(lambda: self.order and worker.services.sweep.sweeps and idle(worker))
        assert not worker.services.held_jobs.chains, "it knows of no short jobs yet"
        worker.services.executor._running.groups[0].adapt = lambda least=0: None  # type: ignore[method-assign]
        worker.services.executor._running.groups[0].behind = BEHIND
        self.first.set()
        await until(lambda: len(self.order) == 2)
        assert len(worker.services.held_jobs.chains.all()) == BEHIND


def overlap(eyes: Eyes) -> float:
    """By how many seconds two of a key have overlapped, as the rows have it; negative if none have."""
    return float(
        eyes.one(
            "SELECT max(extract(epoch FROM before - started_at)) FROM (SELECT started_at, lag(finished_at) OVER "
            "(PARTITION BY lock_key ORDER BY finished_at) AS before FROM pgqueue.job WHERE state = 'completed') AS ran"
        )
    )


@pytest.mark.promise("L02", "L08")
@pytest.mark.parametrize("kind", ["async", "sync", "transactional", "result"])
async def test_jobs_of_keys_run_in_order_one_at_a_time_and_history_says_so(
    dsn: str, eyes: Eyes, conn: psycopg.Connection, kind: str
) -> None:
    order: dict[int, list[int]] = {0: [], 1: []}
    runs, most = [0, 0], 0

    def begin(user: int) -> None:
        nonlocal most
        runs[user] += 1
        most = max(most, runs[user])

    def end(user: int, n: int) -> None:
        order[user].append(n)
        runs[user] -= 1

    @task(name="chains.async", lock="{user}")
    async def on_loop(user: int, n: int) -> int | None:
        begin(user)
        await asyncio.sleep(0.001)
        end(user, n)
        return n if kind == "result" else None

    @task(name="chains.sync", lock="{user}", transactional=kind == "transactional")
    def in_thread(job: Job, user: int, n: int) -> None:
        begin(user)
        if kind == "transactional":
            job.connection.execute("SELECT pg_sleep(0.001)")
        end(user, n)

    each: Task[..., Any] = on_loop if kind in ("async", "result") else in_thread
    each.enqueue_many(conn, [(n % 2, n) for n in range(80)])
    conn.commit()
    async with work(dsn, each, concurrency=4) as worker:
        await until(eyes.done(80), 60)
        admits = worker.services.unblocker.moves
    assert order == {0: list(range(0, 80, 2)), 1: list(range(1, 80, 2))} and most == 1
    assert admits < 72, "one for each would be 80"  # a busy machine ends chains early
    assert overlap(eyes) <= 0


@pytest.mark.promise("L05")
@pytest.mark.parametrize("naive", [False, True])
async def test_who_waits_behind_a_slow_one_goes_back_and_an_urgent_one_comes_first(
    dsn: str, eyes: Eyes, conn: psycopg.Connection, monkeypatch: pytest.MonkeyPatch, naive: bool
) -> None:
    """They had come in because jobs were short so far. Naive is a chain that lasts as long as it lasts."""
    monkeypatch.setattr("pgqueue.worker.held_jobs.LONGEST_SECONDS", 600.0 if naive else 1.0)
    gates = Gates()
    jobs = gates.put(conn, 5)
    async with work(dsn, gates.task) as worker:
        await gates.chain(worker)
        if not naive:
            await until(lambda: eyes.states() == {"completed": 1, "running": 1, "blocked": 3})
        gates.task.using(priority=0).enqueue(conn, 9)
        conn.commit()
        await until(lambda: eyes.states().get("blocked") == (1 if naive else 4))
        gates.others.set()
        await until(eyes.done(6))
    assert gates.order == ([0, 1, 2, 3, 4, 9] if naive else [0, 1, 9, 2, 3, 4])
    assert [eyes.one("SELECT attempt FROM pgqueue.job WHERE id = %s", job) for job in jobs] == [1] * 5


@pytest.mark.promise("S06")
async def test_a_worker_that_takes_no_more_hands_back_what_is_behind(
    dsn: str, eyes: Eyes, conn: psycopg.Connection
) -> None:
    """While the one before them runs on; another worker has them next, in their order."""
    gates = Gates()
    gates.put(conn, 7)
    async with work(dsn, gates.task) as first:
        await gates.chain(first)
        first.quiet()
        await until(lambda: eyes.states() == {"completed": 1, "running": 1, "blocked": 5})
        async with work(dsn, gates.task):
            gates.others.set()
            await until(eyes.done(7))
    assert gates.order == list(range(7))


@pytest.mark.promise("F25")
async def test_one_that_is_behind_another_is_cancelled_at_once_and_the_rest_goes_on(
    dsn: str, eyes: Eyes, conn: psycopg.Connection
) -> None:
    gates = Gates()
    jobs = gates.put(conn, 5)
    async with work(dsn, gates.task) as worker:
        await gates.chain(worker)
        actions.cancel(conn, jobs[3])
        conn.commit()
        await until(eyes.is_in(jobs[3], "cancelled"), 10)
        assert gates.order == [0, 1], "and nobody has come in its place"
        gates.others.set()
        await until(eyes.done(4))
    assert gates.order == [0, 1, 2, 4]


@pytest.mark.promise("F22")
@pytest.mark.parametrize("naive", [False, True])
async def test_a_chain_ends_with_a_job_that_was_taken_from_us(
    dsn: str, eyes: Eyes, conn: psycopg.Connection, monkeypatch: pytest.MonkeyPatch, naive: bool
) -> None:
    """Its end counts for nothing, and whoever has it runs it now. Naive is who goes on all the same."""
    if naive:
        monkeypatch.setattr(HeldJobs, "kept_keys", lambda self, jobs: None)
    gates = Gates()
    jobs = gates.put(conn, 5)
    async with work(dsn, gates.task) as worker:
        await gates.chain(worker)
        eyes.do(
            "WITH gone AS (DELETE FROM pgqueue.job_running WHERE id = %s RETURNING *) INSERT INTO pgqueue.job_running "
            "(state, id, task, args, lock_key, holds, worker_id, claim, started_at) "
            "SELECT 'running', id, task, args, lock_key, true, 77, 1, now() FROM gone",
            jobs[1],
        )
        gates.others.set()
        await until(lambda: worker.services.completer.fenced == 1)
        if naive:
            await until(eyes.done(4))
        else:
            await until(lambda: eyes.states() == {"completed": 1, "running": 1, "blocked": 3})
    assert gates.order == ([0, 1, 2, 3, 4] if naive else [0, 1])


@pytest.mark.promise("L10")
async def test_what_holds_its_key_for_its_retry_has_nobody_run_meanwhile(
    dsn: str, eyes: Eyes, conn: psycopg.Connection
) -> None:
    order: list[tuple[int, int]] = []

    @task(name="chains.holding", lock=Lock("k", hold_on_retry=True), retry=RetryPolicy(first=0.05, most=0.05))
    async def holding(job: pgqueue.Job, n: int) -> None:
        order.append((n, job.attempt))
        if n % 2 and job.attempt == 1:
            raise ValueError

    holding.enqueue_many(conn, [(n,) for n in range(6)])
    conn.commit()
    async with work(dsn, holding):
        await until(eyes.done(6))
    assert order == [(0, 1), (1, 1), (1, 2), (2, 1), (3, 1), (3, 2), (4, 1), (5, 1), (5, 2)]


@pytest.mark.promise("L04")
@pytest.mark.parametrize("naive", [False, True])
@pytest.mark.parametrize("sync", [False, True])
async def test_one_that_was_put_off_in_its_own_transaction_keeps_its_key(
    dsn: str, eyes: Eyes, conn: psycopg.Connection, monkeypatch: pytest.MonkeyPatch, sync: bool, naive: bool
) -> None:
    """That it holds the key until its next attempt is written by then. Naive is who takes all that is written so for an
    end of it."""
    if naive:
        monkeypatch.setattr("pgqueue.worker.complete.outcome_sql.written_in", lambda job, outcome: outcome)
    # So long that on a slow machine, too, the next ones of the naive version run before it is over.
    pause = 5.0 if naive else 0.3
    order: list[int] = []
    first, asked = asyncio.Event(), threading.Event()

    def run(n: int) -> pgqueue.Snooze | None:
        order.append(n)
        return pgqueue.Snooze(pause) if order == [0, 1] else None

    async def on_loop(job: Job, n: int) -> pgqueue.Snooze | None:
        if n == 0:
            await first.wait()
        await (await job.aconnection()).execute("SELECT 1")
        return run(n)

    def in_thread(job: Job, n: int) -> pgqueue.Snooze | None:
        if n == 0:
            asked.wait()
        job.connection.execute("SELECT 1")
        return run(n)

    lock = Lock("k", hold_on_retry=True)
    each: Task[..., Any] = task(name="chains.put_off", lock=lock, transactional=True)(in_thread if sync else on_loop)
    each.enqueue_many(conn, [(n,) for n in range(5)])
    conn.commit()
    async with work(dsn, each) as worker:
        await until(
            lambda: (
                worker.services.executor._running.runs
                and worker.services.fetcher.asking == ((), 0)
                and not worker.services.unblocker.wants
            )
        )
        worker.services.executor._running.groups[0].adapt = lambda least=0: None  # type: ignore[method-assign]
        worker.services.executor._running.groups[0].behind = BEHIND
        first.set()
        asked.set()
        await until(eyes.done(5))
    assert (order == [0, 1, 1, 2, 3, 4]) is not naive, order


@pytest.mark.second
@pytest.mark.promise("F22")
async def test_jobs_that_end_in_transactions_of_their_handlers_own_go_on_without_a_sweep(
    dsn: str, eyes: Eyes, conn: psycopg.Connection
) -> None:
    order: list[int] = []

    @task(name="chains.handed", lock="k")
    def handed(job: Job, n: int) -> None:
        with psycopg.connect(dsn) as own:
            job.complete(own)
        order.append(n)

    handed.enqueue_many(conn, [(n,) for n in range(40)])
    conn.commit()
    async with work(dsn, handed) as worker:
        worker.services.sweep._last = monotonic() + 600
        await until(eyes.done(40))
        assert worker.services.unblocker.moves < 36, "one for each would be 40"
    assert order == list(range(40))


async def test_people_see_of_a_chain_the_first_that_is_left(dsn: str, eyes: Eyes, conn: psycopg.Connection) -> None:
    gates = Gates()
    jobs = gates.put(conn, 7)
    async with work(dsn, gates.task) as worker:
        await gates.chain(worker)
        [lock] = locks(conn)
        assert [each.id for each in lock.holders] == jobs[1:2]
        assert (lock.waiting, lock.next) == (5, jobs[2]) and lock.waited is not None
        kept = release(conn, "k")
        conn.commit()
        assert kept.ids == () and [each.id for each in kept.running] == jobs[1:2]
        assert eyes.states() == {"completed": 1, "running": 4, "blocked": 2}
        gates.others.set()
        await until(eyes.done(7))
    assert locks(conn) == []


SPANS = """
@pgqueue.task(name="span", lock="{key}")
async def span(key: int) -> None:
    began = time.monotonic()
    await asyncio.sleep(0.002)
    say("ran", key=key, began=began)
"""


@pytest.mark.second
@pytest.mark.promise("L04", "F22")
def test_kills_in_the_middle_of_chains_lose_nothing_and_never_run_two(tmp_path: Path, dsn: str, eyes: Eyes) -> None:
    """Short jobs of two keys; whoever has them is killed while it works, and another one comes."""
    number, chained = 2_000, 0
    eyes.do(
        "INSERT INTO pgqueue.job (task, args, lock_key) "
        "SELECT 'span', jsonb_build_object('key', n %% 2), (n %% 2)::text FROM generate_series(1, %s) AS n",
        number,
    )
    with workers(tmp_path, dsn, SPANS) as processes:
        for _ in range(4):
            doomed = processes.start(lease=1.0)
            wait_until(lambda: len(doomed.all("ran")) > 50)  # noqa: B023
            doomed.kill()
            chained += eyes.one("SELECT count(*) FROM pgqueue.job_running WHERE key IS NOT NULL")
        processes.start(lease=1.0)
        wait_until(eyes.done(number), 120)
        spans = Spans.told(processes.all)
        assert eyes.one("SELECT count(*) FROM pgqueue.job_running") == 0
    assert chained, "none was in a chain when its worker died"
    assert spans.most() == {"0": 1, "1": 1}
