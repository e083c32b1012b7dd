"""The jobs of dead workers run again: killed, stopped, blocked and slow ones, each in a real process."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import time
import warnings
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo
from servers import Server
from workers import Eyes, Stalls, Taker, until, wait_until, work, workers

import pgqueue
from pgqueue.client.tasks import task
from pgqueue.database import grants, migrations, statements
from pgqueue.database.sessions import Link, Session
from pgqueue.testing import Clock
from pgqueue.worker.liveness.rescue import BATCH, REPORTS, Rescue

TASKS = """
import ctypes

@pgqueue.task(name="crash.waits")
async def waits(key: int) -> int:
    say("started", key=key, pid=os.getpid())
    while not os.path.exists(os.environ["GO"]):
        await asyncio.sleep(0.02)
    say("ended", key=key)
    return os.getpid()

@pgqueue.task(name="crash.blocks")
async def blocks() -> int:
    say("started", key=-1)
    while not os.path.exists(os.environ["GO"]):
        pass
    say("ended", key=-1)
    return os.getpid()

@pgqueue.task(name="crash.holds")
def holds(job: pgqueue.Job) -> int:
    # The first time in one call into C that never lets go of the interpreter, until something is in the pipe.
    if job.attempt == 1:
        pipe = os.open(os.environ["GO"] + ".pipe", os.O_RDWR)
        say("started", key=-3)
        ctypes.PyDLL(None).read(pipe, ctypes.create_string_buffer(1), 1)
    return os.getpid()

@pgqueue.task(name="crash.quick")
async def quick(key: int) -> None:
    if not key:
        say("begun", key=key)
    with open(os.environ["RAN"], "a") as ran:
        ran.write(f"{key}\\n")

@pgqueue.task(name="crash.sleeps")
async def sleeps(key: int) -> None:
    await asyncio.sleep(0.02)
    with open(os.environ["RAN"], "a") as ran:
        ran.write(f"{key}\\n")

@pgqueue.task(name="crash.dies")
async def dies() -> None:
    say("started", key=-2)
    os._exit(9)
"""
# The worker stops itself once: when its first claim is sent, and nothing of the answer read; or when it was committed;
# or in the middle of an admit, its keys locked.
STOPS = """
import signal
from pgqueue.database import statements
from pgqueue.worker.fetch.fetcher import Fetcher
from pgqueue.database.pipeline import Wire

put, claim, where = Wire.put, Fetcher._claim, [os.environ["STOPS"]]

def stop(here: str) -> None:
    if where == [here]:
        where.clear()
        say("stops")
        os.kill(os.getpid(), signal.SIGSTOP)

def stopping_put(self, message):
    parts = put(self, message)
    for here, name in ("sent", "fetch_claim"), ("unblock_move", "unblock_move"), ("unblock_next", "unblock_next"):
        if message.sql == statements.text(name, "pgqueue"):
            while self.pgconn.flush():
                pass
            stop(here)
    return parts

async def stopping_claim(self, *args, **how):
    answer = await claim(self, *args, **how)
    stop("committed")
    return answer

Wire.put, Fetcher._claim = stopping_put, stopping_claim
"""
LEASE = 2.0
WHAT_STAYS = """SELECT pid, application_name, backend_start, state, wait_event, xact_start, left(query, 100)
                FROM pg_stat_activity WHERE pid = ANY (%s)"""
LOCKED = """SELECT bool_or(NOT pg_try_advisory_xact_lock(hashtextextended('pgqueue.lock:k' || n, 7)))
            FROM generate_series(0, 2) AS n"""


@pytest.fixture
def go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file whose coming lets the waiting handlers end."""
    monkeypatch.setenv("GO", str(tmp_path / "go"))
    monkeypatch.setenv("RAN", str(tmp_path / "ran"))
    return tmp_path / "go"


def put(dsn: str, name: str, *values: Mapping[str, object]) -> list[int]:
    with psycopg.connect(dsn) as conn:
        remote = pgqueue.remote(name)
        return [handle.id for handle in pgqueue.enqueue_many(conn, [remote.new(**value) for value in values])]


@task(name="rescue.nothing")
async def nothing() -> None: ...


# Killed --------------------------------------------------------------------------------------------------------------


@pytest.mark.second
@pytest.mark.promise("T04", "F04")
def test_the_jobs_of_a_killed_worker_run_again_and_what_had_not_started_carries_no_crash(
    tmp_path: Path, go: Path, dsn: str, eyes: Eyes
) -> None:
    with workers(tmp_path, dsn, TASKS) as made:
        [first] = made.ready(lease=LEASE, concurrency=2)
        started = put(dsn, "crash.waits", *({"key": key} for key in range(2)))
        for key in range(2):
            first.event("started", key=key)
        # Claimed and never started, as prefetch does it.
        worker = first.event("ready")["worker"]
        wait_until(lambda: eyes.one("SELECT cardinality(running) FROM pgqueue.worker") == 2)
        eyes.do(
            "INSERT INTO pgqueue.job (state, task, worker_id, claim, attempt, started_at, args) "
            "SELECT 'running', 'crash.waits', %s, 999, 1, w.beat_at - interval '1 ms', jsonb_build_object('key', n) "
            "FROM pgqueue.worker w, generate_series(2, 9) n WHERE w.id = %s",
            worker,
            worker,
        )
        [second] = made.ready(lease=LEASE, concurrency=20)
        first.kill()
        go.touch()
        wait_until(eyes.done(10))
        second.stop()
    assert eyes.all("SELECT DISTINCT crashes, attempt FROM pgqueue.job WHERE id = ANY (%s)", started) == [(1, 2)]
    assert eyes.all("SELECT DISTINCT crashes, attempt FROM pgqueue.job WHERE id <> ALL (%s)", started) == [(0, 1)]
    assert eyes.all("SELECT DISTINCT outcome FROM pgqueue.attempt") == [("crashed",)]


