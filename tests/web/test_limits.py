"""Locks, limits and rates on the dashboard: set, taken back, released, each recorded; and what is refused."""

from __future__ import annotations

import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import psycopg
import pytest
from dashboards import SAME_SITE, browsing, dashboard_of, forms, press, reading, without_our_script
from roles import Role, role
from workers import Eyes

from pgqueue.admin.locks import locks
from pgqueue.database.statements import text
from pgqueue.web.access import ACTIONS
from pgqueue.web.pages.changes import NOTICES

__all__ = ["role"]

JSON = {"accept": "application/json"}
EVIL = "<script>alert('x')</script>\"&"


@pytest.fixture
def declared(eyes: Eyes) -> None:
    """A limit and a rate that code declares, and a lock that three jobs hold."""
    eyes.do("INSERT INTO pgqueue.key_limit (name, n, declared) VALUES ('api', 5, 5)")
    eyes.do(
        "INSERT INTO pgqueue.key_rate (name, count, period, declared_count, declared_period) "
        "VALUES ('mail', 10, 60, 10, 60)"
    )
    eyes.do(
        "INSERT INTO pgqueue.job (id, task, state, lock_key, key, worker_id, claim, started_at, holds) VALUES "
        "(1, 'web.task', 'running', 'k', NULL, 1, 1, now(), true), "
        "(2, 'web.task', 'available', 'k', NULL, NULL, NULL, NULL, true), "
        "(3, 'web.task', 'blocked', 'k', 'lock:k', NULL, NULL, NULL, false)"
    )
    eyes.do(
        "INSERT INTO pgqueue.worker (id, host, pid, version_tag, queues, concurrency, lease) "
        "OVERRIDING SYSTEM VALUE VALUES (1, 'h', 7, 'v', '{default}', 1, '1 hour')"
    )


CHANGES: list[tuple[str, dict[str, str], str, Any]] = [
    ("/limits/set", {"name": "api", "n": "2"}, "limit set", ("limits set", {"limit": "api"})),
    ("/limits/reset", {"name": "api"}, "limit back", ("limits set", {"limit": "api"})),
    ("/rates/set", {"name": "mail", "rate": "5/10s"}, "rate set", ("limits set", {"rate": "mail"})),
    ("/rates/reset", {"name": "mail"}, "rate back", ("limits set", {"rate": "mail"})),
    ("/locks/release", {"key": "k"}, "released", ("locks release", {"lock": "k"})),
]


@pytest.mark.promise("F148")
async def test_limits_rates_and_locks_are_changed_and_recorded(dsn: str, eyes: Eyes, declared: None) -> None:
    allowed = "SELECT n FROM pgqueue.key_limit UNION ALL SELECT count FROM pgqueue.key_rate"
    numbers = {"limit set": [2, 10], "limit back": [5, 10], "rate set": [5, 5], "rate back": [5, 10]}
    async with dashboard_of(dsn, lambda visitor: ACTIONS) as made, browsing(made) as browser:
        for path, fields, did, recorded in CHANGES:
            page = await press(browser, path, **fields)
            assert page.url.path == "/limits" and f'role="status">{NOTICES[did]}<' in page.text
            assert [n for (n,) in eyes.all(allowed)] == numbers.get(did, [5, 10])
            assert eyes.all("SELECT action, target FROM pgqueue.audit ORDER BY id DESC LIMIT 1") == [recorded]
            assert ("/limits/reset" in forms(page)) == (did == "limit set")
            assert ("/rates/reset" in forms(page)) == (did == "rate set")
        # The running job keeps the key, and the granted one waits for it again.
        assert NOTICES["key kept"] in (await press(browser, "/locks/release", key="k")).text
        assert NOTICES["key free"] in (await press(browser, "/locks/release", key="other")).text
    assert eyes.all("SELECT id, state FROM pgqueue.job ORDER BY id") == [(1, "running"), (2, "blocked"), (3, "blocked")]
    assert eyes.all("SELECT DISTINCT actor, count(*) FROM pgqueue.audit GROUP BY 1") == [("dashboard", len(CHANGES))]


