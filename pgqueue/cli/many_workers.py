"""The process around the workers of several databases: one event loop, a worker for each, one stop for all.

Called by `pgqueue work` with several databases. What it promises beside `worker_process`:

1. Each worker lives in a context of its own, in which its database is the current one. So do its services, threads and
   handlers: what they ask of the configuration, and what they log, is about their database.
2. All databases are looked at together, each in a thread of its own, before the first worker starts. Those that answer
   within `TOGETHER_SECONDS` are compared: if two are one, or have one number, nothing starts.
3. A database that is away is tried each second, for as long as that takes. The others do not wait for it. What it says
   when it comes is compared with the others in the same way; if it does not fit, only its worker does not start. Nor
   does it if the server refuses the user or the database.
4. A worker that fails for good is stopped. The others go on, and the exit code at the end is that of the first failure.
   If all have ended, so does the process. What it leaves behind, a handler or a lifespan that hangs, ends nothing else.
5. The workers share one loop, so each takes and completes fewer jobs in one step than a worker alone (`share_loop`).
6. A signal stops all workers at once, with one grace. Jobs that still run then are given back by one last message for
   each database, and the process ends with these (`last_messages`).
"""

from __future__ import annotations

import asyncio
import gc
import logging
import re
import threading
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextvars import Context, copy_context
from dataclasses import dataclass
from typing import Any, TypeVar

import psycopg

from pgqueue import logs as line_format
from pgqueue.cli import logs
from pgqueue.cli.database import ASK_SECONDS, connected
from pgqueue.cli.exit_codes import DEADLINE, DONE, USAGE, code_of, line_of
from pgqueue.cli.last_messages import LastMessages, those_that_come
from pgqueue.cli.process_end import ORDERLY_SECONDS, TELEMETRY_SECONDS, ProcessEnd, flush
from pgqueue.cli.worker_process import START, Signals, banner, begin, facts_of, loop_of
from pgqueue.client.tasks import Task
from pgqueue.config import config, safe
from pgqueue.database.identity import DatabaseIdentity, identity
from pgqueue.database.outage import Outage
from pgqueue.database.sessions import ReadOnly
from pgqueue.databases import Database, current
from pgqueue.errors import InvalidOption
from pgqueue.plain_text import plural
from pgqueue.worker.last_message import LastMessage
from pgqueue.worker.liveness.watchdog import STUCK, Watchdog
from pgqueue.worker.worker import Worker

T = TypeVar("T")

REFUSED = re.compile(
    r'FATAL: .*((password|Peer|Ident|certificate) authentication failed|(role|database) ".*" does not exist|'
    r"no pg_hba\.conf entry|pg_hba\.conf rejects connection|is not permitted to log in|no such (database|user))"
    r"|no password supplied"
)
"""By these words a server refuses a user or a database: its classes 28 and 3D of SQLSTATE."""

log = logging.getLogger("pgqueue")

TOGETHER_SECONDS = 2.0
"""So long the start waits for the first answer of each database."""
AGAIN_SECONDS = 1.0
"""How often a database that is away is tried."""
FAILED_GRACE = 5.0
"""So long the jobs of a worker that has failed may go on."""
LEAVE_SECONDS = 30.0
"""So long a worker may then take to leave while the others go on; without a database it takes 26."""
LEAVING_SECONDS = 5.0
"""After the grace of a signal the process waits so long for a worker that was leaving already."""


@dataclass(frozen=True, slots=True)
class Looked:
    """What a first look at a database has found: which one it is, and what the banner says."""

    identity: DatabaseIdentity
    facts: dict[str, Any]


class Own:
    """One of the databases with its worker, in a context of its own. Made where the worker is."""

    def __init__(self, database: Database, make: Callable[[], Worker]) -> None:
        self.database = database
        self.context = context_of(database)
        self.worker = self.context.run(make)
        self.worker.state.share_loop()
        self.looking: asyncio.Future[Looked] | None = None
        self.task: asyncio.Task[int] | None = None
        self.begun = self.ready = self.leaving = False
        """Whether the worker has begun to start, has started, and is stopping by itself."""

    def start(self, life: Coroutine[Any, Any, int]) -> None:
        """Let it live: in its own context, and not by a task factory of the application."""
        loop = asyncio.get_running_loop()
        self.task = asyncio.Task(life, loop=loop, context=self.context, name=f"pgqueue-{self.database.name}")

    def look(self) -> asyncio.Future[Looked]:
        """Begin to look at the database, if that is not under way."""
        if self.looking is None:
            self.looking = in_thread(self.context.copy(), self._look)
        return self.looking

    def completing(self) -> int | None:
        """As that of the worker; None also while it leaves, since nothing of that is a sign of a stuck process."""
        return None if self.leaving else self.worker.completing()

    def _look(self) -> Looked:
        with connected("work", needs="work", patience=ASK_SECONDS) as conn:
            if conn.execute("SHOW transaction_read_only").fetchone() == ("on",):
                raise ReadOnly
            return Looked(identity(conn, config().schema), facts_of(conn, self.worker))


