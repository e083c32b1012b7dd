"""Batches of workers that die at every statement boundary: whatever is committed is a whole number of batches, in
order, and the cursor says how many; in the end each item was applied once. And the naive order is found out."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from crashes import iterate
from crashes.iterate import INSERT, ITEMS, SIZE, TABLE
from crashes.lives import rescue_all
from crashes.nursery import Life, Nursery, lived
from crashes.series import fault
from crashes.tasks import TABLES
from workers import Eyes, wait_until, workers

import pgqueue
from pgqueue.database.sessions import Link, Session
from pgqueue.worker.liveness.rescue import Rescue

BOUNDARIES = {
    "iteration_last before",
    "BEGIN before",
    "INSERT INTO item before",
    "iteration_append before",
    "COMMIT iteration_append before",
    "COMMIT iteration_append sent",
    "COMMIT iteration_append after",
}
WHOLE = [*range(1, ITEMS + 1)]


class Books:
    """A database for iterating jobs, and what stands in it about one of them."""

    def __init__(self, dsn: str, eyes: Eyes, nursery: Nursery) -> None:
        self.dsn, self.eyes, self.nursery = dsn, eyes, nursery
        self.session = Session(Link(dsn, "pgqueue"), "rescue")
        self.rescue = Rescue(self.session, notify=True, rescued=lambda: None)

    def put(self, kind: str) -> int:
        with psycopg.connect(self.dsn) as conn:
            token = self.eyes.one("SELECT nextval('token')::int")
            return iterate.TASKS[kind].enqueue(conn, token=token).id

    async def live(self, **plan: Any) -> Life:
        whole: dict[str, Any] = {"dsn": self.dsn, "kind": "work", "jobs": 2, "seconds": 60.0} | plan
        return await self.nursery.live(**whole)

    async def die(self, point: str, nth: int, naive: str = "") -> str:
        """Where a worker died that should at this point."""
        dead = await self.live(faults=[fault(point, nth)], naive=naive)
        await rescue_all(self.rescue, self.session, dead.pid)
        return dead.killed

    def applied(self, job: int) -> list[int]:
        """The items of this job, in the order of their inserts."""
        rows = self.eyes.all(
            "SELECT item FROM item WHERE token = (SELECT (args ->> 'token')::bigint FROM pgqueue.job WHERE id = %s) "
            "ORDER BY place",
            job,
        )
        return [item for (item,) in rows]

    def cursor(self, job: int) -> int:
        last = "SELECT cursor::int FROM pgqueue.job_cursor WHERE job_id = %s ORDER BY n DESC LIMIT 1"
        return self.eyes.one(last, job) or 0


@pytest.fixture
async def books(dsn: str, eyes: Eyes) -> AsyncIterator[Books]:
    for statement in (*TABLES.split(";"), TABLE):
        eyes.do(statement)
    async with Nursery.open("crashes.iterate") as nursery:
        made = Books(dsn, eyes, nursery)
        yield made
        await made.session.close()


@pytest.mark.second
@pytest.mark.promise("T01")
@pytest.mark.promise("T04")
@pytest.mark.parametrize(
    "kind",
    [
        "batches",
        "tabatches",
        pytest.param("abatches", marks=pytest.mark.long),
        pytest.param("tbatches", marks=pytest.mark.long),
    ],
)
async def test_every_item_is_applied_once_and_in_order_wherever_its_workers_die(kind: str, books: Books) -> None:
    job = books.put(kind)
    life = await lived(books.nursery, books.eyes.is_in(job, "completed"), dsn=books.dsn)
    assert books.applied(job) == WHOLE
    points = [point for point in life.seen if point.startswith("job: ")]
    assert {f"job: {boundary}" for boundary in BOUNDARIES} <= set(points), points
    for point in points:
        job = books.put(kind)
        # In the middle of the second batch, where a life comes to the point more than once.
        nth = SIZE + 2 if "item" in point else 2 if "append" in point else 1
        assert await books.die(point, nth) == point
        assert books.applied(job) == WHOLE[: books.cursor(job)], point
        assert books.cursor(job) in ((SIZE, 2 * SIZE) if nth > 1 else (0,)), point
        await books.live(jobs=1, grace=60.0)
        assert books.eyes.state(job) == "completed", point
        assert books.applied(job) == WHOLE, point
    print(f"{kind}: {len(points)} points", *points, sep="\n")


@pytest.mark.second
async def test_the_order_that_everybody_writes_first_applies_a_batch_twice(books: Books) -> None:
    job = books.put("batches")
    assert await books.die("job: iteration_append before", 2, naive="cursor_afterwards")
    assert (books.applied(job), books.cursor(job)) == ([1, 2, 3, 4], 2)
    await books.live(jobs=1, grace=60.0)
    assert books.applied(job) == [1, 2, 3, 4, 3, 4, 5, 6]


DEPLOYED = f"""
@pgqueue.task(name="deploy.goes")
def goes(job: pgqueue.Job) -> None:
    for batch in job.iterate(lambda cursor: ((n, n) for n in range((cursor or 0) + 1, 201)), 1):
        job.connection.execute("{INSERT}", (job.id, batch[0]))
        if batch[0] in (40, 120):
            say("at", item=batch[0])
        time.sleep(0.005)
"""


@pytest.mark.second
@pytest.mark.promise("S11")
def test_deploys_in_the_middle_cost_nothing(dsn: str, eyes: Eyes, tmp_path: Path) -> None:
    """Real processes, SIGTERM with a short grace: each goes on where the one before it was stopped."""
    eyes.do(TABLE)
    with workers(tmp_path, dsn, DEPLOYED) as made:
        with psycopg.connect(dsn) as conn:
            job = pgqueue.enqueue(conn, "deploy.goes").id
        for item in (40, 120):
            old = made.start({"GRACE": "0.05"}, concurrency=1)
            old.event("at", item=item)
            assert old.stop() == 0
            assert eyes.state(job) == "available"
        made.start(concurrency=1)
        wait_until(lambda: eyes.state(job) == "completed")
    assert [item for (item,) in eyes.all("SELECT item FROM item ORDER BY place")] == [*range(1, 201)]
    assert eyes.all("SELECT attempt FROM pgqueue.job_done") == [(1,)]
    assert eyes.all("SELECT outcome FROM pgqueue.attempt") == [("interrupted",)] * 2
