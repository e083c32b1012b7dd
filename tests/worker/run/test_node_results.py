"""`job.results` and `job.aresults`: the results of a node, page by page, in workers and drains."""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

import psycopg
import pytest
from psycopg import OperationalError, errors
from workers import Eyes, until, work

import pgqueue
from pgqueue import Batch, Flow, InvalidOption, Job
from pgqueue.client.tasks import Task
from pgqueue.database import statements
from pgqueue.database.sessions import Session
from pgqueue.testing import adrain, drain
from pgqueue.worker.run import node_results
from pgqueue.worker.run.node_results import NodeResults

Conn = psycopg.Connection[Any]

pytestmark = pytest.mark.promise("F320")


@pgqueue.task(name="results.part", retry=1)
def part(n: int) -> dict[str, int] | None:
    if n == 2:
        raise ValueError("no part")
    return None if n == 3 else {"n": n}


@pgqueue.task(name="results.sum")
def total(job: Job) -> list[Any]:
    return list(job.results("parts"))


@pgqueue.task(name="results.asum")
async def atotal(job: Job) -> list[Any]:
    return [each async for each in job.aresults("parts")]


@pgqueue.task(name="results.batch", batch=Batch(10))
def batched(jobs: list[Job], ns: list[int]) -> list[list[Any]]:
    return [list(job.results("parts")) for job in jobs]


@pgqueue.task(name="results.wrong")
def wrong(job: Job, name: str) -> None:
    list(job.results(name))


WANTED = [{"n": 0}, {"n": 1}, None, None, {"n": 4}]


def enqueued(conn: Conn, reader: pgqueue.NewJob[Any]) -> pgqueue.FlowHandle:
    """Five jobs, one of which fails and one of which has no result, and one that reads their results."""
    flow = Flow("order 7")
    parts = flow.add_many([part.new(n) for n in range(5)], name="parts")
    flow.add(reader, after=[parts.ended])
    return flow.enqueue(conn)


