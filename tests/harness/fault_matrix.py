"""The fault matrix: one work, one account, one fault after another, measured on real servers and real processes.

    python -m tests.harness.faults --report [--runs 3] [--only NAME]

Each run has a server of its own, an application that enqueues all the time, and two worker processes (fault_work.py).
When each kind of job runs, the fault strikes; when it is over, work must go on by itself. Then the application ends,
and all that it committed must end, too. A fault is a function on the `Stage`; it returns when the fault is over.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import psycopg
from clocks import step_clock
from fault_work import APART, EVENTS, KINDS, TABLE, Books, Verdict, hold, judge, note, notes
from faults import Wire
from ids_again import ids_again
from notify_queues import FIRST as FIRST_WITH_SMALL_QUEUE
from notify_queues import PAGES, full
from pgbouncers import PROGRAM, PgBouncer
from poolers import Pooler
from servers import SETTINGS, VERSION, Server, binaries, embedded_server
from standby import pair
from stopped import stopped
from supervised import supervised
from workers import Eyes, wait_until, workers

from pgqueue.database import embedded, migrations

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "faults.md"
BEGIN, END = "<!-- the matrix begins -->", "<!-- the matrix ends -->"
LEASE, POLL = 4.0, 0.5
SOURCE = "from fault_work import *\n"
FLOW = 8
"""So many jobs of each kind must have begun before the fault, and again after it."""
PATIENCE = 90.0
"""Seconds until work must go on, and again until all must have ended."""


@dataclass
class Stage:
    """One run of a fault: a server, an application, workers, and what they note."""

    directory: Path
    server: Server
    dsn: str
    """Where the application and the account look."""
    workers_dsn: str
    environ: dict[str, str]
    stack: ExitStack
    applications: list[subprocess.Popen[bytes]] = field(default_factory=list)
    written: Callable[[], str] = str
    """What the workers have logged."""
    whole: Callable[[], bool] = bool
    """Whether all worker processes live that the fault has not killed."""
    kept: dict[str, Callable[[], None]] = field(default_factory=dict)
    """What a way has prepared for its fault, by name."""

    @property
    def events(self) -> Path:
        return self.directory / "events"

    @property
    def journal(self) -> Path:
        return self.directory / "journal"

    def note(self, event: str, pid: int) -> None:
        """Note what the fault does to a process: it `died`, is `frozen`, is `thawed`."""
        note(self.events, event=event, pid=pid)

    def start_application(self) -> None:
        first = len(self.applications) * APART
        with (self.directory / "application.log").open("ab") as log:
            program = [sys.executable, str(HERE / "fault_work.py"), self.dsn, str(self.journal), str(first)]
            process = subprocess.Popen(program, env=os.environ | self.environ, stderr=log)
        self.applications.append(process)
        self.stack.callback(_end, process)

    def end_application(self) -> None:
        process = self.applications[-1]
        process.terminate()
        assert process.wait(60) == 0, (self.directory / "application.log").read_text()

    def flows(self) -> None:
        """Wait until some more jobs of each kind have begun that were not there before."""
        before = self._begun()
        wait_until(lambda: all(self._begun()[kind] >= before[kind] + FLOW for kind in KINDS), PATIENCE)

    def hold(self) -> None:
        """Have a job with a lock run for some seconds, and another one of its key wait."""
        hold(self.dsn, self.journal)
        wait_until(self._held, PATIENCE)

    def holder(self) -> int:
        """The process that has begun it."""
        return int(self._held()[-1]["pid"])

    def lasts(self, seconds: float) -> None:
        """Let the fault last so long."""
        threading.Event().wait(seconds)

    def settle(self) -> None:
        """Wait until no job waits or runs; what then still does is lost, and the account says so."""
        with suppress(AssertionError):
            wait_until(lambda: not self.look("SELECT 1 FROM pgqueue.job WHERE finished_at IS NULL LIMIT 1"), PATIENCE)

    def look(self, sql: str) -> list[tuple[object, ...]]:
        with psycopg.connect(self.dsn, autocommit=True) as conn:
            return conn.execute(sql.encode()).fetchall()

    def kill(self, pid: int) -> None:
        """kill -9, and wait until it is gone."""
        process = psutil.Process(pid)
        process.kill()
        wait_until(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE)
        self.note("died", pid)

    def dead(self) -> set[int]:
        """The processes that the fault has killed."""
        return {event["pid"] for event in notes(self.events) if event["event"] == "died"}

    def _held(self) -> list[dict[str, Any]]:
        return [event for event in notes(self.events) if (event["event"], event.get("kind")) == ("began", "held")]

    def _begun(self) -> Counter[str]:
        return Counter(event["kind"] for event in notes(self.events) if event["event"] == "began")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


# The faults ----------------------------------------------------------------------------------------------------------


def kill_worker(stage: Stage) -> None:
    stage.kill(stage.holder())


def kill_supervisor(stage: Stage) -> None:
    """Another one is started at once, as an init system does; the processes of the first end by themselves."""
    stage.kept["kill"]()
    start_supervisor(stage)


def kill_application(stage: Stage) -> None:
    """Another one is started at once."""
    stage.applications[-1].kill()
    stage.applications[-1].wait()
    stage.start_application()


def freeze_worker(stage: Stage) -> None:
    """SIGSTOP of the worker that runs a job with the lock, for two and a half leases."""
    pid = stage.holder()
    with stopped([pid]):
        stage.note("frozen", pid)
        stage.lasts(2.5 * LEASE)
        stage.note("thawed", pid)


def crash_server(stage: Stage) -> None:
    stage.server.restart("immediate")


def kill_backend(stage: Stage) -> None:
    """kill -9 of a worker's session in the server. PostgreSQL ends all others and recovers."""
    ((pid,),) = stage.look("SELECT pid FROM pg_stat_activity WHERE application_name LIKE 'pgqueue %fetch' LIMIT 1")
    os.kill(int(str(pid)), signal.SIGKILL)


