"""Orders: what the supervisor says to the database and hears from it, over one connection.

Every message listens, sends the heartbeat and reads what is new, so nothing is lost by a broken connection; NOTIFY only
makes it quick, and without one orders are found with the next heartbeat. The database being away changes nothing for
the processes: they are kept, and what was to be said is said when it is back.

If a worker's process has ended, the worker is rescued at once, without waiting for its lease. That is safe because
`waitpid` has said so: it cannot claim or complete any more, except by a message that the server had already. So its
sessions are ended first, and its row is locked against that claim (`rescue`). One that had beaten at the last moment is
read again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from psycopg import sql

from pgqueue.database.backoff import Backoff
from pgqueue.database.sessions import Link, Session
from pgqueue.database.statements import Statement
from pgqueue.worker.liveness.rescue import Rescue

log = logging.getLogger("pgqueue")


ORDERS = ":orders"
"""The channel on which supervisors hear that there is an order."""
HEARTBEAT_SECONDS = 5.0
OUTAGE_MOST = 5.0


@dataclass(frozen=True, slots=True)
class Order:
    """What a supervisor is told: restart, quiet, or scale to `size`."""

    id: int
    kind: str
    size: int | None


@dataclass(frozen=True, slots=True)
class SupervisorStatus:
    """What the database is told of the supervisor, with the ids of its workers."""

    size: int
    active: int
    state: str
    problem: str | None
    workers: tuple[int, ...]


class Orders:
    """Speaks to the database over one session; `told` gets each order once, `status` is asked before each heartbeat."""

    def __init__(
        self,
        link: Link,
        *,
        listen: bool,
        notify: bool,
        told: Callable[[Order], None],
        status: Callable[[], SupervisorStatus],
    ) -> None:
        self.id: int | None = None
        """Of our row."""
        self._session = Session(link, "supervisor")
        self._rescue = Rescue(self._session, notify=notify, rescued=lambda: None)
        self._listen, self._notify = listen, notify
        self._told, self._status = told, status
        self._dead: set[int] = set()
        self._known: set[int] = set()
        """Orders that were told, and are not written down as done."""
        self._done: dict[int, str | None] = {}
        self._wake = asyncio.Event()
        self._said: SupervisorStatus | None = None

    def status_changed(self) -> None:
        """The supervisor's status has changed, or may have."""
        if self._status() != self._said:
            self._wake.set()

    def dead(self, workers: Iterable[int]) -> None:
        """The process of these workers has ended."""
        self._dead.update(workers)
        self._wake.set()

    def done(self, order: int, problem: str | None = None) -> None:
        """This order is carried out, or cannot be."""
        self._done[order] = problem
        self._wake.set()

    async def run(self) -> None:
        """Speak until cancelled, whatever the database answers."""
        backoff = Backoff(most=OUTAGE_MOST)
        while True:
            try:
                self._wake.clear()
                await self._round()
                backoff.succeeded()
            except Exception as error:
                pause = backoff.pause()
                log.warning("supervisor: %s; trying again in %.2f s, the processes go on", str(error).strip(), pause)
                await asyncio.sleep(pause)
                continue
            await self._pause()

    async def leave(self) -> None:
        """Say what there is still to say, and sign off."""
        try:
            async with asyncio.timeout(5):
                await self._give_back()
                if self.id is not None:
                    await self._session.run(*self._outcomes(), self._statement("orders_leave", id=self.id))
        except Exception as error:
            log.warning("the supervisor could not sign off: %s", str(error).strip() or type(error).__name__)
        await self._session.close()

    async def _round(self) -> None:
        # What died first: it is in a hurry.
        await self._give_back()
        if self.id is None:
            await self._register()
        self._said = status = self._status()
        outcomes = self._outcomes()
        also = {"problem": status.problem, "workers": list(status.workers)}
        heartbeat = self._statement("orders_heartbeat", id=self.id, **_row(status), **also)
        orders = self._statement("orders_read", id=self.id, known=list(self._known))
        *_, rows, new = await self._session.run(*self._listening(), *outcomes, heartbeat, orders)
        for statement in outcomes:
            self._written(statement)
        if not rows:
            self.id = None
            self._wake.set()
        for order in (Order(*row) for row in sorted(new)):
            self._known.add(order.id)
            self._told(order)

    def _written(self, outcome: Statement[Any]) -> None:
        order: Any = outcome.params["id"]
        del self._done[order]
        self._known.discard(order)

    async def _register(self) -> None:
        about = {"host": socket.gethostname(), "pid": os.getpid(), **_row(self._status())}
        [[(self.id,)], _] = await self._session.run(
            self._statement("orders_register", **about), self._statement("orders_forget")
        )

    def _outcomes(self) -> list[Statement[Any]]:
        return [
            self._statement("orders_done", id=order, problem=problem, notify=self._notify)
            for order, problem in self._done.items()
        ]

    async def _give_back(self) -> None:
        while self._dead:
            asked = sorted(self._dead)
            [rows] = await self._session.run(self._statement("orders_dead", workers=asked))
            for worker_id, beat in rows:
                await self._rescue.rescue(worker_id, beat, "has no process any more")
            # Those that were read are looked at again, until none of them is found alive.
            self._dead.difference_update(set(asked) - {worker_id for worker_id, _ in rows})

    async def _pause(self) -> None:
        waits: list[asyncio.Future[Any]] = [asyncio.ensure_future(self._wake.wait())]
        if self._listen:
            waits.append(asyncio.ensure_future(self._session.stirs()))
        await asyncio.wait(waits, timeout=HEARTBEAT_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        for each in waits:
            each.cancel()
        await asyncio.gather(*waits, return_exceptions=True)

    def _listening(self) -> list[Statement[Any]]:
        if not self._listen:
            return []
        channel = sql.Identifier(f"{self._session.link.schema}.{ORDERS}")
        return [Statement(sql.SQL("LISTEN {}").format(channel).as_string(), {}, list)]

    def _statement(self, name: str, **params: object) -> Statement[Any]:
        return self._session.link.statement(name, **params)


def _row(status: SupervisorStatus) -> dict[str, object]:
    return {"size": status.size, "active": status.active, "state": status.state}
