"""Keeps history bounded: advances the rings, which throws away their oldest leaf.

Runs in the worker that leads; `pgqueue prune` advances rings, too. A round here also deletes old rows of waiting
clients, rows that say nothing any more (`_tidy`), and unique keys that are left over. A worker that has just taken the
lead does what jobs may wait for, and leaves the last two to a second round, soon after.

Advancing is one transaction inside the database: it truncates the next leaf and moves to it, or does neither. It waits
at most 50 ms for a reader of history, so that no session queues behind it. If that fails, it is tried again in the
next round.

If the server's clock was ahead when a ring turned, and was set back, the ring seems to have turned in a time to come.
It would not turn before that time, and history would grow. So its leaf is then counted from now on. That is done when
it has seemed so for an hour: a clock that is behind for a moment looks the same, and a leaf would be thrown away early.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from time import monotonic

import psycopg

from pgqueue.database.backoff import jittered, persist, wait
from pgqueue.database.sessions import Session
from pgqueue.plain_text import plural

log = logging.getLogger("pgqueue")

ROUND_SECONDS = 60.0
SECOND_SECONDS = 15.0
"""From the first round of a new leader to its second."""
OTHERS_SECONDS = 300.0
READ_SECONDS = 5.0
KEYS_MOST, KEYS_SECONDS = 1_000, 1.0
LIMITERS_MOST, REST_SECONDS = 50_000, 3_600.0
AUDIT_AT_ONCE, AUDIT_DAYS, AUDIT_MOST = 10_000, 90, 1_000_000
BULKS_AT_ONCE = 100
DISCARDED_MOST = 50_000
AHEAD_SECONDS = 3_600.0
"""For so long, by this machine's steady clock, a ring must seem to have turned in a time to come."""


class Pruner:
    """The slow round of the leader: rings, old keys, and the duty given as `also`."""

    def __init__(self, session: Session, *, leads: Callable[[], bool], also: Callable[[], Awaitable[None]]) -> None:
        self._session = session
        self._leads = leads
        self._also = also
        self._others_at = monotonic() + jittered(OTHERS_SECONDS)
        self._keys_after = ""
        self._ahead: dict[str, float] = {}
        """The rings that seem to have turned in a time to come, and since when, by `monotonic`."""
        self._wake = asyncio.Event()
        self._new = False
        """Whether this worker leads since a moment ago."""

    def wake(self) -> None:
        """This worker leads now: look at once for what the last leader left undone."""
        self._new = True
        self._wake.set()

    async def run(self) -> None:
        """One round a minute until cancelled; sooner after a failed one."""
        await persist(self._step, name="maintenance", answers=self._session.answers, past_data=True)

    async def _step(self) -> None:
        self._wake.clear()
        await wait(self._wake, await self.round())

    async def round(self) -> float:
        """Do one round; return the seconds until the next one, few if a reader was in the way.

        A worker that does not lead does a round every 5 minutes: the leader may not do its duty although it lives.
        """
        if not self._leads() and monotonic() < self._others_at:
            return jittered(ROUND_SECONDS)
        self._others_at = monotonic() + jittered(OTHERS_SECONDS)
        link = self._session.link
        restore, rings = link.statement("registration_restore_settings"), link.statement("pruner_rings")
        [[(restored,)], _, found] = await self._session.run(restore, link.statement("pruner_waiters"), rings)
        if restored:
            rows = plural(restored, "row is", "rows are")
            log.warning("something has emptied the tables ring or duty: %s put back", rows)
        blocked = await self._blocked([kind for kind, _, _, _, _, due in found if due])
        await self._count_anew([kind for kind, _, _, _, age, _ in found if age < 0])
        new, self._new = self._new, False
        if not new:
            await self._tidy()
            await self._keys()
        await self._also()  # last: a job that the server refuses to move must not keep a ring from turning
        return READ_SECONDS if blocked else jittered(min(SECOND_SECONDS, ROUND_SECONDS) if new else ROUND_SECONDS)

    async def _keys(self) -> None:
        """Walk on through the unique keys for a second, from where the last round stopped. Remove those left over."""
        link, until = self._session.link, monotonic() + KEYS_SECONDS
        removed, looked = 0, KEYS_MOST
        while looked == KEYS_MOST and monotonic() < until:
            sweep = link.statement("pruner_unique_keys", after=self._keys_after, n=KEYS_MOST)
            try:
                [[(last, looked, gone, _)]] = await self._session.run(sweep)
            except psycopg.errors.InsufficientPrivilege:  # granted before there were unique keys
                log.error("unique keys are not tidied up: this role needs its rights again, `pgqueue grants`")
                return
            self._keys_after = last if looked == KEYS_MOST else ""
            removed += gone
        if removed:
            log.info("unique keys: %d left over were removed", removed)

    async def _tidy(self) -> None:
        """Remove rows that say nothing any more: of rates at rest, of the record, of operations by filter, of discarded
        keys. In one message."""
        link = self._session.link
        rates = link.statement("pruner_rates", seconds=REST_SECONDS, n=LIMITERS_MOST)
        audit = link.statement("pruner_audit", n=AUDIT_AT_ONCE, days=AUDIT_DAYS, most=AUDIT_MOST)
        bulks = link.statement("pruner_bulk", n=BULKS_AT_ONCE, days=AUDIT_DAYS)
        keys = link.statement("pruner_discarded_keys", n=DISCARDED_MOST)
        try:
            [*_, [(gone,)]] = await self._session.run(rates, audit, bulks, keys)
        except psycopg.errors.InsufficientPrivilege:  # granted before there were such tables
            log.error("rates, the record and discarded keys are not tidied up: grant this role anew, `pgqueue grants`")
            return
        if gone:
            log.info("keys of discarded jobs: %d that have expired were removed", gone)

    async def _count_anew(self, ahead: list[str]) -> None:
        """Count the leaves of these rings from now on, if the rings have been ahead for long."""
        now, link = monotonic(), self._session.link
        self._ahead = {kind: self._ahead.get(kind, now) for kind in ahead}
        for kind in [kind for kind, since in self._ahead.items() if now - since >= AHEAD_SECONDS]:
            [rows] = await self._session.run(link.statement("pruner_count_anew", kind=kind))
            if rows:
                said = (
                    "history %s: its leaf had begun in a time to come, and is counted from now on; it would have grown "
                )
                log.warning(said + "until then. Was the clock of the server set back?", kind)

    async def _blocked(self, due: list[str]) -> bool:
        """Advance the rings that are due; return whether a reader prevented one."""
        blocked = False
        for kind in due:
            blocked |= not await self._advance(kind)
        return blocked

    async def _advance(self, kind: str) -> bool:
        """Advance this ring if it is due. False if a reader is in the way."""
        link = self._session.link
        [[(advanced,)]] = await self._session.run(link.statement("pruner_advance", kind=kind, forced=False))
        if advanced is None:
            log.info("history %s: a reader holds the oldest leaf; trying again in %g s", kind, READ_SECONDS)
        elif advanced:
            log.info("history %s: the oldest leaf was thrown away", kind)
        return advanced is not None
