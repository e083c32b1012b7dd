"""Desks: the taking half of a worker with its admits, step by step; and how many held a key at once."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from random import Random
from time import monotonic
from typing import Any

import pytest
from workers import Eyes, Taker

from pgqueue.database import sessions
from pgqueue.database.sessions import Link, Session
from pgqueue.database.statements import Statement, integers, texts
from pgqueue.jobs.job import Job
from pgqueue.worker.concurrency.chains import Chains
from pgqueue.worker.concurrency.sweep import Sweep
from pgqueue.worker.concurrency.unblocker import Unblocker, held
from pgqueue.worker.fetch.keyed_claim import KEYED_CLAIMS
from pgqueue.worker.run.slots import Room


class Desk(Taker):
    """Fetches and admits when told, with `room` for so many, so many `behind` each holder; nothing runs by itself."""

    def __init__(
        self,
        dsn: str,
        queues: tuple[str, ...] = ("default",),
        link: Link | None = None,
        tasks: Sequence[str] | None = None,
    ) -> None:
        super().__init__(dsn, queues, tasks=tasks)
        self.link = self.session.link = link or self.link
        self.keys = Session(self.link, "unblock")
        self.slots, self.asked, self.behind = 1000, 0, 0
        self.chains = Chains()
        self.admit = Unblocker(
            self.keys,
            self.state,
            rooms=lambda: [Room(self.queues, self.slots, self.asked, behind=self.behind)],
            deliver=self._came,
            done=lambda: None,
        )
        self.sweeping = Sweep(self.session, found=self.admit.swept)
        self.hands.blocked, self.hands.waiter_cursors = self.admit.blocked, self.admit.waiter_cursors

    def know(self) -> None:
        super().know()
        self.admit._semaphores._tasks = texts(self.tasks)

    def _came(self, jobs: list[Job]) -> None:
        self.chains.add(jobs)
        self.jobs.extend(job for job in jobs if not job.chained)

    async def park(self, room: int = 1000) -> list[Job]:
        """One fetch; what it claimed. What it parked waits for `let_in`."""
        return await self.fetch(room)

    async def let_in(self) -> list[Job]:
        """Admit whatever waits to be; who came in here."""
        self.jobs.clear()
        if self.admit.wants:
            await self.admit._step()
        return list(self.jobs)

    async def take(self, room: int = 1000) -> list[int]:
        """Fetch and admit; the ids of all that run here now because of it."""
        claimed = await self.park(room)
        self.jobs[:] = claimed + await self.let_in()
        return sorted(job.id for job in self.jobs)

    async def sweep(self) -> list[int]:
        """Sweep and admit; who came in here."""
        assert await self.sweeping.sweep()
        return sorted(job.id for job in await self.let_in())

    async def end(self, name: str, jobs: Iterable[Job], /, keeping: bool = False, **params: Any) -> list[Job]:
        """End jobs by this statement, as the completer does; their keys wait for `let_in`, but those of chains: who
        goes on there runs now, and is answered. Where they keep their keys the rest of their chains is put back."""
        jobs = list(jobs)
        await self.session.run(ending(self.link, name, jobs, self.worker_id, **params))
        self.admit.holding(job for job in jobs if not job.chained)
        if keeping:
            for job in jobs:
                self.admit.blocked_again(job)
            await self.put_back([after for job in jobs for after in self.chains.cut(job)])
        nexts = {job: after for job in jobs if (after := self.chains.next(job)) is not None}
        for before, after in nexts.items():
            self.admit.handed_on(before, after)
        self.admit.ended(job for job in jobs if job not in nexts)
        self.jobs.extend(nexts.values())
        return list(nexts.values())

    async def put_back(self, jobs: list[Job]) -> None:
        """Give back what is behind others."""
        for job in jobs:
            self.admit.blocked_again(job)
        if jobs:
            await self.end("complete_release", jobs, keeping=True)

    async def complete(self, *jobs: Job) -> list[Job]:
        return await self.end("complete_plain", jobs)

    async def close(self) -> None:
        await self.keys.close()
        await super().close()


def ending(link: Link, name: str, jobs: Sequence[Job], worker_id: int, **params: Any) -> Statement[Any]:
    return link.statement(
        name,
        ids=integers([job.id for job in jobs]),
        claims=integers([job.claim for job in jobs]),
        worker_id=worker_id,
        version_tag="t",
        notify=True,
        agos=[],
        traces=[],
        fingerprints=[],
        **params,
    )


class Unlocked(Link):
    """What a naive admit sends: it does not lock its keys before it counts."""

    def statement(self, name: str, **params: object) -> Statement[list[tuple[Any, ...]]]:
        if name == "unblock_lock":
            return super().statement("sessions_settings")
        return super().statement(name, **params)


class OneStatement(Link):
    """What another naive admit sends: it counts in the statement that takes the lock."""

    def statement(self, name: str, **params: object) -> Statement[list[tuple[Any, ...]]]:
        made = super().statement(name, **params)
        if name == "unblock_lock":
            return super().statement("sessions_settings")
        if name not in ("unblock_move", "unblock_next", "unblock_limits"):
            return made
        lock = super().statement("unblock_lock").sql.rstrip().rstrip(";")
        first = "me AS MATERIALIZED ("
        sql = made.sql.replace(first, f"locked AS MATERIALIZED ({lock}), {first}", 1).replace(
            "w.dead_at IS NULL FOR KEY SHARE", "w.dead_at IS NULL AND (SELECT count FROM locked) >= 0 FOR KEY SHARE", 1
        )
        assert sql.count(" locked") == 2, sql
        return replace(made, sql=sql)


class Uncounted(Link):
    """What a third naive admit sends: it hands the key on without counting."""

    def statement(self, name: str, **params: object) -> Statement[list[tuple[Any, ...]]]:
        made = super().statement(name, **params)
        sql = made.sql.replace("ELSE count(*)::integer END AS n", "ELSE 0 END AS n")
        return replace(made, sql=sql.replace("count(*)::integer AS n", "0 * count(*)::integer AS n"))


class LastFirst(Link):
    """What an admit sends that gives the last places within a limit to those who came last."""

    def statement(self, name: str, **params: object) -> Statement[list[tuple[Any, ...]]]:
        made = super().statement(name, **params)
        if name != "unblock_limits":
            return made
        sql = made.sql.replace("ORDER BY late, rank, id) AS place", "ORDER BY late, rank, id DESC) AS place")
        assert sql != made.sql
        return replace(made, sql=sql)


class UnlockedClaim(Link):
    """What a naive claim sends: it takes the first job of a key that looks free without having locked that."""

    def statement(self, name: str, **params: object) -> Statement[list[tuple[Any, ...]]]:
        made = super().statement(name, **params)
        if name != "keyed_claim_lock":
            return made
        sql, lock, _ = made.sql.partition("AND pg_catalog.pg_try_advisory_xact_lock")
        assert lock
        return replace(made, sql=sql)


class EarlyClaim(UnlockedClaim):
    """What another naive claim sends: it locks keys in the statement that looks whether they are free."""

    def statement(self, name: str, **params: object) -> Statement[list[tuple[Any, ...]]]:
        made = super().statement(name, **params)
        if name != "keyed_claim_move":
            return made
        early = "pg_try_advisory_xact_lock(hashtextextended('pgqueue.' || wanted.key, 7))"
        sql = made.sql.replace("WHERE held.n = 0", f"WHERE {early} AND held.n = 0")
        assert sql != made.sql
        return replace(made, sql=sql)


class Holders:
    """How many hold each key, as those who hold it say: never more than there are in the database."""

    def __init__(self) -> None:
        self.now: Counter[str] = Counter()
        self.most: Counter[str] = Counter()
        self.ran = 0

    def begin(self, job: Job) -> None:
        self.ran += 1
        for key in held(job):
            self.now[key] += 1
            self.most[key] = max(self.most[key], self.now[key])

    def end(self, job: Job) -> None:
        self.now.subtract(held(job))


LOCKED = "INSERT INTO pgqueue.job (task, lock_key, lock_limit) SELECT 'x', 'k', %s FROM generate_series(1, %s)"
LIMITED = "INSERT INTO pgqueue.job (task, limit_key) SELECT 'x', 'k' FROM generate_series(1, %s)"
BOTH = (
    "INSERT INTO pgqueue.job (task, lock_key, limit_key) SELECT 'x', 'k' || n %% 5, 'k' FROM generate_series(1, %s) n"
)
ALLOW = """INSERT INTO pgqueue.key_limit (name, n, set_at) VALUES ('k', %s, now())
           ON CONFLICT (name) DO UPDATE SET n = excluded.n"""


@asynccontextmanager
async def within(seconds: float) -> AsyncIterator[Callable[[], None]]:
    """A limit for all of it, and most of it for each connection: so many at once take a busy server a while.

    Gives what begins that time anew: how long so many steps take is the machine's matter, but each must come.
    """
    usual = sessions.options
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sessions, "options", lambda link, name: usual(link, name) | {"connect_timeout": 60})
        async with asyncio.timeout(seconds) as limit:
            yield lambda: limit.reschedule(asyncio.get_running_loop().time() + seconds)


async def race(
    dsn: str, eyes: Eyes, *, claimers: int, rounds: int, limit: int, link: type[Link] = Link, behind: int = 0
) -> int:
    """So many claimers work off so many jobs of one key, until too many run; how many at most ran at the same time."""
    eyes.do(LOCKED, limit, rounds)
    holders = await racing(dsn, claimers, rounds, {"lock:k": limit}, link, behind)
    return holders.most["lock:k"]


async def racing(
    dsn: str, claimers: int, rounds: int, most: dict[str, int], link: type[Link] = Link, behind: int = 0
) -> Holders:
    """So many claimers work off so many jobs that are there, until more than `most` have one of these keys; so many
    come in `behind` each holder."""
    holders = Holders()
    desks = [Desk(dsn, link=link(dsn, "pgqueue")) for _ in range(claimers)]

    async def claimer(desk: Desk, goes_on: Callable[[], None]) -> None:
        desk.slots, desk.behind = 1, behind
        while holders.ran < rounds and all(holders.most[key] <= most[key] for key in most):
            claimed = await desk.park(1)
            desk.admit.blocked(dict.fromkeys(most, ()))
            running = claimed + await desk.let_in()
            while running:
                holders.begin(job := running.pop())
                goes_on()
                await asyncio.sleep(0)
                holders.end(job)
                running += await desk.complete(job)

    try:
        async with within(60) as goes_on:
            await asyncio.gather(*(claimer(desk, goes_on) for desk in desks))
    finally:
        for desk in desks:
            await desk.close()
    return holders


async def rush(dsn: str, eyes: Eyes, *, claimers: int, rounds: int, limit: int, link: type[Link] = Link) -> int:
    """In each round some of those who run end, and then all claimers ask for the one key at once; how many at most ran.

    Nobody fetches meanwhile: all that wait are parked before the first round. Ends with the first round that is wrong.
    """
    eyes.do(LOCKED, limit, rounds * limit)
    desks = [Desk(dsn, link=link(dsn, "pgqueue")) for _ in range(claimers)]
    dice, running, most = Random(rounds), list[tuple[Desk, Job]](), 0
    began = monotonic()

    async def ask(desk: Desk) -> None:
        desk.slots = limit
        desk.admit.blocked({"lock:k": ()})
        running.extend((desk, job) for job in await desk.let_in())

    try:
        async with within(120) as goes_on:
            while await desks[0].park() or eyes.one("SELECT EXISTS (SELECT FROM pgqueue.job_available)"):
                assert not desks[0].jobs, "a claim took what must be admitted"
            for number in range(1, rounds + 1):
                await asyncio.gather(*map(ask, desks))
                goes_on()
                most = max(most, len(running))
                if most > limit:
                    break
                assert running, f"round {number}: nobody was let in"
                dice.shuffle(running)
                for _ in range(dice.randint(1, len(running))):
                    desk, job = running.pop()
                    await desk.complete(job)
    finally:
        print(f"{claimers} claimers, {number} rounds of {limit}: {number / (monotonic() - began):.1f} rounds/s")
        for desk in desks:
            await desk.close()
    return most


async def race_of_pairs(dsn: str, eyes: Eyes, *, claimers: int, pairs: int, link: type[Link] = Link) -> int:
    """Claimers of two queues work off so many keys with a job in each; how many of a key ran beside each other."""
    eyes.do(
        "INSERT INTO pgqueue.job (task, queue, lock_key) SELECT 'x', 'q' || n %% 2, 'k' || n / 2 "
        "FROM generate_series(0, %s) AS n",
        2 * pairs - 1,
    )
    holders = Holders()
    desks = [Desk(dsn, (f"q{number % 2}",), link=link(dsn, "pgqueue")) for number in range(claimers)]

    async def claimer(desk: Desk, goes_on: Callable[[], None]) -> None:
        desk.fetcher.keyed_claim.left = KEYED_CLAIMS
        while holders.ran < 2 * pairs and (not holders.most or max(holders.most.values()) < 2):
            for job in await desk.park(1) + await desk.let_in():
                holders.begin(job)
                goes_on()
                await asyncio.sleep(0)
                holders.end(job)
                await desk.complete(job)

    try:
        async with within(120) as goes_on:
            await asyncio.gather(*(claimer(desk, goes_on) for desk in desks))
    finally:
        for desk in desks:
            await desk.close()
    return max(holders.most.values())


Desks = Callable[..., Desk]


@pytest.fixture
async def desks(dsn: str) -> AsyncIterator[Desks]:
    """Makes desks; closed at the end."""
    made: list[Desk] = []

    def make(**options: Any) -> Desk:
        made.append(Desk(dsn, link=Link(dsn, "pgqueue", **options)))
        return made[-1]

    yield make
    for desk in made:
        await desk.close()


def put(eyes: Eyes, number: int, key: str = "a", **columns: Any) -> list[int]:
    names = ", ".join(["lock_key", *columns])
    values = ", ".join(["%s"] * (1 + len(columns)))
    insert = f"INSERT INTO pgqueue.job (task, {names}) SELECT 'x', {values} FROM generate_series(1, %s) RETURNING id"  # noqa: S608
    return [job_id for (job_id,) in eyes.all(insert, key, *columns.values(), number)]
