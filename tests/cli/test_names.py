"""Names that nothing knows: commands, queues and tasks; and what there is: `pgqueue tasks`, `pgqueue queues`."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Any

import psycopg
import pytest
from commands import items, pgqueue, working
from roles import Role, role

from pgqueue import distribution

__all__ = ["role"]

Conn = psycopg.Connection[Any]
SHOP = """
import pgqueue

@pgqueue.task(name="mail.send", aliases=["mail.deliver"], queue="mail")
def send(to: str) -> None: ...

@pgqueue.task(name="report.daily")
def daily() -> None: ...
"""


@pytest.fixture
def workers(conn: Conn) -> Conn:
    """Two live workers and one that is dead."""
    conn.execute(
        "INSERT INTO pgqueue.worker (lease, pid, concurrency, host, version_tag, queues, tasks, dead_at) VALUES "
        "('15 s', 1, 1, 'h', '1', '{mail,default}', '{mail.send,mail.check}', NULL), "
        "('15 s', 2, 1, 'h', '1', '{mail}', '{mail.send}', NULL), "
        "('15 s', 4, 1, 'h', '1', '{gone}', '{old.gone}', now())"
    )
    conn.commit()
    return conn


# Commands ------------------------------------------------------------------------------------------------------------


@pytest.mark.promise("F73")
@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (["stauts"], "status"),
        (["limits", "sett"], "set"),
        (["locks", "releas"], "release"),
        (["schedules", "lst"], "list"),
    ],
    ids=str,
)
def test_an_unknown_command_gets_the_one_that_may_be_meant(given: list[str], meant: str) -> None:
    done = pgqueue(*given)
    assert (done.returncode, f"No such command {given[-1]!r}; did you mean {meant!r}?" in done.stderr) == (2, True)


def test_a_command_that_is_like_no_other_is_only_unknown() -> None:
    done = pgqueue("zzz")
    assert (done.returncode, "did you mean" in done.stderr, "No such command 'zzz'." in done.stderr) == (2, False, True)


def test_the_version_is_an_option_too() -> None:
    assert pgqueue("--version").stdout == f"pgqueue {metadata.version(distribution.NAME)}\n"


# Queues and tasks ----------------------------------------------------------------------------------------------------


@pytest.mark.promise("F73")
@pytest.mark.parametrize(
    ("arguments", "warning"),
    [
        (["mail.send", "--queue", "mail"], ""),
        (
            ["mail.sned", "--queue", "mail"],
            "warning: no live worker of queue 'mail' knows task 'mail.sned'; did you mean 'mail.send'?\n",
        ),
        (["mail.send", "--queue", "mial"], "warning: no live worker serves queue 'mial'; did you mean 'mail'?\n"),
        (["zzz", "--queue", "gone"], "warning: no live worker serves queue 'gone'\n"),
    ],
    ids=str,
)
def test_enqueue_warns_of_names_that_no_worker_knows(
    workers: Conn, dsn: str, arguments: list[str], warning: str
) -> None:
    done = pgqueue("enqueue", *arguments, dsn=dsn)
    assert (done.returncode, done.stderr) == (0, warning)
    assert int(done.stdout), "it is enqueued all the same"


@pytest.mark.promise("F73")
def test_a_task_of_another_queue_is_named_with_it(workers: Conn, dsn: str) -> None:
    workers.execute("UPDATE pgqueue.worker SET queues = '{mail}' WHERE pid = 1")
    workers.execute(
        "INSERT INTO pgqueue.worker (lease, pid, concurrency, host, version_tag, queues, tasks) "
        "VALUES ('15 s', 5, 1, 'h', '1', '{default}', '{x}')"
    )
    workers.commit()
    done = pgqueue("enqueue", "mail.send", dsn=dsn)
    assert done.stderr == (
        "warning: no live worker of queue 'default' knows task 'mail.send'; those of queue 'mail' do\n"
    )


@pytest.mark.promise("F73")
def test_pause_resume_and_searches_warn_of_queues_too(workers: Conn, dsn: str) -> None:
    warning = "warning: no live worker serves queue 'mial'; did you mean 'mail'?\n"
    for command in (["resume"], ["pause"], ["jobs", "--queue"], ["cancel", "--yes", "--queue"]):
        done = pgqueue(*command, "mial", dsn=dsn)
        assert (done.returncode, warning in done.stderr) == (0, True), command
        assert "warning" not in pgqueue(*command, "mail", dsn=dsn).stderr


@pytest.mark.promise("F73")
def test_without_workers_or_without_rights_no_warning_is_made(dsn: str, role: Role) -> None:
    assert pgqueue("enqueue", "t", "--queue", "q", dsn=dsn).stderr == ""
    done = pgqueue("enqueue", "t", "--queue", "q", dsn=role("enqueue"))
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.second
@pytest.mark.promise("F73")
def test_work_warns_of_queues_that_nothing_names(workers: Conn, dsn: str, tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(SHOP)
    with working("shop", "-q", "mial,default,mail", "-c", "3", dsn=dsn, cwd=tmp_path) as worker:
        worker.says("no task here names queue 'mial', and no other live worker serves it; did you mean 'mail'?")
        worker.says("concurrency: 3")
    assert worker.output.count("no task here names") == 1


# What there is -------------------------------------------------------------------------------------------------------


@pytest.mark.promise("F74")
def test_tasks_are_those_that_workers_know_and_those_that_jobs_have(workers: Conn, dsn: str, tmp_path: Path) -> None:
    workers.execute(
        "INSERT INTO pgqueue.job (task, queue) VALUES ('mail.send', 'mail'), ('mail.send', 'other'), ('lost', 'mail')"
    )
    workers.execute(
        "INSERT INTO pgqueue.job (task, queue, state, run_at) "
        "VALUES ('lost', 'mail', 'scheduled', now() + interval '1 day')"
    )
    workers.commit()
    found = [tuple(each.values()) for each in items(pgqueue("tasks", "--json", dsn=dsn))]
    assert found == [
        ("lost", 0, {"n": 2, "exact": True}, ["mail"], True, None, None),
        ("mail.check", 1, {"n": 0, "exact": True}, [], False, None, None),
        ("mail.send", 2, {"n": 2, "exact": True}, ["mail", "other"], False, None, None),
    ]
    (tmp_path / "shop.py").write_text(SHOP)
    lines = pgqueue("tasks", "shop", "--app-dir", str(tmp_path), dsn=dsn).stdout.splitlines()
    assert [line.split() for line in lines] == [
        ["TASK", "HERE", "WORKERS", "JOBS", "QUEUES", "NOTE"],
        ["lost", "-", "0", "2", "mail", "UNKNOWN"],
        ["mail.check", "-", "1", "0", "not", "here"],
        ["mail.deliver", "mail", "0", "0", "no", "worker"],
        ["mail.send", "mail", "2", "2", "mail,other"],
        ["report.daily", "default", "0", "0", "no", "worker"],
    ]


@pytest.mark.promise("F74")
def test_queues_are_shown_with_those_that_only_code_names(conn: Conn, dsn: str, tmp_path: Path) -> None:
    assert pgqueue("queues", dsn=dsn).stdout == "No queue has jobs or workers.\n"
    conn.execute("INSERT INTO pgqueue.job (task, queue) VALUES ('t', 'other')")
    conn.execute("INSERT INTO pgqueue.queue VALUES ('other', now())")
    conn.commit()
    (tmp_path / "shop.py").write_text(SHOP)
    there = items(pgqueue("queues", "--json", dsn=dsn))
    assert [(each["name"], each["available"]["n"], each["workers"]) for each in there] == [("other", 1, 0)]
    *lines, paused = pgqueue("queues", "shop", "--app-dir", str(tmp_path), dsn=dsn).stdout.splitlines()
    assert paused.startswith("PAUSED queue other for ")
    assert [line.split()[0] for line in lines] == ["QUEUE", "other", "default", "mail"]
    assert [line.split()[-1] for line in lines] == ["HERE", "0", "1", "1"]
    assert "PAUSED NOT SERVED" in lines[1]


def test_of_many_jobs_the_number_is_an_estimate(conn: Conn, dsn: str) -> None:
    conn.execute("INSERT INTO pgqueue.job_available (task) SELECT 't' FROM generate_series(1, 10100)")
    conn.commit()
    [task] = items(pgqueue("tasks", "--json", dsn=dsn))
    assert task["jobs"] == {"n": 10001, "exact": False}
