"""What every command has in common: help, exit codes, one line for a user's mistake, no password."""

from __future__ import annotations

import json
import subprocess
from datetime import datetime

import click
import psycopg
import pytest
from click.testing import CliRunner
from commands import COMMAND, pgqueue
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from roles import Role, create_role, drop_role, role

import pgqueue as api
from pgqueue import config
from pgqueue.cli import COMMANDS, main
from pgqueue.cli.exit_codes import Refusal, code_of, line_of
from pgqueue.cli.options import Duration, Moment

__all__ = ["role"]

NEED_A_DATABASE = [
    ["migrate"],
    ["enqueue", "t"],
    ["status"],
    ["jobs"],
    ["jobs", "1"],
    ["cancel", "1"],
    ["retry", "1"],
    ["pause", "q"],
    ["resume", "q"],
    ["workers"],
    ["restart"],
    ["quiet"],
    ["scale", "2"],
    ["health"],
    ["prune"],
    ["grants", "r", "--for", "read"],
]
SECRET = "hush-hush"
NOBODY = f"postgresql://someone:{SECRET}@127.0.0.1:1/nowhere"


@pytest.fixture(autouse=True)
def forget_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands run in this process configure it."""
    monkeypatch.setattr(config, "_configured", {})


@pytest.mark.parametrize("arguments", [[], *([name] for name in COMMANDS)], ids=str)
def test_every_help_has_examples_and_fits_a_terminal(arguments: list[str]) -> None:
    result = CliRunner().invoke(main, [*arguments, "--help"], prog_name="pgqueue")
    assert result.exit_code == 0
    assert "Examples:" in result.output
    assert "..." not in result.output.partition("Commands:")[2]
    assert max(map(len, result.output.splitlines())) <= 80


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "demo"])
def test_every_command_takes_the_database_and_the_schema(name: str) -> None:
    command = main.get_command(click.Context(main), name)
    assert command is not None
    options = {option for parameter in command.params for option in parameter.opts}
    assert {"--dsn", "--schema"} <= options
    assert ("--json" in options) == (name not in ("web", "work", "dev"))


def test_help_is_there_without_the_driver() -> None:
    done = pgqueue("--help", PYTHONPROFILEIMPORTTIME="1")
    assert done.returncode == 0
    heavy = ("psycopg", "asyncio", "uvloop", "psycopg_pool", "sqlalchemy", "pgqueue.worker")
    imported = [line.rpartition("|")[2].strip() for line in done.stderr.splitlines()]
    assert not [name for name in imported if name in heavy]


@pytest.mark.parametrize("arguments", [*NEED_A_DATABASE, ["migrate", "--check"]], ids=str)
def test_without_a_database_the_ways_to_name_one(arguments: list[str]) -> None:
    done = pgqueue(*arguments)
    assert done.returncode == 2
    assert "--dsn" in done.stderr and "PGQUEUE_DSN" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("arguments", NEED_A_DATABASE, ids=str)
def test_an_unreachable_database_is_3_and_its_password_stays_secret(arguments: list[str]) -> None:
    done = pgqueue(*arguments, dsn=NOBODY)
    assert done.returncode == 3
    assert "127.0.0.1" in done.stderr and "refused" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert SECRET not in done.stderr + done.stdout


@pytest.mark.parametrize(
    "dsn",
    [
        f"postgresql://someone:{SECRET}%zz@host/db",
        f"mysql://someone:{SECRET}@host/db",
        f"host=x password={SECRET} nonsense",
        f"postgresql://someone:{SECRET}@host/db?nonsense=1",
    ],
)
def test_a_dsn_nobody_can_read_is_2_and_its_password_stays_secret(dsn: str) -> None:
    for done in (pgqueue("status", dsn=dsn), pgqueue("status", "--dsn", dsn)):
        assert done.returncode == 2
        assert SECRET not in done.stderr
        assert "Traceback" not in done.stderr


def test_a_database_that_does_not_exist_is_3(dsn: str) -> None:
    done = pgqueue("status", dsn=dsn.replace("pgqueue_run", "pgqueue_nowhere"))
    assert (done.returncode, "does not exist" in done.stderr) == (3, True)


@pytest.mark.parametrize("arguments", [each for each in NEED_A_DATABASE if each != ["migrate"]], ids=str)
def test_a_database_without_the_schema_is_4(arguments: list[str], empty_dsn: str) -> None:
    done = pgqueue(*arguments, dsn=empty_dsn)
    assert done.returncode == 4
    assert "pgqueue migrate" in done.stderr


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("DELETE FROM pgqueue.migration", "is empty"),
        ("INSERT INTO pgqueue.migration VALUES (9999, 'future', true)", "upgrade pgqueue"),
        ("UPDATE pgqueue.migration SET name = 'initial' WHERE version = 1", "migration 1 is 0001_initial there"),
    ],
)
def test_a_schema_that_does_not_fit_is_4(dsn: str, change: str, says: str) -> None:
    with psycopg.connect(dsn) as conn:
        conn.execute(change.encode())
    done = pgqueue("status", dsn=dsn)
    assert (done.returncode, says in done.stderr) == (4, True), done.stderr


def test_a_role_without_a_right_is_told_the_least_that_the_command_needs(dsn: str) -> None:
    name = create_role(dsn)
    poor = make_conninfo(dsn, user=name, password="secret")
    try:
        for needed, commands in {
            f"`pgqueue grants {name} --for read`": (
                "status",
                "jobs 1",
                "why 1",
                "version",
                "health",
                "audit",
                "doctor",
            ),
            f"`pgqueue grants {name} --for operate`": ("cancel 1", "pause q", "limits set x 1", "restart", "stack 1"),
            f"`pgqueue grants {name} --for enqueue`": ("enqueue t",),
            f"`pgqueue grants {name} --for work`": ("prune",),
            "as the schema's owner": ("migrate", f"grants {name} --for work"),
        }.items():
            for command in commands:
                result = CliRunner().invoke(main, command.split(), env={"PGQUEUE_DSN": poor})
                assert (result.exit_code, needed in result.stderr) == (3, True), (command, result.stderr)
                assert f"role '{name}' may not" in result.stderr and result.stderr.count("\n") == 1, command
                assert "--for work`" not in result.stderr or command == "prune", command
    finally:
        with psycopg.connect(dsn, autocommit=True) as conn:
            drop_role(conn, name)


def test_a_role_that_only_reads_is_told_what_a_change_needs(dsn: str, role: Role) -> None:
    reads = role("read")
    name = conninfo_to_dict(reads)["user"]
    with psycopg.connect(dsn) as conn:
        api.enqueue(conn, "t")
    for command, needed in {
        "cancel 1": "operate",
        "pause q": "operate",
        "restart": "operate",
        "bulk cancel --task t --yes": "operate",
        "schedules add s t --every 1h": "operate",
        "enqueue t": "enqueue",
        "prune --all": "work",
    }.items():
        result = CliRunner().invoke(main, command.split(), env={"PGQUEUE_DSN": reads})
        said = f"role '{name}' may not do this (permission denied for "
        assert (result.exit_code, said in result.stderr) == (3, True), (command, result.stderr)
        assert f"`pgqueue grants {name} --for {needed}`" in result.stderr, (command, result.stderr)
        assert "CONTEXT" not in result.stderr and "LINE" not in result.stderr, command


def test_a_right_that_a_trigger_of_the_application_lacks_is_no_right_of_ours(dsn: str) -> None:
    with psycopg.connect(dsn) as conn:
        conn.execute(
            "CREATE FUNCTION forbids() RETURNS trigger LANGUAGE plpgsql AS "
            "$$ BEGIN RAISE EXCEPTION 'not here' USING ERRCODE = '42501'; END $$"
        )
        conn.execute("CREATE TRIGGER forbids BEFORE INSERT ON pgqueue.job_available EXECUTE FUNCTION forbids()")
    result = CliRunner().invoke(main, ["enqueue", "t"], env={"PGQUEUE_DSN": dsn})
    assert (result.exit_code, "forbids" in result.stderr, "grants" in result.stderr) == (3, True, False), result.stderr


@pytest.mark.parametrize("breaking", [False, True])
def test_a_check_says_whether_a_newer_schema_breaks_this_pgqueue(dsn: str, breaking: bool) -> None:
    with psycopg.connect(dsn) as conn:
        conn.execute("INSERT INTO pgqueue.migration VALUES (9999, 'future', %s)", [breaking])
    result = CliRunner().invoke(main, ["migrate", "--check"], env={"PGQUEUE_DSN": dsn})
    assert (result.exit_code, "1 newer than this pgqueue" in result.stdout) == (0, True)
    assert ("cannot work with" in result.stdout) is breaking


def test_a_newer_schema_that_breaks_nothing_is_fine(dsn: str) -> None:
    with psycopg.connect(dsn) as conn:
        conn.execute("INSERT INTO pgqueue.migration VALUES (9999, 'future', false)")
    assert pgqueue("status", dsn=dsn).returncode == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["status", "--nonsense"],
        ["status", "--schema", "No Schema"],
        ["status", "--dsn", ""],
        ["jobs", "--state", "nonsense"],
        ["jobs", "--limit", "0"],
        ["jobs", "x"],
        ["jobs", "1", "--queue", "q"],
        ["enqueue", "no name"],
        ["enqueue", "t", "nonsense"],
        ["enqueue", "t", "[1]"],
        ["enqueue", "t", '{"x": NaN}'],
        ["enqueue", "t", "--queue", "no queue"],
        ["enqueue", "t", "--priority", "10"],
        ["enqueue", "t", "--delay", "soon"],
        ["enqueue", "t", "--at", "2026-01-01T10:00"],
        ["enqueue", "t", "--delay", "1s", "--at", "2026-01-01T10:00Z"],
        ["migrate", "--check", "--sql"],
        ["grants", "r", "--for", "everything"],
        ["grants", "r"],
        ["work"],
        ["scale"],
        ["scale", "0"],
        ["systemd"],
        ["reschedule", "1", "--at", "9999-12-31T23:59-23:59"],
        ["audit", "--since", "0001-01-01T00:00+00:01"],
        ["audit", "--since", "99999999999999d"],
        ["discard", "--older-than", "99999999d", "--yes"],
    ],
    ids=str,
)
def test_a_mistake_is_2_and_no_traceback(arguments: list[str]) -> None:
    result = CliRunner().invoke(main, arguments, env={"PGQUEUE_DSN": NOBODY})
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)


@pytest.mark.parametrize("command", ["pause", "resume"])
@pytest.mark.parametrize("arguments", [[], ["mail", "--task", "mail.send"]], ids=["neither", "both"])
def test_a_queue_or_a_task_is_asked_for_before_the_database_is(command: str, arguments: list[str]) -> None:
    result = CliRunner().invoke(main, [command, *arguments, "--dsn", NOBODY], prog_name="pgqueue")
    assert result.exit_code == 2 and "give a QUEUE, or --task NAME" in result.output


@pytest.mark.parametrize("arguments", ["jobs x", "cancel 1.5", "why x", "work m -c two", "errors --limit x"])
def test_what_is_no_whole_number_is_called_so(arguments: str) -> None:
    result = CliRunner().invoke(main, arguments.split(), env={"PGQUEUE_DSN": NOBODY})
    assert (result.exit_code, "is not a valid whole number" in result.stderr) == (2, True), result.stderr


@pytest.mark.parametrize("option", ["--queue", "--task"])
def test_a_text_that_is_not_utf8_is_2(option: str, dsn: str) -> None:
    done = pgqueue("bulk", "cancel", "--json", "--yes", option, "caf\udce9", dsn=dsn)
    assert (done.returncode, "Traceback" in done.stderr) == (2, False), done.stderr
    assert json.loads(done.stdout)["error"]["code"] == 2


@pytest.mark.parametrize("arguments", [["--nonsense", "status", "--json"], ["nonsense", "--json"]], ids=str)
def test_a_mistake_before_the_command_has_the_shape_of_json(arguments: list[str]) -> None:
    result = CliRunner().invoke(main, arguments)
    found = json.loads(result.stdout)
    assert (result.exit_code, found["items"], found["error"]["code"]) == (2, [], 2)


def test_without_arguments_the_help_is_as_it_was_written() -> None:
    result = CliRunner().invoke(main, [])
    assert "\nOptions:\n" in result.output and "\nCommands:\n" in result.output


def test_an_id_that_no_sequence_can_give_is_2(dsn: str) -> None:
    for name in ("why", "stack", "jobs"):
        result = CliRunner().invoke(main, [name, str(2**63)], env={"PGQUEUE_DSN": dsn})
        assert result.exit_code == 2, (name, result.output)


def test_a_value_without_end_is_2(dsn: str) -> None:
    for arguments in (
        ["jobs", "--after", "9" * 5_000],
        ["limits", "set", "x", "9" * 5_000],
        ["audit", "--since", "9" * 400],
        ["enqueue", "t", '{"x": ' + "[" * 20_000],
    ):
        result = CliRunner().invoke(main, arguments, env={"PGQUEUE_DSN": dsn})
        assert result.exit_code == 2, (arguments[0], result.output)


def test_a_mistake_that_is_quoted_cannot_control_the_terminal() -> None:
    done = pgqueue("why", "7", "\x1b]0;title\x07")
    assert (done.returncode, "\x1b" in done.stderr, "\x07" in done.stderr) == (2, False, False)


def test_a_reader_that_has_seen_enough_is_no_error(dsn: str) -> None:
    with psycopg.connect(dsn) as conn:
        conn.execute("INSERT INTO pgqueue.job (task) SELECT 'task' || g FROM generate_series(1, 5000) g")
    command = f"set -o pipefail; {COMMAND} jobs --limit 5000 | head -1"
    done = subprocess.run(
        ["bash", "-c", command], env={"PGQUEUE_DSN": dsn, "PATH": "/usr/bin:/bin"}, capture_output=True, text=True
    )
    assert done.stderr == ""
    assert done.returncode == 141


def test_whatever_an_error_quotes_its_passwords_are_removed() -> None:
    assert SECRET not in Refusal(f"cannot use {NOBODY} or host=x password={SECRET}", 3).message


def test_a_pooler_without_prepared_statements_is_named_with_the_setting_for_it() -> None:
    for error in (psycopg.errors.DuplicatePreparedStatement("it exists"), psycopg.errors.InvalidSqlStatementName("no")):
        assert "PGQUEUE_PREPARE=off" in line_of(error)
    assert "PGQUEUE_PREPARE" not in line_of(psycopg.errors.DuplicateTable("it exists"))


def test_the_statement_that_a_server_quotes_stays_out_of_the_line(dsn: str) -> None:
    with psycopg.connect(dsn) as conn, pytest.raises(psycopg.errors.UndefinedColumn) as caught:
        conn.execute("SELECT nothing FROM pgqueue.job")
    assert line_of(caught.value) == 'database unreachable or refused: column "nothing" does not exist'


def test_a_bug_is_no_exit_code_of_ours() -> None:
    assert code_of(ZeroDivisionError()) is None
    assert code_of(psycopg.OperationalError("gone")) == 3
    assert code_of(psycopg.errors.UndefinedTable("pgqueue.job")) == 4


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30s", 30), ("5m", 300), ("2h", 7200), ("1d", 86400), ("250ms", 0.25), ("1.5s", 1.5), ("90", 90), ("0", 0)],
)
def test_durations(text: str, seconds: float) -> None:
    assert Duration().convert(text, None, None) == seconds


@pytest.mark.parametrize("text", ["", "s", "-1s", "1 year", "1e3", "nan"])
def test_no_durations(text: str) -> None:
    with pytest.raises(click.BadParameter, match="30s"):
        Duration().convert(text, None, None)


def test_moments_have_an_offset() -> None:
    assert Moment().convert("2026-12-24T18:00+01:00", None, None) == datetime.fromisoformat("2026-12-24T17:00Z")
    with pytest.raises(click.BadParameter, match="offset"):
        Moment().convert("2026-12-24T18:00", None, None)
