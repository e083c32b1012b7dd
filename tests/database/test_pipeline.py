"""A worker's messages: values go and come as they are, answers never mix, and nobody waits for ever."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import faults
import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st
from psycopg.pq import ExecStatus
from workers import Eyes, until

from pgqueue.database import statements
from pgqueue.database.dead_link import hang_up
from pgqueue.database.pipeline import Wire, compiled, literal
from pgqueue.database.sessions import Link, Session, connect, send
from pgqueue.database.statements import Statement

TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"))
WHOLE = st.integers(-(2**63), 2**63 - 1)
NUMBERS = st.floats(allow_nan=False)
Cast = Callable[[Any, str], Any]


def says(sql: str, **params: object) -> Statement[list[Any]]:
    return Statement(sql, params, list)


@pytest.fixture(params=[True, False], ids=["prepared", "not prepared"])
async def wire(request: pytest.FixtureRequest, dsn: str) -> AsyncIterator[Wire]:
    conn = await connect(Link(dsn, "pgqueue", prepare=request.param), "test")
    yield conn
    await conn.close()


# Values --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def cast(empty_dsn: str) -> Iterator[Cast]:
    """What the server makes of a literal of ours."""
    with psycopg.connect(empty_dsn, autocommit=True) as conn:

        def ask(value: Any, kind: str) -> Any:
            result = conn.pgconn.exec_params(b"SELECT $1::" + kind.encode(), [literal(value)])
            assert result.status == ExecStatus.TUPLES_OK, result.error_message
            text = result.get_value(0, 0)
            return conn.execute(
                f"SELECT %s::text::{kind}".encode(), [None if text is None else text.decode()]
            ).fetchone()

        yield ask


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("text", TEXT),
        ("bigint", WHOLE),
        ("float8", NUMBERS),
        ("boolean", st.booleans()),
        ("text[]", st.lists(st.none() | TEXT)),
        ("bigint[]", st.lists(st.none() | WHOLE)),
        ("float8[]", st.lists(st.none() | NUMBERS)),
        ("boolean[]", st.lists(st.none() | st.booleans())),
    ],
)
def test_every_value_arrives_as_it_was(kind: str, values: st.SearchStrategy[Any], cast: Cast) -> None:
    @given(values)
    def arrives(value: Any) -> None:
        assert cast(value, kind) == (value,)

    arrives()


@pytest.mark.parametrize("word", ["", "NULL", "null", "{", "}", ",", '"', "\\", " ", "\n", "a b", "ä", "%s", "'"])
def test_words_that_mean_something_in_an_array_mean_nothing(word: str, cast: Cast) -> None:
    assert cast([word, None, word + word], "text[]") == ([word, None, word + word],)


def test_infinity_is_a_number(cast: Cast) -> None:
    assert cast([math.inf, -math.inf], "float8[]") == ([math.inf, -math.inf],)
    assert literal(None) is None


@pytest.mark.parametrize("value", ["a\0b", ["a", "a\0b"]])
def test_text_that_the_server_would_cut_is_refused(value: object) -> None:
    with pytest.raises(psycopg.DataError, match="NUL"):
        literal(value)


@pytest.mark.parametrize("value", [object(), b"bytes", [b"bytes"], {"a": 1}])
def test_what_no_statement_takes_is_refused(value: object) -> None:
    with pytest.raises(TypeError, match="cannot take"):
        literal(value)


def test_places_are_numbered_by_name_and_percent_signs_stay() -> None:
    sql = "SELECT %(b)s::text, %(a)s::integer %% 2, %(b)s::text || '%%'"
    assert compiled(sql) == (b"SELECT $1::text, $2::integer % 2, $1::text || '%'", ("b", "a"))


def test_every_statement_of_ours_has_its_places_and_no_others() -> None:
    for name in statements.names():
        command, places = compiled(statements.text(name, "pgqueue"))
        assert b"%(" not in command, name
        assert all(b"$%d" % number in command for number in range(1, len(places) + 1)), name


# Messages ------------------------------------------------------------------------------------------------------------


async def test_answers_come_in_order_with_the_types_of_psycopg(wire: Wire) -> None:
    for _ in range(2):  # the second time by name
        got = await wire.ask(
            [
                says("CREATE TEMP TABLE IF NOT EXISTS t (n bigint)"),
                says(
                    "SELECT %(n)s::integer, %(s)s::text, %(none)s::text, '{\"a\": [1]}'::jsonb", n=1, s="ä", none=None
                ),
                says("SELECT n FROM generate_series(1, %(most)s::integer) AS n", most=3),
                says("SELECT 1 WHERE false"),
                says("SELECT to_timestamp(%(at)s::float8)", at=946_684_801.5),
            ]
        )
        assert got == [[], [(1, "ä", None, {"a": [1]})], [(1,), (2,), (3,)], [], [(1_500_000,)]]


async def test_a_large_message_with_a_large_answer_does_not_stand_still(wire: Wire) -> None:
    """The server stops reading while nobody reads what it writes."""
    texts = [str(n) * 2**20 for n in range(8)]
    got = await asyncio.wait_for(wire.ask([says("SELECT %(text)s::text", text=text) for text in texts]), 60)
    assert got == [[(text,)] for text in texts]


async def test_the_first_error_is_raised_and_what_follows_is_not_executed(wire: Wire, eyes: Eyes) -> None:
    eyes.do("CREATE SEQUENCE steps")
    one, zero, two = says("SELECT nextval('steps')"), says("SELECT 1 / 0"), says("SELECT nextval('steps') + 0")
    with pytest.raises(psycopg.errors.DivisionByZero):
        await wire.ask([one, zero, two])
    assert eyes.one("SELECT last_value FROM steps") == 1
    assert await wire.ask([one, two, one]) == [[(2,)], [(3,)], [(4,)]]  # also those whose names had been left out
    assert not wire.closed


async def test_a_value_that_cannot_be_sent_leaves_nothing_behind(wire: Wire, eyes: Eyes) -> None:
    eyes.do("CREATE TABLE made (n integer)")
    with pytest.raises(psycopg.DataError):
        await send(
            wire,
            Link("", "pgqueue"),
            says("INSERT INTO made VALUES (%(n)s::integer)", n=1),
            says("SELECT %(s)s::text", s="\0"),
        )
    assert wire.closed
    assert eyes.one("SELECT count(*) FROM made") == 0


async def test_whoever_is_cancelled_leaves_a_closed_connection_so_that_no_answer_comes_to_another(wire: Wire) -> None:
    asking = asyncio.ensure_future(wire.ask([says("SELECT 'mine', pg_sleep(30)")]))
    await until(lambda: wire._waiting is not None)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert wire.closed


async def test_whoever_waits_on_a_connection_that_is_closed_hears_it_at_once(wire: Wire) -> None:
    asking = asyncio.ensure_future(wire.ask([says("SELECT pg_sleep(30)")]))
    await until(lambda: wire._waiting is not None)
    await wire.close()
    with pytest.raises(psycopg.OperationalError, match="closed before"):
        await asyncio.wait_for(asking, 5)


async def test_whoever_waits_over_a_link_that_is_cut_hears_it_at_once(wire: Wire) -> None:
    asking = asyncio.ensure_future(wire.ask([says("SELECT pg_sleep(30)")]))
    await until(lambda: wire._waiting is not None)
    hang_up(wire)
    with pytest.raises(psycopg.OperationalError):
        await asyncio.wait_for(asking, 5)
    assert wire.closed


async def test_a_session_that_is_ended_says_why(wire: Wire, eyes: Eyes) -> None:
    asking = asyncio.ensure_future(wire.ask([says("SELECT pg_sleep(30)")]))
    await until(lambda: wire._waiting is not None)
    eyes.one("SELECT pg_terminate_backend(%s)", wire.info.backend_pid)
    with pytest.raises(psycopg.errors.AdminShutdown):
        await asyncio.wait_for(asking, 30)


async def test_whoever_hears_what_makes_no_sense_asks_not_for_ever(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """libpq gives the connection up, says so once, and after that answers nothing, as often as it is asked."""
    with faults.Wire(dsn) as relay:
        wire = await connect(Link(relay.dsn, "pgqueue"), "garbled")
        real, nothing = wire._result, []

        async def counted() -> Any:
            result = await real()
            nothing.append(result is None)
            assert sum(nothing) < 100
            return result

        monkeypatch.setattr(wire, "_result", counted)
        relay.kill("garbled", answers_only=True)
        asking = asyncio.ensure_future(wire.ask([says("SELECT 1")]))
        await until(lambda: wire._waiting is not None)
        relay.say("garbled", b"\xff" * 5)
        with pytest.raises(psycopg.Error, match="lost synchronization"):
            await asyncio.wait_for(asking, 30)
        assert wire.closed


@pytest.mark.promise("F420")
async def test_a_link_that_breaks_as_the_message_ends_says_so(wire: Wire) -> None:
    """Naive: it is said that the connection is not in pipeline mode."""

    class Breaks:
        """libpq's connection, which loses its link just before the end of the message."""

        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        def pipeline_sync(self) -> None:
            real.finish()
            real.pipeline_sync()

    real = wire.pgconn
    wire.pgconn = Breaks()  # type: ignore[assignment]
    with pytest.raises(psycopg.OperationalError) as caught:
        await asyncio.wait_for(wire.ask([says("SELECT 1")]), 60)
    assert "pipeline" not in str(caught.value) and "connection" in str(caught.value)
    assert wire.closed


