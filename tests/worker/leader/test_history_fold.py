"""Parts become minutes, minutes become hours, each once: beside another leader, after a crash, whatever clocks do."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from time import sleep
from typing import Any

import psycopg
import pytest
from worker_states import worker_state
from workers import Eyes, until, work

import pgqueue
from pgqueue.client.tasks import task
from pgqueue.database.sessions import Link, Session
from pgqueue.jobs.histogram import BOUNDS, quantile
from pgqueue.testing import Clock
from pgqueue.worker.leader import history_fold
from pgqueue.worker.leader.history_fold import HistoryFold
from pgqueue.worker.leader.pruner import Pruner
from pgqueue.worker.leader.unknown_tasks import UnknownTasks
from pgqueue.worker.liveness.registration import register

MINUTES = "SELECT task, sum(completed)::int, sum(rescued)::int FROM pgqueue.history_minute GROUP BY 1 ORDER BY 1"
HOURS = MINUTES.replace("history_minute", "history_hour")


class Bench:
    """A leader's fold without its loop, and parts of workers that are not there."""

    def __init__(self, dsn: str, eyes: Eyes) -> None:
        self.dsn, self.eyes = dsn, eyes
        self.sessions: list[Session] = []
        self.fold = self.another()
        eyes.do(
            "UPDATE pgqueue.duty SET done_at = date_bin('1 hour', now(), '2000-01-01 00:00+00') WHERE name = 'history'"
        )

    def another(self) -> HistoryFold:
        """Another worker that takes itself for the leader."""
        self.sessions.append(Session(Link(self.dsn, "pgqueue"), "fetch"))
        return HistoryFold(self.sessions[-1])

    def part(self, at: str = "now()", errors: list[dict[str, Any]] | None = None, **counts: Any) -> None:
        """A part of a worker, for the minute of this time."""
        given = {"queue": "q", "task": "t", "completed": 1} | counts
        insert = (
            "INSERT INTO pgqueue.history_part (at, counts, errors) VALUES (date_bin('1 minute', AT, EPOCH), %s, %s)"
        )
        self.eyes.do(
            insert.replace("AT", at).replace("EPOCH", "'2000-01-01 00:00+00'"),
            json.dumps([given]),
            json.dumps(errors or []),
        )


@pytest.fixture
async def bench(dsn: str, eyes: Eyes) -> AsyncIterator[Bench]:
    made = Bench(dsn, eyes)
    yield made
    for session in made.sessions:
        await session.close()


@pytest.mark.promise("F92")
async def test_parts_of_several_workers_are_added_up(bench: Bench, eyes: Eyes) -> None:
    bench.part(started=2, wait=[1, 0, 1], run=[2], wait_seconds=0.5, run_seconds=0.1)
    bench.part(started=3, wait=[0, 0, 1, 2], run=[3], wait_seconds=0.5)
    bench.part(task="u", rescued=4)
    await bench.fold.round()
    found = eyes.all(
        "SELECT task, started::int, completed::int, rescued::int, wait::int[], run::int[], wait_seconds, run_seconds "
        "FROM pgqueue.history_minute ORDER BY task"
    )
    assert found == [("t", 5, 2, 0, [1, 0, 2, 2], [5], 1.0, 0.1), ("u", 0, 1, 4, [], [], 0.0, 0.0)]
    assert eyes.one("SELECT count(*) FROM pgqueue.history_part") == 0
    await bench.fold.round()
    assert eyes.all(MINUTES) == [("t", 2, 0), ("u", 1, 4)]


@pytest.mark.promise("F92")
async def test_more_parts_than_one_round_takes_are_all_folded(
    bench: Bench, eyes: Eyes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history_fold, "PARTS_MOST", 3)
    for _ in range(10):
        bench.part()
    await bench.fold.round()
    assert eyes.all(MINUTES) == [("t", 10, 0)]


