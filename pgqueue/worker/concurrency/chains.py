"""Which jobs run here one after another: a job that holds a lock, and the next waiters of that lock, which came with
it.

To unblock one job costs a round trip, a lock, a plan and a count of the holders. Where the jobs of a key are short, an
unblocking therefore takes several waiters at once (`unblock_next`). The first one is the holder. The others are
*behind* it: they, too, are rows of `job_running` and belong to this worker. They are the chain of the first one. The
figures are in docs/design/concurrency.md.

Why no two jobs of a chain run at once, nor any other job of the key beside them:

1. A chain is in one process. `next` gives out one job for each end of the job before, after that end was committed.
   That commit is durable (`goes_on`), so a crash of the server does not bring the job before back.
2. Every unblocking counts every row of the key in `job_running`, also those behind. So no other job of the key starts
   as long as one job of the chain is left.
3. Only jobs with the limit 1 are chained.

Why the job before must have freed the key. A job that was given back, or keeps its key until its next attempt, holds
the key elsewhere. A job that was taken from us, because we seemed dead, belongs to another worker. In each of these
cases the chain is `cut`: what is left of it goes back to the waiters, before all others. No job of the key starts
before that holder has ended.

Why no job is lost if the process dies:

1. The jobs behind do not `hold` the key. Their rows have it in `key`, as what they wait for.
2. By `key`, rescue and every other move put them back among the waiters.
3. Of a chain only the first job that is left can have started: the ends of all before it are committed.

Why no job waits long for a chain. Only short jobs have others behind them, 50 ms of work. A job of a chain that has not
started a second after it came goes back to the waiters, behind more urgent ones.

Decides only. Called on the loop; `cut` by the heartbeat's thread, too, while the loop is blocked. It may go on in just
that moment, so what reads more than one entry takes a lock.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable

from pgqueue.jobs.job import Job

LONGEST_SECONDS = 1.0
"""How long after they came the jobs of a chain that have not started go back to the waiters."""

Chain = deque[Job]


class Chains:
    """Which job comes after which in this worker."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._behind: dict[Job, Chain] = {}
        """By the job that runs, or waits for a slot: the jobs that come after it."""

    def __bool__(self) -> bool:
        return bool(self._behind)

    def add(self, jobs: Iterable[Job]) -> list[Chain]:
        """Chain those of these jobs that are marked as chained behind the job of their lock that is not, in this order.

        If that job is not among them, its row was taken from us before we had read all. Then the chained jobs are not
        ours, either.
        """
        firsts: dict[str | None, Job] = {}
        made: dict[Job, Chain] = {}
        for job in jobs:
            if not job.chained:
                firsts[job.lock_key] = job
            elif (first := firsts.get(job.lock_key)) is not None:
                made.setdefault(first, deque()).append(job)
        with self._lock:
            self._behind |= made
        return list(made.values())

    def all(self) -> list[Job]:
        """All jobs that come after others."""
        with self._lock:
            return [job for chain in self._behind.values() for job in chain]

    def goes_on(self, job: Job) -> bool:
        """Whether a job comes after this one."""
        return bool(self._behind.get(job))

    def next(self, ended: Job) -> Job | None:
        """This job has ended and freed its key: the job that runs now, if one comes after it."""
        with self._lock:
            chain = self._behind.pop(ended, None)
            if not chain:
                return None
            job = chain.popleft()
            if chain:
                self._behind[job] = chain
            return job

    def cut(self, job: Job) -> list[Job]:
        """Take out all jobs that come after this one. From any thread."""
        with self._lock:
            return list(self._behind.pop(job, ()))

    def shorten(self, chains: Iterable[Chain]) -> list[Job]:
        """Take out all jobs that are left of these chains."""
        with self._lock:
            left = [job for chain in chains for job in chain]
            for chain in chains:
                chain.clear()
            return left

    def remove(self, job_id: int) -> Job | None:
        """Take out the job of this id if it is behind another one."""
        with self._lock:
            for chain in self._behind.values():
                for job in chain:
                    if job.id == job_id:
                        chain.remove(job)
                        return job
        return None

    def empty(self) -> list[Job]:
        """Take out all jobs."""
        with self._lock:
            jobs = self.shorten(self._behind.values())
            self._behind.clear()
            return jobs
