"""The dashboard over several databases: a page of all, and each with a dashboard of its own below `/db/NAME`."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

import httpx
import psycopg
import pytest
from dashboards import (
    OPERATOR_SECRET,
    READER_SECRET,
    SAME_SITE,
    SECRETS,
    bearer,
    browsing,
    dashboard_of,
    press,
    signed_in,
)
from mounts import MOUNTS, ROOT, Mount
from prometheus_client.parser import text_string_to_metric_families
from psycopg import sql
from workers import until

import pgqueue
from pgqueue.admin.depth import Count
from pgqueue.admin.doctor import Finding
from pgqueue.config import config
from pgqueue.databases import Database, current, named
from pgqueue.errors import InvalidOption, SchemaMissing
from pgqueue.pytest_plugin import Databases
from pgqueue.web import Visitor, connections, dashboard, question, rendering
from pgqueue.web.access import ACTIONS
from pgqueue.web.connections import Connections
from pgqueue.web.listener import Listener
from pgqueue.web.metrics import SCRAPE_TIMEOUT
from pgqueue.web.question import Question
from pgqueue.web.routes import OF_ALL, ROUTES, SHARED, find
from pgqueue.web.source import Source
from pgqueue.web.standing import Answer, Standing

JSON = {"accept": "application/json"}
AWAY = "postgresql://nobody@127.0.0.1:1/away?connect_timeout=2"


@pytest.fixture(scope="module")
def other_dsn(pgqueue_databases: Databases) -> Iterator[str]:
    """A second database, which has the number 1."""
    with pgqueue_databases.copy() as made:
        pgqueue.migrate(made, number=1)
        yield made


@pytest.fixture
def both(dsn: str, other_dsn: str) -> tuple[Database, ...]:
    return named((f"a={dsn}", f"b={other_dsn}"))


def enqueue(dsn: str, queue: str) -> int:
    with psycopg.connect(dsn) as conn:
        return pgqueue.remote("shop.pay").using(queue=queue).enqueue(conn).id


def read_all(visitor: Visitor) -> str:
    return "read"


@asynccontextmanager
async def over(databases: tuple[Database, ...], auth: Any = read_all) -> AsyncIterator[httpx.AsyncClient]:
    """A browser at a dashboard of these."""
    async with dashboard_of(None, auth, databases=databases) as made, browsing(made) as browser:
        yield browser


async def rows(browser: httpx.AsyncClient) -> dict[str, Any]:
    """The rows of the page of all by their databases."""
    answer = await browser.get("/", headers=JSON)
    assert answer.status_code == 200, answer.text
    return {each["database"]: each for each in answer.json()["items"]}


# The page of all -----------------------------------------------------------------------------------------------------


@pytest.mark.promise("F409")
async def test_the_page_of_all_has_a_row_for_each_and_each_leads_to_its_dashboard(
    dsn: str, other_dsn: str, both: tuple[Database, ...]
) -> None:
    with psycopg.connect(dsn) as conn:
        conn.execute("INSERT INTO pgqueue.job (task, queue, enqueued_at) VALUES ('t', 'mail', now() - interval '2 h')")
    async with over(both) as browser:
        found = await rows(browser)
        assert list(found) == ["a", "b"], "the one that needs somebody comes first"
        assert (found["a"]["waiting"], found["a"]["number"], found["b"]["number"]) == ({"n": 1, "exact": True}, 0, 1)
        assert found["a"]["verdict"]["title"] != "All is well" and "mail" in found["a"]["finding"]["what"]
        assert (found["b"]["verdict"]["title"], found["b"]["finding"]) == ("All is well", None)
        for name in ("oldest", "running", "failed", "completed", "workers", "since"):
            assert name in found["a"]
        page = await browser.get("/")
        assert 'href="/db/a/"' in page.text and 'href="/db/b/"' in page.text and "All is well" in page.text
        for name in ("a", "b"):
            overview = await browser.get(f"/db/{name}/")
            assert overview.status_code == 200 and f'title="{name}: all databases"' in overview.text
            links = set(re.findall(r'(?:href|action)="(/[^"]*)"', overview.text))
            assert {each for each in links if not each.startswith((f"/db/{name}/", "/static/"))} == {
                "/",
                "/logout",
            } & links
        assert (await browser.get("/jobs")).status_code == 404, "no database is meant"


@pytest.mark.promise("F409")
async def test_each_page_is_below_the_path_of_its_database(both: tuple[Database, ...]) -> None:
    for route in ROUTES:
        path = route.path.replace("{id}", "7").replace("{file}", "pgqueue.css")
        found = find(route.method, f"/db/a{path}", several=True)
        assert found.route is route and found.database == (None if route.name in SHARED else "a")
    assert [route.name for route in OF_ALL] == ["static", "login", "sign_in", "sign_out", "metrics", "databases"]
    async with over(both) as browser:
        for route in ROUTES:
            if route.method == "GET" and route.page and "{" not in route.path and route.needs == "read":
                answer = await browser.get(f"/db/b{route.path}", headers=JSON)
                assert answer.status_code in (200, 400), (route.path, answer.text)  # 400: it wants a name


@pytest.mark.promise("F409")
@pytest.mark.parametrize("mount", MOUNTS.values(), ids=MOUNTS.keys())
def test_one_login_is_for_all_and_links_stay_below_the_mount(
    dsn: str, both: tuple[Database, ...], mount: Mount
) -> None:
    enqueue(dsn, "mail")
    made = dashboard.made(SECRETS, databases=both)
    with mount(made) as client:
        asked = client.get(f"{ROOT}/db/a/queues?x=1")
        assert (asked.status_code, asked.headers["location"]) == (303, f"{ROOT}/login?next=%2Fdb%2Fa%2Fqueues%3Fx%3D1")
        assert client.get(f"{ROOT}/db/a/static/pgqueue.css").status_code == 200
        form = {"secret": SECRETS.operator, "next": "/db/a/queues?x=1"}
        signed = client.post(f"{ROOT}/login", data=form, headers=SAME_SITE)
        assert signed.headers["location"] == f"{ROOT}/db/a/queues?x=1"
        assert f"path={ROOT};" in signed.headers["set-cookie"].lower()
        for path in ("/", "/db/a/queues", "/db/b/", "/db/b/jobs"):
            page = client.get(f"{ROOT}{path}")
            assert page.status_code == 200
            links = set(re.findall(r'(?:href|action|src|data-events)="([^"]*)"', page.text))
            assert [each for each in links if not each.startswith((f"{ROOT}/", "#"))] == [], path
            assert f"{ROOT}{rendering.asset('pgqueue.css')}" in links
        changed = client.post(f"{ROOT}/db/a/pause", data={"queue": "mail"}, headers=SAME_SITE)
        assert (changed.status_code, changed.headers["location"]) == (303, f"{ROOT}/db/a/queues?did=paused")
        left = client.post(f"{ROOT}/logout", headers=SAME_SITE)
        assert left.headers["location"] == f"{ROOT}/login" and f"path={ROOT}" in left.headers["set-cookie"].lower()


@pytest.mark.promise("F409")
async def test_the_path_of_a_public_url_is_taken_off_before_that_of_a_database(both: tuple[Database, ...]) -> None:
    for url in ("https://ops.example/db", "https://ops.example/ops"):
        async with dashboard_of(None, read_all, databases=both, public_url=url) as made, browsing(made) as browser:
            root = url.removeprefix("https://ops.example")
            for path in ("/db/b/jobs", f"{root}/db/b/jobs"):  # a proxy takes it off, or leaves it
                page = await browser.get(path)
                assert page.status_code == 200 and f'href="{root}/db/b/queues"' in page.text


@pytest.mark.promise("F409")
@pytest.mark.parametrize("root", ["/db", "/db/ops", "/ops"])
async def test_the_login_below_a_public_url_is_found_whether_a_proxy_leaves_its_path_or_not(
    both: tuple[Database, ...], root: str
) -> None:
    """Naive: `/db/login` is a page of a database `login`, which sends a browser to `/db/login` for ever."""
    url = f"https://ops.example{root}"
    async with dashboard_of(None, SECRETS, databases=both, public_url=url) as made, browsing(made) as browser:
        for before in ("", root):
            to_login = await browser.get(f"{before}/")
            assert (to_login.status_code, to_login.headers["location"]) == (303, f"{root}/login")
            assert (await browser.get(f"{before}/login")).status_code == 200
            style = await browser.get(f"{before}/static/pgqueue.css")
            assert style.status_code == 200 and "css" in style.headers["content-type"]
            form = {"secret": SECRETS.operator, "next": "/"}
            signed = await browser.post(f"{before}/login", data=form, headers=SAME_SITE)
            assert signed.headers["location"] == f"{root}/"
            scraped = await browser.get(f"{before}/metrics", headers=bearer(READER_SECRET))
            assert scraped.status_code == 200 and "pgqueue_" in scraped.text
            left = await browser.post(f"{before}/logout", headers=SAME_SITE | bearer(READER_SECRET))
            assert left.headers["location"] == f"{root}/login"


@pytest.mark.promise("F413")
async def test_below_a_public_url_of_db_a_hidden_name_is_answered_like_an_unknown_one(
    both: tuple[Database, ...],
) -> None:
    def only_a(visitor: Visitor) -> str | None:
        return "read" if visitor.database == "a" else None

    url = "https://ops.example/db"
    async with dashboard_of(None, only_a, databases=both, public_url=url) as made, browsing(made) as browser:
        for path in ("", "/", "/jobs", "/none", "/login", "/metrics"):
            for before in ("/db", "/db/db"):
                hidden, unknown = [await browser.get(f"{before}/{name}{path}") for name in ("b", "zzz")]
                assert (hidden.status_code, hidden.content) == (unknown.status_code, unknown.content), path


@pytest.mark.promise("F409")
@pytest.mark.parametrize("name", ["login", "logout", "metrics", "static", "events"])
def test_no_database_has_the_name_of_a_path_of_the_dashboard(name: str) -> None:
    with pytest.raises(InvalidOption, match=f"{name}.*choose another name"):
        named([f"{name}=postgresql:///x"])


@pytest.mark.promise("F409")
async def test_with_one_database_nothing_is_below_another_path(dsn: str, other_dsn: str) -> None:
    one = named([f"b={other_dsn}"])
    async with dashboard_of(dsn, read_all, databases=one) as made, browsing(made) as browser:
        assert (await browser.get("/db/b/")).status_code == 404
        page = await browser.get("/queues")
        assert page.status_code == 200 and "all databases" not in page.text
        assert (await browser.get("/", headers=JSON)).json()["about"]["database"] in other_dsn
        assert "database=" not in (await browser.get("/metrics")).text


def test_wrong_databases_are_refused_when_the_dashboard_is_made() -> None:
    for wrong in (
        {"a b": "postgresql:///x"},
        {"a": 7},
        ["a=postgresql:///x"],
        {"a": "postgresql:///x", "b": "mysql://x"},
    ):
        with pytest.raises(InvalidOption) as refused:
            pgqueue.web.app(auth=read_all, databases=wrong)  # type: ignore[arg-type]
        assert "database" in str(refused.value) or "dsn" in str(refused.value)


@pytest.mark.promise("F409")
async def test_the_page_of_fifty_databases_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    finding = Finding(
        "unserved", "critical", f"queue {'q' * 60} has 12,000 jobs and no live worker", "start one", "the docs"
    )
    count = Count(123_456, False)

    async def stands(self: Source) -> Answer:
        found = Standing(7, count, count, 1234, 99_999, 86_400.0, 40, (finding,) * 9)
        return Answer(found, as_of=datetime.now(UTC), number=7)

    monkeypatch.setattr(Source, "standing", stands)
    many = tuple(Database(f"europe-customers-of-region-{n}", AWAY) for n in range(50))
    async with over(many, lambda visitor: ACTIONS) as browser:
        page = await browser.get("/")
        assert page.status_code == 200 and page.text.count("<tr") == 51 and len(page.content) < 60_000


# One that is away ----------------------------------------------------------------------------------------------------


@pytest.mark.promise("F410")
async def test_one_that_is_away_is_a_row_that_says_so_since_when(
    dsn: str, both: tuple[Database, ...], eyes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the start and later."""
    monkeypatch.setattr(connections, "SILENCE_SECONDS", 0.01)
    monkeypatch.setattr(connections, "WAIT_SECONDS", 0.2)
    monkeypatch.setattr(question, "SAME_SECONDS", 0.0)
    [name] = re.findall(r"dbname=(\w+)|/(\w+)(?:\?|$)", both[1].dsn)[-1:]
    place = sql.Identifier("".join(name))
    async with over((Database("nowhere", AWAY), *both)) as browser:

        def stands(database: str, title: str) -> Callable[[], bool | Awaitable[bool]]:
            async def look() -> bool:
                return bool((await rows(browser))[database]["verdict"]["title"] == title)

            return look

        first = await rows(browser)
        assert next(iter(first)) == "nowhere" and first["nowhere"]["verdict"]["level"] == "away"
        assert first["nowhere"]["waiting"] is None and "127.0.0.1:1" in first["nowhere"]["verdict"]["text"]
        again = await rows(browser)
        assert again["nowhere"]["since"] == first["nowhere"]["since"] is not None
        page = await browser.get("/")
        assert "The database cannot be reached" in page.text and 'href="/db/nowhere/"' in page.text
        assert (await browser.get("/db/nowhere/jobs")).status_code == 503
        await until(stands("b", "All is well"))
        try:
            eyes.conn.execute(sql.SQL("ALTER DATABASE {} ALLOW_CONNECTIONS false").format(place))
            eyes.conn.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", ("".join(name),)
            )
            await until(stands("b", "The database cannot be reached"))
            await until(stands("a", "All is well"))
        finally:
            eyes.conn.execute(sql.SQL("ALTER DATABASE {} ALLOW_CONNECTIONS true").format(place))
        await until(stands("b", "All is well"))
        assert (await rows(browser))["b"]["since"] is None


