"""Two jobs with one id, because sequences have lagged: each runs to its end, and what names them goes with them."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from time import monotonic
from typing import Any

import psycopg
import pytest
from roles import Role, role
from unique_jobs import Conn
from workers import Eyes, until, work

import pgqueue
from pgqueue import Job
from pgqueue.client.tasks import Task, task
from pgqueue.database import sequences
from pgqueue.database.sessions import Link, Session
from pgqueue.database.statements import Statement, text
from pgqueue.jobs.concurrency import Limit, Rate
from pgqueue.jobs.retry import RetryPolicy
from pgqueue.worker import doubles
from pgqueue.worker.fetch import refused_rows

__all__ = ["role"]

AGAIN = RetryPolicy(attempts=3, first=0.05)


class Stage:
    """What the handlers of one test share."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.began = asyncio.Event()
        self.ran: Counter[int] = Counter()
        self.at_once: Counter[str] = Counter()
        self.most: Counter[str] = Counter()

    @asynccontextmanager
    async def alone(self, key: str) -> AsyncIterator[None]:
        self.at_once[key] += 1
        self.most[key] = max(self.most[key], self.at_once[key])
        await asyncio.sleep(0)
        yield
        self.at_once[key] -= 1


stage = Stage()


@pytest.fixture(autouse=True)
def fresh_stage() -> None:
    global stage
    stage = Stage()


@task(name="doubles.waits")
async def waits() -> None:
    stage.began.set()
    await stage.go.wait()


@task(name="doubles.plain")
async def plain(n: int) -> None:
    stage.ran[n] += 1


@task(name="doubles.locked", lock="k")
async def locked(n: int) -> None:
    async with stage.alone("lock"):
        stage.ran[n] += 1


@task(name="doubles.locked_waits", lock="k")
async def locked_waits() -> None:
    async with stage.alone("lock"):
        stage.began.set()
        await stage.go.wait()


@task(name="doubles.limited", limit=Limit(2, name="two"))
async def limited(n: int) -> None:
    async with stage.alone("limit"):
        stage.ran[n] += 1


@task(name="doubles.rated", rate=Rate("500/s", name="fast"))
async def rated(n: int) -> None:
    stage.ran[n] += 1


@task(name="doubles.retried", retry=AGAIN)
async def retried(job: Job, n: int) -> None:
    if job.attempt == 1:
        raise ValueError("once more")
    stage.ran[n] += 1


@task(name="doubles.fails_later", retry=AGAIN)
async def fails_later(job: Job) -> None:
    if job.attempt == 1:
        stage.began.set()
        await stage.go.wait()
        raise ValueError("once more")


ALL: tuple[Task[..., Any], ...] = (waits, plain, locked, locked_waits, limited, rated, retried, fails_later)


def put(dsn: str, *jobs: Any, id: int | None = None) -> int:
    """Enqueue and commit; return the first id. If `id` is given, the sequence gives that id again."""
    with psycopg.connect(dsn) as conn:
        if id is not None:
            conn.execute("SELECT setval('pgqueue.job_id_seq', %s, false)", [id])
        got = pgqueue.enqueue_many(conn, jobs)[0].id
    assert id is None or got == id
    return got


def of_task(eyes: Eyes, mine: Task[..., Any]) -> tuple[int, str]:
    """The id and the state of the only job of this task."""
    [found] = eyes.all("SELECT id, state FROM pgqueue.job WHERE task = %s", mine.name)
    return found[0], found[1]


async def ended(eyes: Eyes, mine: Task[..., Any]) -> int:
    """The id of the only job of this task, once it is completed."""
    await until(lambda: of_task(eyes, mine)[1] == "completed", 20.0)
    return of_task(eyes, mine)[0]


# Where two jobs meet -------------------------------------------------------------------------------------------------


