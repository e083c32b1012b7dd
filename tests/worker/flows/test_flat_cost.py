"""What a flow costs does not grow with the nodes of other flows, with its own, or with the flows that are over."""

from __future__ import annotations

import json
from typing import Any

import psycopg
import pytest
from flow_rows import Made, end, put
from workers import Eyes

from bench.flows import pages
from pgqueue.client import flow_enqueue
from pgqueue.client.flow import Flow
from pgqueue.client.tasks import task
from pgqueue.database.statements import text
from pgqueue.worker.fetch.claim import NO_END

Conn = psycopg.Connection[Any]
FLOW = "INSERT INTO pgqueue.flow (name, enqueued_at) VALUES ('chain', now() - interval '30 days') RETURNING id"
CHAIN = """
    INSERT INTO pgqueue.node (id, after)
    SELECT %(flow)s::bigint << 20 | n, ARRAY[%(flow)s::bigint << 20 | n - 1] FROM generate_series(2, %(n)s) AS n;
    INSERT INTO pgqueue.job (state, task, node, key)
    SELECT 'blocked', 'flat.x', -(%(flow)s::bigint << 20 | n), 'node:' || (%(flow)s::bigint << 20 | n - 1)
    FROM generate_series(2, %(n)s) AS n;
"""
"""A flow of n nodes, each waiting for the one before it, of which the first has ended."""
FLOWS_OVER = """
    WITH made AS (
        INSERT INTO pgqueue.flow (name, enqueued_at) SELECT 'over', now() - interval '30 days' FROM generate_series(1, %(n)s) RETURNING id
    ), nodes AS (
        INSERT INTO pgqueue.node (id, after) SELECT id << 20 | 2, ARRAY[id << 20 | 1] FROM made
    )
    INSERT INTO pgqueue.job_done (state, finished_at, bin, id, task, node)
    SELECT 'completed', now(), 1, nextval('pgqueue.job_id_seq'), 'flat.x', id << 20 | n FROM made, generate_series(1, 2) AS n
"""  # noqa: E501
KEPT = """
    INSERT INTO pgqueue.flow_kept (node, id, state)
    SELECT f.id << 20 | 1, 1, 'completed' FROM pgqueue.flow f ON CONFLICT DO NOTHING
"""
PLAIN = "INSERT INTO pgqueue.job (task, rank) SELECT 'flat.x', 11 FROM generate_series(1, %s)"
WORKER = """
    INSERT INTO pgqueue.worker (id, lease, pid, concurrency, host, version_tag, queues)
    OVERRIDING SYSTEM VALUE VALUES (1000, '1 h', 1, 1, '', '', '{}')
"""


@task(name="flat.x")
def x() -> None: ...


def grown(eyes: Eyes, n: int) -> int:
    """There are a flow of n nodes that waits, n flows that are over with something kept of each, and 20 new ones. The
    node of the first flow that has just ended."""
    [(flow,)] = eyes.all(FLOW)
    psycopg.ClientCursor(eyes.conn).execute(CHAIN, {"flow": flow, "n": n})
    for some in (n, 20):
        eyes.conn.execute(FLOWS_OVER.encode(), {"n": some})
    eyes.do(KEPT)
    return int(flow) << 20 | 1


def asked(node: int) -> dict[str, tuple[str, dict[str, Any]]]:
    """What is measured: statements as they are sent."""
    flow = Flow("two")
    flow.add(x.new(), after=[flow.add(x.new())])
    jobs = [job for each in flow.nodes for job in each.jobs]
    enqueue = flow_enqueue.statement("two", flow.nodes, jobs, schema="pgqueue", notify=True)
    worker = {"worker_id": 1000, "version_tag": "", "notify": True}
    lane = {"queues": ["default"], "ranks": [11], "afters": [0], "uptos": [NO_END], "mosts": [100]}
    named: dict[str, dict[str, Any]] = {
        "release_look": {"nodes": [node]},
        "release_jobs": {"nodes": [node], "n": 1_000, "passed": "{}", "bytes": 16 << 20, **worker},
        "release_walk": {"after": "", "n": 100},
        "flows_list": {"n": 20, "before": 1 << 43, "most": 10_000},
        "pruner_flows": {"after": 0, "n": 100, "most": 50_000},
        "pruner_flow_kept": {"after": 0, "n": 100, "most": 50_000},
        "fetch_claim": {**lane, "tasks": ["flat.x"], "worker_id": 1000, "claim": 1, "n": 100},
    }
    found = {name: (text(name, "pgqueue"), params) for name, params in named.items()}
    return found | {
        "flow_enqueue": (enqueue.sql, dict(enqueue.params)),
        "a walk without an end": (text("release_walk", "pgqueue"), {"after": "", "n": 1_000_000}),
    }


