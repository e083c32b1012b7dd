"""Which orders are being carried out, and what is answered when they are: between the keeper and its connection.

There is a connection from the first process that announces itself: the processes know the database, for they know the
code and what it configures; we do not.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from pgqueue.sessions import Link
from pgqueue.supervisor.fleet import Fleet
from pgqueue.supervisor.orders import Order, Orders, Standing
from pgqueue.supervisor.pipe import Message


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
