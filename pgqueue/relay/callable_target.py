"""The target that is a Python callable: staged jobs go wherever its code sends them, at least once.

The naive version calls the function for a batch, and raises if one call fails. Then one row that always fails holds up
all others for ever. Here each row has a fate of its own:

1. A row goes from the outbox only after the callable has returned for it. So a crash loses nothing.
2. A crash in a batch repeats at most those rows of it for which the callable had returned, and the one it was at.
3. Beside that a row may come again late: a relay that stood still goes on with the rows it had read. No fence can stop
   it, because the callable's effect is not in our transaction. The uid tells a repeat from a new job.
4. After an error the row stays, and is tried again after a growing pause. Rows that have not failed come first.
5. If many calls in a row have failed, the receiver is down: one call is made after each growing pause, until one
   succeeds.
6. What the function raises, whatever it is, is text before asyncio sees it. So no StopIteration or SystemExit of it
   leaves its thread or its task, and an exception that raises when it is looked at raises there. Its task is not the
   relay's: it can cancel that. What ends the relay comes from outside: a cancellation of the relay, or Ctrl-C.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import signal
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any
from uuid import UUID, uuid5

from pgqueue.database.backoff import Backoff, one_line
from pgqueue.errors import Error, InvalidArguments, InvalidOption
from pgqueue.jobs.job import NewJob
from pgqueue.jobs.staged import check_format, job_of
from pgqueue.options import names_options
from pgqueue.plain_text import plural
from pgqueue.relay.source import Refusal, Source, StagedRow
from pgqueue.relay.target import Delivery
from pgqueue.steady_clock import monotonic

log = logging.getLogger("pgqueue")

DELIVERY_SECONDS = 1.0
"""A delivery ends after this time, so that what was delivered is soon deleted."""
DOWN_AFTER = 10
"""After so many errors in a row the receiver is down."""
DOWN_MOST = 15.0
"""The longest pause, in seconds, while the receiver is down."""
LOG_SECONDS = 60.0
REMEMBERED_MOST = 10_000
TEXT_MOST = 1_000
"""So many characters of an error are logged, or are the reason of a refusal."""
_TARGETS = UUID("6f1c7f0e-7d3b-4a51-9d4e-3f2f5b7d0c11")
"""The name of a target becomes a uuid under this one."""


@dataclass(frozen=True, slots=True)
class Raised:
    """What a call has raised, as text. `refuses`: the job is never to be tried again."""

    refuses: bool
    kind: str
    text: str


class Refuse(Error):
    """Raised by a callable that can never deliver this job: it is put aside with this reason, and is not tried again
    before somebody asks for it (`pgqueue relay --retry-refused`)."""


@dataclass(frozen=True, slots=True)
class StagedJob:
    """A staged job, as a callable gets it. `uid` stays the same when the job comes again."""

    uid: str
    id: int
    """The number of its row. It may come again; a uid never does."""
    task: str
    args_json: str
    """The arguments as JSON text: an object, by parameter name."""
    queue: str
    priority: int
    """0 (first) to 9 (last)."""
    run_at: datetime | None
    """Not to be started before; None: at once."""
    deadline: datetime | None
    """Not to be started after."""
    headers: dict[str, Any] | None
    order_key: str | None
    """Jobs with the same key come in order, but for repeats."""
    staged_at: datetime
    new: NewJob[Any]
    """The same job with all its options, as a queue of pgqueue would get it."""

    @property
    def args(self) -> dict[str, Any]:
        """The arguments. Raises Refuse if Python cannot read them, such as a number of more than 4,300 digits."""
        try:
            found: dict[str, Any] = json.loads(self.args_json)
        except (ValueError, RecursionError) as error:
            raise Refuse(f"args cannot be read in Python: {one_line(error)}") from error
        return found


Deliver = Callable[[StagedJob], object] | Callable[[StagedJob], Awaitable[object]]


@names_options
class CallableTarget:
    """Gives each staged job to `fn`, one after another: at least once, not exactly once.

    `fn` is a function or an async function; a sync one runs in a thread. When it returns, the job is delivered, and is
    deleted from the outbox. If it raises `Refuse`, InvalidArguments or InvalidOption, the job is put aside. After
    anything else, SystemExit too, the job stays and is tried again; it holds up no other job. A repeat has the same
    `uid`, and may come late. Give each call a timeout of its own: the next one waits for it.

    An outbox remembers the `name` of its target, and is not delivered to another one unless it is adopted.

        def publish(job: StagedJob) -> None:
            broker.publish(job.task, job.args, message_id=job.uid)

        await Relay(app_dsn, CallableTarget(publish, name="broker")).run()
    """

    def __init__(self, fn: Deliver, *, name: str = "callable") -> None:
        self._fn = fn
        self._uuid = str(uuid5(_TARGETS, name))
        self._async = inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(type(fn).__call__)
        self._done: dict[str, None] = {}
        """Uids that were delivered by this process, the oldest first: the application may have locked their rows."""

    @asynccontextmanager
    async def open(self, source: Source, *, adopt: bool) -> AsyncIterator[CallableSession]:
        """Find out whether this outbox belongs here."""
        await source.find()
        await source.check(self._uuid, adopt=adopt)
        await source.settle(self._uuid)
        yield CallableSession(self)

    def knows(self, uid: str) -> bool:
        """Whether this process has delivered it."""
        return uid in self._done

    async def call(self, job: StagedJob, relay: asyncio.Task[Any]) -> Raised | None:
        """Call the function, in a task that is not the relay's. Answers what it has raised; None: it has returned."""
        found = partial(self._fn, job) if self._async else await asyncio.to_thread(_called, self._fn, job)
        raised = await _awaited(found, relay) if callable(found) else found
        if raised is None:
            self._done[job.uid] = None
            if len(self._done) > REMEMBERED_MOST:
                del self._done[next(iter(self._done))]
        return raised


