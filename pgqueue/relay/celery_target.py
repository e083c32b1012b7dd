"""The target that is Celery: staged jobs become Celery tasks by Celery's own API, at least once.

For teams whose broker stays. Celery is the extra `celery`; nothing here imports it, the application gives its `app`.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from functools import cached_property
from typing import Any

from pgqueue.options import names_options
from pgqueue.relay.callable_target import CallableTarget, Refuse, StagedJob
from pgqueue.relay.source import Source
from pgqueue.relay.target import Delivering

DEFAULT_QUEUE, DEFAULT_PRIORITY = "default", 5
"""Jobs with these leave it to Celery."""


@names_options
class CeleryTarget:
    """Sends each staged job as a Celery task of the same name: at least once, with the job's uid as its `task_id`.

    A repeat has the same `task_id`, and may come late: let the task find out by it whether it has run. What is sent is
    as safe as the broker: the job leaves the outbox when `app.send_task` has returned.

    - A delay or `run_at` becomes `eta`, a deadline `expires`. Headers and any queue but `default` travel along.
    - Priority 0 is first here. It is turned round for AMQP, where the highest is first. The default sets none.
    - Celery has no locks, limits, rates and unique keys, and a task's retries belong to the task. A job that asks for
      one of these is refused.
    - Results are not kept unless `ignore_result=False`. Then Celery's client may keep something in memory for each.

        target = CeleryTarget(shop.celery_app)
        await Relay(app_dsn, target).run()
    """

    def __init__(self, app: Any, *, name: str = "celery", ignore_result: bool = True) -> None:
        self._app = app
        self._ignore_result = ignore_result
        self._target = CallableTarget(self._send, name=name)

    def open(self, source: Source, *, adopt: bool) -> AbstractAsyncContextManager[Delivering]:
        """Find out whether this outbox belongs here."""
        return self._target.open(source, adopt=adopt)

    def _send(self, job: StagedJob) -> None:
        if missing := _missing(job):
            raise Refuse(f"Celery has no {', '.join(missing)}: enqueue the job in a queue of pgqueue, or without it")
        options: dict[str, Any] = {}
        if job.queue != DEFAULT_QUEUE:
            options["queue"] = job.queue
        if job.priority != DEFAULT_PRIORITY:
            options["priority"] = 9 - job.priority if self._highest_is_first else job.priority
        if job.headers is not None:
            options["headers"] = job.headers
        self._app.send_task(
            job.task,
            kwargs=job.args,
            task_id=job.uid,
            eta=job.run_at,
            expires=job.deadline,
            ignore_result=self._ignore_result,
            retry=False,  # the relay tries again
            **options,
        )

    @cached_property
    def _highest_is_first(self) -> bool:
        with self._app.connection_for_write() as connection:  # it does not connect
            return bool(connection.transport.driver_type == "amqp")


def _missing(job: StagedJob) -> list[str]:
    """What the job asks for and Celery does not have."""
    new = job.new
    asked = {
        "lock": new.lock_key,
        "limit": new.limit_key,
        "rate": new.rate_key,
        "unique key": new.keys,
        "max_attempts": new.max_attempts,
    }
    return [name for name, value in asked.items() if value is not None]
