"""A row for which the server refuses a whole move: the move is made smaller, and every other row goes on."""

from __future__ import annotations

import psycopg
import pytest
from relays import Sides, app_dsn, eventually, relaying, sides
from workers import Eyes, until, work

from pgqueue.client.tasks import task
from pgqueue.jobs.concurrency import Limit, Rate
from pgqueue.jobs.retry import RetryPolicy
from pgqueue.relay.relay import Relay
from pgqueue.worker import mover
from pgqueue.worker.fetch import reconciler

__all__ = ["app_dsn", "sides"]

PUT = """
    INSERT INTO pgqueue.job (task, args, {} priority)
    SELECT %s, jsonb_build_object('n', n), {} 5 FROM generate_series(1, %s) AS n
"""
ODD = """
    ALTER TABLE pgqueue.job_running ADD CONSTRAINT odd
    CHECK (coalesce((args ->> 'n')::integer, 1) % {} <> 0) NOT VALID
"""


@task(name="refused.plain")
async def plain(n: int = 0) -> None:
    pass


@task(name="refused.locked", lock="{n}")
async def locked(n: int = 0) -> None:
    pass


@task(name="refused.rated", rate=Rate("100/s", key="{n}", name="refused-fast"))
async def rated(n: int) -> None:
    pass


@task(name="refused.limited", limit=Limit(5, name="refused-few"))
async def limited() -> None:
    pass


@pytest.mark.promise("F65")
@pytest.mark.parametrize("keyed", [False, True], ids=["plain", "with a lock it holds"])
async def test_the_row_that_no_claim_can_take_is_put_aside(dsn: str, eyes: Eyes, keyed: bool) -> None:
    mine, columns, values = (locked, "lock_key, holds,", "'k' || n, true,") if keyed else (plain, "", "")
    eyes.do(PUT.format(columns, values), mine.name, 100)
    eyes.do(ODD.format(40))
    async with work(dsn, mine) as worker:
        await until(eyes.done(98))
        await until(lambda: eyes.one("SELECT count(*) FROM pgqueue.job_dead") == 2)
        assert worker.state.phase == "running"
        assert worker.services.fetcher.kinds.plain.most is None
    said = 'the server refuses to start this job: new row for relation "job_running" violates check constraint "odd"'
    assert eyes.all(
        "SELECT (j.args ->> 'n')::integer, j.state, j.reason, a.outcome, a.error_type, a.message "
        "FROM pgqueue.job_dead j JOIN pgqueue.attempt a ON a.job_id = j.id ORDER BY 1"
    ) == [(n, "failed", "refused", "failed", "CheckViolation", said) for n in (40, 80)]
    assert eyes.happened("failed") == 2


@pytest.mark.promise("F65")
async def test_if_every_row_is_refused_they_are_not_put_aside_all_at_once(
    dsn: str, eyes: Eyes, caplog: pytest.LogCaptureFixture
) -> None:
    """Then it is not the rows. The worker waits between two tries, and takes them when the cause is gone.

    No line of the log quotes the row.
    """
    eyes.do(PUT.format("", ""), plain.name, 60)
    eyes.do(ODD.format(1))
    async with work(dsn, plain) as worker:
        await until(lambda: eyes.one("SELECT count(*) FROM pgqueue.job_dead") >= 20)
        eyes.do("ALTER TABLE pgqueue.job_running DROP CONSTRAINT odd")
        await until(eyes.done(31))
        assert worker.state.phase == "running"
    assert eyes.one("SELECT count(*) FROM pgqueue.job_dead") < 30
    assert "violates check constraint" in caplog.text and "Failing row" not in caplog.text


def damage_values(dsn: str, toast: str) -> None:
    """A part of each large value of this table is lost."""
    with psycopg.connect(dsn, autocommit=True) as conn:
        kind = "UPDATE pg_class SET relkind = %s WHERE oid = %s::regclass"
        conn.execute("SET allow_system_table_mods = on")
        conn.execute(kind, ["r", toast])
        conn.execute(f"DELETE FROM {toast} WHERE chunk_seq = 1".encode())  # noqa: S608
        conn.execute(kind, ["t", toast])