async def test_two_who_ask_at_once_get_each_their_own(wire: Wire) -> None:
    got = await asyncio.gather(*(wire.ask([says("SELECT %(n)s::integer", n=n)]) for n in range(50)))
    assert got == [[[(n,)]] for n in range(50)]


async def test_notifications_that_come_with_an_answer_are_heard(wire: Wire) -> None:
    heard: list[str] = []
    wire.add_notify_handler(lambda note: heard.append(note.payload))
    await wire.ask([says("LISTEN here")])
    for word in ("hello", "again"):  # it comes behind the last answer, and nothing more comes after it
        await wire.ask([says("SELECT pg_notify('here', %(said)s::text)", said=word), says("SELECT 1")])
        assert heard.pop() == word
    assert heard == []


async def test_a_session_goes_on_after_an_error_on_a_connection_of_its_own(dsn: str) -> None:
    session = Session(Link(dsn, "pgqueue"), "test")
    for n in range(3):
        with pytest.raises(psycopg.errors.DivisionByZero):
            await session.run(says("SELECT 1 / 0"))
        assert await session.run(says("SELECT %(n)s::integer", n=n)) == [[(n,)]]
    assert session.generation == 4
    await session.close()


# Notifications -------------------------------------------------------------------------------------------------------


@pytest.mark.promise("F250")
async def test_notifications_are_read_in_a_callback_of_the_loop_and_with_answers(wire: Wire, eyes: Eyes) -> None:
    heard: list[str] = []
    wire.add_notify_handler(lambda note: heard.append(note.payload))
    await wire.ask([says("LISTEN hears")])
    for number in range(20):
        with wire.hears() as broken:
            eyes.all("SELECT pg_notify('hears', %s)", f"{number} alone")
            await until(lambda number=number: f"{number} alone" in heard)  # type: ignore[misc]
        assert not broken.done()
        eyes.all("SELECT pg_notify('hears', %s)", f"{number} beside")
        assert await wire.ask([says("SELECT %(n)s::integer", n=number)]) == [[(number,)]]
        await wire.ask([says("SELECT 1")])
    assert heard == [f"{number} {how}" for number in range(20) for how in ("alone", "beside")]


@pytest.mark.promise("F250")
@pytest.mark.parametrize("how", ["ended", "hung up", "closed"])
async def test_a_connection_that_breaks_while_it_is_heard_says_so(how: str, wire: Wire, eyes: Eyes) -> None:
    with wire.hears() as broken:
        if how == "ended":
            eyes.all("SELECT pg_terminate_backend(%s)", wire.info.backend_pid)
        elif how == "hung up":
            hang_up(wire)
        else:
            await wire.close()
        with pytest.raises(psycopg.OperationalError):
            await asyncio.wait_for(broken, 10)


@pytest.mark.promise("F250")
async def test_an_error_of_what_hears_a_notification_is_raised(wire: Wire, eyes: Eyes) -> None:
    def fails(note: psycopg.Notify) -> None:
        raise ValueError(note.payload)

    wire.add_notify_handler(fails)
    await wire.ask([says("LISTEN hears")])
    with wire.hears() as broken:
        eyes.all("SELECT pg_notify('hears', 'bad')")
        with pytest.raises(ValueError, match="bad"):
            await asyncio.wait_for(broken, 10)