@pytest.mark.promise("F92")
async def test_a_second_leader_folds_nothing_while_the_first_does(
    bench: Bench, eyes: Eyes, conn: psycopg.Connection
) -> None:
    """Without the lock both would make the same hour."""
    bench.part()
    await bench.fold.round()
    eyes.do("UPDATE pgqueue.duty SET done_at = done_at - interval '5 hours' WHERE name = 'history'")
    eyes.do("UPDATE pgqueue.history_minute SET at = at - interval '2 hours'")
    bench.part()
    conn.execute("SELECT FROM pgqueue.duty WHERE name = 'history' FOR UPDATE")  # the first one is just at it
    second = bench.another()
    await second.round()
    assert eyes.all(HOURS) == []
    assert eyes.one("SELECT count(*) FROM pgqueue.history_part") == 1
    conn.rollback()
    await second.round()
    await bench.fold.round()
    assert eyes.all(HOURS) == [("t", 1, 0)]
    assert eyes.all(MINUTES) == [("t", 2, 0)]


@pytest.mark.promise("F92")
@pytest.mark.parametrize(
    "crash",
    ["history_fold_lock", "history_fold_parts", "history_fold_depth", "history_fold_hours", "history_fold_forget"],
)
async def test_a_crash_between_any_two_statements_loses_and_doubles_nothing(
    bench: Bench, eyes: Eyes, crash: str
) -> None:
    """The session of the leader ends after one of the statements; the next leader folds."""
    bench.part("now() - interval '3 hours'")
    bench.part("now() - interval '1 minute'")
    eyes.do("UPDATE pgqueue.duty SET done_at = done_at - interval '1 hour' WHERE name = 'history'")
    link = bench.sessions[0].link
    order = [
        "history_fold_lock",
        "history_fold_parts",
        "history_fold_depth",
        "history_fold_hours",
        "history_fold_forget",
    ]
    measure(eyes, ("deep", "available", "slot", 5, True, 30))
    with psycopg.connect(bench.dsn) as dies:
        for name in order[: order.index(crash) + 1]:
            statement = link.statement(name, n=100, ids=5)
            dies.execute(statement.sql.encode(), statement.params)
        pid = dies.info.backend_pid
        eyes.do("SELECT pg_terminate_backend(%s)", pid)
        with pytest.raises(psycopg.OperationalError):
            dies.execute("SELECT 1")
    assert eyes.all(MINUTES) == [] == noted(eyes)
    await bench.fold.round()
    assert eyes.all(MINUTES) == [("", 0, 0), ("t", 2, 0)]
    assert noted(eyes) == [("deep", "available", 5, True, 30.0)]
    done = eyes.one("SELECT done_at FROM pgqueue.duty WHERE name = 'history'")
    hours = eyes.one("SELECT count(*) FROM pgqueue.history_minute WHERE at < %s AND state IS NULL", done)
    assert eyes.one("SELECT coalesce(sum(completed), 0)::int FROM pgqueue.history_hour") == hours > 0


@pytest.mark.promise("F92")
async def test_each_minute_goes_into_its_hour_once_however_late_it_comes(bench: Bench, eyes: Eyes) -> None:
    with Clock(eyes.conn) as clock:
        start = clock.set(eyes.one("SELECT date_bin('1 hour', now(), '2000-01-01 00:00+00') + interval '1 hour'"))
        eyes.do("UPDATE pgqueue.duty SET done_at = pgqueue.now() WHERE name = 'history'")
        bench.part("pgqueue.now()")
        clock.set(eyes.one("SELECT %s + interval '69 minutes'", start))
        bench.part("pgqueue.now()")
        await bench.fold.round()
        assert eyes.all(HOURS) == []  # the first hour may still be written to
        clock.set(eyes.one("SELECT %s + interval '71 minutes'", start))
        await bench.fold.round()
        assert eyes.all(HOURS) == [("t", 1, 0)]
        bench.part("pgqueue.now() - interval '40 minutes'")  # late: of the first hour, which is made
        await bench.fold.round()
        assert eyes.all(HOURS) == [("t", 2, 0)]
        clock.set(eyes.one("SELECT %s + interval '140 minutes'", start))
        await bench.fold.round()
        await bench.fold.round()
        assert eyes.all(HOURS) == [("t", 3, 0)] == eyes.all(MINUTES)


@pytest.mark.promise("F92")
@pytest.mark.parametrize("step", ["1 day", "-1 day", "61 minutes", "-61 minutes"])
async def test_a_clock_that_steps_loses_and_doubles_nothing(bench: Bench, eyes: Eyes, step: str) -> None:
    with Clock(eyes.conn) as clock:
        written = 0
        for turn in ("90 minutes", step, "3 minutes", f"-1 * interval '{step}'", "90 minutes", "3 hours"):
            bench.part("pgqueue.now()")
            written += 1
            await bench.fold.round()
            by = turn if "interval" in turn else f"interval '{turn}'"
            clock.set(eyes.one(f"SELECT pgqueue.now() + {by}"))
        clock.set(eyes.one("SELECT pgqueue.now() + interval '2 days'"))
        await bench.fold.round()
        assert eyes.all(MINUTES) == [("t", written, 0)] == eyes.all(HOURS)


