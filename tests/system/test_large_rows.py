"""A row with values that are too large, or that have no text at all: it is refused, and no other job waits for it."""

from __future__ import annotations

import json
from datetime import timedelta
from time import process_time
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner
from workers import Eyes, until, work

import pgqueue
from pgqueue.admin import queries
from pgqueue.admin.filters import Filter
from pgqueue.cli import main
from pgqueue.client.tasks import task
from pgqueue.errors import PayloadTooLarge
from pgqueue.jobs.concurrency import Limit, Rate
from pgqueue.jobs.sizes import JSON_MOST, TEXT_MOST, text_too_large
from pgqueue.jobs.states import STATES
from pgqueue.testing import drain

LIST = """('{{"a": [' || pg_catalog.repeat('{0}, ', {1} - 1) || '{0}]}}')::jsonb"""  # jsonb_agg would write out each
NO_TEXT = LIST.format("1e131000", 8_300)
"""2 kB as it is stored, and more than a text may have as text."""
LONG = LIST.format("1e131000", 20)
"""300 bytes as it is stored, 2.6 MB as text."""
MANY = LIST.format("1e308", 174_000)
"""As JSON it is within the limit of an enqueue; 54 MB as text."""
BAD = "INSERT INTO pgqueue.job (task, {}) VALUES ('{}', {}) RETURNING id"


@task(name="large.plain")
async def plain(a: list[float] | None = None) -> None:
    pass


@task(name="large.locked", lock="k")
async def locked(a: list[float] | None = None) -> None:
    pass


@task(name="large.limited", limit=Limit(5, name="few"))
async def limited(a: list[float] | None = None) -> None:
    pass


@task(name="large.rated", rate=Rate("50/s", name="slow"))
async def rated(a: list[float] | None = None) -> None:
    pass


KINDS: dict[str, tuple[Any, str, str]] = {
    "plain": (plain, "", ""),
    "a lock": (locked, "lock_key, lock_limit, on_locked, ", "'k', 1, 'wait', "),
    "a limit": (limited, "limit_key, ", "'few', "),
    "a rate": (rated, "rate_key, ", "'slow', "),
}
SAID = """
    SELECT j.state, j.reason, a.outcome, a.error_type, a.message FROM pgqueue.job j
    LEFT JOIN pgqueue.attempt a ON a.job_id = j.id WHERE j.id = %s
"""


@pytest.mark.promise("F63")
@pytest.mark.each_value
@pytest.mark.parametrize("column", ["args", "headers"])
@pytest.mark.parametrize("kind", KINDS)
async def test_a_job_that_is_too_large_is_refused_and_the_others_run(
    dsn: str, eyes: Eyes, kind: str, column: str
) -> None:
    mine, keys, values = KINDS[kind]
    bad = eyes.one(BAD.format(keys + column, mine.name, values + LONG))
    with psycopg.connect(dsn) as conn:
        good = [mine.enqueue(conn).id for _ in range(3)]
    async with work(dsn, mine) as worker:
        for id in good:
            await until(eyes.is_in(id, "completed"))
        await until(eyes.is_in(bad, "failed"))
        assert worker.state.phase == "running"
    [(state, reason, outcome, error_type, message)] = eyes.all(SAID, bad)
    assert (state, reason, outcome, error_type) == ("failed", "refused", "failed", "PayloadTooLarge")
    assert "bytes as text, the limit is 2097152" in message and column.replace("args", "arguments") in message


@pytest.mark.promise("F63")
@pytest.mark.second
@pytest.mark.parametrize("kind", KINDS)
async def test_a_value_that_has_no_text_stops_no_claim(dsn: str, eyes: Eyes, kind: str) -> None:
    """Before, every claim of the worker failed with it, for every queue, after a restart, too."""
    mine, keys, values = KINDS[kind]
    bad = eyes.one(BAD.format(keys + "headers", mine.name, values + NO_TEXT))
    with psycopg.connect(dsn) as conn:
        if kind == "plain":  # it takes seconds, and the value is the same for all
            with pytest.raises(psycopg.errors.ProgramLimitExceeded), conn.transaction():
                conn.execute("SELECT headers::text FROM pgqueue.job WHERE id = %s", [bad])
        good = [mine.enqueue(conn).id for _ in range(3)]
    async with work(dsn, mine) as worker:
        for id in good:
            await until(eyes.is_in(id, "completed"))
        await until(eyes.is_in(bad, "failed"))
        assert worker.state.phase == "running"
    [(state, reason, _, error_type, message)] = eyes.all(SAID, bad)
    assert (state, reason, error_type) == ("failed", "refused", "PayloadTooLarge")
    assert "headers have more than a thousand million bytes" in message
    if kind == "plain":
        with psycopg.connect(dsn) as conn:  # and people see it
            assert queries.get(conn, bad).headers == {"pgqueue": "not shown: more than 1000000000 bytes"}


