"""What people ask: one job, pages of jobs, how everything stands; right when small, bounded when large."""

from __future__ import annotations

from contextlib import closing
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

import pgqueue
from pgqueue.admin import queries
from pgqueue.admin.filters import Filter
from pgqueue.database import drivers, migrations
from pgqueue.database.statements import Statement
from pgqueue.errors import InvalidArguments, InvalidOption, JobNotFound
from pgqueue.jobs.states import STATES

Conn = psycopg.Connection[Any]
HOUR_AGO = datetime.now(UTC) - timedelta(hours=1)


def add(conn: Conn, task: str = "t", **columns: object) -> int:
    """Insert a job as any program may."""
    if isinstance(priority := columns.get("priority"), int):
        columns["rank"] = 2 * priority + 1
    names = ", ".join(["task", *columns])
    marks = ", ".join(["%s"] * (len(columns) + 1))
    sql = f"INSERT INTO pgqueue.job ({names}) VALUES ({marks}) RETURNING id"  # noqa: S608
    row = conn.execute(sql.encode(), [task, *columns.values()]).fetchone()
    assert row is not None
    return int(row[0])


def dead(conn: Conn, **columns: object) -> int:
    given: dict[str, Any] = {"state": "failed", "reason": "error", "finished_at": datetime.now(UTC)} | columns
    return add(conn, **given)


def fill(conn: Conn, n: int, queue: str = "'q' || g % 3") -> None:
    """Many available jobs at once."""
    conn.execute(
        f"INSERT INTO pgqueue.job_available (task, queue) SELECT 't', {queue} FROM generate_series(1, {n}) g".encode()  # noqa: S608
    )


def register(conn: Conn, *queues: str, age: float = 0, lease: float = 15, **columns: object) -> int:
    """A worker that has beaten `age` seconds ago."""
    row = conn.execute(
        "INSERT INTO pgqueue.worker "
        "(lease, beat_at, pid, concurrency, host, version_tag, queues, state, dead_at, tasks) VALUES "
        "(make_interval(secs => %s), pgqueue.now() - make_interval(secs => %s), 1, 10, 'host', '1', %s, %s, %s, %s) "
        "RETURNING id",
        [lease, age, list(queues), columns.get("state", "running"), columns.get("dead_at"), columns.get("tasks", [])],
    ).fetchone()
    assert row is not None
    return int(row[0])


# One job -------------------------------------------------------------------------------------------------------------


def test_a_job_comes_back_with_every_column_and_aware_times(conn: Conn) -> None:
    soon = datetime.now(UTC) + timedelta(hours=1)
    id = add(
        conn, "mail.send", state="scheduled", run_at=soon, queue="mail", priority=2, args='{"to": [1, {"a": null}]}'
    )
    job = pgqueue.get(conn, id)
    assert (job.id, job.state, job.task, job.queue, job.priority) == (id, "scheduled", "mail.send", "mail", 2)
    assert job.args == {"to": [1, {"a": None}]}
    assert job.run_at == soon
    assert job.enqueued_at.tzinfo is UTC
    assert (job.started_at, job.result, job.attempts, job.attempt) == (None, None, (), 0)


def test_times_are_the_same_whatever_the_sessions_time_zone(conn: Conn) -> None:
    id = add(conn)
    before = pgqueue.get(conn, id)
    conn.execute("SET TimeZone = 'Asia/Kathmandu'; SET DateStyle = 'German'")
    assert pgqueue.get(conn, id) == before


def test_times_python_does_not_have_become_its_first_or_last(conn: Conn) -> None:
    early = add(conn, run_at="-infinity")
    late = add(conn, deadline="infinity")
    later = add(conn, state="scheduled", run_at="20000-01-01")
    ancient = add(conn, run_at="0044-03-15 BC")
    assert pgqueue.get(conn, early).run_at == pgqueue.get(conn, ancient).run_at == datetime.min.replace(tzinfo=UTC)
    assert pgqueue.get(conn, late).deadline == pgqueue.get(conn, later).run_at == datetime.max.replace(tzinfo=UTC)


def test_a_job_tells_its_failed_attempts_oldest_first(conn: Conn) -> None:
    id = dead(conn, attempt=2)
    for attempt, error in ((2, "KeyError"), (1, "OSError")):
        conn.execute(
            "INSERT INTO pgqueue.attempt (job_id, enqueued_at, claim, attempt, worker_id, started_at, finished_at, "
            "bin, outcome, error_type, message) SELECT id, enqueued_at, 1, %s, 7, now(), "
            "now() + %s * interval '1 second', 0, 'error', %s, 'boom' FROM pgqueue.job WHERE id = %s",
            [attempt, attempt, error, id],
        )
    found = pgqueue.get(conn, id)
    assert [(one.attempt, one.error_type) for one in found.attempts] == [(1, "OSError"), (2, "KeyError")]
    assert found.attempts[0].started_at < found.attempts[0].finished_at


def test_no_such_job_says_what_may_have_become_of_it(conn: Conn) -> None:
    with pytest.raises(JobNotFound, match=r"job 4711 .*rolled back.*retention") as caught:
        pgqueue.get(conn, 4711)
    assert caught.value.job_id == 4711


