"""Hears NOTIFY on a connection of its own and wakes the others. A hint only: everything works without it.

The connection is in autocommit mode and does nothing else, so it never holds a snapshot. It is pinged, because a
half-open socket says nothing. It reconnects with jitter for ever. Each (re)LISTEN is followed by a fetch, for what was
missed meanwhile. The ping also tries for the leadership (`leader.election`).

Other workers must know the session before it may hold the leader's lock, or listen. `listed` waits for that; a worker
that had seemed dead waits for its new row. Why:

1. A leader that was stopped, not killed, would lead for ever, and no worker could end its session.
2. A session that listens and does not read keeps the server from forgetting any later notification. When the server's
   queue is full, transactions that notify cannot commit.

Through a pooler in transaction mode a LISTEN stays with some session of the server, and notifications go to any client.
So would the leader's lock: another worker takes it in the same session once more, and two lead. How that is found out,
before anything is listened to or locked:

1. If there is no pooler, the server's pid for this connection is that of each of its statements. Poolers make one up.
2. Behind a pooler a NOTIFY of another connection must come back, while this connection is idle. A pooler in session
   mode passes it on. One in transaction mode has no client then that it could pass it to.

If it does not come back, the listener says so and leaves. It tries again after some minutes: the server may have been
slow, or the pooler may be another one by then.

If its connection broke, a session is *left* (see sessions). Its lock is free as soon as any session of this worker has
sent its next message.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Sequence
from random import uniform
from typing import Any

from psycopg import Notify

from pgqueue.database.backoff import is_loss, jittered, transient, wait
from pgqueue.database.dead_link import hang_up
from pgqueue.database.pipeline import Wire
from pgqueue.database.sessions import Identity, Link, connect, identify, send, writable
from pgqueue.database.statements import Statement
from pgqueue.steady_clock import monotonic
from pgqueue.worker.leader.election import Election

log = logging.getLogger("pgqueue")

# Channels of the schema that belong to no queue: a queue's name cannot begin with a colon.
SCHEDULED = ":scheduled"
CONTROL = ":control"
LED = ":led"
"""Never notified: the channel that `heard` receives when this worker has taken the lead, or does the duties without."""
NAME = "listen"
"""Of the listener's session."""
PING_LEAST, PING_SECONDS = 18.0, 20.0
"""From ping to ping, at random. With the time for its answer a dead connection is noticed within 30 s."""
PING_ANSWER_SECONDS = 10.0
# If the listener has not worked for so long, this worker does the leader's duties without it.
DISPENSE_SECONDS = 30.0
ECHO = ":echo"
"""The channel of the NOTIFY that must come back through a pooler."""
ECHO_SECONDS = 5.0
UNLISTEN: Statement[Any] = Statement("UNLISTEN *", {}, list)
POOLED_SECONDS = 300.0
"""How long no LISTEN is tried where it did not work."""


POOLED = (
    "LISTEN does not work here: a pooler in transaction mode is in between. This worker polls, takes no lead, and does "
    "the leader's duties beside other workers. Give it a direct address for LISTEN, or off (--listen-dsn, "
    "PGQUEUE_LISTEN_DSN)"
)


def until_ping() -> float:
    """Seconds from one ping to the next."""
    return uniform(min(PING_LEAST, PING_SECONDS), PING_SECONDS)


class Pooled(Exception):
    """A pooler in transaction mode is in between: LISTEN does not work."""


