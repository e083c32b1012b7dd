"""A callable as the target: each job comes at least once, with a stable uid, and none holds up another."""

from __future__ import annotations

import asyncio
import logging
import signal
import subprocess
import sys
from collections import Counter
from datetime import UTC, datetime, timedelta
from time import monotonic
from typing import Any

import psycopg
import pytest
from relays import Sides, app_dsn, eventually, relaying, sides

import pgqueue
from pgqueue.relay.callable_target import CallableTarget, Refuse, StagedJob
from pgqueue.relay.relay import Relay

__all__ = ["app_dsn", "sides"]

mail = pgqueue.remote("shop.mail")


class Receiver:
    """What came, and which values it does not take."""

    def __init__(self, *fails: str) -> None:
        self.jobs: list[StagedJob] = []
        self.calls: list[str] = []
        self.fails = set(fails)

    def __call__(self, job: StagedJob) -> None:
        self.calls.append(job.args["x"])
        if job.args["x"] in self.fails:
            raise ConnectionError("away")
        self.jobs.append(job)

    @property
    def values(self) -> list[str]:
        return [job.args["x"] for job in self.jobs]


@pytest.mark.promise("E11")
@pytest.mark.parametrize("kind", ["sync", "async", "object", "async object"])
async def test_every_kind_of_callable_gets_each_job_with_its_options(kind: str, app_dsn: str, sides: Sides) -> None:
    receiver = Receiver()

    async def asynchronous(job: StagedJob) -> None:
        await asyncio.sleep(0)
        receiver(job)

    class Asynchronous:
        async def __call__(self, job: StagedJob) -> None:
            await asynchronous(job)

    then = datetime(2040, 1, 1, tzinfo=UTC)
    job = mail.using(queue="post", priority=2, run_at=then, deadline=then + timedelta(hours=1), headers={"a": 1})
    pgqueue.enqueue_many(pgqueue.Outbox(sides.app), [job.new(x="first"), mail.using(lock="l").new(x="second")])
    uids = [uid for (uid,) in sides.app.execute("SELECT uid::text FROM pgqueue.outbox ORDER BY id").fetchall()]
    kinds: dict[str, Any] = {"async": asynchronous, "object": receiver, "async object": Asynchronous()}
    fn = kinds.get(kind, lambda job: receiver(job))
    assert await Relay(app_dsn, CallableTarget(fn)).once()
    first, second = receiver.jobs
    assert [first.uid, second.uid] == uids and sides.left() == 0
    assert (first.task, first.args, first.queue, first.priority) == ("shop.mail", {"x": "first"}, "post", 2)
    assert (first.run_at, first.deadline, first.headers) == (then, then + timedelta(hours=1), {"a": 1})
    assert (second.queue, second.priority, second.run_at, second.new.lock_key) == ("default", 5, None, "l")
    assert datetime.now(UTC) - second.staged_at < timedelta(minutes=5)


@pytest.mark.promise("E10")
async def test_what_fails_stays_and_holds_up_no_other_and_comes_when_it_can(app_dsn: str, sides: Sides) -> None:
    receiver = Receiver("bad", "worse")
    sides.stage("bad", "worse", "a")
    async with relaying(Relay(app_dsn, CallableTarget(receiver))):
        await eventually(lambda: receiver.values == ["a"] and sides.left() == 2)
        sides.stage("b")
        await eventually(lambda: receiver.values == ["a", "b"] and sides.left() == 2)
        await eventually(lambda: Counter(receiver.calls)["bad"] >= 4)
        receiver.fails.clear()
        await eventually(lambda: sides.left() == 0)
    assert sorted(receiver.values) == ["a", "b", "bad", "worse"]
    assert sides.refused() == []


@pytest.mark.promise("E10")
async def test_a_row_goes_only_after_the_callable_has_returned(app_dsn: str, sides: Sides) -> None:
    began, go = asyncio.Event(), asyncio.Event()
    seen: list[str] = []

    async def slow(job: StagedJob) -> None:
        began.set()
        await go.wait()
        seen.append(job.uid)

    sides.stage("a")
    async with relaying(Relay(app_dsn, CallableTarget(slow))):
        await began.wait()
        assert sides.left() == 1
    assert sides.left() == 1 and seen == []  # it was stopped in the middle
    go.set()
    assert await Relay(app_dsn, CallableTarget(slow)).once()
    assert (len(seen), sides.left()) == (1, 0)


