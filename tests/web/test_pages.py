"""Every page, empty and full, as HTML and as JSON; foreign text in all of it; and what is said when something fails."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from html.parser import HTMLParser
from pathlib import Path
from threading import Thread
from time import monotonic
from typing import Any
from urllib.parse import unquote, urlencode

import httpx
import psycopg
import pytest
from dashboards import SECRETS, browsing, dashboard_of, reading, signed_in, without_our_script
from roles import Role, role
from servers import Server
from standby import catch_up, standby
from workers import until, work

import pgqueue
from pgqueue import Cron, Limit, Rate
from pgqueue.admin import depth as numbers
from pgqueue.database import migrations
from pgqueue.jobs.retry import RetryPolicy
from pgqueue.testing import drain
from pgqueue.web import connections, rendering
from pgqueue.web.pages.job import folded
from pgqueue.web.pages.jobs import arguments, moment
from pgqueue.web.problems import Problem, problem_of

__all__ = ["role"]

PATHS = [
    "/",
    "/jobs",
    "/queues",
    "/limits",
    "/schedules",
    "/flows",
    "/workers",
    "/errors",
    "/history",
    "/bulk",
    "/outbox",
    "/changes",
    "/queue?name=x",
    "/tasks",
    "/task?name=x",
    "/limits/jobs?limit=x",
]
JSON = {"accept": "application/json"}
EVIL = "<script>alert('x')</script>\"'&<img src=x onerror=alert(1)>\u202e"
OUR_SCRIPT = '<script src="{{ mount }}{{ asset("pgqueue.js") }}" defer></script>'
OUR_LINKS = (
    "{{ root }}/",
    "{{ mount }}/",
    "{{ mount }}{{ asset(",
    "{{ root }}{{ place }}",
    "{{ jobs_of(root, ",
    "{{ root }}{{ path }}",
    "{{ root }}{{ each.place }}",
    "#",
)
TEMPLATES = sorted((rendering.HERE / "templates").glob("*.html"))


class Reader(HTMLParser):
    """Reads a page: its tags, links and text; anything that would run code is an error."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.tags: list[str] = []
        self.text = ""
        self.feed(without_our_script(text))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "img", "iframe", "object", "style"), tag
        for name, value in attrs:
            assert not name.startswith("on") and name != "style", (tag, name)
            if name in ("href", "action", "src"):
                self.links.append(value or "")
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


async def page(browser: httpx.AsyncClient, path: str, status: int = 200) -> Reader:
    answer = await browser.get(path)
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    return Reader(answer.text)


async def items(browser: httpx.AsyncClient, path: str) -> list[Any]:
    answer = await browser.get(path, headers=JSON)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/json"
    found: list[Any] = answer.json()["items"]
    return found


@pytest.mark.promise("F140")
@pytest.mark.promise("F141")
async def test_every_page_of_an_empty_queue_says_what_to_do(dsn: str) -> None:
    async with reading(dsn) as browser:
        for path in PATHS:
            found = await page(browser, path)
            assert found.tags.count("h1") == found.tags.count("main") == found.tags.count("title") == 1
            document = (await browser.get(path, headers=JSON)).json()
            assert isinstance(document["items"], list)
        assert "There is no job yet. Enqueue one: pgqueue enqueue" in (await page(browser, "/jobs")).text
        assert "No worker runs. Start one: pgqueue work" in (await page(browser, "/workers")).text


@pytest.mark.promise("F80")
async def test_pages_with_numbers_of_jobs_say_when_they_were_counted(dsn: str, conn: psycopg.Connection[Any]) -> None:
    pgqueue.enqueue(conn, "web.waits")
    conn.commit()
    async with reading(dsn) as browser:
        for path, text in (("/", "Jobs counted at <time"), ("/queues", "Jobs counted <time")):
            assert text in (await browser.get(path)).text, path


@pytest.mark.promise("F82")
async def test_the_overview_leads_to_the_overdue_job_that_makes_a_queue_old(
    dsn: str, conn: psycopg.Connection[Any]
) -> None:
    later = (
        "INSERT INTO pgqueue.job (state, task, queue, run_at) VALUES ('scheduled', 'late', 'q', now() - interval '2 h')"
    )
    conn.execute(later)
    conn.commit()
    async with reading(dsn) as browser:
        found = await page(browser, "/")
        assert "has waited for 2 h, in queue q" in found.text
        links = [link for link in found.links if "queue=q" in link and "available" in link]
        assert len(links) == 2, "that of the finding, and that of the oldest job"
        for link in links:
            assert [each["task"] for each in await items(browser, link)] == ["late"]


@pytest.fixture
def failing() -> Any:
    @pgqueue.task(name="web.fails", retry=RetryPolicy(attempts=1))
    def fails(**facts: Any) -> None:
        raise ValueError(f"no {facts}")

    return fails


