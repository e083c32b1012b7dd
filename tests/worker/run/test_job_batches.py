"""Batches: many jobs are one call of the handler, and each of them ends once, whatever fails, asks or stops."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from time import sleep
from typing import Any

import psycopg
import pytest
from accounts import accounts
from transactional_tasks import BOTH
from workers import Eyes, until, work

import pgqueue
from pgqueue import Batch, Cancel, Fail, Job, Retry, RetryPolicy, Snooze, testing
from pgqueue.client import middleware
from pgqueue.client.tasks import Task, task
from pgqueue.jobs.outcomes import Cancelled
from pgqueue.worker.run.job_batches import JobBatches

__all__ = ["accounts"]
SOON = RetryPolicy(attempts=2, first=0.01, most=0.02)


@pytest.fixture(autouse=True)
def own_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hooks and the middleware of one test are no other's."""
    for declared in ("_on_start", "_on_finish", "_middleware"):
        monkeypatch.setattr(middleware, declared, [])


def batched(on_loop: bool, handler: Callable[[list[Job], list[int]], Any], **options: Any) -> Task[[int], Any]:
    """A task with batches: of a plain handler, or of the same one called from the loop."""
    name = f"batch.{handler.__qualname__.replace('.<locals>', '')}"
    given: dict[str, Any] = {"batch": Batch(20, wait=0.05), "retry": SOON} | options

    async def ahandler(jobs: list[Job], numbers: list[int]) -> Any:
        return handler(jobs, numbers)

    made: Task[[int], Any] = task(name=name, **given)(ahandler if on_loop else handler)
    return made


def enqueued(dsn: str, asked: Task[[int], Any], *numbers: int) -> list[int]:
    """The ids of these jobs, enqueued one by one in one transaction."""
    with psycopg.connect(dsn) as conn:
        return [asked.enqueue(conn, number).id for number in numbers]


def all_in(eyes: Eyes, state: str, number: int) -> Callable[[], bool]:
    return lambda: eyes.one("SELECT count(*) FROM pgqueue.job WHERE state = %s", state) == number


def ends(eyes: Eyes) -> dict[int, tuple[str, Any]]:
    """State and result of each job, by its argument."""
    rows = eyes.all("SELECT (args->>'numbers')::int, state, to_jsonb(j)->'result' FROM pgqueue.job j ORDER BY 1")
    return {number: (state, result) for number, state, result in rows}


@pytest.mark.promise("F281")
@BOTH
async def test_many_jobs_are_one_call_and_each_has_its_own_result(dsn: str, eyes: Eyes, on_loop: bool) -> None:
    calls: list[tuple[list[int], list[int]]] = []

    def squares(jobs: list[Job], numbers: list[int]) -> list[int]:
        calls.append(([job.id for job in jobs], numbers))
        return [number * number for number in numbers]

    asked = batched(on_loop, squares)
    ids = enqueued(dsn, asked, *range(45))
    async with work(dsn, asked, concurrency=2):
        await until(all_in(eyes, "completed", 45))
    assert ends(eyes) == {number: ("completed", number * number) for number in range(45)}
    assert sorted(number for _, numbers in calls for number in numbers) == [*range(45)]
    assert sorted(id for each, _ in calls for id in each) == ids
    assert max(len(numbers) for _, numbers in calls) == 20
    assert len(calls) <= 5  # never one for each job
    assert all(ids.index(id) == number for each, numbers in calls for id, number in zip(each, numbers, strict=True))


@pytest.mark.promise("F281")
@BOTH
async def test_a_batch_answers_for_each_of_its_jobs(dsn: str, eyes: Eyes, on_loop: bool) -> None:
    answers = [7, ValueError("bad"), Retry(3600), Fail("no"), Cancel("gone"), Snooze(3600), None, object()]
    sizes: list[int] = []

    def answering(jobs: list[Job], numbers: list[int]) -> list[Any]:
        sizes.append(len(numbers))
        return [answers[number] for number in numbers]

    asked = batched(on_loop, answering, batch=Batch(8, wait=20), retry=RetryPolicy(attempts=2, first=3600))
    enqueued(dsn, asked, *range(8))
    async with work(dsn, asked) as worker:
        await until(
            lambda: eyes.one("SELECT count(*) FROM pgqueue.job WHERE state NOT IN ('available', 'running')") == 8
        )
        await until(lambda: not worker.state.held)
    assert sizes == [8]
    assert {number: state for number, (state, _) in ends(eyes).items()} == {
        0: "completed", 1: "scheduled", 2: "scheduled", 3: "failed", 4: "cancelled", 5: "scheduled", 6: "completed",
        7: "failed",
    }  # fmt: skip
    said = eyes.all("SELECT outcome, error_type, message FROM pgqueue.attempt ORDER BY job_id")
    assert said[:2] == [("failed", "ValueError", "bad"), ("retried", "Retry", "again in 3600 s")]
    assert said[2:5] == [("failed", "Fail", "no"), ("cancelled", None, "gone"), ("snoozed", None, None)]
    assert "the result cannot be stored" in said[5][2]
    spent = dict(eyes.all("SELECT (args->>'numbers')::int, attempt FROM pgqueue.job WHERE state = 'scheduled'"))
    assert spent == {1: 1, 2: 1, 5: 0}


