"""The list of tasks and the page of one: what fails first, what takes most time, what is new in this version."""

from __future__ import annotations

import re
from typing import Any

import psycopg
import pytest
from dashboards import browsing, dashboard_of, forms, press, reading

import pgqueue
from pgqueue.database import drivers
from pgqueue.database.statements import Statement, text
from pgqueue.jobs.histogram import BOUNDS
from pgqueue.web.access import ACTIONS
from pgqueue.web.redaction import HIDDEN

Conn = psycopg.Connection[Any]
JSON = {"accept": "application/json"}
EVIL = "<script>alert('x')</script>\"'&"


def did(conn: Conn, task: str, minutes: int = 10, seconds: float = 1.0, unit: str = "minute", **numbers: int) -> None:
    """What this task has done in a minute or an hour, so many minutes ago; each attempt ran for so many seconds."""
    given = {"completed": 0, "failed": 0, "retried": 0} | numbers
    place = next(at for at, bound in enumerate(BOUNDS) if bound >= seconds)
    counted = [0] * place + [sum(given.values())]
    conn.execute(
        f"INSERT INTO pgqueue.history_{unit} (at, bin, queue, task, started, completed, failed, retried, wait, run, "  # noqa: S608
        f"run_seconds) SELECT date_trunc('{unit}', now() - make_interval(mins => %(minutes)s)), r.bin, 'q', %(task)s, "
        "%(n)s, %(completed)s, %(failed)s, %(retried)s, %(counted)s, %(counted)s, %(took)s "
        f"FROM pgqueue.ring r WHERE kind = '{unit}'".encode(),
        given | {"task": task, "minutes": minutes, "n": counted[-1], "counted": counted, "took": counted[-1] * seconds},
    )
    conn.commit()


def worker(conn: Conn, version: str, minutes: float, *tasks: str) -> None:
    conn.execute(
        "INSERT INTO pgqueue.worker (lease, pid, concurrency, host, version_tag, queues, tasks, state, started_at, "
        "beat_at) VALUES ('1 h', 1, 1, 'host', %s, '{q}', %s, 'running', now() - make_interval(secs => %s), now())",
        [version, list(tasks), minutes * 60],
    )
    conn.commit()


def refused(conn: Conn, args: str, message: str) -> int:
    """A job of the task `t` that has failed with Refused."""
    [[job]] = conn.execute(
        "WITH made AS (INSERT INTO pgqueue.job (state, task, finished_at, bin, reason, args, attempt) "
        "VALUES ('failed', 't', now(), 0, 'error', %s::jsonb, 1) RETURNING id, enqueued_at), attempted AS ("
        "INSERT INTO pgqueue.attempt (job_id, enqueued_at, claim, attempt, worker_id, started_at, finished_at, bin, "
        "outcome, error_type, message) SELECT id, enqueued_at, 1, 1, 1, now(), now(), 0, 'error', 'Refused', %s "
        "FROM made) SELECT id FROM made",
        [args, message],
    ).fetchall()
    conn.commit()
    return int(job)


async def document(dsn: str, path: str, **options: Any) -> dict[str, Any]:
    async with reading(dsn, **options) as browser:
        answer = await browser.get(path, headers=JSON)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found


