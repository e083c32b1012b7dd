"""The services that `capacity` and `held_jobs` ask and tell. `services` makes all of them, these two among others.

They call each other in a circle: the fetcher delivers jobs to `held_jobs`, which wakes the fetcher. So the two get the
object that will have the services, and look a service up when they call it. This is all that they know of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from pgqueue.jobs.job import Job
from pgqueue.jobs.outcomes import Outcome
from pgqueue.worker.complete.completer import Completer
from pgqueue.worker.concurrency.rate_limiter import RateLimiter
from pgqueue.worker.concurrency.sweep import Sweep
from pgqueue.worker.concurrency.unblocker import Unblocker
from pgqueue.worker.fetch.fetcher import Fetcher
from pgqueue.worker.fetch.poison_jobs import PoisonJobs
from pgqueue.worker.flows.releaser import Releaser
from pgqueue.worker.liveness.heartbeat import Heartbeat
from pgqueue.worker.run.executor import Executor
from pgqueue.worker.run.job_batches import JobBatches
from pgqueue.worker.run.progress import Progress
from pgqueue.worker.run.running_jobs import RunningJobs
from pgqueue.worker.state import WorkerState


class Neighbours(Protocol):
    """What `Services` has for `Capacity` and `HeldJobs`."""

    state: WorkerState
    running: RunningJobs
    heartbeat: Heartbeat
    fetcher: Fetcher
    poison_jobs: PoisonJobs
    unblocker: Unblocker
    rate_limiter: RateLimiter
    sweep: Sweep
    releaser: Releaser
    executor: Executor
    batches: JobBatches
    progress: Progress
    completer: Completer
    finish: Callable[[Job, Outcome], None]
    """Give a job with its outcome to the completer, and tell the hooks."""
    quiet: Callable[[], None]
    """Take no more jobs."""
