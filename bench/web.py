"""How quick every page of the dashboard is beside very many jobs, and how much memory its process takes.

A real `pgqueue web` is asked over HTTP. First one visitor asks for each page, as often as the rounds say. By then the
page is warm. Then ten visitors ask for it at once, and the goal is the p95 of what each of them waits. The next ten ask
when the last of these has an answer, so each page is asked ten times as often by them. With `--quick` two ask.

Beside it runs a real worker of a queue without jobs: it leads, so it measures how many jobs there are, as in
production. At full size 1,000,000 jobs wait and 1,000,000 have ended, with all that other pages show. `--jobs 10000000`
is the largest size that the goals speak of. Filling takes some minutes then. `--jobs 300000` measures beside so many.

No page has a filter that finds enough at once, unless its name says so: a search that finds nothing looks at all of its
20,000 jobs, so it is the slowest one.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection
from statistics import median
from threading import Barrier
from time import monotonic, sleep
from typing import Any
from urllib.parse import quote

import click
import psutil
import psycopg

from bench.figures import Figure, Goal
from bench.history import finish
from bench.processes import ROOT, compiled
from bench.run import QUICK, Run
from bench.samples import percentile
from bench.track import FILL
from pgqueue import Flow, Node, remote
from pgqueue.web.flow_graph import NODES_MOST

JOBS = 1_000_000
"""So many wait, and so many have ended."""
DEAD_SHARE = 4
"""One in so many of those that have ended has failed or was cancelled; four of five of these have failed."""
MOST_MILLISECONDS, MOST_MIB = 150.0, 80.0
MOST_KB, MOST_STYLE_KB = 60.0, 32.0
"""Of a page with 50 rows, and of the style sheet."""
LARGER = "limit=500"
"""A list that is asked for so many rows has no goal for its size. Neither have the numbers for Prometheus."""
VISITORS = 10
"""So many ask for each page at once: more than twice as many as there are connections."""
PATIENCE = 300.0  # seconds until the worker has measured

Conn = psycopg.Connection[Any]

MORE = (
    """
    INSERT INTO pgqueue.job_blocked (state, task, lock_key, key)
    SELECT 'blocked', 'bench.noop', 'one', 'lock:one' FROM generate_series(1, least({jobs}, 10000))
    """,
    """
    INSERT INTO pgqueue.job_blocked (state, task, limit_key, key)
    SELECT 'blocked', 'bench.noop', 'slow', 'limit:slow' FROM generate_series(1, least({jobs}, 10000))
    """,
    """
    INSERT INTO pgqueue.job_scheduled (state, task, run_at, attempt, reason)
    SELECT 'scheduled', 'bench.noop', pgqueue.now() + make_interval(secs => 3600 + n), mod(n, 2), 'OSError: no route'
    FROM generate_series(1, {jobs} / 10) AS n
    """,
    """
    INSERT INTO pgqueue.attempt (job_id, enqueued_at, claim, attempt, worker_id, started_at, finished_at, bin, outcome,
        error_type, message, traceback)
    SELECT id, enqueued_at, 1, 1, 7, finished_at, finished_at, mod(id, 14), 'failed', 'OSError', 'no route to ' || id,
        E'Traceback (most recent call last):\\n  File "/app/shop.py", line 7, in charge\\nOSError: no route'
    FROM pgqueue.job_dead
    """,
    """
    INSERT INTO pgqueue.schedule (name, line, tz, catch_up, task, args, queue, priority, options, next_at)
    SELECT 'report:' || n, mod(n, 60) || ' 9 * * MON-FRI', 'Europe/Berlin', 'latest', 'app.report', '{{}}', 'idle', 5,
        '{{}}', pgqueue.now() + interval '1 day'
    FROM generate_series(1, 200) AS n
    """,
    """
    INSERT INTO pgqueue.error_group (fingerprint, queue, task, error_type, place, message, first_at, last_at, count,
        job_ids)
    SELECT md5(n::text), 'queue_' || mod(n, 7), 'app.task_' || mod(n, 20), 'OSError', 'shop.charge', 'no route',
        pgqueue.now() - interval '1 day', pgqueue.now(), n, ARRAY[n, n + 1]
    FROM generate_series(1, 2000) AS n
    """,
    """
    INSERT INTO pgqueue.history_minute (at, bin, queue, task, started, completed, failed, wait, run)
    SELECT date_trunc('minute', pgqueue.now()) - make_interval(mins => minute),
        (SELECT bin FROM pgqueue.ring WHERE kind = 'minute'), 'queue_' || mod(task, 7), 'app.task_' || task,
        100, 98, 2, ARRAY[10, 50, 30, 8, 2], ARRAY[10, 50, 30, 8, 2]
    FROM generate_series(2, 1439) AS minute, generate_series(1, 20) AS task
    """,
    """
    INSERT INTO pgqueue.history_hour (at, bin, queue, task, started, completed, failed, wait, run)
    SELECT date_trunc('hour', pgqueue.now()) - make_interval(hours => hour),
        (SELECT bin FROM pgqueue.ring WHERE kind = 'hour'), 'queue_' || mod(task, 7), 'app.task_' || task,
        6000, 5880, 120, ARRAY[10, 50, 30, 8, 2], ARRAY[10, 50, 30, 8, 2]
    FROM generate_series(1, 719) AS hour, generate_series(1, 20) AS task
    """,
    """
    INSERT INTO pgqueue.worker (lease, pid, concurrency, host, version_tag, queues, state, tasks, beat_at)
    SELECT '1 hour', n, 10, 'host-' || mod(n, 10), 'v1', ARRAY['default', 'mail'], 'running', ARRAY['bench.noop'],
        pgqueue.now()
    FROM generate_series(1, 100) AS n
    """,
    """
    INSERT INTO pgqueue.job_running (state, task, lock_key, holds, worker_id, claim, started_at)
    SELECT 'running', 'bench.noop', CASE n WHEN 1 THEN 'one' END, n = 1,
        (SELECT min(id) FROM pgqueue.worker) + mod(n, 100), n, pgqueue.now()
    FROM generate_series(1, 1000) AS n
    """,
    """
    INSERT INTO pgqueue.audit (at, actor, action, target, jobs)
    SELECT pgqueue.now() - make_interval(secs => n * 60), 'ann', 'pause', '{{"queue": "mail"}}', ARRAY[n]
    FROM generate_series(1, 10000) AS n
    """,
    """
    INSERT INTO pgqueue.bulk (actor, action, target, states, up_to, ended_at)
    VALUES ('ann', 'retry', '{{"states": ["failed"]}}', ARRAY['failed'], 1, pgqueue.now())
    """,
    "INSERT INTO pgqueue.bulk_job SELECT id, 'held', n FROM pgqueue.bulk, generate_series(1, 1000) AS n",
)
SOME = """
    SELECT (SELECT min(id) FROM pgqueue.job_available), (SELECT max(id) FROM pgqueue.job_available),
        (SELECT max(id) FROM pgqueue.job_blocked), (SELECT max(id) FROM pgqueue.job_scheduled),
        (SELECT max(id) FROM pgqueue.job_running), (SELECT max(id) FROM pgqueue.job_dead),
        (SELECT min(id) FROM pgqueue.job_done), (SELECT max(id) FROM pgqueue.job_done),
        (SELECT max(id) / 2 FROM pgqueue.job_available), (SELECT max(id) FROM pgqueue.bulk),
        (SELECT max(id) FROM pgqueue.flow)
