"""The crash harness with tasks that iterate: the nursery of lives.py, with these and one naive version more.

As a program (`python -m crashes.iterate`) it is that nursery. system/test_iteration_crashes.py writes the plans and
looks at the tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from crashes import lives, naive, tasks
from crashes.tasks import AGAIN
from pgqueue.client.tasks import Task, task
from pgqueue.database.statements import Statement
from pgqueue.jobs.job import Job
from pgqueue.worker.transactions.commit import Commit

ITEMS, SIZE = 6, 2
TABLE = "CREATE TABLE item (place bigserial, token bigint NOT NULL, item integer NOT NULL)"
INSERT = "INSERT INTO item (token, item) VALUES (%s, %s)"


def items(cursor: int | None) -> Iterator[tuple[int, int]]:
    for item in range((cursor or 0) + 1, ITEMS + 1):
        yield item, item


def batches(job: Job, token: int) -> None:
    tasks.home.began()
    for batch in job.iterate(items, SIZE):
        for item in batch:
            job.connection.execute(INSERT, (token, item))


async def abatches(job: Job, token: int) -> None:
    tasks.home.began()
    async for batch in job.aiterate(items, SIZE):
        conn = await job.aconnection()
        for item in batch:
            await conn.execute(INSERT, (token, item))


TASKS: dict[str, Task[..., Any]] = {
    "batches": task(name="crash.batches", retry=AGAIN)(batches),
    "abatches": task(name="crash.abatches", retry=AGAIN)(abatches),
    "tbatches": task(name="crash.tbatches", retry=AGAIN, transactional=True)(batches),
    "tabatches": task(name="crash.tabatches", retry=AGAIN, transactional=True)(abatches),
}


def cursor_afterwards() -> None:
    """The batch is committed, and where to go on is written after it, in a transaction of its own."""
    real = Commit._commit_with

    async def commit(self: Commit, conn: Any, statements: Sequence[Statement[Any]], early: int | None = None) -> None:
        await real(self, conn, [])
        for statement in statements:  # without the mark of that transaction, which would refuse them
            await self._side.send(conn, replace(statement, params={**statement.params, "mark": None}))

    Commit._commit_with = commit  # type: ignore[method-assign]


if __name__ == "__main__":
    naive.cursor_afterwards = cursor_afterwards  # type: ignore[attr-defined]
    tasks.TASKS.update(TASKS)  # type: ignore[arg-type]
    lives.nurse()
