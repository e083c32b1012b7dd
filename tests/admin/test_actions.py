"""What people do by hand: pause and resume a queue, cancel and retry jobs wherever they are."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from time import sleep
from typing import Any

import asyncpg
import psycopg
import pytest
from commands import items
from commands import pgqueue as command
from handlers import begins, begun
from workers import Eyes, Taker, until, wait_until, work

import pgqueue
from pgqueue.admin import actions, filters
from pgqueue.admin.answers import Answer
from pgqueue.client.tasks import task
from pgqueue.database import steps
from pgqueue.errors import InvalidOption
from pgqueue.worker.run import cancellation

Conn = psycopg.Connection[Any]

ran: list[int] = []


@pytest.fixture(autouse=True)
def anew() -> None:
    ran.clear()


@task(name="operate.note", queue="mail")
async def note(number: int = 0) -> None:
    await asyncio.sleep(0.002)
    ran.append(number)


# Pause and resume ----------------------------------------------------------------------------------------------------


@pytest.mark.second
def test_both_say_whether_they_changed_anything(conn: Conn) -> None:
    assert not pgqueue.resume(conn, "mail")
    assert pgqueue.pause(conn, "mail")
    since = pgqueue.queues(conn)[0].paused_at
    assert not pgqueue.pause(conn, "mail")
    assert (since is not None, pgqueue.queues(conn)[0].paused_at) == (True, since)
    assert pgqueue.resume(conn, "mail")
    assert not pgqueue.resume(conn, "mail")
    assert pgqueue.queues(conn) == []


async def test_async_connections_pause_and_resume(aconn: psycopg.AsyncConnection[Any]) -> None:
    assert await pgqueue.apause(aconn, "mail")
    assert not await pgqueue.apause(aconn, "mail")
    assert await pgqueue.aresume(aconn, "mail")
    assert not await pgqueue.aresume(aconn, "mail")


@pytest.mark.parametrize("change", [pgqueue.pause, pgqueue.resume])
def test_what_names_no_queue_is_refused_before_it_is_sent(conn: Conn, change: Any) -> None:
    for name in ("", "a b", "x" * 41, "mail'; DROP TABLE pgqueue.job", 7):
        with pytest.raises(InvalidOption, match="queue"):
            change(conn, name)
    assert conn.execute("SELECT 1").fetchone() == (1,)


@pytest.mark.promise("F22")
async def test_no_claim_takes_from_a_paused_queue_and_nothing_is_lost_by_it(dsn: str, eyes: Eyes) -> None:
    """The claim itself looks: a worker told by NOTIFY only would take on. What it passes over, it comes back to."""
    taker = Taker(dsn, ("mail", "other"))
    try:
        with psycopg.connect(dsn) as conn:
            for number in range(5):
                note.enqueue(conn, number)
            note.using(queue="other").enqueue(conn, 9)
            assert pgqueue.pause(conn, "mail")
        assert [job.queue for job in await taker.fetch()] == ["other"]
        assert await taker.fetch() == []
        with psycopg.connect(dsn) as conn:
            assert pgqueue.resume(conn, "mail")
        assert len(await taker.fetch()) == 5
    finally:
        await taker.close()
    assert eyes.states() == {"running": 6}


@pytest.mark.promise("F23")
async def test_a_pause_not_yet_committed_holds_up_nobody(dsn: str, eyes: Eyes) -> None:
    with psycopg.connect(dsn) as conn, psycopg.connect(dsn) as undecided:
        note.enqueue(conn)
        conn.commit()
        assert pgqueue.pause(undecided, "mail")
        async with work(dsn, note):
            await until(eyes.done(1))
            undecided.rollback()
            assert pgqueue.queues(conn)[0].paused_at is None


@pytest.mark.second
@pytest.mark.promise("F22")
@pytest.mark.parametrize("listen", [True, False])
async def test_a_running_worker_stops_within_a_second_and_goes_on_when_resumed(
    dsn: str, eyes: Eyes, listen: bool
) -> None:
    options: dict[str, Any] = {} if listen else {"listen_dsn": "off", "poll": 0.2}
    with psycopg.connect(dsn, autocommit=True) as conn:
        pgqueue.enqueue_many(conn, [note.new(number) for number in range(1500)])
        async with work(dsn, note, concurrency=2, **options):
            await until(lambda: len(ran) > 20)
            assert pgqueue.pause(conn, "mail")
            at = eyes.one("SELECT paused_at FROM pgqueue.queue")
            await until(lambda: eyes.one("SELECT count(*) = 0 FROM pgqueue.job_running"))
            left = eyes.one("SELECT count(*) FROM pgqueue.job_available")
            assert 0 < left < 1500
            late = eyes.one("SELECT max(extract(epoch FROM started_at - %s)) FROM pgqueue.job_done", at)
            assert late < 1.0
            pgqueue.enqueue(conn, note, -1)  # somebody enqueues: its NOTIFY makes workers look, and not take
            assert eyes.one("SELECT count(*) FROM pgqueue.job_available WHERE queue = 'mail'") == left + 1
            assert pgqueue.resume(conn, "mail")
            await until(lambda: eyes.one("SELECT count(*) = 0 FROM pgqueue.job_available WHERE queue = 'mail'"), 30)
    assert len(set(ran)) == len(ran)


def test_the_commands_say_what_they_did(dsn: str, conn: Conn) -> None:
    assert command("pause", "mail", dsn=dsn).stdout == "queue mail is paused\n"
    assert command("pause", "mail", dsn=dsn).stdout == "queue mail was paused already\n"
    assert "PAUSED" in command("status", dsn=dsn).stdout
    assert command("resume", "mail", dsn=dsn).stdout == "queue mail is open again\n"
    assert command("resume", "mail", dsn=dsn).stdout == "queue mail was not paused\n"
    wrong = command("pause", "a b", dsn=dsn)
    assert (wrong.returncode, "queue 'a b'" in wrong.stderr) == (2, True)


# Cancel --------------------------------------------------------------------------------------------------------------


def answers(found: list[Answer]) -> list[tuple[str, str | None]]:
    return [(answer.did, answer.state) for answer in found]


def put(eyes: Eyes, state: str) -> int:
    """A job in this state, by hand."""
    given = {
        "scheduled": ("run_at", "pgqueue.now() + interval '1 hour'"),
        "blocked": ("key", "'k'"),
        "running": ("worker_id, claim, started_at", "1, 1, pgqueue.now()"),
        "completed": ("finished_at", "pgqueue.now()"),
        "failed": ("finished_at, reason, attempt", "pgqueue.now(), 'error', 3"),
        "cancelled": ("finished_at, reason", "pgqueue.now(), 'why'"),
    }
    names, values = given.get(state, ("priority", "5"))
    sql = (
        f"INSERT INTO pgqueue.job (state, task, args, {names}) VALUES (%s, 't', '{{\"x\": 1}}', {values}) RETURNING id"  # noqa: S608
    )
    found: int = eyes.one(sql, state)
    return found


@pytest.mark.parametrize("state", ["available", "scheduled", "blocked"])
def test_a_waiting_job_is_cancelled_with_the_transaction(conn: Conn, eyes: Eyes, state: str) -> None:
    job = put(eyes, state)
    assert answers(pgqueue.cancel(conn, job, reason="order withdrawn")) == [("cancelled", state)]
    assert eyes.state(job) == state
    conn.rollback()
    assert pgqueue.get(conn, job).state == state
    pgqueue.cancel(conn, job, reason="order withdrawn")
    conn.commit()
    found = pgqueue.get(conn, job)
    assert (found.state, found.reason, found.args, found.finished_at is not None) == (
        "cancelled",
        "order withdrawn",
        {"x": 1},
        True,
    )


def test_each_id_has_its_answer_in_order(conn: Conn, eyes: Eyes) -> None:
    ids = [put(eyes, state) for state in ("running", "completed", "available", "failed", "scheduled", "cancelled")]
    found = pgqueue.cancel(conn, *ids, ids[2])
    assert [answer.id for answer in found] == [*ids, ids[2]]
    assert answers(found) == [
        ("requested", "running"),
        ("ended", "completed"),
        ("cancelled", "available"),
        ("ended", "failed"),
        ("cancelled", "scheduled"),
        ("ended", "cancelled"),
        ("cancelled", "available"),
    ]
    assert conn.execute("SELECT job_id, kind, reason FROM pgqueue.job_signal").fetchall() == [
        (ids[0], "cancel", "cancelled by hand")
    ]
    assert pgqueue.cancel(conn) == []


def test_an_id_without_a_job_is_an_error_after_the_others_were_dealt_with(conn: Conn, eyes: Eyes) -> None:
    job = put(eyes, "available")
    with pytest.raises(pgqueue.JobNotFound, match=r"no job 4711: .*1 other was dealt with") as missing:
        pgqueue.cancel(conn, 4711, job)
    assert missing.value.job_id == 4711
    assert pgqueue.get(conn, job).state == "cancelled"


def test_what_is_no_id_or_no_reason_is_refused_before_it_is_sent(conn: Conn) -> None:
    for wrong in ("1", 0, -1, 1 << 63, True, None, 1.5):
        with pytest.raises(InvalidOption, match="no id of a job"):
            pgqueue.cancel(conn, wrong)  # type: ignore[arg-type]
    for reason in ("", "x" * 501, "a\nb", "a\0b", "\ud800"):
        with pytest.raises(InvalidOption, match="reason"):
            pgqueue.cancel(conn, 1, reason=reason)


async def test_async_connections_cancel(aconn: psycopg.AsyncConnection[Any], eyes: Eyes, dsn: str) -> None:
    job, other = put(eyes, "available"), put(eyes, "scheduled")
    assert answers(await pgqueue.acancel(aconn, job)) == [("cancelled", "available")]
    plain = await asyncpg.connect(dsn)
    assert answers(await pgqueue.acancel(plain, other)) == [("cancelled", "scheduled")]
    with pytest.raises(pgqueue.JobNotFound):
        await pgqueue.acancel(plain, 4711)
    await plain.close()


def test_a_second_row_in_history_does_not_hide_the_job(conn: Conn, eyes: Eyes) -> None:
    job = put(eyes, "failed")
    eyes.do("INSERT INTO pgqueue.job (id, task) VALUES (%s, 't')", job)
    assert answers(pgqueue.cancel(conn, job)) == [("cancelled", "available")]


# Cancel: a job on the move -------------------------------------------------------------------------------------------

PROMOTE = """
    WITH gone AS (DELETE FROM pgqueue.job_scheduled RETURNING id, task)
    INSERT INTO pgqueue.job_available (id, task) SELECT id, task FROM gone