@pytest.mark.second
@pytest.mark.promise("F04")
async def test_a_kill_in_the_middle_of_many_quick_jobs_makes_suspects_of_few(
    tmp_path: Path, go: Path, dsn: str, eyes: Eyes
) -> None:
    """Suspects run one at a time: a thousand of them would be a stop of the queue, and they are innocent."""
    with workers(tmp_path, dsn, TASKS) as made:
        [first] = made.ready(lease=LEASE, concurrency=4)
        put(dsn, "crash.quick", *({"key": key} for key in range(6_000)))
        await asyncio.to_thread(first.event, "begun", key=0)
        await until(lambda: eyes.one("SELECT count(*) FROM pgqueue.job_running") > 200)
        first.kill()
        held = eyes.one("SELECT count(*) FROM pgqueue.job_running")
        made.ready(lease=LEASE)
        await until(eyes.done(6_000), 60.0)
        crashed = eyes.one("SELECT count(*) FROM pgqueue.job_done WHERE crashes > 0")
        print(f"{held} jobs were held by the worker that was killed, {crashed} carry a crash")
        assert held > 0
        assert crashed <= 8  # two times its slots


@pytest.mark.second
@pytest.mark.promise("T04")
def test_all_workers_killed_again_and_again_and_all_work_is_done(
    tmp_path: Path, go: Path, dsn: str, eyes: Eyes
) -> None:
    ran = Path(os.environ["RAN"])
    with workers(tmp_path, dsn, TASKS) as made:
        put(dsn, "crash.sleeps", *({"key": key} for key in range(400)))
        for round in range(1, 4):
            for process in made.ready(2, lease=LEASE, concurrency=2):
                wait_until(eyes.done(60 * round))
                process.kill()
        made.ready(2, lease=LEASE, concurrency=20)
        wait_until(eyes.done(400))
    keys = ran.read_text().split()
    assert set(keys) == set(map(str, range(400)))
    assert eyes.states() == {"completed": 400}
    print(f"{len(keys) - 400} runs more than jobs, after 6 kills")
    assert len(keys) - 400 <= 6 * 2 * 2


@pytest.mark.second
@pytest.mark.promise("F04")
def test_a_job_that_kills_its_worker_is_put_aside_after_three_crashes(
    tmp_path: Path, go: Path, dsn: str, eyes: Eyes
) -> None:
    [killer] = put(dsn, "crash.dies", {})
    with workers(tmp_path, dsn, TASKS) as made:
        for _ in range(3):
            process = made.start(lease=1.0)
            process.event("started", key=-2)
            process.wait()
        made.ready(lease=1.0)
        wait_until(lambda: eyes.state(killer) == "failed")
    assert eyes.all("SELECT reason, crashes, attempt FROM pgqueue.job_dead") == [("crashed", 3, 3)]
    assert eyes.one("SELECT count(*) FROM pgqueue.attempt WHERE outcome = 'crashed'") == 3


@pytest.mark.second
def test_a_killer_among_others_is_put_aside_and_the_others_complete(
    tmp_path: Path, go: Path, dsn: str, eyes: Eyes
) -> None:
    """No beat ever lists it. Neighbours that started with it are suspected, and cleared one at a time.

    A crash counts for as many as there were slots: on a slow machine, where neighbours had ended and that was not
    written yet, the killer may go free once or twice.
    """
    put(dsn, "crash.sleeps", *({"key": key} for key in range(10)))
    [killer] = put(dsn, "crash.dies", {})
    put(dsn, "crash.sleeps", *({"key": key} for key in range(10, 20)))
    with workers(tmp_path, dsn, TASKS) as made:
        died, last = 0, made.start(lease=1.0, concurrency=4)
        while died < 8:
            wait_until(lambda: last.process.poll() is not None or eyes.states() == {"failed": 1, "completed": 20})  # noqa: B023
            if last.process.poll() is None:
                break
            died, last = died + 1, made.start(lease=1.0, concurrency=4)
            assert eyes.one("SELECT crashes FROM pgqueue.job WHERE id = %s", killer) <= died
        assert died >= 3 and last.process.poll() is None
        assert last.all("started") == []
    assert eyes.all("SELECT id, reason, crashes, attempt FROM pgqueue.job_dead") == [(killer, "crashed", 3, 3)]
    assert eyes.one("SELECT max(crashes) FROM pgqueue.job_done") < 3
    assert eyes.one("SELECT count(*) FROM pgqueue.job_done WHERE attempt <> crashes + 1") == 0


