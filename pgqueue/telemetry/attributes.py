"""How the spans of OpenTelemetry are named, and what stands in them. `docs/traces.md` lists it.

Names of ours (`pgqueue.…`) are always there. Those of the messaging convention are not stable yet. They are there if
`OTEL_SEMCONV_STABILITY_OPT_IN` has `messaging` or `messaging/dup`, as the convention asks for. Then spans are named as
it says, too. We have had no older names of it, so both words mean the same.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pgqueue.client.job_outcome import JobOutcome
from pgqueue.client.observers import Sending
from pgqueue.jobs.cron import SCHEDULE, TICK
from pgqueue.jobs.job import Job

OPT_IN = "OTEL_SEMCONV_STABILITY_OPT_IN"
SYSTEM = "pgqueue"

Values = dict[str, str | int | float | bool]


def opted_in() -> bool:
    """Whether this process asks for the messaging convention."""
    asked = {word.strip() for word in os.environ.get(OPT_IN, "").split(",")}
    return not asked.isdisjoint(("messaging", "messaging/dup"))


@dataclass(frozen=True, slots=True)
class Attributes:
    """The names and attributes of spans, with those of the messaging convention or without."""

    messaging: bool = False

    def enqueue_name(self, sending: Sending) -> str:
        """`enqueue shop.charge`; `enqueue` for jobs of several tasks. By the convention `send default`."""
        if not self.messaging:
            return _named("enqueue", _only(job.task for job in sending.jobs))
        return _named("create" if sending.successor else "send", _only(job.queue for job in sending.jobs))

    def enqueue(self, sending: Sending) -> Values:
        """What is known before the jobs are sent."""
        task, queue = _only(job.task for job in sending.jobs), _only(job.queue for job in sending.jobs)
        said: Values = {"pgqueue.task": task, "pgqueue.queue": queue}
        if sending.batch:
            said["pgqueue.jobs"] = len(sending.jobs)
        if self.messaging:
            said |= _messaging("create" if sending.successor else "send", queue)
            if sending.batch:
                said["messaging.batch.message_count"] = len(sending.jobs)
        return _known(said)

    def sent(self, sending: Sending) -> Values:
        """What is known after that: of one job its id, or that another job has its unique key."""
        if sending.batch or not sending.handles:
            return {}
        handle = sending.handles[0]
        if handle.staged_id is not None:
            return {"pgqueue.staged_id": handle.staged_id}
        said: Values = {"pgqueue.job_id": handle.id}
        if not handle.created:
            said["pgqueue.created"] = False
        if self.messaging:
            said["messaging.message.id"] = str(handle.id)
        return said

    def run_name(self, job: Job) -> str:
        """`run shop.charge`; by the convention `process default`."""
        return f"process {job.queue}" if self.messaging else f"run {job.task}"

    def run(self, job: Job, headers: Mapping[str, Any]) -> Values:
        """What is known when the attempt begins."""
        said: Values = {
            "pgqueue.task": job.task,
            "pgqueue.queue": job.queue,
            "pgqueue.job_id": job.id,
            "pgqueue.attempt": job.attempt,
        }
        for name, header in (("pgqueue.schedule", SCHEDULE), ("pgqueue.tick", TICK)):
            if isinstance(found := headers.get(header), str):
                said[name] = found
        if self.messaging:
            said |= _messaging("process", job.queue) | {"messaging.message.id": str(job.id)}
        return said


def ended(outcome: JobOutcome) -> Values:
    """What is known when the attempt is over."""
    said: Values = {"pgqueue.outcome": outcome.name}
    if outcome.reason is not None:
        said["pgqueue.reason"] = outcome.reason
    if outcome.delay is not None:
        said["pgqueue.delay"] = outcome.delay
    return said


def _messaging(operation: str, queue: str) -> Values:
    return {
        "messaging.system": SYSTEM,
        "messaging.operation.name": operation,
        "messaging.operation.type": operation,
        "messaging.destination.name": queue,
    }


def _only(values: Iterable[str]) -> str:
    """The value that all of these are; none of several."""
    found = set(values)
    return found.pop() if len(found) == 1 else ""


def _named(word: str, what: str) -> str:
    return f"{word} {what}" if what else word


def _known(said: Values) -> Values:
    return {name: value for name, value in said.items() if value != ""}
