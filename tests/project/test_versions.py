"""This checkout and a later one in one database: the schema comes while the old worker works, a new one joins.

The later one is a copy of this checkout with one migration more: a column, an index, a changed function.

And this checkout on a later schema: the worker process starts on it unless it breaks us, and else says why it does not.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import commands
import psycopg
import pytest
from faults import Stream, drawn_up, settled
from workers import Eyes, apply_later, later, until, wait_until, work

import pgqueue
from pgqueue.database import migrations

ROOT = Path(__file__).parents[2]
TASKS = """
import os
import pgqueue

@pgqueue.task(name="fault.notes")
async def notes(key: int, seconds: float = 0.0) -> None:
    with open(os.environ["RAN"], "a") as ran:
        ran.write(f"{key}\\n")
"""
PGQUEUE = [sys.executable, "-m", "pgqueue"]


@pytest.fixture(scope="module")
def newer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of this checkout that has one migration more."""
    place = tmp_path_factory.mktemp("newer")
    for folder in ("pgqueue", "sql"):
        shutil.copytree(ROOT / folder, place / folder, ignore=shutil.ignore_patterns("__pycache__"))
    name, sql = later(breaking=False)
    (place / "sql" / "migrations" / f"{name}.sql").write_text(sql, encoding="utf-8")
    return place


def clean() -> dict[str, str]:
    """Nothing of the checkout in the environment."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("PGQUEUE_", "PYTHON"))}


def run(place: Path, dsn: str, *arguments: str, code: int = 0) -> str:
    """What `pgqueue` of the checkout at this place says."""
    environment = clean() | {"PGQUEUE_DSN": dsn, "PYTHONPATH": str(place)}
    command = [*PGQUEUE, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, cwd="/")
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@contextmanager
def working(place: Path, dsn: str, directory: Path, name: str) -> Iterator[subprocess.Popen[bytes]]:
    """A worker process of the checkout at this place; killed at the end if it still lives."""
    environment = clean() | {"RAN": str(directory / name), "PGQUEUE_DSN": dsn, "PYTHONPATH": str(place)}
    command = [*PGQUEUE, "work", "jobs", "--app-dir", str(directory), "--version-tag", name, "--lease", "6s"]
    with (directory / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stderr=log, stdout=log, cwd="/")
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def ran(directory: Path, name: str) -> list[int]:
    file = directory / name
    return [int(line) for line in file.read_text().split()] if file.exists() else []


@pytest.mark.promise("F15")
def test_a_later_pgqueue_does_not_start_before_its_schema_is_there(newer: Path, dsn: str, tmp_path: Path) -> None:
    (tmp_path / "jobs.py").write_text(TASKS)
    name, _ = later(breaking=False)
    assert f"lacks {name}" in run(newer, dsn, "migrate", "--check", code=1)
    assert f"lacks {name}; run `pgqueue migrate`" in run(newer, dsn, "work", "jobs", "--app-dir", str(tmp_path), code=4)


@pytest.mark.second
@pytest.mark.promise("F15")
def test_the_schema_arrives_while_an_earlier_worker_works_and_a_new_one_joins_it(
    newer: Path, empty_dsn: str, tmp_path: Path
) -> None:
    (tmp_path / "jobs.py").write_text(TASKS)
    name, _ = later(breaking=False)
    run(ROOT, empty_dsn, "migrate")
    eyes = Eyes(empty_dsn)
    with working(ROOT, empty_dsn, tmp_path, "old") as old, Stream(empty_dsn, 200.0) as stream:
        wait_until(lambda: len(ran(tmp_path, "old")) > 200)
        began, before = time.monotonic(), len(stream.committed)
        assert f"applied {name}\n" in run(newer, empty_dsn, "migrate")
        print(f"{name} in {time.monotonic() - began:.1f} s, beside {len(stream.committed) - before} jobs")
        assert "nothing to do; 1 newer than this pgqueue" in run(ROOT, empty_dsn, "migrate", "--check")
        with working(newer, empty_dsn, tmp_path, "new") as young:
            wait_until(lambda: len(ran(tmp_path, "new")) > 200)
            seen = len(ran(tmp_path, "old"))
            stream.more(500)
            wait_until(lambda: len(ran(tmp_path, "old")) > seen)
            old.terminate()
            assert old.wait(30) == 0, (tmp_path / "old.log").read_text()
            stream.more(200)
            stream.end()
            settled(eyes, 30.0)
            young.terminate()
            assert young.wait(30) == 0, (tmp_path / "new.log").read_text()
    counts = [len(ran(tmp_path, name)) for name in ("old", "new")]
    found = drawn_up(eyes, stream, Counter(ran(tmp_path, "old") + ran(tmp_path, "new")))
    print(f"{counts[0]} by the old worker, {counts[1]} by the new; {found}")
    assert (found.lost, found.twice, found.crashes) == ([], [], 0)
    assert eyes.one("SELECT count(*) FROM pgqueue.attempt") == 0
    assert eyes.one("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()") == 0
    last = (
        "SELECT colour, date_trunc('milliseconds', finished_at) = finished_at FROM pgqueue.job ORDER BY id DESC LIMIT 1"
    )
    assert eyes.all(last) == [("grey", True)]
    eyes.close()


# On a later schema ---------------------------------------------------------------------------------------------------

LONE = """
import pgqueue

