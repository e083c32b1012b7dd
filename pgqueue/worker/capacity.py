"""The free slots of one worker: how many there are, and which service may fill them.

Three services fill slots. The fetcher claims jobs. The unblocker moves jobs that waited for a lock or a limit. The rate
limiter moves jobs that must start at once. `rooms` decides what each may fill; it is a pure function.

Why the three do not fill a slot twice, and none starves:

1. Everything here runs on the event loop, in one step. So a room is right at the moment when a service asks for it.
2. A slot that a fetch under way has asked for is no room for the two others (`fetching`).
3. A slot that an unblocking under way may fill is no room for the fetcher (`promised`).
4. While keys wait to be asked for, as many slots are kept from the fetcher (`pending`), but for the one of its turn.
5. The next slot is the fetcher's turn if it wants one, and waiting jobs have had one since its last fetch. Of several
   free slots it is left half.
6. If the numbers are wrong all the same, jobs wait at hand for a slot: no more jobs run than there are slots.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from pgqueue.jobs.job import Job
from pgqueue.worker.concurrency.rate_limiter import Openings
from pgqueue.worker.neighbours import Neighbours
from pgqueue.worker.run.slots import Room, SlotGroup

# Outcomes that are not written yet. Past this, taking more jobs would only grow what a crash repeats.
UNWRITTEN_MOST = 5_000


class Filler(Enum):
    """A service that fills slots."""

    FETCHER = auto()
    UNBLOCKER = auto()
    RATE_LIMITER = auto()


@dataclass(slots=True)
class GroupLoad:
    """A group of slots as it is now."""

    queues: Sequence[str]
    wanted: int
    """Jobs to fetch now; 0 while enough wait at hand."""
    fitting: int
    """Jobs that fit, at hand or in a slot."""
    free: int
    """Slots that are free for a job that starts at once."""
    reserved: int = 0
    behind: int = 0
    fetching: int = 0
    """Jobs that a fetch under way has asked for."""
    promised: int = 0
    """Slots that an unblocking under way may fill."""
    hungry: bool = False
    """Whether the fetcher would take more."""
    fetchers_turn: bool = False


@dataclass(slots=True)
class WorkerLoad:
    """What else decides which service may fill slots."""

    running: bool = True
    """Whether the worker takes jobs: it has begun, and was not told to be quiet."""
    late: bool = False
    """Whether no heartbeat has gone through for too long, or the worker is about to register anew."""
    idle: bool = False
    """Whether no job is held."""
    alone: bool = False
    """Whether a poison job is held that must run alone."""
    draining: bool = False
    """Whether no jobs are taken until a poison job can run alone."""
    drains_for_rate: bool = False
    """Whether that poison job waits for a rate."""
    backlog: bool = False
    """Whether too many outcomes are not written yet."""
    pending: int = 0
    """Keys that the unblocker is about to ask for."""


def rooms(groups: Sequence[GroupLoad], worker: WorkerLoad, filler: Filler) -> list[Room]:
    """What this service may fill now, a room for each group; empty if it may fill nothing at all."""
    if worker.late:
        return []
    if filler is Filler.FETCHER:
        return _to_fetch(groups, worker)
    if not worker.running:
        return []
    if filler is Filler.UNBLOCKER:
        return [_to_unblock(group, worker) for group in groups]
    return [_to_start(group, worker) for group in groups]


def _to_fetch(groups: Sequence[GroupLoad], worker: WorkerLoad) -> list[Room]:
    if worker.alone or worker.backlog:
        return []
    if worker.draining:
        if not worker.idle or worker.drains_for_rate:
            return []
        return [Room([queue for group in groups for queue in group.queues], 1, alone=True)]
    found = []
    for group in groups:
        free = max(0, group.wanted - group.reserved - group.promised)
        turn = free > 0 and group.fetchers_turn
        found.append(Room(group.queues, free - min(worker.pending, free - turn)))
    return found


def _to_unblock(group: GroupLoad, worker: WorkerLoad) -> Room:
    if worker.alone or worker.draining:
        return Room(group.queues, 0)
    free = max(0, group.fitting - group.reserved - group.fetching)
    left = 0
    if group.hungry:  # half of the slots; the last one in turn
        left = free // 2 if free != 1 else int(group.fetchers_turn)
    return Room(group.queues, free, group.fetching, left, group.behind)


def _to_start(group: GroupLoad, worker: WorkerLoad) -> Room:
    if worker.draining:
        return Room(group.queues, int(worker.idle))
    left = worker.pending + group.fetchers_turn + group.fetching
    free = 0 if worker.alone else max(group.reserved and group.free, group.free - left)
    return Room(group.queues, free, spare=max(0, group.fitting - free - left))


class Capacity:
    """Says which slots of one worker its services may fill, and which slots are kept free."""

    def __init__(self, services: Neighbours) -> None:
        self._services = services
        self._filled_at: dict[Sequence[str], int] = {}
        """By the queues of a group, after which fetch waiting jobs have had a slot of it."""
        self._drains_for_rate = False

    def to_fetch(self) -> list[Room]:
        """What the fetcher may ask for."""
        return rooms(self._groups(), self._worker(), Filler.FETCHER)

    def to_unblock(self) -> list[Room]:
        """Where the unblocker may put jobs."""
        return rooms(self._groups(), self._worker(), Filler.UNBLOCKER)

    def to_start(self) -> Openings:
        """What may start at once, under a rate."""
        worker = self._worker()
        found = rooms(self._groups(), worker, Filler.RATE_LIMITER)
        if not found:
            return Openings([])
        poison_jobs, (_, fetching) = self._services.poison_jobs, self._services.fetcher.asking
        idle = worker.idle and (worker.draining or not fetching)
        return Openings(found, poison_jobs.ranks(idle=idle), not worker.draining)

    def poison_ranks(self) -> Sequence[int]:
        """The ranks of poison jobs that may be asked for."""
        return self._services.poison_jobs.ranks(idle=not self._services.state.held)

    def reserve(self, indexes: set[int]) -> None:
        """Keep a slot free in these groups, counted from 1, for a job under a rate; not where it is the fetcher's."""
        groups = enumerate(self._services.running.groups, 1)
        fetchers = {index for index, group in groups if self._fetchers_turn(group)}
        running = self._services.state.phase == "running"
        before = [group.reserved for group in self._services.running.groups]
        self._services.executor.reserve(indexes - fetchers if running else ())
        if any(group.reserved < was for group, was in zip(self._services.running.groups, before, strict=True)):
            self._services.fetcher.slots_freed()  # it may have slept before a slot that was kept in vain

    def filled(self, jobs: Iterable[Job]) -> None:
        """Jobs that waited for a key have had slots of these groups."""
        queues = {job.queue for job in jobs}
        for group in self._services.running.groups:
            if queues.intersection(group.queues):
                self._filled_at[group.queues] = self._services.fetcher.fetches

    def drain(self, wanted: bool, rate: str | None) -> None:
        """Take no jobs until a poison job can run alone, or take jobs again; `rate`: the one that it waits for."""
        services = self._services
        if wanted is not services.poison_jobs.draining:
            services.poison_jobs.draining = wanted
            self._drains_for_rate = rate is not None
            services.fetcher.wake()
            if wanted and rate:
                services.rate_limiter.wanted([rate], anew=True)

    def _groups(self) -> list[GroupLoad]:
        services, fetches = self._services, self._services.fetcher.fetches
        queues, asked = services.fetcher.asking
        found = []
        for group in services.running.groups:
            hungry = services.fetcher.hungry(group.queues)
            found.append(
                GroupLoad(
                    queues=group.queues,
                    wanted=group.room(),
                    fitting=group.asked(),
                    free=group.free(),
                    reserved=group.reserved,
                    behind=group.behind,
                    fetching=asked if group.queues[0] in queues else 0,
                    promised=services.unblocker.slots_promised(group.queues),
                    hungry=hungry,
                    fetchers_turn=hungry and self._filled_at.get(group.queues) == fetches,
                )
            )
        return found

    def _worker(self) -> WorkerLoad:
        services = self._services
        return WorkerLoad(
            running=services.state.phase == "running",
            late=services.heartbeat.late() or services.state.renewing,
            idle=not services.state.held,
            alone=services.poison_jobs.alone,
            draining=services.poison_jobs.draining,
            drains_for_rate=self._drains_for_rate,
            backlog=services.completer.unwritten() > UNWRITTEN_MOST,
            pending=services.unblocker.pending,
        )

    def _fetchers_turn(self, group: SlotGroup) -> bool:
        """Whether the next slot is the fetcher's: waiting jobs have had one since its last fetch, and it wants more."""
        fetcher = self._services.fetcher
        return self._filled_at.get(group.queues) == fetcher.fetches and fetcher.hungry(group.queues)
