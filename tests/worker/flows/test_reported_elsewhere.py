"""What users of other queues have reported of jobs that wait for jobs, each by name. None of it happens here.

| report | what went wrong there | seen here |
|---|---|---|
| celery 3571 | groups in groups took a time that doubles with each level | below |
| celery 4207 | of a hundred jobs that ended at about the same time none called the callback | below |
| celery 9674 | a chain in a group failed in its middle, and what waits for the group was asked about for ever | below |
| dbos 688 | steps were told apart by their order, which was another one at the next attempt | below |
| sidekiq 4361 | a process that was stopped counted its job, and gave it back: the count fell below 0 | below |
| good_job 832 | jobs of a batch that ended together each enqueued the callback | below |
| good_job 1387 | a batch was pruned while a job of it was still being retried | below |
| good_job 1450 | a failed job was retried by hand and completed: the callback was never enqueued | below |
| oban 722 | the pruner deleted a completed job before what depended on it had run | below |
| bullmq 800 | a child failed, and its parent waited for ever | below |
| bullmq 1752 | a child that failed was removed, and its parent waited for ever | below |
| rq 739 | a job whose parent ended while it was enqueued, or looked at, was never started | test_releaser.py, F372 |
| rq 2006 | a job that may run after a failure was not started after its parent's worker had died | below |
| pgflow 606 | two parents were skipped together, and counted as one: the child waited for ever | below |
| laravel 36478 | jobs of a batch that ended at once waited for one row, or deadlocked | below; test_random_graphs.py |
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import psycopg
import pytest
from flow_rows import DONE, Desk, Made, end, put
from workers import Eyes, until, work

import pgqueue
from pgqueue import Flow, Job, RetryPolicy, testing
from pgqueue.client import flow_enqueue
from pgqueue.client.tasks import task
from pgqueue.worker.flows.releaser import Releaser
from pgqueue.worker.leader.pruner import Pruner

MOVED = """
    WITH gone AS (DELETE FROM pgqueue.job WHERE id = %s RETURNING id, task, node)
    INSERT INTO pgqueue.job (state, worker_id, claim, started_at, id, task, node)
    SELECT 'running', 1, 1, now(), gone.* FROM gone
"""
BACK = """
    WITH gone AS (DELETE FROM pgqueue.job_running WHERE id = %s RETURNING id, task, node)
    INSERT INTO pgqueue.job (state, id, task, node) SELECT 'available', gone.* FROM gone
"""
LATER = """
    WITH gone AS (DELETE FROM pgqueue.job WHERE id = %s RETURNING id, task, node)
    INSERT INTO pgqueue.job (state, run_at, id, task, node)
    SELECT 'scheduled', pgqueue.now() + interval '1 day', gone.* FROM gone
"""
DEAD_WORKER = """
    INSERT INTO pgqueue.worker (id, lease, pid, concurrency, host, version_tag, queues, dead_at, running)
    OVERRIDING SYSTEM VALUE VALUES (1000, '1 s', 1, 1, '', '', '{}', now(), ARRAY[%s::bigint])
"""
LOST = """
    WITH gone AS (DELETE FROM pgqueue.job_available WHERE id = %s RETURNING id, task, node)
    INSERT INTO pgqueue.job_running (state, worker_id, claim, started_at, crashes, id, task, node)
    SELECT 'running', 1000, 1, now(), 2, gone.* FROM gone
