"""An idle worker that is told of one lane claims from it at once; no job is lost by that, and none waits longer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from time import monotonic
from typing import Any

import psycopg
import pytest
from claim_plans import buffers, put
from workers import Eyes, Taker, until, work

import pgqueue
from pgqueue.client.tasks import task
from pgqueue.database import statements
from pgqueue.database.statements import texts
from pgqueue.worker.fetch.glance import IN_A_ROW_MOST, REST_MOST, TOLD, Glances
from pgqueue.worker.run.slots import Room

LANE = ("default", 11, False)


@task(name="glance.plain")
async def plain(n: int = 0) -> None:
    pass


@task(name="glance.locked", lock="{n}")
async def locked(n: int) -> None:
    pass


@pytest.fixture
async def taker(dsn: str) -> AsyncIterator[Taker]:
    """A worker that knows that nothing waits."""
    made = Taker(dsn, tasks=["x", "y"])
    await at_rest(made)
    yield made
    await made.close()


async def at_rest(taker: Taker) -> None:
    while any(taker.fetcher.hungry(room.queues) for room in taker.fetcher._capacity.to_fetch()):
        await taker.fetcher._step()
    taker.jobs.clear()


async def told(taker: Taker, *, queue: str = "default", priority: int = 5) -> list[str]:
    """The tasks of the jobs that the next step brings, after the worker was told of this lane."""
    taker.jobs.clear()
    taker.fetcher.told(queue, 2 * priority + 1)
    await taker.fetcher._step()
    return [job.task for job in taker.jobs]


@pytest.mark.promise("F261")
@pytest.mark.parametrize("priority", [0, 5, 9])
async def test_one_statement_takes_the_job_and_nothing_else_is_asked(taker: Taker, eyes: Eyes, priority: int) -> None:
    before = taker.fetcher.fetches
    put(eyes, "x", priority=priority)
    assert await told(taker, priority=priority) == ["x"]
    assert taker.fetcher.fetches == before and not taker.fetcher.hungry(taker.queues)
    [job] = taker.jobs
    assert eyes.all("SELECT state, worker_id, claim, attempt FROM pgqueue.job") == [
        ("running", taker.worker_id, job.claim, 1)
    ]
    assert taker.state.claims.settled == job.claim


@pytest.mark.promise("F261")
async def test_it_takes_the_jobs_of_its_lane_in_order_and_asks_again_if_they_fill_the_room(
    taker: Taker, eyes: Eyes
) -> None:
    for n in range(3):
        eyes.do("INSERT INTO pgqueue.job (task, args) VALUES ('x', jsonb_build_object('n', %s::int))", n)
    put(eyes, "y", priority=7)
    taker.room = 2
    await told(taker)
    assert [job.args for job in taker.jobs] == ['{"n": 0}', '{"n": 1}']
    assert taker.fetcher.hungry(taker.queues)


@pytest.mark.promise("F261")
@pytest.mark.parametrize("first", [True, False], ids=["it was told of that job", "it was told of another one"])
async def test_a_job_below_the_cursor_is_found_at_once(taker: Taker, eyes: Eyes, dsn: str, first: bool) -> None:
    """Its transaction was open when the cursor went by."""
    with psycopg.connect(dsn) as early:
        early.execute("INSERT INTO pgqueue.job (task) VALUES ('x')")
        put(eyes, "y")
        taker.fetcher.wake()
        await at_rest(taker)  # takes y, which lies above
        assert taker.fetcher.watermark.cursors([LANE]) == [2]
        put(eyes, "y")
        assert await told(taker) == ["y"] and not taker.fetcher.hungry(taker.queues)
        if not first:
            put(eyes, "y")
    assert await told(taker) == ([] if first else ["y"])
    assert taker.fetcher.hungry(taker.queues)
    await at_rest_with(taker, ["x"])


def hungry(taker: Taker, _: Eyes) -> None:
    taker.fetcher.kinds.unknown()


def other_kind(taker: Taker, _: Eyes) -> None:
    taker.fetcher.kinds.keyed.known.clear()


def at_zero(taker: Taker, _: Eyes) -> None:
    taker.fetcher.watermark.start_at_zero()


def another_lane(taker: Taker, _: Eyes) -> None:
    taker.fetcher.told("default", 3)


def narrowed(taker: Taker, _: Eyes) -> None:
    taker.fetcher.kinds.plain.most = 1


def left_out(taker: Taker, _: Eyes) -> None:
    taker.fetcher.refused_rows._left.leave((LANE, 1), "a row", psycopg.errors.CheckViolation("x"), seconds=60)


def begun_anew(taker: Taker, _: Eyes) -> None:
    taker.fetcher._generation = -1


def another_group(taker: Taker, _: Eyes) -> None:
    taker.hands.to_fetch = lambda: [Room(taker.queues, 0), Room(("other",), 3)]
    taker.fetcher.kinds.plain.known.add("other")
    taker.fetcher.kinds.keyed.known.add("other")


def alone(taker: Taker, _: Eyes) -> None:
    taker.hands.to_fetch = lambda: [Room(taker.queues, 1, alone=True)]


@pytest.mark.promise("F261")
@pytest.mark.parametrize(
    "prepare",
    [hungry, other_kind, at_zero, another_lane, narrowed, left_out, begun_anew, another_group, alone],
    ids=lambda prepare: prepare.__name__,
)
async def test_where_anything_else_may_wait_it_is_a_wake(
    taker: Taker, eyes: Eyes, monkeypatch: pytest.MonkeyPatch, prepare: Callable[[Taker, Eyes], None]
) -> None:
    monkeypatch.setattr(taker.fetcher, "_glance", None)
    before = taker.fetcher.fetches
    prepare(taker, eyes)
    taker.fetcher.told("default", 11)
    await taker.fetcher._step()
    assert taker.fetcher.fetches > before
    if prepare is another_group:
        assert taker.fetcher.hungry(taker.queues)


@pytest.mark.promise("F261")
async def test_a_connection_that_was_made_anew_meanwhile_gets_a_fetch(taker: Taker, eyes: Eyes) -> None:
    put(eyes, "x")
    await taker.session.close()
    assert await told(taker) == []
    assert taker.fetcher.hungry(taker.queues) and taker.state.claims.settled > 0
    await taker.fetcher._step()
    assert [job.task for job in taker.jobs] == ["x"]


TRIGGER = """
    CREATE FUNCTION meet() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN {} RETURN NEW; END$$;
    CREATE TRIGGER meet BEFORE INSERT ON pgqueue.job_running FOR EACH ROW EXECUTE FUNCTION meet()
