"""Where a task or a hook is declared: in which module, and in which execution of it.

Two declarations of one name are an error, but for one case: a module is executed again. So it is after a reload, after
an import that has failed, and if a file is imported under two names, as `python app.py` that imports `app`.

The function tells nothing of that. Functions of a decorator without `functools.wraps` share their name, their module
and their code, and so do those that a factory makes. So the statement at the head of the stack is asked: the module's
own that has led to the declaration, through however many factories.

1. Within one execution of a module each name is declared once. A loop, a factory that is called twice, and a second
   function of the same name are two declarations.
2. An execution is a file, the module's namespace, and its import. A reload keeps the namespace, and makes a new
   `__spec__`. Any other execution has a new namespace.
3. In another execution of the same file a name takes the place of the one before, also if its line has moved.
4. Two kinds are not judged, so that the function's name decides. What is typed at a prompt or in a notebook belongs to
   no file. What a test declares while it runs may be an application's factory, which is called for each test.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from inspect import CO_OPTIMIZED
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

_OURS = __name__.partition(".")[0]


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """A declaration: `at` is its file and line. `module` is the namespace of the module whose statement led to it."""

    at: str
    file: str | None = None
    module: dict[str, Any] | None = None
    spec: object = None

    @classmethod
    def here(cls) -> Place:
        """The place of the statement that has called pgqueue."""
        caller: FrameType | None = sys._getframe(1)
        while caller is not None and caller.f_globals.get("__name__", "").partition(".")[0] == _OURS:
            caller = caller.f_back
        if caller is None:
            return cls("a thread")
        at, frame = f"{caller.f_code.co_filename}:{caller.f_lineno}", caller
        while not _is_module(frame):
            if frame.f_back is None:
                return cls(at)  # in a thread
            frame = frame.f_back
        module = frame.f_globals
        if (module.get("__name__") == "__main__" and _in_test()) or "__file__" not in module:
            return cls(at)
        return cls(at, os.path.realpath(frame.f_code.co_filename), module, module.get("__spec__"))

    def replaces(self, before: Place, *, one_name: bool) -> bool:
        """Whether this is the declaration `before`, made again. `one_name`: the functions have the same name."""
        if self.module is None or before.module is None:
            return one_name
        again = self.module is not before.module or self.spec is not before.spec
        return again and self.file == before.file


def _in_test() -> bool:
    """Whether a test of this process runs: its children find the variable, too."""
    return "PYTEST_CURRENT_TEST" in os.environ and "_pytest.runner" in sys.modules


def _is_module(frame: FrameType) -> bool:
    """Whether a module's own statements run there, or what was typed at a prompt: neither a function nor a class.

    In a comprehension of a module `f_locals` is a copy (from Python 3.12 on, PEP 709). The body of a class has a
    `__qualname__`.
    """
    return not frame.f_code.co_flags & CO_OPTIMIZED and "__qualname__" not in frame.f_locals


_places: WeakKeyDictionary[Callable[..., Any], Place] = WeakKeyDictionary()


def declared_at(function: Callable[..., Any]) -> Place:
    """Where this function was declared last."""
    return _places.get(function, Place("an unknown place"))


def declare(function: Callable[..., Any], place: Place) -> None:
    """From now on this function is declared here."""
    _places[function] = place


def name_of(function: Callable[..., Any]) -> str:
    """The name of a function, with its module."""
    return f"{function.__module__}.{getattr(function, '__qualname__', function)}"
