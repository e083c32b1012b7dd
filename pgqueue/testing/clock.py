"""A clock that stands still until it is turned. It replaces `pgqueue.now()`, from which all SQL takes the time.

Inside a transaction only that transaction sees the clock. In autocommit mode the whole database sees it, with its
workers. At the end the function is restored. No other clock changes, neither Python's nor PostgreSQL's.

A turn makes the ticks of schedules on the way, as the leading worker would: with its statements, in the same
transaction, by `catch_up`.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from types import TracebackType
from typing import Any

from pgqueue.config import config
from pgqueue.database.asking import named
from pgqueue.database.statements import in_schema
from pgqueue.errors import InvalidOption
from pgqueue.jobs.values import UNIX_EPOCH, Duration, is_moment
from pgqueue.jobs.values import seconds as to_seconds
from pgqueue.testing.schedules import declare, tick
from pgqueue.testing.steps import Command, Steps, aplay, play

_NOW = """CREATE OR REPLACE FUNCTION pgqueue.now() RETURNS timestamptz LANGUAGE sql VOLATILE PARALLEL SAFE
    RETURN timestamptz '{}'"""


class Clock:
    """The database's clock in a test: `.now`, `.advance(…)`, `.set(…)`; a context manager, sync or async.

        with Clock(conn) as clock:
            remind.using(delay=timedelta(days=7)).enqueue(conn, customer=1)
            clock.advance(days=7)
            assert drain(conn).completed == 1

    The clock starts at `now`, else at the time when it is entered. The role must own the function `pgqueue.now()`, as
    the role that migrated does. With an async connection: `async with`, `await clock.aadvance(…)`, `await
    clock.aset(…)`.
    """

    def __init__(self, conn: object, now: datetime | None = None) -> None:
        self._conn = conn
        self._now = None if now is None else _aware(now)
        self._before: str | None = None

    @property
    def now(self) -> datetime:
        """The time the clock shows, UTC."""
        if self._now is None:
            raise InvalidOption("this Clock shows no time yet: use it as `with Clock(conn) as clock:`")
        return self._now

    def advance(self, seconds: Duration = 0, *, minutes: float = 0, hours: float = 0, days: float = 0) -> datetime:
        """Turn the clock forward and return the new time. Makes the ticks that schedules have had meanwhile.

        Raises InvalidOption for a negative duration.
        """
        return play(self._conn, self._tick(self._later(seconds, minutes, hours, days)))

    async def aadvance(
        self, seconds: Duration = 0, *, minutes: float = 0, hours: float = 0, days: float = 0
    ) -> datetime:
        """`advance` for an async connection."""
        return await aplay(self._conn, self._tick(self._later(seconds, minutes, hours, days)))

    def set(self, moment: datetime) -> datetime:
        """Set the clock to a datetime with a time zone. Set it back only while no job waits: due jobs must stay due.

        Makes the ticks that schedules have had meanwhile.
        """
        return play(self._conn, self._tick(_aware(moment)))

    async def aset(self, moment: datetime) -> datetime:
        """`set` for an async connection."""
        return await aplay(self._conn, self._tick(_aware(moment)))

    def turn(self, moment: datetime) -> Steps[datetime]:
        """The steps that set the clock without making ticks. For a caller that is taking steps already."""
        self._entered()
        yield Command(in_schema(_NOW.format(moment.isoformat()), config().schema))
        self._now = moment
        return moment

    def _tick(self, moment: datetime) -> Steps[datetime]:
        self._entered()
        yield from declare()
        yield from self.turn(moment)
        yield from tick()
        return moment

    def __enter__(self) -> Clock:
        play(self._conn, self._install())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            play(self._conn, self._restore())
        except Exception:
            if error is None:
                raise
            # The transaction has failed with `error`: its rollback restores the function.

    async def __aenter__(self) -> Clock:
        await aplay(self._conn, self._install())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        try:
            await aplay(self._conn, self._restore())
        except Exception:
            if error is None:
                raise

    def _install(self) -> Steps[None]:
        [(now, self._before)] = yield named("clock_install")
        yield from self.turn(UNIX_EPOCH + timedelta(microseconds=now) if self._now is None else self._now)

    def _restore(self) -> Steps[None]:
        yield Command(self._entered())
        self._before = None

    def _entered(self) -> str:
        if self._before is None:
            raise InvalidOption("this Clock is not in force: use it as `with Clock(conn) as clock:`")
        return self._before

    def _later(self, seconds: Duration, minutes: float, hours: float, days: float) -> datetime:
        whole = (
            to_seconds(seconds, "clock.advance") + timedelta(minutes=minutes, hours=hours, days=days).total_seconds()
        )
        return self.now + timedelta(seconds=to_seconds(whole, "clock.advance"))


def _aware(moment: Any) -> datetime:
    if not is_moment(moment):
        raise InvalidOption(f"clock {moment!r}: give a datetime with a time zone, such as datetime.now(timezone.utc)")
    return moment.astimezone(UTC)
