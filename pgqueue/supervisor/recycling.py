"""Finds working processes that are to be replaced: too much memory, enough jobs, or a handler that hangs.

It also finds processes that hang while they start. It only reports them: the fleet starts another process first.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from math import inf
from pathlib import Path

from pgqueue.plain_text import plural
from pgqueue.supervisor.fleet import Fleet, State
from pgqueue.supervisor.process import Process
from pgqueue.worker.liveness.memory import rss

log = logging.getLogger("pgqueue")

# If a process has not announced itself after this time, it hangs. It has taken no job.
BOOT_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Terms:
    """How many processes, how they are started, and when one is replaced. Seconds and bytes."""

    size: int
    arguments: tuple[str, ...]
    grace: float = 25.0
    memory_limit: int | None = None
    max_jobs: int | None = None
    check_every: float = 5.0
    reload: Path | None = None


class Recycling:
    """Checks processes against these terms."""

    def __init__(self, terms: Terms, fleet: Fleet) -> None:
        self._terms = terms
        self._fleet = fleet
        self.due = 0.0 if terms.memory_limit is not None else inf
        """When the memory is checked next."""
        self._too_low: set[int] = set()

    def look(self, processes: Iterable[Process], now: float) -> None:
        """Check processes for problems that they do not report. Memory is checked only as often as the terms say."""
        due = now >= self.due
        if due:
            self.due = now + self._terms.check_every
        for process in processes:
            child = process.child
            if child.state is State.STARTING and not child.announced and now - child.since > BOOT_SECONDS:
                process.failure = f"it had not announced itself after {BOOT_SECONDS:g} s"
                process.kill()
            elif due and child.state is State.RUNNING and not child.unfit:
                self._weigh(process)

    def worn(self, process: Process) -> bool:
        """Whether the process's last report makes it unfit."""
        child, most = process.child, self._terms.max_jobs
        if child.state is not State.RUNNING or child.unfit:
            return False
        if process.vitals["lost"]:
            self._fleet.unfit(child.number, "a handler in it did not stop at its timeout")
        elif most is not None and process.vitals["ended"] >= most:
            self._fleet.unfit(child.number, f"it has run {plural(most, 'job', 'jobs')}")
        return bool(child.unfit)

    def _weigh(self, process: Process) -> None:
        limit, child = self._terms.memory_limit, process.child
        if limit is None or (size := rss(process.pid)) <= limit:
            return
        if process.vitals.get("ended") or child.busy:
            log.warning("%s: %d MiB, over its memory limit; is replaced", process, size >> 20)
            process.pipe.say("over", rss=size, limit=limit)
            self._fleet.unfit(child.number, "it was over its memory limit")
        elif child.number not in self._too_low:
            self._too_low.add(child.number)  # a new process would need as much
            said = "%s: %d MiB without having run a job: the memory limit is below what the code needs"
            log.error(said, process, size >> 20)
