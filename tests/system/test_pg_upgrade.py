"""pg_upgrade to another major version, as docs/operations.md says it: jobs of each state go on, keys stay held."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psycopg
import pytest
from servers import memory
from workers import Eyes, until, work, workers

import pgqueue
from pgqueue import Job, RetryPolicy, task
from pgqueue.database import embedded, migrations
from pgqueue.errors import Error

pytestmark = [pytest.mark.long, pytest.mark.promise("F122")]

NEWEST = 18
SETTINGS = {"fsync": "off", "full_page_writes": "off", "shared_buffers": "32MB", "max_connections": "60"}
seen: list[tuple[int, int]] = []

HANGS = """
@pgqueue.task(name="upgrade.locked", lock="k", timeout=60)
async def locked():
    say("runs")
    await asyncio.sleep(60)
"""


@task(name="upgrade.ends")
async def ends() -> None: ...


@task(name="upgrade.fails", retry=1)
async def fails() -> None:
    raise RuntimeError("it always does")


@task(name="upgrade.locked", lock="k", timeout=60)
async def locked() -> None: ...


@task(name="upgrade.iterates", retry=RetryPolicy(attempts=3, first=8, most=8))
def iterates(job: Job) -> None:
    """Fails at its third item, and goes on there: on the new server, for the old one's worker ends by then."""
    for batch in job.iterate(lambda cursor: ((n, n) for n in range((cursor or 0) + 1, 6)), 1):
        seen.append((job.attempt, batch[0]))
        if seen[-1] == (1, 3):
            raise RuntimeError("not this one")


def binaries(version: int) -> Path:
    """The server programs of a version, with pg_upgrade."""
    try:
        found = embedded.wheel_binaries(version)
    except Error:
        found = Path(f"/usr/lib/postgresql/{version}/bin")
    if not (found / "pg_upgrade").exists():
        pytest.skip(f"there is no pg_upgrade of PostgreSQL {version} here")
    return found


@pytest.fixture
def directory() -> Iterator[Path]:
    """A short path, for sockets; the account that runs the servers may pass it."""
    with tempfile.TemporaryDirectory(prefix="pgqueue-upgrade-", dir=memory()) as path:
        yield Path(path)


def upgrade(old: embedded.Embedded, new: embedded.Embedded) -> None:
    """Stop both servers, bring the data of the old one to the new one, and start that."""
    old.cluster.stop()
    new.cluster.stop()
    old.cluster.run("pg_checksums", "--enable", "-D", str(old.cluster.data))  # the default of 18
    new.cluster.run(
        "pg_upgrade",
        *("-b", str(old.bin_path), "-B", str(new.bin_path)),
        *("-d", str(old.cluster.data), "-D", str(new.cluster.data), "-U", "postgres"),
    )
    new.cluster.start()


def start(version: int, directory: Path) -> embedded.Embedded:
    return embedded.start(directory, bin_path=binaries(version), settings=SETTINGS)


def rows(dsn: str) -> list[tuple[object, ...]]:
    """What must be there after the upgrade as it was before: jobs, keys, schedules, places, and the sequences."""
    with psycopg.connect(dsn) as conn:
        return [
            row
            for sql in (
                "SELECT id, state, task, attempt, lock_key, unique_key, enqueued_at FROM pgqueue.job ORDER BY 1",
                "SELECT key, job_id, hold, enqueued_at FROM pgqueue.unique_key ORDER BY key",
                "SELECT name, next_at FROM pgqueue.schedule ORDER BY name",
                "SELECT job_id, cursor::text FROM pgqueue.job_cursor ORDER BY 1",
                "SELECT sequencename, last_value FROM pg_sequences WHERE schemaname = 'pgqueue' ORDER BY 1",
            )
            for row in conn.execute(sql.encode()).fetchall()
        ]


def end_while_it_runs(dsn: str, directory: Path) -> None:
    """A worker process takes the job with the lock, and is killed while it runs it."""
    with workers(directory, dsn, HANGS) as made:
        process = made.start(lease=2.0)
        process.event("runs")
        process.kill()


