"""Closed by default: each route as nobody, as reader, as operator; and what a page of another site cannot do."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from dashboards import (
    HOST,
    OPERATOR_SECRET,
    READER_SECRET,
    SAME_SITE,
    SECRETS,
    bearer,
    browsing,
    dashboard_of,
    signed_in,
)
from workers import Eyes

import pgqueue.web
from pgqueue.errors import InvalidOption
from pgqueue.web import login_limit, rendering
from pgqueue.web.access import (
    ACTIONS,
    NOBODY,
    OPEN_ROUTES,
    OPERATOR,
    READ,
    READER,
    Verdict,
    Visitor,
    client_of,
    decide,
    networks,
    refused_open,
    refused_origin,
    rights_of,
)
from pgqueue.web.gate import COOKIE, Open
from pgqueue.web.routes import ROUTES, Route, match
from pgqueue.web.secrets import LEAST, SESSION_SECONDS, Secrets, from_environment

SECRET_OF = {"nobody": None, "reader": READER_SECRET, "operator": OPERATOR_SECRET}
STATUS = {
    # route: as nobody, reader, operator
    "static": (200, 200, 200),
    "login": (200, 200, 200),
    "sign_in": (401, 401, 401),  # the form is sent without a secret
    "sign_out": (401, 303, 303),
    "metrics": (303, 200, 200),
    "events": (303, 406, 406),  # asked for as a page
    "overview": (303, 200, 200),
    "jobs": (303, 200, 200),
    "job": (303, 404, 404),
    "queues": (303, 200, 200),
    "queue": (303, 400, 400),
    "tasks": (303, 200, 200),
    "task": (303, 400, 400),
    "limits": (303, 200, 200),
    "limit_jobs": (303, 400, 400),
    "schedules": (303, 200, 200),
    "flows": (303, 200, 200),
    "flow": (303, 404, 404),
    "workers": (303, 200, 200),
    "errors": (303, 200, 200),
    "history": (303, 200, 200),
    "outbox": (303, 200, 200),
    "changes": (303, 200, 200),
    # To a visitor without rights a change says that it is not signed in; there is no job 7, and no queue is named.
    "cancel_job": (401, 403, 404),
    "retry_job": (401, 403, 404),
    "discard_job": (401, 403, 404),
    "run_job_now": (401, 403, 404),
    "reschedule_job": (401, 403, 400),
    "run_schedule": (401, 403, 400),
    "pause_schedule": (401, 403, 400),
    "resume_schedule": (401, 403, 400),
    "bulks": (303, 200, 200),
    "preview": (303, 403, 400),
    "bulk": (303, 404, 404),
    "begin_bulk": (401, 403, 400),
    "stop_bulk": (401, 403, 303),
    "preview_flow": (303, 403, 400),
    "change_flow": (401, 403, 400),
    "pause": (401, 403, 400),
    "resume": (401, 403, 400),
    "enqueue": (303, 403, 200),
    "make_job": (401, 403, 422),
    "set_limit": (401, 403, 400),
    "reset_limit": (401, 403, 400),
    "set_rate": (401, 403, 400),
    "reset_rate": (401, 403, 400),
    "release_lock": (401, 403, 400),
    "restart_workers": (401, 403, 400),
    "quiet_workers": (401, 403, 400),
    "scale_workers": (401, 403, 400),
}
"""What each route answers on an empty queue. To a browser without rights: the login."""


def address(route: Route) -> str:
    return route.path.replace("{id}", "7").replace("{file}", "pgqueue.css")


@pytest.mark.promise("F134")
def test_every_route_is_in_the_table() -> None:
    assert [route.name for route in ROUTES] == list(STATUS)
    assert all(route.needs in {READ, "", *ACTIONS} for route in ROUTES)
    assert {route.name for route in ROUTES if not route.needs} == OPEN_ROUTES | {"sign_out"}


@pytest.mark.promise("F134")
@pytest.mark.each_value
@pytest.mark.parametrize("who", SECRET_OF)
@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.name)
async def test_each_route_answers_each_visitor_as_the_table_says(
    request: pytest.FixtureRequest, route: Route, who: str
) -> None:
    dsn = request.getfixturevalue("dsn" if who == "operator" else "unchanged_dsn")
    async with dashboard_of(dsn) as made, browsing(made) as browser:
        secret = SECRET_OF[who]
        if secret is not None:
            assert (await signed_in(browser, secret)).status_code == 303
        form = {"data": {"x": "y"}, "headers": SAME_SITE} if route.method == "POST" else {}
        answer = await browser.request(route.method, address(route), **form)  # type: ignore[arg-type]
        assert answer.status_code == STATUS[route.name][list(SECRET_OF).index(who)], answer.text
        if who == "nobody" and route.needs and route.method == "GET":
            assert answer.headers["location"].startswith("/login") and answer.content == b""


@pytest.mark.promise("F134")
@pytest.mark.parametrize(
    ("rights", "verdicts"),
    [
        (NOBODY, (Verdict.ALLOWED, Verdict.SIGN_IN, Verdict.SIGN_IN, Verdict.SIGN_IN)),
        (READER, (Verdict.ALLOWED, Verdict.ALLOWED, Verdict.FORBIDDEN, Verdict.ALLOWED)),
        (READER | {"cancel"}, (Verdict.ALLOWED, Verdict.ALLOWED, Verdict.FORBIDDEN, Verdict.ALLOWED)),
        (OPERATOR, (Verdict.ALLOWED, Verdict.ALLOWED, Verdict.ALLOWED, Verdict.ALLOWED)),
    ],
)
def test_the_decision_for_login_page_action_and_unknown_path(rights: Any, verdicts: tuple[Verdict, ...]) -> None:
    asked = [("login", ""), ("jobs", READ), ("any", "retry"), (None, "")]
    assert tuple(decide(route, needs, rights) for route, needs in asked) == verdicts


async def test_an_unknown_path_says_nothing_to_nobody_and_404_to_a_reader(dsn: str) -> None:
    async with dashboard_of(dsn) as made, browsing(made) as browser:
        for path in ("/nothing", "/jobs/7/x", "/static/..%2Faccess.py"):
            assert (await browser.get(path)).status_code == 303
        await signed_in(browser, READER_SECRET)
        assert (await browser.get("/nothing")).status_code == 404
        assert (await browser.get("/static/access.py")).status_code == 404
        assert (await browser.post("/jobs", headers=SAME_SITE)).status_code == 405


@pytest.mark.promise("F134")
def test_what_auth_may_answer_and_that_a_slip_opens_nothing() -> None:
    assert rights_of(None) == rights_of(set()) == NOBODY
    assert rights_of("read") == READER and rights_of({"cancel"}) == {"read", "cancel"}
    for slip in (True, 1, "admin", "", {"everything"}, ["cancel"], object()):
        with pytest.raises(InvalidOption, match="auth answered"):
            rights_of(slip)


@pytest.mark.promise("F134")
@pytest.mark.parametrize(
    ("auth", "status"),
    [
        (lambda visitor: None, 403),
        (lambda visitor: "read", 200),
        (lambda visitor: {"cancel"}, 200),
        (lambda visitor: True, 500),
        (lambda visitor: 1 / 0, 500),
    ],
    ids=["none", "read", "actions", "slip", "fails"],
)
async def test_the_function_of_the_application_decides(dsn: str, auth: Any, status: int) -> None:
    async def later(visitor: Visitor) -> Any:
        return auth(visitor)

    for function in (auth, later):
        async with dashboard_of(dsn, function) as made, browsing(made) as browser:
            answer = await browser.get("/queues")
            assert answer.status_code == status
            assert ("Queues and the jobs" in answer.text or "No queue" in answer.text) == (status == 200)
            assert (
                "ZeroDivisionError" not in answer.text
                and "auth answered" not in answer.text
                and "Traceback" not in answer.text
            )


async def test_an_error_of_auth_is_told_to_the_log_only(dsn: str, caplog: pytest.LogCaptureFixture) -> None:
    def auth(visitor: Visitor) -> None:
        raise psycopg.OperationalError("no connection to the users at db.internal")

    async with dashboard_of(dsn, auth) as made, browsing(made) as browser:
        answer = await browser.get("/queues")
    assert answer.status_code == 500 and "db.internal" not in answer.text and "db.internal" in caplog.text


async def test_a_host_that_is_nonsense_and_a_query_of_many_fields(dsn: str) -> None:
    async with dashboard_of(dsn) as made, browsing(made) as browser:
        assert (await browser.get("/queues", headers={"host": "[x"})).status_code == 303
        assert (await browser.post("/login", headers={"host": "[x", "origin": "http://[x"})).status_code == 403
        await signed_in(browser, READER_SECRET)
        assert (await browser.get("/jobs?" + "a=1&" * 300)).status_code == 400


async def test_auth_is_told_of_the_request(dsn: str) -> None:
    seen: list[Visitor] = []

    def auth(visitor: Visitor) -> str:
        seen.append(visitor)
        return "read"

    async with dashboard_of(dsn, auth) as made, browsing(made) as browser:
        browser.cookies.set("session", "abc")
        await browser.get("/jobs?state=failed", headers={"X-User": "ada"})
    [visitor] = seen
    assert (visitor.method, visitor.path, visitor.scheme, visitor.address) == ("GET", "/jobs", "http", "192.0.2.9")
    assert (visitor.headers["x-user"], visitor.cookies["session"], visitor.host) == ("ada", "abc", HOST)
    assert visitor.scope["type"] == "http"


def test_there_is_no_dashboard_without_auth() -> None:
    made: Any = pgqueue.web.app
    with pytest.raises(TypeError):
        made()
    for wrong in (None, "read", True):
        with pytest.raises(InvalidOption, match="auth"):
            made(auth=wrong)
    with pytest.raises(InvalidOption, match="did you mean auth"):
        made(auht=SECRETS)


# Requests of other sites -------------------------------------------------------------------------------------------


def post(scheme: str = "http", **headers: str) -> Visitor:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Visitor("POST", "/login", {"host": HOST} | named, scheme=scheme)


@pytest.mark.promise("F135")
@pytest.mark.parametrize(
    ("visitor", "public_url", "by_token", "refused"),
    [
        (post(sec_fetch_site="same-origin"), None, False, False),
        (post(sec_fetch_site="same-origin", origin="https://other.example"), None, False, False),
        (post(sec_fetch_site="same-site"), None, False, True),
        (post(sec_fetch_site="cross-site", origin=f"http://{HOST}"), None, False, True),
        (post(sec_fetch_site="none"), None, False, True),
        (post(sec_fetch_site="cross-site"), None, True, True),
        (post(origin=f"http://{HOST}"), None, False, False),
        (post(origin=f"http://{HOST}:80"), None, False, False),
        (post(origin=f"https://{HOST}"), None, False, True),
        (post("https", origin=f"https://{HOST}"), None, False, False),
        (post(origin="http://evil.example"), None, False, True),
        (post(origin="null"), None, False, True),
        (post(origin=f"http://{HOST}:99999999"), None, False, True),
        (post(origin="https://public.example"), "https://public.example/jobs", False, False),
        (post(origin=f"http://{HOST}"), "https://public.example/jobs", False, True),
        (post(), None, False, True),
        (post(), None, True, False),
        (Visitor("GET", "/jobs", {"sec-fetch-site": "cross-site"}), None, False, False),
        (Visitor("PUT", "/jobs", {}), None, False, True),
    ],
)
def test_a_change_comes_from_our_own_pages_or_with_a_token(
    visitor: Visitor, public_url: str | None, by_token: bool, refused: bool
) -> None:
    assert (refused_origin(visitor, public_url, by_token=by_token) is not None) == refused


@pytest.mark.promise("F135")
async def test_a_foreign_form_signs_nobody_in_or_out(dsn: str) -> None:
    async with dashboard_of(dsn) as made, browsing(made) as browser:
        foreign = {"origin": "http://evil.example"}
        answer = await browser.post("/login", data={"secret": READER_SECRET}, headers=foreign)
        assert (answer.status_code, "set-cookie" in answer.headers) == (403, False)
        await signed_in(browser, READER_SECRET)
        assert (await browser.post("/logout", headers=foreign)).status_code == 403
        assert (await browser.get("/jobs")).status_code == 200
        assert (await browser.post("/logout", headers={"origin": f"http://{HOST}"})).status_code == 303
        assert (await browser.get("/jobs")).status_code == 303


@pytest.mark.promise("F135")
@pytest.mark.parametrize(
    "headers",
    [
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site", "origin": f"http://{HOST}"},
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {},
    ],
    ids=["cross-site", "same-site", "origin", "null", "neither"],
)
async def test_no_change_is_made_by_a_page_of_another_site(dsn: str, eyes: Eyes, headers: dict[str, str]) -> None:
    """An operator is signed in, and each change is asked for by a form that would otherwise be answered."""
    async with dashboard_of(dsn) as made, browsing(made) as browser:
        assert (await signed_in(browser, OPERATOR_SECRET)).status_code == 303
        for route in ROUTES:
            if route.method == "POST":
                form = {"queue": "default", "name": "x", "task": "a.b", "key": "k", "all": "1", "size": "2", "n": "2"}
                answer = await browser.post(address(route), data=form, headers=headers)
                assert answer.status_code == 403, route.name
    assert eyes.all("TABLE pgqueue.audit") == eyes.all("TABLE pgqueue.job") == []


@pytest.mark.promise("F135")
async def test_every_answer_has_the_headers_and_no_page_has_inline_code(dsn: str) -> None:
    async with dashboard_of(dsn) as made, browsing(made) as browser:
        answers = [await browser.get("/login"), await browser.get("/jobs"), await browser.post("/jobs")]
        await signed_in(browser, READER_SECRET)
        answers += [await browser.get(path) for path in ("/", "/jobs", "/jobs/9", "/nothing", "/static/pgqueue.css")]
    for answer in answers:
        told = {name: answer.headers[name] for name in rendering.HEADERS if name != "cache-control"}
        assert told == {name: value for name, value in rendering.HEADERS.items() if name != "cache-control"}
        assert answer.headers["cache-control"] == (
            "public, max-age=3600" if str(answer.url).endswith(".css") else "no-store"
        )
    policy = answers[0].headers["content-security-policy"]
    assert "default-src 'self'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy


# Secrets ------------------------------------------------------------------------------------------------------------


@pytest.mark.promise("F136")
def test_secrets_are_long_and_different_and_come_from_the_environment() -> None:
    long, other = "a" * LEAST, "b" * LEAST
    given = {"PGQUEUE_WEB_READER": long, "PGQUEUE_WEB_OPERATOR": other}
    assert from_environment(given).role_of(other) == "operator"
    for wrong in (
        {},
        {"PGQUEUE_WEB_READER": long},
        given | {"PGQUEUE_WEB_OPERATOR": ""},
        given | {"PGQUEUE_WEB_OPERATOR": "b" * (LEAST - 1)},
        given | {"PGQUEUE_WEB_OPERATOR": long},
    ):
        with pytest.raises(InvalidOption):
            from_environment(wrong)
    assert long not in repr(SECRETS) and READER_SECRET not in repr(SECRETS)


@pytest.mark.promise("F136")
def test_a_cookie_is_ours_and_expires_and_ends_with_its_secret() -> None:
    cookie = SECRETS.cookie("reader", 1_000)
    assert SECRETS.role_of_cookie(cookie, 999.0) == "reader"
    assert SECRETS.role_of_cookie(cookie, 1_000.0) is None
    _, expires, signature = cookie.split(".")
    for forged in (
        f"operator.{expires}.{signature}",
        f"reader.9999.{signature}",
        f"reader.{expires}.{signature[:-1]}",
        f"reader.{expires}.",
        f"admin.{expires}.{signature}",
        f"reader.{'9' * 400}.{signature}",
        "reader",
        "",
        "reader.é.ü",
    ):
        assert SECRETS.role_of_cookie(forged, 0.0) is None
    changed = Secrets(reader=READER_SECRET + "2", operator=OPERATOR_SECRET)
    assert changed.role_of_cookie(cookie, 0.0) is None
    assert changed.role_of_cookie(SECRETS.cookie("operator", 1_000), 0.0) == "operator"


@pytest.mark.promise("F136")
async def test_the_login_gives_a_cookie_that_scripts_and_other_sites_do_not_get(dsn: str) -> None:
    async with dashboard_of(dsn) as made:
        async with browsing(made) as browser:
            told = (await signed_in(browser, READER_SECRET)).headers["set-cookie"].lower()
            assert told.startswith(COOKIE) and "httponly" in told and "samesite=lax" in told and "path=/" in told
            assert "secure" not in told and f"max-age={SESSION_SECONDS}" in told
        async with browsing(made, scheme="https") as browser:
            assert "; secure" in (await signed_in(browser, READER_SECRET)).headers["set-cookie"].lower()
    async with dashboard_of(dsn, trusted=["192.0.2.0/24"]) as made, browsing(made) as browser:
        browser.headers["x-forwarded-proto"] = "https"
        assert "; secure" in (await signed_in(browser, READER_SECRET)).headers["set-cookie"].lower()


@pytest.mark.promise("F136")
async def test_a_bearer_token_reads_and_a_wrong_one_is_answered_401(dsn: str) -> None:
    async with dashboard_of(dsn) as made, browsing(made) as browser:
        answer = await browser.get("/queues", headers=bearer(READER_SECRET) | {"accept": "application/json"})
        assert (answer.status_code, answer.json()) == (200, {"items": [], "after": None, "cut_at": None})
        wrong = await browser.get("/queues", headers=bearer("x" * 40) | {"accept": "application/json"})
        assert (wrong.status_code, wrong.headers["www-authenticate"]) == (401, "Bearer")
        assert wrong.json()["items"] == [] and wrong.json()["error"]["code"] == 401
        await signed_in(browser, READER_SECRET)
        assert (await browser.get("/queues", headers=bearer("x" * 40))).status_code == 401, "not by the cookie"


@pytest.mark.promise("F136")
async def test_wrong_secrets_are_few_a_minute_from_one_address(dsn: str) -> None:
    async with dashboard_of(dsn) as made, browsing(made) as browser:
        for _ in range(3):
            assert (await signed_in(browser, "wrong")).status_code == 401
        for _ in range(login_limit.TRIES - 3):
            assert (await browser.get("/jobs", headers=bearer("wrong"))).status_code == 401
        right = await signed_in(browser, OPERATOR_SECRET)
        assert right.status_code == 429 and 1 <= int(right.headers["retry-after"]) <= 60
        assert (await browser.get("/jobs", headers=bearer("wrong"))).status_code == 429
        for secret in (READER_SECRET, OPERATOR_SECRET):  # a program with a wrong token locks out no others
            assert (await browser.get("/jobs", headers=bearer(secret))).status_code == 200
        assert (await signed_in(browser, OPERATOR_SECRET)).status_code == 429, "the login still waits"


@pytest.mark.promise("F136")
def test_the_limit_ends_after_its_time_and_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    limit = login_limit.LoginLimit(lambda: now[0])
    for _ in range(login_limit.TRIES):
        assert limit.wait("2001:db8::1") == 0
        limit.wrong("2001:db8::1")
    assert limit.wait("2001:db8::2") == login_limit.WINDOW_SECONDS, "of one network"
    assert limit.wait("192.0.2.1") == 0
    now[0] = login_limit.WINDOW_SECONDS
    assert limit.wait("2001:db8::1") == 0
    monkeypatch.setattr(login_limit, "ADDRESSES_MOST", 10)
    for n in range(100):
        limit.wrong(f"192.0.2.{n}")
    assert len(limit._wrong) == 10


async def test_after_the_login_the_browser_is_where_it_wanted_to_go_and_nowhere_else(dsn: str) -> None:
    async with dashboard_of(dsn) as made, browsing(made) as browser:
        answer = await browser.get("/jobs?state=failed&queue=a%20b")
        assert answer.headers["location"] == "/login?next=%2Fjobs%3Fstate%3Dfailed%26queue%3Da%2520b"
        page = await browser.get(answer.headers["location"])
        assert 'value="/jobs?state=failed&amp;queue=a%20b"' in page.text
        for wanted, place in {
            "/jobs?state=failed": "/jobs?state=failed",
            "//evil.example/": "/",
            "/\\evil.example": "/",
            "https://evil.example": "/",
            "javascript:alert(1)": "/",
            "/\t/evil.example": "/",
            "/a/../../x": "/",
            "/%2e%2e/admin": "/",
            "/jobs/.%2E/%2e./admin": "/",
            "/%2e/..": "/",
            "/a\\..\\..\\x": "/",
            "/%2f/evil.example": "/",
            "/jobs?error=../x": "/jobs?error=../x",
            "/jobs/..x": "/jobs/..x",
        }.items():
            answer = await signed_in(browser, READER_SECRET, next=wanted)
            assert (answer.status_code, answer.headers["location"]) == (303, place)


async def test_a_form_is_small_and_a_form(dsn: str) -> None:
    async with dashboard_of(dsn) as made, browsing(made) as browser:
        big = await signed_in(browser, "x" * 20_000)
        as_json = await browser.post("/login", json={"secret": READER_SECRET}, headers=SAME_SITE)
        odd = {"content-type": "application/x-www-form-urlencoded"} | SAME_SITE
        unreadable = await browser.post("/login", content=b"\xff\xfe", headers=odd)
        assert [big.status_code, as_json.status_code, unreadable.status_code] == [413, 415, 400]


# Without a login, and behind a proxy ----------------------------------------------------------------------------------


@pytest.mark.promise("F137")
@pytest.mark.parametrize(
    ("address", "headers", "refused"),
    [
        ("127.0.0.1", {"host": "localhost:8300"}, False),
        ("127.0.0.1", {"host": "127.0.0.1:8300"}, False),
        ("::1", {"host": "[::1]:8300"}, False),
        ("127.0.0.1", {"host": "evil.example"}, True),
        ("127.0.0.1", {"host": "localhost.evil.example:8300"}, True),
        ("127.0.0.1", {"host": "127.0.0.1.evil.example"}, True),
        ("127.0.0.1", {"host": "evil@localhost:1@x"}, True),
        ("127.0.0.1", {"host": "[x"}, True),
        ("127.0.0.1", {}, True),
        ("192.0.2.9", {"host": "localhost"}, True),
        ("127.0.0.1", {"host": "localhost", "x-forwarded-for": "192.0.2.9"}, True),
        ("127.0.0.1", {"host": "localhost", "forwarded": "for=192.0.2.9"}, True),
    ],
)
def test_without_a_login_only_this_machine_is_answered(address: str, headers: dict[str, str], refused: bool) -> None:
    assert (refused_open(Visitor("GET", "/", headers, address=address)) is not None) == refused


@pytest.mark.promise("F137")
async def test_an_open_dashboard_refuses_a_foreign_host_on_every_route(dsn: str) -> None:
    import httpx

    async with dashboard_of(dsn, Open()) as made:
        transport = httpx.ASGITransport(app=made, client=("127.0.0.1", 4711))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost:8300") as browser:
            assert (await browser.get("/queues")).status_code == 200
            for route in ROUTES:
                evil = {"host": "evil.example"} | SAME_SITE
                answer = await browser.request(route.method, address(route), headers=evil)
                assert answer.status_code == 403, route.name


@pytest.mark.promise("F137")
@pytest.mark.parametrize(
    ("hops", "address"),
    [
        ("198.51.100.4:40001", "198.51.100.4"),
        ("203.0.113.1, [2001:db8::1]:40001", "2001:db8::1"),
        ("[2001:db8::1]", "2001:db8::1"),
        ("fe80::1%eth0", "fe80::1"),
        ("::ffff:198.51.100.4", "198.51.100.4"),
        ("198.51.100.4, [::ffff:10.0.0.2]:80", "198.51.100.4"),
        ("198.51.100.4, , 10.0.0.2:1 ,", "198.51.100.4"),
        ("198.51.100.4, unknown", "10.0.0.1"),
        ("198.51.100.4, unknown, 10.0.0.2", "10.0.0.1"),
        ("198.51.100.4, [2001:db8::1", "2001:db8::1"),
        ("198.51.100.4, 1.2.3", "10.0.0.1"),
        (" , ", "10.0.0.1"),
    ],
)
def test_an_address_is_read_as_proxies_write_it(hops: str, address: str) -> None:
    """What is no address says nothing, and what stands before it may be forged: then it is the peer's."""
    assert client_of("10.0.0.1", "http", {"x-forwarded-for": hops}, networks(["10.0.0.0/8"])) == (address, "http")


