"""What the leader measures: the numbers are right, stay cheap under a held snapshot, and replace those before."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import psycopg
import pytest
from faults import put
from workers import Eyes, until, work

import pgqueue
from pgqueue.admin import depth as reader
from pgqueue.database.sessions import Link, Session
from pgqueue.worker.counters import Counters
from pgqueue.worker.leader import depth, longest_blocked
from pgqueue.worker.leader.depth import Depth, with_longest
from pgqueue.worker.leader.depth_cursors import DepthCursors
from pgqueue.worker.leader.history_fold import HistoryFold
from pgqueue.worker.leader.longest_blocked import ROOM_SECONDS, LongestBlocked
from pgqueue.worker.liveness.registration import register

says = pgqueue.remote("depth.says")


@pgqueue.task(name="depth.here")
async def here() -> None:
    """Takes no job: these tests look only."""


@pgqueue.task(name="depth.quick")
async def quick() -> None: ...


READ = """
    SELECT (SELECT sum(seq_tup_read) FROM pg_stat_user_tables WHERE schemaname = 'pgqueue')
         + (SELECT sum(idx_tup_read) FROM pg_stat_user_indexes WHERE schemaname = 'pgqueue')
"""


class Bench:
    """The duty of a worker that leads, with what it has written."""

    def __init__(self, dsn: str, eyes: Eyes) -> None:
        self.dsn, self.eyes = dsn, eyes
        self.session = Session(Link(dsn, "pgqueue"), "housekeeping")
        self.leads = True
        self.duty = self.new()

    def new(self) -> Depth:
        return Depth(self.session, leads=lambda: self.leads)

    def groups(self) -> dict[tuple[str, str, str, str], tuple[int, bool]]:
        rows = self.eyes.all("SELECT queue, state, reason, task, n, exact FROM pgqueue.depth WHERE queue <> ''")
        return {(queue, state, reason, task): (n, exact) for queue, state, reason, task, n, exact in rows}

    def worker(self, queue: str, *tasks: str) -> int:
        with psycopg.connect(self.dsn) as conn:
            return register(conn, "pgqueue", lease=15.0, concurrency=1, version_tag="v", queues=[queue], tasks=tasks)

    def fill(self, number: int, queue: str = "q") -> None:
        self.eyes.do("INSERT INTO pgqueue.job (task, queue) SELECT 't', %s FROM generate_series(1, %s)", queue, number)

    async def read(self) -> int:
        """How many rows a measurement reads."""
        await asyncio.sleep(0)
        before = await self._read()
        await self.duty.measure()
        return await self._read() - before

    async def _read(self) -> int:
        await self.session.rest()  # a session tells what it has read at its end
        await until(lambda: not self.eyes.backends())
        self.eyes.do("SELECT pg_stat_force_next_flush()")
        return int(self.eyes.one(READ))


@pytest.fixture
async def bench(dsn: str, eyes: Eyes) -> AsyncIterator[Bench]:
    bench = Bench(dsn, eyes)
    yield bench
    await bench.session.close()


# At rest --------------------------------------------------------------------------------------------------------------


@pytest.mark.promise("F251")
async def test_where_there_is_nothing_it_measures_seldom_until_a_position_is_drawn(bench: Bench) -> None:
    duty, measured = bench.duty, 0

    async def rounds(expected: int) -> None:
        nonlocal measured
        await duty.round()
        measured += expected
        assert duty.measurements == measured

    await rounds(1)
    bench.eyes.do("DELETE FROM pgqueue.depth")
    await rounds(1)  # no heartbeat has told of positions: it rests by nothing
    bench.eyes.do("DELETE FROM pgqueue.depth")
    duty.heard(0)
    await rounds(1)
    assert bench.eyes.one("SELECT min(next_at) > now() + interval '20 seconds' FROM pgqueue.depth")
    await rounds(0)
    bench.fill(1)
    duty.heard(bench.eyes.one("SELECT last_value FROM pgqueue.job_pos_seq"))
    await rounds(1)
    bench.eyes.do("DELETE FROM pgqueue.depth")
    await rounds(1)  # a job is there, and may go at any time
    bench.eyes.do("DELETE FROM pgqueue.job_available")
    bench.eyes.do("DELETE FROM pgqueue.depth")
    await rounds(1)
    await rounds(0)
    duty._heard_at -= depth.NEWS_SECONDS
    await rounds(1)  # no heartbeat goes through any more


# What is measured ----------------------------------------------------------------------------------------------------


@pytest.mark.promise("F80")
async def test_each_group_of_jobs_is_counted_with_the_reason_for_which_it_waits(bench: Bench) -> None:
    bench.worker("q", "known")
    bench.worker("later", "known")
    bench.eyes.do("INSERT INTO pgqueue.queue VALUES ('later', now())")
    for columns in (
        "queue, task) VALUES ('q', 'known'), ('q', 'known'), ('q', 'typo'), ('later', 'known'), ('none', 'known'",
        "queue, task, state, run_at) VALUES ('q', 'known', 'scheduled', now() + interval '1 h'",
        "queue, task, state, run_at, attempt) VALUES ('q', 'known', 'scheduled', now() + interval '1 h', 2",
        "queue, task, state, lock_key, key) VALUES ('q', 'known', 'blocked', 'k', 'lock:k'",
        "queue, task, state, limit_key, key) VALUES ('q', 'typo', 'blocked', 'm', 'limit:m'",
        "queue, task, state, worker_id, claim, started_at) VALUES ('q', 'known', 'running', 1, 1, now()",
        "task, state, finished_at) VALUES ('known', 'completed', now()",
    ):
        bench.eyes.do(f"INSERT INTO pgqueue.job ({columns})")
    await bench.duty.measure()
    assert bench.groups() == {
        ("q", "available", "slot", ""): (2, True),
        ("q", "available", "unknown", "typo"): (1, True),
        ("later", "available", "paused", ""): (1, True),
        ("none", "available", "unserved", ""): (1, True),
        ("q", "scheduled", "time", ""): (1, True),
        ("q", "scheduled", "retry", ""): (1, True),
        ("q", "blocked", "lock", ""): (1, True),
        ("q", "blocked", "unknown", "typo"): (1, True),
        ("q", "running", "", ""): (1, True),
    }
    ended = dict(bench.eyes.all("SELECT state, n FROM pgqueue.depth WHERE queue = ''"))
    assert ended == {"completed": 1, "skipped": 0, "failed": 0, "cancelled": 0}


@pytest.mark.promise("F80")
async def test_beyond_ten_thousand_jobs_of_a_lane_the_number_is_an_estimate(bench: Bench) -> None:
    bench.fill(30_000, "large")
    bench.fill(10_000, "small")
    await bench.duty.measure()
    found = bench.groups()
    number, exact = found["large", "available", "unserved", ""]
    assert not exact and 24_000 < number < 36_000
    assert found["small", "available", "unserved", ""] == (10_000, True)


@pytest.mark.promise("F81")
async def test_a_measurement_replaces_those_before_also_those_of_a_time_to_come(bench: Bench) -> None:
    bench.fill(3)
    bench.eyes.do(
        "INSERT INTO pgqueue.depth (at, next_at, queue, state, n, exact) "
        "SELECT now() + each, now() + each, 'old', 'available', 1, true "
        "FROM unnest('{-3 h, -10 s, 1 h}'::interval[]) AS each"
    )
    await bench.duty.measure()
    assert set(bench.groups()) == {("q", "available", "unserved", "")}
    await bench.duty.measure()
    assert bench.eyes.one("SELECT count(DISTINCT at) FROM pgqueue.depth") == 1


# What it costs -------------------------------------------------------------------------------------------------------


@pytest.mark.promise("F81")
@pytest.mark.parametrize("keyed", [False, True])
async def test_a_held_snapshot_does_not_make_a_measurement_slower(bench: Bench, keyed: bool) -> None:
    """A measurement that begins at the front of each lane walks over every job taken since: 20,000 here."""
    keys = ", lock_key" if keyed else ""
    with psycopg.connect(bench.dsn) as holder:
        bench.eyes.do(
            f"INSERT INTO pgqueue.job (task, queue{keys}) "  # noqa: S608
            f"SELECT 't', 'q'{', g::text' if keyed else ''} FROM generate_series(1, 20100) g"
        )
        holder.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        holder.execute("SELECT count(*) FROM pgqueue.job_available")
        bench.eyes.do("DELETE FROM pgqueue.job_available WHERE id <= 20000")
        first = await bench.read()
        seen = bench.eyes.one("SELECT pg_current_xact_id()")
        await until(lambda: bench.eyes.one("SELECT pg_snapshot_xmin(pg_current_snapshot()) > %s::xid8", seen))
        await bench.read()  # what was in progress at the first one, in other databases of this server, has ended
        third = await bench.read()
        assert bench.groups()["q", "available", "unserved", ""] == (100, True)
        assert first > 20_000 and third < 1_000, (first, third)


@pytest.mark.promise("F81")
async def test_a_reader_and_the_deletion_meet_no_dead_row_of_earlier_measurements(bench: Bench, eyes: Eyes) -> None:
    """While a snapshot is held, 5,000 rows of measurements of the last hours are dead."""
    bench.fill(20_000)  # so that readers do not count themselves
    with psycopg.connect(bench.dsn) as holder, psycopg.connect(bench.dsn, autocommit=True) as conn:
        eyes.do(
            "INSERT INTO pgqueue.depth (at, next_at, queue, state, n, exact) "
            "SELECT now() - make_interval(mins => 10 + g), now(), 'old', 'available', 1, true "
            "FROM generate_series(1, 5000) g"
        )
        holder.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        holder.execute("SELECT count(*) FROM pgqueue.depth")
        eyes.do("DELETE FROM pgqueue.depth")
        await bench.duty.measure()
        await bench.duty.measure()
        await bench.session.rest()
        conn.execute("SET enable_seqscan = off")
        read = "SELECT idx_tup_read FROM pg_stat_user_indexes WHERE indexrelname = 'depth_pkey'"
        await until(lambda: not eyes.backends())  # what they have read is counted as they end
        for each in (conn, eyes.conn):
            each.execute("SELECT pg_stat_force_next_flush()")
        before = eyes.one(read)
        for _ in range(3):
            pgqueue.queues(conn), pgqueue.depth(conn, "q")
        conn.execute("SELECT pg_stat_force_next_flush()")
        await until(lambda: eyes.one(read) > before)
        assert eyes.one(read) - before < 100
        conn.execute("SELECT pg_stat_force_next_flush()")
        before = eyes.one(read)
        await bench.duty.measure()
        await bench.session.rest()
        await until(lambda: not eyes.backends() and eyes.one(read) > before)
        assert eyes.one(read) - before < 100


@pytest.mark.promise("F81")
async def test_a_job_that_is_committed_late_is_counted_though_its_position_was_passed(bench: Bench) -> None:
    """The naive cursor stands behind the last position it has seen, and never sees this job."""
    await bench.duty.measure()
    with psycopg.connect(bench.dsn) as slow:
        slow.execute("INSERT INTO pgqueue.job (task, queue) VALUES ('t', 'q')")
        bench.fill(1)
        await bench.duty.measure()
        bench.eyes.do("DELETE FROM pgqueue.job_available")
        bench.fill(2)
        await bench.duty.measure()
        assert bench.groups()["q", "available", "unserved", ""] == (2, True)
    await bench.duty.measure()
    assert bench.groups()["q", "available", "unserved", ""] == (3, True)


@pytest.mark.parametrize(("took", "pause"), [(0.001, 5.0), (0.3, 30.0), (9.0, 120.0)])
@pytest.mark.promise("F80")
async def test_measuring_takes_one_percent_of_the_time(bench: Bench, took: float, pause: float) -> None:
    real = bench.session.run

    async def slow(*messages: Any, **options: Any) -> Any:
        answers = await real(*messages, **options)
        bench.session.took = took / 2  # of the two messages of a measurement without blocked jobs
        return answers

    bench.session.run = slow  # type: ignore[method-assign]
    assert await bench.duty.measure() == pytest.approx(pause)
    [(left,)] = bench.eyes.all("SELECT DISTINCT extract(epoch FROM next_at - at)::float8 FROM pgqueue.depth")
    assert left == pytest.approx(pause)


async def test_no_worker_measures_before_it_is_due_and_one_that_does_not_lead_much_later(bench: Bench) -> None:
    pause = await bench.duty.round()
    assert pause >= 5.0 and bench.duty.measurements == 1
    other = bench.new()
    assert pause - 4.0 < await other.round() < pause + 1.0 and other.measurements == 0
    bench.eyes.do("UPDATE pgqueue.depth SET next_at = now() - interval '30 s'")
    bench.leads = False
    await other.round()
    assert other.measurements == 0
    bench.eyes.do("UPDATE pgqueue.depth SET next_at = now() - interval '100 s'")
    await other.round()
    assert other.measurements == 1


@pytest.mark.promise("F80")
async def test_the_worker_that_leads_measures(dsn: str, eyes: Eyes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(depth, "FIRST_SECONDS", 0.01)
    put(dsn, says.using(queue="other").new())
    async with work(dsn, here) as worker:
        await until(lambda: eyes.one("SELECT sum(n)::int FROM pgqueue.depth") == 1)
        await until(lambda: worker.services.depth.measurements == 1)
        assert len(eyes.backends()) <= 4  # one of them for housekeeping


@pytest.mark.promise("F181")
async def test_a_worker_whose_counts_fail_goes_on_working(
    dsn: str, eyes: Eyes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever fails in them: a number that cannot be found out is no reason to end a worker, and to run jobs again."""
    failed: Counter[str] = Counter()

    def fails(name: str) -> Any:
        def fail(self: Any, *args: Any, **kwargs: Any) -> Any:
            failed[name] += 1
            raise KeyError("a bug")

        return fail

    monkeypatch.setattr(depth, "FIRST_SECONDS", 0.1)
    monkeypatch.setattr(Depth, "measure", fails("depth"))
    monkeypatch.setattr(HistoryFold, "round", fails("history"))
    monkeypatch.setattr(Counters, "_left_of_minute", fails("counts"))

    async with work(dsn, quick) as worker:
        await until(lambda: failed == {"depth": 1, "history": 1, "counts": 1})
        with psycopg.connect(dsn) as conn:
            job = quick.enqueue(conn)
        await until(eyes.is_in(job.id, "completed"))
        assert worker.state.phase == "running"
    assert {name for name in failed if f"{name}: this failed" in caplog.text} == failed.keys()


