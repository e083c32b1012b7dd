"""What a role with few rights may write, and what it can do to the work of others: nothing."""

from __future__ import annotations

from pathlib import Path

import psycopg
import pytest
from psycopg import errors
from psycopg.conninfo import conninfo_to_dict
from roles import Role, refused, role
from workers import Eyes

import pgqueue as api
from pgqueue.database import grants, migrations

__all__ = ["role"]


# The lane of a job ---------------------------------------------------------------------------------------------------

LANES = "SELECT priority, rank, pos FROM pgqueue.job_available ORDER BY pos"


@pytest.mark.promise("F54", "E17")
def test_a_plain_insert_that_names_a_priority_gets_its_lane(role: Role, eyes: Eyes) -> None:
    with psycopg.connect(role("enqueue")) as conn:
        conn.execute("INSERT INTO pgqueue.job (task, priority) VALUES ('t', 0), ('t', 5), ('t', 9)")
        conn.execute("INSERT INTO pgqueue.job_available (task, priority) VALUES ('t', 3)")
        conn.execute("WITH made AS (INSERT INTO pgqueue.job (task, priority) VALUES ('t', 4) RETURNING id) TABLE made")
        with conn.cursor().copy("COPY pgqueue.job (task, priority) FROM STDIN") as copy:
            for priority in (7, 5, 1):
                copy.write_row(("t", priority))
    assert eyes.all(LANES) == [(p, 2 * p + 1, n) for n, p in enumerate((0, 5, 9, 3, 4, 7, 5, 1), 1)]
    ids = eyes.all("SELECT id FROM pgqueue.job ORDER BY pos")
    assert len(set(ids)) == len(ids)


@pytest.mark.promise("E17", "F192")
def test_a_role_that_only_enqueues_puts_jobs_off_by_a_plain_insert(role: Role, eyes: Eyes) -> None:
    with psycopg.connect(role("enqueue")) as conn:
        conn.execute(
            "INSERT INTO pgqueue.job (task, priority, run_at) VALUES ('t', 1, now() - interval '1 hour'), "
            "('t', 1, now() + interval '1 hour'), ('t', 5, now() + interval '2 hours')"
        )
    assert eyes.all("SELECT state, priority, pos IS NULL FROM pgqueue.job ORDER BY run_at") == [
        ("available", 1, False),
        ("scheduled", 1, True),
        ("scheduled", 5, True),
    ]


@pytest.mark.promise("F54")
def test_the_statements_of_pgqueue_never_need_the_trigger(role: Role, eyes: Eyes) -> None:
    """It would cost a batch that names a priority a third."""
    eyes.do("ALTER TABLE pgqueue.job_available DISABLE TRIGGER put_in_place")
    task = api.remote("t").using(priority=2)
    with psycopg.connect(role("enqueue")) as conn:
        api.enqueue(conn, task, x=1)
        api.enqueue_many(conn, [task.new(x=1), task.using(deadline=60).new(x=2)])
        api.enqueue(conn, task.using(unique="k"), x=1)
        api.enqueue_many(conn, [task.using(delay=60).new(x=1), task.using(delay=60, unique="l").new(x=2)])
        for more in ("", ", unique_key => 'u'", ", run_at => now() + interval '1 hour'"):
            conn.execute(f"SELECT pgqueue.enqueue('t', priority => 2{more})".encode())
    assert eyes.all("SELECT state, priority, rank, count(*) FROM pgqueue.job GROUP BY 1, 2, 3 ORDER BY 1") == [
        ("available", 2, 5, 6),
        ("scheduled", 2, 5, 3),
    ]


SAYS_YES = """
    CREATE FUNCTION evil.yes(smallint, integer) RETURNS boolean LANGUAGE sql AS 'SELECT true';
    CREATE FUNCTION evil.yes(integer, smallint) RETURNS boolean LANGUAGE sql AS 'SELECT true';
    CREATE FUNCTION evil.has_column_privilege(text, text, text) RETURNS boolean LANGUAGE sql AS 'SELECT true';
    CREATE OPERATOR evil.< (leftarg = smallint, rightarg = integer, function = evil.yes);
    CREATE OPERATOR evil.> (leftarg = smallint, rightarg = integer, function = evil.yes);
    CREATE OPERATOR evil.= (leftarg = smallint, rightarg = integer, function = evil.yes);
    CREATE OPERATOR evil.= (leftarg = integer, rightarg = smallint, function = evil.yes);
    SET search_path = evil, pg_temp, pg_catalog;
"""
"""Twins of what the check calls, in a schema of the role's own."""


