"""What workers cost that have nothing to do.

Statements are round trips: each message of a worker is one transaction, so the transactions of its database are counted
(`pg_stat_database`, read from another database), over 30 s after 10 s of settling. The observer is not in them.
"""

from __future__ import annotations

from contextlib import ExitStack
from time import sleep

import psycopg

from bench.figures import Figure, Goal
from bench.run import Run
from bench.track import Setup, Track, start_worker
from pgqueue.database import statements

SECONDS, SETTLE = 30.0, 10.0
FLEET, PROCESSES = 100, 4


def idle(run: Run) -> list[Figure]:
    """One idle worker process: statements/s, connections, resident memory; the leader and one that does not lead.

    The one that leads has worked off a few thousand jobs before, the other none. That one is counted beside a session
    that leads and does nothing: a leader's rounds come once a minute or less often, so that what it used in one window
    says nothing of the next.
    """
    with run.lab.database() as dsn, start_worker(dsn, Setup()) as first:
        fresh = first.rss()
        with Track(run.lab, dsn, Setup(), [first]) as ready:
            ready.warm()
        leader, connected, worked = _statements(run, dsn), run.lab.connections(dsn), first.rss()
    with run.lab.database() as dsn, psycopg.connect(dsn, autocommit=True, application_name="pgqueue listen") as leads:
        leads.execute(statements.text("election_try", "pgqueue").encode())
        with start_worker(dsn, Setup()):
            follower, more = _statements(run, dsn), run.lab.connections(dsn) - 1
    memory = Goal(55, 45, at_most=True)
    return [
        Figure("idle", "leader, statements", leader, "/s", Goal(1.0, at_most=True)),
        Figure("idle", "not leading, statements", follower, "/s", Goal(0.3, at_most=True)),
        Figure("idle", "connections, never worked", more, "", Goal(3, at_most=True)),
        Figure("idle", "connections, has worked and leads", connected, "", Goal(4, at_most=True)),
        Figure("idle", "RSS, never worked", fresh, "MiB", memory),
        Figure("idle", "RSS, has worked", worked, "MiB", memory),
        Figure("idle", "RSS on plain asyncio", _memory(run, Setup(loop="asyncio")), "MiB", memory),
    ]


def fleet(run: Run) -> list[Figure]:
    """F09: 100 idle Workers in 4 processes, one of them the leader: statements/s and connections of each."""
    each = max(2, round(FLEET / PROCESSES * min(1.0, run.scale)))
    workers = each * PROCESSES
    with run.lab.database() as dsn, ExitStack() as stack:
        processes = [stack.enter_context(start_worker(dsn, Setup(), workers=each)) for _ in range(PROCESSES)]
        sleep(run.seconds(SETTLE))
        cpu = sum(process.cpu() for process in processes), run.lab.cpu()
        rate = _statements(run, dsn)
        client, server = sum(process.cpu() for process in processes) - cpu[0], run.lab.cpu() - cpu[1]
        connections = run.lab.connections(dsn) / workers
        seconds = run.seconds(SETTLE) + run.seconds(SECONDS)
    return [
        Figure("fleet", f"statements of {workers}, each", rate / workers, "/s", Goal(1.0, at_most=True)),
        Figure("fleet", "connections, each", connections, "", Goal(3 + 1 / workers, at_most=True)),
        Figure("fleet", "server CPU of one core", 100 * server / seconds, "%"),
        Figure("fleet", "client CPU of one core", 100 * client / seconds, "%"),
    ]


def _memory(run: Run, setup: Setup) -> float:
    with run.lab.database() as dsn, start_worker(dsn, setup) as worker:
        sleep(run.seconds(SETTLE))
        return worker.rss()


def _statements(run: Run, dsn: str) -> float:
    """Transactions a second in that database, once it has settled."""
    with run.lab.without_autovacuum():
        sleep(run.seconds(SETTLE))
        before = run.lab.transactions(dsn)
        seconds = run.seconds(SECONDS)
        sleep(seconds)
        return (run.lab.transactions(dsn) - before) / seconds
