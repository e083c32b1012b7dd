"""A worker that is killed at any statement of a release loses nothing and releases nothing twice."""

from __future__ import annotations

from pathlib import Path

import pytest
from flow_rows import Made, put
from workers import Eyes, wait_until, workers

TASKS = """
from pgqueue.worker.flows.releaser import Releaser
from pgqueue.database.sessions import Session

DIES_AT = os.environ.get("DIES_AT", "")

@pgqueue.task(name="killed.x")
async def x(n: int = 0) -> None:
    say("ran", n=n)

run = Session.run

async def dies(self, *statements, **more):
    names = {name for name in ("release_look", "release_jobs") for each in statements if MARKS[name] in each.sql}
    if DIES_AT.startswith("before") and DIES_AT.split()[1] in names:
        os.kill(os.getpid(), 9)
    answers = await run(self, *statements, **more)
    if DIES_AT.startswith("after") and DIES_AT.split()[1] in names:
        os.kill(os.getpid(), 9)
    return answers

from pgqueue.database.statements import text
MARKS = {name: text(name, "pgqueue") for name in ("release_look", "release_jobs")}
Session.run = dies
"""
LIVING = "SELECT count(*) FROM pgqueue.job WHERE state IN ('available', 'scheduled', 'blocked', 'running')"


@pytest.mark.promise("F373")
@pytest.mark.parametrize("at", ["before release_look", "before release_jobs", "after release_jobs"])
def test_a_worker_killed_at_a_statement_of_a_release_loses_and_doubles_nothing(
    at: str, tmp_path: Path, dsn: str, eyes: Eyes
) -> None:
    """The second worker takes over what the first one has left, by its sweep."""
    put(eyes.conn, *[Made("killed.x", [{"n": n}], after=[n - 1] if n else []) for n in range(4)])
    with workers(tmp_path, dsn, TASKS) as fleet:
        first = fleet.start({"DIES_AT": at}, poll=0.1, lease=1)
        assert first.wait() == -9
        second = fleet.start(poll=0.1, lease=1)
        wait_until(lambda: eyes.one(LIVING) == 0, 60.0)
        second.stop()  # then all that it has said is read
        ran = [event["n"] for process in (first, second) for event in process.all("ran")]
    assert eyes.states() == {"completed": 4}
    assert ran == [0, 1, 2, 3]
