"""The shop is tested as any Django app: jobs run in the test, in its transaction."""

from django.test import TestCase, TransactionTestCase

from pgqueue.testing import adrain, assert_enqueued, drain
from shop.models import Order
from shop.tasks import send_receipt


class Orders(TestCase):
    def test_the_receipt_is_sent_by_its_job(self) -> None:
        answer = self.client.post("/orders/tea/")
        self.assertEqual(answer.status_code, 202)
        self.assertEqual(self.client.get(answer["Location"]).json()["state"], "available")
        assert_enqueued("default", send_receipt)
        self.assertEqual(drain().check().completed, 2)
        self.assertEqual(self.client.get(answer["Location"]).json()["result"], "a receipt for tea")
        made = Order.objects.get()
        self.assertTrue(made.receipt_sent and made.counted)

    def test_an_order_that_is_gone_fails_its_job(self) -> None:
        send_receipt.using(retry=1).enqueue("default", 404)
        drained = drain()
        self.assertEqual((drained.failed, drained.completed), (1, 0))
        self.assertIsInstance(drained.errors[0], Order.DoesNotExist)

    async def test_a_gift_is_wrapped_by_an_async_handler(self) -> None:
        answer = await self.async_client.post("/orders/tea/gift/")
        self.assertEqual(answer.status_code, 202)
        (await adrain()).check()
        self.assertTrue((await Order.objects.aget()).wrapped)

    def test_an_unknown_job_is_404(self) -> None:
        self.assertEqual(self.client.get("/jobs/999999/").status_code, 404)


class Committed(TransactionTestCase):
    def test_the_receipt_is_sent_where_everything_is_committed(self) -> None:
        self.client.post("/orders/tea/")
        self.assertEqual(drain().check().completed, 2)
        self.assertTrue(Order.objects.get().receipt_sent)

    def test_no_job_of_the_test_before_is_left(self) -> None:
        self.client.post("/orders/milk/")
        self.assertEqual(drain().check().completed, 2)
