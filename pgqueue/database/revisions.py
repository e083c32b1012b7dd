"""One step of a tool that keeps the history of a database, as Alembic's revisions and Django's migrations do.

Such a step names the version of the schema at which it ends, for ever, whatever pgqueue is installed later. The
integrations of frameworks send its script on a connection of theirs, or print it. This module knows no framework.

The script is one statement, which asks the database what it has. So one text is right online and offline, on an empty
database and on one that `pgqueue migrate` has brought up, and for a driver that takes one statement at a time. It
applies the files of `migrations`, and these enter themselves.
"""

from __future__ import annotations

from pgqueue.database import migrations
from pgqueue.database.migrations import Migration
from pgqueue.database.schema_locks import lock_name
from pgqueue.database.statements import check_schema, in_schema
from pgqueue.errors import InvalidOption


def up_to(version: int, schema: str) -> str:
    """Return the script that brings this schema to this version: it applies those files up to it that are missing.

    If the schema is at this version or ahead of it, it stays as it is. A later pgqueue returns the same text. It is for
    a transaction: if a file fails, nothing is left of it. If a file gets a lock of a table not within five seconds, it
    fails, so that workers do not wait behind it. A `lock_timeout` of the session comes before that.

    InvalidOption: this pgqueue has no migration of that number.
    """
    made = _files(version)
    ours = ", ".join(f"({file.version}, '{file.name}')" for file in made)
    applying = "".join(_FILE.format(version=file.version, file=file, sql=file.sql) for file in made)
    return in_schema(_SCRIPT.format(last=made[-1], lock=lock_name(schema), ours=ours, applying=applying), schema)


def drop(schema: str) -> str:
    """Return the statement that removes what such scripts have made, with every job, result and schedule in it."""
    return f"DROP SCHEMA IF EXISTS {check_schema(schema)} CASCADE"


def _files(version: int) -> tuple[Migration, ...]:
    known = migrations.files()
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        raise InvalidOption(f"to={version!r}: it is the number of a migration, from 1 to {known[-1].version}")
    if version > known[-1].version:
        raise InvalidOption(
            f"to={version}: the newest migration of this pgqueue is {known[-1]}. Install the pgqueue for which this "
            "revision was written, or a later one"
        )
    return known[:version]


# A name that is not there is an error only where it is used, so the table is read in a statement of its own.
_SCRIPT = """\
-- pgqueue up to {last}: what is missing is applied, a schema that is ahead is left as it is.
DO $revision$
DECLARE
    patience text := current_setting('lock_timeout');
    applied int[] := ARRAY[]::int[];
    other text;
    file text;
    detail text;
    hint text;
BEGIN
    IF patience = '0' THEN
        PERFORM set_config('lock_timeout', '60s', true);
    END IF;
    PERFORM pg_advisory_xact_lock(hashtextextended('{lock}', 0));
    IF patience = '0' THEN
        PERFORM set_config('lock_timeout', '5s', true);
    END IF;
    IF to_regclass('pgqueue.migration') IS NOT NULL THEN
        applied := ARRAY(SELECT version FROM pgqueue.migration);
        IF cardinality(applied) = 0 THEN
            RAISE EXCEPTION 'the table migration of schema % is empty: something has truncated it', 'pgqueue'
            USING HINT = 'pgqueue migrate says which rows were in it.';
        END IF;
        SELECT format('migration %s is %s there, and %s in this pgqueue', version, m.name, ours.name) INTO other
        FROM pgqueue.migration m JOIN (VALUES {ours}) AS ours (version, name) USING (version)
        WHERE m.name <> ours.name ORDER BY version LIMIT 1;
        IF FOUND THEN
            RAISE EXCEPTION 'schema % is not of this pgqueue: %. Nothing was changed', 'pgqueue', other
            USING HINT = 'Take another schema or database.';
        END IF;
    END IF;
    -- Without the handler an error would show the whole text of a file.
    BEGIN
{applying}
    EXCEPTION WHEN OTHERS OR query_canceled THEN
        GET STACKED DIAGNOSTICS detail = PG_EXCEPTION_DETAIL, hint = PG_EXCEPTION_HINT;
        RAISE EXCEPTION USING
            ERRCODE = SQLSTATE,
            MESSAGE = concat_ws('. ', format('migration %s failed and changed nothing: %s', file, SQLERRM),
                                nullif(detail, ''), nullif(hint, ''));
    END;
    PERFORM set_config('lock_timeout', patience, true);
END $revision$;
"""
_FILE = """\
    IF {version} <> ALL (applied) THEN
        file := '{file}';
        EXECUTE $file_{file}$
{sql}
        $file_{file}$;
    END IF;
"""