@pgqueue.task(name="lone")
async def lone() -> None: ...
"""


@pytest.fixture
def app(tmp_path: Path) -> Path:
    (tmp_path / "jobs.py").write_text(LONE)
    return tmp_path


def a_job_is_run(dsn: str, eyes: Eyes) -> None:
    done = eyes.one("SELECT count(*) FROM pgqueue.job WHERE state = 'completed'")
    assert commands.pgqueue("enqueue", "lone", dsn=dsn).returncode == 0
    wait_until(lambda: eyes.one("SELECT count(*) FROM pgqueue.job WHERE state = 'completed'") > done)


def refusal(name: str) -> str:
    """What a worker says of a later migration that is breaking: both versions, and what to do."""
    known = f"(its newest is {migrations.files()[-1]})"
    return f"has {name}, which this pgqueue does not know {known} and cannot work with; upgrade pgqueue here"


@pytest.mark.promise("F15")
@pytest.mark.parametrize("form", ["text", "json"])
def test_a_worker_does_not_start_on_a_later_schema_that_breaks_it_and_says_so_in_one_line(
    form: str, dsn: str, eyes: Eyes, app: Path
) -> None:
    name = apply_later(dsn, breaking=True)
    done = commands.pgqueue("work", "jobs", "--log-format", form, dsn=dsn, cwd=app)
    [line] = done.stderr.splitlines()
    said = json.loads(line) if form == "json" else {"level": line.split()[1].lower(), "message": line}
    assert (done.returncode, said["level"], refusal(name) in said["message"]) == (4, "critical", True), line
    assert eyes.all("SELECT id FROM pgqueue.worker") == []


@pytest.mark.promise("F15")
def test_a_worker_starts_and_works_on_a_later_schema_that_does_not_break_it(dsn: str, eyes: Eyes, app: Path) -> None:
    name = apply_later(dsn, breaking=False)
    with commands.working("jobs", dsn=dsn, cwd=app) as worker:
        worker.says(f"schema:      pgqueue, version {int(name[:4])}")
        a_job_is_run(dsn, eyes)
        worker.signal(signal.SIGTERM)
        assert worker.ends() == 0, worker.output


@pytest.mark.second
@pytest.mark.promise("F15")
@pytest.mark.parametrize("breaking", [False, True])
def test_a_worker_that_works_looks_at_the_schema_again_only_when_it_begins_anew(
    breaking: bool, dsn: str, eyes: Eyes, app: Path
) -> None:
    with commands.working("jobs", "--lease", "2s", dsn=dsn, cwd=app) as worker:
        worker.says("leads now")
        name = apply_later(dsn, breaking=breaking)
        a_job_is_run(dsn, eyes)
        assert eyes.one("DELETE FROM pgqueue.worker RETURNING id") == 1  # so do others who take it for dead
        worker.says("worker 1 was taken for dead")
        if breaking:
            assert worker.ends() == 4, worker.output
            assert "CRITICAL" in worker.lines[-1] and refusal(name) in worker.lines[-1]
            assert "Traceback" not in worker.output
        else:
            wait_until(lambda: eyes.one("SELECT id FROM pgqueue.worker") == 2)
            a_job_is_run(dsn, eyes)
            worker.signal(signal.SIGTERM)
            assert worker.ends() == 0, worker.output


FORGETS = """
    CREATE FUNCTION forgets() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN NEW.node := NULL; RETURN NEW; END';
    CREATE TRIGGER forgets BEFORE INSERT ON pgqueue.job_running FOR EACH ROW EXECUTE FUNCTION forgets();
"""
"""What a claim does that does not know the column."""


@pytest.mark.promise("F269")
@pytest.mark.parametrize("naive", [False, True])
async def test_a_job_keeps_its_node_when_a_worker_of_the_version_before_claims_it(
    naive: bool, dsn: str, eyes: Eyes
) -> None:
    """On the later schema. One job of a node runs, the other one has ended: what waits for the node still waits. After
    a claim that drops the node it starts early."""
    apply_later(dsn, breaking=False)
    if naive:
        eyes.do(FORGETS)
    begun, goes = asyncio.Event(), asyncio.Event()

    @pgqueue.task(name="versions.part")
    async def part(waits: bool) -> None:
        if waits:
            begun.set()
            await goes.wait()

    @pgqueue.task(name="versions.last")
    async def last() -> None: ...

    flow = pgqueue.Flow("versions")
    parts = flow.add_many([part.new(waits) for waits in (True, False)])
    end = flow.add(last.new(), after=[parts])
    with psycopg.connect(dsn) as conn:
        handle = flow.enqueue(conn)
    (runs, ended), [waiting] = handle.jobs(parts), handle.jobs(end)
    async with work(dsn, part, last) as worker:
        await begun.wait()
        await until(eyes.is_in(ended.id, "completed"))
        worker.services.releaser.look_at([handle.id << 20 | parts.number])
        await worker.services.releaser.idle()
        assert eyes.state(runs.id) == "running"
        assert (eyes.state(waiting.id) == "blocked") is not naive
        goes.set()
        await until(eyes.is_in(waiting.id, "completed"))
    assert eyes.one("SELECT node FROM pgqueue.job WHERE id = %s", runs.id) == (
        None if naive else handle.id << 20 | parts.number
    )
