"""Keys against a model: whatever happens to their jobs, never above the limit, never a free key with a waiting job.

Locks, a limit that is changed meanwhile, and jobs that have both.

Each step is one thing that happens to the jobs of a handful of keys; between two steps nothing runs. After each, who
runs and who waits is compared with what must hold; at the end, everything that waits must come to its end.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import psycopg
import pytest
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
from keyed import Desk, Uncounted
from workers import Eyes

from pgqueue import operate, pausing
from pgqueue.admit import held
from pgqueue.job import Job
from pgqueue.locks import release
from pgqueue.rescue import Rescue
from pgqueue.sessions import Link

QUEUES = ("default", "other")
EVERYTHING = 1000
Place = tuple[int, int]
"""Where a job stands in its line: (rank, id)."""

LIMIT = "limit:all"
PARKED = """SELECT key, rank, id, coalesce(lock_limit, 1), queue FROM pgqueue.job_blocked ORDER BY key, rank, id"""
HOLDERS = """SELECT 'lock:' || lock_key, id FROM pgqueue.job WHERE lock_key IS NOT NULL
             AND (state = 'running' OR holds AND state IN ('available', 'scheduled', 'blocked'))
             UNION ALL
             SELECT 'limit:' || limit_key, id FROM pgqueue.job WHERE limit_key IS NOT NULL
             AND (state = 'running' OR holds AND state IN ('available', 'scheduled'))"""
CLEAN = (
    "DELETE FROM pgqueue.job; DELETE FROM pgqueue.queue; DELETE FROM pgqueue.worker; DELETE FROM pgqueue.job_signal; "
)
CLEAN += "DELETE FROM pgqueue.key_limit"
WAITING = """SELECT id FROM pgqueue.job WHERE state IN ('available', 'scheduled', 'blocked') ORDER BY id"""


class Keys(RuleBasedStateMachine):
    """Two workers, two queues, three keys. `link` is how the admits of the workers speak to the database."""

    dsn: str
    link: type[Link] = Link

    @initialize()
    def start(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.eyes = Eyes(self.dsn)
        self.eyes.do(CLEAN)
        self.limits: dict[int, int] = {}
        self.under = 0
        """How many had the limit after the step before."""
        self.change_the_limit(2)
        self.running: list[dict[int, Job]] = [{}, {}]
        self.desks = [self.born(), self.born()]

    def born(self) -> Desk:
        desk: Desk = self.run(self._born())
        return desk

    async def _born(self) -> Desk:
        return Desk(self.dsn, QUEUES, self.link(self.dsn, "pgqueue"))

    def run(self, step: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(step)

    # What happens ----------------------------------------------------------------------------------------------------

    @rule(
        keys=st.lists(st.sampled_from(("a", "b", "c", None)), min_size=1, max_size=4),
        limit=st.integers(1, 3),
        limited=st.booleans(),
        priority=st.sampled_from((5, 2)),
        queue=st.sampled_from(QUEUES),
    )
    def enqueue(self, keys: list[str | None], limit: int, limited: bool, priority: int, queue: str) -> None:
        insert = (
            "INSERT INTO pgqueue.job (task, queue, lock_key, lock_limit, limit_key, priority, rank, max_attempts) "
            "VALUES ('x', %s, %s, %s, %s, %s, %s, 100) RETURNING id"
        )
        for key in keys:
            name = "all" if limited else None
            self.limits[self.eyes.one(insert, queue, key, limit, name, priority, 2 * priority + 1)] = limit

    @rule(n=st.integers(0, 3))
    def change_the_limit(self, n: int) -> None:
        self.n = n
        self.eyes.do(
            "INSERT INTO pgqueue.key_limit (name, n, set_at) VALUES ('all', %s, now()) "
            "ON CONFLICT (name) DO UPDATE SET n = excluded.n",
            n,
        )

    @rule(at=st.integers(0, 1), room=st.sampled_from((1, EVERYTHING)), slots=st.sampled_from((0, 1, EVERYTHING)))
    def take(self, at: int, room: int, slots: int) -> None:
        """A fetch parks and claims, an admit lets in."""
        self.desks[at].slots = slots
        self.step(at, lambda desk: desk.take(room))

    @rule(at=st.integers(0, 1))
    def park(self, at: int) -> None:
        """A fetch, and no admit yet."""
        self.step(at, lambda desk: desk.park(EVERYTHING))

    @rule(at=st.integers(0, 1))
    def let_in(self, at: int) -> None:
        self.step(at, lambda desk: desk.let_in())

    @precondition(lambda self: any(self.running))
    @rule(nth=st.integers(0, 50), admits=st.booleans())
    def complete(self, nth: int, admits: bool) -> None:
        at, job = self.one_that_runs(nth)
        self.step(at, lambda desk: desk.complete(job))
        if admits:
            self.let_in(at)

    @precondition(lambda self: any(self.running))
    @rule(nth=st.integers(0, 50), holding=st.booleans())
    def fail(self, nth: int, holding: bool) -> None:
        """An attempt fails, and the next one waits; with its key or without."""
        at, job = self.one_that_runs(nth)
        problem: dict[str, list[Any]] = {
            "delays": [0.0], "spents": [True], "snoozeds": [False], "holdings": [holding],
            "outcomes": ["failed"], "error_types": ["E"], "messages": ["no"], "tracebacks": [None],
        }  # fmt: skip
        self.step(at, lambda desk: desk.end("complete_retry", [job], **problem))

    @rule(at=st.integers(0, 1))
    def promote(self, at: int) -> None:
        self.step(at, lambda desk: desk.session.run(desk.link.statement("schedule_promote", **EVERY_DUE)))

    @rule(at=st.integers(0, 1))
    def crash(self, at: int) -> None:
        """A worker dies and is rescued; another one takes its place."""
        dead = self.desks[at]
        self.running[at].clear()
        self.run(dead.close())
        self.eyes.do("UPDATE pgqueue.worker SET dead_at = now(), state = 'stopped' WHERE id = %s", dead.worker_id)
        self.desks[at] = self.born()
        rescuer = self.desks[at]
        self.run(Rescue(rescuer.session, notify=True, rescued=lambda: None)._move(dead.worker_id))

    @rule(nth=st.integers(0, 50))
    def cancel(self, nth: int) -> None:
        waiting = self.eyes.all(WAITING)
        if waiting:
            operate.cancel(self.eyes.conn, waiting[nth % len(waiting)][0])

    @rule(nth=st.integers(0, 50), at=st.integers(0, 1))
    def withdraw(self, nth: int, at: int) -> None:
        """A cancel that is rolled back, and an admit that meets it."""
        waiting = self.eyes.all(WAITING)
        if waiting:
            locked: int = waiting[nth % len(waiting)][0]
            with psycopg.connect(self.dsn) as conn:
                operate.cancel(conn, locked)
                self.step(at, lambda desk: desk.let_in(), passed_over=locked)
                conn.rollback()

    @rule(queue=st.sampled_from(QUEUES), open_again=st.booleans())
    def pause(self, queue: str, open_again: bool) -> None:
        (pausing.resume if open_again else pausing.pause)(self.eyes.conn, queue)

    @rule(key=st.sampled_from("abc"))
    def release_by_hand(self, key: str) -> None:
        release(self.eyes.conn, key)

    @rule(at=st.integers(0, 1))
    def sweep(self, at: int) -> None:
        """After a sweep, no key with room has anybody waiting; behind a smaller limit, after the next."""
        self.desks[at].slots = EVERYTHING
        for _ in {self.limits[place[1]] for line in self.lines().values() for place in line} or {0}:
            self.step(at, lambda desk: desk.sweep())
        having = Counter(key for key, _ in self.eyes.all(HOLDERS))
        granted = self.eyes.one("SELECT count(*) FROM pgqueue.job_available WHERE holds AND limit_key IS NOT NULL")
        for key, (rank, id, limit) in self.heads().items():
            if key == LIMIT:
                limit = self.n
                if rank < 0 and granted:  # a suspect is granted, and one that nobody has taken is enough
                    continue
            assert having[key] >= limit, f"job {id} waits for {key}, which has {having[key]} holders of {limit}"

    # What must hold --------------------------------------------------------------------------------------------------

    @invariant()
    def no_key_is_above_its_limit(self) -> None:
        """As the workers see it, and as the rows do. The youngest holder had room for itself and all older ones."""
        under = 0
        running = [(key, id) for jobs in self.running for id, job in jobs.items() for key in held(job)]
        for seen in (running, self.eyes.all(HOLDERS)):
            holders: dict[str, list[int]] = {}
            for key, id in seen:
                holders.setdefault(key, []).append(id)
            under = len(holders.pop(LIMIT, ()))
            # Above a limit that was lowered may be those who had it before.
            assert under <= max(self.n, self.under), (LIMIT, under, self.n, self.under)
            for key, ids in holders.items():
                assert len(ids) <= max(self.limits[id] for id in ids), (key, ids)
        self.under = under

    def step(self, at: int, act: Callable[[Desk], Coroutine[Any, Any, Any]], passed_over: int = 0) -> None:
        """Something at one worker; who comes in comes in the order of the line."""
        desk = self.desks[at]
        before = self.lines()
        desk.jobs.clear()
        self.run(act(desk))
        self.running[at].update({job.id: job for job in desk.jobs})
        ended = {id for (id,) in self.eyes.all("SELECT id FROM pgqueue.job WHERE state <> 'running'")}
        self.running[at] = {id: job for id, job in self.running[at].items() if id not in ended}
        desk.jobs.clear()
        after, holders = self.lines(), set(self.eyes.all(HOLDERS))
        for key, line in before.items():
            came = [place for place in line if (key, place[1]) in holders]
            left = [place for place in line if place in after.get(key, ()) and place[1] != passed_over]
            if key == LIMIT:  # a suspect is granted, and may have to wait for that
                left = [place for place in left if place[0] >= 0]
            if came and left:
                assert max(came) < min(left), f"{key}: {came} came in before {left}"

    # What is there ---------------------------------------------------------------------------------------------------

    def parked(self) -> Iterator[tuple[str, int, int, int]]:
        paused = {name for (name,) in self.eyes.all("SELECT name FROM pgqueue.queue WHERE paused_at IS NOT NULL")}
        for key, rank, id, limit, queue in self.eyes.all(PARKED):
            if queue not in paused:
                yield key, rank, id, limit

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

    def one_that_runs(self, nth: int) -> tuple[int, Job]:
        all_running = [(at, job) for at, jobs in enumerate(self.running) for job in jobs.values()]
        return all_running[nth % len(all_running)]

    # The end ---------------------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        if not hasattr(self, "desks"):
            return
        try:
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
                desk.fetcher.watermark.start_at_zero()
            for at in (0, 1):
                self.take(at, EVERYTHING, EVERYTHING)
                while self.running[at]:
                    self.step(at, lambda desk, at=at: desk.complete(*self.running[at].values()))  # type: ignore[misc]
            if not self.eyes.all(WAITING):
                break
        assert set(self.eyes.states()) <= {"completed", "cancelled", "failed"}, self.eyes.states()
        assert self.eyes.one("SELECT count(*) FROM pgqueue.job") == len(self.limits)


EVERY_DUE = {"after": "-infinity", "n": EVERYTHING, "notify": False}


def machine(dsn: str, link: type[Link] = Link) -> type[Keys]:
    return type("Keys", (Keys,), {"dsn": dsn, "link": link})


def tried(examples: int, steps: int) -> settings:
    """Without shrinking: a step takes milliseconds, and what failed is told as it was."""
    return settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        database=None,
        phases=[Phase.generate],
    )


@pytest.mark.promise("L04", "L08", "F12", "F22")
def test_whatever_happens_the_limit_holds_the_line_is_kept_and_nobody_waits_for_a_free_key(dsn: str) -> None:
    run_state_machine_as_test(machine(dsn), settings=tried(25, 30))


@pytest.mark.long
@pytest.mark.promise("L04", "L08", "F12", "F22")
def test_whatever_happens_for_long(dsn: str) -> None:
    run_state_machine_as_test(machine(dsn), settings=tried(1_000, 60))


@pytest.mark.promise("L04")
def test_an_admit_that_does_not_count_is_found_out(dsn: str) -> None:
    """What hands a key on without counting its holders exceeds the limit, and the model says so."""
    with pytest.raises(AssertionError):
        run_state_machine_as_test(machine(dsn, Uncounted), settings=tried(200, 30))
