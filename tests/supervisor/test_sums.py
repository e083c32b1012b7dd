"""The sums of a supervisor never go down, whatever becomes of its processes; gauges are of now, or not there."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from typing import Any, cast

import pytest

from pgqueue.jobs.totals import Numbers, Sample
from pgqueue.supervisor import sums as sums_module
from pgqueue.supervisor.fleet import Child
from pgqueue.supervisor.process import Process
from pgqueue.supervisor.sums import Sums
from pgqueue.supervisor.worker_end import WorkerEnd
from pgqueue.telemetry.gauges import Reader

GAUGE: Sample = ("pgqueue_workers_alive", {}, 1)


class Peer:
    """A process that answers when the test says so; `asked` has the questions."""

    def __init__(self, number: int) -> None:
        self.child, self.pipe, self.asked = Child(number, 1), self, list[int]()
        self.numbers = Numbers()

    def say(self, say: str, **facts: Any) -> None:
        self.asked.append(facts["ask"])

    def does(self, completed: int, *, leads: bool = False) -> None:
        self.numbers.totals.of("mail", "send").happened["completed"] += completed
        self.numbers.slots["busy"] = self.child.number
        self.numbers.leads, self.numbers.gauges = leads, [GAUGE] if leads else []

    def lines(self, ask: int) -> list[dict[str, Any]]:
        lines = list(self.numbers.lines(16_384))
        return [{"say": "counted", "ask": ask, "last": each is lines[-1], **each} for each in lines]


class Desk:
    def __init__(self, *numbers: int) -> None:
        self.sums, self.peers = Sums(), {number: Peer(number) for number in numbers}

    async def ask(self, *silent: int) -> Numbers:
        """Ask all, of which these do not answer."""
        asking = asyncio.create_task(self.sums.ask(cast("list[Process]", list(self.peers.values()))))
        await asyncio.sleep(0)
        for number, peer in self.peers.items():
            if number not in silent and peer.asked:
                self.answer(number, peer.asked.pop())
        return await asking

    def answer(self, number: int, ask: int) -> None:
        for line in self.peers[number].lines(ask):
            self.sums.heard(number, line)


def completed(numbers: Numbers) -> int:
    return numbers.totals.tasks["mail", "send"].happened["completed"]


@pytest.mark.promise("F166")
async def test_what_an_ended_process_has_counted_stays_in_the_sum() -> None:
    desk = Desk(1, 2)
    desk.peers[1].does(5)
    desk.peers[2].does(7)
    assert completed(await desk.ask()) == 12
    desk.peers[2].does(1)
    desk.answer(2, 0)  # its last words
    del desk.peers[2]
    desk.sums.gone(2)
    numbers = await desk.ask()
    assert (completed(numbers), numbers.slots["busy"]) == (13, 1)
    desk.peers[3] = Peer(3)
    desk.peers[3].does(2)
    assert completed(await desk.ask()) == 15


@pytest.mark.promise("F166")
async def test_a_report_that_was_cut_off_is_left_out_and_a_silent_process_is_not_asked_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sums_module, "ANSWER_SECONDS", 0.01)
    desk = Desk(1, 2)
    for peer in desk.peers.values():
        peer.does(5)
    assert completed(await desk.ask()) == 10
    desk.peers[2].does(5)
    assert completed(await desk.ask(2)) == 10
    assert completed(await desk.ask(2)) == 10
    assert len(desk.peers[2].asked) == 1
    desk.sums.heard(2, desk.peers[2].lines(desk.peers[2].asked.pop())[0] | {"last": False})
    assert completed(await desk.ask(2)) == 10
    desk.sums.gone(2)
    del desk.peers[2]
    assert completed(await desk.ask()) == 10


@pytest.mark.promise("F167")
async def test_gauges_are_of_the_process_that_leads_now_or_of_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sums_module, "ANSWER_SECONDS", 0.01)
    desk = Desk(1, 2)
    desk.peers[1].does(1, leads=True)
    desk.peers[2].does(1)
    assert list((await desk.ask()).gauges) == [GAUGE]
    assert (await desk.ask(1)).gauges == ()  # it does not answer: what it had said is old
    desk.answer(1, desk.peers[1].asked.pop())  # an answer to an old question
    desk.peers[1].does(1)
    assert (await desk.ask()).gauges == ()
    desk.peers[2].does(1, leads=True)
    assert list((await desk.ask()).gauges) == [GAUGE]
    asking = asyncio.create_task(desk.sums.ask(cast("list[Process]", list(desk.peers.values()))))
    await asyncio.sleep(0)
    desk.answer(2, desk.peers[2].asked.pop())
    desk.sums.gone(2)  # it ends before the other one has answered
    desk.answer(1, desk.peers[1].asked.pop())
    assert (await asking).gauges == ()


# The other side ------------------------------------------------------------------------------------------------------


class Answering:
    """A process whose worker leads, and what it says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ours: socket.socket) -> None:
        monkeypatch.setattr("pgqueue.database.forks.handle_signal", lambda number, handler: None)
        self.said: list[dict[str, Any]] = []
        self.end = cast("Any", WorkerEnd(ours.detach()))
        self.end._worker = self.end._pipe = self

    def numbers(self) -> Numbers:
        return Numbers(leads=True)

    def say(self, say: str, **facts: Any) -> None:
        self.said.append(facts)

    async def gauges(self) -> Sequence[str]:
        """The gauges of its one answer."""
        await self.end._count(7)
        [line] = self.said
        assert (line["ask"], line["last"], self.end._counting) == (7, True, False)
        return [name for name, *_ in Numbers.of_lines(self.said).gauges]


@pytest.mark.promise("F166", "F167")
async def test_a_process_reads_its_gauges_while_its_handlers_hold_all_threads_of_the_loop(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgqueue.supervisor.worker_end.GAUGES_SECONDS", 20.0)  # on a slow machine, too
    ours, theirs = socket.socketpair()
    reader, held = Reader(dsn, "pgqueue"), threading.Event()
    with closing(theirs), closing(reader), ThreadPoolExecutor(1) as threads:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(threads)
        holding = loop.run_in_executor(None, held.wait)
        process = Answering(monkeypatch, ours)
        process.end.gauges = reader.begin
        try:
            assert "pgqueue_workers_alive" in await process.gauges()
        finally:
            held.set()
            await holding
            process.end._socket.close()


@pytest.mark.promise("F166")
@pytest.mark.parametrize("fails", [True, False], ids=["raises", "late"])
async def test_a_process_answers_whatever_becomes_of_its_gauges(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    monkeypatch.setattr("pgqueue.supervisor.worker_end.GAUGES_SECONDS", 0.01)

    def begin(leads: bool) -> Future[Sequence[Sample]]:
        if fails:
            raise RuntimeError("can't start new thread")
        return Future()

    ours, theirs = socket.socketpair()
    with closing(theirs):
        process = Answering(monkeypatch, ours)
        process.end.gauges = begin
        assert await process.gauges() == []
        process.end._socket.close()
