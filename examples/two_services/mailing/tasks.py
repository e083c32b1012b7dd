"""The task of mailing: `pgqueue work mailing.tasks` runs it."""

import pgqueue


@pgqueue.task(name="mailing.send_receipt", queue="mail", transactional=True, retry=5)
def send_receipt(job: pgqueue.Job, order: int, item: str) -> str:
    """Write a receipt. The row and the end of the job are one commit, so there is one receipt for each order."""
    text = f"thank you for {item}"
    job.connection.execute("INSERT INTO receipt (shop_order, text) VALUES (%s, %s)", [order, text])
    return text