# Stopped, blocked, slow ----------------------------------------------------------------------------------------------


@pytest.mark.second
@pytest.mark.promise("F01", "F24")
def test_a_stopped_worker_is_disarmed_and_its_late_outcome_dropped_and_counted(
    tmp_path: Path, go: Path, dsn: str, eyes: Eyes
) -> None:
    with workers(tmp_path, dsn, TASKS) as made:
        [first] = made.ready(lease=LEASE)
        [job] = put(dsn, "crash.waits", {"key": 1})
        first.event("started", key=1)
        first_id = first.event("ready")["worker"]
        wait_until(lambda: eyes.one("SELECT cardinality(running) FROM pgqueue.worker") == 1)
        sessions = {pid for pid, _ in eyes.backends()}
        [second] = made.ready(lease=LEASE)
        first.signal(signal.SIGSTOP)
        second.event("started", key=1)
        wait_until(lambda: not sessions & {pid for pid, _ in eyes.backends()})
        go.touch()
        second.event("ended", key=1)
        wait_until(eyes.done(1))
        first.signal(signal.SIGCONT)
        first.event("ended", key=1)
        # It takes part again, under another id.
        wait_until(lambda: eyes.one("SELECT count(*) FROM pgqueue.worker WHERE dead_at IS NULL") == 2)
        again = put(dsn, "crash.waits", *({"key": key} for key in range(10, 40)))
        wait_until(eyes.done(1 + len(again)))
        first.stop()
        second.stop()
        assert first.event("stopped")["fenced"] == 1
        assert second.event("stopped")["fenced"] == 0
        assert f"job {job} (crash.waits): had been given to another worker" in first.written()
    [(worker, attempt, result)] = eyes.all("SELECT worker_id, attempt, result FROM pgqueue.job WHERE id = %s", job)
    assert (worker != first_id, attempt, result) == (True, 2, second.pid)


@pytest.mark.second
@pytest.mark.promise("F03")
def test_a_blocked_loop_is_no_death(tmp_path: Path, go: Path, dsn: str, eyes: Eyes) -> None:
    [job] = put(dsn, "crash.blocks", {})
    with workers(tmp_path, dsn, TASKS) as made:
        [first] = made.ready(lease=LEASE)
        first.event("started", key=-1)
        [second] = made.ready(lease=LEASE)
        watching = second.event("ready")["worker"]
        wait_until(lambda: f"job {job} (crash.blocks) has blocked the event loop" in first.written())
        assert eyes.states() == {"running": 1}  # named while it does so
        wait_until(lambda: eyes.one("SELECT beat FROM pgqueue.worker WHERE id = %s", watching) >= 11)  # three leases
        go.touch()
        wait_until(eyes.done(1))
        assert first.written().count("has blocked the event loop") == 1
    assert eyes.all("SELECT attempt, crashes, result FROM pgqueue.job WHERE id = %s", job) == [(1, 0, first.pid)]


@pytest.mark.second
@pytest.mark.promise("F03")
def test_a_call_that_holds_the_interpreter_for_longer_than_the_lease_is_one_and_its_late_result_is_dropped(
    tmp_path: Path, go: Path, dsn: str, eyes: Eyes
) -> None:
    """The whole process stands still, its heartbeat, too: nothing tells it from one that was stopped."""
    pipe = go.with_name("go.pipe")
    os.mkfifo(pipe)
    [job] = put(dsn, "crash.holds", {})
    with workers(tmp_path, dsn, TASKS) as made:
        [first] = made.ready(lease=LEASE)
        first.event("started", key=-3)
        [second] = made.ready(lease=LEASE)
        wait_until(eyes.done(1))
        pipe.write_bytes(b"x")
        wait_until(lambda: f"job {job} (crash.holds): had been given to another worker" in first.written())
    row = eyes.all("SELECT attempt, crashes, state, result FROM pgqueue.job WHERE id = %s", job)
    assert row == [(2, 1, "completed", second.pid)]


@pytest.mark.second
@pytest.mark.promise("F06")
def test_an_outage_of_two_leases_takes_no_job_away_and_counts_no_crash(
    tmp_path: Path, go: Path, own_server: Server
) -> None:
    dsn = own_server.dsn("postgres")
    migrations.migrate(dsn)
    with workers(tmp_path, dsn, TASKS) as made:
        first, second = made.ready(2, lease=2.5, concurrency=2)
        put(dsn, "crash.waits", *({"key": key} for key in range(4)))
        wait_until(lambda: len(first.all("started")) == len(second.all("started")) == 2)
        own_server.stop()
        wait_until(lambda: all("no jobs are taken until a heartbeat" in each.written() for each in (first, second)))
        began = time.monotonic()
        wait_until(lambda: time.monotonic() - began >= 5.0)
        own_server.start()
        eyes = Eyes(dsn)
        put(dsn, "crash.waits", {"key": 4})
        go.touch()
        wait_until(eyes.done(5))
        assert eyes.all("SELECT DISTINCT attempt, crashes FROM pgqueue.job") == [(1, 0)]
        assert eyes.one("SELECT count(*) FROM pgqueue.worker WHERE dead_at IS NULL") == 2
        assert len(first.all("started") + second.all("started")) == 5
        assert first.stop() == second.stop() == 0
        assert [each.event("stopped")["fenced"] for each in (first, second)] == [0, 0]
        eyes.close()


