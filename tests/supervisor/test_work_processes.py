"""The supervisor with real processes: N of them through restarts, crashes and another number; nothing is lost or run
twice."""

from __future__ import annotations

import os
import signal
import socketserver
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic

import psycopg
import pytest
from supervised import TASKS, Flow, Sampler, Supervised, gone, put, supervised
from workers import Eyes, wait_until

from pgqueue.supervisor.recycling import Terms
from pgqueue.supervisor.supervisor import LOOK_SECONDS

RESTARTED = "the restart is through"


def runs(one: Supervised, name: str = "ran") -> Counter[int]:
    """How often each job ran."""
    return Counter(event["job"] for event in one.events(name))


@pytest.mark.second
@pytest.mark.promise("S01", "S02", "S04", "S05", "S08", "S09", "S18")
def test_restarts_keep_n_active_finish_what_runs_and_run_nothing_twice(tmp_path: Path, dsn: str, eyes: Eyes) -> None:
    """Three restarts under steady flow, with jobs that outlast all of them; each deploys other code."""
    with supervised(tmp_path, dsn, processes=2) as one:
        first = one.pids()
        long_ones = put(eyes, "held", '{"name": "go"}') + put(eyes, "held_thread", '{"name": "go"}')
        for job in long_ones:
            one.event("began", job=job)
        busy = {event["pid"] for event in one.events("began")}
        with Sampler(dsn) as sampler, Flow(dsn, 100) as flow:
            for version in (2, 3, 4):
                one.deploy(version=version)
                one.restart(signal.SIGHUP)
                one.event("ran", version=version)
        assert sampler.least >= 2, sampler.samples
        assert sampler.most <= 4
        assert one.counts(RESTARTED) == 3
        assert busy <= one.pids() and not (first - busy) & one.pids(), "the busy ones stay, and no other"
        assert {title.rsplit("] ")[-1] for pid, title in one.titles().items() if pid in busy} == {"quiet"}
        (tmp_path / "go").touch()
        wait_until(gone(busy))
        wait_until(eyes.done(flow.enqueued + 2))
        assert set(runs(one).values()) == {1} and len(runs(one)) == flow.enqueued
        assert runs(one, "began") == Counter(long_ones)
        assert {event["version"] for event in one.events("ended")} == {1}
        wait_until(lambda: len(one.pids()) == 2)  # a restart is through when the old ones are quiet: the last leave yet
        assert one.counts("SIGTERM") == 0, "a process was signalled"
        one.signal(signal.SIGTERM)
        assert one.worker.ends() == 0
        assert one.counts("is killed") == one.counts("is ended before") == 0
    assert eyes.all("SELECT id FROM pgqueue.worker UNION ALL SELECT id FROM pgqueue.supervisor") == []
    assert eyes.one("SELECT count(*) FROM pgqueue.attempt") == 0


