"""The handlers of the worker under test. They do next to nothing, so that what is measured is the queue."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from functools import cached_property
from time import monotonic, time
from typing import Any

from psycopg import AsyncConnection, Connection
from psycopg_pool import AsyncConnectionPool, ConnectionPool

from pgqueue import Batch, Job, lifespan, task

QUEUE = "bench"
WRITE = "INSERT INTO bench_effect (job) VALUES (%s)"
WRITE_ALL = "INSERT INTO bench_effect (job) SELECT unnest(%s::bigint[])"

running: Counter[str | None] = Counter()
"""How many `keyed` of each lock id run now, in this process."""
overlaps = 0
"""How many `keyed` have begun while another of their id ran."""


@task(name="bench.keyed", queue=QUEUE, timeout=60)
async def keyed(job: Job) -> None:
    """Let the others run for a moment, and see whether one of the same lock id does."""
    global overlaps
    overlaps += running[job.lock_key] > 0
    running[job.lock_key] += 1
    await asyncio.sleep(0)
    running[job.lock_key] -= 1


starts: list[tuple[int, float]] = []
"""(job id, monotonic seconds) of every `stamp` that has begun; the clock is the same in all processes of a machine."""


@task(name="bench.noop", queue=QUEUE)
async def noop() -> None:
    """Return at once, on the event loop."""


@task(name="bench.millisecond", queue=QUEUE)
async def millisecond() -> None:
    """Wait for a millisecond, on the event loop."""
    await asyncio.sleep(0.001)


@task(name="bench.rated", queue=QUEUE, rate="1000000/s")
async def rated() -> None:
    """Return at once; under a rate that it never comes near."""


@task(name="bench.limited", queue=QUEUE, limit=50, timeout=60)
async def limited() -> None:
    """Return at once; under a limit."""


@task(name="bench.noop_sync", queue=QUEUE)
def noop_sync() -> None:
    """Return at once, in a thread."""


@task(name="bench.numbered", queue=QUEUE)
async def numbered(n: int) -> None:
    """Return at once; its number is what a unique key can be made of."""


@task(name="bench.stamp", queue=QUEUE)
async def stamp(job: Job) -> None:
    """Write down when it began."""
    starts.append((job.id, monotonic()))


late: list[float] = []
"""How late each `tick` has begun, in seconds."""


@task(name="bench.tick", queue=QUEUE)
async def tick(job: Job) -> None:
    """Write down how late it began."""
    assert job.tick is not None
    late.append(time() - job.tick.timestamp())


class Own:
    """Pools of the application, opened when a handler first wants one; as large as the worker has slots."""

    dsn = ""
    slots = 10

    @cached_property
    def threads(self) -> ConnectionPool[Connection[Any]]:
        return ConnectionPool(self.dsn, min_size=self.slots, max_size=self.slots, open=True)

    @cached_property
    def loop(self) -> AsyncConnectionPool[AsyncConnection[Any]]:
        return AsyncConnectionPool(self.dsn, min_size=self.slots, max_size=self.slots, open=False)


own = Own()


@lifespan
async def pools() -> AsyncIterator[None]:
    """Close what was opened."""
    yield
    if "threads" in vars(own):
        own.threads.close()
    if "loop" in vars(own):
        await own.loop.close()


@task(name="bench.own_sync", queue=QUEUE)
def own_sync(job: Job) -> None:
    """Write a row in a transaction of its own, in a thread."""
    with own.threads.connection() as conn, conn.transaction():
        conn.execute(WRITE, [job.id])


@task(name="bench.own_async", queue=QUEUE)
async def own_async(job: Job) -> None:
    """Write a row in a transaction of its own, on the loop."""
    if own.loop.closed:
        await own.loop.open()
    async with own.loop.connection() as conn, conn.transaction():
        await conn.execute(WRITE, [job.id])


@task(name="bench.write_sync", queue=QUEUE, transactional=True)
def write_sync(job: Job) -> None:
    """Write a row in the job's transaction, in a thread."""
    job.connection.execute(WRITE, [job.id])


@task(name="bench.write_batch", queue=QUEUE, transactional=True, batch=Batch(100))
def write_batch(jobs: list[Job], rows: list[int]) -> None:
    """Write a row for each job of a batch in one statement, in the batch's transaction, in a thread."""
    jobs[0].connection.execute(WRITE_ALL, [[job.id for job in jobs]])


@task(name="bench.write_async", queue=QUEUE, transactional=True)
async def write_async(job: Job) -> None:
    """Write a row in the job's transaction, on the loop."""
    conn = await job.aconnection()
    await conn.execute(WRITE, [job.id])
