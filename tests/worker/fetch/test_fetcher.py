"""Claiming jobs: the order of lanes, limits, what a claim refuses, its plan and cost, and who wakes the fetcher."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from time import monotonic
from typing import Any

import psycopg
import pytest
from claim_plans import beside, buffers, explain, put
from workers import Eyes, Taker, until

from pgqueue.database.statements import Statement
from pgqueue.jobs.job import Job
from pgqueue.worker.fetch.watermark import SWEEP_SHARE, Watermark
from pgqueue.worker.run.slots import Room

HAND = "INSERT INTO pgqueue.job ({}) VALUES ({})"


@pytest.fixture
async def taker(dsn: str) -> AsyncIterator[Taker]:
    made = Taker(dsn)
    yield made
    await made.close()


@pytest.fixture
async def two_queues(dsn: str) -> AsyncIterator[Taker]:
    made = Taker(dsn, ("a", "b"))
    yield made
    await made.close()


def names(jobs: list[Job]) -> list[str]:
    return [job.task for job in jobs]


# Order ---------------------------------------------------------------------------------------------------------------


@pytest.mark.each_value
@pytest.mark.parametrize("paused", [None, "b", "other"])
@pytest.mark.parametrize("analysed", [False, True])
async def test_the_most_urgent_lane_first_and_in_order_within(
    two_queues: Taker, eyes: Eyes, paused: str | None, analysed: bool
) -> None:
    for priority in (9, 0, 5):
        for queue in ("a", "b"):
            for number in range(3):
                put(eyes, f"{priority}{queue}{number}", queue=queue, priority=priority)
    eyes.do("INSERT INTO pgqueue.queue (name) VALUES ('unpaused')")
    if paused:
        eyes.do("INSERT INTO pgqueue.queue (name, paused_at) VALUES (%s, now())", paused)
    if analysed:
        eyes.do("ANALYZE pgqueue.job_available, pgqueue.queue, pgqueue.worker")
    taken: list[str] = []
    while got := names(await two_queues.fetch(4)):
        taken += got
    wanted = [name for name in taken if name[0] == "0"] + [name for name in taken if name[0] == "5"]
    wanted += [name for name in taken if name[0] == "9"]
    assert taken == wanted
    for lane in ("0a", "0b", "5a", "5b", "9a", "9b"):
        found = [name for name in taken if name[:2] == lane]
        assert found == ([] if lane[1] == paused else [f"{lane}{number}" for number in range(3)])


async def test_a_paused_queue_is_left_alone_and_everything_in_it_is_found_when_it_resumes(
    two_queues: Taker, eyes: Eyes
) -> None:
    eyes.do("INSERT INTO pgqueue.queue (name, paused_at) VALUES ('a', now())")
    put(eyes, "a", queue="a", number=3)
    put(eyes, "b", queue="b", number=3)
    assert names(await two_queues.fetch()) == ["b"] * 3
    put(eyes, "b", queue="b")
    assert names(await two_queues.fetch()) == ["b"]
    eyes.do("DELETE FROM pgqueue.queue")
    assert names(await two_queues.fetch()) == ["a"] * 3


async def test_queues_of_one_rank_take_turns(two_queues: Taker, eyes: Eyes) -> None:
    put(eyes, "a", queue="a", number=10)
    put(eyes, "b", queue="b", number=10)
    first = {names(await two_queues.fetch(1))[0] for _ in range(2)}
    assert first == {"a", "b"}


async def test_jobs_that_had_been_taken_stand_before_their_equals_and_suspects_before_all(
    taker: Taker, eyes: Eyes
) -> None:
    put(eyes, "urgent", priority=0)
    put(eyes, "equal")
    for name, rank, crashes in ("front", 10, 0), ("suspect", -2, 1), ("worse", -1, 2), ("suspect", -2, 1):
        eyes.do("INSERT INTO pgqueue.job (task, rank, crashes) VALUES (%s, %s, %s)", name, rank, crashes)
    assert names(await taker.fetch()) == ["suspect", "worse", "urgent", "front", "equal"]
    taker.poison_free = False
    assert names(await taker.fetch()) == []
    taker.poison_free = True
    assert names(await taker.fetch()) == ["suspect"]


# What a claim writes and refuses -------------------------------------------------------------------------------------


async def test_a_claim_marks_the_row_and_the_job_says_what_it_carries(taker: Taker, eyes: Eyes) -> None:
    eyes.do(
        "INSERT INTO pgqueue.job (task, args, headers, max_attempts, attempt, idempotency_key) "
        """VALUES ('x', '{"a": 1}', '{"h": "v"}', 7, 2, 'key')"""
    )
    [job] = await taker.fetch()
    [row] = eyes.all(
        "SELECT state, worker_id, claim, attempt, started_at > now() - interval '1 minute' FROM pgqueue.job"
    )
    assert row == ("running", taker.worker_id, job.claim, 3, True)
    assert (job.args, job.headers, job.max_attempts, job.attempt) == ('{"a": 1}', {"h": "v"}, 7, 3)


async def test_a_worker_that_is_marked_dead_or_has_no_row_takes_nothing(taker: Taker, eyes: Eyes) -> None:
    put(eyes, "x")
    eyes.do("UPDATE pgqueue.worker SET dead_at = now()")
    assert await taker.fetch() == []
    eyes.do("DELETE FROM pgqueue.worker")
    assert await taker.fetch() == []
    assert eyes.states() == {"available": 1}


async def test_a_claim_that_would_delete_more_than_it_starts_is_refused(taker: Taker, eyes: Eyes) -> None:
    put(eyes, "x", number=3)
    eyes.do(
        "CREATE FUNCTION lose() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'; "
        "CREATE TRIGGER lose BEFORE INSERT ON pgqueue.job_running FOR EACH ROW EXECUTE FUNCTION lose()"
    )
    with pytest.raises(psycopg.errors.DataCorrupted, match="a claim deleted jobs it did not start"):
        await taker.fetch()
    assert eyes.states() == {"available": 3}


@pytest.mark.promise("F18")
@pytest.mark.parametrize(
    "values",
    [
        {"attempt": 32767},
        {"attempt": -5},
        {"crashes": 32767, "rank": -1},
        {"crashes": -1},
        {"snoozes": 32767},
        {"enqueued_at": "-infinity"},
        {"enqueued_at": "infinity"},
        {"run_at": "-infinity"},
        {"deadline": "infinity"},
        {"pos": -5},
        {"pos": 0},
        {"id": -5},
        {"task": "with space\nand line"},
        {"queue": "é" * 40},
        {"queue": ""},
        {"max_attempts": 0},
        {"args": "[1]"},
        {"args": "null"},
        {"headers": "[1]"},
        {"on_locked": "maybe"},
        {"holds": True, "lock_key": "x"},
        {"bin": 77},
        {"claim": 1},
        {"rank": 3},
        {"priority": 3},
    ],
    ids=str,
)
async def test_a_row_written_by_hand_is_refused_or_harms_only_itself(
    values: dict[str, Any], dsn: str, eyes: Eyes
) -> None:
    """Claimed, given back, retried, rescued or not: whatever stands in it, its neighbours are served."""
    row = {"task": "poison", **values}
    try:
        eyes.do(HAND.format(", ".join(row), ", ".join(["%s"] * len(row))), *row.values())
    except (psycopg.errors.IntegrityError, psycopg.errors.DataError):
        return
    put(eyes, "neighbour")
    taker = Taker(dsn, ("default", *([values["queue"]] if values.get("queue") else [])))
    taken = await taker.fetch()
    assert "neighbour" in [job.task for job in taken]
    assert len(taken) == 2, "a row nobody finds is stuck for ever"
    for job in taken:
        repr(job), job.priority, job.snoozes, job.max_attempts
    params = {"worker_id": taker.worker_id, "n": 100, "first": True, "passed": "{}", "notify": True}
    await taker.session.run(taker.link.statement("rescue_jobs", **params))
    assert eyes.one("SELECT count(*) FROM pgqueue.job_running") == 0
    await taker.close()


# Answers lost, connections new ---------------------------------------------------------------------------------------


@pytest.mark.promise("F06")
async def test_a_claim_whose_answer_is_lost_is_in_doubt_and_settled(taker: Taker, eyes: Eyes) -> None:
    put(eyes, "x", number=3)
    real = taker.session.run

    async def lose(*messages: Any, **options: Any) -> list[Any]:
        await real(*messages, **options)
        raise psycopg.OperationalError("the answer was lost")

    taker.session.run = lose  # type: ignore[method-assign]
    with pytest.raises(psycopg.OperationalError):
        await taker.fetch(2)
    taker.session.run = real  # type: ignore[method-assign]
    assert (taker.doubts, taker.fetcher._state.claims.settled) == (1, 1)
    assert eyes.states() == {"available": 1, "running": 2}
    assert len(await taker.fetch()) == 1
    assert taker.fetcher._state.claims.settled == 2


async def test_a_new_connection_begins_at_zero(taker: Taker, eyes: Eyes) -> None:
    put(eyes, "x", number=3)
    assert len(await taker.fetch(2)) == 2
    eyes.terminate("pgqueue fetch")
    # What a server that crashed has forgotten: the claim itself (it is not durable).
    eyes.do("DELETE FROM pgqueue.job_running")
    eyes.do("INSERT INTO pgqueue.job (task, pos) VALUES ('again', 1), ('again', 2)")
    with pytest.raises(psycopg.OperationalError):
        await taker.fetch(10)
    assert names(await taker.fetch(10)) == ["again", "again", "x"]


async def test_a_connection_that_others_lost_begins_at_zero_too_and_all_held_is_in_doubt(
    taker: Taker, eyes: Eyes
) -> None:
    """The session is shared: a promotion may have met the failover, and the fetcher hears nothing of it. Completions
    that the lost server took with it have left rows here that nobody would end."""
    put(eyes, "x", number=3)
    assert len(await taker.fetch(2)) == 2
    assert taker.doubts == 0
    await taker.session.close()
    eyes.do("DELETE FROM pgqueue.job_running")
    eyes.do("INSERT INTO pgqueue.job (task, pos) VALUES ('again', 1), ('again', 2)")
    assert names(await taker.fetch(10)) == ["again", "again", "x"]
    assert taker.doubts == 1


# Waking up -----------------------------------------------------------------------------------------------------------


@pytest.mark.promise("F05")
async def test_news_during_a_fetch_lead_to_another_fetch(dsn: str, eyes: Eyes) -> None:
    taker = Taker(dsn)
    taker.fetcher.watermark = Watermark(sweep_every=1e9)
    claim = taker.fetcher._claim
    jobs: list[str] = []
    fetched = asyncio.Event()

    async def with_news(*args: Any, **how: Any) -> Any:
        answer = await claim(*args, **how)
        if not fetched.is_set():
            fetched.set()
            put(eyes, "late")  # after the claim, before its answer
            taker.fetcher.wake()
        return answer

    taker.fetcher._claim = with_news  # type: ignore
    taker.state.settings = replace(taker.state.settings, poll=60.0)
    taker.hands.deliver = lambda found: jobs.extend(job.task for job in found)
    running = asyncio.ensure_future(taker.fetcher.run())
    await until(lambda: jobs == ["late"], 30.0)
    taker.fetcher.quiet()
    await running
    await taker.close()


@pytest.mark.promise("F05", "F21")
async def test_a_lowered_cursor_is_looked_at_again_soon_whatever_the_poll(dsn: str, eyes: Eyes) -> None:
    """Two transactions end one fetch apart: the second time a cursor falls no fetch is repeated at once, and the wake
    of that commit has been used up."""
    taker = Taker(dsn)
    taker.fetcher.watermark = Watermark(sweep_every=1e9)
    taker.state.settings = replace(taker.state.settings, poll=60.0)
    with psycopg.connect(dsn) as one, psycopg.connect(dsn) as two:
        one.execute("INSERT INTO pgqueue.job (task) VALUES ('one')")
        two.execute("INSERT INTO pgqueue.job (task) VALUES ('two')")
        put(eyes, "between")
        assert names(await taker.fetch()) == ["between"]
        one.commit()
        await taker.fetch()  # sees that `one` has ended: the cursor falls, a repetition is wanted
        two.commit()
        taker.fetcher.wake()
        jobs: list[str] = []
        taker.hands.deliver = lambda found: jobs.extend(job.task for job in found)
        running = asyncio.ensure_future(taker.fetcher.run())
        await until(lambda: sorted(jobs) == ["one", "two"], 30.0)
        taker.fetcher.quiet()
        await running
    await taker.close()


# Plan and cost -------------------------------------------------------------------------------------------------------


def nodes(plan: dict[str, Any]) -> list[dict[str, Any]]:
    return [plan, *(node for child in plan.get("Plans", []) for node in nodes(child))]


def shape(plan: dict[str, Any]) -> None:
    """The lanes sorted first and small; then a nested loop of index scans, with no sort of jobs above."""
    [picked] = [node for node in nodes(plan) if node.get("Subplan Name") == "CTE picked"]
    loop = next(node for node in nodes(picked) if node["Node Type"] == "Nested Loop")
    [scan] = [node for node in nodes(loop) if node.get("Index Name") == "job_available_plain"]
    assert scan["Node Type"] == "Index Scan"
    assert "pos >" in scan["Index Cond"] and "rank =" in scan["Index Cond"] and "queue" in scan["Index Cond"]
    assert [node["Node Type"] for node in nodes(picked) if "Sort" in node["Node Type"]] == []
    assert [node for node in nodes(plan) if node["Node Type"] == "Seq Scan" and node["Relation Name"] != "queue"] == []


@pytest.mark.promise("F07")
@pytest.mark.each_value
@pytest.mark.parametrize("depth", [0, 20_000])
@pytest.mark.parametrize("paused", [0, 1, 200])
async def test_the_plan_of_the_claim(
    depth: int, paused: int, taker: Taker, eyes: Eyes, conn: psycopg.Connection
) -> None:
    if depth:
        put(eyes, "x", number=depth)
    eyes.do("INSERT INTO pgqueue.queue (name, paused_at) SELECT 'p' || n, now() FROM generate_series(1, %s) n", paused)
    shape(explain(conn, taker))
    eyes.do("ANALYZE")
    shape(explain(conn, taker))
    eyes.do("DELETE FROM pgqueue.job_available")
    eyes.do("VACUUM ANALYZE pgqueue.job_available")
    shape(explain(conn, taker))


def paused_backlog(eyes: Eyes) -> None:
    put(eyes, "x", queue="q0", number=30_000)
    eyes.do("INSERT INTO pgqueue.queue (name, paused_at) VALUES ('q0', now())")


@pytest.mark.second
@pytest.mark.promise("F07")
async def test_the_claim_reads_no_more_for_a_deep_backlog(taker: Taker, eyes: Eyes, conn: psycopg.Connection) -> None:
    """Buffers, not seconds: they do not depend on what else this machine does."""
    shapes: dict[str, Callable[[], object]] = {
        "ready backlog": lambda: put(eyes, "x", number=30_000),
        "another queue": lambda: put(eyes, "x", queue="other", number=30_000),
        "paused queue": lambda: paused_backlog(eyes),
        "future jobs": lambda: eyes.do(
            "INSERT INTO pgqueue.job (state, task, run_at) "
            "SELECT 'scheduled', 'x', now() + interval '1 day' FROM generate_series(1, 30000)"
        ),
        "blocked on one key": lambda: eyes.do(
            "INSERT INTO pgqueue.job (state, task, key, lock_key) "
            "SELECT 'blocked', 'x', 'one', 'one' FROM generate_series(1, 30000)"
        ),
    }
    put(eyes, "x", number=1_000)
    eyes.do("VACUUM ANALYZE pgqueue.job_available")
    shallow = buffers(explain(conn, taker))
    for name, fill in shapes.items():
        fill()
        eyes.do("VACUUM ANALYZE pgqueue.job_available")
        deep = buffers(explain(conn, taker))
        assert deep <= 1.25 * shallow, f"{name}: {deep} buffers for 100 jobs, {shallow} before"


@contextmanager
def held_by(what: str, dsn: str) -> Iterator[None]:
    """Somebody's idle transaction."""
    with psycopg.connect(dsn) as held:
        if what == "a snapshot":
            held.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        else:
            held.execute("SELECT pg_current_xact_id()")
        held.execute("SELECT count(*) FROM pgqueue.job")
        yield


