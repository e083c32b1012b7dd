"""The table defends itself: no UPDATE, no impossible state; and what other languages may write into it."""

from __future__ import annotations

import re
from typing import Any

import psycopg
import pytest
from psycopg import errors
from psycopg.types.json import Jsonb
from workers import Eyes, until, work

from pgqueue.client.tasks import task

UPDATES = (
    "UPDATE {} SET state = 'completed'",
    "UPDATE {} SET priority = 1 WHERE false",
    "MERGE INTO {} j USING (SELECT 1) s ON true WHEN MATCHED THEN UPDATE SET priority = 1",
)
INSERT = "INSERT INTO pgqueue.job ({}) VALUES ({})"
words: list[str] = []


@task(name="schema.says")
async def says(word: str = "nothing") -> None:
    words.append(word)


def relations(conn: psycopg.Connection) -> list[str]:
    return [
        name
        for (name,) in conn.execute("SELECT relid::regclass::text FROM pg_partition_tree('pgqueue.job')").fetchall()
    ]


# No UPDATE -----------------------------------------------------------------------------------------------------------


@pytest.mark.promise("F26")
def test_no_partition_and_no_leaf_can_be_updated(conn: psycopg.Connection) -> None:
    found = relations(conn)
    assert len(found) == 1 + 6 + 8 + 16
    for name in found:
        for sql in UPDATES:
            with (
                pytest.raises(errors.ObjectNotInPrerequisiteState, match="never updated") as caught,
                conn.transaction(),
            ):
                conn.execute(sql.format(name).encode())
            assert "pgqueue cancel" in (caught.value.diag.message_hint or "")
    with pytest.raises(errors.ObjectNotInPrerequisiteState), conn.transaction():
        conn.execute(
            "INSERT INTO pgqueue.job_available (id, task) VALUES (1, 'x') ON CONFLICT (id) DO UPDATE SET task = 'y'"
        )


@pytest.mark.promise("F26")
def test_what_the_hint_says_instead_works(conn: psycopg.Connection) -> None:
    conn.execute("INSERT INTO pgqueue.job (task) VALUES ('x')")
    conn.execute(
        "WITH gone AS (DELETE FROM pgqueue.job WHERE task = 'x' AND state = 'available' RETURNING id, task) "
        "INSERT INTO pgqueue.job (id, task, priority, rank) SELECT id, task, 0, 1 FROM gone"
    )
    assert conn.execute("SELECT count(*), min(priority) FROM pgqueue.job").fetchall() == [(1, 0)]


# Impossible states ---------------------------------------------------------------------------------------------------

IMPOSSIBLE: dict[str, dict[str, Any]] = {
    "an unknown state": {"state": "lost"},
    "no state": {"state": None},
    "no task": {"task": None},
    "a task's name too long": {"task": "x" * 201},
    "no queue": {"queue": None},
    "an empty queue": {"queue": ""},
    "a queue's name too long": {"queue": "q" * 41},
    "no arguments": {"args": None},
    "priority 10": {"priority": 10, "rank": 21},
    "priority -1": {"priority": -1, "rank": -1},
    "a lane that is not its priority's": {"priority": 3, "rank": 19},
    "available, and never due": {"run_at": "infinity", "attempt": 1},
    "available, and taken": {"worker_id": 1},
    "available, and started": {"started_at": "today"},
    "available, and finished": {"finished_at": "today"},
    "available without a position": {"pos": None},
    "scheduled without a time": {"state": "scheduled"},
    "scheduled, and taken": {"state": "scheduled", "run_at": "tomorrow", "worker_id": 1},
    "scheduled for ever": {"state": "scheduled", "run_at": "infinity"},
    "blocked on nothing": {"state": "blocked"},
    "blocked, and taken": {"state": "blocked", "key": "k", "worker_id": 1},
    "running by nobody": {"state": "running", "claim": 1, "started_at": "today"},
    "running without a claim": {"state": "running", "worker_id": 1, "started_at": "today"},
    "running since never": {"state": "running", "worker_id": 1, "claim": 1},
    "running, and finished": {
        "state": "running", "worker_id": 1, "claim": 1, "started_at": "today", "finished_at": "today",
    },
    "completed at no time": {"state": "completed"},
    "failed for no reason": {"state": "failed", "finished_at": "today"},
    "failed at no time": {"state": "failed", "reason": "error"},
    "available before its release": {"node": -1048577},
    "scheduled before its release": {"state": "scheduled", "run_at": "tomorrow", "node": -1048577},
    "running before its release": {
        "state": "running", "worker_id": 1, "claim": 1, "started_at": "today", "node": -1048577,
    },
    "waiting for its release with another key": {"state": "blocked", "key": "lock:a", "node": -1048577},
    "waiting for a release that was": {"state": "blocked", "key": "node:1048578", "node": 1048577},
    "waiting for a release, and of no flow": {"state": "blocked", "key": "node:1048578"},
    "in a leaf there is not": {"state": "completed", "finished_at": "today", "bin": 8},
    "in a leaf there is not of the dead": {"state": "failed", "finished_at": "today", "reason": "x", "bin": 16},
}  # fmt: skip