async def test_async_connections_get_the_same(aconn: psycopg.AsyncConnection[Any]) -> None:
    handle = await pgqueue.aenqueue(aconn, "t", x=1)
    job = await pgqueue.aget(aconn, handle.id)
    assert job.args == {"x": 1}
    assert await pgqueue.afind(aconn, task="t") == [job]
    assert [queue.name for queue in await pgqueue.aqueues(aconn)] == ["default"]


def test_every_driver_gets_the_same(conn: Conn, dsn: str) -> None:
    psycopg2 = pytest.importorskip("psycopg2")
    sqlalchemy = pytest.importorskip("sqlalchemy")
    id = add(conn, args='{"x": 1.5}')
    conn.commit()
    expected = (pgqueue.get(conn, id), pgqueue.find(conn, state="available"), queries.status(conn).states)
    engine = sqlalchemy.create_engine(dsn.replace("postgresql://", "postgresql+psycopg://"))
    with closing(psycopg2.connect(dsn)) as other, engine.connect() as third:
        for each in (other, third):
            found = (pgqueue.get(each, id), pgqueue.find(each, state="available"), queries.status(each).states)
            assert found == expected
    engine.dispose()


async def test_asyncpg_gets_the_same(conn: Conn, dsn: str) -> None:
    asyncpg = pytest.importorskip("asyncpg")
    id = add(conn)
    conn.commit()
    other = await asyncpg.connect(dsn)
    try:
        assert await pgqueue.aget(other, id) == pgqueue.get(conn, id)
        assert await pgqueue.afind(other, state="available", queue="default") == pgqueue.find(conn)
        assert (await queries.astatus(other)).states == queries.status(conn).states
    finally:
        await other.close()


# Searches ------------------------------------------------------------------------------------------------------------


def test_newest_first_over_all_states(conn: Conn) -> None:
    ids = [
        add(conn),
        dead(conn),
        add(conn, state="completed", finished_at=datetime.now(UTC)),
        add(conn, state="scheduled", run_at=datetime.now(UTC) + timedelta(1)),
    ]
    assert [job.id for job in pgqueue.find(conn)] == ids[::-1]
    assert [job.id for job in pgqueue.find(conn, limit=2)] == ids[:1:-1]


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"state": "available"}, [5, 4, 1]),
        ({"queue": "b"}, [4, 3]),
        ({"task": "y"}, [5, 3]),
        ({"state": "failed", "task": "y"}, [3]),
        ({"state": "cancelled"}, [2]),
        ({"state": "available", "queue": "a", "task": "x"}, [1]),
        ({"state": "running"}, []),
        ({"task": "z"}, []),
    ],
)
def test_filters_combine(conn: Conn, asked: dict[str, Any], expected: list[int]) -> None:
    add(conn, "x", id=1, queue="a")
    dead(conn, task="x", id=2, queue="a", state="cancelled")
    dead(conn, task="y", id=3, queue="b")
    add(conn, "x", id=4, queue="b")
    add(conn, "y", id=5, queue="a")
    page = queries.search(conn, **asked)
    assert [job.id for job in page.jobs] == expected
    assert page.complete


def test_a_search_gives_up_and_says_so(conn: Conn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queries, "SEARCHED_MOST", 50)
    first = add(conn, "old")
    fill(conn, 60)
    nothing = queries.search(conn, task="old")
    assert (nothing.jobs, nothing.searched, nothing.complete) == ((), 50, False)
    enough = queries.search(conn, limit=10)
    assert (len(enough.jobs), enough.searched, enough.complete) == (10, None, False)
    monkeypatch.setattr(queries, "SEARCHED_MOST", 100)
    all_of_it = queries.search(conn, task="old")
    assert ([job.id for job in all_of_it.jobs], all_of_it.searched, all_of_it.complete) == ([first], 61, True)


