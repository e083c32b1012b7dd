"""A whole worker in the test's process: queues, retries, shutdown, being taken for dead, the cost of an idle one."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from typing import Any

import psycopg
import pytest
from handlers import begins, begun
from workers import Eyes, Taker, apply_ddl, until, work

import pgqueue
from pgqueue.client.tasks import _declare, task
from pgqueue.database import backoff, sessions
from pgqueue.errors import InvalidOption, NotConfigured, SchemaMissing
from pgqueue.jobs.job import Job
from pgqueue.jobs.outcomes import Outcome
from pgqueue.worker.complete import completer
from pgqueue.worker.complete.completer import Completer
from pgqueue.worker.concurrency import rate_limiter, sweep, unblocker
from pgqueue.worker.concurrency.rate_limiter import RateLimiter
from pgqueue.worker.concurrency.sweep import Sweep
from pgqueue.worker.concurrency.unblocker import Unblocker
from pgqueue.worker.fetch import notifier, reconciler
from pgqueue.worker.fetch.fetcher import Fetcher
from pgqueue.worker.fetch.reconciler import Reconciler
from pgqueue.worker.fetch.watermark import Watermark
from pgqueue.worker.leader import history_fold, pruner, ticks
from pgqueue.worker.leader.history_fold import HistoryFold
from pgqueue.worker.leader.pruner import Pruner
from pgqueue.worker.liveness import registration
from pgqueue.worker.liveness.registration import enter
from pgqueue.worker.liveness.rescue import Rescue
from pgqueue.worker.state import WorkerState
from pgqueue.worker.worker import Worker


class Stage:
    """What handlers of these tests wait for and report to; made anew for every test."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.running = 0
        self.most: dict[str, int] = {}
        self.now: dict[str, int] = {}
        self.go = asyncio.Event()
        self.thread_go = threading.Event()
        self.started: asyncio.Queue[str] = asyncio.Queue()


stage: Stage


@pytest.fixture(autouse=True)
async def new_stage() -> Any:
    global stage
    stage = Stage()
    yield
    stage.thread_go.set()


@task(name="worker.says")
async def says(word: str) -> None:
    stage.ran.append(word)


@task(name="worker.waits")
async def waits(job: Job, word: str) -> str:
    begins(job)
    stage.now[word] = stage.now.get(word, 0) + 1
    stage.most[word] = max(stage.most.get(word, 0), stage.now[word])
    stage.started.put_nowait(word)
    try:
        await stage.go.wait()
    finally:
        stage.now[word] -= 1
    return word


@task(name="worker.waits_in_thread")
def waits_in_thread(job: Job, word: str) -> str:
    begins(job)
    stage.thread_go.wait(30)
    return word


@task(name="worker.short")
async def short(word: str) -> None:
    stage.now[word] = stage.now.get(word, 0) + 1
    stage.most[word] = max(stage.most.get(word, 0), stage.now[word])
    await asyncio.sleep(0.005)
    stage.now[word] -= 1


@task(name="worker.swallows")
async def swallows(word: str) -> str:
    stage.started.put_nowait(word)
    while True:
        try:
            await stage.go.wait()
            return word
        except asyncio.CancelledError:
            stage.ran.append("swallowed")


@task(name="worker.fails", retry=3)
async def fails(job: Job) -> None:
    stage.ran.append(f"attempt {job.attempt}")
    raise ValueError(f"attempt {job.attempt} failed")


@task(name="worker.cancels_services")
async def cancels_services(names: list[str]) -> None:
    for each in asyncio.all_tasks():
        if each.get_name().removeprefix("pgqueue-") in names:
            each.cancel()


ALL = says, waits, waits_in_thread, short, swallows, fails, cancels_services
MINUTES = (
    (pruner, "ROUND_SECONDS"),
    (history_fold, "ROUND_SECONDS"),
    (reconciler, "EVERY_SECONDS"),
    (reconciler, "SELDOM_SECONDS"),
    (ticks, "LOOK_SECONDS"),
    (ticks, "SETTLE_SECONDS"),
    (sweep, "EVERY_SECONDS"),
    (unblocker, "IDLE_SECONDS"),
    (rate_limiter, "IDLE_SECONDS"),
    (completer, "IDLE_SECONDS"),
)
"""What a worker does again after so many seconds, though it is idle."""


def put(dsn: str, *jobs: Any) -> list[int]:
    """Enqueue and commit."""
    with psycopg.connect(dsn) as conn:
        return [handle.id for handle in pgqueue.enqueue_many(conn, jobs)]


# Doors ---------------------------------------------------------------------------------------------------------------


