"""`pgqueue work`: the real process, its signals, exit codes, logs and what it says when a module is wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from commands import Worker, items, pgqueue, working
from early import early
from psycopg.conninfo import conninfo_to_dict
from servers import Server, server_home
from starting import StartingServer
from workers import Eyes, apply_ddl, wait_until

from pgqueue.database import migrations

VERSION = migrations.files()[-1].version

TASKS = """
import asyncio, os, pathlib, time
import pgqueue

@pgqueue.task(name="quick", queue="fast")
async def quick(x: int) -> int:
    return x

@pgqueue.task(name="until")
async def until(path: str) -> str:
    pathlib.Path(f"{path}.begun").touch()
    print("started", flush=True)
    while not os.path.exists(path):
        await asyncio.sleep(0.01)
    return "finished"

@pgqueue.task(name="until_cancels")
async def until_cancels(path: str) -> None:
    await until.fn(path)
    [task] = [task for task in asyncio.all_tasks() if task.get_name() == "pgqueue-unblocker"]
    task.cancel()

@pgqueue.task(name="dies_of_no_memory")
async def dies_of_no_memory(path: str) -> None:
    await until.fn(path)
    from pgqueue.database import backoff
    from pgqueue.worker.complete.completer import Completer

    async def flush(*_):
        raise MemoryError

    def described(*_):
        raise MemoryError

    Completer._flush, backoff.described = flush, described

@pgqueue.task(name="until_blocking")
async def until_blocking(path: str) -> str:
    pathlib.Path(f"{path}.begun").touch()
    while not os.path.exists(path):
        time.sleep(0.01)
    return "finished"

@pgqueue.task(name="until_thread")
def until_thread(path: str) -> str:
    pathlib.Path(f"{path}.begun").touch()
    while not os.path.exists(path):
        time.sleep(0.01)
    return "finished"
