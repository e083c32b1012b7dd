"""The list of promises: every row, the tests that carry it, and no row that does not exist."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import promises

PAGE = """
| row | promise | proof |
|---|---|---|
| E01 | A job is invisible | hold it |
| E02 | It is worked | measure |
"""


def test_rows_are_read_from_the_page_in_its_order() -> None:
    assert promises.rows(PAGE) == {"E01": "A job is invisible", "E02": "It is worked"}
    rows = promises.rows(promises.PAGE.read_text(encoding="utf-8"))
    assert {row[0] for row in rows} == set("TLIESF")


def test_the_report_names_the_tests_of_each_row_and_the_rows_without() -> None:
    assert promises.report(promises.rows(PAGE), {"E02": ["a.py::test_one", "b.py::test_two"]}) == [
        "E02  It is worked\n       a.py::test_one\n       b.py::test_two",
        "",
        "without a test: 1 of 2",
        "E01  A job is invisible",
    ]


def run(directory: Path, test: str, *options: str) -> subprocess.CompletedProcess[str]:
    (directory / "conftest.py").write_text('pytest_plugins = ["promises"]\n')
    (directory / "test_it.py").write_text(f"import pytest\n\n{test}\n")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        "not second and not long",
        *options,
        str(directory),
    ]
    environment = {"PYTHONPATH": str(Path(promises.__file__).parent), "PATH": ""}
    return subprocess.run(command, check=False, capture_output=True, text=True, cwd=directory, env=environment)


def test_the_option_lists_long_tests_too_and_runs_none(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  promise\n  second\n  long\n")
    marked = '@pytest.mark.long\n@pytest.mark.promise("E01")\ndef test_much():\n    raise SystemExit("run")'
    done = run(tmp_path, marked, "--promises")
    assert "test_it.py::test_much" in done.stdout
    number = len(promises.rows(promises.PAGE.read_text(encoding="utf-8")))
    assert f"without a test: {number - 1} of {number}" in done.stdout
    assert "SystemExit" not in done.stdout


def test_a_row_that_does_not_exist_stops_the_run(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  promise\n  second\n  long\n")
    done = run(tmp_path, '@pytest.mark.promise("Z99")\ndef test_it():\n    pass')
    assert done.returncode == 4
    assert "test_it.py::test_it: promises.md has no row 'Z99'" in done.stderr
