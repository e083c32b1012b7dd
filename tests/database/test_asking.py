"""A question is written once: its twin on async connections has its name, its docstring and its parameters."""

from __future__ import annotations

import ast
import inspect
import pydoc
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, get_type_hints

import psycopg
import pytest

import pgqueue
from pgqueue.admin.depth import QueueInfo
from pgqueue.database.asking import asks, changes_jobs, named, said, twin
from pgqueue.database.statements import Statement
from pgqueue.database.steps import NOTES, Steps
from pgqueue.errors import InvalidOption, UnsupportedConnection

ROOT = Path(__file__).parents[2]


def twins() -> dict[tuple[str, str], tuple[str, str]]:
    """By module and name of each twin in the package: the name that it is made of, and the text that stands below it,
    which editors show."""
    found = {}
    for path in sorted((ROOT / "pgqueue").rglob("*.py")):
        if " = twin(" not in (source := path.read_text(encoding="utf-8")):
            continue  # most of them, and to parse all takes half a second
        body = ast.parse(source).body
        for made, below in zip(body, [*body[1:], ast.Pass()], strict=True):
            match made:
                case ast.Assign([ast.Name(name)], ast.Call(ast.Name("twin"), [ast.Name(source)])):
                    module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
                    found[module, name] = (source, ast.unparse(below))
    return found


TWINS = twins()


def described(function: Callable[..., Any]) -> tuple[list[inspect.Parameter], Any]:
    signature = inspect.signature(function)
    return list(signature.parameters.values()), signature.return_annotation


@pytest.mark.parametrize(("module", "name"), TWINS, ids=[f"{module}.{name}" for module, name in TWINS])
def test_a_twin_has_the_name_the_docstring_and_the_parameters_of_its_sync_function(module: str, name: str) -> None:
    """`help` shows them, and so do editors: the line, and what stands below it."""
    source, below = TWINS[module, name]
    on, on_async = getattr(import_module(module), source), getattr(import_module(module), name)
    assert (name, on.__name__, on_async.__name__, on_async.__qualname__) == (f"a{source}", source, name, name)
    assert (on.__module__, on_async.__module__) == (module, module)
    first, _, rest = inspect.getdoc(on_async).partition("\n\n")  # type: ignore[union-attr]
    assert first == f"`{source}` for async connections." == ast.literal_eval(below)
    assert rest == inspect.getdoc(on)
    assert described(on_async) == described(on)
    assert described(on)[0][0].name == "conn"
    assert (inspect.iscoroutinefunction(on), inspect.iscoroutinefunction(on_async)) == (False, True)


def test_every_public_pair_is_a_twin_or_written_for_a_reason() -> None:
    """Those that are written twice: they take a task's own parameters, open connections, or wait."""
    pairs = {name for name in pgqueue.__all__ if f"a{name}" in pgqueue.__all__}
    made = {source for source, _ in TWINS.values()}
    assert pairs - made == WRITTEN


WRITTEN = {"connect", "enqueue", "enqueue_many", "migrate", "result", "stack"}


@pytest.mark.parametrize(
    ("function", "shown"),
    [
        (pgqueue.queues, "queues(conn: 'object') -> 'list[QueueInfo]'\n    Return every queue"),
        (pgqueue.aqueues, "async aqueues(conn: 'object') -> 'list[QueueInfo]'\n    `queues` for async connections."),
    ],
    ids=["sync", "async"],
)
def test_help_shows_the_answer_and_not_how_it_is_asked_for(function: Callable[..., Any], shown: str) -> None:
    text = pydoc.plain(pydoc.render_doc(function)).partition("\n\n")[2]
    assert text.replace("'", "").startswith(shown.replace("'", ""))
    assert get_type_hints(function) == {"conn": object, "return": list[QueueInfo]}


# What is asked -------------------------------------------------------------------------------------------------------


@asks
def number(conn: object, n: int, *, plus: int = 0) -> Statement[int]:
    """The number."""
    return Statement("SELECT %(n)s::integer + %(plus)s::integer", {"n": n, "plus": plus}, lambda rows: int(rows[0][0]))


@asks
def both(conn: object, n: int) -> Steps[tuple[int, int]]:
    """Two answers, each as its statement reads it."""
    question = Statement("SELECT %(n)s::integer", {"n": n}, lambda rows: int(rows[0][0]))
    return (yield question), (yield question)


anumber, aboth = twin(number), twin(both)


async def test_a_statement_and_steps_are_asked_on_both_kinds_of_connections(unchanged_dsn: str) -> None:
    with psycopg.connect(unchanged_dsn) as conn:
        assert (number(conn, 1, plus=2), number(n=5, conn=conn), both(conn, 7)) == (3, 5, (7, 7))
        with pytest.raises(UnsupportedConnection, match="is not async"):
            await anumber(conn, 1)
    async with await psycopg.AsyncConnection.connect(unchanged_dsn) as aconn:
        assert (await anumber(aconn, 1, plus=2), await anumber(n=5, conn=aconn), await aboth(aconn, 7)) == (
            3,
            5,
            (7, 7),
        )
        with pytest.raises(UnsupportedConnection, match="is async"):
            number(aconn, 1)


async def test_a_misspelt_keyword_is_answered_by_the_name_that_was_called(conn: psycopg.Connection) -> None:
    with pytest.raises(InvalidOption, match=r"^number: no option pluss \(did you mean plus\?\); there are n, plus$"):
        number(conn, 1, pluss=2)  # type: ignore[call-arg]
    with pytest.raises(InvalidOption, match=r"^anumber: no option pluss \(did you mean plus\?\); there are n, plus$"):
        await anumber(conn, 1, pluss=2)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"number\(\) missing 1 required positional argument: 'n'"):
        number(conn)  # type: ignore[call-arg]


def refused(conn: object) -> Steps[None]:
    """What the server refuses, as it refuses a change of a job that has moved."""
    yield Statement("DO $$ BEGIN RAISE 'refused' USING ERRCODE = '40001'; END $$", {}, lambda rows: None)


def test_only_a_change_of_jobs_is_told_what_a_refusal_means_for_jobs(unchanged_dsn: str) -> None:
    for function, notes in ((asks(refused), []), (changes_jobs(refused), [f"pgqueue: {NOTES['40001']}"])):
        with psycopg.connect(unchanged_dsn) as conn, pytest.raises(psycopg.errors.SerializationFailure) as error:
            function(conn)
        assert getattr(error.value, "__notes__", []) == notes


def test_a_named_statement_is_that_of_the_configured_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGQUEUE_SCHEMA", "jobs")
    statement = named("limits_list")
    assert "jobs.key_limit" in statement.sql and statement.read([(1,)]) == [(1,)]
    assert named("queues_pause", bool, name="mail", actor=None).params == {"name": "mail", "actor": None}
    assert said("limits_list", list[int]).read([("[1, 2]",)]) == [1, 2]


def test_what_says_no_answer_is_refused() -> None:
    def wrong(conn: object) -> int:
        return 1

    with pytest.raises(AssertionError, match="wrong says no answer: int"):
        asks(wrong)  # type: ignore[arg-type]
