"""Supervisors on the dashboard: what became of their orders, and orders to restart, to be quiet, to scale."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from dashboards import SAME_SITE, browsing, dashboard_of, forms, press, reading, without_our_script
from roles import Role, role
from supervised import supervised
from workers import Eyes, until

from pgqueue.web.access import ACTIONS
from pgqueue.web.pages.changes import NOTICES

__all__ = ["role"]

EVIL = "<script>alert('x')</script>"
JSON = {"accept": "application/json"}
ORDERS = "SELECT supervisor_id, kind, size FROM pgqueue.supervisor_order ORDER BY id"


@pytest.fixture
def supervisors(eyes: Eyes) -> list[int]:
    """Two that beat, on two hosts, and one that is gone."""
    return [
        id
        for (id,) in eyes.all(
            "INSERT INTO pgqueue.supervisor (host, pid, size, active, state, beat_at) VALUES "
            "('a', 1, 2, 2, 'running', now()), ('b', 2, 2, 1, 'running', now()), "
            "('c', 3, 2, 2, 'running', now() - interval '5 minutes') RETURNING id"
        )
    ]


@pytest.mark.promise("F149")
async def test_an_order_goes_to_one_to_a_host_or_to_all_and_is_recorded(
    dsn: str, eyes: Eyes, supervisors: list[int]
) -> None:
    one, other, _ = supervisors
    orders: list[tuple[str, dict[str, str], list[Any]]] = [
        ("restart", {"supervisor": str(one)}, [(one, "restart", None)]),
        ("quiet", {"host": "b"}, [(other, "quiet", None)]),
        ("scale", {"all": "1", "size": "3"}, [(one, "scale", 3), (other, "scale", 3)]),
    ]
    async with dashboard_of(dsn, lambda visitor: ACTIONS) as made, browsing(made) as browser:
        for path, fields, given in orders:
            page = await press(browser, f"/workers/{path}", **fields)
            assert page.url.path == "/workers" and NOTICES["ordered"] in page.text
            assert eyes.all(ORDERS) == given
            [(actor, action, count)] = eyes.all("SELECT actor, action, count FROM pgqueue.audit")
            assert (actor, action, count) == ("dashboard", path, len(given))
            eyes.do("TRUNCATE pgqueue.audit, pgqueue.supervisor_order")


@pytest.mark.promise("F149")
async def test_the_page_says_what_became_of_the_last_order(dsn: str, eyes: Eyes, supervisors: list[int]) -> None:
    one, other, gone = supervisors
    eyes.do(
        "INSERT INTO pgqueue.supervisor_order (supervisor_id, kind, size, done_at, problem) VALUES "
        "(%s, 'quiet', NULL, NULL, NULL), (%s, 'scale', 4, now(), NULL), (%s, 'restart', NULL, now(), %s), "
        "(%s, 'restart', NULL, NULL, NULL)",
        one, one, other, f"{EVIL} failed", gone,
    )  # fmt: skip
    async with dashboard_of(dsn, lambda visitor: ACTIONS) as made, browsing(made) as browser:
        page = await browser.get("/workers")
        assert "scale to 4" in page.text and ": done " in page.text and "quiet, " not in page.text
        assert "not done: &lt;script&gt;" in page.text and "<script" not in without_our_script(page.text)
        assert "not done: the supervisor is gone" in page.text
        # Buttons for all, and for each that would hear of it.
        assert page.text.count('action="/workers/quiet"') == 3
        listed = (await browser.get("/workers", headers=JSON)).json()["supervisors"]
        assert [(each["id"], each["is_heard"], each["order"]["kind"]) for each in listed] == [
            (one, True, "scale"), (other, True, "restart"), (gone, False, "restart")
        ]  # fmt: skip
    async with reading(dsn) as browser:
        assert forms(await browser.get("/workers")) == set()
    async with dashboard_of(dsn, lambda visitor: {"limits"}) as made, browsing(made) as browser:
        assert forms(await browser.get("/workers")) == set()
        refused = await browser.post("/workers/quiet", data={"all": "1"}, headers=SAME_SITE)
        assert refused.status_code == 403


@pytest.mark.promise("F149")
async def test_an_order_without_a_target_or_a_number_is_refused(dsn: str, eyes: Eyes, supervisors: list[int]) -> None:
    gone = str(supervisors[-1])
    wrong = [
        ("quiet", {}, 400),  # not all of them
        ("quiet", {"all": "1", "host": "a"}, 400),
        ("restart", {"supervisor": "x"}, 400),
        ("restart", {"supervisor": gone}, 404),
        ("restart", {"host": "elsewhere"}, 404),
        ("scale", {"all": "1"}, 400),
        ("scale", {"all": "1", "size": "0"}, 400),
        ("scale", {"all": "1", "size": "1001"}, 400),
        ("scale", {"all": "1", "size": "-1"}, 400),
    ]
    async with dashboard_of(dsn, lambda visitor: ACTIONS) as made, browsing(made) as browser:
        for path, fields, status in wrong:
            answer = await browser.post(f"/workers/{path}", data=fields, headers=SAME_SITE)
            assert answer.status_code == status, (path, fields, answer.text)
    assert eyes.all("TABLE pgqueue.supervisor_order") == eyes.all("TABLE pgqueue.audit") == []


@pytest.mark.promise("F149")
@pytest.mark.parametrize("kind", ["read", "operate"])
async def test_the_grants_of_operate_suffice(role: Role, eyes: Eyes, supervisors: list[int], kind: Any) -> None:
    async with dashboard_of(role(kind), lambda visitor: ACTIONS) as made, browsing(made) as browser:
        answer = await browser.post("/workers/restart", data={"all": "1"}, headers=SAME_SITE)
        assert answer.status_code == (303 if kind == "operate" else 503), answer.text
        assert (await browser.get("/workers")).status_code == 200
    assert len(eyes.all(ORDERS)) == (2 if kind == "operate" else 0)


@pytest.mark.second
@pytest.mark.promise("F149")
async def test_a_supervisor_carries_out_what_the_dashboard_orders(tmp_path: Path, dsn: str, eyes: Eyes) -> None:
    with supervised(tmp_path, dsn, processes=1) as one:
        async with dashboard_of(dsn, lambda visitor: ACTIONS) as made, browsing(made) as browser:

            async def known() -> Any:
                return (await browser.get("/workers", headers=JSON)).json()["supervisors"]

            async def done() -> Any:
                [shown] = await known()
                return shown["order"] is not None and shown["order"]["done_at"] is not None

            await until(known)  # it has registered a moment after its first worker
            await press(browser, "/workers/scale", all="1", size="2")
            assert await until(done)
            assert len(one.pids()) == 2
            assert ": done " in (await browser.get("/workers")).text