@pytest.mark.promise("F140")
@pytest.mark.promise("F141")
async def test_a_failed_job_with_all_that_is_known_of_it(dsn: str, conn: psycopg.Connection[Any], failing: Any) -> None:
    job = failing.enqueue(conn, order_id=7)
    drain(conn)
    conn.commit()
    pgqueue.retry(conn, job.id, actor="ada")
    drain(conn)
    conn.commit()
    async with reading(dsn) as browser:
        shown = await page(browser, f"/jobs/{job.id}")
        for text in ("web.fails", "failed", '"order_id": 7', "ValueError", "retry by ada", "frames of pgqueue"):
            assert text in shown.text, text
        assert shown.tags.count("details") >= 1
        [item] = await items(browser, f"/jobs/{job.id}")
        assert (item["id"], item["state"], item["args"]) == (job.id, "failed", {"order_id": 7})
        assert item["why"][0]["code"] == "failed" and item["attempts"][0]["error_type"] == "ValueError"
        assert item["changes"][0]["actor"] == "ada"


@pytest.mark.promise("F160")
async def test_the_page_of_a_job_leads_to_its_workers_and_successors(dsn: str, conn: psycopg.Connection[Any]) -> None:
    @pgqueue.task(name="web.receipt")
    def receipt(order: int) -> None: ...

    @pgqueue.task(name="web.order", retry=RetryPolicy(attempts=2, first=0))
    def order(order: int) -> dict[str, int]:
        job = pgqueue.current_job()
        if job.attempt == 1:
            raise ConnectionError("no route")
        job.enqueue(receipt, order)
        return {"cents": 990}

    job = order.enqueue(conn, order=7)
    drain(conn)
    [[worker]] = conn.execute("SELECT DISTINCT worker_id FROM pgqueue.job_done").fetchall()
    conn.commit()
    async with reading(dsn) as browser:
        [item] = await items(browser, f"/jobs/{job.id}")
        [successor] = item["successors"]
        assert (successor["task"], successor["state"], item["predecessor"]) == ("web.receipt", "completed", None)
        shown = await page(browser, f"/jobs/{job.id}")
        assert f"/jobs/{successor['id']}" in shown.links
        for text in ("attempt 1 on worker", "ConnectionError: no route", "attempt 2 on worker", '"cents": 990'):
            assert text in shown.text, text
        to_worker = [link for link in shown.links if link.startswith(f"/jobs?worker={worker}&")]
        assert len(to_worker) == 3, "the job's worker, that of the failed attempt, that of the last one"
        assert {each["id"] for each in await items(browser, to_worker[0])} == {job.id, successor["id"]}
        after = await page(browser, f"/jobs/{successor['id']}")
        assert f"/jobs/{job.id}" in after.links and "Enqueued by" in after.text
        [known] = await items(browser, f"/jobs/{successor['id']}")
        assert (known["predecessor"], known["successors"]) == (job.id, [])


@pytest.mark.promise("F161")
async def test_schedules_are_said_in_words_with_their_next_times(dsn: str, conn: psycopg.Connection[Any]) -> None:
    add = pgqueue.schedules.add
    add(conn, "berlin", Cron("0 9 * * *", tz="Europe/Berlin"), "report")
    add(conn, "paused", Cron("*/15 * * * MON-FRI"), "report")
    add(conn, "poll", pgqueue.Every("90m"), "feed")
    add(conn, "wrong", Cron("0 9 * * *"), "report")
    pgqueue.schedules.pause(conn, "paused")
    conn.execute("UPDATE pgqueue.schedule SET line = 'at noon', refused = 'no cron line' WHERE name = 'wrong'")
    for name, at in (("berlin", "2026-03-27 08:00+00"), ("poll", "2026-03-27 07:30+00")):  # clocks turn on the 29th
        conn.execute("UPDATE pgqueue.schedule SET next_at = %s WHERE name = %s", [at, name])
    conn.commit()
    async with reading(dsn) as browser:
        berlin, paused, poll, wrong = await items(browser, "/schedules")
        assert berlin["words"] == "At 09:00 every day, Europe/Berlin"
        assert [each["local"] for each in berlin["ticks"]] == [
            "Fri 2026-03-27 09:00:00 CET",
            "Sat 2026-03-28 09:00:00 CET",
            "Sun 2026-03-29 09:00:00 CEST",
        ]
        assert [each["at"][11:] for each in berlin["ticks"]] == ["08:00:00+00:00", "08:00:00+00:00", "07:00:00+00:00"]
        assert paused["words"].endswith("on Monday through Friday, UTC") and paused["ticks"] == []
        assert poll["words"].startswith("Every 1 hour 30 minutes")
        assert [each["local"][15:] for each in poll["ticks"]] == ["07:30:00 UTC", "09:00:00 UTC", "10:30:00 UTC"]
        assert (wrong["words"], wrong["ticks"], wrong["state"]) == (None, [], "refused")
        shown = (await page(browser, "/schedules")).text
        for text in ("At 09:00 every day, Europe/Berlin", "0 9 * * *", "CEST = 2026-03-29 07:00:00 UTC", "at noon"):
            assert text in shown, text


