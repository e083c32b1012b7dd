"""What a run of pytest has left: the names of the tests that failed, and what it said of one of them.

python3 .ci/failures.py names STAGE        a line for each test that failed, as pytest takes it as an argument
python3 .ci/failures.py text STAGE TEST    the text of its failure, with what it had logged

STAGE is the run's cache directory (`-o cache_dir=STAGE`); its report is beside it (`--junitxml=STAGE.xml`).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree


def names(stage: str) -> list[str]:
    """The tests that failed, or had an error in a fixture. Empty if the run did not come so far."""
    noted = Path(stage) / "v" / "cache" / "lastfailed"
    return sorted(json.loads(noted.read_text(encoding="utf-8"))) if noted.is_file() else []


def text(stage: str, test: str) -> Iterator[str]:
    """The lines of what the run said of this test."""
    yield f"\n--- {test}\n"
    report = Path(f"{stage}.xml")
    for case in ElementTree.parse(report).iter("testcase") if report.is_file() else ():
        if (case.get("classname"), case.get("name")) == in_report(test):
            yield from (part.text for part in case if part.tag != "skipped" and part.text)


def in_report(test: str) -> tuple[str, str]:
    """Class and name by which the report has this test.

    >>> in_report("tests/web/test_pages.py::TestPage::test_it[a::b]")
    ('tests.web.test_pages.TestPage', 'test_it[a::b]')
    """
    head, bracket, parameters = test.partition("[")
    file, *inner = head.split("::")
    return ".".join([file.removesuffix(".py").replace("/", "."), *inner[:-1]]), inner[-1] + bracket + parameters


if __name__ == "__main__":
    action, *arguments = sys.argv[1:]
    for line in {"names": names, "text": text}[action](*arguments):
        print(line)