class CallableSession:
    """An opened `CallableTarget`, and which rows have failed."""

    def __init__(self, target: CallableTarget) -> None:
        self._target = target
        self._failed: dict[str, None] = {}
        """Uids of rows whose last call has failed, the oldest first."""
        self._in_a_row = 0
        self._down = Backoff(first=0.1, most=DOWN_MOST)
        self._log_at = 0.0
        self._errors = 0
        """Errors that were not logged."""

    async def deliver(self, rows: Sequence[StagedRow]) -> Delivery:
        """Call the function for these rows, as far as there is time; in a task of its own, which ends with ours."""
        for row in rows:
            check_format(row.format)
        relay = asyncio.current_task()
        assert relay is not None
        return await asyncio.ensure_future(self._deliver(rows, relay))

    async def _deliver(self, rows: Sequence[StagedRow], relay: asyncio.Task[Any]) -> Delivery:
        if self._in_a_row >= DOWN_AFTER:
            await asyncio.sleep(self._down.pause())
        delivery = Delivery()
        stopped: set[str] = set()
        ends_at = monotonic() + DELIVERY_SECONDS
        for row in self._in_turn(rows):
            if row.order_key is not None and row.order_key in stopped:
                continue  # it stays behind the one that has not gone
            if (delivery.waiting and self._in_a_row >= DOWN_AFTER) or monotonic() >= ends_at:
                delivery.untried.append(row)
            elif not await self._one(row, delivery, relay) and row.order_key is not None:
                stopped.add(row.order_key)
        return delivery

    def _in_turn(self, rows: Sequence[StagedRow]) -> list[StagedRow]:
        """Rows that have failed come last, and so do those behind them with their order keys."""
        late = {row.order_key for row in rows if row.uid in self._failed} - {None}
        return sorted(rows, key=lambda row: row.uid in self._failed or row.order_key in late)

    async def _one(self, row: StagedRow, delivery: Delivery, relay: asyncio.Task[Any]) -> bool:
        """Call the function for this row; whether it has been delivered."""
        if self._target.knows(row.uid):
            delivery.delivered.append(row)
            return True
        try:
            raised = await self._target.call(_job(row), relay)
        except Exception as error:  # of the row itself, or there is no thread
            raised = _raised(error)
        if raised is None:
            self._in_a_row = 0
            self._down.succeeded()
            self._failed.pop(row.uid, None)
            delivery.delivered.append(row)
        elif raised.refuses:
            delivery.refused.append(Refusal(row, raised.text))
            self._failed.pop(row.uid, None)
        else:
            self._has_failed(row, raised)
            delivery.waiting.append(row)
        return raised is None

    def _has_failed(self, row: StagedRow, raised: Raised) -> None:
        """Note the error; log it unless one was logged within the last minute."""
        self._in_a_row += 1
        self._failed[row.uid] = None
        if len(self._failed) > REMEMBERED_MOST:
            del self._failed[next(iter(self._failed))]
        if monotonic() < self._log_at:
            self._errors += 1
            return
        more = f" ({plural(self._errors, 'more error', 'more errors')} since the last line)" if self._errors else ""
        self._log_at, self._errors = monotonic() + LOG_SECONDS, 0
        log.warning(
            "staged job %d (%s) could not be delivered and is tried again: %s: %s%s",
            row.id, row.task, raised.kind, raised.text, more,
        )  # fmt: skip


