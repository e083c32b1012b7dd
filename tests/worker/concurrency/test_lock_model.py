"""Keys against a model: whatever happens to their jobs, never above the limit, never a free key with a waiting job.

Locks, a limit that is changed meanwhile, rates, unique keys, and jobs that have several of these.

Each step is one thing that happens to the jobs of a handful of keys; between two steps nothing runs, and the database's
clock stands. After each, who runs and who waits is compared with what must hold: no key above its limit, no line out of
order, no rate above its bound, no unique key without its job and no second job of one. A line that may move must have
moved when somebody has asked. At the end, everything that waits must come to its end.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from math import floor
from typing import Any, Literal, get_args

import msgspec
import psycopg
import pytest
from clocks import set_clock
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from lock_desk import Desk, LastFirst, Uncounted
from rate_desk import FreeOfCharge, bound, most
from workers import Eyes

import pgqueue
from pgqueue import Rate, Unique
from pgqueue.admin import actions
from pgqueue.admin import queues as queue_switch
from pgqueue.admin.locks import release
from pgqueue.database.sessions import Link, Session
from pgqueue.jobs.job import Job
from pgqueue.jobs.keys import Keys as UniqueKeys
from pgqueue.worker.concurrency.rate_limiter import Openings, RateLimiter
from pgqueue.worker.concurrency.unblocker import Unblocker, held
from pgqueue.worker.liveness.rescue import Rescue
from pgqueue.worker.run.slots import Room

QUEUES = ("default", "other")
EVERYTHING = 1000
Place = tuple[int, int]
"""Where a job stands in its line: (rank, id)."""
Mix = Literal["any", "chains", "limits"]
MIXES: tuple[Mix, ...] = get_args(Mix)

LIMIT = "limit:all"
PARKED = """SELECT key, rank, id, coalesce(lock_limit, 1), queue FROM pgqueue.job_blocked ORDER BY key, rank, id"""
CHAINED = """SELECT key, rank, id, coalesce(lock_limit, 1), queue FROM pgqueue.job_running WHERE key IS NOT NULL
             ORDER BY key, rank, id"""
HOLDERS = """SELECT 'lock:' || lock_key, id FROM pgqueue.job WHERE lock_key IS NOT NULL
             AND (state = 'running' AND key IS NULL OR holds AND state IN ('available', 'scheduled', 'blocked'))
             UNION ALL
             SELECT 'limit:' || limit_key, id FROM pgqueue.job WHERE limit_key IS NOT NULL
             AND (state = 'running' OR holds AND (state IN ('available', 'scheduled')
                                                  OR state = 'blocked' AND starts_with(key, 'rate:')))"""
GRANTED = "SELECT DISTINCT queue FROM pgqueue.job_available WHERE holds AND limit_key IS NOT NULL"
TABLES = ("job", "queue", "worker", "job_signal", "key_limit", "key_rate", "limiter", "unique_key")
CLEAN = "; ".join(f"DELETE FROM pgqueue.{table}" for table in TABLES)  # noqa: S608
JOB = """SELECT state, attempt + snoozes + crashes > 0, finished_at FROM pgqueue.job WHERE id = %s
         ORDER BY finished_at DESC LIMIT 1"""
LIVE = ("available", "scheduled", "blocked", "running")
AHEAD = 100
"""Who is in a chain comes before all in its line, however urgent those are: so much lower we take its rank to be."""
WAITING = """SELECT id FROM pgqueue.job WHERE state IN ('available', 'scheduled', 'blocked') ORDER BY id"""

START = datetime(2026, 3, 1, tzinfo=UTC)
RATES = {"r": Rate("2/10s"), "s": Rate("3/10s", burst=2)}
RATED = (None, "r", "s:x", "s:y")
HOLDS: dict[str, Any] = {"p": "pending", "l": "live", "m": 60.0}
"""Unique keys, and how long each is held."""
AGAIN = st.sampled_from(("no", "enqueue", "retry", "both"))
SLOTS = st.sampled_from((EVERYTHING, 1, 0))
ENQUEUED: dict[str, Any] = {
    "keys": st.lists(st.sampled_from(("a", "b", "c", None)), min_size=1, max_size=4),
    "limit": st.integers(1, 3),
    "limited": st.booleans(),
    "rate": st.sampled_from((None, None, *RATED)),
    "alone": st.booleans(),
    "unique": st.sampled_from((None, *HOLDS)),
    "priority": st.sampled_from((5, 2)),
    "queue": st.sampled_from(QUEUES),
}


@dataclass
class Taken:
    """Which job has taken a unique key last, and how long it holds it."""

    job: int
    hold: str | float


class RatedDesk(Desk):
    """A desk that asks for rates, too."""

    def __init__(self, dsn: str, link: Link) -> None:
        super().__init__(dsn, QUEUES, link)
        self.pace = Session(link, "rates")
        self.rates = RateLimiter(
            self.pace,
            self.state,
            openings=lambda: Openings([Room(self.queues, self.slots)], (-2, -1)),
            reserve=lambda places: None,
            deliver=self._let_in,
        )

    def _let_in(self, jobs: list[Job]) -> None:
        self.jobs.extend(jobs)
        self.slots -= len(jobs)

    async def ask(self) -> None:
        """Ask for all rates."""
        self.rates.wanted([key for key in RATED if key], anew=True)
        await self.rates._step()

    async def close(self) -> None:
        await self.pace.close()
        await super().close()


class Keys(RuleBasedStateMachine):
    """Two workers, two queues, three locks. `link` is how the workers speak to the database. In the mix `chains` most
    jobs have nothing but a lock, two of the three, with the limit 1, and may come in behind others; in the mix `limits`
    most have nothing but the limit, or a rate after it."""

    dsn: str
    link: type[Link] = Link
    drains: bool = True
    mix: Mix = "any"

    @initialize(jobs=st.lists(st.tuples(*ENQUEUED.values()), min_size=2, max_size=6))
    def start(self, jobs: list[tuple[Any, ...]]) -> None:
        self.loop = asyncio.new_event_loop()
        self.eyes = Eyes(self.dsn)
        self.eyes.do(CLEAN)
        self.turn_to(START)
        for name, rate in RATES.items():
            insert = "INSERT INTO pgqueue.key_rate (name, count, period, burst, set_at) VALUES (%s, %s, %s, %s, now())"
            self.eyes.do(insert, name, rate.count, rate.period, rate.burst)
        self.limits: dict[int, int] = {}
        """How many may have the lock of each job."""
        self.taken: dict[str, Taken] = {}
        self.starts: dict[str, list[float]] = {key: [] for key in RATED if key}
        """When jobs were let in under each key of a rate, in seconds."""
        self.full: dict[str, float] = dict.fromkeys(self.starts, 0.0)
        """When each is at rest again: what GCRA calls the theoretical arrival time."""
        self.under = 0
        """How many had the limit after the step before."""
        self.change_the_limit(2)
        self.running: list[dict[int, Job]] = [{}, {}]
        self.desks = [self.born(), self.born()]
        for job in jobs:
            self.enqueue(*job)

    def born(self) -> RatedDesk:
        desk: RatedDesk = self.run(self._born())
        return desk

    async def _born(self) -> RatedDesk:
        desk = RatedDesk(self.dsn, self.link(self.dsn, "pgqueue"))
        desk.behind = 3 if self.mix == "chains" else 1
        return desk

    def run(self, step: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(step)

    # What happens ----------------------------------------------------------------------------------------------------

    @rule(**ENQUEUED)
    def enqueue(
        self,
        keys: list[str | None],
        limit: int,
        limited: bool,
        rate: str | None,
        alone: bool,
        unique: str | None,
        priority: int,
        queue: str,
    ) -> None:
        """Some jobs; those of a rate may have nothing else to wait for, else few would come as far as its line."""
        if rate and alone:
            keys, limited = [None] * (2 * len(keys)), False
        if self.mix == "chains" and priority == 5:
            limit, limited, rate, unique = 1, False, None, None
            keys = ["ab"[place % 2] for place, _ in enumerate(keys * 2)]
        elif self.mix == "limits" and limit > 1:
            keys, limited, unique = [None] * len(keys), True, None
        name = "all" if limited else None
        for key in keys:
            lock = {"lock_key": key, "lock_limit": limit if key else None}
            self.put(unique, queue, priority, **lock, limit_key=name, rate_key=rate)

    def put(self, unique: str | None, queue: str = "default", priority: int = 5, **keys: Any) -> None:
        """One job. With a unique key it is made if and only if nobody has that."""
        option: dict[str, Any] = {} if unique is None else {"unique": Unique(lambda: unique, hold=HOLDS[unique])}
        task = pgqueue.remote("x", queue=queue, priority=priority).using(**option)
        holder = None if unique is None else self.holder(unique)
        [handle] = pgqueue.enqueue_many(self.eyes.conn, [msgspec.structs.replace(task.new(), max_attempts=100, **keys)])
        assert (None if handle.created else handle.id) == holder, f"{unique} is held by {holder}, not as {handle} says"
        if handle.created:
            self.limits[handle.id] = keys.get("lock_limit") or 1
            if unique is not None:
                self.taken[unique] = Taken(handle.id, HOLDS[unique])

    @precondition(lambda self: self.mix != "chains")
    @rule(seconds=st.sampled_from((1, 4, 11, 70)))
    def turn(self, seconds: int) -> None:
        self.turn_to(self.now + timedelta(seconds=seconds))

    def turn_to(self, now: datetime) -> None:
        self.now = now
        set_clock(self.eyes, now)

    @precondition(lambda self: self.mix != "chains")
    @rule(n=st.integers(0, 3))
    def change_the_limit(self, n: int) -> None:
        self.n = n
        self.eyes.do(
            "INSERT INTO pgqueue.key_limit (name, n, set_at) VALUES ('all', %s, now()) "
            "ON CONFLICT (name) DO UPDATE SET n = excluded.n",
            n,
        )

    @rule(at=st.integers(0, 1), room=st.sampled_from((1, EVERYTHING)), slots=SLOTS)
    def take(self, at: int, room: int, slots: int) -> None:
        """A fetch parks and claims, an admit lets in."""
        self.step(at, lambda desk: desk.park(room))
        self.let_in(at, slots)

    @rule(at=st.integers(0, 1))
    def park(self, at: int) -> None:
        """A fetch, and no admit yet."""
        self.step(at, lambda desk: desk.park(EVERYTHING))

    @precondition(lambda self: self.mix == "chains")
    @rule(at=st.integers(0, 1), number=st.integers(1, 4))
    def work(self, at: int, number: int) -> None:
        """A worker takes what it can, and completes some of it, one after the other."""
        self.take(at, EVERYTHING, EVERYTHING)
        for _ in range(number):
            if self.running[at]:
                job = next(iter(self.running[at].values()))
                self.step(at, lambda desk, job=job: desk.complete(job))  # type: ignore[misc]
                self.let_in(at)

    @precondition(lambda self: self.mix == "limits")
    @rule(at=st.integers(0, 1), free=st.integers(0, 2))
    def beat(self, at: int, free: int) -> None:
        """A worker says how many slots it has free; until it does, others take it to have none."""
        beaten = "UPDATE pgqueue.worker SET state = 'running', concurrency = 2, lost = 2 - %s WHERE id = %s"
        self.eyes.do(beaten, free, self.desks[at].worker_id)

    @rule(at=st.integers(0, 1), slots=SLOTS)
    def let_in(self, at: int, slots: int = EVERYTHING) -> None:
        """An admit lets in whom it was told of, as many here as there are slots."""
        self.desks[at].slots = slots
        self.step(at, lambda desk: desk.let_in())

    @precondition(lambda self: self.mix != "chains")
    @rule(at=st.integers(0, 1), slots=st.sampled_from((EVERYTHING, 1)), seconds=st.sampled_from((0, 4, 11)))
    def ask(self, at: int, slots: int, seconds: int) -> None:
        """Time passes, and who waits for a rate comes in, as many as it allows now and as there are slots; the others
        do not, if somebody asks again at once."""
        self.turn(seconds)
        self.ask_now(at, slots)
        self.ask_now(at, EVERYTHING)

    def ask_now(self, at: int, slots: int) -> None:
        self.desks[at].slots = slots
        lines = {key: self.lines().get("rate:" + key, []) for key in self.full}
        before = {key: len(times) for key, times in self.starts.items()}
        rooms = {key: self.room(key) for key in self.full}
        self.step(at, lambda desk: desk.ask())
        came = {key: len(times) - before[key] for key, times in self.starts.items()}
        assert sum(came.values()) <= slots, f"{came} came in for {slots} slots"
        assert all(came[key] <= rooms[key] for key in came), f"{came} came in, above {rooms}"
        if slots == EVERYTHING and not any(rank < 0 for line in lines.values() for rank, _ in line):
            expected = {key: min(rooms[key], len(line)) for key, line in lines.items()}
            assert came == expected, f"{came} came in, not {expected}"

    @precondition(lambda self: self.mix == "limits")
    @rule(number=st.integers(1, 4), at=st.integers(0, 1), slots=st.integers(0, 2))
    def complete_some(self, number: int, at: int, slots: int) -> None:
        """Some jobs complete, and one admit hands on what they had."""
        self.one_that_runs(0)
        for by, running in enumerate(self.running):
            for job in list(running.values())[:number]:
                self.step(by, lambda desk, job=job: desk.complete(job))  # type: ignore[misc]
        self.desks[at].admit.blocked({LIMIT: ()})
        self.let_in(at, slots)

    @rule(nth=st.integers(0, 50), admits=st.booleans(), slots=SLOTS, tidies=st.booleans(), again=AGAIN)
    def complete(self, nth: int, admits: bool, slots: int, tidies: bool, again: str) -> None:
        """A job completes. Its worker may die before it hands the keys on, or before it has tidied up."""
        if (found := self.one_that_runs(nth)) is None:
            return
        at, job = found
        self.step(at, lambda desk: desk.complete(job))
        if tidies and job.unique_key is not None:
            names = UniqueKeys(job.unique_key).names()
            released = self.desks[at].link.statement("complete_release_keys", keys=names, ids=[job.id])
            self.run(self.desks[at].session.run(released))
            left = "SELECT count(*) FROM pgqueue.unique_key WHERE job_id = %s AND hold <> 'after'"
            assert not self.eyes.one(left, job.id)
        if admits:
            self.let_in(at, slots)
            having = Counter(key for key, _ in self.holders())
            for key, (rank, id, _) in self.heads().items():
                if key in held(job) and rank >= 0 and (key != LIMIT or self.n):
                    assert having[key], f"{key} was handed on to nobody, and job {id} waits for it"
        self.once_more(job.id, again)

    @rule(nth=st.integers(0, 50), holding=st.booleans())
    def fail(self, nth: int, holding: bool) -> None:
        """An attempt fails, and the next one waits; with its key or without."""
        if (found := self.one_that_runs(nth)) is None:
            return
        at, job = found
        problem: dict[str, list[Any]] = {
            "delays": [0.0], "spents": [True], "snoozeds": [False], "holdings": [holding],
            "outcomes": ["failed"], "error_types": ["E"], "messages": ["no"], "tracebacks": [None],
        }  # fmt: skip
        self.step(at, lambda desk: desk.end("complete_retry", [job], keeping=holding, **problem))

    @rule(nth=st.integers(0, 50))
    def give_back(self, nth: int) -> None:
        """A job that runs is given back, unfinished."""
        if (found := self.one_that_runs(nth)) is None:
            return
        at, job = found
        self.step(at, lambda desk: desk.end("complete_release", [job], keeping=True))

    @precondition(lambda self: self.mix != "limits")
    @rule(at=st.integers(0, 1))
    def shorten(self, at: int) -> None:
        """What is behind others takes too long, or its worker is to take no more: it goes back to its lines."""
        self.step(at, lambda desk: desk.put_back(desk.chains.empty()))

    @precondition(lambda self: self.mix != "limits")
    @rule(at=st.integers(0, 1), nth=st.integers(0, 50))
    def cancel_one_behind(self, at: int, nth: int) -> None:
        """One that is behind another is cancelled; who is behind that stays."""
        chained = [id for _, _, id, _, _ in self.eyes.all(CHAINED) if id not in self.running[at]]
        if chained and (job := self.desks[at].chains.remove(chained[nth % len(chained)])) is not None:
            problem: dict[str, Any] = {
                "states": ["cancelled"], "reasons": ["x"], "outcomes": ["cancelled"], "error_types": [None],
                "messages": ["x"], "tracebacks": [None],
            }  # fmt: skip
            self.step(at, lambda desk: desk.end("complete_fail", [job], **problem))

    @rule(at=st.integers(0, 1))
    def promote(self, at: int) -> None:
        self.step(at, lambda desk: desk.session.run(desk.link.statement("scheduler_promote", **EVERY_DUE)))

    @rule(at=st.integers(0, 1), started=st.booleans())
    def crash(self, at: int, started: bool) -> None:
        """A worker dies and is rescued; another one takes its place. The first of its jobs may be why."""
        dead = self.desks[at]
        self.running[at].clear()
        self.run(dead.close())
        died = "UPDATE pgqueue.worker SET dead_at = now(), state = 'stopped', beat_at = %s WHERE id = %s"
        self.eyes.do(died, "epoch" if started else "2500-01-01", dead.worker_id)
        self.desks[at] = self.born()
        rescuer = self.desks[at]
        self.run(Rescue(rescuer.session, notify=True, rescued=lambda: None)._move(dead.worker_id))

    @rule(nth=st.integers(0, 50), again=AGAIN)
    def cancel(self, nth: int, again: str) -> None:
        if waiting := self.eyes.all(WAITING):
            job: int = waiting[nth % len(waiting)][0]
            actions.cancel(self.eyes.conn, job)
            self.once_more(job, again)

    def once_more(self, job: int, again: str) -> None:
        """A job that has ended is run again by hand, or somebody enqueues another one of its unique key; or both."""
        state, key = self.eyes.all("SELECT state, unique_key FROM pgqueue.job WHERE id = %s", job)[0]
        if key and again in ("enqueue", "both"):
            self.put(key)
        if again not in ("retry", "both"):
            return
        holder = self.holder(key) if key else None
        [answer] = actions.retry(self.eyes.conn, job, again=True)
        if state == "completed":  # as a new job, which has its lock, and no unique key
            assert answer.did == "again" and answer.new
            self.limits[answer.new] = self.limits[job]
        elif holder is not None and holder != job:
            assert (answer.did, answer.holder) == ("held", holder)
        else:
            assert answer.did == "retried", (answer, holder)
            if key and self.taken[key].job != job:
                self.taken[key] = Taken(job, "live")

    @precondition(lambda self: self.mix == "any")
    @rule(at=st.integers(0, 1))
    def tidy(self, at: int) -> None:
        """What is left over of unique keys goes."""
        everything = self.desks[at].link.statement("pruner_unique_keys", after="", n=EVERYTHING)
        self.run(self.desks[at].session.run(everything))
        for name, id in self.eyes.all("SELECT key, job_id FROM pgqueue.unique_key"):
            key = name.removeprefix("unique:")
            assert self.holder(key) or self.job(id)[0] in (*LIVE, "failed", "cancelled"), f"{key} is left over"

    @rule(nth=st.integers(0, 50), at=st.integers(0, 1), asks=st.booleans())
    def withdraw(self, nth: int, at: int, asks: bool) -> None:
        """A cancel that is rolled back, and an admit that meets it, or who asks for rates."""
        waiting = self.eyes.all(WAITING)
        if waiting:
            locked: int = waiting[nth % len(waiting)][0]
            with psycopg.connect(self.dsn) as conn:
                actions.cancel(conn, locked)
                self.step(at, lambda desk: desk.ask() if asks else desk.let_in(), passed_over=locked)
                conn.rollback()

    @rule(queue=st.sampled_from(QUEUES), open_again=st.sampled_from((True, True, False)))
    def pause(self, queue: str, open_again: bool) -> None:
        (queue_switch.resume if open_again else queue_switch.pause)(self.eyes.conn, queue)

    @precondition(lambda self: self.mix != "limits")
    @rule(key=st.sampled_from("abc"))
    def release_by_hand(self, key: str) -> None:
        release(self.eyes.conn, key)

    @rule(at=st.integers(0, 1))
    def sweep(self, at: int) -> None:
        """After a sweep, no key with room has anybody waiting; behind a smaller limit, after the next."""
        self.desks[at].slots = EVERYTHING
        for _ in {self.limits[place[1]] for line in self.lines().values() for place in line} or {0}:
            self.step(at, lambda desk: desk.sweep())
        having = Counter(key for key, _ in self.holders())
        chained = {key for key, *_ in self.eyes.all(CHAINED)}
        granted = self.eyes.all(GRANTED)
        queue = "SELECT queue FROM pgqueue.job WHERE id = %s"
        for key, (rank, id, limit) in self.heads().items():
            if key.startswith("rate:") or key in chained:  # a chain holds its key alone
                continue
            if key == LIMIT:
                limit = self.n
                if rank < 0 and self.eyes.all(queue, id)[0] in granted:  # one that nobody has taken is enough
                    continue
            assert having[key] >= limit, f"job {id} waits for {key}, which has {having[key]} holders of {limit}"

    # What must hold --------------------------------------------------------------------------------------------------

    @invariant()
    def no_key_is_above_its_limit(self) -> None:
        """As the workers see it, and as the rows do. The youngest holder had room for itself and all older ones."""
        under = 0
        running = [(key, id) for jobs in self.running for id, job in jobs.items() for key in held(job)]
        for seen in (running, self.holders()):
            holders: dict[str, list[int]] = {}
            for key, id in seen:
                holders.setdefault(key, []).append(id)
            under = len(holders.pop(LIMIT, ()))
            # Above a limit that was lowered may be those who had it before.
            assert under <= max(self.n, self.under), f"{under} are above the limit of {self.n}, before {self.under}"
            for key, ids in holders.items():
                assert len(ids) <= max(self.limits[id] for id in ids), f"{ids} are above the limit of {key}"
        self.under = under

    @invariant()
    def a_chain_is_in_one_pair_of_hands_and_runs_one_at_a_time(self) -> None:
        """Nobody else has anything of its key, and nobody in it is lost to the worker that has it."""
        chained = {key.removeprefix("lock:") for key, *_ in self.eyes.all(CHAINED)}
        for key in chained:
            rows = self.eyes.all("SELECT id, worker_id FROM pgqueue.job_running WHERE lock_key = %s", key)
            assert len({worker for _, worker in rows}) == 1, (key, rows)
            [at] = [at for at in (0, 1) if self.desks[at].worker_id == rows[0][1]]
            ids = {id for id, _ in rows}
            runs = ids & self.running[at].keys()
            assert len(runs) == 1, (key, rows, runs)
            assert ids - runs == {job.id for job in self.desks[at].chains.all() if job.lock_key == key}, (key, rows)

    @invariant()
    def every_holder_has_its_number(self) -> None:
        """However it came where it is: one without is read again and again, until it has gone."""
        unnumbered = "holds AND hold_pos IS NULL AND coalesce(lock_key, limit_key) IS NOT NULL"
        assert self.eyes.all(f"SELECT id, state FROM pgqueue.job WHERE {unnumbered}") == []  # noqa: S608

    @invariant()
    def no_rate_is_above_its_bound(self) -> None:
        for key, times in self.starts.items():
            rate = RATES[key.partition(":")[0]]
            assert most(times, rate.period) <= bound(rate), (key, times)

    @invariant()
    def no_unique_key_is_without_its_job_and_none_has_two(self) -> None:
        rows = {
            name.removeprefix("unique:"): id for name, id in self.eyes.all("SELECT key, job_id FROM pgqueue.unique_key")
        }
        for key in HOLDS:
            holder = self.holder(key)
            assert holder is None or rows.get(key) == holder, f"{key} is held by job {holder}, its row: {rows}"
            find = "SELECT id FROM pgqueue.job WHERE unique_key = %s"
            live = self.eyes.all(f"{find} AND state IN ('available', 'scheduled', 'blocked', 'running')", key)
            assert HOLDS[key] == "pending" or len(live) < 2, f"{key} has two live jobs: {live}"
            assert key not in rows or (rows[key],) in self.eyes.all(find, key), f"{key}: there is no job {rows[key]}"

    def step(self, at: int, act: Callable[[RatedDesk], Coroutine[Any, Any, Any]], passed_over: int = 0) -> None:
        """Something at one worker; who comes in comes in the order of the line."""
        desk = self.desks[at]
        before = self.lines()
        desk.jobs.clear()
        self.run(act(desk))
        for job in desk.jobs:
            if job.rate_key is not None:
                self.start_under(job.rate_key)
        self.running[at].update({job.id: job for job in desk.jobs})
        ended = {id for (id,) in self.eyes.all("SELECT id FROM pgqueue.job WHERE state <> 'running'")}
        self.running[at] = {id: job for id, job in self.running[at].items() if id not in ended}
        desk.jobs.clear()
        after, holders = self.lines(), set(self.holders())
        for key, line in before.items():
            chained = {id for rank, id in after.get(key, ()) if rank < -2 and (rank, id) not in line}
            came = [
                place
                for place in line
                if (key, place[1]) in holders or place[1] in self.running[at] or place[1] in chained
            ]
            left = [place for place in line if place in after.get(key, ()) and place[1] != passed_over]
            if not key.startswith(
                "lock:"
            ):  # a suspect is granted, and may have to wait for that; or for the one before
                left = [place for place in left if place[0] >= 0]
            for passed, by in self.compared(key, left, came, desk.slots):
                assert not passed or not by or max(by) < min(passed), f"{key}: {by} came in before {passed}"

    def compared(
        self, key: str, left: list[Place], came: list[Place], slots: int
    ) -> Iterator[tuple[list[Place], list[Place]]]:
        """Those left behind, each with those who may not have passed them: all; but where one of their queue has been
        granted the limit and nobody has taken it yet, those that find no slot here may be passed by other queues."""
        if key != LIMIT or slots == EVERYTHING:
            yield left, came
            return
        queues: dict[int, str] = dict(self.eyes.all("SELECT id, queue FROM pgqueue.job"))
        granted = {queue for (queue,) in self.eyes.all(GRANTED)}
        for queue in QUEUES:
            mine = [place for place in came if queue not in granted or queues[place[1]] == queue]
            yield [place for place in left if queues[place[1]] == queue], mine

    def start_under(self, key: str) -> None:
        _, _, gap = self.pace(key)
        now = (self.now - START).total_seconds()
        self.starts[key].append(now)
        self.full[key] = max(self.full[key], now) + gap

    def room(self, key: str) -> int:
        """How many a rate lets in now."""
        rate, early, gap = self.pace(key)
        ahead = max(0.0, self.full[key] - (self.now - START).total_seconds())
        return max(0, floor(((rate.burst - 1) * gap + early - ahead) / gap) + 1)

    def pace(self, key: str) -> tuple[Rate, float, float]:
        rate = RATES[key.partition(":")[0]]
        late = min(rate.period / 20, max(0.2, min(5.0, rate.period / rate.count / 100)))
        early = min(0.05, rate.period / 40)
        return rate, early, (rate.period + late + early) / rate.count

    def holder(self, key: str) -> int | None:
        """The job that has this unique key: whoever wants it is told of that one."""
        taken = self.taken.get(key)
        if taken is None:
            return None
        state, started, finished = self.job(taken.job)
        if state in LIVE:
            return None if taken.hold == "pending" and (started or state == "running") else taken.job
        if isinstance(taken.hold, float) and finished + timedelta(seconds=taken.hold) > self.now:
            return taken.job
        return None

    def job(self, id: int) -> tuple[str, bool, datetime]:
        """Its state, whether it has ever started, and when it ended."""
        [found] = self.eyes.all(JOB, id)
        return found

    # What is there ---------------------------------------------------------------------------------------------------

    def parked(self) -> Iterator[tuple[str, int, int, int]]:
        paused = {name for (name,) in self.eyes.all("SELECT name FROM pgqueue.queue WHERE paused_at IS NOT NULL")}
        for key, rank, id, limit, _ in self.eyes.all(CHAINED):
            if not any(id in running for running in self.running):
                yield key, rank - AHEAD, id, limit
        for key, rank, id, limit, queue in self.eyes.all(PARKED):
            if queue not in paused:
                yield key, rank, id, limit

    def holders(self) -> list[tuple[str, int]]:
        """Who has which key; of a chain the one that runs."""
        runs = [(key, id) for key, _, id, _, _ in self.eyes.all(CHAINED) if any(id in ids for ids in self.running)]
        return self.eyes.all(HOLDERS) + runs

    def lines(self) -> dict[str, list[Place]]:
        """Who waits for each key, in order; those of paused queues are passed over."""
        lines: dict[str, list[Place]] = {}
        for key, rank, id, _ in self.parked():
            lines.setdefault(key, []).append((rank, id))
        return lines

    def heads(self) -> dict[str, tuple[int, int, int]]:
        heads: dict[str, tuple[int, int, int]] = {}
        for key, rank, id, limit in self.parked():
            heads.setdefault(key, (rank, id, limit))
        return heads

    def one_that_runs(self, nth: int) -> tuple[int, Job] | None:
        """One of those that run; if there are none, workers take what they can first, for else hardly any would end."""
        for at in (0, 1):
            if not any(self.running):
                self.take(at, EVERYTHING, EVERYTHING)
        all_running = [(at, job) for at, jobs in enumerate(self.running) for job in jobs.values()]
        return all_running[nth % len(all_running)] if all_running else None

    # The end ---------------------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        if not hasattr(self, "desks"):
            return
        try:
            if self.drains:
                self.everything_ends()
        finally:
            for desk in self.desks:
                self.run(desk.close())
            self.eyes.close()
            self.loop.close()

    def everything_ends(self) -> None:
        for queue in QUEUES:
            self.pause(queue, True)
        self.change_the_limit(2)
        for _ in range(4 * len(self.limits) + 10):
            self.promote(0)
            self.sweep(0)
            for desk in self.desks:
                desk.slots = EVERYTHING
                desk.fetcher.wake(zero=True)
            for at in (0, 1):
                self.take(at, EVERYTHING, EVERYTHING)
                for _ in range(3):
                    self.turn(4)
                    self.ask_now(at, EVERYTHING)
                while self.running[at]:
                    self.step(at, lambda desk, at=at: desk.complete(*self.running[at].values()))  # type: ignore[misc]
                self.shorten(at)
            if not self.eyes.all(WAITING):
                break
        assert set(self.eyes.states()) <= {"completed", "cancelled", "failed"}, self.eyes.states()
        assert self.eyes.one("SELECT count(*) FROM pgqueue.job") == len(self.limits)


EVERY_DUE = {"after": "-infinity", "passed": "{}", "n": EVERYTHING, "notify": False}


def machine(dsn: str, link: type[Link] = Link, **others: Any) -> type[Keys]:
    return type("Keys", (Keys,), {"dsn": dsn, "link": link, **others})


def tried(examples: int, steps: int, *, derandomize: bool = True) -> settings:
    """Without shrinking: a step takes milliseconds, and what failed is told as it was."""
    return settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        derandomize=derandomize,
        suppress_health_check=list(HealthCheck),
        database=None,
        phases=[Phase.generate],
    )


@pytest.mark.promise("L04", "L08", "F12", "F22")
@pytest.mark.parametrize("mix", MIXES)
def test_whatever_happens_the_limit_holds_the_line_is_kept_and_nobody_waits_for_a_free_key(dsn: str, mix: Mix) -> None:
    run_state_machine_as_test(machine(dsn, mix=mix), settings=tried(3, 50))


@pytest.mark.second
@pytest.mark.promise("L04", "L08", "F12", "F22")
@pytest.mark.parametrize("mix", MIXES)
def test_whatever_happens_a_dozen_times(dsn: str, mix: Mix) -> None:
    run_state_machine_as_test(machine(dsn, mix=mix), settings=tried(12, 50))


@pytest.mark.long
@pytest.mark.promise("L04", "L08", "F12", "F22")
@pytest.mark.parametrize("mix", MIXES)
def test_whatever_happens_for_long(dsn: str, mix: Mix) -> None:
    run_state_machine_as_test(machine(dsn, mix=mix), settings=tried(1_000, 60, derandomize=False))


# What the model would not miss ----------------------------------------------------------------------------------------

LIVES = "AND j.state IN ('available', 'scheduled', 'blocked', 'running') LIMIT 1"


def judged(dsn: str, lives: str) -> None:
    """Who wants a unique key looks in other states for the job that has it."""
    with psycopg.connect(dsn) as conn:
        [[body]] = conn.execute("SELECT pg_get_functiondef('pgqueue.key_states'::regproc)").fetchall()
        assert body.count(LIVES) == 1
        conn.execute(body.replace(LIVES, lives).encode())


def finds(machine: type[Keys], what: str) -> None:
    with pytest.raises((AssertionError, pgqueue.Error), match=what):
        run_state_machine_as_test(machine, settings=tried(300, 50))


@pytest.mark.second
@pytest.mark.promise("L04")
def test_an_admit_that_does_not_count_is_found_out(dsn: str) -> None:
    """What hands a key on without counting its holders exceeds the limit, and the model says so."""
    finds(machine(dsn, Uncounted, drains=False), "above the limit")


@pytest.mark.second
@pytest.mark.promise("L08")
def test_a_line_of_a_limit_out_of_order_is_found_out(dsn: str) -> None:
    finds(machine(dsn, LastFirst, mix="limits", drains=False), "came in before")


@pytest.mark.second
def test_an_ended_job_that_keeps_its_unique_key_is_found_out(dsn: str) -> None:
    judged(dsn, "AND (j.state IN ('available', 'scheduled', 'blocked', 'running') OR j.attempt > 0) LIMIT 1")
    finds(machine(dsn, drains=False), "is held by None, not as|released and taken again")


@pytest.mark.second
def test_a_parked_job_that_loses_its_unique_key_is_found_out(dsn: str) -> None:
    judged(dsn, "AND j.state IN ('available', 'scheduled', 'running') LIMIT 1")
    finds(machine(dsn, drains=False), "is held by [0-9]+, not as")


@pytest.mark.second
def test_a_completion_that_wakes_nobody_is_found_out(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Unblocker, "ended", lambda self, jobs: None)
    finds(machine(dsn, mix="chains", drains=False), "was handed on to nobody")


@pytest.mark.second
def test_a_rate_that_charges_one_for_many_is_found_out(dsn: str) -> None:
    finds(machine(dsn, FreeOfCharge, drains=False), "came in, (above|not)")
