"""What is exported, as the parser of Prometheus's own client reads it; and the app that serves it."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from dashboards import browsing
from prometheus_client.parser import text_string_to_metric_families
from workers import Eyes, until, work

import pgqueue
from pgqueue.client.tasks import task
from pgqueue.jobs.histogram import BOUNDS
from pgqueue.jobs.totals import Numbers, Sample
from pgqueue.telemetry.metrics import BUCKETS, COUNTER, GAUGE, HISTOGRAM, METRICS
from pgqueue.telemetry.scrape import Scrape

Values = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def values(text: str) -> Values:
    """By name and labels, what a scrape has said."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def of(found: Values, name: str, **labels: str) -> float:
    return found[name, tuple(sorted(labels.items()))]


def answered(numbers: Numbers) -> Future[Numbers]:
    made: Future[Numbers] = Future()
    made.set_result(numbers)
    return made


def scraped(numbers: Numbers, gauges: list[Sample] | None = None) -> Values:
    scrape = Scrape(lambda: answered(numbers), lambda leads: gauges or [])
    return values(scrape.text("")[0].decode())


def test_buckets_are_bounds_of_the_history_from_5_ms_to_30_minutes() -> None:
    assert set(BUCKETS) <= set(BOUNDS) and (BUCKETS[0], BUCKETS[-1]) == (0.005, 1800.0)


def test_names_follow_the_customs_of_prometheus() -> None:
    for metric in METRICS:
        assert metric.name.startswith("pgqueue_") and metric.help.endswith(".")
        assert metric.name.endswith("_total") == (metric.kind == COUNTER)
        assert metric.kind in (COUNTER, HISTOGRAM, GAUGE)
        assert metric.kind != HISTOGRAM or metric.name.endswith("_seconds")


@pytest.mark.promise("F164")
def test_times_are_counted_below_the_bounds_that_they_do_not_exceed() -> None:
    numbers = Numbers()
    counts = numbers.totals.of("mail", "send")
    counts.happened["completed"] = 4
    for seconds in (0.004, 0.006, 1801.0, 90_000.0):
        counts.run[next((place for place, bound in enumerate(BOUNDS) if seconds <= bound), len(BOUNDS))] += 1
        counts.run_seconds += seconds
    found = scraped(numbers)
    below = [of(found, "pgqueue_job_run_seconds_bucket", queue="mail", task="send", le=str(le)) for le in BUCKETS]
    assert below == [1.0] + [2.0] * (len(BUCKETS) - 1)
    assert of(found, "pgqueue_job_run_seconds_count", queue="mail", task="send") == 4
    assert of(found, "pgqueue_job_run_seconds_sum", queue="mail", task="send") == pytest.approx(91_801.01)
    assert of(found, "pgqueue_jobs_total", queue="mail", task="send", outcome="completed") == 4


@pytest.mark.promise("F165")
def test_a_worker_that_does_not_answer_is_shown_as_it_was_and_without_gauges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pgqueue.telemetry.scrape.ANSWER_SECONDS", 0.01)
    monkeypatch.setattr("pgqueue.telemetry.scrape.SAME_SECONDS", 0.0)
    numbers = Numbers(leads=True, gauges=[("pgqueue_workers_alive", {}, 1)])
    numbers.totals.of("mail", "send").happened["completed"] = 4
    answers = [answered(numbers), Future[Numbers]()]
    scrape = Scrape(lambda: answers.pop(0), lambda leads: [])
    first, second = (values(scrape.text("")[0].decode()) for _ in range(2))
    assert of(first, "pgqueue_workers_alive") == 1 and ("pgqueue_workers_alive", ()) not in second
    assert of(second, "pgqueue_jobs_total", queue="mail", task="send", outcome="completed") == 4


def test_scrapes_within_a_second_get_the_same_text_in_either_format() -> None:
    asked: list[int] = []

    def ask() -> Future[Numbers]:
        asked.append(1)
        return answered(Numbers())

    scrape = Scrape(ask, lambda leads: [])
    plain, kind = scrape.text("")
    assert scrape.text("text/plain") == (plain, kind) and kind.startswith("text/plain")
    metrics, other = scrape.text("application/openmetrics-text;version=1.0.0")
    assert other.startswith("application/openmetrics-text") and metrics.endswith(b"# EOF\n") and len(asked) == 1


