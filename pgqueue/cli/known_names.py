"""Names that no worker knows: most are mistyped, so the command says so, names the closest one, and goes on.

Only the names that live workers serve are known here. Without a live worker nothing is said: then no name is known.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

import click

from pgqueue.plain_text import plain

if TYPE_CHECKING:
    import psycopg


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name.

    >>> did_you_mean("stauts", ["status", "jobs"]), did_you_mean("x", ["status"])
    ("; did you mean 'status'?", '')
    """
    close = get_close_matches(name, list(known), 1)
    return f"; did you mean {plain(close[0])!r}?" if close else ""


def warn(conn: psycopg.Connection[Any], queue: str | None = None, task: str | None = None) -> None:
    """Say on stderr that no live worker serves this queue, or knows this task in it; without a queue, in any."""
    from pgqueue.admin import tasks

    if tasks.may_look(conn) and (problem := unknown(tasks.taken(conn), queue, task)):
        click.echo(f"warning: {problem}", err=True)


def unknown(taken: Iterable[tuple[str, str]], queue: str | None, task: str | None = None) -> str | None:
    """What is unknown about these names, given the pairs of queue and task that live workers take; None: nothing."""
    taken = set(taken)
    queues = {each for each, _ in taken}
    if not taken:
        return None
    if queue is not None and queue not in queues:
        return f"no live worker serves queue {plain(queue)!r}{did_you_mean(queue, queues)}"
    here = {name for each, name in taken if queue in (None, each)}
    if task is None or task in here:
        return None
    if queue is None:
        return f"no live worker knows task {plain(task)!r}{did_you_mean(task, here)}"
    if elsewhere := sorted(each for each, name in taken if name == task):
        return (
            f"no live worker of queue {plain(queue)!r} knows task {plain(task)!r}; "
            f"those of queue {plain(elsewhere[0])!r} do"
        )
    return f"no live worker of queue {plain(queue)!r} knows task {plain(task)!r}{did_you_mean(task, here)}"
