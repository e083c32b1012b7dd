"""What a visitor is told of an error: a status, a title and a sentence. Never a traceback, never a password."""

from __future__ import annotations

import logging

import psycopg
from psycopg_pool import PoolTimeout

from pgqueue.config import safe
from pgqueue.database.backoff import hides_rows, without_values
from pgqueue.database.foreign_errors import said
from pgqueue.errors import (
    BulkNotFound,
    Error,
    FlowNotFound,
    InvalidArguments,
    InvalidOption,
    JobNotFound,
    LimitNotFound,
    NotConfigured,
    ScheduleNotFound,
    SchemaBehind,
    SchemaForeign,
    SchemaMissing,
    SchemaTooNew,
    UnsupportedServer,
)
from pgqueue.manual import Symptom, at_night, page
from pgqueue.plain_text import plain
from pgqueue.web.connections import STATEMENT_SECONDS, WAIT_SECONDS

log = logging.getLogger("pgqueue")

GRANTS = page("dashboard", "rights-in-the-database")
AWAY = f"See {at_night(Symptom.FAILED_OVER)}"


class Problem(Exception):
    """A request that is answered with this status, a title and a sentence. `wait`: for Retry-After, in seconds."""

    def __init__(self, status: int, title: str, text: str, wait: float = 0.0) -> None:
        super().__init__(text)
        self.status, self.title, self.text, self.wait = status, title, text, wait


def problem_of(error: Exception) -> Problem:
    """What is said of this error. One that is neither of the request nor of the database is logged."""
    match error:
        case Problem():
            return error
        case JobNotFound():
            return Problem(404, "No such job", plain(str(error)))
        case FlowNotFound():
            return Problem(404, "No such flow", plain(str(error)))
        case BulkNotFound():
            return Problem(404, "No such operation", plain(str(error)))
        case LimitNotFound():
            return Problem(404, "No such limit", plain(str(error)))
        case ScheduleNotFound():
            return Problem(404, "No such schedule", plain(str(error)))
        case InvalidOption() | InvalidArguments():
            return Problem(400, "This cannot be asked", plain(str(error)))
        case psycopg.DataError():
            return Problem(400, "This cannot be asked", _line(error))
        case (
            SchemaMissing() | SchemaForeign() | SchemaBehind() | SchemaTooNew() | UnsupportedServer() | NotConfigured()
        ):
            return Problem(503, "The database is not ready", _line(error))
        case psycopg.errors.ReadOnlySqlTransaction():
            return Problem(503, "Nothing can be changed here", "This database only reads, as a standby does.")
        case psycopg.errors.QueryCanceled():
            text = f"The database took more than {STATEMENT_SECONDS} seconds for an answer. Ask for less."
            return Problem(503, "This takes too long", text, 5.0)
        case psycopg.errors.InsufficientPrivilege() if hides_rows(error):
            return Problem(503, "The database refuses this", without_values(error))
        case psycopg.errors.InsufficientPrivilege():
            return Problem(
                503,
                "The database refuses this",
                f"{_line(error)}; {GRANTS} says which",
            )
        case PoolTimeout():
            text = f"No connection of the dashboard became free within {WAIT_SECONDS:.0f} seconds. Try again."
            return Problem(503, "The dashboard is busy", text, 5.0)
        case TimeoutError():  # of a question that is still asked
            return Problem(503, "The database does not answer", f"It has not answered in time. {AWAY}", 5.0)
        case psycopg.OperationalError():
            return Problem(503, "The database cannot be reached", f"{_line(error)}. {AWAY}", 5.0)
        case psycopg.Error() | Error():
            return Problem(503, "The database refuses this", _line(error))
    log.error("the dashboard has failed", exc_info=error)
    return Problem(500, "The dashboard has failed", "This is an error in the dashboard. Its log says more.")


def _line(error: Exception) -> str:
    return safe(plain(" ".join(said(error).split()))) or type(error).__name__
