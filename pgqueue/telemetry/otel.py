"""OpenTelemetry: a span for each enqueue, one for each attempt, and the links between them.

    from pgqueue.telemetry import otel

    otel.instrument()

An enqueue has a producer span, and its context goes into the headers of the jobs (W3C `traceparent`, `tracestate`).
An attempt has a consumer span. It is the root of a trace of its own, and has links:
1. to the producer's span, from the headers of the job,
2. to the attempt before, if that one has ended by asking for another (an error, `Retry`, `Snooze`). The statement that
   writes such an end writes the context of its span into the headers, so this costs no statement.

Only the API of OpenTelemetry is used: without a configured SDK its spans do nothing. `docs/traces.md` has the names.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from pgqueue import logs
from pgqueue.client.job_outcome import JobOutcome
from pgqueue.client.observers import End, Sending, observers
from pgqueue.distribution import needs_extra
from pgqueue.jobs.headers import ATTEMPT_TRACE
from pgqueue.jobs.job import Job
from pgqueue.jobs.outcomes import ASKS
from pgqueue.options import checks_options
from pgqueue.telemetry.attributes import Attributes, ended, opted_in
from pgqueue.telemetry.carrier import carried, carrying, headers_of

with needs_extra("otel"):
    from opentelemetry import context as otel_context
    from opentelemetry import trace
    from opentelemetry.context import Context
    from opentelemetry.propagators.textmap import TextMapPropagator
    from opentelemetry.trace import Link, Span, SpanContext, SpanKind, Status, StatusCode, TracerProvider
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

NAME = "pgqueue"
W3C = TraceContextTextMapPropagator()


@checks_options
def instrument(
    *,
    tracer_provider: TracerProvider | None = None,
    propagator: TextMapPropagator | None = None,
    parent: bool = False,
) -> None:
    """Trace the enqueues of this process from now on, and the attempts of workers that start in it from now on.

    - `tracer_provider`: default is the global one.
    - `propagator`: what is written into headers, and read from them. Default is W3C Trace Context.
    - `parent`: the span of an attempt becomes a child of the enqueue's span, in its trace. Default is a trace of its
      own with a link.

    A second call replaces the first. Call it in the module that `pgqueue work` imports, and where jobs are enqueued.

    >>> from pgqueue.telemetry import otel
    >>> otel.instrument()
    >>> otel.uninstrument()
    """
    uninstrument()
    observers.append(Tracing(tracer_provider, propagator or W3C, parent))
    logs.trace_ids = current_ids


def uninstrument() -> None:
    """Trace no more. A worker that has started goes on tracing."""
    observers[:] = [each for each in observers if not isinstance(each, Tracing)]
    logs.trace_ids = None


class PgqueueInstrumentor:
    """`instrument` and `uninstrument` in the form that `opentelemetry-instrument` looks for."""

    def instrument(self, **options: Any) -> None:
        """As the function. What it does not know is left out: the command gives options of its own."""
        known = ("tracer_provider", "propagator", "parent")
        instrument(**{name: options[name] for name in known if name in options})

    def uninstrument(self, **options: Any) -> None:
        """As the function."""
        uninstrument()


def current_ids() -> dict[str, str]:
    """The ids of the current span, as a log line has them; none without one."""
    return ids_of(trace.get_current_span().get_span_context())


def ids_of(span: SpanContext) -> dict[str, str]:
    """The ids of this span as texts; none if it is no real one."""
    if not span.is_valid:
        return {}
    return {"trace_id": trace.format_trace_id(span.trace_id), "span_id": trace.format_span_id(span.span_id)}


# The observer --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Attempt:
    """An attempt that has begun: its span, the context in which its handler runs, and what the handler raised."""

    span: Span
    context: Context
    error: BaseException | None = None


class Tracing:
    """Makes the spans of one process."""

    def __init__(self, provider: TracerProvider | None, propagator: TextMapPropagator, parent: bool) -> None:
        self._provider = provider
        self._tracer = trace.get_tracer(NAME, tracer_provider=provider)
        self._propagator = propagator
        self._fields = frozenset(propagator.fields)
        self._parent = parent
        self._attributes = Attributes(messaging=opted_in())
        # Changed by the loop and by threads; each changes only the key of its own job.
        self._attempts: dict[Job, Attempt] = {}

    def enqueuing(self, sending: Sending) -> End:
        """Begin the span of an enqueue, and put its context into the headers of the jobs."""
        span = self._tracer.start_span(
            self._attributes.enqueue_name(sending),
            kind=SpanKind.PRODUCER,
            attributes=self._attributes.enqueue(sending),
            links=self._own_links(sending),
        )
        token = None
        try:
            context = trace.set_span_in_context(span)
            carrier: dict[str, str] = {}
            self._propagator.inject(carrier, context)
            if carrier:
                sending.jobs = carrying(sending.jobs, carrier)
            token = otel_context.attach(context)
        finally:
            if token is None:
                span.end()

        def end(error: BaseException | None) -> None:
            otel_context.detach(token)
            try:
                if isinstance(error, Exception):
                    _note(span, error)
                elif error is None:
                    span.set_attributes(self._attributes.sent(sending))
            finally:
                span.end()

        return end

    def _own_links(self, sending: Sending) -> list[Link]:
        """Links to the contexts that the application itself has given to these jobs: they stay in the headers."""
        headers = {job.headers for job in sending.jobs if job.headers is not None}
        given = [text for text in headers if any(f'"{name}"' in text for name in self._fields)]
        found = [_span_in(self._extracted(json.loads(text))) for text in given]
        once = {(span.trace_id, span.span_id): span for span in found if span.is_valid}
        return [Link(span, {"pgqueue.link": "given"}) for span in once.values()]

    def running(self, job: Job) -> End:
        """Make the span of the attempt current. If the handler is called again, that is the same span."""
        attempt = self._attempts.get(job)
        if attempt is None:
            attempt = self._attempts[job] = self._begun(job)
        token = otel_context.attach(attempt.context)

        def end(error: BaseException | None) -> None:
            attempt.error = error
            otel_context.detach(token)

        return end

    def _begun(self, job: Job) -> Attempt:
        headers = headers_of(job)
        origin = self._extracted(headers)
        producer = _span_in(origin)
        context = origin if self._parent else trace.set_span_in_context(trace.INVALID_SPAN, origin)
        links = [] if self._parent or not producer.is_valid else [Link(producer, {"pgqueue.link": "enqueue"})]
        before = _span_in(W3C.extract({"traceparent": headers[ATTEMPT_TRACE]}, Context())) if _traced(headers) else None
        if before is not None and before.is_valid:
            links.append(Link(before, {"pgqueue.link": "attempt"}))
        span = self._tracer.start_span(
            self._attributes.run_name(job),
            context,
            kind=SpanKind.CONSUMER,
            attributes=self._attributes.run(job, headers),
            links=links,
        )
        own = span.get_span_context()
        if own.is_valid:
            job.traceparent = _traceparent(own)
        return Attempt(span, trace.set_span_in_context(span, context))

    def _extracted(self, headers: dict[str, Any]) -> Context:
        """The context in these headers. Without the context of this process: a worker's own span is none of a job."""
        return self._propagator.extract(carried(headers, self._fields), Context())

    def finished(self, job: Job, outcome: JobOutcome) -> None:
        """End the span of the attempt. If its handler was not called, there is a span if the job has failed."""
        attempt = self._attempts.pop(job, None)
        if attempt is None:
            if outcome.name != "failed":
                return
            attempt = self._begun(job)
        span = attempt.span
        try:
            span.set_attributes(ended(outcome))
            if outcome.name in ("failed", "retried"):
                _note_outcome(span, outcome, attempt.error)
        finally:
            span.end()

    def flush(self, seconds: float) -> None:
        """Let the SDK export the spans that it has collected. What has only the API exports nothing."""
        # The global provider may have been set after `instrument` was called.
        provider = trace.get_tracer_provider() if self._provider is None else self._provider
        if (force_flush := getattr(provider, "force_flush", None)) is not None:
            force_flush(int(1_000 * seconds))


