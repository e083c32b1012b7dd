"""A job that waits for its release stays one, whatever is done to it by hand; and a job of a flow keeps its node."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from flow_rows import Desk, Made, end, put
from unique_jobs import keyed
from unique_jobs import put as unique_put
from workers import Eyes, until, work

import pgqueue
from pgqueue.client.tasks import task
from pgqueue.database import statements
from pgqueue.telemetry.metrics import Part, families
from pgqueue.worker.flows.releaser import Releaser
from pgqueue.worker.worker import Worker

KEY = "SELECT state, key, node < 0 FROM pgqueue.job WHERE id = %s"
NODE_OF = "SELECT DISTINCT node FROM pgqueue.job WHERE id = %s"


@task(name="waits.x", retry=pgqueue.RetryPolicy(attempts=3, first=0.01, factor=1))
async def x(job: pgqueue.Job, do: str = "") -> None:
    seen.append(job.node)
    if do == "retry" and job.attempt == 1:
        raise ValueError("once more")
    if do == "snooze" and not job.snoozes:
        raise pgqueue.Snooze(0.01)


seen: list[int | None] = []


@pytest.fixture(autouse=True)
def nothing_seen() -> None:
    seen.clear()


@pytest.fixture
async def desk(dsn: str) -> AsyncIterator[Desk]:
    made = Desk(dsn)
    yield made
    await made.close()


# By hand -------------------------------------------------------------------------------------------------------------


@pytest.mark.promise("F375")
@pytest.mark.parametrize("at", ["2000-01-01 00:00:00+00", "2100-01-01 00:00:00+00"])
async def test_a_job_that_is_rescheduled_still_waits_and_starts_no_earlier(
    at: str, dsn: str, eyes: Eyes, desk: Desk
) -> None:
    [(node, [first]), (_, [waiting])] = put(eyes.conn, Made(), Made(after=[0], headers={"pgqueue:delay": 1000}))
    with psycopg.connect(dsn) as conn:
        [answer] = pgqueue.reschedule(conn, waiting, at=eyes.one("SELECT %s::timestamptz", at))
        assert answer.changed
    assert eyes.all(KEY, waiting) == [("blocked", f"node:{node}", True)]
    end(eyes, first)
    await desk.look(node)
    assert eyes.state(waiting) == ("available" if at < "2026" else "scheduled")


@pytest.mark.promise("F375")
@pytest.mark.parametrize("parent", ["retried", "failed"])
async def test_a_job_cancelled_by_a_dependency_waits_again_when_it_is_retried(
    parent: str, dsn: str, eyes: Eyes, desk: Desk
) -> None:
    """With the job before it in one call it waits for that; alone it is judged again."""
    [(node, [first]), (_, [second])] = put(eyes.conn, Made(), Made(after=[0]))
    end(eyes, first, state="failed")
    await desk.look(node)
    assert eyes.state(second) == "cancelled"
    with psycopg.connect(dsn) as conn:
        answers = pgqueue.retry(conn, *([first, second] if parent == "retried" else [second]))
        assert all(answer.changed for answer in answers)
    assert eyes.all(KEY, second) == [("blocked", f"node:{node}", True)]
    await desk.look(node)
    assert eyes.state(second) == ("blocked" if parent == "retried" else "cancelled")
    if parent == "retried":
        end(eyes, first)
        await desk.look(node)
        assert eyes.state(second) == "available"


@pytest.mark.promise("F375")
async def test_a_cancel_of_a_waiting_job_is_told_to_the_leader(dsn: str, eyes: Eyes) -> None:
    """What waited for it is cancelled at once: no sweep comes for 15 s."""
    [(_, [first]), (_, [second]), (_, [third])] = put(
        eyes.conn, Made("waits.none"), Made("waits.x", after=[0]), Made("waits.x", after=[1])
    )
    async with work(dsn, x, poll=60.0) as worker:
        await until(lambda: worker.services.election.leads())
        await until(lambda: worker.services.sweep.sweeps)
        worker.services.releaser.swept = lambda: None  # type: ignore[method-assign]
        with psycopg.connect(dsn) as conn:
            pgqueue.cancel(conn, second)
        await until(eyes.is_in(third, "cancelled"), 10.0)
    assert eyes.state(first) == "available"


@asynccontextmanager
async def leader(dsn: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Worker]:
    """A worker that leads, and whose releaser is told by no sweep."""
    monkeypatch.setattr(Releaser, "swept", lambda self: None)
    async with work(dsn, x) as worker:
        await until(lambda: worker.services.election.leads())
        await until(lambda: worker.services.sweep.sweeps)
        yield worker


@pytest.mark.promise("F373")
async def test_the_leader_hears_of_a_job_that_is_skipped_for_its_lock(
    dsn: str, eyes: Eyes, monkeypatch: pytest.MonkeyPatch
) -> None:
    eyes.do(
        "INSERT INTO pgqueue.worker (id, lease, pid, concurrency, host, version_tag, queues) "
        "OVERRIDING SYSTEM VALUE VALUES (1000, '1 h', 1, 1, '', '', '{}')"
    )
    eyes.do(
        "INSERT INTO pgqueue.job_running (state, worker_id, claim, started_at, task, lock_key, holds, hold_pos) "
        "VALUES ('running', 1000, 1, now(), 'waits.x', 'a', true, 1)"
    )
    async with leader(dsn, monkeypatch):
        flow = pgqueue.Flow("skipped")
        first = flow.add(x.using(lock=pgqueue.Lock("a", on_locked="skip")).new())
        second = flow.add(x.new(), after=[first])
        with psycopg.connect(dsn) as conn:
            handle = flow.enqueue(conn)
        await until(eyes.is_in(handle.jobs(second)[0].id, "completed"), 10.0)
    assert eyes.state(handle.jobs(first)[0].id) == "skipped"


@pytest.mark.promise("F321")
async def test_a_worker_counts_the_nodes_that_its_sweep_has_found(dsn: str, eyes: Eyes) -> None:
    [(_, [first]), (_, [second])] = put(eyes.conn, Made("waits.none"), Made("waits.x", after=[0]))
    end(eyes, first)
    async with work(dsn, x) as worker:
        await until(eyes.is_in(second, "completed"))
        numbers = worker.numbers()
    assert numbers.totals.swept_nodes == 1
    [counted] = [each for each in families([Part(numbers, [])]) if each.name == "pgqueue_swept_nodes"]
    assert [sample.value for sample in counted.samples if sample.name == "pgqueue_swept_nodes_total"] == [1]


UNFIT = {
    "unblock_refuse_unfit": """
        WITH gone AS (DELETE FROM pgqueue.job_available WHERE id = %s RETURNING id, task, node)
        INSERT INTO pgqueue.job_blocked (state, key, lock_key, rank, id, task, node)
        SELECT 'blocked', 'lock:a', 'a', 99, id, task, node FROM gone""",
    "rescue_refuse_unfit": """
        WITH gone AS (DELETE FROM pgqueue.job_available WHERE id = %s RETURNING id, task, node)
        INSERT INTO pgqueue.job_running (state, worker_id, claim, started_at, rank, id, task, node)
        SELECT 'running', 1000, 1, now(), 99, id, task, node FROM gone""",
}
"""What brings a job where no lane could take it, by the statement that fails it."""


@pytest.mark.promise("F322")
@pytest.mark.parametrize("name", ["unblock_refuse_unfit", "rescue_refuse_unfit"])
async def test_the_leader_hears_of_a_job_that_fits_into_no_lane(
    name: str, dsn: str, eyes: Eyes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Naive is to fail the job without a word to its node: what waits for its node waits for the sweep."""
    [(_, [first]), (_, [second])] = put(eyes.conn, Made("waits.none"), Made("waits.x", after_end=[0]))
    eyes.do(UNFIT[name], first)
    asked = {"notify": True, "worker_id": 1000}
    async with leader(dsn, monkeypatch):
        with psycopg.connect(dsn) as conn:
            [row] = conn.execute(statements.text(name, "pgqueue").encode(), asked).fetchall()
        assert row == (first, 1)
        await until(eyes.is_in(second, "completed"), 10.0)
    assert eyes.state(first) == "failed"


