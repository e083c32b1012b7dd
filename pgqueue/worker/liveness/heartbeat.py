"""The heartbeat: a thread with its own connection raises this worker's counter and reads the counters of all others.

It is a thread, because a handler that blocks the event loop must not look like a dead worker.
It is a counter, because the clocks of machines differ and step.

A worker is declared dead only if all of these hold:
1. The judging worker has read the same count for a whole lease, measured by its own monotonic clock.
2. It has read that count at least three times.
3. None of its reads came late. Each read is part of a heartbeat of the judging worker that went through.

No time stored in the database counts. A stopped server, a failover, a suspended judge or a stepped clock therefore
declares no worker dead. How long a job runs plays no part either.

A heartbeat is one message, with its COMMIT. A process may be stopped at any moment of it, and its session may not be
listed yet. The server needs nothing more from the process then, so the worker's row stays locked by no session that a
rescue cannot find.

A heartbeat also asks, in its own message, whether anything has happened to jobs: an idle worker then needs no message
for that (`fetcher`). No life hangs on the question. It reads no table, and if a message with it fails, the next ones
come without it for a while.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from contextvars import copy_context
from dataclasses import dataclass, replace
from typing import Protocol

import msgspec
import psycopg

from pgqueue.database import forks, statements
from pgqueue.database.backoff import Backoff, described, is_loss, transient, within
from pgqueue.database.sessions import Identity, Session
from pgqueue.steady_clock import monotonic
from pgqueue.worker.liveness.blocked_loop import BlockedLoop
from pgqueue.worker.liveness.memory import rss
from pgqueue.worker.liveness.stacks import Stacks
from pgqueue.worker.run.running_jobs import RunningJobs
from pgqueue.worker.state import WorkerState

log = logging.getLogger("pgqueue")

NAME = "beat"
"""Of the heartbeat's session."""
# After this part of its lease without a heartbeat, a worker takes no more jobs: others may be about to declare it dead.
LATE = 0.8
# If a heartbeat takes longer than this, a new session is used before it is listed: jobs must not wait for a heartbeat.
LISTED_SECONDS = 1.0
# While the database is away, it is tried so often: the other sessions follow when this one is answered.
TRY_SECONDS = 1.0
# After a failure heartbeats ask nothing beside for so long.
BARE_SECONDS = 60.0


@dataclass(slots=True)
class _Seen:
    beat: int
    since: float
    reads: int
    lease: float


class Judge:
    """Decides which workers are dead from what it has seen itself. Pure: time is passed in."""

    def __init__(self, lease: float) -> None:
        self._late = lease / 2  # our heartbeats are a third of our own lease apart; the others' leases do not matter
        self._seen: dict[int, _Seen] = {}
        self._last: float | None = None

    def observe(self, beats: Iterable[tuple[int, int, float]], now: float) -> list[tuple[int, int]]:
        """Take the (worker id, counter, lease seconds) just read; return the dead workers as (worker id, counter).

        If this read comes more than half our lease after the one before, all observations start again. A judge that was
        suspended or cut off has not watched.
        """
        gap = 0.0 if self._last is None else now - self._last
        self._last = now
        seen: dict[int, _Seen] = {}
        for worker_id, beat, lease in beats:
            before = self._seen.get(worker_id)
            if before is None or before.beat != beat or gap > self._late:
                seen[worker_id] = _Seen(beat, now, 1, lease)
            else:
                seen[worker_id] = _Seen(beat, before.since, before.reads + 1, lease)
        self._seen = seen
        return [
            (worker_id, one.beat) for worker_id, one in seen.items() if one.reads >= 3 and now - one.since >= one.lease
        ]

    def live(self) -> int:
        """Number of other workers that have a row and are not declared dead."""
        return len(self._seen)


class Receiver(Protocol):
    """Is told what the heartbeat finds, from its thread."""

    def workers_died(self, dead: list[tuple[int, int]]) -> None:
        """These other workers, each with its last heartbeat, have given no sign of life for their lease."""
        ...

    def declared_dead(self, worker_id: int, /) -> None:
        """Other workers have taken this one for dead, when it had this id."""
        ...

    def punctual_again(self) -> None:
        """A heartbeat has gone through after this worker was `late`."""
        ...

    def reconnected(self) -> None:
        """The heartbeat's session was lost, and there is another one."""
        ...

    def probed(self, head: int, snapshot: str, usage: float, sent: float, /) -> None:
        """What `heartbeat_probe` has answered, and when the question was sent."""
        ...


