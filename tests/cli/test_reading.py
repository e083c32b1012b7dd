"""`pgqueue status`, `jobs`, `version`: what people see fits 80 columns, what machines read is JSON."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from commands import COMMAND, items, on_terminal, pgqueue

import pgqueue as api
from pgqueue.cli import tables
from pgqueue.cli.database import reading
from pgqueue.cli.tables import short, span, table
from pgqueue.database import migrations
from pgqueue.jobs.cron import Cron

Conn = psycopg.Connection[Any]
LONG = "x" * 40


@pytest.fixture
def full(conn: Conn) -> Conn:
    """A database with the longest of everything, in every state."""
    task = "app." + "t" * 196
    for queue in (LONG, "q"):
        conn.execute(
            "INSERT INTO pgqueue.job (task, queue, state, run_at) VALUES (%(t)s, %(q)s, 'available', NULL), "
            "(%(t)s, %(q)s, 'scheduled', now() + interval '3 days')",
            {"t": task, "q": queue},
        )
    conn.execute(
        "INSERT INTO pgqueue.job (task, queue, state, key) VALUES (%s, 'q', 'blocked', 'k')",
        [task],
    )
    conn.execute(
        "INSERT INTO pgqueue.job (task, queue, state, worker_id, claim, started_at, attempt, max_attempts) "
        "VALUES (%s, 'q', 'running', 1, 1, now(), 12345, 32000)",
        [task],
    )
    for state in ("completed", "skipped", "failed", "cancelled"):
        conn.execute(
            "INSERT INTO pgqueue.job (id, task, queue, state, finished_at, reason) "
            "VALUES (%s, %s, %s, %s, now() - interval '5 days', 'error')",
            [9_000_000_000_000_000 + len(state), task, LONG, state],
        )
    conn.execute(
        "INSERT INTO pgqueue.worker (lease, pid, concurrency, host, version_tag, queues, state) "
        "SELECT '15 s', 4194304, 1000, %s, %s, ARRAY['q', %s], 'quiet' FROM generate_series(1, 60)",
        ["host." * 12, "v" * 40, LONG],
    )
    conn.execute("INSERT INTO pgqueue.queue VALUES ('q', now())")
    conn.execute("INSERT INTO pgqueue.job (task, queue) SELECT 't', 'many' || g FROM generate_series(1, 60) g")
    conn.commit()
    return conn


@pytest.mark.parametrize("command", [["status"], ["jobs"], ["jobs", "--limit", "500"], ["prune"]], ids=str)
def test_tables_fit_80_columns(full: Conn, dsn: str, command: list[str]) -> None:
    done = on_terminal(*command, dsn=dsn)
    assert done.returncode == 0, done.stderr
    assert max(map(len, (done.stdout + done.stderr).splitlines())) <= 80
    assert len(done.stdout.splitlines()) > 3


def test_a_wider_terminal_is_used(full: Conn, dsn: str) -> None:
    assert LONG in on_terminal("jobs", dsn=dsn, columns=300).stdout


@pytest.mark.promise("F71")
@pytest.mark.parametrize("command", [["status"], ["jobs", "--limit", "500"]], ids=str)
def test_what_is_no_terminal_gets_everything(full: Conn, dsn: str, command: list[str]) -> None:
    """Whatever COLUMNS says, which a shell may have exported."""
    assert "…" in on_terminal(*command, dsn=dsn).stdout
    done = pgqueue(*command, dsn=dsn, COLUMNS="80")
    assert "…" not in done.stdout
    wanted = [LONG, "many60"] if command == ["status"] else [LONG, "app." + "t" * 196]
    assert all(text in done.stdout for text in wanted)


@pytest.mark.promise("F71")
def test_the_time_of_a_schedule_says_its_zone(conn: Conn, dsn: str) -> None:
    api.schedules.add(conn, "nightly", Cron("0 3 * * *"), "t")
    conn.execute("UPDATE pgqueue.schedule SET next_at = '2026-12-24 18:00+01'")
    conn.commit()
    assert "12-24 17:00:00Z" in pgqueue("schedules", dsn=dsn, PGTZ="America/New_York").stdout


@pytest.mark.promise("F71")
def test_a_text_of_several_lines_keeps_its_lines(conn: Conn, dsn: str) -> None:
    conn.execute(
        "INSERT INTO pgqueue.job (id, task, state, finished_at, reason) "
        "VALUES (7, 't', 'cancelled', now(), E'first\nsecond')"
    )
    conn.execute(
        "INSERT INTO pgqueue.attempt (job_id, enqueued_at, claim, attempt, worker_id, started_at, finished_at, bin, "
        "outcome, error_type, message) SELECT 7, (SELECT enqueued_at FROM pgqueue.job WHERE id = 7), 1, 1, 3, "
        "now(), now(), 0, 'error', 'DataError', E'two lines:\n  here'"
    )
    conn.commit()
    shown = pgqueue("jobs", "7", dsn=dsn).stdout
    assert f"reason:          first\n{' ' * 17}second\n" in shown
    assert "  DataError: two lines:\n    here\n" in shown


def test_what_a_row_says_does_not_drive_the_terminal(conn: Conn, dsn: str) -> None:
    conn.execute("INSERT INTO pgqueue.job (task, queue) VALUES (E'evil\\x1b[2Jtask\\nline', E'q\\tq')")
    conn.commit()
    for command in (["jobs"], ["jobs", "1"], ["status"]):
        done = pgqueue(*command, dsn=dsn)
        assert done.returncode == 0
        assert not set(done.stdout) & set("\x1b\t\r")


# status --------------------------------------------------------------------------------------------------------------


HOSTILE = "a\x1b[2J\x9b31m\x85b\x7f\u202e\u2066\n2026-11-20T10:00:00.000Z ERROR pgqueue: forged"
"""A terminal's controls, as ESC and as one character; a line that turns around; a line that looks like another one."""


