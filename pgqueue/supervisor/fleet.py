"""Decides which worker processes to start, to let work, to quiet and to end.

Pure: no process, no clock, no I/O. `supervisor` reports events and does what `decide` returns. A *generation* is all
processes that one restart has started. Generation `current` works; `wanted` is the generation to come.

    starting ──let work──▶ running ──quieted──▶ quiet ──nothing left──▶ stopped

From each state a process may go to stopped: it died. A process that has announced itself waits until it is let work. A
starting process therefore holds no job, and may be ended at any moment. These rules hold:

1. A running process is quieted only while more than `size` are running. No decision leaves fewer than `size` active.
   They become fewer only when processes die, and then new ones are started.
2. A restart lets none of its processes work before all of them have announced themselves. If one fails, the whole
   restart is taken back, and no old process was touched. A new restart replaces one under way.
3. Only a starting process is ever ended. A running one leaves by itself, when it is quiet and its last job has ended.
4. At most `size` processes are starting in place of missing ones, and at most `size` for a restart.
5. A process `broke` if it died while starting or soon after. It is replaced after a pause, which grows each time. A
   process that left by itself, or died after it had worked, is replaced at once.
6. The pauses start again at the shortest when a process has worked for a while that was started after the last one
   broke. Processes started earlier prove nothing about those started now.
7. No process that is needed waits for `gap`. It only separates the starts of processes that replace working ones. At
   most `together` of them begin within a gap. Each must have worked for one gap before it counts in rule 1.

The gap exists because a process is slow when it begins: only the statements of `Worker.warm` are planned and cached.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from math import inf

from pgqueue.database.backoff import doubled

# If a process dies while it starts, or this soon after, the next one waits, longer each time.
YOUNG_SECONDS = 5.0
BACKOFF_FIRST, BACKOFF_MOST = 0.5, 30.0
# If a process was let work and has not reported that it works, others wait for it no longer than this.
BEGIN_SECONDS = 2.0


class State(StrEnum):
    STARTING = "starting"
    RUNNING = "running"
    QUIET = "quiet"
    STOPPED = "stopped"


MOVES = {
    State.STARTING: {State.RUNNING, State.STOPPED},
    State.RUNNING: {State.QUIET, State.STOPPED},
    State.QUIET: {State.STOPPED},
    State.STOPPED: set[State](),
}


class IllegalMove(Exception):
    """A process cannot go from one of these states to the other."""


@dataclass(slots=True)
class Child:
    """One process.

    - `since`: when it came into its state, or was let work.
    - `at_work`: it was let work.
    - `ended`: it is being ended before it was let work.
    - `unfit`: why it is to be replaced; empty if it is not.
    """

    number: int
    generation: int
    state: State = State.STARTING
    since: float = 0.0
    announced: bool = False
    at_work: bool = False
    ended: bool = False
    unfit: str = ""
    busy: int = 0

    def move(self, state: State, now: float) -> None:
        if state not in MOVES[self.state]:
            raise IllegalMove(f"process {self.number}: from {self.state} to {state}")
        self.state, self.since = state, now


@dataclass(frozen=True, slots=True)
class Spawn:
    """Start a process for `child`."""

    child: Child


@dataclass(frozen=True, slots=True)
class Work:
    """Let the process take jobs."""

    child: Child


@dataclass(frozen=True, slots=True)
class Quiet:
    """The process takes no more jobs, and leaves when those it has are done."""

    child: Child
    why: str


@dataclass(frozen=True, slots=True)
class End:
    """Kill the process, which has never taken a job."""

    child: Child
    why: str


Action = Spawn | Work | Quiet | End


@dataclass(slots=True)
class Fleet:
    """`size` processes. For a restart at most `together` start at once, and at most `together` begin within `gap`
    seconds."""

    size: int
    together: int = 1_000
    gap: float = 0.0
    current: int = 1
    wanted: int = 1
    quieted: bool = False
    out_of_quiet: bool = False
    """The restart under way began when all were quiet: no old process works meanwhile."""
    problem: str = ""
    """Why the last restart was taken back."""
    children: dict[int, Child] = field(default_factory=dict)
    not_before: float = 0.0
    """A process that broke is not replaced before this moment."""
    _failures: int = 0
    """How many times in a row a started process broke. Processes started together count once."""
    _failed_at: int = 0
    """The highest child number when a process broke last. A child with a higher number was started later."""
    _broken: int = 0
    """Number of missing processes that broke."""
    _last: int = 0
    _newest: int = 1
    _now: float = 0.0

    # What has happened -----------------------------------------------------------------------------------------------

    def restart(self) -> int:
        """Begin a restart, in place of one under way; return its generation."""
        self.out_of_quiet = self.quieted or (self.out_of_quiet and self.restarting)
        self.quieted, self.problem, self._failures, self._broken, self.not_before = False, "", 0, 0, 0.0
        self.wanted = self._newest = self._newest + 1
        return self.wanted

    def scale(self, size: int) -> None:
        self.size = size

    def quiet(self) -> None:
        """Let all processes finish their jobs and leave. None is started until a restart."""
        self.quieted, self.wanted = True, self.current

    def announced(self, number: int) -> None:
        self.children[number].announced = True

    def runs(self, number: int, now: float) -> None:
        self.children[number].move(State.RUNNING, now)

    def leaves(self, number: int, why: str) -> None:
        """The process takes no more jobs, by its own decision or by another process's order."""
        child = self.children[number]
        if child.state is State.RUNNING:
            child.unfit = why
            child.move(State.QUIET, child.since)

    def unfit(self, number: int, why: str) -> None:
        """The process is to be replaced, and then to leave."""
        child = self.children[number]
        child.unfit = child.unfit or why

    def died(self, number: int, now: float, how: str = "died") -> None:
        child = self.children.pop(number)
        before, since = child.state, child.since
        child.move(State.STOPPED, now)
        if child.ended or before is State.QUIET:
            return
        if before is State.STARTING and not child.at_work and child.generation > self.current:
            if child.generation == self.wanted:
                self.wanted, self.problem, self.quieted = self.current, how, self.out_of_quiet
            return
        if before is State.STARTING or now - since < YOUNG_SECONDS:
            self._broke(number, now)

    # What there is ---------------------------------------------------------------------------------------------------

    @property
    def active(self) -> int:
        """Number of processes that take jobs."""
        return len(self.of(State.RUNNING))

    @property
    def restarting(self) -> bool:
        return self.wanted > self.current

    def in_effect(self, generation: int) -> bool:
        """Whether this generation, or a later one, works, and no older process takes jobs."""
        good = self._good()
        return (
            self.current >= generation
            and len(good) >= self.size
            and all(child.generation >= generation for child in self.of(State.RUNNING))
        )

    def due(self, now: float) -> float:
        """When the decision will change by time alone; infinity: never."""
        moments = [self.not_before, *(child.since + self.gap for child in self.of(State.RUNNING))]
        return min((moment for moment in moments if moment > now), default=inf)

    def of(self, state: State) -> list[Child]:
        return [child for child in self.children.values() if child.state is state]

    def settled(self) -> bool:
        """Whether exactly `size` processes are active, and none of them is to be replaced."""
        return self.active == self.size == len(self._good())

    # Those that break ------------------------------------------------------------------------------------------------

    def _broke(self, number: int, now: float) -> None:
        self._forgive(now)
        self._broken += 1
        if number > self._failed_at:
            self._failures, self._failed_at = self._failures + 1, self._last
            if self._failures > 1:
                self.not_before = now + doubled(BACKOFF_FIRST, self._failures - 2, BACKOFF_MOST)

    def _forgive(self, now: float) -> None:
        """Forget the failures if a process started after the last one has worked for a while."""
        fine = (child.number for child in self.of(State.RUNNING) if now - child.since >= YOUNG_SECONDS)
        if max(fine, default=0) > self._failed_at:
            self._failures = 0

    def _held_back(self, missing: int) -> int:
        """How many of these missing processes are not to be replaced yet."""
        self._broken = min(self._broken, missing) if self._now < self.not_before else 0
        return self._broken

    # What to do ------------------------------------------------------------------------------------------------------

    def decide(self, now: float) -> list[Action]:
        """Return what to do now. It counts as done: the next decision builds on it."""
        self._now = now
        self._forgive(now)
        if self.quieted:
            ended: list[Action] = [*self._end(self._coming(), "all are to be quiet")]
            return ended + [self._quieted(child, "all are to be quiet") for child in self.of(State.RUNNING)]
        actions: list[Action] = [*self._end(self._superseded(), self.problem or "another restart takes its place")]
        if self.restarting:
            actions += self._restart()
        if self.restarting and self.out_of_quiet:
            return actions
        return actions + self._keep() + self._retire()

    def _superseded(self) -> list[Child]:
        return [child for child in self._coming() if child.generation not in (self.current, self.wanted)]

    def _restart(self) -> list[Action]:
        new = [child for child in self._coming() if child.generation == self.wanted]
        actions: list[Action] = [*self._end(new[self.size :], "there shall be fewer")]
        new = new[: self.size]
        booting = sum(not child.announced for child in new)
        actions += [self._spawned(self.wanted) for _ in range(min(self.size - len(new), self.together - booting))]
        if len(new) == self.size and all(child.announced for child in new):
            self.current = self.wanted
            # Processes that were starting in place of dead ones have the old code.
            actions += self._end([child for child in self._coming() if child.generation != self.current], "it is old")
        return actions

    def _keep(self) -> list[Action]:
        coming = [child for child in self._coming() if child.generation == self.current]
        waiting = [child for child in coming if child.announced and not child.at_work]
        beginning = sum(child.at_work for child in coming)
        room = max(self.size - self.active - beginning, self.together - len(self._fresh()))
        actions: list[Action] = [self._let_work(child) for child in waiting[: max(0, room)]]
        missing = self.size - len(self._good()) - len(coming)
        if missing >= 0:
            actions += [self._spawned(self.current) for _ in range(missing - self._held_back(missing))]
        else:
            actions += self._end([child for child in coming if not child.at_work][missing:], "there shall be fewer")
        return actions

    def _retire(self) -> list[Action]:
        good = sorted(self._good(), key=lambda child: (child.busy, -child.number))
        out = [child for child in self.of(State.RUNNING) if child not in good]
        surplus = good[: max(0, len(good) - self.size)]
        fresh = [child for child in self._fresh() if child.state is State.RUNNING]
        most = max(0, self.active - len(fresh) - self.size)
        whys = [(child, child.unfit or "newer ones have taken over") for child in out]
        whys += [(child, "there shall be fewer") for child in surplus]
        return [self._quieted(child, why) for child, why in whys[:most]]

    def _good(self) -> list[Child]:
        """The running processes that are to go on."""
        return [child for child in self.of(State.RUNNING) if child.generation == self.current and not child.unfit]

    def _fresh(self) -> list[Child]:
        """The processes that have just begun to work, or are about to."""
        return [
            child
            for child in self.children.values()
            if (child.state is State.RUNNING and self._now - child.since < self.gap)
            or (child.state is State.STARTING and child.at_work and self._now - child.since < BEGIN_SECONDS)
        ]

    def _coming(self) -> list[Child]:
        return [child for child in self.of(State.STARTING) if not child.ended]

    def _spawned(self, generation: int) -> Spawn:
        self._last += 1
        child = self.children[self._last] = Child(self._last, generation, since=self._now)
        return Spawn(child)

    def _let_work(self, child: Child) -> Work:
        child.at_work, child.since = True, self._now
        return Work(child)

    def _quieted(self, child: Child, why: str) -> Quiet:
        child.move(State.QUIET, self._now)
        return Quiet(child, why)

    def _end(self, children: list[Child], why: str) -> list[End]:
        ended = [child for child in children if not child.at_work]
        for child in ended:
            child.ended = True
        return [End(child, why) for child in ended]
