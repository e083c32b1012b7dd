"""How seldom an idle worker sends anything, and what comes late by it, and what does not."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from statistics import quantiles
from time import sleep
from typing import Any

import psycopg
import pytest
from worker_states import worker_state
from workers import Eyes, until, wait_until, work, workers

import pgqueue
from pgqueue.database import sessions, statements
from pgqueue.database.sessions import Link
from pgqueue.jobs.job import Job
from pgqueue.steady_clock import monotonic
from pgqueue.worker import duties, pace
from pgqueue.worker.fetch import notifier
from pgqueue.worker.leader import bulks, depth, pruner, scheduler, ticks
from pgqueue.worker.worker import Worker

UNTOLD = "INSERT INTO pgqueue.job (task, args) VALUES ('pace.quick', '{}')"


@pgqueue.task(name="pace.quick")
async def quick() -> None: ...


def slow(worker: Worker) -> bool:
    """Whether this worker is at rest, and its polls are slow."""
    fetcher = worker.services.fetcher
    roomy = worker.services.capacity.to_fetch()
    return fetcher._is_slow(roomy) and not any(fetcher.hungry(room.queues) for room in roomy)


async def late(eyes: Eyes, number: int) -> float:
    """How long the `number`th job takes that no notification tells of."""
    began = monotonic()
    eyes.do(UNTOLD)
    await until(eyes.done(number))
    return monotonic() - began


@pytest.mark.second
@pytest.mark.promise("F09", "F251")
async def test_an_idle_leader_sends_one_transaction_a_second_and_another_worker_one_in_three_seconds(
    dsn: str, eyes: Eyes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it was 2.2 and 1.0. What a new leader does once is over when this counts."""
    sent, real, seconds = Counter[int](), sessions.send, 15.0

    async def counted(conn: Any, link: Any, *messages: Any, **options: Any) -> list[Any]:
        sent[id(link.outage)] += 1  # one for each worker
        return await real(conn, link, *messages, **options)

    monkeypatch.setattr(pruner, "TIDY_SECONDS", 0.1)
    monkeypatch.setattr(depth, "FIRST_SECONDS", 0.1)
    async with work(dsn, quick) as leader:
        await until(leader.services.election.leads)
        async with work(dsn, quick) as other:
            await until(lambda: slow(leader) and slow(other))
            loops = [loop for loop in leader.services.duties.loops if loop.duty.every < 100.0]
            await until(lambda: all(loop.report.ran_at for loop in loops))
            await until(lambda: leader.services.depth._rests_until > 0.0)
            monkeypatch.setattr(sessions, "send", counted)
            monkeypatch.setattr(notifier, "send", counted)
            await asyncio.sleep(seconds)  # the time is what is measured
            of_leader, of_other = (sent[id(worker.state.link.outage)] for worker in (leader, other))
            assert not other.services.election.leads()
    print(f"{of_leader / seconds:.2f} and {of_other / seconds:.2f} transactions a second")
    # A short time sees more or fewer of the duties.
    assert of_leader <= 1.0 * seconds + 3 and of_other <= 0.3 * seconds + 2.5


@pytest.mark.promise("F05", "F252")
async def test_a_job_that_was_not_told_waits_for_two_slow_polls_at_most_and_the_next_ones_for_polls(
    dsn: str, eyes: Eyes
) -> None:
    async with work(dsn, quick, poll=0.2, lease=60.0) as worker:  # no heartbeat comes in time
        await until(lambda: slow(worker))
        await asyncio.sleep(0.5)  # it has looked after its LISTEN
        assert await late(eyes, 1) < 2 * pace.SLOW_TIMES * 0.2 + 3.0
        await until(lambda: not worker.state.pace.told)
        assert min([await late(eyes, number) for number in range(2, 6)]) < 2 * 0.2 + 0.5
        worker.state.pace._untold_until = 0.0
        await until(lambda: slow(worker))


@pytest.mark.promise("F05", "F252")
async def test_a_heartbeat_finds_a_job_that_was_not_told_whatever_the_poll(dsn: str, eyes: Eyes) -> None:
    async with work(dsn, quick, poll=60.0, lease=1.5) as worker:
        await until(lambda: slow(worker))
        await asyncio.sleep(1.0)  # transactions of its own start have ended
        fetches = worker.services.fetcher.fetches
        await asyncio.sleep(1.2)  # heartbeats that say that nothing has happened lead to no fetch
        assert worker.services.fetcher.fetches == fetches
        assert await late(eyes, 1) < 5.0


