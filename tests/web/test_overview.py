"""The parts of the overview: figures, why jobs wait, queues, what runs longest. In HTML and in JSON."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from dashboards import reading

from pgqueue.admin.history import HistoryRow
from pgqueue.web import charts
from pgqueue.web.pages import longest, waits
from pgqueue.web.pages.figures import STEPS, figures

JSON = {"accept": "application/json"}
NOW = datetime(2026, 12, 24, 18, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
COUNTS = ("started", "completed", "failed", "retried", "snoozed", "cancelled", "expired", "skipped", "interrupted")

Conn = psycopg.Connection[Any]


def row(ago: int, counted: int | None = 0, **numbers: Any) -> HistoryRow:
    """A minute, so many minutes ago."""
    base: dict[str, Any] = dict.fromkeys((*COUNTS, "rescued", "wait_seconds", "run_seconds"), counted)
    return HistoryRow(at=NOW - ago * MINUTE, queue=None, task=None, **base | {"wait": (), "run": ()} | numbers)


def heights(line: dict[str, Any]) -> list[float]:
    """The height of each step that is drawn, as a share of the chart."""
    points = " ".join(line["lines"]).split()
    return [round(1 - float(each.partition(",")[2]) / charts.HEIGHT, 3) for each in points[::2]]


@pytest.mark.promise("F345")
@pytest.mark.parametrize(
    ("numbers", "top", "drawn"),
    [
        ((3, 0, 1), 20, [0.15, 0.0, 0.05]),
        ((20, 19, 0), 20, [1.0, 0.95, 0.0]),
        ((21, 0, 0), 21, [1.0, 0.0, 0.0]),
        ((1_000_000, 500_000, 0), 1_000_000, [1.0, 0.5, 0.0]),
    ],
)
def test_a_line_starts_at_0_and_small_numbers_stay_small(
    numbers: tuple[int, ...], top: float, drawn: list[float]
) -> None:
    rows = [row(20 - 2 * place, available=each, blocked=0) for place, each in enumerate(numbers)]
    found = {each["name"]: each for each in figures(None, rows, NOW)}
    assert set(found) == {"failed", "completed"}, "without the status it is not said what waits and runs"
    rows = [row(20 - 2 * place, failed=each) for place, each in enumerate(numbers)]
    line = figures(None, rows, NOW)[0]["line"]
    assert line["top"] == top
    at = STEPS - 11
    assert heights(line)[at : at + 3] == drawn


@pytest.mark.promise("F345")
def test_minutes_that_are_not_counted_are_a_gap_and_not_0() -> None:
    failed, completed = figures(None, [row(10, completed=4), row(1, None), row(0, None)], NOW)
    assert completed["jobs"] == {"n": 4, "exact": True} and failed["jobs"]["n"] == 0
    drawn = heights(completed["line"])
    assert len(drawn) == STEPS - 2, "of the last two steps not all minutes are counted"
    assert drawn.count(0) == STEPS - 3
    failed, completed = figures(None, None, NOW)
    assert (failed["jobs"], completed["jobs"], completed["line"]) == (None, None, None), "not known is not 0"
    failed, completed = figures(None, [], NOW)
    assert (failed["jobs"]["n"], failed["line"]) == (0, None)


@pytest.mark.promise("F345")
async def test_four_figures_and_all_states_lead_to_their_jobs(shop: str) -> None:
    async with reading(shop) as browser:
        found = (await browser.get("/", headers=JSON)).json()
        said = {each["name"]: each for each in found["figures"]}
        assert list(said) == ["waiting", "running", "failed", "completed"]
        assert (said["waiting"]["jobs"]["n"], said["running"]["jobs"]["n"]) == (43, 3)
        assert (said["running"]["slots"], said["running"]["workers"]) == (30, 3)
        assert said["failed"]["jobs"]["n"] == found["hour"]["failed"] > 0
        assert said["completed"]["jobs"]["n"] == found["hour"]["completed"] > 1_000
        assert said["waiting"]["line"]["top"] >= 80 and said["running"]["line"]["top"] == 20
        page = (await browser.get("/")).text
        main = page.partition("<main")[2]
        for text in (
            "of 30 slots, 3 workers",
            "attempts to be made again",
            'href="/jobs?state=available&amp;state=blocked"',
        ):
            assert text in main, text
        assert (
            main.partition('class="states"')[0].count('class="spark"') == 4
            and 'style="' not in page
            and 'class="tiles"' not in page
        )
        parts = re.findall(r'class="(verdict|findings|figures|states)\b|<h2>([^<]*)</h2>', main)
        assert [one or other for one, other in parts] == [
            "verdict", "findings", "figures", "states", "What fails", "Why jobs wait", "Queues", "The last hour",
            "Running longest",
        ]  # fmt: skip
        for state in ("scheduled", "completed", "failed", "cancelled", "skipped"):
            assert f'<a href="/jobs?state={state}"><span class="state state-{state}">' in main
        assert len(page.encode()) <= 60_000


OF_LISTS = (("key",), ("limits", "name"), ("rates", "name"))
"""Where the page of locks, limits and rates shows a key or a name."""
WAITING = """
INSERT INTO pgqueue.worker (lease, pid, concurrency, host, version_tag, queues, tasks, state, beat_at)
VALUES ('1 hour', 1, 5, 'here', '1', '{mail,slow,held}', '{t,u}', 'running', now());
INSERT INTO pgqueue.job (task, queue) SELECT 't', queue FROM (VALUES ('mail', 9), ('slow', 3), ('held', 2), ('gone', 1))
    AS of (queue, n), generate_series(1, n);