def end_sessions(stage: Stage) -> None:
    """pg_terminate_backend of every session of every worker, twenty times."""
    for _ in range(20):
        stage.look("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE 'pgqueue%'")
        stage.lasts(0.1)


def fill_notify_queue(stage: Stage) -> None:
    with full(stage.dsn):
        stage.lasts(5)


def step_forward(stage: Stage) -> None:
    _step(stage, 3600)


def step_back(stage: Stage) -> None:
    _step(stage, -3600)


def _step(stage: Stage, seconds: float) -> None:
    eyes = Eyes(stage.dsn)
    step_clock(eyes, seconds)
    eyes.close()


def give_ids_again(stage: Stage) -> None:
    """Every sequence begins anew while all rows stay, and the server restarts, as after a switchover."""
    ids_again(stage.dsn, "lagging")
    stage.server.restart("immediate")


def cut_wires(stage: Stage) -> None:
    """Nothing passes any more on any connection of the workers, and none is closed. New ones are sound."""
    stage.kept["cut"]()


def restart_pooler(stage: Stage) -> None:
    stage.kept["restart"]()


def freeze_postmaster(stage: Stage) -> None:
    """SIGSTOP of the postmaster, then the workers' sessions are ended: no client can connect."""
    assert stage.server.cluster is not None
    postmaster = stage.server.cluster.postmaster()
    assert postmaster is not None
    with psycopg.connect(stage.dsn, autocommit=True) as conn, stopped([postmaster]):
        conn.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE 'pgqueue%'")
        stage.lasts(40)


def take_connections(stage: Stage) -> None:
    """The workers' sessions are ended, and another client takes each connection that there is."""
    taken: list[psycopg.Connection] = []
    with psycopg.connect(stage.dsn, autocommit=True) as conn:
        until = time.monotonic() + 5
        while time.monotonic() < until:
            with suppress(psycopg.OperationalError):
                taken.append(psycopg.connect(stage.dsn))
                continue
            conn.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE 'pgqueue%'"
            )
    for one in taken:
        one.close()


def make_read_only(stage: Stage) -> None:
    """As a switchover does: the database is made read only, and the workers' sessions are ended. Nothing ends those
    that begin meanwhile."""
    with psycopg.connect(stage.dsn, autocommit=True) as conn:
        conn.execute("ALTER DATABASE postgres SET default_transaction_read_only = on")
        conn.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE 'pgqueue%'")
        stage.lasts(5)
        conn.execute("ALTER DATABASE postgres RESET default_transaction_read_only")


def publish(stage: Stage) -> None:
    with psycopg.connect(stage.dsn, autocommit=True) as conn:
        conn.execute("CREATE PUBLICATION everything FOR ALL TABLES")
        stage.lasts(3)


def starve_threads(stage: Stage) -> None:
    """One worker's address space is at its limit for 5 s: it can start no thread."""
    (stage.directory / "starve").touch()
    wait_until(lambda: any(event["event"] == "fed" for event in notes(stage.events)), PATIENCE)


