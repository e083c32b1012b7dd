"""What the services of one worker share: the settings, the tasks, the id, the claims, and the jobs that are held.

Made first, and handed to each service. Starts nothing and sends nothing. Changed on the event loop, and read from any
thread; `other_workers` is written by the heartbeat's thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

from pgqueue.client.tasks import Task
from pgqueue.database.sessions import Link
from pgqueue.jobs.job import Job
from pgqueue.worker.claims import Claims
from pgqueue.worker.pace import Pace
from pgqueue.worker.settings import SHARED_BATCH_MOST, Settings

Phase = Literal["starting", "running", "quiet", "stopped"]


class WorkerState:
    """One worker: its settings, its tasks by every name a job may have for them, and what changes while it lives."""

    link: Link
    """Where the database is. Set before the first service is made: an embedded server may have to start for it."""
    doubt: asyncio.Event
    """Set if a claim failed and may have been committed, or a session was lost: the reconciler compares. Made with the
    services, on their event loop: a worker may be started again on another loop."""

    def __init__(self, settings: Settings, tasks: Mapping[str, Task[..., Any]]) -> None:
        self.settings = settings
        self.tasks = tasks
        self.id = 0
        """This worker's id in the database. A worker that was taken for dead gets another one."""
        self.phase: Phase = "starting"
        self.renewing = False
        """Whether no jobs are taken until this worker has registered anew, because the numbers of its claims end."""
        self.claims = Claims()
        self.pace = Pace(lambda: self.settings)
        self.doubts = 0
        """How often it was in doubt. The event alone does not tell: the service that waits for it clears it."""
        self.held: dict[int, Job] = {}
        """By id, the jobs that this worker has claimed and whose end is not written. The truth is in the database: the
        reconciler hands back what is not here."""
        self.pace.busy = lambda: bool(self.held)
        self.ended_jobs = 0
        """How many jobs have run here and are written: a job that goes back before it began does not count."""
        self.duties: Callable[[], str | None] = lambda: None
        """What has become of this worker's duties, as the heartbeat tells it: `Duties.said`."""
        self.other_workers = 0
        """How many other workers are alive, as the last heartbeat saw."""

    def share_loop(self) -> None:
        """Other workers live on this worker's loop: what it does in one step is less. Before the services are made."""
        self.settings = replace(self.settings, batch_most=SHARED_BATCH_MOST)

    @property
    def live_workers(self) -> int:
        """How many workers are alive, this one among them."""
        return 1 + self.other_workers

    def in_doubt(self) -> None:
        """A claim failed, and whether it was committed is unknown. Or a session was lost, and the server may have been
        restarted."""
        self.doubts += 1
        self.doubt.set()

    def holds(self, job: Job) -> bool:
        """Whether this very claim of the job is held."""
        return self.held.get(job.id) is job

    def knows(self, job_id: int, claim: int) -> bool:
        """Whether the job is held under this claim."""
        job = self.held.get(job_id)
        return job is not None and job.claim == claim