INSERT INTO pgqueue.job (task, queue) VALUES ('u', 'mail'), ('nothing', 'slow');
INSERT INTO pgqueue.job (task, queue, state, run_at, attempt, max_attempts)
    SELECT 't', 'mail', 'scheduled', now() + interval '1 hour', n, 5 FROM generate_series(0, 1) AS n;
INSERT INTO pgqueue.job_blocked (state, task, queue, lock_key, limit_key, rate_key, key) VALUES
    ('blocked', 't', 'mail', 'a', NULL, NULL, 'lock:a'), ('blocked', 't', 'slow', NULL, 'b', NULL, 'limit:b'),
    ('blocked', 't', 'mail', NULL, NULL, 'c', 'rate:c');
INSERT INTO pgqueue.queue (name, paused_at, paused_by) VALUES ('held', now() - interval '55 minutes', 'ann');
INSERT INTO pgqueue.paused_task (name) VALUES ('u');
"""


@pytest.mark.promise("F346")
async def test_each_reason_why_jobs_wait_leads_to_what_holds_them(
    dsn: str, conn: Conn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waits, "MOST", 20)
    conn.execute(WAITING.encode())
    conn.commit()
    async with reading(dsn) as browser:
        found = (await browser.get("/", headers=JSON)).json()
        said = {each["reason"]: each for each in found["waits"]}
        assert {reason: each["jobs"]["n"] for reason, each in said.items()} == {
            "paused": 2, "lock": 1, "limit": 1, "rate": 1, "unserved": 1, "unknown": 1, "task_paused": 1, "retry": 1,
            "slot": 12, "time": 1,
        }  # fmt: skip
        assert [each["reason"] for each in found["waits"]][-2:] == ["slot", "time"], "what is usual is last"
        assert (said["slot"]["queues"], said["slot"]["more_queues"]) == (["mail", "slow"], 0)
        assert (said["paused"]["queue"], said["paused"]["paused_by"], found["more_waits"]) == ("held", "ann", 0)
        page = (await browser.get("/")).text.partition("<h2>Why jobs wait</h2>")[2].partition("</ul>")[0]
        links = re.findall(r'<li><p><a href="([^"]*)">([^<]*)</a>', page)
        assert {text: link.replace("&amp;", "&") for link, text in links} == {
            "queue held is paused": "/queue?name=held",
            "no live worker serves queue gone": "/queue?name=gone",
            "task u is paused": "/task?name=u",
            "no live worker of queue slow knows task nothing": "/jobs?queue=slow&state=available&task=nothing",
            "another job has the lock a": "/limits?lock=a",
            "limit b is full": "/limits/jobs?limit=b",
            "rate c lets no more start yet": "/limits/jobs?rate=c",
            "another attempt is due later": "/jobs?state=retrying",
            "they wait for a free slot": "/jobs?state=available",
            "their time has not come": "/jobs?state=scheduled",
        }
        for link, _ in links:
            assert (await browser.get(link.replace("&amp;", "&"))).status_code == 200, link
        assert "by ann, " in page and "for 55 min" in page and '/queue?name=mail">mail</a>' in page
        limits = (await browser.get("/limits")).text
        assert all(f'<h2 id="{name}">' in limits for name in ("locks", "limits", "rates"))
        monkeypatch.setattr(waits, "MOST", 3)
        found = (await browser.get("/", headers=JSON)).json()
        assert (len(found["waits"]), found["more_waits"]) == (3, 7)
        assert "7 more reasons</a>" in (await browser.get("/")).text
    hidden = {"redact_with": lambda path, value: "-" if path == ("waits", "task") and value else value}
    async with reading(dsn, **hidden) as browser:
        assert "task u is paused" not in (await browser.get("/")).text


@pytest.mark.promise("F245")
async def test_jobs_that_wait_for_one_key_lead_to_it_and_to_the_list_if_they_wait_for_several_or_it_is_hidden(
    dsn: str, conn: Conn
) -> None:
    """Naive is the key of any waiting job. Then a link leads to one of many."""
    conn.execute(WAITING.encode())
    conn.execute(
        "INSERT INTO pgqueue.job_blocked (state, task, queue, lock_key, limit_key, key) VALUES "
        "('blocked', 't', 'mail', 'a ', NULL, 'lock:a '), ('blocked', 't', 'mail', NULL, 'b', 'limit:b')"
    )
    conn.commit()
    async with reading(dsn) as browser:
        keys = {each["reason"]: each["key"] for each in (await browser.get("/", headers=JSON)).json()["waits"]}
        assert (keys["lock"], keys["limit"], keys["rate"], keys["paused"]) == (None, "b", "c", None)
        page = (await browser.get("/")).text
        assert '/limits#locks">another job has their lock' in page and "/limits/jobs?limit=b" in page
        only = await browser.get("/limits", params={"lock": "a "})
        assert ">a </th>" in only.text and ">a</th>" not in only.text
        assert "No job holds it" in (await browser.get("/limits?lock=none")).text
    for hidden in (
        {"redact": ("limit_key", "lock_key", "rate_key")},
        {"redact_with": lambda path, value: "-" if value in ("a", "b", "c", "limit:b", "rate:c") else value},
        {"redact_with": lambda path, value: "-" if path in OF_LISTS else value},
    ):
        async with reading(dsn, **hidden) as browser:
            found = (await browser.get("/", headers=JSON)).json()["waits"]
            assert all(each["key"] is None for each in found)
            assert "their limit is full" in (await browser.get("/")).text
            assert (await browser.get("/limits?lock=a")).status_code == 400


@pytest.mark.promise("F245")
async def test_a_key_that_is_not_printable_leads_to_the_list(dsn: str, conn: Conn) -> None:
    """Naive is a link with another letter than the key has: it finds nothing."""
    before = WAITING.partition("INSERT INTO pgqueue.job_blocked")[0]
    conn.execute(before.encode())
    conn.execute(
        "INSERT INTO pgqueue.job_blocked (state, task, queue, limit_key, key) "
        "VALUES ('blocked', 't', 'mail', E'b\u202e', E'limit:b\u202e')"
    )
    conn.commit()
    async with reading(dsn) as browser:
        keys = {each["reason"]: each["key"] for each in (await browser.get("/", headers=JSON)).json()["waits"]}
        assert keys["limit"] is None and '/limits#limits">their limit is full' in (await browser.get("/")).text


@pytest.mark.promise("F346")
async def test_if_all_is_well_the_page_does_not_say_why_jobs_wait(dsn: str, conn: Conn) -> None:
    async with reading(dsn) as browser:
        conn.execute(WAITING.partition("INSERT INTO pgqueue.job (task")[0].encode())
        conn.execute("INSERT INTO pgqueue.job (task, queue) VALUES ('t', 'mail')")
        conn.commit()
        page = (await browser.get("/")).text
        assert "<h1>All is well</h1>" in page and "Why jobs wait" not in page
        assert (await browser.get("/", headers=JSON)).json()["waits"][0]["reason"] == "slot"


FAILED = """
INSERT INTO pgqueue.history_minute (at, bin, queue, task, started, failed)
SELECT date_trunc('minute', now()) - interval '5 min', bin, 'mail', 't', 9, 9 FROM pgqueue.ring WHERE kind = 'minute';
INSERT INTO pgqueue.error_group (fingerprint, queue, task, error_type, place, message, first_at, last_at, count,
    job_ids) VALUES ('f', 'mail', 't', 'KeyError', 'here', 'k', now(), now(), 9, '{}');
