"""The clock by which pgqueue measures how long something takes: never set, and never stopped by an application's tests.

Tools that freeze time for a test replace `time.monotonic` wherever a module has it. A wait that measures its timeout
by that clock never ends then. They leave `clock_gettime` alone, which reads the same clock.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import CLOCK_MONOTONIC, clock_gettime

monotonic: Callable[[], float] = partial(clock_gettime, CLOCK_MONOTONIC)
"""Seconds since a moment that is the same for all processes of a machine."""