def test_a_state_that_shares_its_partition_is_searched_within_the_bound_too(
    conn: Conn, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The naive statement filters in the walk: it would read every completed row to find that none is skipped.
    monkeypatch.setattr(queries, "SEARCHED_MOST", 10)
    conn.execute(
        "INSERT INTO pgqueue.job_done (state, task, bin, finished_at) "
        "SELECT 'completed', 't', 0, clock_timestamp() FROM generate_series(1, 10000)"
    )
    conn.execute("ANALYZE pgqueue.job_done")
    assert queries.search(conn, state="skipped").searched == 10
    # Rows of one time are sorted by id: at least 33 are read for that.
    assert rows_read(conn, queries.newest(Filter(("skipped",), limit=5), "pgqueue")) <= 2 * 33


@pytest.mark.promise("F72")
@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"args": {"order_id": 7}}, [3, 1]),
        ({"args": {"order_id": "7"}}, [2]),
        ({"args": {"order_id": 7, "to": "b"}}, [3]),
        ({"args": {"deep": {"x": [1]}}}, [4]),
        ({"args": {}}, [4, 3, 2, 1]),
        ({"args": {"order_id": 8}}, []),
        ({"state": ["failed", "available"], "args": {"order_id": 7}}, [3, 1]),
        ({"state": ("cancelled",)}, [4]),
        ({"error": "NO ROUTE"}, [3]),
        ({"error": "oserror: no"}, [3]),
        ({"error": "by hand"}, [4]),
        ({"error": "100%"}, []),
        ({"since": HOUR_AGO}, [4, 3]),
        ({"until": HOUR_AGO}, [2, 1]),
        ({"since": HOUR_AGO, "until": HOUR_AGO}, []),
        ({"after": 3}, [2, 1]),
        ({"after": 3, "limit": 1}, [2]),
        ({"after": 1}, []),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, dict) else "",
)
def test_a_search_by_argument_error_and_time(conn: Conn, asked: dict[str, Any], expected: list[int]) -> None:
    old = datetime.now(UTC) - timedelta(hours=3)
    add(conn, id=1, args='{"order_id": 7, "to": "a"}', enqueued_at=old)
    add(conn, id=2, args='{"order_id": "7"}', enqueued_at=old)
    dead(conn, id=3, args='{"order_id": 7, "to": "b"}')
    dead(conn, id=4, args='{"deep": {"x": [1, 2]}}', state="cancelled", reason="By Hand")
    conn.execute(
        "INSERT INTO pgqueue.attempt (job_id, enqueued_at, claim, attempt, worker_id, started_at, finished_at, bin, "
        "outcome, error_type, message) SELECT id, coalesce((SELECT enqueued_at FROM pgqueue.job j WHERE j.id = a.id), "
        "now()), 1, 1, 7, now(), now(), 5, 'failed', 'OSError', 'no route to host' FROM unnest(ARRAY[3, 9]) AS a (id)"
    )
    page = queries.search(conn, **asked)
    assert [job.id for job in page.jobs] == expected


def note(conn: Conn, job: int, worker: int, outcome: str, error_type: str | None = None) -> None:
    """An attempt of this job that did not complete."""
    conn.execute(
        "INSERT INTO pgqueue.attempt (job_id, enqueued_at, claim, attempt, worker_id, started_at, finished_at, bin, "
        "outcome, error_type) SELECT id, enqueued_at, 1, 1, %s, now(), now(), 5, %s, %s FROM pgqueue.job WHERE id = %s",
        [worker, outcome, error_type, job],
    )


@pytest.mark.promise("F158")
@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"worker": 7}, [6, 5, 3, 2, 1]),
        ({"worker": 7, "state": "running"}, [1]),
        ({"worker": 7, "state": ["failed", "completed"]}, [5, 3, 2]),
        ({"worker": 7, "task": "other"}, []),
        ({"worker": 8}, [4]),
        ({"worker": 9}, []),
        ({"error_type": "OSError"}, [5, 3]),
        ({"error_type": "oserror"}, []),
        ({"error_type": "OSErr"}, []),
        ({"error_type": "crashed"}, [6]),
        ({"error_type": "failed"}, []),
        ({"error_type": "OSError", "worker": 7, "state": "completed"}, [5]),
        ({"error_type": "ValueError", "worker": 8}, [4]),
    ],
    ids=str,
)
def test_a_search_by_worker_and_by_class_of_error(conn: Conn, asked: dict[str, Any], expected: list[int]) -> None:
    """What runs or ended there, and what was tried there; a class in any attempt, whatever became of the job."""
    now = datetime.now(UTC)
    add(conn, id=1, state="running", worker_id=7, claim=1, started_at=now, attempt=1)
    add(conn, id=2, state="completed", worker_id=7, finished_at=now)
    dead(conn, id=3, worker_id=7)
    note(conn, 3, 7, "failed", "OSError")
    add(conn, id=4, state="scheduled", run_at=now + timedelta(hours=1), attempt=1)
    note(conn, 4, 8, "failed", "ValueError")
    add(conn, id=5, state="completed", worker_id=3, finished_at=now, attempt=2)
    note(conn, 5, 7, "failed", "OSError")
    add(conn, id=6)
    note(conn, 6, 7, "crashed")
    add(conn, id=7)
    assert sorted((job.id for job in pgqueue.find(conn, **asked)), reverse=True) == expected


@pytest.mark.promise("F158")
@pytest.mark.parametrize("asked", [{"worker": 9}, {"error_type": "None"}, {"error": "not there"}], ids=str)
def test_a_search_by_attempts_reads_no_more_attempts_than_its_jobs_have(
    conn: Conn, monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any]
) -> None:
    """Each leaf by its index, whatever the session has planned; not the attempts of other jobs."""
    monkeypatch.setattr(queries, "SEARCHED_MOST", 300)
    conn.execute(
        "INSERT INTO pgqueue.attempt (job_id, enqueued_at, claim, attempt, worker_id, started_at, finished_at, bin, "
        "outcome, error_type) "
        "SELECT g, now(), 1, 1, 7, now(), now(), mod(g, 16), 'failed', 'OSError' FROM generate_series(1, 60000) AS g"
    )
    conn.execute(
        "INSERT INTO pgqueue.job_dead (id, state, task, reason, bin, finished_at) "
        "SELECT g, 'failed', 't', 'r', mod(g, 5), now() FROM generate_series(1, 60000) AS g"
    )
    for analysed in (False, True):
        if analysed:
            conn.execute("ANALYZE pgqueue.attempt")
        assert queries.search(conn, state="failed", **asked).jobs == ()
        before = attempts_read(conn)
        assert queries.search(conn, state="failed", **asked).searched == 300
        assert attempts_read(conn) - before <= 2 * 300


