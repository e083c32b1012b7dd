"""What must not be shown is taken out of a page's data before any template or JSON sees it.

`Redaction.shown` gets the data of a page as plain values and returns them without what is hidden. Pages have no other
way to a template or to JSON, so lists, pages and JSON hide the same. `Redaction.joined` adds what was made of it.

What is hidden:

1. The value of an object's key that fits a pattern, at any depth, whole. Keys are compared without case.
2. In texts (errors, tracebacks, reasons, keys, messages) what follows such a name: `password=…`, `"token": "…"`,
   `--secret …`. What is not one plain value (a list, a call, a cookie) is hidden to the end of its line. Also the
   password of a URL, and what follows `Bearer` or `Basic` and looks like a token.
3. A text or a number of 4 characters or more that was hidden by 1 or 6, in every text of the same item: an error often
   quotes the argument.
4. All texts of an item whose arguments, headers or result were too large to be read: what they hide is unknown. Also
   those of an item with very many hidden values: to look for each in each text would take minutes.
5. The end of a text that was cut, when it was stored or before `…`, if it is the beginning of a value of 3: 4
   characters or more. And what follows `…`, if it is the end of such a value.
6. What the application's own function replaces. It is asked for every value of an item with its path, containers
   before what is in them. If it raises, the value is hidden.

What is never hidden, so that no pattern and no function breaks a page: what the page itself is built of. These are
its times, numbers and flags, and the words of `_DRAWN`. If a list or an object of the page is hidden as a whole, it
keeps its shape, and all texts in it are hidden. Arguments, headers, results and answers are hidden whole. So is the
progress of a job: its numbers are the handler's.

A key stands in several places: in its job (`rate_key`), as what the job waits for (`key`), on the pages of locks and of
limits. Each of them shows it as the job does (`key`, `awaited`), and then asks for its own path.

Why a filter finds nothing out: a filter is refused if its own path or value would be hidden (`hides`). A search for a
part of a text would answer letter by letter, so errors are searched only where nothing is redacted.
"""

from __future__ import annotations

import fnmatch
import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any

from pgqueue.config import safe
from pgqueue.errors import InvalidOption
from pgqueue.jobs.outcomes import MESSAGE_MOST
from pgqueue.plain_text import plain

log = logging.getLogger("pgqueue")

HIDDEN = "•••"
DEFAULT_PATTERNS = (
    "*passw*", "*pwd*", "*secret*", "*token*", "*api_key*", "*apikey*", "*api-key*", "*private_key*", "*credential*",
    "authorization", "*cookie*", "*credit_card*", "*card_number*", "cvv", "iban", "ssn",
)  # fmt: skip
LEAST = 4
"""A shorter hidden value is not looked for in other texts: it would be found in half of them."""

CUT = "…"
"""Stands where a part of a text was left out."""
CUTS_MOST = 200
"""So many places where something was left out are looked at, the last ones."""
END_MOST = 10_000
"""So many of the last characters of a text are looked at for the beginning of a hidden value."""

KEYS_MOST, KEY_MOST = 1_000, 100
"""So many keys, of so many characters at most, are remembered with whether they fit a pattern."""

FOUND_MOST = 100
"""So many hidden values, in all their spellings, are looked for in the other texts of their item."""

LEAVES = frozenset({str, int, float, bool, datetime, type(None)})
"""Types of values that hold no others. To ask for them first is quicker: most values of a row are of these."""

Path = tuple[str, ...]
Function = Callable[[Path, Any], Any]

