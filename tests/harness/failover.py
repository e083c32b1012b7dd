"""Failovers of a real cluster: Patroni moves the primary while workers work, and an account is drawn up.

    python -m tests.harness.failover [--runs 3] [--fault NAME] [--way NAME] [--asynchronous]

By hand: a run takes half a minute. Each run has a cluster of its own (patroni.py), two worker processes, and an
application that enqueues all the time: transactional jobs in threads and on the loop, and jobs of one lock. Each job
has one attempt. A backlog waits, so a job could start at any moment. When the new primary accepts the first connection
that can write, two times are taken: until a job starts, and until an effect is committed there.

With a synchronous standby nothing that was acknowledged may be lost, no effect comes twice, no two jobs of the lock run
at once, no attempt is spent. A commit without an answer is counted apart. Asynchronous: what is lost is printed.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, sleep
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))  # where the helpers are, as for the tests

import psycopg
from patroni import Node, Patroni, role
from pgbouncers import PgBouncer
from workers import Eyes, Process, wait_until, workers

import pgqueue
from pgqueue.database import migrations

TASKS = """
WRITE = "INSERT INTO effect VALUES (%s)"

@pgqueue.task(name="failover.thread", transactional=True, retry=1)
def thread(job: pgqueue.Job, key: int) -> None:
    say("began", key=key)
    job.connection.execute(WRITE, [key])
    time.sleep(0.02)

@pgqueue.task(name="failover.loop", transactional=True, retry=1)
async def loop(job: pgqueue.Job, key: int) -> None:
    say("began", key=key)
    await (await job.aconnection()).execute(WRITE, [key])
    await asyncio.sleep(0.02)

@pgqueue.task(name="failover.lock", lock="one", retry=1, timeout=60)
async def lock(key: int) -> None:
    say("began", key=key)
    say("locked", key=key)
    try:
        await asyncio.sleep(0.01)
    finally:
        say("left", key=key)
