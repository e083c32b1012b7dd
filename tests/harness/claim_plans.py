"""The plan of a claim, and the buffers it reads."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from typing import Any

import psycopg
from workers import Eyes, Taker

from pgqueue.database import statements
from pgqueue.worker.fetch.claim import NO_END
from pgqueue.worker.fetch.fetcher import RANKS
from pgqueue.worker.fetch.kinds import NO_RANK
from pgqueue.worker.fetch.poison_jobs import MORE_CRASHES, ONE_CRASH
from pgqueue.worker.fetch.watermark import Watermark

INSERT = """
    INSERT INTO pgqueue.job (task, queue, priority, rank)
    SELECT %s, %s, %s, 2 * %s + 1 FROM generate_series(1, %s)
"""


def put(eyes: Eyes, task: str, *, queue: str = "default", priority: int = 5, number: int = 1) -> None:
    eyes.do(INSERT, task, queue, priority, priority, number)


def explain(
    conn: psycopg.Connection, taker: Taker, afters: int = 0, n: int = 100, queues: int = 2, uptos: int = NO_END
) -> dict[str, Any]:
    """The plan of the claim, run as a fetch runs it; rolled back."""
    names = ["default", *(f"q{number}" for number in range(queues - 1))]
    lanes = [(queue, rank) for rank in (ONE_CRASH, MORE_CRASHES, *RANKS) for queue in names]
    params = {
        "queues": [queue for queue, _ in lanes],
        "ranks": [rank for _, rank in lanes],
        "afters": [afters] * len(lanes),
        "uptos": [uptos] * len(lanes),
        "mosts": [n] * len(lanes),
        "tasks": sorted(taker.tasks),
        "worker_id": taker.worker_id,
        "claim": 1,
        "n": n,
    }
    conn.execute(statements.text("sessions_settings", "pgqueue"))
    reading = {"others": [0] * len(lanes), "beyond": NO_RANK}
    reading |= {name: params[name] for name in ("queues", "ranks", "tasks")}
    conn.execute(statements.text("fetch_reading", "pgqueue"), reading)
    [[plan]] = conn.execute(
        f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {statements.text('fetch_claim', 'pgqueue')}", params
    )
    conn.rollback()
    found = plan if isinstance(plan, list) else json.loads(plan)
    return dict(found[0]["Plan"])


def buffers(plan: dict[str, Any]) -> int:
    return int(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])


async def beside(
    holding: AbstractContextManager[object], taker: Taker, eyes: Eyes, conn: psycopg.Connection
) -> tuple[int, int, int]:
    """The buffers a claim of 10 jobs reads: before, while that is held over 60,000 jobs, and then without a cursor."""

    async def pass_jobs(number: int) -> None:
        for _ in range(number // 1000):
            put(eyes, "x", number=1000)
            assert len(await taker.fetch(1000)) == 1000
            eyes.do("DELETE FROM pgqueue.job_running")

    def cost() -> int:
        cursor = taker.fetcher.watermark._cursors["default", 11, False]
        return buffers(explain(conn, taker, afters=cursor, n=10, queues=1))

    taker.fetcher.watermark = Watermark(sweep_every=1e9)
    await pass_jobs(5_000)
    eyes.do("VACUUM (INDEX_CLEANUP ON) pgqueue.job_available")
    put(eyes, "x", number=100)
    without = cost()
    assert len(await taker.fetch(1000)) == 100
    with holding:
        await pass_jobs(60_000)
        eyes.do("VACUUM (INDEX_CLEANUP ON) pgqueue.job_available")
        put(eyes, "x", number=100)
        return without, cost(), buffers(explain(conn, taker, n=10, queues=1))
