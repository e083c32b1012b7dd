"""Hearing NOTIFY: every channel, nothing missed while it pings, anew after every loss; and one leader at a time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import psycopg
import pytest
from faults import Wire
from workers import Eyes, until, work

from pgqueue.database import migrations, sessions, statements
from pgqueue.database.sessions import Link
from pgqueue.worker.fetch import notifier
from pgqueue.worker.fetch.notifier import LED, Notifier
from pgqueue.worker.leader.election import Election
from pgqueue.worker.liveness import registration
from pgqueue.worker.liveness.heartbeat import LISTED_SECONDS, Heartbeat
from pgqueue.worker.liveness.registration import enter


async def at_once() -> bool:
    return True


class Ears:
    def __init__(
        self,
        dsn: str,
        *queues: str,
        schema: str = "pgqueue",
        listed: Callable[[], Awaitable[bool]] = at_once,
    ) -> None:
        self.heard: list[tuple[str, str]] = []
        self.notifier = Notifier(
            link := Link(dsn, schema),
            queues,
            Election(link),
            heard=lambda channel, payload: self.heard.append((channel, payload)),
            listed=listed,
        )

    def news(self) -> list[tuple[str, str]]:
        """What was heard and is no sign of its own LISTEN or leadership."""
        return [one for one in self.heard if one not in {("", ""), (LED, "")}]


@asynccontextmanager
async def listening(dsn: str, *queues: str) -> AsyncIterator[Ears]:
    ears = Ears(dsn, *queues)
    running = asyncio.ensure_future(ears.notifier.run())
    try:
        await until(lambda: ("", "") in ears.heard)
        yield ears
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@pytest.fixture(autouse=True)
def short_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notifier, "PING_SECONDS", 0.2)


async def test_it_hears_its_queues_what_is_scheduled_and_what_concerns_all_and_nothing_else(
    dsn: str, eyes: Eyes
) -> None:
    longest = "q" * 40
    async with listening(dsn, "mail", "a.b-c_D", longest) as ears:
        for channel, payload in (
            ("mail", "zero"), ("other", ""), ("a.b-c_D", ""), (longest, ""), (":control", "x"), ("MAIL", ""),
        ):  # fmt: skip
            eyes.all("SELECT pg_notify('pgqueue.' || %s, %s)", channel, payload)
        eyes.all("SELECT pg_notify('elsewhere.mail', '')")
        await until(lambda: len(ears.news()) >= 4)
        assert ears.news() == [("mail", "zero"), ("a.b-c_D", ""), (longest, ""), (":control", "x")]


@pytest.mark.promise("F05")
async def test_nothing_is_missed_while_it_pings(dsn: str, eyes: Eyes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notifier, "PING_SECONDS", 0.0)
    async with listening(dsn, "mail") as ears:
        for number in range(500):
            eyes.all("SELECT pg_notify('pgqueue.mail', %s)", str(number))
            if number % 10 == 0:
                await asyncio.sleep(0)
        await until(lambda: len(ears.news()) == 500)
        assert [payload for _, payload in ears.news()] == [str(number) for number in range(500)]


@pytest.mark.promise("F06")
async def test_it_listens_again_after_every_loss_and_says_so(dsn: str, eyes: Eyes) -> None:
    async with listening(dsn, "mail") as ears:
        for round in range(1, 4):
            assert eyes.terminate("pgqueue listen") == 1
            await until(lambda round=round: ears.heard.count(("", "")) == round + 1)  # type: ignore[misc]
            eyes.all("SELECT pg_notify('pgqueue.mail', '')")
            await until(lambda round=round: len(ears.news()) == round)  # type: ignore[misc]


@pytest.mark.second
@pytest.mark.promise("F06")
async def test_a_half_open_socket_is_noticed(dsn: str, eyes: Eyes, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other side says nothing any more, not even that it is gone."""
    monkeypatch.setattr(notifier, "PING_ANSWER_SECONDS", 1.5)
    with Wire(dsn) as wire:
        async with listening(wire.dsn, "mail") as ears:
            assert wire.kill("pgqueue listen") == 1
            await until(lambda: ears.heard.count(("", "")) == 2)
            eyes.all("SELECT pg_notify('pgqueue.mail', '')")
            await until(lambda: len(ears.news()) == 1)


