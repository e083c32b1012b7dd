"""What `manage.py check` says of pgqueue. With `--database ALIAS` it looks into the queue's database, too.

All that is found there is a warning: `manage.py migrate` runs the same checks. What it is about to mend is not said.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import psycopg
from django.core import checks
from django.db import connections
from django.db.migrations.executor import MigrationExecutor

import pgqueue
from pgqueue.admin.tasks import taken
from pgqueue.client import tasks
from pgqueue.config import config, safe
from pgqueue.database import migrations
from pgqueue.errors import SchemaBehind, SchemaMissing
from pgqueue.integrations.django import project_settings


def database_is_postgresql(**_: Any) -> list[checks.CheckMessage]:
    """The alias of the queue is a PostgreSQL."""
    alias = project_settings.alias()
    vendor = connections[alias].vendor
    if vendor == "postgresql":
        return []
    return [
        checks.Error(
            f"the queue's database {alias!r} is {vendor}",
            hint='A queue lives in PostgreSQL: PGQUEUE = {"DATABASE": ALIAS} names another alias.',
            id="pgqueue.E001",
        )
    ]


def queue_is_served(*, databases: Sequence[str] | None = None, **_: Any) -> list[checks.CheckMessage]:
    """The queue's tables are those of this pgqueue, and workers serve the queues that tasks name."""
    if project_settings.alias() not in (databases or ()) or database_is_postgresql():
        return []
    try:
        with pgqueue.connect(autocommit=True) as conn:
            migrations.require(conn, config().schema)
            return list(_unserved(conn))
    except pgqueue.Error as error:
        if isinstance(error, SchemaMissing | SchemaBehind) and _is_being_mended():
            return []
        hint = f"manage.py migrate --database {project_settings.alias()}, or manage.py pgqueue migrate"
        return [checks.Warning(f"{error}", hint=hint, id="pgqueue.W001")]
    except psycopg.OperationalError as error:
        return [checks.Warning(f"the queue's database cannot be asked: {safe(str(error)).strip()}", id="pgqueue.W002")]


def _is_being_mended() -> bool:
    """Whether this is `manage.py migrate`, and it is about to apply a migration of ours."""
    if sys.argv[1:2] != ["migrate"]:
        return False
    executor = MigrationExecutor(connections[project_settings.alias()])
    ours = [node for node in executor.loader.graph.leaf_nodes() if node[0] == "pgqueue"]
    return bool(executor.migration_plan(ours))


def _unserved(conn: psycopg.Connection[Any]) -> Iterator[checks.CheckMessage]:
    """Queues without a worker: those of tasks here if there are workers at all, and those in which jobs wait.

    A database of tests has neither: a warning at each run would be of no use.
    """
    served = {queue for queue, _ in taken(conn)}
    waiting = {each.name for each in pgqueue.queues(conn) if each.available.n or each.blocked.n}
    named = {task.queue for task in tasks.declared()} if served else set()
    for queue in sorted((waiting | named) - served):
        yield checks.Warning(
            f"no worker serves queue {queue!r}",
            hint=f"manage.py pgqueue work -q {queue}, or without -q for the queues of all tasks",
            id="pgqueue.W003",
        )
