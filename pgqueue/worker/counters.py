"""Counts what happens to the jobs of this worker, in memory, and appends it to the history: one row a minute.

The completer says which jobs have just ended, once for each flush, after the database has said that they are ended. So
an outcome that was fenced is not counted. A job is counted as started when it ends, or at the end of a minute in which
it still runs. Everything here is called on the loop.

The flow pays for one call a flush and less than an addition a job: figures in docs/design/worker.md. Nothing is sent
with a flush. A minute in which nothing happened is not written. To write is housekeeping of each worker.

Numbers of jobs are exact. Times are, too, but of a flush with more than 64 completed jobs of a task each eighth stands
for eight.

Why each part counts once, and for the right minute:

1. A part is closed by the worker's own steady clock, at the end of a minute of the database, and is not changed
   afterwards. What comes then goes into the next part.
2. It has a number that is higher than those of all parts of this writer before it. A writer is one object of this class
   and never another: its name is random.
3. It is appended by a statement that raises the writer's number from below the part's to the part's, and appends only
   then. Both are one transaction. If the answer is lost, the part is sent again with the same number: if it was
   committed, the number is there, and nothing is appended. A writer that was silent for a day is forgotten, and its
   number with it. So a part that was sent before that, and is sent again after it, counts twice.
4. Parts are sent one at a time, in order. So no part is left out by the number of a later one.
5. The part says how many seconds ago the middle of its time was, by the steady clock. The database takes these from its
   own time. A wrong clock of this machine has no effect. If the database's clock steps, counts are written for another
   minute, and still once.

What is lost: if the process is killed, the part that is open, and parts that were not written yet. While parts cannot
be written, all but the last 60 of them; and parts that the server refuses for what they hold.
"""

from __future__ import annotations

import json
import logging
import random
import time
import uuid
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf
from time import perf_counter
from typing import Any

import psycopg

from pgqueue.database.backoff import described, persist, transient
from pgqueue.database.sessions import Session
from pgqueue.database.statements import Row, Statement
from pgqueue.jobs.histogram import BOUNDS
from pgqueue.jobs.job import Job, dues_of
from pgqueue.jobs.outcomes import (
    COMPLETED,
    LATE,
    Cancelled,
    Completed,
    Failed,
    Outcome,
    Problem,
    Released,
    Retried,
    fingerprint_of,
    written_in,
)
from pgqueue.jobs.totals import OTHERS, TASKS_MOST, Counts, Totals
from pgqueue.worker.run.running_jobs import RunningJobs
from pgqueue.worker.state import WorkerState

log = logging.getLogger("pgqueue")

MINUTE = 60.0
SPREAD_SECONDS = 5.0
"""A part is written up to this long after its minute, so that not all workers write at once."""
GROUPS_MOST, IDS_MOST, MESSAGE_MOST = 100, 5, 500
"""Groups of failures in a part, the jobs named in each, and the characters of its last message."""
MEASURED_ALL, EIGHTH = 64, 8
"""Up to so many jobs of a task in one flush are all measured, else each eighth."""
PARTS_MOST = 60
"""Closed parts that wait for the database. Without it no job ends, so there are hardly ever two."""
SINCE_1970 = 946_684_800.0
"""2000-01-01, from where the database counts."""


@dataclass(slots=True)
class Failures:
    """Failed attempts of one fingerprint in one part. `first` and `last` are times by `perf_counter`."""

    queue: str
    task: str
    problem: Problem
    first: float
    last: float
    count: int = 0
    ids: deque[int] = field(default_factory=lambda: deque(maxlen=IDS_MOST))

    def as_json(self, fingerprint: str, now: float, version_tag: str) -> dict[str, Any]:
        """The object in `history_part.errors`."""
        problem = self.problem
        return {
            "fingerprint": fingerprint,
            "queue": self.queue,
            "task": self.task,
            "error_type": problem.error_type or problem.outcome,
            "place": problem.place,
            "message": (problem.message or "")[:MESSAGE_MOST],
            "version_tag": version_tag,
            "count": self.count,
            "ids": sorted(self.ids, reverse=True),
            "first": now - self.first,
            "last": now - self.last,
        }


@dataclass(slots=True)
class Part:
    """What has happened from `begin` to `end`, by `perf_counter`."""

    number: int
    begin: float
    end: float = 0.0
    counts: dict[tuple[str, str], Counts] = field(default_factory=dict)
    failures: dict[str, Failures] = field(default_factory=dict)


