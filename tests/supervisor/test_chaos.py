"""The supervisor for longer: a thousand restarts, a job of half an hour, a leak under a memory limit of the kernel,
everything at once."""

from __future__ import annotations

import os
import random
import re
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from time import monotonic, sleep

import pytest
from supervised import TASKS, Flow, Sampler, Supervised, gone, put, supervised
from workers import Eyes, wait_until

LEAKS = (
    TASKS
    + """
LEAKED = []

@pgqueue.task(name="leaks")
def leaks(job: pgqueue.Job, mib: int = 10) -> None:
    say("ran", job=job.id)
    LEAKED.append(bytearray(os.urandom(1)) * (mib << 20))

@pgqueue.task(name="takes_a_while")
async def takes_a_while(job: pgqueue.Job) -> None:
    await asyncio.sleep(0.3)
    LEAKED.append(bytearray(os.urandom(1)) * (1 << 20))
"""
)


# Restarts ------------------------------------------------------------------------------------------------------------


@pytest.mark.second
@pytest.mark.promise("S01", "S02", "S03", "S04", "S08")
@pytest.mark.parametrize(
    "number, seconds",
    [(5, 0), pytest.param(1_000, 0, marks=pytest.mark.long), pytest.param(3, 1_800, marks=pytest.mark.long)],
)
def test_of_many_restarts_none_ends_a_process_that_runs_a_job(
    number: int, seconds: float, tmp_path: Path, dsn: str, eyes: Eyes
) -> None:
    """The log of what was killed, joined to what ran. Every third restart comes into the one before.

    All processes of the beginning are full of jobs that outlast the restarts; one of them takes no more because there
    shall be fewer, the others because of the first restart.
    """
    with supervised(tmp_path, dsn, processes=3) as one, Sampler(dsn) as sampler, Flow(dsn, 60, "short") as flow:
        # After short jobs a process takes some beyond its slots: none may keep one that another has a slot for.
        wait_until(lambda: len(one.events("ran")) > 60)
        jobs = put(eyes, "held", '{"name": "go"}', 20) + put(eyes, "held_thread", '{"name": "go"}', 10)
        wait_until(lambda: len(one.events("began")) == len(jobs))
        busy = {event["pid"] for event in one.events("began")}
        assert busy == one.pids()
        one.signal(signal.SIGTTOU)
        wait_until(lambda: sum(title.endswith("quiet") for title in one.titles().values()) == 1)
        restarts, ends = 0, monotonic() + seconds
        while restarts < number or monotonic() < ends:
            before = one.counts("the restart is through"), one.counts("rolling restart")
            one.signal(signal.SIGHUP)
            if restarts % 3:
                one.says_again("rolling restart", before[1])
            else:
                one.says_again("the restart is through", before[0], 300)
            restarts += 1
            sleep(seconds / 30)
        before_last = one.counts("the restart is through")
        one.signal(signal.SIGHUP)
        one.says_again("the restart is through", before_last, 300)
        assert busy <= one.pids() and not one.events("ended")
        (tmp_path / "go").touch()
        wait_until(gone(busy))
        wait_until(lambda: eyes.one("SELECT count(*) FROM pgqueue.job_done") >= flow.enqueued - 100, 60)
        assert_nobody_was_killed_at_work(one)
    took = "SELECT min(finished_at - started_at) >= make_interval(secs => %s) FROM pgqueue.job_done WHERE id = ANY(%s)"
    assert eyes.one(took, seconds, jobs)
    assert eyes.one("SELECT count(*) FROM pgqueue.attempt") == 0
    assert sampler.least >= 2, sampler.samples
    for event in "began", "ended":
        assert Counter(event["job"] for event in one.events(event)) == Counter(jobs)
    ran = Counter(event["job"] for event in one.events("ran"))
    assert set(ran.values()) == {1}
    print(f"{restarts + 1} restarts; {len(ran)} jobs beside {len(jobs)} that outlasted them")


KILLED = "is ended before it took a job"


