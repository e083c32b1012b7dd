"""The two secrets of `pgqueue web --auth`, and the cookie of a browser that has given one.

A cookie is `role.expires.signature`. Its key is made from the secret of that role. So a changed secret ends the
sessions that were opened with it, several processes with the same secrets accept each other's cookies, and nothing is
stored. Logging out deletes the cookie in the browser. A copy of it stays valid until it expires.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field

from pgqueue.errors import InvalidOption
from pgqueue.jobs.values import digits
from pgqueue.web.access import NOBODY, OPERATOR, READER, Rights

READER_VARIABLE = "PGQUEUE_WEB_READER"
OPERATOR_VARIABLE = "PGQUEUE_WEB_OPERATOR"
LEAST = 20
"""A secret has at least this many characters."""
SESSION_SECONDS = 12 * 3600
RIGHTS: Mapping[str, Rights] = {"reader": READER, "operator": OPERATOR}


@dataclass(frozen=True, slots=True)
class Secrets:
    """Two secrets: with `reader` a visitor reads, with `operator` he also changes. Each has at least 20 characters.

    Raises InvalidOption for a short secret, and if both are the same.

        app = pgqueue.web.app(auth=pgqueue.web.Secrets(reader=…, operator=…))
    """

    reader: str = field(repr=False)
    operator: str = field(repr=False)

    def __post_init__(self) -> None:
        for role in RIGHTS:
            secret = getattr(self, role)
            if not isinstance(secret, str) or len(secret) < LEAST:
                raise InvalidOption(f"the secret of the {role} is too short: use at least {LEAST} random characters")
        if self.reader == self.operator:
            raise InvalidOption("the secrets of the reader and of the operator must differ")

    def role_of(self, given: str) -> str | None:
        """The role that this secret opens; None if it is neither. A wrong secret takes as long as a right one."""
        said = _digest(given)
        is_reader = hmac.compare_digest(said, _digest(self.reader))
        is_operator = hmac.compare_digest(said, _digest(self.operator))
        return "operator" if is_operator else "reader" if is_reader else None

    def cookie(self, role: str, expires: int) -> str:
        """The cookie of a visitor with this role, valid until `expires`, in seconds since 1970."""
        return f"{role}.{expires}.{self._signature(role, str(expires))}"

    def role_of_cookie(self, cookie: str, now: float) -> str | None:
        """The role of this cookie; None if it was not made with our secrets, or has expired."""
        role, _, rest = cookie.partition(".")
        expires, _, signature = rest.partition(".")
        if role not in RIGHTS or digits(expires, 12) is None:
            return None
        right = hmac.compare_digest(_digest(signature), _digest(self._signature(role, expires)))
        return role if right and now < int(expires) else None

    def _signature(self, role: str, expires: str) -> str:
        key = hmac.digest(getattr(self, role).encode(), b"pgqueue web session", "sha256")
        return hmac.digest(key, f"{role}.{expires}".encode(), "sha256").hex()


def from_environment(environ: Mapping[str, str]) -> Secrets:
    """The secrets of PGQUEUE_WEB_READER and PGQUEUE_WEB_OPERATOR. Raises InvalidOption if one is missing or short."""
    missing = [name for name in (READER_VARIABLE, OPERATOR_VARIABLE) if not environ.get(name)]
    if missing:
        raise InvalidOption(
            f"--auth needs {' and '.join(missing)} in the environment: two different secrets of at least {LEAST} "
            "characters, such as from `openssl rand -hex 20`"
        )
    return Secrets(environ[READER_VARIABLE], environ[OPERATOR_VARIABLE])


def rights_of_role(role: str | None) -> Rights:
    """The rights of a role; none without one."""
    return NOBODY if role is None else RIGHTS[role]


def _digest(text: str) -> bytes:
    """Of one length whatever the text, so that comparing tells nothing of it."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
