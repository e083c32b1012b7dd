"""Workers that are killed in the middle of a batch: nothing is lost, no effect is twice, a killer is found alone."""

from __future__ import annotations

from pathlib import Path

import psycopg
import pytest
from workers import Eyes, wait_until, workers

import pgqueue

TASKS = """
@pgqueue.task(name="crash.notes", batch=pgqueue.Batch(20, wait=5), transactional=True)
def notes(jobs: list[pgqueue.Job], numbers: list[int]) -> list[int]:
    say("began", jobs=len(jobs))
    if os.environ.get("DIES") == "before":
        time.sleep(600)
    for job in jobs:
        job.connection.execute("INSERT INTO effect VALUES (%s)", [job.id])
    say("wrote", jobs=len(jobs))
    if os.environ.get("DIES") == "after":
        time.sleep(600)
    return numbers


@pgqueue.task(name="crash.kills", batch=pgqueue.Batch(20, wait=2))
def kills(numbers: list[int]) -> None:
    say("began", jobs=len(numbers))
    if 13 in numbers:
        os._exit(9)
"""


def put(dsn: str, task: str) -> list[int]:
    with psycopg.connect(dsn) as conn:
        return [pgqueue.enqueue(conn, pgqueue.remote(task), numbers=number).id for number in range(20)]


@pytest.mark.second
@pytest.mark.promise("F283")
@pytest.mark.parametrize(("dies", "event"), [("before", "began"), ("after", "wrote")])
def test_a_kill_in_a_batch_of_twenty_loses_nothing_and_doubles_no_effect(
    tmp_path: Path, dsn: str, eyes: Eyes, dies: str, event: str
) -> None:
    eyes.do("CREATE TABLE effect (job bigint NOT NULL)")
    ids = put(dsn, "crash.notes")
    with workers(tmp_path, dsn, TASKS) as made:
        first = made.start({"DIES": dies}, lease=1.0)
        assert first.event(event)["jobs"] == 20
        first.kill()
        made.ready(lease=1.0)
        wait_until(lambda: eyes.states() == {"completed": 20})
    assert [job for (job,) in eyes.all("SELECT job FROM effect ORDER BY 1")] == ids
    assert eyes.one("SELECT max(crashes) FROM pgqueue.job_done") == 1
    assert eyes.one("SELECT count(*) FROM pgqueue.job_done WHERE attempt <> crashes + 1") == 0


@pytest.mark.second
@pytest.mark.promise("F299")
def test_a_killer_in_a_batch_is_put_aside_and_its_neighbours_complete(tmp_path: Path, dsn: str, eyes: Eyes) -> None:
    """With fewer slots than jobs in the batch, and no heartbeat between its start and the crash: the hardest case."""
    ids = put(dsn, "crash.kills")
    with workers(tmp_path, dsn, TASKS) as made:
        died, last = 0, made.start(lease=1.0, concurrency=4)
        while eyes.states() != {"failed": 1, "completed": 19}:
            wait_until(lambda: last.process.poll() is not None or eyes.states() == {"failed": 1, "completed": 19})  # noqa: B023
            if last.process.poll() is not None:
                died, last = died + 1, made.start(lease=1.0, concurrency=4)
        assert 3 <= died <= 20 / 4 + 2
    assert eyes.all("SELECT id, reason, crashes FROM pgqueue.job_dead") == [(ids[13], "crashed", 3)]
    assert eyes.one("SELECT max(crashes) FROM pgqueue.job_done") <= 1
