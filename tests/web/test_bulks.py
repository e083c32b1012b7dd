"""Operations by filter on the dashboard: offered for a list, previewed, begun, watched, stopped."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest
from dashboards import SAME_SITE, browsing, dashboard_of, reading, without_our_script
from workers import Eyes, until, work

import pgqueue
from pgqueue.admin.answers import CHANGED, WORDS
from pgqueue.admin.bulk.operations import Bulk
from pgqueue.client.tasks import task
from pgqueue.database import statements
from pgqueue.web.access import ACTIONS
from pgqueue.web.pages.changes import NOTICES


@task(name="web.bulk")
async def handler() -> None: ...


@pytest.fixture
def failed(eyes: Eyes) -> list[int]:
    """Five failed jobs of one task and one of another."""
    eyes.do(
        "INSERT INTO pgqueue.job (task, state, finished_at, bin, reason, args) "
        "SELECT CASE WHEN n < 6 THEN 'web.bulk' ELSE 'web.other' END, 'failed', now(), 0, 'error', "
        "jsonb_build_object('order_id', n, 'api_key', 's3cr3t') "
        "FROM generate_series(1, 6) AS n"
    )
    return [id for (id,) in eyes.all("SELECT id FROM pgqueue.job WHERE task = 'web.bulk' ORDER BY id")]


def links(page: httpx.Response, path: str) -> list[str]:
    """Where the links of a page lead that begin with this path."""
    return [link.replace("&amp;", "&") for link in re.findall(r'href="([^"]*)"', page.text) if link.startswith(path)]


def form(page: httpx.Response) -> dict[str, list[str]]:
    """The hidden fields of a page."""
    found: dict[str, list[str]] = {}
    for name, value in re.findall(r'type="hidden" name="([^"]*)" value="([^"]*)"', page.text):
        found.setdefault(name, []).append(value)
    return found


@pytest.mark.promise("F146")
@pytest.mark.parametrize(
    ("query", "rights", "offered"),
    [
        ("state=failed", ACTIONS, ["retry", "discard"]),
        ("state=failed&task=web.bulk&limit=5", ACTIONS, ["retry", "discard"]),
        ("task=web.bulk", ACTIONS, ["cancel", "retry", "discard", "reschedule"]),
        ("state=failed", ACTIONS - {"discard"}, ["retry"]),
        ("state=failed", ACTIONS - {"bulk"}, []),
        ("state=failed&arg=x=1", ACTIONS, []),
        ("", ACTIONS, []),
    ],
)
async def test_a_list_offers_what_can_be_done_to_all_of_it(
    dsn: str, failed: list[int], query: str, rights: frozenset[str], offered: list[str]
) -> None:
    async with dashboard_of(dsn, lambda visitor: rights) as made, browsing(made) as browser:
        found = links(await browser.get(f"/jobs?{query}"), "/bulk/new?")
        assert [httpx.URL(link).params["action"] for link in found] == offered
        for link in found:
            page = await browser.get(link)
            assert page.status_code == 200, page.text
    async with reading(dsn) as browser:
        assert links(await browser.get(f"/jobs?{query}"), "/bulk/new?") == []


@pytest.mark.promise("F146")
async def test_from_the_list_to_the_end_of_an_operation(dsn: str, eyes: Eyes, failed: list[int]) -> None:
    async with dashboard_of(dsn, lambda visitor: ACTIONS) as made, browsing(made) as browser:
        [retry, _] = links(await browser.get("/jobs?state=failed&task=web.bulk"), "/bulk/new?")
        preview = await browser.get(retry)
        assert "5 jobs fit now: state failed, task web.bulk" in preview.text
        assert form(preview) == {
            "action": ["retry"], "up_to": [str(failed[-1] + 1)], "state": ["failed"], "task": ["web.bulk"]
        }  # fmt: skip
        answer = await browser.post("/bulk", data=form(preview) | {"pace": ["1000"]}, headers=SAME_SITE)
        [bulk] = pgqueue.bulks(eyes.conn)
        assert answer.headers["location"] == f"/bulk/{bulk.id}?did=begun"
        page = await browser.get(answer.headers["location"])
        assert NOTICES["begun"] in page.text and "No job has been dealt with yet" in page.text
        async with work(dsn, handler, poll=0.2):
            await until(lambda: pgqueue.get_bulk(eyes.conn, bulk.id).state == "done")
        page = await browser.get(f"/bulk/{bulk.id}")
        assert "5 changed, 0 left out" in page.text and "Stop" not in page.text
        assert [f"/jobs/{id}" for id in failed] == links(page, "/jobs/")
        [entry] = pgqueue.audit(eyes.conn)
        assert (entry.actor, entry.action, entry.count) == ("dashboard", "bulk retry", 5)
        listed = await browser.get("/bulk", headers={"accept": "application/json"})
        [item] = listed.json()["items"]
        assert (item["id"], item["changed"], item["counts"], item["pace"]) == (bulk.id, 5, {"retried": 5}, 1000)
        assert f"/bulk/{bulk.id}" in links(await browser.get("/bulk"), "/bulk/")
    assert eyes.one("SELECT count(*) FROM pgqueue.job WHERE task = 'web.other' AND state = 'failed'") == 1


@pytest.mark.promise("F146", "F152")
async def test_an_operation_is_stopped_once(dsn: str, eyes: Eyes, failed: list[int]) -> None:
    begun = pgqueue.bulk(eyes.conn, "retry", task="web.bulk")
    async with reading(dsn) as browser:
        assert 'method="post"' not in (await browser.get(f"/bulk/{begun.id}")).text
    async with dashboard_of(dsn, lambda visitor: ACTIONS) as made, browsing(made) as browser:
        assert f'action="/bulk/{begun.id}/stop"' in (await browser.get(f"/bulk/{begun.id}")).text
        for did in ("stopped", "over before"):
            answer = await browser.post(f"/bulk/{begun.id}/stop", headers=SAME_SITE)
            assert NOTICES[did] in (await browser.get(answer.headers["location"])).text
    assert pgqueue.get_bulk(eyes.conn, begun.id).stopped_by == "dashboard"


@pytest.mark.promise("F152")
async def test_the_page_says_why_a_job_was_left_out(dsn: str, eyes: Eyes) -> None:
    with psycopg.connect(dsn) as conn:
        first = handler.using(unique=lambda: "u").enqueue(conn)
        pgqueue.cancel(conn, first.id)
        holder = handler.using(unique=lambda: "u", delay=900).enqueue(conn)
        other = handler.enqueue(conn)
        pgqueue.cancel(conn, other.id)
    begun = pgqueue.bulk(eyes.conn, "retry", state="cancelled")
    async with work(dsn, queues=["none"], poll=0.2):
        await until(lambda: pgqueue.get_bulk(eyes.conn, begun.id).state == "done")
    async with reading(dsn) as browser:
        page = await browser.get(f"/bulk/{begun.id}")
    assert "1 changed, 1 left out" in page.text
    for reason, words, id in (("held", WORDS["held"].reason, first.id), ("retried", WORDS["retried"].reason, other.id)):
        row = f'>{reason}</th><td role="cell">{words}</td><td role="cell" data-label="jobs" class="right">1</td>'
        assert row in page.text and f"/jobs/{id}" in links(page, "/jobs/")
    assert eyes.one("SELECT state FROM pgqueue.job WHERE id = %s", holder.id) == "scheduled"


@pytest.mark.promise("F152")
def test_every_reason_of_an_operation_has_words() -> None:
    """The reasons are listed with `Bulk`, and in the docs."""
    assert Bulk.__doc__ is not None
    changed, left_out = Bulk.__doc__[Bulk.__doc__.index("The reasons are words") :].split("left out")
    assert set(re.findall(r"`(\w+)`", changed)) == CHANGED
    reasons = CHANGED | set(re.findall(r"`(\w+)`", left_out))
    assert reasons == {did for did, words in WORDS.items() if words.reason}
    table = (Path(__file__).parents[2] / "docs" / "operations.md").read_text(encoding="utf-8")
    [listed] = re.findall(r"\n\| reason \| the job \|\n(.*?)\n\n", table, re.DOTALL)
    assert set(re.findall(r"`(\w+)`", listed)) == reasons


@pytest.mark.promise("F152")
def test_the_jobs_that_a_step_counts_as_changed_are_those_of_the_words() -> None:
    step = statements.text("bulk_cancel", "pgqueue")
    [changed] = re.findall(r"WHERE t\.did IN \((.*?)\)", step)
    assert set(re.findall(r"'(\w+)'", changed)) == CHANGED


@pytest.mark.promise("F146")
@pytest.mark.parametrize("action", ["cancel", "retry", "discard", "reschedule"])
async def test_to_stop_an_operation_needs_the_right_to_its_action(
    dsn: str, eyes: Eyes, failed: list[int], action: str
) -> None:
    options: dict[str, Any] = {"at": datetime(2100, 1, 1, tzinfo=UTC)} if action == "reschedule" else {}
    begun = pgqueue.bulk(eyes.conn, action, task="web.bulk", **options)
    for rights, status in ((ACTIONS - {action}, 403), ({"bulk"}, 403), ({"bulk", action}, 303)):
        async with dashboard_of(dsn, lambda visitor, rights=rights: rights) as made, browsing(made) as browser:
            assert (await browser.post(f"/bulk/{begun.id}/stop", headers=SAME_SITE)).status_code == status
        assert (pgqueue.get_bulk(eyes.conn, begun.id).stopped_by is None) == (status == 403)


@pytest.mark.promise("F300")
async def test_chosen_jobs_are_previewed_and_retried_and_no_other(dsn: str, eyes: Eyes, failed: list[int]) -> None:
    chosen = {"chosen": "1", "state": "failed", "id": [str(id) for id in failed[:4]]}
    async with dashboard_of(dsn, lambda visitor: ACTIONS) as made, browsing(made) as browser:
        listed = await browser.get("/jobs?state=failed&limit=3")
        assert len(re.findall(r'type="checkbox" name="id" value="(\d+)"', listed.text)) == 3
        preview = await browser.get("/bulk/new", params={"action": "retry", **chosen})
        assert (
            "<h1>Retry 4 jobs?</h1>" in preview.text and "4 jobs fit now: 4 chosen jobs, state failed" in preview.text
        )
        assert [f"/jobs/{id}" for id in failed[:3]] == links(preview, "/jobs/")
        assert "order_id=3" in preview.text and "•••" in preview.text and "s3cr3t" not in preview.text
        assert form(preview)["id"] == chosen["id"]
        answer = await browser.post("/bulk", data=form(preview) | {"note": "bank is back"}, headers=SAME_SITE)
        async with work(dsn, handler, poll=0.2):
            await until(lambda: {each.state for each in pgqueue.bulks(eyes.conn)} == {"done"})
        shown = await browser.get(answer.headers["location"])
        assert "4 chosen jobs" in shown.text and "bank is back" in shown.text and "4 changed" in shown.text
    assert eyes.one("SELECT count(*) FROM pgqueue.job WHERE task = 'web.bulk' AND state = 'failed'") == 1


@pytest.fixture
def cause(eyes: Eyes, failed: list[int]) -> list[int]:
    """Two of the failed jobs, and one of another task, have failed with a KeyError. All are in one group of errors."""
    eyes.do(
        "INSERT INTO pgqueue.attempt (job_id, enqueued_at, claim, attempt, worker_id, started_at, finished_at, bin, "
        "outcome, error_type, message) SELECT id, enqueued_at, 1, 1, 1, now(), now(), 0, 'error', 'KeyError', 'x' "
        "FROM pgqueue.job WHERE id = ANY (%s)",
        [failed[0], failed[2], failed[-1] + 1],
    )
    eyes.do(
        "INSERT INTO pgqueue.error_group (fingerprint, queue, task, error_type, first_at, last_at, count, job_ids) "
        "VALUES ('a', 'default', 'web.bulk', 'KeyError', now(), now(), 2, '{}')"
    )
    return [failed[0], failed[2]]


@pytest.mark.promise("F301")
async def test_all_jobs_of_a_cause_are_retried(dsn: str, eyes: Eyes, cause: list[int]) -> None:
    async with dashboard_of(dsn, lambda visitor: ACTIONS) as made, browsing(made) as browser:
        [retry] = links(await browser.get("/errors"), "/bulk/new?")
        listed = links(await browser.get("/jobs?state=failed&task=web.bulk&error_type=KeyError"), "/bulk/new?")
        assert retry in listed
        preview = await browser.get(retry)
        assert "2 jobs fit now: state failed, task web.bulk, error KeyError" in preview.text
        assert links(preview, "/jobs/") == [f"/jobs/{id}" for id in cause]
        answer = await browser.post("/bulk", data=form(preview), headers=SAME_SITE)
        async with work(dsn, handler, poll=0.2):
            await until(lambda: {each.state for each in pgqueue.bulks(eyes.conn)} == {"done"})
        page = await browser.get(answer.headers["location"])
        assert "2 changed, 0 left out" in page.text
        assert "/jobs?task=web.bulk&state=failed&error_type=KeyError" in links(page, "/jobs?")
    for rights in (ACTIONS - {"retry"}, ACTIONS - {"bulk"}, "read"):
        async with dashboard_of(dsn, lambda visitor, rights=rights: rights) as made, browsing(made) as browser:
            assert links(await browser.get("/errors"), "/bulk/new?") == []


@pytest.mark.promise("F301")
async def test_a_class_of_errors_that_is_redacted_chooses_no_job(dsn: str, eyes: Eyes, cause: list[int]) -> None:
    def hide(path: tuple[str, ...], value: Any) -> Any:
        return "hidden" if path[-1] == "error_type" else value

    begun = pgqueue.bulk(eyes.conn, "retry", error_type="KeyError")
    fields = {"action": "retry", "state": "failed", "error_type": "KeyError"}
    async with dashboard_of(dsn, lambda visitor: ACTIONS, redact_with=hide) as made, browsing(made) as browser:
        for answer in (
            await browser.get("/bulk/new", params=fields),
            await browser.post("/bulk", data=fields, headers=SAME_SITE),
        ):
            assert answer.status_code == 400 and "redacted" in answer.text
        for path in ("/bulk", f"/bulk/{begun.id}"):
            for accept in ("text/html", "application/json"):
                assert "KeyError" not in (await browser.get(path, headers={"accept": accept})).text
    assert pgqueue.bulks(eyes.conn, limit=2)[0].id == begun.id


@pytest.mark.promise("F300")
@pytest.mark.parametrize("action", ["retry", "discard"])
async def test_without_a_chosen_job_nothing_is_done(dsn: str, eyes: Eyes, failed: list[int], action: str) -> None:
    async with dashboard_of(dsn, lambda visitor: ACTIONS) as made, browsing(made) as browser:
        fields = {"action": action, "state": "failed", "chosen": "1"}
        for answer in (
            await browser.post("/bulk", data=fields, headers=SAME_SITE),
            await browser.get("/bulk/new", params=fields),
        ):
            assert answer.status_code == 400 and "Choose jobs by their boxes first." in answer.text
        for id in ("x", "0", "-1"):
            answer = await browser.post("/bulk", data=fields | {"id": id}, headers=SAME_SITE)
            assert answer.status_code == 400
    assert pgqueue.bulks(eyes.conn) == []


@pytest.mark.promise("F300")
async def test_chosen_jobs_that_do_not_fit_are_told(dsn: str, eyes: Eyes, failed: list[int]) -> None:
    pgqueue.retry(eyes.conn, failed[0])
    begun = pgqueue.bulk(eyes.conn, "retry", ids=failed[:2])
    async with work(dsn, queues=["none"], poll=0.2):
        await until(lambda: pgqueue.get_bulk(eyes.conn, begun.id).state == "done")
    async with reading(dsn) as browser:
        page = await browser.get(f"/bulk/{begun.id}")
    assert "1 chosen job had another state by then, or was gone" in page.text


@pytest.mark.promise("F300")
async def test_only_the_rights_that_one_has_are_offered_for_chosen_jobs(dsn: str, failed: list[int]) -> None:
    some: list[tuple[Any, set[str]]] = [
        (ACTIONS, {"retry", "discard"}),
        (ACTIONS - {"discard"}, {"retry"}),
        (ACTIONS - {"bulk"}, set()),
        ("read", set()),
    ]
    for rights, offered in some:
        async with dashboard_of(dsn, lambda visitor, rights=rights: rights) as made, browsing(made) as browser:
            page = await browser.get("/jobs?state=failed")
            assert set(re.findall(r'name="action" value="(\w+)"', page.text)) == offered
            assert ('type="checkbox" name="id"' in page.text) == bool(offered)


@pytest.mark.promise("F146")
async def test_what_cannot_be_begun_is_refused_and_nothing_is(dsn: str, eyes: Eyes, failed: list[int]) -> None:
    wrong = [
        ({"action": "explode", "state": "failed"}, 400),
        ({"state": "failed"}, 400),
        ({"action": "retry"}, 400),  # would choose all jobs
        ({"action": "retry", "state": "running"}, 400),
        ({"action": "retry", "state": "failed", "pace": "fast"}, 400),
        ({"action": "retry", "state": "failed", "up_to": "-1"}, 400),
        ({"action": "reschedule", "task": "web.bulk"}, 400),
        ({"action": "reschedule", "task": "web.bulk", "at": "2h"}, 400),
        ({"action": "reschedule", "task": "web.bulk", "at": "999999d"}, 400),
        ({"action": "cancel", "task": "web.bulk"}, 403),
    ]
    async with dashboard_of(dsn, lambda visitor: ACTIONS - {"cancel"}) as made, browsing(made) as browser:
        for fields, status in wrong:
            answer = await browser.post("/bulk", data=fields, headers=SAME_SITE)
            assert answer.status_code == status, (fields, answer.text)
            shown = await browser.get("/bulk/new", params=fields)
            assert shown.status_code in (200, status), (fields, shown.text)
    assert pgqueue.bulks(eyes.conn) == []


@pytest.mark.promise("F146")
async def test_a_reschedule_and_a_retry_of_completed_jobs_say_so(dsn: str, eyes: Eyes) -> None:
    with psycopg.connect(dsn) as conn:
        handler.enqueue(conn)
    eyes.do("INSERT INTO pgqueue.job (task, state, finished_at, bin) VALUES ('web.bulk', 'completed', now(), 0)")
    async with dashboard_of(dsn, lambda visitor: ACTIONS) as made, browsing(made) as browser:
        later = {"action": "reschedule", "task": "web.bulk", "at": "2100-01-01T00:00"}
        again = {"action": "retry", "state": "completed"}
        for fields in (later, again):
            assert (await browser.post("/bulk", data=fields, headers=SAME_SITE)).status_code == 303
        async with work(dsn, poll=0.2):
            await until(lambda: {each.state for each in pgqueue.bulks(eyes.conn)} == {"done"})
    assert {each.action: dict(each.counts) for each in pgqueue.bulks(eyes.conn)} == {
        "reschedule": {"rescheduled": 1},
        "retry": {"again": 1},
    }


@pytest.mark.promise("F146", "F139")
async def test_the_filter_of_an_operation_is_escaped(dsn: str, eyes: Eyes) -> None:
    evil = "<script>alert('x')</script>\u202e"
    begun = pgqueue.bulk(eyes.conn, "retry", task=evil)
    async with dashboard_of(dsn, lambda visitor: ACTIONS) as made, browsing(made) as browser:
        for path, query in (("/bulk", {}), (f"/bulk/{begun.id}", {}), ("/bulk/new", {"action": "retry", "task": evil})):
            page = await browser.get(path, params=query)
            assert page.status_code == 200 and "&lt;script&gt;" in page.text
            assert "<script" not in without_our_script(page.text) and "\u202e" not in page.text
