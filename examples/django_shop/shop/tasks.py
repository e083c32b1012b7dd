"""The tasks of the shop. Django imports this module when it starts, in workers and in views."""

from django_tasks import task

import pgqueue
from pgqueue.integrations.django.transactions import transactional
from shop.models import Order


@pgqueue.task(retry=5)
@transactional
def send_receipt(order: int) -> str:
    """Send the receipt of an order. What is written here and the end of the job are one commit."""
    found = Order.objects.select_for_update().get(id=order)
    found.receipt_sent = True
    found.save()
    return f"a receipt for {found.item}"


@pgqueue.task
async def wrap(order: int) -> None:
    """Wrap a gift, by the async ORM."""
    await Order.objects.filter(id=order).aupdate(wrapped=True)


@task()
def count(order: int) -> int:
    """One of Django's own tasks: pgqueue is its backend."""
    Order.objects.filter(id=order).update(counted=True)
    return Order.objects.filter(counted=True).count()
