"""The dashboard below a path of real frameworks, as ASGI and as WSGI: links, files, cookies, forms, visitors."""

from __future__ import annotations

import re
from typing import Any

import httpx
import psycopg
import pytest
from dashboards import SAME_SITE, SECRETS
from mounts import ADDRESS, HELLO, MOUNTS, ROOT, Mount
from workers import wait_until

import pgqueue
from pgqueue.web import Visitor, dashboard, rendering
from pgqueue.web.connections import CONNECTIONS_MOST, Connections

pytestmark = pytest.mark.promise("F142")

PAGES = ["/", "/jobs", "/queues", "/limits", "/schedules", "/workers", "/errors", "/history", "/bulk"]
SESSIONS = "SELECT array_agg(pid ORDER BY pid) FROM pg_stat_activity WHERE application_name = 'pgqueue web'"

mounted = pytest.mark.parametrize("mount", MOUNTS.values(), ids=MOUNTS.keys())


def links(answer: httpx.Response) -> set[str]:
    assert answer.status_code == 200, answer.text
    return set(re.findall(r'(?:href|action|src)="([^"]*)"', answer.text))


@mounted
def test_login_links_files_and_forms_stay_below_the_mount(dsn: str, eyes: Any, mount: Mount) -> None:
    pgqueue.configure(dsn=dsn)
    made = dashboard.made(SECRETS)
    with mount(made) as client:
        assert HELLO in client.get("/hello").text, "the application answers beside it"
        assert eyes.one(SESSIONS) is None, "nothing is connected before the first page"
        asked = client.get(f"{ROOT}/queues?x=1")
        assert (asked.status_code, asked.headers["location"]) == (303, f"{ROOT}/login?next=%2Fqueues%3Fx%3D1")
        assert f"{ROOT}{rendering.asset('pgqueue.css')}" in links(client.get(f"{ROOT}/login"))
        assert client.get(f"{ROOT}/static/pgqueue.css").headers["content-type"].startswith("text/css")
        form = {"secret": SECRETS.operator, "next": "/queues?x=1"}
        signed = client.post(f"{ROOT}/login", data=form, headers=SAME_SITE)
        assert (signed.status_code, signed.headers["location"]) == (303, f"{ROOT}/queues?x=1")
        assert f"path={ROOT};" in signed.headers["set-cookie"].lower()
        found: set[str] = set()
        for path in PAGES:
            found |= links(client.get(f"{ROOT}{path}"))
        assert [each for each in found if not each.startswith((f"{ROOT}/", "#"))] == []
        for each in found - {f"{ROOT}/logout", "#main"}:
            if not each.endswith(("/pause", "/resume")):
                assert client.get(each.replace("&amp;", "&")).status_code == 200, each
        changed = client.post(f"{ROOT}/pause", data={"queue": "mail"}, headers=SAME_SITE)
        assert (changed.status_code, changed.headers["location"]) == (303, f"{ROOT}/queues?did=paused")
        assert eyes.one("SELECT name FROM pgqueue.queue WHERE paused_at IS NOT NULL") == "mail"
        left = client.post(f"{ROOT}/logout", headers=SAME_SITE)
        assert left.headers["location"] == f"{ROOT}/login" and f"path={ROOT}" in left.headers["set-cookie"].lower()
        assert client.get(f"{ROOT}/queues").status_code == 303


@mounted
def test_the_pool_outlives_its_requests(dsn: str, eyes: Any, mount: Mount) -> None:
    """Also on the loop that a2wsgi runs in a thread: each request has the connection of the one before."""
    pgqueue.configure(dsn=dsn)
    made = dashboard.made(lambda visitor: "read")
    with mount(made) as client:
        assert client.get(f"{ROOT}/queues").status_code == 200
        pool, sessions = made.sources[None].connections._pool, eyes.one(SESSIONS)
        assert len(sessions) == 1
        for path in PAGES[1:]:
            assert client.get(f"{ROOT}{path}").status_code == 200
        assert made.sources[None].connections._pool is pool and eyes.one(SESSIONS) == sessions
        assert client.get(f"{ROOT}/").status_code == 200, "its parts are read at the same time"
        assert made.sources[None].connections._pool is pool and set(sessions) <= set(eyes.one(SESSIONS))
        assert len(eyes.one(SESSIONS)) <= CONNECTIONS_MOST
    wait_until(lambda: eyes.one(SESSIONS) is None)


@mounted
def test_auth_is_given_the_same_visitor(dsn: str, mount: Mount) -> None:
    pgqueue.configure(dsn=dsn)
    seen: list[Visitor] = []

    def auth(visitor: Visitor) -> str:
        seen.append(visitor)
        return "read"

    with mount(dashboard.made(auth)) as client:
        asked = {"x-shop": "7", "cookie": "session=abc; theme=dark", "authorization": "Bearer token"}
        assert client.get(f"{ROOT}/jobs?task=größe", headers=asked).status_code == 200
        assert client.get(f"{ROOT}/jobs/4711").status_code == 404
        assert client.get(f"{ROOT}").status_code in (200, 307), "Starlette adds the slash first"
    first = seen[0]
    assert (first.method, first.path, first.scheme, first.address) == ("GET", "/jobs", "http", ADDRESS)
    assert (first.host, first.bearer, first.headers["x-shop"]) == ("ops.example", "token", "7")
    assert first.cookies == {"session": "abc", "theme": "dark"}
    assert seen[1].path == "/jobs/4711" and {each.path for each in seen[2:]} <= {"/"}


async def test_a_page_cannot_write(dsn: str, conn: psycopg.Connection[Any]) -> None:
    """The role of the dashboard may write, for changes are made by it. A page that is read may not."""
    pgqueue.configure(dsn=dsn)
    made = Connections()
    try:
        with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
            await made.read(lambda found: pgqueue.aenqueue(found, "web.written"))
        with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
            await made.read(lambda found: found.execute("SELECT nextval('pgqueue.job_id_seq')"))
        assert conn.execute("SELECT count(*) FROM pgqueue.job").fetchone() == (0,)
        await made.change(lambda found: pgqueue.aenqueue(found, "web.written"))
        assert conn.execute("SELECT count(*) FROM pgqueue.job").fetchone() == (1,)
    finally:
        await made.close()