@pytest.mark.promise("F282")
@BOTH
async def test_after_an_exception_each_job_runs_again_by_itself_in_the_same_attempt(
    dsn: str, eyes: Eyes, on_loop: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The naive way fails the neighbours of the bad job, as often as it is tried."""
    calls: list[list[int]] = []

    def fragile(jobs: list[Job], numbers: list[int]) -> None:
        calls.append(numbers)
        if 3 in numbers:
            raise ValueError("three")

    asked = batched(on_loop, fragile, batch=Batch(10, wait=20))
    enqueued(dsn, asked, *range(10))
    with caplog.at_level(logging.WARNING, "pgqueue"):
        async with work(dsn, asked):
            await until(all_in(eyes, "completed", 9))
            await until(all_in(eyes, "failed", 1))
    assert sorted(calls[0]) == [*range(10)]
    # Two attempts of the bad job: the first one goes on by itself, and so does the second.
    assert sorted(calls[1:]) == sorted([[number] for number in range(10)] + [[3]])
    assert eyes.all("SELECT DISTINCT attempt FROM pgqueue.job_done") == [(1,)]
    assert eyes.all("SELECT attempt, outcome FROM pgqueue.attempt ORDER BY attempt") == [(1, "failed"), (2, "failed")]
    assert "a batch of 10 jobs (batch." in caplog.text
    assert "each of them runs again by itself: ValueError: three" in caplog.text


@pytest.mark.promise("F282")
async def test_a_job_with_one_attempt_does_not_fail_for_its_neighbour(dsn: str, eyes: Eyes) -> None:
    def fragile(jobs: list[Job], numbers: list[int]) -> None:
        if 0 in numbers:
            raise ValueError("zero")

    asked = batched(False, fragile, batch=Batch(5, wait=20), retry=1)
    enqueued(dsn, asked, *range(5))
    async with work(dsn, asked):
        await until(all_in(eyes, "completed", 4))
        await until(all_in(eyes, "failed", 1))
    assert ends(eyes)[0][0] == "failed"


@pytest.mark.promise("F282")
async def test_a_bad_job_fails_one_batch_however_long_its_neighbours_last(
    dsn: str, eyes: Eyes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Jobs that wait at hand go back after two looks. These would meet in a batch again, and the bad job with them."""
    monkeypatch.setattr("pgqueue.worker.held_jobs.AT_HAND_SECONDS", 0.05)
    sizes: list[int] = []

    def fragile(jobs: list[Job], numbers: list[int]) -> None:
        sizes.append(len(numbers))
        if 19 in numbers:
            raise ValueError("nineteen")
        sleep(0.03)

    asked = batched(False, fragile, batch=Batch(20, wait=1))
    enqueued(dsn, asked, *range(20))
    async with work(dsn, asked, concurrency=1):
        await until(all_in(eyes, "completed", 19))
        await until(all_in(eyes, "failed", 1))
    assert sizes == [20] + [1] * 21


@pytest.mark.promise("F281")
@BOTH
@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ([1, 2], "the batch has 3 jobs, and its handler has answered a list of 2: it must be as long"),
        ("abc", "the handler of a batch answers None or a list, one value for each job; this is a str"),
    ],
    ids=["too short", "no list"],
)
async def test_a_wrong_answer_fails_each_job_and_says_why(
    dsn: str, eyes: Eyes, on_loop: bool, answer: Any, said: str
) -> None:
    def wrong(jobs: list[Job], numbers: list[int]) -> Any:
        return answer

    asked = batched(on_loop, wrong, batch=Batch(3, wait=20), retry=1)
    enqueued(dsn, asked, *range(3))
    async with work(dsn, asked):
        await until(all_in(eyes, "failed", 3))
    assert eyes.all("SELECT error_type, message FROM pgqueue.attempt") == [("WrongAnswer", said)] * 3


