"""The clock of a test's database: it stands where a test puts it, or is set while workers work (a fault)."""

from __future__ import annotations

from datetime import datetime

from workers import Eyes


def set_clock(eyes: Eyes, now: datetime) -> None:
    """From now on it is this time, and stays so."""
    _replace(eyes, f"timestamptz '{now.isoformat()}'")


def step_clock(eyes: Eyes, seconds: float) -> None:
    """The clock goes on, so many seconds from the true time. It steps for all workers of this database at once.

    All statements take the time from `pgqueue.now()`, so nothing of pgqueue can tell this from a clock of the server.
    """
    _replace(eyes, f"clock_timestamp() + interval '{float(seconds)} seconds'")


def _replace(eyes: Eyes, expression: str) -> None:
    eyes.do(
        "CREATE OR REPLACE FUNCTION pgqueue.now() RETURNS timestamptz LANGUAGE sql VOLATILE PARALLEL SAFE "
        f"RETURN {expression}"
    )