"""


@pytest.mark.promise("F449")
async def test_a_part_of_the_overview_without_the_one_beside_it_is_as_wide_as_the_page(dsn: str, conn: Conn) -> None:
    """Naive is a part that always stands at the right. Then the left of the page is empty."""

    async def parts() -> dict[str, str]:
        async with reading(dsn) as browser:
            page = (await browser.get("/")).text
        return dict(re.findall(r'<section id="(\w+)"(?: class="(\w+)")?>', page))

    conn.execute(WAITING.encode())
    conn.commit()
    assert await parts() == {"waits": "whole", "queues": "whole", "hour": "whole"}
    conn.execute(FAILED.encode())
    conn.commit()
    assert await parts() == {"fails": "", "waits": "aside", "queues": "whole", "hour": "whole"}
    conn.execute("DELETE FROM pgqueue.queue; DELETE FROM pgqueue.paused_task; DELETE FROM pgqueue.job")
    conn.execute(
        "INSERT INTO pgqueue.job_running (state, task, queue, worker_id, claim, started_at, attempt) "
        "SELECT 'running', 't', 'mail', id, 1, now() - interval '9 min', 1 FROM pgqueue.worker"
    )
    conn.commit()
    assert await parts() == {"fails": "whole", "queues": "whole", "hour": "", "longest": "aside"}


QUEUES = """
INSERT INTO pgqueue.worker (lease, pid, concurrency, host, version_tag, queues, tasks, state, beat_at)
VALUES ('1 hour', 1, 5, 'here', '1', '{busy,calm,late,held,idle}', '{t}', 'running', now());
INSERT INTO pgqueue.job (task, queue, enqueued_at) SELECT 't', queue, now() - age::interval
    FROM (VALUES ('busy', 9, '3 s'), ('calm', 2, '1 s'), ('late', 1, '12 min'), ('held', 3, '1 h'), ('gone', 1, '5 s'))
    AS of (queue, n, age), generate_series(1, n);
