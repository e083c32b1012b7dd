"""Makes the ticks of schedules: each time of each schedule becomes one job. Runs in the worker that leads.

    declaration -settle-> schedule -read-> what is due -make-> tick, job, next time

Why each (schedule, time) becomes a job at most once, however many workers make ticks:
1. A tick is one statement and one transaction. It locks the schedule's row and compares the row's next time and `line`
   with those that were read. Then it inserts the job and sets the next time.
2. If two workers have read the same time, one gets the row. The other one skips the locked row (SKIP LOCKED) or finds
   the time moved; then it reads the schedules again.
3. A kill before the COMMIT leaves the row as it was. A kill after the COMMIT leaves the job and the next time.
4. The next time moves only forward. Exceptions are a changed `line`, a schedule removed and added again, and a database
   clock that stepped back. In these cases the primary key (schedule, time) of table `tick` prevents a second job.

Why no time is left out:
1. The times that were read only say when to wake up. Changes are notified, and all rows are read again every 15 s. A
   lost notification or a clock that was set costs no more than that.
   - Each answer says the database's time. If that is not the expected time, all rows are read again at once.
   - The time that is expected stays the old one until that reading has judged the step. If the answer to a tick
     replaced it, the step would look like no step.
2. The next time is computed from the last one, never from now. Times that have passed meanwhile are made as `catch_up`
   says.
3. All times are the database's. Between two looks at its clock our own clock only counts on.

Naive versions that double or lose jobs:
- Enqueue what is due without the comparison: two workers do it.
- Take the present time as the tick's time: two leaders are a second apart.
- Compute the next time from now: an outage loses ticks, a clock that was set back doubles them.
- Use one transaction for the job and another one for the row.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from math import inf
from typing import Any

import psycopg

from pgqueue.database.row_errors import is_about_row, refuses_row
from pgqueue.database.sessions import Session
from pgqueue.errors import InvalidOption
from pgqueue.jobs.cron import parse, pending
from pgqueue.jobs.values import UNIX_EPOCH
from pgqueue.steady_clock import monotonic
from pgqueue.worker.mover import Mover
from pgqueue.worker.state import WorkerState

log = logging.getLogger("pgqueue")

CHANGED = "schedules"
"""The payload of a NOTIFY of `:scheduled` when schedules were changed."""
BATCH = 500
"""One transaction makes at most this many ticks, however long the outage was."""
LOOK_SECONDS = 15.0
NONE_TIMES = 4
"""While there is no schedule at all, the leader's pause is this many times longer: adding the first one notifies."""
SETTLE_SECONDS = 60.0
# If a row is locked, it is tried again soon, because most locks end at once. Later it is tried once a second.
LOCKED_FIRST, LOCKED_MOST = 0.01, 1.0
# If the database's clock differs by more than this from the expected time, it was set.
STEP_SECONDS = 5.0
# If a next time is further ahead than this, though the schedule has an earlier one, the clock was set back meanwhile.
AHEAD = timedelta(seconds=60)
# After this many schedules the event loop gets a turn: computing the ticks of a long outage must not block it.
TURN = 20


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
    """The ticks to make now for a schedule, and its next time."""

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
    """Makes ticks over the given session while this worker leads, and once after `overdue` was called."""

    def __init__(
        self,
        session: Session,
        state: WorkerState,
        *,
        declared: Mapping[str, Mapping[str, Any]],
        leads: Callable[[], bool],
    ) -> None:
        self.made = 0
        """Number of jobs this worker has made from ticks."""
        self._session = session
        self._state = state
        self._mover = Mover(session, notify=state.settings.notify)
        self._declared = json.dumps(declared, sort_keys=True) if declared else None
        self._declared_by: int | None = None
        self._leads = leads
        self.woken = asyncio.Event()
        self._asked = False
        self._schedules: dict[str, Due] = {}
        self._clock: tuple[datetime, float] = (UNIX_EPOCH, monotonic())
        self._look_at = self._settle_at = 0.0
        self._told, self._known = 1, 0
        """Number of reported changes, and of those reported before the schedules in memory were read."""
        self._locked = LOCKED_FIRST

    def wake(self) -> None:
        """Schedules were changed, this worker leads now, or it has another id."""
        # A counter, because the answer of a look under way may be older than this change. A time would be overwritten.
        self._told += 1
        self.woken.set()

    def overdue(self) -> None:
        """A tick is overdue because the leader does not make it: this worker makes it."""
        self._asked = True
        self.wake()

    async def round(self) -> float:
        """Declare the schedules, then make the ticks that are due, if that is this worker's to do; answer the seconds
        until the next tick or the next look."""
        await self._declare()
        if self._leads() or self._asked:
            seconds = await self.make()
            self._asked = False  # after it: if it fails, it is tried again
            if self._leads():
                return seconds
        return inf

    async def _declare(self) -> None:
        """Write the schedules our code declares, once per worker id. If workers disagree, the one started last wins."""
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

    async def make(self) -> float:
        """Make the ticks that are due; return the seconds to sleep until the next tick or the next look."""
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
        """Read all schedules; write the first time of new ones."""
        link = self._session.link
        before, told = self._clock, self._told
        known = before[0] > UNIX_EPOCH
        settle = monotonic() >= self._settle_at
        statements = [link.statement("ticks_settle", own=None, notify=False)] if settle else []
        *_, rows = await self._session.run(*statements, link.statement("ticks_read"))
        if settle:
            self._settle_at = monotonic() + SETTLE_SECONDS
        self._known = told
        now, found = schedules(rows)
        self._clock = (now, monotonic())
        self._schedules = {each.name: each for each in found}
        look = LOOK_SECONDS if found else NONE_TIMES * LOOK_SECONDS
        self._look_at = monotonic() + self._state.pace.later(look)
        stepped = (now - before[0]).total_seconds() - (monotonic() - before[1])
        if known and abs(stepped) > STEP_SECONDS:
            log.warning("the database's clock was set by %+.0f s", stepped)
            # After a step forward all declarations look old. Settling at once renews them.
            self._settle_at = self._look_at = 0.0
            self._clock = (UNIX_EPOCH, monotonic())
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
        """Each schedule gets an equal share of a batch, so that one with many missed times holds up no other."""
        now, share = self._now(), max(1, BATCH // len(due))
        moves = []
        for place, each in enumerate(due):
            moves.append(move(each, now, share))
            if place % TURN == TURN - 1:
                await asyncio.sleep(0)
        return moves

    async def _make(self, moves: Sequence[Move]) -> bool:
        """Make these ticks, one transaction a batch; return whether this worker made all of them."""
        ours = True
        for batch in batches(moves):
            try:
                ours &= await self._send(batch)
            except psycopg.Error as error:
                ours = False
                # A schedule written by hand may have options that no job can have: it must harm only itself.
                await self._mover.divide(error, batch, self._send, self._refuse)
        return ours

    async def _send(self, batch: Sequence[Move]) -> bool:
        moves = json.dumps([each.said() for each in batch])
        statement = self._session.link.statement("ticks_make", moves=moves, notify=self._state.settings.notify)
        [[(names, jobs, now, _)]] = await self._session.run(statement)
        self._take_time(moment(now))
        self.made += jobs
        done = set(json.loads(names))
        for each in batch:
            if each.due.name in done:
                each.due.next_at = each.next_at
                each.due.last_at = each.ticks[-1] if each.ticks else each.due.last_at
            if each.due.name not in done or each.next_at is None:
                self._schedules.pop(each.due.name, None)
        return len(done) == len(batch)

    async def _refuse(self, each: Move, error: psycopg.Error) -> None:
        """The ticks of this schedule are refused by themselves. If the server cannot store them, it makes none any
        more."""
        about = is_about_row(error, self._session.link.schema)
        if about is None:
            about = await self._unreadable(each)
        if not about:  # a trigger, or another table: it is tried again with the next round
            log.error("the ticks of schedule %r cannot be made now: %s", each.due.name, _line(error))
            return
        said = each.said() | {"next": _written(each.due.next_at), "refused": _line(error)}
        log.error("schedule %r makes no ticks: %s", each.due.name, said["refused"])
        await self._session.run(self._session.link.statement("ticks_place", places=json.dumps([said])))

    def _take_time(self, now: datetime) -> None:
        """Go on from this time of the database. If its clock was set, a look comes first, which judges that."""
        if abs((now - self._now()).total_seconds()) > STEP_SECONDS:
            self._look_at = 0.0
        else:
            self._clock = (now, monotonic())

    async def _unreadable(self, each: Move) -> bool:
        """Whether the server cannot even read what the jobs of this schedule would be."""
        try:
            await self._session.run(self._session.link.statement("ticks_readable", schedule=each.due.name))
        except psycopg.Error as error:
            if not refuses_row(error):
                raise
            return True
        return False

    def _now(self) -> datetime:
        """The database's time, as last read and counted on since."""
        then, at = self._clock
        return then + timedelta(seconds=monotonic() - at)


# Shared with pgqueue.testing, which makes ticks, too ------------------------------------------------------------------


def schedules(rows: Iterable[Sequence[Any]]) -> tuple[datetime, list[Due]]:
    """Turn the rows of `ticks_read` into the database's time and the schedules."""
    found, now = [], UNIX_EPOCH
    for name, line, tz, catch_up, next_at, last_at, since, at in rows:
        now = moment(at)
        if name is not None:
            known = moment(next_at) if next_at is not None else None
            last = moment(last_at) if last_at is not None else None
            found.append(Due(name, line, tz, catch_up, known, last, moment(since)))
    return now, found


def misplaced(due: Due, now: datetime, *, stepped: bool = True) -> bool:
    """Whether the schedule's next time is unknown, cannot be computed, or comes from a clock that was set back since.

    The last is checked only if the clock may have `stepped`, because the check takes time for every schedule.
    """
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
    """The next time of a schedule that has none, or has a wrong one."""
    return parse(due.line, due.tz, due.catch_up).next(min(due.since, now) if due.next_at is None else now)


def placed(due: Due, now: datetime) -> dict[str, Any]:
    """The schedule's entry for `ticks_place`: its next time, or why it is refused."""
    said = {"name": due.name, "line": due.line, "tz": due.tz, "expected": _written(due.next_at), "refused": None}
    try:
        parse(due.line, due.tz, due.catch_up)
    except InvalidOption as error:
        return said | {"next": _written(due.next_at), "refused": str(error)}
    return said | {"next": _next(first(due, now))}


def move(due: Due, now: datetime, most: int) -> Move:
    """The ticks to make for a schedule that is due, `most` of them at most."""
    assert due.next_at is not None
    return Move(due, *pending(parse(due.line, due.tz, due.catch_up), due.next_at, now, most))


def batches(moves: Sequence[Move]) -> Iterable[list[Move]]:
    """Group moves into batches of at most BATCH ticks."""
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
    """A time from the microseconds since 1970 that `ticks_read` and `ticks_make` return."""
    return UNIX_EPOCH + timedelta(microseconds=microseconds)


def _written(at: datetime | None) -> str | None:
    return None if at is None else at.isoformat()


def _next(at: datetime | None) -> str:
    return "infinity" if at is None else at.isoformat()


def _line(error: psycopg.Error) -> str:
    return (error.diag.message_primary or str(error)).splitlines()[0]
