"""Flows as rows, written by SQL: what an enqueue would write; and a releaser that goes on with them when told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import psycopg
from psycopg.types.json import Jsonb
from worker_states import worker_state
from workers import Eyes

from pgqueue.database.sessions import Link, Session
from pgqueue.worker.flows.releaser import Releaser

FLOW = "INSERT INTO pgqueue.flow (name) VALUES ('made up') RETURNING id"
NODE = "INSERT INTO pgqueue.node (id, name, after, after_end, after_failure, results) VALUES (%s, %s, %s, %s, %s, %s)"
JOBS = """
INSERT INTO pgqueue.job (state, task, args, headers, node, key)
SELECT CASE WHEN %(key)s::text IS NULL THEN 'available' ELSE 'blocked' END, %(task)s, coalesce(args, '{}'), %(headers)s,
    CASE WHEN %(key)s::text IS NULL THEN %(node)s ELSE -%(node)s END, %(key)s
FROM unnest(%(args)s::jsonb[]) AS args
RETURNING id
"""
DONE = """
WITH gone AS (DELETE FROM pgqueue.job WHERE id = ANY (%s) RETURNING id, enqueued_at, task, args, node)
INSERT INTO pgqueue.job_done (state, finished_at, bin, result, id, enqueued_at, task, args, node)
SELECT %s, now(), (SELECT bin FROM pgqueue.ring WHERE kind = 'done'), %s::jsonb, gone.* FROM gone
"""
DEAD = """
WITH gone AS (DELETE FROM pgqueue.job WHERE id = ANY (%s) RETURNING id, enqueued_at, task, args, node)
INSERT INTO pgqueue.job_dead (state, finished_at, bin, reason, result, id, enqueued_at, task, args, node)
SELECT %s, now(), (SELECT bin FROM pgqueue.ring WHERE kind = 'dead'), 'error', %s::jsonb, gone.* FROM gone
"""


@dataclass(frozen=True)
class Made:
    """A node to be; the nodes that it waits for are named by their places in the flow, from 0."""

    task: str = "x"
    jobs: Sequence[dict[str, Any]] = ({},)
    """The arguments of each of its jobs."""
    after: Sequence[int] = ()
    after_end: Sequence[int] = ()
    after_failure: Sequence[int] = ()
    results: dict[str, tuple[int, bool]] = field(default_factory=dict)
    """By the name of a parameter, the node of the result, and whether it is a list of many."""
    headers: dict[str, Any] | None = None
    name: str | None = None


def put(conn: psycopg.Connection, *made: Made) -> list[tuple[int, list[int]]]:
    """Write a flow in one transaction; each of its nodes with the ids of its jobs."""
    found: list[tuple[int, list[int]]] = []
    with conn.transaction(), conn.cursor() as cursor:
        [(flow,)] = cursor.execute(FLOW).fetchall()
        for place, each in enumerate(made, 1):
            node = flow << 20 | place
            lists = [[found[at][0] for at in some] for some in (each.after, each.after_end, each.after_failure)]
            waits = [found[at][0] for some in (each.after, each.after_end, each.after_failure) for at in some]
            results = {name: {"node": found[at][0], "many": many} for name, (at, many) in each.results.items()}
            cursor.execute(NODE, [node, each.name, *lists, Jsonb(results) if results else None])
            rows = cursor.execute(JOBS, {
                "task": each.task, "node": node, "key": f"node:{max(waits)}" if waits else None,
                "args": [Jsonb(args) for args in each.jobs],
                "headers": None if each.headers is None else Jsonb(each.headers),
            }).fetchall()  # fmt: skip
            found.append((node, [id for (id,) in rows]))
    return found


def end(eyes: Eyes, *ids: int, state: str = "completed", result: str | None = None) -> None:
    """These jobs have ended, as if their worker had died between its commit and its look."""
    eyes.do(DONE if state in ("completed", "skipped") else DEAD, list(ids), state, result)


class Desk:
    """A releaser, step by step: nothing runs by itself."""

    def __init__(self, dsn: str, worker_id: int = 1) -> None:
        self.link = Link(dsn, "pgqueue")
        self.session = Session(self.link, "release")
        self.releaser = Releaser(self.session, worker_state(self.link, worker_id))

    async def look(self, *nodes: int) -> None:
        """Look at these nodes, and at all that comes of it."""
        self.releaser.look_at(nodes)
        await self.releaser._step()

    async def sweep(self) -> int:
        """Walk all nodes for which jobs wait; how many of them had ended."""
        before = self.releaser.found_by_sweep
        self.releaser.rescued()
        await self.releaser._step()
        return self.releaser.found_by_sweep - before

    async def close(self) -> None:
        await self.session.close()
