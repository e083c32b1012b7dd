"""A glance: an idle worker that is told of one lane claims from that lane alone, at its cursor as it stands.

Part of the fetch, asked by the fetcher. It decides only: it does no I/O and has no clock (`now` is any monotonic time
in seconds).

**Why.** A fetch is two statements over all lanes, and what it answers is learnt before a job runs. A single job needs
neither: its notification names the queue, and carries the rank. A glance is one short statement of one lane.

**Why no job is lost, and none waits longer for it:**

1. It moves no cursor and remembers nothing. A row that it takes is gone. A row that it leaves is ahead as before.
2. A row at or below the cursor belongs to an id that the last fetch found in progress, or is an exception of the
   watermark, which has a way back of its own. The glance answers the snapshot of its claim. If such an id has ended by
   then, a fetch follows, unless this worker has taken all that may be its rows (`Watermark.missed`). If it ends later,
   the next glance, poll or wake sees that.
3. It comes only where nothing else may wait: no queue with room may have more jobs, exactly one lane was told, no start
   at zero is asked for, no row of plain jobs was refused, and the connection is the one that the cursors belong to.
   Otherwise the notification is a wake, as any other.
4. It puts off no look. If a poll, a sweep or a remembered position is due, a fetch follows. A reading of passed ranges
   that is due goes with the glance. A row that another worker had locked is found by the next poll, which is not slow.
5. It is sized as a fetch. If it fills the room there is, the lane may have more, and a fetch follows.
6. A glance that breaks is in doubt, as a claim is. Cursors begin anew, and reconciliation hands back its rows.
7. After so many glances without a fetch (`IN_A_ROW_MOST`), a fetch moves the cursors. So a glance walks few rows that
   are gone, even under an old snapshot.

**Why losers rest.** All idle workers are told of a job, and one takes it. The others have asked in vain, and meanwhile
were told of the next job. Were they to ask at once, each job would cost a claim in each worker. So a worker that found
nothing rests for as long as its claim took, times the workers. Then all that lose together ask as often as one worker
would. What it is told meanwhile waits, and what it was told while that claim was under way; a wake of another kind does
not.
"""

from __future__ import annotations

from collections.abc import Mapping

from pgqueue.jobs.job import Lane

TOLD: Mapping[str, int] = {str(2 * priority + 1): 2 * priority + 1 for priority in range(10)}
"""By payload, the rank of the one lane that a notification tells of. Any other payload is a wake."""
REST_MOST = 0.05
"""Seconds."""
IN_A_ROW_MOST = 50


class Glances:
    """When one worker may glance, and at which lane; and whether a fetch must follow."""

    def __init__(self) -> None:
        self._told: set[Lane] = set()
        self._rest_until = 0.0
        self._look_by = 0.0
        self.in_a_row = 0
        """How many glances there were since the last fetch or probe."""

    def told(self, lane: Lane, now: float) -> float | None:
        """A plain job has become available in this lane. Return in how many seconds `rested` is to be called; None if
        that is settled, for the worker rests and was told of a lane before."""
        rest, first = self._rest_until - now, not self._told
        self._told.add(lane)
        return max(rest, 0.0) if first or rest <= 0 else None

    def rest(self, now: float) -> float:
        """In how many seconds `rested` is to be called, as the worker rests and was told of a lane before that."""
        return max(self._rest_until - now, 0.0) if self._told else 0.0

    def rested(self) -> None:
        """The rest is over."""
        self._rest_until = 0.0

    def due(self, now: float) -> set[Lane]:
        """Return the lanes that the worker was told of, once each; none while it rests."""
        if not self._told or now < self._rest_until:
            return set()
        told, self._told = self._told, set()
        return told

    def fetched(self, look_by: float) -> None:
        """A fetch or a probe was answered: the next one is due then."""
        self._look_by, self.in_a_row = look_by, 0

    def ended(self, taken: int, now: float, fleet_seconds: float) -> bool:
        """A glance has taken so many jobs; its claim took this time, times the workers. Return whether a fetch must
        follow."""
        self.in_a_row += 1
        if not taken:
            self._rest_until = now + min(fleet_seconds, REST_MOST)
        return now >= self._look_by or self.in_a_row >= IN_A_ROW_MOST
