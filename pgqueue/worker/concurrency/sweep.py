"""Finds keys that a job waits for and no job holds: what makes waiting for a key safe, whatever was missed.

The quick way is that the worker that frees a key unblocks the next job. That misses:

- an unblocking inside a transaction with an old snapshot
- a first waiter that was locked by a cancel, which was then rolled back
- an unblocking that was never made because its process died
- a queue that was paused and is open again

So every few seconds one worker of all walks the distinct keys of job_blocked, by jumping along their index. It is the
first worker to change the row of the duty. It names the keys with room to the unblocker. It also blocks again what was
granted to paused queues, and to tasks that no live worker of their queue knows. So other jobs get their keys.

How often a worker asks whether to sweep:

1. If it has unblocked a job, or found a job waiting, it asks every few seconds. So while keys are in use a worker
   sweeps.
2. It stops when it finds no job, or when another worker was faster, which then goes on asking.
3. If keys do not seem to be in use, the leader asks every 15 s, in case the worker that is to sweep has died.
4. All other workers then ask every one to two minutes, in case the leader does not.

So a fleet with nothing to do sends next to nothing.

A full worker hands keys of rates on by NOTIFY. A worker that cannot be told, because NOTIFY or LISTEN is off, looks for
them itself every few seconds. Else the full worker would sweep each time, and name the keys to itself only.

Only looks and names: it takes no key's lock, and starts no job.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterable, Sequence

import psycopg

from pgqueue.database.backoff import jittered
from pgqueue.database.sessions import Session
from pgqueue.database.statements import Row, Statement, integers
from pgqueue.jobs.keys import RATE
from pgqueue.plain_text import plural
from pgqueue.steady_clock import monotonic
from pgqueue.worker.doubles import stands_twice
from pgqueue.worker.left_alone import SOON_SECONDS, LeftAlone, Notice
from pgqueue.worker.mover import REFUSED_MOST, Mover

log = logging.getLogger("pgqueue")

SWEEP = "sweep"
"""What a NOTIFY of `:control` says when keys were freed by hand."""
EVERY_SECONDS = 5.0
LEADER_TIMES, OTHERS_TIMES = 3, 12
"""How many times more seldom the leader, and the other workers, ask where keys do not seem to be in use."""
AT_ONCE_SECONDS = 0.05
"""If all workers are to sweep at once, one of them does within this time."""
KEYS_MOST = 1_000
REFUSED_SECONDS = 60.0
"""How long a job is left alone that the server refuses to block again."""


class Sweep:
    """Sweeps over the given session; `found` receives the keys, and `swept` is called while jobs wait for anything."""

    def __init__(
        self,
        session: Session,
        *,
        found: Callable[[Iterable[str]], None],
        swept: Callable[[], None] = lambda: None,
        leads: Callable[[], bool] = lambda: True,
        told: bool = True,
    ) -> None:
        self.sweeps = 0
        """How often this worker has swept."""
        self.woken = asyncio.Event()
        self._session = session
        self._found = found
        self._swept = swept
        self._leads = leads
        self._look_every = math.inf if told else EVERY_SECONDS
        self._looked = monotonic()
        self._at_once = False
        self._mover = Mover(session, notify=False)  # polls find what it has resolved
        self._left = LeftAlone[int](Notice("cannot be blocked again, and keeps its key"), seconds=REFUSED_SECONDS)
        """Jobs that the server refuses to block again: the others are blocked without them."""
        self._keyed = False
        """Keys are in use, and this worker may have to go on sweeping."""
        self._last = -math.inf
        self._seldom = jittered(OTHERS_TIMES * EVERY_SECONDS)

    def sweep_soon(self) -> None:
        """Keys may have been freed without an unblocking."""
        self._at_once = True
        self.woken.set()

    def wake(self) -> None:
        """This worker leads now: how long to wait is decided anew."""
        self.woken.set()

    def keys_in_use(self) -> None:
        """Keys are in use here."""
        if not self._keyed:
            self._keyed = True
            self.woken.set()

    def _due(self) -> float:
        """When it is time to ask again."""
        if self._keyed:
            return self._last + EVERY_SECONDS
        return self._last + (LEADER_TIMES * EVERY_SECONDS if self._leads() else self._seldom)

    async def round(self) -> float:
        """Sweep if asked to, or if it is time; answer the seconds until the next time. At the start it is."""
        if self._at_once or monotonic() >= self._due():
            asked, self._at_once = self._at_once, False
            try:
                await self._sweep_now(asked)
            except BaseException:
                self._at_once = True  # what was asked for, or was due, is still to be done
                raise
        elif monotonic() >= self._looked + self._look_every:
            self._looked = monotonic()
            await self._walk(RATE)
        return max(0.0, min(self._due(), self._looked + self._look_every) - monotonic())

    async def _sweep_now(self, asked: bool) -> None:
        if not asked:
            self._last, self._seldom = monotonic(), jittered(OTHERS_TIMES * EVERY_SECONDS)
            await self.sweep(0.9 * EVERY_SECONDS)
        elif not await self.sweep(AT_ONCE_SECONDS):
            await asyncio.sleep(2 * AT_ONCE_SECONDS)  # another worker's sweep may have looked before it happened
            await self.sweep(AT_ONCE_SECONDS)

    async def sweep(self, seconds: float = 0.0) -> bool:
        """Sweep, unless a worker has done it in the last `seconds`."""
        link = self._session.link
        self._keyed = False  # before we look: a key that comes into use meanwhile counts
        [due] = await self._session.run(link.statement("sweep_due", seconds=seconds))
        if not due:
            return False
        self.sweeps += 1
        if not due[0][0]:
            return True
        self._keyed = True
        self._swept()
        look = link.statement("sweep_keys", after="", n=KEYS_MOST)
        stuck, [(keys, after)] = await self._session.run(self._stuck(), look)
        self._name([*keys, *(await self._block(stuck) if stuck else [])])
        await self._walk(after)
        return True

    def _stuck(self) -> Statement[list[Row]]:
        passed = integers(self._left.rows())
        return self._session.link.statement("sweep_stuck", n=KEYS_MOST, passed=passed)

    async def _block(self, jobs: Sequence[Row]) -> list[str]:
        """Block these jobs again, each of which holds a key and cannot go on; answer the keys."""
        freed: list[str] = []

        async def block(jobs: Sequence[Row]) -> None:
            ids = integers(id for id, _ in jobs)
            [keys] = await self._session.run(self._session.link.statement("sweep_block", ids=ids))
            freed.extend(key for (key,) in keys)

        try:
            await block(jobs)
        except psycopg.Error as error:
            await self._mover.divide(error, jobs, block, self._refused, most=REFUSED_MOST)
            [left] = await self._session.run(self._stuck())
            if renamed := [job for job in left if job not in jobs]:  # its id stood twice
                await block(renamed)
        if freed:
            log.info(
                "%s granted to jobs of paused queues, or of tasks that no worker takes: now others may have that",
                plural(len(freed), "key was", "keys were"),
            )
        return freed

    async def _refused(self, job: Row, error: psycopg.Error) -> None:
        id, task = job
        seconds = SOON_SECONDS if stands_twice(error) else None
        self._left.leave(id, f"job {id} ({task})", error, seconds=seconds, extra={"job_id": id})

    async def _walk(self, after: str | None) -> None:
        """Name the keys after this one, in order, up to the last one."""
        while after is not None:
            look = self._session.link.statement("sweep_keys", after=after, n=KEYS_MOST)
            [[(keys, after)]] = await self._session.run(look)
            self._name(keys)

    def _name(self, keys: list[str]) -> None:
        if keys:
            self._found(keys)
