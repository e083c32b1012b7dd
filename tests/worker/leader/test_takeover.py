"""Who leads is killed, stopped, or dies in the middle of a tick, and the server's clock is set: the duties go on, soon,
and each tick is a job once. Real processes.
"""

from __future__ import annotations

import glob
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from time import monotonic, sleep

import psycopg
import pytest
from clocks import step_clock
from servers import Server, embedded_server
from workers import Eyes, Process, Stalls, Workers, wait_until, workers

import pgqueue
from pgqueue.database import migrations

LEADER = """
    SELECT w.pid FROM pgqueue.worker w CROSS JOIN LATERAL jsonb_to_recordset(w.sessions) AS s (pid integer)
    JOIN pg_locks l ON l.pid = s.pid
    WHERE l.locktype = 'advisory' AND l.granted AND w.dead_at IS NULL
      AND (l.classid::bigint << 32 | l.objid::bigint) = hashtextextended('pgqueue.leader', 7)
"""
TASKS = """
from datetime import datetime, timezone

def late(moment):
    return (datetime.now(timezone.utc) - moment).total_seconds()

@pgqueue.task(name="second", schedule=pgqueue.Every(1, catch_up="all"))
async def second(job: pgqueue.Job) -> None:
    say("tick", tick=job.tick.isoformat(), late=late(job.tick))

@pgqueue.task(name="due")
async def due(job: pgqueue.Job) -> None:
    say("due", late=late(job.run_at), at=job.run_at.isoformat())
"""
# Dies when about to make its third tick; with the tick sent and not its COMMIT; with both sent and no answer read.
DIES = """
import random, signal
from pgqueue.database import statements
from pgqueue.database.pipeline import Wire

put, seen, where = Wire.put, [], random.choice(["before", "open", "unread"])

def dying_put(self, message):
    mine = message.sql == statements.text("ticks_make", "pgqueue")
    seen.extend([1] * mine)
    if mine and len(seen) >= 3 and where == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    parts = put(self, message)
    if len(seen) >= 3 and (mine and where == "open" or message.sql == "COMMIT" and where == "unread"):
        while self.pgconn.flush():
            pass
        os.kill(os.getpid(), signal.SIGKILL)
    return parts

Wire.put = dying_put

@pgqueue.task(name="second", schedule=pgqueue.Every(1, catch_up="all"))
async def second(job: pgqueue.Job) -> None:
    say("tick")
"""
TICKS = "SELECT at FROM pgqueue.tick ORDER BY at"
DOUBLED = """
    SELECT headers ->> 'pgqueue:schedule', headers ->> 'pgqueue:tick', count(*) FROM pgqueue.job
    WHERE headers ? 'pgqueue:tick' GROUP BY 1, 2
    HAVING count(*) > 1
"""
JOBS = """
    SELECT (SELECT count(*) FROM pgqueue.tick) - (SELECT count(*) FROM pgqueue.job WHERE headers ? 'pgqueue:tick')
"""


def led_by(eyes: Eyes, process: Process) -> Callable[[], bool]:
    return lambda: eyes.one(LEADER) == process.pid


def spread(dsn: str, seconds: float) -> None:
    """Jobs that are due every 100 ms from now on."""
    task = pgqueue.remote("due")
    with psycopg.connect(dsn) as conn:
        jobs = [task.using(delay=number / 10).new() for number in range(1, int(10 * seconds))]
        pgqueue.enqueue_many(conn, jobs)


def three(made: Workers, eyes: Eyes) -> tuple[Process, list[Process]]:
    """One that leads and takes no jobs, and two that do not lead, and work."""
    [leader] = made.ready(queues=["nothing"])
    wait_until(led_by(eyes, leader))
    others = made.ready(2)
    for other in others:
        other.event("tick")
    return leader, others


def latest(others: list[Process], event: str, since: str) -> float:
    """The most that anything was late that was due after `since`."""
    moment = "tick" if event == "tick" else "at"
    return max(float(each["late"]) for other in others for each in other.all(event) if each[moment] > since)


def gapless(eyes: Eyes, step: float = 1.0) -> int:
    """How many ticks there are, one every step, each a job once."""
    ticks = [at for (at,) in eyes.all(TICKS)]
    assert {later - earlier for earlier, later in pairwise(ticks)} == {timedelta(seconds=step)}
    assert eyes.all(DOUBLED) == []
    assert eyes.one(JOBS) == 0
    return len(ticks)


