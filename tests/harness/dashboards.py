"""The dashboard in this process, asked as a browser or a script asks it: no socket, no server."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

import pgqueue
from pgqueue.web import Secrets, dashboard
from pgqueue.web.dashboard import Dashboard

READER_SECRET = "reader-" + "r" * 30
OPERATOR_SECRET = "operator-" + "o" * 30
SECRETS = Secrets(reader=READER_SECRET, operator=OPERATOR_SECRET)
HOST = "ops.example"
SAME_SITE = {"sec-fetch-site": "same-origin"}


@asynccontextmanager
async def browsing(app: Any, *, scheme: str = "http", **headers: str) -> AsyncIterator[httpx.AsyncClient]:
    """A browser at `app`, which keeps cookies and follows no redirect."""
    transport = httpx.ASGITransport(app=app, client=("192.0.2.9", 4711))
    async with httpx.AsyncClient(transport=transport, base_url=f"{scheme}://{HOST}", headers=headers) as browser:
        yield browser


@asynccontextmanager
async def dashboard_of(dsn: str | None, auth: Any = SECRETS, **options: Any) -> AsyncIterator[Dashboard]:
    """A dashboard of this database; its connections are closed at the end."""
    if dsn is not None:
        pgqueue.configure(dsn=dsn)
    made = dashboard.made(auth, **options)
    try:
        yield made
    finally:
        await made.close()


@asynccontextmanager
async def reading(dsn: str, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A browser of a visitor who may read."""
    async with dashboard_of(dsn, lambda visitor: "read", **options) as made, browsing(made) as browser:
        yield browser


async def signed_in(browser: httpx.AsyncClient, secret: str, **fields: str) -> httpx.Response:
    """The answer to the form of the login."""
    return await browser.post("/login", data={"secret": secret, **fields}, headers=SAME_SITE)


async def press(browser: httpx.AsyncClient, path: str, **fields: str) -> httpx.Response:
    """The page that a browser sees after it has sent this form."""
    answer = await browser.post(path, data=fields, headers=SAME_SITE)
    assert answer.status_code == 303, answer.text
    return await browser.get(answer.headers["location"])


def forms(page: httpx.Response) -> set[str]:
    """Where the forms and buttons of a page are sent to that change something."""
    return set(re.findall(r'(?:method="post" action|formaction)="([^"]+)"', page.text))


def without_our_script(page: str) -> str:
    """The page without the one script that each page has: a file of ours, with nothing in the element."""
    return re.sub(r'<script src="[^"<>]*/static/pgqueue\.js\?v=[0-9a-f]{8}" defer></script>', "", page, count=1)


def bearer(secret: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"}
