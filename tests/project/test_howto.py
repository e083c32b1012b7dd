"""The how-to pages: each has its parts, and what waits in the tables of Procrastinate is moved as the page says."""

from __future__ import annotations

import re

import psycopg
import pytest
from pages import ROOT, blocks

HOWTO = ROOT / "docs" / "howto"

pytestmark = pytest.mark.promise("F365")

# The columns of procrastinate_jobs and procrastinate_events in Procrastinate 3.10, and how the two hang together.
THEIRS = """
CREATE TYPE procrastinate_job_status AS ENUM
    ('todo', 'doing', 'succeeded', 'failed', 'cancelled', 'aborting', 'aborted');
CREATE TABLE procrastinate_jobs (
    id bigserial PRIMARY KEY, queue_name varchar(128) NOT NULL, task_name varchar(128) NOT NULL,
    priority integer DEFAULT 0 NOT NULL, lock text, queueing_lock text, args jsonb DEFAULT '{}' NOT NULL,
    status procrastinate_job_status DEFAULT 'todo' NOT NULL, scheduled_at timestamptz,
    attempts integer DEFAULT 0 NOT NULL
);
CREATE TABLE procrastinate_events (
    id bigserial PRIMARY KEY, job_id bigint NOT NULL REFERENCES procrastinate_jobs (id) ON DELETE CASCADE
);
INSERT INTO procrastinate_jobs (queue_name, task_name, lock, queueing_lock, args, status, scheduled_at, priority) VALUES
    ('mail', 'orders.charge', 'order:1', NULL, '{"order": 1}', 'todo', NULL, 0),
    ('mail', 'orders.charge', NULL, 'daily', '{"order": 2}', 'todo', '2100-01-01 00:00+00', 0),
    ('mail', 'orders.charge', NULL, NULL, '{"order": 3}', 'todo', NULL, 5),
    ('mail', 'orders.charge', NULL, NULL, '{"order": 4}', 'doing', NULL, 0),
    ('mail', 'orders.other', NULL, NULL, '{}', 'todo', NULL, 0);
INSERT INTO procrastinate_events (job_id) SELECT id FROM procrastinate_jobs;
"""


def test_what_waits_in_procrastinate_is_moved_and_nothing_else(conn: psycopg.Connection) -> None:
    [statement] = [block.text for block in blocks(HOWTO / "moving.md") if block.language == "sql"]
    conn.execute(THEIRS.encode())
    conn.execute(statement.encode())
    moved = conn.execute(
        "SELECT task, queue, args['order']::int, lock_key, state, coalesce(run_at > now() + interval '1 year', false)"
        " FROM pgqueue.job ORDER BY id"
    ).fetchall()
    assert moved == [
        ("orders.charge", "mail", 3, None, "available", False),  # the most urgent of theirs first
        ("orders.charge", "mail", 1, "order:1", "available", False),
        ("orders.charge", "mail", 2, None, "scheduled", True),
    ]
    assert conn.execute("SELECT key FROM pgqueue.unique_key").fetchall() == [("unique:daily",)]
    left = conn.execute("SELECT args, status::text FROM procrastinate_jobs ORDER BY id").fetchall()
    assert left == [({"order": 4}, "doing"), ({}, "todo")]


def test_each_page_has_its_parts_and_the_index_leads_to_it() -> None:
    index = (HOWTO / "README.md").read_text(encoding="utf-8")
    pages = sorted(page for page in HOWTO.glob("*.md") if page.name != "README.md")
    assert len(pages) == 8
    for page in pages:
        text = page.read_text(encoding="utf-8")
        title, *headings = re.findall(r"^##? (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.MULTILINE)
        assert title.endswith("?") and f"[{page.name}]({page.name}) | " in index, page.name
        assert headings[-2:] == ["What it promises", "What can go wrong"], page.name
        assert text.rstrip().split("\n\n")[-1].startswith("More: "), page.name
