"""Jobs that one task runs one after another: none feels the task, the context or the decimal context of another."""

from __future__ import annotations

import asyncio
import decimal
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from decimal import Decimal
from typing import Any
from weakref import WeakKeyDictionary

import pytest
from executor_bench import Bench, made

from pgqueue.jobs.outcomes import COMPLETED, Completed
from pgqueue.worker.run import executor, isolation

kept: dict[Any, str] = {}
kept_weakly: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
flag: ContextVar[object] = ContextVar("flag", default=None)


@pytest.fixture(autouse=True)
def long_turns(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Only what a job has left ends a run, however slow the machine is."""
    monkeypatch.setattr(executor, "TURN_SECONDS", 30.0)
    yield
    kept.clear()


def me() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task


class Incomparable:
    """As an array of numpy, or a signalling NaN: it does not say whether it equals another."""

    def __eq__(self, other: object) -> bool:
        raise GeneratorExit

    __hash__ = None  # type: ignore[assignment]


LEAVES: dict[str, Callable[[], object]] = {
    "a key of a registry": lambda: kept.setdefault(me(), "a session"),
    "a weak key of a registry": lambda: kept_weakly.setdefault(me(), "a session"),
    "a timer that cancels": lambda: asyncio.get_running_loop().call_later(3600, me().cancel),
    "a callback": lambda: me().add_done_callback(lambda _: None),
    "a request to cancel": lambda: me().cancel(),
    "a variable": lambda: flag.set("set"),
    "an equal value": lambda: flag.set(True),
    "a value that cannot be compared": lambda: flag.set(Incomparable()),
    "a precision": lambda: setattr(decimal.getcontext(), "prec", 3),
    "a rounding": lambda: setattr(decimal.getcontext(), "rounding", decimal.ROUND_UP),
    "a trap": lambda: decimal.getcontext().traps.__setitem__(decimal.Inexact, True),
    "another decimal context": lambda: decimal.setcontext(decimal.Context(prec=3)),
}


@pytest.mark.promise("F218")
@pytest.mark.each_value
@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("left", LEAVES)
async def test_what_a_job_leaves_at_its_task_is_not_felt_by_the_next(left: str, waits: bool) -> None:
    names: list[str] = []

    async def leaves() -> None:
        names.append(me().get_name())
        if waits:
            await asyncio.sleep(0)
        LEAVES[left]()

    async def looks() -> list[Any]:
        names.append(me().get_name())
        number = decimal.getcontext()
        return [flag.get() is one, number.prec, number.rounding == decimal.ROUND_HALF_UP, str(Decimal(2) / 3)]

    one = 1
    token = flag.set(one)
    with decimal.localcontext() as number:
        number.prec, number.rounding = 5, decimal.ROUND_HALF_UP
        bench = Bench(made(leaves, "leaves"), made(looks, "looks"), slots=1)
    flag.reset(token)
    jobs = [*bench.offer("looks"), *bench.offer("leaves"), *bench.offer("looks"), *bench.offer("looks")]
    outcomes = [await bench.outcome(job) for job in jobs]
    clean = Completed('[true,5,true,"0.66667"]')
    assert outcomes == [clean, COMPLETED, clean, clean]
    before, leaving, *after = names
    assert before == leaving and after[0] == after[1] != leaving  # a clean task is used again, and no other


def loops() -> list[Any]:
    import uvloop

    return [asyncio.new_event_loop, uvloop.new_event_loop]


@pytest.mark.promise("F218")
@pytest.mark.parametrize("factory", loops(), ids=["asyncio", "uvloop"])
@pytest.mark.parametrize("how", ["returns", "raises", "waits", "has tasks", "times out", "waits for a thread"])
def test_jobs_that_leave_nothing_share_a_task(factory: Any, how: str) -> None:
    """Else each job would cost a task. So the references to a task are as many after a wait as before it."""
    names: set[str] = set()

    async def leaves_nothing() -> None:
        names.add(me().get_name())
        if how == "raises":
            raise ValueError
        if how == "waits":
            await asyncio.sleep(0.001)
        if how == "has tasks":
            async with asyncio.TaskGroup() as group:
                group.create_task(asyncio.sleep(0))
                await asyncio.gather(asyncio.sleep(0), asyncio.sleep(0))
        if how == "times out":
            try:
                async with asyncio.timeout(0):
                    await asyncio.sleep(30)
            except TimeoutError:
                return
        if how == "waits for a thread":
            await asyncio.to_thread(len, "x")
            Decimal(1) / 3

    async def drain() -> None:
        bench = Bench(made(leaves_nothing, "leaves_nothing", retry=1), slots=1)
        await bench.outcome(bench.offer("leaves_nothing", 20)[-1])

    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(drain())
    assert len(names) == 1


@pytest.mark.promise("F218")
async def test_where_references_are_not_counted_each_job_has_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolation, "_references", None)
    names: set[str] = set()

    async def plain() -> None:
        names.add(me().get_name())

    bench = Bench(made(plain, "plain"), slots=1)
    await bench.outcome(bench.offer("plain", 5)[-1])
    assert len(names) == 5


@pytest.mark.promise("F219")
async def test_a_decimal_context_is_of_one_call_in_a_thread() -> None:
    set_one, looked = threading.Event(), threading.Event()

    def rough() -> str:
        decimal.getcontext().prec = 3
        set_one.set()
        looked.wait(20)
        return str(Decimal(2000) / 3)

    def exact() -> str:
        set_one.wait(20)
        looked.set()
        return str(Decimal(100_000) / 3)

    with decimal.localcontext() as number:
        number.prec = 9
        bench = Bench(made(rough, "rough"), made(exact, "exact"), slots=2)
        number.prec = 2  # what the program does to its own context later is its own, too
        jobs = [*bench.offer("rough"), *bench.offer("exact", 3)]
        outcomes = [await bench.outcome(job) for job in jobs]
        assert number.prec == 2
    assert outcomes == [Completed('"667"'), *[Completed('"33333.3333"')] * 3]
