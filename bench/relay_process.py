"""A relay in a process of its own, until its input ends: `python -m bench.relay_process APP_DSN QUEUE_DSN`."""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress

import click
import uvloop

from bench.processes import answer
from pgqueue.relay.relay import Relay


@click.command()
@click.argument("app")
@click.argument("queue")
def main(app: str, queue: str) -> None:
    """Relay until standard input ends."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_relay(app, queue))


async def _relay(app: str, queue: str) -> None:
    await Relay(app, queue).once()  # both sides are reached, and it has the lock next
    working = asyncio.create_task(Relay(app, queue).run())
    answer({"ready": True})
    await asyncio.to_thread(sys.stdin.read)
    working.cancel()
    with suppress(asyncio.CancelledError):
        await working


if __name__ == "__main__":
    main()
