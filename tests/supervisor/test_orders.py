"""What supervisors are told through the database and by systemd, and what they show of themselves."""

from __future__ import annotations

import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import psycopg
import pytest
from commands import COMMAND, items, pgqueue
from supervised import TASKS, deploy, gone, put, supervised
from workers import Eyes, wait_until

from pgqueue.admin import workers
from pgqueue.supervisor import reloader
from pgqueue.supervisor.process_title import supervisor_title, worker_title
from pgqueue.supervisor.systemd import Systemd

HOST = socket.gethostname()
T = TypeVar("T")


# Orders --------------------------------------------------------------------------------------------------------------


@pytest.mark.second
@pytest.mark.promise("S03", "S04", "S06", "S19")
def test_restart_scale_and_quiet_reach_supervisors_through_the_database(tmp_path: Path, dsn: str, eyes: Eyes) -> None:
    with supervised(tmp_path, dsn, processes=2) as one:
        first = one.pids()
        done = pgqueue("restart", "--wait", dsn=dsn)
        assert done.returncode == 0, done.stderr
        assert re.search(rf"supervisor \d+ \({HOST}:{one.pid}\): done", done.stdout)
        wait_until(gone(first))
        assert len(one.pids()) == 2

        one.deploy("raise RuntimeError('broken')")
        done = pgqueue("restart", "--wait", "--host", HOST, dsn=dsn)
        assert done.returncode == 1
        assert "taken back" in done.stderr and "RuntimeError: broken" in done.stderr

        one.deploy(version=2)
        assert pgqueue("scale", "3", "--wait", dsn=dsn).returncode == 0
        assert len(one.pids()) == 3
        assert pgqueue("scale", "1", "--wait", dsn=dsn).returncode == 0
        wait_until(lambda: len(one.pids()) == 1)

        [job] = put(eyes, "held", '{"name": "go"}')
        one.event("began", job=job)
        assert pgqueue("quiet", dsn=dsn).returncode == 0
        wait_until(lambda: eyes.all("SELECT state FROM pgqueue.supervisor") == [("quiet",)])
        (tmp_path / "go").touch()
        assert pgqueue("quiet", "--wait", dsn=dsn).returncode == 0
        assert one.pids() == set() and eyes.state(job) == "completed"
        assert pgqueue("health", dsn=dsn).returncode == 0
        assert pgqueue("health", "--ready", dsn=dsn).returncode == 1
        assert pgqueue("restart", "--wait", dsn=dsn).returncode == 0
        assert len(one.pids()) == 1
        assert pgqueue("health", "--ready", dsn=dsn).returncode == 0
        assert eyes.all("SELECT DISTINCT problem IS NULL FROM pgqueue.supervisor_order WHERE kind <> 'restart'") == [
            (True,)
        ]


@pytest.mark.second
def test_only_those_meant_are_told_and_without_notify_they_look(tmp_path: Path, dsn: str, eyes: Eyes) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    with (
        supervised(first, dsn, "--listen-dsn", "off", processes=1) as one,
        supervised(second, dsn, processes=1) as other,
    ):
        mine, others = one.pids(), other.pids()
        wait_until(lambda: eyes.one("SELECT count(*) FROM pgqueue.supervisor") == 2)
        number = eyes.one("SELECT id FROM pgqueue.supervisor WHERE pid = %s", one.pid)
        assert pgqueue("restart", "--supervisor", str(number), "--wait", dsn=dsn).returncode == 0
        wait_until(gone(mine))
        assert other.pids() == others
        done = pgqueue("restart", "--host", "nowhere", dsn=dsn)
        assert done.returncode == 1 and "no supervisor fits" in done.stderr


def test_whoever_waits_for_a_supervisor_that_is_gone_is_told(dsn: str, conn: psycopg.Connection) -> None:
    sql = "INSERT INTO pgqueue.supervisor (host, pid, size, state) VALUES ('h', 1, 2, 'running') RETURNING id"
    row = conn.execute(sql.encode()).fetchone()
    assert row is not None
    [told] = workers.tell(conn, "scale", size=4, supervisor=row[0])
    assert workers.answers(conn, [told.order]) == [workers.Answer(told.order, False, None, True)]
    conn.execute("UPDATE pgqueue.supervisor SET beat_at = beat_at - interval '2 minutes'")
    assert workers.answers(conn, [told.order]) == [workers.Answer(told.order, False, None, False)]
    assert workers.tell(conn, "quiet") == []


