"""Where staged jobs go: the protocol that a relay needs, and the target that is a queue of pgqueue.

A target is opened once for each session of the source; what it yields delivers rows until it fails. To be exactly once,
`QueueTarget` has the fence and the memory; why that is enough is said in `relay.py`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import psycopg

from pgqueue.client import enqueue, unique_enqueue
from pgqueue.client.job_parameters import has_keys
from pgqueue.database import notify_queue
from pgqueue.database.backoff import is_loss, without_values
from pgqueue.database.sequences import advancing
from pgqueue.database.sessions import BEGIN, COMMIT, ROLLBACK, Link
from pgqueue.database.statements import Statement
from pgqueue.database.steps import Steps
from pgqueue.errors import InvalidArguments, InvalidOption
from pgqueue.jobs.job import NewJob
from pgqueue.jobs.staged import check_format, job_of
from pgqueue.relay.fence import Fenced, raise_fence
from pgqueue.relay.session import Session, opened
from pgqueue.relay.source import Lag, Refusal, Source, StagedRow, Stopped, array, name_at
from pgqueue.steady_clock import monotonic

log = logging.getLogger("pgqueue")

SAVEPOINT = Statement("SAVEPOINT delivery", {}, list)
RELEASE = Statement("RELEASE SAVEPOINT delivery", {}, list)
ROLLBACK_TO = Statement("ROLLBACK TO SAVEPOINT delivery", {}, list)

_WAITS = ("55P03", "40P01")
"""What a row meets whose unique key is just being taken by another transaction."""

KEYS_SECONDS = 0.2
"""After the first row that waits for a key, a delivery tries for so long whether more rows do."""
LATE_MOST = 10_000
"""So many rows that have waited for a key are remembered."""

Staged = tuple[StagedRow, NewJob[Any]]


@dataclass(frozen=True, slots=True)
class Delivery:
    """What became of some rows. `waiting` were not delivered, and may be after a pause. There was no time for
    `untried`, which are to come again at once, and for `put_off`, which are to come again soon: others go first."""

    delivered: list[StagedRow] = field(default_factory=list)
    refused: list[Refusal] = field(default_factory=list)
    waiting: list[StagedRow] = field(default_factory=list)
    untried: list[StagedRow] = field(default_factory=list)
    put_off: list[StagedRow] = field(default_factory=list)


class Delivering(Protocol):
    """An opened target."""

    async def deliver(self, rows: Sequence[StagedRow]) -> Delivery:
        """Hand these rows over, in their order. What is said to be delivered is deleted from the outbox.

        If a row with an order key is not delivered, no later row with that key may be.
        """
        ...


class Target(Protocol):
    """Where staged jobs go."""

    def open(self, source: Source, *, adopt: bool) -> AbstractAsyncContextManager[Delivering]:
        """Make ready to take the jobs of this source. Everything that is read from now on is delivered by it."""
        ...


@dataclass(frozen=True, slots=True)
class QueueTarget:
    """A queue of pgqueue in another database: exactly once."""

    link: Link
    memory: float
    """How long it is remembered which jobs have come, in seconds, after they were last seen in the outbox."""
    notify: bool = True

    @asynccontextmanager
    async def open(self, source: Source, *, adopt: bool) -> AsyncIterator[QueueSession]:
        """Raise the fence with an epoch of this session's own."""
        async with opened(self.link, "target") as session:
            await session.ask(BEGIN, advancing(self.link.schema, whole=False), COMMIT)
            await _settle(session, source, adopt=adopt)
            yield QueueSession(session, source, await raise_fence(session, source), self)


async def _settle(session: Session, source: Source, *, adopt: bool) -> None:
    """The outbox belongs to this queue, and each lies where it lay, or Stopped is raised; `adopt` makes it so."""
    await source.find()
    try:
        queue = await _settled(session, source, adopt=adopt)
        await source.check(queue, adopt=adopt)
    except Stopped as error:
        said = {"place": source.place, "reason": error.reason, **error.lag._asdict()}
        await session.ask(session.statement("target_stopped", source=source.name, **said))
        raise
    if source.before is not None:  # first: a relay that dies here comes back, and knows both names again
        await session.ask(session.statement("target_inherit", source=source.name, before=source.before))
    await source.settle(queue)


