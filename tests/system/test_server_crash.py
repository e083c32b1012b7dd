"""A server that crashes right after jobs have started forgets no holder of a key: no two jobs of one key run at once.

The crash comes 0 to 100 ms after jobs started, so also before the server would have written a commit by itself. Its log
writer sleeps for 10 s here, so only what was durable by its own commit survives. The jobs fill the slots of the worker
that has claimed them first. So if the server forgets a claim, it is the other worker that claims the job.

Whether two jobs overlap then is a race: the first worker stops a job as soon as it hears that the row is gone. But the
job begins a second time in any case. Its first worker lives on, so no other crash makes a job begin twice.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psycopg
import pytest
from servers import embedded_server
from workers import Workers, wait_until, workers

from pgqueue.database import migrations

TASKS = """
@pgqueue.task(name="crash.lock", lock="{key}")
async def lock(job: pgqueue.Job, key: str, seconds: float) -> None:
    await run(key, job, seconds)

@pgqueue.task(name="crash.limit", limit=1)
async def limit(job: pgqueue.Job, key: str, seconds: float) -> None:
    await run(key, job, seconds)

async def run(key, job, seconds):
    say("began", key=key, job=job.id)
    try:
        await asyncio.sleep(seconds)
    finally:
        say("over", key=key, job=job.id)
"""
KEYS = 8
LONG, SHORT = 2.0, 0.004
"""Seconds a job runs: past the restart of the server; or so short that many jobs of a key come as a chain."""
TRIALS, LATEST = 4, 0.1
ENQUEUE = """
    INSERT INTO pgqueue.job (task, args, lock_key, limit_key)
    SELECT 'crash.lock', jsonb_build_object('key', key, 'seconds', seconds), key, NULL
    FROM unnest(%s::text[], %s::float8[]) AS asked (key, seconds)
    UNION ALL SELECT 'crash.limit', jsonb_build_object('key', 'limit', 'seconds', seconds), NULL, 'crash.limit'
    FROM unnest(%s::float8[]) AS limited (seconds)
"""

LEFT = "SELECT FROM pgqueue.job WHERE state NOT IN ('completed', 'failed') LIMIT 1"


def enqueue(dsn: str, trial: int) -> int:
    """Two jobs for each of some keys, and two jobs of a limit. How many there are.

    In every second trial also a long waiting queue of short jobs of one key. Not in each: their ends write the log out,
    so all that was committed before is durable then.
    """
    asked = [(f"{trial}-{n}", seconds) for seconds in (LONG, SHORT) for n in range(KEYS)]
    asked += [(f"{trial}-short", SHORT)] * (60 * (trial % 2))
    with psycopg.connect(dsn) as conn:
        conn.execute("SET LOCAL synchronous_commit = on")
        conn.execute(ENQUEUE, [[key for key, _ in asked], [seconds for _, seconds in asked], [LONG, SHORT]])
    return len(asked) + 2


def overlaps(events: Iterable[dict[str, Any]]) -> list[tuple[str, int, int]]:
    """(key, job, job) where the second began before the first was over."""
    found: list[tuple[str, int, int]] = []
    running: defaultdict[str, dict[int, int]] = defaultdict(dict)
    for event in sorted(events, key=lambda event: event["at"]):
        runs = running[event["key"]]
        if event["event"] == "began":
            found += [(event["key"], other, event["job"]) for other in runs]
            runs[event["job"]] = runs.get(event["job"], 0) + 1
        else:
            runs[event["job"]] -= 1
            if not runs[event["job"]]:
                del runs[event["job"]]
    return found


def events(made: Workers) -> list[dict[str, Any]]:
    return [event for process in made.all for event in list(process.events) if event["event"] in ("began", "over")]


@pytest.mark.second
@pytest.mark.promise("F27")
@pytest.mark.parametrize("durability", ["on", "off"])
def test_a_crash_of_the_server_lets_no_two_jobs_of_a_key_run_at_once(durability: str, tmp_path: Path) -> None:
    """With the server's `synchronous_commit` off it holds, too."""
    server = embedded_server(wal_writer_delay="10s", wal_writer_flush_after="1GB", synchronous_commit=durability)
    try:
        dsn = server.dsn("postgres")
        migrations.migrate(dsn)
        with workers(tmp_path, dsn, TASKS) as made:
            made.ready(2, concurrency=KEYS + 1, poll=1.0)
            jobs = 0
            for trial in range(TRIALS):
                before = len(events(made))
                jobs += enqueue(dsn, trial)
                wait_until(lambda before=before: len(events(made)) > before)  # type: ignore[misc]
                time.sleep(trial * LATEST / (TRIALS - 1))  # so long after the start the server crashes
                server.restart("immediate")
                with psycopg.connect(dsn, autocommit=True) as conn:
                    wait_until(lambda conn=conn: conn.execute(LEFT).fetchone() is None)  # type: ignore[misc]
            for process in made.all:
                assert process.stop() == 0, process.written()
            found = events(made)
        assert overlaps(found) == []
        began = Counter(event["job"] for event in found if event["event"] == "began")
        assert (len(began), began.most_common(1)[0][1]) == (jobs, 1), "a claim was forgotten: its job began again"
    finally:
        server.end()


def test_the_account_of_overlaps_finds_one() -> None:
    def event(name: str, key: str, job: int, at: float) -> dict[str, Any]:
        return {"event": name, "key": key, "job": job, "at": at}

    apart = [event("began", "a", 1, 1), event("over", "a", 1, 2), event("began", "a", 2, 3), event("began", "b", 3, 3)]
    assert overlaps(apart) == []
    assert overlaps([*apart, event("began", "a", 4, 4)]) == [("a", 2, 4)]
    assert overlaps([*apart, event("began", "b", 3, 4)]) == [("b", 3, 3)]
