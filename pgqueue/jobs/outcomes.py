"""What became of one run of a job: the outcomes that the executor hands to the completer.

The executor turns a result or an exception into an outcome, by the functions below. The completer writes it to the
database. No I/O here.
"""

from __future__ import annotations

import logging
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import islice
from traceback import format_exception, format_exception_only, format_tb
from types import CodeType, TracebackType
from typing import Any

from pgqueue.errors import Error, InvalidArguments, InvalidOption, JobTimeout
from pgqueue.jobs.codec import UnfitArguments, UnfitResult, result_json
from pgqueue.jobs.fingerprint import PLACE_MOST, fingerprint, place_of
from pgqueue.jobs.headers import RETRY
from pgqueue.jobs.job import Job, NewJob, fields, own_waits
from pgqueue.jobs.retry import RetryPolicy
from pgqueue.jobs.values import Duration, seconds
from pgqueue.options import names_options
from pgqueue.plain_text import asked, foreign, kind_of, said_by

log = logging.getLogger("pgqueue")

STACKS_MOST, CALLS_MOST = 256, 100
_stacks: dict[tuple[tuple[str, CodeType, int], ...], str] = {}
"""The lines of the calls of the tracebacks that were written last."""


@names_options
class Snooze(Exception):
    """Run this job again after `delay` (a duration: seconds, a timedelta, "30s"). The attempt is not spent.

    >>> @pgqueue.task
    ... def collect(order_id: int) -> int | pgqueue.Snooze:
    ...     return stock(order_id) or pgqueue.Snooze(60)
    """

    def __init__(self, delay: Duration) -> None:
        self.delay = seconds(delay, "Snooze: delay")
        super().__init__(f"again in {self.delay:g} s")


@names_options
class Retry(Exception):
    """This attempt did not succeed: make another after `delay` (a duration; None: as the policy says).

    The attempt is spent: if it was the last one, the job ends as failed. `raise Retry(60) from error` keeps the error
    in the attempt's row. `retry_on` and `fail_on` play no part here.
    """

    def __init__(self, delay: Duration | None = None) -> None:
        self.delay = None if delay is None else seconds(delay, "Retry: delay")
        super().__init__("again as the policy says" if self.delay is None else f"again in {self.delay:g} s")


@names_options
class Cancel(Exception):
    """End this job as cancelled, with this reason, because it is no longer wanted. It is not tried again."""

    def __init__(self, reason: str) -> None:
        self.reason = _text(reason, "Cancel")
        super().__init__(self.reason)


@names_options
class Fail(Exception):
    """End this job as failed, with this reason as its error: no further attempt can help."""

    def __init__(self, reason: str) -> None:
        self.reason = _text(reason, "Fail")
        super().__init__(self.reason)


def _text(reason: str, what: str) -> str:
    if isinstance(reason, str):
        return reason
    raise InvalidOption(f"{what}: the reason is a text for people, not {reason!r:.80}")


MESSAGE_MOST = 2_000  # characters
TRACEBACK_MOST = 20_000  # characters

UNFIT_SECONDS, UNFIT_FIRST, UNFIT_MOST = 3_600.0, 5.0, 600.0
"""How long after its enqueue a job is tried again whose arguments do not fit; the first wait and the longest. Each is
about as long as the job is old."""

UNSTORABLE = "Unstorable"
"""The error type of an attempt if the server refused its outcome."""

NO_FAILURES = ("snoozed", "cancelled", "interrupted")
"""The outcomes of attempts that say nothing of an error."""

ASKS = (Snooze, Retry, Cancel, Fail)
NEVER_RUN = (Awaitable, Generator, AsyncGenerator)
"""What a handler must not return: nothing would ever run its body."""

UNCOVERED = (
    "its task is transactional, but its handler did not ask for the connection of its transaction. What it wrote "
    "through another session is not committed together with the job, and may happen twice. Use job.connection, "
    "await job.aconnection(), job.session() or await job.asession(); or job.complete(conn), in a task that is not "
    "transactional"
)