"""
CLAIM = """
    WITH gone AS (DELETE FROM pgqueue.job_available RETURNING id, task)
    INSERT INTO pgqueue.job_running (state, id, task, worker_id, claim, started_at)
    SELECT 'running', id, task, 1, 1, pgqueue.now() FROM gone
"""


def waiting_for_a_lock(eyes: Eyes) -> bool:
    return bool(eyes.one("SELECT count(*) > 0 FROM pg_stat_activity WHERE wait_event_type = 'Lock'"))


@pytest.mark.promise("F25")
@pytest.mark.parametrize(
    ("state", "move", "answer"),
    [("scheduled", PROMOTE, ("cancelled", "available")), ("available", CLAIM, ("requested", "running"))],
)
async def test_a_job_that_moves_while_it_is_cancelled_is_found_where_it_went(
    dsn: str, eyes: Eyes, state: str, move: str, answer: tuple[str, str]
) -> None:
    """One statement alone reports 0 rows here: it waits for the mover, and then the row is gone."""
    job = put(eyes, state)
    with psycopg.connect(dsn) as mover, psycopg.connect(dsn) as conn:
        mover.execute(move.encode())
        cancelling = asyncio.create_task(asyncio.to_thread(pgqueue.cancel, conn, job))
        await until(lambda: waiting_for_a_lock(eyes))
        mover.commit()
        assert answers(await cancelling) == [answer]


@pytest.mark.promise("F25")
async def test_at_repeatable_read_a_move_is_the_drivers_error_and_says_what_to_do(dsn: str, eyes: Eyes) -> None:
    job = put(eyes, "scheduled")
    with psycopg.connect(dsn) as conn:
        conn.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        conn.execute("SELECT 1 FROM pgqueue.job")
        eyes.do(PROMOTE)
        with pytest.raises(psycopg.errors.SerializationFailure) as moved:
            pgqueue.cancel(conn, job)
        assert "try again in a new transaction" in moved.value.__notes__[0]
        conn.rollback()
        conn.execute("SELECT 1 FROM pgqueue.job")
        young = put(eyes, "available")
        with pytest.raises(pgqueue.JobNotFound, match="REPEATABLE READ"):
            pgqueue.cancel(conn, young)


@task(name="operate.moment")
async def moment() -> None:
    await asyncio.sleep(0)


async def race(dsn: str, eyes: Eyes, rounds: int) -> dict[str, int]:
    """Cancel jobs in a tight race with promotion, claim and completion; how often each answer was given."""
    given: dict[int, Answer] = {}

    def cancel() -> None:
        with psycopg.connect(dsn, autocommit=True) as conn:
            for number in range(rounds):
                delay = (None, 0.0005, 0.002, 0.004)[number % 4]
                job = moment.using(delay=delay).enqueue(conn).id
                sleep(random.uniform(0, 0.006))
                [given[job]] = pgqueue.cancel(conn, job)

    async with work(dsn, moment) as worker:
        await asyncio.to_thread(cancel)
        await until(lambda: not set(eyes.states()) - {"completed", "cancelled"}, 30)
        await worker.services.cancellation.settle()
        assert eyes.one("SELECT count(*) FROM pgqueue.job_signal") == 0
    for job, answer in given.items():
        state = eyes.state(job)
        match answer.did:
            case "cancelled":
                assert state == "cancelled", answer
            case "ended":
                assert state == answer.state == "completed", answer
            case did:
                assert did == "requested", answer
    return Counter(answer.did for answer in given.values())


@pytest.mark.second
@pytest.mark.promise("F25")
async def test_a_cancel_in_a_race_is_done_or_says_why(dsn: str, eyes: Eyes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cancellation, "LOOK_SECONDS", 0.2)
    seen = await race(dsn, eyes, 400)
    assert {"cancelled", "ended"} <= seen.keys()


@pytest.mark.long
@pytest.mark.promise("F25")
async def test_ten_thousand_cancels_in_a_race(dsn: str, eyes: Eyes, record_property: Any) -> None:
    seen = await race(dsn, eyes, 10_000)
    record_property("answers", dict(seen))
    assert seen.keys() == {"cancelled", "ended", "requested"}


@pytest.mark.promise("F23")
async def test_an_open_transaction_that_cancelled_delays_nobody_else(dsn: str, eyes: Eyes) -> None:
    held = asyncio.Event()

    @task(name="operate.held")
    async def hold(job: pgqueue.Job) -> None:
        begins(job)
        await held.wait()

    with psycopg.connect(dsn) as conn, psycopg.connect(dsn, autocommit=True) as others:
        running = hold.enqueue(others).id
        async with work(dsn, hold, moment, queues=["default"]):
            await begun(running)
            later = moment.using(delay=60).enqueue(others).id
            pgqueue.pause(others, "default")
            waiting = moment.enqueue(others).id
            assert [answer.did for answer in pgqueue.cancel(conn, running, later, waiting)] == [
                "requested",
                "cancelled",
                "cancelled",
            ]
            pgqueue.resume(others, "default")
            due = moment.using(delay=0.01).enqueue(others).id
            now = moment.enqueue(others).id
            held.set()
            await until(lambda: {eyes.state(job) for job in (running, due, now)} == {"completed"}, 30)
            assert [eyes.state(later), eyes.state(waiting)] == ["scheduled", "available"]
            conn.commit()
            assert [eyes.state(later), eyes.state(waiting)] == ["cancelled", "cancelled"]


# Retry ---------------------------------------------------------------------------------------------------------------


@task(name="operate.fails", retry=1)
async def failing() -> None:
    await asyncio.sleep(0)
    raise ValueError("each time")


async def retry_race(dsn: str, eyes: Eyes, rounds: int) -> dict[str, int]:
    """Retry jobs in a tight race with promotion, claim and their failure; how often each answer was given."""
    given: dict[int, Answer] = {}

    def retry() -> None:
        with psycopg.connect(dsn, autocommit=True) as conn:
            for number in range(rounds):
                job = failing.using(delay=(None, 0.0005, 0.002, 0.004)[number % 4]).enqueue(conn).id
                sleep(random.uniform(0, 0.012))
                [given[job]] = pgqueue.retry(conn, job)

    async with work(dsn, failing):
        await asyncio.to_thread(retry)
        await until(lambda: set(eyes.states()) == {"failed"}, 30)
    ran = dict(eyes.all("SELECT job_id, count(*) FROM pgqueue.attempt GROUP BY job_id"))
    for job, answer in given.items():
        assert answer.did in ("retried", "alive"), answer
        assert answer.state in (("failed",) if answer.did == "retried" else ("scheduled", "available", "running"))
        assert ran[job] == (2 if answer.did == "retried" else 1), answer
    return Counter(answer.did for answer in given.values())


@pytest.mark.second
@pytest.mark.promise("F25")
@pytest.mark.parametrize("rounds", [400, pytest.param(10_000, marks=pytest.mark.long)])
async def test_a_retry_in_a_race_is_done_or_says_why(dsn: str, eyes: Eyes, rounds: int) -> None:
    assert (await retry_race(dsn, eyes, rounds)).keys() == {"retried", "alive"}


def test_retry_is_the_function_though_a_module_has_its_name() -> None:
    import pgqueue.worker.worker

    assert pgqueue.retry is actions.retry


@pytest.mark.parametrize("state", ["failed", "cancelled"])
def test_a_dead_job_is_available_again_at_the_end_of_its_lane(conn: Conn, eyes: Eyes, state: str) -> None:
    job = put(eyes, state)
    eyes.do(
        "WITH gone AS (DELETE FROM pgqueue.job_dead RETURNING *) "
        "INSERT INTO pgqueue.job (state, id, task, queue, priority, rank, args, headers, enqueued_at, attempt, "
        "max_attempts, crashes, snoozes, deadline, reason, finished_at) "
        "SELECT state, id, task, 'mail', 2, -1, args, '{\"h\": 1}', enqueued_at, 3, 3, 2, 4, '2020-01-01Z', reason, "
        "finished_at FROM gone"
    )
    before = eyes.one("INSERT INTO pgqueue.job (task, queue, priority, rank) VALUES ('t', 'mail', 2, 5) RETURNING pos")
    pgqueue.cancel(eyes.conn, job)
    assert answers(pgqueue.retry(conn, job)) == [("retried", state)]
    assert eyes.state(job) == state
    conn.commit()
    found = pgqueue.get(conn, job)
    assert (found.state, found.queue, found.priority, found.args, found.headers) == (
        "available",
        "mail",
        2,
        {"x": 1},
        {"h": 1},
    )
    assert (found.attempt, found.max_attempts, found.crashes, found.snoozes, found.reason, found.deadline) == (
        3,
        4,
        0,
        4,
        None,
        None,
    )
    assert eyes.one("SELECT rank = 5 AND pos > %s FROM pgqueue.job_available WHERE id = %s", before, job)


async def test_a_retried_job_runs_though_its_attempts_were_spent(dsn: str, eyes: Eyes) -> None:
    fails = [True]

    @task(name="operate.flaky", retry=1)
    async def flaky() -> str:
        if fails:
            raise ValueError("not yet")
        return "done"

    with psycopg.connect(dsn, autocommit=True) as conn:
        job = flaky.enqueue(conn).id
        async with work(dsn, flaky):
            await until(eyes.is_in(job, "failed"))
            fails.clear()
            pgqueue.retry(conn, job)
            await until(eyes.is_in(job, "completed"))
        assert pgqueue.get(conn, job).attempt == 2


def test_a_request_to_its_last_run_does_not_cancel_a_retried_job(conn: Conn, eyes: Eyes) -> None:
    job = put(eyes, "failed")
    ask = "INSERT INTO pgqueue.job_signal (job_id, enqueued_at, kind, reason) SELECT id, enqueued_at, 'cancel', 'r' "
    eyes.do(ask + "FROM pgqueue.job WHERE id = %s", job)
    pgqueue.retry(conn, job)
    assert conn.execute("SELECT count(*) FROM pgqueue.job_signal").fetchone() == (0,)


def test_a_completed_job_is_done_again_only_if_asked_and_as_a_new_one(conn: Conn, eyes: Eyes) -> None:
    job = put(eyes, "completed")
    assert answers(pgqueue.retry(conn, job)) == [("completed", "completed")]
    [answer] = pgqueue.retry(conn, job, again=True)
    assert (answer.did, answer.new is not None and answer.new > job) == ("again", True)
    new = pgqueue.get(conn, answer.new or 0)
    assert (new.state, new.task, new.args, new.headers, new.attempt) == (
        "available",
        "t",
        {"x": 1},
        {"retry_of": job},
        0,
    )
    assert pgqueue.get(conn, job).state == "completed"


def test_what_lives_is_not_started_a_second_time(conn: Conn, eyes: Eyes) -> None:
    ids = [put(eyes, state) for state in ("available", "scheduled", "blocked", "running", "failed")]
    put_aside = put(eyes, "failed")
    eyes.do(
        "INSERT INTO pgqueue.job (id, task, state, worker_id, claim, started_at) "
        "VALUES (%s, 't', 'running', 1, 1, now())",
        put_aside,
    )
    with pytest.raises(pgqueue.JobNotFound, match="no job 4711"):
        pgqueue.retry(conn, 4711)
    assert answers(pgqueue.retry(conn, *ids, put_aside, again=True)) == [
        ("alive", "available"),
        ("alive", "scheduled"),
        ("alive", "blocked"),
        ("alive", "running"),
        ("retried", "failed"),
        ("alive", "running"),
    ]


def test_what_never_stands_still_is_an_error_and_not_a_silent_nothing(
    conn: Conn, eyes: Eyes, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, dead = put(eyes, "available"), put(eyes, "failed")
    monkeypatch.setattr(actions, "ROUNDS", 1)
    assert answers(pgqueue.cancel(conn, job)) == [("cancelled", "available")]
    assert answers(pgqueue.retry(conn, dead)) == [("retried", "failed")]
    for asking, state in (
        (actions.cancelling([7], "r", actions.By()), "available"),
        (actions.retrying([7], False, actions.By()), "failed"),
    ):
        next(asking)
        with pytest.raises(pgqueue.Error, match="jobs 7 changed their state") as restless:
            asking.send([(7, state, None, None, 0)])
        assert restless.value.job_id == 7


async def test_async_connections_retry(aconn: psycopg.AsyncConnection[Any], eyes: Eyes) -> None:
    assert answers(await pgqueue.aretry(aconn, put(eyes, "failed"))) == [("retried", "failed")]


@pytest.mark.promise("F25")
async def test_of_two_who_retry_a_job_one_does_and_the_other_is_told(dsn: str, eyes: Eyes) -> None:
    """The second waits for the first; one statement alone finds 0 rows then."""
    job = put(eyes, "failed")
    with psycopg.connect(dsn) as first, psycopg.connect(dsn) as second:
        assert answers(pgqueue.retry(first, job)) == [("retried", "failed")]
        other = asyncio.create_task(asyncio.to_thread(pgqueue.retry, second, job))
        await until(lambda: waiting_for_a_lock(eyes))
        first.commit()
        assert answers(await other) == [("alive", "available")]
    assert eyes.one("SELECT count(*) FROM pgqueue.job WHERE id = %s", job) == 1


@pytest.mark.second
@pytest.mark.promise("F25")
async def test_cancel_and_retry_in_a_race_leave_one_job(dsn: str, eyes: Eyes) -> None:
    job = put(eyes, "available")
    seen: Counter[str] = Counter()

    def turn(change: Any) -> None:
        with psycopg.connect(dsn, autocommit=True) as conn:
            for _ in range(150):
                seen[change(conn, job)[0].did] += 1

    await asyncio.gather(*(asyncio.to_thread(turn, change) for change in (pgqueue.cancel, pgqueue.retry) * 2))
    assert eyes.one("SELECT count(*) FROM pgqueue.job WHERE id = %s", job) == 1
    assert abs(seen["cancelled"] - seen["retried"]) <= 1
    assert set(seen) <= {"cancelled", "ended", "retried", "alive"}


# Discard -------------------------------------------------------------------------------------------------------------

BESIDE = """
    INSERT INTO pgqueue.attempt (job_id, enqueued_at, claim, attempt, outcome, worker_id, message, bin, started_at,
        finished_at)
    SELECT id, enqueued_at, 1, n, 'failed', 1, 'secret', n, pgqueue.now(), pgqueue.now()
    FROM pgqueue.job CROSS JOIN generate_series(0, 1) AS n WHERE id = %(id)s;
    INSERT INTO pgqueue.job_cursor (job_id, enqueued_at, n, cursor)
    SELECT id, enqueued_at, 1, '"secret"' FROM pgqueue.job WHERE id = %(id)s;
    INSERT INTO pgqueue.job_progress (job_id, done) VALUES (%(id)s, 1);
    INSERT INTO pgqueue.job_signal (job_id, enqueued_at, kind, reason)
    SELECT id, enqueued_at, 'cancel', 'secret' FROM pgqueue.job WHERE id = %(id)s;
