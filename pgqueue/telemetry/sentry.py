"""Sentry: errors of jobs that have failed, transactions of attempts, spans of enqueues, check-ins of schedules.

    sentry_sdk.init(dsn, integrations=[PgqueueIntegration()])

The trace goes on from the enqueue to every attempt: `sentry-trace` and `baggage` are headers of the job. Each attempt
has an isolation scope of its own, kept until its outcome is known. So what a handler has set (tags, breadcrumbs, a
user) is in the event of its error, and in no event of another job. `docs/traces.md` has the names.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from pgqueue.client.job_outcome import JobOutcome
from pgqueue.client.observers import End, Sending, observers
from pgqueue.distribution import needs_extra
from pgqueue.jobs.job import Job
from pgqueue.jobs.outcomes import ASKS
from pgqueue.jobs.values import Duration, seconds
from pgqueue.options import names_options
from pgqueue.telemetry.carrier import carried, carrying, headers_of
from pgqueue.telemetry.check_ins import CheckIns

with needs_extra("sentry"):
    import sentry_sdk
    from sentry_sdk.integrations import Integration
    from sentry_sdk.integrations.logging import ignore_logger
    from sentry_sdk.scope import Scope, should_send_default_pii, use_isolation_scope
    from sentry_sdk.scrubber import EventScrubber
    from sentry_sdk.tracing import NoOpSpan
    from sentry_sdk.utils import event_from_exception

log = logging.getLogger("pgqueue")

HEADERS = ("sentry-trace", "baggage")
ARGUMENTS_MOST = 8_192  # characters of JSON

STATUS = {
    "completed": "ok",
    "snoozed": "ok",
    "retried": "internal_error",
    "failed": "internal_error",
    "cancelled": "cancelled",
    "released": "aborted",
}
"""The status of a transaction, by the outcome of its attempt."""


@names_options
class PgqueueIntegration(Integration):
    """Report to Sentry what becomes of jobs. An error is an event if the job has failed for good.

    - `each_attempt`: an attempt that is made again is an event, too.
    - `arguments`: whether events have the arguments of the job. Default is what the SDK is told: `data_collection`
      (`queues`), in older ones `send_default_pii`. Values under keys that its scrubber knows, such as `password`, are
      left out, at any depth.
    - `check_ins`: whether schedules are monitors. Then a job of a schedule checks in when it starts and when it ends.
    - `checkin_margin`: how late a job of a schedule may start, `max_runtime`: how long it may run, with its retries.
      Durations, in whole minutes; else what is set in Sentry.

        sentry_sdk.init(dsn, integrations=[PgqueueIntegration(checkin_margin="5m")])
    """

    identifier = "pgqueue"
    origin = "auto.queue.pgqueue"

    def __init__(
        self,
        *,
        each_attempt: bool = False,
        arguments: bool | None = None,
        check_ins: bool = True,
        checkin_margin: Duration | None = None,
        max_runtime: Duration | None = None,
    ) -> None:
        self.each_attempt = each_attempt
        self.arguments = arguments
        self.check_ins = CheckIns(_minutes(checkin_margin, "checkin_margin"), _minutes(max_runtime, "max_runtime"))
        self.checks_in = check_ins

    @staticmethod
    def setup_once() -> None:
        """Called by the SDK, once in a process."""
        if not any(isinstance(each, Reporting) for each in observers):
            observers.append(Reporting())
        ignore_logger("pgqueue.job")  # its errors are those of jobs, which are events already


def _minutes(duration: Duration | None, what: str) -> int | None:
    return None if duration is None else max(1, math.ceil(seconds(duration, what) / 60))


def _integration() -> PgqueueIntegration | None:
    """That of the client that is active here; None if there is none."""
    found: PgqueueIntegration | None = sentry_sdk.get_client().get_integration(PgqueueIntegration)
    return found


# The observer --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Attempt:
    """An attempt that has begun: its scope and transaction, and what the handler raised."""

    scope: Scope
    transaction: Any
    error: BaseException | None = None


class Reporting:
    """Reports what one process does with jobs."""

    def __init__(self) -> None:
        # Changed by the loop and by threads; each changes only the key of its own job.
        self._attempts: dict[Job, Attempt] = {}

    def enqueuing(self, sending: Sending) -> End:
        """Begin a `queue.publish` span if there is a transaction, and put the trace into the headers of the jobs."""
        if _integration() is None:
            return _nothing
        queues = {job.queue for job in sending.jobs}
        span = None
        if sentry_sdk.get_current_span() is not None:
            tasks = {job.task for job in sending.jobs}
            name = tasks.pop() if len(tasks) == 1 else "enqueue"
            span = sentry_sdk.start_span(op="queue.publish", name=name, origin=PgqueueIntegration.origin)
            span.set_data("messaging.system", "pgqueue")
            if len(queues) == 1:
                span.set_data("messaging.destination.name", queues.pop())
            span.set_data("messaging.message.body.size", sum(len(job.args.encode()) for job in sending.jobs))
            span.__enter__()

        def end(error: BaseException | None) -> None:
            if span is None:
                return
            try:
                if not sending.batch and sending.handles:
                    handle = sending.handles[0]
                    span.set_data("messaging.message.id", str(handle.staged_id or handle.id))
            finally:
                kind, where = (None, None) if error is None else (type(error), error.__traceback__)
                span.__exit__(kind, error, where)

        try:
            trace = {"sentry-trace": sentry_sdk.get_traceparent(), "baggage": sentry_sdk.get_baggage()}
            if texts := {name: text for name, text in trace.items() if text}:
                sending.jobs = carrying(sending.jobs, texts)
        except BaseException as error:
            end(error)
            raise
        return end

    def running(self, job: Job) -> End:
        """Let the handler run in the scope of the attempt. If it is called again, that is the same scope."""
        integration = _integration()
        if integration is None:
            return _nothing
        attempt = self._attempts.get(job)
        begins = attempt is None
        if attempt is None:
            attempt = self._attempts[job] = _begun(job)
        # First the scope: what the handler says of its customer must not reach the events of another job.
        within = _within(attempt)
        within.__enter__()
        if begins and integration.checks_in and job.attempt == 1:
            with _reporting(job):
                integration.check_ins.started(job)

        def end(error: BaseException | None) -> None:
            attempt.error = error
            within.__exit__(None, None, None)

        return end

    def finished(self, job: Job, outcome: JobOutcome) -> None:
        """Report the attempt: its error, its transaction, the check-in of its schedule."""
        attempt, integration = self._attempts.pop(job, None), _integration()
        if integration is None:
            return
        if outcome.name == "failed" or (outcome.name == "retried" and integration.each_attempt):
            with _reporting(job), _within(attempt or _begun(job)):
                _capture(outcome, None if attempt is None else attempt.error)
        if attempt is not None:
            with _reporting(job), _within(attempt):
                attempt.transaction.set_status(STATUS[outcome.name])
                attempt.transaction.set_data("pgqueue.outcome", outcome.name)
                attempt.transaction.finish()
        if integration.checks_in:
            with _reporting(job):
                integration.check_ins.ended(job, outcome)

    def flush(self, seconds: float) -> None:
        """Let the SDK send what waits to be sent."""
        sentry_sdk.flush(timeout=seconds)


def _nothing(error: BaseException | None) -> None:
    """There is no client."""


def _begun(job: Job) -> Attempt:
    """A scope for this attempt, made from what all of the process have in common, and a transaction in it."""
    scope = sentry_sdk.get_isolation_scope().fork()
    scope.clear_breadcrumbs()
    said = {"job_id": job.id, "task": job.task, "queue": job.queue, "attempt": job.attempt}
    with use_isolation_scope(scope):
        transaction = _transaction(job, said)
    for name, value in _measured(job).items():
        transaction.set_data(name, value)
    scope.set_tag("pgqueue.job_id", str(job.id))
    scope.set_tag("pgqueue.task", job.task)
    scope.set_tag("pgqueue.queue", job.queue)
    scope.set_tag("pgqueue.attempt", str(job.attempt))
    scope.set_context("pgqueue", said | {"crashes": job.crashes, "enqueued_at": job.enqueued_at.isoformat()})
    scope.add_event_processor(lambda event, hint: _with_arguments(event, job))
    return Attempt(scope, transaction)


def _transaction(job: Job, said: dict[str, Any]) -> Any:
    """The transaction of the attempt: without headers if the SDK fails by them, at last one that says nothing."""
    for headers in (carried(headers_of(job), HEADERS), {}):
        with _reporting(job):
            continued = sentry_sdk.continue_trace(
                headers, op="queue.process", name=job.task, source="task", origin=PgqueueIntegration.origin
            )
            return sentry_sdk.start_transaction(continued, custom_sampling_context={"pgqueue_job": said})
    return NoOpSpan()


@contextmanager
def _reporting(job: Job) -> Iterator[None]:
    """A part of what Sentry is told. If it fails, that is logged, and the other parts go on."""
    try:
        yield
    except Exception:
        log.warning("job %d (%s): a part of it was not reported to Sentry", job.id, job.task, exc_info=True)


@contextmanager
def _within(attempt: Attempt) -> Iterator[None]:
    """A block in the scope and the transaction of this attempt."""
    with use_isolation_scope(attempt.scope):
        sentry_sdk.get_current_scope().span = attempt.transaction
        yield


def _measured(job: Job) -> dict[str, Any]:
    due = max(job.enqueued_at, job.run_at or job.enqueued_at)
    return {
        "messaging.system": "pgqueue",
        "messaging.destination.name": job.queue,
        "messaging.message.id": str(job.id),
        "messaging.message.receive.latency": max(0.0, (job.started_at - due) / timedelta(milliseconds=1)),
        "messaging.message.retry.count": job.attempt - 1,
    }


# Errors --------------------------------------------------------------------------------------------------------------


def _capture(outcome: JobOutcome, error: BaseException | None) -> None:
    mechanism = {"type": PgqueueIntegration.identifier, "handled": False}
    if isinstance(error, ASKS):
        error = error.__cause__ or error.__context__ or error
    if isinstance(error, Exception):
        event, hint = event_from_exception(error, sentry_sdk.get_client().options, mechanism)
        _hide_own_frames(event)
    else:  # a timeout, a handler that returned Fail, arguments that do not fit
        kind = outcome.error_type or outcome.reason or "error"
        value = {"type": kind, "value": outcome.error or "", "mechanism": mechanism}
        event, hint = {"level": "error", "exception": {"values": [value]}}, {}
    if outcome.name == "retried":
        event["level"] = "warning"
    sentry_sdk.capture_event(event, hint)


def _hide_own_frames(event: Any) -> None:
    """Variables of our frames are no help, and have the arguments of the job; they are no frames of the application."""
    for value in event["exception"]["values"]:
        for frame in (value.get("stacktrace") or {}).get("frames", ()):
            if (frame.get("module") or "").partition(".")[0] == "pgqueue":
                frame.pop("vars", None)
                frame["in_app"] = False


def _with_arguments(event: Any, job: Job) -> Any:
    """An event of the job, with its arguments if they are wanted. Called by the SDK for each event of the attempt."""
    integration = _integration()
    if event.get("type") == "transaction" or integration is None:
        return event
    wanted = _collects() if integration.arguments is None else integration.arguments
    if wanted and job.args is not None:
        said = event.setdefault("contexts", {}).setdefault("pgqueue", {})
        said["arguments"] = _scrubbed(job.args) if len(job.args) <= ARGUMENTS_MOST else f"{len(job.args)} characters"
    return event


def _collects() -> bool:
    """Whether the SDK is to send what is in the messages of queues."""
    collection = sentry_sdk.get_client().options.get("data_collection")  # None: an SDK that does not have it yet
    return should_send_default_pii() if collection is None else bool(collection.get("queues"))


def _scrubbed(args: str) -> Any:
    """These arguments without what the scrubber of the client does not let pass, at any depth."""
    own = sentry_sdk.get_client().options.get("event_scrubber")
    scrubber = EventScrubber(None if own is None else list(own.denylist), recursive=True)
    found = json.loads(args)
    scrubber.scrub_dict(found)
    return found
