"""Signs of life: who is judged dead, by what has been seen and nothing else, and what a beat carries."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic, sleep
from typing import Any

import psycopg
import pytest
from faults import Wire
from worker_states import worker_state
from workers import Eyes, wait_until

from pgqueue.database import pipeline, sessions
from pgqueue.database.sessions import Link
from pgqueue.database.statements import Statement, text
from pgqueue.worker.liveness.heartbeat import LATE, Heartbeat, Judge
from pgqueue.worker.liveness.loop_monitor import LoopMonitor
from pgqueue.worker.liveness.registration import register
from pgqueue.worker.liveness.stacks import Stacks
from pgqueue.worker.run.running_jobs import RunningJobs

LEASE = 15.0
WRITE = text("heartbeat_write", "pgqueue")
WRITTEN = "SELECT FROM pg_stat_activity WHERE wait_event = 'ClientRead' AND query LIKE '%%SET beat = beat + 1%%'"
STEP = 5.0


def watch(
    judge: Judge, beats: list[int], *, start: float = 0.0, step: float = STEP, lease: float = LEASE
) -> list[bool]:
    """Whether worker 7 was judged dead at each read of its beat."""
    return [bool(judge.observe([(7, beat, lease)], start + place * step)) for place, beat in enumerate(beats)]


def test_the_same_beat_for_a_whole_lease_is_death_and_not_a_moment_less() -> None:
    assert watch(Judge(LEASE), [3, 3, 3, 3]) == [False, False, False, True]
    assert watch(Judge(LEASE), [3, 3, 3, 3], step=4.99) == [False] * 4
    assert Judge(LEASE).observe([], 0.0) == []


def test_a_beat_begins_the_watch_anew_forwards_or_backwards() -> None:
    assert watch(Judge(LEASE), [3, 3, 3, 4, 4, 4, 4]) == [False] * 6 + [True]
    assert watch(Judge(LEASE), [3, 3, 3, 2, 2, 2]) == [False] * 6  # a failover lost beats


def test_the_dead_are_named_with_the_beat_they_were_seen_at() -> None:
    judge = Judge(LEASE)
    for now in (0, 5, 10):
        judge.observe([(7, 3, LEASE), (8, int(now), LEASE)], now)
    assert judge.observe([(7, 3, LEASE), (8, 15, LEASE)], 15) == [(7, 3)]
    assert judge.live() == 2


@pytest.mark.promise("F06")
def test_a_judge_that_was_stopped_judges_nobody() -> None:
    judge = Judge(LEASE)
    assert watch(judge, [3, 3]) == [False, False]
    # Suspended for an hour: the count is the same, but nobody was watching. Three more reads, a lease long.
    assert watch(judge, [3, 3, 3, 3], start=3_600) == [False, False, False, True]


@pytest.mark.promise("F06")
def test_reads_that_come_late_are_no_watch() -> None:
    assert watch(Judge(LEASE), [3] * 20, step=8.0) == [False] * 20  # an overloaded judge


def test_two_reads_are_not_enough_however_far_apart() -> None:
    assert watch(Judge(2.0), [3, 3], step=1.0, lease=1.0) == [False, False]


@pytest.mark.parametrize(("own", "other"), [(15.0, 2.0), (2.0, 15.0), (60.0, 1.0)])
def test_workers_with_other_leases_are_judged_too(own: float, other: float) -> None:
    """A judge that beats every 5 s never sees one with a lease of 2 s often enough for that one's own lease."""
    judge, step = Judge(own), own / 3
    dead = watch(judge, [3] * 40, step=step, lease=other)
    assert any(dead)
    assert dead.index(True) * step >= other


def test_a_worker_that_leaves_and_one_that_comes_are_not_mixed_up() -> None:
    judge = Judge(LEASE)
    for now in (0, 5, 10):
        judge.observe([(7, 3, LEASE)], now)
    assert judge.observe([], 15) == []
    assert judge.observe([(7, 3, LEASE)], 20) == []  # marked, and seen again: watched from here


class Unrelieved:
    """In place of what relieves a blocked loop: the one here never takes a turn."""

    def __init__(self, monitor: LoopMonitor) -> None:
        self.monitor = monitor

    def is_blocked(self) -> bool:
        return False

    def wanted(self) -> bool:
        return False

    async def relieve(self, session: sessions.Session, worker_id: int) -> None: ...


