"""The relay: takes staged jobs from the outbox of one database to a queue in another. Loses nothing, doubles nothing.

Started by `pgqueue relay`, or by an application in its event loop. Many relays of one source may run: one works.

**The naive version** takes an advisory lock at the source, reads, inserts at the target, remembers the ids, deletes. It
loses and doubles: a relay that stood still delivers again after its successor has delivered, deleted and forgotten;
ids that come again are taken for delivered; a commit that is not durable is lost after its row was deleted; a range
that is deleted takes rows along that were committed after the reading.

**One delivery:**

1. Source: one session has the lock, reads and deletes. It ends after 15 s without a statement.
2. Each session of the target draws an epoch above all others, commits it at the source, and raises the fence to it.
3. Then rows are read, in one snapshot, in the order of their ids. One with an order key may be held back (rounds.py).
   If not all that is committed is on disk, a commit of the relay's own takes it there before they are delivered.
4. Target, one durable transaction: lock the fence at its epoch; leave out what the memory knows, and remember that
   anew; insert the jobs; remember their uids.
5. Source, durable: delete what was delivered, by id and uid.
6. A look at the whole outbox, once a minute: every row is read, so every row of the memory that is still there is
   remembered anew. What was delivered before a look began, and not remembered anew by it, was absent when the look
   ended. It is forgotten when that is an hour ago (a setting). A row that was put aside is in no look, and may come
   back: what is to be forgotten is asked for among these rows first.

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
3. Raising the fence waits for the delivery that holds it. Afterwards no session with a lower epoch commits. If that
   delivery stands still, its session is ended, which undoes it (fence.py).
4. What a session delivers was read after its epoch was raised. So it has no row that was deleted before that.
5. So a row comes twice only if the memory has lost it in between. The memory loses a row only if the row was absent for
   the memory's age. A row that was absent in a committed state is in no later one, unless the source is set back by
   more than that age. The age is measured by the clock of the queue. If that is set back behind the looks that are
   kept, these are given up: what is remembered by the new clock would seem older than they are.
6. The lock decides only which relay works. Nothing above needs it.
7. Two databases share no name, so no fence and no look: a name follows from the place where a database is first used,
   or adopted (source.py). What was delivered under the name before is known by its uids. It is forgotten by looks at
   the adopted outbox, as in 5, unless the old name lives: its reports take that right back.

**Why no job is made of a transaction that a crash of the source undoes**, as it may with `synchronous_commit = off`.

1. What a snapshot sees as committed has its commit in the log, before the end of the log as it is read afterwards.
2. If the log is on disk up to there, so is that commit. Else the relay commits a message of its own: the log goes to
   disk in order, so its answer says that all before it is there. A synchronous standby is waited for, too: where the
   server has one, the relay always commits.
3. Waiting until the log writer comes by was tried: half of the jobs take twice as long, the worst eight times.

A simulator plays the scheme (tests/relay/test_scheme.py), and finds a fault if the fence, the uid, the fence for each
session, the durable commit or the look is taken out, or if a session that stands still is not ended.
"""

from __future__ import annotations

import asyncio
import logging
import math
from functools import partial

import psycopg

from pgqueue.config import config, normalize
from pgqueue.database import alarms, embedded, migrations, primary
from pgqueue.database.backoff import Backoff, is_loss, one_line, without_values
from pgqueue.database.dead_link import hang_up
from pgqueue.database.outage import Outage
from pgqueue.database.sessions import ROUND_TRIP_SECONDS, Link, options
from pgqueue.errors import Error, SchemaBehind, SchemaMissing
from pgqueue.jobs.values import Duration, seconds
from pgqueue.options import names_options
from pgqueue.relay.fence import Fenced, Held
from pgqueue.relay.rounds import Counts, Rounds
from pgqueue.relay.session import opened
from pgqueue.relay.source import Source, place
from pgqueue.relay.target import QueueTarget, Target
from pgqueue.steady_clock import monotonic

log = logging.getLogger("pgqueue")

