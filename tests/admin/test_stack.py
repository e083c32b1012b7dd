"""The stack of a running job, as its worker answers it: right, bounded, and harmless."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import psycopg
import pytest
from commands import pgqueue as command
from handlers import begins, begun
from roles import Role, role
from workers import Eyes, Taker, until, work, workers

import pgqueue
from pgqueue.admin.stack import Stack, answer, asking
from pgqueue.database import drivers
from pgqueue.errors import InvalidOption, JobNotFound, ResultTimeout
from pgqueue.worker.liveness.stacks import FRAMES_MOST

__all__ = ["role"]
HERE = Path(__file__).name


def names(found: Stack) -> list[str]:
    """The functions of this file on the stack, outermost first."""
    return [frame.name.rpartition(".")[2] for frame in found.frames if frame.file.endswith(HERE)]


async def asked(dsn: str, job: int, timeout: float | None = None) -> Stack:
    """Asked from a thread: the loop of the test is that of the worker."""

    def ask() -> Stack:
        with psycopg.connect(dsn, autocommit=True) as conn:
            return pgqueue.stack(conn, job, timeout)

    return await asyncio.to_thread(ask)


async def started(eyes: Eyes, task: Any) -> int:
    """A new job whose handler has begun."""
    job = int(task.enqueue(eyes.conn).id)
    await begun(job)
    return job


@pytest.mark.promise("F103")
async def test_a_sync_handler_is_shown_where_its_thread_is(dsn: str, eyes: Eyes) -> None:
    inside, gate = threading.Event(), threading.Event()

    def deeper() -> None:
        inside.set()
        gate.wait()

    @pgqueue.task(name="stack.sync")
    def sync(job: pgqueue.Job) -> None:
        begins(job)
        deeper()

    async with work(dsn, sync):
        try:
            job = await started(eyes, sync)
            await asyncio.to_thread(inside.wait)
            found = await asked(dsn, job)
            assert found.where == "thread" and names(found) == ["sync", "deeper"] and found.left_out == 0
            assert found.frames[0].name.endswith(".sync"), "nothing that calls the handler"
            assert [frame.line for frame in found.frames if frame.name.endswith("deeper")] == [
                deeper.__code__.co_firstlineno + 2
            ]
            assert found.process is not None and eyes.one("SELECT count(*) FROM pgqueue.stack_request") == 0
        finally:
            gate.set()
        await until(eyes.done(1))


@pytest.mark.promise("F103")
async def test_an_async_handler_is_shown_where_it_waits(dsn: str, eyes: Eyes) -> None:
    gate = asyncio.Event()
    looked: list[str] = []

    class Foreign:
        """What the application awaits: none of its code runs for a stack."""

        def __getattr__(self, name: str) -> object:
            looked.append(name)
            raise AttributeError(name)

        def __await__(self) -> Any:
            yield from gate.wait().__await__()

    async def deeper() -> None:
        await Foreign()

    @pgqueue.task(name="stack.async")
    async def waits(job: pgqueue.Job) -> None:
        begins(job)
        await deeper()

    async with work(dsn, waits):
        job = await started(eyes, waits)
        found = await asked(dsn, job)
        assert found.where == "task" and names(found) == ["waits", "deeper", "__await__"]
        assert found.frames[0].name.endswith(".waits"), "nothing that calls the handler"
        assert looked == []
        gate.set()
        await until(eyes.done(1))


BLOCKS = """
@pgqueue.task(name="stack.blocks")
async def blocks():
    say("inside")
    def deeper():
        end = time.monotonic() + 60
        while time.monotonic() < end and not pgqueue.current_job().cancelled:
            time.sleep(0.02)
    deeper()

@pgqueue.task(name="stack.other")
async def other():
    say("inside")
    await asyncio.sleep(60)