@pytest.mark.parametrize("reader", [total, atotal], ids=lambda task: task.name)
async def test_a_handler_reads_the_results_of_a_node_in_their_order(
    dsn: str, eyes: Eyes, conn: Conn, reader: Task[[], list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_results, "PAGE_JOBS", 2)
    handle = enqueued(conn, reader.new())
    conn.commit()
    last = max(handle._ids)
    async with work(dsn, part, reader):
        await until(lambda: pgqueue.get(eyes.conn, last).state == "completed")
    assert pgqueue.get(conn, last).result == WANTED


@pytest.mark.parametrize("reader", [total.new(), batched.new(1)], ids=lambda new: new.task)
def test_a_drain_reads_them_too(conn: Conn, reader: pgqueue.NewJob[Any]) -> None:
    handle = enqueued(conn, reader)
    drain(conn)
    assert pgqueue.get(conn, max(handle._ids)).result == WANTED


def test_results_that_history_has_forgotten_are_read(conn: Conn) -> None:
    handle = enqueued(conn, total.new())
    node = handle.id << 20 | 1
    ids = sorted(handle._ids)[:5]
    conn.execute("DELETE FROM pgqueue.job WHERE id = ANY (%s)", [ids[:2]])
    conn.execute(
        "INSERT INTO pgqueue.flow_kept (node, id, state, result) VALUES (%s, %s, 'completed', '{\"n\": 0}'), "
        "(%s, %s, 'failed', NULL)",
        [node, ids[0], node, ids[1]],
    )
    drain(conn)
    assert pgqueue.get(conn, max(handle._ids)).result == [{"n": 0}, None, None, None, {"n": 4}]


def test_a_page_ends_with_the_job_that_makes_it_too_long(conn: Conn) -> None:
    """Naive is a number of jobs alone: a thousand results of 1 MB are a page then."""
    conn.execute(
        "INSERT INTO pgqueue.job (state, task, finished_at, bin, node, reason, result) "
        "SELECT CASE n WHEN 2 THEN 'cancelled' ELSE 'completed' END, 't', now(), 0, 7 << 20 | 1, 'r', "
        "to_jsonb(repeat('x', 300000)) FROM generate_series(1, 9) AS n"
    )
    sql = statements.text("node_results_page", "pgqueue")
    sizes: list[list[int | None]] = []
    after = 0
    while rows := conn.execute(
        sql.encode(), {"node": 7 << 20 | 1, "after": after, "n": 1000, "most": 1_000_000}
    ).fetchall():
        after = rows[-1][0]
        sizes.append([None if result is None else len(json.loads(result)) for _, result in rows])
    assert sizes == [[300_000, None, 300_000, 300_000, 300_000], [300_000] * 4]


def test_what_cannot_be_read_is_said(conn: Conn) -> None:
    handle = enqueued(conn, wrong.new("pars"))
    plain = wrong.enqueue(conn, "parts")
    flow = Flow("none")
    flow.add(wrong.new("parts"))
    unnamed = flow.enqueue(conn)
    drain(conn)
    for id, said in (
        (max(handle._ids), f"no node of flow {handle.id} has the name 'pars'; its nodes are 'parts'"),
        (plain.id, "is of no flow, so there is no node to read results of"),
        (max(unnamed._ids), "none of its nodes has a name: flow.add(…, name=…)"),
    ):
        attempt = pgqueue.get(conn, id).attempts[-1]
        assert attempt.error_type == "InvalidOption" and said in (attempt.message or "")
    with pytest.raises(InvalidOption, match="of no flow"):
        pgqueue.testing.run(wrong, "parts")


@pgqueue.task(name="results.frozen", retry=1)
async def frozen(job: Job) -> int:
    return len(list(job.results("parts")))


@pgqueue.task(name="results.called", retry=1)
async def called(job: Job) -> None:
    job.results("parts")


@pgqueue.task(name="results.carried", retry=1)
async def carried(job: Job) -> int:
    return len(list(await asyncio.to_thread(job.results, "parts")))


@pgqueue.task(name="results.threaded", retry=1)
async def threaded(job: Job) -> int:
    return await asyncio.to_thread(lambda: len(list(job.results("parts"))))


@pgqueue.task(name="results.own_loop", retry=1)
def own_loop(job: Job) -> int:
    async def read() -> int:
        return len([each async for each in job.aresults("parts")])

    return asyncio.run(read())


@pgqueue.task(name="results.own_loop_sync", retry=1)
def own_loop_sync(job: Job) -> None:
    async def read() -> None:
        job.results("parts")

    asyncio.run(read())


@pgqueue.task(name="results.no_loop", retry=1)
def no_loop(job: Job) -> None:
    job.aresults("parts")


FOR_SYNC = "no job.results here: its handler is async: `async for … in job.aresults(…)`"
FOR_ASYNC = "no job.aresults here: its handler is sync: `for … in job.results(…)`"
REFUSED = {frozen: FOR_SYNC, called: FOR_SYNC, own_loop: FOR_ASYNC, own_loop_sync: FOR_SYNC, no_loop: FOR_ASYNC}


def refused(conn: Conn, id: int, said: str) -> None:
    attempt = pgqueue.get(conn, id).attempts[-1]
    assert attempt.error_type == "Error" and said in (attempt.message or "")


@pytest.mark.promise("F381")
async def test_a_handler_of_the_other_kind_is_refused_and_the_worker_goes_on(dsn: str, eyes: Eyes, conn: Conn) -> None:
    """Naive waits on the loop for what the loop is to do: the worker stands still for ever, and its heart beats on."""
    wanted = REFUSED | {carried: FOR_SYNC}
    last = {task: max(enqueued(conn, task.new())._ids) for task in (*wanted, threaded)}
    conn.commit()
    async with work(dsn, part, *last):
        await until(lambda: pgqueue.get(eyes.conn, last[threaded]).result == 5)
        for task, said in wanted.items():
            await until(eyes.is_in(last[task], "failed"))
            refused(conn, last[task], said)


@pytest.mark.promise("F381")
def test_a_drain_refuses_the_same(conn: Conn) -> None:
    last = {task: max(enqueued(conn, task.new())._ids) for task in REFUSED}
    drain(conn)
    for task, said in REFUSED.items():
        refused(conn, last[task], said)


@pytest.mark.promise("F381")
async def test_a_drain_on_a_loop_refuses_the_same(conn: Conn, aconn: psycopg.AsyncConnection[Any]) -> None:
    """A sync drain in an async test runs sync handlers in the thread of the test's own loop."""
    reads = max(enqueued(conn, total.new())._ids)
    drain(conn)
    assert pgqueue.get(conn, reads).result == WANTED
    last = {task: max(enqueued(conn, task.new())._ids) for task in (atotal, *REFUSED)}
    conn.commit()
    await adrain(aconn)
    await aconn.commit()
    assert pgqueue.get(conn, last.pop(atotal)).result == WANTED
    for task, id in last.items():
        refused(conn, id, REFUSED[task])


class Failing:
    """A session that fails with these errors, and then has no row."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.asked = 0

    async def run(self, statement: object) -> list[list[tuple[int, str]]]:
        self.asked += 1
        if self.errors:
            raise self.errors.pop(0)
        return [[]]


async def page(session: Failing) -> object:
    return await NodeResults(cast(Session, session), asyncio.get_running_loop())._ask(
        node_results._page(1, 0, "pgqueue")
    )


@pytest.mark.promise("F383")
async def test_a_page_is_asked_for_again_while_the_database_is_away() -> None:
    """Naive asks again after an OperationalError only: a switchover fails each job that reads."""
    failing = Failing(errors.ReadOnlySqlTransaction(), errors.AdminShutdown(), OperationalError("gone"))
    assert (await page(failing), failing.asked) == ([], 4)
    refused = Failing(errors.InsufficientPrivilege())
    with pytest.raises(errors.InsufficientPrivilege):
        await page(refused)
    assert refused.asked == 1


@pytest.mark.promise("F383")
async def test_there_are_pauses_between_and_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Naive asks thousands of times a second."""
    monkeypatch.setattr(node_results, "PATIENCE_SECONDS", 0.3)
    away = Failing(*[OperationalError("away")] * 10_000)
    with pytest.raises(OperationalError):
        await page(away)
    assert away.asked < 10


@pytest.mark.promise("F325")
def test_a_reader_that_is_run_again_says_that_it_is_of_no_flow(conn: Conn) -> None:
    """A failed job is retried in its flow; a completed one is a new job."""
    handle = enqueued(conn, total.new())
    drain(conn)
    again = pgqueue.retry(conn, flow=handle.id, again=True, state="completed")
    new = [pgqueue.get(conn, answer.new) for answer in again if answer.new is not None]
    assert [(job.state, job.flow) for job in new] == [("available", None)] * 5
    [reader] = [job.id for job in new if job.task == total.name]
    drain(conn)
    attempt = pgqueue.get(conn, reader).attempts[-1]
    said = "is of no flow, so there is no node to read results of; a completed job that is run again is a new job"
    assert attempt.error_type == "InvalidOption" and said in (attempt.message or "")
    assert pgqueue.get(conn, max(handle._ids)).result == WANTED
