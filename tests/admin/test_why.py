"""Each rule that holds a job back, provoked with workers that work, and exactly that rule named."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from commands import pgqueue as command
from driver_kinds import ASYNC, KINDS, drive
from handlers import begins, begun
from pgbouncers import PgBouncer, needs_pgbouncer
from roles import Role, role
from servers import embedded_server
from workers import Eyes, Taker, until, work

import pgqueue
from pgqueue import Job, Limit, Lock, Rate, Reason, RetryPolicy, Why
from pgqueue.admin.limits import change, change_rate
from pgqueue.admin.why.reasons import CODES, lasting
from pgqueue.client.tasks import Task
from pgqueue.database import migrations
from pgqueue.errors import InvalidOption

__all__ = ["role"]
DOCS = Path(__file__).parents[2] / "docs"


@dataclass
class Scene:
    """A queue with its workers; all of it ends with `stack`."""

    dsn: str
    eyes: Eyes
    stack: AsyncExitStack
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    ran: list[int] = field(default_factory=list)
    """The jobs that have passed the gate, in order."""

    def task(self, name: str, **options: Any) -> Task[..., Any]:
        """A task whose handler waits at the gate."""

        async def handler(job: Job) -> None:
            begins(job)
            await self.gate.wait()
            self.ran.append(job.id)

        handler.__qualname__ = name
        made: Task[..., Any] = pgqueue.task(name=name, **options)(handler)
        return made

    async def worker(self, *tasks: Task[..., Any], **options: Any) -> Any:
        return await self.stack.enter_async_context(work(self.dsn, *tasks, **options))

    async def taker(self, *tasks: str, queues: tuple[str, ...] = ("default",)) -> Taker:
        """A worker that is registered, and takes jobs when it is told to."""
        taker = Taker(self.dsn, queues=queues, tasks=tasks)
        self.stack.push_async_callback(taker.close)
        return taker

    def enqueue(self, task: Task[..., Any] | str, **using: Any) -> int:
        remote: Any = pgqueue.remote(task) if isinstance(task, str) else task
        return int((remote.using(**using) if using else remote).enqueue(self.eyes.conn).id)

    async def running(self, task: Task[..., Any] | str, **using: Any) -> int:
        """A job whose handler has begun."""
        job = self.enqueue(task, **using)
        await begun(job)
        return job

    async def blocked(self, task: Task[..., Any], **using: Any) -> int:
        job = self.enqueue(task, **using)
        await until(self.eyes.is_in(job, "blocked"))
        return job

    def why(self, job: int) -> Why:
        return pgqueue.why(self.eyes.conn, job)


@pytest.fixture
async def scene(dsn: str, eyes: Eyes) -> AsyncIterator[Scene]:
    async with AsyncExitStack() as stack:
        made = Scene(dsn, eyes, stack)
        stack.callback(made.gate.set)
        yield made


Provoke = Callable[[Scene], Any]
CAUSES: dict[str, tuple[tuple[str, ...], Provoke]] = {}
"""By name: the codes that are expected, in order, and what provokes them. It returns the job, and a check or None."""


def cause(*codes: str) -> Callable[[Provoke], Provoke]:
    def declared(provoke: Provoke) -> Provoke:
        CAUSES[provoke.__name__] = (codes, provoke)
        return provoke

    return declared


@cause("not_due")
async def due_later(scene: Scene) -> Any:
    await scene.worker(scene.task("why.a"))
    job = scene.enqueue("why.a", delay=11_550)

    def check(reason: Reason) -> None:
        assert reason.text == "it is due in 3 h 12 m" and 11_520 < reason.details["seconds"] <= 11_550

    return job, check


@cause("not_due")
async def due_after_a_failure(scene: Scene) -> Any:
    @pgqueue.task(name="why.fails", retry=RetryPolicy(attempts=5, first=600, most=600))
    async def fails() -> None:
        raise ConnectionError("gone")

    await scene.worker(fails)
    job = scene.enqueue(fails)
    await until(scene.eyes.is_in(job, "scheduled"))

    def check(reason: Reason) -> None:
        assert reason.details["attempt"] == 2 and reason.details["error_type"] == "ConnectionError"
        assert 300 <= reason.details["pause"] <= 601
        assert ", for attempt 2, " in reason.text and reason.text.endswith("after the last one ended (ConnectionError)")

    return job, check


@cause("promotion_overdue")
async def due_and_not_promoted(scene: Scene) -> Any:
    await scene.taker("why.a")
    job = scene.enqueue("why.a", delay=3600)
    scene.eyes.do(
        "WITH gone AS (DELETE FROM pgqueue.job_scheduled RETURNING *) INSERT INTO pgqueue.job_scheduled "
        "(id, state, task, run_at) SELECT id, state, task, run_at - interval '3605 s' FROM gone"
    )

    def check(reason: Reason) -> None:
        assert 4 < -reason.details["seconds"] < 60

    return job, check


@cause("not_due", "deadline")
async def due_after_its_deadline(scene: Scene) -> Any:
    await scene.taker("why.a")
    return scene.enqueue("why.a", delay=100, deadline=50), None


@cause("deadline")
async def deadline_passed(scene: Scene) -> Any:
    await scene.taker("why.a")
    return scene.enqueue("why.a", deadline=datetime.now(UTC) - timedelta(seconds=5)), None


@cause("queue_paused")
async def paused_queue(scene: Scene) -> Any:
    task = scene.task("why.a")
    await scene.worker(task)
    pgqueue.pause(scene.eyes.conn, "default")
    job = scene.enqueue(task)

    def check(reason: Reason) -> None:
        assert reason.text.startswith("queue 'default' has been paused for 0.") and reason.since is not None

    return job, check


@cause("task_paused")
async def paused_task(scene: Scene) -> Any:
    await scene.taker("why.a", "why.b")
    scene.eyes.do("INSERT INTO pgqueue.paused_task (name, paused_by) VALUES ('why.a', 'anna'), ('why.c', 'bert')")
    assert scene.why(scene.enqueue("why.b")).codes == ("about_to_run",)
    scene.eyes.do("DELETE FROM pgqueue.job_available")
    job = scene.enqueue("why.a")

    def check(reason: Reason) -> None:
        assert reason.text.startswith("task 'why.a' has been paused for ") and reason.text.endswith(" by anna")

    return job, check


@cause("no_worker")
async def no_worker_at_all(scene: Scene) -> Any:
    return scene.enqueue("why.a"), None


@cause("no_worker")
async def no_worker_for_a_misspelt_queue(scene: Scene) -> Any:
    await scene.worker(scene.task("why.a"), queues=["emails"])
    job = scene.enqueue("why.a", queue="email")

    def check(reason: Reason) -> None:
        assert reason.details["close"] == ["emails"] and "'emails'" in reason.text

    return job, check


@cause("no_worker")
async def quiet_worker(scene: Scene) -> Any:
    task = scene.task("why.a")
    worker = await scene.worker(task)
    worker.quiet()
    await until(lambda: scene.eyes.one("SELECT state FROM pgqueue.worker") == "quiet")
    job = scene.enqueue(task)

    def check(reason: Reason) -> None:
        assert reason.details["quiet"] == 1 and reason.details["silent"] == 0

    return job, check


@cause("no_worker")
async def silent_worker(scene: Scene) -> Any:
    await scene.taker("why.a")
    scene.eyes.do("UPDATE pgqueue.worker SET beat_at = beat_at - interval '20 s'")
    job = scene.enqueue("why.a")

    def check(reason: Reason) -> None:
        assert reason.details["silent"] == 1 and "no sign of life for up to 2" in reason.text

    return job, check


@cause("unknown_task")
async def misspelt_task(scene: Scene) -> Any:
    await scene.worker(scene.task("why.email"), scene.task("why.report"))
    job = scene.enqueue("why.emails")

    def check(reason: Reason) -> None:
        assert reason.details["close"][0] == "why.email" and reason.details["elsewhere"] == []

    return job, check


@cause("unknown_task")
async def task_of_another_queue(scene: Scene) -> Any:
    await scene.worker(scene.task("why.here"))
    await scene.worker(scene.task("why.there"), queues=["other"])
    job = scene.enqueue("why.there")

    def check(reason: Reason) -> None:
        assert reason.details["elsewhere"] == ["other"]

    return job, check


@cause("slots_busy")
async def all_slots_busy(scene: Scene) -> Any:
    task = scene.task("why.a")
    await scene.worker(task, concurrency=2)
    first, second = await scene.running(task), await scene.running(task)
    job = scene.enqueue(task)

    def check(reason: Reason) -> None:
        assert [holder.id for holder in reason.holders] == [first, second] and reason.details["slots"] == 2
        assert reason.holders[0].process is not None and reason.since == reason.holders[0].since

    return job, check


@cause("slots_busy")
async def own_slots_of_the_queue_busy(scene: Scene) -> Any:
    """The common slots are free: they are of the other queue."""
    task = scene.task("why.a")
    await scene.worker(task, queues=["default:1", "other"], concurrency=5)
    first = await scene.running(task)
    await scene.running(task, queue="other")
    job = scene.enqueue(task)

    def check(reason: Reason) -> None:
        assert [holder.id for holder in reason.holders] == [first] and reason.details["slots"] == 1

    return job, check


@cause("slots_busy")
async def common_slots_busy(scene: Scene) -> Any:
    """The slots of the other queue's own are free."""
    task = scene.task("why.a")
    await scene.worker(task, queues=["default", "other:5"], concurrency=1)
    first = await scene.running(task)
    await scene.running(task, queue="other")
    job = scene.enqueue(task)

    def check(reason: Reason) -> None:
        assert [holder.id for holder in reason.holders] == [first]

    return job, check


