"""A stream of events of the dashboard, asked for as a browser does: what was sent, and the moment it leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from time import monotonic
from typing import Any

from workers import until

HOST = "ops.example"


class Stream:
    """One request at `/events`. `leave()` is the browser that closes it."""

    def __init__(self, headers: dict[str, str], **scope: Any) -> None:
        self.sent: list[tuple[float, dict[str, Any]]] = []
        self._asked = False
        self._leaves = asyncio.Event()
        given = {"host": HOST, "accept": "text/event-stream"} | headers
        self.scope = {
            "type": "http",
            "http_version": "1.1",
            "method": "GET",
            "path": "/events",
            "raw_path": b"/events",
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "client": ("192.0.2.9", 4711),
            "headers": [(name.encode(), value.encode()) for name, value in given.items()],
        } | scope

    async def receive(self) -> dict[str, Any]:
        if not self._asked:
            self._asked = True
            return {"type": "http.request", "body": b"", "more_body": False}
        await self._leaves.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append((monotonic(), dict(message)))

    def leave(self) -> None:
        self._leaves.set()

    @property
    def status(self) -> int | None:
        found: int | None = self.sent[0][1]["status"] if self.sent else None
        return found

    @property
    def text(self) -> str:
        return "".join(message.get("body", b"").decode() for _, message in self.sent)

    @property
    def pushes(self) -> list[float]:
        """When each push was sent."""
        return [at for at, message in self.sent if b"data: changed" in message.get("body", b"")]

    @property
    def number(self) -> str:
        """The number of the last push, or of the beginning."""
        return [line for line in self.text.splitlines() if line.startswith("id: ")][-1].removeprefix("id: ")


@asynccontextmanager
async def streaming(app: Callable[..., Any], headers: dict[str, str], **scope: Any) -> AsyncIterator[Stream]:
    """A stream that has begun, or was refused; at the end of the block the browser leaves, and the app must return."""
    stream = Stream(headers, **scope)
    task = asyncio.create_task(app(stream.scope, stream.receive, stream.send))
    try:
        await until(lambda: stream.status is not None or task.done())
        yield stream
    finally:
        stream.leave()
        await asyncio.wait_for(task, 10)
