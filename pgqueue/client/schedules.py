"""Schedules as rows: list them, operate them by hand, and add them at run time.

    pgqueue.schedules.add(conn, "report:7", Cron("0 6 * * MON", tz="Europe/Berlin"), report, account=7)

Called by applications and by the CLI, inside the caller's transaction, on any kind of connection. `spec` is called by
tasks that declare a schedule in code. The jobs are made by the leading worker's ticks: every change here notifies that
worker, and it looks now and then, too. This module never makes a tick.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, ParamSpec, TypeVar, overload

from pgqueue.client.handle import JobHandle
from pgqueue.config import client
from pgqueue.database import drivers, shown
from pgqueue.database.asking import asks, named, twin
from pgqueue.database.statements import Row, Statement
from pgqueue.errors import InvalidArguments, InvalidOption, ScheduleDeclared, ScheduleNotFound
from pgqueue.jobs.actors import actor_of
from pgqueue.jobs.codec import keywords_only
from pgqueue.jobs.cron import When, check_when
from pgqueue.jobs.fields import FIELDS
from pgqueue.jobs.job import Enqueueable, NewJob
from pgqueue.jobs.values import check_task_name, check_text

P = ParamSpec("P")
T = TypeVar("T")

NAME_MOST = 200  # bytes
OPTIONS = [field.name for field in FIELDS if field.scheduled == "option"]
"""The fields of a job that a schedule keeps in its column `options`. The fragment `scheduled_values` names them."""
LEFT = [name for name in NewJob.__struct_fields__ if name not in {field.name for field in FIELDS}]
"""Those that no schedule keeps."""


@dataclass(frozen=True, slots=True)
class ScheduleInfo:
    """A schedule in the database. Times are UTC, by the database's clock.

    `state` is one of these; only an active schedule ticks:
    - active
    - paused
    - refused: `refused` says why.
    - orphaned: no live worker has declared it for 10 minutes.
    - over: it has no time to come.

    `declared_at` is None if the schedule was added at run time. `next_at` is None until a worker has computed it.
    """

    name: str
    line: str
    tz: str
    catch_up: str
    task: str
    args: Mapping[str, Any]
    queue: str
    priority: int
    options: Mapping[str, Any]
    next_at: datetime | None
    last_at: datetime | None
    last_job: int | None
    declared_at: datetime | None
    paused_at: datetime | None
    refused: str | None
    state: str


@overload
def add(
    conn: object, name: str, when: When, task: Enqueueable[P, Any], /, *args: P.args, **kwargs: P.kwargs
) -> bool: ...
@overload
def add(conn: object, name: str, when: When, task: str, /, **kwargs: Any) -> bool: ...
def add(conn: object, name: str, when: When, task: Any, /, *args: Any, **kwargs: Any) -> bool:
    """Add a schedule, or change the schedule of this name that was added before. Return whether it is new.

    Each tick enqueues this call of `task`: a task, also `task.using(…)`, or the name of a task of another codebase,
    then with keyword arguments only. The first tick is the first time after now. If an existing schedule keeps its cron
    line, it keeps its next time. Raises InvalidArguments or InvalidOption before anything is sent. Raises
    ScheduleDeclared if code declares this name.
    """
    return drivers.run(conn, _adding(name, when, _new(task, args, kwargs)))


@overload
async def aadd(
    conn: object, name: str, when: When, task: Enqueueable[P, Any], /, *args: P.args, **kwargs: P.kwargs
) -> bool: ...
@overload
async def aadd(conn: object, name: str, when: When, task: str, /, **kwargs: Any) -> bool: ...
async def aadd(conn: object, name: str, when: When, task: Any, /, *args: Any, **kwargs: Any) -> bool:
    """`add` for async connections."""
    return await drivers.arun(conn, _adding(name, when, _new(task, args, kwargs)))


@asks
def pause(conn: object, name: str, *, actor: str | None = None) -> Statement[bool]:
    """Pause a schedule: from the commit on it makes no ticks. False if it was paused already."""
    return _about("schedules_pause", name, bool, actor=actor_of(actor))


apause = twin(pause)
"""`pause` for async connections."""


@asks
def resume(conn: object, name: str, *, actor: str | None = None) -> Statement[bool]:
    """Let a paused schedule tick again, or try a refused one again. Its catch_up decides about the missed times.

    False if it was neither paused nor refused.
    """
    return _about("schedules_resume", name, bool, notify=client()[1], actor=actor_of(actor))


aresume = twin(resume)
"""`resume` for async connections."""


@asks
def run(conn: object, name: str, *, actor: str | None = None) -> Statement[JobHandle[Any]]:
    """Enqueue one job of a schedule now, even if it is paused or orphaned. Its `job.tick` is this moment."""
    return _about("schedules_run", name, JobHandle, notify=client()[1], actor=actor_of(actor))


arun = twin(run)
"""`run` for async connections."""


@asks
def remove(conn: object, name: str, *, actor: str | None = None) -> Statement[None]:
    """Delete a schedule. Raises ScheduleDeclared if live workers declare it, because it would be back at once."""

    def read(removed: bool) -> None:
        if not removed:
            raise ScheduleDeclared(
                f"schedule {name!r} is declared by workers that live: it would be back at once. Take it out of the "
                f"code first, or pause it: pgqueue schedules pause {name}"
            )

    return _about("schedules_remove", name, read, actor=actor_of(actor))


aremove = twin(remove)
"""`remove` for async connections."""


@asks
def schedules(conn: object) -> Statement[list[ScheduleInfo]]:
    """All schedules, by name."""
    return named("schedules_list", _listed, name=None)


aschedules = twin(schedules)
"""`schedules` for async connections."""


# What a schedule is --------------------------------------------------------------------------------------------------


def spec(when: When, new: NewJob[Any], what: str) -> dict[str, Any]:
    """The columns of a schedule that enqueues this job. Raises InvalidOption if the job itself says when it runs."""
    if new.run_at is not None or new.delay is not None or isinstance(new.deadline, datetime):
        raise InvalidOption(
            f"{what}: the schedule says when its jobs run: leave out run_at, delay and a fixed deadline"
        )
    if left := [name for name in LEFT if getattr(new, name) is not None]:
        raise InvalidOption(f"{what}: a schedule cannot keep {', '.join(left)} for its jobs")
    options = {name: value for name in OPTIONS if (value := getattr(new, name)) is not None}
    if new.headers is not None:
        options["headers"] = json.loads(new.headers)
    return {
        "line": when.line,
        "tz": when.tz,
        "catch_up": when.catch_up,
        "task": new.task,
        "args": json.loads(new.args),
        "queue": new.queue,
        "priority": new.priority,
        "options": options,
    }


def check_name(name: str) -> str:
    """Return `name` if it can name a schedule (1 to 200 bytes, printable), else raise InvalidOption."""
    if isinstance(name, str) and name.isprintable() and 1 <= len(name.encode()) <= NAME_MOST:
        return name
    raise InvalidOption(f"schedule name {name!r:.80}: use 1 to {NAME_MOST} bytes of printable text")


def _new(task: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NewJob[Any]:
    if isinstance(task, str):
        encoded = keywords_only(check_task_name(task)).encode(args, kwargs)
        return NewJob(task, encoded, "default", 5, None, None, None, None)
    make = getattr(task, "new", None)
    if make is None:
        raise InvalidArguments(f"{task!r} is not a task: declare it with @pgqueue.task, or give a task's name")
    return make(*args, **kwargs)  # type: ignore[no-any-return]


# The statements ------------------------------------------------------------------------------------------------------


def _adding(name: str, when: When, new: NewJob[Any]) -> Statement[bool]:
    what = f"schedule {check_name(name)!r}"
    said = spec(check_when(when, what), new, what)
    params = {**said, "args": new.args, "options": json.dumps(said["options"])}

    def read(rows: list[Row]) -> bool:
        if not rows:
            raise ScheduleDeclared(f"{what} is declared by code; take another name, or change the code")
        return bool(rows[0][0])

    return named("schedules_add", read, name=name, **params, notify=client()[1], actor=actor_of(None))


def _about(statement: str, name: str, read: Callable[[Any], T], **params: object) -> Statement[T]:
    """The statement about one schedule, and how its one value is read."""
    check_text(name, "schedule name")

    def found(rows: list[Row]) -> T:
        if not rows:
            raise ScheduleNotFound(f"no schedule {name!r}: none is called so, or its transaction is open")
        return read(rows[0][0])

    return named(statement, found, name=name, **params)


def _listed(rows: list[Row]) -> list[ScheduleInfo]:
    found: list[dict[str, Any]] = json.loads(rows[0][0])
    return [
        ScheduleInfo(
            **shown.timed(each, ScheduleInfo) | {name: shown.value(each[name]) for name in ("args", "options")}
        )
        for each in found
    ]