@pytest.mark.promise("F332")
async def test_tasks_that_fail_come_first_then_those_that_take_most_time(dsn: str, conn: Conn) -> None:
    did(conn, "fails.little", completed=99, failed=1)
    did(conn, "fails.most", completed=50, retried=50)
    did(conn, "slow", seconds=60, completed=999, failed=1)
    did(conn, "slow", 20, seconds=60, completed=1)
    did(conn, "quick", seconds=0.01, completed=5000)
    did(conn, "long ago", 120, unit="hour", completed=1)
    worker(conn, "1", 600, "idle", "quick")
    pgqueue.pause(conn, task="held")
    conn.commit()
    items = (await document(dsn, "/tasks"))["items"]
    assert [each["name"] for each in items] == ["fails.most", "fails.little", "slow", "quick", "held", "idle"]
    most, little, slow, _, held, idle = items
    assert (most["failing"], most["is_failing"], most["ended"]) == (0.5, True, 50)
    assert (little["failing"], little["is_failing"]) == (0.01, True)
    assert (slow["ended"], slow["is_failing"], slow["run_seconds"]) == (1001, False, 60.0 * 1001)
    assert 45 < slow["run_p95"] <= 60 and slow["queues"] == ["q"] and slow["before"] is None
    assert (held["is_paused"], idle["is_paused"], idle["ended"], idle["failing"]) == (True, False, 0, None)
    async with reading(dsn) as browser:
        page = (await browser.get("/tasks")).text
        assert page.count(">failing<") == 2 and "50.0 %" in page and "/task?name=fails.most&amp;range=1h" in page
        assert (await browser.get("/tasks?range=30d")).status_code == 400
    assert "long ago" in [each["name"] for each in (await document(dsn, "/tasks?range=6h"))["items"]]


@pytest.mark.promise("F332")
@pytest.mark.parametrize("unit", ["minute", "hour"])
async def test_a_task_is_compared_with_the_time_before_the_newest_version(dsn: str, conn: Conn, unit: str) -> None:
    one = 1 if unit == "minute" else 60
    did(conn, "t", 30 * one, 0.1, unit, completed=200)
    did(conn, "t", 12 * one, 5, unit, completed=1000)
    did(conn, "t", 6 * one, 2, unit, completed=80, retried=15, failed=5)
    worker(conn, "1", 3_000, "t")
    worker(conn, "2", 12.0 * one, "t")
    conn.execute("UPDATE pgqueue.worker SET started_at = date_trunc(%s, started_at) WHERE version_tag = '2'", [unit])
    conn.execute("INSERT INTO pgqueue.duty (name, done_at) VALUES ('history', now()) ON CONFLICT (name) DO UPDATE "
                 "SET done_at = excluded.done_at")  # fmt: skip
    conn.commit()
    range_ = "1h" if unit == "minute" else "30d"
    [item] = (await document(dsn, f"/task?name=t&range={range_}"))["items"]
    figures = item["figures"]
    assert item["version"]["name"] == "2" and item["version"]["is_compared"]
    assert [figures[part]["ended"] for part in ("whole", "before", "since")] == [1285, 200, 85]
    assert (figures["before"]["failing"], figures["since"]["failing"]) == (0.0, 0.2)
    assert figures["before"]["run_p95"] <= 0.1 < 1.5 < figures["since"]["run_p50"] <= figures["since"]["run_p95"] <= 2
    assert figures["since"]["wait_p95"] <= 2 and figures["since"]["a_minute"] > figures["before"]["a_minute"]
    if unit == "minute":
        found = await document(dsn, "/tasks")
        [item] = found["items"]
        assert found["version"]["name"] == "2" and item["ended"] == 1285
        assert (item["before"]["failing"], item["since"]["failing"]) == (0.0, 0.2)
        async with reading(dsn) as browser:
            text = re.sub(r"<[^>]+>", "", (await browser.get("/tasks")).text)
            assert "0.0 % → 20.0 %" in text and re.search(r"\d+ ms → \d(\.\d)? s", text)


@pytest.mark.promise("F332")
@pytest.mark.parametrize("minutes", [1, 90])
async def test_a_version_that_is_new_or_old_is_compared_with_nothing(dsn: str, conn: Conn, minutes: int) -> None:
    did(conn, "t", 30, completed=2)
    worker(conn, "1", minutes, "t")
    [item] = (await document(dsn, "/task?name=t"))["items"]
    assert (item["figures"]["before"], item["figures"]["since"], item["version"]["is_compared"]) == (None, None, False)
    assert item["figures"]["whole"]["ended"] == 2
    assert (await document(dsn, "/tasks"))["version"] is None


