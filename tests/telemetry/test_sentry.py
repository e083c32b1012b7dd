"""What Sentry is told of jobs: read from envelopes that a transport of the tests keeps."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
import sentry_sdk
from driver_kinds import ASYNC, KINDS, drive
from sentry_sdk.consts import DEFAULT_OPTIONS
from sentry_sdk.envelope import Envelope
from sentry_sdk.transport import Transport
from workers import Eyes, until, work

import pgqueue
from pgqueue.client.observers import observers
from pgqueue.telemetry.check_ins import slug
from pgqueue.telemetry.sentry import PgqueueIntegration
from pgqueue.testing import Clock, drain

HIDDEN = "hunter2"


def collecting(queues: bool) -> dict[str, Any]:
    """The options that send what is in the messages of queues, or do not; variables of frames are not sent."""
    if "data_collection" in DEFAULT_OPTIONS:
        return {"data_collection": {"queues": queues, "stack_frame_variables": False}}
    return {"send_default_pii": queues, "include_local_variables": False}  # an older SDK


def crumbs(event: dict[str, Any]) -> list[str]:
    """What breadcrumbs of the event say, without those of programs that the tests have started."""
    return [each["message"] for each in event["breadcrumbs"]["values"] if each.get("category") != "subprocess"]


class Kept(Transport):
    """Keeps what the SDK sends."""

    def __init__(self) -> None:
        super().__init__()
        self.items: list[tuple[str, dict[str, Any]]] = []

    def capture_envelope(self, envelope: Envelope) -> None:
        for item in envelope.items:
            self.items.append((str(item.headers.get("type")), json.loads(item.get_bytes())))

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [payload for each, payload in list(self.items) if each == kind]

    def transactions(self, name: str) -> list[dict[str, Any]]:
        return [each for each in self.of("transaction") if each["transaction"] == name]


class Start:
    """Begins the SDK, with a transport that keeps."""

    def __call__(self, integration: PgqueueIntegration | None = None, **options: Any) -> Kept:
        kept = Kept()
        sentry_sdk.init(
            "https://key@localhost/1",
            transport=kept,
            traces_sample_rate=1.0,
            integrations=[integration or PgqueueIntegration()],
            auto_enabling_integrations=False,
            **{"release": "1", **options},  # else an older SDK asks git for it, and events say so
        )
        PgqueueIntegration.setup_once()  # the SDK calls it for the first client only
        return kept


@pytest.fixture
def start() -> Iterator[Start]:
    with sentry_sdk.isolation_scope():
        yield Start()
        sentry_sdk.init()
        observers.clear()


@pytest.fixture
def kept(start: Start) -> Kept:
    return start()


@pytest.mark.parametrize("integration", [PgqueueIntegration()])
def test_it_is_an_integration_of_the_sdk(start: Start, integration: PgqueueIntegration) -> None:
    start(integration)
    assert sentry_sdk.get_client().get_integration("pgqueue") is integration
    assert [type(each).__name__ for each in observers] == ["Reporting"]
    start(integration)
    assert len(observers) == 1


@pgqueue.task(name="sentry.plain")
def plain(n: int = 0) -> int:
    return n


@pgqueue.task(name="sentry.fails", retry=pgqueue.RetryPolicy(attempts=2, first=60, factor=1))
def fails(order: int, password: str = "hunter2") -> None:
    sentry_sdk.add_breadcrumb(message=f"order {order}")
    raise KeyError(f"order {order}")


@pgqueue.task(name="sentry.fails_on_loop", retry=1)
async def fails_on_loop(order: int) -> None:
    sentry_sdk.set_tag("order", str(order))
    raise KeyError(f"order {order}")


# Traces --------------------------------------------------------------------------------------------------------------


@pytest.mark.promise("F176")
@pytest.mark.parametrize("kind", [each for each in KINDS if "-" not in each])
def test_an_enqueue_is_a_span_of_its_request_and_the_trace_goes_on(kind: str, dsn: str, eyes: Eyes, kept: Kept) -> None:
    async def scenario() -> None:
        async with KINDS[kind](dsn, False) as app:
            with sentry_sdk.start_transaction(op="http.server", name="request"):
                await plain.aenqueue(app.conn, 7) if kind in ASYNC else plain.enqueue(app.conn, 7)
            await app.commit()

    drive(kind, scenario())
    [request] = kept.transactions("request")
    [span] = [each for each in request["spans"] if each["op"] == "queue.publish"]
    assert (span["description"], span["origin"]) == ("sentry.plain", "auto.queue.pgqueue")
    assert {name: value for name, value in span["data"].items() if name.startswith("messaging")} == {
        "messaging.system": "pgqueue", "messaging.destination.name": "default", "messaging.message.id": "1",
        "messaging.message.body.size": 7,
    }  # fmt: skip
    headers = eyes.one("SELECT headers FROM pgqueue.job")
    assert headers["sentry-trace"] == f"{request['contexts']['trace']['trace_id']}-{span['span_id']}-1"
    assert "sentry-trace_id" in headers["baggage"]


@pytest.mark.promise("F176")
async def test_an_attempt_is_a_transaction_in_the_trace_of_its_enqueue(dsn: str, eyes: Eyes, kept: Kept) -> None:
    with sentry_sdk.start_transaction(name="request"), psycopg.connect(dsn) as conn:
        plain.enqueue(conn)
        fails.enqueue(conn, 7)
    async with work(dsn, plain, fails):
        await until(lambda: kept.transactions("sentry.plain") and kept.transactions("sentry.fails"))
    [request], [run], [retried] = (kept.transactions(each) for each in ("request", "sentry.plain", "sentry.fails"))
    spans = {span["description"]: span for span in request["spans"] if span["op"] == "queue.publish"}
    trace = run["contexts"]["trace"]
    assert trace["op"] == "queue.process" and trace["status"] == "ok"
    assert trace["trace_id"] == request["contexts"]["trace"]["trace_id"]
    assert trace["parent_span_id"] == spans["sentry.plain"]["span_id"]
    assert trace["data"]["messaging.message.id"] == "1"
    assert trace["data"]["messaging.destination.name"] == "default"
    assert 0 <= trace["data"]["messaging.message.receive.latency"] < 60_000
    assert trace["data"]["messaging.message.retry.count"] == 0
    assert retried["contexts"]["trace"]["status"] == "internal_error"
    assert retried["contexts"]["trace"]["data"]["pgqueue.outcome"] == "retried"


@pytest.mark.promise("F176")
def test_jobs_of_jobs_and_batches(conn: psycopg.Connection[Any], kept: Kept) -> None:
    @pgqueue.task(name="sentry.nests", transactional=True)
    def nests(job: pgqueue.Job) -> None:
        job.enqueue(plain)
        pgqueue.enqueue_many(job.connection, [plain.new(1), plain.new(2)])

    nests.enqueue(conn)  # outside of a transaction there is no span, and yet a trace
    assert drain(conn).completed == 4
    [outer] = kept.transactions("sentry.nests")
    spans = {span["span_id"] for span in outer["spans"] if span["op"] == "queue.publish"}
    runs = kept.transactions("sentry.plain")
    assert len(spans) == 2 and len(runs) == 3
    assert {run["contexts"]["trace"]["parent_span_id"] for run in runs} == spans


# Errors --------------------------------------------------------------------------------------------------------------


@pytest.mark.promise("F176")
@pytest.mark.parametrize("each_attempt", [False, True])
def test_an_error_is_an_event_when_the_job_has_failed_for_good(
    each_attempt: bool, conn: psycopg.Connection[Any], start: Start
) -> None:
    kept = start(PgqueueIntegration(each_attempt=each_attempt))
    handle = fails.enqueue(conn, 7)
    with Clock(conn) as clock:
        drain(conn, clock)
    events = kept.of("event")
    assert [event["contexts"]["pgqueue"]["attempt"] for event in events] == ([1, 2] if each_attempt else [2])
    assert [event["level"] for event in events] == (["warning", "error"] if each_attempt else ["error"])
    event = events[-1]
    assert event["tags"] | {"status": ""} == {
        "pgqueue.job_id": str(handle.id), "pgqueue.task": "sentry.fails", "pgqueue.queue": "default",
        "pgqueue.attempt": "2", "status": "",
    }  # fmt: skip
    assert event["transaction"] == "sentry.fails"
    [value] = event["exception"]["values"]
    assert (value["type"], value["mechanism"]) == ("KeyError", {"type": "pgqueue", "handled": False})
    assert crumbs(event) == ["order 7"]
    assert "arguments" not in event["contexts"]["pgqueue"]
    runs = kept.transactions("sentry.fails")
    assert event["contexts"]["trace"]["trace_id"] == runs[-1]["contexts"]["trace"]["trace_id"]
    assert event["contexts"]["trace"]["span_id"] == runs[-1]["contexts"]["trace"]["span_id"]


@pytest.mark.promise("F176")
async def test_a_worker_says_it_once(dsn: str, eyes: Eyes, kept: Kept) -> None:
    """The SDK makes an event of each line of level ERROR, too: those of jobs are left out."""
    with psycopg.connect(dsn) as conn:
        fails_on_loop.enqueue(conn, 7)
    async with work(dsn, fails_on_loop):
        await until(lambda: eyes.states() == {"failed": 1})
        await until(lambda: kept.transactions("sentry.fails_on_loop"))
    [event] = kept.of("event")
    assert event["tags"]["order"] == "7"
    frames = event["exception"]["values"][0]["stacktrace"]["frames"]
    assert [frame["function"] for frame in frames if frame["in_app"]] == ["fails_on_loop"]


@pytest.mark.promise("F176")
def test_arguments_are_in_events_only_if_wanted_and_without_secrets(
    conn: psycopg.Connection[Any], start: Start
) -> None:
    @pgqueue.task(name="sentry.secret", retry=1)
    def secret(order: int, password: str, more: dict[str, Any]) -> None:
        raise KeyError("sku")

    found = []
    wanted = PgqueueIntegration(arguments=True)
    unwanted = PgqueueIntegration(arguments=False)
    for integration, queues in ((None, False), (None, True), (wanted, False), (unwanted, True)):
        kept = start(integration, **collecting(queues))
        secret.enqueue(conn, 7, HIDDEN, more={"list": [{"token": "t0k3n", "n": 1}]})
        drain(conn)
        [event] = kept.of("event")
        found.append(event["contexts"]["pgqueue"].get("arguments"))
        assert HIDDEN not in json.dumps(event)
        assert "t0k3n" not in json.dumps(event["contexts"])
    shown = {"order": 7, "password": "[Filtered]", "more": {"list": [{"token": "[Filtered]", "n": 1}]}}
    assert found == [None, shown, shown, None]


@pytest.mark.promise("F176")
def test_variables_of_our_frames_are_not_sent(conn: psycopg.Connection[Any], kept: Kept) -> None:
    """They hold the arguments of the job: the SDK sends variables of frames, and looks for secrets by their names."""
    fails.using(retry=1).enqueue(conn, 7)
    drain(conn)
    [event] = kept.of("event")
    frames = event["exception"]["values"][0]["stacktrace"]["frames"]
    assert [frame["function"] for frame in frames if "vars" in frame] == ["fails"]
    assert {frame["module"].partition(".")[0] for frame in frames} == {"pgqueue", "tests"}


@pytest.mark.promise("F176")
async def test_errors_without_an_exception_are_events_too(dsn: str, eyes: Eyes, kept: Kept) -> None:
    @pgqueue.task(name="sentry.slow", timeout=0.1, retry=1)
    async def slow() -> None:
        await asyncio.sleep(60)

    @pgqueue.task(name="sentry.gives_up")
    def gives_up() -> pgqueue.Fail:
        return pgqueue.Fail("no such order")

    with psycopg.connect(dsn) as conn:
        slow.enqueue(conn)
        gives_up.enqueue(conn)
        conn.execute(
            "INSERT INTO pgqueue.job (task, args, enqueued_at) "
            "VALUES ('sentry.plain', '{\"x\": 1}', now() - interval '2 hours')"
        )
    async with work(dsn, slow, gives_up, plain):
        await until(lambda: len(kept.of("event")) == 3)
    values = {event["tags"]["pgqueue.task"]: event["exception"]["values"][0] for event in kept.of("event")}
    assert {name: value["type"] for name, value in values.items()} == {
        "sentry.slow": "JobTimeout", "sentry.gives_up": "Fail", "sentry.plain": "InvalidArguments",
    }  # fmt: skip
    assert values["sentry.gives_up"]["value"] == "no such order"
    assert "0.1 s" in values["sentry.slow"]["value"]


@pytest.mark.promise("F176")
def test_what_ends_a_job_on_purpose_is_no_error(conn: psycopg.Connection[Any], kept: Kept) -> None:
    @pgqueue.task(name="sentry.ends")
    def ends(how: str) -> None:
        raise pgqueue.Cancel("no") if how == "cancel" else pgqueue.Snooze(60)

    ends.enqueue(conn, "cancel")
    ends.enqueue(conn, "snooze")
    drain(conn)
    assert kept.of("event") == []
    assert [each["contexts"]["trace"]["status"] for each in kept.transactions("sentry.ends")] == ["cancelled", "ok"]


@pytest.mark.promise("F176")
async def test_what_one_job_sets_is_in_no_event_of_another(dsn: str, eyes: Eyes, kept: Kept) -> None:
    """Jobs run side by side, in threads and on the loop. One global scope would give each the tags of the last."""
    together, count, met = threading.Barrier(2), [0], asyncio.Event()

    @pgqueue.task(name="sentry.thread", retry=1)
    def in_thread(n: int) -> None:
        sentry_sdk.set_tag("mine", str(n))
        sentry_sdk.set_tag(f"only.{n}", "yes")
        sentry_sdk.add_breadcrumb(message=f"crumb {n}")
        together.wait(30)
        raise KeyError(n)

    @pgqueue.task(name="sentry.loop", retry=1)
    async def on_loop(n: int) -> None:
        sentry_sdk.set_tag("mine", str(n))
        sentry_sdk.set_tag(f"only.{n}", "yes")
        sentry_sdk.add_breadcrumb(message=f"crumb {n}")
        count[0] += 1
        if count[0] == 2:
            met.set()
        await asyncio.wait_for(met.wait(), 30)
        raise KeyError(n)

    sentry_sdk.set_tag("process", "all")
    with psycopg.connect(dsn) as conn:
        for n, task in enumerate((in_thread, in_thread, on_loop, on_loop)):
            task.enqueue(conn, n)
    async with work(dsn, in_thread, on_loop, concurrency=4):
        await until(lambda: len(kept.of("event")) == 4)
    seen = set()
    for event in kept.of("event"):
        n = event["exception"]["values"][0]["value"]
        seen.add(n)
        assert event["tags"]["mine"] == n
        assert event["tags"]["process"] == "all"
        assert [tag for tag in event["tags"] if tag.startswith("only.")] == [f"only.{n}"]
        assert crumbs(event) == [f"crumb {n}"]
    assert seen == {"0", "1", "2", "3"}
    sentry_sdk.capture_message("outside")
    assert "mine" not in kept.of("event")[-1]["tags"]


@pytest.mark.promise("F173")
@pytest.mark.parametrize(
    "headers",
    [{"sentry-trace": 5, "baggage": []}, {"sentry-trace": "x" * 9_000}, {"sentry-trace": "-", "baggage": "=,;"}, [1]],
    ids=lambda each: str(each)[:30],
)
async def test_headers_that_are_not_ours_harm_no_job(headers: Any, dsn: str, eyes: Eyes, kept: Kept) -> None:
    eyes.do("INSERT INTO pgqueue.job (task, headers) VALUES ('sentry.plain', %s::jsonb)", json.dumps(headers))
    async with work(dsn, plain):
        await until(eyes.done(1))
        await until(lambda: kept.transactions("sentry.plain"))


TRACE = {"sentry-trace": "0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-1"}
TICK = {"pgqueue:schedule": "s", "pgqueue:zone": "UTC"}


@pgqueue.task(name="sentry.customer", retry=1)
async def customer(name: str) -> None:
    if name:
        sentry_sdk.set_user({"id": name})
        sentry_sdk.get_isolation_scope().set_tag("customer", name)
    raise ValueError(name)


@pytest.mark.promise("F173", "F176")
@pytest.mark.parametrize(
    "headers",
    [
        TRACE | {"baggage": "sentry-sample_rate=1e400"},
        *(TICK | {"pgqueue:line": f"every {n}"} for n in ("x", "", "nan", "inf", "0", "-60", "1e300")),
    ],
    ids=lambda each: list(each.values())[-1],
)
async def test_no_header_hides_an_error_or_puts_a_customer_into_the_event_of_another_job(
    headers: Any, dsn: str, eyes: Eyes, kept: Kept
) -> None:
    insert = "INSERT INTO pgqueue.job (task, args, headers, max_attempts) VALUES ('sentry.customer', %s, %s, 1)"
    async with work(dsn, customer, concurrency=1):
        eyes.do(insert, json.dumps({"name": "first"}), json.dumps(headers))
        await until(lambda: len(kept.of("event")) == 1)
        eyes.do(insert, json.dumps({"name": ""}), "{}")
        await until(lambda: len(kept.of("event")) == 2)
    first, second = kept.of("event")
    assert (first["user"]["id"], first["tags"]["customer"]) == ("first", "first")
    assert "id" not in second.get("user", {}) and "customer" not in second["tags"]
    assert [each["tags"].get("customer") for each in kept.transactions("sentry.customer")] == ["first", None]
    assert all(not each.get("monitor_config") for each in kept.of("check_in"))


@pytest.mark.promise("F173")
def test_a_hook_of_the_sdk_that_raises_harms_no_job(conn: psycopg.Connection[Any], start: Start) -> None:
    def raises(event: Any, hint: Any) -> Any:
        raise RuntimeError("no")

    start(before_send=raises, before_send_transaction=raises)
    plain.enqueue(conn)
    fails_on_loop.enqueue(conn, 7)
    done = drain(conn)
    assert (done.completed, done.failed) == (1, 1)


@pytest.mark.promise("F174")
def test_without_the_integration_nothing_is_told(conn: psycopg.Connection[Any], start: Start) -> None:
    start()
    kept = Kept()
    sentry_sdk.init("https://key@localhost/1", transport=kept, traces_sample_rate=1.0, default_integrations=False)
    handle = fails_on_loop.enqueue(conn, 7)
    drain(conn)
    assert kept.items == []
    assert pgqueue.get(conn, handle.id).headers is None


# Crons ---------------------------------------------------------------------------------------------------------------


@pytest.mark.promise("F177")
async def test_a_job_of_a_schedule_checks_in(dsn: str, eyes: Eyes, start: Start) -> None:
    kept = start(PgqueueIntegration(checkin_margin="5m", max_runtime=90))

    @pgqueue.task(name="sentry.tick", retry=pgqueue.RetryPolicy(attempts=2, first=0.01, factor=1))
    def tick(fail: bool) -> None:
        if fail:
            raise KeyError("sku")

    with psycopg.connect(dsn) as conn:
        pgqueue.schedules.add(conn, "report:7", pgqueue.Cron("0 6 * * MON", tz="Europe/Berlin"), tick, False)
        pgqueue.schedules.add(conn, "broken", pgqueue.Every("15m"), tick, True)
        pgqueue.schedules.run(conn, "report:7")
        pgqueue.schedules.run(conn, "broken")
        tick.enqueue(conn, False)
    async with work(dsn, tick):
        await until(lambda: len(kept.of("check_in")) == 4 and eyes.states() == {"completed": 2, "failed": 1})
    found: dict[str, list[dict[str, Any]]] = {}
    for each in kept.of("check_in"):
        found.setdefault(each["monitor_slug"], []).append(each)
    assert {name: [each["status"] for each in them] for name, them in found.items()} == {
        "report-7": ["in_progress", "ok"],
        "broken": ["in_progress", "error"],
    }
    for began, ended in found.values():
        assert began["check_in_id"] == ended["check_in_id"]
        assert began["monitor_config"] == ended["monitor_config"]
    assert found["report-7"][0]["monitor_config"] == {
        "schedule": {"type": "crontab", "value": "0 6 * * MON"},
        "timezone": "Europe/Berlin", "checkin_margin": 5, "max_runtime": 2,
    }  # fmt: skip
    assert found["broken"][0]["monitor_config"]["schedule"] == {"type": "interval", "value": 15, "unit": "minute"}
    assert found["report-7"][1]["duration"] >= 0


@pytest.mark.promise("F177")
async def test_a_tick_that_the_leader_makes_checks_in_with_its_line(dsn: str, eyes: Eyes, kept: Kept) -> None:
    @pgqueue.task(name="sentry.declared", schedule=pgqueue.Every(60))
    def declared() -> None: ...

    async with work(dsn, declared):
        await until(lambda: eyes.one("SELECT next_at IS NOT NULL FROM pgqueue.schedule"))
        eyes.do("UPDATE pgqueue.schedule SET next_at = next_at - interval '60 seconds'")
        eyes.do("NOTIFY \"pgqueue.:scheduled\", 'schedules'")
        await until(lambda: len(kept.of("check_in")) >= 2)
    first = kept.of("check_in")[0]
    assert first["monitor_slug"] == "sentry-declared"
    assert first["monitor_config"]["schedule"] == {"type": "interval", "value": 1, "unit": "minute"}


@pytest.mark.promise("F177")
def test_without_check_ins_there_are_none(conn: psycopg.Connection[Any], start: Start) -> None:
    kept = start(PgqueueIntegration(check_ins=False))
    pgqueue.schedules.add(conn, "report", pgqueue.Every(60), plain)
    pgqueue.schedules.run(conn, "report")
    assert drain(conn).completed == 1
    assert kept.of("check_in") == []


@pytest.mark.promise("F177")
@pytest.mark.parametrize("name", ["a" * 200, "Übersicht täglich", "x:y", "report.daily", ":", "日報", "-"])
def test_a_slug_is_one_that_sentry_takes(name: str) -> None:
    made = slug(name)
    assert 0 < len(made) <= 50 and made.isascii()
    assert made == slug(name)
    assert set(made) <= set("abcdefghijklmnopqrstuvwxyz0123456789-_")


@pytest.mark.promise("F132")
def test_a_misspelt_option_is_answered_with_the_one_that_is_meant() -> None:
    anything: Any = PgqueueIntegration
    for word in ("each_atempt", "argments", "checkin_margn"):
        with pytest.raises(pgqueue.errors.InvalidOption, match=rf"no option {word} \(did you mean \w+\?\)"):
            anything(**{word: 1})
    with pytest.raises(pgqueue.errors.InvalidOption, match="checkin_margin"):
        PgqueueIntegration(checkin_margin="soon")
