"""SIGTERM ends `pgqueue work`, whatever its handlers have left behind, and no job runs in two processes for that."""

from __future__ import annotations

import signal
from pathlib import Path

import psycopg
import pytest
import threadless
from commands import pgqueue, working
from workers import Eyes, wait_until

APP = """
import asyncio, atexit, fcntl, multiprocessing, os, pathlib, threading, time
import pgqueue

def at_work() -> None:
    '''As long as this process lives, no other one comes past this line.'''
    global LOCK
    pathlib.Path(f"begun.{os.getpid()}").touch()
    LOCK = open("lock", "w")
    ends = time.monotonic() + 10
    while True:
        try:
            fcntl.flock(LOCK, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > ends:
                pathlib.Path("overlap").touch()
                break
            time.sleep(0.01)
    pathlib.Path(f"alone.{os.getpid()}").touch()

def goes_on() -> None:
    at_work()
    time.sleep(60)  # a child that nothing ends would keep the test's pipe open

@pgqueue.task(name="deaf", lock="one", timeout=600)
async def deaf() -> None:
    at_work()
    while True:
        try:
            await asyncio.sleep(0.01)
        except BaseException:
            continue

@pgqueue.task(name="thread", lock="one", timeout=600)
async def thread() -> None:
    await asyncio.to_thread(goes_on)

@pgqueue.task(name="child", lock="one", timeout=600)
async def child() -> None:
    multiprocessing.get_context("spawn").Process(target=goes_on).start()
    await asyncio.sleep(600)

@pgqueue.task(name="query", lock="one", timeout=600, transactional=True)
def query(job: pgqueue.Job) -> None:
    at_work()
    while True:
        try:
            job.connection.execute("SELECT pg_sleep(600)")
        except BaseException:
            time.sleep(0.01)

@pgqueue.task(name="commits", transactional=True)
def commits(job: pgqueue.Job) -> None:
    job.connection.execute("INSERT INTO effect VALUES (1)")

@pgqueue.task(name="late", timeout=600)
async def late() -> str:
    pathlib.Path("late").touch()
    try:
        await asyncio.sleep(600)
    except asyncio.CancelledError:
        return "all the same"

@pgqueue.task(name="leaves")
async def leaves(what: str) -> None:
    if what == "thread":
        threading.Thread(target=time.sleep, args=[600], name="strayed").start()
    elif what == "task":
        global TASK
        TASK = asyncio.create_task(deaf.fn())
    elif what == "child":
        multiprocessing.get_context("spawn").Process(target=time.sleep, args=[60], name="left").start()
    elif what == "atexit":
        atexit.register(time.sleep, 600)

if os.environ.get("LIFESPAN"):
    @pgqueue.lifespan
    async def lifespan():
        yield
        await asyncio.sleep(600)
"""

HARNESS = str(Path(threadless.__file__).parent)
ATTEMPTS = "SELECT outcome FROM pgqueue.attempt"
SLOW = """
CREATE TABLE effect (id int);
CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM pg_sleep(600); RETURN NULL; END';
CREATE CONSTRAINT TRIGGER slow AFTER INSERT ON effect DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW EXECUTE FUNCTION slow();
"""
COMMITTING = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'PgSleep'"


@pytest.fixture
def app(tmp_path: Path) -> Path:
    (tmp_path / "shop.py").write_text(APP)
    return tmp_path


@pytest.mark.promise("F212")
@pytest.mark.parametrize(
    "task", ["deaf", *(pytest.param(each, marks=pytest.mark.second) for each in ("thread", "child", "query"))]
)
def test_a_locked_job_that_outlasts_the_grace_runs_in_one_process_at_a_time(
    task: str, dsn: str, app: Path, eyes: Eyes, conn: psycopg.Connection
) -> None:
    with (
        working("shop", "--grace", "300ms", "--lease", "60s", dsn=dsn, cwd=app) as first,
        working("shop", "--grace", "300ms", "--lease", "60s", dsn=dsn, cwd=app) as second,
    ):
        first.says("ready"), second.says("ready")
        conn.execute("SELECT pgqueue.enqueue(%s, lock_key => 'one')", [task])
        conn.commit()
        wait_until(lambda: list(app.glob("alone.*")))
        worker = eyes.one("SELECT worker_id FROM pgqueue.job")
        pid = eyes.one("SELECT pid FROM pgqueue.worker WHERE id = %s", worker)
        one, other = (first, second) if first.process.pid == pid else (second, first)
        one.signal(signal.SIGTERM)
        assert one.ends() == 5
        wait_until(lambda: len(list(app.glob("alone.*"))) == 2)
        assert not (app / "overlap").exists()
        assert eyes.all("SELECT state, attempt, crashes FROM pgqueue.job") == [("running", 1, 0)]
        assert eyes.all(ATTEMPTS) == [("interrupted",)]
        assert eyes.all("SELECT id FROM pgqueue.worker WHERE id = %s", worker) == []
        one.says("1 job was still running after 0.3 s and is given back as this process ends")
        other.signal(signal.SIGTERM)
        assert other.ends() == 5