@pytest.mark.second
@pytest.mark.promise("F24")
@pytest.mark.parametrize("where", ["sent", "committed"])
def test_a_worker_that_is_stopped_in_the_middle_of_a_large_claim_holds_nothing_after_its_lease(
    where: str, tmp_path: Path, go: Path, dsn: str, eyes: Eyes
) -> None:
    """Its transaction is open, every row locked, the answer stuck in the socket; or the rows are its own. One of its
    sessions may be about to be opened when it is stopped: nobody knows that one, and it holds nothing."""
    (tmp_path / "stops").mkdir()
    put(dsn, "crash.quick", *({"key": key} for key in range(4_000)))
    with workers(tmp_path, dsn, TASKS) as made, workers(tmp_path / "stops", dsn, TASKS + STOPS) as stopping:
        first = stopping.start({"STOPS": where}, lease=LEASE, concurrency=4_000)
        first.event("stops")
        held = eyes.known()
        assert held
        wait_until(lambda: eyes.busy() <= held)  # not at once: one that has just been opened asks who it is
        assert where == "committed" or eyes.busy()
        taken = eyes.one("SELECT count(*) FROM pgqueue.job_running")
        assert taken == (4_000 if where == "committed" else 0)
        [second] = made.ready(lease=LEASE, concurrency=100)
        with Stalls() as stalls:
            began = time.monotonic()
            try:
                wait_until(lambda: not held & {pid for pid, _ in eyes.backends()})
            except AssertionError:
                print(
                    eyes.all(WHAT_STAYS, list(held)), eyes.all("SELECT id, beat, dead_at, sessions FROM pgqueue.worker")
                )
                raise
            wait_until(eyes.done(1))
            took = time.monotonic() - began
        print(f"free {took:.1f} s after somebody watched; the lease is {LEASE} s")
        assert took - stalls.seconds < LEASE + 5.0
        wait_until(eyes.done(3_900))
        first.signal(signal.SIGCONT)
        wait_until(lambda: eyes.one("SELECT count(*) FROM pgqueue.worker WHERE dead_at IS NULL") == 2)
        wait_until(eyes.done(4_000))
        second.stop()


@pytest.mark.second
@pytest.mark.promise("F24")
@pytest.mark.parametrize("where", ["unblock_move", "unblock_next"])
def test_a_worker_stopped_in_the_middle_of_an_admit_keeps_no_key(
    where: str, tmp_path: Path, go: Path, dsn: str, eyes: Eyes
) -> None:
    """Three keys, ten jobs of each; what it has locked would keep all of them waiting. The long way is gone where more
    than one may come in."""
    (tmp_path / "stops").mkdir()
    with workers(tmp_path, dsn, TASKS) as made, workers(tmp_path / "stops", dsn, TASKS + STOPS) as stopping:
        first = stopping.start({"STOPS": where}, lease=LEASE, concurrency=2)
        first.event("ready")
        eyes.do(
            "INSERT INTO pgqueue.job (task, args, lock_key, lock_limit) "
            "SELECT 'crash.sleeps', jsonb_build_object('key', n), 'k' || n %% 3, %s FROM generate_series(0, 29) n",
            2 if where == "unblock_move" else 1,
        )
        eyes.do('NOTIFY "pgqueue.default"')
        first.event("stops")
        held = eyes.known()
        wait_until(lambda: eyes.one(LOCKED))
        wait_until(lambda: eyes.busy() <= held)
        assert eyes.busy()
        made.ready(lease=LEASE, concurrency=2)
        with Stalls() as stalls:
            began = time.monotonic()
            wait_until(lambda: not held & {pid for pid, _ in eyes.backends()})
            wait_until(eyes.done(30))
            took = time.monotonic() - began
        assert took - stalls.seconds < LEASE + 5.0
        first.signal(signal.SIGCONT)
        wait_until(lambda: eyes.one("SELECT count(*) FROM pgqueue.worker WHERE dead_at IS NULL") == 2)


@pytest.mark.second
@pytest.mark.promise("F02")
def test_a_long_job_is_never_taken_away_because_it_is_long(tmp_path: Path, go: Path, dsn: str, eyes: Eyes) -> None:
    [job] = put(dsn, "crash.waits", {"key": 1})
    with workers(tmp_path, dsn, TASKS) as made:
        [first] = made.ready(lease=2.5)
        first.event("started", key=1)
        [second] = made.ready(lease=2.5)
        beats = "SELECT min(beat) FROM pgqueue.worker"
        wait_until(lambda: eyes.one(beats) >= 7)  # more than two leases
        go.touch()
        wait_until(eyes.done(1))
        assert second.all("started") == []
    assert eyes.all("SELECT attempt, crashes, result FROM pgqueue.job WHERE id = %s", job) == [(1, 0, first.pid)]


