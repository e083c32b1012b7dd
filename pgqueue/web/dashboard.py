"""The ASGI app. Every request goes through `_answer`, in this order:

    refuse what comes from another site -> rights -> decision -> page -> redaction -> HTML or JSON

Nothing is read from the database before the decision. An error becomes a page that says what has happened.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, parse_qsl, unquote, urlencode, urlsplit

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from pgqueue.errors import InvalidOption
from pgqueue.web import rendering
from pgqueue.web.access import (
    NOBODY,
    OPERATOR,
    SAFE_METHODS,
    Networks,
    Rights,
    Verdict,
    Visitor,
    client_of,
    decide,
    networks,
    refused_origin,
)
from pgqueue.web.connections import Connections
from pgqueue.web.gate import COOKIE, Actor, Auth, Gate, Open, cookie_settings
from pgqueue.web.live import Live, way_of
from pgqueue.web.metrics import Metrics
from pgqueue.web.pages.changes import NOTICES
from pgqueue.web.pages.page import Asked, Page, plain
from pgqueue.web.problems import Problem, problem_of
from pgqueue.web.redaction import DEFAULT_PATTERNS, Function, Redaction
from pgqueue.web.routes import Route, match
from pgqueue.web.secrets import SESSION_SECONDS, Secrets

BODY_MOST = 16_384  # bytes
FIELDS_MOST = 200
URL_MOST = 8_192


@dataclass(frozen=True, slots=True)
class Place:
    """Where the dashboard is: its URL for browsers, if that must be said, and the proxies before it."""

    public_url: str | None = None
    trusted: Networks = ()


@dataclass(slots=True)
class Visit:
    """One request on its way through the dashboard."""

    visitor: Visitor
    root: str
    json: bool
    rights: Rights = NOBODY
    route: Route | None = None
    parts: Mapping[str, str] = field(default_factory=dict)
    known: bool = False


class Dashboard:
    """The dashboard as an ASGI app; `pgqueue.web.app` makes it."""

    def __init__(self, gate: Gate, redaction: Redaction, place: Place) -> None:
        self._gate = gate
        self._redaction = redaction
        self._place = place
        self._connections = Connections()
        self._metrics = Metrics(self._connections)
        self.live = Live(self._connections)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            response = await self._answer(Request(scope, receive))
            await response(scope, receive, send)

    async def close(self) -> None:
        """End the streams and close the connections. A mounted dashboard is not told of the end of its server."""
        await self.live.close()
        await self._connections.close()

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            event = await receive()
            if event["type"] == "lifespan.shutdown":
                await self.close()
            await send({"type": f"{event['type']}.complete"})
            if event["type"] == "lifespan.shutdown":
                return

    # The one way of every request ----------------------------------------------------------------------------------

    async def _answer(self, request: Request) -> ASGIApp:
        visit = self._visit(request)
        try:
            return await self._allowed(request, visit)
        except Exception as error:
            return self._problem(visit, problem_of(error))

    async def _allowed(self, request: Request, visit: Visit) -> ASGIApp:
        visitor = visit.visitor
        if len(_query(request)) > URL_MOST:
            raise Problem(414, "This cannot be asked", f"the URL has more than {URL_MOST} characters")
        if refused := refused_origin(visitor, self._place.public_url, by_token=visitor.bearer is not None):
            raise Problem(403, "Refused", refused)
        visit.route, visit.parts, visit.known = match(visitor.method, visitor.path)
        route = visit.route
        visit.rights = await self._gate.enter(visitor)
        match decide(route.name if route else None, route.needs if route else "", visit.rights):
            case Verdict.SIGN_IN:
                return self._unknown_visitor(visit, request)
            case Verdict.FORBIDDEN:
                raise Problem(
                    403, "Not allowed", f"You may not do this: it needs the right to {route and route.needs}."
                )
        if route is None:
            raise (
                Problem(405, "Not possible", "This address does not take this method.") if visit.known else _not_found()
            )
        if route.page is None:
            return await self._own(request, visit, route)
        try:
            query = parse_qsl(_query(request), keep_blank_values=True, max_num_fields=FIELDS_MOST)
        except ValueError:
            raise Problem(400, "This cannot be asked", f"the URL has more than {FIELDS_MOST} fields") from None
        form = {} if visitor.method in SAFE_METHODS else await _form(request)
        actor = "" if visitor.method in SAFE_METHODS else self._gate.actor_of(visitor)
        asked = Asked(query, visit.parts, self._connections, self._redaction, form, actor, visit.rights)
        return self._shown(visit, asked, await route.page(asked))

    def _visit(self, request: Request) -> Visit:
        scope = request.scope
        headers = _headers(request)
        address, scheme = client_of(_peer(request), str(scope.get("scheme", "http")), headers, self._place.trusted)
        root = self._root(scope)
        path = _stripped(_path(scope), root)
        visitor = Visitor(request.method, path, headers, request.cookies, address, scheme, scope)
        return Visit(visitor, root, rendering.wants_json(headers.get("accept", "")))

    def _root(self, scope: Scope) -> str:
        """The path before every link: that of the public URL, else where the app is mounted."""
        if self._place.public_url is not None:
            return urlsplit(self._place.public_url).path.rstrip("/")
        return str(scope.get("root_path", "")).rstrip("/")

    # Answers ---------------------------------------------------------------------------------------------------------

    def _shown(self, visit: Visit, asked: Asked, page: Page) -> Response:
        if page.to is not None:
            return _redirect(visit, page.to)
        if page.after is not None and not visit.json:
            joint = "&" if "?" in page.after else "?"
            return _redirect(visit, f"{page.after}{joint}{urlencode({'did': page.did})}")
        if page.problem is not None and visit.json:
            return self._problem(visit, page.problem)
        items = [self._redaction.shown(item) for item in page.items]
        more = self._redaction.shown(plain(page.more))
        if visit.json:
            return rendering.as_json({"items": items} | more)
        data = self._common(visit) | dict(page.view) | more | {"items": items}
        status = 200 if page.problem is None else page.problem.status
        return rendering.html(page.template, data | {"notice": NOTICES.get(asked.value("did") or "")}, status)

    def _problem(self, visit: Visit, problem: Problem) -> Response:
        text = self._redaction.shown({"text": problem.text})["text"]
        if visit.json:
            error = {"code": problem.status, "title": problem.title, "message": text}
            response = rendering.as_json({"items": [], "error": error}, problem.status)
        else:
            data = self._common(visit) | {"title": problem.title, "text": text}
            response = rendering.html("problem.html", data, problem.status)
        if problem.wait:
            response.headers["retry-after"] = str(max(1, round(problem.wait)))
        return response

    def _unknown_visitor(self, visit: Visit, request: Request) -> Response:
        """To the login, if there is one and a browser asks. It learns nothing of what there is."""
        visitor = visit.visitor
        if not self._gate.has_login:
            raise Problem(403, "Not allowed", "You have no right to see this. Sign in to the application first.")
        if visit.json or visitor.bearer is not None or visitor.method not in ("GET", "HEAD"):
            response = self._problem(visit, Problem(401, "Not signed in", "Send a valid secret as a bearer token."))
            response.headers["www-authenticate"] = "Bearer"
            return response
        query = _query(request)
        wanted = visitor.path + (f"?{query}" if query else "")
        return _redirect(visit, "/login" if wanted == "/" else f"/login?{urlencode({'next': wanted})}")

    def _common(self, visit: Visit) -> dict[str, Any]:
        """What every template knows."""
        page = visit.route.name if visit.route else ""
        return {
            "root": visit.root,
            "page": page,
            "signed_in": bool(visit.rights),
            "rights": visit.rights,
            "role": "operator" if visit.rights >= OPERATOR else "reader",
            "has_login": self._gate.has_login,
            "notice": None,
            "on_standby": bool(visit.rights) and self._connections.on_standby,
            "live": way_of(visit.visitor) if visit.visitor.method in SAFE_METHODS else None,
            "seen": self.live.number,
        }

    # What is no page --------------------------------------------------------------------------------------------------

    async def _own(self, request: Request, visit: Visit, route: Route) -> ASGIApp:
        if route.name == "static":
            if found := rendering.file(visit.parts["file"]):
                return found
            raise _not_found()
        if route.name == "metrics":
            return await self._metrics.answer(request.headers.get("accept", ""))
        if route.name == "events":
            return self.live.answer(visit.visitor)
        if route.name == "sign_out":
            response = _redirect(visit, "/login" if self._gate.has_login else "/")
            response.delete_cookie(**{**cookie_settings(visit.visitor, visit.root, self._place.public_url)})
            return response
        if not self._gate.has_login:
            return _redirect(visit, "/")
        if route.name == "login":
            return self._login(visit, request.query_params.get("next", "/"))
        return await self._sign_in(request, visit)

    def _login(self, visit: Visit, wanted: str, *, wrong: bool = False) -> Response:
        data = self._common(visit) | {"next": wanted, "wrong": wrong, "signed_in": False}
        return rendering.html("login.html", data, 401 if wrong else 200)

    async def _sign_in(self, request: Request, visit: Visit) -> Response:
        form = await _form(request)
        wanted = form.get("next", ["/"])[-1]
        cookie = self._gate.sign_in(form.get("secret", [""])[-1].strip(), visit.visitor)
        if cookie is None:
            return self._login(visit, wanted, wrong=True)
        response = _redirect(visit, wanted if _is_ours(wanted) else "/")
        response.set_cookie(
            value=cookie,
            max_age=SESSION_SECONDS,
            **cookie_settings(visit.visitor, visit.root, self._place.public_url),
        )
        return response


def _not_found() -> Problem:
    return Problem(404, "Not found", "There is no page of this address.")


def made(
    auth: Auth,
    *,
    public_url: str | None = None,
    trusted: Iterable[str] = (),
    redact: Iterable[str] | None = None,
    redact_with: Function | None = None,
    actor: Actor | None = None,
    read_only: bool = False,
) -> Dashboard:
    """The dashboard with these options. Raises InvalidOption."""
    if not isinstance(auth, Secrets | Open) and not callable(auth):
        raise InvalidOption(f"auth: give a function of a visitor, or Secrets, not {type(auth).__name__}")
    if isinstance(redact, str) or isinstance(trusted, str):
        raise InvalidOption("redact, trusted_proxies: give a list of texts, not one text")
    if public_url is not None and (urlsplit(public_url).scheme not in ("http", "https") or "?" in public_url):
        raise InvalidOption(f"public URL {public_url!r}: write it like https://ops.example.com/jobs")
    patterns = DEFAULT_PATTERNS if redact is None else tuple(redact)
    if actor is not None and not callable(actor):
        raise InvalidOption(f"actor: give a function of a visitor, not {type(actor).__name__}")
    return Dashboard(
        Gate(auth, actor, read_only=read_only), Redaction(patterns, redact_with), Place(public_url, networks(trusted))
    )


def _path(scope: Scope) -> str:
    """The path below the mount. ASGI has the mount in it. Under WSGI it stands apart, and not every a2wsgi puts it
    before the path: there the environ is read."""
    path, root = str(scope["path"]), str(scope.get("root_path", "")).rstrip("/")
    if (environ := scope.get("wsgi_environ")) is not None:
        path = str(environ.get("PATH_INFO", path.encode().decode("latin-1"))).encode("latin-1").decode(errors="replace")
    elif root and (path == root or path.startswith(f"{root}/")):
        path = path[len(root) :]
    return path or "/"


def _stripped(path: str, root: str) -> str:
    """The path of a page. A proxy may leave the path of the public URL before it, so it is taken off, unless the path
    as it is names a page. Else the login would send a browser to the login for ever."""
    route, _, known = match("GET", path)
    if root and route is None and not known and (path == root or path.startswith(f"{root}/")):
        return path[len(root) :] or "/"
    return path


def _headers(request: Request) -> dict[str, str]:
    """The headers by name. Several of one name are joined as HTTP says: a proxy may add a line of its own to ours."""
    found: dict[str, str] = {}
    for name, value in request.headers.items():
        joint = "; " if name == "cookie" else ", "
        found[name] = f"{found[name]}{joint}{value}" if name in found else value
    return found


def _peer(request: Request) -> str:
    """The address that the request came from. a2wsgi leaves it out where the server does not name a port."""
    if request.client is not None:
        return request.client.host
    return str(request.scope.get("wsgi_environ", {}).get("REMOTE_ADDR", ""))


def _query(request: Request) -> str:
    """The query as it came. Not by `request.url`, which cannot be made if the Host header is nonsense."""
    return bytes(request.scope.get("query_string", b"")).decode("latin-1")


def _is_ours(path: str) -> bool:
    """Whether a redirect to this path stays below the mount.

    A browser takes `//host` for a host, `\\` for a slash, and `%2e%2e` for the path above.
    """
    place = unquote(path.partition("?")[0].partition("#")[0]).replace("\\", "/")
    parts = place.split("/")
    return path.isprintable() and place.startswith("/") and not place.startswith("//") and not {".", ".."} & {*parts}


def _redirect(visit: Visit, path: str) -> RedirectResponse:
    return RedirectResponse(visit.root + path, 303, rendering.HEADERS)


async def _form(request: Request) -> dict[str, list[str]]:
    """The fields of a small form. Raises Problem."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > BODY_MOST:
            raise Problem(413, "Refused", f"The form has more than {BODY_MOST} bytes.")
    if body and kind != "application/x-www-form-urlencoded":
        raise Problem(415, "Refused", "Send the fields of a form.")
    try:
        return parse_qs(body.decode("ascii"), keep_blank_values=True, max_num_fields=FIELDS_MOST)
    except ValueError:
        raise Problem(400, "Refused", "The form cannot be read.") from None


__all__ = ["COOKIE", "Dashboard", "made"]