@pytest.fixture
def hostile(conn: Conn) -> Conn:
    """A database in which every text is hostile that its checks let be so."""
    key = {"t": HOSTILE[:200], "q": HOSTILE[:20], "k": HOSTILE, "j": json.dumps({HOSTILE: HOSTILE})}
    conn.execute(
        "INSERT INTO pgqueue.job (task, queue, args, headers, unique_key) VALUES (%(t)s, %(q)s, %(j)s, %(j)s, %(k)s)",
        key,
    )
    conn.execute(
        "INSERT INTO pgqueue.job (id, task, queue, args, state, finished_at, reason, result) "
        "VALUES (4711, %(t)s, %(q)s, %(j)s, 'failed', now(), %(k)s, %(j)s)",
        key,
    )
    conn.execute(
        "INSERT INTO pgqueue.attempt (job_id, enqueued_at, claim, attempt, worker_id, started_at, finished_at, bin, "
        "outcome, error_type, message, traceback) VALUES (4711, now(), 1, 1, 1, now(), now(), "
        "(SELECT bin FROM pgqueue.ring WHERE kind = 'attempt'), "
        "'failed', %(k)s, %(k)s, %(k)s)",
        key,
    )
    conn.execute(
        "INSERT INTO pgqueue.job (task, queue, state, worker_id, claim, started_at, lock_key, hold_pos, holds) "
        "VALUES (%(t)s, %(q)s, 'running', 1, 1, now(), %(k)s, 1, true)",
        key,
    )
    conn.execute(
        "INSERT INTO pgqueue.job (task, queue, state, key, lock_key) VALUES (%(t)s, %(q)s, 'blocked', %(k)s, %(k)s)",
        key,
    )
    conn.execute(
        "INSERT INTO pgqueue.worker (lease, pid, concurrency, host, version_tag, queues, state) "
        "VALUES ('15 s', 1, 1, %(k)s, %(k)s, ARRAY[%(q)s], 'running')",
        key,
    )
    conn.execute(
        "INSERT INTO pgqueue.history_minute (at, bin, queue, task, failed) VALUES (now(), 0, %(q)s, %(t)s, 1)", key
    )
    conn.execute(
        "INSERT INTO pgqueue.error_group "
        "VALUES (%(k)s, %(q)s, %(t)s, %(k)s, %(k)s, %(k)s, now(), now(), 1, '{7}', %(k)s)",
        key,
    )
    conn.commit()
    return conn