def attempts_read(conn: Conn) -> int:
    """The rows of attempts that this transaction has read so far, by an index or from a whole leaf."""
    row = conn.execute(
        "SELECT sum(pg_stat_get_xact_tuples_returned(relid) + pg_stat_get_xact_tuples_fetched(relid))::bigint "
        "FROM pg_partition_tree('pgqueue.attempt') WHERE isleaf"
    ).fetchone()
    assert row is not None
    return int(row[0])


@pytest.mark.promise("F158")
def test_attempts_of_another_job_with_the_same_id_are_not_searched(conn: Conn) -> None:
    id = add(conn)
    note(conn, id, 7, "failed", "OSError")
    conn.execute("UPDATE pgqueue.attempt SET enqueued_at = now() - interval '1 day'")
    assert pgqueue.find(conn, worker=7) == pgqueue.find(conn, error_type="OSError") == []


@pytest.mark.promise("F159")
@pytest.mark.parametrize("key", ["u:7", "once"])
@pytest.mark.parametrize("limit", [1, 2, 3, 50])
def test_the_job_that_has_a_key_is_found_at_once_and_once(
    conn: Conn, monkeypatch: pytest.MonkeyPatch, key: str, limit: int
) -> None:
    """It lies behind the bound of a search. Pages behind the first one bring the others that fit, each once."""
    monkeypatch.setattr(queries, "SEARCHED_MOST", 20)
    has = pgqueue.remote("keyed").using(unique="u:7", idempotency_key="once").enqueue(conn).id
    fill(conn, 30)
    others = [add(conn, lock_key=key) for _ in range(4)]
    page = queries.search(conn, key=key, limit=limit)
    found = [job.id for job in page.jobs]
    assert found[0] == has and len(found) <= limit
    while page.after is not None:
        page = queries.search(conn, key=key, limit=limit, after=page.after)
        found += [job.id for job in page.jobs]
    assert found == [has, *reversed(others)]
    assert pgqueue.find(conn, key=key, task="other") == pgqueue.find(conn, key=key, state="running") == []


@pytest.mark.promise("F159")
async def test_a_key_is_found_in_lists_in_the_order_of_a_time_too(
    conn: Conn, aconn: psycopg.AsyncConnection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queries, "SEARCHED_MOST", 5)
    later = pgqueue.remote("keyed").using(unique="later", delay=9_000).enqueue(conn).id
    ended = pgqueue.remote("keyed").using(idempotency_key="ended").enqueue(conn).id
    [cancelled] = pgqueue.cancel(conn, ended)
    assert cancelled.did == "cancelled"
    shuffled(conn, 30)
    conn.commit()
    for limit in (1, 3):
        for state, key, id in [("scheduled", "later", later), ("cancelled", "ended", ended)]:
            page = await queries.asearch(aconn, state=state, key=key, limit=limit)
            assert [job.id for job in page.jobs] == [id]
            while page.after is not None:
                page = await queries.asearch(aconn, state=state, key=key, limit=limit, after=page.after)
                assert page.jobs == ()


@pytest.mark.promise("F72")
@pytest.mark.parametrize("limit", [3, 50])
def test_a_search_goes_on_where_it_gave_up(conn: Conn, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    """Every job that fits is found once, whether a search ended at its bound or at its limit."""
    monkeypatch.setattr(queries, "SEARCHED_MOST", 20)
    for number in range(100):
        add(conn, "x" if number % 9 == 0 else "y", **({} if number % 2 else {"state": "blocked", "key": "k"}))
    found: list[int] = []
    after: int | str | None = None
    for _ in range(100):
        page = queries.search(conn, task="x", limit=limit, after=after)
        assert page.complete == (page.after is None)
        found += [job.id for job in page.jobs]
        after = page.after
        if after is None:
            break
    assert found == [job.id for job in reversed(everything(conn)) if job.task == "x"]
    assert len(found) == 12


def everything(conn: Conn) -> list[queries.JobInfo]:
    [[ids]] = conn.execute("SELECT array_agg(id ORDER BY id) FROM pgqueue.job").fetchall()
    return [pgqueue.get(conn, id) for id in ids]


@pytest.mark.promise("F72")
@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"stat": "failed"}, r"no option stat \(did you mean state\?\)"),
        ({"since": datetime(2026, 12, 24)}, "since"),
        ({"until": "yesterday"}, "until"),
        ({"worker": 0}, "give the id of a worker"),
        ({"worker": "7"}, "give the id of a worker"),
        ({"error_type": ValueError}, "error_type"),
        ({"after": 0}, "after"),
        ({"after": "7"}, "after"),
        ({"state": []}, "state"),
        ({"state": 7}, "state 7: use one or more of"),
        ({"state": [7]}, "state 7: use one of"),
        ({"state": ["failed", ["failed"]]}, r"state \['failed'\]: use one of"),
        ({"state": ["failed", "done"]}, "'done': use one of"),
    ],
    ids=str,
)
def test_what_no_search_can_ask_is_refused(conn: Conn, asked: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidOption, match=why):
        pgqueue.find(conn, **asked)