@pytest.mark.second
@pytest.mark.promise("F10")
def test_a_leader_that_is_killed_has_a_successor_within_three_seconds(dsn: str, eyes: Eyes, tmp_path: Path) -> None:
    with workers(tmp_path, dsn, TASKS) as made, Stalls() as stalls:
        leader, others = three(made, eyes)
        spread(dsn, 8.0)
        others[0].event("due")
        since, began = eyes.one("SELECT now()::text"), monotonic()
        leader.kill()
        wait_until(lambda: eyes.one(LEADER) in {other.pid for other in others})
        led = monotonic() - began
        wait_until(
            lambda: eyes.one("SELECT count(*) FROM pgqueue.job WHERE task = 'due' AND state <> 'completed'") == 0
        )
        late = {event: latest(others, event, _iso(since)) for event in ("tick", "due")}
        print(f"led again after {led:.2f} s; latest tick {late['tick']:.2f} s, promotion {late['due']:.2f} s")
        assert max(late.values()) - stalls.seconds < 3.0
        assert gapless(eyes) >= 6


@pytest.mark.long
@pytest.mark.promise("F10", "F24")
def test_a_leader_that_is_stopped_has_a_successor_within_twenty_seconds(dsn: str, eyes: Eyes, tmp_path: Path) -> None:
    with workers(tmp_path, dsn, TASKS) as made:
        leader, others = three(made, eyes)
        spread(dsn, 24.0)
        others[0].event("due")
        since, began = eyes.one("SELECT now()::text"), monotonic()
        leader.signal(signal.SIGSTOP)
        wait_until(lambda: eyes.one(LEADER) in {other.pid for other in others})
        led = monotonic() - began
        wait_until(
            lambda: eyes.one("SELECT count(*) FROM pgqueue.job WHERE task = 'due' AND state <> 'completed'") == 0, 30.0
        )
        late = {event: latest(others, event, _iso(since)) for event in ("tick", "due")}
        print(f"led again after {led:.2f} s; latest tick {late['tick']:.2f} s, promotion {late['due']:.2f} s")
        assert max(late.values()) < 20.0
        leader.signal(signal.SIGCONT)
        leader.event("ready")
        wait_until(lambda: "taken for dead" in leader.written())
        number = gapless(eyes)
        wait_until(lambda: gapless(eyes) >= number + 3)


@pytest.mark.second
@pytest.mark.promise("F10")
@pytest.mark.parametrize("deaths", [3, pytest.param(100, marks=pytest.mark.long)])
def test_leaders_that_die_at_the_tick_lose_none_and_double_none(
    deaths: int, dsn: str, eyes: Eyes, tmp_path: Path
) -> None:
    with workers(tmp_path, dsn, DIES) as made:
        made.ready(4)
        died = 0
        deadline = monotonic() + 30 * deaths
        while died < deaths:
            assert monotonic() < deadline
            died = sum(process.process.poll() is not None for process in made.all)
            while len(made.all) < 4 + died:
                made.start()
            sleep(0.05)
        number = len(eyes.all(TICKS))
        wait_until(lambda: len(eyes.all(TICKS)) >= number + 2)
        print(f"{gapless(eyes)} ticks, {died} leaders died")
        assert {process.process.poll() for process in made.all} <= {None, -signal.SIGKILL}


# The server's clock --------------------------------------------------------------------------------------------------

SINCE = "SELECT at FROM pgqueue.tick WHERE at > %s AND at < %s + interval '30 s' ORDER BY at"


@pytest.mark.second
@pytest.mark.promise("F33")
@pytest.mark.parametrize("step", [3_600, -3_600])
def test_a_clock_that_is_set_stops_no_ticks(step: int, dsn: str, eyes: Eyes, tmp_path: Path) -> None:
    """Promised are 15 s; a tick a second tells much sooner. Naive: the answer to a tick is taken for the time that was
    expected. Then no step is seen: ticks stop for a minute, or for as long as the clock was set back."""
    with workers(tmp_path, dsn, TASKS) as made:
        made.ready(2)
        wait_until(lambda: len(eyes.all(TICKS)) >= 3)
        step_clock(eyes, step)
        now, began = eyes.one("SELECT pgqueue.now()"), monotonic()
        wait_until(lambda: len(eyes.all(SINCE, now, now)) >= 3, 15.0)
        print(f"{step:+d} s: three ticks after {monotonic() - began:.1f} s")
        assert eyes.all(DOUBLED) == []
        assert eyes.one(JOBS) == 0
        assert sum(process.written().count("clock was set") for process in made.all) == 1