INSERT INTO pgqueue.queue (name, paused_at, paused_by) VALUES ('held', now() - interval '55 minutes', 'ann');
INSERT INTO pgqueue.history_minute (at, bin, queue, task, state, n, exact)
    SELECT date_trunc('minute', now()) - make_interval(mins => g), bin, queue, '', state, greatest(0, n + slope * g),
        true
    FROM pgqueue.ring, (VALUES ('busy', 'available', 100, -10), ('busy', 'blocked', 5, 0), ('late', 'available', 1, 3),
                               ('calm', 'available', 2, 0)) AS of (queue, state, n, slope), generate_series(0, 9) AS g
    WHERE kind = 'minute';
"""


@pytest.mark.promise("F347")
async def test_queues_in_need_come_first_and_each_says_whether_it_rises(dsn: str, conn: Conn) -> None:
    conn.execute(QUEUES.encode())
    conn.commit()
    async with reading(dsn) as browser:
        found = (await browser.get("/", headers=JSON)).json()["queues"]
        assert [(each["queue"], each["need"], each["waiting"]["n"]) for each in found] == [
            ("gone", "no worker", 1), ("late", "behind", 1), ("held", "paused", 3), ("busy", None, 9),
            ("calm", None, 2), ("idle", None, 0),
        ]  # fmt: skip
        trends = {each["queue"]: each["trend"] for each in found}
        assert trends == {
            "gone": None, "held": None, "idle": None,
            "busy": pytest.approx(10), "late": pytest.approx(-3), "calm": pytest.approx(0),
        }  # fmt: skip
        for name in ("busy", "late", "calm", "gone"):
            [item] = (await browser.get(f"/queue?name={name}", headers=JSON)).json()["items"]
            assert item["trend"] == trends[name], "the page of the queue says the same"
        lines = {each["queue"]: each["line"] for each in found}
        assert lines["busy"]["top"] == 105 and lines["calm"]["top"] == 20 and lines["gone"] is None
        page = (await browser.get("/")).text.partition("<h2>Queues</h2>")[2].partition("</table>")[0]
        for text in ("rising by 10 a minute", "falling by 3 a minute", ">steady<", "not measured yet", "no worker"):
            assert text in page, text
        assert "paused</span> by ann" in page and 'href="/queue?name=busy">busy</a>' in page
        conn.execute("DELETE FROM pgqueue.queue; DELETE FROM pgqueue.job WHERE queue IN ('gone', 'late', 'held')")
        conn.commit()
        page = (await browser.get("/")).text
        assert "<h1>All is well</h1>" in page and ">busy</a>" in page
        assert '<th role="columnheader" scope="col">State</th>' not in page, "all would say the same"


@pytest.mark.promise("F347")
async def test_of_many_queues_with_long_names_the_first_are_shown(dsn: str, conn: Conn) -> None:
    conn.execute(
        "INSERT INTO pgqueue.job (task, queue) SELECT repeat('t', 60) || n, n || repeat('q', 38) "
        "FROM generate_series(1, 40) AS n"
    )
    conn.execute(
        "INSERT INTO pgqueue.history_minute (at, bin, queue, task, state, n, exact) "
        "SELECT date_trunc('minute', now()) - make_interval(mins => g), bin, n || repeat('q', 38), '', 'available', "
        "n * g, true FROM pgqueue.ring, "
        "generate_series(1, 40) AS n, generate_series(0, 59) AS g WHERE kind = 'minute'"
    )
    conn.execute(
        "INSERT INTO pgqueue.history_minute (at, bin, queue, task, started, completed, failed, retried, wait) "
        "SELECT date_trunc('minute', now()) - make_interval(mins => g), bin, 'q', 't', 99999, 88888, 7777 + g, 666, "
        "ARRAY[g, 99999] FROM pgqueue.ring, generate_series(3, 59) AS g WHERE kind = 'minute'"
    )
    conn.commit()
    async with reading(dsn) as browser:
        page = await browser.get("/")
        assert len(page.content) <= 60_000
        assert len((await browser.get("/", headers=JSON)).json()["queues"]) == 8


RUNNING = """
WITH made AS (INSERT INTO pgqueue.worker (lease, pid, concurrency, host, version_tag, queues, tasks, state, beat_at)
    VALUES ('1 hour', 1, 9, 'web-3', '1', '{q}', '{t}', 'running', now()) RETURNING id)
