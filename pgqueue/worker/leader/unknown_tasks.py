"""Ends jobs of tasks that no live worker knows: those past their deadline, and those that have waited for a day.

No worker claims such a job. It stays available, for a worker that knows its task may come: the new code of a rolling
deploy, the other codebase on the same queue. `pgqueue status` names it meanwhile. No worker is there to end it, so the
worker that leads does.

A task counts as unknown while no live worker of the queue has it among its tasks. A worker of the version before says
nothing of its tasks: it may know all of them. Since when a task is unknown is a row of `unknown_task`. A look that
finds the task writes it. It is removed when a worker knows the task again, or when a whole walk has seen no job of it.
A job is failed only after it has been due, and its task unknown, for the whole time. A paused queue is left alone.

A look walks the waiting jobs by id, some at a time, and goes on in the next round where it stopped. It takes a quarter
of a percent of the time, however many jobs wait.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import monotonic

import psycopg

from pgqueue.database.sessions import Session
from pgqueue.worker.state import WorkerState

log = logging.getLogger("pgqueue")

LOOKED_MOST, LOOK_SECONDS = 5_000, 1.0
"""So many jobs in one statement, for a claim waits for it; and how long one round goes on."""
DEAR_SHARE = 400
"""The next round comes no sooner than after so many times what this one took."""


class UnknownTasks:
    """Looks over the given session; `ended` is called when jobs were ended that may have held keys."""

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
        """The id behind which the walk over all jobs goes on; 0: a new one begins."""
        self._walked: float | None = None
        """When the last whole walk began, by the database, in seconds since 1970; None: there was none yet."""
        self._begun: float | None = None
        """The same of the walk under way."""
        self._due = 0.0

    async def look(self) -> None:
        """One round, if it is time for one."""
        if monotonic() < self._due:
            return
        try:
            await self._round()
        except psycopg.errors.InsufficientPrivilege:  # granted by a version before this one
            log.error("unknown tasks are not looked for: this role needs its rights again, `pgqueue grants`")

    async def _round(self) -> None:
        link, settings, until = self._session.link, self._state.settings, monotonic() + LOOK_SECONDS
        begins = self._after == 0
        forget = link.statement("unknown_tasks_forget", walked=self._walked if begins else None)
        [[(now, _)]] = await self._session.run(forget)
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
            log.warning("%d jobs of tasks that no live worker knows were ended: deadline, or refused", ended)
            self._ended()
