"""The page of a job: why in one sentence, its error, jobs of the same cause, its attempts on a line, its list."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from html import unescape
from typing import Any
from urllib.parse import urlencode

import httpx
import psycopg
import pytest
from dashboards import browsing, dashboard_of, reading

import pgqueue
from pgqueue.admin.queries import Attempt, JobInfo, place_of
from pgqueue.web import attempts_line
from pgqueue.web.access import ACTIONS
from pgqueue.web.attempts_line import LEAST, MOST, WIDTH, line_of

Conn = psycopg.Connection[Any]
JSON = {"accept": "application/json"}
PRESSED = {"sec-fetch-site": "same-origin"}


def put(conn: Conn, n: int, task: str = "page.task", error: str = "KeyError", message: str = "'a'") -> list[int]:
    """Jobs that have failed one after another in their second attempt, the last one last."""
    rows = conn.execute(
        "WITH made AS (INSERT INTO pgqueue.job (state, task, enqueued_at, finished_at, bin, reason, args, attempt, "
        "max_attempts) SELECT 'failed', %s, now() - interval '1 h', now() - make_interval(mins => %s - g), 0, 'error', "
        "jsonb_build_object('token', 'hunter2'), 2, 2 FROM generate_series(1, %s) AS g RETURNING id, enqueued_at, "
        "finished_at), tried AS (INSERT INTO pgqueue.attempt (job_id, enqueued_at, claim, attempt, worker_id, "
        "started_at, finished_at, bin, outcome, error_type, message, traceback) SELECT id, enqueued_at, nr, nr, 1, "
        "finished_at - make_interval(secs => 100 * (2 - nr) + 10), finished_at - make_interval(secs => 100 * (2 - nr)),"
        " 0, 'error', %s, %s, 'Traceback: ' || nr FROM made, generate_series(1, 2) AS nr) SELECT id FROM made "
        "ORDER BY finished_at",
        [task, n, n, error, message],
    ).fetchall()
    conn.commit()
    return [id for (id,) in rows]


def main(page: httpx.Response) -> str:
    """The content, with its links as they are followed."""
    assert page.status_code == 200, page.text
    return unescape(page.text.partition("<main")[2].partition("</main>")[0])


def beside(page: httpx.Response) -> dict[str, str]:
    """The addresses of the jobs before and after."""
    return dict(re.findall(r'rel="(prev|next)" href="([^"]*)"', main(page)))


@pytest.mark.promise("F433")
async def test_a_job_says_why_then_its_error_then_who_else_failed_so_then_its_facts(dsn: str, conn: Conn) -> None:
    *others, id = put(conn, 8, message="no hunter2")
    put(conn, 1, error="OSError")
    put(conn, 1, task="page.other")
    async with reading(dsn) as browser:
        page = main(await browser.get(f"/jobs/{id}"))
        order = ["It failed", "<h2>Error of attempt 2", "<h2>The same cause", "<h2>What happened", "<h2>Facts"]
        places = [page.index(each) for each in order]
        assert places == sorted(places)
        said = re.sub(r"<[^>]*>", "", page[places[0] : places[1]].partition("</p>")[0])
        assert re.fullmatch(r"It failed \d+ (s|min) ago, in attempt 2 of 2\. KeyError no •••", said), said
        assert page.count("Traceback: 2") == 1 == page.count("Traceback: 1"), "each once"
        assert page.index("Traceback: 2") < places[2] < page.index("Traceback: 1")
        query = urlencode([("state", "failed"), ("task", "page.task"), ("error_type", "KeyError")])
        assert f'<a href="/jobs?{query}">7 other jobs</a> of this task failed with KeyError' in page
        alike = page[places[2] : places[3]]
        assert re.findall(r'href="/jobs/(\d+)"', alike) == [str(each) for each in reversed(others[-5:])]
        assert "hunter2" not in page and "<button" not in page and "Retry all" not in page
        [item] = (await browser.get(f"/jobs/{id}", headers=JSON)).json()["items"]
        assert item["same_cause"]["count"] == {"n": 7, "exact": True} and "hunter2" not in str(item)
        alone = main(await browser.get(f"/jobs/{put(conn, 1, task='page.alone')[0]}"))
        assert "No other job of this task that failed with KeyError is kept." in alone
        waits = pgqueue.remote("page.later").using(delay=900).enqueue(conn).id
        conn.commit()
        later = main(await browser.get(f"/jobs/{waits}"))
        assert later.index("<strong>It is due in 1") < later.index("<h2>Why") < later.index("<h2>Facts")
        assert "The same cause" not in later and "<svg" not in later
    async with dashboard_of(dsn, lambda visitor: ACTIONS) as made, browsing(made) as browser:
        assert "Retry all…" in main(await browser.get(f"/jobs/{id}"))


@pytest.mark.promise("F433")
@pytest.mark.parametrize("path", [("error_type",), ("attempts", "error_type"), ("task",)])
async def test_a_hidden_class_or_task_finds_no_other_jobs(dsn: str, conn: Conn, path: tuple[str, ...]) -> None:
    id = put(conn, 3)[-1]
    async with reading(dsn, redact_with=lambda at, value: "-" if at == path else value) as browser:
        [item] = (await browser.get(f"/jobs/{id}", headers=JSON)).json()["items"]
        assert item["same_cause"] is None
        assert "The same cause" not in main(await browser.get(f"/jobs/{id}"))


@pytest.mark.promise("F434")
async def test_a_job_leads_to_those_beside_it_in_the_list(
    dsn: str, conn: Conn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the first job to the last one and back, past the end of a page, with a stretch that is short."""
    monkeypatch.setattr("pgqueue.web.pages.neighbours.LOOKED", 6)
    monkeypatch.setattr("pgqueue.web.pages.neighbours.BEHIND", 3)
    ids = put(conn, 12)[::-1]
    put(conn, 3, task="page.other")
    async with reading(dsn) as browser:
        listed = main(await browser.get("/jobs?state=failed&task=page.task"))
        way = re.findall(r'class="lead"><a href="([^"]*)"', listed)
        assert [int(re.findall(r"\d+", each)[0]) for each in way] == ids
        page, seen = await browser.get(way[0]), [ids[0]]
        assert "prev" not in beside(page) and 'href="/jobs?state=failed&task=page.task"' in main(page)
        while (to := beside(page).get("next")) is not None:
            page = await browser.get(to)
            [before, here] = [int(each) for each in re.findall(r"/jobs/(\d+)", beside(page)["prev"] + to)]
            assert before == seen[-1]
            seen.append(here)
        assert seen == ids
        back = await browser.get(beside(page)["prev"])
        assert f"Job {ids[-2]}:" in main(back) and int(re.findall(r"\d+", beside(back)["prev"])[0]) == ids[-3]
        after = urlencode({"after": place_of(pgqueue.get(conn, ids[3]), state="failed")})
        page, seen = await browser.get(f"{way[4]}&{after}"), list[int]()
        while (to := beside(page).get("prev")) is not None:
            seen.append(int(re.findall(r"\d+", to)[0]))
            page = await browser.get(to)
        assert seen == ids[3::-1], "the head of the list has those that the link has lost"
        assert beside(await browser.get(f"/jobs/{ids[5]}")) == {}, "the visitor did not come from a list"
        found = (await browser.get(way[3], headers=JSON)).json()
        assert (found["before"], found["next"]) == (ids[2], ids[4])
        assert (await browser.get(f"/jobs/{ids[0]}?listed=1&arg=token=hunter2")).status_code == 400
        strange = await browser.get(f"/jobs/{ids[0]}?listed=1&state=failed&after=x")
        assert strange.status_code == 200 and beside(strange) == {}


