"""One drain, measured the same way on both sides: from a start signal to the last commit, nothing of the start-up.

pgqueue: the jobs wait in a paused queue; the workers are connected and have worked off a few thousand jobs of another
queue, so statements are prepared and caches are full. The start signal is the COMMIT that resumes the queue and
notifies; the end is the COMMIT of the n-th completion. Both times are the server's own, of the commits themselves
(`track_commit_timestamp`), so nobody has to ask while it runs but for one index probe every 20 ms.

A floor: its rows wait, its connections have drained a twin table; the start signal is a line to its process, the end
is when its last DELETE returned, and so includes one more flush than pgqueue's: in the floor's disfavour by about 1 ms.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from time import monotonic, sleep
from typing import Any, LiteralString

import psycopg

from bench import floors
from bench.processes import Process
from bench.samples import Sample
from bench.server import Lab, buffers, register
from bench.tasks import QUEUE

WARM_JOBS = 4_000
PATIENCE = 900.0  # seconds until a drain is given up
# A session publishes what it has done at most once a second.
PUBLISH_SECONDS = 1.1
"""A session publishes what it has touched at most once a second, at the end of a statement."""
SETTLE_SECONDS = 2.5

# A plain INSERT is a valid job; here it is the quickest way to make very many.
FILL = "INSERT INTO pgqueue.job (task, queue) SELECT %s, %s FROM generate_series(1, %s)"
FILL_WITH = "INSERT INTO pgqueue.job (task, queue, args) SELECT %s, %s, %s::jsonb FROM generate_series(1, %s)"
FILL_RATED = "INSERT INTO pgqueue.job (task, queue, rate_key) SELECT %s, %s, %s FROM generate_series(1, %s)"
FILL_LIMITED = "INSERT INTO pgqueue.job (task, queue, limit_key) SELECT %s, %s, %s FROM generate_series(1, %s)"
FILL_KEYED = """
INSERT INTO pgqueue.job (task, queue, lock_key) SELECT %s, %s, 'account:' || n %% %s FROM generate_series(1, %s) AS n
"""
PAUSE = "INSERT INTO pgqueue.queue (name, paused_at) VALUES (%s, pgqueue.now()) ON CONFLICT DO NOTHING"
# One job per key that runs and will not end, at a worker whose lease is an hour.
HOLD = """
INSERT INTO pgqueue.job_running (state, task, queue, lock_key, holds, worker_id, claim, started_at)
SELECT 'running', 'bench.noop', %s, 'account:' || n, true, %s, 1, pgqueue.now() FROM generate_series(0, %s - 1) AS n
"""
LET_GO = """
WITH gone AS (DELETE FROM pgqueue.job_running WHERE worker_id = %(holder)s RETURNING id)
SELECT pg_current_xact_id()::text, pg_notify('pgqueue.:control', 'sweep'), count(*) FROM gone
"""
RESUME = """
WITH resumed AS (DELETE FROM pgqueue.queue WHERE name = %(queue)s RETURNING name)
SELECT pg_current_xact_id()::text, pg_notify('pgqueue.' || name, '') FROM resumed
"""
WAKE = "SELECT clock_timestamp()::text FROM pg_notify('pgqueue.' || %(queue)s, '')"
NOT_ASKED_SINCE = """
SELECT count(*) FROM pg_stat_activity
WHERE datname = current_database() AND application_name = 'pgqueue fetch'
  AND (state <> 'idle' OR query_start < %(woken)s::timestamptz)
"""
ENDED = """
SELECT count(*), extract(epoch FROM max(at) - pg_xact_commit_timestamp((%(resumed)s)::xid))::float8
FROM (SELECT pg_xact_commit_timestamp(xmin) AS at FROM pgqueue.job_done WHERE id >= %(first)s ORDER BY at LIMIT %(n)s)
    AS completed
