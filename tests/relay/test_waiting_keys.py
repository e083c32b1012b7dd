"""Rows that wait for keys which are just being taken delay no other row."""

from __future__ import annotations

import asyncio
from time import monotonic

import psycopg
import pytest
from relays import Sides, app_dsn, eventually, relaying, sides

import pgqueue
from pgqueue.relay.relay import Relay

__all__ = ["app_dsn", "sides"]

mail = pgqueue.remote("shop.mail")
MANY = 1_000


@pytest.mark.promise("F207")
@pytest.mark.parametrize("keys", [1, pytest.param(MANY, marks=pytest.mark.second)])
async def test_a_thousand_rows_that_wait_for_keys_delay_no_other(
    keys: int, app_dsn: str, dsn: str, sides: Sides
) -> None:
    """Not trying each of them in one delivery: that took 22 s, and longer on a busy machine."""
    names = [f"k{number % keys}" for number in range(MANY)]
    with psycopg.connect(dsn) as stranger:
        pgqueue.enqueue_many(stranger, [mail.using(unique=name).new(x="stranger") for name in sorted(set(names))])
        rows = [mail.using(unique=name).new(x=name) for name in names]
        rows.insert(100, mail.using(unique="free").new(x="among them"))
        pgqueue.enqueue_many(pgqueue.Outbox(sides.app), rows)
        relay = Relay(app_dsn, dsn)
        async with relaying(relay):
            await eventually(lambda: relay.counts.rounds > 0, 60.0)
            for value in ("plain", "keyed"):
                began = monotonic()
                pgqueue.enqueue(
                    pgqueue.Outbox(sides.app), mail.using(unique=value if value == "keyed" else None), x=value
                )
                await eventually(lambda value=value: value in sides.delivered())
                assert monotonic() - began < 8.0
            await eventually(lambda: "among them" in sides.delivered(), 120.0)
            await eventually(lambda: sides.left() == MANY)  # a row is gone a moment after its job is there
            await asyncio.to_thread(stranger.rollback)
            await eventually(lambda: sides.left() == 0, 60.0)
    assert len(sides.delivered()) == keys + 3 and sides.doubled() == []
