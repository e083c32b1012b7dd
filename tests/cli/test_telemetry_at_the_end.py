"""What telemetry keeps back is sent before `pgqueue work` ends, and keeps no process from its end."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from time import monotonic

import pytest
import threadless
from commands import Worker, pgqueue, working
from workers import Eyes, wait_until

HARNESS = str(Path(threadless.__file__).parent)
APP = """
import asyncio, json, os, pathlib, sys, threading, time
import sentry_sdk
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from sentry_sdk.transport import Transport
import pgqueue
from pgqueue.telemetry import otel
from pgqueue.telemetry.sentry import PgqueueIntegration
from pgqueue.worker.run import threads
from threadless import no_threads

threads.START_SECONDS, threads.AGAIN_SECONDS, threads.STARVED_SECONDS = 0.3, 0.2, 1.0
FAULT = os.environ.get("FAULT")

def kept(name: str, what: object) -> None:
    with open(name, "a") as file:
        file.write(json.dumps(what) + chr(10))

def fails() -> None:
    if FAULT == "hangs":
        time.sleep(600)
    if FAULT == "exits":
        raise SystemExit(3)

class ToFile(SpanExporter):
    def export(self, spans):
        fails()
        for span in spans:
            kept("spans", [span.name, dict(span.attributes).get("pgqueue.outcome")])
        return SpanExportResult.SUCCESS

class Late(Transport):
    '''Keeps everything until it is flushed.'''
    items = []
    def capture_envelope(self, envelope):
        self.items += envelope.items
    def flush(self, timeout, callback=None):
        fails()
        for item in self.items:
            said = json.loads(item.get_bytes())
            task = (said.get("tags") or {}).get("pgqueue.task")
            kept("reports", [item.headers["type"], said.get("transaction"), task])
        self.items.clear()

otel.instrument()  # before there is a provider
provider = TracerProvider()
provider.add_span_processor(BatchSpanProcessor(ToFile(), schedule_delay_millis=600_000))
trace.set_tracer_provider(provider)
sentry_sdk.init("https://key@localhost/1", transport=Late(), traces_sample_rate=1.0,
    integrations=[PgqueueIntegration()], auto_enabling_integrations=False)

@pgqueue.task(name="ends")
async def ends() -> None:
    pass

@pgqueue.task(name="leaves", timeout=600)
async def leaves() -> None:
    pathlib.Path("asleep").touch()
    await asyncio.sleep(600)

@pgqueue.task(name="fails", retry=1)
def fails_() -> None:
    raise KeyError("sku")

@pgqueue.task(name="deaf", timeout=600)
async def deaf() -> None:
    pathlib.Path("begun").touch()
    while True:
        try:
            await asyncio.sleep(0.01)
        except BaseException:
            continue

@pgqueue.task(name="strays")
async def strays() -> None:
    threading.Thread(target=time.sleep, args=[600], name="strayed").start()

@pgqueue.task(name="lost", timeout=0.2)
def lost() -> None:
    while True:
        try:
            time.sleep(0.01)
        except BaseException:
            continue

@pgqueue.task(name="limits", timeout=600)
async def limits(way: str) -> None:
    with no_threads(way):
        await deaf.fn()