COMMANDS = [
    *(["status"], ["jobs"], ["jobs", "4711"], ["jobs", "--state", "failed"], ["locks"], ["limits"], ["workers"]),
    *(["history", "--by", "task"], ["errors"]),
    *(["schedules"], ["prune"], ["health"], ["cancel", "1"], ["retry", "4711"], ["migrate", "--check"]),
    *(["jobs", "--task", HOSTILE], ["jobs", "--queue", HOSTILE], ["pause", HOSTILE], ["enqueue", HOSTILE]),
    *(["locks", "release", HOSTILE, "--yes"], ["schedules", "run", HOSTILE], ["limits", "set", HOSTILE, "3"]),
    *(["tasks"], ["queues"], ["discard", "4711"], ["jobs", "--arg", f"x={HOSTILE}"], ["jobs", "--arg", HOSTILE]),
    *(
        ["jobs", "--error", "a"],
        ["jobs", "--since", HOSTILE],
        ["discard", "--task", HOSTILE[:200]],
        ["resume", HOSTILE],
    ),
    *(["enqueue", "t", "--queue", "q"], ["limits", HOSTILE], ["tasks", HOSTILE]),
    *(["why", "4711"], ["why", "1"], ["why", "4712"], ["why", HOSTILE]),
    *([HOSTILE], ["jobs", HOSTILE], ["status", f"--{HOSTILE}"], ["work", HOSTILE]),
]


@pytest.mark.second
@pytest.mark.promise("F49")
@pytest.mark.parametrize("command", COMMANDS, ids=range(len(COMMANDS)))
def test_no_command_prints_foreign_text_raw(hostile: Conn, dsn: str, command: list[str]) -> None:
    done = pgqueue(*command, dsn=dsn)
    lines = [line for text in (done.stdout, done.stderr) for line in text.split("\n")]
    assert [line for line in lines if not line.isprintable()] == []
    assert not [line for line in lines if line.startswith("2026-11-20")]
    assert "Traceback (most recent call last)" not in done.stderr


def test_status_marks_queues_nobody_serves(conn: Conn, dsn: str) -> None:
    conn.execute("INSERT INTO pgqueue.job (task, queue) VALUES ('t', 'alone'), ('t', 'served')")
    conn.execute(
        "INSERT INTO pgqueue.worker (lease, pid, concurrency, host, version_tag, queues) "
        "VALUES ('15 s', 77, 10, 'here', '1', '{served}')"
    )
    conn.commit()
    lines = pgqueue("status", dsn=dsn).stdout.splitlines()
    [alone] = [line for line in lines if line.startswith("alone")]
    [served] = [line for line in lines if line.startswith("served")]
    assert alone.endswith("NOT SERVED")
    assert served.endswith(" 1")
    assert lines.index(alone) < lines.index(served)
    assert any("here:77" in line and "ago" in line for line in lines)


@pytest.mark.parametrize("command", ["status", "workers"])
def test_slots_that_are_lost_are_shown(conn: Conn, dsn: str, command: str) -> None:
    for lost in (0, 3):
        conn.execute(
            "INSERT INTO pgqueue.worker (lease, pid, concurrency, host, version_tag, queues, lost) "
            "VALUES ('15 s', 77, 10, %s, '1', '{q}', %s)",
            (f"lost{lost}", lost),
        )
    conn.commit()
    lines = [line for line in pgqueue(command, dsn=dsn).stdout.splitlines() if ":77" in line]
    assert sorted("3 LOST" in line for line in lines) == [False, True], lines
    assert sum("LOST" in line for line in lines) == 1


