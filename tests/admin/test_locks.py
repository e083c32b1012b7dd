"""Locks from end to end: tasks that declare one, workers that run them, kills, hangs, people."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from random import Random
from time import monotonic, sleep
from typing import Any

import psycopg
import pytest
from commands import items
from commands import pgqueue as command
from spans import Spans
from workers import Eyes, until, wait_until, work, workers

import pgqueue
from pgqueue import Job, Lock
from pgqueue.admin.locks import locks, release
from pgqueue.client.tasks import task
from pgqueue.jobs.retry import RetryPolicy

SOON = RetryPolicy(attempts=5, first=0.01, most=0.05)


def states(eyes: Eyes) -> list[str]:
    return [state for (state,) in eyes.all("SELECT state FROM pgqueue.job ORDER BY id")]


# The story -----------------------------------------------------------------------------------------------------------


@pytest.mark.promise("L01")
@pytest.mark.promise("L03")
async def test_one_two_one(dsn: str, eyes: Eyes, conn: psycopg.Connection) -> None:
    gate = asyncio.Event()

    @task(name="locks.story", lock=Lock("user:{user}", on_locked="skip"))
    async def story(user: int) -> None:
        if user == 1:
            await gate.wait()

    async with work(dsn, story, concurrency=2):
        wanted = []
        for user, state in ((1, "running"), (2, "completed"), (1, "skipped")):
            story.enqueue(conn, user)
            conn.commit()
            wanted.append(state)
            await until(lambda: states(eyes) == wanted)
        gate.set()
        await until(eyes.done(2))
        story.enqueue(conn, 1)
        conn.commit()
        await until(eyes.done(3))
    assert states(eyes) == ["completed", "completed", "skipped", "completed"]


@pytest.mark.promise("L03")
async def test_what_is_skipped_takes_no_slot_and_ends_at_once(dsn: str, eyes: Eyes, conn: psycopg.Connection) -> None:
    """With one slot, and that taken: nothing is fetched. With two: the second is free for others all the time."""
    gate = asyncio.Event()

    @task(name="locks.slot", lock=Lock("k", on_locked="skip"))
    async def slot() -> None:
        await gate.wait()

    async with work(dsn, slot, concurrency=2):
        slot.enqueue(conn)
        conn.commit()
        await until(lambda: states(eyes) == ["running"])

        async def quickly() -> bool:
            """Another one, and whether it had ended within 50 ms, as all do where nothing else wants the processor."""
            job = slot.enqueue(conn)
            conn.commit()
            await until(eyes.is_in(job.id, "skipped"))
            took = "SELECT finished_at - enqueued_at < '50 ms' FROM pgqueue.job_done WHERE id = %s"
            return bool(eyes.one(took, job.id))

        deadline = monotonic() + 60
        while not await quickly():
            assert monotonic() < deadline, "none ended within 50 ms"
        assert eyes.states()["running"] == 1
        gate.set()
        await until(eyes.done(1))


@pytest.mark.promise("L02")
async def test_a_hundred_keys_run_at_full_concurrency_and_no_key_twice(
    dsn: str, eyes: Eyes, conn: psycopg.Connection
) -> None:
    spans, together, most = Spans(), 0, 0
    all_slots = asyncio.Event()

    @task(name="locks.hundred", lock="user:{user}", store_result=False)
    async def hundred(user: int) -> None:
        nonlocal together, most
        together += 1
        most = max(most, together)
        if most == 20:
            all_slots.set()
        began = monotonic()
        await asyncio.wait_for(all_slots.wait(), 30)
        await asyncio.sleep(0.005)
        spans.add(user, began, monotonic())
        together -= 1

    hundred.enqueue_many(conn, [(user,) for _ in range(4) for user in range(100)])
    conn.commit()
    async with work(dsn, hundred, concurrency=20):
        await until(eyes.done(400), 60)
    assert set(spans.most().values()) == {1} and len(spans.most()) == 100
    assert most == 20


@pytest.mark.promise("L02")
async def test_a_key_is_one_name_for_all_tasks_and_queues(dsn: str, eyes: Eyes, conn: psycopg.Connection) -> None:
    spans = Spans()

    async def run() -> None:
        began = monotonic()
        await asyncio.sleep(0.005)
        spans.add("k", began, monotonic())

    one = task(name="locks.one", lock="k")(run)
    two = task(name="locks.two", lock="k", queue="other")(run)
    conn.execute("SELECT")
    for _ in range(20):
        one.enqueue(conn)
        two.enqueue(conn)
    conn.commit()
    async with work(dsn, one, two, concurrency=10):
        await until(eyes.done(40), 60)
    assert spans.most() == {"k": 1}


async def test_jobs_of_a_key_run_in_the_order_of_their_arrival(dsn: str, eyes: Eyes, conn: psycopg.Connection) -> None:
    order: list[int] = []

    @task(name="locks.order", lock="k")
    async def ordered(n: int) -> None:
        order.append(n)

    ordered.enqueue_many(conn, [(n,) for n in range(200)])
    conn.commit()
    async with work(dsn, ordered, concurrency=10):
        await until(eyes.done(200), 60)
    assert order == list(range(200))


# Over processes -------------------------------------------------------------------------------------------------------

SPANS = """
@pgqueue.task(name="span")
async def span(key: str, first: bool) -> None:
    began = time.monotonic()
    say("begins")
    while first and not os.path.exists(os.environ["GO"]):
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.02)
    say("ran", key=key, began=began)
