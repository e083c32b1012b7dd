"""The app of the admin. Its label begins the names of the permissions: `pgqueue_admin.cancel_job`."""

from __future__ import annotations

from django.apps import AppConfig


class JobAdminConfig(AppConfig):  # type: ignore[misc]  # Django has no types
    """Jobs of pgqueue in Django's admin."""

    name = "pgqueue.integrations.django.job_admin"
    label = "pgqueue_admin"
    verbose_name = "pgqueue"
    default_auto_field = "django.db.models.BigAutoField"
