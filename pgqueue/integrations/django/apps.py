"""The app of Django: at the start of each process it configures pgqueue and imports the `tasks.py` of every app."""

from __future__ import annotations

from django.apps import AppConfig
from django.core import checks
from django.db.backends.signals import connection_created
from django.utils.module_loading import autodiscover_modules

from pgqueue.client.enqueue import watchers
from pgqueue.client.middleware import middleware
from pgqueue.config import find_database_of_tests, find_dsn


class PgqueueConfig(AppConfig):  # type: ignore[misc]  # Django has no types
    """Makes a Django project one of pgqueue."""

    name = "pgqueue.integrations.django"
    label = "pgqueue"
    verbose_name = "pgqueue"

    def ready(self) -> None:
        """Called by Django when all models are there."""
        from pgqueue.integrations.django import connections, databases, other_blocks, project_settings, system_checks

        project_settings.apply()
        databases.remember()
        find_dsn(databases.queue_dsn)
        find_database_of_tests(databases.of_tests)
        checks.register(system_checks.database_is_postgresql)
        checks.register(system_checks.queue_is_served, checks.Tags.database)
        watchers.append(other_blocks.warn_of_other_blocks)
        connection_created.connect(connections.note_connection)
        middleware(connections.around_sync)
        middleware(connections.around_async)
        autodiscover_modules("tasks")
