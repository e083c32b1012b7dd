"""What the database says of all workers and queues: read for a scrape, from what is cheap at any size.

Numbers of jobs come from what the leading worker has measured, as everywhere (`admin/depth.py`), and are never measured
here. If no measurement is fresh, they are left out: a series that ends says so, a wrong number would not.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import psycopg

from pgqueue.admin import depth
from pgqueue.admin.depth import UNKNOWN, Measured, QueueInfo
from pgqueue.config import config, safe
from pgqueue.database import embedded, forks, steps
from pgqueue.database.conninfo import connect_timeout_at_most
from pgqueue.database.sessions import Link, options
from pgqueue.database.statements import Row, Statement, text
from pgqueue.database.steps import Steps
from pgqueue.jobs.states import LIVE
from pgqueue.jobs.totals import Sample
from pgqueue.plain_text import plain
from pgqueue.steady_clock import monotonic

log = logging.getLogger("pgqueue")

QUEUES_MOST, OUTBOXES_MOST = 200, 200
OTHER_QUEUES = "other queues"
"""The name under which the rest is shown. It has a blank, so no queue has it."""
REASONS = ("lock", "limit", "rate", "flow", UNKNOWN)
STATEMENT_SECONDS, CONNECT_SECONDS = 1, 2
ANSWER_SECONDS = 1.5
"""So long a scrape waits for them. A statement may take a second, and the first one is after the connection."""
SAID_SECONDS = 60.0


def gauges(schema: str) -> Steps[list[Sample]]:
    """Ask for all gauges; each is one sample."""
    found = yield from depth.fresh(schema)
    [[said]] = yield _ask("gauges_read", schema)
    [[visible]] = yield _ask("lag_relays_visible", schema)
    relays = (yield _ask("lag_relays", schema)) if visible else []
    samples = [*_of_server(json.loads(said)), *_of_outboxes(relays[:OUTBOXES_MOST])]
    if found is not None:
        samples += _of_jobs(found)
    return samples


def _ask(name: str, schema: str) -> Statement[list[Row]]:
    return Statement(text(name, schema), {}, list)


def _of_server(said: dict[str, Any]) -> Iterator[Sample]:
    yield "pgqueue_workers_alive", {}, said["workers"]
    yield "pgqueue_oldest_snapshot_seconds", {}, max(0.0, said["snapshot"])
    yield "pgqueue_notify_queue_ratio", {}, said["notify"]
    for table, dead in (said["dead"] or {}).items():
        yield "pgqueue_dead_rows", {"table": table}, dead
    for each in said["duties"]:
        duty = {"duty": plain(each["name"])}
        if each["ran"] is not None:
            yield "pgqueue_duty_age_seconds", duty, each["ran"]
            yield "pgqueue_duty_seconds", duty, each["took"]
        yield "pgqueue_duty_failing_seconds", duty, each["failing"] or 0.0


def _of_outboxes(relays: Iterable[Row]) -> Iterator[Sample]:
    for source, name, waiting, oldest, _, reported, _ in relays:
        outbox = {"outbox": f"{plain(name)} {source}"}
        yield "pgqueue_outbox_waiting", outbox, waiting
        # While the relay is silent, what it has said grows older.
        yield "pgqueue_outbox_lag_seconds", outbox, 0.0 if not waiting else (oldest or 0.0) + reported
        yield "pgqueue_outbox_report_age_seconds", outbox, reported


def _of_jobs(found: Measured) -> Iterator[Sample]:
    yield "pgqueue_depth_age_seconds", {}, max(0.0, found.now - found.counted_at)
    yield "pgqueue_unknown_tasks", {}, len(depth.unknown_list(found.groups))
    blocked = dict.fromkeys(REASONS, 0)
    for group in found.groups:
        if group.state == "blocked":
            reason = group.reason if group.reason in blocked else "other"
            blocked[reason] = blocked.get(reason, 0) + group.n
    for reason, n in blocked.items():
        yield "pgqueue_blocked", {"reason": reason}, n
    for name, queues in _by_name(depth.queue_list(found, most=None)):
        for state in LIVE:
            yield "pgqueue_depth", {"queue": name, "state": state}, sum(getattr(each, state).n for each in queues)
        oldest = max(each.oldest or 0.0 for each in queues)
        blocked_for = max(each.longest_blocked or 0.0 for each in queues)
        yield "pgqueue_oldest_eligible_seconds", {"queue": name}, max(0.0, oldest)
        yield "pgqueue_longest_blocked_seconds", {"queue": name}, max(0.0, blocked_for)


def _by_name(queues: Sequence[QueueInfo]) -> Iterator[tuple[str, list[QueueInfo]]]:
    """The queues by the names that are shown: the 200 that have most jobs, and the rest together."""
    largest = sorted(queues, key=lambda each: (-sum(getattr(each, state).n for state in LIVE), each.name))
    shown: dict[str, list[QueueInfo]] = {}
    for place, each in enumerate(largest):
        shown.setdefault(plain(each.name) if place < QUEUES_MOST else OTHER_QUEUES, []).append(each)
    yield from shown.items()


class Reader:
    """Reads the gauges over a connection of its own, which it opens when it is first needed. From any thread.

    Without `dsn` and `schema` the configured database is read.

    A server that is stuck never holds a caller:

    1. Each reading is done in a thread of its own, and a caller waits for `ANSWER_SECONDS` at most.
    2. One reading is under way at most. While it is, others get no gauges at once, so a stuck server has one session
       of ours, and this process has one thread that waits for it.
    3. If the lead is lost meanwhile, the reading closes the connection when it ends: it looks after it has given the
       turn back, and `begin` asks for the turn after it has noted that the lead is lost. One of them sees the other.
    """

    def __init__(self, dsn: str | None = None, schema: str | None = None) -> None:
        self._dsn, self._schema = dsn, schema
        self._conn: psycopg.Connection[Any] | None = None
        self._reading = threading.Lock()
        self._leads = False
        self._said_at = -SAID_SECONDS

    def begin(self, leads: bool = True) -> Future[Sequence[Sample]]:
        """Begin to read the gauges, if this process is to read them; else let the connection go. Never raises.

        The future gets none if the database does not answer, or if another reading is under way.
        """
        asked: Future[Sequence[Sample]] = Future()
        asked.set_running_or_notify_cancel()  # a caller that waits no longer cannot take it back
        self._leads = leads
        if not leads:
            self._let_go()
        elif self._reading.acquire(blocking=False):
            try:
                threading.Thread(target=self._finish, args=[asked], name="pgqueue-gauges", daemon=True).start()
                return asked
            except Exception as error:  # no thread to be had
                self._reading.release()
                self._say(error)
        asked.set_result(())
        return asked

    def read(self, leads: bool = True) -> Sequence[Sample]:
        """The gauges, as `begin` gets them; none if that takes longer than `ANSWER_SECONDS`."""
        try:
            return self.begin(leads).result(ANSWER_SECONDS)
        except TimeoutError:
            self._say("the database does not answer")
            return ()

    def close(self) -> None:
        """Let the connection go."""
        self.begin(False)

    def _finish(self, asked: Future[Sequence[Sample]]) -> None:
        found: Sequence[Sample] = ()
        try:
            found = self._read()
        except Exception as error:
            self._close()
            self._say(error)
        finally:
            self._reading.release()
            asked.set_result(found)
        if not self._leads:
            self._let_go()

    def _let_go(self) -> None:
        """Close the connection; if a reading is under way, that does it at its end."""
        if self._reading.acquire(blocking=False):
            try:
                self._close()
            finally:
                self._reading.release()

    def _say(self, why: object) -> None:
        if monotonic() >= self._said_at + SAID_SECONDS:
            self._said_at = monotonic()
            log.warning("the gauges of the database are left out: %s", safe(plain(" ".join(str(why).split()))))

    def _read(self) -> list[Sample]:
        settings = config(dsn=self._dsn, schema=self._schema)
        if self._conn is None or self._conn.closed:
            # Behind a transaction pooler a prepared statement may be sent to another session.
            link = Link(embedded.resolve(settings.require_dsn()), settings.schema, prepare=False)
            how = options(link, "pgqueue metrics") | connect_timeout_at_most(link.dsn, CONNECT_SECONDS)
            self._conn = psycopg.connect(link.dsn, **how)
            forks.cut_in_children(self._conn)
        with self._conn.transaction():
            self._conn.execute("SET TRANSACTION ISOLATION LEVEL READ COMMITTED, READ ONLY")
            self._conn.execute(
                "SELECT set_config('statement_timeout', %s, true), set_config('jit', 'off', true), "
                "set_config('row_security', 'off', true)",  # else rows that it hides look as if there were none
                (f"{STATEMENT_SECONDS}s",),
            )
            return steps.drive(self._conn, gauges(settings.schema), {})

    def _close(self) -> None:
        conn, self._conn = self._conn, None
        if conn is not None:
            conn.close()
