"""How large each page is with 50 rows: 60 kB of HTML at most, for a visitor who sees every button.

Names and errors are as long as those of applications are: 25 characters and 160. `bench` has the same limit
beside millions of jobs. Here each list is as full as a page shows it.
"""

from __future__ import annotations

import re
from html import unescape
from typing import Any

import psycopg
import pytest
from dashboards import browsing, dashboard_of, reading

import pgqueue
from pgqueue.web.access import ACTIONS
from pgqueue.web.routes import ROUTES

pytestmark = [pytest.mark.promise("F242")]

MOST = 60_000
JSON = {"accept": "application/json"}
FILLED = """
CREATE VIEW of AS SELECT n, 'billing.charge_customer_' || n AS task, 'europe_' || n AS queue, now() AS at,
    'ConnectionResetError' || n AS error,
    rpad('the server ' || n || ' has closed the connection', 160, ', again') AS said
FROM generate_series(1, 50) AS n;
INSERT INTO pgqueue.supervisor (host, pid, size, state, active)
SELECT 'worker-' || n || '.eu.example.com', 4100 + n, 4, 'running', 4 FROM of WHERE n <= 12;
INSERT INTO pgqueue.supervisor_order (supervisor_id, kind, size, done_at)
SELECT n, 'scale', 4, now() FROM of WHERE n <= 12;
INSERT INTO pgqueue.worker (lease, pid, concurrency, host, version_tag, queues, state, tasks, beat_at, rss,
    supervisor_id)
SELECT '1 hour', 4200 + n, 10, 'worker-' || (n + 3) / 4 || '.eu.example.com', '2026.11.2', ARRAY['default', queue],
    'running', ARRAY[task], at, 88080384, (n + 3) / 4 FROM of;
INSERT INTO pgqueue.job_running (state, task, queue, args, worker_id, claim, started_at, lock_key, holds, attempt)
SELECT 'running', task, queue, '{"order_id": 3100, "amount": "19.90"}', n, 1, at,
    CASE WHEN n <= 20 THEN 'customer:' || n END, n <= 20, 1 FROM of;
INSERT INTO pgqueue.job_available (state, task, queue, args)
SELECT 'available', task, queue, '{"order_id": 3100, "amount": "19.90"}' FROM of;
INSERT INTO pgqueue.job_scheduled (state, task, queue, args, run_at, attempt)
SELECT 'scheduled', task, queue, '{"order_id": 3100}', at + interval '1 h', n % 2 FROM of;
INSERT INTO pgqueue.job_blocked (state, task, queue, lock_key, key)
SELECT 'blocked', task, queue, 'customer:' || n, 'lock:customer:' || n FROM of WHERE n <= 20;
INSERT INTO pgqueue.job_blocked (state, task, limit_key, key)
SELECT 'blocked', task, 'gateway-1', 'limit:gateway-1' FROM of;
INSERT INTO pgqueue.key_limit (name, n, declared, set_at) SELECT 'gateway-' || n, 2, 4, at FROM of WHERE n <= 20;
INSERT INTO pgqueue.key_rate (name, count, period, declared_count, declared_period, set_at)
SELECT 'partner-' || n, 50, 60, 100, 60, at FROM of WHERE n <= 10;
INSERT INTO pgqueue.job_dead (state, task, queue, args, reason, started_at, finished_at, bin, attempt, max_attempts)
SELECT 'failed', task, queue, '{"order_id": 3100}', 'error', at, at, 0, 5, 5 FROM of;
INSERT INTO pgqueue.attempt (job_id, enqueued_at, claim, attempt, worker_id, started_at, finished_at, bin, outcome,
    error_type, message)
SELECT j.id, j.enqueued_at, 1, 5, 1, at, at, 0, 'failed', error, said FROM pgqueue.job_dead j JOIN of USING (task);
INSERT INTO pgqueue.error_group (fingerprint, queue, task, error_type, place, message, first_at, last_at, count,
    job_ids, version_tag)
SELECT n, queue, task, error, 'shop.billing.gateway.send', said, at - interval '1 h', at, 1000 + n,
    ARRAY(SELECT id FROM pgqueue.job_dead LIMIT 5), '2026.11.2' FROM of;
INSERT INTO pgqueue.error_group (fingerprint, queue, task, error_type, place, message, first_at, last_at, count,
    job_ids, version_tag)
SELECT 't' || n, queue, 'billing.charge_customer_1', error, 'shop.billing.gateway.send', said, at - interval '1 h', at,
    1000 + n, '{}', '2026.11.2' FROM of;
INSERT INTO pgqueue.schedule (name, line, tz, catch_up, task, args, queue, priority, options, next_at, last_at,
    last_job)
SELECT 'monthly report of ' || n, '30 9 * * MON-FRI', 'Europe/Berlin', 'latest', task, '{}', queue, 5, '{}', at, at,
    4711
FROM generate_series(1, 60) AS more JOIN of ON n = 1 + more % 50 AND more <= 50;
INSERT INTO pgqueue.audit (actor, action, target, jobs, details)
SELECT 'ann@example.com', 'bulk retry', jsonb_build_object('task', 'billing.charge_customer_1', 'error_type', error),
    ARRAY[n], '{"note": "the gateway is back"}' FROM of;
UPDATE pgqueue.audit SET target = '{"task": "another"}' WHERE id > 10;
INSERT INTO pgqueue.bulk (actor, action, target, states, task, up_to, ended_at, counts)
SELECT 'ann@example.com', 'retry', jsonb_build_object('states', '{failed}'::text[], 'task', task), '{failed}', task, 1,
    at, '{"retried": 14}' FROM of;
INSERT INTO pgqueue.version_start SELECT '2026.11.' || n, at - n * interval '9 min' FROM of WHERE n < 6;
INSERT INTO pgqueue.history_minute (at, bin, queue, task, started, completed, failed, retried, wait, run)
SELECT date_trunc('minute', at) - minute * interval '1 min', bin, queue, task, 1200, 1170, 20, 10,
    ARRAY[100, 300, 600, 200], ARRAY[100, 300, 600, 200]
FROM pgqueue.ring, of, generate_series(2, 70) AS minute WHERE kind = 'minute' AND (n < 3 OR minute < 5);
INSERT INTO pgqueue.history_hour (at, bin, queue, task, started, completed, failed, retried, wait, run)
SELECT date_trunc('hour', at) - hour * interval '1 h', bin, queue, task, 1200, 1170, 20, 10,
    ARRAY[100, 300, 600, 200], ARRAY[100, 300, 600, 200]
FROM pgqueue.ring, of, generate_series(1, 720) AS hour WHERE kind = 'hour' AND (n = 1 OR hour < 3);
INSERT INTO pgqueue.history_minute (at, bin, queue, task, state, n, exact, oldest)
SELECT date_trunc('minute', at) - minute * interval '1 min', bin, queue, '', 'available', 1234, true, 12
FROM pgqueue.ring, of, generate_series(2, 70) AS minute WHERE kind = 'minute' AND n < 9;
DROP VIEW of;
"""
QUERIES = {
    "jobs": [f"?state={each}" for each in ("available", "scheduled", "retrying", "blocked", "running", "failed")],
    "task": [f"?name=billing.charge_customer_1&range={each}" for each in ("1h", "6h", "24h", "30d")],
    "tasks": [f"?range={each}" for each in ("1h", "6h", "24h")],
    "history": [f"?range={each}" for each in ("1h", "6h", "24h", "30d")],
    "queue": ["?name=europe_1"],
    "limit_jobs": ["?limit=gateway-1"],
    "preview": ["?action=retry&state=failed"],
    "preview_flow": ["?action=cancel"],
}
"""What these pages are asked for; the others need nothing."""