@pytest.mark.promise("F65")
async def test_a_damaged_value_is_put_aside_without_it(dsn: str, eyes: Eyes) -> None:
    """The disk has lost a part of a large value: it can be neither read nor moved."""
    bad = eyes.one(
        "INSERT INTO pgqueue.job (task, args) SELECT 'refused.plain', jsonb_build_object('n', 1, 'x', "
        "string_agg(md5(n::text), '')) FROM generate_series(1, 3000) AS n RETURNING id"
    )
    toast = eyes.one("SELECT reltoastrelid::regclass::text FROM pg_class WHERE oid = 'pgqueue.job_available'::regclass")
    damage_values(dsn, toast)
    with psycopg.connect(dsn) as conn:
        good = plain.enqueue(conn, 2).id
    async with work(dsn, plain) as worker:
        await until(eyes.is_in(good, "completed"))
        await until(eyes.is_in(bad, "failed"))
        assert worker.state.phase == "running"
    [(reason, args, message)] = eyes.all(
        "SELECT reason, j.args, message FROM pgqueue.job_dead j JOIN pgqueue.attempt a ON a.job_id = j.id"
    )
    assert (reason, args) == ("refused", {}) and "chunk number" in message


@pytest.mark.promise("F65")
async def test_a_key_whose_job_cannot_be_moved_keeps_no_other_key_waiting(dsn: str, eyes: Eyes) -> None:
    eyes.do(
        "INSERT INTO pgqueue.job (task, state, key, lock_key, lock_limit, on_locked, args) SELECT 'refused.locked', "
        "'blocked', 'lock:k' || n, 'k' || n, 1, 'wait', jsonb_build_object('n', n) FROM generate_series(1, 30) AS n"
    )
    eyes.do(ODD.format(20))
    async with work(dsn, locked) as worker:
        worker.services.sweep.sweep_soon()
        await until(eyes.done(29))
        assert worker.state.phase == "running"
    assert eyes.all("SELECT args ->> 'n' FROM pgqueue.job WHERE state NOT IN ('completed')") == [("20",)]


@pytest.mark.promise("F65")
async def test_a_limit_below_one_that_was_let_in_ends_no_worker(dsn: str, eyes: Eyes) -> None:
    eyes.do("ALTER TABLE pgqueue.job_available DROP CONSTRAINT job_available_is_ready")
    eyes.do(
        "INSERT INTO pgqueue.job (task, lock_key, lock_limit, on_locked) "
        "SELECT 'refused.locked', 'k', -1, 'wait' FROM generate_series(1, 3)"
    )
    with psycopg.connect(dsn) as conn:
        good = [locked.enqueue(conn, n).id for n in range(3)]
    async with work(dsn, locked) as worker:
        worker.services.sweep.sweep_soon()
        for id in good:
            await until(eyes.is_in(id, "completed"))
        await until(lambda: eyes.one("SELECT count(*) FROM pgqueue.job_dead WHERE reason = 'refused'") == 3)
        assert worker.state.phase == "running"


@pytest.mark.promise("F65")
@pytest.mark.each_value
@pytest.mark.parametrize("bad", ["priority, rank) VALUES (30000, 11", "attempt) VALUES (-32768"])
@pytest.mark.parametrize("ours", [False, True], ids=["of a dead worker", "of this one"])
async def test_a_running_row_that_fits_nowhere_keeps_no_other_from_being_rescued(
    dsn: str, eyes: Eyes, bad: str, ours: bool
) -> None:
    """Before, a rescue of it ended the worker, or was tried again for ever."""
    columns, values = "task, state, worker_id, claim, started_at", "'refused.plain', 'running', {}, 0, now()"
    name, value = bad.split(") VALUES (")
    async with work(dsn, plain) as worker:
        owner = worker.worker_id if ours else 999
        row = values.format(owner)
        eyes.do(f"INSERT INTO pgqueue.job ({columns}) VALUES ({row}), ({row}), ({row})")  # noqa: S608
        eyes.do(f"INSERT INTO pgqueue.job ({columns}, {name}) VALUES ({row}, {value})")  # noqa: S608
        if ours:
            worker.state.in_doubt()
        else:
            await worker.services.rescue.strays()
        await until(eyes.done(3))
        assert worker.state.phase == "running"
    assert eyes.one("SELECT count(*) FROM pgqueue.job_running") == 0


