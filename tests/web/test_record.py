"""The page of changes by hand: which, in what order, with which links, and without what is hidden."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import urlencode

import psycopg
import pytest
from dashboards import reading, without_our_script

import pgqueue
from pgqueue.admin import audit
from pgqueue.database.statements import text
from pgqueue.web.pages import record

Conn = psycopg.Connection[Any]
JSON = {"accept": "application/json"}
EVIL = "<script>alert('x')</script>\"'"


def write(conn: Conn, action: str = "cancel", **columns: Any) -> None:
    """An entry of the record, later than those before it."""
    given = {"actor": "ada", "target": "{}", "details": "{}", "jobs": []} | columns
    given |= {name: json.dumps(given[name]) for name in ("target", "details") if not isinstance(given[name], str)}
    conn.execute(
        "INSERT INTO pgqueue.audit (at, actor, action, target, jobs, details) "
        "VALUES (clock_timestamp(), %(actor)s, %(action)s, %(target)s, %(jobs)s, %(details)s)",
        given | {"action": action},
    )
    conn.commit()


async def links(dsn: str, **options: Any) -> list[dict[str, str | None]]:
    """The links of the newest entry: each text, and where it leads."""
    async with reading(dsn, **options) as browser:
        [first, *_] = (await browser.get("/changes", headers=JSON)).json()["items"]
    return [{each["text"]: each["path"] for each in first["links"]}]


@pytest.mark.promise("F330")
@pytest.mark.parametrize(
    ("columns", "found"),
    [
        ({"jobs": [7]}, {"job 7": "/jobs/7"}),
        ({"jobs": [1, 2, 3, 4, 5]}, {"job 1": "/jobs/1", "job 2": "/jobs/2", "job 3": "/jobs/3", "and 2 more": None}),
        ({"target": {"limit": "a b"}}, {"limit a b": "/limits/jobs?limit=a+b"}),
        ({"target": {"rate": "mail"}}, {"rate mail": "/limits/jobs?rate=mail"}),
        ({"target": {"lock": "order:7"}}, {"lock order:7": "/jobs?key=order%3A7"}),
        ({"target": {"schedule": "nightly"}}, {"schedule nightly": "/schedules"}),
        ({"target": {"schedule": "s"}, "action": "schedules run", "jobs": [9]},
         {"schedule s": "/schedules", "job 9": "/jobs/9"}),
        ({"target": {"host": "a", "supervisors": [9, 10]}},
         {"host a": "/workers?host=a", "supervisors 9, 10": "/workers"}),
        ({"target": {"host": "a b"}}, {"host a b": "/workers?host=a+b"}),
        ({"target": {"host": "a\u202eb"}}, {"host a\u202eb": None}),
        ({"target": {"host": 7}}, {"host 7": None}),
        ({"target": {"bulk": 3}}, {"operation 3": "/bulk/3"}),
        ({"target": {"states": ["failed"], "flow": 7}},
         {"jobs: failed, flow 7": "/jobs?state=failed&flow=7", "flow 7": "/flows/7"}),
        ({"target": {"states": ["available", "blocked"], "queue": "q", "flow": 7, "limit": 9}},
         {"jobs: available or blocked, q, flow 7": "/jobs?state=available&state=blocked&queue=q&flow=7",
          "flow 7": "/flows/7", "limit 9": None}),
        ({"target": {"flow": 7}}, {"flow 7": "/flows/7"}),
        ({"target": {"states": ["failed"], "flow": "x"}}, {"jobs: failed, flow x": None, "flow x": None}),
        ({"target": {"flow": True}}, {"flow True": None}),
        ({"target": {"flow": 0}}, {"flow 0": None}),
        ({"target": {"history": "done"}}, {"history done": None}),
        ({"target": {"states": ["failed", "cancelled"], "task": "a.b"}, "details": {"bulk": 61, "up_to": 9}},
         {"jobs: failed or cancelled, a.b": "/jobs?state=failed&state=cancelled&task=a.b",
          "operation 61": "/bulk/61"}),
        ({"target": {"states": ["failed"], "error_type": "KeyError"}},
         {"jobs: failed, KeyError": "/jobs?state=failed&error_type=KeyError"}),
        ({"target": {"states": ["failed"], "ids": [4, 5]}}, {"jobs: 2 chosen jobs, failed": None}),
        ({"target": {"states": ["failed"], "older_than": 60.0}}, {"jobs: failed": None, "older than 60 s": None}),
        ({"target": {"limit": "a\u202eb"}}, {"limit a\u202eb": None}),
        ({"target": {"of an application": [1]}}, {"of an application [1]": None}),
    ],
)  # fmt: skip
async def test_an_entry_leads_to_what_was_changed(
    dsn: str, conn: Conn, columns: dict[str, Any], found: dict[str, str | None]
) -> None:
    write(conn, **columns)
    assert await links(dsn) == [found]


@pytest.mark.promise("F330")
async def test_every_link_is_answered(dsn: str, conn: Conn) -> None:
    job = pgqueue.enqueue(conn, "a.b").id
    pgqueue.pause(conn, "mail", actor="ben")
    pgqueue.pause(conn, task="a.b", actor="ben")
    pgqueue.cancel(conn, job, actor="ada")
    pgqueue.bulk(conn, "retry", task="a.b", state="cancelled", actor="ada", note="they may")
    conn.commit()
    async with reading(dsn) as browser:
        items = (await browser.get("/changes", headers=JSON)).json()["items"]
        assert [each["action"] for each in items] == ["bulk retry", "cancel", "pause", "pause"]
        assert items[0]["told"] == {"note": "they may"}
        page = (await browser.get("/changes")).text.partition("<tbody")[2].partition("</tbody>")[0]
        paths = [path.replace("&amp;", "&") for path in re.findall(r'href="([^"]*)"', page)]
        assert len(paths) == 4 + 5, "actors; a filter and its operation, a job, a queue, a task"
        for path in paths:
            assert (await browser.get(path)).status_code == 200, path


@pytest.mark.promise("F474")
async def test_the_links_of_a_change_of_a_flow_and_of_a_host_are_answered(dsn: str, conn: Conn) -> None:
    """Naive knows no flow: a retry of all its jobs leads nowhere."""
    step, flow = pgqueue.remote("step"), pgqueue.Flow("order 7")
    flow.add(step.new())
    made = flow.enqueue(conn)
    pgqueue.cancel(conn, flow=made.id, actor="ada")
    pgqueue.retry(conn, flow=made.id, actor="ada")
    conn.execute(
        "INSERT INTO pgqueue.worker (lease, pid, concurrency, host, version_tag, queues, tasks, state, beat_at) "
        "SELECT '1 hour', 1, 5, host, '1', '{q}', '{t}', 'running', now() FROM unnest(ARRAY['a', 'b']) AS host"
    )
    write(conn, "quiet", target={"host": "a", "supervisors": [9]})
    async with reading(dsn) as browser:
        items = (await browser.get("/changes", headers=JSON)).json()["items"]
        assert [each["action"] for each in items] == ["quiet", "retry", "cancel"]
        asked = [{link["path"] for link in each["links"]} for each in items]
        assert all(f"/flows/{made.id}" in paths for paths in asked[1:])
        assert all(any(path.startswith("/jobs?") for path in paths) for paths in asked[1:])
        for path in set().union(*asked):
            assert (await browser.get(path)).status_code == 200, path
        [worker] = (await browser.get("/workers?host=a", headers=JSON)).json()["items"]
        assert "/workers?host=a" in asked[0] and worker["host"] == "a"
    for hidden in (("host",), ("supervisors", "host")):

        def hide(path: tuple[str, ...], value: Any, where: tuple[str, ...] = hidden) -> Any:
            return "-" if path == where else value

        async with reading(dsn, redact_with=hide) as browser:
            [first, *_] = (await browser.get("/changes", headers=JSON)).json()["items"]
            assert all("host=" not in link["path"] for link in first["links"] if link["path"]), hidden
            assert "host a" not in str(first["links"])


@pytest.mark.promise("F330")
async def test_changes_are_found_by_actor_action_and_job_page_by_page(
    dsn: str, conn: Conn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "SHOWN", 3)
    for n in range(1, 8):
        write(conn, "cancel" if n % 2 else "retry", actor="ada" if n < 5 else "ben", jobs=[n])

    async def pages(**asked: str) -> list[list[int]]:
        found: list[list[int]] = []
        after = None
        while not found or after is not None:
            query = urlencode(asked | ({} if after is None else {"after": after}))
            document = (await browser.get(f"/changes?{query}", headers=JSON)).json()
            found.append([each["jobs"][0] for each in document["items"]])
            after = document["after"]
        return found

    async with reading(dsn) as browser:
        assert await pages() == [[7, 6, 5], [4, 3, 2], [1]]
        assert await pages(actor="ben") == [[7, 6, 5]]
        assert await pages(actor="ada") == [[4, 3, 2], [1]]
        assert await pages(action="cancel") == [[7, 5, 3], [1]]
        assert await pages(actor="ada", action="retry") == [[4, 2]]
        assert await pages(job="4") == [[4]]
        assert await pages(job="4", actor="ben") == await pages(actor="nobody") == [[]]
        first = (await browser.get("/changes?action=cancel")).text
        [older] = re.findall(r'<a rel="next" href="([^"]*)">Older changes<', first)
        assert "action=cancel" in older and "<option selected>cancel</option>" in first
        assert "ada" in (await browser.get(older.replace("&amp;", "&"))).text
        assert "No change fits" in (await browser.get("/changes?actor=nobody")).text
        monkeypatch.setattr(audit, "WALKED_MOST", 2)
        assert await pages(actor="ada") == [[], [4], [3, 2], [1]]
        assert "changes were searched" in (await browser.get("/changes?actor=ada")).text


@pytest.mark.promise("F330")
@pytest.mark.parametrize("query", ["job=0", "job=x", f"job={1 << 63}", "after=x", "after=2026-01-01/x", "after=/3",
                                   "actor=%00", "action=%00"])  # fmt: skip
async def test_what_cannot_be_asked_is_said(dsn: str, query: str) -> None:
    async with reading(dsn) as browser:
        assert (await browser.get(f"/changes?{query}")).status_code == 400


@pytest.mark.promise("F330", "F138")
async def test_a_change_shows_nothing_that_is_hidden(dsn: str, conn: Conn) -> None:
    write(conn, target={"lock": "password:hunter2"}, details={"reason": "the card 4111 is stolen"}, actor="zoe")
    write(conn, target={"states": ["failed"], "error_type": "SecretError"}, details={"note": "token=hunter2"})
    write(conn, target={"limit": "token=hunter2"})

    def hide(path: tuple[str, ...], value: Any) -> Any:
        return "-" if path in (("actor",), ("lock_key",), ("attempts", "error_type"), ("limits", "name")) else value

    for accept in ("text/html", "application/json"):
        async with reading(dsn) as browser:
            text = (await browser.get("/changes", headers={"accept": accept})).text
            assert "hunter2" not in text and "4111" not in text and "zoe" in text
        async with reading(dsn, redact_with=hide) as browser:
            text = (await browser.get("/changes", headers={"accept": accept})).text
            assert not re.search("hunter2|4111|zoe|ada|SecretError", text)
            assert (await browser.get("/changes?actor=zoe")).status_code == 400
        async with reading(dsn, redact=()) as browser:
            text = (await browser.get("/changes", headers={"accept": accept})).text
            assert "hunter2" in text and "4111" in text


@pytest.mark.promise("F330", "F135")
async def test_foreign_text_stays_text(dsn: str, conn: Conn) -> None:
    write(conn, EVIL, actor=EVIL, target={"task": EVIL}, details={"note": EVIL})
    async with reading(dsn) as browser:
        assert "<script" not in without_our_script((await browser.get("/changes")).text)


@pytest.mark.promise("F330")
async def test_a_page_of_long_names_is_small(dsn: str, conn: Conn) -> None:
    target = {"states": ["failed"], "task": "t" * 60, "error_type": "E" * 60}
    for n in range(60):
        write(conn, "bulk retry", actor="a" * 60, target=target, details={"note": "n" * 500, "bulk": n})
    async with reading(dsn) as browser:
        page = await browser.get("/changes")
        assert page.text.count('role="rowheader"') == 50 and len(page.content) <= 60_000


@pytest.mark.promise("F330")
def test_a_page_looks_at_few_rows_of_a_long_record(conn: Conn) -> None:
    conn.execute(
        "INSERT INTO pgqueue.audit (at, actor, action) SELECT now() - g * interval '1 s', 'ada', 'cancel' "
        "FROM generate_series(1, 100000) AS g"
    )
    conn.commit()
    conn.execute("ANALYZE pgqueue.audit")
    first = audit.audit_page(conn, limit=3)
    assert first.after == (first.entries[-1].at, first.entries[-1].id)
    none = audit.audit_page(conn, actor="ben")
    assert none.entries == () and none.after is not None
    assert none.after[0] == first.entries[0].at - timedelta(seconds=audit.WALKED_MOST - 1)
    assert abs(first.now - datetime.now(UTC)) < timedelta(minutes=10)


@pytest.mark.promise("F331")
@pytest.mark.parametrize("name", ["audit_of_job", "why_cancelled_by"])
def test_changes_of_a_job_are_found_by_an_index_in_a_long_record(conn: Conn, name: str) -> None:
    conn.execute(
        "INSERT INTO pgqueue.audit (at, actor, action, jobs) SELECT now() - g * interval '1 s', 'ada', 'cancel', "
        "ARRAY[g] FROM generate_series(1, 100000) AS g"
    )
    conn.execute("ANALYZE pgqueue.audit")
    asked = {"job": 90_000, "n": 50, "most": 1_000, "ended_at": None}
    plan = conn.execute(f"EXPLAIN {text(name, 'pgqueue')}".encode(), asked).fetchall()
    assert any("Index Scan on audit_jobs" in line for (line,) in plan), plan
    assert len(audit.audit(conn, job=90_000)) == 1
