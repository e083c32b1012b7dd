"""What a handler forks is no worker: it ends where it comes out of the handler, and has nothing of ours.

Real worker processes. A child says what it does by the same pipe as its parent, each line written at once.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import psutil
import psycopg
import pytest
from workers import Eyes, Process, wait_until, workers

import pgqueue
from pgqueue.database.forks import WAITED

pytestmark = pytest.mark.promise("F42")

WAYS = ["returns", "raises", "leaves", "is killed"]
CODES = {"returns": 0, "raises": 1, "leaves": 7, "is killed": -9}

FORKING = """
import signal, sys
import psycopg

def fork(way):
    child = os.fork()
    if child:
        say("ended", way=way, code=os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        return
    os.environ["CHILD"] = way
    if way == "raises":
        raise ValueError("in a child")
    if way == "leaves":
        sys.exit(7)
    if way == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)

def ran(job):
    say("ran", job=job.id, pid=os.getpid())

@pgqueue.task(name="fork.thread", retry=1)
def in_thread(job: pgqueue.Job, way: str) -> None:
    ran(job)
    fork(way)

@pgqueue.task(name="fork.loop", retry=1)
async def on_loop(job: pgqueue.Job, way: str) -> None:
    ran(job)
    fork(way)

@pgqueue.task(name="fork.transaction", retry=1, transactional=True)
def in_transaction(job: pgqueue.Job, way: str) -> None:
    ran(job)
    job.connection.execute("INSERT INTO effect VALUES (%s)", [job.id])
    fork(way)

