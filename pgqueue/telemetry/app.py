"""The metrics as an ASGI app, for an application that runs a worker inside, or that only shows the gauges."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

from pgqueue.distribution import needs_extra
from pgqueue.jobs.totals import Numbers
from pgqueue.options import checks_options

Event = dict[str, Any]
App = Callable[[Mapping[str, Any], Callable[[], Awaitable[Event]], Callable[[Event], Awaitable[None]]], Awaitable[None]]


class Database(Protocol):
    """The settings of a worker, as far as they are known here."""

    @property
    def dsn(self) -> str: ...

    @property
    def schema(self) -> str: ...


class Counting(Protocol):
    """A `pgqueue.Worker`, as far as it is known here."""

    @property
    def settings(self) -> Database: ...

    def ask_numbers(self) -> Future[Numbers]:
        """What it has counted, from any thread."""
        ...


@checks_options
def asgi(worker: Counting | None = None) -> App:
    """Return the metrics as an ASGI app, which can be mounted under any path. It answers GET and HEAD.

    With a `worker` of this process: what it has counted, and the gauges of the database while it leads. Without one:
    the gauges, read from the configured database at most once a second. It has no login: keep it from strangers.

    Raises Error without the extra `prometheus`.

        fastapi_app.mount("/metrics", pgqueue.telemetry.asgi(worker))
    """
    with needs_extra("prometheus"):
        from pgqueue.telemetry.scrape import Scrape
    from pgqueue.telemetry.gauges import Reader

    reader = Reader() if worker is None else Reader(worker.settings.dsn, worker.settings.schema)
    scrape = Scrape(None if worker is None else worker.ask_numbers, reader.read)
    # One makes a text at a time. The loop's own threads may all be held by the application.
    thread = ThreadPoolExecutor(1, "pgqueue-metrics")

    async def app(
        scope: Mapping[str, Any], receive: Callable[[], Awaitable[Event]], send: Callable[[Event], Awaitable[None]]
    ) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            reader.close()
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        elif not _is_root(scope):
            await _answer(send, scope, 404, b"not found\n", "text/plain")
        elif scope["method"] not in ("GET", "HEAD"):
            await _answer(send, scope, 405, b"use GET\n", "text/plain")
        else:
            accept = dict(scope["headers"]).get(b"accept", b"").decode("latin-1")
            text = await asyncio.get_running_loop().run_in_executor(thread, scrape.text, accept)
            await _answer(send, scope, 200, *text)

    return app


def _is_root(scope: Mapping[str, Any]) -> bool:
    """Whether the request is for the app itself: ASGI has the mount in the path, some servers do not."""
    path = str(scope["path"]).removeprefix(str(scope.get("root_path", "")))
    return path.rstrip("/") in ("", "/metrics")


async def _answer(
    send: Callable[[Event], Awaitable[None]], scope: Mapping[str, Any], status: int, body: bytes, kind: str
) -> None:
    headers = [(b"content-type", kind.encode()), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})


async def _lifespan(receive: Callable[[], Awaitable[Event]], send: Callable[[Event], Awaitable[None]]) -> None:
    while True:
        event = await receive()
        await send({"type": f"{event['type']}.complete"})
        if event["type"] == "lifespan.shutdown":
            return
