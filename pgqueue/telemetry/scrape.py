"""The text of one scrape: asks for the numbers, reads the gauges if this process leads, and writes them down.

Called from threads of an endpoint. A worker pays for a scrape with one copy of its counts. If it does not answer,
because a handler blocks its loop, what it has said before is shown. Scrapes within a second get the same text.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, replace

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric as Family
from prometheus_client.exposition import choose_encoder

from pgqueue.jobs.totals import Numbers, Sample
from pgqueue.steady_clock import monotonic
from pgqueue.telemetry.metrics import families

ANSWER_SECONDS = 3.0
"""A supervisor waits for its processes for less than that."""
SAME_SECONDS = 1.0

Ask = Callable[[], "Future[Numbers]"]
Read = Callable[[bool], Sequence[Sample]]


def exposition(accept: str, numbers: Numbers | None, gauges: Iterable[Sample]) -> tuple[bytes, str]:
    """What is exported of these, in the format that this Accept header prefers, and its content type."""
    encode, kind = choose_encoder(accept)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(list(families(numbers, gauges))))
    return encode(registry), kind


@dataclass(frozen=True, eq=False)
class _Collector:
    """What a registry collects from."""

    families: Sequence[Family]

    def collect(self) -> Iterable[Family]:
        return self.families


class Scrape:
    """What is exported: the numbers that `ask` answers, and the gauges that `read` reads if they are the leader's.

    Without `ask` there are gauges only. From any thread.
    """

    def __init__(self, ask: Ask | None, read: Read) -> None:
        self._ask, self._read = ask, read
        self._turn = threading.Lock()
        self._numbers = None if ask is None else Numbers()
        self._gauges: Sequence[Sample] = ()
        self._at = -SAME_SECONDS
        self._texts: dict[str, tuple[bytes, str]] = {}

    def text(self, accept: str) -> tuple[bytes, str]:
        """The text for this Accept header, and its content type."""
        with self._turn:
            if monotonic() >= self._at + SAME_SECONDS:
                self._look()
                self._at = monotonic()
                self._texts.clear()
            _, kind = choose_encoder(accept)
            if kind not in self._texts:
                self._texts[kind] = exposition(accept, self._numbers, self._gauges)
            return self._texts[kind]

    def _look(self) -> None:
        if self._ask is None:
            self._gauges = self._read(True)
            return
        asked = self._ask()
        try:
            self._numbers = asked.result(ANSWER_SECONDS)
        except (TimeoutError, CancelledError):
            asked.cancel()
            assert self._numbers is not None
            self._numbers = replace(self._numbers, leads=False, gauges=())
        self._gauges = [*self._numbers.gauges, *self._read(self._numbers.leads)]
