"""Watches how much of the server's NOTIFY queue is in use, so that no wake-up that was left out is waited for.

Statements of pgqueue notify only while less than 0.9 of the queue is in use (`may_notify`). The fetcher polls, but the
other services sleep for longer and rely on being told: of a job with a time to start, a schedule, a request to stop.

1. Each worker asks for the use now and then, beside what its fetcher sends anyway. From a half on it asks at every
   poll. If the fetcher has no room, and so sends nothing, it asks by itself. Heartbeats ask, too (`heard`).
2. At each of these polls, and at the one after, it wakes its services as after a new LISTEN: all look for themselves.
3. So what was told to nothing is found within a poll. The queue has 8 GB: it cannot go from a half to 0.9 between two
   looks. A server with a far smaller queue may do that, and then a service looks when it would have looked anyway.

The worker that leads says so in the log, once a minute, with the session that holds the queue back. pg_stat_activity
does not know which sessions listen. The server does: a NOTIFY while the queue is half full or more is answered by a
warning that names the session which is furthest behind (once in 5 s, whichever session notifies). So a NOTIFY is sent
for it, on a connection of its own. If that warning went to another session, the oldest transaction is named instead.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
from collections.abc import Callable
from typing import Any

from psycopg import Error
from psycopg.errors import Diagnostic

from pgqueue.database.backoff import jittered
from pgqueue.database.notify_queue import is_full
from pgqueue.database.sessions import Session, connect
from pgqueue.database.statements import Row, Statement
from pgqueue.steady_clock import monotonic
from pgqueue.worker.state import WorkerState

log = logging.getLogger("pgqueue")

LOOK_SECONDS = 5.0
WARN_SECONDS = 60.0
BUSY_POLLS = 2.5
"""The fetcher's looks are one to two polls apart. If none has come for so many, the fetcher has no room."""
HALF, FULL = 0.5, 0.9
"""From where on every poll looks, and from where on nothing is notified."""
# Not guarded as all others are, for its failure is an answer too. No session listens on this channel.
ASKING: Statement[Any] = Statement('NOTIFY "pgqueue.:holder"', {}, lambda rows: None)
_PID = re.compile(r"\d+")


class NotifyWatch:
    """Looks over the given session; `told_nothing` wakes what sleeps until it is told."""

    def __init__(
        self, session: Session, state: WorkerState, *, told_nothing: Callable[[], None], leads: Callable[[], bool]
    ) -> None:
        self.usage = 0.0
        """The share of the queue that was in use at the last look."""
        self._session = session
        self._state = state
        self._told_nothing = told_nothing
        self._leads = leads
        self._before = 0.0
        self._due = monotonic()
        self.woken = asyncio.Event()
        self._answer = False
        """Whether there is an answer that was not acted on."""
        self._warn_at = 0.0

    def statements(self) -> list[Statement[None]]:
        """The statement that asks for the use, if it is due; to be sent beside other statements."""
        if monotonic() < self._due:
            return []
        self._due = monotonic() + self._pause()
        usage = self._session.link.statement("notify_watch_usage")
        return [Statement(usage.sql, usage.params, self._answered)]

    def _pause(self) -> float:
        poll = self._state.settings.poll
        return random.uniform(poll / 2, poll) if self.usage >= HALF else jittered(max(LOOK_SECONDS, poll))

    def _answered(self, rows: list[Row]) -> None:
        self.heard(rows[0][0])

    def heard(self, usage: float) -> None:
        """So much of the queue is in use."""
        self._before, self.usage = self.usage, usage
        self._due = monotonic() + self._pause()
        self._answer = True
        self.woken.set()

    async def round(self) -> float:
        """Act on the last answer, or ask by itself if none has come; answer the seconds until it asks by itself."""
        if self._answer:
            await self._act()
        elif monotonic() >= self._late_at():
            await self.look()
        return max(0.0, self._late_at() - monotonic())

    def _late_at(self) -> float:
        patience = 0.0 if self.usage >= HALF else BUSY_POLLS * self._state.settings.poll
        return self._due + patience

    async def look(self) -> None:
        """Ask for the use now; wake the others, and warn, if it is high."""
        self._due = 0.0
        await self._session.run(*self.statements())
        await self._act()

    async def _act(self) -> None:
        self._answer = False
        if max(self._before, self.usage) >= HALF:
            self._told_nothing()
        if self.usage >= FULL and self._leads() and monotonic() >= self._warn_at:
            self._warn_at = monotonic() + WARN_SECONDS
            await self._warn()

    async def _warn(self) -> None:
        pid = await self._furthest_behind()
        [rows] = await self._session.run(self._session.link.statement("notify_watch_holder", pid=pid))
        holder = "no session is in a transaction now"
        if rows:
            found, database, role, application, state, seconds = rows[0]
            for_long = "" if seconds is None else f" for {seconds:.0f} s"
            shown = f"session {found} ({application or 'no name'}, {role} in {database}, {state or 'active'}{for_long})"
            holder = f"{shown} holds it back" if pid else f"the oldest transaction is that of {shown}"
        log.warning(
            "the server's NOTIFY queue is %.0f %% full: %s. A session that listens must not stay in a transaction: end "
            "it, with pg_terminate_backend if need be. Until then workers are not told of new jobs, but look every "
            "%g s; an application's own NOTIFY fails its COMMIT when the queue is full",
            100 * self.usage,
            holder,
            self._state.settings.poll,
        )

    async def _furthest_behind(self) -> int | None:
        """The session that has read the least of the queue, as the server says; None if it does not say so now."""
        said: list[str] = []
        conn = await connect(self._session.link, "pgqueue notify")

        def note(diagnostic: Diagnostic) -> None:
            said.extend(_PID.findall(diagnostic.message_detail or ""))

        conn.add_notice_handler(note)
        try:
            await conn.ask([ASKING])
        except Error as error:
            if not is_full(error):
                raise
        finally:
            await conn.close()
        return int(said[0]) if said else None
