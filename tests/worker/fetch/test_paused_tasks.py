"""A paused task: no job of it starts, in whichever way jobs start; on resume all of them start at once."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import psycopg
import pytest
from lock_desk import Desk
from workers import Eyes, until, work

import pgqueue
from pgqueue.client.tasks import task
from pgqueue.database.sessions import Link
from pgqueue.database.statements import Statement
from pgqueue.worker.fetch.paused_tasks import PausedTasks

ran: list[str] = []


@task(name="paused.plain")
async def plain(name: str = "plain") -> None:
    ran.append(name)


@task(name="paused.other")
async def other(name: str = "other") -> None:
    ran.append(name)


@task(name="paused.locked", lock="key")
async def locked(name: str = "locked") -> None:
    ran.append(name)


@task(name="paused.limited", limit=pgqueue.Limit(2, name="paused.few"))
async def limited(name: str = "limited") -> None:
    ran.append(name)


@task(name="paused.rated", rate=pgqueue.Rate("1000/s", name="paused.rate"))
async def rated(name: str = "rated") -> None:
    ran.append(name)


KINDS = {"plain": plain, "locked": locked, "limited": limited, "rated": rated}


@pytest.fixture(autouse=True)
def clear() -> None:
    ran.clear()


class Deaf(PausedTasks):
    """The naive version: its claims wait to be told, and look behind their cursors."""

    def answered(self, read: Any, claimed: Any) -> bool:
        super().answered(read, claimed)
        return False

    def reopened(self, paused: Any) -> bool:
        return False


Desks = Callable[..., Desk]


@pytest.fixture
async def desks(dsn: str) -> AsyncIterator[Desks]:
    made: list[Desk] = []

    def make(*names: str, link: type[Link] = Link) -> Desk:
        made.append(Desk(dsn, link=link(dsn, "pgqueue"), tasks=names))
        return made[-1]

    yield make
    for desk in made:
        await desk.close()


def put(eyes: Eyes, name: str, number: int = 1, **columns: Any) -> list[int]:
    named = ", ".join(columns)
    values = ", ".join(f"%({column})s" for column in columns)
    insert = f"""INSERT INTO pgqueue.job (task{", " * bool(columns)}{named})
                 SELECT %(task)s{", " * bool(columns)}{values} FROM generate_series(1, %(n)s) RETURNING id"""  # noqa: S608  # columns of this file
    return [id for (id,) in eyes.conn.execute(insert.encode(), columns | {"task": name, "n": number}).fetchall()]


def pause(dsn: str, name: str) -> None:
    with psycopg.connect(dsn) as conn:
        assert pgqueue.pause(conn, task=name)


def resume(dsn: str, name: str) -> None:
    with psycopg.connect(dsn) as conn:
        assert pgqueue.resume(conn, task=name)


# With a whole worker -------------------------------------------------------------------------------------------------


@pytest.mark.promise("F110")
@pytest.mark.each_value
@pytest.mark.parametrize("notify", [True, False])
@pytest.mark.parametrize("kind", KINDS)
async def test_a_paused_task_starts_no_job_and_all_of_them_on_resume(
    kind: str, notify: bool, dsn: str, eyes: Eyes, monkeypatch: pytest.MonkeyPatch
) -> None:
    paused = KINDS[kind]
    pause(dsn, paused.name)
    monkeypatch.setenv("PGQUEUE_NOTIFY", "on" if notify else "off")
    async with work(dsn, *KINDS.values(), other, poll=60.0 if notify else 0.2, concurrency=5):
        with psycopg.connect(dsn) as conn:
            pgqueue.enqueue_many(conn, [paused.new(str(n)) for n in range(5)] + [other.new()])
        await until(lambda: "other" in ran)
        with psycopg.connect(dsn) as conn:  # another fetch, behind the paused ones
            pgqueue.enqueue(conn, other, "again")
        await until(lambda: "again" in ran)
        assert eyes.one("SELECT count(*) FROM pgqueue.job WHERE task = %s AND state = 'available'", paused.name) == 5
        resume(dsn, paused.name)
        await until(lambda: len(ran) == 7, 20.0)
    assert sorted(ran) == ["0", "1", "2", "3", "4", "again", "other"]


@pytest.mark.promise("F110")
async def test_blocked_jobs_of_a_paused_task_get_no_key_and_those_of_others_do(dsn: str, eyes: Eyes) -> None:
    """A job that waited for the lock when its task was paused leaves it to those behind it."""
    with psycopg.connect(dsn) as conn:
        first = pgqueue.enqueue(conn, locked, "first")
        conn.execute(
            "INSERT INTO pgqueue.job_blocked (state, id, task, lock_key, key, holds) VALUES "
            "('blocked', nextval('pgqueue.job_id_seq'), 'paused.plain', 'key', 'lock:key', false)"
        )
    pause(dsn, "paused.plain")
    async with work(dsn, plain, locked, poll=60.0):
        await until(lambda: eyes.one("SELECT state FROM pgqueue.job WHERE id = %s", first.id) == "completed")
        assert eyes.states() == {"completed": 1, "blocked": 1}
        resume(dsn, "paused.plain")
        await until(lambda: eyes.states() == {"completed": 2})


# Step by step --------------------------------------------------------------------------------------------------------


@pytest.mark.promise("F110")
@pytest.mark.parametrize("cursors", [PausedTasks, Deaf])
async def test_jobs_behind_the_cursors_are_found_when_their_task_is_resumed(
    cursors: type[PausedTasks], desks: Desks, dsn: str, eyes: Eyes
) -> None:
    desk = desks("mine", "ours")
    desk.fetcher.paused_tasks = cursors()
    pause(dsn, "mine")
    mine = put(eyes, "mine", 3)
    put(eyes, "ours")
    assert [job.task for job in await desk.fetch()] == ["ours"]
    put(eyes, "ours")
    assert [job.task for job in await desk.fetch()] == ["ours"]
    resume(dsn, "mine")
    found = [job.id for job in await desk.fetch()] + [job.id for job in await desk.fetch()]
    assert found == (mine if cursors is PausedTasks else [])


between = False


class PausedBetween(Link):
    """If `between`, the task is paused after the reading of a fetch and before its claim."""

    def statement(self, name: str, **params: object) -> Statement[list[tuple[Any, ...]]]:
        made = super().statement(name, **params)
        if name == "fetch_claim" and between:
            # As if another session had committed it in between: this statement alone sees it.
            return replace(made, sql=made.sql.replace("pgqueue.paused_task", "(SELECT 'mine' AS name)"))
        return made


@pytest.mark.promise("F110")
async def test_a_pause_that_only_the_claim_has_seen_is_remembered(
    desks: Desks, eyes: Eyes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is over before the next reading, which therefore never saw it."""
    desk = desks("mine", link=PausedBetween)
    mine = put(eyes, "mine", 2)
    monkeypatch.setitem(globals(), "between", True)
    assert await desk.fetch() == []
    monkeypatch.setitem(globals(), "between", False)
    found = [job.id for job in await desk.fetch()] + [job.id for job in await desk.fetch()]
    assert found == mine