"""


def web(run: Run) -> list[Figure]:
    """Every page of the dashboard beside 1,000,000 waiting and 1,000,000 finished jobs; the memory of its process."""
    jobs, many = run.web_jobs or run.jobs(JOBS), VISITORS if run.scale > QUICK else 2
    with run.lab.database() as dsn, compiled() as environment:
        pages = _fill(dsn, jobs)
        with _worker(dsn, environment), _dashboard(dsn, environment) as (process, port):
            if run.scale > QUICK:  # else the pages measure by themselves: a worker takes half a minute for its first
                _measured(dsn)
            before = _rss(process)
            alone, together = {}, {}
            with ThreadPoolExecutor(many) as visitors:
                for name, path in pages.items():
                    alone[name] = [_ask(port, path) for _ in range(run.rounds)]
                    together[name] = [one for _ in range(run.rounds) for one in _at_once(visitors, many, port, path)]
            after = _rss(process)
    failed = [f"{name}: {said}" for name in pages for _, _, said in alone[name] + together[name] if said]
    for line in failed[:20]:
        click.echo(line, err=True)
    figures = []
    for name in pages:
        taken = [milliseconds for milliseconds, _, _ in together[name]]
        figures.append(Figure("web", f"{name}, one visitor", median(one for one, _, _ in alone[name]), "ms"))
        figures.append(Figure("web", f"{name}, p50", median(taken), "ms"))
        goal = Goal(MOST_MILLISECONDS, at_most=True)
        figures.append(Figure("web", f"{name}, p95", percentile(taken, 95), "ms", goal))
        size = max(kilobytes for _, kilobytes, _ in alone[name] + together[name])
        figures.append(Figure("web", f"{name}, size", size, "kB", _most(name, pages[name])))
    figures.append(Figure("web", "answers that failed", len(failed), "", Goal(0, at_most=True)))
    figures.append(Figure("web", "memory, before the first page", before, "MiB"))
    figures.append(Figure("web", "memory, after all", after, "MiB", Goal(MOST_MIB, at_most=True)))
    return figures


def _most(name: str, path: str) -> Goal | None:
    """How large this page may be; None if that is not said."""
    if name == "metrics" or LARGER in path:
        return None
    return Goal(MOST_STYLE_KB if name == "style" else MOST_KB, at_most=True)


def _fill(dsn: str, jobs: int) -> dict[str, str]:
    """Fill the database; return the pages to ask for, by name."""
    with psycopg.connect(dsn, autocommit=True) as conn:
        finish(conn, jobs, DEAD_SHARE)
        conn.execute(FILL, ["bench.noop", "mail", jobs // 10])
        conn.execute(FILL, ["bench.noop", "default", jobs - jobs // 10])
        keyed = "SELECT pgqueue.enqueue('bench.noop', unique_key => 'bench:7')"
        [[unique]] = conn.execute(keyed).fetchall()
        conn.execute(FILL, ["bench.noop", "default", 30_000])
        for statement in MORE:
            conn.execute(statement.format(jobs=jobs).encode())
        _flow().enqueue(conn)
        conn.execute("VACUUM ANALYZE")
        conn.execute("CHECKPOINT")
        [ids] = conn.execute(SOME).fetchall()
    return _pages(unique, *ids)


def _flow() -> Flow:
    """As many nodes as a graph has, twenty beside each other."""
    flow, step = Flow("bench"), remote("bench.noop").using(queue="flows")
    nodes: list[Node[Any]] = []
    for at in range(NODES_MOST):
        nodes.append(flow.add(step.new(n=at), name=f"part {at}", after=nodes[-20:][:1] if at >= 20 else ()))
    return flow


def _pages(unique: int, *ids: int) -> dict[str, str]:
    first, last, blocked, scheduled, running, dead, done, newest, middle, bulk, flow = ids
    lists = {"newest": "", "of a queue": "queue=default", "unique key": "key=bench:7"}
    lists |= {state: f"state={state}" for state in STATES}
    lists |= {f"no {name}": query for name, query in NOTHING.items()}
    lists |= {f"no {name}, ended": f"{query}&state=completed&state=failed" for name, query in NOTHING.items()}
    lists |= {"far behind": f"after={middle}&limit=500", "500 ended": "state=completed&limit=500"}
    found = {"overview": "/"} | {f"jobs, {name}": f"/jobs?{query}" for name, query in lists.items()}
    shown = {"first": first, "last": last, "blocked": blocked, "scheduled": scheduled, "running": running}
    shown |= {"failed": dead, "newest completed": newest, "oldest completed": done, "with a key": unique}
    found |= {f"job, {name}": f"/jobs/{id}" for name, id in (shown | {"not there": 1 << 50}).items()}
    found |= {name: f"/{name}" for name in ("queues", "limits", "schedules", "workers", "errors", "outbox", "enqueue")}
    found |= {f"history, {name}": f"/history?range={name}" for name in ("1h", "6h", "24h", "30d")}
    found |= {"history, a queue": "/history?range=24h&queue=queue_3"}
    found |= {"metrics": "/metrics", "a limit's jobs": "/limits/jobs?limit=slow"}
    found |= {"queue": "/queue?name=queue_3", "queue, deep": "/queue?name=default"}
    found |= {f"tasks, {name}": f"/tasks?range={name}" for name in ("1h", "6h", "24h")}
    found |= {f"task, {name}": f"/task?name=app.task_3&range={name}" for name in ("1h", "6h", "24h", "30d")}
    found |= {"changes": "/changes", "changes by an actor": "/changes?actor=bench", "no change": "/changes?actor=none"}
    found |= {"flows": "/flows", "flow": f"/flows/{flow}", "flow, preview": f"/flows/{flow}/change?action=cancel"}
    found |= {"operations": "/bulk", "operation": f"/bulk/{bulk}"}
    return found | {"preview": "/bulk/new?action=retry&state=failed", "style": "/static/pgqueue.css"}


STATES = ("available", "scheduled", "retrying", "blocked", "running", "completed", "failed")
NOTHING: Mapping[str, str] = {
    "task": "task=none",
    "key": "key=none",
    "argument": "arg=order=-1",
    "worker": "worker=4711",
    "class": "error_type=None",
    "error": f"error={quote('not there')}",
    "since": "since=2099-01-01",
}


@contextmanager
def _worker(dsn: str, environment: dict[str, str]) -> Iterator[None]:
    """A worker of a queue without jobs. It leads, and measures how many jobs there are."""
    command = [sys.executable, "-m", "pgqueue", "work", "bench.tasks", "-q", "idle", "--log-level", "error"]
    child = subprocess.Popen(command, env=environment | {"PGQUEUE_DSN": dsn}, cwd=ROOT)
    try:
        yield
    finally:
        child.terminate()
        child.wait(40)


@contextmanager
def _dashboard(dsn: str, environment: dict[str, str]) -> Iterator[tuple[psutil.Process, int]]:
    """`pgqueue web`, and its port. Nothing is redacted: so the text of errors can be searched, too."""
    command = [sys.executable, "-m", "pgqueue", "web", "--open", "--no-redaction", "--bind", "127.0.0.1:0"]
    command += ["--log-level", "warning"]
    pipe = subprocess.PIPE
    child = subprocess.Popen(command, env=environment | {"PGQUEUE_DSN": dsn}, cwd=ROOT, stderr=pipe, text=True)
    try:
        assert child.stderr is not None
        for line in child.stderr:
            if found := re.search(r"http://127\.0\.0\.1:(\d+)/", line):
                yield psutil.Process(child.pid), int(found[1])
                break
        else:
            raise RuntimeError("pgqueue web has ended")
    finally:
        child.terminate()
        child.communicate(timeout=40)


def _measured(dsn: str) -> None:
    """Wait until the worker has measured."""
    began = monotonic()
    with psycopg.connect(dsn, autocommit=True) as conn:
        while conn.execute("SELECT 1 FROM pgqueue.depth LIMIT 1").fetchone() is None:
            if monotonic() - began > PATIENCE:
                raise RuntimeError("no worker has measured how many jobs there are")
            sleep(0.2)


def _at_once(visitors: ThreadPoolExecutor, many: int, port: int, path: str) -> list[tuple[float, float, str]]:
    """The answers to so many requests of the same moment; returned when the last of them has an answer."""
    start = Barrier(many)

    def ask(_: int) -> tuple[float, float, str]:
        start.wait()
        return _ask(port, path)

    return list(visitors.map(ask, range(many)))


def _ask(port: int, path: str) -> tuple[float, float, str]:
    """Milliseconds of one request on a connection of its own, the kB of the answer, and what the page says if it has
    failed, or a part of it."""
    began = monotonic()
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        body = answer.read()
    finally:
        connection.close()
    took = (monotonic() - began) * 1e3
    if answer.status in (200, 404) and b"A part of this page is missing" not in body:
        return took, len(body) / 1e3, ""
    said = re.search(rb'<p class="problem"[^>]*>(.*?)</p>', body, re.DOTALL)
    return took, len(body) / 1e3, f"{answer.status} {(said[1] if said else body).decode(errors='replace')[:300]}"


def _rss(process: psutil.Process) -> float:
    """MiB of the dashboard's process."""
    return float(process.memory_info().rss) / (1 << 20)
