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
"""

from __future__ import annotations

import math
from collections.abc import Callable

from pgqueue.steady_clock import monotonic
from pgqueue.worker.settings import Settings

SLOW_TIMES = 5.0
UNTOLD_SECONDS = 600.0


class Pace:
    """The pace of one worker. `settings` are asked each time."""

    def __init__(self, settings: Callable[[], Settings]) -> None:
        self.hears: Callable[[], bool] = lambda: False
        """Whether notifications are known to come."""
        self._settings = settings
        self._untold_until = -math.inf

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
