"""The buckets of the wait and run times in the history, and what can be estimated from them. No I/O.

The bounds are fixed: histograms of any two minutes can be added up. A bound is at most twice the one before, up to ten
seconds at most 1.67 times. `pgqueue.history_bounds()` in the database answers the same bounds.
"""

from __future__ import annotations

from collections.abc import Sequence

BOUNDS = (
    0.001, 0.0015, 0.002, 0.003, 0.005, 0.007, 0.01, 0.015, 0.02, 0.03, 0.05, 0.07,
    0.1, 0.15, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 5.0, 7.0,
    10.0, 15.0, 20.0, 30.0, 45.0, 60.0, 90.0, 120.0, 180.0, 300.0, 450.0, 600.0,
    900.0, 1200.0, 1800.0, 2700.0, 3600.0, 5400.0, 7200.0, 10800.0, 14400.0, 21600.0, 43200.0, 86400.0,
)  # fmt: skip
"""Upper bounds in seconds. The n-th number of a histogram counts the times up to the n-th bound and above the one
before; one more number counts what is longer than the last."""


def quantile(counts: Sequence[int], share: float) -> float | None:
    """The time in seconds that this share of the counted times has not exceeded; None if nothing was counted.

    The true one lies in the same bucket. So the estimate is off by less than the bucket's width: by less than a factor
    of 2, below ten seconds of 1.67. If the true one is longer than the last bound, the answer is the last bound.

    >>> quantile([0, 0, 10], 0.5)
    0.00175
    """
    wanted, before = share * sum(counts), 0
    for place, n in enumerate(counts):
        if n and before + n >= wanted:
            low = BOUNDS[place - 1] if place else 0.0
            high = BOUNDS[place] if place < len(BOUNDS) else low
            return low + (high - low) * (wanted - before) / n
        before += n
    return None
