"""Writing outcomes down: each into its place, by the fence, waiting for no stranger, losing nothing to the network."""

from __future__ import annotations

import asyncio
import logging
import re
import threading
from collections.abc import AsyncIterator, Sequence
from copy import copy
from datetime import UTC, datetime, timedelta
from time import monotonic
from typing import Any

import psycopg
import pytest
from completer_desk import Desk, desk_of
from psycopg.types.json import Jsonb
from workers import Eyes, until

from pgqueue.database import statements
from pgqueue.database.statements import Statement
from pgqueue.jobs.job import Job, NewJob
from pgqueue.jobs.keys import Keys
from pgqueue.jobs.outcomes import (
    COMPLETED,
    RELEASED,
    WRITTEN,
    Cancelled,
    Completed,
    Failed,
    Outcome,
    Problem,
    Released,
    Retried,
    interrupted,
)
from pgqueue.testing import Clock
from pgqueue.worker.complete import completer
from pgqueue.worker.complete.outcome_sql import UNLOCKED_LEAST, Ended
from pgqueue.worker.settings import BATCH_MOST, SHARED_BATCH_MOST

BROKEN = Problem("failed", "ValueError", "no", "Traceback …")
INTERRUPTED = interrupted("its worker stopped")
EVERY: list[Outcome] = [COMPLETED, Completed("1"), Retried(9, BROKEN), Failed("error", BROKEN), RELEASED, INTERRUPTED]


AFTER: NewJob[None] = NewJob("after", "{}", "default", 5, None, None, None, None)


@pytest.fixture
async def desk(dsn: str, eyes: Eyes) -> AsyncIterator[Desk]:
    async with desk_of(dsn, eyes) as made:
        yield made


async def test_every_outcome_has_its_place(desk: Desk, eyes: Eyes) -> None:
    outcomes: list[Outcome] = [
        COMPLETED,
        Completed('{"a": 1}'),
        Retried(40.0, BROKEN),
        Retried(80.0, Problem("unknown", None, "no task"), spent=False),
        Failed("error", BROKEN),
        RELEASED,
        Cancelled("no longer wanted"),
    ]
    jobs = await desk.end(*outcomes)
    found = {
        row[0]: row[1:]
        for row in eyes.all(
            "SELECT id, state, attempt, result, reason, "
            "20 * round(extract(epoch FROM run_at - pgqueue.now()) / 20)::int, "
            "rank, finished_at IS NOT NULL, worker_id, version_tag FROM pgqueue.job"
        )
    }
    me = desk.taker.worker_id
    assert [found[job.id] for job in jobs] == [
        ("completed", 1, None, None, None, 11, True, me, "v1"),
        ("completed", 1, {"a": 1}, None, None, 11, True, me, "v1"),
        ("scheduled", 1, None, "no", 40, 11, False, None, None),
        ("scheduled", 0, None, "no task", 80, 11, False, None, None),
        ("failed", 1, None, "error", None, 11, True, me, "v1"),
        ("available", 0, None, None, None, 10, False, None, None),
        ("cancelled", 1, None, "no longer wanted", None, 11, True, me, "v1"),
    ]
    attempts = eyes.all(
        "SELECT job_id, attempt, outcome, error_type, message, traceback, worker_id FROM pgqueue.attempt"
    )
    assert sorted(attempts) == [
        (jobs[2].id, 1, "failed", "ValueError", "no", "Traceback …", me),
        (jobs[3].id, 1, "unknown", None, "no task", None, me),
        (jobs[4].id, 1, "failed", "ValueError", "no", "Traceback …", me),
        (jobs[6].id, 1, "cancelled", None, "no longer wanted", None, me),
    ]
    assert sorted(desk.written) == [job.id for job in jobs]
    assert desk.completer.fenced == 0


async def test_a_row_keeps_what_it_carries_on_every_way(desk: Desk, eyes: Eyes) -> None:
    """A column forgotten in a move would be lost silently."""
    carried = {
        "queue": "default", "priority": 3, "rank": 7, "task": "carries", "args": {"a": [1]}, "headers": {"h": "v"},
        "max_attempts": 7, "crashes": 0, "snoozes": 2, "lock_key": "l", "limit_key": "m", "unique_key": "u",
        "idempotency_key": "i",
    }  # fmt: skip
    names = ", ".join(carried)
    insert = "INSERT INTO pgqueue.job ({}, deadline, enqueued_at, holds) VALUES ({}, 'tomorrow', 'today', true)"
    select = "SELECT {}, deadline::date - enqueued_at::date FROM pgqueue.job WHERE state <> 'running'"
    outcomes = EVERY
    for outcome in outcomes:
        eyes.do("TRUNCATE pgqueue.job")
        given = [Jsonb(value) if isinstance(value, dict) else value for value in carried.values()]
        eyes.do(insert.format(names, ", ".join(["%s"] * len(carried))), *given)
        desk.taker.fetcher.wake(zero=True)
        [job] = await desk.taker.fetch()
        assert job.headers == {"h": "v"} and job.priority == 3 and job.snoozes == 2
        desk.completer.finish(job, outcome)
        await asyncio.wait_for(desk.completer.flushed(), 30)
        [row] = eyes.all(select.format(names))
        back = isinstance(outcome, Released)
        kept = carried | {"rank": 6} if back else carried  # the front
        kept = kept if back else kept | {"rank": row[2]}  # elsewhere a lane means nothing
        assert row == (*kept.values(), 1), outcome