@dataclass(frozen=True, slots=True)
class Completed:
    """The handler returned. `result` is its value as JSON text, None for None.

    `successors` are the jobs from `job.enqueue`. They exist if this completion is written.
    """

    result: str | None = None
    successors: tuple[NewJob[Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Problem:
    """What went wrong in an attempt, for the row in `attempt`."""

    outcome: str
    error_type: str | None = None
    message: str | None = None
    traceback: str | None = None
    place: str | None = None
    """Where in the application it came from: see `fingerprint`."""


@dataclass(frozen=True, slots=True)
class Retried:
    """The job runs again after `delay` seconds. `spent`: this attempt counts. `snoozed`: it counts as a snooze."""

    delay: float
    problem: Problem
    spent: bool = True
    snoozed: bool = False


@dataclass(frozen=True, slots=True)
class Failed:
    """The job is not tried again. `reason` is one of error, arguments, timeout, crashed, deadline, refused."""

    reason: str
    problem: Problem


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The job was stopped on purpose and is not tried again. `reason` is a text for people."""

    reason: str

    @property
    def problem(self) -> Problem:
        """The row in `attempt`."""
        return Problem("cancelled", None, self.reason)


@dataclass(frozen=True, slots=True)
class Released:
    """The job is given back unfinished; the attempt is not spent. `problem` is what stopped it; None: never started."""

    problem: Problem | None = None


@dataclass(frozen=True, slots=True)
class Written:
    """The job was ended in the database by its own transaction."""


@dataclass(frozen=True, slots=True)
class Handed:
    """The handler completed the job in a transaction of its own (`job.complete`).

    Only the database knows whether that was committed. If it was not, `otherwise` is the job's outcome.
    """

    otherwise: Completed | Retried | Failed | Cancelled | Released


@dataclass(frozen=True, slots=True)
class BatchEnds:
    """What the handler of a batch answered: each of its jobs with its outcome, first the job that runs for them."""

    ends: tuple[tuple[Job, Outcome], ...]


Outcome = Completed | Retried | Failed | Cancelled | Released | Written | Handed | BatchEnds

COMPLETED = Completed()
RELEASED = Released()
WRITTEN = Written()
LATE = Cancelled("deadline")
"""The outcome of a job whose deadline had passed when it was claimed."""


def unfit(job: Job) -> Outcome | None:
    """The outcome of a job that does not run: it is late, or its row is larger than an enqueue takes. None: it runs."""
    if (why := job.too_large) is not None:
        return Failed("refused", Problem("failed", "PayloadTooLarge", why))
    return LATE if job.late else None


def given(job: Job, retry: RetryPolicy, what: object, *, raised: bool = False) -> Outcome:
    """The outcome of a handler that returned `what`, or raised it.

    An exception may raise another one when it is looked at. Then that is a failed attempt of the job, too.
    """
    try:
        return _handed(job, retry, one_kind(what) if raised else what, raised)
    except foreign() as broken:
        return undescribed(job, retry, broken)


def _handed(job: Job, retry: RetryPolicy, what: object, raised: bool) -> Outcome:
    if job.written:
        uncommitted = Error("job.complete(conn) was called, but that transaction did not commit", job_id=job.id)
        otherwise = (
            _given(job, retry, what, raised) if raised or isinstance(what, ASKS) else failed(job, retry, uncommitted)
        )
        return otherwise if isinstance(otherwise, Written | Handed | BatchEnds) else Handed(otherwise)
    return _given(job, retry, what, raised)


def undescribed(job: Job, retry: RetryPolicy, broken: BaseException) -> Outcome:
    """The outcome of an attempt of which no more can be told than that `broken` came when it was to be described.

    Never raises: what leaves the call of a handler takes its slot along.
    """
    kind = kind_of(broken)
    text = f"the attempt failed, and its error cannot be described: that raised {kind}"
    log.error("job %d (%s): %s", job.id, job.task, text, extra=fields(job))
    failed = Failed("error", Problem("failed", kind, text))
    outcome = asked(lambda: _undescribed(job, retry, kind, text), lambda _: failed)
    return outcome if not job.written or isinstance(outcome, Written | Handed | BatchEnds) else Handed(outcome)


def _undescribed(job: Job, retry: RetryPolicy, kind: str, text: str) -> Outcome:
    if job.own_end is not None:  # a second run could do twice what its own COMMIT has kept
        return _given(job, retry, job.own_end, True)
    error, policy = Error(text, job_id=job.id), _policy(job, retry)
    return _tried(job, Problem("failed", kind, text), lambda: policy.decide(job.attempt, error, job.max_attempts))


def one_kind(error: object) -> object:
    """The first exception of a group in which all ask for the same: a task group wraps what its tasks raise.

    >>> one_kind(ExceptionGroup("two tasks", [Cancel("gone"), Cancel("gone, too")]))
    Cancel('gone')
    """
    if not isinstance(error, BaseExceptionGroup):
        return error
    kinds = {next((ask for ask in ASKS if isinstance(each, ask)), None) for each in leaves(error)}
    return error if len(kinds) > 1 or None in kinds else leaves(error)[0]


def leaves(error: BaseException) -> list[BaseException]:
    """The exceptions in a group and in the groups within it, in order; the exception alone if it is no group."""
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    return [leaf for each in error.exceptions for leaf in leaves(each)]


def _given(job: Job, retry: RetryPolicy, what: object, raised: bool) -> Outcome:
    if job.own_end is not None and not isinstance(what, Written):
        what, raised = job.own_end, True  # whatever the handler made of it: a second run could do it twice
    match what:
        case Snooze(delay=delay):
            return Retried(delay, Problem("snoozed"), spent=False, snoozed=True)
        case Retry():
            return _again(job, retry, what)
        case Cancel(reason=reason):
            return Cancelled(_clean(reason, MESSAGE_MOST))
        case Fail(reason=reason):
            return Failed("error", Problem("failed", "Fail", _clean(reason, MESSAGE_MOST), *_cause(what)[2:]))
        case UnfitArguments() if raised:
            return misfit(job, retry, what)
        case BaseException() if raised:
            return failed(job, retry, what)
        case Completed() | Retried() | Failed() | Cancelled() | Released() | Written() | Handed() | BatchEnds():
            return what  # a wrapper of the handler has decided
        case value if (never := _never_ran(value)) is not None:
            return failed(job, retry, Error(never, job_id=job.id))
        case value:
            if (left := job.context.left(job)) is not None:
                return failed(job, retry, Error(left, job_id=job.id))
            done = completed(value)
            if job.successors and isinstance(done, Completed):
                return Completed(done.result, tuple(job.successors))
            return done


def _never_ran(value: object) -> str | None:
    """What is wrong with a value whose body has not run: an awaitable of a plain handler, or a generator."""
    if not isinstance(value, NEVER_RUN):
        return None
    if isinstance(value, Coroutine | Generator):
        value.close()  # else Python warns of a coroutine that was never awaited
    kind = type(value).__name__
    return (
        f"the handler returned a {kind}, so its body has not run: a decorator of it may hide that it is async, or a "
        "generator. Declare the task with `async def`, await what it calls, and return instead of yield"
    )


def completed(value: object) -> Completed | Failed:
    """The outcome of a returned value: the job's result, or a failure that says why it cannot be stored."""
    if value is None:
        return COMPLETED
    try:
        return Completed(result_json(value))
    except foreign() as error:  # a class of the application's may raise anything
        ours = isinstance(error, UnfitResult)
        why = said_by(error) if ours else f": {kind_of(error)}: {said_by(error)}"
        message = _clean(f"the result cannot be stored{why}", MESSAGE_MOST)
        return Failed("error", Problem("failed", None if ours else kind_of(error), message))


def failed(job: Job, retry: RetryPolicy, error: BaseException) -> Outcome:
    """The outcome of an exception: another attempt as the retry policy says, or the end."""
    shown = error if isinstance(error, Exception) else RuntimeError(said_by(error))
    policy = _policy(job, retry)
    return _tried(job, problem("failed", error), lambda: policy.decide(job.attempt, shown, job.max_attempts))


def _policy(job: Job, retry: RetryPolicy) -> RetryPolicy:
    """The policy of the task, with the waits that were given with this job. A header that is none harms no job."""
    try:
        own = own_waits(job)
    except ValueError as error:
        message = "job %d (%s): its header %s cannot be a retry policy (%s); that of its task holds"
        log.warning(message, job.id, job.task, RETRY, error, extra=fields(job))
        return retry
    if own is None:
        return retry
    return RetryPolicy(retry.attempts, own.first, own.factor, own.most, retry.retry_on, retry.fail_on)


def misfit(job: Job, retry: RetryPolicy, error: UnfitArguments) -> Outcome:
    """The outcome of arguments that the function here does not take: the handler has not been called.

    In a deployment new code enqueues while old workers still run, so another worker may take them. For an hour after
    the enqueue the job is tried again, and no attempt is spent. Then it fails: such an error does not go away.
    """
    problem = Problem("failed", InvalidArguments.__name__, _clean(said_by(error), MESSAGE_MOST))
    age = _age(job)
    if age >= UNFIT_SECONDS or isinstance(error, retry.fail_on):
        return Failed("arguments", problem)
    wait = min(max(age, UNFIT_FIRST), UNFIT_MOST) * random.uniform(0.5, 1.0)
    return Retried(min(wait, UNFIT_SECONDS - age), problem, spent=False)


def _age(job: Job) -> float:
    """Seconds since the enqueue: by this machine's clock, and no less than the database has counted when it was due."""
    due = job.run_at or job.enqueued_at
    return max(datetime.now(UTC) - job.enqueued_at, due - job.enqueued_at, timedelta()).total_seconds()


def problem(outcome: str, error: BaseException) -> Problem:
    """What the row of the attempt says about an exception."""
    return Problem(outcome, kind_of(error), _clean(said_by(error), MESSAGE_MOST), _traceback(error), _place(error))


def _again(job: Job, retry: RetryPolicy, ask: Retry) -> Outcome:
    """The outcome of `Retry`: another attempt, unless this was the last one."""
    problem, policy = Problem("retried", *_cause(ask)), _policy(job, retry)
    if policy.spent(job.attempt, job.max_attempts):
        return Failed("error", problem)
    return _tried(job, problem, lambda: policy.wait(job.attempt, ask) if ask.delay is None else ask.delay)


def _tried(job: Job, problem: Problem, decide: Callable[[], float | None]) -> Retried | Failed:
    """Another attempt after the delay that `decide` returns, or the end. If `decide` fails, the job ends, too."""
    try:
        delay = decide()
    except BaseException as broken:
        said = "job %d (%s) failed, and its retry function failed, too; it is not retried"
        log.exception(said, job.id, job.task, extra=fields(job))
        message = _clean(f"{problem.message}; retry function: {said_by(broken)}", MESSAGE_MOST)
        return Failed("error", Problem("failed", problem.error_type, message, place=problem.place))
    return Failed("error", problem) if delay is None else Retried(delay, problem)


def timed_out(job: Job, retry: RetryPolicy, seconds: float) -> Outcome:
    """The outcome of a timeout: another attempt as the retry policy says, or the end with reason `timeout`."""
    error = JobTimeout(f"it had not ended after {seconds:g} s, its timeout", job_id=job.id)
    problem = Problem("timeout", "JobTimeout", str(error))
    policy = _policy(job, retry)
    outcome = _tried(job, problem, lambda: policy.decide(job.attempt, error, job.max_attempts))
    return Failed("timeout", outcome.problem) if isinstance(outcome, Failed) else outcome


def unstorable(outcome: Outcome, why: str) -> Outcome | None:
    """The outcome to store instead of one that the server refuses; None if the replacement was refused, too.

    With a completion its result and successors are lost: the job has failed. If another attempt was to follow, it does,
    without its error.
    """
    text = _clean(f"its outcome cannot be stored: {why}", MESSAGE_MOST)
    match outcome:
        case Handed(otherwise):
            instead = unstorable(otherwise, why)
            return Handed(instead) if isinstance(instead, Failed | Retried) else None
        case Failed(_, Problem(_, error_type)) if error_type == UNSTORABLE:
            return None
        case Retried(delay, Problem(name, error_type), spent, snoozed) if error_type != UNSTORABLE:
            return Retried(delay, Problem(name, UNSTORABLE, text), spent, snoozed)
        case _:
            return Failed("error", Problem("failed", UNSTORABLE, text))


def interrupted(why: str) -> Released:
    """The outcome of a run that its worker stopped for a reason of the worker's own."""
    return Released(Problem("interrupted", None, why))


def _cause(ask: Retry | Fail) -> tuple[str, str, str | None, str | None]:
    """Type, message, traceback and place of the error that `ask` was raised from; of `ask` itself if there was none."""
    error = ask.__cause__ or ask.__context__
    if error is None:
        return type(ask).__name__, _clean(said_by(ask), MESSAGE_MOST), None, None  # it may have been returned
    return kind_of(error), _clean(said_by(error), MESSAGE_MOST), _traceback(error), _place(error)


def _place(error: BaseException) -> str | None:
    place = place_of(error)
    return None if place is None else _clean(place, PLACE_MOST)


def _traceback(error: BaseException) -> str | None:
    """The traceback of the error; if it is too long, its middle is cut out.

    What follows begins with a whole line: in the rest of one stands a value without its name, which tells redaction
    (pgqueue/web/redaction.py) that it is to be hidden.
    """
    if isinstance(error, InvalidArguments):
        return None

    def unprintable(broken: BaseException) -> list[str]:  # such as SyntaxError with a line that is no text
        return [*format_tb(error.__traceback__), f"{kind_of(error)} (cannot be printed: {kind_of(broken)})"]

    lines = asked(lambda: _lines(error), unprintable)
    text = _clean("".join(lines), 1 << 30)
    if len(text) <= TRACEBACK_MOST:
        return text
    half = TRACEBACK_MOST // 2
    begin = text.find("\n", len(text) - half - 1) + 1 or len(text)
    return f"{text[:half]}\n… {begin - half} characters left out …\n{text[begin:]}"


def _lines(error: BaseException) -> list[str]:
    """What `format_exception` answers. Most of its time goes into the lines of the calls.

    They are the same for all jobs that fail at one place, so they are kept.
    """
    alone = error.__cause__ is None and (error.__context__ is None or error.__suppress_context__)
    if not alone or error.__traceback__ is None or isinstance(error, BaseExceptionGroup):
        return format_exception(error)
    calls = tuple(islice(_calls(error.__traceback__), CALLS_MOST))
    if len(calls) == CALLS_MOST:  # a deep recursion: its key would be as large as its text
        return format_exception(error)
    stack = _stacks.get(calls)
    if stack is None:
        stack = "".join(format_tb(error.__traceback__))
        if len(_stacks) >= STACKS_MOST:
            _stacks.clear()
        _stacks[calls] = stack
    return ["Traceback (most recent call last):\n", stack, *format_exception_only(error)]


def _calls(traceback: TracebackType | None) -> Iterator[tuple[str, CodeType, int]]:
    """Each call of a traceback, as a key. Code of two files may be equal."""
    while traceback is not None:
        code = traceback.tb_frame.f_code
        yield code.co_filename, code, traceback.tb_lasti
        traceback = traceback.tb_next


def _clean(text: str, most: int) -> str:
    """`text` made storable for PostgreSQL: no NUL, no lone surrogates, not too long."""
    return text[:most].replace("\x00", "\\0").encode("utf-8", "replace").decode()


def fingerprint_of(job: Job, problem: Problem) -> str | None:
    """Which group of failures this one belongs to; None if it is no failure."""
    if problem.outcome in NO_FAILURES:
        return None
    return fingerprint(job.task, problem.error_type or problem.outcome, problem.place)


def written_in(job: Job, outcome: Outcome) -> Outcome:
    """The outcome; if the job's own transaction wrote it, the one written there."""
    return getattr(job, "ended", outcome) if outcome is WRITTEN else outcome
