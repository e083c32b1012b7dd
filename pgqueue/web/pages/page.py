"""What a page is asked, and what it answers. Also what a change is asked, which is a page that is sent a form.

A page returns plain data and never text of a template. `dashboard.py` hides what is redacted, then renders the data as
HTML or as JSON. So both show the same.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from datetime import UTC, datetime
from typing import Any, TypeVar
from urllib.parse import urlencode

from pgqueue.jobs.actors import acting
from pgqueue.jobs.values import HIGHEST_ID, digits
from pgqueue.web.connections import Ask, Connections, Unreachable
from pgqueue.web.problems import Problem, problem_of
from pgqueue.web.redaction import LEAVES, UNREAD, Redaction

T = TypeVar("T")


EXACT = frozenset({"host", "idempotency_key", "key", "lock", "name", "once", "unique"})
"""What is taken as it stands: `acct ` with a blank is another key than `acct`, and each may be held."""


def _read(name: str, values: Iterable[str]) -> list[str]:
    """The values of a field that are not empty. Around a number, a time or a name without blanks a blank is a slip."""
    return [each for value in values if (each := value if name in EXACT else value.strip())]


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that is allowed: the values of its URL, and how to read the database."""

    query: Sequence[tuple[str, str]]
    place: Mapping[str, str]
    connections: Connections
    redaction: Redaction
    form: Mapping[str, Sequence[str]] = field(default_factory=dict)
    actor: str = ""
    rights: Collection[str] = ()

    @property
    def id(self) -> int:
        """The id in the path."""
        return int(self.place["id"])

    def field(self, name: str) -> str | None:
        """The last field of this name in the form; None if it is empty."""
        found = self.fields(name)
        return found[-1] if found else None

    def needed(self, name: str, hint: str) -> str:
        """This field of the form. Raises Problem, which says what to give, if it is empty."""
        value = self.field(name)
        if value is None:
            raise Problem(400, "This cannot be done", f"{name}: {hint}")
        return value

    def whole(self, name: str, hint: str, least: int = 0, most: int = HIGHEST_ID) -> int:
        """This field of the form as a whole number. Raises Problem, which says what to give."""
        found = digits(self.field(name) or "")
        if found is None or not least <= found <= most:
            raise Problem(400, "This cannot be done", f"{name}: {hint}")
        return found

    def fields(self, name: str) -> list[str]:
        """The fields of this name in the form that are not empty."""
        return _read(name, self.form.get(name, ()))

    @property
    def given(self) -> list[tuple[str, str]]:
        """The names and values of the URL that are not empty."""
        return [(name, each) for name, value in self.query for each in _read(name, [value])]

    def values(self, name: str) -> list[str]:
        """The values of this name in the URL that are not empty."""
        return [value for key, value in self.given if key == name]

    def value(self, name: str) -> str | None:
        """The last value of this name; None if there is none."""
        found = self.values(name)
        return found[-1] if found else None

    def number(self, name: str) -> int | None:
        """The value of this name as a whole number. Raises Problem."""
        value = self.value(name)
        if value is None:
            return None
        if (found := digits(value)) is None:
            raise Problem(400, "This cannot be asked", f"{name}: use a whole number")
        return found

    async def read(self, ask: Ask[T]) -> T:
        """What `ask` finds out in one transaction that only reads."""
        return await self.connections.read(ask)

    async def change(self, ask: Ask[T]) -> T:
        """What `ask` answers in a transaction that is committed then. Its changes are recorded as the visitor's."""
        with acting(self.actor):
            return await self.connections.change(ask)

    async def shared(self, name: str, ask: Callable[[Connections], Awaitable[T]]) -> T:
        """What `ask` finds out, in one read for all visitors who ask for this at the same time (shared_reads.py)."""
        return await self.connections.shared.read(name, lambda: ask(self.connections))

    async def read_shared(self, ask: Ask[T], *about: object) -> T:
        """As `read`, in one read for all visitors who ask for the same at the same time. `about` is a word of its own
        for each `ask`, and all that it depends on. It hides nothing: that comes after, for each visitor."""
        return await self.shared(repr(about), lambda connections: connections.read(ask))

    async def part_shared(self, ask: Ask[T], *about: object) -> tuple[T | None, Problem | None]:
        """The same for a part of a page, as `part`."""
        return await self.shared(repr(about), lambda connections: part_of(connections, ask))

    async def part(self, ask: Ask[T]) -> tuple[T | None, Problem | None]:
        """The same for a part of a page: the other parts are shown although this one has failed. Raises Unreachable."""
        return await part_of(self.connections, ask)


async def part_of(connections: Connections, ask: Ask[T]) -> tuple[T | None, Problem | None]:
    """`Asked.part` for a read that all visitors share, which knows no request."""
    try:
        return await connections.read(ask), None
    except Unreachable:  # no other part could be read
        raise
    except Exception as error:
        return None, problem_of(error)


def said_of(*problems: Problem | None) -> list[dict[str, str]]:
    """What a page says of the parts that are missing, each text once: parts may have failed for the same reason."""
    distinct = {problem.text: problem for problem in problems if problem is not None}
    return [{"title": each.title, "text": each.text} for each in distinct.values()]


