"""Pacers: what lets jobs start under rates, step by step and without a worker; and how many started in a period."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import replace
from time import monotonic
from typing import Any

from workers import Eyes, Taker

from pgqueue.database.sessions import Link, Session
from pgqueue.database.statements import Statement, texts
from pgqueue.jobs.concurrency import Rate
from pgqueue.jobs.job import Job
from pgqueue.worker.concurrency.rate_limiter import Openings, RateLimiter
from pgqueue.worker.run.slots import Room

RATED = "INSERT INTO pgqueue.key_rate (name, count, period, burst, set_at) VALUES (%s, %s, %s, %s, pgqueue.now())"


class Pacer(Taker):
    """Fetches, sweeps and asks when told, with `slots` for so many; nothing runs by itself."""

    def __init__(
        self,
        dsn: str,
        queues: tuple[str, ...] = ("default",),
        link: Link | None = None,
        tasks: Sequence[str] | None = None,
    ) -> None:
        super().__init__(dsn, queues, tasks=tasks)
        self.pace = Session(link or self.link, "rates")
        self.slots = 1000
        self.poison: Sequence[int] = (-2, -1)
        self.ordinary = True
        self.rates = RateLimiter(
            self.pace,
            self.state,
            openings=lambda: Openings([Room(self.queues, self.slots)], self.poison, self.ordinary),
            reserve=lambda places: None,
            deliver=self.let_in,
        )
        self.hands.blocked = lambda keys, singly, lowest: self.rates.wanted(keys)

    def know(self) -> None:
        super().know()
        self.rates._tasks = texts(self.tasks)

    def let_in(self, jobs: list[Job]) -> None:
        self.jobs.extend(jobs)
        self.slots -= len(jobs)
        if any(job.crashes for job in jobs):
            self.poison = ()

    async def ask(self, *keys: str) -> list[int]:
        """Ask for these keys, and those that are due; who was let in."""
        self.jobs.clear()
        self.rates.wanted(keys, anew=True)
        await self.rates._step()
        return [job.id for job in self.jobs]

    async def park(self) -> None:
        """Fetch: what has a rate waits for it then."""
        assert await self.fetch() == []

    async def close(self) -> None:
        await self.pace.close()
        await super().close()


class Unlocked(Link):
    """What a naive version sends: it does not lock the key before it looks."""

    def statement(self, name: str, **params: object) -> Statement[list[tuple[Any, ...]]]:
        if name == "unblock_lock":
            return Statement("SELECT 1", {}, list)
        return super().statement(name, **params)


class FreeOfCharge(Link):
    """What another naive version sends: it charges one, however many it lets in."""

    def statement(self, name: str, **params: object) -> Statement[list[tuple[Any, ...]]]:
        made = super().statement(name, **params)
        sql = made.sql.replace("c.base + c.taken * c.gap)", "c.base + 1 * c.gap)")
        assert name != "rates_move" or sql != made.sql
        return replace(made, sql=sql)


class SlowSearch(Link):
    """As the real one, but each head takes its time to be found."""

    SECONDS = 0.5

    def statement(self, name: str, **params: object) -> Statement[list[tuple[Any, ...]]]:
        made = super().statement(name, **params)
        slow = f"mine.slots > 0 AND pg_catalog.pg_sleep({self.SECONDS}) IS NOT NULL"
        sql = made.sql.replace("mine.slots > 0", slow)
        assert name != "rates_move" or sql != made.sql
        return replace(made, sql=sql)


class SlowOutlook(Link):
    """As the real one, but it takes a while to look what is left to wait."""

    SECONDS = 2.0

    def statement(self, name: str, **params: object) -> Statement[list[tuple[Any, ...]]]:
        made = super().statement(name, **params)
        slow = f"FROM (SELECT pg_catalog.pg_sleep({self.SECONDS})) AS slow, (SELECT DISTINCT k.key"
        sql = made.sql.replace("FROM (SELECT DISTINCT k.key", slow)
        assert name != "rates_outlook" or sql != made.sql
        return replace(made, sql=sql)


def rated(eyes: Eyes, number: int, key: str = "k", **columns: Any) -> list[int]:
    """So many jobs under this key of a rate, not yet in its line; their ids."""
    columns = {"task": "x", "rate_key": key} | columns
    places = ", ".join(["%s"] * len(columns))
    insert = f"INSERT INTO pgqueue.job ({', '.join(columns)}) VALUES ({places}) RETURNING id"  # noqa: S608
    return [eyes.one(insert, *columns.values()) for _ in range(number)]


def line(eyes: Eyes, key: str = "k") -> list[int]:
    """The ids of those that wait for this key, in order."""
    return [
        id for (id,) in eyes.all("SELECT id FROM pgqueue.job_blocked WHERE key = %s ORDER BY rank, id", "rate:" + key)
    ]


def most(starts: Iterable[float], period: float) -> int:
    """How many started in the fullest window of one period."""
    times = sorted(starts)
    return max(
        (sum(1 for time in times[place:] if time < first + period) for place, first in enumerate(times)), default=0
    )


def bound(rate: Rate) -> int:
    return rate.count + rate.burst - 1


async def race(dsn: str, eyes: Eyes, rate: Rate, *, askers: int, seconds: float, link: type[Link] = Link) -> int:
    """So many askers let in as many as they get, for so long; how many started in the fullest period."""
    eyes.do(RATED, "k", rate.count, rate.period, rate.burst)
    rated(eyes, int(2 * askers * rate.count * seconds / rate.period) + 2 * rate.burst)
    pacers = [Pacer(dsn, link=link(dsn, "pgqueue")) for _ in range(askers)]
    starts: list[float] = []

    async def asker(pacer: Pacer) -> None:
        while monotonic() < until:
            pacer.slots = 1000
            await pacer.ask("k")
            now = monotonic()
            starts.extend(now for job in pacer.jobs if job.start_by is not None and now <= job.start_by)

    try:
        await pacers[0].park()
        until = monotonic() + seconds
        await asyncio.gather(*map(asker, pacers))
    finally:
        for pacer in pacers:
            await pacer.close()
    assert len(starts) >= rate.burst
    return most(starts, rate.period)
