"""Tells open pages that something has changed: a stream of events for each page, one listener for the process.

A push says nothing but that. The script then asks for the same page as the visitor, so that rights and redaction are
those of every page. Under WSGI there are no streams: each would keep a thread of the server.

Why no stream leaks a connection or a task:

1. `Live` knows a stream from the beginning to the end of the block of `Live._stream`. The block ends with the stream,
   however that ends: the browser leaves, `STREAM_SECONDS` are over, the dashboard ends, an error, a cancellation.
2. The only tasks of a stream are those that wait for the browser and for a change. They are cancelled and awaited
   before the block ends.
3. One listener serves the streams: only `_stream` starts it, without an await between its look and the start. Its
   connection is opened and closed within its task. The task ends within `LINGER_SECONDS` and one look after the last
   stream. Between its last look at the streams and the moment when it is forgotten there is no await. So no stream is
   without a listener. A visitor who goes from page to page does not make it connect anew.
4. A browser that reads nothing holds its stream up in `send`. The time limit counts there, too, so 1 holds.
5. `STREAMS_MOST` bounds the number. There is no await between the look at the number and the entry.

Why a stream does not outlive the rights: it ends after `STREAM_SECONDS`, and the browser asks for the next one. That
request goes through the gate like any other.

Why nothing is missed between two streams, or between a page and its stream, while the listener runs: each push has a
number, and the browser names the last one that it has seen.

Why there are at most four pushes a second: after each the listener rests for `REST_SECONDS`.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar
from urllib.parse import parse_qs

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from pgqueue.steady_clock import monotonic
from pgqueue.web.access import Visitor
from pgqueue.web.connections import Connections
from pgqueue.web.listener import LOOK_SECONDS, Listener
from pgqueue.web.problems import Problem, problem_of
from pgqueue.web.rendering import HEADERS
from pgqueue.web.task_end import end

T = TypeVar("T")

STREAMS_MOST = 100
STREAM_SECONDS = 25.0
"""Less than proxies wait for a server that is silent, and than servers wait at their end for open requests."""
REST_SECONDS = 0.25
LINGER_SECONDS = 5.0
RETRY_SECONDS = 1
"""So long a browser waits after the end of a stream, before it asks for the next one."""

FULL_SECONDS = 60.0
"""For Retry-After, if there are too many streams."""
POLL = "poll"
TASK = "pgqueue web live"
"""The name of every task that is started here."""


class Live:
    """The streams of this process. `ending` answers whether the server is about to end."""

    def __init__(self, connections: Connections) -> None:
        self.ending: Callable[[], bool] = bool
        self._connections = connections
        self._streams: set[asyncio.Event] = set()
        self._task: asyncio.Task[None] | None = None
        self._process = secrets.token_hex(4)
        self._pushes = 0
        self._left_at = 0.0

    async def close(self) -> None:
        """End all streams and the listener."""
        streams, self._streams = self._streams, set()
        for each in streams:
            each.set()
        task, self._task = self._task, None
        await end(task)

    def answer(self, visitor: Visitor) -> ASGIApp:
        """A stream for this browser, none under WSGI. Raises Problem if there are too many."""
        if way_of(visitor) == POLL:
            return Response(None, 204, HEADERS)
        if visitor.method != "GET" or "text/event-stream" not in visitor.headers.get("accept", ""):
            raise Problem(406, "Not possible", "This address has events, not a page: ask for text/event-stream.")
        if len(self._streams) >= STREAMS_MOST:
            raise Problem(503, "Too many open pages", "No more pages are told of changes.", FULL_SECONDS)

        async def stream(scope: Scope, receive: Receive, send: Send) -> None:
            await self._serve(self._seen(visitor), receive, send)

        return stream

    def _seen(self, visitor: Visitor) -> str | None:
        """The last push that this browser has seen: in a stream, else when its page was made by this process."""
        query = parse_qs(bytes(visitor.scope.get("query_string", b"")).decode("latin-1"))
        [made] = query.get("seen", [""])[-1:]
        return visitor.headers.get("last-event-id") or (made if made.startswith(f"{self._process}.") else None)

    async def _serve(self, seen: str | None, receive: Receive, send: Send) -> None:
        """Answer with a stream. `seen` is the number of the last push that this browser has seen."""
        headers = HEADERS | {"content-type": "text/event-stream; charset=utf-8", "x-accel-buffering": "no"}
        with suppress(TimeoutError, OSError):
            async with self._stream() as changed, asyncio.timeout(STREAM_SECONDS):
                raw = [(name.encode(), value.encode()) for name, value in headers.items()]
                await send({"type": "http.response.start", "status": 200, "headers": raw})
                await _say(send, f"retry: {RETRY_SECONDS * 1000}\nid: {self.number}\n\n")
                if seen not in (None, self.number):
                    changed.set()
                await self._push(changed, receive, send)
        with suppress(TimeoutError, OSError):
            async with asyncio.timeout(LOOK_SECONDS):
                await send({"type": "http.response.body", "body": b""})

    async def _push(self, changed: asyncio.Event, receive: Receive, send: Send) -> None:
        """Say when something has changed, until the browser leaves or the streams end."""
        left, told = _task(_left(receive)), _task(changed.wait())
        try:
            while True:
                await asyncio.wait({left, told}, return_when=asyncio.FIRST_COMPLETED)
                if left.done() or changed not in self._streams:
                    return
                changed.clear()
                told = _task(changed.wait())
                await _say(send, f"id: {self.number}\ndata: changed\n\n")
        finally:
            left.cancel()
            told.cancel()
            await asyncio.gather(left, told, return_exceptions=True)

    @property
    def number(self) -> str:
        """Of the last push. Another process has other numbers."""
        return f"{self._process}.{self._pushes}"

    @asynccontextmanager
    async def _stream(self) -> AsyncIterator[asyncio.Event]:
        """A stream that is woken by this event."""
        if self._task is None or self._task.done() or self._task.get_loop() is not asyncio.get_running_loop():
            self._streams = set()
            self._task = _task(self._watch())
        changed = asyncio.Event()
        self._streams.add(changed)
        try:
            yield changed
        finally:
            self._streams.discard(changed)
            self._left_at = monotonic()

    async def _watch(self) -> None:
        """Wake the streams when something has changed, while there are any. An error is not the end: it looks again."""
        listener = Listener(self._connections)
        try:
            while self._streams or monotonic() - self._left_at < LINGER_SECONDS:
                if self.ending():
                    return
                try:
                    with self._connections.here():
                        changed = await listener.changed()
                except Exception as error:
                    with self._connections.here():
                        problem_of(error)  # logs what is neither of the request nor of the database
                    await asyncio.sleep(LOOK_SECONDS)
                    continue
                if changed:
                    self._pushes += 1
                    for each in self._streams:
                        each.set()
                    await asyncio.sleep(REST_SECONDS)
        finally:
            # At once, so that a stream which begins while the connection is closed starts the next listener.
            if self._task is asyncio.current_task():
                self._task = None
            ended, self._streams = self._streams, set()
            for each in ended:
                each.set()
            await listener.close()


def _task(doing: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    return asyncio.create_task(doing, name=TASK)


def way_of(visitor: Visitor) -> str:
    """How a page of this visitor is renewed: by a stream, or by asking alone."""
    return POLL if "wsgi_environ" in visitor.scope else "stream"


async def _left(receive: Receive) -> None:
    """The end of the connection to the browser."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _say(send: Send, text: str) -> None:
    await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
