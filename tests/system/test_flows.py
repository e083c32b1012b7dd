"""Flows from the enqueue to the last job, with real workers: the example of docs/flows.md, and jobs that are added."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import psycopg
import pytest
from workers import Eyes, until, work

import pgqueue
from pgqueue import Flow, InvalidArguments, InvalidOption

ONCE = pgqueue.RetryPolicy(attempts=1)


@dataclass
class Parcel:
    item: int
    weight: float


def order(flow: Flow, ran: list[Any], ships: bool) -> dict[str, pgqueue.Node[Any]]:
    """The flow of an order, which ships or does not."""

    @pgqueue.task(name="charge")
    async def charge(order_id: int) -> str:
        ran.append("charge")
        return f"receipt of {order_id}"

    @pgqueue.task(name="pick")
    async def pick(item: int) -> Parcel:
        ran.append("pick")
        return Parcel(item, item / 2)

    @pgqueue.task(name="ship", retry=ONCE)
    async def ship(order_id: int, parcels: list[Parcel]) -> float:
        ran.append([(parcel.item, parcel.weight) for parcel in parcels])
        if not ships:
            raise RuntimeError("no ship")
        return sum(parcel.weight for parcel in parcels)

    @pgqueue.task(name="refund")
    async def refund(order_id: int, receipt: str) -> None:
        ran.append(f"refund of {receipt}")

    @pgqueue.task(name="tell")
    async def tell(order_id: int) -> None:
        ran.append("tell")

    paid = flow.add(charge.new(order_id=7))
    picked = flow.add_many((pick.new(item) for item in (1, 2, 3)), after=[paid])
    sent = flow.add(ship.new(7, parcels=picked.result))
    refunded = flow.add(refund.new(7, paid.result), after=[sent.failed])
    told = flow.add(tell.new(7), after=[sent.ended, refunded.ended])
    return {"sent": sent, "refunded": refunded, "told": told}


@pytest.mark.promise("F389")
@pytest.mark.parametrize("ships", [True, False])
async def test_the_order_of_the_documentation_runs_as_it_is_written(dsn: str, eyes: Eyes, ships: bool) -> None:
    flow, ran = Flow("order 7"), list[Any]()
    nodes = order(flow, ran, ships)
    with psycopg.connect(dsn) as conn:
        handle = flow.enqueue(conn)
    state = {name: handle.jobs(node)[0].id for name, node in nodes.items()}
    async with work(dsn, *pgqueue.client.tasks.declared()):
        await until(lambda: eyes.state(state["told"]) == "completed")
    parcels = [(1, 0.5), (2, 1.0), (3, 1.5)]
    assert ran == ["charge", *["pick"] * 3, parcels, *(["refund of receipt of 7"] if not ships else []), "tell"]
    assert eyes.state(state["sent"]) == ("completed" if ships else "failed")
    assert eyes.state(state["refunded"]) == ("skipped" if ships else "completed")


@pytest.mark.promise("F389")
@pytest.mark.parametrize("kind", ["plain", "result", "transactional", "own", "iterate", "lock"])
async def test_what_waits_for_a_node_waits_for_the_jobs_that_are_added_to_it(dsn: str, eyes: Eyes, kind: str) -> None:
    """Each job adds two, three levels deep: all end before the last one begins."""
    ran: list[str] = []

    @pgqueue.task(name="crawl", transactional=kind == "transactional", lock="l" if kind == "lock" else None)
    def crawl(job: pgqueue.Job, page: str) -> str | None:
        def add() -> None:
            for link in "ab" if len(page) < 3 else "":
                job.add(crawl.using(priority=len(page)).new(page + link))

        if kind == "iterate":
            for _ in job.iterate(lambda cursor: [] if cursor else [(1, "once")]):
                add()
        else:
            add()
        if kind == "transactional":
            job.connection.execute("SELECT 1")
        if kind == "own":
            with psycopg.connect(dsn) as conn:
                job.complete(conn)
        ran.append(page)
        return page if kind == "result" else None

    @pgqueue.task(name="last")
    def last() -> None:
        ran.append("last")

    flow = Flow("crawl")
    pages = flow.add(crawl.new("x"))
    end = flow.add(last.new(), after=[pages])
    with psycopg.connect(dsn) as conn:
        handle = flow.enqueue(conn)
    async with work(dsn, crawl, last):
        await until(lambda: eyes.state(handle.jobs(end)[0].id) == "completed")
    assert (sorted(ran[:-1]), ran[-1]) == (["x", "xa", "xaa", "xab", "xb", "xba", "xbb"], "last")
    with psycopg.connect(dsn) as conn:
        assert [job.node for job in pgqueue.find(conn, flow=handle.id, task="crawl")] == [1] * 7


async def test_a_naive_successor_is_not_waited_for(dsn: str, eyes: Eyes) -> None:
    """The naive version: `job.enqueue` makes a job of no node."""
    begun, ran = asyncio.Event(), list[str]()

    @pgqueue.task(name="crawl")
    async def crawl(job: pgqueue.Job, page: str) -> None:
        if page == "x":
            job.enqueue(crawl, "xa")
        else:
            await begun.wait()
        ran.append(page)

    @pgqueue.task(name="last")
    async def last() -> None:
        ran.append("last")
        begun.set()

    flow = Flow("crawl")
    flow.add(last.new(), after=[flow.add(crawl.new("x"))])
    with psycopg.connect(dsn) as conn:
        flow.enqueue(conn)
    async with work(dsn, crawl, last):
        await until(lambda: len(ran) == 3)
    assert ran == ["x", "last", "xa"]


async def test_what_cannot_be_added_is_refused_and_nothing_of_a_failed_attempt_is_added(dsn: str, eyes: Eyes) -> None:
    said: list[str] = []

    @pgqueue.task(name="adds", retry=ONCE)
    async def adds(job: pgqueue.Job) -> None:
        wrong: list[Any] = [7, adds, adds.using(unique="k").new(), pgqueue.remote("r").new(x=first.result), adds.new()]
        for each in wrong:
            try:
                job.add(each)
            except (InvalidArguments, InvalidOption) as error:
                said.append(str(error))
        raise RuntimeError("after it has added one")

    flow = Flow("adds")
    first = flow.add(adds.new())
    with psycopg.connect(dsn) as conn:
        handle = flow.enqueue(conn)
        alone = pgqueue.enqueue(conn, adds)
    async with work(dsn, adds, concurrency=1):
        await until(lambda: eyes.state(handle.jobs(first)[0].id) == eyes.state(alone.id) == "failed")
    no_flow = f"job {alone.id} (adds) is of no flow, so there is no node to add a job to; use job.enqueue"
    assert said == [
        "job.add takes what task.new(…) returns, not int",
        "job.add takes what task.new(…) returns, not Task",
        "task 'adds': a job that is added to a node has no unique key: another job could have it, and the node would "
        "end without this one",
        "task 'r': parameter x is <result of node 1 of flow 'adds'>: only a job of that flow can have it. Write "
        "flow.add(task.new(…)), and enqueue the flow",
        *said[:2],
        *[no_flow] * 3,
    ]
    assert eyes.one("SELECT count(*) FROM pgqueue.job") == 2


async def test_a_job_knows_its_flow(dsn: str, eyes: Eyes) -> None:
    seen: list[int | None] = []

    @pgqueue.task(name="asks")
    async def asks(job: pgqueue.Job) -> None:
        seen.append(job.flow)

    flow = Flow("asks")
    flow.add(asks.new(), after=[flow.add(asks.new())])
    with psycopg.connect(dsn) as conn:
        handle = flow.enqueue(conn)
        pgqueue.enqueue(conn, asks)
    async with work(dsn, asks):
        await until(lambda: len(seen) == 3)
    assert sorted(seen, key=str) == [handle.id, handle.id, None]


@pytest.mark.promise("F390")
@pytest.mark.parametrize("alone", [False, True], ids=["one transaction", "autocommit"])
async def test_a_retry_of_a_flow_runs_what_failed_and_what_waited_for_it_and_nothing_that_completed(
    dsn: str, eyes: Eyes, alone: bool
) -> None:
    ran: list[str] = []
    ok: set[str] = set()

    @pgqueue.task(name="step", retry=ONCE)
    async def step(word: str, got: Any = None) -> str:
        ran.append(f"{word} of {got}" if got else word)
        if word in ("b", "e") and word not in ok:
            raise RuntimeError(word)
        return word.upper()

    flow = Flow("letters")
    a = flow.add(step.new("a"))
    b = flow.add_many([step.new(word) for word in ("b", "d", "e")], after=[a])
    c = flow.add(step.new("c", b.result))
    f = flow.add(step.new("f"), after=[c, a.ended])
    sorry = flow.add(step.new("sorry"), after=[b.failed])
    other = flow.add(step.new("other", a.result))
    with psycopg.connect(dsn) as conn:
        handle = flow.enqueue(conn)
    last = {node: handle.jobs(node)[0].id for node in (c, f, sorry, other)}
    async with work(dsn, step):
        await until(lambda: eyes.state(last[f]) == "cancelled" and eyes.state(last[sorry]) == "completed")
        await until(lambda: eyes.state(last[other]) == "completed")
        assert sorted(ran) == ["a", "b", "d", "e", "other of A", "sorry"]
        ran.clear()
        ok.update("be")
        with psycopg.connect(dsn, autocommit=alone) as conn:
            answers = pgqueue.retry(conn, flow=handle.id)
            assert [answer.did for answer in answers] == ["retried"] * 4
        await until(lambda: eyes.state(last[f]) == "completed")
    assert sorted(ran[:2]) == ["b", "e"]
    assert ran[2:] == ["c of ['B', 'D', 'E']", "f"]
    assert eyes.one("SELECT count(*) FROM pgqueue.job WHERE state = 'completed'") == 8
