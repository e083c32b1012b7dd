"""One database of the dashboard: its connections, its streams, its gauges, and how it stands.

Made by `dashboard.py`, one for each database. What a request reads and changes goes through the source that its path
names, and through nothing else.

Why a request never reaches the database of another one:

1. A source is made with its database, which never changes. Its connections are told that database, whatever the
   context is in which they are opened. So is the listener of its streams, which asks them.
2. The source of a request is looked up once, by the name in its path. What a page is asked (`Asked`) has the
   connections of that source alone.
3. `current` is the database of the source while a page is made, and a task that begins then has a copy of it. So what
   code asks of the configuration is about that database, too. When the page is made, the caller has again what it had.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

from pgqueue.database.backoff import is_loss
from pgqueue.databases import Database
from pgqueue.steady_clock import monotonic
from pgqueue.web.connections import Connections
from pgqueue.web.live import Live
from pgqueue.web.metrics import Metrics
from pgqueue.web.problems import problem_of
from pgqueue.web.question import Question
from pgqueue.web.standing import Answer, Standing, standing

ANSWER_SECONDS = 2.0
"""So long the page of all waits for a database. One that is away says so within a second, mostly. One that is slow
is shown as it stood then."""


class Source:
    """A database of the dashboard. None is the configured one. `name`: that of the database, if there are several."""

    def __init__(self, database: Database | None = None, name: str | None = None) -> None:
        self.database = database
        self.connections = Connections(database)
        self.live = Live(self.connections)
        self.metrics = Metrics(self.connections, name)
        self._standing = Question(self._look)
        self._number: int | None = None
        self._away_since: datetime | None = None
        self._away_at = 0.0

    async def standing(self) -> Answer:
        """How it stands; or how it stood, if it is slow to say so; or why that is not known, and since when."""
        try:
            found, as_of = await self._standing.answer(ANSWER_SECONDS), None
        except Exception as error:
            kept = self._standing.kept() if isinstance(error, TimeoutError) else None
            if kept is None:
                return Answer(problem=problem_of(error), since=self._since(error), number=self._number)
            found, as_of = kept[0], datetime.now(UTC) - timedelta(seconds=kept[1])
        self._away_since, self._number = None, found.number
        return Answer(found, as_of=as_of, number=self._number)

    def _since(self, error: Exception) -> datetime:
        """Since when its standing is not known. What it has answered meanwhile, to any page, has ended an outage."""
        is_lost = isinstance(error, TimeoutError) or is_loss(error)
        if self._away_since is None or (is_lost and self.connections.answered_at > self._away_at):
            self._away_since, self._away_at = datetime.now(UTC), monotonic()
        return self._away_since

    async def close(self) -> None:
        """End its streams and close its connections."""
        await asyncio.gather(self._standing.close(), self.metrics.close(), self.live.close())
        await self.connections.close()

    async def _look(self) -> Standing:
        return await self.connections.read(standing)