@cause("slots_busy", "behind")
async def behind_others(scene: Scene) -> Any:
    task = scene.task("why.a")
    await scene.worker(task, concurrency=1)
    await scene.running(task)
    for _ in range(3):
        scene.enqueue(task)
    job = scene.enqueue(task)
    scene.enqueue(task, priority=2)
    scene.enqueue(task)

    def check(reason: Reason) -> None:
        waiting = scene.eyes.one("SELECT count(*) FROM pgqueue.job_available WHERE rank < 11 OR id < %s", job)
        assert reason.code != "behind" or (reason.details["jobs"], reason.details["exact"]) == (waiting, True)

    return job, check


@cause("poison")
async def poison_job(scene: Scene) -> Any:
    task = scene.task("why.a")
    await scene.worker(task, concurrency=5)
    other = await scene.running(task)
    job = scene.eyes.one(
        "INSERT INTO pgqueue.job (task, crashes, rank, attempt) VALUES ('why.a', 2, -1, 2) RETURNING id"
    )

    def check(reason: Reason) -> None:
        assert [holder.id for holder in reason.holders] == [other] and "twice" in reason.text

    return job, check


@cause("poison")
async def second_poison_job(scene: Scene) -> Any:
    """Beside an ordinary job it would run; beside another poison job it does not."""
    task = scene.task("why.a")
    await scene.worker(task, concurrency=5)
    insert = "INSERT INTO pgqueue.job (task, crashes, rank, attempt) VALUES ('why.a', 1, -2, 1) RETURNING id"
    first = scene.eyes.one(insert)
    await begun(first)
    await scene.running(task)
    job = scene.eyes.one(insert)

    def check(reason: Reason) -> None:
        assert [holder.id for holder in reason.holders] == [first] and reason.details["alone"] is False

    return job, check


CRASHED = "INSERT INTO pgqueue.job (task, crashes, rank, attempt) VALUES ('why.a', 1, -2, 1) RETURNING id"


@cause("slots_busy")
async def poison_job_without_a_slot(scene: Scene) -> Any:
    """No other poison job is in its way, and it needs a slot as any job."""
    task = scene.task("why.a")
    await scene.worker(task, concurrency=1)
    other = await scene.running(task)
    job = scene.eyes.one(CRASHED)

    def check(reason: Reason) -> None:
        assert [holder.id for holder in reason.holders] == [other]

    return job, check


@cause("poison", "slots_busy")
async def poison_job_beside_another_one_and_a_full_worker(scene: Scene) -> Any:
    """One worker has a free slot, and a poison job; the other one has no poison job, and no free slot."""
    first = scene.task("why.first")
    await scene.worker(scene.task("why.a"), first, concurrency=2)
    with_it = scene.eyes.one(CRASHED)
    await begun(with_it)
    second = scene.task("why.second")
    await scene.worker(scene.task("why.a"), second, concurrency=1)
    full = await scene.running(second)
    job = scene.eyes.one(CRASHED)

    def check(reason: Reason) -> None:
        assert [each.id for each in reason.holders] == [with_it if reason.code == "poison" else full]

    return job, check


@cause("slots_busy")
async def poison_job_that_runs_alone(scene: Scene) -> Any:
    """No other job has a slot beside it, whatever the number of slots."""
    task, other = scene.task("why.a"), scene.task("why.b")
    await scene.worker(task, other, concurrency=5)
    alone = scene.eyes.one(CRASHED.replace("1, -2, 1", "2, -1, 2"))
    await begun(alone)
    job = scene.enqueue(other)

    def check(reason: Reason) -> None:
        assert [each.id for each in reason.holders] == [alone] and reason.details["slots"] == 5
        assert reason.text.endswith(f"; no other job runs beside job {alone}, for workers died under it")

    return job, check


WORKERS = """
    INSERT INTO pgqueue.worker (lease, pid, concurrency, host, version_tag, queues, state, tasks, started_at, beat_at)
    SELECT '1 h', g, 2, 'h', '1', '{default}', 'running', '{why.a}', now(), now() FROM generate_series(1, 52) AS g;
    INSERT INTO pgqueue.job (task, state, worker_id, claim, started_at)
    SELECT 'why.a', 'running', w.id, 1, now() FROM pgqueue.worker w, generate_series(1, 2);
    UPDATE pgqueue.worker w SET running = ARRAY(SELECT r.id FROM pgqueue.job_running r WHERE r.worker_id = w.id);
"""


