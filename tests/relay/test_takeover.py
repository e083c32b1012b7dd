"""Several relays of one source: one works, another takes over, and what stood still doubles nothing when it wakes."""

from __future__ import annotations

import os
import random
import signal
import threading
from contextlib import ExitStack, closing, suppress
from itertools import count
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import psutil
import psycopg
import pytest
from relays import RelayProcess, Sides, app_dsn, relay_process, sides
from servers import Server, embedded_server
from workers import wait_until

from pgqueue.database import migrations

__all__ = ["app_dsn", "sides"]

HOLDER = """
    SELECT a.pid FROM pg_locks l JOIN pg_stat_activity a ON a.pid = l.pid
    WHERE l.locktype = 'advisory' AND l.granted AND a.application_name = 'pgqueue relay source'
"""


def sessions(conn: psycopg.Connection[Any], side: str) -> list[int]:
    """The server processes of relays in this database."""
    asked = "SELECT pid FROM pg_stat_activity WHERE application_name = %s AND datname = current_database()"
    return [pid for (pid,) in conn.execute(asked, [f"pgqueue relay {side}"]).fetchall()]


def stop_idle(conn: psycopg.Connection[Any], pid: int) -> None:
    """Stop this process of the server while it has nothing to do. In the middle of a transaction it would keep its
    locks, and could not be ended."""
    state = "SELECT state FROM pg_stat_activity WHERE pid = %s"

    def stopped() -> bool:
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)
        if conn.execute(state, [pid]).fetchone() == ("idle",):
            return True
        os.kill(pid, signal.SIGCONT)
        return False

    wait_until(stopped)


def working(relays: list[RelayProcess]) -> RelayProcess:
    """The relay that works, once there is one: the only one of those that have not been killed."""
    wait_until(lambda: any(relay.works() for relay in relays), 30.0)
    [relay] = [relay for relay in relays if relay.works()]
    return relay