"""


@pytest.mark.second
@pytest.mark.promise("L08")
@pytest.mark.promise("F12")
@pytest.mark.parametrize("limit", [1, 3, 10])
def test_over_four_processes_as_many_as_the_limit_and_never_one_more(
    tmp_path: Path, dsn: str, eyes: Eyes, limit: int
) -> None:
    number = 40 * limit
    # The first of the line run until all of them do, on however busy a machine, and half a second for one too many.
    eyes.do(
        "INSERT INTO pgqueue.job (task, args, lock_key, lock_limit) "
        "SELECT 'span', jsonb_build_object('key', 'k', 'first', n <= %s), 'k', %s "
        "FROM generate_series(1, %s) n ORDER BY n",
        limit,
        limit,
        number,
    )
    with workers(tmp_path, dsn, SPANS) as processes:
        # Slots for all of them in each: a fetch and an admit at the same moment may take one more than there are.
        four = [processes.start({"GO": str(tmp_path / "go")}, concurrency=12) for _ in range(4)]
        for process in four:
            process.event("ready")
        wait_until(lambda: sum(len(process.all("begins")) for process in four) >= limit)
        sleep(0.5)
        (tmp_path / "go").touch()
        wait_until(eyes.done(number), 90)
        wait_until(lambda: len(Spans.told(four).all) >= number)  # a pipe may be slower than the database
        spans = Spans.told(four)
    assert len(spans.all) == number
    assert spans.most() == {"k": limit}


@pytest.mark.second
@pytest.mark.promise("L07")
def test_a_kill_frees_the_key_within_the_lease_and_the_retry_does_not_wait_for_itself(
    tmp_path: Path, dsn: str, eyes: Eyes
) -> None:
    source = """
@pgqueue.task(name="hold", lock="k")
async def hold(first: bool) -> None:
    job = pgqueue.current_job()
    say("holds", job=job.id, attempt=job.attempt)
    if first and job.attempt == 1:
        await asyncio.sleep(600)
"""
    add = "INSERT INTO pgqueue.job (task, args, lock_key) VALUES ('hold', %s, 'k') RETURNING id"
    first, second = eyes.one(add, '{"first": true}'), eyes.one(add, '{"first": false}')
    with workers(tmp_path, dsn, source) as processes:
        [doomed] = processes.ready(lease=1.0)
        doomed.event("holds", job=first)
        [other] = processes.ready(lease=1.0)
        doomed.kill()
        killed = monotonic()
        assert other.event("holds", job=first, attempt=2)["at"] - killed < 30
        other.event("holds", job=second)
        assert [event["job"] for event in other.all("holds")] == [first, second]
        wait_until(eyes.done(2))


@pytest.mark.second
@pytest.mark.promise("F22")
def test_kills_all_the_time_leave_nobody_waiting_and_never_two(tmp_path: Path, dsn: str, eyes: Eyes) -> None:
    """Workers are killed at any moment, also between a completion and its admit. A job that was killed is run again."""
    source = """
