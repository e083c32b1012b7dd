"""Which jobs are blocked although their key has had room for a while. No I/O; `depth` looks, and tells what it saw.

The unblocking of a job follows the end of the holder within milliseconds, and the sweep finds within 5 s what it
missed. So a key that has room while a job waits is either just being handed on, or something does not work: the sweep,
a worker's session for unblocking, the notification of a rate. The same holds if all slots that could take the job are
busy.

1. A look finds keys with room, and the first waiter of each.
2. If a later look finds the same waiter first, and the key has room again, no look in between having seen it otherwise,
   the job counts as waiting since the first of these looks.
3. It is told after two intervals of the sweep. A key that is handed on at the very moment of two looks has another
   first waiter by then, so it is not told.

All keys are looked at in turn, some at each look, and those that had room at the last look each time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

KEYS_MOST = 1_000
ROOM_SECONDS = 10.0
"""Two intervals of the sweep (`concurrency/sweep`)."""


class LongestBlocked:
    """The keys that had room at the last look, each with its first waiter, and since when."""

    def __init__(self) -> None:
        self._after = ""
        self._roomy: dict[str, tuple[int, str, float]] = {}

    def asks(self) -> dict[str, Any]:
        """The parameters of `depth_blocked`."""
        return {"after": self._after, "n": KEYS_MOST, "again": list(self._roomy)[:KEYS_MOST]}

    def looked(self, roomy: Sequence[tuple[str, int, str]], after: str | None, now: float) -> None:
        """Take the answer: the keys with room, the first waiter of each and its queue; and where the walk goes on."""
        before, self._roomy = self._roomy, {}
        for key, id, queue in roomy:
            same = key in before and before[key][0] == id
            self._roomy[key] = (id, queue, before[key][2] if same else now)
        self._after = after or ""

    def none_waits(self) -> None:
        """No job is blocked."""
        self._roomy, self._after = {}, ""

    def since(self, now: float, at: float) -> dict[tuple[str, str], float]:
        """By queue and kind of key: since when the job that has waited longest could have gone on.

        `now` is the time of `looked`, `at` the same time in seconds since 1970, as is the answer.
        """
        found: dict[tuple[str, str], float] = {}
        for key, (_, queue, since) in self._roomy.items():
            if now - since >= ROOM_SECONDS:
                group = queue, key.partition(":")[0]
                found[group] = min(found.get(group, at), at - (now - since))
        return found
