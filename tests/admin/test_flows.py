"""Flows where people see them and act on them: lists, changes by `flow=`, and what a discard leaves alone."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

import pgqueue
from pgqueue import Flow, InvalidOption
from pgqueue.admin import queries
from pgqueue.admin.bulk import runner

Conn = psycopg.Connection[Any]

step = pgqueue.remote("step")


def enqueued(conn: Conn, name: str = "order 7", queue: str = "default") -> pgqueue.FlowHandle:
    """A flow of one job, then three, then one."""
    flow = Flow(name)
    paid = flow.add(step.using(queue=queue).new(n=1), name="paid")
    picked = flow.add_many([step.new(n=n) for n in (2, 3, 4)], after=[paid])
    flow.add(step.using(delay=60).new(n=5), after=[picked.ended])
    return flow.enqueue(conn)


def end(conn: Conn, id: int, state: str = "completed") -> None:
    """End a job that is available, as a worker does."""
    part = "done" if state == "completed" else "dead"
    columns = "queue, priority, task, args, enqueued_at, node, id"
    conn.execute(
        f"""WITH gone AS (DELETE FROM pgqueue.job_available WHERE id = %s RETURNING {columns})
            INSERT INTO pgqueue.job_{part} (state, reason, finished_at, attempt, {columns})
            SELECT %s, 'error', now(), 1, {columns} FROM gone""".encode(),  # noqa: S608
        [id, state],
    )


def numbers(jobs: list[pgqueue.JobInfo]) -> list[int]:
    return [job.args["n"] for job in jobs]


def test_a_job_says_its_flow_and_its_node(conn: Conn) -> None:
    handle = enqueued(conn)
    plain = pgqueue.enqueue(conn, step, n=9)
    found = pgqueue.find(conn, flow=handle.id)
    assert [(job.flow, job.node) for job in found] == [(handle.id, number) for number in (3, 2, 2, 2, 1)]
    assert (plain.info(conn).flow, plain.info(conn).node) == (None, None)


def test_a_list_of_a_flow_has_its_jobs_and_no_other(conn: Conn) -> None:
    first, second = enqueued(conn), enqueued(conn, queue="slow")
    pgqueue.enqueue(conn, step, n=9)
    for handle in (first, second):
        assert numbers(pgqueue.find(conn, flow=handle.id)) == [5, 4, 3, 2, 1]
    assert pgqueue.find(conn, flow=second.id + 1) == []
    assert pgqueue.find(conn, flow=(1 << 43) - 1) == []
    assert numbers(pgqueue.find(conn, flow=first.id, state="available")) == [1]
    assert numbers(pgqueue.find(conn, flow=second.id, queue="slow")) == [1]
    assert numbers(pgqueue.find(conn, flow=first.id, args={"n": 3}, state="blocked")) == [3]
    end(conn, min(first._ids))
    assert numbers(pgqueue.find(conn, flow=first.id, state="completed")) == [1]


def test_a_list_of_a_flow_goes_on_where_it_ended(conn: Conn, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = enqueued(conn)
    page = queries.search(conn, flow=handle.id, limit=2)
    assert (numbers(list(page.jobs)), page.searched, page.after) == ([5, 4], None, page.jobs[-1].id)
    page = queries.search(conn, flow=handle.id, limit=4, after=page.after)
    assert (numbers(list(page.jobs)), page.searched) == ([3, 2, 1], 3)
    monkeypatch.setattr(queries, "SEARCHED_MOST", 2)
    page = queries.search(conn, flow=handle.id, state="available")
    assert (page.jobs, page.searched, page.complete) == ((), 2, False)
    page = queries.search(conn, flow=handle.id, key="no such key")
    assert page.jobs == ()


@pytest.mark.parametrize("flow", [0, -1, "7", 7.0, True, 1 << 43])
def test_what_is_no_flow_is_refused(conn: Conn, flow: Any) -> None:
    for ask in (pgqueue.find, pgqueue.cancel, pgqueue.retry, pgqueue.discard):
        with pytest.raises(InvalidOption, match=r"flow .*: give the id of a flow"):
            ask(conn, flow=flow)
    with pytest.raises(InvalidOption, match="choose all jobs: give at least one of state, queue, task and flow"):
        pgqueue.cancel(conn, flow=None)


def test_a_cancel_takes_all_living_jobs_of_a_flow(conn: Conn) -> None:
    first, second = enqueued(conn), enqueued(conn)
    end(conn, min(first._ids))
    answers = pgqueue.cancel(conn, flow=first.id)
    assert [(answer.id, answer.did) for answer in answers] == [(id, "cancelled") for id in list(first._ids)[1:]]
    assert {job.state for job in pgqueue.find(conn, flow=second.id)} == {"available", "blocked"}
    assert pgqueue.audit(conn)[0].target == {
        "states": ["available", "scheduled", "blocked", "running"],
        "flow": first.id,
    }
    assert pgqueue.cancel(conn, flow=second.id, state="blocked", limit=1)[0].id == second._ids[1]


@pytest.mark.promise("F388")
def test_a_discard_leaves_what_a_waiting_job_needs(conn: Conn) -> None:
    handle, other = enqueued(conn), pgqueue.enqueue(conn, step, n=9)
    first = min(handle._ids)
    end(conn, first)
    end(conn, other.id)
    answers = pgqueue.discard(conn, first, other.id)
    assert [(answer.id, answer.did, answer.changed) for answer in answers] == [
        (first, "needed", False),
        (other.id, "discarded", True),
    ]
    assert [answer.did for answer in pgqueue.discard(conn, flow=handle.id)] == ["needed"]
    pgqueue.cancel(conn, flow=handle.id)
    assert {answer.did for answer in pgqueue.discard(conn, flow=handle.id)} == {"discarded"}
    assert pgqueue.find(conn, flow=handle.id) == []


@pytest.mark.promise("F388")
def test_an_operation_leaves_it_too(dsn: str) -> None:
    with psycopg.connect(dsn) as conn:
        handle = enqueued(conn)
        end(conn, min(handle._ids))
        begun = pgqueue.bulk(conn, "discard", task="step")
    with psycopg.connect(dsn, autocommit=True) as conn:
        steps = runner.take(conn, "test", begun.id)
        assert steps is not None
        while steps.open:
            runner.step(conn, steps)
        done = pgqueue.get_bulk(conn, begun.id)
        assert dict(done.counts) == {"needed": 1}
        assert len(pgqueue.find(conn, flow=handle.id)) == 5
