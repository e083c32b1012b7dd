"""Who holds back the horizon: a session of the application that keeps all that dies after its beginning.

Scenarios hold one beside a worker, and compare with nobody. A third kind, a query on a standby that tells its primary
what it may still want to see, needs a second server: `tests/system/test_standby.py` has it, with the samples of
flat.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import LiteralString

import psycopg
from psycopg import IsolationLevel

HOLDERS: dict[str, tuple[IsolationLevel, LiteralString]] = {
    "snapshot": (IsolationLevel.REPEATABLE_READ, "SELECT 1"),
    "writer": (IsolationLevel.READ_COMMITTED, "INSERT INTO bench_effect (job) VALUES (0)"),
}
"""What each does before it falls idle: the one keeps a snapshot and has no id, the other has an id and no snapshot.

A writer is felt in the server's other databases, too: every snapshot taken there begins at the oldest id that runs.
"""

Holder = Callable[[str], AbstractContextManager[None]]
"""Somebody who holds in the database of that DSN for as long as the block lasts, or nobody."""


@contextmanager
def holding(dsn: str, holder: str | None) -> Iterator[None]:
    """That holder's transaction, idle for as long as the block lasts; None: nobody's."""
    if holder is None:
        yield
        return
    with psycopg.connect(dsn, application_name="bench holder") as conn:
        conn.isolation_level, before = HOLDERS[holder]
        conn.execute(before)
        yield