@pytest.mark.promise("F281")
@BOTH
@pytest.mark.parametrize(
    ("ask", "state"), [(Snooze(3600), "scheduled"), (Fail("no"), "failed"), (Cancel("no"), "cancelled")]
)
async def test_what_the_handler_raises_to_ask_holds_for_all(
    dsn: str, eyes: Eyes, on_loop: bool, ask: Exception, state: str
) -> None:
    calls: list[int] = []

    def asks(jobs: list[Job], numbers: list[int]) -> None:
        calls.append(len(numbers))
        raise ask

    asked = batched(on_loop, asks, batch=Batch(4, wait=20))
    enqueued(dsn, asked, *range(4))
    async with work(dsn, asked):
        await until(all_in(eyes, state, 4))
    assert calls == [4]


@pytest.mark.promise("F281")
async def test_arguments_that_do_not_fit_cost_only_their_own_job(dsn: str, eyes: Eyes) -> None:
    calls: list[list[int]] = []

    def counted(jobs: list[Job], numbers: list[int]) -> None:
        calls.append(numbers)

    asked = batched(False, counted, batch=Batch(6, wait=20))
    with psycopg.connect(dsn) as conn:
        for args in ('{"numbers": "x"}', '{"numbers": 1}', '{"numbers": 2}', "{}", '{"numbers": 3}', '{"numbers": 4}'):
            conn.execute("INSERT INTO pgqueue.job (task, args) VALUES (%s, %s)", [asked.name, args])
    async with work(dsn, asked):
        await until(all_in(eyes, "completed", 4))
        await until(all_in(eyes, "scheduled", 2))
    assert sorted(number for each in calls for number in each) == [1, 2, 3, 4]
    assert eyes.all("SELECT DISTINCT outcome, error_type FROM pgqueue.attempt") == [("failed", "InvalidArguments")]
    assert eyes.all("SELECT DISTINCT attempt FROM pgqueue.job_scheduled") == [(0,)]


@pytest.mark.promise("F283")
@BOTH
async def test_the_effects_and_all_ends_of_a_transactional_batch_are_one_commit(
    dsn: str, accounts: Eyes, on_loop: bool
) -> None:
    def notes(jobs: list[Job], numbers: list[int]) -> list[Any]:
        rows = [(job.id, str(number)) for job, number in zip(jobs, numbers, strict=True)]
        jobs[-1].connection.cursor().executemany("INSERT INTO effect VALUES (%s, %s)", rows)
        jobs[0].enqueue(after, 1)
        return _answers(numbers)

    async def anotes(jobs: list[Job], numbers: list[int]) -> list[Any]:
        rows = [(job.id, str(number)) for job, number in zip(jobs, numbers, strict=True)]
        conn = await jobs[-1].aconnection()
        await conn.cursor().executemany("INSERT INTO effect VALUES (%s, %s)", rows)
        jobs[0].enqueue(after, 1)
        return _answers(numbers)

    def _answers(numbers: list[int]) -> list[Any]:
        return [{0: 5, 1: Fail("one"), 2: Retry(3600), 3: Snooze(3600), 4: ValueError("x")}.get(n) for n in numbers]

    @task(name="batch.after", queue="nobody")
    def after(number: int) -> None: ...

    options: Any = {"batch": Batch(8, wait=20), "transactional": True}
    asked: Task[[int], Any] = task(name="batch.notes", retry=RetryPolicy(first=3600), **options)(
        anotes if on_loop else notes
    )
    enqueued(dsn, asked, *range(8))
    async with work(dsn, asked) as worker:
        await until(lambda: accounts.one("SELECT count(*) FROM effect") == 8)
        await until(lambda: not worker.state.held)
    ended = (
        "SELECT DISTINCT xmin::text FROM (SELECT xmin FROM pgqueue.job_done UNION ALL SELECT xmin FROM pgqueue.job_dead"
    )
    ended += " UNION ALL SELECT xmin FROM pgqueue.job_scheduled UNION ALL SELECT xmin FROM pgqueue.job_available) AS x"
    [(one,)] = accounts.all(ended)
    assert accounts.all("SELECT DISTINCT xmin::text FROM effect") == [(one,)]
    states = "SELECT (args->>'numbers')::int, state FROM pgqueue.job WHERE task = 'batch.notes' ORDER BY 1"
    assert accounts.all(states) == [
        (0, "completed"), (1, "failed"), (2, "scheduled"), (3, "scheduled"), (4, "scheduled"), (5, "completed"),
        (6, "completed"), (7, "completed"),
    ]  # fmt: skip
    assert accounts.one("SELECT count(*) FROM pgqueue.job WHERE task = 'batch.after'") == 1
    assert worker.services.completer.fenced == 0


