"""The page for the night: each symptom is made, and each command of its section is tried as it stands there."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import psycopg
import pytest
from commands import Worker, items, pgqueue, working
from pages import ROOT, anchor, anchors
from psycopg.types.json import Jsonb
from servers import Server
from supervised import put, supervised
from workers import Eyes, wait_until

import pgqueue as api
from pgqueue.admin import doctor
from pgqueue.manual import Symptom, at_night
from pgqueue.pytest_plugin import Databases

PAGE = ROOT / "docs" / "night.md"
TEXT = PAGE.read_text(encoding="utf-8")
SECTIONS = {anchor(head): text for head, text in re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", TEXT, re.M | re.S)}
COMMAND = re.compile(r"(?:^\$ |`)(pgqueue [a-z][^`\n]*)", re.M)

SHOP = """
import os, signal, time
import pgqueue
from pgqueue import Limit, Lock, Rate, RetryPolicy

@pgqueue.task(name="quick")
def quick() -> None: ...

@pgqueue.task(name="bounded", limit=Limit(1, name="warehouse"), timeout=60)
def bounded() -> None: ...

@pgqueue.task(name="paced", rate=Rate("1/h", name="mail.api"))
def paced() -> None: ...

@pgqueue.task(name="keyed", lock=Lock("account:7", hold_on_retry=True), retry=RetryPolicy(first=3600), timeout=60)
def keyed(fails: bool) -> None:
    if fails:
        raise ConnectionError("the bank does not answer")

@pgqueue.task(name="charge", retry=1)
def charge() -> None:
    if not os.path.exists("mended"):
        raise ConnectionError("the bank does not answer")

@pgqueue.task(name="again", retry=RetryPolicy(first=3600))
def again() -> None:
    if not os.path.exists("mended"):
        raise ConnectionError("the bank does not answer")

@pgqueue.task(name="long")
def long() -> None:
    while not os.path.exists("long-may-end"):
        time.sleep(0.01)