# What is shown -------------------------------------------------------------------------------------------------------


@pytest.mark.second
@pytest.mark.promise("S12")
def test_the_process_list_and_the_table_show_what_runs_where(tmp_path: Path, dsn: str, eyes: Eyes) -> None:
    with supervised(tmp_path, dsn, "--concurrency", "5", "--lease", "4s", "--version-tag", "v7", processes=2) as one:
        jobs = put(eyes, "held", '{"name": "go"}', 3)
        wait_until(lambda: len(one.events("began")) == 3)
        busy = {pid: sum(event["pid"] == pid for event in one.events("began")) for pid in one.pids()}
        titles = {pid: rf"pgqueue: worker [12]/2 \[{number} of 5 busy\]" for pid, number in busy.items()}
        wait_until(lambda: all(re.fullmatch(title, one.titles()[pid]) for pid, title in titles.items()))
        assert {title[:17] for title in one.titles().values()} == {"pgqueue: worker 1", "pgqueue: worker 2"}
        with psycopg.connect(dsn, autocommit=True) as conn:
            wait_until(lambda: {worker.pid: worker.busy for worker in workers.workers(conn)} == busy)
            shown = workers.workers(conn, host=HOST)
            assert workers.workers(conn, host="elsewhere") == []
        assert sorted(job.id for worker in shown for job in worker.jobs) == jobs
        for worker in shown:
            assert (worker.state, worker.version_tag, worker.concurrency) == ("running", "v7", 5)
            assert worker.rss is not None and 10 << 20 < worker.rss < 1 << 30
            assert 0 <= worker.beat_age < 4 and worker.supervisor_id is not None
            assert {job.task for job in worker.jobs} <= {"held"} and all(job.age > 0 for job in worker.jobs)
        screen = pgqueue("workers", dsn=dsn, COLUMNS="200").stdout
        assert all(f"{job} held" in screen for job in jobs) and f"{HOST}:" in screen
        assert len(items(pgqueue("workers", "--json", dsn=dsn))) == 2
        (tmp_path / "go").touch()
        wait_until(eyes.done(3))
        assert eyes.all("SELECT DISTINCT version_tag FROM pgqueue.job_done") == [("v7",)]


def test_titles() -> None:
    assert worker_title(2, 4, 3, 10, "quiet") == "pgqueue: worker 2/4 [3 of 10 busy] quiet"
    assert worker_title(2, 4, 3, 10, "running") == "pgqueue: worker 2/4 [3 of 10 busy]"
    assert worker_title(1, 4, 0, 0, "starting") == "pgqueue: worker 1/4 starting"
    assert supervisor_title(3, 4, "restarting") == "pgqueue: supervisor [3 of 4 active] restarting"


