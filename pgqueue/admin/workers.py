"""Workers and supervisors by hand: list what runs on which worker, and order a restart, quiet or scale.

Called by the CLI, on any host: an order is a row and a NOTIFY, and reaches a supervisor in another container, too. Each
function sends one statement on the given connection. The supervisors carry out the orders.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from pgqueue.config import config
from pgqueue.database import drivers
from pgqueue.database.statements import Statement, text
from pgqueue.jobs.actors import actor_of
from pgqueue.options import check_text, checks_options

Kind = Literal["restart", "quiet", "scale"]

JOBS_MOST = 100
"""Of one worker at most this many running jobs are listed, those that run longest."""
HEARD_SECONDS = 60.0
"""A supervisor whose last heartbeat is older is given no order."""


@dataclass(frozen=True, slots=True)
class RunningJob:
    """A job that has run on a worker for `age` seconds."""

    id: int
    task: str
    started_at: datetime
    age: float


@dataclass(frozen=True, slots=True)
class WorkerNow:
    """A worker process at its last heartbeat, `beat_age` seconds ago.

    `rss` is in bytes. `lost` is the number of slots with a handler that does not stop.
    """

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
class Order:
    """An order to a supervisor. It is carried out if `done_at` is set and `problem` is None."""

    id: int
    kind: str
    size: int | None
    created_at: datetime
    done_at: datetime | None
    problem: str | None


@dataclass(frozen=True, slots=True)
class SupervisorNow:
    """A supervisor at its last heartbeat, `beat_age` seconds ago.

    It shall keep `size` worker processes, and `active` of them work. `problem` says why it cannot. `order` is the last
    one that it was given, of those of the last day.
    """

    id: int
    host: str
    pid: int
    size: int
    active: int
    state: str
    problem: str | None
    started_at: datetime
    beat_age: float
    order: Order | None

    @property
    def is_heard(self) -> bool:
        """Whether it would be given an order now."""
        return self.beat_age < HEARD_SECONDS


@dataclass(frozen=True, slots=True)
class Told:
    """An order and the supervisor that it was given to."""

    order: int
    supervisor: int
    host: str
    pid: int


@dataclass(frozen=True, slots=True)
class Answer:
    """The state of an order. `problem`: why it could not be carried out. `alive`: whether its supervisor lives."""

    order: int
    done: bool
    problem: str | None
    alive: bool


@checks_options
def workers(conn: object, *, host: str | None = None) -> list[WorkerNow]:
    """Return the workers that are not known to be dead, at most 1,000, with the jobs that run on them."""
    return drivers.run(conn, all_workers(host, config().schema))


@checks_options
async def aworkers(conn: object, *, host: str | None = None) -> list[WorkerNow]:
    """`workers` for async connections."""
    return await drivers.arun(conn, all_workers(host, config().schema))


def supervisors(conn: object) -> list[SupervisorNow]:
    """Return the supervisors, at most 1,000, those of the last hour that are gone among them, by host."""
    return drivers.run(conn, _all_supervisors(config().schema))


async def asupervisors(conn: object) -> list[SupervisorNow]:
    """`supervisors` for async connections."""
    return await drivers.arun(conn, _all_supervisors(config().schema))


def tell(
    conn: object,
    kind: Kind,
    *,
    size: int | None = None,
    host: str | None = None,
    supervisor: int | None = None,
    actor: str | None = None,
) -> list[Told]:
    """Give an order to all supervisors, to those of a host, or to one. Return one entry for each. It takes effect when
    this is committed."""
    return drivers.run(conn, _telling(kind, size, host, supervisor, actor))


async def atell(
    conn: object,
    kind: Kind,
    *,
    size: int | None = None,
    host: str | None = None,
    supervisor: int | None = None,
    actor: str | None = None,
) -> list[Told]:
    """`tell` for async connections."""
    return await drivers.arun(conn, _telling(kind, size, host, supervisor, actor))


def answers(conn: object, orders: list[int]) -> list[Answer]:
    """Return the state of these orders."""
    sql = text("workers_answers", config().schema)
    return drivers.run(conn, Statement(sql, {"ids": orders}, lambda rows: [Answer(*row) for row in rows]))


def _telling(
    kind: Kind, size: int | None, host: str | None, supervisor: int | None, actor: str | None
) -> Statement[list[Told]]:
    check_text(host, "host")
    params = {"kind": kind, "size": size, "host": host, "supervisor": supervisor, "notify": config().notify}
    params["actor"] = actor_of(actor)
    return Statement(text("workers_tell", config().schema), params, lambda rows: [Told(*row) for row in rows])


def _all_supervisors(schema: str) -> Statement[list[SupervisorNow]]:
    import msgspec  # imported here: orders do not need it

    return Statement(
        text("workers_supervisors", schema),
        {},
        lambda rows: msgspec.json.decode(rows[0][0], type=list[SupervisorNow]),
    )


def all_workers(host: str | None, schema: str) -> Statement[list[WorkerNow]]:
    """The statement that asks for the workers of a host, or for all."""
    import msgspec  # imported here: orders do not need it

    check_text(host, "host")
    params = {"host": host, "n": JOBS_MOST}
    return Statement(
        text("workers_list", schema),
        params,
        lambda rows: msgspec.json.decode(rows[0][0], type=list[WorkerNow]),
    )