@pytest.mark.promise("F50")
@pytest.mark.parametrize("row", [
    "(task, rank) VALUES ('t', -2)",
    "(task, rank) VALUES ('t', -1)",
    "(task, rank) VALUES ('t', 10)",
    "(task, priority, rank) VALUES ('t', 0, 0)",
    "(task, priority, rank) VALUES ('t', 3, 19)",
    "(task, priority, rank) VALUES ('t', 3, 32767)",
])  # fmt: skip
def test_an_enqueuing_role_chooses_no_other_lane_than_that_of_its_priority(row: str, role: Role, eyes: Eyes) -> None:
    """Not the front, and not the lanes of poison jobs, for which workers make room."""
    for own in (False, True):
        for table in ("pgqueue.job", "pgqueue.job_available"):
            with psycopg.connect(role("enqueue")) as conn:
                if own:
                    eyes.do("DROP SCHEMA IF EXISTS evil CASCADE")
                    eyes.do(f"CREATE SCHEMA evil AUTHORIZATION {conn.info.user}")
                    conn.execute(SAYS_YES.encode())
                with pytest.raises(errors.CheckViolation):
                    conn.execute(f"INSERT INTO {table} {row}".encode())
    assert eyes.states() == {}


@pytest.mark.promise("F50")
def test_a_role_that_works_puts_jobs_where_it_found_them(role: Role, eyes: Eyes) -> None:
    """A job that is given back before it started has no mark but its rank."""
    with psycopg.connect(role("work")) as conn:
        for rank in (10, -1, -2, 11):
            conn.execute("INSERT INTO pgqueue.job_available (task, rank) VALUES ('t', %s)", [rank])
    assert eyes.one("SELECT count(*) FROM pgqueue.job_available") == 4


@pytest.mark.promise("F51")
def test_the_trigger_that_acts_as_the_owner_is_no_door(role: Role, eyes: Eyes) -> None:
    """On a table of its own, a role would choose the rows that it deletes and inserts."""
    id = eyes.one("INSERT INTO pgqueue.job (task, priority) VALUES ('t', 3) RETURNING id")
    mine = role("enqueue")
    own = "CREATE TEMP TABLE mine (id bigint, priority smallint, rank smallint)"
    fires = "CREATE TRIGGER mine AFTER INSERT ON mine FOR EACH ROW EXECUTE FUNCTION pgqueue.put_in_place()"
    row = f"INSERT INTO mine VALUES ({id}, 0, 7)"  # noqa: S608
    with psycopg.connect(mine, autocommit=True) as conn:
        conn.execute(own.encode())
        with pytest.raises(errors.InsufficientPrivilege):
            conn.execute(fires.encode())
    eyes.do(f"{own}; {fires}")
    with pytest.raises(errors.InsufficientPrivilege, match=r"the trigger of pgqueue\.job_available"):
        eyes.do(row)


@pytest.mark.promise("F50")
def test_an_enqueuing_role_neither_names_ids_nor_holds(role: Role) -> None:
    refused(
        role("enqueue"),
        *(
            f"INSERT INTO {table} (task, {column}) VALUES ('t', {value})"  # noqa: S608
            for table in ("pgqueue.job", "pgqueue.job_available")
            for column, value in (("pos", 1), ("bin", 1), ("holds", True), ("hold_pos", 1), ("attempt", 1))
        ),
        "SELECT setval('pgqueue.job_id_seq', 1)",
    )


# Unique keys ---------------------------------------------------------------------------------------------------------

KEYED = "SELECT * FROM pgqueue.enqueue_keyed(ARRAY[ROW({})::pgqueue.keyed_job])"


@pytest.mark.promise("F52")
def test_an_enqueuing_role_takes_unique_keys_and_has_no_right_on_those_of_others(role: Role, eyes: Eyes) -> None:
    """It could read them, remove one, so that its job is doubled, or keep one for ever without a job."""
    task = api.remote("t").using(unique="k")
    mine = role("enqueue")
    with psycopg.connect(mine) as conn:
        first = api.enqueue(conn, task, x=1)
        assert api.enqueue(conn, task, x=2) == api.JobHandle(first.id, created=False)
        assert [h.created for h in api.enqueue_many(conn, [task.new(x=3), api.remote("t").new(x=4)])] == [False, True]
        with_keys = "SELECT pgqueue.enqueue('t', unique_key => 'k', idempotency_key => 'i')"
        assert conn.execute(with_keys.encode()).fetchone() == (first.id,)
    refused(
        mine,
        "SELECT key FROM pgqueue.unique_key",
        "INSERT INTO pgqueue.unique_key VALUES ('unique:pay:77', 1, 'live', 0, NULL, now())",
        "UPDATE pgqueue.unique_key SET expires_at = NULL",
        "DELETE FROM pgqueue.unique_key",
        "SELECT pgqueue.take_keys(NULL, 'pay:77', 'live', 0, 1, now(), false, NULL)",
        "SELECT * FROM pgqueue.take_all_keys(NULL, '{pay:77}', '{live}', '{0}', '{1}', '{now}', NULL)",
        "SELECT * FROM pgqueue.take_many_keys(NULL, '{pay:77}', '{live}', '{0}', '{1}', '{now}', NULL)",
        "SELECT * FROM pgqueue.key_states('{unique:k}')",
        "SELECT pgqueue.key_state(NULL)",
        "SELECT pgqueue.keep_waiting('{1}', '{now}', '{true}', '1s')",
        "SELECT * FROM pgqueue.take_back('{1}', '{now}')",
        "SELECT * FROM pgqueue.put_keyed('{}')",
        "SELECT * FROM pgqueue.enqueue_replacing('{}')",
        "SELECT pgqueue.check_keys('{}')",
        KEYED.format(
            "'t', '{}', 'q', 5, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, 'k', NULL, 'live', 0, true"
        ),
    )
    assert eyes.all("SELECT key, job_id FROM pgqueue.unique_key") == [("unique:k", first.id)]