STARVE = """
import threading
from fault_work import note, EVENTS
from threadless import no_threads

def starve():
    \"\"\"The first worker that sees the file takes it, and starves.\"\"\"
    file = os.environ["STARVE"]
    while True:
        time.sleep(0.02)
        try:
            os.rename(file, file + str(os.getpid()))
        except FileNotFoundError:
            continue
        with no_threads("refused"):
            time.sleep(5)
        note(os.environ[EVENTS], event="fed", pid=os.getpid())

threading.Thread(target=starve, daemon=True).start()
"""


def fail_over(stage: Stage) -> None:
    """The primary is killed with all its processes, and the standby is promoted."""
    stage.kept["fail over"]()


def fill_disk(stage: Stage) -> None:
    """The file system of the server's data is full for 5 s. If the server has ended by then, it is started again."""
    assert stage.server.cluster is not None
    ballast = stage.server.cluster.directory / "ballast"
    with ballast.open("wb", buffering=0) as file:
        until = time.monotonic() + 5
        while time.monotonic() < until:
            try:
                file.write(b"\0" * 4096)
            except OSError:
                stage.lasts(0.02)  # it is full; what becomes free is taken, too
    ballast.unlink()
    if stage.server.cluster.postmaster() is None:
        stage.server.start()


# How a run is set up -------------------------------------------------------------------------------------------------


def usual_server(stack: ExitStack, settings: Mapping[str, str]) -> Server:
    server = embedded_server(**settings)
    stack.callback(server.end)
    return server


def server_on_a_small_disk(stack: ExitStack, settings: Mapping[str, str]) -> Server:
    """Its file system has 200 MB. Only root may mount one."""
    mount = tempfile.mkdtemp(prefix="pgqueue-disk-")
    stack.callback(os.rmdir, mount)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200m,mode=755", "tmpfs", mount], check=True)
    stack.callback(_unmount, mount)
    started = embedded.start(Path(mount) / "server", bin_path=binaries(), settings={**SETTINGS, **settings}, keep=False)
    stack.callback(started.stop)
    return Server(started.cluster.dsn, started.stop, started.cluster)


def _unmount(mount: str) -> None:
    """The server's watchman ends a moment after the server, and has a file open there until then."""
    wait_until(lambda: subprocess.run(["umount", mount], check=False, stderr=subprocess.DEVNULL).returncode == 0)


def directly(stage: Stage) -> None:
    """Workers and the application connect to the server itself."""


def through_wires(stage: Stage) -> None:
    """The workers' connections go through wires that can be cut."""
    wire = stage.stack.enter_context(Wire(stage.dsn))
    stage.workers_dsn = wire.dsn
    names = [f"pgqueue {name}" for name in ("fetch", "complete", "listen", "beat", "unblock", "rates", "handlers")]
    stage.kept["cut"] = lambda: _cut(wire, names)


def _cut(wire: Wire, names: list[str]) -> None:
    assert wire.kill(*names) >= 4


def through_a_pooler(stage: Stage) -> None:
    """The workers go through a pooler in transaction mode; they listen at the server itself."""
    poolers = ExitStack()
    stage.stack.callback(poolers.close)
    first = poolers.enter_context(Pooler(stage.dsn, 8))
    stage.workers_dsn = first.dsn
    stage.environ |= {"PGQUEUE_PREPARE": "off", "PGQUEUE_LISTEN_DSN": stage.dsn}

    def restart() -> None:
        poolers.close()
        stage.lasts(2)
        poolers.enter_context(Pooler(stage.dsn, 8, first.port))

    stage.kept["restart"] = restart


def through_pgbouncer(*, listening: bool) -> Callable[[Stage], None]:
    """The workers go through PgBouncer in transaction mode. They listen at the server itself, or through it, too."""

    def way(stage: Stage) -> None:
        bouncer = stage.stack.enter_context(PgBouncer(stage.dsn, 8))
        stage.workers_dsn = bouncer.dsn
        stage.environ |= {"PGQUEUE_PREPARE": "off"} | ({"PGQUEUE_LISTEN_DSN": stage.dsn} if listening else {})

        def restart() -> None:
            bouncer.stop()
            stage.lasts(2)
            bouncer.start()

        stage.kept["restart"] = restart

    return way


def with_a_standby(*, synchronous: bool) -> Callable[[Stage], None]:
    def way(stage: Stage) -> None:
        assert stage.server.cluster is not None
        both = stage.stack.enter_context(pair(stage.server.cluster, synchronous=synchronous))
        stage.dsn = stage.workers_dsn = both.dsn()

        def go() -> None:
            both.crash()
            both.promote()

        stage.kept["fail over"] = go

    return way