@pytest.mark.promise("F283")
@BOTH
async def test_a_transactional_batch_that_fails_leaves_nothing_and_each_job_goes_on_by_itself(
    dsn: str, accounts: Eyes, on_loop: bool
) -> None:
    def notes(jobs: list[Job], numbers: list[int]) -> None:
        for job in jobs:
            job.connection.execute("INSERT INTO effect VALUES (%s, 'x')", [job.id])
        if 2 in numbers:
            raise ValueError("two")

    async def anotes(jobs: list[Job], numbers: list[int]) -> None:
        for job in jobs:
            await (await job.aconnection()).execute("INSERT INTO effect VALUES (%s, 'x')", [job.id])
        if 2 in numbers:
            raise ValueError("two")

    options: Any = {"batch": Batch(5, wait=20), "transactional": True, "retry": 1}
    asked: Task[[int], Any] = task(name="batch.broken", **options)(anotes if on_loop else notes)
    ids = enqueued(dsn, asked, *range(5))
    async with work(dsn, asked):
        await until(all_in(accounts, "completed", 4))
        await until(all_in(accounts, "failed", 1))
    assert sorted(id for (id,) in accounts.all("SELECT job FROM effect")) == [id for id in ids if id != ids[2]]


@pytest.mark.promise("F283")
@BOTH
async def test_a_batch_of_which_one_job_was_given_away_commits_nothing(dsn: str, accounts: Eyes, on_loop: bool) -> None:
    """Without the lock of all rows the others would end, and the effects of the lost job would be kept. The lost job
    is another worker's by then: it must not run again here."""
    calls: list[list[int]] = []

    def given_away(jobs: list[Job]) -> None:
        calls.append([job.id for job in jobs])
        if len(jobs) > 1:
            accounts.do("DELETE FROM pgqueue.job_running WHERE id = %s", ids[3])

    def notes(jobs: list[Job], numbers: list[int]) -> None:
        for job in jobs:
            job.connection.execute("INSERT INTO effect VALUES (%s, 'x')", [job.id])
        given_away(jobs)

    async def anotes(jobs: list[Job], numbers: list[int]) -> None:
        for job in jobs:
            await (await job.aconnection()).execute("INSERT INTO effect VALUES (%s, 'x')", [job.id])
        given_away(jobs)

    options: Any = {"batch": Batch(5, wait=20), "transactional": True}
    asked: Task[[int], Any] = task(name="batch.given_away", **options)(anotes if on_loop else notes)
    ids = enqueued(dsn, asked, *range(5))
    async with work(dsn, asked) as worker:
        await until(all_in(accounts, "completed", 4))
        await until(lambda: not worker.state.held)
    rest = [id for id in ids if id != ids[3]]
    assert sorted(calls[0]) == ids
    assert sorted(calls[1:]) == [[id] for id in rest]
    assert sorted(id for (id,) in accounts.all("SELECT job FROM effect")) == rest
    assert not worker.services.running.given_away


@pytest.mark.promise("F283")
async def test_the_jobs_of_a_batch_that_fails_do_not_run_again_on_a_worker_that_had_seemed_dead(
    dsn: str, eyes: Eyes
) -> None:
    """Other workers are given them: to run each by itself would run each beside them."""
    calls: list[int] = []
    began, fails = asyncio.Event(), asyncio.Event()

    async def handler(jobs: list[Job], numbers: list[int]) -> None:
        calls.append(len(jobs))
        began.set()
        await fails.wait()
        raise ValueError("late")

    asked: Task[[int], Any] = task(name="batch.late", batch=Batch(3, wait=20))(handler)
    enqueued(dsn, asked, 0, 1, 2)
    async with work(dsn, asked) as worker:
        await began.wait()
        eyes.do("DELETE FROM pgqueue.job_running")  # other workers have them
        worker.services.declared_dead(worker.worker_id)
        await until(lambda: worker.state.claims.void(1))
        fails.set()
        await until(lambda: not worker.state.held)
    assert calls == [3]


