"""The source: the outbox in the application's database, seen through the one session that holds its lock.

Read, delete and lock are on the same session: what loses the lock can neither read nor delete. Used by `Relay` and, for
the epochs, by targets.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, NamedTuple
from uuid import UUID, uuid5

import psycopg
from psycopg.conninfo import conninfo_to_dict

from pgqueue.database.row_errors import refuses_row
from pgqueue.database.sessions import BEGIN, COMMIT, ROLLBACK
from pgqueue.database.statements import Statement
from pgqueue.errors import Error, InvalidOption
from pgqueue.jobs.values import EPOCH
from pgqueue.plain_text import plural
from pgqueue.relay.session import Session
from pgqueue.worker.fetch.watermark import Reading

CHANNEL = ":outbox"


class StagedRow(NamedTuple):
    """A row of the outbox. `args` is None if they are larger than a job's arguments may be."""

    id: int
    uid: str
    task: str
    args: str | None
    options: str | None
    format: int
    order_key: str | None
    staged: int  # microseconds since 2000
    behind: int | None = None
    """The id of the row before it with the same order key; 0 if one before it was refused."""

    @property
    def staged_at(self) -> datetime:
        """When it was staged. Raises InvalidOption if that is no time, as `infinity`."""
        try:
            return EPOCH + timedelta(microseconds=self.staged)
        except OverflowError:
            raise InvalidOption("staged_at is no time between the years 1 and 9999: leave it to its default") from None


class Lag(NamedTuple):
    """How far a relay is behind: the staged jobs that wait, for how many seconds the oldest has, and how many were put
    aside. Each number is 10,001 at most."""

    waiting: int
    oldest: float | None
    refused: int


class Stopped(Error):
    """No job of this outbox is delivered until a person says so; `reason` says why, `lag` what waits."""

    def __init__(self, reason: str, lag: Lag) -> None:
        most = "more than 10,000" if lag.waiting > 10_000 else None
        waiting = plural(lag.waiting, "staged job waits", "staged jobs wait", most)
        super().__init__(f"{waiting}, and none is delivered: {reason}")
        self.reason, self.lag = reason, lag


class Refusal(NamedTuple):
    """A row that cannot be delivered as it is, and why."""

    row: StagedRow
    reason: str


@dataclass(frozen=True, slots=True)
class Batch:
    """What one statement has read, all of one snapshot."""

    reading: Reading
    rows: list[StagedRow]
    cut: bool
    """Whether rows were left out, because they were too large to be read together."""