async def _settled(session: Session, source: Source, *, adopt: bool) -> str:
    """Which queue this is. Raises Stopped if it is a copy of one."""
    identity = session.statement("target_identity")
    [rows] = await session.ask(identity)
    if not rows:
        await session.ask(BEGIN, session.statement("target_lock"), session.statement("target_restore"), COMMIT)
        [rows] = await session.ask(identity)
    [(target, home, here)] = rows
    if home not in (None, here) and not adopt:
        raise await source.stopped(
            f"this queue is a copy: it was at {home}, and is at {here} now, as after pg_upgrade or a restore. If jobs "
            "are to be delivered to it, stop the relays of the old place, and run `pgqueue relay --adopt` once for "
            "each outbox"
        )
    own = name_at(target, home, here)
    if home != here:
        await session.ask(BEGIN, session.statement("target_settle", own=own), COMMIT)
    return own


class QueueSession:
    """One session of the target, with its epoch. `deliver` is one transaction."""

    def __init__(self, session: Session, source: Source, epoch: int, target: QueueTarget) -> None:
        self._session = session
        self._source = source
        self._fence = {"source": source.name, "epoch": epoch}
        self._target = target
        self._late: dict[str, None] = {}
        """The uids of rows that have waited for a key. They come last; among them the one that was tried last."""
        self._taken: set[str] = set()
        """Keys that were found taken in this delivery: rows with these wait without a try."""
        self._keys_until = math.inf
        """Until when this delivery tries rows with keys."""

    async def deliver(self, rows: Sequence[StagedRow]) -> Delivery:
        """Deliver these rows in one transaction, as far as they can be jobs. If another session has raised the fence,
        Fenced is raised."""
        try:
            return await self._deliver(rows, notify=self._target.notify)
        except psycopg.Error as error:
            if not notify_queue.is_full(error):
                raise
            return await self._deliver(rows, notify=False)  # NOTIFY is a hint; the COMMIT that it failed was undone

    async def _deliver(self, rows: Sequence[StagedRow], *, notify: bool) -> Delivery:
        if (ids := await self._put_all(rows, notify)) is not None:
            await self._commit(list(zip(rows, ids, strict=True)))
            return Delivery(list(rows))
        found = await self._begin(self._known(rows))
        known = {uid for (uid,) in found}
        delivery = Delivery([row for row in rows if row.uid in known])
        staged = self._jobs([row for row in rows if row.uid not in known], delivery)
        made: list[tuple[StagedRow, int]] = []
        self._taken, self._keys_until = set(), math.inf
        for keyed, batch in _pieces(staged, self._late):
            await self._put(batch, keyed, notify, made, delivery)
        await self._commit(made)
        delivery.delivered.extend(row for row, _ in made)
        return delivery

    async def _put_all(self, rows: Sequence[StagedRow], notify: bool) -> list[int] | None:
        """The usual case in one round trip: begin, and insert all rows as jobs. None if that cannot be: one of them is
        known, has a unique key, or is refused. Then nothing was done."""
        delivery = Delivery()
        jobs = [job for _, job in self._jobs(rows, delivery)]
        if not jobs or delivery.refused or has_keys(jobs):
            return None
        insert = enqueue.many(jobs, schema=self._session.link.schema, notify=notify)
        fence = self._session.statement("target_fence", **self._fence)
        try:
            _, fenced, found, handles = await self._session.ask(BEGIN, fence, self._known(rows), insert)
        except psycopg.Error as error:
            if is_loss(error) or not _of_row(error):
                raise
        else:
            if fenced and not found:
                return [handle.id for handle in handles]
        await self._session.ask(ROLLBACK)
        return None

    async def _commit(self, made: list[tuple[StagedRow, int]]) -> None:
        """Remember these rows, and commit."""
        if not made:
            await self._session.ask(COMMIT)
            return
        patience = self._session.statement("target_patience")
        try:
            await self._session.ask(patience, self._remember(made), COMMIT)
        except psycopg.errors.UniqueViolation as error:
            raise psycopg.OperationalError("another outbox has delivered rows with the same uids just now") from error

    async def _begin(self, statement: Statement[Any]) -> Any:
        """Begin a transaction under the fence; return the answer of its first statement."""
        fence = self._session.statement("target_fence", **self._fence)
        _, fenced, answer = await self._session.ask(BEGIN, fence, statement)
        if not fenced:
            await self._session.ask(ROLLBACK)
            raise Fenced("another session of a relay delivers the jobs of this outbox now")
        return answer

    def _jobs(self, rows: Sequence[StagedRow], delivery: Delivery) -> list[Staged]:
        """The rows as jobs. What can be none is refused."""
        staged: list[Staged] = []
        for row in rows:
            check_format(row.format)
            try:
                staged.append((row, job_of(row.task, row.args, row.options, row.staged_at)))
            except (InvalidArguments, InvalidOption) as error:
                delivery.refused.append(Refusal(row, without_values(error)))
        return staged

    async def _put(
        self, batch: list[Staged], keyed: bool, notify: bool, made: list[tuple[StagedRow, int]], delivery: Delivery
    ) -> None:
        """Insert these jobs. If that fails for one of them, halve: only what fails alone is refused, or waits. It holds
        back the later rows with its order key."""
        stopped = _stopped(delivery)
        batch = [(row, job) for row, job in batch if not (row.order_key in stopped and stopped[row.order_key] < row.id)]
        if keyed:
            batch = self._worth_a_try(batch, delivery)
        if not batch:
            return
        jobs = [job for _, job in batch]
        try:
            ids = await (self._put_keyed(jobs, notify) if keyed else self._put_plain(jobs, notify))
        except psycopg.Error as error:
            if is_loss(error) or not (_of_row(error) or (keyed and error.sqlstate in _WAITS)):
                raise
            await self._session.ask(ROLLBACK_TO, RELEASE)
            if len(batch) > 1 and batch[0][0].uid in self._late:
                # Most of them still wait, so halving would take twice as many tries.
                for place in range(len(batch)):
                    spent = monotonic() >= self._keys_until
                    await self._put(batch[place:] if spent else batch[place : place + 1], keyed, notify, made, delivery)
                    if spent:
                        break
            elif len(batch) > 1:
                half = len(batch) // 2
                await self._put(batch[:half], keyed, notify, made, delivery)
                await self._put(batch[half:], keyed, notify, made, delivery)
            elif error.sqlstate in _WAITS:
                self._found_taken(*batch[0])
                delivery.waiting.append(batch[0][0])
            else:
                delivery.refused.append(Refusal(batch[0][0], without_values(error)))
        else:
            made.extend((row, id) for (row, _), id in zip(batch, ids, strict=True))
            for row, _ in batch if self._late else ():
                self._late.pop(row.uid, None)

    def _worth_a_try(self, batch: list[Staged], delivery: Delivery) -> list[Staged]:
        """Of these rows with unique keys those that are tried now. The others wait: many such rows delay no other."""
        spent = monotonic() >= self._keys_until
        tried: list[Staged] = []
        for row, job in batch:
            waits = job.keys is not None and not self._taken.isdisjoint(job.keys.names())
            if waits or spent:
                self._late.setdefault(row.uid)
                (delivery.waiting if waits else delivery.put_off).append(row)
            else:
                tried.append((row, job))
        return tried

    def _found_taken(self, row: StagedRow, job: NewJob[Any]) -> None:
        """This row waits for a key. If it has only one, it is known which."""
        self._keys_until = min(self._keys_until, monotonic() + KEYS_SECONDS)
        if job.keys is not None and len(names := job.keys.names()) == 1:
            self._taken.update(names)
        self._late.pop(row.uid, None)
        self._late[row.uid] = None
        while len(self._late) > LATE_MOST:
            del self._late[next(iter(self._late))]

    async def _put_plain(self, jobs: list[NewJob[Any]], notify: bool) -> list[int]:
        statement = enqueue.many(jobs, schema=self._session.link.schema, notify=notify)
        _, handles, _ = await self._session.ask(SAVEPOINT, statement, RELEASE)
        return [handle.id for handle in handles]

    async def _put_keyed(self, jobs: list[NewJob[Any]], notify: bool) -> list[int]:
        """Insert jobs with unique keys. A row waits 5 ms for a key that is just being taken, then for a later round."""
        schema = self._session.link.schema
        await self._session.ask(SAVEPOINT, unique_enqueue.impatient(schema))
        handles = await self._drive(unique_enqueue.enqueueing(jobs, schema=schema, notify=notify))
        await self._session.ask(RELEASE)
        return [handle.id for handle in handles]

    async def _drive(self, steps: Steps[Any]) -> Any:
        try:
            statement = next(steps)
            while True:
                [rows] = await self._session.ask(statement)
                statement = steps.send(rows)
        except StopIteration as end:
            return end.value

    def _known(self, rows: Sequence[StagedRow]) -> Statement[list[tuple[Any, ...]]]:
        return self._session.statement("target_known", uids=array(row.uid for row in rows))

    def _remember(self, made: list[tuple[StagedRow, int]]) -> Statement[Any]:
        return self._session.statement(
            "target_remember",
            source=self._fence["source"],
            uids=array(row.uid for row, _ in made),
            staged_ids=array(row.id for row, _ in made),
            job_ids=array(id for _, id in made),
        )

    async def known(self, rows: Sequence[StagedRow]) -> list[StagedRow]:
        """Which of these rows have come here already; that is remembered anew."""
        found = await self._begin(self._known(rows))
        await self._session.ask(COMMIT)
        known = {uid for (uid,) in found}
        return [row for row in rows if row.uid in known]

    async def report(self, name: str, lag: Lag) -> None:
        """Note how far this relay is behind."""
        await self._session.ask(self._session.statement("target_report", place=name, **lag._asdict(), **self._fence))

    # The memory -------------------------------------------------------------------------------------------------------

    async def now(self) -> str:
        """The time of this server, as text."""
        statement = self._session.statement("target_now")
        [[(now,)]] = await self._session.ask(statement)
        return str(now)

    async def looked(self, began: str) -> int:
        """A look at the whole outbox that began at this time has ended: every row that it found was delivered or
        remembered anew. Forget what may be forgotten; return how many."""
        looked = self._session.statement("target_looked", memory=self._target.memory, began=began, **self._fence)
        [(before,)] = await self._begin(looked)
        names = self._session.statement("target_names", source=self._fence["source"])
        _, found = await self._session.ask(COMMIT, names)
        return sum([await self._forget(name, before) for (name,) in found])

    async def _forget(self, name: str, before: str) -> int:
        """Forget what was delivered under this name before this time, but for rows that were put aside."""
        old, forgotten = self._session.statement("target_old", source=name, before=before), 0
        while True:
            [rows] = await self._session.ask(old)
            if not rows:
                return forgotten
            uids = {uid for (uid,) in rows}
            kept = await self._source.kept(list(uids))
            forget = self._session.statement("target_forget", uids=array(uids - kept), before=before)
            [(gone,)] = await self._begin(forget)
            await self._session.ask(self._session.statement("target_keep", uids=array(kept), before=before), COMMIT)
            forgotten += gone