@pytest.mark.promise("F26")
@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_an_impossible_state_is_refused(name: str, eyes: Eyes) -> None:
    row = {"task": "x", **IMPOSSIBLE[name]}
    sql = INSERT.format(", ".join(row), ", ".join(["%s"] * len(row)))
    with pytest.raises((errors.IntegrityError, errors.DataError)):
        eyes.do(sql, *row.values())
    assert eyes.states() == {}


VALUES = {
    "priority": ("smallint", "9, 0, 10, -1"),
    "pos": ("bigint", "1, 0"),
    "queue": ("text", "'q', '', repeat('q', 41)"),
    "worker_id": ("bigint", "NULL, 1"),
    "started_at": ("timestamptz", "NULL, 'today'"),
    "finished_at": ("timestamptz", "NULL, 'today'"),
    "run_at": ("timestamptz", "'yesterday', 'tomorrow', 'infinity', NULL"),
    "lock_key": ("text", "NULL, '', 'k', repeat('ä', 251)"),
    "lock_limit": ("integer", "NULL, 0, 1"),
    "on_locked": ("text", "NULL, 'once', 'odd'"),
    "limit_key": ("text", "NULL, '', 'k', repeat('k', 201)"),
    "rate_key": ("text", "NULL, '', 'k', repeat('k', 501)"),
    "node": ("bigint", "NULL, 1048577, -1048577"),
}
"""What may stand in a column of a row that enters, and what may not; the first may."""
OF_KEYS = """
    worker_id IS NULL AND started_at IS NULL AND finished_at IS NULL AND node > 0 IS NOT FALSE
    AND (lock_key IS NULL OR octet_length(lock_key) BETWEEN 1 AND 500 AND lock_limit >= 1 IS NOT FALSE
         AND on_locked IN ('wait', 'skip', 'once') IS NOT FALSE)
    AND octet_length(limit_key) BETWEEN 1 AND 200 IS NOT FALSE
    AND octet_length(rate_key) BETWEEN 1 AND 500 IS NOT FALSE
"""
PLAIN = {
    "job_available_is_ready": f"""(
        priority BETWEEN 0 AND 9 AND run_at <> 'infinity' IS NOT FALSE AND pos > 0
        AND octet_length(queue) BETWEEN 1 AND 40 AND {OF_KEYS})""",
    "job_scheduled_is_waiting": f"""(
        priority BETWEEN 0 AND 9 AND octet_length(queue) BETWEEN 1 AND 40 AND isfinite(run_at) AND {OF_KEYS})""",
}
"""What these constraints mean. Those that stand say it in words that cost less."""
SAID = """
SELECT {plain} IS NOT FALSE, {cheap} IS NOT FALSE, count(*) > 3 FROM {columns} GROUP BY 1, 2 ORDER BY 1
"""


@pytest.mark.promise("F26")
@pytest.mark.parametrize("varied", [tuple(VALUES)[:7], tuple(VALUES)[6:]], ids=["of every job", "of times and keys"])
@pytest.mark.parametrize(("part", "name"), [
    ("job_available", "job_available_is_ready"),
    ("job_scheduled", "job_scheduled_is_waiting"),
])  # fmt: skip
def test_a_check_that_costs_little_refuses_what_its_plain_words_refuse(
    part: str, name: str, varied: tuple[str, ...], eyes: Eyes
) -> None:
    """The plain words and the constraint that stands say the same of every row of a grid, of some yes, of some no."""
    stands = eyes.one(
        "SELECT pg_get_constraintdef(oid) FROM pg_constraint WHERE conname = %s AND conrelid = %s::regclass",
        name,
        f"pgqueue.{part}",
    )
    cheap = stands.removeprefix("CHECK ").removesuffix(" NOT VALID")
    columns = ", ".join(
        f"unnest((ARRAY[{values}]::{kind}[])[:{9 if column in varied else 1}]) AS {column} ({column})"
        for column, (kind, values) in VALUES.items()
    )
    assert eyes.all(SAID.format(plain=PLAIN[name], cheap=cheap, columns=columns)) == [
        (False, False, True),
        (True, True, True),
    ]


