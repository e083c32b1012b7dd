"""Raising the fence: from then on no session of the target with a lower epoch delivers. Called by `QueueTarget`.

**The naive version** waits until the fence is free. But a session of the target holds it for ever if the rest of its
message never comes: its relay was stopped, or the line is dead. None of the server's timeouts counts there.

**Why the session that holds it may be ended.**

1. Only the session that has the source's lock comes here, and a ping shows that it still has it. So the one that is
   ended belongs to a relay that cannot delete any more.
2. What it had not committed is undone with it, and its rows are still in the outbox: they are delivered anew.
3. It may have committed just before. Then the memory has its rows, so they come no second time. It may even be ended
   while its COMMIT waits for a standby: raising the fence is a later commit, and waits for the same standby.
4. Its end is waited for, and then the fence is raised as ever: what decides is the row, not that a session was ended.

**Why no other session is ended.** A pid and its start name the session that has raised the fence last, but a pooler may
have lent it to another client since. So the session is found by the transaction that is in the row: it holds the fence
now. And it must be a relay's: it has raised the fence, or bears the name of a relay's session.
"""

from __future__ import annotations

import logging
from typing import Any

import psycopg

from pgqueue.database.sessions import BEGIN, COMMIT, ROLLBACK, ending
from pgqueue.database.statements import Statement
from pgqueue.errors import Error
from pgqueue.relay.session import Session
from pgqueue.relay.source import Source

log = logging.getLogger("pgqueue")


class Fenced(Error):
    """Another session of a relay delivers the jobs of this outbox now."""


class Held(Error):
    """A session that cannot be ended holds the fence."""


async def raise_fence(session: Session, source: Source) -> int:
    """Raise the fence with a new epoch, and return that; end the session that holds the fence and does not go on."""
    [[(seen,)]] = await session.ask(session.statement("target_epoch", source=source.name))
    epoch = await source.draw(seen)
    rise = session.statement("target_raise", source=source.name, epoch=epoch)
    raised = await _try(session, rise)
    if raised is None:
        await _end_holder(session, source)
        raised = await _try(session, rise)
    if raised is None:
        raise Held("the fence of this outbox is held by a transaction in the queue's database that is no relay's")
    if not raised:
        raise Fenced(f"a session with a higher epoch than {epoch} delivers the jobs of this outbox")
    return epoch


async def _try(session: Session, rise: Statement[Any]) -> bool | None:
    """Whether the fence was raised; None if another transaction has held it for as long as `lock_timeout`, 2 s."""
    try:
        [_, raised, _] = await session.ask(BEGIN, rise, COMMIT)
    except psycopg.errors.LockNotAvailable:
        await session.ask(ROLLBACK)
        return None
    return bool(raised)


async def _end_holder(session: Session, source: Source) -> None:
    """End the session that holds the fence, and wait until it has ended. Raises Held if that cannot be."""
    await source.ping()
    [found] = await session.ask(session.statement("target_holder", source=source.name))
    for pid, began, role, of_relay in found:
        why = "is no relay's"
        if of_relay:
            [rows] = await session.ask(ending(session.link, (pid, began)))
            if rows in ([], [(True,)]):  # it was gone, or is now
                log.warning(
                    "session %d of the queue held the fence of outbox %s and stood still: ended", pid, source.name
                )
                continue
            why = "may not be ended by this role" if rows == [(None,)] else "has not ended in 5 s"
        raise Held(
            f"session {pid} of role {role} holds the fence of this outbox in the queue's database, and {why}. "
            f"If it does not go on, run SELECT pg_terminate_backend({pid}) there"
        )
