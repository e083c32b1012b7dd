"""What an operator changes on the dashboard: by buttons, with the right for each, recorded, and said afterwards."""

from __future__ import annotations

import re
from datetime import datetime, timedelta, tzinfo
from typing import Any, Self

import httpx
import psycopg
import pytest
from dashboards import SAME_SITE, browsing, dashboard_of, forms, press, reading
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from roles import Role, role
from standby import frozen_second
from workers import Eyes

import pgqueue
from pgqueue import Cron
from pgqueue.errors import InvalidOption
from pgqueue.web import connections, dashboard
from pgqueue.web.access import ACTIONS
from pgqueue.web.pages import changes
from pgqueue.web.pages.changes import NOTICES

__all__ = ["role"]

COLUMNS: dict[str, dict[str, str]] = {
    "available": {},
    "scheduled": {"run_at": "now() + interval '1 hour'"},
    "blocked": {"lock_key": "'k'", "key": "'lock:k'"},
    "running": {"worker_id": "1", "claim": "1", "started_at": "now()"},
    "completed": {"finished_at": "now()", "bin": "0"},
    "failed": {"finished_at": "now()", "bin": "0", "reason": "'error'"},
    "cancelled": {"finished_at": "now()", "bin": "0", "reason": "'by hand'"},
}
"""What a job in each state has."""
STATES = tuple(COLUMNS)


@pytest.fixture
def ids(eyes: Eyes) -> dict[str, int]:
    """A job in each state; its id."""
    for place, (state, columns) in enumerate(COLUMNS.items(), 1):
        names, values = ", ".join(["id", "task", "state", *columns]), ", ".join(["%s"] * 3 + list(columns.values()))
        insert = f"INSERT INTO pgqueue.job ({names}) VALUES ({values})"  # noqa: S608
        eyes.do(insert, place, "web.task", state)
    eyes.do("SELECT setval('pgqueue.job_id_seq', 1000)")
    return {state: place for place, state in enumerate(STATES, 1)}


def now(eyes: Eyes, id: int) -> str:
    found: str = eyes.one("SELECT coalesce((SELECT state FROM pgqueue.job WHERE id = %s), 'gone')", id)
    return found


CHANGES: list[tuple[str, str, str, str]] = [
    ("cancel", "available", "cancelled", "cancelled"),
    ("cancel", "scheduled", "cancelled", "cancelled"),
    ("cancel", "blocked", "cancelled", "cancelled"),
    ("cancel", "running", "requested", "running"),
    ("cancel", "failed", "ended", "failed"),
    ("retry", "failed", "retried", "available"),
    ("retry", "cancelled", "retried", "available"),
    ("retry", "completed", "again", "completed"),
    ("retry", "running", "alive", "running"),
    ("discard", "failed", "discarded", "gone"),
    ("discard", "completed", "discarded", "gone"),
    ("discard", "available", "alive", "available"),
    ("run-now", "scheduled", "rescheduled", "available"),
    ("run-now", "running", "running", "running"),
    ("run-now", "completed", "over", "completed"),
]


@pytest.mark.promise("F145")
@pytest.mark.parametrize(("action", "state", "did", "then"), CHANGES)
async def test_a_button_changes_the_job_is_recorded_and_says_what_it_did(
    dsn: str, eyes: Eyes, ids: dict[str, int], action: str, state: str, did: str, then: str
) -> None:
    async with dashboard_of(dsn, lambda visitor: ACTIONS) as made, browsing(made) as browser:
        page = await press(browser, f"/jobs/{ids[state]}/{action}")
    assert page.status_code == 200 and f'role="status">{NOTICES[did]}<' in page.text
    assert now(eyes, ids[state]) == then
    recorded = eyes.all("SELECT actor, count FROM pgqueue.audit")
    changed = did not in ("ended", "alive", "running", "over")
    assert recorded == ([("dashboard", 1)] if changed else [])


