"""The handlers that have begun in this process: what a test waits for before it cancels, stops or asks about a job.

A row that says `running` comes too early for that: a worker has claimed the job, and may not have read the answer yet.
A handler in another process reports by `say`; there `Process.event` and `Supervised.event` are what waits for it.
"""

from __future__ import annotations

from workers import until

from pgqueue.jobs.job import Job

_begun: set[int] = set()


def begins(job: Job) -> None:
    """Report that the handler of this job has begun: its first line, on the loop or in a thread."""
    _begun.add(job.id)


async def begun(*jobs: int) -> None:
    """Wait until the handlers of all these jobs have begun."""
    await until(lambda: _begun.issuperset(jobs))


def forget() -> None:
    """Every test has a database of its own, and with it the same ids."""
    _begun.clear()
