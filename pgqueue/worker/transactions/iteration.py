"""`job.iterate` and `job.aiterate`: a long list in batches, each batch one transaction that also says how far it went.

A batch begins with BEGIN when the loop body (or the source) first asks for the connection. It ends with one statement
that locks the running row by the run's fence (id, worker, claim) and appends a row (job, n, cursor). If the body has
enqueued jobs, one more statement follows. Then comes COMMIT, which checks what was deferred. So a batch costs three
round trips beside its own statements.

Why each batch is applied once, in order. Batch n is what comes after the cursor of batch n - 1. Its writes and its row
are one transaction.

Between two runs:

1. The append locks the running row of its own run until the COMMIT, and raises if there is none.
2. To give the job to another run, that row has to be deleted. So whatever an old run commits is committed before the
   next run is claimed.
3. The next run reads the last cursor after it was claimed.

Inside one run, also one that the executor repeats in place under the same claim:

4. The number n is in the primary key. So no n is committed twice.
5. Batch n + 1 is begun only when batch n is known to be committed. A COMMIT without an answer is settled first
   (`in_doubt`): the running row is locked on a new connection, so the old transaction has ended, and row n is there or
   it is not.
6. A run is not stopped between the append and the answer to its COMMIT: there it is uninterruptible.

Neither the fence nor the key suffices alone:

7. Without the fence, a late run could append a number that was thrown away meanwhile.
8. Without the key, a repeated run could read the cursor just before a COMMIT without an answer takes place.

The naive way is to write the cursor after the batch was committed. If the worker dies in between, it applies a batch
twice.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator
from contextlib import suppress
from itertools import islice
from typing import Any, Protocol

import msgspec

from pgqueue.client.enqueue import following
from pgqueue.database.statements import Row, Statement
from pgqueue.errors import Error
from pgqueue.jobs.context import AnySource, Source
from pgqueue.jobs.job import Job, NewJob, fields
from pgqueue.worker.complete.outcome_sql import OutcomeSql
from pgqueue.worker.run.run import Interrupted
from pgqueue.worker.transactions.durable_steps import check_outside

log = logging.getLogger("pgqueue")

Pair = tuple[Any, Any]

_encode = msgspec.json.Encoder(order="deterministic").encode


class LastCommit:
    """How far one iteration is: the number and the cursor of its last batch. No I/O."""

    def __init__(self, job: Job, endings: OutcomeSql) -> None:
        self.job = job
        self.cursor: Any = None
        self.over = self.through = self.dropped = False
        """The loop is over, in whatever way; it has come to the end of its source; the job has ended, or runs anew."""
        self.work: Any = None
        self._n = 0
        self._endings = endings
        self._before: list[NewJob[Any]] = []

    def begin(self, work: Any) -> None:
        """The loop begins. What its body enqueues goes with its batch."""
        self.work = work
        self._before, self.job.successors = self.job.successors or [], []

    def read(self, rows: list[Row]) -> None:
        """Go on after the last batch that was committed, if there is one. Numbers that another job of this id has used
        are not used again."""
        [(last, cursor)] = rows or [(None, None)]
        self._n = last or 0
        if cursor is not None:
            self.cursor = json.loads(cursor)
            said = "job %d (%s) goes on after batch %d"
            log.info(said, self.job.id, self.job.task, self._n, extra=fields(self.job))

    def last(self, work: Any) -> Statement[Any]:
        """Where the last batch that was committed stands."""
        last: Statement[Any] = work.statement("iteration_last", since=self._since)
        return last

    @property
    def _since(self) -> str:
        """When the job was enqueued: an id alone may have been another job's."""
        return self.job.enqueued_at.isoformat()

    def enter(self, pairs: list[Pair]) -> list[Any]:
        """Take the next batch; its items."""
        try:
            items = [item for _, item in pairs]
        except (TypeError, ValueError) as error:
            raise Error("the source of an iteration gives pairs: (cursor, item)", job_id=self.job.id) from error
        self.cursor = _checked(self.job, pairs[-1][0])
        self._n += 1
        return items

    def statements(self, work: Any) -> list[Statement[Any]]:
        """What ends the batch: its row, and the jobs its body has enqueued."""
        check_outside(self.job, "the end of a batch")
        append = work.statement("iteration_append", n=self._n, cursor=_encode(self.cursor).decode())
        successors, self.job.successors = self.job.successors, []
        if not successors:
            return [append]
        return [append, *following(successors, schema=self._endings.schema, notify=self._endings.notify)]

    def appended(self, work: Any) -> Statement[Any]:
        """Whether the row of the batch is there."""
        appended: Statement[Any] = work.statement("iteration_appended", n=self._n, since=self._since)
        return appended

    def end(self) -> None:
        """The loop is over: what was enqueued before it is enqueued again, what a batch left behind is not."""
        self.over = True
        if not self.dropped:
            self.job.successors = self._before  # a list, if an empty one: so the executor asks whether we were `left`

    @property
    def left(self) -> str | None:
        """Why the job cannot be complete; None if it can."""
        if self.through or self.work is None:
            return None
        return (
            f"its handler returned out of the middle of its iteration, in batch {self._n} (a break, a return, or an "
            "exception that was caught): what that batch wrote is rolled back, and the rest has not been seen. "
            "To stop early, let the source end"
        )


class IterationTransactions(Protocol):
    """What batches are committed by: a worker's transactions (`Transactional`), or those of a drain."""

    def for_iteration(self, job: Job, begin: Callable[[Any], object]) -> Any: ...
    def afor_iteration(self, job: Job, begin: Callable[[Any], object]) -> Any: ...
    def end_iteration(self, job: Job, work: Any) -> None: ...
    def leave(self, work: Any) -> None: ...
    def drop(self, job: Job, work: Any) -> None: ...


