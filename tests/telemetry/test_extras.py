"""Nothing of telemetry is imported before it is used, and what lacks its package says what to install."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pgqueue import distribution
from pgqueue.errors import Error
from pgqueue.telemetry.extras import needs_extra

PACKAGES = {"prometheus": "prometheus_client", "otel": "opentelemetry", "sentry": "sentry_sdk"}


@pytest.mark.parametrize(("extra", "package"), PACKAGES.items())
def test_what_lacks_its_package_says_what_to_install(extra: str, package: str) -> None:
    with pytest.raises(Error, match=f"needs {package}: ") as caught, needs_extra(extra):
        raise ModuleNotFoundError(name=f"{package}.core")
    assert distribution.install(extra) in str(caught.value)
    with pytest.raises(ModuleNotFoundError), needs_extra(extra):
        raise ModuleNotFoundError(name="something_else")


def test_the_wing_itself_imports_none_of_them() -> None:
    code = "import pgqueue.telemetry, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {each.partition(".")[0] for each in done.stdout.split()} & set(PACKAGES.values())
