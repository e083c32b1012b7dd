"""Jobs of all kinds while ids are given again, in an order that a seed decides: each runs, and none for a stranger.

One application enqueues job after job, each in a transaction of its own. Meanwhile the sequence of ids is set back, and
advanced, under the workers. Twice the workers are stopped, as docs/operations.md has it: once all jobs are removed by
TRUNCATE … RESTART IDENTITY, once every sequence begins anew while all rows stay.

Then: the transaction that was given an id again is still open. One job waits for it, and no other one does.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count
from random import Random
from statistics import median
from time import monotonic
from typing import Any

import psycopg
import pytest
from handlers import begins, begun
from ids_again import Again, ids_again
from workers import Eyes, Taker, until, work

import pgqueue
from pgqueue import Job, Limit, NewJob, Rate, RetryPolicy, Unique, task
from pgqueue.database.backoff import OPEN_ID
from pgqueue.database.row_errors import meets_open_id, refuses_move
from pgqueue.worker.complete import completer
from pgqueue.worker.concurrency import unblocker
from pgqueue.worker.fetch import reconciler, refused_rows
from pgqueue.worker.leader import scheduler
from pgqueue.worker.liveness import rescue
from pgqueue.worker.worker import Worker

AGAIN = RetryPolicy(attempts=3, first=0.05)
ITEMS = [1, 2, 3, 4, 5]
KEYS = ("u0", "u1", "u2", "u3")


class Books:
    """What handlers have done, by the number of their job."""

    def __init__(self) -> None:
        self.ran: Counter[int] = Counter()
        self.followed: Counter[int] = Counter()
        self.items: defaultdict[int, list[int]] = defaultdict(list)
        self.at_once: Counter[str] = Counter()
        self.most: Counter[str] = Counter()

    @asynccontextmanager
    async def holding(self, key: str) -> AsyncIterator[None]:
        self.at_once[key] += 1
        self.most[key] = max(self.most[key], self.at_once[key])
        try:
            await asyncio.sleep(0.002)
            yield
        finally:
            self.at_once[key] -= 1


books = Books()


@task(name="again.plain")
async def plain(n: int) -> None:
    books.ran[n] += 1


@task(name="again.locked", lock="k", timeout=60)
async def locked(n: int) -> None:
    async with books.holding("lock"):
        books.ran[n] += 1


@task(name="again.limited", limit=Limit(2, name="again"), timeout=60)
async def limited(n: int) -> None:
    async with books.holding("limit"):
        books.ran[n] += 1


@task(name="again.rated", rate=Rate("500/s", name="again"))
async def rated(n: int) -> None:
    books.ran[n] += 1


@task(name="again.unique")
async def unique(n: int, key: str) -> None:
    async with books.holding(key):
        books.ran[n] += 1


@task(name="again.requested")
async def requested(n: int) -> None:
    books.ran[n] += 1


@task(name="again.walks", retry=AGAIN)
def walks(job: Job, n: int) -> None:
    """Goes on at its third item after it has failed there."""
    for [item] in job.iterate(lambda cursor: ((each, each) for each in ITEMS if each > (cursor or 0)), 1):
        books.items[n].append(item)
        if job.attempt == 1 and item == 3:
            raise ValueError("once more")
    books.ran[n] += 1


@task(name="again.effect", transactional=True, retry=AGAIN)
def effect(job: Job, n: int) -> None:
    job.connection.execute("INSERT INTO effect VALUES (%s)", [n])
    if job.attempt == 1:
        raise ValueError("once more")


@task(name="again.follows")
async def follows(n: int) -> None:
    books.followed[n] += 1


@task(name="again.first")
async def first(job: Job, n: int) -> None:
    job.enqueue(follows, n)
    books.ran[n] += 1


TASKS = (plain, locked, limited, rated, unique, requested, walks, effect, follows, first)
UNDER_WAY = "SELECT min(xact_start) FROM pg_stat_activity WHERE datname = current_database()"
"""When the oldest open transaction began; this session has one."""
HELD = """
    SELECT count(*), count(*) FILTER (WHERE finished_at IS NULL) FROM pgqueue.job
    WHERE unique_key = %s AND (finished_at IS NULL OR finished_at >= %s)
