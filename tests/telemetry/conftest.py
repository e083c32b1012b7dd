"""What the tests of traces and metrics have in common."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from traces import Spans

from pgqueue.telemetry import otel


@pytest.fixture
def spans() -> Iterator[Spans]:
    """Traces are on; these are the spans that have ended."""
    made = Spans()
    otel.instrument(tracer_provider=made.provider)
    yield made
    otel.uninstrument()
    made.provider.shutdown()


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scrape waits longer for its gauges: a test that wants them may run on a slow machine."""
    monkeypatch.setattr("pgqueue.telemetry.gauges.ANSWER_SECONDS", 20.0)
