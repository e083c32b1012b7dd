"""Enqueue by hand: a form for each task that this process knows, and a box of JSON for any other.

A form enqueues once. It has a name of its own, which is the idempotency key of its job if no other is given. If it is
sent again, as by a double click, the answer is the first job. A script sends no such name.

A task is known if its module was imported: by `pgqueue web MODULE`, or by the application that mounts the dashboard.
Its arguments are checked as `task.enqueue` checks them. What is refused reaches no database: the form comes back with
what was typed.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection
from datetime import datetime
from secrets import token_hex
from typing import Any

from pgqueue.admin.enqueue_by_hand import aenqueue_by_hand
from pgqueue.client import tasks
from pgqueue.client.tasks import Task
from pgqueue.errors import DuplicateJob, InvalidArguments, InvalidOption
from pgqueue.jobs.job import NewJob
from pgqueue.jobs.values import digits
from pgqueue.plain_text import plain as plain_text
from pgqueue.web.pages.page import Asked, Page, read_time
from pgqueue.web.problems import Problem
from pgqueue.web.task_form import FIRST, Field, Unreadable, fields_of, read_json, typed, values_of

log = logging.getLogger("pgqueue")

TITLE = "Nothing was enqueued"
OPTIONS = ("queue", "priority", "at", "idempotency_key")
ONCE = "form:"
"""How the idempotency keys begin that are made of the name of a form."""
KEYS = ("lock", "unique")
"""Of a task that is not known here: its code may say other keys, which are not known here either."""
BY_NAME = ("args", *KEYS)
"""The fields besides the options where a task is given by its name alone."""


async def form(asked: Asked) -> Page:
    """The tasks that are known here, and a box for any other. With `task` the form of this one."""
    name = asked.value("task")
    return _page(asked, None if name is None else _known(name))


async def enqueue(asked: Asked) -> Page:
    """Enqueue the job that the form describes. If it is refused, the same form with the reason, and 422."""
    name = asked.field("task")
    task = _known(name) if name is not None and asked.field("form") else None
    try:
        new = _job(asked, name, task)
        handle = await asked.change(lambda conn: aenqueue_by_hand(conn, new))
    except (InvalidArguments, InvalidOption, Unreadable) as error:
        return _refused(asked, task, 422, str(error))
    except DuplicateJob as error:
        return _refused(asked, task, 409, str(error))
    changed = handle.created or handle.replaced
    item = {"id": handle.id, "created": handle.created}
    return Page("", [item], {"changed": changed}, after=f"/jobs/{handle.id}", did="made" if changed else "key taken")


def _job(asked: Asked, name: str | None, task: Task[..., Any] | None) -> NewJob[Any]:
    """The job, checked as every enqueue checks it. Raises InvalidArguments, InvalidOption, Unreadable."""
    if name is None:
        raise InvalidOption("task: give the name of a task")
    fields = None if task is None else fields_of(task, asked.redaction)
    _refuse_unknown(asked, BY_NAME if fields is None else {each.name for each in fields})
    if task is None or fields is None:
        task, given = _by_name(asked, name), _object(asked.field("args"))
    else:
        given = values_of(fields, asked.form)
    task = _with_options(asked, task)
    return _made(task, given)


def _refuse_unknown(asked: Asked, fields: Collection[str]) -> None:
    """Raise InvalidOption for a field that would be ignored: the form of yesterday's code may have one."""
    known = {"task", "form", "once", *OPTIONS, *fields}
    for name, values in asked.form.items():
        if name not in known and any(values):
            raise InvalidOption(
                f"there is no field {name.removeprefix(FIRST)!r:.80} here; there are {', '.join(sorted(known))}"
            )


def _made(task: Task[..., Any], given: dict[str, Any]) -> NewJob[Any]:
    """The job of this call. Code of the application runs here: its classes, and its functions of keys."""
    try:
        args, kwargs = task.codec.call_of(json.dumps(given))
        return task.new(*args, **kwargs)
    except (InvalidArguments, InvalidOption):
        raise
    except Exception as error:
        log.warning("task %s: its own code has refused arguments from the dashboard", task.name, exc_info=error)
        raise InvalidArguments(f"task {task.name!r}: making the job raised {type(error).__name__}: {error}") from error


