"""Runs claimed jobs: async handlers on the loop, sync handlers in threads, both at once, at most `slots` together.

The pipe, one short step after another: find the task, decode the arguments, call the handler, turn result or exception
into an Outcome, hand it to the completer. Nothing here does I/O; the fetcher fills `offer`, the completer empties
`finish`.

Speed is the absence of work per job. A handler that never waits costs no task object and no turn of the loop: a *run*
(one task on the loop, or one thread) takes the next job as soon as it has finished one, as long as the turn lasts. A
handler gets a clean context: a run whose context was changed by a handler is not used again.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from time import perf_counter
from traceback import format_exception
from typing import Any

import msgspec

from pgqueue.errors import InvalidArguments
from pgqueue.job import Job, running_job
from pgqueue.outcome import COMPLETED, RELEASED, Completed, Failed, Outcome, Problem, Retried
from pgqueue.tasks import Task

log = logging.getLogger("pgqueue")

# How long runs may go on without giving the loop a turn; the fetcher and the completer need it.
TURN_SECONDS = 0.001
# Work to have at hand beyond what runs, so that a fetch is answered before the executor is idle.
PREFETCH_SECONDS = 0.05
PREFETCH_MOST = 2000
MESSAGE_MOST = 2_000
TRACEBACK_MOST = 20_000
RESULT_MOST = 1 << 20
# A name no process here knows: another version may. Ask again after 10 s, later less often; give up after a day.
UNKNOWN_FIRST, UNKNOWN_MOST, UNKNOWN_DAY = 10.0, 300.0, 86_400.0

_encode = msgspec.json.Encoder(order="deterministic").encode


class Pool:
    """Slots shared by some queues: what runs, what waits at hand, and how much more to fetch.

    Read and changed from the loop and from threads; `_lock` guards the few lines where that matters.
    """

    def __init__(self, queues: Iterable[str] | None, slots: int) -> None:
        self.queues = None if queues is None else frozenset(queues)
        self.slots = slots
        self.running = 0
        self.waiting: deque[tuple[Job, Task[..., Any] | None]] = deque()
        self.prefetch = 0
        self._lock = threading.Lock()
        self._seconds, self._jobs = 0.0, 0

    def room(self) -> int:
        """How many jobs to fetch now; 0 while there is enough at hand."""
        waiting = len(self.waiting)
        if self.running >= self.slots and waiting > self.prefetch // 2:
            return 0
        return max(0, self.slots + self.prefetch - self.running - waiting)

    def low(self) -> bool:
        return self.running < self.slots or len(self.waiting) <= self.prefetch // 2

    def take(self, is_async: bool, seconds: float) -> tuple[Job, Task[..., Any] | None] | None:
        """The next waiting job for a run of this kind that has finished one; None: the run is over, its slot free."""
        with self._lock:
            self._seconds += seconds
            self._jobs += 1
            if self.waiting and _runs_on_loop(self.waiting[0][1]) is is_async:
                return self.waiting.popleft()
            self.running -= 1
            return None

    def start(self) -> tuple[Job, Task[..., Any] | None] | None:
        """The next waiting job for a new run, if a slot is free."""
        with self._lock:
            if self.running >= self.slots or not self.waiting:
                return None
            self.running += 1
            return self.waiting.popleft()

    def empty(self) -> list[tuple[Job, Task[..., Any] | None]]:
        """Take out everything that waits."""
        with self._lock:
            entries = list(self.waiting)
            self.waiting.clear()
            return entries

    def adapt(self) -> None:
        """Set the prefetch from how long jobs have lasted since the last fetch: 50 ms of work, none for long jobs."""
        with self._lock:
            seconds, jobs = self._seconds, self._jobs
            self._seconds, self._jobs = 0.0, 0
        if not jobs:
            return
        mean = seconds / jobs
        wanted = 0 if mean >= PREFETCH_SECONDS else int(self.slots * PREFETCH_SECONDS / max(mean, 1e-6))
        # Twice what was just worked off, at most: a few quick jobs say little about the next thousand.
        self.prefetch = min(wanted, 2 * jobs, PREFETCH_MOST)


class Executor:
    """Runs jobs for one worker. `offer` from the fetcher, `finish` to the completer, `low` tells that there is room."""

    def __init__(
        self,
        pools: list[Pool],
        tasks: Mapping[str, Task[..., Any]],
        *,
        finish: Callable[[Job, Outcome], None],
        low: Callable[[], None],
        resources: Any = None,
    ) -> None:
        self.pools = pools
        self.running: dict[int, Job] = {}
        self._tasks = tasks
        self._finish = finish
        self._low = low
        self._resources = resources
        self._loop = asyncio.get_running_loop()
        self._context = contextvars.copy_context()
        self._runs: set[asyncio.Task[None]] = set()
        self._inbox: queue.SimpleQueue[tuple[Pool, Job, Task[..., Any] | None] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._idle_threads = 0
        self._turn_ends = 0.0
        self._dispatching = False
        self._ended = asyncio.Event()

    def offer(self, pool: Pool, jobs: Iterable[Job]) -> None:
        """Take claimed jobs; they start as slots are free. Called on the loop."""
        find = self._tasks.get
        pool.waiting.extend([(job, find(job.task)) for job in jobs])
        self._dispatch()

    def hand_back(self) -> list[Job]:
        """Give up all jobs that have not started; the caller releases them."""
        return [job for pool in self.pools for job, _ in pool.empty()]

    def cancel(self) -> None:
        """Cancel what runs on the loop; threads cannot be stopped from outside."""
        for run in self._runs:
            run.cancel()

    async def idle(self) -> None:
        """Wait until nothing runs."""
        while self.running:
            self._ended.clear()
            await self._ended.wait()

    def close(self) -> None:
        """Let idle threads end. A thread whose handler hangs is left behind; it dies with the process."""
        for _ in self._threads:
            self._inbox.put(None)

    # Starting runs ---------------------------------------------------------------------------------------------------

    def _dispatch(self) -> None:
        """Start one run on the loop, and as many in threads as slots allow; come back next turn while there is more."""
        self._dispatching = False
        self._turn_ends = perf_counter() + TURN_SECONDS
        for pool in self.pools:
            while (entry := pool.start()) is not None:
                job, task = entry
                if _runs_on_loop(task):
                    run = self._loop.create_task(self._run(pool, job, task), context=self._context.copy())
                    self._runs.add(run)
                    run.add_done_callback(self._runs.discard)
                    # The run just made may work off everything in its turn; more runs are started only if it waits.
                    self._dispatch_soon()
                    break
                self._to_thread(pool, job, task)

    def _dispatch_soon(self) -> None:
        if not self._dispatching:
            self._dispatching = True
            self._loop.call_soon(self._dispatch)

    def _slot_freed(self, pool: Pool) -> None:
        if not self.running:
            self._ended.set()
        if pool.waiting:
            self._dispatch_soon()
        if pool.low():
            self._low()

    # On the loop -----------------------------------------------------------------------------------------------------

    async def _run(self, pool: Pool, job: Job, task: Task[..., Any] | None) -> None:
        """Run this job, then waiting ones, until the turn ends, the context was changed, or nothing is left."""
        clean = contextvars.copy_context()
        while True:
            started = perf_counter()
            outcome = await self._call(job, task)
            now = perf_counter()
            self.running.pop(job.id, None)
            self._finish(job, outcome)
            if outcome is RELEASED or now > self._turn_ends or contextvars.copy_context() != clean:
                self._end_run(pool, now - started)
                return
            entry = pool.take(True, now - started)
            if entry is None:
                self._slot_freed(pool)
                return
            job, task = entry
            if len(pool.waiting) == pool.prefetch // 2:
                self._low()

    def _end_run(self, pool: Pool, seconds: float) -> None:
        with pool._lock:
            pool.running -= 1
            pool._seconds += seconds
            pool._jobs += 1
        self._slot_freed(pool)

    async def _call(self, job: Job, task: Task[..., Any] | None) -> Outcome:
        self.running[job.id] = job
        if task is None:
            return unknown(job)
        token = running_job.set(job)
        job.resources = self._resources
        try:
            args, kwargs = task.codec.decode(job.args)
            value = await (task.fn(job, *args, **kwargs) if task.wants_job else task.fn(*args, **kwargs))
            return COMPLETED if value is None else completed(value)
        except asyncio.CancelledError as error:
            # Ours, or did the handler cancel itself?
            return RELEASED if _is_cancelled() else failed(job, task, error)
        except (Exception, SystemExit) as error:
            return failed(job, task, error)
        finally:
            running_job.reset(token)

    # In threads ------------------------------------------------------------------------------------------------------

    def _to_thread(self, pool: Pool, job: Job, task: Task[..., Any] | None) -> None:
        if self._idle_threads == 0:
            name = f"pgqueue-{len(self._threads) + 1}"
            thread = threading.Thread(target=self._serve, name=name, daemon=True)
            self._threads.append(thread)
            thread.start()
        else:
            self._idle_threads -= 1
        self._inbox.put((pool, job, task))

    def _serve(self) -> None:
        while (message := self._inbox.get()) is not None:
            pool, job, task = message
            while True:
                started = perf_counter()
                self.running[job.id] = job
                outcome = self._context.copy().run(self._call_sync, job, task)
                self.running.pop(job.id, None)
                self._finish(job, outcome)
                entry = pool.take(False, perf_counter() - started)
                if entry is None:
                    break
                job, task = entry
                if len(pool.waiting) == pool.prefetch // 2:
                    self._call_loop(self._low)
            self._call_loop(self._thread_freed, pool)

    def _thread_freed(self, pool: Pool) -> None:
        self._idle_threads += 1
        self._slot_freed(pool)

    def _call_loop(self, callback: Callable[..., None], *args: Any) -> None:
        """Run `callback` on the loop; a thread that outlived its worker has nobody to tell."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback, *args)

    def _call_sync(self, job: Job, task: Task[..., Any] | None) -> Outcome:
        if task is None:
            return unknown(job)
        running_job.set(job)
        job.resources = self._resources
        try:
            args, kwargs = task.codec.decode(job.args)
            value = task.fn(job, *args, **kwargs) if task.wants_job else task.fn(*args, **kwargs)
            return COMPLETED if value is None else completed(value)
        except (Exception, SystemExit) as error:
            return failed(job, task, error)


