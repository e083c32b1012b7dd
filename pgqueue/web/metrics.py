"""`/metrics` of the dashboard: the gauges of the database for Prometheus. It is no page: nothing is rendered as HTML.

The dashboard reads them for itself, whichever worker leads, and at most about once a second. With several databases
each series has the name of its own as a label, as those of workers have. All are read at the same time. One that does
not answer in time has no series: an alert sees that they are missing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from starlette.responses import Response

from pgqueue.database import steps
from pgqueue.distribution import needs_extra
from pgqueue.jobs.totals import Sample
from pgqueue.telemetry.gauges import gauges
from pgqueue.web import rendering
from pgqueue.web.connections import Connections
from pgqueue.web.question import Question

ANSWER_SECONDS = 2.0
"""So long several databases are waited for."""


class Metrics:
    """The gauges of one database, read over these connections. `name`: that of the database, if there are several."""

    def __init__(self, connections: Connections, name: str | None = None) -> None:
        self.name = name
        self._connections = connections
        self._samples = Question(self._read)

    async def samples(self, seconds: float | None) -> Sequence[Sample] | Exception:
        """What the gauges say, or why they do not say it within so many seconds."""
        try:
            return await self._samples.answer(seconds)
        except Exception as error:  # whatever it is: the other databases are shown
            return error

    async def close(self) -> None:
        """Ask no more."""
        await self._samples.close()

    async def _read(self) -> Sequence[Sample]:
        schema = self._connections.config().schema
        return await self._connections.read(lambda conn: steps.adrive(conn, gauges(schema), {}))


async def answer(accept: str, of: Sequence[Metrics]) -> Response:
    """The gauges of these in the format of this Accept header. Raises Error without the extra `prometheus`; the failure
    of the first database, if none answers."""
    with needs_extra("prometheus"):
        from pgqueue.telemetry.scrape import exposition
    seconds = ANSWER_SECONDS if len(of) > 1 else None
    found = dict(zip(of, await asyncio.gather(*(each.samples(seconds) for each in of)), strict=True))
    said = [(each.name, samples) for each, samples in found.items() if not isinstance(samples, Exception)]
    if not said:
        raise next(error for error in found.values() if isinstance(error, Exception))
    text, kind = exposition(accept, said)
    return Response(text, 200, rendering.HEADERS | {"content-type": kind})