def test_status_marks_estimates(conn: Conn, dsn: str) -> None:
    conn.execute("INSERT INTO pgqueue.job_available (task) SELECT 't' FROM generate_series(1, 20000)")
    conn.commit()
    done = pgqueue("status", dsn=dsn)
    assert done.stdout.count("~") == 2
    counted = items(pgqueue("status", "--json", dsn=dsn))[0]["states"]["available"]
    assert (counted["exact"], 15_000 < counted["n"] < 25_000) == (False, True)


def test_status_tells_of_limits_and_rates_that_nobody_has_declared(conn: Conn, dsn: str) -> None:
    assert "UNDECLARED" not in pgqueue("status", dsn=dsn).stdout
    assert items(pgqueue("status", "--json", dsn=dsn))[0]["undeclared"] == []
    conn.execute("INSERT INTO pgqueue.key_limit (name, n, set_at) VALUES ('known', 0, now())")
    conn.execute("INSERT INTO pgqueue.key_rate (name, count, period, set_at) VALUES ('paced', 1, 60, now())")
    conn.execute(
        "INSERT INTO pgqueue.job_blocked (state, task, key) SELECT 'blocked', 't', key FROM unnest(%s::text[]) AS key",
        [["limit:known", "limit:warehouse", "limit:warehouse", "lock:k", "rate:paced:1", "rate:mail", "rate:mail:7"]],
    )
    conn.commit()
    lines = [line for line in pgqueue("status", dsn=dsn).stdout.splitlines() if line.startswith("UNDECLARED")]
    assert lines == [
        "UNDECLARED limit warehouse: 2 jobs wait for it, and no worker has declared it.",
        "UNDECLARED rate mail: 2 jobs wait for it, and no worker has declared it.",
    ]
    told = items(pgqueue("status", "--json", dsn=dsn))[0]["undeclared"]
    assert all(0 <= each.pop("waited") < 600 for each in told), told
    assert told == [
        {"kind": "limit", "name": "warehouse", "waiting": 2},
        {"kind": "rate", "name": "mail", "waiting": 2},
    ]


@pytest.mark.promise("F18")
def test_status_names_tasks_that_no_live_worker_knows(conn: Conn, dsn: str) -> None:
    assert "knows" not in pgqueue("status", dsn=dsn).stdout
    assert items(pgqueue("status", "--json", dsn=dsn))[0]["unknown"] == []
    conn.execute(
        "INSERT INTO pgqueue.worker (lease, pid, concurrency, host, version_tag, queues, tasks) "
        "VALUES ('15 s', 77, 10, 'here', '1', '{default}', '{mine,mine.old}')"
    )
    conn.execute(
        "INSERT INTO pgqueue.job (task) SELECT unnest(array_fill('other.ping'::text, ARRAY[13])) "
        "UNION ALL SELECT unnest('{mine,mine.old,other.pong}'::text[])"
    )
    conn.commit()
    lines = pgqueue("status", dsn=dsn).stdout.splitlines()
    assert "14 jobs of tasks no live worker knows: other.ping 13, other.pong 1" in lines
    [status] = items(pgqueue("status", "--json", dsn=dsn))
    assert status["unknown"] == [
        {"queue": "default", "task": "other.ping", "jobs": {"n": 13, "exact": True}},
        {"queue": "default", "task": "other.pong", "jobs": {"n": 1, "exact": True}},
    ]
    assert [worker["tasks"] for worker in status["workers"]] == [2]


@pytest.mark.promise("F18")
def test_status_says_how_many_tasks_each_worker_knows_and_which_no_worker_does(conn: Conn, dsn: str) -> None:
    for host, tasks in (("one", ["t"]), ("both", ["t", "u"])):
        conn.execute(
            "INSERT INTO pgqueue.worker (lease, pid, concurrency, host, version_tag, queues, tasks) "
            "VALUES ('15 s', 77, 10, %s, '1', '{default}', %s)",
            (host, tasks),
        )
    conn.execute("INSERT INTO pgqueue.job (task) VALUES ('other.ping'), ('u')")
    conn.commit()
    lines = pgqueue("status", dsn=dsn).stdout.splitlines()
    [one] = [line.split() for line in lines if "one:77" in line]
    [both] = [line.split() for line in lines if "both:77" in line]
    assert (one[-2:], both[-2:]) == (["1", "default"], ["2", "default"])
    assert [line for line in lines if "no live worker knows: other.ping 1" in line], lines


