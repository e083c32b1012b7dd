"""The children of multiprocessing that handlers have started: a process that ends at once takes them along.

By itself a child outlives a parent that is ended by `os._exit`, and goes on with the work of a job that runs elsewhere
by then. Children of `subprocess` and of `os.fork` are the handler's, and are left alone.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any


def children() -> list[Any]:
    """Those that live. From any thread, and from a signal handler."""
    process = sys.modules.get("multiprocessing.process")  # without it there are none
    return [] if process is None else process.active_children()


def kill_children() -> None:
    """Kill them, and wait for none."""
    for child in children():
        with suppress(OSError, ValueError):  # it has ended, or was closed, just now
            child.kill()
