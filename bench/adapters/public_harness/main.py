"""pgqueue as an adapter of the public harness: a producer, a worker, and samples as lines of JSON, until SIGTERM.

The harness names what each variable and each metric means. README.md beside this file says how pgqueue fills them.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import psycopg

import pgqueue
from pgqueue import distribution
from pgqueue.database import migrations

MANIFEST: dict[str, Any] = json.loads(Path(__file__).with_name("adapter.json").read_text(encoding="utf-8"))
WINDOW_SECONDS = 30.0
LOOK_SECONDS = 0.2
MOST_LATENCIES = 32_768
QUEUE = "bench"
STOP_SECONDS = 3.0  # the harness kills after five


@dataclass(frozen=True, slots=True)
class Settings:
    """What the harness asks for. An unset variable has the default that its contract names."""

    dsn: str
    mode: str
    rate: int
    rate_file: str
    batch: int
    batch_seconds: float
    paced_by_harness: bool
    target_depth: int
    workers: int
    payload: int
    work_seconds: float
    sample_seconds: float
    replica: int

    @classmethod
    def read(cls) -> Settings:
        def number(name: str, default: int) -> int:
            return int(os.environ.get(name) or default)

        return cls(
            dsn=os.environ["DATABASE_URL"],
            mode=os.environ.get("PRODUCER_MODE", "fixed"),
            rate=number("PRODUCER_RATE", 800),
            rate_file=os.environ.get("PRODUCER_RATE_CONTROL_FILE", ""),
            batch=max(1, number("PRODUCER_BATCH_MAX", 128)),
            batch_seconds=max(1, number("PRODUCER_BATCH_MS", 25)) / 1000,
            paced_by_harness=os.environ.get("PRODUCER_PACING", "adapter") == "harness",
            target_depth=number("TARGET_DEPTH", 1000),
            workers=number("WORKER_COUNT", 32),
            payload=number("JOB_PAYLOAD_BYTES", 256),
            work_seconds=float(os.environ.get("JOB_WORK_MS") or 1) / 1000,
            sample_seconds=float(os.environ.get("SAMPLE_EVERY_S") or 5),
            replica=number("BENCH_INSTANCE_ID", 0),
        )


@dataclass(slots=True)
class Seen:
    """What has happened so far. Memory is bounded: of each window the newest latencies count."""

    enqueued: int = 0
    completed: int = 0
    depth: int = 0
    rate: float = 0.0
    latencies: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=MOST_LATENCIES))

    def percentiles(self) -> dict[str, float]:
        since = time.monotonic() - WINDOW_SECONDS
        values = sorted(ms for at, ms in self.latencies if at >= since) or [0.0]
        return {str(each): values[min(len(values) - 1, round(each / 100 * (len(values) - 1)))] for each in (50, 95, 99)}


settings = Settings.read()
seen = Seen()


@pgqueue.task(name="bench.job", queue=QUEUE)
async def job(created: float, padding: str) -> None:
    seen.latencies.append((time.monotonic(), max(0.0, (time.time() - created) * 1e3)))
    if settings.work_seconds:
        await asyncio.sleep(settings.work_seconds)
    seen.completed += 1


async def batches() -> AsyncIterator[int]:
    """How many jobs to enqueue next, when it is time for them."""
    if settings.mode == "depth-target":
        while True:
            missing = settings.target_depth - seen.depth
            if missing > 0:
                yield min(settings.batch, missing)
            await asyncio.sleep(settings.batch_seconds)
    elif settings.paced_by_harness:
        async for size in told():
            yield size
    else:
        credit, at = 0.0, time.monotonic()
        while True:
            await asyncio.sleep(settings.batch_seconds)
            now, seen.rate = time.monotonic(), rate()
            credit += seen.rate * (now - at)  # of the time that has really passed
            at = now
            while credit >= 1:
                size = min(settings.batch, int(credit))
                credit -= size
                yield size


async def told() -> AsyncIterator[int]:
    """The sizes in the lines `ENQUEUE n` of standard input; any other line is none."""
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while line := await lines.readline():
        word, _, size = line.decode(errors="replace").strip().partition(" ")
        if word == "ENQUEUE" and size.isascii() and size.isdigit() and int(size) > 0:
            seen.rate = rate()
            yield int(size)
    await asyncio.Event().wait()  # nothing more comes; the worker goes on until SIGTERM


def rate() -> float:
    """The rate that is asked for now: the harness may change it by a file."""
    if settings.rate_file:
        with suppress(OSError, ValueError):  # it is just being written: the rate of before
            return float(Path(settings.rate_file).read_text(encoding="utf-8"))
    return float(settings.rate)


async def produce() -> None:
    padding = "x" * settings.payload
    async with await psycopg.AsyncConnection.connect(settings.dsn, autocommit=True) as conn:
        async for size in batches():
            await pgqueue.aenqueue_many(conn, [job.new(time.time(), padding) for _ in range(size)])
            seen.enqueued += size


async def look() -> None:
    """Read the depth; only the first replica does."""
    async with await psycopg.AsyncConnection.connect(settings.dsn, autocommit=True) as conn:
        while True:
            seen.depth = (await pgqueue.adepth(conn, QUEUE)).available.n
            await asyncio.sleep(LOOK_SECONDS)


async def sample() -> None:
    """Print what has happened since the last sample, at whole multiples of the interval by the machine's clock."""
    enqueued, completed, at = 0, 0, time.monotonic()
    while True:
        await asyncio.sleep(settings.sample_seconds - time.time() % settings.sample_seconds)
        now = time.monotonic()
        rows = [(f"claim_p{each}_ms", ms, WINDOW_SECONDS) for each, ms in seen.percentiles().items()]
        rows += [
            ("enqueue_rate", (seen.enqueued - enqueued) / (now - at), settings.sample_seconds),
            ("completion_rate", (seen.completed - completed) / (now - at), settings.sample_seconds),
        ]
        if settings.replica == 0:
            rows += [("queue_depth", float(seen.depth), 0.0), ("producer_target_rate", seen.rate, 0.0)]
        enqueued, completed, at = seen.enqueued, seen.completed, now
        for metric, value, window in rows:
            subject = {"kind": "adapter", "subject_kind": "adapter", "subject": ""}
            say({"t": moment(), **subject, "metric": metric, "value": value, "window_s": window})


