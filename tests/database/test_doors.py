"""What a role with few rights may write, and what it can do to the work of others: nothing."""

from __future__ import annotations

import psycopg
import pytest
from psycopg import errors
from roles import Role, refused, role
from workers import Eyes

import pgqueue as api

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


@pytest.mark.promise("F54")
def test_the_statements_of_pgqueue_never_need_the_trigger(role: Role, eyes: Eyes) -> None:
    """It would cost a batch that names a priority a third."""
    eyes.do("ALTER TABLE pgqueue.job_available DISABLE TRIGGER put_in_lane")
    task = api.remote("t").using(priority=2)
    with psycopg.connect(role("enqueue")) as conn:
        api.enqueue(conn, task, x=1)
        api.enqueue_many(conn, [task.new(x=1), task.using(deadline=60).new(x=2)])
        api.enqueue(conn, task.using(unique="k"), x=1)
        conn.execute("SELECT pgqueue.enqueue('t', priority => 2, unique_key => 'u')")
        conn.execute("SELECT pgqueue.enqueue('t', priority => 2)")
    assert eyes.all("SELECT priority, rank, count(*) FROM pgqueue.job GROUP BY 1, 2") == [(2, 5, 6)]


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
    """Also as the version before does: a job that was given back before it started has no mark but its rank."""
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
    fires = "CREATE TRIGGER mine AFTER INSERT ON mine FOR EACH ROW EXECUTE FUNCTION pgqueue.put_in_lane()"
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