@pytest.mark.promise("F145")
async def test_a_job_starts_at_once_also_if_the_clock_of_the_dashboard_is_ahead(
    dsn: str, eyes: Eyes, ids: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Ahead(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Self:
            return super().now(tz) + timedelta(hours=1)

    monkeypatch.setattr(changes, "datetime", Ahead)
    async with dashboard_of(dsn, lambda visitor: ACTIONS) as made, browsing(made) as browser:
        await press(browser, f"/jobs/{ids['scheduled']}/run-now")
    assert now(eyes, ids["scheduled"]) == "available"


@pytest.mark.promise("F145")
@pytest.mark.parametrize("state", ["failed", "cancelled"])
async def test_the_button_retry_makes_no_new_job_of_one_that_has_completed_since(
    dsn: str, eyes: Eyes, ids: dict[str, int], state: str
) -> None:
    before = eyes.one("SELECT count(*) FROM pgqueue.job")
    async with dashboard_of(dsn, lambda visitor: ACTIONS) as made, browsing(made) as browser:
        page = await browser.get(f"/jobs/{ids[state]}")
        [fields] = re.findall(r'action="/jobs/\d+/retry">(.*?)<button>Retry<', page.text)
        sent = dict(re.findall(r'name="(\w+)" value="(\w*)"', fields))
        page = await press(browser, f"/jobs/{ids['completed']}/retry", **sent)
    assert NOTICES["completed"] in page.text and eyes.one("SELECT count(*) FROM pgqueue.job") == before


@pytest.mark.promise("F145")
async def test_a_job_is_rescheduled_to_a_time_in_utc(dsn: str, eyes: Eyes, ids: dict[str, int]) -> None:
    async with dashboard_of(dsn, lambda visitor: ACTIONS) as made, browsing(made) as browser:
        path = f"/jobs/{ids['available']}/reschedule"
        await press(browser, path, at="2100-01-02T03:04")
        for wrong in ("", "tomorrow", "2100-13-01T00:00", "2h", "0s", "30 m", "999999d"):
            answer = await browser.post(path, data={"at": wrong}, headers=SAME_SITE)
            assert answer.status_code == 400 and "at: give a time like 2026-12-24T18:00" in answer.text, wrong
    run_at = "SELECT state, (run_at AT TIME ZONE 'UTC')::text FROM pgqueue.job WHERE id = %s"
    assert eyes.all(run_at, ids["available"]) == [("scheduled", "2100-01-02 03:04:00")]


@pytest.mark.promise("F145")
async def test_queues_and_tasks_are_paused_and_go_on(dsn: str, eyes: Eyes, ids: dict[str, int]) -> None:
    async with dashboard_of(dsn, lambda visitor: ACTIONS) as made, browsing(made) as browser:
        for fields in ({"queue": "default"}, {"task": "web.task"}):
            for path, did in (("/pause", "paused"), ("/pause", "paused before"), ("/resume", "resumed")):
                page = await press(browser, path, **fields)
                assert NOTICES[did] in page.text
                paused = eyes.one("SELECT count(*) FROM pgqueue.queue WHERE paused_at IS NOT NULL") + eyes.one(
                    "SELECT count(*) FROM pgqueue.paused_task"
                )
                assert paused == (path == "/pause")
        for fields in ({}, {"queue": "a", "task": "b"}, {"queue": "no name!"}):
            assert (await browser.post("/pause", data=fields, headers=SAME_SITE)).status_code == 400


RECORDED = ["schedule resume", "schedule pause", "schedule run"]


@pytest.mark.promise("F145")
async def test_a_schedule_is_run_now_paused_and_goes_on(dsn: str, eyes: Eyes) -> None:
    name = "nightly <b> & co"
    pgqueue.schedules.add(eyes.conn, name, Cron("0 3 * * *"), "web.task")
    async with reading(dsn) as browser:
        assert buttons(await browser.get("/schedules")) == set()
    async with dashboard_of(dsn, lambda visitor: ACTIONS) as made, browsing(made) as browser:
        page = await press(browser, "/schedules/run", name=name)
        assert NOTICES["enqueued"] in page.text
        assert eyes.all("SELECT task, state FROM pgqueue.job") == [("web.task", "available")]
        for path, did, shown in (
            ("pause", "paused", "resume"),
            ("pause", "paused before", "resume"),
            ("resume", "resumed", "pause"),
        ):
            page = await press(browser, f"/schedules/{path}", name=name)
            assert NOTICES[did] in page.text and buttons(page) == {"run", shown} and "<b>" not in page.text
        for path in ("run", "pause", "resume"):
            missing = await browser.post(f"/schedules/{path}", data={"name": "none"}, headers=SAME_SITE)
            assert missing.status_code == 404, missing.text
    assert [each.actor for each in pgqueue.audit(eyes.conn)] == ["dashboard"] * 3 + [
        eyes.one("SELECT current_user::text")
    ]


@pytest.mark.promise("F145")
@pytest.mark.parametrize("name", ["nightly ", " nightly", " "])
async def test_a_schedule_with_a_blank_at_its_end_is_another_one(dsn: str, eyes: Eyes, name: str) -> None:
    for each in ("nightly", name):
        pgqueue.schedules.add(eyes.conn, each, pgqueue.Every(3_600), "web.task")
    async with dashboard_of(dsn, lambda visitor: ACTIONS) as made, browsing(made) as browser:
        await press(browser, "/schedules/pause", name=name)
    assert eyes.all("SELECT name FROM pgqueue.schedule WHERE paused_at IS NOT NULL") == [(name,)]


@pytest.mark.promise("F145")
async def test_a_script_gets_the_answer_as_json(dsn: str, ids: dict[str, int]) -> None:
    async with dashboard_of(dsn, lambda visitor: ACTIONS) as made, browsing(made) as browser:
        json = {"accept": "application/json"} | SAME_SITE
        answer = await browser.post(f"/jobs/{ids['failed']}/retry", headers=json)
        assert (answer.status_code, answer.json()["changed"]) == (200, True)
        [item] = answer.json()["items"]
        assert (item["id"], item["did"], item["state"]) == (ids["failed"], "retried", "failed")
        missing = await browser.post("/jobs/999/cancel", headers=json)
        assert missing.status_code == 404 and missing.json()["items"] == []
        with_text = await browser.post(f"/jobs/{ids['failed']}/retry", content=b"at=1", headers=json)
        assert with_text.status_code == 415


BUTTONS = {
    "available": {"cancel", "reschedule", "pause"},
    "scheduled": {"cancel", "run-now", "reschedule", "pause"},
    "blocked": {"cancel", "reschedule", "pause"},
    "running": {"cancel", "pause"},
    "completed": {"retry", "discard"},
    "failed": {"retry", "discard"},
    "cancelled": {"retry", "discard"},
}


def buttons(page: httpx.Response) -> set[str]:
    """What the forms of a page are for."""
    return {path.rpartition("/")[2] for path in forms(page)}


@pytest.mark.promise("F145")
@pytest.mark.parametrize("state", STATES)
async def test_the_buttons_of_a_job_are_those_that_its_state_and_the_rights_allow(
    dsn: str, ids: dict[str, int], state: str
) -> None:
    path = f"/jobs/{ids[state]}"
    async with reading(dsn) as browser:
        assert buttons(await browser.get(path)) == set()
    async with dashboard_of(dsn, lambda visitor: ACTIONS) as made, browsing(made) as browser:
        assert buttons(await browser.get(path)) == BUTTONS[state]
    async with dashboard_of(dsn, lambda visitor: {"cancel", "retry"}) as made, browsing(made) as browser:
        assert buttons(await browser.get(path)) == BUTTONS[state] & {"cancel", "retry"}


@pytest.mark.promise("F145")
async def test_where_it_is_read_only_an_operator_is_a_reader(dsn: str, eyes: Eyes, ids: dict[str, int]) -> None:
    async with dashboard_of(dsn, lambda visitor: ACTIONS, read_only=True) as made, browsing(made) as browser:
        for path in ("/queues", f"/jobs/{ids['failed']}"):
            page = await browser.get(path)
            assert page.status_code == 200 and buttons(page) == set()
        for path in ("/pause", f"/jobs/{ids['failed']}/retry"):
            answer = await browser.post(path, data={"queue": "default"}, headers=SAME_SITE)
            assert answer.status_code == 403, answer.text
    async with dashboard_of(dsn, lambda visitor: None, read_only=True) as made, browsing(made) as browser:
        assert (await browser.get("/queues")).status_code == 403
    assert eyes.all("TABLE pgqueue.audit") == []


@pytest.mark.promise("F145")
async def test_a_reader_sees_no_button_on_the_queues_and_an_operator_one_for_each(
    dsn: str, eyes: Eyes, ids: dict[str, int]
) -> None:
    eyes.do("INSERT INTO pgqueue.queue (name, paused_at) VALUES ('mail', now())")
    async with reading(dsn) as browser:
        assert buttons(await browser.get("/queues")) == set()
    async with dashboard_of(dsn, lambda visitor: ACTIONS) as made, browsing(made) as browser:
        assert buttons(await browser.get("/queues")) == {"pause", "resume"}
        eyes.do("INSERT INTO pgqueue.paused_task (name) VALUES ('web.task')")
        assert "resume" in buttons(await browser.get(f"/jobs/{ids['available']}"))


@pytest.mark.promise("F145")
async def test_the_record_has_the_name_that_the_application_gives(dsn: str, eyes: Eyes, ids: dict[str, int]) -> None:
    for actor, kept in (
        (lambda visitor: visitor.headers["x-user"], "ann"),
        (lambda visitor: "", None),
        (lambda visitor: "a\nb", None),
        (lambda visitor: 7, None),
        (lambda visitor: 1 / 0, None),
    ):
        eyes.do("TRUNCATE pgqueue.audit")
        async with dashboard_of(dsn, lambda visitor: ACTIONS, actor=actor) as made, browsing(made) as browser:
            form = {"data": {"queue": "default"}, "headers": SAME_SITE | {"x-user": "ann"}}
            answer = await browser.post("/pause" if kept else "/resume", **form)  # type: ignore[arg-type]
        assert answer.status_code == (303 if kept else 500), answer.text
        assert eyes.all("SELECT actor FROM pgqueue.audit") == ([(kept,)] if kept else [])
    with pytest.raises(InvalidOption, match="actor"):
        dashboard.made(lambda visitor: "read", actor="ann")  # type: ignore[arg-type]


@pytest.mark.promise("F145")
async def test_a_notice_is_one_of_ours_whatever_the_link_says(dsn: str) -> None:
    async with reading(dsn) as browser:
        for said in ("call 555", "<script>", "Cancelled", "notice"):
            assert 'role="status"' not in (await browser.get("/jobs", params={"did": said})).text
        assert NOTICES["discarded"] in (await browser.get("/jobs?did=discarded")).text


@pytest.mark.promise("F145")
@pytest.mark.parametrize("kind", ["read", "operate"])
async def test_the_grants_of_read_do_not_change_and_those_of_operate_suffice(
    role: Role, eyes: Eyes, ids: dict[str, int], kind: Any
) -> None:
    async with dashboard_of(role(kind), lambda visitor: ACTIONS) as made, browsing(made) as browser:
        for path, fields in (
            (f"/jobs/{ids['available']}/cancel", {}),
            (f"/jobs/{ids['failed']}/retry", {}),
            (f"/jobs/{ids['cancelled']}/discard", {}),
            (f"/jobs/{ids['scheduled']}/run-now", {}),
            ("/pause", {"queue": "default"}),
            ("/resume", {"queue": "default"}),
        ):
            answer = await browser.post(path, data=fields, headers=SAME_SITE)
            assert answer.status_code == (303 if kind == "operate" else 503), answer.text
    changed = eyes.one("SELECT count(*) FROM pgqueue.audit")
    assert changed == (6 if kind == "operate" else 0)


@pytest.mark.promise("F145")
async def test_a_database_that_only_reads_says_so(dsn: str, ids: dict[str, int]) -> None:
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute(f'ALTER DATABASE "{conn.info.dbname}" SET default_transaction_read_only = on'.encode())
    pgqueue.configure(dsn=dsn)
    async with dashboard_of(dsn, lambda visitor: ACTIONS) as made, browsing(made) as browser:
        answer = await browser.post("/pause", data={"queue": "default"}, headers=SAME_SITE)
    assert answer.status_code == 503 and "only reads" in answer.text


@pytest.mark.promise("F190")
async def test_a_database_that_only_reads_is_read_and_is_changed_when_that_is_lifted(
    dsn: str, eyes: Eyes, ids: dict[str, int]
) -> None:
    """The sessions of its pool began read only; nothing ends them."""
    name = eyes.one("SELECT current_database()")
    eyes.do(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
    pgqueue.configure(dsn=dsn)
    async with dashboard_of(dsn, lambda visitor: ACTIONS) as made, browsing(made) as browser:
        for _ in range(2):
            assert (await browser.get("/")).status_code == 200
            answer = await browser.post("/pause", data={"queue": "default"}, headers=SAME_SITE)
            assert answer.status_code == 503 and "only reads" in answer.text
        eyes.do(f"ALTER DATABASE {name} RESET default_transaction_read_only")
        answer = await browser.post("/pause", data={"queue": "default"}, headers=SAME_SITE)
    assert answer.status_code == 303


@pytest.mark.promise("F352")
async def test_the_pages_read_the_standby_while_the_primary_is_frozen(
    dsn: str, ids: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Naive: each page waits for the search for a server that can be written, and is an error."""
    monkeypatch.setattr(connections, "WAIT_SECONDS", 60.0)  # a busy machine; the naive attempt takes two minutes
    with frozen_second(dsn) as address:
        async with dashboard_of(address, lambda visitor: ACTIONS) as made, browsing(made) as browser:
            assert (await browser.get("/queues")).status_code == 200


@pytest.mark.promise("F352")
async def test_a_change_finds_the_server_that_can_be_written(
    dsn: str, ids: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Naive: libpq takes the first host, a standby by now, and each change is refused."""
    host = conninfo_to_dict(dsn)["host"]
    connect = psycopg.AsyncConnection.connect

    async def first_only_reads(where: str, **options: Any) -> Any:
        first = "" if "read-write" in where else " options='-c default_transaction_read_only=on'"
        return await connect(where + first, **options)

    monkeypatch.setattr(psycopg.AsyncConnection, "connect", first_only_reads)
    address = make_conninfo(dsn, host=f"{host},{host}")
    async with dashboard_of(address, lambda visitor: ACTIONS) as made, browsing(made) as browser:
        assert "standby" not in (await browser.get("/queues")).text
        answer = await browser.post("/pause", data={"queue": "default"}, headers=SAME_SITE)
    assert answer.status_code == 303
