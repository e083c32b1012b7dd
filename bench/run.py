"""What a scenario is given: the server, and how much of everything it may take."""

from __future__ import annotations

from dataclasses import dataclass

from bench.server import Lab

QUICK = 0.02
"""The scale of `--quick`."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run of the harness."""

    lab: Lab
    rounds: int = 5
    scale: float = 1.0
    held_seconds: float = 60.0
    holder: str = "snapshot"
    """Who holds the horizon (holders.py) in scenarios that compare with nobody."""
    web_jobs: int | None = None
    """So many jobs wait, and so many have ended, in scenario web; None: as many as the scale says."""

    def jobs(self, full: int) -> int:
        """That many jobs at full size, at least a hundred."""
        return max(100, round(full * self.scale))

    def seconds(self, full: float) -> float:
        """That long at full size, at least a second."""
        return max(1.0, full * min(1.0, self.scale))