@pytest.mark.promise("F64")
@pytest.mark.second
async def test_numbers_that_take_54_mb_as_text_are_not_read(dsn: str, eyes: Eyes) -> None:
    bad = eyes.one(BAD.format("args", plain.name, MANY))
    with psycopg.connect(dsn) as conn:
        good = plain.enqueue(conn).id
    async with work(dsn, plain):
        await until(eyes.is_in(good, "completed"))
        await until(eyes.is_in(bad, "failed"))
    [(_, reason, _, _, message)] = eyes.all(SAID, bad)
    assert reason == "refused" and "its arguments have 54" in message


@pytest.mark.promise("F64")
def test_a_key_that_no_enqueue_lets_in_is_not_read(dsn: str, eyes: Eyes) -> None:
    bad = eyes.one("INSERT INTO pgqueue.job (task, unique_key) VALUES ('large.plain', repeat('k', 501)) RETURNING id")
    with psycopg.connect(dsn) as conn:
        drained = drain(conn)
        conn.commit()
    assert (drained.completed, drained.failed) == (0, 1)
    [(_, reason, _, _, message)] = eyes.all(SAID, bad)
    assert (reason, message) == ("refused", "its unique key has 501 bytes, the limit is 500")


# What people see -----------------------------------------------------------------------------------------------------

UNREADABLE = {
    "too large": LONG,
    "more digits than Python reads": LIST.format("1e5000", 1),
    "nested too deeply": "(repeat('[', 5000) || repeat(']', 5000))::jsonb",
}


