"""The settings of one worker: checked once, when it is made, and trusted from then on.

Made by the worker from its arguments and the configuration. Decides nothing, connects nowhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from math import inf
from typing import Any, TypeVar

from pgqueue import distribution
from pgqueue.client.tasks import Task, registry
from pgqueue.config import config
from pgqueue.errors import InvalidOption
from pgqueue.jobs.values import check_queue, digits

N = TypeVar("N", int, float)

BEATS = 3.0
"""Heartbeats in a lease."""
POLL_LEAST, LEASE_LEAST = 0.01, 1.0  # seconds
BATCH_MOST, SHARED_BATCH_MOST = 2_000, 250
"""Jobs that a worker takes or completes in one step of the loop, at most. Where other workers share the loop, they wait
for that step: 2,000 jobs that do nothing took 6 ms."""
FAIL_UNKNOWN_MOST = 100 * 366 * 86_400.0  # seconds: a database knows no time much further back


@dataclass(frozen=True, slots=True)
class Settings:
    """Durations in seconds; queues with the slots of their own, None for the common ones."""

    dsn: str
    listen_dsn: str | None
    schema: str
    prepare: bool
    notify: bool
    queues: Mapping[str, int | None]
    concurrency: int
    poll: float
    lease: float
    version_tag: str
    pool_size: int | None
    fail_unknown: float
    idle: float = 0.0
    """How far apart the statements of an idle worker are at least; 0: as far as they are by themselves."""
    batch_most: int = BATCH_MOST
    """Jobs that are brought here beyond those that run, or completed, in one step of the loop at most."""

    @property
    def handler_connections(self) -> int:
        """How many connections handlers in threads may have at most, and handlers on the loop as many."""
        own = [slots for slots in self.queues.values() if slots is not None]
        slots = sum(own) + (self.concurrency if len(own) < len(self.queues) else 0)
        return slots if self.pool_size is None else min(self.pool_size, slots)

    @property
    def listen(self) -> bool:
        """Whether this worker listens; without LISTEN it polls."""
        return self.listen_dsn is not None


def settle(
    tasks: Iterable[Task[..., Any]],
    *,
    queues: Sequence[str] | None,
    concurrency: int,
    dsn: str | None,
    listen_dsn: str | None,
    schema: str | None,
    poll: float,
    lease: float,
    version_tag: str | None,
    pool_size: int | None,
    fail_unknown: float,
    idle: float = 0.0,
) -> Settings:
    """Check a worker's arguments against the configuration. Raises NotConfigured or InvalidOption.

    With `idle` there is no poll before it, nor a heartbeat: the lease is three times as long at least.
    """
    idle = at_least("idle", idle, 0.0)
    settled = config(dsn=dsn, listen_dsn=listen_dsn, schema=schema)
    return Settings(
        dsn=settled.require_dsn(),
        listen_dsn=settled.listen_dsn,
        schema=settled.schema,
        prepare=settled.prepare,
        notify=settled.notify,
        queues=queue_slots(queues, tasks),
        concurrency=at_least("concurrency", concurrency, 1),
        poll=max(at_least("poll", poll, POLL_LEAST), idle),
        lease=max(at_least("lease", lease, LEASE_LEAST), BEATS * idle),
        version_tag=version_tag or metadata.version(distribution.NAME),
        pool_size=None if pool_size is None else at_least("pool_size", pool_size, 1),
        fail_unknown=min(at_least("fail_unknown", fail_unknown, 0.0), FAIL_UNKNOWN_MOST),
        idle=idle,
    )


def by_name(declared: Iterable[Task[..., Any]] | None) -> dict[str, Task[..., Any]]:
    """The tasks by every name a job may have for them; without `declared` all tasks of the registry."""
    if declared is None:
        return dict(registry)
    if isinstance(declared, str | Task) or not isinstance(declared, Iterable):
        raise InvalidOption(f"tasks {declared!r}: give a list of tasks, [send_receipt]")
    declared = list(declared)
    for task in declared:
        if not isinstance(task, Task):
            raise InvalidOption(f"tasks: {task!r} is no task; give those that @pgqueue.task has made, [send_receipt]")
    return {name: task for task in declared for name in (task.name, *task.aliases)}


def queue_slots(named: Sequence[str] | None, declared: Iterable[Task[..., Any]]) -> dict[str, int | None]:
    """Queue names with the slots of their own: `mail:5` is at most five jobs of mail at once in this process.

    Without names: every queue of a declared task, all with the common slots. Raises InvalidOption.
    """
    if named is None:
        return {task.queue: None for task in declared} or {"default": None}
    if isinstance(named, str):  # its letters would be taken as queues
        raise InvalidOption(f"queues {named!r}: give a list of names, [{named!r}]")
    queues: dict[str, int | None] = {}
    for text in named:
        name, colon, slots = text.partition(":")
        number = digits(slots)
        if colon and number is None:
            raise InvalidOption(f"queue {text!r}: write NAME or NAME:SLOTS, for example mail:5")
        queues[check_queue(name)] = None if number is None else at_least(f"slots of queue {name}", number, 1)
    return queues


def at_least(what: str, number: N, least: N) -> N:
    """`number`, if it is finite and at least `least`; else InvalidOption."""
    if not isinstance(number, int | float) or isinstance(number, bool):
        raise InvalidOption(f"{what}: give a number, not {number!r}")
    if not least <= number < inf:
        raise InvalidOption(f"{what}: {number} is less than {least}, or infinite")
    return number
