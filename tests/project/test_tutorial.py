"""What the tutorial starts and leaves running: the dashboard, and a supervisor that is given new code."""

from __future__ import annotations

import shlex
import urllib.request
from contextlib import closing
from pathlib import Path

import pytest
from commands import pgqueue, working
from pages import ROOT, Block, blocks
from supervised import Supervised
from web_processes import serving
from workers import Eyes, wait_until

PAGE = ROOT / "docs" / "tutorial.md"
ELSEWHERE = [block for block in blocks(PAGE) if block.elsewhere]
FILES = [block for block in blocks(PAGE) if block.text.startswith("# ") and block.language == "python"]
LAST = [block for block in FILES if "with thanks" in block.text]

pytestmark = [pytest.mark.second, pytest.mark.promise("F365")]


COMMANDS = [line.removeprefix("$ ") for block in ELSEWHERE for line in block.text.splitlines() if line[0] == "$"]
"""Those that stay, and those that follow one that stays."""


def write(home: Path, files: list[Block]) -> None:
    for block in files:
        name = block.text.split("\n", 1)[0].removeprefix("# ")
        (home / name).write_text(block.text, encoding="utf-8")


def test_each_command_that_stays_is_tried_here() -> None:
    assert (len(COMMANDS), len(LAST)) == (4, 1)
    assert {block.elsewhere for block in ELSEWHERE} == {"tests/project/test_tutorial.py"}


def test_the_dashboard_of_the_tutorial_answers(dsn: str, tmp_path: Path) -> None:
    program, command, *options = shlex.split(COMMANDS[0])
    assert (program, command) == ("pgqueue", "web")
    with serving(dsn, tmp_path / "log", *options) as url:
        for path in ("/", "/tasks", "/jobs?state=failed"):
            with urllib.request.urlopen(f"{url}{path}", timeout=30) as page:
                assert page.status == 200


def test_the_deploy_of_the_tutorial_brings_the_new_code(dsn: str, tmp_path: Path) -> None:
    (_, _, *work), restart, enqueue = map(shlex.split, COMMANDS[1:])
    write(tmp_path, [block for block in FILES if block not in LAST])
    with working(*work, dsn=dsn, cwd=tmp_path, terminal=False) as worker:
        one = Supervised(worker, tmp_path)
        try:
            worker.says("ready: ")
            write(tmp_path, LAST)
            assert pgqueue(*restart[1:], dsn=dsn).returncode == 0
            job = pgqueue(*enqueue[1:], dsn=dsn)
            with closing(Eyes(dsn)) as eyes:
                wait_until(eyes.done(1))
                result = eyes.one("SELECT result FROM pgqueue.job WHERE id = %s", int(job.stdout))
            assert result == "sent with thanks"
        finally:
            one.close()
