"""The process's title in the process list: `pgqueue: worker 2/4 [3 of 10 busy] quiet`."""

from __future__ import annotations

import setproctitle

_shown = ""


def worker_title(place: int, of: int, busy: int, slots: int, state: str) -> str:
    count = f" [{busy} of {slots} busy]" if slots else ""
    return f"pgqueue: worker {place}/{of}{count}{'' if state == 'running' else f' {state}'}"


def supervisor_title(active: int, size: int, state: str) -> str:
    return f"pgqueue: supervisor [{active} of {size} active]{'' if state == 'running' else f' {state}'}"


def show(title: str) -> None:
    """Make this the title of this process."""
    global _shown
    if title != _shown:
        _shown = title
        setproctitle.setproctitle(title)