class Heartbeat:
    """Sends a heartbeat every third of the lease until stopped.

    `sessions`: what a rescue would have to end, each with the job that has its transaction there, if one has. `stacks`
    answers where jobs stand, after each heartbeat. `blocked_loop` gives away what the loop keeps from others.
    """

    def __init__(
        self,
        state: WorkerState,
        running: RunningJobs,
        blocked_loop: BlockedLoop,
        receiver: Receiver,
        *,
        sessions: Callable[[], Mapping[Identity, int | None]],
        stacks: Stacks,
    ) -> None:
        lease = state.settings.lease
        self.judge = Judge(lease)
        self.last_beat = monotonic()
        """When the last heartbeat that went through was sent, by this process's monotonic clock."""
        self._state = state
        self._worker_id = state.id
        """The one that it keeps alive; a worker that was taken for dead has another heartbeat."""
        self._born: str | None = None
        """When the row was made: an id alone may be another worker's after a failover."""
        # What other services have left is theirs to end: that can take longer than a heartbeat may.
        most = min(TRY_SECONDS, lease / 6)
        self._session = Session(replace(state.link, left=set(), stuck={}), NAME, most=most)
        self._backoff = Backoff(most=most)
        self._said_late = False
        self._bare_until = 0.0
        self._full = False
        """The last heartbeat has said that no slot is free, because the loop was blocked."""
        self._generation = 0
        """Of the last session that has carried a heartbeat."""
        self._lease = lease
        self._running = running
        self._monitor = blocked_loop.monitor
        self._receiver = receiver
        self._sessions = sessions
        self._stacks = stacks
        self._blocked_loop = blocked_loop
        self._due = monotonic()
        self._listed: list[Callable[[], object]] = []
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(
            target=copy_context().run, args=[self._run], name="pgqueue-heartbeat", daemon=True
        )

    def start(self) -> None:
        self._thread.start()

    def late(self) -> bool:
        """Whether the last heartbeat is so old that this worker must take no jobs.

        When that ends, `Receiver.punctual_again` is called.
        """
        return monotonic() - self.last_beat > LATE * self._lease

    async def listed(self, most: float = LISTED_SECONDS) -> bool:
        """Send a heartbeat at once, which lists our present sessions, and wait for it up to `most` seconds.

        Returns whether they are listed: then a rescue of our jobs can end them. The completer does not wait for this:
        outcomes held back would hide which jobs were running when the process dies.
        """
        if self._stop.is_set():
            return False
        loop, done = asyncio.get_running_loop(), asyncio.Event()
        # If the loop was closed meanwhile, no coroutine waits for this.
        self._listed.append(lambda: None if loop.is_closed() else loop.call_soon_threadsafe(done.set))
        self._wake.set()
        return await within(done.wait(), most) and not self._stop.is_set()  # the end of the thread wakes us, too

    def beat_soon(self) -> None:
        """Send a heartbeat at once, which writes our present state. Does not wait."""
        self._wake.set()

    def abandon(self) -> None:
        """Stop the heartbeats without waiting for the thread: from now on other workers may declare us dead."""
        self._stop.set()
        self._wake.set()

    def stop(self) -> None:
        """Stop the heartbeats and wait for the thread: usually one round trip, never longer than 5 s."""
        self.abandon()
        if self._thread.is_alive():  # one that is started later ends at once
            self._thread.join(timeout=5)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                with asyncio.Runner() as loop:  # of this thread alone: no handler can block it
                    forks.end_loop_in_children(loop.get_loop())
                    self._beats(loop)
            except Exception as error:  # no loop could be made: the process has no file descriptor left
                self._wait(self._failed(error))
        self._tell(len(self._listed))  # no heartbeat will list their sessions: wake all that wait for one

    def _beats(self, loop: asyncio.Runner) -> None:
        while not self._stop.is_set():
            try:
                loop.run(self._beat())
            except Exception as error:
                self._wait(self._failed(error))
            else:
                self._backoff.succeeded()
                self._wait(self._due - monotonic(), relieves=True)
        loop.run(self._session.close())

    def _failed(self, error: Exception) -> float:
        """The pause before the next try. A lost session says so by itself, and paces its connections."""
        if self.late() and not self._said_late:
            self._said_late = True
            log.info("heartbeat: no jobs are taken until a heartbeat goes through")
        if not transient(error):
            refused = isinstance(error, psycopg.Error)
            what = "the database refuses it" if refused else "it cannot be sent"
            log.error("heartbeat: %s; this worker will be taken for dead", what, exc_info=not refused)
        elif is_loss(error):
            return self._session.link.outage.pause(NAME)
        pause, self._bare_until = self._backoff.pause(), monotonic() + BARE_SECONDS
        log.warning("heartbeat: %s; trying again in %.2f s", described(error), pause)
        return pause

    def _wait(self, seconds: float, *, relieves: bool = False) -> None:
        """Wait up to `seconds`, or until a stop or a heartbeat is requested. Check the event loop meanwhile; with
        `relieves` return also when it is to be relieved, or was blocked at the last heartbeat and goes on."""
        end = monotonic() + seconds
        while (left := end - monotonic()) > 0:
            before, most = monotonic(), min(left, self._monitor.every)
            if self._wake.wait(most):
                self._wake.clear()
                return
            self._monitor.look(monotonic() - before - most)
            if relieves and (self._blocked_loop.wanted() or (self._full and not self._blocked_loop.is_blocked())):
                return

    def _tell(self, listed: int) -> None:
        for done in self._listed[:listed]:
            done()
        del self._listed[:listed]

    async def _beat(self) -> None:
        generation = await self._session.ready()  # this session is listed, too
        listed = len(self._listed)  # counted before the sessions are read: these callers' sessions are among them
        due = monotonic() >= self._due
        ours = {self._session.identity: None} if self._session.identity else {}
        sessions = [
            {"pid": pid, "backend_start": start} | ({"job": job} if job is not None else {})
            for (pid, start), job in {**self._sessions(), **ours}.items()
        ]
        full = self._blocked_loop.is_blocked()  # nothing can start meanwhile
        gathering = self._running.about_to_run()
        write = self._session.link.statement(
            "heartbeat_write",
            worker_id=self._worker_id,
            born=self._born,
            state=self._state.phase,
            # A heartbeat ahead of time does not write the running jobs. Rescue takes a job as not started if it was
            # claimed before the last list of running jobs and is missing there. A job may be about to start just now.
            # Those of batches are listed from their claim on: they wait for others, and many start at once.
            running=statements.integers([*self._running.ids(), *gathering]) if due else None,
            gathering=statements.integers(gathering),
            free=statements.integers(0 if full else self._running.free(queue) for queue in self._state.settings.queues),
            lost=self._running.lost,
            rss=rss(),
            sessions=msgspec.json.encode(sessions).decode(),
            duties=self._state.duties() if due else None,
        )
        sent, self._full = monotonic(), full
        beside = [self._session.link.statement("heartbeat_probe")] if due and sent >= self._bare_until else []
        *read, rows = await self._session.run(*beside, write)
        mine = [born for worker_id, _, _, born in rows if worker_id == self._worker_id]
        if not mine:
            self._stop.set()
            self._receiver.declared_dead(self._worker_id)
            return
        [self._born] = mine
        if generation != self._generation:
            if self._generation:
                self._receiver.reconnected()
            self._generation = generation
        if due:
            self._due = sent + self._lease / 3
        late, self.last_beat = self.late(), sent
        if late:
            self._said_late = False
            self._receiver.punctual_again()
        self._tell(listed)
        for [(head, snapshot, usage)] in read:
            self._receiver.probed(head, snapshot, usage, sent)
        others = [(worker_id, beat, lease) for worker_id, beat, lease, _ in rows if worker_id != self._worker_id]
        dead = self.judge.observe(others, monotonic())
        self._state.other_workers = self.judge.live()
        if dead:
            self._receiver.workers_died(dead)
        await self._blocked_loop.relieve(self._session, self._worker_id)
        await self._stacks.answer(self._session, self._worker_id)
