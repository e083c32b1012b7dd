"""Foreign text on its way to a terminal or a text log: it can neither control the one nor forge lines of the other.

A text is foreign if it comes from a row, an exception, a handler or a server. What is not printable is replaced:
control characters, those that turn the direction of a line, half of a surrogate pair. JSON in pure ASCII needs no such
thing.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

INDENT = "  "


def foreign() -> tuple[type[BaseException], ...]:
    """What the application's code may raise where it is only asked something. What stops a handler is none of these.

    If asyncio is not imported, nothing raises its CancelledError, and `--help` shall not import it.
    """
    cancelled: type[BaseException] = getattr(sys.modules.get("asyncio"), "CancelledError", Exception)
    return (Exception, KeyboardInterrupt, SystemExit, GeneratorExit, cancelled)


def asked(ask: Callable[[], T], otherwise: Callable[[BaseException], T]) -> T:
    """What `ask` answers. If the application's code that it calls raises, whatever that is, `otherwise` answers."""
    try:
        return ask()
    except foreign() as broken:
        return otherwise(broken)


def kind_of(error: BaseException) -> str:
    """The name of the exception's class, even if a metaclass hides it."""
    return asked(lambda: _exact(type(error).__qualname__), lambda _: "an exception without a name")


def said_by(error: BaseException) -> str:
    """The text of the exception, even if its `__str__` raises."""
    return asked(lambda: _exact(str(error)), lambda broken: f"(its str() raised {kind_of(broken)})")


def _exact(text: str) -> str:
    """A text of Python's own class: `__str__` may answer one of a class that is derived from it."""
    return "".join([text])


def plain(text: str) -> str:
    """`text` on one line; a `?` stands for each character that is not printable.

    >>> plain("ok\\x1b[31m\\n2026-11-20 ERROR forged")
    'ok?[31m?2026-11-20 ERROR forged'
    """
    return text if text.isprintable() else "".join(one if one.isprintable() else "?" for one in text)


def plain_lines(text: str) -> str:
    """`text` with its lines. All after the first are indented, so that none of them looks like another entry.

    >>> plain_lines("failed:\\n2026-11-20 ERROR forged")
    'failed:\\n  2026-11-20 ERROR forged'
    """
    if text.isprintable():
        return text
    first, *others = map(plain, text.expandtabs(4).splitlines() or [""])
    indent = "" if all(line.startswith(INDENT) or not line for line in others) else INDENT
    return "\n".join([first, *(line and indent + line for line in others)])


def plural(n: int, one: str, more: str, shown: str | None = None) -> str:
    """The number and what it counts: `one` for a single thing, `more` else. `shown` is how the number is written.

    >>> plural(1, "job waits", "jobs wait"), plural(2_000, "job waits", "jobs wait")
    ('1 job waits', '2,000 jobs wait')
    """
    return f"{shown or format(n, ',')} {one if n == 1 else more}"


def plain_json(value: Any) -> str:
    """`value` as readable JSON on one line; what is not printable stands as JSON's own escape.

    >>> plain_json({"name": "Zoë", "said": "\\x9b1m\\u202e"})
    '{"name": "Zoë", "said": "\\\\u009b1m\\\\u202e"}'
    """
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if text.isprintable() else "".join(one if one.isprintable() else json.dumps(one)[1:-1] for one in text)