def test_options_are_checked_at_the_door(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PGQUEUE_DSN", raising=False)
    with pytest.raises(NotConfigured):
        Worker()
    for options in (
        {"queues": ["a:0"]},
        {"queues": ["a:x"]},
        {"queues": ["no spaces"]},
        {"concurrency": 0},
        {"lease": 0.5},
        {"lease": 0},
        {"poll": 0},
        {"poll": -1},
        {"tasks": ["says"]},
        {"tasks": [says, print]},
        {"tasks": says},
        {"tasks": print},
        {"tasks": 7},
        {"tasks": "says"},
    ):
        with pytest.raises(InvalidOption):
            Worker(dsn="postgresql:///x", **options)


async def test_a_database_without_the_schema_is_refused_with_what_to_do(empty_dsn: str) -> None:
    worker = Worker(dsn=empty_dsn, tasks=ALL)
    with pytest.raises(SchemaMissing, match="pgqueue migrate"):
        await worker.start()
    assert await worker.stop() == 0


async def test_a_worker_serves_the_queues_of_its_tasks_and_leaves_no_row(dsn: str, eyes: Eyes) -> None:
    async with work(dsn, *ALL) as worker:
        assert dict(worker.settings.queues) == {"default": None}
        await until(
            lambda: eyes.all("SELECT state FROM pgqueue.worker") == [("running",)]
        )  # said with a beat of its own
        [row] = eyes.all("SELECT id, queues, concurrency, dead_at FROM pgqueue.worker")
        assert row == (worker.worker_id, ["default"], 10, None)
    assert eyes.all("SELECT * FROM pgqueue.worker") == []
    assert await worker.stop() == 0  # again


# Queues, slots, priorities -------------------------------------------------------------------------------------------


async def test_slots_of_a_queue_are_honoured_and_used(dsn: str, eyes: Eyes) -> None:
    put(
        dsn,
        *[short.using(queue="a").new("a") for _ in range(40)],
        *[short.using(queue="b").new("b") for _ in range(80)],
    )
    async with work(dsn, *ALL, queues=["a:2", "b"], concurrency=4, poll=60.0):
        await until(eyes.done(120))  # before the first poll: who frees a slot of a queue says so
    assert stage.most == {"a": 2, "b": 4}


async def test_a_full_queue_does_not_keep_the_others_from_being_asked_nor_makes_the_fetcher_spin(
    dsn: str, eyes: Eyes
) -> None:
    busy = [waits.using(queue="a", priority=priority).new("a") for priority in (0, 5, 9) for _ in range(4)]
    put(dsn, *busy)
    async with work(dsn, *ALL, queues=["a:2", "b:1"], poll=60.0) as worker:
        worker.services.fetcher.watermark._sweep_every = 1e9
        for _ in range(2):
            await stage.started.get()
        put(dsn, says.using(queue="b").new("b"))
        await until(lambda: stage.ran == ["b"])
        fetches = worker.services.fetcher.fetches
        transactions = eyes.one("SELECT last_value FROM pgqueue.job_pos_seq")
        await asyncio.sleep(0.5)  # nothing happens in this time; what is counted is what happens nevertheless
        assert worker.services.fetcher.fetches - fetches <= 3
        assert eyes.one("SELECT last_value FROM pgqueue.job_pos_seq") - transactions <= 6
        assert eyes.states()["running"] == 2
        stage.go.set()
        await until(eyes.done(13), 30.0)
    assert stage.most["a"] == 2


async def test_urgent_jobs_go_first(dsn: str, eyes: Eyes) -> None:
    put(dsn, *[says.using(priority=priority).new(f"{priority}") for priority in (9, 5, 0) for _ in range(20)])
    async with work(dsn, *ALL, concurrency=1):
        await until(eyes.done(60))
    assert stage.ran == ["0"] * 20 + ["5"] * 20 + ["9"] * 20


async def test_a_paused_queue_waits_and_goes_on_when_it_resumes(dsn: str, eyes: Eyes) -> None:
    eyes.do("INSERT INTO pgqueue.queue (name, paused_at) VALUES ('a', now())")
    put(dsn, says.using(queue="a").new("a"), says.using(queue="b").new("b"))
    async with work(dsn, *ALL, queues=["a", "b"], poll=0.1):
        await until(eyes.done(1))
        assert stage.ran == ["b"]
        eyes.do("DELETE FROM pgqueue.queue")
        await until(eyes.done(2))


async def test_long_jobs_are_not_hoarded(dsn: str, eyes: Eyes) -> None:
    put(dsn, *[waits.new("x") for _ in range(20)])
    async with work(dsn, *ALL, concurrency=3):
        for _ in range(3):
            await stage.started.get()
        assert eyes.states() == {"running": 3, "available": 17}
        stage.go.set()
        await until(eyes.done(20))


# Retries -------------------------------------------------------------------------------------------------------------


async def test_a_failing_job_is_tried_as_often_as_it_may_be_and_then_dead(dsn: str, eyes: Eyes) -> None:
    own, more, once = put(dsn, fails.new(), fails.using(retry=5).new(), fails.using(retry=1).new())
    async with work(dsn, *ALL):
        for _ in range(5):
            await until(lambda: not {"available", "running"} & eyes.states().keys())
            # In time travel: what waits for its next attempt is due now.
            eyes.do(
                "WITH due AS (DELETE FROM pgqueue.job_scheduled RETURNING *) INSERT INTO pgqueue.job_scheduled "
                "(state, run_at, id, task, args, attempt, max_attempts, enqueued_at, reason) "
                "SELECT state, pgqueue.now(), id, task, args, attempt, max_attempts, enqueued_at, reason FROM due"
            )
            eyes.do('NOTIFY "pgqueue.:scheduled"')
            await until(
                lambda: (
                    "scheduled" not in eyes.states()
                    or eyes.one("SELECT min(run_at) > pgqueue.now() FROM pgqueue.job_scheduled")
                )
            )
        await until(lambda: eyes.states() == {"failed": 3})
    assert dict(eyes.all("SELECT job_id, count(*)::int FROM pgqueue.attempt GROUP BY 1")) == {own: 3, more: 5, once: 1}
    assert eyes.all("SELECT DISTINCT reason FROM pgqueue.job") == [("error",)]


@pytest.mark.promise("F18")
async def test_an_unknown_task_stays_available_and_fails_when_no_worker_has_known_it_for_long(
    dsn: str, eyes: Eyes
) -> None:
    put(dsn, pgqueue.remote("of.another.version").new(a=1), says.new("neighbour"))
    async with work(dsn, *ALL) as worker:
        await until(eyes.done(1))
        await worker.services.unknown_tasks.look()
        assert eyes.states() == {"available": 1, "completed": 1}
    assert eyes.one("SELECT count(*) FROM pgqueue.attempt") == 0
    async with work(dsn, *ALL, fail_unknown=0.0):
        await until(lambda: eyes.states() == {"failed": 1, "completed": 1})
    assert eyes.all("SELECT task, reason, attempt FROM pgqueue.job_dead") == [("of.another.version", "refused", 0)]
    [message] = eyes.all("SELECT message FROM pgqueue.attempt")
    assert message == ("no task named 'of.another.version' is imported by any worker",)


@pytest.mark.promise("F18")
async def test_two_codebases_on_one_queue_run_side_by_side(dsn: str, eyes: Eyes) -> None:
    """Without delay: by taking and giving back what is unknown it took 10 to 46 s."""

    async def nothing() -> None: ...

    here, there = (_declare(nothing, {"name": f"worker.{side}", "aliases": [f"{side}.old"]}) for side in ("a", "b"))
    async with work(dsn, here), work(dsn, there):
        for _ in range(20):
            names = ("worker.a", "worker.b", "a.old", "b.old", "worker.b", "worker.a")
            put(dsn, *(pgqueue.remote(name).new() for name in names))
        await until(eyes.done(120), 20.0)
    assert eyes.one("SELECT last_value FROM pgqueue.job_pos_seq") == 120, "each was available once"
    assert eyes.one("SELECT count(*) FROM pgqueue.attempt") == 0
    sides = "SELECT count(DISTINCT worker_id), count(*) FROM pgqueue.job_done GROUP BY task IN ('worker.a', 'a.old')"
    assert eyes.one("SELECT max(extract(epoch FROM started_at - enqueued_at))::float8 FROM pgqueue.job_done") < 5.0
    assert eyes.all(sides) == [(1, 60), (1, 60)]
    assert eyes.one("SELECT count(DISTINCT worker_id) FROM pgqueue.job_done") == 2


@pytest.mark.promise("F18")
async def test_a_worker_says_which_tasks_it_knows(dsn: str, eyes: Eyes) -> None:
    async def nothing() -> None: ...

    async with work(dsn, _declare(nothing, {"name": "worker.here", "aliases": ["worker.old"]})):
        assert eyes.all("SELECT tasks FROM pgqueue.worker") == [(["worker.here", "worker.old"],)]


@pytest.mark.promise("F18")
async def test_arguments_that_do_not_fit_spend_no_attempt_and_are_shown(dsn: str, eyes: Eyes) -> None:
    eyes.do("INSERT INTO pgqueue.job (task, args) VALUES ('worker.says', '{\"word\": 7}'), ('worker.says', '[1]')")
    put(dsn, says.new("neighbour"))
    async with work(dsn, *ALL):
        await until(lambda: eyes.states() == {"scheduled": 2, "completed": 1})
    assert eyes.all("SELECT DISTINCT attempt FROM pgqueue.job_scheduled") == [(0,)]
    assert eyes.all("SELECT DISTINCT error_type FROM pgqueue.attempt") == [("InvalidArguments",)]


@pytest.mark.promise("F18")
async def test_a_row_with_the_id_of_another_is_put_aside_wherever_they_meet(dsn: str, eyes: Eyes) -> None:
    later = (
        "INSERT INTO pgqueue.job (id, enqueued_at, task, run_at, state) SELECT id, enqueued_at, 'twin', "
        "now() + %s::interval, 'scheduled' FROM pgqueue.job_available WHERE id = %s"
    )
    eyes.do("INSERT INTO pgqueue.queue (name, paused_at) VALUES ('paused', now())")
    eyes.do("INSERT INTO pgqueue.job (id, task, queue) VALUES (1001, 'first', 'paused')")
    eyes.do(later, "0", 1001)  # meets it when it is promoted
    eyes.do("INSERT INTO pgqueue.job (id, task) VALUES (1002, 'worker.fails')")
    eyes.do(later, "1 hour", 1002)  # is met when the other is to be tried again
    async with work(dsn, *ALL) as worker:
        await until(worker.services.election.leads)
        put(dsn, says.using(delay=0.1).new("scheduled neighbour"), says.new("neighbour"))
        await until(eyes.done(2))
        await until(lambda: eyes.states() == {"available": 1, "scheduled": 1, "failed": 2, "completed": 2})
    assert sorted(eyes.all("SELECT id, task, reason FROM pgqueue.job_dead")) == [
        (1001, "twin", "refused"),
        (1002, "twin", "refused"),
    ]
    assert eyes.happened("failed") == 2


@pytest.mark.second
@pytest.mark.promise("F06")
async def test_an_idle_leader_outlives_what_it_does_each_minute(
    dsn: str, eyes: Eyes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of its minutes lasts half a second here."""
    rounds: Counter[str] = Counter()

    def counted(owner: type, name: str) -> None:
        real = getattr(owner, name)

        async def count(self: Any, *args: Any) -> Any:
            done = await real(self, *args)
            rounds[owner.__name__] += 1
            return done

        monkeypatch.setattr(owner, name, count)

    for module, name in MINUTES:
        assert getattr(module, name) >= 5
        monkeypatch.setattr(module, name, 0.5)
    monkeypatch.setattr(Watermark.__init__, "__defaults__", (0.5,))
    for owner, name in ((Pruner, "rings"), (HistoryFold, "round"), (Reconciler, "reconcile"), (Sweep, "sweep")):
        counted(owner, name)
    async with work(dsn, *ALL) as worker:
        await until(worker.services.election.leads)
        ended = asyncio.ensure_future(worker.run())
        await until(lambda: ended.done() or (len(rounds) == 4 and min(rounds.values()) >= 4))
        assert not ended.done()
        put(dsn, says.new("still there"))
        await until(eyes.done(1))
        await worker.stop(1.0)
        await ended


# Shutdown ------------------------------------------------------------------------------------------------------------


async def test_quiet_hands_back_what_has_not_started_and_runs_the_rest_to_its_end(dsn: str, eyes: Eyes) -> None:
    ids = put(dsn, *[waits.new("x") for _ in range(6)])
    async with work(dsn, *ALL, concurrency=2) as worker:
        worker.services.executor._running.groups[0].prefetch = 4  # as if the jobs before had been quick
        await begun(*ids[:2])
        await until(lambda: len(worker.state.held) == 6)
        worker.quiet()
        await until(lambda: eyes.states() == {"running": 2, "available": 4})
        put(dsn, says.new("not ours"))
        stage.go.set()
        await until(eyes.done(2))
        assert eyes.all("SELECT DISTINCT attempt, crashes FROM pgqueue.job_available") == [(0, 0)]
        order = [row[0] for row in eyes.all("SELECT id FROM pgqueue.job_available ORDER BY rank, pos")]
        assert order[:4] == ids[2:]
        assert await worker.stop(1.0) == 0
    assert eyes.states() == {"completed": 2, "available": 5}


async def test_run_returns_when_a_quiet_worker_has_written_its_last_outcome(dsn: str, eyes: Eyes) -> None:
    put(dsn, waits.new("x"), waits.new("y"))
    async with work(dsn, *ALL) as worker:
        running = asyncio.ensure_future(worker.run())
        for _ in range(2):
            await stage.started.get()
        worker.quiet()
        put(dsn, says.new("not ours"))
        assert not (await asyncio.wait([running], timeout=0.3))[0]
        stage.go.set()
        await asyncio.wait_for(running, 30.0)
        assert eyes.states() == {"completed": 2, "available": 1}
        assert await worker.stop() == 0


@pytest.mark.parametrize("quiet_before", [False, True])
async def test_run_returns_from_a_stop_when_the_worker_has_left(quiet_before: bool, dsn: str, eyes: Eyes) -> None:
    put(dsn, waits.new("x"))
    async with work(dsn, *ALL) as worker:
        running = asyncio.ensure_future(worker.run())
        await stage.started.get()
        if quiet_before:
            worker.quiet()
        stopping = asyncio.ensure_future(worker.stop())
        stage.go.set()
        await asyncio.wait_for(running, 30.0)
        assert eyes.all("SELECT id FROM pgqueue.worker") == []
        assert await stopping == 0


async def test_a_fetch_under_way_when_it_gets_quiet_is_handed_back(dsn: str, eyes: Eyes) -> None:
    async with work(dsn, *ALL) as worker:
        real = worker.services.fetcher._claim

        async def quiet_meanwhile(*args: Any, **how: Any) -> Any:
            answer = await real(*args, **how)
            if answer.jobs:
                worker.quiet()
            return answer

        worker.services.fetcher._claim = quiet_meanwhile  # type: ignore
        put(dsn, *[says.new("x") for _ in range(5)])
        await until(lambda: worker.state.phase == "quiet")
        await until(lambda: eyes.states() == {"available": 5})
    assert stage.ran == []


async def test_stop_waits_for_jobs_and_says_how_many_it_could_not_wait_for(dsn: str, eyes: Eyes) -> None:
    put(dsn, waits.new("x"))
    async with work(dsn, *ALL) as worker:
        await stage.started.get()
        asyncio.get_running_loop().call_later(0.1, stage.go.set)
        assert await worker.stop(30.0) == 0
    assert eyes.states() == {"completed": 1}


async def test_a_job_stopped_by_the_deadline_goes_back_with_its_attempt(dsn: str, eyes: Eyes) -> None:
    put(dsn, waits.new("x"), waits.new("y"))
    async with work(dsn, *ALL) as worker:
        for _ in range(2):
            await stage.started.get()
        assert await worker.stop(0.1) == 2
    assert eyes.all("SELECT state, attempt, rank FROM pgqueue.job") == [("available", 0, 10)] * 2
    assert eyes.all("SELECT * FROM pgqueue.worker") == []


@pytest.mark.second
async def test_a_handler_that_swallows_the_cancellation_does_not_hold_the_shutdown(
    dsn: str, eyes: Eyes, caplog: pytest.LogCaptureFixture
) -> None:
    [job] = put(dsn, swallows.new("x"))
    async with work(dsn, *ALL) as worker:
        await stage.started.get()
        began = time.monotonic()
        assert await worker.stop(0.1) == 1
        assert time.monotonic() - began < 30  # it never ends by itself
    assert stage.ran == ["swallowed"]
    assert f"job {job} (worker.swallows) could not be stopped" in caplog.text
    # It still runs, so it is still ours: given back by rescue, when nobody can write its outcome any more.
    assert eyes.states() == {"running": 1}
    assert eyes.one("SELECT count(*) FROM pgqueue.worker") == 1
    stage.go.set()
    await asyncio.sleep(0)


@pytest.mark.second
async def test_a_thread_that_does_not_end_does_not_hold_the_shutdown(dsn: str, eyes: Eyes) -> None:
    [job] = put(dsn, waits_in_thread.new("x"))
    async with work(dsn, *ALL) as worker:
        await begun(job)
        assert await worker.stop(0.1) == 1
    assert eyes.states() == {"running": 1}
    stage.thread_go.set()


@pytest.mark.second
@pytest.mark.parametrize("listed", [True, False])
async def test_a_thread_that_outlives_the_shutdown_leaves_a_job_that_rescue_gives_back_unspent(
    listed: bool, dsn: str, eyes: Eyes
) -> None:
    """It was the operator's deadline, not the job, that ended this process: no crash."""
    async with work(dsn, *ALL, lease=1.0 if listed else 60.0) as worker:
        await until(lambda: eyes.one("SELECT beat FROM pgqueue.worker") >= 1)
        [job] = put(dsn, waits_in_thread.new("x"))
        await begun(job)
        if listed:
            await until(lambda: eyes.one("SELECT cardinality(running) FROM pgqueue.worker") == 1)
        assert await worker.stop(0.1) == 1
    [(left, beat, running)] = eyes.all("SELECT id, beat, running FROM pgqueue.worker")
    assert running == []
    taker = Taker(dsn)
    assert await Rescue(taker.session, notify=True, rescued=lambda: None).rescue(left, beat)
    assert eyes.all("SELECT state, attempt, crashes FROM pgqueue.job") == [("available", 0, 0)]
    await taker.close()


async def test_an_outcome_that_a_thread_finishes_at_the_very_moment_of_stop_is_written(dsn: str, eyes: Eyes) -> None:
    put(dsn, waits_in_thread.new("x"))
    async with work(dsn, *ALL) as worker:
        finish, finishing, go_on = worker.services.executor._finish, threading.Event(), threading.Event()

        def without_a_turn(job: Job, outcome: Outcome) -> None:
            finishing.set()
            go_on.wait(30)  # the machine runs other threads meanwhile
            finish(job, outcome)

        worker.services.executor._finish = without_a_turn
        stage.thread_go.set()
        await until(finishing.is_set)
        stopping = asyncio.ensure_future(worker.stop(30.0))
        await asyncio.wait([stopping], timeout=0.5)  # one that does not wait for it would be over
        go_on.set()
        assert await stopping == 0
    assert eyes.states() == {"completed": 1}


async def test_a_worker_that_stops_as_it_starts_does_not_say_that_the_database_is_lost(
    dsn: str, eyes: Eyes, caplog: pytest.LogCaptureFixture
) -> None:
    """Its listener was waiting for a heartbeat, which is not sent any more."""
    for _ in range(3):
        async with Worker(dsn=dsn, tasks=ALL):
            pass
    assert "is lost" not in caplog.text
    assert eyes.all("SELECT * FROM pgqueue.worker") == []


@pytest.mark.second
async def test_stopping_at_any_moment_of_the_start_leaves_nothing_behind(dsn: str, eyes: Eyes) -> None:
    put(dsn, *[says.new(str(n)) for n in range(200)])
    for turns in range(0, 60, 3):
        worker = Worker(dsn=dsn, tasks=ALL)
        await worker.start()
        for _ in range(turns):
            await asyncio.sleep(0)
        await worker.stop(0.0)
        assert "running" not in eyes.states(), turns
    assert eyes.all("SELECT * FROM pgqueue.worker") == []
    assert sum(eyes.states().values()) == 200


async def test_a_claim_that_is_committed_while_its_worker_leaves_is_handed_back(dsn: str, eyes: Eyes) -> None:
    """It was cut off, and the server had it already: it ends after we have looked what is ours."""
    async with work(dsn, *ALL) as worker:
        await until(lambda: worker.services.fetcher._state.claims.settled >= 1)
        real = worker.services.reconciler.reconcile

        async def reconcile() -> bool:
            worker.services.reconciler.reconcile = real  # type: ignore[method-assign]
            sure = await real()
            eyes.do(
                "INSERT INTO pgqueue.job (state, task, worker_id, claim, attempt, started_at) "
                "VALUES ('running', 'x', %s, 1, 1, now())",
                worker.worker_id,
            )
            return sure

        worker.services.reconciler.reconcile = reconcile  # type: ignore[method-assign]
        assert await worker.stop(0.0) == 0
    assert eyes.all("SELECT state, attempt FROM pgqueue.job") == [("available", 0)]
    assert eyes.all("SELECT * FROM pgqueue.worker") == []


async def test_what_is_brought_while_the_worker_leaves_is_given_back(
    dsn: str, eyes: Eyes, conn: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A claim answered after the last flush: it was written by nobody, and reconciliation took it for known."""
    brought: list[Job] = []
    async with work(dsn, *ALL) as worker:
        deliver = worker.services.held_jobs.deliver
        monkeypatch.setattr(worker.services.held_jobs, "deliver", brought.extend)
        put(dsn, says.new("late"))
        await until(lambda: brought)
        loop, stop = asyncio.get_running_loop(), worker.services.heartbeat.stop

        def late() -> None:
            conn.execute("SELECT FROM pgqueue.job_running FOR UPDATE")  # so that the first flush leaves it
            loop.call_soon_threadsafe(deliver, brought)
            loop.call_soon_threadsafe(loop.call_later, 0.2, conn.rollback)
            stop()

        monkeypatch.setattr(worker.services.heartbeat, "stop", late)
        assert await worker.stop(0.0) == 0
    assert eyes.all("SELECT state, attempt FROM pgqueue.job") == [("available", 0)]
    assert eyes.all("SELECT * FROM pgqueue.worker") == []


async def test_an_error_that_does_not_pass_ends_run_with_it(dsn: str, eyes: Eyes) -> None:
    async with work(dsn, *ALL) as worker:
        running = asyncio.ensure_future(worker.run())
        await asyncio.to_thread(apply_ddl, dsn, "DROP SCHEMA pgqueue CASCADE")
        worker.services.fetcher.wake()
        # Which of its services asks first decides what it is told.
        with pytest.raises((psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName)):
            await asyncio.wait_for(running, 30)
        assert await worker.stop(1.0) == 0
    await until(lambda: eyes.backends() == [])


@pytest.mark.second
async def test_half_a_worker_gives_no_sign_of_life_and_another_runs_its_jobs(dsn: str, eyes: Eyes) -> None:
    """One service has failed for good: it ends, and if nobody ends it, it must not look alive."""
    put(dsn, waits.new("x"))
    async with work(dsn, *ALL, lease=1.0) as worker:
        await stage.started.get()
        await until(worker.services.election.leads)

        async def broken() -> float:
            raise ZeroDivisionError("a bug")

        worker.services.scheduler._promote = broken  # type: ignore[method-assign]
        worker.services.scheduler.wake()
        with pytest.raises(ZeroDivisionError):
            await asyncio.wait_for(worker.run(), 30)
        assert worker.state.phase == "quiet"
        put(dsn, says.new("later"))
        async with work(dsn, *ALL, lease=1.0) as other:
            assert await asyncio.wait_for(stage.started.get(), 30) == "x"
            stage.go.set()
            await until(eyes.done(2))
            assert eyes.all("SELECT DISTINCT worker_id FROM pgqueue.job_done") == [(other.worker_id,)]


@pytest.mark.promise("F217")
@pytest.mark.parametrize("service", ["fetcher", "completer", "notifier", "promotion"])
async def test_a_service_that_the_application_cancels_ends_the_worker(
    service: str, dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A shutdown of the application's own may cancel all tasks of the loop. Half a worker must not look alive."""
    async with work(dsn, *ALL) as worker:
        [task] = [task for task in asyncio.all_tasks() if task.get_name() == f"pgqueue-{service}"]
        task.cancel()
        with pytest.raises(RuntimeError, match="cancels tasks that are not its own"):
            await asyncio.wait_for(worker.run(), 30)
        assert worker.state.phase == "quiet"
    assert f"pgqueue-{service} failed for good" in caplog.text


SERVICES = ["fetcher", "completer", "unblocker", "ratelimiter", "progress", "notifier", "renewal", "ticks"]


@pytest.mark.promise("F236")
@pytest.mark.parametrize("services", [["completer"], ["fetcher"], SERVICES], ids=" ".join)
async def test_a_worker_whose_services_a_job_cancels_writes_what_has_ended_and_ends_soon(
    services: list[str], dsn: str, eyes: Eyes
) -> None:
    """Without its completer no outcome was written, and the worker waited ten seconds for them."""
    put(dsn, cancels_services.new(services))
    async with work(dsn, *ALL) as worker:
        with pytest.raises(RuntimeError, match="cancels tasks that are not its own"):
            await asyncio.wait_for(worker.run(), 30)
        stopping = time.monotonic()
        assert await worker.stop(10.0) == 0
        assert time.monotonic() - stopping < 5.0
    assert eyes.states() == {"completed": 1}
    assert eyes.all("SELECT id FROM pgqueue.worker") == []


@pytest.mark.promise("F217")
@pytest.mark.parametrize("service", [Fetcher, Completer, Unblocker, RateLimiter])
async def test_a_service_that_dies_of_no_memory_ends_the_worker(
    service: Any, dsn: str, eyes: Eyes, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its step has none, which is tried again. But there is none for the line that says so either."""
    first, step = iter([True]), service._step

    async def steps(self: Any) -> None:
        if next(first, False):
            raise MemoryError
        await step(self)

    def described(error: BaseException) -> str:
        raise MemoryError

    monkeypatch.setattr(service, "_step", steps)
    monkeypatch.setattr(backoff, "described", described)
    async with work(dsn, *ALL) as worker:
        with pytest.raises(MemoryError):
            await asyncio.wait_for(worker.run(), 30)
        assert worker.state.phase == "quiet"
    assert "failed for good: MemoryError" in caplog.text
    assert eyes.all("SELECT id FROM pgqueue.worker") == []


async def test_a_step_of_a_service_that_has_no_memory_is_tried_again(
    dsn: str, eyes: Eyes, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, flush = iter([True]), Completer._flush

    async def flushes(self: Completer, batch: Any) -> None:
        if next(first, False):
            raise MemoryError
        await flush(self, batch)

    monkeypatch.setattr(Completer, "_flush", flushes)
    put(dsn, says.new("x"))
    async with work(dsn, *ALL) as worker:
        await until(eyes.done(1))
        assert worker.state.phase == "running"
    assert "complete: MemoryError; trying again" in caplog.text
    assert stage.ran == ["x"]


async def test_a_second_row_of_a_running_job_does_not_end_the_worker(dsn: str, eyes: Eyes) -> None:
    [job] = put(dsn, waits.new("x"))
    async with work(dsn, *ALL) as worker:
        await stage.started.get()
        eyes.do(
            "INSERT INTO pgqueue.job (task, id, enqueued_at) "
            "SELECT 'worker.says', id, enqueued_at FROM pgqueue.job_running"
        )
        put(dsn, *[says.new("neighbour") for _ in range(5)])
        await until(eyes.done(5), 30.0)
        assert eyes.all("SELECT id, state, reason FROM pgqueue.job_dead") == [(job, "failed", "refused")]
        assert worker.state.phase == "running"
        stage.go.set()
        await until(eyes.done(6))


# Taken for dead ------------------------------------------------------------------------------------------------------


@pytest.mark.promise("F01")
async def test_a_worker_taken_for_dead_begins_anew_and_a_run_that_it_is_given_again_goes_on(
    dsn: str, eyes: Eyes, caplog: pytest.LogCaptureFixture
) -> None:
    [job] = put(dsn, waits.new("x"))
    async with work(dsn, *ALL, lease=1.0) as worker:
        await stage.started.get()
        first = worker.worker_id
        eyes.do("UPDATE pgqueue.worker SET dead_at = now()")
        await worker.services.rescue._move(first)
        await until(lambda: worker.worker_id != first)
        claim = "SELECT claim FROM pgqueue.job_running WHERE worker_id = %s"
        await until(lambda: eyes.one(claim, worker.worker_id) == worker.state.held[job].claim)
        assert len(worker.services.executor._running.runs) == 1
        stage.go.set()
        await until(lambda: eyes.done(1)() and not worker.state.held)
        assert worker.services.completer.fenced == 0
        assert stage.started.empty()  # it ran once
        assert eyes.one("SELECT worker_id FROM pgqueue.job WHERE id = %s", job) == worker.worker_id
        assert "was taken for dead" in caplog.text


async def test_a_worker_that_stops_as_it_begins_anew_leaves_no_heartbeat_behind(dsn: str, eyes: Eyes) -> None:
    """Its registration comes in the moment in which the first heartbeat is stopped, and starts another one."""
    async with work(dsn, *ALL) as worker:
        services, first = worker.services, worker.services.heartbeat
        loop, stop = asyncio.get_running_loop(), first.stop

        async def register_anew() -> None:
            eyes.do("UPDATE pgqueue.worker SET dead_at = now()")
            services._serve(services._register_anew(worker.worker_id), "register")
            await until(lambda: services.heartbeat is not first)

        def stops() -> None:
            stop()
            asyncio.run_coroutine_threadsafe(register_anew(), loop).result(30)

        first.stop = stops  # type: ignore[method-assign]
    assert services.heartbeat is not first
    assert not services.heartbeat._thread.is_alive() and not first._thread.is_alive()
    assert eyes.all("SELECT id FROM pgqueue.worker WHERE dead_at IS NULL") == []


async def test_the_answer_to_a_claim_from_before_it_was_taken_for_dead_starts_nothing(dsn: str, eyes: Eyes) -> None:
    """It comes when the worker has another id, whose lease says nothing of these jobs: others run them."""
    async with work(dsn, *ALL, lease=1.0) as worker:
        first, run = worker.worker_id, worker.services.fetch_session.run
        late: list[list[Any]] = []

        async def answers_late(*messages: Any, **options: Any) -> list[Any]:
            answers = await run(*messages, **options)
            if any("claim" in message.params for message in messages) and eyes.states() == {"running": 1} and not late:
                late.append(answers)
                eyes.do("UPDATE pgqueue.worker SET dead_at = now() WHERE id = %s", first)
                await until(lambda: worker.worker_id != first)
            return answers

        worker.services.fetch_session.run = answers_late  # type: ignore[method-assign]
        [job] = put(dsn, waits.new("x"))
        await until(lambda: late and worker.worker_id != first)
        await worker.services.rescue.strays()  # here, as it happens; others would do it, too
        stage.go.set()
        await until(eyes.done(1))
        assert stage.started.qsize() == 1
        assert worker.services.completer.fenced == 0
        assert eyes.one("SELECT worker_id FROM pgqueue.job WHERE id = %s", job) == worker.worker_id


async def test_a_worker_taken_for_dead_while_the_database_is_away_registers_when_it_is_back(
    dsn: str, eyes: Eyes, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with work(dsn, *ALL, lease=1.0) as worker:
        first = worker.worker_id
        tries = []

        def away(state: WorkerState) -> int:
            tries.append(1)
            if len(tries) < 3:
                raise psycopg.OperationalError("connection refused")
            return enter(state)

        monkeypatch.setattr(registration, "enter", away)
        eyes.do("UPDATE pgqueue.worker SET dead_at = now()")
        await until(lambda: worker.worker_id != first)
        put(dsn, says.new("after"))
        await until(eyes.done(1))


def test_a_worker_may_be_started_again_on_another_event_loop(dsn: str, eyes: Eyes) -> None:
    """As a web application does under a test client. What waits on a loop is made with the services."""
    worker = pgqueue.Worker(dsn=dsn, queues=["default"], tasks=[says], poll=60.0)

    async def life(done: int) -> None:
        async with worker:
            put(dsn, says.new("again"))
            await until(eyes.done(done))

    for done in (1, 2):
        asyncio.run(life(done))


# Without a sign of life ----------------------------------------------------------------------------------------------


@pytest.mark.second
@pytest.mark.promise("F06")
async def test_a_worker_that_cannot_beat_takes_no_more_jobs_and_goes_on_when_it_can(dsn: str, eyes: Eyes) -> None:
    async with work(dsn, *ALL, lease=4.0, poll=60.0) as worker:
        first = worker.worker_id
        put(dsn, waits.new("x"))
        await stage.started.get()
        with psycopg.connect(dsn) as stranger:
            # Holds the beats off, and not the claims: they lock the row FOR KEY SHARE.
            stranger.execute("SELECT FROM pgqueue.worker FOR NO KEY UPDATE")
            put(dsn, says.new("in time"))
            await until(eyes.done(1))
            await until(worker.services.heartbeat.late)
            put(dsn, says.new("late"))
            await asyncio.sleep(0.5)  # nothing may happen in this time
            assert eyes.states() == {"running": 1, "completed": 1, "available": 1}
            stage.go.set()
            await until(eyes.done(2))  # what it has it may finish
            assert stage.ran == ["in time"]
        await until(eyes.done(3))
        assert worker.worker_id == first
    assert eyes.all("SELECT DISTINCT attempt, crashes FROM pgqueue.job") == [(1, 0)]


# Idle ----------------------------------------------------------------------------------------------------------------


@pytest.mark.second
@pytest.mark.promise("E13", "F09")
async def test_an_idle_worker_takes_three_connections_and_few_round_trips(
    dsn: str, eyes: Eyes, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[str] = []
    real = sessions.send

    async def counted(conn: Any, link: Any, *messages: Any, **options: Any) -> list[Any]:
        sent.append(messages[-1].sql)
        return await real(conn, link, *messages, **options)

    monkeypatch.setattr(sessions, "send", counted)
    monkeypatch.setattr(notifier, "send", counted)
    seconds = 10.0
    async with work(dsn, *ALL) as worker:
        await until(worker.services.election.leads)
        await until(lambda: worker.services.fetcher.fetches)  # one or two: LISTEN may have come before the first
        at_start = [loop for loop in worker.services.duties.loops if not loop.duty.first]
        await until(lambda: all(loop.report.ran_at for loop in at_start))  # the first rounds are of the start
        sent.clear()
        await asyncio.sleep(seconds)  # the time is what is measured
        number = len(sent)  # heartbeats among them
        assert len(eyes.backends()) <= 4  # one more than a worker that does not lead
    print(f"{number / seconds:.2f} transactions a second, alone and leading")
    # Leading; the promise is 3. Pauses are random, so a short window sees more or fewer of the duties; 1.1 are usual.
    assert number <= 2.0 * seconds


@pytest.mark.promise("F09")
async def test_a_worker_that_has_nothing_to_write_any_more_is_back_at_three_connections(
    dsn: str, eyes: Eyes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(completer, "IDLE_SECONDS", 0.1)
    usual = ["beat", "fetch", "housekeeping", "listen"]  # the third one is the leader's
    async with work(dsn, *ALL) as worker:
        await until(worker.services.election.leads)
        for number in (1, 2):
            put(dsn, says.new("x"))
            await until(eyes.done(number))
            assert worker.services.complete_session.generation == number
            await until(lambda: [name.split()[1] for _, name in eyes.backends()] == usual)


@pytest.mark.second
async def test_without_listen_jobs_are_found_by_polling_and_all_duties_done(dsn: str, eyes: Eyes) -> None:
    victim = Taker(dsn, lease=1.0)
    put(dsn, says.new("rescued"))
    assert len(await victim.fetch()) == 1
    await victim.close()
    eyes.do("UPDATE pgqueue.ring SET since = now() - interval '5 hours' WHERE kind = 'done'")
    async with work(dsn, *ALL, listen_dsn="off", poll=0.05, lease=1.0) as worker:
        put(dsn, says.new("polled"), says.using(delay=0.3).new("promoted"))
        await until(eyes.done(3), 30.0)
        await until(lambda: eyes.one("SELECT bin FROM pgqueue.ring WHERE kind = 'done'") == 1)
        assert worker.services.election.leads()
        names = {name.removeprefix("pgqueue ") for _, name in eyes.backends()}
        assert names == {"beat", "complete", "fetch", "housekeeping", "release"}
    assert stage.ran == ["polled", "promoted", "rescued"]


@pytest.mark.parametrize(
    ("error", "goes_on"),
    [(psycopg.OperationalError("away"), True), (psycopg.errors.InsufficientPrivilege("no"), False)],
)
async def test_a_worker_warms_up_as_well_as_it_can_but_not_without_its_rights(
    dsn: str, monkeypatch: pytest.MonkeyPatch, error: psycopg.Error, goes_on: bool
) -> None:
    worker = Worker(dsn=dsn, tasks=ALL)
    await worker.prepare()

    async def refused(*statements: Any) -> None:
        raise error

    monkeypatch.setattr(worker.services.complete_session, "run", refused)
    try:
        if goes_on:
            await worker.warm()
        else:
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                await worker.warm()
    finally:
        await worker.stop()