def cost(run: Callable[[], T]) -> tuple[T, float]:
    """What it gives, and the processor time of the processes it started: not of those that others forked for it."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = run()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return done, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.second
def test_health_is_one_quick_look(dsn: str, conn: psycopg.Connection) -> None:
    """The processor time counts here, where others are at work, too: alone it is the time. It depends on them as well:
    what nobody can leave out, click and the driver, is taken beside it."""
    done = pgqueue("health", dsn=dsn)
    assert (done.returncode, done.stderr) == (1, f"no worker of {HOST} has given a sign of life\n")
    done = pgqueue("health", "--json", dsn=dsn)
    assert (done.returncode, items(done)) == (1, [{"host": HOST, "well": False, "ready": False, "read_only": False}])
    add = "INSERT INTO pgqueue.worker (lease, pid, concurrency, host, version_tag, queues, state) VALUES "
    conn.execute((add + "('1 hour', 1, 1, %s, 'v', '{}', 'starting')").encode(), [HOST])
    conn.commit()
    costs, driver = [], []
    environ = os.environ | {"PGQUEUE_DSN": dsn}
    for _ in range(5):
        done, seconds = cost(lambda: subprocess.run([COMMAND, "health"], capture_output=True, text=True, env=environ))
        assert (done.returncode, done.stdout) == (0, "well\n")
        costs.append(seconds)
        _, seconds = cost(lambda: subprocess.run([sys.executable, "-c", "import click, psycopg"], check=True))
        driver.append(seconds)
    print(f"health: {min(costs):.2f} s of processor time, click and the driver alone {min(driver):.2f} s")
    assert 0.0 < min(costs) < max(0.2, 1.4 * min(driver))
    assert pgqueue("health", "--ready", dsn=dsn).returncode == 1
    done = pgqueue("health", "--json", dsn=dsn)
    assert (done.returncode, items(done)) == (0, [{"host": HOST, "well": True, "ready": False, "read_only": False}])
    conn.execute("UPDATE pgqueue.worker SET state = 'running'")
    conn.commit()
    assert pgqueue("health", "--ready", dsn=dsn).stdout == "ready\n"
    assert pgqueue("health", "--host", "elsewhere", dsn=dsn).returncode == 1
    conn.execute("UPDATE pgqueue.worker SET beat_at = beat_at - interval '61 minutes'")
    conn.commit()
    assert pgqueue("health", dsn=dsn).returncode == 1


def modules(code: str, dsn: str = "") -> set[str]:
    """What a process has imported after this."""
    show = "; import sys; print('\\n', *sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code + show], capture_output=True, text=True, env=os.environ | {"PGQUEUE_DSN": dsn}
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split())


def test_health_imports_next_to_nothing(dsn: str) -> None:
    """Its time is that of its imports: those of click and the driver, and a handful of our own words."""
    asked = (
        "from click.testing import CliRunner; from pgqueue.cli import main; assert CliRunner().invoke(main, ['health'])"
    )
    needed = modules("import click.testing, json, psycopg, socket")
    more = modules(f"{asked}.exit_code == 1", dsn) - needed
    ours = "admin admin.health cli cli.commands cli.commands.health cli.database cli.exit_codes cli.groups "
    ours += "cli.json_document cli.options config databases options database database.asking "
    ours += "database.conninfo database.drivers "
    ours += "database.foreign_errors database.notify_queue database.own_adapters "
    ours += "database.alarms database.dead_link database.forks database.primary manual stderr steady_clock "
    ours += "database.statements database.steps database.triggers errors jobs jobs.values plain_text"
    assert {name for name in more if name.startswith("pgqueue.")} == {f"pgqueue.{name}" for name in ours.split()}
    assert {name for name in more if not name.startswith("pgqueue")} <= {"importlib.resources", "urllib.parse"}


def test_health_collects_nothing_and_nobody_else_goes_without() -> None:
    told = "import gc, sys; from pgqueue import __main__; sys.argv[1:] = sys.argv[1:] or ['--help']\n"
    told += "try:\n    __main__.main()\nexcept SystemExit: print(gc.isenabled())"
    for arguments, collects in ((["health", "--help"], "False"), (["status", "--help"], "True"), ([], "True")):
        done = subprocess.run([sys.executable, "-c", told, *arguments], capture_output=True, text=True, timeout=60)
        assert done.stdout.splitlines()[-1] == collects, done.stderr


def test_a_process_imports_nothing_that_it_may_never_use() -> None:
    """In a restart all start beside those that work: what they import is time of theirs."""
    needed = modules(
        "import pgqueue.cli.commands.work, pgqueue.cli.worker_process, pgqueue.cli.logs, pgqueue.supervisor.worker_end"
    )
    assert not needed & {
        "psutil",
        "psycopg_pool",
        "logging.config",
        "sqlalchemy",
        "pydantic",
        "pgqueue.supervisor.supervisor",
    }


# systemd -------------------------------------------------------------------------------------------------------------


class Datagrams:
    """What is sent to a socket as systemd's."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.heard: list[str] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def count(self, text: str) -> int:
        return sum(line.startswith(text) for datagram in list(self.heard) for line in datagram.splitlines())

    def close(self) -> None:
        self._socket.sendto(b"end", str(self.path))
        self._thread.join()
        self._socket.close()

    def _read(self) -> None:
        while (text := self._socket.recv(4096).decode()) != "end":
            self.heard.append(text)


@contextmanager
def datagrams(path: Path) -> Iterator[Datagrams]:
    made = Datagrams(path)
    try:
        yield made
    finally:
        made.close()


