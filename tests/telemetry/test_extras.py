"""No package of an extra is imported before it is used."""

from __future__ import annotations

import subprocess
import sys

PACKAGES = {"prometheus_client", "opentelemetry", "sentry_sdk"}


def test_the_wing_itself_imports_none_of_them() -> None:
    code = "import pgqueue.telemetry, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {each.partition(".")[0] for each in done.stdout.split()} & PACKAGES
