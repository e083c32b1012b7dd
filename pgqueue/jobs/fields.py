"""The fields of a job, once. Every list of them is made from the tables here, when modules load.

`FIELDS` is what an enqueue says of a job. From it come the parameters of one job and of a batch, those of successors,
what a staged job and a schedule keep, and the options of `task.using`. A new field is a row here, a field of `NewJob`,
and a column in SQL: the migration, and the fragments `new_job`, `lines` and `line_values`. `CLAIMED` is what a claim
answers of a job. tests/jobs/test_fields.py compares the tables with `NewJob`, with `Task.using` and with the SQL.

What is done for each job is compiled here from one text, as dataclasses are. A loop over the table would take three
times as long. No I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

Moment = Annotated[datetime, msgspec.Meta(tz=True)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=100 * 366 * 86_400)]

NULL = msgspec.Raw(b"null")


class Field(NamedTuple):
    """A parameter of an enqueue: its name, and what the statements, the outbox, schedules and `using` say of it."""

    name: str
    read: str
    """How the job, or its keys, say it."""
    line: Literal["", "None", "each", "str", "repr", "quoted", "moment"] = "None"
    """What makes a line of a batch of it (job_parameters.py). `each`: every job has another one. "": it is not sent."""
    plain: bool = False
    """Whether the statements have it that enqueue jobs which may run at once."""
    staged: Any = None
    """Its type in the options of a staged job; None: it has a column of its own there."""
    default: Any = None
    """Its value if a job says nothing of it."""
    scheduled: Literal["column", "option", ""] = "option"
    """How a schedule keeps it."""
    using: str = ""
    """The options of `task.using` that say it."""


_TIME = "job.deadline if isinstance(job.deadline, datetime) else None"
_SECONDS = "None if isinstance(job.deadline, datetime) else job.deadline"
_FEW = Annotated[int, msgspec.Meta(ge=1, le=32_767)] | None
_MANY = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] | None
_TEXT = str | None
_WORD = Literal["wait", "skip", "once"] | None

FIELDS = (
    Field("task", "job.task", plain=True, scheduled="column"),
    Field("args", "job.args", "each", plain=True, scheduled="column"),
    Field("queue", "job.queue", plain=True, staged=str, default="default", scheduled="column", using="queue"),
    Field("priority", "job.priority", "str", plain=True, staged=int, default=5, scheduled="column", using="priority"),
    Field("headers", "job.headers", plain=True, staged=msgspec.Raw, default=NULL, using="headers timeout"),
    Field("max_attempts", "job.max_attempts", "str", plain=True, staged=_FEW, using="retry"),
    Field("run_at", "job.run_at", "moment", staged=Moment | None, scheduled="", using="run_at"),
    Field("delay", "job.delay", "repr", staged=Seconds | None, scheduled="", using="delay"),
    Field("deadline", _TIME, "moment", staged=Moment | None, using="deadline"),
    Field("deadline_seconds", _SECONDS, "repr", staged=Seconds | None, scheduled="", using="deadline"),
    Field("lock_key", "job.lock_key", "quoted", staged=_TEXT, using="lock"),
    Field("lock_limit", "job.lock_limit", "str", staged=_MANY, using="lock"),
    Field("on_locked", "job.on_locked", staged=_WORD, using="lock"),
    Field("limit_key", "job.limit_key", "quoted", staged=_TEXT, using="limit"),
    Field("rate_key", "job.rate_key", "quoted", staged=_TEXT, using="rate"),
)

KEY_FIELDS = (
    Field("unique_key", "keys.unique", "quoted", staged=_TEXT, using="unique"),
    Field("idempotency_key", "keys.idempotency", "quoted", staged=_TEXT, using="idempotency_key"),
    Field("hold", "keys.hold", staged=Literal["pending", "live", "after"], default="live"),
    Field("hold_seconds", "keys.seconds", "repr", staged=Seconds, default=0.0),
    Field("on_duplicate", "keys.on_duplicate", staged=Literal["return", "replace"], default="return"),
    Field("debounce_max", "keys.debounce_max", "", staged=Seconds | None),
)
"""The same of a job's unique keys. No schedule keeps them."""

OF_USING = frozenset(option for field in (*FIELDS, *KEY_FIELDS) for option in field.using.split())
"""The options of `task.using`."""

CLAIMED = (
    "id", "pos", "rank", "queue", "task", "args", "attempt", "priority", "max_attempts", "crashes", "snoozes",
    "enqueued_at", "run_at", "deadline", "headers", "lock_key", "unique_keys", "limit_key", "rate_key", "node",
    "too_large",
)  # fmt: skip
"""The columns of a claimed job, in the order of the fragment `claimed`. `Job` reads them by their places."""

_PLAIN_JOB: dict[str, object] = {
    **dict.fromkeys(CLAIMED),
    **{"id": 1, "pos": 0, "rank": 11, "queue": "default", "args": "{}", "attempt": 1, "priority": 5},
    **{"crashes": 0, "snoozes": 0, "enqueued_at": 0},
}


def claimed(**values: object) -> tuple[Any, ...]:
    """The row of a job as a claim answers it, for tests: of these values, else of a plain job at its first attempt."""
    row = _PLAIN_JOB | values
    if len(row) > len(CLAIMED):
        raise TypeError(f"a claimed job has no {', '.join(sorted(row.keys() - CLAIMED))}")
    return tuple(row.values())


def compiled(text: str, names: dict[str, Any]) -> Callable[..., Any]:
    """The function that this text of a table makes; `names` are what it uses."""
    made: Callable[..., Any] = eval(text, {**names, "datetime": datetime})
    return made


def mapping(values: Mapping[str, str]) -> str:
    """The text of a dict of these names and the texts of their values."""
    return f"{{{', '.join(f'{name!r}: {value}' for name, value in values.items())}}}"