def rescheduled(conn: psycopg.Connection, id: int) -> None:
    pgqueue.reschedule(conn, id, at=datetime.now(UTC) - timedelta(days=1))


def replaced(conn: psycopg.Connection, id: int) -> None:
    assert unique_put(conn, "k", on_duplicate="replace").replaced


@pytest.mark.promise("F373")
@pytest.mark.parametrize("change", [rescheduled, replaced])
async def test_a_job_that_was_passed_over_while_it_was_changed_is_released_after_that(
    change: Callable[[psycopg.Connection, int], None], dsn: str, eyes: Eyes, monkeypatch: pytest.MonkeyPatch
) -> None:
    flow = pgqueue.Flow("changed")
    first = flow.add(x.using(delay=3_600).new())
    second = flow.add(keyed("k"), after=[first])
    async with leader(dsn, monkeypatch) as worker:
        with psycopg.connect(dsn) as conn:
            handle = flow.enqueue(conn)
        (before,), (waiting,) = handle.jobs(first), handle.jobs(second)
        with psycopg.connect(dsn) as conn:
            change(conn, waiting.id)
            end(eyes, before.id)
            worker.services.releaser.look_at([handle.id << 20 | 1])
            await worker.services.releaser.idle()
            assert eyes.state(waiting.id) == "blocked"
        await until(eyes.is_in(waiting.id, "available"), 10.0)


