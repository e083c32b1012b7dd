"""What a service does when the server has refused to move a batch of rows: every row that can be moved is moved.

A trigger of the application, or a value of a row, may refuse one row, and with it the whole batch. So may a transaction
that is open and has inserted the row's id, as after a restore. Used by the services that move jobs. Nothing of it runs
before an error, but for the loop of `walk`.

1. What can be put right is put right: an id that stands twice (doubles.py), rows that fit into no lane (`unfit`). Then
   the same rows are moved again.
2. Else fewer rows are moved at once, until one is refused by itself. It is left where it is, and named. The others go
   on. When its time is over (left_alone.py), it may be tried again.

Why every row that can be moved is moved, and none waits for a refused one:

1. A batch is one transaction. If it was refused, it has moved nothing, so no row is moved twice or lost.
2. Each refusal makes the batch smaller, or leaves one row alone. A batch of one is refused for its only row, so no row
   is left alone for another one. Where the server picks the rows, they come in one order, and `first` names the first.
   Suppose that row is gone by then, or is locked. Then the next one is left alone for nothing, and for its time only.
3. So a refused row costs few refusals: as many as its batch can be divided, the logarithm of its size. The batches grow
   again when as many rows were moved as were in the refused one: before that they would meet the same row.
4. A walk that the server has cancelled, as at its `statement_timeout`, is like a refusal: fewer rows take less time.
   If one row alone takes too long, it is left alone like a refused one.
5. If many rows are refused, it is not the rows. After `REFUSED_MOST` the service rests. What it has not reached comes
   with its next call, which begins behind those that are left alone, or with the rows in another order.

An open transaction of the application may have inserted a row's id, as after a restore. The unique index then makes our
INSERT wait until that transaction has ended. Why no other row, and no plain job, waits for that:

1. A statement that gives jobs back, promotes or retries them waits 20 ms at most (`impatience` in fragments.sql). The
   wait is at its INSERT, with its session held, so a longer one would hold up claims on that session.
2. The error names the index of ids, so it is told from a lock on a row or on a table (`meets_open_id`). Such a lock
   says nothing of a row, and making batches smaller would not help: it is raised, unless the caller says `locks`.
3. The row is refused like one that a trigger refuses. It stays where it is, so it is neither lost nor run twice.
4. It is tried again after its time. If that transaction has committed, the id stands twice, and 1 above puts that
   right. If it has rolled back, the id is free.

Naive versions: to give up after the first refusal strands what stands behind it. To make the batch smaller, and to
leave no row alone, ends at the first refused row for ever. To leave the whole batch alone strands its other rows. To
raise when the server has cancelled a walk meets the same batch, as large, for ever.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from math import inf
from typing import Any, TypeVar

import psycopg

from pgqueue.database.backoff import without_values
from pgqueue.database.row_errors import meets_open_id, refuses_move
from pgqueue.database.sessions import Session
from pgqueue.database.statements import Row, Statement, integers
from pgqueue.worker.doubles import is_double, resolve
from pgqueue.worker.left_alone import LeftAlone

log = logging.getLogger("pgqueue")

T = TypeVar("T")

FEWER = 8
"""Where the server picks the rows: so many times fewer after a refusal, and more after a batch that was moved."""
REFUSED_MOST = 20
"""After so many rows that were refused by themselves a service rests: each refusal costs a connection."""


class Mover:
    """Moves rows over the given session. `unfit` fails the rows that fit nowhere, and answers their ids.

    `locks`: a lock that could not be had in time is like a refusal, and what is refused by itself may be a key.
    """

    def __init__(
        self,
        session: Session,
        *,
        notify: bool,
        unfit: Callable[[], Statement[list[Row]]] | None = None,
        locks: bool = False,
    ) -> None:
        self.rested = False
        """Whether the last walk has ended because so many rows were refused."""
        self.met_open_id = False
        """Whether the last walk has left a row alone whose id an open transaction has: that may be over soon."""
        self._session = session
        self._notify = notify
        self._unfit = unfit
        self._locks = locks

    async def walk(
        self,
        most: int,
        left: LeftAlone[int],
        moves: Callable[[int, str], Sequence[Statement[Any]]],
        first: Callable[[str], Statement[list[Row]]],
    ) -> AsyncIterator[list[Any]]:
        """Move rows that the server picks, `most` at once, until no more are there. Yields the answers of each batch.

        `moves(n, passed)` moves n of them, but not those of the ids `passed`; first it answers how many were moved.
        `first(passed)` answers the id and the task of the one that it would move first.
        """
        self.rested, self.met_open_id, refused, n = False, False, 0, most
        suspects = 0  # so many of the rows that come next were in a refused batch
        while refused < REFUSED_MOST:
            if left.over():
                n = 1  # the row whose turn it is now is probably refused again
            passed = integers(left.rows())
            try:
                answers = await self._session.run(*moves(n, passed))
            except psycopg.Error as error:
                if isinstance(error, psycopg.errors.QueryCanceled) or not await self._put_right(error):
                    if n == 1:
                        refused += 1
                        self.met_open_id |= meets_open_id(error)
                        await self._leave(left, first(passed), error)
                    suspects, n = n, max(1, n // FEWER)
                continue
            yield answers
            if answers[0][0][0] < n:
                return
            suspects -= n
            if suspects <= 0:
                n = min(most, FEWER * n)
        self.rested = True

    async def _leave(self, left: LeftAlone[int], first: Statement[list[Row]], error: psycopg.Error) -> None:
        [found] = await self._session.run(first)
        for id, task in found:
            left.leave(id, f"job {id} ({task})", error, extra={"job_id": id})

    async def divide(
        self,
        error: psycopg.Error,
        rows: Sequence[T],
        move: Callable[[Sequence[T]], Awaitable[object]],
        refused: Callable[[T, psycopg.Error], Awaitable[None]],
        *,
        most: float = inf,
    ) -> None:
        """`move` of these rows, which we hold, has met this error: move all but those that are refused by themselves.

        After `most` of them no part is divided any more: then a part with another one stays as a whole.
        """
        alone = 0

        async def split(error: psycopg.Error, rows: Sequence[T]) -> None:
            nonlocal alone
            half = len(rows) // 2
            if await self._put_right(error):
                parts = [rows]
            elif half and alone < most:
                parts = [rows[:half], rows[half:]]
            else:
                alone += 1
                if not half:
                    await refused(rows[0], error)
                return
            for part in parts:
                try:
                    await move(part)
                except psycopg.Error as again:
                    await split(again, part)

        await split(error, rows)

    async def _put_right(self, error: psycopg.Error) -> bool:
        """Whether the same rows may be moved now. Raises the error if it is about no row."""
        if is_double(error):
            return await resolve(self._session, error, notify=self._notify)
        late = meets_open_id(error) or (self._locks and isinstance(error, psycopg.errors.LockNotAvailable))
        if not (late or refuses_move(error)):
            raise error
        if late or self._unfit is None:
            return False
        try:
            [failed] = await self._session.run(self._unfit())
        except psycopg.Error as again:
            if not refuses_move(again):
                raise
            return False
        if failed:
            ids = [id for id, *_ in failed]
            log.error("jobs %s fit into no lane: they are failed: refused (%s)", ids, without_values(error))
        return bool(failed)
