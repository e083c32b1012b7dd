"""The server refuses to end a job. Is that about what the job has said, or would it refuse any outcome?

Used by the completer, when the refused job is alone in its message. The SQLSTATE is not enough: 54000 stands for a text
that is too long, for a full NOTIFY queue, and for a server that has run out of transaction ids; a trigger of the
application may raise any of them. If the job is failed for such an error, it is lost for good, though it ran.

1. A text that cannot be sent is the job's own. The error has no SQLSTATE: it was raised here.
2. A constraint is about the row if it is one of our tables' (23).
3. After any other error the server is asked to read what the job has said, and nothing else (`question`). That
   statement writes no row, so it meets no trigger, no NOTIFY and no limit on writing. If it is refused, too, no server
   like this one will ever store the outcome.
4. Otherwise the outcome is right, and is kept until it can be written.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import psycopg

from pgqueue.client.job_parameters import deadline_of
from pgqueue.database.notify_queue import is_full
from pgqueue.database.statements import Statement, text
from pgqueue.jobs.outcomes import Cancelled, Completed, Failed, Handed, Outcome, Released, Retried

DATA, CONSTRAINT, LIMIT = "22", "23", "54"
"""Classes of SQLSTATEs that may be about the contents of a row."""


def may_be_contents(error: BaseException) -> bool:
    """Whether this may be about what a job has said: then it is found which job that is, by sending fewer at once."""
    if isinstance(error, UnicodeError):
        return True
    if not isinstance(error, psycopg.Error) or is_full(error):
        return False
    if error.sqlstate is None:
        return isinstance(error, psycopg.DataError)
    return error.sqlstate.startswith((DATA, CONSTRAINT, LIMIT)) and not isinstance(
        error, psycopg.errors.UniqueViolation
    )


def is_contents(error: BaseException, schema: str) -> bool | None:
    """Whether this error is about the row that was sent alone; None if the server has to be asked (`question`)."""
    if not isinstance(error, psycopg.Error) or error.sqlstate is None:
        return True
    if error.sqlstate.startswith(CONSTRAINT):
        named = error.diag.constraint_name or error.diag.column_name
        return error.diag.schema_name == schema and named is not None
    return None


def question(outcome: Outcome, schema: str) -> Statement[Any]:
    """The statement by which the server reads what this outcome says, and writes nothing."""
    jsons, texts, seconds = list[str](), list[str](), list[float]()
    for said in _contents(outcome):
        match said:
            case Completed(result, successors):
                jsons += _given([result])
                for new in successors:
                    jsons += _given([new.args, new.headers])
                    texts += _given([new.task, new.queue, new.lock_key, new.limit_key, new.rate_key])
                    seconds += _given([new.delay, deadline_of(new)[1]])
            case Retried(delay):
                seconds.append(delay)
            case _:
                pass
        problem = getattr(said, "problem", None)
        if problem is not None:
            texts += _given([problem.outcome, problem.error_type, problem.message, problem.traceback])
    return Statement(text("complete_read", schema), {"jsons": jsons, "texts": texts, "seconds": seconds}, list)


def _contents(outcome: Outcome) -> Iterable[Completed | Retried | Failed | Cancelled | Released]:
    if isinstance(outcome, Handed):
        return [outcome.otherwise]
    return [outcome] if isinstance(outcome, Completed | Retried | Failed | Cancelled | Released) else []


def _given(values: Iterable[Any]) -> list[Any]:
    return [value for value in values if value is not None]