@pytest.mark.promise("F63")
@pytest.mark.parametrize("name", UNREADABLE)
def test_a_job_that_cannot_be_shown_is_listed(name: str, dsn: str, eyes: Eyes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, nothing of the page was to be seen."""
    monkeypatch.setenv("PGQUEUE_DSN", dsn)
    bad = eyes.one(BAD.format("args, headers", "large.plain", f"jsonb_build_object('x', {UNREADABLE[name]}), '{{}}'"))
    with psycopg.connect(dsn) as conn:
        good = plain.enqueue(conn, [1.5]).id
        assert [job.id for job in queries.find(conn)] == [good, bad]
        assert queries.get(conn, good).args == {"a": [1.5]}
        assert str(queries.get(conn, bad).args["pgqueue"]).startswith("not shown: ")
    for command in (["jobs"], ["jobs", "--json"], ["jobs", str(bad)], ["jobs", str(bad), "--json"]):
        ran = CliRunner().invoke(main, command)
        assert (ran.exit_code, ran.exception) == (0, None)
        assert str(bad) in ran.stdout


@pytest.mark.promise("F64")
@pytest.mark.second
def test_a_long_page_of_large_jobs_is_cut(dsn: str, eyes: Eyes) -> None:
    eyes.do(
        "INSERT INTO pgqueue.job (task, args) SELECT 'large.plain', jsonb_build_object('a', repeat('x', 1000000)) "
        "FROM generate_series(1, 70)"
    )
    with psycopg.connect(dsn) as conn:
        page = queries.find(conn, limit=100)
        few = queries.newest(Filter(STATES, limit=100), "pgqueue", room=1 << 20)
        [[[plan]]] = conn.execute("EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) " + few.sql, few.params).fetchall()
    assert plan["Plan"]["Temp Written Blocks"] == 0, "the sort of a page carries no texts"
    assert len(page) == 70
    shown = [job for job in page if "a" in job.args]
    assert shown == page[: len(shown)] and len(shown) == 67  # 64 MB, the newest first
    assert page[-1].args == {"pgqueue": "not shown: 1000009 bytes"}


# At the door ---------------------------------------------------------------------------------------------------------


@pytest.mark.promise("F64")
def test_what_would_be_too_large_as_text_is_refused_at_the_door(dsn: str) -> None:
    numbers = [1e308] * 100_000
    with psycopg.connect(dsn) as conn:
        with pytest.raises(PayloadTooLarge, match="with all the digits"):
            plain.enqueue(conn, numbers)
        id = plain.enqueue(conn, [1e308] * 6_000).id
        [(size,)] = conn.execute("SELECT octet_length(args::text) FROM pgqueue.job WHERE id = %s", [id]).fetchall()
        assert TEXT_MOST * 0.8 < size <= TEXT_MOST
        id = plain.enqueue(conn, [1.5] * 250_000).id  # nearly the limit as JSON, more than it as text
        [(size,)] = conn.execute("SELECT octet_length(args::text) FROM pgqueue.job WHERE id = %s", [id]).fetchall()
        assert JSON_MOST < size <= TEXT_MOST


@pytest.mark.promise("F64")
@pytest.mark.parametrize(
    "number", ["1e308", "1.5e-7", "-1.25e+3", "12.5e-308", "1e5", "1E20", "0e5", "1.000e2", "123456789e-3"]
)
def test_the_size_of_a_text_is_that_of_the_server(number: str, conn: psycopg.Connection[Any]) -> None:
    """Never less. More by little: a number may be written in a way that the server makes shorter."""
    raw = json.dumps({"text": "1e308, 1e308", "a": [0] * 2}).encode()
    raw = raw.replace(b"0", f"{', '.join([number] * 7_000)}".encode())
    said = text_too_large(raw + b" " * max(0, 50_000 - len(raw)))
    [(size,)] = conn.execute("SELECT octet_length(%s::text::jsonb::text)", [raw.decode()]).fetchall()
    assert said is None if size <= TEXT_MOST * 0.9 else size <= (said or 0) < 1.1 * size


@pytest.mark.parametrize("digits", [b"1" * 100_000, b"1" * 50_000 + b"." + b"1" * 50_000, b"1." * 50_000])
def test_a_long_number_is_read_once(digits: bytes) -> None:
    """It was read again from each of its digits: 50,000 of them took 50 s."""
    started = process_time()
    assert text_too_large(b"[1e5," + digits + b"]") is None
    assert process_time() - started < 1


@pytest.mark.promise("F64")
async def test_a_result_is_bounded_as_text(dsn: str, eyes: Eyes) -> None:
    @task(name="large.result")
    async def large() -> list[float]:
        return [1e308] * 100_000

    with psycopg.connect(dsn) as conn:
        id = large.enqueue(conn).id
    async with work(dsn, large):
        await until(eyes.is_in(id, "failed"))
    [(_, _, _, _, message)] = eyes.all(SAID, id)
    assert message == (
        "the result cannot be stored: 31,100,000 bytes with all the digits of its numbers, the limit is 2,097,152"
    )


def test_the_limits_of_the_statements_are_those_of_the_code() -> None:
    from pgqueue.database import statements

    sql = statements.text("fetch_claim", "pgqueue")
    assert sql.count(f"<= {TEXT_MOST}") == 5 and "1048576" not in sql
    assert pgqueue.__name__ in sql


@pytest.mark.promise("F63")
@pytest.mark.second
def test_of_many_values_without_a_text_only_the_first_takes_long(conn: psycopg.Connection[Any]) -> None:
    conn.execute("CREATE TEMPORARY TABLE value (v jsonb)")
    conn.execute(f"INSERT INTO value SELECT {NO_TEXT} FROM generate_series(1, 200)".encode())  # noqa: S608
    conn.execute("""INSERT INTO value VALUES ('{"a": [0, -1.5, 1e300, 1e-300, "x", null, {"b": []}]}')""")
    rows = conn.execute("SELECT octet_length(pgqueue.text_of(v)) > 0, clock_timestamp() FROM value")
    *long, small = rows.fetchall()
    assert small[0] is True and [answer for answer, _ in long] == [None] * 200
    assert long[-1][1] - long[0][1] < timedelta(seconds=20)  # each of them would take seconds


@pytest.mark.promise("F63")
@pytest.mark.parametrize("number", ["1e131000", "-1e131000", "1e-16000", "-1e-16000"])
def test_after_a_long_text_numbers_are_looked_at_before(conn: psycopg.Connection[Any], number: str) -> None:
    value = "jsonb_build_object('a', jsonb_build_array(1, %s::numeric))"
    before, after = f"SELECT pgqueue.text_of({value})", f"SELECT pgqueue.text_of({value}) IS NULL"
    [(text,)] = conn.execute(before.encode(), [number]).fetchall()
    assert len(text) > 16_000
    conn.execute("SELECT length(pgqueue.text_of(to_jsonb(repeat('x', 16777217))))")
    assert conn.execute(after.encode(), [number]).fetchall() == [(True,)]
    for small in ("0", "-1.5", "1e300", "-1e-300"):
        assert conn.execute(after.encode(), [small]).fetchall() == [(False,)]
    conn.rollback()  # only in that transaction
    assert conn.execute(after.encode(), [number]).fetchall() == [(False,)]


@pytest.mark.promise("F63")
@pytest.mark.parametrize("name", UNREADABLE)
def test_a_schedule_that_cannot_be_shown_is_listed(
    name: str, dsn: str, eyes: Eyes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGQUEUE_DSN", dsn)
    put = "INSERT INTO pgqueue.schedule (name, line, task, args, last_at) VALUES (%s, '0 0 * * *', 'x', {}, {})"
    eyes.do(put.format("'{\"a\": 1}'", "NULL"), "good")
    eyes.do(put.format(f"jsonb_build_object('x', {UNREADABLE[name]})", "'8999-12-31'"), "bad")
    with psycopg.connect(dsn) as conn:
        bad, good = pgqueue.schedules.schedules(conn)
    assert (bad.name, good.name, good.args) == ("bad", "good", {"a": 1})
    assert str(bad.args["pgqueue"]).startswith("not shown: ")
    for command in (["schedules"], ["schedules", "--json"]):
        ran = CliRunner().invoke(main, command)
        assert (ran.exit_code, ran.exception) == (0, None) and "good" in ran.stdout