async def make_jobs(dsn: str, directory: Path) -> dict[str, int]:
    """Jobs of each state, by what they are. No worker is left."""
    eyes = Eyes(dsn)
    with psycopg.connect(dsn) as conn:
        made = {"completed": ends.enqueue(conn), "failed": fails.enqueue(conn), "iterates": iterates.enqueue(conn)}
    async with work(dsn, ends, fails, iterates):
        await until(lambda: eyes.one("SELECT count(*) FROM pgqueue.job WHERE state IN ('completed', 'failed')") == 2)
        await until(lambda: (1, 3) in seen)
    with psycopg.connect(dsn) as conn:
        made["running"] = locked.enqueue(conn)
    await asyncio.to_thread(end_while_it_runs, dsn, directory)
    with psycopg.connect(dsn) as conn:
        made["blocked"] = locked.enqueue(conn)
        made["scheduled"] = ends.using(delay=3).enqueue(conn)
        made["unique"] = ends.using(unique="u", delay=3600).enqueue(conn)
        made["requested"] = ends.using(idempotency_key="r").enqueue(conn)
        made["cancelled"] = ends.enqueue(conn)
        pgqueue.cancel(conn, made["cancelled"].id)
        pgqueue.schedules.add(conn, "often", pgqueue.Every(1), ends)
    states = dict(eyes.all("SELECT state, count(*) FROM pgqueue.job GROUP BY 1"))
    assert states["running"] == states["failed"] == states["cancelled"] == 1, states
    eyes.close()
    return {name: handle.id for name, handle in made.items()}


async def goes_on(dsn: str, ids: dict[str, int]) -> None:
    """What waited or ran ends, from where it was; keys are held, the schedule ticks, new ids are new."""
    with psycopg.connect(dsn) as conn:
        unique = ends.using(unique="u").enqueue(conn)
        assert (unique.id, unique.created) == (ids["unique"], False)
        requested = ends.using(idempotency_key="r").enqueue(conn)
        assert (requested.id, requested.created) == (ids["requested"], False)
        assert ends.enqueue(conn).id > max(ids.values())
        [again] = pgqueue.retry(conn, ids["cancelled"])
        assert again.did == "retried"
    eyes = Eyes(dsn)
    finished = [id for name, id in ids.items() if name not in ("failed", "unique")]
    count = "SELECT count(*) FROM pgqueue.job WHERE state = 'completed' AND id = ANY (%s)"
    async with work(dsn, ends, fails, locked, iterates):
        await until(lambda: eyes.one(count, finished) == len(finished))
        await until(
            lambda: eyes.one("SELECT count(*) > 2 FROM pgqueue.job WHERE (headers ->> 'pgqueue:schedule') = 'often'")
        )
    assert seen == [(1, 1), (1, 2), (1, 3), (2, 3), (2, 4), (2, 5)]
    [error] = eyes.all("SELECT state, reason FROM pgqueue.job WHERE id = %s", ids["failed"])
    assert error == ("failed", "error")
    eyes.close()


@pytest.mark.parametrize("version", [15, 16])
async def test_jobs_of_each_state_go_on_after_pg_upgrade(version: int, directory: Path, tmp_path: Path) -> None:
    seen.clear()
    with ExitStack() as stack:
        old = await asyncio.to_thread(start, version, directory / "old")
        stack.callback(old.stop)
        await asyncio.to_thread(migrations.migrate, old.dsn)
        ids = await make_jobs(old.dsn, tmp_path)
        before = list(rows(old.dsn))
        new = await asyncio.to_thread(start, NEWEST, directory / "new")
        stack.callback(new.stop)
        await asyncio.to_thread(upgrade, old, new)
        assert rows(new.dsn) == before
        assert await asyncio.to_thread(migrations.migrate, new.dsn) == []
        await goes_on(new.dsn, ids)