"""
LEFT = """
    SELECT (SELECT count(*) FROM pgqueue.job), (SELECT count(*) FROM pgqueue.attempt),
           (SELECT count(*) FROM pgqueue.job_cursor), (SELECT count(*) FROM pgqueue.job_progress),
           (SELECT count(*) FROM pgqueue.job_signal)
"""


def beside(eyes: Eyes, id: int) -> None:
    """Rows that name the job in every table that has some."""
    for statement in BESIDE.split(";")[:-1]:
        eyes.do(statement % {"id": id})


def end(eyes: Eyes, job: int, state: str, ago: str = "0 s") -> None:
    """Let a job that waits end in this state, by hand."""
    table, reason = ("job_done", "NULL") if state == "completed" else ("job_dead", "'error'")
    columns = "id, enqueued_at, queue, task, args, unique_key, idempotency_key"
    eyes.do(
        f"WITH gone AS (DELETE FROM pgqueue.job_available WHERE id = {job} RETURNING {columns}) "  # noqa: S608
        f"INSERT INTO pgqueue.{table} (state, reason, finished_at, {columns}) "
        f"SELECT '{state}', {reason}, pgqueue.now() - interval '{ago}', {columns} FROM gone"
    )


@pytest.mark.promise("F68")
@pytest.mark.parametrize("state", ["completed", "failed", "cancelled"])
def test_a_discarded_job_is_gone_with_all_that_names_it(conn: Conn, eyes: Eyes, state: str) -> None:
    other, job = put(eyes, state), put(eyes, state)
    beside(eyes, other)
    [before] = eyes.all(LEFT)
    beside(eyes, job)
    assert answers(pgqueue.discard(conn, job)) == [("discarded", state)]
    conn.commit()
    assert eyes.all(LEFT) == [(1, *before[1:])]
    assert pgqueue.get(conn, other).state == state
    with pytest.raises(pgqueue.JobNotFound):
        pgqueue.discard(conn, job)
    conn.rollback()


@pytest.mark.promise("F68")
@pytest.mark.parametrize("state", ["available", "scheduled", "blocked", "running"])
def test_a_job_that_lives_is_not_discarded(conn: Conn, eyes: Eyes, state: str) -> None:
    job = put(eyes, state)
    beside(eyes, job)
    [before] = eyes.all(LEFT)
    assert answers(pgqueue.discard(conn, job)) == [("alive", state)]
    conn.commit()
    assert eyes.all(LEFT) == [before]


@pytest.mark.promise("F68")
def test_of_an_id_that_stands_twice_both_are_discarded_or_none(conn: Conn, eyes: Eyes) -> None:
    twice, lives = put(eyes, "completed"), put(eyes, "completed")
    eyes.do(
        "INSERT INTO pgqueue.job_dead (id, state, task, finished_at, reason) VALUES (%s, 'failed', 't', now(), 'x')",
        twice,
    )
    eyes.do("INSERT INTO pgqueue.job (id, task) VALUES (%s, 't')", lives)
    assert [each.did for each in pgqueue.discard(conn, twice, lives)] == ["discarded", "alive"]
    conn.commit()
    assert eyes.states() == {"available": 1, "completed": 1}


@pytest.mark.promise("F69")
@pytest.mark.parametrize("noted", [False, True], ids=["", "noted"])
@pytest.mark.parametrize("state", ["completed", "failed"])
def test_a_key_that_holds_answers_after_its_job_was_discarded(conn: Conn, eyes: Eyes, state: str, noted: bool) -> None:
    """The naive version deletes the row of the job alone: the same request is a new job then."""
    request = note.using(idempotency_key="order-7")
    job = request.enqueue(conn, 7)
    conn.commit()
    end(eyes, job.id, state, "1 h")
    until = eyes.one("SELECT finished_at + interval '1 day' FROM pgqueue.job WHERE id = %s", job.id)
    if noted:
        eyes.do("UPDATE pgqueue.unique_key SET expires_at = %s", until)
    assert answers(pgqueue.discard(conn, job.id)) == [("discarded", state)]
    conn.commit()
    assert eyes.one("SELECT expires_at FROM pgqueue.discarded_key") == until
    again = request.enqueue(conn, 7)
    [many] = pgqueue.enqueue_many(conn, [request.new(7)])
    [[by_sql]] = conn.execute("SELECT pgqueue.enqueue('operate.note', idempotency_key => 'order-7')").fetchall()
    assert (again.id, again.created, many.id, many.created, by_sql) == (job.id, False, job.id, False, job.id)
    conn.commit()
    eyes.do("UPDATE pgqueue.discarded_key SET expires_at = pgqueue.now()")
    assert request.enqueue(conn, 7).created


@pytest.mark.promise("F69")
def test_a_key_that_holds_no_more_goes_with_its_job(conn: Conn, eyes: Eyes) -> None:
    """One that was held while the job lived, and one that has expired; the key of another job stays."""
    job = note.using(unique=pgqueue.Unique(lambda number: f"note:{number}")).enqueue(conn, 7)
    old = note.using(idempotency_key="old").enqueue(conn, 7)
    conn.commit()
    end(eyes, job.id, "failed")
    end(eyes, old.id, "completed", "2 days")
    other = note.using(unique=pgqueue.Unique(lambda number: f"note:{number}")).enqueue(conn, 8)
    pgqueue.discard(conn, job.id, old.id)
    conn.commit()
    assert eyes.all("SELECT key FROM pgqueue.unique_key") == [("unique:note:8",)]
    assert pgqueue.get(conn, other.id).state == "available"
    conn.rollback()


@pytest.mark.promise("F69")
def test_a_key_that_another_job_took_meanwhile_is_left_to_it(conn: Conn, eyes: Eyes) -> None:
    first = note.using(unique=pgqueue.Unique(lambda number: f"note:{number}")).enqueue(conn, 7)
    conn.commit()
    end(eyes, first.id, "failed")
    second = note.using(unique=pgqueue.Unique(lambda number: f"note:{number}")).enqueue(conn, 7)
    pgqueue.discard(conn, first.id)
    conn.commit()
    again = note.using(unique=pgqueue.Unique(lambda number: f"note:{number}")).enqueue(conn, 7)
    assert (second.created, again.created, again.id) == (True, False, second.id)


@pytest.mark.promise("F68")
def test_a_job_that_is_just_being_retried_is_not_discarded(dsn: str, eyes: Eyes) -> None:
    """The discard waits for the retry, and finds the job where it went."""
    job = put(eyes, "failed")
    with psycopg.connect(dsn) as retrying, ThreadPoolExecutor(1) as pool:
        pgqueue.retry(retrying, job)

        def discard() -> list[Answer]:
            with psycopg.connect(dsn) as conn:
                return pgqueue.discard(conn, job)

        discarded = pool.submit(discard)
        while not eyes.one("SELECT count(*) FROM pg_locks WHERE NOT granted"):
            assert not discarded.done()
            sleep(0.01)
        retrying.commit()
        assert answers(discarded.result(30)) == [("alive", "available")]
    assert eyes.states() == {"available": 1}


async def test_async_connections_discard(aconn: psycopg.AsyncConnection[Any], eyes: Eyes) -> None:
    failed, completed = put(eyes, "failed"), put(eyes, "completed")
    assert answers(await pgqueue.adiscard(aconn, failed)) == [("discarded", "failed")]
    assert answers(await pgqueue.adiscard(aconn, state="completed")) == [("discarded", "completed")]
    await aconn.commit()
    assert completed and eyes.states() == {}


def test_discard_takes_all_that_fit_and_no_other(conn: Conn, eyes: Eyes) -> None:
    for ago in ("1 hour", "3 hours", "2 days"):
        eyes.do(
            "INSERT INTO pgqueue.job_done (state, task, queue, finished_at) "
            "VALUES ('completed', 't', 'mail', pgqueue.now() - %s::interval)",
            ago,
        )
    waiting, failed = put(eyes, "available"), put(eyes, "failed")
    assert pgqueue.discard(conn, queue="mail", older_than=timedelta(days=3)) == []
    assert len(pgqueue.discard(conn, task="t", older_than=7200, limit=1)) == 1
    assert len(pgqueue.discard(conn, older_than=7200)) == 1
    assert [each.id for each in pgqueue.discard(conn, state="failed", task="t")] == [failed]
    assert len(pgqueue.discard(conn, queue="mail")) == 1
    conn.commit()
    assert eyes.states() == {"available": 1} and waiting
    for wrong in ({"state": "available"}, {"limit": 3}, {"older_than": -1}, {"older_than": None}):
        with pytest.raises(InvalidOption):
            pgqueue.discard(conn, **wrong)


def test_the_command_discards_by_id_and_by_filter(dsn: str, eyes: Eyes) -> None:
    job, lives = put(eyes, "failed"), put(eyes, "available")
    done = command("discard", str(job), str(lives), dsn=dsn)
    said = [f"job {job} discarded", f"job {lives} has not ended: available"]
    assert (done.returncode, done.stdout.splitlines()) == (1, said)
    put(eyes, "completed")
    assert command("discard", "--older-than", "1h", "--yes", dsn=dsn).stdout == "No job fits.\n"
    asked = command("discard", "--task", "t", "--older-than", "0", dsn=dsn, stdin="n\n")
    assert (asked.returncode, "Discard 1 job of task t that ended more than 0ms ago" in asked.stderr) == (1, True)
    assert command("discard", "--task", "t", "--yes", dsn=dsn).stdout == "1 discarded\n"
    assert eyes.states() == {"available": 1}
    assert command("discard", dsn=dsn).returncode == 2


@pytest.mark.promise("F75")
@pytest.mark.parametrize("change", [pgqueue.cancel, pgqueue.retry, pgqueue.discard])
def test_a_call_without_its_connection_is_refused(change: Any) -> None:
    """`cancel(job.id)` cancelled nothing, and answered [] as if all was done."""
    for wrong in (7, None):
        with pytest.raises(pgqueue.UnsupportedConnection):
            change(wrong)


@pytest.mark.promise("F75")
async def test_an_async_call_without_its_connection_is_refused() -> None:
    for change in (pgqueue.acancel, pgqueue.aretry, pgqueue.adiscard):
        with pytest.raises(pgqueue.UnsupportedConnection):
            await change(7)


# The commands --------------------------------------------------------------------------------------------------------


def test_retry_by_id_and_by_filter(dsn: str, eyes: Eyes) -> None:
    failed, completed = put(eyes, "failed"), put(eyes, "completed")
    done = command("retry", str(failed), dsn=dsn)
    assert (done.returncode, done.stdout) == (0, f"job {failed} is available again\n")
    refused = command("retry", str(completed), dsn=dsn)
    assert (refused.returncode, "--again" in refused.stdout) == (1, True)
    again = command("retry", str(completed), "--again", "--json", dsn=dsn)
    [answer] = items(again)
    assert (again.returncode, answer["did"], eyes.state(answer["new"])) == (0, "again", "available")
    for _ in range(3):
        put(eyes, "failed")
    put(eyes, "cancelled")
    assert command("retry", "--task", "t", dsn=dsn, stdin="n\n").returncode == 1
    assert command("retry", "--task", "t", "--state", "failed", "--yes", dsn=dsn).stdout == "3 retried\n"
    assert eyes.states()["cancelled"] == 1
    assert command("retry", "--state", "completed", "--yes", dsn=dsn).returncode == 2
    assert command("retry", "--state", "failed", "--state", "completed", "--yes", dsn=dsn).returncode == 2
    put(eyes, "failed")
    assert command("retry", "--state", "failed", "--state", "cancelled", "--yes", dsn=dsn).stdout == "2 retried\n"


def test_cancel_says_what_became_of_each_id(dsn: str, eyes: Eyes) -> None:
    waiting, running, ended = put(eyes, "available"), put(eyes, "running"), put(eyes, "completed")
    done = command("cancel", str(waiting), str(running), dsn=dsn)
    assert (done.returncode, done.stdout.splitlines()) == (
        0,
        [f"job {waiting} cancelled", f"job {running} runs; its worker was asked to stop it"],
    )
    refused = command("cancel", str(ended), "4711", "--json", dsn=dsn)
    assert (refused.returncode, items(refused)) == (
        1,
        [
            {"id": ended, "did": "ended", "state": "completed", "new": None, "holder": None},
            {"id": 4711, "did": "missing", "state": None, "new": None, "holder": None},
        ],
    )


def test_cancel_by_filter_asks_first(dsn: str, eyes: Eyes) -> None:
    eyes.do("INSERT INTO pgqueue.job (task, queue) SELECT 't', 'q' || g % 2 FROM generate_series(1, 2500) g")
    put(eyes, "scheduled")
    asked = command("cancel", "--task", "t", "--queue", "q1", dsn=dsn, stdin="n\n")
    assert (asked.returncode, "Cancel 1,250 jobs of task t in queue q1" in asked.stderr) == (1, True)
    assert command("cancel", "--task", "t", dsn=dsn, stdin="").returncode == 1
    assert eyes.states() == {"available": 2500, "scheduled": 1}
    agreed = command("cancel", "--task", "t", "--queue", "q1", dsn=dsn, stdin="y\n")
    assert (agreed.returncode, agreed.stdout) == (0, "1,250 cancelled\n")
    assert command("cancel", "--state", "available", "--yes", dsn=dsn).stdout == "1,250 cancelled\n"
    assert eyes.states() == {"cancelled": 2500, "scheduled": 1}
    none = command("cancel", "--queue", "nowhere", "--yes", dsn=dsn)
    assert (none.returncode, none.stdout) == (0, "No job fits.\n")


@pytest.mark.parametrize(
    "arguments",
    [[], ["1", "--task", "t"], ["0"], ["x"], ["--state", "completed"], ["--queue", "a b"], ["--task", "x" * 201]],
    ids=str,
)
def test_cancel_needs_ids_or_a_filter(dsn: str, arguments: list[str]) -> None:
    assert command("cancel", *arguments, dsn=dsn).returncode == 2


@pytest.mark.promise("F111")
def test_a_command_with_a_filter_waits_for_a_job_and_answers_for_each(dsn: str, conn: Conn, eyes: Eyes) -> None:
    """An operation would leave the job out as locked, and neither its answer nor the record would name each job."""
    ids = [handle.id for handle in pgqueue.enqueue_many(conn, [note.new(number) for number in range(1_002)])]
    conn.commit()
    with psycopg.connect(dsn) as app, ThreadPoolExecutor() as threads:
        app.execute("SELECT FROM pgqueue.job WHERE id = %s FOR UPDATE", [ids[1]])
        cancelled = threads.submit(lambda: command("cancel", "--queue", "mail", "--yes", "--json", dsn=dsn))
        wait_until(lambda: eyes.one("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'") == 1)
        app.rollback()
        done = cancelled.result(60)
    told = [(each["id"], each["did"], each["state"]) for each in items(done)]
    assert (done.returncode, told) == (0, [(id, "cancelled", "available") for id in ids])
    for id in (ids[1], ids[-1]):
        [entry] = pgqueue.audit(conn, job=id)
        assert (entry.action, entry.target["queue"]) == ("cancel", "mail")


# By filter -----------------------------------------------------------------------------------------------------------


def test_a_filter_looks_beyond_one_piece(conn: Conn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filters, "WALKED_MOST", 10)
    conn.execute(
        "INSERT INTO pgqueue.job (task) SELECT CASE g % 40 WHEN 39 THEN 'b' ELSE 'a' END FROM generate_series(1, 80) g"
    )
    found = steps.drive(conn, filters.finding(filters.Filter(("available", "failed"), task="b")))
    assert len(found) == 2
    assert steps.drive(conn, filters.finding(filters.Filter(("available",), task="b", limit=1))) == found[:1]


@pytest.mark.promise("F113")
def test_a_filter_takes_the_jobs_that_wait_for_another_attempt(conn: Conn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filters, "WALKED_MOST", 3)
    conn.execute(
        "INSERT INTO pgqueue.job (id, task, queue, state, run_at, attempt, crashes, snoozes) "
        "SELECT g, 't', CASE WHEN g > 8 THEN 'other' ELSE 'q' END, 'scheduled', now() + interval '1 h', "
        "CASE mod(g, 4) WHEN 1 THEN 2 ELSE 0 END, CASE mod(g, 4) WHEN 2 THEN 1 ELSE 0 END, "
        "CASE mod(g, 4) WHEN 3 THEN 1 ELSE 0 END "
        "FROM generate_series(1, 12) AS g"
    )
    conn.execute("INSERT INTO pgqueue.job (id, task, queue, attempt) VALUES (20, 't', 'q', 1)")
    assert [each.id for each in pgqueue.cancel(conn, state="retrying", queue="q")] == [1, 2, 5, 6]
    assert [each.id for each in pgqueue.cancel(conn, state=["retrying", "available"], limit=2)] == [9, 10]
    left = conn.execute("SELECT id FROM pgqueue.job WHERE state <> 'cancelled' ORDER BY id").fetchall()
    assert [id for (id,) in left] == [3, 4, 7, 8, 11, 12, 20]
    assert [each.id for each in pgqueue.cancel(conn, state=["retrying", "scheduled"])] == [3, 4, 7, 8, 11, 12]


def test_a_filter_takes_several_states(conn: Conn, eyes: Eyes) -> None:
    waits, blocked, later = put(eyes, "available"), put(eyes, "blocked"), put(eyes, "scheduled")
    assert [each.id for each in pgqueue.cancel(conn, state=["blocked", "available"], task="t")] == [waits, blocked]
    assert pgqueue.get(conn, later).state == "scheduled"
    for wrong in ([], ["available", "failed"]):
        with pytest.raises(InvalidOption, match="state"):
            pgqueue.cancel(conn, state=wrong, task="t")


def test_cancel_takes_all_that_fit_and_no_other(conn: Conn, eyes: Eyes) -> None:
    eyes.do("INSERT INTO pgqueue.job (task, queue) SELECT 't' || g % 2, 'q' || g % 3 FROM generate_series(1, 60) g")
    later, running, failed = put(eyes, "scheduled"), put(eyes, "running"), put(eyes, "failed")
    found = pgqueue.cancel(conn, queue="q1", task="t0", reason="closed")
    assert (len(found), {answer.did for answer in found}) == (10, {"cancelled"})
    assert [answer.id for answer in found] == sorted(answer.id for answer in found)
    assert {pgqueue.get(conn, answer.id).reason for answer in found} == {"closed"}
    assert pgqueue.cancel(conn, queue="q1", task="t0") == []
    assert answers(pgqueue.cancel(conn, state="scheduled")) == [("cancelled", "scheduled")]
    assert [(each.id, each.did) for each in pgqueue.cancel(conn, task="t")] == [(running, "requested")]
    assert len(pgqueue.cancel(conn, queue="q2", task=None, limit=7)) == 7
    assert len(pgqueue.cancel(conn, queue="q2", limit=None)) == 13
    assert pgqueue.get(conn, later).state == "cancelled"
    assert pgqueue.get(conn, failed).state == "failed"
    conn.rollback()
    assert eyes.states() == {"available": 60, "scheduled": 1, "running": 1, "failed": 1}


def test_retry_takes_the_dead_that_fit_and_completed_ones_only_if_they_are_named(conn: Conn, eyes: Eyes) -> None:
    ids = [put(eyes, state) for state in ("failed", "cancelled", "failed", "completed")]
    put(eyes, "available")
    assert [answer.id for answer in pgqueue.retry(conn, state="failed", limit=1)] == ids[:1]
    assert [answer.id for answer in pgqueue.retry(conn, task="t", again=True)] == ids[1:3]
    assert pgqueue.retry(conn, task="t") == []
    [again] = pgqueue.retry(conn, state="completed", task="t", again=True)
    assert (again.id, again.did, pgqueue.get(conn, again.new or 0).state) == (ids[3], "again", "available")


async def test_a_completed_job_that_is_done_again_is_not_chased(dsn: str, eyes: Eyes) -> None:
    """The new job has completed before the walk is over; found then, it would be done again, and so on for ever."""
    with psycopg.connect(dsn, autocommit=True) as conn:
        pgqueue.enqueue_many(conn, [note.new(number) for number in range(30)])
        async with work(dsn, note):
            await until(eyes.done(30))
            again = await asyncio.to_thread(pgqueue.retry, conn, state="completed", queue="mail", again=True)
            await until(eyes.done(60))
    assert len(again) == 30
    assert eyes.states() == {"completed": 60}


async def test_a_job_that_is_done_again_keeps_its_lock_as_it_was(dsn: str, eyes: Eyes) -> None:
    """How many of the key may run, and what becomes of it where they do; completed, skipped, or dead and retried."""
    columns = "lock_key, lock_limit, on_locked, limit_key, rate_key"
    kept = ("k", 3, "once", "few", "slow")
    insert = f"INSERT INTO pgqueue.job (task, {columns}) VALUES ('operate.note', %s, %s, %s, %s, %s) RETURNING id"  # noqa: S608
    eyes.do("INSERT INTO pgqueue.key_limit (name, n, set_at) VALUES ('few', 9, now())")
    eyes.do("INSERT INTO pgqueue.key_rate (name, count, period, set_at) VALUES ('slow', 1000, 1, now())")
    async with work(dsn, note, queues=["default"]):
        done = eyes.one(insert, *kept)
        await until(eyes.done(1))
    holder = (
        "INSERT INTO pgqueue.job (state, task, holds, lock_key, run_at) VALUES ('scheduled', 'x', true, %s, '2999-1-1')"
    )
    eyes.do(holder, "skips")
    async with work(dsn, note, queues=["default"]):
        skipped = eyes.one(insert, "skips", 1, "skip", None, None)
        await until(eyes.is_in(skipped, "skipped"))
    for old, expected in ((done, kept), (skipped, ("skips", 1, "skip", None, None))):
        [answer] = pgqueue.retry(eyes.conn, old, again=True)
        found = eyes.all(f"SELECT {columns} FROM pgqueue.job WHERE id = %s", answer.new)  # noqa: S608
        assert found == [expected], answer


def test_many_jobs_are_changed_in_batches_each_its_own_statement(
    dsn: str, eyes: Eyes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In autocommit mode each is a transaction, so nobody waits for more than one of them; else all are one."""
    monkeypatch.setattr(actions, "BATCH", 10)
    eyes.do("INSERT INTO pgqueue.job (task) SELECT 't' FROM generate_series(1, 25)")
    ends = "SELECT count(DISTINCT xmin::text) FROM pgqueue.job_dead"
    with psycopg.connect(dsn, autocommit=True) as conn:
        assert len(pgqueue.cancel(conn, task="t")) == 25
        assert eyes.one(ends) == 3
        back = pgqueue.retry(conn, *[id for (id,) in eyes.all("SELECT id FROM pgqueue.job_dead ORDER BY id DESC")])
        assert [answer.id for answer in back] == sorted((answer.id for answer in back), reverse=True)
    with psycopg.connect(dsn) as conn:
        assert len(pgqueue.cancel(conn, task="t")) == 25
    assert eyes.one(ends) == 1


