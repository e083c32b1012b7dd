"""Keeps N worker processes: collects events, asks `fleet` what to do, and does it. The life of `work --processes N`.

An event is a message of a process, its end, a signal, an order, or a changed file. Each is passed to the fleet and
wakes the loop. Once a second the loop looks by itself for problems that no event reports. Only the operator kills a
process that may run a job: by SIGTERM, when its grace is over, or by a second signal.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from pgqueue import early_signals
from pgqueue.database.backoff import wait, within
from pgqueue.jobs.totals import Numbers
from pgqueue.manual import Symptom, at_night
from pgqueue.plain_text import plural
from pgqueue.steady_clock import monotonic
from pgqueue.supervisor.fleet import Action, Child, End, Fleet, Quiet, Spawn, State, Work
from pgqueue.supervisor.open_orders import OpenOrders
from pgqueue.supervisor.orders import Order, SupervisorStatus
from pgqueue.supervisor.pipe import Message
from pgqueue.supervisor.process import Process, ProcessStarter
from pgqueue.supervisor.process_title import show, supervisor_title
from pgqueue.supervisor.recycling import Recycling, Terms
from pgqueue.supervisor.reloader import watch
from pgqueue.supervisor.sums import Sums
from pgqueue.supervisor.systemd import Systemd

log = logging.getLogger("pgqueue")

DONE, DEADLINE, INTERRUPTED = 0, 5, 130
"""Exit codes, as of `work`."""

LOOK_SECONDS = 1.0
# The gap between processes that take over from others. Without it the worst second of a restart is much worse
# (`bench restart` measures it).
GAP_SECONDS = 0.5
# If a process has reported that no job runs in it, it must end within this time. It ends itself after 5 s, and names
# what keeps it.
LEAVE_SECONDS = 8.0
# After the grace a worker gets this time to stop handlers, write outcomes and remove its row.
LAST_SECONDS = 20.0


class Supervisor:
    """Keeps processes on these terms."""

    def __init__(self, terms: Terms) -> None:
        self.terms = terms
        self.fleet = Fleet(terms.size, together=max(1, _cpus() // 2), gap=GAP_SECONDS)
        self._starter = ProcessStarter(terms.arguments)
        self._processes: dict[int, Process] = {}
        self._recycling = Recycling(terms, self.fleet)
        self._sums = Sums()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._open_orders = OpenOrders(told=self._told, status=self._status)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._wake = asyncio.Event()
        self._systemd = Systemd()
        self._announced = self._ready = self._reloading = False
        self._first: set[int] | None = None
        """Of the processes that were started first, those that have not ended; None before there were any."""
        self._left = False
        """Whether jobs were abandoned at the deadline."""
        self._code: int | None = None
        self._deadline: float | None = None

    async def run(self) -> int:
        """Keep the processes until a signal ends the supervisor; return the exit code."""
        self._loop = asyncio.get_running_loop()
        self._handle_signals()
        if self.terms.reload is not None:
            self._serve(watch(self.terms.reload, self._changed))
        try:
            while self._code is None:
                self._wake.clear()
                await self._round()
                await wait(self._wake, self._pause())
            return self._code
        finally:
            await self._leave()

    async def numbers(self) -> Numbers:
        """What all processes have done since this supervisor began, those that have ended included."""
        made = await self._sums.ask(process for process in self._processes.values() if process.child.announced)
        made.totals.rescued += self._open_orders.rescued
        return made

    def ask_numbers(self) -> Future[Numbers]:
        """`numbers` for other threads."""
        if self._loop is None or self._loop.is_closed():
            nothing: Future[Numbers] = Future()
            nothing.set_result(Numbers())
            return nothing
        return asyncio.run_coroutine_threadsafe(self.numbers(), self._loop)

    async def _round(self) -> None:
        dying = self._reap()
        if self._deadline is None:
            self._recycling.look(self._processes.values(), monotonic())
            if not dying:  # the fleet would still count those processes; `_gone` wakes us when it knows of their end
                await self._do(self.fleet.decide(monotonic()))
            self._open_orders.answer(self.fleet, empty=not self._processes)
        else:
            self._finish(self._deadline)
        self._show()

    def _pause(self) -> float:
        """Seconds until there may be something to do without an event."""
        if self._deadline is not None:
            return LOOK_SECONDS
        now = monotonic()
        due = min(self.fleet.due(now), self._recycling.due) - now
        return min(due, LOOK_SECONDS) if due > 0 else LOOK_SECONDS

    def _serve(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._served)

    def _served(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("supervisor: %s", error, exc_info=error)

    # Signals and orders ----------------------------------------------------------------------------------------------

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop, signal.Signals(number).name)
        orders: dict[int, Callable[[], object]] = {
            signal.SIGHUP: lambda: self._restart("SIGHUP"),
            signal.SIGUSR1: lambda: self._quiet("SIGUSR1"),
            signal.SIGTTIN: lambda: self._scale(self.fleet.size + 1, "SIGTTIN"),
            signal.SIGTTOU: lambda: self._scale(self.fleet.size - 1, "SIGTTOU"),
        }
        for ordered, order in orders.items():
            loop.add_signal_handler(ordered, order)
        loop.add_signal_handler(signal.SIGCHLD, self._wake.set)
        for early in early_signals.take():
            if early == signal.SIGHUP:
                log.info("SIGHUP: nothing runs yet, and what is started now is new")
            else:
                orders[early]()

    def _restart(self, why: str) -> int:
        log.info("%s: rolling restart: new processes first, then the old ones finish and leave", why)
        self._systemd.reloading()
        self._reloading = True
        self._wake.set()
        return self.fleet.restart()

    def _quiet(self, why: str) -> None:
        log.info("%s: no more jobs are taken; those that run are finished, however long they take", why)
        self.fleet.quiet()
        self._wake.set()

    def _scale(self, size: int, why: str) -> None:
        if size >= 1:
            log.info("%s: from now on %s", why, plural(size, "process", "processes"))
            self.fleet.scale(size)
            self._place()
            self._wake.set()

    def _changed(self, file: str) -> None:
        self._restart(f"{file} has changed")

    def _told(self, order: Order) -> int:
        """Carry out an order; return the generation of a restart, else 0."""
        why = f"order {order.id}"
        if order.kind == "restart":
            return self._restart(why)
        if order.kind == "quiet":
            self._quiet(why)
        elif order.size is not None:
            self._scale(order.size, why)
        return 0

    def _stop(self, why: str) -> None:
        if self._deadline is not None:
            log.warning("second signal: leaving at once; what ran will run again when the lease is over")
            self._kill_all()
            self._code = INTERRUPTED
        else:
            grace = self.terms.grace
            log.info("%s: no more jobs are taken; those that run have %g s. Again to leave at once", why, grace)
            self._systemd.stopping()
            self._deadline = monotonic() + grace + LAST_SECONDS
            for process in self._processes.values():
                if process.child.at_work:
                    process.pipe.say("stop", grace=grace)
                else:
                    process.kill()
        self._wake.set()

    # Actions of the fleet --------------------------------------------------------------------------------------------

    async def _do(self, actions: Sequence[Action]) -> None:
        """Do what was decided. Actions that take no time come first: no event can come between decision and action.

        Starting a process takes a moment. Meanwhile processes may die, orders may come, and a signal may stop us.
        """
        for action in actions:
            if not isinstance(action, Spawn) and action.child.number in self._processes:
                self._tell(self._processes[action.child.number], action)
        for action in actions:
            if isinstance(action, Spawn) and not self._ending:
                await self._start(action.child)
        if self._first is None and self._processes:
            self._first = set(self._processes)

    def _tell(self, process: Process, action: Work | Quiet | End) -> None:
        match action:
            case Work():
                process.pipe.say("work")
            case Quiet(child, why):
                busy = plural(child.busy, "runs", "run")
                log.info("%s: takes no more jobs (%s); %s in it", process, why, busy)
                process.pipe.say("quiet")
            case End(_, why):
                log.info("%s: is ended before it took a job (%s)", process, why)
                process.kill()

    @property
    def _ending(self) -> bool:
        """Whether no process is started any more, because we leave."""
        return self._deadline is not None or self._code is not None

    async def _start(self, child: Child) -> None:
        try:
            process = await self._starter.start(child)
        except OSError as error:  # no memory, no process, no program just now
            log.error("process %d: cannot be started: %s", child.number, error)
            self.fleet.died(child.number, monotonic(), f"a process cannot be started: {error}")
            return
        self._processes[child.number] = process
        log.info("%s: is started", process)
        self._serve(self._follow(process))
        self._place()
        if self._ending:  # since we began to start it; `_stop` did not see this process
            process.kill()

    def _place(self) -> None:
        """Give each process a place among the others of its kind, for its title."""
        for generation in {process.child.generation for process in self._processes.values()}:
            peers = [
                process
                for process in self._processes.values()
                if process.child.generation == generation and process.child.state in (State.STARTING, State.RUNNING)
            ]
            taken = {process.place for process in peers}
            for process in peers:
                if not process.place:
                    process.place = next(place for place in range(1, len(taken) + 2) if place not in taken)
                    taken.add(process.place)
                process.pipe.say("place", place=process.place, of=self.fleet.size)

    # Messages of the processes ---------------------------------------------------------------------------------------

    async def _follow(self, process: Process) -> None:
        listening = asyncio.ensure_future(process.listen(self._said))
        await process.ended.wait()
        await within(listening, 0.5)  # read its last messages; a process it has started may hold the pipe open
        process.pipe.close()
        self._gone(process)

    def _said(self, process: Process, message: Message) -> None:
        child, said = process.child, message.get("say")
        if said == "counted":
            self._sums.heard(child.number, message)
            return
        if said == "running" and child.state is State.STARTING:
            self.fleet.runs(child.number, monotonic())
            log.info("%s: works, %d of %d are active", process, self.fleet.active, self.fleet.size)
        if "worker_id" in message:
            process.workers.add(int(message["worker_id"]))
            process.vitals = message
            child.busy = int(message["busy"])
            if message["state"] == "quiet" and child.state is State.RUNNING:
                self.fleet.leaves(child.number, "another process asked for it")  # or it has decided so itself
                self._wake.set()
        if said == "vitals":
            if self._recycling.worn(process):
                self._wake.set()
            return
        if said == "announce":
            process.workers.add(int(message["worker"]))
            self._announced = True
            self._open_orders.connect(message, self._serve)
            self.fleet.announced(child.number)
        elif said == "empty":
            self.fleet.leaves(child.number, "nothing runs in it any more")  # it may not have reported that it is quiet
            asyncio.get_running_loop().call_later(LEAVE_SECONDS, self._hangs, process)
        elif said == "waits":
            child.since = monotonic()  # it does not hang: the server is starting up, or read only
        elif said == "failed":
            process.failure = str(message.get("why", ""))
        self._wake.set()

    def _hangs(self, process: Process) -> None:
        if process.code is None:
            log.warning("%s: is ended: no job runs in it, but a handler that was given up does not let it go", process)
            process.kill()

    def _reap(self) -> bool:
        """Let the last messages of ended processes be read. Return whether the fleet does not know of an end yet."""
        ended = [process for process in self._processes.values() if process.code is not None]
        for process in ended:
            process.ended.set()
        return bool(ended)

    def _gone(self, process: Process) -> None:
        child = process.child
        del self._processes[child.number]
        self._sums.gone(child.number)
        before = child.state
        expected = child.ended or before is State.QUIET or self._ending
        log.log(logging.INFO if expected else logging.ERROR, "%s: %s", process, process.how())
        restarting = self.fleet.restarting
        how = f"{process} {process.how(' before it had announced itself')}"
        self.fleet.died(child.number, monotonic(), how)
        if restarting and not self.fleet.restarting:
            log.error("the restart is taken back: %s; the old processes go on; see %s", how, at_night(Symptom.DEPLOY))
        self._open_orders.dead(process.workers)
        if self._was_last_hope(child) and not expected:
            self._code = process.code if (process.code or 0) > 0 else 1
            self._kill_all()
        if self._deadline is not None and process.code == DEADLINE:
            self._left = True
        self._wake.set()

    def _was_last_hope(self, child: Child) -> bool:
        """Whether all processes that were started first have ended, this one last, and none has announced itself.

        Then what is started cannot work. If only some have ended, their end may have been an accident.
        """
        if self._announced or self._first is None or child.number not in self._first:
            return False
        self._first.discard(child.number)
        return not self._first

    def _status(self) -> SupervisorStatus:
        fleet = self.fleet
        workers = (max(process.workers) for process in self._processes.values() if process.workers)
        return SupervisorStatus(fleet.size, fleet.active, self._state(), fleet.problem or None, tuple(sorted(workers)))

    def _state(self) -> str:
        if self._deadline is not None:
            return "stopping"
        if self.fleet.quieted:
            return "quiet"
        if self.fleet.restarting:
            return "restarting"
        return "running" if self._ready else "starting"

    # The end, and the status ------------------------------------------------------------------------------------------

    def _finish(self, deadline: float) -> None:
        if not self._processes:
            self._code = DEADLINE if self._left else DONE
        elif monotonic() > deadline:
            self._left = True
            self._kill_all()

    def _kill_all(self) -> None:
        for process in self._processes.values():
            if process.code is None:
                busy = plural(process.child.busy, "job runs", "jobs run")
                log.warning("%s: is killed, %s in it", process, busy)
                process.kill()

    async def _leave(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._open_orders.leave()

    def _show(self) -> None:
        fleet = self.fleet
        if not self._ready and fleet.active >= fleet.size:
            self._ready = True
            self._systemd.ready()
            log.info("ready: %s", plural(fleet.active, "worker process", "worker processes"))
        if self._reloading and not fleet.restarting and (fleet.problem or fleet.in_effect(fleet.current)):
            self._reloading = False
            self._systemd.ready()
            if not fleet.problem:
                new = plural(fleet.active, "new process works", "new processes work")
                log.info("the restart is through: %s, the old ones finish what they run", new)
        self._systemd.alive()
        title = supervisor_title(fleet.active, fleet.size, self._state())
        self._systemd.status(title.removeprefix("pgqueue: "))
        show(title)
        self._open_orders.status_changed()


def _cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def keep(supervisor: Supervisor) -> int:
    """Let it keep worker processes until a signal ends it; return the exit code."""
    with suppress(KeyboardInterrupt):
        return asyncio.run(supervisor.run())
    return INTERRUPTED
