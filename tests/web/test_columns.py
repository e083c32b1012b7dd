"""Tables of the dashboard leave a column out that says the same in all rows, and say it once above the rows.

Each list is asked for with one row, with two that are alike, and with another one that differs. The HTML is read: what
a browser draws, and in which width, plays no part.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from html import unescape
from typing import Any, NamedTuple

import httpx
import psycopg
import pytest
from dashboards import browsing, dashboard_of, reading

from pgqueue.client.tasks import registry, task
from pgqueue.database import migrations
from pgqueue.web.access import ACTIONS

pytestmark = [pytest.mark.promise("F477")]

Conn = psycopg.Connection[Any]


@dataclass(frozen=True, slots=True)
class Table:
    """The texts of a table, without its elements."""

    caption: str
    heads: list[str]
    rows: list[list[str]]


def plain(html: str) -> str:
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", html)).split()).replace(" ,", ",").replace(" ;", ";")


def tables(page: httpx.Response) -> list[Table]:
    """The tables of the content. End tags of cells may be left out."""
    assert page.status_code == 200, page.text
    found = []
    for each in re.findall(r"<table.*?</table>", page.text.partition("<main")[2], re.DOTALL):
        caption, _, rest = each.partition("</caption>")
        head, _, body = rest.partition("<tbody")
        rows = [re.split(r"<t[hd]\b[^>]*>", row)[1:] for row in [head, *body.split("<tr")[1:]]]
        heads, *texts = [[plain(cell) for cell in row] for row in rows]
        found.append(Table(plain(caption.partition("<caption>")[2]), heads, texts))
    return found


class List(NamedTuple):
    """A list of which `sql` makes a row; its texts are made of `said`, which is `a`, or `bb` for a row that differs.

    `heads` are those of one row, `out` those that two like rows have not, and `still_out` those that are the same in
    the row that differs. Above two like rows stands `says`.
    """

    path: str
    sql: str
    heads: str
    out: str
    says: str
    still_out: str = ""
    before: str = ""


WORKER = """
INSERT INTO pgqueue.worker (id, host, pid, version_tag, queues, tasks, concurrency, lease)
OVERRIDING SYSTEM VALUE VALUES (1, 'here', 7, 'v', '{default}', '{t}', 9, '1 hour');
"""
KEY = "LATERAL (SELECT CAST(gen_random_uuid() AS text)) AS made (name)"
LISTS = {
    "jobs that have a limit": List(
        "/limits/jobs?limit=api",
        "INSERT INTO pgqueue.job (task, queue, state, limit_key, holds, worker_id, claim, started_at) "
        "SELECT said, said, CASE said WHEN 'a' THEN 'running' ELSE 'available' END, 'api', true, "
        "CASE said WHEN 'a' THEN 1 END, CASE said WHEN 'a' THEN 1 END, CASE said WHEN 'a' THEN now() END FROM {said}",
        "Id|Task|Queue|State|Process|Runs for",
        "Task|Queue|State|Process",
        "all of task a, all in queue a, all running, all on here:7",
        before=WORKER,
    ),
    "jobs that wait for a limit": List(
        "/limits/jobs?limit=api",
        "INSERT INTO pgqueue.job (task, queue, state, key, limit_key) "
        "SELECT said, said, 'blocked', 'limit:api', 'api' FROM {said}",
        "Id|Task|Queue|Key|Waits for",
        "Task|Queue|Key",
        "all of task a, all in queue a, all with key limit:api",
        "Key",
    ),
    "jobs that wait for a rate": List(
        "/limits/jobs?rate=mail",
        "INSERT INTO pgqueue.job (task, queue, state, key, rate_key) "
        "SELECT said, said, 'blocked', 'rate:mail:' || said, 'mail:' || said FROM {said}",
        "Id|Task|Queue|Key|Waits for",
        "Task|Queue|Key",
        "all of task a, all in queue a, all with key rate:mail:a",
    ),
    "changes": List(
        "/changes",
        "INSERT INTO pgqueue.audit (actor, action, count, jobs) "
        "SELECT said, said, length(said), ARRAY[(SELECT 1 + count(*) FROM pgqueue.audit)] FROM {said}",
        "Action|What|Actor|Changed|When",
        "Action|Actor|Changed",
        "all a, all by a, each changed 1",
    ),
    "refused jobs of an outbox": List(
        "/outbox",
        "INSERT INTO pgqueue.outbox_refused (id, task, args, format, uid, staged_at, reason) "
        "SELECT nextval('pgqueue.outbox_id_seq'), said, args, format, gen_random_uuid(), staged_at, 'no ' || said "
        "FROM {said}, pgqueue.outbox",
        "Row|Task|Staged|Refused|Reason",
        "Task|Reason",
        "all of task a, all for this reason: no a",
        before="INSERT INTO pgqueue.outbox (task) VALUES ('waits')",
    ),
    "relays": List(
        "/outbox",
        "INSERT INTO pgqueue.relay_fence (source, epoch, name, waiting, refused, reported_at) "
        "SELECT gen_random_uuid(), 1, name, 0, 0, now() - CASE said WHEN 'a' THEN 0 ELSE 10 END * interval '1 min' "
        "FROM {said}, {key}",
        "Outbox|Waiting|Oldest waits|Refused|Reported|State",
        "State",
        "all work",
    ),
    "operations": List(
        "/bulk",
        "INSERT INTO pgqueue.bulk (actor, action, target, states, task, up_to, ended_at) SELECT said, "
        "CASE said WHEN 'a' THEN 'retry' ELSE 'discard' END, jsonb_build_object('task', said), '{{failed}}', said, 1, "
        "CASE said WHEN 'a' THEN now() END FROM {said}",
        "Id|Action|State|Filter|Changed|Left out|By|Begun|Over",
        "Action|State|Filter|Left out|By",
        "all by a; the filter of all is task a; no job was left out",
        "Left out",
    ),
    "locks that no job waits for": List(
        "/limits?list=locks",
        "INSERT INTO pgqueue.job (task, state, lock_key, key, holds) SELECT 't', "
        "CASE said WHEN 'a' THEN 'available' ELSE 'blocked' END, name, CASE said WHEN 'bb' THEN 'lock:' || name END, "
        "said = 'a' FROM {said}, {key}",
        "Key|Held by|Waiting|First waiting|Waits for",
        "Waiting|First waiting|Waits for",
        "no job waits",
    ),
    "locks that no job holds": List(
        "/limits?list=locks",
        "INSERT INTO pgqueue.job (task, state, lock_key, key, holds) SELECT 't', "
        "CASE said WHEN 'a' THEN 'blocked' ELSE 'available' END, name, CASE said WHEN 'a' THEN 'lock:' || name END, "
        "said = 'bb' FROM {said}, {key}",
        "Key|Held by|Waiting|First waiting|Waits for",
        "Held by",
        "none is held",
    ),
    "schedules": List(
        "/schedules",
        "INSERT INTO pgqueue.schedule (name, line, task, queue, next_at) "
        "SELECT name, length(said) || ' 9 * * *', said, said, now() FROM {said}, {key}",
        "Schedule|When|Task|State|Next times|Last",
        "When|Task|State|Last",
        "1 9 * * *, all active, all of a in a; none has made a job yet",
        "State|Last",
    ),
    "workers": List(
        "/workers?list=workers",
        "INSERT INTO pgqueue.worker (lease, pid, concurrency, host, version_tag, queues, tasks, state, beat_at) "
        "SELECT '1 hour', 1, 9, 'here', said, ARRAY[said], '{{}}', 'quiet', now() FROM {said}",
        "Worker|State|Version|Queues|Slots busy|Runs|Memory|Started|Heartbeat",
        "State|Version|Queues|Runs",
        "all quiet, all version a, all for a; none runs a job",
        "State|Runs",
    ),
    "queues of the overview": List(
        "/",
        "INSERT INTO pgqueue.history_minute (at, bin, queue, task, state, n, exact) "
        "SELECT date_trunc('minute', now()) - make_interval(mins => g), bin, 'q2', '', 'available', 100 - 10 * g, true "
        "FROM {said}, pgqueue.ring, generate_series(0, 9) AS g WHERE kind = 'minute' AND said = 'bb'; "
        "INSERT INTO pgqueue.worker (lease, pid, concurrency, host, version_tag, queues, tasks) "
        "SELECT '1 hour', 1, 9, 'here', 'v', ARRAY['q' || (SELECT count(*) FROM pgqueue.worker)], '{{t}}'",
        "Queue|Waiting|Oldest|Running|Trend|Waiting, last hour",
        "Trend|Waiting, last hour",
        "Whether a queue rises or falls is not measured yet.",
    ),
}


def heads(text: str) -> list[str]:
    return text.split("|") if text else []


@pytest.mark.parametrize("name", LISTS)
async def test_a_column_that_says_the_same_in_all_rows_is_left_out_and_said_above_them(
    dsn: str, conn: Conn, name: str
) -> None:
    """Naive is a table that always has each of its columns. Of one row nothing is left out."""
    kind = LISTS[name]
    migrations.migrate(dsn, line=migrations.OUTBOX)
    if kind.before:
        conn.execute(kind.before.encode())
    async with reading(dsn, redact=()) as browser:

        async def seen(said: str) -> Table:
            values = f"(VALUES ('{said}')) AS given (said)"
            conn.execute(kind.sql.format(said=values, key=KEY).encode())
            conn.commit()
            return tables(await browser.get(kind.path))[0]

        every, out = heads(kind.heads), heads(kind.out)
        one, two, three = await seen("a"), await seen("a"), await seen("bb")
        assert [len(each.rows) for each in (one, two, three)] == [1, 2, 3]
        assert all(len(row) == len(each.heads) for each in (one, two, three) for row in each.rows)
        assert one.heads == every and kind.says not in one.caption
        assert two.heads == [each for each in every if each not in out] and kind.says in two.caption, two
        assert three.heads == [each for each in every if each not in heads(kind.still_out)], three


async def test_tasks_that_take_the_same_say_it_once(dsn: str) -> None:
    registry.clear()

    @task(name="a.one", queue="mail", priority=3)
    def one(order_id: int) -> None: ...

    @task(name="a.two", queue="mail", priority=3)
    def two(order_id: int) -> None: ...

    async with dashboard_of(dsn, lambda visitor: ACTIONS) as made, browsing(made) as browser:
        [alike] = tables(await browser.get("/enqueue"))
        assert (alike.heads, len(alike.rows)) == (["Task"], 2)
        assert "all in queue mail, all with priority 3; each takes (order_id)" in alike.caption

        @task(name="a.three", queue="other", priority=4)
        def three(order_id: int, note: str) -> None: ...

        [mixed] = tables(await browser.get("/enqueue"))
        assert (mixed.heads, len(mixed.rows)) == (["Task", "Queue", "Priority", "Arguments"], 3)


async def test_steps_with_the_same_answer_say_it_once(dsn: str, conn: Conn) -> None:
    [(job,)] = conn.execute(
        "INSERT INTO pgqueue.job (task, state, finished_at, bin) VALUES ('t', 'completed', now(), 0) RETURNING id"
    ).fetchall()
    async with reading(dsn) as browser:
        for name, answer, found in (
            ("pack", None, ["Step", "Answer", "Attempt", "Recorded"]),
            ("send", None, ["Step", "Attempt", "Recorded"]),
            ("tell", '"done"', ["Step", "Answer", "Attempt", "Recorded"]),
        ):
            conn.execute(
                "INSERT INTO pgqueue.job_step (job_id, enqueued_at, name, result) "
                "SELECT id, enqueued_at, %s, %s FROM pgqueue.job WHERE id = %s",
                [name, answer, job],
            )
            conn.commit()
            [steps] = tables(await browser.get(f"/jobs/{job}"))
            assert steps.heads == found
            assert ("all with the answer null" in steps.caption) == (name == "send")
