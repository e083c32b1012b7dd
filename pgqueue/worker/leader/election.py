"""Which worker leads: the worker whose listening session holds the advisory lock of the schema.

Leadership is only an optimisation. Every duty is safe when two workers do it, and a worker that finds a duty overdue
does it. The lock lives as long as the notifier's session. `Election` opens no connection of its own:

- The notifier sends `ping` on its session.
- The fetcher sends `statements` beside its own: they ask whether the lock is free. If the leader was killed, another
  worker leads within one poll.

If this worker has no session that could hold the lock, it does the duties without: it does not listen, or its listener
has not worked for a while. Else a fleet without a working LISTEN would have no leader, and nothing would say so. The
same holds if the lock is held by a stranger, a session that is no worker's. A ping that does not win asks for that.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from pgqueue.database.sessions import Link
from pgqueue.database.statements import Statement
from pgqueue.steady_clock import monotonic

log = logging.getLogger("pgqueue")

ASK_SECONDS = 1.0
SAID_SECONDS = 60.0
STRANGER = (
    "the leader's lock is held by session %d of the server, which is no worker's: until it ends "
    "(SELECT pg_terminate_backend(%d)), every worker does the leader's duties"
)


class Election:
    """Whether this worker leads, and when it should try for the lead."""

    def __init__(self, link: Link, *, held: bool = True) -> None:
        self.elected = False
        """Whether the notifier's session holds the leader's lock."""
        self._held = held
        self.sought = asyncio.Event()
        """Set when this worker should try for the lead at once."""
        self._link = link
        self._entered = False
        self._ask_at = 0.0
        self._say_at = 0.0

    def leads(self) -> bool:
        """Whether this worker does the leader's duties. Where no election is `held`, for there is no LISTEN and so no
        session that could hold the lock, every worker does them."""
        return self.elected or not self._held

    @property
    def entered(self) -> bool:
        """Whether the notifier's session works."""
        return self._entered

    def enter(self) -> None:
        """The notifier's session is known to the other workers: from now on this worker may lead."""
        self._entered = self._held = True

    def dispense(self) -> bool:
        """This worker has no session that could hold the lock: until it has, it does the duties without. Returns
        whether that is new."""
        new, self._held = self._held, False
        return new

    def leave(self) -> None:
        """The notifier's session has ended, and with it the lock."""
        self.elected = self._entered = False

    def try_now(self) -> None:
        """There may be no leader: try for the lead now."""
        if not self.elected:
            self.sought.set()

    def statements(self) -> list[Statement[None]]:
        """The statement that asks whether the lock is free, once a second; to be sent beside other statements."""
        if self.elected or not self._entered or monotonic() < self._ask_at:
            return []
        self._ask_at = monotonic() + ASK_SECONDS
        return [Statement(self._link.statement("election_free").sql, {}, self._answered)]

    def ping(self) -> Statement[Any]:
        """The statement that keeps the notifier's session alive, and takes the lock if it is free."""
        return self._link.statement("election_keep" if self.elected else "election_try")

    def beside_ping(self) -> list[Statement[Any]]:
        """What is sent behind `ping`: which strangers hold the lock. `strangers` takes the answer."""
        return [] if self.elected else [self._link.statement("election_strangers")]

    def strangers(self, rows: list[tuple[Any, ...]]) -> bool:
        """Take the answer to `beside_ping`; return whether this worker does the duties without the lead from now on."""
        if not rows or self.elected:
            self._held = True
            return False
        if monotonic() >= self._say_at:
            self._say_at = monotonic() + SAID_SECONDS
            log.warning(STRANGER, rows[0][0], rows[0][0])
        return self.dispense()

    def won(self, leads: bool) -> bool:
        """Take the answer to `ping`; return whether this worker has just taken the lead."""
        if not leads or self.elected:
            return False
        self.elected = self._held = True
        log.info("this worker leads now: it promotes due jobs, rescues, prunes")
        return True

    def _answered(self, rows: list[tuple[Any, ...]]) -> None:
        if rows[0][0]:
            self.try_now()
