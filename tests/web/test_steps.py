"""The durable steps on the page of a job: what each has answered, in which attempt, and nothing that is hidden."""

from __future__ import annotations

import re
from typing import Any

import psycopg
import pytest
from dashboards import reading

from pgqueue.web.redaction import Redaction

pytestmark = [pytest.mark.promise("F243")]

JSON = {"accept": "application/json"}
MADE = """
WITH made AS (
    INSERT INTO pgqueue.job_running (state, task, worker_id, claim, started_at, attempt)
    VALUES ('running', 'orders.ship', 1, 3, now() - interval '1 min', 2) RETURNING id, enqueued_at
), failed AS (
    INSERT INTO pgqueue.attempt (job_id, enqueued_at, claim, attempt, worker_id, started_at, finished_at, bin, outcome,
        error_type, message)
    SELECT id, enqueued_at, 1, 1, 1, now() - interval '9 min', now() - interval '5 min', 0, 'retry', 'E', 'no hunter2'
    FROM made
)
INSERT INTO pgqueue.job_step (job_id, enqueued_at, name, result, created_at)
SELECT id, enqueued_at, name, result::jsonb, now() - ago::interval
FROM made, (VALUES ('charge <b>', '{"token": "hunter2", "code": "was hunter2", "cents": 900}', '6 min'),
                   ('pack', to_jsonb(repeat('x', 500))::text, '30 s'), ('tell', NULL, '20 s'))
    AS given (name, result, ago)
RETURNING job_id
"""


async def test_a_job_shows_its_steps_and_hides_of_them_what_it_hides_of_results(
    dsn: str, conn: psycopg.Connection[Any]
) -> None:
    [id, *_] = {id for (id,) in conn.execute(MADE.encode()).fetchall()}
    other = conn.execute("INSERT INTO pgqueue.job (task) VALUES ('other') RETURNING id").fetchall()[0][0]
    conn.commit()
    async with reading(dsn) as browser:
        page = (await browser.get(f"/jobs/{id}")).text
        [job] = (await browser.get(f"/jobs/{id}", headers=JSON)).json()["items"]
        assert "Steps" not in (await browser.get(f"/jobs/{other}")).text
    assert [(each["name"], each["attempt"]) for each in job["steps"]] == [("charge <b>", 1), ("pack", 2), ("tell", 2)]
    assert job["steps"][0]["result"] == {"token": "•••", "code": "was •••", "cents": 900}
    rows = re.findall(r'<tr role="row"><th role="rowheader".*?</tr>', page[page.index("<h2>Steps") :])
    assert len(rows) == 3 and "charge &lt;b&gt;" in rows[0] and "<b>" not in rows[0] and "900" in rows[0]
    assert re.findall(r"x+…", rows[1]) == ["x" * 138 + "…"] and "<time" in rows[1] and ">null<" in rows[2]
    assert "hunter2" not in page and "hunter2" not in str(job), "nor where an error quotes what a step has hidden"


def test_where_an_answer_was_not_read_no_text_of_the_job_is_shown() -> None:
    unread = {"steps": [{"name": "a", "result": {"pgqueue": "not shown: too large"}}], "reason": "no hunter2"}
    assert Redaction().shown(unread)["reason"] == "•••"
    assert Redaction().shown(unread | {"steps": [{"name": "a", "result": {}}]})["reason"] == "no hunter2"
