"""Workers that are killed between a durable step and the end of its job: the step is not done again."""

from __future__ import annotations

from pathlib import Path

import psycopg
import pytest
from workers import Eyes, wait_until, workers

import pgqueue

TASKS = """
def charge(job: pgqueue.Job, amount: int) -> int:
    job.connection.execute("INSERT INTO effect VALUES (%s)", [job.id])
    say("charged")
    if os.environ.get("DIES") == "within":
        time.sleep(600)
    return amount


def order(job: pgqueue.Job) -> int:
    amount = job.step("charge", charge, job, 7)
    say("stepped")
    if os.environ.get("DIES") == "after":
        time.sleep(600)
    return amount


pgqueue.task(name="crash.order", transactional=os.environ["KIND"] == "transactional")(order)
"""


@pytest.mark.second
@pytest.mark.promise("F360")
@pytest.mark.parametrize("kind", ["plain", "transactional"])
@pytest.mark.parametrize(("dies", "event"), [("within", "charged"), ("after", "stepped")])
def test_a_kill_in_a_step_or_behind_it_doubles_no_effect(
    tmp_path: Path, dsn: str, eyes: Eyes, kind: str, dies: str, event: str
) -> None:
    eyes.do("CREATE TABLE effect (job bigint NOT NULL)")
    with psycopg.connect(dsn) as conn:
        job = pgqueue.enqueue(conn, pgqueue.remote("crash.order")).id
    with workers(tmp_path, dsn, TASKS) as made:
        first = made.start({"DIES": dies, "KIND": kind}, lease=1.0)
        first.event(event)
        first.kill()
        second = made.start({"KIND": kind}, lease=1.0)
        wait_until(lambda: eyes.state(job) == "completed")
        assert len(second.all("charged")) == (dies == "within")
    assert eyes.all("SELECT job FROM effect") == [(job,)]
    assert eyes.all("SELECT name, result FROM pgqueue.job_step") == [("charge", 7)]
    assert eyes.all("SELECT result, crashes FROM pgqueue.job_done") == [(7, 1)]
