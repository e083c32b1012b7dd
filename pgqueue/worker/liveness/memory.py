"""The resident memory of a process in bytes: workers report it with each heartbeat, the supervisor checks its limit."""

from __future__ import annotations

import os
from pathlib import Path

_PROC = Path("/proc/self/statm").exists()


def rss(pid: int | None = None) -> int:
    """Resident memory of this process, or of `pid`; 0 if that process is gone."""
    if not _PROC:
        return _elsewhere(pid)
    try:
        return int(Path(f"/proc/{pid or 'self'}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):  # the process ended while we read
        return 0


def _elsewhere(pid: int | None) -> int:
    """On systems without /proc, as macOS."""
    import psutil  # imported here only: a worker with /proc does not need it, and its import takes time

    try:
        size: int = psutil.Process(pid).memory_info().rss
    except psutil.Error:
        return 0
    return size
