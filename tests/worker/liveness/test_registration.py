"""The first start of each version: it is noted once, it does not move, and noting it holds up no worker."""

from __future__ import annotations

import asyncio
import threading
from datetime import datetime

import psycopg
import pytest
from workers import Eyes, work

from pgqueue.admin.versions import versions
from pgqueue.client.tasks import task
from pgqueue.database.sessions import Link
from pgqueue.worker import settings
from pgqueue.worker.liveness import registration
from pgqueue.worker.state import WorkerState

STARTS = "SELECT version_tag, first_at FROM pgqueue.version_start ORDER BY 1"


@task(name="registration.nothing")
async def nothing() -> None: ...


def state(dsn: str, version: str) -> WorkerState:
    """A worker of this version that has not started yet."""
    settled = settings.settle(
        [nothing],
        queues=None,
        concurrency=1,
        dsn=dsn,
        listen_dsn=None,
        schema=None,
        poll=1.0,
        lease=15.0,
        version_tag=version,
        pool_size=None,
        fail_unknown=60.0,
    )
    made = WorkerState(settled, {"registration.nothing": nothing})
    made.link = Link(dsn, "pgqueue")
    return made


@pytest.mark.promise("F309")
async def test_the_first_start_of_a_version_stays_when_its_workers_are_replaced(dsn: str, eyes: Eyes) -> None:
    """Naive is the start of its oldest worker: with the first worker that leaves, the mark moves."""

    async def run(version: str) -> datetime:
        async with work(dsn, nothing, version_tag=version) as worker:
            found: datetime = eyes.one("SELECT started_at FROM pgqueue.worker WHERE id = %s", worker.worker_id)
            return found

    one = await run("v1")
    assert eyes.one("SELECT count(*) FROM pgqueue.worker") == 0
    again, two = await run("v1"), await run("v2")
    assert again > one and eyes.all(STARTS) == [("v1", one), ("v2", two)]


@pytest.mark.promise("F309")
async def test_a_worker_that_is_stopped_while_it_registers_holds_up_no_other(
    dsn: str, eyes: Eyes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Naive is to note the version in the transaction that registers: the others wait for its end."""
    real, at_it, may_go_on = registration.register, threading.Event(), threading.Event()

    def stopped(conn: psycopg.Connection, *args: object, **options: object) -> int:
        registered = real(conn, *args, **options)  # type: ignore[arg-type]
        if not at_it.is_set():
            at_it.set()
            assert may_go_on.wait(60)
        return registered

    monkeypatch.setattr(registration, "register", stopped)
    first = asyncio.create_task(asyncio.to_thread(registration.enter, state(dsn, "v1")))
    await asyncio.to_thread(at_it.wait, 60)
    try:
        second = await asyncio.to_thread(registration.enter, state(dsn, "v1"))
        assert eyes.one("SELECT count(*) FROM pgqueue.worker WHERE id = %s", second) == 1
        before = eyes.all(STARTS)
        assert [name for name, _ in before] == ["v1"]
    finally:
        may_go_on.set()
        await first
    assert eyes.all(STARTS) == before


@pytest.mark.promise("F309")
@pytest.mark.parametrize("version", ["v" * 3000, "é" * 600])
async def test_a_version_with_a_name_that_no_index_takes_starts_all_the_same(
    dsn: str, eyes: Eyes, version: str
) -> None:
    async with work(dsn, nothing, version_tag=version):
        assert eyes.all(STARTS) == []
        [known] = versions(eyes.conn)
        assert (known.version, known.is_live) == (version, True)


@pytest.mark.promise("F309")
async def test_a_start_that_cannot_be_noted_is_told_and_keeps_no_worker_from_its_work(
    dsn: str, eyes: Eyes, caplog: pytest.LogCaptureFixture
) -> None:
    eyes.do("ALTER TABLE pgqueue.version_start ADD CHECK (version_tag <> E'v\\x01')")
    async with work(dsn, nothing, version_tag="v\x01") as worker:
        assert eyes.one("SELECT count(*) FROM pgqueue.worker WHERE id = %s", worker.worker_id) == 1
    assert "the start of version v? was not noted" in caplog.text
