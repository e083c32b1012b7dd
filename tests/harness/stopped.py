"""Processes that stand still for a while, as SIGSTOP leaves them: their connections stay, and nothing answers."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from signal import SIGCONT, SIGSTOP

import psutil

from pgqueue.database.embedded import Cluster


@contextmanager
def stopped(pids: Iterable[int]) -> Iterator[None]:
    """These processes stand still. They go on at the end, also after an error."""
    standing: list[int] = []
    try:
        for pid in pids:
            os.kill(pid, SIGSTOP)
            standing.append(pid)
        yield
    finally:
        for pid in standing:
            with suppress(ProcessLookupError):  # ended meanwhile
                os.kill(pid, SIGCONT)


def server_pids(cluster: Cluster) -> list[int]:
    """The postmaster of this server, first, and all its children."""
    postmaster = psutil.Process(cluster.postmaster())
    return [postmaster.pid, *(child.pid for child in postmaster.children())]
