"""Iteration: batches that are one transaction each, applied once and in order, whatever dies, stops or is lost."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import bodies
import psycopg
import pytest
from workers import Eyes, until, work

import pgqueue
from pgqueue import Job, Snooze, testing
from pgqueue.client.tasks import Task, task
from pgqueue.jobs.outcomes import Cancelled
from pgqueue.jobs.retry import RetryPolicy
from pgqueue.worker.transactions.commit import Commit

SOON = RetryPolicy(attempts=5, first=0.01, most=0.05)
pytestmark = pytest.mark.each_value
ITEMS = 25
SIZE = 10

both = pytest.mark.parametrize("on_loop", [False, True], ids=["thread", "loop"])
kinds = pytest.mark.parametrize("transactional", [False, True], ids=["plain", "transactional"])


@pytest.fixture
def effects(eyes: Eyes) -> Eyes:
    """A table of effects; `applied` gives them in the order of their commits."""
    eyes.do("CREATE TABLE effect (place bigserial, job bigint NOT NULL, item int NOT NULL)")
    return eyes


def applied(eyes: Eyes) -> list[int]:
    return [item for (item,) in eyes.all("SELECT item FROM effect ORDER BY place")]


def cursors(eyes: Eyes) -> list[tuple[Any, ...]]:
    return eyes.all("SELECT n, cursor FROM pgqueue.job_cursor ORDER BY job_id, n")


def items(cursor: int | None, most: int = ITEMS) -> Iterator[tuple[int, int]]:
    for item in range((cursor or 0) + 1, most + 1):
        yield item, item


async def aitems(cursor: int | None, most: int = ITEMS) -> AsyncIterator[tuple[int, int]]:
    for pair in items(cursor, most):
        await asyncio.sleep(0)
        yield pair


INSERT = "INSERT INTO effect (job, item) VALUES (%s, %s)"

Watch = Callable[[Job, list[int]], object]
"""Called in the body of the loop, after the writes."""


def going(on_loop: bool, transactional: bool, watch: Watch = lambda job, batch: None, **options: Any) -> Task[..., Any]:
    """A task that goes through `ITEMS` items in batches of `SIZE`, and writes each into `effect`."""

    def goes(job: Job) -> str:
        for batch in job.iterate(items, SIZE):
            for item in batch:
                job.connection.execute(INSERT, [job.id, item])
            watch(job, batch)
        return "through"

    async def agoes(job: Job) -> str:
        async for batch in job.aiterate(aitems, SIZE):
            conn = await job.aconnection()
            for item in batch:
                await conn.execute(INSERT, [job.id, item])
            watched = watch(job, batch)
            if watched is not None:
                await watched  # type: ignore[misc]
        return "through"

    return declared(agoes if on_loop else goes, transactional=transactional, **options)


def declared(fn: Callable[..., Any], **options: Any) -> Task[..., Any]:
    name = f"iterate.{fn.__qualname__.replace('.<locals>', '')}"
    made: Task[..., Any] = task(name=name, **({"retry": SOON} | options))(fn)
    return made


def _number(statements: Any) -> int | None:
    """Which batch these statements end."""
    return statements[0].params.get("n") if statements else None


def put(dsn: str, goes: Task[..., Any], *args: Any, **options: Any) -> int:
    with psycopg.connect(dsn) as conn:
        return (goes.using(**options) if options else goes).enqueue(conn, *args).id


@pytest.mark.promise("T15")
@both
@kinds
async def test_each_batch_is_one_transaction_with_its_cursor(
    dsn: str, effects: Eyes, on_loop: bool, transactional: bool
) -> None:
    seen: list[tuple[list[int], int, list[Any]]] = []

    def look(job: Job, batch: list[int]) -> None:
        with psycopg.connect(dsn, autocommit=True) as conn:
            (others,) = conn.execute("SELECT count(*) FROM effect").fetchone() or (None,)
            seen.append((batch, others, conn.execute("SELECT n, cursor FROM pgqueue.job_cursor ORDER BY n").fetchall()))

    goes = going(on_loop, transactional, look)
    async with work(dsn, goes) as worker:
        job = put(dsn, goes)
        await until(effects.is_in(job, "completed"))
        await until(lambda: not cursors(effects))
        await until(
            lambda: not worker.services.progress._cursors_left and not worker.services.context._iterations.places
        )
    assert seen == [
        ([*range(1, 11)], 0, []),
        ([*range(11, 21)], 10, [(1, 10)]),
        ([*range(21, 26)], 20, [(1, 10), (2, 20)]),
    ]
    assert applied(effects) == [*range(1, 26)]
    assert effects.one("SELECT result FROM pgqueue.job_done") == "through"
    assert effects.one("SELECT count(DISTINCT xmin::text) FROM effect") == 3
    assert worker.services.completer.fenced == 0


@pytest.mark.promise("T02")
@both
@kinds
async def test_a_failed_batch_is_rolled_back_and_the_next_attempt_goes_on_with_it(
    dsn: str, effects: Eyes, on_loop: bool, transactional: bool
) -> None:
    batches: list[list[int]] = []

    def fail_once(job: Job, batch: list[int]) -> None:
        batches.append(batch)
        if job.attempt == 1 and batch[0] == 11:
            raise LookupError("in the middle")

    goes = going(on_loop, transactional, fail_once)
    async with work(dsn, goes):
        job = put(dsn, goes)
        await until(effects.is_in(job, "completed"))
    assert [batch[0] for batch in batches] == [1, 11, 11, 21]
    assert applied(effects) == [*range(1, 26)]
    assert effects.all("SELECT outcome, error_type FROM pgqueue.attempt") == [("failed", "LookupError")]


@pytest.mark.second
@both
@kinds
async def test_a_dead_job_keeps_its_cursor_and_a_retry_by_hand_goes_on(
    dsn: str, effects: Eyes, on_loop: bool, transactional: bool
) -> None:
    broken = True

    def fail(job: Job, batch: list[int]) -> None:
        if broken and batch[0] == 21:
            raise LookupError

    goes = going(on_loop, transactional, fail)
    async with work(dsn, goes):
        job = put(dsn, goes, retry=1)
        await until(effects.is_in(job, "failed"))
        assert cursors(effects) == [(1, 10), (2, 20)]
        broken = False
        with psycopg.connect(dsn) as conn:
            pgqueue.retry(conn, job)
        await until(effects.is_in(job, "completed"))
        await until(lambda: not cursors(effects))
    assert applied(effects) == [*range(1, 26)]


@pytest.mark.promise("L06")
@both
@kinds
async def test_a_run_whose_job_was_given_away_commits_no_batch(
    dsn: str, effects: Eyes, on_loop: bool, transactional: bool
) -> None:
    began, go_on = threading.Event(), threading.Event()

    def hold(job: Job, batch: list[int]) -> object:
        if job.attempt == 1 and batch[0] == 11:
            began.set()
            if on_loop:
                return asyncio.to_thread(go_on.wait, 20)
            assert go_on.wait(30)
        return None

    goes = going(on_loop, transactional, hold)
    async with work(dsn, goes) as late:
        job = put(dsn, goes)
        await until(began.is_set)
        effects.do(
            "WITH gone AS (DELETE FROM pgqueue.job_running RETURNING *) "
            "INSERT INTO pgqueue.job_available (id, enqueued_at, task, args, queue, attempt) "
            "SELECT id, enqueued_at, task, args, 'elsewhere', attempt FROM gone"
        )
        async with work(dsn, goes, queues=["elsewhere"]):
            await until(effects.is_in(job, "completed"))
            await until(lambda: not cursors(effects))  # now only the fence is left: that number is free again
            go_on.set()
            await until(lambda: late.services.completer.fenced == 1)
    assert applied(effects) == [*range(1, 26)]


@pytest.mark.promise("T03")
@both
@kinds
@pytest.mark.parametrize("committed", [False, True], ids=["before", "after"])
async def test_a_commit_of_a_batch_whose_answer_is_lost_is_settled(
    dsn: str, effects: Eyes, monkeypatch: pytest.MonkeyPatch, committed: bool, on_loop: bool, transactional: bool
) -> None:
    """The session ends right before the COMMIT of the second batch, or right after it."""
    cuts: list[int] = []
    commit, acommit = bodies.real(Commit, "_commit_with")

    def end(conn: Any) -> None:
        cuts.append(1)
        effects.do("SELECT pg_terminate_backend(%s, 5000)", conn.info.backend_pid)

    def cutting(work: Commit, conn: Any, statements: Any) -> None:
        second = _number(statements) == 2 and not cuts
        if committed or not second:
            commit(work, conn, statements)
        if second:
            end(conn)
            if committed:
                conn.close()
                raise psycopg.OperationalError("the answer did not come")
            commit(work, conn, statements)

    async def acutting(work: Commit, conn: Any, statements: Any) -> None:
        second = _number(statements) == 2 and not cuts
        if committed or not second:
            await acommit(work, conn, statements)
        if second:
            end(conn)
            if committed:
                await conn.close()
                raise psycopg.OperationalError("the answer did not come")
            await acommit(work, conn, statements)

    bodies.replace(monkeypatch, Commit, "_commit_with", cutting, acutting)
    goes = going(on_loop, transactional)
    async with work(dsn, goes):
        job = put(dsn, goes)
        await until(effects.is_in(job, "completed"))
    assert cuts == [1]
    assert applied(effects) == [*range(1, 26)]
    assert effects.one("SELECT count(*) FROM pgqueue.attempt") == (0 if committed else 1)


@both
@kinds
async def test_what_stops_a_job_in_the_commit_of_a_batch_stops_it_after_it(
    dsn: str, effects: Eyes, monkeypatch: pytest.MonkeyPatch, on_loop: bool, transactional: bool
) -> None:
    """Cancelled while the COMMIT of the second batch is under way: that batch is kept, the next one is not begun."""
    told: list[bool] = []
    commit, acommit = bodies.real(Commit, "_commit_with")

    def interrupt(job_id: int) -> None:
        told.append(worker.services.executor.interrupt(job_id, Cancelled("enough")))

    def telling(work: Commit, conn: Any, statements: Any) -> None:
        if _number(statements) == 2:
            interrupt(work._job.id)
        commit(work, conn, statements)

    async def atelling(work: Commit, conn: Any, statements: Any) -> None:
        if _number(statements) == 2:
            interrupt(work._job.id)
            await asyncio.sleep(0)
        await acommit(work, conn, statements)

    bodies.replace(monkeypatch, Commit, "_commit_with", telling, atelling)
    goes = going(on_loop, transactional)
    async with work(dsn, goes) as worker:
        job = put(dsn, goes)
        await until(effects.is_in(job, "cancelled"))
    assert told == [True]
    assert applied(effects) == [*range(1, 21)]
    assert cursors(effects) == [(1, 10), (2, 20)]


@both
@kinds
async def test_a_cancelled_job_stops_in_the_middle_and_goes_on_when_it_is_retried(
    dsn: str, effects: Eyes, on_loop: bool, transactional: bool
) -> None:
    began = threading.Event()
    freed = threading.Event()

    def wait(job: Job, batch: list[int]) -> object:
        if batch[0] != 11 or freed.is_set():
            return None
        began.set()
        if on_loop:
            return asyncio.sleep(3600)
        while not freed.wait(0.005):
            pass
        return None

    goes = going(on_loop, transactional, wait)
    async with work(dsn, goes):
        job = put(dsn, goes)
        await until(began.is_set)
        with psycopg.connect(dsn) as conn:
            pgqueue.cancel(conn, job)
        await until(effects.is_in(job, "cancelled"))
        assert applied(effects) == [*range(1, 11)]
        freed.set()
        with psycopg.connect(dsn) as conn:
            pgqueue.retry(conn, job)
        await until(effects.is_in(job, "completed"))
    assert applied(effects) == [*range(1, 26)]


@pytest.mark.second
@both
@kinds
async def test_a_timeout_stops_it_and_the_next_attempt_goes_on(
    dsn: str, effects: Eyes, on_loop: bool, transactional: bool
) -> None:
    def hang(job: Job, batch: list[int]) -> object:
        if job.attempt > 1 or batch[0] != 21:
            return None
        if on_loop:
            return asyncio.sleep(3600)
        while True:
            job.checkpoint()

    goes = going(on_loop, transactional, hang, timeout=1.0)
    async with work(dsn, goes):
        job = put(dsn, goes)
        await until(effects.is_in(job, "completed"))
    assert applied(effects) == [*range(1, 26)]
    assert effects.all("SELECT outcome FROM pgqueue.attempt") == [("timeout",)]


@both
@kinds
async def test_a_worker_that_stops_gives_it_back_and_another_goes_on(
    dsn: str, effects: Eyes, on_loop: bool, transactional: bool
) -> None:
    began, batches = threading.Event(), []

    def hang(job: Job, batch: list[int]) -> object:
        batches.append((batch[0], job.attempt))
        if len(batches) != 2:
            return None
        began.set()
        if on_loop:
            return asyncio.sleep(3600)
        while True:
            pass

    goes = going(on_loop, transactional, hang)
    async with work(dsn, goes) as first:
        job = put(dsn, goes)
        await until(began.is_set)
        await first.stop(0.1)
    async with work(dsn, goes):
        await until(effects.is_in(job, "completed"))
    assert batches == [(1, 1), (11, 1), (11, 1), (21, 1)]  # its attempt is not spent
    assert applied(effects) == [*range(1, 26)]


@both
@kinds
@pytest.mark.parametrize("held", [False, True], ids=["loop", "variable"])
async def test_a_job_cannot_complete_out_of_the_middle_of_its_loop(
    dsn: str, effects: Eyes, on_loop: bool, transactional: bool, held: bool
) -> None:
    kept: list[Any] = []

    def leaves(job: Job) -> None:
        batches = job.iterate(items, SIZE)
        if held:
            kept.append(batches)
        for batch in batches:
            job.connection.execute(INSERT, [job.id, batch[0]])
            if batch[0] == 11:
                break

    async def aleaves(job: Job) -> None:
        batches = job.aiterate(items, SIZE)
        if held:
            kept.append(batches)
        async for batch in batches:
            await (await job.aconnection()).execute(INSERT, [job.id, batch[0]])
            if batch[0] == 11:
                return

    left = declared(aleaves if on_loop else leaves, transactional=transactional, retry=1)
    async with work(dsn, left) as worker:
        job = put(dsn, left)
        await until(effects.is_in(job, "failed"))
        await until(lambda: not worker.state.held)
        assert applied(effects) == [1]
        assert "out of the middle of its iteration, in batch 2" in effects.one("SELECT message FROM pgqueue.attempt")
        idle = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'pgqueue job' AND state LIKE 'idle in%%'"
        await until(lambda: effects.one(idle) == 0)
        kept.clear()


@both
@kinds
async def test_a_snooze_in_the_loop_leaves_that_batch_for_later(
    dsn: str, effects: Eyes, on_loop: bool, transactional: bool
) -> None:
    def snoozes(job: Job) -> object:
        for batch in job.iterate(items, SIZE):
            for item in batch:
                job.connection.execute(INSERT, [job.id, item])
            if batch[0] == 11 and not job.snoozes:
                return Snooze(0.01)
        return None

    async def asnoozes(job: Job) -> object:
        async for batch in job.aiterate(items, SIZE):
            for item in batch:
                await (await job.aconnection()).execute(INSERT, [job.id, item])
            if batch[0] == 11 and not job.snoozes:
                return Snooze(0.01)
        return None

    snoozing = declared(asnoozes if on_loop else snoozes, transactional=transactional)
    async with work(dsn, snoozing):
        job = put(dsn, snoozing)
        await until(effects.is_in(job, "completed"))
    assert applied(effects) == [*range(1, 26)]
    assert effects.all("SELECT attempt, snoozes FROM pgqueue.job_done") == [(1, 1)]


@both
async def test_what_follows_the_loop_is_committed_with_the_completion(dsn: str, effects: Eyes, on_loop: bool) -> None:
    def goes(job: Job) -> None:
        for batch in job.iterate(items, SIZE):
            job.connection.execute(INSERT, [job.id, batch[0]])
        job.connection.execute(INSERT, [job.id, 100 + job.attempt])
        if job.attempt == 1:
            raise LookupError

    async def agoes(job: Job) -> None:
        async for batch in job.aiterate(items, SIZE):
            await (await job.aconnection()).execute(INSERT, [job.id, batch[0]])
        await (await job.aconnection()).execute(INSERT, [job.id, 100 + job.attempt])
        if job.attempt == 1:
            raise LookupError

    going_on = declared(agoes if on_loop else goes, transactional=True)
    async with work(dsn, going_on):
        job = put(dsn, going_on)
        await until(effects.is_in(job, "completed"))
    assert applied(effects) == [1, 11, 21, 102]
    assert effects.one(
        "SELECT (SELECT xmin::text FROM effect WHERE item = 102) = (SELECT xmin::text FROM pgqueue.job_done)"
    )


async def test_each_batch_has_a_session_of_sqlalchemy(dsn: str, effects: Eyes) -> None:
    sa = pytest.importorskip("sqlalchemy")

    @task(name="iterate.session", retry=SOON)
    def goes(job: Job) -> None:
        for batch in job.iterate(items, SIZE):
            for item in batch:
                job.session().execute(sa.text("INSERT INTO effect (job, item) VALUES (:job, :item)"), [
                    {"job": job.id, "item": item},
                ])  # fmt: skip
            if batch[0] == 11 and job.attempt == 1:
                raise LookupError

    async with work(dsn, goes):
        job = put(dsn, goes)
        await until(effects.is_in(job, "completed"))
    assert applied(effects) == [*range(1, 26)]


@task(name="iterate.after")
async def after(item: int) -> None:
    pass


@pytest.mark.promise("L15")
@both
@kinds
async def test_successors_go_with_the_batch_that_enqueued_them(
    dsn: str, effects: Eyes, on_loop: bool, transactional: bool
) -> None:
    def enqueue(job: Job, batch: list[int]) -> None:
        job.enqueue(after, batch[0])
        if batch[0] == 11 and job.attempt == 1:
            raise LookupError

    goes = going(on_loop, transactional, enqueue)
    async with work(dsn, goes, after):
        job = put(dsn, goes)
        await until(effects.is_in(job, "completed"))
        await until(effects.done(4))
    assert effects.all(
        "SELECT (args->>'item')::int FROM pgqueue.job_done WHERE task = 'iterate.after' ORDER BY id"
    ) == [(1,), (11,), (21,)]


@both
@kinds
async def test_what_was_enqueued_before_the_loop_waits_for_the_completion(
    dsn: str, effects: Eyes, on_loop: bool, transactional: bool
) -> None:
    def goes(job: Job) -> None:
        job.enqueue(after, 1)
        for batch in job.iterate(items, SIZE):
            if batch[0] == 11 and job.attempt == 1:
                raise LookupError
        job.enqueue(after, 2)

    async def agoes(job: Job) -> None:
        job.enqueue(after, 1)
        async for batch in job.aiterate(items, SIZE):
            if batch[0] == 11 and job.attempt == 1:
                raise LookupError
        job.enqueue(after, 2)

    enqueues = declared(agoes if on_loop else goes, transactional=transactional)
    async with work(dsn, enqueues, after):
        job = put(dsn, enqueues)
        await until(effects.is_in(job, "completed"))
        await until(effects.done(3))
    assert effects.all(
        "SELECT (args->>'item')::int FROM pgqueue.job_done WHERE task = 'iterate.after' ORDER BY id"
    ) == [(1,), (2,)]


@pytest.mark.promise("T07")
@both
@kinds
async def test_an_abort_in_a_batch_is_run_again_in_place_and_goes_on(
    dsn: str, effects: Eyes, on_loop: bool, transactional: bool
) -> None:
    aborts: list[int] = []

    def abort_once(job: Job, batch: list[int]) -> None:
        if batch[0] == 11 and not aborts:
            aborts.append(1)
            raise psycopg.errors.SerializationFailure("as if")

    goes = going(on_loop, transactional, abort_once)
    async with work(dsn, goes):
        job = put(dsn, goes)
        await until(effects.is_in(job, "completed"))
    assert applied(effects) == [*range(1, 26)]
    assert effects.all("SELECT attempt FROM pgqueue.job_done") == [(1,)]


@both
async def test_a_deferred_constraint_fails_its_own_batch(dsn: str, effects: Eyes, on_loop: bool) -> None:
    effects.do("ALTER TABLE effect ADD CONSTRAINT once UNIQUE (item) DEFERRABLE INITIALLY DEFERRED")
    effects.do("INSERT INTO effect (job, item) VALUES (0, 15)")
    goes = going(on_loop, False)
    async with work(dsn, goes):
        job = put(dsn, goes, retry=1)
        await until(effects.is_in(job, "failed"))
    assert applied(effects) == [15, *range(1, 11)]
    assert cursors(effects) == [(1, 10)]
    assert effects.one("SELECT error_type FROM pgqueue.attempt") == "UniqueViolation"


@kinds
async def test_a_timeout_of_the_handlers_own_does_not_break_into_a_commit(
    dsn: str, effects: Eyes, monkeypatch: pytest.MonkeyPatch, transactional: bool
) -> None:
    _, commit = bodies.real(Commit, "_commit_with")
    ended: list[bool] = []

    async def slowly(work: Commit, conn: Any, statements: Any) -> None:
        if _number(statements) == 2 and not ended:
            asyncio.get_running_loop().call_soon(expired.set)
            await asyncio.sleep(0.05)
            ended.append(True)
        await commit(work, conn, statements)

    expired = asyncio.Event()

    async def agoes(job: Job) -> str:
        if job.attempt > 1:
            async for batch in job.aiterate(items, SIZE):
                await (await job.aconnection()).execute(INSERT, [job.id, batch[0]])
            return "through"

        async def loop() -> None:
            async for batch in job.aiterate(items, SIZE):
                await (await job.aconnection()).execute(INSERT, [job.id, batch[0]])

        looping = asyncio.ensure_future(loop())
        await expired.wait()
        looping.cancel()
        await asyncio.wait([looping])
        assert looping.cancelled()
        raise LookupError("timed out")

    bodies.replace(monkeypatch, Commit, "_commit_with", None, slowly)
    goes = declared(agoes, transactional=transactional)
    async with work(dsn, goes):
        job = put(dsn, goes)
        await until(effects.is_in(job, "completed"))
    assert ended == [True]
    assert applied(effects) == [1, 11, 21]


async def test_it_says_what_cannot_be(dsn: str, effects: Eyes) -> None:
    said: list[str] = []

    def asked(call: Callable[[], Any]) -> None:
        try:
            call()
        except Exception as error:
            said.append(str(error))

    @task(name="iterate.wrongs", transactional=True)
    def wrongs(job: Job) -> None:
        asked(lambda: job.iterate(items, 0))
        job.connection.execute("SELECT 1")
        asked(lambda: list(job.iterate(items)))
        asked(lambda: job.iterate(items))

    @task(name="iterate.plain", retry=1)
    def plain(job: Job) -> None:
        asked(lambda: job.connection)
        for _ in job.iterate(items):
            asked(lambda: job.iterate(items))
            asked(lambda: job.complete(job.connection))
        asked(lambda: job.connection)

    @task(name="iterate.awrong")
    async def awrong(job: Job) -> None:
        asked(lambda: list(job.iterate(items)))
        asked(lambda: job.iterate([1, 2]))  # type: ignore[arg-type]
        asked(lambda: job.aiterate([1, 2]))  # type: ignore[arg-type]

    for each in (wrongs, plain, awrong):
        async with work(dsn, each):
            job = put(dsn, each)
            await until(effects.is_in(job, "completed"))
    whole = "\n".join(said)
    assert [
        "size 0" in said[0],
        "asked for before the iteration" in said[1],
        "it iterates already" in said[2],
        "inside job.iterate" in said[3],
        "it iterates already" in said[4],
        "inside job.iterate" in said[5],
        "transactional=True" in said[6],
        "job.aiterate" in said[7],
        "is a list: give a function of a cursor" in said[8],
        "is a list: give a function of a cursor" in said[9],
    ] == [True] * 10, whole


@pytest.mark.parametrize("cursor", [None, float("nan"), b"x", {1: 2}], ids=["none", "nan", "bytes", "object"])
async def test_a_cursor_that_would_not_come_back_is_refused(dsn: str, effects: Eyes, cursor: Any) -> None:
    @task(name="iterate.cursor", retry=1)
    def goes(job: Job) -> None:
        for _ in job.iterate(lambda _: [(cursor, 1)]):
            pass

    async with work(dsn, goes):
        job = put(dsn, goes)
        await until(effects.is_in(job, "failed"))
    assert "cursor" in effects.one("SELECT message FROM pgqueue.attempt")
    assert cursors(effects) == []


@pytest.mark.parametrize("cursor", [0, "x", 1.5, True, [1, "a"], {"a": [1]}, (1, "b"), 10**30], ids=repr)
async def test_a_cursor_is_any_json_value(dsn: str, effects: Eyes, cursor: Any) -> None:
    got: list[Any] = []

    @task(name="iterate.json", retry=SOON)
    def goes(job: Job) -> None:
        def source(last: Any) -> list[tuple[Any, int]]:
            got.append(last)
            return [(cursor, 1)] if last is None else []

        for _ in job.iterate(source, 1):
            pass
        if job.attempt == 1:
            raise LookupError

    async with work(dsn, goes):
        job = put(dsn, goes)
        await until(effects.is_in(job, "completed"))
    assert got == [None, list(cursor) if isinstance(cursor, tuple) else cursor]


@both
async def test_cursors_are_thrown_away_as_it_goes_and_the_last_is_found_by_one_step(
    dsn: str, effects: Eyes, on_loop: bool
) -> None:
    most: list[int] = []

    def goes(job: Job) -> None:
        for batch in job.iterate(lambda cursor: items(cursor, 450), 1):
            if batch == [450]:
                most.append(effects.one("SELECT count(*) FROM pgqueue.job_cursor"))
                if job.attempt == 1:
                    raise LookupError

    async def agoes(job: Job) -> None:
        async for batch in job.aiterate(lambda cursor: items(cursor, 450), 1):
            if batch == [450]:
                most.append(effects.one("SELECT count(*) FROM pgqueue.job_cursor"))
                if job.attempt == 1:
                    raise LookupError

    long = declared(agoes if on_loop else goes)
    async with work(dsn, long):
        job = put(dsn, long)
        await until(effects.is_in(job, "completed"), 30)
    assert most == [51, 51]
    plan = "\n".join(
        line
        for (line,) in effects.all(
            "EXPLAIN SELECT n, cursor FROM pgqueue.job_cursor WHERE job_id = 1 ORDER BY n DESC LIMIT 1"
        )
    )
    assert "Index Scan Backward using job_cursor_pkey" in plan


async def test_what_is_left_of_completed_and_forgotten_jobs_is_swept(dsn: str, effects: Eyes) -> None:
    goes = going(False, False)
    async with work(dsn, goes) as worker:
        job = put(dsn, goes)
        await until(effects.is_in(job, "completed"))
        await until(lambda: not cursors(effects))
        waits, gone = put(dsn, goes, delay=3600), put(dsn, goes, delay=3600)
        effects.do("DELETE FROM pgqueue.job_scheduled WHERE id = %s", gone)
        effects.do(
            "INSERT INTO pgqueue.job_cursor (job_id, enqueued_at, n, cursor) SELECT asked.id, coalesce(j.enqueued_at, "
            "pgqueue.now()), n, '1' FROM unnest(%s::bigint[]) AS asked (id) "
            "LEFT JOIN pgqueue.job j ON j.id = asked.id, generate_series(1, 2) AS n",
            [job, waits, gone],
        )
        await worker.services.progress.sweep_cursors()
        assert effects.all("SELECT job_id FROM pgqueue.job_cursor") == [(waits,), (waits,)]


def test_without_a_worker_it_says_so() -> None:
    @task(name="iterate.alone")
    def goes(job: Job) -> None:
        for _ in job.iterate(items):
            pass

    with pytest.raises(pgqueue.Error, match=r"no job\.iterate"):
        testing.run(goes)


# In a drain ----------------------------------------------------------------------------------------------------------


@kinds
def test_in_a_drain_a_later_failure_keeps_the_batches_before(dsn: str, effects: Eyes, transactional: bool) -> None:
    fails = [True]

    def fail_once(job: Job, batch: list[int]) -> None:
        job.enqueue(after, batch[0])
        if batch[0] == 11 and fails:
            fails.clear()
            raise LookupError

    goes = going(False, transactional, fail_once, retry=RetryPolicy(attempts=3, first=600))
    with psycopg.connect(dsn) as conn:
        goes.enqueue(conn)
        first = testing.drain(conn)
        assert (first.retried, first.completed) == (1, 1)  # the successor of the first batch runs at once
        assert conn.execute("SELECT array_agg(item ORDER BY place) FROM effect").fetchone() == ([*range(1, 11)],)
        with testing.Clock(conn) as clock:
            clock.advance(hours=1)
            assert testing.drain(conn).completed == 3
        assert conn.execute("SELECT array_agg(item ORDER BY place) FROM effect").fetchone() == ([*range(1, 26)],)
        conn.rollback()
    assert applied(effects) == []


@kinds
async def test_in_an_async_drain(dsn: str, effects: Eyes, transactional: bool) -> None:
    goes = going(True, transactional)
    async with await psycopg.AsyncConnection.connect(dsn) as conn:
        await goes.aenqueue(conn)
        assert (await testing.adrain(conn)).check().completed == 1
        await conn.commit()
    assert applied(effects) == [*range(1, 26)]


@both
@kinds
async def test_in_a_drain_a_job_cannot_complete_out_of_its_loop(
    dsn: str, effects: Eyes, on_loop: bool, transactional: bool
) -> None:
    def leaves(job: Job) -> None:
        for batch in job.iterate(items, SIZE):
            job.connection.execute(INSERT, [job.id, batch[0]])
            if batch[0] == 11:
                break

    async def aleaves(job: Job) -> None:
        async for batch in job.aiterate(items, SIZE):
            await (await job.aconnection()).execute(INSERT, [job.id, batch[0]])
            if batch[0] == 11:
                break

    left = declared(aleaves if on_loop else leaves, transactional=transactional, retry=1)
    if on_loop:
        async with await psycopg.AsyncConnection.connect(dsn) as aconn:
            await left.aenqueue(aconn)
            drained = await testing.adrain(aconn)
    else:
        with psycopg.connect(dsn) as conn:
            left.enqueue(conn)
            drained = testing.drain(conn)
    assert drained.failed == 1
    assert applied(effects) == [1]


def test_a_drain_on_its_own_connection_commits_each_batch(
    dsn: str, effects: Eyes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGQUEUE_DSN", dsn)

    def fail(job: Job, batch: list[int]) -> None:
        if batch[0] == 21:
            raise LookupError

    goes = going(False, False, fail, retry=1)
    put(dsn, goes)
    assert testing.drain(dsn=dsn).failed == 1
    assert applied(effects) == [*range(1, 21)]
    assert cursors(effects) == [(1, 10), (2, 20)]
