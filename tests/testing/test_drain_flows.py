"""A drain runs flows as workers do, on the connection of the test; and what is asserted about the jobs of one."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

import pgqueue
from pgqueue import Flow
from pgqueue.testing import Clock, adrain, assert_enqueued, assert_not_enqueued, drain, enqueued

ran: list[Any] = []
ONCE = pgqueue.RetryPolicy(attempts=1)


@pytest.fixture(autouse=True)
def tasks() -> None:
    ran.clear()


def order(ships: bool = True, **options: Any) -> tuple[Flow, dict[str, pgqueue.Node[Any]]]:
    @pgqueue.task(name="pick")
    def pick(job: pgqueue.Job, item: int) -> int:
        ran.append(item)
        if item == 3:
            job.add(pick.new(4))
        return 10 * item

    @pgqueue.task(name="ship", retry=ONCE)
    def ship(parcels: list[int]) -> int:
        ran.append(parcels)
        if not ships:
            raise RuntimeError("no ship")
        return sum(parcels)

    @pgqueue.task(name="tell")
    def tell(weight: int | None, flow: int = 0) -> None:
        ran.append(weight)

    flow = Flow("order 7")
    picked = flow.add_many([pick.new(item) for item in (1, 2, 3)])
    sent = flow.add(ship.using(**options).new(picked.result))
    told = flow.add(tell.new(sent.result))
    back = flow.add(tell.new(-1), after=[sent.failed])
    return flow, {"sent": sent, "told": told, "back": back}


@pytest.mark.parametrize(
    "options", [{}, {"lock": "l"}, {"limit": 1}, {"rate": "1/minute"}], ids=["plain", "lock", "limit", "rate"]
)
def test_a_drain_runs_a_flow(conn: psycopg.Connection[Any], options: dict[str, Any]) -> None:
    flow, nodes = order(**options)
    handle = flow.enqueue(conn)
    done = drain(conn).check()
    assert (ran, done.completed) == ([1, 2, 3, 4, [10, 20, 30, 40], 100], 6)
    assert [handle.jobs(nodes[name])[0].info(conn).state for name in nodes] == ["completed", "completed", "skipped"]
    conn.rollback()
    assert conn.execute("SELECT count(*) FROM pgqueue.job").fetchone() == (0,)


def test_a_drain_goes_on_behind_a_failure(conn: psycopg.Connection[Any]) -> None:
    flow, nodes = order(ships=False)
    handle = flow.enqueue(conn)
    done = drain(conn)
    assert ran == [1, 2, 3, 4, [10, 20, 30, 40], -1]
    assert (done.completed, done.failed, [str(error) for error in done.errors]) == (5, 1, ["no ship"])
    assert [handle.jobs(nodes[name])[0].info(conn).state for name in nodes] == ["failed", "cancelled", "completed"]


def test_a_drain_leaves_what_waits_for_a_job_that_is_not_due(conn: psycopg.Connection[Any]) -> None:
    flow, nodes = order(delay=60)
    handle = flow.enqueue(conn)
    with Clock(conn) as clock:
        drain(conn).check()
        assert ran == [1, 2, 3, 4]
        assert handle.jobs(nodes["sent"])[0].info(conn).state == "scheduled"
        clock.advance(61)
        drain(conn).check()
    assert ran[4:] == [[10, 20, 30, 40], 100]


def test_a_task_is_unknown_when_it_is_the_turn_of_its_job(conn: psycopg.Connection[Any]) -> None:
    @pgqueue.task(name="pay")
    def pay() -> None: ...

    flow, elsewhere = Flow("order 7"), pgqueue.remote("runs.elsewhere")
    paid = flow.add(pay.using(delay=60).new())
    flow.add(elsewhere.new(), after=[paid])
    flow.enqueue(conn)
    with Clock(conn) as clock:
        assert drain(conn).check().unknown == ()
        clock.advance(61)
        assert drain(conn).unknown == ("runs.elsewhere",)


def test_a_drain_of_its_own_connection_commits_each_step(dsn: str) -> None:
    flow, nodes = order()
    with psycopg.connect(dsn) as conn:
        handle = flow.enqueue(conn)
    drain(dsn=dsn).check()
    with psycopg.connect(dsn) as conn:
        assert handle.jobs(nodes["told"])[0].info(conn).state == "completed"


async def test_an_async_drain_runs_a_flow(dsn: str) -> None:
    flow, _ = order()
    async with await psycopg.AsyncConnection.connect(dsn) as conn:
        await flow.aenqueue(conn)
        assert (await adrain(conn)).check().completed == 6
    assert ran == [1, 2, 3, 4, [10, 20, 30, 40], 100]


def test_what_is_enqueued_can_be_asked_of_one_flow(conn: psycopg.Connection[Any]) -> None:
    first, second = order()[0].enqueue(conn), order()[0].enqueue(conn)
    assert assert_enqueued(conn, "pick", item=2, flow=second.id).flow == second.id
    assert len(enqueued(conn, flow=first.id)) == 6
    assert_not_enqueued(conn, "pick", item=9, flow=first.id)
    assert_not_enqueued(conn, flow=second.id + 1)
    with pytest.raises(AssertionError, match=r"pick\(item=2\) is not enqueued; nothing is enqueued"):
        assert_enqueued(conn, "pick", item=2, flow=second.id + 1)
    assert_enqueued(conn, "tell", weight=-1, flow=0)  # an argument of the task
