"""Says in the log if a task with `transactional=True` writes through Django, whose connection is not that of its job.

Such a write is committed by itself: it is kept if the handler raises, and is made again by the next attempt.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from django.db import connections

from pgqueue.client.tasks import registry
from pgqueue.jobs.job import Job, fields

log = logging.getLogger("pgqueue")

WRITES = ("INSERT", "UPDATE", "DELETE", "MERGE", "COPY", "TRUNCATE")
_told: set[str] = set()


@contextmanager
def noticed_writes(job: Job) -> Iterator[None]:
    """Look at what this thread sends through Django while the job's handler runs, if its task is transactional."""
    task = registry.get(job.task)
    if task is None or not task.transactional or job.task in _told:
        yield
        return

    def notice(execute: Callable[..., Any], sql: str, params: Any, many: bool, context: dict[str, Any]) -> Any:
        if str(sql).lstrip().upper().startswith(WRITES) and job.task not in _told:
            _told.add(job.task)
            log.warning(
                "job %d (%s): its task has transactional=True, and it writes through Django's connection %r: that is "
                "committed by itself, and may happen twice. In place of it put @transactional of "
                "pgqueue.integrations.django.transactions below @pgqueue.task. This is said once for each task",
                job.id,
                job.task,
                context["connection"].alias,
                extra=fields(job),
            )
        return execute(sql, params, many, context)

    with ExitStack() as stack:
        for conn in connections.all():
            stack.enter_context(conn.execute_wrapper(notice))
        yield