@pytest.mark.second
@pytest.mark.promise("F326")
def test_no_statement_of_flows_costs_more_beside_many_nodes_and_many_flows_that_are_over(eyes: Eyes) -> None:
    """1,000 and 20,000: all indexes have as many levels. A walk of all nodes in one statement is the naive sweep."""
    eyes.do(WORKER)
    eyes.do(PLAIN, 500)
    first = asked(grown(eyes, 1_000))
    few = {name: pages(eyes.conn, *each) for name, each in first.items()}
    grown(eyes, 19_000)
    many = {name: pages(eyes.conn, *each) for name, each in first.items()}
    print(few, many)
    grew = {name: many[name] / few[name] for name in few}
    assert min(few.values()) > 5
    assert grew.pop("a walk without an end") > 10
    assert max(grew.values()) <= 1.2, grew


@pytest.mark.promise("F327")
def test_results_of_many_nodes_are_read_together(eyes: Eyes) -> None:
    """In the order of the conditions, with null where a job did not complete. The naive release asks for each result by
    itself: 55 pages and a third of a millisecond for each."""
    n = 300
    parts = [Made() for _ in range(n)]
    *made, (_, [waiting]) = put(
        eyes.conn, *parts, Made(after_end=range(n), results={f"p{at:03}": (at, False) for at in range(n)})
    )
    for at, (_, ids) in enumerate(made):
        end(eyes, *ids, state="failed" if at % 100 == 7 else "completed", result=str(at))
    nodes = [node for node, _ in made]
    worker = {"worker_id": 1, "version_tag": "", "notify": False}
    ask = {"nodes": nodes, "n": 1_000, "passed": "{}", "bytes": 16 << 20, **worker}
    touched = pages(eyes.conn, text("release_jobs", "pgqueue"), ask)
    assert touched < 20 * n, touched
    eyes.conn.execute(text("release_jobs", "pgqueue").encode(), ask)
    [[state, args]] = eyes.all("SELECT state, args FROM pgqueue.job WHERE id = %s", waiting)
    assert state == "available"
    assert args == {f"p{at:03}": None if at % 100 == 7 else at for at in range(n)}


@pytest.mark.promise("F384")
def test_a_name_is_found_without_a_walk_of_the_flow(eyes: Eyes) -> None:
    """Naive goes from node to node: 100,000 take 20 ms, on the session of the heartbeats, for each job that reads."""
    eyes.do("INSERT INTO pgqueue.node (id, name) SELECT 7 << 20 | n, 'n' || n FROM generate_series(1, 20000) AS n")
    long = "x" * 5_000
    eyes.do("INSERT INTO pgqueue.node (id, name) VALUES (7 << 20 | 20001, %s), (8 << 20 | 1, 'n9')", long + "a")
    eyes.do("INSERT INTO pgqueue.node (id, name) VALUES (7 << 20 | 20002, %s), (7 << 20 | 20003, 'n9')", long + "b")
    sql = text("node_results_named", "pgqueue")
    first = json.dumps(["n1", "n10", "n100"])
    for name, found in {
        "n20000": (7 << 20 | 20_000, None),
        "n9": (7 << 20 | 9, None),
        long + "b": (7 << 20 | 20_002, None),
        long: (None, first),
        "m": (None, first),
    }.items():
        ask = {"flow": 7, "name": name, "n": 3}
        assert eyes.conn.execute(sql.encode(), ask).fetchall() == [found]
        assert pages(eyes.conn, sql, ask) < 10