@pytest.mark.promise("E11")
async def test_a_crash_after_k_of_n_repeats_at_most_k_with_the_same_uids(app_dsn: str, sides: Sides) -> None:
    """The relay is cancelled in the eleventh call: nothing of the batch was deleted yet."""
    calls: list[str] = []
    eleventh = asyncio.Event()

    async def publish(job: StagedJob) -> None:
        calls.append(job.uid)
        if len(calls) == 11:
            eleventh.set()
            await asyncio.Event().wait()

    sides.stage(*[str(number) for number in range(30)])
    uids = [uid for (uid,) in sides.app.execute("SELECT uid::text FROM pgqueue.outbox ORDER BY id").fetchall()]
    async with relaying(Relay(app_dsn, CallableTarget(publish))):
        await eleventh.wait()
    assert await Relay(app_dsn, CallableTarget(publish)).once()
    counted = Counter(calls)
    assert list(counted) == uids and sides.left() == 0
    assert [uid for uid, number in counted.items() if number > 1] == uids[:11]


async def test_a_locked_row_is_not_delivered_again_by_the_same_process(app_dsn: str, sides: Sides) -> None:
    receiver = Receiver()
    sides.stage("a", "b")
    with psycopg.connect(app_dsn) as holder:
        holder.execute("SELECT FROM pgqueue.outbox WHERE id = 1 FOR UPDATE")
        relay = Relay(app_dsn, CallableTarget(receiver))
        async with relaying(relay):
            await eventually(lambda: sides.left() == 1)
            await eventually(lambda: relay.counts.delivered > 4)  # it was found again, and not called for
            holder.rollback()
            await eventually(lambda: sides.left() == 0)
    assert receiver.calls == ["a", "b"]


async def test_what_the_callable_refuses_and_what_is_no_job_goes_aside(app_dsn: str, sides: Sides) -> None:
    def picky(job: StagedJob) -> None:
        if job.task == "no":
            raise Refuse("never\0 \udc80")
        if job.task == "type":
            raise pgqueue.InvalidArguments("no such column")
        assert len(job.args_json) < 5_000 or job.args

    sides.stage("a")
    sides.app.execute("INSERT INTO pgqueue.outbox (task) VALUES ('no'), ('type'), ('two words')")
    sides.app.execute("INSERT INTO pgqueue.outbox (task, args) VALUES ('long', %s)", ['{"n": ' + "9" * 5_000 + "}"])
    assert await Relay(app_dsn, CallableTarget(picky)).once()
    assert sides.left() == 0
    no, kind, words, long = sides.refused()
    assert (no, kind) == (("no", "never\ufffd ?"), ("type", "no such column"))
    assert words[0] == "two words" and "without spaces" in words[1]
    assert long[0] == "long" and "cannot be read in Python" in long[1]


async def test_a_receiver_that_is_down_is_asked_ever_less_and_in_few_lines(
    app_dsn: str, sides: Sides, caplog: pytest.LogCaptureFixture
) -> None:
    receiver = Receiver(*[str(number) for number in range(100)])
    sides.stage(*receiver.fails)
    with caplog.at_level(logging.WARNING):
        async with relaying(Relay(app_dsn, CallableTarget(receiver))):
            await eventually(lambda: len(receiver.calls) >= 14)
            assert len(receiver.calls) < 20 and receiver.values == []
            began = monotonic()
            receiver.fails.clear()
            await eventually(lambda: sides.left() == 0)
            assert monotonic() - began < 12.0
    assert sorted(receiver.values, key=int) == [str(number) for number in range(100)]
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "staged job 1 (t) could not be delivered and is tried again"
    ]


