"""The views of the shop."""

from django.db import transaction
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.urls import reverse
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_GET, require_POST

import pgqueue
from shop.models import Order
from shop.tasks import count, send_receipt, wrap


@csrf_exempt
@require_POST
def order(request: HttpRequest, item: str) -> HttpResponse:
    """Order something: 202, and where to look for the job of the receipt."""
    with transaction.atomic():
        made = Order.objects.create(item=item)
        job = send_receipt.enqueue("default", made.id)
        count.enqueue(made.id)
    return accepted(job.id)


@csrf_exempt
@require_POST
async def gift(request: HttpRequest, item: str) -> HttpResponse:
    """The same in an async view."""
    made = await Order.objects.acreate(item=item)
    job = await wrap.aenqueue("default", made.id)
    return accepted(job.id)


@require_GET
def job_status(request: HttpRequest, id: int) -> HttpResponse:
    """Where the job stands; 404 if there is none."""
    try:
        job = pgqueue.get("default", id)
    except pgqueue.JobNotFound:
        return JsonResponse({"detail": "no such job"}, status=404)
    return JsonResponse({"id": job.id, "state": job.state, "result": job.result})


def accepted(job: int) -> HttpResponse:
    """202, and where to look."""
    return HttpResponse(status=202, headers={"Location": reverse("job", args=[job])})