@pytest.mark.promise("F136")
@pytest.mark.parametrize(
    "forwarded",
    [
        pytest.param(lambda n: [f"203.0.113.{n}", "198.51.100.7"], id="a line of the proxy behind the visitor's"),
        pytest.param(lambda n: [f"203.0.113.{n}, 198.51.100.7"], id="a list"),
        pytest.param(lambda n: [f"198.51.100.7:{40_000 + n}"], id="with a port"),
        pytest.param(lambda n: [f"[2001:db8::{n}]:{40_000 + n}"], id="IPv6 with a port"),
        pytest.param(lambda n: [f"fe80::1%eth{n}"], id="with a zone"),
        pytest.param(lambda n: [f"203.0.113.{n}, unknown-{n}"], id="no address"),
    ],
)
async def test_behind_a_proxy_an_address_has_five_tries(forwarded: Callable[[int], list[str]]) -> None:
    async with dashboard_of(None, trusted=["192.0.2.9"]) as made, browsing(made) as browser:
        answers = []
        for n in range(1, 7):
            sent = [("sec-fetch-site", "same-origin"), *(("x-forwarded-for", each) for each in forwarded(n))]
            answers.append((await browser.post("/login", data={"secret": "wrong"}, headers=sent)).status_code)
    assert answers == [401] * 5 + [429]


