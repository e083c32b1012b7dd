"""Keeps history bounded: advances the rings, which throws away their oldest leaf. And removes rows that say nothing any
more, from tables beside: each is a duty of its own.

Duties of the leader, as housekeeping; `pgqueue prune` advances rings, too.

Advancing is one transaction inside the database: it truncates the next leaf and moves to it, or does neither. It waits
at most 50 ms for a reader of history, so that no session queues behind it. If that fails, it is tried again in the
next round.

If the server's clock was ahead when a ring turned, and was set back, the ring seems to have turned in a time to come.
It would not turn before that time, and history would grow. So its leaf is then counted from now on. That is done when
it has seemed so for an hour: a clock that is behind for a moment looks the same, and a leaf would be thrown away early.
"""

from __future__ import annotations

import logging
from typing import Any

import psycopg

from pgqueue.database.backoff import described, is_loss
from pgqueue.database.row_errors import Kept, require_gone
from pgqueue.database.sessions import Session
from pgqueue.database.triggers import trigger_of
from pgqueue.plain_text import plural
from pgqueue.steady_clock import monotonic

log = logging.getLogger("pgqueue")

ROUND_SECONDS = 60.0
TIDY_SECONDS = 15.0
"""So long, or twice, a new leader waits with what no job waits for."""
READ_SECONDS = 5.0
KEYS_MOST, KEYS_SECONDS = 1_000, 1.0
LIMITERS_MOST, REST_SECONDS = 50_000, 3_600.0
AUDIT_AT_ONCE, AUDIT_DAYS, AUDIT_MOST = 10_000, 90, 1_000_000
BULKS_AT_ONCE = 100
DISCARDED_MOST = 50_000
FLOWS_MOST, FLOWS_SECONDS, NODES_MOST, KEPT_MOST = 1_000, 1.0, 50_000, 50_000
MORE_SECONDS = 1.0
"""So soon a walk that forgets flows goes on. With a round each minute, 70 new flows a second are too many."""
WORKERS_AT_ONCE, TICKS_AT_ONCE = 10_000, 20_000
VERSION_DAYS, VERSIONS_MOST = 30, 1_000
AHEAD_SECONDS = 3_600.0
"""For so long, by this machine's steady clock, a ring must seem to have turned in a time to come."""


FORGOTTEN: dict[str, tuple[str, str, dict[str, Any]]] = {
    "waiters": ("job_waiter", "pruner_waiters", {}),
    "dead_workers": ("worker", "pruner_workers", {"n": WORKERS_AT_ONCE}),
    "declarations": ("declaration", "pruner_declarations", {}),
    "old_ticks": ("tick", "pruner_ticks", {"n": TICKS_AT_ONCE}),
    "rates": ("limiter", "pruner_rates", {"seconds": REST_SECONDS, "n": LIMITERS_MOST}),
    "record": ("audit", "pruner_audit", {"n": AUDIT_AT_ONCE, "days": AUDIT_DAYS, "most": AUDIT_MOST}),
    "operations_ended": ("bulk", "pruner_bulk", {"n": BULKS_AT_ONCE, "days": AUDIT_DAYS}),
    "versions": ("version_start", "pruner_versions", {"days": VERSION_DAYS, "most": VERSIONS_MOST}),
    "discarded_keys": ("discarded_key", "pruner_discarded_keys", {"n": DISCARDED_MOST}),
}
"""The duties that delete old rows, with the table and the statement: of waiting clients, of dead workers and what they
have declared, of ticks, of rates at rest, of the record, of operations by filter, of versions, of discarded keys. A row
that the application keeps, by a foreign key or a trigger, keeps no other row, and no other duty."""


STEPS_MOST = 5_000
"""Jobs with durable steps that one round looks at: a round each minute, so 7 million a day."""


