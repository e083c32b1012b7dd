"""What the overview says first: the verdict, and where each finding of the doctor leads."""

from __future__ import annotations

import ast
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from dashboards import browsing, dashboard_of, reading

from pgqueue import manual
from pgqueue.admin import doctor
from pgqueue.admin.depth import Count
from pgqueue.admin.doctor import Finding
from pgqueue.web.access import ACTIONS
from pgqueue.web.pages import overview
from pgqueue.web.pages.findings import COMMANDS, PLACES, STATES, told, verdict
from pgqueue.web.pages.queues_in_need import NEEDS, InNeed

TWO = "2 jobs failed in the last hour."
NOW = datetime(2026, 12, 24, 18, tzinfo=UTC)
NONE = "No jobs failed in the last hour."
JSON = {"accept": "application/json"}
TIMELESS = {"connections", "index", "listen", "notify", "read_only", "schema", "sequences"}
"""Findings that say how it is now: the server does not say since when."""

Conn = psycopg.Connection[Any]


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


def needy(need: str, name: str = "mail", n: int = 7, *, exact: bool = True) -> InNeed:
    return InNeed(name, need, Count(n, exact))


@pytest.mark.promise("F473")
@pytest.mark.parametrize(
    ("queues", "title", "text"),
    [
        ([needy("behind")], "Queue mail is behind", NONE),
        ([needy("stuck")], "Queue mail is stuck", NONE),
        ([needy("no worker")], "Queue mail has no worker", NONE),
        ([needy("paused")], "Queue mail is paused, and 7 jobs wait", NONE),
        ([needy("paused", n=1)], "Queue mail is paused, and 1 job waits", NONE),
        ([needy("paused"), needy("paused", n=12_345, exact=False)], "Two queues are paused, and ~12,000 jobs wait",
         NONE),
        ([needy("behind")] * 11, "11 queues are behind", NONE),
        ([needy("no worker"), needy("behind"), needy("behind")], "Three queues need you",
         f"One has no worker, two are behind. {NONE}"),
    ],
)  # fmt: skip
def test_a_queue_in_need_is_no_well(queues: list[InNeed], title: str, text: str) -> None:
    """Naive is a verdict of the findings alone: it is green above a table that is amber."""
    assert {each.need for each in queues} <= {*NEEDS}
    assert verdict([], 0, queues) == {"level": "warning", "title": title, "text": text}
    assert verdict([finding("notice")], 0, queues)["title"] == title
    failing = verdict([], 2, queues)
    assert failing["title"] == title and failing["text"].endswith(TWO), "it is not said that nothing else is wrong"
    assert verdict([finding("warning")], 0, queues)["title"] == "One thing needs you"


@pytest.mark.promise("F473")
def test_what_is_not_known_is_no_well() -> None:
    for findings, failed, queues in (([], None, []), ([], 0, None), ([], 3, None), (None, 0, [needy("behind")])):
        said = verdict(findings, failed, queues)
        assert (said["level"], said["title"]) == ("warning", "Not all could be looked at")
    assert verdict([], None, [needy("behind")])["title"] == "Queue mail is behind"
    assert verdict([finding("critical")], None, None)["level"] == "critical"


