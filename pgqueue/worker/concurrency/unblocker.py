"""Starts jobs that wait for a lock or a limit: asks the database for the keys that others have named as perhaps free.

A claim blocks a job if its key is taken, and commits. A completion deletes the row of a running job, and commits. Each
then names the keys here. An unblocking is one short transaction. It locks the keys. Then, in a second statement, it
counts the holders and moves jobs.

A job has at most one lock, one limit and one rate, and gets them in this order, one at a time. The transaction that
gives a job its lock also moves it to the waiters of its limit. The limit is asked for in the next transaction. No job
waits for a lock while it holds a limit, so no two jobs can wait for each other. Rates are for `rate_limiter`.

Why a limit is never exceeded:

1. A row becomes a holder of its key only in a transaction that has the key's advisory lock. That is in `unblock_move`,
   `unblock_next` and `unblock_limits`, and in a claim that has locked the key first (`keyed_claim_lock`).
2. The snapshot of the statement that counts is taken after the transaction has the lock. PostgreSQL gives the lock away
   after the commit is visible. So the snapshot has every earlier holder of the key.
3. All other moves take a holder away, or delete its row and insert another one in one transaction. These are the claim
   of a granted job, rescue, release, a retry that keeps its key, promotion, and the move to the next key. A snapshot
   finds exactly one of the two rows.
4. So the holders that are counted are at least those that there are. A count in the statement that takes the lock would
   exceed a limit of 1 at once. So would a key that is handed on without a count.
5. A job of a chain becomes a holder without the lock, when the job before it ends or waits for another attempt. It was
   counted before: as a row that runs it counts from its claim on (see `chains`).

`holder_cursors` says where counting begins, so that rows which have gone are not read again.

Which keys are asked for. After a job was blocked, and after a holder has ended, the key is asked for. Two questions are
saved, and both savings are only hints:

- Suppose one of this worker's own jobs holds the key. Suppose, too, that all jobs this worker blocked on it have the
  limit 1 and are never skipped. Then the key is not asked for: none of them could go on before that job has ended. The
  question after its end sees them: they were committed before. If the first waiter may run beside a holder, the worker
  that blocked it asks.
- For a key without known waiters, the waiters are looked up first (`unblock_waiters`), for many keys at once: most keys
  have none.

A key with waiters goes the short way (`unblock_next`) if a holder has ended here. It does, too, if only jobs with the
limit 1 were blocked on it. The first waiter goes on, if that is all there is to do. If it is not, the key goes the long
way after it.

Why no job waits for ever. An unblocking may come too early, while the end of the holder is not visible yet. It may meet
a row that another transaction has locked. It may never come, if the process dies after its commit. The sweep finds the
waiters of these keys.

It takes no lock of a plain job, and decides nothing by what it remembers. It waits for a key for a second at most.
Then the keys of the batch are tried in smaller batches. A key that waited alone is left to the sweep. For an open
transaction that has the id of a job it waits 20 ms, and leaves the key of that job alone for a few seconds (mover.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from math import inf
from typing import Any

import psycopg

from pgqueue.database.backoff import persist, wait
from pgqueue.database.sessions import Session
from pgqueue.jobs.job import Job
from pgqueue.jobs.keys import LIMIT, LOCK, RATE
from pgqueue.steady_clock import monotonic
from pgqueue.worker.concurrency.semaphores import Semaphores, Unblocked, Wanted
from pgqueue.worker.concurrency.waiter_cursors import HINT_SECONDS
from pgqueue.worker.doubles import stands_twice
from pgqueue.worker.left_alone import SOON_SECONDS, LeftAlone, Notice
from pgqueue.worker.mover import Mover
from pgqueue.worker.run.slots import Room
from pgqueue.worker.state import WorkerState

log = logging.getLogger("pgqueue")

KEYS_MOST = 64  # each is a row of the server's lock table
HALF_LEAST = 16
"""The fewest keys that are asked for at once; of more, half of those with waiters. While the jobs of one half run, the
other half is unblocked (docs/design has the figures)."""
FREED_MOST = 1_000
IDLE_SECONDS = 30.0
REFUSED_SECONDS = 60.0
"""How long a key is left alone after the server has refused to move its job."""
RESERVED_SECONDS = 0.1
"""How long slots are kept free for the jobs of an unblocking under way. One that hangs must not starve other jobs."""

Move = Callable[[Wanted, int], Coroutine[Any, Any, Unblocked]]


def held(job: Job) -> list[str]:
    """What a job holds while it runs."""
    keys = [] if job.lock_key is None else [LOCK + job.lock_key]
    return keys if job.limit_key is None else [*keys, LIMIT + job.limit_key]


class Unblocker:
    """Keeps the keys busy. `rooms` says where a job may run here now, `deliver` receives the jobs that shall.
    `rates_wanted` receives the rates that jobs wait for."""

    def __init__(
        self,
        session: Session,
        state: WorkerState,
        *,
        rooms: Callable[[], list[Room]],
        deliver: Callable[[list[Job]], None],
        done: Callable[[], None],
        rates_wanted: Callable[[Iterable[str]], None] = lambda keys: None,
    ) -> None:
        self.moves = self.skipped = 0
        """How many unblockings this worker has made, and how many jobs were skipped in them."""
        self._session = session
        self._semaphores = Semaphores(session, state, rooms)
        self.waiter_cursors = self._semaphores.waiter_cursors
        self._state = state
        self._rooms = rooms
        self._deliver = deliver
        self._done = done
        self._rates_wanted = rates_wanted
        self._wake = asyncio.Event()
        self._freed: dict[str, None] = {}
        self._followed: dict[str, None] = {}
        """Locks of which a holder has ended here while jobs waited: they go the short way."""
        self._with_waiters: set[str] = set()
        """Keys for which jobs waited when this worker last saw: a hint that saves a look."""
        self._wanted: Wanted = {}
        self._asking: Wanted = {}
        self._idle = asyncio.Event()
        self._since = 0.0
        self._holding: dict[Job, list[str]] = {}
        self._ours: dict[str, int] = {}
        """How many jobs that run here hold each key, as this worker knows. A Counter would cost 0.7 µs a job more."""
        self._chained = False
        """Whether a job has come in behind another one."""
        self._cut_short: set[str] = set()
        """Limits that were asked for while a fetch under way had asked for slots."""
        self._mover = Mover(
            session,
            notify=state.settings.notify,
            unfit=lambda: session.link.statement("unblock_refuse_unfit", notify=state.settings.notify),
            locks=True,
        )
        self._left = LeftAlone[str](Notice("has a job that cannot be moved"), seconds=REFUSED_SECONDS)
        """Keys with a job that the server refuses to move: a sweep comes back to them, so no other key waits for it."""
        self._unsure: dict[str, tuple[float, float]] = {}
        """Keys of which no waiter was found, though reading began behind the first one; first when, and last."""
        self._timer: asyncio.TimerHandle | None = None

    # What others say -------------------------------------------------------------------------------------------------

    def blocked(
        self,
        keys: Mapping[str, Collection[int]],
        singly: Collection[str] = (),
        lowest: tuple[int, int] | None = None,
    ) -> None:
        """Jobs now wait for these keys; those of these ids may have to be skipped.

        All that wait for the keys `singly` have the limit 1. None has a lower rank, or a lower id, than `lowest`.
        """
        if lowest is not None:
            self.waiter_cursors.blocked(keys, lowest)
        if not (self._wanted or self._followed or self._asking):
            self._since = monotonic()
        for key, fresh in keys.items():
            if key.startswith(LOCK):
                self._with_waiters.add(key)
                if key in singly and not fresh:  # at most the first waiter may go on
                    if key not in self._ours and key not in self._wanted:
                        self._followed[key] = None
                    continue
            if not key.startswith(RATE):
                ids, head = self._wanted.get(key, ([], False))
                self._wanted[key] = ([*ids, *fresh], head)
        self._name_rates(keys)
        self._wake.set()

    def swept(self, keys: Iterable[str]) -> None:
        """These keys seem to have room, or a first waiter that the worker that blocked it did not live to decide on."""
        keys = list(keys)
        for key in keys:
            if not key.startswith(RATE):
                self._wanted[key] = (self._wanted.get(key, ([], True))[0], True)
        self._name_rates(keys)
        self._wake.set()

    def holding(self, jobs: Iterable[Job]) -> None:
        """Some of these jobs, which run here, hold keys."""
        holding, ours, void = self._holding, self._ours, self._state.claims.void
        for job in jobs:
            # A job of an id that was taken for dead never ends here: another worker has it.
            if job not in holding and (keys := held(job)) and not void(job.claim):
                holding[job] = keys
                for key in keys:
                    ours[key] = ours.get(key, 0) + 1

    def granted(self, jobs: Iterable[Job]) -> None:
        """Granted jobs have started here, so their limit may grant the next ones."""
        jobs = list(jobs)
        self.holding(jobs)
        if limits := {LIMIT + job.limit_key: () for job in jobs if job.limit_key is not None}:
            self.blocked(limits)

    def fetched(self) -> None:
        """A fetch has been answered: slots that it did not fill are free for limits again."""
        if self._cut_short:
            self.blocked(dict.fromkeys(self._cut_short, ()))
            self._cut_short.clear()

    def ended(self, jobs: Iterable[Job]) -> None:
        """These jobs have left this worker, and that is committed: their keys may be free."""
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
                # It was behind another job, and left after it: the question asked then found the key taken by this one.
                self._freed[key] = None
        if self.wants:
            self._wake.set()

    def handed_on(self, before: Job, after: Job) -> None:
        """The first job has left this worker; the second, which came in behind it, has what it held."""
        if keys := self._holding.pop(before, None):
            self._holding[after] = keys

    def blocked_again(self, job: Job) -> None:
        """This job waits for a key of its own again, or is about to, before other waiters."""
        for key in held(job):
            self.waiter_cursors.doubt(key)

    def _follow(self, key: str) -> None:
        """A holder of this key has ended, and jobs wait for it."""
        if key.startswith(LOCK):
            self._followed[key] = None
        else:
            self._wanted.setdefault(key, ([], False))

    @property
    def pending(self) -> int:
        """For how many jobs slots should be kept free, because an unblocking is about to want them."""
        return len(self._wanted) + len(self._followed) if monotonic() - self._since < RESERVED_SECONDS else 0

    def slots_promised(self, queues: Sequence[str]) -> int:
        """How many slots of these queues an unblocking under way may fill."""
        if not self._asking or monotonic() - self._since >= RESERVED_SECONDS:
            return 0
        return self._semaphores.slots_promised.get(tuple(queues), 0)

    async def idle(self) -> None:
        """Wait until nothing is left to ask for, now or later."""
        self._come_back(inf)
        while self.wants or self._asking:
            self._idle.clear()
            await self._idle.wait()
            self._come_back(inf)

    @property
    def wants(self) -> bool:
        """Whether there is something to ask for."""
        return bool(self._wanted or self._freed or self._followed)

    def _name_rates(self, keys: Iterable[str]) -> None:
        if rates := [key for key in keys if key.startswith(RATE)]:
            self._rates_wanted(rates)

    # Unblocking ------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Unblock until cancelled. The sweep finds the keys that were lost while the database was away."""
        try:
            await persist(self._step, name="unblock", answers=self._session.answers, past_data=True)
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
        """Some keys of one kind, the kind of the key that has waited longest: no kind keeps the other waiting."""
        if kind is None:
            kind = LIMIT if next(iter(self._wanted), "").startswith(LIMIT) else LOCK
        some = [key for key in self._wanted if key.startswith(kind)][:KEYS_MOST]
        return {key: self._wanted.pop(key) for key in some}

    async def _ask(self, some: Wanted, move: Move) -> None:
        if left := self._left.rows():
            some = {key: wanted for key, wanted in some.items() if key not in left}
        self._asking = some
        self._since = monotonic()
        try:
            if some:
                await self._unblock(some, move)
        except BaseException:
            self._wanted = some | self._wanted
            raise
        finally:
            self._asking = {}
            self._done()

    async def _look_up_freed(self) -> None:
        """Of the keys that were freed, ask for those that jobs wait for: most keys have no waiters."""
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
        """No waiter of these keys was found, but reading did not begin at the first one: come back."""
        now = monotonic()
        for key in keys:
            self._unsure[key] = (self._unsure.get(key, (now,))[0], now)
        if self._unsure and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(HINT_SECONDS, self._come_back)

    def _come_back(self, until: float | None = None) -> None:
        """Read from the first waiter the keys that were found empty first before `until`; default: a second ago."""
        until = monotonic() - HINT_SECONDS if until is None else until
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
        except psycopg.Error as error:

            async def again(keys: Sequence[str]) -> None:
                await self._try({key: asked[key] for key in keys}, move)

            await self._mover.divide(error, list(asked), again, self._refuse)

    async def _refuse(self, key: str, error: psycopg.Error) -> None:
        if stands_twice(error):
            self._left.leave(key, f"key {key}", error, seconds=SOON_SECONDS)
        elif isinstance(error, psycopg.errors.LockNotAvailable):
            log.warning("key %s: another transaction has held it for a second; the sweep comes back to it", key)
        else:
            self._left.leave(key, f"key {key}", error)

    async def _try(self, asked: Wanted, move: Move) -> None:
        claim = await self._state.claims.begin()
        try:
            moved = await move(asked, claim)
            self._state.claims.end(claim)
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
        except (psycopg.errors.LockNotAvailable, psycopg.IntegrityError):
            raise  # nothing was committed
        except BaseException:
            self._state.in_doubt()
            raise
        finally:
            self._state.claims.end(claim)

    async def _limits(self, asked: Wanted, claim: int) -> Unblocked:
        """Ask for limits. If a fetch under way left fewer slots for them, ask once more when it is answered."""
        if any(room.fetching or room.left for room in self._rooms()):
            self._cut_short.update(asked)  # before: the fetch may be answered meanwhile
        moved = await self._semaphores.unblock_for_limits(asked, claim)
        if len(moved.rows) < sum(self._semaphores.slots_promised.values()):
            self._cut_short.difference_update(asked)
        return moved