@pytest.mark.promise("F434")
async def test_behind_a_job_that_was_retried_comes_the_next_one_of_the_list(dsn: str, conn: Conn) -> None:
    ids = put(conn, 5)[::-1]
    async with dashboard_of(dsn, lambda visitor: ACTIONS) as made, browsing(made) as browser:
        page = main(await browser.get(f"/jobs/{ids[2]}?listed=1&state=failed&task=page.task"))
        action = re.findall(rf'action="(/jobs/{ids[2]}/retry[^"]*)"', page)[0]
        answer = await browser.post(action, data={"again": "0"}, headers=PRESSED)
        assert answer.status_code == 303
        after = await browser.get(answer.headers["location"])
        assert "available" in main(after) and re.findall(r"/jobs/(\d+)", beside(after)["next"]) == [str(ids[3])]
        action = re.findall(rf'action="(/jobs/{ids[3]}/discard[^"]*)"', main(await browser.get(beside(after)["next"])))[
            0
        ]
        answer = await browser.post(action, headers=PRESSED)
        assert answer.headers["location"].startswith("/jobs?state=failed&task=page.task&did=")


START = datetime(2026, 12, 24, 18, 0, tzinfo=UTC)


def job_of(state: str, *attempts: tuple[float, float, str], **more: Any) -> JobInfo:
    """A job whose attempts began and ended so many seconds after its enqueue."""
    at = [
        Attempt(n, outcome, "E", None, None, 1, None, START + timedelta(seconds=a), START + timedelta(seconds=b))
        for n, (a, b, outcome) in enumerate(attempts, 1)
    ]
    none: dict[str, Any] = dict.fromkeys(JobInfo.__dataclass_fields__)
    return JobInfo(**none | {"state": state, "enqueued_at": START, "attempt": 1, "attempts": tuple(at)} | more)