# Step by step --------------------------------------------------------------------------------------------------------


async def rescuer(dsn: str) -> tuple[Taker, Rescue, list[int]]:
    taker = Taker(dsn)
    rescued: list[int] = []
    return taker, Rescue(taker.session, notify=True, rescued=lambda: rescued.append(1)), rescued


async def test_a_worker_that_has_beaten_since_is_left_alone(dsn: str, eyes: Eyes) -> None:
    taker, rescue, rescued = await rescuer(dsn)
    victim = Taker(dsn)
    eyes.do("INSERT INTO pgqueue.job (task) VALUES ('x')")
    await victim.fetch()
    eyes.do("UPDATE pgqueue.worker SET beat = 5 WHERE id = %s", victim.worker_id)
    assert not await rescue.rescue(victim.worker_id, 4)
    assert eyes.states() == {"running": 1} and not rescued
    assert await rescue.rescue(victim.worker_id, 5)
    assert eyes.states() == {"available": 1} and rescued
    assert await victim.fetch() == []
    await taker.close()
    await victim.close()


@task(name="rescue.waits")
async def waits_for_go() -> None:
    began.set()
    await let_go.wait()


began, let_go = asyncio.Event(), asyncio.Event()


@pytest.mark.second
@pytest.mark.promise("F126")
async def test_a_worker_whose_id_was_given_to_another_keeps_it_not_alive_and_works_under_a_new_one(
    dsn: str, eyes: Eyes
) -> None:
    """As after a failover to a standby without the last commits: the row of this id was made at another time, and is
    another worker's. If that one has died, its jobs are rescued, and not kept by us."""
    async with work(dsn, waits_for_go, lease=3.0) as worker:
        mine = worker.worker_id
        await until(lambda: eyes.one("SELECT beat FROM pgqueue.worker WHERE id = %s", mine) > 0)
        waits_for_go_id = put(dsn, "rescue.waits", {})[0]
        await began.wait()
        eyes.do(
            "UPDATE pgqueue.worker SET started_at = started_at - interval '1 minute', beat = -7 WHERE id = %s", mine
        )
        await until(lambda: worker.worker_id != mine)
        assert eyes.one("SELECT beat FROM pgqueue.worker WHERE id = %s", mine) == -7
        await until(lambda: eyes.one("SELECT dead_at IS NOT NULL FROM pgqueue.worker WHERE id = %s", mine))
        let_go.set()
        await until(eyes.is_in(waits_for_go_id, "completed"))
        last = put(dsn, "rescue.waits", {})[0]
        await until(eyes.is_in(last, "completed"))


class Asked:
    """A session in place of a rescuer's: the next report of the judge comes while it waits for its first answer."""

    def __init__(self) -> None:
        self.link = Link("", "pgqueue")
        self.reports: list[list[tuple[int, int]]] = []
        self.rescue: Any = None

    async def run(self, *statements: Any) -> list[Any]:
        if self.reports:
            await self.rescue.seen(self.reports.pop(), leads=False)
        return [[(False,)]]


