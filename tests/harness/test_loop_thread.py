"""What stands between a client and the server leaves nothing open, whatever its clients are in the middle of."""

from __future__ import annotations

import asyncio
import gc
import socket
import struct
import threading
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
from faults import Wire
from poolers import Pooler
from psycopg.conninfo import conninfo_to_dict
from starting import StartingServer
from workers import wait_until

STARTUP = b"user\0postgres\0database\0postgres\0\0"
MESSAGE = struct.pack("!ii", len(STARTUP) + 8, 196608) + STARTUP
BETWEEN: list[Callable[[str], Any]] = [Wire, lambda dsn: Pooler(dsn, 2), StartingServer]
NAMES = ["wire", "pooler", "starting server"]


def leaves_nothing_open(use: Callable[[], None]) -> None:
    """Nothing that was made in there is left open when it is collected."""
    gc.collect()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", ResourceWarning)
        use()
        gc.collect()
    assert [str(warning.message) for warning in found] == []


def client_of(between: Any) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(str(conninfo_to_dict(between.dsn)["port"]))), 60)


@pytest.mark.parametrize("make", BETWEEN, ids=NAMES)
def test_a_client_in_the_middle_of_its_startup(make: Callable[[str], Any], dsn: str) -> None:
    def use() -> None:
        with make(dsn) as between, client_of(between) as client:
            client.sendall(MESSAGE[:3])

    leaves_nothing_open(use)


@pytest.mark.parametrize("make", BETWEEN, ids=NAMES)
def test_a_connection_to_the_server_that_is_just_made(
    make: Callable[[str], Any], dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Naive is to close what there is at the end: this one is there a moment later."""
    asked, connect = threading.Event(), asyncio.open_unix_connection

    async def slow(*args: Any) -> Any:
        made = await connect(*args)
        asked.set()
        try:
            await asyncio.sleep(60.0)
        except asyncio.CancelledError:
            made[1].close()
            raise
        return made

    def use() -> None:
        with make(dsn) as between:
            if isinstance(between, StartingServer):
                between.opened.set()
            with client_of(between) as client:
                client.sendall(MESSAGE)
                assert asked.wait(60)

    monkeypatch.setattr(asyncio, "open_unix_connection", slow)
    leaves_nothing_open(use)


def test_a_client_that_reads_nothing(dsn: str) -> None:
    """Naive is to close its connection: that waits until all is sent."""

    def use(later: ExitStack) -> None:
        with Wire(dsn) as wire:
            client = later.enter_context(client_of(wire))
            client.sendall(MESSAGE)
            wait_until(lambda: wire._lines)
            wire.say("", bytes(50_000_000))

    with ExitStack() as later:
        leaves_nothing_open(lambda: use(later))
