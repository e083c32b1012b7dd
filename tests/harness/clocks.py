"""The clock of a test's database, which stands where the test puts it."""

from __future__ import annotations

from datetime import datetime

from workers import Eyes


def set_clock(eyes: Eyes, now: datetime) -> None:
    eyes.do(
        "CREATE OR REPLACE FUNCTION pgqueue.now() RETURNS timestamptz LANGUAGE sql VOLATILE PARALLEL SAFE "
        f"RETURN timestamptz '{now.isoformat()}'"
    )