def start_workers(stage: Stage) -> None:
    """Two worker processes."""
    made = stage.stack.enter_context(workers(stage.directory, stage.workers_dsn, stage.environ["SOURCE"]))
    started = [made.start(stage.environ, lease=LEASE, poll=POLL, concurrency=10) for _ in range(2)]
    for process in started:
        process.event("ready")
    stage.written = lambda: "\n".join(process.written()[-3000:] for process in made.all)
    stage.whole = lambda: all(process.pid in stage.dead() for process in made.all if process.process.poll() is not None)


def start_supervisor(stage: Stage) -> None:
    """A supervisor with two processes."""
    path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    one = stage.stack.enter_context(
        supervised(
            stage.directory,
            stage.workers_dsn,
            *("--lease", f"{LEASE:g}s", "--poll", f"{POLL:g}s"),
            processes=2,
            source=stage.environ["SOURCE"],
            environ=stage.environ | {"PYTHONPATH": path},
        )
    )
    stage.written = lambda: "\n".join(one.worker.lines[-60:])
    stage.whole = lambda: len(one.pids()) == 2
    stage.kept["kill"] = lambda: stage.kill(one.pid)


@dataclass(frozen=True)
class Fault:
    """A row of the matrix."""

    name: str
    strike: Callable[[Stage], None]
    settings: Mapping[str, str] = field(default_factory=dict)
    way: Callable[[Stage], None] = directly
    start: Callable[[Stage], None] = start_workers
    source: str = SOURCE
    serve: Callable[[ExitStack, Mapping[str, str]], Server] = usual_server
    holes: tuple[str, ...] = ()
    """What docs/faults.md says that this fault may do: `lost`, `overlaps`."""

    def accepts(self, verdict: Verdict) -> bool:
        """Whether work went on and nothing is wrong but for the holes that are known."""
        wrong = {"lost": verdict.lost, "doubled": verdict.doubled, "overlaps": verdict.overlaps}
        return verdict.pause < math.inf and not any(found for what, found in wrong.items() if what not in self.holes)


QUICK = """
from pgqueue.database import sessions
from pgqueue.worker.fetch import notifier
sessions.ROUND_TRIP_SECONDS = 3.0
notifier.PING_SECONDS = 0.3
notifier.PING_ANSWER_SECONDS = 3.0
"""
SMALL_QUEUE = {"max_notify_queue_pages": str(PAGES)}

FAULTS = [
    Fault("kill -9 of a worker", kill_worker),
    Fault("kill -9 of the supervisor", kill_supervisor, start=start_supervisor),
    Fault("kill -9 of the application", kill_application),
    Fault("SIGSTOP of a worker past its lease", freeze_worker, holes=("overlaps",)),
    Fault("immediate restart of the server", crash_server, {"wal_writer_delay": "10s"}),
    Fault("kill -9 of a backend", kill_backend),
    Fault("all sessions of workers ended, 20 times", end_sessions),
    *[Fault("NOTIFY queue full", fill_notify_queue, SMALL_QUEUE)] * (int(VERSION) >= FIRST_WITH_SMALL_QUEUE),
    Fault("clock +1 h", step_forward),
    Fault("clock -1 h", step_back),
    Fault("ids given again", give_ids_again),
    Fault("network hole", cut_wires, way=through_wires, source=SOURCE + QUICK),
    Fault("pooler restarted", restart_pooler, way=through_a_pooler),
    *[
        Fault("PgBouncer restarted", restart_pooler, way=through_pgbouncer(listening=True)),
        Fault("PgBouncer restarted, no LISTEN", restart_pooler, way=through_pgbouncer(listening=False)),
    ]
    * (PROGRAM is not None),
    Fault("postmaster frozen for 40 s", freeze_postmaster),
    Fault("connections exhausted", take_connections, {"max_connections": "40"}),
    Fault("database read only", make_read_only),
    Fault("publication of all tables", publish, {"wal_level": "logical"}),
    Fault("memory at its limit", starve_threads, source=SOURCE + STARVE),
    Fault("failover, synchronous standby", fail_over, way=with_a_standby(synchronous=True)),
    Fault(
        "failover, asynchronous standby", fail_over, way=with_a_standby(synchronous=False), holes=("lost", "overlaps")
    ),
    *[Fault("disk full", fill_disk, serve=server_on_a_small_disk)] * (os.geteuid() == 0),
]


# The measurement -----------------------------------------------------------------------------------------------------