def test_an_argument_that_no_job_can_have_is_refused(conn: Conn) -> None:
    for args in ({"x": float("nan")}, {"x": "\0"}, [7]):
        with pytest.raises(InvalidArguments):
            pgqueue.find(conn, args=args)  # type: ignore[arg-type]


@pytest.mark.parametrize("limit", [0, -1, 10_001])
def test_a_limit_has_its_limits(conn: Conn, limit: int) -> None:
    with pytest.raises(InvalidOption, match="limit"):
        pgqueue.find(conn, limit=limit)


def test_an_unknown_state_names_those_that_exist(conn: Conn) -> None:
    with pytest.raises(InvalidOption, match=r"'done': use one of .*completed"):
        pgqueue.find(conn, state="done")


# How everything stands -----------------------------------------------------------------------------------------------


def test_an_empty_database_has_zeros(conn: Conn) -> None:
    status = queries.status(conn)
    assert dict(status.states) == dict.fromkeys(STATES, queries.Count(0, True))
    assert (status.queues, status.workers, status.schema) == ((), (), "pgqueue")
    assert status.version == len(migrations.files())


def test_small_numbers_are_exact(conn: Conn) -> None:
    fill(conn, 10_000, queue="'big'")
    dead(conn)
    assert queries.status(conn).states["available"] == queries.Count(10_000, True)
    assert queries.status(conn).states["failed"] == queries.Count(1, True)
    add(conn, queue="big")
    assert queries.status(conn).states["available"].exact is False


def test_large_numbers_are_close_though_nobody_has_analysed(conn: Conn) -> None:
    fill(conn, 60_000)
    conn.execute(
        "INSERT INTO pgqueue.job_done (state, task, bin, finished_at) "
        "SELECT CASE WHEN g % 4 = 0 THEN 'skipped' ELSE 'completed' END, 't', g % 3, now() "
        "FROM generate_series(1, 80000) g"
    )
    status = queries.status(conn)
    for state, truth in (("available", 60_000), ("completed", 60_000), ("skipped", 20_000)):
        count = status.states[state]
        assert not count.exact
        assert truth * 0.8 < count.n < truth * 1.2, state
        assert str(count).startswith("~")
    assert [queue.name for queue in status.queues] == ["q0", "q1", "q2"]
    assert all(16_000 < queue.available.n < 24_000 for queue in status.queues)


def test_a_small_queue_beside_a_large_one_is_counted_exactly(conn: Conn) -> None:
    fill(conn, 60_000, queue="'big'")
    fill(conn, 7, queue="'small'")
    counts = {queue.name: queue.available for queue in pgqueue.queues(conn)}
    assert counts["small"] == queries.Count(7, True)
    assert not counts["big"].exact


def test_the_rows_read_are_bounded(conn: Conn) -> None:
    fill(conn, 100_000)
    read, asking = 0.0, queries.standing("pgqueue")
    statement = next(asking)
    with pytest.raises(StopIteration):
        while True:
            read += rows_read(conn, statement)
            statement = asking.send(drivers.run(conn, statement))
    assert 30_000 < read < 60_000


def test_a_queue_nobody_serves_is_marked(conn: Conn) -> None:
    for queue in ("served", "late", "gone", "quiet", "alone"):
        add(conn, queue=queue)
    # Three leases are 4500 s: not even a statement that takes seconds on a busy machine leaves them behind.
    register(conn, "served", "idle", age=4400, lease=1500)
    register(conn, "late", age=4600, lease=1500)
    register(conn, "gone", dead_at=datetime.now(UTC))
    register(conn, "quiet", state="quiet")
    marked = {queue.name: queue.unserved for queue in pgqueue.queues(conn)}
    assert marked == {"served": False, "idle": False, "late": True, "gone": True, "quiet": True, "alone": True}


@pytest.mark.promise("F18")
def test_jobs_of_tasks_that_no_live_worker_of_their_queue_knows_are_counted(conn: Conn) -> None:
    register(conn, "q", tasks=["known", "alias"])
    register(conn, "q", tasks=["gone"], dead_at=datetime.now(UTC))
    register(conn, "second", tasks=["elsewhere"])
    for task, number in (("other.ping", 3), ("known", 2), ("alias", 1), ("gone", 2), ("elsewhere", 1)):
        for priority in range(number):
            add(conn, task, queue="q", priority=priority)
    add(conn, "other.ping", queue="q", state="blocked", key="lock:k", lock_key="k")
    add(conn, "elsewhere", queue="second")
    add(conn, "anything", queue="alone")
    found = {(each.queue, each.task): each.jobs for each in queries.status(conn).unknown}
    assert found == {
        ("q", "other.ping"): queries.Count(4),
        ("q", "gone"): queries.Count(2),
        ("q", "elsewhere"): queries.Count(1),
    }
    assert [worker.tasks for worker in queries.status(conn).workers] == [2, 1, 1]