"""


@dataclass(frozen=True, slots=True)
class Setup:
    """The workers of a drain and the task they run."""

    task: str = "bench.noop"
    workers: int = 1
    loop: str = "uvloop"
    concurrency: int = 10
    keys: int = 0
    """With keys: every job has one of so many lock ids, in turn."""
    rate: str | None = None
    limit: str | None = None
    args: str | None = None
    """The arguments of every job, as the text of a JSON object."""


class Track:
    """A fresh database with its workers, ready to run. `pass_through` gives it a past, `measure` takes a sample."""

    def __init__(self, lab: Lab, dsn: str, setup: Setup, workers: list[Process]) -> None:
        self.dsn = dsn
        self._lab = lab
        self._setup = setup
        self._workers = workers
        self._conn = psycopg.connect(dsn, autocommit=True, application_name="bench observer")

    def __enter__(self) -> Track:
        return self

    def __exit__(self, *_: object) -> None:
        self._conn.close()

    def pass_through(self, jobs: int, batch: int = 10_000) -> None:
        """Let the workers complete that many jobs, enqueued `batch` per transaction."""
        for low in range(0, jobs, batch):
            last = self._fill(self._setup.task, QUEUE, min(batch, jobs - low))
            if low + batch >= jobs:
                self._wait_for(last)

    def block(self, jobs: int, keys: int = 1, *, parked: bool) -> int:
        """Put so many jobs before those to be measured, of keys that are held by one worker; its id. `parked`: let the
        workers park them first."""
        holder = register(self.dsn, ["elsewhere"])
        with self._conn.transaction():
            self._conn.execute(PAUSE, [QUEUE])
            self._conn.execute(HOLD, [QUEUE, holder, keys])
            self._conn.execute(FILL_KEYED, [self._setup.task, QUEUE, keys, jobs])
        if parked:
            self._resume()
            self._wait_until("SELECT count(*) = %s FROM pgqueue.job_blocked", jobs)
        return holder

    def tidy(self) -> None:
        """Vacuum now, so that autovacuum has no reason to while it is counted or measured what happens."""
        self._conn.execute("VACUUM ANALYZE")

    def warm(self) -> None:
        """Let every worker do once what it does only once."""
        self._wait_for(self._fill(self._setup.task, "warm", WARM_JOBS))

    def measure(self, jobs: int, waiting: int | None = None) -> Sample:
        """Drain `jobs` out of `waiting` (default: all). `more` has the buffers that claiming one job has touched."""
        self._conn.execute(PAUSE, [QUEUE])
        total = waiting or jobs
        first = self._fill(self._setup.task, QUEUE, total) - total + 1
        touched = self._touched()
        client, server = self._cpu()
        resumed = self._resume()
        self._wait_for(first + jobs - 1)
        seconds = self._seconds(resumed, first, jobs)
        client, server = (now - then for now, then in zip(self._cpu(), (client, server), strict=True))
        share = jobs / self._completed(first)  # of a deep backlog more than `jobs` may be done by now
        return Sample(jobs, seconds, client * share, server * share, self._claim_buffers(touched, first))

    def measure_parked(self, jobs: int, waiting: int, keys: int) -> Sample:
        """Have `jobs` completed out of `waiting` that are parked on so many held keys: the start lets them go."""
        holder = self.block(waiting, keys, parked=True)
        self.tidy()  # what the parking has left behind would be cleaned up during one sample and not during another
        sleep(SETTLE_SECONDS)
        first = int(self._row("SELECT min(id) FROM pgqueue.job_blocked", None)[0])
        client, server = self._cpu()
        resumed, *_ = self._row(LET_GO, {"holder": holder})
        self._wait_for(first + jobs - 1)
        seconds = self._seconds(resumed, first, jobs)
        client, server = (now - then for now, then in zip(self._cpu(), (client, server), strict=True))
        share = jobs / self._completed(first)
        return Sample(jobs, seconds, client * share, server * share)

    def overlaps(self) -> int:
        """How often jobs of one key have run at once in a worker."""
        return sum(int(worker.ask()["overlaps"]) for worker in self._workers)

    def reopen(self) -> None:
        """Let the workers take jobs again; after a sample they take none."""
        self._resume()

    def finish(self, job_id: int) -> None:
        """Wait until this job is completed."""
        self._wait_for(job_id)

    def _seconds(self, resumed: str, first: int, jobs: int) -> float:
        """From the commit of the start signal to that of the n-th completion."""
        while True:
            found, seconds = self._row(ENDED, {"resumed": resumed, "first": first, "n": jobs})
            if found == jobs:
                return float(seconds)
            sleep(0.02)  # a second worker is still at jobs before the last one

    def _claim_buffers(self, before: int | None, first: int) -> dict[str, float]:
        """Buffers the fetching session touched per job; asked when no more is claimed and all that was is completed."""
        if before is None:
            return {}
        self._conn.execute(PAUSE, [QUEUE])
        return {"buffers": ((self._touched() or 0) - before) / self._completed(first)}

    def _touched(self) -> int | None:
        """Buffers the fetching sessions have touched so far. The queue is paused. An idle worker may ask nothing for
        long, so it is woken: with that statement its session publishes what it has touched."""
        sleep(PUBLISH_SECONDS)
        [woken] = self._row(WAKE, {"queue": QUEUE})
        for _ in range(100):
            sleep(0.02)
            [awake] = self._row(NOT_ASKED_SINCE, {"woken": woken})
            if not awake:
                break
        return buffers(self._conn, "pgqueue fetch")

    def _cpu(self) -> tuple[float, float]:
        return sum(worker.cpu() for worker in self._workers), self._lab.cpu(without=self._conn.info.backend_pid)

    def _resume(self) -> str:
        resumed, _ = self._row(RESUME, {"queue": QUEUE})
        return str(resumed)

    def _fill(self, task: str, queue: str, jobs: int) -> int:
        """Enqueue in one transaction; the last id."""
        with self._conn.transaction():
            if self._setup.keys:
                self._conn.execute(FILL_KEYED, [task, queue, self._setup.keys, jobs])
            elif self._setup.rate:
                self._conn.execute(FILL_RATED, [task, queue, self._setup.rate, jobs])
            elif self._setup.limit:
                self._conn.execute(FILL_LIMITED, [task, queue, self._setup.limit, jobs])
            elif self._setup.args is not None:
                self._conn.execute(FILL_WITH, [task, queue, self._setup.args, jobs])
            else:
                self._conn.execute(FILL, [task, queue, jobs])
            [last] = self._row("SELECT currval('pgqueue.job_id_seq'), pg_notify('pgqueue.' || %s, '')", [queue])[:1]
        return int(last)

    def _wait_for(self, job_id: int) -> None:
        self._wait_until("SELECT EXISTS (SELECT FROM pgqueue.job_done WHERE id = %s)", job_id)

    def _wait_until(self, question: LiteralString, about: int) -> None:
        deadline = monotonic() + PATIENCE
        while not self._row(question, [about])[0]:
            if monotonic() > deadline:
                raise RuntimeError(f"not so within {PATIENCE:g} s, with {about}: {question}")
            sleep(0.02)

    def _completed(self, first: int) -> int:
        return int(self._row("SELECT count(*) FROM pgqueue.job_done WHERE id >= %s", [first])[0])

    def _row(self, query: LiteralString, params: Any) -> tuple[Any, ...]:
        row = self._conn.execute(query, params).fetchone()
        assert row is not None
        return tuple(row)


@contextmanager
def track(lab: Lab, setup: Setup) -> Iterator[Track]:
    """A fresh database and warm workers on it."""
    with ExitStack() as stack:
        dsn = stack.enter_context(lab.database())
        workers = [stack.enter_context(start_worker(dsn, setup)) for _ in range(setup.workers)]
        ready = stack.enter_context(Track(lab, dsn, setup, workers))
        ready.warm()
        yield ready


@contextmanager
def start_worker(dsn: str, setup: Setup, queues: str = f"{QUEUE},warm", workers: int = 1) -> Iterator[Process]:
    """A worker process that is ready; with `workers`, so many Workers inside it."""
    options = ["--queues", queues, "--concurrency", str(setup.concurrency), "--loop", setup.loop]
    with Process("bench.worker", dsn, *options, "--workers", str(workers)) as process:
        process.hear()
        yield process


@contextmanager
def start_client(dsn: str) -> Iterator[Process]:
    """A process of the application's side that is ready."""
    with Process("bench.client", dsn) as process:
        process.hear()
        yield process


def drain(lab: Lab, setup: Setup, jobs: int) -> Sample:
    """One drain by pgqueue."""
    with track(lab, setup) as ready:
        return ready.measure(jobs)


def drain_floor(lab: Lab, connections: int, jobs: int, *, ordered: bool = False) -> Sample:
    """One drain by hand-written SQL, each connection in a process of its own."""
    with ExitStack() as stack:
        dsn = stack.enter_context(lab.database())
        clients = [stack.enter_context(start_client(dsn)) for _ in range(connections)]
        for client in clients:
            client.ask(do="warm")
        with psycopg.connect(dsn, autocommit=True) as conn:
            floors.fill(conn, jobs)
        server = lab.cpu()
        for client in clients:
            client.say(do="drain", ordered=ordered)
        found = [client.hear() for client in clients]
        server = lab.cpu() - server
        seconds = max(one["ended"] for one in found) - min(one["started"] for one in found)
        assert sum(one["jobs"] for one in found) == jobs
        return Sample(jobs, seconds, sum(one["cpu"] for one in found), server)
