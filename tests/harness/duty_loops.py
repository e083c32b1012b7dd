"""A duty by itself, in its loop, as a worker does it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from pgqueue.database.sessions import Session
from pgqueue.worker.duties import Duties, Duty


def duties(*table: Duty, session: Session, leads: Callable[[], bool] = lambda: True) -> Duties:
    """These duties, of a worker that leads or not."""
    return Duties(table, session, leads=leads, role=lambda: session.role)


def looping(
    round: Callable[[], Awaitable[float | None]],
    session: Session,
    *,
    leads: Callable[[], bool] = lambda: True,
    **options: Any,
) -> asyncio.Task[None]:
    """The loop of one duty, which runs until it is cancelled."""
    [loop] = duties(Duty("test", round, **options), session=session, leads=leads).loops
    return asyncio.create_task(loop.run())