@pytest.mark.promise("F252")
async def test_jobs_that_were_told_keep_polls_slow(dsn: str, eyes: Eyes) -> None:
    async with work(dsn, quick, poll=0.1, lease=1.5) as worker:
        for number in range(1, 30):
            with psycopg.connect(dsn) as conn:
                quick.enqueue(conn)
            await until(eyes.done(number))
        assert worker.state.pace.told
        await until(lambda: slow(worker))


@pytest.mark.promise("F252")
async def test_polls_are_slow_only_while_notifications_are_known_to_come(
    dsn: str, eyes: Eyes, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with work(dsn, quick, poll=0.05, listen_dsn="off") as worker:
        await until(lambda: worker.services.fetcher.fetches)
        assert not worker.state.pace.told and worker.state.pace.poll == 0.05
    async with work(dsn, quick, poll=0.05) as worker:
        await until(lambda: slow(worker))
        usual = []
        for usage in (0.5, 0.1):
            worker.services.notify_watch.usage = usage
            usual.append(worker.state.pace.poll)
        assert usual == [0.05, 0.25]
        with monkeypatch.context() as broken:
            broken.setattr(notifier, "connect", refused)
            assert eyes.terminate("pgqueue listen") == 1
            await until(lambda: not worker.state.pace.told)
        await until(lambda: worker.state.pace.told)


async def refused(*args: Any, **options: Any) -> Any:
    raise psycopg.OperationalError("away")


@pytest.mark.promise("F252")
@pytest.mark.parametrize("what", ["queue", "task"])
async def test_where_something_is_paused_a_poll_finds_that_it_is_not_any_more(what: str, dsn: str, eyes: Eyes) -> None:
    """Naive is to believe a heartbeat, which does not know what is paused."""
    name = "default" if what == "queue" else "pace.quick"
    with psycopg.connect(dsn, autocommit=True) as conn:
        pgqueue.pause(conn, **{what: name})
    async with work(dsn, quick, poll=0.2, lease=1.5) as worker:
        with psycopg.connect(dsn) as conn:
            quick.enqueue(conn)
        await until(lambda: worker.services.fetcher.fetches)
        await asyncio.sleep(1.0)  # nothing may start in this time
        assert eyes.states() == {"available": 1}
        began = monotonic()
        eyes.do("UPDATE pgqueue.queue SET paused_at = NULL" if what == "queue" else "DELETE FROM pgqueue.paused_task")
        await until(eyes.done(1))
        assert monotonic() - began < 2 * 0.2 + 3.0


@pytest.mark.second
@pytest.mark.promise("F254")
async def test_a_database_that_sleeps_is_left_alone_from_one_heartbeat_to_the_next(
    dsn: str, eyes: Eyes, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, seconds in (("STILL_SECONDS", 0.5), ("WINDOW_SECONDS", 0.4), ("AFTER_SECONDS", 0.05)):
        monkeypatch.setattr(pace, name, seconds)
    monkeypatch.setattr(duties, "REST_SECONDS", 0.1)
    for module, name in (
        (scheduler, "LOOK_SECONDS"),
        (scheduler, "ZERO_SECONDS"),
        (ticks, "LOOK_SECONDS"),
        (bulks, "LOOK_SECONDS"),
    ):
        monkeypatch.setattr(module, name, 0.1)
    monkeypatch.setattr(pruner, "TIDY_SECONDS", 0.1)
    sent, real = list[tuple[float, str]](), sessions.send

    async def noted(conn: Any, link: Any, *messages: Any, **options: Any) -> list[Any]:
        sent.append((monotonic(), messages[-1].sql))
        return await real(conn, link, *messages, **options)

    monkeypatch.setattr(sessions, "send", noted)
    async with work(dsn, quick, idle=2.0, lease=1.0) as worker:
        assert worker.settings.lease == 6.0 and worker.settings.poll == 2.0
        await until(lambda: worker.state.pace.still)
        begin = len(sent)
        await asyncio.sleep(5.0)  # the time is what is looked at
        beat = statements.text("heartbeat_write", "pgqueue")
        beats = [at for at, sql in sent if sql == beat]
        apart = [each - before for before, each in pairwise(beats[-3:])]
        assert all(seconds > 1.8 for seconds in apart), "once in that time"
        between = [at - max(each for each in beats if each <= at) for at, _ in sent[begin:]]
        assert len(between) > 5 and quantiles(between, n=5)[-1] < 1.2, "all else comes right after it"
        with psycopg.connect(dsn) as conn:
            conn.execute("SELECT pgqueue.enqueue('pace.quick', '{}', run_at => now() + interval '1 second')")
            quick.enqueue(conn)
        began = monotonic()
        await until(eyes.done(1))
        assert monotonic() - began < 1.9
        await until(eyes.done(2))
        assert monotonic() - began < 3.0


def test_a_pause_of_a_worker_at_rest_ends_right_after_a_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    state = worker_state(Link("", "pgqueue"), idle=100.0)
    mine = state.pace
    assert mine.later(15.0) == 15.0 and not mine.rests()
    monkeypatch.setattr(pace, "STILL_SECONDS", -1.0)
    mine.beat(monotonic() - 30.0)
    assert mine.rests()
    for seconds, pause in ((15.0, 71.0), (70.0, 71.0), (80.0, 171.0), (300.0, 371.0)):
        assert mine.later(seconds) == pytest.approx(pause, abs=0.5)
    mine.beat(monotonic() - 5.0)
    assert not mine.rests(), "the database is awake"
    mine.beat(monotonic() - 120.0)
    assert not mine.rests(), "no heartbeat has come: nothing waits for one"
    mine.beat(monotonic() - 30.0)
    state.held[1] = Job.__new__(Job)
    monkeypatch.setattr(pace, "STILL_SECONDS", 60.0)
    assert not mine.rests() and mine.later(15.0) == 15.0


@pytest.mark.promise("F268")
async def test_a_paused_task_of_other_workers_keeps_no_polls_fast(dsn: str, eyes: Eyes) -> None:
    eyes.do("INSERT INTO pgqueue.paused_task (name, paused_at) VALUES ('elsewhere', now())")
    async with work(dsn, quick) as worker:
        await until(lambda: worker.services.fetcher.paused_tasks.passed)
        await until(lambda: slow(worker), 10.0)


@pytest.mark.promise("F268")
async def test_a_heartbeat_that_sees_a_job_while_it_is_claimed_is_no_sign_that_it_was_not_told(
    dsn: str, eyes: Eyes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer comes between the notification and that of the claim. No later notification takes it back."""
    async with work(dsn, quick, poll=0.2, lease=60.0) as worker:
        fetcher = worker.services.fetcher
        await until(lambda: slow(worker))
        await asyncio.sleep(0.5)  # it has looked after its LISTEN
        real, answers = fetcher._claim, list[bool]()

        async def claim(*args: Any, **options: Any) -> Any:
            if slow(worker):
                fetcher.probed(eyes.one("SELECT last_value FROM pgqueue.job_pos_seq"), "1:1:", monotonic())
                answers.append(fetcher.hungry(["default"]))
            return await real(*args, **options)

        monkeypatch.setattr(fetcher, "_claim", claim)
        with psycopg.connect(dsn) as conn:
            pgqueue.enqueue_many(conn, [quick.new()])
        await until(eyes.done(1))
        assert any(answers)
        await asyncio.sleep(1.5)
        assert worker.state.pace.told


@pytest.mark.second
@pytest.mark.promise("F05", "F253")
def test_what_is_due_in_an_idle_fleet_is_late_by_three_seconds_if_its_leader_was_killed(
    dsn: str, eyes: Eyes, tmp_path: Path
) -> None:
    """No tick and no job has anything to do until then, so no poll asks whether the leader lives."""
    with workers(tmp_path, dsn, DUE) as made:
        [leader] = made.ready(queues=["nothing"], poll=60.0, lease=60.0)
        wait_until(lambda: eyes.one(LEADS) == leader.pid)
        [other] = made.ready(1, poll=60.0, lease=60.0)
        sleep(2.5)  # it has asked what is due, and knows of nothing
        with closing(psycopg.connect(dsn, autocommit=True)) as conn:
            pgqueue.remote("due").using(delay=4.0).enqueue(conn)
        sleep(1.0)  # the other one asks when the job is due
        leader.kill()
        assert float(other.event("due")["late"]) < 5.0  # a ping comes every ten seconds


LEADS = """
    SELECT w.pid FROM pgqueue.worker w CROSS JOIN LATERAL jsonb_to_recordset(w.sessions) AS s (pid integer)
    JOIN pg_locks l ON l.pid = s.pid
    WHERE l.locktype = 'advisory' AND l.granted AND w.dead_at IS NULL
      AND (l.classid::bigint << 32 | l.objid::bigint) = hashtextextended('pgqueue.leader', 7)
"""
DUE = """
from datetime import datetime, timezone

@pgqueue.task(name="due")
async def due(job: pgqueue.Job) -> None:
    say("due", late=(datetime.now(timezone.utc) - job.run_at).total_seconds())
"""
