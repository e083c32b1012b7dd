"""The shop is tested as any application: jobs run in the test, in its transaction."""

from httpx import AsyncClient
from shop.database import Purchase
from shop.tasks import charge, send_receipt
from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from pgqueue.testing import aassert_enqueued, aassert_not_enqueued, adrain


async def test_a_purchase_is_charged_by_its_job(client: AsyncClient, session: AsyncSession) -> None:
    answer = await client.post("/purchases/tea")
    assert answer.status_code == 202
    job = answer.headers["Location"]
    assert (await client.get(job)).json()["state"] == "available"
    await aassert_enqueued(session, charge)

    drained = await adrain(session)
    drained.check()
    assert drained.completed == 2  # the receipt, too
    assert (await client.get(job)).json()["result"] == "charged tea"
    assert await session.scalar(select(Purchase.charged)) is True


async def test_a_request_that_comes_twice_is_one_purchase(client: AsyncClient, session: AsyncSession) -> None:
    twice = [await client.post("/purchases/tea", headers={"Idempotency-Key": "k-1"}) for _ in range(2)]
    assert twice[0].headers["Location"] == twice[1].headers["Location"]
    assert await session.scalar(select(func.count()).select_from(Purchase)) == 1


async def test_a_purchase_that_is_gone_fails_its_job_and_sends_nothing(
    client: AsyncClient, session: AsyncSession
) -> None:
    await charge.using(retry=1).aenqueue(session, 404)
    drained = await adrain(session)
    assert (drained.failed, drained.completed) == (1, 0)
    assert [type(error).__name__ for error in drained.errors] == ["NoResultFound"]
    await aassert_not_enqueued(session, send_receipt)


async def test_an_unknown_job_is_404(client: AsyncClient) -> None:
    assert (await client.get("/jobs/999999")).status_code == 404
