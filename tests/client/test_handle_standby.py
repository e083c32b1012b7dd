"""What a handle says of a job on a real standby that lags, and what is told where nothing can be written."""

from __future__ import annotations

import asyncio
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from servers import Server
from standby import ask, frozen_first, frozen_second, pair
from workers import until

import pgqueue
from pgqueue.client import wait as wait_module
from pgqueue.database import migrations
from pgqueue.steady_clock import monotonic

WAIT = "SELECT count(pg_wal_replay_pause())"


@pytest.mark.second
@pytest.mark.promise("F421")
def test_a_handle_asks_the_primary_of_two_and_else_reads_what_the_standby_has(
    own_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Naive: the standby stands first, has not heard of the job, and the handle says that it is not there."""
    assert own_server.cluster is not None
    with pair(own_server.cluster, synchronous=False) as both:
        hosts = ",".join(str(cluster.sockets) for cluster in (both.standby, both.primary))
        dsn = f"postgresql://postgres@/postgres?host={hosts}"
        migrations.migrate(both.primary.dsn())
        with psycopg.connect(both.primary.dsn()) as conn:
            old = pgqueue.enqueue(conn, "shop.mail")
        both.caught_up()
        ask(both.standby, WAIT)
        with psycopg.connect(both.primary.dsn()) as conn:
            new = pgqueue.enqueue(conn, "shop.mail")
            pgqueue.cancel(conn, old.id)
        monkeypatch.setenv("PGQUEUE_DSN", dsn)
        assert (old.state, new.state) == ("cancelled", "available")
        monkeypatch.setenv("PGQUEUE_DSN", both.standby.dsn())
        assert old.state == "available"  # as it was
        with pytest.raises(pgqueue.JobNotFound):
            _ = new.state
        with psycopg.connect(dsn) as conn:  # the application's connection: libpq takes the first host
            assert old.info(conn).state == "available"
            conn.rollback()
            for change in (lambda: pgqueue.enqueue(conn, "shop.mail"), lambda: pgqueue.cancel(conn, old.id)):
                with pytest.raises(psycopg.errors.ReadOnlySqlTransaction, match="in a read-only transaction"):
                    change()
                conn.rollback()


@pytest.mark.promise("F421")
def test_a_handle_reads_the_standby_while_the_primary_is_frozen(dsn: str) -> None:
    """Naive: the state is waited for until the attempt to find the primary ends, after two minutes."""
    with psycopg.connect(dsn) as conn:
        job = pgqueue.enqueue(conn, "shop.mail")
    began = monotonic()
    with frozen_second(dsn) as address:
        pgqueue.configure(dsn=address)
        assert job.state == "available"
    assert monotonic() - began < 60  # the machine may be busy


# The first connection of a wait --------------------------------------------------------------------------------------


async def both_ways(job: pgqueue.JobHandle[Any], timeout: float | None) -> list[Any]:
    """What `result` and `aresult` have returned or raised."""
    asked = asyncio.to_thread(job.result, timeout), job.aresult(timeout)
    return [*await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 60)]


def only_first(address: str, **more: Any) -> str:
    """The address with the first of its hosts alone."""
    parts = conninfo_to_dict(address)
    return make_conninfo(address, **more, **{name: str(parts[name]).split(",")[0] for name in ("host", "port")})


@pytest.mark.promise("F495")
async def test_a_wait_reaches_the_last_host_whatever_its_timeout(dsn: str) -> None:
    """Naive: `aresult` ends after two hosts, and the driver's error says nothing of the job."""
    with psycopg.connect(dsn) as conn:
        job = pgqueue.enqueue(conn, "shop.mail")
        pgqueue.cancel(conn, job.id)
    with frozen_first(dsn, 2) as address:
        pgqueue.configure(dsn=address)
        for said in await asyncio.gather(*(both_ways(job, timeout) for timeout in (0.5, 5.0))):
            assert [type(each) for each in said] == [pgqueue.JobCancelled] * 2, said


@pytest.mark.promise("F495")
@pytest.mark.parametrize("timeout", [0, 0.5, 2.5])
async def test_no_host_that_answers_within_the_timeout_is_a_result_timeout(dsn: str, timeout: float) -> None:
    """The last one: naive, the host has 2 s, half a second is left, and the error is the driver's."""
    with frozen_first(dsn) as address:
        pgqueue.configure(dsn=only_first(address))
        for each in await both_ways(pgqueue.JobHandle(7), timeout):
            assert isinstance(each, pgqueue.ResultTimeout) and each.job_id == 7, repr(each)
            assert isinstance(each.__cause__, psycopg.OperationalError)


@pytest.mark.promise("F495")
@pytest.mark.parametrize("timeout", [0, 0.5, None])
async def test_what_a_server_refuses_at_once_is_the_error_of_the_driver(
    own_server: Server, timeout: float | None
) -> None:
    """Also without any time: a wrong address is no job that has not ended yet."""
    pgqueue.configure(dsn=own_server.dsn("nowhere"))
    for each in await both_ways(pgqueue.JobHandle(7), timeout):
        assert isinstance(each, psycopg.OperationalError) and "nowhere" in str(each)


@pytest.mark.promise("F495")
async def test_an_address_with_its_own_limit_keeps_it(dsn: str) -> None:
    """The limit of the address has ended the attempt, not that of the wait: the error is the driver's."""
    with frozen_first(dsn) as address:
        pgqueue.configure(dsn=only_first(address, connect_timeout=2))
        for each in await both_ways(pgqueue.JobHandle(7), 40):
            assert isinstance(each, psycopg.errors.ConnectionTimeout)


# A standby that lags -------------------------------------------------------------------------------------------------

WAITS = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'pgqueue result' AND state = 'idle'"


@pytest.mark.second
@pytest.mark.promise("F486")
async def test_a_wait_that_comes_to_a_standby_that_lags_looks_until_the_job_is_there(
    own_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Naive: the standby has not heard of the job yet, and a wait that has seen it says that it is not there."""
    assert own_server.cluster is not None
    with pair(own_server.cluster, synchronous=False) as both:
        migrations.migrate(both.primary.dsn())
        both.caught_up()
        ask(both.standby, WAIT)
        with psycopg.connect(both.primary.dsn()) as conn:
            jobs = [pgqueue.enqueue(conn, "shop.mail") for _ in range(2)]
        written = ask(both.primary, "SELECT pg_current_wal_lsn()::text")
        await until(lambda: ask(both.standby, "SELECT pg_last_wal_receive_lsn() >= %s::pg_lsn", written))
        monkeypatch.setenv("PGQUEUE_DSN", both.dsn("any"))
        ends: list[asyncio.Task[Any]] = [
            asyncio.create_task(asyncio.to_thread(jobs[0].result, 50)),
            asyncio.create_task(jobs[1].aresult(50)),
        ]
        await until(lambda: ask(both.primary, "SELECT count(*) FROM pgqueue.job_waiter") == 2)
        both.crash()
        lost: pgqueue.JobHandle[None] = pgqueue.JobHandle(4711)
        wait = lost._wait(50)
        wait.seen = True
        ends.append(asyncio.create_task(wait_module.asee(wait)))
        await until(lambda: ask(both.standby, WAITS) == 3)
        with pytest.raises(pgqueue.JobNotFound):  # this wait has not seen it
            jobs[0].result(30)
        assert not any(end.done() for end in ends)
        both.promote()
        with psycopg.connect(both.standby.dsn()) as conn:
            for job in jobs:
                pgqueue.cancel(conn, job.id)
        answers = await asyncio.gather(*ends, return_exceptions=True)
        kinds = [pgqueue.JobCancelled, pgqueue.JobCancelled, pgqueue.JobNotFound]
        assert [type(answer) for answer in answers] == kinds


@pytest.mark.promise("F486")
@pytest.mark.parametrize(
    ("timeout", "lag", "raised"), [(0.3, 600.0, pgqueue.ResultTimeout), (None, 0.3, pgqueue.JobNotFound)]
)
async def test_a_job_that_does_not_come_to_a_server_that_only_reads_is_not_waited_for_for_ever(
    dsn: str, monkeypatch: pytest.MonkeyPatch, timeout: float | None, lag: float, raised: type[Exception]
) -> None:
    monkeypatch.setattr(wait_module, "LAG_SECONDS", lag)
    pgqueue.configure(dsn=make_conninfo(dsn, options="-c default_transaction_read_only=on"))
    for kind in ("thread", "loop"):
        job: pgqueue.JobHandle[None] = pgqueue.JobHandle(4711)
        wait = job._wait(timeout)
        wait.seen = True
        with pytest.raises(raised):
            await (asyncio.to_thread(wait_module.see, wait) if kind == "thread" else wait_module.asee(wait))
