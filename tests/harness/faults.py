"""What fault tests need: a wire that goes dead without closing, a stream of jobs through every fault, and the account.

Used by tests of system/ and project/test_versions.py. Nothing here knows how pgqueue works
inside: it enqueues as an application does, and counts what ran by what the handlers of `TASKS` report.

As a program (`python -m tests.harness.faults --report`) it is the fault matrix: see fault_matrix.py.
"""

from __future__ import annotations

import argparse
import asyncio
import struct
import sys
import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))  # where the helpers are, as for the tests

import psycopg
from loop_thread import LoopThread, pump
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from workers import Eyes, Process, wait_until

import pgqueue

TASKS = """
@pgqueue.task(name="fault.notes")
async def notes(key: int, seconds: float = 0.0) -> None:
    say("ran", key=key)
    if seconds:
        await asyncio.sleep(seconds)

@pgqueue.task(name="fault.waits")
async def waits(key: int) -> None:
    say("ran", key=key)
    while not os.path.exists(os.environ["GO"]):
        await asyncio.sleep(0.02)
"""
notes = pgqueue.remote("fault.notes")
waits = pgqueue.remote("fault.waits")


def put(dsn: str, *jobs: Any) -> list[int]:
    """Enqueue and commit."""
    with psycopg.connect(dsn) as conn:
        return [handle.id for handle in pgqueue.enqueue_many(conn, jobs)]


def keys(events: Iterable[dict[str, Any]]) -> list[int]:
    """The keys of what was reported."""
    return [event["key"] for event in events]


class Wire:
    """A TCP port on loopback that leads to the server, until a wire is dead: then nothing passes and nothing is closed.

    Neither side learns of it: what is sent is acknowledged by the kernel and goes nowhere. Wires are told apart by
    their application_name, which libpq sends first.
    """

    def __init__(self, dsn: str) -> None:
        self._target = conninfo_to_dict(dsn)
        self._loop = LoopThread()
        self._lines: list[_Line] = []
        port = self._loop.listen(self._join)
        self.dsn = make_conninfo(dsn, host="127.0.0.1", port=port, sslmode="disable", gssencmode="disable")

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.close()

    def kill(self, *names: str, answers_only: bool = False) -> int:
        """Nothing passes any more on the wires there are of these names, or no answer does; how many. New ones are
        sound."""
        return self._loop.call(self._kill(names, answers_only))

    def say(self, name: str, data: bytes) -> None:
        """The clients of this name hear these bytes next, as if the server had sent them."""
        for line in self._lines:
            if line.name == name:
                self._loop.soon(line.ends[1].write, data)

    async def _kill(self, names: tuple[str, ...], answers_only: bool = False) -> int:
        dying = [line for line in self._lines if line.name in names and line.answers.is_set()]
        for line in dying:
            line.answers.clear()
            if not answers_only:
                line.sound.clear()
        return len(dying)

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            first = await reader.readexactly(struct.unpack("!i", head := await reader.readexactly(4))[0] - 4)
        except asyncio.IncompleteReadError:
            writer.close()
            return
        theirs, ours = await self._loop.connect(self._target)
        ours.write(head + first)
        line = _Line(_application_name(first), asyncio.Event(), asyncio.Event(), (ours, writer))
        line.sound.set()
        line.answers.set()
        self._lines.append(line)
        self._loop.start(pump(reader, ours, line.sound))
        self._loop.start(pump(theirs, writer, line.answers))


@dataclass(frozen=True, slots=True)
class _Line:
    name: str
    sound: asyncio.Event
    """Whether what the client sends passes."""
    answers: asyncio.Event
    ends: tuple[asyncio.StreamWriter, asyncio.StreamWriter]


def _application_name(startup: bytes) -> str:
    words = startup[4:].split(b"\0")
    return dict(zip(words[::2], words[1::2], strict=False)).get(b"application_name", b"").decode()