@pytest.mark.second
@pytest.mark.promise("E08")
def test_of_five_relays_one_works_and_another_takes_over_within_three_seconds(
    app_dsn: str, dsn: str, sides: Sides, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        relays = [stack.enter_context(relay_process(app_dsn, dsn, tmp_path)) for _ in range(5)]
        sides.stage("a")
        wait_until(lambda: sides.delivered() == ["a"], 30.0)
        wait_until(lambda: len(sessions(sides.app, "source")) == 5, 30.0)
        assert len(sides.app.execute(HOLDER.encode()).fetchall()) == 1
        # None waits for the lock: a session that waits holds a snapshot, which keeps the application's dead rows.
        assert sides.app.execute("SELECT FROM pg_locks WHERE NOT granted").fetchall() == []
        for value in ("b", "c"):
            relay = working(relays)
            relays.remove(relay)
            relay.signal(signal.SIGKILL)
            began = monotonic()
            sides.stage(value)
            wait_until(lambda value=value: value in sides.delivered(), 30.0)  # type: ignore[misc]
            assert monotonic() - began < 3.0
    assert sides.delivered() == ["a", "b", "c"]


@pytest.mark.second
@pytest.mark.promise("E10")
def test_a_relay_that_stood_still_past_the_take_over_doubles_nothing(
    app_dsn: str, dsn: str, sides: Sides, tmp_path: Path
) -> None:
    with relay_process(app_dsn, dsn, tmp_path, 5) as first:
        sides.stage("a")
        wait_until(lambda: sides.left() == 0, 30.0)
        with relay_process(app_dsn, dsn, tmp_path, 5) as second:
            values = [str(number) for number in range(400)]
            sides.stage(*values)
            wait_until(lambda: len(sides.delivered()) > 20, 30.0)
            first.signal(signal.SIGSTOP)
            began = monotonic()
            sides.stage("b")
            wait_until(lambda: "b" in sides.delivered() and sides.left() == 0, 40.0)
            assert monotonic() - began < 20.0 and second.works()
            sides.queue.execute("DELETE FROM pgqueue.relayed")  # as if the memory's age had passed
            first.signal(signal.SIGCONT)
            sides.stage("c")
            wait_until(lambda: "c" in sides.delivered(), 30.0)
            # Its own session of the source was ended, or the fence refused it: which it meets first is chance.
            wait_until(lambda: "again until it" in first.log.read_text(), 30.0)
    assert sides.doubled() == []
    assert sorted(sides.delivered()) == sorted(["a", *values, "b", "c"])


@pytest.mark.second
@pytest.mark.promise("E10")
def test_a_target_session_that_stood_still_past_the_take_over_doubles_nothing(
    app_dsn: str, dsn: str, sides: Sides, tmp_path: Path
) -> None:
    """The server's process is stopped, and has a delivery in its socket then."""
    with relay_process(app_dsn, dsn, tmp_path, 5) as first:
        sides.stage("a")
        wait_until(lambda: sides.left() == 0, 30.0)
        [pid] = sessions(sides.queue, "target")
        stop_idle(sides.queue, pid)
        try:
            sides.stage("b")  # goes into its socket
            wait_until(lambda: sides.left() == 1, 10.0)
            sleep(1.0)  # nothing tells when it has arrived there
            first.signal(signal.SIGKILL)
            with relay_process(app_dsn, dsn, tmp_path, 5):
                wait_until(lambda: sides.left() == 0, 40.0)
                sides.queue.execute("DELETE FROM pgqueue.relayed")  # as if the memory's age had passed
                os.kill(pid, signal.SIGCONT)
                sides.stage("c")
                wait_until(lambda: sides.left() == 0, 30.0)
                gone = "SELECT count(*) FROM pg_stat_activity WHERE pid = %s"
                wait_until(lambda: sides.queue.execute(gone, [pid]).fetchone() == (0,), 30.0)
        finally:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
    assert sides.delivered() == ["a", "b", "c"]


def stage_beside(app_dsn: str, number: int, enough: threading.Event, staged: list[int]) -> None:
    """Stage this many jobs at least, and go on until it is `enough`, in transactions that overlap."""
    with psycopg.connect(app_dsn) as one, psycopg.connect(app_dsn) as other:
        for value in count():
            if value >= number and enough.is_set():
                break
            conn = one if value % 3 else other
            conn.execute(
                "INSERT INTO pgqueue.outbox (task, args) VALUES ('t', json_build_object('x', %s::text)::jsonb)",
                [str(value)],
            )
            if value % 7 == 0:
                conn.commit()
            if value % 50 == 0:
                sleep(0.02)
        one.commit()
        other.commit()
    staged.append(value)


@pytest.mark.second
@pytest.mark.promise("E10")
@pytest.mark.parametrize("number", [2_000, pytest.param(10_000, marks=pytest.mark.long)])
def test_what_is_staged_beside_kills_of_relays_and_sessions_arrives_once(
    number: int, app_dsn: str, dsn: str, sides: Sides, tmp_path: Path
) -> None:
    enough, chance = threading.Event(), random.Random(1)
    staged: list[int] = []
    staging = threading.Thread(target=stage_beside, args=(app_dsn, number, enough, staged))
    staging.start()
    kill = (
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = %s "
        "AND datname = current_database() ORDER BY random() LIMIT 1"
    )
    kills = 0
    deadline = monotonic() + 300.0
    while not (staged and sides.left() == 0):
        assert monotonic() < deadline, sides.left()
        with relay_process(app_dsn, dsn, tmp_path, 20):
            until = monotonic() + chance.uniform(3.0, 6.0)
            while monotonic() < until:
                sleep(chance.uniform(0.6, 1.4))
                side = chance.choice((sides.app, sides.queue))
                name = "pgqueue relay source" if side is sides.app else "pgqueue relay target"
                kills += len(side.execute(kill, [name]).fetchall())
                if kills > 4:
                    enough.set()
    staging.join()
    assert sides.doubled() == []
    assert sorted(map(int, sides.delivered())) == list(range(*staged))


class Stager(threading.Thread):
    """An application that stages jobs, and goes on after a crash. A COMMIT without an answer may have counted."""

    def __init__(self, dsn: str, number: int, enough: threading.Event) -> None:
        super().__init__(daemon=True)
        self._dsn, self._number, self._enough = dsn, number, enough
        self.acknowledged: list[int] = []
        self.unknown: list[int] = []

    def run(self) -> None:
        numbers = iter(range(0, 1_000_000, STAGED))
        while len(self.acknowledged) < self._number or not self._enough.is_set():
            with suppress(psycopg.OperationalError), psycopg.connect(self._dsn) as conn:
                for first in numbers:
                    values = list(range(first, first + STAGED))
                    rows = (
                        "INSERT INTO pgqueue.outbox (task, args) SELECT 't', jsonb_build_object('x', unnest(%s::int[]))"
                    )
                    try:
                        conn.execute(rows, [values])
                        conn.commit()
                    except psycopg.OperationalError:
                        self.unknown += values
                        raise
                    self.acknowledged += values
                    sleep(0.05)
                    if len(self.acknowledged) >= self._number and self._enough.is_set():
                        break


STAGED = 20


@pytest.mark.second
@pytest.mark.promise("E10")
@pytest.mark.parametrize(("number", "kills"), [(1_000, 6), pytest.param(10_000, 30, marks=pytest.mark.long)])
def test_what_is_staged_beside_crashes_of_both_servers_and_kills_of_relays_arrives_once(
    number: int, kills: int, tmp_path: Path
) -> None:
    """Each second a relay is killed, or one of the two servers crashes."""
    with ExitStack() as stack:
        source, target = (_server(stack) for _ in range(2))
        app, queue = source.dsn("postgres"), target.dsn("postgres")
        migrations.migrate(app, line=migrations.OUTBOX)
        migrations.migrate(queue)
        enough = threading.Event()
        stager = Stager(app, number, enough)
        stager.start()
        relay = ExitStack()
        stack.callback(lambda: relay.close())
        relay.enter_context(relay_process(app, queue, tmp_path, 50))
        for kill in range(kills):
            sleep(1.0)  # so often, not at an event: any moment must do
            if kill % 3 == 0:
                relay.close()
                relay.enter_context(relay_process(app, queue, tmp_path, 50))
            else:
                (source if kill % 3 == 1 else target).restart("immediate")
        enough.set()
        stager.join(120.0)
        assert not stager.is_alive()
        wait_until(lambda: _count(app, "pgqueue.outbox") == 0, 60.0)
        with closing(psycopg.connect(queue)) as conn:
            arrived = sorted(int(x) for (x,) in conn.execute("SELECT args ->> 'x' FROM pgqueue.job").fetchall())
    assert len(arrived) == len(set(arrived))
    assert set(stager.acknowledged) <= set(arrived) <= set(stager.acknowledged) | set(stager.unknown)
    assert len(stager.acknowledged) >= number


def _server(stack: ExitStack) -> Server:
    server = embedded_server(synchronous_commit="on")
    stack.callback(server.end)
    return server


def _count(dsn: str, table: str) -> int:
    with closing(psycopg.connect(dsn)) as conn:
        [(count,)] = conn.execute(f"SELECT count(*) FROM {table}".encode()).fetchall()  # noqa: S608
    return int(count)
