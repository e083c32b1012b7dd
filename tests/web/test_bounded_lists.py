"""A list that is read up to a bound says so: on its page, in the JSON of the page, and by the command, alike."""

from __future__ import annotations

import asyncio
import json
from typing import Any, NamedTuple

import pytest
from commands import pgqueue
from dashboards import reading
from workers import Eyes

from pgqueue.database import migrations

JSON = {"accept": "application/json"}
SAID = "were looked at. There may be others"


class List(NamedTuple):
    """A list with `sql` that makes rows of it. In JSON `field` of `page` says that it was cut, in the item if it is one
    of a job or a limit. `command` says the same."""

    sql: str
    page: str
    field: str
    bound: int
    command: tuple[str, ...] = ()
    in_item: bool = False
    words: str = SAID


LISTS = {
    "locks that are waited for": List(
        "INSERT INTO pgqueue.job_blocked (state, task, lock_key, key, holds) "
        "SELECT 'blocked', 't', 'k' || n, 'lock:k' || n, false FROM generate_series(1, %s) AS n",
        "/limits",
        "cut_at",
        1_000,
        ("locks",),
    ),
    "locks that are granted": List(
        "INSERT INTO pgqueue.job_available (state, task, lock_key, holds) "
        "SELECT 'available', 't', 'k' || n, true FROM generate_series(1, %s) AS n",
        "/limits",
        "cut_at",
        1_000,
        ("locks",),
    ),
    "locks of running jobs": List(
        "INSERT INTO pgqueue.job_running (state, task, worker_id, claim, started_at, lock_key, limit_key, holds) "
        "SELECT 'running', 't', 1, 1, now(), 'k' || n, NULL, true FROM generate_series(1, %s) AS n",
        "/limits",
        "cut_at",
        1_000,
        ("locks",),
    ),
    "limits": List(
        "INSERT INTO pgqueue.job_blocked (state, task, limit_key, key, holds) "
        "SELECT 'blocked', 't', 'k' || n, 'limit:k' || n, false FROM generate_series(1, %s) AS n",
        "/limits",
        "limits_cut_at",
        1_000,
        ("limits",),
    ),
    "keys of rates": List(
        "INSERT INTO pgqueue.job_blocked (state, task, rate_key, key, holds) "
        "SELECT 'blocked', 't', 'api:' || n, 'rate:api:' || n, false FROM generate_series(1, %s) AS n",
        "/limits",
        "rates_cut_at",
        1_000,
        ("limits",),
    ),
    "jobs that have a limit": List(
        "INSERT INTO pgqueue.job_running (state, task, worker_id, claim, started_at, lock_key, limit_key, holds) "
        "SELECT 'running', 't', 1, 1, now(), NULL, 'api', true FROM generate_series(1, %s) AS n",
        "/limits/jobs?limit=api",
        "holders_cut_at",
        100,
        in_item=True,
        words="100 at most, there may be others",
    ),
    "jobs that wait for a limit": List(
        "INSERT INTO pgqueue.job_blocked (state, task, limit_key, key, holds) "
        "SELECT 'blocked', 't', 'api', 'limit:api', false FROM generate_series(1, %s) AS n",
        "/limits/jobs?limit=api",
        "waiters_cut_at",
        100,
        in_item=True,
        words="the first 100, there may be others",
    ),
    "queues": List(
        "INSERT INTO pgqueue.worker (host, pid, version_tag, queues, tasks, concurrency, lease) "
        "SELECT 'h', 1, 'v', array_agg('q' || n), '{}', 1, '1 hour' FROM generate_series(1, %s) AS n",
        "/queues",
        "cut_at",
        1_000,
        ("queues",),
    ),
    "workers": List(
        "INSERT INTO pgqueue.worker (host, pid, version_tag, queues, tasks, concurrency, lease) "
        "SELECT 'h' || n, 1, 'v', '{q}', '{}', 1, '1 hour' FROM generate_series(1, %s) AS n",
        "/workers",
        "cut_at",
        1_000,
        ("workers",),
    ),
    "workers of a queue": List(
        "INSERT INTO pgqueue.worker (host, pid, version_tag, queues, tasks, concurrency, lease) "
        "SELECT 'h' || n, 1, 'v', '{q}', '{}', 1, '1 hour' FROM generate_series(1, %s) AS n",
        "/queue?name=q",
        "workers_cut_at",
        1_000,
        ("status",),
        in_item=True,
    ),
    "supervisors": List(
        "INSERT INTO pgqueue.supervisor (host, pid, size, state) "
        "SELECT 'h' || n, 1, 1, 'running' FROM generate_series(1, %s) AS n",
        "/workers",
        "supervisors_cut_at",
        1_000,
    ),
    "tasks of the page": List(
        "INSERT INTO pgqueue.paused_task (name) SELECT 't' || n FROM generate_series(1, %s) AS n",
        "/tasks",
        "cut_at",
        1_000,
    ),
    "steps": List(
        "WITH made AS (INSERT INTO pgqueue.job (id, task) VALUES (7, 't') RETURNING id, enqueued_at) "
        "INSERT INTO pgqueue.job_step (job_id, enqueued_at, name) "
        "SELECT id, enqueued_at, 's' || n FROM made, generate_series(1, %s) AS n",
        "/jobs/7",
        "steps_cut_at",
        200,
        ("jobs", "7"),
        in_item=True,
    ),
    "changes of a job": List(
        "WITH made AS (INSERT INTO pgqueue.job (id, task) VALUES (7, 't')) "
        "INSERT INTO pgqueue.audit (actor, action, jobs) "
        "SELECT 'ann', 'reschedule', '{7}' FROM generate_series(1, %s) AS n",
        "/jobs/7",
        "changes_cut_at",
        50,
        in_item=True,
        words="These are the newest 50.",
    ),
    "causes": List(
        "INSERT INTO pgqueue.error_group (fingerprint, queue, task, error_type, first_at, last_at, count, job_ids) "
        "SELECT 'f' || n, 'q', 't', 'E', now(), now(), 1, '{}' FROM generate_series(1, %s) AS n",
        "/errors?skip=1980",
        "cut_at",
        2_000,
    ),
    "refused jobs": List(
        "WITH staged AS (INSERT INTO pgqueue.outbox (task) SELECT 't' FROM generate_series(1, %s) RETURNING *) "
        "INSERT INTO pgqueue.outbox_refused (id, task, args, format, uid, staged_at, reason) "
        "SELECT id, task, args, format, uid, staged_at, 'no' FROM staged",
        "/outbox",
        "refused_cut_at",
        100,
        ("relay", "--list-refused"),
    ),
}


