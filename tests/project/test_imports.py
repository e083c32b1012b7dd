"""Nothing is executed from the database: whatever a row names, the worker imports nothing and calls nothing for it.

A real `pgqueue work`, beside whose tasks there are modules that leave a mark when they are imported or called.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import working
from workers import Eyes, wait_until

MARKS = "import pathlib\npathlib.Path(__file__).with_suffix('.{0}').touch()\n"
TASKS = """
import pathlib, sys
from typing import Any
import pgqueue

def undeclared(**anything: Any) -> None:
    pathlib.Path(__file__).with_suffix(".called").touch()

class Undeclared:
    def __init__(self, **anything: Any) -> None:
        undeclared()

@pgqueue.task(name="shop.echo")
def echo(value: Any, **more: Any) -> Any:
    assert type(value) in (dict, list, str), type(value)
    return [value, more]

@pgqueue.task(name="shop.modules")
def modules() -> list[str]:
    return sorted(sys.modules)
"""
SECRET = f"""
{MARKS.format("imported")}
def fn(**anything):
    {MARKS.format("called").splitlines()[1]}
def __getattr__(name):
    return fn
"""
MODULES = ["shop_secret", "shop_deep", "shop_deep.secret"]  # what lies beside the tasks, and nobody imports
NAMES = [
    *MODULES,
    *(f"{module}{between}{name}" for module in MODULES for between in ".:/" for name in ("fn", "echo", "__init__")),
    *("shop.undeclared", "shop:undeclared", "shop.Undeclared", "undeclared", "__main__.undeclared"),
    *("os.system", "os:system", "posix.system", "subprocess.run", "builtins.eval", "builtins.exec", "eval", "exec"),
    *("pgqueue.cli.main", "pgqueue.migrate", "importlib.import_module", "echo", "shop.echo.fn", "shop.echo.__call__"),
    *("__import__('shop_secret')", "__import__('os').system('touch called')", "lambda: undeclared()", "{undeclared()}"),
    *("shop_secret.fn()", "import shop_secret", "../shop_secret.py", "shop_secret.py", "!!python/name:shop_secret.fn"),
]
ARGS = {
    "value": {"__class__": "shop_secret.fn", "__module__": "shop_secret", "__reduce__": ["shop_secret.fn", []]},
    "py/object": "shop.Undeclared",
    "py/reduce": [{"py/function": "shop_secret.fn"}, []],
    "$type": "shop_secret.fn",
    "__init__": {"command": "touch called", "name": "shop_secret"},
    "!!python/object/apply:shop_secret.fn": [],
}
# What the functions that are named would like to be called with, if they were.
CALLS = {"command": "touch called", "source": "open('called', 'w')", "name": "shop_secret", "args": ["touch", "called"]}


@pytest.fixture
def app(tmp_path: Path) -> Path:
    (tmp_path / "shop.py").write_text(TASKS)
    (tmp_path / "shop_secret.py").write_text(SECRET)
    (tmp_path / "shop_deep").mkdir()
    for name in ("__init__", "secret"):
        (tmp_path / "shop_deep" / f"{name}.py").write_text(SECRET)
    return tmp_path


def marks(app: Path) -> list[str]:
    """What was imported or called, by the marks it left."""
    return [str(path.relative_to(app)) for path in app.rglob("*") if "imported" in path.name or "called" in path.name]


@pytest.fixture
def rows(dsn: str, app: Path, eyes: Eyes) -> Iterator[Eyes]:
    """The rows, and a worker that has worked what it can of them."""
    insert = "INSERT INTO pgqueue.job (task, args, headers) VALUES (%s, %s, %s)"
    headers = json.dumps({"task": "shop_secret.fn", "__class__": "shop_secret.fn", "traceparent": "shop.undeclared"})
    for name in NAMES:
        eyes.do(insert, name, json.dumps(CALLS), headers)
    eyes.do(insert, "shop.echo", json.dumps(ARGS), headers)
    with working("shop", "--app-dir", str(app), dsn=dsn, cwd=app):
        known = "SELECT FROM pgqueue.job WHERE task = 'shop.echo' AND state IN ('available', 'running')"
        wait_until(lambda: not eyes.all(known))
        asked = eyes.one("INSERT INTO pgqueue.job (task) VALUES ('shop.modules') RETURNING id")
        eyes.do("SELECT pg_notify('pgqueue.default', '')")
        wait_until(eyes.is_in(asked, "completed"))
        yield eyes


@pytest.mark.promise("F19", "F18")
def test_a_row_that_names_a_function_or_a_module_is_an_unknown_task_and_nothing_is_imported(
    rows: Eyes, app: Path
) -> None:
    found: list[tuple[Any, ...]] = rows.all(
        "SELECT task, attempt FROM pgqueue.job_available WHERE task <> 'shop.echo' ORDER BY id"
    )
    assert found == [(name, 0) for name in NAMES]
    imported = set(rows.one("SELECT result FROM pgqueue.job WHERE task = 'shop.modules'"))
    assert (imported & {"shop", *MODULES}, marks(app)) == ({"shop"}, [])


@pytest.mark.promise("F19")
def test_arguments_that_name_a_class_are_only_data(rows: Eyes, app: Path) -> None:
    more = {key: value for key, value in ARGS.items() if key != "value"}
    assert rows.all("SELECT result, attempt FROM pgqueue.job WHERE task = 'shop.echo'") == [([ARGS["value"], more], 1)]
    assert marks(app) == []
