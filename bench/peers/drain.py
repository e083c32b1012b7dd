"""Drains: jobs wait, worker processes are started, and how many jobs end in a second is measured."""

from __future__ import annotations

from time import monotonic

from bench.peers.size import PATIENCE, Values
from bench.peers.stage import Stage

WITH_START = "with_start"
"""In the sample of a drain: starting the processes is in its figure, for half of its jobs were begun meanwhile."""


def drain(stage: Stage, jobs: int, processes: int) -> Values:
    """Drain all that waits, `jobs`, with so many processes, which end then."""
    transactions, started, at_start = stage.transactions(), monotonic(), stage.counters()
    stage.work(processes)
    begun = stage.wait_for_each(processes, jobs, PATIENCE)
    before = stage.counters()
    counted = jobs - stage.ran().total()
    if too_few := counted < jobs / 2:
        counted, begun, before = jobs, started, at_start
    stage.wait_for(jobs, PATIENCE)
    ended = stage.wait_until_done(PATIENCE)
    after = stage.counters()
    stage.stop_work()
    grown = {name: (after[name] - before[name]) / counted for name in before}
    return {
        "jobs_s": counted / (ended - begun),
        "server_us": 1e6 * grown["server_cpu"],
        "worker_us": 1e6 * grown["worker_cpu"],
        **({WITH_START: 1.0} if too_few else {}),
        **({"wal_bytes": grown["wal"]} if "wal" in grown else {}),
        **({"transactions": (stage.transactions() - transactions) / jobs} if stage.dsn else {}),
    }
