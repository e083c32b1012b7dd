"""Makes the ticks of schedules: each time of each schedule becomes one job. Runs in the worker that leads.

    declaration -settle-> schedule -read-> what is due -make-> tick, job, next time

Why each (schedule, time) is a job once, whichever workers make ticks, and how many. A tick is one statement and one
transaction: it locks the schedule's row, compares its next time and its line with what was read, inserts the job, and
sets the next time. Of two that read the same time one gets the row (SKIP LOCKED: the other does not wait, and reads
anew), or the other finds the time moved; a kill before the COMMIT leaves the row as it was, one after it the job. The
time moves forward only, but for a line that was changed, a row that was removed and added anew, and a clock that has
stepped back: for these (schedule, time) is a primary key besides, which a second job of that time would have to get
past.

Why none is left out. What was read is only a hint of when to wake: changes are told by NOTIFY, all rows are read anew
every 15 s, so that a lost notification or a clock that was set costs no more than that. The next time is computed from
the last one, never from now: what has passed meanwhile is there to be made, as `catch_up` says. Times are the
database's; between two looks at its clock ours only counts on.

Naive versions that double or lose: asking for what is due and enqueuing without the comparison (two do it); taking the
time now for the tick (two leaders a second apart); computing the next time from now (an outage loses, a clock set
back doubles); one transaction for the job and another for the row.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from math import inf
from time import monotonic
from typing import Any

import psycopg

from pgqueue.database.backoff import persist, wait
from pgqueue.database.sessions import Session
from pgqueue.errors import InvalidOption
from pgqueue.jobs.cron import parse, pending
from pgqueue.worker.state import WorkerState

log = logging.getLogger("pgqueue")

CHANGED = "schedules"
"""What a NOTIFY of `:scheduled` says when schedules were changed."""
BATCH = 500
"""How many ticks one transaction makes at most: so many jobs come at once of however long an outage."""
LOOK_SECONDS = 15.0
NONE_TIMES = 4
"""So much longer is a leader's pause while there is no schedule at all: adding the first one notifies."""
SETTLE_SECONDS, PRUNE_SECONDS = 60.0, 300.0
PRUNED_MOST = 20_000
# A row that is locked: asked for again soon at first, for most are let go at once, then once a second.
LOCKED_FIRST, LOCKED_MOST = 0.01, 1.0
# By so much the database's clock may differ from what it was to be by now: more, and it was set.
STEP_SECONDS = 5.0
# A next time that lies so far behind the one that is due next has seen a clock that was set back since.
AHEAD = timedelta(seconds=60)
# Reckoning a long outage must not stop the event loop for long.
TURN = 20

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(slots=True)
class Due:
    """A schedule as it was read."""

    name: str
    line: str
    tz: str
    catch_up: str
    next_at: datetime | None
    last_at: datetime | None
    since: datetime


@dataclass(frozen=True, slots=True)
class Move:
    """The ticks to make of a schedule now, and its next time."""

    due: Due
    ticks: Sequence[datetime]
    next_at: datetime | None

    def said(self) -> dict[str, Any]:
        return {
            "name": self.due.name,
            "line": self.due.line,
            "tz": self.due.tz,
            "expected": _written(self.due.next_at),
            "next": _next(self.next_at),
            "ats": [_written(tick) for tick in self.ticks],
        }


