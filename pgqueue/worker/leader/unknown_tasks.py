"""Ends jobs of tasks that no live worker knows: those past their deadline, and those that have waited for a day.

No worker claims a job with an unknown task. The job stays available, because a worker that knows its task may come:
new code of a rolling deploy, or another codebase on the queue. `pgqueue status` names it meanwhile. No worker runs it,
therefore the leader ends it.

A task counts as unknown while no live worker of the queue has it among its tasks.

Table `unknown_task` notes since when a task is unknown. A look that finds the task writes the row. The row is removed
when a worker knows the task again, or when a whole walk has seen no job of it. A job is failed only after it has been
due, and its task unknown, for the whole time. A paused queue is left alone.

A look walks the waiting jobs by id, some at a time, and goes on in the next round where it stopped. It takes a quarter
of a percent of the time, however many jobs wait. It is a duty of the leader, as housekeeping.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from pgqueue.database.row_errors import require_gone
from pgqueue.database.sessions import Session
from pgqueue.plain_text import plural
from pgqueue.steady_clock import monotonic
from pgqueue.worker.state import WorkerState

log = logging.getLogger("pgqueue")

LOOKED_MOST, LOOK_SECONDS = 5_000, 1.0
"""Jobs per statement (few, because other housekeeping waits for it), and how long one round lasts."""
DEAR_SHARE = 400
"""The next round starts after at least this many times the duration of this one."""


class UnknownTasks:
    """Looks for jobs of unknown tasks over the given session.

    `ended` is called after jobs were ended: their keys may be free now.
    """

    def __init__(
        self,
        session: Session,
        state: WorkerState,
        *,
        ended: Callable[[], None],
    ) -> None:
        self._session = session
        self._state = state
        self._ended = ended
        self._after = 0
        """The walk over all jobs goes on behind this id; at 0 a new walk begins."""
        self._walked: float | None = None
        """When the last whole walk began: database time, in seconds since 1970. None: no whole walk yet."""
        self._begun: float | None = None
        """When the walk under way began."""
        self._due = 0.0
        self._forgotten: Sequence[Any] = (0, 0, None, None)
        """The answer of `forget_rows` in the last round."""

    async def look(self) -> None:
        """Do one round, if it is due."""
        if monotonic() >= self._due:
            await self._round()
        require_gone("unknown_task", self._forgotten)  # also if no round was due: what it has said still holds

    async def _round(self) -> None:
        link, settings, until = self._session.link, self._state.settings, monotonic() + LOOK_SECONDS
        begins = self._after == 0
        forget = link.statement("unknown_tasks_forget", walked=self._walked if begins else None)
        [[(now, *self._forgotten)]] = await self._session.run(forget)
        if begins:
            self._begun = now
        ended, spent = 0, self._session.took
        while True:
            look = link.statement(
                "unknown_tasks_look",
                after=self._after,
                n=LOOKED_MOST,
                seconds=settings.fail_unknown,
                worker_id=self._state.id,
                version_tag=settings.version_tag,
                notify=settings.notify,
            )
            [[(last, looked, gone, _)]] = await self._session.run(look)
            self._after = last if looked == LOOKED_MOST else 0
            ended += gone
            spent += self._session.took
            if looked < LOOKED_MOST:
                self._walked = self._begun
                break
            if monotonic() >= until:
                break
        self._due = monotonic() + DEAR_SHARE * spent
        if ended:
            jobs = plural(ended, "job has ended", "jobs have ended")
            log.warning("%s, of tasks that no live worker knows: deadline, or refused", jobs)
            self._ended()
