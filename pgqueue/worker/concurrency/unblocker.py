"""Lets jobs in that wait for a key: told which keys may be free, it asks the database and delivers whom it let in.

The claim blocks keyed jobs, but for those whose key is free (see fetcher), and commits; a completion deletes its
running row, and commits. Each then names the keys here. An admit is one short transaction: lock the keys, and in a
second statement count and move.

A job has at most one lock, one limit and one rate, and gets them in this order, one at a time: who gets a lock is moved
to the line of the limit in the transaction of the lock, and the limit is asked in the next one. Nobody waits for a lock
while holding a limit, so no two can wait for each other. Rates are not for here: `rated` is told of them.

Why a limit is never exceeded. A row becomes a holder of its key only in `unblock_move` and `unblock_next`, for limits
in `unblock_limits`, and in a claim that has locked the key first (`keyed_claim_lock`): a transaction that has the key's
advisory lock. Its snapshot is taken after it has the lock, so it sees what every earlier admit of the key has
committed: the lock is given away after the commit is visible. All other moves (claim of a granted job, rescue, release,
a retry that keeps its key, promotion, going on from one line to the next) are one transaction that deletes one row of a
holder and inserts one: a snapshot finds exactly one of the two; or they only take a holder away. So the holders counted
are at least those there are. Counting in the statement that takes the lock, or handing the key on without counting,
would each exceed limit 1 at once. Where the rows that are counted begin, so that those that have gone are not read
again, is for `holder_cursors`.

What is asked for. Who blocks a job asks for its key, and so does who ends a holder of it. Two asks are saved, and both
are hints only:
- A key that one of our own jobs holds, and for which we have blocked only such as cannot be beside that one (limit 1)
  and are not to be skipped, is not asked for before that job has ended. What is blocked was committed before we know of
  it, so the ask after that end sees it; and a job whose end is known before that is ours no more. Where the first in
  line may be beside a holder, whoever has blocked that one asks.
- A key of which we know no line is looked up first (`unblock_waiters`), many at once: most keys have none.
One with a line goes the short way, `unblock_next`, when its holder has ended here, or when all that was blocked has the
limit 1: the first of the line comes in here, if that is all there is to do. If it is not, the key goes the long way
after it.

Why nobody waits for ever: not because of this. An admit may come too early (the holder's commit is not yet visible),
may meet a head that somebody has locked, or may never come, when the process dies after its commit. The sweep finds
those.

Takes no lock of a plain job, decides nothing by what it remembers, and never waits longer than a second for a key:
where somebody was stopped in the middle of an admit, the keys of the batch are tried in smaller ones, and the one that
is held is left to the sweep.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from math import inf
from time import monotonic
from typing import Any

import psycopg

from pgqueue.database.backoff import persist, wait
from pgqueue.database.sessions import Session
from pgqueue.jobs.job import Job
from pgqueue.jobs.keys import LIMIT, LOCK, RATE
from pgqueue.worker.claims import Claims
from pgqueue.worker.concurrency.semaphores import Semaphores, Slots, Unblocked
from pgqueue.worker.concurrency.waiter_cursors import LINE_SECONDS

log = logging.getLogger("pgqueue")

KEYS_MOST = 64  # each is a row of the server's lock table
HALF_LEAST = 16
"""So many keys are asked for at once at least, of more than that half of those with lines: while the jobs of the one
half run and end, the others are let in (measured with 100 keys: a fifth more jobs than with 64 and 36 in turn)."""
FREED_MOST = 1_000
IDLE_SECONDS = 30.0
RESERVED_SECONDS = 0.1
"""How long slots are kept free for whom an admit under way may bring; a stuck one must not starve other jobs."""

Wanted = dict[str, tuple[list[int], bool]]
"""Keys, each with its jobs that were blocked just now, and whether the head of its line may have to be skipped."""
Move = Callable[[Wanted, int], Coroutine[Any, Any, Unblocked]]


def held(job: Job) -> list[str]:
    """What a job holds while it runs."""
    keys = [] if job.lock_key is None else [LOCK + job.lock_key]
    return keys if job.limit_key is None else [*keys, LIMIT + job.limit_key]


class Unblocker:
    """Keeps the keys busy. `slots` says where a job of `tasks` may run here now, `deliver` receives those that shall;
    `rated` is told which rates jobs wait for."""

    def __init__(
        self,
        session: Session,
        worker_id: Callable[[], int],
        *,
        claims: Claims,
        tasks: Iterable[str],
        slots: Callable[[], list[Slots]],
        deliver: Callable[[list[Job]], None],
        done: Callable[[], None],
        in_doubt: Callable[[], None],
        notify: bool,
        rated: Callable[[Iterable[str]], None] = lambda keys: None,
    ) -> None:
        self.moves = self.skipped = 0
        """How many admits this worker has made, and how many jobs were skipped in them."""
        self._session = session
        self._semaphores = Semaphores(session, worker_id, tasks, slots, notify)
        self.waiter_cursors = self._semaphores.waiter_cursors
        self._claims = claims
        self._slots = slots
        self._deliver = deliver
        self._done = done
        self._in_doubt = in_doubt
        self._rate_wanted = rated
        self._wake = asyncio.Event()
        self._freed: dict[str, None] = {}
        self._followed: dict[str, None] = {}
        """Locks of which a holder has ended here, while somebody was in line: they go the short way."""
        self._with_waiters: set[str] = set()
        """Keys that had somebody in line when we last saw: a hint, it saves a look."""
        self._wanted: Wanted = {}
        self._asking: Wanted = {}
        self._idle = asyncio.Event()
        self._since = 0.0
        self._holding: dict[Job, list[str]] = {}
        self._ours: dict[str, int] = {}
        """How many jobs that run here hold these keys, as far as we know. No Counter: that takes 0.7 µs a job more."""
        self._chained = False
        """Whether anybody has come in behind another one."""
        self._cut_short: set[str] = set()
        """Limits that were asked for while a fetch had its hand on slots."""
        self._unsure: dict[str, tuple[float, float]] = {}
        """Keys of whose lines nobody was found, not read from the front; when that was for the first time, and last."""
        self._timer: asyncio.TimerHandle | None = None

    # What others tell ------------------------------------------------------------------------------------------------

    def blocked(
        self,
        keys: Mapping[str, Collection[int]],
        singly: Collection[str] = (),
        lowest: tuple[int, int] | None = None,
    ) -> None:
        """Jobs now wait for these keys; those of these ids may have to be skipped. All that wait for the keys `singly`
        have the limit 1; none has a lower rank, or a lower id, than `lowest`."""
        if lowest is not None:
            self.waiter_cursors.blocked(keys, lowest)
        if not (self._wanted or self._followed or self._asking):
            self._since = monotonic()
        for key, fresh in keys.items():
            if key.startswith(LOCK):
                self._with_waiters.add(key)
                if key in singly and not fresh:  # the first in line is all that may come in
                    if key not in self._ours and key not in self._wanted:
                        self._followed[key] = None
                    continue
            if not key.startswith(RATE):
                ids, head = self._wanted.get(key, ([], False))
                self._wanted[key] = ([*ids, *fresh], head)
        self._tell_rates(keys)
        self._wake.set()

    def swept(self, keys: Iterable[str]) -> None:
        """These keys seem to have room, or a head that its claimer did not live to decide on."""
        keys = list(keys)
        for key in keys:
            if not key.startswith(RATE):
                self._wanted[key] = (self._wanted.get(key, ([], True))[0], True)
        self._tell_rates(keys)
        self._wake.set()

    def holding(self, jobs: Iterable[Job]) -> None:
        """Some of these jobs, which run here, hold keys."""
        holding, ours, void = self._holding, self._ours, self._claims.void
        for job in jobs:
            # What comes to an id that was taken for dead never ends here: others have it.
            if job not in holding and (keys := held(job)) and not void(job.claim):
                holding[job] = keys
                for key in keys:
                    ours[key] = ours.get(key, 0) + 1

    def granted(self, jobs: Iterable[Job]) -> None:
        """These were granted what they hold, and run here now: of a limit, others may be granted it in their places."""
        jobs = list(jobs)
        self.holding(jobs)
        if limits := {LIMIT + job.limit_key: () for job in jobs if job.limit_key is not None}:
            self.blocked(limits)

    def fetched(self) -> None:
        """A fetch has been answered: what it had asked for and not got is free for limits again."""
        if self._cut_short:
            self.blocked(dict.fromkeys(self._cut_short, ()))
            self._cut_short.clear()

    def ended(self, jobs: Iterable[Job]) -> None:
        """These jobs are not ours any more, and that is committed: their keys may be free."""
        if not (self._holding or self._chained):
            return
        pop, ours = self._holding.pop, self._ours
        for job in jobs:
            keys = pop(job, ())
            for key in keys:
                if (left := ours[key] - 1) > 0:
                    ours[key] = left
                else:
                    del ours[key]
                if key in self._with_waiters:
                    self._follow(key)
                else:
                    self._freed[key] = None
            if job.chained and not keys and (key := f"{LOCK}{job.lock_key}") not in ours:
                # It was behind another one, and left after that: who asked then found the key taken by this one.
                self._freed[key] = None
        if self.wants:
            self._wake.set()

    def handed_on(self, before: Job, after: Job) -> None:
        """This job is not ours any more, and what it held has one that came in behind it."""
        if keys := self._holding.pop(before, None):
            self._holding[after] = keys

    def blocked_again(self, job: Job) -> None:
        """This one stands in its line again, or is about to, before others."""
        self.waiter_cursors.doubt(f"{LOCK}{job.lock_key}")

    def _follow(self, key: str) -> None:
        """A holder of this key has ended, and somebody is in line."""
        if key.startswith(LOCK):
            self._followed[key] = None
        else:
            self._wanted.setdefault(key, ([], False))

    @property
    def pending(self) -> int:
        """For how many jobs slots should be kept free, because an admit is about to want them."""
        return len(self._wanted) + len(self._followed) if monotonic() - self._since < RESERVED_SECONDS else 0

    def slots_promised(self, queues: Sequence[str]) -> int:
        """How many slots of these queues an admit under way may fill."""
        if not self._asking or monotonic() - self._since >= RESERVED_SECONDS:
            return 0
        return self._semaphores.slots_promised.get(tuple(queues), 0)

    async def idle(self) -> None:
        """Wait until nothing is left to ask for; nobody comes back later."""
        self._come_back(inf)
        while self.wants or self._asking:
            self._idle.clear()
            await self._idle.wait()
            self._come_back(inf)

    @property
    def wants(self) -> bool:
        """Whether there is something to ask for."""
        return bool(self._wanted or self._freed or self._followed)

    def _tell_rates(self, keys: Iterable[str]) -> None:
        if rates := [key for key in keys if key.startswith(RATE)]:
            self._rate_wanted(rates)

    # Admitting -------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Admit until cancelled. What is lost with the database away, the sweep finds again."""
        try:
            await persist(self._step, name="admit")
        finally:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    async def _step(self) -> None:
        if not self.wants:
            if not await wait(self._wake, IDLE_SECONDS):
                await self._session.close()
                await self._wake.wait()
            self._wake.clear()
        while self.wants:
            if self._freed:
                await self._look_up_freed()
            if some := self._some_followed():
                await self._ask(some, self._semaphores.unblock_next)
                if some := self._some_wanted(LOCK):  # what it left, before the limits that the same ends have freed
                    await self._ask(some, self._semaphores.unblock_for_locks)
            if some := self._some_wanted():
                await self._ask(
                    some, self._limits if next(iter(some)).startswith(LIMIT) else self._semaphores.unblock_for_locks
                )
        self._idle.set()

    def _some_followed(self) -> Wanted:
        """Some keys that may go the short way; not those that have to go the long one anyhow."""
        most = min(KEYS_MOST, max(HALF_LEAST, (len(self._with_waiters) + 1) // 2))
        some = [key for key in self._followed if key not in self._wanted][:most]
        if len(some) < most:
            self._followed.clear()
        for key in some:
            self._followed.pop(key, None)
        return {key: ([], False) for key in some}

    def _some_wanted(self, kind: str | None = None) -> Wanted:
        """Some keys of one kind, that of the one that has waited longest: else one could keep the other waiting."""
        if kind is None:
            kind = LIMIT if next(iter(self._wanted), "").startswith(LIMIT) else LOCK
        some = [key for key in self._wanted if key.startswith(kind)][:KEYS_MOST]
        return {key: self._wanted.pop(key) for key in some}

    async def _ask(self, some: Wanted, move: Move) -> None:
        self._asking = some
        self._since = monotonic()
        try:
            await self._unblock(some, move)
        except BaseException:
            self._wanted = some | self._wanted
            raise
        finally:
            self._asking = {}
            self._done()

    async def _look_up_freed(self) -> None:
        """Of the keys that were freed, those that somebody waits for are wanted: most keys have no line."""
        some = dict.fromkeys(list(self._freed)[:FREED_MOST])
        for key in some:
            del self._freed[key]  # before: it may be freed once more while we look
        try:
            found, unsure = await self._semaphores.find_waiters(list(some))
        except BaseException:
            self._freed |= some
            raise
        for key in found:
            self._with_waiters.add(key)
            self._follow(key)
        self._come_back_to(unsure)

    def _come_back_to(self, keys: Iterable[str]) -> None:
        """Nobody was found in these lines, which were not read from their fronts: somebody may be left there."""
        now = monotonic()
        for key in keys:
            self._unsure[key] = (self._unsure.get(key, (now,))[0], now)
        if self._unsure and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LINE_SECONDS, self._come_back)

    def _come_back(self, until: float | None = None) -> None:
        """Look from the front at those that were found so until then for the first time: until a second ago."""
        until = monotonic() - LINE_SECONDS if until is None else until
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for key, (first, last) in list(self._unsure.items()):
            if first <= until:
                del self._unsure[key]
                if not self.waiter_cursors.read_since(key, last):
                    self.waiter_cursors.doubt(key)
                    self._freed[key] = None
                    self._wake.set()
        if self._unsure:
            soon = min(first for first, _ in self._unsure.values()) - until
            self._timer = asyncio.get_running_loop().call_later(soon, self._come_back)

    async def _unblock(self, asked: Wanted, move: Move) -> None:
        try:
            await self._try(asked, move)
        except psycopg.errors.LockNotAvailable:
            if len(asked) > 1:
                keys = list(asked)
                for half in (keys[: len(keys) // 2], keys[len(keys) // 2 :]):
                    await self._unblock({key: asked[key] for key in half}, move)
            else:
                log.warning("key %s: somebody has held it for a second; the sweep comes back to it", *asked)
        except psycopg.errors.UniqueViolation:
            [doubles] = await self._session.run(self._session.link.statement("unblock_refuse_doubles"))
            log.error("jobs %s run, and waited for a key too: the second rows are failed: refused", doubles)

    async def _try(self, asked: Wanted, move: Move) -> None:
        claim = self._claims.begin()
        try:
            moved = await move(asked, claim)
            self.moves += 1
            self.skipped += moved.skipped
            jobs = [Job(row, claim) for row in moved.rows]
            if jobs:
                firsts = [job for job in jobs if not job.chained]
                self._chained |= len(firsts) < len(jobs)
                self.holding(firsts)
                self._deliver(jobs)
            if moved.onward:
                self.blocked(dict.fromkeys(moved.onward, ()))
            again = [key for key in moved.unsure if self.waiter_cursors.ended(key)]
            self._with_waiters.difference_update(set(asked).difference(self._ours, moved.onward, again))
            for key in again:
                self._follow(key)
            self._come_back_to(set(moved.unsure).difference(again))
        except (psycopg.errors.LockNotAvailable, psycopg.errors.UniqueViolation):
            raise  # nothing was committed
        except BaseException:
            self._in_doubt()
            raise
        finally:
            self._claims.end(claim)

    async def _limits(self, asked: Wanted, claim: int) -> Unblocked:
        """Ask for limits; once more, when a fetch is answered, for what got less because of it."""
        if any(pool.asked or pool.left for pool in self._slots()):
            self._cut_short.update(asked)  # before: the fetch may be answered meanwhile
        moved = await self._semaphores.unblock_for_limits(asked, claim)
        if len(moved.rows) < sum(self._semaphores.slots_promised.values()):
            self._cut_short.difference_update(asked)
        return moved