def test_status_of_an_empty_database_says_what_to_do(dsn: str) -> None:
    done = pgqueue("status", dsn=dsn)
    assert "pgqueue enqueue" in done.stdout and "pgqueue work" in done.stdout


def test_status_as_json_has_everything(full: Conn, dsn: str) -> None:
    [status] = items(pgqueue("status", "--json", dsn=dsn))
    assert set(status) == {
        "workers_cut_at",
        "relays",
        "held",
        "outbox",
        "database",
        "schema",
        "version",
        "server_version",
        "at",
        "counted_at",
        "states",
        "queues",
        "unknown",
        "workers",
        "paused_tasks",
        "read_only",
        "number",
        "undeclared",
    }
    assert (len(status["queues"]), len(status["workers"])) == (62, 60)
    assert datetime.fromisoformat(status["at"]).utcoffset() is not None


@pytest.mark.second
def test_watch_goes_on_until_interrupted(dsn: str) -> None:
    environ = {name: value for name, value in os.environ.items() if name != "PGQUEUE_DSN"} | {"PGQUEUE_DSN": dsn}
    with subprocess.Popen(
        [COMMAND, "status", "--watch", "--json"], env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        first, second = (json.loads(process.stdout.readline())["items"][0] for _ in range(2))
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    seconds = datetime.fromisoformat(second["at"]) - datetime.fromisoformat(first["at"])
    assert timedelta(seconds=1) < seconds < timedelta(seconds=60)


@pytest.mark.promise("F114")
def test_what_is_paused_is_marked_since_when_and_by_which_actor(conn: Conn, dsn: str) -> None:
    task = "app." + "t" * 150
    api.pause(conn, LONG, actor="ann")
    api.pause(conn, "empty", actor="bob" * 60)
    api.pause(conn, task=task, actor="carol")
    api.pause(conn, task="idle")
    conn.execute("INSERT INTO pgqueue.job (task, queue) VALUES (%s, %s)", [task, LONG])
    conn.execute("UPDATE pgqueue.queue SET paused_at = now() - interval '3 h' WHERE name = %s", [LONG])
    conn.execute("UPDATE pgqueue.paused_task SET paused_at = now() - interval '5 d' WHERE name = %s", [task])
    conn.commit()
    role = conn.execute("SELECT session_user").fetchall()[0][0]
    piped = {name: pgqueue(name, dsn=dsn).stdout.splitlines() for name in ("status", "queues", "tasks")}
    lines = [f"PAUSED queue {LONG} for 3h by ann", f"PAUSED task {task} for 5d by carol"]
    assert set(lines) < set(piped["status"]) and lines[0] in piped["queues"]
    assert any(line.startswith("PAUSED queue empty for") and line.endswith("bob" * 60) for line in piped["status"])
    assert any(line.startswith("PAUSED task idle for") and line.endswith(f" by {role}") for line in piped["status"])
    assert [line.split("PAUSED ")[1] for line in piped["tasks"] if line.startswith(task)] == ["5d by carol"]
    for name in piped:
        shown = on_terminal(name, dsn=dsn).stdout.splitlines()
        assert max(map(len, shown)) <= 80
        assert sum("PAUSED" in line for line in shown) >= 2
        assert any("ann" in line or "carol" in line for line in shown)
    [status] = items(pgqueue("status", "--json", dsn=dsn))
    assert [(each["name"], each["paused_by"]) for each in status["paused_tasks"]] == [(task, "carol"), ("idle", role)]
    assert {each["name"]: each["paused_by"] for each in status["queues"]} == {LONG: "ann", "empty": "bob" * 60}
    tasks = {each["name"]: each for each in items(pgqueue("tasks", "--json", dsn=dsn))}
    assert (tasks[task]["paused_by"], tasks["idle"]["jobs"]["n"], tasks["idle"]["paused_by"]) == ("carol", 0, role)
    for queue in (LONG, "empty"):
        api.resume(conn, queue)
    for name in (task, "idle"):
        api.resume(conn, task=name)
    conn.commit()
    assert "PAUSED" not in "".join(pgqueue(name, dsn=dsn).stdout for name in piped)


# jobs ----------------------------------------------------------------------------------------------------------------


def test_jobs_are_listed_newest_first(full: Conn, dsn: str) -> None:
    listed = json.loads(pgqueue("jobs", "--json", "--limit", "500", dsn=dsn).stdout)
    ids = [job["id"] for job in listed["items"]]
    assert ids == sorted(ids, reverse=True)
    assert (len(ids), listed["complete"]) == (70, True)
    assert all(datetime.fromisoformat(job["enqueued_at"]).tzinfo is not None for job in listed["items"])


@pytest.mark.parametrize(
    ("arguments", "number"),
    [
        (["--state", "failed"], 1),
        (["--queue", "q"], 4),
        (["--task", "t"], 60),
        (["--task", "t", "--queue", "many7"], 1),
        (["--state", "failed", "--state", "cancelled"], 2),
        (["--error", "ERR"], 4),
        (["--since", "1h", "--state", "failed"], 1),
        (["--until", "1h"], 0),
        (["--until", "2099-01-01T00:00Z", "--task", "t"], 60),
        (["--after", "9000000000000006"], 66),
    ],
    ids=str,
)
def test_jobs_are_filtered(full: Conn, dsn: str, arguments: list[str], number: int) -> None:
    assert len(items(pgqueue("jobs", "--json", "--limit", "100", *arguments, dsn=dsn))) == number


@pytest.mark.promise("F158")
def test_jobs_of_a_worker_and_of_a_class_of_errors(conn: Conn, dsn: str) -> None:
    for id, error_type in ((1, "OSError"), (2, "ValueError")):
        conn.execute(
            "INSERT INTO pgqueue.job (id, task, state, finished_at, reason, worker_id) "
            "VALUES (%s, 't', 'failed', now(), 'error', %s)",
            [id, 10 + id],
        )
        conn.execute(
            "INSERT INTO pgqueue.attempt (job_id, enqueued_at, claim, attempt, worker_id, started_at, finished_at, "
            "bin, outcome, error_type) "
            "SELECT id, enqueued_at, 1, 1, 10, now(), now(), 0, 'failed', %s FROM pgqueue.job WHERE id = %s",
            [error_type, id],
        )
    conn.commit()
    for given, expected in {
        ("--worker", "11"): [1],
        ("--worker", "10"): [1, 2],
        ("--error-type", "ValueError"): [2],
        ("--error-type", "ValueError", "--worker", "11"): [],
    }.items():
        assert sorted(job["id"] for job in items(pgqueue("jobs", *given, "--json", dsn=dsn))) == expected
    assert pgqueue("jobs", "1", "--worker", "11", dsn=dsn).returncode == 2


def test_no_job_fits_is_said_on_stderr(dsn: str) -> None:
    done = pgqueue("jobs", "--state", "failed", dsn=dsn)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "No job fits.\n")


