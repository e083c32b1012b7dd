"""The dashboard in a Django project, for its staff, by one line in `urls.py`:

    path("jobs/", include("pgqueue.integrations.django.dashboard"))

The same under WSGI and ASGI. The view finds the user, and gives the request to the dashboard, which is an ASGI app.
That lives on an event loop in a thread of its own: its connections belong to a loop, and under WSGI each request has
another one. There is no stream: pages are renewed by asking, as under any WSGI server.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from functools import cache
from threading import Lock, Thread
from typing import Any

from asgiref.sync import sync_to_async
from django.conf import settings
from django.contrib.auth.views import redirect_to_login
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpRequest, HttpResponse
from django.shortcuts import resolve_url
from django.urls import NoReverseMatch, re_path, reverse
from django.views.decorators.csrf import csrf_exempt

from pgqueue import web
from pgqueue.config import database_of_tests
from pgqueue.web.access import ACTIONS
from pgqueue.web.dashboard import Dashboard

Rights = str | set[str] | None
RIGHTS, USER = "pgqueue.rights", "pgqueue.user"
"""Where the view puts them into the ASGI scope."""


def staff(user: Any) -> Rights:
    """Staff see every page. Of the actions they may do those for which they have a permission, superusers all.

    The permissions are those of `pgqueue.integrations.django.job_admin`, such as `pgqueue_admin.cancel_job`.
    """
    if not (user.is_active and user.is_staff):
        return None
    return {action for action in ACTIONS if user.has_perm(f"pgqueue_admin.{action}_job")} or "read"


def urls(*, rights: Callable[[Any], Rights] = staff, **options: Any) -> list[Any]:
    """The patterns of a dashboard, for `include`. `rights` is a function of a user, and answers as `auth` does.

    The other options are those of `pgqueue.web.app`, but for `auth` and `actor`: changes are recorded with the user's
    name.
    """
    made = web.app(
        auth=lambda visitor: visitor.scope[RIGHTS], actor=lambda visitor: str(visitor.scope[USER]), **options
    )

    async def dashboard(request: HttpRequest, rest: str) -> HttpResponse:
        if not hasattr(request, "auser"):
            raise ImproperlyConfigured("the dashboard needs AuthenticationMiddleware, which says who asks")
        user = await request.auser()
        if not user.is_authenticated and request.method in ("GET", "HEAD"):
            return redirect_to_login(request.get_full_path(), _login())
        known = {RIGHTS: await sync_to_async(rights)(user), USER: user.get_username()}
        asking = _answer(made, _scope(request, rest) | known, request.body)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(asking, _loop()))

    # The dashboard itself refuses what comes from another site, and needs no token for that.
    return [re_path(r"^(?P<rest>.*)$", csrf_exempt(dashboard))]


def _login() -> str:
    """The login of the admin if there is one, else that of the project."""
    try:
        return str(reverse("admin:login"))
    except NoReverseMatch:
        return str(resolve_url(settings.LOGIN_URL))


def _scope(request: HttpRequest, rest: str) -> dict[str, Any]:
    given = {name.lower(): value for name, value in request.headers.items()} | {"host": request.get_host()}
    address = request.META.get("REMOTE_ADDR", "")
    return {
        "type": "http",
        "http_version": "1.1",
        "method": request.method,
        "scheme": request.scheme,
        "path": f"/{rest}",
        "root_path": request.path[: len(request.path) - len(rest)].rstrip("/"),
        "query_string": request.META.get("QUERY_STRING", "").encode("latin-1", "replace"),
        "headers": [(name.encode("latin-1"), value.encode("latin-1", "replace")) for name, value in given.items()],
        "client": (address, 0) if address else None,
        "wsgi_environ": {},  # no stream, and the path is that below the mount
    }


async def _answer(app: Dashboard, scope: dict[str, Any], body: bytes) -> HttpResponse:
    """What the dashboard answers. In a test its connections are closed: they would keep the database from its end."""
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    await app(scope, receive, send)
    if database_of_tests() is not None:
        await app.close()
    response = HttpResponse(b"".join(each.get("body", b"") for each in sent[1:]), status=sent[0]["status"])
    for name, value in sent[0]["headers"]:
        response.headers[name.decode("latin-1")] = value.decode("latin-1")
    return response


_starting = Lock()


def _loop() -> asyncio.AbstractEventLoop:
    """The loop of this process: after a fork another one."""
    with _starting:
        return _started(os.getpid())


@cache
def _started(pid: int) -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    Thread(target=loop.run_forever, name="pgqueue-web", daemon=True).start()
    return loop


urlpatterns = urls()
