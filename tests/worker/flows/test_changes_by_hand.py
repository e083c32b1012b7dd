"""Jobs of a flow that are changed by several statements, each a transaction of its own, with a look after each."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import psycopg
import pytest
from flow_rows import Desk, Made, end, put
from workers import Eyes

import pgqueue
from pgqueue.admin import actions
from pgqueue.admin.answers import Answer
from pgqueue.admin.bulk import runner, steps
from pgqueue.database import drivers
from pgqueue.database.steps import Steps

Conn = psycopg.Connection[Any]


@pytest.fixture
async def desk(dsn: str) -> AsyncIterator[Desk]:
    made = Desk(dsn)
    yield made
    await made.close()


@pytest.fixture
def app(dsn: str) -> Iterator[Conn]:
    """A connection in autocommit mode."""
    with psycopg.connect(dsn, autocommit=True) as conn:
        yield conn


@pytest.fixture(autouse=True)
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actions, "BATCH", 1)
    monkeypatch.setattr(steps, "STEP_MOST", 1)
    monkeypatch.setattr(steps, "LATER_SECONDS", 0.0)


@pytest.fixture(params=[False, True], ids=["", "naive"])
def naive(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """The naive way: in the order of the ids."""
    if request.param:
        monkeypatch.setattr(actions, "_unreleased", in_order)
    return bool(request.param)


def in_order(batches: list[list[int]]) -> Steps[tuple[list[list[int]], list[list[int]]]]:
    yield from ()
    return [], batches


async def change(changing: Steps[list[Answer]], app: Conn, desk: Desk, eyes: Eyes, nodes: list[int]) -> list[Any]:
    """Make the change, with a look after each statement; the states of all jobs after each."""
    seen = []
    try:
        statement = next(changing)
        while True:
            rows = drivers.run(app, statement)
            await desk.look(*nodes)
            seen.append(dict(eyes.all("SELECT id, state FROM pgqueue.job")))
            statement = changing.send(rows)
    except StopIteration:
        return seen


@pytest.mark.promise("F375")
async def test_a_cancel_of_a_whole_flow_starts_no_job_of_it(naive: bool, app: Conn, eyes: Eyes, desk: Desk) -> None:
    made = put(
        eyes.conn, Made(), Made(after_failure=[0]), Made(after_failure=[1]), Made(after=[2]), Made(after_end=[3])
    )
    nodes, (first, *others) = [node for node, _ in made], [id for _, ids in made for id in ids]
    seen = await change(actions.cancelling([first, *others], "r", actions.By()), app, desk, eyes, nodes)
    started = [states for states in seen if any(states[id] == "available" for id in others)]
    assert bool(started) is naive
    assert naive or set(seen[-1].values()) == {"cancelled"}


async def stopped(eyes: Eyes, desk: Desk) -> tuple[list[int], list[int]]:
    """A flow that has stopped: a job that was added to its first node has failed. Its nodes, and its jobs that are to
    run again; the last one is the one that was added."""
    made = put(eyes.conn, Made(), Made(after=[0]), Made(after=[1]))
    (one, [first]), (_, [second]), (_, [third]) = made
    added = eyes.one("INSERT INTO pgqueue.job (task, node) VALUES ('x', %s) RETURNING id", one)
    end(eyes, first)
    end(eyes, added, state="failed")
    await desk.look(one)
    assert eyes.states() == {"completed": 1, "failed": 1, "cancelled": 2}
    return [node for node, _ in made], [second, third, added]


@pytest.mark.promise("F375")
async def test_a_retry_of_a_whole_flow_cancels_no_job_of_it_again(
    naive: bool, app: Conn, eyes: Eyes, desk: Desk
) -> None:
    nodes, jobs = await stopped(eyes, desk)
    seen = await change(actions.retrying(jobs, False, actions.By()), app, desk, eyes, nodes)
    *waiting, added = [seen[-1][id] for id in jobs]
    assert added == "available"
    assert waiting == (["cancelled"] * 2 if naive else ["blocked"] * 2)


@pytest.mark.promise("F375")
async def test_an_operation_that_retries_a_flow_cancels_no_job_of_it_again(app: Conn, eyes: Eyes, desk: Desk) -> None:
    nodes, jobs = await stopped(eyes, desk)
    begun = pgqueue.bulk(app, "retry", task="x")
    while (made := runner.take(app, "test", begun.id)) is not None:
        while made.open and not made.pause:
            runner.step(app, made)
            await desk.look(*nodes)
    assert [eyes.state(id) for id in jobs] == ["blocked", "blocked", "available"]
    done = pgqueue.get_bulk(app, begun.id)
    assert (done.state, done.counts) == ("done", {"retried": 3})


@pytest.mark.promise("F375")
async def test_a_job_that_was_skipped_before_its_turn_is_not_run_again(app: Conn, eyes: Eyes, desk: Desk) -> None:
    """It has no results for its arguments. By hand, and by an operation; a completed job of the flow is run again."""
    [(node, [first]), (_, [second])] = put(eyes.conn, Made(), Made(after_failure=[0], results={"got": (0, False)}))
    end(eyes, first)
    await desk.look(node)
    assert eyes.state(second) == "skipped"
    before, after = pgqueue.retry(app, first, second, again=True)
    assert (before.did, after.did, after.state, after.changed) == ("again", "unreleased", "skipped", False)
    begun = pgqueue.bulk(app, "retry", state="skipped", again=True)
    while (made := runner.take(app, "test", begun.id)) is not None:
        while made.open and not made.pause:
            runner.step(app, made)
    done = pgqueue.get_bulk(app, begun.id)
    assert (done.state, done.counts, done.ids) == ("done", {"unreleased": 1}, {"unreleased": (second,)})
    assert eyes.states() == {"completed": 1, "skipped": 1, "available": 1}
