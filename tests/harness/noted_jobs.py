"""Jobs that note that they ran, and when they started."""

from __future__ import annotations

from time import monotonic

import pytest

from pgqueue.client.tasks import task
from pgqueue.jobs.job import Job

ran: list[int] = []
started: dict[int, float] = {}


@pytest.fixture(autouse=True)
def anew() -> None:
    """No test sees what ran in another one."""
    ran.clear()
    started.clear()


@task(name="flow.notes")
async def notes(job: Job) -> None:
    started.setdefault(job.id, monotonic())
    ran.append(job.id)