def context_of(database: Database) -> Context:
    """A copy of this context, in which that database is the current one."""
    context = copy_context()
    context.run(current.set, database)
    return context


def refuses(error: BaseException) -> bool:
    """Whether a server, or a pooler, refuses the user or the database of a DSN, as far as its words are known.

    libpq keeps no SQLSTATE of a connection that fails. What a server says in another language is taken for an outage.

    >>> refuses(psycopg.OperationalError('FATAL:  database "shop" does not exist'))
    True
    >>> refuses(psycopg.OperationalError("FATAL:  sorry, too many clients already"))
    False
    """
    return isinstance(error, psycopg.OperationalError) and REFUSED.search(str(error)) is not None


def warn_of_schedules(databases: Sequence[Database], declared: Iterable[Task[..., Any]]) -> None:
    """Warn of schedules that tick in none of these databases: the name may be misspelt, or known to another process."""
    names = [each.name for each in databases]
    for task in declared:
        if task.recurs_in is not None and task.recurs_in not in names:
            log.warning(
                "task %s: schedule_in=%r names none of the databases here (%s): its schedule does not tick in them",
                task.name,
                task.recurs_in,
                ", ".join(names),
            )


def serve(owns: Sequence[Own], grace: float, stuck: float) -> int:
    """Run the workers until a signal, or until all have ended; return the exit code."""
    name, factory = loop_of()
    gc.freeze()
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(_serve(owns, grace, stuck, name))


async def _serve(owns: Sequence[Own], grace: float, stuck: float, loop_name: str) -> int:
    return await _Life(owns, grace, stuck, loop_name).run()


