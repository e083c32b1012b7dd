"""Names to choose from where jobs are looked for: queues, tasks, classes of errors. None of them is complete.

Called by the dashboard. One statement that only reads, and looks at no job.
"""

from __future__ import annotations

from dataclasses import dataclass

from pgqueue.database.asking import asks, said, twin
from pgqueue.database.statements import Statement


@dataclass(frozen=True, slots=True)
class KnownNames:
    """The queues and tasks of live workers, the tasks that have failed lately, and with which errors."""

    queues: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()


@asks
def known_names(conn: object, limit: int) -> Statement[KnownNames]:
    """Return `limit` names of each kind at most."""
    return said("known_names_list", KnownNames, n=limit)


aknown_names = twin(known_names)
"""`known_names` for async connections."""