@pytest.mark.promise("F26")
def test_ids_are_one_sequence_over_all_states_and_no_id_stands_twice_where_work_waits(eyes: Eyes) -> None:
    eyes.do("INSERT INTO pgqueue.job (id, task) VALUES (7, 'x')")
    with pytest.raises(errors.UniqueViolation):
        eyes.do("INSERT INTO pgqueue.job (id, task) VALUES (7, 'x')")


@pytest.mark.parametrize("sql", [
    "INSERT INTO pgqueue.worker (lease, pid, concurrency, host, version_tag, queues) "
    "VALUES ('0.5 s', 1, 1, '', '', '{}')",
    "INSERT INTO pgqueue.worker (lease, pid, concurrency, host, version_tag, queues, state) "
    "VALUES ('5 s', 1, 1, '', '', '{}', 'odd')",
    "INSERT INTO pgqueue.queue (name) VALUES ('')",
    "UPDATE pgqueue.ring SET retention = '0'",
    "UPDATE pgqueue.ring SET retention = '-1 day'",
    "UPDATE pgqueue.ring SET bin = 8 WHERE kind = 'done'",
    "UPDATE pgqueue.ring SET bin = -1",
])  # fmt: skip
@pytest.mark.promise("F26")
def test_impossible_workers_queues_and_rings_are_refused(sql: str, eyes: Eyes) -> None:
    with pytest.raises(errors.CheckViolation):
        eyes.do(sql)


# What others write ---------------------------------------------------------------------------------------------------


@pytest.mark.promise("E17", "F26")
async def test_a_minimal_row_is_a_valid_job_and_is_run(dsn: str, eyes: Eyes) -> None:
    words.clear()
    async with work(dsn, says, poll=0.2):
        eyes.do("INSERT INTO pgqueue.job (task) VALUES ('schema.says')")
        eyes.do("""INSERT INTO pgqueue.job (task, args) VALUES ('schema.says', '{"word": "minimal"}')""")
        eyes.do(
            "INSERT INTO pgqueue.job (state, task, args, run_at) "
            """VALUES ('scheduled', 'schema.says', '{"word": "later"}', now() + interval '0.2 s')"""
        )
        eyes.do('NOTIFY "pgqueue.:scheduled"')
        with eyes.conn.cursor().copy("COPY pgqueue.job (task, args) FROM STDIN") as copy:
            for number in range(3):
                copy.write_row(("schema.says", Jsonb({"word": f"copied {number}"})))
        await until(eyes.done(6))
    assert sorted(words) == ["copied 0", "copied 1", "copied 2", "later", "minimal", "nothing"]


@pytest.mark.promise("E17", "F26", "F192")
async def test_a_plain_insert_with_a_time_to_come_waits_for_it(dsn: str, eyes: Eyes) -> None:
    words.clear()
    soon = "now() + interval '0.5 s'"
    in_time = f"INSERT INTO pgqueue.job (task, args, run_at) SELECT 'schema.says', '{{\"word\": \"%s\"}}', {soon}"
    async with work(dsn, says, poll=0.2):
        eyes.do(in_time % "table")
        eyes.do((in_time % "partition").replace("pgqueue.job", "pgqueue.job_available"))
        eyes.do(f"WITH made AS ({in_time % 'CTE'} RETURNING id) TABLE made")
        copied = ("schema.says", Jsonb({"word": "copied"}), eyes.one(f"SELECT {soon}"), 3)
        with eyes.conn.cursor().copy("COPY pgqueue.job (task, args, run_at, priority) FROM STDIN") as copy:
            copy.write_row(copied)
        await until(eyes.done(4))
    assert sorted(words) == ["CTE", "copied", "partition", "table"]
    assert eyes.one("SELECT min(started_at - run_at) >= interval '0' FROM pgqueue.job")


