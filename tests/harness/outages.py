"""Counts what a worker does and says while its database is away."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest


def count_connects(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The application names of the connections that are tried from now on, in this process."""
    tried: list[str] = []
    sync, on_loop = psycopg.Connection.connect, psycopg.AsyncConnection.connect.__func__  # type: ignore[attr-defined]

    def connect(*args: Any, **options: Any) -> Any:
        tried.append(str(options.get("application_name")))
        return sync(*args, **options)

    def aconnect(cls: Any, *args: Any, **options: Any) -> Any:
        tried.append(str(options.get("application_name")))
        return on_loop(cls, *args, **options)

    monkeypatch.setattr(psycopg, "connect", connect)
    monkeypatch.setattr(psycopg.AsyncConnection, "connect", classmethod(aconnect))
    return tried