@pytest.mark.promise("F52")
def test_a_role_that_enqueues_and_operates_replaces_and_one_that_only_enqueues_does_not(role: Role, eyes: Eyes) -> None:
    task = api.remote("t").using(unique=api.Unique("k", on_duplicate="replace"))
    enqueuing, both = role("enqueue"), role("enqueue")
    grants.grant(eyes.conn, str(conninfo_to_dict(both)["user"]), "operate", "pgqueue")
    with psycopg.connect(both) as conn:
        first = api.enqueue(conn, task, x=1)
        assert api.enqueue(conn, task, x=2) == api.JobHandle(first.id, created=False, replaced=True)
    with psycopg.connect(enqueuing) as conn:
        with pytest.raises(errors.InsufficientPrivilege) as caught:
            api.enqueue(conn, task, x=3)
        assert "--for operate" in "".join(caught.value.__notes__)
    assert eyes.one("SELECT args FROM pgqueue.job") == {"x": 2}


@pytest.mark.promise("F52")
@pytest.mark.parametrize("values", [
    "'', NULL, 'live', 0",
    "repeat('k', 501), NULL, 'live', 0",
    "NULL, '', 'live', 0",
    "NULL, repeat('k', 501), 'live', 0",
    "'k', NULL, NULL, 0",
    "'k', NULL, 'for ever', 0",
    "'k', NULL, 'after', -1",
    "'k', NULL, 'after', 'infinity'",
    "'k', NULL, 'after', 'NaN'",
    "'k', NULL, 'after', 3153600001",
])  # fmt: skip
def test_a_key_that_no_application_may_say_is_refused(values: str, role: Role, eyes: Eyes) -> None:
    """A time that ends beyond the last one made every later enqueue of the key fail."""
    call = KEYED.format(f"'t', '{{}}', 'q', 5, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, {values}, false")
    with psycopg.connect(role("enqueue")) as conn, pytest.raises(errors.InvalidParameterValue, match="100 years"):
        conn.execute(call.encode())
    assert eyes.one("SELECT count(*) FROM pgqueue.unique_key") == 0


@pytest.mark.promise("F52")
def test_what_the_table_refuses_is_refused_through_the_door(role: Role, eyes: Eyes) -> None:
    rows = {
        "NULL, '{}', 'q', 5, NULL, NULL, NULL": errors.NotNullViolation,
        "'t', NULL, 'q', 5, NULL, NULL, NULL": errors.NotNullViolation,
        "'t', '{}', '', 5, NULL, NULL, NULL": errors.CheckViolation,
        "'t', '{}', 'q', 10, NULL, NULL, NULL": errors.CheckViolation,
        "'t', '{}', 'q', 5, NULL, NULL, 'infinity'": errors.CheckViolation,
    }
    mine = role("enqueue")
    for row, refusal in rows.items():
        call = KEYED.format(f"{row}, NULL, NULL, NULL, NULL, NULL, NULL, 'k', NULL, 'live', 0, false")
        with psycopg.connect(mine) as conn, pytest.raises(refusal):
            conn.execute(call.encode())
    assert eyes.one("SELECT count(*) FROM pgqueue.unique_key") == 0


