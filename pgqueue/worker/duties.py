"""The duties of a worker: what is done now and then, by the worker that leads or by each. `services` has the table.

Each duty has a task of its own. One loop that awaited them in turn would hold up all behind one that waits for a lock.
A service has a `round`, which does what there is to do and answers the seconds until the next one. When that is, and
what follows after a failure, is the same for all, and is decided here:

1. A worker that leads does the leader's duties. Another one does them seldom, because the leader may not do its duty
   although it lives. What needs no leader each worker does for itself.
2. After a failure only this duty pauses. A right that the role lacks is said once, with the GRANT, and tried again.
3. The last run, its duration and the last error go with the worker's heartbeat: no statement of their own.

**Housekeeping** is what no job waits for. It has one session for all, and no claim waits for a table of its own.
Why its duties may share that session:

1. Each message is a transaction of its own, with its COMMIT. What a duty has to do in one transaction is one message.
   So messages of two duties may take turns in any order, and a suspended process holds no lock.
2. The session gives turns in the order in which they are asked for. So between two messages of a duty each other duty
   that waits sends one: a long walk, or an operation of many steps, holds up nothing for longer than a message.
3. A message waits 2 s at most for a lock, and runs 30 s at most (`sessions_settings`). Then it fails, and its duty
   pauses, ever longer. While a table is locked, the other duties are late by that, and no job is.
4. An error closes the connection. No duty keeps anything there from one message to the next.

The leader's session stays open, because it measures every few seconds. Any other worker closes its own when no round is
under way.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

import psycopg

from pgqueue.database.backoff import BACKOFF_MOST, described, hides_rows, jittered, persist, wait
from pgqueue.database.grants import lacks
from pgqueue.database.sessions import Session
from pgqueue.database.triggers import trigger_of
from pgqueue.plain_text import plain
from pgqueue.steady_clock import monotonic

log = logging.getLogger("pgqueue")

OTHERS_SECONDS = 300.0
REFUSED_SECONDS = 120.0
"""The pause if the role lacks a right."""
PAUSE_MOST = 60.0
"""The longest pause of housekeeping after failures."""
LOOK_SECONDS = 3_600.0
"""A loop looks at its times at least so often. A timer cannot wait for ever."""
REST_SECONDS = 5.0
"""A loop that rests looks so often whether it may go on."""
ERROR_MOST = 400
"""The characters of an error that a heartbeat tells."""


@dataclass(frozen=True, slots=True)
class Duty:
    """What is done, and how often. `round` answers the seconds until the next round; None: once or twice `every`. The
    right that each duty needs is the worker's own (`pgqueue grants --for work`).

    - `others`: a worker that does not lead does it after once or twice so many seconds. None: each worker does it for
      itself.
    - `first`: so long, or twice, a worker waits with it that has just begun, or has taken the lead.
    - `woken`: the service sets it to be asked at once. A duty of the leader with `first` has none.
    - `rests`: while nothing happens, a worker for a database that sleeps does it right after a heartbeat (see `pace`).
    - `housekeeping`: no job waits for it. Whatever fails in it, the worker goes on.
    """

    name: str
    round: Callable[[], Awaitable[float | None]]
    every: float = inf
    others: float | None = OTHERS_SECONDS
    first: float = 0.0
    woken: asyncio.Event = field(default_factory=asyncio.Event)
    housekeeping: bool = False
    rests: bool = False


@dataclass(frozen=True, slots=True)
class Report:
    """What became of a duty here. Times are of `monotonic`."""

    ran_at: float | None = None
    """When the last round ended that did not fail."""
    took: float = 0.0
    error: str | None = None
    """The last one, however long ago."""
    failed_at: float = 0.0
    failing_since: float | None = None
    """Since when each round fails; None: the last one did not."""

    def said(self, name: str, now: float) -> list[Any]:
        """What a heartbeat tells: the name; how many seconds ago the last run was, and how long it took; the last
        error, and how long ago; for how long each round has failed."""
        found: list[Any] = [name, _ago(now, self.ran_at), round(self.took, 6)]
        if self.error is not None:
            found += [self.error, _ago(now, self.failed_at), _ago(now, self.failing_since)]
        return found


class DutyLoop:
    """Does one duty, when it is due or its service asks for it."""

    def __init__(self, duty: Duty, duties: Duties) -> None:
        self.duty = duty
        self.report = Report()
        self._duties = duties
        self._at = monotonic() + jittered(duty.first)
        """When the next round is due, if it is this worker's to do."""
        self._others_at = duties.seldom(duty, monotonic())
        """When it is due here although another worker leads."""
        self._refused = False

    def led(self) -> None:
        """This worker leads now: look soon what the last leader has left undone."""
        if self.duty.others is not None:
            now = monotonic()
            soon = now + jittered(self.duty.first)
            self._at = soon if self._at <= now else min(self._at, soon)  # it may have been due long ago, elsewhere
            self.duty.woken.set()

    async def run(self) -> None:
        """Do it until cancelled."""
        spare = self.duty.housekeeping
        most = PAUSE_MOST if spare else BACKOFF_MOST
        await persist(self._step, name=self.duty.name, past_data=True, only_counts=spare, most=most)

    async def _step(self) -> None:
        await self._wait()
        began = self._at = monotonic()  # until it has gone well it is due, also if it was not, and its service asked
        self._others_at = self._duties.seldom(self.duty, began)
        try:
            seconds = await self._duties.done(self.duty)
        except Exception as error:
            if not isinstance(error, psycopg.errors.InsufficientPrivilege) or trigger_of(error) is not None:
                self._failed(described(error))
                raise
            why = described(error)
            await self._pause(why if hides_rows(error) else lacks(self._duties.role(), f"do this ({why})", "work"))
        else:
            now, self._refused = monotonic(), False
            self._at = now + (jittered(self.duty.every) if seconds is None else seconds)
            self.report = replace(self.report, ran_at=now, took=now - began, failing_since=None)

    async def _wait(self) -> None:
        """Wait until it is due. If its service asks, it is due at once, where it is this worker's to do."""
        duty = self.duty
        while (left := self._due() - monotonic()) > 0:
            woken = await wait(duty.woken, min(left, LOOK_SECONDS))
            duty.woken.clear()
            if woken and self._ours() and (duty.others is None or not duty.first):
                break
        duty.woken.clear()  # before the round: what comes meanwhile is about a later one

    def _ours(self) -> bool:
        return self.duty.others is None or self._duties.leads()

    def _due(self) -> float:
        due = self._at if self._ours() else self._others_at
        return max(due, monotonic() + REST_SECONDS) if self.duty.rests and self._duties.rests() else due

    async def _pause(self, said: str) -> None:
        """The role lacks a right. Say so, once, and try again later, whatever the service is told meanwhile."""
        self._failed(said)
        if not self._refused:
            self._refused = True
            log.error("%s: %s", self.duty.name, said)
        await asyncio.sleep(REFUSED_SECONDS)

    def _failed(self, said: str) -> None:
        now, since = monotonic(), self.report.failing_since
        # What PostgreSQL can store as JSON: the heartbeat must not fail for it.
        error = plain(said[:ERROR_MOST])
        self.report = replace(self.report, error=error, failed_at=now, failing_since=now if since is None else since)


