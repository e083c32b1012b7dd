"""What every handler of a peer in Python calls, and what the bench tells its processes.

A handler only adds one to a counter. The counter is a file of eight bytes that is mapped into memory, so the bench
reads it without asking the process. With BENCH_STARTS, the time at which each job began is written down, too.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import sys
import threading
import time
from typing import Any

DSN = os.environ.get("BENCH_DSN", "")
BROKER = os.environ.get("BENCH_BROKER", "")
SETTINGS: dict[str, Any] = json.loads(os.environ.get("BENCH_SETTINGS", "{}"))
HISTORY = os.environ.get("BENCH_HISTORY") == "1"
"""Whether finished jobs are to be kept, where the peer can."""
WORK_SECONDS = float(os.environ.get("BENCH_WORK", "0.001"))

_FOLDER = os.environ.get("BENCH_FOLDER", ".")
_WORKER = os.environ.get("BENCH_WORKER", "0")
_STARTS = os.environ.get("BENCH_STARTS") == "1"


class _Counter:
    """The count of one process. A forked child opens one of its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pid = 0
        self._count = 0
        self._shared: mmap.mmap | None = None
        self._starts = -1

    def add(self, number: int) -> None:
        began = time.monotonic()
        with self._lock:
            if self._shared is None or self._pid != os.getpid():
                self._shared = self._open()
            self._count += 1
            struct.pack_into("<q", self._shared, 0, self._count)
        if self._starts >= 0 and number >= 0:
            os.write(self._starts, f"{number} {began}\n".encode())

    def _open(self) -> mmap.mmap:
        self._pid, self._count = os.getpid(), 0
        own = f"{_WORKER}-{self._pid}"
        if _STARTS:
            self._starts = os.open(f"{_FOLDER}/starts-{own}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        with open(f"{_FOLDER}/count-{own}", "w+b") as file:
            file.write(bytes(8))
            file.flush()
            return mmap.mmap(file.fileno(), 8)


ran = _Counter().add


def become(module: str, *arguments: str) -> None:
    """Replace this process by the peer's own command, as an application starts it."""
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])