def test_a_search_that_gave_up_says_so(conn: Conn, dsn: str) -> None:
    conn.execute("INSERT INTO pgqueue.job_available (task) SELECT 't' FROM generate_series(1, 20001)")
    conn.commit()
    done = pgqueue("jobs", "--task", "other", dsn=dsn)
    assert (done.returncode, done.stdout) == (0, "")
    assert "Searched 20,000 jobs of these states, as far as 2; others may fit too: --after 2" in done.stderr
    rest = pgqueue("jobs", "--task", "other", "--after", "2", "--json", dsn=dsn)
    assert (json.loads(rest.stdout)["searched"], json.loads(rest.stdout)["complete"]) == (1, True)


@pytest.mark.promise("F113")
def test_lists_by_time_go_on_page_by_page(conn: Conn, dsn: str) -> None:
    conn.execute(
        "INSERT INTO pgqueue.job (id, task, state, run_at, attempt) "
        "SELECT g, 't', 'scheduled', now() + make_interval(hours => 10 - g), mod(g, 2) FROM generate_series(1, 6) AS g"
    )
    conn.execute(
        "INSERT INTO pgqueue.job (id, task, state, reason, finished_at) "
        "SELECT 10 + g, 't', 'failed', 'r', now() - make_interval(hours => g) FROM generate_series(1, 4) AS g"
    )
    conn.commit()
    for state, ids in (("scheduled", [6, 5, 4, 3, 2, 1]), ("retrying", [5, 3, 1]), ("failed", [11, 12, 13, 14])):
        found: list[int] = []
        place: list[str] = []
        while True:
            page = json.loads(pgqueue("jobs", "--state", state, "--limit", "2", "--json", *place, dsn=dsn).stdout)
            found += [job["id"] for job in page["items"]]
            if page["after"] is None:
                break
            place = ["--after", page["after"]]
        assert found == ids
    done = pgqueue("jobs", "--state", "failed", "--after", "12", dsn=dsn)
    assert (done.returncode, "in the order of finished_at" in done.stderr) == (2, True)


