"""What is logged of jobs, on the logger `pgqueue.job`.

The completer logs each attempt that did not succeed, once, because all outcomes reach it. Starts and successes are
logged by hooks. These exist only if the logger is enabled for their level when the worker starts: else they cost
nothing. That level is DEBUG; `pgqueue work` makes it INFO for successes where a person looks on.
"""

from __future__ import annotations

import logging
from dataclasses import asdict, replace
from time import perf_counter
from traceback import print_exc

from pgqueue.client.job_outcome import JobOutcome
from pgqueue.client.middleware import Hooks
from pgqueue.errors import JobLost
from pgqueue.jobs.job import Job, fields
from pgqueue.jobs.outcomes import Cancelled, Failed, Outcome, Problem, Released, Retried, written_in

log = logging.getLogger("pgqueue.job")

success_level = logging.DEBUG
"""The level of a success. Read when a worker starts."""


def report(job: Job, outcome: Outcome) -> None:
    """Log an attempt that did not succeed: ERROR if it was the last, WARNING if there is another one or it was stopped.

    A run whose job was given to another worker meanwhile ends nothing: the completer says in one line that its outcome
    is dropped. A job that is given back while the database is away has no traceback: its code has not failed.

    Called for every outcome, from the loop and from threads. Raises nothing, even if a filter of the application fails:
    an error here would keep the job's slot.
    """
    match written_in(job, outcome):
        case Retried(_, problem) | Failed(_, problem) if problem.error_type == JobLost.__qualname__:
            pass
        case Retried(_, Problem("interrupted"), _, False) as ended:
            _tell(job, ended, None)
        case Retried(_, problem, _, False) | Failed(_, problem) | Released(Problem() as problem) as ended:
            _tell(job, ended, problem.traceback)
        case Cancelled() as ended:
            _tell(job, ended, None)


def with_lines(hooks: Hooks) -> Hooks:
    """Return these hooks, with hooks that log starts and successes added if the logger is enabled for them."""
    if not log.isEnabledFor(success_level):
        return hooks
    starts = (_started,) if log.isEnabledFor(logging.DEBUG) else ()
    return replace(hooks, on_start=(*starts, *hooks.on_start), on_finish=(_finished, *hooks.on_finish))


def _started(job: Job) -> None:
    log.debug("%s started", _named(job), extra=fields(job))


def _finished(job: Job, told: JobOutcome) -> None:
    if told.name in ("completed", "snoozed") or (told.name == "released" and told.reason is None):
        _say(success_level, job, told, None)


def _tell(job: Job, ended: Outcome, traceback: str | None) -> None:
    try:
        level = logging.ERROR if isinstance(ended, Failed) else logging.WARNING
        _say(level, job, JobOutcome.of(ended, _seconds(job)), traceback)
    except Exception:
        print_exc()


def _say(level: int, job: Job, told: JobOutcome, traceback: str | None) -> None:
    if not log.isEnabledFor(level):
        return
    known = {name: value for name, value in asdict(told).items() if value is not None}
    if not told.seconds:
        del known["seconds"]
    extra = fields(job, outcome=known.pop("name"), **known)
    text = f"{_named(job)} {_sentence(told)}"
    record = log.makeRecord(log.name, level, __file__, 0, text, (), None, extra=extra)
    record.exc_text = traceback  # where every formatter looks for it
    log.handle(record)


def _named(job: Job) -> str:
    return f"job {job.id} ({job.task}, queue {job.queue}, attempt {job.attempt})"


def _sentence(told: JobOutcome) -> str:
    """`failed after 0.512 s, again in 9.7 s: KeyError: 'sku'`"""
    what: str = told.name
    if told.reason == "timeout":
        what = "timed out"
    elif told.name in ("retried", "failed"):
        what = "is given back" if told.reason == "interrupted" else "failed"
    after = f" after {told.seconds:.3f} s" if told.seconds else ""
    then = {"retried": ", again", "snoozed": ", again", "failed": " and is given up"}.get(told.name, "")
    when = "" if told.delay is None else f" in {told.delay:.1f} s"
    why = told.error_type, told.error if told.error_type else told.error or told.reason
    said = ": ".join(" ".join(each.split()) for each in why if each)
    return f"{what}{after}{then}{when}{said and ': '}{said}"


def _seconds(job: Job) -> float:
    """How long the job has run; 0 if it was never started."""
    began: float | None = getattr(job, "began", None)
    return 0.0 if began is None else perf_counter() - began
