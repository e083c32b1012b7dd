"""A forked process is like an executed one, in all that a test can ask of it."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import forks
import psutil
import pytest
from forks import COMMAND, Forked


def both(*arguments: str, env: dict[str, str], **options: Any) -> list[subprocess.Popen[Any]]:
    return [
        Forked([COMMAND, *arguments], env=env, **options),
        subprocess.Popen([COMMAND, *arguments], env=env, **options),
    ]


@pytest.mark.parametrize(
    ("arguments", "stdin"),
    [
        (["version"], None),
        (["no-such-command"], None),
        (["systemd", "tasks"], None),  # names its directory, and what is executed
        (["status", "--dsn", "postgresql:///none?host=/nowhere"], None),
        (["enqueue", "x", "-", "--dsn", "postgresql:///none?host=/nowhere"], "{broken"),
        (["status"], None),
    ],
    ids=str,
)
@pytest.mark.parametrize("named", [False, True])
def test_it_says_the_same_and_ends_with_the_same_code(
    arguments: list[str], stdin: str | None, named: bool, tmp_path: Path
) -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PGQUEUE_")}
    env = kept | ({"PGQUEUE_DSN": "postgresql:///other?host=/elsewhere"} if named else {})
    said = []
    pipe = subprocess.PIPE
    for process in both(*arguments, env=env, cwd=tmp_path, text=True, stdin=pipe, stdout=pipe, stderr=pipe):
        with process:
            out, err = process.communicate(stdin, timeout=60)
            said.append((out, err, process.wait()))
    assert said[0] == said[1]


def test_its_end_is_heard_as_that_of_an_executed_one() -> None:
    """A signal is its exit code, it stays a zombie until then, and it can be waited for in vain."""
    for process in both("enqueue", "x", "-", env={**os.environ}, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL):
        with process:
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.05)
            assert process.poll() is None
            os.kill(process.pid, signal.SIGKILL)
            while psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE:
                """It is about to end."""
            assert process.wait(60) == process.poll() == -signal.SIGKILL
            while psutil.pid_exists(process.pid):
                """The preloaded process is about to hear that we know."""


def test_what_the_interpreter_reads_at_its_start_needs_one(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = subprocess.PIPE
    for more, made in (({}, Forked), ({"PYTHONPROFILEIMPORTTIME": "1"}, subprocess.Popen)):
        with forks.start(COMMAND, "version", env=os.environ | more, stdout=pipe, stderr=pipe, text=True) as process:
            assert type(process) is made
            out, err = process.communicate(timeout=60)
            assert out.startswith("pgqueue ") and ("import time:" in err) == bool(more)