# These read a text once: a word begins where no word goes on, and what was read is not tried again (`*+`, `++`).
_NAME = re.compile(
    r"(?<![\w.-])(?:--(?P<option>[\w.-]++)\s++|(?P<key>[\w.-]++)\\*+[\"']?\]?\s*+(?:[:=-]?>|:=?|==?|%3[AD])\s*+)",
    re.IGNORECASE,
)
# One quoted value, or one without blanks. If it goes on behind that, it is not understood.
_VALUE = re.compile(
    r"""
    (?: (?:Bearer|Basic|Digest|Token)\s{1,3} )?
    (?: \w{0,3} (?: "(?:[^"\\]|\\.?)*+(?:"|\Z) | '(?:[^'\\]|\\.?)*+(?:'|\Z) )++
      | [^\s,;&)}\]"'\\[({<]++ )
    (?= ["']* (?:[\s,;&)}\]]|\Z) )
    """,
    re.IGNORECASE | re.DOTALL | re.VERBOSE,
)
# The rest of the line, or of the text if the line ends within a list or an object.
_REST = re.compile(r"[^\n]*[\[({,][ \t\r]*+\n.*|[^\n]*", re.DOTALL)
# Without one of these no name stands before a value in a text: most texts of a row have none.
_MAY_NAME = re.compile("[:=>%]|--")
# A token has a digit, or a capital in a word. `Basic understanding` has neither.
_SCHEMES = ("earer", "EARER", "asic", "ASIC")
_BEARER = re.compile(r"\b([Bb]earer|BEARER|[Bb]asic|BASIC)(\s{1,3})(?=\S*(?:\d|[a-z][A-Z]))[\w~+/.=-]{8,}+")
_HEADER = re.compile("cookie|authorization", re.IGNORECASE)
"""Names whose values have blanks, commas and semicolons."""
_WORD = re.compile(r"[\w.-]++")
_COLUMNS = ")=("
"""Between names and values where PostgreSQL quotes a row: `Key (email, token)=(a, b) already exists`."""
# These hold names that links are made of. They come from code, and no argument is in them.
_FOREIGN = frozenset({"args", "headers", "result"})
"""These are the application's, wherever they stand. A durable step has its answer in `result`."""
UNREAD = "pgqueue"
"""The only key of an object that stands for one that was not read."""
_DRAWN = frozenset({("figures", "name"), ("parts", "name")})
"""Words by which a page knows its figures and the parts of its charts."""
_NAMES = frozenset({"task", "queue", "queues", "state", "code", "severity", "outcome"})


