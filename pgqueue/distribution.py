"""The distribution's name, which differs from the import name, and its extras.

Used by code that asks for our version or needs an extra. The name is a constant; a test compares it with
pyproject.toml. Looking it up would read every installed distribution, and would not find an editable install.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pgqueue.errors import Error

NAME = "pgqueue-jobs"
_PACKAGES = {
    "prometheus": ("prometheus_client",),
    "otel": ("opentelemetry",),
    "sentry": ("sentry_sdk",),
    "web": ("starlette", "jinja2", "markupsafe", "uvicorn"),
}


def install(extra: str) -> str:
    """The command that installs this extra."""
    return f"pip install '{NAME}[{extra}]' (from a checkout '.[{extra}]')"


@contextmanager
def needs_extra(extra: str) -> Iterator[None]:
    """Say what to install if a package of this extra is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _PACKAGES[extra]:
            raise
        raise Error(f"this needs {package}: {install(extra)}") from error