"""
"""How many jobs have this key, or had it at this time or later; and how many of them have not ended."""


class Application:
    """Enqueues one job after the other. An enqueue whose id is taken fails, and is tried again."""

    def __init__(self, dsn: str, random: Random) -> None:
        self.conn = psycopg.connect(dsn)
        self.dsn, self.random = dsn, random
        self.numbers = count()
        self.committed: set[int] = set()
        self.requests: set[str] = set()
        self.makes: list[Callable[[int], NewJob[Any]]] = [
            plain.new, locked.new, limited.new, rated.new, walks.new, effect.new, first.new, self.unique, self.request,
        ]  # fmt: skip

    def unique(self, n: int, key: str = "") -> NewJob[Any]:
        key = key or self.random.choice(KEYS)
        return unique.using(unique=Unique(lambda n, key: key), delay=self.delay()).new(n, key)

    def request(self, n: int) -> NewJob[Any]:
        return requested.using(idempotency_key=f"r{self.random.randrange(12)}", delay=self.delay()).new(n)

    def delay(self) -> float:
        return self.random.choice([0, 0.05, 0.2])

    def put(self, make: Callable[[int], NewJob[Any]] | None = None) -> None:
        n = next(self.numbers)
        job = (make or self.random.choice(self.makes))(n)
        while True:
            try:
                created = self._put(job)
            except psycopg.errors.UniqueViolation:
                self.conn.rollback()
                continue
            if created:
                self.committed.add(n)
            return

    def _put(self, job: NewJob[Any]) -> bool:
        """Commit it. Where its key is held, a job of that key holds it, and not a stranger with the id of one."""
        # A completion that is under way now has a time from before, and may be committed after the key was looked at.
        [(since,)] = self.conn.execute(UNDER_WAY).fetchall()
        [handle] = pgqueue.enqueue_many(self.conn, [job])
        if job.keys is not None and job.keys.unique is not None and not handle.created:
            [(holders, alive)] = self.conn.execute(HELD, [job.keys.unique, since]).fetchall()
            # The holder before counts, too, if a transaction has been open since before its end, as a worker's that
            # advances the sequences. This application has made the next job after that end.
            assert holders >= 1 >= alive, (job.keys.unique, holders, alive)
        self.conn.commit()
        if job.keys is not None and (request := job.keys.idempotency) is not None:
            assert handle.created is (request not in self.requests), request
            self.requests.add(request)
        return handle.created

    def begin_anew(self, how: Again) -> None:
        """No worker is there. Jobs with the first ids hold all keys; then the next jobs get these ids again."""
        self.conn.execute("SELECT setval('pgqueue.job_id_seq', 1, false)")
        self.put_unique()
        ids_again(self.dsn, how)
        if how == "truncated":
            self.committed.clear()
            # A request that had been done, and was noted as such, is not done again.
            noted = (
                "SELECT key FROM pgqueue.unique_key WHERE starts_with(key, 'idempotency') AND expires_at IS NOT NULL"
            )
            self.requests = {key.partition(":")[2] for (key,) in self.conn.execute(noted)}
            self.conn.commit()
        for _ in range(12):
            self.put()
        self.put_unique()

    def put_unique(self) -> None:
        for key in KEYS:
            self.put(lambda n, key=key: self.unique(n, key))  # type: ignore[misc]


@pytest.mark.second
@pytest.mark.promise("F29", "F123")
@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_jobs_of_all_kinds_go_on_while_ids_are_given_again(dsn: str, eyes: Eyes, seed: int) -> None:
    global books
    books = Books()
    random = Random(seed)
    application = Application(dsn, random)
    eyes.do("CREATE TABLE effect (n integer)")
    again: dict[int, Again] = {random.randrange(30, 60): "truncated", random.randrange(90, 120): "lagging"}
    async with AsyncExitStack() as crew:
        await start(crew, dsn)
        for step in range(150):
            if step in again:
                await crew.aclose()
                await asyncio.to_thread(application.begin_anew, again[step])
                await start(crew, dsn)
            elif random.random() < 0.1:
                await asyncio.to_thread(eyes.do, f"SELECT setval('pgqueue.job_id_seq', {random.randint(1, 40)}, false)")
            elif random.random() < 0.03:
                await asyncio.to_thread(eyes.do, "SELECT pgqueue.advance_sequences(true)")
            await asyncio.to_thread(application.put)
        await until(lambda: eyes.one("SELECT count(*) FROM pgqueue.job WHERE finished_at IS NULL") == 0)
    application.conn.close()
    check(eyes, application.committed)


async def start(crew: AsyncExitStack, dsn: str) -> None:
    for _ in range(2):
        await crew.enter_async_context(work(dsn, *TASKS, concurrency=8, poll=0.2))


def check(eyes: Eyes, committed: set[int]) -> None:
    rows = eyes.all("SELECT (args ->> 'n')::int, task, state, count(*) FROM pgqueue.job GROUP BY 1, 2, 3 ORDER BY 1")
    found = {n: name for n, name, state, times in rows if (state, times) == ("completed", 1) and name != follows.name}
    assert len([row for row in rows if row[1] != follows.name]) == len(found), rows
    assert found.keys() == committed
    effects = Counter(n for (n,) in eyes.all("SELECT n FROM effect") if n in committed)
    for n, name in found.items():
        if name == effect.name:
            assert effects[n] == 1, n
        else:
            assert books.ran[n] == 1, (n, name, books.ran[n])
        if name == walks.name:
            assert books.items[n][0] == 1 and sorted(set(books.items[n])) == ITEMS, (n, books.items[n])
        if name == first.name:
            assert books.followed[n] == 1, n
    assert set(found.values()) == {each.name for each in TASKS} - {follows.name}
    assert books.most["lock"] == 1 and books.most["limit"] <= 2
    assert all(books.most[key] <= 1 for key in KEYS)
    assert eyes.one("SELECT count(DISTINCT id) < count(*) FROM pgqueue.job"), "ids were given again"


# The transaction that has the id is open -----------------------------------------------------------------------------

BESIDE = 30
"""So many jobs go the way of the one that waits."""
SOON = 3.0
"""Seconds until these have gone on, on a busy machine. Naive: as long as that transaction is open."""
QUICKLY, HELD_MOST = 0.1, 0.8
"""Seconds until a plain job starts beside them: most of them, and each one."""


@task(name="again.quick")
async def quick(job: Job) -> None:
    begins(job)


@asynccontextmanager
async def open_with(dsn: str, eyes: Eyes, id: int, **options: Any) -> AsyncIterator[None]:
    """A transaction of the application is open that was given this id again. In the end it is committed."""
    with psycopg.connect(dsn) as conn:
        conn.execute("SELECT setval('pgqueue.job_id_seq', %s, false)", [id])
        assert pgqueue.remote("again.elsewhere").using(queue="elsewhere", **options).enqueue(conn).id == id
        eyes.do("SELECT setval('pgqueue.job_id_seq', 1000)")
        yield


async def start_quickly(eyes: Eyes, seconds: float = 1.5) -> None:
    """For so long plain jobs start at once. A busy machine may make some slow, but none as slow as a held session."""
    took, ends = [], monotonic() + seconds
    while monotonic() < ends:
        at = monotonic()
        await begun(int(quick.enqueue(eyes.conn).id))
        took.append(monotonic() - at)
    assert median(took) < QUICKLY and max(took) < HELD_MOST, sorted(took)[-5:]


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """What waits is tried again after a second. It is named, with the reason."""
    for module, name in (
        (completer, "TRAPPED_PAUSE"), (scheduler, "LEFT_SECONDS"), (rescue, "AGAIN_SECONDS"),
        (reconciler, "REFUSED_SECONDS"), (unblocker, "SOON_SECONDS"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, 1.0)
    yield
    assert any(OPEN_ID in record.getMessage() for record in caplog.get_records("call"))


@pytest.mark.promise("F29", "F129")
async def test_a_retry_whose_id_an_open_transaction_has_keeps_no_other_from_ending(
    dsn: str, eyes: Eyes, soon: None
) -> None:
    """Naive: the flush that has it waits 2 s, fails, and is sent again as a whole."""
    gate, attempts = asyncio.Event(), list[int]()

    @task(name="again.fails", retry=RetryPolicy(attempts=2, first=0.05))
    async def fails(job: Job, n: int) -> None:
        begins(job)
        await gate.wait()
        if n == 0:
            attempts.append(job.attempt)
        if job.attempt == 1:
            raise ValueError("once more")

    async with work(dsn, fails, quick, concurrency=2 * BESIDE):
        first, *others = [int(each.id) for each in fails.enqueue_many(eyes.conn, [(n,) for n in range(BESIDE)])]
        await begun(first, *others)
        async with open_with(dsn, eyes, first, delay=3600):
            gate.set()
            await asyncio.gather(
                start_quickly(eyes),
                until(lambda: all(eyes.state(each) == "completed" for each in others), SOON),
            )
            assert eyes.state(first) == "running" and attempts == [1]
        await until(lambda: attempts == [1, 2], 5.0)
        await until(eyes.is_in(first, "completed"))
    assert eyes.all("SELECT task, id = %s FROM pgqueue.job WHERE state = 'scheduled'", first) == [
        ("again.elsewhere", False)
    ]


@pytest.mark.promise("F29", "F129")
async def test_a_due_job_whose_id_an_open_transaction_has_keeps_no_other_from_starting(
    dsn: str, eyes: Eyes, soon: None
) -> None:
    """Naive: no due job becomes available, and the session that claims plain jobs is held for 2 s each time."""
    global books
    books = Books()
    async with work(dsn, plain, quick) as worker:
        await until(worker.services.election.leads)
        due = plain.using(delay=0.5)
        first = int(due.enqueue_many(eyes.conn, [(n,) for n in range(BESIDE)])[0].id)
        async with open_with(dsn, eyes, first):
            others = range(1, BESIDE)
            await asyncio.gather(start_quickly(eyes), until(lambda: all(books.ran[n] for n in others), SOON))
            assert eyes.state(first) == "scheduled" and books.ran[0] == 0
        await until(lambda: books.ran[0] == 1, 5.0)
    assert sum(books.ran.values()) == BESIDE


@pytest.mark.promise("F29", "F129")
@pytest.mark.parametrize("ours", [False, True], ids=["of a dead worker", "of this one"])
async def test_a_running_job_whose_id_an_open_transaction_has_keeps_no_other_from_being_given_back(
    dsn: str, eyes: Eyes, soon: None, ours: bool
) -> None:
    """Its worker died, or the answer to its claim was lost. Naive: none of the jobs beside it is given back."""
    global books
    books = Books()

    victim = Taker(dsn)

    async def give_back(worker: Worker) -> None:
        if ours:
            worker.state.in_doubt()
        else:
            await worker.services.rescue.seen([(victim.worker_id, 0)], leads=True)

    async with work(dsn, plain, quick) as worker:
        await until(worker.services.election.leads)
        eyes.do(
            "INSERT INTO pgqueue.job (task, state, worker_id, claim, started_at, args) SELECT 'again.plain', "
            "'running', %s, 0, now(), jsonb_build_object('n', n) FROM generate_series(1, %s) AS n",
            worker.worker_id if ours else victim.worker_id,
            BESIDE,
        )
        id, waits = eyes.all("SELECT id, (args ->> 'n')::int FROM pgqueue.job_running WHERE claim = 0 ORDER BY id")[5]
        async with open_with(dsn, eyes, id):
            others = set(range(1, BESIDE + 1)) - {waits}
            gone_on = until(lambda: all(books.ran[n] for n in others), SOON)
            await asyncio.gather(give_back(worker), start_quickly(eyes), gone_on)
            assert eyes.state(id) == "running"
        await until(lambda: books.ran[waits] == 1, 5.0)
    await victim.close()
    assert books.ran == dict.fromkeys(range(1, BESIDE + 1), 1)


@pytest.mark.promise("F29", "F129")
async def test_a_granted_job_whose_id_an_open_transaction_has_keeps_no_other_key_waiting(
    dsn: str, eyes: Eyes, soon: None
) -> None:
    """Naive: its INSERT waits a second, with the keys of the batch locked; so does each smaller batch that it is in."""
    ran: Counter[int] = Counter()

    @task(name="again.keyed", lock="{n}", timeout=60)
    async def keyed(n: int) -> None:
        ran[n] += 1

    async with work(dsn, keyed, quick) as worker:
        eyes.do(  # after a crash: such a job is granted, for it goes by its lane
            "INSERT INTO pgqueue.job (task, state, key, lock_key, crashes, rank, args) SELECT 'again.keyed', "
            "'blocked', 'lock:' || n, n, 1, -2, jsonb_build_object('n', n) FROM generate_series(1, %s) AS n",
            BESIDE,
        )
        id, waits = eyes.all("SELECT id, (args ->> 'n')::int FROM pgqueue.job_blocked ORDER BY id")[5]
        async with open_with(dsn, eyes, id):
            worker.services.sweep.sweep_soon()
            await until(lambda: len(ran) == BESIDE - 1, SOON)
            assert eyes.state(id) == "blocked" and ran[waits] == 0

        def goes_on() -> bool:
            worker.services.sweep.sweep_soon()
            return ran[waits] == 1

        await until(goes_on, 5.0)
    assert ran == dict.fromkeys(range(1, BESIDE + 1), 1)


@pytest.mark.promise("F29", "F129")
async def test_a_claim_that_meets_an_open_transaction_with_the_id_of_a_job_keeps_no_other_from_starting(
    dsn: str, eyes: Eyes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that run are being restored. The first claim waits 2 s. Naive: so does each one, and no job starts."""
    global books
    books = Books()
    monkeypatch.setattr(refused_rows, "SOON_SECONDS", 0.5)
    first = int(plain.enqueue_many(eyes.conn, [(n,) for n in range(BESIDE)])[0].id)
    with psycopg.connect(dsn) as conn:
        conn.execute(
            "INSERT INTO pgqueue.job (id, task, state, worker_id, claim, started_at) OVERRIDING SYSTEM VALUE "
            "VALUES (%s, 'again.elsewhere', 'running', 999, 0, now())",
            [first],
        )
        async with work(dsn, plain, quick, concurrency=10):
            await until(lambda: all(books.ran[n] for n in range(1, BESIDE)), 2 + SOON)
            await start_quickly(eyes)
            assert books.ran[0] == 0
            conn.rollback()
            await until(lambda: books.ran[0] == 1, 5.0)
    assert books.ran == dict.fromkeys(range(BESIDE), 1)


@pytest.mark.promise("F129")
async def test_a_lock_on_a_table_is_taken_for_no_id(dsn: str, eyes: Eyes) -> None:
    """Naive: each lock that was not had in time counts, and due jobs are left alone one by one for a locked table."""
    taker = Taker(dsn)
    eyes.do("INSERT INTO pgqueue.job (state, task, run_at) VALUES ('scheduled', 'again.plain', now() - interval '1 s')")
    promote = taker.link.statement("scheduler_promote", after="-infinity", passed="{}", n=10, notify=False)
    with psycopg.connect(dsn) as conn:
        conn.execute("LOCK TABLE pgqueue.job_available IN SHARE MODE")
        with pytest.raises(psycopg.errors.LockNotAvailable) as locked:
            await taker.session.run(promote)
    await taker.close()
    assert not meets_open_id(locked.value) and not refuses_move(locked.value)
