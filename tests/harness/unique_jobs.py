"""Jobs with a unique key, in every state."""

from __future__ import annotations

from typing import Any

import psycopg

import pgqueue
from pgqueue import JobHandle, NewJob, Unique

mail = pgqueue.remote("unique.mail")


Conn = psycopg.Connection[Any]


def keyed(key: str, *, hold: Any = None, on_duplicate: Any = "return", **args: Any) -> NewJob[Any]:
    return mail.using(unique=Unique(lambda **_: key, hold=hold, on_duplicate=on_duplicate)).new(**args)


def put(conn: Conn, key: str, **options: Any) -> JobHandle[Any]:
    [handle] = pgqueue.enqueue_many(conn, [keyed(key, **options)])
    return handle


ENDS = ("completed", "skipped", "failed", "cancelled")


def make(
    conn: Conn, state: str, hold: str, *, key: str = "k", attempt: int = 0, snoozes: int = 0, ended: float = 0.0
) -> int:
    """A job with this key, as it stands in this state."""
    columns = {
        "id": "nextval('pgqueue.job_id_seq')",
        "state": f"'{state}'",
        "task": "'t'",
        "attempt": str(attempt),
        "snoozes": str(snoozes),
        "unique_key": f"'{key}'",
        "run_at": "now() + interval '1 hour'" if state == "scheduled" else "NULL",
        "key": "'lock:l'" if state == "blocked" else "NULL",
    }
    if state == "running" or state in ENDS:
        columns |= {"worker_id": "1", "claim": "1", "started_at": "clock_timestamp()"}
    if state in ENDS:
        columns |= {"finished_at": f"clock_timestamp() - interval '{ended} s'", "reason": "'r'"}
    sql = f"INSERT INTO pgqueue.job ({', '.join(columns)}) VALUES ({', '.join(columns.values())})"  # noqa: S608
    [(id, since)] = conn.execute(f"{sql} RETURNING id, enqueued_at".encode()).fetchall()
    kind, seconds = (hold, 0.0) if hold in ("pending", "live") else ("after", float(hold))
    conn.execute(
        "INSERT INTO pgqueue.unique_key VALUES (%s, %s, %s, %s, NULL, %s)", [f"unique:{key}", id, kind, seconds, since]
    )
    return int(id)
