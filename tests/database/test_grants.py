"""Each kind of role can do its work, with the real commands, and nothing else."""

from __future__ import annotations

import contextlib
import re
import secrets
from pathlib import Path
from typing import Any

import psycopg
import pytest
from commands import pgqueue, working
from psycopg import errors, sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from roles import Role, create_role, drop_role, refused, role
from workers import wait_until

import pgqueue as api
from pgqueue.database import grants, migrations, statements
from pgqueue.errors import Error, InvalidOption

__all__ = ["role"]

TASKS = """
import pgqueue

@pgqueue.task(name="once", retry=pgqueue.RetryPolicy(attempts=2, first=0.05, most=0.05))
def once(job: pgqueue.Job, path: str) -> str:
    if job.attempt == 1:
        raise ValueError("the first time it fails")
    with pgqueue.connect() as conn:
        pgqueue.enqueue(conn, "touch", path=path)
    return "done"

@pgqueue.task(name="touch")
async def touch(path: str) -> None:
    open(path, "w").close()

@pgqueue.task(name="fail", retry=1)
def fail() -> None:
    raise ValueError("for good")
"""

OF_A_WORKER = {"bulk", "enqueue", "handle", "sessions", "wait"}
"""Files of statements of other wings that a worker or its handlers send."""
OF_AN_OPERATOR = "bulk_start"
"""The statement in these files that a worker may not send."""


# enqueue -------------------------------------------------------------------------------------------------------------


def test_an_enqueuing_role_enqueues_in_every_way(role: Role) -> None:
    mine = role("enqueue")
    task = api.remote("t")
    with psycopg.connect(mine) as conn:
        api.enqueue(conn, task, x=1)
        api.enqueue(conn, task.using(delay=60), x=1)
        api.enqueue_many(conn, [task.new(x=1), task.using(priority=0).new(x=2)])
        api.enqueue_many(conn, [task.new(x=1), task.using(delay=60).new(x=2)])
        conn.execute("SELECT pgqueue.enqueue('t', '{}', priority => 3, run_at => now() + interval '1 hour')")
        conn.execute("INSERT INTO pgqueue.job (task, args) VALUES ('t', '{}')")
        conn.execute(
            "SELECT pgqueue.enqueue('t', lock_key => 'k', lock_limit => 2, on_locked => 'once', limit_key => 'l', "
            "rate_key => 'r:1', unique_key => 'u', idempotency_key => 'i')"
        )
        assert conn.execute("SELECT count(id) FROM pgqueue.job WHERE state = 'available'").fetchone() == (6,)
    assert pgqueue("enqueue", "t", '{"x": 1}', "--delay", "1h", dsn=mine).returncode == 0


def test_a_role_that_was_granted_before_there_were_limits_enqueues_from_sql_as_ever(role: Role, dsn: str) -> None:
    mine = role("enqueue")
    with psycopg.connect(dsn) as conn:
        name = sql.Identifier(str(conninfo_to_dict(mine)["user"]))
        for table in ("job", "job_available"):
            conn.execute(sql.SQL("REVOKE INSERT ON pgqueue.{} FROM {}").format(sql.Identifier(table), name))
        before = "id, state, queue, priority, rank, task, args, headers, run_at, deadline, max_attempts, lock_key"
        conn.execute(sql.SQL(f"GRANT INSERT ({before}) ON pgqueue.job TO {{}}").format(name))
    with psycopg.connect(mine) as conn:
        conn.execute("SELECT pgqueue.enqueue('t', lock_key => 'k')")
        conn.execute("SELECT pgqueue.enqueue('t', lock_key => 'k', unique_key => 'u')")
        with pytest.raises(errors.InsufficientPrivilege):
            conn.execute("SELECT pgqueue.enqueue('t', limit_key => 'l')")