"""
pytestmark = [pytest.mark.second, pytest.mark.promise("F240")]


@pytest.fixture
def app(tmp_path: Path) -> Path:
    (tmp_path / "shop.py").write_text(APP)
    return tmp_path


def said(app: Path, name: str) -> list[list[str]]:
    file = app / name
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


SENT = [["run ends", "completed"], ["run fails", "failed"], ["run leaves", "released"], ["run deaf", "released"]]
REPORTED = [["event", "fails", "fails"], *(["transaction", name, name] for name in ("ends", "fails", "leaves", "deaf"))]


def at_work(one: Worker, app: Path, eyes: Eyes, dsn: str) -> None:
    """Two jobs have ended, two run, of which one leaves when it is stopped."""
    for task in ("ends", "fails", "leaves", "deaf"):
        pgqueue("enqueue", task, dsn=dsn)
    wait_until(lambda: (app / "begun").exists() and (app / "asleep").exists())
    wait_until(lambda: eyes.states().keys() >= {"completed", "failed"})


def test_at_the_end_by_the_deadline_it_is_sent_with_the_attempts_that_were_stopped(
    dsn: str, app: Path, eyes: Eyes
) -> None:
    with working("shop", "--grace", "300ms", dsn=dsn, cwd=app, PYTHONPATH=HARNESS) as one:
        at_work(one, app, eyes, dsn)
        assert not said(app, "spans") + said(app, "reports")
        one.signal(signal.SIGTERM)
        assert one.ends() == 5
    assert sorted(said(app, "spans")) == sorted(SENT)
    reports = said(app, "reports")
    assert all(each in reports for each in REPORTED)
    assert eyes.states() == {"completed": 1, "failed": 1, "available": 2}


@pytest.mark.parametrize("fault", ["hangs", "exits"])
def test_what_hangs_or_raises_anything_keeps_the_process_for_its_seconds_only(
    fault: str, dsn: str, app: Path, eyes: Eyes
) -> None:
    with working("shop", "--grace", "300ms", dsn=dsn, cwd=app, PYTHONPATH=HARNESS, FAULT=fault) as one:
        at_work(one, app, eyes, dsn)
        one.signal(signal.SIGTERM)
        began = monotonic()
        assert one.ends() == 5
        assert monotonic() - began < 10, "not the deadline of the process, which is 19.8 s"
        one.says("Tracing, Reporting" if fault == "hangs" else "Reporting failed")
    assert eyes.states() == {"completed": 1, "failed": 1, "available": 2}
    assert eyes.all("SELECT id FROM pgqueue.worker") == []


@pytest.mark.parametrize("way", ["refused", "stillborn"])
def test_if_no_thread_can_be_had_the_process_ends_all_the_same(way: str, dsn: str, app: Path, eyes: Eyes) -> None:
    with working("shop", "--grace", "300ms", dsn=dsn, cwd=app, PYTHONPATH=HARNESS) as one:
        pgqueue("enqueue", "ends", dsn=dsn)
        wait_until(eyes.done(1))
        pgqueue("enqueue", "limits", f'{{"way": "{way}"}}', dsn=dsn)
        wait_until((app / "begun").exists)
        one.signal(signal.SIGTERM)
        began = monotonic()
        assert one.ends() == 5
        assert monotonic() - began < 10, "not the deadline of the process, which is 19.8 s"
        if way == "refused":
            one.says("Tracing, Reporting")
    assert (["run limits", "released"] in said(app, "spans")) is (way == "stillborn")
    assert eyes.states() == {"completed": 1, "available": 1}


@pytest.mark.parametrize(("fault", "task"), [("", "ends"), ("", "strays"), ("hangs", "ends")])
def test_after_an_orderly_stop_it_is_sent_too_and_a_thread_that_is_left_keeps_nothing(
    fault: str, task: str, dsn: str, app: Path, eyes: Eyes
) -> None:
    with working("shop", dsn=dsn, cwd=app, PYTHONPATH=HARNESS, FAULT=fault) as one:
        pgqueue("enqueue", task, dsn=dsn)
        wait_until(eyes.done(1))
        one.signal(signal.SIGTERM)
        began = monotonic()
        assert one.ends() == 0
        assert monotonic() - began < 10
        if task == "strays":
            one.says("thread strayed at ")
    assert said(app, "spans") == ([] if fault else [[f"run {task}", "completed"]])
    assert said(app, "reports") == ([] if fault else [["transaction", task, task]])


def test_a_process_that_ends_to_be_replaced_sends_it(dsn: str, app: Path, eyes: Eyes) -> None:
    with working("shop", "--concurrency", "2", dsn=dsn, cwd=app, PYTHONPATH=HARNESS) as one:
        for task in ("ends", "lost"):
            pgqueue("enqueue", task, dsn=dsn)
        assert one.ends() == 6
    assert ["run ends", "completed"] in said(app, "spans")
    assert ["transaction", "ends", "ends"] in said(app, "reports")
