"""Whatever rows the server refuses: every other one is moved, each refused one is named, by few statements."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from math import ceil, inf, log
from typing import Any

import psycopg
import pytest

from pgqueue.database.statements import Row, Statement
from pgqueue.worker.left_alone import LeftAlone, Notice
from pgqueue.worker.mover import FEWER, REFUSED_MOST, Mover

UNFIT = Statement("unfit", {}, list[Row])


class Server:
    """Rows in order, of which it refuses some; those that fit nowhere it can fail. Plays the session of a mover."""

    def __init__(self, rows: int, refused: set[int], unfit: set[int]) -> None:
        self.rows, self.refused, self.unfit = list(range(rows)), refused, unfit
        self.moved: list[int] = []
        self.sent = 0

    async def run(self, statement: Statement[Any]) -> list[Any]:
        self.sent += 1
        passed = set(map(int, filter(None, str(statement.params.get("passed", "{}")).strip("{}").split(","))))
        there = [row for row in self.rows if row not in passed]
        if statement.sql == "first":
            return [[(row, "t") for row in there[:1]]]
        if statement.sql == "unfit":
            failed, self.unfit = self.unfit & set(self.rows), set()
            self.rows = [row for row in self.rows if row not in failed]
            return [[(row,) for row in sorted(failed)]]
        n = statement.params["n"]
        assert isinstance(n, int)
        self.take(there[:n])
        return [[(len(there[:n]), 0)]]

    def take(self, rows: Sequence[int]) -> None:
        if not self.refused.isdisjoint(rows) or not self.unfit.isdisjoint(rows):
            raise psycopg.errors.CheckViolation
        self.moved += rows
        self.rows = [row for row in self.rows if row not in rows]


def moves(n: int, passed: str) -> list[Statement[Any]]:
    return [Statement("moves", {"n": n, "passed": passed}, list)]


def first(passed: str) -> Statement[list[Row]]:
    return Statement("first", {"passed": passed}, list)


def dealt(seed: int, most: int) -> Server:
    """A server with rows as this seed deals them: none are refused, a few, many or all."""
    chance = random.Random(seed)
    rows = chance.randint(1, 2 * most)
    share = chance.choice([0.0, 0.01, 0.1, 0.5, 1.0])
    refused = {row for row in range(rows) if chance.random() < share}
    unfit = {row for row in range(rows) if chance.random() < share / 4} - refused
    return Server(rows, refused, unfit)


def made(server: Server) -> Mover:
    session: Any = server
    return Mover(session, notify=False, unfit=lambda: UNFIT)


def notice() -> Notice:
    return Notice("cannot be moved", seconds=0.0)


def named(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage().split(" cannot")[0] for record in caplog.records if "cannot be" in record.getMessage()]


async def walked(server: Server, mover: Mover, left: LeftAlone[int], most: int) -> int:
    """Walk until the mover does not rest; answer how often it has."""
    for rests in range(30):
        async for [[(count, _)]] in mover.walk(most, left, moves, first):
            assert count <= most
        if not mover.rested:
            return rests
    raise AssertionError(f"it rests for ever: {server.rows} stay")


@pytest.mark.promise("F133")
@pytest.mark.parametrize("most", [1, 10, 200])
async def test_a_walk_moves_every_row_that_is_not_refused_and_names_the_others(
    most: int, caplog: pytest.LogCaptureFixture
) -> None:
    for seed in range(10):
        caplog.clear()
        server = dealt(seed, most)
        rows, refused, unfit = set(server.rows), server.refused, server.unfit
        rests = await walked(server, made(server), LeftAlone(notice(), seconds=inf), most)
        assert sorted(server.moved) == sorted(rows - refused - unfit)
        assert server.rows == sorted(refused), "and no row is lost"
        assert named(caplog) == [f"job {row} (t)" for row in sorted(refused)]
        assert rests == len(refused) // REFUSED_MOST
        # For each refused row: as many refusals as the batch is divided, each with a look for what fits nowhere, and
        # behind a batch of smaller ones that are moved; the question which row it is; and batches that grow again.
        steps = ceil(log(most, FEWER)) if most > 1 else 0
        once = 2 * (steps + 1) + 2 * FEWER * steps + 1 + steps
        assert server.sent <= len(rows) / most + 1 + once * (len(refused) + bool(unfit) + rests)


@pytest.mark.promise("F133")
@pytest.mark.parametrize("rows", [1, 2, 64, 200])
async def test_rows_that_we_hold_are_divided_until_each_refused_one_is_alone(rows: int) -> None:
    for seed in range(10):
        server = dealt(seed, rows)
        held = list(server.rows)[:rows]
        alone: list[int] = []

        async def move(part: Sequence[int], server: Server = server) -> None:
            server.sent += 1
            server.take([row for row in part if row in server.rows])

        async def refused(row: int, error: psycopg.Error, alone: list[int] = alone) -> None:
            assert isinstance(error, psycopg.errors.CheckViolation)
            alone.append(row)

        unfit = server.unfit
        try:
            await move(held)
        except psycopg.Error as error:
            await made(server).divide(error, held, move, refused)
        assert alone == [row for row in held if row in server.refused]
        assert server.moved == [row for row in held if row not in server.refused | unfit], "in order, each once"
        steps = 2 * 2 * ceil(log(rows, 2)) if rows > 1 else 2
        assert server.sent <= 4 + (len(alone) + bool(unfit) + 1) * (steps + 2)


@pytest.mark.promise("F226")
async def test_a_walk_that_takes_too_long_goes_on_with_fewer_rows(caplog: pytest.LogCaptureFixture) -> None:
    """The server cancels a statement that moves more than 30 rows, and each one that moves row 70."""
    server = Server(200, set(), set())
    take = server.take

    def slowly(rows: Sequence[int]) -> None:
        if len(rows) > 30 or 70 in rows:
            raise psycopg.errors.QueryCanceled
        take(rows)

    server.take = slowly  # type: ignore[method-assign]
    await walked(server, made(server), LeftAlone(notice(), seconds=inf), 200)
    assert server.rows == [70]
    assert server.moved == [row for row in range(200) if row != 70]
    assert named(caplog) == ["job 70 (t)"]


async def test_after_some_refusals_the_parts_are_not_divided_any_more() -> None:
    server = Server(1_000, set(range(1_000)), set())
    alone: list[int] = []

    async def move(part: Sequence[int]) -> None:
        server.sent += 1
        server.take(part)

    async def refused(row: int, error: psycopg.Error) -> None:
        alone.append(row)

    await made(server).divide(psycopg.errors.CheckViolation(), server.rows, move, refused, most=REFUSED_MOST)
    assert alone == list(range(len(alone))) and 0 <= len(alone) - REFUSED_MOST <= 1
    assert server.sent < 150 and server.moved == []


async def test_an_error_that_is_about_no_row_is_raised() -> None:
    class Away(Server):
        def take(self, rows: Sequence[int]) -> None:
            raise psycopg.errors.AdminShutdown

    server = Away(3, set(), set())
    with pytest.raises(psycopg.errors.AdminShutdown):
        await walked(server, made(server), LeftAlone(notice(), seconds=inf), 2)
    assert server.sent == 1


# The naive versions --------------------------------------------------------------------------------------------------


async def gives_up(server: Server, most: int) -> None:
    """Ends with the first refusal."""
    try:
        while server.rows:
            server.take(server.rows[:most])
    except psycopg.Error:
        return


async def leaves_none_alone(server: Server, most: int) -> None:
    """Makes the batches smaller, and tries the row that is refused by itself again at once."""
    await walked(server, made(server), LeftAlone(notice(), seconds=0.0), most)


async def leaves_all_alone(server: Server, most: int) -> None:
    """Passes over the batch that was refused as a whole."""
    for place in range(0, len(server.rows), most):
        try:
            server.take(range(place, min(place + most, len(server.rows))))
        except psycopg.Error:
            continue


@pytest.mark.parametrize("naive", [gives_up, leaves_none_alone, leaves_all_alone])
async def test_a_naive_version_strands_rows(naive: Callable[[Server, int], Any]) -> None:
    server = Server(100, {50}, set())
    try:
        await naive(server, 10)
    except AssertionError as error:
        assert "it rests for ever" in str(error)
    assert set(server.rows) - {50}


# What is left alone --------------------------------------------------------------------------------------------------


def test_a_row_is_left_alone_for_its_time_and_longer_beside_others(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("pgqueue.worker.left_alone.monotonic", lambda: now[0])
    left = LeftAlone[str](notice(), seconds=3.0, each=2.0)
    assert not left.over() and not left.rows() and left.next() == inf
    for row in "ab":
        left.leave(row, row, ValueError("no"))
    left.leave("c", "c", ValueError("no"), seconds=1.0)
    assert [left.until(row) for row in "abcd"] == [103.0, 105.0, 101.0, -inf] and left.next() == 101.0
    now[0] = 101.0
    assert set(left.rows()) == {"a", "b"}
    assert left.over() and not left.over(), "although the rows were asked for before"
    now[0] = 104.0
    assert left.over() and not left.over() and set(left.rows()) == {"b"}
    now[0] = 105.0
    left.leave("e", "e", ValueError("no"))
    assert left.until("b") == -inf, "it is forgotten, although nothing was asked"
    assert left.over()


def test_one_line_in_so_many_seconds_stands_for_all(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [100.0]
    monkeypatch.setattr("pgqueue.worker.left_alone.monotonic", lambda: now[0])
    says = Notice("cannot be moved", seconds=10.0)
    with caplog.at_level(logging.ERROR):
        for at in (100.0, 105.0, 109.9, 110.0):
            now[0] = at
            says.say(f"job {at}", ValueError("no"))
    assert [record.getMessage() for record in caplog.records] == [
        f"job {at} cannot be moved: no. It is tried again; so are others like it" for at in (100.0, 110.0)
    ]
