"""The rounds of a relay on one pair of sessions: read, deliver, delete. The source works while the target does.

    target           | deliver 1 | deliver 2        | deliver 3        | …
    source   read 1  | read 2    | delete 1, read 3 | delete 2, read 4 | …

**The naive version** does one after another. Then one server always waits for the other.

**Why a batch may be read before the batch before it is deleted.**

1. Deliveries follow one another. Only statements of the source are beside them.
2. What was delivered and is not deleted yet is in flight. A row in flight that is read again is left out.
3. A batch is read ahead only if the outbox has more rows, and for a queue: other targets take longer than the reading.
   Otherwise everything in flight is deleted first.
4. A look begins when nothing is in flight. So each row that it reads is delivered, or remembered anew, after it began.
5. If a session fails, what was in flight is read again. The memory knows what was delivered (see relay.py).

**Why jobs with an order key arrive in order**, if their transactions did not overlap.

1. The later transaction has drawn the higher ids. A snapshot that sees its rows sees those of the earlier one.
2. With each row a read tells which row is before it with its key, in the outbox or put aside, in the same snapshot.
3. A row goes if there is none, or if that row goes before it in the same delivery, or went in the one before. Else it
   is held back. This is decided when the delivery before has been answered.
4. If a row of a delivery does not go, the target passes over the later rows with its key.
5. A row that was put aside and comes back has the id that it had.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import psycopg

from pgqueue.database.backoff import Backoff, without_values
from pgqueue.database.row_errors import refuses_row
from pgqueue.jobs.job import Lane
from pgqueue.relay.source import Batch, Lag, Source, StagedRow
from pgqueue.relay.target import Delivering, Delivery, QueueSession
from pgqueue.steady_clock import monotonic
from pgqueue.worker.fetch.watermark import Fetch, Watermark

log = logging.getLogger("pgqueue")

BATCH_BYTES = 8 << 20
LOOK_SECONDS = 60.0
"""A look at the whole outbox begins this often."""
IDLE_FIRST, IDLE_MOST = 0.05, 5.0
PING_SECONDS = 5.0
"""While the target works, the source's session gets a sign of life this often."""
SOON_SECONDS = 0.1
"""A row that was put off is tried again after this time."""
AGAIN_MOST = 1_000
"""So many rows that stayed are asked for by their ids; more are found by the next look."""
REPORT_SECONDS = 5.0
"""The lag is measured this often; while nothing is staged, at each look."""
VAIN_MOST = 10
"""`once` ends after so many rounds in a row in which no row went: the target takes none."""

LANE: Lane = ("outbox", 0, False)


@dataclass(slots=True)
class Counts:
    """What a relay has done so far, and how far it is behind. `waiting` and `oldest` are measured every 5 s."""

    delivered: int = 0
    refused: int = 0
    rounds: int = 0
    waiting: int = 0
    """Staged jobs that wait; 10,001 at most."""
    oldest: float | None = None
    """Seconds that the oldest of them has waited; None if none waits."""


@dataclass(slots=True)
class _Stayed:
    """A row that stayed: it waits for a key, or the application has locked it."""

    next_at: float
    order_key: str | None = None
    backoff: Backoff = field(default_factory=lambda: Backoff(first=0.1))


@dataclass(frozen=True, slots=True)
class _Read:
    """Rows to be delivered. `full`: there are more behind them."""

    rows: list[StagedRow]
    full: bool


