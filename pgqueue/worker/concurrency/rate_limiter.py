"""Starts jobs that wait for a rate: asks for the keys with waiters when they may move on and a slot is free.

The claim puts jobs under a rate into `job_blocked`, under the key of the rate. The transaction here moves them to
`job_running`, as many as the rate allows at that moment, and charges the rate for them. They are to start at once. If a
job has not started within `late` seconds, it goes back to the waiters unstarted. No attempt is spent, and the job is
charged again.

The rate is GCRA (sql/worker/rates.sql). For n = count starts in a period P with a burst b, in seconds of the database's
clock:

    patience = min(5, P / n / 100)      a job that is too late waits for a whole gap, so a slow rate waits longer for it
    late = min(P / 20, max(0.2, patience))  may pass between the move of a job and its start
    early = min(0.05, P / 40)           may be anticipated, so that several jobs of a fast rate are moved at a time
    gap = (P + late + early) / n
    depth = min((b - 1) * gap + early, 3,000 years)

Each job that is moved takes `next_at` on by one gap, from now or from where it was, whichever is later. No job is moved
while `next_at` is more than `depth` ahead.

The clock is read twice. By the first reading it is decided how many jobs may be moved, before they are looked for. By
the second reading, when all are found, they are moved and charged. At the second reading `next_at` is no further ahead
than at the first. So not more jobs were found than that moment allows, and a long search makes no job late.

Why never more than n + b - 1 handlers start in a window of P:

1. Let t1 <= … <= tk be the times at which k jobs were moved.
2. Before the first job `next_at` counts as t1 at least, and each job adds a gap. So before the last job it was at
   least t1 + (k - 1) * gap.
3. Before the last job it was tk + depth at most. So (k - 1) * gap <= tk - t1 + depth.
4. A job that starts at s was moved between s - late and s. So the jobs that start in a half-open window of P were moved
   within less than P + late.
5. So (k - 1) * gap < P + late + early + (b - 1) * gap = (n + b - 1) * gap, and k <= n + b - 1.
6. `next_at` is read and written with the key's advisory lock held, by a snapshot taken after the lock. So two
   transactions that ask at the same time follow one another. They lock keys first, then the worker's row, then blocked
   rows with SKIP LOCKED.

The proof does not cover a database clock that is set back, nor a rate or burst that is raised in between. Nor does it
cover the time between the look at the clock and the start of the handler's code. docs/rates.md has the price of the
exact bound.

Why lateness is judged at the start of the handler. The answer says how long after its beginning, by the database's
clock, the transaction moved the jobs. We noted the time before we sent that beginning. So the lateness that we count is
never less than the real one, however long the answer took, or this process stood still.

How many jobs are moved at once. An answer has a fixed cost, so many jobs of a fast rate come together. But a job that
waits here for long may be too late. Then it goes back, and costs as much again. So an answer brings as many jobs as
start in half of the time they have left, at the speed of the answer before. While more than half as many wait here, no
key is asked for.

Why no job waits for ever:

1. A worker that blocks a job remembers its key (`wanted`). It forgets the key when the database says that no job is
   left that this worker could take.
2. The sweep finds what was lost because a process died or a first waiter was locked: it names all keys with waiters.
   Keys that could have moved for half a second are remembered here. If the first waiter may be for another worker, the
   others are notified, too.
3. Other workers are also notified if this worker has had no free slot for a tenth of a second.
4. A worker that finds that another worker was faster asks later and later, up to 5 s, so that few ask for one key. It
   does not if the other worker does not serve the queue of our first waiter.
5. A full worker never asks. A key without waiters is not remembered, and costs nothing.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

import msgspec
import psycopg

from pgqueue.database.backoff import persist, wait
from pgqueue.database.sessions import Session
from pgqueue.database.statements import integers, texts
from pgqueue.errors import InvalidArguments
from pgqueue.jobs.job import STARTED, Job
from pgqueue.jobs.keys import RATE, check_key
from pgqueue.steady_clock import monotonic
from pgqueue.worker.doubles import stands_twice
from pgqueue.worker.left_alone import SOON_SECONDS, LeftAlone, Notice
from pgqueue.worker.mover import Mover
from pgqueue.worker.run.slots import Room
from pgqueue.worker.state import WorkerState

log = logging.getLogger("pgqueue")

LOOK_SECONDS = 1.0
"""How often a key is asked for although no slot seems to be free for it."""


@dataclass(frozen=True, slots=True)
class Openings:
    """What may start at once, by groups of slots. `poison` are the ranks of the poison jobs that may run now."""

    rooms: Sequence[Room]
    poison: Sequence[int] = ()
    ordinary: bool = True
    """Whether jobs that are no poison jobs may start."""

    @property
    def queues(self) -> list[str]:
        """All queues."""
        return [queue for room in self.rooms for queue in room.queues]

    @property
    def full(self) -> set[int]:
        """The groups without a free slot, counted from 1."""
        return {index for index, room in enumerate(self.rooms, 1) if not room.free}

    @property
    def roomy(self) -> set[int]:
        """The groups with a free slot, counted from 1."""
        return {index for index, room in enumerate(self.rooms, 1) if room.free}


@dataclass(slots=True)
class RateWaiters:
    """What is remembered of a key with waiters."""

    at: float
    """When it may be asked for."""
    full: set[int] = field(default_factory=set)
    """The groups that had no slot for it, when that was `asked` last."""
    asked: float = 0.0
    last: int | None = None
    """The worker that moved a job of it last, by the last answer, if that worker could have taken ours."""
    pushed: float = 0.0
    """By how much the next question was put off because another worker was faster."""

    def fits(self, roomy: set[int], now: float) -> bool:
        """Whether a slot may be free for it, now that the groups `roomy` have some. It is asked for now and then all
        the same."""
        return not self.full or bool(self.full & roomy) or now - self.asked >= LOOK_SECONDS


HANDED = "rates "
"""How a NOTIFY of `:control` begins that names keys to other workers."""
KEYS_MOST = 64  # each is a row of the server's lock table
LET_IN_LEAST, LET_IN_MOST, SWEPT_MOST = 50, 1_000, 1_000
SHARE = 0.5
"""All jobs of one answer are to start within this part of the time that is left until they are too late."""
IDLE_SECONDS, LOCKED_SECONDS = 30.0, 0.1
PAUSE_LEAST, SLOT_PAUSE = 0.01, 0.002
"""The shortest pause between two questions for one key: several jobs of a fast rate come together. The second is for a
worker with few slots."""
KEPT_SECONDS = 1.0
"""How long the jobs of an answer are remembered. How quickly they start says how large the next answer may be."""
REFUSED_SECONDS = 60.0
"""How long a key is left alone if the server refuses to move its first jobs."""
OVERDUE_SECONDS = 0.5
FULL_SECONDS, HAND_ON_SECONDS = 0.1, 1.0
"""How long a key may wait for a slot here before other workers are notified, and how often at most they are."""
HAND_ON_BYTES = 7_000
LOST_FIRST, LOST_MOST = 0.5, 5.0
"""By how much later to ask for a key for which another worker was faster: the first time, and at most."""


class Charged(msgspec.Struct):
    """What a rate has let in: how many jobs, how long until the next may be, and when these are too late; seconds."""

    taken: int = 0
    pause: float = 0.0
    late: float = 0.0


class Outlook(msgspec.Struct):
    """What is left to wait for a rate: see `rates_outlook`."""

    remains: bool = False
    elsewhere: bool = False
    last: int | None = None
    poison: bool = False


class RateLimiter:
    """Keeps the keys of rates moving. `openings` says what may start here now, `deliver` receives jobs that are to
    start at once. `reserve` keeps the next free slot of these groups open."""

    def __init__(
        self,
        session: Session,
        state: WorkerState,
        *,
        openings: Callable[[], Openings],
        reserve: Callable[[set[int]], None],
        deliver: Callable[[list[Job]], None],
    ) -> None:
        self.asks = self.started = 0
        """How often this worker has asked, and how many jobs it has moved."""
        self._session = session
        self._state = state
        self._tasks = texts(state.tasks)
        self._openings = openings
        self._reserve = reserve
        self._deliver = deliver
        self._most = LET_IN_LEAST
        self._before: list[Job] = []
        """The jobs of the answer before, which came at `_came`."""
        self._came = 0.0
        self._waiters: dict[str, RateWaiters] = {}
        self._times: list[tuple[float, str]] = []
        """A heap of when keys may be asked for. An entry that does not match the `at` of its key is void."""
        self._due: dict[str, float] = {}
        """Keys that may be asked for, since when."""
        self._asking: frozenset[str] = frozenset()
        self._again: set[str] = set()
        """Of the keys asked for just now, those for which a job was blocked meanwhile: the answer may not know that
        job."""
        self._mover = Mover(
            session,
            notify=state.settings.notify,
            unfit=lambda: session.link.statement("unblock_refuse_unfit", notify=state.settings.notify),
            locks=True,
        )
        self._left = LeftAlone[str](Notice("has a job that cannot be moved"), seconds=REFUSED_SECONDS)
        """Keys with a job that the server refuses to move, so that no other key waits for it."""
        self._swept: list[str] = []
        self._others: dict[str, None] = {}
        self._handed_on = 0.0
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    # What others say --------------------------------------------------------------------------------------------------

    def wanted(self, keys: Iterable[str], *, anew: bool = False) -> None:
        """Jobs wait for these rates; `anew`: ask for them whatever is remembered."""
        now = monotonic()
        for key in [key.removeprefix(RATE) for key in keys]:
            if key in self._asking:
                self._again.add(key)
            elif anew or key not in self._waiters:
                self._remember(key, RateWaiters(now))
        self._wake.set()

    def handed_on(self, keys: str) -> None:
        """Another worker has no slot for these keys, a JSON array."""
        try:
            found = msgspec.json.decode(keys, type=list[str])
        except msgspec.DecodeError as error:
            log.warning("rates: a notification that says nothing (%s): %.80r", error, keys)
            return
        now = monotonic()
        for key in found:
            try:
                check_key(key, "rate key")
            except InvalidArguments as error:  # the server would refuse the question about all keys
                log.warning("rates: a notification names what is no key, which is left out: %s", error)
                continue
            waiters = self._waiters.get(key)
            if key in self._asking:
                self._again.add(key)
            elif key not in self._due and (waiters is None or waiters.pushed or waiters.at > now + LOOK_SECONDS):
                self._remember(key, RateWaiters(now))  # what is remembered may be of a rate that was changed
        self._wake.set()

    def swept(self, keys: Iterable[str]) -> None:
        """All keys of rates with waiters, whether they can move or not."""
        self._swept += [key.removeprefix(RATE) for key in keys]
        self._wake.set()

    def slots_freed(self) -> None:
        """A slot is free."""
        if self._due:
            self._wake.set()

    async def idle(self) -> None:
        """Wait until no answer is on its way."""
        await self._idle.wait()

    # The loop --------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Start jobs until cancelled."""
        await persist(self._step, name="rates", answers=self._session.answers, past_data=True)

    async def _step(self) -> None:
        if not await wait(self._wake, self._patience()) and not self._waiters and not self._others:
            await self._session.close()
            await self._wake.wait()
        self._wake.clear()
        try:
            await self._ask_due()
        except Exception:  # until rates can be asked again, a slot kept free would be kept from other jobs
            self._reserve(set())
            raise
        await self._hand_on()

    async def _ask_due(self) -> None:
        """Ask for the keys that are due, as far as slots go, and say for which slots are to be kept free."""
        if self._swept:
            await self._look()
        self._ripen()
        self._idle.clear()
        try:
            while some := self._eligible(openings := self._openings()):
                await self._ask(some, openings)
                self._ripen()
        finally:
            self._idle.set()
        if not self._waiters or monotonic() - self._came > KEPT_SECONDS:
            self._before = []  # with their arguments
        self._reserve(self._wanted(openings))

    def _wanted(self, openings: Openings) -> set[int]:
        """The groups that due keys want a slot of; none while no key is asked for."""
        if self._supplied():  # a slot kept free would be kept from the jobs that wait here
            return set()
        groups, wanted = set(range(1, len(openings.rooms) + 1)), set[int]()
        for key in self._due:
            if wanted >= groups:
                break
            wanted |= self._waiters[key].full or groups
        return wanted

    def _patience(self) -> float:
        """Seconds until there is something to do without a wake."""
        while self._times and not self._valid(*self._times[0]):
            heappop(self._times)
        now, pause = monotonic(), IDLE_SECONDS
        if self._times:
            pause = min(pause, max(0.0, self._times[0][0] - now))
        if self._due or self._others:
            pause = min(pause, max(FULL_SECONDS, self._handed_on + HAND_ON_SECONDS - now))
        if self._due and (left := self._supplied_until() - now) > 0.0:
            pause = min(pause, left)
        return pause

    def _valid(self, at: float, key: str) -> bool:
        waiters = self._waiters.get(key)
        return waiters is not None and waiters.at == at and key not in self._due

    def _remember(self, key: str, waiters: RateWaiters) -> None:
        waiters.at = max(waiters.at, self._left.until(key))
        self._waiters[key] = waiters
        self._due.pop(key, None)
        heappush(self._times, (waiters.at, key))

    def _forget(self, key: str) -> None:
        self._waiters.pop(key, None)
        self._due.pop(key, None)

    def _ripen(self) -> None:
        """Keys that may be asked for by now are due."""
        now = monotonic()
        while self._times and self._times[0][0] <= now:
            at, key = heappop(self._times)
            if self._valid(at, key):
                self._due[key] = at

    def _eligible(self, openings: Openings) -> list[str]:
        """Due keys that a slot may be free for, the longest due first."""
        if not self._due or not openings.roomy or self._supplied():
            return []
        now, roomy = monotonic(), openings.roomy
        return [key for key in self._due if self._waiters[key].fits(roomy, now)][:KEYS_MOST]

    # Asking ----------------------------------------------------------------------------------------------------------

    async def _ask(self, keys: list[str], openings: Openings) -> None:
        try:
            await self._try(keys, openings)
        except psycopg.Error as error:
            await self._mover.divide(error, keys, lambda some: self._try(some, self._openings()), self._refuse)

    async def _refuse(self, key: str, error: psycopg.Error) -> None:
        if isinstance(error, psycopg.errors.LockNotAvailable):
            log.warning("rate %s: another transaction has held it for a second; the sweep comes back to it", key)
            self._forget(key)
        else:
            self._left.leave(key, f"rate {key}", error, seconds=SOON_SECONDS if stands_twice(error) else None)
            self._remember(key, RateWaiters(monotonic()))

    async def _try(self, keys: Sequence[str], openings: Openings) -> None:
        claim = await self._state.claims.begin()
        link, worker_id = self._session.link, self._state.id
        queues, poison = openings.queues, integers(openings.poison)
        self._asking = frozenset(keys)
        self._again.clear()
        try:
            [(began,)], _, [(looked, said)], [(left,)], rows = await self._session.run_then(
                link.statement("rates_clock"),
                link.statement("unblock_lock", keys=[RATE + key for key in keys]),
                link.statement(
                    "rates_move",
                    keys=keys,
                    queues=queues,
                    pools=[index for index, room in enumerate(openings.rooms, 1) for _ in room.queues],
                    slots=[room.free for room in openings.rooms],
                    spare=[room.spare for room in openings.rooms],
                    most=min(self._most, sum(room.free + room.spare for room in openings.rooms)),
                    poison=poison,
                    tasks=self._tasks,
                    ordinary=openings.ordinary,
                    worker_id=worker_id,
                    claim=claim,
                ),
                then=[
                    link.statement("rates_outlook", keys=keys, queues=queues, poison=poison, tasks=self._tasks),
                    link.statement("rates_read", claim=claim, worker_id=worker_id),
                ],
            )
            self._state.claims.end(claim)
            # By our clock no later than the moment when the transaction moved the jobs: it may have waited for keys.
            at = self._session.sent + (0.0 if looked is None else max(0.0, (looked - began) / 1e6))
            self.asks += 1
            charged = msgspec.json.decode(said, type=dict[str, Charged])
            jobs = [Job(row, claim) for row in rows]
            for job in jobs:
                job.start_by = at + (charged[job.rate_key].late if job.rate_key in charged else 0.0)
            self.started += len(jobs)
            if jobs:
                self._adapt(jobs)
            self._note(keys, openings, charged, msgspec.json.decode(left, type=dict[str, Outlook]))
            for key in self._again:
                self._remember(key, RateWaiters(monotonic()))
            if jobs or not openings.ordinary:
                self._deliver(jobs)
        except (psycopg.errors.LockNotAvailable, psycopg.IntegrityError):
            raise  # nothing was committed
        except BaseException:
            self._state.in_doubt()
            raise
        finally:
            self._asking = frozenset()
            self._state.claims.end(claim)

    def _supplied(self) -> bool:
        """Whether more than half as many jobs as one answer may bring have not started yet, and are not too late."""
        return self._supplied_until() > monotonic()

    def _supplied_until(self) -> float:
        """Until when more than half as many wait here if none of them starts. One larger answer costs less per job than
        two.

        They start in order, so one job says it.
        """
        place = len(self._before) - self._most // 2 - 1
        return self._before[place].start_by or 0.0 if place >= 0 else 0.0

    def _adapt(self, jobs: list[Job]) -> None:
        """Set how many jobs one answer may bring from how quickly the jobs of the answer before have started.

        If all of them have started, more would have: then the number grows by a quarter at least. It at most doubles.
        """
        now, before = monotonic(), self._before
        if before:
            left = min(job.start_by or 0.0 for job in jobs) - now
            started = sum(job.start_by == STARTED for job in before)
            fits = int(started / max(now - self._came, 0.001) * left * SHARE)
            if started == len(before) and left > 0.0:
                fits = max(fits, self._most if len(before) < self._most else self._most * 5 // 4)
            self._most = max(LET_IN_LEAST, min(LET_IN_MOST, 2 * self._most, fits))
        self._before, self._came = jobs, now

    def _note(
        self, keys: Sequence[str], openings: Openings, charged: Mapping[str, Charged], outlooks: Mapping[str, Outlook]
    ) -> None:
        """Forget each key without a job that we could take; ask for the others when they may move on."""
        now, full, took = monotonic(), openings.full, any(each.taken for each in charged.values())
        for key in keys:
            if key not in charged:  # a key without a rate
                self._forget(key)
                continue
            taken, pause, outlook = charged[key].taken, charged[key].pause, outlooks[key]
            before = self._waiters.get(key)
            if outlook.elsewhere and taken:  # else the worker that named the key to us has named it to others
                self._others[key] = None
            if before is None or not (outlook.remains or outlook.poison):
                self._forget(key)
            elif not outlook.remains:  # poison jobs that we cannot take now
                self._remember(key, RateWaiters(now + LOOK_SECONDS))
            elif pause > 0.0:
                last, pushed = outlook.last, self._pushed(before, taken, outlook.last)
                self._remember(key, RateWaiters(now + max(pause, PAUSE_LEAST) + pushed, last=last, pushed=pushed))
            elif taken:  # our slots are the limit: not a question for each slot that is free
                self._remember(key, RateWaiters(now + (SLOT_PAUSE if taken < LET_IN_LEAST else 0.0)))
            elif full or took:
                before.full, before.asked = full or set(range(1, len(openings.rooms) + 1)), now
            else:  # the waiters are locked by another transaction, or are poison jobs of which one is enough
                self._remember(key, RateWaiters(now + LOCKED_SECONDS))

    def _pushed(self, before: RateWaiters, taken: int, last: int | None) -> float:
        """How much later to ask: not at all if we took a job, or if no other worker that could take ours was faster."""
        if taken or last is None or last == self._state.id or before.last is None:
            return 0.0
        return min(LOST_MOST, max(LOST_FIRST, 2 * before.pushed))

    # What no worker remembers -----------------------------------------------------------------------------------------

    async def _look(self) -> None:
        """Of the keys swept, find those that should have moved on. Ask for them, and notify other workers if the first
        waiter may be for them."""
        swept, self._swept = [key for key in self._swept if key not in self._due], []
        queues = self._openings().queues
        for first in range(0, len(swept), SWEPT_MOST):
            some = swept[first : first + SWEPT_MOST]
            overdue = self._session.link.statement(
                "rates_overdue", keys=some, queues=queues, tasks=self._tasks, seconds=OVERDUE_SECONDS
            )
            [rows] = await self._session.run(overdue)
            for key, others in rows:
                if others:
                    self._others[key] = None
                if key not in self._due:  # one of our jobs may wait behind it
                    self._remember(key, RateWaiters(monotonic()))

    async def _hand_on(self) -> None:
        """Notify other workers of the keys that we have no slot for, and of those that only other workers can serve."""
        now = monotonic()
        if not self._state.settings.notify:
            self._others.clear()
        if not self._state.settings.notify or now - self._handed_on < HAND_ON_SECONDS:
            return
        waiting = [key for key, since in self._due.items() if now - since >= FULL_SECONDS]
        keys, size = [], 0
        for key in dict.fromkeys([*self._others, *waiting]):
            size += len(json.dumps(key)) + 2
            if size > HAND_ON_BYTES:
                break
            keys.append(key)
        if keys:
            self._handed_on = now
            for key in keys:  # keys that found no room in the notification have their turn next
                self._others.pop(key, None)
                if since := self._due.pop(key, None):
                    self._due[key] = since
            await self._session.run(self._session.link.statement("rates_hand_on", keys=json.dumps(keys), notify=True))
