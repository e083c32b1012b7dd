"""The successors of a job are found near the time of its end, whatever lies between, and name the job."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

import pgqueue
from pgqueue.admin.successors import Successor, asuccessors, predecessor, retried
from pgqueue.testing import drain

Conn = psycopg.Connection[Any]
AConn = psycopg.AsyncConnection[Any]


@pytest.fixture
def parent() -> Any:
    @pgqueue.task(name="successors.child")
    def child(n: int) -> None: ...

    @pgqueue.task(name="successors.parent")
    def parent(children: int, how: str = "plain") -> None:
        job = pgqueue.current_job()
        for n in range(children):
            match how:
                case "unique":
                    job.enqueue(child.using(unique=f"child:{n}"), n)
                case "later":
                    job.enqueue(child.using(delay=900, headers={"trace": "00-4b"}), n)
                case _:
                    job.enqueue(child, n)

    return parent


OTHERS = {
    "completed": "INSERT INTO pgqueue.job_done (state, task, enqueued_at, bin, finished_at) "
    "SELECT 'completed', 'other', now() - %s::interval, 0, now() FROM generate_series(1, %s)",
    "scheduled": "INSERT INTO pgqueue.job_scheduled (state, task, enqueued_at, run_at) "
    "SELECT 'scheduled', 'other', now() - %s::interval, now() + interval '1 day' FROM generate_series(1, %s)",
}


def others(conn: Conn, state: str, ago: str, n: int) -> None:
    """Jobs of another task, enqueued so long ago."""
    conn.execute(OTHERS[state].encode(), [ago, n])


async def found(aconn: AConn, id: int) -> list[int]:
    return [each.id for each in await asuccessors(aconn, await pgqueue.aget(aconn, id))]


@pytest.mark.promise("F160")
@pytest.mark.parametrize("how", ["plain", "unique", "later"])
async def test_successors_and_their_job_know_each_other(conn: Conn, aconn: AConn, parent: Any, how: str) -> None:
    job, without = parent.enqueue(conn, 3, how=how), parent.enqueue(conn, 0)
    drain(conn)
    conn.commit()
    successors = await asuccessors(aconn, await pgqueue.aget(aconn, job.id))
    state = "scheduled" if how == "later" else "completed"
    assert [(each.state, each.task, each.queue) for each in successors] == [(state, "successors.child", "default")] * 3
    for each in successors:
        assert isinstance(each, Successor)
        known = await pgqueue.aget(aconn, each.id)
        assert predecessor(known) == job.id
        assert how != "later" or (known.headers or {})["trace"] == "00-4b"
    assert await found(aconn, without.id) == await found(aconn, successors[0].id) == []


@pytest.mark.promise("F160")
@pytest.mark.parametrize("state", ["scheduled", "completed"])
async def test_they_are_found_behind_any_number_of_ids(conn: Conn, aconn: AConn, parent: Any, state: str) -> None:
    """The job waits while others are enqueued and ids are left out. After its end still more are enqueued."""
    job = parent.enqueue(conn, 2)
    others(conn, state, "1 hour", 25_000)
    conn.execute("SELECT setval('pgqueue.job_id_seq', nextval('pgqueue.job_id_seq') + 1000000)")
    others(conn, state, "1 minute", 2_000)
    drain(conn)
    others(conn, state, "-1 minute", 25_000)
    conn.commit()
    assert len(await found(aconn, job.id)) == 2


@pytest.mark.promise("F160")
async def test_a_header_that_is_no_id_is_no_job(conn: Conn, aconn: AConn, parent: Any) -> None:
    task = pgqueue.remote("successors.any")
    for value in ("7", -7, True, None, {"id": 7}, 2**70):
        job = task.using(headers={"pgqueue:parent": value, "retry_of": value}).enqueue(conn)
        known = pgqueue.get(conn, job.id)
        assert predecessor(known) is None and retried(known) is None
    done = parent.enqueue(conn, 0)
    drain(conn)
    [again] = pgqueue.retry(conn, done.id, again=True)
    assert again.new is not None and retried(pgqueue.get(conn, again.new)) == done.id
