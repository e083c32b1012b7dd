"""The dashboard: `pgqueue web`, and `app`, which is mounted in an application.

Closed by default: without `auth` there is none. It needs the extra `web`; nothing else of pgqueue imports it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from pgqueue.distribution import needs_extra
from pgqueue.options import checks_options

if TYPE_CHECKING:
    from pgqueue.web.access import Visitor
    from pgqueue.web.dashboard import Dashboard
    from pgqueue.web.gate import Actor
    from pgqueue.web.gate import Function as Auth
    from pgqueue.web.redaction import Function as Redact
    from pgqueue.web.secrets import Secrets

__all__ = ["Secrets", "Visitor", "app"]

_PLACES = {"Secrets": "pgqueue.web.secrets", "Visitor": "pgqueue.web.access"}


@checks_options
def app(
    *,
    auth: Secrets | Auth,
    public_url: str | None = None,
    trusted_proxies: Iterable[str] = (),
    redact: Iterable[str] | None = None,
    redact_with: Redact | None = None,
    actor: Actor | None = None,
    read_only: bool = False,
    databases: Mapping[str, str] | None = None,
) -> Dashboard:
    """Return the dashboard as an ASGI app. It can be mounted under any path.

    - `auth`: a function of a `Visitor`, plain or async. It answers None (no rights), `"read"`, or a set of actions.
      Or `Secrets`: then the dashboard has a login of its own.
    - `public_url`: the URL under which browsers find it. Only needed if the Host header is not that of the browser.
    - `trusted_proxies`: addresses whose X-Forwarded-For and X-Forwarded-Proto are believed.
    - `redact`: patterns of keys whose values are hidden, such as `"*password*"`. Default: passwords, tokens and the
      like; `()` hides nothing.
    - `redact_with`: a function of a path and a value; it returns what is shown instead.
    - `actor`: a function of a `Visitor`; it returns the name that the record has for the visitor's changes. Default:
      `dashboard`.
    - `read_only`: visitors only read, whatever `auth` allows them.
    - `databases`: a DSN by name. With two or more, `/` is a page of all, and each has its dashboard below `/db/NAME/`.
      Default: the configured database alone.

    The tasks that this process has imported can be enqueued by a form, by visitors with the right to `enqueue`.

    A database is connected at its first request. Raises InvalidOption for a wrong option, Error
    without the extra `web`.

        def auth(visitor):
            user = visitor.scope.get("user")
            return "read" if user is not None and user.is_staff else None

        fastapi_app.mount("/jobs", pgqueue.web.app(auth=auth))
    """
    with needs_extra("web"):
        from pgqueue.web import dashboard
    return dashboard.made(
        auth,
        public_url=public_url,
        trusted=trusted_proxies,
        redact=redact,
        redact_with=redact_with,
        actor=actor,
        read_only=read_only,
        databases=dashboard.databases_of(databases),
    )


def __getattr__(name: str) -> object:
    from importlib import import_module

    if name in _PLACES:
        return getattr(import_module(_PLACES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
