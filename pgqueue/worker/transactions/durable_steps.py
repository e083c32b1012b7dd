"""`job.step` and `job.astep`: a part of a handler that is done once, its answer kept for later attempts.

A step begins with BEGIN when its function first asks for the connection of its job. It ends with one statement, which
locks the running row by the run's fence (id, worker, claim) and appends a row (job, name, answer); then comes COMMIT.
The next attempt reads the rows first, and takes an answer that is there instead of calling the function.

Why a step whose function writes on the job's connection takes effect once:

1. Its writes and its row are one transaction. So both are committed, or neither is.
2. The statement raises if the running row is not this run's. To give the job to another run, that row has to be
   deleted. So what an old run commits is committed before the next run is claimed, and its rows are read.
3. (job, enqueued_at, name) is the primary key. So a run that is repeated in place, before a COMMIT without an answer
   has ended, cannot commit a name twice.
4. A COMMIT without an answer is settled before the step ends (`Commit.keep`, `in_doubt`): the row is there, or it never
   will be.
5. A run is not stopped between the append and the answer to its COMMIT.

What a step does elsewhere is done at least once: its row is written after it. Between the two a worker may die.

What `fn` enqueues (`job.enqueue`, `job.add`) is enqueued in the step's transaction: the next attempt does not call
`fn`, so with the end of the job it would be lost. What the handler enqueued before the step comes with the job's end.

A step in the body of `job.iterate` uses the transaction of the batch before the batch does: it is committed, and the
batch begins another one. Only a step that has made the transaction ends it. An iteration inside of a step is refused:
its batches would commit what the step has written so far, before the record.

A row is found by the name, never by the order: code may be changed between two attempts.

The naive ways: to write the row in a transaction of its own (a kill between the two repeats the effects); to leave out
the fence (a run that has lost its job records an answer that the other run then takes for its own).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sized
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from pgqueue.client.enqueue import following
from pgqueue.database.statements import Row, Statement
from pgqueue.errors import Error, InvalidOption
from pgqueue.jobs.job import Job, NewJob
from pgqueue.jobs.step_answers import check_step, read_answer, written_answer
from pgqueue.worker.complete.outcome_sql import OutcomeSql
from pgqueue.worker.run.run import Interrupted

RECORDED_MOST = 10_000
"""The most steps that one job records: each run reads them all at its first step."""


@dataclass(slots=True)
class RunSteps:
    """The steps of one run of a job."""

    named: set[str] = field(default_factory=set)
    """The names that this run has used."""
    known: dict[str, str | None] | None = None
    """The answers that are recorded, as JSON; None before they were read."""
    within: str | None = None
    """The step that runs now."""
    before: list[NewJob[Any]] | None = None
    """What the handler had enqueued before this step."""
    work: Any = None
    """The transaction of this step; None if it was refused, or none runs."""
    own: bool = False
    """Whether it was made for this step: else the task is transactional, or the step is in a batch of an iteration."""

    def begin(self, work: Any) -> None:
        """The step has this transaction."""
        self.work = work


def check_outside(job: Job, what: str) -> None:
    """Raise Error if a step of this job runs: this would commit what the step has written."""
    steps: RunSteps | None = getattr(job, "steps", None)
    if steps is not None and steps.within is not None:
        where = f"job {job.id} ({job.task}): {what} is inside the step {steps.within!r}"
        raise Error(
            f"{where}: its batches would commit what the step has written, before its record; iterate outside of steps",
            job_id=job.id,
        )


class StepTransactions(Protocol):
    """What steps are committed by: a worker's transactions (`Transactional`), or those of a drain."""

    def owns(self, job: Job) -> bool: ...
    def for_step(self, job: Job, begin: Callable[[Any], object]) -> Any: ...
    def afor_step(self, job: Job, begin: Callable[[Any], object]) -> Any: ...
    def end_iteration(self, job: Job, work: Any) -> None: ...


