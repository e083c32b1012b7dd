"""The dashboard mounted in real frameworks, each with a page of its own at `/hello`, asked without a socket.

A mount is a context: it is given the dashboard and yields a browser. At its end the dashboard's
connections are closed, on the loop that opened them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from threading import Thread
from time import sleep
from typing import Any, TypeVar
from wsgiref.util import shift_path_info

import django_settings
import httpx
from a2wsgi import ASGIMiddleware

from pgqueue.web.dashboard import Dashboard

T = TypeVar("T")

ADDRESS = "192.0.2.9"
HOST = "http://ops.example"
HELLO = "hello of the application"


@dataclass(frozen=True, slots=True)
class Browser:
    """Sends requests, keeps cookies, and follows no redirect."""

    send: Callable[..., httpx.Response]

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.send("GET", path, **options)

    def post(self, path: str, **options: Any) -> httpx.Response:
        return self.send("POST", path, **options)


Mount = Callable[[Dashboard], AbstractContextManager[Browser]]


@contextmanager
def asgi(app: Any, dashboard: Dashboard) -> Iterator[Browser]:
    """As a server has it: one loop for all requests. No lifespan event reaches a mounted app, so none is sent."""
    loop = asyncio.new_event_loop()
    thread = Thread(target=loop.run_forever)
    thread.start()

    def run(what: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(what, loop).result(60)

    transport = httpx.ASGITransport(app=app, client=(ADDRESS, 4711))
    client = httpx.AsyncClient(transport=transport, base_url=HOST)
    try:
        yield Browser(lambda *place, **options: run(client.request(*place, **options)))
        run(client.aclose())
    finally:
        run(dashboard.close())
        run(loop.shutdown_default_executor())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def translated(dashboard: Dashboard) -> ASGIMiddleware:
    app: Any = dashboard  # a2wsgi names its own types for messages
    return ASGIMiddleware(app)


@contextmanager
def wsgi(app: Any, middleware: ASGIMiddleware, dashboard: Dashboard) -> Iterator[Browser]:
    """The dashboard runs on the loop that a2wsgi has started in a thread of its own."""
    try:
        with httpx.Client(transport=httpx.WSGITransport(app, remote_addr=ADDRESS), base_url=HOST) as client:
            yield Browser(client.request)
    finally:
        loop = middleware.loop
        asyncio.run_coroutine_threadsafe(dashboard.close(), loop).result(60)
        asyncio.run_coroutine_threadsafe(loop.shutdown_default_executor(), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        while loop.is_running():
            sleep(0.001)
        loop.close()


def starlette(dashboard: Dashboard) -> AbstractContextManager[Browser]:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import PlainTextResponse
    from starlette.routing import Mount, Route

    async def hello(request: Request) -> PlainTextResponse:
        return PlainTextResponse(HELLO)

    return asgi(Starlette(routes=[Route("/hello", hello), Mount("/ops/jobs", app=dashboard)]), dashboard)


def fastapi(dashboard: Dashboard) -> AbstractContextManager[Browser]:
    from fastapi import FastAPI

    app = FastAPI()

    @app.get("/hello")
    async def hello() -> str:
        return HELLO

    app.mount("/ops/jobs", dashboard)
    return asgi(app, dashboard)


@contextmanager
def django_asgi(dashboard: Dashboard) -> Iterator[Browser]:
    with _django():
        from django.core.asgi import get_asgi_application

        inner = get_asgi_application()

        async def application(scope: Any, receive: Any, send: Any) -> None:
            path = scope.get("path", "")
            if path == "/ops/jobs" or path.startswith("/ops/jobs/"):
                scope = {**scope, "root_path": scope.get("root_path", "") + "/ops/jobs"}
                await dashboard(scope, receive, send)
            else:
                await inner(scope, receive, send)

        with asgi(application, dashboard) as client:
            yield client


@contextmanager
def django_wsgi(dashboard: Dashboard) -> Iterator[Browser]:
    with _django():
        from django.core.wsgi import get_wsgi_application

        inner, middleware = get_wsgi_application(), translated(dashboard)

        def application(environ: Any, start_response: Any) -> Iterable[bytes]:
            path = environ["PATH_INFO"]
            if path == "/ops/jobs" or path.startswith("/ops/jobs/"):
                shift_path_info(environ)
                shift_path_info(environ)
                return middleware(environ, start_response)
            found: Iterable[bytes] = inner(environ, start_response)
            return found

        with wsgi(application, middleware, dashboard) as client:
            yield client


def flask(dashboard: Dashboard) -> AbstractContextManager[Browser]:
    from flask import Flask
    from werkzeug.middleware.dispatcher import DispatcherMiddleware

    app, middleware = Flask("shop"), translated(dashboard)

    @app.get("/hello")
    def hello() -> str:
        return HELLO

    mounts: dict[str, Any] = {ROOT: middleware}
    app.wsgi_app = DispatcherMiddleware(app.wsgi_app, mounts)  # type: ignore[method-assign]
    return wsgi(app, middleware, dashboard)


MOUNTS: dict[str, Mount] = {
    "Starlette": starlette,
    "FastAPI": fastapi,
    "Django ASGI": django_asgi,
    "Django WSGI": django_wsgi,
    "Flask": flask,
}
ROOT = "/ops/jobs"
"""Where each of them has the dashboard."""


@contextmanager
def _django() -> Iterator[None]:
    """Django with one page."""
    from django.http import HttpRequest, HttpResponse
    from django.test import override_settings
    from django.urls import path

    def hello(request: HttpRequest) -> HttpResponse:
        return HttpResponse(HELLO)

    django_settings.configure()
    with override_settings(ROOT_URLCONF=(path("hello", hello),), ALLOWED_HOSTS=["*"]):
        yield