class Iterations:
    """The iterations of one worker. `checkpoint` raises if a job was told to stop."""

    def __init__(
        self, transactions: IterationTransactions, endings: OutcomeSql, checkpoint: Callable[[Job], None]
    ) -> None:
        self.places: dict[Job, LastCommit] = {}
        """Of the jobs that have iterated and are not over yet."""
        self._transactions = transactions
        self._endings = endings
        self._checkpoint = checkpoint

    def iterate(self, job: Job, source: Source[Any], size: int) -> Iterator[list[Any]]:
        """The batches of this job, in its thread."""
        return self._batches(self._place(job), source, size)

    def aiterate(self, job: Job, source: AnySource[Any], size: int) -> AsyncIterator[list[Any]]:
        """The batches of this job, on the loop."""
        place = self._place(job)
        return _Loop(self._abatches(place, source, size), lambda: self._leave(place))

    def left(self, job: Job) -> str | None:
        """Why this job is not complete although its handler has returned; None if it is."""
        place = self.places.get(job)
        return None if place is None else place.left

    def drop(self, jobs: Iterable[Job]) -> list[int]:
        """These jobs have ended, or are to run anew: what they have open is undone. The ids of those that iterated."""
        if not self.places:
            return []
        dropped = [self.places.pop(job) for job in self.places.keys() & set(jobs)]
        for place in dropped:
            place.dropped = True
            if place.work is not None and not place.over:
                self._transactions.drop(place.job, place.work)
        return [place.job.id for place in dropped]

    def _place(self, job: Job) -> LastCommit:
        check_outside(job, "the iteration")
        if job in self.places:
            raise Error(
                f"job {job.id} ({job.task}): it iterates already, or has; a job has one place to go on from. "
                "Give the second list a job of its own: job.enqueue(…)",
                job_id=job.id,
            )
        place = self.places[job] = LastCommit(job, self._endings)
        return place

    def _batches(self, place: LastCommit, source: Source[Any], size: int) -> Iterator[list[Any]]:
        job = place.job
        try:
            try:
                work = self._transactions.for_iteration(job, place.begin)
                place.read(work.look(place.last(work)))
                pairs = iter(source(place.cursor))
                while True:
                    self._checkpoint(job)
                    batch = list(islice(pairs, size))
                    if not batch:
                        break
                    yield place.enter(batch)
                    work.keep(place.statements(work), place.appended(work))
                place.through = True
            finally:
                self._close(place)
        finally:  # an Interrupted comes once: a step that it broke into is done here
            self._close(place)
        self._checkpoint(job)

    def _close(self, place: LastCommit) -> None:
        """The loop is over, if it has begun: its connection goes back to its pool. Safe to repeat."""
        if place.work is None:
            return
        with suppress(Interrupted):  # what is raised in a generator that is being closed is not heard
            place.work.undo()
        place.end()
        self._transactions.end_iteration(place.job, place.work)

    # A twin, as the handler's loop runs between its steps: an Interrupted may come there, a cancellation may not.
    async def _abatches(self, place: LastCommit, source: AnySource[Any], size: int) -> AsyncIterator[list[Any]]:
        job, work = place.job, self._transactions.afor_iteration(place.job, place.begin)
        try:
            place.read(await work.look(place.last(work)))
            pairs = _aiter(source(place.cursor))
            while True:
                self._checkpoint(job)
                batch = await _next(pairs, size)
                if not batch:
                    break
                yield place.enter(batch)
                await work.keep(place.statements(work), place.appended(work))
            place.through = True
        finally:
            if not place.over:
                try:
                    await work.undo()
                finally:
                    place.end()
                    self._transactions.end_iteration(job, work)

    def _leave(self, place: LastCommit) -> None:
        """The loop was left: what its batch has begun is undone."""
        if not place.over and place.work is not None:
            self._transactions.leave(place.work)
            place.end()
            self._transactions.end_iteration(place.job, place.work)


class _Loop:
    """The batches of `aiterate`. It notes at once when the loop over it is left: the generator is closed only later."""

    def __init__(self, batches: AsyncIterator[list[Any]], leave: Callable[[], None]) -> None:
        self._batches = batches
        self._leave = leave

    def __aiter__(self) -> AsyncIterator[list[Any]]:
        return self

    async def __anext__(self) -> list[Any]:
        return await anext(self._batches)

    def __del__(self) -> None:
        self._leave()


def _checked(job: Job, cursor: Any) -> Any:
    """`cursor`, if it comes back from the database as it is."""
    try:
        back = json.loads(_encode(cursor))
    except Exception as error:
        raise Error(f"job {job.id} ({job.task}): the cursor {cursor!r} is no JSON value", job_id=job.id) from error
    if back is None or back != (list(cursor) if isinstance(cursor, tuple) else cursor):
        raise Error(
            f"job {job.id} ({job.task}): the cursor {cursor!r} would come back as {back!r}; a cursor is a JSON value "
            "(text, number, list, object), and not None, which stands for the beginning",
            job_id=job.id,
        )
    return cursor


async def _aiter(pairs: Iterable[Pair] | AsyncIterable[Pair]) -> AsyncIterator[Pair]:
    if isinstance(pairs, AsyncIterable):
        async for pair in pairs:
            yield pair
    else:
        for pair in pairs:
            yield pair


async def _next(pairs: AsyncIterator[Pair], size: int) -> list[Pair]:
    batch: list[Pair] = []
    async for pair in pairs:
        batch.append(pair)
        if len(batch) == size:
            break
    return batch