def say(record: dict[str, Any]) -> None:
    print(json.dumps({"system": MANIFEST["system"], "instance_id": settings.replica, **record}), flush=True)


def moment() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def describe() -> None:
    say(
        {
            "kind": "descriptor",
            "event_tables": MANIFEST["event_tables"],
            "extensions": MANIFEST["extensions"],
            "version": metadata.version(distribution.NAME),
            "schema_version": migrations.files()[-1].name,
            "db_name": MANIFEST["db_name"],
            "started_at": moment(),
        }
    )


async def main() -> None:
    ended = asyncio.Event()
    for sign in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(sign, ended.set)
    worker = pgqueue.Worker(dsn=settings.dsn, queues=[QUEUE], concurrency=settings.workers)
    await worker.start()
    duties = [produce(), sample(), *([look()] if settings.replica == 0 else [])]
    running = [asyncio.create_task(worker.run()), asyncio.create_task(ended.wait())]
    running += [asyncio.create_task(duty) for duty in duties]
    done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
    for task in running[1:]:
        task.cancel()
    await worker.stop(STOP_SECONDS)
    await asyncio.gather(*running, return_exceptions=True)
    for task in done:
        task.result()  # what has broken ends the adapter with its traceback


if __name__ == "__main__":
    migrations.migrate(settings.dsn)
    describe()
    try:
        import uvloop
    except ImportError:
        asyncio.run(main())
    else:
        uvloop.run(main())