"""


async def at_rest_with(taker: Taker, wanted: list[str]) -> None:
    taker.jobs.clear()
    while taker.fetcher.hungry(taker.queues):
        await taker.fetcher._step()
    assert [job.task for job in taker.jobs] == wanted


@pytest.mark.promise("F262")
async def test_a_glance_whose_answer_is_lost_is_in_doubt(
    taker: Taker, eyes: Eyes, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = taker.session.run

    async def lost(*messages: Any, **how: Any) -> None:
        monkeypatch.undo()
        await run(*messages, **how)
        raise psycopg.OperationalError("the connection is lost")

    monkeypatch.setattr(taker.session, "run", lost)
    put(eyes, "x")
    with pytest.raises(psycopg.OperationalError):
        await told(taker)
    assert taker.doubts == 1 and not taker.fetcher.watermark.settled
    assert not taker.fetcher.watermark._taken
    assert taker.fetcher.asking == ((), 0)
    assert eyes.all("SELECT claim, state FROM pgqueue.job") == [(taker.state.claims.settled, "running")]


@pytest.mark.promise("F262")
async def test_a_glance_that_is_cancelled_is_in_doubt(taker: Taker, eyes: Eyes) -> None:
    eyes.do(TRIGGER.format("PERFORM pg_sleep(60);"))
    put(eyes, "x")
    glancing = asyncio.ensure_future(told(taker))
    await until(lambda: eyes.one("SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'PgSleep'"))
    glancing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await glancing
    assert taker.doubts == 1 and not taker.fetcher.watermark.settled
    assert taker.fetcher.asking == ((), 0) and taker.state.claims.settled > 0
    eyes.terminate("pgqueue fetch")
    eyes.do("DROP TRIGGER meet ON pgqueue.job_running")
    await at_rest_with(taker, ["x"])


@pytest.mark.promise("F262")
@pytest.mark.parametrize("raised", ["a constraint", "a timeout"])
async def test_a_row_that_the_server_refuses_is_left_to_the_fetch(taker: Taker, eyes: Eyes, raised: str) -> None:
    code = {"a constraint": "23514", "a timeout": "57014"}[raised]
    eyes.do(TRIGGER.format(f"RAISE EXCEPTION USING ERRCODE = '{code}';"))
    put(eyes, "x")
    assert await told(taker) == []
    assert taker.doubts == 0 and taker.fetcher.watermark.settled and taker.fetcher.hungry(taker.queues)


@pytest.mark.promise("F262")
async def test_a_second_row_of_a_running_job_is_left_to_the_fetch(taker: Taker, eyes: Eyes) -> None:
    put(eyes, "x")
    assert await told(taker) == ["x"]
    eyes.do("INSERT INTO pgqueue.job (task, id, enqueued_at) SELECT 'y', id, enqueued_at FROM pgqueue.job_running")
    assert await told(taker) == []
    await at_rest_with(taker, [])
    assert eyes.all("SELECT task, state, reason FROM pgqueue.job_dead") == [("y", "failed", "refused")]


FORBIDS = {
    "a paused queue": (
        "INSERT INTO pgqueue.queue (name, paused_at) VALUES ('default', now())", "DELETE FROM pgqueue.queue",
    ),
    "a paused task": (
        "INSERT INTO pgqueue.paused_task (name, paused_at) VALUES ('x', now())", "DELETE FROM pgqueue.paused_task",
    ),
    "a dead worker": ("UPDATE pgqueue.worker SET dead_at = now()", "UPDATE pgqueue.worker SET dead_at = NULL"),
}  # fmt: skip


@pytest.mark.promise("F262")
@pytest.mark.parametrize(("forbid", "allow"), FORBIDS.values(), ids=FORBIDS)
async def test_what_may_not_be_taken_stays_and_is_found_when_it_may(
    taker: Taker, eyes: Eyes, forbid: str, allow: str
) -> None:
    put(eyes, "x")
    eyes.do(forbid)
    assert await told(taker) == []
    assert eyes.states() == {"available": 1}
    eyes.do(allow)
    taker.fetcher.glances.rested()
    assert await told(taker) == ["x"]


@pytest.mark.promise("F262")
async def test_a_locked_row_is_found_by_the_next_poll_and_no_cursor_has_gone_by(
    taker: Taker, eyes: Eyes, dsn: str
) -> None:
    put(eyes, "x")
    with psycopg.connect(dsn) as other:
        other.execute("SELECT id FROM pgqueue.job_available FOR UPDATE")
        assert await told(taker) == []
        assert taker.fetcher.watermark.cursors([LANE]) == [0]
    await taker.fetcher._look(taker.fetcher._capacity.to_fetch())
    await at_rest_with(taker, ["x"])


# No look is put off --------------------------------------------------------------------------------------------------


@pytest.mark.promise("F261")
async def test_a_job_that_no_worker_was_told_of_is_found_beside_glances(dsn: str, eyes: Eyes) -> None:
    """A glance every 10 ms: each ends the wait in which the poll would have come."""
    taker = Taker(dsn, tasks=["x", "y"])
    taker.state.settings = replace(taker.state.settings, poll=0.1)
    await at_rest(taker)
    put(eyes, "y", priority=9)
    found: list[str] = []
    until_then = monotonic() + 10
    while "y" not in found:
        assert monotonic() < until_then
        put(eyes, "x")
        found += await told(taker)
        await asyncio.sleep(0.01)
    assert "x" in found
    await taker.close()


@pytest.mark.promise("F261")
def test_a_fetch_follows_when_one_is_due_and_after_many_glances() -> None:
    glances = Glances()
    glances.fetched(look_by=10.0)
    assert not glances.ended(1, 9.9, 0.001)
    assert glances.ended(1, 10.0, 0.001)
    glances.fetched(look_by=20.0)
    assert [glances.ended(1, 11.0, 0.001) for _ in range(IN_A_ROW_MOST)] == [False] * (IN_A_ROW_MOST - 1) + [True]


@pytest.mark.promise("F261")
def test_a_worker_that_found_nothing_rests_and_what_it_is_told_meanwhile_waits() -> None:
    glances = Glances()
    glances.fetched(look_by=10.0)
    assert glances.told(LANE, 1.0) == 0.0 and glances.due(1.0) == {LANE} and glances.due(1.0) == set()
    glances.ended(0, 1.0, 0.02)
    assert glances.told(LANE, 1.0) == pytest.approx(0.02)
    assert glances.told(LANE, 1.01) is None  # the timer runs
    assert glances.due(1.019) == set()
    glances.rested()  # a timer may be early
    assert glances.due(1.019) == {LANE}
    glances.ended(0, 2.0, 60.0)
    assert glances.told(LANE, 2.0) == pytest.approx(REST_MOST)
    glances.rested()
    assert glances.told(LANE, 2.0) == 0.0
    glances.ended(1, 2.0, 60.0)  # a winner does not rest
    assert glances.told(LANE, 2.0) == 0.0


@pytest.mark.promise("F263")
async def test_workers_that_lose_ask_together_as_often_as_one_would(dsn: str, eyes: Eyes) -> None:
    """Eight idle workers are told of 200 jobs, one after the other: not each asks for each."""
    takers = [Taker(dsn, tasks=["x"]) for _ in range(8)]
    for each in takers:
        each.state.other_workers = len(takers) - 1
        await at_rest(each)
    asked = 0
    for each in takers:
        glance = each.fetcher._glance

        async def counted(*args: Any, glance: Any = glance) -> None:
            nonlocal asked
            asked += 1
            await glance(*args)

        each.fetcher._glance = counted  # type: ignore[method-assign,assignment]
    running = [asyncio.ensure_future(each.fetcher.run()) for each in takers]
    for _ in range(200):
        put(eyes, "x")
        for each in takers:
            each.fetcher.told("default", 11)
        await asyncio.sleep(0)
    await until(lambda: sum(len(each.jobs) for each in takers) == 200)
    for each in takers:
        each.fetcher.quiet()
    await asyncio.gather(*running)
    assert asked < 300  # about 100; without the rest 500
    for each in takers:
        await each.close()


@pytest.mark.promise("F265")
async def test_what_a_worker_is_told_while_its_glance_loses_waits_for_the_rest_only(dsn: str, eyes: Eyes) -> None:
    """Naive is to call back for what is told during the rest only: the glance under way begins it."""
    taker = Taker(dsn, tasks=["x"])
    taker.state.settings = replace(taker.state.settings, poll=600.0)
    await at_rest(taker)
    running, ready = asyncio.ensure_future(taker.fetcher.run()), taker.session.ready

    async def meanwhile() -> int:
        taker.session.ready = ready  # type: ignore[method-assign]
        taker.fetcher.told("default", 11)
        return await ready()

    taker.fetcher.glances.fetched(monotonic() + 600)  # no fetch is due
    taker.session.ready = meanwhile  # type: ignore[method-assign]
    glanced = taker.fetcher.glances.ended

    def ended(*args: Any) -> bool:
        taker.fetcher.glances.ended = glanced  # type: ignore[method-assign]
        put(eyes, "x")  # the job that it was told of; this glance has not seen it
        return glanced(*args)

    taker.fetcher.glances.ended = ended  # type: ignore[method-assign,assignment]
    taker.fetcher.told("default", 11)  # of a job that another worker takes
    await until(lambda: taker.jobs)
    taker.fetcher.quiet()
    await running
    await taker.close()


@pytest.mark.promise("F265")
@pytest.mark.parametrize("what", ["a glance", "a fetch"])
async def test_what_a_worker_is_told_is_not_forgotten_if_it_cannot_connect(taker: Taker, eyes: Eyes, what: str) -> None:
    put(eyes, "x")
    ready = taker.session.ready

    async def refused() -> int:
        taker.session.ready = ready  # type: ignore[method-assign]
        raise psycopg.OperationalError("too many clients already")

    taker.session.ready = refused  # type: ignore[method-assign]
    taker.fetcher.told("default", 11) if what == "a glance" else taker.fetcher.wake()
    with pytest.raises(psycopg.OperationalError):
        await taker.fetcher._step()
    await at_rest_with(taker, ["x"])


# Foreign writers -----------------------------------------------------------------------------------------------------


@asynccontextmanager
async def foreign_writers(dsn: str) -> AsyncIterator[Callable[[], None]]:
    """Six connections that write elsewhere; what is called ends each one's transaction and begins another."""
    with ExitStack() as stack:
        writers = [stack.enter_context(psycopg.connect(dsn)) for _ in range(6)]

        def turn() -> None:
            for writer in writers:
                writer.commit()
                writer.execute("SELECT pg_current_xact_id()")

        turn()
        yield turn


