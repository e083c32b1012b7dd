"""Statements a job: how often a worker asks PostgreSQL for something between the claim of a job and its end.

1. A drain of its own, with one worker process and a fifth of the jobs. The server logs each statement, which costs
   time. So no other figure is of this drain, and a peer whose batches follow its pace may take other ones.
2. Counted is each execution that a client has sent, BEGIN, COMMIT and each one of a pipeline among them. What a
   function or a trigger executes inside is not counted.
3. Counted are those from the moment when the worker has begun a job until the peer knows all as done. They are
   divided by the jobs that had not begun at that moment. Where these are less than half, the start of the worker and
   all jobs count.
4. Sessions of the bench itself are not logged.
"""

from __future__ import annotations

import re
from pathlib import Path

from bench.peers.size import PATIENCE, Size
from bench.peers.stage import Stage

SHARE = 5
_STATEMENT = re.compile(rb"^[^\t\n][^\n]*? LOG:  (?:statement|execute [^:\n]*): ", re.MULTILINE)


def statements(stage: Stage, size: Size) -> float:
    """Statements a job of this peer, in a drain of jobs that this enqueues."""
    jobs = size.jobs(stage.peer.size // SHARE)
    stage.fill("noop", jobs)
    with stage.lab.logged(stage.dsn) as log:
        since = log.stat().st_size
        stage.work()
        stage.wait_for_each(1, jobs, PATIENCE)
        begun, counted = log.stat().st_size, jobs - stage.ran().total()
        if counted < jobs / 2:
            begun, counted = since, jobs
        stage.wait_for(jobs, PATIENCE)
        stage.wait_until_done(PATIENCE)
        ended = log.stat().st_size
    stage.stop_work()
    return executed(log, begun, ended) / counted


def executed(log: Path, since: int, until: int) -> int:
    """How many statements the server has logged between these two places of its log."""
    with log.open("rb") as file:
        file.seek(since)
        return len(_STATEMENT.findall(file.read(until - since)))