@pytest.mark.promise("F162")
async def test_the_overview_asks_once_for_the_numbers_and_names_the_oldest_job(
    dsn: str, conn: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    conn.execute(
        "INSERT INTO pgqueue.job (task, queue, enqueued_at) "
        "SELECT 't', 'mail', now() - make_interval(mins => g) FROM generate_series(1, 3) AS g"
    )
    pgqueue.remote("t").using(queue="other").enqueue(conn)
    conn.commit()
    asked: list[str | None] = []
    measured = numbers.measured

    def counted(schema: str, queue: str | None = None) -> Any:
        asked.append(queue)
        return measured(schema, queue)

    monkeypatch.setattr(numbers, "measured", counted)
    async with reading(dsn) as browser:
        found = (await browser.get("/", headers=JSON)).json()
        assert asked == [None]
        assert found["oldest"]["queue"] == "mail" and found["oldest"]["seconds"] >= 180
        assert {each["state"]: each["jobs"]["n"] for each in found["items"]}["available"] == 4
        assert {each["name"] for each in found["findings"]} == {"unserved"}, "the doctor has the same numbers"
        shown = await page(browser, "/")
        assert "The oldest job that could run has waited for 3 m" in shown.text
        assert "/jobs?queue=mail&state=available&state=scheduled" in shown.links


async def test_where_no_error_is_counted_the_page_says_when_one_is(dsn: str) -> None:
    async with reading(dsn) as browser:
        for path in ("/errors", "/errors?queue=none"):
            shown = await page(browser, path)
            assert "A failure is counted about two minutes after it." in shown.text
            assert "/jobs?state=retrying&state=failed" in shown.links


@pytest.mark.promise("F140")
async def test_a_job_that_is_not_there(dsn: str) -> None:
    async with reading(dsn) as browser:
        assert "There is no job 4711" in (await page(browser, "/jobs/4711", 404)).text
        answer = await browser.get("/jobs/4711", headers=JSON)
        assert (answer.status_code, answer.json()["items"], answer.json()["error"]["code"]) == (404, [], 404)


@pytest.mark.promise("F140")
async def test_filters_stand_in_the_url_and_pages_reach_the_last_job(dsn: str, conn: psycopg.Connection[Any]) -> None:
    task = pgqueue.remote("web.listed")
    jobs = [
        task.using(queue="even" if n % 2 == 0 else "odd", lock=f"k:{n}").enqueue(conn, n=n, inner={"n": n}).id
        for n in range(7)
    ]
    conn.commit()
    async with reading(dsn) as browser:
        for query, wanted in {
            "queue=odd": [1, 3, 5],
            "arg=inner.n=4": [4],
            "arg=n=4&arg=inner.n=4": [4],
            "arg=n=4&arg=inner.n=5": [],
            "key=k:2": [2],
            "task=web.listed&queue=even&since=1h": [0, 2, 4, 6],
            "until=1h": [],
            "task=other": [],
            "state=available&state=failed": list(range(7)),
            "state=failed": [],
        }.items():
            found = [job["id"] for job in await items(browser, f"/jobs?{query}")]
            assert found == [jobs[n] for n in reversed(wanted)], query
        seen: list[int] = []
        path: str | None = "/jobs?queue=&state=available&limit=3"
        while path is not None:
            seen += [job["id"] for job in await items(browser, path)]
            links = [
                link for link in (await page(browser, path)).links if link.startswith("/jobs?") and "after=" in link
            ]
            assert all("state=available" in link and "limit=3" in link for link in links)
            path = links[0] if links else None
        assert seen == jobs[::-1]
        to_job = await browser.get(f"/jobs?id={jobs[0]}&queue=x")
        assert (to_job.status_code, to_job.headers["location"]) == (303, f"/jobs/{jobs[0]}")
        assert 'value="inner.n=4"' in (await browser.get("/jobs?arg=inner.n=4")).text


@pytest.mark.promise("F158")
async def test_workers_and_errors_lead_to_their_jobs(dsn: str, conn: psycopg.Connection[Any], failing: Any) -> None:
    job = failing.enqueue(conn, order_id=7)
    other = pgqueue.remote("web.other").enqueue(conn)
    drain(conn)
    conn.execute(
        "INSERT INTO pgqueue.error_group (fingerprint, queue, task, error_type, first_at, last_at, count, job_ids) "
        "VALUES ('f', 'default', 'web.fails', 'ValueError', now(), now(), 1, ARRAY[%s::bigint])",
        [job.id],
    )
    [[worker]] = conn.execute("SELECT worker_id FROM pgqueue.attempt").fetchall()
    conn.execute(
        "INSERT INTO pgqueue.worker (id, lease, pid, concurrency, host, version_tag, queues, state) "
        "OVERRIDING SYSTEM VALUE VALUES (%s, '15 s', 1, 1, 'host', '1', '{default}', 'running') ON CONFLICT DO NOTHING",
        [worker],
    )
    conn.commit()
    async with reading(dsn) as browser:
        for path, filter in (("/workers", f"/jobs?worker={worker}&"), ("/errors", "/jobs?error_type=ValueError&")):
            [link] = [link for link in (await page(browser, path)).links if link.startswith(filter)]
            assert [each["id"] for each in await items(browser, link)] == [job.id], link
        found = await page(browser, "/jobs?error_type=ValueError&worker=1")
        assert f"/jobs/{other.id}" not in found.links
        assert [each["id"] for each in await items(browser, "/jobs?error_type=Value")] == []
    hidden = {"redact_with": lambda path, value: "-" if path[-1] == "error_type" else value}
    async with reading(dsn, **hidden) as browser:
        answer = await browser.get("/jobs?error_type=ValueError")
        assert answer.status_code == 400 and "is redacted" in answer.text


@pytest.mark.promise("F140")
@pytest.mark.parametrize(
    "query",
    ["worker=x", "worker=0",
     "state=odd", "limit=0", "limit=x", "during=x/1", "during=2026-12-24T18:00/1e9", "after=-1", "id=x",
     "since=yesterday",
     "since=999999d", "until=999999d", "since=739999d", "arg=x", "arg=.=1", "arg=a=1&arg=a.b=2",
     "after=99999999999999999999", "after=x", "state=failed&after=7", "queue=%00", "x=" + "y" * 9_000],
)  # fmt: skip
async def test_a_wrong_filter_is_answered_in_our_words(dsn: str, query: str) -> None:
    async with reading(dsn) as browser:
        answer = await browser.get(f"/jobs?{query}")
        assert answer.status_code in (400, 414), answer.text
        assert "Traceback" not in answer.text


@pytest.mark.promise("F140")
async def test_a_time_before_the_first_year_is_refused_on_every_page(dsn: str) -> None:
    async with reading(dsn) as browser:
        for path in ("/errors", "/jobs"):
            answer = await browser.get(f"{path}?since=999999d")
            assert answer.status_code == 400 and "since: write 2h" in answer.text


def test_filters_are_read_as_they_are_written() -> None:
    assert arguments([]) is None
    assert arguments(["a.b=1", 'a.c="1"', "d=x=y", "e="]) == {"a": {"b": 1, "c": "1"}, "d": "x=y", "e": ""}
    with pytest.raises(Problem):
        arguments([".".join("a" * 30) + "=1"])
    at = moment("2026-12-24T18:00", "since")
    assert at is not None and at.isoformat() == "2026-12-24T18:00:00+00:00"


def test_our_frames_are_folded_and_no_line_is_lost() -> None:
    text = (
        'Traceback:\n  File "/x/pgqueue/worker/run/run.py", line 1\n    f()\n    ~~\n'
        '  File "/app/shop.py", line 2\n    g()\n  File "/x/pgqueue/client/tasks.py", line 3\nValueError: no'
    )
    pieces = folded(text)
    assert [ours for ours, _ in pieces] == [False, True, False, True, False]
    assert "\n".join(piece for _, piece in pieces) == text


@pytest.mark.promise("F140")
@pytest.mark.parametrize("state", ["scheduled", "failed", "retrying"])
async def test_pages_in_the_order_of_a_time_reach_the_last_job(
    dsn: str, conn: psycopg.Connection[Any], failing: Any, state: str
) -> None:
    later = pgqueue.remote("web.later")
    jobs = [
        (failing.enqueue(conn, n=n) if state == "failed" else later.using(delay=900 - n).enqueue(conn)).id
        for n in range(5)
    ]
    drain(conn)
    conn.commit()
    async with reading(dsn) as browser:
        seen: list[int] = []
        path: str | None = f"/jobs?state={state}&limit=2"
        while path is not None:
            seen += [job["id"] for job in await items(browser, path)]
            links = [
                link for link in (await page(browser, path)).links if link.startswith("/jobs?") and "after=" in link
            ]
            path = links[0] if links else None
        assert seen == ([] if state == "retrying" else jobs[::-1])


@pytest.mark.promise("F139")
async def test_a_job_that_is_nested_deeply_ends_no_page(dsn: str, conn: psycopg.Connection[Any]) -> None:
    deep = "[" * 700 + "]" * 700
    for depth in (700, 49):
        args = f'{{"x": {deep[700 - depth : 700 + depth]}}}'
        conn.execute("INSERT INTO pgqueue.job (task, args) VALUES ('web.deep', %s::jsonb)", (args,))
    conn.commit()
    async with reading(dsn) as browser:
        shallow, nested = await items(browser, "/jobs")
        assert nested["args"] == {"pgqueue": "not shown: nested in more than 50 levels"}
        assert json.dumps(shallow["args"]) == f'{{"x": {deep[651:749]}}}'
        for job in (shallow, nested):
            await page(browser, f"/jobs/{job['id']}")
        await page(browser, "/jobs")
        assert (await browser.get(f"/jobs?arg=x={deep}")).status_code == 400
        assert (await browser.get(f"/jobs?arg=x={'[' * 7_000}")).status_code == 200, "a text"


@pytest.mark.promise("F141")
@pytest.mark.parametrize(
    ("number", "shown"),
    [
        ("1" + "0" * 400 + ".5", "1" + "0" * 400 + ".5"),
        ("-1" + "0" * 400 + ".5", "-1" + "0" * 400 + ".5"),
        ("1" + "0" * 400, 10**400),
        ("1" + "0" * 300 + ".5", 1e300),
        ("0." + "0" * 400 + "5", 0.0),
    ],
)
async def test_a_number_that_python_has_not_is_valid_json(
    dsn: str, conn: psycopg.Connection[Any], number: str, shown: Any
) -> None:
    conn.execute(
        "INSERT INTO pgqueue.job (task, state, started_at, finished_at, reason, args, headers, result) SELECT "
        "'web.number', 'failed', now(), now(), 'why', j, j, j FROM jsonb_build_object('x', %s::numeric) AS j",
        (number,),
    )
    conn.commit()

    def refused(constant: str) -> None:
        raise ValueError(constant)

    async with reading(dsn) as browser:
        ids = [job["id"] for job in await items(browser, "/jobs")]
        for path in ("/jobs", f"/jobs/{ids[0]}"):
            answer = await browser.get(path, headers={"accept": "application/json"})
            for job in json.loads(answer.text, parse_constant=refused)["items"]:
                assert job["args"] == job["headers"] == job["result"] == {"x": shown}
            assert "Infinity" not in (await browser.get(path)).text
        assert (await browser.get("/jobs?arg=x=1e999")).status_code == 400


async def test_a_search_says_what_it_has_looked_at_and_goes_on(
    dsn: str, conn: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from pgqueue.admin import queries

    monkeypatch.setattr(queries, "SEARCHED_MOST", 10)
    task = pgqueue.remote("web.searched")
    first = task.enqueue(conn, wanted=True).id
    for n in range(15):
        task.enqueue(conn, n=n)
    conn.commit()
    async with reading(dsn) as browser:
        shown = await page(browser, "/jobs?arg=wanted=true")
        assert "Searched 10 jobs of these states; others may fit" in shown.text
        [on] = [link for link in shown.links if link.startswith("/jobs?") and "after=" in link]
        assert [job["id"] for job in await items(browser, on)] == [first]


@pytest.mark.promise("F139")
async def test_foreign_text_is_shown_as_text_everywhere(dsn: str, conn: psycopg.Connection[Any]) -> None:
    """Names that enqueue would refuse are written into the row, as a foreign writer could."""

    @pgqueue.task(name="evil", retry=RetryPolicy(attempts=1))
    def evil(**facts: Any) -> None:
        raise type(EVIL, (Exception,), {})(EVIL)

    printable = EVIL.replace("\u202e", "")
    failed = evil.using(headers={"said": EVIL}, unique=printable).enqueue(conn, **{"text": EVIL, "key": {EVIL: EVIL}})
    drain(conn)
    waits = [
        pgqueue.remote("later").using(lock=printable, delay=900).enqueue(conn, text=EVIL).id,
        pgqueue.remote("later").using(lock=printable).enqueue(conn, text=EVIL).id,
    ]
    pgqueue.schedules.add(conn, "evil", Cron("0 6 * * *"), "later", text=EVIL)
    conn.execute("UPDATE pgqueue.schedule SET name = %s, refused = %s, task = %s", (EVIL, EVIL, EVIL))
    conn.execute("SET LOCAL session_replication_role = replica")  # our trigger refuses an UPDATE of jobs
    conn.execute("UPDATE pgqueue.job_available SET task = %s", (EVIL,))
    conn.execute("UPDATE pgqueue.job_scheduled SET task = %s, queue = %s", (EVIL, EVIL[:40]))
    conn.commit()
    async with reading(dsn, redact=()) as browser:
        for path in [*PATHS, f"/jobs/{failed.id}", *(f"/jobs/{id}" for id in waits)]:
            answer = await browser.get(path)
            assert answer.status_code == 200, answer.text
            Reader(answer.text)  # fails at a tag or an attribute that runs code
            assert (
                "<script" not in without_our_script(answer.text)
                and "<img" not in answer.text
                and "\u202e" not in answer.text
            )
        assert "<script>alert('x')</script>" in Reader((await browser.get(f"/jobs/{failed.id}")).text).text
        for query in ("queue", "task", "key", "arg", "since", "x"):
            Reader((await browser.get("/jobs", params={query: EVIL})).text)
        Reader((await browser.get("/errors", params={"queue": EVIL, "task": EVIL})).text)


@pytest.mark.promise("F139")
@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.name)
def test_no_template_has_inline_code_or_an_unescaped_value(template: Path) -> None:
    text = template.read_text(encoding="utf-8").replace(OUR_SCRIPT, "")
    assert re.findall(r"\|\s*safe\b|autoescape|<script|<style|\bstyle=|\bon\w+=|javascript:|https?://", text) == []
    # Every link is below the mount, but for that to a manual that is published.
    text = text.replace('{% if at is published %}<a href="{{ at }}">', "")
    links = re.findall(r'(?:href|action|src)="([^"]*)"', text)
    assert [link for link in links if not link.startswith(OUR_LINKS)] == []
    for source in (rendering.HERE).rglob("*.py"):
        assert not re.search(r"Markup\(|autoescape=False", source.read_text(encoding="utf-8")), source


@pytest.mark.second  # the worker says what runs at its heartbeat
async def test_workers_and_what_they_run_and_the_keys_they_hold(dsn: str, conn: psycopg.Connection[Any]) -> None:
    gate = asyncio.Event()

    @pgqueue.task(name="web.held", limit=Limit(1, name="web"), rate=Rate("1000/second", name="webrate"))
    async def held() -> None:
        await gate.wait()

    @pgqueue.task(name="web.locked", lock="web:7")
    async def locked() -> None:
        await gate.wait()

    jobs = [held.enqueue(conn).id, held.enqueue(conn).id, locked.enqueue(conn).id, locked.enqueue(conn).id]
    conn.commit()
    async with work(dsn, held, locked), reading(dsn) as browser:

        async def settled() -> Any:
            """Both pages, once the worker has said what runs and the other jobs wait."""
            [worker] = await items(browser, "/workers")
            listed = (await browser.get("/limits", headers=JSON)).json()
            ready = worker["busy"] == 2 and len(listed["items"]) == 1 and listed["limits"][0]["waiting"] == 1
            return (worker, listed) if ready else None

        found: Any = await until(settled)
        worker, listed = found
        assert {job["id"] for job in worker["jobs"]} == {jobs[0], jobs[2]}
        assert listed["rates"][0]["name"] == "webrate"
        workers, limits = await page(browser, "/workers"), await page(browser, "/limits")
        assert f"/jobs/{jobs[0]}" in workers.links and "2 of" in workers.text
        assert f"/jobs/{jobs[2]}" in limits.links and "web:7" in limits.text
        assert f"/jobs/{jobs[0]}" in (await page(browser, f"/jobs/{jobs[1]}")).links, "why names the holder"
        assert "Live workers: 1." in (await page(browser, "/")).text
        gate.set()


# What fails -----------------------------------------------------------------------------------------------------------


@pytest.mark.promise("F140")
async def test_a_slow_statement_ends_after_its_time(
    dsn: str, conn: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here it waits for a lock. Of the overview the parts that are answered are shown."""
    monkeypatch.setattr(connections, "STATEMENT_SECONDS", 0.25)
    conn.execute("LOCK TABLE pgqueue.audit IN ACCESS EXCLUSIVE MODE")
    other = psycopg.connect(dsn, autocommit=True)
    id = pgqueue.remote("web.slow").enqueue(other).id
    other.close()
    async with reading(dsn) as browser:
        answer = await browser.get(f"/jobs/{id}")
        assert answer.status_code == 503 and answer.headers["retry-after"] == "5"
        assert "took more than 2 seconds" in answer.text
        assert (await browser.get("/queues")).status_code == 200
        conn.rollback()
        assert (await browser.get(f"/jobs/{id}")).status_code == 200
        monkeypatch.setattr(connections, "STATEMENT_SECONDS", 1)  # the other parts need a moment
        conn.execute("LOCK TABLE pgqueue.history_minute IN ACCESS EXCLUSIVE MODE")
        overview = await page(browser, "/")
        assert "A part of this page is missing" in overview.text and "PostgreSQL" in overview.text


@pytest.mark.promise("F140")
async def test_a_database_without_tables_and_one_that_is_not_there(
    empty_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "WAIT_SECONDS", 0.25)
    async with reading(empty_dsn) as browser:
        for path in PATHS:
            answer = await browser.get(path)
            if path == "/":  # the doctor has an answer to this
                assert "run <code>pgqueue migrate</code>" in answer.text
                continue
            assert answer.status_code == 503 and "pgqueue migrate" in answer.text, path
    async with reading("postgresql://app:hunter2@127.0.0.1:1/nowhere?connect_timeout=1") as browser:
        answer = await browser.get("/queues", headers=JSON)
        assert answer.status_code == 503 and answer.json()["items"] == []
        assert "cannot be reached" in answer.json()["error"]["title"] and "hunter2" not in answer.text


@pytest.mark.promise("F162")
@pytest.mark.parametrize("path", ["/", "/queues"])
async def test_a_database_that_is_away_is_named_at_once_without_its_password(
    monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """One refuses. One does not answer: its kernel takes the connection, and nothing reads. No page waits a minute."""
    monkeypatch.setattr(connections, "WAIT_SECONDS", 60)
    monkeypatch.setattr(connections, "ANSWER_SECONDS", 0.7)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for port, why in ((1, "refused"), (silent.getsockname()[1], "does not answer")):
            began = monotonic()
            async with reading(f"postgresql://app:hunter2@127.0.0.1:{port}/shop") as browser:
                answer = await browser.get(path)
            assert answer.status_code == 503 and monotonic() - began < 30
            assert f"database shop at 127.0.0.1:{port}" in answer.text and why in answer.text, answer.text
            assert "The database cannot be reached" in answer.text and "hunter2" not in answer.text


@pytest.mark.promise("F162")
async def test_connections_that_were_lost_while_they_were_idle_cost_no_page(
    dsn: str, conn: psycopg.Connection[Any]
) -> None:
    async with reading(dsn) as browser:
        await asyncio.gather(*(browser.get("/queues") for _ in range(8)))
        lost = conn.execute(
            "SELECT count(pg_terminate_backend(pid, 5000)) FROM pg_stat_activity WHERE application_name = 'pgqueue web'"
        ).fetchone()
        assert lost is not None and lost[0] >= 1
        answers = await asyncio.gather(*(browser.get("/queues") for _ in range(8)))
        assert {answer.status_code for answer in answers} == {200}


@pytest.mark.promise("F162")
async def test_a_request_waits_for_its_turn_while_others_have_all_connections(
    dsn: str, conn: psycopg.Connection[Any], eyes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not try to connect: that would fail here, and says nothing of its turn."""
    monkeypatch.setattr(connections, "WAIT_SECONDS", 60)
    monkeypatch.setattr(connections, "STATEMENT_SECONDS", 60)

    async def refused(dsn: str) -> None:
        raise connections.Unreachable("asked although the database is there")

    async with reading(dsn) as browser:
        await browser.get("/queues")
        conn.execute("LOCK TABLE pgqueue.bulk IN ACCESS EXCLUSIVE MODE")
        waiting = [asyncio.create_task(browser.get("/bulk")) for _ in range(connections.CONNECTIONS_MOST)]
        held = (
            "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'pgqueue web' AND wait_event_type = 'Lock'"
        )

        async def all_held() -> Any:
            return eyes.one(held) == connections.CONNECTIONS_MOST

        await until(all_held)
        monkeypatch.setattr(connections, "_reach", refused)  # not before: each of the others may try, if it is slow
        turn = asyncio.create_task(browser.get("/queues"))
        assert not (await asyncio.wait({turn}, timeout=2 * connections.SILENCE_SECONDS))[0]
        conn.rollback()
        assert {(await each).status_code for each in (*waiting, turn)} == {200}


async def test_nothing_is_written_and_no_connection_waits_in_a_transaction(dsn: str, eyes: Any) -> None:
    async with reading(dsn) as browser:
        await asyncio.gather(*(browser.get(path) for path in PATHS * 3))
        states = {
            state
            for _, state in eyes.all("SELECT pid, state FROM pg_stat_activity WHERE application_name = 'pgqueue web'")
        }
        assert states == {"idle"}
        number = eyes.one("SELECT count(*) FROM pg_stat_activity WHERE application_name = 'pgqueue web'")
        assert 1 <= number <= 4


@pytest.mark.promise("F140")
async def test_the_grants_for_reading_are_enough_for_every_page(dsn: str, role: Role, failing: Any) -> None:
    with psycopg.connect(dsn) as conn:
        job = failing.enqueue(conn, order_id=7)
        drain(conn)
    async with reading(role("read")) as browser:
        for path in [*PATHS, f"/jobs/{job.id}"]:
            shown = await page(browser, path)
            assert "is missing" not in shown.text, shown.text


@pytest.mark.second
@pytest.mark.promise("F140", "F352")
async def test_every_page_of_a_standby(own_server: Server, failing: Any) -> None:
    primary, dsn = own_server.cluster, own_server.dsn("postgres")
    assert primary is not None
    migrations.migrate(dsn)
    with psycopg.connect(dsn) as conn:
        job = failing.enqueue(conn, order_id=7)
        drain(conn)
    with standby(primary) as second:
        catch_up(primary, second)
        async with reading(second.dsn("postgres")) as browser:
            for path in [*PATHS, f"/jobs/{job.id}"]:
                shown = (await page(browser, path)).text
                assert "is missing" not in shown and "This is a standby." in shown, path
        async with dashboard_of(second.dsn("postgres"), lambda visitor: {"cancel"}) as made, browsing(made) as browser:
            answer = await browser.post(f"/jobs/{job.id}/cancel", headers={"sec-fetch-site": "same-origin"})
            assert answer.status_code == 503 and "only reads" in answer.text


# Mounted --------------------------------------------------------------------------------------------------------------


@pytest.mark.promise("F142")
@pytest.mark.parametrize("deep", [False, True])
async def test_below_a_path_every_link_and_redirect_stays_below_it(dsn: str, deep: bool) -> None:
    from starlette.applications import Starlette
    from starlette.routing import Mount

    root = "/ops/jobs" if deep else "/jobs"
    async with dashboard_of(dsn) as made:
        inner = Starlette(routes=[Mount("/jobs", app=made)])
        app = Starlette(routes=[Mount("/ops", app=inner)]) if deep else inner
        async with browsing(app) as browser:
            answer = await browser.get(f"{root}/queues")
            assert unquote(answer.headers["location"]) == f"{root}/login?next=/queues"
            signed = await browser.post(
                f"{root}/login",
                data={"secret": SECRETS.reader, "next": "/jobs?state=failed"},
                headers={"sec-fetch-site": "same-origin"},
            )
            assert signed.headers["location"] == f"{root}/jobs?state=failed"
            assert f"path={root};" in signed.headers["set-cookie"].lower()
            links: set[str] = set()
            for path in PATHS:
                links |= set((await page(browser, root + path)).links)
            assert [link for link in links if not link.startswith((f"{root}/", "#"))] == []
            for link in {link for link in links if link.startswith("/")} - {f"{root}/logout"}:
                assert (await browser.get(link)).status_code == 200, link
            assert "Jobs" in (await page(browser, f"{root}/jobs")).text


@pytest.mark.promise("F142")
async def test_the_path_of_the_public_url_is_before_every_link(dsn: str) -> None:
    async with dashboard_of(dsn, public_url="https://ops.example/q") as made, browsing(made) as browser:
        told = await browser.post("/login", data={"secret": SECRETS.reader}, headers={"origin": "https://ops.example"})
        assert told.headers["location"] == "/q/" and "; secure" in told.headers["set-cookie"].lower()
        assert "path=/q;" in told.headers["set-cookie"].lower()


@pytest.mark.promise("F142")
@pytest.mark.parametrize("before", ["/q", ""], ids=["left by the proxy", "taken off by the proxy"])
@pytest.mark.parametrize("path", ["/", "/jobs", "/q"])
async def test_a_proxy_may_leave_the_path_of_the_public_url(dsn: str, before: str, path: str) -> None:
    """Naive: the login sends a browser to the login, for ever."""
    async with dashboard_of(dsn, public_url="https://ops.example/q") as made, browsing(made) as browser:
        away = await browser.get(before + path)
        page_of = {"/q": "/", "/q/q": "/q", "/": "/", "/q/": "/", "/jobs": "/jobs", "/q/jobs": "/jobs"}[before + path]
        wanted = "/q/login" if page_of == "/" else f"/q/login?{urlencode({'next': page_of})}"
        assert (away.status_code, away.headers["location"]) == (303, wanted)
        assert (await browser.get(f"{before}/login")).text.count('action="/q/login"') == 1
        signed = {"origin": "https://ops.example"}
        told = await browser.post(f"{before}/login", data={"secret": SECRETS.reader, "next": "/jobs"}, headers=signed)
        assert (told.status_code, told.headers["location"]) == (303, "/q/jobs")
        cookie = {"cookie": told.headers["set-cookie"].partition(";")[0]}
        for each in ("/", "/jobs", "/static/pgqueue.css"):
            assert (await browser.get(before + each, headers=cookie)).status_code == 200, each
        assert (await browser.get(f"{before}/quite", headers=cookie)).status_code == 404
        assert (await browser.get("/q", headers=cookie)).text.count("<title>Overview ·") == 1


@pytest.mark.promise("F142")
async def test_a_page_comes_before_a_path_of_the_same_name(dsn: str) -> None:
    async with (
        dashboard_of(dsn, lambda visitor: "read", public_url="https://ops.example/jobs") as made,
        browsing(made) as browser,
    ):
        for path, title in {"/jobs": "Jobs", "/": "Overview", "/jobs/jobs": "Jobs", "/jobs/queues": "Queues"}.items():
            assert (await browser.get(path)).text.count(f"<title>{title} ·") == 1, path


@pytest.mark.promise("F142")
async def test_under_wsgi_the_path_is_that_of_the_page(dsn: str) -> None:
    """a2wsgi gives the mount apart from the path: here a mount that has the name of a page."""
    async with dashboard_of(dsn, lambda visitor: "read") as made:

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await made(scope | {"root_path": "/jobs", "wsgi_environ": {}}, receive, send)

        async with browsing(app) as browser:
            assert "/jobs/jobs" in (await page(browser, "/jobs")).links
            assert (await browser.get("/")).text.count("<title>Overview ·") == 1


@pytest.mark.promise("F142")
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_nothing_is_connected_before_the_first_request_and_another_loop_has_its_own(dsn: str, eyes: Any) -> None:
    from pgqueue.web import dashboard

    pgqueue.configure(dsn=dsn)
    made = dashboard.made(lambda visitor: "read")

    async def ask(requests: int) -> set[int]:
        async with browsing(made) as browser:
            answers = await asyncio.gather(*(browser.get("/queues") for _ in range(requests)))
            return {answer.status_code for answer in answers}

    count = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'pgqueue web'"
    assert eyes.one(count) == 0
    assert asyncio.run(ask(1)) == {200}
    first = made.sources[None].connections._pool
    # The first loop has ended, and with it all that would open another connection for its pool.
    assert asyncio.run(ask(4)) == {200}
    assert made.sources[None].connections._pool is not first


@pytest.mark.promise("F162")
def test_a_loop_ends_while_a_connection_is_being_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of a server at its end, if the dashboard is mounted and not told of it. The database does not answer."""
    from pgqueue.web import dashboard

    monkeypatch.setattr(connections, "ANSWER_SECONDS", 0.7)
    made = dashboard.made(lambda visitor: "read")
    statuses: list[int] = []

    async def ask() -> None:
        async with browsing(made) as browser:
            statuses.append((await browser.get("/queues")).status_code)

    with socket.create_server(("127.0.0.1", 0)) as silent:
        pgqueue.configure(dsn=f"postgresql://app@127.0.0.1:{silent.getsockname()[1]}/shop")
        loop = Thread(target=lambda: asyncio.run(ask()), daemon=True)
        loop.start()
        loop.join(60)
    assert statuses == [503] and not loop.is_alive()


async def test_the_server_tells_of_its_end_and_the_connections_are_closed(dsn: str) -> None:
    async with dashboard_of(dsn, lambda visitor: "read") as made, browsing(made) as browser:
        await browser.get("/queues")
        events = iter(["lifespan.startup", "lifespan.shutdown"])
        told: list[str] = []

        async def receive() -> Any:
            return {"type": next(events)}

        async def send(message: Any) -> None:
            told.append(message["type"])

        await made({"type": "lifespan"}, receive, send)
        assert told == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
        assert made.sources[None].connections._pool is None
        assert (await browser.get("/queues")).status_code == 200, "a request opens it again"
        told.clear()
        await made({"type": "websocket"}, receive, send)
        assert told == ["websocket.close"]


@pytest.mark.promise("F162")
async def test_a_pool_that_was_closed_is_made_anew(dsn: str) -> None:
    """As when an application cancels every task of its loop, and goes on."""
    async with dashboard_of(dsn, lambda visitor: "read") as made, browsing(made) as browser:
        assert (await browser.get("/queues")).status_code == 200
        closing = made.sources[None].connections._closing
        assert closing is not None
        closing.cancel()
        await asyncio.wait([closing])
        assert (await browser.get("/queues")).status_code == 200


async def test_the_answer_to_head_has_no_other_status(dsn: str) -> None:
    async with dashboard_of(dsn) as made, browsing(made) as browser:
        await signed_in(browser, SECRETS.reader)
        assert (await browser.head("/jobs")).status_code == 200


def test_the_statement_that_a_server_quotes_stays_out_of_a_page(dsn: str) -> None:
    with psycopg.connect(dsn) as conn, pytest.raises(psycopg.errors.UndefinedColumn) as caught:
        conn.execute("SELECT nothing FROM pgqueue.job")
    assert problem_of(caught.value).text == 'column "nothing" does not exist'
