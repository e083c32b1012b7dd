"""The checker without a network: the client answers by itself."""

from typing import Any

import httpx
import pytest
from checker.__main__ import TABLE
from checker.tasks import check, check_all

from pgqueue.testing import adrain, aenqueued


def answer(request: httpx.Request) -> httpx.Response:
    """Two pages, one of them gone; a third host is down."""
    if request.url.host == "down.example":
        raise httpx.ConnectError("no answer", request=request)
    return httpx.Response(404 if request.url.path == "/gone" else 200)


@pytest.fixture
async def pages(pgqueue_aconn: Any) -> Any:
    await pgqueue_aconn.execute(TABLE)
    await pgqueue_aconn.execute("INSERT INTO page VALUES ('https://a.example/'), ('https://b.example/gone')")
    return pgqueue_aconn


async def run(conn: Any) -> Any:
    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
        return await adrain(conn, resources=client)


async def test_each_page_is_asked_and_its_answer_written_down(pages: Any) -> None:
    await check_all.aenqueue(pages)
    assert (await run(pages)).check().completed == 3
    found = await (await pages.execute("SELECT url, status FROM page ORDER BY url")).fetchall()
    assert found == [("https://a.example/", 200), ("https://b.example/gone", 404)]


async def test_a_page_whose_job_waits_is_not_enqueued_twice(pages: Any) -> None:
    await check.aenqueue(pages, "https://a.example/")
    await check.aenqueue(pages, "https://a.example/")
    assert len(await aenqueued(pages, check)) == 1


async def test_a_host_that_is_down_is_tried_again(pages: Any) -> None:
    await check.aenqueue(pages, "https://down.example/")
    drained = await run(pages)
    assert (drained.retried, drained.failed) == (1, 0)
