"""The sets of states: they are those of the schema, and a state stands in one partition."""

from __future__ import annotations

from typing import Any

from psycopg import Connection

from pgqueue.jobs import states


def test_the_partitions_and_their_states_are_those_of_the_schema(conn: Connection[Any]) -> None:
    found = conn.execute(
        "SELECT replace(c.relname, 'job_', ''), "
        "ARRAY(SELECT (regexp_matches(pg_get_expr(c.relpartbound, c.oid), '''([a-z]+)''', 'g'))[1]) "
        "FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid WHERE i.inhparent = 'pgqueue.job'::regclass"
    )
    assert {name: tuple(held) for name, held in found} == states.PARTITIONS


def test_each_state_is_live_or_ended_and_retrying_is_none() -> None:
    assert sorted(states.STATES) == sorted({*states.LIVE, *states.ENDED})
    assert states.RETRYING not in states.STATES and states.RETRYING in states.ASKED