@pytest.mark.promise("F148")
@pytest.mark.parametrize("key", ["k ", " k", "k  ", " "])
async def test_a_key_with_a_blank_at_its_end_is_another_key(dsn: str, eyes: Eyes, key: str) -> None:
    for each in ("k", key):
        eyes.do("INSERT INTO pgqueue.job (task, state, lock_key, holds) VALUES ('x', 'available', %s, true)", each)
    async with dashboard_of(dsn, lambda visitor: ACTIONS) as made, browsing(made) as browser:
        assert "/bulk/new?" not in (await browser.get("/jobs", params={"queue": "default", "key": key})).text
        found = await browser.get("/jobs", params={"key": key}, headers={"accept": "application/json"})
        assert [job["lock_key"] for job in found.json()["items"]] == [key]
        assert f'name="key" value="{key}"' in (await browser.get("/limits")).text
        await press(browser, "/locks/release", key=key)
    assert eyes.all("SELECT DISTINCT lock_key FROM pgqueue.job WHERE holds") == [("k",)]


@pytest.mark.promise("F148")
async def test_what_cannot_be_set_is_refused_and_nothing_is(dsn: str, eyes: Eyes, declared: None) -> None:
    wrong = [
        ("/limits/set", {"name": "api", "n": "-1"}, 400),
        ("/limits/set", {"name": "api", "n": "2.5"}, 400),
        ("/limits/set", {"name": "api", "n": ""}, 400),
        ("/limits/set", {"name": "api", "n": "2147483648"}, 400),
        ("/limits/set", {"n": "2"}, 400),
        ("/limits/set", {"name": "none", "n": "2"}, 404),
        ("/limits/reset", {"name": "none"}, 404),
        ("/rates/set", {"name": "mail", "rate": "fast"}, 400),
        ("/rates/set", {"name": "mail", "rate": "0/minute"}, 400),
        ("/rates/set", {"name": "none", "rate": "5/minute"}, 404),
        ("/rates/reset", {"name": "none"}, 404),
        ("/locks/release", {"key": "x" * 501}, 400),
        ("/locks/release", {"key": "token:abcdef"}, 400),  # is redacted: an answer would tell whether there is one
    ]
    async with dashboard_of(dsn, lambda visitor: ACTIONS) as made, browsing(made) as browser:
        for path, fields, status in wrong:
            answer = await browser.post(path, data=fields, headers=SAME_SITE)
            assert answer.status_code == status, (path, fields, answer.text)
            assert "Traceback" not in answer.text and "abcdef" not in answer.text
    assert eyes.all("TABLE pgqueue.audit") == []
    assert eyes.all("SELECT n FROM pgqueue.key_limit") == [(5,)]


@pytest.mark.promise("F148")
async def test_the_page_has_what_the_rights_allow_and_links_to_holders_and_waiters(
    dsn: str, eyes: Eyes, declared: None
) -> None:
    async with reading(dsn) as browser:
        page = await browser.get("/limits")
        assert forms(page) == set()
        for link in ("/jobs/1", "/jobs/2", "/jobs/3", "/jobs?state=blocked&amp;key=k"):
            assert f'href="{link}"' in page.text
        waiting = await browser.get("/jobs?state=blocked&key=k", headers={"accept": "application/json"})
        assert [job["id"] for job in waiting.json()["items"]] == [3]
    for right, path in (("limits", "/limits/set"), ("rates", "/rates/set"), ("locks", "/locks/release")):
        async with dashboard_of(dsn, lambda visitor, right=right: {right}) as made, browsing(made) as browser:
            assert forms(await browser.get("/limits")) == {path}
            for other, fields, _, _ in CHANGES:
                if other.split("/")[1] != path.split("/")[1]:
                    refused = await browser.post(other, data=fields, headers=SAME_SITE)
                    assert refused.status_code == 403, other
    assert eyes.all("TABLE pgqueue.audit") == []