@pgqueue.task(name="span", retry=50)
async def span(key: str, seconds: float) -> None:
    say("begins", key=key, job=pgqueue.current_job().id)
    await asyncio.sleep(seconds)
    say("ends", key=key, job=pgqueue.current_job().id)
"""
    eyes.do(
        "INSERT INTO pgqueue.job (task, args, lock_key) SELECT 'span', "
        """jsonb_build_object('key', 'k' || n % 3, 'seconds', 0.005), 'k' || n % 3 FROM generate_series(1, 240) n"""
    )
    dice = Random(4)

    def ended() -> int:
        return sum(count for state, count in eyes.states().items() if state in ("completed", "failed"))

    with workers(tmp_path, dsn, source) as processes:
        alive = processes.ready(3, lease=2.5, concurrency=4)
        for _ in range(6):
            victim = alive.pop(dice.randrange(len(alive)))
            wait_until(lambda: victim.all("begins") or ended() == 240, 60)  # noqa: B023
            victim.kill()
            alive += processes.ready(1, lease=2.5, concurrency=4)
        wait_until(lambda: ended() == 240, 120)
        died = {process.pid for process in processes.all if process.process.poll() is not None}
        spans = Spans()
        for process in processes.all:
            ends = {event["job"]: event["at"] for event in process.all("ends")}
            last = max((event["at"] for event in process.events), default=0.0)
            for event in process.all("begins"):
                # One that was killed ran until its process was: at least until the last it said.
                assert event["job"] in ends or process.pid in died
                spans.add(event["key"], event["at"], ends.get(event["job"], last))
    assert set(spans.most().values()) == {1}
    assert eyes.one("SELECT count(*) FROM pgqueue.job WHERE holds AND state <> 'running'") == 0


# Hangs, errors, retries -----------------------------------------------------------------------------------------------


@pytest.mark.second
@pytest.mark.promise("L05")
@pytest.mark.promise("L06")
async def test_a_hung_job_gives_its_key_up_at_its_timeout_and_cannot_commit_later(
    dsn: str, eyes: Eyes, conn: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgqueue.worker.run.timeouts.GRACE", 0.2)
    eyes.do("CREATE TABLE effect (who text)")
    go_on, ended = threading.Event(), threading.Event()

    @task(name="locks.hang", lock="k", timeout=1.5, transactional=True, retry=1)
    def hang(job: Job, hangs: bool) -> None:
        job.connection.execute("INSERT INTO effect VALUES (%s)", [f"hangs: {hangs}"])
        try:
            while hangs and not go_on.wait(30):
                """A call into C that no exception ends."""
        except BaseException:
            go_on.wait(30)
            raise
        finally:
            if hangs:
                ended.set()

    hang.enqueue(conn, True)
    hang.enqueue(conn, False)
    conn.commit()
    async with work(dsn, hang, concurrency=4):
        await until(eyes.done(1), 30)
        assert not ended.is_set()
        go_on.set()
        await asyncio.to_thread(ended.wait, 30)
    assert eyes.all("SELECT who FROM effect") == [("hangs: False",)]
    assert states(eyes) == ["failed", "completed"]


@pytest.mark.promise("L05")
async def test_a_hung_job_with_a_timeout_of_its_own_gives_its_key_up(
    dsn: str, eyes: Eyes, conn: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgqueue.worker.run.timeouts.GRACE", 0.2)
    go_on = threading.Event()

    @task(name="locks.hangs", lock="k", retry=1)
    def hangs(first: bool) -> None:
        while first and not go_on.is_set():
            try:
                go_on.wait(30)
            except BaseException:
                continue

    hangs.using(timeout=0.3).enqueue(conn, True)
    hangs.enqueue(conn, False)
    conn.commit()
    async with work(dsn, hangs, concurrency=4) as worker:
        await until(eyes.done(1), 10)
        assert states(eyes) == ["failed", "completed"] and worker.services.executor._running.lost == 1
        go_on.set()
        await until(lambda: worker.services.executor._running.lost == 0)


@pytest.mark.promise("L10")
async def test_an_exception_gives_the_key_up(dsn: str, eyes: Eyes, conn: psycopg.Connection) -> None:
    order: list[tuple[str, int]] = []

    @task(name="locks.raises", lock="k", retry=RetryPolicy(attempts=2, first=0.3, factor=1))
    async def raises(job: Job, name: str) -> None:
        order.append((name, job.attempt))
        if name == "bad":
            raise ValueError(name)

    raises.enqueue(conn, "bad")
    raises.enqueue(conn, "good")
    conn.commit()
    async with work(dsn, raises):
        await until(lambda: sorted(states(eyes)) == ["completed", "failed"])
    assert order == [("bad", 1), ("good", 1), ("bad", 2)]


async def test_hold_on_retry_keeps_the_key_until_the_next_attempt(
    dsn: str, eyes: Eyes, conn: psycopg.Connection
) -> None:
    order: list[tuple[str, int]] = []

    @task(name="locks.holds", lock=Lock("k", hold_on_retry=True), retry=SOON)
    async def holds(job: Job, name: str) -> None:
        order.append((name, job.attempt))
        if name == "bad" and job.attempt < 3:
            raise ValueError(name)

    holds.enqueue(conn, "bad")
    holds.enqueue(conn, "good")
    conn.commit()
    async with work(dsn, holds):
        await until(eyes.done(2))
    assert order == [("bad", 1), ("bad", 2), ("bad", 3), ("good", 1)]


# Transactions ---------------------------------------------------------------------------------------------------------


@pytest.mark.second
@pytest.mark.promise("T05")
@pytest.mark.parametrize(("lock", "end"), [("account:{giver}", [0, 250, 100]), (None, [50, 250, 100])])
async def test_two_transfers_from_one_account_serialize(
    dsn: str, eyes: Eyes, conn: psycopg.Connection, lock: str | None, end: list[int]
) -> None:
    """With a barrier after the read that only two can pass together; without the lock the balance is wrong."""
    eyes.do("CREATE TABLE account (id int PRIMARY KEY, balance int)")
    eyes.do("INSERT INTO account VALUES (1, 100), (2, 200), (3, 50)")
    barrier = threading.Barrier(2)

    @task(name=f"locks.transfer_{lock is None}", lock=lock, transactional=True)
    def transfer(job: Job, giver: int, taker: int, amount: int) -> None:
        conn = job.connection
        [balance] = conn.execute("SELECT balance FROM account WHERE id = %s", [giver]).fetchone()
        try:
            barrier.wait(0.5 if lock else 30)
        except threading.BrokenBarrierError:
            barrier.reset()
        conn.execute("UPDATE account SET balance = %s WHERE id = %s", [balance - amount, giver])
        conn.execute("UPDATE account SET balance = balance + %s WHERE id = %s", [amount, taker])

    transfer.enqueue(conn, 1, 2, 50)
    transfer.enqueue(conn, 1, 3, 50)
    conn.commit()
    async with work(dsn, transfer, concurrency=2):
        await until(eyes.done(2), 30)
    assert [balance for (balance,) in eyes.all("SELECT balance FROM account ORDER BY id")] == end


@pytest.mark.promise("F22")
async def test_it_works_where_transactions_are_repeatable_read_by_default(
    dsn: str, eyes: Eyes, conn: psycopg.Connection
) -> None:
    eyes.do(f"ALTER DATABASE {conn.info.dbname} SET default_transaction_isolation = 'repeatable read'")

    @task(name="locks.repeatable", lock="k", transactional=True)
    def repeatable(job: Job) -> None:
        job.connection.execute("SELECT")

    for _ in range(20):
        repeatable.enqueue(conn)
    conn.commit()
    started = monotonic()
    async with work(dsn, repeatable, concurrency=4) as worker:
        await until(eyes.done(20), 30)
        assert worker.services.sweep.sweeps <= 2 + (monotonic() - started) / 4, "handed on at once, not by the sweep"


@pytest.mark.promise("L14")
@pytest.mark.parametrize("on_locked", ["wait", "skip", "once"])
async def test_a_successor_never_meets_its_parent(
    dsn: str, eyes: Eyes, conn: psycopg.Connection, on_locked: Any
) -> None:
    @task(name=f"locks.chain_{on_locked}", lock=Lock("k", on_locked=on_locked))
    async def chain(job: Job, left: int) -> None:
        if left:
            job.enqueue(chain, left - 1)

    chain.enqueue(conn, 9)
    conn.commit()
    async with work(dsn, chain):
        await until(eyes.done(10))
    assert states(eyes) == ["completed"] * 10


@pytest.mark.second
@pytest.mark.promise("L16")
@pytest.mark.parametrize("number", [300, pytest.param(10_000, marks=pytest.mark.long)])
async def test_no_event_is_stranded_with_once(dsn: str, eyes: Eyes, number: int) -> None:
    """Events come at random, each with a job in its transaction; a job serves what it sees when it begins."""
    eyes.do("CREATE TABLE event (key int, served bool DEFAULT false)")
    dice = Random(16)

    @task(name="locks.drain", lock=Lock("events:{key}", on_locked="once"))
    async def drain(key: int) -> None:
        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as conn:
            cursor = await conn.execute("SELECT ctid::text FROM event WHERE key = %s AND NOT served", [key])
            seen = [ctid for (ctid,) in await cursor.fetchall()]
            await asyncio.sleep(0.002)
            await conn.execute("UPDATE event SET served = true WHERE ctid = ANY (%s::tid[])", [seen])

    async with work(dsn, drain, concurrency=8), await psycopg.AsyncConnection.connect(dsn) as conn:
        for _ in range(number):
            key = dice.randrange(3)
            await conn.execute("INSERT INTO event VALUES (%s)", [key])
            await drain.aenqueue(conn, key)
            await conn.commit()
            if dice.random() < 0.3:
                await asyncio.sleep(dice.random() * 0.01)
        await until(lambda: eyes.states().keys() <= {"completed", "skipped"}, 60 + number / 20)
    assert eyes.one("SELECT count(*) FROM event WHERE NOT served") == 0
    assert eyes.states()["skipped"] > 0


@pytest.mark.promise("L16")
@pytest.mark.parametrize(("on_locked", "left"), [("once", 0), ("skip", 1)])
async def test_what_comes_after_the_last_read_is_served_with_once_and_stranded_with_skip(
    dsn: str, eyes: Eyes, conn: psycopg.Connection, on_locked: Any, left: int
) -> None:
    """The naive version is `skip`: nobody serves what its job was to say."""
    has_read, may_end, events = asyncio.Event(), asyncio.Event(), [1]

    @task(name=f"locks.late_{on_locked}", lock=Lock("k", on_locked=on_locked))
    async def late() -> None:
        seen = list(events)
        has_read.set()
        await may_end.wait()
        for event in seen:
            events.remove(event)

    async with work(dsn, late):
        late.enqueue(conn)
        conn.commit()
        await has_read.wait()
        events.append(2)
        late.enqueue_many(conn, [(), ()])
        conn.commit()
        await until(lambda: "skipped" in eyes.states() and "available" not in eyes.states())
        may_end.set()
        await until(lambda: eyes.states().keys() == {"completed", "skipped"})
    assert len(events) == left


# Neighbours -----------------------------------------------------------------------------------------------------------


@pytest.mark.promise("F13")
async def test_a_busy_key_does_not_starve_free_jobs(dsn: str, eyes: Eyes, conn: psycopg.Connection) -> None:
    """10,000 jobs of one key ahead of 100 free ones, in a worker with ten slots whose busy job takes its time."""
    gate = asyncio.Event()
    busy_runs = 0

    @task(name="locks.busy", lock="busy")
    async def busy() -> None:
        nonlocal busy_runs
        busy_runs += 1
        await gate.wait()

    @task(name="locks.free")
    async def free() -> None: ...

    busy.enqueue_many(conn, [() for _ in range(10_000)])
    free.enqueue_many(conn, [() for _ in range(100)])
    conn.commit()
    async with work(dsn, busy, free) as worker:
        await until(eyes.done(100), 30)
        assert busy_runs <= 1
        assert worker.services.fetcher.fetches < 100
        gate.set()


@pytest.mark.promise("F22")
async def test_resuming_a_queue_lets_in_who_waited_there(dsn: str, eyes: Eyes, conn: psycopg.Connection) -> None:
    gate = asyncio.Event()

    @task(name="locks.paused", lock="k")
    async def paused(first: bool) -> None:
        if first:
            await gate.wait()

    async with work(dsn, paused) as worker:
        paused.enqueue(conn, True)
        paused.enqueue(conn, False)
        conn.commit()
        await until(lambda: sorted(states(eyes)) == ["blocked", "running"])
        pgqueue.pause(conn, "default")
        conn.commit()
        gate.set()
        await until(eyes.done(1))
        await until(lambda: not worker.services.unblocker.pending)
        assert states(eyes) == ["completed", "blocked"]
        worker.services.sweep._last = monotonic() + 60  # what lets it in is the resume
        pgqueue.resume(conn, "default")
        conn.commit()
        await until(eyes.done(2))


async def test_an_idle_worker_needs_no_connection_for_locks(dsn: str, eyes: Eyes) -> None:
    async with work(dsn):
        await until(lambda: len(eyes.backends()) == 3)
        assert eyes.backends("pgqueue unblock") == []


async def test_the_worker_says_which_locks_have_no_timeout(dsn: str, caplog: pytest.LogCaptureFixture) -> None:
    @task(name="locks.endless", lock="k")
    def endless() -> None: ...

    @task(name="locks.bounded", lock="k", timeout=5)
    def bounded() -> None: ...

    async with work(dsn, endless, bounded):
        said = [record.getMessage() for record in caplog.records if "without a timeout" in record.getMessage()]
    assert len(said) == 1 and "locks.endless" in said[0] and "bounded" not in said[0]


# People ---------------------------------------------------------------------------------------------------------------


async def test_people_see_who_holds_a_key_and_who_waits(dsn: str, eyes: Eyes, conn: psycopg.Connection) -> None:
    gate = asyncio.Event()

    @task(name="locks.seen", lock="user:{user}")
    async def seen(user: int) -> None:
        await gate.wait()

    async with work(dsn, seen) as worker:
        [holder, second, _] = seen.enqueue_many(conn, [(1,), (1,), (1,)])
        conn.commit()
        await until(lambda: sorted(states(eyes)) == ["blocked", "blocked", "running"])
        [lock] = locks(conn)
        assert (lock.key, lock.waiting, lock.next) == ("user:1", 2, second.id)
        [who] = lock.holders
        assert (who.id, who.task, who.state, who.worker) == (holder.id, "locks.seen", "running", worker.worker_id)
        assert who.process and who.age is not None and who.age < 60 and lock.waited is not None
        assert locks(conn, "user:2") == []
        conn.rollback()
        kept = release(conn, "user:1")
        conn.commit()
        assert kept.ids == () and [job.id for job in kept.running] == [holder.id] and not kept.running[0].dead
        assert eyes.state(second.id) == "blocked"
        gate.set()
        await until(eyes.done(3))
    assert locks(conn) == []


async def test_releasing_takes_the_key_from_who_waits_for_its_retry(
    dsn: str, eyes: Eyes, conn: psycopg.Connection
) -> None:
    @task(name="locks.late", lock=Lock("k", hold_on_retry=True), retry=RetryPolicy(first=3600))
    async def late(fails: bool) -> None:
        if fails:
            raise ValueError

    async with work(dsn, late) as worker:
        first, second = late.enqueue_many(conn, [(True,), (False,)])
        conn.commit()
        await until(eyes.is_in(first.id, "scheduled"))
        assert eyes.state(second.id) == "blocked"
        [lock] = locks(conn)
        assert [(holder.id, holder.state, holder.age) for holder in lock.holders] == [(first.id, "scheduled", None)]
        conn.rollback()
        worker.services.sweep._last = monotonic() + 60  # what lets the next one in is the release
        assert release(conn, "k").ids == (first.id,)
        conn.commit()
        await until(eyes.is_in(second.id, "completed"))
    assert eyes.all("SELECT state, holds, attempt FROM pgqueue.job WHERE id = %s", first.id) == [
        ("scheduled", False, 1)
    ]


async def test_releasing_gives_back_what_a_worker_known_to_be_dead_held(
    dsn: str, eyes: Eyes, conn: psycopg.Connection
) -> None:
    eyes.do(
        "INSERT INTO pgqueue.job_running (state, id, task, worker_id, claim, started_at, lock_key, holds, attempt) "
        "VALUES ('running', 1, 'locks.nobody', 99, 1, now(), 'k', true, 1)"
    )
    done = release(conn, "k")
    conn.commit()
    assert (done.ids, done.running) == ((1,), ())
    assert eyes.all("SELECT id, rank, holds, attempt FROM pgqueue.job_blocked") == [(1, 10, False, 0)]


@pytest.mark.promise("F125")
async def test_a_key_is_released_by_a_job_whose_id_stands_twice(dsn: str, eyes: Eyes, conn: psycopg.Connection) -> None:
    """As after a restore: a job that was granted its key, and one of the same id that waits for another key."""
    eyes.do(
        "INSERT INTO pgqueue.job_available (state, id, task, lock_key, holds, hold_pos, rank) "
        "VALUES ('available', 7, 'locks.twice', 'k', true, 1, 10)"
    )
    eyes.do(
        "INSERT INTO pgqueue.job_blocked (state, id, task, lock_key, key) "
        "VALUES ('blocked', 7, 'locks.twice', 'other', 'lock:other')"
    )
    assert release(conn, "k").ids == (7,)
    conn.commit()
    assert eyes.all("SELECT lock_key, state, holds FROM pgqueue.job ORDER BY 1") == [
        ("k", "available", False),
        ("other", "blocked", False),
    ]

    @task(name="locks.twice", lock="k")
    async def twice() -> None: ...

    async with work(dsn, twice):
        await until(eyes.done(2))


def test_the_command_lists_and_releases(dsn: str, eyes: Eyes) -> None:
    eyes.do(
        "INSERT INTO pgqueue.worker (lease, pid, concurrency, host, version_tag, queues) "
        "VALUES ('15 s', 7, 1, 'h', 't', '{default}')"
    )
    eyes.do(
        "INSERT INTO pgqueue.job_running (state, id, task, worker_id, claim, started_at, lock_key, holds) "
        "SELECT 'running', 1, 'mail.send', id, 1, now(), 'user:1', true FROM pgqueue.worker"
    )
    eyes.do(
        "INSERT INTO pgqueue.job_available (id, task, lock_key, holds, rank) "
        "VALUES (2, 'mail.send', 'user:2', true, 10)"
    )
    eyes.do(
        "INSERT INTO pgqueue.job_blocked (state, id, task, key, lock_key) "
        "VALUES ('blocked', 3, 'x', 'lock:user:1', 'user:1')"
    )
    shown = command("locks", "--dsn", dsn)
    assert shown.returncode == 0
    assert "1 mail.send (h:7)" in shown.stdout and "2 mail.send (granted)" in shown.stdout
    [first, second] = items(command("locks", "--json", "--dsn", dsn))
    assert (first["key"], first["waiting"], second["key"], second["waiting"]) == ("user:1", 1, "user:2", 0)
    kept = command("locks", "release", "user:1", "--yes", "--dsn", dsn)
    assert (
        kept.returncode == 1 and "job 1 (mail.send) runs on worker" in kept.stdout and "pgqueue cancel 1" in kept.stdout
    )
    refused = command("locks", "release", "user:2", "--dsn", dsn)
    assert refused.returncode == 1 and "--yes" in refused.stderr
    done = command("locks", "release", "user:2", "--yes", "--dsn", dsn)
    assert done.returncode == 0 and done.stdout == "user:2: taken from job 2\n"
    assert eyes.state(2) == "blocked"
    enqueued = command("enqueue", "x", '{"a": 1}', "--lock", "{not} a template", "--dsn", dsn)
    assert eyes.one("SELECT lock_key FROM pgqueue.job WHERE id = %s", int(enqueued.stdout)) == "{not} a template"


def test_drain_runs_keyed_jobs_one_after_another(conn: psycopg.Connection) -> None:
    from pgqueue.testing import drain

    order: list[int] = []

    @task(name="locks.drained", lock="k")
    def drained(n: int) -> None:
        order.append(n)

    @task(name="locks.drained_free")
    def free() -> None:
        order.append(-1)

    drained.enqueue_many(conn, [(n,) for n in range(3)])
    free.enqueue(conn)
    assert drain(conn).completed == 4
    assert [n for n in order if n >= 0] == [0, 1, 2]
    conn.rollback()