@pytest.mark.promise("F29")
async def test_a_job_that_is_claimed_beside_a_running_one_with_its_id_runs_under_a_new_id(
    dsn: str, eyes: Eyes, caplog: pytest.LogCaptureFixture
) -> None:
    async with work(dsn, *ALL):
        old = put(dsn, waits.new())
        await stage.began.wait()
        put(dsn, plain.using(idempotency_key="k").new(1), id=old)
        new = await ended(eyes, plain)
        assert new > old
        with psycopg.connect(dsn) as conn:
            [again] = pgqueue.enqueue_many(conn, [plain.using(idempotency_key="k").new(1)])
        assert (again.created, again.id) == (False, new)
        assert f"job {old} (doubles.plain) had the id of another job" in caplog.text
        assert f"it is job {new} now" in caplog.text
        stage.go.set()
        assert await ended(eyes, waits) == old
    assert stage.ran == {1: 1}


@pytest.mark.promise("F29")
async def test_a_doubled_job_whose_key_is_locked_keeps_no_other_job_waiting(
    dsn: str, eyes: Eyes, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Naive: the claim is tried again at once, with that job in it, until the lock is gone."""
    monkeypatch.setattr(refused_rows, "SOON_SECONDS", 1.0)
    async with work(dsn, *ALL) as worker:
        old = put(dsn, waits.new())
        await stage.began.wait()
        eyes.do("INSERT INTO pgqueue.queue (name, paused_at) VALUES ('default', now())")
        put(dsn, plain.using(idempotency_key="k").new(1), id=old)
        with psycopg.connect(dsn) as other:
            other.execute("SELECT FROM pgqueue.unique_key FOR UPDATE")
            eyes.do("UPDATE pgqueue.queue SET paused_at = NULL")
            worker.services.fetcher.wake()
            await until(lambda: f"job {old} (doubles.plain) cannot be started, and stays" in caplog.text, 20.0)
            put(dsn, retried.new(2))
            await ended(eyes, retried)
            assert of_task(eyes, plain) == (old, "available")
        assert await ended(eyes, plain) > old
        stage.go.set()
        assert await ended(eyes, waits) == old
    assert stage.ran == {1: 1, 2: 1}
    assert caplog.text.count("cannot be started, and stays") == 1


@pytest.mark.promise("F29")
async def test_a_job_that_is_unblocked_beside_a_running_one_with_its_id_keeps_its_turn(dsn: str, eyes: Eyes) -> None:
    """Its lock is held until it is unblocked, by a job with another id."""
    first = asyncio.Event()

    @task(name="doubles.first", lock="k")
    async def holds_lock() -> None:
        async with stage.alone("lock"):
            await first.wait()

    async with work(dsn, holds_lock, *ALL):
        put(dsn, holds_lock.new())
        old = put(dsn, waits.new())
        await stage.began.wait()
        put(dsn, locked.new(1), id=old)
        await until(lambda: of_task(eyes, locked)[1] == "blocked")
        first.set()
        assert await ended(eyes, locked) > old
        assert of_task(eyes, waits) == (old, "running")
        stage.go.set()
        await ended(eyes, waits)
    assert stage.ran == {1: 1} and stage.most["lock"] == 1


@pytest.mark.promise("F29")
async def test_a_due_job_with_the_id_of_an_available_one_starts_at_its_time(dsn: str, eyes: Eyes) -> None:
    eyes.do("INSERT INTO pgqueue.queue (name, paused_at) VALUES ('paused', now())")
    old = put(dsn, waits.using(queue="paused").new())
    async with work(dsn, *ALL) as worker:
        await until(worker.services.election.leads)
        put(dsn, plain.using(delay=0.1, idempotency_key="k").new(1), id=old)
        new = await ended(eyes, plain)
        assert new > old
        assert eyes.all("SELECT job_id FROM pgqueue.unique_key") == [(new,)]
        assert of_task(eyes, waits) == (old, "available")
    assert stage.ran == {1: 1}


@pytest.mark.promise("F29")
async def test_a_job_that_waits_for_a_rate_beside_a_running_one_with_its_id_starts(dsn: str, eyes: Eyes) -> None:
    async with work(dsn, *ALL):
        old = put(dsn, waits.new())
        await stage.began.wait()
        put(dsn, rated.new(1), id=old)
        assert await ended(eyes, rated) > old
        stage.go.set()
        assert await ended(eyes, waits) == old
    assert stage.ran == {1: 1}


@pytest.mark.promise("F29")
async def test_a_job_that_is_tried_again_finds_a_waiting_one_with_its_id(dsn: str, eyes: Eyes) -> None:
    async with work(dsn, *ALL):
        old = put(dsn, fails_later.new())
        await stage.began.wait()
        put(dsn, plain.using(delay=3600, idempotency_key="k").new(1), id=old)
        stage.go.set()
        assert await ended(eyes, fails_later) == old
        new, state = of_task(eyes, plain)
        assert state == "scheduled" and new > old
        assert eyes.all("SELECT job_id FROM pgqueue.unique_key") == [(new,)]
        assert eyes.one("SELECT run_at > now() + interval '50 minutes' FROM pgqueue.job_scheduled")


@pytest.mark.promise("F29")
async def test_an_iteration_goes_on_at_its_cursor_under_its_new_id(dsn: str, eyes: Eyes) -> None:
    seen: list[int] = []

    def items(cursor: int | None) -> Iterator[tuple[int, int]]:
        yield from ((n, n) for n in range((cursor or 0) + 1, 7))

    @task(name="doubles.walks", retry=AGAIN)
    def walks(job: Job) -> None:
        for batch in job.iterate(items, 2):
            if job.attempt == 1 and 3 in batch:
                eyes.do("SELECT setval('pgqueue.job_id_seq', %s, false)", job.id)
                eyes.do("INSERT INTO pgqueue.job (task, queue) VALUES ('another', 'paused')")
                raise ValueError("once more")
            seen.extend(batch)

    async with work(dsn, walks) as worker:
        await until(worker.services.election.leads)
        old = put(dsn, walks.new())
        assert await ended(eyes, walks) > old
    assert seen == [1, 2, 3, 4, 5, 6]
    assert eyes.all("SELECT id, state FROM pgqueue.job WHERE task = 'another'") == [(old, "available")]


# One statement -------------------------------------------------------------------------------------------------------

PAIRS = list(itertools.combinations(["running", "blocked", "available", "scheduled"], 2))
"""The row that keeps the id, and the row that meets it."""
EARLIER, LATER = "2020-01-01", "2021-01-01"


def row(conn: Conn, state: str, since: str, **columns: Any) -> None:
    """A row of a job that is enqueued at `since`."""
    columns = {"id": 5, "state": state, "enqueued_at": since, "task": f"{state} {since}"} | columns
    if state == "running":
        columns |= {"worker_id": 7, "claim": 3, "started_at": since}
    elif state == "scheduled":
        columns |= {"run_at": "2100-01-01", "reason": "failed before"}
    elif state == "blocked":
        columns |= {"key": "limit:m"}
    names, places = ", ".join(columns), ", ".join(["%s"] * len(columns))
    conn.execute(f"INSERT INTO pgqueue.job ({names}) VALUES ({places})".encode(), list(columns.values()))  # noqa: S608


HOLDER = {
    "lock_key": "l",
    "limit_key": "m",
    "holds": True,
    "hold_pos": 77,
    "rank": 10,
    "attempt": 2,
    "crashes": 0,
    "snoozes": 1,
    "unique_key": "u",
    "idempotency_key": "i",
    "headers": '{"a": 1}',
    "max_attempts": 9,
    "deadline": "2100-01-01",
}
"""What a row that waits may say beside its state."""
NOTED = (
    "INSERT INTO pgqueue.unique_key (key, job_id, enqueued_at, hold, seconds) "
    "VALUES ('unique:u', 5, %(since)s, 'pending', 0), ('idempotency:i', 5, %(since)s, 'after', 60)",
    "INSERT INTO pgqueue.job_cursor (job_id, enqueued_at, n, cursor) VALUES (5, %(since)s, 4, '44')",
    "INSERT INTO pgqueue.job_signal (job_id, enqueued_at, kind, reason) VALUES (5, %(since)s, 'cancel', 'mine')",
)
"""What names the job beside its row."""


def resolve(conn: Conn, low: int = 4, high: int = 6) -> list[tuple[int, str, int | None]]:
    """What the statement answers, sent as a worker sends it: id, task, new id."""
    conn.execute("SELECT pgqueue.advance_sequences(false)")
    params = {"notify": True, "low": low, "high": high}
    found = conn.execute(text("doubles_resolve", "pgqueue").encode(), params).fetchall()
    return [(id, task, new_id) for id, task, new_id, *_ in found]


def met(conn: Conn) -> psycopg.Error:
    """The error of a move to where a row with the id 5 is."""
    with pytest.raises(psycopg.errors.UniqueViolation) as raised, conn.transaction():
        row(conn, "running", LATER)
    return raised.value


def facts(conn: Conn, id: int) -> list[Any]:
    """All that is known of the only job with this id, but for the id and the position."""
    [(told,)] = conn.execute(
        "SELECT to_jsonb(j) - 'id' - 'pos' FROM pgqueue.job j WHERE id = %s AND state <> 'running' AND task <> 'other'",
        [id],
    ).fetchall()
    beside = [
        conn.execute(f"SELECT to_jsonb(x) - 'job_id' FROM {table} x WHERE job_id = %s ORDER BY 1".encode(), [id])  # noqa: S608
        for table in ("pgqueue.unique_key", "pgqueue.job_cursor", "pgqueue.job_signal")
    ]
    return [told, *[[fact for (fact,) in each.fetchall()] for each in beside]]


@pytest.mark.promise("F29")
@pytest.mark.parametrize(("stays", "moves"), PAIRS)
def test_a_job_that_gets_a_new_id_keeps_all_else(conn: Conn, stays: str, moves: str) -> None:
    conn.execute("SELECT setval('pgqueue.job_id_seq', 1000)")
    row(conn, moves, LATER, **HOLDER)
    for each in NOTED:
        conn.execute(each.encode(), {"since": LATER})
    before = facts(conn, 5)
    row(conn, stays, EARLIER, **({"task": "other"} if stays != "running" else {}))
    [(pos,)] = conn.execute("SELECT coalesce(max(pos), 0) FROM pgqueue.job").fetchall()
    assert resolve(conn) == [(5, f"{moves} {LATER}", 1001)]
    assert facts(conn, 1001) == before
    assert [len(each) for each in before[1:]] == [2, 1, 1]
    assert conn.execute("SELECT state, enqueued_at::date::text FROM pgqueue.job WHERE id = 5").fetchall() == [
        (stays, EARLIER)
    ]
    if moves == "available":
        assert conn.execute("SELECT pos > %s FROM pgqueue.job_available", [pos]).fetchall() == [(True,)]
    assert resolve(conn) == []


@pytest.mark.promise("F29")
@pytest.mark.parametrize(("stays", "moves"), PAIRS)
def test_a_second_row_of_a_job_is_refused_and_the_first_keeps_what_names_it(conn: Conn, stays: str, moves: str) -> None:
    row(conn, stays, EARLIER)
    row(conn, moves, EARLIER, unique_key="u")
    for each in NOTED:
        conn.execute(each.encode(), {"since": EARLIER})
    assert resolve(conn) == [(5, f"{moves} {EARLIER}", None)]
    assert conn.execute("SELECT id, state, reason FROM pgqueue.job ORDER BY reason").fetchall() == [
        (5, "failed", "refused"),
        (5, stays, None),
    ]
    assert conn.execute("SELECT DISTINCT job_id FROM pgqueue.unique_key").fetchall() == [(5,)]


@pytest.mark.promise("F29")
def test_of_many_rows_of_one_id_each_job_goes_on_once(conn: Conn) -> None:
    """Two jobs, and second rows of both: the first row of each stays."""
    row(conn, "running", EARLIER)
    for state in ("blocked", "available", "scheduled"):
        row(conn, state, LATER if state != "available" else EARLIER)
    found = resolve(conn)
    assert sorted((task, new is None) for _, task, new in found) == [
        (f"available {EARLIER}", True),
        (f"blocked {LATER}", False),
        (f"scheduled {LATER}", True),
    ]
    assert conn.execute("SELECT state FROM pgqueue.job WHERE state <> 'failed' ORDER BY 1").fetchall() == [
        ("blocked",),
        ("running",),
    ]


@pytest.mark.promise("F29")
@pytest.mark.parametrize("locked_row", ["job_available WHERE id = 5", "unique_key", "job_signal"])
def test_nothing_waits_for_a_locked_row_and_nothing_is_torn_from_its_job(dsn: str, conn: Conn, locked_row: str) -> None:
    row(conn, "running", EARLIER)
    row(conn, "available", LATER, **HOLDER)
    for each in NOTED:
        conn.execute(each.encode(), {"since": LATER})
    conn.commit()
    with psycopg.connect(dsn) as other:
        other.execute(f"SELECT FROM pgqueue.{locked_row} FOR UPDATE".encode())
        conn.execute("SET LOCAL lock_timeout = '5s'")
        before = facts(conn, 5)
        assert resolve(conn) == []
        assert facts(conn, 5) == before
        conn.commit()
    [(_, _, new_id)] = resolve(conn)
    assert new_id is not None and facts(conn, new_id) == before


@pytest.mark.promise("F29")
@pytest.mark.second
def test_many_that_resolve_beside_many_that_cancel_wait_for_none_and_double_nothing(dsn: str, eyes: Eyes) -> None:
    """A deadlock, or a wait of a second, is an error here."""
    many = 300
    eyes.do(
        "INSERT INTO pgqueue.job (id, state, task, enqueued_at, worker_id, claim, started_at) "
        "SELECT g, 'running', 'runs ' || g, '2020-01-01', 7, 3, now() FROM generate_series(1, %s) AS g",
        many,
    )
    for state in ("available", "blocked"):
        eyes.do(
            "INSERT INTO pgqueue.job (id, state, task, key, unique_key) SELECT g, %s, %s || g, 'lock:l', %s || g "
            "FROM generate_series(1, %s) AS g",
            *(state, f"{state} ", state, many),
        )
    eyes.do(
        "INSERT INTO pgqueue.unique_key (key, job_id, enqueued_at, hold) "
        "SELECT 'unique:' || unique_key, id, enqueued_at, 'live' FROM pgqueue.job WHERE unique_key IS NOT NULL"
    )

    def act(n: int) -> int:
        chance = random.Random(n)
        cancelled = 0
        with psycopg.connect(dsn, options="-c lock_timeout=1s") as conn:
            for _ in range(20):
                if n % 2:
                    low = chance.randint(1, many)
                    resolve(conn, low, low + many // 2)
                else:
                    ids = sorted(chance.sample(range(1, many + 1), 3))
                    with psycopg.connect(dsn) as by_hand:
                        cancelled += sum(each.did == "cancelled" for each in pgqueue.cancel(by_hand, *ids))
                conn.commit()
        return cancelled

    with ThreadPoolExecutor(4) as pool:
        cancelled = sum(pool.map(act, range(4)))
    with psycopg.connect(dsn) as conn:
        while resolve(conn, 1, many):
            conn.commit()
    assert eyes.one("SELECT count(*) FROM pgqueue.job") == eyes.one("SELECT count(DISTINCT task) FROM pgqueue.job")
    assert eyes.one("SELECT count(*) FROM pgqueue.job") == 3 * many
    assert eyes.states().get("cancelled", 0) == cancelled and "failed" not in eyes.states()
    once = "SELECT count(*) = count(DISTINCT id) FROM pgqueue.job WHERE state IN ('available', 'blocked', 'running')"
    assert eyes.one(once)
    astray = (
        "SELECT count(*) FROM pgqueue.job j JOIN pgqueue.unique_key k ON k.key = 'unique:' || j.unique_key "
        "WHERE j.state IN ('available', 'blocked') AND (k.job_id, k.enqueued_at) <> (j.id, j.enqueued_at)"
    )
    assert eyes.one(astray) == 0


@pytest.mark.promise("F29")
@pytest.mark.parametrize(("stays", "moves"), PAIRS)
def test_the_rights_of_a_worker_are_enough(conn: Conn, role: Role, stays: str, moves: str) -> None:
    row(conn, stays, EARLIER)
    row(conn, moves, LATER, **HOLDER)
    for each in NOTED:
        conn.execute(each.encode(), {"since": LATER})
    conn.commit()
    with psycopg.connect(role("work")) as working:
        [(_, _, new_id)] = resolve(working)
    assert new_id is not None and len(facts(conn, new_id)[1]) == 2


@pytest.mark.promise("F29")
@pytest.mark.parametrize("id", [5, -(2**63), 2**63 - 1])
async def test_the_id_that_an_error_names_to_a_worker_is_resolved_with_those_near_it(
    dsn: str, conn: Conn, role: Role, id: int
) -> None:
    """A sequence that lagged has given all of them again. One of another length of time away waits for its meeting."""
    others = [id + n if id < 0 else id - n for n in (1, doubles.NEAR, doubles.NEAR + 1)] if id != 5 else [6, 1005, 1006]
    for each in (id, *others):
        row(conn, "running", EARLIER, id=each)
        row(conn, "scheduled", LATER, id=each)
    conn.commit()
    working = role("work")
    session = Session(Link(working, "pgqueue"), "fetch")
    move = "INSERT INTO pgqueue.job_running (state, id, task, worker_id, claim, started_at) "
    again = Statement(move + "SELECT 'running', %(id)s, 't', 7, 3, now()", {"id": id}, list)
    try:
        with pytest.raises(psycopg.errors.UniqueViolation) as raised:
            await session.run(again)
        assert await doubles.resolve(session, raised.value, notify=False)
        assert not await doubles.resolve(session, raised.value, notify=False)
    finally:
        await session.close()
    assert conn.execute("SELECT id FROM pgqueue.job_scheduled WHERE id = ANY (%s)", [[id, *others]]).fetchall() == [
        (others[-1],)
    ]


@pytest.mark.promise("F29")
@pytest.mark.parametrize("times", [0, 1, 2, 3])
async def test_sequences_that_are_set_back_again_meanwhile_end_no_service(
    dsn: str, conn: Conn, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """The new id is drawn from a sequence that was set back after it had been advanced: it belongs to a cursor."""
    row(conn, "running", EARLIER)
    row(conn, "available", LATER)
    for id in (5, 26):
        conn.execute("INSERT INTO pgqueue.job_cursor VALUES (%s, 1, '1', now(), %s)", [id, LATER])
    conn.commit()
    set_back = Statement("SELECT setval('pgqueue.job_id_seq', 26, false)", {}, lambda rows: 0)
    left = [set_back] * times
    advance = sequences.advancing
    monkeypatch.setattr(
        doubles, "advancing", lambda schema, *, whole: left.pop() if left else advance(schema, whole=whole)
    )
    session = Session(Link(dsn, "pgqueue"), "fetch")
    try:
        found = await doubles.resolve(session, met(conn), notify=False)
    finally:
        await session.close()
    assert not left
    assert found is (times < doubles.TRIES)
    ids = [id for (id,) in conn.execute("SELECT id FROM pgqueue.job_available").fetchall()]
    assert (ids != [5]) is found, ids
    cursors = {id for (id,) in conn.execute("SELECT job_id FROM pgqueue.job_cursor").fetchall()}
    assert cursors == {26, *ids}, "the cursor went with its job"


@pytest.mark.promise("F29")
@pytest.mark.parametrize(
    "error", [psycopg.errors.UniqueViolation("its id stands twice"), psycopg.errors.CheckViolation("odd")]
)
async def test_what_has_an_id_that_stands_twice_is_tried_again_soon(dsn: str, error: psycopg.Error) -> None:
    """The other row may have been locked at that moment only. Naive is to wait as long as for a bad row: a minute."""
    async with work(dsn) as worker:
        services = worker.services
        await services.unblocker._refuse("lock:k", error)
        await services.rate_limiter._refuse("r", error)
        await services.sweep._refused((7, "t"), error)
        untils = [services.unblocker._left.until("lock:k"), services.rate_limiter._left.until("r")]
        for until_then in (*untils, services.sweep._left.until(7)):
            assert (until_then - monotonic() <= 5.0) == isinstance(error, psycopg.errors.UniqueViolation)