@pytest.mark.parametrize("change", [pgqueue.cancel, pgqueue.retry])
@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"queue": None}, "would choose all jobs"),
        ({"limit": 5}, "would choose all jobs"),
        ({"state": None, "task": None}, "would choose all jobs"),
        ({"state": "pending"}, "state 'pending': use one of"),
        ({"state": 7}, "state 7: use one or more of"),
        ({"queue": "a b"}, "queue"),
        ({"queue": ""}, "queue"),
        ({"task": note}, "give its name"),
        ({"task": "t", "limit": 0}, "limit 0"),
        ({"task": "t", "limit": True}, "limit True"),
        ({"task": "t", "limit": "5"}, "limit '5'"),
    ],
)
def test_a_filter_that_says_nothing_or_nonsense_is_refused(conn: Conn, change: Any, wrong: Any, why: str) -> None:
    pgqueue.enqueue(conn, "t")
    with pytest.raises(InvalidOption, match=why):
        change(conn, **wrong)
    with pytest.raises(InvalidOption, match="not both"):
        change(conn, 1, queue="mail")
    assert change(conn) == []
    assert pgqueue.find(conn, state="available")


def test_what_cannot_be_retried_or_cancelled_is_no_state_of_a_filter(conn: Conn) -> None:
    for change, state in ((pgqueue.cancel, "failed"), (pgqueue.cancel, "completed"), (pgqueue.retry, "available")):
        with pytest.raises(InvalidOption, match=f"state '{state}': use one of"):
            change(conn, state=state)
    for state in ("completed", "skipped"):
        with pytest.raises(InvalidOption, match="again=True only"):
            pgqueue.retry(conn, state=state)