@pytest.mark.promise("F23")
@pytest.mark.parametrize("outcome", EVERY)
async def test_a_stranger_who_locks_a_row_delays_that_row_only(
    outcome: Outcome, desk: Desk, conn: psycopg.Connection, eyes: Eyes
) -> None:
    locked, *others = await desk.jobs(3)
    conn.execute("SELECT FROM pgqueue.job WHERE id = %s FOR UPDATE", [locked.id])
    desk.completer.finish(locked, outcome)
    await until(lambda: desk.messages >= 2)  # tried to end it, and looked why it could not
    for job in others:
        desk.completer.finish(job, outcome)
    await until(lambda: set(desk.written) == {job.id for job in others}, 30.0)
    assert eyes.state(locked.id) == "running"
    assert desk.completer.fenced == 0
    conn.rollback()
    await asyncio.wait_for(desk.completer.flushed(), 30.0)
    assert eyes.state(locked.id) != "running"


@pytest.mark.promise("F23")
async def test_what_one_part_of_a_flush_could_not_end_is_not_forgotten_for_what_the_next_could_not(
    desk: Desk, conn: psycopg.Connection, eyes: Eyes
) -> None:
    jobs = await desk.jobs(6)
    conn.execute("SELECT FROM pgqueue.job WHERE id = ANY (%s) FOR UPDATE", [[jobs[0].id, jobs[3].id]])
    desk.completer._most = 2  # as after an outcome that could not be stored: one flush goes in parts
    for job in jobs:
        desk.completer.finish(job, COMPLETED)
    await until(lambda: len(desk.written) == 4, 30.0)
    conn.rollback()
    await asyncio.wait_for(desk.completer.flushed(), 30.0)
    assert {eyes.state(job.id) for job in jobs} == {"completed"}


def noted(desk: Desk) -> list[tuple[str, str]]:
    """From now on: by which statement each flush ended plain jobs, and what came of it."""
    run, found = desk.session.run, list[tuple[str, str]]()
    plain = {statements.text(name, "pgqueue"): name for name in ("complete_plain", "complete_plain_unlocked")}

    async def noting(*messages: Any, **options: Any) -> list[Any]:
        name = next((plain[message.sql] for message in messages if message.sql in plain), None)
        try:
            answers = await run(*messages, **options)
        except psycopg.Error as error:
            found.append((name or "", type(error).__name__))
            raise
        if name:
            found.append((name, "ended"))
        return answers

    desk.session.run = noting  # type: ignore[method-assign]
    return found