@pgqueue.task(name="kills", retry=RetryPolicy(first=0.1))
def kills() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
"""


class Section:
    """One section of the page. Only commands that stand there are run, and at the end each of them was."""

    def __init__(self, symptom: Symptom, dsn: str) -> None:
        self._text = SECTIONS[symptom]
        self._commands = set(COMMAND.findall(self._text))
        self._tried: set[str] = set()
        self._dsn = dsn

    def run(self, command: str, *more: str, dsn: str | None = None, **values: Any) -> CompletedProcess[str]:
        """Run a command of the section, with these values in place of the words in capital letters."""
        return pgqueue(*self._words(command, values), *more, dsn=dsn or self._dsn)

    def does(self, command: str, **values: Any) -> str:
        """`run`, and the exit code is 0; what it printed."""
        done = self.run(command, **values)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def why(self, job: int, code: str) -> str:
        """Ask why until the first code is this one, which stands in the section; what the command printed."""
        assert f"`{code}`" in "".join(self._rows()), code

        def says() -> str:
            said = self.does("pgqueue why ID", ID=job)
            return said if f"\n{code}: " in said else ""

        return wait_until(says, 60.0)

    @contextmanager
    def work(self, command: str, cwd: Path, *more: str, **values: Any) -> Iterator[Worker]:
        with working(*self._words(command, values)[1:], *more, dsn=self._dsn, cwd=cwd) as worker:
            worker.says("ready")
            yield worker

    def whole(self, *, elsewhere: tuple[str, ...] = ()) -> None:
        """Each command of the section was tried; those of `elsewhere` by the test of another section."""
        others = [set(COMMAND.findall(text)) for text in SECTIONS.values()]
        assert all(sum(each in other for other in others) > 1 for each in elsewhere)
        assert self._commands - self._tried == set(elsewhere)

    def _rows(self) -> list[str]:
        return [row for row in self._text.splitlines() if row.startswith("| `")]

    def _words(self, command: str, values: dict[str, Any]) -> list[str]:
        assert command in self._commands, f"{command} does not stand in this section"
        self._tried.add(command)
        words = [str(values.get(word, word)) for word in shlex.split(command)[1:]]
        assert not [word for word in words if word.isupper()], words
        return words


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    (tmp_path / "shop.py").write_text(SHOP)
    return tmp_path


def completed(eyes: Eyes, job: int) -> None:
    wait_until(eyes.is_in(job, "completed"), 60.0)


# The page ------------------------------------------------------------------------------------------------------------


@pytest.mark.promise("F350")
def test_each_symptom_has_its_section_and_each_section_its_symptom() -> None:
    assert set(SECTIONS) == {symptom.value for symptom in Symptom}
    first = TEXT.split("\n## ", 1)[0]
    assert [each for each in SECTIONS if f"](#{each})" not in first] == []
    assert at_night(Symptom.DISK) == "docs/night.md#the-disk-fills" and Symptom.DISK in anchors(PAGE)


# Each symptom --------------------------------------------------------------------------------------------------------


@pytest.mark.second
@pytest.mark.promise("F349")
def test_the_queue_stands_still(shop: Path, dsn: str, eyes: Eyes) -> None:
    night = Section(Symptom.STANDS_STILL, dsn)
    [job] = put(eyes, "quick")
    night.why(job, "no_worker")
    assert f"{job}" in night.does("pgqueue jobs --state available --state blocked --limit 5")
    night.run("pgqueue doctor")
    with night.work("pgqueue work MODULE -q QUEUE", shop, MODULE="shop", QUEUE="default"):
        completed(eyes, job)
        assert pgqueue("pause", "default", "--actor", "ann", dsn=dsn).returncode == 0
        [job] = put(eyes, "quick")
        night.why(job, "queue_paused")
        assert "ann" in night.does("pgqueue audit --action pause")
        night.does("pgqueue resume QUEUE", QUEUE="default")
        completed(eyes, job)

        assert pgqueue("pause", "--task", "quick", dsn=dsn).returncode == 0
        [job] = put(eyes, "quick")
        night.why(job, "task_paused")
        night.does("pgqueue resume --task NAME", NAME="quick")
        completed(eyes, job)

        [job] = put(eyes, "not.deployed")
        night.why(job, "unknown_task")
        assert "not.deployed" in night.does("pgqueue tasks")

        assert pgqueue("limits", "set", "warehouse", "0", dsn=dsn).returncode == 0
        job = enqueue(dsn, "bounded", limit="warehouse")
        night.why(job, "limit")
        night.does("pgqueue limits set NAME N", NAME="warehouse", N=2)
        completed(eyes, job)

        completed(eyes, enqueue(dsn, "paced", rate="mail.api"))
        job = enqueue(dsn, "paced", rate="mail.api")
        night.why(job, "rate")
        night.does("pgqueue limits set NAME 200/minute", NAME="mail.api")
        completed(eyes, job)

        first = enqueue(dsn, "keyed", {"fails": True}, lock="account:7")
        wait_until(eyes.is_in(first, "scheduled"), 60.0)
        job = enqueue(dsn, "keyed", {"fails": False}, lock="account:7")
        assert str(first) in night.why(job, "lock")
        night.does("pgqueue locks release KEY --yes", KEY="account:7")
        completed(eyes, job)
    night.whole(elsewhere=("pgqueue restart --wait",))


def enqueue(dsn: str, task: str, args: dict[str, Any] | None = None, **keys: str) -> int:
    """Enqueue by SQL, as an application without the task's code does; the job's id."""
    named = "".join(f", {kind}_key => %({kind})s" for kind in keys)
    with psycopg.connect(dsn) as conn:
        row = conn.execute(
            f"SELECT pgqueue.enqueue(%(task)s, %(args)s{named})".encode(),
            {"task": task, "args": Jsonb(args or {}), **keys},
        ).fetchone()
    assert row is not None
    return int(row[0])


@pytest.mark.second
@pytest.mark.promise("F349")
def test_jobs_start_late(tmp_path: Path, dsn: str, eyes: Eyes) -> None:
    night = Section(Symptom.STARTS_LATE, dsn)
    with supervised(tmp_path, dsn, "-c", "1", processes=1) as one:
        [long] = put(eyes, "held", '{"name": "go"}')
        one.event("began", job=long)
        late, behind = put(eyes, "quick"), put(eyes, "quick")
        night.why(late[0], "slots_busy")
        night.why(behind[0], "behind")
        assert "default" in night.does("pgqueue queues")
        night.does("pgqueue history --by task")
        assert pgqueue("pause", "--task", "quick", dsn=dsn).returncode == 0
        night.does("pgqueue resume --task NAME", NAME="quick")
        night.does("pgqueue pause --task NAME", NAME="held")
        night.does("pgqueue resume --task NAME", NAME="held")
        night.does("pgqueue scale N --wait", N=2)
        completed(eyes, late[0])
        completed(eyes, behind[0])
        assert eyes.state(long) == "running"
        (tmp_path / "go").touch()
        completed(eyes, long)
    night.whole()


@pytest.mark.second
@pytest.mark.promise("F349")
def test_many_jobs_fail(shop: Path, dsn: str, eyes: Eyes) -> None:
    night = Section(Symptom.FAILS, dsn)
    with working("shop", dsn=dsn, cwd=shop):
        jobs = [put(eyes, "charge")[0] for _ in range(3)]
        [waits] = put(eyes, "again")
        for job in jobs:
            wait_until(eyes.is_in(job, "failed"), 60.0)
        wait_until(eyes.is_in(waits, "scheduled"), 60.0)
        assert "charge" in night.does("pgqueue jobs --state failed --state retrying")
        night.does("pgqueue errors")
        assert "ConnectionError: the bank does not answer" in night.does("pgqueue jobs ID", ID=jobs[0])
        night.does("pgqueue pause --task NAME", NAME="charge")
        (shop / "mended").touch()
        night.does("pgqueue resume --task NAME", NAME="charge")
        night.does("pgqueue bulk retry --task NAME --error-type CLASS --yes", NAME="charge", CLASS="ConnectionError")
        night.does("pgqueue reschedule ID --now", ID=waits)
        for job in [*jobs, waits]:
            completed(eyes, job)
    night.whole()


@pytest.mark.second
@pytest.mark.promise("F349")
def test_a_job_runs_for_hours(shop: Path, dsn: str, eyes: Eyes) -> None:
    night = Section(Symptom.RUNS_LONG, dsn)
    with working("shop", dsn=dsn, cwd=shop):
        [job] = put(eyes, "long")
        wait_until(eyes.is_in(job, "running"), 60.0)
        night.why(job, "running")
        assert ", in long" in night.does("pgqueue stack ID", ID=job)
        wait_until(lambda: str(job) in night.does("pgqueue workers"), 60.0)  # as of the worker's next heartbeat
        night.does("pgqueue cancel ID", ID=job)
        wait_until(eyes.is_in(job, "cancelled"), 60.0)
        (shop / "long-may-end").touch()
        night.does("pgqueue retry ID", ID=job)
        completed(eyes, job)
    night.whole()


@pytest.mark.second
@pytest.mark.promise("F349")
def test_the_disk_fills(dsn: str, eyes: Eyes, monkeypatch: pytest.MonkeyPatch) -> None:
    night = Section(Symptom.DISK, dsn)
    eyes.do(
        "INSERT INTO pgqueue.job_done (id, task, state, finished_at) SELECT g, 't', 'completed', now() "
        "FROM generate_series(1, 10000) g"
    )
    large, shorter = re.findall(r"```sql\n(.*?)```", SECTIONS[Symptom.DISK], re.S)
    [(name, size), *_] = eyes.all(large)
    assert "job_done" in name and re.fullmatch(r"\d{4,} kB", size)
    eyes.do(shorter)
    with psycopg.connect(dsn, application_name="report") as conn:
        conn.execute("SELECT pg_current_xact_id()")
        monkeypatch.setattr(doctor, "OLD_SECONDS", 0.0)
        with psycopg.connect(dsn, autocommit=True) as looking:
            found = [each for each in api.doctor(looking).findings if "(report, " in each.what]
        assert [(each.name, each.page) for each in found] == [("snapshot", at_night(Symptom.DISK))]
        [end] = re.findall(r"SELECT pg_terminate_backend\(\d+\)", found[0].todo)
        assert eyes.one(end)
        with pytest.raises(psycopg.OperationalError):
            conn.execute("SELECT 1")
    night.run("pgqueue doctor")
    before = eyes.one("SELECT count(*) FROM pgqueue.job_done")
    for _ in range(eyes.one("SELECT leaves FROM pgqueue.ring WHERE kind = 'done'")):
        night.does("pgqueue prune --all")
    assert (before, eyes.one("SELECT count(*) FROM pgqueue.job_done")) == (10000, 0)
    night.whole()


@pytest.mark.second
@pytest.mark.promise("F349")
def test_workers_restart(shop: Path, dsn: str, eyes: Eyes) -> None:
    night = Section(Symptom.WORKERS_RESTART, dsn)
    with supervised(shop, dsn, "--lease", "2s", processes=1, source=SHOP.split("import pgqueue\n", 1)[1]):
        [job] = put(eyes, "kills")
        wait_until(eyes.is_in(job, "failed"), 110.0)
    assert f"{job}" in night.does("pgqueue jobs --error-type crashed")
    night.does("pgqueue jobs --error-type memory")
    night.does("pgqueue pause --task NAME", NAME="kills")
    [other] = put(eyes, "quick")
    with night.work("pgqueue work MODULE -c N", shop, MODULE="shop", N=2):
        completed(eyes, other)
    with working("not_there", dsn=dsn, cwd=shop) as worker:
        assert worker.ends() == 2 and "not_there" in worker.output
    eyes.do("DROP SCHEMA pgqueue CASCADE")
    with working("shop", dsn=dsn, cwd=shop) as worker:
        assert worker.ends() == 4
    night.does("pgqueue migrate")
    with working("shop", dsn=dsn, cwd=shop) as worker:
        worker.says("ready")
    night.whole()


@pytest.mark.second
@pytest.mark.promise("F349")
def test_a_deploy_hangs(tmp_path: Path, dsn: str, eyes: Eyes) -> None:
    night = Section(Symptom.DEPLOY, dsn)
    with supervised(tmp_path, dsn, processes=1) as one:
        [held] = put(eyes, "held", '{"name": "never"}')
        one.event("began", job=held)
        one.deploy("raise RuntimeError('broken')")
        refused = night.run("pgqueue restart --wait")
        assert refused.returncode == 1 and "RuntimeError: broken" in refused.stderr
        assert at_night(Symptom.DEPLOY) in refused.stderr
        one.deploy(version=2)
        night.does("pgqueue restart --wait")
        shown = night.does("pgqueue workers")
        assert "quiet" in shown and str(held) in shown
        [job] = put(eyes, "quick")
        completed(eyes, job)
        assert eyes.state(held) == "running" and len(one.pids()) == 2
        night.does("pgqueue cancel ID", ID=held)
        wait_until(lambda: len(one.pids()) == 1)
        night.run("pgqueue doctor")
        night.does("pgqueue migrate")
    night.whole()


@pytest.mark.second
@pytest.mark.promise("F349")
def test_the_database_failed_over(shop: Path, own_server: Server) -> None:
    dsn = own_server.dsn("postgres")
    night = Section(Symptom.FAILED_OVER, dsn)
    assert pgqueue("migrate", dsn=dsn).returncode == 0
    with working("shop", dsn=dsn, cwd=shop) as worker:
        worker.says("ready")
        own_server.restart()
        assert at_night(Symptom.FAILED_OVER) in worker.says("the database is lost")
        worker.says("the database is back")
        eyes = Eyes(dsn)
        [job] = put(eyes, "quick")
        completed(eyes, job)
        wait_until(lambda: night.run("pgqueue health --ready").returncode == 0, 60.0)
    eyes.do("SELECT setval('pgqueue.job_id_seq', 1, false)")
    assert "CRITICAL sequences: " in night.run("pgqueue doctor").stdout
    advanced = night.run("pgqueue migrate")
    assert advanced.returncode == 0 and "job_id_seq" in advanced.stdout + advanced.stderr
    assert "CRITICAL sequences: " not in night.run("pgqueue doctor").stdout
    [lift] = re.findall(r"`(ALTER DATABASE [^`]*)`", SECTIONS[Symptom.FAILED_OVER])
    eyes.do("ALTER DATABASE postgres SET default_transaction_read_only = on")
    assert "CRITICAL read_only: " in night.run("pgqueue doctor").stdout
    eyes.do(lift.replace("DATABASE shop", "DATABASE postgres"))
    assert "CRITICAL read_only: " not in night.run("pgqueue doctor").stdout
    eyes.close()
    night.whole()


@pytest.mark.second
@pytest.mark.promise("F349")
def test_the_wrong_job_was_deleted(dsn: str, pgqueue_databases: Databases, eyes: Eyes) -> None:
    night = Section(Symptom.WRONG_JOB, dsn)
    [job] = put(eyes, "quick")
    assert pgqueue("cancel", str(job), "--actor", "ann", dsn=dsn).returncode == 0
    said = night.does("pgqueue audit --limit 5")
    assert "ann" in said and "cancel" in said
    night.does("pgqueue retry ID", ID=job)
    assert eyes.state(job) == "available"

    assert pgqueue("bulk", "cancel", "--task", "quick", "--yes", dsn=dsn).returncode == 0
    operation = eyes.one("SELECT max(id) FROM pgqueue.bulk")
    assert "1 cancelled" in night.does("pgqueue bulk show N", N=operation)
    assert night.run("pgqueue bulk stop N", N=operation).returncode == 1  # it is over
    night.does("pgqueue bulk retry --state cancelled --task NAME --yes", NAME="quick")
    assert eyes.state(job) == "available"

    assert pgqueue("pause", "default", dsn=dsn).returncode == 0
    night.does("pgqueue resume QUEUE", QUEUE="default")

    [job] = put(eyes, "charge", '{"order": 7}')
    assert pgqueue("cancel", str(job), dsn=dsn).returncode == 0
    name = eyes.conn.info.dbname
    eyes.close()  # a database is copied while no session is in it
    with pgqueue_databases.copy(name) as backup:
        assert pgqueue("discard", str(job), dsn=dsn).returncode == 0
        gone = night.run("pgqueue why ID", ID=job)
        assert gone.returncode == 1 and "\ngone: " in gone.stdout
        [found] = items(night.run("pgqueue jobs ID --json", dsn=backup, ID=job))
    new = int(night.does("pgqueue enqueue NAME ARGS", NAME=found["task"], ARGS=json.dumps(found["args"])))
    assert new > job
    [again] = items(night.run("pgqueue jobs ID --json", ID=new))
    assert (again["task"], again["args"], again["state"]) == ("charge", {"order": 7}, "available")
    night.whole()
