"""What a worker has counted: each outcome once, for the right queue and task, and written once, whatever breaks."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from time import perf_counter
from typing import Any

import psycopg
import pytest
from worker_states import worker_state
from workers import Eyes, until, work, workers

import pgqueue
from pgqueue import Cancel, RetryPolicy, Snooze
from pgqueue.client.tasks import Task, task
from pgqueue.database.sessions import Link, Session
from pgqueue.database.statements import Statement
from pgqueue.jobs.fields import claimed
from pgqueue.jobs.fingerprint import fingerprint
from pgqueue.jobs.histogram import BOUNDS
from pgqueue.jobs.job import Job
from pgqueue.jobs.outcomes import COMPLETED, LATE, RELEASED, Failed, Problem, Retried, interrupted
from pgqueue.jobs.totals import OTHERS, TASKS_MOST
from pgqueue.worker import counters
from pgqueue.worker.counters import Counters
from pgqueue.worker.run import serialization_retries
from pgqueue.worker.run.running_jobs import RunningJobs

PARTS = "SELECT counts FROM pgqueue.history_part ORDER BY writer, part"


def ended(id: int = 1, task: str = "t", queue: str = "q", *, ran: float | None = 0.004, waited: float = 0.0) -> Job:
    """A job that could run at the second 1000 since 2000 by the database's clock, and began so much later."""
    job = Job(claimed(id=id, pos=1, queue=queue, task=task, enqueued_at=1_000_000_000), 1)
    if ran is not None:
        job.began, job.ran = 1_000.0 + waited, ran
    return job


class Desk:
    """Counters without their loop, whose database began to count when `perf_counter` did."""

    def __init__(self, dsn: str) -> None:
        self.session = Session(Link(dsn, "pgqueue"), "fetch")
        self.state = worker_state(Link(dsn, "pgqueue"))
        self.state.link = self.session.link
        self.counters = Counters(self.session, self.session, self.state, RunningJobs([]))
        self.counters._offset = counters.SINCE_1970

    def counted(self) -> dict[str, dict[str, Any]]:
        """By task, what has been counted so far."""
        return {task: each.as_json(queue, task) for (queue, task), each in self.counters._part.counts.items()}


@pytest.fixture
async def desk(dsn: str) -> AsyncIterator[Desk]:
    made = Desk(dsn)
    yield made
    await made.session.close()


@pytest.mark.promise("F90")
async def test_each_outcome_is_counted_under_its_name(desk: Desk) -> None:
    problem = Problem("failed", "ValueError", "no", None, "shop.charge")
    desk.counters.ended(
        [
            (ended(1), COMPLETED),
            (ended(2), COMPLETED),
            (ended(3), Failed("error", problem)),
            (ended(4), Retried(1.0, problem)),
            (ended(5), Retried(1.0, Problem("snoozed"), spent=False, snoozed=True)),
            (ended(6), interrupted("shutdown")),
            (ended(7, ran=None), LATE),
            (ended(8, ran=None), RELEASED),
            (ended(9, task="other"), COMPLETED),
        ]
    )
    counted = desk.counted()
    assert counted["other"]["completed"] == 1
    run = counted["t"].pop("run")
    assert run == [0, 0, 0, 0, 6]  # 4 ms: above 3, up to 5
    del counted["t"]["wait"], counted["t"]["wait_seconds"]
    assert counted["t"] == {
        "queue": "q", "task": "t", "started": 6, "completed": 2, "failed": 1, "retried": 1, "snoozed": 1,
        "interrupted": 1, "expired": 1, "run_seconds": 0.024,
    }  # fmt: skip
    [(name, group)] = desk.counters._part.failures.items()
    assert (group.count, list(group.ids), group.problem.place) == (2, [3, 4], "shop.charge")
    assert name == fingerprint("t", "ValueError", "shop.charge")