class Ticks:
    """Makes ticks over the given session while `leads()` says that this worker does it, and when told of late ones."""

    def __init__(
        self,
        session: Session,
        state: WorkerState,
        *,
        declared: Mapping[str, Mapping[str, Any]],
        leads: Callable[[], bool],
    ) -> None:
        self.made = 0
        """How many jobs this worker has made of ticks."""
        self._session = session
        self._state = state
        self._declared = json.dumps(declared, sort_keys=True) if declared else None
        self._declared_by: int | None = None
        self._leads = leads
        self._wake = asyncio.Event()
        self._asked = False
        self._schedules: dict[str, Due] = {}
        self._clock: tuple[datetime, float] = (EPOCH, monotonic())
        self._look_at = self._settle_at = self._prune_at = 0.0
        self._told, self._known = 1, 0
        """How often we were told of changes, and up to which of them what we know was read after."""
        self._locked = LOCKED_FIRST

    def wake(self) -> None:
        """Schedules were changed, this worker leads now, or it has another id."""
        self._told += 1  # no time to look at: the answer of a look under way, which may be older, would overwrite it
        self._wake.set()

    def overdue(self) -> None:
        """A tick is overdue, and the leader does not make it."""
        self._asked = True
        self.wake()

    async def run(self) -> None:
        """Declare, then tick until cancelled."""
        await persist(self._step, name="ticks")

    async def _step(self) -> None:
        self._wake.clear()
        await self._declare()
        if not (self._leads() or self._asked):
            await wait(self._wake, None)
            return
        self._asked = False
        seconds = await self.round()
        await wait(self._wake, seconds if self._leads() else None)

    async def _declare(self) -> None:
        """Say what our code declares, once for each id we have: a worker that was started later is right."""
        worker_id = self._state.id
        if self._declared is None or self._declared_by == worker_id:
            return
        digest = hashlib.sha256(self._declared.encode()).hexdigest()
        link = self._session.link
        await self._session.run(
            link.statement("ticks_declare", worker_id=worker_id, hash=digest, schedules=self._declared),
            link.statement("ticks_settle", own=None, notify=self._state.settings.notify),
        )
        self._declared_by = worker_id

    async def round(self) -> float:
        """Make what is due; the seconds to sleep until the next tick, or the next look."""
        if self._told != self._known or monotonic() >= self._look_at:
            await self._look()
        pause = inf
        while due := self._due(self._now()):
            if not await self._make(await self._moves(due)):
                pause = self._locked
                self._locked = min(LOCKED_MOST, 2 * self._locked)
                self._look_at = monotonic() + pause
                break
            self._locked = LOCKED_FIRST
        if pause == inf and (known := [each.next_at for each in self._schedules.values() if each.next_at]):
            pause = (min(known) - self._now()).total_seconds()
        return 0.0 if self._told != self._known else max(0.0, min(pause, self._look_at - monotonic()))

    def _due(self, now: datetime) -> list[Due]:
        return [each for each in self._schedules.values() if each.next_at is not None and each.next_at <= now]

    # What there is ---------------------------------------------------------------------------------------------------

    async def _look(self) -> None:
        """Read all schedules, and say of the new ones when they tick first."""
        link = self._session.link
        before, told = self._clock, self._told
        known = before[0] > EPOCH
        settle = monotonic() >= self._settle_at
        statements = [link.statement("ticks_settle", own=None, notify=False)] if settle else []
        if prune := monotonic() >= self._prune_at:
            statements.append(link.statement("ticks_prune", n=PRUNED_MOST))
        *done, rows = await self._session.run(*statements, link.statement("ticks_read"))
        if settle:
            self._settle_at = monotonic() + SETTLE_SECONDS
        if prune and done[-1][0][0] < PRUNED_MOST:
            self._prune_at = monotonic() + PRUNE_SECONDS
        self._known = told
        now, found = schedules(rows)
        self._clock = (now, monotonic())
        self._schedules = {each.name: each for each in found}
        self._look_at = monotonic() + (LOOK_SECONDS if found else NONE_TIMES * LOOK_SECONDS)
        stepped = (now - before[0]).total_seconds() - (monotonic() - before[1])
        if known and abs(stepped) > STEP_SECONDS:
            log.warning("the database's clock was set by %+.0f s", stepped)
            # After a step forward everything that is declared seems not to have been for long.
            self._settle_at = self._look_at = 0.0
            self._clock = (EPOCH, monotonic())
            await self._look()
            return
        if places := [each for each in found if misplaced(each, now, stepped=not known)]:
            await self._place(places, now)

    async def _place(self, places: Iterable[Due], now: datetime) -> None:
        said = [placed(each, now) for each in places]
        for each in said:
            if each["refused"]:
                log.error("schedule %r makes no ticks: %s", each["name"], each["refused"])
                del self._schedules[each["name"]]
        statement = self._session.link.statement("ticks_place", places=json.dumps(said))
        [[(names,)]] = await self._session.run(statement)
        for name in set(json.loads(names)) & self._schedules.keys():
            self._schedules[name].next_at = first(self._schedules[name], now)

    # What is due -----------------------------------------------------------------------------------------------------

    async def _moves(self, due: Sequence[Due]) -> list[Move]:
        """Each gets its share of a batch, so that one that was missed for long holds up no other."""
        now, share = self._now(), max(1, BATCH // len(due))
        moves = []
        for place, each in enumerate(due):
            moves.append(move(each, now, share))
            if place % TURN == TURN - 1:
                await asyncio.sleep(0)
        return moves

    async def _make(self, moves: Sequence[Move]) -> bool:
        """Make these ticks, in transactions of a batch; whether each was ours to make."""
        ours = True
        for batch in batches(moves):
            try:
                ours &= await self._send(batch)
            except (psycopg.DataError, psycopg.IntegrityError) as error:
                # A row written by hand has options that no job can have: it harms only itself.
                ours = False
                for each in batch:
                    await self._alone(each, error)
        return ours

    async def _send(self, batch: Sequence[Move]) -> bool:
        moves = json.dumps([each.said() for each in batch])
        statement = self._session.link.statement("ticks_make", moves=moves, notify=self._state.settings.notify)
        [[(names, jobs, now, _)]] = await self._session.run(statement)
        self._clock = (moment(now), monotonic())
        self.made += jobs
        done = set(json.loads(names))
        for each in batch:
            if each.due.name in done:
                each.due.next_at = each.next_at
                each.due.last_at = each.ticks[-1] if each.ticks else each.due.last_at
            if each.due.name not in done or each.next_at is None:
                self._schedules.pop(each.due.name, None)
        return len(done) == len(batch)

    async def _alone(self, each: Move, error: psycopg.Error) -> None:
        try:
            await self._send([each])
        except (psycopg.DataError, psycopg.IntegrityError) as again:
            error = again
            said = each.said() | {"next": _written(each.due.next_at), "refused": _line(error)}
            log.error("schedule %r makes no ticks: %s", each.due.name, said["refused"])
            await self._session.run(self._session.link.statement("ticks_place", places=json.dumps([said])))

    def _now(self) -> datetime:
        """The database's time, as far as we know it."""
        then, at = self._clock
        return then + timedelta(seconds=monotonic() - at)


# What every maker of ticks does; pgqueue.testing is another one -------------------------------------------------------


def schedules(rows: Iterable[Sequence[Any]]) -> tuple[datetime, list[Due]]:
    """What `ticks_read` has found: the time, and the schedules."""
    found, now = [], EPOCH
    for name, line, tz, catch_up, next_at, last_at, since, at in rows:
        now = moment(at)
        if name is not None:
            known = moment(next_at) if next_at is not None else None
            last = moment(last_at) if last_at is not None else None
            found.append(Due(name, line, tz, catch_up, known, last, moment(since)))
    return now, found


def misplaced(due: Due, now: datetime, *, stepped: bool = True) -> bool:
    """Whether its next time is not known, or cannot be, or was reckoned by a clock that was set back since: that is
    looked for only where the clock may have `stepped`, for it costs 20 µs each."""
    try:
        when = parse(due.line, due.tz, due.catch_up)
    except InvalidOption:
        return True
    if due.next_at is None:
        return True
    if not stepped or due.next_at <= now + AHEAD:
        return False
    expected = when.next(now + AHEAD)
    return expected is not None and expected < due.next_at


def first(due: Due, now: datetime) -> datetime | None:
    """The next time of a schedule that has none, or none that holds."""
    return parse(due.line, due.tz, due.catch_up).next(min(due.since, now) if due.next_at is None else now)


def placed(due: Due, now: datetime) -> dict[str, Any]:
    """What `ticks_place` is to say of it."""
    said = {"name": due.name, "line": due.line, "tz": due.tz, "expected": _written(due.next_at), "refused": None}
    try:
        parse(due.line, due.tz, due.catch_up)
    except InvalidOption as error:
        return said | {"next": _written(due.next_at), "refused": str(error)}
    return said | {"next": _next(first(due, now))}


def move(due: Due, now: datetime, most: int) -> Move:
    """What to do about one that is due."""
    assert due.next_at is not None
    return Move(due, *pending(parse(due.line, due.tz, due.catch_up), due.next_at, now, most))


def batches(moves: Sequence[Move]) -> Iterable[list[Move]]:
    """In pieces of at most BATCH ticks."""
    batch: list[Move] = []
    ticks = 0
    for each in moves:
        ticks += max(1, len(each.ticks))
        if batch and ticks > BATCH:
            yield batch
            batch, ticks = [], max(1, len(each.ticks))
        batch.append(each)
    if batch:
        yield batch


def moment(microseconds: int) -> datetime:
    """A time as `ticks_read` and `ticks_make` give it."""
    return EPOCH + timedelta(microseconds=microseconds)


def _written(at: datetime | None) -> str | None:
    return None if at is None else at.isoformat()


def _next(at: datetime | None) -> str:
    return "infinity" if at is None else at.isoformat()


def _line(error: psycopg.Error) -> str:
    return (error.diag.message_primary or str(error)).splitlines()[0]
