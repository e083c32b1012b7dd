"""The program: `python -m checker tables`, `add URL…`, `run`, `show`."""

import asyncio
import signal
import sys

import checker.client  # noqa: F401  (it declares what the jobs of this process share)
import pgqueue
from checker.tasks import check, check_all

TABLE = "CREATE TABLE IF NOT EXISTS page (url text PRIMARY KEY, status int, checked_at timestamptz)"


async def tables() -> None:
    """Make the table of the checker, and those of the queue."""
    await pgqueue.amigrate()
    async with await pgqueue.aconnect() as conn:
        await conn.execute(TABLE)


async def add(*urls: str) -> None:
    """Add these pages. The rows and the jobs that look at them are one commit."""
    async with await pgqueue.aconnect() as conn:
        for url in urls:
            await conn.execute("INSERT INTO page (url) VALUES (%s) ON CONFLICT DO NOTHING", [url])
        await check.aenqueue_many(conn, [(url,) for url in urls])


async def run() -> None:
    """Work until a signal. Jobs that run then have their time to end."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with pgqueue.Worker(tasks=[check, check_all], concurrency=20):
        print("the checker works", flush=True)
        await stop.wait()
    print("the checker has ended", flush=True)


async def show() -> None:
    """Print each page with its last answer."""
    async with await pgqueue.aconnect() as conn:
        for url, status in await (await conn.execute("SELECT url, status FROM page ORDER BY url")).fetchall():
            print(status or "-", url)


if __name__ == "__main__":
    command = {"tables": tables, "add": add, "run": run, "show": show}[sys.argv[1]]
    asyncio.run(command(*sys.argv[2:]))
