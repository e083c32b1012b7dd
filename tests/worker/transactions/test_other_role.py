"""A handler that leaves another role in effect, as for row level security: its job ends, its triggers see that role."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from accounts import accounts
from poolers import Pooler
from psycopg.conninfo import conninfo_to_dict
from roles import Role, role
from transactional_tasks import BOTH, declared, enqueued, outcomes
from workers import Eyes, until, work

import pgqueue
from pgqueue import Job
from pgqueue.worker.run import serialization_retries

__all__ = ["accounts", "role"]

pytestmark = pytest.mark.promise("F487")

WRITE = "INSERT INTO effect VALUES (%s, 'written')"
WAYS = {
    "SET LOCAL ROLE": "SET LOCAL ROLE {}",
    "SET ROLE": "SET ROLE {}",
    "in a function": "DO $$ BEGIN PERFORM set_config('role', '{}', true); END $$",
}


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serialization_retries, "PAUSE_MOST", 0.06)


@pytest.fixture
def worker_dsn(role: Role) -> str:
    return role("work")


@pytest.fixture
def tenant(role: Role, worker_dsn: str, accounts: Eyes) -> str:
    """A role that may write effects, and that the worker's may take. At COMMIT a trigger notes its role there."""
    name, worker = (str(conninfo_to_dict(dsn)["user"]) for dsn in (role("enqueue"), worker_dsn))
    for text in (
        f"REVOKE ALL ON SCHEMA pgqueue FROM {name}",
        f"GRANT {name} TO {worker}",
        f"GRANT INSERT ON effect TO {name}",
        "ALTER TABLE effect ADD session name DEFAULT session_user",
        """CREATE FUNCTION note_role() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
                IF new.note = 'written' THEN
                    INSERT INTO effect VALUES (new.job, current_user || ' ' || current_setting('role'));
                END IF;
                RETURN NULL;
            END $$""",
        """CREATE CONSTRAINT TRIGGER note_role AFTER INSERT ON effect DEFERRABLE INITIALLY DEFERRED
           FOR EACH ROW EXECUTE FUNCTION note_role()""",
    ):
        accounts.do(text)
    return name


def effects(eyes: Eyes, job: int) -> list[str]:
    return [note for (note,) in eyes.all("SELECT note FROM effect WHERE job = %s ORDER BY note = 'written'", job)]


def write(conn: Any, job: Job, set_role: str) -> list[Any]:
    """What a handler sends; on the loop the answers are awaited."""
    return [lambda: conn.execute(set_role), lambda: conn.execute(WRITE, [job.id])]


def writer(on_loop: bool, runs: list[int], set_role: str, end: Any = None) -> Any:
    def writes(job: Job) -> Any:
        runs.append(job.id)
        for send in write(job.connection, job, set_role):
            send()
        return end(job) if end else None

    async def awrites(job: Job) -> Any:
        runs.append(job.id)
        for send in write(await job.aconnection(), job, set_role):
            await send()
        return end(job) if end else None

    return declared(awrites if on_loop else writes)


@BOTH
@pytest.mark.parametrize("way", WAYS)
async def test_a_job_ends_whatever_role_its_handler_has_left(
    worker_dsn: str, tenant: str, accounts: Eyes, way: str, on_loop: bool
) -> None:
    """Naive: the completion is refused for want of a right, each time. With RESET ROLE the trigger sees the worker."""
    runs: list[int] = []
    task = writer(on_loop, runs, WAYS[way].format(tenant))
    async with work(worker_dsn, task):
        jobs = []
        for _ in range(3):
            jobs.append(enqueued(worker_dsn, task))
            await until(accounts.is_in(jobs[-1], "completed"))
    assert runs == [jobs[0], *jobs]  # the first one taught the worker
    assert [effects(accounts, job) for job in jobs] == [[f"{tenant} {tenant}", "written"]] * 3
    assert outcomes(accounts) == ["aborted"]


@BOTH
@pytest.mark.parametrize("what", ["a result", "a successor", "a snooze", "a failure"])
async def test_so_does_whatever_ends_with_its_writes(
    worker_dsn: str, tenant: str, accounts: Eyes, what: str, on_loop: bool
) -> None:
    def end(job: Job) -> Any:
        match what:
            case "a result":
                return {"it's": "ü"}
            case "a successor":
                job.enqueue(pgqueue.remote("shop.next"))
                return None
            case "a snooze":
                return pgqueue.Snooze(3600)
        return pgqueue.Fail("for good")

    runs: list[int] = []
    task = writer(on_loop, runs, f"SET LOCAL ROLE {tenant}", end)
    state = {"a snooze": "scheduled", "a failure": "failed"}.get(what, "completed")
    async with work(worker_dsn, task):
        jobs = []
        for _ in range(2):
            jobs.append(enqueued(worker_dsn, task))
            await until(accounts.is_in(jobs[-1], state))
    assert runs == [jobs[0], *jobs]
    assert [effects(accounts, job) for job in jobs] == [[f"{tenant} {tenant}", "written"]] * 2
    assert accounts.one("SELECT count(*) FROM pgqueue.job WHERE task = 'shop.next'") == 2 * (what == "a successor")
    if what == "a result":
        assert accounts.all("SELECT result FROM pgqueue.job") == [({"it's": "ü"},)] * 2