@dataclass(frozen=True)
class Redaction:
    """Patterns of keys, such as `*password*`, and a function of the application. Without both nothing is hidden.

    `function(path, value)` returns what is shown instead of a value; the value itself if it may be shown. The path
    begins with the field of the item, such as `("args", "card", "number")`. Elements of a list have the list's path.
    """

    patterns: tuple[str, ...] = DEFAULT_PATTERNS
    function: Function | None = None

    def __post_init__(self) -> None:
        if any(not isinstance(each, str) or not each for each in self.patterns):
            raise InvalidOption("redact: give patterns of keys, such as '*password*'")

    @property
    def active(self) -> bool:
        """Whether anything may be hidden."""
        return bool(self.patterns) or self.function is not None

    def shown(self, item: Any) -> Any:
        """The item, a tree of plain values, without what is hidden."""
        if not self.active:
            return item
        found: set[str] = set()
        walked = self._walk((), item, found)
        return self._without(walked, found, unread=_unread(item))

    def joined(self, shown: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
        """An item that `shown` has returned, with more fields that were made of it.

        What is hidden in these is hidden in the item's texts, too. Its other values are not asked for once more.
        """
        if not self.active:
            return {**shown, **more}
        found: set[str] = set()
        walked, unread = self._walk((), more, found), _unread(shown)
        if not found and not unread:
            return {**shown, **self._texts((), walked, [])}
        return dict(self._without({**shown, **walked}, found, unread=unread))

    def hides(self, path: Path, value: Any) -> bool:
        """Whether something of this value would be hidden if it stood at this path of an item."""
        if not self.active:
            return False
        for name in reversed(path):
            value = {name: value}
        return bool(self.shown(value) != value)

    def key(self, kind: str, key: str) -> str:
        """This key of a job without what is hidden of it in the job. The kind is lock, limit or rate."""
        field = f"{kind}_key"
        return str(self.shown({field: key})[field])

    def awaited(self, key: str) -> str:
        """What a blocked job waits for, such as `rate:mail:7`, without what is hidden of that key in the job."""
        kind, colon, rest = key.partition(":")
        return f"{kind}:{self.key(kind, rest)}" if colon else key

    def _without(self, walked: Any, found: set[str], *, unread: bool) -> Any:
        """What was walked, its texts without what was found."""
        if unread or len(found) > FOUND_MOST:
            return _without_texts((), walked)
        # The longest first: a hidden value may be part of another one.
        return self._texts((), walked, sorted(found, key=lambda each: (-len(each), each)))

    def _walk(self, path: Path, value: Any, found: set[str]) -> Any:
        """The value without what its keys hide; `found` gets the hidden texts and numbers."""
        if self.function is not None and _may_be_hidden(path, value):
            shown = self._asked(path, value)
            if shown is not value:
                _remember(value, found)
                return _instead(path, value, shown)
        if type(value) in LEAVES:
            return value
        if isinstance(value, Mapping):
            return {key: self._of_key((*path, str(key)), each, found) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [self._walk(path, each, found) for each in value]
        return value

    def _of_key(self, path: Path, value: Any, found: set[str]) -> Any:
        if value is not None and self._fits(path[-1]) and _may_be_hidden(path, value):
            _remember(value, found)
            return _instead(path, value, HIDDEN)
        return value if self.function is None and type(value) in LEAVES else self._walk(path, value, found)

    def _asked(self, path: Path, value: Any) -> Any:
        """What the function shows instead of this value, as JSON has it; the value itself if it may be shown."""
        assert self.function is not None
        try:
            shown = self.function(path, value)
            if shown is value or shown == value:
                return value
            return shown if isinstance(shown, str) else json.loads(json.dumps(shown, default=str, allow_nan=False))
        except Exception:
            log.exception("the function of redact has failed at %s; the value is hidden", plain(".".join(path))[:200])
            return HIDDEN

    def _texts(self, path: Path, value: Any, hidden: list[str]) -> Any:
        if isinstance(value, dict):
            return {key: self._texts((*path, key), each, hidden) for key, each in value.items()}
        if isinstance(value, list):
            return [self._texts(path, each, hidden) for each in value]
        if not isinstance(value, str) or _is_name(path):
            return value
        return self._text(value, hidden, is_error=not path or path[0] not in _FOREIGN)

    def _text(self, text: str, hidden: Sequence[str], *, is_error: bool) -> str:
        was_cut = len(text) >= MESSAGE_MOST
        for each in hidden:
            if each in text:
                text = text.replace(each, HIDDEN)
        if is_error and (was_cut or CUT in text):
            *pieces, last = text.rsplit(CUT, CUTS_MOST)
            pieces = [*(_without_begun(each, hidden) for each in pieces), last]
            text = CUT.join([pieces[0], *(_without_ended(each, hidden) for each in pieces[1:])])
            text = _without_begun(text, hidden) if was_cut else text
        if not self.patterns:
            return text
        if any(each in text for each in _SCHEMES):
            text = _BEARER.sub(rf"\1\2{HIDDEN}", text)
        if _COLUMNS in text:
            text = "\n".join(map(self._without_columns, text.split("\n")))
        if _MAY_NAME.search(text) is None:
            return text
        parts, done = [], 0
        for name in _NAME.finditer(text):
            word, begin = name["option"] or name["key"], name.end()
            if name.start() < done or not self._fits(word.strip("-.")):
                continue
            value = None if _HEADER.search(word) else _VALUE.match(text, begin)
            end = (value or _REST.match(text, begin) or name).end()
            if end > begin:
                parts += [text[done:begin], HIDDEN]
                done = end
        parts.append(text[done:])
        return safe("".join(parts)).replace("***", HIDDEN) if "://" in text else "".join(parts)

    def _without_columns(self, line: str) -> str:
        parts = line.split(_COLUMNS)
        for n, part in enumerate(parts[:-1], 1):
            if any(self._fits(word) for word in _WORD.findall(part)):
                return _COLUMNS.join([*parts[:n], HIDDEN])
        return line

    def _fits(self, key: str) -> bool:
        fits = self._known.get(key)
        if fits is None:
            fits = self._pattern is not None and self._pattern.fullmatch(key) is not None
            if len(self._known) < KEYS_MOST and len(key) <= KEY_MOST:
                self._known[key] = fits
        return fits

    @cached_property
    def _known(self) -> dict[str, bool]:
        """Of keys that were seen, whether they fit a pattern. All rows of a list have the same keys."""
        return {}

    @cached_property
    def _pattern(self) -> re.Pattern[str] | None:
        if not self.patterns:
            return None
        return re.compile("|".join(fnmatch.translate(each) for each in self.patterns), re.IGNORECASE)


def _without_begun(text: str, hidden: Iterable[str]) -> str:
    """The text without an end that is the beginning of a hidden value."""
    end = cut = len(text.rstrip())
    for each in hidden:
        at = text.find(each[:LEAST], max(0, end - min(len(each), END_MOST)), end)
        while 0 <= at < cut:
            if each.startswith(text[at:end]):
                cut = at
                break
            at = text.find(each[:LEAST], at + 1, end)
    return text if cut == end else text[:cut] + HIDDEN + text[end:]


def _without_ended(text: str, hidden: Iterable[str]) -> str:
    """The text without a beginning that is the end of a hidden value."""
    begin = cut = len(text) - len(text.lstrip())
    for each in hidden:
        most = begin + min(len(each), END_MOST)
        at = text.rfind(each[-LEAST:], begin, most)
        while at >= 0 and at + LEAST > cut:
            if each.endswith(text[begin : at + LEAST]):
                cut = at + LEAST
                break
            at = text.rfind(each[-LEAST:], begin, at + LEAST - 1)
    return text if cut == begin else text[:begin] + HIDDEN + text[cut:]


def _unread(item: Any) -> bool:
    """Whether arguments, headers, the result or a step's answer were not read (pgqueue/database/shown.py)."""
    if not isinstance(item, Mapping):
        return False
    steps = (step.get("result") for step in item.get("steps") or () if isinstance(step, Mapping))
    values = [*(item.get(name) for name in _FOREIGN), *steps]
    return any(isinstance(value, Mapping) and set(value) == {UNREAD} for value in values)


def _without_texts(path: Path, value: Any) -> Any:
    """The value with all of its texts hidden, but names and the note of what was not read."""
    if isinstance(value, dict):
        return {key: _without_texts((*path, key), each) for key, each in value.items()}
    if isinstance(value, list):
        return [_without_texts(path, each) for each in value]
    if not isinstance(value, str) or (path and path[-1] == UNREAD) or _is_name(path):
        return value
    return HIDDEN


def _is_name(path: Path) -> bool:
    """Whether a name from code stands here, of which links are made. In arguments there is none."""
    return bool(path) and (path[-1] in _NAMES or path[-2:] in _DRAWN) and not _is_foreign(path)


def _is_foreign(path: Path) -> bool:
    """Whether what stands here is the application's: arguments, headers, a result, the answer of a step."""
    return not _FOREIGN.isdisjoint(path)


def _may_be_hidden(path: Path, value: Any) -> bool:
    """Whether the page does without this value."""
    if _is_foreign(path):
        return True
    return bool(path) and isinstance(value, str | Mapping | list | tuple) and path[-2:] not in _DRAWN


def _instead(path: Path, value: Any, shown: Any) -> Any:
    """What stands in the place of a hidden value, for which `shown` is shown. A page keeps what it is built of."""
    if _is_foreign(path):
        return shown
    if path[-1] == "progress" and isinstance(value, Mapping):  # the numbers in it are the handler's
        return None
    if isinstance(value, str) and path[-2:] not in _DRAWN:
        return shown if isinstance(shown, str) else HIDDEN if shown is None else str(shown)
    if isinstance(value, Mapping):
        fields = shown if isinstance(shown, Mapping) else {}
        return {key: _instead((*path, str(key)), each, fields.get(key, HIDDEN)) for key, each in value.items()}
    if isinstance(value, list | tuple):
        others = shown if isinstance(shown, list) and len(shown) == len(value) else [HIDDEN] * len(value)
        return [_instead(path, each, other) for each, other in zip(value, others, strict=True)]
    return value


def _remember(value: Any, found: set[str]) -> None:
    """Add what is in this hidden value to `found`, until that is too much to be looked for."""
    for each in _leaves(value):
        if len(found) > FOUND_MOST:
            return
        found.add(each)


def _leaves(value: Any) -> Iterable[str]:
    """The texts and numbers in a hidden value that are long enough to be looked for elsewhere."""
    if isinstance(value, Mapping):
        for each in value.values():
            yield from _leaves(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _leaves(each)
    elif isinstance(value, str | int | float) and not isinstance(value, bool) and len(str(value)) >= LEAST:
        text = str(value)
        # As it stands in the text of an error: as it is, as Python writes it, as JSON writes it.
        yield from {text, repr(text)[1:-1], json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1]}
