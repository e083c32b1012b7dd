"""A failover costs seconds and no attempt: what happens to jobs of one attempt when sessions, servers, primaries go."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import psycopg
import pytest
from accounts import accounts
from failover import WORST_SECONDS, run
from patroni import needs_patroni
from servers import Server
from standby import pair
from stopped import server_pids, stopped
from transactional_tasks import outcomes
from workers import Eyes, until, wait_until, work, workers

import pgqueue
from pgqueue import Job
from pgqueue.database import migrations

__all__ = ["accounts"]

WRITE = "INSERT INTO effect VALUES (%s)"
END_SOME = """
    SELECT count(pg_terminate_backend(pid)) FROM (
        SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'pgqueue job'
        ORDER BY random() LIMIT 2) AS picked
"""


def tasks() -> list[Any]:
    """One in threads, one on the loop; each job has one attempt."""

    def writes(job: Job) -> None:
        job.connection.execute(WRITE, [job.id])

    async def awrites(job: Job) -> None:
        await (await job.aconnection()).execute(WRITE, [job.id])

    return [
        pgqueue.task(name=f"failover.{each.__name__}", transactional=True, retry=1)(each) for each in (writes, awrites)
    ]


@pytest.mark.promise("F335")
async def test_sessions_that_are_ended_all_the_time_spend_no_attempt(dsn: str, accounts: Eyes) -> None:
    """1,000 jobs of one attempt, or more: until twenty sessions were ended.

    Naive: what ends an orphan's session goes to a connection that died in the pool.
    """
    over, ended, jobs = threading.Event(), list[int](), 0
    made = tasks()

    def end_sessions() -> None:
        with psycopg.connect(dsn, autocommit=True) as conn:
            while not over.wait(0.2):
                row = conn.execute(END_SOME).fetchone()
                ended.append(row[0] if row else 0)

    ending = asyncio.create_task(asyncio.to_thread(end_sessions))
    try:
        async with work(dsn, *made, concurrency=4):
            while jobs < 1_000 or (sum(ended) < 20 and jobs < 20_000):
                with psycopg.connect(dsn) as conn:
                    for each in made:
                        each.enqueue_many(conn, [()] * 100)
                jobs += 200
                await until(accounts.done(jobs), 120)
    finally:
        over.set()
        await ending
    assert sum(ended) >= 10
    assert set(outcomes(accounts)) <= {"aborted"}
    effects = [job for job, *_ in accounts.all("SELECT * FROM effect")]
    assert len(effects) == len(set(effects)) == jobs


HANGING = """
@pgqueue.task(name="failover.waits", transactional=True, retry=1)
def waits(job: pgqueue.Job) -> None:
    job.connection.execute("INSERT INTO effect VALUES (%s)", [job.id])
    say("began", job=job.id)
    while not os.path.exists(os.environ["GO"]):
        time.sleep(0.02)
    job.connection.execute("SELECT 1")
    say("wrote", job=job.id)
"""
waits = pgqueue.remote("failover.waits")


@pytest.mark.second
@pytest.mark.promise("F338")
@pytest.mark.parametrize("away", [0.5, 8.0])
def test_a_job_whose_server_crashed_runs_again_when_it_is_back(
    away: float, tmp_path: Path, own_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has one attempt. Naive: the abort cannot be noted while the server is away, and counts as a failure."""
    monkeypatch.setenv("GO", str(tmp_path / "go"))
    dsn = own_server.dsn("postgres")
    migrations.migrate(dsn)
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute("CREATE TABLE effect (id int)")
        [job, other] = [each.id for each in pgqueue.enqueue_many(conn, [waits.new(), waits.new()])]
    with workers(tmp_path, dsn, HANGING) as made:
        [process] = made.ready(concurrency=2)
        for each in (job, other):
            process.event("began", job=each)
        own_server.stop("immediate")
        (tmp_path / "go").touch()
        sleep(away)  # the jobs find their sessions dead, and no server
        own_server.start()
        began = monotonic()
        eyes = Eyes(dsn)
        wait_until(eyes.done(2))
        took = monotonic() - began
        print(f"away {away:g} s: both completed {took:.2f} s after the start")
        assert eyes.all("SELECT id FROM effect ORDER BY id") == [(job,), (other,)]
        assert eyes.all("SELECT DISTINCT outcome FROM pgqueue.attempt") == [("aborted",)]
        eyes.close()
        assert took < 5.0
        assert process.stop() == 0


@pytest.mark.second
@pytest.mark.promise("F336")
def test_a_frozen_primary_is_left_by_all_when_a_standby_is_promoted(
    tmp_path: Path, own_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is closed. Naive: each session waits for 45 s for an answer of its own, the job's for ever."""
    monkeypatch.setenv("GO", str(tmp_path / "go"))
    assert own_server.cluster is not None
    with pair(own_server.cluster, synchronous=False) as both:
        dsn = f"{both.dsn('any')}&connect_timeout=2"
        migrations.migrate(dsn)
        with psycopg.connect(dsn, autocommit=True) as conn:
            conn.execute("CREATE TABLE effect (id int)")
            job = waits.enqueue(conn).id
        with workers(tmp_path, dsn, HANGING) as made:
            [process] = made.ready(concurrency=2)
            process.event("began", job=job)
            both.caught_up()
            with stopped(server_pids(both.primary)):
                (tmp_path / "go").touch()
                both.promote()
                began = monotonic()
                with psycopg.connect(both.standby.dsn(), autocommit=True) as conn:
                    second = waits.enqueue(conn).id
                eyes = Eyes(both.standby.dsn())
                wait_until(eyes.done(2))
                took = monotonic() - began
                print(f"all completed {took:.1f} s after the promotion")
                assert eyes.all("SELECT id FROM effect ORDER BY id") == [(job,), (second,)]
                eyes.close()
                assert took < 20.0
                assert process.stop() == 0


@needs_patroni
@pytest.mark.second
@pytest.mark.promise("F340")
def test_a_switchover_of_patroni_loses_nothing_and_spends_no_attempt() -> None:
    """By hand there are more faults and ways: `python -m tests.harness.failover`."""
    found = run("switchover")
    print(found)
    assert found.sound() and found.started < WORST_SECONDS and found.effect < WORST_SECONDS, found
