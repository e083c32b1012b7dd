"""What people do to queues and tasks by hand: `pause` and `resume` them.

Called by applications and by the CLI. A pause is a row that every claim reads: it needs no NOTIFY and outlives every
worker. Everything happens inside the caller's transaction, and with its COMMIT or not at all.
"""

from __future__ import annotations

from typing import overload

from pgqueue.config import client
from pgqueue.database.asking import asks, named, twin
from pgqueue.database.statements import Statement
from pgqueue.errors import InvalidOption
from pgqueue.jobs.actors import actor_of
from pgqueue.jobs.values import check_queue, check_task_name


@overload
def pause(conn: object, queue: str, *, actor: str | None = None) -> bool: ...
@overload
def pause(conn: object, *, task: str, actor: str | None = None) -> bool: ...
@asks
def pause(
    conn: object, queue: str | None = None, *, task: str | None = None, actor: str | None = None
) -> Statement[bool]:
    """Pause a queue, or a task in all queues: once this is committed, no worker takes a job of it.

    False if it was paused already. Jobs that a worker has taken go on, also the few that wait there for a slot.
    Enqueuing goes on, too. The pause holds until `resume`, also when workers or the server restart.

    A task is paused by the name that its jobs have. Jobs that were enqueued under an alias have that name. The pause is
    a row of the record (`audit`), by `actor`, else by the role of the connection.

        pgqueue.pause(conn, "mail")
        pgqueue.pause(conn, task="mail.send", actor="ann")
    """
    what, name = _named(queue, task)
    return named(f"queues_pause{what}", bool, name=name, actor=actor_of(actor))


apause = twin(pause)
"""`pause` for async connections."""


@overload
def resume(conn: object, queue: str, *, actor: str | None = None) -> bool: ...
@overload
def resume(conn: object, *, task: str, actor: str | None = None) -> bool: ...
@asks
def resume(
    conn: object, queue: str | None = None, *, task: str | None = None, actor: str | None = None
) -> Statement[bool]:
    """End the pause of a queue or a task; workers look for its jobs at once. False if it was not paused.

    The resume is a row of the record (`audit`), by `actor`, else by the role of the connection.

        pgqueue.resume(conn, task="mail.send")
    """
    what, name = _named(queue, task)
    return named(f"queues_resume{what}", bool, name=name, actor=actor_of(actor), notify=client()[1])


aresume = twin(resume)
"""`resume` for async connections."""


def _named(queue: str | None, task: str | None) -> tuple[str, str]:
    """How the names of the statements end, and the checked name of the queue or the task."""
    if queue is not None and task is None:
        return "", check_queue(queue)
    if task is not None and queue is None:
        return "_task", check_task_name(task)
    raise InvalidOption("give a queue, or a task; to stop a task in one queue only, cancel its jobs there")
