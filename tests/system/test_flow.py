"""From enqueue to completed: no wake-up is lost, no row left behind, no outage loses or doubles a job."""

from __future__ import annotations

import asyncio
import random
import threading
from contextlib import suppress
from random import Random
from time import monotonic
from typing import Any

import psycopg
import pytest
from naive_cursor import NaiveCursor
from noted_jobs import anew, notes, ran, started
from servers import Server
from workers import Eyes, Stalls, least, until, work

import pgqueue
from pgqueue.client.tasks import task
from pgqueue.database import migrations
from pgqueue.jobs.job import Job
from pgqueue.worker.fetch.passed_over import PassedOver
from pgqueue.worker.worker import Worker

__all__ = ["anew"]

hold = asyncio.Event()


@pytest.fixture(autouse=True)
def holding() -> None:
    """What one test lets go is held anew in the next one."""
    global hold
    hold = asyncio.Event()


@task(name="flow.holds")
async def holds(job: Job) -> int:
    ran.append(job.id)
    await hold.wait()
    return job.attempt


@task(name="flow.sums")
def sums(numbers: list[int]) -> int:
    return sum(numbers)


# The plain flow ------------------------------------------------------------------------------------------------------


async def test_enqueued_run_and_its_result_stored(dsn: str, eyes: Eyes, conn: psycopg.Connection) -> None:
    async with work(dsn, sums):
        handle = sums.enqueue(conn, [1, 2, 3])
        assert eyes.states() == {}
        conn.commit()
        await until(eyes.done(1))
    [row] = eyes.all("SELECT id, result, attempt, version_tag IS NOT NULL FROM pgqueue.job")
    assert row == (handle.id, 6, 1, True)