@pytest.mark.promise("F65")
async def test_a_limit_below_one_of_a_waiting_row_stops_no_sweep(dsn: str, eyes: Eyes) -> None:
    eyes.do(
        "INSERT INTO pgqueue.job (task, state, key, lock_key, lock_limit, on_locked) SELECT 'refused.locked', "
        "'blocked', 'lock:k' || n, 'k' || n, CASE n WHEN 3 THEN -1 ELSE 1 END, 'wait' FROM generate_series(1, 9) AS n"
    )
    async with work(dsn, locked) as worker:
        worker.services.sweep.sweep_soon()
        await until(eyes.done(8))
        await until(lambda: eyes.one("SELECT count(*) FROM pgqueue.job_dead WHERE reason = 'refused'") == 1)
        assert worker.state.phase == "running"


@pytest.mark.promise("F65")
async def test_a_job_with_crashes_that_was_put_in_by_hand_holds_up_no_limit(dsn: str, eyes: Eyes) -> None:
    eyes.do("INSERT INTO pgqueue.job (task, limit_key, crashes) VALUES ('refused.limited', 'refused-few', 1)")
    with psycopg.connect(dsn) as conn:
        good = [limited.enqueue(conn).id for _ in range(3)]
    async with work(dsn, limited):
        for id in good:
            await until(eyes.is_in(id, "completed"))
        await until(eyes.done(4))


@pytest.mark.promise("F65")
@pytest.mark.parametrize("number", [2**62, 2**63 - 1])
async def test_a_number_that_no_sequence_has_given_keeps_no_worker_from_starting(
    dsn: str, eyes: Eyes, number: int
) -> None:
    running = "INSERT INTO pgqueue.job (task, state, worker_id, claim, started_at, holds, lock_key, hold_pos)"
    eyes.do(f"{running} VALUES ('x', 'running', 7, 1, now(), true, 'k', %s)", number)
    eyes.do("INSERT INTO pgqueue.job_waiter (waiter, job_id) OVERRIDING SYSTEM VALUE VALUES (%s, 1)", number)
    with psycopg.connect(dsn) as conn:
        good = plain.enqueue(conn).id
    async with work(dsn, plain):
        await until(eyes.is_in(good, "completed"))


NO_TEXT = """
    CREATE FUNCTION public.write(jsonb) RETURNS text LANGUAGE sql AS $$
        SELECT CASE WHEN $1 ->> 'x' = 'no text' THEN pg_catalog.repeat($1 ->> 'x', 200000000) ELSE $1 #>> '{}' END
    $$;
    CREATE CAST (jsonb AS text) WITH FUNCTION public.write(jsonb)
"""
"""From now on `{"x": "no text"}` is longer as text than a text may be. What the server finds so by itself takes it
seconds; `test_large_rows.py` has such a value. The error is the same."""


@pytest.mark.promise("F65")
async def test_a_staged_job_that_has_no_text_does_not_stop_the_relay(app_dsn: str, dsn: str, sides: Sides) -> None:
    sides.app.execute(NO_TEXT)
    sides.stage("a", "no text", "b", "c")
    with pytest.raises(psycopg.errors.ProgramLimitExceeded):
        sides.app.execute("SELECT args::text FROM pgqueue.outbox")
    async with relaying(Relay(app_dsn, dsn)):
        await eventually(lambda: sides.left() == 0)
    assert sides.delivered() == ["a", "b", "c"]
    [(name, reason)] = sides.refused()
    assert name == "t" and reason.startswith("the server cannot read it: ")


