"""How much memory a process has (RSS, bytes): the worker says so with each beat, the supervisor watches its limit."""

from __future__ import annotations

import os
from pathlib import Path

_PROC = Path("/proc/self/statm").exists()


def rss(pid: int | None = None) -> int:
    """Resident memory of this process, or of `pid`; 0 when there is no such process any more."""
    if not _PROC:
        return _elsewhere(pid)
    try:
        return int(Path(f"/proc/{pid or 'self'}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):  # it went while we read
        return 0


def _elsewhere(pid: int | None) -> int:
    """Where there is no /proc, as on macOS."""
    import psutil  # a tenth of what a worker imports: not where it can do without

    try:
        size: int = psutil.Process(pid).memory_info().rss
    except psutil.Error:
        return 0
    return size
