"""The code from above: imports go down the layers, files stay small, every statement says what it promises."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import pgqueue
from pgqueue.statements import sql_directory

PACKAGE = Path(__file__).parent.parent / "pgqueue"

# docs/design.md, section 10. Imports go down; within a layer they may go sideways, except between services.
LAYERS = {
    "words": "errors job headers lent kinds codec config retry checks asks outcome logs suspects watermark starts "
    "fronts claims keys signatures columns timing distribution",
    "database": "memory statements connections embedded embedded_watch loops wire sessions prepared borrowed places "
    "lending orm",
    "rows": "waiting handle enqueue unique endings settling work awork control steps choosing operate pausing grants "
    "migrations locks limits supervisors health schedules",
    "declarations": "options uniqueness lifespan tasks hooks joblog pool pulse threads runs gate aborts lost_lease "
    "timekeeper transactions iterate results settings turns lines chains passing keyed moves",
    "services": "notifier fetcher executor completer heartbeat leader scheduler rescue isolation maintenance "
    "reconciler signals progress watchdog admit sweep ticks declarer rates",
    "worker": "means meeting wiring worker",
    "supervisor": "supervisor",
    "edges": "testing pytest_plugin metrics web relay demo",
    "cli": "cli __main__",
}
ORDER = {word: depth for depth, words in enumerate(LAYERS.values()) for word in words.split()}
SERVICES = list(LAYERS).index("services")
EDGES = list(LAYERS).index("edges")
WORDS = list(LAYERS).index("words")

LONG_FILE, TOO_LONG_FILE = 300, 400  # lines

# The words do no I/O: none of them opens a connection, a socket, a process or a file.
IO_MODULES = {
    "asyncio",
    "fcntl",
    "multiprocessing",
    "psycopg",
    "psycopg_pool",
    "select",
    "socket",
    "subprocess",
    "threading",
}


def modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def word(path: Path) -> str:
    """The module's name under pgqueue; a package's modules count as the package."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[str]:
    """Every module that `path` imports, also inside functions and for types only; `pgqueue` is the package itself."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            assert node.module is not None
            if node.module == "pgqueue":
                yield from (f"pgqueue.{name.name}" if name.name in known() else "pgqueue" for name in node.names)
            else:
                yield node.module


def known() -> set[str]:
    return {word(path) for path in modules()}


def ours(path: Path) -> set[str]:
    """The words of pgqueue that `path` imports; "" for the package itself."""
    found = (name.split(".") for name in imports(path) if name.split(".")[0] == "pgqueue")
    return {parts[1] if len(parts) > 1 else "" for parts in found} - {word(path)}


def allowed(importer: str, imported: str) -> bool:
    if imported == "":  # the public names: for those who stand above all that makes them
        return ORDER[importer] >= EDGES
    if ORDER[imported] == ORDER[importer]:
        return ORDER[importer] != SERVICES
    return ORDER[imported] < ORDER[importer]


@pytest.mark.parametrize("path", modules(), ids=word)
def test_imports_go_down_and_services_do_not_know_each_other(path: Path) -> None:
    assert word(path) in ORDER, f"{path.name} has no layer: give it one here and in docs/design.md"
    assert [imported or "pgqueue" for imported in sorted(ours(path)) if not allowed(word(path), imported)] == []


def test_no_module_imports_itself_in_a_circle() -> None:
    left = {word(path): {name for name in ours(path) if name} for path in modules() if path.parent == PACKAGE}
    while free := [name for name, needs in left.items() if not needs & set(left)]:
        for name in free:
            del left[name]
    assert left == {}


@pytest.mark.parametrize("path", [path for path in modules() if ORDER.get(word(path)) == WORDS], ids=word)
def test_the_words_do_no_io(path: Path) -> None:
    assert {name.split(".")[0] for name in imports(path)} & IO_MODULES == set()


def test_the_wheel_with_the_server_is_imported_by_embedded_only() -> None:
    users = {word(path) for path in modules() if any(name.startswith("pixeltable") for name in imports(path))}
    assert users == {"embedded"}


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_file_is_too_long(path: Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    if lines > LONG_FILE:
        print(f"{path.name}: {lines} lines, look whether two things live there")
    assert lines <= TOO_LONG_FILE


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_every_module_says_what_it_is(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))


def statements() -> list[str]:
    """What stands between one blank line after a `;` and the next, with its comments."""
    sources = (file.read_text(encoding="utf-8") for file in sorted(sql_directory().glob("*.sql")))
    return [
        piece for source in sources for piece in re.split(r"(?=^-- name:)", source, flags=re.MULTILINE) if piece.strip()
    ]


@pytest.mark.parametrize("piece", statements(), ids=lambda piece: piece.split("\n", 1)[0])
def test_every_statement_has_a_name_and_a_promise(piece: str) -> None:
    code = [line for line in piece.splitlines() if line and not line.startswith("--")]
    if not code:
        return  # the head of a file
    assert re.match(r"-- name: [a-z_]+\n-- \S", piece), "begin with `-- name: words` and a line of what it promises"
    assert sum(line.rstrip().endswith(";") for line in code) <= 1, "one statement under one name"
    # A placeholder in quotes is a text that happens to look like one: silently a constant.
    assert [text for text in re.findall(r"'(?:[^']|'')*'", "\n".join(code)) if "%(" in text] == []


# The package itself --------------------------------------------------------------------------------------------------


def in_a_process(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_public_name_has_its_place_for_people_and_at_run_time() -> None:
    """Three lists: what type checkers read, what `import *` gives, and where each name comes from at its first use."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module is not None]
    typed = {name.name: node.module for node in nodes for name in node.names if str(node.module).startswith("pgqueue.")}
    assert typed == {name: f"pgqueue.{place}" for name, place in pgqueue._PLACE.items()}
    assert sorted(typed) == pgqueue.__all__ and set(typed) <= set(dir(pgqueue))
    assert all(getattr(pgqueue, name).__module__ == place for name, place in typed.items())


def test_the_package_imports_nothing_before_it_is_used() -> None:
    assert in_a_process("import pgqueue, sys; print(*[m for m in sys.modules if 'pgqueue' in m])") == "pgqueue\n"


@pytest.mark.parametrize(
    "name", sorted({path.stem for path in modules() if path.parent == PACKAGE} & set(pgqueue.__all__))
)
def test_a_name_is_no_module_although_there_is_one(name: str) -> None:
    """Whatever was imported first; and a module that has no such name is found as what it is."""
    used = f"assert callable(pgqueue.{name}); from pgqueue import {name}; assert callable({name})"
    in_a_process(f"import pgqueue.{name}; {used}")
    in_a_process(f"import pgqueue; pgqueue.{name}; import pgqueue.{name}; {used}; pgqueue.errors.Error")
    with pytest.raises(AttributeError, match="'nonsense'"):
        pgqueue.nonsense  # noqa: B018