@pytest.mark.promise("F23")
async def test_many_jobs_are_ended_without_locks_until_a_lock_is_met_and_then_again(
    desk: Desk, conn: psycopg.Connection, eyes: Eyes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One flush finds out. As long as the lock is there, and a moment longer, no other flush waits for it."""
    monkeypatch.setattr(completer, "CAREFUL_SECONDS", 0.5)
    flushes = noted(desk)
    await desk.end(*[COMPLETED] * (UNLOCKED_LEAST - 1))
    await desk.end(*[COMPLETED] * UNLOCKED_LEAST)
    assert flushes == [("complete_plain", "ended"), ("complete_plain_unlocked", "ended")]
    flushes.clear()
    locked, *others = await desk.jobs(3 * UNLOCKED_LEAST)
    conn.execute("SELECT FROM pgqueue.job WHERE id = %s FOR UPDATE", [locked.id])
    for job in (locked, *others[:UNLOCKED_LEAST]):
        desk.completer.finish(job, COMPLETED)
    await until(lambda: desk.completer._locked)
    assert flushes[:2] == [("complete_plain_unlocked", "LockNotAvailable"), ("complete_plain", "ended")]
    await asyncio.sleep(0.6)  # longer than it is careful after it has met a lock
    for job in others[UNLOCKED_LEAST:]:
        desk.completer.finish(job, COMPLETED)
    await until(lambda: {job.id for job in others} <= set(desk.written))
    assert eyes.state(locked.id) == "running"
    conn.rollback()
    await asyncio.wait_for(desk.completer.flushed(), 30)
    assert {flush for flush in flushes[1:]} == {("complete_plain", "ended")}
    await asyncio.sleep(0.6)
    await desk.end(*[COMPLETED] * UNLOCKED_LEAST)
    assert flushes[-1] == ("complete_plain_unlocked", "ended")
    assert desk.completer.fenced == 0
    assert {state for (state,) in eyes.all("SELECT state FROM pgqueue.job")} == {"completed"}
    assert len(desk.written) == len(set(desk.written))


@pytest.mark.promise("F01", "F23", "L15")
@pytest.mark.parametrize("given_away", [False, True])
async def test_a_flush_that_met_a_lock_ends_whatever_else_was_in_it_once(
    desk: Desk, conn: psycopg.Connection, eyes: Eyes, given_away: bool
) -> None:
    """Its first try is undone as a whole, with what its other statements have done."""
    jobs = await desk.jobs(UNLOCKED_LEAST + 5)
    outcomes: list[Outcome] = [Completed(None, (AFTER,)), Completed("1"), Retried(9, BROKEN), Failed("error", BROKEN)]
    outcomes += [COMPLETED] * (len(jobs) - 4)
    conn.execute("DELETE FROM pgqueue.job_running WHERE id = %s", [jobs[-1].id])
    flushes = noted(desk)
    for job, outcome in zip(jobs, outcomes, strict=True):
        desk.completer.finish(job, outcome)
    await until(lambda: len(desk.written) == len(jobs) - 1)
    assert flushes[0] == ("complete_plain_unlocked", "LockNotAvailable")
    (conn.commit if given_away else conn.rollback)()
    await asyncio.wait_for(desk.completer.flushed(), 30)
    assert desk.completer.fenced == given_away
    done = len(jobs) - 2 - given_away
    assert eyes.states() == {"completed": done, "scheduled": 1, "failed": 1, "available": 1}
    assert eyes.one("SELECT count(*) FROM pgqueue.attempt") == 2
    assert sorted(desk.written) == [job.id for job in jobs]


async def test_a_lock_that_stays_in_the_way_whatever_is_tried_is_waited_out(
    desk: Desk, eyes: Eyes, caplog: pytest.LogCaptureFixture
) -> None:
    """A table is locked, say. The first try is followed by another at once, each other one by a pause."""
    jobs = await desk.jobs(UNLOCKED_LEAST)
    run, tried = desk.session.run, list[str]()

    async def refused(*messages: Any, **options: Any) -> list[Any]:
        tried.append(messages[0].sql)
        if len(tried) <= 3:
            raise psycopg.errors.LockNotAvailable("canceling statement due to lock timeout")
        return await run(*messages, **options)

    desk.session.run = refused  # type: ignore[method-assign]
    for job in jobs:
        desk.completer.finish(job, COMPLETED)
    await asyncio.wait_for(desk.completer.flushed(), 30)
    names = ("complete_plain_unlocked", *["complete_plain"] * 3)
    assert tried == [statements.text(name, "pgqueue") for name in names]
    assert caplog.text.count("trying again in") == 2
    assert eyes.states() == {"completed": len(jobs)}
    assert desk.completer.fenced == 0


@pytest.mark.promise("F01")
async def test_the_outcome_of_a_job_that_was_given_away_is_dropped_and_counted(
    desk: Desk, eyes: Eyes, caplog: pytest.LogCaptureFixture
) -> None:
    given_away, kept = await desk.jobs(2)
    eyes.do("DELETE FROM pgqueue.job_running WHERE id = %s", given_away.id)
    eyes.do(
        "INSERT INTO pgqueue.job (state, id, task, worker_id, claim, started_at) "
        "VALUES ('running', %s, 'x', %s, 77, now())",
        given_away.id,
        desk.taker.worker_id,  # even by ourselves: another claim is another run
    )
    with caplog.at_level(logging.WARNING):
        desk.completer.finish(given_away, Completed("1"))
        desk.completer.finish(kept, Completed("2"))
        await asyncio.wait_for(desk.completer.flushed(), 30)
    assert desk.completer.fenced == 1
    assert f"job {given_away.id}" in caplog.text
    assert eyes.states() == {"running": 1, "completed": 1}


@pytest.mark.promise("T01", "L15")
@pytest.mark.parametrize(
    "outcome",
    [*EVERY, Completed(None, (AFTER,)), Completed("1", (AFTER, AFTER))],
)
async def test_two_runs_of_a_job_in_one_flush_end_it_once_and_leave_the_successors_of_one(
    desk: Desk, eyes: Eyes, outcome: Outcome
) -> None:
    """Taken for dead, a worker may be given its own job again: only the second run is fenced in and has followers."""
    [first] = await desk.jobs(1)
    running = "FROM pgqueue.job_running WHERE id = %s"
    columns = "id, task, worker_id, started_at, attempt"
    eyes.do(
        f"WITH gone AS (DELETE {running} RETURNING {columns}) "  # noqa: S608
        f"INSERT INTO pgqueue.job_running (state, claim, {columns}) SELECT 'running', %s, {columns} FROM gone",
        first.id,
        first.claim + 1,
    )
    second = copy(first)
    second.claim = first.claim + 1
    for run in (first, second):
        desk.completer.finish(run, outcome)
    await asyncio.wait_for(desk.completer.flushed(), 30)
    assert desk.completer.fenced == (0 if isinstance(outcome, Released) else 1)
    followers = [new.task for new in getattr(outcome, "successors", ())]
    assert eyes.all("SELECT task FROM pgqueue.job WHERE id <> %s ORDER BY id", first.id) == [(f,) for f in followers]
    assert eyes.one("SELECT count(*) FROM pgqueue.job WHERE id = %s", first.id) == 1
    assert eyes.one("SELECT count(*) FROM pgqueue.attempt") <= 1


async def cut(desk: Desk, *, before_commit: bool, another_id: bool = False) -> None:
    """From now on the next flush loses its connection: before anything was done, or only the answer."""
    real = desk.session.run

    async def broken(*messages: Any, **options: Any) -> list[Any]:
        desk.session.run = real  # type: ignore[method-assign]
        if not before_commit:
            await real(*messages, **options)
        desk.taker.worker_id += another_id
        raise psycopg.OperationalError("the connection was lost")

    desk.session.run = broken  # type: ignore[method-assign]


@pytest.mark.promise("F01", "F06")
@pytest.mark.parametrize("taken_for_dead", [False, True])
async def test_an_answer_that_was_lost_after_the_commit_is_no_fence(
    taken_for_dead: bool, desk: Desk, eyes: Eyes
) -> None:
    """Nor if we were taken for dead meanwhile: what we ended under our last id is nobody else's."""
    outcomes = EVERY
    jobs = await desk.jobs(len(outcomes))
    counted: list[Ended] = []
    desk.completer.counted = counted.extend
    await cut(desk, before_commit=False, another_id=taken_for_dead)
    for job, outcome in zip(jobs, outcomes, strict=True):
        desk.completer.finish(job, outcome)
    await asyncio.wait_for(desk.completer.flushed(), 30)
    assert desk.completer.fenced == 0
    assert sorted(desk.written) == [job.id for job in jobs]
    assert eyes.states() == {"completed": 2, "scheduled": 1, "failed": 1, "available": 2}
    ended = {job.id: outcome for job, outcome in zip(jobs, outcomes, strict=True) if outcome is not RELEASED}
    assert {job.id: outcome for job, outcome in counted} == ended and len(counted) == len(ended)


@pytest.mark.promise("F06")
def _after(args: str, key: str | None = None) -> NewJob[None]:
    return NewJob("after", args, "default", 5, None, None, None, None, keys=None if key is None else Keys(key))


HUGE = '{"n": 1e999999}'  # JSON, but no jsonb
UNSTORABLE: dict[str, Outcome] = {
    "number": Completed(HUGE),
    "depth": Completed("[" * 20_000 + "]" * 20_000),
    "no JSON": Completed("{"),
    "surrogate": Completed('"\ud800"'),
    "successor": Completed(None, (_after(HUGE),)),
    "successor with a key": Completed(None, (_after(HUGE, "k"),)),
    "reason": Cancelled("\x00"),
    "message": Retried(5, Problem("failed", "\x00")),
}


@pytest.mark.each_value
@pytest.mark.parametrize("name", UNSTORABLE)
@pytest.mark.parametrize("place", [0, 17, 39])
async def test_an_outcome_that_cannot_be_stored_harms_its_own_job_only(
    desk: Desk, eyes: Eyes, name: str, place: int
) -> None:
    outcomes: list[Outcome] = [[COMPLETED, Completed("1"), Completed(None, (AFTER,))][n % 3] for n in range(40)]
    outcomes[place] = UNSTORABLE[name]
    jobs = await desk.end(*outcomes)
    others = [job.id for job in jobs if job is not jobs[place]]
    assert eyes.one("SELECT count(*) FROM pgqueue.job WHERE state = 'completed' AND id = ANY (%s)", others) == 39
    assert eyes.one("SELECT count(*) FROM pgqueue.job_available WHERE task = 'after'") == sum(
        len(getattr(outcome, "successors", ())) for n, outcome in enumerate(outcomes) if n != place
    )
    asked = "SELECT error_type, message FROM pgqueue.attempt WHERE job_id = %s"
    [(error_type, message)] = eyes.all(asked, jobs[place].id)
    assert (error_type, message[:30]) == ("Unstorable", "its outcome cannot be stored: ")
    assert eyes.state(jobs[place].id) == ("scheduled" if name == "message" else "failed")
    assert sorted(desk.written) == sorted(job.id for job in jobs)
    assert desk.completer.fenced == 0
    await desk.end(COMPLETED)  # it goes on


# What a trigger of the application does when a job ends, though its outcome is right.
NOT_ABOUT_THE_ROW = {
    "a limit of the server": "RAISE EXCEPTION 'no more transaction ids' USING ERRCODE = '54000'",
    "a data error of a trigger": "PERFORM 1 / 0",
    "a constraint of another table": "INSERT INTO public.only VALUES (-1)",
    "a unique key of another table": "INSERT INTO public.only VALUES (1)",
}
REFUSES = """
    CREATE TABLE public.only (one int UNIQUE CHECK (one > 0));
    INSERT INTO public.only VALUES (1);
    CREATE FUNCTION public.refuses() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {0}; RETURN NULL; END $$;
    CREATE TRIGGER refuses AFTER INSERT ON pgqueue.job_done FOR EACH ROW EXECUTE FUNCTION public.refuses();
    CREATE TRIGGER refuses AFTER INSERT ON pgqueue.job_scheduled FOR EACH ROW EXECUTE FUNCTION public.refuses();
"""
# It locks no table. To drop triggers of several tables takes their locks one by one: with a flush that is a deadlock.
REFUSES_NO_MORE = """
    CREATE OR REPLACE FUNCTION public.refuses() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'
"""


@pytest.mark.promise("F28")
@pytest.mark.parametrize("name", NOT_ABOUT_THE_ROW)
async def test_an_error_that_is_not_about_the_outcome_fails_no_job(
    desk: Desk, eyes: Eyes, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its SQLSTATE alone does not tell: a text that is too long, or a number that jsonb lacks, has the same."""
    outcomes: list[Outcome] = [COMPLETED, Completed("1"), Completed(None, (AFTER,)), Retried(0.1, BROKEN)]
    jobs = await desk.jobs(len(outcomes))
    eyes.do(REFUSES.format(NOT_ABOUT_THE_ROW[name]))
    for job, outcome in zip(jobs, outcomes, strict=True):
        desk.completer.finish(job, outcome)
    await until(lambda: "cannot end" in caplog.text)
    await asyncio.sleep(0.3)  # so long it goes on to try
    assert eyes.states() == {"running": 4}
    eyes.do(REFUSES_NO_MORE)
    await asyncio.wait_for(desk.completer.flushed(), 30)
    assert eyes.states() == {"completed": 3, "available": 1, "scheduled": 1}
    assert eyes.all("SELECT DISTINCT error_type FROM pgqueue.attempt") == [(BROKEN.error_type,)]
    assert caplog.text.count("cannot end") == 1


@pytest.mark.promise("F45")
async def test_of_many_that_a_trigger_refuses_few_are_tried_at_once(
    desk: Desk, eyes: Eyes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each try costs a connection, and all other outcomes wait for it."""
    monkeypatch.setattr(completer, "BUSY_PAUSE", 0.05)
    monkeypatch.setattr(completer, "TRAPPED_PAUSE", 0.05)
    jobs = await desk.jobs(24)
    eyes.do(REFUSES.format("RAISE EXCEPTION 'no'"))
    tried: list[int] = []
    again = desk.completer._end_trapped

    async def end_trapped(trapped: list[Ended]) -> None:
        tried.append(desk.completer._tries)
        await again(trapped)

    monkeypatch.setattr(desk.completer, "_end_trapped", end_trapped)
    for job in jobs:
        desk.completer.finish(job, COMPLETED)
    await until(lambda: tried.count(0) >= 10)
    few = completer.TRAPPED_MOST
    assert max(tried) == few and len(tried) <= (few + 1) * (tried.count(0) + 1)
    eyes.do(REFUSES_NO_MORE)
    await asyncio.wait_for(desk.completer.flushed(), 30)
    assert eyes.states() == {"completed": 24}


@pytest.mark.promise("F45")
async def test_a_leaf_that_is_not_there_is_asked_for_now_and_then(desk: Desk, eyes: Eyes) -> None:
    """No row of `ring` is missing, so there is nothing to put back: at once the same would only be met again."""
    [job] = await desk.jobs(1)
    eyes.do("ALTER TABLE pgqueue.ring DROP CONSTRAINT ring_has_these_leaves")
    eyes.do("UPDATE pgqueue.ring SET leaves = 100, bin = 99 WHERE kind = 'done'")
    tries, end = 0, desk.completer._end

    async def counted(batch: list[Ended], rest: list[Ended]) -> bool:
        nonlocal tries
        tries += 1
        return await end(batch, rest)

    desk.completer._end = counted  # type: ignore[method-assign]
    desk.completer.finish(job, COMPLETED)
    await until(lambda: tries >= 3)
    began, before = monotonic(), tries
    await asyncio.sleep(1.0)  # the time is what is measured
    assert tries - before <= 10 * (monotonic() - began)
    eyes.do("UPDATE pgqueue.ring SET leaves = 8, bin = 0 WHERE kind = 'done'")
    await asyncio.wait_for(desk.completer.flushed(), 30)
    assert eyes.states() == {"completed": 1}


@pytest.mark.parametrize("chained", [False, True])
async def test_a_missing_right_ends_the_completer_with_or_without_a_chain(desk: Desk, chained: bool) -> None:
    """It is not sent again without the removal of unique keys: there was none."""
    [job] = await desk.jobs(1)
    desk.completer._goes_on = lambda job: chained

    async def refused(*messages: Any, **options: Any) -> list[Any]:
        raise psycopg.errors.InsufficientPrivilege("permission denied for table job_running")

    desk.session.run = refused  # type: ignore[method-assign]
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        await desk.completer._end([(job, COMPLETED)], [])


async def test_a_flush_that_takes_too_long_is_tried_with_less(desk: Desk, eyes: Eyes) -> None:
    """Else the same one would be tried for ever."""
    run, sizes = desk.session.run, []

    async def slow(*messages: Any, **options: Any) -> list[Any]:
        if "ids" in messages[0].params:
            sizes.append(len(messages[0].params["ids"].strip("{}").split(",")))
            if sizes[-1] > 10:
                raise psycopg.errors.QueryCanceled("canceling statement due to statement timeout")
        return await run(*messages, **options)

    desk.session.run = slow  # type: ignore[method-assign]
    await desk.end(*[COMPLETED] * 40)
    assert sizes[:3] == [40, 20, 10]
    assert eyes.states() == {"completed": 40}


async def test_nothing_is_dropped_while_the_database_is_away(desk: Desk, eyes: Eyes) -> None:
    jobs = await desk.jobs(3)
    await cut(desk, before_commit=True)
    for job in jobs:
        desk.completer.finish(job, COMPLETED)
    await asyncio.wait_for(desk.completer.flushed(), 30)
    assert eyes.states() == {"completed": 3}
    assert desk.completer.fenced == 0


@pytest.mark.promise("F01")
async def test_a_job_given_away_while_its_completion_was_cut_off_is_counted_too(desk: Desk, eyes: Eyes) -> None:
    """So it is with a stopped process: its sessions were ended, and the first flush only finds that out."""
    outcomes: list[Outcome] = [COMPLETED, Completed("1"), Retried(9, BROKEN), Failed("error", BROKEN)]
    for outcome in outcomes:
        [job] = await desk.jobs(1)
        fenced = desk.completer.fenced
        eyes.do("DELETE FROM pgqueue.job_running WHERE id = %s", job.id)
        await cut(desk, before_commit=True)
        desk.completer.finish(job, outcome)
        await asyncio.wait_for(desk.completer.flushed(), 30)
        assert desk.completer.fenced == fenced + 1, outcome


async def test_outcomes_come_from_threads_and_the_loop_at_once_and_in_large_batches(desk: Desk, eyes: Eyes) -> None:
    jobs = await desk.jobs(2 * BATCH_MOST + 500)
    half = len(jobs) // 2

    def from_thread() -> None:
        for job in jobs[:half]:
            desk.completer.finish(job, COMPLETED)

    thread = threading.Thread(target=from_thread)
    thread.start()
    for job in jobs[half:]:
        desk.completer.finish(job, COMPLETED)
    await asyncio.to_thread(thread.join)
    await asyncio.wait_for(desk.completer.flushed(), 30)
    assert sorted(desk.written) == [job.id for job in jobs]
    assert eyes.states() == {"completed": len(jobs)}


@pytest.mark.promise("F499")
async def test_a_completer_whose_loop_is_shared_sends_less_at_once(desk: Desk) -> None:
    """What is written with one message is also made and noted in one step of the loop."""
    desk.taker.state.share_loop()
    jobs, messages = await desk.jobs(10 * SHARED_BATCH_MOST), desk.messages
    for job in jobs:
        desk.completer.finish(job, COMPLETED)
    await asyncio.wait_for(desk.completer.flushed(), 30)
    assert sorted(desk.written) == [job.id for job in jobs]
    assert desk.messages - messages >= 10


async def test_a_single_outcome_from_a_thread_wakes_the_completer(desk: Desk) -> None:
    """The signal is one per batch; one that is lost would be a job that is never written."""
    for job in await desk.jobs(50):
        await asyncio.to_thread(desk.completer.finish, job, COMPLETED)
        await asyncio.wait_for(desk.completer.flushed(), 30)


async def written_ones(desk: Desk, number: int) -> list[Job]:
    """Jobs that were completed in transactions of their own; this completer has just heard of such a one."""
    first, *jobs = await desk.jobs(number + 1)
    for job in (first, *jobs):
        job.ended = COMPLETED
    desk.completer.finish(first, WRITTEN)
    await until(lambda: desk.written == [first.id], 5)
    desk.written.clear()
    return jobs


async def test_jobs_that_are_written_already_and_let_nobody_in_are_told_together(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each by itself would wake the loop: with ten threads that took a tenth of all CPU."""
    monkeypatch.setattr(completer, "CALM_SECONDS", 3_600)
    told: list[int] = []

    def written(jobs: Sequence[Job]) -> None:
        told.append(len(jobs))
        desk._written(jobs)

    monkeypatch.setattr(desk.completer, "_written", written)
    *jobs, last = await written_ones(desk, 31)
    for job in jobs:
        await asyncio.to_thread(desk.completer.finish, job, WRITTEN)
    assert told == [1]
    desk.completer.finish(last, COMPLETED)
    await asyncio.wait_for(desk.completer.flushed(), 5)
    assert told == [1, 31]
    assert desk.messages == 1


async def test_what_nobody_waits_for_is_told_soon_and_who_comes_after_that_wakes_the_loop(desk: Desk) -> None:
    for job in await written_ones(desk, 3):
        await asyncio.to_thread(desk.completer.finish, job, WRITTEN)
        await asyncio.wait_for(desk.completer.flushed(), 5)
        await until(lambda: not desk.completer._calm, 5)
    assert desk.messages == 0


@pytest.mark.parametrize("who", ["completed", "lock", "unique", "limit", "rate", "suspect"])
async def test_whom_somebody_waits_for_is_told_at_once(
    who: str, desk: Desk, eyes: Eyes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flush, the next in line, a suspect that must come alone: none of them waits for the next look."""
    monkeypatch.setattr(completer, "CALM_SECONDS", 3_600)
    calm, job = await written_ones(desk, 2)
    desk.completer.finish(calm, WRITTEN)
    place = {"lock": 15, "unique": 16, "limit": 17, "rate": 18}.get(who)
    if place is not None:
        row = list(job._row)
        row[place] = '["u", null]' if who == "unique" else "k"
        job._row = tuple(row)
    job.crashes = int(who == "suspect")
    await asyncio.to_thread(desk.completer.finish, job, COMPLETED if who == "completed" else WRITTEN)
    await asyncio.wait_for(desk.completer.flushed(), 5)
    assert desk.written == [calm.id, job.id]


async def test_what_is_given_back_wakes_other_workers(desk: Desk, dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as listening:
        listening.execute('LISTEN "pgqueue.default"')
        listening.execute('LISTEN "pgqueue.:scheduled"')
        await desk.end(RELEASED, Retried(5, BROKEN))
        heard = {note.channel for note in listening.notifies(timeout=30, stop_after=2)}
    assert heard == {"pgqueue.default", "pgqueue.:scheduled"}


@pytest.mark.promise("F09")
async def test_an_idle_completer_closes_its_connection_and_opens_it_again_for_the_next_outcome(
    desk: Desk, eyes: Eyes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(completer, "IDLE_SECONDS", 0.05)
    for generation in (1, 2, 3):
        await desk.end(COMPLETED)
        assert desk.session.generation == generation
        await until(lambda: desk.session.identity is None and not eyes.backends("pgqueue complete"))
    assert eyes.states() == {"completed": 3}


async def test_an_idle_completer_does_not_cut_off_who_uses_its_connection_too(
    desk: Desk, eyes: Eyes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An abort is noted over the same session: cut off, it would count as a failed attempt."""
    monkeypatch.setattr(completer, "IDLE_SECONDS", 0.3)
    await desk.end(COMPLETED)
    assert await desk.session.run(Statement("SELECT pg_sleep(1)", {}, list))
    await until(lambda: not eyes.backends("pgqueue complete"))


async def test_an_outcome_that_comes_while_the_connection_is_closed_is_written(
    desk: Desk, eyes: Eyes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(completer, "IDLE_SECONDS", 0.02)
    await desk.end(COMPLETED)
    [job] = await desk.jobs(1)
    rest = desk.session.rest

    async def meanwhile() -> None:
        desk.session.rest = rest  # type: ignore[method-assign]
        desk.completer.finish(job, COMPLETED)
        await rest()

    desk.session.rest = meanwhile  # type: ignore[method-assign]
    desk.completer.finish((await desk.jobs(1))[0], COMPLETED)
    await until(eyes.done(3), 30.0)


async def test_a_clock_that_steps_back_keeps_no_job_from_being_given_back(desk: Desk, eyes: Eyes) -> None:
    eyes.do("INSERT INTO pgqueue.job (task, run_at) VALUES ('due', now()), ('long due', now() - interval '1 day')")
    jobs = [*await desk.taker.fetch(), *await desk.jobs(1)]
    with Clock(eyes.conn, datetime.now(UTC) - timedelta(hours=1)):
        for job in jobs:
            desk.completer.finish(job, RELEASED)
        await asyncio.wait_for(desk.completer.flushed(), 30)
        assert eyes.states() == {"available": 3}
        assert eyes.one("SELECT count(*) FROM pgqueue.job WHERE run_at > pgqueue.now()") == 0


async def test_a_row_that_waits_by_right_is_not_taken_for_the_double_of_another(desk: Desk, eyes: Eyes) -> None:
    """One job was rescued from us and waits for its next run; another one of the same flush has a double."""
    rescued, doubled = await desk.jobs(2)
    eyes.do("DELETE FROM pgqueue.job_running WHERE id = %s", rescued.id)
    eyes.do("INSERT INTO pgqueue.job (task, id) VALUES ('again', %s)", rescued.id)
    eyes.do("INSERT INTO pgqueue.job (task, id, enqueued_at) SELECT 'double', id, enqueued_at FROM pgqueue.job_running")
    desk.completer.finish(rescued, COMPLETED)
    desk.completer.finish(doubled, RELEASED)
    await asyncio.wait_for(desk.completer.flushed(), 30)
    rows = eyes.all("SELECT id, task, state FROM pgqueue.job ORDER BY id, state")
    assert rows == [
        (rescued.id, "again", "available"),
        (doubled.id, "x", "available"),
        (doubled.id, "double", "failed"),
    ]
    assert desk.completer.fenced == 1


async def test_a_unique_index_of_somebody_else_harms_only_who_breaks_it(desk: Desk, eyes: Eyes) -> None:
    """There is no double to put aside, and to try again at once would go on for ever."""
    for (leaf,) in eyes.all("SELECT relid::text FROM pg_partition_tree('pgqueue.job_done') WHERE isleaf"):
        eyes.do(f"CREATE UNIQUE INDEX ON {leaf} (task)")
    jobs = await desk.end(*[COMPLETED] * 5)
    assert sorted(eyes.state(job.id) or "" for job in jobs) == ["completed", *["failed"] * 4]
    assert {kind for (kind,) in eyes.all("SELECT error_type FROM pgqueue.attempt")} == {"Unstorable"}


# Plans ---------------------------------------------------------------------------------------------------------------

PLACEHOLDER = re.compile(r"%\((\w+)\)s")
RUNNING = """
    INSERT INTO pgqueue.job (state, id, task, worker_id, claim, attempt, started_at)
    SELECT 'running', 10 * n, 'x', 1, 7, 1, now() FROM generate_series(1, %s) n
"""


class Prepared:
    """A statement of complete.sql on a worker's connection, prepared before there was anything to end."""

    def __init__(self, conn: psycopg.Connection, name: str) -> None:
        self._conn = conn
        sql = statements.text(name, "pgqueue")
        self._names = list(dict.fromkeys(PLACEHOLDER.findall(sql)))
        numbered = PLACEHOLDER.sub(lambda match: f"${self._names.index(match[1]) + 1}", sql)
        conn.execute(f"PREPARE one AS {numbered}".encode())
        self.plan(0)

    def plan(self, number: int) -> list[dict[str, Any]]:
        """The nodes that read job_running when so many are ended; rolled back."""
        each: dict[str, list[Any]] = {"ids": [10 * (n + 1) for n in range(number)], "claims": [7] * number}
        each |= {"delays": [1] * number, "results": [1] * number, "states": ["failed"] * number}
        each["agos"] = [1] * number
        one = {"worker_id": "1", "notify": "f", "version_tag": "v"}
        arrays = {name: each.get(name, ["t"] * number) for name in self._names if name not in one}
        literals = one | {name: "{" + ",".join(map(str, values)) + "}" for name, values in arrays.items()}
        with self._conn.transaction(force_rollback=True):
            self._conn.execute(statements.text("sessions_settings", "pgqueue"))
            given = ", ".join(f"'{literals[name]}'" for name in self._names)
            rows = self._conn.execute(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) EXECUTE one ({given})".encode())
            [[[explained]]] = rows.fetchall()
        self.last = explained["Plan"]
        return [node for node in nodes(self.last) if node.get("Relation Name") == "job_running"]

    def under(self, kind: str, number: int) -> list[dict[str, Any]]:
        """Of those, the ones below a node of this kind."""
        self.plan(number)
        above = [node for node in nodes(self.last) if node["Node Type"] == kind]
        return [node for top in above for node in nodes(top) if node.get("Relation Name") == "job_running"]


def nodes(plan: dict[str, Any]) -> list[dict[str, Any]]:
    return [plan, *(node for child in plan.get("Plans", []) for node in nodes(child))]


@pytest.mark.promise("F07")
@pytest.mark.parametrize(
    "name",
    [
        "complete_plain",
        "complete_plain_unlocked",
        "complete_result",
        "complete_retry",
        "complete_fail",
        "complete_release",
        "complete_interrupt",
        "complete_missing",
    ],
)
def test_a_plan_made_for_an_empty_table_reads_by_id_when_it_is_full_and_was_never_analysed(
    name: str, dsn: str, eyes: Eyes
) -> None:
    """By worker it would read, for each id, all that the worker runs: 2,500 jobs/s instead of 60,000."""
    with psycopg.connect(dsn, autocommit=True) as conn:
        prepared = Prepared(conn, name)
        eyes.do(RUNNING, 5_000)
        assert eyes.all("SELECT reltuples::int FROM pg_class WHERE relname = 'job_running'") == [(-1,)]
        read = {}
        for number in (50, 500):
            [scan] = [node for node in prepared.plan(number) if "Tid" not in node["Node Type"] and "Index Name" in node]
            assert (scan["Index Name"], scan["Node Type"]) == ("job_running_id", "Index Scan")
            assert "id = " in scan["Index Cond"]
            assert scan["Actual Loops"] == (1 if name.startswith("complete_plain") else number)
            read[number] = scan["Shared Hit Blocks"] + scan["Shared Read Blocks"]
        assert {node["Node Type"] for node in prepared.plan(500)} <= {"Index Scan", "Tid Scan", "ModifyTable"}
    assert read[500] <= 4 * 500
    assert read[500] <= 11 * read[50]


@pytest.mark.promise("F08")
@pytest.mark.parametrize(
    "name",
    [
        "complete_plain",
        "complete_plain_unlocked",
        "complete_result",
        "complete_retry",
        "complete_fail",
        "complete_release",
        "complete_interrupt",
        "complete_missing",
    ],
)
def test_no_statistics_can_make_a_flush_read_the_table(name: str, dsn: str, eyes: Eyes) -> None:
    """As a join, the planner chose by cost, and once in a while the table: 2,700 jobs/s under an old snapshot. Under a
    LIMIT of its own, each id is looked up by itself; and where nothing is joined, all of them in one scan."""
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute(statements.text("sessions_settings", "pgqueue"))
        prepared = Prepared(conn, name)
        eyes.do(RUNNING, 5_000)
        eyes.do("ANALYZE pgqueue.job_running")
        each = not name.startswith("complete_plain")
        [scan] = prepared.under("Limit", 500) if each else [n for n in prepared.plan(500) if "Index Name" in n]
        assert (scan["Index Name"], scan["Actual Loops"]) == ("job_running_id", 500 if each else 1)
