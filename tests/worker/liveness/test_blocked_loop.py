"""What a blocked event loop keeps from other workers goes to them while it is blocked: jobs that wait, and the lead."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psycopg
import pytest
from worker_states import worker_state
from workers import Eyes, Process, Workers, until, wait_until, work, workers

import pgqueue
from pgqueue import Job, NewJob, Worker, remote, task
from pgqueue.database.sessions import Link, Session
from pgqueue.database.statements import Statement
from pgqueue.jobs.fields import claimed
from pgqueue.worker.liveness import loop_monitor
from pgqueue.worker.liveness.blocked_loop import BlockedLoop
from pgqueue.worker.liveness.loop_monitor import LoopMonitor
from pgqueue.worker.run.running_jobs import RunningJobs

TASKS = """
GO = os.environ["GO"]

@pgqueue.task(name="blocked.quick")
async def quick(): ...

@pgqueue.task(name="blocked.blocks")
async def blocks():
    say("blocks")
    while not os.path.exists(GO):
        time.sleep(0.01)

@pgqueue.task(name="blocked.waits")
async def waits(job: pgqueue.Job):
    say("ran", job=job.id)

@pgqueue.task(name="blocked.thread")
def thread(job: pgqueue.Job):
    say("ran", job=job.id)
"""
QUICK, MANY = remote("blocked.quick"), 300
"""So many quick jobs make a worker take more than it has slots for."""


@pytest.fixture
def go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GO", str(tmp_path / "go"))
    return tmp_path / "go"


def put(dsn: str, *jobs: NewJob[Any]) -> list[int]:
    with psycopg.connect(dsn) as conn:
        return [handle.id for handle in pgqueue.enqueue_many(conn, jobs)]


def ran(*processes: Process) -> Counter[int]:
    """The jobs that have run there, and how often."""
    return Counter(event["job"] for process in processes for event in process.all("ran"))


def blocked(made: Workers, dsn: str, *behind: NewJob[Any], locked: bool = False) -> tuple[Process, list[int]]:
    """A worker whose loop is blocked, and the jobs that came behind the one that blocks it.

    Jobs that have a lock, each of its own, do not queue with the others. So with `locked` all have one.
    """
    blocks = remote("blocked.blocks")
    first = [QUICK.using(lock=f"quick {number}").new() if locked else QUICK.new() for number in range(MANY)]
    [busy] = made.ready(concurrency=2)
    jobs = put(dsn, *first, (blocks.using(lock="blocks") if locked else blocks).new(), *behind)
    busy.event("blocks")
    return busy, jobs[MANY + 1 :]


@pytest.mark.promise("F180")
@pytest.mark.parametrize(
    "kind", ["async", *(pytest.param(kind, marks=pytest.mark.second) for kind in ("thread", "lock"))]
)
def test_jobs_that_wait_behind_a_blocked_loop_run_elsewhere_while_it_is_blocked(
    kind: str, tmp_path: Path, go: Path, dsn: str, eyes: Eyes
) -> None:
    def new(number: int) -> NewJob[Any]:
        waits = remote("blocked.thread" if kind == "thread" else "blocked.waits")
        return waits.using(lock=f"customer {number}" if kind == "lock" else None).new()

    with workers(tmp_path, dsn, TASKS) as made:
        busy, behind = blocked(made, dsn, *map(new, range(20)), locked=kind == "lock")
        held = {job for (job,) in eyes.all("SELECT id FROM pgqueue.job_running")}.intersection(behind)
        assert len(held.difference(ran(busy))) > 1  # the others are any worker's anyhow
        [other] = made.ready()
        wait_until(lambda: ran(busy, other).keys() >= set(behind), 20.0)
        assert not go.exists()
        go.touch()
        wait_until(eyes.done(MANY + 1 + len(behind)))
        busy.stop()
        other.stop()
        assert ran(busy, other) == Counter(behind)
        assert [process.event("stopped")["fenced"] for process in (busy, other)] == [0, 0]
    assert eyes.all("SELECT DISTINCT attempt, crashes FROM pgqueue.job") == [(1, 0)]


@pytest.mark.promise("F180")
def test_a_leader_whose_loop_is_blocked_gives_up_the_lead(tmp_path: Path, go: Path, dsn: str, eyes: Eyes) -> None:
    with workers(tmp_path, dsn, TASKS) as made:
        busy, _ = blocked(made, dsn)
        assert "leads now" in busy.written()
        [other] = made.ready()
        [due] = put(dsn, remote("blocked.waits").using(delay=0.5).new())
        other.event("ran", 20.0, job=due)
        wait_until(lambda: "leads now" in other.written())
        go.touch()
        wait_until(eyes.done(MANY + 2))
        [late] = put(dsn, remote("blocked.waits").using(delay=0.5).new())
        wait_until(lambda: ran(busy, other)[late])
        assert "the database is lost" not in busy.written()


# Beside a loop that goes on ------------------------------------------------------------------------------------------


class Blocked:
    """In place of the monitor: the loop is blocked, and each time that is asked it is another turn that it owes."""

    def __init__(self) -> None:
        self._turns = itertools.count()

    def blocked(self) -> float:
        return 99.0

    def owed(self) -> int:
        return next(self._turns)


class Reliever:
    """Relieves a worker of this process as its heartbeat would, in a thread of its own."""

    def __init__(self, worker: Worker) -> None:
        self.taken = 0
        self._worker = worker
        self._blocked_loop = BlockedLoop(
            worker.state,
            Blocked(),  # type: ignore[arg-type]
            take_out=self._take_out,
            give_back=worker.services.held_jobs.give_back,
            step_down=lambda: False,
        )
        self._ended = threading.Event()

    async def until_ended(self) -> None:
        """Again and again, whatever the loop does meanwhile."""
        await asyncio.to_thread(lambda: asyncio.run(self._relieve()))

    def end(self) -> None:
        self._ended.set()

    async def _relieve(self) -> None:
        session = Session(self._worker.state.link, "beat")
        try:
            while not self._ended.is_set():
                await self._blocked_loop.relieve(session, self._worker.state.id)
                await asyncio.sleep(0.001)  # it would be the only thread that runs
        finally:
            await session.close()

    def _take_out(self) -> list[Job]:
        taken = self._worker.services.held_jobs.take_out_waiting()
        self.taken += len(taken)
        return taken


@pytest.mark.promise("F180")
async def test_a_job_that_goes_at_the_moment_when_the_loop_goes_on_runs_once(
    dsn: str, eyes: Eyes, caplog: pytest.LogCaptureFixture
) -> None:
    """Jobs of three locks are among them: they come in chains."""
    counted: Counter[int] = Counter()
    running: Counter[str] = Counter()

    @task(name="blocked.counts")
    async def counts(job: Job) -> None:
        counted[job.id] += 1
        if job.lock_key is not None:
            running[job.lock_key] += 1
            assert running[job.lock_key] == 1
        await asyncio.sleep(0)
        if job.lock_key is not None:
            running[job.lock_key] -= 1

    @task(name="blocked.counts_in_thread")
    def counts_in_thread(job: Job) -> None:
        counted[job.id] += 1

    def happened() -> bool:
        """Jobs were taken out, and a claim was given up."""
        return reliever.taken > 0 and "the claim was given up" in caplog.text

    tasks, jobs = (counts, counts_in_thread), list[int]()
    async with work(dsn, *tasks, concurrency=2) as one, work(dsn, *tasks, concurrency=2) as other:
        one.state.other_workers = 1  # as its next heartbeat will see
        reliever = Reliever(one)
        relieving = asyncio.create_task(reliever.until_ended())
        try:
            while not happened() and len(jobs) < 20_000:
                locked = [counts.using(lock=f"customer {number % 3}").new() for number in range(450)]
                jobs.extend(put(dsn, *[each.new() for each in tasks * 300], *locked))
                await until(lambda: len(counted) == len(jobs))
            assert happened()
        finally:
            reliever.end()
            await relieving
        await until(eyes.done(len(jobs)))
        await until(lambda: one.state.held == other.state.held == {})
        for worker in (one, other):
            unblocker = worker.services.unblocker
            assert (worker.services.completer.fenced, unblocker._holding, unblocker._ours) == (0, {}, {})
        assert set(counted.values()) == {1}
    assert eyes.all("SELECT DISTINCT attempt, crashes FROM pgqueue.job") == [(1, 0)]
    assert eyes.happened("retried") == 0


@pytest.mark.promise("F180")
@pytest.mark.parametrize("moment", ["before the keys are counted", "after that", "at delivery"])
async def test_a_claim_that_is_given_up_as_its_answer_is_read_leaves_no_key_behind(
    moment: str, dsn: str, eyes: Eyes
) -> None:
    ran: list[int] = []
    moments: list[frozenset[int]] = []

    @task(name="blocked.locked")
    async def locked(job: Job) -> None:
        ran.append(job.id)

    async with work(dsn, locked) as worker:
        claims, unblocker, held_jobs = worker.state.claims, worker.services.unblocker, worker.services.held_jobs
        granted, deliver = unblocker.granted, held_jobs.deliver

        def then_granted(jobs: Iterable[Job]) -> None:
            if moment == "before the keys are counted":
                moments.append(claims.give_up())
            granted(jobs)
            if moment == "after that":
                moments.append(claims.give_up())

        def then_deliver(jobs: list[Job], *args: Any, **kwargs: Any) -> None:
            if moment == "at delivery":
                moments.append(claims.give_up())
            deliver(jobs, *args, **kwargs)

        unblocker.granted = then_granted  # type: ignore[method-assign]
        held_jobs.deliver = then_deliver  # type: ignore[method-assign]
        for number in range(1, 6):
            put(dsn, locked.using(lock=f"customer {number}").new())
            await until(eyes.done(number))
        await until(lambda: worker.state.held == {})
        assert moments
        assert (unblocker._holding, unblocker._ours) == ({}, {})
    assert len(ran) == len(set(ran)) == 5


@pytest.mark.promise("F180")
async def test_workers_are_told_to_ask_for_the_keys_of_jobs_that_go(dsn: str, eyes: Eyes) -> None:
    """A job with a limit goes to its waiters, and the worker that gives it back asks for no key while it is blocked."""

    @task(name="blocked.places", limit=pgqueue.Limit(5, name="places"))
    async def limited() -> None: ...

    async with work(dsn, limited) as worker:
        claim = await worker.state.claims.begin()
        try:
            eyes.do(CLAIMED, worker.state.id, claim)
            await until(lambda: worker.services.sweep.sweeps)
            eyes.do('LISTEN "pgqueue.:control"')
            worker.state.other_workers = 1
            session = Session(worker.state.link, "beat")
            blocked_loop = BlockedLoop(
                worker.state,
                Blocked(),  # type: ignore[arg-type]
                take_out=list,
                give_back=lambda taken: None,
                step_down=lambda: False,
            )
            await blocked_loop.relieve(session, worker.state.id)
            await session.close()
            heard = await asyncio.to_thread(lambda: list(eyes.conn.notifies(timeout=10, stop_after=1)))
            assert [note.payload for note in heard] == ["sweep"]
        finally:
            worker.state.claims.end(claim)
        await until(eyes.done(3))


CLAIMED = """
    INSERT INTO pgqueue.job (task, state, limit_key, holds, worker_id, claim, started_at)
    SELECT 'blocked.places', 'running', 'places', true, %s, %s, now() FROM generate_series(1, 3)