def assert_nobody_was_killed_at_work(one: Supervised) -> None:
    """Nobody was sent a TERM; those that were sent a KILL have run nothing in their lives. (A pid may come again.)"""
    assert one.counts("is killed") == one.counts("SIGTERM") == one.counts("a handler that was given up") == 0
    lives: dict[str, dict[str, tuple[int, float]]] = {}
    said = rf"^(\S+) \w+ pgqueue\[\d+\]: process (\d+) \(pid (\d+)[^)]*\): (is started|{KILLED}|was killed by)"
    for at, number, pid, what in re.findall(said, one.worker.output, re.MULTILINE):
        lives.setdefault(number, {})[what] = int(pid), datetime.fromisoformat(at).timestamp()
    assert all(KILLED in life for life in lives.values() if "was killed by" in life), "somebody else has killed"
    killed = [life for life in lives.values() if KILLED in life]
    ran: dict[int, list[float]] = {}
    for event in one.events("ran"):
        ran.setdefault(event["pid"], []).append(event["time"])
    for life in killed:
        (pid, started), (_, ended) = life["is started"], life[KILLED]
        assert not [at for at in ran.get(pid, []) if started <= at <= ended + 1.0]
    print(f"{len(lives)} processes, {len(killed)} of them ended before they took a job")


# Memory --------------------------------------------------------------------------------------------------------------


class Cgroup:
    """A memory cgroup of the test's own, of version 1 or 2."""

    def __init__(self, limit: int) -> None:
        root = Path("/sys/fs/cgroup")
        self.unified = (root / "cgroup.controllers").exists()
        self.path = (root if self.unified else root / "memory") / f"pgqueue-test-{os.getpid()}-{random.getrandbits(32)}"
        self.path.mkdir()
        (self.path / ("memory.max" if self.unified else "memory.limit_in_bytes")).write_text(str(limit))
        with suppress(OSError):  # without swap accounting there is no such file
            (self.path / ("memory.swap.max" if self.unified else "memory.memsw.limit_in_bytes")).write_text(
                "0" if self.unified else str(limit)
            )

    def add(self, pid: int) -> None:
        (self.path / "cgroup.procs").write_text(str(pid))

    @property
    def pids(self) -> set[int]:
        return {int(pid) for pid in (self.path / "cgroup.procs").read_text().split()}

    @property
    def kills(self) -> int:
        """How many processes of it the kernel has killed."""
        name = "memory.events" if self.unified else "memory.oom_control"
        counts = dict(line.split() for line in (self.path / name).read_text().splitlines())
        return int(counts["oom_kill"])

    def close(self) -> None:
        wait_until(lambda: not self.pids)
        self.path.rmdir()


@pytest.fixture
def cgroup() -> Iterator[Cgroup]:
    try:
        made = Cgroup(700 << 20)
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    yield made
    made.close()


@pytest.mark.second
@pytest.mark.promise("S15", "S16", "S18")
@pytest.mark.parametrize("seconds", [8, pytest.param(3_600, marks=pytest.mark.long)])
def test_a_leak_is_outrun_under_a_limit_of_the_kernel(
    seconds: float, tmp_path: Path, dsn: str, eyes: Eyes, cgroup: Cgroup
) -> None:
    """The limit is what 2 N processes may have, and some headroom: no OOM kill, no job run twice."""
    options = ["--memory-limit", "140M", "--check-every", "100ms", "--concurrency", "2"]
    with supervised(tmp_path, dsn, *options, source=LEAKS, processes=2, ready=False) as one:
        cgroup.add(one.pid)
        one.worker.says("ready: ")
        assert one.pids() < cgroup.pids
        with Sampler(dsn) as sampler:
            leaked, ends = leak(eyes, seconds)
        wait_until(eyes.done(leaked), 60)
        replaced = one.counts("over its memory limit; is replaced")
        print(f"{leaked} jobs of 10 MiB, {replaced} processes replaced, {cgroup.kills} OOM kills")
        assert replaced >= 2 and cgroup.kills == 0 and ends
        assert eyes.all("SELECT DISTINCT attempt, crashes FROM pgqueue.job") == [(1, 0)]
        assert_nobody_was_killed_at_work(one)
        assert sampler.least >= 2, sampler.samples