class Duties:
    """The duties of one worker. Housekeeping goes over the session given."""

    def __init__(
        self,
        table: Iterable[Duty],
        housekeeping: Session,
        *,
        leads: Callable[[], bool],
        role: Callable[[], str],
        rests: Callable[[], bool] = lambda: False,
    ) -> None:
        self.leads, self.role, self.rests = leads, role, rests
        self._began, self._period = monotonic(), jittered(OTHERS_SECONDS)
        self.loops = [DutyLoop(duty, self) for duty in table]
        self._session = housekeeping
        self._under_way = 0
        """How many rounds of housekeeping."""

    def led(self) -> None:
        """This worker leads now."""
        for loop in self.loops:
            loop.led()

    def seldom(self, duty: Duty, now: float) -> float:
        """When a worker that does not lead does this next. All housekeeping comes at one time: one connection serves
        it."""
        if not duty.housekeeping or duty.others != OTHERS_SECONDS:
            return now + jittered(duty.others or 0.0)
        return self._began + self._period * (1 + (now - self._began) // self._period)

    def said(self) -> str | None:
        """What the heartbeat tells, as JSON: of the leader all, of another worker what fails of the duties that each
        worker has. From any thread."""
        now, leads = monotonic(), self.leads()
        told = [
            report.said(duty.name, now)
            for duty, report in [(loop.duty, loop.report) for loop in self.loops]
            if (report != Report() if leads else duty.others is None and report.failing_since is not None)
        ]
        return json.dumps(told) if told else None

    async def done(self, duty: Duty) -> float | None:
        """Do one round. After housekeeping the session is closed, unless this worker leads or another round goes on."""
        if not duty.housekeeping:
            return await duty.round()
        self._under_way += 1
        try:
            return await duty.round()
        finally:
            self._under_way -= 1
            if not self._under_way and not self.leads():
                await self._session.rest()


def _ago(now: float, then: float | None) -> float | None:
    return None if then is None else round(now - then, 1)