@pytest.mark.promise("F110")
def test_what_is_remembered_of_pauses() -> None:
    tasks = PausedTasks()
    assert not tasks.answered(["a"], ["a"])
    assert not tasks.answered(["a", "b"], ["a"])
    assert not tasks.reopened(["a", "b", "c"]) and tasks.reopened(["a"])
    assert tasks.answered(["a"], ["a", "b"])  # b was open for the reading, and is paused again for the claim
    assert tasks.passed == {"a", "b"}
    assert tasks.answered([], []) and not tasks.answered([], [])


@pytest.mark.promise("F110")
async def test_what_was_granted_to_a_paused_task_is_taken_back(desks: Desks, dsn: str, eyes: Eyes) -> None:
    desk = desks("mine", "ours")
    put(eyes, "mine", lock_key="k", holds=True)
    put(eyes, "ours", lock_key="k")
    pause(dsn, "mine")
    assert await desk.take() == []
    assert len(await desk.sweep()) == 1
    assert eyes.one("SELECT count(*) FROM pgqueue.job WHERE task = 'ours' AND state = 'running'") == 1
    assert eyes.one("SELECT state FROM pgqueue.job WHERE task = 'mine'") == "blocked"
    assert eyes.one("SELECT count(*) FROM pgqueue.job WHERE task = 'mine' AND holds") == 0


@pytest.mark.promise("F110")
async def test_poison_jobs_of_a_paused_task_wait_too(desks: Desks, dsn: str, eyes: Eyes) -> None:
    desk = desks("mine")
    put(eyes, "mine", crashes=1, rank=-2)
    put(eyes, "mine", crashes=2, rank=-1)
    pause(dsn, "mine")
    assert await desk.fetch() == []
    waiting = desk.link.statement("poison_jobs_waiting", queues=["default"], tasks=["mine"], seconds=5)
    assert await desk.session.run(waiting) == [[]]
    resume(dsn, "mine")
    [[(_, key)]] = await desk.session.run(waiting)
    assert key is None


@pytest.mark.promise("F110")
def test_a_test_that_drains_runs_no_job_of_a_paused_task(dsn: str) -> None:
    from pgqueue.testing import drain

    with psycopg.connect(dsn) as conn:
        pgqueue.enqueue(conn, plain)
        pgqueue.enqueue(conn, limited)
        pgqueue.enqueue(conn, other)
        pgqueue.pause(conn, task=plain.name)
        pgqueue.pause(conn, task=limited.name)
        drain(conn)
        assert ran == ["other"]
        pgqueue.resume(conn, task=plain.name)
        pgqueue.resume(conn, task=limited.name)
        drain(conn)
        assert sorted(ran) == ["limited", "other", "plain"]
        conn.rollback()


@pytest.mark.promise("F110")
async def test_a_paused_task_that_no_worker_knows_is_no_unknown_task(desks: Desks, dsn: str, eyes: Eyes) -> None:
    desk = desks("ours")
    put(eyes, "mine")
    pause(dsn, "mine")
    look = desk.link.statement(
        "unknown_tasks_look", after=0, n=10, seconds=0, worker_id=desk.worker_id, version_tag="t", notify=False
    )
    await desk.session.run(look)
    assert eyes.states() == {"available": 1} and eyes.one("SELECT count(*) FROM pgqueue.unknown_task") == 0
    resume(dsn, "mine")
    await desk.session.run(look)
    assert eyes.states() == {"failed": 1}
