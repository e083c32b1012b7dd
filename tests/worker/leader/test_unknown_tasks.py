"""Jobs of tasks that no live worker knows: they wait a day, then fail; past their deadline they end."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import psycopg
import pytest
from statement_plans import buffers
from worker_states import worker_state
from workers import Eyes

from pgqueue.database.sessions import Link, Session
from pgqueue.database.statements import text
from pgqueue.testing import Clock
from pgqueue.worker.leader import unknown_tasks
from pgqueue.worker.leader.unknown_tasks import UnknownTasks
from pgqueue.worker.liveness.registration import register

DAY = 86_400.0


class Bench:
    """The duty of a worker that knows the task `mine`, and a clock to turn."""

    def __init__(self, dsn: str, eyes: Eyes, clock: Clock) -> None:
        self.dsn, self.eyes, self.clock = dsn, eyes, clock
        self.session = Session(Link(dsn, "pgqueue"), "maintain")
        self.ended = 0
        self.worker_id = self.worker("mine")
        self.duty = self.new()

    def new(self, fail_after: float = DAY) -> UnknownTasks:
        state = worker_state(self.session.link, self.worker_id, version_tag="v", fail_unknown=fail_after)
        return UnknownTasks(self.session, state, ended=self._ended)

    def worker(self, *tasks: str, queue: str = "default") -> int:
        with psycopg.connect(self.dsn) as conn:
            return register(conn, "pgqueue", lease=15.0, concurrency=1, version_tag="v", queues=[queue], tasks=tasks)

    def _ended(self) -> None:
        self.ended += 1

    def moment(self, interval: str) -> Any:
        return self.eyes.one("SELECT pgqueue.now() + %s::interval", interval)

    def later(self, interval: str) -> None:
        self.clock.set(self.moment(interval))

    async def look(self) -> None:
        self.duty._due = 0.0
        await self.duty.look()

    def put(self, task: str, **columns: Any) -> int:
        columns = {"task": task} | columns
        places = ", ".join(["%s"] * len(columns))
        insert = f"INSERT INTO pgqueue.job ({', '.join(columns)}) VALUES ({places}) RETURNING id"  # noqa: S608
        found: int = self.eyes.one(insert, *columns.values())
        return found


@pytest.fixture
async def bench(dsn: str, eyes: Eyes) -> AsyncIterator[Bench]:
    with Clock(eyes.conn) as clock:
        made = Bench(dsn, eyes, clock)
        yield made
        await made.session.close()


@pytest.mark.promise("F18")
async def test_what_no_live_worker_has_known_for_a_day_is_failed_with_its_reason(bench: Bench, eyes: Eyes) -> None:
    unknown, blocked = bench.put("other.ping"), bench.put("other.ping", state="blocked", key="lock:k", lock_key="k")
    aged = bench.put("other.ping", enqueued_at=bench.moment("-3 days"))
    mine = bench.put("mine")
    await bench.look()
    bench.later("23 hours 59 minutes")
    young = bench.put("other.ping")
    await bench.look()
    assert eyes.states() == {"available": 4, "blocked": 1}, (
        "not by the age of a job alone: its worker may have been away"
    )
    bench.later("2 minutes")
    await bench.look()
    assert sorted(eyes.all("SELECT id, state, reason FROM pgqueue.job_dead")) == [
        (id, "failed", "refused") for id in sorted((unknown, blocked, aged))
    ]
    message = "no task named 'other.ping' is imported by any worker"
    assert eyes.all("SELECT DISTINCT outcome, message, attempt, worker_id FROM pgqueue.attempt") == [
        ("refused", message, 0, bench.worker_id)
    ]
    assert eyes.state(mine) == eyes.state(young) == "available"
    assert bench.ended == 1
    bench.later("24 hours")
    await bench.look()
    assert eyes.state(young) == "failed"


@pytest.mark.promise("F18")
async def test_a_task_that_a_worker_has_known_meanwhile_has_a_day_from_then_on(bench: Bench, eyes: Eyes) -> None:
    unknown = bench.put("other.ping")
    await bench.look()
    bench.later("20 hours")
    other = bench.worker("other.ping")
    await bench.look()
    assert eyes.one("SELECT count(*) FROM pgqueue.unknown_task") == 0
    eyes.do("DELETE FROM pgqueue.worker WHERE id = %s", other)
    await bench.look()
    bench.later("20 hours")
    await bench.look()
    assert eyes.state(unknown) == "available"
    bench.later("5 hours")
    await bench.look()
    assert eyes.state(unknown) == "failed"


@pytest.mark.promise("F18")
async def test_a_queue_that_no_worker_serves_and_a_worker_of_another_queue(bench: Bench, eyes: Eyes) -> None:
    """In the one its worker may come; in the other one no worker runs it although its name is known somewhere."""
    bench.worker("elsewhere", queue="second")
    alone, beside = bench.put("elsewhere", queue="third"), bench.put("elsewhere")
    for _ in range(3):
        await bench.look()
        bench.later("13 hours")
    assert (eyes.state(alone), eyes.state(beside)) == ("available", "failed")


async def test_past_its_deadline_it_is_cancelled_as_one_that_is_claimed_too_late(bench: Bench, eyes: Eyes) -> None:
    late, known = (bench.put(task, deadline=bench.moment("1 hour")) for task in ("other.ping", "mine"))
    await bench.look()
    assert eyes.states() == {"available": 2}
    bench.later("61 minutes")
    await bench.look()
    assert eyes.all("SELECT id, state, reason FROM pgqueue.job_dead") == [(late, "cancelled", "deadline")]
    assert eyes.all("SELECT job_id, outcome, message FROM pgqueue.attempt") == [(late, "cancelled", "deadline")]
    assert eyes.state(known) == "available", "the worker that claims it ends it"


async def test_who_waits_for_it_is_told(bench: Bench, eyes: Eyes, dsn: str) -> None:
    job = bench.put("other.ping")
    bench.duty = bench.new(fail_after=0.0)
    with psycopg.connect(dsn, autocommit=True) as heard:
        heard.execute(f'LISTEN "pgqueue.:ended.{job}"')
        eyes.do("INSERT INTO pgqueue.job_waiter (job_id) VALUES (%s)", job)
        await bench.look()
        assert [each.channel for each in heard.notifies(timeout=5, stop_after=1)] == [f"pgqueue.:ended.{job}"]


async def test_a_round_goes_on_where_the_one_before_stopped(
    bench: Bench, eyes: Eyes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unknown_tasks, "LOOKED_MOST", 10)
    monkeypatch.setattr(unknown_tasks, "LOOK_SECONDS", 1e-9)
    bench.duty = bench.new(fail_after=0.0)
    eyes.do(
        "INSERT INTO pgqueue.job (task) "
        "SELECT CASE WHEN n <= 15 THEN 'mine' ELSE 'other' END FROM generate_series(1, 25) n"
    )

    async def one() -> int:
        await bench.look()
        found: int = eyes.one("SELECT count(*) FROM pgqueue.job_dead")
        return found

    found = [await one() for _ in range(8)]
    assert sorted(found) == found
    assert found[-1] == 10


@pytest.mark.promise("F07")
async def test_a_look_reads_what_it_looks_at_and_hashes_what_is_served(
    bench: Bench, eyes: Eyes, conn: psycopg.Connection
) -> None:
    params = {"after": 0, "n": 100, "seconds": DAY, "worker_id": 1, "version_tag": "v", "notify": False}
    costs: list[int] = []
    plan: list[dict[str, Any]] = []
    for number in (200, 20_000):
        eyes.do("INSERT INTO pgqueue.job (task) SELECT 'mine' FROM generate_series(1, %s)", number)
        eyes.do(
            "INSERT INTO pgqueue.job_blocked (state, task, key, lock_key) "
            "SELECT 'blocked', 'mine', 'lock:k', 'k' FROM generate_series(1, %s)",
            number,
        )
        eyes.do("ANALYZE")
        cost, plan = buffers(conn, text("unknown_tasks_look", "pgqueue"), params)
        costs.append(cost)
    assert costs[1] <= 2 * costs[0], costs
    judged = [
        str(node["Filter"]) for node in plan if "task" in str(node.get("Filter")) and node["Node Type"] == "CTE Scan"
    ]
    assert judged
    assert all("hashed SubPlan" in each for each in judged), judged


@pytest.mark.promise("F18")
@pytest.mark.parametrize("walk", [1, 5_000])
async def test_a_time_that_is_shorter_than_the_time_between_two_looks_counts(
    bench: Bench, eyes: Eyes, monkeypatch: pytest.MonkeyPatch, walk: int
) -> None:
    """Also where a walk over all jobs takes several looks."""
    monkeypatch.setattr(unknown_tasks, "LOOKED_MOST", walk)
    monkeypatch.setattr(unknown_tasks, "LOOK_SECONDS", 0.0)
    bench.duty = bench.new(fail_after=30.0)
    for _ in range(3):
        bench.put("other.ping")
    for _ in range(9):
        await bench.look()
        bench.later("60 seconds")
    assert eyes.states() == {"failed": 3}


@pytest.mark.promise("F18")
async def test_a_paused_queue_is_left_alone_and_the_time_begins_anew_when_it_is_open(bench: Bench, eyes: Eyes) -> None:
    bench.put("other.ping", deadline=bench.moment("1 hour"))
    late = bench.put("other.ping")
    await bench.look()
    eyes.do("INSERT INTO pgqueue.queue (name, paused_at) VALUES ('default', pgqueue.now())")
    for _ in range(30):
        bench.later("1 hour")
        await bench.look()
    assert eyes.states() == {"available": 2}
    eyes.do("UPDATE pgqueue.queue SET paused_at = NULL")
    await bench.look()
    assert eyes.states() == {"available": 1, "cancelled": 1}
    for _ in range(25):
        bench.later("1 hour")
        await bench.look()
    assert eyes.state(late) == "failed"


@pytest.mark.promise("F18")
async def test_after_a_stop_of_all_workers_for_days_nothing_fails_at_once(bench: Bench, eyes: Eyes) -> None:
    bench.put("other.ping")
    await bench.look()
    bench.later("3 days")
    await bench.look()
    assert eyes.states() == {"available": 1}


@pytest.mark.promise("F18")
async def test_a_walk_that_failed_forgets_no_task(bench: Bench, eyes: Eyes, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time goes on: only a walk that came to its end says that a task has no more jobs."""
    bench.duty = bench.new(fail_after=3600.0)
    job = bench.put("other.ping")
    await bench.look()
    real = bench.session.run

    async def fails(*messages: Any, **how: Any) -> Any:
        if "looked AS" in messages[0].sql:
            raise psycopg.OperationalError("away")
        return await real(*messages, **how)

    for _ in range(3):
        bench.later("15 minutes")
        monkeypatch.setattr(bench.session, "run", fails)
        with pytest.raises(psycopg.OperationalError):
            await bench.look()
    monkeypatch.setattr(bench.session, "run", real)
    bench.later("16 minutes")
    await bench.look()
    assert eyes.state(job) == "failed"