"""


@pytest.fixture
def app(tmp_path: Path) -> Path:
    (tmp_path / "shop.py").write_text(TASKS)
    return tmp_path


@pytest.fixture
def embedded_app() -> Iterator[Path]:
    """The application in a directory where `embedded:` may have its server."""
    if os.environ.get("PGQUEUE_TEST_DSN"):
        pytest.skip("a server of the tests' own is used")
    with server_home() as home:
        (home / "shop.py").write_text(TASKS)
        yield home


def jobs(conn: psycopg.Connection[Any], state: str) -> int:
    row = conn.execute("SELECT count(*) FROM pgqueue.job WHERE state = %s", [state]).fetchone()
    conn.commit()
    assert row is not None
    return int(row[0])


@contextmanager
def busy(dsn: str, app: Path, task: str = "until", *arguments: str) -> Iterator[tuple[Worker, Path]]:
    """A worker in the middle of a job, which ends when the file is made."""
    file = app / "end"
    with working("shop", *arguments, dsn=dsn, cwd=app) as worker:
        worker.says("ready")
        assert pgqueue("enqueue", task, json.dumps({"path": str(file)}), dsn=dsn).returncode == 0
        wait_until(Path(f"{file}.begun").exists)  # a row that says `running` may not be known to the worker yet
        yield worker, file


# The job -------------------------------------------------------------------------------------------------------------


def test_a_job_enqueued_by_the_command_is_run_by_the_command(
    dsn: str, app: Path, conn: psycopg.Connection[Any]
) -> None:
    with working("shop", dsn=dsn, cwd=app) as worker:
        worker.says("ready")
        id = int(pgqueue("enqueue", "quick", '{"x": 41}', "--queue", "fast", dsn=dsn).stdout)
        wait_until(lambda: jobs(conn, "completed"))
        [shown] = items(pgqueue("jobs", str(id), "--json", dsn=dsn))
        assert (shown["state"], shown["result"], shown["args"]) == ("completed", 41, {"x": 41})
        worker.signal(signal.SIGTERM)
        assert worker.ends() == 0


def test_only_the_queues_asked_for_are_served(dsn: str, app: Path, conn: psycopg.Connection[Any]) -> None:
    with working("shop", "-q", "fast:2,other", "--concurrency", "3", dsn=dsn, cwd=app) as worker:
        worker.says("queues:      fast:2, other")
        worker.says("concurrency: 3")
        pgqueue("enqueue", "until", json.dumps({"path": str(app)}), dsn=dsn)
        pgqueue("enqueue", "quick", '{"x": 1}', "--queue", "fast", dsn=dsn)
        wait_until(lambda: jobs(conn, "completed"))
        assert jobs(conn, "available") == 1
        [status] = items(pgqueue("status", "--json", dsn=dsn))
        assert {queue["name"]: queue["workers"] for queue in status["queues"]} == {"default": 0, "fast": 1, "other": 1}


def test_the_banner_says_where_what_and_how_without_the_password(server: Server, dsn: str, app: Path) -> None:
    with working("shop", dsn=f"{dsn}&password=hush-hush", cwd=app) as worker:
        worker.says("loop:")
        for line in (
            "PostgreSQL",
            f"pgqueue, version {VERSION}",
            "fast, default",
            "quick, until",
            "concurrency: 10",
            "3 idle + 1",
        ):
            worker.says(line)
        assert "hush-hush" not in worker.output
        assert str(conninfo_to_dict(dsn)["dbname"]) in worker.output


@pytest.mark.second
def test_the_banner_counts_the_connections_that_handlers_are_lent(dsn: str, tmp_path: Path) -> None:
    (tmp_path / "lent.py").write_text(
        "import pgqueue\n"
        "@pgqueue.task(name='sync', transactional=True)\ndef sync() -> None: ...\n"
        "@pgqueue.task(name='on_loop', transactional=True)\nasync def on_loop() -> None: ...\n"
    )
    with working("lent", "--concurrency", "7", dsn=dsn, cwd=tmp_path) as worker:
        worker.says("3 idle + 1, and up to 14 for transactional tasks")
    with working("lent", "--concurrency", "7", "--pool-size", "2", dsn=dsn, cwd=tmp_path) as worker:
        worker.says("3 idle + 1, and up to 4 for transactional tasks")
    with working("lent", "--concurrency", "7", "--pool-size", "20", dsn=dsn, cwd=tmp_path) as worker:
        worker.says("3 idle + 1, and up to 14 for transactional tasks")
    assert pgqueue("work", "lent", "--pool-size", "0", dsn=dsn, cwd=tmp_path).returncode == 2


def test_tasks_that_may_keep_a_key_for_ever_are_named_at_the_start(dsn: str, tmp_path: Path) -> None:
    (tmp_path / "keyed.py").write_text(
        "import pgqueue\n"
        "@pgqueue.task(name='endless', lock='one')\ndef endless() -> None: ...\n"
        "@pgqueue.task(name='bounded', lock='one', timeout=60)\ndef bounded() -> None: ...\n"
    )
    with working("keyed", dsn=dsn, cwd=tmp_path) as worker:
        worker.says("tasks with a lock or limit, without a timeout: endless; a job that hangs keeps it")
        worker.says("ready")
        assert worker.output.count("endless; ") == 1


def test_the_help_says_when_a_failed_attempt_is_made_again(app: Path) -> None:
    shown = " ".join(pgqueue("work", "--help", cwd=app).stdout.split())
    assert "min(most, first x factor^(n-1)) seconds, times a random 0.5 to 1" in shown


def test_the_tag_and_the_lease_reach_the_database(dsn: str, app: Path, conn: psycopg.Connection[Any]) -> None:
    with working("shop", "--version-tag", "v7", "--lease", "90s", dsn=dsn, cwd=app) as worker:
        worker.says("ready")
        row = conn.execute("SELECT version_tag, extract(epoch FROM lease) FROM pgqueue.worker").fetchone()
        assert row == ("v7", 90)


@pytest.mark.second
def test_another_schema_is_worked_in_and_enqueued_into(dsn: str, app: Path, conn: psycopg.Connection[Any]) -> None:
    (app / "more.py").write_text(
        "import pgqueue\n"
        "@pgqueue.task(name='parent')\n"
        "def parent() -> None:\n"
        "    with pgqueue.connect() as conn: pgqueue.enqueue(conn, child)\n"
        "@pgqueue.task(name='child')\n"
        "def child() -> None: ...\n"
    )
    assert pgqueue("migrate", "--schema", "jobs", dsn=dsn).returncode == 0
    with working("more", "--schema", "jobs", dsn=dsn, cwd=app) as worker:
        worker.says(f"jobs, version {VERSION}")
        assert pgqueue("enqueue", "parent", "--schema", "jobs", dsn=dsn).returncode == 0
        wait_until(
            lambda: conn.execute("SELECT task FROM jobs.job WHERE task = 'child' AND state = 'completed'").fetchall()
        )


# Signals -------------------------------------------------------------------------------------------------------------


@pytest.mark.each_value
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("task", ["until", "until_thread"])
def test_a_signal_lets_the_running_job_finish(
    dsn: str, app: Path, conn: psycopg.Connection[Any], number: signal.Signals, task: str
) -> None:
    with busy(dsn, app, task) as (worker, file):
        worker.signal(number)
        worker.says(f"{number.name}: no more jobs are taken")
        pgqueue("enqueue", "quick", '{"x": 1}', "--queue", "fast", dsn=dsn)
        file.touch()
        assert worker.ends() == 0
        assert (jobs(conn, "completed"), jobs(conn, "available")) == (1, 1)
        assert conn.execute("SELECT id FROM pgqueue.worker").fetchall() == []


@pytest.mark.promise("F217")
def test_a_service_that_fails_while_the_worker_stops_is_seen_in_the_exit_code(
    dsn: str, app: Path, conn: psycopg.Connection[Any]
) -> None:
    with busy(dsn, app, "until_cancels") as (worker, file):
        worker.signal(signal.SIGTERM)
        worker.says("no more jobs are taken")
        file.touch()
        assert worker.ends() == 1
        assert "pgqueue-unblocker failed for good" in worker.output
        assert jobs(conn, "completed") == 1


@pytest.mark.promise("F217", "F236")
def test_a_process_whose_completer_dies_of_no_memory_ends_soon_with_an_exit_code_that_says_so(
    dsn: str, app: Path
) -> None:
    with busy(dsn, app, "dies_of_no_memory") as (worker, file):
        file.touch()
        worker.says("pgqueue-completer failed for good")
        since = time.monotonic()
        assert worker.ends() == 1
        assert time.monotonic() - since < 5.0


@pytest.mark.parametrize("task", ["until", "until_blocking", "until_thread"])
def test_a_second_signal_leaves_at_once(dsn: str, app: Path, task: str, conn: psycopg.Connection[Any]) -> None:
    with busy(dsn, app, task) as (worker, _):
        worker.signal(signal.SIGTERM)
        if task != "until_blocking":
            worker.says("no more jobs are taken")
        worker.insist(signal.SIGINT)
        assert worker.ends() == 130
        assert "second signal" in worker.output
        assert jobs(conn, "running") == 1  # the lease will give it back


@pytest.mark.second
def test_what_runs_past_the_grace_is_given_back_and_the_exit_code_says_so(
    dsn: str, app: Path, conn: psycopg.Connection[Any]
) -> None:
    with busy(dsn, app, "until", "--grace", "300ms") as (worker, _):
        worker.signal(signal.SIGTERM)
        assert worker.ends() == 5
        worker.says("still running after 0.3 s")
    assert (jobs(conn, "running"), jobs(conn, "available")) == (0, 1)


def test_a_thread_that_cannot_be_stopped_does_not_keep_the_process(dsn: str, app: Path) -> None:
    with busy(dsn, app, "until_thread", "--grace", "100ms") as (worker, _):
        worker.signal(signal.SIGTERM)
        assert worker.ends() == 5
        assert "Traceback" not in worker.output


# What is wrong -------------------------------------------------------------------------------------------------------

PATCHED = """
import sys, types
import shop
patcher = sys.modules["{0}"] = types.ModuleType("{0}")
patcher.{1} = lambda module: module == "socket"
"""


@pytest.mark.parametrize(
    ("module", "source", "says"),
    [
        ("nowhere", None, ["no module 'nowhere' in {app}", "--app-dir"]),
        ("shop.nowhere", None, ["'shop.nowhere'", "'shop' is a module. Write shop"]),
        ("shop.py", None, ["'shop.py'", "'shop' is a module. Write shop"]),
        ("broken", "import pgqueue\n\nraise RuntimeError('no config')\n", ["broken", "no config", "line 3", "{app}"]),
        ("broken", "import not_installed_here\n", ["broken", "not_installed_here", "line 1"]),
        ("broken", "def f(:\n", ["broken", "SyntaxError", "line 1"]),
        ("broken", "raise SystemExit(0)\n", ["broken", "SystemExit"]),
        ("broken", "raise ValueError('postgresql://me:hush-hush@host/db')\n", ["broken", "me:***@host"]),
        ("empty", "", ["no task is declared"]),
        ("patched", PATCHED.format("gevent.monkey", "is_module_patched"), ["gevent.monkey has replaced", "hears no"]),
        ("patched", PATCHED.format("eventlet.patcher", "is_monkey_patched"), ["eventlet.patcher has replaced"]),
        ("app/tasks.py", None, ["'app/tasks.py'", "(app.tasks?)"]),
    ],
)
def test_a_module_that_cannot_be_used_is_2_in_one_line(
    dsn: str, app: Path, module: str, source: str | None, says: list[str]
) -> None:
    if source is not None:
        (app / f"{module}.py").write_text(source)
    done = pgqueue("work", module, dsn=dsn, cwd=app)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "hush-hush" not in done.stderr
    for text in says:
        assert text.format(app=app) in done.stderr


def test_the_app_dir_goes_before_what_is_installed(dsn: str, tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "colorsys.py").write_text("raise RuntimeError('mine')")
    assert "mine" in pgqueue("work", "colorsys", "--app-dir", "src", dsn=dsn, cwd=tmp_path).stderr


def test_without_a_database_the_module_may_name_it(dsn: str, app: Path) -> None:
    assert pgqueue("work", "shop", cwd=app).returncode == 2
    (app / "configured.py").write_text(f"import shop, pgqueue\npgqueue.configure(dsn={dsn!r})")
    with working("configured", dsn=None, cwd=app) as worker:
        worker.says("ready")


def test_the_command_line_wins_over_what_a_module_configures(dsn: str, app: Path) -> None:
    (app / "configured.py").write_text("import shop, pgqueue\npgqueue.configure(dsn='host=127.0.0.1 port=1')")
    with working("configured", "--dsn", dsn, dsn=None, cwd=app) as worker:
        worker.says("ready")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--queues", "no queue"], "no queue"),
        (["--queues", "a:x"], "a:x"),
        (["--concurrency", "0"], "concurrency"),
        (["--lease", "10ms"], "at least 1s"),
        (["--processes", "0"], "processes"),
        (["--memory-limit", "much"], "500M"),
        (["--app-dir", "nowhere"], "nowhere"),
    ],
    ids=str,
)
def test_wrong_options_are_2(dsn: str, app: Path, arguments: list[str], says: str) -> None:
    done = pgqueue("work", "shop", *arguments, dsn=dsn, cwd=app)
    assert (done.returncode, says in done.stderr) == (2, True), done.stderr


def test_a_database_that_is_away_at_the_start_is_3(app: Path) -> None:
    done = pgqueue("work", "shop", dsn="postgresql://a:hush-hush@127.0.0.1:1/x", cwd=app)
    assert (done.returncode, "127.0.0.1" in done.stderr, "hush" in done.stderr) == (3, True, False)
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.promise("F41")
def test_a_worker_that_is_told_to_be_quiet_at_once_leaves_when_it_has_started(dsn: str, app: Path) -> None:
    with working("shop", dsn=dsn, cwd=app, where=early("USR1")) as worker:
        assert worker.ends() == 0, worker.output
        assert "ready" in worker.output


@pytest.mark.promise("F41")
@pytest.mark.parametrize("name", ["HUP", "TERM"])
def test_other_signals_do_to_a_worker_at_once_what_they_do_later_to_a_process(dsn: str, app: Path, name: str) -> None:
    with working("shop", dsn=dsn, cwd=app, where=early(name)) as worker:
        assert worker.ends() == -signal.Signals[f"SIG{name}"]


@pytest.mark.promise("F41")
def test_ctrl_c_while_a_command_imports_is_130_without_a_traceback(dsn: str, app: Path) -> None:
    done = pgqueue("status", dsn=dsn, cwd=app, where=early("INT"))
    assert (done.returncode, done.stderr) == (130, "")


@pytest.mark.promise("F41")
def test_a_server_that_is_starting_up_is_waited_for(dsn: str, app: Path) -> None:
    with StartingServer(dsn) as server, working("shop", dsn=server.dsn, cwd=app) as worker:
        worker.says("starting up")
        wait_until(lambda: server.refused >= 4)  # a try and a look each
        server.opened.set()
        worker.says("ready")
        assert worker.output.count("waiting for the server") == 1
        worker.signal(signal.SIGTERM)
        assert worker.ends() == 0, worker.output


@pytest.mark.promise("F189")
@pytest.mark.parametrize("processes", [[], ["--processes", "2"]], ids=["alone", "supervised"])
def test_a_database_that_is_read_only_is_waited_for(dsn: str, eyes: Eyes, app: Path, processes: list[str]) -> None:
    name = eyes.one("SELECT current_database()")
    eyes.do(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
    with working("shop", *processes, dsn=dsn, cwd=app) as worker:
        worker.says("the database is read only (start)")
        assert eyes.all("SELECT id FROM pgqueue.worker") == []
        eyes.do(f"ALTER DATABASE {name} RESET default_transaction_read_only")
        worker.says("ready")
        worker.signal(signal.SIGTERM)
        assert worker.ends() == 0, worker.output


def test_a_listen_dsn_nobody_can_read_is_2_and_its_password_stays_secret(dsn: str, app: Path) -> None:
    done = pgqueue("work", "shop", "--listen-dsn", "host=x password=hush-hush nonsense", dsn=dsn, cwd=app)
    assert (done.returncode, "hush-hush" in done.stderr) == (2, False)


def test_a_database_without_the_schema_is_4(empty_dsn: str, app: Path) -> None:
    done = pgqueue("work", "shop", dsn=empty_dsn, cwd=app)
    assert (done.returncode, "pgqueue migrate" in done.stderr) == (4, True)


@pytest.mark.second
def test_a_schema_that_goes_away_ends_the_worker_with_4(dsn: str, app: Path) -> None:
    with working("shop", dsn=dsn, cwd=app) as worker:
        worker.says("ready")
        apply_ddl(dsn, "DROP SCHEMA pgqueue CASCADE")
        assert worker.ends() == 4, worker.output
        assert "CRITICAL" in worker.lines[-1] and "lacks pgqueue's tables" in worker.lines[-1]


@pytest.mark.second
@pytest.mark.promise("F06")
def test_a_restart_of_the_database_is_waited_out(own_server: Server, app: Path) -> None:
    dsn = own_server.dsn("postgres")
    assert pgqueue("migrate", dsn=dsn).returncode == 0
    with working("shop", "--lease", "2s", dsn=dsn, cwd=app) as worker:
        worker.says("leads now")
        own_server.stop()
        worker.says("trying again")
        own_server.start()
        with psycopg.connect(dsn) as conn:
            pgqueue("enqueue", "quick", '{"x": 1}', "--queue", "fast", dsn=dsn)
            wait_until(lambda: jobs(conn, "completed"))
        worker.signal(signal.SIGTERM)
        assert worker.ends() == 0, worker.output


# Logs and weight -----------------------------------------------------------------------------------------------------


def test_json_logs_are_one_object_per_line(dsn: str, app: Path, conn: psycopg.Connection[Any]) -> None:
    with working("shop", "--log-format", "json", dsn=dsn, cwd=app) as worker:
        worker.says("leads now")
        worker.signal(signal.SIGTERM)
        assert worker.ends() == 0
    lines = [json.loads(line) for line in worker.lines]
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in lines)
    ready = lines[0]
    assert (ready["queues"], ready["schema_version"], ready["concurrency"]) == (["fast", "default"], VERSION, 10)


@pytest.mark.second
def test_json_logs_stay_json_to_the_last_line(dsn: str, app: Path) -> None:
    with working("shop", "--log-format", "json", dsn=dsn, cwd=app) as worker:
        worker.says("leads now")
        apply_ddl(dsn, "DROP SCHEMA pgqueue CASCADE")
        assert worker.ends() == 4
    assert [json.loads(line)["level"] for line in worker.lines][-1] == "critical"
    with busy_json(dsn, app) as worker:
        worker.insist(signal.SIGTERM)
        assert worker.ends() == 130
    assert "second signal" in [json.loads(line)["message"] for line in worker.lines][-1]


@contextmanager
def busy_json(dsn: str, app: Path) -> Iterator[Worker]:
    assert pgqueue("migrate", dsn=dsn).returncode == 0
    with busy(dsn, app, "until", "--log-format", "json") as (worker, _):
        yield worker


@pytest.mark.second
def test_the_log_level_is_the_one_asked_for(dsn: str, app: Path) -> None:
    with busy(dsn, app, "until", "--log-level", "debug") as (_, file):
        file.touch()
    with working("shop", "--log-level", "error", dsn=dsn, cwd=app) as quiet:
        with psycopg.connect(dsn) as conn:
            wait_until(
                lambda: conn.execute("SELECT FROM pgqueue.worker WHERE pid = %s", [quiet.process.pid]).fetchall()
            )
        quiet.signal(signal.SIGTERM)
        assert quiet.ends() == 0
        assert quiet.lines == []


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_an_idle_worker_is_light(dsn: str, app: Path) -> None:
    with working("shop", dsn=dsn, cwd=app) as worker:
        worker.says("leads now")
        status = Path(f"/proc/{worker.process.pid}/status").read_text()
        kilobytes = int(status.partition("VmRSS:")[2].split()[0])
        assert kilobytes <= 55 * 1024


@pytest.mark.second
def test_embedded_is_a_database_like_any_other(embedded_app: Path) -> None:
    assert pgqueue("migrate", dsn="embedded:", cwd=embedded_app).returncode == 0
    with working("shop", dsn="embedded:", cwd=embedded_app) as worker:
        worker.says("ready")
        added = pgqueue("enqueue", "quick", '{"x": 1}', "--queue", "fast", dsn="embedded:", cwd=embedded_app)
        assert added.returncode == 0, added.stderr
        shown = wait_until(lambda: pgqueue("jobs", "--state", "completed", dsn="embedded:", cwd=embedded_app).stdout)
        assert "quick" in shown
        worker.signal(signal.SIGTERM)
        assert worker.ends() == 0


@pytest.mark.second
@pytest.mark.promise("F439")
def test_a_supervisor_on_embedded_signs_off_before_the_server_stops(embedded_app: Path) -> None:
    assert pgqueue("migrate", dsn="embedded:", cwd=embedded_app).returncode == 0
    with working("shop", "--processes", "2", dsn="embedded:", cwd=embedded_app) as worker:
        worker.says("ready: 2 worker processes")
        worker.signal(signal.SIGTERM)
        assert worker.ends() == 0
    assert "is lost" not in worker.output and "could not sign off" not in worker.output


def test_the_command_needs_no_console_script(dsn: str, app: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pgqueue", "version"], capture_output=True, text=True, env={"PGQUEUE_DSN": dsn}
    )
    assert done.returncode == 0, done.stderr


# Seized up -----------------------------------------------------------------------------------------------------------


@pytest.mark.second
def test_a_process_whose_loop_stands_still_says_where_and_ends_with_a_code_of_its_own(dsn: str, app: Path) -> None:
    with busy(dsn, app, "until_blocking", "--stuck", "1s") as (worker, _):
        assert worker.ends() == 6
        assert "the event loop has not moved for 1 s" in worker.output
        assert "in until_blocking" in worker.output


@pytest.mark.second
@pytest.mark.parametrize("task", ["until", "until_thread"])
def test_a_long_job_is_no_standstill(task: str, dsn: str, app: Path, conn: psycopg.Connection[Any]) -> None:
    with busy(dsn, app, task, "--stuck", "1s") as (worker, file):
        began = time.monotonic()
        wait_until(lambda: time.monotonic() - began > 2.5)
        file.touch()
        wait_until(lambda: jobs(conn, "completed"))
        worker.signal(signal.SIGTERM)
        assert worker.ends() == 0
