"""The job before and the job after, in the list from which a visitor came to the page of a job.

The link of a list has its filter, and where its page begins (`listed=1&state=failed`). The page of the job asks for a
stretch of the same list, of ids alone. A job that has left the list, such as one that was retried here, is followed by
the first job of that stretch: the forms of the page lead back to a stretch that begins where the job stood.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from pgqueue.admin.queries import JobInfo, asearch, place_of
from pgqueue.web.pages.jobs import APART, LISTED, criteria
from pgqueue.web.pages.page import Asked

LOOKED = 100
"""So many jobs of the list are looked at."""
BEHIND = 50
"""So many jobs before the one that is shown a link keeps in reach."""


@dataclass(frozen=True, slots=True)
class Neighbours:
    """The ids of the jobs beside this one, None where there is none, and the queries of links that keep the list."""

    before: int | None
    next: int | None
    list: str
    """The query of the list."""
    link: str
    """The query of a link to one of the jobs."""
    again: str
    """The query of a form: where the job stood."""


async def neighbours(asked: Asked) -> Neighbours | None:
    """The jobs beside the one that is shown; None if the visitor did not come from a list, or it cannot be read.

    Raises Problem for a filter that a list refuses.
    """
    if asked.value(LISTED[0]) != LISTED[1]:
        return None
    given = criteria(asked) | {"limit": LOOKED}
    found, _ = await asked.part_shared(lambda conn: asearch(conn, room=1, **given), "stretch", given)
    if found is None:
        return None
    filter = [part for part in asked.given if part[0] not in (*APART, LISTED[0], "limit")]
    jobs, here, began = found.jobs, _place(found.jobs, asked.id), asked.value("after")
    if here == 0 and began is not None:  # a link has lost those before it: the head of the list may have them
        first = given | {"after": None}
        head, _ = await asked.part_shared(lambda conn: asearch(conn, room=1, **first), "stretch", first)
        if head is not None and (place := _place(head.jobs, asked.id)) is not None:
            jobs, here, began = head.jobs, place, None
    if here is None:
        after = jobs[0].id if jobs else None
        return Neighbours(None, after, urlencode(filter), *[_query(filter, began)] * 2)
    return Neighbours(
        jobs[here - 1].id if here else None,
        jobs[here + 1].id if here + 1 < len(jobs) else None,
        urlencode(filter),
        _query(filter, _begin(jobs, here - BEHIND, given) or began),
        _query(filter, _begin(jobs, here - 1, given) or began),
    )


def _place(jobs: Sequence[JobInfo], id: int) -> int | None:
    return next((n for n, job in enumerate(jobs) if job.id == id), None)


def _begin(jobs: Sequence[JobInfo], place: int, given: dict[str, Any]) -> str | None:
    """A stretch that begins behind the job at this place; None: before the first one."""
    found = place_of(jobs[place], **given) if place >= 0 else None
    return None if found is None else str(found)


def _query(filter: Sequence[tuple[str, str]], after: str | None) -> str:
    return urlencode([LISTED, *filter, *([] if after is None else [("after", after)])])
