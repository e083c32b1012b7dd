"""Least rights for roles: the GRANTs that let a role enqueue, work, operate, read, stage, or relay.

The statements are the files of `sql/grants/`. psql can apply them as they are (`psql -v role=app -f …`). Here
`:"role"` is replaced by the quoted name. Called by `pgqueue grants`, as the owner of the schema. Never creates a role,
never revokes a right.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import psycopg

from pgqueue.database.backoff import hides_rows, without_values
from pgqueue.database.statements import in_schema, sql_directory
from pgqueue.database.triggers import trigger_of
from pgqueue.errors import Error, InvalidOption

Kind = Literal["enqueue", "work", "operate", "read", "relay", "stage", "relay_outbox"]
KINDS: tuple[Kind, ...] = ("enqueue", "work", "operate", "read", "relay")
"""What a role may do in the database of the queue."""
OUTBOX_KINDS: tuple[Kind, ...] = ("stage", "relay_outbox")
"""What a role may do in the database of an outbox."""
Needs = Kind | Literal["own"]
"""What a role must be allowed to do: that of a kind, or what only the owner of the schema may."""


def as_sql(role: str, kind: Kind, schema: str) -> str:
    """Return the GRANTs as a script.

    >>> as_sql("app", "read", "jobs").splitlines()[1]
    'GRANT USAGE ON SCHEMA jobs TO "app";'
    """
    if not role or "\0" in role or len(role.encode()) > 63:
        raise InvalidOption(f"role {role!r}: a role's name has 1 to 63 bytes")
    quoted = '"' + role.replace('"', '""') + '"'
    script = (sql_directory() / "grants" / f"{kind}.sql").read_text(encoding="utf-8")
    return in_schema(script, schema).replace(':"role"', quoted)


def grant(conn: psycopg.Connection[Any], role: str, kind: Kind, schema: str) -> None:
    """Execute the GRANTs, all or none.

    Raises Error if this connection's role may not, InvalidOption if `role` does not exist.
    """
    refused: list[str] = []

    def hear(notice: psycopg.errors.Diagnostic) -> None:
        if notice.sqlstate == "01007":  # privilege_not_granted is only a warning
            refused.append(notice.message_primary or "")

    script = as_sql(role, kind, schema)
    conn.add_notice_handler(hear)
    try:
        with conn.transaction():
            conn.execute(script.encode(), prepare=False)
            if refused:
                raise Error(_forbidden(conn, schema, refused[0]))
    except psycopg.errors.UndefinedObject:
        raise InvalidOption(f"role {role!r} does not exist here; make it with CREATE ROLE") from None
    except psycopg.errors.InsufficientPrivilege as error:
        raise Error(_forbidden(conn, schema, error.diag.message_primary or "")) from None
    finally:
        conn.remove_notice_handler(hear)


@contextmanager
def needing(conn: psycopg.Connection[Any], needs: Needs) -> Iterator[None]:
    """Within this block a right that the role lacks is an Error, which names the role and what to run.

    What a trigger of the application may not do says nothing of pgqueue's rights: its error stays as it is.
    """
    role = conn.info.user  # afterwards the connection may be closed
    try:
        yield
    except psycopg.errors.InsufficientPrivilege as error:
        if trigger_of(error) is not None:
            raise
        if hides_rows(error):
            raise Error(without_values(error)) from error
        raise Error(lacks(role, f"do this ({error.diag.message_primary})", needs)) from error


def lacks(role: str, what: str, needs: Needs) -> str:
    """The text of an error: the role may not do `what`, and what gives it the rights."""
    if needs == "own":
        return f"role {role!r} may not {what}; run this as the schema's owner"
    kind = needs.replace("_", " --")
    return f"role {role!r} may not {what}; as the schema's owner run `pgqueue grants {role} --for {kind}`"


def _forbidden(conn: psycopg.Connection[Any], schema: str, why: str) -> str:
    return f"role {conn.info.user!r} may not give rights on schema {schema!r} ({why}); run this as its owner"
