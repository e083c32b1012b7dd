"""Unique keys in an order that a seed decides, while ids are given again, beside a model of which job holds which key.

Used by system/test_unique_model.py.

Three applications have transactions open at a time, of each isolation level, with savepoints. Each enqueues by Python
or SQL, cancels, retries, discards, reschedules, commits, rolls back, or loses its connection. A worker takes and ends
jobs. The sequence of ids is set back; keys expire; history is thrown away; leftovers are swept. One thing happens at a
time: so what is true when an answer comes is still true when the model looks.

The model knows how each job holds each of its keys, by the key and the time of the enqueue. It reads jobs only. After
each step:
1. No two living jobs hold a key, and the row of the key names the one that does.
2. A job that was made is the only holder of its keys. A duplicate's answer names a holder, and so does a refused retry.
3. A discard changes no holder.
4. A lock is not available only while another transaction is open. A serialization failure is for old snapshots only.
5. No job is claimed that a transaction relies on (`hold="pending"`).
At the end each key is free if no job holds it, for Python and SQL.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any

import psycopg
from completer_desk import Desk, desk_of
from psycopg import errors
from workers import Eyes

import pgqueue
from pgqueue import DuplicateJob, NewJob, Unique
from pgqueue.database.statements import text
from pgqueue.jobs.job import Job
from pgqueue.jobs.outcomes import Cancelled, Completed, Failed, Outcome, Problem, Released, Retried

mail = pgqueue.remote("unique.mail")
Conn = psycopg.Connection[Any]
Holders = set[tuple[int, datetime]]
"""Ids of jobs, and when they were enqueued."""
NAMES = ("unique:a", "unique:b", "unique:c", "idempotency:a", "idempotency:b")
LIVING = ("available", "scheduled", "blocked", "running")
ENDED = ("completed", "failed", "cancelled")
PATIENCE = "5ms"
DAY = 86_400.0
BROKEN = Problem("failed", "E", "broken")

JOBS = """
    SELECT id, enqueued_at, state, attempt + snoozes + crashes = 0, finished_at, clock_timestamp() FROM pgqueue.job
    WHERE starts_with(%(name)s, 'unique:') AND 'unique:' || unique_key = %(name)s
       OR starts_with(%(name)s, 'idempotency:') AND 'idempotency:' || idempotency_key = %(name)s
"""
NOTED = """
    SELECT job_id, enqueued_at, key FROM pgqueue.unique_key
    WHERE key = %(name)s AND hold = 'after' AND expires_at > clock_timestamp()
    UNION ALL
    SELECT job_id, enqueued_at, NULL FROM pgqueue.discarded_key
    WHERE hash = pgqueue.key_hash(%(name)s) AND expires_at > clock_timestamp()
"""
"""Keys of jobs that history may have forgotten, and of jobs that were discarded."""
LATER = """
    SET LOCAL session_replication_role = replica;
    UPDATE pgqueue.job SET finished_at = finished_at - interval '2 days' WHERE finished_at IS NOT NULL;
    UPDATE pgqueue.unique_key SET expires_at = expires_at - interval '2 days' WHERE expires_at IS NOT NULL;
    UPDATE pgqueue.discarded_key SET expires_at = expires_at - interval '2 days'
