"""No line of a log quotes a row: what PostgreSQL says in an error's detail may be a job's arguments.

`described` and `without_values` (database/backoff.py) leave the detail out. So an error that may be the server's is
given to a log through one of them. An error of another kind may stand there as it is.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

CODE = Path(__file__).parents[2] / "pgqueue"
LEVELS = {"debug", "info", "warning", "error", "critical", "exception", "log"}
OTHERS = {"ValueError", "OSError", "msgspec.DecodeError", "InvalidArguments"}
"""What no server raises."""


def quoted(code: str) -> Iterator[int]:
    """The lines of calls that give an error of the server to a log as it is."""
    for function in ast.walk(ast.parse(code)):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            errors = set(_errors(function))
            for call in ast.walk(function):
                given = call.args if isinstance(call, ast.Call) and _logs(call) else []
                if any(isinstance(each, ast.Name) and each.id in errors for each in given):
                    yield given[0].lineno


def _logs(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and call.func.attr in LEVELS


def _errors(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    for each in ast.walk(function):
        if isinstance(each, ast.ExceptHandler) and each.name and each.type is not None:
            if ast.unparse(each.type) not in OTHERS:
                yield each.name
        elif isinstance(each, ast.arg) and each.annotation is not None:
            kind = ast.unparse(each.annotation)
            if "Error" in kind or "Exception" in kind:
                yield each.arg


@pytest.mark.promise("F133")
def test_no_error_of_the_server_is_logged_as_it_is() -> None:
    found = [f"{path.relative_to(CODE)}:{line}" for path in CODE.rglob("*.py") for line in quoted(path.read_text())]
    assert found == []


@pytest.mark.parametrize(
    ("handler", "argument", "found"),
    [
        ("psycopg.Error", "error", [5]),
        ("Exception", "error", [5]),
        ("Exception", "described(error)", []),
        ("ValueError", "error", []),
    ],
)
def test_the_rule_finds_what_it_forbids(handler: str, argument: str, found: list[int]) -> None:
    code = f"def f():\n    try:\n        g()\n    except {handler} as error:\n        log.error('%s', {argument})\n"
    assert list(quoted(code)) == found
    assert list(quoted("def f(error: BaseException):\n    log.warning('%s', error)\n")) == [2]
