"""One series of kills: recorded lives, then a death at each of their points, then deaths at points drawn by a seed.

__main__.py says how, and tests call `series`. The lives are those of lives.py; the books are balanced by books.py.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict
from time import monotonic
from typing import Any

import psycopg

from crashes.books import Report, account, look, number
from crashes.lives import SCHEMA, rescue_all
from crashes.nursery import Life, Nursery
from crashes.points import Fault
from crashes.tasks import EXACTLY_ONCE, TABLES, enter, mixed
from pgqueue.admin import actions
from pgqueue.database.sessions import Link, Session
from pgqueue.worker.liveness.rescue import Rescue


def fault(point: str, nth: int = 1, *, cut: bool = False, server: int = 0) -> dict[str, Any]:
    return asdict(Fault(point, nth, cut, server))


AT_ONCE = 3
# The lives that are recorded. Two of them are cut off from an answer, and come to what is asked after that.
LIVES: list[dict[str, Any]] = [
    {"kind": "work", "jobs": 25, "grace": 1.0, "seconds": 8.0},
    {"kind": "work", "jobs": 15, "grace": 0.0, "seconds": 8.0},
    {"kind": "work", "jobs": 120, "grace": 1.0, "faults": [fault("complete: COMMIT complete_plain sent", cut=True)]},
    {"kind": "work", "jobs": 60, "grace": 1.0, "faults": [fault("fetch: COMMIT fetch_claim sent", 2, cut=True)]},
    {"kind": "apply"},
    {"kind": "rescue"},
]
RECORDED, RECORDED_MOST = 3, 12  # times each; if a point that is wanted was not crossed by then
CROSSINGS = {"work": 250, "shutdown": 60, "apply": 40}
"""About how many points such a life crosses."""
PROMISED = "app: COMMIT INSERT INTO ledger after"
BACKLOG = 12
TRIES, TRIES_ALONE = 3, 40
TAKEN_AWAY = 0.05  # after so many of the lives, a living worker loses its jobs
DRAIN_SECONDS = 120.0


Ways = dict[str, list[dict[str, Any]]]
"""Points, each with plans of lives that come there."""


class Series:
    """One series of kills in one database."""

    def __init__(
        self,
        dsn: str,
        nursery: Nursery,
        kills: int,
        seed: int,
        naive: str = "",
        only: str = "",
        wanted: tuple[str, ...] = (),
    ) -> None:
        self.report = Report(seed=seed)
        self._dsn, self._nursery, self._kills, self._naive, self._only = dsn, nursery, kills, naive, only
        self._wanted = set(wanted)
        self._random = random.Random(seed)
        self._session = Session(Link(dsn, SCHEMA), "harness")
        self._rescue = Rescue(self._session, notify=True, rescued=lambda: None)
        self._conn = psycopg.connect(dsn, application_name="harness app")
        self._eyes = psycopg.connect(dsn, autocommit=True, application_name="harness eyes")
        self._at: Counter[str] = Counter()
        self._promised: set[int] = set()
        self._youngest = 0
        self._working = True

    async def run(self) -> Report:
        began = monotonic()
        for statement in TABLES.split(";"):
            self._eyes.execute(statement.encode())
        async with asyncio.TaskGroup() as load:
            load.create_task(self._feed())
            load.create_task(self._kill())
        await self._drain()
        account(self._eyes, self.report, EXACTLY_ONCE, self._promised)
        self.report.at = dict(sorted(self._at.items()))
        self.report.seconds = round(monotonic() - began, 1)
        await self._session.close()
        self._conn.close()
        self._eyes.close()
        return self.report

    async def _kill(self) -> None:
        if self._only:
            await self._slots(*(self._some() for _ in range(AT_ONCE)))
        else:
            ways = await self._record()
            self.report.points = len(ways)
            names = sorted(ways)
            self._random.shuffle(names)
            # To each slot points of its own: lives that go side by side would all die at the same one.
            await self._slots(*(self._every(ways, names[slot::AT_ONCE], TRIES) for slot in range(AT_ONCE)))
            # Who did not come there among others may come there alone: as the leader, with more jobs.
            await self._slots(self._every(ways, names, TRIES_ALONE))
            self.report.missed = [name for name in ways if not self._at[name]]
            await self._slots(*(self._any() for _ in range(AT_ONCE)))
        self._working = False

    async def _slots(self, *rows: Iterator[dict[str, Any]]) -> None:
        """Have these rows of plans lived side by side, one life of each at a time."""
        async with asyncio.TaskGroup() as slots:
            for plans in rows:
                slots.create_task(self._slot(plans))

    async def _slot(self, plans: Iterator[dict[str, Any]]) -> None:
        for plan in plans:
            if plan["kind"] == "rescue":
                plan["pid"] = (await self._live(kind="work", faults=[fault("complete: BEGIN before")])).pid
            life = await self._live(**plan)
            await self._rescue_all(plan.get("pid", life.pid))
            look(self._eyes, self.report, self._youngest - 500)
            if self._naive or self._random.random() < TAKEN_AWAY:
                await self._take_away()

    # Lives -----------------------------------------------------------------------------------------------------------

    async def _record(self) -> Ways:
        """Live until the end, some times: every point that is surely crossed, with the plans that lead there.

        Those that are wanted are among them though it is luck to come there (a flush with outcomes of one kind only):
        more lives are lived until all have been seen.
        """
        ways: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
        sure: set[str] = set()
        for plan in LIVES:
            crossed = [await self._recorded(plan) for _ in range(RECORDED)]
            sure |= set.intersection(*crossed)  # what some came to and others did not is luck
            for point in set.union(*crossed):
                ways[point].append(plan)
        for plan in LIVES * (RECORDED_MOST - RECORDED):
            if self._wanted <= ways.keys():
                break
            for point in await self._recorded(plan):
                ways[point].append(plan)
        return {point: ways[point] for point in sure | self._wanted & ways.keys()}

    async def _recorded(self, plan: dict[str, Any]) -> set[str]:
        if plan["kind"] != "rescue":
            return set((await self._live(record=True, **plan)).seen)
        dead = await self._live(kind="work", faults=[fault("complete: BEGIN before")])
        life = await self._live(record=True, pid=dead.pid, **plan)
        await self._rescue_all(dead.pid)
        return set(life.seen)

    def _every(self, ways: Ways, names: list[str], tries: int) -> Iterator[dict[str, Any]]:
        """Every one of these points until a process has died there, or so many were on their way there in vain.

        All points that are left are deadly on each way. A life that dies at another of them is not in vain.
        """
        turns = 0
        tried: Counter[str] = Counter()
        while left := [name for name in names if not self._at[name] and tried[name] < tries]:
            turns += 1
            name = left[turns % len(left)]
            plan = ways[name][tried[name] % len(ways[name])]
            yield self._with(plan, *(fault(other) for other in left if plan in ways[other]))
            if not any(self._at[other] for other in left):
                tried[name] += 1

    def _any(self) -> Iterator[dict[str, Any]]:
        """Random crossings, of a life or of a shutdown."""
        while self.report.kills < self._kills:
            match self._random.random():
                case luck if luck < 0.05:
                    yield self._with({"kind": "apply"}, fault("*", self._random.randint(1, CROSSINGS["apply"])))
                case luck if luck < 0.3:
                    jobs, grace = self._random.randint(1, 20), self._random.choice((0.0, 1.0))
                    deadly = fault("shutdown, *", self._random.randint(1, CROSSINGS["shutdown"]))
                    yield self._with({"kind": "work", "jobs": jobs, "grace": grace}, deadly)
                case _:
                    yield self._with({"kind": "work"}, fault("*", self._random.randint(1, CROSSINGS["work"])))

    def _some(self) -> Iterator[dict[str, Any]]:
        """Only points of one pattern."""
        kind = "apply" if self._only.startswith("app") else "work"
        while self.report.kills < self._kills:
            yield {"kind": kind, "faults": [fault(self._only, self._random.randint(1, 5))]}

    def _with(self, plan: dict[str, Any], *deadly: dict[str, Any]) -> dict[str, Any]:
        """This plan with deadly faults, and now and then with a connection cut before."""
        faults = [*plan.get("faults", []), *deadly]
        if plan["kind"] == "work" and self._random.random() < 0.1:
            session, side = (
                self._random.choice(("fetch", "complete", "handler")),
                self._random.choice(("before", "sent")),
            )
            faults.append(fault(f"{session}: COMMIT*{side}", self._random.randint(1, 20), cut=True))
        return plan | {"faults": faults}

    async def _live(self, born: asyncio.Future[Life] | None = None, **plan: Any) -> Life:
        plan = {"naive": self._naive} | plan
        life = await self._nursery.live(born, dsn=self._dsn, seed=self._random.getrandbits(32), **plan)
        self.report.lives += 1
        self.report.late += life.late
        self.report.cuts += life.cuts
        if life.killed:
            self.report.kills += 1
            self._at[life.killed] += 1
        if life.killed == PROMISED:
            self._promised.update(life.promised)
        return life

    async def _rescue_all(self, pid: int) -> None:
        await rescue_all(self._rescue, self._session, pid)

    # Load ------------------------------------------------------------------------------------------------------------

    async def _feed(self) -> None:
        """Always something to do: jobs in transactions of the application, one in five rolled back."""
        while self._working:
            # Suspects do not count: they wait for a worker that does nothing else.
            if number(self._eyes, WAITING, BACKLOG) < BACKLOG:
                self._youngest = enter(self._conn, mixed(4))[-1]
                if self._random.random() < 0.2:
                    self._conn.rollback()
                else:
                    self._conn.commit()
            else:
                await asyncio.sleep(0.02)
            await asyncio.sleep(0)

    async def _take_away(self) -> None:
        """The jobs of a living worker are given to others, as if it had been taken for dead."""
        for worker_id, beat in self._eyes.execute(LIVING).fetchall():
            if not self._naive and self._random.random() < 0.5:
                self.report.taken_away += await self._rescue.rescue(worker_id, beat)
            else:  # without ending its sessions, as behind a pooler: only the fence is left
                self.report.taken_away += self._eyes.execute(MARK, (worker_id,)).rowcount
        await self._rescue.strays()

    async def _drain(self) -> None:
        """A worker that nobody kills runs what is left; what three crashes put aside is retried by hand."""
        born: asyncio.Future[Life] = asyncio.get_running_loop().create_future()
        life = asyncio.ensure_future(self._live(born, naive="", kind="work", jobs=1 << 40, seconds=3600.0, grace=10.0))
        pid = (await born).pid
        deadline = monotonic() + DRAIN_SECONDS
        while unfinished := number(self._eyes, UNFINISHED):
            if monotonic() > deadline:
                print(f"{unfinished} jobs are still unfinished after {DRAIN_SECONDS:g} s", file=sys.stderr)
                break
            await self._rescue.strays()
            crashed = self._eyes.execute(CRASHED).fetchall()
            if crashed:
                actions.retry(self._eyes, *(job_id for (job_id,) in crashed))
                self.report.crashed += len(crashed)
            await asyncio.sleep(0.05)
        os.kill(pid, signal.SIGTERM)
        await life


WAITING = "SELECT count(*) FROM (SELECT FROM pgqueue.job_available WHERE rank >= 0 LIMIT %s) AS ordinary"
LIVING = b"SELECT id, beat FROM pgqueue.worker WHERE dead_at IS NULL ORDER BY random() LIMIT 1"
MARK = b"UPDATE pgqueue.worker SET dead_at = pgqueue.now(), state = 'stopped' WHERE id = %s AND dead_at IS NULL"
UNFINISHED = """SELECT count(*) FROM pgqueue.job
                WHERE state NOT IN ('completed', 'failed', 'cancelled') OR state = 'failed' AND reason = 'crashed'"""
CRASHED = b"SELECT id FROM pgqueue.job WHERE state = 'failed' AND reason = 'crashed' ORDER BY id LIMIT 500"


async def series(
    dsn: str, kills: int, seed: int, *, naive: str = "", only: str = "", wanted: tuple[str, ...] = ()
) -> Report:
    """One series of so many kills at least, in this migrated database.

    `only` restricts them to the points of that pattern; `naive` spoils the processes (naive.py). Each point that
    is `wanted` is among those where a process dies, if any process ever comes there.
    """
    async with Nursery.open() as nursery:
        return await Series(dsn, nursery, kills, seed, naive, only, wanted).run()
