"""A trigger of the application on a table of jobs raises: workers live, outcomes are kept, and the trigger is named."""

from __future__ import annotations

import logging
from time import process_time

import psycopg
import pytest
from workers import Eyes, until, work

import pgqueue
from pgqueue.cli.exit_codes import DATABASE, code_of, line_of
from pgqueue.client.tasks import task
from pgqueue.database.triggers import trigger_of
from pgqueue.worker.fetch import refused_rows

RAISES = {
    "a table of its own is missing": "PERFORM 1 FROM nowhere",
    "it refuses the row": "RAISE EXCEPTION 'no' USING ERRCODE = 'check_violation'",
    "a duplicate": "RAISE EXCEPTION 'no' USING ERRCODE = 'unique_violation'",
    "no right": "RAISE EXCEPTION 'no' USING ERRCODE = 'insufficient_privilege'",
    "a limit": "RAISE EXCEPTION 'no' USING ERRCODE = '54000'",
    "a lock": "RAISE EXCEPTION 'no' USING ERRCODE = 'lock_not_available'",
}
TRIGGER = """
    CREATE FUNCTION minds() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        IF coalesce(NEW.args ->> 'bad', OLD.args ->> 'bad') = 'yes' THEN {}; END IF;
        RETURN coalesce(NEW, OLD);
    END $$;
    CREATE TRIGGER minds BEFORE {} ON pgqueue.{} FOR EACH ROW EXECUTE FUNCTION minds();
"""


def trigger(eyes: Eyes, what: str, event: str, table: str) -> None:
    eyes.conn.execute(TRIGGER.format(RAISES[what], event, table).encode())


@task(name="triggers.ends")
async def ends(bad: str = "no") -> None:
    pass


def ran(dsn: str, *bad: str) -> list[int]:
    with psycopg.connect(dsn) as conn:
        return [job.id for job in pgqueue.enqueue_many(conn, [ends.new(bad) for bad in bad])]