@cause("slots_busy")
async def all_slots_of_more_workers_busy_than_are_looked_at(scene: Scene) -> Any:
    scene.eyes.conn.execute(WORKERS.encode())

    def check(reason: Reason) -> None:
        assert (reason.details["workers"], reason.details["slots"]) == (52, 104) and "and 103 more" in reason.text

    return scene.enqueue("why.a"), check


@cause("about_to_run")
async def one_slot_of_many_workers_free(scene: Scene) -> Any:
    scene.eyes.conn.execute(WORKERS.encode())
    scene.eyes.do("UPDATE pgqueue.worker SET running = running[1:1] WHERE id = (SELECT max(id) FROM pgqueue.worker)")
    return scene.enqueue("why.a"), None


@cause("slots_busy")
async def behind_jobs_that_a_claim_passes_over(scene: Scene) -> Any:
    """Jobs of a paused task, and of one that no worker knows."""
    task, paused = scene.task("why.a"), scene.task("why.b")
    await scene.worker(task, paused, concurrency=1)
    await scene.running(task)
    scene.eyes.do("INSERT INTO pgqueue.paused_task (name) VALUES ('why.b')")
    for before in ("why.b", "why.typo", "why.b"):
        scene.enqueue(before)
    return scene.enqueue(task), None


@cause("behind")
async def behind_some_jobs_that_a_claim_passes_over(scene: Scene) -> Any:
    """Of two workers one knows both tasks, the other one of them: that is the one which takes the job first."""
    for tasks in (("why.a", "why.b"), ("why.b", "why.c")):
        await scene.taker(*tasks)
    for before in ("why.a", "why.b", "why.typo", "why.a", "why.c", "why.b", "why.a"):
        scene.enqueue(before)
    job = scene.enqueue("why.b")

    def check(reason: Reason) -> None:
        assert (reason.details["jobs"], reason.details["exact"], reason.details["urgent"]) == (3, True, 0)

    return job, check


@cause("task_paused", "behind")
async def behind_jobs_of_its_own_paused_task(scene: Scene) -> Any:
    await scene.taker("why.a", "why.b")
    scene.eyes.do("INSERT INTO pgqueue.paused_task (name) VALUES ('why.a'), ('why.b')")
    for before in ("why.a", "why.b", "why.a"):
        scene.enqueue(before)
    job = scene.enqueue("why.a")

    def check(reason: Reason) -> None:
        assert reason.code != "behind" or reason.details["jobs"] == 2

    return job, check


@cause("behind")
async def behind_more_urgent_jobs_of_other_queues(scene: Scene) -> Any:
    """Only of those that share the slots, and are open; jobs of the same priority take turns."""
    await scene.taker("why.a", queues=("default", "other", "paused"))
    pgqueue.pause(scene.eyes.conn, "paused")
    for queue in ("other", "paused", "elsewhere"):
        for priority in (0, 4, 5, 6):
            scene.enqueue("why.a", queue=queue, priority=priority)
    job = scene.enqueue("why.a", priority=5)

    def check(reason: Reason) -> None:
        assert (reason.details["jobs"], reason.details["urgent"]) == (0, 2)
        assert reason.text == "2 more urgent jobs of other queues come before it, by priority and age"

    return job, check


@cause("about_to_run")
async def urgent_jobs_of_a_queue_with_slots_of_its_own(scene: Scene) -> Any:
    await scene.taker("why.a", queues=("default", "other"))
    scene.eyes.do("UPDATE pgqueue.worker SET slots = '{NULL,3}'")
    scene.enqueue("why.a", queue="other", priority=0)
    return scene.enqueue("why.a", priority=5), None


@cause("unknown_task")
async def worker_that_knows_the_task_is_quiet(scene: Scene) -> Any:
    """The code is there: what is missing is a worker that takes jobs."""
    task = scene.task("why.b")
    await scene.worker(scene.task("why.a"))
    (await scene.worker(task)).quiet()
    await until(lambda: scene.eyes.one("SELECT count(*) FROM pgqueue.worker WHERE state = 'quiet'"))
    job = scene.enqueue(task)

    def check(reason: Reason) -> None:
        assert (reason.details["quiet"], reason.details["silent"]) == (1, 0)
        assert "; 1 that knows it takes no new jobs (" in reason.text

    return job, check


@cause("unknown_task")
async def worker_that_knows_the_task_is_silent(scene: Scene) -> Any:
    await scene.taker("why.a")
    other = await scene.taker("why.b")
    scene.eyes.do("UPDATE pgqueue.worker SET beat_at = beat_at - interval '20 s' WHERE id = %s", other.worker_id)
    job = scene.enqueue("why.b")

    def check(reason: Reason) -> None:
        assert (reason.details["quiet"], reason.details["silent"]) == (0, 1)
        assert "; 1 that knows it gives no sign of life for up to 2" in reason.text

    return job, check


@cause("lock")
async def lock_held_and_jobs_before_it_that_are_passed_over(scene: Scene) -> Any:
    """Of another paused queue, of a paused task, of a task that no worker knows; one more is not passed over."""
    task, paused = scene.task("why.a", lock=Lock("order:7")), scene.task("why.b", lock=Lock("order:7"))
    await scene.worker(task, paused, queues=["default", "other"], concurrency=5)
    holder = await scene.running(task)
    await scene.blocked(paused)
    await scene.blocked(task, queue="other")
    await scene.blocked(task)
    unknown = await scene.blocked(task)
    job = await scene.blocked(task)
    scene.eyes.do(
        "WITH gone AS (DELETE FROM pgqueue.job_blocked WHERE id = %s RETURNING *) INSERT INTO pgqueue.job_blocked "
        "(id, state, task, lock_key, key, rank) SELECT id, state, 'why.typo', lock_key, key, rank FROM gone",
        unknown,
    )
    scene.eyes.do("INSERT INTO pgqueue.paused_task (name) VALUES ('why.b')")
    pgqueue.pause(scene.eyes.conn, "other")

    def check(reason: Reason) -> None:
        assert [each.id for each in reason.holders] == [holder] and reason.details["before"] == 1
        assert reason.text.endswith("the job is 2nd in line")

    return job, check


@cause("queue_paused", "lock")
async def lock_held_and_jobs_before_it_of_the_same_paused_queue(scene: Scene) -> Any:
    """When the queue is resumed, they are before it."""
    task = scene.task("why.a", lock=Lock("order:7"))
    await scene.worker(task, concurrency=5)
    await scene.running(task)
    for _ in range(2):
        await scene.blocked(task)
    job = await scene.blocked(task)
    pgqueue.pause(scene.eyes.conn, "default")

    def check(reason: Reason) -> None:
        assert reason.code != "lock" or reason.details["before"] == 2

    return job, check


@cause("limit")
async def limit_set_lower_than_what_runs(scene: Scene) -> Any:
    task = scene.task("why.a", limit=Limit(3, name="api"))
    await scene.worker(task, concurrency=5)
    holders = [await scene.running(task) for _ in range(3)]
    job = await scene.blocked(task)
    change(scene.eyes.conn, "api", 2)

    def check(reason: Reason) -> None:
        assert [each.id for each in reason.holders] == holders
        assert "is held by 3 jobs, and 2 may: " in reason.text

    return job, check