"""
KINDS = [pgqueue.remote(f"failover.{name}") for name in ("thread", "loop")]
KINDS.append(pgqueue.remote("failover.lock").using(lock="one"))
RATE, BACKLOG = 60.0, 1_500
MEDIAN_SECONDS, WORST_SECONDS, FROZEN_SECONDS = 2.0, 5.0, 10.0
"""So soon after the new primary accepts connections a job has started and an effect is committed: in the middle of the
runs of a fault, in the worst of them, and if the old primary is frozen."""
"""Jobs a second, and how many are there at once in the moment before the fault."""
ENDED = "SELECT count(*) FROM pgqueue.job WHERE state NOT IN ('completed', 'failed')"
FAILED = "SELECT id, task FROM pgqueue.job WHERE state = 'failed'"
SPENT = "SELECT DISTINCT outcome || ': ' || coalesce(error_type, '') || ' ' || left(message, 90) FROM pgqueue.attempt"
PATIENCE = 120.0


class Application:
    """Enqueues jobs of each kind with rising keys, one in a transaction, through every fault, until it is ended."""

    def __init__(self, dsn: str) -> None:
        self.acknowledged: set[int] = set()
        self.unanswered: set[int] = set()
        self._dsn = dsn
        self._key = 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._errors: list[BaseException] = []

    def __enter__(self) -> Application:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def end(self) -> None:
        self.__exit__()
        assert self._errors == []

    def backlog(self, jobs: int) -> None:
        """Many at once, from another connection."""
        with psycopg.connect(self._dsn) as conn:
            keys = range(1_000_000, 1_000_000 + jobs)
            pgqueue.enqueue_many(conn, [KINDS[key % len(KINDS)].new(key=key) for key in keys])
        self.acknowledged.update(keys)

    def _run(self) -> None:
        try:
            while not self._end.is_set():
                with suppress(psycopg.DatabaseError), psycopg.connect(self._dsn) as conn:
                    while not self._end.wait(1 / RATE):
                        self._enqueue(conn)
                self._end.wait(0.05)
        except BaseException as error:
            self._errors.append(error)

    def _enqueue(self, conn: psycopg.Connection) -> None:
        self._key += 1
        key = self._key
        KINDS[key % len(KINDS)].enqueue(conn, key=key)
        self.unanswered.add(key)
        conn.commit()
        self.unanswered.discard(key)
        self.acknowledged.add(key)


@dataclass
class Found:
    """What a run has shown."""

    away: float = 0.0
    """Seconds from the fault until the new primary accepts."""
    started: float = 0.0
    effect: float = 0.0
    lost: int = 0
    unanswered: int = 0
    doubled: int = 0
    overlaps: int = 0
    failed: int = 0
    lines: int = 0
    """Lines that a worker has logged from WARNING up, of both the higher number."""
    why: list[str] = field(default_factory=list)

    def sound(self) -> bool:
        return not (self.lost or self.doubled or self.overlaps or self.failed)

    def __str__(self) -> str:
        return (
            f"away {self.away:.1f} s; first start {self.started:.2f} s, first effect {self.effect:.2f} s after; "
            f"lost {self.lost}, doubled {self.doubled}, overlaps {self.overlaps}, attempts spent {self.failed}; "
            f"{self.unanswered} commits without an answer; {self.lines} lines"
        )


def killed(cluster: Patroni, leader: Node) -> None:
    leader.kill()


def switched(cluster: Patroni, leader: Node) -> None:
    cluster.switch_over()


def frozen(cluster: Patroni, leader: Node) -> None:
    leader.freeze()


def rolled(cluster: Patroni, leader: Node) -> None:
    """A rolling restart: each standby, then a switchover, then the old primary."""
    for node in [*(node for node in cluster.nodes if node is not leader), leader]:
        if node is leader:
            cluster.switch_over()
            wait_until(lambda: role(leader) == "standby", 60)
        cluster.restart(node)
        wait_until(lambda node=node: role(node) == "standby", 60)  # type: ignore[misc]


FAULTS: dict[str, Callable[[Patroni, Node], None]] = {
    "killed": killed,
    "switchover": switched,
    "frozen": frozen,
    "rolling": rolled,
}
WAYS = ("direct", "haproxy", "pgbouncer")
BOUNCER = "server_login_retry = 0.2\nserver_connect_timeout = 2\n"
"""As docs/operations.md advises: PgBouncer logs in to one server at a time, and refuses its clients meanwhile."""


class Watch(threading.Thread):
    """Looks for a primary that is another node than `old`; when it accepts, and when it shows the next effect."""

    def __init__(self, cluster: Patroni, old: Node) -> None:
        super().__init__()
        self.accepts = self.effect = 0.0
        self._others = [node for node in cluster.nodes if node is not old]

    def run(self) -> None:
        ends = monotonic() + PATIENCE
        while not self.effect and monotonic() < ends:
            for node in self._others:
                with suppress(psycopg.Error):
                    self._look(node)
            sleep(0.02)

    def _look(self, node: Node) -> None:
        with psycopg.connect(node.dsn, autocommit=True) as conn:
            if conn.execute("SELECT pg_is_in_recovery()").fetchone() != (False,):
                return
            self.accepts = self.accepts or monotonic()
            before = conn.execute("SELECT count(*) FROM effect").fetchone()
            while conn.execute("SELECT count(*) FROM effect").fetchone() == before:
                sleep(0.01)
            self.effect = monotonic()


def run(fault: str, way: str = "direct", *, synchronous: bool = True) -> Found:
    """One run of a fault."""
    with ExitStack() as stack:
        cluster = stack.enter_context(Patroni(synchronous=synchronous))
        writes = cluster.dsn(target_session_attrs="read-write")
        migrations.migrate(writes)
        with psycopg.connect(writes, autocommit=True) as conn:
            conn.execute("CREATE TABLE effect (key int)")
        address, options = cluster.dsn(), dict[str, Any]()
        if way != "direct":
            address = options["listen_dsn"] = cluster.proxy
        if way == "pgbouncer":
            bouncer = stack.enter_context(PgBouncer(cluster.proxy, 20, more=BOUNCER))
            address = bouncer.dsn
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pgqueue-failover-")))
        made = stack.enter_context(workers(directory, address, TASKS))
        application = stack.enter_context(Application(writes))
        environment = {"PGQUEUE_PREPARE": "off"} if way == "pgbouncer" else None
        for _ in range(2):
            made.start(environment, concurrency=6, **options)
        for process in made.all:
            process.event("ready")
            process.event("locked")
        leader = cluster.leader()
        assert leader is not None
        watch = Watch(cluster, leader)
        application.backlog(BACKLOG)
        began = monotonic()
        watch.start()
        FAULTS[fault](cluster, leader)
        watch.join(PATIENCE)
        assert watch.effect, "\n".join(process.written()[-3000:] for process in made.all)
        if fault == "frozen":
            leader.kill()
        sleep(1.0)  # so that the application has come to the new primary, too
        application.end()
        found = account(writes, application, made.all)
        found.away = watch.accepts - began
        starts = [each["at"] for process in made.all for each in process.all("began") if each["at"] >= watch.accepts]
        found.started, found.effect = min(starts) - watch.accepts, watch.effect - watch.accepts
        return found


def account(dsn: str, application: Application, processes: list[Process]) -> Found:
    """Wait until all jobs have ended, stop the workers, and draw up the account."""
    eyes = Eyes(dsn)
    try:
        wait_until(lambda: eyes.one(ENDED) == 0, PATIENCE)
    except AssertionError:
        logs = "\n".join(process.written()[-3000:] for process in processes)
        raise AssertionError(f"stuck: {eyes.states()}\n{logs}") from None
    codes = [process.stop() for process in processes]
    assert codes == [0] * len(processes), [process.written()[-3000:] for process in processes]
    effects = Counter(key for (key,) in eyes.all("SELECT key FROM effect"))
    locked = {event["key"] for process in processes for event in process.all("left")}
    found = Found(
        lost=sum(key not in effects and key not in locked for key in application.acknowledged),
        unanswered=len(application.unanswered),
        doubled=sum(number > 1 for number in effects.values()),
        overlaps=len(overlaps(processes)),
        failed=len(eyes.all(FAILED)),
        lines=max(process.written().count(" WARNING ") + process.written().count(" ERROR ") for process in processes),
        why=[text for (text,) in eyes.all(SPENT)],
    )
    eyes.close()
    return found


def overlaps(processes: list[Process]) -> list[tuple[int, int]]:
    """(key, key) of jobs of the lock that ran at the same time: the second began before the first had left."""
    events = [event for process in processes for event in process.events if event["event"] in ("locked", "left")]
    found, running = list[tuple[int, int]](), Counter[int]()
    for event in sorted(events, key=lambda event: event["at"]):
        if event["event"] == "locked":
            found += [(other, event["key"]) for other, runs in running.items() if runs > 0]
        running[event["key"]] += 1 if event["event"] == "locked" else -1
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.harness.failover", description=__doc__)
    parser.add_argument("--runs", type=int, default=3, help="runs of each fault")
    parser.add_argument("--fault", choices=FAULTS, help="this fault only")
    parser.add_argument("--way", choices=WAYS, help="this way to the database only")
    parser.add_argument("--asynchronous", action="store_true", help="no standby is waited for")
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that a run that is cut short leaves no server behind
    sound = True
    for fault in [asked.fault] if asked.fault else FAULTS:
        for way in [asked.way] if asked.way else WAYS:
            runs = list[Found]()
            for number in range(asked.runs):
                runs.append(run(fault, way, synchronous=not asked.asynchronous))
                print(f"{fault}, {way}, run {number + 1}: {runs[-1]}", *runs[-1].why, sep="\n    ", flush=True)
            for name in ("started", "effect"):
                times = [getattr(each, name) for each in runs]
                middle, worst = statistics.median(times), max(times)
                print(f"{fault}, {way}: {name} median {middle:.2f} s, worst {worst:.2f} s")
                sound = (
                    sound
                    and middle < MEDIAN_SECONDS
                    and worst < (FROZEN_SECONDS if fault == "frozen" else WORST_SECONDS)
                )
            sound = sound and all(each.sound() for each in runs)
    return 0 if sound or asked.asynchronous else 1


if __name__ == "__main__":
    sys.exit(main())
