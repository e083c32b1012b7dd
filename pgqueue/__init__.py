"""pgqueue: the job queue that lives entirely in PostgreSQL."""

from functools import cache
from importlib import import_module
from importlib.machinery import PathFinder
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pgqueue.names import *  # noqa: F403  # what there is stands there, and only there


@cache
def _places() -> dict[str, str]:
    """The module of each public name. The lines of `names` run here, with an import that only writes down what it is
    asked for. In an application that was compiled to machine code they cannot: there all that they name is imported."""
    names, found = f"{__name__}.names", dict[str, str]()

    def note(module: str, _globals: object, _locals: object, asked: tuple[str, ...], _level: int) -> object:
        found.update(dict.fromkeys(asked, module))
        return SimpleNamespace(**dict.fromkeys(asked))

    loader: Any = getattr(PathFinder.find_spec(names, __path__), "loader", None)  # noqa: F405  # every package has it
    if hasattr(loader, "get_code"):
        exec(loader.get_code(names), {"__builtins__": {"__import__": note}})
        return found
    return {name: names for name in vars(import_module(names)) if not name.startswith("_")}


def __getattr__(name: str) -> Any:
    """Import a name at its first use: an enqueue needs no worker, and a probe (`pgqueue health`) needs few modules."""
    if name == "__all__":
        return sorted(_places())
    if name in _places():
        module = import_module(_places()[name])
        found = globals()[name] = getattr(module, name, None) or import_module(f"{module.__name__}.{name}")
        return found
    try:  # a module, such as pgqueue.errors
        if not name.startswith("_"):
            return import_module(f"{__name__}.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"{__name__}.{name}":
            raise
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_places(), "__all__"})