@cause("queue_paused", "rate")
async def rate_set_higher_while_a_job_waits(scene: Scene) -> Any:
    """What the old rate would have it wait does not count."""
    task = scene.task("why.a", rate=Rate("1/hour", name="api"))
    await scene.worker(task, concurrency=5)
    await scene.running(task)
    job = await scene.blocked(task)
    pgqueue.pause(scene.eyes.conn, "default")
    change_rate(scene.eyes.conn, "api", "6/minute")

    def check(reason: Reason) -> None:
        assert reason.code != "rate" or 5 < reason.details["next_start"] < 11

    return job, check


@cause("lock")
async def lock_held(scene: Scene) -> Any:
    task = scene.task("why.a", lock=Lock("order:7"))
    await scene.worker(task, concurrency=5)
    holder = await scene.running(task)
    for _ in range(2):
        await scene.blocked(task)
    job = await scene.blocked(task)

    def check(reason: Reason) -> None:
        assert [each.id for each in reason.holders] == [holder] and reason.details["before"] == 2
        assert reason.text.startswith(f"lock 'order:7' is held by job {holder} (why.a) on ")
        assert reason.text.endswith("the job is 3rd in line")

    return job, check


@cause("slots_busy", "lock")
async def lock_held_of_a_job_that_will_be_skipped(scene: Scene) -> Any:
    """It has not asked for its lock yet, and does not wait for it."""
    task = scene.task("why.a", lock=Lock("order:7", on_locked="skip"))
    await scene.worker(task, concurrency=1)
    await scene.running(task)
    job = scene.enqueue(task)

    def check(reason: Reason) -> None:
        assert reason.code != "lock" or reason.text.endswith("; the job would be 1st in line")

    return job, check


@cause("limit")
async def limit_reached(scene: Scene) -> Any:
    task = scene.task("why.a", limit=Limit(2, name="api"))
    await scene.worker(task, concurrency=5)
    holders = [await scene.running(task) for _ in range(2)]
    job = await scene.blocked(task)

    def check(reason: Reason) -> None:
        assert [each.id for each in reason.holders] == holders
        assert (reason.details["holders"], reason.details["most"]) == (2, 2) and "2 of 2" in reason.text

    return job, check


@cause("limit_undeclared")
async def limit_not_declared(scene: Scene) -> Any:
    await scene.worker(scene.task("why.a"))
    job = scene.eyes.one("INSERT INTO pgqueue.job (task, limit_key) VALUES ('why.a', 'nowhere') RETURNING id")
    scene.eyes.conn.execute('NOTIFY "pgqueue.default"')
    await until(scene.eyes.is_in(job, "blocked"))
    return job, None


@cause("rate")
async def rate_reached(scene: Scene) -> Any:
    task = scene.task("why.a", rate=Rate("1/minute"))
    await scene.worker(task, concurrency=5)
    await scene.running(task)
    await scene.blocked(task)
    job = await scene.blocked(task)

    def check(reason: Reason) -> None:
        assert 40 < reason.details["next_start"] < 61 and 100 < reason.details["seconds"] < 125
        assert reason.details["before"] == 1

    return job, check


@cause("lock", "limit", "rate")
async def lock_held_and_the_keys_after_it_are_full(scene: Scene) -> Any:
    """Free the lock, and the job waits for its limit; free that one, and it waits for its rate."""
    limited: dict[str, Any] = {"limit": Limit(2, name="api"), "rate": Rate("2/minute", burst=2, name="api")}
    task = scene.task("why.a", lock=Lock("order:7"), **limited)
    other = scene.task("why.b", lock=Lock("order:8"), **limited)
    await scene.worker(task, other, concurrency=5)
    holders = [await scene.running(task), await scene.running(other)]
    job = await scene.blocked(task)

    def check(reason: Reason) -> None:
        assert [each.id for each in reason.holders] == {"lock": holders[:1], "limit": holders, "rate": []}[reason.code]
        assert reason.details["before"] == 0

    return job, check


@cause("lock")
async def lock_held_and_the_keys_after_it_have_room(scene: Scene) -> Any:
    task = scene.task("why.a", lock=Lock("order:7"), limit=Limit(2, name="api"), rate=Rate("2/minute", burst=2))
    await scene.worker(task, concurrency=5)
    await scene.running(task)
    return await scene.blocked(task), None


@cause("limit", "rate")
async def limit_reached_and_no_start_under_the_rate(scene: Scene) -> Any:
    """The lock that the job has already is not named."""
    limited: dict[str, Any] = {"limit": Limit(1, name="api"), "rate": Rate("1/minute", name="api")}
    task = scene.task("why.a", lock=Lock("order:7"), **limited)
    other = scene.task("why.b", lock=Lock("order:8"), **limited)
    await scene.worker(task, other, concurrency=5)
    await scene.running(other)
    job = scene.enqueue(task)
    await until(lambda: scene.eyes.one("SELECT min(key) FROM pgqueue.job_blocked") == "limit:api")
    return job, None


@cause("queue_paused", "lock")
async def paused_and_locked(scene: Scene) -> Any:
    task = scene.task("why.a", lock=Lock("order:7"))
    await scene.worker(task, concurrency=5)
    await scene.running(task)
    job = await scene.blocked(task)
    pgqueue.pause(scene.eyes.conn, "default")
    return job, None


@cause("about_to_run")
async def healthy(scene: Scene) -> Any:
    await scene.taker("why.a")
    return scene.enqueue("why.a"), None


@cause("about_to_run")
async def healthy_with_room_in_its_keys(scene: Scene) -> Any:
    """A free lock, a limit with room, a deadline that is far away: neighbours of what holds a job back."""
    task = scene.task("why.a", lock=Lock("order:7"), limit=Limit(2, name="api"))
    await scene.taker("why.a")
    scene.eyes.do("INSERT INTO pgqueue.key_limit (name, n, declared) VALUES ('api', 2, 2)")
    return scene.enqueue(task, deadline=500), None


@pytest.mark.promise("F100")
@pytest.mark.parametrize("name", CAUSES)
async def test_exactly_that_cause_is_named(name: str, scene: Scene) -> None:
    codes, provoke = CAUSES[name]
    job, check = await provoke(scene)
    found = scene.why(job)
    assert found.codes == codes, [reason.text for reason in found.reasons]
    assert found.job is not None and (found.id, found.state) == (job, found.job.state)
    for reason in found.reasons if check else ():
        check(reason)


@pytest.mark.promise("F100")
async def test_when_each_cause_is_gone_the_job_runs(scene: Scene) -> None:
    """Not due, its queue and its task paused, and no worker knows it: each is named until it is gone, and no other."""
    conn, task = scene.eyes.conn, scene.task("why.b", lock=Lock("order:7"))
    await scene.worker(scene.task("why.a"))
    job = scene.enqueue(task, delay=500)
    pgqueue.pause(conn, "default")
    pgqueue.pause(conn, task="why.b")
    causes = ("not_due", "queue_paused", "task_paused", "unknown_task")
    assert scene.why(job).codes == causes
    pgqueue.reschedule(conn, job, at=datetime.now(UTC))
    assert scene.why(job).codes == causes[1:]
    pgqueue.resume(conn, "default")
    assert scene.why(job).codes == causes[2:]
    pgqueue.resume(conn, task="why.b")
    assert scene.why(job).codes == causes[3:]
    await scene.worker(task)
    await begun(job)


