"""The schema of release 1.0."""

from __future__ import annotations

from django.db import migrations

from pgqueue.integrations.django.schema_operations import UpTo


class Migration(migrations.Migration):  # type: ignore[misc]  # Django has no types
    """Brings the queue's database to the newest version of that release."""

    initial = True
    operations = (UpTo(1, first=True),)
