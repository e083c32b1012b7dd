"""A model without a table of Django's: the admin and the permissions ask for one. Nothing is read through it."""

from __future__ import annotations

from django.db import models

from pgqueue.config import config
from pgqueue.web.access import ACTIONS


class Job(models.Model):  # type: ignore[misc]  # Django has no types
    """A job, for permissions: `view_job`, and one for each action of the dashboard, such as `cancel_job`."""

    id = models.BigIntegerField(primary_key=True)

    class Meta:
        managed = False
        db_table = f'"{config().schema}"."job"'
        default_permissions = ("view",)
        permissions = tuple((f"{action}_job", f"Can {action.replace('_', ' ')}") for action in sorted(ACTIONS))
