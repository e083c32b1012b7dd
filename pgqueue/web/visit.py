"""One request on its way through the dashboard: who asks, for what, and where the dashboard is for browsers.

Made by `dashboard.py` for every request, before anything is decided. Pure: it reads the ASGI scope alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.types import Scope

from pgqueue.web import rendering
from pgqueue.web.access import NOBODY, Networks, Rights, Visitor, client_of
from pgqueue.web.routes import Route, find
from pgqueue.web.source import Source


@dataclass(frozen=True, slots=True)
class Place:
    """Where the dashboard is: its URL for browsers, if that must be said, and the proxies before it."""

    public_url: str | None = None
    trusted: Networks = ()


@dataclass(slots=True)
class Visit:
    """A request. `mount` is the path before every link.

    - `source`: the database that it is for; None for what is beside the databases, and if there is none of this name.
    - `seen`: what the visitor may do in each database that it may see, for a page beside the databases.
    """

    visitor: Visitor
    mount: str
    json: bool
    rights: Rights = NOBODY
    route: Route | None = None
    parts: Mapping[str, str] = field(default_factory=dict)
    known: bool = False
    name: str | None = None
    source: Source | None = None
    seen: Mapping[str, Rights] = field(default_factory=dict)

    @property
    def root(self) -> str:
        """The path before every link of this database."""
        return f"{self.mount}/db/{self.name}" if self.source is not None and self.name is not None else self.mount


def visit_of(request: Request, place: Place, names: Collection[str]) -> Visit:
    """What a request says of itself. Rights and source are found out later. `names`: of the databases, if several."""
    scope = request.scope
    headers = _headers(request)
    address, scheme = client_of(_peer(request), str(scope.get("scheme", "http")), headers, place.trusted)
    mount = _mount(scope, place)
    path = _stripped(_path(scope), mount, names)
    found = find(request.method, path, several=bool(names))
    visitor = Visitor(request.method, path, headers, request.cookies, address, scheme, scope, found.database)
    is_json = rendering.wants_json(headers.get("accept", ""))
    return Visit(visitor, mount, is_json, NOBODY, found.route, found.parts, found.known, found.database)


def query_of(request: Request) -> str:
    """The query as it came. Not by `request.url`, which cannot be made if the Host header is nonsense."""
    return bytes(request.scope.get("query_string", b"")).decode("latin-1")


def _mount(scope: Scope, place: Place) -> str:
    """The path before every link: that of the public URL, else where the app is mounted."""
    if place.public_url is not None:
        return urlsplit(place.public_url).path.rstrip("/")
    return str(scope.get("root_path", "")).rstrip("/")


def _path(scope: Scope) -> str:
    """The path below the mount. ASGI has the mount in it. Under WSGI it stands apart, and not every a2wsgi puts it
    before the path: there the environ is read."""
    path, root = str(scope["path"]), str(scope.get("root_path", "")).rstrip("/")
    if (environ := scope.get("wsgi_environ")) is not None:
        path = str(environ.get("PATH_INFO", path.encode().decode("latin-1"))).encode("latin-1").decode(errors="replace")
    elif root and (path == root or path.startswith(f"{root}/")):
        path = path[len(root) :]
    return path or "/"


def _stripped(path: str, mount: str, names: Collection[str]) -> str:
    """The path of a page. A proxy may leave the path of the public URL before it, so it is taken off, unless the path
    as it is names a page. Else the login would send a browser to the login for ever.

    If the public URL ends in `/db`, `/db/login` looks like a page of a database `login`. So a page is one of a database
    that there is. Another name is left where it is unless the rest names a page: it is answered like a hidden one.
    """
    if not mount or not (path == mount or path.startswith(f"{mount}/")):
        return path
    rest = path[len(mount) :] or "/"
    whole = find("GET", path, several=bool(names))
    if whole.known and (whole.database in (None, *names) or not find("GET", rest, several=bool(names)).known):
        return path
    return rest


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