@pytest.mark.promise("F448")
async def test_each_line_of_an_outage_names_its_database(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Naive: a page of one database does, and the page of all, metrics and the streams do not."""
    monkeypatch.setattr(connections, "SILENCE_SECONDS", 0.01)
    monkeypatch.setattr(connections, "WAIT_SECONDS", 0.2)
    said = list[tuple[str, str | None]]()

    class Notes(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            here = current.get()
            said.append((record.getMessage()[:20], None if here is None else here.name))

    notes = Notes(logging.WARNING)
    logging.getLogger("pgqueue").addHandler(notes)
    try:
        for name, path in (("c", "/"), ("d", "/metrics"), ("e", "/db/e/queues")):
            async with over((Database(name, AWAY), Database("ok", dsn))) as browser:
                await browser.get(path)
        source = Source(Database("f", AWAY))
        with pytest.raises(psycopg.OperationalError):
            await Listener(source.connections).changed()
        await source.close()
    finally:
        logging.getLogger("pgqueue").removeHandler(notes)
    assert said == [("the database is lost", name) for name in "cdef"]


@pytest.mark.promise("F410")
async def test_each_time_that_it_is_away_has_its_own_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(question, "SAME_SECONDS", 0.0)
    monkeypatch.setattr("pgqueue.web.source.ANSWER_SECONDS", 60.0)
    count, is_away = Count(0, True), True

    async def look(self: Source) -> Standing:
        if is_away:
            raise psycopg.OperationalError("away")
        return Standing(0, count, count, 0, 0, None, 0, ())

    monkeypatch.setattr(Source, "_look", look)
    source = Source()
    first, again = await source.standing(), await source.standing()
    assert first.problem is not None and first.problem.title == "The database cannot be reached"
    assert first.since is not None and first.since == again.since
    is_away = False
    found = await source.standing()
    assert found.standing is not None and found.problem is None and found.since is None
    is_away = True
    later = await source.standing()
    assert later.since is not None and later.since > first.since
    assert (await source.standing()).since == later.since


@pytest.mark.promise("F410")
async def test_an_answer_to_any_page_ends_the_time_that_it_is_away(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Naive: the page of all, which saw no answer between two outages, says the begin of the first one."""
    monkeypatch.setattr(question, "SAME_SECONDS", 0.0)
    monkeypatch.setattr("pgqueue.web.source.ANSWER_SECONDS", 60.0)
    error: Exception = psycopg.OperationalError("away")

    async def look(self: Source) -> Standing:
        raise error

    monkeypatch.setattr(Source, "_look", look)
    source = Source(Database("a", dsn))

    async def answers(conn: Any) -> None:
        await conn.execute("SELECT 1")

    first = await source.standing()
    await source.connections.read(answers)
    second = await source.standing()
    assert first.since is not None and second.since is not None and second.since > first.since
    assert (await source.standing()).since == second.since
    error = SchemaMissing("no schema")  # it answers, and that is what is wrong
    await source.connections.read(answers)
    assert (await source.standing()).since == second.since
    await source.close()


@pytest.mark.promise("F473")
async def test_a_database_with_a_queue_that_is_behind_is_not_well(other_dsn: str, both: tuple[Database, ...]) -> None:
    """Naive is a row that says that all is well, beside an oldest job of 12 minutes."""
    with psycopg.connect(other_dsn) as conn:
        conn.execute(
            "INSERT INTO pgqueue.worker (lease, pid, concurrency, host, version_tag, queues, tasks, state, beat_at) "
            "VALUES ('1 hour', 1, 5, 'here', '1', '{late}', '{t}', 'running', now())"
        )
        conn.execute(
            "INSERT INTO pgqueue.job (task, queue, enqueued_at) VALUES ('t', 'late', now() - interval '12 min')"
        )
    async with over(both) as browser:
        found = await rows(browser)
        assert list(found) == ["b", "a"], "the one that needs somebody comes first"
        assert (found["b"]["verdict"]["level"], found["b"]["verdict"]["title"]) == ("warning", "Queue late is behind")
        assert found["b"]["finding"] is None and found["a"]["verdict"]["level"] == "well"


@pytest.mark.promise("F447")
async def test_one_that_is_slow_is_shown_as_it_stood(
    dsn: str, both: tuple[Database, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Naive: each answer comes after the page, and is too old for the next one. So the database is away for ever."""
    monkeypatch.setattr(question, "SAME_SECONDS", 0.0)
    monkeypatch.setattr("pgqueue.web.source.ANSWER_SECONDS", 0.2)
    count, held, told = Count(7, True), asyncio.Event(), asyncio.Event()
    error: Exception | None = None

    async def look(self: Source) -> Standing:
        told.clear()
        await held.wait()
        told.set()
        if error is not None:
            raise error
        return Standing(0, count, count, 0, 0, None, 0, ())

    monkeypatch.setattr(Source, "_look", look)
    async with over(both) as browser:
        assert (await rows(browser))["a"]["verdict"]["title"] == "The database does not answer"
        held.set()  # the answer comes after the page
        await asyncio.wait_for(told.wait(), 60)
        held.clear()
        row = (await rows(browser))["a"]
        assert (row["verdict"]["level"], row["waiting"]["n"]) == ("well", 7)
        as_of = datetime.fromisoformat(row["as_of"])
        assert (await rows(browser))["a"]["as_of"] is not None and as_of < datetime.now(UTC)
        assert "As of <time" in (await browser.get("/")).text
        monkeypatch.setattr(question, "KEPT_SECONDS", 0.0)
        assert (await rows(browser))["a"]["verdict"]["title"] == "The database does not answer"
        monkeypatch.setattr(question, "KEPT_SECONDS", 3_600.0)
        assert (await rows(browser))["a"]["as_of"] is not None
        error = psycopg.OperationalError("gone")
        held.set()
        await asyncio.wait_for(told.wait(), 60)
        held.clear()
        assert (await rows(browser))["a"]["verdict"]["level"] == "away", "a failure forgets what was kept"


@pytest.mark.promise("F410")
async def test_one_that_hangs_keeps_no_other_from_the_page(dsn: str, other_dsn: str) -> None:
    """Naive: each is waited for, or asked one after the other. The attempt to connect takes 30 s here."""

    async def sound() -> bool:  # a busy machine
        levels = await rows(browser)
        return "away" not in (levels["a"]["verdict"]["level"], levels["b"]["verdict"]["level"])

    is_sound: Callable[[], bool | Awaitable[bool]] = sound
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it takes connections and says nothing
        frozen = f"postgresql://app@127.0.0.1:{silent.getsockname()[1]}/x"
        async with over(named((f"frozen={frozen}", f"a={dsn}", f"b={other_dsn}"))) as browser:
            await until(is_sound)
            found = await rows(browser)
            assert found["frozen"]["verdict"]["title"] == "The database does not answer"
            scraped = (await browser.get("/metrics", headers={SCRAPE_TIMEOUT: "3"})).text
            assert 'database="a"' in scraped and 'database="frozen"' not in scraped


@pytest.mark.promise("F410")
@pytest.mark.parametrize("path", ["/", "/metrics"])
async def test_all_are_asked_at_the_same_time(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Naive: one after the other, so the third is asked when the first two have been waited for."""
    monkeypatch.setattr("pgqueue.web.source.ANSWER_SECONDS", 3_600.0)
    monkeypatch.setattr("pgqueue.web.metrics.ANSWER_SECONDS", 3_600.0)
    asked, all_asked, may_end = set[Connections](), asyncio.Event(), asyncio.Event()

    async def hangs(self: Connections, ask: Any) -> Any:
        asked.add(self)
        if len(asked) == 3:
            all_asked.set()
        await may_end.wait()
        raise psycopg.OperationalError("away")

    monkeypatch.setattr(Connections, "read", hangs)
    async with over(tuple(Database(name, AWAY) for name in "abc")) as browser:
        page = asyncio.create_task(browser.get(path))
        await asyncio.wait_for(all_asked.wait(), 60)
        may_end.set()
        assert (await asyncio.wait_for(page, 60)).status_code == (200 if path == "/" else 503)


@pytest.mark.promise("F410")
async def test_a_question_is_asked_once_however_many_wait_and_leave() -> None:
    asked, may_end = 0, asyncio.Event()

    async def ask() -> int:
        nonlocal asked
        asked += 1
        await may_end.wait()
        return asked

    question = Question(ask)
    for _ in range(3):
        with pytest.raises(TimeoutError):
            await question.answer(0)
    leaving = asyncio.create_task(question.answer(60))
    staying = asyncio.create_task(question.answer(60))
    await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    may_end.set()
    assert await staying == 1 == asked, "the end of one that waits does not end the question"
    await question.close()


@pytest.mark.promise("F410")
async def test_the_end_of_the_dashboard_is_an_answer_to_those_who_wait(
    dsn: str, both: tuple[Database, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Naive: a mounted dashboard that is closed raises CancelledError in the application."""
    asked = asyncio.Event()

    async def hangs(self: Connections, ask: Any) -> Any:
        asked.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(Connections, "read", hangs)
    for path, databases in (("/metrics", ()), ("/metrics", both), ("/", both)):
        asked.clear()
        async with dashboard_of(dsn, read_all, databases=databases) as made, browsing(made) as browser:
            waiting = asyncio.create_task(browser.get(path, headers=JSON))
            await asyncio.wait_for(asked.wait(), 60)
            await made.close()
            answer = await asyncio.wait_for(waiting, 60)
            if path == "/":
                titles = {each["verdict"]["title"] for each in answer.json()["items"]}
                assert titles <= {"The dashboard ends", "The database does not answer"} and len(titles) > 0
            else:
                assert answer.status_code == 503 and "retry-after" in answer.headers


# From an id to its database ------------------------------------------------------------------------------------------


def places_of(search: dict[str, Any]) -> set[str]:
    """The databases in which to search on."""
    return {each["database"] for each in search["places"]}


@pytest.mark.promise("F411")
async def test_an_id_finds_its_database_by_the_number(
    dsn: str, other_dsn: str, both: tuple[Database, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgqueue.web.source.ANSWER_SECONDS", 60.0)
    mine, theirs = enqueue(dsn, "mail"), enqueue(other_dsn, "mail")
    async with over(both) as browser:
        for id, name in ((mine, "a"), (theirs, "b")):
            for query in (str(id), f"id:{id}", f"  {id} "):
                found = await browser.get("/", params={"q": query})
                assert (found.status_code, found.headers["location"]) == (303, f"/db/{name}/jobs/{id}"), query
            assert (await browser.get(f"/db/{name}/jobs/{id}")).status_code == 200
        for query in ("order:7", "order_id=7", "state:failed", "0", "9" * 19, "1 2"):
            answer = await browser.get("/", params={"q": query}, headers=JSON)
            search = answer.json()["search"]
            assert "Choose the database" in search["text"] and places_of(search) == {"a", "b"}
            page = await browser.get("/", params={"q": query})
            assert page.status_code == 200 and "Search in a" in page.text
        none = (await browser.get("/", params={"q": str((5 << 43) + 1)}, headers=JSON)).json()["search"]
        assert none["text"].startswith("No database has the number 5") and none["places"] == []
    async with over((*both, Database("c", both[0].dsn))) as browser:
        same = (await browser.get("/", params={"q": str(mine)}, headers=JSON)).json()["search"]
        assert "a and c have one number" in same["text"] and places_of(same) == {"a", "c"}
    async with over((*both, Database("nowhere", AWAY))) as browser:
        away = (await browser.get("/", params={"q": str((5 << 43) + 1)}, headers=JSON)).json()["search"]
        assert away["text"].startswith("No database that answers") and places_of(away) == {"nowhere"}


@pytest.mark.promise("F411")
async def test_a_database_with_the_name_of_a_secret_keeps_its_link(dsn: str, other_dsn: str) -> None:
    """Naive: the name is a key of the answer, and redaction hides what stands under it."""
    async with over(named((f"tokens={dsn}", f"secret-shop={other_dsn}"))) as browser:
        for query in ("key:x", "token:x", str((5 << 43) + 1)):
            search = (await browser.get("/", params={"q": query}, headers=JSON)).json()["search"]
            page = (await browser.get("/", params={"q": query})).text
            for each in search["places"]:
                assert each["place"].startswith(f"/db/{each['database']}/jobs?q=")
                assert f'href="{each["place"].partition("?")[0]}?' in page and f"Search in {each['database']}" in page
            assert len(search["places"]) == (0 if query.isdigit() else 2)


@pytest.mark.promise("F411")
async def test_an_id_leads_nowhere_while_one_that_is_away_may_have_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Naive: the first database that answers is taken. All that were never numbered have the number 0."""
    monkeypatch.setattr(question, "SAME_SECONDS", 0.0)
    monkeypatch.setattr("pgqueue.web.source.ANSWER_SECONDS", 60.0)
    count, numbers, away = Count(0, True), {"a": 0, "b": 0, "c": 1}, {"b", "c"}

    async def look(self: Source) -> Standing:
        assert self.database is not None
        if self.database.name in away:
            raise psycopg.OperationalError("away")
        return Standing(numbers[self.database.name], count, count, 0, 0, None, 0, ())

    monkeypatch.setattr(Source, "_look", look)
    async with over(tuple(Database(name, AWAY) for name in numbers)) as browser:

        async def found(id: int = 7) -> Any:
            answer = await browser.get("/", params={"q": str(id)}, headers=JSON)
            return answer.headers.get("location") or answer.json()["search"]

        search = await found()
        assert "a has it; b and c may have it, and do not answer" in search["text"]
        assert list(_names(search)) == ["a", "b", "c"]
        away = set[str]()
        assert "a and b have one number" in (await found())["text"]
        away = {"b", "c"}
        search = await found()
        assert "a has it; b may have it, and does not answer" in search["text"] and list(_names(search)) == ["a", "b"]
        numbers["b"], away = 2, set()
        assert await found() == "/db/a/jobs/7"
        away = {"b", "c"}
        assert await found() == "/db/a/jobs/7", "each that is away has another number"
        assert list(_names(await found((2 << 43) + 1))) == ["b"]
        assert (await found((5 << 43) + 1))["text"].startswith("No database has the number 5")


def _names(search: Any) -> list[str]:
    """The databases that a search offers."""
    places = search["places"]
    return list(places) if isinstance(places, dict) else [each["database"] for each in places]


# A request and its database ------------------------------------------------------------------------------------------


@pytest.mark.promise("F412")
async def test_a_change_of_one_touches_no_other(dsn: str, other_dsn: str, both: tuple[Database, ...]) -> None:
    ids = {"a": enqueue(dsn, "mail"), "b": enqueue(other_dsn, "mail")}
    async with over(both, lambda visitor: ACTIONS) as browser:
        paused = await press(browser, "/db/a/pause", queue="mail")
        assert "a: all databases" in paused.text
        await press(browser, f"/db/a/jobs/{ids['a']}/cancel")
        made = await press(browser, "/db/a/enqueue", task="shop.pay", args="{}", queue="new")
        assert made.status_code == 200
        wrong = await browser.post(f"/db/a/jobs/{ids['b']}/cancel", headers=SAME_SITE)
        assert wrong.status_code == 404
    asked = (
        "SELECT (SELECT count(*) FROM pgqueue.audit), (SELECT count(*) FROM pgqueue.queue WHERE paused_at IS NOT NULL)"
    )
    with psycopg.connect(dsn) as one, psycopg.connect(other_dsn) as other:
        assert one.execute(asked).fetchone() == (3, 1)
        assert other.execute(asked).fetchone() == (0, 0)
        assert other.execute("SELECT state FROM pgqueue.job WHERE id = %s", (ids["b"],)).fetchone() == ("available",)


@pytest.mark.promise("F412")
async def test_pages_at_the_same_time_are_each_of_their_database(
    dsn: str, other_dsn: str, both: tuple[Database, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Naive: one database is the current one of the process while a page is made. Another page begins meanwhile."""
    enqueue(dsn, "only_in_a"), enqueue(other_dsn, "only_in_b")
    pgqueue.configure(dsn=AWAY)
    seen = list[tuple[str | None, str | None]]()
    read = Connections.read

    async def watched(self: Connections, ask: Any) -> Any:
        await asyncio.sleep(0)  # so that the others go on between the choice and the read
        seen.append((config().dsn, self.config().dsn))
        return await read(self, ask)

    monkeypatch.setattr(Connections, "read", watched)
    async with over(both) as browser:
        names = ["a", "b"] * 8
        pages = await asyncio.gather(*(browser.get(f"/db/{name}/queues") for name in names))
        for name, page in zip(names, pages, strict=True):
            assert page.status_code == 200, page.text
            assert (f"only_in_{name}" in page.text, page.text.count("only_in_") > 0) == (True, True)
            assert f"only_in_{'b' if name == 'a' else 'a'}" not in page.text
        assert (await browser.get("/db/a/queues")).status_code == 200, "in this task, as a mounted dashboard is asked"
        assert current.get() is None and config().dsn == AWAY, "the caller has what it had"
    assert all(one == other for one, other in seen)
    assert {one for one, _ in seen} == {each.dsn for each in both}


# What is not shown ---------------------------------------------------------------------------------------------------


@pytest.mark.promise("F413")
async def test_a_visitor_learns_of_no_database_that_it_may_not_see(dsn: str, both: tuple[Database, ...]) -> None:
    """Naive: an unknown name is 404, and a hidden one 403."""
    asked = list[Visitor]()

    def only_a(visitor: Visitor) -> str | None:
        asked.append(visitor)
        return "read" if visitor.database == "a" else None

    async with over(both, only_a) as browser:
        page = await browser.get("/")
        assert page.status_code == 200 and "/db/a/" in page.text and "/db/b" not in page.text
        assert list(await rows(browser)) == ["a"]
        assert {(each.database, each.path) for each in asked} == {("a", "/db/a/"), ("b", "/db/b/")}
        for query in (str((1 << 43) + 1), "key:x"):
            found = await browser.get("/", params={"q": query})
            assert "/db/b" not in found.text and found.status_code == 200
        assert 'database="b"' not in (await browser.get("/metrics")).text
        assert (await browser.get("/db/a/queues")).status_code == 200
        assert asked[-1].path == "/db/a/queues"
        for method, path in [
            *((r.method, r.path) for r in ROUTES),
            ("GET", "/none"),
            ("PUT", "/jobs"),
            ("PUT", "/login"),
        ]:
            path = path.replace("{id}", "7").replace("{file}", "pgqueue.css")
            for headers in (SAME_SITE, SAME_SITE | JSON, SAME_SITE | bearer("x" * 30), {}):
                hidden, unknown = [
                    await browser.request(method, f"/db/{name}{path}", headers=headers) for name in ("b", "zzz")
                ]
                assert (hidden.status_code, hidden.headers, hidden.content) == (
                    unknown.status_code,
                    unknown.headers,
                    unknown.content,
                ), path
    async with over(both, lambda visitor: None) as browser:
        for path in ("/", "/metrics", "/db/a/"):
            answer = await browser.get(path)
            assert answer.status_code == 403 and "/db/" not in answer.text


@pytest.mark.promise("F413")
async def test_auth_is_asked_of_each_database_with_the_path_of_its_page(both: tuple[Database, ...]) -> None:
    """Naive: metrics are asked for as the page of all, and one that allows them by their path loses them."""
    asked = list[str]()

    def scraper(visitor: Visitor) -> str | None:
        asked.append(visitor.path)
        return "read" if visitor.path.endswith("/metrics") and visitor.database == "a" else None

    async with over(both, scraper) as browser:
        for path, status in (("/metrics", 200), ("/db/a/metrics", 200), ("/db/b/metrics", 403), ("/", 403)):
            answer = await browser.get(path)
            assert answer.status_code == status, path
            assert ('database="a"' in answer.text, 'database="b"' in answer.text) == (status == 200, False)
        assert set(asked) == {f"/db/{name}/{page}" for name in "ab" for page in ("metrics", "")}
        asked.clear()
        for method, path, status in (("GET", "/none", 404), ("GET", "/jobs", 404), ("POST", "/metrics", 405)):
            answer = await browser.request(method, path, headers=SAME_SITE)
            assert (answer.status_code, "/db/" in answer.text) == (status, False), path
        assert asked == [], "of what is no page the application is not asked"


@pytest.mark.promise("F413")
async def test_roles_are_as_with_one_database(dsn: str, both: tuple[Database, ...]) -> None:
    for secret, status in ((READER_SECRET, 403), (OPERATOR_SECRET, 303)):
        async with over(both, SECRETS) as browser:
            hidden, unknown = [await browser.get(f"/db/{name}/jobs") for name in ("a", "zzz")]
            assert hidden.status_code == unknown.status_code == 303
            assert hidden.headers["location"].replace("a", "") == unknown.headers["location"].replace(
                "zzz", ""
            ).replace("a", "")
            assert (await signed_in(browser, secret)).headers["location"] == "/"
            assert (await browser.get("/")).status_code == (await browser.get("/db/b/")).status_code == 200
            assert (await browser.get("/db/zzz/jobs")).status_code == 404
            changed = await browser.post("/db/a/pause", data={"queue": "mail"}, headers=SAME_SITE)
            assert changed.status_code == status


# Metrics -------------------------------------------------------------------------------------------------------------


@pytest.mark.promise("F414")
async def test_metrics_name_the_database(dsn: str, other_dsn: str, both: tuple[Database, ...]) -> None:
    enqueue(dsn, "mail")
    async with over(both, SECRETS) as browser:
        assert (await browser.get("/metrics", headers=bearer("w" * 20))).status_code == 401
        text = (await browser.get("/metrics", headers=bearer(READER_SECRET))).text
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        assert {sample.labels["database"] for sample in samples} == {"a", "b"}
        assert [
            s.value
            for s in samples
            if s.name == "pgqueue_depth"
            and s.labels["queue"] == "mail"
            and s.labels["state"] == "available"
            and s.labels["database"] == "a"
        ] == [1.0]
        own = (await browser.get("/db/b/metrics", headers=bearer(READER_SECRET))).text
        assert 'database="b"' in own and 'database="a"' not in own
    async with over((Database("c", AWAY), Database("d", AWAY))) as browser:
        assert (await browser.get("/metrics")).status_code == 503


async def test_open_pages_hear_of_changes_in_their_database_alone(dsn: str, other_dsn: str, both: Any) -> None:
    """The listener of a stream has its connection where the pages have theirs."""
    async with dashboard_of(None, read_all, databases=both) as made:
        for each in both:
            assert made.sources[each.name].live._connections.config().listen_dsn == each.dsn
        pgqueue.configure(listen_dsn="off")
        assert made.sources["a"].connections.config().listen_dsn is None
