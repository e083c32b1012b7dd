"""What one worker was told: checked once, at the door, trusted from then on.

Made by the worker from its arguments and the configuration. Decides nothing, connects nowhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from pgqueue import distribution
from pgqueue.config import config
from pgqueue.pool import at_least, pools, queue_slots
from pgqueue.tasks import Task, registry

POLL_LEAST, LEASE_LEAST = 0.01, 1.0  # seconds


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

    @property
    def lent(self) -> int:
        """How many connections handlers are lent at most, those in threads and those on the loop each."""
        slots = sum(pool.slots for pool in pools(self.queues, self.concurrency))
        return slots if self.pool_size is None else min(self.pool_size, slots)

    @property
    def listen(self) -> bool:
        """Whether there is a LISTEN; without it the worker polls."""
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
) -> Settings:
    """Check a worker's arguments against the configuration. Raises NotConfigured or InvalidOption."""
    settled = config(dsn=dsn, listen_dsn=listen_dsn, schema=schema)
    return Settings(
        dsn=settled.require_dsn(),
        listen_dsn=settled.listen_dsn,
        schema=settled.schema,
        prepare=settled.prepare,
        notify=settled.notify,
        queues=queue_slots(queues, tasks),
        concurrency=at_least("concurrency", concurrency, 1),
        poll=at_least("poll", poll, POLL_LEAST),
        lease=at_least("lease", lease, LEASE_LEAST),
        version_tag=version_tag or metadata.version(distribution.NAME),
        pool_size=None if pool_size is None else at_least("pool_size", pool_size, 1),
    )


def by_name(declared: Iterable[Task[..., Any]] | None) -> dict[str, Task[..., Any]]:
    """The tasks by every name a job may have for them; all that are declared, if none are given."""
    if declared is None:
        return dict(registry)
    return {name: task for task in declared for name in (task.name, *task.aliases)}
