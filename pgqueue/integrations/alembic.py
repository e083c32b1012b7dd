"""The schema in revisions of Alembic: each names the version at which it ends, and means it for ever.

A revision calls `upgrade` and `downgrade` with Alembic's `op`; the connection is Alembic's own, on psycopg, psycopg2 or
asyncpg. With `--sql` they print what they would send. `include_name` is for the environment. Alembic and SQLAlchemy are
not imported here: all that is needed of them comes with `op`. docs/schema.md has an example.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pgqueue.config import config
from pgqueue.database import revisions
from pgqueue.errors import Error
from pgqueue.options import checks_options


@checks_options
def upgrade(op: Any, *, to: int, schema: str | None = None) -> None:
    """Bring the schema to version `to`, whatever pgqueue is installed. If it is there already, nothing is changed.

    Without `schema` it is the configured one. It is part of Alembic's transaction. InvalidOption: the pgqueue that is
    installed has no such version yet.

        alembic.upgrade(op, to=2)
    """
    _run(op, revisions.up_to(to, config(schema=schema).schema))


@checks_options
def downgrade(op: Any, *, to: int, schema: str | None = None) -> None:
    """Take back the first revision: `to=0` drops the schema, with all jobs, results and schedules.

    There is no way back to another version: that raises Error, and nothing is changed.
    """
    if to != 0 or isinstance(to, bool):
        raise Error(
            f"downgrade(to={to!r}): the schema of pgqueue only goes forward, and stays as it is. Workers of the "
            "release before work on it, unless its changelog says otherwise. Only to=0 goes back: it drops the schema "
            "with all jobs, results and schedules"
        )
    _run(op, revisions.drop(config(schema=schema).schema))


def include_name(name: str | None, type_: str, parent_names: Mapping[str, str | None]) -> bool:
    """Whether Alembic may compare this with the application's models: False for the configured schema of pgqueue.

    It is an argument of `context.configure`, where `include_schemas` is on.
    """
    return not (type_ == "schema" and name == config().schema)


def _run(op: Any, statement: str) -> None:
    """Send one statement as it is, or print it: neither a colon nor a percent sign of it is a parameter."""
    context = op.get_context()
    if context.as_sql:
        context.impl.static_output(f"{statement.rstrip().removesuffix(';')};")
        return
    try:
        op.get_bind().exec_driver_sql(statement, execution_options={"no_parameters": True})
    except Exception as error:
        driver: Exception | None = getattr(error, "orig", None)
        if driver is None:
            raise
        # SQLAlchemy's own error has the statement in it, some thousand lines.
        raise driver from None