class Source:
    """The outbox of one session. `place` says where it is, for people; the rest is known after `find`."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.place = place(session.link.dsn)
        self.name = ""
        """A uuid, the name that it has from `settle` on."""
        self.before: str | None = None
        """The name that it had where it lay before, if it is a copy."""
        self._home: str | None = None
        self._here = ""
        self._target: str | None = None

    async def lock(self) -> bool:
        """Take the lock if it is free; else end the session that has it, if that does not read its answers."""
        [[(locked,)]] = await self._session.ask(self._session.statement("source_lock"))
        if not locked:
            await self._session.ask(self._session.statement("source_end_stalled"))
        return bool(locked)

    async def unlock(self) -> None:
        """Give the lock back, so that the next relay need not wait for the end of this session."""
        await self._session.ask(self._session.statement("source_unlock"))

    async def listen(self) -> None:
        """Hear of staged jobs from now on, in `stirs`."""
        await self._session.ask(self._session.link.listen(CHANNEL))

    async def find(self) -> None:
        """Find out which outbox this is."""
        identity = self._session.statement("source_identity")
        [rows] = await self._session.ask(identity)
        if not rows:
            await self._session.ask(BEGIN, self._session.statement("source_restore"), COMMIT)
            [rows] = await self._session.ask(identity)
        [(name, self._home, self._target, self._here)] = rows
        self.name = name_at(name, self._home, self._here)
        self.before = None if self._home in (None, self._here) else name

    async def check(self, target: str, *, adopt: bool) -> None:
        """Raise Stopped if this outbox is a copy, or belongs to another queue, and is not to be adopted."""
        if self.before is not None and not adopt:
            raise await self.stopped(
                f"this outbox is a copy: it was at {self._home}, and is at {self._here} now, as after pg_upgrade or a "
                "restore. Its jobs may have been delivered from there. If they are to be delivered from here, stop the "
                "relay of the old place, and run `pgqueue relay --adopt` once"
            )
        if self._target not in (None, target) and not adopt:
            raise await self.stopped(
                f"this outbox belongs to another queue ({self._target}, not {target}): a job that was delivered there "
                "would be delivered twice. If it is to change over, run `pgqueue relay --adopt` once"
            )

    async def stopped(self, reason: str) -> Stopped:
        """The error that says what waits, and why."""
        return Stopped(reason, await self.waiting(0, (), ()))

    async def settle(self, target: str) -> None:
        """From now on this outbox lies here and belongs to this queue."""
        if self._home != self._here or self._target != target:
            settle = self._session.statement("source_settle", own=self.name, target=target)
            await self._session.ask(BEGIN, settle, COMMIT)

    async def draw(self, seen: int) -> int:
        """Draw an epoch that is higher than `seen` and than all that were drawn here; durable."""
        draw = self._session.statement("source_draw", seen=seen, source=self.name)
        [_, rows, _] = await self._session.ask(BEGIN, draw, COMMIT)
        if not rows:
            raise Error("the name of this outbox has changed while a relay worked: something has emptied its tables")
        return int(rows[0][0])

    async def read(self, after: int, again: Sequence[int], most: int, most_bytes: int) -> Batch:
        """Read the rows behind `after`, `most` of them, and those with the ids `again`. No crash of the server undoes
        the transactions that have staged them."""
        statement = self._session.statement("source_read", after=after, again=list(again), most=most, bytes=most_bytes)
        [rows] = await self._session.ask(statement)
        self._session.check_writable()  # else rows are delivered that cannot be deleted
        head, xid, snapshot, durable = rows[0][:4]
        found = [StagedRow(*row[4:-1]) for row in rows if row[4] is not None]
        if found and not durable:
            await self._session.ask(BEGIN, self._session.statement("source_flush"), COMMIT)
        return Batch(Reading(head, xid, snapshot), found, cut=bool(found) and rows[0][-1] > len(found))

    async def first(self, after: int) -> StagedRow | None:
        """The first row behind `after`, without its arguments and options."""
        [rows] = await self._session.ask(self._session.statement("source_first", after=after))
        return StagedRow(*rows[0]) if rows else None

    async def waiting(self, after: int, stayed: Sequence[int], held: Sequence[str]) -> Lag:
        """What waits behind this position, and of these ids and order keys."""
        counted = self._session.statement("source_waiting", after=after, stayed=list(stayed), held=list(held))
        [[found]] = await self._session.ask(counted)
        return Lag(*found)

    async def head(self) -> int:
        """Up to which id there are rows now."""
        [[(head,)]] = await self._session.ask(self._session.statement("source_head"))
        return int(head)

    async def settled(
        self, delivered: Sequence[StagedRow], refused: Sequence[Refusal], *, bare: bool = False
    ) -> set[str]:
        """Delete the rows that were delivered, put the refused ones aside; return the uids of those that are gone. The
        others are locked by the application, and stay. `bare`: aside without their arguments and options."""
        statements: list[Statement[Any]] = [BEGIN]
        if delivered:
            statements.append(self._session.statement("source_delete", **_keys(delivered)))
        if refused:
            keys = _keys([refusal.row for refusal in refused])
            reasons = [refusal.reason for refusal in refused]
            statements.append(self._session.statement("source_refuse", **keys, reasons=reasons, bare=bare))
        if len(statements) == 1:
            return set()
        _, *answers, _ = await self._session.ask(*statements, COMMIT)
        return {uid for rows in answers for (uid,) in rows}

    async def put_aside(self, row: StagedRow, reason: str) -> bool:
        """Put aside a row that the server cannot read; without its arguments and options if these cannot be moved.
        False if the application has locked it."""
        try:
            return bool(await self.settled([], [Refusal(row, reason)]))
        except psycopg.Error as error:
            if not refuses_row(error):
                raise
        await self._session.ask(ROLLBACK)
        reason += "; its arguments and options were lost with it"
        return bool(await self.settled([], [Refusal(row, reason)], bare=True))

    async def kept(self, uids: Sequence[str]) -> set[str]:
        """Which of these uids are among the refused rows."""
        [rows] = await self._session.ask(self._session.statement("source_kept", uids=list(uids)))
        return {uid for (uid,) in rows}

    async def ping(self) -> None:
        """Keep the session while the relay waits for the target."""
        await self._session.ask(self._session.statement("source_ping"))

    async def stirs(self, seconds: float) -> None:
        """Wait until jobs were staged, at most so long."""
        await self._session.stirs(seconds)


def name_at(name: str, home: str | None, here: str) -> str:
    """The name of an outbox, or of a queue, that lies here: its own, or a new one if it has not lain here before.

    It follows from the name before and the place. So no two databases that were made from one have the same, and
    whatever settles it finds the same one, after a restore of a state from before its first use, too.
    """
    return name if home == here else str(uuid5(UUID(name), here))


def place(dsn: str) -> str:
    """Host and database, for people."""
    parts = conninfo_to_dict(dsn)
    return f"{parts.get('host', '')}/{parts.get('dbname', '')}"


def _keys(rows: Sequence[StagedRow]) -> dict[str, object]:
    return {"ids": array(row.id for row in rows), "uids": array(row.uid for row in rows)}


def array(values: Iterable[int | str]) -> str:
    """Numbers or uuids as the text of an array: cheaper than a list, whose elements may need quotes."""
    return "{" + ",".join(map(str, values)) + "}"