FAKETIME = sorted(glob.glob("/usr/lib/*/faketime/libfaketimeMT.so.1"))
STEPPED = """
from pgqueue.worker.leader import ticks
ticks.LOOK_SECONDS = 0.5

@pgqueue.task(name="second", schedule=pgqueue.Every(1, catch_up=os.environ["CATCH_UP"]))
async def second(job: pgqueue.Job) -> None:
    say("tick")
"""


class Faked:
    """A server whose clock is set while it runs."""

    def __init__(self, server: Server, file: Path) -> None:
        self.dsn = server.dsn("postgres")
        self._file = file

    def set(self, seconds: int) -> None:
        """So many seconds from the true time."""
        other = self._file.with_suffix(".new")
        other.write_text(f"{seconds:+d}\n")
        other.chmod(0o644)
        other.rename(self._file)


@pytest.fixture
def faked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Faked]:
    if not FAKETIME:
        pytest.skip("libfaketime is not installed (Debian: apt-get install faketime)")
    file = Path(f"/dev/shm/pgqueue-faketime-{os.getpid()}")
    with monkeypatch.context() as patch:
        patch.setenv("LD_PRELOAD", FAKETIME[-1])
        patch.setenv("FAKETIME_TIMESTAMP_FILE", str(file))
        patch.setenv("FAKETIME_NO_CACHE", "1")
        patch.setenv("FAKETIME_DONT_FAKE_MONOTONIC", "1")
        file.write_text("+0\n")
        file.chmod(0o644)
        server = embedded_server()
    try:
        migrations.migrate(server.dsn("postgres"), "pgqueue")
        yield Faked(server, file)
    finally:
        server.end()
        file.unlink()


@pytest.mark.promise("F10")
@pytest.mark.parametrize(
    "catch_up",
    [
        pytest.param("latest", marks=pytest.mark.long),
        pytest.param("all", marks=pytest.mark.second),
        pytest.param("none", marks=pytest.mark.long),
    ],
)
def test_a_clock_of_the_server_that_steps_forward_and_back_doubles_nothing(
    catch_up: str, faked: Faked, tmp_path: Path
) -> None:
    with closing(Eyes(faked.dsn)) as eyes, workers(tmp_path, faked.dsn, STEPPED) as made:
        for _ in range(4):
            made.start({"CATCH_UP": catch_up}).event("ready")

        def goes_on(more: int = 3) -> list[datetime]:
            """That ticks are made of the time it is now, each once."""
            now = eyes.one("SELECT date_trunc('second', clock_timestamp())")
            fresh = "SELECT at FROM pgqueue.tick WHERE at > %s AND at < %s + interval '30 s' ORDER BY at"
            wait_until(lambda: len(eyes.all(fresh, now, now)) >= more)
            assert eyes.all(DOUBLED) == []
            return [at for (at,) in eyes.all(fresh, now, now)]

        goes_on()
        before = eyes.one("SELECT clock_timestamp()")
        faked.set(3_600)
        assert eyes.one("SELECT clock_timestamp()") - before > timedelta(minutes=59)
        goes_on()
        faked.set(0)
        goes_on()
        faked.set(-3_600)
        goes_on()
        faked.set(0)
        ticks = goes_on(5)
        assert {later - earlier for earlier, later in pairwise(ticks)} == {timedelta(seconds=1)}
        if catch_up == "all":
            wait_until(lambda: len(eyes.all(TICKS)) > 7_000)  # an hour ahead, and an hour before we began
        assert eyes.all(DOUBLED) == []
        total = len(eyes.all(TICKS))
        print(f"{catch_up}: {total} ticks")
        assert catch_up == "all" or total < 200
        assert {process.process.poll() for process in made.all} == {None}


def _iso(at: str) -> str:
    return datetime.fromisoformat(at).astimezone(UTC).isoformat()
