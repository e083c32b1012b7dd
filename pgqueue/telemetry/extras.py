"""The extras of this wing: what to install if the package of one is missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pgqueue import distribution
from pgqueue.errors import Error

_PACKAGES = {"prometheus": "prometheus_client", "otel": "opentelemetry", "sentry": "sentry_sdk"}


@contextmanager
def needs_extra(extra: str) -> Iterator[None]:
    """Say what to install if the package of this extra is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package != _PACKAGES[extra]:
            raise
        raise Error(f"this needs {package}: {distribution.install(extra)}") from error
