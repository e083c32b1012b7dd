"""Which job gets a key is judged by task, too: what no live worker knows keeps no key and holds up no line."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest
from lock_desk import Desk
from rate_desk import RATED, Pacer
from workers import Eyes

from pgqueue.database.sessions import Link
from pgqueue.database.statements import Statement
from pgqueue.worker.liveness.rescue import Rescue

SERVED = re.compile(
    r"\((\w+\.)?queue, (?:\w+\.)?task\) IN \(SELECT (\w)\.queue, \2\.task FROM (?:pgqueue\.served\(\)|known) AS \2\)"
)


class ByQueue(Link):
    """What a naive worker sends: a worker of the queue serves all that is in it."""

    def statement(self, name: str, **params: object) -> Statement[list[tuple[Any, ...]]]:
        made = super().statement(name, **params)
        return replace(made, sql=SERVED.sub(r"\1queue IN (SELECT s.queue FROM pgqueue.served() AS s)", made.sql))


BOTH = pytest.mark.parametrize("link", [Link, ByQueue])
Desks = Callable[..., Desk]


@pytest.fixture
async def desks(dsn: str) -> AsyncIterator[Desks]:
    """Makes desks that know these tasks; closed at the end."""
    made: list[Desk] = []

    def make(*names: str, link: type[Link] = Link) -> Desk:
        made.append(Desk(dsn, link=link(dsn, "pgqueue"), tasks=names))
        return made[-1]

    yield make
    for desk in made:
        await desk.close()


def put(eyes: Eyes, task: str, **columns: Any) -> int:
    columns = {"task": task} | columns
    places = ", ".join(["%s"] * len(columns))
    insert = f"INSERT INTO pgqueue.job ({', '.join(columns)}) VALUES ({places}) RETURNING id"  # noqa: S608
    found: int = eyes.one(insert, *columns.values())
    return found


def waiting(eyes: Eyes, task: str, key: str = "lock:k", **columns: Any) -> int:
    """A job of this task in a line, where a worker put it that is not there any more."""
    kind, _, name = key.partition(":")
    return put(eyes, task, **({"state": "blocked", "key": key, f"{kind}_key": name} | columns))


def running(desk: Desk) -> list[int]:
    return sorted(job.id for job in desk.jobs)


# Locks ---------------------------------------------------------------------------------------------------------------


@pytest.mark.promise("F18", "L09")
@BOTH
@pytest.mark.parametrize("short", [False, True])
async def test_the_head_of_a_line_whose_task_no_worker_knows_is_passed_over(
    desks: Desks, eyes: Eyes, link: type[Link], short: bool
) -> None:
    unknown, mine = waiting(eyes, "other"), waiting(eyes, "mine")
    desk = desks("mine", link=link)
    desk.admit.blocked({"lock:k": ()}, ["lock:k"] if short else [])
    await desk.let_in()
    if link is Link:
        assert running(desk) == [mine]
        assert eyes.state(unknown) == "blocked"
    else:
        assert eyes.all("SELECT id, state FROM pgqueue.job WHERE holds") == [(unknown, "available")]


@pytest.mark.promise("F18")
async def test_the_head_that_another_worker_knows_is_granted_to_that_one(desks: Desks, eyes: Eyes) -> None:
    theirs, mine = waiting(eyes, "other"), waiting(eyes, "mine")
    desk, other = desks("mine"), desks("other")
    desk.admit.blocked({"lock:k": ()})
    assert await desk.let_in() == []
    assert eyes.all("SELECT id, state FROM pgqueue.job WHERE holds") == [(theirs, "available")]
    assert await desk.take() == []
    assert await other.take() == [theirs]
    await other.complete(*other.jobs)
    await other.let_in()
    assert eyes.all("SELECT id, state FROM pgqueue.job WHERE holds") == [(mine, "available")]
    desk.fetcher.wake()
    assert await desk.take() == [mine]


@pytest.mark.promise("F18")
async def test_a_chain_ends_before_a_job_that_this_worker_does_not_know(desks: Desks, eyes: Eyes) -> None:
    first, second, unknown, last = (waiting(eyes, task) for task in ("mine", "mine", "other", "mine"))
    desk = desks("mine")
    desk.behind = 7
    desk.admit.blocked({"lock:k": ()}, ["lock:k"])
    await desk.let_in()
    assert sorted(id for (id,) in eyes.all("SELECT id FROM pgqueue.job_running")) == [first, second]
    assert sorted(id for (id,) in eyes.all("SELECT id FROM pgqueue.job_blocked")) == [unknown, last]


@pytest.mark.promise("F18")
@BOTH
async def test_a_grant_of_a_task_that_no_worker_knows_is_blocked_again_and_others_get_the_key(
    desks: Desks, eyes: Eyes, link: type[Link]
) -> None:
    granted = put(eyes, "other", lock_key="k", holds=True, rank=10)
    mine = waiting(eyes, "mine")
    desk = desks("mine", link=link)
    found = await desk.sweep()
    if link is Link:
        assert found == [mine]
        assert eyes.all("SELECT id, key, holds FROM pgqueue.job_blocked") == [(granted, "lock:k", False)]
    else:
        assert found == []


@pytest.mark.promise("F18")
@BOTH
async def test_one_that_keeps_its_lock_while_it_waits_for_a_limit_gives_it_up(
    desks: Desks, eyes: Eyes, link: type[Link]
) -> None:
    stuck = waiting(eyes, "other", "limit:l", lock_key="k", holds=True)
    kept = waiting(eyes, "mine", "limit:l", lock_key="j", holds=True)
    mine = waiting(eyes, "mine")
    desk = desks("mine", link=link)
    found = await desk.sweep()
    if link is Link:
        assert found == [mine]
        assert eyes.all("SELECT id, key, holds FROM pgqueue.job_blocked ORDER BY id") == [
            (stuck, "lock:k", False),
            (kept, "limit:l", True),
        ]
    else:
        assert found == []


@pytest.mark.promise("F18")
@BOTH
async def test_a_rescued_holder_whose_task_no_live_worker_knows_gives_its_key_up(
    desks: Desks, eyes: Eyes, link: type[Link]
) -> None:
    victim, desk = desks("other", "mine"), desks("mine", link=link)
    lost, kept = put(eyes, "other", lock_key="k"), put(eyes, "mine", lock_key="j")
    assert await victim.take() == [lost, kept]
    mine = waiting(eyes, "mine")
    plain = put(eyes, "other")
    await victim.fetch()
    rescue = Rescue(desk.session, notify=False, rescued=lambda: None)
    [[beat]] = eyes.all("SELECT beat FROM pgqueue.worker WHERE id = %s", victim.worker_id)
    assert await rescue.rescue(victim.worker_id, beat)
    assert eyes.state(plain) == "available"
    assert eyes.all("SELECT state, holds FROM pgqueue.job WHERE id = %s", kept) == [("available", True)]
    assert eyes.all("SELECT state, holds FROM pgqueue.job WHERE id = %s", lost) == (
        [("blocked", False)] if link is Link else [("available", True)]
    )
    if link is Link:
        assert await desk.sweep() == [mine]


# Limits --------------------------------------------------------------------------------------------------------------


def allow(eyes: Eyes, n: int) -> None:
    eyes.do("INSERT INTO pgqueue.key_limit (name, n, set_at) VALUES ('k', %s, pgqueue.now())", n)


@pytest.mark.promise("F18")
@BOTH
async def test_the_line_of_a_limit_passes_over_what_no_worker_knows(desks: Desks, eyes: Eyes, link: type[Link]) -> None:
    allow(eyes, 2)
    unknown, mine = waiting(eyes, "other", "limit:k"), waiting(eyes, "mine", "limit:k")
    desk = desks("mine", link=link)
    desk.admit.blocked({"limit:k": ()})
    await desk.let_in()
    assert running(desk) == [mine]
    assert eyes.state(unknown) == ("blocked" if link is Link else "available")


def beats(eyes: Eyes, desk: Desk, slots: int) -> None:
    """As of its last beat this worker runs, with so many free slots."""
    eyes.do("UPDATE pgqueue.worker SET state = 'running', concurrency = %s WHERE id = %s", slots, desk.worker_id)


@pytest.mark.promise("F18")
async def test_under_a_limit_jobs_of_others_are_granted_to_them_and_ours_run_here(desks: Desks, eyes: Eyes) -> None:
    allow(eyes, 4)
    tasks = ["other", "mine", "other", "mine", "mine"]
    ids = [waiting(eyes, task, "limit:k") for task in tasks]
    desk, other = desks("mine"), desks("other")
    beats(eyes, other, 10)
    desk.admit.blocked({"limit:k": ()})
    await desk.let_in()
    assert running(desk) == [ids[1], ids[3]]
    granted = [id for (id,) in eyes.all("SELECT id FROM pgqueue.job_available WHERE holds ORDER BY id")]
    assert granted == [ids[0], ids[2]]
    assert await other.take() == granted


@pytest.mark.promise("F18")
async def test_slots_of_workers_that_do_not_know_the_task_are_no_reason_to_grant_more_than_one(
    desks: Desks, eyes: Eyes
) -> None:
    """Else a limit would be in the hands of jobs that wait for a slot of ours."""
    allow(eyes, 5)
    for _ in range(6):
        waiting(eyes, "mine", "limit:k")
    desk, other = desks("mine"), desks("other")
    beats(eyes, other, 10)
    desk.slots = 0
    desk.admit.blocked({"limit:k": ()})
    assert await desk.let_in() == []
    assert eyes.one("SELECT count(*) FROM pgqueue.job_available WHERE holds") == 1


# Rates ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
async def pacer(dsn: str) -> AsyncIterator[Pacer]:
    made = Pacer(dsn, tasks=["mine"])
    yield made
    await made.close()


@pytest.mark.promise("F18")
async def test_the_line_of_a_rate_passes_over_what_this_worker_does_not_know(pacer: Pacer, eyes: Eyes) -> None:
    eyes.do(RATED, "k", 100, 1.0, 10)
    unknown, mine = waiting(eyes, "other", "rate:k"), waiting(eyes, "mine", "rate:k")
    assert await pacer.ask("k") == [mine]
    assert eyes.state(unknown) == "blocked"
    assert not pacer.rates._waiters, "what is left there is not for this worker"
    assert not pacer.rates._others, "nor for another one"


@pytest.mark.promise("F18")
async def test_of_a_line_whose_head_another_worker_of_the_queue_knows_that_one_is_told(
    pacer: Pacer, desks: Desks, eyes: Eyes
) -> None:
    desks("other")
    eyes.do(RATED, "k", 100, 1.0, 10)
    told: list[str] = []
    waiting(eyes, "other", "rate:k")
    mine = waiting(eyes, "mine", "rate:k")
    link = pacer.rates._session.link

    class Listening(Link):
        def statement(self, name: str, **params: Any) -> Statement[list[tuple[Any, ...]]]:
            if name == "rates_hand_on":
                told.append(params["keys"])
            return super().statement(name, **params)

    pacer.rates._session.link = Listening(link.dsn, link.schema)
    assert await pacer.ask("k") == [mine]
    assert told == ['["k"]']


@pytest.mark.promise("F18")
async def test_the_sweep_names_a_line_only_if_a_live_worker_knows_a_task_of_it(
    pacer: Pacer, desks: Desks, eyes: Eyes
) -> None:
    eyes.do(RATED, "k", 100, 1.0, 10)
    eyes.do(RATED, "l", 100, 1.0, 10)
    waiting(eyes, "other", "rate:k")
    waiting(eyes, "other", "rate:l")
    waiting(eyes, "mine", "rate:l")
    look = {"keys": ["k", "l"], "queues": ["default"], "tasks": ["mine"], "seconds": 0.5}
    assert await pacer.pace.run(pacer.link.statement("rates_overdue", **look)) == [[("l", False)]]
    desks("other")
    assert sorted((await pacer.pace.run(pacer.link.statement("rates_overdue", **look)))[0]) == [
        ("k", True),
        ("l", True),
    ]


@pytest.mark.promise("L08")
async def test_of_tasks_that_others_know_one_that_finds_no_slot_holds_up_its_own_task_only(
    desks: Desks, eyes: Eyes
) -> None:
    """The workers of one task are full, and in its line lie jobs of another one whose worker is idle."""
    allow(eyes, 10)
    full = [waiting(eyes, "b", "limit:k") for _ in range(3)]
    free = waiting(eyes, "c", "limit:k")
    ours, theirs, idle = desks("a"), desks("b"), desks("c")
    beats(eyes, theirs, 0)
    beats(eyes, idle, 10)
    for _ in range(2):
        ours.admit.blocked({"limit:k": ()})
        await ours.let_in()
    assert {id for (id,) in eyes.all("SELECT id FROM pgqueue.job_available WHERE holds")} == {full[0], free}