@pytest.mark.promise("F126")
@pytest.mark.parametrize(
    ("first", "then"), [((1, 2), (1,)), ((1, 2), (2,)), ((1, 2), ()), ((1,), (1, 2)), ((1,), (2,))]
)
async def test_a_report_that_comes_while_the_last_one_is_acted_on_takes_nothing_away(
    first: tuple[int, ...], then: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    session, rescued = Asked(), list[int]()
    session.rescue = rescue = Rescue(session, notify=False, rescued=lambda: None)  # type: ignore[arg-type]

    async def rescues(worker_id: int, beat: int) -> bool:
        rescued.append(worker_id)
        return True

    monkeypatch.setattr(rescue, "rescue", rescues)
    session.reports = [[(worker_id, 0) for worker_id in then]]
    await rescue.seen([(worker_id, 0) for worker_id in first], leads=False)
    for _ in range(REPORTS):
        await rescue.seen([(worker_id, 0) for worker_id in then], leads=False)
    assert set(rescued) == set(then)


@pytest.mark.promise("F126")
async def test_a_rescue_that_is_lost_after_the_disarming_is_taken_up(
    dsn: str, eyes: Eyes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The leader has ended the sessions of a dead worker, and then loses its own session, and the lead, for good."""
    taker, leader, rescued = await rescuer(dsn)
    other_taker, other, other_rescued = await rescuer(dsn)
    victim = Taker(dsn)
    eyes.do("INSERT INTO pgqueue.job (task) VALUES ('x')")
    await victim.fetch()
    disarm = leader._disarm

    async def and_lose(worker_id: int, beat: int) -> None:
        await disarm(worker_id, beat)
        raise psycopg.OperationalError("the session is gone")

    monkeypatch.setattr(leader, "_disarm", and_lose)
    dead = [(victim.worker_id, 0)]
    await leader.seen(dead, leads=True)
    assert "the next heartbeat tries again" in caplog.text and not rescued
    assert eyes.states() == {"running": 1}
    for _ in range(REPORTS):
        assert not other_rescued
        await other.seen(dead, leads=False)
    assert eyes.states() == {"available": 1} and other_rescued
    monkeypatch.undo()
    assert not await leader.rescue(victim.worker_id, 1)  # comes late, and finds nothing to do
    assert eyes.one("SELECT crashes FROM pgqueue.job") == 1  # once
    for each in (taker, other_taker, victim):
        await each.close()


@pytest.mark.second
@pytest.mark.promise("F24")
async def test_a_claim_under_way_is_either_rescued_or_never_happens(dsn: str, eyes: Eyes) -> None:
    taker, rescue, _ = await rescuer(dsn)
    for round in range(20):
        victim = Taker(dsn)
        eyes.do("INSERT INTO pgqueue.job (task) SELECT 'x' FROM generate_series(1, 200)")
        fetching = asyncio.ensure_future(victim.fetch(200))
        for _ in range(round):
            await asyncio.sleep(0)
        await rescue.rescue(victim.worker_id, 0)
        await asyncio.gather(fetching, return_exceptions=True)
        await rescue.strays()
        assert eyes.states() == {"available": 200}
        eyes.do("DELETE FROM pgqueue.job_available")
        await victim.close()
    await taker.close()


async def test_many_jobs_go_back_in_batches_in_their_order_and_wake_everybody_from_zero(dsn: str, eyes: Eyes) -> None:
    taker, rescue, _ = await rescuer(dsn)
    victim = Taker(dsn)
    eyes.do("INSERT INTO pgqueue.job (task) SELECT 'x' FROM generate_series(1, %s)", 2 * BATCH + 5)
    jobs = await victim.fetch(3 * BATCH)
    with psycopg.connect(dsn, autocommit=True) as listening:
        listening.execute('LISTEN "pgqueue.default"')
        await rescue.rescue(victim.worker_id, 0)
        heard = {note.payload for note in listening.notifies(timeout=30, stop_after=1)}
    assert heard == {"zero"}
    assert rescue.jobs == len(jobs) == 2 * BATCH + 5
    order = [id for (id,) in eyes.all("SELECT id FROM pgqueue.job_available ORDER BY rank, pos")]
    assert order == sorted(order)
    await taker.close()
    await victim.close()


async def test_strays_of_workers_without_a_row_are_found_and_dead_rows_forgotten_after_an_hour(
    dsn: str, eyes: Eyes
) -> None:
    taker, rescue, _ = await rescuer(dsn)
    eyes.do(
        "INSERT INTO pgqueue.job (state, task, worker_id, claim, attempt, started_at) "
        "VALUES ('running', 'x', 4711, 1, 1, now())"
    )
    old, young = Taker(dsn), Taker(dsn)
    eyes.do("UPDATE pgqueue.worker SET dead_at = now() - interval '61 minutes' WHERE id = %s", old.worker_id)
    eyes.do("UPDATE pgqueue.worker SET dead_at = now() - interval '59 minutes' WHERE id = %s", young.worker_id)
    await rescue.strays()
    assert eyes.states() == {"available": 1}
    eyes.conn.execute(statements.text("pruner_workers", "pgqueue"), {"n": 9})
    ids = {id for (id,) in eyes.all("SELECT id FROM pgqueue.worker")}
    assert ids == {taker.worker_id, young.worker_id}
    await taker.close()


async def test_two_rescuers_at_once_give_every_job_back_once(dsn: str, eyes: Eyes) -> None:
    helpers = [await rescuer(dsn) for _ in range(4)]
    victim = Taker(dsn)
    eyes.do("INSERT INTO pgqueue.job (task) SELECT 'x' FROM generate_series(1, 500)")
    await victim.fetch(500)
    await asyncio.gather(*(rescue.rescue(victim.worker_id, 0) for _, rescue, _ in helpers), return_exceptions=True)
    assert eyes.states() == {"available": 500}
    assert sum(rescue.jobs for _, rescue, _ in helpers) == 500
    for taker, _, _ in helpers:
        await taker.close()
    await victim.close()


@pytest.mark.parametrize("right", [None, "pg_signal_backend"])
async def test_a_session_that_is_not_ours_to_end_keeps_no_job_from_being_rescued(
    dsn: str, eyes: Eyes, caplog: pytest.LogCaptureFixture, right: str | None
) -> None:
    """A superuser's, whatever right we have; asking for it is an error of the server."""
    victim, name = Taker(dsn), f"pgqueue_test_{os.urandom(4).hex()}"
    eyes.do("INSERT INTO pgqueue.job (task) VALUES ('x')")
    await victim.fetch()
    assert victim.session.identity is not None
    pid, start = victim.session.identity
    eyes.do(
        "UPDATE pgqueue.worker SET sessions = jsonb_build_array("
        "jsonb_build_object('pid', %s, 'backend_start', %s::text)) WHERE id = %s",
        pid,
        start,
        victim.worker_id,
    )
    with psycopg.connect(dsn, autocommit=True) as owner:
        owner.execute(f"CREATE ROLE {name} LOGIN PASSWORD 'secret'".encode())
        grants.grant(owner, name, "work", "pgqueue")
        owner.execute(f"GRANT pg_read_all_stats{', ' + right if right else ''} TO {name}".encode())
    session = Session(Link(make_conninfo(dsn, user=name, password="secret"), "pgqueue"), "rescue")
    try:
        beat = eyes.one("SELECT beat FROM pgqueue.worker WHERE id = %s", victim.worker_id)
        assert await Rescue(session, notify=True, rescued=lambda: None).rescue(victim.worker_id, beat)
        assert "1 of its sessions could not be ended" in caplog.text
        assert "pg_signal_backend" in caplog.text
        assert eyes.states() == {"available": 1}
        assert eyes.one("SELECT count(*) FROM pg_stat_activity WHERE pid = %s", pid) == 1
    finally:
        await session.close()
        await victim.close()
        eyes.do(f"DROP OWNED BY {name}")
        eyes.do(f"DROP ROLE {name}")


@pytest.mark.promise("F491")
@pytest.mark.parametrize(
    "listed", ['[{"pid": "x"}]', '[{"pid": 1, "backend_start": "30/11/2026 10:00:00"}]', '[{"pid": 9999999999}]']
)
async def test_a_list_of_sessions_that_cannot_be_read_keeps_no_job_from_being_rescued(
    listed: str, dsn: str, eyes: Eyes, caplog: pytest.LogCaptureFixture
) -> None:
    """As of a row that was written by hand. `strays`, which tells sessions again, goes on, too."""
    victim = Taker(dsn)
    eyes.do("INSERT INTO pgqueue.job (task) VALUES ('x')")
    await victim.fetch()
    eyes.do("UPDATE pgqueue.worker SET sessions = %s::jsonb WHERE id = %s", listed, victim.worker_id)
    session = Session(Link(dsn, "pgqueue"), "rescue")
    try:
        beat = eyes.one("SELECT beat FROM pgqueue.worker WHERE id = %s", victim.worker_id)
        rescue = Rescue(session, notify=True, rescued=lambda: None)
        assert await rescue.rescue(victim.worker_id, beat)
        assert f"worker {victim.worker_id}: its list of sessions cannot be read, so none was ended" in caplog.text
        assert eyes.states() == {"available": 1}
        rescue._stuck[victim.worker_id] = beat  # as if one of its sessions had not ended, before the row was damaged
        await rescue.strays()
        assert rescue._stuck == {}
    finally:
        await session.close()
        await victim.close()


async def test_rescues_that_end_before_they_have_begun_leave_nothing_unawaited(dsn: str) -> None:
    """As a worker that stops just as its judge has named many. Naive: a step that is made before it is tried."""
    session = Session(Link(dsn, "pgqueue"), "rescue")
    rescue = Rescue(session, notify=True, rescued=lambda: None)
    task = asyncio.create_task(rescue.seen([(1, 0), (2, 0)], leads=True))
    await asyncio.sleep(0)  # its own tasks are made, and have not begun
    task.cancel()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        await asyncio.gather(task, return_exceptions=True)
        gc.collect()
    assert [str(each.message) for each in said] == []
    await session.close()


@pytest.mark.second
async def test_a_leftover_of_another_lease_is_rescued(dsn: str, eyes: Eyes, caplog: pytest.LogCaptureFixture) -> None:
    victim = Taker(dsn, lease=1.0)
    eyes.do("INSERT INTO pgqueue.job (task) VALUES ('rescue.nothing')")
    await victim.fetch()
    await victim.close()
    with caplog.at_level(logging.WARNING):
        async with work(dsn, nothing, lease=2.0):
            await until(eyes.done(1), 30.0)
    assert f"worker {victim.worker_id} gave no sign of life" in caplog.text


CRASHED = "SELECT id, crashes, attempt FROM pgqueue.job_available ORDER BY id"


async def died(dsn: str, eyes: Eyes, *claims: tuple[int, int, int], slots: int) -> list[tuple[int, int, int]]:
    """A worker of so many slots dies with these claims; (id, crashes, attempt) of the jobs that go on.

    `claims`, in the order of the ids: (claim, crashes, its age in seconds at the last beat).
    """
    taker, rescue, _ = await rescuer(dsn)
    victim = Taker(dsn)
    eyes.do("UPDATE pgqueue.worker SET concurrency = %s WHERE id = %s", slots, victim.worker_id)
    eyes.do(
        "INSERT INTO pgqueue.job (state, id, task, worker_id, claim, attempt, crashes, rank, started_at) "
        "SELECT 'running', n, 'x', w.id, c, 1, k, CASE k WHEN 0 THEN 11 WHEN 1 THEN -2 ELSE -1 END, "
        "       w.beat_at - make_interval(secs => age) "
        "FROM unnest(%s::int[], %s::int[], %s::int[]) WITH ORDINALITY AS given (c, k, age, n), pgqueue.worker w "
        "WHERE w.id = %s",
        *(list(column) for column in zip(*claims, strict=True)),
        victim.worker_id,
    )
    assert await rescue.rescue(victim.worker_id, 0)
    await taker.close()
    return eyes.all(CRASHED)


@pytest.mark.parametrize("slots", [1, 3, 20])
async def test_of_the_jobs_claimed_since_the_last_beat_as_many_carry_a_crash_as_there_were_slots(
    slots: int, dsn: str, eyes: Eyes
) -> None:
    jobs = await died(dsn, eyes, *[(claim, 0, -1) for claim in (7, 7, 8, 8, 9, 9)], slots=slots)
    assert jobs == [(id, 1, 1) for id in range(1, 7)][:slots] + [(id, 0, 0) for id in range(1, 7)][slots:]


async def test_jobs_claimed_before_the_last_beat_that_it_did_not_list_carry_no_crash(dsn: str, eyes: Eyes) -> None:
    assert await died(dsn, eyes, (1, 0, 1), (1, 0, 1), (2, 0, -1), slots=3) == [(1, 0, 0), (2, 0, 0), (3, 1, 1)]


async def test_only_the_first_batch_of_a_rescue_finds_what_had_started(
    dsn: str, eyes: Eyes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgqueue.worker.liveness.rescue.BATCH", 2)
    jobs = await died(dsn, eyes, *[(1, 0, -1)] * 6, slots=2)
    assert [crashes for _, crashes, _ in jobs] == [1, 1, 0, 0, 0, 0]


async def test_a_suspect_that_was_claimed_beside_a_worse_one_never_started_and_is_not_blamed(
    dsn: str, eyes: Eyes
) -> None:
    """The worker gives it back, but dies before that is written: its third crash would be a death sentence."""
    claims = [(7, 1, -1), (7, 2, -1), (7, 2, -1), (7, 0, -1), (8, 1, -1), (8, 1, -1), (8, 0, -1)]
    jobs = await died(dsn, eyes, *claims, slots=10)
    assert eyes.all("SELECT id, crashes FROM pgqueue.job_dead") == [(2, 3)]
    assert jobs == [(1, 1, 0), (3, 2, 0), (4, 0, 0), (5, 2, 1), (6, 1, 0), (7, 1, 1)]


async def test_a_clock_that_steps_back_keeps_no_job_from_being_given_back(dsn: str, eyes: Eyes) -> None:
    taker, rescue, _ = await rescuer(dsn)
    victim = Taker(dsn)
    eyes.do("INSERT INTO pgqueue.job (task, run_at) VALUES ('due', now()), ('long due', now() - interval '1 day')")
    eyes.do("INSERT INTO pgqueue.job (task) VALUES ('at once')")
    assert len(await victim.fetch()) == 3
    with Clock(eyes.conn, datetime.now(UTC) - timedelta(hours=1)):
        assert await rescue.rescue(victim.worker_id, 0)
    assert eyes.states() == {"available": 3}
    assert {job.task for job in await taker.fetch()} == {"due", "long due", "at once"}
    await taker.close()
    await victim.close()


async def test_a_second_row_of_a_job_to_be_rescued_is_refused_and_ends_no_rescuer(dsn: str, eyes: Eyes) -> None:
    """Worker after worker would try, fail for good, and leave its own jobs to the next."""
    taker, rescue, _ = await rescuer(dsn)
    victim = Taker(dsn)
    eyes.do("INSERT INTO pgqueue.job (task) SELECT 'x' FROM generate_series(1, 3)")
    jobs = await victim.fetch()
    eyes.do(
        "INSERT INTO pgqueue.job (task, queue, id, enqueued_at) "
        "SELECT 'double', 'paused', id, enqueued_at FROM pgqueue.job_running WHERE id = %s",
        jobs[1].id,
    )
    assert await rescue.rescue(victim.worker_id, 0)
    assert eyes.all("SELECT id, task, reason FROM pgqueue.job_dead") == [(jobs[1].id, "double", "refused")]
    assert {job.id for job in await taker.fetch()} == {job.id for job in jobs}
    await taker.close()
    await victim.close()


@pytest.mark.promise("F29")
async def test_another_job_with_the_id_of_one_to_be_rescued_goes_on_too(dsn: str, eyes: Eyes) -> None:
    taker, rescue, _ = await rescuer(dsn)
    victim = Taker(dsn)
    eyes.do("INSERT INTO pgqueue.job (task) SELECT 'x' FROM generate_series(1, 3)")
    jobs = await victim.fetch()
    eyes.do("INSERT INTO pgqueue.job (task, id) VALUES ('another', %s)", jobs[1].id)
    assert await rescue.rescue(victim.worker_id, 0)
    taken = await taker.fetch()
    assert sorted(job.task for job in taken) == ["another", "x", "x", "x"]
    assert {job.id for job in taken} > {job.id for job in jobs}
    await taker.close()
    await victim.close()


@pytest.mark.promise("E14")
async def test_where_a_look_for_strays_is_dear_it_comes_less_often(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session(Link(dsn, "pgqueue"), "rescue")
    rescue = Rescue(session, notify=True, rescued=lambda: None)
    looks: list[float] = []
    real = session.run

    async def counted(*messages: Any, **options: Any) -> list[Any]:
        answers = await real(*messages, **options)
        session.took = 0.6 if looks else 0.01
        looks.append(session.took)
        return answers

    monkeypatch.setattr(session, "run", counted)
    for _ in range(4):
        await rescue.strays()
    assert looks == [0.01, 0.6]
    await session.close()
