"""A model of the relay: one outbox, one target, several relays, and whatever can happen to them.

Used by relay/test_scheme.py. One seed is one schedule. Relays are generators; each `yield` is a place where a relay may
stand still for any time, and where all others go on. Nothing here is a thread, a clock or a database: a failing seed
fails again.

What the model keeps, because each of it has lost or doubled jobs:

1. A message to a target session is executed some time after it was sent, whether or not the relay still waits for it.
2. A delivery holds the fence from its first statement to its COMMIT, and a session may stand still in between: for
   ever, if the rest of its message never comes. The raiser of the fence ends that session. That undoes the delivery,
   or comes too late, for it has just committed.
3. An answer may get lost. Then the relay does not know what became of its message, and opens other sessions.
4. A lock of the source goes with its session. The relay that held it does not notice before its next statement there.
5. A DELETE may be executed late, too; ids are given again after TRUNCATE … RESTART IDENTITY; uids never.
6. A crash or a failover ends all sessions of that server, and takes commits back that were not durable.
7. The source may be set back by less than the memory's age. What was staged since then never was.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from random import Random

MEMORY = 1_000
"""Age, in steps, from which a row of the memory may be pruned."""
BATCH = 3
RELAYS = 3

Uid = int
Steps = Generator[None, None, None]


@dataclass(frozen=True, slots=True)
class Scheme:
    """The scheme of the relay; each field can be taken out."""

    fence: bool = True
    """A delivery fails if its epoch is not the one at the target."""
    uid: bool = True
    """Rows are remembered and deleted by their uid; without it by their id."""
    fence_per_session: bool = True
    """Each target session has an epoch of its own; without it each lock of the source has."""
    durable: bool = True
    """The target's COMMIT is durable when it is answered."""
    ends_holder: bool = True
    """A session that holds the fence for long is ended by the one that raises it."""
    looked: bool = True
    """The memory of a row is pruned an age after a look at the whole outbox that has not found the row. Without it: an
    age after the row was delivered, if it is not in the outbox."""


@dataclass(frozen=True, slots=True)
class Outcome:
    lost: tuple[Uid, ...]
    doubled: tuple[Uid, ...]
    staged: int


class Lost(Exception):
    """A session has ended, or its answer got lost."""


@dataclass(slots=True, eq=False)
class Session:
    """A session of the source or the target. `busy`: a delivery holds the fence in it."""

    alive: bool = True
    busy: bool = False
    stuck: bool = False
    """The rest of its message never comes."""


@dataclass(frozen=True, slots=True)
class Source:
    """What has been committed in the application's database."""

    rows: dict[Uid, int] = field(default_factory=dict)
    """The id of each row of the outbox."""
    next_id: int = 1
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class Target:
    """What has been committed in the queue's database."""

    epoch: int = 0
    memory: dict[int, int] = field(default_factory=dict)
    """The uids (or ids) that were delivered, and when they were last found in the outbox."""
    looks: tuple[int, int, int] = (0, 0, 0)
    """When two looks at the whole outbox began, and when the second ended: at least an age after the first had."""
    jobs: tuple[Uid, ...] = ()


@dataclass(slots=True, eq=False)
class Message:
    """A statement on its way to a session: executed later, or never if the session ends first."""

    session: Session
    steps: Steps
    due: int = 0
    """Not executed before this step: the server stands still, or has not read it."""
    answer: str = ""
    """Empty while there is none, then "done" or "refused"."""


