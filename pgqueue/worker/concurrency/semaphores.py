"""The moves of the unblocker: each locks some keys and moves the waiters that may go on, in one round trip.

The unblocker decides which key is asked for when. A move notes what it has seen of its keys in `holder_cursors` and
`waiter_cursors`, and the next move begins there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pgqueue.database.sessions import Session
from pgqueue.database.statements import Row, Statement, integers, texts
from pgqueue.jobs.keys import LIMIT, LOCK
from pgqueue.worker.concurrency.holder_cursors import HolderCursors
from pgqueue.worker.concurrency.waiter_cursors import FRONT, Position, WaiterCursors
from pgqueue.worker.run.slots import Room
from pgqueue.worker.state import WorkerState

Wanted = dict[str, tuple[list[int], bool]]
"""Keys, each with its jobs that were blocked just now, and whether its first waiter may have to be skipped."""


@dataclass(frozen=True, slots=True)
class Unblocked:
    """What a move has done.

    `rows`: the jobs that came to this worker, followers in chains last and in order. `onward`: keys to ask for next.
    `unsure`: keys that seem to have room, though their waiters were not read from the start. `skipped`: number of jobs
    skipped.
    """

    rows: list[Row]
    onward: list[str]
    unsure: list[str] = field(default_factory=list)
    skipped: int = 0


class UnblockSummary(msgspec.Struct):
    """What a move says of its keys."""

    gone: list[tuple[str, int, int, int]]
    """(key, how many jobs have left its waiting queue, rank and id of the last one)."""
    onward: list[str]
    """Keys to be asked for next."""
    lowest_hold: int | None = None
    """The lowest hold_pos of the jobs that came in; None if none did."""
    held: list[str] = []
    """Of locks: the keys that other jobs held before."""
    full: list[str] = []
    """Of locks: the keys with waiters and no room left."""
    too_large: bool = False
    """Of locks: whether the jobs have to be read apart."""
    oldest: list[tuple[str, int]] = []
    """Of limits: (key, the lowest hold_pos of its holders)."""
    ended: list[str] = []
    """Of limits: the keys with room left and no waiter."""


class Semaphores:
    """Makes the moves of one worker, on one session. `rooms` says where a job may run here now."""

    def __init__(
        self,
        session: Session,
        state: WorkerState,
        rooms: Callable[[], list[Room]],
    ) -> None:
        self.holder_cursors, self.waiter_cursors = HolderCursors(), WaiterCursors()
        self.slots_promised: dict[tuple[str, ...], int] = {}
        """How many slots of these queues the move under way may fill."""
        self._session = session
        self._state = state
        self._tasks = texts(state.tasks)
        self._rooms = rooms

    async def unblock_next(self, asked: Wanted, claim: int) -> Unblocked:
        """Move the first waiters of locks the short way. `onward` has the keys that have to go the long way."""
        keys, on = list(asked), await self._begin()
        afters = self._afters(keys)
        behind = [self.waiter_cursors.position(key) for key in keys]
        _, [first, *rows] = await self._session.run(
            self._lock(keys),
            self._statement(
                "unblock_next",
                keys,
                claim,
                afters=afters,
                **_positions(behind),
            ),
            on=on,
        )
        summary = msgspec.json.decode(first[-1], type=UnblockSummary)
        if summary.too_large:
            [rows] = await self._session.run(self._read("unblock_read", keys, claim, afters=afters))
        self._remember(summary.gone)
        self._learn(rows, summary)
        rows.sort(key=lambda row: (-row[1], row[7], row[0]))
        sure = {*summary.onward, *(key for key, *_ in summary.gone)}
        return Unblocked(rows, summary.onward, _unsure(keys, behind, sure))

    async def find_waiters(self, keys: Sequence[str]) -> tuple[list[str], list[str]]:
        """The keys that jobs wait for; and the keys for which none was found, though their waiters were not read from
        the start."""
        behind = [self.waiter_cursors.position_to_look(key) for key in keys]
        [rows] = await self._session.run(
            self._session.link.statement(
                "unblock_waiters",
                keys=texts(keys),
                **_positions(behind),
                front=FRONT[0],
            )
        )
        [(lines, seconds, read)] = rows
        waiting = set(lines)
        unsure = _unsure(keys, behind, waiting)
        self.waiter_cursors.empty(set(keys).difference(waiting, unsure), self._session.sent)
        if read:
            self.waiter_cursors.took(seconds, read)
        return lines, unsure

    async def unblock_for_locks(self, asked: Wanted, claim: int) -> Unblocked:
        """Move the first waiters of locks. `onward` has the limits and rates that they wait for next."""
        keys, on = list(asked), await self._begin()
        afters = self._afters(keys)
        behind = self._behind(asked)
        _, [(said, _)], *skips, rows = await self._session.run_then(
            self._lock(keys),
            self._statement("unblock_move", keys, claim, afters=afters, **_positions(behind)),
            *self._skip(asked, afters),
            then=[self._read("unblock_read", keys, claim, afters=afters)],
            on=on,
        )
        summary = msgspec.json.decode(said, type=UnblockSummary)
        self._remember(summary.gone)
        for key in summary.onward:  # jobs that come from a lock may stand before other waiters of this key
            self.waiter_cursors.doubt(key)
        self._learn(rows, summary)
        skipped = sum(count for [(count, _)] in skips)
        return Unblocked(rows, summary.onward, _unsure(keys, behind, set(summary.full)), skipped)

    async def unblock_for_limits(self, asked: Wanted, claim: int) -> Unblocked:
        """Move the first waiters of limits.

        Jobs that went on to a rate took no slot, so more waiters may go on. The statement also keeps some waiters back
        until it is asked again, but never without moving one on. So if any job went on, these keys are to be asked for
        next, too.
        """
        keys, on = list(asked), await self._begin()
        behind = self._behind(asked)
        _, [(said, _)], rows = await self._session.run_then(
            self._lock(keys),
            self._statement("unblock_limits", keys, claim, afters=self._afters(keys), **_positions(behind)),
            then=[self._read("unblock_read_limits", keys, claim)],
            on=on,
        )
        summary = msgspec.json.decode(said, type=UnblockSummary)
        self._remember(summary.gone)
        self.holder_cursors.counted(summary.oldest, summary.lowest_hold)
        onward = [*summary.onward, *keys] if summary.onward else []
        return Unblocked(rows, onward, _unsure(keys, behind, set(keys).difference(summary.ended)))

    async def _begin(self) -> int | None:
        """Connect. Answers the connection that the next statements have to be sent on, because cursors learned there go
        with them."""
        await self._session.ready()
        on = self._session.lasting
        self.holder_cursors.on(on)
        return on

    def _behind(self, asked: Wanted) -> list[Position]:
        """After which positions the waiters of these keys are to be read."""
        for key, (_, head) in asked.items():
            if head:  # the sweep has seen a waiter: perhaps before the cursor
                self.waiter_cursors.doubt(key)
        return [self.waiter_cursors.position(key) for key in asked]

    def _remember(self, gone: Iterable[tuple[str, int, int, int]]) -> None:
        for key, number, rank, job_id in gone:
            self.waiter_cursors.unblocked(key, (rank, job_id), number)

    def _learn(self, rows: list[Row], summary: UnblockSummary) -> None:
        if summary.lowest_hold is not None:
            keys = {LOCK + row[15] for row in rows}
            self.holder_cursors.granted(keys.difference(summary.held), summary.lowest_hold)

    def _skip(self, asked: Wanted, afters: str) -> list[Statement[Any]]:
        """What ends jobs that are to be skipped; nothing if no job may have to be."""
        fresh = [job_id for ids, _ in asked.values() for job_id in ids]
        heads = any(head for _, head in asked.values())
        if not (fresh or heads):
            return []
        asks = {
            "fresh": integers(fresh),
            "heads": heads,
            "notify": self._state.settings.notify,
            "worker_id": self._state.id,
        }
        return [self._session.link.statement("unblock_skip", keys=texts(asked), afters=afters, **asks)]

    def _lock(self, keys: list[str]) -> Statement[Any]:
        return self._session.link.statement("unblock_lock", keys=texts(keys))

    def _afters(self, keys: list[str]) -> str:
        return integers(map(self.holder_cursors.after, keys))

    def _read(self, name: str, keys: list[str], claim: int, **more: Any) -> Statement[Any]:
        return self._session.link.statement(name, keys=texts(keys), claim=claim, worker_id=self._state.id, **more)

    def _statement(self, name: str, keys: list[str], claim: int, **more: Any) -> Statement[Any]:
        rooms = self._rooms()
        # A lock that is asked for will have a holder, with or without a slot. A limit gets only as many as there are
        # slots for.
        sure = 0 if keys[0].startswith(LIMIT) else len(keys)
        given = [room.free - max(0, min(room.left, room.free - sure)) for room in rooms]
        self.slots_promised = {tuple(room.queues): slots for room, slots in zip(rooms, given, strict=True)}
        return self._session.link.statement(
            name,
            keys=texts(keys),
            queues=texts(queue for room in rooms for queue in room.queues),
            pools=integers(index for index, room in enumerate(rooms, 1) for _ in room.queues),
            slots=integers(given),
            behind=integers(room.behind for room in rooms),
            tasks=self._tasks,
            worker_id=self._state.id,
            claim=claim,
            notify=self._state.settings.notify,
            **more,
        )


def _positions(behind: Sequence[Position]) -> dict[str, str]:
    """After which positions waiters are to be read, as statements want them."""
    return {"ranks": integers(rank for rank, _ in behind), "ids": integers(job_id for _, job_id in behind)}


def _unsure(keys: Iterable[str], behind: Iterable[Position], sure: Collection[str]) -> list[str]:
    """The keys for which a waiter may be left before the cursor, without those that are `sure`."""
    return [key for key, place in zip(keys, behind, strict=True) if place != FRONT and key not in sure]