"""


# What is told --------------------------------------------------------------------------------------------------------


class Told:
    """In place of the heartbeat's session: this worker's rows, what the database was told, and what it says to that."""

    def __init__(self) -> None:
        self.link = Link("", "pgqueue")
        self.rows = [(9, 1), (8, 3)]
        """Of claim 3 the answer has not been read; claim 1 is that of the jobs here."""
        self.released: list[tuple[int, ...]] = []
        self.swept = 0
        self.error: Exception | None = None
        self.locked: set[int] = set()
        self.refused: set[int] = set()
        self.refusal: Exception = psycopg.Error()

    async def run(self, statement: Statement[Any], *told: Statement[Any]) -> list[Any]:
        if self.error is not None:
            raise self.error
        if "ids" not in statement.params:
            return [self.rows]
        ids = tuple(json.loads(str(statement.params["ids"]).translate(str.maketrans("{}", "[]"))))
        if self.refused.intersection(ids):
            raise self.refusal
        self.released.append(ids)
        some = [job_id for job_id in ids if job_id not in self.locked]
        self.rows = [row for row in self.rows if row[0] not in some]
        self.swept += len(told)  # in the same transaction
        return [[(None if len(some) == len(ids) else some, 0)], *[[(None,)] for _ in told]]


class Relief:
    """A blocked loop with two jobs taken out, and a claim under way."""

    def __init__(self, clock: list[float]) -> None:
        self.state = worker_state(Link("", "pgqueue"), 7)
        self.state.other_workers = 1
        self.jobs = [Job(claimed(id=number, task="blocked.any"), 1) for number in (1, 2)]
        self.clock = clock
        self.monitor = LoopMonitor(asyncio.get_running_loop(), RunningJobs([]))
        self.given_back: list[Job] = []
        self.told = Told()
        self.stepped = 0
        self.blocked_loop = BlockedLoop(
            self.state,
            self.monitor,
            take_out=self._take_out,
            give_back=self.given_back.extend,
            step_down=self._step_down,
        )

    def _take_out(self) -> list[Job]:
        taken, self.jobs = self.jobs, []
        return taken

    def _step_down(self) -> bool:
        self.stepped += 1
        return True

    def blocks(self, seconds: float = 4.0) -> None:
        """The loop owes a turn for so long."""
        self.monitor.look()
        self.clock[0] += seconds
        self.monitor.look()

    async def relieve(self) -> None:
        await self.blocked_loop.relieve(self.told, 7)  # type: ignore[arg-type]


@pytest.fixture
async def relief(monkeypatch: pytest.MonkeyPatch) -> Relief:
    clock = [100.0]
    monkeypatch.setattr(loop_monitor, "monotonic", lambda: clock[0])
    made = Relief(clock)
    for claim in (1, 2, 3):
        assert await made.state.claims.begin() == claim
    made.state.claims.end(1)
    made.state.claims.end(2)
    return made


@pytest.mark.promise("F180")
async def test_what_waits_goes_once_with_the_claims_that_are_not_read(
    relief: Relief, caplog: pytest.LogCaptureFixture
) -> None:
    claims = relief.state.claims
    relief.blocks()
    assert relief.blocked_loop.wanted()
    await relief.relieve()
    assert relief.told.released == [(1, 2, 8)] and relief.told.swept == relief.stepped == 1
    assert "3 jobs that waited here went to other workers" in caplog.text and "gives up the lead" in caplog.text
    assert [claims.void(claim) for claim in (1, 2, 3)] == [False, False, True]
    relief.clock[0] += 5.0
    assert not relief.blocked_loop.wanted()
    await relief.relieve()
    assert len(relief.told.released) == 1 and relief.stepped == 1
    await asyncio.sleep(0)
    assert [job.id for job in relief.given_back] == [1, 2]
    assert await claims.begin() == 4
    claims.end(3)
    assert [claims.void(claim) for claim in (3, 4)] == [True, False]


@pytest.mark.promise("F180")
async def test_each_block_is_relieved_and_nothing_else(relief: Relief) -> None:
    """Naive: ask what the last look saw. A heartbeat that is sent at once relieves a loop that has gone on, and then
    the next block is taken for one that was relieved."""
    for number in range(1, 4):
        relief.blocks()
        await relief.relieve()
        assert relief.stepped == number
        await asyncio.sleep(0)  # it goes on
        assert not relief.blocked_loop.wanted()
        await relief.relieve()
        assert relief.stepped == number


@pytest.mark.promise("F180")
@pytest.mark.parametrize(
    "error", [psycopg.OperationalError("away"), psycopg.errors.RaiseException("no"), TimeoutError()]
)
async def test_if_the_database_is_not_told_it_is_with_the_next_heartbeat(
    relief: Relief, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    relief.blocks()
    relief.told.error = error
    await relief.relieve()
    assert "cannot go to other workers yet" in caplog.text
    relief.told.error = None
    await relief.relieve()
    assert relief.told.released == [(1, 2, 8)]


@pytest.mark.promise("F180")
async def test_a_row_that_is_locked_or_comes_later_goes_with_the_next_heartbeat(relief: Relief) -> None:
    relief.blocks()
    relief.told.locked = {2}
    await relief.relieve()
    relief.told.locked = set()
    relief.told.rows.append((7, 3))
    await relief.relieve()
    assert relief.told.released == [(1, 2, 8), (2, 7)]


@pytest.mark.promise("F180")
@pytest.mark.parametrize("error", [psycopg.errors.CheckViolation, psycopg.errors.UniqueViolation])
async def test_rows_that_the_server_refuses_to_move_hold_up_no_other(
    relief: Relief, error: type[psycopg.Error]
) -> None:
    """However many there are: with each heartbeat some are left aside."""
    relief.jobs = [Job(claimed(id=number, task="blocked.any"), 1) for number in range(100, 164)]
    relief.told.refusal = type("Refusal", (error,), {"sqlstate": error.sqlstate})("refused")
    relief.told.refused = set(range(100, 164, 3))
    relief.blocks()
    for _ in range(6):
        await relief.relieve()
    assert sorted(job_id for ids in relief.told.released for job_id in ids) == sorted(
        {8, *range(100, 164)} - relief.told.refused
    )


@pytest.mark.promise("F180")
async def test_what_the_loop_has_given_back_itself_is_not_told(relief: Relief) -> None:
    relief.blocks()
    relief.told.error = psycopg.OperationalError("away")
    await relief.relieve()
    relief.told.error = None
    await asyncio.sleep(0)
    await relief.relieve()
    assert relief.told.released == []


@pytest.mark.promise("F180")
@pytest.mark.parametrize("why", ["alone", "not long enough", "it takes turns"])
async def test_nothing_goes_if_no_other_worker_is_there_or_the_loop_only_has_much_to_do(
    relief: Relief, why: str
) -> None:
    relief.blocks(2.9 if why == "not long enough" else 4.0)
    if why == "alone":
        relief.state.other_workers = 0
    elif why == "it takes turns":
        await asyncio.sleep(0)
    assert not relief.blocked_loop.wanted()
    await relief.relieve()
    assert relief.told.released == [] and relief.stepped == 0 and len(relief.jobs) == 2
    assert not relief.state.claims.void(3)