def _note(span: Span, error: Exception) -> None:
    span.record_exception(error)
    span.set_attribute("error.type", type(error).__qualname__)
    span.set_status(Status(StatusCode.ERROR, f"{type(error).__qualname__}: {error}"))


def _note_outcome(span: Span, outcome: JobOutcome, error: BaseException | None) -> None:
    """An attempt that has failed: with the exception of its handler, or with what is known of it."""
    if isinstance(error, ASKS):
        error = error.__cause__ or error.__context__ or error
    kind = outcome.error_type or outcome.reason or "error"
    if isinstance(error, Exception):
        span.record_exception(error)
    else:
        span.add_event("exception", {"exception.type": kind, "exception.message": outcome.error or ""})
    span.set_attribute("error.type", kind)
    span.set_status(Status(StatusCode.ERROR, f"{kind}: {outcome.error}" if outcome.error else kind))


def _span_in(context: Context) -> SpanContext:
    return trace.get_current_span(context).get_span_context()


def _traced(headers: dict[str, Any]) -> bool:
    return isinstance(headers.get(ATTEMPT_TRACE), str)


def _traceparent(span: SpanContext) -> str:
    return f"00-{trace.format_trace_id(span.trace_id)}-{trace.format_span_id(span.span_id)}-{span.trace_flags:02x}"
