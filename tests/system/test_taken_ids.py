"""An id that is there already, because a sequence was set back: no service of a worker ends, or is held up, for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from completer_desk import desk_of
from unique_jobs import keyed
from workers import Eyes, Taker, until, work

from pgqueue import Every
from pgqueue.client.tasks import task
from pgqueue.database import sequences
from pgqueue.database.sessions import Session
from pgqueue.database.statements import Statement
from pgqueue.jobs.concurrency import Limit
from pgqueue.jobs.outcomes import Completed
from pgqueue.worker.liveness import registration
from pgqueue.worker.liveness.rescue import Rescue

MANY = 300
"""So many ids are taken. A service that draws one id a second is not through in a test's time."""


@task(name="taken.plain")
async def plain() -> None:
    pass


@task(name="taken.limited", limit=Limit(5, name="few"))
async def limited() -> None:
    pass


def take_ids(eyes: Eyes) -> None:
    """The next ids are those of jobs that wait, in a queue of no worker."""
    first = eyes.one("SELECT nextval('pgqueue.job_id_seq')")
    eyes.do("INSERT INTO pgqueue.job (task, queue) SELECT 'other', 'elsewhere' FROM generate_series(1, %s)", MANY)
    eyes.do("SELECT setval('pgqueue.job_id_seq', %s)", first)


def setting_back(times: int, id: int) -> Callable[..., Statement[Any]]:
    """The sequences lag again, so often, as soon as they have been advanced: the next worker gets this id."""
    left = [Statement(f"SELECT setval('pgqueue.worker_id_seq', {id}, false)", {}, lambda rows: None)] * times
    advance = sequences.advancing
    return lambda schema, *, whole: left.pop() if left else advance(schema, whole=whole)


@pytest.mark.promise("F29")
async def test_a_successor_with_a_unique_key_draws_no_id_a_second(dsn: str, eyes: Eyes) -> None:
    async with desk_of(dsn, eyes) as desk:
        [job] = await desk.jobs(1)
        take_ids(eyes)
        desk.completer.finish(job, Completed(None, (keyed("k"),)))
        await asyncio.wait_for(desk.completer.flushed(), 20)
    assert eyes.all("SELECT k.key, j.state FROM pgqueue.unique_key k JOIN pgqueue.job j ON j.id = k.job_id") == [
        ("unique:k", "available")
    ]
    assert eyes.state(job.id) == "completed"


@pytest.mark.promise("F29")
async def test_a_schedule_draws_no_id_a_second(dsn: str, eyes: Eyes) -> None:
    @task(name="taken.ticks", schedule=Every(1))
    async def ticks() -> None:
        pass

    made = "SELECT count(*) FROM pgqueue.job WHERE task = 'taken.ticks'"
    async with work(dsn, ticks):
        await until(lambda: eyes.one(made) > 0)
        take_ids(eyes)
        before = eyes.one(made)
        await until(lambda: eyes.one(made) > before, 20.0)


@pytest.mark.promise("F29")
@pytest.mark.parametrize("times", [1, 2, 3])
async def test_a_worker_starts_although_the_id_that_it_is_given_is_taken(
    dsn: str, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    async with work(dsn) as first:
        monkeypatch.setattr(registration, "advancing", setting_back(times, first.worker_id))
        if times == registration.TRIES:
            with pytest.raises(psycopg.errors.UniqueViolation):
                async with work(dsn):
                    pass
        else:
            async with work(dsn) as second:
                assert second.worker_id > first.worker_id


@pytest.mark.promise("F29")
async def test_a_worker_that_registers_anew_goes_on_until_an_id_is_free(
    dsn: str, eyes: Eyes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Naive: the worker ends, because its new id is the id of another worker."""
    async with work(dsn) as other, work(dsn, plain) as worker:
        before = worker.worker_id
        monkeypatch.setattr(registration, "advancing", setting_back(3 * registration.TRIES, other.worker_id))
        eyes.do("DELETE FROM pgqueue.worker WHERE id = %s", before)
        worker.services.heartbeat.beat_soon()
        await until(lambda: worker.worker_id not in (before, other.worker_id))
        job = plain.enqueue(eyes.conn)
        await until(eyes.is_in(job.id, "completed"))
        assert worker.state.phase == "running"


@pytest.mark.promise("F29")
async def test_a_limit_that_the_application_refuses_ends_no_worker(
    dsn: str, eyes: Eyes, caplog: pytest.LogCaptureFixture
) -> None:
    """A unique index, or a check, of the application on the table of limits."""
    eyes.do("INSERT INTO pgqueue.key_limit (name, n, set_at) VALUES ('own', 1, now())")
    eyes.do("CREATE UNIQUE INDEX own ON pgqueue.key_limit ((true))")
    async with work(dsn, plain, limited) as worker:
        await until(lambda: 'declare: duplicate key value violates unique constraint "own"' in caplog.text)
        job, later = plain.enqueue(eyes.conn), limited.enqueue(eyes.conn)
        await until(eyes.is_in(job.id, "completed"))
        assert worker.state.phase == "running"
        eyes.do("DROP INDEX pgqueue.own")
        await until(eyes.is_in(later.id, "completed"))


@pytest.mark.promise("F29")
async def test_a_rescue_whose_refused_job_cannot_be_put_aside_is_tried_again(
    dsn: str, eyes: Eyes, caplog: pytest.LogCaptureFixture
) -> None:
    """A unique index of the application on the jobs that have ended. Naive: the worker that rescues ends."""
    victim, leader = Taker(dsn), Taker(dsn)
    session = Session(leader.link, "rescue")
    rescued: list[int] = []
    rescue = Rescue(session, notify=True, rescued=lambda: rescued.append(1))
    for (leaf,) in eyes.all("SELECT relid::text FROM pg_partition_tree('pgqueue.job_dead') WHERE isleaf"):
        eyes.do(f"CREATE UNIQUE INDEX ON {leaf} (task)")
    ended = "INSERT INTO pgqueue.job (state, task, finished_at, reason) VALUES ('failed', 'x', now(), 'error')"
    eyes.do(ended)
    running = (
        "INSERT INTO pgqueue.job (state, task, worker_id, claim, started_at, priority) "
        "VALUES ('running', %s, %s, 1, now(), %s)"
    )
    eyes.do(running, "x", victim.worker_id, 30_000)
    eyes.do(running, "y", victim.worker_id, 5)
    try:
        await rescue.seen([(victim.worker_id, 0)], leads=True)
        assert "the next heartbeat tries again" in caplog.text and not rescued
        eyes.do("DELETE FROM pgqueue.job_dead")
        await rescue.strays()
        assert sorted(eyes.all("SELECT task, state FROM pgqueue.job")) == [("x", "failed"), ("y", "available")]
        assert (eyes.happened("failed"), eyes.happened("rescued")) == (1, 1)
    finally:
        for each in (session, victim, leader):
            await each.close()
