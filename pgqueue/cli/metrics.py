"""`--metrics`: where worker and telemetry meet, which do not know each other."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pgqueue.databases import Database
from pgqueue.jobs.totals import Numbers

if TYPE_CHECKING:
    from pgqueue.telemetry.endpoint import Endpoint

log = logging.getLogger("pgqueue")


@contextmanager
def serving(bind: str | None) -> Iterator[Callable[[Callable[[], Future[Numbers]]], None]]:
    """Listen at once; the function that this gives begins to answer, with the numbers of who is asked.

    Without `bind` nothing is done, and nothing of telemetry is imported. Raises InvalidOption.
    """
    with _listening(bind) as endpoint:
        if endpoint is None:
            yield lambda ask: None
            return
        from pgqueue.telemetry.gauges import Reader
        from pgqueue.telemetry.scrape import Scrape

        reader = Reader()
        try:
            yield lambda ask: endpoint.serve(Scrape(ask, reader.read).text)
        finally:
            reader.close()


@contextmanager
def serving_many(bind: str | None) -> Iterator[Callable[[Mapping[Database, Callable[[], Future[Numbers]]]], None]]:
    """The same for several databases, each with the function that is asked for the numbers of its worker."""
    with _listening(bind) as endpoint:
        if endpoint is None:
            yield lambda asks: None
            return
        from pgqueue.telemetry.gauges import Reader
        from pgqueue.telemetry.scrape import Scrapes

        readers: list[Reader] = []

        def answer(asks: Mapping[Database, Callable[[], Future[Numbers]]]) -> None:
            made = {database.name: (ask, Reader(database.dsn)) for database, ask in asks.items()}
            readers.extend(reader for _, reader in made.values())
            endpoint.serve(Scrapes({name: (ask, reader.begin) for name, (ask, reader) in made.items()}).text)

        try:
            yield answer
        finally:
            for reader in readers:
                reader.close()


@contextmanager
def _listening(bind: str | None) -> Iterator[Endpoint | None]:
    if bind is None:
        yield None
        return
    from pgqueue.distribution import needs_extra

    with needs_extra("prometheus"):
        import pgqueue.telemetry.scrape  # noqa: F401 (looks whether the package is there)
    from pgqueue.telemetry.endpoint import Endpoint, address_of

    host, port = address_of(bind)
    endpoint = Endpoint(host, port)
    log.info("metrics are at http://%s:%d/metrics", f"[{host}]" if ":" in host else host or "*", endpoint.port)
    try:
        yield endpoint
    finally:
        endpoint.close()