async def test_so_does_a_batch_of_an_iteration_and_a_step(worker_dsn: str, tenant: str, accounts: Eyes) -> None:
    runs: list[int] = []

    def iterates(job: Job) -> None:
        runs.append(job.id)
        job.step("one", lambda: [send() for send in write(job.connection, job, f"SET LOCAL ROLE {tenant}")] and None)
        for _ in job.iterate(lambda after: [(n, n) for n in range(after or 0, 3) if n >= (after or -1) + 1], size=1):
            for send in write(job.connection, job, f"SET ROLE {tenant}"):
                send()

    task = declared(iterates)
    async with work(worker_dsn, task):
        job = enqueued(worker_dsn, task)
        await until(accounts.is_in(job, "completed"))
    assert runs == [job] * 2
    assert sorted(set(effects(accounts, job))) == sorted({f"{tenant} {tenant}", "written"})
    assert len(effects(accounts, job)) == 8


async def test_so_do_the_jobs_of_one_call(worker_dsn: str, tenant: str, accounts: Eyes) -> None:
    calls: list[list[int]] = []
    jobs: list[int] = []

    def many(jobs: list[Job], numbers: list[int]) -> list[object]:
        calls.append([job.id for job in jobs])
        conn = jobs[0].connection
        conn.execute(f"SET LOCAL ROLE {tenant}")
        for job in jobs:
            conn.execute(WRITE, [job.id])
        return [pgqueue.Fail("for good") if number else None for number in numbers]

    task = declared(many, batch=pgqueue.Batch(2, wait="5s"))
    async with work(worker_dsn, task):
        for _ in range(2):  # the worker learns in the first pair, whose jobs then run one by one
            with psycopg.connect(worker_dsn) as conn:
                jobs += [task.enqueue(conn, number).id for number in range(2)]
            for job, state in zip(jobs, ["completed", "failed"] * 2, strict=False):
                await until(accounts.is_in(job, state))
    assert calls[-1] == jobs[2:]
    assert [effects(accounts, job) for job in jobs] == [[f"{tenant} {tenant}", "written"]] * 4


async def test_so_does_a_session_that_a_superuser_has_given_to_another_user(
    dsn: str, tenant: str, accounts: Eyes
) -> None:
    runs: list[int] = []
    task = writer(False, runs, f"SET LOCAL SESSION AUTHORIZATION {tenant}")
    async with work(dsn, task):
        job = enqueued(dsn, task)
        await until(accounts.is_in(job, "completed"))
    assert runs == [job] * 2
    assert accounts.all("SELECT note, session FROM effect ORDER BY note = 'written'") == [
        (f"{tenant} none", tenant), ("written", tenant)
    ]  # fmt: skip


async def test_so_does_a_job_behind_a_pooler(
    dsn: str, tenant: str, accounts: Eyes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There each statement is a message of its own, and no session is the worker's."""
    monkeypatch.setenv("PGQUEUE_PREPARE", "off")
    monkeypatch.setenv("PGQUEUE_LISTEN_DSN", "off")
    runs: list[int] = []
    task = writer(False, runs, f"SET LOCAL ROLE {tenant}")
    with Pooler(dsn, 4) as pooler:
        async with work(pooler.dsn, task, poll=0.05):
            job = enqueued(dsn, task)
            await until(accounts.is_in(job, "completed"))
    assert runs == [job] * 2
    assert effects(accounts, job) == [f"{tenant} {tenant}", "written"]


async def test_a_right_that_is_wanting_for_another_cause_fails_the_job(dsn: str, accounts: Eyes) -> None:
    """It is no reason to run a job again and again."""
    accounts.do(
        """CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE insufficient_privilege; END $$;
           CREATE CONSTRAINT TRIGGER refuse AFTER INSERT ON effect DEFERRABLE INITIALLY DEFERRED
           FOR EACH ROW EXECUTE FUNCTION refuse()"""
    )
    runs: list[int] = []
    task = writer(False, runs, "SELECT 1")
    with psycopg.connect(dsn) as conn:
        job = task.using(retry=1).enqueue(conn).id
    async with work(dsn, task):
        await until(accounts.is_in(job, "failed"))
    assert (len(runs), outcomes(accounts)) == (2, ["aborted", "failed"])
    assert accounts.one("SELECT count(*) FROM effect") == 0