@pytest.mark.promise("F212")
def test_what_has_ended_is_written_before_the_process_ends_and_the_history_counts_all(
    dsn: str, app: Path, eyes: Eyes
) -> None:
    with working("shop", "--grace", "300ms", dsn=dsn, cwd=app, LIFESPAN="hangs") as one:
        for task in ("deaf", "late"):
            pgqueue("enqueue", task, dsn=dsn)
        wait_until(lambda: (app / "late").exists() and list(app.glob("alone.*")))
        one.signal(signal.SIGTERM)
        assert one.ends() == 5
        one.says("the lifespan has not ended within 2 s")
    states = eyes.all("SELECT task, state, attempt FROM pgqueue.job ORDER BY task")
    assert states == [("deaf", "available", 0), ("late", "completed", 1)]
    counted = "SELECT c->>'task', (c->>'{}')::int FROM pgqueue.history_part, jsonb_array_elements(counts) c"
    assert ("late", 1) in eyes.all(counted.format("completed"))
    assert ("deaf", 1) in eyes.all(counted.format("interrupted"))


@pytest.mark.second
@pytest.mark.promise("F212")
def test_a_commit_under_way_at_the_end_is_undone_with_its_job_or_done_with_it(dsn: str, app: Path, eyes: Eyes) -> None:
    eyes.do(SLOW)
    with working("shop", "--grace", "300ms", dsn=dsn, cwd=app) as one:
        pgqueue("enqueue", "commits", dsn=dsn)
        wait_until(lambda: eyes.one(COMMITTING) == 1)
        one.signal(signal.SIGTERM)
        assert one.ends() == 5
    assert eyes.one(COMMITTING) == 0, "no session of a handler outlives the process"
    assert eyes.all("SELECT state, attempt FROM pgqueue.job") == [("available", 0)]
    assert eyes.all("SELECT * FROM effect") == []


@pytest.mark.second
@pytest.mark.promise("F213")
@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("thread", "thread strayed at "),
        ("task", "task deaf"),
        ("child", "process left of multiprocessing"),
        ("atexit", "something outside of Python's threads"),
    ],
)
def test_after_an_orderly_stop_the_process_ends_though_something_keeps_it_and_names_it(
    what: str, says: str, dsn: str, app: Path, eyes: Eyes
) -> None:
    with working("shop", dsn=dsn, cwd=app) as one:
        pgqueue("enqueue", "leaves", f'{{"what": "{what}"}}', dsn=dsn)
        wait_until(eyes.done(1))
        one.signal(signal.SIGTERM)
        assert one.ends() == 0
        one.says("stopped in order")
        assert says in one.says("this process does not end by itself")
    assert eyes.all("SELECT id FROM pgqueue.worker") == []


WEARS = """
import asyncio, pathlib, time
import pgqueue
from pgqueue.worker.run import threads
from threadless import no_threads

threads.START_SECONDS, threads.AGAIN_SECONDS, threads.STARVED_SECONDS = 0.3, 0.2, 1.0

def goes() -> bool:
    return pathlib.Path("go").exists()

@pgqueue.task(name="thread", timeout=0.2)
def thread() -> None:
    while True:
        try:
            time.sleep(0.01)
        except BaseException:
            continue

@pgqueue.task(name="coroutine", timeout=0.2)
async def coroutine() -> None:
    while True:
        try:
            await asyncio.sleep(0.01)
        except BaseException:
            continue

@pgqueue.task(name="limit")
async def limit(way: str) -> None:
    with no_threads(way):
        pathlib.Path("begun").touch()
        while not goes():
            await asyncio.sleep(0.01)

@pgqueue.task(name="held")
async def held() -> None:
    pathlib.Path("begun").touch()
    while not goes():
        await asyncio.sleep(0.01)

@pgqueue.task(name="plain")
def plain() -> None: ...
"""


@pytest.mark.second
@pytest.mark.promise("F214")
@pytest.mark.parametrize("lost", ["thread", "coroutine"])
def test_a_process_that_has_lost_half_of_its_slots_lets_its_jobs_end_and_ends_with_6(
    lost: str, dsn: str, tmp_path: Path, eyes: Eyes
) -> None:
    (tmp_path / "shop.py").write_text(WEARS)
    with working("shop", "--concurrency", "2", dsn=dsn, cwd=tmp_path, PYTHONPATH=HARNESS) as one:
        for task in ("held", lost):
            pgqueue("enqueue", task, dsn=dsn)
        wait_until((tmp_path / "begun").exists)
        one.says("half of this worker's slots are lost")
        pgqueue("enqueue", "plain", dsn=dsn)
        (tmp_path / "go").touch()
        assert one.ends() == 6
        one.says("this process ends (exit code 6), so that it is replaced")
    states = dict(eyes.all("SELECT task, state FROM pgqueue.job"))
    assert (states["held"], states["plain"]) == ("completed", "available")


@pytest.mark.second
@pytest.mark.promise("F214", "F40")
@pytest.mark.parametrize("way", ["refused", "stillborn"])
def test_a_process_that_gets_no_thread_for_long_gives_back_what_waits_and_ends_with_6(
    way: str, dsn: str, tmp_path: Path, eyes: Eyes
) -> None:
    (tmp_path / "shop.py").write_text(WEARS)
    with working("shop", dsn=dsn, cwd=tmp_path, PYTHONPATH=HARNESS) as one:
        pgqueue("enqueue", "limit", f'{{"way": "{way}"}}', dsn=dsn)
        wait_until((tmp_path / "begun").exists)
        for _ in range(3):
            pgqueue("enqueue", "plain", dsn=dsn)
        one.says("no thread could be started for 1 s")
        wait_until(lambda: eyes.states() == {"running": 1, "available": 3})
        (tmp_path / "go").touch()
        assert one.ends() == 6
    assert eyes.states() == {"completed": 1, "available": 3}
    assert eyes.all("SELECT DISTINCT attempt FROM pgqueue.job WHERE state = 'available'") == [(0,)]
