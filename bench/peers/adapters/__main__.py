"""A process of a peer in Python: `python -m bench.peers.adapters ADAPTER setup | client | worker`.

A client answers lines of JSON, one line each, until its input ends. A worker runs until SIGTERM.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import random
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Protocol

Job = dict[str, Any]
Answer = dict[str, Any]
TEXT = "x" * 160  # with the name of its field and the number: 200 bytes of arguments
PACE_SECONDS = 0.05


class Adapter(Protocol):
    """What a module of a peer has as `Peer`; each method may be async."""

    def setup(self) -> Any: ...
    def open(self) -> Any: ...
    def close(self) -> Any: ...
    def one(self, task: str, job: Job) -> Any: ...
    def many(self, task: str, jobs: list[Job]) -> Any: ...
    def work(self) -> Any: ...


class Client:
    """The application's side. Its commands are awaited; with a plain peer none of them ever waits."""

    def __init__(self, peer: Adapter) -> None:
        self._peer = peer
        self._is_async = inspect.iscoroutinefunction(peer.one)

    async def serve(self) -> None:
        await _result(self._peer.open())
        commands: dict[str, Callable[..., Awaitable[Answer]]] = {
            "one": self.one,
            "many": self.many,
            "produce": self.produce,
            "pace": self.pace,
            "flow": self.flow,
        }
        print(json.dumps({"ready": True}), flush=True)
        while line := sys.stdin.readline():
            message = json.loads(line)
            print(json.dumps(await commands[message.pop("do")](**message)), flush=True)
        await _result(self._peer.close())

    async def one(self, task: str, n: int) -> Answer:
        """Enqueue `n` jobs, one per transaction."""
        begun = time.monotonic()
        for number in range(n):
            await _result(self._peer.one(task, _job(task, number)))
        return {"jobs": n, "seconds": time.monotonic() - begun}

    async def many(self, task: str, n: int, first: int = 0) -> Answer:
        """Enqueue `n` jobs with the peer's best call for many; the first one has this number."""
        jobs = [_job(task, number) for number in range(first, first + n)]
        begun = time.monotonic()
        await _result(self._peer.many(task, jobs))
        return {"jobs": n, "seconds": time.monotonic() - begun}

    async def produce(self, task: str, seconds: float) -> Answer:
        """Enqueue one per transaction, as fast as it goes."""
        begun, n = time.monotonic(), 0
        while time.monotonic() - begun < seconds:
            await _result(self._peer.one(task, _job(task, n)))
            n += 1
        return {"jobs": n, "seconds": time.monotonic() - begun}

    async def pace(self, task: str, rate: float, seconds: float) -> Answer:
        """Enqueue one per transaction at random distances; the number of each and when its commit had returned."""
        events, chance = [], random.Random(1)
        for number in range(max(1, round(rate * seconds))):
            await self._sleep(chance.uniform(0.5, 1.5) / rate)
            await _result(self._peer.one(task, _job(task, number)))
            events.append((number, time.monotonic()))
        return {"events": events}

    async def flow(self, task: str, rate: float, seconds: float) -> Answer:
        """Enqueue at this rate, those of 50 ms with one call; none of them is timed."""
        begun, n = time.monotonic(), 0
        while (passed := time.monotonic() - begun) < seconds:
            due = int(rate * (passed + PACE_SECONDS)) - n
            if due > 0:
                await _result(self._peer.many(task, [_job(task, -1)] * due))
                n += due
            await self._sleep(n / rate - (time.monotonic() - begun))
        return {"jobs": n, "seconds": time.monotonic() - begun}

    async def _sleep(self, seconds: float) -> None:
        if self._is_async:
            await asyncio.sleep(max(0.0, seconds))
        else:
            time.sleep(max(0.0, seconds))  # noqa: ASYNC251 - there is no loop


def main(name: str, role: str) -> None:
    peer: Adapter = importlib.import_module(f"bench.peers.adapters.{name}").Peer()
    if role == "client":
        client = Client(peer)
        _run(client.serve(), in_loop=inspect.iscoroutinefunction(peer.one))
    else:
        method = peer.setup if role == "setup" else peer.work
        if inspect.iscoroutinefunction(method):
            _run(method(), in_loop=True)
        else:
            method()


def _job(task: str, number: int) -> Job:
    return {"number": number, "text": TEXT} if task == "application" else {"number": number}


async def _result(answer: Any) -> None:
    if inspect.isawaitable(answer):
        await answer


def _run(coroutine: Coroutine[Any, Any, None], *, in_loop: bool) -> None:
    """Run it, on uvloop where the peer's environment has it. A plain peer gets no loop: some refuse to run in one."""
    if in_loop:
        with asyncio.Runner(loop_factory=_loop()) as runner:
            runner.run(coroutine)
        return
    try:
        coroutine.send(None)
    except StopIteration:
        return
    raise RuntimeError("a plain peer has waited for something")


def _loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


if __name__ == "__main__":
    main(*sys.argv[1:])