@pytest.mark.promise("F18")
def test_a_few_unknown_jobs_before_a_long_backlog_are_named_all_the_same(conn: Conn) -> None:
    register(conn, "q", tasks=["t"])
    for _ in range(14):
        add(conn, "other.ping", queue="q")
    fill(conn, 60_000, queue="'q'")
    [found] = queries.status(conn).unknown
    assert (found.task, found.jobs) == ("other.ping", queries.Count(14, False))


def test_the_lease_decides_how_long_a_silence_is_death(conn: Conn) -> None:
    register(conn, "q", age=20, lease=5)
    register(conn, "q", age=20, lease=10)
    assert [worker.state for worker in queries.status(conn).workers] == ["dead", "running"]
    assert queries.status(conn).workers[0].beat_age == pytest.approx(20, abs=5)


def test_the_oldest_job_of_a_queue_is_found_in_any_lane(conn: Conn) -> None:
    add(conn, queue="q", priority=0)
    add(conn, queue="q", priority=9, enqueued_at=datetime.now(UTC) - timedelta(hours=2))
    add(conn, queue="q", priority=5, enqueued_at=datetime.now(UTC) - timedelta(hours=1))
    [queue] = pgqueue.queues(conn)
    assert queue.oldest == pytest.approx(7200, abs=60)


def test_a_job_that_became_due_waits_from_then_on(conn: Conn) -> None:
    now = datetime.now(UTC)
    add(conn, queue="q", enqueued_at=now - timedelta(hours=2), run_at=now - timedelta(minutes=1))
    [queue] = pgqueue.queues(conn)
    assert queue.oldest == pytest.approx(60, abs=30)


def test_a_paused_queue_is_shown_though_it_is_empty(conn: Conn) -> None:
    conn.execute("INSERT INTO pgqueue.queue VALUES ('later', now())")
    [queue] = pgqueue.queues(conn)
    assert (queue.name, queue.available.n, queue.paused_at is not None) == ("later", 0, True)


def test_every_state_of_a_queue_is_counted(conn: Conn) -> None:
    now = datetime.now(UTC)
    add(conn, queue="q")
    add(conn, queue="q", state="scheduled", run_at=now + timedelta(1))
    add(conn, queue="q", state="blocked", key="k")
    for _ in range(2):
        add(conn, queue="q", state="running", worker_id=1, claim=1, started_at=now)
    [queue] = pgqueue.queues(conn)
    counts = (queue.available, queue.scheduled, queue.blocked, queue.running)
    assert [count.n for count in counts] == [1, 1, 1, 2]


@pytest.mark.parametrize(
    ("n", "shown"), [(9_612_345, "~9,600,000"), (10_001, "~10,000"), (123_999, "~120,000"), (0, "~0")]
)
def test_an_estimate_is_not_written_more_exactly_than_it_is(n: int, shown: str) -> None:
    assert str(queries.Count(n, False)) == shown


def test_nothing_here_writes(conn: Conn) -> None:
    id = add(conn)
    conn.commit()
    conn.execute("SET TRANSACTION READ ONLY")
    pgqueue.get(conn, id), pgqueue.find(conn), pgqueue.queues(conn)


# Size ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", [None, "none"])
def test_a_table_nobody_has_analysed_is_not_sorted_to_find_its_newest(
    conn: Conn, monkeypatch: pytest.MonkeyPatch, task: str | None
) -> None:
    # The naive `WHERE state = ANY (…) ORDER BY id` is taken for a few rows, and all 100,000 are read and sorted.
    monkeypatch.setattr(queries, "SEARCHED_MOST", 1_000)
    fill(conn, 100_000)
    assert rows_read(conn, queries.newest(Filter(STATES, task=task), "pgqueue")) <= 2 * queries.SEARCHED_MOST + 10


def explain(conn: Conn, statement: Statement[Any], *, prepared: bool = False) -> Any:
    conn.execute("SET max_parallel_workers_per_gather = 0")
    row = conn.execute(
        f"EXPLAIN (ANALYZE, FORMAT JSON, COSTS OFF) {statement.sql}".encode(), dict(statement.params), prepare=prepared
    ).fetchone()
    assert row is not None
    return row[0][0]["Plan"]


def rows_read(conn: Conn, statement: Statement[Any], *, prepared: bool = False) -> float:
    """How many rows of our tables a statement has looked at."""

    def read(node: dict[str, Any]) -> float:
        own = 0.0
        if str(node.get("Relation Name", "")).startswith(("job", "attempt")):
            own = (node["Actual Rows"] + node.get("Rows Removed by Filter", 0)) * node["Actual Loops"]
        return own + sum(read(child) for child in node.get("Plans", ()))

    return read(explain(conn, statement, prepared=prepared))


