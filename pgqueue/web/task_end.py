"""The end of a task that may wait for the database, however silent that is.

Used by `question.py` and `live.py` when the dashboard ends.
"""

from __future__ import annotations

import asyncio
from typing import Any

PATIENCE_SECONDS = 0.5
CANCELS_MOST = 4


async def end(task: asyncio.Task[Any] | None) -> None:
    """Cancel the task of this loop, and wait for its end.

    A statement that is cancelled waits until the server says that it is: psycopg takes 10 s to give that up. A second
    cancel makes it close the connection at once.
    """
    if task is None or task.done() or task.get_loop() is not asyncio.get_running_loop():
        return
    for _ in range(CANCELS_MOST):
        task.cancel()
        if (await asyncio.wait({task}, timeout=PATIENCE_SECONDS))[0]:
            return
