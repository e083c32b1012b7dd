"""What people ask of supervisors and workers: which worker runs what; restart, quiet, scale.

Called by the CLI, from anywhere: an order is a row and a NOTIFY, so it reaches a supervisor in another container, too.
Each is one statement on the connection given. Does nothing itself: supervisors do what they are told.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from pgqueue.config import config
from pgqueue.database import drivers
from pgqueue.database.statements import Statement, text

Kind = Literal["restart", "quiet", "scale"]

JOBS_MOST = 100
"""Of one worker, so many running jobs are shown, those that run longest."""


@dataclass(frozen=True, slots=True)
class RunningJob:
    """A job that runs on a worker, since `age` seconds."""

    id: int
    task: str
    started_at: datetime
    age: float


@dataclass(frozen=True, slots=True)
class WorkerNow:
    """A worker process as of its last beat, `beat_age` seconds ago. `rss` in bytes; `lost` are slots with a handler
    that does not stop."""

    id: int
    host: str
    pid: int
    supervisor_id: int | None
    state: str
    version_tag: str
    concurrency: int
    busy: int
    lost: int
    rss: int | None
    queues: tuple[str, ...]
    started_at: datetime
    beat_age: float
    lease: float
    jobs: tuple[RunningJob, ...]


@dataclass(frozen=True, slots=True)
class Told:
    """An order, and the supervisor that was given it."""

    order: int
    supervisor: int
    host: str
    pid: int


@dataclass(frozen=True, slots=True)
class Answer:
    """What has become of an order; `problem` says why it could not be carried out, `alive` whether its
    supervisor still can."""

    order: int
    done: bool
    problem: str | None
    alive: bool


def workers(conn: object, *, host: str | None = None) -> list[WorkerNow]:
    """Return the workers that are not known to be dead, at most 1,000, with what runs on them."""
    return drivers.run(conn, everybody(host, config().schema))


def tell(
    conn: object, kind: Kind, *, size: int | None = None, host: str | None = None, supervisor: int | None = None
) -> list[Told]:
    """Give an order to all supervisors, those of a host, or one; those told. It is heard when this is committed."""
    params = {"kind": kind, "size": size, "host": host, "supervisor": supervisor, "notify": config().notify}
    sql = text("workers_tell", config().schema)
    return drivers.run(conn, Statement(sql, params, lambda rows: [Told(*row) for row in rows]))


def answers(conn: object, orders: list[int]) -> list[Answer]:
    """Return what has become of these orders."""
    sql = text("workers_answers", config().schema)
    return drivers.run(conn, Statement(sql, {"ids": orders}, lambda rows: [Answer(*row) for row in rows]))


def everybody(host: str | None, schema: str) -> Statement[list[WorkerNow]]:
    """Ask for the workers of a host, or all."""
    import msgspec  # only here: an order does without

    params = {"host": host, "n": JOBS_MOST}
    return Statement(
        text("workers_list", schema),
        params,
        lambda rows: msgspec.json.decode(rows[0][0], type=list[WorkerNow]),
    )