@dataclass(frozen=True, slots=True)
class Page:
    """The data of a page. As JSON it is `{"items": […], …}` with the fields of `more`, as the command line prints it.

    `items` and `more` are redacted. `view` is for the template only, and is made of the URL and of the form that was
    sent.
    """

    template: str
    items: Sequence[Any]
    more: Mapping[str, Any] = field(default_factory=dict)
    view: Mapping[str, Any] = field(default_factory=dict)
    to: str | None = None
    """The path to go to instead, below the mount."""
    after: str | None = None
    did: str = ""
    """After a change: where a browser goes on, and the word that says there what was done."""
    items_are_shown: bool = False
    """The items are what `Redaction.shown` has returned, each as a whole. They are not walked once more."""
    problem: Problem | None = None
    """Why nothing was done. The page is shown with its status; as JSON only the problem is."""


SHOWN, SKIPPED_MOST = 50, 100_000
"""So many rows of a list are shown, unless a URL asks for more; so many may stand before them."""
LIMIT_MOST = 500


@dataclass(frozen=True, slots=True)
class Rows:
    """Which rows of a list a page shows: `limit` of them behind the first `skip`."""

    skip: int
    limit: int
    given: Sequence[tuple[str, str]]

    @property
    def needed(self) -> int:
        """So many rows say which are shown, and whether others follow."""
        return self.skip + self.limit + 1

    def of(self, rows: Sequence[T]) -> Sequence[T]:
        """Those that are shown, of the first `needed` rows or more."""
        return rows[self.skip : self.skip + self.limit]

    def after(self, rows: Sequence[object]) -> int | None:
        """How many rows are to be skipped for the next page; None if this is the last one."""
        return self.skip + self.limit if len(rows) > self.skip + self.limit else None

    def view(self, rows: Sequence[object]) -> dict[str, Any]:
        """The query of the next page, and whether rows stand before this one."""
        after = self.after(rows)
        return {"next": None if after is None else urlencode([*self.given, ("skip", after)]), "skipped": self.skip}


@dataclass(frozen=True, slots=True)
class Lists:
    """Several lists of one page: the first rows of each, or the rows of `one`."""

    one: str | None
    rows: Mapping[str, Rows]

    def has(self, name: str) -> bool:
        """Whether the page shows this list."""
        return self.one in (None, name)

    def of(self, name: str, found: Sequence[T]) -> Sequence[T]:
        """The rows of this list that are shown."""
        return self.rows[name].of(found)

    def after(self, found: Mapping[str, Sequence[object]]) -> dict[str, int | None]:
        """For each list, how many of its rows are to be skipped for its next page."""
        return {name: self.rows[name].after(each) for name, each in found.items()}

    def view(self, found: Mapping[str, Sequence[object]]) -> dict[str, Any]:
        """The queries of the next pages, each of one list, and whether rows stand before this one."""
        after = self.after(found)
        given = {name: [each for each in rows.given if each[0] != "list"] for name, rows in self.rows.items()}
        next_ = {
            name: None if skip is None else urlencode([*given[name], ("list", name), ("skip", skip)])
            for name, skip in after.items()
        }
        return {"one": self.one, "next": next_, "skipped": 0 if self.one is None else self.rows[self.one].skip}


def lists_of(asked: Asked, first: Mapping[str, int]) -> Lists:
    """What the URL says of these lists; of each so many rows are shown where all are. Raises Problem."""
    one, rows = asked.value("list"), rows_of(asked)
    if (one is None and rows.skip) or (one is not None and one not in first):
        raise Problem(400, "This cannot be asked", f"list: use one of {', '.join(first)}")
    few = one is None and asked.value("limit") is None
    return Lists(one, {name: replace(rows, limit=n) if few else rows for name, n in first.items()})


def rows_of(asked: Asked) -> Rows:
    """What the URL says of the rows. Raises Problem."""
    skip, limit = asked.number("skip") or 0, asked.number("limit")
    limit = SHOWN if limit is None else limit
    if not 1 <= limit <= LIMIT_MOST:
        raise Problem(400, "This cannot be asked", f"limit: use 1 to {LIMIT_MOST}")
    if not 0 <= skip <= SKIPPED_MOST:
        raise Problem(400, "This cannot be asked", f"skip: use 0 to {SKIPPED_MOST}")
    return Rows(skip, limit, [each for each in asked.given if each[0] != "skip"])


def read_time(text: str) -> datetime:
    """A time in ISO 8601; without a zone it is UTC. Raises ValueError.

    >>> read_time("2026-12-24T18:00").isoformat()
    '2026-12-24T18:00:00+00:00'
    """
    found = datetime.fromisoformat(text)
    return found if found.utcoffset() is not None else found.replace(tzinfo=UTC)


DEPTH_MOST = 50
"""Deeper values of a job are not shown: one job must not end the page for all others."""


class TooDeep(Exception):
    """A value is nested more deeply than is shown."""


def plain(value: Any, room: int = DEPTH_MOST) -> Any:
    """Dataclasses as objects, at any depth; times stay what they are. A field that is nested too deeply says so."""
    if type(value) in LEAVES:
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _field(getattr(value, field.name)) for field in fields(value)}
    if not isinstance(value, Mapping | list | tuple):
        return value
    if room == 0:
        raise TooDeep
    if isinstance(value, Mapping):
        return {str(key): plain(each, room - 1) for key, each in value.items()}
    return [plain(each, room - 1) for each in value]


def _field(value: Any) -> Any:
    try:
        return plain(value)
    except TooDeep:
        return {UNREAD: f"not shown: nested in more than {DEPTH_MOST} levels"}