@pytest.mark.promise("S01")
def test_files_of_the_project_hide_no_module_of_the_processes(tmp_path: Path, dsn: str, eyes: Eyes) -> None:
    """As they hide none of a single worker. Each process ended with 1."""
    for name in ("types", "signal", "logging", "pgqueue"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a file of the project')\n")
    with supervised(tmp_path, dsn, processes=1) as one:
        put(eyes, "quick")
        one.event("ran")


@pytest.mark.second
@pytest.mark.promise("S05", "S06")
def test_what_is_claimed_after_the_old_ones_are_quiet_runs_the_new_code(tmp_path: Path, dsn: str, eyes: Eyes) -> None:
    with supervised(tmp_path, dsn, "--version-tag", "v", processes=2) as one, Flow(dsn, 200):
        old = [worker for (worker,) in eyes.all("SELECT id FROM pgqueue.worker")]
        one.deploy(version=2)
        one.signal(signal.SIGHUP)
        quiet = "SELECT count(*) FROM pgqueue.worker WHERE id = ANY(%s) AND state = 'running'"
        wait_until(lambda: one.counts(RESTARTED) and eyes.one(quiet, old) == 0)
        at = eyes.one("SELECT pgqueue.now()")
        wait_until(lambda: eyes.one("SELECT count(*) FROM pgqueue.job_done WHERE started_at > %s", at) > 100)
        versions = eyes.all("SELECT DISTINCT result::text, version_tag FROM pgqueue.job_done WHERE started_at > %s", at)
        assert versions == [("2", "v")]


@pytest.mark.second
@pytest.mark.promise("S19")
def test_code_that_does_not_start_leaves_the_old_ones_working(tmp_path: Path, dsn: str, eyes: Eyes) -> None:
    with supervised(tmp_path, dsn, processes=2) as one, Sampler(dsn) as sampler, Flow(dsn, 50) as flow:
        old = one.pids()
        for broken, says in [
            ("import no_such_module", "'no_such_module'"),
            ("1 / 0", "ZeroDivisionError"),
            ("def", "SyntaxError"),
        ]:
            one.deploy(broken)
            before = one.counts("the restart is taken back")
            one.signal(signal.SIGHUP)
            one.says_again("the restart is taken back", before)
            [*_, said] = [line for line in one.worker.lines if "the restart is taken back" in line]
            assert "exit code 2 before it had announced itself" in said and says in said
            wait_until(lambda: one.pids() == old)
        one.deploy(version=2)
        one.restart(signal.SIGHUP)
        wait_until(gone(old))
        wait_until(lambda: one.events("ran", version=2))
    assert sampler.least >= 2
    assert flow.enqueued > 0 and eyes.one("SELECT count(*) FROM pgqueue.attempt") == 0


@pytest.mark.second
@pytest.mark.promise("S19")
def test_one_of_several_that_does_not_start_takes_the_others_with_it(tmp_path: Path, dsn: str, eyes: Eyes) -> None:
    """The second of the new ones fails. The first had announced itself, and has taken no job."""
    fails = TASKS + "\n".join(
        [
            "number = len(list(HERE.glob('start.*')))",
            "(HERE / f'start.{os.getpid()}').touch()",
            "if number == 1: raise RuntimeError('the second one')",
        ]
    )
    with supervised(tmp_path, dsn, processes=3) as one, Flow(dsn, 100):
        old = one.pids()
        one.deploy(fails, version=2)
        one.signal(signal.SIGHUP)
        assert "the second one" in one.worker.says("the restart is taken back")
        wait_until(lambda: one.pids() == old)
        assert one.events("ran", version=2) == []


COUNTS = """
import gc

@pgqueue.task(name="counts")
async def counts() -> None:
    say("counted", frozen=gc.get_freeze_count(), on=gc.isenabled())
"""


@pytest.mark.second
def test_what_a_process_has_imported_is_not_collected_again(tmp_path: Path, dsn: str, eyes: Eyes) -> None:
    with supervised(tmp_path, dsn, processes=1, source=TASKS + COUNTS) as one:
        put(eyes, "counts")
        counted = one.event("counted")
    assert counted["frozen"] > 20_000 and counted["on"]


SECOND_WAITS = """
if VERSION == 2:
    try:
        (HERE / "first").touch(exist_ok=False)
    except FileExistsError:
        while not (HERE / "go on").exists():
            time.sleep(0.01)
"""


@pytest.mark.second
def test_a_new_process_is_warm_before_it_is_let_work(tmp_path: Path, dsn: str, eyes: Eyes) -> None:
    """The first of the new ones has its connections for jobs while it waits for the second, and takes none."""
    since = "SELECT count(DISTINCT application_name) FROM pg_stat_activity WHERE datname = current_database() "
    since += "AND application_name IN ('pgqueue fetch', 'pgqueue complete') AND backend_start > %s::timestamptz"
    with supervised(tmp_path, dsn, processes=2) as one:
        moment = eyes.one("SELECT clock_timestamp()::text")
        one.deploy(TASKS + SECOND_WAITS, version=2)
        one.signal(signal.SIGHUP)
        wait_until(lambda: eyes.one(since, moment) == 2)
        put(eyes, "quick", number=20)
        wait_until(eyes.done(20))
        assert {event["version"] for event in one.events("ran")} == {1}
        (tmp_path / "go on").touch()
        one.says_again(RESTARTED, 0)


@pytest.mark.second
@pytest.mark.promise("S20")
def test_three_quick_restarts_leave_n_of_the_newest(tmp_path: Path, dsn: str, eyes: Eyes) -> None:
    with supervised(tmp_path, dsn, processes=2) as one, Sampler(dsn) as sampler:
        old = one.pids()
        [job] = put(eyes, "held", '{"name": "go"}')
        busy = one.event("began", job=job)["pid"]
        for version in (2, 3, 4):
            one.deploy(version=version)
            before = one.counts("rolling restart")
            one.signal(signal.SIGHUP)
            one.says_again("rolling restart", before)
        one.says_again(RESTARTED, 0)
        wait_until(lambda: one.pids() & old == {busy} and len(one.pids()) == 3)
        put(eyes, "quick", number=20)
        wait_until(lambda: len(one.events("ran")) == 20)
        assert {event["version"] for event in one.events("ran")} == {4}
        (tmp_path / "go").touch()
        wait_until(gone({busy}))
        assert runs(one, "began") == Counter([job])
    assert sampler.least >= 2


@pytest.mark.second
@pytest.mark.promise("S17")
def test_the_killed_are_replaced_and_their_jobs_run_again_at_once(
    tmp_path: Path, dsn: str, eyes: Eyes, conn: psycopg.Connection
) -> None:
    """Not after the lease, which is a minute; also with 100,000 waiting in the same lane."""
    with supervised(tmp_path, dsn, "--lease", "60s", "--version-tag", "v3", processes=3) as one:
        [job] = put(eyes, "held", '{"name": "go"}')
        victim = one.event("began", job=job)["pid"]
        conn.execute("INSERT INTO pgqueue.job (task) SELECT 'short' FROM generate_series(1, 100000)")
        conn.commit()
        wait_until(lambda: len(one.events("ran")) > 50)
        began, others = monotonic(), one.pids() - {victim}
        second = next(iter(others))
        os.kill(victim, signal.SIGKILL)
        os.kill(second, signal.SIGKILL)
        wait_until(lambda: len(one.events("began", job=job)) == 2)
        took = one.events("began", job=job)[1]["at"] - began
        print(f"again after {took:.2f} s")
        assert took < 30.0
        wait_until(lambda: len(one.pids()) == 3)
        ready = "SELECT count(*) FROM pgqueue.worker WHERE state = 'running' AND dead_at IS NULL"
        wait_until(lambda: eyes.one(ready) == 3)
        assert eyes.one("SELECT count(*) FROM pgqueue.worker WHERE dead_at IS NOT NULL") == 2
        assert one.events("began", job=job)[1]["crashes"] == 1
        crashed = "SELECT outcome, version_tag FROM pgqueue.attempt WHERE job_id = %s"
        assert eyes.all(crashed, job) == [("crashed", "v3")]


@pytest.mark.second
@pytest.mark.promise("S03")
def test_another_number_of_processes_by_signal(tmp_path: Path, dsn: str, eyes: Eyes) -> None:
    with supervised(tmp_path, dsn, processes=1) as one:
        put(eyes, "held", '{"name": "go"}')
        busy = one.event("began")["pid"]
        one.signal(signal.SIGTTIN)
        wait_until(lambda: len(one.pids()) == 2)
        wait_until(lambda: any("worker 2/2" in title for title in one.titles().values()))
        one.worker.says("2 of 2 are active")
        one.signal(signal.SIGTTOU)
        wait_until(lambda: one.pids() == {busy})
        one.signal(signal.SIGTTOU)  # at least one
        (tmp_path / "go").touch()
        wait_until(eyes.done(1))
        assert one.pids() == {busy}


@pytest.mark.second
@pytest.mark.promise("S06", "S17")
def test_a_process_that_somebody_else_quiets_is_replaced(tmp_path: Path, dsn: str, eyes: Eyes) -> None:
    with supervised(tmp_path, dsn, processes=1) as one:
        [job] = put(eyes, "held", '{"name": "go"}')
        busy = one.event("began", job=job)["pid"]
        os.kill(busy, signal.SIGUSR1)
        wait_until(lambda: len(one.pids()) == 2)
        one.says_again("1 of 1 are active", 1)
        put(eyes, "quick")
        assert one.event("ran")["pid"] != busy
        (tmp_path / "go").touch()
        wait_until(gone({busy}))
        assert eyes.state(job) == "completed" and len(one.pids()) == 1


@pytest.mark.second
@pytest.mark.promise("S06", "S07")
def test_quiet_finishes_what_runs_and_takes_no_more(tmp_path: Path, dsn: str, eyes: Eyes) -> None:
    with supervised(tmp_path, dsn, processes=2) as one, Flow(dsn, 100):
        [job] = put(eyes, "held", '{"name": "go"}')
        busy = one.event("began", job=job)["pid"]
        wait_until(lambda: len(one.events("ran")) > 20)
        one.signal(signal.SIGUSR1)
        wait_until(lambda: one.pids() == {busy})
        wait_until(lambda: eyes.all("SELECT state FROM pgqueue.worker") == [("quiet",)])
        at = eyes.one("SELECT pgqueue.now()")
        assert one.titles()[busy].endswith("quiet")
        (tmp_path / "go").touch()
        wait_until(lambda: not one.pids())
        assert eyes.state(job) == "completed"
        assert eyes.one("SELECT count(*) FROM pgqueue.job WHERE started_at > %s", at) == 0
        assert one.worker.process.poll() is None
        one.signal(signal.SIGHUP)
        wait_until(lambda: eyes.one("SELECT count(*) FROM pgqueue.job_done WHERE started_at > %s", at) > 10)
        assert len(one.pids()) == 2


# Somebody else's queries ---------------------------------------------------------------------------------------------

QUERIES = (
    TASKS
    + """
import socket

@pgqueue.task(name="query", timeout=None)
def query(job: pgqueue.Job, port: int, seconds: float) -> str:
    with socket.create_connection(("127.0.0.1", port)) as to:
        to.sendall(f"{job.id} {seconds}\\n".encode())
        return to.makefile().readline()
"""
)


class Queries(socketserver.ThreadingTCPServer):
    """A database of somebody else: a query that has begun goes on, whatever becomes of who asked. Counts those that are
    the same and run at once."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Query)
        self.port = self.server_address[1]
        self.asked, self.running, self.most = Counter[str](), Counter[str](), Counter[str]()
        self.total = 0
        self.over = threading.Event()
        """Ends those that were to take for ever."""
        self._lock = threading.Lock()

    def run(self, name: str, seconds: float) -> None:
        with self._lock:
            self.total += 1
            self.asked[name] += 1
            self.running[name] += 1
            self.most[name] = max(self.most[name], self.running[name])
        self.over.wait(seconds)
        with self._lock:
            self.running[name] -= 1


class Query(socketserver.StreamRequestHandler):
    """One question."""

    server: Queries

    def handle(self) -> None:
        name, seconds = self.rfile.readline().decode().split()
        self.server.run(name, float(seconds))
        with suppress(OSError):  # who asked may be gone
            self.wfile.write(b"answer\n")


@contextmanager
def queries() -> Iterator[Queries]:
    with Queries() as made:
        thread = threading.Thread(target=made.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield made
        finally:
            made.over.set()
            made.shutdown()
            thread.join()


@pytest.mark.second
@pytest.mark.promise("S08", "S09")
def test_no_query_runs_twice_at_once_because_of_a_deploy(tmp_path: Path, dsn: str, eyes: Eyes) -> None:
    """Queries that outlast two deploys, and short ones all the time."""
    with queries() as asked, supervised(tmp_path, dsn, processes=2, source=QUERIES) as one:
        long_ones = put(eyes, "query", f'{{"port": {asked.port}, "seconds": 600}}', 4)
        wait_until(lambda: asked.total == 4)
        short = 0
        for version in (2, 3):
            one.deploy(QUERIES, version=version)
            before = one.counts(RESTARTED)
            one.signal(signal.SIGHUP)
            while one.counts(RESTARTED) == before:
                short += len(put(eyes, "query", f'{{"port": {asked.port}, "seconds": 0.05}}', 4))
                wait_until(lambda: asked.total == short + 4)  # noqa: B023
        assert all(asked.running[str(job)] == 1 for job in long_ones)
        asked.over.set()
        wait_until(eyes.done(short + 4))
        assert set(asked.most.values()) == set(asked.asked.values()) == {1}
        assert len(asked.asked) == short + 4


@pytest.mark.second
@pytest.mark.promise("S09")
def test_a_deploy_that_kills_would_run_queries_twice_at_once(tmp_path: Path, dsn: str, eyes: Eyes) -> None:
    """So the count above can see it: one that was killed runs again, and what it had asked goes on."""
    with queries() as asked, supervised(tmp_path, dsn, processes=1, source=QUERIES) as one:
        [job] = put(eyes, "query", f'{{"port": {asked.port}, "seconds": 600}}')
        wait_until(lambda: asked.running[str(job)] == 1)
        [pid] = one.pids()
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: asked.most[str(job)] == 2)
        asked.over.set()
        wait_until(eyes.done(1))


@pytest.mark.second
@pytest.mark.promise("S07")
def test_a_quiet_process_is_gone_one_look_after_its_last_job(tmp_path: Path, dsn: str, eyes: Eyes) -> None:
    with supervised(tmp_path, dsn, processes=1) as one:
        took = []
        for number in range(3):
            [job] = put(eyes, "held", f'{{"name": "go{number}"}}')
            busy = one.event("began", job=job)["pid"]
            one.restart(signal.SIGHUP)
            wait_until(lambda: one.titles().get(busy, "").endswith("quiet"))  # noqa: B023
            (tmp_path / f"go{number}").touch()
            wait_until(gone({busy}))
            took.append(monotonic() - one.event("ended", job=job)["at"])
        print(f"gone {', '.join(f'{seconds:.2f}' for seconds in took)} s after the last job")
        assert min(took) < LOOK_SECONDS and max(took) < Terms(1, ()).check_every
