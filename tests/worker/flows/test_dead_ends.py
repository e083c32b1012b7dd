"""A node that is cancelled takes what waits for nothing else with it, down the graph, in one statement."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import psycopg
import pytest
from flow_rows import Desk, Made, end, put
from workers import Eyes

from pgqueue.worker.flows import releaser

pytestmark = pytest.mark.promise("F327")


@pytest.fixture
async def desk(dsn: str) -> AsyncIterator[Desk]:
    made = Desk(dsn)
    yield made
    await made.close()


@pytest.mark.parametrize("most", [1_000, 7])
async def test_a_chain_is_cancelled_in_few_statements_each_job_naming_the_one_before(
    most: int, eyes: Eyes, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The naive release goes down one level with each look: 100 looks, and as many releases."""
    monkeypatch.setattr(releaser, "JOBS_MOST", most)
    sent, run = [], desk.session.run

    async def counted(*messages: Any) -> list[Any]:
        sent.append(len(messages))
        return await run(*messages)

    made = put(eyes.conn, Made(), *[Made(after=[at]) for at in range(100)])
    node, [first] = made[0]
    end(eyes, first, state="failed")
    monkeypatch.setattr(desk.session, "run", counted)
    await desk.look(node)
    assert eyes.states() == {"cancelled": 100, "failed": 1}
    assert len(sent) < (10 if most == 1_000 else 60)
    said = dict(eyes.all("SELECT job_id, message FROM pgqueue.attempt"))
    for at in range(1, 101):
        assert said[made[at][1][0]] == f"dependency: job {made[at - 1][1][0]} of node {at} failed or was cancelled"
    assert eyes.happened("cancelled") == 100


async def test_what_waits_for_something_else_too_or_in_another_way_is_judged_by_itself(eyes: Eyes, desk: Desk) -> None:
    """Of a tree below the cancelled node: two branches go down at once; what lives elsewhere is waited for."""
    made = put(
        eyes.conn,
        Made(),
        Made(jobs=[{}, {}], after=[0]),
        Made(),
        Made(jobs=[{}, {}], after=[1]),
        Made(after=[1, 2]),
        Made(after_end=[3]),
        Made(after_failure=[3]),
        Made(after=[4]),
    )
    (node, [first]), (_, [living]) = made[0], made[2]
    ids = [jobs for _, jobs in made]
    end(eyes, first, state="failed")
    await desk.look(node)
    states = [{eyes.state(id) for id in jobs} for jobs in ids]
    assert states == [
        {"failed"},
        {"cancelled"},
        {"available"},
        {"cancelled"},
        {"blocked"},
        *[{"available"}] * 2,
        {"blocked"},
    ]
    end(eyes, living)
    await desk.look(made[2][0])
    assert [eyes.state(ids[at][0]) for at in (4, 7)] == ["cancelled"] * 2


async def test_while_a_job_of_the_node_before_lives_what_waits_for_it_is_not_cancelled(
    eyes: Eyes, desk: Desk, dsn: str
) -> None:
    """One job of two is locked, and passed over. A retry of the failed job may let it run, so it is judged later. The
    naive release goes down from a node that still lives."""
    made = put(eyes.conn, Made(), Made(jobs=[{}, {}], after=[0]), Made(after=[1]), Made(after=[2]))
    (node, [first]), (_, [one, other]), (_, [child]), (_, [last]) = made
    end(eyes, first, state="failed")
    with psycopg.connect(dsn) as locker:
        locker.execute("SELECT FROM pgqueue.job_blocked WHERE id = %s FOR UPDATE", [other])
        await desk.look(node)
        assert [eyes.state(id) for id in (one, other, child, last)] == ["cancelled", *["blocked"] * 3]
    await desk.sweep()
    assert {eyes.state(id) for id in (one, other, child, last)} == {"cancelled"}


async def test_below_a_child_that_is_locked_nothing_is_cancelled(eyes: Eyes, desk: Desk, dsn: str) -> None:
    made = put(eyes.conn, Made(), Made(after=[0]), Made(after=[1]), Made(after=[2]))
    (node, [first]), (_, [one]), (_, [child]), (_, [last]) = made
    end(eyes, first, state="failed")
    with psycopg.connect(dsn) as locker:
        locker.execute("SELECT FROM pgqueue.job_blocked WHERE id = %s FOR UPDATE", [child])
        await desk.look(node)
        assert [eyes.state(id) for id in (one, child, last)] == ["cancelled", "blocked", "blocked"]
    await desk.sweep()
    assert {eyes.state(id) for id in (one, child, last)} == {"cancelled"}