@pytest.mark.promise("F148")
async def test_the_jobs_of_a_limit_and_of_a_rate_are_listed_in_their_order(dsn: str, eyes: Eyes) -> None:
    rows = [
        # id, state, key, limit, rate, holds
        (1, "running", None, "api", None, True),
        (2, "available", None, "api", None, True),
        (3, "scheduled", None, "api", None, True),
        (4, "blocked", "rate:mail", "api", "mail", True),
        (6, "blocked", "limit:api", "api", None, False),
        (5, "blocked", "limit:api", "api", None, False),
        (7, "blocked", "limit:api2", "api2", None, False),
        (8, "blocked", "rate:mail:b", None, "mail:b", False),
        (9, "blocked", "rate:mail:a", None, "mail:a", False),
        (10, "blocked", "rate:mail2", None, "mail2", False),
        (11, "available", None, "api", None, False),
        (12, "blocked", "limit:api", "api", None, True),  # it has its lock
    ]
    for id, state, key, limit, rate, holds in rows:
        runs = (1, 1, "now") if state == "running" else (None, None, None)
        eyes.do(
            "INSERT INTO pgqueue.job (id, task, state, key, limit_key, rate_key, holds, worker_id, claim, started_at, "
            "run_at) VALUES (%s, 'web.task', %s, %s, %s, %s, %s, %s, %s, %s::text::timestamptz, "
            "CASE WHEN %s = 'scheduled' THEN now() + interval '1 hour' ELSE now() END)",
            *(id, state, key, limit, rate, holds, *runs, state),
        )
    eyes.do("INSERT INTO pgqueue.key_limit (name, n, set_at) VALUES ('api', 4, now())")
    async with reading(dsn) as browser:
        assert 'href="/limits/jobs?limit=api"' in (await browser.get("/limits")).text
        assert 'href="/limits/jobs?rate=mail"' in (await browser.get("/limits")).text
        for query, holders, waiters in (
            ("limit=api", [1, 2, 3, 4], [5, 6, 12]),
            ("limit=api2", [], [7]),
            ("limit=ap", [], []),
            ("rate=mail", [], [4, 9, 8]),
            ("rate=mail2", [], [10]),
        ):
            page = await browser.get(f"/limits/jobs?{query}")
            assert all(f'href="/jobs/{id}"' in page.text for id in (*holders, *waiters)), page.text
            [item] = (await browser.get(f"/limits/jobs?{query}", headers={"accept": "application/json"})).json()[
                "items"
            ]
            assert sorted(each["id"] for each in item["holders"]) == holders
            assert [each["id"] for each in item["waiters"]] == waiters
        for query in ("", "limit=a&rate=b", "limit=token:abcdef", "limit=%00"):
            assert (await browser.get(f"/limits/jobs?{query}")).status_code == 400
        evil = await browser.get("/limits/jobs", params={"limit": EVIL})
        assert "<script" not in without_our_script(evil.text)


@pytest.mark.promise("F148")
async def test_the_keys_of_a_rate_are_found_beside_very_many_of_another_name(dsn: str, eyes: Eyes) -> None:
    eyes.do(
        "INSERT INTO pgqueue.job (task, state, key, rate_key) SELECT 'web.task', 'blocked', 'rate:' || key, key "
        "FROM generate_series(1, 1500) AS n, LATERAL (VALUES ('mail2:' || n), ('mail' || n)) AS other (key)"
    )
    eyes.do("INSERT INTO pgqueue.job (task, state, key, rate_key) VALUES ('it', 'blocked', 'rate:mail:z', 'mail:z')")
    async with reading(dsn) as browser:
        found = await browser.get("/limits/jobs?rate=mail", headers={"accept": "application/json"})
        assert [each["task"] for each in found.json()["items"][0]["waiters"]] == ["it"]
        other = await browser.get("/limits/jobs?rate=mail2", headers={"accept": "application/json"})
        assert len(other.json()["items"][0]["waiters"]) == 100


@pytest.mark.promise("F148", "F138", "F139")
async def test_names_are_escaped_and_a_redacted_key_has_no_button(dsn: str, eyes: Eyes) -> None:
    for id, key in ((1, EVIL), (2, "token:abcdef"), (3, "turned\u202e")):
        eyes.do(
            "INSERT INTO pgqueue.job (id, task, state, lock_key, holds) VALUES (%s, 'web.task', 'available', %s, true)",
            id,
            key,
        )
    eyes.do("INSERT INTO pgqueue.key_limit (name, n, set_at) VALUES (%s, 5, now())", EVIL)
    async with dashboard_of(dsn, lambda visitor: ACTIONS) as made, browsing(made) as browser:
        page = await browser.get("/limits")
        assert "<script" not in without_our_script(page.text)
        assert "abcdef" not in page.text and "\u202e" not in page.text
        assert page.text.count('action="/locks/release"') == 1
        assert NOTICES["released"] in (await press(browser, "/locks/release", key=EVIL)).text
        refused = await press(browser, "/limits/set", name=EVIL, n="0")
        assert "<script" not in without_our_script(refused.text)
    assert eyes.one("SELECT n FROM pgqueue.key_limit") == 0


