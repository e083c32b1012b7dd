"""The spans of a test, kept in memory, and what they say."""

from __future__ import annotations

from typing import Any

from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter


class Spans:
    """The spans that have ended, and the provider that makes them."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = self.provider.get_tracer("test")

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.exporter.get_finished_spans() if span.name == name]

    def number(self, name: str, number: int) -> bool:
        return len(self.named(name)) == number

    def one(self, name: str) -> ReadableSpan:
        [span] = self.named(name)
        return span


def links(span: ReadableSpan) -> dict[str, int]:
    """The span ids that this span is linked with, by what the link says."""
    return {str((link.attributes or {})["pgqueue.link"]): link.context.span_id for link in span.links}


def span_id(span: ReadableSpan) -> int:
    assert span.context is not None
    number: int = span.context.span_id
    return number


def trace_id(span: ReadableSpan) -> int:
    assert span.context is not None
    number: int = span.context.trace_id
    return number


def traceparent(span: ReadableSpan) -> str:
    assert span.context is not None
    return f"00-{trace_id(span):032x}-{span_id(span):016x}-{span.context.trace_flags:02x}"


def told(span: ReadableSpan) -> dict[str, Any]:
    return {name: value for name, value in (span.attributes or {}).items() if name != "pgqueue.job_id"}


def current() -> int:
    """The id of the span that is current here."""
    number: int = trace.get_current_span().get_span_context().span_id
    return number
