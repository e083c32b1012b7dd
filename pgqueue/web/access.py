"""Who may do what: the decisions of the dashboard as pure functions, without I/O.

Called by `dashboard.py` for every request, before anything is read. `tests/web/test_access.py` has the table: each
route as nobody, as reader, as operator.

Why it is closed:

1. A request has no rights until `auth` has answered. An answer that is neither None, "read" nor a set of known actions
   is an error, and gives no rights.
2. Each route names what it needs. A route needs nothing only if it is in `OPEN_ROUTES`: the login and the files.
3. An unknown path is answered like a page to a visitor without rights: it says nothing of what there is.
4. A request that changes something is a POST. A browser says from which site it comes, by Sec-Fetch-Site or by Origin.
   If it says neither, only a bearer token lets the request pass: no browser adds one by itself.
5. With `--open` there are no rights to check. So the request must come to a loopback name, because a foreign name
   that leads to 127.0.0.1 (DNS rebinding) brings the script of a foreign page. It must not have come through a proxy.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any
from urllib.parse import urlsplit

from pgqueue.errors import InvalidOption

READ = "read"
ACTIONS = frozenset(
    {
        "bulk",
        "cancel",
        "discard",
        "enqueue",
        "limits",
        "locks",
        "pause",
        "rates",
        "reschedule",
        "resume",
        "retry",
        "run_now",
        "schedules",
        "workers",
    }
)
"""What `auth` may allow besides reading. A name never changes its meaning."""

NOTHING = ""
OPEN_ROUTES = frozenset({"login", "sign_in", "static"})
"""The routes that need no rights."""

Rights = frozenset[str]
NOBODY: Rights = frozenset()
READER: Rights = frozenset({READ})
OPERATOR: Rights = READER | ACTIONS

SAFE_METHODS = frozenset({"GET", "HEAD"})
FORWARDED = frozenset({"forwarded", "via", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-real-ip"})
"""Headers that a proxy adds."""


@dataclass(frozen=True, slots=True)
class Visitor:
    """What `auth` is told of a request; the same under ASGI and WSGI.

    - `method`: such as `GET`. `path`: below the mount, such as `/jobs`.
    - `headers`: by lower-case name; several of one name are one, joined by commas. `cookies`: by name.
    - `address`: of the browser, or of the proxy if that is not trusted. `scheme`: `http` or `https`.
    - `database`: the name of the database that is asked for, of several; None for the login and the files, and where
      there is one database. Its `path` begins with `/db/NAME`.
    - `scope`: the ASGI scope. Starlette's `session` and `user` are in it if their middleware is installed. Under
      a2wsgi the WSGI environ is in it as `wsgi_environ`.
    """

    method: str
    path: str
    headers: Mapping[str, str] = field(default_factory=dict)
    cookies: Mapping[str, str] = field(default_factory=dict)
    address: str = ""
    scheme: str = "http"
    scope: Mapping[str, Any] = field(default_factory=dict)
    database: str | None = None

    @property
    def host(self) -> str:
        """The Host header."""
        return self.headers.get("host", "")

    @property
    def bearer(self) -> str | None:
        """The token of an Authorization header; None without one."""
        kind, _, token = self.headers.get("authorization", "").partition(" ")
        return token.strip() if kind.lower() == "bearer" and token.strip() else None


class Verdict(Enum):
    """What becomes of a request."""

    ALLOWED = "allowed"
    SIGN_IN = "sign in"
    FORBIDDEN = "forbidden"


def rights_of(answer: object) -> Rights:
    """The rights that an answer of `auth` gives: None gives none, "read" reading, a set of actions reading and these.

    An empty set gives none. Raises InvalidOption for any other answer, so that a slip such as True opens nothing.
    """
    if answer is None or answer == frozenset():
        return NOBODY
    if isinstance(answer, str):
        if answer == READ:
            return READER
    elif isinstance(answer, set | frozenset) and answer <= OPERATOR:
        return READER | frozenset(answer)
    raise InvalidOption(f"auth answered {answer!r:.200}; answer None, 'read', or a set of {', '.join(sorted(ACTIONS))}")


def decide(route: str | None, needs: str, rights: Rights) -> Verdict:
    """What becomes of a request for this route. `route` is None for an unknown path."""
    if route in OPEN_ROUTES:
        return Verdict.ALLOWED
    if READ not in rights:
        return Verdict.SIGN_IN
    return Verdict.ALLOWED if needs in (NOTHING, *rights) else Verdict.FORBIDDEN


def refused_origin(visitor: Visitor, public_url: str | None, *, by_token: bool) -> str | None:
    """Why this request may have been made by the page of another site; None if it was not, or changes nothing."""
    if visitor.method in SAFE_METHODS:
        return None
    site = visitor.headers.get("sec-fetch-site")
    if site is not None:
        return None if site == "same-origin" else f"the request comes from another site (Sec-Fetch-Site: {site})"
    origin = visitor.headers.get("origin")
    if origin is not None:
        return None if _same(origin, visitor, public_url) else f"the request comes from another site ({origin})"
    if by_token:
        return None
    return "the request names neither Sec-Fetch-Site nor Origin; send a bearer token"


def _same(origin: str, visitor: Visitor, public_url: str | None) -> bool:
    wanted = public_url or f"{visitor.scheme}://{visitor.host}"
    try:
        return _place(origin) == _place(wanted) != ("", "", None)
    except ValueError:  # a port that is no number
        return False


def _place(url: str) -> tuple[str, str, int | None]:
    """Scheme, host and port, by which two URLs have the same origin."""
    parts = urlsplit(url)
    default = {"http": 80, "https": 443}.get(parts.scheme)
    return parts.scheme, (parts.hostname or ""), (parts.port or default)


def refused_open(visitor: Visitor) -> str | None:
    """Why a dashboard without a login refuses this request; None if it came straight from this machine.

    >>> refused_open(Visitor("GET", "/", {"host": "localhost:8300"}, address="127.0.0.1"))
    >>> refused_open(Visitor("GET", "/", {"host": "evil.example"}, address="127.0.0.1"))
    'without a login only localhost is answered, not the host evil.example'
    """
    if not loopback(visitor.address):
        return "without a login only this machine is answered"
    if not loopback(_name(visitor.host)):
        return f"without a login only localhost is answered, not the host {visitor.host[:200]}"
    if through := sorted(FORWARDED & visitor.headers.keys()):
        return f"without a login no proxy is answered ({', '.join(through)})"
    return None


def loopback(host: str) -> bool:
    """Whether this name or address is this machine, whatever a name server says.

    >>> [loopback(each) for each in ("localhost", "127.0.0.9", "::1", "0.0.0.0", "localhost.evil.example", "")]
    [True, True, True, False, False, False]
    """
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _name(host: str) -> str:
    """The name of a Host header without its port."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Networks = tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...]


