"""Which kind is asked next: a model of the queue, with locked jobs, plays every order of both kinds to its end."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import pytest

from pgqueue.jobs.job import Lane
from pgqueue.worker.fetch.kinds import NO_RANK, Kind, Kinds

RANKS = (1, 3, 5)
LANES: list[Lane] = [("default", rank, False) for rank in RANKS]


@dataclass(slots=True)
class Model:
    """The jobs of one queue: (rank, whether it has keys, whether it is locked), in no order; and what fetches do."""

    jobs: list[tuple[int, bool, bool]]
    kinds: Kinds = field(default_factory=Kinds)
    passed: set[tuple[int, bool]] = field(default_factory=set)
    """Lanes whose locked jobs lie behind the cursor."""
    taken: list[tuple[int, bool]] = field(default_factory=list)
    dead: bool = False
    """The worker was marked dead: its claims look at no lane."""
    empty: int = 0
    """How many fetches in a row have taken nothing."""
    now: float = 0.0

    def fetch(self, n: int, seconds: float) -> Kind:
        """One fetch, as the fetcher makes it; the kind that it asked."""
        kinds, queues = self.kinds, ["default"]
        kind = kinds.next(queues, self.now)
        other, beyond = kinds.other(kind), kinds.beyond(kind, queues)
        kind.known.update(queues)
        if beyond == NO_RANK:
            other.known.update(queues)
        seen = self.seen(other.keyed, beyond)
        bound = 99 if seen is None else seen | 1
        got: list[tuple[int, bool]] = []
        for rank in RANKS:
            free = (
                [job for job in self.jobs if job == (rank, kind.keyed, False)]
                if rank <= bound and not self.dead
                else []
            )
            for job in free[: n - len(got)]:
                self.jobs.remove(job)
                got.append(job[:2])
            if rank <= bound and len(got) < n and not self.dead:
                self.passed.add((rank, kind.keyed))
        if len(got) == n:
            kind.known.difference_update(queues)
        if seen is not None and got:
            assert all(rank <= seen | 1 for rank, _ in got), "priority is strict over what the reading saw"
        self.taken += got
        self.empty = 0 if got else self.empty + 1
        lanes = kind.lanes(LANES)
        self.now += seconds
        kinds.claimed(kind, queues, lanes, {("default", *lane) for lane in got}, seen, self.now, seconds)
        return kind

    def seen(self, keyed: bool, beyond: int) -> int | None:
        """The rank of the most urgent lane of this kind with a job behind its cursor, locked or not."""
        ranks = [
            rank
            for rank, with_keys, locked in self.jobs
            if with_keys == keyed and rank > beyond and not (locked and (rank, keyed) in self.passed)
        ]
        return min(ranks, default=None)


@pytest.mark.promise("F13")
@pytest.mark.parametrize("share", [0.0, 0.2, 0.6, 1.0])
def test_every_free_job_is_taken_and_it_comes_to_rest(share: float) -> None:
    for seed in range(400):
        dice = Random(seed)
        number = dice.choice((0, 1, 3, 8, 20))
        jobs = [(dice.choice(RANKS), dice.random() < 0.5, dice.random() < share) for _ in range(number)]
        model, n = Model(list(jobs)), dice.choice((1, 2, 5))
        while model.kinds.hungry(["default"]):
            model.fetch(n, dice.choice((0.0, 0.001, 0.04)))
            assert model.empty <= 6, f"seed {seed}: it spins"
        assert sorted(model.taken) == sorted(job[:2] for job in jobs if not job[2]), f"seed {seed}"


def test_a_worker_that_was_marked_dead_comes_to_rest() -> None:
    for seed in range(200):
        dice = Random(seed)
        model = Model([(dice.choice(RANKS), dice.random() < 0.5, False) for _ in range(8)], dead=True)
        while model.kinds.hungry(["default"]):
            model.fetch(5, 0.001)
            assert model.empty <= 6, f"seed {seed}: it spins"


@pytest.mark.promise("F13")
@pytest.mark.parametrize(("plain", "keyed"), [(0.001, 0.001), (0.001, 0.04), (0.04, 0.001)])
def test_no_kind_waits_for_longer_than_the_other_has_taken(plain: float, keyed: float) -> None:
    """Of one priority and without end: each kind's longest wait for its turn is about one claim of the other."""
    model = Model([(3, with_keys, False) for with_keys in (False, True) for _ in range(4_000)])
    last, longest = {False: 0.0, True: 0.0}, {False: 0.0, True: 0.0}
    for _ in range(300):
        kind = model.kinds.next(["default"], model.now)
        longest[kind.keyed] = max(longest[kind.keyed], model.now - last[kind.keyed])
        model.fetch(1, keyed if kind.keyed else plain)
        last[kind.keyed] = model.now
    assert all(model.now - last[with_keys] < 0.1 for with_keys in last), "neither waits for ever"
    assert longest[False] <= keyed + 1e-9
    assert longest[True] <= max(keyed, plain) + plain + 1e-9