@pytest.mark.second
@pytest.mark.promise("F100")
@pytest.mark.parametrize("seed", range(3))
async def test_a_job_starts_after_as_many_jobs_as_were_named_before_it(scene: Scene, seed: int) -> None:
    """Queues and tasks of which some are paused, priorities that differ between queues, tasks that no worker knows."""
    tasks = [scene.task(f"why.{name}") for name in "abc"]
    await scene.worker(*tasks, queues=["default", "other", "paused"], concurrency=1)
    first = await scene.running(tasks[0])
    pgqueue.pause(scene.eyes.conn, "paused")
    pgqueue.pause(scene.eyes.conn, task="why.c")
    dice = random.Random(seed)
    jobs = []
    for _ in range(16):
        queue, priorities = dice.choice([("default", (5, 3)), ("other", (4, 6)), ("paused", (1, 1))])
        known = dice.choice([task.name for task in tasks] + ["why.typo"])
        jobs.append(scene.enqueue(known, queue=queue, priority=dice.choice(priorities)))
    said = []
    for job in jobs:
        found = scene.why(job)
        if found.codes[0] == "slots_busy":
            behind = [reason.details for reason in found.reasons if reason.code == "behind"]
            said.append((sum(each["jobs"] + each["urgent"] for each in behind), job))
    scene.gate.set()
    await until(lambda: len(scene.ran) == len(said) + 1)
    assert sorted(said) == [*enumerate(scene.ran[1:])] and scene.ran[0] == first


@pytest.mark.second
@pytest.mark.promise("F100")
@pytest.mark.parametrize("seed", range(3))
async def test_a_job_gets_its_lock_after_as_many_jobs_as_were_named_before_it(scene: Scene, seed: int) -> None:
    tasks = [scene.task(f"why.{name}", lock=Lock("order:7")) for name in "abc"]
    queues = ["default", "other", "paused"]
    await scene.worker(*tasks, queues=queues, concurrency=30)
    first = await scene.running(tasks[0])
    dice = random.Random(seed)
    jobs = [
        await scene.blocked(dice.choice(tasks), queue=dice.choice(queues), priority=dice.choice([5, 5, 3, 7]))
        for _ in range(14)
    ]
    pgqueue.pause(scene.eyes.conn, "paused")
    pgqueue.pause(scene.eyes.conn, task="why.c")
    reasons = {job: scene.why(job).reasons for job in jobs}
    said = [(of[0].details["before"], job) for job, of in reasons.items() if of[0].code == "lock"]
    scene.gate.set()
    await until(lambda: len(scene.ran) == len(said) + 1)
    assert sorted(said) == [*enumerate(scene.ran[1:])] and scene.ran[0] == first


# Running jobs --------------------------------------------------------------------------------------------------------


@pytest.mark.promise("F101")
async def test_a_job_that_runs_says_where_and_how_far_it_is(scene: Scene) -> None:
    @pgqueue.task(name="why.counts")
    async def counts(job: Job) -> None:
        begins(job)
        job.progress(3, 10)
        await scene.gate.wait()

    await scene.worker(counts)
    job = await scene.running(counts)
    await until(lambda: scene.eyes.one("SELECT count(*) FROM pgqueue.job_progress"))
    [reason] = scene.why(job).reasons
    assert reason.code == "running" and (reason.details["done"], reason.details["total"]) == (3, 10)
    assert reason.text.endswith("attempt 1; progress 3 of 10 (30 %)") and reason.since is not None
    assert reason.details["process"] in reason.text


@pytest.mark.promise("F101")
@pytest.mark.parametrize(("usual", "said"), [(10_000, "; 5 of 100 runs"), (0.001, "; only 5 of 100 runs")])
async def test_a_running_job_is_compared_with_other_runs_of_its_task(scene: Scene, usual: float, said: str) -> None:
    task = scene.task("why.a")
    await scene.worker(task)
    job = await scene.running(task)
    assert "p95" not in scene.why(job).reasons[0].details
    scene.eyes.do(
        "INSERT INTO pgqueue.history_minute (at, bin, queue, task, completed, run) "
        "SELECT date_trunc('minute', pgqueue.now()), r.bin, 'default', 'why.a', 1, array_fill(0, ARRAY[b.n]) || 1 "
        "FROM pgqueue.ring r, (SELECT count(*) FILTER (WHERE bound < %s)::int AS n "
        "FROM unnest(pgqueue.history_bounds()) AS bound) AS b WHERE r.kind = 'minute'",
        usual,
    )
    [reason] = scene.why(job).reasons
    assert said in reason.text and 0 < reason.details["p95"] < 1.5 * usual


@pytest.mark.promise("F100")
@pytest.mark.parametrize(("started", "seconds"), [(60, 3), (6, 30)])
async def test_the_present_pace_says_how_long_the_jobs_before_it_take(
    scene: Scene, started: int, seconds: float
) -> None:
    """Of two minutes; a third in which no job started does not count, nor do other queues."""
    await scene.taker("why.a")
    jobs = [scene.enqueue("why.a") for _ in range(4)]
    assert "seconds" not in scene.why(jobs[3]).reasons[0].details
    for minutes, queue, n in ((2, "default", started), (3, "default", started), (4, "default", 0), (2, "other", 999)):
        scene.eyes.do(
            "INSERT INTO pgqueue.history_minute (at, bin, queue, task, started) "
            "SELECT pgqueue.now() - make_interval(mins => %s), bin, %s, 'why.a', %s FROM pgqueue.ring "
            "WHERE kind = 'minute'",
            *(minutes, queue, n),
        )
    [reason] = scene.why(jobs[3]).reasons
    assert reason.code == "behind" and reason.details["seconds"] == pytest.approx(seconds)
    assert reason.text.endswith(f"at the present pace that takes about {seconds} s")


@pytest.mark.promise("F101")
async def test_a_job_that_does_not_stop_says_since_when_it_was_asked(scene: Scene) -> None:
    @pgqueue.task(name="why.stubborn")
    async def stubborn(job: Job) -> None:
        begins(job)
        while not scene.gate.is_set():
            with suppress(asyncio.CancelledError):
                await scene.gate.wait()

    await scene.worker(stubborn)
    job = await scene.running(stubborn)
    assert scene.why(job).codes == ("running",)
    pgqueue.cancel(scene.eyes.conn, job, reason="too late")
    found = scene.why(job)
    assert found.codes == ("running", "cancel_requested")
    assert found.reasons[1].details["reason"] == "too late" and found.reasons[1].since is not None
    scene.eyes.do("INSERT INTO pgqueue.audit (actor, action, jobs) VALUES ('anna', 'cancel', %s)", [job, 99])
    assert " by anna (too late)" in scene.why(job).reasons[1].text


