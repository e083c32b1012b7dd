"""How much of everything a sample takes, and what is known of this peer so far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Values = dict[str, float]
PATIENCE = 30.0  # seconds without any progress until a sample is given up
LEAST = 0.3
"""A run that has few minutes makes no sample smaller than this share. See plan.py."""
START_RATE = 20.0
"""Jobs a second whose start is timed."""


@dataclass(frozen=True, slots=True)
class Size:
    """The share of the full number of jobs, and of the seconds; `full` asks for what takes long."""

    scale: float = 1.0
    found: Mapping[str, float] | None = None
    """Medians of this peer's samples by `scenario.measure`."""
    full: bool = False

    def jobs(self, full: int) -> int:
        return max(50, round(full * self.scale))

    def seconds(self, full: float, least: float = 0.5) -> float:
        return max(least, full * self.scale)

    def whole_seconds(self, full: float) -> float:
        """What is not made smaller for want of minutes: less of it would say something else."""
        return full if self.scale >= LEAST else self.seconds(full)

    def known(self, *measures: str) -> list[float]:
        """Those of these medians that there are."""
        found = self.found or {}
        return [found[measure] for measure in measures if measure in found]
