"""How large the values of a job may be. An enqueue checks what it is given, a worker what comes back.

The limit of an enqueue is one of the JSON it is given. The server keeps the values as jsonb, and its text of them has a
space behind each comma and colon, and all digits of a number: `1e308` takes 309 bytes. That text is what a worker
reads, so it has a limit of its own, twice as high. Only numbers with an exponent make a text that is larger than that.
"""

from __future__ import annotations

import re

JSON_MOST = 1 << 20
"""The most bytes of JSON that arguments, headers or a result may have."""
TEXT_MOST = 2 * JSON_MOST
"""The most bytes that they may have as the server's text. It stands in fragments.sql, too."""
KEY_MOST = 500
"""The most bytes of a key, of a lock or a unique one."""

_SMALL = TEXT_MOST // 52  # the most by which a float grows: `1e308,` is 6 bytes, and 311 as the server's text
_EXPONENT = re.compile(rb"\d[eE][+-]?\d")
# Every number is consumed, with or without an exponent: else a long one would be tried again from each of its digits.
_NUMBER = re.compile(rb'"(?:[^"\\]|\\.)*+"|-?(\d++)(?:\.(\d++))?+(?:[eE]([+-]?\d++))?+')


def text_too_large(raw: bytes) -> int | None:
    """How many bytes the server's text of this JSON would have, if that is too many; None if it is not.

    `raw` has no more than JSON_MOST bytes.

    >>> text_too_large(b"[" + b"1e308," * 100_000 + b"0]") > 30_000_000
    True
    """
    if len(raw) <= _SMALL or _EXPONENT.search(raw) is None:
        return None
    grown = sum(_growth(found) for found in _NUMBER.finditer(raw) if found[3] is not None)
    size = len(raw) + raw.count(b",") + raw.count(b":") + grown
    return size if size > TEXT_MOST else None


def _growth(number: re.Match[bytes]) -> int:
    """How many bytes more the number takes without an exponent."""
    exponent, behind = int(number[3]), max(0, len(number[2] or b"") - int(number[3]))
    digits = max(1, len(number[1]) + exponent) + (1 + behind if behind else 0)
    return max(0, digits - len(number[0]))