@pytest.mark.promise("F101")
@pytest.mark.parametrize(("age", "silent"), [(7.0, False), (9.0, True)])
async def test_a_silent_worker_is_named_with_the_time_of_the_rescue(scene: Scene, age: float, silent: bool) -> None:
    taker = await scene.taker("why.a")
    job = scene.enqueue("why.a")
    await taker.fetch()
    scene.eyes.do(
        "UPDATE pgqueue.worker SET running = %s, beat_at = pgqueue.now() - make_interval(secs => %s)", [job], age
    )
    found = scene.why(job)
    assert found.codes == (("worker_silent", "running") if silent else ("running",))
    if silent:
        assert found.reasons[0].text.endswith("has been silent for 9 s; its jobs are given to other workers after 15 s")
        scene.eyes.do("UPDATE pgqueue.worker SET dead_at = pgqueue.now()")
        assert scene.why(job).codes == ("worker_dead", "running")


@pytest.mark.promise("F101")
async def test_a_job_that_waits_in_its_worker_says_so(scene: Scene) -> None:
    taker = await scene.taker("why.a")
    job = scene.enqueue("why.a")
    await taker.fetch()
    scene.eyes.do("UPDATE pgqueue.worker SET beat_at = pgqueue.now() + interval '0.1 s'")
    found = scene.why(job)
    assert found.codes == ("at_hand",)
    # A handler that has ended looks the same while its outcome waits for a blocked event loop: claim no full slots.
    assert found.reasons[0].text.endswith(": it waits for a slot, or it has ended and its outcome is not written yet")


@pytest.mark.promise("F324")
async def test_a_job_that_waits_for_others_of_its_batch_says_so(dsn: str, eyes: Eyes) -> None:
    """Naive is to look at the list of running jobs, which has it: a job runs that no handler has seen."""
    called = asyncio.Event()

    @pgqueue.task(name="why.batch", batch=pgqueue.Batch(2, wait=60))
    async def batched(numbers: list[int]) -> None:
        called.set()
        await asyncio.Event().wait()

    with psycopg.connect(dsn) as conn:
        first = batched.enqueue(conn, 1)
    async with work(dsn, batched, lease=1.0) as worker:
        await until(lambda: pgqueue.why(eyes.conn, first.id).codes == ("gathers",))
        text = pgqueue.why(eyes.conn, first.id).reasons[0].text
        assert "for a batch, and its call had not begun at the last heartbeat" in text
        with psycopg.connect(dsn) as conn:
            batched.enqueue(conn, 2)
        await called.wait()
        await until(lambda: pgqueue.why(eyes.conn, first.id).codes == ("running",))
        await worker.stop(timeout=0)


@pytest.mark.promise("F101")
async def test_a_job_of_a_chain_names_the_one_before_it(scene: Scene) -> None:
    """The jobs of a lock that one worker has let in together run there one after the other."""
    taker = await scene.taker("why.a")
    rows = [(1, None, True), (2, "lock:k", False), (3, "lock:k", False)]
    for place, key, holds in rows:
        scene.eyes.do(
            "INSERT INTO pgqueue.job (id, task, state, worker_id, claim, started_at, lock_key, rank, key, holds) "
            "VALUES (%s, 'why.a', 'running', %s, 1, pgqueue.now(), 'k', 11, %s, %s)",
            *(place, taker.worker_id, key, holds),
        )
    for job, before in ((2, 1), (3, 1)):
        [reason] = scene.why(job).reasons
        assert reason.code == "chain" and [holder.id for holder in reason.holders] == [before]
    assert scene.why(1).codes == ("running",)
    scene.eyes.do("DELETE FROM pgqueue.job_running WHERE id = 1")
    assert scene.why(2).codes == ("running",) and scene.why(3).reasons[0].holders[0].id == 2


# Jobs that have ended, and ids without one ---------------------------------------------------------------------------


@pytest.mark.promise("F102")
@pytest.mark.parametrize(
    ("how", "code", "said"),
    [
        ("returns", "completed", "attempt 1"),
        ("raises", "failed", "the last one: failed (ValueError: no such order)"),
        ("raises much", "failed", f"(ValueError: {'no such order ' * 20}no such…)"),
        ("cancels", "cancelled", "not wanted"),
        ("skips", "skipped", "another job had its lock 'k'"),
    ],
)
async def test_a_job_that_has_ended_says_why(scene: Scene, how: str, code: str, said: str) -> None:
    @pgqueue.task(name="why.ends", retry=1, lock=Lock("k", on_locked="skip") if how == "skips" else None)
    async def ends(job: Job) -> object:
        begins(job)
        if how.startswith("raises"):
            raise ValueError("no such order " * 30 if how.endswith("much") else "no such order")
        if how == "skips":
            await scene.gate.wait()
        return pgqueue.Cancel("not wanted") if how == "cancels" else None

    await scene.worker(ends)
    if how == "skips":
        await scene.running(ends)
    job = scene.enqueue(ends)
    await until(scene.eyes.is_in(job, code))
    found = scene.why(job)
    assert found.codes == (code,) and found.state == code and said in found.reasons[0].text


@pytest.mark.promise("F102")
@pytest.mark.parametrize("reason", ["deadline", "error", "crashed"])
def test_a_reason_that_an_operator_gives_is_not_taken_for_one_of_pgqueue(conn: psycopg.Connection, reason: str) -> None:
    task = pgqueue.remote("why.a")
    for job in (task.enqueue(conn), task.using(deadline=500).enqueue(conn)):
        pgqueue.cancel(conn, job.id, reason=reason)
        assert pgqueue.why(conn, job.id).reasons[0].text.endswith(f": {reason}")


@pytest.mark.promise("F102")
async def test_a_job_whose_deadline_has_passed_says_so(scene: Scene) -> None:
    await scene.worker(scene.task("why.a"))
    job = scene.enqueue("why.a", deadline=datetime.now(UTC) - timedelta(seconds=5))
    await until(scene.eyes.is_in(job, "cancelled"))
    assert ": deadline (its deadline passed); " in scene.why(job).reasons[0].text


@pytest.mark.promise("F101")
async def test_a_transaction_that_waits_names_the_session_that_keeps_it_waiting(scene: Scene, role: Role) -> None:
    scene.eyes.do("CREATE TABLE account (id int PRIMARY KEY, n int)")
    scene.eyes.do("INSERT INTO account VALUES (1, 0)")

    @pgqueue.task(name="why.debits", transactional=True)
    def debits(job: Job) -> None:
        begins(job)
        job.connection.execute("UPDATE account SET n = n - 1")

    @pgqueue.task(name="why.looks", transactional=True)
    async def looks(job: Job) -> None:
        begins(job)
        await (await job.aconnection()).execute("SELECT 1")
        await scene.gate.wait()

    await scene.worker(debits, looks, lease=1.5)
    neighbour = await scene.running(looks)
    with psycopg.connect(scene.dsn, application_name="the shop") as shop:
        shop.execute("UPDATE account SET n = n + 1")
        job = await scene.running(debits)
        await until(lambda: len(scene.why(job).codes) > 1)
        found = scene.why(job)
        assert found.codes == ("running", "transaction_waits")
        [session] = found.reasons[1].sessions
        assert (session.pid, session.application) == (shop.info.backend_pid, "the shop")
        assert "(the shop) holds; that one is idle in transaction, its transaction began" in found.reasons[1].text
        assert scene.why(neighbour).codes == ("running",)
        with psycopg.connect(role("read")) as conn:  # may not see what the sessions of other roles do
            assert pgqueue.why(conn, neighbour).codes == ("running",)
            less = pgqueue.why(conn, job).reasons[1]
            assert less.code == "transaction_waits" and [each.pid for each in less.sessions] == [session.pid]
            assert less.text.endswith(f"waits for a lock, which pid {session.pid} (the shop) holds")
        shop.rollback()
    await until(scene.eyes.is_in(job, "completed"))