@pytest.mark.promise("F72")
def test_jobs_are_found_by_their_arguments(conn: Conn, dsn: str) -> None:
    conn.execute(
        'INSERT INTO pgqueue.job (id, task, args) VALUES (1, \'t\', \'{"order_id": 7, "to": "a"}\'), '
        '(2, \'t\', \'{"order_id": "7"}\'), (3, \'t\', \'{"order_id": 8, "to": "a=b"}\')'
    )
    conn.commit()
    for given, ids in (
        (["order_id=7"], [1]),
        (['order_id="7"'], [2]),
        (["to=a"], [1]),
        (["to=a=b", "order_id=8"], [3]),
        (["order_id=9"], []),
    ):
        words = [word for each in given for word in ("--arg", each)]
        assert [job["id"] for job in items(pgqueue("jobs", "--json", *words, dsn=dsn))] == ids
    for wrong in ("order_id", "=7"):
        assert pgqueue("jobs", "--arg", wrong, dsn=dsn).returncode == 2
    assert pgqueue("jobs", "1", "--arg", "order_id=7", dsn=dsn).returncode == 2


def test_one_job_with_its_attempts(conn: Conn, dsn: str) -> None:
    conn.execute(
        "INSERT INTO pgqueue.job (id, task, args, state, finished_at, reason, attempt) "
        "VALUES (7, 'mail.send', '{\"to\": \"a@example.com\"}', 'failed', now(), 'error', 1)"
    )
    conn.execute(
        "INSERT INTO pgqueue.attempt (job_id, enqueued_at, claim, attempt, worker_id, started_at, finished_at, bin, "
        "outcome, error_type, message, traceback) SELECT 7, (SELECT enqueued_at FROM pgqueue.job WHERE id = 7), "
        "1, 1, 3, now(), now(), 0, 'error', 'OSError', 'no route', E'Trace\\n  line 1'"
    )
    conn.commit()
    shown = pgqueue("jobs", "7", dsn=dsn).stdout
    for text in ("mail.send", '{"to": "a@example.com"}', "failed", "OSError: no route", "  line 1", "worker 3"):
        assert text in shown
    [attempt] = items(pgqueue("jobs", "7", "--json", dsn=dsn))[0]["attempts"]
    assert (attempt["attempt"], attempt["error_type"], attempt["message"]) == (1, "OSError", "no route")


def test_a_job_that_is_not_there_is_1(dsn: str) -> None:
    done = pgqueue("jobs", "4711", dsn=dsn)
    assert (done.returncode, "4711" in done.stderr, done.stdout) == (1, True, "")


def test_enormous_arguments_do_not_flood_the_screen(conn: Conn, dsn: str) -> None:
    conn.execute(
        "INSERT INTO pgqueue.job (id, task, args) VALUES (7, 't', jsonb_build_object('x', repeat('y', 500000)))"
    )
    conn.commit()
    assert len(on_terminal("jobs", "7", dsn=dsn).stdout) < 5_000
    assert len(pgqueue("jobs", "7", dsn=dsn).stdout) > 500_000
    assert len(items(pgqueue("jobs", "7", "--json", dsn=dsn))[0]["args"]["x"]) == 500_000


