"""Which worker leads: the one with the listening session that holds the advisory lock of the schema.

Leadership is an optimisation only. Every duty is safe when two workers do it, and a worker that finds a duty overdue
does it. The lock lives as long as the notifier's session, so `Election` never opens a connection of its own: the
notifier pings on its session (`ping`), and the fetcher asks beside its own statements whether the lock is free
(`asks`). So a leader that was killed has a successor within the time of a poll.
"""

from __future__ import annotations

import asyncio
import logging
from time import monotonic
from typing import Any

from pgqueue.database.sessions import Link
from pgqueue.database.statements import Statement

log = logging.getLogger("pgqueue")

ASK_SECONDS = 1.0


class Election:
    """Whether this worker leads, and when it should try for the lead."""

    def __init__(self, link: Link, *, held: bool = True) -> None:
        self.elected = False
        """Whether the notifier's session holds the leader's lock."""
        self._held = held
        self.sought = asyncio.Event()
        """Set when the lead should be tried for at once."""
        self._link = link
        self._entered = False
        self._ask_at = 0.0

    def leads(self) -> bool:
        """Whether this worker does the leader's duties. Where no election is `held`, for there is no LISTEN and so no
        session that could hold the lock, every worker does them."""
        return self.elected or not self._held

    def enter(self) -> None:
        """The notifier's session is known to the other workers: from now on this worker may lead."""
        self._entered = True

    def leave(self) -> None:
        """The notifier's session has ended, and with it the lock."""
        self.elected = self._entered = False

    def try_now(self) -> None:
        """No worker leads, or perhaps none does: try for the lead now."""
        if not self.elected:
            self.sought.set()

    def statements(self) -> list[Statement[None]]:
        """What this worker asks beside something else it sends, once a second: whether the lock is free."""
        if self.elected or not self._entered or monotonic() < self._ask_at:
            return []
        self._ask_at = monotonic() + ASK_SECONDS
        return [Statement(self._link.statement("election_free").sql, {}, self._answered)]

    def ping(self) -> Statement[Any]:
        """The statement that keeps the notifier's session alive, and takes the lock if it is free."""
        return self._link.statement("election_keep" if self.elected else "election_try")

    def won(self, leads: bool) -> bool:
        """Take the answer to `ping`; whether this worker has just taken the lead."""
        if not leads or self.elected:
            return False
        self.elected = True
        log.info("this worker leads now: it promotes due jobs, rescues, prunes")
        return True

    def _answered(self, rows: list[tuple[Any, ...]]) -> None:
        if rows[0][0]:
            self.try_now()
