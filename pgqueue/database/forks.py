"""What a forked child does not keep of ours: sockets, an event loop, signal handlers.

A handler may fork, or use multiprocessing, which forks. The child has a copy of everything, and shares the open files:

1. A byte that it writes to a socket of ours goes to the server. libpq's goodbye would end its parent's session.
2. While it lives, it holds these sockets open. If its parent is killed, the server would not notice, and the sessions
   would keep their locks.
3. The event loop's epoll object is shared. If the child takes a file out of it, its parent is deaf.
4. A signal to the child would write into the parent's wake-up pipe: SIGTERM would stop the parent.

So right after the fork, before anything else runs in the child:

1. Each of these files is replaced under its number: a socket by one without a peer, an epoll object by an empty one.
   Nothing is sent. To close it would not do: another file of the child would get the number, and libpq would say its
   goodbye there.
2. A loop on which the fork happened ends the child at its next step. All other steps that were due belong to the
   parent's jobs. On uvloop the steps that were due already come before it.
3. Signal handlers of ours, and those of an event loop, are taken back. From before the fork until then the forking
   thread takes no signal: a SIGTERM would be heard by the parent's handler in the child, and be lost. So a process of
   a multiprocessing.Pool that is ended at once would live for ever.

`depth` is how many forks lie behind this process. A service that notes it can see whether it is in a child. Takes no
lock: a thread that is not in the child may hold it.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NoReturn, Protocol
from weakref import WeakKeyDictionary, WeakSet

from psycopg import OperationalError

from pgqueue import stderr

WAITED = 1
"""The exit code of a child that waits on its parent's event loop."""

depth = 0

_open: WeakSet[Open] = WeakSet()
_loops: WeakKeyDictionary[asyncio.AbstractEventLoop, int] = WeakKeyDictionary()
_handlers: dict[int, tuple[object, Any]] = {}
_masks: dict[int, set[signal.Signals | int]] = {}
"""For each thread that forks: the signals that it blocked before."""


class Open(Protocol):
    """A connection or socket; `fileno` raises, or returns -1, when it is closed."""

    def fileno(self) -> int: ...


def cut_in_children(one: Open) -> None:
    """Take this connection or socket from children that are forked from now on. From any thread."""
    _open.add(one)


def end_loop_in_children(loop: asyncio.AbstractEventLoop) -> None:
    """Let no child take a step of this loop. Called on the loop."""
    _loops[loop] = threading.get_ident()


def handle_signal(number: int, handler: Callable[[int, Any], object] | signal.Handlers) -> None:
    """`signal.signal`, undone in children."""
    before = signal.signal(number, handler)
    _handlers[number] = (handler, _handlers[number][1] if number in _handlers else before)


def _before() -> None:
    _masks[threading.get_ident()] = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())


def _unblock() -> None:
    """Take signals again, as before the fork. In the child the thread has the same identity."""
    if (mask := _masks.pop(threading.get_ident(), None)) is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _in_child() -> None:
    try:
        _cut()
    finally:
        _unblock()
        _masks.clear()


def _cut() -> None:
    global depth
    depth += 1
    for loop, thread in list(_loops.items()):
        if thread == threading.get_ident() and loop.is_running():
            _end_at_next_step(loop)
    for file in [*_files()]:
        _replace(file, _socket)
    for loop in [loop for loop in list(_loops) if not loop.is_closed()]:
        _cut_off(loop)
    signal.set_wakeup_fd(-1)
    _take_back_handlers()
    _open.clear()
    _loops.clear()
    _handlers.clear()


def _files() -> Iterator[int]:
    for one in list(_open):
        with suppress(OperationalError):  # it is closed
            if (file := one.fileno()) >= 0:
                yield file


def _cut_off(loop: asyncio.AbstractEventLoop) -> None:
    """Take from it what wakes it. The names are those of asyncio and of uvloop; another loop may have others."""
    if (backend := getattr(loop, "_get_backend_id", None)) is not None:
        _replace(backend(), _epoll)
    if (selector := getattr(loop, "_selector", None)) is not None and hasattr(selector, "fileno"):
        _replace(selector.fileno(), _epoll)
    for name in ("_ssock", "_csock"):
        if (end := getattr(loop, name, None)) is not None:
            _replace(end.fileno(), _socket)


def _replace(file: int, new: Callable[[], int]) -> None:
    try:
        instead = new()
    except OSError:  # no file may be opened any more
        os.close(file)
        return
    os.dup2(instead, file, inheritable=False)
    os.close(instead)


def _socket() -> int:
    """One that is connected to nothing. Not /dev/null: where that is to be watched, uvloop's libuv aborts."""
    return socket.socket(socket.AF_UNIX).detach()


def _epoll() -> int:
    """An empty one. On uvloop the child's end comes after its next look at this."""
    if not hasattr(select, "epoll"):  # a kqueue is not inherited
        return _socket()
    made = select.epoll()
    try:
        return os.dup(made.fileno())
    finally:
        made.close()


def _take_back_handlers() -> None:
    for number in signal.valid_signals():
        handler = signal.getsignal(number)
        ours, before = _handlers.get(number, (None, None))
        if ours is not None and handler is ours:  # else the application has put its own there
            signal.signal(number, signal.SIG_DFL if before is None else before)
        elif _is_of_a_loop(handler):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def _is_of_a_loop(handler: object) -> bool:
    """Whether only an event loop would act on the signal: that of `add_signal_handler`, or of `asyncio.Runner`."""
    if getattr(handler, "__module__", "") == "asyncio.unix_events":
        return True
    owner = getattr(getattr(handler, "func", handler), "__self__", None)
    return isinstance(owner, (asyncio.AbstractEventLoop, asyncio.Runner))


def _end_at_next_step(loop: asyncio.AbstractEventLoop) -> None:
    if (due := getattr(loop, "_ready", None)) is not None:
        due.clear()
    loop.call_soon(_end_waiting)


def _end_waiting() -> NoReturn:
    end(WAITED, "it was forked there, and it waits on the event loop of its parent")


def end(code: int, why: str, more: str = "") -> NoReturn:
    """End this process at once, with this line on stderr. No log: its handler may hold a thread that is not here."""
    said = f"pgqueue: process {os.getpid()} ends (exit code {code}): {why}\n{more}"
    stderr.write(said)
    os._exit(code)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_unblock, after_in_child=_in_child)
