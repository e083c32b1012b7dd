"""Whether workers are well: one look, for probes. Alone in its module, so that a probe pays for nothing else."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass

from pgqueue.config import config
from pgqueue.database import drivers
from pgqueue.database.statements import Statement, text


@dataclass(frozen=True, slots=True)
class Health:
    """How the workers of a host are. `well`: one has given a sign of life within its lease, or all were told to be
    quiet; `ready`: one takes jobs, too."""

    host: str
    well: bool
    ready: bool


def health(conn: object, host: str, *, since: float | None = None) -> Health:
    """Return how the workers of this host are; signs of life more than `since` seconds old do not count. One row is
    read."""
    sql = text("health_read", config().schema)
    return drivers.run(conn, Statement(sql, {"host": host, "since": since}, lambda rows: Health(host, *rows[0])))


def up() -> float | None:
    """For how many seconds this host, or the container we are in, has been up; None where that cannot be told.

    What was there before had the same name, and the same pids: in a container the worker is always 1.
    """
    if sys.platform != "linux":
        return None
    try:
        with open("/proc/1/stat", encoding="utf-8", errors="replace") as file:
            # The name of the program, in brackets, may have any character in it; the time is in ticks since the boot.
            _, _, fields = file.read().rpartition(")")
        began = int(fields.split()[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):  # /proc may be hidden from us, or another kernel's idea of it
        return None
    return time.clock_gettime(time.CLOCK_BOOTTIME) - began
