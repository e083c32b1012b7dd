"""The dashboard while its database is away: a line when it is lost, a line when it is back, and no more."""

from __future__ import annotations

import logging
from typing import Any

import psycopg
import pytest
from dashboards import reading
from workers import Eyes, until

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