class Pruner:
    """Prunes over the given session."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._keys_after = ""
        self._flows_after = self._kept_after = 0
        self._steps_after = 0
        self._ahead: dict[str, float] = {}
        """The rings that seem to have turned in a time to come, and since when, by `monotonic`."""

    async def rings(self) -> float | None:
        """Advance the rings that are due. Put back their settings first, if something has emptied the table. Few
        seconds until the next round if a reader was in the way."""
        link = self._session.link
        [[(restored,)], found] = await self._session.run(
            link.statement("registration_restore_settings"), link.statement("pruner_rings")
        )
        if restored:
            rows = plural(restored, "row is", "rows are")
            log.warning("something has emptied the tables ring or duty: %s put back", rows)
        try:
            blocked = await self._blocked([(kind, (bin + 1) % leaves) for kind, leaves, bin, _, _, due in found if due])
        finally:
            await self._count_anew([kind for kind, _, _, _, age, _ in found if age < 0])
        return READ_SECONDS if blocked else None

    async def keys(self) -> None:
        """Walk on through the unique keys for a second, from where the last round stopped. Remove those left over."""
        link, until = self._session.link, monotonic() + KEYS_SECONDS
        removed, looked = 0, KEYS_MOST
        while looked == KEYS_MOST and monotonic() < until:
            sweep = link.statement("pruner_unique_keys", after=self._keys_after, n=KEYS_MOST)
            [[(last, looked, gone, _)]] = await self._session.run(sweep)
            self._keys_after = last if looked == KEYS_MOST else ""
            removed += gone
        if removed:
            log.info("unique keys: %d left over were removed", removed)

    async def flows(self) -> float | None:
        """Walk on through the flows for a second, from where the last round stopped. Forget those without a job. Few
        seconds until the next round if there may be more of them."""
        until, forgotten = monotonic() + FLOWS_SECONDS, 0
        while True:
            bounds = {"n": FLOWS_MOST, "most": NODES_MOST}
            walk = self._session.link.statement("pruner_flows", after=self._flows_after, **bounds)
            [[(last, nodes, gone, *answer)]] = await self._session.run(walk)
            forgotten += nodes + gone
            if whole := nodes < NODES_MOST:  # else something may be left of these flows
                self._flows_after = last or 0
            require_gone("flow", (gone, *answer))
            if whole and last is None:
                return None
            if monotonic() >= until:
                return MORE_SECONDS if forgotten else None

    async def kept_of_flows(self) -> None:
        """Walk on through what is kept of flows for a second, from where the last round stopped. Forget what is kept of
        flows in which no job waits, and none can wait again."""
        until, link = monotonic() + FLOWS_SECONDS, self._session.link
        while True:
            walk = link.statement("pruner_flow_kept", after=self._kept_after, n=FLOWS_MOST, most=KEPT_MOST)
            [[(last, gone, *answer)]] = await self._session.run(walk)
            if whole := gone < KEPT_MOST:  # else something may be left of these flows
                self._kept_after = last or 0
            require_gone("flow_kept", (gone, *answer))
            if (whole and last is None) or monotonic() >= until:
                return

    async def steps(self) -> None:
        """Delete the durable steps of jobs that history has forgotten, from where the last round stopped."""
        sweep = self._session.link.statement("durable_steps_sweep", after=self._steps_after, n=STEPS_MOST)
        [[(last,)]] = await self._session.run(sweep)
        self._steps_after = last or 0

    async def forget(self, what: str) -> None:
        """Delete old rows, one of FORGOTTEN."""
        table, name, bounds = FORGOTTEN[what]
        [[answer]] = await self._session.run(self._session.link.statement(name, **bounds))
        require_gone(table, answer)

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

    async def _blocked(self, due: list[tuple[str, int]]) -> bool:
        """Advance the rings that are due, each by itself; return whether a reader prevented one. Then raise what the
        server has said to the first one that it refused."""
        blocked, refused = False, list[tuple[str, psycopg.Error]]()
        for kind, leaf in due:
            try:
                blocked |= not await self._advance(kind)
            except psycopg.Error as error:
                if is_loss(error):
                    raise
                refused.append((f"a TRUNCATE of leaf {leaf} of history {kind} is refused", error))
        for said, first in refused:
            if isinstance(first, psycopg.errors.InsufficientPrivilege) and trigger_of(first) is None:
                raise first
            raise Kept(f"{said}: {described(first)}") from first
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
