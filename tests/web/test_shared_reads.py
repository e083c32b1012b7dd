"""One read for all visitors who ask at the same time: never older than the request."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Coroutine
from contextvars import ContextVar
from functools import partial
from typing import Any

import httpx
import pytest
from dashboards import browsing, dashboard_of
from workers import Eyes

import pgqueue
from pgqueue.web import Visitor
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
    ("/errors?task=web.a", "/errors?task=web.b"),
    ("/errors?task=web.a", "/errors?task=web.a&queue=elsewhere"),
    ("/errors?limit=1", "/errors?limit=1&skip=1"),
    ("/tasks", "/tasks?range=6h"),
    ("/jobs/7001", "/jobs/7002"),
    ("/jobs/7001?listed=1&state=failed", "/jobs/7001?listed=1&state=failed&task=web.a&error_type=KeyError"),
    ("/jobs/7001?listed=1&state=failed", "/jobs/7003?listed=1&state=failed"),
]
FAILED = """
WITH made AS (
    INSERT INTO pgqueue.job (id, task, queue, state, finished_at, bin, reason, attempt, args)
    SELECT id, task, 'of_' || task, 'failed', now() + id * interval '1 ms', 0, 'error', 1, '{"order": 90817}'
    FROM (VALUES (7001, 'web.a'), (7002, 'web.b'), (7003, 'web.a')) AS t (id, task)
    RETURNING id, enqueued_at, task, queue
), tried AS (
    INSERT INTO pgqueue.attempt (
        job_id, enqueued_at, claim, attempt, worker_id, started_at, finished_at, bin, outcome, error_type, message)
    SELECT id, enqueued_at, 1, 1, 1, now(), now(), 0, 'error',
        CASE id WHEN 7001 THEN 'KeyError' ELSE 'ValueError' END, 'no order 90817'
    FROM made
)
INSERT INTO pgqueue.error_group (fingerprint, queue, task, error_type, first_at, last_at, count, job_ids)
SELECT id::text, queue, task, 'KeyError', now(), now() + id * interval '1 ms', id, ARRAY[id] FROM made WHERE id < 7003
"""


def seen(answer: httpx.Response) -> object:
    """What differs between the pages of a pair, without the times of the request."""
    assert answer.status_code == 200, answer.text
    told = answer.json()
    names = ("id", "name", "completed", "figures", "n", "count", "states", "same_cause")
    items = [{name: item[name] for name in names if name in item} for item in told["items"]]
    return (
        items,
        told.get("before"),
        told.get("next"),
        told.get("step_seconds"),
        told.get("action"),
        told.get("first") if "action" in told else None,
    )


@pytest.mark.promise("F428")
@pytest.mark.parametrize(("one", "other"), PAIRS)
async def test_ten_visitors_of_a_page_share_its_reads_and_another_filter_has_its_own(
    one: str, other: str, dsn: str, eyes: Eyes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Naive: each visitor reads for itself, ten times as much; or a part of the filter is no part of the name."""
    eyes.do(HAPPENED)
    eyes.do(HAPPENED.replace("minute'", "hour'").replace("_minute", "_hour").replace("3 minutes", "3 hours"))
    eyes.do(FAILED)
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


WHO: ContextVar[str] = ContextVar("who")


@pytest.mark.promise("F458")
@pytest.mark.parametrize("path", ["/jobs/7001", "/errors?task=web.a", "/jobs?state=failed&task=web.a", "/jobs/7003"])
async def test_visitors_who_share_a_read_see_what_each_may_see(
    path: str, dsn: str, eyes: Eyes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An application that hides by visitor hides in each answer, whichever visitor's request has begun the read; and a
    reader has no button beside an operator."""
    eyes.do(FAILED)
    running, most = 0, 0
    read = Connections.read

    async def counted(made: Connections, ask: Any) -> Any:
        nonlocal running, most
        running += 1
        most = max(most, running)
        try:
            return await read(made, ask)
        finally:
            running -= 1

    async def auth(visitor: Visitor) -> Any:
        who = str(visitor.bearer)
        WHO.set(who)
        return ACTIONS if who == "operator" else "read"

    def hide(_: tuple[str, ...], value: Any) -> Any:
        return (
            "gone"
            if WHO.get() == "stranger" and "90817" in str(value) and not isinstance(value, dict | list)
            else value
        )

    monkeypatch.setattr(Connections, "read", counted)
    async with dashboard_of(dsn, auth, redact=(), redact_with=hide) as made, browsing(made) as browser:
        for kinds in (["stranger", "operator"], ["operator", "stranger"]):
            order = kinds * 5
            answers = await asyncio.gather(
                *[browser.get(path, headers={"authorization": f"Bearer {who}"}) for who in order]
            )
            for who, answer in zip(order, answers, strict=True):
                assert answer.status_code == 200
                main = answer.text.partition("<main")[2]
                assert ("90817" in main, "gone" in main) == ((False, True) if who == "stranger" else (True, False)), who
                assert bool(re.search(">Retry<|Retry all", main)) == (who == "operator"), who
    assert most == 1, "each waits for the read of the others"
