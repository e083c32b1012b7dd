"""How often a worker asks the database while there is nothing to do.

Made with the worker's state, and asked by its services. Sends nothing. On the event loop.

Where notifications are known to come, a poll only finds what was not told. So it comes after `SLOW_TIMES` times `poll`,
once or twice. That is the longest time that a job waits whose notification was lost. "Known" means all of these:

1. This worker's listener works, and its NOTIFY is on (`hears`, which `services` sets). A listener that breaks says so
   at once. If its socket is half open, that is noticed within 30 s; until then the slow poll finds jobs.
2. Less than half of the server's NOTIFY queue is in use. Beyond 0.9 nothing is notified.
3. No poll has found anything that was not told, in the last `UNTOLD_SECONDS`. An application may insert rows by itself,
   or have NOTIFY off. Then its first job waits for a slow poll, and the next ones for polls as they were set.

If one of them does not hold, each poll comes after `poll`, once or twice.

**A database that sleeps** (`idle`) is left alone while nothing happens: no job is held here, and no notification has
come for `STILL_SECONDS`. Polls and heartbeats are at least `idle` apart by the settings. All else that a worker does
now and then comes right after a heartbeat, when the database is awake anyway (`rests`, `later`). What has a time keeps
it, and wakes the database.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from pgqueue.steady_clock import monotonic
from pgqueue.worker.settings import BEATS, Settings

SLOW_TIMES = 5.0
UNTOLD_SECONDS = 600.0
STILL_SECONDS = 60.0
WINDOW_SECONDS = 10.0
"""For so long after a heartbeat a worker at rest does what is due."""
AFTER_SECONDS = 1.0


class Pace:
    """The pace of one worker. `settings` are asked each time."""

    def __init__(self, settings: Callable[[], Settings]) -> None:
        self.hears: Callable[[], bool] = lambda: False
        """Whether notifications are known to come."""
        self.busy: Callable[[], bool] = lambda: False
        """Whether a job is held here."""
        self._stirred_at = self._beat_at = monotonic()
        self._settings = settings
        self._untold_until = -math.inf

    def stirred(self) -> None:
        """Something has happened."""
        self._stirred_at = monotonic()

    def beat(self, sent: float) -> None:
        """A heartbeat that was sent then has gone through."""
        self._beat_at = sent

    @property
    def still(self) -> bool:
        """Whether a database that sleeps is left alone now."""
        idle = self._settings().idle
        if idle and self.busy():
            self.stirred()
        return idle > 0 and monotonic() > self._stirred_at + STILL_SECONDS

    def rests(self) -> bool:
        """Whether what is due waits for the next heartbeat. If that does not come, it does not wait."""
        return self.still and WINDOW_SECONDS <= monotonic() - self._beat_at < self._every() + WINDOW_SECONDS

    def later(self, seconds: float) -> float:
        """A pause of so many seconds: up to a heartbeat after it, if this worker is at rest."""
        if not self.still:
            return seconds
        every, left = self._every(), self._beat_at + AFTER_SECONDS - monotonic()
        return max(seconds, left + every * math.ceil((seconds - left) / every))

    def _every(self) -> float:
        """Seconds from one heartbeat to the next."""
        return self._settings().lease / BEATS

    def untold(self) -> None:
        """A poll has found what no notification had told."""
        self._untold_until = monotonic() + UNTOLD_SECONDS

    @property
    def told(self) -> bool:
        """Whether all that happens is told by a notification, as far as this worker knows."""
        return self.hears() and monotonic() >= self._untold_until

    @property
    def poll(self) -> float:
        """Seconds from one poll to the next, once or twice."""
        poll = self._settings().poll
        return SLOW_TIMES * poll if self.told else poll