"""


@pytest.mark.second
@pytest.mark.promise("F103")
async def test_a_handler_that_blocks_the_loop_is_shown_and_the_right_process_answers(
    dsn: str, eyes: Eyes, tmp_path: Path
) -> None:
    """What runs on the loop could not answer: it is blocked."""
    with workers(tmp_path, dsn, BLOCKS) as made:
        first, second = made.ready(2, lease=3.0, concurrency=1)
        jobs = [int(pgqueue.remote(f"stack.{name}").enqueue(eyes.conn).id) for name in ("blocks", "other")]
        for process in (first, second):
            await asyncio.to_thread(process.event, "inside")
        blocked, waiting = [await asked(dsn, job) for job in jobs]
        assert blocked.where == waiting.where == "task" and blocked.worker != waiting.worker
        assert blocked.frames[-1].name.endswith("deeper") and waiting.frames[-1].name.endswith("sleep")
        assert blocked.frames[0].name == "blocks" and waiting.frames[0].name == "other", "nothing that calls them"


@pytest.mark.promise("F103")
async def test_a_deep_stack_is_cut_at_its_outer_end(dsn: str, eyes: Eyes) -> None:
    inside, gate = threading.Event(), threading.Event()

    def deep(levels: int) -> None:
        if levels:
            deep(levels - 1)
        else:
            inside.set()
            gate.wait()

    @pgqueue.task(name="stack.deep")
    def start(job: pgqueue.Job) -> None:
        begins(job)
        deep(300)

    async with work(dsn, start):
        try:
            job = await started(eyes, start)
            await asyncio.to_thread(inside.wait)
            found = await asked(dsn, job)
            assert len(found.frames) == FRAMES_MOST and found.left_out > 200
            assert found.frames[-1].name == "Event.wait" or found.frames[-1].name.endswith("wait")
        finally:
            gate.set()
        await until(eyes.done(1))


@pytest.mark.promise("F103")
async def test_what_does_not_run_has_no_stack(dsn: str, eyes: Eyes) -> None:
    job = int(pgqueue.remote("stack.none").enqueue(eyes.conn).id)
    for id in (job, 4711):
        with pytest.raises(JobNotFound, match="does not run"):
            await asked(dsn, id)
    assert eyes.one("SELECT count(*) FROM pgqueue.stack_request") == 0


@pytest.mark.promise("F103")
async def test_a_worker_that_does_not_answer_is_named(dsn: str, eyes: Eyes) -> None:
    """It takes jobs, and looks for no such request."""
    taker = Taker(dsn, tasks=["stack.none"])
    job = int(pgqueue.remote("stack.none").enqueue(eyes.conn).id)
    await taker.fetch()
    with pytest.raises(
        ResultTimeout, match=rf"worker {taker.worker_id} \(.+\) has not answered for job {job} within 0.2"
    ):
        await asked(dsn, job, timeout=0.2)
    done = await asyncio.to_thread(command, "stack", str(job), "--timeout", "200ms", dsn=dsn)
    assert done.returncode == 1 and "has not answered" in done.stderr
    assert eyes.one("SELECT count(*) FROM pgqueue.stack_request") == 0
    await taker.close()


@pytest.mark.promise("F103")
async def test_the_answer_of_another_worker_is_not_taken_for_that_of_the_one_that_was_asked(
    dsn: str, eyes: Eyes
) -> None:
    """The worker that hangs is asked, and its job is rescued before it answers."""
    gate = asyncio.Event()

    @pgqueue.task(name="stack.moved")
    async def moved(job: pgqueue.Job) -> None:
        begins(job)
        await gate.wait()

    taker = Taker(dsn, tasks=["stack.moved"])
    job = int(moved.enqueue(eyes.conn).id)
    await taker.fetch()
    with psycopg.connect(dsn, autocommit=True) as conn:
        request = drivers.run(conn, asking(job))
        assert request.worker == taker.worker_id and drivers.run(conn, answer(request)) is None
        eyes.do(
            "WITH gone AS (DELETE FROM pgqueue.job_running RETURNING id, task) "
            "INSERT INTO pgqueue.job_available (id, task) SELECT id, task FROM gone"
        )
        async with work(dsn, moved, lease=1.5):
            await until(lambda: eyes.one("SELECT count(answer) FROM pgqueue.stack_request") == 1)
            with pytest.raises(ResultTimeout, match=rf"job {job}, which was given to worker \d+ meanwhile: ask again"):
                drivers.run(conn, answer(request))
            await begun(job)
            assert names(await asked(dsn, job)) == ["moved"]
            gate.set()
    await taker.close()


@pytest.mark.promise("F103")
async def test_a_job_that_its_worker_has_not_begun_has_no_frames(dsn: str, eyes: Eyes) -> None:
    gate = asyncio.Event()

    @pgqueue.task(name="stack.hand")
    async def hand(job: pgqueue.Job) -> None:
        begins(job)
        await gate.wait()

    async with work(dsn, hand, concurrency=1):
        await started(eyes, hand)
        # Of a claim under way: rows of earlier claims that the worker does not know are given back at the next look.
        job = eyes.one(
            "INSERT INTO pgqueue.job (task, state, worker_id, claim, started_at) "
            "SELECT 'stack.hand', 'running', id, 1000000, pgqueue.now() FROM pgqueue.worker RETURNING id"
        )
        found = await asked(dsn, job)
        assert found.where == "waiting" and found.frames == ()
        gate.set()


@pytest.mark.second
@pytest.mark.promise("F104")
async def test_a_locked_table_of_requests_holds_up_no_heartbeat_and_no_job(dsn: str, eyes: Eyes) -> None:
    gate = asyncio.Event()

    @pgqueue.task(name="stack.goes_on")
    async def goes_on(job: pgqueue.Job) -> None:
        begins(job)
        await gate.wait()

    async with work(dsn, goes_on, lease=1.5) as worker:
        job = await started(eyes, goes_on)
        with psycopg.connect(dsn) as conn:
            conn.execute("LOCK TABLE pgqueue.stack_request")
            before = eyes.one("SELECT beat FROM pgqueue.worker")
            late = False

            def beaten() -> bool:
                nonlocal late
                late = late or worker.services.heartbeat.late()
                return bool(eyes.one("SELECT beat FROM pgqueue.worker") >= before + 8)

            await until(beaten)
            assert not late and eyes.state(job) == "running"
            await started(eyes, goes_on)
        assert (await asked(dsn, job)).where == "task"
        gate.set()
        await until(eyes.done(2))


@pytest.mark.promise("F103")
async def test_a_request_in_an_open_transaction_is_waited_for_by_no_worker(dsn: str, eyes: Eyes) -> None:
    gate = asyncio.Event()

    @pgqueue.task(name="stack.open")
    async def waits(job: pgqueue.Job) -> None:
        begins(job)
        await gate.wait()

    async with work(dsn, waits, lease=1.5):
        job = await started(eyes, waits)
        eyes.do("INSERT INTO pgqueue.stack_request (job_id) VALUES (%s)", job)
        with psycopg.connect(dsn) as conn:
            conn.execute("DELETE FROM pgqueue.stack_request")
            assert (await asked(dsn, job)).where == "task"
            conn.rollback()
        gate.set()


@pytest.mark.promise("F103")
async def test_who_operates_may_ask_and_who_looks_may_not(dsn: str, eyes: Eyes, role: Role) -> None:
    gate = asyncio.Event()

    @pgqueue.task(name="stack.role")
    async def waits(job: pgqueue.Job) -> None:
        begins(job)
        await gate.wait()

    async with work(role("work"), waits):
        job = await started(eyes, waits)
        assert (await asked(role("operate"), job)).where == "task"
        for kind in ("read", "enqueue"):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                await asked(role(kind), job)
        gate.set()


@pytest.mark.promise("F103")
async def test_a_worker_whose_role_may_not_answer_goes_on(
    dsn: str, eyes: Eyes, role: Role, caplog: pytest.LogCaptureFixture
) -> None:
    gate = asyncio.Event()

    @pgqueue.task(name="stack.refused")
    async def waits(job: pgqueue.Job) -> None:
        begins(job)
        await gate.wait()

    may = role("work")
    eyes.do("REVOKE ALL ON pgqueue.stack_request FROM PUBLIC")
    eyes.do(f"REVOKE ALL ON pgqueue.stack_request FROM {psycopg.conninfo.conninfo_to_dict(may)['user']}")
    async with work(may, waits, lease=1.5):
        job = await started(eyes, waits)
        await until(lambda: "requests for stacks could not be answered" in caplog.text)
        before = eyes.one("SELECT beat FROM pgqueue.worker")
        await until(lambda: eyes.one("SELECT beat FROM pgqueue.worker") >= before + 3)
        assert caplog.text.count("requests for stacks could not be answered") == 1 and eyes.state(job) == "running"
        gate.set()
        await until(eyes.done(1))


def test_a_connection_in_a_transaction_is_refused(conn: psycopg.Connection) -> None:
    with pytest.raises(InvalidOption, match="autocommit"):
        pgqueue.stack(conn, 1)


@pytest.mark.promise("F49")
@pytest.mark.promise("F103")
async def test_the_command_prints_foreign_names_plainly(dsn: str, eyes: Eyes) -> None:
    inside, gate = threading.Event(), threading.Event()
    space: dict[str, Any] = {"inside": inside, "gate": gate}
    hostile = "a\x1b[2J\u202e\n\udc80.py"
    exec(compile("def deeper():\n    inside.set()\n    gate.wait()", hostile, "exec"), space)

    @pgqueue.task(name="stack.hostile")
    def start(job: pgqueue.Job) -> None:
        begins(job)
        space["deeper"]()

    async with work(dsn, start):
        try:
            job = await started(eyes, start)
            await asyncio.to_thread(inside.wait)
            done = await asyncio.to_thread(command, "stack", str(job), dsn=dsn)
            assert done.returncode == 0 and f"Job {job} in worker " in done.stdout
            assert '  File "a?[2J???.py", line 3, in deeper' in done.stdout.splitlines()
            printed = json.loads((await asyncio.to_thread(command, "stack", str(job), "--json", dsn=dsn)).stdout)
            assert printed["where"] == "thread" and hostile in [frame["file"] for frame in printed["items"]]
        finally:
            gate.set()
        await until(eyes.done(1))


@pytest.mark.promise("F103")
async def test_an_async_connection_asks_in_the_same_way(dsn: str, eyes: Eyes) -> None:
    gate = asyncio.Event()

    @pgqueue.task(name="stack.aasked")
    async def waits(job: pgqueue.Job) -> None:
        begins(job)
        await gate.wait()

    async with work(dsn, waits), await psycopg.AsyncConnection.connect(dsn, autocommit=True) as conn:
        job = await started(eyes, waits)
        assert names(await pgqueue.astack(conn, job)) == ["waits"]
        gate.set()
