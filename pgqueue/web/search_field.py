"""What is typed into a search field, as the parts of a filter: `queue:mail error:KeyError order_id=7 4711`.

Called by the list of jobs. Pure: it reads no database. A word alone is an id, a state, the name of a task or a queue
that is known, or else a key.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from pgqueue.admin.known_names import KnownNames
from pgqueue.jobs.states import ASKED
from pgqueue.jobs.values import digits

Parts = list[tuple[str, str]]

NAMES = {
    "arg": "arg",
    "error": "error_type",
    "flow": "flow",
    "id": "id",
    "key": "key",
    "node": "node",
    "queue": "queue",
    "since": "since",
    "state": "state",
    "task": "task",
    "text": "error",
    "until": "until",
    "worker": "worker",
}
"""What may stand before a colon, and the field of the filter that it means."""
SAID = {field: name for name, field in NAMES.items()}
"""The other way round: how a field is called on the page."""
MANY = ("arg", "state")
"""The fields that may be given several times."""

_WORD = re.compile(r'(?:[^\s"]|"(?:[^"\\]|\\.)*"|")+')
_NAMED = re.compile(r"([a-z_]+):(.+)", re.DOTALL)


def parts_of(text: str, known: KnownNames) -> Parts:
    """The parts of a filter that this text says, in its order. A value with blanks is quoted.

    >>> parts_of('queue:mail error:KeyError order_id=7 to="Ada L." 4711', KnownNames())
    [('queue', 'mail'), ('error_type', 'KeyError'), ('arg', 'order_id=7'), ('arg', 'to="Ada L."'), ('id', '4711')]
    >>> parts_of("failed mail.send order:7", KnownNames(tasks=("mail.send",)))
    [('state', 'failed'), ('task', 'mail.send'), ('key', 'order:7')]
    """
    return [_part(word, known) for word in _WORD.findall(text)]


def added(given: Parts, more: Parts) -> Parts:
    """The filter with more parts: of a field that is there once, the last one counts."""
    replaced = {field for field, _ in more} - {*MANY}
    parts = [part for part in given if part[0] not in replaced]
    return [*parts, *(part for part in more if part not in parts)]


def _part(word: str, known: KnownNames) -> tuple[str, str]:
    if (named := _NAMED.fullmatch(word)) and named[1] in NAMES:
        return NAMES[named[1]], named[2] if named[1] == "arg" else _unquoted(named[2])
    if "=" in word:
        return "arg", word
    word = _unquoted(word)
    kinds: list[tuple[str, Collection[str]]] = [("state", ASKED), ("task", known.tasks), ("queue", known.queues)]
    if digits(word) is not None:
        return "id", word
    return next((field for field, names in kinds if word in names), "key"), word


def _unquoted(value: str) -> str:
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] == '"' else value
