"""Random graphs, by sessions that end jobs at the same time, some of them lost between a commit and its look."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

import psycopg
import pytest
from flow_rows import Desk, Made, put
from workers import Eyes

SESSIONS, FLOWS, NODES = 4, 30, 8
START = """
WITH picked AS (
    SELECT ctid FROM pgqueue.job_available ORDER BY random() LIMIT 1 FOR UPDATE SKIP LOCKED
), gone AS (
    DELETE FROM pgqueue.job_available WHERE ctid = ANY (ARRAY(SELECT ctid FROM picked)) RETURNING id, task, args, node
), running AS (
    INSERT INTO pgqueue.job_running (state, worker_id, claim, started_at, id, task, args, node)
    SELECT 'running', 1, 1, now(), gone.* FROM gone
)
SELECT id, node, args FROM gone
"""
BEFORE = """
SELECT count(*) FROM pgqueue.node n CROSS JOIN unnest(n.after || n.after_end || n.after_failure) AS u (node)
JOIN pgqueue.job j ON j.node IN (u.node, -u.node) AND j.state IN ('available', 'scheduled', 'blocked', 'running')
WHERE n.id = %s
"""
BACK = """
WITH gone AS (DELETE FROM pgqueue.job_running WHERE id = %s RETURNING id, task, args, node)
INSERT INTO pgqueue.job_available (state, id, task, args, node) SELECT 'available', gone.* FROM gone
"""
DONE = """
WITH gone AS (DELETE FROM pgqueue.job_running WHERE id = %s RETURNING id, task, args, node)
INSERT INTO pgqueue.job_done (state, finished_at, bin, id, task, args, node)
SELECT 'completed', now(), 0, gone.* FROM gone
"""
DEAD = """
WITH gone AS (DELETE FROM pgqueue.job_running WHERE id = %s RETURNING id, task, args, node)
INSERT INTO pgqueue.job_dead (state, finished_at, bin, reason, id, task, args, node)
SELECT 'failed', now(), 0, 'error', gone.* FROM gone
"""


def graph(random: Random) -> list[Made]:
    """Nodes of up to three jobs; each waits for some of those before it, under any of the three conditions."""
    made: list[Made] = []
    for place in range(NODES):
        lists: list[list[int]] = [[], [], []]
        for before in random.sample(range(place), min(place, random.randint(0, 4))):
            lists[random.choice((0, 0, 1, 2))].append(before)
        jobs = [{"fails": random.random() < 0.15} for _ in range(random.randint(1, 3))]
        after, after_end, after_failure = lists
        made.append(Made("x", jobs, after, after_end, after_failure))
    return made


def expected(made: list[Made]) -> list[list[str]]:
    """How each job of each node ends, by the rules alone."""
    ends: list[list[str]] = []
    for node in made:
        failed = [at for at, states in enumerate(ends) if {"failed", "cancelled"} & set(states)]
        if set(node.after) & set(failed):
            ends.append(["cancelled" for _ in node.jobs])
        elif node.after_failure and not set(node.after_failure) & set(failed):
            ends.append(["skipped" for _ in node.jobs])
        else:
            ends.append(["failed" if args["fails"] else "completed" for args in node.jobs])
    return ends


@pytest.mark.promise("F379")
async def test_every_job_ends_as_the_rules_say_none_early_none_twice_and_no_deadlock(dsn: str, eyes: Eyes) -> None:
    """A fifth of the looks is lost. Any error of the server, such as a deadlock, fails this test."""
    random = Random(51)
    graphs = [graph(random) for _ in range(FLOWS)]
    flows = [put(eyes.conn, *made) for made in graphs]
    started: list[int] = []
    early: list[int] = []

    async def session(number: int) -> None:
        mine, desk = Random(number), Desk(dsn, number)
        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as conn:

            async def ask(sql: str, *params: Any) -> list[tuple[Any, ...]]:
                return await (await conn.execute(sql.encode(), params or None)).fetchall()

            while eyes_live():
                rows = await ask(START)
                if not rows:
                    await desk.sweep()
                    continue
                [(id, node, args)] = rows
                [(living,)] = await ask(BEFORE, node)
                early.extend([id] * bool(living))
                if mine.random() < 0.2:  # given back, as by rescue: another session may run it at once
                    await conn.execute(BACK.encode(), [id])
                    continue
                started.append(id)
                await conn.execute((DEAD if args["fails"] else DONE).encode(), [id])
                if mine.random() < 0.8:
                    await desk.look(node)
        await desk.close()

    def eyes_live() -> bool:
        return bool(
            eyes.one("SELECT EXISTS (SELECT FROM pgqueue.job WHERE state IN ('available', 'blocked', 'running'))")
        )

    async with asyncio.timeout(120), asyncio.TaskGroup() as group:
        for number in range(1, SESSIONS + 1):
            group.create_task(session(number))
    assert early == []
    assert len(started) == len(set(started))
    states = dict(eyes.all("SELECT id, state FROM pgqueue.job"))
    found = [[[states[id] for id in ids] for _, ids in flow] for flow in flows]
    assert found == [expected(made) for made in graphs]
