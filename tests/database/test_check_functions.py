"""What checks, defaults, triggers and indexes call means the same in every session; a check asks only its row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from psycopg import errors

from pgqueue.database import migrations

CALLED = """
    SELECT DISTINCT p.oid::regprocedure::text FROM pg_depend d JOIN pg_proc p ON p.oid = d.refobjid
    WHERE d.refclassid = 'pg_proc'::regclass AND p.pronamespace = 'pgqueue'::regnamespace AND d.classid IN (
        'pg_constraint'::regclass, 'pg_attrdef'::regclass, 'pg_trigger'::regclass, 'pg_class'::regclass)
    ORDER BY 1
"""
TWINS = """
    DO $do$
    DECLARE
        known regtype[] := ARRAY[
            'integer', 'bigint', 'smallint', 'text', 'varchar', 'name', 'boolean', 'timestamptz', 'timestamp',
            'interval', 'jsonb', 'double precision', 'numeric', 'date'];
        says text := ' RETURNS %s LANGUAGE plpgsql AS '
            '$f$ BEGIN RAISE EXCEPTION $s$the twin was called: %%$s$, %L; END $f$';
        one record;
    BEGIN
        FOR one IN
            SELECT p.proname AS name, pg_get_function_identity_arguments(p.oid) AS takes,
                   format_type(p.prorettype, NULL) AS gives
            FROM pg_proc p
            WHERE p.pronamespace = 'pg_catalog'::regnamespace AND p.prokind = 'f' AND NOT p.proretset
              AND p.pronargs BETWEEN 0 AND 3 AND p.proallargtypes IS NULL AND p.provariadic = 0
              AND p.prorettype::regtype = ANY (known) AND p.proargtypes::oid[]::regtype[] <@ known
        LOOP
            EXECUTE format('CREATE FUNCTION evil.%I(%s)' || says, one.name, one.takes, one.gives, one.name);
        END LOOP;
        FOR one IN
            SELECT o.oprname AS name, format_type(o.oprleft, NULL) AS l, format_type(o.oprright, NULL) AS r,
                   format_type(o.oprresult, NULL) AS gives, 'twin_' || row_number() OVER () AS twin
            FROM pg_operator o
            WHERE o.oprnamespace = 'pg_catalog'::regnamespace AND o.oprleft::regtype = ANY (known)
              AND o.oprright::regtype = ANY (known) AND o.oprresult::regtype = ANY (known)
        LOOP
            EXECUTE format('CREATE FUNCTION evil.%I(%s, %s)' || says, one.twin, one.l, one.r, one.gives, one.name);
            EXECUTE format('CREATE OPERATOR evil.%s (LEFTARG = %s, RIGHTARG = %s, FUNCTION = evil.%I)',
                           one.name, one.l, one.r, one.twin);
        END LOOP;
    END $do$
"""


@pytest.fixture
def hostile(conn: psycopg.Connection[Any]) -> Iterator[psycopg.Connection[Any]]:
    """A session with twins of the server's operators and functions first in its path. Each says that it was called."""
    conn.execute("CREATE SCHEMA evil")
    conn.execute(TWINS.encode())
    conn.execute("SET search_path = evil, pg_catalog")
    for twin in ("SELECT 1 >= 1", "SELECT octet_length('a'::text)", "SELECT 'a'::text = 'a'::text"):
        with pytest.raises(errors.RaiseException, match="the twin was called"), conn.transaction():
            conn.execute(twin.encode())
    yield conn


def test_every_function_of_a_check_a_default_a_trigger_or_an_index_is_tried_here(conn: psycopg.Connection[Any]) -> None:
    assert [name for (name,) in conn.execute(CALLED.encode())] == [
        "pgqueue.is_out_of_place(smallint,smallint,timestamp with time zone,smallint,smallint,smallint,boolean)",
        "pgqueue.keys_can_be(text,integer,text,text,text)",
        "pgqueue.now()",
        "pgqueue.put_in_place()",
        "pgqueue.record_bulk()",
        "pgqueue.refuse_update()",
        "pgqueue.replace_setting()",
    ]


GOOD = [
    "(task) VALUES ('x')",
    "(task, run_at) VALUES ('x', '2000-01-01')",
    "(task, run_at) VALUES ('x', '2100-01-01')",
    "(task, state, run_at) VALUES ('x', 'scheduled', '2100-01-01')",
    "(task, lock_key, lock_limit, on_locked) VALUES ('x', 'k', 1, 'wait'), ('x', 'k', 2, 'skip')",
    "(task, lock_key, lock_limit, on_locked) VALUES ('x', 'k', 3, 'once')",
    "(task, lock_key) VALUES ('x', 'k')",
    "(task, limit_key, rate_key) VALUES ('x', 'l', 'r:k')",
    "(task, priority) VALUES ('x', 3)",
    "(task, rank, attempt) VALUES ('x', 10, 1)",
    "(task, rank) VALUES ('x', 10)",
]
BAD = [
    "(task, priority, rank) VALUES ('x', 5, 13)",
    "(task, priority, rank) VALUES ('x', 3, 8)",
    "(task, run_at) VALUES ('x', 'infinity')",
    "(task, lock_key, lock_limit) VALUES ('x', 'k', -1)",
    "(task, lock_key, lock_limit) VALUES ('x', 'k', 0)",
    "(task, lock_key, on_locked) VALUES ('x', 'k', 'never')",
    "(task, lock_key) VALUES ('x', '')",
    "(task, lock_key) VALUES ('x', pg_catalog.repeat('k', 501))",
    "(task, limit_key) VALUES ('x', '')",
    "(task, limit_key) VALUES ('x', pg_catalog.repeat('l', 201))",
    "(task, rate_key) VALUES ('x', '')",
    "(task, rate_key) VALUES ('x', pg_catalog.repeat('r', 501))",
    "(task, state, run_at, lock_key, lock_limit) VALUES ('x', 'scheduled', '2100-01-01', 'k', -1)",
]