@pytest.mark.promise("F102")
async def test_who_has_cancelled_a_job_is_named(scene: Scene) -> None:
    job, other = scene.enqueue("why.a"), scene.enqueue("why.a")
    pgqueue.cancel(scene.eyes.conn, job, actor="anna")
    pgqueue.cancel(scene.eyes.conn, other)
    scene.eyes.do("INSERT INTO pgqueue.audit (actor, action, jobs) VALUES ('bert', 'retry', %s)", [job, other])
    assert scene.why(job).reasons[0].details["by"] == "anna"
    role = scene.eyes.one("SELECT session_user")
    assert scene.why(other).reasons[0].details["by"] == role
    scene.eyes.do("DELETE FROM pgqueue.audit")
    assert "by" not in scene.why(other).reasons[0].details


@pytest.mark.promise("F102")
@pytest.mark.parametrize("by_filter", [False, True])
async def test_a_cancel_before_a_retry_is_not_why_a_job_has_ended(scene: Scene, by_filter: bool) -> None:
    @pgqueue.task(name="why.gives_up")
    async def gives_up() -> None:
        raise pgqueue.Cancel("no use")

    conn = scene.eyes.conn
    job, other = scene.enqueue("why.gives_up"), scene.enqueue("why.gives_up")
    for each in (job, other):
        pgqueue.cancel(conn, each, actor="anna")
    assert scene.why(job).reasons[0].details["by"] == "anna"
    if by_filter:
        pgqueue.bulk(conn, "retry", task="why.gives_up", actor="bert")
    else:
        pgqueue.retry(conn, job, other, actor="bert")
    await scene.worker(gives_up)
    await until(lambda: scene.why(job).reasons[0].text.count("no use") > 0)
    await until(lambda: scene.why(other).reasons[0].text.count("no use") > 0)
    found = scene.why(job).reasons[0]
    assert (found.code, "by" in found.details, "anna" in found.text) == ("cancelled", False, False)


@pytest.mark.promise("F102")
async def test_an_operation_by_filter_that_has_cancelled_a_job_is_named(scene: Scene) -> None:
    await scene.worker(scene.task("why.a"))
    pgqueue.pause(scene.eyes.conn, "default")
    job = scene.enqueue("why.a")
    pgqueue.bulk(scene.eyes.conn, "cancel", queue="default", actor="carl")
    await until(scene.eyes.is_in(job, "cancelled"))
    assert scene.why(job).reasons[0].details["by"] == "carl"


@pytest.mark.promise("F102")
async def test_an_id_without_a_job_says_what_may_have_become_of_it(scene: Scene) -> None:
    eyes = scene.eyes
    assert scene.why(99).codes == ("never_given",) and scene.why(99).state is None
    assert scene.why(2**63 - 1).codes == ("never_given",)
    with psycopg.connect(scene.dsn, application_name="the shop") as shop:
        open_one = int(pgqueue.remote("why.a").enqueue(shop).id)
        scene.enqueue("why.a")
        found = scene.why(open_one)
        assert found.codes == ("not_committed", "gone")
        assert [each.application for each in found.reasons[0].sessions] == ["the shop"]
        shop.rollback()
        assert scene.why(open_one).codes == ("gone",)
        pgqueue.remote("why.a").enqueue(shop)
        assert scene.why(open_one).codes == ("gone",), "that transaction began later"
    gone = scene.enqueue("why.a")
    scene.enqueue("why.a")
    eyes.do("DELETE FROM pgqueue.job WHERE id = %s", gone)
    for hours, codes in ((23, ("gone",)), (25, ("pruned", "gone"))):
        eyes.do(
            "WITH gone AS (DELETE FROM pgqueue.job_available WHERE id > %s RETURNING *) "
            "INSERT INTO pgqueue.job_available (id, task, enqueued_at) "
            "SELECT id, task, pgqueue.now() - make_interval(hours => %s) FROM gone",
            gone,
            hours,
        )
        assert scene.why(gone).codes == codes


@pytest.mark.second
@pytest.mark.promise("F102")
def test_a_job_of_a_prepared_transaction_may_come_yet() -> None:
    """It was prepared after the next job was enqueued, and began before that."""
    server = embedded_server(max_prepared_transactions="2")
    try:
        dsn = server.dsn("postgres")
        with psycopg.connect(dsn) as shop, psycopg.connect(dsn, autocommit=True) as conn:
            migrations.migrate(conn, "pgqueue")
            [[job]] = shop.execute("INSERT INTO pgqueue.job (task) VALUES ('why.a') RETURNING id").fetchall()
            pgqueue.remote("why.a").enqueue(conn)
            shop.execute("PREPARE TRANSACTION 'of the shop'")
            shop.rollback()
            found = pgqueue.why(conn, job)
            assert found.codes == ("not_committed", "gone")
            assert "prepared transaction (of the shop) has a transaction open" in found.reasons[0].text
            conn.execute("ROLLBACK PREPARED 'of the shop'")
            assert pgqueue.why(conn, job).codes == ("gone",)
    finally:
        server.end()


def test_the_lane_of_a_job_that_has_moved_is_one_row(conn: psycopg.Connection) -> None:
    """The answer is read as one row."""
    assert conn.execute("SELECT jobs, whole, pace FROM pgqueue.why_lane(4711)").fetchall() == [(0, None, None)]


@pytest.mark.parametrize("id", [0, -1, True, "7", 1 << 63])
def test_what_is_no_id_is_refused(conn: psycopg.Connection, id: Any) -> None:
    with pytest.raises(InvalidOption, match="no id of a job"):
        pgqueue.why(conn, id)


@pytest.mark.second
@pytest.mark.promise("F100")
@pytest.mark.parametrize("dead", [49_000, 51_000])
async def test_beside_many_dead_rows_no_job_is_promised_that_it_comes_next(scene: Scene, dead: int) -> None:
    """More urgent jobs may lie where it does not look."""
    await scene.taker("why.a")
    eyes = scene.eyes
    eyes.do("ALTER TABLE pgqueue.job_available SET (autovacuum_enabled = off)")
    first = scene.enqueue("why.a", priority=0)
    eyes.do("INSERT INTO pgqueue.job (task) SELECT 'why.a' FROM generate_series(1, %s)", dead)
    eyes.do("DELETE FROM pgqueue.job_available WHERE id > %s", first)
    eyes.do("SELECT pg_stat_force_next_flush()")
    [reason] = scene.why(scene.enqueue("why.a", priority=9)).reasons
    if dead < 50_000:
        assert (reason.code, reason.details["jobs"]) == ("behind", 1)
    else:
        assert (reason.code, reason.details["exact"]) == ("about_to_run", False)
        assert "not all jobs that may come before it were looked at" in reason.text


