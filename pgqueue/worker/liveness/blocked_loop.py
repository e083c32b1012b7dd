"""Gives to other workers what a blocked event loop keeps from them: the jobs that wait for a slot here, and the lead.

A handler that blocks the loop is no death: the worker keeps what it runs. But nothing else of it moves. The jobs that
it has at hand would wait beside idle workers, and due jobs would wait for a leader that does nothing.

Called by the heartbeat's thread: `wanted` twice a second, `relieve` with a heartbeat. Why no job starts here and
elsewhere:

1. A job that waits for a slot is in one group, and leaves it under the group's lock: for a run, or to go from here.
   Whatever the loop and the threads do meanwhile, it is one of the two. A job that was taken out here starts no more.
2. A claim whose answer the loop has not read is given up. Then no job of it starts here (the proof is in `claims`).
3. Only then the database is told that these jobs go back, by their fence (id, worker, claim). So any worker may claim
   them, this one among them, under another claim.
4. When the loop goes on, it gives back the jobs that were taken out. Its own release has the same fence. It finds no
   row, and tidies up what the worker knows of the job.

Why no job is left: a row may be locked, or not committed yet, or the database is away. It is tried again with each
heartbeat while the loop is blocked. After that the loop gives it back, or the reconciler does. A row that the server
refuses to move is left to the loop. A part with many such rows takes some heartbeats.

Jobs of a chain go back with the job that they are behind. No job of their lock could start elsewhere before.

The lead is the advisory lock of the listener's session. The connection is broken from here, so the server ends the
session. When the loop goes on, it may do a duty once more before it sees that. That is safe. Then the listener connects
again.

What stays: jobs that have a slot, and jobs of a chain behind them; those whose end is not written yet; those that wait
for the end of their earlier run. A handler that holds the interpreter's lock keeps all: this thread does not run then.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

import psycopg

from pgqueue.database.backoff import described
from pgqueue.database.row_errors import refuses_move
from pgqueue.database.sessions import Session
from pgqueue.database.statements import integers
from pgqueue.jobs.job import Job
from pgqueue.plain_text import plural
from pgqueue.worker.doubles import is_double
from pgqueue.worker.liveness.loop_monitor import LoopMonitor
from pgqueue.worker.state import WorkerState

log = logging.getLogger("pgqueue")

BLOCKED_SECONDS = 3.0
"""For so long the loop must have been blocked. A loop that only has much to do takes turns."""
REFUSED_MOST = 8
"""After so many refused rows the other parts wait for the next heartbeat: each refusal costs a connection."""


class BlockedLoop:
    """Relieves one worker. Made on the loop; everything else is called from the heartbeat's thread.

    `take_out()` takes out the jobs that wait for a slot. `give_back(taken)` is called with them on the loop, when it
    goes on. `step_down()` gives up the lead; false if this worker does not have it.
    """

    def __init__(
        self,
        state: WorkerState,
        monitor: LoopMonitor,
        *,
        take_out: Callable[[], list[Job]],
        give_back: Callable[[list[Job]], None],
        step_down: Callable[[], bool],
    ) -> None:
        self.monitor = monitor
        self._state = state
        self._take_out = take_out
        self._give_back = give_back
        self._step_down = step_down
        self._loop = asyncio.get_running_loop()
        self._relieved: int | None = None
        """The turn that the loop owed when it was relieved."""
        self._taken: list[tuple[int, int]] = []
        """The ids and claims of jobs that were taken out, of which the database has not been told yet."""
        self._given_up: frozenset[int] = frozenset()
        """Claims that were given up: rows of them may come as long as the loop does not read the answer."""
        self._refused: set[tuple[int, int]] = set()
        """Of these the rows that the server refuses to move."""
        self._refusals = 0
        """How many it has refused with this heartbeat."""

    def is_blocked(self) -> bool:
        """Whether the loop is blocked just now, and starts no job."""
        return self.monitor.blocked() >= BLOCKED_SECONDS

    def wanted(self) -> bool:
        """Whether the loop is blocked and was not relieved yet, and there is another worker."""
        owed = self.monitor.owed() not in (None, self._relieved)
        return owed and self.is_blocked() and self._state.other_workers > 0 and not self._loop.is_closed()

    async def relieve(self, session: Session, worker_id: int) -> None:
        """Give away what is there if it is `wanted`. Try again what could not go before. Raises no error of the
        database."""
        owed = self.monitor.owed()
        if owed is None or owed != self._relieved:  # the loop has gone on since, and gives back by itself
            self._taken, self._given_up, self._refused = [], frozenset(), set()
        if self.wanted():
            self._relieved = owed
            taken = self._take_out()
            with suppress(RuntimeError):  # the loop was closed in this moment
                self._loop.call_soon_threadsafe(self._give_back, taken)
            self._taken = [(job.id, job.claim) for job in taken]
            self._given_up = self._state.claims.give_up()
            if self._step_down():
                log.warning("the event loop is blocked: this worker gives up the lead")
        if self._taken or self._given_up:
            await self._tell(session, worker_id)

    async def _tell(self, session: Session, worker_id: int) -> None:
        """Tell the database which jobs go. It takes a sixth of the lease at most: no heartbeat must come late."""
        try:
            async with asyncio.timeout(self._state.settings.lease / 6):
                going = self._taken
                if self._given_up:
                    [rows] = await session.run(session.link.statement("reconciler_held", worker_id=worker_id))
                    going = going + [(job_id, claim) for job_id, claim in rows if claim in self._given_up]
                going = [each for each in going if each not in self._refused]
                self._refusals = 0
                went = set(await self._release(session, worker_id, going) if going else ())
        except (psycopg.Error, TimeoutError) as error:
            said = "jobs behind the blocked event loop cannot go to other workers yet (%s)"
            log.warning(said, described(error))
            return
        if went:
            self._taken = [each for each in self._taken if each[0] not in went]
            said = "the event loop is blocked: %s went to other workers"
            log.warning(said, plural(len(went), "job that waited here", "jobs that waited here"))

    async def _release(self, session: Session, worker_id: int, going: list[tuple[int, int]]) -> list[int]:
        """Release these rows; the ids of those that went. If the server refuses to move one, that one stays."""
        link, notify, ids = session.link, self._state.settings.notify, [job_id for job_id, _ in going]
        release = link.statement(
            "complete_release",
            ids=integers(ids),
            claims=integers(claim for _, claim in going),
            worker_id=worker_id,
            notify=notify,
        )
        try:
            [[(some, *_)], _] = await session.run(release, link.statement("sweep_tell", notify=notify))
        except psycopg.Error as error:
            if not (refuses_move(error) or is_double(error)):
                raise
            if len(going) == 1:
                self._refused.update(going)
                self._refusals += 1
            if len(going) == 1 or self._refusals >= REFUSED_MOST:
                return []
            half = len(going) // 2
            first = await self._release(session, worker_id, going[:half])
            return first + await self._release(session, worker_id, going[half:])
        return ids if some is None else list(some)
