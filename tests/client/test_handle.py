"""JobHandle: what it says of its job, and from where it sees it."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from time import monotonic
from typing import Any

import psycopg
import pytest
from faults import Wire
from handlers import begins, begun
from servers import Server
from workers import Eyes, least, until, wait_until, work, workers

import pgqueue
from pgqueue.client import wait as wait_module
from pgqueue.client.tasks import task
from pgqueue.database import drivers, migrations, statements


@pytest.mark.usefixtures("pgqueue_db")
def test_the_state_is_what_other_sessions_see(conn: psycopg.Connection[Any]) -> None:
    now = pgqueue.enqueue(conn, "shop.mail")
    later = pgqueue.enqueue(conn, pgqueue.remote("shop.mail").using(delay=60))
    with pytest.raises(pgqueue.JobNotFound, match=f"job {now.id} is not there") as missing:
        _ = now.state
    assert missing.value.job_id == now.id
    conn.commit()
    assert (now.state, later.state) == ("available", "scheduled")


@pytest.mark.usefixtures("pgqueue_db")
@pytest.mark.parametrize("state", ["running", "completed", "skipped", "failed", "cancelled", "blocked"])
def test_a_job_is_found_in_every_state(conn: psycopg.Connection[Any], state: str) -> None:
    row = conn.execute(
        """INSERT INTO pgqueue.job (state, task, worker_id, claim, started_at, finished_at, reason, key)
           SELECT %(s)s, 'shop.mail',
                  CASE WHEN %(s)s = 'running' THEN 1 END, CASE WHEN %(s)s = 'running' THEN 1 END,
                  CASE WHEN %(s)s = 'running' THEN pgqueue.now() END,
                  CASE WHEN %(s)s NOT IN ('running', 'blocked') THEN pgqueue.now() END,
                  CASE WHEN %(s)s IN ('failed', 'cancelled') THEN 'error' END,
                  CASE WHEN %(s)s = 'blocked' THEN 'key' END
           RETURNING id""",
        {"s": state},
    ).fetchone()
    assert row is not None
    conn.commit()
    assert pgqueue.JobHandle(row[0]).state == state


@pytest.mark.promise("F75")
@pytest.mark.usefixtures("pgqueue_db")
async def test_info_is_what_get_returns_also_before_the_commit(
    conn: psycopg.Connection[Any], aconn: psycopg.AsyncConnection[Any]
) -> None:
    job = pgqueue.enqueue(conn, "shop.mail", to="a")
    assert job.info(conn) == pgqueue.get(conn, job.id)
    assert job.info(conn).args == {"to": "a"}
    with pytest.raises(pgqueue.JobNotFound):
        await job.ainfo(aconn)
    conn.commit()
    await aconn.rollback()
    assert await job.ainfo(aconn) == job.info(conn)
    with pytest.raises(pgqueue.UnsupportedConnection):
        job.info(aconn)
    with pytest.raises(pgqueue.Error, match="staged job 3"):
        pgqueue.JobHandle(None, staged_id=3).info(conn)  # type: ignore[arg-type]


@pytest.mark.usefixtures("pgqueue_db")
def test_a_job_that_never_was_is_not_found() -> None:
    with pytest.raises(LookupError, match="job 4711"):
        _ = pgqueue.JobHandle(4711).state


def test_the_state_needs_a_configured_database(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PGQUEUE_DSN", raising=False)
    with pytest.raises(pgqueue.NotConfigured, match="PGQUEUE_DSN"):
        _ = pgqueue.JobHandle(1).state


def test_a_database_without_the_schema_says_so(empty_dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGQUEUE_DSN", empty_dsn)
    with pytest.raises(pgqueue.SchemaMissing, match="pgqueue migrate"):
        _ = pgqueue.JobHandle(1).state


def test_handles_are_values() -> None:
    assert pgqueue.JobHandle(1) == pgqueue.JobHandle(1, created=True) != pgqueue.JobHandle(2)
    assert len({pgqueue.JobHandle(1), pgqueue.JobHandle(1)}) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        pgqueue.JobHandle(1).id = 2  # type: ignore[misc]


# Results -------------------------------------------------------------------------------------------------------------


@task(name="handle.value")
async def value(it: Any = None) -> Any:
    return it


@task(name="handle.fails", retry=pgqueue.RetryPolicy(attempts=2, first=0.01))
async def fails(job: pgqueue.Job) -> None:
    raise ValueError(f"attempt {job.attempt} went wrong")


@task(name="handle.too_long", retry=1, timeout=0.05)
async def too_long() -> None:
    await asyncio.sleep(30)


@task(name="handle.waits")
async def waits(job: pgqueue.Job) -> None:
    begins(job)
    await asyncio.Event().wait()


@pytest.mark.usefixtures("pgqueue_db")
@pytest.mark.parametrize("it", [None, 7, "é", [1, {"a": None}], 2**70, True])
async def test_a_result_comes_back_as_json(dsn: str, it: Any) -> None:
    with psycopg.connect(dsn) as conn:
        job = value.enqueue(conn, it)
    async with work(dsn, value):
        assert await job.aresult(10) == it
        assert await asyncio.to_thread(job.result, timedelta(seconds=10)) == it
        assert await pgqueue.aresult(job.id, 10) == it
        assert await asyncio.to_thread(pgqueue.result, job.id, 10) == it


@pytest.mark.usefixtures("pgqueue_db")
def test_it_is_waited_for_while_another_process_runs_the_job(
    dsn: str, conn: psycopg.Connection[Any], tmp_path: Path
) -> None:
    source = "@pgqueue.task(name='handle.other')\ndef other():\n    time.sleep(0.3)\n    return {'from': 'there'}\n"
    with workers(tmp_path, dsn, source) as processes:
        processes.ready()
        job = pgqueue.enqueue(conn, "handle.other")
        conn.commit()
        assert job.result(30) == {"from": "there"}


@pytest.mark.usefixtures("pgqueue_db")
async def test_a_failed_job_says_what_its_last_attempt_said(dsn: str) -> None:
    with psycopg.connect(dsn) as conn:
        job = fails.enqueue(conn)
    async with work(dsn, fails):
        with pytest.raises(pgqueue.JobFailed, match=r"failed \(error\): ValueError: attempt 2 went wrong") as failed:
            await job.aresult(30)
    assert failed.value.job_id == job.id
    assert "in fails" in failed.value.__notes__[0]


@pytest.mark.usefixtures("pgqueue_db")
async def test_a_job_whose_last_attempt_timed_out_raises_its_timeout(dsn: str) -> None:
    with psycopg.connect(dsn) as conn:
        job = too_long.enqueue(conn)
    async with work(dsn, too_long):
        with pytest.raises(pgqueue.JobTimeout, match=r"failed \(timeout\): JobTimeout: .* after 0.05 s") as late:
            await job.aresult(20)
    assert late.value.job_id == job.id
    assert isinstance(late.value, TimeoutError)
    assert not isinstance(late.value, pgqueue.ResultTimeout)  # the job has ended


@pytest.mark.usefixtures("pgqueue_db")
async def test_a_cancelled_job_says_why_also_while_it_is_waited_for(dsn: str, eyes: Eyes) -> None:
    with psycopg.connect(dsn) as conn:
        job = waits.enqueue(conn)
    async with work(dsn, waits):
        waiting = asyncio.create_task(job.aresult())
        await begun(job.id)
        pgqueue.cancel(eyes.conn, job.id, reason="no more")
        with pytest.raises(pgqueue.JobCancelled, match=f"job {job.id} was cancelled: no more"):
            await waiting


@pytest.mark.usefixtures("pgqueue_db")
async def test_patience_ends_and_the_job_goes_on(conn: psycopg.Connection[Any]) -> None:
    job = pgqueue.enqueue(conn, "nobody.runs")
    conn.commit()
    for patience, most in ((0, 1.0), (0.2, 2.0)):

        async def both(patience: float = patience) -> float:
            began = monotonic()
            with pytest.raises(pgqueue.ResultTimeout) as over:
                job.result(patience)
            assert (over.value.job_id, isinstance(over.value, TimeoutError)) == (job.id, True)
            with pytest.raises(pgqueue.ResultTimeout):
                await job.aresult(patience)
            return monotonic() - began

        assert 2 * patience <= await least(both, 2 * patience + most) < 2 * patience + most
    assert job.state == "available"


@pytest.mark.usefixtures("pgqueue_db")
async def test_while_its_transaction_is_open_there_is_nothing_to_wait_for(conn: psycopg.Connection[Any]) -> None:
    job = pgqueue.enqueue(conn, "shop.mail")
    with pytest.raises(pgqueue.JobNotFound, match="its transaction is open"):
        job.result(60)
    with pytest.raises(pgqueue.JobNotFound, match="its transaction is open"):
        await job.aresult()
    with pytest.raises(pgqueue.InvalidOption, match="timeout -1"):
        job.result(-1)


# Being told ----------------------------------------------------------------------------------------------------------

SOON = 30.0  # seconds; who is not told looks again after 60 only


@pytest.fixture
def patient(pgqueue_db: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Looks are so seldom that only who is told returns soon."""
    for name in ("LOOK_FIRST", "LOOK_MOST", "TOLD_FIRST", "TOLD_MOST"):
        monkeypatch.setattr(wait_module, name, 60.0)
    return pgqueue_db


