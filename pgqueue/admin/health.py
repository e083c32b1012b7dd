"""Whether workers are well: one look, for probes. It has its own module, so that a probe imports nothing else."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass

from pgqueue.database.asking import asks, named
from pgqueue.database.statements import Statement


@dataclass(frozen=True, slots=True)
class Health:
    """The health of a host's workers.

    `well`: a worker has sent a heartbeat within its lease, or all were ordered to be quiet. `ready`: a worker takes
    jobs, too. `read_only`: the database is, by order, so none does.
    """

    host: str
    well: bool
    ready: bool
    read_only: bool = False


@asks
def health(conn: object, host: str, *, since: float | None = None) -> Statement[Health]:
    """Return the health of this host's workers. Heartbeats more than `since` seconds old do not count."""
    return named("health_read", lambda rows: Health(host, *rows[0]), host=host, since=since)


def up() -> float | None:
    """The seconds since this host, or the container we are in, was started; None if that is unknown.

    Heartbeats from before do not count: an earlier container had the same name and the same pids.
    """
    if sys.platform != "linux":
        return None
    try:
        with open("/proc/1/stat", encoding="utf-8", errors="replace") as file:
            # The program's name, in brackets, may contain any character. The start is in ticks since the boot.
            _, _, fields = file.read().rpartition(")")
        began = int(fields.split()[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):  # /proc may be hidden, or have another form on this kernel
        return None
    return time.clock_gettime(time.CLOCK_BOOTTIME) - began