def _with_options(asked: Asked, task: Task[..., Any]) -> Task[..., Any]:
    priority, at, once = asked.field("priority"), asked.field("at"), asked.field("once")
    return task.using(
        queue=asked.field("queue"),
        priority=None if priority is None else _whole(priority),
        run_at=None if at is None else _time(at),
        idempotency_key=asked.field("idempotency_key") or (once and f"{ONCE}{once}"),
    )


def _by_name(asked: Asked, name: str) -> Task[..., Any]:
    """The task that is known here under this name, with its own keys; else one of other code, with the keys typed."""
    lock, unique = asked.field("lock"), asked.field("unique")
    known = tasks.find(name)
    if known is None:
        return tasks.remote(name).using(lock=_always(lock), unique=_always(unique))
    if lock is not None or unique is not None:
        raise InvalidOption(f"task {known.name!r}: give no lock and no unique key; its code says which it has")
    return known


def _always(key: str | None) -> Callable[..., str | None] | None:
    """A function of a job's arguments that answers this key. None without a key."""
    return None if key is None else lambda **arguments: key


def _object(text: str | None) -> dict[str, Any]:
    try:
        value = {} if text is None else read_json(text)
    except ValueError as error:
        raise Unreadable({"args": f"is not JSON: {error}"}) from None
    if not isinstance(value, dict):
        raise InvalidArguments('args: write an object of the arguments by name, such as {"order": 7}')
    return value


def _whole(text: str) -> int:
    if (found := digits(text, 4)) is None:
        raise InvalidOption("priority: use a whole number from 0 (first) to 9 (last)")
    return found


def _time(text: str) -> datetime:
    try:
        return read_time(text)
    except ValueError:
        raise InvalidOption("at: write a time like 2026-12-24T18:00; without a zone it is UTC") from None


def _known(name: str) -> Task[..., Any]:
    task = tasks.find(name)
    if task is None:
        raise Problem(404, "No such task", "No task of this name is known here. Write its arguments as JSON instead.")
    return task


def _refused(asked: Asked, task: Task[..., Any] | None, status: int, text: str) -> Page:
    """The form again. What is redacted is neither repeated nor quoted."""
    text = asked.redaction.shown({"args": _sent(asked), "text": plain_text(text)})["text"]
    return _page(asked, task, Problem(status, TITLE, text))


def _sent(asked: Asked) -> dict[str, Any]:
    """The arguments that were typed, by name, as far as they can be read."""
    sent: dict[str, Any] = {name.removeprefix(FIRST): values for name, values in asked.form.items()}
    try:
        return sent | _object(asked.field("args"))
    except (InvalidArguments, Unreadable):
        return sent


def _page(asked: Asked, task: Task[..., Any] | None, problem: Problem | None = None) -> Page:
    fields = [] if task is None else fields_of(task, asked.redaction)
    shown = {name: asked.field(name) or "" for name in ("task", "args", *OPTIONS, *KEYS)}
    view: dict[str, Any] = {
        "once": token_hex(8),
        "task": None if task is None else {"name": task.name, "queue": task.queue, "priority": task.priority},
        "inputs": [(field, "" if field.secret else typed(field, asked.form)) for field in fields],
        "typed": shown,
        "refused": None if problem is None else problem.text,
    }
    items = [_item(each) for each in sorted(tasks.declared(), key=lambda each: each.name)]
    chosen = {"fields": [_shown(field) for field in fields]} if task is not None else {}
    return Page("enqueue.html", items, chosen, view, problem=problem)


def _item(task: Task[..., Any]) -> dict[str, Any]:
    return {
        "task": task.name,
        "queue": task.queue,
        "priority": task.priority,
        "takes": task.codec.takes().removeprefix("it takes "),
    }


def _shown(field: Field) -> dict[str, Any]:
    return {"name": field.name, "needs": field.needs, "required": field.required, "default": field.default}