@pytest.mark.promise("F52")
def test_a_wait_is_ended_by_its_own_session_only(role: Role, eyes: Eyes) -> None:
    mine = role("enqueue")
    left = "SELECT waiter FROM pgqueue.job_waiter"
    with psycopg.connect(mine, autocommit=True) as conn, psycopg.connect(mine, autocommit=True) as other:
        waiters = [
            each.execute("SELECT pgqueue.begin_wait(7)").fetchone()[0]  # type: ignore[index]
            for each in (conn, conn, other)
        ]
        for waiter in waiters[1:]:
            conn.execute("SELECT pgqueue.leave_wait(%s)", [waiter])
        assert eyes.all(left) == [(waiters[0],), (waiters[2],)]
        ended = conn.info.backend_pid
        conn.close()
        while eyes.one("SELECT count(*) FROM pg_stat_activity WHERE pid = %s", ended):
            pass
        other.execute("SELECT pgqueue.leave_wait(%s)", [waiters[0]])  # of a session that broke
        assert eyes.all(left) == [(waiters[2],)]
    refused(mine, "DELETE FROM pgqueue.job_waiter", "INSERT INTO pgqueue.job_waiter (job_id) VALUES (1)")


# What acts as the owner ----------------------------------------------------------------------------------------------

DEFINERS = """
    SELECT oid::regprocedure::text, proconfig FROM pg_proc
    WHERE pronamespace = 'pgqueue'::regnamespace AND (prosecdef OR proname = ANY (%s))
"""
CALLED = ["put_keyed", "check_keys", "take_keys", "take_many_keys", "key_states", "keep_waiting"]
"""What these call, but for `take_all_keys`: it has the path of its caller, and full names."""


@pytest.mark.promise("F51")
def test_what_acts_as_the_owner_has_a_path_that_ends_in_pg_temp(eyes: Eyes) -> None:
    found = dict(eyes.all(DEFINERS, CALLED))
    assert len(found) > 12
    for function, settings in found.items():
        assert "search_path=pg_catalog, pg_temp" in (settings or ()), function


@pytest.mark.promise("F51")
def test_public_may_call_nothing_that_acts_as_the_owner(eyes: Eyes) -> None:
    functions = eyes.all("SELECT oid FROM pg_proc WHERE pronamespace = 'pgqueue'::regnamespace AND prosecdef")
    for (function,) in functions:
        assert not eyes.one("SELECT has_function_privilege('pg_monitor', %s::oid, 'EXECUTE')", function), function


TWINS = """
    CREATE TABLE {s}.ran (who text);
    GRANT INSERT ON {s}.ran TO PUBLIC;
    CREATE FUNCTION {s}.note(anyelement) RETURNS boolean LANGUAGE plpgsql VOLATILE AS $$
        BEGIN INSERT INTO {s}.ran SELECT pg_catalog.concat(current_user); RETURN true; END $$;
    CREATE DOMAIN pg_temp.text        AS pg_catalog.text        CHECK ({s}.note(VALUE));
    CREATE DOMAIN pg_temp.bigint      AS pg_catalog.int8        CHECK ({s}.note(VALUE));
    CREATE DOMAIN pg_temp.int8        AS pg_catalog.int8        CHECK ({s}.note(VALUE));
    CREATE DOMAIN pg_temp.bool        AS pg_catalog.bool        CHECK ({s}.note(VALUE));
    CREATE DOMAIN pg_temp.timestamptz AS pg_catalog.timestamptz CHECK ({s}.note(VALUE));
    CREATE DOMAIN pg_temp.regclass    AS pg_catalog.regclass    CHECK ({s}.note(VALUE));
    CREATE DOMAIN pg_temp.xid         AS pg_catalog.xid         CHECK ({s}.note(VALUE));
    CREATE TABLE {s}.pg_class (oid pg_catalog.int8);
    CREATE TEMP TABLE pg_proc (oid pg_catalog.int8);
"""


def twins(conn: psycopg.Connection, eyes: Eyes) -> None:
    """Shadow types in pg_temp and in `evil`; in `evil` each function and operator that takes what ours are given."""
    eyes.do(f"CREATE SCHEMA evil AUTHORIZATION {conn.info.user}")
    conn.execute(TWINS.format(s="evil").encode())
    for (definition,) in conn.execute(ALL_NAMES).fetchall():
        conn.execute(definition.encode())
    conn.execute("SET search_path = evil, pg_temp, pg_catalog")


