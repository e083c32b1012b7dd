"""Faults of a process that can start no thread any more; called inside that process, and undone there.

- `refused`: the address space is at its limit, so `Thread.start` raises "can't start new thread".
- `stillborn`: the new thread dies of a MemoryError before it says that it lives, so `Thread.start` waits for ever.
"""

from __future__ import annotations

import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

STACK = 1 << 30
ROOM = 256 << 20  # for everything else that happens meanwhile


@contextmanager
def no_threads(way: str) -> Iterator[None]:
    """No thread can be started meanwhile, in one of the two ways."""
    with {"refused": _refused, "stillborn": _stillborn}[way]():
        yield


@contextmanager
def _refused() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = threading.stack_size(STACK)
    resource.setrlimit(resource.RLIMIT_AS, (size + ROOM, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        threading.stack_size(before)


@contextmanager
def _stillborn() -> Iterator[None]:
    born = threading.Thread._bootstrap  # type: ignore[attr-defined]

    def dies(self: threading.Thread) -> None:
        """As if the first allocation in it had failed."""

    threading.Thread._bootstrap = dies  # type: ignore[attr-defined]
    try:
        yield
    finally:
        threading.Thread._bootstrap = born  # type: ignore[attr-defined]
