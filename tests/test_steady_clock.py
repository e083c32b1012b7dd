"""Where a test of an application has stopped the clock of Python, pgqueue still knows how long a thing takes."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import psycopg
import pytest
from freezegun import freeze_time

import pgqueue


@pytest.mark.promise("F291")
async def test_a_wait_ends_where_a_test_has_stopped_the_clock(pgqueue_db: str, conn: psycopg.Connection[Any]) -> None:
    """Naive: `time.monotonic`, which freezegun replaces wherever a module has it."""
    with freeze_time("2020-02-29 12:00:00", real_asyncio=True):
        job = pgqueue.remote("nothing.runs.it").enqueue(conn)
        conn.commit()
        with pytest.raises(pgqueue.ResultTimeout):
            await asyncio.wait_for(job.aresult(timeout=0.2), 20)
        with pytest.raises(pgqueue.ResultTimeout):
            await asyncio.wait_for(asyncio.to_thread(job.result, timeout=0.2), 20)


@pytest.mark.promise("F291")
async def test_a_worker_works_there(pgqueue_db: str, conn: psycopg.Connection[Any]) -> None:
    @pgqueue.task(name="frozen.waits", timeout=0.2, retry=1)
    async def waits() -> None:
        await asyncio.sleep(60)

    @pgqueue.task(name="frozen.runs")
    def runs() -> str:
        return "ran"

    with freeze_time("2020-02-29 12:00:00", real_asyncio=True):
        async with pgqueue.Worker(dsn=pgqueue_db, tasks=[waits, runs]):
            first, second = waits.enqueue(conn), runs.enqueue(conn)
            conn.commit()
            with pytest.raises(pgqueue.JobTimeout):
                await first.aresult(timeout=20)
            assert await second.aresult(timeout=20) == "ran"


def test_no_module_has_a_clock_that_can_be_stopped() -> None:
    package = Path(pgqueue.__file__).parent
    modules = {path: path.read_text(encoding="utf-8") for path in package.rglob("*.py")}
    stoppable = re.compile(r"from time import .*\bmonotonic\b|time\.monotonic\(")
    found = [path for path, text in modules.items() if stoppable.search(text)]
    assert len(modules) > 100 and found == []
