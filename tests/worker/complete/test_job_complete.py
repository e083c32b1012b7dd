"""What a handler does about its own end: `job.complete(conn)` in a transaction of its own, and `job.enqueue`."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import Any

import psycopg
import pytest
import sqlalchemy
from driver_kinds import ASYNC, KINDS, drive, url
from sqlalchemy.orm import Session
from workers import Eyes, Taker, until, work

import pgqueue
from pgqueue import Fail, Job, JobLost, Retry, Snooze
from pgqueue.client import middleware
from pgqueue.client.tasks import Task, task
from pgqueue.jobs.retry import RetryPolicy
from pgqueue.testing import drain
from pgqueue.worker.run import serialization_retries

ONCE = RetryPolicy(attempts=1)
ROLLED_BACK = ("psycopg", "psycopg2", "session-psycopg", "django", "psycopg_async", "asyncpg", "async_session-asyncpg")


@task(name="completion.follow")
async def follow(of: int) -> None:
    """The successor of a job."""


@pytest.fixture
def orders(eyes: Eyes) -> Eyes:
    eyes.do("CREATE TABLE app_order (id integer PRIMARY KEY)")
    return eyes


def enqueued(dsn: str, asked: Task[..., Any], *args: Any) -> int:
    with psycopg.connect(dsn) as conn:
        return asked.enqueue(conn, *args).id


def followers(eyes: Eyes) -> list[int]:
    return [of for (of,) in eyes.all("SELECT (args ->> 'of')::int FROM pgqueue.job WHERE task = 'completion.follow'")]


# complete(conn) -------------------------------------------------------------------------------------------------------


@pytest.mark.promise("T15")
@pytest.mark.promise("F273")
@pytest.mark.parametrize(
    ("kind", "committed"),
    [
        *[pytest.param(kind, True, marks=[] if kind in ROLLED_BACK else [pytest.mark.second]) for kind in KINDS],
        *[(kind, False) for kind in ROLLED_BACK],
    ],
)
async def test_every_kind_of_connection_can_end_a_job(dsn: str, orders: Eyes, kind: str, committed: bool) -> None:
    """The handler's own transaction, and the end of its job, are one; after a rollback the attempt's failure counts."""

    async def scenario(job: Job) -> None:
        async with KINDS[kind](dsn, False) as app:
            await app.execute("INSERT INTO app_order VALUES (7)")
            job.enqueue(follow, 7)
            if kind in ASYNC:
                await job.acomplete(app.conn, result=[7])
            else:
                job.complete(app.conn, result=[7])
            await (app.commit() if committed else app.rollback())

    def order(job: Job) -> str:
        drive(kind, scenario(job))
        if not committed:
            raise LookupError
        return "not stored"

    ordering = task(name=f"completion.order.{kind}.{committed}", retry=ONCE)(order)
    async with work(dsn, ordering, queues=["default"]) as worker:
        job_id = enqueued(dsn, ordering)
        await until(orders.is_in(job_id, "completed" if committed else "failed"))
        await until(lambda: not worker.state.held)
        assert worker.services.completer.fenced == 0
    assert orders.one("SELECT count(*) FROM app_order") == (1 if committed else 0)
    assert followers(orders) == ([7] if committed else [])
    assert orders.one("SELECT result FROM pgqueue.job WHERE id = %s", job_id) == ([7] if committed else None)
    if committed:
        assert orders.one(
            "SELECT (SELECT xmin FROM pgqueue.job_done WHERE id = %s) = (SELECT xmin FROM app_order)", job_id
        )


@pytest.mark.promise("F273")
async def test_a_result_is_stored_only_if_the_task_stores_results_and_json_can_keep_it(dsn: str, orders: Eyes) -> None:
    def order(job: Job, number: int, unfit: bool) -> None:
        with psycopg.connect(dsn) as conn:
            conn.execute("INSERT INTO app_order VALUES (%s)", [number])
            job.complete(conn, result=[float("nan")] if unfit else number)

    stored = task(name="completion.stored", retry=ONCE)(order)
    silent = task(name="completion.silent", retry=ONCE, store_result=False)(order)
    async with work(dsn, stored, silent, queues=["default"]) as worker:
        jobs = [enqueued(dsn, stored, 1, False), enqueued(dsn, silent, 2, False), enqueued(dsn, stored, 3, True)]
        await until(lambda: set(orders.states()) == {"completed", "failed"})
        await until(lambda: not worker.state.held)
    ends = orders.all("SELECT id, state, result FROM pgqueue.job ORDER BY id")
    assert ends == [(jobs[0], "completed", 1), (jobs[1], "completed", None), (jobs[2], "failed", None)]
    assert orders.all("SELECT id FROM app_order ORDER BY id") == [(1,), (2,)]
    assert "the result cannot be stored[0]" in orders.one("SELECT message FROM pgqueue.attempt")


@pytest.mark.promise("F273")
def test_a_drain_stores_that_result_as_well(conn: psycopg.Connection[Any]) -> None:
    def order(job: Job) -> str:
        with conn.transaction():
            job.complete(conn, result=[7])
        return "not stored"

    ordering = task(name="completion.drained")(order)
    ordering.enqueue(conn)
    assert drain(conn).completed == 1
    assert conn.execute("SELECT result FROM pgqueue.job").fetchall() == [([7],)]


@pytest.mark.parametrize("ending", ["returns", "raises"])
async def test_what_a_handler_says_after_its_commit_changes_nothing(dsn: str, orders: Eyes, ending: str) -> None:
    def order(job: Job) -> str:
        with psycopg.connect(dsn) as conn:
            conn.execute("INSERT INTO app_order VALUES (7)")
            job.complete(conn)
        if ending == "raises":
            raise LookupError
        return "not stored"

    ordering = task(name=f"completion.after.{ending}")(order)
    async with work(dsn, ordering) as worker:
        job_id = enqueued(dsn, ordering)
        await until(orders.is_in(job_id, "completed"))
        await until(lambda: not worker.state.held)
        assert worker.services.completer.fenced == 0
    assert orders.all("SELECT state, result FROM pgqueue.job") == [("completed", None)]
    assert orders.one("SELECT count(*) FROM pgqueue.attempt") == 0


async def test_a_transaction_still_open_when_the_handler_returns_is_waited_for(dsn: str, orders: Eyes) -> None:
    """The row is locked, so the completer looks again: a commit later on ends the job, a rollback fails the attempt."""
    open_one: list[psycopg.Connection[Any]] = []

    def order(job: Job) -> None:
        conn = psycopg.connect(dsn)
        conn.execute("INSERT INTO app_order VALUES (%s)", [job.id])
        job.complete(conn)
        open_one.append(conn)

    ordering = task(name="completion.open", retry=ONCE)(order)
    async with work(dsn, ordering) as worker:
        for number, (end, state) in enumerate((("commit", "completed"), ("rollback", "failed")), 1):
            job_id = enqueued(dsn, ordering)
            await until(lambda number=number: len(open_one) == number)  # type: ignore[misc]
            await until(lambda: len(worker.services.completer._locked) == 1)
            assert orders.state(job_id) == "running"
            getattr(open_one[-1], end)()
            open_one[-1].close()
            await until(orders.is_in(job_id, state))
        await until(lambda: not worker.state.held)
        assert worker.services.completer.fenced == 0
    assert orders.one("SELECT count(*) FROM app_order") == 1
    assert "did not commit" in orders.one("SELECT message FROM pgqueue.attempt")


async def test_a_commit_that_was_forgotten_is_no_completion(dsn: str, orders: Eyes) -> None:
    """SQLAlchemy's session rolls back at the end of its block: what the handler returns then is no success."""

    def order(job: Job) -> str:
        engine = sqlalchemy.create_engine(url(dsn, "psycopg"))
        with Session(engine) as session:
            session.execute(sqlalchemy.text("INSERT INTO app_order VALUES (7)"))
            job.complete(session)
        engine.dispose()
        return "done"

    ordering = task(name="completion.forgotten", retry=ONCE)(order)
    async with work(dsn, ordering):
        await until(orders.is_in(enqueued(dsn, ordering), "failed"))
    assert orders.one("SELECT count(*) FROM app_order") == 0


