"""The relay on real servers: what is staged arrives, once, in order, and what cannot be a job goes aside."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from time import monotonic
from typing import Any

import psycopg
import pytest
from clocks import step_clock
from poolers import Pooler
from relays import Sides, app_dsn, eventually, relaying, sides
from roles import Role, create_role, drop_role, refused, role
from servers import Server, embedded_server
from workers import Eyes

import pgqueue
from pgqueue.database import grants, migrations
from pgqueue.database.pipeline import Wire
from pgqueue.database.sessions import Link
from pgqueue.database.statements import Row, Statement, text
from pgqueue.errors import Error, SchemaMissing
from pgqueue.jobs.job import NewJob
from pgqueue.relay import relay as relays_module
from pgqueue.relay.fence import Fenced
from pgqueue.relay.relay import Relay, _Trouble
from pgqueue.relay.session import opened
from pgqueue.relay.source import Batch, Source
from pgqueue.relay.target import QueueTarget

__all__ = ["app_dsn", "role", "sides"]

mail = pgqueue.remote("shop.mail")
LOCK = "SELECT pg_try_advisory_lock(hashtextextended('pgqueue.relay', 7))"


@pytest.mark.promise("E12")
@pytest.mark.parametrize("batch", [1, 7, 500])
async def test_what_is_staged_arrives_in_order_and_goes_from_the_outbox(
    batch: int, app_dsn: str, dsn: str, sides: Sides
) -> None:
    values = [str(number) for number in range(50)]
    sides.stage(*values)
    assert await Relay(app_dsn, dsn, batch=batch).once()
    assert (sides.delivered(), sides.left()) == (values, 0)
    memory = sides.queue.execute(
        "SELECT array_agg(r.staged_id ORDER BY r.job_id), bool_and(j.id IS NOT NULL) "
        "FROM pgqueue.relayed r LEFT JOIN pgqueue.job j ON j.id = r.job_id"
    ).fetchone()
    assert memory == (list(range(1, 51)), True)


@pytest.mark.promise("F420")
async def test_an_outage_of_both_sides_is_told_once(
    app_dsn: str, dsn: str, sides: Sides, caplog: pytest.LogCaptureFixture
) -> None:
    """Naive keeps the idle session of the other side, and comes to it with the next staged job."""
    caplog.set_level(logging.INFO, "pgqueue")
    end = (
        "SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity "
        "WHERE datname = current_database() AND application_name LIKE 'pgqueue relay%'"
    )
    async with relaying(Relay(app_dsn, dsn)):
        sides.stage("before")
        await eventually(lambda: sides.delivered() == ["before"] and not sides.left(), 60.0)
        caplog.clear()
        for side in (sides.queue, sides.app):
            side.execute(end)
        await eventually(lambda: "this relay delivers" in caplog.text, 60.0)
        sides.stage("after")
        await eventually(lambda: sides.delivered() == ["before", "after"] and not sides.left(), 60.0)
    assert [caplog.text.count(f"the database is {how}") for how in ("lost", "back")] == [1, 1]


@pytest.mark.promise("E12")
@pytest.mark.parametrize("breaks", [True, False])
async def test_a_link_that_breaks_when_all_is_delivered_is_no_failure(
    breaks: bool, app_dsn: str, dsn: str, sides: Sides, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last message gives the lock back. Any other error of that message is one."""
    end = (
        "SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity WHERE application_name = 'pgqueue relay source'"
    )
    give_back = Source.unlock

    async def fail(source: Source) -> None:
        if not breaks:
            raise psycopg.errors.InsufficientPrivilege("not allowed")
        sides.app.execute(end)
        await give_back(source)

    monkeypatch.setattr(Source, "unlock", fail)
    sides.stage("a")
    if breaks:
        assert await Relay(app_dsn, dsn).once()
    else:
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            await Relay(app_dsn, dsn).once()
    assert (sides.delivered(), sides.left()) == (["a"], 0)


@pytest.mark.promise("E17")
async def test_all_that_a_job_was_given_arrives(app_dsn: str, dsn: str, sides: Sides) -> None:
    then = datetime(2040, 1, 1, tzinfo=UTC)
    jobs: list[NewJob[None]] = [
        mail.using(queue="post", priority=0, retry=3, headers={"trace": "x"}).new(a=1),
        mail.using(run_at=then, deadline=then + timedelta(hours=1)).new(),
        mail.using(lock=pgqueue.Lock("l\n1", limit=3, on_locked="once"), idempotency_key="i").new(),
    ]
    pgqueue.enqueue_many(pgqueue.Outbox(sides.app), jobs)
    sides.app.execute("INSERT INTO pgqueue.outbox (task, args) VALUES ('plain', %s)", ['{"n": ' + "9" * 5_000 + "}"])
    delayed = mail.using(delay=3_600, deadline=7_200).new(d=1)
    pgqueue.enqueue_many(pgqueue.Outbox(sides.app), [delayed])
    assert await Relay(app_dsn, dsn).once()
    found = sides.queue.execute(
        "SELECT state, queue, priority, max_attempts, headers, run_at, deadline, lock_key, lock_limit, on_locked, "
        "idempotency_key FROM pgqueue.job WHERE run_at IS NULL OR run_at = %s ORDER BY id",
        [then],
    ).fetchall()
    nothing = (None,) * 4
    assert found == [
        ("available", "post", 0, 3, {"trace": "x"}, None, None, *nothing),
        ("scheduled", "default", 5, None, None, then, then + timedelta(hours=1), *nothing),
        ("available", "default", 5, None, None, None, None, *nothing),
        ("available", "default", 5, None, None, None, None, "l\n1", 3, "once", "i"),
    ]
    text = sides.queue.execute("SELECT args::text FROM pgqueue.job WHERE task = 'plain'").fetchone()
    assert text == ('{"n": ' + "9" * 5_000 + "}",)
    [(run_at, deadline)] = sides.queue.execute("SELECT run_at, deadline FROM pgqueue.job WHERE args ? 'd'").fetchall()
    assert deadline - run_at == timedelta(hours=1)


