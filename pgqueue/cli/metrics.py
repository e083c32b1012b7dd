"""`--metrics`: where worker and telemetry meet, which do not know each other."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager

from pgqueue.jobs.totals import Numbers

log = logging.getLogger("pgqueue")


@contextmanager
def serving(bind: str | None) -> Iterator[Callable[[Callable[[], Future[Numbers]]], None]]:
    """Listen at once; the function that this gives begins to answer, with the numbers of who is asked.

    Without `bind` nothing is done, and nothing of telemetry is imported. Raises InvalidOption.
    """
    if bind is None:
        yield lambda ask: None
        return
    from pgqueue.distribution import needs_extra

    with needs_extra("prometheus"):
        from pgqueue.telemetry.scrape import Scrape
    from pgqueue.telemetry.endpoint import Endpoint, address_of
    from pgqueue.telemetry.gauges import Reader

    host, port = address_of(bind)
    reader, endpoint = Reader(), Endpoint(host, port)
    log.info("metrics are at http://%s:%d/metrics", f"[{host}]" if ":" in host else host or "*", endpoint.port)
    try:
        yield lambda ask: endpoint.serve(Scrape(ask, reader.read).text)
    finally:
        endpoint.close()
        reader.close()
