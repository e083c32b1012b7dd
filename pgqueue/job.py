"""A job: as it is about to be enqueued (`NewJob`).

Made by tasks, written by `enqueue`. Nothing here does I/O.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from typing import Generic, ParamSpec, Protocol, TypeVar

from pgqueue.errors import InvalidOption

P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)

_QUEUE = re.compile(r"[A-Za-z0-9_.-]{1,40}")


@dataclass(frozen=True, slots=True)
class NewJob(Generic[R_co]):
    """A row to be: a task's name and its encoded arguments, everything checked. `R_co` is what the task returns."""

    task: str
    args: str  # the text of a JSON object
    queue: str
    priority: int
    run_at: datetime | None  # with a time zone; at most one of run_at and delay
    delay: float | None  # seconds
    headers: str | None  # the text of a JSON object
    max_attempts: int | None  # None: as the task's retry policy says when it runs


class Enqueueable(Protocol[P, R_co]):
    """What `enqueue` takes: anything that makes a NewJob of a call, checked against the signature `P`."""

    def new(self, *args: P.args, **kwargs: P.kwargs) -> NewJob[R_co]: ...


def check_task_name(name: str) -> str:
    """Return `name` if it can name a task (1 to 200 printable characters, no space), else raise InvalidOption."""
    if isinstance(name, str) and 1 <= len(name) <= 200 and name.isprintable() and " " not in name:
        return name
    raise InvalidOption(f"task name {name!r}: use 1 to 200 printable characters without spaces")


def check_queue(queue: str) -> str:
    """Return `queue` if it can name a queue, else raise InvalidOption."""
    if isinstance(queue, str) and _QUEUE.fullmatch(queue):
        return queue
    raise InvalidOption(f"queue {queue!r}: use 1 to 40 letters, digits, '_', '.' or '-'")


def check_priority(priority: int) -> int:
    """Return `priority` if it is one (0, first, to 9), else raise InvalidOption."""
    if isinstance(priority, int) and not isinstance(priority, bool) and 0 <= priority <= 9:
        return priority
    raise InvalidOption(f"priority {priority!r}: use a whole number from 0 (first) to 9 (last)")