@pytest.mark.second
@pytest.mark.promise("S16")
def test_without_a_memory_limit_the_same_leak_is_killed_by_the_kernel(
    tmp_path: Path, dsn: str, eyes: Eyes, cgroup: Cgroup
) -> None:
    with supervised(tmp_path, dsn, "--concurrency", "2", source=LEAKS, processes=2, ready=False) as one:
        cgroup.add(one.pid)
        one.worker.says("ready: ")
        put(eyes, "leaks", number=120)
        wait_until(lambda: cgroup.kills >= 1)
        one.worker.says("was killed by SIGKILL")


def leak(eyes: Eyes, seconds: float) -> tuple[int, float]:
    """Leak 10 MiB ten times a second; how often."""
    leaked, ends = 0, monotonic() + seconds
    while (now := monotonic()) < ends:
        due = int(10 * (seconds - (ends - now)))
        if due > leaked:
            leaked += len(put(eyes, "leaks", number=due - leaked))
        sleep(0.02)
    return leaked, ends


# Everything at once --------------------------------------------------------------------------------------------------


@pytest.mark.second
@pytest.mark.promise("S09", "S10", "S17")
@pytest.mark.parametrize("seconds", [6, pytest.param(600, marks=pytest.mark.long)])
def test_nothing_is_lost_in_a_chaos_of_kills_restarts_leaks_and_numbers(
    seconds: float, tmp_path: Path, dsn: str, eyes: Eyes
) -> None:
    choose = random.Random(7)
    options = ["--memory-limit", "150M", "--check-every", "200ms", "--lease", "3s"]
    with supervised(tmp_path, dsn, *options, source=LEAKS, processes=3) as one:
        done = Counter[str]()
        with Flow(dsn, 60) as quick, Flow(dsn, 15, "takes_a_while") as slow, Flow(dsn, 1, "leaks") as leaking:
            ends = monotonic() + seconds
            while monotonic() < ends:
                event = choose.choice(["kill", "kill", "restart", "scale", "quiet"])
                done[event] += 1
                if event == "kill" and (pids := sorted(one.pids())):
                    with suppress(ProcessLookupError):
                        os.kill(choose.choice(pids), signal.SIGKILL)
                elif event == "restart":
                    one.signal(signal.SIGHUP)
                elif event == "scale":
                    one.signal(choose.choice([signal.SIGTTIN, signal.SIGTTOU]))
                elif event == "quiet":
                    one.signal(signal.SIGUSR1)
                    one.signal(signal.SIGHUP)
                sleep(choose.uniform(0.1, 1.0))
            one.signal(signal.SIGHUP)
        enqueued = quick.enqueued + slow.enqueued + leaking.enqueued
        drained(eyes, enqueued)
        assert set(eyes.states()) <= {"completed", "failed"}
        crashed = eyes.one("SELECT count(*) FROM pgqueue.job WHERE reason = 'crashed'")
        assert eyes.states().get("failed", 0) == crashed
        print(f"{dict(done)}; {enqueued} jobs, {crashed} put aside as killers, {dict(eyes.states())}")
        assert eyes.one("SELECT count(*) FROM pgqueue.attempt WHERE outcome NOT IN ('crashed', 'memory')") == 0


def drained(eyes: Eyes, enqueued: int) -> None:
    """Wait until so many have ended, for as long as some do: how long it takes is the machine's.

    After a restart out of quiet none works before all have announced themselves; on a busy machine that is minutes.
    """
    sql = "SELECT count(*) FROM pgqueue.job WHERE state IN ('completed', 'skipped', 'failed', 'cancelled')"
    ended, since = 0, monotonic()
    while ended < enqueued:
        if (now := eyes.one(sql)) > ended:
            ended, since = now, monotonic()
        assert monotonic() - since < 300, f"{ended} of {enqueued} have ended, no other for minutes: {eyes.states()}"
        sleep(0.1)
