"""`.ci/run` on small trees of its own: which failures it runs again, what it calls red, and that it runs everything."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CI = Path(__file__).parents[2] / ".ci"
README = """
$ python3 -m venv --help > /dev/null
$ python3 -m venv --help > /dev/null && .venv/bin/pytest -n 2
"""
INI = """
[pytest]
addopts = -q -m "not second"
markers =
    second: of the second stage
"""
HEAD = """
import os, pathlib, pytest

def first(name):
    '''Whether this is the first call with this name, in whichever process.'''
    try:
        os.close(os.open(f"{os.environ['SEEN']}/{name}", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True

def test_fine(): ...

@pytest.mark.second
def test_fine_and_long(): ...
"""
FLAKY = """
def test_flaky():
    print("said before")
    assert not first("flaky"), "a race"
"""
FIXTURE = """
@pytest.fixture
def odd():
    assert not first("fixture"), "no server"

@pytest.mark.parametrize("name", ["it's [here], quoted"])
def test_with_a_fixture(odd, name): ...
"""
CRASH = """
@pytest.mark.second
def test_that_ends_its_process():
    if first("crash"):
        os._exit(7)
"""
RED = """
def test_red():
    assert False

def test_skipped_the_second_time():
    if first("skipped"):
        assert False
    pytest.skip("not now")
"""
FOUR = "@pytest.mark.parametrize('n', range(4))\ndef test_four(n):\n    assert not first(f'four{n}')\n"
ELEVEN = "@pytest.mark.parametrize('n', range(11))\ndef test_eleven(n):\n    assert not first(f'eleven{n}')\n"
BROKEN = "def broken(:\n"


def gate(tree: Path, tests: str, *, processes: bool) -> tuple[int, str]:
    """The exit code of `.ci/run` in a tree with these tests, and what it printed. `processes`: the stages run them in
    processes of their own. Without, it is much faster."""
    made = {"README.md": README, "pytest.ini": INI, "tests/test_it.py": HEAD + tests}
    # Only the plugin that `-n` is of: with all that are installed here, each process starts much later.
    last = "" if processes else " -n 0"
    pytest_alone = f'exec env PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 {sys.executable} -m pytest -p xdist "$@"{last}'
    programs = {"pytest": pytest_alone, "ruff": "exit 0", "mypy": "exit 0"}
    made |= {f".venv/bin/{name}": f"#!/bin/sh\n{line}\n" for name, line in programs.items()}
    made |= {f"bin/{name}": "#!/bin/sh\n" for name in ("chromium", "promtool", "apt-get")}
    made |= {f".ci/{file.name}": file.read_text() for file in CI.iterdir() if file.is_file()}
    for name, text in made.items():
        file = tree / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(0o755)
    (tree / "seen").mkdir()
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "PGQUEUE_"))}
    environment |= {"SEEN": str(tree / "seen"), "PATH": f"{tree}/bin:{os.environ['PATH']}"}
    command = ["bash", str(tree / ".ci/run")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, cwd=tree)
    return done.returncode, done.stdout


@pytest.mark.second
def test_tests_that_pass_when_run_again_are_unsteady_and_named_above_the_closing_lines(tmp_path: Path) -> None:
    code, said = gate(tmp_path, FLAKY + FIXTURE + CRASH, processes=True)
    end = said[said.index("3 unsteady") :]
    assert code == 0 and "red:" not in said
    for shown in ("::test_flaky", "a race", "said before", "::test_with_a_fixture[it's [here], quoted]", "no server"):
        assert shown in end
    assert "::test_that_ends_its_process" in end
    everyday, second = end.splitlines()[-2:]
    assert "1 failed, 1 passed" in everyday and "1 error" in everyday and "1 failed, 1 passed" in second


@pytest.mark.second
@pytest.mark.parametrize(
    ("tests", "named"),
    [
        (
            RED + FOUR,
            [
                "tests/test_it.py::test_red",
                "tests/test_it.py::test_skipped_the_second_time",
                "4 tests are unsteady, at most 3 may be",
            ],
        ),
        (ELEVEN, ["everyday: 11 tests failed, so none was run again", "tests/test_it.py::test_eleven[10]"]),
        (BROKEN, ["tests/test_it.py"]),
    ],
    ids=["failed or skipped again, four unsteady", "eleven failed", "no collection"],
)
def test_what_is_red_ends_nothing_and_is_named(tests: str, named: list[str], tmp_path: Path) -> None:
    code, said = gate(tmp_path, tests, processes=tests == BROKEN)  # there pytest ends in another way
    assert code == 1
    listed = said[said.index("\nred:\n") :].splitlines()
    assert [line for line in named if not any(each.strip().startswith(line) for each in listed)] == [], said
    assert "$ .venv/bin/pytest -n 3 -m second" in said, "the second stage runs whatever came before"
    assert " in " in listed[-1] and " in " in listed[-2], "the closing lines stay the last"


def test_without_its_two_commands_it_runs_nothing(tmp_path: Path) -> None:
    (tmp_path / ".ci").mkdir()
    (tmp_path / ".ci/run").write_text((CI / "run").read_text())
    (tmp_path / "README.md").write_text("no command\n")
    done = subprocess.run(["bash", str(tmp_path / ".ci/run")], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "") and "must have two commands" in done.stderr
