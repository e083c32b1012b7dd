"""What runs here one after the other: behind a job that holds a lock, those of its line that came in with it.

An admit of one job costs a round trip, a lock, a plan, a count of the holders; moving the row is a fifth of it. Where
the jobs of a key are short, an admit therefore lets in several of its line at once (`unblock_next`): the first one as
the holder, the others *behind* it, in `job_running` as well, and in the hands of the same worker. They are its chain.

Why never two of them run at once. A chain is in one process, and `next` gives out one for each end of the one before,
after that has been committed. Every admit counts every row of the key in `job_running`, those behind, too: as long as
one of a chain is left no other job comes in. Only jobs with the limit 1 are chained.

Why the end of the one before must have freed the key. One that is given back, or keeps its key until its next
attempt, still holds it, elsewhere; one that was taken from us, because we seemed dead, is in other hands. Then the
chain is `cut`: what is left of it goes back to its line, before all others, and no job comes in before that holder
has ended.

Why nothing is lost with the process. Those behind do not `hold` the key; in their rows it is what they wait for.
Rescue, and whatever else moves them, puts them back into the line by that. Of a chain only the first that is left can
have started: the ends of all before it are committed.

Why no job waits long for it. Only short jobs have others behind them, 50 ms of work. What has not started a second
after it came in goes back to its line, behind whatever is more urgent there by then.

Decides only; called on the loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from pgqueue.jobs.job import Job

LONGEST_SECONDS = 1.0
"""So long after they came in those behind others that have not started yet go back to their lines."""

Chain = deque[Job]


class Chains:
    """Which job comes after which in this worker."""

    def __init__(self) -> None:
        self._behind: dict[Job, Chain] = {}
        """Behind each of those that run, or wait for a slot, those that come after it."""

    def __bool__(self) -> bool:
        return bool(self._behind)

    def add(self, jobs: Iterable[Job]) -> list[Chain]:
        """Of these, those that are chained come after the one of their lock that is not, in this order. Without that
        one (what we let in was taken from us before we had read it all) they are not ours, either."""
        firsts: dict[str | None, Job] = {}
        made: dict[Job, Chain] = {}
        for job in jobs:
            if not job.chained:
                firsts[job.lock_key] = job
            elif (first := firsts.get(job.lock_key)) is not None:
                made.setdefault(first, deque()).append(job)
        self._behind |= made
        return list(made.values())

    def all(self) -> list[Job]:
        """All that come after others."""
        return [job for chain in self._behind.values() for job in chain]

    def next(self, ended: Job) -> Job | None:
        """This one has ended, and with it its hold on the key: the job that runs now, if one comes after it."""
        chain = self._behind.pop(ended, None)
        if not chain:
            return None
        job = chain.popleft()
        if chain:
            self._behind[job] = chain
        return job

    def cut(self, job: Job) -> list[Job]:
        """Take out all that come after this one."""
        return list(self._behind.pop(job, ()))

    def shorten(self, chains: Iterable[Chain]) -> list[Job]:
        """Take out what is left of these."""
        left = [job for chain in chains for job in chain]
        for chain in chains:
            chain.clear()
        return left

    def remove(self, job_id: int) -> Job | None:
        """Take out the job of this id if it is behind another one."""
        for chain in self._behind.values():
            for job in chain:
                if job.id == job_id:
                    chain.remove(job)
                    return job
        return None

    def empty(self) -> list[Job]:
        """Take out everything."""
        jobs = self.shorten(self._behind.values())
        self._behind.clear()
        return jobs