@pytest.mark.promise("F256")
@pytest.mark.parametrize("how", ["a glance", "a wake"])
async def test_foreign_writers_cause_no_fetches(taker: Taker, eyes: Eyes, dsn: str, how: str) -> None:
    """Each id that ended caused one, and at each fetch there was one: 120 fetches."""
    async with foreign_writers(dsn) as turn:
        turn()
        taker.fetcher.wake()
        await at_rest(taker)
        before, found = taker.fetcher.fetches, 0
        for _ in range(60):
            turn()
            put(eyes, "x")
            if how == "a glance":
                taker.fetcher.told("default", 11)
                await taker.fetcher._step()
            else:
                taker.fetcher.wake()
            while taker.fetcher.hungry(taker.queues):
                await taker.fetcher._step()
            found += len(taker.jobs)
            taker.jobs.clear()
        assert found == 60
        fetches = taker.fetcher.fetches - before
        assert fetches == 60 if how == "a wake" else fetches <= 3


@pytest.mark.promise("F256")
async def test_beside_foreign_writers_a_job_of_another_position_is_found(taker: Taker, eyes: Eyes, dsn: str) -> None:
    """Its transaction was open when the cursor went by, and this worker has taken each position but that one."""
    async with foreign_writers(dsn) as turn:
        with psycopg.connect(dsn) as early:
            put(eyes, "y")
            early.execute("INSERT INTO pgqueue.job (task) VALUES ('x')")
            for _ in range(3):
                turn()
                put(eyes, "y")
                taker.fetcher.wake()
                await at_rest(taker)
        put(eyes, "y")
        assert await told(taker) == ["y"]
        await at_rest_with(taker, ["x"])


