"""mypy and pyright accept the good lines of `typing_cases.py` and reject every bad one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CASES = Path(__file__).with_name("typing_cases.py")
MARK = "  # type: ignore"
PYRIGHT = {"pythonVersion": "3.11", "typeCheckingMode": "strict", "reportMissingModuleSource": False}


def mypy(file: Path) -> set[int]:
    """The lines of `file` mypy complains about, with the project's own settings."""
    command = [sys.executable, "-m", "mypy", "--output", "json", "--config-file", "pyproject.toml", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {each["line"] for each in found if Path(each["file"]).name == file.name and each["severity"] == "error"}


def pyright(file: Path) -> set[int]:
    """The lines of `file` pyright complains about, in its strict mode."""
    settings = file.with_name("pyrightconfig.json")
    settings.write_text(json.dumps(PYRIGHT | {"include": [file.name], "extraPaths": [str(ROOT)]}))
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, "-p", str(settings)]
    done = subprocess.run(command, cwd=file.parent, capture_output=True, text=True, check=False)
    if not done.stdout.startswith("{"):
        pytest.skip(f"pyright does not start here: {done.stdout[-200:]}{done.stderr[-200:]}")
    found = json.loads(done.stdout)["generalDiagnostics"]
    return {each["range"]["start"]["line"] + 1 for each in found if each["severity"] == "error"}


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