# The order of a list --------------------------------------------------------------------------------------------------


FILLED = {
    "failed": (
        "INSERT INTO pgqueue.job_dead (state, task, reason, bin, finished_at) "
        "SELECT CASE mod(g, 3) WHEN 0 THEN 'failed' ELSE 'cancelled' END, 't' || mod(g, 2), 'r', mod(g, 5), "
        "now() - make_interval(secs => mod(g * 7919, 10007)) FROM generate_series(1, %(n)s) AS g"
    ),
    "completed": (
        "INSERT INTO pgqueue.job_done (state, task, bin, finished_at) "
        "SELECT 'completed', 't' || mod(g, 2), mod(g, 5), now() - make_interval(secs => mod(g * 4001, 9973)) "
        "FROM generate_series(1, %(n)s) AS g"
    ),
    "scheduled": (
        "INSERT INTO pgqueue.job_scheduled (state, task, run_at, attempt) "
        "SELECT 'scheduled', 't' || mod(g, 2), now() + make_interval(secs => mod(g * 7919, 10007)), mod(g, 2) "
        "FROM generate_series(1, %(n)s) AS g"
    ),
}


def shuffled(conn: Conn, n: int, *states: str) -> None:
    """Jobs whose ids, and whose places in their tables, say nothing of their times; a ring with many leaves."""
    for state in states or FILLED:
        conn.execute(FILLED["scheduled" if state == "retrying" else state].encode(), {"n": n})


ORDERS: list[tuple[Any, str, str]] = [
    ("scheduled", "run_at, id", "state = 'scheduled'"),
    ("retrying", "run_at, id", "state = 'scheduled' AND attempt > 0"),
    (["scheduled", "retrying"], "run_at, id", "state = 'scheduled'"),
    ("completed", "finished_at DESC, id DESC", "state = 'completed'"),
    (["failed", "cancelled"], "finished_at DESC, id DESC", "state IN ('failed', 'cancelled')"),
    (["completed", "failed"], "finished_at DESC, id DESC", "state IN ('completed', 'failed')"),
    (["scheduled", "failed"], "id DESC", "state IN ('scheduled', 'failed')"),
]


@pytest.mark.promise("F113")
@pytest.mark.parametrize("limit", [1, 7, 60])
@pytest.mark.parametrize(("state", "order", "which"), ORDERS, ids=lambda value: str(value))
def test_a_list_is_in_the_order_in_which_its_jobs_are_due_or_have_ended(
    conn: Conn, monkeypatch: pytest.MonkeyPatch, state: Any, order: str, which: str, limit: int
) -> None:
    """Page after page, each job once; also where a page ends at a bound, and where times are equal."""
    monkeypatch.setattr(queries, "SEARCHED_MOST", 20)
    shuffled(conn, 60)
    conn.execute(
        "INSERT INTO pgqueue.job_dead (state, task, reason, finished_at) "
        "SELECT 'failed', 't1', 'r', now() FROM generate_series(1, 9)"
    )
    conn.execute(
        "INSERT INTO pgqueue.job_scheduled (state, task, run_at, attempt) "
        "SELECT 'scheduled', 't1', now(), 1 FROM generate_series(1, 9)"
    )
    sql = f"SELECT id FROM pgqueue.job WHERE {which} AND task = 't1' ORDER BY {order}"  # noqa: S608
    wanted = conn.execute(sql.encode()).fetchall()
    found: list[int] = []
    after: int | str | None = None
    for _ in range(400):
        page = queries.search(conn, state=state, task="t1", limit=limit, after=after)
        found += [job.id for job in page.jobs]
        after = page.after
        if after is None:
            break
    assert found == [id for (id,) in wanted]
    assert len(found) > 20


@pytest.mark.promise("F113")
def test_a_page_goes_on_from_a_time_that_python_does_not_have(conn: Conn) -> None:
    for at in ("20000-01-01", "20000-01-02", "0044-03-15 BC", "0044-03-16 BC", "2026-01-01 12:00:00.000001+05:30"):
        conn.execute(
            "INSERT INTO pgqueue.job_scheduled (state, task, run_at) VALUES ('scheduled', 't', %s::text::timestamptz)",
            [at],
        )
    for at in ("infinity", "-infinity"):
        conn.execute(
            "INSERT INTO pgqueue.job_dead (state, task, reason, finished_at) "
            "VALUES ('failed', 't', 'r', %s::text::timestamptz)",
            [at],
        )
    conn.execute("SET TimeZone = 'Asia/Kathmandu'; SET DateStyle = 'German'")
    for state, number in (("scheduled", 5), ("failed", 2)):
        found, after = [], None
        for _ in range(10):
            page = queries.search(conn, state=state, limit=1, after=after)
            found += [job.id for job in page.jobs]
            after = page.after
            if after is None:
                break
        assert len(found) == len(set(found)) == number


