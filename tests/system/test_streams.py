"""The example of docs/streams.md at work: ticks, one stream-draining job per user, alone; nothing is stranded.

The workers are real and several; the clock of the database stands, and is turned from tick to tick. They all make ticks
(without LISTEN nobody can lead, so everybody does the duties), and look every 50 ms instead of 15 s.
"""

from __future__ import annotations

import asyncio
import importlib.util
import re
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import psycopg
import pytest
from clocks import set_clock
from pages import ROOT, blocks
from workers import Eyes, Stalls, until, work

from pgqueue import Job, Lock
from pgqueue.client import tasks
from pgqueue.client.tasks import task
from pgqueue.worker.leader import ticks
from pgqueue.worker.worker import Worker

PAGE = ROOT / "docs" / "streams.md"
START = datetime(2026, 3, 1, tzinfo=UTC)
PERIOD = timedelta(minutes=15)
UNDONE = "SELECT count(*) FROM pgqueue.job WHERE state NOT IN ('completed', 'skipped')"
LEFT = "SELECT count(*) FROM event WHERE served_at IS NULL"
RUNS = """
    SELECT started_at, finished_at FROM pgqueue.job_done
    WHERE task = 'stream.serve' AND state = 'completed' ORDER BY started_at
"""


@pytest.fixture
def stream(tmp_path: Path, eyes: Eyes, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module of the page, on a database with its tables."""
    tasks.registry.clear()
    monkeypatch.setattr(ticks, "LOOK_SECONDS", 0.05)
    sources = [block.text for block in blocks(PAGE) if block.language == "python" and block.text.startswith("# stream")]
    (tmp_path / "stream.py").write_text(sources[0])
    [tables] = [block.text for block in blocks(PAGE) if block.language == "sql"]
    for statement in re.findall(r"CREATE[^;]*", tables):
        eyes.do(statement)
    spec = importlib.util.spec_from_file_location("stream", tmp_path / "stream.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "stream", module)
    spec.loader.exec_module(module)
    yield module


@asynccontextmanager
async def fleet(dsn: str, *used: Any, number: int = 4) -> AsyncIterator[list[Worker]]:
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(work(dsn, *used, listen_dsn="off", poll=0.02, concurrency=4))
            for _ in range(number)
        ]


async def quiet(eyes: Eyes) -> None:
    """Until every job there is has ended."""
    await until(lambda: eyes.one(UNDONE) == 0, 60.0)


async def turn(eyes: Eyes, moment: datetime, number: int) -> None:
    """Turn the clock to a tick, and wait until it is made, and its jobs are done."""
    set_clock(eyes, moment)
    await until(lambda: eyes.one("SELECT count(*) FROM pgqueue.tick") >= number, 60.0)
    await quiet(eyes)


@pytest.mark.second
@pytest.mark.promise("L11")
@pytest.mark.parametrize("hours", [6, pytest.param(24, marks=pytest.mark.long)])
async def test_every_tick_of_the_day_is_made_once_and_is_one_job_for_each_user(
    hours: int, stream: Any, dsn: str, eyes: Eyes
) -> None:
    set_clock(eyes, START)
    eyes.do("INSERT INTO customer SELECT generate_series(1, 5)")
    async with fleet(dsn, stream.tick, stream.serve):
        await until(lambda: eyes.one("SELECT next_at FROM pgqueue.schedule") == START + PERIOD)
        for number in range(1, 4 * hours + 1):
            eyes.do("INSERT INTO event (user_id) VALUES (1), (2)")
            await turn(eyes, START + number * PERIOD, number)
    expected = [START + number * PERIOD for number in range(1, 4 * hours + 1)]
    assert [at for (at,) in eyes.all("SELECT at FROM pgqueue.tick ORDER BY at")] == expected
    made = eyes.all("SELECT headers ->> 'pgqueue:tick' FROM pgqueue.job_done WHERE task = 'stream.tick'")
    assert Counter(datetime.fromisoformat(tick) for (tick,) in made) == Counter(expected)
    served = eyes.all("SELECT args ->> 'user_id', enqueued_at FROM pgqueue.job_done WHERE task = 'stream.serve'")
    assert Counter(served) == Counter((str(user), at) for user in range(1, 6) for at in expected)
    assert eyes.one(LEFT) == 0


@pytest.mark.promise("L12")
async def test_a_user_dropped_at_one_tick_is_served_at_a_later_one(stream: Any, dsn: str, eyes: Eyes) -> None:
    """With "skip": the run of before holds the user over tick k, whose job is dropped; the job of tick k + 1 runs."""
    held, let_go = asyncio.Event(), asyncio.Event()

    @task(name="holder", lock="user:{user_id}", timeout=60)
    async def holder(user_id: int) -> None:
        held.set()
        await let_go.wait()

    lock = Lock("user:{user_id}", on_locked="skip")
    serve = stream.serve
    stream.serve = serve.using(lock=lock)
    set_clock(eyes, START)
    eyes.do("INSERT INTO customer SELECT generate_series(1, 2)")
    async with fleet(dsn, stream.tick, serve, holder):
        await until(lambda: eyes.one("SELECT next_at FROM pgqueue.schedule"))
        holder.enqueue(eyes.conn, user_id=1)
        await held.wait()
        eyes.do("INSERT INTO event (user_id) VALUES (1), (2)")
        set_clock(eyes, START + PERIOD)
        skipped = "SELECT count(*) FROM pgqueue.job_done WHERE state = 'skipped' AND args = '{\"user_id\": 1}'"
        await until(lambda: eyes.one(skipped) == 1)
        await until(lambda: eyes.one(LEFT) == 1)  # the other user is served meanwhile
        let_go.set()
        await quiet(eyes)
        assert eyes.one(LEFT) == 1
        await turn(eyes, START + 2 * PERIOD, 2)
        assert eyes.one(LEFT) == 0
    assert eyes.one(skipped) == 1
    assert eyes.one("SELECT count(*) FROM pgqueue.tick") == 2


@pytest.mark.promise("L13", "L14")
async def test_what_is_left_is_served_back_to_back_and_not_at_the_next_tick(stream: Any, dsn: str, eyes: Eyes) -> None:
    eyes.do("INSERT INTO customer VALUES (1)")
    async with work(dsn, stream.tick, stream.serve, queues=["default"]) as worker:
        await until(worker.services.election.leads)
        stalls = Stalls()
        with psycopg.connect(dsn) as conn:
            stream.arrive(conn, 1, 10 * stream.BATCH)
        with stalls:
            await until(lambda: eyes.one(LEFT) == 0)
            await quiet(eyes)
    runs = eyes.all(RUNS)
    gaps = [(later[0] - earlier[1]).total_seconds() for earlier, later in pairwise(runs)]
    print(f"{len(runs)} runs, gaps of at most {1000 * max(gaps):.0f} ms")
    assert len(runs) == 10
    assert min(gaps) >= 0 and max(gaps) - stalls.seconds < 1.0
    assert eyes.one("SELECT count(*) FROM pgqueue.job_done WHERE state = 'skipped'") == 0


@pytest.mark.second
@pytest.mark.promise("L16", "L17")
@pytest.mark.parametrize("arrivals", [300, pytest.param(10_000, marks=pytest.mark.long)])
async def test_events_that_arrive_at_any_moment_are_all_served_by_few_runs_and_never_two_of_a_user_at_once(
    arrivals: int, stream: Any, dsn: str, eyes: Eyes
) -> None:
    random = Random(arrivals)
    eyes.do("INSERT INTO customer SELECT generate_series(1, 10)")
    async with AsyncExitStack() as stack:
        for _ in range(3):
            await stack.enter_async_context(work(dsn, stream.tick, stream.serve, concurrency=4))
        conn = await stack.enter_async_context(await psycopg.AsyncConnection.connect(dsn))
        for number in range(arrivals):
            user = random.randint(1, 10)
            await conn.execute("INSERT INTO event (user_id) VALUES (%s)", [user])
            await stream.serve.aenqueue(conn, user)
            await conn.commit()
            if number % 10 == 0:
                await asyncio.sleep(random.random() / 100)
        await quiet(eyes)
    assert eyes.one(LEFT) == 0
    overlaps = """
        SELECT count(*) FROM pgqueue.job_done a JOIN pgqueue.job_done b
        ON a.id < b.id AND a.lock_key = b.lock_key AND a.state = 'completed' AND b.state = 'completed'
        AND a.started_at < b.finished_at AND b.started_at < a.finished_at
    """
    assert eyes.one(overlaps) == 0
    assert eyes.one("SELECT count(*) FROM pgqueue.job_done WHERE task = 'stream.serve'") >= arrivals


async def test_the_story_strands_events_with_skip_and_no_tick(stream: Any, dsn: str, eyes: Eyes) -> None:
    """The naive version: dropped while one runs that has looked already, and nobody comes again."""
    looked, let_go = asyncio.Event(), asyncio.Event()

    @task(name="naive", lock=Lock("user:{user_id}", on_locked="skip"), timeout=60)
    async def naive(job: Job, user_id: int) -> None:
        eyes.do("UPDATE event SET served_at = now() WHERE user_id = %s", user_id)
        looked.set()
        await let_go.wait()

    async with work(dsn, naive):
        eyes.do("INSERT INTO event (user_id) VALUES (1)")
        naive.enqueue(eyes.conn, 1)
        await looked.wait()
        eyes.do("INSERT INTO event (user_id) VALUES (1)")
        naive.enqueue(eyes.conn, 1)
        await until(lambda: eyes.one("SELECT count(*) FROM pgqueue.job_done WHERE state = 'skipped'") == 1)
        let_go.set()
        await quiet(eyes)
    assert eyes.one(LEFT) == 1