@task(name="handle.gate")
async def gate(job: pgqueue.Job) -> str:
    begins(job)
    await asyncio.wait_for(gate_open.wait(), 30)
    return "through"


@task(name="handle.gate_fails", retry=1)
def gate_fails(job: pgqueue.Job) -> None:
    asyncio.run_coroutine_threadsafe(gate_open.wait(), loop).result(30)
    raise ValueError("no")


gate_open: asyncio.Event
loop: asyncio.AbstractEventLoop


@pytest.fixture(autouse=True)
async def gates() -> None:
    global gate_open, loop
    gate_open, loop = asyncio.Event(), asyncio.get_running_loop()


def wait_for(eyes: Eyes, number: int = 1) -> Callable[[], bool]:
    return lambda: eyes.one("SELECT count(*) FROM pgqueue.job_waiter") == number


def heard(eyes: Eyes, channel: str) -> list[str]:
    """What this session hears on the channel until now."""
    eyes.do("SELECT pg_notify(%s, 'last')", channel)
    found: list[str] = []
    for note in eyes.conn.notifies(timeout=10):
        if note.payload == "last":
            break
        found.append(note.channel)
    return found


def put(eyes: Eyes, columns: str = "state", values: str = "'available'") -> pgqueue.JobHandle[Any]:
    return pgqueue.JobHandle(eyes.one(f"INSERT INTO pgqueue.job (task, {columns}) VALUES ('t', {values}) RETURNING id"))  # noqa: S608