def _job(row: StagedRow) -> StagedJob:
    """What the function gets. Raises InvalidArguments or InvalidOption if the row can be no job."""
    new = job_of(row.task, row.args, row.options, row.staged_at)
    return StagedJob(
        uid=row.uid,
        id=row.id,
        task=new.task,
        args_json=new.args,
        queue=new.queue,
        priority=new.priority,
        run_at=new.run_at,
        deadline=new.deadline,  # type: ignore[arg-type]  # a time, since the staging
        headers=None if new.headers is None else _read(new.headers),
        order_key=row.order_key,
        staged_at=row.staged_at,
        new=new,
    )


def _read(headers: str) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(headers)
    except (ValueError, RecursionError) as error:
        raise InvalidOption(f"headers cannot be read in Python: {one_line(error)}") from error
    return found


# The call ------------------------------------------------------------------------------------------------------------


def _called(fn: Deliver, job: StagedJob) -> Raised | Callable[[], Awaitable[object]] | None:
    """In a thread: call the function. Answers what it has raised, or how to await what it has returned."""
    try:
        found = fn(job)
        return (lambda: found) if inspect.isawaitable(found) else None
    except BaseException as error:
        return _raised(error)


async def _awaited(make: Callable[[], object], relay: asyncio.Task[Any]) -> Raised | None:
    """Await what `make` makes. Answers what it has raised; that it has cancelled this task counts as that, too."""
    ours, raised = asyncio.current_task(), None
    assert ours is not None
    try:
        await make()  # type: ignore[misc]  # it is awaitable
    except BaseException as error:
        if _from_outside(error, relay):
            raise
        raised = _raised(error)
    if ours.cancelling():
        while ours.uncancel():
            pass
        try:
            await asyncio.sleep(0)  # where the cancellation arrives, if it has not yet
        except asyncio.CancelledError as error:
            raised = raised or _raised(error)
        if relay.cancelling():  # and the function has gone on
            raise asyncio.CancelledError
    return raised


def _from_outside(error: BaseException, relay: asyncio.Task[Any]) -> bool:
    """Whether the function has not raised this by itself.

    A KeyboardInterrupt may be Ctrl-C where Python's own handler raises it. `asyncio.run` and `pgqueue relay` have
    handlers that cancel the relay.
    """
    match error:
        case asyncio.CancelledError():
            return bool(relay.cancelling())
        case GeneratorExit():  # the loop closes the coroutine
            return asyncio.current_task(relay.get_loop()) is None
        case KeyboardInterrupt():
            own = signal.getsignal(signal.SIGINT) is signal.default_int_handler
            return own and threading.current_thread() is threading.main_thread()
    return False


def _raised(error: BaseException) -> Raised:
    """The error as a text that can be logged and that PostgreSQL can store. An exception may raise another one when it
    is looked at."""
    kind = type(error)
    try:
        text = (
            one_line(error).encode("utf-8", "replace").decode().replace("\0", "\N{REPLACEMENT CHARACTER}")[:TEXT_MOST]
        )
    except BaseException as broken:
        text = f"it cannot be described: that raised {type(broken).__name__}"
    return Raised(issubclass(kind, Refuse | InvalidArguments | InvalidOption), kind.__name__, text)