@pytest.mark.promise("F426")
def test_the_line_has_each_attempt_and_each_wait_in_the_order_of_time() -> None:
    ended = {"finished_at": START + timedelta(seconds=100)}
    line = line_of(job_of("failed", (10, 20, "error"), (90, 100, "error"), **ended), START + timedelta(hours=9))
    assert line is not None and (line.seconds, line.worked, line.attempts) == (100, 20, 2)
    kinds = [(each.kind, each.seconds) for each in line.stretches]
    assert kinds == [("wait", 10), ("retried", 10), ("wait", 70), ("failed", 10)]
    widths = [each.width for each in line.stretches]
    assert widths[0] * 7 == pytest.approx(widths[2], abs=0.1) and widths[1] == pytest.approx(widths[0] + LEAST, abs=0.1)
    assert line.stretches[-1].x + widths[-1] == pytest.approx(WIDTH, abs=0.1)


@pytest.mark.promise("F426")
def test_the_line_of_moments_of_many_attempts_and_of_jobs_that_have_not_ended() -> None:
    now = START + timedelta(seconds=1_000_000)
    assert line_of(job_of("available"), now) is None
    runs = line_of(job_of("running", (0, 0, "snoozed"), started_at=START + timedelta(seconds=9)), now)
    assert runs is not None and [each.kind for each in runs.stretches] == ["whole", "wait", "running"]
    assert runs.stretches[0].width >= 4 and runs.seconds == 1_000_000
    waits = line_of(job_of("scheduled", (0, 1, "error")), now)
    assert waits is not None and [each.kind for each in waits.stretches] == ["retried", "wait"]
    moment = line_of(job_of("failed", (0, 0, "error"), finished_at=START), now)
    assert moment is not None and moment.stretches[0].width == WIDTH
    many = line_of(job_of("scheduled", *[(n, n + 0.5, "error") for n in range(MOST + 7)]), now)
    assert many is not None and (many.attempts, many.left_out) == (MOST, 7)
    assert many.begin == START + timedelta(seconds=7) and min(e.width for e in many.stretches if e.attempt) >= 4
    assert sum(each.width for each in many.stretches) == pytest.approx(attempts_line.WIDTH, abs=1)


@pytest.mark.promise("F426")
async def test_the_attempts_of_a_job_are_drawn_with_their_values(dsn: str, conn: Conn) -> None:
    id = put(conn, 1)[0]
    async with reading(dsn) as browser:
        page = main(await browser.get(f"/jobs/{id}"))
    drawn = page[page.index("<svg") : page.index("</svg>")]
    titles = [re.sub(r"^.{20}", "", each) for each in re.findall(r"<title>([^<]*)</title>", drawn)]
    assert titles[1:] == ["attempt 1: error after 10 s", "waited  1 m 30 s", "attempt 2: error after 10 s"], titles
    assert "2 attempts on one line of time" in drawn and "script" not in drawn and "style=" not in drawn


@pytest.mark.promise("F496")
@pytest.mark.parametrize("field", ["message", "traceback", "reason", "error_type"])
@pytest.mark.parametrize("said", [4711, ["no", "text"], {"no": "text"}])
async def test_what_is_shown_instead_of_a_text_may_be_no_text(dsn: str, conn: Conn, field: str, said: object) -> None:
    """Naive: a filter for texts gets a number, and the page of the job is an error."""
    [id] = put(conn, 1)
    async with reading(dsn, redact_with=lambda at, value: said if at[-1] == field else value) as browser:
        for path in (f"/jobs/{id}", "/jobs"):
            assert (await browser.get(path)).status_code == 200, path
        assert ("4711" in main(await browser.get(f"/jobs/{id}"))) == (said == 4711)