async def test_the_listening_session_holds_no_snapshot_and_no_transaction(dsn: str, eyes: Eyes) -> None:
    async with listening(dsn, "mail") as ears:
        await until(lambda: ears.notifier.election.elected)
        [row] = eyes.all(
            "SELECT state, backend_xmin, xact_start FROM pg_stat_activity "
            "WHERE datname = current_database() AND application_name = 'pgqueue listen'"
        )
        assert row == ("idle", None, None)


async def test_one_leads_and_another_takes_over_when_it_is_gone(dsn: str, eyes: Eyes) -> None:
    async with AsyncExitStack() as stack:
        all_ears = [await stack.enter_async_context(listening(dsn, "mail")) for _ in range(4)]

        def leads() -> list[Ears]:
            return [ears for ears in all_ears if ears.notifier.election.elected]

        def sessions(of: list[Ears]) -> list[int]:
            return [ears.notifier.identity[0] for ears in of if ears.notifier.identity]

        await until(lambda: len(leads()) == 1)
        for _ in range(3):
            [leader] = leads()
            [pid] = sessions([leader])
            eyes.all("SELECT pg_terminate_backend(%s)", pid)
            # Until its connection tells it, the one whose session was ended takes itself for the leader, too.
            await until(lambda pid=pid: pid not in sessions(leads()) and len(leads()) == 1)  # type: ignore[misc]
        assert all((LED, "") in ears.heard for ears in leads())


@pytest.mark.promise("F34")
@pytest.mark.parametrize("how", ["pg_advisory_lock", "pg_advisory_lock_shared"])
async def test_a_strangers_hold_on_the_leaders_lock_stops_no_duties_and_is_named(
    how: str, dsn: str, eyes: Eyes, caplog: pytest.LogCaptureFixture
) -> None:
    """Naive: no worker leads, and nothing says why."""
    with psycopg.connect(dsn, autocommit=True) as stranger:
        stranger.execute(f"SELECT {how}(hashtextextended('pgqueue.leader', 7))".encode())
        async with listening(dsn, "mail") as one, listening(dsn, "mail") as two:
            await until(lambda: one.notifier.election.leads() and two.notifier.election.leads())
            assert not one.notifier.election.elected and not two.notifier.election.elected
            assert (LED, "") in one.heard and (LED, "") in two.heard
            pid = stranger.info.backend_pid
            said = [
                record.getMessage() for record in caplog.records if f"session {pid} of the server" in record.message
            ]
            assert len(said) == 2 and all(f"pg_terminate_backend({pid})" in line for line in said)
            stranger.execute("SELECT pg_advisory_unlock_all()")
            await until(lambda: [ears.notifier.election.leads() for ears in (one, two)].count(True) == 1)
            assert one.heard.count((LED, "")) <= 2 and two.heard.count((LED, "")) <= 2


async def test_a_leader_behind_a_pooler_in_session_mode_is_no_stranger(dsn: str, eyes: Eyes) -> None:
    """It lists no session; its name tells."""
    async with listening(dsn, "mail") as one, listening(dsn, "mail") as two:
        await until(lambda: [ears.notifier.election.elected for ears in (one, two)].count(True) == 1)
        [other] = [ears for ears in (one, two) if not ears.notifier.election.elected]
        assert eyes.all(statements.text("election_strangers", "pgqueue").replace("%%", "%")) == []
        assert not other.notifier.election.leads()