@pytest.mark.promise("F164")
async def test_a_workers_numbers_grow_over_its_minutes_and_are_those_of_the_history(dsn: str, eyes: Eyes) -> None:
    @task(name="count.once")
    async def once(fails: bool = False) -> None:
        if fails:
            raise pgqueue.Cancel("no")

    async with work(dsn, once) as worker:
        with psycopg.connect(dsn, autocommit=True) as conn:
            for fails in (False, True):
                once.enqueue(conn, fails)
            await until(lambda: eyes.one("SELECT count(*) FROM pgqueue.job WHERE finished_at IS NOT NULL") == 2)
            await until(lambda: worker.vitals().ended == 2)
            before = worker.numbers()
            await worker.services.counters.write_rest()  # its minute is over
            assert worker.numbers().totals.tasks.keys() == before.totals.tasks.keys()
            once.enqueue(conn)
            await until(lambda: worker.vitals().ended == 3)
        numbers = await asyncio.wrap_future(worker.ask_numbers())
        counts = numbers.totals.tasks["default", "count.once"]
        assert counts.happened == {"completed": 2, "cancelled": 1}
        assert sum(counts.run) == sum(counts.wait) == 3
        assert sum(numbers.totals.claims.counts) >= 2 and sum(numbers.totals.flushes.counts) >= 2
        assert numbers.slots == {"busy": 0, "free": worker.settings.concurrency, "lost": 0}
    stopped = await asyncio.wrap_future(worker.ask_numbers())
    assert stopped.totals.tasks["default", "count.once"].happened == counts.happened
    assert not stopped.leads
    assert eyes.happened("completed") == 2


def test_a_worker_that_was_not_started_has_counted_nothing() -> None:
    assert pgqueue.Worker(dsn="host=/nowhere", tasks=[]).ask_numbers().result(0) == Numbers()


# The app -------------------------------------------------------------------------------------------------------------


async def test_the_app_answers_where_it_is_mounted_and_nowhere_else() -> None:
    worker = pgqueue.Worker(dsn="host=/nowhere", tasks=[])
    app: Any = pgqueue.telemetry.asgi(worker)
    async with browsing(app) as browser:
        for path in ("/metrics", "/", "/metrics/"):
            answer = await browser.get(path)
            assert answer.status_code == 200 and "pgqueue_fenced_total 0.0" in answer.text
        head = await browser.head("/metrics")
        assert (head.status_code, head.content) == (200, b"") and int(head.headers["content-length"]) > 100
        assert (await browser.post("/metrics")).status_code == 405
        assert (await browser.get("/metrics/jobs")).status_code == 404


@pytest.mark.promise("F167")
async def test_the_app_of_a_worker_that_leads_reads_the_workers_own_database(dsn: str) -> None:
    pgqueue.configure(dsn="host=/nowhere")
    async with work(dsn) as worker:
        app: Any = pgqueue.telemetry.asgi(worker)
        await until(lambda: worker.services.election.leads())
        async with browsing(app) as browser:
            found = values((await browser.get("/metrics")).text)
        assert of(found, "pgqueue_workers_alive") == 1 and of(found, "pgqueue_fenced_total") == 0

        async def receive() -> dict[str, Any]:
            return {"type": "lifespan.shutdown"}

        async def send(event: dict[str, Any]) -> None:
            pass

        await app({"type": "lifespan"}, receive, send)  # closes its connection


@pytest.mark.promise("F165")
async def test_the_app_answers_while_the_application_holds_all_threads_of_the_loop() -> None:
    app: Any = pgqueue.telemetry.asgi(pgqueue.Worker(dsn="host=/nowhere", tasks=[]))
    held = threading.Event()
    with ThreadPoolExecutor(1) as threads:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(threads)
        holding = loop.run_in_executor(None, held.wait)
        try:
            async with asyncio.timeout(10), browsing(app) as browser:
                assert "pgqueue_fenced_total 0.0" in (await browser.get("/metrics")).text
        finally:
            held.set()
            await holding


async def test_without_a_worker_the_app_shows_the_gauges(dsn: str) -> None:
    pgqueue.configure(dsn=dsn)
    app: Any = pgqueue.telemetry.asgi()
    events = [{"type": "lifespan.shutdown"}, {"type": "lifespan.startup"}]

    async def receive() -> dict[str, Any]:
        return events.pop()

    async with browsing(app) as browser:
        found = values((await browser.get("/metrics")).text)
    assert of(found, "pgqueue_workers_alive") == 0 and ("pgqueue_fenced_total", ()) not in found

    async def send(event: dict[str, Any]) -> None:
        pass

    await app({"type": "lifespan"}, receive, send)  # closes its connection