class Beats:
    """A heartbeat of a registered worker, and what it called back."""

    def __init__(self, dsn: str, lease: float) -> None:
        self.link = Link(dsn, "pgqueue")
        with psycopg.connect(dsn) as conn:
            self.worker_id = register(
                conn, "pgqueue", lease=lease, concurrency=3, version_tag="v", queues=["a", "b"], tasks=["t"]
            )
        self.dead: list[tuple[int, int]] = []
        self.declared = threading.Event()
        self.again = threading.Event()
        self.reconnects = 0
        self.probes: list[tuple[int, str, float, float]] = []
        self.loop = asyncio.new_event_loop()
        self.running = RunningJobs([])
        self.sessions: list[tuple[int, str]] = []
        state = worker_state(self.link, self.worker_id, queues=["a", "b"], lease=lease)
        self.heartbeat = Heartbeat(
            state,
            self.running,
            Unrelieved(LoopMonitor(self.loop, self.running)),  # type: ignore[arg-type]
            self,
            sessions=lambda: dict.fromkeys(self.sessions),
            stacks=Stacks(state, self.running, self.loop, threading.get_ident()),
        )

    def workers_died(self, dead: list[tuple[int, int]]) -> None:
        self.dead += dead

    def reconnected(self) -> None:
        self.reconnects += 1

    def probed(self, head: int, snapshot: str, usage: float, sent: float) -> None:
        self.probes.append((head, snapshot, usage, sent))

    def declared_dead(self, worker_id: int) -> None:
        assert worker_id == self.worker_id
        self.declared.set()

    def punctual_again(self) -> None:
        self.again.set()


@contextmanager
def beating(dsn: str, lease: float = 1.0) -> Iterator[Beats]:
    made = Beats(dsn, lease)
    made.heartbeat.start()
    try:
        yield made
    finally:
        made.heartbeat.stop()
        made.loop.close()


def row(eyes: Eyes, worker_id: int) -> Any:
    return eyes.all("SELECT beat, state, running, sessions FROM pgqueue.worker WHERE id = %s", worker_id)[0]


def test_a_beat_says_what_runs_and_which_sessions_are_ours(dsn: str, eyes: Eyes) -> None:
    with beating(dsn) as beats:
        beats.running.runs = dict.fromkeys([5, 9])  # type: ignore[assignment]
        beats.sessions = [(4711, "2020-01-01 00:00:00+00")]
        wait_until(lambda: row(eyes, beats.worker_id)[2] == [5, 9])
        wait_until(lambda: row(eyes, beats.worker_id)[0] >= 3)
        pids = [session["pid"] for session in row(eyes, beats.worker_id)[3]]
        assert pids == [4711, eyes.backends("pgqueue beat")[0][0]]


@pytest.mark.promise("F06")
def test_a_beat_that_fails_is_tried_again_on_a_new_connection(dsn: str, eyes: Eyes) -> None:
    with beating(dsn) as beats:
        for _ in range(3):
            wait_until(lambda: eyes.backends("pgqueue beat"))
            beat = row(eyes, beats.worker_id)[0]
            eyes.terminate("pgqueue beat")
            wait_until(lambda beat=beat: row(eyes, beats.worker_id)[0] > beat)  # type: ignore[misc]
        assert not beats.dead and not beats.declared.is_set()


def test_a_beat_that_the_server_refuses_says_why_without_a_traceback(
    dsn: str, eyes: Eyes, caplog: pytest.LogCaptureFixture
) -> None:
    with beating(dsn) as beats:
        wait_until(lambda: row(eyes, beats.worker_id)[0] >= 1)
        eyes.do("ALTER TABLE pgqueue.worker RENAME TO elsewhere")
        wait_until(lambda: "the database refuses it" in caplog.text and "trying again" in caplog.text)
        eyes.do("ALTER TABLE pgqueue.elsewhere RENAME TO worker")
        beat = row(eyes, beats.worker_id)[0]
        wait_until(lambda: row(eyes, beats.worker_id)[0] > beat)
    assert 'relation "pgqueue.worker" does not exist' in caplog.text
    assert "Traceback" not in caplog.text


