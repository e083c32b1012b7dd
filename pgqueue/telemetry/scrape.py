"""The text of one scrape: asks for the numbers, reads the gauges if this process leads, and writes them down.

Called from threads of an endpoint. A worker pays for a scrape with one copy of its counts. If it does not answer,
because a handler blocks its loop, what it has said before is shown. Scrapes within a second get the same text.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, wait
from dataclasses import dataclass, replace

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric as Family
from prometheus_client.exposition import choose_encoder

from pgqueue.jobs.totals import Numbers, Sample
from pgqueue.steady_clock import monotonic
from pgqueue.telemetry.metrics import Part, families

ANSWER_SECONDS = 3.0
"""A supervisor waits for its processes for less than that."""
SAME_SECONDS = 1.0
GAUGES_SECONDS = 1.5
"""So long the gauges of several databases are waited for."""

Ask = Callable[[], "Future[Numbers]"]
Read = Callable[[bool], Sequence[Sample]]
Begin = Callable[[bool], "Future[Sequence[Sample]]"]


def exposition(accept: str, gauges: Iterable[tuple[str | None, Iterable[Sample]]]) -> tuple[bytes, str]:
    """The gauges of these databases, in the format that this Accept header prefers, and its content type.

    Each has its name first; None if it has none, as where there is one database.
    """
    return _encoded(accept, families([Part(None, samples, name) for name, samples in gauges]))


def _encoded(accept: str, made: Iterable[Family]) -> tuple[bytes, str]:
    encode, kind = choose_encoder(accept)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(list(made)))
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
                self._texts[kind] = _encoded(accept, families([Part(self._numbers, self._gauges)]))
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


class Scrapes:
    """The same for several databases, whose names are a label of each series. Each is asked as in `Scrape`, all of them
    at the same time: one that is away costs no more time than all of them."""

    def __init__(self, sources: Mapping[str, tuple[Ask, Begin]]) -> None:
        self._sources = sources
        self._turn = threading.Lock()
        self._numbers = {name: Numbers() for name in sources}
        self._gauges: dict[str, Sequence[Sample]] = {}
        self._at = -SAME_SECONDS

    def text(self, accept: str) -> tuple[bytes, str]:
        """The text for this Accept header, and its content type."""
        with self._turn:
            if monotonic() >= self._at + SAME_SECONDS:
                self._look()
                self._at = monotonic()
            parts = [Part(numbers, self._gauges[name], name) for name, numbers in self._numbers.items()]
            return _encoded(accept, families(parts))

    def _look(self) -> None:
        asked = {name: ask() for name, (ask, _) in self._sources.items()}
        wait(asked.values(), ANSWER_SECONDS)
        for name, answer in asked.items():
            if answer.done() and not answer.cancelled():
                self._numbers[name] = answer.result()
            else:
                answer.cancel()
                self._numbers[name] = replace(self._numbers[name], leads=False, gauges=())
        reading = {name: begin(self._numbers[name].leads) for name, (_, begin) in self._sources.items()}
        wait(reading.values(), GAUGES_SECONDS)
        self._gauges = {name: read.result() if read.done() else () for name, read in reading.items()}
