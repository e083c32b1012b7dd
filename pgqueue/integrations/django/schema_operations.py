"""The operation of which our migrations of Django consist: it brings the queue's schema to the version of a release.

Only the database of the queue gets tables: that of the alias in the setting PGQUEUE, whatever routers say. On any other
alias, and on a database that is no PostgreSQL, the operation does nothing.
"""

from __future__ import annotations

import logging
from typing import Any

from django.db.migrations.operations.base import Operation, OperationCategory

from pgqueue.config import config
from pgqueue.database import migrations, revisions
from pgqueue.database.statements import in_schema
from pgqueue.integrations.django import project_settings

_log = logging.getLogger(__name__)


class UpTo(Operation):  # type: ignore[misc]  # Django has no types
    """Bring the schema to this version, for ever. If `pgqueue migrate` was there before, nothing is changed.

    Undone, the first one drops the schema with all jobs. A later one changes nothing then: the schema only goes
    forward, and workers of the release before work on it.
    """

    category = OperationCategory.SQL
    reduces_to_sql = True
    reversible = True

    sql = ""
    """What `migrate --plan` shows beside `describe`: nothing, for that says all."""

    def __init__(self, version: int, first: bool = False) -> None:
        self.version = version
        self.first = first

    @property
    def reverse_sql(self) -> str:
        """The same of the way back, in 40 characters at most."""
        return "DROP it with all jobs and results" if self.first else "stays as it is"

    def state_forwards(self, app_label: str, state: Any) -> None:
        """No model of Django is changed."""

    def database_forwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        """Apply what is missing."""
        if _is_of_the_queue(schema_editor.connection):
            schema_editor.execute(revisions.up_to(self.version, config().schema), params=None)

    def database_backwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        """Drop the schema, or leave it."""
        if not _is_of_the_queue(schema_editor.connection):
            return
        schema, database = config().schema, schema_editor.connection.settings_dict["NAME"]
        if not self.first:
            _log.warning("schema %s of database %s stays as it is: it only goes forward", schema, database)
            return
        if not schema_editor.collect_sql:
            _log.warning(
                "dropping schema %s of database %s with %d unfinished jobs, all results, history and schedules",
                *(schema, database, _unfinished(schema_editor.connection, schema)),
            )
        schema_editor.execute(revisions.drop(schema), params=None)

    def describe(self) -> str:
        """What `migrate --plan` and `sqlmigrate` call it."""
        return f"Bring schema {config().schema} to {migrations.files()[self.version - 1]}"

    @property
    def migration_name_fragment(self) -> str:
        """For a migration of this operation that has no name."""
        return f"up_to_{self.version}"


def _is_of_the_queue(connection: Any) -> bool:
    return bool(connection.alias == project_settings.alias() and connection.vendor == "postgresql")


def _unfinished(connection: Any, schema: str) -> int:
    """How many jobs have not ended; 0 if the tables are not there."""
    with connection.cursor() as cursor:
        cursor.execute(in_schema("SELECT to_regclass('pgqueue.job') IS NOT NULL", schema))
        if cursor.fetchone() == (False,):
            return 0
        cursor.execute(in_schema(_COUNT, schema))
        return int(cursor.fetchone()[0])


_COUNT = """
SELECT (SELECT count(*) FROM pgqueue.job_available) + (SELECT count(*) FROM pgqueue.job_scheduled)
     + (SELECT count(*) FROM pgqueue.job_blocked) + (SELECT count(*) FROM pgqueue.job_running)
"""
