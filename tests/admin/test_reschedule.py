"""A job that waits is rescheduled: it starts at the new time, once, and gives up the keys that it holds."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from threading import Thread
from typing import Any

import psycopg
import pytest
from commands import pgqueue as command
from workers import Eyes, until, work

import pgqueue
from pgqueue.client.tasks import task

ran: list[int] = []
LATER = datetime.now(UTC) + timedelta(days=2)
PAST = datetime.now(UTC) - timedelta(days=2)

Conn = psycopg.Connection[Any]

ROWS = {
    "available": "",
    "scheduled": ", run_at = now() + interval '1 hour'",
    "retrying": ", run_at = now() + interval '1 hour', attempt = 3, reason = 'ValueError: no'",
    "blocked": ", lock_key = 'k', key = 'lock:k'",
    "granted": ", lock_key = 'k', holds = true, rank = 10",
    "held until the retry": ", run_at = now() + interval '1 hour', lock_key = 'k', holds = true, attempt = 1",
    "poison": ", crashes = 1, rank = -2",
    "running": ", worker_id = 1, claim = 1, started_at = now()",
    "failed": ", finished_at = now(), bin = 0, reason = 'error'",
    "completed": ", finished_at = now(), bin = 0",
}
STATES = {"retrying": "scheduled", "granted": "available", "held until the retry": "scheduled", "poison": "available"}


def put(eyes: Eyes, kind: str) -> int:
    columns = dict(each.split(" = ", 1) for each in ROWS[kind].split(", ") if each)
    names, values = ", ".join(["state", "task", *columns]), ", ".join(["%s", "'reschedule.task'", *columns.values()])
    insert = f"INSERT INTO pgqueue.job ({names}) VALUES ({values}) RETURNING id"  # noqa: S608
    return int(eyes.one(insert, STATES.get(kind, kind)))


@task(name="reschedule.task")
async def mine(job: pgqueue.Job) -> None:
    ran.append(job.id)


@pytest.mark.promise("F112")
@pytest.mark.parametrize("at", [LATER, PAST], ids=["later", "now"])
@pytest.mark.parametrize("kind", ROWS)
def test_what_waits_is_moved_and_what_does_not_is_refused(kind: str, at: datetime, conn: Conn, eyes: Eyes) -> None:
    id, state = put(eyes, kind), STATES.get(kind, kind)
    before = eyes.all("SELECT to_jsonb(j) - 'pos' FROM pgqueue.job j")
    [answer] = pgqueue.reschedule(conn, id, at=at)
    conn.commit()
    if kind in ("running", "failed", "completed"):
        assert (answer.did, answer.state) == ("running" if kind == "running" else "over", state)
        assert eyes.all("SELECT to_jsonb(j) - 'pos' FROM pgqueue.job j") == before
        return
    assert (answer.did, answer.state) == ("rescheduled", state)
    [(now, run_at, holds, attempt, crashes, rank)] = eyes.all(
        "SELECT state, run_at, holds, attempt, crashes, rank FROM pgqueue.job"
    )
    assert (now, holds) == ("scheduled" if at is LATER else "available", False)
    assert run_at == LATER if at is LATER else abs(run_at - datetime.now(UTC)) < timedelta(minutes=5)
    assert attempt == {"retrying": 3, "held until the retry": 1}.get(kind, 0) and crashes == (kind == "poison")
    if at is PAST:
        assert rank == (-2 if kind == "poison" else 11)


@pytest.mark.promise("F112")
async def test_workers_hear_of_it_and_the_key_goes_to_the_next(dsn: str, eyes: Eyes) -> None:
    ran.clear()
    held, waiting, later = put(eyes, "held until the retry"), put(eyes, "blocked"), put(eyes, "scheduled")
    async with work(dsn, mine, poll=60.0):
        await until(lambda: eyes.one("SELECT state FROM pgqueue.worker") == "running")
        with psycopg.connect(dsn) as conn:
            pgqueue.reschedule(conn, held, at=LATER)
        await until(lambda: ran == [waiting])
        with psycopg.connect(dsn) as conn:
            pgqueue.reschedule(conn, later, at=datetime.now(UTC) + timedelta(seconds=0.3))
        await until(lambda: ran == [waiting, later])
        with psycopg.connect(dsn) as conn:
            pgqueue.reschedule(conn, held, at=PAST)
        await until(lambda: ran == [waiting, later, held])


@pytest.mark.promise("F112")
async def test_in_a_race_each_answer_is_true(dsn: str, eyes: Eyes) -> None:
    """Jobs that are just being claimed: those that were rescheduled have not run, the others have, or do."""
    ran.clear()
    with psycopg.connect(dsn) as conn:
        ids = [job.id for job in pgqueue.enqueue_many(conn, [mine.new() for _ in range(300)])]
    answers: list[Any] = []

    def reschedule() -> None:
        with psycopg.connect(dsn, autocommit=True) as conn:
            for first in range(0, 300, 20):
                answers.extend(pgqueue.reschedule(conn, *ids[first : first + 20], at=LATER))

    thread = Thread(target=reschedule)
    async with work(dsn, mine, concurrency=2):
        thread.start()
        await until(lambda: not thread.is_alive() and eyes.one("SELECT count(*) FROM pgqueue.job_available") == 0)
        moved = {answer.id for answer in answers if answer.did == "rescheduled"}
        await until(lambda: len(ran) == 300 - len(moved))
    assert len(answers) == 300 and not moved.intersection(ran) and len(set(ran)) == len(ran)
    assert {id for (id,) in eyes.all("SELECT id FROM pgqueue.job_scheduled")} == moved


@pytest.mark.promise("F112")
def test_what_is_no_time_or_no_job_is_refused(conn: Conn, eyes: Eyes) -> None:
    id = put(eyes, "scheduled")
    for bad in (datetime(2030, 1, 1), "tomorrow", 3):
        with pytest.raises(pgqueue.InvalidOption):
            pgqueue.reschedule(conn, id, at=bad)  # type: ignore[arg-type]
    with pytest.raises(pgqueue.JobNotFound):
        pgqueue.reschedule(conn, 4711, at=LATER)


@pytest.mark.promise("F112")
async def test_async_connections_reschedule(aconn: psycopg.AsyncConnection[Any], eyes: Eyes) -> None:
    [answer] = await pgqueue.areschedule(aconn, put(eyes, "blocked"), at=LATER, actor="ann")
    assert answer.did == "rescheduled"
    [entry] = await pgqueue.aaudit(aconn, job=answer.id)
    assert (entry.actor, entry.action) == ("ann", "reschedule")
    assert datetime.fromisoformat(entry.details["at"]) == LATER


@pytest.mark.promise("F112")
def test_the_command(dsn: str, eyes: Eyes) -> None:
    waiting, ended = put(eyes, "scheduled"), put(eyes, "failed")
    done = command("reschedule", str(waiting), "--at", "2099-12-24T18:00+01:00", dsn=dsn)
    assert (done.returncode, done.stdout) == (0, f"job {waiting} is rescheduled\n")
    done = command("reschedule", str(waiting), str(ended), "--now", "--json", dsn=dsn)
    assert [each["did"] for each in json.loads(done.stdout)["items"]] == ["rescheduled", "over"]
    assert done.returncode == 1 and eyes.states() == {"available": 1, "failed": 1}
    assert "pgqueue retry" in command("reschedule", str(ended), "--now", dsn=dsn).stdout
    for wrong in ([], ["--now", "--at", "2099-12-24T18:00Z"], ["--at", "2099-12-24"]):
        assert command("reschedule", str(waiting), *wrong, dsn=dsn).returncode == 2