@pytest.mark.promise("F90")
@pytest.mark.parametrize(("waited", "place"), [(-3.0, 0), (0.0009, 0), (0.0049, 4), (61.0, 30), (1e9, len(BOUNDS))])
async def test_a_wait_counts_from_when_the_job_could_run(desk: Desk, waited: float, place: int) -> None:
    """Neither before 2000 nor after: by the database's clock. A clock that steps back makes no wait negative."""
    job = ended(waited=waited)
    desk.counters.ended([(job, COMPLETED)])
    delayed = ended(2, waited=3_600.0 + waited)
    delayed._row = (*delayed._row[:12], delayed._row[11] + 3_600_000_000, *delayed._row[13:])  # meant to wait an hour
    desk.counters.ended([(delayed, COMPLETED)])
    assert desk.counted()["t"]["wait"] == [0] * place + [2]
    assert desk.counted()["t"]["wait_seconds"] == pytest.approx(2 * max(0.0, waited), abs=1e-5)


@pytest.mark.promise("F90")
@pytest.mark.parametrize("number", [1, 64, 65, 71, 72, 73, 2_000])
async def test_each_job_of_a_flush_is_counted_and_of_many_each_eighth_measured(desk: Desk, number: int) -> None:
    jobs = [ended(n, ran=0.1 if n % 8 else 0.001, waited=float(n % 8)) for n in range(number)]
    desk.counters.ended([(job, COMPLETED) for job in jobs])
    counted = desk.counted()["t"]
    assert counted["completed"] == counted["started"] == sum(counted["run"]) == sum(counted["wait"]) == number
    if number > 64:  # each eighth is a quick one, which does not happen outside of this test
        assert (counted["run"], counted["wait"]) == ([number], [number])
        assert counted["run_seconds"] == pytest.approx(0.001 * number)
    else:
        assert counted["run_seconds"] == pytest.approx(sum(job.ran for job in jobs))
        assert counted["wait_seconds"] == pytest.approx(sum(n % 8 for n in range(number)))


@pytest.mark.promise("F90")
async def test_a_flush_of_several_tasks_and_queues_is_counted_for_each(desk: Desk) -> None:
    """Also in turns, and with one that has few."""
    entries = [(ended(n, task=f"t{n % 3}", queue=f"q{n % 2}"), COMPLETED) for n in range(600)]
    entries.insert(300, (ended(1_000, task="few"), COMPLETED))
    desk.counters.ended(entries)
    counts = desk.counters._part.counts
    assert {names: each.happened["completed"] for names, each in counts.items()} == {
        **{(f"q{queue}", f"t{task}"): 100 for queue in range(2) for task in range(3)},
        ("q", "few"): 1,
    }
    assert {sum(each.wait) for names, each in counts.items() if names != ("q", "few")} == {100}


@pytest.mark.promise("F90")
async def test_the_rest_beyond_200_tasks_is_counted_together(desk: Desk) -> None:
    desk.counters.ended([(ended(n, task=f"t{n}"), COMPLETED) for n in range(TASKS_MOST + 50)])
    counted = desk.counted()
    assert (len(counted), counted[OTHERS]["completed"]) == (TASKS_MOST + 1, 50)


@pytest.mark.promise("F93")
async def test_a_job_that_fails_again_is_named_once_among_the_five_of_its_group(desk: Desk) -> None:
    problem = Problem("failed", "ValueError", "no", None, "shop.charge")
    desk.counters.ended([(ended(id), Retried(1.0, problem)) for id in (1, 2, 3, 4, 5, 6, 3, 6, 6)])
    [group] = desk.counters._part.failures.values()
    assert (group.count, group.as_json("f", 0.0, "v")["ids"]) == (9, [6, 5, 4, 3, 2])


@pytest.mark.promise("F91")
async def test_a_part_whose_answer_was_lost_is_written_once(desk: Desk, eyes: Eyes) -> None:
    """Also after the leader has folded it, when nothing of it is left in the table of parts."""
    desk.counters.ended([(ended(), COMPLETED)])
    desk.counters._close()
    [part] = desk.counters._closed
    await desk.session.run(desk.counters._appended(part))  # and now the answer is lost
    await desk.counters.write_rest()
    assert [counts[0]["completed"] for (counts,) in eyes.all(PARTS)] == [1]
    desk.counters._closed.append(part)
    eyes.do("DELETE FROM pgqueue.history_part")
    await desk.counters.write_rest()
    assert eyes.all(PARTS) == []
    desk.counters.ended([(ended(), COMPLETED), (ended(2), COMPLETED)])
    await desk.counters.write_rest()
    assert [counts[0]["completed"] for (counts,) in eyes.all(PARTS)] == [2]


