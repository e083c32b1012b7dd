"""How much memory a process has (RSS, bytes): the worker says so with each beat, the supervisor watches its limit."""

from __future__ import annotations

import psutil


def rss(pid: int | None = None) -> int:
    """Resident memory of this process, or of `pid`; 0 when there is no such process any more."""
    try:
        size: int = psutil.Process(pid).memory_info().rss
    except psutil.Error:
        return 0
    return size
