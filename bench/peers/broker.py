"""A server that keeps jobs in place of PostgreSQL: Redis or RabbitMQ, one of each kind for a run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol


class Broker(Protocol):
    """What a stage asks of it."""

    @property
    def url(self) -> str: ...

    @property
    def pid(self) -> int: ...

    def empty(self) -> None:
        """Forget everything."""

    def numbers(self, commands: Iterable[str]) -> list[int]:
        """What these commands have answered."""

    def close(self) -> None:
        """End it, and all that it has started."""
