"""Suspects run one at a time: one in a process, one with two crashes beside nothing, the rest goes back unspent."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator

import pytest
from workers import Eyes, until, work

from pgqueue.client.tasks import task
from pgqueue.jobs.fields import claimed
from pgqueue.jobs.job import Job
from pgqueue.worker.fetch.poison_jobs import MORE_CRASHES, ONE_CRASH, PoisonJobs

numbers = itertools.count(1)


def job(crashes: int = 0) -> Job:
    rank = (11, ONE_CRASH, MORE_CRASHES)[min(crashes, 2)]
    return Job(claimed(id=next(numbers), pos=1, rank=rank, task="x", crashes=crashes), 1)


def test_what_is_asked_for_depends_on_what_is_held() -> None:
    suspects = PoisonJobs()
    assert set(suspects.ranks(idle=True)) == {ONE_CRASH, MORE_CRASHES}
    assert set(suspects.ranks(idle=False)) == {ONE_CRASH}
    for crashes in (1, 2, 30_000):
        one = job(crashes)
        assert suspects.keep([one]) == [one]
        assert suspects.alone == (crashes > 1)
        assert list(suspects.ranks(idle=True)) == []
        assert suspects.ended([job(), one])
        assert not suspects.ended([one])
        assert not suspects.alone
        assert set(suspects.ranks(idle=True)) == {ONE_CRASH, MORE_CRASHES}


def test_of_a_fetch_the_worst_suspect_is_kept_and_beside_two_crashes_nothing() -> None:
    plain, other, once, again, twice, thrice = (job(crashes) for crashes in (0, 0, 1, 1, 2, 3))
    assert PoisonJobs().keep([plain, other]) == [plain, other]
    assert PoisonJobs().keep([once, plain, again, other]) == [once, plain, other]
    assert PoisonJobs().keep([once, twice, plain]) == [twice]
    assert PoisonJobs().keep([twice, once, thrice, plain]) == [thrice]
    assert PoisonJobs().keep([]) == []


def test_one_with_two_crashes_comes_to_nobody_and_nobody_comes_to_it() -> None:
    """Whoever was on the way when it was taken, or it was on the way when others were, goes back."""
    suspects = PoisonJobs()
    plain, once, twice = job(), job(1), job(2)
    assert suspects.keep([plain, once, twice], idle=False) == [plain, once]
    assert suspects.ended([once])
    assert suspects.keep([twice], idle=True) == [twice]
    assert suspects.keep([plain, job(1)], idle=False) == []


def test_the_end_of_an_earlier_run_is_not_the_end_of_the_one_we_hold() -> None:
    """We were taken for dead, it was rescued and given to us again, and the old run goes on beside it."""
    suspects = PoisonJobs()
    earlier = job(1)
    suspects.keep([earlier])
    again = Job((*earlier._row[:9], 2, *earlier._row[10:]), 2)
    assert suspects.keep([again]) == [again]
    assert not suspects.ended([earlier])
    assert suspects.alone
    assert suspects.ended([again])


@task(name="suspects.looks")
async def looks(job: Job) -> None:
    """Notes with whom it was at its start and at its end."""
    here[job.id] = job.crashes
    seen.append(dict(here))
    await asyncio.sleep(0.003)
    seen.append(dict(here))
    del here[job.id]


here: dict[int, int] = {}
seen: list[dict[int, int]] = []


@pytest.fixture(autouse=True)
def nobody_here() -> Iterator[None]:
    here.clear()
    seen.clear()
    yield


PUT = """
    INSERT INTO pgqueue.job (task, queue, rank, crashes)
    SELECT 'suspects.looks', queue, rank, crashes
    FROM unnest(%s::text[]) queue, (VALUES (11, 0), (-2, 1), (-1, 2), (-1, 7)) AS lane (rank, crashes),
         generate_series(1, 5)
"""


@pytest.mark.parametrize("queues", [["a"], ["a", "b", "c"], ["a:2", "b:1", "c"]], ids=str)
async def test_over_all_queues_and_both_ranks_there_is_one_at_a_time(queues: list[str], dsn: str, eyes: Eyes) -> None:
    names = [name[0] for name in queues]
    eyes.do(PUT, names)
    async with work(dsn, looks, queues=queues, poll=60.0):
        await until(eyes.done(20 * len(names)), 30.0)
    for crashes in (list(together.values()) for together in seen):
        assert sum(number > 0 for number in crashes) <= 1, crashes
        assert len(crashes) == 1 or max(crashes) < 2, crashes
    assert max(map(len, seen)) > 1, "nothing ever ran together: the test shows nothing"
    # What was fetched too much went back unspent, and its crashes with it.
    assert eyes.all("SELECT DISTINCT attempt FROM pgqueue.job") == [(1,)]
    per_crashes = dict(eyes.all("SELECT crashes, count(*)::int FROM pgqueue.job GROUP BY 1"))
    assert per_crashes == {crashes: 5 * len(names) for crashes in (0, 1, 2, 7)}
