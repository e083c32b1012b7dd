"""What the overview says first: the verdict, and where each finding of the doctor leads."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from dashboards import browsing, dashboard_of, reading

from pgqueue.admin import doctor
from pgqueue.admin.doctor import Finding
from pgqueue.web.access import ACTIONS
from pgqueue.web.pages.findings import ELSEWHERE, PLACES, STATES, told, verdict

TWO = "2 jobs failed in the last hour."
NOW = datetime(2026, 12, 24, 18, tzinfo=UTC)


def finding(severity: str, name: str = "vacuum", **more: Any) -> Finding:
    return Finding(name, severity, "what", "todo", "docs/operations.md", **more)


@pytest.mark.promise("F306")
@pytest.mark.parametrize(
    ("findings", "failed", "level", "title", "text"),
    [
        ([], 0, "well", "All is well", "No jobs failed in the last hour."),
        ([finding("notice")], 0, "well", "All is well", "No jobs failed in the last hour."),
        ([], 1, "warning", "Jobs fail", "1 job failed in the last hour. Nothing else is wrong."),
        ([finding("warning")], 0, "warning", "One thing needs you", "No jobs failed in the last hour."),
        ([finding("warning"), finding("critical")], 2, "critical", "Two things need you", TWO),
        ([finding("critical")] * 11, None, "critical", "11 things need you", ""),
        (None, None, "warning", "Not all could be looked at", ""),
    ],
)  # fmt: skip
def test_the_verdict_is_one_sentence(
    findings: list[Finding] | None, failed: int | None, level: str, title: str, text: str
) -> None:
    assert verdict(findings, failed) == {"level": level, "title": title, "text": text}


@pytest.mark.promise("F306")
def test_every_finding_has_a_place_or_stands_in_the_docs() -> None:
    source = Path(doctor.__file__).read_text(encoding="utf-8")
    names = set(re.findall(r'Finding\(\s*"(\w+)"', source))
    assert names == {*STATES, *PLACES, *ELSEWHERE}
    about_a_queue = set(re.findall(r'Finding\("(\w+)"[^\n]*(?:queue|queue\.name|queue=task\.queue)\)\n', source))
    assert about_a_queue == set(STATES)


@pytest.mark.promise("F306")
def test_a_finding_says_since_when_and_leads_to_its_jobs() -> None:
    shown = told(finding("critical", "stuck", queue="a b", seconds=90.0), NOW)
    assert (shown["place"], shown["since"]) == ("/jobs?queue=a+b&state=blocked", NOW - timedelta(seconds=90))
    assert told(finding("warning", "duty"), NOW)["place"] == "/workers"
    assert told(finding("warning"), NOW) | {"place": None, "since": None} == told(finding("warning"), NOW)


@pytest.mark.promise("F307", "F138")
async def test_the_overview_says_what_fails_by_cause(dsn: str, conn: psycopg.Connection[Any]) -> None:
    conn.execute(
        "INSERT INTO pgqueue.error_group (fingerprint, queue, task, error_type, place, message, first_at, last_at, "
        "count, job_ids, version_tag) SELECT n::text, 'q', 'task.' || n, 'Error' || n, 'shop.pay', 'hunter2', "
        "now() - interval '3 h', now() - n * interval '12 minutes', n, '{}', 'v7' FROM generate_series(1, 7) AS n"
    )
    conn.commit()
    async with reading(dsn) as browser:
        answer = await browser.get("/", headers={"accept": "application/json"})
        assert [each["task"] for each in answer.json()["causes"]] == [f"task.{n}" for n in range(1, 5)]
        page = (await browser.get("/")).text
        assert "Error1</a>" in page and "12 min ago" in page and "3 h ago" in page and "v7" in page
        assert "task.6" not in page, "not in the last hour"
        assert "hunter2" not in page + answer.text and "Retry all" not in page
    hidden = {"redact_with": lambda path, value: "-" if path == ("error_type",) else value}
    async with reading(dsn, **hidden) as browser:
        for accept in ("text/html", "application/json"):
            assert "Error1" not in (await browser.get("/", headers={"accept": accept})).text
    async with dashboard_of(dsn, lambda visitor: ACTIONS) as made, browsing(made) as browser:
        assert (await browser.get("/")).text.count("Retry all…") == 4


@pytest.mark.promise("F310")
async def test_a_cause_that_came_with_the_newest_version_is_marked_as_new(
    dsn: str, conn: psycopg.Connection[Any]
) -> None:
    """The mark comes of the first failure: a cause that goes on in the new version is not new. Without an older version
    nothing is."""
    conn.execute(
        "INSERT INTO pgqueue.error_group (fingerprint, queue, task, error_type, first_at, last_at, count, job_ids, "
        "version_tag, first_version) SELECT first, 'q', 'task.' || first, 'Error', now(), now(), 1, '{}', 'v2<b>', "
        "first FROM unnest(ARRAY['v1', 'v2<b>']) AS first"
    )
    conn.execute("INSERT INTO pgqueue.version_start VALUES ('v2<b>', now() - interval '5 minutes')")
    conn.commit()
    async with reading(dsn) as browser:

        async def new() -> set[tuple[str, str]]:
            found = set()
            for path, items in (("/", "causes"), ("/errors", "items"), ("/task?name=task.v2%3Cb%3E", "items")):
                document = (await browser.get(path, headers={"accept": "application/json"})).json()
                causes = document[items][0]["causes"] if path.startswith("/task") else document[items]
                page = (await browser.get(path)).text
                assert page.count("new in v2&lt;b&gt;<") == sum(each["is_new"] for each in causes), path
                found |= {(path, each["first_version"]) for each in causes if each["is_new"]}
            return found

        assert await new() == set()
        conn.execute("INSERT INTO pgqueue.version_start VALUES ('v1', now() - interval '9 days')")
        conn.commit()
        assert await new() == {("/", "v2<b>"), ("/errors", "v2<b>"), ("/task?name=task.v2%3Cb%3E", "v2<b>")}
        conn.execute(
            "INSERT INTO pgqueue.worker (lease, pid, concurrency, host, version_tag, queues) "
            "VALUES ('1 h', 1, 1, 'h', 'v1', '{q}')"
        )
        conn.commit()
        assert await new() == set(), "the newest version was rolled back"


@pytest.mark.promise("F306")
async def test_the_overview_begins_with_what_is_wrong(dsn: str, conn: psycopg.Connection[Any]) -> None:
    async with reading(dsn) as browser:
        assert "<h1>All is well</h1>" in (await browser.get("/")).text
        conn.execute(
            "INSERT INTO pgqueue.job (task, queue, enqueued_at) VALUES ('t', 'mail', now() - interval '12 minutes')"
        )
        conn.commit()
        page = (await browser.get("/")).text
        main = page.partition("<main")[2]
        assert main.index("<h1>One thing needs you</h1>") < main.index("in queue mail, which no live worker serves")
        assert main.index("which no live worker serves") < main.index('class="figures"')
        assert "for 12 min</time>" in main
        [link] = re.findall(r'<a href="([^"]*)">Look at the jobs</a>', main)
        listed = await browser.get(link.replace("&amp;", "&"), headers={"accept": "application/json"})
        assert [job["task"] for job in listed.json()["items"]] == ["t"]
        found = (await browser.get("/", headers={"accept": "application/json"})).json()
        assert found["verdict"]["title"] == "One thing needs you" and found["findings"][0]["queue"] == "mail"


@pytest.mark.promise("F430")
async def test_what_stands_between_backticks_is_code_and_stays_text(dsn: str, conn: psycopg.Connection[Any]) -> None:
    """Naive is a page that shows backticks, and one that writes the text of an error as HTML."""
    conn.execute(
        "WITH made AS (INSERT INTO pgqueue.job_dead (state, task, reason, finished_at, bin, attempt) "
        "VALUES ('failed', 't', 'error', now(), 0, 1) RETURNING id, enqueued_at) "
        "INSERT INTO pgqueue.attempt (job_id, enqueued_at, claim, attempt, worker_id, started_at, finished_at, bin, "
        "outcome, error_type, message) SELECT id, enqueued_at, 1, 1, 1, now(), now(), 0, 'error', 'E', "
        "'see `<b>x</b>` & `' FROM made"
    )
    conn.execute(
        "INSERT INTO pgqueue.worker (lease, pid, concurrency, host, version_tag, queues, state, beat_at, "
        "started_at) VALUES ('1 h', 1, 1, 'h', 'v', '{q}', 'running', now(), now() - interval '1 h')"
    )
    [(id,)] = conn.execute("SELECT id FROM pgqueue.job_dead").fetchall()
    [(cancelled,)] = conn.execute(
        "INSERT INTO pgqueue.job_dead (state, task, reason, finished_at, bin) "
        "VALUES ('cancelled', 't', 'see `<b>x</b>` & `', now(), 0) RETURNING id"
    ).fetchall()
    conn.commit()
    async with reading(dsn, redact=()) as browser:
        page = (await browser.get(f"/jobs/{id}")).text.partition("<main")[2]
        quoted = "see <code>&lt;b&gt;x&lt;/b&gt;</code> &amp; `"
        assert page.count(quoted) == page.count("see ") == 3, "the sentence, the error, and the attempt"
        assert "<b>x" not in page
        found = (await browser.get(f"/jobs/{id}", headers={"accept": "application/json"})).json()
        assert any("`<b>x</b>`" in each["text"] for each in found["items"][0]["why"])
        page = (await browser.get(f"/jobs/{cancelled}")).text
        assert page.count(quoted) == 1, "the sentence; the fact below stays as it is stored"
        overview = (await browser.get("/")).text
        assert "<code>pgqueue grants</code>" in overview and "`" not in overview
