"""What flows cost beside a flow of 100,000 nodes that wait and 1,000,000 flows that are over.

Measured are the pages that a statement touches, found or read, in a session with the settings of a worker: the same on
a busy machine. Each statement is undone after it was measured. The other side has 1,000 nodes and 1,000 flows.
"""

from __future__ import annotations

import json
from typing import Any

import psycopg

from bench.figures import Figure, Goal
from bench.run import Run
from bench.server import register
from bench.track import FILL
from pgqueue import remote
from pgqueue.client import flow_enqueue
from pgqueue.client.flow import Flow
from pgqueue.database.statements import text
from pgqueue.worker.fetch.claim import NO_END

FEW, NODES, FLOWS = 1_000, 100_000, 1_000_000
MOST = 1.3
"""Above 70,000 rows an index of nodes has one level more: one page more for each look into it."""
FLOW = "INSERT INTO pgqueue.flow (name) VALUES ('chain') RETURNING id"
CHAIN = """
INSERT INTO pgqueue.node (id, after)
SELECT %(flow)s::bigint << 20 | n, ARRAY[%(flow)s::bigint << 20 | n - 1] FROM generate_series(2, %(n)s) AS n
"""
WAITING = """
INSERT INTO pgqueue.job (state, task, queue, node, key)
SELECT 'blocked', 'bench.noop', 'bench', -(%(flow)s::bigint << 20 | n), 'node:' || (%(flow)s::bigint << 20 | n - 1)
FROM generate_series(2, %(n)s) AS n
"""
OVER = """
WITH made AS (
    INSERT INTO pgqueue.flow (name, enqueued_at)
    SELECT 'over', pgqueue.now() - interval '30 days' FROM generate_series(1, %s) RETURNING id
), nodes AS (
    INSERT INTO pgqueue.node (id, after) SELECT id << 20 | 2, ARRAY[id << 20 | 1] FROM made
)
INSERT INTO pgqueue.job_done (state, finished_at, bin, id, task, node)
SELECT 'completed', pgqueue.now(), 1, nextval('pgqueue.job_id_seq'), 'bench.noop', id << 20 | n
FROM made, generate_series(1, 2) AS n
"""
noop = remote("bench.noop")

Conn = psycopg.Connection[Any]


def flows(run: Run) -> list[Figure]:
    """Pages of statements beside 100,000 nodes that wait and 1,000,000 flows that are over, against 1,000 of each."""
    many = _measure(run, run.jobs(NODES), run.jobs(FLOWS))
    few = _measure(run, FEW, FEW)
    goal = Goal(MOST, at_most=True)
    return [
        figure
        for name, pages in many.items()
        for figure in (
            Figure("flows", f"{name}, many/few", pages / few[name], "x", goal),
            Figure("flows", f"{name}, pages", float(pages), ""),
        )
    ]


def _measure(run: Run, nodes: int, over: int) -> dict[str, int]:
    with run.lab.database() as dsn, psycopg.connect(dsn, autocommit=True) as conn:
        worker = register(dsn, ["bench"])
        [[flow]] = conn.execute(FLOW).fetchall()
        for made in (CHAIN, WAITING):
            conn.execute(made, {"flow": flow, "n": nodes})
        for some in (over, 20):
            conn.execute(OVER, [some])
        conn.execute(FILL, ["bench.noop", "bench", FEW])
        return {name: pages(conn, *each) for name, each in _asked(flow << 20 | 1, worker).items()}


def _asked(node: int, worker: int) -> dict[str, tuple[str, dict[str, Any]]]:
    """Statements as workers and applications send them; the node is one that has just ended."""
    flow = Flow("two")
    flow.add(noop.new(), after=[flow.add(noop.new())])
    jobs = [job for each in flow.nodes for job in each.jobs]
    enqueue = flow_enqueue.statement("two", flow.nodes, jobs, schema="pgqueue", notify=True)
    about = {"worker_id": worker, "version_tag": "", "notify": True}
    lane = {"queues": ["bench"], "ranks": [11], "afters": [0], "uptos": [NO_END], "mosts": [100]}
    named: dict[str, tuple[str, dict[str, Any]]] = {
        "look": ("release_look", {"nodes": [node]}),
        "release": ("release_jobs", {"nodes": [node], "n": 1_000, "passed": "{}", "bytes": 16 << 20, **about}),
        "sweep of 100": ("release_walk", {"after": "", "n": 100}),
        "list of 20": ("flows_list", {"n": 20, "before": 1 << 43, "most": 10_000}),
        "pruner of 1,000": ("pruner_flows", {"after": node >> 20, "n": 1_000, "most": 50_000}),
        "claim of 100": (
            "fetch_claim", {**lane, "tasks": ["bench.noop"], "worker_id": worker, "claim": 1, "n": 100},
        ),
    }  # fmt: skip
    found = {name: (text(statement, "pgqueue"), params) for name, (statement, params) in named.items()}
    return found | {"enqueue of 2": (enqueue.sql, dict(enqueue.params))}


def pages(conn: Conn, sql: str, params: dict[str, Any]) -> int:
    """How many a statement touches in a session of a worker. It is undone. Of three runs the last: the first ones read
    the catalogue."""
    plan: dict[str, Any] = {}
    for _ in range(3):
        with conn.transaction(force_rollback=True):
            conn.execute(text("sessions_settings", "pgqueue").encode())
            [[said]] = conn.execute(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {sql}".encode(), params).fetchall()
        plan = (json.loads(said) if isinstance(said, str) else said)[0]["Plan"]
    return int(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])
