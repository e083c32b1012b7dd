"""Crashes: of a worker that runs jobs, and of the server.

- `killed`: a worker that runs 20 jobs of an hour is killed by SIGKILL, while 100,000 others wait. Another worker, with
  jobs of 1 ms, is started at once. From the kill until the last of the killed worker's jobs has begun again. What has
  not within a minute is counted, and the figure is that minute (in a run that is made smaller: less, and the table says
  how much). But for the number of jobs that run at once, these are the settings of the other tables. A peer that
  cannot run 20 in a process runs what it can. Enqueueing takes 20 seconds at most (in a smaller run: less). The table
  says how many ran, and how many waited.
- `crashed`: PostgreSQL crashes and starts again while a worker works off jobs of 10 ms. From the moment when the server
  accepts connections until a job begins. Then the worker has as long for what is left. Counted are the jobs that have
  not begun by then, and those that began twice. A worker that ends is started again, as by a supervisor.
"""

from __future__ import annotations

from collections import Counter
from time import monotonic, sleep

from bench.peers.size import PATIENCE, Size, Values
from bench.peers.stage import Stage

HOUR = 3_600.0
RUNNING, WAITING = 20, 100_000
FILL_SECONDS = 20.0
REST_SECONDS = 3.0
"""A worker that begins no other job for so long has one in each of its slots."""
CRASHED_JOBS = 10_000
AGAIN_SECONDS, AGAIN_LEAST = 60.0, 35.0


def killed(stage: Stage, size: Size) -> Values:
    jobs = stage.fill_within(size.seconds(FILL_SECONDS), "application", RUNNING + WAITING)
    stage.work(starts=True, seconds=HOUR, twenty=True)
    stage.wait_for(1, PATIENCE)
    _wait_until_full(stage)
    stage.kill_work()
    begun = monotonic()
    held = {number for number, _ in stage.starts()}
    stage.work(starts=True, twenty=True)
    limit = size.seconds(AGAIN_SECONDS, AGAIN_LEAST)
    while True:
        looked = monotonic()
        again = [at - begun for at in _first_starts(stage, held, begun)]
        if len(again) == len(held) or looked - begun > limit:
            break
        sleep(max(0.01, 3 * (monotonic() - looked)))  # each look reads all that has begun
    left = len(held) - len(again)
    found = {"again_s": limit if left else max(again), "held": len(held), "waiting": jobs - len(held), "left": left}
    return {**found, "limit_s": limit}


def _wait_until_full(stage: Stage) -> None:
    """Until 20 jobs run, or as many as this worker takes."""
    ran, since = 0, monotonic()
    while (now := stage.ran().total()) < RUNNING and (now > ran or monotonic() - since < REST_SECONDS):
        if now > ran:
            ran, since = now, monotonic()
        sleep(0.05)


def _first_starts(stage: Stage, numbers: set[int], since: float) -> list[float]:
    """When each of these jobs that has begun after `since` did so first."""
    first: dict[int, float] = {}
    for number, at in stage.starts():
        if at > since and number in numbers:
            first[number] = min(at, first.get(number, at))
    return list(first.values())


def crashed(stage: Stage, size: Size) -> Values:
    jobs = min(CRASHED_JOBS, size.jobs(stage.peer.size))
    stage.fill("application", jobs)
    stage.work(starts=True, seconds=0.01)
    stage.wait_for(max(1, jobs // 10), PATIENCE)
    accepted = stage.lab.crash()
    limit = size.seconds(AGAIN_SECONDS, AGAIN_LEAST)
    until, first, revived = monotonic() + limit, limit, 0
    while (now := monotonic()) < until:
        starts = stage.starts()
        first = min([first, *(at - accepted for _, at in starts if at > accepted)])
        if len({number for number, _ in starts}) == jobs:
            break
        revived += stage.revive()
        sleep(0.05)
    begun = Counter(number for number, _ in stage.starts())
    twice = begun.total() - len(begun)
    found = {"back_s": first, "whole_s": now - accepted, "left": jobs - len(begun), "twice": twice, "revived": revived}
    return {**found, "limit_s": limit}