ALL_NAMES = """
    SELECT pg_catalog.format(
        'CREATE FUNCTION evil.%I(%s) RETURNS %s LANGUAGE plpgsql AS $f$ BEGIN '
        'INSERT INTO evil.ran SELECT pg_catalog.concat(current_user); RETURN NULL; END $f$',
        p.proname, (SELECT pg_catalog.string_agg(pg_catalog.format('%I.%I', n.nspname, t.typname), ', ' ORDER BY a.n)
                    FROM pg_catalog.unnest(p.proargtypes) WITH ORDINALITY AS a (type, n)
                    JOIN pg_catalog.pg_type t ON t.oid = a.type
                    JOIN pg_catalog.pg_namespace n ON n.oid = t.typnamespace),
        CASE WHEN p.proretset THEN 'SETOF ' ELSE '' END || pg_catalog.format_type(p.prorettype, NULL))
    FROM pg_catalog.pg_proc p
    WHERE p.pronamespace = 'pg_catalog'::pg_catalog.regnamespace AND p.prokind = 'f' AND p.provariadic = 0
      AND NOT p.proretset AND p.proargtypes <> ''
      AND p.proname IN ('nextval', 'set_config', 'current_setting', 'array_remove', 'array_append', 'array_position',
                        'octet_length', 'cardinality', 'left', 'has_column_privilege', 'isfinite')
      AND NOT EXISTS (SELECT FROM pg_catalog.unnest(p.proargtypes) AS a (type)
                      WHERE a.type IN ('"any"'::pg_catalog.regtype, 'internal'::pg_catalog.regtype))
    UNION ALL
    SELECT pg_catalog.format(
        'CREATE FUNCTION evil.twin_%s(%s, %s) RETURNS %s LANGUAGE plpgsql AS $f$ BEGIN '
        'INSERT INTO evil.ran SELECT pg_catalog.concat(current_user); RETURN NULL; END $f$; '
        'CREATE OPERATOR evil.%s (leftarg = %s, rightarg = %s, function = evil.twin_%s)',
        o.oid, pg_catalog.format_type(o.oprleft, NULL), pg_catalog.format_type(o.oprright, NULL),
        pg_catalog.format_type(o.oprresult, NULL), o.oprname, pg_catalog.format_type(o.oprleft, NULL),
        pg_catalog.format_type(o.oprright, NULL), o.oid)
    FROM pg_catalog.pg_operator o
    WHERE o.oprnamespace = 'pg_catalog'::pg_catalog.regnamespace AND o.oprkind = 'b' AND o.oprname IN
        ('=', '<>', '<', '>', '<=', '>=', '||', '~', '!~', '+', '*', '/')
      AND o.oprleft IN ('text'::pg_catalog.regtype, 'int2'::pg_catalog.regtype, 'int4'::pg_catalog.regtype,
        'int8'::pg_catalog.regtype, 'bool'::pg_catalog.regtype, 'timestamptz'::pg_catalog.regtype,
        'float8'::pg_catalog.regtype, 'oid'::pg_catalog.regtype, 'xid'::pg_catalog.regtype)
      AND o.oprright IN ('text'::pg_catalog.regtype, 'int2'::pg_catalog.regtype, 'int4'::pg_catalog.regtype,
        'int8'::pg_catalog.regtype, 'bool'::pg_catalog.regtype, 'timestamptz'::pg_catalog.regtype,
        'float8'::pg_catalog.regtype, 'oid'::pg_catalog.regtype, 'xid'::pg_catalog.regtype)
"""

JOB = "'t', '{{}}', 'q', '3', NULL, NULL, {}, NULL, NULL, NULL, NULL, NULL, NULL, {}, 'live', '0', false"
CALLS = [
    *(
        "SELECT holder IS NOT NULL FROM pgqueue.enqueue_keyed(ARRAY[{}])".replace(
            "{}", ", ".join(f"ROW({JOB.format('NULL', keys)})::pgqueue.keyed_job" for keys in batch)
        )
        for batch in (
            ["'a', NULL"],
            ["'a', NULL"],
            ["'b', 'b'"],
            ["NULL, 'b'"],
            ["'c', 'c'", "'d', NULL", "'a', 'e'"],
            ["'c', NULL", "'f', 'b'", "'f', NULL"],
            ["'free', NULL", "'freed', NULL", "'a', NULL"],
            ["'late', NULL"],
        )
    ),
    "INSERT INTO pgqueue.job (task, priority) VALUES ('t', '2')",
    "SELECT pgqueue.leave_wait(pgqueue.begin_wait('7'))",
    "SELECT pgqueue.enqueue('t', unique_key => 'sql', priority => '4')",
]
"""Each way into what acts as the owner: keys that are new, held, in one batch twice, free with a row, and pending."""


def called_by_a_stranger(role: Role, eyes: Eyes, calls: list[str]) -> set[str]:
    """The roles as which twins have run while a role that enqueues made these calls."""
    held = api.Unique("late", hold="pending")
    api.enqueue(eyes.conn, api.remote("t").using(unique=held))
    for key in ("free", "freed"):
        eyes.do("INSERT INTO pgqueue.unique_key VALUES (%s, 12345678, 'live', 0, NULL, now())", f"unique:{key}")
    with psycopg.connect(role("enqueue"), autocommit=True) as conn:
        twins(conn, eyes)
        for call in calls:
            conn.execute(call.encode())
        as_itself = str(conn.info.user)
        conn.execute("SET search_path = pg_catalog")
        return {str(who) for (who,) in conn.execute("SELECT who FROM evil.ran").fetchall()} - {as_itself}


