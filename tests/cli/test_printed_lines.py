"""What handlers print: in a pipe or a file each line comes whole, and with its end, as on a terminal."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
from commands import COMMAND, PATIENCE, pgqueue
from workers import Eyes, wait_until

LINES, JOBS = 2_000, 3
APP = f"""
import pathlib, threading
import pgqueue

@pgqueue.task(name="prints")
def prints(number: int) -> None:
    for line in range({LINES}):
        if line % 2:
            print(f"job {{number}} line {{line}}")
        elif line % 100:
            print("job", number, "line", line)
        else:
            print("job", number, "line", line, "x" * 7_900)

@pgqueue.task(name="prints_and_stays")
def prints_and_stays() -> None:
    print("a receipt for order 1")
    pathlib.Path("begun").touch()
    threading.Event().wait()
"""


def started(dsn: str, app: Path, **environ: str) -> subprocess.Popen[bytes]:
    """A worker whose standard output and error are one file, `printed`, in the directory of the application."""
    (app / "shop.py").write_text(APP)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PGQUEUE_", "PYTHONUNBUF"))}
    with (app / "printed").open("wb") as printed:
        return subprocess.Popen(
            [COMMAND, "work", "shop"],
            cwd=app,
            env=kept | {"PGQUEUE_DSN": dsn} | environ,
            stdout=printed,
            stderr=subprocess.STDOUT,
        )


@pytest.mark.promise("F435")
def test_lines_of_several_threads_are_whole_also_without_a_buffer(dsn: str, eyes: Eyes, tmp_path: Path) -> None:
    """Without a buffer a `print` of Python is two writes, and a line of another thread comes between them."""
    for number in range(JOBS):
        assert pgqueue("enqueue", "prints", f'{{"number": {number}}}', dsn=dsn).returncode == 0
    process = started(dsn, tmp_path, PYTHONUNBUFFERED="1")
    try:
        wait_until(eyes.done(JOBS))
        process.terminate()
        assert process.wait(PATIENCE) == 0
    finally:
        process.kill()
        process.wait()
    lines = (tmp_path / "printed").read_text().splitlines()
    long = " " + 7_900 * "x"
    wanted = {f"job {n} line {line}{'' if line % 100 else long}" for n in range(JOBS) for line in range(LINES)}
    assert sorted(wanted - set(lines)) == []


@pytest.mark.promise("F435")
def test_a_line_is_there_when_it_is_printed_whatever_ends_the_process(dsn: str, tmp_path: Path) -> None:
    assert pgqueue("enqueue", "prints_and_stays", dsn=dsn).returncode == 0
    process = started(dsn, tmp_path)
    try:
        wait_until((tmp_path / "begun").exists)
        process.send_signal(signal.SIGKILL)
        process.wait(PATIENCE)
    finally:
        process.kill()
        process.wait()
    assert "a receipt for order 1" in (tmp_path / "printed").read_text().splitlines()
