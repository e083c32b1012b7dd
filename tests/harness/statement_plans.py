"""The pages that a statement touches, and the nodes of its plan."""

from __future__ import annotations

import json
from typing import Any

import psycopg


def nodes(plan: dict[str, Any]) -> list[dict[str, Any]]:
    return [plan, *(node for child in plan.get("Plans", []) for node in nodes(child))]


def buffers(conn: psycopg.Connection, sql: str, params: dict[str, Any]) -> tuple[int, list[dict[str, Any]]]:
    """Pages touched by a statement that is then rolled back, and the nodes of its plan."""
    for setting in ("enable_seqscan", "enable_bitmapscan"):
        conn.execute(f"SET LOCAL {setting} = off".encode())
    [(found,)] = conn.execute(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {sql}".encode(), params).fetchall()
    plan = (json.loads(found) if isinstance(found, str) else found)[0]["Plan"]
    conn.rollback()
    return plan["Shared Hit Blocks"] + plan["Shared Read Blocks"], nodes(plan)
