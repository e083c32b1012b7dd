"""The pools of connections that a worker keeps for handlers: whether they are in order, what a handler leaves there."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import psycopg
import pytest
from workers import Eyes, until

from pgqueue.worker.worker import Worker

SESSIONS = "FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'pgqueue job'"
LEFT = [
    "SELECT pg_advisory_lock(42)",
    "CREATE SEQUENCE numbers",
    "SELECT nextval('numbers')",
    "SET app.tenant = 'alice'",
    "SET search_path = nowhere, public",
    "SET lock_timeout = '77s'",
    "CREATE TEMP TABLE scratch (x int)",
    "LISTEN something",
    "DECLARE held CURSOR WITH HOLD FOR SELECT 1",
]
FOUND = """
SELECT current_user::text, session_user::text, coalesce(current_setting('app.tenant', true), ''),
    current_setting('search_path'), to_regclass('pg_temp.scratch')::text,
    (SELECT count(*) FROM pg_listening_channels()), (SELECT count(*) FROM pg_cursors WHERE name = 'held'),
    (SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()), pg_backend_pid()
"""


def free(eyes: Eyes) -> bool:
    """Whether nobody has account 1 locked."""
    try:
        eyes.all("SELECT FROM account WHERE id = 1 FOR UPDATE NOWAIT")
    except psycopg.errors.LockNotAvailable:
        return False
    return True


async def tidied(worker: Worker, eyes: Eyes) -> None:
    """Every connection is back in its pool, no transaction is open, none is known."""
    await until(lambda: whole(worker), 30)
    assert eyes.one(f"SELECT count(*) {SESSIONS} AND state LIKE 'idle in%%'") == 0
    assert worker.services.executor._running.lost == 0


@pytest.fixture
def restless() -> Iterator[None]:
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def whole(worker: Worker) -> bool:
    """Whether every connection of the worker's pools is back in them, and no transaction is known."""
    pools = [
        pool
        for pool in (worker.services.handler_pool.threads.pool, worker.services.handler_pool.on_loop.pool)
        if pool is not None
    ]
    stats = [pool.get_stats() for pool in pools]
    there = all(each["pool_available"] == each["pool_size"] for each in stats)
    return there and not worker.services.context._transactional._open
