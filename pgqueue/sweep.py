"""Finds the keys that somebody waits for and nobody holds: what makes waiting for a key safe, whatever was missed.

The quick way is that who frees a key admits the next. It misses: an admit inside a transaction with an old snapshot,
one that met a head locked by a cancel that was then rolled back, one that was never made because its process died, a
queue that was paused and is open again. So every few seconds one worker of all (whoever changes the row of the duty
first) walks the distinct keys of job_blocked, by jumping along their index, and names those with room to admit. It
also parks again what was granted to queues that are paused now or have no worker any more, so that others get their
keys.

Only looks and names: it takes no key's lock, and lets nobody in.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from time import monotonic

from pgqueue.loops import persist, wait
from pgqueue.sessions import Session

log = logging.getLogger("pgqueue")

SWEEP = "sweep"
"""What a NOTIFY of `:control` says when keys were freed by hand."""
EVERY_SECONDS = 5.0
AT_ONCE_SECONDS = 0.05
"""Of all the workers that are told to sweep at once, one does."""
KEYS_MOST = 1_000


class Sweep:
    """Sweeps over the given session; `found` is told the keys."""

    def __init__(
        self, session: Session, *, found: Callable[[Iterable[str]], None], every: float = EVERY_SECONDS
    ) -> None:
        self.sweeps = 0
        """How often this worker has swept."""
        self._session = session
        self._found = found
        self._every = every
        self._wake = asyncio.Event()
        self._next = 0.0

    def soon(self) -> None:
        """Something has happened that may have freed keys without an admit."""
        self._wake.set()

    async def run(self) -> None:
        """Sweep at once, every few seconds, and when told, until cancelled."""
        await persist(self._step, name="sweep")

    async def _step(self) -> None:
        told = await wait(self._wake, max(0.0, self._next - monotonic()))
        self._wake.clear()
        if not told:
            self._next = monotonic() + self._every
            await self.sweep(0.9 * self._every)
        elif not await self.sweep(AT_ONCE_SECONDS):
            await asyncio.sleep(2 * AT_ONCE_SECONDS)  # who has swept just now may have looked before it happened
            await self.sweep(AT_ONCE_SECONDS)

    async def sweep(self, seconds: float = 0.0) -> bool:
        """Sweep, unless somebody has done it in the last `seconds`."""
        link = self._session.link
        [due] = await self._session.run(link.statement("sweep_due", seconds=seconds))
        if not due:
            return False
        self.sweeps += 1
        if not due[0][0]:
            return True
        parked, [(keys, after)] = await self._session.run(
            link.statement("sweep_park", n=KEYS_MOST), link.statement("sweep_keys", after="", n=KEYS_MOST)
        )
        if parked:
            log.info("%d keys were granted to queues that are paused or not served; others get them", len(parked))
        self._tell([*keys, *[key for (key,) in parked]])
        while after is not None:
            [[(keys, after)]] = await self._session.run(link.statement("sweep_keys", after=after, n=KEYS_MOST))
            self._tell(keys)
        return True

    def _tell(self, keys: list[str]) -> None:
        if keys:
            self._found(keys)