@pytest.mark.promise("F91")
async def test_what_cannot_be_written_stays_until_it_can(
    desk: Desk, eyes: Eyes, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.counters.ended([(ended(), COMPLETED)])
    real, lost = Session.run, [True]

    async def breaks(session: Session, *messages: Statement[Any], on: int | None = None) -> list[Any]:
        if lost[0]:
            raise psycopg.OperationalError("the connection is gone")
        return await real(session, *messages, on=on)

    monkeypatch.setattr(Session, "run", breaks)
    desk.counters._close()
    with pytest.raises(psycopg.OperationalError):
        await desk.counters._write()
    desk.counters.ended([(ended(2), COMPLETED)])
    lost[0] = False
    await desk.counters.write_rest()
    assert [counts[0]["completed"] for (counts,) in eyes.all(PARTS)] == [1, 1]


@pytest.mark.promise("F91")
async def test_a_stop_writes_the_rest_though_its_session_is_lost(desk: Desk, eyes: Eyes) -> None:
    """As when the server was restarted while the worker was idle."""
    desk.counters.ended([(ended(), COMPLETED)])
    await desk.session.ready()
    assert eyes.all(
        "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE application_name = 'pgqueue fetch'"
    )
    await desk.counters.write_rest()
    assert [counts[0]["completed"] for (counts,) in eyes.all(PARTS)] == [1]


@pytest.mark.promise("F91")
async def test_a_part_goes_to_the_minute_of_its_middle_by_the_databases_clock(desk: Desk, eyes: Eyes) -> None:
    desk.counters.ended([(ended(), COMPLETED)])
    part = desk.counters._part
    part.begin = perf_counter() - 3_600.0 - 20.0
    desk.counters._close()
    part.end = perf_counter() - 3_600.0 + 20.0
    await desk.counters.write_rest()
    ago = eyes.one(
        "SELECT extract(epoch FROM date_trunc('minute', now() - interval '1 hour') - at)::int FROM pgqueue.history_part"
    )
    assert ago in (0, 60)  # 60: a minute has ended since


@pytest.mark.promise("F91")
async def test_an_idle_minute_writes_nothing(desk: Desk, eyes: Eyes) -> None:
    desk.counters.ended([(ended(8, ran=None), RELEASED)])
    await desk.counters.write_rest()
    assert eyes.all(PARTS) == []
    assert eyes.one("SELECT count(*) FROM pgqueue.history_writer") == 0


# With a worker -------------------------------------------------------------------------------------------------------


def put(dsn: str, made: Task[..., Any], *args: Any) -> int:
    with psycopg.connect(dsn) as conn:
        return made.enqueue(conn, *args).id


@pytest.mark.promise("F90")
async def test_a_worker_writes_what_its_jobs_did_when_it_stops(dsn: str, eyes: Eyes) -> None:
    tries: list[int] = []

    @task(name="count.sync", retry=RetryPolicy(attempts=2, first=0.01, most=0.01))
    def sync(how: str) -> None:
        tries.append(1)
        if how == "fails":
            raise ValueError("no")
        if how == "cancels":
            raise Cancel("no longer wanted")
        if how == "snoozes" and len(tries) < 1_000:
            tries.extend([1] * 1_000)
            raise Snooze(0.01)

    @task(name="count.async")
    async def on_loop() -> str:
        return "a result"

    @task(name="count.transactional", transactional=True)
    def transactional(job: Job) -> None:
        job.connection.execute("SELECT 1")

    async with work(dsn, sync, on_loop, transactional):
        for how in ("ends", "fails", "cancels", "snoozes"):
            put(dsn, sync, how)
        for each in (on_loop, transactional):
            put(dsn, each)
        await until(lambda: eyes.one("SELECT count(*) FROM pgqueue.job WHERE finished_at IS NOT NULL") == 6)
    assert eyes.totals() == {"started": 8, "completed": 4, "failed": 1, "retried": 1, "snoozed": 1, "cancelled": 1}
    [(errors,)] = eyes.all("SELECT errors FROM pgqueue.history_part")
    [group] = errors
    assert (group["task"], group["error_type"], group["count"]) == ("count.sync", "ValueError", 2)
    assert group["place"].endswith("test_a_worker_writes_what_its_jobs_did_when_it_stops.<locals>.sync")
    fingerprints = eyes.all("SELECT DISTINCT fingerprint FROM pgqueue.attempt WHERE error_type = 'ValueError'")
    assert fingerprints == [(group["fingerprint"],)]
    assert eyes.all("SELECT fingerprint FROM pgqueue.attempt WHERE outcome IN ('snoozed', 'cancelled')") == [
        (None,),
        (None,),
    ]


@pytest.mark.promise("F90")
async def test_a_job_that_runs_for_long_is_counted_as_started_at_the_end_of_its_minute(dsn: str, eyes: Eyes) -> None:
    runs, end = threading.Event(), threading.Event()

    @task(name="count.long")
    def long() -> None:
        runs.set()
        end.wait(30)

    async with work(dsn, long) as worker:
        put(dsn, long)
        await asyncio.to_thread(runs.wait, 30)
        await worker.services.counters.write_rest()
        assert eyes.totals() == {"started": 1}
        await worker.services.history_fold.round()  # a worker that leads does so at any moment
        await worker.services.counters.write_rest()
        assert eyes.totals() == {"started": 1}
        end.set()
        await until(eyes.done(1))
    assert eyes.totals() == {"started": 1, "completed": 1}


@pytest.mark.promise("F90")
async def test_a_job_that_was_counted_as_started_and_is_given_back_was_interrupted(
    dsn: str, eyes: Eyes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits to run again, for the database has aborted it, when its minute ends and when its worker stops."""
    monkeypatch.setattr(serialization_retries, "pause", lambda abort: 60.0)

    @task(name="count.aborted")
    async def aborted() -> None:
        raise psycopg.errors.SerializationFailure

    async with work(dsn, aborted) as worker:
        put(dsn, aborted)
        await until(lambda: eyes.one("SELECT count(*) FROM pgqueue.attempt WHERE outcome = 'aborted'"))
        await worker.services.counters.write_rest()
        assert eyes.totals() == {"started": 1}
    assert eyes.states() == {"available": 1}
    assert eyes.totals() == {"started": 1, "interrupted": 1}


@pytest.mark.promise("F90")
async def test_an_outcome_that_is_fenced_is_not_counted(dsn: str, eyes: Eyes) -> None:
    runs, end = threading.Event(), threading.Event()

    @task(name="count.lost")
    def lost() -> None:
        runs.set()
        end.wait(30)

    async with work(dsn, lost) as worker:
        id = put(dsn, lost)
        await asyncio.to_thread(runs.wait, 30)
        eyes.do("DELETE FROM pgqueue.job_running WHERE id = %s", id)
        end.set()
        await until(lambda: worker.services.completer.fenced)
    assert eyes.totals() == {}


SOURCE = """
@pgqueue.task(name="count.killed")
def killed(n: int) -> None:
    say("ran", n=n)
"""


@pytest.mark.second
@pytest.mark.promise("F91")
def test_a_worker_that_is_killed_loses_the_minute_that_it_had_not_written(dsn: str, eyes: Eyes, tmp_path: Path) -> None:
    made = pgqueue.remote("count.killed")
    with workers(tmp_path, dsn, SOURCE) as all, psycopg.connect(dsn, autocommit=True) as conn:
        [killed] = all.ready()
        made.enqueue(conn, n=1)
        killed.event("ran", n=1)
        killed.kill()
        assert eyes.totals() == {}
        [stopped] = all.ready()
        made.enqueue(conn, n=2)
        stopped.event("ran", n=2)
        stopped.stop()
        assert eyes.totals()["completed"] == 1


def test_what_is_written_can_be_read_back_whatever_a_job_has_said(desk: Desk) -> None:
    problem = Problem("failed", 'Bad"Name', "\\0 \ud83d\ude00 é".encode("utf-8", "replace").decode(), None, None)
    desk.counters.ended([(ended(task='a"b'), Failed("error", problem))])
    desk.counters._close()
    params = desk.counters._appended(desk.counters._closed[0]).params
    assert json.loads(str(params["errors"]))[0]["error_type"] == 'Bad"Name'