async def test_async_connections_take_filters(aconn: psycopg.AsyncConnection[Any], eyes: Eyes, dsn: str) -> None:
    job = put(eyes, "available")
    assert answers(await pgqueue.acancel(aconn, task="t", limit=3)) == [("cancelled", "available")]
    await aconn.commit()
    plain = await asyncpg.connect(dsn)
    assert [answer.id for answer in await pgqueue.aretry(plain, state="cancelled")] == [job]
    with pytest.raises(InvalidOption, match="all jobs"):
        await pgqueue.aretry(plain, queue=None)
    await plain.close()


def test_the_commands_take_the_oldest_so_many(dsn: str, eyes: Eyes) -> None:
    eyes.do("INSERT INTO pgqueue.job (task) SELECT 't' FROM generate_series(1, 9)")
    assert command("cancel", "--task", "t", "--limit", "4", "--yes", dsn=dsn).stdout == "4 cancelled\n"
    assert eyes.all("SELECT max(id) FROM pgqueue.job_dead") == [(4,)]
    assert command("retry", "--state", "cancelled", "--limit", "1", "--yes", dsn=dsn).stdout == "1 retried\n"
    for wrong in (["--limit", "4"], ["1", "--limit", "4"], ["--task", "t", "--limit", "0"]):
        assert command("cancel", *wrong, "--yes", dsn=dsn).returncode == 2


