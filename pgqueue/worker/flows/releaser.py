"""Releases jobs that wait for jobs: asks, for the nodes of jobs that have ended, which waiting jobs go on.

A job that waits has the key `node:ID` of one node that lives: it watches that node. The statements that end jobs know
nothing of this. After their commit, this worker asks for the nodes of the jobs that it has ended (`release_look`). Of
those that jobs watch, and of which no job lives, it goes on with the watchers (`release_jobs`): they watch the next
node that lives, or end, or are released. The nodes that come of it are looked at in turn.

Why a job starts after all that it waits for:

1. A job moves between the tables in one transaction. So a snapshot has a job that lives in exactly one of them.
2. A statement has one snapshot. It judges all nodes that a job waits for in it: each is without a job that lives.
3. A job comes into a node with the flow, or in the commit that ends a job of that node. So a node that has ended in a
   snapshot has ended for good. Only a retry by hand makes it live again, which stops no job that was released before.

Why no job waits for ever:

1. Of two last ends of a node the later one sees both: its look comes after its commit.
2. A watch that moves to a node is committed, and only then is that node looked at once more. If the node had ended
   before that look, the look sees it. If not, the look after its last end comes after the watch, and sees that.
3. A look may be lost with its process. A watcher may be locked by another transaction, and is passed over. A job may be
   ended by hand, or skipped for its lock; a watcher may be rescheduled. These statements name the node in a NOTIFY, at
   which the leader looks. That may be lost, too. So a sweep walks the keys of all watched nodes, some at a time, and
   all after a rescue.

Why a job is released once: the release deletes its row in `job_blocked`, and inserts another one in the same
transaction. A second release finds no row. The tables refuse a waiting row elsewhere.

A dead end goes down the graph in one statement. A node that is cancelled takes with it those that wait for its
completion, and for nothing else. Why none of them is judged too early:

1. All jobs of the node before that live in the snapshot are locked by this statement, and deleted by it. So that node
   has ended with its commit. No row of a job is ever updated in place: its table refuses that. So a row that is locked
   is the one that the snapshot has, and the DELETE finds it.
2. A job is added to a node only by one of its jobs that runs. If a job of the node before lives that was released,
   nothing below that node is touched.
3. Nor is it if one of the jobs is locked elsewhere, or is one too many: the next look or the sweep comes to it. The
   naive way goes down from a node of which a job may still be retried into life.

Why there is no deadlock: rows are locked with SKIP LOCKED, nothing else is locked, and no end of a job waits for this.

Naive versions, which the tests show to fail: no second look (a job waits for the sweep); a look in several statements
(a job moves between two of them, and its node seems to have ended); counters of ends (a duplicate run counts twice, a
retry never).

A row that the server refuses to move is left where it is, and named (see mover.py). The sweep comes back to it. If many
are refused, the release goes on behind the node at which it has rested, a few times. Rows are left alone the longer the
more there are. So each sweep comes further, whichever rows are refused. The naive release ends where it first rests: a
node with many such rows keeps all nodes behind it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from typing import Any

from pgqueue.database.backoff import persist, wait
from pgqueue.database.sessions import Session
from pgqueue.database.statements import Row, Statement, integers
from pgqueue.jobs.job import Job, nodes_of
from pgqueue.jobs.keys import NODE
from pgqueue.steady_clock import monotonic
from pgqueue.worker.left_alone import LeftAlone, Notice
from pgqueue.worker.mover import Mover
from pgqueue.worker.state import WorkerState

log = logging.getLogger("pgqueue")

NODES_MOST = 1_000
JOBS_MOST = 1_000
BYTES_MOST = 16 << 20
"""So many bytes of results one statement gives to jobs: that is about a second. A thousand jobs with results of 2 MB
would take longer than the server lets a statement run."""
KEYS_MOST = 1_000
IDLE_SECONDS = 30.0
WALK_SECONDS = 4.5
"""How long this worker walks no further, though sweeps come sooner: locks that are freed by hand ask for many."""
REFUSED_SECONDS, REFUSED_EACH = 60.0, 0.5
"""How long a job is left alone after the server has refused to move it, and longer for every other one that is."""
RESTS_MOST = 5
"""So often a release goes on behind a node at which it has rested: each refusal costs a connection."""


class Releaser:
    """Releases jobs over the given session, which is open only while there are flows."""

    def __init__(self, session: Session, state: WorkerState) -> None:
        self.released = 0
        """How many jobs this worker has released."""
        self.found_by_sweep = 0
        """How many nodes had ended and were watched when a walk of this worker looked. One that stays counts once."""
        self._found: set[int] = set()
        """Those that the last walk has found: the server may refuse to move the jobs that watch them."""
        self._session = session
        self._state = state
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._asking = False
        self._nodes: dict[int, None] = {}
        """Nodes that may have ended."""
        self._walks = self._whole = False
        self._walked = -WALK_SECONDS
        self._after = ""
        self._mover = Mover(
            session,
            notify=state.settings.notify,
            unfit=lambda: self._statement("unblock_refuse_unfit", notify=state.settings.notify),
        )
        self._left = LeftAlone[int](Notice("cannot be released"), seconds=REFUSED_SECONDS, each=REFUSED_EACH)

    # What others say -------------------------------------------------------------------------------------------------

    def ended(self, jobs: Iterable[Job]) -> None:
        """These jobs have left this worker, and that is committed."""
        if nodes := nodes_of(jobs):
            self.look_at(nodes)

    def look_at(self, nodes: Iterable[int]) -> None:
        """Jobs of these nodes have ended, or may have."""
        self._nodes.update(dict.fromkeys(nodes))
        self._wake.set()

    def told(self, payload: str) -> None:
        """A NOTIFY of `:control` names a node of which a job has ended elsewhere, or that a job waits for anew."""
        number = payload.removeprefix(NODE)
        if number.isascii() and number.isdecimal() and len(number) < 19:
            self.look_at([int(number)])

    def swept(self) -> None:
        """It is time to look at some of the nodes for which jobs wait."""
        if monotonic() >= self._walked + WALK_SECONDS:
            self._walks = True
            self._wake.set()

    def rescued(self) -> None:
        """A worker has died, perhaps between a commit and its look: look at all nodes for which jobs wait."""
        self._walks = self._whole = True
        self._wake.set()

    async def idle(self) -> None:
        """Wait until nothing is left to ask for."""
        while self._wants or self._asking:
            self._idle.clear()
            await self._idle.wait()

    @property
    def _wants(self) -> bool:
        return bool(self._nodes) or self._walks

    # Releasing -------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Release until cancelled."""
        await persist(self._step, name="release", answers=self._session.answers, past_data=True)

    async def _step(self) -> None:
        if not self._wants:
            if not await wait(self._wake, IDLE_SECONDS):
                await self._session.close()
                await self._wake.wait()
            self._wake.clear()
        self._asking = True
        try:
            while self._wants:
                if self._walks:
                    await self._walk()
                if self._nodes:
                    await self._look()
        finally:
            self._asking = False
        self._idle.set()

    async def _look(self) -> None:
        some = list(self._nodes)[:NODES_MOST]
        for node in some:
            del self._nodes[node]  # before: a job of it may end while we look
        try:
            [rows] = await self._session.run(self._statement("release_look", nodes=integers(some)))
            if rows:
                await self._release([node for (node,) in rows])
        except BaseException:
            self._nodes = dict.fromkeys(some) | self._nodes
            raise

    async def _release(self, nodes: Sequence[int]) -> None:
        """Go on with the jobs that watch these nodes, and look at the nodes that come of it. A node with too many
        refused jobs is left to the sweep, and the nodes behind it are not."""
        left = sorted(nodes)
        for _ in range(RESTS_MOST):
            rested_at = await self._release_some(left)
            left = [node for node in left if rested_at is not None and node > rested_at]
            if not left:
                break

    async def _release_some(self, nodes: Sequence[int]) -> int | None:
        """Do so in the order of the nodes; return at which of them this has rested, if it has."""
        asked = integers(nodes)
        last: int | None = None

        def read(rows: list[Row]) -> list[Row]:
            nonlocal last
            if rows:
                last = rows[0][2]
            return [row[:2] for row in rows]

        def moves(n: int, passed: str) -> Sequence[Statement[Any]]:
            settings = self._state.settings
            about = {"worker_id": self._state.id, "version_tag": settings.version_tag, "notify": settings.notify}
            return [self._statement("release_jobs", nodes=asked, n=n, passed=passed, bytes=BYTES_MOST, **about)]

        def first(passed: str) -> Statement[list[Row]]:
            found = self._statement("release_first", nodes=asked, passed=passed)
            return Statement(found.sql, found.params, read)

        async for [[(_, after, released, *_)]] in self._mover.walk(JOBS_MOST, self._left, moves, first):
            self.released += released
            self.look_at(after)
        return last if self._mover.rested else None

    async def _walk(self) -> None:
        """Look at the next nodes for which jobs wait; at all of them after a rescue."""
        whole = self._whole
        self._walks = self._whole = False  # before: a worker may die while we look
        self._walked = monotonic()
        after: str | None = "" if whole else self._after
        try:
            while after is not None:
                before = after
                [[(nodes, after)]] = await self._session.run(self._statement("release_walk", after=before, n=KEYS_MOST))
                self._count(nodes, before, after)
                self.look_at(nodes)
                if not whole:
                    break
        except BaseException:
            self._walks, self._whole = True, self._whole or whole
            raise
        self._after = after or ""

    def _count(self, nodes: Sequence[int], after: str, upto: str | None) -> None:
        """These nodes were found behind the key `after`, up to the key `upto`; None: up to the end."""
        passed = {node for node in self._found if f"{NODE}{node}" > after and (upto is None or f"{NODE}{node}" <= upto)}
        self.found_by_sweep += len(set(nodes) - passed)
        self._found = self._found - passed | set(nodes)

    def _statement(self, name: str, **params: object) -> Statement[list[Row]]:
        return self._session.link.statement(name, **params)
