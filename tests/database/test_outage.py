"""An outage: how often a worker tries to connect, and what it says; and that only an answered statement ends it."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from contextlib import AsyncExitStack
from statistics import median
from time import monotonic

import psycopg
import pytest
from outages import count_connects
from servers import Server
from workers import Eyes, until, work

import pgqueue
from pgqueue.database import migrations
from pgqueue.database.outage import SAID_SECONDS, UNWANTED_SECONDS, Outage
from pgqueue.database.sessions import Identity, Link, Session

AWAY = psycopg.OperationalError("connection refused\n\tIs the server running?")


@pgqueue.task(name="outage.plain")
async def plain() -> None: ...


class Clock:
    """A clock for an outage, and the outage."""

    def __init__(self) -> None:
        self.now = 100.0
        self.outage = Outage(lambda: self.now)

    def lose(self, name: str, times: int = 1) -> list[float]:
        """Lose this session so often, each time after its pause. Returns the pauses."""
        pauses = []
        for _ in range(times):
            self.now += self.outage.pause(name)
            pauses.append(self.outage.lost(name, AWAY))
        return pauses


@pytest.mark.promise("F30")
def test_pauses_of_a_lost_session_grow_until_a_statement_is_answered() -> None:
    clock = Clock()
    pauses = clock.lose("fetch", 12)
    assert 0.02 <= pauses[0] <= 0.05 and all(2.5 <= pause <= 5.0 for pause in pauses[8:])
    assert clock.outage.pause("fetch") == pytest.approx(pauses[-1]) and clock.outage.pause("listen") == 0.0
    clock.outage.answered("fetch")
    assert clock.outage.pause("fetch") == 0.0
    assert clock.lose("fetch")[0] <= 0.05
    assert max(clock.outage.lost("beat", AWAY, most=0.2) for _ in range(9)) <= 0.2


@pytest.mark.promise("F30")
def test_one_line_when_it_is_lost_one_a_minute_and_one_when_it_is_back(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    for _ in range(30):
        clock.lose("fetch")
        clock.lose("listen")
        clock.now += 5.0
    assert len(caplog.records) == 1 + int(clock.now - 100.0) // int(SAID_SECONDS)
    assert caplog.records[0].getMessage() == (
        "the database is lost (fetch): connection refused Is the server running?; trying again until it is back; "
        "see docs/night.md#the-database-failed-over"
    )
    assert "fetch, listen" in caplog.records[1].getMessage()
    caplog.clear()
    clock.outage.answered("fetch")
    assert caplog.records == []
    clock.outage.answered("listen")
    clock.outage.answered("listen")
    assert [record.getMessage()[:28] for record in caplog.records] == ["the database is back after 1"]
    assert {record.levelno for record in caplog.records} == {logging.WARNING}


@pytest.mark.promise("F30")
def test_a_session_that_is_not_wanted_any_more_holds_up_no_line(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    clock.lose("unblock")
    clock.now += UNWANTED_SECONDS + 1
    clock.lose("fetch")
    clock.outage.answered("fetch")
    assert [record.getMessage()[:20] for record in caplog.records] == [
        "the database is lost", "the database is lost", "the database is back",
    ]  # fmt: skip


@pytest.mark.promise("F420")
def test_a_connection_that_is_older_than_the_end_of_an_outage_is_no_news(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    clock.lose("fetch")
    clock.outage.answered("fetch")  # at 100.0: that outage is over
    caplog.clear()
    clock.now = 110.0
    clock.outage.lost("unblock", AWAY, heard_at=99.0)
    assert clock.outage.is_on() and clock.outage.pause("unblock") > 0
    clock.outage.answered("unblock")
    assert caplog.records == [] and not clock.outage.is_on()
    clock.outage.lost("unblock", AWAY, heard_at=99.0)
    clock.lose("unblock")  # what it connects anew with is lost, too: another outage
    clock.outage.answered("unblock")
    clock.outage.lost("beat", AWAY, heard_at=clock.now + 1.0)
    assert [record.getMessage()[:20] for record in caplog.records] == [
        "the database is lost", "the database is back", "the database is lost",
    ]  # fmt: skip


async def refuse(*_: object) -> None:
    raise AWAY


@pytest.mark.promise("F420")
async def test_sessions_that_were_idle_in_an_outage_notice_it_without_a_line(
    dsn: str, eyes: Eyes, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Naive: each of them has two more lines, one that the database is lost and one that it is back."""
    link = Link(dsn, "pgqueue")
    sessions = [Session(link, name) for name in ("fetch", "release", "unblock")]
    end = link.statement("sessions_end", pid=0, backend_start="2020-01-01")

    async def told(session: Session) -> list[str]:
        """What is said when it comes to a broken connection, and goes on with another one."""
        caplog.clear()
        with pytest.raises(psycopg.OperationalError):
            await session.run(end)
        await session.run(end)
        return [record.getMessage()[:20] for record in caplog.records]

    def end_all() -> None:
        for session in sessions:
            assert session.identity is not None
            eyes.do("SELECT pg_terminate_backend(%s, 60000)", session.identity[0])

    for session in sessions:
        await session.run(end)
    for _ in range(2):
        end_all()
        said = [await told(session) for session in sessions]
        assert said == [["the database is lost", "the database is back"], [], []]
    end_all()
    await told(sessions[0])
    await sessions[1].rest()  # what it connects anew with is no old connection
    caplog.clear()
    with monkeypatch.context() as away:
        away.setattr("pgqueue.database.sessions.connect", refuse)
        with pytest.raises(psycopg.OperationalError):
            await sessions[1].run(end)
    assert [record.getMessage()[:20] for record in caplog.records] == ["the database is lost"]
    for session in sessions:
        await session.close()