class Model:
    """One schedule: `run` plays it and says what came of it."""

    def __init__(self, scheme: Scheme, seed: int) -> None:
        self.scheme = scheme
        self.random = Random(seed)
        self.now = 0
        self.source, self.target = Source(), Target()
        self.past: list[tuple[int, Source, int]] = []
        """Earlier states of the source: when, what, and how many uids had been staged."""
        self.flushed = self.target
        """What the target has on disk."""
        self.staged: list[Uid] = []
        self.gone: set[Uid] = set()
        """Rows that never were, because the source was set back behind them, or that TRUNCATE took."""
        self.locked: set[Uid] = set()
        """Rows that the application has locked: no DELETE finds them."""
        self.lock: Session | None = None
        self.relays = [self._relay() for _ in range(RELAYS)]
        self.faults = (
            self._kill, self._end_lock, self._end_target_session, self._fail_over_source, self._fail_over_target,
            self._flush, self._wait, self._set_back, self._truncate, self._lock_row, self._unlock_rows,
        )  # fmt: skip
        # What is frequent in one schedule never happens in another.
        self.weights = [weight * self.random.choice((0, 1, 4)) for weight in (2, 3, 2, 1, 1, 2, 2, 3, 1, 3, 1)]
        self.weights[0] += 1  # not all are 0
        self.trouble = self.random.choice((0.03, 0.15))
        self.sessions: list[tuple[str, Session]] = []
        self.messages: list[Message] = []
        self.calm = False

    # The schedule ----------------------------------------------------------------------------------------------------

    def run(self, steps: int = 400) -> Outcome:
        stalled: dict[int, int] = {}
        for _ in range(steps):
            self.now += 1
            choice = self.random.random()
            if choice < 0.10:
                self._stage()
            elif choice < 0.60:
                number = self.random.randrange(RELAYS)
                if stalled.get(number, 0) <= self.now:
                    next(self.relays[number])
                    if self.random.random() < 0.02:
                        stalled[number] = self.now + self.random.choice((20, 3 * MEMORY))
            elif choice < 1 - self.trouble:
                self._execute()
            else:
                self._fault()
        return self._end()

    def _end(self) -> Outcome:
        """No more faults. All relays work on until the outbox is empty, and long after; then what is late comes."""
        self.calm = True
        self.locked.clear()
        for _ in range(3):
            for step in range(3_000):
                if step > 60 and not self.source.rows:
                    break
                if step == 500:  # its relay may have been killed: its session ends after 15 s
                    self._end_lock()
                self.now += 1
                next(self.relays[self.random.randrange(RELAYS)])
                for message in list(self.messages):
                    self._step(message)
            self.now += 2 * MEMORY
        self.now += 10 * MEMORY
        for _, session in self.sessions:
            if session.stuck:
                self._end_session(session)
        while self.messages:
            for message in list(self.messages):
                self._step(message)
        counted = Counter(self.target.jobs)
        lost = tuple(uid for uid in self.staged if uid not in self.gone and uid not in counted)
        return Outcome(lost, tuple(uid for uid, n in counted.items() if n > 1), len(self.staged))

    def _stage(self) -> None:
        self._remember_source()
        for _ in range(self.random.randint(1, 3)):
            uid = len(self.staged) + 1_000
            self.staged.append(uid)
            self.source = replace(
                self.source, rows=self.source.rows | {uid: self.source.next_id}, next_id=self.source.next_id + 1
            )

    def _remember_source(self) -> None:
        self.past.append((self.now, self.source, len(self.staged)))

    def _execute(self) -> None:
        """Some message gets on. The youngest has the best chance: it is the old ones that come late."""
        if self.messages:
            place = min(int(self.random.expovariate(1.5)), len(self.messages) - 1)
            self._step(self.messages[-1 - place])

    def _step(self, message: Message) -> None:
        if self.now < message.due and not message.session.busy:
            return
        if not message.session.alive and not message.session.busy:
            self._drop(message)
            return
        try:
            next(message.steps)
        except StopIteration:
            self._drop(message)

    def _drop(self, message: Message) -> None:
        message.session.busy = False
        if message in self.messages:
            self.messages.remove(message)

    # Faults ----------------------------------------------------------------------------------------------------------

    def _fault(self) -> None:
        self.random.choices(self.faults, self.weights)[0]()

    def _kill(self) -> None:
        """A relay is killed; the servers have not noticed yet."""
        number = self.random.randrange(RELAYS)
        self.relays[number].close()
        self.relays[number] = self._relay()

    def _end_lock(self) -> None:
        """The session with the lock ends: 15 s without a statement, a dead link."""
        if self.lock is not None:
            self.lock.alive, self.lock = False, None

    def _fail_over_source(self) -> None:
        self._end_sessions("source", every=True)
        self.lock = None

    def _end_target_session(self) -> None:
        self._end_sessions("target", every=False)

    def _fail_over_target(self) -> None:
        """A crash of the target, or a failover to a standby that has all durable commits."""
        self._end_sessions("target", every=True)
        self.target = self.flushed

    def _flush(self) -> None:
        self.flushed = self.target

    def _wait(self) -> None:
        self.now += self.random.choice((MEMORY // 2, 2 * MEMORY))

    def _lock_row(self) -> None:
        if self.source.rows:
            self.locked.add(self.random.choice(list(self.source.rows)))

    def _unlock_rows(self) -> None:
        self.locked.clear()

    def _end_sessions(self, side: str, *, every: bool) -> None:
        """End sessions of one server. What one of them was executing is undone."""
        living = [session for at, session in self.sessions if at == side and session.alive]
        for session in living if every else living[:1]:
            self._end_session(session)

    def _end_session(self, session: Session) -> None:
        session.alive = session.busy = False
        self.messages = [message for message in self.messages if message.session is not session]

    def _set_back(self) -> None:
        """The source is as it was less than the memory's age ago. Its application has lost what came since."""
        recent = [state for state in self.past if state[0] > self.now - MEMORY]
        if recent:
            _, self.source, number = self.random.choice(recent)
            self.gone |= set(self.staged[number:])
            self._end_sessions("source", every=True)
            self.lock = None
            self.past = [state for state in self.past if state[2] <= number and state[1].epoch <= self.source.epoch]

    def _truncate(self) -> None:
        """TRUNCATE outbox RESTART IDENTITY: the application throws away what waits, and ids begin again."""
        self.gone |= set(self.source.rows)
        self._remember_source()
        self.source = replace(self.source, rows={}, next_id=1)
        self.past.clear()

    # The relay -------------------------------------------------------------------------------------------------------

    def _relay(self) -> Steps:
        while True:
            source = self._open("source")
            if self.lock is not None and self.lock.alive:
                source.alive = False
                yield
                continue
            self.lock = source
            with suppress(Lost):
                yield from self._work(source)
            source.alive = False
            if self.lock is source:
                self.lock = None
            yield

    def _work(self, source: Session) -> Steps:
        """One lock of the source. It ends with Lost."""
        epoch = 0
        while True:
            target = self._open("target")
            if epoch == 0 or self.scheme.fence_per_session:
                yield from self._reach(source)
                yield from self._reach(target)
                seen = self.target.epoch
                yield from self._reach(source)
                epoch = max(self.source.epoch, seen) + 1
                self.source = replace(self.source, epoch=epoch)
                yield from self._reach(target)
                raised = self._send(target, self._raise(target, epoch))
                yield from self._answer(raised)
            try:
                while True:
                    yield from self._round(source, target, epoch)
            except Lost:
                if not source.alive or self.random.random() < 0.5:
                    raise
                yield  # the same lock, another session of the target

    def _round(self, source: Session, target: Session, epoch: int) -> Steps:
        """Batch after batch. While one is delivered, the one before is deleted, and the next one may be read."""
        yield from self._reach(source)
        rows, delivered = self._read([]), list[tuple[Uid, int]]()
        yield
        while rows or delivered:
            sent = self._send(target, self._deliver(target, epoch, rows)) if rows else None
            if delivered:
                yield from self._reach(source)
                # Not waited for if the relay dies: then it is executed late, or not at all.
                yield from self._answer(self._send(source, self._delete(delivered)))
            yield from self._reach(source)
            ahead = self._read(rows) if rows and self.random.random() < 0.5 else []
            if sent is not None:
                yield from self._answer(sent)
            rows, delivered = ahead, rows
        if self.random.random() < 0.3:
            yield from self._prune(source, target, epoch)

    def _read(self, in_flight: list[tuple[Uid, int]]) -> list[tuple[Uid, int]]:
        """Some rows of one snapshot in the order of their ids, but none that is in flight."""
        rows = sorted((row for row in self.source.rows.items() if row not in in_flight), key=lambda row: row[1])
        # Behind the rows that stay, if there are any.
        return rows[-BATCH:] if self.locked and self.random.random() < 0.5 else rows[:BATCH]

    def _prune(self, source: Session, target: Session, epoch: int) -> Steps:
        yield from self._reach(target)
        looked_at = self.now
        old = [key for key, at in self.target.memory.items() if at < self.now - MEMORY]
        yield from self._reach(source)
        rows = list(self.source.rows.items())
        there = {uid if self.scheme.uid else id for uid, id in rows}
        yield
        if self.scheme.looked:
            yield from self._answer(self._send(target, self._deliver(target, epoch, rows)))
        forget = self._forget(target, epoch, looked_at, [key for key in old if key not in there])
        yield from self._answer(self._send(target, forget))

    def _open(self, side: str) -> Session:
        session = Session()
        self.sessions = [(at, each) for at, each in self.sessions if each.alive] + [(side, session)]
        return session

    def _reach(self, session: Session) -> Steps:
        """A round trip that is not worth a message of its own: it fails if the session has ended."""
        yield
        if not session.alive:
            raise Lost

    def _send(self, session: Session, steps: Generator[None, None, bool]) -> Message:
        late = self.random.choice((3 * MEMORY, 8 * MEMORY)) if not self.calm and self.random.random() < 0.15 else 0
        message = Message(session, iter(()), self.now + late)  # type: ignore[arg-type]

        def execute() -> Steps:
            message.answer = "done" if (yield from steps) else "refused"

        message.steps = execute()
        self.messages.append(message)
        return message

    def _answer(self, message: Message) -> Steps:
        """Wait for the answer. It may get lost, and the relay may have waited for long enough."""
        patience = 60 if self.calm else self.random.choice((3, 10, 60))
        while not message.answer and message in self.messages and patience:
            patience -= 1
            yield
        if message.answer != "done" or (not self.calm and self.random.random() < 0.1):
            # Closing the connection ends a session that waits for a message; one that has the message goes on.
            raise Lost

    # What the servers execute ----------------------------------------------------------------------------------------

    def _holder(self, mine: Session) -> Session | None:
        """Another session that holds the fence."""
        holders = (each for at, each in self.sessions if at == "target" and each.busy and each is not mine)
        return next(holders, None)

    def _raise(self, session: Session, epoch: int) -> Generator[None, None, bool]:
        patience = 5
        while self.scheme.fence and (holder := self._holder(session)) is not None:
            yield
            patience -= 1
            if self.scheme.ends_holder and not patience:
                self._end_session(holder)  # which may have committed since it was found
        if self.target.epoch >= epoch:
            return not self.scheme.fence
        self._commit(replace(self.target, epoch=epoch), durable=True)
        return True

    def _fenced(self, session: Session, epoch: int) -> Generator[None, None, bool]:
        """Lock the fence at this epoch; whether it is there."""
        if not self.scheme.fence:
            return True
        while self._holder(session) is not None:
            yield
        session.busy = self.target.epoch == epoch
        return session.busy

    def _deliver(self, session: Session, epoch: int, rows: list[tuple[Uid, int]]) -> Generator[None, None, bool]:
        if not (yield from self._fenced(session, epoch)):
            session.alive = False
            return False
        yield  # in the middle of its transaction
        session.stuck = not self.calm and self.random.random() < 0.02
        while session.stuck:
            yield
        keys = {uid: uid if self.scheme.uid else id for uid, id in rows}
        new = [uid for uid, key in keys.items() if key not in self.target.memory]
        noted = {keys[uid]: self.now for uid in (keys if self.scheme.looked else new)}
        memory, jobs = self.target.memory | noted, self.target.jobs + tuple(new)
        self._commit(replace(self.target, memory=memory, jobs=jobs), durable=self.scheme.durable)
        return True

    def _forget(self, session: Session, epoch: int, looked_at: int, absent: list[int]) -> Generator[None, None, bool]:
        if not (yield from self._fenced(session, epoch)):
            session.alive = False
            return False
        first, second, ended = self.target.looks
        if ended <= self.now - MEMORY:
            first, second, ended = second, looked_at, self.now
        memory = self.target.memory
        if self.scheme.looked:
            left = {key: at for key, at in memory.items() if at >= first}
        else:
            left = {key: at for key, at in memory.items() if key not in absent or at >= self.now - MEMORY}
        self._commit(replace(self.target, memory=left, looks=(first, second, ended)), durable=self.scheme.durable)
        return True

    def _commit(self, target: Target, *, durable: bool) -> None:
        self.target = target
        if durable:
            self.flushed = target

    def _delete(self, rows: list[tuple[Uid, int]]) -> Generator[None, None, bool]:
        yield
        self._remember_source()
        ids = {id for _, id in rows}
        dead = {uid for uid, id in self.source.rows.items() if (uid, id) in rows or (not self.scheme.uid and id in ids)}
        left = {uid: id for uid, id in self.source.rows.items() if uid not in dead - self.locked}
        self.source = replace(self.source, rows=left)
        return True
