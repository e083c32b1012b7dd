"""`job.progress`: no I/O in the call, at most one statement a second for all jobs, gone when the job is."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner
from workers import Eyes, until, work

import pgqueue
from pgqueue import InvalidOption
from pgqueue.cli import main
from pgqueue.client.tasks import Task, task
from pgqueue.database import statements
from pgqueue.database.statements import Statement
from pgqueue.jobs.fields import claimed
from pgqueue.jobs.job import Job
from pgqueue.worker.run import progress
from pgqueue.worker.run.progress import Progress
from pgqueue.worker.worker import Worker

ROWS = "SELECT job_id, done, total FROM pgqueue.job_progress ORDER BY job_id"


def put(dsn: str, made: Task[..., Any], *args: Any) -> int:
    with psycopg.connect(dsn) as conn:
        return made.enqueue(conn, *args).id


class Held:
    """A task that says what it is told, until it may end."""

    def __init__(self, name: str, *, on_loop: bool = False) -> None:
        self.say: list[tuple[float, float | None]] = []
        self.end = threading.Event()
        self.said = 0

        def step(job: Job) -> None:
            while self.said < len(self.say):
                job.progress(*self.say[self.said])
                self.said += 1

        def holds(job: Job) -> None:
            while not self.end.wait(0.005):
                step(job)

        async def aholds(job: Job) -> None:
            while not self.end.is_set():
                step(job)
                await asyncio.sleep(0.005)

        self.task: Task[..., Any] = task(name=name)(aholds if on_loop else holds)


class Sent:
    """Counts what the service sends."""

    def __init__(self, worker: Worker) -> None:
        self.times: list[tuple[float, list[str]]] = []
        self._names = {statements.text(name, "pgqueue"): name for name in statements.names()}
        session = worker.services.progress._session
        real = session.run

        async def run(*messages: Statement[Any], on: int | None = None) -> list[Any]:
            names = {self._names.get(message.sql, "") for message in messages}
            words = sorted(names & {"progress_write", "progress_forget"})
            if words:
                self.times.append((asyncio.get_running_loop().time(), words))
            return await real(*messages, on=on)

        session.run = run  # type: ignore[method-assign]


@asynccontextmanager
async def holding(dsn: str, *held: Held, **options: Any) -> AsyncIterator[Worker]:
    async with work(dsn, *(each.task for each in held), **options) as worker:
        try:
            yield worker
        finally:
            for each in held:
                each.end.set()
            await until(lambda: not worker.state.held)


@pytest.mark.second
@pytest.mark.parametrize("on_loop", [False, True], ids=["thread", "loop"])
async def test_it_is_shown_while_the_job_runs_and_gone_afterwards(dsn: str, eyes: Eyes, on_loop: bool) -> None:
    held = Held(f"progress.shown.{on_loop}", on_loop=on_loop)
    held.say = [(1, None), (250, 1000)]
    async with holding(dsn, held):
        job = put(dsn, held.task)
        await until(lambda: eyes.all(ROWS) == [(job, 250, 1000)])
        with psycopg.connect(dsn) as conn:
            for info in (pgqueue.get(conn, job), *pgqueue.find(conn, state="running")):
                assert info.progress is not None
                assert (info.progress.done, info.progress.total) == (250, 1000)
                assert info.started_at is not None
                assert info.progress.updated_at is not None
                assert info.progress.updated_at > info.started_at
        held.say += [(0.5, None)]
        await until(lambda: eyes.all(ROWS) == [(job, 0.5, None)])
        held.end.set()
        await until(eyes.is_in(job, "completed"))
        await until(lambda: eyes.all(ROWS) == [])
    with psycopg.connect(dsn) as conn:
        assert pgqueue.get(conn, job).progress is None


async def test_the_command_line_shows_it(dsn: str, eyes: Eyes) -> None:
    held = Held("progress.cli")
    held.say = [(1250, 5000)]
    runner = CliRunner()
    async with holding(dsn, held):
        job = put(dsn, held.task)
        await until(lambda: eyes.all(ROWS))
        listed, one, whole, all_whole = [
            await asyncio.to_thread(runner.invoke, main, ["jobs", "--dsn", dsn, *options])
            for options in ((), (str(job),), (str(job), "--json"), ("--json",))
        ]
    assert "1,250 of 5,000 (25 %)" in listed.output
    assert "progress:        1,250 of 5,000 (25 %)" in one.output
    for said in (json.loads(output)["items"][0] for output in (whole.output, all_whole.output)):
        assert (said["progress"]["done"], said["progress"]["total"]) == (1250, 5000)


@pytest.mark.second
async def test_all_jobs_say_it_in_one_statement_a_second_and_silence_costs_none(dsn: str, eyes: Eyes) -> None:
    held = Held("progress.many")
    async with holding(dsn, held, concurrency=5) as worker:
        sent = Sent(worker)
        jobs = [put(dsn, held.task) for _ in range(5)]
        await until(lambda: len(worker.services.executor._running.runs) == 5)
        ends = asyncio.get_running_loop().time() + 2.5
        number = 0
        while asyncio.get_running_loop().time() < ends:
            for run in worker.services.executor._running.runs.values():
                assert run.job is not None
                run.job.progress(number)
            number += 1
            await asyncio.sleep(0)
        await until(lambda: eyes.all(ROWS) == [(job, number - 1, None) for job in jobs])
        busy = list(sent.times)
        assert number > 20
        assert all(words == ["progress_write"] for _, words in busy)
        assert 2 <= len(busy) <= 5
        assert all(later - sooner >= 1.0 for (sooner, _), (later, _) in pairwise(busy))
        await asyncio.to_thread(threading.Event().wait, 1.5)
        assert sent.times == busy
    assert sent.times[len(busy) :] in ([], [(sent.times[-1][0], ["progress_forget"])])


@pytest.mark.second
async def test_a_job_that_is_not_ours_any_more_writes_nothing_and_removes_nothing(dsn: str, eyes: Eyes) -> None:
    held, other = Held("progress.first"), Held("progress.first.other")
    held.say = [(1, 10)]
    async with holding(dsn, held) as first:
        job = put(dsn, held.task)
        await until(lambda: eyes.all(ROWS) == [(job, 1, 10)])
        eyes.do(
            "WITH gone AS (DELETE FROM pgqueue.job_running RETURNING *) "
            "INSERT INTO pgqueue.job_available (id, task, args, queue, attempt) "
            "SELECT id, 'progress.first.other', args, 'elsewhere', attempt FROM gone"
        )
        async with holding(dsn, other, queues=["elsewhere"]) as second:
            await until(eyes.is_in(job, "running"))
            with psycopg.connect(dsn) as conn:
                assert pgqueue.get(conn, job).progress is None  # what the run before has said is not shown
            held.say += [(2, 10)]
            await until(lambda: held.said == 2 and not first.services.progress._reports)
            held.end.set()
            await until(lambda: not first.state.held)
            other.say = [(7, 10)]
            await until(lambda: eyes.all(ROWS) == [(job, 7, 10)])
            await until(lambda: not first.services.progress._rows_left)
            assert eyes.all(ROWS) == [(job, 7, 10)]
            assert second.services.progress._written
            other.end.set()
            await until(lambda: eyes.all(ROWS) == [])


async def test_what_a_dead_worker_leaves_is_not_shown_and_swept(dsn: str, eyes: Eyes) -> None:
    held = Held("progress.left")
    async with holding(dsn, held) as worker:
        job = put(dsn, held.task)
        await until(eyes.is_in(job, "running"))
        eyes.do(
            "INSERT INTO pgqueue.job_progress (job_id, done, updated_at) "
            "VALUES (%s, 1, now() - interval '1 hour'), (%s, 2, now() - interval '1 hour'), (%s, 3, now())",
            job, job + 1, job + 2,
        )  # fmt: skip
        with psycopg.connect(dsn) as conn:
            assert pgqueue.get(conn, job).progress is None
            assert [info.progress for info in pgqueue.find(conn)] == [None]
        await worker.services.progress.sweep()
        assert eyes.all(ROWS) == [(job, 1, None), (job + 2, 3, None)]


@pytest.mark.second
async def test_nothing_is_lost_while_the_database_is_away(
    dsn: str, eyes: Eyes, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held("progress.away")
    async with holding(dsn, held) as worker:
        job = put(dsn, held.task)
        await until(lambda: worker.services.executor._running.runs)
        real = Progress._statements
        failures = [psycopg.OperationalError("away"), psycopg.OperationalError("still")]

        def failing(service: Progress, *args: Any) -> Any:
            if failures:
                raise failures.pop()
            return real(service, *args)

        monkeypatch.setattr(Progress, "_statements", failing)
        held.say = [(3, 4)]
        await until(lambda: eyes.all(ROWS) == [(job, 3, 4)])
        held.end.set()
        await until(lambda: eyes.all(ROWS) == [])


async def test_no_memory_of_jobs_that_are_over(dsn: str, eyes: Eyes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "ROUND_SECONDS", 0.01)

    @task(name="progress.brief")
    async def brief(job: Job) -> None:
        job.progress(1)

    async with work(dsn, brief) as worker:
        with psycopg.connect(dsn) as conn:
            brief.enqueue_many(conn, [()] * 200)
        await until(eyes.done(200))
        service = worker.services.progress
        await until(lambda: not (service._reports or service._written or service._rows_left))
        assert eyes.all(ROWS) == []


@pytest.mark.parametrize(
    ("done", "total"),
    [(-1, None), (float("nan"), None), (float("inf"), None), (1, float("inf")), (3, 2), (1, -1), ("1", None)],
)
def test_numbers_are_checked_at_once(done: Any, total: Any) -> None:
    job = Job(claimed(queue="q", task="t"), 1)
    with pytest.raises(InvalidOption, match="progress"):
        job.progress(done, total)
    job.progress(0, 0)
    job.progress(2, 2)