async def test_once_ends_if_the_receiver_takes_nothing(
    app_dsn: str, sides: Sides, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgqueue.relay.callable_target.DOWN_MOST", 0.1)
    receiver = Receiver(*[str(number) for number in range(100)])
    sides.stage(*receiver.fails)
    assert await Relay(app_dsn, CallableTarget(receiver)).once()
    assert (receiver.values, sides.left()) == ([], 100)


DEEP = {
    "headers": '{"headers": {"a": %s}}',
    "queue": '{"queue": %s}',
    "unknown": '{"other": %s}',
}


@pytest.mark.promise("F202")
@pytest.mark.parametrize("target", ["queue", "function"])
async def test_options_that_cannot_be_read_harm_only_their_row(
    target: str, app_dsn: str, dsn: str, sides: Sides
) -> None:
    receiver = Receiver()
    for depth in (1_100, 5_000):
        for options in DEEP.values():
            said = options % ("[" * depth + "]" * depth)
            sides.app.execute("INSERT INTO pgqueue.outbox (task, options) VALUES ('deep', %s)", [said])
    sides.stage("a")
    assert await Relay(app_dsn, dsn if target == "queue" else CallableTarget(receiver)).once()
    assert (sides.delivered() if target == "queue" else receiver.values, sides.left()) == (["a"], 0)
    reasons = [reason for _, reason in sides.refused()]
    assert len(reasons) == 6 and all(reason.startswith("options: ") for reason in reasons)
    assert sum("nested too deeply" in reason for reason in reasons) >= 2


class Unreadable(Exception):
    """It raises whatever one asks it."""

    def __getattribute__(self, name: str) -> object:
        raise KeyError(name)

    def __str__(self) -> str:
        raise SystemExit("no text")


class UnreadableRefuse(pgqueue.Refuse):
    def __str__(self) -> str:
        raise RuntimeError("no text")


RAISED: dict[str, BaseException] = {
    "exit": SystemExit(3),
    "interrupt": KeyboardInterrupt(),
    "closed": GeneratorExit(),
    "end": StopIteration(1),
    "end of async": StopAsyncIteration(),
    "group": BaseExceptionGroup("g", [KeyboardInterrupt()]),
    "base": BaseException("x"),
    "cancelled": asyncio.CancelledError(),
    "unreadable": Unreadable(),
}


@pytest.mark.promise("F202")
@pytest.mark.parametrize("kind", ["sync", "async", "awaitable"])
async def test_whatever_a_function_raises_its_row_stays_and_the_others_go_on(
    kind: str, app_dsn: str, sides: Sides, caplog: pytest.LogCaptureFixture
) -> None:
    """It raises once for each of these rows, and what it refuses goes aside."""
    calls: list[str] = []

    def sync(job: StagedJob) -> None:
        value = job.args["x"]
        calls.append(value)
        if calls.count(value) == 1 and value in RAISED:
            raise RAISED[value]
        if value == "never":
            raise UnreadableRefuse

    async def asynchronous(job: StagedJob) -> None:
        if job.args["x"] == "itself" and "itself" not in calls and (task := asyncio.current_task()) is not None:
            task.cancel()
        sync(job)

    functions = {"sync": sync, "async": asynchronous, "awaitable": lambda job: asynchronous(job)}
    sides.stage("a", "never", *RAISED, "itself", "b")
    async with relaying(Relay(app_dsn, CallableTarget(functions[kind]))) as running:
        await eventually(lambda: running.done() or sides.left() == 0)
        assert not running.done()
    first = ["a", "never", *RAISED, "itself", "b"]
    assert calls[: len(first)] == first
    assert sorted(calls[len(first) :]) == sorted([*RAISED, *([] if kind == "sync" else ["itself"])])
    assert sides.refused() == [("t", "it cannot be described: that raised RuntimeError")]
    assert "staged job 3 (t) could not be delivered and is tried again: SystemExit: 3" in caplog.text


@pytest.mark.promise("F202")
@pytest.mark.parametrize("goes_on", [False, True])
async def test_a_relay_that_is_cancelled_ends_the_call_and_itself(goes_on: bool, app_dsn: str, sides: Sides) -> None:
    """The function may let the cancellation pass, or return as if there was none."""
    begun, calls = asyncio.Event(), list[str]()

    async def hangs(job: StagedJob) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            calls.append(job.args["x"])
            if not goes_on:
                raise

    sides.stage("a", "b")
    async with relaying(Relay(app_dsn, CallableTarget(hangs))) as running:
        await begun.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert (calls, sides.left()) == (["a"], 2)


INTERRUPTED = """
import asyncio, sys, time
from pgqueue import CallableTarget, Relay
async def blocks(job):
    print("begun", flush=True)
    while True:
        time.sleep(0.01)
asyncio.new_event_loop().run_until_complete(Relay(sys.argv[1], CallableTarget(blocks)).run())
"""


@pytest.mark.promise("F202")
def test_ctrl_c_ends_a_relay_in_a_loop_that_does_not_handle_it(app_dsn: str, sides: Sides) -> None:
    sides.stage("a")
    command = [sys.executable, "-c", INTERRUPTED, app_dsn]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"begun\n"
        process.send_signal(signal.SIGINT)
        assert b"KeyboardInterrupt" in process.communicate(timeout=60)[1]
    assert sides.left() == 1


async def test_an_outbox_belongs_to_one_target(app_dsn: str, dsn: str, sides: Sides) -> None:
    receiver = Receiver()
    assert await Relay(app_dsn, CallableTarget(receiver, name="one")).once()
    sides.stage("a")
    for other in (CallableTarget(receiver, name="two"), dsn):
        with pytest.raises(pgqueue.Error, match="belongs to another queue"):
            await Relay(app_dsn, other).once()
    assert await Relay(app_dsn, CallableTarget(receiver, name="one")).once()
    assert (receiver.values, sides.delivered()) == (["a"], [])