@pytest.mark.promise("F65")
@pytest.mark.parametrize("damaged", ["args", "options"])
async def test_a_staged_job_that_is_damaged_does_not_stop_the_relay(
    app_dsn: str, dsn: str, sides: Sides, damaged: str
) -> None:
    """It can be neither read nor moved as it is. The naive relay tries that for ever."""
    sides.stage("a")
    long = "jsonb_build_object('x', (SELECT string_agg(md5(n::text), '') FROM generate_series(1, 3000) AS n))"
    sides.app.execute(f"INSERT INTO pgqueue.outbox (task, {damaged}) VALUES ('t', {long})".encode())  # noqa: S608
    toast = "SELECT reltoastrelid::regclass::text FROM pg_class WHERE oid = 'pgqueue.outbox'::regclass"
    damage_values(app_dsn, sides.app.execute(toast).fetchall()[0][0])
    sides.stage("b")
    async with relaying(Relay(app_dsn, dsn)):
        await eventually(lambda: sides.left() == 0)
    assert sides.delivered() == ["a", "b"]
    [(_, reason)] = sides.refused()
    assert "chunk number" in reason and reason.endswith("its arguments and options were lost with it")
    kept = sides.app.execute("SELECT args, options FROM pgqueue.outbox_refused").fetchall()
    assert kept == [({}, None)]


TRIGGER = """
    CREATE FUNCTION public.refuses_odd() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        IF (NEW.args ->> 'n')::integer = {n} THEN RAISE EXCEPTION 'no twenties here'; END IF;
        RETURN NEW;
    END $$;
    CREATE TRIGGER refuses_odd BEFORE INSERT ON {table} FOR EACH ROW EXECUTE FUNCTION public.refuses_odd()
"""
CHECK = "ALTER TABLE {table} ADD CONSTRAINT odd CHECK (coalesce((args ->> 'n')::integer, 1) <> {n}) NOT VALID"


def lines(caplog: pytest.LogCaptureFixture, said: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if said in record.getMessage()]


@pytest.mark.promise("F133")
@pytest.mark.parametrize(
    ("refuses", "why"), [(CHECK, '"odd"'), (TRIGGER, "no twenties here")], ids=["check", "trigger"]
)
async def test_a_key_whose_job_cannot_be_moved_is_named_once_a_minute(
    dsn: str, eyes: Eyes, caplog: pytest.LogCaptureFixture, refuses: str, why: str
) -> None:
    """The naive version halves the keys at each sweep, and logs it each time. A trigger stopped all keys."""
    eyes.do(
        "INSERT INTO pgqueue.job (task, state, key, lock_key, lock_limit, on_locked, args) SELECT 'refused.locked', "
        "'blocked', 'lock:k' || n, 'k' || n, 1, 'wait', jsonb_build_object('n', n) FROM generate_series(1, 30) AS n"
    )
    eyes.do(refuses.format(table="pgqueue.job_running", n=20))
    async with work(dsn, locked) as worker:
        worker.services.sweep.sweep_soon()
        await until(eyes.done(29))
        for _ in range(5):
            await worker.services.sweep.sweep()
            await worker.services.unblocker.idle()
        assert worker.state.phase == "running"
    # The job was granted its key before there was a slot, and then refused by the claim, or it never got so far.
    [(state, number)] = eyes.all("SELECT state, args ->> 'n' FROM pgqueue.job WHERE state <> 'completed'")
    assert number == "20" and state in ({"failed", "blocked"} if refuses == CHECK else {"available", "blocked"})
    said = [*lines(caplog, "has a job that cannot be moved"), *lines(caplog, "job 20 (refused.locked)")]
    assert 1 <= len(said) <= 2 and all(why in each for each in said)