@pytest.mark.promise("F456")
@pytest.mark.parametrize("name", LISTS)
@pytest.mark.parametrize("has_more", [False, True])
async def test_a_list_that_is_cut_says_so_on_its_page_and_by_its_command(
    dsn: str, eyes: Eyes, name: str, has_more: bool
) -> None:
    listed = LISTS[name]
    if name == "refused jobs":
        migrations.migrate(dsn, line=migrations.OUTBOX)
    eyes.do(listed.sql, listed.bound + 1 if has_more else listed.bound - 1)
    async with reading(dsn) as browser:
        page = (await browser.get(listed.page)).text
        asked = (await browser.get(listed.page, headers=JSON)).json()
    holder = asked["items"][0] if listed.in_item else asked
    assert holder[listed.field] == (listed.bound if has_more else None)
    assert (listed.words in page) == has_more
    if not listed.command:
        return
    source = ("--from", dsn) if listed.command[0] == "relay" else ()
    printed, told = await asyncio.gather(
        asyncio.to_thread(pgqueue, *listed.command, *source, dsn=dsn),
        asyncio.to_thread(pgqueue, *listed.command, *source, "--json", dsn=dsn),
    )
    document: dict[str, Any] = json.loads(told.stdout)
    holder, field = (document["items"][0], listed.field) if listed.in_item else (document, "cut_at")
    assert holder[field] == (listed.bound if has_more else None)
    assert (SAID in printed.stdout) == has_more


@pytest.mark.promise("F456")
async def test_locks_that_were_all_read_are_not_said_to_be_cut(dsn: str, eyes: Eyes) -> None:
    """600 are waited for and 600 others held: more than 1,000 rows, of two lists that were read to their ends."""
    eyes.do(LISTS["locks that are waited for"].sql, 600)
    eyes.do(LISTS["locks that are granted"].sql.replace("'k'", "'held'"), 600)
    async with reading(dsn) as browser:
        asked = (await browser.get("/limits?list=locks&limit=500&skip=500", headers=JSON)).json()
    assert (len(asked["items"]), asked["after"]["locks"], asked["cut_at"]) == (500, 1_000, None)


@pytest.mark.promise("F456")
async def test_one_lock_is_found_among_many_that_begin_so(dsn: str, eyes: Eyes) -> None:
    eyes.do(LISTS["locks of running jobs"].sql, 1_100)
    eyes.do(
        "INSERT INTO pgqueue.job_running (state, task, worker_id, claim, started_at, lock_key, holds) "
        "VALUES ('running', 'last', 1, 1, now() + interval '1 s', 'k', true)"
    )
    async with reading(dsn) as browser:
        asked = (await browser.get("/limits?lock=k", headers=JSON)).json()
    assert [(each["key"], [job["task"] for job in each["holders"]]) for each in asked["items"]] == [("k", ["last"])]
    assert asked["cut_at"] is None


@pytest.mark.promise("F456")
def test_what_was_not_looked_at_is_found_by_how_it_begins(dsn: str, eyes: Eyes) -> None:
    for kind in ("locks that are waited for", "limits"):
        eyes.do(LISTS[kind].sql, 1_000)
        eyes.do(LISTS[kind].sql.replace("k'", "z'"), 1)
    for command in ("locks", "limits"):
        assert "z1" not in pgqueue(command, dsn=dsn).stdout
        told = json.loads(pgqueue(command, "--begins", "z", "--json", dsn=dsn).stdout)
        assert ([each.get("key", each.get("name")) for each in told["items"]], told["cut_at"]) == (["z1"], None)
        assert "z1" in pgqueue(command, "--begins", "z", dsn=dsn).stdout
        assert "begins with nothing" in pgqueue(command, "--begins", "nothing", dsn=dsn).stdout


@pytest.mark.promise("F497")
@pytest.mark.parametrize("name", [each for each in LISTS if each.startswith("locks")])
async def test_a_cut_list_of_locks_names_no_order_in_which_holders_are_not_read(
    dsn: str, eyes: Eyes, name: str
) -> None:
    """Naive: it says that the first keys by name were looked at, but holders are not read by name."""
    eyes.do(LISTS[name].sql, 1_001)
    async with reading(dsn) as browser:
        page = (await browser.get("/limits?list=locks")).text
    for said in (page, (await asyncio.to_thread(pgqueue, "locks", dsn=dsn)).stdout):
        assert f"Not all keys {SAID}" in said and "by name" not in said