# Blocked although there is room --------------------------------------------------------------------------------------


@pytest.mark.promise("F82")
async def test_a_job_that_is_blocked_although_its_key_has_room_is_told_after_a_while(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.worker("q", "t")
    insert = (
        "INSERT INTO pgqueue.job (task, queue, state, lock_key, limit_key, rate_key, key) VALUES ('t', 'q', 'blocked', "
    )
    bench.eyes.do(insert + "'free', NULL, NULL, 'lock:free')")
    bench.eyes.do(insert + "'held', NULL, NULL, 'lock:held')")
    bench.eyes.do(insert + "NULL, 'undeclared', NULL, 'limit:undeclared')")
    bench.eyes.do(
        "INSERT INTO pgqueue.job (task, queue, state, lock_key, holds, worker_id, claim, started_at) "
        "VALUES ('t', 'q', 'running', 'held', true, 1, 1, now())"
    )
    await bench.duty.measure()
    assert bench.eyes.one("SELECT max(longest_blocked) FROM pgqueue.depth") is None, "it was seen once"
    monkeypatch.setattr(longest_blocked, "ROOM_SECONDS", 0.0)
    await bench.duty.measure()
    [(reason, age)] = bench.eyes.all(
        "SELECT reason, extract(epoch FROM now() - longest_blocked)::float8 FROM pgqueue.depth "
        "WHERE longest_blocked IS NOT NULL"
    )
    assert (reason, 0 < age < 30) == ("lock", True)
    assert set(bench.duty._longest._roomy) == {"lock:free"}
    with psycopg.connect(bench.dsn) as conn:
        told = pgqueue.depth(conn, "q").longest_blocked
        assert told is not None and 0 < told < 30
    bench.eyes.do("DELETE FROM pgqueue.job_blocked")
    await bench.duty.measure()
    assert bench.eyes.one("SELECT count(longest_blocked) FROM pgqueue.depth") == 0


@pytest.mark.promise("F82")
@pytest.mark.parametrize(("ahead", "room"), [(None, True), ("-5 s", True), ("30 s", False)])
async def test_a_rate_has_room_when_the_next_job_may_start(bench: Bench, ahead: str | None, room: bool) -> None:
    bench.worker("q", "t")
    bench.eyes.do("INSERT INTO pgqueue.key_rate (name, count, period, set_at) VALUES ('api', 1, 10, now())")
    bench.eyes.do(
        "INSERT INTO pgqueue.job (task, queue, state, rate_key, key) "
        "VALUES ('t', 'q', 'blocked', 'api:a', 'rate:api:a')"
    )
    if ahead is not None:
        bench.eyes.do("INSERT INTO pgqueue.limiter VALUES ('api:a', now() + %s::interval, 1)", ahead)
    await bench.duty.measure()
    assert set(bench.duty._longest._roomy) == ({"rate:api:a"} if room else set())


@pytest.mark.promise("F82")
@pytest.mark.parametrize("why", ["paused", "unknown"])
async def test_a_job_that_could_not_go_on_for_another_reason_is_not_held_up_by_its_key(bench: Bench, why: str) -> None:
    bench.worker("q", "t")
    if why == "paused":
        bench.eyes.do("INSERT INTO pgqueue.queue VALUES ('q', now())")
    task = "typo" if why == "unknown" else "t"
    bench.eyes.do(
        "INSERT INTO pgqueue.job (task, queue, state, lock_key, key) VALUES (%s, 'q', 'blocked', 'k', 'lock:k')", task
    )
    await bench.duty.measure()
    assert not bench.duty._longest._roomy


def test_only_the_same_waiter_at_each_look_counts_and_only_after_two_sweeps() -> None:
    longest = LongestBlocked()
    longest.looked([("lock:a", 1, "q"), ("lock:b", 2, "q"), ("lock:c", 3, "other")], None, 100.0)
    longest.looked([("lock:a", 1, "q"), ("lock:b", 9, "q")], None, 105.0)
    assert longest.since(105.0, 5000.0) == {}
    longest.looked([("lock:a", 1, "q"), ("lock:b", 9, "q"), ("lock:c", 3, "other")], None, 100.0 + ROOM_SECONDS)
    assert longest.since(100.0 + ROOM_SECONDS, 5000.0) == {("q", "lock"): 5000.0 - ROOM_SECONDS}
    assert longest.asks() == {"after": "", "n": longest_blocked.KEYS_MOST, "again": ["lock:a", "lock:b", "lock:c"]}
    longest.none_waits()
    assert longest.since(500.0, 5000.0) == {}


def test_the_walk_over_the_keys_goes_on_where_it_stopped() -> None:
    longest = LongestBlocked()
    longest.looked([], "lock:m", 1.0)
    assert longest.asks()["after"] == "lock:m"
    longest.looked([], None, 2.0)
    assert longest.asks()["after"] == ""


def test_the_longest_stands_at_the_group_of_its_queue_and_kind_of_key() -> None:
    groups = [["q", "available", "slot", "", 1, True, 3.0], ["q", "blocked", "lock", "", 1, True, None]]
    groups.append(["q", "blocked", "rate", "", 1, True, None])
    assert [row[-1] for row in with_longest(groups, {("q", "rate"): 7.0, ("gone", "lock"): 8.0})] == [None, None, 7.0]
    assert json.dumps(groups)


# Cursors -------------------------------------------------------------------------------------------------------------


def test_lanes_that_could_not_all_be_read_raise_no_cursor_and_are_read_less_deeply() -> None:
    cursors = DepthCursors()
    cursors.lanes(0.0)
    cursors.read((500, 10, "10:10:"), [("q", 11, False, 1, 100)], [], 1.0, 0.01)
    assert cursors.lanes(2.0)["afters"].count(99) == 1
    deep = [(f"q{i}", 11, False, 10_001, 200) for i in range(20)]
    cursors.read((900, 20, "20:20:"), [("q", 11, False, 1, 700), *deep], [], 3.0, 0.01)
    asked = cursors.lanes(4.0)
    assert max(asked["afters"], default=0) < 699 and asked["most"] == 200_000 // 22
    assert asked["known"] == ["q", *(f"q{i}" for i in range(20))]


@pytest.mark.promise("F05")
@pytest.mark.parametrize("lanes", [[], [("mail", 11, False, 1, 5)], [("default", 11, False, 1, 5)]], ids=str)
def test_a_lane_may_be_due_to_begin_anew_between_a_question_and_its_answer(lanes: list[Any]) -> None:
    """A minute after the first answer it is, and measurements come every five seconds from the first question."""
    cursors = DepthCursors()
    for number in range(14):
        asked, answered = 5.001 * number, 5.001 * number + 0.02
        before, after = (asked - 0.03, answered) if number == 12 else (asked, asked + 0.005)
        cursors.lanes(before if number else 0.0)
        reading = (9, 100 + number, f"{100 + number}:{100 + number}:")
        cursors.read(reading, lanes if number == 12 else [], ["default"], after if number else 0.02, 0.005)


def test_scheduled_jobs_are_read_from_the_first_one_of_a_minute_ago_and_now_and_then_from_the_start() -> None:
    cursors = DepthCursors()
    assert cursors.scheduled(0) is None
    cursors.read_scheduled(5_000.0, 1_000.0)
    cursors.read_scheduled(900.0, 1_010.0)
    assert cursors.scheduled(1) == 940.0, "a job that comes later is due later than the time of the look"
    cursors.read_scheduled(None, 1_200.0)
    assert cursors.scheduled(2) == 840.0 and cursors.scheduled(100) is None
    cursors.read_scheduled(None, 1_300.0)
    assert cursors.scheduled(3) == 1_140.0
    cursors.read_scheduled(None, 700.0)
    assert cursors.scheduled(4) == 640.0, "the clock was set back"


def test_what_a_reader_measures_is_what_the_leader_measures(conn: psycopg.Connection) -> None:
    conn.execute("INSERT INTO pgqueue.job (task, queue) SELECT 't', 'q' FROM generate_series(1, 12)")
    asking = reader.measure("pgqueue")
    statement = next(asking)
    with pytest.raises(StopIteration) as end:
        while True:
            statement = asking.send(conn.execute(statement.sql.encode(), dict(statement.params)).fetchall())
    assert [group[:6] for group in end.value.value if group[0]] == [["q", "available", "unserved", "", 12, True]]
