"""The list of jobs: what a row says, the tabs, the parts of the filter, the field that takes more of them."""

from __future__ import annotations

import re
from html import unescape
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

import httpx
import psycopg
import pytest
from dashboards import browsing, dashboard_of, reading

import pgqueue
from pgqueue.admin import queries
from pgqueue.admin.known_names import KnownNames
from pgqueue.web import rendering
from pgqueue.web.access import ACTIONS
from pgqueue.web.redaction import HIDDEN, KEY_MOST, KEYS_MOST, LEAST, UNREAD, Redaction
from pgqueue.web.search_field import added, parts_of

Conn = psycopg.Connection[Any]
JSON = {"accept": "application/json"}


def put(conn: Conn, n: int = 1, state: str = "failed", **columns: Any) -> list[int]:
    """Jobs of one kind that have ended."""
    given = {"task": "list.task", "reason": "error"} | columns
    names, values = ", ".join(given), ", ".join(f"%({name})s" for name in given)
    rows = conn.execute(
        f"INSERT INTO pgqueue.job (state, finished_at, bin, {names}) "  # noqa: S608
        f"SELECT %(state)s, now(), 0, {values} FROM generate_series(1, %(n)s) AS g RETURNING id".encode(),
        given | {"state": state, "n": n},
    ).fetchall()
    conn.commit()
    return [id for (id,) in rows]


def fail(conn: Conn, ids: list[int], error_type: str | None, message: str | None, outcome: str = "error") -> None:
    """One more attempt of each of these jobs."""
    conn.execute(
        "INSERT INTO pgqueue.attempt (job_id, enqueued_at, claim, attempt, worker_id, started_at, finished_at, bin, "
        "outcome, error_type, message) SELECT id, enqueued_at, 1, 1, 1, now(), clock_timestamp(), 0, %s, %s, %s "
        "FROM pgqueue.job WHERE id = ANY (%s)",
        [outcome, error_type, message, ids],
    )
    conn.commit()