@pytest.mark.promise("F298")
async def test_one_job_of_a_batch_is_cancelled_and_the_others_run(dsn: str, eyes: Eyes) -> None:
    """While it gathers, while it waits for a slot, and while it runs: then only the handler is told."""
    gate, seen = threading.Event(), dict[int, bool]()
    started = threading.Event()

    def slow(jobs: list[Job], numbers: list[int]) -> None:
        started.set()
        gate.wait(30)
        seen.update({number: job.cancelled for job, number in zip(jobs, numbers, strict=True)})

    asked = batched(False, slow, batch=Batch(4, wait=1))
    async with work(dsn, asked, concurrency=1) as worker:
        running = enqueued(dsn, asked, 0, 1, 2, 3)
        await asyncio.to_thread(started.wait, 30)
        # These wait for the slot, so they are claimed only if there is room at hand.
        [group] = worker.services.running.groups
        group.prefetch = 50
        waiting = enqueued(dsn, asked, 10, 11, 12, 13, 14, 15)
        await until(lambda: len(worker.state.held) == 10)
        with psycopg.connect(dsn) as conn:
            for id in (running[1], waiting[0], waiting[2], waiting[5]):
                pgqueue.cancel(conn, id)
        await until(all_in(eyes, "cancelled", 3))
        await until(
            lambda: (
                worker.services.batches._batches and any(b.cancelled for b in worker.services.batches._batches.values())
            )
        )
        gate.set()
        await until(all_in(eyes, "completed", 7))
    assert seen == {0: False, 1: True, 2: False, 3: False, 11: False, 13: False, 14: False}
    assert group.beyond == group.gathering == 0
    assert not worker.services.batches._places


@pytest.mark.promise("F298")
@pytest.mark.parametrize("called", [False, True], ids=["before the call", "in the call"])
async def test_a_cancel_that_comes_as_the_run_of_a_batch_begins_ends_only_its_job(
    dsn: str, eyes: Eyes, called: bool
) -> None:
    """The run has just taken the first job, so the cancel stops the run. That must not cancel the neighbours."""
    sizes: list[int] = []
    ids: list[int] = []
    stopped: list[bool] = []

    def stop() -> None:
        """Stop the run, as a cancel does that has found the job neither waiting nor in a batch that has begun."""
        done = threading.Event()

        def interrupt() -> None:
            stopped.append(worker.services.executor.interrupt(ids[0], Cancelled("no")))
            done.set()

        loop.call_soon_threadsafe(interrupt)
        done.wait(30)

    @pgqueue.on_start
    def starts(job: Job) -> None:
        if job.id == ids[1] and not called:  # the handler is about to be called
            stop()

    def handler(jobs: list[Job], numbers: list[int]) -> None:
        sizes.append(len(numbers))
        if called and len(numbers) == 3:
            stop()
            for _ in range(1_000_000):
                """The exception is raised at a step in Python."""

    asked = batched(False, handler, batch=Batch(3, wait=20))
    loop = asyncio.get_running_loop()
    ids += enqueued(dsn, asked, 0, 1, 2)
    async with work(dsn, asked) as worker:
        await until(lambda: not worker.state.held and len(sizes) > 0)
    assert stopped == [True]
    assert [state for state, _ in ends(eyes).values()] == ["cancelled", "completed", "completed"]
    assert sizes == ([3, 1, 1] if called else [2])


@pytest.mark.promise("F298")
async def test_middleware_that_cancels_the_first_job_of_a_batch_cancels_no_other(dsn: str, eyes: Eyes) -> None:
    sizes: list[int] = []
    ids: list[int] = []

    @pgqueue.middleware
    async def around(job: Job, call: Callable[[], Any]) -> None:
        await call()
        if job.id == ids[0]:
            raise Cancel("no")

    def handler(jobs: list[Job], numbers: list[int]) -> None:
        sizes.append(len(numbers))

    asked = batched(True, handler, batch=Batch(3, wait=20))
    ids += enqueued(dsn, asked, 0, 1, 2)
    async with work(dsn, asked) as worker:
        await until(lambda: not worker.state.held and len(sizes) > 0)
    assert [state for state, _ in ends(eyes).values()] == ["cancelled", "completed", "completed"]
    assert sizes == [3, 1, 1]


@pytest.mark.promise("F298")
async def test_a_timeout_of_a_batch_lets_each_job_run_again_by_itself(dsn: str, eyes: Eyes) -> None:
    sizes: list[int] = []

    async def hangs(jobs: list[Job], numbers: list[int]) -> None:
        sizes.append(len(numbers))
        if 2 in numbers:
            await asyncio.sleep(60)

    asked: Task[[int], Any] = task(name="batch.hangs", batch=Batch(4, wait=20), retry=1, timeout=0.5)(hangs)
    enqueued(dsn, asked, *range(4))
    async with work(dsn, asked):
        await until(all_in(eyes, "completed", 3))
        await until(all_in(eyes, "failed", 1))
    assert sizes == [4, 1, 1, 1, 1]
    assert eyes.all("SELECT reason FROM pgqueue.job_dead") == [("timeout",)]


