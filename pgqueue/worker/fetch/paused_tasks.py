"""Which paused tasks the claims of this worker have passed over, and when these are to be looked for again.

Part of the fetch, asked by the fetcher of one worker with each answer. It does no I/O and decides no job.

A claim leaves the jobs of a paused task where they are, and its cursors pass them. When the task is resumed, these jobs
lie behind the cursors, and no claim would look there. The naive version wakes the workers, and their claims find
nothing until the watermark's sweep comes round.

Right because, for a task T that is open again:

1. Each claim answers which tasks were paused in its own snapshot, the one that decides what it takes. So does the
   reading, which looks at lanes of the other kind. What either says is remembered with the answer.
2. If a cursor has passed a job of T because T was paused, T is therefore remembered since that answer. It is forgotten
   only by 3.
3. A reading that finds a remembered task open says so. Then all cursors start at zero, and T is forgotten; also if T is
   paused once more by the time of the claim, for then 1 remembers it anew.
4. That resume is committed before the next claim, so this claim sees T open and all of its jobs, or 1 holds again.
5. A reading is part of each fetch, and each poll asks the same. So T is found within a poll without any NOTIFY.

A reading of passed ranges leaves out the remembered tasks: their jobs were not locked.
"""

from __future__ import annotations

from collections.abc import Collection


class PausedTasks:
    """The paused tasks whose jobs may lie behind the cursors of this worker."""

    __slots__ = ("passed",)

    def __init__(self) -> None:
        self.passed: frozenset[str] = frozenset()

    def reopened(self, paused: Collection[str]) -> bool:
        """Whether a task that claims have passed over is not among these, which are paused now."""
        return not self.passed.issubset(paused)

    def answered(self, read: Collection[str], claimed: Collection[str]) -> bool:
        """A fetch was answered: these tasks were paused for its reading and for its claim.

        True if the next claim must start at zero: a task that was passed over is open again.
        """
        again = self.reopened(read)
        self.passed = frozenset(read).union(claimed)
        return again
