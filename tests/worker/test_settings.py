"""What a worker was told, as it stands in the database: the tag of its version, on everything that it has run."""

from __future__ import annotations

import signal
from collections import Counter
from pathlib import Path

import pytest
from commands import items, pgqueue, working
from workers import Eyes, wait_until

TASKS = """
import asyncio, os, signal
import pgqueue

@pgqueue.task(name="ends")
async def ends() -> None: ...

@pgqueue.task(name="returns")
def returns() -> int:
    return 1

@pgqueue.task(name="writes", transactional=True)
def writes(job: pgqueue.Job) -> None:
    job.connection.execute("SELECT 1")

@pgqueue.task(name="fails", retry=pgqueue.RetryPolicy(attempts=2, first=0))
async def fails() -> None:
    raise ValueError

@pgqueue.task(name="cancels")
async def cancels() -> None:
    raise pgqueue.Cancel("not wanted")

@pgqueue.task(name="snoozes")
async def snoozes(job: pgqueue.Job) -> object:
    return None if job.snoozes else pgqueue.Snooze(0)

@pgqueue.task(name="hurries", timeout=0.05, retry=1)
async def hurries() -> None:
    await asyncio.sleep(60)

@pgqueue.task(name="sleeps")
async def sleeps() -> None:
    open("begun", "w").close()
    while not os.path.exists("go"):
        await asyncio.sleep(0.01)

@pgqueue.task(name="kills")
def kills(job: pgqueue.Job) -> None:
    if not job.crashes:
        os.kill(os.getpid(), signal.SIGKILL)
"""
NAMES = ["ends", "returns", "writes", "fails", "cancels", "snoozes", "hurries"]


@pytest.mark.second
@pytest.mark.parametrize("given", [None, "2026.12-rc1"])
@pytest.mark.promise("S05")
def test_the_version_is_pgqueues_unless_a_tag_is_given(given: str | None, tmp_path: Path, dsn: str, eyes: Eyes) -> None:
    """On what has ended in any way, on every attempt, also of one that was killed, and where workers are shown."""
    (tmp_path / "shop.py").write_text(TASKS)
    tag = given or items(pgqueue("version", "--json"))[0]["pgqueue"]
    options = [] if given is None else ["--version-tag", given]
    for name in NAMES:
        eyes.do("SELECT pgqueue.enqueue(%s)", name)
    with working("shop", *options, "--grace", "100ms", dsn=dsn, cwd=tmp_path) as worker:
        worker.says("ready")
        ended = "SELECT count(*) FROM pgqueue.job WHERE finished_at IS NOT NULL"
        wait_until(lambda: eyes.one(ended) == len(NAMES))
        [shown] = items(pgqueue("workers", "--json", dsn=dsn))
        assert shown["version_tag"] == tag
        heads, row = pgqueue("workers", dsn=dsn, COLUMNS="200").stdout.splitlines()
        assert row[heads.index("VERSION") :].split()[0] == tag
        eyes.do("SELECT pgqueue.enqueue('sleeps')")
        wait_until((tmp_path / "begun").exists)
        worker.signal(signal.SIGTERM)
        assert worker.ends() == 5
    (tmp_path / "go").touch()
    states = eyes.all("SELECT task, state, version_tag FROM pgqueue.job WHERE finished_at IS NOT NULL")
    bad = {"fails": "failed", "hurries": "failed", "cancels": "cancelled"}
    assert sorted(states) == sorted((name, bad.get(name, "completed"), tag) for name in NAMES)
    attempts = "SELECT j.task, a.outcome, a.version_tag FROM pgqueue.attempt a JOIN pgqueue.job j ON j.id = a.job_id"
    seen = eyes.all(attempts)
    assert {task for task, _, _ in seen} == {"fails", "hurries", "cancels", "snoozes", "sleeps"}
    assert Counter(task for task, _, _ in seen)["fails"] == 2
    assert {version for _, _, version in seen} == {tag}

    # What was killed has the tag of who ran it, not of who says so.
    killer = eyes.one("SELECT pgqueue.enqueue('kills')")
    with working("shop", *options, "--lease", "2s", dsn=dsn, cwd=tmp_path) as worker:
        assert worker.ends() == -signal.SIGKILL
    with working("shop", "--version-tag", "after", dsn=dsn, cwd=tmp_path):
        wait_until(eyes.is_in(killer, "completed"))
    assert eyes.all(f"{attempts} WHERE j.id = %s", killer) == [("kills", "crashed", tag)]
    assert eyes.one("SELECT version_tag FROM pgqueue.job_done WHERE id = %s", killer) == "after"
