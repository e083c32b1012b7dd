"""Metrics, traces and errors for the tools that watch other programs, too: Prometheus, OpenTelemetry, Sentry.

Each needs an extra, `prometheus`, `otel` or `sentry`. Where none is used, nothing of this is imported. The worker does
not know this wing: it offers plain numbers, and the command line brings the two together.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pgqueue import distribution
from pgqueue.errors import Error

__all__: list[str] = []

_PLACES: dict[str, str] = {}
"""The module of each public name. It is imported at the first use of the name: each needs another extra."""
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


def __getattr__(name: str) -> object:
    from importlib import import_module

    if name in _PLACES:
        return getattr(import_module(_PLACES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
