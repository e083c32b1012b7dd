"""The fault of a full NOTIFY queue is what it says, and it ends."""

from __future__ import annotations

import psycopg
import pytest
from notify_queues import full, small_server, used


def test_a_full_queue_fails_each_commit_that_notifies_until_the_block_ends() -> None:
    server = small_server()
    try:
        dsn = server.dsn("postgres")
        with psycopg.connect(dsn, autocommit=True) as conn:
            with full(dsn) as pid:
                assert used(conn) == 1.0
                with pytest.raises(psycopg.errors.ProgramLimitExceeded, match="NOTIFY queue") as caught:
                    conn.execute("NOTIFY anything")
                assert caught.value.sqlstate == "54000"
                assert conn.execute("SELECT application_name FROM pg_stat_activity WHERE pid = %s", [pid]).fetchone()
            assert used(conn) < 0.1
            conn.execute("NOTIFY anything")
    finally:
        server.end()
