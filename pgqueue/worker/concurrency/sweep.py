"""Finds the keys that a job waits for and no job holds: what makes waiting for a key safe, whatever was missed.

The quick way is that the worker that frees a key admits the next job. It misses: an admit inside a transaction with an
old snapshot, one that met a head locked by a cancel that was then rolled back, one that was never made because its
process died, a queue that was paused and is open again. So every few seconds one worker of all (the first to change the
row of the duty) walks the distinct keys of job_blocked, by jumping along their index, and names those with room to
admit. It also blocks again what was granted to queues that are paused now, and to tasks that no live worker of their
queue knows any more, so that other jobs get their keys.

If a worker has unblocked something, or found a job waiting, it asks every few seconds. It stops when it finds none, or
when another worker was faster, which then goes on asking: while keys are in use a worker sweeps. If keys do not seem to
be in use, the leader still asks, three times more seldom, and all others now and then; for the worker that is to sweep
may have died, and the leader may hang. So a fleet with nothing to do sends next to nothing.

Only looks and names: it takes no key's lock, and lets no job in.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterable
from time import monotonic

from pgqueue.database.backoff import jittered, persist, wait
from pgqueue.database.sessions import Session

log = logging.getLogger("pgqueue")

SWEEP = "sweep"
"""What a NOTIFY of `:control` says when keys were freed by hand."""
EVERY_SECONDS = 5.0
LEADER_TIMES, OTHERS_TIMES = 3, 12
"""So many times more seldom where keys are not in use, as far as this worker knows."""
AT_ONCE_SECONDS = 0.05
"""Of all the workers that are told to sweep at once, one does."""
KEYS_MOST = 1_000


class Sweep:
    """Sweeps over the given session; `found` is told the keys."""

    def __init__(
        self,
        session: Session,
        *,
        found: Callable[[Iterable[str]], None],
        leads: Callable[[], bool] = lambda: True,
        every: float = EVERY_SECONDS,
    ) -> None:
        self.sweeps = 0
        """How often this worker has swept."""
        self._session = session
        self._found = found
        self._leads = leads
        self._every = every
        self._wake = asyncio.Event()
        self._told = False
        self._keyed = False
        """Keys are in use, and it may be on us to go on sweeping."""
        self._last = -math.inf
        self._seldom = jittered(OTHERS_TIMES * every)

    def sweep_soon(self) -> None:
        """Something has happened that may have freed keys without an admit."""
        self._told = True
        self._wake.set()

    def wake(self) -> None:
        """This worker leads now: how long to wait is decided anew."""
        self._wake.set()

    def keys_in_use(self) -> None:
        """Keys are in use here."""
        if not self._keyed:
            self._keyed = True
            self._wake.set()

    async def run(self) -> None:
        """Sweep at once, now and then, and when told, until cancelled."""
        await persist(self._step, name="sweep")

    def _due(self) -> float:
        """When it is time to ask again."""
        if self._keyed:
            return self._last + self._every
        return self._last + (LEADER_TIMES * self._every if self._leads() else self._seldom)

    async def _step(self) -> None:
        if not self._told:
            await wait(self._wake, max(0.0, self._due() - monotonic()))
        self._wake.clear()
        if self._told:
            self._told = False
            if not await self.sweep(AT_ONCE_SECONDS):
                await asyncio.sleep(2 * AT_ONCE_SECONDS)  # a sweep just now may have looked before it happened
                await self.sweep(AT_ONCE_SECONDS)
        elif monotonic() >= self._due():
            self._last, self._seldom = monotonic(), jittered(OTHERS_TIMES * self._every)
            await self.sweep(0.9 * self._every)

    async def sweep(self, seconds: float = 0.0) -> bool:
        """Sweep, unless a worker has done it in the last `seconds`."""
        link = self._session.link
        self._keyed = False  # before we look: what comes into use meanwhile counts
        [due] = await self._session.run(link.statement("sweep_due", seconds=seconds))
        if not due:
            return False
        self.sweeps += 1
        if not due[0][0]:
            return True
        self._keyed = True
        blocked, [(keys, after)] = await self._session.run(
            link.statement("sweep_block", n=KEYS_MOST), link.statement("sweep_keys", after="", n=KEYS_MOST)
        )
        if blocked:
            log.info(
                "%d keys were granted to jobs of paused queues, or of tasks that no worker takes; others get them",
                len(blocked),
            )
        self._tell([*keys, *[key for (key,) in blocked]])
        while after is not None:
            [[(keys, after)]] = await self._session.run(link.statement("sweep_keys", after=after, n=KEYS_MOST))
            self._tell(keys)
        return True

    def _tell(self, keys: list[str]) -> None:
        if keys:
            self._found(keys)
