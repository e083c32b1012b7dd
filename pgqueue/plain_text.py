"""Foreign text on its way to a terminal or a text log: it can neither control the one nor forge lines of the other.

A text is foreign if it comes from a row, an exception, a handler or a server. What is not printable is replaced:
control characters, those that turn the direction of a line, half of a surrogate pair. JSON in pure ASCII needs no such
thing.
"""

from __future__ import annotations

import json
from typing import Any

INDENT = "  "


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
