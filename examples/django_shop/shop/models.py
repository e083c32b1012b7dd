"""What the shop keeps."""

from django.db import models


class Order(models.Model):
    """What a customer has ordered."""

    item = models.CharField(max_length=100)
    receipt_sent = models.BooleanField(default=False)
    wrapped = models.BooleanField(default=False)
    counted = models.BooleanField(default=False)
