"""The tasks of the shop: `pgqueue work shop.tasks` runs them."""

import logging

import pgqueue
from shop.database import Purchase

log = logging.getLogger(__name__)


@pgqueue.task(transactional=True, retry=5)
async def charge(job: pgqueue.Job, purchase: int) -> str:
    """Charge a purchase. The row, the job of the receipt and the end of this job are one commit."""
    async with await job.asession() as session:
        bought = await session.get_one(Purchase, purchase, with_for_update=True)
        if not bought.charged:
            bought.charged = True
            job.enqueue(send_receipt, purchase)
    return f"charged {bought.item}"


@pgqueue.task
async def send_receipt(purchase: int) -> None:
    """Send the receipt of a purchase."""
    log.info("a receipt of purchase %d", purchase)