"""

pytestmark = pytest.mark.promise("F328")


@task(name="elsewhere.x")
async def x() -> None: ...


@pytest.fixture
async def desk(dsn: str) -> AsyncIterator[Desk]:
    made = Desk(dsn)
    yield made
    await made.close()


def history_turns(eyes: Eyes) -> None:
    """All that had ended is forgotten."""
    for kind, leaves in (("done", 8), ("dead", 16)):
        for _ in range(leaves):
            assert eyes.one("SELECT pgqueue.advance_ring(%s, true)", kind)


def size(depth: int) -> int:
    """Of what is sent for so many groups of two jobs, each after the one before, the last one closed by a job."""
    flow = Flow("nested")
    after: list[pgqueue.Node[list[None]]] = []
    for _ in range(depth):
        after = [flow.add_many([x.new(), x.new()], after=after)]
    flow.add(x.new(), after=after)
    jobs = [job for node in flow.nodes for job in node.jobs]
    sent = flow_enqueue.statement("nested", flow.nodes, jobs, schema="pgqueue", notify=True)
    return len(sent.sql) + sum(len(str(each)) for each in sent.params.values())


def test_celery_3571_a_level_more_adds_what_the_level_before_has_added() -> None:
    """Naive: the rest of the graph travels with each job of a group."""
    one, two, three = size(100), size(200), size(300)
    assert abs((three - two) - (two - one)) < 0.1 * (two - one)


async def test_celery_4207_the_callback_of_a_hundred_jobs_runs_once(dsn: str, eyes: Eyes) -> None:
    """Naive: the last end is known by a count that an end may miss. Here two workers end them, twenty at a time."""
    for _ in range(3):
        [_, (_, [callback])] = put(eyes.conn, Made("elsewhere.x", jobs=[{}] * 100), Made("elsewhere.x", after=[0]))
        async with work(dsn, x, concurrency=20), work(dsn, x, concurrency=20):
            await until(eyes.is_in(callback, "completed"))
    assert eyes.states() == {"completed": 303}


async def test_celery_9674_what_waits_for_a_chain_that_failed_in_its_middle_has_ended(eyes: Eyes, desk: Desk) -> None:
    """Naive: the group asks for the end of its last job, which is never made."""
    first, middle, behind, beside, last = put(
        eyes.conn, Made(), Made(after=[0]), Made(after=[1]), Made(after=[0]), Made(after=[2, 3])
    )
    end(eyes, *first[1])
    await desk.look(first[0])
    end(eyes, *middle[1], state="failed")
    await desk.look(middle[0])
    assert [eyes.state(node[1][0]) for node in (behind, beside, last)] == ["cancelled", "available", "blocked"]
    end(eyes, *beside[1])
    await desk.look(beside[0])
    assert eyes.states() == {"completed": 2, "failed": 1, "cancelled": 2}


def test_dbos_688_steps_in_another_order_are_told_apart_by_name(dsn: str) -> None:
    """Naive: by their order. Two at the same time are refused: they would share a transaction."""
    calls: list[str] = []

    def called(name: str) -> str:
        calls.append(name)
        return name.upper()

    @task(name="elsewhere.steps", retry=RetryPolicy(attempts=2, first=0.01))
    def steps(job: Job) -> list[str]:
        got = [job.step(name, called, name) for name in ("abc" if job.attempt == 1 else "cab")]
        if job.attempt == 1:
            raise ValueError("again")
        return got

    with psycopg.connect(dsn) as conn, testing.Clock(conn) as clock:
        steps.enqueue(conn)
        testing.drain(conn, clock)
        assert conn.execute("SELECT result FROM pgqueue.job_done").fetchone() == (["C", "A", "B"],)
    assert calls == ["a", "b", "c"]


async def test_pgflow_606_each_parent_that_is_skipped_counts(eyes: Eyes, desk: Desk) -> None:
    """Naive: one off the count of the child, for all that were skipped by one statement."""
    (node, [job]), _, _, (beside, [other]), (_, [child]) = put(
        eyes.conn, Made(), Made(after_failure=[0]), Made(after_failure=[0]), Made(), Made(after=[1, 2, 3])
    )
    end(eyes, job)
    await desk.look(node)
    assert eyes.states() == {"completed": 1, "skipped": 2, "available": 1, "blocked": 1}
    end(eyes, other)
    await desk.look(beside)
    assert eyes.state(child) == "available"


async def test_sidekiq_4361_a_job_that_was_given_back_counts_once(eyes: Eyes, desk: Desk) -> None:
    """Naive: one off the count at the stop, and one off it at the end."""
    [(node, [first, other]), (_, [callback])] = put(eyes.conn, Made(jobs=[{}, {}]), Made(after=[0]))
    eyes.do(MOVED, first)
    eyes.do(BACK, first)  # its worker has stopped
    await desk.look(node)
    end(eyes, other)
    await desk.look(node)
    assert eyes.state(callback) == "blocked"
    end(eyes, first)
    await desk.look(node)
    assert eyes.state(callback) == "available"


async def test_good_job_832_one_callback_for_jobs_that_end_together(eyes: Eyes, desk: Desk, dsn: str) -> None:
    """Naive: each of them sees that none lives, and enqueues it."""
    [(node, ids), (_, [callback])] = put(eyes.conn, Made(jobs=[{}] * 20), Made(after=[0]))
    end(eyes, *ids)
    desks = [desk, *[Desk(dsn, number) for number in range(2, 6)]]
    await asyncio.gather(*[each.look(node) for each in desks])
    assert sum(each.releaser.released for each in desks) == 1
    assert eyes.all("SELECT id FROM pgqueue.job_available") == [(callback,)]
    for each in desks[1:]:
        await each.close()


async def test_good_job_1387_a_flow_outlives_history_while_a_job_of_it_is_retried(eyes: Eyes, desk: Desk) -> None:
    """Naive: a flow goes by its age."""
    [(node, [done, retried]), (_, [callback])] = put(eyes.conn, Made(jobs=[{}, {}]), Made(after=[0], name="callback"))
    eyes.do("UPDATE pgqueue.flow SET enqueued_at = now() - interval '30 days'")
    end(eyes, done)
    eyes.do(LATER, retried)
    history_turns(eyes)
    pruner = Pruner(desk.session)
    await pruner.flows()
    await pruner.kept_of_flows()
    end(eyes, retried)
    await desk.look(node)
    assert eyes.state(callback) == "available"
    assert eyes.all("SELECT name FROM pgqueue.node WHERE name IS NOT NULL") == [("callback",)]


async def test_good_job_1450_a_retry_by_hand_lets_the_callback_run(eyes: Eyes, desk: Desk, dsn: str) -> None:
    """Naive: a batch that has failed once is over."""
    [(node, [failed, other]), (_, [callback])] = put(eyes.conn, Made(jobs=[{}, {}]), Made(after=[0]))
    end(eyes, other)
    end(eyes, failed, state="failed")
    await desk.look(node)
    assert eyes.state(callback) == "cancelled"
    with psycopg.connect(dsn) as conn:
        pgqueue.retry(conn, flow=node >> 20)
    assert (eyes.state(failed), eyes.state(callback)) == ("available", "blocked")
    end(eyes, failed)
    await desk.look(node)
    assert eyes.state(callback) == "available"


async def test_oban_722_a_job_that_history_has_forgotten_has_still_completed(eyes: Eyes, desk: Desk) -> None:
    """Naive: what is judged is the rows that are left; the result is lost with its row."""
    [_, (two, [snoozing]), (_, [last])] = made = put(
        eyes.conn, Made(), Made(after=[0]), Made(after=[0, 1], results={"got": (0, False)})
    )
    node, [first] = made[0]
    end(eyes, first, result='"kept"')
    await desk.look(node)
    eyes.do(LATER, snoozing)
    history_turns(eyes)
    await Pruner(desk.session).kept_of_flows()
    end(eyes, snoozing)
    await desk.look(two)
    assert eyes.all("SELECT state, args FROM pgqueue.job WHERE id = %s", last) == [("available", {"got": "kept"})]


async def test_bullmq_800_a_child_that_fails_leaves_no_parent_waiting(eyes: Eyes, desk: Desk) -> None:
    """Naive: only a completion is told to the parent. Here it is cancelled, or runs if it waits for the end."""
    [(node, [good, bad]), (_, [parent]), (_, [whatever])] = put(
        eyes.conn, Made(jobs=[{}, {}]), Made(after=[0]), Made(after_end=[0])
    )
    end(eyes, good)
    end(eyes, bad, state="failed")
    await desk.look(node)
    assert (eyes.state(parent), eyes.state(whatever)) == ("cancelled", "available")


async def test_bullmq_1752_a_child_that_was_removed_leaves_no_parent_waiting(eyes: Eyes, desk: Desk, dsn: str) -> None:
    """A discard refuses to remove it. A DELETE by hand says nothing: the sweep releases what waits."""
    [(_, [good, bad]), (_, [parent])] = put(eyes.conn, Made(jobs=[{}, {}]), Made(after_end=[0]))
    end(eyes, bad, state="failed")
    with psycopg.connect(dsn) as conn:
        [answer] = pgqueue.discard(conn, bad)
        assert answer.did == "needed"
    eyes.do("DELETE FROM pgqueue.job WHERE id = %s", bad)
    end(eyes, good)
    assert await desk.sweep() == 1
    assert eyes.state(parent) == "available"


async def test_rq_2006_a_job_whose_worker_died_has_failed_for_those_that_wait(
    eyes: Eyes, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its third crash. Naive: only a worker that ends a job itself looks for what waits."""
    monkeypatch.setattr(Releaser, "swept", lambda self: None)
    [(_, [lost]), (_, [cleanup])] = put(eyes.conn, Made("elsewhere.x"), Made("elsewhere.x", after_failure=[0]))
    eyes.do(LOST, lost)
    eyes.do(DEAD_WORKER, lost)
    async with work(dsn, x) as worker:
        await worker.services.rescue.strays()
        await until(eyes.is_in(cleanup, "completed"), 15.0)
    assert eyes.one("SELECT reason FROM pgqueue.job WHERE id = %s", lost) == "crashed"


def test_laravel_36478_no_end_of_a_job_waits_for_the_end_of_another(eyes: Eyes, dsn: str) -> None:
    """Naive: both change the row of their batch, and the second one waits for the first one's transaction."""
    [(_, [first, second]), _] = put(eyes.conn, Made(jobs=[{}, {}]), Made(after=[0]))
    with psycopg.connect(dsn) as open_still:
        open_still.execute(DONE, [[first], "completed", None])
        eyes.do("SET lock_timeout = '2s'")
        end(eyes, second)
    assert eyes.states() == {"completed": 2, "blocked": 1}