@pytest.mark.promise("E02")
async def test_commit_to_start_is_reported(dsn: str, eyes: Eyes, conn: psycopg.Connection) -> None:
    for name, options in (("NOTIFY", {}), ("polling only, every 0.1 s", {"poll": 0.1})):
        waits: list[float] = []
        async with work(dsn, notes, **options) as worker:
            await until(lambda worker=worker: worker.services.fetcher.fetches >= 1)  # type: ignore[misc]
            if options:
                worker.services._heard = lambda channel, payload: None  # type: ignore[method-assign]
                worker.services.notifier._heard = lambda channel, payload: None
            for _ in range(15 if options else 40):
                job = notes.enqueue(conn).id
                conn.commit()
                committed = monotonic()
                await until(lambda job=job: job in started, 30.0)  # type: ignore[misc]
                waits.append(started[job] - committed)
        waits.sort()
        p50, most = waits[len(waits) // 2] * 1000, waits[-1] * 1000
        print(f"commit to start, {name}: p50 {p50:.1f} ms, most {most:.1f} ms")
        assert waits[len(waits) // 2] < (0.05 if not options else 0.3)


# Wake-ups ------------------------------------------------------------------------------------------------------------


async def bursts(dsn: str, number: int) -> list[tuple[float, float]]:
    """Bursts of one to three jobs, each committed into a worker that has just become idle; poll is no help.

    For each the moments of the commit and of the last start.
    """
    waits, random = list[tuple[float, float]](), Random(5)
    async with work(dsn, notes, poll=60.0) as worker:
        worker.services.fetcher.watermark._sweep_every = 1e9
        await until(lambda: worker.services.fetcher.fetches >= 1)
        async with await psycopg.AsyncConnection.connect(dsn) as conn:
            for _ in range(number):
                for _ in range(random.choice((0, 0, 1, 3, 10))):
                    await asyncio.sleep(0)  # at another point of the fetcher's way into its sleep
                handles = [await pgqueue.aenqueue(conn, notes) for _ in range(random.randint(1, 3))]
                await conn.commit()
                began = monotonic()
                async with asyncio.timeout(30):  # who was not told looks after 60
                    while not all(handle.id in started for handle in handles):  # noqa: ASYNC110
                        await asyncio.sleep(0.0005)
                waits.append((began, monotonic()))
    return waits


@pytest.mark.second
@pytest.mark.promise("F05")
@pytest.mark.parametrize("number", [300, pytest.param(10_000, marks=pytest.mark.long)])
async def test_no_burst_into_an_idle_worker_waits(number: int, dsn: str) -> None:
    """Not one of them; what is forgiven is only what this machine stood still in that very wait."""
    with Stalls() as stalls:
        waits = await bursts(dsn, number)
    own = [end - began - stalls.between(began, end) for began, end in waits]
    longest = max(end - began for began, end in waits)
    print(f"{number} bursts into an idle worker: longest wait {longest * 1000:.1f} ms, {max(own) * 1000:.1f} its own")
    assert (len(own), [wait for wait in own if wait > 1.0]) == (number, [])


def test_a_standstill_is_forgiven_where_it_was_and_nowhere_else() -> None:
    with Stalls() as stalls:
        began = monotonic()
        sum(range(20_000_000))  # no other thread runs meanwhile
        ended = monotonic()
    assert ended - began - 0.1 < stalls.between(began, ended) <= ended - began
    assert stalls.between(began, began + 0.1) <= 0.1
    assert stalls.between(began - 9, began) == stalls.between(ended + 1, ended + 9) == 0


@pytest.mark.second
@pytest.mark.promise("F05", "F21")
async def test_what_was_enqueued_during_work_and_committed_late_is_started_at_once(dsn: str, eyes: Eyes) -> None:
    async with work(dsn, notes, poll=60.0) as worker:
        worker.services.fetcher.watermark._sweep_every = 1e9
        done = 0

        async def once() -> float:
            nonlocal done
            with psycopg.connect(dsn) as late, psycopg.connect(dsn, autocommit=True) as steady:
                waiting = [pgqueue.enqueue(late, notes).id for _ in range(3)]
                for _ in range(200):
                    notes.enqueue(steady)
                await until(eyes.done(done + 200))
                await asyncio.sleep(1.0)  # the worker is idle for a while, as the promise says
                assert started.keys().isdisjoint(waiting), "it ran before its commit"
                late.commit()
                began = monotonic()
                await until(lambda: all(job in started for job in waiting))
                done += 203
                await until(eyes.done(done))
                return max(started[job] for job in waiting) - began

        assert await least(once, 1.0) < 1.0


# Nothing left behind -------------------------------------------------------------------------------------------------


class Stress:
    """Enqueuers that do it in every way at once, until told; what they committed and when."""

    def __init__(self, dsn: str, seed: int) -> None:
        self.dsn, self.seed = dsn, seed
        self.committed: dict[int, float] = {}
        self.errors: list[BaseException] = []
        self._end = threading.Event()
        self._threads = [threading.Thread(target=self._enqueue, args=(number,)) for number in range(6)]

    def __enter__(self) -> Stress:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join()
        assert self.errors == []

    def _enqueue(self, number: int) -> None:
        random = Random(self.seed * 100 + number)
        try:
            with psycopg.connect(self.dsn) as conn:
                while not self._end.is_set():
                    ways = (self._plain, self._savepoint, self._copy, self._prepared, self._rolled_back, self._slow)
                    jobs = random.choices(ways, weights=(10, 3, 2, 1, 3, 2))[0](conn, random)
                    now = monotonic()
                    self.committed.update(dict.fromkeys(jobs, now))
        except BaseException as error:
            self.errors.append(error)

    def _insert(self, conn: psycopg.Connection) -> int:
        row = conn.execute("INSERT INTO pgqueue.job (task) VALUES ('flow.notes') RETURNING id").fetchone()
        assert row is not None
        conn.execute("SELECT pg_notify('pgqueue.default', '')")
        return int(row[0])

    def _plain(self, conn: psycopg.Connection, random: Random) -> list[int]:
        jobs = [self._insert(conn) for _ in range(random.randint(1, 3))]
        conn.commit()
        return jobs

    def _slow(self, conn: psycopg.Connection, random: Random) -> list[int]:
        jobs = [self._insert(conn)]
        self._end.wait(random.random() * 0.2)
        jobs.append(self._insert(conn))
        conn.commit()
        return jobs

    def _rolled_back(self, conn: psycopg.Connection, random: Random) -> list[int]:
        self._insert(conn)
        self._end.wait(random.random() * 0.02)
        conn.rollback()
        return []

    def _savepoint(self, conn: psycopg.Connection, random: Random) -> list[int]:
        jobs = [self._insert(conn)]
        with suppress(ZeroDivisionError), conn.transaction():
            self._insert(conn)
            raise ZeroDivisionError
        with conn.transaction():
            jobs.append(self._insert(conn))
        self._end.wait(random.random() * 0.01)
        conn.commit()
        return jobs

    def _copy(self, conn: psycopg.Connection, random: Random) -> list[int]:
        ids = [row[0] for row in conn.execute("SELECT nextval('pgqueue.job_id_seq') FROM generate_series(1, 20)")]
        with conn.cursor().copy("COPY pgqueue.job (id, task) FROM STDIN") as copy:
            for id in ids:
                copy.write_row((id, "flow.notes"))
        self._end.wait(random.random() * 0.01)
        conn.commit()
        return ids

    def _prepared(self, conn: psycopg.Connection, random: Random) -> list[int]:
        conn.rollback()
        name = f"stress-{self.seed}-{random.random()}"
        conn.autocommit = True
        conn.execute("BEGIN")
        row = conn.execute("INSERT INTO pgqueue.job (task) VALUES ('flow.notes') RETURNING id").fetchone()
        conn.execute(f"PREPARE TRANSACTION '{name}'".encode())
        self._end.wait(random.random() * 0.05)
        conn.execute(f"COMMIT PREPARED '{name}'".encode())
        conn.autocommit = False
        assert row is not None
        return [int(row[0])]


async def stress(dsn: str, eyes: Eyes, seconds: float, seed: int, monkeypatch: pytest.MonkeyPatch, naive: bool) -> int:
    """Six enqueuers, three workers, claimers killed in the middle of a claim; how many jobs were left behind."""
    if naive:
        monkeypatch.setattr("pgqueue.worker.fetch.fetcher.Watermark", NaiveCursor)
        monkeypatch.setattr(PassedOver, "passed", lambda *what: None)
    fleet = [Worker(dsn=dsn, tasks=[notes], poll=0.2, lease=15.0) for _ in range(3)]
    for worker in fleet:
        await worker.start()
    kills, random = 0, Random(seed)
    with Stress(dsn, seed) as enqueuers:
        end = monotonic() + seconds
        while monotonic() < end:
            await asyncio.sleep(0.05 + 0.1 * random.random())
            if not naive:
                kills += await die_in_mid_claim(dsn, random)
    committed = enqueuers.committed
    with suppress(AssertionError):
        await until(lambda: len(started.keys() & committed.keys()) == len(committed), 3.0 if naive else 60.0)
    for worker in fleet:
        await worker.stop(1.0)
    left = [job for job in committed if job not in started]
    waits = sorted(started[job] - at for job, at in committed.items() if job in started)
    print(
        f"{len(committed)} jobs, {kills} claimers killed, {len(left)} left behind, "
        f"commit to start p99 {waits[len(waits) * 99 // 100] * 1000:.0f} ms, max {waits[-1] * 1000:.0f} ms"
    )
    assert set(started) <= set(committed), "a job ran whose transaction was rolled back"
    assert len(ran) == len(started), "a job ran twice"
    assert eyes.one("SELECT count(*) FROM pgqueue.attempt") == 0, "an attempt failed"
    return len(left)


async def die_in_mid_claim(dsn: str, random: Random) -> int:
    """Lock some rows as a claim does, for a moment, and vanish without an end."""
    conn = await psycopg.AsyncConnection.connect(dsn)
    await conn.execute(
        "DELETE FROM pgqueue.job_available WHERE ctid = ANY (ARRAY("
        "SELECT ctid FROM pgqueue.job_available ORDER BY pos LIMIT 20 FOR UPDATE SKIP LOCKED))"
    )
    await asyncio.sleep(0.03 * random.random())
    conn.pgconn.finish()
    return 1


@pytest.mark.second
@pytest.mark.promise("F21", "E04", "E06")
async def test_nothing_is_left_behind(dsn: str, eyes: Eyes, monkeypatch: pytest.MonkeyPatch) -> None:
    assert await stress(dsn, eyes, 4.0, 1, monkeypatch, naive=False) == 0


@pytest.mark.second
@pytest.mark.promise("F21")
async def test_the_naive_cursor_leaves_jobs_behind(dsn: str, eyes: Eyes, monkeypatch: pytest.MonkeyPatch) -> None:
    assert await stress(dsn, eyes, 3.0, 2, monkeypatch, naive=True) > 0


@pytest.mark.long
@pytest.mark.promise("F21", "E04", "E06")
@pytest.mark.parametrize("seed", range(5))
async def test_nothing_is_left_behind_in_a_long_run(
    seed: int, dsn: str, eyes: Eyes, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await stress(dsn, eyes, 60.0, seed, monkeypatch, naive=False) == 0


# The database goes and comes -----------------------------------------------------------------------------------------


@pytest.mark.second
@pytest.mark.promise("F06")
@pytest.mark.parametrize("mode", ["fast", "immediate"])
async def test_a_restart_of_the_server_loses_nothing_and_doubles_nothing(mode: str, own_server: Server) -> None:
    dsn = own_server.dsn("postgres")
    migrations.migrate(dsn)
    async with work(dsn, notes, holds, concurrency=5, lease=2.0) as worker:
        with psycopg.connect(dsn) as conn:
            held = [handle.id for handle in pgqueue.enqueue_many(conn, [holds.new() for _ in range(3)])]
        await until(lambda: sorted(ran) == held)
        if mode == "immediate":
            # A claim is not durable for some 0.6 s (wal_writer_delay); after that a crash cannot take it back.
            with psycopg.connect(dsn, autocommit=True) as conn:
                conn.execute("CHECKPOINT")
        await asyncio.to_thread(own_server.stop, mode)
        await asyncio.sleep(2.5)  # longer than the lease: nobody may be judged for it
        await asyncio.to_thread(own_server.start)
        eyes = Eyes(dsn)
        await until(
            lambda: {"pgqueue fetch", "pgqueue listen", "pgqueue beat"} <= {name for _, name in eyes.backends()}, 20
        )
        beat = eyes.one("SELECT beat FROM pgqueue.worker")
        await until(lambda: eyes.one("SELECT beat FROM pgqueue.worker") > beat)
        after: list[int] = []

        async def once() -> float:
            with psycopg.connect(dsn) as conn:
                job = pgqueue.enqueue(conn, notes).id
                conn.commit()
                began = monotonic()
            after.append(job)
            await until(lambda: job in started)
            return started[job] - began

        soon = await least(once, 0.7)
        if mode == "fast":
            assert soon < 0.7, "it does not listen again"
        hold.set()
        await until(eyes.done(3 + len(after)))
        assert sorted(ran) == sorted([*held, *after])
        assert eyes.all("SELECT DISTINCT crashes, attempt FROM pgqueue.job") == [(0, 1)]
        assert worker.services.completer.fenced == 0
        eyes.close()


@pytest.mark.second
@pytest.mark.promise("F06", "T04")
async def test_a_stop_while_the_database_is_away_ends_and_the_job_is_taken_up_by_another(
    own_server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("pgqueue.worker.worker.FLUSH_SECONDS", 0.5)
    dsn = own_server.dsn("postgres")
    migrations.migrate(dsn)
    async with work(dsn, holds, lease=1.0) as worker:
        with psycopg.connect(dsn) as conn:
            job = pgqueue.enqueue(conn, holds).id
        await until(lambda: ran == [job])
        await asyncio.to_thread(own_server.stop)
        began = monotonic()
        assert await worker.stop(0.2) == 1
        assert monotonic() - began < 30
        assert "could not sign off" in caplog.text
    await asyncio.to_thread(own_server.start)
    hold.set()
    eyes = Eyes(dsn)
    async with work(dsn, holds, lease=1.0):
        await until(eyes.done(1), 30.0)
    assert ran == [job, job]
    eyes.close()


@pytest.mark.second
@pytest.mark.promise("F06")
async def test_sessions_that_are_ended_one_by_one_under_load_lose_nothing_and_double_nothing(
    dsn: str, eyes: Eyes
) -> None:
    number, ended, rnd = 0, 0, random.Random(3)
    async with work(dsn, notes, concurrency=20, lease=2.0) as worker:
        end = monotonic() + 4.0
        with psycopg.connect(dsn) as conn:
            while monotonic() < end or ended <= 10:
                number += len(pgqueue.enqueue_many(conn, [notes.new() for _ in range(50)]))
                conn.commit()
                await asyncio.sleep(0.002 * rnd.random())
                if rnd.random() < 0.1:
                    ended += eyes.terminate(
                        rnd.choice(["pgqueue fetch", "pgqueue complete", "pgqueue listen", "pgqueue beat"])
                    )
        await until(eyes.done(number), 60.0)
        assert worker.services.completer.fenced == 0
    print(f"{number} jobs, {ended} sessions ended, {len(ran) - number} runs more than jobs")
    assert ended > 10
    assert eyes.states() == {"completed": number}
    assert sorted(ran) == sorted(set(ran)), "a job ran twice that its worker could finish"
    assert eyes.all("SELECT DISTINCT crashes FROM pgqueue.job") == [(0,)]


@pytest.mark.second
@pytest.mark.promise("F06")
async def test_a_claim_cut_off_at_any_moment_is_taken_up_again_with_its_attempt_unspent(dsn: str, eyes: Eyes) -> None:
    """The connection is cut from the client's side too: the claim may be committed, and nobody hears of it."""
    number, cuts = 0, 0
    async with work(dsn, notes, concurrency=5, poll=0.2) as worker:
        real = worker.services.fetch_session.run

        async def cutting(*messages: Any, **options: Any) -> list[Any]:
            nonlocal cuts
            answer = await real(*messages, **options)
            if len(messages) == 2 and len(answer[1]) > 1 and cuts < 15 and random.random() < 0.5:
                cuts += 1
                await worker.services.fetch_session.close()
                raise psycopg.OperationalError("cut off right after the claim")
            return answer

        worker.services.fetch_session.run = cutting  # type: ignore[method-assign]
        with psycopg.connect(dsn) as conn:
            while number < 300 or cuts < 5:
                number += len(pgqueue.enqueue_many(conn, [notes.new() for _ in range(5)]))
                conn.commit()
                await asyncio.sleep(0.01)
        await until(eyes.done(number), 60.0)
    assert cuts >= 5
    assert sorted(ran) == sorted(set(ran))
    assert eyes.all("SELECT DISTINCT attempt, crashes FROM pgqueue.job") == [(1, 0)]