async def test_whoever_waits_is_told_when_the_job_has_completed(patient: str, eyes: Eyes) -> None:
    with psycopg.connect(patient) as conn:
        job = gate.enqueue(conn)
    async with work(patient, gate):
        waiters = [asyncio.create_task(asyncio.to_thread(job.result, 50)) for _ in range(3)]
        waiters += [asyncio.create_task(job.aresult(50)) for _ in range(3)]
        await until(wait_for(eyes, 6))
        began = monotonic()
        gate_open.set()
        assert await asyncio.gather(*waiters) == ["through"] * 6
        assert monotonic() - began < SOON
    assert wait_for(eyes, 0)()


@pytest.mark.parametrize("made", ["fails", "running", "waiting"])
async def test_a_failure_and_a_cancel_are_told(patient: str, eyes: Eyes, made: str) -> None:
    nobody = pgqueue.remote("nobody").using(queue="elsewhere")
    asked: Any = {"fails": gate_fails, "running": gate, "waiting": nobody}[made]
    with psycopg.connect(patient) as conn:
        job = asked.enqueue(conn)
    async with work(patient, gate, gate_fails, queues=["default"]):
        end = asyncio.create_task(job.aresult(50))
        await until(wait_for(eyes))
        if made == "running":
            await begun(job.id)
        if made == "fails":
            gate_open.set()
        else:
            pgqueue.cancel(eyes.conn, job.id)
        began = monotonic()
        with pytest.raises(pgqueue.JobFailed if made == "fails" else pgqueue.JobCancelled):
            await end
        assert monotonic() - began < SOON
    assert wait_for(eyes, 0)()


def running(eyes: Eyes) -> pgqueue.JobHandle[Any]:
    """A job in the hands of worker 7, with two crashes."""
    return put(eyes, "state, worker_id, claim, started_at, crashes", "'running', 7, 1, pgqueue.now(), 2")