def _pieces(staged: list[Staged], late: Mapping[str, None]) -> Iterator[tuple[bool, list[Staged]]]:
    """Jobs with unique keys and those without apart. Rows that have waited for a key are apart, too, and come last,
    with those of the same order keys. Where there are order keys, the pieces follow the order; and jobs with unique
    keys that have one order key are in different pieces: of one piece, the first may come last."""
    turns = {uid: turn for turn, uid in enumerate(late, 1)} if late else {}
    ordered = {row.order_key: turns[row.uid] for row, _ in staged if row.uid in turns}
    ordered.pop(None, None)
    in_order = any(row.order_key is not None for row, _ in staged)

    def turn(each: Staged) -> tuple[int, bool]:
        row, job = each
        return ordered.get(row.order_key) or turns.get(row.uid, 0), not in_order and has_keys([job])

    piece: list[Staged] = []
    seen: set[str] = set()
    before = (False, False)
    for row, job in sorted(staged, key=turn):
        kind = (has_keys([job]), row.uid in turns)
        if piece and (kind != before or (kind[0] and row.order_key in seen)):
            yield before[0], piece
            piece, seen = [], set()
        piece.append((row, job))
        before = kind
        if row.order_key is not None:
            seen.add(row.order_key)
    if piece:
        yield before[0], piece


def _stopped(delivery: Delivery) -> dict[str, int]:
    """For each order key the id of the first row that is not delivered: it holds back what comes after it."""
    stopped: dict[str, int] = {}
    for row in (*delivery.waiting, *delivery.put_off, *(refusal.row for refusal in delivery.refused)):
        if row.order_key is not None:
            stopped[row.order_key] = min(row.id, stopped.get(row.order_key, row.id))
    return stopped


def _of_row(error: psycopg.Error) -> bool:
    """Whether the server refused a value: SQLSTATE class 22 or 23. An id that is there already is no fault of a row: a
    sequence lags."""
    name = error.diag.constraint_name or ""
    return (error.sqlstate or "")[:2] in ("22", "23") and not (name.startswith("job_") and name.endswith("_id"))
