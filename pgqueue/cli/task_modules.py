"""Imports the modules that a worker was given. If a module cannot be imported, one line says why.

This is the only place where pgqueue imports by name. The names come from the command line, never from the database.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from pgqueue.cli import logs
from pgqueue.client import tasks
from pgqueue.config import safe

PATCHERS = {"gevent.monkey": "is_module_patched", "eventlet.patcher": "is_monkey_patched"}
"""Modules that replace parts of the standard library, and how each is asked for one."""
_PACKAGE = f"{Path(__file__).parents[1]}/"


def look_in(app_dir: str) -> Path:
    """Let Python look for modules in this directory first; return it."""
    directory = Path(app_dir).resolve()
    sys.path.insert(0, str(directory))
    return directory


def import_tasks(modules: Sequence[str], directory: Path) -> None:
    """Import the modules, which should be in `directory`. Raises UsageError if one fails, or none declares a task."""
    for module in modules:
        _import(module, directory)
    logs.enable()
    for patcher, asked in PATCHERS.items():
        if patcher in sys.modules and getattr(sys.modules[patcher], asked)("socket"):
            raise click.UsageError(
                f"{patcher} has replaced Python's sockets. A worker then hears no notification, no signal: import no "
                "module that calls it. Jobs run side by side by `--concurrency`"
            )
    if not tasks.registry:
        raise click.UsageError(f"{', '.join(modules)}: no task is declared there; put @pgqueue.task above a function")


def declared_in(modules: Sequence[str], app_dir: str) -> list[tasks.Task[..., Any]] | None:
    """Import the modules and return the tasks that are declared then; None if no module was named."""
    if not modules:
        return None
    import_tasks(modules, look_in(app_dir))
    return tasks.declared()


def _import(module: str, directory: Path) -> None:
    if not all(part.isidentifier() for part in module.split(".")):
        raise click.UsageError(
            f"module {module!r}: write it as Python imports it, such as myapp.tasks{_dotted(module)}"
        )
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise _failed(module, directory, error) from error
        parent = str(error.name).rpartition(".")[0]
        if parent in sys.modules and not hasattr(sys.modules[parent], "__path__"):  # shop.py, or module.function
            raise click.UsageError(f"no module {error.name!r}: {parent!r} is a module. Write {parent}") from None
        raise click.UsageError(
            f"no module {error.name!r} in {directory} or where Python looks; --app-dir names another directory"
        ) from None
    except (Exception, SystemExit) as error:
        raise _failed(module, directory, error) from error


def _dotted(path: str) -> str:
    dotted = path.removesuffix(".py").strip("./").replace("/", ".").replace(":", ".")
    return f" ({dotted}?)" if all(part.isidentifier() for part in dotted.split(".")) else ""


def _failed(module: str, directory: Path, error: BaseException) -> click.UsageError:
    """The error of the module itself: its text, with its line and file."""
    what = "".join(traceback.format_exception_only(error)).strip().splitlines()[-1]
    # The source line that is shown may contain a DSN.
    return click.UsageError(safe(f"module {module} (in {directory}) fails when imported: {what}{_line(error)}"))


def _line(error: BaseException) -> str:
    if isinstance(error, SyntaxError):
        return f" ({error.filename}, line {error.lineno})"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
    # The line of the application that has called us, not the one of ours that refuses the call.
    frames = [frame for frame in frames if not frame.filename.startswith(("<", _PACKAGE))]
    return f" ({frames[-1].filename}, line {frames[-1].lineno}: {frames[-1].line})" if frames else ""