@pytest.mark.promise("F133")
@pytest.mark.parametrize("table", ["job_done", "job_scheduled", "job_dead"])
async def test_no_line_about_an_outcome_that_is_refused_quotes_the_row(
    dsn: str, eyes: Eyes, caplog: pytest.LogCaptureFixture, table: str
) -> None:
    @task(name="refused.private", retry=RetryPolicy(attempts=1 if table == "job_dead" else 2, first=0.01))
    async def private(secret: str) -> str:
        if table != "job_done":
            raise LookupError("nothing there")
        return "a private result"

    eyes.do(f"ALTER TABLE pgqueue.{table} ADD CONSTRAINT odd CHECK (task <> 'refused.private') NOT VALID")
    private.enqueue(eyes.conn, "a private argument")
    async with work(dsn, private):
        await until(lambda: lines(caplog, "has run, but"))
        eyes.do(f"ALTER TABLE pgqueue.{table} DROP CONSTRAINT odd")
    assert all('"odd"' in said for said in lines(caplog, "has run, but"))
    assert not [said for said in caplog.messages if "a private" in said or "DETAIL" in said]


@pytest.mark.promise("F133")
@pytest.mark.parametrize("refuses", [CHECK, TRIGGER], ids=["check", "trigger"])
async def test_a_job_that_cannot_be_blocked_again_stops_no_sweep(
    dsn: str, eyes: Eyes, caplog: pytest.LogCaptureFixture, refuses: str
) -> None:
    """It was granted its key, and its queue is paused since. So were others, some of them before it and some behind.

    One naive version names no key any more. Another keeps the keys of all jobs that cannot go on.
    """
    eyes.do("INSERT INTO pgqueue.queue (name, paused_at) VALUES ('closed', now())")
    eyes.do(
        "INSERT INTO pgqueue.job (task, queue, holds, lock_key, args) SELECT "
        "'refused.locked', 'closed', true, 'held' || n, jsonb_build_object('n', n) FROM generate_series(1, 40) AS n"
    )
    eyes.do(
        "INSERT INTO pgqueue.job (task, state, key, lock_key, lock_limit, on_locked, args) SELECT 'refused.locked', "
        "'blocked', 'lock:held' || n, 'held' || n, 1, 'wait', jsonb_build_object('n', 100 + n) "
        "FROM generate_series(1, 40) AS n"
    )
    eyes.do(refuses.format(table="pgqueue.job_blocked", n=20))
    async with work(dsn, locked) as worker:
        for _ in range(3):
            await worker.services.sweep.sweep()
        await until(eyes.done(39))
        assert worker.state.phase == "running"
        held = "SELECT queue, state, args ->> 'n' FROM pgqueue.job WHERE state <> 'completed' AND (holds OR queue = '')"
        assert eyes.all(held) == [("closed", "available", "20")]
    assert len(lines(caplog, "cannot be blocked again")) == 1


@pytest.mark.promise("F133")
@pytest.mark.parametrize("refuses", [CHECK, TRIGGER], ids=["check", "trigger"])
async def test_a_job_that_can_be_neither_started_nor_failed_keeps_no_other_waiting(
    dsn: str, eyes: Eyes, caplog: pytest.LogCaptureFixture, refuses: str
) -> None:
    """The application has checks on both tables. The naive version claims no job of that kind any more."""
    eyes.do(PUT.format("", ""), plain.name, 60)
    eyes.do(refuses.format(table="pgqueue.job_running", n=20))
    eyes.do("ALTER TABLE pgqueue.job_dead ADD CONSTRAINT even CHECK (reason <> 'refused')")
    async with work(dsn, plain) as worker:
        await until(eyes.done(59))
        assert worker.state.phase == "running"
    assert eyes.all("SELECT state, args ->> 'n' FROM pgqueue.job WHERE state <> 'completed'") == [("available", "20")]
    [said] = lines(caplog, "cannot be started, and stays")
    assert ('"even"' if refuses == CHECK else "no twenties here") in said


