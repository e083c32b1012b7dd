"""What people do by hand: pause and resume a queue."""

from __future__ import annotations

import asyncio
from typing import Any

import psycopg
import pytest
from commands import pgqueue as command
from workers import Eyes, Taker, until, work

import pgqueue
from pgqueue.errors import InvalidOption
from pgqueue.tasks import task

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


@pytest.mark.promise("F22")
@pytest.mark.parametrize("listen", [True, False])
async def test_a_running_worker_stops_within_a_second_and_goes_on_when_resumed(
    dsn: str, eyes: Eyes, listen: bool
) -> None:
    options: dict[str, Any] = {} if listen else {"listen_dsn": "off", "poll": 0.2}
    with psycopg.connect(dsn, autocommit=True) as conn:
        pgqueue.enqueue_many(conn, [note.new(number) for number in range(4000)])
        async with work(dsn, note, concurrency=2, **options):
            await until(lambda: len(ran) > 20)
            assert pgqueue.pause(conn, "mail")
            at = eyes.one("SELECT paused_at FROM pgqueue.queue")
            await until(lambda: eyes.one("SELECT count(*) = 0 FROM pgqueue.job_running"))
            left = eyes.one("SELECT count(*) FROM pgqueue.job_available")
            assert 0 < left < 4000
            late = eyes.one("SELECT max(extract(epoch FROM started_at - %s)) FROM pgqueue.job_done", at)
            assert late < 1.0
            pgqueue.enqueue(conn, note, -1)  # somebody enqueues: its NOTIFY makes workers look, and not take
            assert eyes.one("SELECT count(*) FROM pgqueue.job_available WHERE queue = 'mail'") == left + 1
            assert pgqueue.resume(conn, "mail")
            await until(lambda: eyes.one("SELECT count(*) = 0 FROM pgqueue.job_available WHERE queue = 'mail'"), 20)
    assert len(set(ran)) == len(ran)


def test_the_commands_say_what_they_did(dsn: str, conn: Conn) -> None:
    assert command("pause", "mail", dsn=dsn).stdout == "queue mail is paused\n"
    assert command("pause", "mail", dsn=dsn).stdout == "queue mail was paused already\n"
    assert "PAUSED" in command("status", dsn=dsn).stdout
    assert command("resume", "mail", dsn=dsn).stdout == "queue mail is open again\n"
    assert command("resume", "mail", dsn=dsn).stdout == "queue mail was not paused\n"
    wrong = command("pause", "a b", dsn=dsn)
    assert (wrong.returncode, "queue 'a b'" in wrong.stderr) == (2, True)
