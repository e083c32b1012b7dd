"""Metrics, traces and errors for the tools that watch other programs, too: Prometheus, OpenTelemetry, Sentry.

Each needs an extra, `prometheus`, `otel` or `sentry`. Where none is used, nothing of this is imported. The worker does
not know this wing: it offers plain numbers, and the command line brings the two together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pgqueue.telemetry.app import asgi

__all__ = ["asgi"]

_PLACES = {"asgi": "pgqueue.telemetry.app"}
"""The module of each public name. It is imported at the first use of the name: each needs another extra."""


def __getattr__(name: str) -> object:
    from importlib import import_module

    if name in _PLACES:
        return getattr(import_module(_PLACES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