@pytest.mark.second
@pytest.mark.promise("S21")
def test_systemd_is_told_of_the_start_a_reload_the_end_and_that_we_live(tmp_path: Path, dsn: str) -> None:
    with datagrams(tmp_path / "notify") as systemd:
        environ = {"NOTIFY_SOCKET": str(systemd.path), "WATCHDOG_USEC": "600000"}
        source = TASKS + "say('environment', names=sorted(os.environ))"
        with supervised(tmp_path, dsn, processes=2, source=source, environ=environ) as one:
            wait_until(lambda: systemd.count("READY=1") == 1)
            assert systemd.count("RELOADING=1") == 0
            wait_until(lambda: systemd.count("WATCHDOG=1") >= 3)
            old = one.pids()
            one.restart(signal.SIGHUP)
            wait_until(lambda: systemd.count("READY=1") == 2)
            assert systemd.count("RELOADING=1") == systemd.count("MONOTONIC_USEC=") == 1
            one.deploy("1 / 0")
            one.signal(signal.SIGHUP)
            wait_until(lambda: systemd.count("READY=1") == 3)  # taken back: what works, works
            assert not old & one.pids() and systemd.count("STOPPING=1") == 0
            assert systemd.count("STATUS=supervisor [2 of 2 active]") >= 2
            one.signal(signal.SIGTERM)
            assert one.worker.ends() == 0
            assert systemd.count("STOPPING=1") == 1
            for event in one.events("environment"):
                assert not {"NOTIFY_SOCKET", "WATCHDOG_USEC"} & set(event["names"])


@pytest.mark.parametrize("abstract", [False, True])
def test_the_socket_of_systemd_may_be_abstract_and_may_be_missing(abstract: bool, tmp_path: Path) -> None:
    Systemd({}).ready()
    Systemd({"NOTIFY_SOCKET": str(tmp_path / "nothing")}).ready()
    name = f"@pgqueue-test-{os.getpid()}" if abstract else str(tmp_path / "socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
        end.bind(f"\0{name[1:]}" if abstract else name)
        systemd = Systemd({"NOTIFY_SOCKET": name, "WATCHDOG_USEC": "4000000", "WATCHDOG_PID": str(os.getpid())})
        assert systemd.every == 2.0
        systemd.alive()
        systemd.alive()  # not due
        systemd.status("one")
        systemd.status("one")
        systemd.stopping()
        assert [end.recv(100) for _ in range(3)] == [b"WATCHDOG=1", b"STATUS=one", b"STOPPING=1"]
    assert Systemd({"NOTIFY_SOCKET": name, "WATCHDOG_USEC": "4000000", "WATCHDOG_PID": "1"}).every is None


@pytest.mark.promise("S21")
def test_the_unit_is_one_that_systemd_takes(tmp_path: Path) -> None:
    (tmp_path / "env").touch()
    options = ["--processes", "4", "--memory-limit", "500M", "--grace", "60s"]
    done = pgqueue("systemd", "shop.tasks", *options, "--environment-file", str(tmp_path / "env"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    unit = done.stdout
    assert re.search(
        r"^ExecStart=/\S+/pgqueue work shop.tasks --processes 4 --memory-limit 500M --grace 60s$", unit, re.M
    )
    for line in ("Type=notify", "ExecReload=/bin/kill -HUP $MAINPID", "KillMode=mixed", "WatchdogSec=30"):
        assert f"\n{line}\n" in unit
    assert "\nTimeoutStopSec=95\n" in unit
    assert pgqueue("systemd", "shop", "--dsn", "postgresql://u:p@h/d").returncode == 2
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze here")
    (tmp_path / "shop.service").write_text(unit)
    checked = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(tmp_path / "shop.service")], capture_output=True, text=True
    )
    assert "shop.service" not in checked.stderr, checked.stderr


# For development -----------------------------------------------------------------------------------------------------


@pytest.mark.second
def test_a_changed_file_restarts(tmp_path: Path, dsn: str, eyes: Eyes) -> None:
    with supervised(tmp_path, dsn, "--reload", processes=1) as one:
        first = one.pids()
        one.deploy(version=2)
        wait_until(gone(first))
        put(eyes, "quick")
        one.event("ran", version=2)
        one.worker.says("shop.py has changed")


def test_what_is_watched(tmp_path: Path) -> None:
    for name in ("shop.py", "app/mail.py", ".hidden/x.py", "app/__pycache__/mail.py", "env/lib/y.py", "notes.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "env" / "pyvenv.cfg").touch()
    found = {str(Path(path).relative_to(tmp_path)) for path in reloader.sources(tmp_path)}
    assert found == {"shop.py", "app/mail.py"}
    deploy(tmp_path)
