"""The rings of history: they turn when their time has come, in one step or not at all, and nobody waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from time import monotonic

import psycopg
import pytest
from workers import Eyes, Taker

from pgqueue.client.tasks import task
from pgqueue.database.row_errors import Kept
from pgqueue.database.sessions import Link, Session
from pgqueue.jobs.outcomes import COMPLETED
from pgqueue.testing import Clock
from pgqueue.worker.complete.outcome_sql import OutcomeSql
from pgqueue.worker.leader import pruner
from pgqueue.worker.leader.pruner import READ_SECONDS, Pruner


@task(name="pruner.nothing")
async def nothing() -> None: ...


LEAVES = {"done": 8, "dead": 16, "attempt": 16}


class Bench:
    """The pruner without its loops, and a clock to turn."""

    def __init__(self, dsn: str, eyes: Eyes, clock: Clock) -> None:
        self.clock = clock
        self.session = Session(Link(dsn, "pgqueue"), "housekeeping")
        self.eyes = eyes
        self.pruner = Pruner(self.session)
        eyes.do("UPDATE pgqueue.ring SET since = pgqueue.now()")  # not since the template was migrated

    def later(self, interval: str) -> None:
        self.clock.set(self.eyes.one("SELECT pgqueue.now() + %s::interval", interval))

    def bin(self, kind: str = "done") -> int:
        found: int = self.eyes.one("SELECT bin FROM pgqueue.ring WHERE kind = %s", kind)
        return found

    def finish(self, name: str = "x") -> None:
        """A job that ends now, as the completer ends it."""
        self.eyes.do(
            "INSERT INTO pgqueue.job (state, task, finished_at, bin) "
            "SELECT 'completed', %s, pgqueue.now(), bin FROM pgqueue.ring WHERE kind = 'done'",
            name,
        )

    def history(self) -> list[str]:
        return [name for (name,) in self.eyes.all("SELECT task FROM pgqueue.job_done ORDER BY finished_at")]


@pytest.fixture
async def bench(dsn: str, eyes: Eyes) -> AsyncIterator[Bench]:
    with Clock(eyes.conn) as clock:
        made = Bench(dsn, eyes, clock)
        yield made
        await made.session.close()


@pytest.mark.promise("F20")
async def test_a_ring_turns_when_its_leaf_is_old_enough_and_not_before(bench: Bench) -> None:
    await bench.pruner.rings()
    assert bench.bin() == 0
    bench.later("3 hours 59 minutes")  # 1 day / (8 - 2) = 4 hours
    await bench.pruner.rings()
    assert bench.bin() == 0
    bench.later("2 minutes")
    await bench.pruner.rings()
    await bench.pruner.rings()
    assert (bench.bin(), bench.bin("dead"), bench.bin("attempt")) == (1, 0, 0)
    bench.later("1 day")
    await bench.pruner.rings()
    assert (bench.bin(), bench.bin("dead"), bench.bin("attempt")) == (2, 1, 1)


@pytest.mark.promise("F20")
async def test_a_ring_that_turned_in_a_time_to_come_turns_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's clock was a year ahead when the rings turned. The naive version: history grows for a year."""
    now = bench.eyes.one("SELECT pgqueue.now()")
    bench.later("1 year")
    await bench.pruner.rings()
    assert {bench.bin(kind) for kind in LEAVES} == {1}
    bench.clock.set(now)
    bench.finish()
    await bench.pruner.rings()  # it may be right in a moment
    assert bench.eyes.one("SELECT count(*) FROM pgqueue.ring WHERE since > pgqueue.now()") == 5
    monkeypatch.setattr(pruner, "AHEAD_SECONDS", 0.0)
    await bench.pruner.rings()
    assert bench.eyes.one("SELECT count(*) FROM pgqueue.ring WHERE since > pgqueue.now()") == 0
    assert {bench.bin(kind) for kind in LEAVES} == {1} and bench.history() == ["x"]
    bench.later("4 hours 1 minute")
    await bench.pruner.rings()
    assert bench.bin() == 2 and bench.history() == ["x"]


