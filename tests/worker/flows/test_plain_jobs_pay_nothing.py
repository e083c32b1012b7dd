"""Jobs of no flow pay nothing for flows: what is counted is pages and records of the log, which no load changes."""

from __future__ import annotations

import json
from typing import Any

import psycopg
import pytest
from workers import Eyes

from pgqueue.client import enqueue
from pgqueue.client.tasks import task
from pgqueue.database.statements import integers, text
from pgqueue.worker.fetch.claim import NO_END

N = 500
WORKER = """
    INSERT INTO pgqueue.worker (id, lease, pid, concurrency, host, version_tag, queues)
    OVERRIDING SYSTEM VALUE VALUES (1000, '1 h', 1, 1, '', '', '{}')
"""
NODE_INDEXES = r"""
    SELECT indexrelid::regclass::text FROM pg_index JOIN pg_class c ON c.oid = indexrelid
    WHERE c.relname LIKE 'job\_%\_node' AND c.relkind = 'i' AND c.relnamespace = 'pgqueue'::regnamespace
"""
CARRY_OUT = """
    CREATE FUNCTION pg_temp.carry_out(sql text) RETURNS void LANGUAGE plpgsql AS 'BEGIN EXECUTE sql; END'
"""
NAIVE = "CREATE INDEX {table}_naive ON pgqueue.{table} (node, id)"


@task(name="plain.x")
def x(n: int) -> None: ...


def cost(eyes: Eyes, sql: str, params: dict[str, Any]) -> tuple[int, int]:
    """The pages that a statement touches, and the records that it logs. Within a function: a part of it that nothing
    reads is carried out at its end, when EXPLAIN has counted."""
    whole = psycopg.ClientCursor(eyes.conn).mogrify(sql, params)
    asked = "EXPLAIN (ANALYZE, BUFFERS, WAL, FORMAT JSON) SELECT pg_temp.carry_out(%s)"
    [[said]] = psycopg.ClientCursor(eyes.conn).execute(asked, [whole]).fetchall()
    plan = (json.loads(said) if isinstance(said, str) else said)[0]["Plan"]
    return plan["Shared Hit Blocks"] + plan["Shared Read Blocks"], plan["WAL Records"]


def life(eyes: Eyes) -> dict[str, tuple[int, int]]:
    """What an enqueue, a claim and the completion of so many plain jobs cost, in empty tables, the second time: the
    first time a session reads the catalogue."""
    _lived(eyes)
    return _lived(eyes)


def _lived(eyes: Eyes) -> dict[str, tuple[int, int]]:
    eyes.do("TRUNCATE pgqueue.job")
    put = enqueue.many([x.new(n) for n in range(N)])
    lane = {"queues": ["default"], "ranks": [11], "afters": [0], "uptos": [NO_END], "mosts": [N]}
    claim = {**lane, "tasks": ["plain.x"], "worker_id": 1000, "claim": 1, "n": N}
    found = {"enqueue": cost(eyes, put.sql, dict(put.params))}
    with eyes.conn.transaction():
        eyes.conn.execute(text("sessions_settings", "pgqueue").encode())
        found["claim"] = cost(eyes, text("fetch_claim", "pgqueue"), claim)
        ids = [id for (id,) in eyes.all("SELECT id FROM pgqueue.job_running ORDER BY id")]
        ends = {"ids": integers(ids), "claims": integers([1] * N), "worker_id": 1000, "version_tag": "", "notify": True}
        found["completion"] = cost(eyes, text("complete_plain", "pgqueue"), ends)
    assert eyes.one("SELECT count(*) FROM pgqueue.job_done") == N
    return found


@pytest.mark.promise("F329")
def test_a_plain_job_costs_what_it_costs_without_the_indexes_of_nodes(eyes: Eyes) -> None:
    """Within 1 %, each statement. An index that has plain jobs in it, the naive one, costs more in each."""
    eyes.do(WORKER)
    eyes.do(CARRY_OUT)
    ours = life(eyes)
    indexes = [name for (name,) in eyes.all(NODE_INDEXES)]
    assert len(indexes) > 4
    for name in indexes:
        eyes.do(f"DROP INDEX {name}")
    without = life(eyes)
    for statement, (pages, records) in ours.items():
        assert pages <= 1.01 * without[statement][0], (ours, without)
        assert records <= 1.01 * without[statement][1], (ours, without)
    bin = eyes.one("SELECT bin FROM pgqueue.ring WHERE kind = 'done'")
    for table in ("job_available", "job_running", f"job_done_{bin}"):
        eyes.do(NAIVE.format(table=table))
    naive = life(eyes)
    for statement, (_, records) in naive.items():
        assert records > 1.05 * without[statement][1], (naive, without)
