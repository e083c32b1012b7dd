"""The ASGI app. Every request goes through `_answer`, in this order:

    refuse what comes from another site -> source -> rights -> decision -> page -> redaction -> HTML or JSON

Nothing is read from a database before the decision. An error becomes a page that says what has happened.

With several databases each has all of this below `/db/NAME`, and `/` is one page of all. Why a visitor learns the name
of no database that it may not see: a name that no database has is answered like that of one without rights, and `auth`
decides for each row of the page of all. The login and the files are the same below each name.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any
from urllib.parse import parse_qs, parse_qsl, unquote, urlencode, urlsplit

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from pgqueue.config import normalize
from pgqueue.databases import Database, named, within
from pgqueue.errors import InvalidOption
from pgqueue.web import metrics, rendering
from pgqueue.web.access import (
    NOBODY,
    OPEN_ROUTES,
    OPERATOR,
    READ,
    SAFE_METHODS,
    Rights,
    Verdict,
    decide,
    networks,
    refused_origin,
)
from pgqueue.web.gate import COOKIE, Actor, Auth, Gate, Open, cookie_settings
from pgqueue.web.live import POLL, way_of
from pgqueue.web.pages import databases as page_of_all
from pgqueue.web.pages.changes import NOTICES
from pgqueue.web.pages.page import DEPTH_MOST, Asked, Page, plain
from pgqueue.web.problems import Problem, problem_of
from pgqueue.web.redaction import DEFAULT_PATTERNS, Function, Redaction
from pgqueue.web.routes import Route
from pgqueue.web.secrets import SESSION_SECONDS, Secrets
from pgqueue.web.source import Source
from pgqueue.web.visit import Place, Visit, query_of, visit_of

BODY_MOST = 16_384  # bytes
FIELDS_MOST = 200
URL_MOST = 8_192


class Dashboard:
    """The dashboard as an ASGI app; `pgqueue.web.app` makes it."""

    def __init__(self, gate: Gate, redaction: Redaction, place: Place, databases: Sequence[Database] = ()) -> None:
        self._gate = gate
        self._redaction = redaction
        self._place = place
        self._is_several = len(databases) > 1
        self.sources: Mapping[str | None, Source]
        """By the name in the path; without one there is one database."""
        if self._is_several:
            self.sources = {each.name: Source(each, each.name) for each in databases}
        else:
            self.sources = {None: Source(databases[0] if databases else None)}

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
        await asyncio.gather(*(source.close() for source in self.sources.values()))

    def end_streams_when(self, ending: Callable[[], bool]) -> None:
        """Ask this function whether the server is about to end. The streams end then."""
        for source in self.sources.values():
            source.live.ending = ending

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
        visit = visit_of(request, self._place, [name for name in self.sources if name is not None])
        visit.source = self.sources.get(visit.name)
        try:
            return await self._allowed(request, visit)
        except Exception as error:
            return self._problem(visit, problem_of(error))

    async def _allowed(self, request: Request, visit: Visit) -> ASGIApp:
        visitor = visit.visitor
        if len(query_of(request)) > URL_MOST:
            raise Problem(414, "This cannot be asked", f"the URL has more than {URL_MOST} characters")
        if refused := refused_origin(visitor, self._place.public_url, by_token=visitor.bearer is not None):
            raise Problem(403, "Refused", refused)
        route = visit.route
        visit.rights = await self._rights(visit)
        match decide(route.name if route else None, route.needs if route else "", visit.rights):
            case Verdict.SIGN_IN:
                return self._unknown_visitor(visit, request)
            case Verdict.FORBIDDEN:
                raise Problem(
                    403, "Not allowed", f"You may not do this: it needs the right to {route and route.needs}."
                )
        if route is None or (visit.name is not None and visit.source is None):
            raise _no_page(visit)
        if route.page is None or visit.source is None:
            return await self._own(request, visit, route)
        try:
            query = parse_qsl(query_of(request), keep_blank_values=True, max_num_fields=FIELDS_MOST)
        except ValueError:
            raise Problem(400, "This cannot be asked", f"the URL has more than {FIELDS_MOST} fields") from None
        form = {} if visitor.method in SAFE_METHODS else await _form(request)
        actor = "" if visitor.method in SAFE_METHODS else self._gate.actor_of(visitor)
        asked = Asked(query, visit.parts, visit.source.connections, self._redaction, form, actor, visit.rights)
        with within(visit.source.database):
            page = await route.page(asked)
        return self._shown(visit, page, NOTICES.get(asked.value("did") or ""))

    async def _rights(self, visit: Visit) -> Rights:
        """What the visitor may do here. Beside the databases it reads if it may read one of them."""
        visitor = visit.visitor
        if visit.source is not None or (visit.route is not None and visit.route.name in OPEN_ROUTES):
            return await self._gate.enter(visitor)
        if not self._gate.asks_application:
            rights = await self._gate.enter(visitor)
            visit.seen = {str(name): rights for name in self.sources} if READ in rights else {}
            return rights
        if visit.name is not None:  # as if it may not see a database of this name
            return NOBODY
        if visit.route is None:  # the same for each visitor: the application is not asked
            raise _no_page(visit)
        page = "metrics" if visit.route.name == "metrics" else ""
        names = [str(name) for name in self.sources]
        asked = [replace(visitor, method="GET", path=f"/db/{name}/{page}", database=name) for name in names]
        rights_of_each = await asyncio.gather(*map(self._gate.enter, asked))
        visit.seen = {name: rights for name, rights in zip(names, rights_of_each, strict=True) if READ in rights}
        return frozenset.intersection(*visit.seen.values()) if visit.seen else NOBODY

    # Answers ---------------------------------------------------------------------------------------------------------

    def _shown(self, visit: Visit, page: Page, notice: str | None = None) -> Response:
        if page.to is not None:
            return _redirect(visit.root, page.to)
        if page.after is not None and not visit.json:
            joint = "&" if "?" in page.after else "?"
            return _redirect(visit.root, f"{page.after}{joint}{urlencode({'did': page.did})}")
        if page.problem is not None and visit.json:
            return self._problem(visit, page.problem)
        items = page.items if page.items_are_shown else [self._redaction.shown(item) for item in page.items]
        more = self._redaction.shown(plain(page.more, 2 * DEPTH_MOST))  # it has rows that were read to that depth
        if visit.json:
            return rendering.as_json({"items": items} | more)
        data = self._common(visit) | dict(page.view) | more | {"items": items}
        status = 200 if page.problem is None else page.problem.status
        return rendering.html(page.template, data | {"notice": notice}, status)

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
        query = query_of(request)
        wanted = visitor.path + (f"?{query}" if query else "")
        return _redirect(visit.mount, "/login" if wanted == "/" else f"/login?{urlencode({'next': wanted})}")

    def _common(self, visit: Visit) -> dict[str, Any]:
        """What every template knows."""
        page, source = visit.route.name if visit.route else "", visit.source
        way = POLL if source is None else way_of(visit.visitor)
        return {
            "root": visit.root,
            "mount": visit.mount,
            "page": page,
            "database": visit.name if source is not None else None,
            "databases": sorted(visit.seen),
            "signed_in": bool(visit.rights),
            "rights": visit.rights,
            "role": "operator" if visit.rights >= OPERATOR else "reader",
            "has_login": self._gate.has_login,
            "notice": None,
            "on_standby": bool(visit.rights) and source is not None and source.connections.on_standby,
            "live": way if visit.visitor.method in SAFE_METHODS else None,
            "seen": "" if source is None else source.live.number,
            "now": datetime.now(UTC),
        }

    # What is no page --------------------------------------------------------------------------------------------------

    async def _own(self, request: Request, visit: Visit, route: Route) -> ASGIApp:
        if route.name == "static":
            if found := rendering.file(visit.parts["file"]):
                return found
            raise _not_found()
        if route.name == "metrics":
            of = [visit.source] if visit.source is not None else [self.sources[name] for name in visit.seen]
            return await metrics.answer(request.headers, [source.metrics for source in of])
        if route.name == "events" and visit.source is not None:
            return visit.source.live.answer(visit.visitor)
        if route.name == "databases":
            return await self._all(visit, request.query_params.get("q"))
        if route.name == "sign_out":
            response = _redirect(visit.mount, "/login" if self._gate.has_login else "/")
            response.delete_cookie(**{**cookie_settings(visit.visitor, visit.mount, self._place.public_url)})
            return response
        if not self._gate.has_login:
            return _redirect(visit.mount, "/")
        if route.name == "login":
            return self._login(visit, request.query_params.get("next", "/"))
        return await self._sign_in(request, visit)

    async def _all(self, visit: Visit, query: str | None) -> Response:
        """The page of all databases that the visitor may see. Each is asked at the same time."""
        answers = await asyncio.gather(*(self.sources[name].standing() for name in visit.seen))
        found = dict(zip(visit.seen, answers, strict=True))
        return self._shown(visit, page_of_all.page_of(found, query.strip() or None if query else None))

    def _login(self, visit: Visit, wanted: str, *, wrong: bool = False) -> Response:
        data = self._common(visit) | {"next": wanted, "wrong": wrong, "signed_in": False}
        return rendering.html("login.html", data, 401 if wrong else 200)

    async def _sign_in(self, request: Request, visit: Visit) -> Response:
        form = await _form(request)
        wanted = form.get("next", ["/"])[-1]
        cookie = self._gate.sign_in(form.get("secret", [""])[-1].strip(), visit.visitor)
        if cookie is None:
            return self._login(visit, wanted, wrong=True)
        response = _redirect(visit.mount, wanted if _is_ours(wanted) else "/")
        response.set_cookie(
            value=cookie,
            max_age=SESSION_SECONDS,
            **cookie_settings(visit.visitor, visit.mount, self._place.public_url),
        )
        return response


def _no_page(visit: Visit) -> Problem:
    if visit.known and visit.route is None:
        return Problem(405, "Not possible", "This address does not take this method.")
    return _not_found()


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
    databases: Sequence[Database] = (),
) -> Dashboard:
    """The dashboard with these options. Without databases it is that of the configured one. Raises InvalidOption."""
    if not isinstance(auth, Secrets | Open) and not callable(auth):
        raise InvalidOption(f"auth: give a function of a visitor, or Secrets, not {type(auth).__name__}")
    if isinstance(redact, str) or isinstance(trusted, str):
        raise InvalidOption("redact, trusted_proxies: give a list of texts, not one text")
    if public_url is not None and (urlsplit(public_url).scheme not in ("http", "https") or "?" in public_url):
        raise InvalidOption(f"public URL {public_url!r}: write it like https://ops.example.com/jobs")
    patterns = DEFAULT_PATTERNS if redact is None else tuple(redact)
    if actor is not None and not callable(actor):
        raise InvalidOption(f"actor: give a function of a visitor, not {type(actor).__name__}")
    for each in databases:
        normalize(each.dsn)  # a wrong one is said here, and not by each page
    return Dashboard(
        Gate(auth, actor, read_only=read_only),
        Redaction(patterns, redact_with),
        Place(public_url, networks(trusted)),
        databases,
    )


def databases_of(given: Mapping[str, str] | None) -> tuple[Database, ...]:
    """The databases of the option of `app`, a DSN by name. Raises InvalidOption."""
    if given is None:
        return ()
    if not isinstance(given, Mapping) or not all(isinstance(each, str) for item in given.items() for each in item):
        raise InvalidOption('databases: give a DSN for each name, such as {"a": "postgresql://app@one/shop_a"}')
    return named(f"{name}={dsn}" for name, dsn in given.items())


def _is_ours(path: str) -> bool:
    """Whether a redirect to this path stays below the mount.

    A browser takes `//host` for a host, `\\` for a slash, and `%2e%2e` for the path above.
    """
    place = unquote(path.partition("?")[0].partition("#")[0]).replace("\\", "/")
    parts = place.split("/")
    return path.isprintable() and place.startswith("/") and not place.startswith("//") and not {".", ".."} & {*parts}


def _redirect(root: str, path: str) -> RedirectResponse:
    return RedirectResponse(root + path, 303, rendering.HEADERS)


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