class Counters:
    """Counts the ended jobs of one worker and writes the counts over the given session. `clock` is a session that is
    open anyway: it is asked for the database's time once, before the first minute."""

    def __init__(self, session: Session, clock: Session, state: WorkerState, running: RunningJobs) -> None:
        self._session = session
        self._clock = clock
        self._state = state
        self._running = running
        self._writer = str(uuid.uuid4())
        self._part = Part(1, perf_counter())
        self._closed: deque[Part] = deque(maxlen=PARTS_MOST)
        self._before = Totals()
        """What the parts before the open one have counted, since this worker began."""
        self._early: set[Job] = set()
        """Jobs that run or are not written yet, and have been counted as started."""
        self._offset = time.time() - perf_counter()
        """The database's time, in seconds since 1970, less `perf_counter`; at first this machine's."""
        self._known = False
        """Whether the database has said its time."""

    # Counting --------------------------------------------------------------------------------------------------------

    def ended(self, batch: Sequence[tuple[Job, Outcome]]) -> None:
        """Count these jobs, which have just been ended in the database."""
        early = self._early.intersection([job for job, _ in batch]) if self._early else ()
        plain = [each for each in batch if each[1] is COMPLETED]
        if early:
            plain = [each for each in plain if each[0] not in early]
        if plain:
            self._count_plain(plain)
        if len(plain) < len(batch):
            for job, outcome in batch:
                if outcome is not COMPLETED or job in early:
                    self._count(job, written_in(job, outcome))

    def handed_on(self, before: Job, after: Job) -> None:
        """The second goes on for the first: it has been counted as started if the first one was."""
        if before in self._early:
            self._early.discard(before)
            self._early.add(after)

    def _count_plain(self, plain: Sequence[tuple[Job, Outcome]]) -> None:
        """Count jobs that completed without a result: most jobs, therefore without a call for each.

        Of more than `MEASURED_ALL` jobs of a task each eighth is measured, and stands for eight. Jobs of one flush are
        much alike, and to read the times of each would cost as much again as all else here. All jobs are counted.
        """
        for (queue, task), entries in _by_name(plain):
            each = EIGHTH if len(entries) > MEASURED_ALL else 1
            self._measure(self._counts(queue, task), entries[::each], each, len(entries))

    def _measure(self, counts: Counts, measured: Sequence[tuple[Job, Outcome]], each: int, number: int) -> None:
        """Count `number` jobs. The times of these stand for those of `each` so many, the last ones for the rest.

        A time is first compared with the bucket of the one before, which takes half as long as to look the bucket up.
        """
        offset = self._offset - SINCE_1970
        run_place, run_low, run_high = wait_place, wait_low, wait_high = bucket(0.0)
        run, wait, ran_seconds, wait_seconds = counts.run, counts.wait, 0.0, 0.0
        ran = waited = 0.0
        for (job, _), due in zip(measured, dues_of(measured), strict=True):
            ran = job.ran
            if not run_low < ran <= run_high:
                run_place, run_low, run_high = bucket(ran)
            waited = job.began + offset - due * 1e-6
            if not wait_low < waited <= wait_high:
                wait_place, wait_low, wait_high = bucket(waited)
            run[run_place] += each
            wait[wait_place] += each
            ran_seconds += ran
            wait_seconds += waited
        over = each * len(measured) - number
        run[run_place] -= over
        wait[wait_place] -= over
        counts.add(number, each * ran_seconds - over * ran, each * wait_seconds - over * waited)

    def _counts(self, queue: str, task: str) -> Counts:
        """The counts of this queue and task, or those of the rest."""
        every = self._part.counts
        found = every.get((queue, task))
        if found is None:
            if len(every) >= TASKS_MOST:
                task = OTHERS
            found = every.setdefault((queue, task), Counts())
        return found

    def _count(self, job: Job, outcome: Outcome) -> None:
        if isinstance(outcome, Released) and outcome.problem is None and job not in self._early:
            return  # given back before it started
        counts = self._counts(job.queue, job.task)
        what = _name(outcome)
        counts.happened[what] = counts.happened.get(what, 0) + 1
        if isinstance(outcome, Retried | Failed):
            self._fail(job, outcome.problem)
        began = getattr(job, "began", None)
        if began is None:  # it never started
            return
        # A job that was taken away from its handler has no end of its run.
        ran = getattr(job, "ran", None) or perf_counter() - began
        counts.run[bucket(ran)[0]] += 1
        counts.run_seconds += ran
        if job in self._early:
            self._early.discard(job)
        else:
            self._count_wait(counts, job)

    def _count_wait(self, counts: Counts, job: Job) -> None:
        [due] = dues_of([(job, None)])
        waited = max(0.0, job.began + self._offset - SINCE_1970 - due * 1e-6)
        counts.wait[bucket(waited)[0]] += 1
        counts.wait_seconds += waited

    def _fail(self, job: Job, problem: Problem) -> None:
        fingerprint = fingerprint_of(job, problem)
        if fingerprint is None:
            return
        groups, now = self._part.failures, perf_counter()
        group = groups.get(fingerprint)
        if group is None:
            if len(groups) >= GROUPS_MOST:
                return
            group = groups[fingerprint] = Failures(job.queue, job.task, problem, now, now)
        group.problem, group.last = problem, now
        group.count += 1
        if job.id in group.ids:  # it has failed before in this minute
            group.ids.remove(job.id)
        group.ids.append(job.id)

    def _count_running(self) -> None:
        """Count the jobs as started that run now, for they may run for long."""
        self._early.intersection_update(self._state.held.values())
        for job in self._running.jobs():
            if hasattr(job, "began") and job not in self._early and self._state.holds(job):
                self._early.add(job)
                self._count_wait(self._counts(job.queue, job.task), job)

    def totals(self) -> Totals:
        """What was counted since this worker began. Nothing is counted a second time for it."""
        made = Totals()
        made.include_tasks(self._before.tasks)
        made.include_tasks(self._part.counts)
        return made

    # Writing ---------------------------------------------------------------------------------------------------------

    async def round(self) -> float:
        """At the end of a minute, end its part; a moment later, write it. Answers the seconds until the next one."""
        if not self._known:
            clock = self._clock.link.statement("counters_clock")
            await self._clock.run(Statement(clock.sql, clock.params, self._heard_time))
        elif self._closed:
            await self._write()
        else:
            self._close()
            if self._closed:
                return random.uniform(0.0, SPREAD_SECONDS)
        return self._left_of_minute()

    def _left_of_minute(self) -> float:
        """Seconds until the database's minute ends, as far as is known here."""
        return MINUTE - (perf_counter() + self._offset) % MINUTE

    def _heard_time(self, rows: list[Row]) -> None:
        """The answer has just come: it is younger than a round trip."""
        self._offset = rows[0][0] - perf_counter()
        self._known = True

    def _close(self, stopped: Sequence[tuple[Job, Outcome]] = ()) -> None:
        """End the part, and begin the next one. Nothing is kept of a part in which nothing has happened."""
        self._count_running()
        self.ended(stopped)
        part, now = self._part, perf_counter()
        if part.counts:
            part.end = now
            self._before.include_tasks(part.counts)
            self._closed.append(part)
            self._part = Part(part.number + 1, now)
        else:
            part.begin = now

    async def write_rest(self, stopped: Sequence[tuple[Job, Outcome]] = ()) -> None:
        """Write all that has been counted, and that these jobs were stopped. The worker is about to leave.

        While the database is away, this tries again until it is cancelled.
        """
        self._close(stopped)
        await persist(self._write, name="history", until=lambda: not self._closed)

    async def _write(self) -> None:
        """Append the closed parts, the oldest first."""
        while self._closed:
            part = self._closed[0]
            try:
                await self._session.run(self._appended(part))
            except Exception as error:
                if transient(error) or isinstance(error, psycopg.errors.InsufficientPrivilege):
                    raise
                said = "a minute of the history is left out: %s"
                log.error(said, described(error), exc_info=not isinstance(error, psycopg.Error))
            if self._closed and self._closed[0] is part:
                self._closed.popleft()

    def _appended(self, part: Part) -> Statement[None]:
        now, version_tag = perf_counter(), self._state.settings.version_tag
        append = self._session.link.statement(
            "counters_append",
            writer=self._writer,
            part=part.number,
            ago=now - (part.begin + part.end) / 2,
            counts=json.dumps([counts.as_json(*names) for names, counts in part.counts.items()]),
            errors=json.dumps([each.as_json(name, now, version_tag) for name, each in part.failures.items()]),
        )
        return Statement(append.sql, append.params, self._heard_time)