@pytest.mark.promise("F51")
def test_what_acts_as_the_owner_runs_nothing_of_its_callers(role: Role, eyes: Eyes) -> None:
    assert called_by_a_stranger(role, eyes, CALLS) == set()
    assert eyes.one("SELECT count(*) FROM pgqueue.unique_key WHERE job_id = 12345678") == 0
    assert eyes.all("SELECT DISTINCT rank FROM pgqueue.job WHERE priority = 2") == [(5,)]


@pytest.mark.promise("F51")
def test_with_an_empty_path_it_would(role: Role, eyes: Eyes) -> None:
    """PostgreSQL then looks for types in pg_temp first."""
    functions = eyes.all(
        "SELECT oid::regprocedure::text FROM pg_proc WHERE pronamespace = 'pgqueue'::regnamespace "
        "AND 'search_path=pg_catalog, pg_temp' = ANY (proconfig) AND prorettype <> 'trigger'::regtype"
    )
    for (function,) in functions:
        eyes.do(f"ALTER FUNCTION {function} SET search_path = ''")
    assert called_by_a_stranger(role, eyes, CALLS[:3]) == {"postgres"}


# Each kind of role ---------------------------------------------------------------------------------------------------

RUNNING = """
    INSERT INTO pgqueue.job (state, task, worker_id, claim, started_at) VALUES ('running', 't', 1, 1, now());
    INSERT INTO pgqueue.job (task) VALUES ('waits');
    INSERT INTO pgqueue.job (state, task, finished_at, reason) VALUES ('failed', 't', now(), 'error');
    INSERT INTO pgqueue.unique_key (key, job_id, enqueued_at, hold)
    SELECT 'unique:pay:77', id, enqueued_at, 'live' FROM pgqueue.job WHERE task = 'waits';
    INSERT INTO pgqueue.worker (lease, pid, concurrency, host, version_tag, queues)
    VALUES ('15 s', 1, 1, 'h', '1', '{}');
"""
NOT_PREVENTED = (
    "SELECT pg_advisory_xact_lock(7)",
    "NOTIFY \"pgqueue.:control\", 'sweep'",
    "SELECT count(id) FROM pgqueue.job",
)
MOVES = ("LOCK TABLE pgqueue.job_available IN ACCESS EXCLUSIVE MODE", "SELECT id FROM pgqueue.job_available FOR UPDATE")
OWNERS = (
    "SELECT setval('pgqueue.job_id_seq', 1)",
    "UPDATE pgqueue.ring SET retention = '1 s'",
    "INSERT INTO pgqueue.migration (version, name, breaking) VALUES (99, 'x', true)",
    "TRUNCATE pgqueue.job_available",
    "CREATE TABLE pgqueue.mine ()",
    "SELECT * FROM pgqueue.put_keyed('{}')",
)
CELLS: dict[grants.Kind, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    "enqueue": (
        (
            "INSERT INTO pgqueue.job (task, args) VALUES ('t', '{}')",
            "INSERT INTO pgqueue.job (task, priority, run_at, state) VALUES ('t', 1, 'tomorrow', 'scheduled')",
            "SELECT pgqueue.enqueue('t', unique_key => 'k', idempotency_key => 'i')",
            "SELECT id, queue, state FROM pgqueue.job",
            "SELECT pgqueue.leave_wait(pgqueue.begin_wait(1))",
        ),
        (
            *OWNERS,
            "INSERT INTO pgqueue.job (task, id) VALUES ('t', 1000)",
            "INSERT INTO pgqueue.job (task, enqueued_at) VALUES ('t', 'infinity')",
            "INSERT INTO pgqueue.job (task, unique_key) VALUES ('t', 'pay:77')",
            "INSERT INTO pgqueue.job (task, idempotency_key) VALUES ('t', 'k')",
            "INSERT INTO pgqueue.job_scheduled (task, state, run_at) VALUES ('t', 'scheduled', 'tomorrow')",
            "SELECT args FROM pgqueue.job",
            "SELECT result FROM pgqueue.job_done",
            "SELECT attempt FROM pgqueue.job",
            "SELECT key FROM pgqueue.unique_key",
            "SELECT id FROM pgqueue.job FOR UPDATE",
            "SELECT id FROM pgqueue.job_available FOR KEY SHARE",
            "DELETE FROM pgqueue.job",
            "DELETE FROM pgqueue.job_waiter",
            "SELECT * FROM pgqueue.enqueue_replacing('{}')",
            "SELECT * FROM pgqueue.advance_sequences(true)",
            "SELECT pgqueue.restore_settings()",
        ),
        (
            "SELECT pgqueue.enqueue('t', unique_key => 'pay:77')",
            "SELECT pgqueue.enqueue('t', unique_key => 'pay:78')",
            "SELECT nextval('pgqueue.job_id_seq'), nextval('pgqueue.job_pos_seq')",
            *NOT_PREVENTED,
        ),
    ),
    "work": (
        (
            "WITH gone AS (DELETE FROM pgqueue.job_running RETURNING id, task) INSERT INTO pgqueue.job_available "
            "(id, task, rank) SELECT id, task, 10 FROM gone",
            "DELETE FROM pgqueue.unique_key",
            "SELECT pgqueue.advance_ring('done', true)",
            "SELECT pgqueue.enqueue('t', unique_key => 'k')",
            "SELECT * FROM pgqueue.enqueue_replacing('{}')",
            "SELECT pgqueue.restore_settings()",
        ),
        (
            *OWNERS,
            "INSERT INTO pgqueue.queue (name) VALUES ('q')",
            "DELETE FROM pgqueue.job_done",
            "DELETE FROM pgqueue.job_dead",
            "DELETE FROM pgqueue.attempt",
            "SELECT * FROM pgqueue.discard_ended('{1}')",
            "INSERT INTO pgqueue.bulk (actor, action, target, states, up_to) VALUES ('a', 'discard', '{}', '{}', 9)",
        ),
        (*MOVES, *NOT_PREVENTED),
    ),
    "operate": (
        (
            "INSERT INTO pgqueue.queue (name, paused_at) VALUES ('q', now())",
            "INSERT INTO pgqueue.key_limit (name, n, set_at) VALUES ('l', 1, now())",
            "DELETE FROM pgqueue.schedule",
            "SELECT args, result FROM pgqueue.job",
        ),
        (
            *OWNERS,
            "INSERT INTO pgqueue.job (task) VALUES ('t')",
            "UPDATE pgqueue.worker SET state = 'quiet'",
            "DELETE FROM pgqueue.job_running",
            "TRUNCATE pgqueue.job_done_0",
            "DELETE FROM pgqueue.job_waiter",
            "SELECT * FROM pgqueue.enqueue_keyed('{}')",
            "SELECT pgqueue.restore_settings()",
        ),
        (*MOVES, *NOT_PREVENTED),
    ),
    "read": (
        ("SELECT * FROM pgqueue.job", "SELECT * FROM pgqueue.worker", "SELECT * FROM pgqueue.unique_key"),
        (
            *OWNERS,
            "INSERT INTO pgqueue.job (task) VALUES ('t')",
            "DELETE FROM pgqueue.job",
            "SELECT id FROM pgqueue.job_running FOR KEY SHARE",
            "SELECT nextval('pgqueue.job_id_seq')",
            "SELECT * FROM pgqueue.enqueue_keyed('{}')",
            "SELECT pgqueue.enqueue('t')",
            "SELECT pgqueue.begin_wait(1)",
            "SELECT pgqueue.restore_settings()",
        ),
        NOT_PREVENTED,
    ),
    "relay": (
        (
            "INSERT INTO pgqueue.job (task, args) VALUES ('t', '{}')",
            "SELECT * FROM pgqueue.enqueue_keyed('{}')",
            "SELECT * FROM pgqueue.enqueue_replacing('{}')",
            "DELETE FROM pgqueue.relayed",
            "SELECT pgqueue.advance_sequences(false)",
        ),
        (
            *OWNERS,
            "DELETE FROM pgqueue.job_running",
            "DELETE FROM pgqueue.job_done",
            "SELECT message FROM pgqueue.attempt",
            "SELECT key FROM pgqueue.unique_key",
            "DELETE FROM pgqueue.unique_key",
            "INSERT INTO pgqueue.queue (name) VALUES ('q')",
            "UPDATE pgqueue.worker SET state = 'quiet'",
            "SELECT pgqueue.begin_wait(1)",
            "SELECT pgqueue.restore_settings()",
        ),
        ("SELECT args, result FROM pgqueue.job", *MOVES, *NOT_PREVENTED),
    ),
    "stage": (
        (
            "INSERT INTO pgqueue.outbox (task, args) VALUES ('t', '{}') RETURNING id, uid",
            "SELECT pgqueue.outbox_now()",
        ),
        (
            "INSERT INTO pgqueue.outbox (task, id) VALUES ('t', 1000)",
            "SELECT args FROM pgqueue.outbox",
            "SELECT options FROM pgqueue.outbox",
            "SELECT id FROM pgqueue.outbox FOR KEY SHARE",
            "DELETE FROM pgqueue.outbox",
            "TRUNCATE pgqueue.outbox",
            "TABLE pgqueue.outbox_refused",
            "TABLE pgqueue.outbox_source",
            "DELETE FROM pgqueue.outbox_source",
            "SELECT setval('pgqueue.outbox_id_seq', 1)",
            "LOCK TABLE pgqueue.outbox IN SHARE MODE",
        ),
        ("SELECT nextval('pgqueue.outbox_id_seq')", *NOT_PREVENTED[:2], "SELECT count(id) FROM pgqueue.outbox"),
    ),
    "relay_outbox": (
        (
            "DELETE FROM pgqueue.outbox",
            "SELECT args, options FROM pgqueue.outbox FOR UPDATE",
            "UPDATE pgqueue.outbox_refused SET reason = 'x'",
            "TABLE pgqueue.outbox_migration",
        ),
        (
            "UPDATE pgqueue.outbox SET args = '{}'",
            "TRUNCATE pgqueue.outbox",
            "SELECT setval('pgqueue.outbox_id_seq', 1)",
            "INSERT INTO pgqueue.outbox_migration (version, name, breaking) VALUES (99, 'x', true)",
            "CREATE TABLE pgqueue.mine ()",
        ),
        (
            "LOCK TABLE pgqueue.outbox IN ACCESS EXCLUSIVE MODE",
            *NOT_PREVENTED[:2],
            "SELECT count(*) FROM pgqueue.outbox",
        ),
    ),
}
"""The tables of docs/operations.md: what a role may, may not, and what no right prevents."""