@pytest.mark.promise("F192")
def test_the_clock_is_asked_only_for_a_job_that_was_to_wait_and_was_never_taken(eyes: Eyes) -> None:
    """A trigger asks it, so at a subscriber of logical replication, and in a restore without triggers, a job stays."""
    to_come = "INSERT INTO pgqueue.job (task, enqueued_at, run_at{}) VALUES ('x', '2100-01-01', '2100-01-02'{})"
    eyes.do(to_come.format("", ""))
    assert eyes.all("SELECT state, pos IS NULL FROM pgqueue.job") == [("scheduled", True)]
    eyes.do(
        "CREATE OR REPLACE FUNCTION pgqueue.now() RETURNS timestamptz LANGUAGE plpgsql AS "
        "$$ BEGIN RAISE 'the clock was asked'; END $$"
    )
    eyes.do("INSERT INTO pgqueue.job (task, enqueued_at, run_at) VALUES ('x', '2100-01-01', '2100-01-01')")
    for column, value in (("attempt", 1), ("crashes", 1), ("snoozes", 1), ("holds", True)):
        eyes.do(to_come.format(f", {column}", f", {value}"))
    with pytest.raises(errors.RaiseException, match="the clock was asked"):
        eyes.do(to_come.format("", ""))
    eyes.do("SET session_replication_role = replica")
    eyes.do(to_come.format("", ""))
    assert eyes.one("SELECT count(*) FROM pgqueue.job_available") == 6


@pytest.mark.promise("E07", "E17")
async def test_the_sql_function_enqueues_in_the_callers_transaction_and_wakes(
    dsn: str, eyes: Eyes, conn: psycopg.Connection
) -> None:
    words.clear()
    async with work(dsn, says, poll=60.0, queues=["default", "mail"]) as worker:
        await until(worker.services.election.leads)
        [[first]] = conn.execute("""SELECT pgqueue.enqueue('schema.says', '{"word": "one"}')""").fetchall()
        conn.execute("""SELECT pgqueue.enqueue('schema.says', '{"word": "two"}', queue => 'mail', priority => 0)""")
        conn.execute(
            "SELECT pgqueue.enqueue('schema.says', '{\"word\": \"three\"}', run_at => now() + interval '0.3 s', "
            "headers => '{\"h\": 1}')"
        )
        conn.execute("""SELECT pgqueue.enqueue('schema.says', '{"word": "past"}', run_at => '2001-01-01Z')""")
        assert eyes.states() == {}
        conn.commit()
        await until(eyes.done(4), 30.0)
        conn.execute("SELECT pgqueue.enqueue('schema.says')")
        conn.rollback()
    assert sorted(words) == ["one", "past", "three", "two"]
    assert first in {id for (id,) in eyes.all("SELECT id FROM pgqueue.job")}
    assert eyes.all("SELECT queue, priority, attempt FROM pgqueue.job WHERE queue = 'mail'") == [("mail", 0, 1)]


REFUSED = [
    ("NULL", "task NULL is not a task name", "1 to 200"),
    ("''", "task '' is not a task name", "1 to 200"),
    ("'two words'", "task 'two words' is not a task name", "without spaces"),
    ("E'a\\tb'", "is not a task name", "without spaces"),
    ("repeat('x', 201)", "is not a task name", "1 to 200"),
    ("'x', queue => 'no spaces'", "queue 'no spaces' is not a queue name", "1 to 40"),
    ("'x', queue => ''", "queue '' is not a queue name", "1 to 40"),
    ("'x', queue => repeat('q', 41)", "is not a queue name", "1 to 40"),
    ("'x', queue => 'ü'", "queue 'ü' is not a queue name", "1 to 40"),
    ("'x', priority => 10", "priority 10 is outside 0 (first) to 9", None),
    ("'x', priority => -1", "priority -1 is outside", None),
    ("'x', args => '[1]'", "JSON objects", None),
    ("'x', args => 'null'", "JSON objects", None),
    ("'x', args => NULL", "JSON objects", None),
    ("'x', headers => '\"text\"'", "JSON objects", None),
    ("'x', args => jsonb_build_object('a', repeat('x', 1048576))", "the limit is 1048576", "Store the data in a table"),
    (
        "'x', headers => jsonb_build_object('a', repeat('x', 1048576))",
        "the limit is 1048576",
        "Store the data in a table",
    ),
    ("'x', run_at => 'infinity'", "infinity", None),
    ("'x', lock_key => 'k', lock_limit => 0", "lock_limit 0 lets no job run", None),
    ("'x', lock_key => 'k', on_locked => 'later'", "on_locked is 'later'", None),
    ("'x', limit_key => ''", "limit_key '' is not the name of a limit", "1 to 200 bytes"),
    ("'x', limit_key => 'two words'", "limit_key 'two words' is not", "without spaces"),
    ("'x', limit_key => E'a\\nb'", "is not the name of a limit", "without spaces"),
    ("'x', limit_key => repeat('ü', 101)", "is not the name of a limit", "1 to 200 bytes"),
    ("'x', rate_key => ''", "rate_key '' is not the name of a rate", "name:key"),
    ("'x', rate_key => ':7'", "rate_key ':7' is not", "name:key"),
    ("'x', rate_key => 'crm:'", "rate_key 'crm:' is not", "name:key"),
    ("'x', rate_key => 'two words:7'", "rate_key 'two words:7' is not", "without spaces"),
    ("'x', rate_key => repeat('r', 201)", "is not the name of a rate", "1 to 200 bytes"),
    ("'x', rate_key => 'r:' || repeat('k', 499)", "is not the name of a rate", "up to 500"),
]