@pytest.mark.promise("F298")
@pytest.mark.parametrize(("slots", "failed"), [(10, 1), (2, 4)], ids=["slots are left", "half are lost"])
async def test_a_handler_that_does_not_stop_costs_its_own_job_an_attempt(
    dsn: str, eyes: Eyes, monkeypatch: pytest.MonkeyPatch, slots: int, failed: int
) -> None:
    """It goes on while its jobs run again: what it calls must not reach these runs. Only if no slot is left for them
    does each fail: given back, they would take half of the slots of the next worker."""
    monkeypatch.setattr("pgqueue.worker.run.timeouts.GRACE", 0.2)
    gate, left = threading.Event(), threading.Semaphore(0)
    calls: list[list[int]] = []
    refused: list[int] = []
    begun: list[int] = []
    ended: list[tuple[int, str]] = []

    @pgqueue.on_start
    def starts(job: Job) -> None:
        begun.append(job.id)

    @pgqueue.on_finish
    def finishes(job: Job, outcome: pgqueue.JobOutcome) -> None:
        ended.append((job.id, outcome.name))

    def hangs(jobs: list[Job], numbers: list[int]) -> None:
        calls.append(numbers)
        if 2 not in numbers:
            return
        with suppress(BaseException):  # what stops it, too
            gate.wait(60)
        for job in jobs:
            with pytest.raises(pgqueue.Error, match="after its run is over"):
                job.enqueue(asked, 9)
            refused.append(job.id)
        left.release()

    asked = batched(False, hangs, batch=Batch(4, wait=20), retry=1, timeout=0.3)
    ids = enqueued(dsn, asked, *range(4))
    async with work(dsn, asked, concurrency=slots) as worker:
        await until(lambda: eyes.states() == {"failed": failed} | ({"completed": 3} if failed == 1 else {}))
        gate.set()
        for _ in range(2 if failed == 1 else 1):
            assert await asyncio.to_thread(left.acquire, timeout=30)
        await until(lambda: not worker.state.held)
    assert sorted(calls[0]) == [0, 1, 2, 3]
    assert sorted(calls[1:]) == ([[0], [1], [2], [3]] if failed == 1 else [])
    assert eyes.one("SELECT count(*) FROM pgqueue.job") == 4
    assert eyes.one("SELECT reason FROM pgqueue.job_dead LIMIT 1") == "timeout"
    assert sorted(refused) == sorted(ids + [ids[2]] * (failed == 1))
    assert sorted(begun) == sorted(id for id, _ in ended)
    assert len(begun) == 4 * len({len(each) for each in calls})


@pytest.mark.promise("F298")
async def test_a_worker_that_stops_gives_back_what_gathers_and_what_runs(dsn: str, eyes: Eyes) -> None:
    started = asyncio.Event()

    async def waits(jobs: list[Job], numbers: list[int]) -> None:
        started.set()
        await asyncio.sleep(60)

    asked: Task[[int], Any] = task(name="batch.waits", batch=Batch(3, wait=50))(waits)
    async with work(dsn, asked, concurrency=2) as worker:
        enqueued(dsn, asked, *range(5))
        await started.wait()
        await until(lambda: len(worker.state.held) == 5)
        await worker.stop(0.2)
    assert eyes.all("SELECT state, attempt, crashes FROM pgqueue.job ORDER BY id") == [("available", 0, 0)] * 5
    assert eyes.all("SELECT outcome FROM pgqueue.attempt") == [("interrupted",)] * 3


@pytest.mark.promise("F298")
async def test_a_worker_that_becomes_quiet_runs_at_once_what_has_gathered(dsn: str, eyes: Eyes) -> None:
    def plain(jobs: list[Job], numbers: list[int]) -> None: ...

    asked = batched(False, plain, batch=Batch(100, wait=50))
    async with work(dsn, asked) as worker:
        enqueued(dsn, asked, *range(5))
        await until(lambda: len(worker.state.held) == 5)
        worker.quiet()
        await asyncio.wait_for(worker.run(), 30)
    assert eyes.one("SELECT count(*) FROM pgqueue.job WHERE state IN ('completed', 'available')") == 5