def networks(given: Iterable[str]) -> Networks:
    """The addresses of trusted proxies: `10.0.0.7`, `10.0.0.0/8`. Raises InvalidOption."""
    try:
        return tuple(ipaddress.ip_network(each, strict=False) for each in given)
    except ValueError as error:
        raise InvalidOption(f"trusted proxy: {error}; give an address or a network, such as 10.0.0.0/8") from None


def client_of(peer: str, scheme: str, headers: Mapping[str, str], trusted: Networks) -> tuple[str, str]:
    """The browser's address and scheme.

    A proxy that is trusted is believed: the address is the last one of X-Forwarded-For that is no trusted proxy. Each
    proxy appends the address it was called from, so what a browser writes there itself comes before it. If that is no
    address, such as `unknown`, the peer's is taken.
    """
    if not _in(address_of(peer), trusted):
        return peer, scheme
    hops = [address_of(hop) for hop in headers.get("x-forwarded-for", "").split(",") if hop.strip()]
    address = next((hop for hop in reversed(hops) if not _in(hop, trusted)), None)
    said = headers.get("x-forwarded-proto", scheme).rpartition(",")[2].strip().lower()
    return peer if address is None else str(address), said if said in ("http", "https") else scheme


def address_of(text: str) -> Address | None:
    """The address in a text, without a port, a zone, and IPv6 around IPv4. None if there is none.

    >>> [str(address_of(each)) for each in ("192.0.2.1:40001", "[2001:db8::1]:443", "fe80::1%eth0", "::ffff:192.0.2.1")]
    ['192.0.2.1', '2001:db8::1', 'fe80::1', '192.0.2.1']
    >>> address_of("unknown")
    """
    host = text.strip()
    if host.startswith("["):
        host = host[1:].partition("]")[0]
    elif host.count(":") == 1:
        host = host.partition(":")[0]
    try:
        found = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    return found.ipv4_mapped or found if isinstance(found, ipaddress.IPv6Address) else found


def _in(address: Address | None, trusted: Networks) -> bool:
    return address is not None and any(address in network for network in trusted)