@pytest.mark.promise("F20")
async def test_a_clock_that_was_behind_for_a_moment_changes_no_ring(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Naive is to count anew at once: the leaf would seem a day old when the clock is right again."""
    now = bench.eyes.one("SELECT pgqueue.now()")
    for _ in range(2):
        bench.later("-1 day")
        await bench.pruner.rings()
        bench.clock.set(now)
        await bench.pruner.rings()
    assert bench.bin() == 0
    monkeypatch.setattr(pruner, "AHEAD_SECONDS", 0.0)
    bench.later("-1 day")
    await bench.pruner.rings()
    bench.clock.set(now)
    await bench.pruner.rings()
    assert bench.bin() == 1


@pytest.mark.promise("F20")
@pytest.mark.parametrize(
    "step",
    [
        "7 hours",
        *(pytest.param(step, marks=pytest.mark.second) for step in ("50 minutes", "4 hours 1 minute", "26 hours")),
    ],
)
async def test_nothing_younger_than_the_retention_is_lost_and_the_rest_goes_over_three_turns(
    step: str, bench: Bench, eyes: Eyes
) -> None:
    steps, seconds = 0, eyes.one("SELECT extract(epoch FROM %s::interval)::float8", step)
    turns: list[int] = []
    while len(turns) < 3 * LEAVES["done"] and steps < 200:
        bench.finish(str(steps))
        bench.later(step)
        steps += 1
        await bench.pruner.rings()
        if bench.bin() != (turns[-1] if turns else 0):
            turns.append(bench.bin())
        kept = eyes.all(
            "SELECT task::int, extract(epoch FROM pgqueue.now() - finished_at)::float8 FROM pgqueue.job_done"
        )
        missing = set(range(steps)) - {number for number, _ in kept}
        assert all((steps - number) * seconds >= 86_400 for number in missing)
        # Bounded too: everything goes after the retention and the leaves' own lengths.
        assert max(age for _, age in kept) <= 86_400 + (LEAVES["done"] + 2) * max(seconds, 14_400)
    assert turns[: 2 * LEAVES["done"]] == [*range(1, 8), 0, *range(1, 8), 0]


@pytest.mark.promise("F20")
async def test_a_clock_that_goes_back_and_a_changed_retention_only_move_the_next_turn(bench: Bench, eyes: Eyes) -> None:
    bench.later("5 hours")
    await bench.pruner.rings()
    assert bench.bin() == 1
    bench.finish()
    bench.later("-3 days")
    await bench.pruner.rings()
    bench.later("3 days")
    eyes.do("UPDATE pgqueue.ring SET retention = '60 days' WHERE kind = 'done'")
    bench.later("5 hours")
    await bench.pruner.rings()
    assert bench.bin() == 1
    eyes.do("UPDATE pgqueue.ring SET retention = '1 hour' WHERE kind = 'done'")
    await bench.pruner.rings()
    assert bench.bin() == 2
    assert bench.history() == ["x"]


@pytest.mark.promise("F20")
async def test_an_open_reader_puts_off_that_turn_only_and_breaks_no_connection(
    bench: Bench, eyes: Eyes, conn: psycopg.Connection
) -> None:
    conn.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
    conn.execute("SELECT count(*) FROM pgqueue.job")  # locks every leaf, as pg_dump does
    bench.later("5 hours")
    await bench.session.run()
    generation = bench.session.generation
    assert await bench.pruner.rings() == READ_SECONDS
    assert bench.bin() == 0
    assert bench.session.generation == generation  # other housekeeping has it, too
    advance = bench.session.link.statement("pruner_advance", kind="dead", forced=True)
    assert await bench.session.run(advance) == [[(None,)]]
    conn.rollback()
    assert await bench.pruner.rings() is None
    assert bench.bin() == 1
    assert await bench.session.run(advance) == [[(True,)]]


@pytest.mark.second
@pytest.mark.promise("F20")
async def test_completions_never_wait_for_a_ring_that_turns_beside_a_reader(
    bench: Bench, eyes: Eyes, dsn: str, conn: psycopg.Connection
) -> None:
    conn.execute("SELECT count(*) FROM pgqueue.job")
    bench.later("5 hours")
    taker, spans, stop = Taker(dsn), list[float](), asyncio.Event()

    async def complete() -> None:
        while not stop.is_set():
            eyes.do("INSERT INTO pgqueue.job (task) VALUES ('x')")
            taker.fetcher.wake(zero=True)
            [job] = await taker.fetch()
            began = monotonic()
            await taker.session.run(
                *(ending for ending, _ in OutcomeSql("pgqueue", "v", True).many([(job, COMPLETED)], taker.worker_id))
            )
            spans.append(monotonic() - began)

    completing = asyncio.ensure_future(complete())
    for _ in range(20):
        await bench.pruner.rings()
    assert bench.bin() == 0
    conn.rollback()
    for _ in range(12):
        await bench.pruner.rings()
        bench.later("5 hours")
    stop.set()
    await completing
    await taker.close()
    spans.sort()
    print(f"longest completions while the ring turned: {[round(span * 1000) for span in spans[-5:]]} ms")
    # A turn that has to wait gives up after 50 ms, and 20 had to; the rest, and the longest two, are this machine.
    assert spans[-3] < 0.25
    assert bench.bin() != 0
    assert "running" not in eyes.states()


@pytest.mark.promise("F20")
async def test_two_that_turn_the_ring_at_once_turn_it_once(bench: Bench, dsn: str) -> None:
    bench.later("5 hours")
    others = [Session(Link(dsn, "pgqueue"), "maintain") for _ in range(8)]
    statement = bench.session.link.statement("pruner_advance", kind="done", forced=False)
    answers = await asyncio.gather(*(other.run(statement) for other in others))
    assert sum(bool(answer[0][0][0]) for answer in answers) == 1
    assert bench.bin() == 1
    await asyncio.gather(*(other.close() for other in others))


@pytest.mark.promise("F20")
async def test_a_turn_that_fails_changes_nothing(bench: Bench, eyes: Eyes) -> None:
    for _ in range(8):
        bench.finish()
        bench.later("5 hours")
        await bench.pruner.rings()
    before, place = bench.history(), bench.bin()
    eyes.do(
        "CREATE FUNCTION fail() RETURNS trigger LANGUAGE plpgsql AS "
        "$$BEGIN RAISE 'disk full' USING ERRCODE = '53100'; END$$; "
        "CREATE TRIGGER fail BEFORE UPDATE ON pgqueue.ring FOR EACH ROW EXECUTE FUNCTION fail()"
    )
    bench.later("5 hours")
    with pytest.raises(Kept, match="disk full"):
        await bench.pruner.rings()
    assert (bench.history(), bench.bin()) == (before, place)


async def test_who_has_waited_for_an_hour_is_forgotten(bench: Bench, eyes: Eyes) -> None:
    eyes.do("INSERT INTO pgqueue.job_waiter (job_id, created_at) VALUES (1, pgqueue.now())")
    bench.later("59 minutes")
    await bench.pruner.forget("waiters")
    eyes.do("INSERT INTO pgqueue.job_waiter (job_id, created_at) VALUES (2, pgqueue.now())")
    assert eyes.all("SELECT job_id FROM pgqueue.job_waiter ORDER BY 1") == [(1,), (2,)]
    bench.later("2 minutes")
    await bench.pruner.forget("waiters")
    assert eyes.all("SELECT job_id FROM pgqueue.job_waiter") == [(2,)]


@pytest.mark.promise("F88")
async def test_operations_by_filter_are_kept_for_ninety_days(bench: Bench, eyes: Eyes) -> None:
    """With the jobs of each reason; one that is not over stays."""
    for days, open in ((1, False), (89, False), (91, False), (200, False), (200, True)):
        eyes.do(
            "WITH made AS (INSERT INTO pgqueue.bulk (actor, action, target, states, up_to, ended_at) VALUES ('a', "
            "'discard', '{}', '{failed}', 1, CASE WHEN NOT %s THEN pgqueue.now() - make_interval(days => %s) END) "
            "RETURNING id) INSERT INTO pgqueue.bulk_job SELECT id, 'cancelled', 7 FROM made",
            open,
            days,
        )
    await bench.pruner.forget("operations_ended")
    assert eyes.all("SELECT b.id FROM pgqueue.bulk b JOIN pgqueue.bulk_job j ON j.bulk_id = b.id ORDER BY 1") == [
        (1,),
        (2,),
        (5,),
    ]
    assert eyes.one("SELECT count(*) FROM pgqueue.bulk_job") == 3


@pytest.mark.promise("F309")
async def test_versions_are_forgotten_after_thirty_days_without_a_worker(
    bench: Bench, eyes: Eyes, monkeypatch: pytest.MonkeyPatch
) -> None:
    eyes.do(
        "INSERT INTO pgqueue.version_start SELECT 'v' || days, pgqueue.now() - make_interval(days => days) "
        "FROM unnest(ARRAY[1, 29, 31, 32]) AS days"
    )
    eyes.do(
        "INSERT INTO pgqueue.worker (lease, pid, concurrency, host, version_tag, queues, started_at) "
        "VALUES ('1 h', 1, 1, 'h', 'v32', '{default}', pgqueue.now())"
    )
    await bench.pruner.forget("versions")
    left = "SELECT version_tag FROM pgqueue.version_start ORDER BY first_at DESC"
    assert eyes.all(left) == [("v1",), ("v29",), ("v32",)]
    monkeypatch.setitem(pruner.FORGOTTEN, "versions", ("version_start", "pruner_versions", {"days": 30, "most": 1}))
    await bench.pruner.forget("versions")
    assert eyes.all(left) == [("v1",), ("v32",)]
