"""What a worker knows of an outage: it paces new connections, and says once that the database is lost and back.

Used by `sessions`, and by what opens connections without it (the listener, the registration). Every session of a
worker has a name, and a back-off under this name. Called from any thread.

Why no session tries too often, and none waits too long:

1. Only an answered statement resets a back-off. A connection that opens and then breaks does not, nor does a step of a
   service that has sent nothing.
2. A session that was lost before, and was answered since, begins at the first pause again.
3. When one session is answered, the others try at once. The heartbeat tries each second, the others more seldom.
4. Services that share a session share its back-off. So the tries do not grow with the number of services.

What is said, however many sessions are lost: one line when the first is lost, one when none is any more, and at most
one a minute in between. That the database is read only is said at once, for another cause may have come first. A
session that has not tried for a while counts as not wanted: it holds up no line.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from pgqueue.database.backoff import Backoff, one_line, read_only
from pgqueue.manual import Symptom, at_night
from pgqueue.steady_clock import monotonic

log = logging.getLogger("pgqueue")

SAID_SECONDS = 60.0
"""While the database is away, a line comes once in this time."""
HEED_SECONDS = 0.2
"""A session that waits heeds so often that another one was answered."""
LOST = "the database is lost (%s): %s; trying again until it is back; see " + at_night(Symptom.FAILED_OVER)
READ_ONLY = "the database is read only (%s): %s; nothing is taken until that is lifted"
UNWANTED_SECONDS = 75.0
"""A session that has not tried for so long is not wanted: no pause and no message of a worker takes this long."""


@dataclass(slots=True)
class _Lost:
    """A session that was lost, and has not been answered since."""

    backoff: Backoff
    tried_at: float
    next_at: float


class Outage:
    """The lost sessions of one worker, by name. `clock` is for tests."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._lost: dict[str, _Lost] = {}
        self._since = self._said_at = 0.0
        self._said = False
        """Whether a line says that these sessions are lost."""
        self._over_at = -inf
        """When the last outage was over."""
        self._fenced = False
        """Whether a session was lost since because the database is read only."""

    def lost(self, name: str, error: BaseException, most: float = 5.0, *, heard_at: float | None = None) -> float:
        """The session of this name was lost, or could not be opened. Returns the pause, `most` seconds at most, before
        its next try. `heard_at`: when its connection was answered last, by `monotonic`; None if it was not."""
        with self._lock:
            now, fenced = self._clock(), read_only(error)
            if not self._wanted(now):
                self._since, self._fenced, self._said = now, False, False
            is_news = heard_at is None or heard_at > self._over_at
            if (is_news and not self._said) or (fenced and not self._fenced):
                self._said_at, self._fenced, self._said = now, fenced, True
                log.warning(READ_ONLY if fenced else LOST, name, one_line(error))
            session = self._lost.setdefault(name, _Lost(Backoff(most=most), now, now))
            pause = session.backoff.pause()
            session.tried_at, session.next_at = now, now + pause
            if self._said and now - self._said_at >= SAID_SECONDS:
                self._said_at = now
                names = ", ".join(self._wanted(now))
                how = "read only" if fenced else "away"
                log.warning("the database is %s for %.0f s (%s): %s", how, now - self._since, names, one_line(error))
            return pause

    def answered(self, name: str) -> None:
        """The server has answered a statement of this session: the others that are lost may try at once."""
        if name not in self._lost:  # as always but in an outage, so without the lock
            return
        with self._lock:
            now = self._clock()
            there = self._lost.pop(name, None) is not None
            for session in self._lost.values() if there else ():
                session.next_at = now
            if there and self._said and not self._wanted(now):
                self._over_at = now
                log.warning("the database is back after %.1f s", now - self._since)

    def is_on(self) -> bool:
        """Whether a session that is wanted was lost, and has not been answered since."""
        with self._lock:
            return bool(self._wanted(self._clock()))

    def read_only(self) -> bool:
        """Whether sessions are lost, and the database is read only."""
        with self._lock:
            return self._fenced and bool(self._wanted(self._clock()))

    def pause(self, name: str) -> float:
        """Seconds before this session may be opened; 0 if it was not lost."""
        session = self._lost.get(name)
        return 0.0 if session is None else max(0.0, session.next_at - self._clock())

    async def waited(self, name: str) -> None:
        """Wait until this session may be opened."""
        while pause := self.pause(name):  # noqa: ASYNC110 (another session's thread shortens it)
            await asyncio.sleep(min(pause, HEED_SECONDS))

    def _wanted(self, now: float) -> list[str]:
        """The lost sessions that are still wanted; the others are forgotten."""
        for name in [name for name, one in self._lost.items() if now - one.tried_at > UNWANTED_SECONDS]:
            del self._lost[name]
        return list(self._lost)
