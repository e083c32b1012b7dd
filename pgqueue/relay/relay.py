"""The relay: takes staged jobs from the outbox of one database to a queue in another. Loses nothing, doubles nothing.

Started by `pgqueue relay`, or by an application in its event loop. Many relays of one source may run: one works.

**The naive version** takes an advisory lock at the source, reads, inserts at the target, remembers the ids, deletes. It
loses and doubles: a relay that stood still delivers again after its successor has delivered, deleted and forgotten;
ids that come again are taken for delivered; a commit that is not durable is lost after its row was deleted; a range
that is deleted takes rows along that were committed after the reading.

**One delivery:**

1. Source: one session has the lock, reads and deletes. It ends after 15 s without a statement.
2. Each session of the target draws an epoch above all others, commits it at the source, and raises the fence to it.
3. Then rows are read, in one snapshot, in the order of their ids.
4. Target, one durable transaction: lock the fence at its epoch; leave out what the memory knows, and remember that
   anew; insert the jobs; remember their uids.
5. Source, durable: delete what was delivered, by id and uid.
6. A look at the whole outbox, once a minute: every row is read, so every row of the memory that is still there is
   remembered anew. What was delivered before a look began, and not remembered anew by it, was absent when the look
   ended. It is forgotten when that is an hour ago (a setting).

**Why nothing is lost.**

1. A row is deleted only after a COMMIT that contains its job, or that knows its job, was answered. That COMMIT is
   durable.
2. It is deleted by uid: no other row has that.
3. A row that is not deleted is read again: it lies behind the cursor, is asked for by its id, or is found by the look.
   The cursor passes over no row that is not committed yet (see watermark.py).
4. A row goes aside only with a reason that this row alone has caused.

**Why nothing is doubled.**

1. A uid is made once. Job and memory commit together, and one uid is remembered once: it is a primary key.
2. Two deliveries of one outbox do not overlap: both lock the fence.
3. Raising the fence waits for the delivery that holds it. Afterwards no session with a lower epoch commits.
4. What a session delivers was read after its epoch was raised. So it has no row that was deleted before that.
5. So a row comes twice only if the memory has lost it in between. The memory loses a row only if the row was absent for
   the memory's age. A row that was absent in a committed state is in no later one, unless the source is set back by
   more than that age.
6. The lock decides only which relay works. Nothing above needs it.

**Why jobs with an order key arrive in order**, if their transactions did not overlap.

1. The later transaction has drawn the higher ids. A snapshot that sees its rows sees those of the earlier one.
2. With each row a read tells which row is before it with its key, in the outbox or put aside, in the same snapshot.
3. A row goes if there is none, or if that row goes before it in the same delivery. Else it is held back.
4. If a row of a delivery does not go, the target passes over the later rows with its key.
5. A row that was put aside and comes back has the id that it had.

A simulator plays the scheme (tests/relay/test_scheme.py), and finds a fault if the fence, the uid, the fence for each
session, the durable commit or the look is taken out.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, TypeVar

import psycopg
from psycopg.conninfo import conninfo_to_dict

from pgqueue.config import config, normalize
from pgqueue.database import embedded, migrations
from pgqueue.database.backoff import Backoff, is_loss, one_line
from pgqueue.database.outage import Outage
from pgqueue.database.sessions import Link, options
from pgqueue.errors import Error
from pgqueue.jobs.job import Lane
from pgqueue.relay.session import opened
from pgqueue.relay.source import Batch, Source, StagedRow
from pgqueue.relay.target import Delivering, Delivery, Fenced, QueueSession, QueueTarget, Target
from pgqueue.worker.fetch.watermark import Fetch, Watermark

log = logging.getLogger("pgqueue")

T = TypeVar("T")

BATCH = 500
BATCH_BYTES = 8 << 20
MEMORY_SECONDS = 3_600.0
LOCK_SECONDS = 1.0
LOOK_SECONDS = 60.0
"""A look at the whole outbox begins this often."""
IDLE_FIRST, IDLE_MOST = 0.05, 5.0
PING_SECONDS = 5.0
"""While the target works, the source's session gets a sign of life this often."""
TROUBLE_MOST = 60.0
"""What no connection cures is tried again, and logged, this often."""
AGAIN_MOST = 1_000
"""So many rows that stayed are asked for by their ids; more are found by the next look."""
VAIN_MOST = 10
"""`once` ends after so many rounds in a row in which no row went: the target takes none."""

LANE: Lane = ("outbox", 0, False)


@dataclass(slots=True)
class Counts:
    """What a relay has done so far."""

    delivered: int = 0
    refused: int = 0
    rounds: int = 0