class _Life:
    """The life of the process, on its loop."""

    def __init__(self, owns: Sequence[Own], grace: float, stuck: float, loop_name: str) -> None:
        self._owns, self._grace, self._loop_name = owns, grace, loop_name
        self._watchdog = Watchdog(lambda: None, stuck)
        self._known: dict[str, DatabaseIdentity] = {}
        """What the databases are that have answered, by name."""
        self._code = DONE
        self._quieted = False
        self._end = ProcessEnd()
        self._signals = Signals(asyncio.get_running_loop(), self._quiet, grace, self._end)

    async def run(self) -> int:
        """Work until told to stop, or until nothing is left."""
        code = 1
        try:
            code = await self._run()
        finally:
            self._end.within(ORDERLY_SECONDS, code)
            flush(TELEMETRY_SECONDS, logs=False)
        return code

    async def _run(self) -> int:
        told = asyncio.ensure_future(self._signals.received.wait())
        if (refused := await self._compare_all(told)) is not None:
            logs.last_words(str(refused))
            return USAGE
        self._watchdog.start()
        for own in self._owns if not told.done() else ():
            own.start(self._live(own))
        lives = [own.task for own in self._owns if own.task is not None]
        ended = asyncio.ensure_future(asyncio.wait(lives)) if lives else told
        await asyncio.wait([told, ended], return_when=asyncio.FIRST_COMPLETED)
        if told.done():
            await self._stop()
        return self._code

    async def _compare_all(self, told: asyncio.Future[Any]) -> InvalidOption | None:
        """Look at all; what is wrong with those that answer soon, if anything is."""
        looks = [own.look() for own in self._owns]
        looked = asyncio.ensure_future(asyncio.wait(looks, timeout=TOGETHER_SECONDS))
        await asyncio.wait([told, looked], return_when=asyncio.FIRST_COMPLETED)
        for own, look in zip(self._owns, looks, strict=True):
            if look.done() and look.exception() is None and (wrong := self._unfit(own, look.result().identity)):
                return wrong
        return None

    def _unfit(self, own: Own, what: DatabaseIdentity) -> InvalidOption | None:
        """Note which database this is; what is wrong if another one is the same, or has its number."""
        for name, other in self._known.items():
            if name != own.database.name and (why := what.clash(other)):
                return InvalidOption(f"databases {name!r} and {own.database.name!r} {why}")
        self._known[own.database.name] = what
        return None

    # One worker ------------------------------------------------------------------------------------------------------

    async def _live(self, own: Own) -> int:
        """The life of one worker. Whatever ends it, the others go on."""
        code: int | None = None
        try:
            looked = await self._looked(own)
            if looked is None:
                return DONE
            if (wrong := self._unfit(own, looked.identity)) is not None:
                raise wrong
            own.begun = True
            await begin(own.worker)
            self._say_ready(own, looked.facts)
            await own.worker.run()
            await self._leave(own)  # it was quiet, and has nothing left
            code = STUCK if own.worker.worn_out else DONE
        except Exception as error:
            code = code_of(error)
            log.critical("%s", safe(line_of(error)), exc_info=None if code else error)
            code = 1 if code is None else code
            self._code = self._code or code  # at once: a signal does not wait for one that leaves for long
            await self._give_up(own)
        if code == STUCK:
            log.error("this process ends (exit code %d), so that it is replaced", STUCK)
            self._signals.stop(self._grace)
        self._code = self._code or code
        return code

    async def _looked(self, own: Own) -> Looked | None:
        """What the database has answered. While it is away, or read only, it is tried each second.

        None: it is away, and this process takes no jobs any more.

        What refuses this user or this database for good is raised at the second time: a server may just have come up.
        """
        outage, refused = Outage(), False
        while True:
            try:
                looked = await own.look()
                outage.answered(START)
                return looked
            except (ReadOnly, psycopg.OperationalError) as error:
                own.looking = None
                if self._quieted:
                    return None
                if refused and refuses(error):
                    raise
                refused = refuses(error)
                outage.lost(START, error)
                await asyncio.sleep(AGAIN_SECONDS)

    def _say_ready(self, own: Own, facts: dict[str, Any]) -> None:
        line_format.worker_ids[own.database.name] = own.worker.worker_id
        for problem in facts.pop("unknown_queues"):
            log.warning("%s", problem)
        facts |= {"loop": self._loop_name}
        log.info(banner(facts), extra=facts | {"worker_id": own.worker.worker_id})
        own.ready = True
        self._watchdog.watch(f"completer of {own.database.name}", own.completing)

    async def _give_up(self, own: Own) -> None:
        """Stop a worker that has failed. A job whose handler cannot be stopped runs again when the lease is over."""
        if own.begun:
            try:
                await self._leave(own)
            except Exception as error:
                log.warning("could not stop in order: %s", safe(line_of(error)))

    async def _leave(self, own: Own) -> None:
        """Stop a worker while the others go on. If its lifespan does not end, it ends with the process."""
        own.leaving = True
        stop = asyncio.ensure_future(own.worker.stop(min(self._grace, FAILED_GRACE)))
        await asyncio.wait([stop], timeout=min(self._grace, FAILED_GRACE) + LEAVE_SECONDS)
        self._watchdog.forget(f"completer of {own.database.name}")
        if stop.done():
            stop.result()
        else:
            log.error(
                "this worker has not left within %g s; what keeps it, as its lifespan, is left alone", LEAVE_SECONDS
            )

    # All of them -----------------------------------------------------------------------------------------------------

    def _quiet(self) -> None:
        """Let all finish what they have. A worker whose database is away has nothing, and ends.

        If its life has not begun by now, it ends after its first look."""
        self._quieted = True
        for own in self._owns:
            own.context.copy().run(own.worker.quiet)
            if own.task is not None and not own.begun:
                own.task.cancel()

    async def _stop(self) -> None:
        """Stop all within one grace. If jobs had to be stopped, this process ends here."""
        grace = self._grace if self._signals.grace is None else self._signals.grace
        by = self._signals.name or "a worker must be replaced"
        log.info("%s: no more jobs are taken; those that run have %g s. Again to leave at once", by, grace)
        loop = asyncio.get_running_loop()
        stops = {
            own.database.name: asyncio.Task(self._stop_one(own, grace), loop=loop, context=own.context.copy())
            for own in self._owns
        }
        messages = await those_that_come(stops)
        if messages:
            left = sum(last.left for last in messages.values())
            jobs, are = plural(left, "job was", "jobs were"), "is" if left == 1 else "are"
            log.error("%s still running after %g s and %s given back as this process ends", jobs, grace, are)
            for own in self._owns:
                if not stops[own.database.name].done():
                    own.context.copy().run(log.warning, "it has not stopped in time, and ends with this process")
            await LastMessages(messages, {own.database.name: own.context for own in self._owns}).send()
            self._end.at_once(DEADLINE)
        log.info("stopped in order")

    async def _stop_one(self, own: Own, grace: float) -> LastMessage | None:
        """The last message of this worker, if it has one. A worker that has not begun is left where it is."""
        if own.task is None or own.task.done():
            return None
        if own.leaving:
            await asyncio.wait([own.task], timeout=grace + LEAVING_SECONDS)
            return None
        own.task.cancel()
        await asyncio.wait([own.task])
        if not own.begun or own.leaving:
            return None
        try:
            last = await own.worker.stop_process(grace)
            if last is None and own.ready:
                await own.worker.run()  # it has ended; raises if a service had failed by then
        except Exception as error:
            log.critical("%s", safe(line_of(error)), exc_info=None if code_of(error) else error)
            self._code = self._code or code_of(error) or 1
            return None
        return last


def in_thread(context: Context, call: Callable[[], T]) -> asyncio.Future[T]:
    """What this returns, from a thread of its own: a server that is frozen takes none of the threads of the loop."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def tell(act: Callable[..., None], what: Any) -> None:
        if not future.done():
            act(what)

    def run() -> None:
        try:
            told: tuple[Callable[..., None], Any] = (future.set_result, context.run(call))
        except Exception as error:
            told = (future.set_exception, error)
        if not loop.is_closed():
            loop.call_soon_threadsafe(tell, *told)

    threading.Thread(target=run, name="pgqueue-look", daemon=True).start()
    return future