@pytest.mark.promise("F333", "F432", "F138")
async def test_a_cause_has_the_message_of_its_newest_job_without_its_secrets(
    dsn: str, conn: Conn, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = refused(conn, '{"order_id": 1}', "what an older job says")
    job = refused(conn, '{"order_id": 4242, "api_key": "hunter2x"}', "the key hunter2x of 4242 is wrong\nsecond line")
    conn.execute(
        "INSERT INTO pgqueue.error_group (fingerprint, queue, task, error_type, message, first_at, last_at, count, "
        "job_ids) SELECT f, 'q', 't', e, 'quotes hunter2x', now() - interval '2 d', now(), 112, j "
        "FROM (VALUES ('a', 'Refused', %s::bigint[]), ('b', 'Gone', '{987654}'), ('c', 'None', '{}')) AS of (f, e, j)",
        [[job, old]],
    )
    conn.commit()
    sent = 0

    async def counted(conn: object, statement: Statement[Any]) -> Any:
        nonlocal sent
        sent += statement.sql == text("cause_errors_list", "pgqueue")
        return await arun(conn, statement)

    arun = drivers.arun
    monkeypatch.setattr(drivers, "arun", counted)
    found = (await document(dsn, "/task?name=t"))["items"][0]["causes"]
    others = [(await document(dsn, "/errors"))["items"], (await document(dsn, "/"))["causes"]]
    for causes in (found, *others):
        messages = {each["error_type"]: each["message"] for each in causes}
        assert messages == {"Refused": f"the key {HIDDEN} of 4242 is wrong", "Gone": HIDDEN, "None": HIDDEN}
    assert sent == 3, "one statement for all causes of a page"
    assert found[0]["count"] == 112

    def hide(path: tuple[str, ...], value: Any) -> Any:
        return "-" if path[-1] == "order_id" or (path[-1] == "error_type" and value == "Gone") else value

    for accept in ("text/html", "application/json"):
        async with reading(dsn, redact_with=hide) as browser:
            shown = (await browser.get("/task?name=t", headers={"accept": accept})).text
            assert "Refused" in shown and not re.search("hunter2x|4242|Gone", shown)
    async with reading(dsn, redact=()) as browser:
        page = (await browser.get("/task?name=t")).text
        assert "quotes hunter2x" in page and "the key hunter2x of 4242 is wrong" in page
        link = re.search(r'href="(/jobs\?[^"]*error_type=Refused[^"]*)"', page)
        assert link is not None
        items = (await browser.get(link[1].replace("&amp;", "&"), headers=JSON)).json()["items"]
        assert {each["id"] for each in items} == {job, old}


@pytest.mark.promise("F333")
async def test_a_task_is_paused_on_its_page_by_those_who_may(dsn: str, conn: Conn) -> None:
    async with dashboard_of(dsn, lambda visitor: ACTIONS) as made, browsing(made) as browser:
        assert forms(await browser.get("/task?name=a b")) == {"/pause"}
        page = await press(browser, "/pause", task="a.b")
        assert page.status_code == 200 and "It is paused." in page.text and forms(page) == {"/resume"}
        assert "pause by dashboard" in re.sub(r"<[^>]+>", "", page.text)
        assert forms(await press(browser, "/resume", task="a.b")) == {"/pause"}
    async with reading(dsn) as browser:
        page = await browser.get("/task?name=a.b")
        assert forms(page) == set() and "state=failed&amp;task=a.b" in page.text
        for query in ("", "?name=", "?name=t&range=2h", "?name=%00"):
            assert (await browser.get(f"/task{query}")).status_code == 400, query


@pytest.mark.promise("F333", "F135")
async def test_foreign_names_stay_text(dsn: str, conn: Conn) -> None:
    did(conn, EVIL, completed=1)
    async with reading(dsn) as browser:
        page = await browser.get("/tasks")
        assert "<script>" not in page.text
        [link] = re.findall(r'href="(/task\?[^"]*)"', page.text)
        assert "<script>alert" not in (await browser.get(link.replace("&amp;", "&"))).text
