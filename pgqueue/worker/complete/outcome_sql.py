"""Turns outcomes into the statements that end jobs. Pure functions, no connection.

Used in three places:
- The completer ends many jobs at once on its own connection.
- A transactional handler ends its job inside its own transaction.
- `pgqueue.testing` runs jobs without a worker.

Every statement ends jobs by their fence (id, worker, claim) and answers which of them it ended. A job that no longer
belongs to this run is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

from pgqueue.client.enqueue import following
from pgqueue.client.job_parameters import arrays
from pgqueue.client.unique_enqueue import impatient
from pgqueue.database.statements import Row, Statement, integers, text
from pgqueue.jobs.job import Job, NewJob, keyed_of, traceparents
from pgqueue.jobs.keys import Keys
from pgqueue.jobs.outcomes import (
    COMPLETED,
    WRITTEN,
    Cancelled,
    Completed,
    Failed,
    Handed,
    Outcome,
    Released,
    Retried,
    fingerprint_of,
    written_in,
)

Ended = tuple[Job, Outcome]
OutcomeStatement = Statement[list[int] | None]
"""A statement that answers None if all its jobs were ended, else the ids of those that were."""

LOST = "PGQ01"
"""The SQLSTATE of a completion that found no row of this run (`refuse_lost` in sql/migrations/0001_schema.sql)."""

ENDED = "PGQ03"
"""The SQLSTATE of a completion in a transaction that the worker has not begun (`refuse_ended`)."""

# From this many plain jobs on, rows are not locked before the DELETE: that statement costs more, but less for each job.
UNLOCKED_LEAST = 20


@dataclass(frozen=True, slots=True)
class OutcomeSql:
    """Makes the statements of one worker: for its schema, with its version tag, with NOTIFY or without."""

    schema: str
    version_tag: str
    notify: bool
    array: Callable[[Sequence[int]], object] = integers
    """How arrays of integers are sent: as one literal on our own connections, as a list on an application's."""
    holding: frozenset[str] = frozenset()
    """Names of the tasks whose jobs keep their keys while they wait for another attempt."""

    def many(
        self, batch: Sequence[Ended], worker_id: int, *, careful: bool = True
    ) -> list[tuple[OutcomeStatement, list[Job]]]:
        """The statements that end these jobs, each with its jobs. There is none for jobs that are written already.

        If not `careful`, a statement may fail with LockNotAvailable when a row is locked.
        """
        plain: list[Job] = []
        results: list[tuple[Job, Completed]] = []
        successors: list[tuple[Job, Completed]] = []
        retried: list[tuple[Job, Retried]] = []
        failed: list[tuple[Job, Failed | Cancelled]] = []
        released: list[Job] = []
        interrupted: list[tuple[Job, Released]] = []
        for job, outcome in batch:
            if outcome is COMPLETED:
                if job.chained:
                    results.append((job, outcome))
                else:
                    plain.append(job)
                continue
            if isinstance(outcome, Handed):
                outcome = outcome.otherwise
            match outcome:
                case Completed():
                    (successors if outcome.successors else results).append((job, outcome))
                case Retried():
                    retried.append((job, outcome))
                case Failed() | Cancelled():
                    failed.append((job, outcome))
                case Released(None):
                    released.append(job)
                case Released():
                    interrupted.append((job, outcome))
        made: list[tuple[OutcomeStatement, list[Job]]] = []
        if plain:
            name = "complete_plain" if careful or len(plain) < UNLOCKED_LEAST else "complete_plain_unlocked"
            made.append((self._ends(name, plain, worker_id), plain))
        if results:
            jobs = [job for job, _ in results]
            texts = [done.result for _, done in results]
            made.append((self._ends_each("complete_result", jobs, worker_id, results=texts), jobs))
        if successors:
            made.append((self._with_successors(successors, worker_id), [job for job, _ in successors]))
        if retried:
            made.append((self._retry(retried, worker_id), [job for job, _ in retried]))
        if failed:
            made.append((self._fail(failed, worker_id), [job for job, _ in failed]))
        if released:
            made.append((self._ends("complete_release", released, worker_id), released))
        if interrupted:
            made.append((self._interrupt(interrupted, worker_id), [job for job, _ in interrupted]))
        return made

    def keeps(self, job: Job, outcome: Outcome) -> bool:
        """Whether a job with this outcome keeps its keys, or may keep them, while it waits for its next run."""
        outcome = written_in(job, outcome)
        if isinstance(outcome, Handed):
            outcome = outcome.otherwise
        return isinstance(outcome, Released) or (isinstance(outcome, Retried) and job.task in self.holding)

    def one(self, job: Job, outcome: Outcome, worker_id: int) -> OutcomeStatement:
        """The statement that ends this job with this outcome."""
        assert outcome is not WRITTEN
        [(ending, _)] = self.many([(job, outcome)], worker_id)
        return ending

    def within(self, job: Job, done: Completed, worker_id: int, *, mark: int | None = None) -> list[Statement[Any]]:
        """The statements that complete one job inside its handler's transaction. Their answers mean nothing.

        If the job no longer belongs to this run, the first one makes that transaction fail. So it does if that has not
        the `mark` that the worker gave it.
        """
        params = {
            "id": job.id,
            "claim": job.claim,
            "worker_id": worker_id,
            "version_tag": self.version_tag,
            "notify": self.notify,
            "mark": mark,
            "result": done.result,
            "ago": None if (ago := _ago(job)) is None else int(1e6 * ago),
        }
        sent: list[Statement[Any]] = [Statement(text("complete_within", self.schema), params, list)]
        if job.lock_key is not None:  # another job of its lock may start when this is committed
            sent.append(self.durably())
        if done.successors:
            sent += following(done.successors, schema=self.schema, notify=self.notify)
        return sent

    def batch(self, ends: Iterable[Ended], worker_id: int) -> tuple[list[OutcomeStatement], list[Statement[Any]]]:
        """The statements that end these jobs inside their handler's transaction, where their rows are locked; and those
        that enqueue their successors."""
        plain: list[Ended] = []
        successors: list[NewJob[Any]] = []
        for job, outcome in ends:
            if isinstance(outcome, Completed) and outcome.successors:
                successors += outcome.successors
                outcome = COMPLETED if outcome.result is None else replace(outcome, successors=())
            plain.append((job, outcome))
        after = following(successors, schema=self.schema, notify=self.notify)
        return [ending for ending, _ in self.many(plain, worker_id)], after

    def durably(self) -> Statement[Any]:
        """What makes the transaction it is in durable, whatever the settings say."""
        return Statement(text("complete_durably", self.schema), {}, list)

    def alone(self, job: Job, done: Completed, worker_id: int) -> list[Statement[Any]]:
        """The statements that complete one job whose successors want keys, in a transaction of its own.

        As `within`, but they wait at most 5 ms for a transaction that is just taking one of the keys.
        """
        release = self.release([(job, done)])
        return [impatient(self.schema), *self.within(job, done, worker_id), *([] if release is None else [release])]

    def release(self, batch: Iterable[Ended]) -> Statement[None] | None:
        """The statement that releases the unique keys of the completed jobs; None if none of them has a key."""
        keyed = keyed_of(batch)
        if not keyed:
            return None
        named = [(name, job.id) for job in keyed for name in Keys(job.unique_key, job.idempotency_key).names()]
        params = {"keys": [name for name, _ in named], "ids": self.array([id for _, id in named])}
        return Statement(text("complete_release_keys", self.schema), params, lambda rows: None)

    def about(self, name: str, jobs: Sequence[Job], worker_id: int, **params: object) -> Statement[list[Row]]:
        """A statement about jobs of this worker, by their fence. It answers rows."""
        ids = {"worker_ids": self.array([worker_id])}
        return Statement(text(name, self.schema), self._fence(jobs, worker_id) | ids | params, list)

    def _with_successors(self, ends: Sequence[tuple[Job, Completed]], worker_id: int) -> OutcomeStatement:
        return self._ends_each(
            "complete_successors",
            [job for job, _ in ends],
            worker_id,
            results=[done.result for _, done in ends],
            **_columns([(job, new) for job, done in ends for new in done.successors]),
        )

    def _retry(self, retried: Sequence[tuple[Job, Retried]], worker_id: int) -> OutcomeStatement:
        return self._ends_each(
            "complete_retry",
            [job for job, _ in retried],
            worker_id,
            delays=[again.delay for _, again in retried],
            spents=[again.spent for _, again in retried],
            snoozeds=[again.snoozed for _, again in retried],
            holdings=[job.task in self.holding for job, _ in retried],
            traces=traceparents(job for job, _ in retried),
            **_problems(retried),
        )

    def _fail(self, failed: Sequence[tuple[Job, Failed | Cancelled]], worker_id: int) -> OutcomeStatement:
        return self._ends_each(
            "complete_fail",
            [job for job, _ in failed],
            worker_id,
            states=["cancelled" if isinstance(end, Cancelled) else "failed" for _, end in failed],
            reasons=[end.reason for _, end in failed],
            **_problems(failed),
        )

    def _interrupt(self, interrupted: Sequence[tuple[Job, Released]], worker_id: int) -> OutcomeStatement:
        problems = [end.problem for _, end in interrupted if end.problem is not None]
        return self._ends_each(
            "complete_interrupt",
            [job for job, _ in interrupted],
            worker_id,
            outcomes=[problem.outcome for problem in problems],
            messages=[problem.message for problem in problems],
        )

    def _ends_each(self, name: str, jobs: Sequence[Job], worker_id: int, **params: object) -> OutcomeStatement:
        """As `_ends`, for a statement that also notes when each job began."""
        agos = [_ago(job) for job in jobs] if any(job.chained for job in jobs) else []
        return self._ends(name, jobs, worker_id, agos=agos, **params)

    def _ends(self, name: str, jobs: Sequence[Job], worker_id: int, **params: object) -> OutcomeStatement:
        return Statement(text(name, self.schema), self._fence(jobs, worker_id) | params, _ended)

    def _fence(self, jobs: Sequence[Job], worker_id: int) -> dict[str, object]:
        return {
            "ids": self.array([job.id for job in jobs]),
            "claims": self.array([job.claim for job in jobs]),
            "worker_id": worker_id,
            "version_tag": self.version_tag,
            "notify": self.notify,
        }


def _ago(job: Job) -> float | None:
    """How many seconds ago a chained job began: its row does not say so. None for other jobs, and before it began."""
    began = getattr(job, "began", None) if job.chained else None
    return None if began is None else perf_counter() - began


def _ended(rows: list[Row]) -> list[int] | None:
    ids: list[int] | None = rows[0][0]
    return ids


def _problems(ends: Sequence[tuple[Job, Retried | Failed | Cancelled]]) -> dict[str, object]:
    problems = [end.problem for _, end in ends]
    return {
        "outcomes": [problem.outcome for problem in problems],
        "error_types": [problem.error_type for problem in problems],
        "messages": [problem.message for problem in problems],
        "tracebacks": [problem.traceback for problem in problems],
        "fingerprints": [fingerprint_of(job, end.problem) for job, end in ends],
    }


def _columns(successors: Sequence[tuple[Job, NewJob[Any]]]) -> dict[str, object]:
    """The rows of the successors, column by column. `parents` and their claims say which run each one belongs to."""
    rows = {"parents": [parent.id for parent, _ in successors], "parent_claims": [job.claim for job, _ in successors]}
    return rows | {"nodes": [new.node for _, new in successors]} | arrays([new for _, new in successors])
