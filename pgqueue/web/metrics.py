"""`/metrics` of the dashboard: the gauges of the database for Prometheus. It is no page: nothing is rendered as HTML.

The dashboard reads them for itself, whichever worker leads, and at most about once a second.
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.responses import Response

from pgqueue.config import config
from pgqueue.database import steps
from pgqueue.distribution import needs_extra
from pgqueue.jobs.totals import Sample
from pgqueue.steady_clock import monotonic
from pgqueue.telemetry.gauges import gauges
from pgqueue.web import rendering
from pgqueue.web.connections import Connections

SAME_SECONDS = 1.0


class Metrics:
    """Answers scrapes over these connections."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._samples: Sequence[Sample] = ()
        self._at = -SAME_SECONDS

    async def answer(self, accept: str) -> Response:
        """The gauges in the format of this Accept header. Raises Error without the extra `prometheus`."""
        with needs_extra("prometheus"):
            from pgqueue.telemetry.scrape import exposition
        if monotonic() >= self._at + SAME_SECONDS:
            schema = config().schema
            self._samples = await self._connections.read(lambda conn: steps.adrive(conn, gauges(schema), {}))
            self._at = monotonic()
        text, kind = exposition(accept, None, self._samples)
        return Response(text, 200, rendering.HEADERS | {"content-type": kind})