# Results and exceptions into outcomes --------------------------------------------------------------------------------


def _runs_on_loop(task: Task[..., Any] | None) -> bool:
    return task is None or task.is_async


def _is_cancelled() -> bool:
    run = asyncio.current_task()
    return run is not None and run.cancelling() > 0


def completed(value: object) -> Outcome:
    """What a returned value becomes: the job's result, or a failure that says why it cannot be stored."""
    try:
        text = _encode(value).decode()
    except (TypeError, ValueError, msgspec.MsgspecError) as error:
        return Failed("error", Problem("failed", type(error).__name__, f"the result cannot be stored as JSON: {error}"))
    if len(text) > RESULT_MOST or "\\u0000" in text:
        return Failed("error", Problem("failed", None, f"the result cannot be stored: {len(text)} bytes, or NUL in it"))
    return Completed(text)


def failed(job: Job, task: Task[..., Any], error: BaseException) -> Outcome:
    """What an exception becomes: another attempt as the task's retry policy says, or the end."""
    problem = Problem("failed", type(error).__qualname__, _clean(str(error), MESSAGE_MOST), _traceback(error))
    asked = error if isinstance(error, Exception) else RuntimeError(repr(error))
    try:
        delay = task.retry.decide(job.attempt, asked, job.max_attempts)
    except Exception as broken:
        log.exception("job %d (%s) failed, and its retry function too; it is not retried", job.id, job.task)
        return Failed("error", Problem("failed", problem.error_type, f"{problem.message}; retry function: {broken}"))
    if delay is None:
        return Failed("error", problem)
    return Retried(delay, problem)


def unknown(job: Job) -> Outcome:
    """What an unknown task name becomes: postponed, so that a rolling deploy loses nothing; failed after a day."""
    message = f"no task named {job.task!r} is imported by this worker"
    if job.age() > UNKNOWN_DAY:
        return Failed("refused", Problem("refused", None, message))
    delay = min(UNKNOWN_MOST, max(UNKNOWN_FIRST, job.age() / 2))
    return Retried(delay, Problem("unknown", None, message), spent=False)


def _traceback(error: BaseException) -> str | None:
    """The traceback below our own frames, cut in the middle to a size."""
    if isinstance(error, InvalidArguments):
        return None
    text = _clean("".join(format_exception(error)), 1 << 30)
    if len(text) <= TRACEBACK_MOST:
        return text
    half = TRACEBACK_MOST // 2
    return f"{text[:half]}\n… {len(text) - TRACEBACK_MOST} characters left out …\n{text[-half:]}"


def _clean(text: str, most: int) -> str:
    """`text` as PostgreSQL can store it: no NUL, no lone surrogates, not too long."""
    return text[:most].replace("\x00", "\\0").encode("utf-8", "replace").decode()
