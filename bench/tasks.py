"""The handlers of the worker under test. They do nothing, so that what is measured is the queue."""

from __future__ import annotations

from time import monotonic

from pgqueue import Job, task

QUEUE = "bench"

starts: list[tuple[int, float]] = []
"""(job id, monotonic seconds) of every `stamp` that has begun; the clock is the same in all processes of a machine."""


@task(name="bench.noop", queue=QUEUE)
async def noop() -> None:
    """Return at once, on the event loop."""


@task(name="bench.noop_sync", queue=QUEUE)
def noop_sync() -> None:
    """Return at once, in a thread."""


@task(name="bench.stamp", queue=QUEUE)
async def stamp(job: Job) -> None:
    """Write down when it began."""
    starts.append((job.id, monotonic()))
