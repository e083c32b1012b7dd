"""Slots: how many jobs run at once, which wait here for a slot, and how many more to fetch.

Shared by the executor, which fills and frees slots, and by `capacity`, which says how much room there is. One group for
the common slots, one for each queue that has slots of its own. Decides numbers only; runs nothing.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from pgqueue.client.tasks import Task
from pgqueue.jobs.job import Job

# How much work waits here beyond what runs, so that a fetch is answered before the executor is idle.
PREFETCH_SECONDS = 0.05
PREFETCH_MOST = 2_000
# The longest chain behind a job with a lock.
BEHIND_MOST = 7

Entry = tuple[Job, Task[..., Any]]
"""A claimed job and its task."""


@dataclass(frozen=True, slots=True)
class Room:
    """What one service may fill of a group of slots, just now (see `capacity`)."""

    queues: Sequence[str]
    free: int
    """Jobs that it may bring."""
    fetching: int = 0
    """For the unblocker: jobs that a fetch under way has asked for."""
    left: int = 0
    """For the unblocker: how many of the free slots should be left to the next fetch."""
    behind: int = 0
    """For the unblocker: how many jobs may follow each job with a lock in its chain."""
    spare: int = 0
    """For the rate limiter: how many jobs more may wait here."""
    alone: bool = False
    """For the fetcher: ask only for poison jobs that must run alone; the answer is delivered even if it is empty."""


class SlotGroup:
    """Slots shared by some queues: what runs, what waits here, and how much more to fetch.

    Read and changed from the loop and from threads; `_lock` guards the few lines where that matters.
    """

    def __init__(self, queues: Iterable[str], slots: int, most: int = PREFETCH_MOST) -> None:
        self.queues = tuple(sorted(queues))
        self.slots = slots
        self.most = most
        """How many jobs wait here beyond those that run, at most."""
        self.running = 0
        self.waiting: deque[Entry] = deque()
        self.prefetch = 0
        self.behind = 0
        """How many jobs may follow each job with a lock in its chain."""
        self.reserved = 0
        """Slots that waiting jobs do not get, because a job is about to come that must start at once."""
        self.gathering = 0
        """How many jobs to fetch beyond what fits, for the batches that gather here."""
        self.beyond = 0
        """Jobs of batches that wait here beyond those in `waiting`; and one for each batch that gathers, its slot."""
        self._lock = threading.Lock()
        self._seconds, self._jobs = 0.0, 0
        self._seen: set[Job] = set()
        """The jobs that waited here at the last look of `surplus`."""

    def room(self) -> int:
        """How many jobs to fetch now; 0 while enough wait here. What gathers may grow while it would find a slot."""
        if not self.low():
            return 0
        return self.asked() + self.gathering if self.gathering and self.unclaimed() else self.asked()

    def asked(self) -> int:
        """How many jobs fit, whether it is time to fetch or not."""
        room = self.slots + self.prefetch - self.running - len(self.waiting)
        if self.beyond:  # what gathers waits for the next job, and takes no slot from it
            room = max(room - self.beyond, min(1, self.unclaimed()))
        return max(0, room)

    def low(self) -> bool:
        """Whether it is time to fetch."""
        return self.running < self.slots or len(self.waiting) + self.beyond <= self.prefetch // 2

    def free(self) -> int:
        """How many slots are free just now for what starts at once."""
        return max(self.unclaimed(), min(self.reserved, self.slots - self.running))

    def unclaimed(self) -> int:
        """How many slots are left when what waits here has had its slot."""
        return max(0, self.slots - self.running - len(self.waiting))

    def take(self, is_async: bool, seconds: float) -> Entry | None:
        """The next waiting job for a run of this kind, whose job has lasted `seconds`; None: the run must end."""
        with self._lock:
            if self.waiting and self.waiting[0][1].is_async is is_async and self.running <= self.slots - self.reserved:
                self._seconds += seconds
                self._jobs += 1
                return self.waiting.popleft()
            return None

    def add_ended(self, jobs: int) -> None:
        """So many jobs more have ended within the seconds of a run."""
        with self._lock:
            self._jobs += jobs

    def note(self, seconds: float) -> None:
        """The last job of a run has lasted so long."""
        with self._lock:
            self._seconds += seconds
            self._jobs += 1

    def end(self) -> None:
        """A run is over, its slot free. Called on the loop: see the end of the head of threads.py."""
        with self._lock:
            self.running -= 1

    def start(self) -> Entry | None:
        """The next waiting job for a new run, if a slot is free."""
        with self._lock:
            if self.running >= self.slots - self.reserved or not self.waiting:
                return None
            self.running += 1
            return self.waiting.popleft()

    def next(self) -> Task[..., Any] | None:
        """The task of the job that starts next, if one waits and its task is known. From any thread."""
        with self._lock:
            return self.waiting[0][1] if self.waiting else None

    def put(self, entries: Sequence[Entry], *, first: bool = False) -> None:
        """Put these jobs here to wait. `first`: before others, but behind jobs that must start in time as they must."""
        with self._lock:
            if not first:
                self.waiting.extend(entries)
                return
            before = list(takewhile(lambda entry: entry[0].start_by, self.waiting))
            for _ in before:
                self.waiting.popleft()
            self.waiting.extendleft(reversed([*before, *entries]))

    def empty(self) -> list[Entry]:
        """Take out all jobs that wait."""
        with self._lock:
            entries = list(self.waiting)
            self.waiting.clear()
            return entries

    def remove(self, job_id: int) -> Job | None:
        """Take out the job of this id if it waits here."""
        with self._lock:
            for index, (job, _) in enumerate(self.waiting):
                if job.id == job_id:
                    del self.waiting[index]
                    return job
            return None

    def surplus(self) -> list[Job]:
        """Look at the jobs that wait. If some are left of the last look, take out all but as many as have gone since.

        Those stay that start first, and those under a rate: they go back at a moment of their own. A job stays,
        too, that has begun in this attempt: a batch with it has failed, and elsewhere it would be in one once more.
        """
        with self._lock:
            left = sum(job in self._seen for job, _ in self.waiting)
            stay = len(self._seen) - left
            may_go = (job for job, _ in self.waiting if job.start_by is None and not hasattr(job, "began"))
            gone = list(may_go)[stay:] if left else []
            if gone:
                out = set(gone)
                self.waiting = deque(entry for entry in self.waiting if entry[0] not in out)
                self.prefetch, self.behind = min(self.prefetch, stay), min(self.behind, stay)
                self._seconds, self._jobs, self.gathering = 0.0, 0, 0
            self._seen = {job for job, _ in self.waiting}
            return gone

    def adapt(self, least: int = 0) -> None:
        """Set `prefetch` from how long jobs have lasted since the last fetch: 50 ms of work, none for long jobs.

        Also set `behind`, the length of chains: as much work, of one slot. If fewer than `least` jobs have ended since,
        they say too little, and are counted with the next ones.
        """
        with self._lock:
            if self._jobs < least:
                return
            seconds, jobs = self._seconds, self._jobs
            self._seconds, self._jobs = 0.0, 0
        if not jobs:
            return
        mean = seconds / jobs
        wanted = 0.0 if mean >= PREFETCH_SECONDS else PREFETCH_SECONDS / max(mean, 1e-6)
        # Twice the number of jobs just worked off, at most: a few quick jobs say little about the next thousand.
        self.prefetch = min(int(self.slots * wanted), 2 * jobs, self.most)
        self.behind = min(int(wanted), 2 * jobs, BEHIND_MOST)


def slot_groups(queues: Mapping[str, int | None], concurrency: int, most: int = PREFETCH_MOST) -> list[SlotGroup]:
    """The common slots, and a group for each queue that has slots of its own; `most` of each is that of `SlotGroup`."""
    common = [name for name, slots in queues.items() if slots is None]
    own = [SlotGroup([name], slots, most) for name, slots in queues.items() if slots is not None]
    return [*([SlotGroup(common, concurrency, most)] if common else []), *own]
