"""`/metrics` of the dashboard: the gauges of the database for Prometheus. It is no page: nothing is rendered as HTML.

The dashboard reads them for itself, whichever worker leads, and at most about once a second. With several databases
each series has the name of its own as a label, as those of workers have. All are read at the same time. One that does
not answer in time has no series: an alert sees that they are missing. What is in time Prometheus says with its scrape.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from starlette.responses import Response

from pgqueue.database import steps
from pgqueue.distribution import needs_extra
from pgqueue.jobs.totals import Sample
from pgqueue.telemetry.gauges import gauges
from pgqueue.web import rendering
from pgqueue.web.connections import Connections
from pgqueue.web.question import Question

ANSWER_SECONDS = 8.0
"""So long databases are waited for. Prometheus waits for 10 s, unless it says something else."""
SCRAPE_TIMEOUT = "x-prometheus-scrape-timeout-seconds"
"""The header of a scrape that says so. What the database has said must be sent within it, too."""
SENDING_SECONDS = 0.5


class Metrics:
    """The gauges of one database, read over these connections. `name`: that of the database, if there are several."""

    def __init__(self, connections: Connections, name: str | None = None) -> None:
        self.name = name
        self._connections = connections
        self._samples = Question(self._read)

    async def samples(self, seconds: float) -> Sequence[Sample] | Exception:
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


async def answer(headers: Mapping[str, str], of: Sequence[Metrics]) -> Response:
    """The gauges of these in the format that these headers accept.

    Raises Error without the extra `prometheus`; the failure of the first database, if none answers.
    """
    with needs_extra("prometheus"):
        from pgqueue.telemetry.scrape import exposition
    seconds = _patience(headers.get(SCRAPE_TIMEOUT, ""))
    found = dict(zip(of, await asyncio.gather(*(each.samples(seconds) for each in of)), strict=True))
    said = [(each.name, samples) for each, samples in found.items() if not isinstance(samples, Exception)]
    if not said:
        raise next(error for error in found.values() if isinstance(error, Exception))
    text, kind = exposition(headers.get("accept", ""), said)
    return Response(text, 200, rendering.HEADERS | {"content-type": kind})


def _patience(timeout: str) -> float:
    """So long an answer may take, if this is the timeout of the scrape."""
    try:
        seconds = float(timeout)
    except ValueError:
        return ANSWER_SECONDS
    return max(SENDING_SECONDS, min(seconds - SENDING_SECONDS, ANSWER_SECONDS))