@pytest.mark.promise("F53")
@pytest.mark.parametrize("kind", CELLS)
@pytest.mark.parametrize("cell", ["may", "may not", "cannot be prevented"])
def test_each_cell_of_the_table_of_roles(kind: grants.Kind, cell: str, role: Role, eyes: Eyes) -> None:
    may, may_not, not_prevented = CELLS[kind]
    eyes.do(RUNNING)
    if kind in grants.OUTBOX_KINDS:
        migrations.migrate(eyes.conn, "pgqueue", line=migrations.OUTBOX)
    mine = role(kind)
    if cell == "may not":
        refused(mine, *may_not)
        return
    for statement in may if cell == "may" else not_prevented:
        with psycopg.connect(mine) as conn:
            conn.execute(statement.encode())
            conn.rollback()


@pytest.mark.promise("F53")
def test_the_page_has_a_row_for_each_kind_of_role() -> None:
    page = (Path(__file__).parents[2] / "docs/operations.md").read_text(encoding="utf-8")
    for kind in CELLS:
        named = "`relay`, outbox" if kind == "relay_outbox" else f"`{kind}`"
        [row] = [line for line in page.splitlines() if line.startswith(f"| {named} |") and line.count("|") == 5]
        assert row


@pytest.mark.promise("F53")
@pytest.mark.parametrize("kind", ["enqueue", "read"])
def test_no_table_is_locked_by_a_role_that_only_enqueues_or_reads(kind: grants.Kind, role: Role, eyes: Eyes) -> None:
    """SHARE is the weakest lock that keeps others from writing."""
    tables = eyes.all(
        "SELECT oid::regclass::text FROM pg_class "
        "WHERE relnamespace = 'pgqueue'::regnamespace AND relkind IN ('r', 'p')"
    )
    assert len(tables) > 40
    with psycopg.connect(role(kind), autocommit=True) as conn:
        for (table,) in tables:
            for mode in ("SHARE", "ACCESS EXCLUSIVE"):
                with pytest.raises(errors.InsufficientPrivilege), conn.transaction():
                    conn.execute(f"LOCK TABLE {table} IN {mode} MODE".encode())


