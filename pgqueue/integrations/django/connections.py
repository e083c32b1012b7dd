"""Django's connections around the jobs of a worker, as Django treats them around each request, and a little better.

Declared as middleware when Django starts, before any `tasks.py`: so it is the outermost, and middleware of the
application has connections that work, too. It acts in workers only. `drain` runs on the connection of a test.

Before each job, for each connection that its thread has:

1. It is closed if it is older than CONN_MAX_AGE, or is not in autocommit mode as its settings say.
2. It is checked at its first use in this job, by `SELECT 1`; if it is dead, another one is opened. That is what
   CONN_HEALTH_CHECKS does. So a server that was restarted fails no job, and a job without a query pays nothing.
3. The log of its queries, which DEBUG keeps, is emptied.

The methods of the async ORM run in one thread for the whole process, which is asgiref's, so its connections are treated
there. Nothing of another job is in the middle of a transaction there: each call runs to its end in that thread. Until a
connection was opened outside of the threads of sync handlers, async handlers do not ask that thread: it takes 0.2 ms.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import cache
from threading import Event, Lock, current_thread
from typing import Any

from asgiref.sync import sync_to_async
from django.db import connections, reset_queries

from pgqueue.integrations.django.noticed_writes import noticed_writes
from pgqueue.jobs.job import Job

THREADS = "pgqueue-"
"""How the names of the threads of sync handlers begin (worker/run/threads.py)."""


@contextmanager
def fresh_connections() -> Iterator[None]:
    """In this block a connection of Django that this thread has is opened again if it is dead.

    For threads outside of Django's requests. A connection in an open transaction stays as it is.
    """
    _renew()
    try:
        yield
    finally:
        _renew()


def around_sync(job: Job, call: Callable[[], Any]) -> Any:
    """The middleware of sync handlers, in whose threads the connections are."""
    if not in_a_worker(job):
        return call()
    _check_pools()
    _drop_open_blocks()
    with fresh_connections(), noticed_writes(job):
        return call()


async def around_async(job: Job, call: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """The middleware of async handlers."""
    if not in_a_worker(job):
        return await call()
    _check_pools()
    if _elsewhere.is_set():
        await _renew_async()
    try:
        return await call()
    finally:
        if _elsewhere.is_set():
            await _renew_async()


def note_connection(**_: Any) -> None:
    """A connection was opened in this thread. Receives Django's signal `connection_created`."""
    if not current_thread().name.startswith(THREADS):
        _elsewhere.set()


def _renew() -> None:
    reset_queries()
    for conn in connections.all(initialized_only=True):
        conn.close_if_unusable_or_obsolete()
        conn.health_check_enabled = True


_pools = Lock()
_elsewhere = Event()
"""Set once a connection was opened in a thread that runs no sync handlers, such as that of the async ORM."""
_renew_async = sync_to_async(_renew)


def _drop_open_blocks() -> None:
    """Forget a connection whose last job was stopped at the very beginning of an `atomic` block, and never left it."""
    for conn in connections.all(initialized_only=True):
        if conn.in_atomic_block:
            conn.close()
            del connections[conn.alias]


@cache
def _check_pools() -> None:
    """From now on a connection of a pool of Django's (OPTIONS: pool) is checked when it is taken out."""
    with _pools:  # the first jobs begin side by side, and none may have a pool that is about to be closed
        for conn in connections.all():
            if conn.settings_dict["OPTIONS"].get("pool") and not conn.settings_dict["CONN_HEALTH_CHECKS"]:
                conn.settings_dict["CONN_HEALTH_CHECKS"] = True
                conn.close_pool()  # one that a query at the start has made does not check


def in_a_worker(job: Job) -> bool:
    """Whether a worker runs this job, and not a drain, which runs it on the connection of a test."""
    module = sys.modules.get("pgqueue.worker.context")
    return module is not None and isinstance(job.context, module.WorkerContext)
