"""The tasks of the shop: `pgqueue work shop.tasks` runs them."""

import logging

import pgqueue

log = logging.getLogger(__name__)


@pgqueue.task(transactional=True, retry=5)
def charge(job: pgqueue.Job, order: int) -> str:
    """Charge an order. The row, the job of the receipt and the end of this job are one commit."""
    found = job.connection.execute("UPDATE shop_order SET charged = true WHERE id = %s RETURNING item", [order])
    (item,) = found.fetchone()
    job.enqueue(send_receipt, order)
    return f"charged {item}"


@pgqueue.task(rate="50/minute", timeout=30)
def send_receipt(order: int) -> None:
    """Send the receipt of an order: the mail server takes 50 in a minute."""
    log.info("a receipt of order %d", order)
