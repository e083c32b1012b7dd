"""The streams of events: what they say and how often, for which visitors, and that nothing is left of them."""

from __future__ import annotations

import asyncio
import urllib.request
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
from dashboards import OPERATOR_SECRET, READER_SECRET, SAME_SITE, bearer, browsing, dashboard_of, signed_in
from servers import Server
from standby import catch_up, standby
from streams import Stream, streaming
from web_processes import READER, serving
from workers import Eyes, until, work

import pgqueue
from pgqueue import Unique
from pgqueue.client.tasks import task
from pgqueue.database import migrations
from pgqueue.web import connections, listener, live
from pgqueue.web.access import OPERATOR

READS = bearer(READER_SECRET)
SESSIONS = "SELECT count(*) FROM pg_stat_activity WHERE application_name = "
CONNECTED = f"{SESSIONS}'pgqueue web listen'"
LISTENS = f"{CONNECTED} AND query LIKE 'LISTEN%%'"
LOOKED = f"{SESSIONS}'pgqueue web' AND state = 'idle' AND query = 'COMMIT'"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The listener does not wait for the next stream, and looks often."""
    monkeypatch.setattr(live, "LINGER_SECONDS", 0.0)
    monkeypatch.setattr(listener, "LOOK_SECONDS", 0.1)


async def listens(eyes: Eyes) -> None:
    await until(lambda: eyes.one(LISTENS) == 1)


async def has_looked(eyes: Eyes) -> None:
    await until(lambda: eyes.one(LOOKED))


@pytest.mark.promise("F154")
async def test_a_new_job_is_pushed_at_once(dsn: str, eyes: Eyes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "LOOK_SECONDS", 60.0)  # no look helps
    async with dashboard_of(dsn) as made, streaming(made, READS) as stream:
        assert stream.status == 200
        assert ("content-type", "text/event-stream; charset=utf-8") in headers(stream)
        assert ("cache-control", "no-store") in headers(stream)
        await listens(eyes)
        assert stream.pushes == [], "nothing has changed yet"
        pgqueue.remote("web.live").enqueue(eyes.conn, text="secret")
        await until(lambda: stream.pushes)
        lines = {line.partition(":")[0] for line in stream.text.splitlines() if line}
        assert lines == {"retry", "id", "data"} and "secret" not in stream.text


def headers(stream: Stream) -> list[tuple[str, str]]:
    return [(name.decode(), value.decode()) for name, value in stream.sent[0][1]["headers"]]


@pytest.mark.promise("F154")
async def test_a_job_that_ends_is_pushed_although_nothing_notifies_of_it(dsn: str, eyes: Eyes) -> None:
    ends = asyncio.Event()

    @task(name="web.live.ends")
    async def handler() -> None:
        await ends.wait()

    async with work(dsn, handler), dashboard_of(dsn) as made:
        job = handler.enqueue(eyes.conn)
        await until(eyes.is_in(job.id, "running"))
        async with streaming(made, READS) as stream:
            await listens(eyes)
            pushes = len(stream.pushes)
            ends.set()
            await until(lambda: len(stream.pushes) > pushes)
        assert eyes.state(job.id) == "completed"


@pytest.mark.promise("F154")
@pytest.mark.parametrize("listen_dsn", ["off", "postgresql://app@127.0.0.1:1/nowhere?connect_timeout=1"])
async def test_without_listen_a_look_finds_the_change(dsn: str, eyes: Eyes, listen_dsn: str) -> None:
    pgqueue.configure(listen_dsn=listen_dsn)
    async with dashboard_of(dsn) as made, streaming(made, READS) as stream:
        await has_looked(eyes)
        pgqueue.remote("web.live").enqueue(eyes.conn)
        await until(lambda: stream.pushes)
        assert eyes.one(CONNECTED) == 0


@pytest.mark.promise("F154")
async def test_however_much_happens_there_are_at_most_four_pushes_a_second(dsn: str, eyes: Eyes) -> None:
    task = pgqueue.remote("web.live")
    async with dashboard_of(dsn) as made, streaming(made, READS) as one, streaming(made, READS) as other:
        began = monotonic()
        await listens(eyes)
        while len(one.pushes) < 6:
            task.enqueue(eyes.conn)
            await asyncio.sleep(0.005)  # more often than four times a second, and the loop does something else, too
        assert eyes.one(CONNECTED) == 1, "one listener for all streams"
        for stream in (one, other):
            assert 5 <= len(stream.pushes) <= 1 + 4 * (monotonic() - began)


@pytest.mark.promise("F155")
async def test_the_end_of_the_last_stream_is_the_end_of_the_listener(dsn: str, eyes: Eyes) -> None:
    async with dashboard_of(dsn) as made:
        async with streaming(made, READS):
            async with streaming(made, READS):
                await listens(eyes)
            assert len(made.sources[None].live._streams) == 1
            watching = made.sources[None].live._task
            assert watching is not None and not watching.done() and eyes.one(CONNECTED) == 1
        assert made.sources[None].live._streams == set()
        await until(lambda: watching.done() and eyes.one(CONNECTED) == 0)
        assert mine() == set(), "no task of a stream is left"
        async with streaming(made, READS) as again:
            await listens(eyes)
            pgqueue.remote("web.live").enqueue(eyes.conn)
            await until(lambda: again.pushes)


def mine() -> set[object]:
    """The tasks of this loop that `live` has started."""
    return {task.get_coro() for task in asyncio.all_tasks() if task.get_name() == live.TASK}


@pytest.mark.promise("F155")
async def test_a_stream_that_begins_while_the_listener_ends_has_a_listener(
    dsn: str, eyes: Eyes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last look at the streams is over, and the connection is being closed: it takes a while here."""
    closing, closed = asyncio.Event(), asyncio.Event()
    close = listener.Listener.close

    async def slowly(self: listener.Listener) -> None:
        closing.set()
        await closed.wait()
        await close(self)

    async with dashboard_of(dsn) as made:
        async with streaming(made, READS):
            await listens(eyes)
            ending = made.sources[None].live._task
            monkeypatch.setattr(listener.Listener, "close", slowly)
        await asyncio.wait_for(closing.wait(), 10)
        monkeypatch.setattr(listener.Listener, "close", close)
        async with streaming(made, READS) as stream:
            closed.set()
            await until(lambda: ending is not None and ending.done())
            await listens(eyes)
            pgqueue.remote("web.live").enqueue(eyes.conn)
            await until(lambda: stream.pushes)


