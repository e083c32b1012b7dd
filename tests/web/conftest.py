"""On a busy machine the server may take a while to make a connection. That is no reason for a test to fail."""

from __future__ import annotations

import pytest

from pgqueue.web import connections


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "ANSWER_SECONDS", 30.0)
