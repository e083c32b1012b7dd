"""What the tests of traces have in common."""

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
