"""promtool for the tests. Where it is missing, a test is skipped; if CI is set, it fails."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest


def promtool(*arguments: str, stdin: str | None = None, cwd: Path | None = None) -> str:
    """Run `promtool …`, which must find nothing wrong; what it has printed."""
    program = shutil.which("promtool")
    if program is None:
        reason = "promtool is not installed: it comes with Debian's package prometheus"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    done = subprocess.run([program, *arguments], input=stdin, capture_output=True, text=True, cwd=cwd, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return f"{done.stdout}{done.stderr}"
