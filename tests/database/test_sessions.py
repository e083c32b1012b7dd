"""A worker's own connections: one transaction per message, dependent on no setting of role, database or pooler."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import psycopg
import pytest
from faults import Wire
from psycopg import errors
from psycopg.conninfo import make_conninfo
from workers import Eyes, until, work

from pgqueue.client.enqueue import enqueue
from pgqueue.client.tasks import task
from pgqueue.database import sessions
from pgqueue.database.sessions import Link, Session, transaction
from pgqueue.database.statements import Statement, text
from pgqueue.jobs.job import Job


@task(name="sessions.returns")
async def returns(text: str) -> str:
    return text


@task(name="sessions.in_thread")
def in_thread() -> None: ...


@task(name="sessions.writes", transactional=True)
def writes(job: Job) -> None:
    job.connection.execute("SELECT 1")


@task(name="sessions.fails_once")
async def fails_once(job: Job) -> None:
    if job.attempt == 1:
        raise ValueError("the first time")


def select(sql: str) -> Statement[object]:
    return Statement(sql, {}, lambda rows: rows[0][0] if rows else None)


@pytest.fixture
def session(dsn: str) -> Session:
    return Session(Link(dsn, "pgqueue"), "test")


NAMES = "transaction_isolation", "lock_timeout", "statement_timeout", "search_path", "plan_cache_mode"
SET = ["read committed", "2s", "30s", "", "force_generic_plan"]


async def setting(session: Session, name: str) -> str:
    """As it is on its connection outside of its messages."""
    assert session._connection is not None
    [[(value,)]] = await session._connection.ask([select(f"SELECT current_setting('{name}')")])
    return str(value)


@pytest.mark.parametrize("way", ["our own", "a pooler's", "an old one", "another's", "nothing prepared"])
async def test_a_message_is_one_read_committed_transaction_with_its_own_settings(
    way: str, dsn: str, eyes: Eyes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What role and database say does not matter. Only on a session that is ours alone something is left behind."""
    session = Session(Link(dsn, "pgqueue", prepare=way != "nothing prepared"), "test")
    database = eyes.one("SELECT current_database()")
    eyes.do(f'ALTER DATABASE "{database}" SET lock_timeout = 7')
    eyes.do(f'ALTER DATABASE "{database}" SET default_transaction_isolation = serializable')
    if way == "a pooler's":
        monkeypatch.setattr(sessions, "own", lambda conn, rows: None)
    elif way == "an old one":  # of a pooler that has told us its pid by chance
        monkeypatch.setattr(sessions, "TRAVEL_SECONDS", -3_600.0)
    elif way == "another's":
        monkeypatch.setattr(sessions, "own", lambda conn, rows: (rows[0][0] + 1, rows[0][1]))
    for _ in range(2):
        first, second = await session.run(
            select("SELECT pg_current_xact_id()::text"), select("SELECT txid_current()::text")
        )
        assert first == second
        found = await session.run(*(select(f"SELECT current_setting('{name}')") for name in NAMES))
        assert found == SET
    assert await setting(session, "lock_timeout") == ("2s" if way == "our own" else "7ms")
    assert await setting(session, "transaction_isolation") == "serializable"
    await session.close()
    assert await session.run(*(select(f"SELECT current_setting('{name}')") for name in NAMES)) == SET
    await session.close()


async def test_what_one_message_has_set_for_itself_is_not_there_for_the_next(session: Session) -> None:
    await session.run(select("SELECT set_config('lock_timeout', '1s', true)"))
    assert await session.run(select("SELECT current_setting('lock_timeout')")) == ["2s"]
    await session.close()


def test_no_statement_of_a_worker_is_compiled(conn: psycopg.Connection) -> None:
    """Up to PostgreSQL 17 what must be scanned without enable_seqscan costs 1e10: each beat would be compiled first."""
    conn.execute("SET jit = on")
    conn.execute(text("sessions_settings", "pgqueue").encode())
    assert conn.execute("SELECT current_setting('jit')").fetchall() == [("off",)]