@pytest.mark.promise("F17")
@pytest.mark.parametrize(("arguments", "message", "hint"), REFUSED, ids=[call for call, _, _ in REFUSED])
def test_the_sql_function_says_what_is_wrong(
    arguments: str, message: str, hint: str | None, conn: psycopg.Connection
) -> None:
    with pytest.raises(psycopg.Error) as caught, conn.transaction():
        conn.execute(f"SELECT pgqueue.enqueue({arguments})".encode())
    assert caught.value.diag.message_primary is not None
    assert message in caught.value.diag.message_primary
    assert caught.value.sqlstate in {"22023", "54000"}
    if hint:
        assert hint in (caught.value.diag.message_hint or "")
    assert conn.execute("SELECT count(*) FROM pgqueue.job").fetchall() == [(0,)]  # and the transaction goes on


KEYS = "SELECT lock_key, lock_limit, on_locked, limit_key, rate_key, unique_key, idempotency_key FROM pgqueue.job"


def test_the_sql_function_puts_jobs_under_locks_limits_and_rates(conn: psycopg.Connection) -> None:
    calls = {
        "limit_key => 'warehouse'": (None, None, None, "warehouse", None, None, None),
        "rate_key => 'mail'": (None, None, None, None, "mail", None, None),
        "rate_key => 'crm:two words:7', run_at => now() + interval '1 day'": (
            None, None, None, None, "crm:two words:7", None, None),
        "rate_key => 'r:' || repeat('k', 498)": (None, None, None, None, "r:" + 498 * "k", None, None),
        "limit_key => repeat('ü', 100)": (None, None, None, 100 * "ü", None, None, None),
        "lock_key => 'k', lock_limit => 3": ("k", 3, None, None, None, None, None),
        "lock_key => 'k', on_locked => 'once'": ("k", None, "once", None, None, None, None),
        # As in Python: who has no key has no lock, and nothing of it.
        "lock_key => NULL, lock_limit => 3, on_locked => 'skip'": (None, None, None, None, None, None, None),
        "limit_key => 'warehouse', unique_key => 'u'": (None, None, None, "warehouse", None, "u", None),
        "lock_key => 'k', lock_limit => 3, on_locked => 'skip', limit_key => 'l', rate_key => 'r:x', "
        "unique_key => 'v', idempotency_key => 'w'": ("k", 3, "skip", "l", "r:x", "v", "w"),
    }  # fmt: skip
    for call, columns in calls.items():
        [(job,)] = conn.execute(f"SELECT pgqueue.enqueue('x', {call})".encode()).fetchall()
        assert conn.execute(f"{KEYS} WHERE id = %s".encode(), [job]).fetchall() == [columns]
    [(twice,)] = conn.execute("SELECT pgqueue.enqueue('x', rate_key => 'r', unique_key => 'u')").fetchall()
    assert conn.execute("SELECT limit_key FROM pgqueue.job WHERE id = %s", [twice]).fetchall() == [("warehouse",)]
    assert conn.execute("SELECT count(*) FROM pgqueue.job").fetchall() == [(len(calls),)]


def test_the_sql_function_takes_the_calls_it_has_always_taken(conn: psycopg.Connection) -> None:
    by_position = "'x', '{}', 'mail', 3, '2001-01-01Z', '{\"h\": 1}', '2099-01-01Z', 'k', 'u', 'i'"
    by_name = (
        "task => 'x', args => '{}', queue => 'mail', priority => 3, run_at => '2001-01-01Z', headers => '{\"h\": 1}', "
        "deadline => '2099-01-01Z', lock_key => 'k', unique_key => 'v', idempotency_key => 'j'"
    )
    for call in (by_position, by_name, "'x'"):
        conn.execute(f"SELECT pgqueue.enqueue({call})".encode())
    found = conn.execute("SELECT args, queue, priority, rank, headers FROM pgqueue.job ORDER BY id").fetchall()
    assert found == [({}, "mail", 3, 7, {"h": 1})] * 2 + [({}, "default", 5, 11, None)]
    keys = conn.execute(f"{KEYS} ORDER BY id".encode()).fetchall()
    same = ("k", None, None, None, None)
    assert keys == [(*same, "u", "i"), (*same, "v", "j"), (None,) * 7]