@pytest.mark.promise("F155")
async def test_a_stream_ends_by_itself_and_the_next_one_needs_the_rights_anew(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "STREAM_SECONDS", 0.1)
    rights: list[str | None] = ["read"]
    async with dashboard_of(dsn, lambda visitor: rights[0]) as made:
        async with streaming(made, {}) as stream:
            await until(lambda: stream.sent[-1][1] == {"type": "http.response.body", "body": b""})
            assert made.sources[None].live._streams == set()
        rights[0] = None
        async with streaming(made, {}) as refused:
            assert refused.status == 403 and refused.pushes == []


@pytest.mark.promise("F155")
async def test_what_changes_between_two_streams_is_told_to_the_second(
    dsn: str, eyes: Eyes, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with dashboard_of(dsn) as made, streaming(made, READS) as other:
        async with streaming(made, READS) as first:
            seen = first.number
        async with streaming(made, READS | {"last-event-id": seen}) as same:
            await until(lambda: same.text)
            assert same.pushes == [], "nothing has changed"
        await listens(eyes)
        pgqueue.remote("web.live").enqueue(eyes.conn)
        await until(lambda: other.pushes)
        async with streaming(made, READS | {"last-event-id": seen}) as second:
            await until(lambda: second.pushes)
        async with streaming(made, READS | {"last-event-id": "of another process.7"}) as foreign:
            await until(lambda: foreign.pushes)
        async with streaming(made, READS, query_string=f"seen={seen}".encode()) as of_a_page:
            await until(lambda: of_a_page.pushes)
        for query in (b"seen=other.1", f"seen={other.number}".encode(), b"seen=", b""):
            async with streaming(made, READS, query_string=query) as same:
                await until(lambda same=same: same.text)  # type: ignore[misc]
                assert same.pushes == []


@pytest.mark.promise("F155")
async def test_so_many_streams_and_no_more(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "STREAMS_MOST", 2)
    async with dashboard_of(dsn) as made, streaming(made, READS), streaming(made, READS):
        async with streaming(made, READS) as third:
            assert third.status == 503 and (b"retry-after", b"60") in third.sent[0][1]["headers"]
        assert len(made.sources[None].live._streams) == 2


@pytest.mark.promise("F155")
async def test_a_browser_that_reads_nothing_does_not_hold_a_stream_for_ever(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "STREAM_SECONDS", 0.1)
    monkeypatch.setattr(live, "LOOK_SECONDS", 0.1)

    class Stuck(Stream):
        async def send(self, message: Any) -> None:
            await super().send(message)
            if message["type"] == "http.response.body":
                await asyncio.Event().wait()

    async with dashboard_of(dsn) as made:
        stuck = Stuck(READS)
        await asyncio.wait_for(made(stuck.scope, stuck.receive, stuck.send), 10)
        assert made.sources[None].live._streams == set()


@pytest.mark.promise("F155")
async def test_a_lost_database_ends_no_stream_and_it_goes_on_later(
    dsn: str, eyes: Eyes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "WAIT_SECONDS", 0.2)
    monkeypatch.setattr(listener, "AGAIN_SECONDS", 0.5)
    async with dashboard_of(dsn) as made, streaming(made, READS) as stream:
        await listens(eyes)
        assert eyes.terminate("pgqueue web listen") == 1
        await listens(eyes)
        assert len(made.sources[None].live._streams) == 1
        pushes = len(stream.pushes)
        pgqueue.remote("web.live").enqueue(eyes.conn)
        await until(lambda: len(stream.pushes) > pushes)


@pytest.mark.promise("F155")
async def test_which_visitors_have_a_stream(dsn: str) -> None:
    async with dashboard_of(dsn) as made, browsing(made) as browser:
        async with streaming(made, {}) as nobody:
            assert nobody.status == 303 and made.sources[None].live._task is None
        async with streaming(made, bearer("wrong" * 5)) as wrong:
            assert wrong.status == 401 and made.sources[None].live._task is None
        for secret in (READER_SECRET, OPERATOR_SECRET):
            async with streaming(made, bearer(secret)) as stream:
                assert stream.status == 200
        await signed_in(browser, READER_SECRET)
        assert (await browser.get("/events")).status_code == 406
        assert (await browser.head("/events", headers={"accept": "text/event-stream"})).status_code == 406


@pytest.mark.promise("F155")
async def test_under_wsgi_there_is_no_stream_and_pages_say_so(dsn: str) -> None:
    """A stream would keep a thread of the server."""
    async with dashboard_of(dsn, lambda visitor: "read") as made:
        async with streaming(made, {}, wsgi_environ={}) as stream:
            assert stream.status == 204 and made.sources[None].live._task is None

        async def wsgi(scope: Any, receive: Any, send: Any) -> None:
            await made(scope | {"wsgi_environ": {}}, receive, send)

        async with browsing(wsgi) as browser:
            assert 'data-live="poll"' in (await browser.get("/queues")).text
        async with browsing(made) as browser:
            assert 'data-live="stream"' in (await browser.get("/queues")).text


async def test_pages_with_a_form_to_fill_in_stay_as_they_are(dsn: str) -> None:
    async with dashboard_of(dsn) as made, browsing(made) as browser:
        assert "data-live" not in (await browser.get("/login")).text
        await signed_in(browser, OPERATOR_SECRET)
        assert "data-live" not in (await browser.get("/bulk/new?action=retry&state=failed")).text
        assert "data-live" not in (await browser.get("/nothing")).text
        assert "data-live" not in (await browser.get("/enqueue")).text


async def test_no_answer_to_a_form_is_renewed(dsn: str) -> None:
    """It stands at an address where another page is: a renewal would show that one, without the error."""

    @task(name="web.once", unique=Unique("once", on_duplicate="raise"))
    def once() -> None: ...

    twice = {"task": "web.once", "form": "1"}
    async with dashboard_of(dsn, lambda visitor: OPERATOR) as made, browsing(made, **SAME_SITE) as browser:
        assert (await browser.post("/enqueue", data=twice)).status_code == 303
        for status, path, fields in [
            (409, "/enqueue", twice),
            (422, "/enqueue", {"task": "web.live", "args": "{"}),
            (404, "/enqueue", {"task": "web.unknown", "form": "1"}),
            (404, "/jobs/4711/cancel", {}),
            (400, "/limits/set", {}),
            (405, "/history", {}),
        ]:
            answer = await browser.post(path, data=fields)
            assert answer.status_code == status, answer.text
            assert 'role="alert"' in answer.text and "data-live" not in answer.text, path


@pytest.mark.promise("F155")
async def test_closing_the_dashboard_ends_its_streams(dsn: str, eyes: Eyes) -> None:
    async with dashboard_of(dsn) as made, streaming(made, READS) as stream:
        await listens(eyes)
        await made.close()
        await until(lambda: stream.sent[-1][1] == {"type": "http.response.body", "body": b""})
        await until(lambda: eyes.one(CONNECTED) == 0)
        assert mine() == set()


@pytest.mark.second
@pytest.mark.promise("F155")
def test_a_server_with_an_open_stream_ends_at_once(dsn: str, tmp_path: Path) -> None:
    asked = {"Authorization": f"Bearer {READER}", "Accept": "text/event-stream"}
    with serving(dsn, tmp_path / "log", "--auth") as url:
        answer = urllib.request.urlopen(urllib.request.Request(f"{url}/events", headers=asked), timeout=30)
        assert answer.readline().startswith(b"retry")
        began = monotonic()
    assert monotonic() - began < 4, "uvicorn would wait for five seconds"
    answer.close()


@pytest.mark.second
@pytest.mark.promise("F154")
async def test_on_a_standby_looks_find_what_has_changed(own_server: Server) -> None:
    primary, dsn = own_server.cluster, own_server.dsn("postgres")
    assert primary is not None
    migrations.migrate(dsn)
    with standby(primary) as second:
        catch_up(primary, second)
        async with dashboard_of(second.dsn("postgres")) as made, streaming(made, READS) as stream:
            seen = Eyes(second.dsn("postgres"))
            await has_looked(seen)
            seen.close()
            with Eyes(dsn).conn as conn:
                for n in range(40):  # the numbers of a sequence come to a standby in steps
                    pgqueue.remote("web.live").enqueue(conn, n=n)
            await until(lambda: stream.pushes)