async def test_an_error_rolls_everything_back_and_the_next_message_finds_a_new_connection(
    session: Session, eyes: Eyes
) -> None:
    await session.run(select("SELECT 1"))
    before, generation = dict(vars(session)), session.generation
    with pytest.raises(errors.DivisionByZero):
        await session.run(
            select("INSERT INTO pgqueue.queue (name) VALUES ('half')"),
            select("SELECT 1/0"),
            select("INSERT INTO pgqueue.queue (name) VALUES ('other half')"),
        )
    assert vars(session)["identity"] is None
    assert eyes.all("SELECT name FROM pgqueue.queue") == []
    assert await session.run(select("SELECT 2")) == [2]
    assert session.generation == generation + 1
    assert session.identity not in (None, before["identity"])
    await session.close()


async def test_a_message_that_is_cancelled_closes_its_connection(session: Session, eyes: Eyes) -> None:
    message = asyncio.ensure_future(session.run(select("SELECT pg_sleep(60)")))
    await until(lambda: eyes.one("SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'PgSleep'"))
    message.cancel()
    with pytest.raises(asyncio.CancelledError):
        await message
    assert session.identity is None
    assert await session.run(select("SELECT 2")) == [2]
    await session.close()


async def test_two_messages_at_once_wait_for_each_other(session: Session) -> None:
    answers = await asyncio.gather(*(session.run(select(f"SELECT {n}")) for n in range(20)))
    assert answers == [[n] for n in range(20)]
    assert session.generation == 1
    await session.close()


@pytest.mark.parametrize("way", ["fails", "is cancelled"])
async def test_a_connection_that_was_not_made_ready_is_not_used(way: str, dsn: str, eyes: Eyes) -> None:
    """Others would not know whose it is."""
    began, known = asyncio.Event(), asyncio.Event()
    calls: list[int] = []

    async def opened() -> None:
        calls.append(1)
        began.set()
        if len(calls) == 1 and way == "fails":
            raise OSError("no beat")
        await known.wait()

    session = Session(Link(dsn, "pgqueue"), "test", opened)
    getting_ready = asyncio.ensure_future(session.ready())
    await began.wait()
    getting_ready.cancel()
    await asyncio.gather(getting_ready, return_exceptions=True)
    assert session.identity is None
    await until(lambda: not eyes.backends("pgqueue test"))
    known.set()
    assert await session.ready() == 2
    assert len(calls) == 2
    await session.close()


