"""The process around relays: event loop and signals. Called by `pgqueue relay`."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence

from pgqueue.relay.relay import Relay


def once(relays: Sequence[Relay]) -> list[bool]:
    """All at once, each to its end; whether each could work. The first error is raised then."""
    return asyncio.run(_once(relays))


def serve(relays: Sequence[Relay]) -> None:
    """Until a signal."""
    asyncio.run(_serve(relays))


async def _once(relays: Sequence[Relay]) -> list[bool]:
    ends = await asyncio.gather(*(relay.once() for relay in relays), return_exceptions=True)
    for end in ends:
        if isinstance(end, BaseException):
            raise end
    return [bool(end) for end in ends]


async def _serve(relays: Sequence[Relay]) -> None:
    running = [asyncio.create_task(relay.run()) for relay in relays]
    loop, stopped = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    waiting = asyncio.create_task(stopped.wait())
    try:
        await asyncio.wait([waiting, *running], return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (waiting, *running):
            task.cancel()
        ends = await asyncio.gather(*running, return_exceptions=True)
    for end in ends:  # a relay ends by itself only if something is wrong with the program
        if isinstance(end, Exception):
            raise end
