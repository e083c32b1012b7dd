"""The orders that are being carried out; reports each when it is done.

Stands between the supervisor, which acts, and `orders`, which speaks to the database. There are no orders until a
worker process has named its database.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from pgqueue.database.sessions import Link
from pgqueue.manual import Symptom, at_night
from pgqueue.supervisor.fleet import Fleet
from pgqueue.supervisor.orders import Order, Orders, SupervisorStatus
from pgqueue.supervisor.pipe import Message


class OpenOrders:
    """Takes orders. `told` carries out an order, and returns the generation of a restart."""

    def __init__(self, *, told: Callable[[Order], int], status: Callable[[], SupervisorStatus]) -> None:
        self._told, self._status = told, status
        self._orders: Orders | None = None
        self._open: dict[int, tuple[Order, int]] = {}

    @property
    def rescued(self) -> int:
        """How many jobs of ended processes were given back."""
        return 0 if self._orders is None else self._orders.rescued

    def connect(self, where: Message, serve: Callable[[Coroutine[Any, Any, None]], object]) -> None:
        """Connect to the database that a process has named, unless there is a connection already."""
        if self._orders is None:
            link = Link(where["listen_dsn"] or where["dsn"], where["schema"], where["prepare"])
            how = {"listen": where["listen_dsn"] is not None, "notify": where["notify"]}
            self._orders = Orders(link, told=self._take, status=self._status, **how)
            serve(self._orders.run())

    def dead(self, workers: Iterable[int]) -> None:
        """The process of these workers has ended: rescue their jobs."""
        if self._orders is not None:
            self._orders.dead(workers)

    def status_changed(self) -> None:
        """The supervisor's status may have changed."""
        if self._orders is not None:
            self._orders.status_changed()

    def answer(self, fleet: Fleet, *, empty: bool) -> None:
        """Report the orders that are done. `empty`: no process is left."""
        for number, (order, generation) in list(self._open.items()):
            over, problem = _outcome(order, generation, fleet, empty)
            if over and self._orders is not None:
                del self._open[number]
                self._orders.done(number, problem)

    async def leave(self) -> None:
        """Remove the supervisor's row."""
        if self._orders is not None:
            await self._orders.leave()

    def _take(self, order: Order) -> None:
        self._open[order.id] = (order, self._told(order))


def _outcome(order: Order, generation: int, fleet: Fleet, empty: bool) -> tuple[bool, str | None]:
    """Whether the order is over, and what prevented it."""
    if order.kind == "quiet":
        return (empty, None) if fleet.quieted else (True, "a restart came in between")
    if order.kind == "restart" and fleet.wanted < generation:
        return True, f"taken back: {fleet.problem or 'all were ordered to be quiet'}; see {at_night(Symptom.DEPLOY)}"
    if fleet.quieted:
        return True, None if order.kind == "scale" else "all were ordered to be quiet"
    if order.kind == "scale":
        return fleet.settled() or fleet.size != order.size, None
    return fleet.in_effect(generation), None