# Nothing is left behind ----------------------------------------------------------------------------------------------


def naive(sides: Sides, commit: Callable[[], None]) -> None:
    """Select a range, deliver it, delete the range: each statement sees another snapshot."""
    [(most,)] = sides.app.execute("SELECT max(id) FROM pgqueue.outbox").fetchall()
    found = sides.app.execute("SELECT args::text FROM pgqueue.outbox WHERE id <= %s ORDER BY id", [most]).fetchall()
    with sides.queue.cursor() as cursor:
        cursor.executemany("INSERT INTO pgqueue.job (task, args) VALUES ('t', %s)", found)
    commit()
    sides.app.execute("DELETE FROM pgqueue.outbox WHERE id <= %s", [most])


def insert(conn: psycopg.Connection[object], value: str) -> None:
    conn.execute("INSERT INTO pgqueue.outbox (task, args) VALUES ('t', %s)", [json.dumps({"x": value})])


@pytest.mark.promise("E09")
async def test_a_row_that_commits_late_is_delivered(app_dsn: str, dsn: str, sides: Sides) -> None:
    """By the drain after the next, and by a relay that works on at once: it waits for no look at the whole outbox."""
    with psycopg.connect(app_dsn) as late:
        insert(late, "late")
        sides.stage("early")
        assert await Relay(app_dsn, dsn).once()
        assert sides.delivered() == ["early"]
        late.commit()
        assert await Relay(app_dsn, dsn).once()
        assert (sides.delivered(), sides.left()) == (["early", "late"], 0)
        async with relaying(Relay(app_dsn, dsn)):
            insert(late, "later")
            sides.stage("sooner")
            await eventually(lambda: "sooner" in sides.delivered())
            late.commit()
            await eventually(lambda: "later" in sides.delivered(), 7.0)
            await eventually(lambda: sides.left() == 0)  # deleted after it was delivered
    assert sides.doubled() == []


@pytest.mark.promise("E09")
async def test_the_naive_version_loses_that_row(app_dsn: str, sides: Sides) -> None:
    with psycopg.connect(app_dsn) as late:
        insert(late, "late")
        sides.stage("early")
        naive(sides, late.commit)
    assert (sides.delivered(), sides.left()) == (["early"], 0)


@pytest.mark.promise("E10")
async def test_a_locked_row_stays_and_is_delivered_once(app_dsn: str, dsn: str, sides: Sides) -> None:
    sides.stage("a", "b")
    with psycopg.connect(app_dsn) as holder:
        holder.execute("SELECT FROM pgqueue.outbox WHERE id = 1 FOR UPDATE")
        async with relaying(Relay(app_dsn, dsn)):
            await eventually(lambda: sides.left() == 1)
            sides.stage("c")
            await eventually(lambda: "c" in sides.delivered())
            holder.rollback()
            await eventually(lambda: sides.left() == 0)
    assert sides.delivered() == ["a", "b", "c"]


