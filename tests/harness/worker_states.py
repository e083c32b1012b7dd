"""The state of a worker that a test makes up, and what its fetcher asks and tells: what services are given instead of a
worker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from pgqueue.client.tasks import Task
from pgqueue.database.sessions import Link
from pgqueue.jobs.job import Job
from pgqueue.worker.concurrency.waiter_cursors import WaiterCursors
from pgqueue.worker.run.slots import Room
from pgqueue.worker.settings import settle
from pgqueue.worker.state import WorkerState


class Hands:
    """What a fetcher asks and tells, each to be replaced: by default nothing is asked for, and nothing is kept."""

    def __init__(self) -> None:
        self.to_fetch: Callable[[], list[Room]] = list
        self.poison_ranks: Callable[[], Sequence[int]] = tuple
        self.deliver: Callable[[list[Job]], None] = _nothing
        self.fetched: Callable[[], None] = _nothing
        self.blocked: Callable[[Mapping[str, Collection[int]], Collection[str], tuple[int, int] | None], None] = (
            _nothing
        )
        self.granted: Callable[[Iterable[Job]], None] = _nothing
        self.waiter_cursors = WaiterCursors()


def _nothing(*_: object) -> None: ...


def worker_state(
    link: Link,
    worker_id: int = 1,
    tasks: Mapping[str, Task[..., Any]] | Iterable[str] = (),
    *,
    queues: Iterable[str] = ("default",),
    **settings: Any,
) -> WorkerState:
    """A running worker of this id; of `tasks`, where only their names count, the names do."""
    known = dict(tasks) if isinstance(tasks, Mapping) else dict.fromkeys(tasks)
    told: dict[str, Any] = {
        "concurrency": 10, "listen_dsn": None, "schema": link.schema, "poll": 1.0, "lease": 15.0, "version_tag": "t",
        "pool_size": None, "fail_unknown": 86_400.0,
    }  # fmt: skip
    state = WorkerState(
        settle([], queues=list(queues), dsn=link.dsn or "postgresql:///none", **(told | settings)),
        known,  # type: ignore[arg-type]
    )
    state.link, state.id, state.phase, state.doubt = link, worker_id, "running", asyncio.Event()
    return state
