"""Gives the jobs of dead workers back: they run again, at the front of their lanes.

Called with a worker that the heartbeat's judge has declared dead. Called once a minute for stray jobs, too: jobs that a
worker claimed while it was being declared dead. Every step may be repeated, and two workers may do it at once:
1. The dead worker's sessions are ended, by pid *and* start time: a suspended process keeps its locks and could commit.
   Sessions of another role may not be ours to end, and the list of sessions may be damaged. That is only logged: the
   fence of the dead worker no longer holds.
   They are told until none is left. A session that is told once sends a last message, and waits for room in its socket.
   A stopped process makes no room: its session keeps its locks until it is told again. If it has not ended in time,
   the jobs are moved all the same, and the looks for stray jobs tell it again (`_stuck`).
2. The worker's row is locked against claims (they hold it FOR KEY SHARE) and marked dead, unless its counter has
   moved. From then on it can neither claim nor send heartbeats, and its completions find their rows gone.
3. Its running jobs are moved, in batches. A notification lets fetchers start at position zero.

Many workers may die at once, and sessions of some may not end. No worker waits for the sessions of another:
1. Each worker has its own `rescue`, and all go on at once. A pause is that of one worker alone.
2. All speak over one session, one step after the other, first come, first served. So all sessions are told before any
   pause is over, and what the session does besides waits for one step at most.
3. One worker is rescued here once at a time (`_under_way`). The judge reports it again while its sessions are told, and
   a look for stray jobs may find it. A second walk would take jobs as started that did not start (`first`).

If the server refuses to move a job, as because a trigger of the application raises, that job stays where it is, and
every other one is moved (see mover). It is tried again with the next rescue. If a rescue of a worker has to rest after
many such jobs, the next one begins behind these. If an open transaction has inserted the id of a job, as after a
restore, the leader looks for stray jobs again soon: that job goes when the transaction has ended.

If the rescuing worker dies between these steps, stray jobs are left, or an unmarked row that the next judge acts on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from functools import partial
from math import inf
from typing import Any

import psycopg

from pgqueue.database.backoff import of_data, transient, without_values
from pgqueue.database.row_errors import refuses_row
from pgqueue.database.sessions import Session
from pgqueue.database.statements import Row, Statement
from pgqueue.plain_text import plural
from pgqueue.steady_clock import monotonic
from pgqueue.worker.left_alone import LeftAlone, Notice
from pgqueue.worker.mover import Mover

log = logging.getLogger("pgqueue")

BATCH = 1_000
# If an old snapshot is open, a look for stray jobs walks the dead rows of all jobs since, and claims wait for it. Then
# once a minute is too often: looks take a quarter of a percent of the time, but come at least every SELDOM_SECONDS.
STRAYS_SECONDS, DEAR_SHARE, SELDOM_SECONDS = 60.0, 400, 300.0
END_PAUSES = (0.02, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 1.6)
"""How long a session of a dead worker is given to end before it is told again, in seconds."""
AGAIN_SECONDS = 5.0
"""When the next look for stray jobs comes if one was left because an open transaction has its id."""
# After this many reports of the judge (a third of a lease apart) a worker that does not lead does the rescue itself.
REPORTS = 3
GRANT = (
    "if its process is only stopped, it keeps its locks. Let all workers use one role, or GRANT pg_signal_backend, "
    "pg_read_all_stats to theirs; sessions of a superuser can be ended by a superuser only"
)


class Rescue:
    """Rescues jobs over the given session. The caller decides when."""

    def __init__(
        self,
        session: Session,
        *,
        notify: bool,
        rescued: Callable[[], None],
        acted: Callable[[], None] = lambda: None,
    ) -> None:
        self.jobs = 0
        """Number of jobs this worker has given back."""
        self._session = session
        self._notify = notify
        self._rescued = rescued
        self._acted = acted
        self._reports: dict[int, int] = {}
        self._notice = Notice("cannot be given back")
        self._left: dict[int, LeftAlone[int]] = {}
        """Of a worker: the jobs that the last rescue left alone before it rested; the next one begins behind them."""
        self._under_way: set[int] = set()
        """Workers that are being rescued here."""
        self._stuck: dict[int, int] = {}
        """Rescued workers with sessions that have not ended yet, each with its counter."""
        self._turn = asyncio.Lock()
        """Held for a step of a rescue, and never in a pause."""
        self._strays_at = 0.0
        self.woken = asyncio.Event()
        """Set if a rescue has left a job that `strays` should come back to soon."""
        self._again_soon = False
        """Whether a job was left because an open transaction has its id."""

    async def seen(self, dead: list[tuple[int, int]], *, leads: bool) -> None:
        """Act on the dead workers that the judge reports with every heartbeat, as (worker id, counter).

        If we lead, or the dead worker still holds the lead, the rescue comes at once. Else it comes with report number
        REPORTS.
        """
        # The next report may come before all of these are rescued: it counts on, and takes nothing away here.
        reports = self._reports = {worker_id: self._reports.get(worker_id, 0) + 1 for worker_id, _ in dead}
        due = [
            (worker_id, beat)
            for worker_id, beat in dead
            if worker_id not in self._under_way
            and (
                leads
                or reports[worker_id] >= REPORTS
                or await self._tried(worker_id, partial(self._leading, worker_id))
            )
        ]
        await _together(self._tried(worker_id, partial(self._act, worker_id, beat)) for worker_id, beat in due)

    async def _tried(self, worker_id: int, step: Callable[[], Awaitable[bool]]) -> bool:
        """What this step of a rescue answers. False if it has failed, and the next heartbeat may try again."""
        try:
            return await step()
        except Exception as error:
            if not (transient(error) or of_data(error) or refuses_row(error)):
                raise
            log.warning("rescue of worker %d: %s; the next heartbeat tries again", worker_id, without_values(error))
            return False

    async def _led(self, worker_id: int) -> bool:
        return await self._tried(worker_id, partial(self._leading, worker_id))

    async def _act(self, worker_id: int, beat: int) -> bool:
        done = await self.rescue(worker_id, beat)
        self._acted()
        return done

    async def _leading(self, worker_id: int) -> bool:
        [[(leads,)]] = await self._session.run(self._session.link.statement("rescue_leader", worker_id=worker_id))
        return bool(leads)

    async def rescue(self, worker_id: int, beat: int, why: str = "gave no sign of life") -> bool:
        """Rescue the jobs of a worker whose counter was `beat`.

        False if the counter has moved since, the row is gone, or this worker is being rescued here.
        """
        if worker_id in self._under_way:
            return False
        self._under_way.add(worker_id)
        try:
            await self._disarm(worker_id, beat)
            async with self._turn:
                return await self._give_back(worker_id, beat, why)
        finally:
            self._under_way.discard(worker_id)

    async def rescue_all(self, dead: Iterable[tuple[int, int]], why: str) -> None:
        """Rescue the jobs of these workers, (worker id, counter), all at once."""
        await _together(self.rescue(worker_id, beat, why) for worker_id, beat in dead)

    async def _give_back(self, worker_id: int, beat: int, why: str) -> bool:
        link = self._session.link
        locked, _ = await self._session.run(
            link.statement("rescue_lock", worker_id=worker_id, beat=beat),
            link.statement("rescue_mark", worker_id=worker_id, beat=beat),
        )
        if not locked:
            return False
        moved = await self._move(worker_id)
        if self._again_soon:
            self.woken.set()
        jobs = plural(moved, "of its jobs was", "of its jobs were")
        log.warning("worker %d %s: %s given back", worker_id, why, jobs)
        return True

    async def _disarm(self, worker_id: int, beat: int) -> None:
        """End the worker's sessions. Sessions we may not end keep their locks; the jobs are rescued all the same."""
        try:
            told, refused = await self._tell(worker_id, beat)
            for pause in END_PAUSES:
                if not told:
                    break
                await asyncio.sleep(pause)
                told, refused = await self._tell(worker_id, beat)
        except psycopg.errors.InsufficientPrivilege as error:
            log.warning("worker %d: its sessions could not be ended: %s; %s", worker_id, without_values(error), GRANT)
            return
        except psycopg.DataError as error:
            why = without_values(error)
            log.warning("worker %d: its list of sessions cannot be read, so none was ended: %s", worker_id, why)
            return
        if refused:
            log.warning("worker %d: %d of its sessions could not be ended; %s", worker_id, refused, GRANT)
        if told:
            self._stuck[worker_id] = beat
            log.warning(
                "worker %d: %s not ended in %.0f s: its locks stay until then",
                worker_id,
                plural(told, "session of it has", "sessions of it have"),
                sum(END_PAUSES),
            )

    async def _tell(self, worker_id: int, beat: int) -> tuple[int, int]:
        """Tell its sessions to end. Answers how many were told, and how many could not be."""
        async with self._turn:
            [[(told, refused)]] = await self._session.run(
                self._session.link.statement("rescue_disarm", worker_id=worker_id, beat=beat)
            )
        return told, refused

    async def strays(self) -> float | None:
        """Rescue jobs claimed by workers that are already marked dead. Sessions that have not ended are told again.

        Answers the seconds until it should come again, if a job was left that may go soon.
        """
        for worker_id, beat in list(self._stuck.items()):
            try:
                told, _ = await self._tell(worker_id, beat)
            except (psycopg.errors.InsufficientPrivilege, psycopg.DataError):  # the rescue has said so
                told = 0
            if not told:
                self._stuck.pop(worker_id, None)
        if monotonic() < self._strays_at:
            return None
        self._again_soon = False
        link = self._session.link
        [found] = await self._session.run(link.statement("rescue_strays"))
        seldom = min(DEAR_SHARE * self._session.took, SELDOM_SECONDS)
        self._strays_at = monotonic() + seldom if seldom > STRAYS_SECONDS else 0.0
        for (worker_id,) in found:
            if worker_id in self._under_way:
                continue
            if moved := await self._move(worker_id):
                jobs = plural(moved, "job that it had claimed meanwhile was", "jobs that it had claimed meanwhile were")
                log.warning("worker %d is dead: %s given back", worker_id, jobs)
        return AGAIN_SECONDS if self._again_soon else None

    async def _move(self, worker_id: int) -> int:
        """Give the jobs of this worker back, in batches. A job that the server refuses to move stays, and no other."""
        moved, link = 0, self._session.link
        left = self._left.pop(worker_id, None) or LeftAlone[int](self._notice, seconds=inf)

        def moves(n: int, passed: str) -> list[Statement[list[Row]]]:
            which = {"worker_id": worker_id, "n": n, "first": moved == 0, "passed": passed}
            return [link.statement("rescue_jobs", **which, notify=self._notify)]

        def first(passed: str) -> Statement[list[Row]]:
            return link.statement("rescue_first", worker_id=worker_id, passed=passed)

        mover = Mover(
            self._session,
            notify=self._notify,
            unfit=lambda: link.statement("rescue_refuse_unfit", worker_id=worker_id, notify=self._notify),
        )
        async for [[(count, *_)]] in mover.walk(BATCH, left, moves, first):
            moved += int(count)
        if mover.rested:  # `strays` comes back to those behind them
            self._left[worker_id] = left
        if mover.met_open_id:
            self._again_soon = True
        self.jobs += moved
        if moved:
            self._rescued()
        return moved


async def _together(rescues: Iterable[Coroutine[Any, Any, object]]) -> None:
    """Run all of them to their ends; then raise the first error, if there was one."""
    for outcome in await asyncio.gather(*rescues, return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome
