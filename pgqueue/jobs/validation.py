"""Checks of a task's options: each returns the value as it is kept, or raises InvalidOption.

Used by tasks, at import and by `using`, and by every function that is given the name of a task or a queue. Here are
only names, times and flags. Options that need the task's signature are checked in `concurrency` and `unique`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from datetime import datetime
from typing import Any, Literal

from pgqueue.errors import InvalidOption
from pgqueue.jobs.durations import Duration, seconds

COUNT_MOST, PERIOD_MOST = 1_000_000, 366 * 86_400.0
UNITS = {"second": 1.0, "minute": 60.0, "hour": 3_600.0, "day": 86_400.0}
UNITS |= {unit[0]: length for unit, length in UNITS.items()}
_RATE = re.compile(r"([0-9]{1,7}) */ *([0-9]{1,9}(?:\.[0-9]{1,6})?)? *(" + "|".join(UNITS) + r")s?")
_QUEUE = re.compile(r"[A-Za-z0-9_.-]{1,40}")


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


def parse_rate(rate: object) -> tuple[int, float]:
    """The count and the period in seconds: for "100/minute" these are 100 and 60.0. Raises InvalidOption."""
    found = _RATE.fullmatch(rate) if isinstance(rate, str) else None
    if found is None:
        raise InvalidOption(f"rate {rate!r}: write COUNT/PERIOD, such as 100/minute or 5/10s (units: s, m, h, d)")
    count, period = int(found[1]), float(found[2] or 1) * UNITS[found[3]]
    if not 1 <= count <= COUNT_MOST or not 1.0 <= period <= PERIOD_MOST:
        raise InvalidOption(f"rate {rate!r}: use a count from 1 to {COUNT_MOST} and a period of 1 second to 366 days")
    return count, period


def default_name(fn: Callable[..., Any]) -> str:
    if fn.__module__ == "__main__":
        raise InvalidOption(
            f"task {fn.__qualname__}: it is declared in __main__, a name no worker can find again: "
            f"pass name=…, such as @task(name={fn.__qualname__!r}), or move it to a module"
        )
    if fn.__name__ == "<lambda>":
        raise InvalidOption("task: a lambda has no name of its own: pass name=…, or use def")
    return f"{fn.__module__}.{fn.__qualname__}"


def check_function(fn: Callable[..., Any]) -> None:
    if not inspect.isfunction(fn):
        raise InvalidOption(f"task {fn!r}: {_no_function(fn)}; declare a plain def or async def")
    if inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn):
        raise InvalidOption(f"task {fn.__qualname__}: a generator does nothing until iterated; return instead of yield")
    first = next(iter(inspect.signature(fn).parameters), "")
    if first in ("self", "cls") and "." in fn.__qualname__.rpartition("<locals>.")[2]:
        raise InvalidOption(
            f"task {fn.__qualname__}: a method needs its object, which is no argument: "
            "use a function that is given an id and loads the object"
        )


def hidden_body(fn: Callable[..., Any]) -> str | None:
    """What a decorator hides of a plain function: that the function below it is async, or a generator. None: nothing.

    Such a wrapper is right if it runs the body itself, as with `asyncio.run` or `list`; that cannot be seen here. Else
    it returns something that has not run, and every attempt of the job fails.
    """
    if inspect.iscoroutinefunction(fn):
        return None
    inner = inspect.unwrap(fn)
    if inspect.iscoroutinefunction(inner):
        return f"{inner.__qualname__} is async"
    if inspect.isgeneratorfunction(inner) or inspect.isasyncgenfunction(inner):
        return f"{inner.__qualname__} is a generator"
    return None


def _no_function(fn: object) -> str:
    if isinstance(fn, type):
        return "a class is no task"
    if inspect.ismethod(fn):
        return "a bound method carries an object that cannot be stored"
    if isinstance(fn, staticmethod | classmethod):
        return f"put @{type(fn).__name__} above @task"
    if callable(fn):
        return "a partial or other callable object has no name of its own"
    return "the options of a task are keywords, such as @task(name=…)"


def aware(run_at: datetime | None) -> datetime | None:
    if run_at is not None and (not isinstance(run_at, datetime) or run_at.utcoffset() is None):
        raise InvalidOption(f"{run_at!r}: give a datetime with a time zone, such as datetime.now(timezone.utc)")
    return run_at


def start_by(deadline: datetime | Duration) -> datetime | float | None:
    return aware(deadline) if isinstance(deadline, datetime) else seconds(deadline, "deadline")


def positive(duration: Duration | None, what: str) -> float | None:
    if duration is None:
        return None
    length = seconds(duration, what)
    if length == 0:
        raise InvalidOption(f"{what} {duration!r}: give more than 0 seconds, or None for no limit")
    return length


def flag(value: bool, what: str) -> bool:
    if isinstance(value, bool):
        return value
    raise InvalidOption(f"{what}: {value!r} is neither True nor False")


def choice(value: Literal["cancel", "keep"], what: str) -> Literal["cancel", "keep"]:
    if value in ("cancel", "keep"):
        return value
    raise InvalidOption(f'{what}: {value!r}; give "cancel" or "keep"')
