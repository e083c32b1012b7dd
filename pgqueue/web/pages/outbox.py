"""The outbox where there is one, and the relays that deliver to this queue: how far they are behind. It only reads.

An outbox lies in the database of an application. If that is the queue's own, its staged jobs and those that were put
aside are shown. Of other outboxes there is what their relays report to the queue.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from psycopg import AsyncConnection

from pgqueue.admin.bounded import cut_at
from pgqueue.admin.lag import Lag, alag, arelays, avisible
from pgqueue.relay.refused import REFUSED_MOST, RefusedRow, arefused
from pgqueue.web.pages.page import Asked, Page, plain
from pgqueue.web.redaction import HIDDEN


async def outbox(asked: Asked) -> Page:
    """The relays as items; the outbox of this database and its refused jobs beside them.

    The reason of a refusal may quote an argument, and which ones are hidden is not known here. So no reason is shown
    while anything is redacted.
    """
    relays = await asked.read(arelays)
    lag, refused = await asked.read(_here)
    if asked.redaction.active:
        refused = [replace(each, reason=HIDDEN) for each in refused]
    items = [plain(each) | {"is_silent": each.is_silent} for each in relays]
    view = {"shows_reasons": not asked.redaction.active}
    more = {"outbox": plain(lag), "refused": plain(refused), "refused_cut_at": cut_at(refused, REFUSED_MOST)}
    return Page("outbox.html", items, more, view)


async def _here(conn: AsyncConnection[Any]) -> tuple[Lag | None, list[RefusedRow]]:
    if not await avisible(conn):
        return None, []
    return await alag(conn), await arefused(conn)