class Relay:
    """Delivers the staged jobs of one source. `run` works until it is cancelled, which may happen at any moment.

    `source` is the DSN of the application's database. `target` is that of the queue, or another kind of `Target`.
    `memory` is how far, in seconds, the source may be set back without a job coming twice.

        async with asyncio.TaskGroup() as group:
            relay = group.create_task(pgqueue.Relay(app_dsn, queue_dsn).run())
    """

    def __init__(
        self,
        source: str,
        target: str | Target,
        *,
        batch: int = BATCH,
        memory: float = MEMORY_SECONDS,
        adopt: bool = False,
    ) -> None:
        self.counts = Counts()
        self._link = _link(source, Outage())
        parts = conninfo_to_dict(self._link.dsn)
        self.name = f"{parts.get('host', '')}/{parts.get('dbname', '')}"
        """The source, for people."""
        self._target = (
            QueueTarget(_link(target, self._link.outage), memory, config().notify)
            if isinstance(target, str)
            else target
        )
        self._batch = batch
        self._adopt = adopt

    async def run(self) -> None:
        """Deliver for ever. In an outage, or if something else is wrong, wait and try again."""
        trouble = Backoff(first=1.0, most=TROUBLE_MOST)
        while True:
            before = self.counts.rounds
            try:
                await self._work(upto=None)
            except (psycopg.Error, OSError, Error) as error:
                if self.counts.rounds > before:
                    trouble.succeeded()
                await asyncio.sleep(self._paused(error, trouble))

    async def once(self) -> bool:
        """Deliver what is staged now, and return. False if another relay works: then nothing was done."""
        return await self._work(upto=math.inf)

    def _paused(self, error: Exception, trouble: Backoff) -> float:
        """Seconds until the next try. An outage has few lines of its own."""
        if is_loss(error):
            return self._link.outage.lost(f"relay of {self.name}", error)
        pause = trouble.pause()
        level = logging.INFO if isinstance(error, Fenced) else logging.WARNING
        log.log(level, "relay of %s: %s; trying again in %.1f s", self.name, one_line(error), pause)
        return pause

    async def _work(self, upto: float | None) -> bool:
        """Work on one session of the source, until it fails or, with `upto`, all is delivered. False if another relay
        has the lock, and `upto` is given."""
        await asyncio.to_thread(_require, self._link, migrations.OUTBOX)
        if isinstance(self._target, QueueTarget):
            await asyncio.to_thread(_require, self._target.link, migrations.QUEUE)
        async with opened(self._link, "source") as session:
            source = Source(session)
            while not await source.lock():
                if upto is not None:
                    return False
                self._link.outage.answered(f"relay of {self.name}")
                await asyncio.sleep(LOCK_SECONDS)
            await source.listen()
            async with self._target.open(source, adopt=self._adopt) as target:
                self._adopt = False
                self._link.outage.answered(f"relay of {self.name}")
                log.info("this relay delivers the jobs of %s (outbox %s)", self.name, source.name)
                if upto is not None:
                    upto = await source.head()
                await _Rounds(source, target, self.counts, self._batch).run(upto)
        return True


@dataclass(slots=True)
class _Stayed:
    """A row that stayed: it waits for a key, or the application has locked it."""

    next_at: float
    order_key: str | None = None
    backoff: Backoff = field(default_factory=lambda: Backoff(first=0.1))


