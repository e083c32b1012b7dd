"""What people do to queues and tasks by hand: `pause` and `resume` them.

Called by applications and by the CLI. A pause is a row that every claim reads: it needs no NOTIFY and outlives every
worker. Everything happens inside the caller's transaction, and with its COMMIT or not at all.
"""

from __future__ import annotations

from typing import overload

from pgqueue.config import client
from pgqueue.database import drivers
from pgqueue.database.statements import Statement, text
from pgqueue.errors import InvalidOption
from pgqueue.jobs.actors import actor_of
from pgqueue.jobs.validation import check_queue, check_task_name
from pgqueue.options import checks_options


@overload
def pause(conn: object, queue: str, *, actor: str | None = None) -> bool: ...
@overload
def pause(conn: object, *, task: str, actor: str | None = None) -> bool: ...
@checks_options
def pause(conn: object, queue: str | None = None, *, task: str | None = None, actor: str | None = None) -> bool:
    """Pause a queue, or a task in all queues: once this is committed, no worker takes a job of it.

    False if it was paused already. Jobs that a worker has taken go on, also the few that wait there for a slot.
    Enqueuing goes on, too. The pause holds until `resume`, also when workers or the server restart.

    A task is paused by the name that its jobs have. Jobs that were enqueued under an alias have that name. The pause is
    a row of the record (`audit`), by `actor`, else by the role of the connection.

        pgqueue.pause(conn, "mail")
        pgqueue.pause(conn, task="mail.send", actor="ann")
    """
    return drivers.run(conn, _pausing(queue, task, actor))


@overload
async def apause(conn: object, queue: str, *, actor: str | None = None) -> bool: ...
@overload
async def apause(conn: object, *, task: str, actor: str | None = None) -> bool: ...
@checks_options
async def apause(conn: object, queue: str | None = None, *, task: str | None = None, actor: str | None = None) -> bool:
    """`pause` for async connections."""
    return await drivers.arun(conn, _pausing(queue, task, actor))


@overload
def resume(conn: object, queue: str, *, actor: str | None = None) -> bool: ...
@overload
def resume(conn: object, *, task: str, actor: str | None = None) -> bool: ...
@checks_options
def resume(conn: object, queue: str | None = None, *, task: str | None = None, actor: str | None = None) -> bool:
    """End the pause of a queue or a task; workers look for its jobs at once. False if it was not paused.

    The resume is a row of the record (`audit`), by `actor`, else by the role of the connection.

        pgqueue.resume(conn, task="mail.send")
    """
    return drivers.run(conn, _resuming(queue, task, actor))


@overload
async def aresume(conn: object, queue: str, *, actor: str | None = None) -> bool: ...
@overload
async def aresume(conn: object, *, task: str, actor: str | None = None) -> bool: ...
@checks_options
async def aresume(conn: object, queue: str | None = None, *, task: str | None = None, actor: str | None = None) -> bool:
    """`resume` for async connections."""
    return await drivers.arun(conn, _resuming(queue, task, actor))


def _pausing(queue: str | None, task: str | None, actor: str | None) -> Statement[bool]:
    schema, _ = client()
    what, name = _named(queue, task)
    return Statement(text(f"queues_pause{what}", schema), {"name": name, "actor": actor_of(actor)}, bool)


def _resuming(queue: str | None, task: str | None, actor: str | None) -> Statement[bool]:
    schema, notify = client()
    what, name = _named(queue, task)
    params = {"name": name, "actor": actor_of(actor), "notify": notify}
    return Statement(text(f"queues_resume{what}", schema), params, bool)


def _named(queue: str | None, task: str | None) -> tuple[str, str]:
    """How the names of the statements end, and the checked name of the queue or the task."""
    if queue is not None and task is None:
        return "", check_queue(queue)
    if task is not None and queue is None:
        return "_task", check_task_name(task)
    raise InvalidOption("give a queue, or a task; to stop a task in one queue only, cancel its jobs there")
