"""The versions of the application, each with its first start: what is compared before and since a deploy.

Called by the dashboard. One statement that only reads. A first start is kept for 30 days, and as long as a worker of
that version is there: so a mark does not move when workers are replaced.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from pgqueue.database.asking import asks, said, twin
from pgqueue.database.statements import Statement

LISTED_MOST = 200


@dataclass(frozen=True, slots=True)
class Version:
    """A version of the application, and when its first worker started."""

    version: str
    first_at: datetime
    """UTC, by the database's clock."""
    is_live: bool
    """Whether it has a worker that is not known to be dead."""


@asks
def versions(conn: object, limit: int = LISTED_MOST) -> Statement[list[Version]]:
    """Return the versions that have run lately, the newest first."""
    return said("versions_list", list[Version], n=limit)


aversions = twin(versions)
"""`versions` for async connections."""


def newest(found: Sequence[Version]) -> Version | None:
    """The version that counts as deployed last: after a roll back it is the one that has workers.

    >>> from datetime import UTC, datetime
    >>> at = datetime(2026, 1, 1, tzinfo=UTC)
    >>> old, bad = Version("v1", at, True), Version("v2", at.replace(day=2), False)
    >>> newest([bad, old]).version
    'v1'
    """
    return next((each for each in found if each.is_live), found[0] if found else None)


def brought(found: Sequence[Version], first_version: str | None) -> bool:
    """Whether what failed first in `first_version` is new in the newest version. An older one must be known, too."""
    last = newest(found)
    return last is not None and first_version == last.version and any(each.first_at < last.first_at for each in found)
