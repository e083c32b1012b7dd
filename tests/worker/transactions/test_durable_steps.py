"""Durable steps: what a step has done is not done again by a later attempt, and its answer comes back."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import dataclass
from datetime import date
from typing import Any

import commands
import psycopg
import pytest
from accounts import accounts
from transactional_tasks import BOTH, SOON, enqueued
from workers import Eyes, until, work

import pgqueue
from pgqueue import Job, testing
from pgqueue.client.tasks import task

__all__ = ["accounts"]
STEPS = "SELECT name, result FROM pgqueue.job_step ORDER BY created_at, name"


@dataclass
class Receipt:
    number: int
    day: date


@pytest.mark.promise("F360")
@pytest.mark.parametrize("transactional", [False, True], ids=["plain", "transactional"])
@BOTH
async def test_a_step_is_done_once_over_all_attempts_and_its_answer_comes_back_typed(
    dsn: str, accounts: Eyes, transactional: bool, on_loop: bool
) -> None:
    calls: list[str] = []
    got: list[Any] = []

    def charge(job: Job, number: int) -> Receipt:
        calls.append("charge")
        job.connection.execute("INSERT INTO effect VALUES (%s, 'charge')", [job.id])
        return Receipt(number, date(2026, 1, 2))

    async def acharge(job: Job, number: int) -> Receipt:
        calls.append("charge")
        await (await job.aconnection()).execute("INSERT INTO effect VALUES (%s, 'charge')", [job.id])
        return Receipt(number, date(2026, 1, 2))

    def mail() -> None:
        calls.append("mail")

    def order(job: Job) -> str:
        got.append(job.step("charge", charge, job, number=7))
        job.step("mail", mail)
        if job.attempt < 3:
            raise ValueError("not yet")
        return "sent"

    async def aorder(job: Job) -> str:
        got.append(await job.astep("charge", acharge, job, number=7))
        await job.astep("mail", mail)
        if job.attempt < 3:
            raise ValueError("not yet")
        return "sent"

    asked = task(name="steps.order", transactional=transactional, retry=SOON)(aorder if on_loop else order)
    async with work(dsn, asked):
        id = enqueued(dsn, asked)
        await until(accounts.is_in(id, "completed"))
    assert calls == ["charge", "mail"]
    assert got == [Receipt(7, date(2026, 1, 2))] * 3
    assert accounts.one("SELECT count(*) FROM effect") == 1
    assert accounts.all(STEPS) == [("charge", {"number": 7, "day": "2026-01-02"}), ("mail", None)]
    assert accounts.one("SELECT attempt FROM pgqueue.job_done") == 3
    # The step's writes and its record are one commit.
    assert accounts.one("SELECT (SELECT xmin FROM effect) = (SELECT xmin FROM pgqueue.job_step WHERE name = 'charge')")


@pytest.mark.promise("F360")
@BOTH
async def test_a_step_that_raises_keeps_nothing_and_is_tried_again(dsn: str, accounts: Eyes, on_loop: bool) -> None:
    def bad(job: Job) -> int:
        job.connection.execute("INSERT INTO effect VALUES (%s, 'bad')", [job.id])
        if job.attempt < 2:
            raise ValueError("no")
        return 5

    async def abad(job: Job) -> int:
        await (await job.aconnection()).execute("INSERT INTO effect VALUES (%s, 'bad')", [job.id])
        if job.attempt < 2:
            raise ValueError("no")
        return 5

    def order(job: Job) -> int:
        return job.step("bad", bad, job)

    async def aorder(job: Job) -> int:
        return int(await job.astep("bad", abad, job))

    asked = task(name="steps.raises", transactional=True, retry=SOON)(aorder if on_loop else order)
    async with work(dsn, asked):
        id = enqueued(dsn, asked)
        await until(accounts.is_in(id, "completed"))
    assert accounts.one("SELECT count(*) FROM effect") == 1
    assert accounts.all(STEPS) == [("bad", 5)]


@pytest.mark.promise("F360")
@pytest.mark.parametrize("hold", ["pending", "live"])
async def test_a_job_that_was_stopped_behind_a_step_is_not_replaced(dsn: str, accounts: Eyes, hold: Any) -> None:
    """It is given back with no attempt spent. The naive version replaces it, and takes 990 cents for the new order."""
    charged, stepped = list[int](), threading.Event()

    def charge(cents: int) -> int:
        charged.append(cents)
        return cents

    async def order(job: Job, cents: int) -> int:
        paid: int = await job.astep("charge", charge, cents)
        if cents == 990 and not stepped.is_set():
            stepped.set()
            await asyncio.Event().wait()
        return paid

    unique = pgqueue.Unique("order", hold=hold, on_duplicate="replace")
    asked = task(name="steps.replaced", unique=unique)(order)
    async with work(dsn, asked) as worker:
        first = enqueued(dsn, asked, 990)
        await asyncio.to_thread(stepped.wait, 30)
        assert await worker.stop(0.1) == 1
    assert accounts.all("SELECT state, attempt FROM pgqueue.job") == [("available", 0)]
    with psycopg.connect(dsn) as conn:
        handle = asked.enqueue(conn, 500)
    assert (handle.replaced, handle.created) == (False, hold == "pending")
    async with work(dsn, asked):
        await until(accounts.is_in(first, "completed"))
        await until(accounts.is_in(handle.id, "completed"))
    results = accounts.all("SELECT args ->> 'cents', result FROM pgqueue.job_done ORDER BY id")
    assert results == ([("990", 990), ("500", 500)] if hold == "pending" else [("990", 990)])
    assert charged == [990, 500][: len(results)]


@pytest.mark.promise("F361")
@pytest.mark.parametrize("transactional", [False, True], ids=["plain", "transactional"])
async def test_a_run_that_has_lost_its_job_records_nothing(dsn: str, accounts: Eyes, transactional: bool) -> None:
    """The naive way, without the fence, records an answer under the claim of another run."""
    going, may_go, errors = threading.Event(), threading.Event(), list[BaseException]()

    def slow(job: Job) -> int:
        job.connection.execute("INSERT INTO effect VALUES (%s, 'slow')", [job.id])
        going.set()
        may_go.wait(30)
        return 1

    def order(job: Job) -> None:
        try:
            job.step("slow", slow, job)
        except BaseException as error:
            errors.append(error)
            raise

    asked = task(name="steps.lost", transactional=transactional)(order)
    async with work(dsn, asked):
        enqueued(dsn, asked)
        await asyncio.to_thread(going.wait, 30)
        accounts.do("DELETE FROM pgqueue.job_running")
        may_go.set()
        await until(lambda: bool(errors))
    assert isinstance(errors[0], pgqueue.JobLost)
    assert accounts.all(STEPS) == [] and accounts.one("SELECT count(*) FROM effect") == 0


@pytest.mark.promise("F362")
@BOTH
async def test_what_a_step_cannot_be_is_said(dsn: str, accounts: Eyes, on_loop: bool) -> None:
    said: list[str] = []

    def one() -> int:
        return 1

    async def aone() -> int:
        return 1

    def wrong() -> int:
        return "text"  # type: ignore[return-value]

    def unstorable() -> object:
        return float("nan")

    def order(job: Job) -> None:
        def note(name: Any, fn: Any, *args: Any) -> None:
            with pytest.raises(pgqueue.Error) as error:
                job.step(name, fn, *args)
            said.append(str(error.value))

        job.step("one", one)
        note("one", one)
        note("", one)
        note("x" * 201, one)
        note("async", aone)
        note("wrong", wrong)
        note("nan", unstorable)
        note("outer", lambda: job.step("inner", one))
        job.connection.execute("INSERT INTO effect VALUES (%s, 'before')", [job.id])
        note("late", one)
        note("later", one)
        note("late", one)

    async def aorder(job: Job) -> None:
        async def note(name: Any, fn: Any, *args: Any) -> None:
            with pytest.raises(pgqueue.Error) as error:
                await job.astep(name, fn, *args)
            said.append(str(error.value))

        await job.astep("one", one)
        await note("one", one)
        await note("", one)
        await note("x" * 201, one)
        said.append("is async: use `await job.astep(…)`")
        await note("wrong", wrong)
        await note("nan", unstorable)
        await note("outer", lambda: job.astep("inner", one))
        await (await job.aconnection()).execute("INSERT INTO effect VALUES (%s, 'before')", [job.id])
        await note("late", one)
        await note("later", one)
        await note("late", one)

    asked = task(name="steps.wrong", transactional=True, retry=1)(aorder if on_loop else order)
    async with work(dsn, asked):
        id = enqueued(dsn, asked)
        await until(accounts.is_in(id, "completed"))
    wanted = [
        "this run has had a step of that name",
        "printable text of 1 to 200 bytes",
        "printable text of 1 to 200 bytes",
        "is async: use `await job.astep(…)`",
        "its answer is not what the function says it returns",
        "its answer cannot be stored",
        "it is inside the step 'outer', or beside it",
        *["job.connection was asked for before the step"] * 3,
    ]
    assert [part in text for part, text in zip(wanted, said, strict=True)] == [True] * len(wanted), said
    assert [name for name, _ in accounts.all(STEPS)] == ["one"]


@pytest.mark.promise("F362")
@pytest.mark.parametrize("transactional", [False, True], ids=["plain", "transactional"])
async def test_a_step_that_was_refused_hinders_no_other(dsn: str, accounts: Eyes, transactional: bool) -> None:
    """The naive version takes the refused step for one that runs: each later one is said to be inside of it."""

    async def order(job: Job) -> int:
        with pytest.raises(pgqueue.Error, match="its handler is async"):
            job.step("one", lambda: 1)
        return int(await job.astep("two", lambda: 2)) + int(await job.astep("one", lambda: 1))

    asked = task(name="steps.refused", transactional=transactional, retry=1)(order)
    async with work(dsn, asked):
        id = enqueued(dsn, asked)
        await until(accounts.is_in(id, "completed"))
    assert accounts.one("SELECT result FROM pgqueue.job_done") == 3
    assert accounts.all(STEPS) == [("two", 2), ("one", 1)]


@pytest.mark.promise("F362")
@BOTH
async def test_a_job_records_so_many_steps_and_no_more(dsn: str, accounts: Eyes, on_loop: bool) -> None:
    calls: list[str] = []

    def order(job: Job) -> None:
        job.step("last", lambda: calls.append("last"))
        with pytest.raises(pgqueue.Error, match="has recorded 10,000 steps"):
            job.step("more", lambda: calls.append("more"))
        assert job.step("step 7", lambda: calls.append("step 7")) == 7

    async def aorder(job: Job) -> None:
        await job.astep("last", lambda: calls.append("last"))
        with pytest.raises(pgqueue.Error, match="has recorded 10,000 steps"):
            await job.astep("more", lambda: calls.append("more"))
        assert await job.astep("step 7", lambda: calls.append("step 7")) == 7

    asked = task(name="steps.many", retry=1)(aorder if on_loop else order)
    id = enqueued(dsn, asked)
    accounts.do(
        "INSERT INTO pgqueue.job_step (job_id, enqueued_at, name, result) "
        "SELECT id, enqueued_at, 'step ' || n, to_jsonb(n) FROM pgqueue.job, generate_series(1, 9999) AS n"
    )
    async with work(dsn, asked):
        await until(accounts.is_in(id, "completed"))
    assert calls == ["last"]
    assert accounts.one("SELECT count(*) FROM pgqueue.job_step") == 10_000
    since = accounts.one("SELECT enqueued_at FROM pgqueue.job_done")
    found = [accounts.one("SELECT pgqueue.step_is_recorded(%s, %s, %s)", id, since, name) for name in ("last", "more")]
    assert found == [True, False]


@pytest.mark.promise("F363")
async def test_steps_stay_for_a_retry_by_hand_and_are_shown(dsn: str, accounts: Eyes) -> None:
    calls: list[int] = []
    good = threading.Event()

    def once() -> list[int]:
        calls.append(1)
        return [1, 2]

    def order(job: Job) -> None:
        job.step("once", once)
        if not good.is_set():
            raise ValueError("no")

    asked = task(name="steps.again", retry=1)(order)
    async with work(dsn, asked):
        id = enqueued(dsn, asked)
        await until(accounts.is_in(id, "failed"))
        with psycopg.connect(dsn) as conn:
            [step] = pgqueue.get(conn, id).steps
            assert (step.name, step.result) == ("once", [1, 2])
            good.set()
            pgqueue.retry(conn, id)
        await until(accounts.is_in(id, "completed"))
    assert calls == [1]
    with psycopg.connect(dsn) as conn:
        assert [step.name for step in pgqueue.get(conn, id).steps] == ["once"]
    shown = await asyncio.to_thread(commands.pgqueue, "jobs", str(id), dsn=dsn)
    assert "step once: recorded 20" in shown.stdout and "\n  [1, 2]" in shown.stdout.replace("[1,2]", "[1, 2]")
    read = await asyncio.to_thread(commands.pgqueue, "jobs", str(id), "--json", dsn=dsn)
    assert [(step["name"], step["result"]) for step in json.loads(read.stdout)["items"][0]["steps"]] == [
        ("once", [1, 2])
    ]
    with psycopg.connect(dsn) as conn:
        pgqueue.discard(conn, id)
    assert accounts.all(STEPS) == []


@pytest.mark.promise("F363")
async def test_steps_go_when_history_has_forgotten_their_job(dsn: str, accounts: Eyes) -> None:
    def one() -> int:
        return 1

    def order(job: Job) -> None:
        job.step("one", one)

    asked = task(name="steps.gone")(order)
    async with work(dsn, asked) as worker:
        first, second = enqueued(dsn, asked), enqueued(dsn, asked)
        await until(accounts.is_in(first, "completed"))
        await until(accounts.is_in(second, "completed"))
        accounts.do("DELETE FROM pgqueue.job_done WHERE id = %s", first)
        await worker.services.pruner.steps()
    assert accounts.all("SELECT job_id FROM pgqueue.job_step") == [(second,)]


@pytest.mark.promise("F364")
@pytest.mark.parametrize("transactional", [False, True], ids=["plain", "transactional"])
def test_a_drain_keeps_steps_over_attempts(dsn: str, eyes: Eyes, transactional: bool) -> None:
    calls: list[int] = []

    def once() -> int:
        calls.append(1)
        return 5

    @task(name="steps.drained", transactional=transactional, retry=SOON)
    def order(job: Job) -> int:
        five = job.step("once", once)
        if job.attempt < 2:
            raise ValueError("no")
        return five

    with psycopg.connect(dsn) as conn:
        order.enqueue(conn)
        with testing.Clock(conn) as clock:
            drained = testing.drain(conn, clock)
        assert (drained.completed, drained.retried) == (1, 1)
        assert conn.execute("SELECT result FROM pgqueue.job_done").fetchone() == (5,)
    assert calls == [1]


@pytest.mark.promise("F364")
async def test_a_test_without_a_database_calls_each_step() -> None:
    @task(name="steps.bare")
    async def order(job: Job) -> int:
        async def two() -> int:
            return 2

        return int(await job.astep("two", two)) + job.step("three", lambda: 3)

    assert await testing.arun(order) == 5