@pytest.mark.second
@pytest.mark.promise("F06")
async def test_a_session_that_broke_off_is_ended_before_anything_else_is_sent(
    dsn: str, eyes: Eyes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By whichever session of the worker speaks first: what was under way is undone then, and its locks are free."""
    monkeypatch.setattr(sessions, "ROUND_TRIP_SECONDS", 1.0)
    eyes.do("INSERT INTO pgqueue.queue (name) VALUES ('locked')")
    with Wire(dsn) as wire:
        link = Link(wire.dsn, "pgqueue")
        one, other = Session(link, "one"), Session(link, "other")
        await other.run(select("SELECT 1"))
        locks = select("UPDATE pgqueue.queue SET paused_at = now()")
        message = asyncio.ensure_future(one.run(locks, select("SELECT pg_sleep(3600)")))
        await until(lambda: eyes.one("SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'PgSleep'"))
        wire.kill("pgqueue one")
        with pytest.raises(psycopg.OperationalError):
            await message
        assert await other.run(select("SELECT paused_at FROM pgqueue.queue FOR UPDATE SKIP LOCKED")) == [None]
        assert eyes.one("SELECT count(*) FROM pgqueue.queue") == 1
        assert not eyes.backends("pgqueue one") and not link.left
        await one.close()
        await other.close()


async def test_what_the_server_itself_has_refused_leaves_nothing_to_end(session: Session) -> None:
    with pytest.raises(errors.DivisionByZero):
        await session.run(select("SELECT 1/0"))
    assert not session.link.left
    await session.close()


async def test_a_session_that_is_not_ours_to_end_is_named(
    dsn: str, eyes: Eyes, caplog: pytest.LogCaptureFixture
) -> None:
    """Another role's: a role that SET ROLE gives does not own the sessions of the one that came."""
    role = f"plain_{eyes.one('SELECT pg_backend_pid()')}"
    eyes.do(f"CREATE ROLE {role}")
    session = Session(Link(make_conninfo(dsn, options=f"-c role={role}"), "pgqueue"), "test")
    try:
        mine = eyes.all("SELECT pid, backend_start::text FROM pg_stat_activity WHERE pid = pg_backend_pid()")[0]
        session.link.left.add(mine)
        assert await session.run(select("SELECT 1")) == [1]
        assert [record.getMessage() for record in caplog.records] == [
            f"session {mine[0]} of this worker has lost its connection and could not be ended: its locks stay"
        ]
        assert not session.link.left and not session.link.stuck
    finally:
        await session.close()
        eyes.do(f"DROP ROLE {role}")


@pytest.mark.promise("F470")
async def test_a_session_that_has_not_ended_in_time_is_told_again_and_no_message_waits_for_that(
    dsn: str, eyes: Eyes, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Naive: that is logged, and forgotten, and its locks stay."""
    link, asked = session.link, list[int]()

    def in_vain(_: Link, left: tuple[int, str]) -> Statement[Any]:
        asked.append(left[0])
        return Statement("SELECT false", {}, list)

    monkeypatch.setattr(sessions, "ending", in_vain)
    with psycopg.connect(dsn, autocommit=True) as conn:
        cursor = conn.execute("SELECT pid, backend_start::text FROM pg_stat_activity WHERE pid = pg_backend_pid()")
        [left] = cursor.fetchall()
        link.left.add(left)
        assert await session.run(select("SELECT 1")) == [1]
        assert asked == [left[0]] * 2 and not link.left and set(link.stuck) == {left}
        assert await session.run(select("SELECT 1")) == [1]
        assert len(asked) == 2 and eyes.one("SELECT count(*) FROM pg_stat_activity WHERE pid = %s", left[0]) == 1
        link.stuck[left] = 0.0
        assert await session.run(select("SELECT 1")) == [1]
        await until(lambda: not eyes.one("SELECT count(*) FROM pg_stat_activity WHERE pid = %s", left[0]))
        assert set(link.stuck) == {left}, "that it is gone is seen when it is told again"
        link.stuck[left] = 0.0
        assert await session.run(select("SELECT 1")) == [1]
        assert not link.stuck and len(asked) == 2
    await session.close()


async def test_a_session_behind_a_pooler_is_nobodys_own(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """It makes up the pid that it tells its clients: to end the one that answers would hit whoever has it now."""
    monkeypatch.setattr(psycopg.ConnectionInfo, "backend_pid", 4711)
    await session.run(select("SELECT 1"))
    assert session.identity is None
    await session.close()


SHADOWS = """
    CREATE SCHEMA evil;
    CREATE FUNCTION evil.now() RETURNS timestamptz LANGUAGE sql AS 'SELECT ''-infinity''::timestamptz';
    CREATE FUNCTION evil.clock_timestamp() RETURNS timestamptz LANGUAGE sql AS 'SELECT ''-infinity''::timestamptz';
    CREATE FUNCTION evil.set_config(text, text, boolean) RETURNS text LANGUAGE sql AS 'SELECT ''ignored''';
    CREATE FUNCTION evil.pg_try_advisory_lock(bigint) RETURNS boolean LANGUAGE sql AS 'SELECT false';
    CREATE FUNCTION evil.hashtextextended(text, integer) RETURNS bigint LANGUAGE sql AS 'SELECT 1/0::bigint';
    CREATE FUNCTION evil.make_interval(secs float8) RETURNS interval LANGUAGE sql AS 'SELECT interval ''-1 day''';
    CREATE FUNCTION evil.pg_notify(text, text) RETURNS void LANGUAGE sql AS 'SELECT';
    CREATE FUNCTION evil.pg_current_snapshot() RETURNS text LANGUAGE sql AS 'SELECT ''1:1:''';
    CREATE VIEW evil.pg_stat_activity AS SELECT 1 AS pid, timestamptz '-infinity' AS backend_start;
    CREATE TABLE evil.job (); CREATE TABLE evil.worker ();
    CREATE FUNCTION evil.wrong(bigint, bigint) RETURNS boolean LANGUAGE sql AS 'SELECT false';
    CREATE OPERATOR evil.= (LEFTARG = bigint, RIGHTARG = bigint, FUNCTION = evil.wrong);
"""

ANNOUNCED = """
    SELECT count(*) >= 4 AND count(*) = count(a.pid)
    FROM pgqueue.worker w, jsonb_to_recordset(w.sessions) s (pid int, backend_start timestamptz)
    LEFT JOIN pg_stat_activity a USING (pid, backend_start) WHERE w.id = %s
"""
# The application's own session is not what is tested here.
SANE = " ".join(
    f"-c {setting}"
    for setting in (
        "search_path=",
        "default_transaction_read_only=off",
        "statement_timeout=0",
        "lock_timeout=0",
        "idle_in_transaction_session_timeout=0",
        "idle_session_timeout=0",
    )
)
# What the worker does meanwhile takes longer than the timeout of a role below.
BUSY = "LOCK TABLE pgqueue.job_running; SELECT pg_sleep({})"
SETTINGS = {
    "isolation": ["default_transaction_isolation = 'serializable'"],
    "repeatable read": ["default_transaction_isolation = 'repeatable read'", "default_transaction_deferrable = on"],
    "shadows first": ["search_path = evil, pg_catalog"],
    "shadows only": ["search_path = evil"],
    # Not less: the statement that sets the worker's own is still under the role's.
    "no statement may take long": ["statement_timeout = '800ms'"],
    "no lock may take long": ["lock_timeout = '1ms'", "deadlock_timeout = '10ms'"],
    "not durable": ["synchronous_commit = off"],
    "no index scans": ["enable_indexscan = off", "enable_nestloop = off", "enable_sort = off"],
    "another time": ["DateStyle = 'SQL, DMY'", "TimeZone = 'Asia/Kolkata'", "IntervalStyle = 'sql_standard'"],
    "another alphabet": ["client_encoding = 'latin1'", "standard_conforming_strings = on"],
    "idle transactions die": ["idle_in_transaction_session_timeout = '800ms'"],
    "idle sessions die": ["idle_session_timeout = '800ms'"],
    "no transaction may take long": ["transaction_timeout = '800ms'"],
    "no NULL in arrays": ["array_nulls = off"],
    "planned by value": ["plan_cache_mode = force_custom_plan", "jit = on", "jit_above_cost = 0"],
}


@pytest.mark.promise("F06", "F193")
@pytest.mark.parametrize("name", SETTINGS)
async def test_no_setting_of_the_role_breaks_a_worker(
    name: str, dsn: str, eyes: Eyes, caplog: pytest.LogCaptureFixture
) -> None:
    eyes.do(SHADOWS)
    database = eyes.one("SELECT current_database()")
    sane = SANE
    for setting in SETTINGS[name]:
        if setting.startswith("transaction_timeout"):
            if eyes.conn.info.server_version < 170_000:
                pytest.skip("of PostgreSQL 17")
            sane += " -c transaction_timeout=0"
        eyes.do(f"ALTER ROLE CURRENT_USER IN DATABASE {database} SET {setting}")
    caplog.set_level(logging.WARNING)
    async with work(dsn, returns, in_thread, writes, fails_once, lease=1.5) as worker:
        with psycopg.connect(dsn, options=sane, client_encoding="utf8") as conn:
            text = enqueue(conn, returns, text="ł ✓ 漢")
            enqueue(conn, in_thread)
            enqueue(conn, in_thread.using(delay=0.2))
            enqueue(conn, writes)  # its session has the settings of the role
            failing = enqueue(conn, fails_once)
            await asyncio.to_thread(conn.execute, BUSY.format(1.2 if "800ms" in SETTINGS[name][0] else 0.2))
        await until(eyes.is_in(failing.id, "scheduled"))
        await until(eyes.done(4))
        assert eyes.one("SELECT result #>> '{}' FROM pgqueue.job WHERE id = %s", text.id) == "ł ✓ 漢"
        wait = eyes.one(
            "SELECT extract(epoch FROM run_at - a.finished_at) FROM pgqueue.job j "
            "JOIN pgqueue.attempt a ON a.job_id = j.id WHERE j.id = %s",
            failing.id,
        )
        assert 4.9 < wait <= 10.4  # up to a quarter of a second more, see complete_retry
        await until(lambda: eyes.one("SELECT beat FROM pgqueue.worker WHERE id = %s", worker.worker_id) >= 3)
        # Every session it announced is there, under its real start time: rescue could end it.
        await until(lambda: eyes.one(ANNOUNCED, worker.worker_id))
        assert worker.services.election.leads()
    # Of the worker itself; what it says of the job that fails is wanted.
    assert [record.getMessage() for record in caplog.records if record.name != "pgqueue.job"] == []
    assert eyes.one("SELECT count(*) FROM pgqueue.worker") == 0


STYLES = [
    "",
    "-c DateStyle=SQL,DMY",
    "-c DateStyle=German",
    "-c TimeZone=Asia/Kolkata",
    "-c TimeZone=Australia/Lord_Howe",
]


@pytest.mark.promise("F490")
@pytest.mark.parametrize("zone", ["UTC", "Asia/Kolkata"])
def test_a_server_and_a_session_have_one_name_in_all_sessions(zone: str, dsn: str) -> None:
    """Naive: as DateStyle and TimeZone write them. The name of a zone may be another one's for the reader: IST."""
    servers, identity = set(), text("sessions_identity", "pgqueue").encode()
    with psycopg.connect(dsn, options=f"-c DateStyle=SQL,DMY -c TimeZone={zone}") as conn:
        [(pid, start)] = conn.execute(identity).fetchall()
        for style in STYLES:
            with psycopg.connect(dsn, options=style) as other:
                servers.add(other.execute(text("sessions_server", "pgqueue").encode()).fetchone())
                is_it = "SELECT backend_start = %s::timestamptz FROM pg_stat_activity WHERE pid = %s"
                assert other.execute(is_it, [start, pid]).fetchone() == (True,), style
    assert len(servers) == 1


@pytest.mark.promise("F490")
async def test_a_worker_whose_sessions_have_unlike_settings_takes_its_server_for_one(dsn: str, eyes: Eyes) -> None:
    """Naive: each new session of one kind breaks all of the other, so few jobs run, or none."""
    listen_dsn = make_conninfo(dsn, options="-c TimeZone=Asia/Kolkata -c DateStyle=SQL,DMY")
    async with work(dsn, in_thread, writes, listen_dsn=listen_dsn) as worker:
        with psycopg.connect(dsn) as conn:
            for _ in range(10):
                enqueue(conn, in_thread)
                enqueue(conn, writes)
        await until(eyes.done(20))
        assert worker.services.fetch_session.generation == 1


@pytest.mark.promise("F06")
def test_a_link_that_dies_before_the_last_answer_is_hung_up(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that is left to come is the answer to COMMIT."""
    monkeypatch.setattr(sessions, "ROUND_TRIP_SECONDS", 1.0)
    with Wire(dsn) as wire, psycopg.connect(wire.dsn, application_name="pgqueue beat", autocommit=True) as conn:
        with pytest.raises(psycopg.OperationalError), transaction(conn, Link(dsn, "pgqueue")):
            conn.execute("SELECT 1").fetchall()
            assert wire.kill("pgqueue beat") == 1
        assert conn.closed
