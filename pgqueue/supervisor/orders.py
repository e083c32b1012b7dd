"""Orders: the supervisor's one connection to the database, and which of its orders are being carried out.

Every message listens, beats and reads what is new, so nothing is lost by a broken connection; NOTIFY only makes it
quick, and without one orders are found with the next beat. The database being away changes nothing for the processes:
they are kept, and what was to be said is said when it is back.

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
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any

from psycopg import sql

from pgqueue.database.backoff import Backoff
from pgqueue.database.sessions import Link, Session
from pgqueue.database.statements import Statement
from pgqueue.supervisor.fleet import Fleet
from pgqueue.supervisor.pipe import Message
from pgqueue.worker.liveness.rescue import Rescue

log = logging.getLogger("pgqueue")


ORDERS = ":orders"
"""The channel on which supervisors hear that there is an order."""
BEAT_SECONDS = 5.0
OUTAGE_MOST = 5.0


@dataclass(frozen=True, slots=True)
class Order:
    """What a supervisor is told: restart, quiet, or scale to `size`."""

    id: int
    kind: str
    size: int | None


@dataclass(frozen=True, slots=True)
class Standing:
    """How the supervisor stands, and the ids of its workers."""

    size: int
    active: int
    state: str
    problem: str | None
    workers: tuple[int, ...]


class Orders:
    """Speaks to the database over one session; `told` gets each order once, `standing` is asked before each beat."""

    def __init__(
        self, link: Link, *, listen: bool, notify: bool, told: Callable[[Order], None], standing: Callable[[], Standing]
    ) -> None:
        self.id: int | None = None
        """Of our row."""
        self._session = Session(link, "supervisor")
        self._rescue = Rescue(self._session, notify=notify, rescued=lambda: None)
        self._listen, self._notify = listen, notify
        self._told, self._standing = told, standing
        self._dead: set[int] = set()
        self._known: set[int] = set()
        """Orders that were told, and are not written down as done."""
        self._done: dict[int, str | None] = {}
        self._wake = asyncio.Event()
        self._said: Standing | None = None

    def news(self) -> None:
        """How we stand has changed, or may have."""
        if self._standing() != self._said:
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
        self._said = standing = self._standing()
        outcomes = self._outcomes()
        also = {"problem": standing.problem, "workers": list(standing.workers)}
        beat = self._statement("orders_beat", id=self.id, **_row(standing), **also)
        orders = self._statement("orders_read", id=self.id, known=list(self._known))
        *_, rows, new = await self._session.run(*self._listening(), *outcomes, beat, orders)
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
        about = {"host": socket.gethostname(), "pid": os.getpid(), **_row(self._standing())}
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
        await asyncio.wait(waits, timeout=BEAT_SECONDS, return_when=asyncio.FIRST_COMPLETED)
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


def _row(standing: Standing) -> dict[str, object]:
    return {"size": standing.size, "active": standing.active, "state": standing.state}


class Desk:
    """Takes orders. `told` does as an order says, and gives the generation of a restart."""

    def __init__(self, *, told: Callable[[Order], int], standing: Callable[[], Standing]) -> None:
        self._told, self._standing = told, standing
        self._orders: Orders | None = None
        self._open: dict[int, tuple[Order, int]] = {}

    def open(self, where: Message, serve: Callable[[Coroutine[Any, Any, None]], object]) -> None:
        """Connect to the database that a process has named, unless it was done."""
        if self._orders is None:
            link = Link(where["listen_dsn"] or where["dsn"], where["schema"], where["prepare"])
            how = {"listen": where["listen_dsn"] is not None, "notify": where["notify"]}
            self._orders = Orders(link, told=self._take, standing=self._standing, **how)
            serve(self._orders.run())

    def dead(self, workers: Iterable[int]) -> None:
        """The process of these workers has ended: rescue them."""
        if self._orders is not None:
            self._orders.dead(workers)

    def news(self) -> None:
        """How we stand may have changed."""
        if self._orders is not None:
            self._orders.news()

    def answer(self, fleet: Fleet, *, empty: bool) -> None:
        """Say which orders are carried out; `empty`: there is no process any more."""
        for number, (order, generation) in list(self._open.items()):
            over, problem = _outcome(order, generation, fleet, empty)
            if over and self._orders is not None:
                del self._open[number]
                self._orders.done(number, problem)

    async def leave(self) -> None:
        """Sign off."""
        if self._orders is not None:
            await self._orders.leave()

    def _take(self, order: Order) -> None:
        self._open[order.id] = (order, self._told(order))


def _outcome(order: Order, generation: int, fleet: Fleet, empty: bool) -> tuple[bool, str | None]:
    """Whether it is over, and what was in the way."""
    if order.kind == "quiet":
        return (empty, None) if fleet.quieted else (True, "a restart came in between")
    if order.kind == "restart" and fleet.wanted < generation:
        return True, f"taken back: {fleet.problem or 'told to be quiet'}"
    if fleet.quieted:
        return True, None if order.kind == "scale" else "told to be quiet"
    if order.kind == "scale":
        return fleet.settled() or fleet.size != order.size, None
    return fleet.in_effect(generation), None
