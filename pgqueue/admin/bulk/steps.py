"""The steps of an operation by filter: what a process sends that works on it, and what it makes of the answers. No I/O.

Called by the command that has begun the operation, and by the worker that leads (`worker/leader/bulks.py`). Each takes
the operation for a lease, sends one step after the other, and renews the lease with each.

Why each job that fits is dealt with once, whichever processes work on it, and whenever one of them dies:

1. A step is one statement, so one transaction: the jobs that it changes, their counts and the place where the next step
   goes on are committed together. After a crash all of that is done, or nothing.
2. It locks the row of the operation, and reads the place there. So steps come one after the other, and the next one
   goes on behind the jobs of this one. The walk is by id, upwards, and ends at the ids that had been given when the
   operation began. A job that is retried, and fails again, keeps its id: it lies behind.
3. Each step, and each change of the process, adds 1 to `fence`. A step names the number that its process knows, and
   does nothing if the row has another one. So a process that was suspended, or whose lease is over, changes nothing
   afterwards. What it leaves out (5) would else be another job than the one that was refused.
4. If the answer to a step was lost, its process does not know whether the step was committed. It takes the operation
   anew, which reads the place from the row.
5. If the server refuses a step, as for a key that another transaction has, the next one is smaller. Before a step of
   one job the process asks which job that is, and names it. If the server refuses that step, this job is left out: as
   `locked`, to be tried again, or as `refused`. If another job comes first by then, as one that has just failed,
   nothing is done. The naive version leaves out the first job, and that may be one that was never tried.
6. What the filter means is compared with the row that is locked (`bulk_lock`). A job that another transaction had, and
   has put into another queue meanwhile, is `moved`.
7. The times of the row are those of the server's clock. If it is set back, a time that no pause could have set is over:
   the operation goes on, and another process may take it. That is safe, by 3.

Why a step waits for no other session in a circle: it passes over locked jobs, and so waits only for unique keys, half a
second at most. Jobs that it passed over are `locked`. They are tried again three times at the end.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

import psycopg

from pgqueue.database.backoff import emptied, of_data
from pgqueue.database.statements import Row, Statement, text
from pgqueue.database.triggers import trigger_of

STEP_MOST = 1_000
"""Jobs a step."""
WALK_MOST = 10_000
"""Rows that a step looks at."""
LEASE_SECONDS = 15.0
ROUNDS = 3
LATER_SECONDS = 5.0
"""So often the jobs that were locked are tried again, and so long is the pause before."""
FEWER = 10
"""After a refusal a step has this many times fewer jobs, and more again after it has worked."""

_BUSY = (
    psycopg.errors.LockNotAvailable,
    psycopg.errors.DeadlockDetected,
    psycopg.errors.SerializationFailure,
    psycopg.errors.QueryCanceled,
)


@dataclass(frozen=True, slots=True)
class Claim:
    """An operation that this process has taken."""

    id: int
    fence: int
    action: str
    options: Mapping[str, Any]
    pace: float | None


def due(schema: str, holder: str) -> Statement[float | None]:
    """In how many seconds an operation may go on that no other process works on. None: there is none."""
    params = {"holder": holder, "lease": LEASE_SECONDS, "later": LATER_SECONDS}
    return Statement(text("bulk_due", schema), params, lambda rows: rows[0][0] if rows else None)


def claiming(schema: str, holder: str, bulk: int | None = None) -> Statement[Claim | None]:
    """Take this operation, or the one that has waited longest. None: none is due, or others work on them."""

    def read(rows: list[Row]) -> Claim | None:
        if not rows:
            return None
        id, fence, action, options, pace = rows[0]
        return Claim(id, fence, action, json.loads(options), pace)

    params = {"holder": holder, "bulk": bulk, "lease": LEASE_SECONDS, "later": LATER_SECONDS}
    return Statement(text("bulk_claim", schema), params, read)


def size_of(pace: float | None) -> int:
    """The jobs of a step: those of a second, or an equal part of them. So the steps of a second are no more jobs.

    >>> size_of(None), size_of(50.0), size_of(0.1), size_of(1_500.0)
    (1000, 50, 1, 750)
    """
    return STEP_MOST if pace is None else ceil(pace / ceil(pace / STEP_MOST))


class Steps:
    """The steps that this process makes of one operation.

    Send `step()`. Then call `stepped` with the rows of its answer, or `refused` with the server's error.
    """

    def __init__(self, claim: Claim, schema: str, notify: bool) -> None:
        self.id = claim.id
        self.open = True
        """Whether a step may follow: the operation is not over, and this process still has it."""
        self.pause = 0.0
        """In how many seconds the next step is due."""
        self.error: Exception | None = None
        """With which the server has refused the last step that it refused."""
        self._claim = claim
        self._fence = claim.fence
        self._schema = schema
        self._notify = notify
        self._full = self._size = size_of(claim.pace)
        self._asks = False
        """Whether the next step asks which job comes first."""
        self._only: int | None = None
        """The job that steps of one job are about, since the server has refused one."""
        self._left_out: str | None = None

    @property
    def of_one(self) -> bool:
        """Whether the next step is about the one job that the server has refused."""
        return self._only is not None

    def step(self) -> Statement[list[Row]]:
        """The next step."""
        params: dict[str, object] = {
            "bulk": self.id,
            "fence": self._fence,
            "most": self._size,
            "walk": WALK_MOST,
            "lease": LEASE_SECONDS,
            "rounds": ROUNDS,
            "later": LATER_SECONDS,
            "only": self._only,
        }
        if self._asks:
            first = {name: params[name] for name in ("bulk", "fence", "most", "walk", "only")}
            return Statement(text("bulk_first", self._schema), first, list)
        if self._left_out is not None:
            return Statement(text("bulk_pass", self._schema), params | {"did": self._left_out}, list)
        if self._claim.action != "discard":
            params["notify"] = self._notify
        return Statement(text(f"bulk_{self._claim.action}", self._schema), params | dict(self._claim.options), list)

    def stepped(self, rows: list[Row]) -> int | None:
        """Take the answer of a step; return the job that it left out because the server has refused it."""
        if not rows:
            self.open = False
            return None
        if self._asks:
            self._asks = False
            [(self._only,)] = rows
            return None
        self._fence, ends, self.pause, _, _, *passed = rows[0]
        self.open = not ends
        refused = passed[0] if self._left_out == "refused" else None
        self._left_out = self._only = None
        self._size = min(self._full, self._size * FEWER)
        return refused

    def refused(self, error: Exception) -> bool:
        """Take the server's error; return whether the next step deals with it. Else it is not about the jobs."""
        busy = isinstance(error, _BUSY)
        if emptied(error) or not (busy or of_data(error) or trigger_of(error) is not None or _is_refusal(error)):
            return False
        if self._left_out is not None or self._asks:
            return False
        self.error = error
        if self._only is not None:
            self._left_out = "locked" if busy else "refused"
            return True
        self._size = max(1, self._size // FEWER)
        self._asks = self._size == 1
        return True

    def release(self) -> Statement[list[Row]]:
        """Let another process take the operation at once."""
        return Statement(text("bulk_release", self._schema), {"bulk": self.id, "fence": self._fence}, list)


def _is_refusal(error: Exception) -> bool:
    """Whether a statement of ours has refused to go on with half a move (`pgqueue.refuse`)."""
    return getattr(error, "sqlstate", None) == "XX001"