@pytest.mark.promise("F113")
@pytest.mark.parametrize(
    "after", [7, "7", "now/7", "2026-01-01T00:00:00+00:00/", "2026-01-01T00:00:00+00:00/99999999999999999999"]
)
def test_a_place_of_another_order_is_refused(conn: Conn, after: Any) -> None:
    with pytest.raises(InvalidOption, match=r"in the order of finished_at; give Page\.after"):
        pgqueue.find(conn, state="failed", after=after)
    with pytest.raises(InvalidOption, match=r"in the order of run_at; give Page\.after"):
        pgqueue.find(conn, state="retrying", after=after)
    with pytest.raises(InvalidOption, match="is no id of a job"):
        pgqueue.find(conn, state="running", after="2026-01-01T00:00:00+00:00/7")


@pytest.mark.promise("F113")
def test_retrying_are_the_scheduled_jobs_that_wait_for_another_attempt(conn: Conn) -> None:
    soon = datetime.now(UTC) + timedelta(hours=1)
    add(conn, id=1, state="scheduled", run_at=soon)
    add(conn, id=2, state="scheduled", run_at=soon, attempt=1, reason="OSError: no")
    add(conn, id=3, state="scheduled", run_at=soon, snoozes=2)
    add(conn, id=4, state="scheduled", run_at=soon, crashes=1)
    add(conn, id=5, attempt=3)
    dead(conn, id=6, attempt=3)
    assert [job.id for job in pgqueue.find(conn, state="retrying")] == [2, 4]
    assert [job.id for job in pgqueue.find(conn, state=["retrying", "failed"])] == [6, 4, 2]
    assert [job.id for job in pgqueue.find(conn, state=["retrying", "scheduled"])] == [1, 2, 3, 4]


@pytest.mark.promise("F113")
@pytest.mark.each_value
@pytest.mark.parametrize("task", [None, "none"])
@pytest.mark.parametrize("state", ["scheduled", "retrying", "failed", ["completed", "failed"]], ids=str)
def test_a_page_reads_as_many_rows_as_it_looks_at(
    conn: Conn, monkeypatch: pytest.MonkeyPatch, state: Any, task: str | None
) -> None:
    """The first page and one behind it, however long ago they were prepared."""
    monkeypatch.setattr(queries, "SEARCHED_MOST", 300)
    most = 2 * queries.SEARCHED_MOST + 8 * 33  # rows of one time are sorted by id: 33 are read for that at least
    states = (state,) if isinstance(state, str) else tuple(state)
    shuffled(conn, 120_000, *states)
    conn.execute("ANALYZE pgqueue.job")
    after = queries.search(conn, state=state, limit=200).after
    for each in (queries.newest(Filter(states, task=task), "pgqueue", place) for place in (None, after)):
        assert [rows_read(conn, each, prepared=True) <= most for _ in range(8)] == [True] * 8


SPY = """
CREATE SCHEMA before;
ALTER FUNCTION pgqueue.attempted SET SCHEMA before;
CREATE FUNCTION pgqueue.attempted(ids bigint[], since timestamptz[], worker bigint, error_type text, error text)
RETURNS SETOF bigint LANGUAGE plpgsql STABLE AS $$
BEGIN
    RAISE NOTICE '%', cardinality(ids);
    RETURN QUERY SELECT before.attempted(ids, since, worker, error_type, error);
END $$
"""


@pytest.mark.promise("F460")
@pytest.mark.parametrize(
    "given",
    [
        {"state": "failed"},
        {"state": "failed", "after": "infinity/9223372036854775807"},
        {"state": "retrying"},
        {"state": ["failed", "retrying"]},
        {"state": ["failed", "retrying"], "after": 1_000_000},
    ],
    ids=str,
)
def test_a_search_looks_up_the_attempts_of_jobs_of_its_task_alone(conn: Conn, given: dict[str, Any]) -> None:
    """Naive looks up those of all jobs that it has looked at, which takes most of its time."""
    put = "INSERT INTO pgqueue.job (task, queue, state, finished_at, bin, run_at, attempt, reason) "
    conn.execute(
        put + "SELECT CASE WHEN n = 7 THEN 'few' ELSE 'many' END, 'q', 'failed', now(), 0, NULL, 1, 'error' "  # noqa: S608
        "FROM generate_series(1, 300) AS n UNION ALL "
        "SELECT CASE WHEN n = 7 THEN 'few' ELSE 'many' END, 'q', 'scheduled', NULL, 0, now() + interval '1 h', 1, "
        "'retry' FROM generate_series(1, 300) AS n"
    )
    conn.execute(
        "INSERT INTO pgqueue.attempt (job_id, enqueued_at, claim, attempt, worker_id, started_at, finished_at, bin, "
        "outcome, error_type) SELECT id, enqueued_at, 1, 1, 1, now(), now(), 0, 'error', 'KeyError' FROM pgqueue.job"
    )
    conn.execute(SPY)
    asked: list[int] = []
    conn.add_notice_handler(lambda notice: asked.append(int(notice.message_primary or 0)))
    states = 2 if isinstance(given["state"], list) else 1
    assert len(queries.find(conn, task="few", error_type="KeyError", **given)) == states and asked == [states]
    asked.clear()
    assert queries.find(conn, queue="other", error_type="KeyError", **given) == [] and asked in ([], [0])
