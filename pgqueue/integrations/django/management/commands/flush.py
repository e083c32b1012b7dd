"""Django's command `flush`, which empties the queue, too.

Each TransactionTestCase calls it at its end, and so do LiveServerTestCase and pytest-django's `transaction=True`. They
know only the tables of models. Without this, the next test would run the jobs of the one before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.core.management.commands import flush
from django.db import connections

from pgqueue.integrations.django.emptying import empty


class Command(flush.Command):  # type: ignore[misc]  # Django has no types
    """Django's own, and the queue of that database in the same transaction."""

    def handle(self, **options: Any) -> None:
        """Empty the queue right after the tables of models: `post_migrate` comes later, and may enqueue."""
        conn, done = connections[options["database"]], False

        def after(execute: Callable[..., Any], sql: str, *args: Any) -> Any:
            nonlocal done
            answer = execute(sql, *args)
            if not done and sql.startswith("TRUNCATE"):
                done = True
                empty(conn)
            return answer

        with conn.execute_wrapper(after):
            super().handle(**options)
        if not done and not options["interactive"]:  # the project has no models
            empty(conn)