@pytest.mark.promise("E10")
async def test_a_row_that_stays_and_cannot_be_read_any_more_has_no_other_refused(
    app_dsn: str, dsn: str, sides: Sides, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The relay asks for it by its id, together with the first rows behind the cursor: these are sound."""
    real = Source.read
    values = ["d", "c", "b"]

    async def read(self: Source, after: int, again: Sequence[int], most: int, most_bytes: int) -> Batch:
        if 1 in again:
            if values:
                sides.stage(values.pop())  # a sound row is behind the cursor just now
            raise psycopg.errors.NumericValueOutOfRange("it has no text")
        return await real(self, after, again, most, most_bytes)

    monkeypatch.setattr(Source, "read", read)
    sides.stage("a")
    with psycopg.connect(app_dsn) as holder:
        holder.execute("SELECT FROM pgqueue.outbox WHERE id = 1 FOR UPDATE")
        async with relaying(Relay(app_dsn, dsn)) as relay:
            await eventually(lambda: sides.delivered() == ["a", "b", "c", "d"] and sides.left() == 1)
            assert not relay.done()
    assert sides.refused() == []


@pytest.mark.promise("E10")
async def test_a_crash_before_the_delete_doubles_nothing_and_ids_may_come_again(
    app_dsn: str, dsn: str, sides: Sides
) -> None:
    sides.stage("a", "b")
    sides.app.execute("CREATE TABLE kept AS TABLE pgqueue.outbox")
    assert await Relay(app_dsn, dsn).once()
    sides.app.execute("INSERT INTO pgqueue.outbox SELECT * FROM kept")  # as if they had not been deleted
    assert await Relay(app_dsn, dsn).once()
    assert (sides.delivered(), sides.left()) == (["a", "b"], 0)
    sides.app.execute("TRUNCATE pgqueue.outbox RESTART IDENTITY")
    async with relaying(Relay(app_dsn, dsn)):
        sides.stage("c")
        await eventually(lambda: sides.left() == 0)
        sides.stage("d")
        await eventually(lambda: sides.left() == 0)
        sides.app.execute("TRUNCATE pgqueue.outbox RESTART IDENTITY")
        sides.stage("e")
        await eventually(lambda: sides.left() == 0)
    assert sides.delivered() == ["a", "b", "c", "d", "e"]


async def test_large_rows_come_in_small_batches(
    app_dsn: str, dsn: str, sides: Sides, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgqueue.relay.rounds.BATCH_BYTES", 10_000)
    sides.stage(*[str(number) + "x" * 3_000 for number in range(20)], "y" * 30_000, "last")
    assert await Relay(app_dsn, dsn).once()
    assert sides.left() == 0
    assert [value[:2] for value in sides.delivered()][-3:] == ["19", "yy", "la"]
    transactions = sides.queue.execute("SELECT count(DISTINCT xmin::text) FROM pgqueue.relayed").fetchone()
    assert transactions is not None and 8 <= transactions[0] <= 10


# What cannot be a job ------------------------------------------------------------------------------------------------


async def test_only_what_fails_by_itself_is_refused(app_dsn: str, dsn: str, sides: Sides) -> None:
    sides.stage("a", "b")
    long = json.dumps({"lock_key": "k" * 600})
    sides.app.execute("INSERT INTO pgqueue.outbox (task, args) VALUES ('two words', '{}'), ('list', '[1]')")
    sides.app.execute("INSERT INTO pgqueue.outbox (task, options) VALUES ('long', %s)", [long])
    sides.app.execute("INSERT INTO pgqueue.outbox (task, args) VALUES ('big', to_jsonb(ARRAY[repeat('x', 2200000)]))")
    sides.app.execute("INSERT INTO pgqueue.outbox (task, staged_at) VALUES ('never', 'infinity')")
    sides.stage("c", "d")
    assert await Relay(app_dsn, dsn).once()
    assert (sides.delivered(), sides.left()) == (["a", "b", "c", "d"], 0)
    [two, listed, keyed, big, never] = sides.refused()
    assert two == ("two words", "task name 'two words': use 1 to 200 printable characters without spaces")
    assert listed == ("list", "args are a JSON object, by parameter name, not [1]")
    assert keyed[0] == "long" and "job_available_is_ready" in keyed[1]
    assert never == ("never", "staged_at is no time between the years 1 and 9999: leave it to its default")
    assert big[0] == "big" and "more than 2,097,152 bytes" in big[1]


@pytest.mark.parametrize("wrong", ["privilege", "format"])
async def test_what_is_no_fault_of_a_row_refuses_nothing(wrong: str, app_dsn: str, dsn: str, sides: Sides) -> None:
    sides.stage("a")
    if wrong == "format":
        sides.app.execute("UPDATE pgqueue.outbox SET format = 2")
    else:
        sides.queue.execute(
            "CREATE FUNCTION forbid() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
            "RAISE EXCEPTION 'no' USING ERRCODE = 'insufficient_privilege'; END $$;"
        )
        sides.queue.execute(
            "CREATE TRIGGER forbid BEFORE INSERT ON pgqueue.job_available FOR EACH ROW EXECUTE FUNCTION forbid()"
        )
    with pytest.raises((psycopg.errors.InsufficientPrivilege, pgqueue.Error)):
        await Relay(app_dsn, dsn).once()
    async with relaying(Relay(app_dsn, dsn)):
        sides.app.execute("UPDATE pgqueue.outbox SET format = 1")
        if wrong == "privilege":
            sides.queue.execute("DROP TRIGGER forbid ON pgqueue.job_available")
        await eventually(lambda: sides.left() == 0)
    assert (sides.delivered(), sides.refused()) == (["a"], [])


# Unique keys ---------------------------------------------------------------------------------------------------------


async def test_unique_keys_are_decided_at_the_queue(app_dsn: str, dsn: str, sides: Sides) -> None:
    once, replaced = mail.using(unique="k"), mail.using(unique=pgqueue.Unique("r", on_duplicate="replace"))
    with psycopg.connect(dsn) as conn:
        there = pgqueue.enqueue(conn, once, x="there")
    pgqueue.enqueue_many(pgqueue.Outbox(sides.app), [once.new(x="late"), replaced.new(x="old"), mail.new(x="plain")])
    pgqueue.enqueue_many(pgqueue.Outbox(sides.app), [replaced.new(x="new")])
    assert await Relay(app_dsn, dsn, batch=3).once()
    assert (sorted(sides.delivered()), sides.left()) == (["new", "plain", "there"], 0)
    became = sides.queue.execute("SELECT job_id FROM pgqueue.relayed ORDER BY staged_id").fetchall()
    assert became[0] == (there.id,) and became[1] == became[3]


async def test_a_row_that_waits_for_a_strangers_key_holds_up_no_other(app_dsn: str, dsn: str, sides: Sides) -> None:
    once = mail.using(unique="k")
    with psycopg.connect(dsn) as stranger:
        pgqueue.enqueue(stranger, once, x="stranger")
        keyed = [mail.using(unique=f"k{number}").new(x=str(number)) for number in range(5)]
        pgqueue.enqueue_many(pgqueue.Outbox(sides.app), [*keyed[:2], once.new(x="mine"), *keyed[2:], mail.new(x="p")])
        async with relaying(Relay(app_dsn, dsn)):
            await eventually(lambda: sides.left() == 1)
            assert sorted(sides.delivered()) == ["0", "1", "2", "3", "4", "p"]
            stranger.rollback()
            await eventually(lambda: sides.left() == 0)
    assert sorted(sides.delivered()) == ["0", "1", "2", "3", "4", "mine", "p"]


@pytest.mark.promise("F206")
async def test_rows_that_are_hidden_while_a_relay_works_are_refused_and_named(
    app_dsn: str,
    dsn: str,
    sides: Sides,
    role: Role,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("pgqueue.relay.relay.TROUBLE_MOST", 0.1)
    relays = role("relay")
    user = psycopg.conninfo.conninfo_to_dict(relays)["user"]
    grants.grant(sides.app, str(user), "relay_outbox", "pgqueue")
    async with relaying(Relay(psycopg.conninfo.make_conninfo(app_dsn, user=user, password="secret"), relays)):
        sides.stage("a")
        await eventually(lambda: sides.left() == 0)
        sides.app.execute("ALTER TABLE pgqueue.outbox ENABLE ROW LEVEL SECURITY")
        sides.stage("b")
        await eventually(lambda: "row level security is on for pgqueue.outbox" in caplog.text)
        [first] = [each for each in caplog.messages if "query would be affected" in each]
        assert "DISABLE ROW LEVEL SECURITY, or ALTER ROLE … BYPASSRLS" in first
        assert (sides.delivered(), sides.left()) == (["a"], 1)
        sides.app.execute("ALTER TABLE pgqueue.outbox DISABLE ROW LEVEL SECURITY")
        await eventually(lambda: sides.left() == 0)
    assert sides.delivered() == ["a", "b"]
    sides.app.execute(f"DROP OWNED BY {user}".encode())


# One at a time -------------------------------------------------------------------------------------------------------


@pytest.mark.promise("E10")
async def test_a_session_that_was_fenced_delivers_nothing(app_dsn: str, dsn: str, sides: Sides) -> None:
    target = QueueTarget(Link(dsn, "pgqueue"), 3_600.0)
    link = Link(app_dsn, "pgqueue")
    sides.stage("a")
    async with opened(link, "source") as old, opened(link, "source") as new:
        first, second = Source(old), Source(new)
        async with target.open(first, adopt=False) as stalled:
            batch = await first.read(0, [], 10, 10_000)
            async with target.open(second, adopt=False) as successor:
                delivery = await successor.deliver((await second.read(0, [], 10, 10_000)).rows)
                assert len(await second.settled(delivery.delivered, [])) == 1
                sides.queue.execute("DELETE FROM pgqueue.relayed")  # an hour later
                with pytest.raises(Fenced):
                    await stalled.deliver(batch.rows)
                with pytest.raises(Fenced):
                    await stalled.looked(await stalled.now())
                assert (await successor.deliver([])).delivered == []
    assert sides.delivered() == ["a"]


async def test_both_commits_are_durable_whatever_the_role_says(app_dsn: str, dsn: str) -> None:
    for off in ("off", "local", "remote_apply"):
        for side, place in (("source", app_dsn), ("target", dsn)):
            lax = psycopg.conninfo.make_conninfo(place, options=f"-c synchronous_commit={off}")
            async with opened(Link(lax, "pgqueue"), side) as session:
                with psycopg.connect(lax) as conn:
                    assert conn.execute("SHOW synchronous_commit").fetchone() == (off,)
                [[(setting,)]] = await session.ask(
                    session.statement("source_ping").__class__("SHOW synchronous_commit", {}, list)
                )
                assert setting == ("remote_apply" if off == "remote_apply" else "on")


@pytest.mark.promise("F205")
async def test_what_was_read_survives_a_crash_of_the_source() -> None:
    """The application does not wait for the disk, and the log writer sleeps. Without the flush the row is gone."""
    server = embedded_server(synchronous_commit="off", wal_writer_delay="10s")
    try:
        app = server.dsn("postgres")
        migrations.migrate(app, line=migrations.OUTBOX)
        server.restart()
        for number in range(3):
            async with opened(Link(app, "pgqueue"), "source") as session:
                source = Source(session)
                for _ in range(3):  # a first reading may write to the log itself: hints in pages
                    await source.read(number, [], 10, 10_000)
                with psycopg.connect(app) as conn:
                    insert(conn, str(number))
                assert len((await source.read(0, [], 10, 10_000)).rows) == number + 1
                server.restart("immediate")
            with psycopg.connect(app) as conn:
                assert conn.execute("SELECT count(*) FROM pgqueue.outbox").fetchone() == (number + 1,)
    finally:
        server.end()


@pytest.mark.promise("F205")
async def test_what_was_read_is_on_the_standby_that_the_server_waits_for() -> None:
    """It does not answer: what was read is not delivered until it does, or is waited for no more."""
    server = embedded_server(synchronous_commit="local")
    try:
        app = server.dsn("postgres")
        migrations.migrate(app, line=migrations.OUTBOX)
        async with opened(Link(app, "pgqueue"), "source") as session:
            with psycopg.connect(app, autocommit=True) as conn:
                conn.execute("ALTER SYSTEM SET synchronous_standby_names = 'away'")
                conn.execute("SELECT pg_reload_conf()")
                insert(conn, "a")
                wait = "SELECT FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
                await eventually(lambda: conn.execute("SHOW synchronous_standby_names").fetchone() == ("away",))
                reading = asyncio.create_task(Source(session).read(0, [], 10, 10_000))
                await eventually(lambda: len(conn.execute(wait).fetchall()) == 1)
                conn.execute("ALTER SYSTEM RESET synchronous_standby_names")
                conn.execute("SELECT pg_reload_conf()")
                assert len((await reading).rows) == 1
    finally:
        server.end()


@pytest.mark.promise("E08")
async def test_beside_a_working_relay_once_leaves_at_once(app_dsn: str, dsn: str, sides: Sides) -> None:
    async with relaying(Relay(app_dsn, dsn)):
        sides.stage("a")
        await eventually(lambda: sides.left() == 0)
        assert not await Relay(app_dsn, dsn).once()


@pytest.mark.promise("E08")
async def test_a_lock_whose_relay_reads_no_answer_is_taken(app_dsn: str, dsn: str, sides: Sides) -> None:
    """In the middle of a message none of the server's timeouts ends its session."""
    sides.stage("a")
    with psycopg.connect(app_dsn, autocommit=True) as stalled:
        assert stalled.execute(LOCK.encode()).fetchone() == (True,)
        pid = stalled.info.backend_pid
        stalled.pgconn.send_query(b"SELECT repeat('x', 50000000)")
        stalled.pgconn.flush()
        async with relaying(Relay(app_dsn, dsn)):
            writes = "SELECT wait_event FROM pg_stat_activity WHERE pid = %s"
            await eventually(lambda: sides.app.execute(writes, [pid]).fetchone() == ("ClientWrite",))
            assert sides.delivered() == []
            sides.app.execute(
                "CREATE OR REPLACE FUNCTION pgqueue.outbox_now() RETURNS timestamptz LANGUAGE sql VOLATILE "
                "RETURN clock_timestamp() + interval '20 s'"
            )
            await eventually(lambda: sides.left() == 0)
        stalled.pgconn.finish()
    assert sides.delivered() == ["a"]


@pytest.mark.promise("E13")
async def test_a_notification_wakes_an_idle_relay_and_without_it_polling_does(
    app_dsn: str, dsn: str, sides: Sides, monkeypatch: pytest.MonkeyPatch
) -> None:
    meant, stirs = list[float](), Source.stirs

    async def waits(self: Source, seconds: float) -> None:
        meant.append(seconds)
        await stirs(self, seconds)

    def pauses(seconds: float) -> None:
        for name in ("IDLE_FIRST", "IDLE_MOST"):
            monkeypatch.setattr(f"pgqueue.relay.rounds.{name}", seconds)

    monkeypatch.setattr(Source, "stirs", waits)
    pauses(3600.0)
    sides.stage("a")
    async with relaying(Relay(app_dsn, dsn)) as relay:
        await eventually(lambda: sides.left() == 0 and meant[-1:] > [50.0])
        pauses(0.2)  # the next ones: this one goes on
        pgqueue.enqueue(pgqueue.Outbox(sides.app), "t", x="b")
        await eventually(lambda: sides.left() == 0, 40.0)
        sides.stage("c")  # plain SQL does not notify
        await eventually(lambda: sides.left() == 0, 40.0)
        assert not relay.done()
    assert sides.delivered() == ["a", "b", "c"]


@pytest.mark.promise("E13")
async def test_an_idle_relay_asks_once_in_the_longest_pause(
    app_dsn: str, dsn: str, sides: Sides, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One statement for each poll, and the pause grows to its most."""
    monkeypatch.setattr("pgqueue.relay.rounds.IDLE_MOST", 0.4)
    asked, meant = list[float](), list[float]()
    read, stirs = Source.read, Source.stirs

    async def reads(self: Source, after: int, again: Sequence[int], most: int, most_bytes: int) -> Batch:
        asked.append(monotonic())
        return await read(self, after, again, most, most_bytes)

    async def waits(self: Source, seconds: float) -> None:
        meant.append(seconds)
        await stirs(self, seconds)

    monkeypatch.setattr(Source, "read", reads)
    monkeypatch.setattr(Source, "stirs", waits)
    async with relaying(Relay(app_dsn, dsn)):
        await eventually(lambda: len(asked) >= 10)
        kept = sides.app.execute("SELECT query FROM pg_stat_activity WHERE application_name = 'pgqueue relay source'")
        assert [query.startswith("WITH reading") for (query,) in kept.fetchall()] == [True]
    pauses = [later - earlier for earlier, later in pairwise(asked)]
    assert meant[0] < 0.3 and min(pauses[-3:]) >= 0.4


@pytest.mark.parametrize("side", ["source", "target"])
async def test_a_relay_behind_a_pooler_in_transaction_mode_says_so_and_does_nothing(
    side: str, app_dsn: str, dsn: str, sides: Sides
) -> None:
    sides.stage("a")
    with Pooler(app_dsn if side == "source" else dsn, 2) as pooler:
        relay = Relay(pooler.dsn, dsn) if side == "source" else Relay(app_dsn, pooler.dsn)
        with pytest.raises(pgqueue.Error, match=f"the connection to the {side} is no session of its own"):
            await relay.once()
    assert (sides.delivered(), sides.left()) == ([], 1)


# Copies --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["source", "target"])
async def test_a_copy_is_refused_until_it_is_adopted(side: str, app_dsn: str, dsn: str, sides: Sides) -> None:
    sides.stage("a")
    assert await Relay(app_dsn, dsn).once()
    if side == "source":
        sides.app.execute("UPDATE pgqueue.outbox_source SET home = 'elsewhere/5'")
    else:
        sides.queue.execute("UPDATE pgqueue.relay_target SET home = 'elsewhere/5'")
    sides.stage("b")
    with pytest.raises(pgqueue.Error, match=r"is a copy: it was at elsewhere/5.*--adopt"):
        await Relay(app_dsn, dsn).once()
    assert sides.delivered() == ["a"]
    assert await Relay(app_dsn, dsn, adopt=True).once()
    sides.stage("c")
    assert await Relay(app_dsn, dsn).once()
    assert sides.delivered() == ["a", "b", "c"]


async def test_another_queue_is_refused_until_it_is_adopted(app_dsn: str, dsn: str, sides: Sides) -> None:
    assert await Relay(app_dsn, dsn).once()
    sides.queue.execute("TRUNCATE pgqueue.relay_target")
    sides.stage("a")
    with pytest.raises(pgqueue.Error, match="belongs to another queue"):
        await Relay(app_dsn, dsn).once()
    assert await Relay(app_dsn, dsn, adopt=True).once()
    assert sides.delivered() == ["a"]


# The memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.promise("E10")
async def test_the_memory_goes_an_age_after_a_look_that_has_not_found_the_row(
    app_dsn: str, dsn: str, sides: Sides
) -> None:
    """Not by the age of the delivery: a row that was deleted late would have no memory if the source is set back."""

    async def look(later: int) -> list[str]:
        """A relay comes so many seconds later."""
        for table, columns in {"relayed": ["relayed_at"], "relay_fence": ["look", "next", "next_at"]}.items():
            for column in columns:
                sides.queue.execute(
                    f"UPDATE pgqueue.{table} SET {column} = {column} - make_interval(secs => {later})".encode()  # noqa: S608
                )
        assert await Relay(app_dsn, dsn, memory=100.0).once()
        rows = sides.queue.execute(
            "SELECT j.args ->> 'x' FROM pgqueue.relayed r JOIN pgqueue.job j ON j.id = r.job_id ORDER BY j.id"
        )
        return [value for (value,) in rows]

    sides.stage("a", "locked")
    with psycopg.connect(app_dsn) as holder:
        holder.execute("SELECT FROM pgqueue.outbox WHERE id = 2 FOR UPDATE")
        assert await look(0) == ["a", "locked"]
        assert await look(60) == ["a", "locked"]
        assert await look(60) == ["a", "locked"]  # a look is kept that has not found "a"
        assert await look(90) == ["a", "locked"]
        assert await look(20) == ["locked"]
    assert await look(10) == ["locked"]
    assert sides.left() == 0
    assert await look(95) == ["locked"]
    assert await look(120) == []
    assert sides.delivered() == ["a", "locked"]


@pytest.mark.promise("E10")
@pytest.mark.parametrize("believed", [False, True], ids=["given up", "naive"])
@pytest.mark.parametrize("back", [-7_200.0, -3_600.0, 0.0, 86_400.0])
async def test_the_memory_is_not_lost_when_the_clock_of_the_queue_is_set_back(
    back: float, believed: bool, app_dsn: str, dsn: str, sides: Sides, eyes: Eyes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is remembered by the new clock is no older than looks by the old one. The naive version forgets it, and the
    job comes twice."""
    if believed:
        naive = text("target_looked", "pgqueue").replace("next_at > clock.now", "false")
        usual = Link.statement

        def statement(link: Link, name: str, **params: object) -> Statement[list[Row]]:
            return Statement(naive, params, list) if name == "target_looked" else usual(link, name, **params)

        monkeypatch.setattr(Link, "statement", statement)
    sides.stage("before")
    for later in (0.0, 110.0, 220.0):  # two looks, and what was delivered before the first is forgotten
        step_clock(eyes, later)
        assert await Relay(app_dsn, dsn, memory=100.0).once()
    assert eyes.one("SELECT isfinite(look) FROM pgqueue.relay_fence")
    step_clock(eyes, 220.0 + back)
    sides.stage("locked")
    with psycopg.connect(app_dsn) as holder:
        holder.execute("SELECT FROM pgqueue.outbox FOR UPDATE")
        for _ in range(3):
            assert await Relay(app_dsn, dsn, memory=100.0).once()
    if believed and back < 0.0:
        assert len(sides.delivered()) > 2 and set(sides.delivered()) == {"before", "locked"}
        return
    assert await Relay(app_dsn, dsn, memory=100.0).once()
    assert (sides.delivered(), sides.left()) == (["before", "locked"], 0)
    for later in (110.0, 220.0, 330.0):  # and it goes, an age later by the new clock
        step_clock(eyes, 220.0 + back + later)
        assert await Relay(app_dsn, dsn, memory=100.0).once()
    assert eyes.one("SELECT count(*) FROM pgqueue.relayed") == 0


async def test_the_next_run_waits_for_no_session_of_the_one_before_to_end(
    app_dsn: str, dsn: str, sides: Sides, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server ends a session some time after its client has closed it."""
    late: list[Wire] = []

    async def close(wire: Wire) -> None:
        late.append(wire)

    with monkeypatch.context() as patched:
        patched.setattr(Wire, "close", close)
        for x in ("a", "b"):
            sides.stage(x)
            assert await Relay(app_dsn, dsn).once()
    for wire in late:
        await wire.close()
    assert (sides.delivered(), sides.left()) == (["a", "b"], 0)


# Roles ---------------------------------------------------------------------------------------------------------------


async def test_roles_with_the_least_rights_stage_and_relay(app_dsn: str, dsn: str, sides: Sides, role: Role) -> None:
    """Each of the three alone in its database; what they need is granted by name."""
    relay = role("relay")
    user = str(psycopg.conninfo.conninfo_to_dict(relay)["user"])
    stager = create_role(app_dsn)
    sides.app.execute("REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA pgqueue FROM PUBLIC")
    sides.app.execute("TRUNCATE pgqueue.outbox_source")  # by a fixture: the relay puts both rows back
    sides.queue.execute("TRUNCATE pgqueue.relay_target")
    grants.grant(sides.app, stager, "stage", "pgqueue")
    grants.grant(sides.app, user, "relay_outbox", "pgqueue")
    replaced = mail.using(unique=pgqueue.Unique("r", on_duplicate="replace"))
    jobs = [
        mail.new(x="a"),
        replaced.new(x="old"),
        replaced.new(x="new"),
        mail.using(delay=60, lock="l", idempotency_key="i").new(x="b"),
    ]
    with psycopg.connect(psycopg.conninfo.make_conninfo(app_dsn, user=stager, password="secret")) as conn:
        pgqueue.enqueue_many(pgqueue.Outbox(conn), jobs)
        conn.execute("INSERT INTO pgqueue.outbox (task, args) VALUES ('two words', '{}') RETURNING id, uid")
        for forbidden in ("SELECT args FROM pgqueue.outbox", "DELETE FROM pgqueue.outbox", "TRUNCATE pgqueue.outbox"):
            with pytest.raises(psycopg.errors.InsufficientPrivilege), conn.transaction():
                conn.execute(forbidden.encode())
    mine = psycopg.conninfo.make_conninfo(app_dsn, user=user, password="secret")
    assert await Relay(mine, relay, batch=3).once()
    assert (sorted(sides.delivered()), sides.left(), len(sides.refused())) == (["a", "b", "new"], 0, 1)
    assert await Relay(mine, relay).once()
    refused(relay, "SELECT * FROM pgqueue.job_running", "DELETE FROM pgqueue.job_done", "TRUNCATE pgqueue.relayed")
    for name in (stager, user):
        sides.app.execute(psycopg.sql.SQL("DROP OWNED BY {}").format(psycopg.sql.Identifier(name)))
    drop_role(sides.app, stager)


async def test_a_role_without_rights_is_told_those_of_a_relay(app_dsn: str, dsn: str, sides: Sides) -> None:
    name = create_role(dsn)
    apart, target = (psycopg.conninfo.make_conninfo(each, user=name, password="secret") for each in (app_dsn, dsn))
    for relay, needed in ((Relay(apart, dsn), "relay --outbox"), (Relay(app_dsn, target), "relay")):
        with pytest.raises(Error, match=f"role '{name}' may not read .*`pgqueue grants {name} --for {needed}`"):
            await relay.once()
    drop_role(sides.queue, name)


# Trouble -------------------------------------------------------------------------------------------------------------


async def test_tables_that_are_missing_are_said_once_and_waited_for(
    empty_dsn: str, dsn: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The application's migration may come minutes after the relay. Then the relay works within seconds."""
    looked: list[str] = []
    require = migrations.require

    def counted(*args: Any, **options: Any) -> Any:
        looked.append("")
        return require(*args, **options)

    monkeypatch.setattr(migrations, "require", counted)
    monkeypatch.setattr("pgqueue.relay.relay.SCHEMA_MOST", 0.01)
    with caplog.at_level(logging.INFO, "pgqueue"):
        async with relaying(Relay(empty_dsn, dsn)):
            await eventually(lambda: len(looked) >= 10)
            [line] = [record for record in caplog.records if record.name == "pgqueue"]
            assert line.levelname == "WARNING" and "the outbox in schema 'pgqueue' of database" in line.getMessage()
            assert "run `pgqueue migrate --outbox`; it is tried again until it works" in line.getMessage()
            await asyncio.to_thread(migrations.migrate, empty_dsn, line=migrations.OUTBOX)
            await eventually(lambda: "this relay delivers the jobs of" in caplog.text)


def test_the_same_trouble_is_said_once_a_minute_and_another_one_at_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now, missing, copied = 1_000.0, SchemaMissing("it is not there"), Error("it is a copy")
    monkeypatch.setattr("pgqueue.relay.relay.monotonic", lambda: now)
    trouble = _Trouble("db/shop")
    pauses = []
    with caplog.at_level(logging.INFO, "pgqueue"):
        for seconds, error in ((0.0, missing), (59.9, missing), (0.2, missing), (1.0, copied), (1.0, copied)):
            now += seconds
            pauses.append(trouble.met(error))
    assert [re.split("[:;] ", each.getMessage())[1] for each in caplog.records] == [
        "it is not there",
        "it is not there",
        "it is a copy",
    ]
    assert all(pause <= 5.0 for pause in pauses[:3]) and max(trouble.met(missing) for _ in range(9)) <= 5.0
    assert max(trouble.met(copied) for _ in range(9)) >= 30.0


# Read only by order --------------------------------------------------------------------------------------------------


@pytest.mark.promise("F190")
@pytest.mark.parametrize("which", ["source", "target"])
async def test_nothing_is_delivered_from_or_to_a_database_that_is_read_only(
    which: str, app_dsn: str, dsn: str, sides: Sides, caplog: pytest.LogCaptureFixture
) -> None:
    """When that is lifted, each row comes once, and no session of the relay was ended for it."""
    caplog.set_level(logging.WARNING)
    side = sides.app if which == "source" else sides.queue
    name = side.info.dbname
    async with relaying(Relay(app_dsn, dsn)):
        sides.stage("before")
        await eventually(lambda: sides.delivered() == ["before"] and not sides.left())
        side.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = on".encode())
        side.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND application_name LIKE 'pgqueue relay%'"
        )
        sides.stage("meanwhile")  # a relay with nothing to deliver does not miss the target
        await eventually(lambda: "the database is read only" in caplog.text)
        assert f"is on in the {which}" in caplog.text
        assert (sides.delivered(), sides.left()) == (["before"], 1)
        side.execute(f"ALTER DATABASE {name} RESET default_transaction_read_only".encode())
        await eventually(lambda: not sides.left(), 15.0)
    assert (sides.delivered(), sides.refused()) == (["before", "meanwhile"], [])
    assert caplog.text.count("the database is read only (") == 1


@pytest.mark.promise("F190")
async def test_nothing_is_delivered_from_a_server_that_becomes_read_only_under_an_open_session(
    own_server: Server, dsn: str, eyes: Eyes
) -> None:
    """What was read could not be deleted: a target that remembers nothing would get it again and again."""
    app_dsn = own_server.dsn("postgres")
    await asyncio.to_thread(migrations.migrate, app_dsn, line=migrations.OUTBOX)
    with psycopg.connect(app_dsn, autocommit=True, options="-c default_transaction_read_only=off") as app:
        sides = Sides(app, eyes.conn)
        async with relaying(Relay(app_dsn, dsn)) as relay:
            sides.stage("before")
            await eventually(lambda: sides.delivered() == ["before"] and not sides.left())
            app.execute("ALTER SYSTEM SET default_transaction_read_only = on")
            app.execute("SELECT pg_reload_conf()")
            with psycopg.connect(app_dsn, autocommit=True) as conn:
                await eventually(lambda: conn.execute("SHOW transaction_read_only").fetchone() == ("on",))
            sides.stage("meanwhile")
            gone = "SELECT count(*) = 0 FROM pg_stat_activity WHERE application_name = 'pgqueue relay source'"
            await eventually(lambda: app.execute(gone).fetchone() == (True,))
            assert sides.delivered() == ["before"] and not relay.done()
            app.execute("ALTER SYSTEM RESET default_transaction_read_only")
            app.execute("SELECT pg_reload_conf()")
            await eventually(lambda: not sides.left(), 15.0)
    assert sides.delivered() == ["before", "meanwhile"]


async def test_a_link_that_dies_while_the_tables_are_checked_holds_up_no_relay(
    app_dsn: str, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Naive: the relay waits for that answer for hours."""

    def answers_late(conn: psycopg.Connection[Any], *_: object, **__: object) -> None:
        conn.execute("SELECT pg_sleep(600)")

    monkeypatch.setattr(relays_module, "ROUND_TRIP_SECONDS", 0.3)
    monkeypatch.setattr(migrations, "require", answers_late)
    async with asyncio.timeout(60):
        with pytest.raises(psycopg.OperationalError):
            await Relay(app_dsn, dsn).once()