@pytest.mark.promise("F256")
@pytest.mark.parametrize(("number", "known"), [(1, 1), (49, 49), (50, 50), (51, 0), (500, 0)])
async def test_a_busy_worker_keeps_no_account(taker: Taker, eyes: Eyes, number: int, known: int) -> None:
    put(eyes, "x", number=number)
    taker.fetcher.wake()
    await at_rest(taker)
    assert len(taker.fetcher.watermark._taken) == known
    put(eyes, "x", number=number)
    await told(taker)
    assert len(taker.jobs) == number
    assert len(taker.fetcher.watermark._taken) == 2 * known


@pytest.mark.promise("F256")
async def test_a_row_that_was_blocked_for_its_key_is_not_accounted_for(taker: Taker, eyes: Eyes) -> None:
    """A claim does not say where it was. So where it was is looked at again, and nothing is assumed."""
    eyes.do("INSERT INTO pgqueue.job (task, lock_key) VALUES ('x', 'k'), ('x', 'k'), ('y', 'other')")
    positions = dict(eyes.all("SELECT id, pos FROM pgqueue.job"))
    taker.fetcher.keyed_claim.left = 1  # the claim locks keys ahead, as after one that met jobs with keys
    taker.fetcher.wake()
    while taker.fetcher.hungry(taker.queues):
        await taker.fetcher._step()
    jobs = [job.id for job in taker.jobs]
    assert len(jobs) == 2 and eyes.states() == {"running": 2, "blocked": 1}
    assert taker.fetcher.watermark._taken == {positions[job] for job in jobs}


