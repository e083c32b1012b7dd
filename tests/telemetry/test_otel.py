"""Spans of enqueues and attempts, what they are linked with, and that none of it can harm a job."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import tomllib
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import psycopg
import pytest
from driver_kinds import ASYNC, KINDS, drive
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import SpanKind, StatusCode
from traces import Spans, current, links, span_id, told, trace_id, traceparent
from workers import Eyes, until, work

import pgqueue
from pgqueue.client import observers
from pgqueue.client.middleware import declared, wrapped
from pgqueue.telemetry import otel
from pgqueue.testing import drain

ROOT = Path(__file__).parents[2]

seen: list[Any] = []


@pytest.fixture(autouse=True)
def nothing_seen() -> None:
    seen.clear()


@pgqueue.task(name="traced.plain")
def plain(n: int = 0) -> int:
    seen.append(current())
    return n


@pgqueue.task(name="traced.on_loop")
async def on_loop(n: int = 0) -> int:
    await asyncio.sleep(0)
    seen.append(current())
    return n


@pgqueue.task(name="traced.fails", retry=pgqueue.RetryPolicy(attempts=3, first=60, factor=1))
def fails() -> None:
    raise KeyError("sku")


@pgqueue.task(name="traced.parent")
def has_child(job: pgqueue.Job) -> None:
    job.enqueue(plain, 1)


# Enqueue -------------------------------------------------------------------------------------------------------------


@pytest.mark.promise("F172")
@pytest.mark.parametrize("kind", KINDS)
def test_each_driver_has_a_span_and_the_job_its_context(kind: str, dsn: str, eyes: Eyes, spans: Spans) -> None:
    many = [plain.new(1), on_loop.new(2)]

    async def scenario() -> None:
        async with KINDS[kind](dsn, False) as app:
            with spans.tracer.start_as_current_span("request"):
                await plain.aenqueue(app.conn) if kind in ASYNC else plain.enqueue(app.conn)
                await pgqueue.aenqueue_many(app.conn, many) if kind in ASYNC else pgqueue.enqueue_many(app.conn, many)
            await app.commit()

    drive(kind, scenario())
    one, batch, request = spans.one("enqueue traced.plain"), spans.one("enqueue"), spans.one("request")
    assert {span.kind for span in (one, batch)} == {SpanKind.PRODUCER}
    assert {span.parent and span.parent.span_id for span in (one, batch)} == {span_id(request)}
    assert one.attributes == {"pgqueue.task": "traced.plain", "pgqueue.queue": "default", "pgqueue.job_id": 1}
    assert batch.attributes == {"pgqueue.queue": "default", "pgqueue.jobs": 2}
    headers = [row for (row,) in eyes.all("SELECT headers FROM pgqueue.job ORDER BY id")]
    assert headers == [{"traceparent": traceparent(span)} for span in (one, batch, batch)]


@pytest.mark.promise("F172")
def test_headers_stay_and_a_context_of_the_application_too(conn: psycopg.Connection[Any], spans: Spans) -> None:
    own = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "shop": [1, {"a": "\u00e9"}]}
    handles = pgqueue.enqueue_many(
        conn, [plain.using(headers={"shop": {"n": 10**30}}).new(), plain.using(headers=own).new(), plain.new()]
    )
    span = spans.one("enqueue traced.plain")
    first, second, third = [(pgqueue.get(conn, each.id)).headers for each in handles]
    context = traceparent(span)
    assert first == {"shop": {"n": 10**30}, "traceparent": context}
    assert second == own
    assert third == {"traceparent": context}
    assert links(span) == {"given": 0xB7AD6B7169203331}


@pytest.mark.promise("F172")
def test_a_duplicate_and_a_refused_enqueue_say_so(conn: psycopg.Connection[Any], spans: Spans) -> None:
    once = plain.using(unique="once")
    first = once.enqueue(conn)
    assert once.enqueue(conn).id == first.id
    with pytest.raises(pgqueue.DuplicateJob):
        plain.using(unique=pgqueue.Unique("once", on_duplicate="raise")).enqueue(conn)
    made, doubled, refused = spans.named("enqueue traced.plain")
    assert "pgqueue.created" not in (made.attributes or {})
    assert (doubled.attributes or {})["pgqueue.created"] is False
    assert refused.status.status_code is StatusCode.ERROR
    assert (refused.attributes or {})["error.type"] == "DuplicateJob"
    assert [event.name for event in refused.events] == ["exception"]


@pytest.mark.promise("F172")
def test_headers_that_would_be_too_large_are_left_as_they_are(conn: psycopg.Connection[Any], spans: Spans) -> None:
    large = {"x": "x" * ((1 << 20) - 10)}
    handle = plain.using(headers=large).enqueue(conn)
    assert pgqueue.get(conn, handle.id).headers == large


# Runs ----------------------------------------------------------------------------------------------------------------


@pytest.mark.promise("F172")
@pytest.mark.parametrize("each", [plain, on_loop])
async def test_an_attempt_is_a_trace_of_its_own_linked_with_the_enqueue(
    each: pgqueue.Task[..., Any], dsn: str, eyes: Eyes, spans: Spans
) -> None:
    with spans.tracer.start_as_current_span("around the worker"):
        async with work(dsn, each, concurrency=2):
            with psycopg.connect(dsn) as conn:
                handles = [each.enqueue(conn, n) for n in range(3)]
            await until(eyes.done(3))
            await until(lambda: len(spans.named(f"run {each.name}")) == 3)
    runs = spans.named(f"run {each.name}")
    producers = {(span.attributes or {})["pgqueue.job_id"]: span for span in spans.named(f"enqueue {each.name}")}
    assert {span.kind for span in runs} == {SpanKind.CONSUMER}
    assert {span.parent for span in runs} == {None}
    assert sorted(map(span_id, runs)) == sorted(seen)
    assert len({trace_id(span) for span in runs}) == 3
    for span in runs:
        assert links(span) == {"enqueue": span_id(producers[(span.attributes or {})["pgqueue.job_id"]])}
        assert told(span) == {
            "pgqueue.task": each.name, "pgqueue.queue": "default", "pgqueue.attempt": 1, "pgqueue.outcome": "completed",
        }  # fmt: skip
    assert {(span.attributes or {})["pgqueue.job_id"] for span in runs} == {handle.id for handle in handles}


@pytest.mark.promise("F172")
async def test_as_a_child_of_the_enqueue(dsn: str, eyes: Eyes, spans: Spans) -> None:
    otel.instrument(tracer_provider=spans.provider, parent=True)
    with psycopg.connect(dsn) as conn:
        plain.enqueue(conn)
    async with work(dsn, plain):
        await until(lambda: spans.named("run traced.plain"))
    run, producer = spans.one("run traced.plain"), spans.one("enqueue traced.plain")
    assert run.parent is not None and run.parent.span_id == span_id(producer)
    assert trace_id(run) == trace_id(producer)
    assert links(run) == {}


@pytest.mark.promise("F172")
async def test_each_attempt_is_linked_with_the_one_before_on_whichever_worker(
    dsn: str, eyes: Eyes, spans: Spans
) -> None:
    with psycopg.connect(dsn) as conn:
        handle = fails.enqueue(conn)
    for number in range(1, 4):
        async with work(dsn, fails):
            await until(partial(spans.number, "run traced.fails", number))
        if number < 3:
            pgqueue.reschedule(eyes.conn, handle.id, at=datetime.now(UTC))
    runs, producer = spans.named("run traced.fails"), spans.one("enqueue traced.fails")
    assert [(span.attributes or {})["pgqueue.attempt"] for span in runs] == [1, 2, 3]
    assert len({trace_id(span) for span in runs}) == 3
    assert links(runs[0]) == {"enqueue": span_id(producer)}
    assert links(runs[1]) == {"enqueue": span_id(producer), "attempt": span_id(runs[0])}
    assert links(runs[2]) == {"enqueue": span_id(producer), "attempt": span_id(runs[1])}
    assert [(span.attributes or {})["pgqueue.outcome"] for span in runs] == ["retried", "retried", "failed"]
    assert {span.status.status_code for span in runs} == {StatusCode.ERROR}
    assert {(span.attributes or {})["error.type"] for span in runs} == {"KeyError"}
    for span in runs:
        [event] = span.events
        assert (event.attributes or {})["exception.type"] == "KeyError"
        assert "raise KeyError" in str((event.attributes or {})["exception.stacktrace"])


@pytest.mark.promise("F172")
def test_jobs_that_jobs_enqueue_are_children_of_the_attempt(conn: psycopg.Connection[Any], spans: Spans) -> None:
    @pgqueue.task(name="traced.nests", transactional=True)
    def nests(job: pgqueue.Job) -> None:
        on_loop.enqueue(job.connection)
        job.enqueue(plain)

    nests.enqueue(conn)
    assert drain(conn).completed == 3
    outer = spans.one("run traced.nests")
    for name in ("traced.plain", "traced.on_loop"):
        producer = spans.one(f"enqueue {name}")
        assert producer.parent is not None and producer.parent.span_id == span_id(outer)
        assert links(spans.one(f"run {name}")) == {"enqueue": span_id(producer)}


@pytest.mark.promise("F172")
async def test_how_attempts_end_is_said(dsn: str, eyes: Eyes, spans: Spans) -> None:
    @pgqueue.task(name="traced.ends", retry=1, timeout=0.2)
    async def ends(how: str) -> Any:
        if how == "times out":
            await asyncio.sleep(60)
        raise {"snoozes": pgqueue.Snooze(60), "cancels": pgqueue.Cancel("no"), "fails": pgqueue.Fail("bad")}[how]

    with psycopg.connect(dsn) as conn:
        handles = {ends.enqueue(conn, how).id: how for how in ("times out", "snoozes", "cancels", "fails")}
        conn.execute(
            "INSERT INTO pgqueue.job (task, args, enqueued_at) "
            "VALUES ('traced.ends', '{\"x\": 1}', now() - interval '2 hours')"
        )
    async with work(dsn, ends):
        await until(lambda: len(spans.named("run traced.ends")) == 5)
    found = {
        handles.get((span.attributes or {})["pgqueue.job_id"], "unfit"): (  # type: ignore[arg-type]
            (span.attributes or {})["pgqueue.outcome"],
            (span.attributes or {}).get("error.type"),
            span.status.status_code,
            [(event.attributes or {})["exception.type"] for event in span.events],
        )
        for span in spans.named("run traced.ends")
    }
    assert found == {
        "times out": ("failed", "JobTimeout", StatusCode.ERROR, ["JobTimeout"]),
        "snoozes": ("snoozed", None, StatusCode.UNSET, []),
        "cancels": ("cancelled", None, StatusCode.UNSET, []),
        "fails": ("failed", "Fail", StatusCode.ERROR, ["pgqueue.jobs.outcomes.Fail"]),
        "unfit": ("failed", "InvalidArguments", StatusCode.ERROR, ["InvalidArguments"]),
    }


@pytest.mark.promise("F172")
async def test_side_by_side_each_handler_has_its_own_span(dsn: str, eyes: Eyes, spans: Spans) -> None:
    """A span that is current for the process would be seen by both."""
    together, met = threading.Barrier(2), asyncio.Event()

    @pgqueue.task(name="traced.thread")
    def in_thread(job: pgqueue.Job) -> None:
        before = current()
        together.wait(30)
        seen.append((job.id, before, current()))

    @pgqueue.task(name="traced.loop")
    async def async_one(job: pgqueue.Job) -> None:
        before = current()
        if len([each for each in seen if each == "met"]) == 0:
            seen.append("met")
            await asyncio.wait_for(met.wait(), 30)
        met.set()
        seen.append((job.id, before, current()))

    with psycopg.connect(dsn) as conn:
        for task in (in_thread, in_thread, async_one, async_one):
            task.enqueue(conn)
    async with work(dsn, in_thread, async_one, concurrency=4):
        await until(eyes.done(4))
    spoken = [each for each in seen if each != "met"]
    assert all(before == after != 0 for _, before, after in spoken)
    assert len({before for _, before, _ in spoken}) == 4


# What must not harm a job --------------------------------------------------------------------------------------------

HOSTILE: list[Any] = [
    {"traceparent": 7},
    {"traceparent": ["00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"]},
    {"traceparent": "00-" + "f" * 1_000_000},
    {"traceparent": "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"},
    {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "tracestate": "=,;\n=\x01" * 500},
    {"traceparent": None, "pgqueue:attempt": {"a": 1}},
    {"pgqueue:attempt": "00-x-y-z", "pgqueue:schedule": 5, "pgqueue:tick": "never"},
    [1],
    "text",
]


@pytest.mark.promise("F173")
@pytest.mark.parametrize("headers", HOSTILE, ids=lambda each: str(each)[:40])
async def test_headers_that_are_not_ours_harm_no_job(headers: Any, dsn: str, eyes: Eyes, spans: Spans) -> None:
    eyes.do("INSERT INTO pgqueue.job (task, headers) VALUES ('traced.plain', %s::jsonb)", json.dumps(headers))
    eyes.do("INSERT INTO pgqueue.job (task, headers) VALUES ('traced.fails', %s::jsonb)", json.dumps(headers))
    async with work(dsn, plain, fails):
        await until(lambda: eyes.states() == {"completed": 1, "scheduled": 1})
        await until(lambda: spans.named("run traced.plain") and spans.named("run traced.fails"))


class Breaks(SpanExporter):
    def export(self, spans: Any) -> SpanExportResult:
        raise RuntimeError("no exporter")


class BreaksAtEnd(SimpleSpanProcessor):
    def __init__(self) -> None:
        super().__init__(InMemorySpanExporter())

    def on_end(self, span: ReadableSpan) -> None:
        raise RuntimeError("no processor")


@pytest.mark.promise("F173")
@pytest.mark.parametrize("processor", [SimpleSpanProcessor(Breaks()), BreaksAtEnd()], ids=["exporter", "processor"])
async def test_what_fails_to_export_harms_neither_enqueue_nor_job_and_is_logged(
    processor: SimpleSpanProcessor, dsn: str, eyes: Eyes, caplog: pytest.LogCaptureFixture
) -> None:
    provider = TracerProvider()
    provider.add_span_processor(processor)
    observers._told.clear()
    otel.instrument(tracer_provider=provider)
    try:
        async with work(dsn, plain):
            with psycopg.connect(dsn) as conn:
                for _ in range(3):
                    plain.enqueue(conn)
            await until(eyes.done(3))
    finally:
        otel.uninstrument()
        provider.shutdown()
    if isinstance(processor, BreaksAtEnd):
        assert len([each for each in caplog.records if "Tracing failed" in each.getMessage()]) == 1
    else:
        assert "no exporter" in caplog.text


@pytest.mark.promise("F173")
async def test_a_sampler_that_drops_leaves_jobs_alone(dsn: str, eyes: Eyes) -> None:
    provider = TracerProvider(sampler=ALWAYS_OFF)
    otel.instrument(tracer_provider=provider)
    try:
        with psycopg.connect(dsn) as conn:
            plain.enqueue(conn)
        async with work(dsn, plain):
            await until(eyes.done(1))
    finally:
        otel.uninstrument()
    flags = int(str(eyes.one("SELECT headers ->> 'traceparent' FROM pgqueue.job")).split("-")[3], 16)
    assert flags % 2 == 0  # not sampled


@pytest.mark.promise("F173")
def test_without_a_provider_nothing_is_written(conn: psycopg.Connection[Any]) -> None:
    otel.instrument(tracer_provider=trace.NoOpTracerProvider())
    try:
        handle = plain.enqueue(conn)
        assert drain(conn).completed == 1
    finally:
        otel.uninstrument()
    assert pgqueue.get(conn, handle.id).headers is None


@pytest.mark.promise("F173")
async def test_a_worker_that_stops_ends_the_span_of_what_it_gives_back(dsn: str, eyes: Eyes, spans: Spans) -> None:
    began = asyncio.Event()

    @pgqueue.task(name="traced.waits")
    async def waits() -> None:
        began.set()
        await asyncio.sleep(600)

    with psycopg.connect(dsn) as conn:
        waits.enqueue(conn)
    async with work(dsn, waits) as worker:
        await asyncio.wait_for(began.wait(), 30)
        await worker.stop(0)
    span = spans.one("run traced.waits")
    assert told(span)["pgqueue.outcome"] == "released"
    assert span.status.status_code is StatusCode.UNSET


# Off -----------------------------------------------------------------------------------------------------------------


@pytest.mark.promise("F174")
def test_off_is_the_same_path_as_without(conn: psycopg.Connection[Any]) -> None:
    assert observers.observers == []
    assert wrapped(plain, declared()) is plain
    assert plain.new() is observers.successor(new := plain.new()) or observers.successor(new) is new
    otel.instrument()
    assert wrapped(plain, declared()) is not plain
    otel.uninstrument()
    assert observers.observers == []
    assert wrapped(plain, declared()) is plain
    handle = plain.enqueue(conn)
    assert pgqueue.get(conn, handle.id).headers is None


@pytest.mark.promise("F174")
def test_a_retry_of_a_job_without_a_trace_changes_no_headers(conn: psycopg.Connection[Any]) -> None:
    handle = fails.using(headers={"shop": 1}).enqueue(conn)
    drain(conn)
    assert pgqueue.get(conn, handle.id).headers == {"shop": 1}


# Names ---------------------------------------------------------------------------------------------------------------


@pytest.mark.promise("F172")
@pytest.mark.parametrize("asked", ["messaging", "http,messaging/dup"])
def test_names_of_the_convention_are_there_if_asked_for(
    asked: str, conn: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch, spans: Spans
) -> None:
    monkeypatch.setenv("OTEL_SEMCONV_STABILITY_OPT_IN", asked)
    otel.instrument(tracer_provider=spans.provider)
    one = has_child.enqueue(conn)
    pgqueue.enqueue_many(conn, [plain.new(), plain.new()])
    drain(conn)
    single, batch = spans.named("send default")
    expected = {"messaging.system": "pgqueue", "messaging.destination.name": "default"}
    send = expected | {"messaging.operation.name": "send", "messaging.operation.type": "send"}
    assert {n: v for n, v in (single.attributes or {}).items() if n.startswith("messaging")} == send | {
        "messaging.message.id": str(one.id)
    }
    assert {n: v for n, v in (batch.attributes or {}).items() if n.startswith("messaging")} == send | {
        "messaging.batch.message_count": 2
    }
    assert (spans.one("create default").attributes or {})["messaging.operation.type"] == "create"
    runs = spans.named("process default")
    assert len(runs) == 4
    assert (runs[0].attributes or {})["messaging.message.id"] == str(one.id)
    assert (runs[0].attributes or {})["messaging.operation.type"] == "process"


@pytest.mark.promise("F172")
def test_a_job_of_a_schedule_says_which(conn: psycopg.Connection[Any], spans: Spans) -> None:
    pgqueue.schedules.add(conn, "report:7", pgqueue.Cron("0 6 * * *"), plain)
    pgqueue.schedules.run(conn, "report:7")
    drain(conn)
    run = spans.one("run traced.plain")
    assert told(run)["pgqueue.schedule"] == "report:7" and "pgqueue.tick" in told(run)
    assert links(run) == {}


# In logs -------------------------------------------------------------------------------------------------------------


@pytest.mark.promise("F175")
async def test_lines_of_handlers_and_of_the_worker_name_the_span(
    dsn: str, eyes: Eyes, spans: Spans, caplog: pytest.LogCaptureFixture
) -> None:
    from pgqueue.logs import Json

    lines: list[dict[str, Any]] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(json.loads(Json().format(record)))

    @pgqueue.task(name="traced.logs", retry=2)
    def logs_and_fails() -> None:
        logging.getLogger("shop").warning("in the handler")
        raise KeyError("sku")

    keep = Keep()
    logging.getLogger().addHandler(keep)
    try:
        with psycopg.connect(dsn) as conn:
            logs_and_fails.enqueue(conn)
        async with work(dsn, logs_and_fails):
            await until(lambda: spans.named("run traced.logs"))
    finally:
        logging.getLogger().removeHandler(keep)
    ids = {"trace_id": f"{trace_id(spans.one('run traced.logs')):032x}"}
    ids |= {"span_id": f"{span_id(spans.one('run traced.logs')):016x}"}
    [inside] = [line for line in lines if line["logger"] == "shop"]
    [after] = [line for line in lines if line["logger"] == "pgqueue.job"]
    assert {name: inside[name] for name in ids} == ids
    assert {name: after[name] for name in ids} == ids
    assert all("trace_id" not in line for line in lines if line["logger"] == "pgqueue")


@pytest.mark.promise("F175")
def test_lines_name_no_span_where_there_is_none_or_traces_are_off(spans: Spans) -> None:
    from pgqueue.logs import Json

    record = logging.makeLogRecord({"msg": "x"})
    assert "trace_id" not in json.loads(Json().format(record))
    with spans.tracer.start_as_current_span("request"):
        assert "trace_id" in json.loads(Json().format(record))
        otel.uninstrument()
        assert "trace_id" not in json.loads(Json().format(record))


@pytest.mark.promise("F132")
def test_a_misspelt_option_is_answered_with_the_one_that_is_meant() -> None:
    anything: Any = otel
    for word in ("tracer_provder", "propagater", "parrent"):
        with pytest.raises(pgqueue.errors.InvalidOption, match=rf"no option {word} \(did you mean \w+\?\)"):
            anything.instrument(**{word: 1})


# As opentelemetry-instrument does ------------------------------------------------------------------------------------


def test_it_is_found_as_other_instrumentations_are() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    made = EntryPoint("pgqueue", project["entry-points"]["opentelemetry_instrumentor"]["pgqueue"], "").load()
    assert made is otel.PgqueueInstrumentor
    instrumentor = made()
    instrumentor.instrument(skip_dep_check=True, raise_exception_on_conflict=True)
    assert len(observers.observers) == 1
    instrumentor.instrument()
    assert len(observers.observers) == 1
    instrumentor.uninstrument()
    assert observers.observers == []