@pytest.mark.promise("F45")
@pytest.mark.parametrize("what", RAISES)
async def test_one_job_that_may_not_end_keeps_its_outcome_and_no_other_job_waits(
    dsn: str, eyes: Eyes, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The naive ways: the worker ends, the job is failed although it ran, or the whole batch is tried for ever."""
    trigger(eyes, what, "INSERT", "job_done_0")
    good, bad, after = ran(dsn, "no", "yes", "no")
    async with work(dsn, ends) as worker:
        for id in (good, after):
            await until(eyes.is_in(id, "completed"), 20)
        [later] = ran(dsn, "no")
        await until(eyes.is_in(later, "completed"), 20)
        assert eyes.state(bad) == "running"
        await until(lambda: [one for one in caplog.records if one.levelno == logging.ERROR])
        eyes.do("DROP TRIGGER minds ON pgqueue.job_done_0")
        await until(eyes.is_in(bad, "completed"), 20)
        assert worker.state.phase == "running"
    said = [one.getMessage() for one in caplog.records if one.levelno == logging.ERROR]
    assert said and all("minds" in one and f"job {bad} " in one for one in said)
    assert eyes.all("SELECT attempt FROM pgqueue.job WHERE attempt <> 1") == []


@pytest.mark.promise("F45")
@pytest.mark.parametrize(
    "what",
    [
        "it refuses the row",
        *(pytest.param(what, marks=pytest.mark.second) for what in ("a table of its own is missing", "no right")),
    ],
)
async def test_a_worker_lives_while_a_trigger_lets_no_job_start(
    dsn: str, eyes: Eyes, what: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refused_rows, "SOON_SECONDS", 0.5)
    trigger(eyes, what, "INSERT", "job_running")
    [bad] = ran(dsn, "yes")
    async with work(dsn, ends) as worker:
        await until(lambda: [one for one in caplog.records if "fetch" in one.getMessage()])
        assert worker.state.phase == "running"
        eyes.do("DROP TRIGGER minds ON pgqueue.job_running")
        await until(eyes.is_in(bad, "completed"))
    assert "minds" in caplog.text


@pytest.mark.promise("F45")
def test_an_application_sees_its_own_error(dsn: str, eyes: Eyes) -> None:
    """A missing table of the application is not a missing table of pgqueue."""
    trigger(eyes, "a table of its own is missing", "INSERT", "job_available")
    with psycopg.connect(dsn) as conn, pytest.raises(psycopg.errors.UndefinedTable, match="nowhere") as caught:
        ends.enqueue(conn, "yes")
    assert trigger_of(caught.value) == "minds"
    assert code_of(caught.value) == DATABASE
    assert "function minds, in a trigger" in line_of(caught.value)


@pytest.mark.promise("F45")
def test_what_functions_of_pgqueue_raise_is_not_the_applications(conn: psycopg.Connection) -> None:
    for sql in ("SELECT pgqueue.refuse('x')", "UPDATE pgqueue.job SET id = 1", "SELECT pgqueue.refuse_lost(1)"):
        with pytest.raises(psycopg.Error) as caught, conn.transaction():
            conn.execute(sql.encode())
        assert trigger_of(caught.value) is None


@pytest.mark.promise("F45", "F124")
@pytest.mark.parametrize("schema", ["app", "public"], ids=["another schema", "a schema of the search_path"])
def test_a_function_of_the_application_may_be_named_like_one_of_ours(dsn: str, eyes: Eyes, schema: str) -> None:
    eyes.do("CREATE SCHEMA app")
    for name in ("take_keys", "enqueue", "restore_settings", "replace_setting", "put_in_place", "a.b"):
        eyes.do(
            f"""CREATE FUNCTION {schema}."{name}"() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'no'; END $$;
            CREATE TRIGGER minds BEFORE INSERT ON pgqueue.job_available
            FOR EACH ROW EXECUTE FUNCTION {schema}."{name}"()"""
        )
        with psycopg.connect(dsn) as conn, pytest.raises(psycopg.errors.RaiseException) as caught:
            ends.enqueue(conn, "yes")
        assert trigger_of(caught.value) in (name, name.partition(".")[2])
        eyes.do("DROP TRIGGER minds ON pgqueue.job_available")


@pytest.mark.promise("F45")
@pytest.mark.parametrize("said", ["PL/pgSQL function a() line 1", "PL/x " * 20_000], ids=["a line", "very long"])
def test_what_a_statement_quotes_names_no_trigger(conn: psycopg.Connection, said: str) -> None:
    started = process_time()
    asks = "CREATE FUNCTION asks() RETURNS void LANGUAGE plpgsql AS $$ BEGIN EXECUTE 'SELECT 1/0 --{}'; END $$"
    conn.execute(asks.format(said).encode())
    with pytest.raises(psycopg.errors.DivisionByZero) as caught, conn.transaction():
        conn.execute("SELECT asks()")
    assert said in str(caught.value.diag.context)
    assert trigger_of(caught.value) == "asks"
    with pytest.raises(psycopg.errors.InvalidTextRepresentation) as unfit, conn.transaction():
        conn.execute("SELECT %s::json", [f'{{"{said}"'])
    assert "PL/" in str(unfit.value.diag.context)
    assert trigger_of(unfit.value) is None
    assert process_time() - started < 1


@pytest.mark.promise("F124")
def test_functions_of_pgqueue_are_ours_where_the_search_path_has_them(dsn: str) -> None:
    """The server then names them without their schema."""
    with psycopg.connect(dsn, options="-c search_path=pgqueue,public") as conn:
        for sql in ("SELECT pgqueue.refuse('x')", "UPDATE pgqueue.job SET id = 1"):
            with pytest.raises(psycopg.Error) as caught, conn.transaction():
                conn.execute("INSERT INTO pgqueue.job (task) VALUES ('t')")
                conn.execute(sql.encode())
            assert "function pgqueue." not in str(caught.value.diag.context)
            assert trigger_of(caught.value) is None, sql
