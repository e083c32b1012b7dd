"""Who a visitor is: asks the secrets, the application's function, or nothing at all (`--open` on loopback).

Each way is looked at in `enter`, and in no other place. What a visitor may do then is decided in `access.py`.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from time import time
from typing import Any

from pgqueue.jobs.actors import acting
from pgqueue.plain_text import plural
from pgqueue.web.access import NOBODY, OPERATOR, READER, Rights, Visitor, refused_open, rights_of
from pgqueue.web.login_limit import LoginLimit
from pgqueue.web.problems import Problem
from pgqueue.web.secrets import SESSION_SECONDS, Secrets, rights_of_role

log = logging.getLogger("pgqueue")

COOKIE = "pgqueue_web"

Answer = str | set[str] | frozenset[str] | None
Function = Callable[[Visitor], Answer | Awaitable[Answer]]
Actor = Callable[[Visitor], str]
ACTOR = "dashboard"
"""The actor of a change, where the application names none."""


@dataclass(frozen=True, slots=True)
class Open:
    """No login: whoever reaches the loopback address of this machine is an operator."""


Auth = Secrets | Open | Function


class Gate:
    """Knows how visitors are recognised. `clock` is in seconds since 1970."""

    def __init__(
        self, auth: Auth, actor: Actor | None = None, *, read_only: bool = False, clock: Callable[[], float] = time
    ) -> None:
        self._auth = auth
        self._actor = actor
        self._most = READER if read_only else OPERATOR
        self._clock = clock
        self.limit = LoginLimit()
        # Not those of the loop: names of servers are resolved there, and what does not answer holds a thread for long.
        self._threads = ThreadPoolExecutor(thread_name_prefix="pgqueue web auth")

    @property
    def has_login(self) -> bool:
        """Whether there is a page to sign in."""
        return isinstance(self._auth, Secrets)

    @property
    def asks_application(self) -> bool:
        """Whether the application's function decides, which may tell databases apart."""
        return not isinstance(self._auth, Secrets | Open)

    def actor_of(self, visitor: Visitor) -> str:
        """The name under which a change of this visitor is recorded. Raises Problem if the application gives none."""
        if self._actor is None:
            return ACTOR
        try:
            name = self._actor(visitor)
            with acting(name):
                return name
        except Exception as error:  # whatever it is: no change without a name
            log.error("actor of the dashboard has failed; nothing is changed", exc_info=error)
            raise Problem(500, "The dashboard has failed", "It cannot find out who you are.") from error

    async def enter(self, visitor: Visitor) -> Rights:
        """The rights of this visitor. Raises Problem if the request is refused whoever it is."""
        return self._most & await self._found(visitor)

    async def _found(self, visitor: Visitor) -> Rights:
        auth = self._auth
        if isinstance(auth, Open):
            if refused := refused_open(visitor):
                raise Problem(403, "Refused", refused)
            return OPERATOR
        if isinstance(auth, Secrets):
            if visitor.bearer is not None:
                return rights_of_role(self._checked(auth.role_of(visitor.bearer), visitor.address))
            cookie = visitor.cookies.get(COOKIE)
            return rights_of_role(cookie and auth.role_of_cookie(cookie, self._clock()))
        try:
            return rights_of(await _answer(auth, visitor, self._threads))
        except Exception as error:  # whatever it is: a visitor whose rights are unknown is told nothing of it
            log.error("auth of the dashboard has failed; the visitor sees nothing", exc_info=error)
            raise Problem(500, "The dashboard has failed", "It cannot find out what you may see.") from error

    def sign_in(self, secret: str, visitor: Visitor) -> str | None:
        """The cookie for this secret; None if it is wrong. Raises Problem after too many wrong ones."""
        if not isinstance(self._auth, Secrets):
            return None
        self._check_limit(visitor.address)
        role = self._checked(self._auth.role_of(secret), visitor.address)
        return role and self._auth.cookie(role, int(self._clock()) + SESSION_SECONDS)

    def _checked(self, role: str | None, address: str) -> str | None:
        """This role; None, and counted, if it is none. Raises Problem after too many from this address."""
        if role is None:
            self._check_limit(address)
            self.limit.wrong(address)
        return role

    def _check_limit(self, address: str) -> None:
        if wait := self.limit.wait(address):
            raise Problem(
                429, "Too many wrong secrets", f"Try again in {plural(round(wait), 'second', 'seconds')}.", wait
            )


async def _answer(auth: Function, visitor: Visitor, threads: Executor) -> object:
    """What the application's function answers. A plain one may ask a database, so it runs in one of these threads."""
    if inspect.iscoroutinefunction(auth) or inspect.iscoroutinefunction(getattr(auth, "__call__", None)):  # noqa: B004
        return await _awaited(auth(visitor))
    asking = asyncio.get_running_loop().run_in_executor(threads, copy_context().run, auth, visitor)
    return await _awaited(await asking)


async def _awaited(answer: Any) -> object:
    return await answer if inspect.isawaitable(answer) else answer


def cookie_settings(visitor: Visitor, root: str, public_url: str | None) -> Mapping[str, Any]:
    """How the cookie is set: not readable by scripts, not sent by forms of other sites, over https only where there is
    https."""
    secure = visitor.scheme == "https" or (public_url or "").startswith("https:")
    return {"key": COOKIE, "path": root or "/", "httponly": True, "samesite": "lax", "secure": secure}


__all__ = ["COOKIE", "NOBODY", "Actor", "Auth", "Gate", "Open", "cookie_settings"]
