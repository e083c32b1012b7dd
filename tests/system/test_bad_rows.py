"""A row that was restored, or inserted by hand, with a value that fits nowhere: it is put aside, and ends no worker."""

from __future__ import annotations

import psycopg
import pytest
from workers import Eyes, until, work

from pgqueue.client.tasks import task
from pgqueue.jobs.concurrency import Limit, Rate

BAD = "INSERT INTO pgqueue.job (task, state, {}, priority) VALUES ('{}', 'blocked', {}, {})"


@task(name="bad.locked", lock="k")
async def locked() -> None:
    pass


@task(name="bad.limited", limit=Limit(5, name="few"))
async def limited() -> None:
    pass


@task(name="bad.rated", rate=Rate("50/s", name="slow"))
async def rated() -> None:
    pass


KEYS = {
    "a lock": (locked, "key, lock_key, lock_limit, on_locked", "'lock:k', 'k', 1, 'wait'"),
    "a limit": (limited, "key, limit_key", "'limit:few', 'few'"),
    "a rate": (rated, "key, rate_key", "'rate:slow', 'slow'"),
}


@pytest.mark.promise("F45")
@pytest.mark.parametrize(
    ("kind", "priority"), [("a lock", 10), ("a lock", 30_000), ("a limit", 30_000), ("a rate", 30_000)]
)
async def test_a_blocked_job_that_fits_nowhere_is_put_aside(dsn: str, eyes: Eyes, kind: str, priority: int) -> None:
    """Before, the worker ended when it was that job's turn, and so did the next one."""
    mine, columns, values = KEYS[kind]
    eyes.do(BAD.format(columns, mine.name, values, priority))
    with psycopg.connect(dsn) as conn:
        good = [mine.enqueue(conn).id for _ in range(3)]
    async with work(dsn, mine) as worker:
        worker.services.sweep.sweep_soon()
        for id in good:
            await until(eyes.is_in(id, "completed"))
        assert worker.state.phase == "running"
    assert eyes.one("SELECT count(*) FROM pgqueue.job_blocked WHERE priority NOT BETWEEN 0 AND 9") == 0
