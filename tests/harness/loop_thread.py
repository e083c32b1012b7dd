"""An event loop in a thread of its own, for helpers that stand between a client and the server.

What is left open at the end would be noticed in any later test of the process, when it is collected. So the loop ends
what it has begun: a client may be in the middle of its startup, or a connection to the server may be just made.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

T = TypeVar("T")
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]
ANSWER_SECONDS = 60.0


class LoopThread:
    """The loop runs from the start until `close`."""

    def __init__(self) -> None:
        self._servers: list[asyncio.Server] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._ends: list[asyncio.StreamWriter] = []
        """Of all connections."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def listen(self, serve: Serve, port: int = 0) -> int:
        """Serve each client of a port of loopback by a task of its own; return the port, which is free unless given."""
        return self.call(self._listen(serve, port))

    async def connect(self, target: Mapping[str, Any]) -> Streams:
        """A connection to the server that these parts of a DSN name. Called on the loop."""
        host, port = str(target["host"]), target.get("port", "5432")
        if host.startswith("/"):
            reader, writer = await asyncio.open_unix_connection(f"{host}/.s.PGSQL.{port}")
        else:
            reader, writer = await asyncio.open_connection(host, int(port))
        self._ends.append(writer)
        return reader, writer

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Begin this in a task, which is cancelled at the end. Called on the loop."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def call(self, step: Coroutine[Any, Any, T]) -> T:
        """Run this on the loop, and wait for its answer. Called from any other thread."""
        return asyncio.run_coroutine_threadsafe(step, self._loop).result(ANSWER_SECONDS)

    def soon(self, call: Callable[..., object], *args: Any) -> None:
        """Call this on the loop, and do not wait."""
        self._loop.call_soon_threadsafe(call, *args)

    def close(self) -> None:
        """End all tasks, close all connections, and end the loop and its thread."""
        try:
            self.call(self._end())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def _listen(self, serve: Serve, port: int) -> int:
        def joined(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self._ends.append(writer)
            self.start(serve(reader, writer))

        server = await asyncio.start_server(joined, "127.0.0.1", port)
        self._servers.append(server)
        found: int = server.sockets[0].getsockname()[1]
        return found

    async def _end(self) -> None:
        for server in self._servers:
            for listener in server.sockets:
                self._loop.remove_reader(listener.fileno())
        # What is accepted gets its transport in the next turn: not if its server is closed, or its task cancelled now.
        await asyncio.sleep(0)
        while others := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
        for server in self._servers:
            server.close()
        for end in self._ends:
            end.transport.abort()  # `close` would wait until the other side has read what is still to be sent
        await asyncio.sleep(0)  # transports close their sockets in the next turn


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, sound: asyncio.Event | None = None) -> None:
    """Pass on what comes, and the end too, while it is `sound`."""
    data = b" "
    while data:
        try:
            data = await reader.read(65536)
        except ConnectionError:
            data = b""
        if sound is not None:
            await sound.wait()
        if data:
            writer.write(data)
    writer.close()