@pytest.mark.promise("F148", "F138")
@pytest.mark.parametrize(
    "redact",
    [
        {"redact": ["lock_key"]},
        {"redact": ["key"]},
        {"redact_with": lambda path, value: "•••" if path == ("lock_key",) else value},
        {"redact_with": lambda path, value: "•••" if path == ("key",) else value},
    ],
)
async def test_a_lock_that_jobs_hide_cannot_be_released(
    dsn: str, eyes: Eyes, declared: None, redact: dict[str, Any]
) -> None:
    """An answer would tell whether there is one."""
    async with dashboard_of(dsn, lambda visitor: ACTIONS, **redact) as made, browsing(made) as browser:
        page = await browser.get("/limits")
        assert ">•••<" in page.text and ">k<" not in page.text and "/locks/release" not in forms(page)
        for key in ("k", "other"):
            answer = await browser.post("/locks/release", data={"key": key}, headers=SAME_SITE)
            assert (answer.status_code, "redacted" in answer.text) == (400, True)
    assert eyes.all("TABLE pgqueue.audit") == []


@pytest.mark.promise("F148")
async def test_a_script_is_told_what_it_has_changed(dsn: str, declared: None) -> None:
    async with dashboard_of(dsn, lambda visitor: ACTIONS) as made, browsing(made) as browser:
        json = {"accept": "application/json"} | SAME_SITE
        answer = (await browser.post("/limits/set", data={"name": "api", "n": "2"}, headers=json)).json()
        assert answer == {"items": [{"name": "api", "n": 2, "declared": 5, "by_hand": True}], "changed": True}
        released = (await browser.post("/locks/release", data={"key": "k"}, headers=json)).json()
        [item] = released["items"]
        assert (item["key"], item["ids"], [each["id"] for each in item["running"]]) == ("k", [2], [1])
        missing = await browser.post("/rates/reset", data={"name": "none"}, headers=json)
        assert (missing.status_code, missing.json()["items"]) == (404, [])


@pytest.mark.promise("F148")
@pytest.mark.parametrize("kind", ["read", "operate"])
async def test_the_grants_of_operate_suffice(role: Role, eyes: Eyes, declared: None, kind: Any) -> None:
    async with dashboard_of(role(kind), lambda visitor: ACTIONS) as made, browsing(made) as browser:
        for path, fields, _, _ in CHANGES:
            answer = await browser.post(path, data=fields, headers=SAME_SITE)
            assert answer.status_code == (303 if kind == "operate" else 503), answer.text
    assert eyes.one("SELECT count(*) FROM pgqueue.audit") == (len(CHANGES) if kind == "operate" else 0)


@pytest.mark.promise("F431")
async def test_each_list_has_50_rows_a_page_and_its_pages_lead_to_all_rows_once(dsn: str, eyes: Eyes) -> None:
    eyes.do(
        "INSERT INTO pgqueue.job (task, state, lock_key, holds) "
        "SELECT 'web.task', 'available', 'key:' || n, true FROM generate_series(1, 120) AS n"
    )
    eyes.do(
        "INSERT INTO pgqueue.key_limit (name, n, declared) SELECT 'api' || n, 1, 1 FROM generate_series(1, 120) AS n"
    )
    eyes.do(
        "INSERT INTO pgqueue.key_rate (name, count, period, declared_count, declared_period) "
        "SELECT 'r' || n, 1, 1, 1, 1 FROM generate_series(1, 120) AS n"
    )
    async with dashboard_of(dsn, lambda visitor: ACTIONS) as made, browsing(made) as browser:
        for name, items, key in (("locks", "items", "key"), ("limits", "limits", "name"), ("rates", "rates", "name")):
            path, seen, sizes = "/limits", list[str](), list[int]()
            while path:
                page = await browser.get(path)
                found = (await browser.get(path, headers={"accept": "application/json"})).json()
                assert len(page.content) <= 60_000, path
                seen += [each[key] for each in found[items]]
                sizes.append(len(found[items]))
                path = next((each for each in _next(page.text) if f"list={name}&" in each), "")
                assert (found["after"][name] is not None) == bool(path)
            assert sizes == [15, 50, 50, 5] and len(set(seen)) == len(seen) == 120, name
        for wrong in ("list=x", "skip=5", "list=locks&limit=501"):
            assert (await browser.get(f"/limits?{wrong}")).status_code == 400, wrong


def _next(page: str) -> list[str]:
    return [unescape(each) for each in re.findall(r'rel="next" href="([^"]+)"', page)]


