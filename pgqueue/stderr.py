"""The last words of a process that ends at once: written to stderr without the logger, and only if they can be read.

The lock of a log's handler may be held by what hangs. And a pipe that nothing reads is full at some time: a write to it
would keep the process for ever.
"""

from __future__ import annotations

import os
import select
from contextlib import suppress

from pgqueue.steady_clock import monotonic

SECONDS = 1.0


def write(text: str) -> None:
    """Write this to stderr, within a second; what nothing reads by then is left out."""
    left, until = text.encode(errors="backslashreplace"), monotonic() + SECONDS
    with suppress(OSError):  # it is closed
        while left and select.select([], [2], [], max(0.0, until - monotonic()))[1]:
            left = left[os.write(2, left[: select.PIPE_BUF]) :]  # so many fit in a pipe that is ready
