"""Hears NOTIFY on a connection of its own and wakes the others. A hint only: everything works without it.

The connection is in autocommit mode and does nothing else, so that it never holds a snapshot. It is pinged, because a
half-open socket says nothing; it reconnects with jitter for ever; and each (re)LISTEN is followed by a fetch, for
what was missed meanwhile. The ping is also where leadership is tried for: the advisory lock lives as long as this
session.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from psycopg import AsyncConnection, sql

from pgqueue.loops import jittered, persist
from pgqueue.sessions import Link, connect, identify, send
from pgqueue.statements import Statement

log = logging.getLogger("pgqueue")

# Channels of the schema that are no queue's: a queue's name cannot begin with a colon.
SCHEDULED = ":scheduled"
CONTROL = ":control"
LED = ":led"
"""Never notified: what `heard` is told when this worker has taken the lead."""
PING_SECONDS = 10.0
LEADER_PING_SECONDS = 10.0
PING_ANSWER_SECONDS = 10.0


class Notifier:
    """Listens for some queues; calls `heard(channel, payload)` for each notification, and with "" after each LISTEN."""

    def __init__(
        self,
        link: Link,
        queues: Sequence[str],
        *,
        heard: Callable[[str, str], None],
    ) -> None:
        self.leads = False
        """Whether this session holds the leader's lock."""
        self.identity: tuple[int, str] | None = None
        self._link = link
        self._channels = [f"{link.schema}.{name}" for name in (*queues, SCHEDULED, CONTROL)]
        self._heard = heard

    async def run(self) -> None:
        """Listen until cancelled."""
        await persist(self._listen, name="listen")

    async def _listen(self) -> None:
        conn = await connect(self._link, "pgqueue listen")
        try:
            self.identity = await identify(conn, self._link, patience=PING_ANSWER_SECONDS)
            await send(conn, self._link, *map(_listen_to, self._channels), patience=PING_ANSWER_SECONDS)
            self._heard("", "")
            while True:
                await self._ping(conn)
                async for note in conn.notifies(timeout=jittered(LEADER_PING_SECONDS if self.leads else PING_SECONDS)):
                    self._heard(note.channel.removeprefix(f"{self._link.schema}."), note.payload)
        finally:
            self.leads, self.identity = False, None
            await conn.close()

    async def _ping(self, conn: AsyncConnection[Any]) -> None:
        """Ask for an answer, and for the lead if we do not have it."""
        ping = self._link.statement("leader_keep" if self.leads else "leader_try")
        [[(leads,)]] = await send(conn, self._link, ping, patience=PING_ANSWER_SECONDS)
        if leads and not self.leads:
            self.leads = True
            log.info("this worker leads now: it promotes due jobs, rescues, prunes")
            self._heard(LED, "")


def _listen_to(channel: str) -> Statement[None]:
    return Statement(sql.SQL("LISTEN {}").format(sql.Identifier(channel)).as_string(), {}, lambda rows: None)