def complete(conn: psycopg.Connection[Any], job: pgqueue.JobHandle[Any]) -> None:
    """As a transaction of the handler does it."""
    fence = {"id": job.id, "claim": 1, "worker_id": 7, "version_tag": "1", "ago": None, "mark": None}
    fence |= {"result": '"in"', "notify": True}
    conn.execute(statements.text("complete_within", "pgqueue").encode(), fence)


async def test_the_end_in_a_handlers_transaction_is_told_with_its_commit(patient: str, eyes: Eyes) -> None:
    job = running(eyes)
    end = asyncio.create_task(job.aresult(50))
    await until(wait_for(eyes))
    with psycopg.connect(patient) as conn:
        complete(conn, job)
        conn.commit()
    began = monotonic()
    assert await end == "in"
    assert monotonic() - began < SOON


@pytest.mark.usefixtures("patient")
async def test_the_end_of_a_killer_is_told_by_rescue(eyes: Eyes) -> None:
    job = running(eyes)
    end = asyncio.create_task(job.aresult(50))
    await until(wait_for(eyes))
    eyes.do(
        "INSERT INTO pgqueue.worker (id, lease, pid, concurrency, host, version_tag, queues, running) "
        "OVERRIDING SYSTEM VALUE VALUES (7, '15 s', 1, 1, 'gone', '1', '{default}', %s)",
        [job.id],
    )
    asked = {"worker_id": 7, "n": 9, "first": True, "passed": "{}", "notify": True}
    eyes.conn.execute(statements.text("rescue_jobs", "pgqueue").encode(), asked)
    began = monotonic()
    with pytest.raises(pgqueue.JobFailed, match="crashed"):
        await end
    assert monotonic() - began < SOON