# What is told --------------------------------------------------------------------------------------------------------


def test_only_the_ranks_of_plain_jobs_are_told() -> None:
    assert sorted(TOLD.values()) == list(range(1, 20, 2))
    assert all(str(rank) == payload for payload, rank in TOLD.items())


@pytest.mark.promise("F263")
@pytest.mark.parametrize("payload", ["²", "٣", " 11", "11.0", "-2", "10", "21", "1e1", "\x1b[2J", "9" * 7000])
async def test_a_made_up_payload_is_a_wake(dsn: str, eyes: Eyes, payload: str) -> None:
    async with work(dsn, plain, poll=600.0) as worker:
        await until(lambda: worker.services.election.entered and not worker.services.fetcher.hungry(["default"]))
        put(eyes, plain.name)
        eyes.all("SELECT pg_notify('pgqueue.default', %s)", payload)
        await until(eyes.done(1))
        assert worker.state.phase == "running"


@pytest.mark.promise("F263")
async def test_only_a_single_plain_job_names_its_lane(dsn: str, eyes: Eyes) -> None:
    with psycopg.connect(dsn, autocommit=True) as ears, psycopg.connect(dsn, autocommit=True) as conn:
        ears.execute('LISTEN "pgqueue.default"')

        def heard() -> list[str]:
            conn.execute("""SELECT pg_notify('pgqueue.default', 'end')""")
            return [note.payload for note in ears.notifies(timeout=10, stop_after=2)][:1]

        plain.enqueue(conn)
        assert heard() == ["11"]
        plain.using(priority=0).enqueue(conn)
        assert heard() == ["1"]
        plain.using(priority=9).enqueue(conn)
        assert heard() == ["19"]
        with conn.transaction():
            for _ in range(3):
                plain.enqueue(conn)
        assert heard() == ["11"]
        locked.enqueue(conn, 1)
        assert heard() == [""]
        plain.using(idempotency_key="k").enqueue(conn)
        assert heard() == [""]
        pgqueue.enqueue_many(conn, [plain.new(1), plain.new(2)])
        assert heard() == [""]
        conn.execute("SELECT pgqueue.enqueue('glance.plain', '{}')")
        assert heard() == [""]