@pytest.mark.promise("F30")
async def test_a_connection_that_opens_and_breaks_is_no_success(
    dsn: str, eyes: Eyes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Naive: a connection that opens starts the back-off anew. Then it is opened twenty times a second."""
    session = Session(link := Link(dsn, "pgqueue"), "fetch")
    end = link.statement("sessions_end", pid=0, backend_start="2020-01-01")
    pauses = []
    for _ in range(5):
        await session.ready()
        assert session.identity is not None
        eyes.do("SELECT pg_terminate_backend(%s, 5000)", session.identity[0])
        with pytest.raises(psycopg.OperationalError):
            await session.run(end)
        pauses.append(link.outage.pause("fetch"))
    assert pauses[-1] >= 0.3
    await session.run(end)
    assert link.outage.pause("fetch") == 0.0 and session.answers() == 1
    await session.close()


@pytest.mark.second
@pytest.mark.promise("F30")
async def test_a_worker_tries_seldom_and_says_little_while_its_server_is_away(
    own_server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of each session about ten tries in nine seconds, however many services share it. Naive: each service for itself.

    Then the listener is lost again and again, and comes back as soon each time.
    """
    caplog.set_level(logging.INFO)
    dsn, seconds = own_server.dsn("postgres"), 9.0
    migrations.migrate(dsn)
    async with work(dsn, plain) as worker:
        await until(lambda: worker.services.election.elected)
        tried = count_connects(monkeypatch)
        caplog.clear()
        await asyncio.to_thread(own_server.stop)
        began = monotonic()
        await until(lambda: monotonic() - began > seconds)
        said, connects = [(one.name, one.getMessage()) for one in caplog.records], tried[:]
        await asyncio.to_thread(own_server.start)
        await until(lambda: "the database is back" in caplog.text and worker.services.election.elected)
        print(f"{len(connects)} tries in {seconds:g} s; {said}")
        sessions = {"pgqueue fetch", "pgqueue listen", "pgqueue beat"}
        assert sessions <= set(connects) <= sessions | {"pgqueue housekeeping"}
        assert len(connects) <= len(set(connects)) * 14
        assert [message[:20] for name, message in said if name != "pgqueue.job"] == ["the database is lost"]
        assert [record for record in caplog.records if record.name.startswith("psycopg")] == []
        eyes = Eyes(dsn)
        waits = []
        for _ in range(10):
            before, began = worker.services.notifier.identity, monotonic()
            eyes.terminate("pgqueue listen")
            await until(lambda: worker.services.election.elected and worker.services.notifier.identity != before)  # noqa: B023
            waits.append(monotonic() - began)
        eyes.close()
        print([f"{wait:.2f}" for wait in waits])
        assert min(waits[5:]) < 1.0  # naive: the pauses only grow, and are 5 s by now


@pytest.mark.second
@pytest.mark.promise("F30")
@pytest.mark.parametrize("leads", [True, False], ids=["the leader", "a worker beside it"])
async def test_a_hundred_losses_of_the_listener_delay_and_double_no_job(leads: bool, dsn: str, eyes: Eyes) -> None:
    """The worker polls once a minute. One job comes while it does not listen, and one when it does again.

    Naive: pauses that only grow. Then it is back after 5 s each time.
    """
    rounds, waits, backs, started = 100, list[float](), list[float](), asyncio.Queue[int]()

    @pgqueue.task(name="outage.numbered")
    async def numbered(n: int) -> None:
        started.put_nowait(n)

    async with AsyncExitStack() as stack:
        if not leads:
            other = await stack.enter_async_context(work(dsn))
            await until(other.services.election.leads)
        worker = await stack.enter_async_context(work(dsn, numbered, poll=60.0))
        notifier, outage = worker.services.notifier, worker.state.link.outage
        conn = stack.enter_context(psycopg.connect(dsn, autocommit=True))

        def listens(before: Identity | None) -> bool:
            """Whether a session other than `before` listens, and was answered since."""
            there = notifier.identity not in (None, before) and worker.services.election.elected is leads
            return there and not outage.pause("listen")

        async def starts(n: int) -> None:
            numbered.enqueue(conn, n)
            assert await asyncio.wait_for(started.get(), 20.0) == n

        await until(lambda: listens(None))
        await starts(0)
        sessions = Counter(name for _, name in eyes.backends())
        for round in range(1, rounds + 1):
            before, began = notifier.identity, monotonic()
            assert before is not None and eyes.one("SELECT pg_terminate_backend(%s)", before[0])
            await starts(2 * round - 1)
            waits.append(monotonic() - began)
            await until(lambda: listens(before))  # noqa: B023
            backs.append(monotonic() - began)
            await starts(2 * round)
        await until(lambda: Counter(name for _, name in eyes.backends()) <= sessions)
        await until(eyes.done(2 * rounds + 1))
        assert started.empty()
    print(f"jobs started after {median(waits):.3f} s, {max(waits):.2f} s at most; back after {median(backs):.3f} s")
    assert max(waits) < 15.0 and median(backs) < 1.0