@pytest.mark.parametrize("when", ["wait_outcome", "wait_begin", "LISTEN"])
async def test_an_end_between_two_steps_of_a_wait_is_seen(
    patient: str, eyes: Eyes, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Looked, then listened: the hint came in between, to nobody. So the last step before a pause is always a look."""
    job, ends = running(eyes), list[str]()

    def end_once(after: str) -> None:
        if not ends and after.startswith(statements.text(when, "pgqueue") if when != "LISTEN" else when):
            ends.append(after)
            complete(eyes.conn, job)

    run, listen = drivers.run, wait_module._listen

    def run_and_end(conn: object, statement: statements.Statement[Any]) -> Any:
        answer = run(conn, statement)
        end_once(statement.sql)
        return answer

    def end_and_listen(channel: str) -> bytes:
        end_once("LISTEN")
        return listen(channel)

    monkeypatch.setattr(drivers, "run", run_and_end)
    monkeypatch.setattr(wait_module, "_listen", end_and_listen)
    began = monotonic()
    assert await asyncio.to_thread(job.result, 50) == "in"
    assert (len(ends), monotonic() - began < SOON) == (1, True)


@pytest.mark.usefixtures("pgqueue_db")
async def test_a_hint_that_was_missed_is_made_up_for_by_looking(dsn: str, eyes: Eyes) -> None:
    """The end was under way when the waiter came: its statement did not see the row."""
    job = running(eyes)
    with psycopg.connect(dsn) as ending:
        complete(ending, job)
        end = asyncio.create_task(job.aresult(30))
        await until(wait_for(eyes))
        eyes.do(f'LISTEN "pgqueue.:ended.{job.id}"')
        ending.commit()
        began = monotonic()
        assert await end == "in"
        assert monotonic() - began < SOON
        assert heard(eyes, f"pgqueue.:ended.{job.id}") == []


async def test_nobody_is_told_of_a_job_that_nobody_waits_for(patient: str, eyes: Eyes) -> None:
    with psycopg.connect(patient) as conn:
        job, other = gate.enqueue(conn), gate.enqueue(conn)
    for each in (job, other):
        eyes.do(f'LISTEN "pgqueue.:ended.{each.id}"')
    async with work(patient, gate):
        end = asyncio.create_task(job.aresult(50))
        await until(wait_for(eyes))
        gate_open.set()
        await end
        await until(eyes.done(2))
    assert heard(eyes, f"pgqueue.:ended.{job.id}") == [f"pgqueue.:ended.{job.id}"]
    assert heard(eyes, f"pgqueue.:ended.{other.id}") == []


@pytest.mark.usefixtures("pgqueue_db")
async def test_who_gives_up_leaves_no_row(eyes: Eyes, monkeypatch: pytest.MonkeyPatch) -> None:
    job = put(eyes)
    with monkeypatch.context() as patched, pytest.raises(pgqueue.ResultTimeout):
        patched.setattr(wait_module.Wait, "left", lambda wait: 1.0 if wait.waiter is None else 0.0)
        with pytest.raises(pgqueue.ResultTimeout):
            await asyncio.to_thread(job.result)
        await job.aresult()
    cancelled = asyncio.create_task(job.aresult())
    await until(wait_for(eyes))
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    assert eyes.one("SELECT last_value FROM pgqueue.job_waiter_waiter_seq") == 3
    assert wait_for(eyes, 0)()


@pytest.mark.parametrize("name", ["wait_hears", "wait_begin", "wait_leave"])
async def test_who_is_cancelled_as_an_answer_arrives_leaves_no_row(
    patient: str, eyes: Eyes, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The server has done it, its answer is in the socket, and nobody has read it yet."""
    arun, cancelled = drivers.arun, list[int]()
    done = {"wait_hears": wait_for(eyes, 0), "wait_begin": wait_for(eyes), "wait_leave": wait_for(eyes, 0)}

    def cancel() -> None:
        wait_until(done[name])
        result.cancel()
        cancelled.append(1)

    async def run_and_cancel(conn: Any, statement: statements.Statement[Any]) -> Any:
        if statement.sql == statements.text(name, "pgqueue"):
            loop.call_soon(cancel)
        return await arun(conn, statement)

    monkeypatch.setattr(drivers, "arun", run_and_cancel)
    result = asyncio.create_task(running(eyes).aresult())
    if name == "wait_leave":
        await until(wait_for(eyes))
        result.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(result, 30)
    assert cancelled
    assert wait_for(eyes, 0)()
    await until(lambda: not eyes.backends("pgqueue result"))


@pytest.mark.second
async def test_a_wait_can_be_cancelled_at_every_turn_of_the_loop(patient: str, eyes: Eyes) -> None:
    job = running(eyes)
    for turns in range(40):
        result = asyncio.create_task(job.aresult())
        for _ in range(turns):
            await asyncio.sleep(0.0005)
        result.cancel()
        await asyncio.wait([result])
        assert result.cancelled()
    await until(lambda: not eyes.backends("pgqueue result"))
    assert wait_for(eyes, 0)()


# A connection that breaks --------------------------------------------------------------------------------------------


RESTS = """SELECT FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'pgqueue result'
           AND state = 'idle' AND query LIKE '%FROM pgqueue.job_rows(%'"""
"""One who waits has looked, and listens."""


def end_waiters(eyes: Eyes) -> int:
    """End the sessions of those who wait; how many."""
    return eyes.terminate("pgqueue result")


async def test_a_connection_that_breaks_is_replaced_and_the_wait_goes_on(patient: str, eyes: Eyes) -> None:
    job = running(eyes)
    ends = [asyncio.create_task(asyncio.to_thread(job.result, 50)), asyncio.create_task(job.aresult(50))]
    await until(wait_for(eyes, 2))
    before = eyes.one("SELECT last_value FROM pgqueue.job_waiter_waiter_seq")
    assert end_waiters(eyes) == 2
    await until(lambda: eyes.one("SELECT count(*) FROM pgqueue.job_waiter WHERE waiter > %s", before) == 2)
    assert wait_for(eyes, 2)()  # the rows of the lost ones are gone
    complete(eyes.conn, job)
    began = monotonic()
    assert await asyncio.gather(*ends) == ["in"] * 2
    assert monotonic() - began < SOON
    assert wait_for(eyes, 0)()


@pytest.mark.second
async def test_it_waits_through_a_restart_of_the_server(own_server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    dsn = own_server.dsn("postgres")
    migrations.migrate(dsn)
    monkeypatch.setenv("PGQUEUE_DSN", dsn)
    eyes = Eyes(dsn)
    job = running(eyes)
    ends = [asyncio.create_task(asyncio.to_thread(job.result, 50)), asyncio.create_task(job.aresult(50))]
    await until(wait_for(eyes, 2))
    eyes.close()
    await asyncio.to_thread(own_server.restart)
    eyes = Eyes(dsn)
    complete(eyes.conn, job)
    assert await asyncio.gather(*ends) == ["in"] * 2
    with pytest.raises(pgqueue.ResultTimeout):  # no longer there when the time is over
        end = asyncio.create_task(put(eyes).aresult(4))
        await until(wait_for(eyes))
        eyes.close()
        await asyncio.to_thread(own_server.stop)
        await end


def two_hosts(dsn: str) -> str:
    """An address that leads to two servers, of which the first only reads."""
    host = psycopg.conninfo.conninfo_to_dict(dsn)["host"]
    return psycopg.conninfo.make_conninfo(dsn, host=f"{host},{host}")


def reads_only(connect: Any) -> Any:
    """A way to connect that leads to a server that only reads, unless one that can be written is asked for."""

    def connected(dsn: str, **options: Any) -> Any:
        where = "" if "read-write" in dsn else " options='-c default_transaction_read_only=on'"
        return connect(dsn + where, **options)

    return connected


@pytest.mark.promise("F344")
async def test_a_wait_finds_the_server_that_can_be_written(
    patient: str, eyes: Eyes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Naive: the first host answers and only reads. The wait is told nothing there, and only looks."""
    pgqueue.configure(dsn=two_hosts(patient))
    for kind in (psycopg.Connection, psycopg.AsyncConnection):
        monkeypatch.setattr(kind, "connect", reads_only(kind.connect))
    job = running(eyes)
    ends = [asyncio.create_task(asyncio.to_thread(job.result, 50)), asyncio.create_task(job.aresult(50))]
    await until(wait_for(eyes, 2))
    complete(eyes.conn, job)
    assert await asyncio.gather(*ends) == ["in"] * 2


@pytest.mark.promise("F421")
def test_the_state_is_read_on_the_server_that_can_be_written(
    pgqueue_db: str, eyes: Eyes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Naive: the first host answers and only reads. A standby may not have heard of the job."""
    read_on = list[str]()
    real = drivers.run

    def noted(conn: Any, statement: Any) -> Any:
        read_on.append(conn.execute("SHOW transaction_read_only").fetchone()[0])
        return real(conn, statement)

    job = running(eyes)
    monkeypatch.setattr(drivers, "run", noted)
    pgqueue.configure(dsn=two_hosts(pgqueue_db))
    with monkeypatch.context() as hosts:
        hosts.setattr(psycopg.Connection, "connect", reads_only(psycopg.Connection.connect))
        assert job.state == "running" and read_on == ["off"]
    pgqueue.configure(dsn=f"{two_hosts(pgqueue_db)} options='-c default_transaction_read_only=on'")
    assert job.state == "running" and read_on == ["off", "on"]


@pytest.mark.promise("F344")
async def test_a_wait_looks_on_a_standby_while_none_can_be_written(pgqueue_db: str, eyes: Eyes) -> None:
    pgqueue.configure(dsn=f"{two_hosts(pgqueue_db)} options='-c default_transaction_read_only=on'")
    job = running(eyes)
    ends = [asyncio.create_task(asyncio.to_thread(job.result, 50)), asyncio.create_task(job.aresult(50))]
    await until(lambda: len(eyes.backends("pgqueue result")) == 2)
    complete(eyes.conn, job)
    assert await asyncio.gather(*ends) == ["in"] * 2
    assert not eyes.one("SELECT is_called FROM pgqueue.job_waiter_waiter_seq")


@pytest.mark.promise("F485")
@pytest.mark.usefixtures("pgqueue_db")
async def test_a_wait_goes_on_through_a_switchover(eyes: Eyes) -> None:
    """Naive: the new connection begins by removing the row of the old one, and the server's refusal ends the wait."""
    job, database = running(eyes), eyes.one("SELECT current_database()")
    ends = [asyncio.create_task(asyncio.to_thread(job.result, 50)), asyncio.create_task(job.aresult(50))]
    await until(wait_for(eyes, 2))
    eyes.do(f'ALTER DATABASE "{database}" SET default_transaction_read_only = on')
    assert end_waiters(eyes) == 2
    await until(lambda: len(eyes.all(RESTS)) == 2)
    assert wait_for(eyes, 2)()
    eyes.do(f'ALTER DATABASE "{database}" RESET default_transaction_read_only')
    assert end_waiters(eyes) == 2
    await until(lambda: eyes.all("SELECT waiter > 2 FROM pgqueue.job_waiter") == [(True,)] * 2)  # the old ones are gone
    complete(eyes.conn, job)
    assert await asyncio.gather(*ends) == ["in"] * 2
    assert wait_for(eyes, 0)()


@pytest.mark.promise("F485")
@pytest.mark.usefixtures("pgqueue_db")
@pytest.mark.parametrize("error", ["read_only_sql_transaction", "insufficient_privilege", "disk_full"])
@pytest.mark.parametrize(
    "refused", ["begin_wait(job_id bigint) RETURNS bigint", "leave_wait(waiter bigint) RETURNS void"]
)
async def test_what_a_server_refuses_a_wait_ends_no_wait(eyes: Eyes, refused: str, error: str) -> None:
    """Naive: the result is there, the row cannot be removed any more, and the call raises that."""
    body = f"LANGUAGE plpgsql AS $$ BEGIN RAISE {error}; END $$"
    eyes.do(f"CREATE OR REPLACE FUNCTION pgqueue.{refused} {body}")
    job, other = running(eyes), running(eyes)
    ends = [asyncio.create_task(asyncio.to_thread(job.result, 50)), asyncio.create_task(job.aresult(50))]
    late = [asyncio.create_task(asyncio.to_thread(other.result, 0.3)), asyncio.create_task(other.aresult(0.3))]
    answers = await asyncio.gather(*late, return_exceptions=True)
    assert [type(answer) for answer in answers] == [pgqueue.ResultTimeout] * 2
    complete(eyes.conn, job)
    assert await asyncio.gather(*ends) == ["in"] * 2


@pytest.mark.promise("F485")
@pytest.mark.usefixtures("pgqueue_db")
@pytest.mark.parametrize("kind", ["thread", "loop"])
async def test_a_look_that_a_standby_cancels_is_made_again(
    eyes: Eyes, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    job, cancelled = running(eyes), list[str]()
    run, arun = drivers.run, drivers.arun

    def cancel(sql: str) -> None:
        if sql == statements.text("wait_outcome", "pgqueue") and len(cancelled) < 2:
            cancelled.append(sql)
            complete(eyes.conn, job) if len(cancelled) == 2 else None
            raise psycopg.errors.SerializationFailure("canceling statement due to conflict with recovery")

    def cancelling(conn: object, statement: statements.Statement[Any]) -> Any:
        cancel(statement.sql)
        return run(conn, statement)

    async def acancelling(conn: object, statement: statements.Statement[Any]) -> Any:
        cancel(statement.sql)
        return await arun(conn, statement)

    for error in (psycopg.errors.SerializationFailure, psycopg.errors.QueryCanceled):
        assert wait_module._passes(eyes.conn, error("no")) == (error is psycopg.errors.SerializationFailure)
    monkeypatch.setattr(drivers, "run", cancelling)
    monkeypatch.setattr(drivers, "arun", acancelling)
    assert await (asyncio.to_thread(job.result, 50) if kind == "thread" else job.aresult(50)) == "in"
    assert len(cancelled) == 2


@pytest.mark.usefixtures("pgqueue_db")
def test_who_cannot_connect_at_all_is_told_at_once(own_server: Server) -> None:
    pgqueue.configure(dsn=own_server.dsn("nowhere"))
    with pytest.raises(psycopg.OperationalError, match="nowhere"):
        pgqueue.JobHandle(1).result()


@pytest.mark.second
@pytest.mark.usefixtures("pgqueue_db")
@pytest.mark.parametrize("timeout", [4.0, None])
async def test_a_link_that_went_dead_does_not_hold_the_wait(
    dsn: str, eyes: Eyes, monkeypatch: pytest.MonkeyPatch, timeout: float | None
) -> None:
    """Nothing passes any more, and nobody says so. With a timeout it is kept, without one the link is replaced."""
    monkeypatch.setattr(wait_module, "ANSWER_SECONDS", 0.5)
    job = running(eyes)
    with Wire(dsn) as wire:
        pgqueue.configure(dsn=wire.dsn)
        asked = asyncio.create_task(asyncio.to_thread(job.result, timeout)), asyncio.create_task(job.aresult(timeout))
        await until(wait_for(eyes, 2))
        assert wire.kill("pgqueue result") == 2
        if timeout is None:
            complete(eyes.conn, job)
            assert list(await asyncio.wait_for(asyncio.gather(*asked), 30)) == ["in"] * 2
            return
        for each in asked:
            with pytest.raises(pgqueue.ResultTimeout):
                await asyncio.wait_for(each, 30)


@pytest.mark.second
@pytest.mark.usefixtures("patient")
async def test_who_is_cancelled_over_a_dead_link_is_cancelled(
    dsn: str, eyes: Eyes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That the row cannot be taken away is no reason to connect again, and to go on waiting."""
    monkeypatch.setattr(wait_module, "ANSWER_SECONDS", 0.5)
    with Wire(dsn) as wire:
        pgqueue.configure(dsn=wire.dsn)
        end = asyncio.create_task(put(eyes).aresult())
        await until(wait_for(eyes))
        await until(lambda: eyes.all(RESTS))
        wire.kill("pgqueue result")
        end.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(end, 30)
    assert wait_for(eyes, 1)()


# Where nobody can be told --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["notify off", "listen off", "pooler", "read only"])
async def test_where_nobody_can_be_told_it_is_found_by_looking(
    pgqueue_db: str, eyes: Eyes, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    match how:
        case "notify off":
            monkeypatch.setenv("PGQUEUE_NOTIFY", "off")
        case "listen off":
            monkeypatch.setenv("PGQUEUE_LISTEN_DSN", "off")
        case "pooler":  # it makes up the pid that it tells its clients
            monkeypatch.setattr(psycopg.ConnectionInfo, "backend_pid", property(lambda info: 1))
        case _:
            pgqueue.configure(dsn=f"{pgqueue_db}&options=-c%20default_transaction_read_only%3Don")
    with psycopg.connect(pgqueue_db) as conn:
        job = gate.enqueue(conn)
    async with work(pgqueue_db, gate):
        ends = [asyncio.create_task(job.aresult(30)), asyncio.create_task(asyncio.to_thread(job.result, 30))]
        await until(eyes.is_in(job.id, "running"))
        gate_open.set()
        assert await asyncio.gather(*ends) == ["through"] * 2
    assert not eyes.one("SELECT is_called FROM pgqueue.job_waiter_waiter_seq")


async def test_it_listens_where_a_connection_for_that_is_named(
    patient: str, eyes: Eyes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGQUEUE_LISTEN_DSN", f"{patient}&application_name=direct")
    end = asyncio.create_task(put(eyes).aresult(30))
    await until(wait_for(eyes))
    assert len(eyes.backends("direct")) == 1
    end.cancel()
    with suppress(asyncio.CancelledError):
        await end


def nodes(plan: dict[str, Any]) -> list[dict[str, Any]]:
    return [plan, *(each for child in plan.get("Plans", ()) for each in nodes(child))]


def test_who_waited_under_an_old_snapshot_costs_completions_nothing(dsn: str, eyes: Eyes) -> None:
    """`EXISTS (SELECT FROM job_waiter)` would walk every row deleted since: 20 ms a statement for 100,000 of them."""
    eyes.do(
        "INSERT INTO pgqueue.job (state, task, worker_id, claim, started_at) "
        "SELECT 'running', 't', 1, 1, pgqueue.now() FROM generate_series(1, 20)"
    )
    with psycopg.connect(dsn) as old:
        old.execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1")
        for _ in range(2):
            eyes.do("INSERT INTO pgqueue.job_waiter (job_id) SELECT generate_series(1, 10000)")
            eyes.do("DELETE FROM pgqueue.job_waiter")
        ids = [id for (id,) in eyes.all("SELECT id FROM pgqueue.job_running ORDER BY 1")]
        params = {"ids": ids, "claims": [1] * 20, "worker_id": 1, "version_tag": "1", "notify": True}
        with psycopg.connect(dsn) as conn:
            conn.execute(statements.text("sessions_settings", "pgqueue").encode())
            sql = "EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) " + statements.text("complete_plain", "pgqueue")
            [(found,)] = conn.execute(sql.encode(), params).fetchall()
        looked = [each for each in nodes(found[0]["Plan"]) if each.get("Relation Name") == "job_waiter"]
        read = sum(each["Shared Hit Blocks"] + each["Shared Read Blocks"] for each in looked)
        assert ([each.get("Index Name") for each in looked], read < 150) == (["job_waiter_job"], True), (read, looked)