def measure(fault: Fault) -> Verdict:
    """One run of this fault, from an empty server to the account."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pgqueue-fault-")))
        server = fault.serve(stack, fault.settings)
        environ = {EVENTS: str(directory / "events"), "STARVE": str(directory / "starve"), "SOURCE": fault.source}
        stage = Stage(directory, server, server.dsn("postgres"), server.dsn("postgres"), environ, stack)
        fault.way(stage)
        migrations.migrate(stage.dsn)
        with psycopg.connect(stage.dsn) as conn:
            conn.execute(TABLE)
        fault.start(stage)
        stage.start_application()
        stage.flows()
        stage.hold()
        struck = time.monotonic()
        fault.strike(stage)
        lifted = time.monotonic()
        goes_on = _goes_on(stage)
        stage.end_application()
        ended = time.monotonic()
        stage.settle()
        verdict = judge(_books(stage, struck, lifted, ended))
        if not (goes_on and stage.whole()):
            verdict = replace(verdict, pause=math.inf)
        if not verdict.clean:
            print(f"{fault.name}: {verdict}", verdict.lost, verdict.doubled, verdict.overlaps, sep="\n  ")
            print(*_stories(stage, verdict.lost), sep="\n  ")
            print(stage.written())
        return verdict


def _stories(stage: Stage, keys: list[int]) -> list[tuple[object, ...]]:
    """What the database says of the jobs with these keys: the state, and each attempt."""
    with psycopg.connect(stage.dsn) as conn:
        return conn.execute(
            "SELECT j.args ->> 'key', j.id, j.state, j.attempt, a.attempt, a.outcome, a.error_type, a.message"
            " FROM pgqueue.job AS j LEFT JOIN pgqueue.attempt AS a ON a.job_id = j.id"
            " WHERE (j.args ->> 'key')::bigint = ANY(%s) ORDER BY j.id, a.finished_at",
            (keys,),
        ).fetchall()


def _goes_on(stage: Stage) -> bool:
    try:
        stage.flows()
    except AssertionError:
        return False
    return True


def _books(stage: Stage, struck: float, lifted: float, ended: float) -> Books:
    states = stage.look("SELECT (args ->> 'key')::bigint, state FROM pgqueue.job WHERE task LIKE 'matrix.%'")
    effects = stage.look("SELECT key FROM matrix_effect")
    return Books(
        journal=notes(stage.journal),
        events=notes(stage.events),
        states={int(str(key)): str(state) for key, state in states},
        effects=Counter(int(str(key)) for (key,) in effects),
        struck=struck,
        lifted=lifted,
        ended=ended,
    )


# The report ----------------------------------------------------------------------------------------------------------

HEAD = """\
| fault | runs | jobs | lost | doubled effects | overlaps | ran again | fault lasted, s | until work goes on, s |
|---|---|---|---|---|---|---|---|---|"""


def row(fault: Fault, found: list[Verdict]) -> str:
    """The line of the table for these runs: sums, and of times the median and the longest."""
    pauses = [verdict.pause for verdict in found]
    figures = [
        len(found),
        sum(verdict.jobs for verdict in found),
        sum(len(verdict.lost) for verdict in found),
        sum(len(verdict.doubled) for verdict in found),
        _overlaps(found),
        sum(verdict.again for verdict in found),
        f"{statistics.median(verdict.lasted for verdict in found):.1f}",
        f"{statistics.median(pauses):.1f} ({max(pauses):.1f})",
    ]
    return f"| {fault.name} | {' | '.join(map(str, figures))} |"


def _overlaps(found: list[Verdict]) -> str:
    """How many, and the longest in seconds."""
    lengths = [seconds for verdict in found for *_, seconds in verdict.overlaps]
    return f"{len(lengths)} ({max(lengths):.2f} s)" if lengths else "0"


def report(runs: int, only: str | None) -> int:
    """Measure, print and, if all faults were measured, write the page; 1 if any fault did what it may not."""
    logging.getLogger("pgqueue").setLevel(logging.ERROR)
    chosen = [fault for fault in FAULTS if only in (None, fault.name)]
    if not chosen:
        sys.exit(f"no fault {only!r}; there are: {', '.join(fault.name for fault in FAULTS)}")
    lines, clean = [HEAD], True
    for fault in chosen:
        found = [measure(fault) for _ in range(runs)]
        clean &= all(map(fault.accepts, found))
        lines.append(row(fault, found))
        print(lines[-1], flush=True)
    if only is None:
        write("\n".join(lines))
    return 0 if clean else 1


def write(table: str) -> None:
    """Put the table between the markers of the page."""
    head, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(f"{head}{BEGIN}\n{table}\n{END}{rest.partition(END)[2]}", encoding="utf-8")
