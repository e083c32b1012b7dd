"""The supervisor's connection to the database: its heartbeat, the orders it gets, and their results.

Every message listens, sends the heartbeat and reads new orders: a broken connection loses nothing. NOTIFY only makes it
quick: without it orders are found with the next heartbeat. While the database is away, the processes go on, and
results are kept until it is back.

If a worker's process has ended, its jobs are rescued at once, without waiting for its lease. This is safe because
`waitpid` has reported the end:
1. The process can send nothing any more. Only a message that the server had before may still claim or complete.
2. Rescue ends the worker's sessions first, and locks its row against a claim (`rescue`).
3. If a heartbeat had come at the last moment, the row is read again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from pgqueue.database.backoff import LOST_SECONDS, Backoff, described, is_loss, one_line
from pgqueue.database.row_errors import Kept, require_gone
from pgqueue.database.sessions import Link, Session
from pgqueue.database.statements import Statement
from pgqueue.worker.liveness.rescue import Rescue

log = logging.getLogger("pgqueue")


ORDERS = ":orders"
"""The channel that notifies supervisors of a new order."""
HEARTBEAT_SECONDS = 5.0
OUTAGE_MOST = 5.0


@dataclass(frozen=True, slots=True)
class Order:
    """An order to a supervisor: restart, quiet, or scale to `size`."""

    id: int
    kind: str
    size: int | None


@dataclass(frozen=True, slots=True)
class SupervisorStatus:
    """The supervisor's state as written to the database, with the ids of its workers."""

    size: int
    active: int
    state: str
    problem: str | None
    workers: tuple[int, ...]


class Orders:
    """Speaks to the database over one session. `told` gets each order once; `status` is read before each heartbeat."""

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
        """The id of our row."""
        self._session = Session(link, "supervisor")
        self._rescue = Rescue(self._session, notify=notify, rescued=lambda: None)
        self._listen, self._notify = listen, notify
        self._told, self._status = told, status
        self._dead: set[int] = set()
        self._known: set[int] = set()
        """Orders that were passed on, and are not yet stored as done."""
        self._done: dict[int, str | None] = {}
        self._wake = asyncio.Event()
        self._said: SupervisorStatus | None = None

    @property
    def rescued(self) -> int:
        """How many jobs were given back here."""
        return self._rescue.jobs

    def status_changed(self) -> None:
        """The supervisor's status has changed, or may have."""
        if self._status() != self._said:
            self._wake.set()

    def dead(self, workers: Iterable[int]) -> None:
        """The process of these workers has ended: rescue their jobs."""
        self._dead.update(workers)
        self._wake.set()

    def done(self, order: int, problem: str | None = None) -> None:
        """This order is done; with a `problem` it could not be carried out."""
        self._done[order] = problem
        self._wake.set()

    async def run(self) -> None:
        """Send heartbeats and read orders until cancelled. No error of the database ends it."""
        backoff = Backoff(most=OUTAGE_MOST)
        while True:
            try:
                self._wake.clear()
                await self._round()
                backoff.succeeded()
            except Exception as error:
                pause, level = backoff.pause(), logging.WARNING
                if is_loss(error):  # the session has said so, and paces its connections
                    pause, level = LOST_SECONDS, logging.DEBUG
                log.log(level, "supervisor: %s; trying again in %.2f s, the processes go on", one_line(error), pause)
                await asyncio.sleep(pause)
                continue
            await self._pause()

    async def leave(self) -> None:
        """Write what is left to write, and remove our row."""
        try:
            async with asyncio.timeout(5):
                await self._give_back()
                if self.id is not None:
                    await self._session.run(*self._outcomes())
                    await self._session.run(self._statement("orders_leave", id=self.id))  # may be refused by itself
        except Exception as error:
            log.warning("the supervisor could not sign off: %s", one_line(error))
        await self._session.close()

    async def _round(self) -> None:
        # Ended processes come first, because their jobs wait.
        await self._give_back()
        if self.id is None:
            await self._register()
        self._said = status = self._status()
        outcomes = self._outcomes()
        also = {"problem": status.problem, "workers": list(status.workers)}
        heartbeat = self._statement("orders_heartbeat", id=self.id, **_row(status), **also)
        orders = self._statement("orders_read", id=self.id, known=list(self._known))
        await self._session.ready()
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
        [[(self.id,)], [supervisors, orders]] = await self._session.run(
            self._statement("orders_register", **about), self._statement("orders_forget")
        )
        for table, forgotten in (("supervisor", supervisors), ("supervisor_order", orders)):
            try:
                require_gone(table, forgotten)
            except Kept as error:
                log.warning("supervisor: %s", described(error))

    def _outcomes(self) -> list[Statement[Any]]:
        return [
            self._statement("orders_done", id=order, problem=problem, notify=self._notify)
            for order, problem in self._done.items()
        ]

    async def _give_back(self) -> None:
        while self._dead:
            asked = sorted(self._dead)
            [rows] = await self._session.run(self._statement("orders_dead", workers=asked))
            await self._rescue.rescue_all(rows, "has no process any more")
            # Workers that had a live row are looked up again, until none of them has one.
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
        if not self._listen or self._session.identity is None:  # through a pooler it would stay with any session
            return []
        return [self._session.link.listen(ORDERS)]

    def _statement(self, name: str, **params: object) -> Statement[Any]:
        return self._session.link.statement(name, **params)


def _row(status: SupervisorStatus) -> dict[str, object]:
    return {"size": status.size, "active": status.active, "state": status.state}