class _Rounds:
    """The rounds of one pair of sessions: read, deliver, delete."""

    def __init__(self, source: Source, target: Delivering, counts: Counts, batch: int) -> None:
        self._source = source
        self._target = target
        self._counts = counts
        self._batch = self._most = batch
        self._watermark = Watermark(sweep_every=math.inf)
        self._look_at = 0.0
        self._looking: str | None = None
        self._stayed: dict[int, _Stayed] = {}
        self._held: dict[str, int] = {}
        """For each order key the lowest id that is held back by a row before it."""
        self._idle = IDLE_FIRST

    async def run(self, upto: float | None) -> None:
        """Deliver until an error, or until no row up to this id is left but those that stay."""
        vain = 0
        while True:
            found, at_once = await self._round()
            vain = 0 if found else vain + 1
            if upto is not None and not any(row.id <= upto for row in found) and (not at_once or vain > VAIN_MOST):
                return
            if upto is None and not at_once:
                await self._source.stirs(self._pause(bool(found)))

    async def _round(self) -> tuple[list[StagedRow], bool]:
        """One batch. Returns the rows that went, and whether there may be more now."""
        now = monotonic()
        if now >= self._look_at:
            self._look_at = now + LOOK_SECONDS
            self._watermark.start_at_zero()
            self._looking = await self._target.now() if isinstance(self._target, QueueSession) else None
        [after] = self._watermark.starts([LANE], now)
        again = [id for id, stayed in self._stayed.items() if stayed.next_at <= now]
        batch = await self._source.read(after, again, self._most, BATCH_BYTES)
        full, repeat = self._note(batch, after, now)
        due = [row for row in batch.rows if (s := self._stayed.get(row.id)) is None or s.next_at <= now]
        freed = [self._free(self._stayed.pop(id).order_key) for id in set(again) - {row.id for row in due}]
        rows, held = _in_order(due)
        gone, more = await self._deliver(rows, held) if due else ([], False)
        if not full and self._looking is not None:
            began, self._looking = self._looking, None
            assert isinstance(self._target, QueueSession)
            await self._target.looked(began)
        self._counts.rounds += 1
        return gone, repeat or more or any(freed) or (full and bool(due))

    def _note(self, batch: Batch, after: int, now: float) -> tuple[bool, bool]:
        """Move the cursor. Returns whether there are more rows behind it, and whether to look again at once."""
        new = [row.id for row in batch.rows if row.id > after]
        most = self._most
        # What is left out was measured all the same: ask for about as many as there is room for.
        self._most = min(self._batch, 2 * (len(batch.rows) if batch.cut else most))
        full = batch.cut or len(new) >= most
        taken = {LANE: (len(new), new[-1])} if new else {}
        count = len(new) if full else most
        fetch = Fetch(batch.reading, [LANE], [count], {LANE}, taken, count)
        return full, self._watermark.fetched(fetch, now)

    async def _deliver(self, rows: list[StagedRow], held: list[StagedRow]) -> tuple[list[StagedRow], bool]:
        """Deliver these rows, but not those that are held back. Returns which are gone from the outbox, and whether
        others are to be read again at once."""
        delivery = await self._beside(self._target.deliver(rows)) if rows else Delivery()
        if held and isinstance(self._target, QueueSession):
            # One may have come before the row that it is behind was committed. What is known is remembered anew.
            delivery.delivered.extend(await self._beside(self._target.known(held)))
        for refusal in delivery.refused:
            log.warning("staged job %d (%s) is refused: %s", refusal.row.id, refusal.row.task, refusal.reason)
        gone = await self._source.settled(delivery.delivered, delivery.refused)
        self._counts.delivered += len(delivery.delivered)
        self._counts.refused += len(delivery.refused)
        untried = {row.uid for row in delivery.untried}
        stopped = {refusal.row.order_key for refusal in delivery.refused} - {None}
        freed = False
        for row in rows:
            if row.uid in gone:
                self._stayed.pop(row.id, None)
                freed |= self._free(row.order_key)
            elif row.order_key in stopped:
                held.append(row)
            elif row.uid in untried:
                if row.id not in self._stayed:
                    self._watermark.fall(LANE, row.id - 1)
            elif row.id in self._stayed or len(self._stayed) < AGAIN_MOST:
                stayed = self._stayed.setdefault(row.id, _Stayed(0.0, row.order_key))
                stayed.next_at = monotonic() + stayed.backoff.pause()
                stopped |= {row.order_key} - {None}
        for row in held:
            if row.uid not in gone and row.order_key is not None:
                self._hold(row.order_key, row.id)
                self._stayed.pop(row.id, None)
        return [row for row in (*rows, *held) if row.uid in gone], freed or bool(untried)

    def _hold(self, order_key: str, id: int) -> None:
        """The row with this id is held back. More keys than can be noted are found by the next look."""
        if order_key in self._held or len(self._held) < AGAIN_MOST:
            self._held[order_key] = min(id, self._held.get(order_key, id))

    def _free(self, order_key: str | None) -> bool:
        """A row with this order key is gone: read again what it has held back. Returns whether there is any."""
        id = None if order_key is None else self._held.pop(order_key, None)
        if id is not None:
            self._watermark.fall(LANE, id - 1)
        return id is not None

    async def _beside(self, step: Coroutine[Any, Any, T]) -> T:
        """Await the target, and keep the source's session meanwhile."""
        doing = asyncio.ensure_future(step)
        try:
            while not doing.done():
                await asyncio.wait([doing], timeout=PING_SECONDS)
                if not doing.done():
                    await self._source.ping()
            return doing.result()
        finally:
            if not doing.done():
                doing.cancel()
                await asyncio.wait([doing])

    def _pause(self, found: bool) -> float:
        """Seconds to wait for a notification: growing while nothing is found."""
        now = monotonic()
        self._idle = IDLE_FIRST if found else min(IDLE_MOST, 2 * self._idle)
        due = [stayed.next_at - now for stayed in self._stayed.values()]
        if (look := self._watermark.next_look(now)) is not None:
            due.append(look - now)
        return max(0.01, min([self._idle, *due]))


def _in_order(rows: Sequence[StagedRow]) -> tuple[list[StagedRow], list[StagedRow]]:
    """Apart: the rows that may go, and those that are behind a row with the same order key that is not among these."""
    going: set[tuple[str | None, int]] = set()
    free: list[StagedRow] = []
    held: list[StagedRow] = []
    for row in rows:
        if row.behind is None or (row.order_key, row.behind) in going:
            going.add((row.order_key, row.id))
            free.append(row)
        else:
            held.append(row)
    return free, held


def _link(dsn: str, outage: Outage) -> Link:
    return Link(embedded.resolve(normalize(dsn)), config().schema, outage=outage)


def _require(link: Link, line: migrations.Line) -> None:
    """Raise what `migrations.require` raises."""
    with psycopg.connect(link.dsn, **options(link, "pgqueue relay start") | {"prepare_threshold": None}) as conn:
        migrations.require(conn, link.schema, line)