@pytest.mark.second
@pytest.mark.promise("E14", "F08")
@pytest.mark.parametrize("what", ["a snapshot", "an idle writer with an id"])
async def test_a_held_transaction_changes_nothing_in_what_a_claim_reads(
    what: str, dsn: str, taker: Taker, eyes: Eyes, conn: psycopg.Connection
) -> None:
    without, during, naive = await beside(held_by(what, dsn), taker, eyes, conn)
    print(f"buffers for 10 jobs: {without} before, {during} beside {what}, {naive} from the head of the index")
    assert naive > 3 * without, "the test does not show the effect it is about"
    assert during <= 1.1 * without


# What else claims go through ------------------------------------------------------------------------------------------


@pytest.mark.promise("F21")
async def test_a_wait_for_the_sessions_turn_does_not_count_as_the_cost_of_a_scan(dsn: str, eyes: Eyes) -> None:
    """Duties share the connection. A hundred times their time, and the sweep would be put off for minutes."""
    taker = Taker(dsn)
    taker.fetcher.watermark = Watermark(sweep_every=0.01)
    slow = Statement("SELECT pg_sleep(0.4)", {}, lambda rows: None)
    fetching = asyncio.ensure_future(taker.fetch())
    await asyncio.sleep(0)  # it connects, and has the turn
    began = monotonic()
    await asyncio.gather(fetching, taker.session.run(slow))
    assert monotonic() - began >= 0.4
    wanted = taker.fetcher.watermark.next_look(now := monotonic())
    assert wanted is not None and wanted - now < 0.4 * SWEEP_SHARE
    await taker.close()