@pytest.mark.second
def test_an_enqueuing_role_that_reads_is_told_when_its_job_has_ended(
    role: Role, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that reads only changes nothing: it waits by looking. One that enqueues only does not see results."""
    reading, enqueuing = role("read"), role("enqueue")
    both = role("read")
    with psycopg.connect(dsn) as conn:
        grants.grant(conn, conninfo_to_dict(both)["user"], "enqueue", "pgqueue")  # type: ignore[arg-type]
        job = api.enqueue(conn, "t")
    waits = "SELECT count(*) FROM pgqueue.job_waiter_waiter_seq WHERE is_called"
    with psycopg.connect(dsn, autocommit=True) as conn:
        for mine, told, patience in ((reading, 0, 1.0), (both, 1, 4.0)):
            monkeypatch.setenv("PGQUEUE_DSN", mine)
            with pytest.raises(api.ResultTimeout):
                job.result(patience)  # time enough to say that it waits
            assert conn.execute(waits.encode()).fetchone() == (told,)
        assert conn.execute("SELECT count(*) FROM pgqueue.job_waiter").fetchone() == (0,)
    monkeypatch.setenv("PGQUEUE_DSN", enqueuing)
    with pytest.raises(errors.InsufficientPrivilege):
        job.result(0.05)


def test_the_drivers_error_has_a_note_that_names_the_rights(role: Role, dsn: str) -> None:
    with psycopg.connect(role("enqueue")) as conn:
        api.enqueue(conn, "t")
        conn.commit()
        with pytest.raises(errors.InsufficientPrivilege) as reading:
            api.get(conn, 1)
        conn.rollback()
        with pytest.raises(errors.InsufficientPrivilege) as changing:
            api.pause(conn, "q")
    with psycopg.connect(role("read")) as conn, pytest.raises(errors.InsufficientPrivilege) as enqueuing:
        api.enqueue(conn, "t")
    for caught, kind in ((reading, "read"), (changing, "operate"), (enqueuing, "enqueue")):
        [note] = caught.value.__notes__
        assert f"--for {kind}`" in note


def test_an_enqueuing_role_neither_reads_arguments_nor_deletes(role: Role) -> None:
    mine = role("enqueue")
    refused(
        mine,
        "SELECT args FROM pgqueue.job",
        "SELECT * FROM pgqueue.job_available",
        "SELECT result FROM pgqueue.job_done",
        "SELECT * FROM pgqueue.attempt",
        "DELETE FROM pgqueue.job",
        "DELETE FROM pgqueue.job_available",
        "TRUNCATE pgqueue.job_available",
        "UPDATE pgqueue.job SET priority = 0",
        "INSERT INTO pgqueue.job (task, pos) VALUES ('t', 1)",
        "INSERT INTO pgqueue.job (task, crashes) VALUES ('t', 1)",
        "INSERT INTO pgqueue.job_running (task) VALUES ('t')",
        "SELECT setval('pgqueue.job_pos_seq', 1)",
        "SELECT pgqueue.advance_ring('done', true)",
        "CREATE TABLE pgqueue.mine ()",
    )
    assert pgqueue("jobs", dsn=mine).returncode == 3
    assert pgqueue("prune", "--all", dsn=mine).returncode == 3


# work ----------------------------------------------------------------------------------------------------------------


@pytest.mark.second
def test_a_working_role_runs_a_worker_with_all_its_duties(role: Role, dsn: str, tmp_path: Path) -> None:
    mine = role("work")
    (tmp_path / "tasks.py").write_text(TASKS)
    done = tmp_path / "done"
    with psycopg.connect(dsn) as conn:
        with working("tasks", "--lease", "1s", dsn=mine, cwd=tmp_path) as worker:
            worker.says("leads now")
            assert pgqueue("enqueue", "once", f'{{"path": "{done}"}}', dsn=mine).returncode == 0
            assert pgqueue("enqueue", "fail", "--delay", "50ms", dsn=mine).returncode == 0
            until(conn, "SELECT count(*) = 2 FROM pgqueue.job WHERE state = 'completed'")
            until(conn, "SELECT count(*) = 1 FROM pgqueue.job WHERE state = 'failed'")
            assert pgqueue("prune", "--all", dsn=mine).returncode == 0
            assert pgqueue("status", dsn=mine).returncode == 0
            worker.process.terminate()
            assert worker.ends() == 0, worker.output
            assert "permission denied" not in worker.output
        assert done.exists()


def test_a_working_role_may_run_every_statement_of_a_worker(role: Role, dsn: str) -> None:
    with psycopg.connect(dsn) as conn:
        conn.execute(
            "INSERT INTO pgqueue.worker (lease, pid, concurrency, host, version_tag, queues, dead_at) "
            "VALUES ('15 s', 1, 1, 'gone', '1', '{default}', now())"
        )
    files = {stem for stem, path in statements._files().items() if path.parent.name == "worker"} | OF_A_WORKER
    names = [name for name in statements.names() if statements.home(name) in files and name != OF_AN_OPERATOR]
    assert len(names) > 80
    with psycopg.connect(role("work")) as conn:
        for name in names:
            text = statements.text(name, "pgqueue")
            nothing = dict.fromkeys(re.findall(r"%\((\w+)\)s", text))
            with conn.transaction(force_rollback=True), contextlib.suppress(errors.NotNullViolation):
                try:
                    conn.execute(text.encode(), nothing)
                except psycopg.ProgrammingError as refusal:  # of our own: the job is not this run's
                    assert refusal.sqlstate == "PGQ01", name


@pytest.mark.second
def test_a_working_role_rescues_the_jobs_of_a_killed_worker(role: Role, dsn: str, tmp_path: Path) -> None:
    mine = role("work")
    (tmp_path / "tasks.py").write_text(
        "import pathlib, pgqueue, time\n@pgqueue.task(name='slow')\ndef slow(job: pgqueue.Job):\n"
        "    pathlib.Path('begun').touch()\n    if not job.crashes: time.sleep(60)\n"
    )
    with psycopg.connect(dsn) as conn, working("tasks", "--lease", "1s", dsn=mine, cwd=tmp_path) as first:
        first.says("leads now")
        pgqueue("enqueue", "slow", dsn=mine)
        wait_until((tmp_path / "begun").exists)
        with working("tasks", "--lease", "1s", dsn=mine, cwd=tmp_path) as second:
            second.says("ready")
            first.process.kill()
            second.says("gave no sign of life: 1 of its jobs was given back")
            until(conn, "SELECT count(*) = 1 FROM pgqueue.job WHERE state = 'completed'")
            assert "permission denied" not in second.output


def test_a_working_role_changes_no_settings_and_makes_nothing(role: Role) -> None:
    refused(
        role("work"),
        "UPDATE pgqueue.ring SET retention = '1 s'",
        "INSERT INTO pgqueue.migration VALUES (2, 'x', true)",
        "DELETE FROM pgqueue.job_done",
        "UPDATE pgqueue.audit SET count = 7",
        "TRUNCATE pgqueue.job_available",
        "INSERT INTO pgqueue.queue (name) VALUES ('q')",
        "CREATE TABLE pgqueue.mine ()",
        "DROP TABLE pgqueue.job",
        "SELECT setval('pgqueue.job_pos_seq', 1)",
    )


def test_a_working_role_may_empty_every_leaf_there_is(dsn: str) -> None:
    with psycopg.connect(dsn) as conn:
        leaves = {
            f"pgqueue.{name}"
            for (name,) in conn.execute(
                "SELECT c.relname "
                "FROM unnest(ARRAY['pgqueue.job_done', 'pgqueue.job_dead', 'pgqueue.attempt', "
                "'pgqueue.history_minute', 'pgqueue.history_hour']) AS parent, "
                "pg_partition_tree(parent::regclass) t JOIN pg_class c ON c.oid = t.relid WHERE t.isleaf"
            )
        }
    script = grants.as_sql("r", "work", "pgqueue")
    granted = script.partition("GRANT TRUNCATE ON")[2].partition("TO")[0]
    assert {name.strip() for name in granted.split(",")} == leaves


# operate -------------------------------------------------------------------------------------------------------------


def test_an_operating_role_operates_and_neither_enqueues_nor_works(role: Role, dsn: str) -> None:
    mine = role("operate")
    with psycopg.connect(dsn) as conn:
        api.enqueue(conn, "t")
        api.enqueue(conn, api.remote("t").using(delay=60))
        conn.execute(
            "INSERT INTO pgqueue.job (state, task, worker_id, claim, started_at) VALUES ('running', 't', 1, 1, now())"
        )
    for command in (
        ["pause", "q"],
        ["status"],
        ["resume", "q"],
        ["jobs"],
        ["cancel", "--task", "t", "--yes"],
        ["retry", "1"],
        ["discard", "2"],
        ["discard", "--older-than", "0", "--yes"],
    ):
        assert pgqueue(*command, dsn=mine).returncode == 0, command
    refused(
        mine,
        "INSERT INTO pgqueue.job (task) VALUES ('t')",
        "UPDATE pgqueue.worker SET state = 'quiet'",
        "UPDATE pgqueue.ring SET retention = '1 s'",
        "TRUNCATE pgqueue.job_done_0",
        "SELECT pgqueue.advance_ring('done', true)",
        "INSERT INTO pgqueue.audit (actor, action, role) VALUES ('me', 'cancel', 'postgres')",
        "INSERT INTO pgqueue.audit (actor, action, at) VALUES ('me', 'cancel', '2001-01-01')",
        "DELETE FROM pgqueue.audit",
        "UPDATE pgqueue.audit SET actor = 'another'",
    )


# read ----------------------------------------------------------------------------------------------------------------


@pytest.mark.second
def test_a_reading_role_looks_and_changes_nothing(role: Role, dsn: str, tmp_path: Path) -> None:
    mine = role("read")
    with psycopg.connect(dsn) as conn:
        id = api.enqueue(conn, "t", x=1).id
    for command in (["status"], ["jobs"], ["jobs", str(id)], ["migrate", "--check"], ["version"]):
        assert pgqueue(*command, dsn=mine).returncode == 0, command
    for command in (["enqueue", "t"], ["prune", "--all"], ["grants", "postgres", "--for", "read"]):
        done = pgqueue(*command, dsn=mine)
        assert (done.returncode, "Traceback" in done.stderr) == (3, False), command
    (tmp_path / "tasks.py").write_text(TASKS)
    worker = pgqueue("work", "tasks", dsn=mine, cwd=tmp_path)
    assert (worker.returncode, "permission denied" in worker.stderr, "Traceback" in worker.stderr) == (3, True, False)
    assert "may not do this" in worker.stderr and "--for work`" in worker.stderr, worker.stderr
    refused(
        mine,
        "DELETE FROM pgqueue.job",
        "INSERT INTO pgqueue.job (task) VALUES ('t')",
        "UPDATE pgqueue.worker SET state = 'quiet'",
        "SELECT id FROM pgqueue.job_running FOR UPDATE",
        "TRUNCATE pgqueue.job_done_0",
        "SELECT nextval('pgqueue.job_id_seq')",
    )


def test_a_role_that_read_before_there_were_limits_reads_on(role: Role, dsn: str) -> None:
    mine = role("read")
    with psycopg.connect(dsn) as conn:
        name = sql.Identifier(str(conninfo_to_dict(mine)["user"]))
        conn.execute(sql.SQL("REVOKE ALL ON pgqueue.key_limit, pgqueue.key_rate FROM {}").format(name))
    told = pgqueue("status", dsn=mine)
    assert told.returncode == 0 and "this role may not see them; run `pgqueue grants" in told.stdout, told.stderr
    assert '"undeclared": null' in pgqueue("status", "--json", dsn=mine).stdout


def test_a_role_without_rights_is_told_what_to_run(dsn: str) -> None:
    name = create_role(dsn)
    done = pgqueue("status", dsn=make_conninfo(dsn, user=name, password="secret"))
    assert (done.returncode, "pgqueue grants" in done.stderr or "refused" in done.stderr) == (3, True)
    with psycopg.connect(dsn, autocommit=True) as conn:
        drop_role(conn, name)


# Functions -----------------------------------------------------------------------------------------------------------

FUNCTIONS = """
    SELECT oid::regprocedure::text FROM pg_proc
    WHERE pronamespace = 'pgqueue'::regnamespace AND prorettype <> 'trigger'::regtype
    -- Those that functions of the owner's call, or the owner alone.
    AND proname NOT IN ('lagging_sequences', 'highest_job_id', 'set_number', 'put_keyed', 'check_keys', 'bulk_meant')
"""


@pytest.mark.promise("F44")
def test_every_function_is_granted_by_name_to_a_role_that_calls_it(role: Role, dsn: str) -> None:
    """The roles of these tests have nothing from PUBLIC, so each of them shows that its own functions are named."""
    users = [str(conninfo_to_dict(role(kind))["user"]) for kind in grants.KINDS]
    with psycopg.connect(dsn) as conn:
        for (function,) in conn.execute(FUNCTIONS.encode()).fetchall():
            may = [
                user
                for user in users
                if conn.execute("SELECT has_function_privilege(%s, %s, 'EXECUTE')", [user, function]).fetchone()
                == (True,)
            ]
            assert may, function


@pytest.mark.promise("F44")
def test_a_schema_that_was_made_where_public_may_call_nothing_works(empty_dsn: str) -> None:
    """Default privileges of a database, as some have them by policy."""
    name = create_role(empty_dsn)
    with psycopg.connect(empty_dsn, autocommit=True) as conn:
        conn.execute("ALTER DEFAULT PRIVILEGES REVOKE EXECUTE ON FUNCTIONS FROM PUBLIC")
        migrations.migrate(conn)
        for kind in grants.KINDS:
            grants.grant(conn, name, kind, "pgqueue")
        with psycopg.connect(empty_dsn, user=name, password="secret", autocommit=True) as mine:
            handle = api.enqueue(mine, "t", x=1)
            assert mine.execute("SELECT pgqueue.enqueue('t', unique_key => 'u')").fetchone() is not None
            assert [answer.did for answer in api.cancel(mine, handle.id)] == ["cancelled"]
            assert [answer.did for answer in api.retry(mine, handle.id)] == ["retried"]
            assert api.get(mine, handle.id).state == "available"
        conn.execute("ALTER DEFAULT PRIVILEGES GRANT EXECUTE ON FUNCTIONS TO PUBLIC")
        drop_role(conn, name)


# Granting ------------------------------------------------------------------------------------------------------------


def test_only_the_owner_grants(role: Role, dsn: str) -> None:
    other, target = role("work"), create_role(dsn)
    with psycopg.connect(other) as conn, pytest.raises(Error, match="as its owner"):
        grants.grant(conn, target, "read", "pgqueue")
    with psycopg.connect(dsn, autocommit=True) as conn:
        assert conn.execute("SELECT has_schema_privilege(%s, 'pgqueue', 'USAGE')", [target]).fetchone() == (False,)
        drop_role(conn, target)


def test_an_unknown_role_is_named(dsn: str) -> None:
    done = pgqueue("grants", "nobody_here", "--for", "read", dsn=dsn)
    assert (done.returncode, "nobody_here" in done.stderr, "CREATE ROLE" in done.stderr) == (2, True, True)


@pytest.mark.promise("F19")
@pytest.mark.each_value
@pytest.mark.parametrize("name", ['we"ird', "Upper Case", "x; DROP TABLE pgqueue.job", "$$", "%s", ":role", "é"])
@pytest.mark.parametrize("kind", grants.KINDS)
def test_any_role_name_is_only_a_name(dsn: str, name: str, kind: grants.Kind) -> None:
    unique = create_role(dsn, f"{name} {secrets.token_hex(4)}")
    with psycopg.connect(dsn, autocommit=True) as conn:
        grants.grant(conn, unique, kind, "pgqueue")
        assert conn.execute("SELECT has_schema_privilege(%s, 'pgqueue', 'USAGE')", [unique]).fetchone() == (True,)
        drop_role(conn, unique)


@pytest.mark.parametrize("name", ["", "a\0b", "x" * 64])
def test_what_cannot_name_a_role_is_refused(name: str) -> None:
    with pytest.raises(InvalidOption, match="role"):
        grants.as_sql(name, "read", "pgqueue")


@pytest.mark.second
@pytest.mark.parametrize("kind", grants.KINDS)
def test_another_schema_has_its_own_rights(dsn: str, kind: grants.Kind) -> None:
    name = create_role(dsn)
    migrations.migrate(dsn, "jobs")
    done = pgqueue("grants", name, "--for", kind, "--schema", "jobs", dsn=dsn)
    assert (done.returncode, "in schema jobs" in done.stdout) == (0, True), done.stderr
    with psycopg.connect(dsn, autocommit=True) as conn:
        rights = "SELECT has_schema_privilege(%s, 'jobs', 'USAGE'), has_schema_privilege(%s, 'pgqueue', 'USAGE')"
        assert conn.execute(rights, [name, name]).fetchone() == (True, False)
        drop_role(conn, name)


@pytest.mark.parametrize("kind", grants.KINDS)
def test_what_is_printed_is_what_is_executed(dsn: str, kind: grants.Kind) -> None:
    name = create_role(dsn)
    printed = pgqueue("grants", name, "--for", kind, "--sql")
    assert (printed.returncode, printed.stderr) == (0, "")
    with psycopg.connect(dsn) as conn:
        conn.execute(printed.stdout.encode())
        by_hand = rights(conn, name)
        conn.rollback()
        assert rights(conn, name) == []
        conn.rollback()
        grants.grant(conn, name, kind, "pgqueue")
        assert rights(conn, name) == by_hand != []
        drop_role(conn, name)


def rights(conn: psycopg.Connection[Any], role: str) -> list[Any]:
    """What a role may do with tables, sequences and columns."""
    return conn.execute(
        "SELECT c.oid::regclass::text, '', c.relacl::text FROM pg_class c WHERE c.relacl::text LIKE %(like)s UNION ALL "
        "SELECT a.attrelid::regclass::text, a.attname, a.attacl::text FROM pg_attribute a "
        "WHERE a.attacl::text LIKE %(like)s ORDER BY 1, 2",
        {"like": f"%{role}%"},
    ).fetchall()


def until(conn: psycopg.Connection[Any], question: str) -> None:
    """Ask again until the answer is true."""

    def look() -> Any:
        row = conn.execute(question.encode()).fetchone()
        conn.commit()
        return row and row[0]

    wait_until(look)