class DurableSteps:
    """The steps of the jobs of one worker."""

    def __init__(self, transactions: StepTransactions, endings: OutcomeSql) -> None:
        self._transactions = transactions
        self._endings = endings

    def step(self, job: Job, name: str, call: Callable[[], Any], fn: Callable[..., Any]) -> Any:
        """The answer of this step, in the thread of its job: recorded before, or of `call`, which calls `fn`."""
        steps = self._begin(job, name)
        try:
            try:
                work = self._transactions.for_step(job, steps.begin)
                steps.named.add(name)
                if steps.known is None:
                    steps.known = dict(work.look(self._recorded(job, work)))
                if name in steps.known:
                    return read_answer(job.task, name, fn, steps.known[name])
                _check_number(job, name, steps.known)
                answer = call()
                check_step(job.task, name, fn, answer)
                written = written_answer(job.task, name, answer)
                back = read_answer(job.task, name, fn, written)
                work.keep(self._ends(job, work, name, written), self._appended(job, work, name))
                steps.known[name] = written
                return back
            finally:
                self._close(job, steps)
        finally:  # an Interrupted comes once: a step that it broke into is done here
            self._close(job, steps)

    async def astep(self, job: Job, name: str, call: Callable[[], Any], fn: Callable[..., Any]) -> Any:
        """The same for an async handler; what `call` answers may be awaitable."""
        steps = self._begin(job, name)
        try:
            work = self._transactions.afor_step(job, steps.begin)
            steps.named.add(name)
            if steps.known is None:
                steps.known = dict(await work.look(self._recorded(job, work)))
            if name in steps.known:
                return read_answer(job.task, name, fn, steps.known[name])
            _check_number(job, name, steps.known)
            answer = call()
            if inspect.isawaitable(answer):
                answer = await answer
            written = written_answer(job.task, name, answer)
            back = read_answer(job.task, name, fn, written)
            await work.keep(self._ends(job, work, name, written), self._appended(job, work, name))
            steps.known[name] = written
            return back
        finally:
            try:
                if steps.work is not None:
                    await steps.work.undo()
            finally:
                self._end(job, steps)

    def _begin(self, job: Job, name: str) -> RunSteps:
        steps: RunSteps | None = getattr(job, "steps", None)
        if steps is None:
            steps = job.steps = RunSteps()
        where = f"job {job.id} ({job.task}): step {name!r}"
        if name in steps.named:
            raise InvalidOption(
                f"{where}: this run has had a step of that name; the name tells them apart: use another"
            )
        if steps.within is not None:
            raise Error(
                f"{where}: it is inside the step {steps.within!r}, or beside it, and would commit what that wrote: "
                "the steps of a job come one after another",
                job_id=job.id,
            )
        steps.within, steps.own = name, not self._transactions.owns(job)
        steps.before, job.successors = job.successors, None
        return steps

    def _close(self, job: Job, steps: RunSteps) -> None:
        """The step is over: what it has not committed is undone. Safe to repeat."""
        if steps.work is not None:
            with suppress(Interrupted):  # the handler's frame raises what it was stopped by
                steps.work.undo()
        self._end(job, steps)

    def _end(self, job: Job, steps: RunSteps) -> None:
        """What was enqueued before the step is enqueued again; what the step has left behind is not. Safe to repeat."""
        if steps.within is not None and getattr(job, "steps", None) is steps:  # else the job runs anew
            job.successors = steps.before
        steps.within = None
        if steps.work is not None and steps.own:
            self._transactions.end_iteration(job, steps.work)
        steps.work = None

    def _recorded(self, job: Job, work: Any) -> Statement[list[Row]]:
        recorded: Statement[list[Row]] = work.statement("durable_steps_read", since=job.enqueued_at.isoformat())
        return recorded

    def _ends(self, job: Job, work: Any, name: str, result: str | None) -> list[Statement[Any]]:
        """What ends the step: its row, and the jobs that it has enqueued."""
        append = work.statement("durable_steps_append", step=name, result=result)
        made = job.successors or ()
        return [append, *following(made, schema=self._endings.schema, notify=self._endings.notify)]

    def _appended(self, job: Job, work: Any, name: str) -> Statement[list[Row]]:
        since = job.enqueued_at.isoformat()
        appended: Statement[list[Row]] = work.statement("durable_steps_appended", step=name, since=since)
        return appended


def _check_number(job: Job, name: str, known: Sized) -> None:
    if len(known) >= RECORDED_MOST:
        raise Error(
            f"job {job.id} ({job.task}): step {name!r}: the job has recorded {RECORDED_MOST:,} steps, and a job "
            "records no more; go through a long list by job.iterate, or enqueue a job for each part",
            job_id=job.id,
        )