def _by_name(plain: Sequence[tuple[Job, Outcome]]) -> Iterable[tuple[tuple[str, str], Sequence[tuple[Job, Outcome]]]]:
    """The jobs by queue and task. Nearly all flushes are of one task, which is found out without a step for each."""
    first, number = plain[0][0], len(plain)
    tasks, queues = [job.task for job, _ in plain], [job.queue for job, _ in plain]
    if tasks.count(first.task) == number == queues.count(first.queue):
        return [((first.queue, first.task), plain)]
    found: dict[tuple[str, str], list[tuple[Job, Outcome]]] = defaultdict(list)
    for entry, names in zip(plain, zip(queues, tasks, strict=True), strict=True):
        found[names].append(entry)
    return found.items()


def bucket(seconds: float) -> tuple[int, float, float]:
    """The place of this time in a histogram, and the bounds there: above the first, up to the second.

    >>> bucket(0.004), bucket(0.005)
    ((4, 0.003, 0.005), (4, 0.003, 0.005))
    """
    place = bisect_left(BOUNDS, seconds)
    return place, BOUNDS[place - 1] if place else -inf, BOUNDS[place] if place < len(BOUNDS) else inf


def _name(outcome: Outcome) -> str:
    """Under which name this outcome is counted."""
    match outcome:
        case Completed():
            return "completed"
        case Retried(snoozed=True):
            return "snoozed"
        case Retried():
            return "retried"
        case Failed():
            return "failed"
        case Cancelled():
            return "expired" if outcome is LATE else "cancelled"
        case _:
            return "interrupted"