@pytest.mark.parametrize("on_loop", [False, True])
async def test_a_run_made_anew_begins_without_what_the_one_before_had_completed(
    dsn: str, orders: Eyes, on_loop: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its transaction was aborted; so it has neither completed the job nor written its successors."""
    monkeypatch.setattr(serialization_retries, "PAUSE_MOST", 0.06)
    runs: list[bool] = []

    def first_run(job: Job) -> bool:
        runs.append(job.written)
        job.enqueue(follow, len(runs))
        return len(runs) == 1

    def completes(job: Job) -> None:
        if first_run(job):
            with psycopg.connect(dsn) as conn:
                conn.execute("INSERT INTO app_order VALUES (1)")
                job.complete(conn)
                raise psycopg.errors.SerializationFailure

    async def acompletes(job: Job) -> None:
        if first_run(job):
            async with await psycopg.AsyncConnection.connect(dsn) as conn:
                await conn.execute("INSERT INTO app_order VALUES (1)")
                await job.acomplete(conn)
                raise psycopg.errors.SerializationFailure

    completing = task(name=f"completion.anew.{on_loop}", retry=ONCE)(acompletes if on_loop else completes)
    async with work(dsn, completing):
        job_id = enqueued(dsn, completing)
        await until(orders.is_in(job_id, "completed"))
    assert runs == [False, False]
    assert followers(orders) == [2]
    assert orders.all("SELECT id FROM app_order") == []


@pytest.mark.parametrize("on_loop", [False, True])
async def test_an_abort_after_the_commit_of_complete_leaves_the_job_completed(
    dsn: str, orders: Eyes, on_loop: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Naive: its row is gone, so it was given to another worker. Hooks and metrics then miss a completed job."""
    told: list[str] = []
    monkeypatch.setattr(middleware, "_on_finish", [lambda job, outcome: told.append(outcome.name)])

    def completes(job: Job) -> None:
        with psycopg.connect(dsn) as conn:
            conn.execute("INSERT INTO app_order VALUES (1)")
            job.complete(conn)
        raise psycopg.errors.SerializationFailure("of something else")

    async def acompletes(job: Job) -> None:
        completes(job)

    completing = task(name=f"completion.abort.{on_loop}")(acompletes if on_loop else completes)
    async with work(dsn, completing):
        await until(orders.is_in(enqueued(dsn, completing), "completed"))
        await until(lambda: told)
    assert (told, orders.all("SELECT id FROM app_order")) == (["completed"], [(1,)])
    assert "another worker" not in caplog.text


@pytest.mark.each_value
@pytest.mark.parametrize("committed", [False, True], ids=["rolled back", "committed"])
@pytest.mark.parametrize("raises", [False, True], ids=["returns", "raises"])
async def test_an_attempt_that_failed_after_complete_is_logged_once(
    dsn: str, orders: Eyes, caplog: pytest.LogCaptureFixture, raises: bool, committed: bool
) -> None:
    """Only the completer learns that it has failed: its statement found the row."""

    def order(job: Job) -> None:
        with psycopg.connect(dsn) as conn:
            conn.execute("INSERT INTO app_order VALUES (7)")
            job.complete(conn)
            if not committed:
                conn.rollback()
        if raises:
            raise LookupError("no such order")

    ordering = task(name=f"completion.told.{raises}.{committed}", retry=ONCE)(order)
    with caplog.at_level(logging.INFO, "pgqueue.job"):
        async with work(dsn, ordering) as worker:
            await until(orders.is_in(enqueued(dsn, ordering), "completed" if committed else "failed"))
            await until(lambda: not worker.state.held)
    told = [record for record in caplog.records if record.name == "pgqueue.job"]
    assert len(told) == (0 if committed else 1)
    if not committed:
        assert told[0].levelno == logging.ERROR
        assert ("LookupError: no such order" if raises else "did not commit") in told[0].getMessage()


@pytest.mark.parametrize("kind", ["psycopg", "psycopg2", "django", "psycopg_async", "asyncpg"])
async def test_a_job_is_not_completed_outside_of_a_transaction(dsn: str, orders: Eyes, kind: str) -> None:
    async def scenario(job: Job) -> None:
        async with KINDS[kind](dsn, True) as app:
            if kind in ASYNC:
                await job.acomplete(app.conn)
            else:
                job.complete(app.conn)

    def order(job: Job) -> None:
        drive(kind, scenario(job))

    ordering = task(name=f"completion.alone.{kind}", retry=ONCE)(order)
    async with work(dsn, ordering):
        await until(orders.is_in(enqueued(dsn, ordering), "failed"))
    assert "outside of a transaction" in orders.one("SELECT message FROM pgqueue.attempt")


@pytest.mark.promise("L06")
@pytest.mark.parametrize("swallowed", [False, True], ids=["raised", "swallowed"])
async def test_a_job_that_was_given_away_cannot_be_ended(dsn: str, orders: Eyes, swallowed: bool) -> None:
    """JobLost; and a handler that swallows it cannot commit its transaction all the same."""
    began, go_on = threading.Event(), threading.Event()
    lost: list[JobLost] = []

    def order(job: Job) -> None:
        began.set()
        assert go_on.wait(30)
        with psycopg.connect(dsn) as conn:
            conn.execute("INSERT INTO app_order VALUES (%s)", [job.id])
            try:
                job.complete(conn)
            except JobLost as error:
                lost.append(error)
                if not swallowed:
                    raise

    ordering = task(name=f"completion.lost.{swallowed}")(order)
    async with work(dsn, ordering) as worker:
        job_id = enqueued(dsn, ordering)
        await until(began.is_set)
        orders.do("UPDATE pgqueue.worker SET dead_at = now()")
        taker = Taker(dsn)
        orders.do(
            "WITH gone AS (DELETE FROM pgqueue.job_running RETURNING *) "
            "INSERT INTO pgqueue.job_available (id, task, args, queue) SELECT id, task, args, 'elsewhere' FROM gone"
        )
        go_on.set()
        await until(lambda: worker.services.completer.fenced == 1)
        await taker.close()
    assert [error.job_id for error in lost] == [job_id]
    assert orders.one("SELECT count(*) FROM app_order") == 0
    assert orders.state(job_id) == "available"


# job.enqueue ----------------------------------------------------------------------------------------------------------


@pytest.mark.promise("L14", "L15", "I06")
@pytest.mark.each_value
@pytest.mark.parametrize("transactional", [False, True], ids=["plain", "transactional"])
@pytest.mark.parametrize("on_loop", [False, True], ids=["thread", "loop"])
@pytest.mark.parametrize("ending", ["returns", "result", "raises", "snooze", "retry", "fail"])
async def test_successors_exist_if_the_job_completes_and_not_before(
    dsn: str, eyes: Eyes, ending: str, on_loop: bool, transactional: bool
) -> None:
    seen: list[int] = []
    asks: dict[str, object] = {"result": "text", "snooze": Snooze(3600), "retry": Retry(3600), "fail": Fail("no")}

    def enqueues(job: Job) -> object:
        if transactional and not on_loop:
            job.connection.execute("SELECT 1")
        job.enqueue(follow, job.id)
        job.enqueue(follow.using(queue="other", priority=1, delay=3600, headers={"a": "b"}), of=job.id)
        seen.append(len(followers(eyes)))
        if ending == "raises":
            raise LookupError
        return asks.get(ending)

    async def aenqueues(job: Job) -> object:
        if transactional:
            await (await job.aconnection()).execute("SELECT 1")
        return enqueues(job)

    name = f"completion.{ending}.{on_loop}.{transactional}"
    asking = task(name=name, retry=ONCE, transactional=transactional)(aenqueues if on_loop else enqueues)
    states = {"snooze": "scheduled", "retry": "failed", "fail": "failed", "raises": "failed"}
    async with work(dsn, asking, follow, queues=["default"]):
        job_id = enqueued(dsn, asking)
        await until(eyes.is_in(job_id, states.get(ending, "completed")))
    assert seen == [0]
    if ending in ("returns", "result"):
        assert followers(eyes) == [job_id, job_id]
        found = "SELECT state, priority, headers ->> 'a', run_at > now() FROM pgqueue.job WHERE queue = 'other'"
        assert eyes.all(found) == [("scheduled", 1, "b", True)]
        assert eyes.one("SELECT result FROM pgqueue.job WHERE id = %s", job_id) == asks.get(ending)
    else:
        assert followers(eyes) == []


@pytest.mark.promise("L14")
async def test_the_successors_of_a_fenced_run_are_dropped(dsn: str, eyes: Eyes) -> None:
    began, go_on = asyncio.Event(), asyncio.Event()

    @task(name="completion.fenced")
    async def fenced(job: Job) -> None:
        job.enqueue(follow, job.id)
        began.set()
        await go_on.wait()

    async with work(dsn, fenced) as worker:
        enqueued(dsn, fenced)
        await began.wait()
        eyes.do("DELETE FROM pgqueue.job_running")
        go_on.set()
        await until(lambda: worker.services.completer.fenced == 1)
    assert followers(eyes) == []


async def test_a_successor_wakes_its_worker_and_a_later_one_the_scheduler(dsn: str, eyes: Eyes) -> None:
    """With polls a minute apart only the NOTIFY of the completion can be quick."""

    @task(name="completion.chain")
    async def chain(job: Job, left: int) -> None:
        if left:
            job.enqueue(chain.using(delay=0.05) if left % 2 else chain, left - 1)

    async with work(dsn, chain, poll=60.0):
        enqueued(dsn, chain, 6)
        await until(eyes.done(7))


async def test_what_does_not_fit_is_refused_in_the_handler(dsn: str, eyes: Eyes) -> None:
    refused: list[str] = []

    @task(name="completion.unfit")
    async def unfit(job: Job) -> None:
        with pytest.raises(pgqueue.InvalidArguments) as caught:
            job.enqueue(follow, "seven")  # type: ignore[arg-type]
        refused.append(str(caught.value))
        with pytest.raises(pgqueue.InvalidArguments) as caught:
            job.enqueue("follow", 7)  # type: ignore[arg-type]
        refused.append(str(caught.value))
        with psycopg.connect(dsn) as conn:
            job.complete(conn)
        with pytest.raises(pgqueue.Error) as late:
            job.enqueue(follow, 7)
        refused.append(str(late.value))

    async with work(dsn, unfit):
        enqueued(dsn, unfit)
        await until(eyes.done(1))
    assert ["needs int" in refused[0], "not a task" in refused[1], "before job.complete" in refused[2]] == [True] * 3
