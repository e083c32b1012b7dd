"""One read for all visitors who ask at the same time: never older than the request."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from functools import partial
from typing import Any

import httpx
import pytest
from dashboards import browsing, dashboard_of
from workers import Eyes

import pgqueue
from pgqueue.web.access import ACTIONS
from pgqueue.web.connections import Connections
from pgqueue.web.shared_reads import SharedReads

LIMIT = 60.0


class Book:
    """What is read: the number of changes. A read looks at once, and answers when it is told to."""

    def __init__(self) -> None:
        self.changes = 0
        self.reads = 0
        self.running = 0
        self.most = 0
        self.began = asyncio.Event()
        self.may_end = asyncio.Event()

    async def look(self) -> int:
        self.reads += 1
        self.running += 1
        self.most = max(self.most, self.running)
        seen = self.changes
        self.began.set()
        try:
            await self.may_end.wait()
        finally:
            self.running -= 1
        return seen


def within(each: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(each, LIMIT))


@pytest.mark.promise("F425")
def test_ten_visitors_at_once_cost_two_reads_and_none_sees_what_is_older_than_the_request() -> None:
    async def visit() -> None:
        shared, book = SharedReads(), Book()
        first = asyncio.create_task(shared.read("jobs", book.look))
        await book.began.wait()
        book.changes = 1  # committed before the nine others ask, but after the first read has looked
        others = [asyncio.create_task(shared.read("jobs", book.look)) for _ in range(9)]
        await asyncio.sleep(0)
        book.may_end.set()
        assert await first == 0
        assert await asyncio.gather(*others) == [1] * 9
        assert (book.reads, book.most) == (2, 1)

    within(visit())


@pytest.mark.promise("F425")
def test_a_later_request_reads_again_and_another_name_has_a_read_of_its_own() -> None:
    async def visit() -> None:
        shared, book = SharedReads(), Book()
        book.may_end.set()
        assert await shared.read("jobs", book.look) == 0
        book.changes = 1
        assert await shared.read("jobs", book.look) == 1
        book.may_end.clear()
        book.began.clear()
        held = asyncio.create_task(shared.read("jobs", book.look))
        await book.began.wait()

        async def other() -> str:
            return "other"

        assert await shared.read("overview", other) == "other"
        book.may_end.set()
        assert await held == 1

    within(visit())


@pytest.mark.promise("F425")
def test_a_visitor_who_goes_away_ends_no_read_of_others() -> None:
    async def visit() -> None:
        shared, book = SharedReads(), Book()
        first = asyncio.create_task(shared.read("jobs", book.look))
        second = asyncio.create_task(shared.read("jobs", book.look))
        await book.began.wait()
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        book.may_end.set()
        assert await second == 0 and book.reads == 1

    within(visit())


@pytest.mark.promise("F425")
def test_a_read_that_fails_fails_for_its_visitors_and_the_next_one_begins_anew() -> None:
    async def visit() -> None:
        shared, book = SharedReads(), Book()
        book.may_end.set()

        async def fails() -> int:
            raise ValueError("the table is away")

        both = [asyncio.create_task(shared.read("jobs", fails)) for _ in range(2)]
        found = await asyncio.gather(*both, return_exceptions=True)
        assert [str(each) for each in found] == ["the table is away"] * 2
        assert await shared.read("jobs", book.look) == 0

    within(visit())


@pytest.mark.promise("F425")
def test_the_read_of_another_loop_holds_up_no_visitor() -> None:
    shared, former = SharedReads(), asyncio.new_event_loop()

    async def never() -> int:
        await asyncio.get_running_loop().create_future()
        return 0

    async def leave() -> asyncio.Task[int]:
        left = asyncio.create_task(shared.read("jobs", never))
        await asyncio.sleep(0)
        return left

    async def visit() -> None:
        book = Book()
        book.may_end.set()
        assert await shared.read("jobs", book.look) == 0

    left = former.run_until_complete(leave())
    try:
        within(visit())
    finally:
        for task in [left, *asyncio.all_tasks(former)]:
            task.cancel()
        former.run_until_complete(asyncio.wait([left]))
        former.run_until_complete(former.shutdown_asyncgens())
        former.close()


# Pages --------------------------------------------------------------------------------------------------------------

HAPPENED = """
INSERT INTO pgqueue.history_minute (at, bin, queue, task, started, completed, failed)
SELECT date_trunc('minute', pgqueue.now()) - interval '3 minutes', (SELECT bin FROM pgqueue.ring WHERE kind = 'minute'),
    'of_' || task, task, n, n, 0
FROM (VALUES ('web.a', 1), ('web.b', 2)) AS t (task, n)
"""
PAIRS = [
    ("/jobs?queue=of_web.a", "/jobs?queue=of_web.b"),
    ("/jobs?state=available&limit=1&queue=of_web.a", "/jobs?state=available&limit=1&queue=of_web.b"),
    ("/history?range=1h", "/history?range=6h"),
    ("/history?queue=of_web.a", "/history?queue=of_web.b"),
    ("/history?task=web.a", "/history?task=web.b"),
    ("/queue?name=of_web.a", "/queue?name=of_web.b"),
    ("/task?name=web.a", "/task?name=web.b"),
    ("/task?name=web.a", "/task?name=web.a&range=30d"),
    ("/bulk/new?action=cancel&state=available", "/bulk/new?action=cancel&state=available&queue=of_web.b"),
    ("/bulk/new?action=cancel&state=available", "/bulk/new?action=discard&state=failed"),
]


def seen(answer: httpx.Response) -> object:
    """What differs between the pages of a pair, without the times of the request."""
    assert answer.status_code == 200, answer.text
    told = answer.json()
    names = ("id", "name", "completed", "figures", "n", "count", "states")
    items = [{name: item[name] for name in names if name in item} for item in told["items"]]
    return items, told.get("step_seconds"), told.get("action"), told.get("first") if "action" in told else None


@pytest.mark.promise("F428")
@pytest.mark.parametrize(("one", "other"), PAIRS)
async def test_ten_visitors_of_a_page_share_its_reads_and_another_filter_has_its_own(
    one: str, other: str, dsn: str, eyes: Eyes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Naive: each visitor reads for itself, ten times as much; or a part of the filter is no part of the name."""
    eyes.do(HAPPENED)
    for task, number in (("web.a", 1), ("web.b", 2)):
        for _ in range(number):
            pgqueue.remote(task).using(queue=f"of_{task}").enqueue(eyes.conn)
    reads, read = 0, Connections.read

    async def counted(made: Connections, ask: Any) -> Any:
        nonlocal reads
        reads += 1
        return await read(made, ask)

    async with dashboard_of(dsn, lambda visitor: ACTIONS) as made, browsing(made) as browser:
        ask = partial(browser.get, headers={"accept": "application/json"})
        expected = [seen(await ask(path)) for path in (one, other)]
        assert expected[0] != expected[1]
        monkeypatch.setattr(Connections, "read", counted)
        await ask(one)
        alone, reads = reads, 0
        await asyncio.gather(*[ask(one) for _ in range(10)])
        assert alone <= reads <= 2 * alone
        assert [seen(each) for each in await asyncio.gather(*map(ask, [one, other] * 5))] == expected * 5