INSERT INTO pgqueue.job_running (state, task, queue, worker_id, claim, started_at)
    SELECT 'running', task, 'q', id, 1, now() - age::interval FROM made, (VALUES ('quick', '80 s'), ('quick', '9 s'),
        ('slow', '15 min'), ('slow', '50 min'), ('new', '2 h'), ('usual', '30 min'), ('usual', '1 min'))
        AS of (task, age);
INSERT INTO pgqueue.history_minute (at, bin, queue, task, started, completed, run)
    SELECT date_trunc('minute', now()), bin, 'q', task, 100, 100, array_fill(0, ARRAY[place]) || 100
    FROM pgqueue.ring, (VALUES ('quick', 12), ('slow', 37), ('usual', 40), ('other', 3)) AS of (task, place)
    WHERE kind = 'minute';
"""


@pytest.mark.promise("F348")
async def test_what_runs_unusually_long_for_its_task_is_first(
    dsn: str, conn: Conn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(longest, "LEAST_SECONDS", 75.0)  # on a busy machine the job of 9 s grows older while it is read
    async with reading(dsn) as browser:
        found = (await browser.get("/", headers=JSON)).json()
        assert found["longest"] == [] and "Running longest" not in (await browser.get("/")).text
        conn.execute(RUNNING.encode())
        conn.commit()
        found = (await browser.get("/", headers=JSON)).json()["longest"]
        p95 = {each["task"]: each["run_p95"] for each in found}
        assert p95["new"] is None and 900 / 2 < p95["slow"] < 3_000 / 2 and p95["usual"] >= 1_800 / 2, p95
        expected = [
            ("quick", 80, True), ("slow", 3_000, True), ("new", 7_200, False), ("usual", 1_800, False),
            ("slow", 900, False),
        ]  # fmt: skip
        assert [(each["task"], each["is_unusual"]) for each in found] == [
            (task, is_unusual) for task, _, is_unusual in expected
        ], "a quick job of 9 s needs nobody, and two of usual length are not shown"
        for each, (_, age, _) in zip(found, expected, strict=True):
            assert age <= each["age"] < age + 60, found
        page = (await browser.get("/")).text.partition("<h2>Running longest</h2>")[2].partition("</ul>")[0]
        assert page.count("unusually long:") == 2 and page.count("as usual:") == 2
        assert "no run of this task is counted" in page and page.count("on web-3") == 5
        for each in found:
            assert f'<a href="/jobs/{each["id"]}">' in page
    hidden = {"redact_with": lambda path, value: "-" if path == ("longest", "task") else value}
    async with reading(dsn, **hidden) as browser:
        page = (await browser.get("/")).text.partition("<h2>Running longest</h2>")[2].partition("</ul>")[0]
        assert "quick" not in page and "slow" not in page
