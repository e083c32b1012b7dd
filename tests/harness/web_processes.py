"""`pgqueue web` for the tests: a dashboard in a process of its own, on a free port."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from forks import COMMAND
from workers import wait_until

READER, OPERATOR = "r" * 20, "o" * 20
SECRETS = {"PGQUEUE_WEB_READER": READER, "PGQUEUE_WEB_OPERATOR": OPERATOR}


@contextmanager
def serving(dsn: str | None, log: Path, *options: str) -> Iterator[str]:
    """The URL of a dashboard in a process of its own; it is ended by SIGTERM, and must end well. Without a DSN the
    options name the databases."""
    command = [COMMAND, "web", "--bind", "127.0.0.1:0", *(["--dsn", dsn] if dsn else []), *options]
    with log.open("wb") as written, subprocess.Popen(command, stderr=written, env=os.environ | SECRETS) as process:
        try:
            wait_until(lambda: process.poll() is not None or "the dashboard is at" in log.read_text())
            [url] = re.findall(r"the dashboard is at (http://127\.0\.0\.1:\d+)/", log.read_text())
            yield url
        finally:
            process.send_signal(signal.SIGTERM)
            ended = process.wait(30)
    assert ended == 0, log.read_text()