@pgqueue.task(name="fork.waits", retry=1)
async def waits(job: pgqueue.Job, way: str) -> None:
    ran(job)
    child = os.fork()
    if child:
        while os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            await asyncio.sleep(0.01)
        say("ended", code=os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    else:
        await asyncio.sleep(0)
        say("went on", job=job.id)

@pgqueue.task(name="fork.plain")
def plain(job: pgqueue.Job) -> None:
    ran(job)

@pgqueue.task(name="fork.plain_on_loop")
async def plain_on_loop(job: pgqueue.Job) -> None:
    ran(job)
    await asyncio.sleep(0)
    ran(job)

@pgqueue.on_finish
def finished(job, outcome):
    say("finished", job=job.id, pid=os.getpid())

@pgqueue.middleware
def around(job, call):
    try:
        return call()
    finally:
        say("around", job=job.id, pid=os.getpid())
"""

KEPT = """
import multiprocessing, signal, threading

@pgqueue.task(name="fork.pool")
def pool(job: pgqueue.Job) -> int:
    with multiprocessing.get_context("fork").Pool(2) as processes:
        return sum(processes.map(abs, range(-9, 0)))

@pgqueue.task(name="fork.lasts")
def lasts(job: pgqueue.Job) -> None:
    if os.fork() == 0:
        say("child", pid=os.getpid(), threads=threading.active_count())
        while True:
            time.sleep(1)

@pgqueue.task(name="fork.lasts_on_loop")
async def lasts_on_loop(job: pgqueue.Job) -> None:
    if os.fork() == 0:
        say("child", pid=os.getpid(), threads=threading.active_count())
        while True:
            time.sleep(1)

@pgqueue.task(name="fork.closes", transactional=True)
def closes(job: pgqueue.Job) -> None:
    job.connection.execute("SELECT 1")
    child = os.fork()
    if child:
        say("closed", code=os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        job.connection.execute("SELECT 1")
    else:
        job.connection.pgconn.finish()
        say("finished")
        os._exit(0)

@pgqueue.task(name="fork.nothing")
async def nothing(job: pgqueue.Job) -> None: ...
"""


def put(dsn: str, name: str, number: int = 1, **args: object) -> list[int]:
    with psycopg.connect(dsn) as conn:
        return [job.id for job in pgqueue.enqueue_many(conn, [pgqueue.remote(name).new(**args)] * number)]


@pytest.fixture
def effects(eyes: Eyes) -> Eyes:
    eyes.do("CREATE TABLE effect (job bigint)")
    return eyes


@pytest.mark.parametrize("kind", ["thread", "loop", "transaction"])
def test_a_child_that_comes_out_of_its_handler_runs_no_job_and_ends(
    tmp_path: Path, dsn: str, effects: Eyes, kind: str
) -> None:
    """Each way out, with jobs at hand that the child would run next; none of them runs twice, no hook runs there."""
    with workers(tmp_path, dsn, FORKING) as all_workers:
        for way in WAYS:
            put(dsn, f"fork.{kind}", way=way)
            put(dsn, "fork.plain", 20)
            put(dsn, "fork.plain_on_loop", 20)
        [worker] = all_workers.ready(concurrency=2)
        for way in WAYS:
            assert worker.event("ended", way=way)["code"] == CODES[way], worker.written()
        wait_until(effects.done(4 * 41), 20)
        assert worker.stop() == 0
        assert {event["pid"] for name in ("ran", "around", "finished") for event in worker.all(name)} == {worker.pid}
        assert len(worker.all("ran")) == 4 * (1 + 20 + 40)
        assert worker.event("stopped")["fenced"] == 0
        assert worker.written().count("has come out of it") == 3, "one that is killed says nothing"
        assert "ValueError: in a child" in worker.written()
    assert effects.states() == {"completed": 4 * 41}
    assert effects.one("SELECT count(*)::int FROM effect") == (4 if kind == "transaction" else 0)


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_child_that_waits_on_its_parents_loop_ends(tmp_path: Path, dsn: str, eyes: Eyes, loop: str) -> None:
    with workers(tmp_path, dsn, FORKING) as all_workers:
        put(dsn, "fork.waits", way="")
        put(dsn, "fork.plain_on_loop", 20)
        worker = all_workers.start({"LOOP": loop})
        wait_until(eyes.done(21), 20)
        assert worker.stop() == 0
        assert worker.event("ended")["code"] == WAITED, worker.written()
        assert worker.all("went on") == []
        assert {event["pid"] for event in worker.all("ran")} == {worker.pid}
        assert "waits on the event loop of its parent" in worker.written()


def test_a_pool_of_processes_works_in_a_handler(tmp_path: Path, dsn: str, eyes: Eyes) -> None:
    """multiprocessing forks, and its children never come out of the handler: they are left alone."""
    with workers(tmp_path, dsn, KEPT) as all_workers:
        all_workers.ready()
        [job] = put(dsn, "fork.pool")
        wait_until(eyes.is_in(job, "completed"), 20)
        assert eyes.one("SELECT result FROM pgqueue.job_done WHERE id = %s", job) == 45


def sockets(pid: int) -> set[str]:
    """The inodes of a process's sockets."""
    found = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = str(link.readlink())
        except FileNotFoundError:
            continue
        if target.startswith("socket:"):
            found.add(target)
    return found


def child_of(worker: Process, dsn: str, task: str) -> psutil.Process:
    put(dsn, task)
    return psutil.Process(worker.event("child")["pid"])


@pytest.mark.parametrize("task", ["fork.lasts", "fork.lasts_on_loop"])
def test_a_child_that_lives_on_keeps_no_socket_of_ours_open(tmp_path: Path, dsn: str, eyes: Eyes, task: str) -> None:
    """The worker is killed: its sessions end at once, though its child lives. And the child obeys SIGTERM."""
    with workers(tmp_path, dsn, KEPT) as all_workers:
        [worker] = all_workers.ready()
        put(dsn, "fork.nothing")
        wait_until(eyes.done(1))  # all connections of a worker are there
        child = child_of(worker, dsn, task)
        try:
            assert sockets(child.pid) & sockets(worker.pid) == set()
            assert len(eyes.backends()) >= 4
            worker.kill()
            wait_until(lambda: not eyes.backends(), 5.0)
            assert child.is_running()
            child.send_signal(signal.SIGTERM)
            wait_until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, 5.0)
        finally:
            if child.is_running():
                child.kill()


def test_a_child_cannot_end_a_session_of_its_parent(tmp_path: Path, dsn: str, eyes: Eyes) -> None:
    """It closes the connection itself, as its garbage collection might: the server hears no word of it."""
    with workers(tmp_path, dsn, KEPT) as all_workers:
        [worker] = all_workers.ready()
        [job] = put(dsn, "fork.closes")
        assert worker.event("closed")["code"] == 0
        wait_until(eyes.is_in(job, "completed"))
        assert eyes.one("SELECT count(*)::int FROM pgqueue.attempt") == 0


SIGNALS = """
import os, signal
from pgqueue.database import forks

def handled(number, frame): ...

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whatever the tests were started with
forks.handle_signal(signal.SIGTERM, handled)
forks.handle_signal(signal.SIGUSR1, handled)
forks.handle_signal(signal.SIGHUP, signal.SIG_IGN)
signal.signal(signal.SIGUSR1, other := lambda number, frame: None)
if os.fork() == 0:
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGUSR1) is other, "the application's own stays"
    os._exit(0)
assert os.wait()[1] == 0
assert signal.getsignal(signal.SIGTERM) is handled
"""


def test_signal_handlers_of_ours_are_taken_back_in_a_child() -> None:
    subprocess.run([sys.executable, "-c", SIGNALS], check=True)


def test_a_child_that_is_ended_before_it_has_begun_ends() -> None:
    """A Pool of multiprocessing ends its processes so. Without a mask its parent's handler would hear the signal."""
    told = """
        import asyncio, os, signal, time
        os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.SIGTERM))  # before anything of ours
        from pgqueue.database import forks
        async def main():
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, lambda: None)
            if not (child := os.fork()):
                time.sleep(20)
                os._exit(0)
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), signal.pthread_sigmask(signal.SIG_BLOCK, ()))
        asyncio.run(main())
    """
    done = subprocess.run([sys.executable, "-c", dedent(told)], capture_output=True, text=True, timeout=60)
    assert done.stdout == f"{-signal.SIGTERM} set()\n", done.stderr


PLACES = ["arguments", "on_start", "before", "after", "on_finish", "start_line", "failure_line"]
WHERES = [f"{place}.{kind}" for place in PLACES for kind in ("thread", "loop")]
AROUND = (
    f"PLACES = {PLACES}"
    + """
import logging, sys
from dataclasses import dataclass

def fork(where, job):
    if not job.task.startswith(where + "."):
        return
    say("meets", where=job.task, pid=os.getpid())
    child = os.fork()
    if child:
        say("ended", where=job.task, code=os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    elif job.task == "on_start.loop":
        sys.exit(7)  # an exception of a hook goes no further in its parent
    elif job.task == "on_finish.thread":
        raise ValueError("in a child")

def passes(what, job):
    say(what, where=job.task, pid=os.getpid())

@dataclass
class Part:
    number: int

    def __post_init__(self):
        fork("arguments", pgqueue.current_job())

class ForkingFilter(logging.Filter):
    def filter(self, record):
        if "started" in record.getMessage():
            fork("start_line", record)
        elif "failed" in record.getMessage():
            fork("failure_line", record)
        return True

logging.getLogger("pgqueue.job").setLevel(logging.DEBUG)
logging.getLogger("pgqueue.job").addFilter(ForkingFilter())

def declare(where):
    @pgqueue.task(name=where + ".thread", retry=1)
    def in_thread(job: pgqueue.Job, part: Part) -> None:
        passes("ran", job)
        if where == "failure_line":
            raise ValueError("on purpose")

    @pgqueue.task(name=where + ".loop", retry=1)
    async def on_loop(job: pgqueue.Job, part: Part) -> None:
        passes("ran", job)
        if where == "failure_line":
            raise ValueError("on purpose")

for place in PLACES:
    declare(place)

@pgqueue.on_start
def forks_first(job):
    fork("on_start", job)

@pgqueue.on_start
def starts_then(job):
    passes("starts", job)

@pgqueue.middleware
def outer(job, call):
    passes("enters", job)
    try:
        return call()
    finally:
        passes("leaves", job)

@pgqueue.middleware
def forking(job, call):
    fork("before", job)
    call()
    fork("after", job)

@pgqueue.middleware
def inner(job, call):
    passes("comes in", job)
    return call()

@pgqueue.middleware
async def outer_on_loop(job, call):
    passes("enters", job)
    try:
        return await call()
    finally:
        passes("leaves", job)

@pgqueue.middleware
async def forking_on_loop(job, call):
    fork("before", job)
    await call()
    fork("after", job)

@pgqueue.middleware
async def inner_on_loop(job, call):
    passes("comes in", job)
    return await call()

@pgqueue.on_finish
def forks_last(job, outcome):
    fork("on_finish", job)

@pgqueue.on_finish
def finishes_then(job, outcome):
    passes("finishes", job)
"""
)
PASSES = ("ran", "starts", "enters", "comes in", "leaves", "finishes")


@pytest.mark.promise("F235")
def test_a_child_that_is_forked_around_a_handler_runs_nothing_and_ends(tmp_path: Path, dsn: str, eyes: Eyes) -> None:
    """While arguments are decoded, in a hook, in middleware, in a filter of the log: no handler, no other hook and no
    other middleware runs in a child, and no child stays."""
    with workers(tmp_path, dsn, AROUND) as all_workers:
        for where in WHERES:
            put(dsn, where, 2, part={"number": 1})
        [worker] = all_workers.ready(concurrency=2)
        try:
            wait_until(lambda: eyes.states() == {"completed": 2 * len(WHERES) - 4, "failed": 4}, 20)
        finally:
            for child in psutil.Process(worker.pid).children(recursive=True):
                child.kill()  # one that stays would keep the pipe of its events open
        assert worker.stop() == 0
        assert {event["pid"] for what in (*PASSES, "meets") for event in worker.all(what)} == {worker.pid}
        for what in PASSES:
            assert sorted(event["where"] for event in worker.all(what)) == sorted(2 * WHERES), what
        ended = [(event["where"], event["code"]) for event in worker.all("ended")]
        codes = dict.fromkeys(WHERES, 0) | {"on_start.loop": 7, "on_finish.thread": 1}
        assert sorted(ended) == sorted(2 * [*codes.items()]), worker.written()
        assert worker.event("stopped")["fenced"] == 0
        assert worker.written().count("has come out of") == len(ended)