@pytest.mark.promise("F06")
async def test_a_probe_on_a_new_connection_does_not_trust_what_the_old_one_had_seen(dsn: str, eyes: Eyes) -> None:
    """A server that crashed or failed over has forgotten the last claims, which are not durable: rows lie behind."""
    taker = Taker(dsn)
    taker.fetcher.watermark = Watermark(sweep_every=1e9)
    taker.state.settings = replace(taker.state.settings, poll=0.02)
    jobs: list[str] = []
    taker.hands.deliver = lambda found: jobs.extend(names(found))
    put(eyes, "x", number=3)
    running = asyncio.ensure_future(taker.fetcher.run())
    await until(lambda: len(jobs) == 3)
    fetches = taker.fetcher.fetches
    eyes.do("INSERT INTO pgqueue.job (task, pos) VALUES ('again', 1), ('again', 2)")
    eyes.terminate("pgqueue fetch")
    await until(lambda: jobs[3:] == ["again", "again"], 30.0)
    assert taker.fetcher.fetches > fetches
    taker.fetcher.quiet()
    await running
    await taker.close()


async def test_without_room_a_start_at_zero_that_is_due_is_no_reason_to_spin(
    dsn: str, eyes: Eyes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgqueue.worker.fetch.fetcher.SOON", 0.0)
    taker = Taker(dsn)
    asked = 0

    def shares() -> list[Room]:
        nonlocal asked
        asked += 1
        return [Room(("default",), taker.room)]

    taker.hands.to_fetch = shares
    taker.room = 0
    taker.fetcher.wake(zero=True)
    running = asyncio.ensure_future(taker.fetcher.run())
    await asyncio.wait([running], timeout=0.2)  # nothing happens in this time; what is counted is what happens anyhow
    assert asked <= 2
    taker.room = 1
    put(eyes, "x")
    taker.fetcher.slots_freed()
    await until(lambda: names(taker.jobs) == ["x"])
    taker.fetcher.quiet()
    await running
    await taker.close()


async def test_a_second_row_of_a_running_job_is_refused_and_harms_only_itself(
    taker: Taker, eyes: Eyes, caplog: pytest.LogCaptureFixture
) -> None:
    put(eyes, "first")
    [first] = await taker.fetch()
    put(eyes, "neighbour", number=2)
    eyes.do("INSERT INTO pgqueue.job (task, id, enqueued_at) SELECT 'double', id, enqueued_at FROM pgqueue.job_running")
    put(eyes, "neighbour", number=2)
    taken = await taker.fetch() or await taker.fetch()
    assert names(taken) == ["neighbour"] * 4
    assert eyes.all("SELECT id, task, state, reason FROM pgqueue.job_dead") == [
        (first.id, "double", "failed", "refused")
    ]
    assert eyes.all("SELECT id, task FROM pgqueue.job_running WHERE id = %s", first.id) == [(first.id, "first")]
    assert f"job {first.id} (double) had a second row" in caplog.text
    assert taker.doubts == 1  # for the connection is a new one


async def at_rest(taker: Taker) -> None:
    """Until it knows that nothing waits: the first fetch of each pool is of both kinds of jobs."""
    while any(taker.fetcher.hungry(share.queues) for share in taker.fetcher._capacity.to_fetch()):
        await taker.fetcher._step()


async def test_queues_take_turns_in_the_loop_too(dsn: str, eyes: Eyes) -> None:
    taker = Taker(dsn, ("a", "b"))
    taker.room = 1
    await at_rest(taker)
    for queue in ("a", "b"):
        put(eyes, queue, queue=queue, number=20)
    taker.fetcher.wake()
    taken: list[str] = []
    taker.hands.deliver = lambda found: taken.extend(names(found))
    for _ in range(12):
        await taker.fetcher._step()
    assert taken.count("a") == taken.count("b") == 6
    await taker.close()


async def test_pools_take_turns_too(dsn: str, eyes: Eyes) -> None:
    taker = Taker(dsn, ("a", "b", "c"))
    taker.hands.to_fetch = lambda: [Room(("a", "b"), 1), Room(("c",), 1)]
    await at_rest(taker)
    for queue in ("a", "b", "c"):
        put(eyes, queue, queue=queue, number=20)
    taker.fetcher.wake()
    taken: list[str] = []
    taker.hands.deliver = lambda found: taken.extend(names(found))
    for _ in range(12):
        await taker.fetcher._step()
    assert sorted(taken) == ["a"] * 3 + ["b"] * 3 + ["c"] * 6
    await taker.close()


# The first claim -----------------------------------------------------------------------------------------------------

PREPARED = "SELECT statement, parameter_types::text[] FROM pg_prepared_statements WHERE statement LIKE %(like)s"


async def prepared(taker: Taker) -> list[tuple[Any, ...]]:
    """The claims that the server knows on this connection, by the types of their parameters."""
    like = {"like": "%DELETE FROM pgqueue.job_available WHERE ctid%"}
    [found] = await taker.session.run(Statement(PREPARED, like, list))
    return sorted(found)


@pytest.mark.parametrize("head", [1, 100_000, 5_000_000_000])
async def test_a_warm_claim_takes_nothing_and_leaves_nothing_to_be_planned(taker: Taker, eyes: Eyes, head: int) -> None:
    """Not for the first claim, from zero, and not for the second, from the head: whatever integers they need."""
    eyes.do("SELECT setval('pgqueue.job_pos_seq', %s)", head)
    put(eyes, "waits", number=3)
    taker.room = 10
    await taker.fetcher.warm()
    assert eyes.all("SELECT count(*) FROM pgqueue.job_running") == [(0,)]
    known = await prepared(taker)
    assert known

    assert names(await taker.fetch(10)) == ["waits"] * 3
    put(eyes, "waits", number=2)
    assert names(await taker.fetch(10)) == ["waits"] * 2
    assert await prepared(taker) == known
