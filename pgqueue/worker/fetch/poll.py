"""A poll: a worker that was told nothing asks, now and then, whether anything has happened.

Part of the fetch, asked by the fetcher, which sends the polls and takes their answers. It decides only: it does no I/O
and has no clock (`now` is any monotonic time in seconds).

Polls are slow while notifications are known to come (`pace`), all lanes are known to be empty, no glance came since,
and no task is paused whose jobs a cursor may have passed. Each heartbeat then asks the same in its own message
(`Fetcher.probed`), so an idle worker that listens sends next to nothing. What that costs, and what not:

1. An answer that nothing has happened puts off the next slow poll to 1 to 1.6 times its pace after the *question*.
   Whether it is due is looked at with each ordinary poll. So without a single notification a job waits for two slow
   polls at most, whether heartbeats bring answers or not.
2. An answer is compared with the last fetch, as that of a poll is. If it is older than that fetch, it may cause a fetch
   for nothing, and never keeps one from being sent.
3. What is due at a time (a start at zero, a cursor that fell, a row that was passed over) comes at its time.
4. A heartbeat does not know which queues and tasks are paused. Lanes of paused queues are not known to be empty.

Rows that a poll finds show that not all is told (`Pace.untold`). But a fetch may see a job before the notification of
its COMMIT arrives. So they show it only if none has come `LATE_SECONDS` after that fetch.
"""

from __future__ import annotations

from math import inf
from random import uniform

from pgqueue.database.backoff import jittered

SLOW_MOST = 1.6
"""A slow poll is due after this multiple of its pace at most. What is left of two of them is for the polls between."""
LATE_SECONDS = 0.5
"""A fetch may see a job this long before the notification of its COMMIT arrives."""


class Polls:
    """When the next slow poll of one worker is due, and whether its polls find what was not told."""

    def __init__(self) -> None:
        self.slow_at = 0.0
        """When the next slow poll is due."""
        self._led = False
        """Whether a poll, and nothing that was told, has led to the fetches since."""
        self._untold_at = inf
        """When such a fetch was sent that has taken rows, if no notification has come since."""

    def told(self) -> None:
        """A notification has come, or another wake."""
        self._led, self._untold_at = False, inf

    def proved(self, sent: float, pace: float) -> None:
        """Nothing had happened at this time: the slow poll is put off. It comes two polls after its time at most."""
        self.slow_at = max(self.slow_at, sent + uniform(1.0, SLOW_MOST) * pace)

    def leads(self, *, alone: bool) -> None:
        """The answer of a poll leads to fetches. `alone`: nothing else does."""
        self._led = alone

    def fetched(self, sent: float, *, any: bool) -> None:
        """A fetch that was sent then has taken rows, if there were `any`."""
        if self._led and any:
            self._untold_at = min(self._untold_at, sent)

    def ended(self, now: float) -> bool:
        """The fetches that a poll has led to are over. Return whether one has found what no notification has told."""
        self._led = False
        untold = now > self._untold_at + LATE_SECONDS
        if untold:
            self._untold_at = inf
        return untold


def spaced(wanted: float, poll: float) -> float:
    """Seconds until the next look, if a fetch is wanted in `wanted` seconds.

    If that is near, the look is the fetch. Else it comes after a poll or more, at random, but not right before the
    fetch: it would find what the fetch finds.
    """
    if wanted <= 2 * poll:
        return wanted
    return uniform(max(poll, wanted / 2), 2 * poll) if wanted <= 4 * poll else jittered(poll)
