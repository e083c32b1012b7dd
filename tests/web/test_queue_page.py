"""The page of a queue: whether it rises or falls, its tasks, its workers."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from dashboards import browsing, dashboard_of, forms, press, reading

import pgqueue
from pgqueue.web.access import ACTIONS

Conn = psycopg.Connection[Any]
JSON = {"accept": "application/json"}


def measured(conn: Conn, *numbers: int, state: str = "available") -> None:
    """So many jobs waited in the queue `q` in each of the last minutes, the last number just now."""
    conn.execute(
        "INSERT INTO pgqueue.history_minute (at, bin, queue, task, state, n, exact) "
        "SELECT date_trunc('minute', now()) - (cardinality(%(n)s) - u.place) * interval '1 min', r.bin, 'q', '', "
        "%(state)s, u.n, true FROM unnest(%(n)s::bigint[]) WITH ORDINALITY AS u (n, place), pgqueue.ring r "
        "WHERE r.kind = 'minute'",
        {"n": list(numbers), "state": state},
    )
    conn.commit()


@pytest.mark.promise("F334")
@pytest.mark.parametrize(
    ("numbers", "trend", "said"),
    [
        ((10, 20, 30, 40), 10.0, "Rising by 10 jobs a minute."),
        ((40, 30, 20, 10), -10.0, "Falling by 10 jobs a minute."),
        ((7, 7, 7), 0.0, "Neither rising nor falling."),
        ((1_000_000, 1, 1, *([5] * 14)), 0.0, "Neither rising nor falling."),
        ((10, 20), None, "is not measured yet"),
        ((), None, "is not measured yet"),
    ],
)
async def test_a_queue_rises_or_falls_by_so_many_a_minute(
    dsn: str, conn: Conn, numbers: tuple[int, ...], trend: float | None, said: str
) -> None:
    measured(conn, *numbers)
    async with reading(dsn) as browser:
        [item] = (await browser.get("/queue?name=q", headers=JSON)).json()["items"]
        assert item["trend"] == (trend if trend is None else pytest.approx(trend, abs=0.4))
        assert said in (await browser.get("/queue?name=q")).text


@pytest.mark.promise("F334")
async def test_it_has_its_tasks_its_workers_and_its_buttons(dsn: str, conn: Conn) -> None:
    conn.execute(
        "INSERT INTO pgqueue.history_minute (at, bin, queue, task, started, completed, run_seconds) SELECT "
        "date_trunc('minute', now()) - interval '5 min', bin, q, q || '.task', 7, 7, 7 "
        "FROM pgqueue.ring, (VALUES ('q'), ('other')) AS of (q) WHERE kind = 'minute'"
    )
    conn.execute(
        "INSERT INTO pgqueue.worker (lease, pid, concurrency, host, version_tag, queues, tasks, state) VALUES "
        "('1 h', 1, 5, 'here', '1', '{q}', '{}', 'running'), ('1 h', 2, 5, 'there', '1', '{other}', '{}', 'running')"
    )
    pgqueue.remote("q.task").using(queue="q").enqueue(conn)
    conn.commit()
    async with dashboard_of(dsn, lambda visitor: ACTIONS) as made, browsing(made) as browser:
        page = await browser.get("/queue?name=q")
        assert forms(page) == {"/pause"} and "here:1" in page.text and "there:2" not in page.text
        assert "/task?name=q.task" in page.text and "other.task" not in page.text
        assert "/jobs?state=failed&amp;queue=q" in page.text
        assert forms(await press(browser, "/resume", queue="q")) == {"/pause"}, "from the list one comes to the list"
        page = await press(browser, "/pause", queue="q", page="queue")
        assert "It is paused." in page.text and forms(page) == {"/resume"} and "by dashboard" in page.text
        [item] = (await browser.get("/queue?name=q", headers=JSON)).json()["items"]
        assert (item["available"]["n"], item["workers"], len(item["served_by"])) == (1, 1, 1)
        assert 'href="/queue?name=q"' in (await browser.get("/queues")).text
    async with reading(dsn) as browser:
        assert forms(await browser.get("/queue?name=q")) == set()
        for query in ("", "?name=", "?name=a%20b", "?name=%00"):
            assert (await browser.get(f"/queue{query}")).status_code == 400, query