async def test_a_job_from_sql_waits_for_its_limit_and_its_rate_like_any_other(dsn: str, eyes: Eyes) -> None:
    words.clear()
    eyes.do("INSERT INTO pgqueue.key_limit (name, n, set_at) VALUES ('l', 0, now())")
    under = "SELECT pgqueue.enqueue('schema.says', '{\"word\": \"limit\"}', limit_key => 'l', rate_key => 'r:x')"
    async with work(dsn, says, poll=0.2):
        eyes.do(under)
        await until(lambda: eyes.one("SELECT key FROM pgqueue.job_blocked") == "limit:l")
        eyes.do("UPDATE pgqueue.key_limit SET n = 1")
        eyes.do("NOTIFY \"pgqueue.:control\", 'sweep'")
        await until(lambda: eyes.one("SELECT key FROM pgqueue.job_blocked") == "rate:r:x")
        eyes.do("INSERT INTO pgqueue.key_rate (name, count, period, set_at) VALUES ('r', 10, 1, now())")
        eyes.do("NOTIFY \"pgqueue.:control\", 'sweep'")
        await until(eyes.done(1))
    assert words == ["limit"]


def test_the_sql_function_works_with_two_phase_commit_when_told_not_to_notify(conn: psycopg.Connection) -> None:
    conn.autocommit = True
    conn.execute("BEGIN")
    conn.execute("SET LOCAL pgqueue.notify = off")
    conn.execute("SELECT pgqueue.enqueue('x')")
    conn.execute("PREPARE TRANSACTION 'schema-test'")
    conn.execute("COMMIT PREPARED 'schema-test'")
    assert conn.execute("SELECT count(*) FROM pgqueue.job").fetchall() == [(1,)]


def test_the_sql_function_depends_on_no_search_path(conn: psycopg.Connection) -> None:
    conn.execute("CREATE SCHEMA evil")
    conn.execute("CREATE FUNCTION evil.octet_length(text) RETURNS integer LANGUAGE sql AS 'SELECT 99999999'")
    conn.execute("CREATE FUNCTION evil.jsonb_typeof(jsonb) RETURNS text LANGUAGE sql AS 'SELECT ''array'''")
    conn.execute("SET search_path = evil, pg_catalog")
    assert conn.execute("SELECT pgqueue.enqueue('x')").fetchall() == [(1,)]


@pytest.mark.promise("E05")
def test_positions_are_drawn_after_the_transactions_id_on_every_way_in(conn: psycopg.Connection, eyes: Eyes) -> None:
    """The watermark stands on it: no id, no position."""
    defaults = eyes.all(
        "SELECT d.adrelid::regclass::text, pg_get_expr(d.adbin, d.adrelid) FROM pg_attrdef d JOIN pg_attribute a "
        "ON a.attrelid = d.adrelid AND a.attnum = d.adnum "
        "WHERE a.attname = 'pos' AND d.adrelid::regclass::text LIKE 'pgqueue.job%'"
    )
    assert {name for name, _ in defaults} == {"pgqueue.job", "pgqueue.job_available"}
    for _, text in defaults:
        assert text.index("pg_current_xact_id()") < text.index("nextval")
    assert eyes.one("SELECT seqcache FROM pg_sequence WHERE seqrelid = 'pgqueue.job_pos_seq'::regclass") == 1


@pytest.mark.promise("F28")
def test_no_function_notifies_without_a_look_at_the_queue(conn: psycopg.Connection) -> None:
    bodies = conn.execute(
        "SELECT proname, prosrc FROM pg_proc WHERE pronamespace = 'pgqueue'::regnamespace AND prosrc ~ 'pg_notify'"
    ).fetchall()
    assert [name for name, _ in bodies] == ["enqueue"]
    for _, body in bodies:
        assert re.search(r"AND pg_notification_queue_usage\(\) < 0\.9 THEN\s+PERFORM pg_notify\(", body)