def enqueue_flow(conn: psycopg.Connection[Any], number: int) -> pgqueue.FlowHandle:
    """A chain of so many nodes."""
    flow, last = pgqueue.Flow(f"europe order {number}"), list[pgqueue.Node[Any]]()
    for each in range(1, number + 1):
        last = [flow.add(charge.new(each), after=last)]
    return flow.enqueue(conn)


@pgqueue.task(name="billing.charge_customer")
def charge(order_id: int) -> None: ...


async def test_each_page_with_50_rows_is_small(dsn: str) -> None:
    with psycopg.connect(dsn) as conn:
        conn.execute(FILLED.encode())
        [[job, bulk]] = conn.execute(
            "SELECT (SELECT max(id) FROM pgqueue.job_dead), (SELECT max(id) FROM pgqueue.bulk)"
        ).fetchall()
        flow = [enqueue_flow(conn, n).id for n in range(1, 51)][-1]
    ids = {"bulk": bulk, "flow": flow, "preview_flow": flow}
    sizes: dict[str, int] = {}
    async with dashboard_of(dsn, lambda visitor: ACTIONS, redact=()) as made, browsing(made) as browser:
        for route in ROUTES:
            if not (route.page and route.method == "GET"):
                continue
            for query in QUERIES.get(route.name, [""]):
                path = route.path.replace("{id}", str(ids.get(route.name, job))) + query
                answer = await browser.get(path)
                assert answer.status_code == 200, (path, answer.text)
                sizes[path] = len(answer.content)
    assert {path: n for path, n in sizes.items() if n > MOST} == {}


@pytest.mark.parametrize("path", ["/schedules", "/errors", "/queues", "/tasks"])
async def test_pages_of_a_list_lead_to_all_rows_once(dsn: str, path: str) -> None:
    with psycopg.connect(dsn) as conn:
        conn.execute(FILLED.encode())
        for table in ("history_minute", "history_hour"):
            conn.execute(f"TRUNCATE pgqueue.{table}".encode())
    async with reading(dsn, redact=()) as browser:
        every = (await browser.get(f"{path}?limit=500", headers=JSON)).json()
        assert len(every["items"]) >= 50 and every["after"] is None
        seen, next_ = [], f"{path}?limit=20&queue="
        while next_:
            page, found = await browser.get(next_), (await browser.get(next_, headers=JSON)).json()
            seen += found["items"]
            links = [unescape(each) for each in re.findall(r'rel="next" href="([^"]+)"', page.text)]
            assert len(links) == (found["after"] is not None) and all("limit=20" in each for each in links)
            next_ = links[0] if links else ""
            assert page.text.count("<tbody") == 1
        name = "fingerprint" if path == "/errors" else "name"
        assert [each[name] for each in seen] == [each[name] for each in every["items"]]
        assert len({each[name] for each in seen}) == len(seen) > 40
        for wrong in ("skip=-1", "skip=x", "skip=100001", "limit=0", "limit=501"):
            assert (await browser.get(f"{path}?{wrong}")).status_code == 400, wrong
        last = await browser.get(f"{path}?skip=100")
        assert "first" in last.text.casefold() and "<tr" not in last.text