@pytest.mark.promise("F67")
@pytest.mark.parametrize("own", [False, True], ids=["the usual path", "twins first in the path"])
def test_checks_mean_the_same_in_every_session(own: bool, request: pytest.FixtureRequest) -> None:
    """Before, `>=` for integers in a schema of the role's own let a lock_limit of -1 in."""
    conn = request.getfixturevalue("hostile" if own else "conn")
    for row in GOOD:
        conn.execute(f"INSERT INTO pgqueue.job {row}".encode())
    for row in BAD:
        with pytest.raises(errors.CheckViolation), conn.transaction():
            conn.execute(f"INSERT INTO pgqueue.job {row}".encode())


@pytest.mark.promise("F67")
def test_triggers_mean_the_same_in_every_session(hostile: psycopg.Connection[Any]) -> None:
    with pytest.raises(errors.ObjectNotInPrerequisiteState, match="never updated"), hostile.transaction():
        hostile.execute("UPDATE pgqueue.job SET priority = 1")
    for row in (
        "ring (kind, leaves, retention) VALUES ('done', 8, '2 days')",
        "duty (name, done_at) VALUES ('sweep', '2000-01-01')",
        "migration (version, name, breaking) VALUES (1, 'schema', false)",
        "relay_target DEFAULT VALUES",
        "bulk (actor, action, target, states, up_to) VALUES ('a', 'discard', '{}', '{failed}', 1)",
    ):
        hostile.execute(f"INSERT INTO pgqueue.{row}".encode())
    hostile.execute("UPDATE pgqueue.bulk SET changed = 7")
    assert hostile.execute("TABLE pgqueue.audit").fetchall()


@pytest.mark.promise("F67")
def test_the_twins_are_heard_where_an_operator_is_not_named_in_full(hostile: psycopg.Connection[Any]) -> None:
    hostile.execute(
        "CREATE OR REPLACE FUNCTION pgqueue.keys_can_be("
        "lock_key text, lock_limit integer, on_locked text, limit_key text, rate_key text) "
        "RETURNS boolean LANGUAGE plpgsql AS 'BEGIN RETURN lock_limit >= 1 IS NOT FALSE; END'"
    )
    with pytest.raises(errors.RaiseException, match="the twin was called: >="):
        hostile.execute("INSERT INTO pgqueue.job (task, lock_key, lock_limit) VALUES ('x', 'k', 1)")


CHECKS = """
    SELECT c.conname, c.conrelid::regclass::text, pg_get_expr(c.conbin, c.conrelid) FROM pg_constraint c
    WHERE c.connamespace = 'pgqueue'::regnamespace AND c.contype = 'c'
    UNION ALL
    SELECT DISTINCT p.proname, 'pgqueue.job_available',
           substring(p.prosrc FROM '^\\s*BEGIN\\s+RETURN\\s(.*);\\s*END\\s*$')
    FROM pg_depend d JOIN pg_proc p ON p.oid = d.refobjid
    LEFT JOIN pg_constraint c ON d.classid = 'pg_constraint'::regclass AND d.objid = c.oid
    LEFT JOIN pg_index i ON d.classid = 'pg_class'::regclass AND d.objid = i.indexrelid
    WHERE d.refclassid = 'pg_proc'::regclass AND p.pronamespace = 'pgqueue'::regnamespace
          AND (c.contype = 'c' OR i.indexrelid IS NOT NULL)
"""
"""Each check; the body of each function of ours that a check or an index calls, with columns of jobs as arguments."""


def asks_more_than_its_row(conn: psycopg.Connection[Any]) -> set[str]:
    """The checks that may not be the condition of an index: the server judges each function, operator and cast."""
    found = set()
    for name, table, condition in conn.execute(CHECKS.encode()).fetchall():
        if condition is None:  # the body of a function is more than one RETURN
            found.add(name)
            continue
        try:
            with conn.transaction(force_rollback=True):
                conn.execute(f"CREATE INDEX ON {table} ((1)) WHERE {condition}".encode())
        except (errors.InvalidObjectDefinition, errors.FeatureNotSupported):
            found.add(name)
    return found


@pytest.mark.promise("F192")
def test_no_check_and_no_index_asks_anything_but_its_row(conn: psycopg.Connection[Any]) -> None:
    """Not a clock, a setting, a right or another row: a restore or a subscriber would refuse rows that were right."""
    migrations.migrate(conn, "pgqueue", line=migrations.OUTBOX)
    assert {name for name, _, _ in conn.execute(CHECKS.encode())} >= {"keys_can_be", "job_available_is_ready"}
    assert asks_more_than_its_row(conn) == set()
    for name, condition in {
        "asks_clock": "run_at <= pgqueue.now()",
        "asks_setting": "run_at::text <> ''",
        "asks_right": "has_table_privilege('pgqueue.job', 'SELECT')",
        "keys_can_be": "true",
    }.items():
        if name == "keys_can_be":  # says that it is immutable, and asks the clock
            conn.execute(
                "CREATE OR REPLACE FUNCTION pgqueue.keys_can_be("
                "lock_key text, lock_limit integer, on_locked text, limit_key text, rate_key text) RETURNS boolean "
                "LANGUAGE plpgsql IMMUTABLE AS 'BEGIN RETURN lock_key < clock_timestamp()::text; END'"
            )
        else:
            conn.execute(f"ALTER TABLE pgqueue.job_available ADD CONSTRAINT {name} CHECK ({condition})".encode())
        assert name in asks_more_than_its_row(conn)
