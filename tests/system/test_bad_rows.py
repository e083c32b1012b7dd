"""A row that was restored, or inserted by hand, with a value that fits nowhere: it is put aside, and ends no worker."""

from __future__ import annotations

import psycopg
import pytest
from workers import Eyes, until, work

from pgqueue.admin import limits
from pgqueue.client.tasks import Task, task
from pgqueue.database.statements import texts
from pgqueue.jobs.concurrency import Limit, Rate

pytestmark = pytest.mark.each_value
BAD = "INSERT INTO pgqueue.job (task, state, {}, priority) VALUES ('{}', 'blocked', {}, {})"


@task(name="bad.locked", lock="k")
async def locked() -> None:
    pass


@task(name="bad.limited", limit=Limit(5, name="few"))
async def limited() -> None:
    pass


@task(name="bad.rated", rate=Rate("50/s", name="slow"))
async def rated() -> None:
    pass


KEYS = {
    "a lock": (locked, "key, lock_key, lock_limit, on_locked", "'lock:k', 'k', 1, 'wait'"),
    "a limit": (limited, "key, limit_key", "'limit:few', 'few'"),
    "a rate": (rated, "key, rate_key", "'rate:slow', 'slow'"),
}


@pytest.mark.promise("F45")
@pytest.mark.parametrize(
    ("kind", "priority"), [("a lock", 10), ("a lock", 30_000), ("a limit", 30_000), ("a rate", 30_000)]
)
async def test_a_blocked_job_that_fits_nowhere_is_put_aside(dsn: str, eyes: Eyes, kind: str, priority: int) -> None:
    """Before, the worker ended when it was that job's turn, and so did the next one."""
    mine, columns, values = KEYS[kind]
    eyes.do(BAD.format(columns, mine.name, values, priority))
    with psycopg.connect(dsn) as conn:
        good = [mine.enqueue(conn).id for _ in range(3)]
    async with work(dsn, mine) as worker:
        worker.services.sweep.sweep_soon()
        for id in good:
            await until(eyes.is_in(id, "completed"))
        assert worker.state.phase == "running"
    assert eyes.one("SELECT count(*) FROM pgqueue.job_blocked WHERE priority NOT BETWEEN 0 AND 9") == 0
    assert eyes.happened("failed") == eyes.states().get("failed", 0)


# Rows of rates and limits ---------------------------------------------------------------------------------------------


@task(name="bad.other_limited", limit=Limit(5, name="many"))
async def other_limited() -> None:
    pass


@task(name="bad.other_rated", rate=Rate("500/s", name="fast"))
async def other_rated() -> None:
    pass


LIMITER = "INSERT INTO pgqueue.limiter (key, next_at, worker_id) VALUES ('{}', '{}', {});"
RATE = (
    "DELETE FROM pgqueue.key_rate WHERE name = 'slow';"
    "INSERT INTO pgqueue.key_rate (name, count, period, burst, declared_count, declared_period, declared_at, set_at) "
    "VALUES ('slow', {});"
)
LIMIT = (
    "DELETE FROM pgqueue.key_limit WHERE name = 'few';"
    "INSERT INTO pgqueue.key_limit (name, n, declared, declared_at, set_at) VALUES ('few', {});"
)
END, LONG_AGO = "294276-12-31 23:59:59+00", "4714-11-24 00:00:00+00 BC"
MILLION_YEARS = RATE.format("1, 31622400, 1000000, NULL, NULL, NULL, now()")
ROWS = {
    "the end of time": LIMITER.format("slow", END, 1),
    "long ago, of no worker": LIMITER.format("slow", LONG_AGO, -(2**63)),
    "the highest id of a worker": LIMITER.format("slow", "2020-01-01", 2**63 - 1),
    "keys that none has": LIMITER.format("x:" + "x" * 498, END, 0) + LIMITER.format("slow\n", LONG_AGO, 0),
    "as many as fit": RATE.format("1000000, 1, 1000000, 1000000, 1, NULL, NULL"),
    "a burst of a million years": MILLION_YEARS,
    "a burst of a million years, used up": MILLION_YEARS + LIMITER.format("slow", END, 1),
    "no numbers are declared": RATE.format("500, 1, 1, -2147483648, 'NaN', 'infinity', '-infinity'"),
    "infinity is declared": RATE.format("500, 1, 1, 0, '-infinity', '-infinity', 'infinity'"),
    "a limit that is as high as can be": LIMIT.format("2147483647, 2147483647, 'infinity', NULL"),
    "a limit that was set at no time": LIMIT.format("2147483647, NULL, NULL, '-infinity'"),
}
"""What the constraints of `limiter`, `key_rate` and `key_limit` let pass."""
A_POISON_JOB = (
    "INSERT INTO pgqueue.job (task, state, key, rate_key, crashes, rank) "
    "VALUES ('bad.rated', 'blocked', 'rate:slow', 'slow', 3, -1)"
)


@pytest.mark.promise("F128")
@pytest.mark.parametrize("when", ["before", "meanwhile"])
@pytest.mark.parametrize("row", [*ROWS.values()], ids=[*ROWS])
async def test_a_row_of_a_rate_or_limit_that_is_nonsense_stops_nothing(
    row: str, when: str, dsn: str, eyes: Eyes
) -> None:
    """Rates whose time, or whose burst, could not be counted in the server's times stopped all jobs of that rate, and
    all looks for poison jobs.
    """
    tasks = limited, rated, other_limited, other_rated

    async def run_all(*, but: Task[..., None] | None = None) -> None:
        with psycopg.connect(dsn) as conn:
            made = [(each, each.enqueue(conn).id) for each in tasks for _ in range(3)]
        for each, id in made:
            if each is not but:
                await until(eyes.is_in(id, "completed"))

    if when == "before":
        eyes.conn.execute(row.encode())
    async with work(dsn, *tasks) as worker:
        if when == "meanwhile":
            await run_all()
            eyes.do("DELETE FROM pgqueue.limiter")
            eyes.conn.execute(row.encode())
        worker.services.sweep.sweep_soon()
        # A burst that is used up, or that a worker which starts has declared anew: the next job may start in a year.
        spent = row.startswith(MILLION_YEARS) and (when == "before" or END in row)
        await run_all(but=rated if spent else None)
        beyond = "SELECT FROM pgqueue.limiter WHERE key = 'slow' AND next_at > now() + interval '4000 years'"
        await until(lambda: not eyes.all(beyond))
        with psycopg.connect(dsn) as conn:
            assert [each.name for each in limits.rates(conn)] == ["fast", "slow"]
            assert [each.name for each in limits.limits(conn)] == ["few", "many"]
            conn.execute(A_POISON_JOB)
            names = texts(each.name for each in tasks)
            look = worker.state.link.statement("poison_jobs_waiting", queues=["default"], tasks=names, seconds=60.0)
            conn.execute(look.sql.encode(), look.params)
            conn.rollback()
        assert worker.state.phase == "running"