@pytest.mark.promise("F431", "F138")
async def test_a_key_is_found_by_its_first_letters_beside_very_many_and_a_hidden_one_is_not(
    dsn: str, eyes: Eyes
) -> None:
    """Naive is a search of the first 1,000 keys; and one that tells how a hidden key begins."""
    eyes.do(
        "INSERT INTO pgqueue.job (task, state, lock_key, key) "
        "SELECT 'web.task', 'blocked', key, 'lock:' || key FROM ("
        "SELECT 'a' || n FROM generate_series(1, 1500) AS n UNION ALL VALUES ('zoo:7'), ('token:abcdef')) AS of (key)"
    )
    eyes.do("INSERT INTO pgqueue.key_limit (name, n, declared) VALUES ('zoo:8', 1, 1), ('token:abcdef', 1, 1)")
    eyes.do(
        "INSERT INTO pgqueue.key_rate (name, count, period, declared_count, declared_period) "
        "VALUES ('zoo', 1, 1, 1, 1), ('token=abcdef', 1, 1, 1, 1)"
    )
    async with reading(dsn) as browser:

        async def keys(query: str) -> list[str]:
            found = await browser.get(f"/limits?{query}", headers={"accept": "application/json"})
            return [each["key"] for each in found.json()["items"]]

        async def names(query: str) -> list[list[str]]:
            found = (await browser.get(f"/limits?{query}", headers=JSON)).json()
            return [[each["name"] for each in found[kind]] for kind in ("limits", "rates")]

        assert await keys("name=zoo") == await keys("lock=zoo:7") == ["zoo:7"]
        assert await keys("name=tok") == await keys("name=token:a") == [] == await keys("name=zoo:8")
        assert await names("name=zoo") == [["zoo:8"], ["zoo"]]
        assert await names("name=tok") == await names("name=token:a") == await names("name=token%3Da") == [[], []]


async def test_where_a_list_cannot_be_read_the_others_are_shown(dsn: str, eyes: Eyes, declared: None) -> None:
    eyes.do("ALTER TABLE pgqueue.worker RENAME COLUMN host TO gone")
    async with reading(dsn) as browser:
        page = await browser.get("/limits")
        asked = (await browser.get("/limits", headers={"accept": "application/json"})).json()
    assert page.status_code == 200 and page.text.count("A part of this page is missing") == 1
    assert (asked["items"], [each["name"] for each in asked["limits"]]) == ([], ["api"])
    assert [each["name"] for each in asked["rates"]] == ["mail"] and len(asked["problems"]) == 1


@pytest.mark.promise("F459")
async def test_a_part_that_is_missing_is_said_in_json_as_the_manual_shows(dsn: str, eyes: Eyes) -> None:
    """A part that cannot be read is empty, and `problems` says why; a page of which nothing can be read is an error."""
    manual = (Path(__file__).parents[2] / "docs" / "dashboard.md").read_text().partition("## If a page fails")[2]
    shown = json.loads(manual.partition("```json")[2].partition("```")[0])
    async with reading(dsn) as browser:
        whole = (await browser.get("/limits", headers=JSON)).json()
        assert whole == shown | {"problems": []}
        with eyes.conn.transaction():
            eyes.do("LOCK TABLE pgqueue.worker IN ACCESS EXCLUSIVE MODE")
            assert (await browser.get("/limits", headers=JSON)).json() == shown
            alone = await browser.get("/limits?list=locks", headers=JSON)
    [problem] = shown["problems"]
    error = {"code": 503, "title": problem["title"], "message": problem["text"]}
    assert (alone.status_code, alone.json()) == (503, {"items": [], "error": error})


def test_many_locks_are_listed_in_one_pass(conn: psycopg.Connection[Any]) -> None:
    """The work grows with the jobs, and not with their square: chains of four jobs a key, all running."""
    conn.execute(
        "INSERT INTO pgqueue.job_running (state, task, worker_id, claim, started_at, lock_key, key, holds) "
        "SELECT 'running', 't', 1, 1, now(), 'k' || n / 4, CASE WHEN n %% 4 > 0 THEN 'lock:k' || n / 4 END, n %% 4 = 0 "
        "FROM generate_series(0, 3999) AS n",
        [],
    )
    given = {"key": None, "begins": ""}
    [[plan]] = conn.execute(
        f"EXPLAIN (ANALYZE, TIMING off, FORMAT json) {text('locks_list', 'pgqueue')}".encode(), given
    ).fetchall()
    rows = {each.key: each for each in locks(conn)}
    assert len(rows) == 1000 and {(len(each.holders), each.waiting) for each in rows.values()} == {(1, 3)}
    assert _read(plan[0]["Plan"]) < 50 * 4000


def _read(node: dict[str, Any]) -> float:
    """So many rows the steps of a plan have looked at."""
    own = ("Actual Rows", "Rows Removed by Filter", "Rows Removed by Join Filter")
    seen = float(sum(node.get(name, 0) for name in own) * node["Actual Loops"])
    return seen + sum(map(_read, node.get("Plans", ())))