@pytest.mark.promise("F40")
def test_a_heartbeat_whose_loop_cannot_be_made_is_tried_again(
    dsn: str, eyes: Eyes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop needs three file descriptors. Without its thread a worker would be taken for dead, and take no job."""
    make, tries = asyncio.Runner, 0

    def runner() -> asyncio.Runner:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise OSError(errno.EMFILE, "Too many open files")
        return make()

    monkeypatch.setattr(asyncio, "Runner", runner)
    with beating(dsn) as beats:
        wait_until(lambda: row(eyes, beats.worker_id)[0] >= 2)
    assert tries == 3


@pytest.mark.second
@pytest.mark.promise("F06")
def test_a_beat_whose_commit_was_cut_off_does_not_keep_the_next_one_waiting(
    dsn: str, eyes: Eyes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its session has the worker's own row locked, and would for hours: the worker would be taken for dead."""
    monkeypatch.setattr(sessions, "ROUND_TRIP_SECONDS", 1.0)
    put, cut, sent = pipeline.Wire.put, threading.Event(), list[str]()

    def cutting_put(self: pipeline.Wire, message: Statement[Any]) -> int:
        if message.sql == "COMMIT" and sent and sent[-1] == WRITE and not cut.is_set():
            while self.pgconn.flush():
                pass
            wait_until(lambda: eyes.all(WRITTEN))  # the server has done all that was sent, and waits for the COMMIT
            assert wire.kill("pgqueue beat") == 1
            cut.set()
        sent.append(message.sql)
        return put(self, message)

    monkeypatch.setattr(pipeline.Wire, "put", cutting_put)
    with Wire(dsn) as wire, beating(wire.dsn, lease=6.0) as beats:
        assert cut.wait(30)
        held = eyes.backends("pgqueue beat")
        assert not eyes.all("SELECT FROM pgqueue.worker FOR NO KEY UPDATE SKIP LOCKED")
        wait_until(lambda: row(eyes, beats.worker_id)[0] >= 1, 30.0)
        assert not {*held} & {*eyes.backends("pgqueue beat")}


@pytest.mark.promise("F24")
def test_a_process_that_is_stopped_in_the_middle_of_its_first_beat_keeps_no_row(
    dsn: str, eyes: Eyes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No heartbeat has listed its session yet, so no rescue could end that.

    Naive: send the COMMIT after the answer to the heartbeat.
    """
    go_on, sent, put, answer = threading.Event(), threading.Event(), pipeline.Wire.put, pipeline.Wire._answer

    def seen_put(self: pipeline.Wire, message: Statement[Any]) -> int:
        if message.sql == WRITE:
            sent.set()
        return put(self, message)

    async def stopped(self: pipeline.Wire, parts: int) -> Any:
        if sent.is_set():
            go_on.wait(60)  # the thread stands still, as all of a stopped process does
        return await answer(self, parts)

    monkeypatch.setattr(pipeline.Wire, "put", seen_put)
    monkeypatch.setattr(pipeline.Wire, "_answer", stopped)
    with beating(dsn) as beats:
        try:
            wait_until(lambda: row(eyes, beats.worker_id)[0] == 1, 10.0)
            [session] = row(eyes, beats.worker_id)[3]
            assert session["pid"] == eyes.backends("pgqueue beat")[0][0]
            assert eyes.all("SELECT id FROM pgqueue.worker FOR UPDATE NOWAIT") == [(beats.worker_id,)]
        finally:
            go_on.set()


def test_who_finds_its_row_marked_or_gone_says_so_once_and_beats_no_more(dsn: str, eyes: Eyes) -> None:
    for sql in ("UPDATE pgqueue.worker SET dead_at = now()", "DELETE FROM pgqueue.worker"):
        with beating(dsn) as beats:
            wait_until(lambda: row(eyes, beats.worker_id)[0] >= 1)
            eyes.do(sql)
            assert beats.declared.wait(30)
            beats.heartbeat._thread.join(30)
            assert not beats.heartbeat._thread.is_alive()


@pytest.mark.promise("F01")
def test_whose_id_was_given_again_after_a_failover_keeps_no_row_of_another_alive(dsn: str, eyes: Eyes) -> None:
    """A standby that had not heard of the row was promoted; its sequence gives the id to the next worker.

    Naive: the id alone. Then two processes share a row, and hand back each other's jobs.
    """
    with beating(dsn) as beats:
        wait_until(lambda: row(eyes, beats.worker_id)[0] >= 1)
        with psycopg.connect(dsn) as conn:
            conn.execute("DELETE FROM pgqueue.worker")
            conn.execute(f"ALTER TABLE pgqueue.worker ALTER COLUMN id RESTART WITH {beats.worker_id}".encode())
            about = {"concurrency": 1, "version_tag": "v", "queues": ["a"], "tasks": ["t"]}
            again = register(conn, "pgqueue", lease=1.0, **about)  # type: ignore[arg-type]
        assert again == beats.worker_id
        assert beats.declared.wait(30)
        beats.heartbeat._thread.join(30)
        assert row(eyes, again)[0] == 0


@pytest.mark.second
def test_a_dead_one_is_seen_by_all_who_live_and_reported_until_it_is_marked(dsn: str, eyes: Eyes) -> None:
    with psycopg.connect(dsn) as conn:
        silent = register(conn, "pgqueue", lease=1.0, concurrency=1, version_tag="v", queues=["a"], tasks=["t"])
    with beating(dsn) as one, beating(dsn) as two:
        wait_until(lambda: (silent, 0) in one.dead and (silent, 0) in two.dead, 30.0)
        seen = len(one.dead)
        wait_until(lambda: len(one.dead) > seen)
        assert {worker for worker, _ in one.dead + two.dead} == {silent}
        eyes.do("UPDATE pgqueue.worker SET dead_at = now() WHERE id = %s", silent)
        wait_until(lambda: one.heartbeat.judge.live() == 1)


@pytest.mark.second
@pytest.mark.promise("F06")
def test_who_cannot_beat_is_late_at_four_fifths_of_its_lease_and_told_when_it_can_again(dsn: str, eyes: Eyes) -> None:
    with beating(dsn, lease=2.0) as beats:
        wait_until(lambda: row(eyes, beats.worker_id)[0] >= 2)
        assert not beats.heartbeat.late() and not beats.again.is_set()
        with psycopg.connect(dsn) as stranger:
            stranger.execute("SELECT FROM pgqueue.worker FOR NO KEY UPDATE")
            wait_until(beats.heartbeat.late)
            assert monotonic() - beats.heartbeat.last_beat >= LATE * 2.0
            assert not beats.again.is_set()
        assert beats.again.wait(30)
        wait_until(lambda: not beats.heartbeat.late())


@pytest.mark.promise("F251")
def test_a_heartbeat_asks_whether_anything_happened_and_no_life_hangs_on_that(dsn: str, eyes: Eyes) -> None:
    """The sequence is locked as by a migration that stays open."""
    with beating(dsn, lease=3.0) as beats:
        wait_until(lambda: beats.probes)
        head, snapshot, usage, sent = beats.probes[0]
        assert head == 0 and snapshot.count(":") == 2 and 0.0 <= usage < 1.0 and sent <= monotonic()
        with psycopg.connect(dsn) as locker:
            locker.execute("ALTER SEQUENCE pgqueue.job_pos_seq CACHE 1")
            wait_until(lambda: beats.heartbeat._bare_until > 0.0)
            probes, began = len(beats.probes), monotonic()
            beat = row(eyes, beats.worker_id)[0]
            wait_until(lambda: row(eyes, beats.worker_id)[0] >= beat + 2)
            assert monotonic() - began < 3.0
            assert len(beats.probes) == probes
        beats.heartbeat._bare_until = 0.0
        wait_until(lambda: len(beats.probes) > probes)


@pytest.mark.promise("F266")
def test_a_heartbeat_that_asks_waits_for_its_own_row_as_long_as_one_that_does_not(
    dsn: str, eyes: Eyes, caplog: pytest.LogCaptureFixture
) -> None:
    """The table is locked for half a second, as by a migration. Naive: 100 ms hold for the UPDATE, too."""
    with beating(dsn) as beats:
        wait_until(lambda: beats.probes)
        with psycopg.connect(dsn) as locker:
            locker.execute("LOCK TABLE pgqueue.worker IN SHARE ROW EXCLUSIVE MODE")
            wait_until(lambda: eyes.all("SELECT FROM pg_stat_activity WHERE wait_event_type = 'Lock'"))
            sleep(0.5)  # this long it is locked
        beat = row(eyes, beats.worker_id)[0]
        wait_until(lambda: row(eyes, beats.worker_id)[0] > beat)
    assert not beats.reconnects and "trying again" not in caplog.text