@pytest.mark.promise("F133")
@pytest.mark.parametrize(
    ("refuses", "why"), [(CHECK, '"odd"'), (TRIGGER, "no twenties here")], ids=["check", "trigger"]
)
async def test_a_rate_whose_job_cannot_be_moved_keeps_no_other_rate_waiting(
    dsn: str, eyes: Eyes, caplog: pytest.LogCaptureFixture, refuses: str, why: str
) -> None:
    """Naive: what a trigger raises is tried again with all keys, and no job of any rate starts any more."""
    eyes.do(refuses.format(table="pgqueue.job_running", n=20))
    with psycopg.connect(dsn) as conn:
        for n in range(1, 31):
            rated.enqueue(conn, n)
    async with work(dsn, rated) as worker:
        await until(eyes.done(29))
        for _ in range(5):
            await worker.services.sweep.sweep()
            await worker.services.rate_limiter.idle()
        assert worker.state.phase == "running"
        assert eyes.all("SELECT state, args ->> 'n' FROM pgqueue.job WHERE state <> 'completed'") == [("blocked", "20")]
        [said] = lines(caplog, "has a job that cannot be moved")
        assert why in said and "refused-fast:20" in said


@pytest.mark.promise("F133")
@pytest.mark.each_value
@pytest.mark.parametrize("refuses", [CHECK, TRIGGER], ids=["check", "trigger"])
@pytest.mark.parametrize("ours", [False, True], ids=["of a dead worker", "of this one"])
async def test_a_running_job_that_cannot_be_given_back_keeps_no_other_running(
    dsn: str, eyes: Eyes, caplog: pytest.LogCaptureFixture, refuses: str, ours: bool
) -> None:
    """Its worker died, or the answer to its claim was lost. Naive: none of the jobs beside it is given back."""
    async with work(dsn, plain) as worker:
        eyes.do(
            "INSERT INTO pgqueue.job (task, state, worker_id, claim, started_at, args) SELECT 'refused.plain', "
            "'running', %s, 0, now(), jsonb_build_object('n', n) FROM generate_series(1, 60) AS n",
            worker.worker_id if ours else 999,
        )
        eyes.do(refuses.format(table="pgqueue.job_available", n=20))
        for _ in range(3):
            await (worker.services.reconciler.reconcile() if ours else worker.services.rescue.strays())
        await until(eyes.done(59))
        assert worker.state.phase == "running"
        assert eyes.all("SELECT state, args ->> 'n' FROM pgqueue.job WHERE state <> 'completed'") == [("running", "20")]
        [said] = lines(caplog, " back: ")
        assert ('"odd"' if refuses == CHECK else "no twenties here") in said
        eyes.do("DROP FUNCTION IF EXISTS public.refuses_odd CASCADE")
        eyes.do("ALTER TABLE pgqueue.job_available DROP CONSTRAINT IF EXISTS odd")
        worker.services.reconciler._left._until = {}  # their time is over
        await (worker.services.reconciler.reconcile() if ours else worker.services.rescue.strays())
        await until(eyes.done(60))


@pytest.mark.promise("F133")
@pytest.mark.parametrize("ours", [False, True], ids=["of a dead worker", "of this one"])
async def test_many_running_jobs_that_cannot_be_given_back_keep_no_other_running(
    dsn: str, eyes: Eyes, ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Naive: every try begins with the same 5 of them, and the jobs behind these are never given back."""
    for each in (reconciler, mover):
        monkeypatch.setattr(each, "REFUSED_MOST", 5)
    async with work(dsn, plain) as worker:
        eyes.do(
            "INSERT INTO pgqueue.job (task, state, worker_id, claim, started_at, args) SELECT 'refused.plain', "
            "'running', %s, 0, now(), jsonb_build_object('n', n) FROM generate_series(1, 20) AS n",
            worker.worker_id if ours else 999,
        )
        eyes.do("ALTER TABLE pgqueue.job_available ADD CONSTRAINT odd CHECK ((args ->> 'n')::int % 2 = 0) NOT VALID")
        again = worker.services.reconciler.reconcile if ours else worker.services.rescue.strays
        for _ in range(30):
            await again()
            if not eyes.one("SELECT count(*) FROM pgqueue.job_running WHERE claim = 0 AND (args ->> 'n')::int % 2 = 0"):
                break
        await until(eyes.done(10))
        eyes.do("ALTER TABLE pgqueue.job_available DROP CONSTRAINT odd")
        worker.services.reconciler._left._until = {}  # their time is over
        await again()
        await again()
        await until(eyes.done(20))
