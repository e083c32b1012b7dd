"""Which job holds the event loop: found through the running jobs, from another thread."""

from __future__ import annotations

import asyncio
import sys
import threading

import pytest
from executor_bench import Bench, made

from pgqueue.errors import Error
from pgqueue.jobs.job import Job, current_job
from pgqueue.worker.run.serialization_retries import SerializationRetries


class Abort(Error):
    """What a database driver raises for a deadlock."""

    sqlstate = "40P01"


def holder(bench: Bench) -> Job | None:
    """The job that is found from another thread while the loop waits for it."""
    found: list[Job | None] = []
    loop = asyncio.get_running_loop()
    task = asyncio.current_task(loop)
    looking = threading.Thread(target=lambda: found.append(bench.running.on_loop(task)))
    looking.start()
    looking.join()
    return found[0]


async def test_the_job_whose_handler_runs_is_found_and_no_other_task_is_taken_for_one() -> None:
    seen: list[Job | None] = []

    async def looks() -> None:
        seen.append(holder(bench))

    bench = Bench(made(looks, "looks"))
    [job] = bench.offer("looks")
    await bench.outcome(job)
    assert [each and each.id for each in seen] == [job]
    assert holder(bench) is None and bench.running.on_loop(None) is None


async def test_a_handler_that_is_called_again_after_an_abort_is_found_too(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Job | None] = []

    async def at_once(self: SerializationRetries, job: Job, *_: object) -> None: ...

    monkeypatch.setattr(SerializationRetries, "again", at_once)

    async def aborts_once() -> None:
        seen.append(holder(bench))
        if len(seen) == 1:
            raise Abort("deadlock detected")

    bench = Bench(made(aborts_once, "aborts"))
    [job] = bench.offer("aborts")
    await bench.outcome(job)
    assert [each and each.id for each in seen] == [job, job]


async def test_a_task_that_a_handler_has_made_is_its_jobs_where_a_task_says_its_context() -> None:
    seen: list[Job | None] = []

    async def makes() -> None:
        async def made_by_it() -> None:
            seen.append(holder(bench))
            assert current_job().id == job

        await asyncio.create_task(made_by_it())

    bench = Bench(made(makes, "makes"))
    [job] = bench.offer("makes")
    await bench.outcome(job)
    assert [each and each.id for each in seen] == [job if sys.version_info >= (3, 12) else None]