@pytest.mark.promise("F92")
async def test_a_part_that_cannot_be_read_is_dropped_and_keeps_no_other(bench: Bench, eyes: Eyes) -> None:
    bench.part()
    bench.part(started="many")
    bench.part()
    await bench.fold.round()
    for _ in range(5):
        await bench.fold.round()
    assert eyes.all(MINUTES) == [("t", 2, 0)]
    assert eyes.one("SELECT count(*) FROM pgqueue.history_part") == 0


@pytest.mark.promise("F92")
@pytest.mark.parametrize("state", ["P0001", "22023", "23514"])
async def test_parts_wait_while_a_trigger_of_the_application_refuses(bench: Bench, eyes: Eyes, state: str) -> None:
    """By its SQLSTATE alone such an error looks like one of a part that cannot be read."""
    eyes.do(
        "CREATE FUNCTION public.refuse() RETURNS trigger LANGUAGE plpgsql AS "
        f"$$ BEGIN RAISE EXCEPTION 'no' USING ERRCODE = '{state}'; END $$;"
        "CREATE TRIGGER refuse BEFORE INSERT ON pgqueue.history_minute FOR EACH ROW EXECUTE FUNCTION public.refuse()"
    )
    bench.part()
    for _ in range(3):
        with pytest.raises(psycopg.DatabaseError):
            await bench.fold.round()
    eyes.do("DROP FUNCTION public.refuse() CASCADE")
    await bench.fold.round()
    assert eyes.all(MINUTES) == [("t", 1, 0)]


@pytest.mark.promise("F92")
async def test_no_part_is_dropped_for_what_another_statement_of_the_round_has_met(bench: Bench, eyes: Eyes) -> None:
    eyes.do("ALTER TABLE pgqueue.history_minute ADD CONSTRAINT no_depth CHECK (state IS NULL)")
    measure(eyes, ("deep", "available", "slot", 5, True, 30))
    for n in (4, 7):
        for _ in range(n):
            bench.part()
        with pytest.raises(psycopg.errors.CheckViolation):
            await bench.fold.round()
        assert eyes.one("SELECT sum(completed)::int FROM pgqueue.history_minute") == {4: 4, 7: 11}[n]
    bench.part(started="many")
    bench.part()
    await bench.fold.round()  # the one that cannot be read is dropped first
    with pytest.raises(psycopg.errors.CheckViolation):
        await bench.fold.round()
    assert eyes.all(MINUTES) == [("t", 12, 0)]
    assert eyes.one("SELECT count(*) FROM pgqueue.history_part") == 0


@pytest.mark.promise("F92")
async def test_it_goes_on_after_a_fixture_has_emptied_all_tables(bench: Bench, eyes: Eyes) -> None:
    eyes.do("TRUNCATE pgqueue.ring, pgqueue.duty")
    bench.part()
    await bench.fold.round()
    assert eyes.one("SELECT count(*) FROM pgqueue.history_part") == 1
    assert eyes.one("SELECT pgqueue.restore_settings()") == 7
    await bench.fold.round()
    assert eyes.all(MINUTES) == [("t", 1, 0)]