class Stream:
    """Enqueues `fault.notes` with rising keys, one in a transaction, until the block ends; reconnects as need be.

    `committed` is what the server has acknowledged; a key whose COMMIT was not answered is in `doubtful`.
    """

    def __init__(self, dsn: str, rate: float, seconds: float = 0.0) -> None:
        self.committed: dict[int, int] = {}
        """key -> job id"""
        self.doubtful: set[int] = set()
        self.errors: list[BaseException] = []
        self._dsn, self._pause, self._seconds = dsn, 1 / rate, seconds
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Stream:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        self._end.set()
        self._thread.join()
        assert self.errors == []

    def more(self, jobs: int, seconds: float = 60.0) -> None:
        """Wait until so many more have been committed."""
        wanted = len(self.committed) + jobs
        wait_until(lambda: len(self.committed) >= wanted or self.errors, seconds)

    def _run(self) -> None:
        try:
            while not self._end.is_set():
                try:
                    with psycopg.connect(self._dsn, connect_timeout=2) as conn:
                        self._enqueue(conn)
                except (psycopg.OperationalError, psycopg.InternalError):  # away, or a standby not yet promoted
                    self._end.wait(0.05)
        except BaseException as error:
            self.errors.append(error)

    def _enqueue(self, conn: psycopg.Connection) -> None:
        while not self._end.wait(self._pause):
            key = len(self.committed) + len(self.doubtful)
            self.doubtful.add(key)
            job = notes.enqueue(conn, key=key, seconds=self._seconds).id
            conn.commit()
            self.committed[key] = job  # first: so each key that was drawn is in one of the two
            self.doubtful.discard(key)


@dataclass(frozen=True, slots=True)
class Account:
    """What became of the jobs of a stream, when nothing waits or runs any more."""

    lost: list[int]
    """Keys that were committed and are not completed."""
    runs: Counter[int]
    """How often each key was started."""
    crashes: int

    @property
    def twice(self) -> list[int]:
        """Keys that were started more than once."""
        return sorted(key for key, runs in self.runs.items() if runs > 1)

    def __str__(self) -> str:
        return f"{len(self.runs)} keys ran, {len(self.lost)} lost, {len(self.twice)} twice, {self.crashes} crashes"


def account(eyes: Eyes, stream: Stream, processes: Iterable[Process], seconds: float = 60.0) -> Account:
    """Wait until everything has ended, and draw up the account. Fails if something is stuck."""
    try:
        settled(eyes, seconds)
    except AssertionError as stuck:
        raise AssertionError("\n".join([str(stuck), *(process.written()[-3000:] for process in processes)])) from None
    return drawn_up(eyes, stream, Counter(key for process in processes for key in keys(process.all("ran"))))


def settled(eyes: Eyes, seconds: float) -> None:
    """Wait until nothing waits or runs."""
    try:
        wait_until(lambda: eyes.states().keys() <= {"completed"}, seconds)
    except AssertionError:
        raise AssertionError(f"stuck after {seconds:g} s: {eyes.states()}") from None


def drawn_up(eyes: Eyes, stream: Stream, runs: Counter[int]) -> Account:
    """The account, when these keys were started so often."""
    done = {key for (key,) in eyes.all("SELECT (args->>'key')::int FROM pgqueue.job_done")}
    return Account(
        lost=sorted(stream.committed.keys() - done),
        runs=runs,
        crashes=eyes.one("SELECT coalesce(sum(crashes), 0)::int FROM pgqueue.job"),
    )


def main() -> int:
    import fault_matrix  # it uses what stands here

    parser = argparse.ArgumentParser(prog="python -m tests.harness.faults", description=fault_matrix.__doc__)
    parser.add_argument("--report", action="store_true", required=True, help="measure, print the table, write the page")
    parser.add_argument("--runs", type=int, default=3, help="runs of each fault")
    parser.add_argument("--only", metavar="NAME", help="this fault only; the page stays as it is")
    options = parser.parse_args()
    return fault_matrix.report(options.runs, options.only)


if __name__ == "__main__":
    sys.exit(main())
