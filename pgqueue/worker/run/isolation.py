"""Keeps jobs apart that one task or thread runs one after another: no job feels another's task or context.

A handler runs in a copy of the context that the worker was started in, with a decimal context of its own. On the loop
it also has a task, in which the run goes on with the next job only if the task and its context are as they were.

Why the next job feels nothing:

1. What a handler can leave at its task is a reference to it (a key of a registry, a timer that will cancel it), a weak
   reference, a callback, or a request to cancel it. Each of them is looked at after each job.
2. The other references to the task are the run's and the loop's. They are as many in each step of the task, whatever
   it has waited for. A test holds this for each loop and Python version.
3. Another thread may look at the task and have a reference meanwhile. After a job that ends the run, which costs a
   task. Before the first job it would hide a reference of a handler. So the lowest number of all runs counts.
4. A handler cannot take a variable out of its context that was there before. So if there are as many variables, and
   each has the same value, nothing has changed. "The same" means identical: no value of the application's is asked, and
   what equals another one may still be told from it. Values that can change in themselves are shared by all jobs.
5. Decimal's context is such a value, and each run has its own. What calculations depend on is compared.

Where references are not counted, as in PyPy, each job has a task of its own. What cannot be seen: an attribute that a
handler sets on its task, its name, and what is kept under the number `id(task)`.
"""

from __future__ import annotations

import asyncio
import decimal
import sys
from collections.abc import Callable
from contextvars import Context, copy_context
from decimal import getcontext
from math import inf
from operator import is_not
from typing import Any
from weakref import getweakrefcount

_references: Callable[[object], int] | None = getattr(sys, "getrefcount", None)

Mark = tuple[float, int, list[object], decimal.Context, decimal.Context, int, str]
"""A task before its first job: references, weak references, the values of its context. One of these is decimal's: that
one, a copy of it, its precision and its rounding."""


class Isolation:
    """Made in the context that handlers get copies of."""

    def __init__(self) -> None:
        self._base = _own(copy_context())
        self._lowest = inf

    def context(self) -> Context:
        """A context for one run, or for one call in a thread."""
        return _own(self._base.copy())

    def mark(self, me: asyncio.Task[Any]) -> Mark:
        """What to compare this task with later: called in the task, before its first job."""
        if _references is not None:
            self._lowest = min(self._lowest, _references(me))
        number = getcontext()
        was = number.copy()
        return self._lowest, getweakrefcount(me), [*copy_context().values()], number, was, was.prec, was.rounding

    def changed(self, me: asyncio.Task[Any], mark: Mark) -> bool:
        """Whether a job has left something at this task or in its context: called in the task, after each job."""
        references, weak, values, number, was, prec, rounding = mark
        if (
            _references is None
            or _references(me) != references
            or getweakrefcount(me) != weak
            or len(me._callbacks or ()) != 1  # the executor's own
            or me.cancelling()
        ):
            return True
        now, most = copy_context(), len(values)
        if len(now) != most or (getcontext() is not number if most == 1 else any(map(is_not, now.values(), values))):
            return True
        return number.prec != prec or number.rounding != rounding or number.traps != was.traps


def _own(context: Context) -> Context:
    """This context with a copy of its decimal context: a change of that one is seen nowhere else."""
    context.run(_copy_decimal)
    return context


def _copy_decimal() -> None:
    decimal.setcontext(getcontext().copy())