BATCH = 1_000
MEMORY_SECONDS = 3_600.0
LOCK_SECONDS = 1.0
TROUBLE_MOST = 60.0
"""What no connection cures is tried again, and logged, this often."""
SCHEMA_MOST = 5.0
"""What may end by itself is tried again this often: tables are missing or older, and a deploy may be about to migrate
them; or a session that cannot be ended holds the fence."""


@names_options
class Relay:
    """Delivers the staged jobs of one source. `run` works until it is cancelled, which may happen at any moment.

    `source` is the DSN of the application's database. `target` is that of the queue, or another kind of `Target`.
    `memory` is how far, a duration, the source may be set back without a job coming twice.

        async with asyncio.TaskGroup() as group:
            relay = group.create_task(pgqueue.Relay(app_dsn, queue_dsn).run())
    """

    def __init__(
        self,
        source: str,
        target: str | Target,
        *,
        batch: int = BATCH,
        memory: Duration = MEMORY_SECONDS,
        adopt: bool = False,
    ) -> None:
        self.counts = Counts()
        self._link = _link(source, Outage())
        self.name = place(self._link.dsn)
        """The source, for people."""
        self._target = (
            QueueTarget(_link(target, self._link.outage), seconds(memory, "memory"), config().notify)
            if isinstance(target, str)
            else target
        )
        self._batch = batch
        self._adopt = adopt

    async def run(self) -> None:
        """Deliver for ever. In an outage, or if something else is wrong, wait and try again."""
        trouble = _Trouble(self.name)
        while True:
            before = self.counts.rounds
            try:
                await self._work(upto=None)
            except (psycopg.Error, OSError, Error) as error:
                if self.counts.rounds > before:
                    trouble = _Trouble(self.name)
                await asyncio.sleep(self._paused(error, trouble))

    async def once(self) -> bool:
        """Deliver what is staged now, and return. False if another relay works: then nothing was done."""
        return await self._work(upto=math.inf)

    def _paused(self, error: Exception, trouble: _Trouble) -> float:
        """Seconds until the next try. An outage has few lines of its own."""
        # It has ended both sessions: so neither is older than the end of an outage, and comes to it late.
        if is_loss(error):
            return self._link.outage.lost(f"relay of {self.name}", error)
        return trouble.met(error)

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
                await Rounds(self.name, source, target, self.counts, self._batch).run(upto)
            await self._unlock(source)
        return True

    async def _unlock(self, source: Source) -> None:
        """All is delivered, so a link that breaks here is no failure: the lock ends with its session."""
        try:
            await source.unlock()
        except (psycopg.Error, OSError) as error:
            if not is_loss(error):
                raise
            log.info("relay of %s: all is delivered, and its connection broke then: %s", self.name, one_line(error))


class _Trouble:
    """What no connection cures, since the last round that went well: when to try again, and what to say."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._backoff = Backoff(first=1.0, most=TROUBLE_MOST)
        self._said, self._said_at = "", 0.0

    def met(self, error: Exception) -> float:
        """Seconds until the next try. The same trouble is logged when it begins, and once a minute while it lasts."""
        pause, said = self._backoff.pause(), without_values(error)
        if isinstance(error, SchemaMissing | SchemaBehind | Held):
            pause = min(pause, SCHEMA_MOST)
        if said != self._said or monotonic() >= self._said_at + TROUBLE_MOST:
            self._said, self._said_at = said, monotonic()
            level = logging.INFO if isinstance(error, Fenced) else logging.WARNING
            log.log(level, "relay of %s: %s; it is tried again until it works", self._name, said)
        return pause


def _link(dsn: str, outage: Outage) -> Link:
    return Link(embedded.resolve(normalize(dsn)), config().schema, outage=outage)


def _require(link: Link, line: migrations.Line) -> None:
    """Raise what `migrations.require` raises. If the link is dead, OperationalError after a round trip's time."""
    how = options(link, "pgqueue relay start") | {"prepare_threshold": None}
    with (
        primary.connect(psycopg.Connection, link.address(), **how) as conn,
        alarms.after(ROUND_TRIP_SECONDS, partial(hang_up, conn)),
    ):
        migrations.require(conn, link.schema, line, needs="relay" if line is migrations.QUEUE else None)