@pytest.mark.promise("F375")
async def test_a_waiting_job_of_an_unknown_task_is_left_alone(dsn: str, eyes: Eyes) -> None:
    [(_, [first]), (_, [second])] = put(eyes.conn, Made("waits.none"), Made("waits.none", after=[0]))
    async with work(dsn, x, fail_unknown=0.01) as worker:
        worker.services.releaser.look_at = lambda nodes: None  # type: ignore[method-assign]
        async with asyncio.timeout(30):
            while eyes.state(first) != "failed":
                worker.services.unknown_tasks._due = 0.0  # however long the last look took
                await worker.services.unknown_tasks.look()
        assert eyes.state(second) == "blocked"


@pytest.mark.promise("F376")
def test_why_names_the_node_and_its_oldest_job(dsn: str, eyes: Eyes) -> None:
    [(one, [a]), (_, [b, c]), (mine, [waiting])] = put(
        eyes.conn, Made(name="paid"), Made(jobs=[{}, {}]), Made(after=[0, 1])
    )
    with psycopg.connect(dsn, autocommit=True) as conn:
        reason = pgqueue.why(conn, waiting).reasons[-1]
        assert reason.code == "node"
        assert reason.text == f"it waits for 1 job of node 'paid', first for job {a}; and for 1 node more, of 2 in all"
        assert reason.details == {
            "node": mine, "nodes": 2, "living": 2, "first": one, "name": "paid", "jobs": 1
        }  # fmt: skip
        assert [holder.id for holder in reason.holders] == [a]
        end(eyes, a)
        reason = pgqueue.why(conn, waiting).reasons[-1]
        assert reason.text == f"it waits for 2 jobs of node 2, first for job {b}"
        end(eyes, b, c)
        reason = pgqueue.why(conn, waiting).reasons[-1]
        assert (reason.code, reason.details["living"]) == ("release_overdue", 0)


@pytest.mark.promise("F376")
async def test_why_says_which_job_a_cancelled_one_depended_on(dsn: str, eyes: Eyes, desk: Desk) -> None:
    [(node, [first]), (_, [second]), (_, [third])] = put(
        eyes.conn, Made(name="paid"), Made(after=[0]), Made(after_failure=[1])
    )
    end(eyes, first, state="failed")
    await desk.look(node)
    with psycopg.connect(dsn) as conn:
        [reason] = pgqueue.why(conn, second).reasons
        assert "dependency (a job that it waited for failed or was cancelled)" in reason.text
        assert f"job {first} of node 'paid' failed or was cancelled" in reason.text
    assert eyes.state(third) == "available"


