"""Suspects: jobs whose worker died under them. They run one at a time, so that the third crash names the killer.

A suspect with one crash runs beside ordinary jobs, but never beside another suspect; one with two crashes runs alone in
its process. Kept by the worker, asked by the fetcher; decides only, moves nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pgqueue.job import Job

ONE_CRASH, MORE_CRASHES = -2, -1
"""The ranks of their lanes."""


class Suspects:
    """The suspects this process holds now: one at most."""

    def __init__(self) -> None:
        self._held: dict[int, Job] = {}
        self.making_way = False
        """Whether to fetch nothing until nothing is held, and then only one that must run alone."""
        self.asked = 0
        """How often one that must run alone could be asked for."""

    @property
    def alone(self) -> bool:
        """Whether the one we hold must run alone."""
        return any(job.crashes > 1 for job in self._held.values())

    def ranks(self, *, idle: bool) -> Sequence[int]:
        """The ranks of suspects to ask for: none beside another one, of two crashes only if nothing else is held."""
        if self._held:
            return ()
        if not idle:
            return (ONE_CRASH,)
        self.asked += 1
        return (MORE_CRASHES,) if self.making_way else (ONE_CRASH, MORE_CRASHES)

    def keep(self, jobs: list[Job], *, idle: bool = True) -> list[Job]:
        """What to keep of a fetch: one suspect at most, and beside one with two crashes nothing, nor such a one beside
        others that are held (not `idle`). The rest goes back.

        A fetch that brings one with two crashes, or nothing at all, is what way was made for. Should the process die
        before that is written, `rescue_jobs` must know which one it was: most crashes, least id.
        """
        suspects = [job for job in jobs if job.crashes]
        if not jobs:
            self.making_way = False
        closed = self.alone
        if closed:
            return []
        if not idle:
            jobs = [job for job in jobs if job.crashes < 2]
            suspects = [job for job in jobs if job.crashes]
        if not suspects:
            return jobs
        worst = max(suspects, key=lambda job: (job.crashes, -job.id))
        self._held[worst.id] = worst
        if self.alone:
            self.making_way = False
        return [worst] if self.alone else [job for job in jobs if job is worst or not job.crashes]

    def ended(self, jobs: Iterable[Job]) -> bool:
        """Whether the suspect we hold was among these: the next one may come. Not a run of it from before we were taken
        for dead and given it anew."""
        if not self._held:
            return False
        ours = [job for job in jobs if self._held.get(job.id) is job]
        for job in ours:
            del self._held[job.id]
        return bool(ours)
