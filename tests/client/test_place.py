"""A name is declared once in each execution of a module, and again when the module is executed again."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import pgqueue
from pgqueue.client import lifespan, middleware
from pgqueue.client.tasks import find
from pgqueue.errors import InvalidOption

Write = Callable[..., str]

AUDITED = """
    import pgqueue
    def audited(fn):
        def wrapper(*args, **kwargs):
            return fn(*args, **kwargs)
        return wrapper
"""
TWO = {
    "a decorator without functools.wraps": AUDITED
    + """
    @pgqueue.task
    @audited
    def charge(customer: int) -> None: ...
    @pgqueue.task
    @audited
    def remind(customer: int) -> None: ...
""",
    "a second function of the same name": """
    import pgqueue
    @pgqueue.task
    def notify(user: int) -> None: ...
    @pgqueue.task
    def notify(order: int) -> None: ...
""",
    "a factory that is called twice": """
    import pgqueue
    def syncer(shop):
        @pgqueue.task(name="sync")
        def sync() -> str:
            return shop
        return sync
    a, b = syncer("north"), syncer("south")
""",
    "a factory in a loop": """
    import pgqueue
    def syncer(shop):
        @pgqueue.task(name="sync")
        def sync() -> str:
            return shop
    for shop in ("north", "south"):
        syncer(shop)
""",
    "a factory in a comprehension": """
    import pgqueue
    def syncer(shop):
        @pgqueue.task(name="sync")
        def sync() -> str:
            return shop
    [syncer(shop) for shop in ("north", "south")]
""",
    "a class body": """
    import pgqueue
    class Tasks:
        @pgqueue.task(name="sync")
        def north() -> None: ...
        @pgqueue.task(name="sync")
        def south() -> None: ...
""",
    "an alias": """
    import pgqueue
    @pgqueue.task(aliases=["place_tasks.old"])
    def new() -> None: ...
    @pgqueue.task
    def old() -> None: ...
""",
}


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Writes a module and answers its name. It can be imported, and is forgotten at the end."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    for owner, name in ((middleware, "_on_start"), (middleware, "_middleware"), (lifespan, "_declared")):
        monkeypatch.setattr(owner, name, [])
    made: list[str] = []

    def write(source: str, name: str = "place_tasks") -> str:
        (tmp_path / f"{name}.py").write_text("if True:" + source)  # the sources are indented
        importlib.invalidate_caches()
        made.append(name)
        return name

    yield write
    for name in made:
        sys.modules.pop(name, None)


def imported(name: str) -> ModuleType:
    return importlib.import_module(name)


@pytest.mark.promise("F220")
@pytest.mark.parametrize("source", TWO.values(), ids=TWO)
def test_two_tasks_of_one_name_are_an_error(write: Write, source: str) -> None:
    name = write(source)
    for _ in range(2):  # an import that has failed is tried again, and fails for the same reason
        with pytest.raises(
            InvalidOption, match=r"is taken by place_tasks\..* \(.*py:\d+\), so place_tasks\..* \(.*py:"
        ):
            imported(name)


@pytest.mark.promise("F220")
def test_the_error_says_what_a_decorator_lacks(write: Write) -> None:
    with pytest.raises(InvalidOption, match=r"functools\.wraps gives all its functions one name: add it"):
        imported(write(TWO["a decorator without functools.wraps"]))


ONE = """
    import pgqueue
    def syncer(shop):
        @pgqueue.task(name="sync")
        def sync() -> str:
            return shop
        return sync
    [a] = [syncer(shop) for shop in ("north",)]
"""


@pytest.mark.promise("F220")
def test_a_module_may_be_reloaded_also_if_its_lines_have_moved(write: Write) -> None:
    module = imported(write(ONE))
    for _ in range(2):
        importlib.reload(module)
    write("\n" + ONE.replace("north", "south"))
    importlib.reload(module)
    sync = find("sync")
    assert sync is module.a and sync() == "south"


@pytest.mark.promise("F220")
def test_an_import_that_has_failed_may_be_tried_again(write: Write) -> None:
    name = write(ONE + "\n    raise OSError('the network is away')\n")
    for _ in range(2):
        with pytest.raises(OSError, match="away"):
            imported(name)
    write(ONE)
    assert imported(name).a is find("sync")


@pytest.mark.promise("F220")
def test_a_file_may_be_imported_under_two_names(write: Write, tmp_path: Path) -> None:
    write(ONE)
    write("\n    import place_tasks\n" + ONE, "place_app")
    with pytest.raises(InvalidOption, match=r"taken by place_tasks.*place_tasks\.py.*place_app\.py"):
        imported("place_app")  # another file is another task
    write(
        ONE.replace("[a] =", "import sys\n    if __name__ == '__main__':\n        import place_main\n    [a] ="),
        "place_main",
    )
    for command in (["place_main.py"], ["-m", "place_main"], [str(tmp_path / "place_main.py")]):
        done = subprocess.run([sys.executable, *command], cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr


@pytest.mark.promise("F220")
def test_at_a_prompt_and_in_a_test_a_name_may_be_declared_again() -> None:
    prompt: dict[str, Any] = {"__name__": "place_prompt"}
    source = "import pgqueue\n@pgqueue.task(name='typed')\ndef typed(): return {}\n"
    for n in (1, 2):
        exec(source.format(n), prompt)
        typed = find("typed")
        assert typed is not None and typed() == n

    def create_app() -> pgqueue.Task[[], None]:
        @pgqueue.task(name="place.of.app")
        def ours() -> None: ...

        return ours

    assert create_app() is not create_app()


HOOKS = """
    import pgqueue
    calls = []
    def counter(name):
        @pgqueue.on_start
        def count(job): calls.append(name)
        @pgqueue.middleware
        def around(job, call):
            calls.append(name)
            return call()
    counter("statsd"), counter("audit")
"""


@pytest.mark.promise("F220")
def test_hooks_of_a_factory_are_all_kept_also_after_a_reload(write: Write) -> None:
    module = imported(write(HOOKS))
    for _ in range(2):
        hooks = middleware.declared()
        for hook in hooks.on_start:
            hook(None)  # type: ignore[arg-type]
        assert module.calls == ["statsd", "audit"]
        assert len(hooks.middleware) == 2
        module = importlib.reload(module)


@pytest.mark.promise("F220")
def test_two_lifespans_of_one_name_are_an_error(write: Write) -> None:
    source = """
    import pgqueue
    @pgqueue.lifespan
    async def resources():
        yield
"""
    importlib.reload(imported(write(source)))
    second = source.partition("import pgqueue")[2]
    with pytest.raises(InvalidOption, match=r"place_tasks\.resources is declared already \(.*place_tasks\.py:\d"):
        imported(write(source + second, "place_two"))
    lifespan._declared.clear()
    with pytest.raises(InvalidOption, match=r"place_two\.resources is declared already \(.*place_two\.py:3"):
        imported("place_two")
