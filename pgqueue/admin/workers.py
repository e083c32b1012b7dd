"""Workers and supervisors by hand: list what runs on which worker, and order a restart, quiet or scale.

Called by the CLI, on any host: an order is a row and a NOTIFY, and reaches a supervisor in another container, too. Each
function sends one statement on the given connection. The supervisors carry out the orders.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from pgqueue.config import client
from pgqueue.database.asking import asks, named, said, twin
from pgqueue.database.statements import Statement
from pgqueue.jobs.actors import actor_of
from pgqueue.jobs.values import check_text

Kind = Literal["restart", "quiet", "scale"]

WORKERS_MOST = 1_000
"""So many workers, or supervisors, are listed, the first ones by host."""
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
class LongRun:
    """A job that has run for `age` seconds. `host` is that of its worker; None if the worker's row is gone."""

    id: int
    task: str
    worker: int
    host: str | None
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


@asks
def workers(conn: object, *, host: str | None = None) -> Statement[list[WorkerNow]]:
    """Return the workers that are not known to be dead, at most 1,000, with the jobs that run on them."""
    check_text(host, "host")
    return said("workers_list", list[WorkerNow], host=host, n=JOBS_MOST)


aworkers = twin(workers)
"""`workers` for async connections."""


@asks
def longest(conn: object, n: int) -> Statement[list[LongRun]]:
    """Return the `n` jobs that have run longest, the longest first."""
    return said("workers_longest", list[LongRun], n=n)


alongest = twin(longest)
"""`longest` for async connections."""


@asks
def supervisors(conn: object, *, host: str | None = None) -> Statement[list[SupervisorNow]]:
    """Return the supervisors, at most 1,000, those of the last hour that are gone among them, by host."""
    check_text(host, "host")
    return said("workers_supervisors", list[SupervisorNow], host=host)


asupervisors = twin(supervisors)
"""`supervisors` for async connections."""


@asks
def tell(
    conn: object,
    kind: Kind,
    *,
    size: int | None = None,
    host: str | None = None,
    supervisor: int | None = None,
    actor: str | None = None,
) -> Statement[list[Told]]:
    """Give an order to all supervisors, to those of a host, or to one. Return one entry for each. It takes effect when
    this is committed."""
    check_text(host, "host")
    params = {"kind": kind, "size": size, "host": host, "supervisor": supervisor, "notify": client()[1]}
    return named("workers_tell", lambda rows: [Told(*row) for row in rows], **params, actor=actor_of(actor))


atell = twin(tell)
"""`tell` for async connections."""


@asks
def answers(conn: object, orders: list[int]) -> Statement[list[Answer]]:
    """Return the state of these orders."""
    return named("workers_answers", lambda rows: [Answer(*row) for row in rows], ids=orders)