@pytest.mark.promise("F298")
async def test_a_job_waits_for_neighbours_no_longer_than_it_was_told(dsn: str, eyes: Eyes) -> None:
    def plain(jobs: list[Job], numbers: list[int]) -> None: ...

    asked = batched(False, plain, batch=Batch(100, wait=0.3))
    async with work(dsn, asked):
        enqueued(dsn, asked, 1)
        await until(all_in(eyes, "completed", 1))
        taken = eyes.one("SELECT extract(epoch FROM finished_at - started_at)::float8 FROM pgqueue.job_done")
    assert 0.29 <= taken < 5


@pytest.mark.promise("F298")
async def test_what_gathers_takes_one_slot_and_the_others_stay_open(dsn: str, eyes: Eyes) -> None:
    """If each gathered job took a slot, this worker would take no more jobs at 55 of 100, until the wait is over."""
    sizes: list[int] = []

    def gathers(jobs: list[Job], numbers: list[int]) -> None:
        sizes.append(len(jobs))

    @task(name="batch.beside")
    def beside() -> None: ...

    asked = batched(False, gathers, batch=Batch(100, wait=60))
    async with work(dsn, asked, beside, concurrency=10) as worker:
        for number in range(100):  # one by one: none of them may wait for room
            if number == 60:
                with psycopg.connect(dsn) as conn:
                    beside.enqueue(conn)
                await until(all_in(eyes, "completed", 1))
                assert not sizes
            enqueued(dsn, asked, number)
            await until(lambda: len(worker.state.held) == number + 1 or bool(sizes))  # noqa: B023
        await until(all_in(eyes, "completed", 101))
        [group] = worker.services.running.groups
    assert sizes == [100]
    assert group.beyond == group.gathering == 0


@pytest.mark.promise("F298")
async def test_a_large_batch_keeps_no_jobs_of_other_tasks_from_other_workers(dsn: str, eyes: Eyes) -> None:
    """One job gathers for a batch of 10,000. A claim that asks for the rest would bring all the slow jobs there are."""
    gate = asyncio.Event()
    running: list[int] = []

    def gathers(jobs: list[Job], numbers: list[int]) -> None: ...

    @task(name="batch.slow")
    async def slow(job: Job) -> None:
        running.append(job.id)
        await gate.wait()

    asked = batched(False, gathers, batch=Batch(10_000, wait=60))
    async with work(dsn, asked, slow, concurrency=1) as first:
        enqueued(dsn, asked, 0)
        await until(lambda: len(first.state.held) == 1)
        with psycopg.connect(dsn) as conn:
            pgqueue.enqueue_many(conn, [slow.new() for _ in range(1_000)])
        await until(lambda: len(running) == 1)
        assert len(first.state.held) < 10
        async with work(dsn, slow, concurrency=1):
            await until(lambda: len(running) == 2)
            gate.set()
            await until(all_in(eyes, "completed", 1_000))


async def test_hooks_see_each_job_of_a_batch(dsn: str, eyes: Eyes) -> None:
    begun: list[int] = []
    ended: list[tuple[int, str]] = []

    @pgqueue.on_start
    def starts(job: Job) -> None:
        begun.append(job.id)

    @pgqueue.on_finish
    def finishes(job: Job, outcome: pgqueue.JobOutcome) -> None:
        ended.append((job.id, outcome.name))

    @pgqueue.middleware
    def around(job: Job, call: Callable[[], Any]) -> Any:
        return call()

    def answers(jobs: list[Job], numbers: list[int]) -> list[Any]:
        return [None, Cancel("no"), 3]

    asked = batched(False, answers, batch=Batch(3, wait=20), store_result=False)
    ids = enqueued(dsn, asked, 0, 1, 2)
    async with work(dsn, asked) as worker:
        await until(lambda: not worker.state.held and len(ended) == 3)
    assert sorted(begun) == ids
    assert sorted(ended) == [(ids[0], "completed"), (ids[1], "cancelled"), (ids[2], "completed")]
    assert eyes.all("SELECT result FROM pgqueue.job_done") == [(None,), (None,)]


