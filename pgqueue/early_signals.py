"""Signals that come before a process can act on them: kept from its first line on, and carried out when it can.

`pgqueue work` imports for some tenths of a second before it knows what it is. In that time SIGHUP and SIGUSR1 would end
the process, and SIGTTIN and SIGTTOU would stop it. SIGTERM and SIGINT do what they always do: nothing runs yet.
"""

from __future__ import annotations

import signal
from types import FrameType

_kept: list[int] = []


def keep(*numbers: int) -> None:
    """From now on keep these signals; not one that this process was started to ignore."""
    for number in numbers:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _keep)


def take() -> list[int]:
    """The signals that were kept, in their order. For a process that has its own handlers by now."""
    taken = _kept[:]
    _kept.clear()
    return taken


def give_back(*numbers: int) -> None:
    """Keep these no more. One that was kept does now what it does to any process."""
    for number in numbers:
        if signal.getsignal(number) is _keep:
            signal.signal(number, signal.SIG_DFL)
        if number in _kept:
            _kept.remove(number)
            signal.raise_signal(number)


def _keep(number: int, _: FrameType | None) -> None:
    _kept.append(number)