# How it is asked -----------------------------------------------------------------------------------------------------


@pytest.mark.promise("F100")
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_connection_asks_in_its_transaction(dsn: str, kind: str) -> None:
    async def scenario() -> None:
        async with KINDS[kind](dsn, False) as app:
            if kind in ASYNC:
                job = await pgqueue.aenqueue(app.conn, "why.a")
                found = await pgqueue.awhy(app.conn, job.id)
            else:
                job = pgqueue.enqueue(app.conn, "why.a")
                found = pgqueue.why(app.conn, job.id)
            assert found.codes == ("no_worker",)

    drive(kind, scenario())


@pytest.mark.promise("F100")
async def test_a_role_that_only_looks_may_ask(scene: Scene, role: Role) -> None:
    task = scene.task("why.a", lock=Lock("k"))
    await scene.worker(task, concurrency=3)
    running = await scene.running(task)
    blocked = await scene.blocked(task)
    with psycopg.connect(role("read")) as conn:
        asked = {id: pgqueue.why(conn, id).codes for id in (running, blocked, 99)}
    assert asked == {running: ("running",), blocked: ("lock",), 99: ("never_given",)}


async def test_the_command_prints_sentences_or_json(scene: Scene) -> None:
    task = scene.task("why.a", lock=Lock("k"))
    await scene.worker(task, concurrency=3)
    holder = await scene.running(task)
    job = await scene.blocked(task)
    shown = await asyncio.to_thread(command, "why", str(job), dsn=scene.dsn)
    assert shown.returncode == 0
    assert shown.stdout.startswith(
        f"Job {job} (why.a) in queue default is blocked.\n\nlock: lock 'k' is held by job {holder}"
    )
    printed = json.loads((await asyncio.to_thread(command, "why", str(job), "--json", dsn=scene.dsn)).stdout)
    assert (printed["id"], printed["state"]) == (job, "blocked")
    assert [(each["code"], each["holders"][0]["id"]) for each in printed["items"]] == [("lock", holder)]
    missing = await asyncio.to_thread(command, "why", "99", dsn=scene.dsn)
    assert missing.returncode == 1 and missing.stdout.startswith("Job 99 is not there.\n\nnever_given: ")


@pytest.mark.second
@pytest.mark.promise("F100", "F101")
@needs_pgbouncer
async def test_the_commands_ask_through_a_pooler_in_transaction_mode(scene: Scene) -> None:
    """Each command more often than the pooler has sessions: one meets a session that another one has used."""
    task = scene.task("why.a", lock=Lock("k"))
    await scene.worker(task, concurrency=3)
    holder = await scene.running(task)
    job = await scene.blocked(task)
    asked = (("why", str(job)), ("why", str(holder)), ("doctor",), ("stack", str(holder)))
    said = (
        f"\n\nlock: lock 'k' is held by job {holder}",
        "\n\nrunning: it has run",
        "No finding.",
        "innermost call last:",
    )
    with PgBouncer(scene.dsn, 2) as pooler:
        for _ in range(3):
            for what, part in zip(asked, said, strict=True):
                shown = await asyncio.to_thread(command, *what, dsn=pooler.dsn)
                assert (shown.returncode, part in shown.stdout, shown.stderr) == (0, True, ""), what


def test_the_page_has_every_code() -> None:
    page = (DOCS / "why.md").read_text(encoding="utf-8")
    assert [code for code in CODES if f"| `{code}` |" not in page] == []


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0.04, "0.0 s"),
        (1.94, "1.9 s"),
        (1.96, "2 s"),
        (59.6, "1 m"),
        (3_600, "1 h"),
        (90_061, "1 d 1 h"),
        (86_460, "1 d"),
    ],
)
def test_lengths_of_time_have_two_units_at_most(seconds: float, said: str) -> None:
    assert lasting(seconds) == said


# In the session of an application ------------------------------------------------------------------------------------


FILL = """
    INSERT INTO pgqueue.job_available (task, queue) SELECT 't', 'q' FROM generate_series(1, %(n)s);
    INSERT INTO pgqueue.job_scheduled (state, task, queue, run_at)
    SELECT 'scheduled', 't', 'q', now() + make_interval(hours => n) FROM generate_series(1, %(n)s / 10) AS n;
    INSERT INTO pgqueue.job_blocked (state, task, queue, lock_key, key)
    SELECT 'blocked', 't', 'q', 'k' || mod(n, 3), 'lock:k' || mod(n, 3) FROM generate_series(1, %(n)s) AS n;
    INSERT INTO pgqueue.job_running (state, task, queue, lock_key, holds, worker_id, claim, started_at)
    SELECT 'running', 't', 'q', 'k' || n, true, 1, 1, now() FROM generate_series(0, %(n)s / 10) AS n;
    INSERT INTO pgqueue.job_done (state, task, queue, finished_at, bin)
    SELECT 'completed', 't', 'q', now(), mod(n, 5) FROM generate_series(1, %(n)s) AS n;
"""
SESSIONS = {
    "settings of its own": "SET enable_indexscan = off; SET enable_indexonlyscan = off; SET enable_bitmapscan = off",
    "prepared while the tables were empty": "SET plan_cache_mode = force_generic_plan",
}


def whole_reads(conn: psycopg.Connection) -> int:
    """How many rows of jobs this transaction has read by reading a table from its beginning."""
    [[rows]] = conn.execute(
        "SELECT coalesce(sum(seq_tup_read), 0)::bigint FROM pg_stat_xact_user_tables "
        "WHERE schemaname = 'pgqueue' AND relname LIKE 'job\\_%'"
    ).fetchall()
    return int(rows)


@pytest.mark.promise("F115")
@pytest.mark.parametrize("session", SESSIONS)
def test_no_table_is_read_from_its_beginning_however_the_session_plans(dsn: str, session: str) -> None:
    with psycopg.connect(dsn, prepare_threshold=0) as conn, psycopg.connect(dsn, autocommit=True) as other:
        conn.execute(SESSIONS[session].encode(), prepare=False)
        # The statements are prepared, and planned.
        [[first]] = other.execute("INSERT INTO pgqueue.job (task, queue) VALUES ('t', 'q') RETURNING id").fetchall()
        assert [pgqueue.why(conn, id).state for id in (first, 10_000_000)] == ["available", None]
        conn.commit()
        psycopg.ClientCursor(other).execute(FILL, {"n": 20_000})
        ids = [
            id
            for table in ("available", "scheduled", "blocked", "running")
            for id in other.execute(f"SELECT max(id), min(id) FROM pgqueue.job_{table}".encode()).fetchall()[0]  # noqa: S608
        ]
        for id in (*ids, 10_000_000):
            assert pgqueue.why(conn, id).reasons
            assert whole_reads(conn) <= 100, id
            conn.commit()