async def test_a_session_is_listed_before_it_listens_or_may_lead(dsn: str, eyes: Eyes) -> None:
    """Who leads and is stopped keeps the lock, who listens and is stopped the notifications; only a session that was
    listed can be ended by who rescues it."""
    asked, known = asyncio.Event(), asyncio.Event()
    identities: list[tuple[int, str] | None] = []

    async def listed() -> bool:
        identities.append(ears.notifier.identity)
        asked.set()
        return await known.wait()

    ears = Ears(dsn, "mail", listed=listed)
    running = asyncio.ensure_future(ears.notifier.run())
    await until(asked.is_set)
    locked = "SELECT count(*) FROM pg_locks WHERE pid = %s AND locktype = 'advisory'"
    assert identities[0] is not None
    pid = identities[0][0]
    ears.notifier.election.try_now()
    await asyncio.sleep(0.1)
    assert (ears.notifier.election.elected, eyes.one(locked, pid)) == (False, 0)
    eyes.do("NOTIFY \"pgqueue.mail\", 'early'")
    assert ears.heard == []
    known.set()
    await until(lambda: ears.notifier.election.elected)
    eyes.do("NOTIFY \"pgqueue.mail\", 'late'")
    await until(lambda: ("mail", "late") in ears.heard)
    assert ears.heard[0] == ("", "") and ("mail", "early") not in ears.heard
    assert eyes.one(locked, pid) == 1
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_worker_lists_its_listening_session_before_it_leads(dsn: str, eyes: Eyes) -> None:
    async with work(dsn) as worker:
        await until(lambda: worker.services.notifier.election.elected)
        assert worker.services.notifier.identity is not None
        sessions = eyes.one("SELECT sessions FROM pgqueue.worker WHERE id = %s", worker.worker_id)
        assert worker.services.notifier.identity[0] in [each["pid"] for each in sessions]


async def test_who_is_taken_for_dead_listens_and_leads_under_its_new_row_only(
    dsn: str, eyes: Eyes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its beats have ended, so a session it opens before it has registered anew is known to nobody."""
    asked: list[bool] = []
    real, may_register = Heartbeat.listed, threading.Event()

    async def listed(self: Heartbeat, most: float = LISTED_SECONDS) -> bool:
        asked.append(await real(self, most))
        return asked[-1]

    monkeypatch.setattr(Heartbeat, "listed", listed)
    async with work(dsn) as worker:
        monkeypatch.setattr(registration, "enter", lambda state: may_register.wait(30) and enter(state))
        await until(lambda: worker.services.notifier.election.elected)
        identity, heartbeat, before = worker.services.notifier.identity, worker.services.heartbeat, worker.worker_id
        assert identity is not None
        eyes.do("DELETE FROM pgqueue.worker WHERE id = %s", before)
        heartbeat.beat_soon()
        await until(heartbeat._stop.is_set)
        asked.clear()
        eyes.all("SELECT pg_terminate_backend(%s)", identity[0])
        await until(lambda: len(asked) >= 2)
        assert not any(asked) and not worker.services.notifier.election.elected
        assert (
            eyes.one("SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'LISTEN%%' OR pid = %s", identity[0]) == 0
        )
        may_register.set()
        await until(lambda: worker.services.notifier.election.elected)
        assert worker.worker_id != before and asked[-1]


async def test_schemas_have_leaders_of_their_own(dsn: str, eyes: Eyes) -> None:
    async with listening(dsn, "mail") as ours:
        await until(lambda: ours.notifier.election.elected)
        await asyncio.to_thread(migrations.migrate, dsn, "other")
        theirs = Ears(dsn, "mail", schema="other")
        running = asyncio.ensure_future(theirs.notifier.run())
        await until(lambda: theirs.notifier.election.elected)
        assert ours.notifier.election.elected
        eyes.all("SELECT pg_notify('other.mail', 'x')")
        await until(lambda: theirs.news() == [("mail", "x")])
        assert ours.news() == []
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running


async def test_a_server_that_is_away_at_the_start_is_waited_for(
    dsn: str, eyes: Eyes, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, tries = sessions.connect, 0

    async def connect(*args: Any) -> Any:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise psycopg.OperationalError("connection refused")
        return await real(*args)

    monkeypatch.setattr(notifier, "connect", connect)
    async with listening(dsn, "mail"):
        assert tries == 3