# What it costs -------------------------------------------------------------------------------------------------------


@pytest.mark.promise("F263")
async def test_it_is_planned_before_the_first_job_and_reads_only_its_lane(taker: Taker, eyes: Eyes, dsn: str) -> None:
    known = "SELECT count(*) FROM pg_prepared_statements WHERE statement LIKE '%%FOR UPDATE SKIP LOCKED%%'"
    await taker.fetcher.warm()
    [[(before,)]] = await taker.session.run(statements.Statement(known, {}, list))
    put(eyes, "x")
    assert await told(taker) == ["x"]
    [[(after,)]] = await taker.session.run(statements.Statement(known, {}, list))
    assert after == before > 0

    put(eyes, "x", number=5_000, priority=7)
    put(eyes, "x", number=5_000, queue="other")
    put(eyes, "x")
    with psycopg.connect(dsn) as conn:
        conn.execute(statements.text("sessions_settings", "pgqueue"))
        params = {
            "queue": "default", "rank": 11, "after": 0, "tasks": texts(["x"]), "worker_id": taker.worker_id,
            "claim": 1, "n": 10,
        }  # fmt: skip
        glance = statements.text("fetch_glance", "pgqueue")
        [[plan]] = conn.execute(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {glance}", params)
        assert buffers(plan[0]["Plan"]) < 200
