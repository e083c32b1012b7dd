"""The dashboard while its database is away: a line when it is lost, a line when it is back, and no more."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from dashboards import browsing, dashboard_of, reading
from workers import Eyes, until

from pgqueue.databases import named
from pgqueue.web import connections


@pytest.mark.promise("F354")
async def test_an_outage_is_a_line_at_its_begin_and_one_at_its_end(
    dsn: str, eyes: Eyes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Naive: psycopg's pool warns of each try, of each connection that was closed, and when it gives up."""
    monkeypatch.setattr(connections, "SILENCE_SECONDS", 0.01)
    monkeypatch.setattr(connections, "WAIT_SECONDS", 0.2)
    connect, away = psycopg.AsyncConnection.connect.__func__, False  # type: ignore[attr-defined]

    async def connected(kind: Any, *args: Any, **options: Any) -> Any:
        if away:
            raise psycopg.OperationalError("connection refused")
        return await connect(kind, *args, **options)

    monkeypatch.setattr(psycopg.AsyncConnection, "connect", classmethod(connected))
    caplog.set_level(logging.INFO)
    async with reading(dsn) as browser:
        assert (await browser.get("/queues")).status_code == 200
        for _ in range(2):
            caplog.clear()
            away = True
            eyes.terminate("pgqueue web")
            await until(lambda: eyes.backends("pgqueue web") == [])
            answers = [await browser.get(path) for path in ["/queues", "/jobs", "/workers"] * 10]
            assert {each.status_code for each in answers} == {503}, answers
            away = False
            while (await browser.get("/queues")).status_code != 200:
                ...
            said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
            assert [one[:20] for one in said] == ["the database is lost", "the database is back"], said


@pytest.mark.promise("F410")
async def test_names_that_do_not_resolve_stop_no_other_page(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Naive: each request leaves an attempt behind, which holds a thread of the loop. Then a plain `auth` has none."""
    monkeypatch.setattr(connections, "SILENCE_SECONDS", 0.01)
    resolving, most, answered = Counter[str](), Counter[str](), threading.Event()
    resolve, lock = socket.getaddrinfo, threading.Lock()

    def resolved(host: Any, *args: Any, **options: Any) -> Any:
        if "invalid" not in str(host):
            return resolve(host, *args, **options)
        with lock:
            resolving[host] += 1
            most[host] = max(most[host], resolving[host])
        answered.wait()
        with lock:
            resolving[host] -= 1
        raise socket.gaierror(socket.EAI_NONAME, "no such name")

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(4))
    three = named([*(f"{name}=postgresql://app@{name}.invalid/x" for name in ("one", "two")), f"here={dsn}"])
    try:
        async with dashboard_of(None, lambda visitor: "read", databases=three) as made, browsing(made) as browser:
            async with asyncio.timeout(60):
                monkeypatch.setattr(connections, "ANSWER_SECONDS", 0.05)
                for _ in range(4):
                    for name in ("one", "two"):
                        gone = await browser.get(f"/db/{name}/queues")
                        assert gone.status_code == 503 and "does not answer" in gone.text
                monkeypatch.setattr(connections, "ANSWER_SECONDS", 30.0)
                assert (await browser.get("/db/here/queues")).status_code == 200
            assert max(most.values()) <= 2, "one of the pool, and one that all requests share"
            answered.set()
    finally:
        answered.set()