REPLACED = {
    "another queue": ("sms", "operate.kept"),
    "another task": ("mail", "operate.other"),
    "the same": ("mail", "operate.kept"),
}


@pytest.mark.promise("F25")
@pytest.mark.parametrize("compares", [True, False], ids=["compares", "naive"])
@pytest.mark.parametrize("becomes", REPLACED)
def test_a_cancel_by_filter_leaves_a_job_that_became_another_one(
    becomes: str, compares: bool, dsn: str, conn: Conn, eyes: Eyes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for the enqueue that replaces the job, which keeps its id. The naive version goes by that alone."""
    if not compares:
        monkeypatch.setattr(actions.By, "meant", lambda self: {"queue": None, "task": None})
    kept = pgqueue.Unique("u", on_duplicate="replace")
    queue, name = REPLACED[becomes]
    with psycopg.connect(dsn, autocommit=True) as app:
        job = pgqueue.remote("operate.kept").using(unique=kept, queue="mail").enqueue(app)
        other = pgqueue.remote("operate.kept").using(queue="mail").enqueue(app)
    with psycopg.connect(dsn) as app, ThreadPoolExecutor() as threads:
        assert pgqueue.remote(name).using(unique=kept, queue=queue).enqueue(app).id == job.id
        cancelled = threads.submit(lambda: pgqueue.cancel(conn, queue="mail", task="operate.kept"))
        wait_until(lambda: eyes.one("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'") == 1)
        app.commit()
        found = [(answer.id, answer.did) for answer in cancelled.result(10)]
    conn.commit()
    left = compares and becomes != "the same"
    assert found == [(job.id, "missing" if left else "cancelled"), (other.id, "cancelled")]
    assert pgqueue.get(conn, job.id).state == ("available" if left else "cancelled")
    [record] = pgqueue.audit(conn)
    assert record.jobs == ((other.id,) if left else (job.id, other.id))
    assert [answer.did for answer in pgqueue.cancel(conn, job.id)] == ["cancelled" if left else "ended"]


@pytest.mark.promise("F68")
@pytest.mark.parametrize("ended", ["2 s", "5 h", "1 h"])
def test_a_discard_by_age_leaves_a_job_that_has_ended_anew(ended: str, dsn: str, conn: Conn, eyes: Eyes) -> None:
    """It waits for a transaction that has the job."""
    eyes.do(
        "INSERT INTO pgqueue.job (state, task, finished_at, bin) "
        "SELECT 'completed', 't', now() - interval '5 h', 0 FROM generate_series(1, 2)"
    )
    anew = (
        "WITH gone AS (DELETE FROM pgqueue.job_done WHERE id = 1 RETURNING id, enqueued_at) "
        "INSERT INTO pgqueue.job (id, enqueued_at, state, task, finished_at, bin) "
        "SELECT id, enqueued_at, 'completed', 't', now() - %s::interval, 0 FROM gone"
    )
    with psycopg.connect(dsn) as app, ThreadPoolExecutor() as threads:
        app.execute(anew, [ended])
        discarded = threads.submit(lambda: pgqueue.discard(conn, task="t", older_than=timedelta(hours=2)))
        wait_until(lambda: eyes.one("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'") == 1)
        app.commit()
        found = [(answer.id, answer.did) for answer in discarded.result(10)]
    conn.commit()
    old = ended == "5 h"
    assert found == [(1, "discarded" if old else "missing"), (2, "discarded")]
    assert eyes.one("SELECT count(*) FROM pgqueue.job_done") == (0 if old else 1)