class Rounds:
    """The rounds of one pair of sessions."""

    def __init__(self, name: str, source: Source, target: Delivering, counts: Counts, batch: int) -> None:
        self._name = name
        self._source = source
        self._target = target
        self._queue = target if isinstance(target, QueueSession) else None
        self._counts = counts
        self._batch = self._most = batch
        self._watermark = Watermark(sweep_every=math.inf)
        self._look_at = 0.0
        self._looking: str | None = None
        self._reported_at = -math.inf
        self._lag = Lag(0, None, 0)
        self._ahead: _Read | None = None
        self._answered: Delivery | None = None
        """What the target has answered last, until the source has deleted it."""
        self._in_flight: set[str] = set()
        """The uids of what is being delivered, and of what is not deleted yet."""
        self._stayed: dict[int, _Stayed] = {}
        self._held: dict[str, int] = {}
        """For each order key the lowest id that is held back by a row before it."""
        self._again = False
        """Whether rows are to be read again at once."""
        self._alone = False
        """Whether the server could not read a batch: then only the first row behind the cursor is read."""
        self._idle = IDLE_FIRST

    async def run(self, upto: float | None) -> None:
        """Deliver until an error, or until no row up to this id is left but those that stay."""
        vain = 0
        while True:
            went = await self._round()
            await self._report(went=bool(went))
            vain = 0 if went else vain + 1
            at_once = self._again or self._ahead is not None
            if upto is not None and not any(row.id <= upto for row in went) and (not at_once or vain > VAIN_MOST):
                return
            if upto is None and not at_once:
                await self._source.stirs(self._pause(bool(went)))

    async def _round(self) -> list[StagedRow]:
        """Deliver one batch; meanwhile delete the one before and read the next. Returns the rows that went."""
        batch = self._ahead or await self._read()
        self._ahead = None
        rows, held = self._in_order(batch.rows)
        self._in_flight.update(row.uid for row in batch.rows)
        more = batch.full and bool(rows) and self._queue is not None and monotonic() < self._look_at
        delivery = await self._beside(self._deliver(rows, held), self._clear(more=more))
        self._keep(rows, held, delivery)
        self._answered = delivery
        if not more:
            await self._clear(more=False)
            self._again |= batch.full and bool(batch.rows)
            if not batch.full and self._queue is not None and self._looking is not None:
                began, self._looking = self._looking, None
                await self._queue.looked(began)
        self._counts.rounds += 1
        return [*delivery.delivered, *(refusal.row for refusal in delivery.refused)]

    # The source -------------------------------------------------------------------------------------------------------

    async def _read(self) -> _Read:
        """The next rows, without those that are in flight or wait for their next try."""
        now = monotonic()
        self._again = False
        if now >= self._look_at and not self._in_flight:
            self._look_at = now + LOOK_SECONDS
            self._watermark.start_at_zero()
            if self._queue is not None:
                self._looking = await self._queue.now()
        [after] = self._watermark.starts([LANE], now)
        again = [] if self._alone else [id for id, stayed in self._stayed.items() if stayed.next_at <= now]
        try:
            batch = await self._source.read(after, again, self._most, BATCH_BYTES)
        except psycopg.Error as error:
            if not isinstance(error, psycopg.errors.QueryCanceled) and not refuses_row(error):
                raise
            for id in again:  # perhaps it is one of these: the others do not wait for it
                self._stayed[id].next_at = now + self._stayed[id].backoff.pause()
            await self._narrow(after, error)
            self._again = True
            return _Read([], full=True)
        full = self._note(batch, after, now)
        for id in set(again) - {row.id for row in batch.rows} if not batch.cut else ():
            self._free(self._stayed.pop(id).order_key)  # the application has deleted it
        due = [row for row in batch.rows if row.uid not in self._in_flight and self._is_due(row.id, now)]
        return _Read(due, full)

    async def _narrow(self, after: int, error: psycopg.Error) -> None:
        """The server cannot read a row: read one at a time. If it cannot read one alone, that one is put aside.

        What it cannot read is a value that has no text, as a number of 12 bytes that takes 131,000 digits. Or the disk
        has lost a part of it.
        """
        if not self._alone:
            self._alone, self._most = True, 1
            return
        if isinstance(error, psycopg.errors.QueryCanceled):  # the server is slow: no fault of the row
            raise error
        row = await self._source.first(after)
        reason = f"the server cannot read it: {without_values(error)}"
        if row is None or not await self._source.put_aside(row, reason):
            raise error  # the application has locked it
        log.warning("staged job %d (%s) is refused: %s", row.id, row.task, reason)
        self._counts.refused += 1

    def _is_due(self, id: int, now: float) -> bool:
        stayed = self._stayed.get(id)
        return stayed is None or stayed.next_at <= now

    def _note(self, batch: Batch, after: int, now: float) -> bool:
        """Move the cursor. Returns whether there are more rows behind it."""
        self._alone = False
        new = [row.id for row in batch.rows if row.id > after]
        most = self._most
        # What is left out was measured all the same: ask for about as many as there is room for.
        self._most = min(self._batch, 2 * (len(batch.rows) if batch.cut else most))
        full = batch.cut or len(new) >= most
        taken = {LANE: (len(new), new[-1])} if new else {}
        count = len(new) if full else most
        fetch = Fetch(batch.reading, [LANE], [count], {LANE}, taken, count)
        self._again |= self._watermark.fetched(fetch, now)
        return full

    async def _clear(self, *, more: bool) -> None:
        """Delete what was delivered last, put aside what was refused; then read ahead, if there is `more`."""
        if (delivery := self._answered) is not None:
            self._answered = None
            gone = await self._source.settled(delivery.delivered, delivery.refused)
            self._counts.delivered += len(delivery.delivered)
            self._counts.refused += len(delivery.refused)
            for row in (*delivery.delivered, *(refusal.row for refusal in delivery.refused)):
                self._in_flight.discard(row.uid)
                if row.uid in gone:
                    self._stayed.pop(row.id, None)
                    self._free(row.order_key)
                else:
                    self._stay(row)
        if more:
            self._ahead = await self._read()

    async def _report(self, *, went: bool) -> None:
        """Now and then: measure how far this relay is behind, and note it at the queue."""
        now = monotonic()
        first = self._reported_at == -math.inf
        busy = first or went or self._lag.waiting or self._stayed or self._held or self._ahead is not None
        if now < self._reported_at + (REPORT_SECONDS if busy else LOOK_SECONDS):
            return
        self._reported_at = now
        if busy:  # else nothing waits, as before
            [after] = self._watermark.cursors([LANE])
            self._lag = await self._source.waiting(after, list(self._stayed), list(self._held))
        self._counts.waiting, self._counts.oldest, _ = self._lag
        if self._queue is not None:
            await self._queue.report(self._name, self._lag)

    # The target -------------------------------------------------------------------------------------------------------

    async def _deliver(self, rows: list[StagedRow], held: list[StagedRow]) -> Delivery:
        """Deliver these rows. Of those that are held back, find out which have come already."""
        delivery = await self._target.deliver(rows) if rows else Delivery()
        if held and self._queue is not None:
            # One may have come before the row that it is behind was committed. What is known is remembered anew.
            delivery.delivered.extend(await self._queue.known(held))
        for refusal in delivery.refused:
            log.warning("staged job %d (%s) is refused: %s", refusal.row.id, refusal.row.task, refusal.reason)
        return delivery

    async def _beside(self, target: Coroutine[Any, Any, Delivery], source: Coroutine[Any, Any, None]) -> Delivery:
        """Await both. The source's session is kept while the target works."""
        delivering = asyncio.ensure_future(target)
        try:
            await source
            while not delivering.done():
                await asyncio.wait([delivering], timeout=PING_SECONDS)
                if not delivering.done():
                    await self._source.ping()
            return delivering.result()
        finally:
            if not delivering.done():
                delivering.cancel()
                await asyncio.wait([delivering])

    def _keep(self, rows: list[StagedRow], held: list[StagedRow], delivery: Delivery) -> None:
        """Note which rows have not gone, and when they are to be read again."""
        refused = {refusal.row.uid for refusal in delivery.refused}
        delivered = {row.uid for row in delivery.delivered}
        untried = {row.uid for row in delivery.untried}
        put_off = {row.uid for row in delivery.put_off}
        stopped = {refusal.row.order_key for refusal in delivery.refused} - {None}
        held = [row for row in held if row.uid not in delivered]
        for row in rows:
            if row.uid in delivered or row.uid in refused:
                continue
            self._in_flight.discard(row.uid)
            if row.order_key in stopped:
                held.append(row)
            elif row.uid not in untried:
                self._stay(row, soon=row.uid in put_off)
                stopped |= {row.order_key} - {None}
            elif row.id not in self._stayed:
                self._watermark.fall(LANE, row.id - 1)
        for row in held:
            self._in_flight.discard(row.uid)
            if row.order_key is not None:
                self._hold(row.order_key, row.id)
                self._stayed.pop(row.id, None)
        self._again |= bool(untried)

    # Rows that stay ---------------------------------------------------------------------------------------------------

    def _stay(self, row: StagedRow, *, soon: bool = False) -> None:
        """Try this row again after a pause, or soon. More rows than can be noted are found by the next look."""
        if row.id in self._stayed or len(self._stayed) < AGAIN_MOST:
            stayed = self._stayed.setdefault(row.id, _Stayed(0.0, row.order_key))
            stayed.next_at = monotonic() + (SOON_SECONDS if soon else stayed.backoff.pause())

    def _hold(self, order_key: str, id: int) -> None:
        """The row with this id is held back. More keys than can be noted are found by the next look."""
        if order_key in self._held or len(self._held) < AGAIN_MOST:
            self._held[order_key] = min(id, self._held.get(order_key, id))

    def _free(self, order_key: str | None) -> None:
        """A row with this order key is gone: read again what it has held back."""
        id = None if order_key is None else self._held.pop(order_key, None)
        if id is not None:
            self._watermark.fall(LANE, id - 1)
            self._again = True

    def _in_order(self, rows: Sequence[StagedRow]) -> tuple[list[StagedRow], list[StagedRow]]:
        """Apart: the rows that may go, and those that are behind a row with the same order key that does not go."""
        went = self._answered.delivered if self._answered is not None else ()
        going: set[tuple[str | None, int]] = {(row.order_key, row.id) for row in went if row.order_key is not None}
        free: list[StagedRow] = []
        held: list[StagedRow] = []
        for row in rows:
            if row.behind is None or (row.order_key, row.behind) in going:
                going.add((row.order_key, row.id))
                free.append(row)
            else:
                held.append(row)
        return free, held

    def _pause(self, found: bool) -> float:
        """Seconds to wait for a notification: growing while nothing is found."""
        now = monotonic()
        self._idle = IDLE_FIRST if found else min(IDLE_MOST, 2 * self._idle)
        due = [stayed.next_at - now for stayed in self._stayed.values()]
        if (look := self._watermark.next_look(now)) is not None:
            due.append(look - now)
        return max(0.01, min([self._idle, *due]))