# version -------------------------------------------------------------------------------------------------------------


def test_version_needs_no_database() -> None:
    done = pgqueue("version")
    assert done.returncode == 0
    assert done.stdout.startswith("pgqueue 1.")


def test_version_tells_of_the_database_that_is_configured(dsn: str, empty_dsn: str) -> None:
    [there] = items(pgqueue("version", "--json", dsn=dsn))
    newest = migrations.files()[-1].version
    assert (there["schema_version"], there["newest_migration"], there["schema"]) == (newest, newest, "pgqueue")
    assert items(pgqueue("version", "--json", dsn=empty_dsn))[0]["schema_version"] == 0


@pytest.mark.promise("F369")
def test_version_check_fails_unless_both_go_together(dsn: str, empty_dsn: str) -> None:
    good = pgqueue("version", "--check", "--json", dsn=dsn)
    assert (good.returncode, items(good)[0]["works"]) == (0, "yes")
    missing = pgqueue("version", "--check", dsn=empty_dsn)
    assert (missing.returncode, missing.stdout) == (4, "") and "pgqueue migrate" in missing.stderr
    with psycopg.connect(dsn) as conn:
        conn.execute("INSERT INTO pgqueue.migration (version, name, breaking) VALUES (9000, 'later', true)")
    newer = pgqueue("version", "--check", dsn=dsn)
    assert (newer.returncode, "9000_later" in newer.stderr) == (4, True)
    assert pgqueue("version", dsn=dsn).returncode == 0  # without --check it only says
    assert pgqueue("version", "--check").returncode == 2  # no database is named


# Tables --------------------------------------------------------------------------------------------------------------


def test_the_columns_that_give_are_shortened_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "width", lambda: 80)
    head, row = table(["ID", "TASK", "QUEUE"], [[7, "t" * 60, "q" * 40]], right="ID", gives="TASK")
    assert row == f" 7  {'t' * 33}…  {'q' * 40}"
    assert head.split() == ["ID", "TASK", "QUEUE"]


def test_a_wide_character_takes_two_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "width", lambda: 80)
    lines = table(["ID", "TASK", "QUEUE"], [[7, "\u65e5" * 60, "q"], [8, "mail", "q"]], right="ID", gives="TASK")
    assert lines[1] == " 7  " + 34 * "\u65e5" + "…  q"
    assert lines[2] == " 8  mail" + " " * 67 + "q"
    assert (short("\u65e5\u672c", 4), short("\u65e5\u672c", 3)) == ("\u65e5\u672c", "\u65e5…")
    assert short("e\u0301te", 3) == "e\u0301te"


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0, "0ms"), (0.25, "250ms"), (12, "12s"), (119, "119s"), (120, "2m"), (7200, "2h"), (200_000, "2d"), (-5, "0ms")],
)
def test_spans_are_short(seconds: float, shown: str) -> None:
    assert span(seconds) == span(timedelta(seconds=seconds)) == shown


def test_cutting_shows_that_something_is_missing() -> None:
    assert (short("abc", 3), short("abcd", 3), short("", 0)) == ("abc", "ab…", "")


def test_what_a_command_reads_is_not_compiled(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the server has JIT, `status` would take a second more, whatever is in the tables."""
    monkeypatch.setenv("PGQUEUE_DSN", dsn)
    monkeypatch.setenv("PGOPTIONS", "-c jit=on")
    with reading("status") as conn:
        assert conn.execute("SELECT current_setting('jit')").fetchall() == [("off",)]


def test_no_command_tells_an_age_by_the_clock_of_this_machine() -> None:
    """Times of rows are the server's: beside another clock they would seem to lie in the future."""
    commands = Path(api.__file__).with_name("cli") / "commands"
    asked = [path.name for path in commands.glob("*.py") if re.search(r"datetime\.now|time\.time\(", path.read_text())]
    assert asked == []