@pytest.mark.promise("F93")
async def test_failures_are_grouped_and_the_groups_are_bounded(
    bench: Bench, eyes: Eyes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def group(name: str, ids: list[int], last: float, message: str = "no") -> dict[str, Any]:
        return {
            "fingerprint": name, "queue": "q", "task": "t", "error_type": "ValueError", "place": "shop.charge",
            "message": message, "version_tag": "v1", "count": len(ids), "ids": ids, "first": last + 10, "last": last,
        }  # fmt: skip

    bench.part(errors=[group("a", [3, 2, 1], 60.0, "old"), group("b", [9], 5.0)])
    bench.part(errors=[group("a", [7, 6, 5], 1.0, "new")])
    await bench.fold.round()
    bench.part(errors=[group("a", [8], 0.0, "newest")])
    await bench.fold.round()
    found = eyes.all("SELECT fingerprint, count::int, message, job_ids FROM pgqueue.error_group ORDER BY 1")
    assert found == [("a", 7, "newest", [8, 7, 6, 5]), ("b", 1, "no", [9])]
    assert eyes.one(
        "SELECT round(extract(epoch FROM last_at - first_at)) > 60 FROM pgqueue.error_group WHERE count = 7"
    )
    monkeypatch.setattr(history_fold, "GROUPS_MOST", 1)
    await bench.fold.round()
    assert eyes.all("SELECT fingerprint FROM pgqueue.error_group") == [("a",)]
    eyes.do("UPDATE pgqueue.error_group SET last_at = last_at - interval '31 days'")
    await bench.fold.round()
    assert eyes.all("SELECT fingerprint FROM pgqueue.error_group") == []


@pytest.mark.promise("F310")
async def test_a_group_knows_the_version_that_failed_so_first(bench: Bench, eyes: Eyes) -> None:
    """Naive is the version of the last failure: with the first failure after a deploy every cause is new."""

    def failed(version: str, first: float) -> dict[str, Any]:
        return {
            "fingerprint": "a", "queue": "q", "task": "t", "error_type": "E", "version_tag": version, "count": 1,
            "ids": [1], "first": first, "last": first,
        }  # fmt: skip

    def known() -> tuple[str, str]:
        [found] = eyes.all("SELECT first_version, version_tag FROM pgqueue.error_group")
        return found[0], found[1]

    bench.part(errors=[failed("v2", 10.0)])
    bench.part(errors=[failed("v1", 60.0)])
    await bench.fold.round()
    assert known() == ("v1", "v2")
    bench.part(errors=[failed("v3", 0.0)])
    await bench.fold.round()
    assert known() == ("v1", "v3")
    bench.part(errors=[failed("v0", 600.0)])  # of a worker that was away
    await bench.fold.round()
    assert known()[0] == "v0"


@pytest.mark.promise("F92")
async def test_a_writer_that_is_silent_for_a_day_is_forgotten(bench: Bench, eyes: Eyes) -> None:
    for hours in (1, 25):
        eyes.do(
            "INSERT INTO pgqueue.history_writer VALUES (gen_random_uuid(), 1, now() - make_interval(hours => %s))",
            hours,
        )
    await bench.fold.round()
    assert eyes.one("SELECT count(*) FROM pgqueue.history_writer") == 1


@pytest.mark.promise("F94")
def test_the_database_and_python_have_the_same_bounds_and_estimates(eyes: Eyes) -> None:
    assert tuple(eyes.one("SELECT pgqueue.history_bounds()")) == BOUNDS
    for run in ([3], [0, 0, 5], [1, 0, 0, 2, 9], [0] * len(BOUNDS) + [4], [1] * (len(BOUNDS) + 1)):
        eyes.do("TRUNCATE pgqueue.history_minute, pgqueue.history_hour")
        for table, at in (
            ("history_minute", "now() + interval '1 minute'"),
            ("history_hour", "now() - interval '3 hours'"),
        ):
            insert = "INSERT INTO pgqueue.TABLE (at, bin, queue, task, run) VALUES (AT, 0, 'q', 't', %s)"
            eyes.do(insert.replace("TABLE", table).replace("AT", at), run)
        for share in (0.5, 0.95, 0.99, 1.0):
            assert eyes.one("SELECT pgqueue.run_quantile('t', %s)", share) == pytest.approx(
                quantile([2 * n for n in run], share)
            )
    assert eyes.one("SELECT pgqueue.run_quantile('u', 0.95)") is None


@pytest.mark.promise("F94")
def test_an_estimate_lies_in_the_bucket_of_the_true_value() -> None:
    times = sorted(0.0007 * 1.01**n for n in range(1, 1_700))
    counts = [0] * (len(BOUNDS) + 1)
    for time in times:
        counts[next((place for place, bound in enumerate(BOUNDS) if time <= bound), len(BOUNDS))] += 1
    for share in (0.05, 0.5, 0.95, 0.99):
        true, found = times[max(0, round(share * len(times)) - 1)], quantile(counts, share)
        assert found is not None and 0.5 < found / true < 2.0


# What no worker's memory counts --------------------------------------------------------------------------------------


@pytest.mark.promise("F90")
async def test_a_cancelled_waiting_job_is_counted_where_it_is_cancelled(bench: Bench, eyes: Eyes, dsn: str) -> None:
    made = pgqueue.remote("fold.waits")
    with psycopg.connect(dsn) as conn:
        ids = [made.using(queue=queue).enqueue(conn).id for queue in ("a", "a", "b")]
        pgqueue.cancel(conn, *ids)
        conn.rollback()
    with psycopg.connect(dsn) as conn:
        ids = [made.using(queue=queue).enqueue(conn).id for queue in ("a", "a", "b")]
        pgqueue.cancel(conn, *ids)
    await bench.fold.round()
    found = eyes.all("SELECT queue, task, cancelled::int, started::int FROM pgqueue.history_minute ORDER BY queue")
    assert found == [("a", "fold.waits", 2, 0), ("b", "fold.waits", 1, 0)]


@pytest.mark.promise("F90")
async def test_a_rescued_job_is_counted_where_it_is_rescued(bench: Bench, eyes: Eyes, dsn: str) -> None:
    eyes.do(
        "INSERT INTO pgqueue.job (task, state, worker_id, claim, started_at) "
        "SELECT 'fold.rescued', 'running', 4711, n, pgqueue.now() FROM generate_series(1, 3) AS n"
    )

    @task(name="fold.other")
    def other() -> None: ...

    async with work(dsn, other) as worker:
        await worker.services.rescue.strays()
    await bench.fold.round()
    assert eyes.all(MINUTES) == [("fold.rescued", 0, 3)]


@pytest.mark.promise("F92")
async def test_a_worker_that_leads_folds_by_itself(eyes: Eyes, dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history_fold, "ROUND_SECONDS", 0.05)

    @task(name="fold.by.itself")
    def itself() -> None: ...

    async with work(dsn, itself) as worker:
        with psycopg.connect(dsn) as conn:
            itself.enqueue(conn)
        await until(lambda: worker.services.counters.totals().tasks)  # a moment after the job is completed
        await worker.services.counters.write_rest()
        await until(lambda: eyes.all(MINUTES) == [("fold.by.itself", 1, 0)])


# How many jobs there were --------------------------------------------------------------------------------------------


MEASURED = """
    INSERT INTO pgqueue.depth (at, next_at, queue, state, reason, task, n, exact, oldest, longest_blocked)
    SELECT d.at, d.at + interval '5 s', d.queue, d.state, d.reason, '', d.n, d.exact,
        d.at - make_interval(secs => d.old), d.at - make_interval(secs => d.blocked)
    FROM (SELECT %s::timestamptz, %s, %s, %s, %s::bigint, %s::boolean, %s::float8, %s::float8)
        AS d (at, queue, state, reason, n, exact, old, blocked)
"""
NOTED = (
    "SELECT queue, state, n, exact, round(oldest::numeric, 3)::float8 FROM pgqueue.TABLE WHERE state IS NOT NULL "
    "ORDER BY 1, 2, 3"
)


def measure(eyes: Eyes, *groups: tuple[Any, ...], at: str = "now()") -> None:
    """What a leader has measured at this time: queue, state, reason, n, exact, oldest, longest_blocked."""
    eyes.do("DELETE FROM pgqueue.depth")
    moment = eyes.one(f"SELECT {at}")
    for each in groups:
        eyes.do(MEASURED, moment, *each, *[None] * (7 - len(each)))


def noted(eyes: Eyes, table: str = "history_minute") -> list[Any]:
    return eyes.all(NOTED.replace("TABLE", table))


@pytest.mark.promise("F96")
async def test_how_many_jobs_there_are_is_noted_once_a_minute(bench: Bench, eyes: Eyes) -> None:
    minute = eyes.one("SELECT date_bin('1 minute', now() - interval '3 minutes', '2000-01-01 00:00+00')::text")
    at = f"timestamptz '{minute}' + interval '7 s'"  # and a minute later, which is over as well
    measure(
        eyes,
        ("q", "available", "slot", 5, True, 30),
        ("q", "available", "unknown", 7, False, 900),
        ("s", "available", "paused", 2, True, 900),
        ("s", "available", "task_paused", 1, True, 900),
        ("q", "blocked", "lock", 3, True, None, 40),
        ("q", "blocked", "rate", 2, True, None, None),
        ("q", "running", "", 0, True),
        ("r", "scheduled", "time", 4, True),
        ("r", "scheduled", "retry", 1, True, 20),
        ("p", "scheduled", "time", 6, True, 900),
        ("", "completed", "", 99, True),
        at=at,
    )
    eyes.do("INSERT INTO pgqueue.queue VALUES ('p', now())")
    wanted = [
        ("p", "scheduled", 6, True, None),  # paused
        ("q", "available", 12, False, 30.0),
        ("q", "blocked", 5, True, 40.0),
        ("r", "scheduled", 5, True, 20.0),
        ("s", "available", 3, True, None),  # paused
    ]
    await bench.fold.round()
    assert noted(eyes) == wanted
    assert eyes.one("SELECT count(DISTINCT at) FROM pgqueue.history_minute") == 1
    await bench.fold.round()
    await bench.another().round()
    measure(eyes, ("q", "available", "slot", 50, True, 30), at=f"{at} + interval '20 s'")  # in the same minute
    await bench.fold.round()
    assert noted(eyes) == wanted
    measure(eyes, ("q", "available", "slot", 50, True, 31), at=f"{at} + interval '60 s'")
    await bench.fold.round()
    assert noted(eyes) == sorted([*wanted, ("q", "available", 50, True, 31.0)], key=lambda row: row[:3])
    assert eyes.all("SELECT sum(started), sum(completed), min(task), max(task) FROM pgqueue.history_minute") == [
        (0, 0, "", "")
    ]


@pytest.mark.promise("F96")
@pytest.mark.parametrize("at", ["now() - interval '6 minutes'", "now() + interval '10 s'"], ids=["old", "to come"])
async def test_a_measurement_of_another_time_is_not_noted(bench: Bench, eyes: Eyes, at: str) -> None:
    measure(eyes, ("q", "available", "slot", 5, True, 30), at=at)
    await bench.fold.round()
    assert noted(eyes) == []


@pytest.mark.promise("F96")
async def test_an_hour_has_the_largest_number_of_its_minutes(
    bench: Bench, eyes: Eyes, conn: psycopg.Connection
) -> None:
    with Clock(eyes.conn) as clock:
        clock.set(eyes.one("SELECT date_bin('1 hour', now(), '2000-01-01 00:00+00') + interval '1 hour'"))
        eyes.do("UPDATE pgqueue.duty SET done_at = pgqueue.now() WHERE name = 'history'")
        for n in (5, 70, 6):
            groups = ("q", "available", "slot", n, n < 50, 10 * n), ("r", "available", "slot", 1, True, 1)
            measure(eyes, *groups, at="pgqueue.now()")
            await bench.fold.round()
            clock.advance(60)
        assert noted(eyes, "history_hour") == []
        [q, r] = pgqueue.history(conn, step="hour", by="queue")  # not made yet: of its minutes
        assert (q.queue, q.available, q.blocked, q.oldest, q.started) == ("q", 70, 0, 700.0, 0)
        clock.advance(hours=1, minutes=10)
        await bench.fold.round()
        await bench.another().round()
        assert noted(eyes, "history_hour") == [("q", "available", 70, False, 700.0), ("r", "available", 1, True, 1.0)]
        assert pgqueue.history(conn, step="hour", by="queue") == [q, r]
        [together] = pgqueue.history(conn, step="hour", by="all")
        assert (together.queue, together.available, together.oldest) == (None, 71, 700.0)


@pytest.mark.promise("F96")
async def test_a_round_is_one_message(bench: Bench, eyes: Eyes, monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle leader sends as little as before."""
    sent: list[int] = []
    real = Session.run

    async def counted(self: Session, *statements: Any) -> Any:
        sent.append(len(statements))
        return await real(self, *statements)

    monkeypatch.setattr(Session, "run", counted)
    measure(eyes, ("q", "available", "slot", 5, True, 30))
    await bench.fold.round()
    assert len(sent) == 1


# The rings go round --------------------------------------------------------------------------------------------------


@pytest.mark.second
@pytest.mark.promise("F97")
@pytest.mark.parametrize(
    ("ring", "step", "steps", "kept"),
    [("minute", 3_600, 80, 24), ("hour", 86_400, 100, 30)],
    ids=["minutes for a day", "hours for 30 days"],
)
async def test_what_is_young_is_kept_and_what_is_old_goes(
    bench: Bench, eyes: Eyes, ring: str, step: int, steps: int, kept: int
) -> None:
    """A part and a measurement at each step of the clock; the leader folds, and the pruner makes its round."""
    pruner = Pruner(bench.sessions[0])
    with Clock(eyes.conn) as clock:
        clock.set(eyes.one("SELECT date_bin('1 day', now(), '2000-01-01 00:00+00') + interval '1 day'"))
        eyes.do("UPDATE pgqueue.duty SET done_at = pgqueue.now() WHERE name = 'history'")
        eyes.do("UPDATE pgqueue.ring SET since = pgqueue.now()")
        for number in range(steps):
            bench.part("pgqueue.now()", started=number + 1)
            measure(eyes, ("q", "available", "slot", number + 1, True, 1), at="pgqueue.now()")
            await bench.fold.round()
            clock.advance(step)
            await bench.fold.round()
            await pruner.rings()
        most = 8 * (kept // 6 + 1)  # leaves, each of a sixth; and the steps of the clock
        counted = eyes.all(f"SELECT started::int FROM pgqueue.history_{ring} WHERE state IS NULL ORDER BY 1")  # noqa: S608
        found = [n for (n,) in counted]
        assert found[-1] == steps and set(range(steps - kept + 1, steps + 1)) <= set(found)
        assert len(found) == len(set(found)) and steps - found[0] <= most
        deep = sorted(n for (_, _, n, _, _) in noted(eyes, f"history_{ring}"))
        assert deep == found
        leaves = eyes.one(f"SELECT count(DISTINCT bin) FROM pgqueue.history_{ring}")  # noqa: S608
        assert 6 <= leaves <= 8


# What happens in the database is counted there ------------------------------------------------------------------------


@task(name="history.locked", lock="one")
def locked() -> None: ...


@task(name="history.slow", lock="one")
def slow() -> None:
    sleep(0.6)


@pytest.mark.promise("F97")
async def test_the_time_for_which_a_lock_blocks_a_job_is_a_wait(bench: Bench, eyes: Eyes, dsn: str) -> None:
    with psycopg.connect(dsn) as conn:
        slow.enqueue(conn)
        conn.commit()
        async with work(dsn, slow, locked):
            await until(lambda: eyes.one("SELECT count(*) FROM pgqueue.job_running") == 1)
            locked.enqueue(conn)
            conn.commit()
            await until(lambda: eyes.one("SELECT count(*) FROM pgqueue.job_blocked") == 1)
            await until(lambda: eyes.one("SELECT count(*) FROM pgqueue.job_done") == 2)
        await bench.fold.round()
        waited = {row.task: row.wait_seconds for row in pgqueue.history(conn)}
        held = eyes.one(
            "SELECT extract(epoch FROM d.started_at - d.enqueued_at)::float8 FROM pgqueue.job_done d "
            "WHERE d.task = 'history.locked'"
        )
        assert held > 0.3 and waited["history.locked"] == pytest.approx(held, abs=0.1)


@pytest.mark.promise("F97")
async def test_a_skipped_job_and_a_deadline_are_counted_where_they_happen(bench: Bench, eyes: Eyes, dsn: str) -> None:
    @task(name="history.skips", lock=pgqueue.Lock("one", on_locked="skip"))
    def skips() -> None: ...

    with psycopg.connect(dsn) as conn:
        slow.enqueue(conn)
        conn.commit()
        async with work(dsn, slow, skips):
            await until(lambda: eyes.one("SELECT count(*) FROM pgqueue.job_running") == 1)
            skips.enqueue(conn)
            pgqueue.remote("history.unserved").using(deadline=0.01).enqueue(conn)
            conn.commit()
            await until(lambda: eyes.one("SELECT count(*) FROM pgqueue.job_done WHERE state = 'skipped'") == 1)
        session = bench.sessions[0]
        register(conn, "pgqueue", lease=15.0, concurrency=1, version_tag="v", queues=["default"], tasks=["t"])
        conn.commit()
        judge = UnknownTasks(session, worker_state(session.link, 1, set()), ended=lambda: None)
        await judge.look()
        await bench.fold.round()
        [row] = pgqueue.history(conn, task="history.skips")
        assert (row.skipped, row.started, row.completed) == (1, 0, 0)
        [row] = pgqueue.history(conn, task="history.unserved")
        assert (row.expired, row.started) == (1, 0)