class Notifier:
    """Listens for some queues; calls `heard(channel, payload)` for each notification, and with "" after each LISTEN.

    `listed` waits until the workers that would rescue us know our `identity`, and answers whether they do. `idle`: a
    database that sleeps ends the connection, and would be woken by the next one. So that waits for as long.
    """

    def __init__(
        self,
        link: Link,
        queues: Sequence[str],
        election: Election,
        *,
        heard: Callable[[str, str], None],
        listed: Callable[[], Awaitable[bool]],
        idle: float = 0.0,
    ) -> None:
        self.election = election
        self.identity: Identity | None = None
        self._link = link
        self._channels = (*queues, SCHEDULED, CONTROL)
        self._heard = heard
        self._listed = listed
        self._idle = idle
        self._worked_at = monotonic()
        self._said_pooled = False
        self._conn: Wire | None = None
        self._given_up: Wire | None = None
        """The connection that `step_down` has broken."""

    def step_down(self) -> bool:
        """Give up the lead: break the connection, so that the server ends the session. False if this worker does not
        lead by it. From any thread; the loop listens again when it can."""
        conn = self._conn
        if conn is None or not self.election.elected:
            return False
        self._given_up = conn
        hang_up(conn)
        return True

    async def run(self) -> None:
        """Listen until cancelled."""
        while True:
            try:
                await self._listen()
            except Pooled:
                if self.election.dispense():
                    self._heard(LED, "")
                if not self._said_pooled:
                    self._said_pooled = True
                    log.warning(POOLED)
                await asyncio.sleep(jittered(POOLED_SECONDS))
            except Exception as error:
                if not transient(error):
                    raise
                self._link.outage.lost(NAME, error)
                await asyncio.sleep(self._idle)
                await self._link.outage.waited(NAME)
                if monotonic() - self._worked_at > DISPENSE_SECONDS and self.election.dispense():
                    self._heard(LED, "")

    async def _listen(self) -> None:
        """Listen on one connection until it breaks. Raises what broke it; returns if `step_down` did."""
        conn = await connect(self._link, f"pgqueue {NAME}")
        try:
            await writable(conn, self._link)  # else no heartbeat goes through either
            self.identity = await self._identify(conn)
            if not await self._listed():
                raise TimeoutError("no heartbeat went through that would make this session known to other workers")
            if await self._identify(conn) != self.identity or (self.identity is None and not await self._echoes(conn)):
                raise Pooled
            if self.identity is not None:
                await send(conn, self._link, self._link.statement("sessions_idle"), patience=PING_ANSWER_SECONDS)
            self._conn = conn
            self.election.enter()
            conn.add_notify_handler(self._note)
            await send(conn, self._link, *map(self._link.listen, self._channels), patience=PING_ANSWER_SECONDS)
            self._heard("", "")
            while True:
                self.election.sought.clear()
                await self._ping(conn)
                self._worked_at = monotonic()
                self._link.outage.answered(NAME)  # only now: what comes before may succeed each time
                await self._listen_until_sought(conn)
        except Pooled:  # the session is another client's, too
            raise
        except Exception as error:  # the server may not have noticed: the session would lead for as long as it lives
            if self.identity is not None:
                self._link.left.add(self.identity)
            if conn is not self._given_up or not is_loss(error):
                raise
        finally:
            self._conn = None
            self.election.leave()
            self.identity = None
            await conn.close()

    async def _identify(self, conn: Wire) -> Identity | None:
        return await identify(conn, self._link, patience=PING_ANSWER_SECONDS)

    async def _echoes(self, conn: Wire) -> bool:
        """Whether a NOTIFY that another connection sends comes back on this one while it is idle."""
        token = secrets.token_hex(8)
        await send(conn, self._link, self._link.listen(ECHO), patience=PING_ANSWER_SECONDS)
        other = await connect(self._link, f"pgqueue {NAME}")
        try:
            echo = self._link.statement("election_echo", token=token, notify=True)
            [[(sent,)]] = await send(other, self._link, echo, patience=PING_ANSWER_SECONDS)
        finally:
            await other.close()
        heard = not sent  # the queue of notifications is full: this tells nothing
        if not heard:
            async for note in conn.notifies(timeout=ECHO_SECONDS):
                heard = heard or note.payload == token
                if heard:
                    break
        await send(conn, self._link, UNLISTEN, patience=PING_ANSWER_SECONDS)
        return heard

    async def _listen_until_sought(self, conn: Wire) -> None:
        """Hear notifications until the next ping is due, or wanted. A notification lost in between is only a hint."""
        with conn.hears() as broken:
            sought = asyncio.ensure_future(wait(self.election.sought, max(until_ping(), self._idle)))
            either: list[asyncio.Future[Any]] = [broken, sought]
            try:
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            finally:
                sought.cancel()
                await asyncio.wait([sought])
        if broken.done():
            broken.result()

    def _note(self, note: Notify) -> None:
        self._heard(note.channel.removeprefix(f"{self._link.schema}."), note.payload)

    async def _ping(self, conn: Wire) -> None:
        """Ask for an answer, and for the lead if this worker does not have it."""
        messages = [self.election.ping(), *self.election.beside_ping()]
        [[(leads,)], *strangers] = await send(conn, self._link, *messages, patience=PING_ANSWER_SECONDS)
        won = self.election.won(leads)
        if (strangers and self.election.strangers(strangers[0])) or won:
            self._heard(LED, "")