@pytest.mark.promise("F53")
def test_wider_rights_are_taken_as_the_page_says(role: Role, eyes: Eyes) -> None:
    mine = role("enqueue")
    name = conninfo_to_dict(mine)["user"]
    eyes.do(f"GRANT INSERT (id), UPDATE (id) ON pgqueue.job TO {name}")
    eyes.do(f"GRANT SELECT, INSERT, DELETE, UPDATE (expires_at) ON pgqueue.unique_key TO {name}")
    eyes.do(f"GRANT EXECUTE ON FUNCTION pgqueue.take_back(bigint[], timestamptz[]) TO {name}")
    page = (Path(__file__).parents[2] / "docs/operations.md").read_text(encoding="utf-8")
    lines = [
        line for line in page.splitlines() if line.startswith("REVOKE ALL ON ALL ") and line.endswith("FROM shop;")
    ]
    assert len(lines) == 3
    for line in lines:
        eyes.do(line.replace("FROM shop", f"FROM {name}"))
    grants.grant(eyes.conn, str(name), "enqueue", "pgqueue")
    _, may_not, _ = CELLS["enqueue"]
    refused(mine, *may_not, "SELECT pgqueue.take_back('{}', '{}')")
    with psycopg.connect(mine) as conn:
        assert api.enqueue(conn, api.remote("t").using(unique="k"), x=1).created
