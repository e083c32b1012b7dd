"""A fault of the first moment: a signal that comes while a command still imports.

`python early.py SIGNALS COMMAND ARGUMENTS` is that command, except that it sends itself these signals (`HUP,TTIN`) when
it imports the module of the command. Before a command that is started, as `where` of `commands.working`.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec


def early(*names: str) -> list[str]:
    """What to put before the command."""
    return [sys.executable, __file__, ",".join(names)]


class Signals:
    """An importer that finds nothing, and sends the signals when it is asked for the command's module."""

    def __init__(self, names: str) -> None:
        self._numbers = [signal.Signals[f"SIG{name}"] for name in names.split(",")]

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        if name.startswith("pgqueue.cli.commands."):
            for number in self._numbers:
                os.kill(os.getpid(), number)
            self._numbers.clear()
        return None


if __name__ == "__main__":
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whatever the tests were started with
    from pgqueue.__main__ import main

    sys.meta_path.insert(0, Signals(sys.argv[1]))
    sys.argv = sys.argv[2:]
    main()