@BOTH
@pytest.mark.parametrize("fails", [False, True], ids=["in one call", "each by itself"])
async def test_what_hooks_and_middleware_enqueue_for_a_job_of_a_batch_is_there(
    dsn: str, eyes: Eyes, on_loop: bool, fails: bool
) -> None:
    """Each job has its hook's, also if its batch fails first. The middleware is that of the first job."""

    @task(name="batch.follows", queue="nobody")
    def follows(said: str, of: int) -> None: ...

    @pgqueue.on_start
    def starts(job: Job) -> None:
        if job.task == asked.name:
            job.enqueue(follows, "start", job.id)

    @pgqueue.middleware
    def around(job: Job, call: Callable[[], Any]) -> Any:
        if job.task == follows.name:
            return call()
        job.enqueue(follows, "before", job.id)
        value = call()
        job.enqueue(follows, "after", job.id)
        return value

    @pgqueue.middleware
    async def aaround(job: Job, call: Callable[[], Any]) -> Any:
        job.enqueue(follows, "before", job.id)
        value = await call()
        job.enqueue(follows, "after", job.id)
        return value

    def handler(jobs: list[Job], numbers: list[int]) -> None:
        for job in jobs:
            job.enqueue(follows, "handler", job.id)
        if fails and len(jobs) > 1:
            raise ValueError("apart")

    def followed(ids: list[int]) -> list[tuple[str, int]]:
        """By what, and by which of these jobs, counted from 0."""
        found = "SELECT args->>'said', (args->>'of')::bigint FROM pgqueue.job WHERE task = 'batch.follows'"
        return sorted((said, ids.index(of)) for said, of in eyes.all(found) if of in ids)

    asked = batched(on_loop, handler, batch=Batch(3, wait=20))
    ids = enqueued(dsn, asked, 0, 1, 2)
    async with work(dsn, asked):
        await until(all_in(eyes, "completed", 3))
    of_each = [(said, number) for said in ("handler", "start") for number in range(3)]
    if not fails:
        assert followed(ids) == [("after", 0), ("before", 0), *of_each]
        return
    ids_of_drain = enqueued(dsn, asked, 0, 1, 2)
    await testing.adrain(dsn=dsn) if on_loop else await asyncio.to_thread(testing.drain, dsn=dsn)
    of_each += [(said, number) for said in ("after", "before") for number in range(3)]
    assert followed(ids) == followed(ids_of_drain) == sorted(of_each)


@pytest.mark.parametrize("end", ["quiet", "taken for dead"])
async def test_hooks_are_told_of_jobs_that_go_back_after_their_batch_has_failed(dsn: str, eyes: Eyes, end: str) -> None:
    """Their handler was called, so `on_finish` follows, and nothing of them is kept."""
    begun: list[int] = []
    ended: list[tuple[int, str]] = []
    alone, may_go = threading.Event(), threading.Event()

    @pgqueue.on_start
    def starts(job: Job) -> None:
        begun.append(job.id)

    @pgqueue.on_finish
    def finishes(job: Job, outcome: pgqueue.JobOutcome) -> None:
        ended.append((job.id, outcome.name))

    def fragile(jobs: list[Job], numbers: list[int]) -> None:
        if len(numbers) > 1:
            raise ValueError("apart")
        alone.set()
        may_go.wait(30)

    asked = batched(False, fragile, batch=Batch(4, wait=20))
    ids = enqueued(dsn, asked, *range(4))
    async with work(dsn, asked, concurrency=1) as worker:
        await asyncio.to_thread(alone.wait, 30)
        if end == "quiet":
            worker.quiet()
        else:
            eyes.do("DELETE FROM pgqueue.job_running")  # other workers have them
            worker.services.declared_dead(worker.worker_id)
        await until(lambda: len(ended) == 3)
        may_go.set()
        await until(lambda: not worker.state.held)
    assert begun == ids
    assert sorted(ended) == [(ids[0], "completed"), *((id, "released") for id in ids[1:])]


async def test_a_batch_refuses_what_is_for_one_job(dsn: str, eyes: Eyes) -> None:
    said: list[str] = []

    def refused(jobs: list[Job], numbers: list[int]) -> None:
        with pytest.raises(pgqueue.Error) as error:
            jobs[1].complete(None)
        said.append(str(error.value))
        with pytest.raises(pgqueue.Error) as error:
            jobs[0].iterate(lambda cursor: [])
        said.append(str(error.value))
        jobs[1].progress(1, 2)
        jobs[1].checkpoint()

    asked = batched(False, refused, batch=Batch(2, wait=20))
    enqueued(dsn, asked, 0, 1)
    async with work(dsn, asked):
        await until(all_in(eyes, "completed", 2))
    assert all("there is no job." in each for each in said)


async def test_a_worker_without_batches_pays_nothing(dsn: str) -> None:
    @task(name="batch.none")
    def none() -> None: ...

    async with work(dsn, none) as worker:
        batches = worker.services.batches
        assert isinstance(batches, JobBatches)
        finish = object()
        assert batches.finishing(finish) is finish  # type: ignore[arg-type]
        assert not batches.wraps(none)
