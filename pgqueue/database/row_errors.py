"""Whether the server's error is about the row that was sent. Its SQLSTATE alone does not tell.

54000 stands for a text that is too long, for a full NOTIFY queue, and for a server that has run out of transaction ids.
A trigger of the application may raise any state. If a row is given up for such an error, it is lost for good, although
nothing is wrong with it.

1. A value that cannot be sent is the row's own. The error has no SQLSTATE: it was raised here.
2. A constraint is about the row if it is one of our tables' (class 23). An error for want of a partition names none.
3. So is a unique key, but for the id of a new job (`IDS`): a sequence that lags draws another one the next time.
4. After any other error the server is asked to read the row's values, and nothing else. That statement writes nothing,
   so it meets no trigger, no NOTIFY and no limit on writing. If it is refused, too, the row can never be stored.
5. Otherwise the row is right, and is kept until it can be written.

Used where a row that the server refuses is given up: an outcome of a job, a schedule. And where many rows are moved at
once, and one that is refused must not keep the others: a claim, an unblocking, a promotion.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import psycopg

from pgqueue.database.notify_queue import is_full
from pgqueue.database.triggers import trigger_of
from pgqueue.plain_text import plural

DATA, CONSTRAINT, LIMIT = "22", "23", "54"
"""Classes of SQLSTATEs that may be about the values of a row."""
IDS = frozenset(f"job_{state}_id" for state in ("available", "scheduled", "blocked", "running"))
"""The unique indexes on the ids of jobs."""
_INSERTS_ID = re.compile(rf"\b({'|'.join(sorted(IDS))})\b")


class Kept(psycopg.IntegrityError):
    """Rows, or a leaf, that should go and stay: the server has refused housekeeping for them. The others are gone.
    `context` is where the server met it."""

    def __init__(self, said: str, context: str | None = None) -> None:
        super().__init__(said)
        self.context = context


def require_gone(table: str, answer: Sequence[Any]) -> None:
    """Raise Kept if the answer of `forget_rows` says that rows of this table were refused."""
    _, refused, error, context = answer
    if refused:
        raise Kept(f"a DELETE in {table} is refused for {plural(refused, 'row', 'rows')}: {error}", context)


def may_be_about_row(error: BaseException) -> bool:
    """Whether the error may be about a row: then it is found which row that is, by sending fewer at once."""
    if isinstance(error, UnicodeError):
        return True
    if not isinstance(error, psycopg.Error) or is_full(error):
        return False
    if error.sqlstate is None:
        return isinstance(error, psycopg.DataError)
    return error.sqlstate.startswith((DATA, CONSTRAINT, LIMIT)) and not isinstance(
        error, psycopg.errors.UniqueViolation
    )


def refuses_row(error: BaseException) -> bool:
    """Whether the server has refused a statement that moves rows, perhaps for the values of one: it has moved none.

    A value whose stored parts are damaged is refused, too. A doubled id and a trigger of the application are not meant.
    """
    if not isinstance(error, psycopg.Error) or error.sqlstate is None or trigger_of(error) is not None:
        return False
    if isinstance(error, psycopg.errors.DataCorrupted):
        return not str(error).startswith("pgqueue: ")  # a statement of ours that checks itself
    return may_be_about_row(error)


def meets_open_id(error: BaseException) -> bool:
    """Whether another transaction, which is open, has inserted a row of this id, so that the lock was not had in time.

    The server names the index that it was inserting into, as the context of the error. A lock on a row, or on a table,
    has no such context: it says nothing of an id.
    """
    if not isinstance(error, psycopg.errors.LockNotAvailable) or trigger_of(error) is not None:
        return False
    return _INSERTS_ID.search(error.diag.context or "") is not None


def refuses_move(error: BaseException) -> bool:
    """As `refuses_row`, or the row is left where it is, and not given up: a trigger of the application has raised, or
    an open transaction has the row's id."""
    if refuses_row(error) or meets_open_id(error):
        return True
    return isinstance(error, psycopg.Error) and error.sqlstate is not None and trigger_of(error) is not None


def is_about_row(error: BaseException, schema: str) -> bool | None:
    """Whether this error is about the only row that was sent; None if the server has to be asked to read it."""
    if not isinstance(error, psycopg.Error) or error.sqlstate is None:
        return True
    if error.diag.constraint_name in IDS:
        return False
    if error.sqlstate.startswith(CONSTRAINT):
        named = error.diag.constraint_name or error.diag.column_name
        return error.diag.schema_name == schema and named is not None
    return None