"""
"""Two days pass for all that has ended."""


class Model:
    """How each job holds its keys, and which jobs do."""

    def __init__(self, eyes: Eyes, random: Random) -> None:
        self.eyes, self.random = eyes, random
        self.holds: dict[tuple[str, datetime], tuple[str, float]] = {}
        self.claimed: set[datetime] = set()
        """The jobs that were claimed at least once, by the times of their enqueues."""
        self.seen: Counter[str] = Counter()

    def holders(self, conn: Conn, name: str) -> Holders:
        """Which jobs hold this key, as this connection sees them."""
        found: Holders = set()
        rows = conn.execute(JOBS, {"name": name}).fetchall()
        for id, since, state, fresh, ended, now in rows:
            hold, seconds = self.holds[name, since]
            if state in LIVING:
                waits = state != "running" and fresh and (since not in self.claimed or self.names(conn, name, since))
                holds = hold != "pending" or waits
            else:
                holds = hold == "after" and ended + timedelta(seconds=seconds) > now
            if holds:
                found.add((id, since))
        known = {since for _, since, *_ in rows}
        noted = conn.execute(NOTED, {"name": name}).fetchall()
        return found | {(id, since) for id, since, key in noted if key is None or since not in known}

    def is_pending(self, name: str, since: datetime) -> bool:
        return self.holds.get((name, since), ("", 0.0))[0] == "pending"

    def names(self, conn: Conn, name: str, since: datetime) -> bool:
        """Whether the row of the key names this job. A pending job that was given back holds it if no other has it."""
        row = "SELECT FROM pgqueue.unique_key WHERE key = %s AND enqueued_at = %s"
        return bool(conn.execute(row, [name, since]).fetchall())

    def learn(self, conn: Conn) -> None:
        """Take in how new jobs hold their keys, and jobs that were retried without their row."""
        rows = conn.execute("SELECT key, enqueued_at, hold, seconds FROM pgqueue.unique_key").fetchall()
        self.holds |= {(key, since): (hold, seconds) for key, since, hold, seconds in rows}

    def check(self) -> None:
        """No two living jobs hold a key, and the one that does is named by the row."""
        for name in NAMES:
            living = [
                (id, since)
                for id, since, state, fresh, *_ in self.eyes.conn.execute(JOBS, {"name": name}).fetchall()
                if state in LIVING and (not self.is_pending(name, since) or (fresh and since not in self.claimed))
            ]
            assert len(living) <= 1, (name, living)
            assert all(self.names(self.eyes.conn, name, since) for _, since in living), (name, living)


class Application:
    """A connection, and the transaction that it has open."""

    def __init__(self, dsn: str, model: Model, others: list[Application]) -> None:
        self.dsn, self.model, self.random, self.others = dsn, model, model.random, others
        self._connect()

    def _connect(self) -> None:
        self.conn = psycopg.connect(self.dsn, options=f"-c lock_timeout={PATIENCE}")
        self._ended()

    def _ended(self) -> None:
        self.open = self.wrote = self.old = False
        self.relies: set[datetime] = set()
        self.savepoints: list[set[datetime]] = []

    def begin(self) -> None:
        if not self.open:
            level = self.random.choice(["READ COMMITTED"] * 3 + ["REPEATABLE READ", "SERIALIZABLE"])
            self.conn.execute(f"SET TRANSACTION ISOLATION LEVEL {level}".encode())
            self.open, self.old = True, level != "READ COMMITTED"

    def end(self) -> None:
        how = self.random.choice([self.conn.commit] * 6 + [self.conn.rollback] * 2 + [self.conn.close])
        try:
            how()
        except (errors.SerializationFailure, errors.LockNotAvailable):  # a COMMIT waits for its turn to notify
            self.conn.rollback()
        if self.conn.closed:
            self._connect()
        self._ended()

    def savepoint(self) -> None:
        self.begin()
        self.conn.execute(f"SAVEPOINT s{len(self.savepoints)}".encode())
        self.savepoints.append(set(self.relies))

    def back(self) -> None:
        if self.savepoints:
            to = self.random.randrange(len(self.savepoints))
            self.conn.execute(f"ROLLBACK TO s{to}".encode())
            self.relies = self.savepoints[to]
            del self.savepoints[to + 1 :]

    def does(self, act: Callable[[], None]) -> None:
        """Do it in the transaction. An error undoes it to the last savepoint, or all."""
        self.begin()
        try:
            act()
        except errors.LockNotAvailable:
            assert any(other.wrote for other in self.others if other is not self), "no other transaction is open"
        except errors.SerializationFailure:
            assert self.old
        except errors.UniqueViolation as taken:  # the id that was given again
            assert str(taken.diag.constraint_name).startswith("job_"), taken
        else:
            self.wrote = True
            return
        self.model.seen["refused"] += 1
        if self.savepoints and not self.old:
            self.back()
        else:
            self.conn.rollback()
            self._ended()

    def new(self) -> tuple[NewJob[Any], dict[str, tuple[str, float]]]:
        """A job, and how it is to hold each of its keys."""
        holds: dict[str, tuple[str, float]] = {}
        names = self.random.choice(
            [[name] for name in NAMES[:3]] * 3 + [[name] for name in NAMES[3:]] + [list(NAMES[::3])]
        )
        asked = mail.using(delay=self.random.choice([0, 0, 3600]))
        for name in names:
            kind, _, key = name.partition(":")
            if kind == "unique":
                hold: Any = self.random.choice(["pending", "live", "live", 0.0, 1000.0])
                twice: Any = self.random.choice(["return", "return", "replace", "raise"])
                asked = asked.using(unique=Unique(lambda key=key, **_: key, hold=hold, on_duplicate=twice))
                holds[name] = ("after", hold) if isinstance(hold, float) else (hold, 0.0)
            else:
                asked = asked.using(idempotency_key=key)
                holds[name] = ("after", DAY)
        return asked.new(), holds

    def enqueue(self) -> None:
        batch = [self.new() for _ in range(self.random.choice([1, 1, 2, 3]))]
        try:
            handles = pgqueue.enqueue_many(self.conn, [job for job, _ in batch])
        except DuplicateJob as duplicate:
            assert duplicate.existing is not None
            self.model.learn(self.conn)
            self._names(duplicate.existing, [name for _, holds in batch for name in holds])
            return
        self.model.learn(self.conn)
        for handle, (_, holds) in zip(handles, batch, strict=True):
            (self._made if handle.created else self._names)(handle.id, list(holds))
            for name, hold in holds.items() if handle.created and not self.old else ():
                row = "SELECT hold, seconds FROM pgqueue.unique_key WHERE key = %s"
                assert self.conn.execute(row, [name]).fetchall() == [hold]

    def enqueue_by_sql(self) -> None:
        names = self.random.choice([[NAMES[0]], [NAMES[1]], [NAMES[3]], [NAMES[0], NAMES[4]]])
        keys = dict(name.split(":") for name in names)
        [(before,)] = self.conn.execute("SELECT clock_timestamp()").fetchall()
        call = "SELECT pgqueue.enqueue('unique.mail', unique_key => %s, idempotency_key => %s)"
        [(id,)] = self.conn.execute(call, [keys.get("unique"), keys.get("idempotency")]).fetchall()
        self.model.learn(self.conn)
        new = "SELECT FROM pgqueue.job WHERE id = %s AND enqueued_at >= %s"
        (self._made if self.conn.execute(new, [id, before]).fetchall() else self._names)(id, names)

    def _made(self, id: int, names: list[str]) -> None:
        self.model.seen["made"] += 1
        for name in names:
            found = self.model.holders(self.conn, name)
            if self.old:  # a job that holds it as of the snapshot has ended since
                found = {
                    each for each in found if each[0] == id or each in self.model.holders(self.model.eyes.conn, name)
                }
            assert [each for each, _ in found] == [id], (id, name, found)

    def _names(self, id: int, names: list[str]) -> None:
        """The answer to a duplicate is a job that holds one of the keys; one that waits for its start waits for us."""
        self.model.seen["duplicate"] += 1
        found = {(name, *each) for name in names for each in self.model.holders(self.conn, name)}
        assert id in {each for _, each, _ in found}, (id, names, found)
        if (
            len(names) == 1
        ):  # with two keys the answer may be that to the idempotency key, which keeps no job from its start
            pending = {since for name, each, since in found if each == id and self.model.is_pending(name, since)}
            self.relies |= pending

    def by_hand(self) -> None:
        kinds: list[tuple[Callable[..., list[Any]], tuple[str, ...]]] = [
            (pgqueue.cancel, LIVING),
            (pgqueue.cancel, LIVING),
            (pgqueue.retry, ENDED[1:]),
            (pgqueue.retry, ENDED[1:]),
            (pgqueue.discard, ENDED),
            (self._reschedule, LIVING[:2]),
        ]
        act, states = self.random.choice(kinds)
        rows = self.conn.execute(
            "SELECT DISTINCT id FROM pgqueue.job WHERE state = ANY (%s) ORDER BY 1", [list(states)]
        )
        ids = [id for (id,) in rows.fetchall()]
        if not ids:
            return
        before = {name: self.model.holders(self.conn, name) for name in NAMES}
        answers = act(self.conn, *self.random.sample(ids, min(len(ids), self.random.choice([1, 2, 4]))))
        self.model.learn(self.conn)
        if act is pgqueue.discard:
            assert before == {name: self.model.holders(self.conn, name) for name in NAMES}
        for answer in answers:
            self.model.seen[answer.did] += 1
            if answer.did == "retried":
                self._retried(answer.id)
            elif answer.did == "held":
                self._names(answer.holder, list(NAMES))

    def _reschedule(self, conn: Conn, *ids: int) -> list[Any]:
        return pgqueue.reschedule(conn, *ids, at=datetime.now(UTC) + timedelta(seconds=self.random.choice([-1, 1000])))

    def _retried(self, id: int) -> None:
        keys = "SELECT unique_key, idempotency_key, enqueued_at FROM pgqueue.job_available WHERE id = %s"
        for unique, idempotency, since in self.conn.execute(keys, [id]).fetchall():
            for name in (unique and f"unique:{unique}", idempotency and f"idempotency:{idempotency}"):
                if name and not self.model.is_pending(name, since):
                    self._made(id, [name])


class Work:
    """A worker that takes and ends jobs, and what happens to the database besides."""

    def __init__(self, desk: Desk, model: Model, applications: list[Application]) -> None:
        self.desk, self.model, self.random, self.applications = desk, model, model.random, applications
        self.taken: list[Job] = []

    async def take(self) -> None:
        self.desk.taker.fetcher.wake(zero=True)
        for job in await self.desk.taker.fetch(self.random.choice([1, 2, 5])):
            since = job.enqueued_at
            assert not any(since in application.relies for application in self.applications), job
            self.model.claimed.add(since)
            self.taken.append(job)

    async def finish(self) -> None:
        """End a job. If it goes on, or has a successor, no transaction is open: that might have the id, or the key."""
        if not self.taken:
            return
        job = self.taken.pop(self.random.randrange(len(self.taken)))
        follows = Completed(None, (self.applications[0].new()[0],))
        kinds: list[Outcome] = [Completed(), Completed("1"), follows, Retried(0.0, BROKEN), Retried(1000.0, BROKEN),
                                Failed("error", BROKEN), Cancelled("no more"), Released()]  # fmt: skip
        outcome = self.random.choice(kinds)
        if outcome is follows or isinstance(outcome, Retried | Released):
            for application in self.applications:
                application.end()
        self.desk.completer.finish(job, outcome)
        await asyncio.wait_for(self.desk.completer.flushed(), 60)
        self.model.seen[type(outcome).__name__] += 1

    def befall(self) -> None:
        with suppress(errors.LockNotAvailable), self.model.eyes.conn.transaction():
            self.model.eyes.conn.execute(f"SET LOCAL lock_timeout = '{PATIENCE}'".encode())
            what = self.random.choice(["ids", "ids", "ids", "later", "forget", "sweep"])
            if what == "ids":
                self.model.eyes.do(f"SELECT setval('pgqueue.job_id_seq', {self.random.randint(1, 12)}, false)")
            elif what == "later":
                self.model.eyes.conn.execute(LATER.encode())
            elif what == "forget":
                self.model.eyes.do(f"SELECT pgqueue.advance_ring('{self.random.choice(['done', 'dead'])}', true)")
            else:
                self.model.eyes.conn.execute(text("pruner_unique_keys", "pgqueue").encode(), {"after": "", "n": 1000})


@asynccontextmanager
async def played(dsn: str, eyes: Eyes, seed: int, steps: int) -> AsyncIterator[Model]:
    """So many steps. At the end no transaction is open."""
    model = Model(eyes, Random(seed))
    applications: list[Application] = []
    applications += [Application(dsn, model, applications) for _ in range(3)]
    try:
        async with desk_of(dsn, eyes) as desk:
            work = Work(desk, model, applications)
            for _ in range(steps):
                application = model.random.choice(applications)
                acts = [application.enqueue] * 5 + [application.enqueue_by_sql] + [application.by_hand] * 2
                step = model.random.randrange(20)
                if step < 8:
                    application.does(model.random.choice(acts))
                elif step < 10:
                    (application.savepoint if step < 9 else application.back)()
                elif step < 13:
                    application.end()
                elif step < 15:
                    await work.take()
                elif step < 18:
                    await work.finish()
                else:
                    work.befall()
                model.learn(eyes.conn)
                model.check()
            for application in applications:
                application.end()
            model.check()
            yield model
    finally:
        for application in applications:
            application.conn.close()
