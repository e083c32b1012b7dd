"""Whether workers are well: one look, for probes. Alone in its module, so that a probe pays for nothing else."""

from __future__ import annotations

from dataclasses import dataclass

from pgqueue import connections
from pgqueue.config import config
from pgqueue.statements import Statement, text


@dataclass(frozen=True, slots=True)
class Health:
    """How the workers of a host are. `well`: one has given a sign of life within its lease, or all were told to be
    quiet; `ready`: one takes jobs, too."""

    host: str
    well: bool
    ready: bool


def health(conn: object, host: str) -> Health:
    """Return how the workers of this host are. One row is read."""
    sql = text("supervisors_health", config().schema)
    return connections.run(conn, Statement(sql, {"host": host}, lambda rows: Health(host, *rows[0])))
