"""Jobs under fast rates that claims take themselves: never too many, nobody overtaken, and what that costs."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from time import monotonic
from typing import Any

import psycopg
import pytest
from rate_desk import RATED, bound, line, most, rated
from workers import Eyes, Taker, until, work

from pgqueue import Job, Rate
from pgqueue.client.tasks import task
from pgqueue.database import statements
from pgqueue.database.sessions import Link
from pgqueue.database.statements import Statement
from pgqueue.worker.concurrency.claim_rates import CLAIMS, MOST, MOST_LEAST, TURN_SECONDS, Passing
from pgqueue.worker.run.slots import Pool

FAST, TIGHT = (1_000_000, 1.0, 1), Rate("600/s")
WAITING = (
    "INSERT INTO pgqueue.job_blocked (state, key, task, queue, priority, rank, crashes, rate_key) "
    "SELECT 'blocked', 'rate:k', 'x', %s, 5, %s, %s, 'k' FROM generate_series(1, %s) RETURNING id"
)
LOCK = "SELECT pg_advisory_xact_lock(hashtextextended('pgqueue.rate:k', 7))"
TRY = "pg_catalog.pg_try_advisory_xact_lock(pg_catalog.hashtextextended('pgqueue.rate:' || key, 7))"


class Changed(Link):
    """A link that sends one statement otherwise."""

    NAME = OLD = NEW = ""

    def statement(self, name: str, **params: object) -> Statement[list[tuple[Any, ...]]]:
        made = super().statement(name, **params)
        if name != self.NAME:
            return made
        assert self.OLD in made.sql
        return replace(made, sql=made.sql.replace(self.OLD, self.NEW))


class Unlocked(Changed):
    """A naive version: it locks no key before it looks."""

    NAME, OLD, NEW = "claim_rates_lock", TRY, "true"


class OneStatement(Unlocked):
    """Another: it locks keys in the statement that looks how much room there is."""

    def statement(self, name: str, **params: object) -> Statement[list[tuple[Any, ...]]]:
        made = super().statement(name, **params)
        if name != "claim_rates_room":
            return made
        old = "FROM clock CROSS JOIN jsonb"
        try_ = TRY.replace("|| key", "|| locked.key")
        sql = made.sql.replace(old, "FROM clock CROSS JOIN (SELECT true OFFSET 0) AS now_locked CROSS JOIN jsonb")
        sql = sql.replace("WHERE coalesce(l.ahead <=", f"WHERE {try_} AND coalesce(l.ahead <=")
        assert sql.count("try_advisory") == 1
        return replace(made, sql=sql)


class FreeOfCharge(Changed):
    """Another: it charges one, however many it lets pass."""

    NAME, OLD, NEW = "claim_rates_charge", "went.taken * went.gap", "1 * went.gap"


class Blind(Changed):
    """Another: it lets jobs pass whoever waits."""

    NAME, OLD, NEW = "claim_rates_room", "THEN 0 ELSE ordinary.room", "THEN ordinary.room ELSE ordinary.room"


class Patient(Changed):
    """Another: it takes nobody from lines, and leaves them to others."""

    NAME, OLD, NEW = "claim_rates_room", "WHERE turn <= room AND", "WHERE false AND"


class Jumbled(Changed):
    """Others: of those who wait they take the oldest, whoever is urgent. Of one queue, of one line, of all lines."""

    NAME, OLD, NEW = (
        "claim_rates_room",
        "ORDER BY b.rank, b.id\n        LIMIT least(",
        "ORDER BY b.id\n        LIMIT least(",
    )


class JumbledLine(Jumbled):
    OLD, NEW = "(PARTITION BY line ORDER BY rank, id)", "(PARTITION BY line ORDER BY id)"


class JumbledLines(Jumbled):
    OLD, NEW = "row_number() OVER (ORDER BY rank, id)", "row_number() OVER (ORDER BY id)"


class Gate(Taker):
    """A taker whose fetches look at rates."""

    def __init__(self, dsn: str, queues: tuple[str, ...] = ("default",), link: Link | None = None) -> None:
        super().__init__(dsn, queues)
        self.link = self.session.link = link or self.link
        self.passing = self.fetcher._passing
        self.passing.most = 1000

    async def take(self, room: int = 1000) -> list[int]:
        """One fetch that looks at rates; the ids of those it has claimed."""
        self.passing._left = CLAIMS
        self.fetcher.keyed.long_rows = False
        return [job.id for job in await self.fetch(room)]


@pytest.fixture
async def gates(dsn: str) -> AsyncIterator[Callable[..., Gate]]:
    """Makes gates; closed at the end."""
    made: list[Gate] = []

    def make(*queues: str, link: type[Link] = Link) -> Gate:
        made.append(Gate(dsn, queues or ("default",), link(dsn, "pgqueue")))
        return made[-1]

    yield make
    for gate in made:
        await gate.close()


Gates = Callable[..., Gate]


# Never more than the rate --------------------------------------------------------------------------------------------


@pytest.mark.promise("L18")
@pytest.mark.parametrize(
    ("link", "enough"), [(Link, True), (OneStatement, False), (Unlocked, False), (FreeOfCharge, False)]
)
async def test_room_is_looked_at_and_charged_with_the_key_locked_before(
    gates: Gates, eyes: Eyes, conn: psycopg.Connection, link: type[Link], enough: bool
) -> None:
    """One claim is stopped between its snapshot and its look at the rate; another takes what there is, if it can."""
    eyes.do(RATED, "k", 600, 60.0, 3000)  # slow as such: nothing grows back meanwhile
    eyes.do("UPDATE pgqueue.key_rate SET count = 60000 WHERE name = 'k'")
    eyes.do(
        "INSERT INTO pgqueue.limiter VALUES ('k', now() + (2999 - 20) * (60 + 0.2 + 0.05) / 60000 * interval '1 s', 1)"
    )
    slow, quick = gates("a", link=link), gates("b", link=link)
    rated(eyes, 150, queue="a")
    rated(eyes, 150, queue="b")
    conn.execute("SELECT FROM pgqueue.worker WHERE id = %s FOR UPDATE", [slow.worker_id])
    claim = asyncio.create_task(slow.take())
    blocked = "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE %s = ANY (pg_blocking_pids(pid)))"
    await until(lambda: eyes.one(blocked, conn.info.backend_pid))
    began = monotonic()
    first = len(await quick.take())
    conn.rollback()
    second = len(await claim)
    third = len(await quick.take()) + len(await slow.take())
    grown = int((monotonic() - began + 1.0) * 1000)
    room = 20 + 50 + 1  # what the burst leaves, and what may be anticipated
    assert first + second + third > 0
    if enough:
        assert first == 0
        assert first + second + third <= room + grown
    else:
        assert first + second + third > room


@pytest.mark.promise("L18")
async def test_however_many_claim_no_more_start_in_a_period_than_were_promised(gates: Gates, eyes: Eyes) -> None:
    eyes.do(RATED, "k", TIGHT.count, TIGHT.period, TIGHT.burst)
    starts: list[float] = []
    ends = monotonic() + 10.0  # for a busy machine, where much of what passed comes too late to start

    async def claimer(gate: Gate) -> None:
        while len(starts) < 1000 and monotonic() < ends:
            rated(eyes, 20)  # claims look at rates of what they find; what they park they take from the line
            await gate.take(20)
            now = monotonic()
            starts.extend(now for job in gate.jobs if job.start_by is not None and now <= job.start_by)

    await asyncio.gather(*(claimer(gates()) for _ in range(4)))
    assert len(starts) > 200
    assert most(starts, TIGHT.period) <= bound(TIGHT)


async def test_what_passes_is_charged_counts_one_attempt_and_must_start_in_time(gates: Gates, eyes: Eyes) -> None:
    eyes.do(RATED, "k", 1000, 1.0, 100)
    ids = rated(eyes, 5)
    gate = gates()
    began = monotonic()
    assert await gate.take() == ids
    assert all(job.start_by is not None and began < job.start_by <= monotonic() + 0.05 for job in gate.jobs)
    assert eyes.all("SELECT DISTINCT attempt, holds, worker_id FROM pgqueue.job_running") == [(1, True, gate.worker_id)]
    ahead = eyes.one("SELECT extract(epoch FROM next_at - now())::float8 FROM pgqueue.limiter")
    assert ahead <= 5 * 0.001075 + 0.000001
    assert eyes.one("SELECT worker_id FROM pgqueue.limiter") == gate.worker_id


async def test_the_commit_of_a_charge_is_durable_and_that_of_other_claims_is_not(
    gates: Gates, eyes: Eyes, monkeypatch: pytest.MonkeyPatch
) -> None:
    eyes.do(RATED, "k", *FAST)
    gate = gates()
    look = Statement("SELECT current_setting('synchronous_commit')", {}, list)
    monkeypatch.setattr(gate.fetcher, "_beside", lambda: [look])
    seen: list[Any] = []
    run = gate.session.run

    async def running(*messages: Any, **how: Any) -> list[Any]:
        found = await run(*messages, **how)
        seen.append(found[-1][0][0])
        return found

    monkeypatch.setattr(gate.session, "run", running)
    [default] = eyes.all("SHOW synchronous_commit")[0]
    await gate.take()
    rated(eyes, 1)
    await gate.take()
    assert seen == ["off", default]


async def test_a_rate_that_is_at_its_limit_lets_pass_what_it_allows_and_the_rest_waits_in_order(
    gates: Gates, eyes: Eyes
) -> None:
    eyes.do(RATED, "k", 600, 1.0, 1)
    ids = rated(eyes, 100)
    gate = gates()
    passed = await gate.take()
    assert passed == ids[: len(passed)]
    assert 1 <= len(passed) <= 15
    assert line(eyes) == ids[len(passed) :]
    assert gate.passing.lasting(["rate:k"])


@pytest.mark.parametrize("rate", [(400, 1.0, 1), (400, 1.0, 1000)])
async def test_slow_rates_go_the_long_way(gates: Gates, eyes: Eyes, rate: tuple[int, float, int]) -> None:
    eyes.do(RATED, "k", *rate)
    ids = rated(eyes, 2)
    gate = gates()
    assert await gate.take() == []
    assert line(eyes) == ids
    assert gate.passing.lasting(["rate:k"])


async def test_an_unknown_rate_and_a_time_that_no_rate_could_have_set_go_the_long_way(gates: Gates, eyes: Eyes) -> None:
    [unknown] = rated(eyes, 1, "nobody")
    eyes.do(RATED, "k", *FAST)
    eyes.do("INSERT INTO pgqueue.limiter VALUES ('k', now() + interval '1 hour', 1)")
    [stuck] = rated(eyes, 1)
    assert await gates().take() == []
    assert (line(eyes, "nobody"), line(eyes)) == ([unknown], [stuck])


async def test_a_key_that_somebody_has_locked_is_not_waited_for(
    gates: Gates, eyes: Eyes, conn: psycopg.Connection
) -> None:
    eyes.do(RATED, "k", *FAST)
    eyes.do(RATED, "j", *FAST)
    ids = rated(eyes, 6)
    [free] = rated(eyes, 1, "j")
    conn.execute(LOCK)
    gate = gates()
    assert await gate.take() == [free]
    assert line(eyes) == ids
    assert not gate.passing.lasting(["rate:k"])
    assert not gate.fetcher.keyed.long_rows


# The line comes first ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("link", "overtakes"), [(Link, False), (Blind, True)])
async def test_nobody_passes_while_somebody_waits_who_cannot_be_moved_just_now(
    gates: Gates, eyes: Eyes, conn: psycopg.Connection, link: type[Link], overtakes: bool
) -> None:
    eyes.do(RATED, "k", *FAST)
    [waiting] = [eyes.one(WAITING, "default", 11, 0, 1)]
    conn.execute("SELECT FROM pgqueue.job_blocked WHERE id = %s FOR UPDATE", [waiting])
    [late] = rated(eyes, 1)
    assert (await gates(link=link).take() == [late]) is overtakes


async def test_who_waits_goes_first_then_the_urgent_then_the_others(gates: Gates, eyes: Eyes) -> None:
    eyes.do(RATED, "k", *FAST)
    [waiting] = [eyes.one(WAITING, "default", 11, 0, 1)]
    later, plain = rated(eyes, 1), eyes.one("INSERT INTO pgqueue.job (task) VALUES ('x') RETURNING id")
    urgent = rated(eyes, 1, priority=1, rank=3)
    gate = gates()
    assert await gate.take() == [*urgent, waiting, *later, plain]
    assert [job.id for job in gate.passing.moved] == [waiting]
    assert eyes.states() == {"running": 4}


async def test_of_little_room_those_who_wait_have_all(gates: Gates, eyes: Eyes) -> None:
    eyes.do(RATED, "k", 600, 1.0, 1)
    waiting = [eyes.one(WAITING, "default", 11, 0, 1) for _ in range(30)]
    [late] = rated(eyes, 1)
    taken = await gates().take()
    assert taken == waiting[: len(taken)]
    assert line(eyes) == [*waiting[len(taken) :], late]


@pytest.mark.parametrize(
    ("link", "rate", "number"),
    [
        (Link, FAST, 6),  # three quarters of a claim
        (Jumbled, FAST, 6),
        (JumbledLines, FAST, 6),
        (Link, (600, 1.0, 1), 14),  # what the rate allows
        (JumbledLine, (600, 1.0, 1), 14),
    ],
)
async def test_of_those_who_wait_the_urgent_go_first_then_the_oldest_whatever_their_queue(
    gates: Gates, eyes: Eyes, link: type[Link], rate: tuple[int, float, int], number: int
) -> None:
    eyes.do(RATED, "k", *rate)
    for place in range(40):
        eyes.do(WAITING, "ab"[place % 2], 11, 0, 1)
    for place in range(4):
        eyes.do(WAITING, "ba"[place % 2], 3, 0, 1)
    waiting = line(eyes)
    rated(eyes, 1, queue="a")
    gate = gates("a", "b", link=link)
    taken = await gate.take(8 if rate == FAST else 1000)
    assert (sorted(taken) == sorted(waiting[:number])) is (link is Link)


@pytest.mark.parametrize(
    ("queue", "rank", "crashes", "passes"),
    [("paused", 11, 0, True), ("nobody's", 11, 0, True), ("theirs", 11, 0, False), ("default", -2, 1, False)],
)
async def test_behind_whom_nobody_passes(
    gates: Gates, eyes: Eyes, queue: str, rank: int, crashes: int, passes: bool
) -> None:
    eyes.do(RATED, "k", *FAST)
    eyes.do("INSERT INTO pgqueue.queue (name, paused_at) VALUES ('paused', now())")
    gates("theirs")
    gate = gates("default", "paused")
    eyes.one(WAITING, queue, rank, crashes, 1)
    ids = rated(eyes, 2)
    assert await gate.take() == (ids if passes else [])


@pytest.mark.parametrize(("link", "lasts"), [(Link, False), (Patient, True)])
async def test_a_line_becomes_shorter_while_more_come(gates: Gates, eyes: Eyes, link: type[Link], lasts: bool) -> None:
    eyes.do(RATED, "k", *FAST)
    eyes.do(WAITING, "default", 11, 0, 200)
    rated(eyes, 1000)
    gate = gates(link=link)
    for _ in range(16):
        await gate.take(40)
    assert bool(line(eyes)) is lasts


async def test_beside_a_long_line_others_are_claimed(gates: Gates, eyes: Eyes) -> None:
    eyes.do(RATED, "k", *FAST)
    waiting = [eyes.one(WAITING, "default", 11, 0, 1) for _ in range(50)]
    plain = [eyes.one("INSERT INTO pgqueue.job (task) VALUES ('x') RETURNING id") for _ in range(50)]
    rated(eyes, 1, priority=1, rank=3)  # for it the claim looks at the line, and parks it
    taken = await gates().take(40)
    assert taken == waiting[:30] + plain[:9]


async def test_a_lock_is_kept_while_its_rate_lets_the_job_pass(gates: Gates, eyes: Eyes) -> None:
    eyes.do(RATED, "k", *FAST)
    [granted] = rated(eyes, 1, lock_key="a", holds=True, rank=10)
    [wanting] = rated(eyes, 1, lock_key="b")
    gate = gates()
    assert await gate.take() == [granted]
    assert eyes.all("SELECT id, key FROM pgqueue.job_blocked") == [(wanting, "lock:b")]
    assert eyes.one("SELECT holds FROM pgqueue.job_running WHERE id = %s", granted)


@pytest.mark.promise("L19")
async def test_a_look_costs_the_same_however_many_wait_who_cannot_go(
    gates: Gates, eyes: Eyes, conn: psycopg.Connection
) -> None:
    eyes.do(RATED, "k", *FAST)
    eyes.do("INSERT INTO pgqueue.queue (name, paused_at) VALUES ('paused', now())")
    gate = gates("default", "paused")
    params = {"queues": ["default", "paused"], "n": 100, "worker_id": gate.worker_id, "claim": 1}
    conn.execute("SET enable_seqscan = off; SET enable_bitmapscan = off")
    pages = []
    for number in (100, 20_000):
        for queue in ("paused", "nobody's"):
            eyes.do(WAITING, queue, 1, 0, number)
        eyes.do("ANALYZE pgqueue.job_blocked")
        conn.execute("SELECT set_config('pgqueue.rates', '[\"k\"]', true)")
        sql = f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {statements.text('claim_rates_room', 'pgqueue')}"
        [(plan,)] = conn.execute(sql.encode(), params).fetchall()
        conn.rollback()
        pages.append(plan[0]["Plan"]["Shared Hit Blocks"] + plan[0]["Plan"]["Shared Read Blocks"])
    assert pages[1] <= 2 * pages[0], pages


# The watermark, and answers that are lost -----------------------------------------------------------------------------


async def test_what_comes_from_lines_moves_no_cursor(gates: Gates, eyes: Eyes) -> None:
    eyes.do(RATED, "k", *FAST)
    gate = gates()
    for _ in range(20):
        eyes.do(WAITING, "default", 11, 0, 7)
        eyes.do("INSERT INTO pgqueue.job (task) SELECT 'x' FROM generate_series(1, 5)")
        rated(eyes, 2)
        await gate.take(4)
    while await gate.take(4):
        pass
    assert eyes.states() == {"running": 20 * 14}


async def test_what_a_lost_answer_brought_is_known_by_its_claim_and_charged(
    gates: Gates, eyes: Eyes, monkeypatch: pytest.MonkeyPatch
) -> None:
    eyes.do(RATED, "k", 600, 1.0, 10)
    eyes.do(WAITING, "default", 11, 0, 2)
    rated(eyes, 2)
    gate = gates()
    run = gate.session.run

    async def losing(*messages: Any, **how: Any) -> list[Any]:
        await run(*messages, **how)
        raise psycopg.OperationalError("lost")

    monkeypatch.setattr(gate.session, "run", losing)
    with pytest.raises(psycopg.OperationalError):
        await gate.take()
    assert gate.doubts == 1
    held = eyes.all("SELECT worker_id, claim FROM pgqueue.job_running")
    assert held == [(gate.worker_id, gate.fetcher.claims.settled)] * 4
    assert eyes.one("SELECT count(*) FROM pgqueue.limiter") == 1


async def test_a_second_row_of_a_running_job_in_a_line_is_refused_and_harms_only_itself(
    gates: Gates, eyes: Eyes, caplog: pytest.LogCaptureFixture
) -> None:
    eyes.do(RATED, "k", *FAST)
    gate = gates()
    [first] = rated(eyes, 1)
    assert await gate.take() == [first]
    eyes.do(
        "INSERT INTO pgqueue.job_blocked (id, state, key, task, rate_key) "
        "VALUES (%s, 'blocked', 'rate:k', 'double', 'k')",
        first,
    )
    waiting = [eyes.one(WAITING, "default", 11, 0, 1) for _ in range(3)]
    [late] = rated(eyes, 1)
    assert await gate.take() == []  # it met the double, which is put aside
    assert await gate.take() == [*waiting, late]
    assert eyes.all("SELECT id, task, state, reason FROM pgqueue.job_dead") == [(first, "double", "failed", "refused")]
    assert eyes.all("SELECT id, task FROM pgqueue.job_running WHERE id = %s", first) == [(first, "x")]
    assert f"job {first} is running, and a second row with its id was available" in caplog.text


# Beside others in a worker -------------------------------------------------------------------------------------------


async def test_a_worker_drains_a_task_far_below_its_rate_by_claims(
    dsn: str, eyes: Eyes, conn: psycopg.Connection
) -> None:
    ran: list[int] = []

    @task(name="passing.quick", rate=Rate("1000000/s"))
    async def quick(number: int) -> None:
        ran.append(number)

    async with work(dsn, quick) as worker:
        quick.enqueue_many(conn, [(number,) for number in range(3000)])
        conn.commit()
        await until(eyes.done(3000), 60.0)
        assert sorted(ran) == list(range(3000))
        assert worker._passing.passed >= 2000
    assert eyes.all("SELECT DISTINCT attempt FROM pgqueue.job_done") == [(1,)]


@pytest.mark.second
@pytest.mark.promise("L18")
async def test_what_waits_at_hand_too_long_goes_back_unspent_and_is_charged_again(
    dsn: str, eyes: Eyes, conn: psycopg.Connection
) -> None:
    starts: list[float] = []

    @task(name="passing.timed", rate=Rate("600/s", burst=100), retry=1)
    async def timed(number: int) -> None:
        starts.append(monotonic())
        if number % 50 == 0:
            time.sleep(0.1)  # noqa: ASYNC251  # nobody starts meanwhile

    async with work(dsn, timed, concurrency=50) as worker:
        timed.enqueue_many(conn, [(number,) for number in range(1200)])
        conn.commit()
        await until(eyes.done(1200), 120.0)
        assert worker._passing.passed
    assert most(starts, 1.0) <= 699
    assert eyes.all("SELECT DISTINCT attempt FROM pgqueue.job_done") == [(1,)]


async def test_pause_and_a_changed_rate_hold_for_those_who_would_pass(
    gates: Gates, eyes: Eyes, conn: psycopg.Connection
) -> None:
    eyes.do(RATED, "k", *FAST)
    gate = gates()
    first = rated(eyes, 1)
    assert await gate.take() == first
    eyes.do("INSERT INTO pgqueue.queue (name, paused_at) VALUES ('default', now())")
    second = rated(eyes, 1)
    assert await gate.take() == []
    eyes.do("DELETE FROM pgqueue.queue")
    eyes.do("UPDATE pgqueue.key_rate SET count = 1, period = 3600 WHERE name = 'k'")
    assert await gate.take() == []
    assert line(eyes) == second


# What is reckoned -----------------------------------------------------------------------------------------------------


def job(number: int, start_by: float | None = None) -> Job:
    made = Job((number, 0, 11, "default", "x", "{}", 1, 5, 1, 0, 0, 0, 0, None, None, None, None, None, None), 1)
    made.start_by = start_by
    return made


def test_who_must_start_in_time_waits_before_others_and_behind_those_before_him() -> None:
    pool = Pool(["default"], 10)
    pool.put([(job(1), None), (job(2), None)])
    pool.put([(job(3, 5.0), None), (job(4, 5.0), None)], first=True)
    pool.put([(job(5, 5.0), None)], first=True)
    assert [entry[0].id for entry in pool.waiting] == [3, 4, 5, 1, 2]


def test_as_many_are_asked_for_as_start_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("pgqueue.worker.concurrency.claim_rates.monotonic", lambda: now[0])
    passing = Passing()
    assert passing.room(500) == 500
    passing._left, passing._late = 1, 0.05
    assert passing.room(500) == MOST_LEAST
    ended = 0
    for _ in range(30):  # a thousand in 10 ms, and more would have been done
        now[0] += 0.01
        ended += 1000
        passing.adapt(ended, starved=True)
    assert passing.most == MOST
    now[0] += 0.1
    passing.adapt(ended + 1000, starved=False)  # a thousand in 100 ms: 200 in two fifths of 50
    assert passing.most == 200
    now[0] += 10
    passing.adapt(ended + 1000, starved=True)  # there was nothing to do
    assert passing.most == 250
    passing.came_back()
    assert passing.most == 125
    for _ in range(5):
        passing.came_back()
    assert passing.most == MOST_LEAST


async def test_a_claim_waits_for_an_ask_of_its_worker_and_not_for_long() -> None:
    passing = Passing()
    passing._left = 1
    link = Link("", "pgqueue")
    ask: dict[str, Any] = {"lanes": [("a", 1)], "afters": [0], "n": 1, "worker_id": 1, "claim": 1, "skip": False}
    async with passing.asking:
        began = monotonic()
        async with passing.turn():
            assert passing.around(link, **ask) == ([], [])
        assert monotonic() - began >= TURN_SECONDS
    async with passing.turn():
        assert passing.asking.locked()
        before, after = passing.around(link, **ask)
    assert (len(before), len(after)) == (2, 1)
    assert not passing.asking.locked()
    assert passing.around(link, **ask | {"skip": True}) == ([], [])


def test_lines_of_rates_that_nobody_has_looked_at_may_be_short() -> None:
    passing = Passing()
    assert not passing.lasting(["rate:k"])
    assert passing.lasting(["lock:a", "limit:b"])
    wanted = [(0, json.dumps(["full", "open", "locked"]), "")]
    told = [(1, json.dumps([["full", 3, 0.05, False], ["open", 3, 0.05, True]]), "")]
    passing.brought([wanted, [()]], [told], [], ["rate:full"], 0.0, 1)
    assert passing.lasting(["rate:full", "rate:slow", "lock:a"])
    assert not any(passing.lasting([f"rate:{key}"]) for key in ("open", "locked"))