@pytest.mark.promise("F136")
async def test_headers_of_one_name_are_joined_and_the_last_proxy_is_believed() -> None:
    seen: list[Visitor] = []

    def auth(visitor: Visitor) -> str:
        seen.append(visitor)
        return "read"

    sent = [
        ("x-forwarded-proto", "https"),
        ("x-forwarded-proto", "http"),
        ("cookie", "a=1"),
        ("cookie", "b=2"),
        ("sec-fetch-site", "same-origin"),
        ("sec-fetch-site", "cross-site"),
    ]
    async with dashboard_of(None, auth, trusted=["192.0.2.9"]) as made, browsing(made) as browser:
        assert (await browser.get("/history?range=x", headers=sent)).status_code == 400
        assert (await browser.post("/pause", headers=sent)).status_code == 403, "one of them says another site"
    [visitor] = seen
    assert visitor.scheme == "http"
    assert visitor.headers["x-forwarded-proto"] == "https, http"
    assert visitor.headers["cookie"] == "a=1; b=2" and visitor.cookies == {"a": "1", "b": "2"}


@pytest.mark.promise("F137")
def test_only_a_trusted_proxy_is_believed() -> None:
    trusted = networks(["10.0.0.0/8", "192.0.2.7"])
    told = {"x-forwarded-for": "1.1.1.1, 198.51.100.4, 10.0.0.2", "x-forwarded-proto": "https"}
    assert client_of("192.0.2.7", "http", told, trusted) == ("198.51.100.4", "https")
    assert client_of("192.0.2.8", "http", told, trusted) == ("192.0.2.8", "http")
    assert client_of("10.0.0.1", "http", {}, trusted) == ("10.0.0.1", "http")
    assert client_of("10.0.0.1", "http", {"x-forwarded-proto": "gopher"}, trusted) == ("10.0.0.1", "http")
    assert client_of("", "http", told, trusted) == ("", "http")
    told = {"x-forwarded-proto": "https, http"}
    assert client_of("10.0.0.1", "http", told, trusted) == ("10.0.0.1", "http"), "the proxy's own word is the last"
    with pytest.raises(InvalidOption, match="trusted proxy"):
        networks(["proxy.example"])


def test_a_path_is_one_route() -> None:
    for route in ROUTES:
        assert match(route.method, address(route))[0] is route
    assert match("HEAD", "/jobs")[0] == match("GET", "/jobs")[0]
    assert match("DELETE", "/jobs") == (None, {}, True)
    for path in ("/jobs/0", "/jobs/-1", "/jobs/1e3", "/jobs/" + "9" * 40, "/jobs/", "//jobs", "/jobs\n"):
        assert match("GET", path) == (None, {}, False)


@pytest.mark.promise("F450")
@pytest.mark.parametrize(
    ("rights", "said"),
    [
        ("read", "change nothing"),
        ({"retry"}, "do: retry"),
        ({"run_now", "cancel"}, "do: cancel, run now"),
        (ACTIONS, "do every action"),
    ],
)
async def test_the_header_of_each_page_says_what_the_visitor_may_do(dsn: str, rights: Any, said: str) -> None:
    async with dashboard_of(dsn, lambda visitor: rights) as made, browsing(made) as browser:
        for path in ("/", "/jobs", "/limits"):
            page = (await browser.get(path)).text
            assert re.findall(r"<p>You see every page, and can ([^<]*)\.</p>", page) == [said], path
            assert "Sign out" not in page, "auth is the application's own"
