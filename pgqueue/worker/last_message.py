"""The last message of a worker whose process ends with it: it gives back what was stopped, and signs off.

A handler that was stopped may leave a thread or a child behind, and one that does not leave goes on itself. Only the
end of the process ends them. So their jobs are given to other workers as the last thing before that.

Why no job runs here beside its next run, but for the moment between the COMMIT of this message and the exit:

1. The completer puts aside the jobs that were stopped. Their rows stay this worker's, and its heartbeat goes on. So no
   other worker has them, nor a job of their keys.
2. What else has ended is written before. Then the completer ends. An outcome that comes later is of a handler that was
   to stop: it does not count, and its job is given back with the others.
3. Then the handlers' pool gives out no connection. Its sessions are ended in the server, and their end is awaited. So a
   COMMIT of a handler is done by then, and its job has no row any more, or it never will be.
4. Then the children of multiprocessing are killed.
5. One transaction gives back by their claims all jobs that were stopped or still run, and deletes the worker's row.
6. If that transaction does not come about, the rows stay, and the process ends, with its heartbeat: rescue gives them
   back when the lease is over.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import psycopg

from pgqueue.database.backoff import one_line, within
from pgqueue.database.sessions import Identity, ending
from pgqueue.database.statements import integers
from pgqueue.jobs.outcomes import interrupted
from pgqueue.steady_clock import monotonic
from pgqueue.worker.complete.outcome_sql import Ended
from pgqueue.worker.run.child_processes import kill_children
from pgqueue.worker.services import Services

log = logging.getLogger("pgqueue")

TIDY_SECONDS = 2.0
"""For the end of the lifespan, for the history, and for what telemetry keeps back, together."""
FLUSH_SECONDS = 1.0
"""For outcomes that have come meanwhile. The history and the telemetry have as long at least."""
SEND_SECONDS = 5.0

STUCK = interrupted("its worker was shut down, and could not stop it")


class LastMessage:
    """What is left to do for a worker with jobs that were stopped. `left`: how many ran past the grace.

    `end_lifespan` and `cancel`, which ends its services, are the worker's.
    """

    def __init__(
        self,
        services: Services,
        left: int,
        *,
        end_lifespan: Callable[[], Coroutine[Any, Any, None]],
        cancel: Callable[[], Coroutine[Any, Any, None]],
    ) -> None:
        self.left = left
        self._services = services
        self._end_lifespan = end_lifespan
        self._cancel = cancel
        self._given_back: Sequence[Ended] = ()

    async def prepare(self) -> float:
        """End the lifespan, write what has ended meanwhile, and the history; the services end. Answers how many seconds
        are left for what the telemetry keeps back."""
        services, until = self._services, monotonic() + TIDY_SECONDS
        lifespan = asyncio.ensure_future(self._end_lifespan())
        done, _ = await asyncio.wait([lifespan], timeout=TIDY_SECONDS)
        if not done:
            log.error("the lifespan has not ended within %g s, and ends with this process", TIDY_SECONDS)
        elif (error := lifespan.exception()) is not None:
            log.error("the lifespan has failed at its end", exc_info=error)
        await within(services.completer.flushed(), FLUSH_SECONDS)
        await self._cancel()
        writing = services.counters.write_rest(self._ends())
        if not await within(writing, max(FLUSH_SECONDS, until - monotonic())):
            log.warning("the last minute of the history could not be written")
        for job in services.running.jobs():  # their handlers do not leave, and say nothing themselves
            services.leaves(job, STUCK)
        return max(FLUSH_SECONDS, until - monotonic())

    async def send(self) -> bool:
        """Send it; whether it went through. The caller ends the process as soon as this returns."""
        try:
            async with asyncio.timeout(SEND_SECONDS):
                await self.settle()
                kill_children()
                await self.commit()
        except Exception as error:  # whatever it is, the process ends now
            log.warning("could not sign off: %s; rescue gives back what ran when the lease is over", one_line(error))
            return False
        return True

    async def settle(self) -> None:
        """End the handlers' sessions, and open the connection: what `commit` sends then waits for neither."""
        services, session = self._services, self._services.fetch_session
        services.handler_pool.closed = True
        sessions: Sequence[Identity] = services.handler_pool.identities()
        self._given_back = self._ends()
        await services.reconciler.reconcile()  # a claim whose answer was lost: its jobs have not started
        if sessions:
            await session.run(*[ending(session.link, each) for each in sessions])
        await session.ready()

    async def commit(self) -> None:
        """Give back what still ran when it was settled. The children of multiprocessing have been killed by now."""
        services, session, ends = self._services, self._services.fetch_session, self._given_back
        services.heartbeat.abandon()
        worker_id = services.state.id
        given_back = [ended for ended, _ in services.outcome_sql.many(ends, worker_id)]
        leave = session.link.statement("registration_leave", worker_id=worker_id)
        # Those that could not be given back, as a lock is on their rows, are noted: they are no crashes.
        stuck = integers(job.id for job, _ in ends)
        abandon = session.link.statement("registration_abandon", worker_id=worker_id, stuck=stuck)
        try:
            await session.run(*given_back, leave, abandon)
        except psycopg.Error:  # a trigger of the application refuses one of them, perhaps
            await session.run(abandon)
            raise

    def _ends(self) -> list[Ended]:
        """What was stopped, and what still runs."""
        return [*self._services.completer.left_out(), *((job, STUCK) for job in self._services.running.jobs())]
