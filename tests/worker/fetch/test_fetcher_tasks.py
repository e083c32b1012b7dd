"""A claim takes only jobs of tasks that its worker knows; the others stay, and are in no job's way."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from time import monotonic, perf_counter
from typing import Any

import psycopg
import pytest
from claim_plans import explain
from lock_desk import Desk
from statement_plans import nodes
from workers import Eyes, until

from pgqueue.database.sessions import Link
from pgqueue.database.statements import Statement

KNOWN = (
    "(j.task IN (SELECT ours.task FROM unnest(%(tasks)s::text[]) AS ours (task) WHERE NOT ours.task = "
    "ANY (ARRAY(SELECT p.name FROM pgqueue.paused_task p)))) IS TRUE"
)


class Unfiltered(Link):
    """What a naive worker sends: it takes jobs of any task."""

    NAMES: tuple[str, ...] = ("fetch_claim", "keyed_claim_move", "keyed_claim_block", "keyed_claim_lock")

    def statement(self, name: str, **params: object) -> Statement[list[tuple[Any, ...]]]:
        made = super().statement(name, **params)
        if name not in self.NAMES:
            return made
        assert KNOWN in made.sql
        return replace(made, sql=made.sql.replace(KNOWN, "true"))


class BlindReading(Unfiltered):
    """Another one: its readings see jobs of any task."""

    NAMES = ("fetch_reading", "keyed_claim_reading")


Desks = Callable[..., Desk]


@pytest.fixture
async def desks(dsn: str) -> AsyncIterator[Desks]:
    """Makes desks that know the task `mine`; closed at the end."""
    made: list[Desk] = []

    def make(link: type[Link] = Link, *names: str) -> Desk:
        made.append(Desk(dsn, link=link(dsn, "pgqueue"), tasks=names or ["mine"]))
        return made[-1]

    yield make
    for desk in made:
        await desk.close()


def put(eyes: Eyes, task: str, number: int = 1, *, priority: int = 5, lock: bool = False) -> list[int]:
    """Jobs of this task, each with a lock of its own if it has one; their ids."""
    insert = """INSERT INTO pgqueue.job (task, priority, rank, lock_key)
                SELECT %(task)s, %(p)s, 2 * %(p)s + 1, CASE WHEN %(lock)s THEN gen_random_uuid()::text END
                FROM generate_series(1, %(n)s) RETURNING id"""
    params = {"task": task, "n": number, "p": priority, "lock": lock}
    return [id for (id,) in eyes.conn.execute(insert, params).fetchall()]


async def round_of(desk: Desk, steps: int = 6) -> list[int]:
    """What some steps of the fetcher bring, and of the unblocker."""
    brought: list[int] = []
    for _ in range(steps):
        desk.jobs.clear()
        if desk.fetcher.hungry(desk.queues):
            await desk.fetcher._step()
        brought += [job.id for job in desk.jobs]
        brought += [job.id for job in await desk.let_in()]
    return sorted(brought)


@pytest.mark.promise("F18")
@pytest.mark.parametrize("lock", [False, True])
@pytest.mark.parametrize("link", [Link, Unfiltered])
async def test_what_a_worker_does_not_know_stays_available(
    desks: Desks, eyes: Eyes, link: type[Link], lock: bool
) -> None:
    others = put(eyes, "other", 3, lock=lock)
    mine = put(eyes, "mine", 2, lock=lock) + put(eyes, "alias", lock=lock)
    others += put(eyes, "other", lock=lock)
    desk = desks(link, "mine", "alias")
    found = await round_of(desk)
    if link is Link:
        assert found == sorted(mine)
        assert [id for (id,) in eyes.all("SELECT id FROM pgqueue.job_available ORDER BY id")] == sorted(others)
        assert eyes.states() == {"available": 4, "running": 3}
    else:
        assert eyes.one("SELECT count(*) FROM pgqueue.job WHERE task = 'other' AND state <> 'available'") > 0


@pytest.mark.promise("F18")
@pytest.mark.parametrize("lock", [False, True])
async def test_a_worker_that_knows_them_takes_them_whatever_others_have_passed(
    desks: Desks, eyes: Eyes, lock: bool
) -> None:
    others, mine = put(eyes, "other", 5, lock=lock), put(eyes, "mine", 5, lock=lock)
    one, other = desks(), desks(Link, "other")
    assert await round_of(one) == mine
    assert await round_of(one) == []
    assert await round_of(other) == others
    later = put(eyes, "other", lock=lock)
    for desk in (one, other):
        desk.fetcher.wake()
    assert await round_of(one) == []
    assert await round_of(other) == later


@pytest.mark.promise("F18")
@pytest.mark.parametrize("lock", [False, True])
async def test_long_rows_for_few_keys_block_only_what_is_known(desks: Desks, eyes: Eyes, lock: bool) -> None:
    """A claim that blocks many jobs of a key ahead leaves those of other tasks where they are."""
    eyes.do(
        "INSERT INTO pgqueue.job (task, lock_key) "
        "SELECT CASE WHEN n % 2 = 0 THEN 'mine' ELSE 'other' END, 'k' FROM generate_series(1, 400) n"
    )
    desk = desks()
    desk.fetcher.keyed_claim.long_rows = lock
    await round_of(desk, 8)
    assert eyes.all("SELECT DISTINCT task FROM pgqueue.job_available") == [("other",)]
    assert eyes.states() == {"available": 200, "running": 1, "blocked": 199}


@pytest.mark.promise("F18")
@pytest.mark.parametrize("keyed_first", [False, True])
@pytest.mark.parametrize("link", [Link, BlindReading])
async def test_an_unknown_job_at_the_head_of_one_kind_does_not_hold_the_other_back(
    desks: Desks, eyes: Eyes, link: type[Link], keyed_first: bool
) -> None:
    """The first fetch of the kind that is not in front: the naive reading has it ask no lane of a lower priority."""
    desk = desks(link)
    kind = desk.fetcher.kinds.plain if keyed_first else desk.fetcher.kinds.keyed
    put(eyes, "other", priority=0, lock=keyed_first)
    mine = put(eyes, "mine", priority=9, lock=not keyed_first)
    desk.fetcher.keyed_claim.left = 10
    desk.jobs.clear()
    await desk.fetcher._fetch(desk.fetcher._capacity.to_fetch()[0], kind)
    assert [job.id for job in desk.jobs] == (mine if link is Link else [])


@pytest.mark.promise("F18")
async def test_a_reading_passes_jobs_with_keys_of_other_tasks_once(desks: Desks, eyes: Eyes) -> None:
    """Else each reading would walk them, as long as there are plain jobs."""
    desk = desks()
    await round_of(desk)
    put(eyes, "other", 50, lock=True)
    put(eyes, "mine", 20)
    desk.fetcher.wake()
    desk.room = 10
    await desk.fetcher._step()
    assert desk.fetcher.watermark.cursors([("default", 11, True)]) == [70]
    assert desk.fetcher.kinds.keyed.known == {"default"}


async def test_a_reading_passes_them_also_where_a_job_of_ours_lies_behind(desks: Desks, eyes: Eyes) -> None:
    """That one waits for more urgent plain jobs: meanwhile each reading would walk what lies before it."""
    desk = desks()
    await round_of(desk)
    put(eyes, "other", 50, lock=True)
    [mine] = put(eyes, "mine", lock=True)
    put(eyes, "mine", 20, priority=1)
    desk.fetcher.wake()
    desk.room = 10
    await desk.fetcher._step()
    assert {job.priority for job in desk.jobs} == {1}
    assert desk.fetcher.watermark.cursors([("default", 11, True)]) == [50]
    assert mine in await round_of(desk, 8)


@pytest.mark.promise("F18")
async def test_a_row_of_another_task_is_not_taken_for_one_that_was_passed_over(desks: Desks, eyes: Eyes) -> None:
    desk = desks()
    put(eyes, "other", 5)
    put(eyes, "other", 5, lock=True)
    await round_of(desk)
    over = desk.fetcher.passed_over
    await until(lambda: over.to_read(monotonic()) != [])
    await desk.fetcher._look(desk.fetcher._capacity.to_fetch())
    assert not over.remembers


@pytest.mark.promise("F18")
async def test_the_poison_lane_is_judged_by_task_too(desks: Desks, eyes: Eyes) -> None:
    poison = "INSERT INTO pgqueue.job (task, rank, crashes) VALUES (%s, -1, 2) RETURNING id"
    eyes.one(poison, "other")
    mine = eyes.one(poison, "mine")
    desk = desks()
    assert await round_of(desk) == [mine]
    look = desk.link.statement("poison_jobs_waiting", queues=["default"], tasks=["mine"], seconds=60.0)
    assert await desk.session.run(look) == [[]]
    look = desk.link.statement("poison_jobs_waiting", queues=["default"], tasks=["other"], seconds=60.0)
    [[(found, _)]] = await desk.session.run(look)
    assert found is not None


@pytest.mark.promise("F18")
async def test_the_tasks_are_hashed_whatever_the_plan(desks: Desks, eyes: Eyes, conn: psycopg.Connection) -> None:
    put(eyes, "other", 2000)
    put(eyes, "mine", 100)
    desk = desks(Link, "mine", *(f"task.{number}" for number in range(299)))
    plan = explain(conn, desk)
    filters = [
        str(node["Filter"])
        for node in nodes(plan)
        if "task" in str(node.get("Filter")) and node.get("Relation Name") == "job_available"
    ]
    assert filters
    assert all("hashed SubPlan" in each for each in filters), filters


@pytest.mark.second
@pytest.mark.promise("F18")
async def test_beside_100000_jobs_of_unknown_tasks_a_worker_takes_its_own_in_twice_the_time(
    desks: Desks, eyes: Eyes
) -> None:
    async def seconds(desk: Desk) -> float:
        took = []
        for _ in range(5):
            put(eyes, "mine", 1000)
            began = perf_counter()
            desk.fetcher.wake()
            desk.jobs.clear()
            desk.room = 100
            while len(desk.jobs) < 1000:
                await desk.fetcher._step()
            took.append(perf_counter() - began)
            eyes.do("DELETE FROM pgqueue.job_running")
        return sorted(took)[2]

    alone = await seconds(desks())
    put(eyes, "other", 100_000)
    beside = await seconds(desks())
    assert beside <= 2 * alone + 0.05, (alone, beside)