def kinds() -> dict[str, bool]:
    """Each kind of finding of the doctor, and whether it says since when."""
    found: dict[str, bool] = {}
    for node in ast.walk(ast.parse(Path(doctor.__file__).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Finding":
            says = len(node.args) > 5 or any(each.arg == "seconds" for each in node.keywords)
            if isinstance(name := node.args[0], ast.Constant):
                found[str(name.value)] = says and found.get(str(name.value), True)
            else:
                assert says, "what says that there are more of a kind"
    return found


@pytest.mark.promise("F475")
def test_every_finding_says_since_when_or_is_how_it_is_now() -> None:
    assert {name for name, says in kinds().items() if not says} == TIMELESS


@pytest.mark.promise("F475")
async def test_every_finding_leads_to_a_page_that_answers_or_names_a_command(dsn: str) -> None:
    """Of a kind whose findings each name a queue, the one for all others has none."""
    async with reading(dsn) as browser:
        for name in kinds():
            shown = [told(finding("warning", name), NOW)]
            if name in STATES:
                shown.append(told(finding("warning", name, queue="a b"), NOW))
            for each in shown:
                assert (each["place"] is None) != (each["command"] is None), name
                assert each["manual"] is None, "a file is no address"
                if each["place"] is not None:
                    assert each["place_label"] and (await browser.get(each["place"])).status_code == 200, name


@pytest.mark.promise("F306")
def test_every_finding_has_a_place_or_a_command() -> None:
    source = Path(doctor.__file__).read_text(encoding="utf-8")
    names = set(re.findall(r'Finding\(\s*"(\w+)"', source))
    assert names == {*STATES, *PLACES, *COMMANDS} == {*kinds()}
    about_a_queue = set(re.findall(r'Finding\("(\w+)"[^\n]*(?:queue|queue\.name|queue=task\.queue)\)\n', source))
    assert about_a_queue == set(STATES)


@pytest.mark.promise("F306")
def test_a_finding_says_since_when_and_leads_to_its_jobs() -> None:
    shown = told(finding("critical", "stuck", queue="a b", seconds=90.0), NOW)
    assert (shown["place"], shown["since"]) == ("/jobs?queue=a+b&state=blocked", NOW - timedelta(seconds=90))
    assert told(finding("warning", "duty"), NOW)["place"] == "/workers"
    assert told(finding("warning"), NOW) | {"place": None, "since": None} == told(finding("warning"), NOW)


SERVED = """
INSERT INTO pgqueue.worker (lease, pid, concurrency, host, version_tag, queues, tasks, state, beat_at)
VALUES ('1 hour', 1, 5, 'here', '1', '{late,held,calm}', '{t}', 'running', now());
INSERT INTO pgqueue.job (task, queue, enqueued_at) VALUES ('t', 'calm', now() - interval '1 s');
"""
LATE = "INSERT INTO pgqueue.job (task, queue, enqueued_at) VALUES ('t', 'late', now() - interval '12 min')"
HELD = """
INSERT INTO pgqueue.job (task, queue, enqueued_at)
    SELECT 't', 'held', now() - interval '1 h' FROM generate_series(1, 7);
INSERT INTO pgqueue.queue (name, paused_at, paused_by) VALUES ('held', now() - interval '55 minutes', 'ann');
"""
EMPTY = "INSERT INTO pgqueue.queue (name, paused_at, paused_by) VALUES ('later', now(), 'ann')"


@pytest.mark.promise("F473")
@pytest.mark.parametrize(
    ("rows", "title", "links"),
    [
        ([LATE], "Queue late is behind", ["/jobs?state=available"]),
        ([HELD], "Queue held is paused, and 7 jobs wait", ["/queue?name=held", "/jobs?state=available"]),
        ([LATE, HELD], "Two queues need you", ["/queue?name=held", "/jobs?state=available"]),
        ([EMPTY], "All is well", []),
    ],
    ids=["behind", "paused", "both", "paused without jobs"],
)
async def test_a_queue_that_is_behind_or_paused_is_said_first_and_so_is_why_its_jobs_wait(
    dsn: str, conn: Conn, rows: list[str], title: str, links: list[str]
) -> None:
    for each in (SERVED, *rows):
        conn.execute(each.encode())
    conn.commit()
    async with reading(dsn) as browser:
        found = (await browser.get("/", headers=JSON)).json()
        assert [each for each in found["findings"] if each["severity"] != "notice"] == []
        assert found["verdict"]["title"] == title
        assert (found["verdict"]["level"] == "well") == (links == [])
        main = (await browser.get("/")).text.partition("<main")[2]
        assert f"<h1>{title}</h1>" in main
        reasons = main.partition("<h2>Why jobs wait</h2>")[2].partition("</ul>")[0]
        said = re.findall(r'<li><p><a href="([^"]*)">', reasons)
        assert said == links
        for link in said:
            assert (await browser.get(link)).status_code == 200
    hidden = {"redact_with": lambda path, value: "-" if path == ("queues", "queue") and value == "held" else value}
    async with reading(dsn, **hidden) as browser:
        for accept in ("text/html", "application/json"):
            text = (await browser.get("/", headers={"accept": accept})).text
            assert "Queue held" not in text


@pytest.mark.promise("F473")
@pytest.mark.parametrize("part", ["ameasured", "_happened", "adiagnosis"])
async def test_a_part_of_the_overview_that_cannot_be_read_is_no_well(
    dsn: str, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """Naive are numbers that are none: then no queue is in need, and no job has failed."""

    async def refused(*_: object) -> None:
        raise psycopg.errors.QueryCanceled("too long")

    monkeypatch.setattr(overview, part, refused)
    async with reading(dsn) as browser:
        found = (await browser.get("/", headers=JSON)).json()
        assert found["verdict"]["title"] == "Not all could be looked at" and len(found["problems"]) == 1


WITH_AGES = """
INSERT INTO pgqueue.worker (lease, pid, concurrency, host, version_tag, queues, tasks, state, beat_at, started_at)
SELECT '1 hour', 1, 5, 'here', version, '{q}', '{t}', 'running', now(), now() - age::interval
FROM (VALUES ('1', '9 h'), ('1', '40 min'), ('2', '3 h'), ('2', '20 min')) AS of (version, age);
INSERT INTO pgqueue.job (task, queue, enqueued_at)
SELECT 'typo', 'q', now() - n * interval '12 min' FROM generate_series(1, 2) AS n;
INSERT INTO pgqueue.job_blocked (state, task, queue, limit_key, rate_key, key, enqueued_at, run_at)
SELECT 'blocked', task, 'q', limit_key, rate_key, key, at, at
FROM (VALUES ('t', 'x', NULL, 'limit:x', '7 min'), ('t', 'x', NULL, 'limit:x', '2 min'),
             ('t', NULL, 'y', 'rate:y', '35 min'), ('unseen', 'z', NULL, 'limit:z', '5 min'))
    AS of (task, limit_key, rate_key, key, age), LATERAL (SELECT now() - age::interval AS at) AS made;
INSERT INTO pgqueue.key_limit (name, n, declared) VALUES ('z', 2, 2);
"""


@pytest.mark.promise("F475")
async def test_since_when_is_told_of_versions_and_of_unknown_and_undeclared_names(dsn: str, conn: Conn) -> None:
    """Naive is the youngest worker: it started later than the second version. Of blocked jobs it is not known."""
    conn.execute(WITH_AGES.encode())
    conn.commit()
    async with reading(dsn) as browser:
        found = (await browser.get("/", headers=JSON)).json()["findings"]
        now = datetime.now(UTC)
        ages = {
            re.split(r", which|: 2 of", each["what"])[0]: each["since"]
            and (now - datetime.fromisoformat(each["since"])).total_seconds() // 60
            for each in found
            if each["name"] in ("versions", "unknown", "undeclared")
        }
        assert ages == {
            "workers of several versions": pytest.approx(180, abs=2),
            "2 jobs wait in queue q for task typo": pytest.approx(24, abs=2),
            "1 job waits in queue q for task unseen": None,
            "2 jobs wait for limit x": pytest.approx(7, abs=2),
            "1 job waits for rate y": pytest.approx(35, abs=2),
        }
        main = (await browser.get("/")).text.partition("<main")[2].partition('class="figures"')[0]
        assert main.count("since when is not known") == sum(each["since"] is None for each in found) > 0
        assert main.count('class="since"') == len(found)


@pytest.mark.promise("F475")
async def test_of_very_many_findings_of_a_kind_the_others_lead_to_the_queues(dsn: str, conn: Conn) -> None:
    conn.execute(SERVED.encode())
    conn.execute(
        "INSERT INTO pgqueue.job (task, queue, enqueued_at) SELECT 'typo.' || n, 'late', now() - n * interval '1 min' "
        "FROM generate_series(1, 23) AS n"
    )
    conn.commit()
    async with reading(dsn) as browser:
        found = (await browser.get("/", headers=JSON)).json()["findings"]
        [last] = [each for each in found if "not listed" in each["what"]]
        assert (last["place"], last["what"][:1]) == ("/queues", "3")
        age = datetime.now(UTC) - datetime.fromisoformat(last["since"])
        assert timedelta(minutes=9) <= age < timedelta(minutes=12), "those are tasks 7, 8 and 9: since the oldest"
        assert '<a href="/queues">Queues</a>' in (await browser.get("/")).text.partition('class="figures"')[0]


@pytest.mark.promise("F475")
async def test_a_finding_without_a_page_has_a_command_or_the_page_of_a_manual_that_is_published(
    dsn: str, conn: Conn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Naive is the name of a file of pgqueue, which no browser can open."""
    conn.execute("DROP INDEX pgqueue.job_running_limit")
    conn.commit()

    async def seen() -> str:
        async with reading(dsn) as browser:
            return (await browser.get("/")).text.partition('class="findings"')[2].partition('class="figures"')[0]

    found = await seen()
    items = found.partition("</ul>")[0]
    assert "job_running_limit" in items and "<code>pgqueue doctor</code>" in items and "docs/" not in items
    assert "<code>docs/night.md</code>" in found
    monkeypatch.setattr(doctor, "HERE", "https://pgqueue.example/operations.md#what")
    monkeypatch.setattr(manual, "ROOT", "https://pgqueue.example/")
    found = await seen()
    assert '<a href="https://pgqueue.example/operations.md#what">The manual</a>' in found
    assert '<a href="https://pgqueue.example/night.md">' in found and "<code>pgqueue doctor</code>" not in found


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
