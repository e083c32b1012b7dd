"""The worker under test: pgqueue's public Worker in a process of its own, as an application would embed it.

    python -m bench.worker DSN --queues bench,warm --loop uvloop

Says `ready` when all its Workers run. Each line it gets is answered with the starts of `stamp` jobs since the last, how
late each `tick` was, and how often `keyed` jobs of one lock id have overlapped.
Imports what `pgqueue work` imports and no more, so that its memory is a worker's memory.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack

import click

from bench import tasks
from bench.processes import answer
from pgqueue import Worker


@click.command()
@click.argument("dsn")
@click.option("--queues", default="bench,warm", show_default=True)
@click.option("--concurrency", default=10, show_default=True)
@click.option("--loop", type=click.Choice(["asyncio", "uvloop"]), default="uvloop", show_default=True)
@click.option("--workers", default=1, show_default=True, help="Workers inside this process.")
def main(dsn: str, queues: str, concurrency: int, loop: str, workers: int) -> None:
    """Work until standard input ends."""
    tasks.own.dsn, tasks.own.slots = dsn, concurrency
    with asyncio.Runner(loop_factory=_factory(loop)) as runner:
        runner.run(work(dsn, queues.split(","), concurrency, workers))


async def work(dsn: str, queues: list[str], concurrency: int, workers: int) -> None:
    """Run the workers, and answer questions meanwhile."""
    async with AsyncExitStack() as stack:
        for _ in range(workers):
            await stack.enter_async_context(Worker(queues=queues, concurrency=concurrency, dsn=dsn))
        answer({"ready": True})
        while await asyncio.to_thread(sys.stdin.readline):
            answer({"starts": tasks.starts, "late": tasks.late, "overlaps": tasks.overlaps})
            tasks.starts.clear()
            tasks.late.clear()


def _factory(loop: str) -> Callable[[], asyncio.AbstractEventLoop] | None:
    if loop == "asyncio":
        return None
    import uvloop

    return uvloop.new_event_loop


if __name__ == "__main__":
    main()