def rows(page: httpx.Response) -> list[str]:
    """The text of each row, without its elements."""
    assert page.status_code == 200, page.text
    body = page.text.partition("<tbody")[2].partition("</tbody>")[0]
    return [re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", row)).strip() for row in body.split("<tr")[1:]]


def links(page: httpx.Response) -> dict[str, list[tuple[str, str]]]:
    """What the links of the content ask for, by their label, else by their text."""
    found = {}
    for url, more, text in re.findall(r'<a href="([^"]*)"([^>]*)>(.*?)</a>', page.text.partition("<main")[2]):
        label = re.search(r'aria-label="([^"]*)"', more)
        name = label[1] if label else " ".join(re.sub(r"<[^>]+>", " ", text).split())
        found[name] = parse_qsl(urlsplit(url.replace("&amp;", "&")).query)
    return found


@pytest.mark.promise("F302")
async def test_a_row_says_the_last_error_and_the_arguments(dsn: str, conn: Conn) -> None:
    [job] = put(conn, args='{"order_id": 7, "to": "Ada"}', attempt=2, max_attempts=5)
    fail(conn, [job], "KeyError", "the first one")
    fail(conn, [job], "ValueError", "\n  no such order\nsecond line")
    fail(conn, [job], None, None, outcome="snoozed")
    [crashed] = put(conn, args="{}")
    fail(conn, [crashed], None, None, outcome="crashed")
    [done] = put(conn, state="completed", reason=None)
    fail(conn, [done], "KeyError", "over")
    async with reading(dsn) as browser:
        third, second, first = rows(await browser.get("/jobs"))
        assert "ValueError no such order" in first and "the first one" not in first and "second line" not in first
        assert "order_id=7" in first and "2 of 5" in first and re.search(r"\d+ s ago$", first)
        assert "crashed" in second and "KeyError" not in third
        items = (await browser.get("/jobs", headers=JSON)).json()["items"]
        assert [each["error"] for each in items] == [
            None,
            {"error_type": "crashed", "message": None},
            {"error_type": "ValueError", "message": "no such order"},
        ]
        assert all("attempts" not in each for each in items)


@pytest.mark.promise("F302", "F138")
async def test_what_a_row_says_is_hidden_as_on_the_page_of_its_job(dsn: str, conn: Conn) -> None:
    [job] = put(conn, args='{"order_id": 4242, "api_key": "hunter2x"}')
    fail(conn, [job], "Refused", "the key hunter2x is wrong, password=letmein")

    def hide(path: tuple[str, ...], value: Any) -> Any:
        return "-" if path[-1] == "order_id" or path == ("attempts", "error_type") else value

    for accept in ("text/html", "application/json"):
        async with reading(dsn) as browser:
            text = (await browser.get("/jobs", headers={"accept": accept})).text
            assert "hunter2x" not in text and "letmein" not in text and "Refused" in text
        async with reading(dsn, redact_with=hide) as browser:
            text = (await browser.get("/jobs", headers={"accept": accept})).text
            assert "Refused" not in text and "hunter2x" not in text
            assert "4242" not in text
    async with reading(dsn) as browser:
        assert HIDDEN in rows(await browser.get("/jobs"))[0]


@pytest.mark.promise("F302")
async def test_columns_that_say_the_same_in_all_rows_are_left_out(dsn: str, conn: Conn) -> None:
    put(conn, 2, queue="mail", attempt=1)
    async with reading(dsn) as browser:
        alike = (await browser.get("/jobs?state=failed")).text
        assert not re.search(r"<th[^>]*>(State|Queue|Attempt)</th>", alike)
        assert "all in queue mail, all in attempt 1" in alike
        put(conn, state="cancelled", queue="other", attempt=2)
        mixed = (await browser.get("/jobs")).text
        for head in ("State", "Queue", "Attempt", "Enqueued"):
            assert re.search(rf"<th[^>]*>{head}</th>", mixed), head
        assert "all in queue" not in mixed
        assert "Ended</th>" in (await browser.get("/jobs?state=failed&state=cancelled")).text
        assert "Due</th>" not in mixed


@pytest.mark.promise("F303")
async def test_tabs_have_the_numbers_and_keep_the_filter(dsn: str, conn: Conn) -> None:
    put(conn, 3)
    put(conn, 2, state="completed", reason=None)
    conn.execute(
        "INSERT INTO pgqueue.job (task, state, run_at, attempt) "
        "SELECT 'list.task', 'scheduled', now() + interval '1 h', g - 1 FROM generate_series(1, 3) AS g"
    )
    conn.commit()
    async with reading(dsn) as browser:
        page = await browser.get("/jobs?state=failed&task=list.task&after=infinity/9&did=begun")
        tabs = links(page)
        task = ("task", "list.task")
        assert tabs["Failed 3"] == [("state", "failed"), task]
        assert {"Completed 2", "Scheduled 3", "Retrying 2", "Running 0"} <= tabs.keys()
        assert tabs["All"] == [task] and not any(name.startswith("Skipped") for name in tabs)
        assert page.text.count('aria-current="page"') == 2, "the page, and the tab"
        counts = (await browser.get("/jobs", headers=JSON)).json()["counts"]
        assert counts["failed"] == {"n": 3, "exact": True} and counts["retrying"]["n"] == 2


@pytest.mark.promise("F303")
async def test_each_part_of_the_filter_can_be_taken_away(dsn: str) -> None:
    given = [("state", "failed"), ("queue", "mail"), ("error_type", "KeyError"), ("arg", "a=1"), ("arg", "b=2")]
    async with reading(dsn) as browser:
        page = await browser.get(f"/jobs?{urlencode(given)}")
        found = {label: query for label, query in links(page).items() if label.startswith("Without")}
        assert found["Without error KeyError"] == [part for part in given if part[0] != "error_type"]
        assert found["Without argument a=1"] == [part for part in given if part != ("arg", "a=1")]
        assert len(found) == 4, "a single state is a tab"
        page = await browser.get("/jobs?state=failed&state=running")
        assert "Without state failed" in page.text and 'aria-current="page">Failed' not in page.text


@pytest.mark.promise("F484")
async def test_a_list_that_finds_nothing_names_its_filter_and_leads_to_wider_lists(dsn: str, conn: Conn) -> None:
    """Naive is "No job fits": which part of the filter is too narrow is left to the visitor."""

    async def said(query: str) -> tuple[str, dict[str, list[tuple[str, str]]]]:
        page = await browser.get(f"/jobs?{query}")
        [text] = re.findall(r"<p[^>]*>(No [^<]*)<?", page.text)
        behind = page.text.partition(text)[2]
        return unescape(text).strip(), {
            unescape(name): parse_qsl(unescape(asked))
            for asked, name in re.findall(r'<a href="/jobs\??([^"]*)">(?:<span[^>]*>)?([^<]*)<', behind)
        }

    take = "Take a part of the filter away"
    async with reading(dsn) as browser:
        text, found = await said("other=7")
        assert text == "No job fits." and found.keys() == {"Show all jobs"}
        put(conn, state="cancelled")
        given = [("state", "failed"), ("queue", "a<b"), ("arg", "n=1")]
        text, found = await said(urlencode(given))
        assert text == f"No job fits: state failed, queue a<b, argument n=1. {take}, or look at another state."
        assert found["Without queue a<b"] == [given[0], given[2]]
        assert found["Without argument n=1"] == given[:2]
        assert found["cancelled"] == [("state", "cancelled"), *given[1:]] and found["any state"] == given[1:]
        assert "failed" not in found and found["Show all jobs"] == []
        assert (await said("state=failed"))[0] == "No job fits: state failed. Look at another state."
        text, found = await said("state=failed&state=running")
        assert text == f"No job fits: state failed or running. {take}, or look at another state."
        assert found["Without state failed"] == [("state", "running")]
        text, found = await said("worker=7")
        assert text == f"No job fits: worker 7. {take}." and found.keys() == {"Without worker 7", "Show all jobs"}
        put(conn, task="list.task")
        text, found = await said("queue=default&after=1&limit=5")
        assert text == "No other job fits: nothing to do." and found["The first jobs"] == [
            ("queue", "default"),
            ("limit", "5"),
        ]
        text, found = await said("state=running")
        assert {"failed", "cancelled", "any state"} <= found.keys() and "skipped" not in found, (
            "no job is in that state"
        )


@pytest.mark.promise("F303")
@pytest.mark.parametrize(
    ("typed", "parts"),
    [
        ("queue:mail", [("queue", "mail")]),
        ("error:KeyError task:a.b", [("error_type", "KeyError"), ("task", "a.b")]),
        ("order_id=7", [("arg", "order_id=7")]),
        ("url=https://x.example/?a=1", [("arg", "url=https://x.example/?a=1")]),
        ('to="Ada L."', [("arg", 'to="Ada L."')]),
        ('queue:"a b"', [("queue", "a b")]),
        ("key:order:7", [("key", "order:7")]),
        ("order:7", [("key", "order:7")]),
        ("key:a=b", [("key", "a=b")]),
        ("4711", [("id", "4711")]),
        ("failed", [("state", "failed")]),
        ("known.task known unknown", [("task", "known.task"), ("queue", "known"), ("key", "unknown")]),
        ("since:2h until:1h worker:3", [("since", "2h"), ("until", "1h"), ("worker", "3")]),
        ('"', [("key", '"')]),
        ("  ", []),
    ],
)
def test_what_is_typed_becomes_a_filter(typed: str, parts: list[tuple[str, str]]) -> None:
    assert parts_of(typed, KnownNames(queues=("known",), tasks=("known.task",))) == parts


@pytest.mark.promise("F303")
def test_what_is_typed_is_added_and_replaces_what_can_be_there_once() -> None:
    given = [("queue", "a"), ("arg", "x=1"), ("state", "failed")]
    assert added(given, [("queue", "b"), ("arg", "y=2"), ("arg", "x=1")]) == [
        ("arg", "x=1"), ("state", "failed"), ("queue", "b"), ("arg", "y=2")
    ]  # fmt: skip


@pytest.mark.promise("F303")
async def test_the_field_leads_to_a_list_whose_url_has_the_filter(dsn: str, conn: Conn) -> None:
    jobs = put(conn, 2, args='{"order_id": 7}')
    put(conn, args='{"order_id": 8}')
    async with reading(dsn) as browser:
        answer = await browser.get("/jobs", params={"state": "failed", "after": "x", "and": "order_id=7 queue:default"})
        assert answer.status_code == 303
        assert answer.headers["location"] == "/jobs?state=failed&arg=order_id%3D7&queue=default"
        assert len(rows(await browser.get(answer.headers["location"]))) == 2
        for typed, to in ((f"{jobs[0]}", f"/jobs?id={jobs[0]}"), ("x:y", "/jobs?key=x%3Ay")):
            assert (await browser.get("/jobs", params={"and": typed})).headers["location"] == to
        refused = await browser.get("/jobs", params={"and": "api_key=x"})
        assert "redacted" in (await browser.get(refused.headers["location"])).text


@pytest.mark.promise("F305")
async def test_the_field_of_every_page_leads_to_the_only_job_that_fits(dsn: str, conn: Conn) -> None:
    [seven, _], [eight] = put(conn, 2, args='{"order_id": 7}'), put(conn, args='{"order_id": 8}', lock_key="order:8")
    async with reading(dsn) as browser:
        for path in ("/", "/jobs", "/workers", f"/jobs/{seven}", "/jobs/4711"):
            assert '<input name="q" list="known"' in (await browser.get(path)).text, path
        for typed, to in (
            ("order_id=8", f"/jobs/{eight}"),
            ("order:8", f"/jobs/{eight}"),
            ("task:list.task order_id=8", f"/jobs/{eight}"),
            (f"{seven}", f"/jobs?id={seven}"),
            ("order_id=7", "/jobs?arg=order_id%3D7"),
            ("order_id=9", "/jobs?arg=order_id%3D9"),
            ("failed", "/jobs?state=failed"),
        ):
            answer = await browser.get("/jobs", params={"q": typed})
            assert (answer.status_code, answer.headers["location"]) == (303, to), typed
        assert (await browser.get("/jobs?q=")).status_code == 200
        for secret in ("api_key=x", "secret=x"):
            answer = await browser.get("/jobs", params={"q": secret})
            assert answer.status_code == 400 and "redacted" in answer.text
    async with dashboard_of(dsn) as made, browsing(made) as browser:
        assert 'name="q"' not in (await browser.get("/login")).text


@pytest.mark.promise("F305")
async def test_a_job_among_more_than_are_searched_is_shown_in_the_list(
    dsn: str, conn: Conn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one may fit, too."""
    monkeypatch.setattr(queries, "SEARCHED_MOST", 2)
    put(conn, 3, args='{"order_id": 7}')
    put(conn, args='{"order_id": 8}')
    async with reading(dsn) as browser:
        answer = await browser.get("/jobs", params={"q": "order_id=8"})
        assert answer.headers["location"] == "/jobs?arg=order_id%3D8"


@pytest.mark.promise("F303", "F138")
async def test_names_are_suggested_and_no_class_that_is_hidden(dsn: str, conn: Conn) -> None:
    conn.execute(
        "INSERT INTO pgqueue.worker (lease, pid, concurrency, host, version_tag, queues, tasks, state) "
        "VALUES ('15 s', 1, 1, 'host', '1', '{mail}', '{mail.send}', 'running')"
    )
    conn.execute(
        "INSERT INTO pgqueue.error_group (fingerprint, queue, task, error_type, first_at, last_at, count, job_ids) "
        "VALUES ('f', 'q', 'other.task', 'SecretError', now(), now(), 1, '{}')"
    )
    conn.commit()
    async with reading(dsn) as browser:
        suggested = re.findall(r'<option value="([^"]*)">', (await browser.get("/jobs")).text)
        assert suggested == ["queue:mail", "task:mail.send", "task:other.task", "error:SecretError"]
    async with reading(dsn, redact_with=lambda path, value: "-" if path[-1] == "error_type" else value) as browser:
        assert "SecretError" not in (await browser.get("/jobs")).text


@pytest.mark.promise("F304")
async def test_the_list_is_small(dsn: str, conn: Conn) -> None:
    """50 rows with names of 60 characters, errors of 500, and many arguments with quotes."""
    args = "{" + ", ".join(f'"name_{n}": "<value {n}>"' for n in range(40)) + "}"
    jobs = put(conn, 60, task="t" * 60, args=args)
    fail(conn, jobs, "E" * 60, "m" * 500)
    async with dashboard_of(dsn, lambda visitor: ACTIONS) as made, browsing(made) as browser:
        page = await browser.get("/jobs?state=failed")
        assert len(rows(page)) == 50 and len(page.content) <= 60_000
    assert len((rendering.HERE / "static" / "pgqueue.css").read_bytes()) <= 32_000


@pytest.mark.promise("F303")
async def test_the_number_that_fits_is_on_the_button_for_all(dsn: str, conn: Conn) -> None:
    put(conn, 4)
    put(conn, 2, task="other")
    async with dashboard_of(dsn, lambda visitor: ACTIONS) as made, browsing(made) as browser:
        for query, said in (
            ("state=failed", "Retry all 6…"),
            ("state=failed&limit=2", "Retry all 6…"),
            ("state=failed&task=other", "Retry all 2…"),
            ("state=failed&task=other&limit=1", "Retry all 2…"),
            ("state=failed&state=cancelled&task=list.task&limit=1", "Retry all 4…"),
        ):
            assert said in (await browser.get(f"/jobs?{query}")).text, query
        assert "Retry all…" in (await browser.get("/jobs?task=other&limit=1")).text, "it is another one for each action"
    assert pgqueue.bulks(conn) == []


@pytest.mark.promise("F457")
async def test_a_row_is_hidden_in_one_walk_with_the_last_error_where_it_stands(dsn: str, conn: Conn) -> None:
    """The application is asked for each value of a row once: by the path of the job's page, and for the error that the
    list has by its own path, too."""
    [job] = put(conn, args='{"order": {"id": 7}}', attempt=1)
    fail(conn, [job], "KeyError", "no such order")
    asked: list[tuple[str, ...]] = []

    def hide(path: tuple[str, ...], value: Any) -> Any:
        asked.append(path)
        return "gone" if path in hidden else value

    for field in ("attempts", "error"):
        hidden: set[tuple[str, ...]] = {(field, "message")}
        async with reading(dsn, redact=(), redact_with=hide) as browser:
            asked.clear()
            [item] = (await browser.get("/jobs", headers=JSON)).json()["items"]
            assert item["error"] == {"error_type": "KeyError", "message": "gone"}
            assert {asked.count(path) for path in (("args", "order", "id"), ("queue",), ("error", "message"))} == {1}
            assert "gone" in rows(await browser.get("/jobs"))[0]


@pytest.mark.promise("F457")
@pytest.mark.parametrize("pattern", ["error", "err*", "message"])
async def test_what_a_pattern_hides_of_an_error_is_hidden_in_the_list(dsn: str, conn: Conn, pattern: str) -> None:
    [job] = put(conn, attempt=1)
    fail(conn, [job], "KeyError", "no such order")
    async with reading(dsn, redact=[pattern]) as browser:
        [item] = (await browser.get("/jobs", headers=JSON)).json()["items"]
        assert "no such order" not in str(item) and HIDDEN in str(item["error"])
        [row] = rows(await browser.get("/jobs"))
        assert "no such order" not in row and HIDDEN in row
        assert (await browser.get(f"/jobs/{job}")).status_code == 200


@pytest.mark.promise("F457")
async def test_arguments_may_be_hidden_as_a_whole(dsn: str, conn: Conn) -> None:
    put(conn, args='{"order": {"id": 4711}}')
    async with reading(dsn, redact=["args"]) as browser:
        [row] = rows(await browser.get("/jobs"))
    assert "4711" not in row and HIDDEN in row


@pytest.mark.promise("F457")
def test_keys_of_other_rows_do_not_fill_the_memory_of_a_redaction() -> None:
    made = Redaction(("*token*",))
    for n in range(KEYS_MOST + 10):
        assert made.shown({"args": {f"token{n}": "a" * LEAST, f"name{n}": "b"}}) == {
            "args": {f"token{n}": HIDDEN, f"name{n}": "b"}
        }
    long = "x" * KEY_MOST + "token"
    assert Redaction(("*token*",)).shown({long: "a"}) == {long: HIDDEN}
    assert len(made._known) == KEYS_MOST and not any(len(key) > KEY_MOST for key in made._known)


@pytest.mark.promise("F494")
@pytest.mark.parametrize(
    ("patterns", "path"), [((), ("error", "message")), ((), ("error",)), (("error",), None), (("err*",), None)]
)
async def test_what_is_hidden_of_an_error_is_hidden_in_the_other_texts_of_its_row(
    dsn: str, conn: Conn, patterns: tuple[str, ...], path: tuple[str, ...] | None
) -> None:
    """As HTML and as JSON, in a text and in arguments, by the application's function and by a pattern."""
    said = "card 4111 of bob"
    [failed] = put(conn, reason=f"gave up: {said}", args='{"note": "the card 4111 of bob"}', attempt=1)
    fail(conn, [failed], "CardError", f"{said}\nsecond line")
    [other] = put(conn, reason=f"gave up: {said}", attempt=1)
    async with reading(dsn, redact=patterns, redact_with=lambda at, value: "gone" if at == path else value) as browser:
        second, first = (await browser.get("/jobs", headers=JSON)).json()["items"]
        assert (first["id"], first["reason"]) == (failed, f"gave up: {HIDDEN}")
        assert first["args"] == {"note": f"the {HIDDEN}"}
        assert said not in str(first) and first["error"]
        assert (second["id"], second["reason"]) == (other, f"gave up: {said}"), "another job hides its own values"
        row = rows(await browser.get("/jobs"))[1]
        assert said not in row and HIDDEN in row


@pytest.mark.promise("F494")
async def test_the_page_of_a_job_hides_in_its_texts_what_it_hides_of_an_attempt(dsn: str, conn: Conn) -> None:
    """The list asks for the attempt by the same path, so both say the same."""
    [job] = put(conn, reason="gave up: card 4111 of bob", attempt=1)
    fail(conn, [job], "CardError", "card 4111 of bob")
    hidden = ("attempts", "message")
    async with reading(dsn, redact=(), redact_with=lambda at, value: "gone" if at == hidden else value) as browser:
        for path in ("/jobs", f"/jobs/{job}"):
            answer = await browser.get(path, headers=JSON)
            assert "4111" not in answer.text
            assert [each["reason"] for each in answer.json()["items"]] == [f"gave up: {HIDDEN}"]
            assert "4111" not in (await browser.get(path)).text


@pytest.mark.promise("F494")
def test_a_field_that_is_joined_is_hidden_as_if_the_item_had_had_it() -> None:
    asked: list[tuple[str, ...]] = []

    def hide(path: tuple[str, ...], value: Any) -> Any:
        asked.append(path)
        return "gone" if path == ("error", "message") else value

    made = Redaction(("*token*",), hide)
    shown = made.shown({"reason": "no bob", "args": {"a": 1, "token": "t0ken"}})
    asked.clear()
    more = {"error": {"error_type": "KeyError", "message": "no bob", "token": "abcd"}}
    assert made.joined(shown, more) == {
        "reason": HIDDEN,
        "args": {"a": 1, "token": HIDDEN},
        "error": {"error_type": "KeyError", "message": "gone", "token": HIDDEN},
    }
    assert asked == [("error",), ("error", "error_type"), ("error", "message")], "of the item nothing is asked again"
    assert made.joined({"reason": "no bob"}, {"error": None}) == {"reason": "no bob", "error": None}
    unread = made.joined({"args": {UNREAD: "not read"}, "reason": HIDDEN}, {"error": {"message": "no bob", "b": "bob"}})
    assert unread["error"] == {"message": HIDDEN, "b": HIDDEN}, "what the arguments hide is unknown"
    assert Redaction(()).joined({"reason": "no bob"}, {"error": "bob"}) == {"reason": "no bob", "error": "bob"}