@pytest.mark.promise("F376")
def test_the_doctor_finds_jobs_that_are_not_released(dsn: str, eyes: Eyes) -> None:
    flows = [put(eyes.conn, Made(), Made(after=[0])) for _ in range(3)]
    with psycopg.connect(dsn, autocommit=True) as conn:
        end(eyes, flows[0][0][1][0])
        assert [finding.name for finding in pgqueue.doctor(conn).findings if finding.name == "unreleased"] == []
        eyes.do(
            "WITH gone AS (DELETE FROM pgqueue.job_done RETURNING *) INSERT INTO pgqueue.job_done "
            "(state, finished_at, bin, id, task, node) "
            "SELECT state, now() - interval '90 s', bin, id, task, node FROM gone"
        )
        [finding] = [finding for finding in pgqueue.doctor(conn).findings if finding.name == "unreleased"]
    assert finding.what == "all jobs of 1 node have ended, and jobs that wait for them are not released"
    assert finding.seconds is not None
    assert 90.0 <= finding.seconds < 120.0


# Moves ---------------------------------------------------------------------------------------------------------------


@pytest.mark.promise("F377")
@pytest.mark.parametrize("do", ["", "retry", "snooze"])
async def test_a_job_keeps_its_node_from_claim_to_history(do: str, dsn: str, eyes: Eyes) -> None:
    [(node, [id])] = put(eyes.conn, Made("waits.x", [{"do": do}]))
    async with work(dsn, x):
        await until(eyes.is_in(id, "completed"))
    assert set(seen) == {node}
    assert eyes.all(NODE_OF, id) == [(node,)]


def later(conn: psycopg.Connection, id: int) -> None:
    pgqueue.reschedule(conn, id, at=datetime.now(UTC) + timedelta(days=1))


MOVES: dict[str, Callable[[psycopg.Connection, int], Any]] = {"cancel": pgqueue.cancel, "reschedule": later}


@pytest.mark.promise("F377")
@pytest.mark.parametrize("move", MOVES)
def test_a_job_keeps_its_node_in_what_is_done_by_hand(move: str, dsn: str, eyes: Eyes) -> None:
    [(node, [id])] = put(eyes.conn, Made())
    with psycopg.connect(dsn) as conn:
        MOVES[move](conn, id)
    assert eyes.state(id) != "available"
    assert eyes.all(NODE_OF, id) == [(node,)]
    if move == "cancel":
        with psycopg.connect(dsn) as conn:
            pgqueue.retry(conn, id)
        assert eyes.all("SELECT state, node FROM pgqueue.job WHERE id = %s", id) == [("available", node)]


@pytest.mark.promise("F377")
async def test_a_job_keeps_its_node_when_it_is_given_back_unblocked_promoted_and_rescued(dsn: str, eyes: Eyes) -> None:
    """Two jobs of one lock; one that is due; one of a worker that died."""
    made = put(eyes.conn, *[Made("waits.x") for _ in range(4)])
    nodes, ids = [node for node, _ in made], [ids[0] for _, ids in made]
    eyes.do(
        "WITH gone AS (DELETE FROM pgqueue.job_available WHERE id = ANY (%s) RETURNING id, task, node) "
        "INSERT INTO pgqueue.job_available (state, lock_key, id, task, node) SELECT 'available', 'a', gone.* FROM gone",
        ids[:2],
    )
    eyes.do(
        "WITH gone AS (DELETE FROM pgqueue.job_available WHERE id = %s RETURNING id, task, node) "
        "INSERT INTO pgqueue.job_scheduled (state, run_at, id, task, node) SELECT 'scheduled', now(), gone.* FROM gone",
        ids[2],
    )
    eyes.do(
        "INSERT INTO pgqueue.worker (id, lease, pid, concurrency, host, version_tag, queues, dead_at) "
        "OVERRIDING SYSTEM VALUE VALUES (1000, '1 s', 1, 1, '', '', '{}', now())"
    )
    eyes.do(
        "WITH gone AS (DELETE FROM pgqueue.job_available WHERE id = %s RETURNING id, task, node) "
        "INSERT INTO pgqueue.job_running (state, worker_id, claim, started_at, id, task, node) "
        "SELECT 'running', 1000, 1, now(), gone.* FROM gone",
        ids[3],
    )
    async with work(dsn, x) as worker:
        await worker.services.rescue.strays()
        await until(eyes.done(4))
    assert sorted(seen) == nodes  # type: ignore[type-var]
    assert eyes.all("SELECT node FROM pgqueue.job WHERE id = ANY (%s) ORDER BY id", ids) == [(node,) for node in nodes]
