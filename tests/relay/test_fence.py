"""A session that holds the fence and does not go on is ended if it is a relay's, and named if it cannot be ended."""

from __future__ import annotations

import os
import struct
from contextlib import closing
from typing import Any

import psycopg
import pytest
from clocks import step_clock
from commands import pgqueue
from relays import Sides, app_dsn, sides
from roles import Role, role
from workers import Eyes, wait_until

from pgqueue.relay.fence import Held
from pgqueue.relay.relay import Relay

__all__ = ["app_dsn", "role", "sides"]

RELAYS = "pgqueue relay target"
LOCK = "SELECT FROM pgqueue.relay_fence FOR UPDATE"
NOTE = """
    UPDATE pgqueue.relay_fence f SET pid = a.pid, backend_start = a.backend_start
    FROM pg_stat_activity a WHERE a.pid = pg_backend_pid()
"""

HOLDERS = {
    # the name of the session, whether it has raised the fence; whether it is ended
    "it has raised the fence, under a pooler's name": ("pooled", True, True),
    "it is a relay's, and another one has raised the fence since": (RELAYS, False, True),
    "it is no relay's": ("psql", False, False),
}


@pytest.fixture
async def known(app_dsn: str, dsn: str, sides: Sides) -> None:
    """A relay has worked, and a job waits."""
    await Relay(app_dsn, dsn).once()
    sides.stage("a")


def holding(dsn: str, name: str, *, raised: bool) -> psycopg.Connection[Any]:
    """A session that holds the fence and has got a part of a message: the server waits for the rest."""
    conn = psycopg.connect(dsn, application_name=name, autocommit=True)
    if raised:
        conn.execute(NOTE)
    conn.execute(
        "SELECT set_config(unnest('{idle_in_transaction_session,statement}'::text[]) || '_timeout', '1s', false)"
    )
    conn.pgconn.enter_pipeline_mode()
    for text in ("BEGIN", LOCK):
        conn.pgconn.send_query_params(text.encode(), None)
    conn.pgconn.send_flush_request()
    conn.pgconn.flush()
    os.write(conn.fileno(), b"P" + struct.pack("!i", 100) + b"INSERT")
    with psycopg.connect(dsn, autocommit=True) as other:
        wait_until(lambda: not other.execute(f"{LOCK} SKIP LOCKED").fetchall(), 10.0)
    return conn


@pytest.mark.promise("F204")
@pytest.mark.parametrize("holder", HOLDERS)
async def test_a_session_that_holds_the_fence_for_ever_is_ended_if_it_is_a_relays(
    holder: str, app_dsn: str, dsn: str, sides: Sides, known: None
) -> None:
    name, raised, ended = HOLDERS[holder]
    with closing(holding(dsn, name, raised=raised)) as conn:
        if ended:
            assert await Relay(app_dsn, dsn).once()
        else:
            with pytest.raises(Held, match=rf"session {conn.info.backend_pid} of role .*, and is no relay's"):
                await Relay(app_dsn, dsn).once()
        alive = sides.queue.execute("SELECT FROM pg_stat_activity WHERE pid = %s", [conn.info.backend_pid])
        assert (alive.rowcount, sides.delivered()) == ((0, ["a"]) if ended else (1, []))
    assert await Relay(app_dsn, dsn).once()
    assert (sides.delivered(), sides.left()) == (["a"], 0)


@pytest.mark.promise("F204")
async def test_a_session_that_raised_the_fence_and_works_for_another_client_now_is_not_ended(
    app_dsn: str, dsn: str, sides: Sides, known: None
) -> None:
    """As a pooler lends it: same pid, same start."""
    with psycopg.connect(dsn) as lent:
        lent.execute(NOTE)
        lent.commit()
        lent.execute("SELECT FROM pgqueue.relay_target FOR UPDATE")
        with closing(holding(dsn, RELAYS, raised=False)):
            assert await Relay(app_dsn, dsn).once()
        lent.commit()
    assert sides.delivered() == ["a"]


@pytest.mark.promise("F204")
async def test_a_session_that_may_not_be_ended_is_named_by_the_relay_the_status_and_the_doctor(
    app_dsn: str, dsn: str, eyes: Eyes, known: None, role: Role
) -> None:
    with closing(holding(dsn, RELAYS, raised=True)) as conn:
        pid = conn.info.backend_pid
        with pytest.raises(Held, match=rf"session {pid} of role .* may not be ended by this role.*_backend\({pid}\)"):
            await Relay(app_dsn, role("relay")).once()
        for reader in (dsn, role("read")):  # that role sees no times of other roles' sessions
            step_clock(eyes, -600)
            assert "HELD" not in pgqueue("status", dsn=reader).stdout
            step_clock(eyes, 600)
            [line] = [line for line in pgqueue("status", dsn=reader).stdout.splitlines() if "HELD" in line]
            assert line.startswith("HELD for 10m: session") and f" {pid} " in line
        assert f"pg_terminate_backend({pid})" in pgqueue("doctor", dsn=dsn).stdout
