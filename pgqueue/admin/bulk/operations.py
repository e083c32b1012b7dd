"""Operations by filter: `preview_bulk`, `bulk` to begin one, `get_bulk` and `bulks` to look at them, `stop_bulk`.

Called by applications and by the CLI. Each function is one statement in the caller's transaction, on any connection.
What it begins is done after its COMMIT, in steps of at most 1,000 jobs, by the worker that leads, or by the command
that has begun it (`steps`). So an operation on ten million jobs outlives each process, and holds no lock for long.

`cancel(conn, queue="mail")` is for a few jobs: it acts at once, in the caller's transaction, and answers for each job.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from pgqueue.admin.actions import BY_HAND, checked_reason
from pgqueue.admin.depth import Count
from pgqueue.admin.filters import Filter, filtered
from pgqueue.config import client
from pgqueue.database import shown
from pgqueue.database.asking import asks, named, twin
from pgqueue.database.statements import Row, Statement
from pgqueue.errors import BulkNotFound, InvalidOption
from pgqueue.jobs.actors import actor_of
from pgqueue.jobs.states import DEAD, DONE, ENDED, LIVE, RETRYING, WAITING
from pgqueue.jobs.values import HIGHEST_ID, aware, check_limit, check_text, number, per, whole

STATES: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "cancel": (LIVE, (RETRYING,)),
    "retry": (DEAD, DONE),
    "discard": (ENDED, ()),
    "reschedule": (WAITING, (RETRYING,)),
}
"""The actions: the states that are meant if the filter names none, and further ones that it may name."""
LOOKED_MOST = 10_000
"""A preview looks at so many rows, and at as many again for an estimate."""
COUNTED_MOST = 1_000
"""A count beside a list looks at so many rows, and at as many again for an estimate."""
LIMIT_MOST = 1_000
NOTE_MOST = 500  # characters


@dataclass(frozen=True, slots=True)
class BulkPreview:
    """What an operation would find: how many jobs fit now, the ids of the first ten, and up to which id it would go.

    `count` is exact if at most 10,000 jobs had to be looked at, else an estimate.
    """

    count: Count
    ids: tuple[int, ...]
    up_to: int


@dataclass(frozen=True, slots=True)
class Bulk:
    """An operation on all jobs that fit a filter, and how far it is. Times are UTC, by the database's clock.

    - `state`: `running`, `done`, or `stopped` (`stopped_by`).
    - `target` is the filter, `options` what else the action was told.
    - `counts` is what became of the jobs so far, a number for each reason. `changed` is how many of them were changed.
    - `ids` are the first 1,000 jobs of each reason. Only `get_bulk` reads them.
    - `after`: the jobs up to this id have been dealt with, of those up to `up_to`. `round` is above 0 when jobs that
      were locked are tried again.
    - `pace` is how many jobs a second at most; None: as many as there are.
    - `note` says why it was begun, for the record.
    - `holder` is the process that works on it just now.

    The reasons are words of `admin/answers.py`, which says what each means. Jobs that were changed are `cancelled`,
    `requested`, `retried`, `again`, `discarded` or `rescheduled`. Jobs that were left out are `locked`, `moved`,
    `held`, `alive`, `needed`, `unreleased` or `refused`.
    """

    id: int
    action: str
    state: str
    target: Mapping[str, Any]
    options: Mapping[str, Any]
    actor: str
    started_at: datetime
    ended_at: datetime | None
    stopped_by: str | None
    up_to: int
    after: int
    round: int
    pace: float | None
    note: str | None
    counts: Mapping[str, int]
    changed: int
    holder: str | None
    ids: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def left_out(self) -> int:
        """How many jobs that fit were not changed."""
        return sum(self.counts.values()) - self.changed


@asks
def preview_bulk(
    conn: object,
    action: str,
    *,
    state: str | Iterable[str] | None = None,
    queue: str | None = None,
    task: str | None = None,
    older_than: float | timedelta | str | None = None,
    error_type: str | None = None,
    ids: Iterable[int] | None = None,
    again: bool = False,
) -> Statement[BulkPreview]:
    """Return how many jobs an operation would find now, some of their ids, and the highest id that has been given.

    `action` is "cancel", "retry", "discard" or "reschedule"; the filter is that of `bulk`. At most 20,000 rows are
    looked at, however many jobs there are; `.count` is an estimate beyond. Only reads. Raises InvalidOption for an
    unknown action, and for a filter that would choose all jobs.

        found = pgqueue.preview_bulk(conn, "retry", state="failed", task="mail.send")
    """
    asked = _filter(
        action, again, state=state, queue=queue, task=task, older_than=older_than, error_type=error_type, ids=ids
    )

    def read(rows: list[Row]) -> BulkPreview:
        said = json.loads(rows[0][0])
        return BulkPreview(Count(said["n"], said["exact"]), tuple(said["ids"]), said["up_to"])

    return named("bulk_preview", read, **asked.of_operation(), most=LOOKED_MOST)


apreview_bulk = twin(preview_bulk)
"""`preview_bulk` for async connections."""


@asks
def count_bulk(
    conn: object,
    action: str,
    *,
    state: str | Iterable[str],
    queue: str | None = None,
    task: str | None = None,
    error_type: str | None = None,
) -> Statement[Count]:
    """Return how many jobs an operation would find now, as `preview_bulk` does, but of a tenth of the rows."""
    asked = _filter(action, True, state=state, queue=queue, task=task, error_type=error_type, older_than=None, ids=None)

    def read(rows: list[Row]) -> Count:
        said = json.loads(rows[0][0])
        return Count(said["n"], said["exact"])

    return named("bulk_preview", read, **asked.of_operation(), most=COUNTED_MOST)


acount_bulk = twin(count_bulk)
"""`count_bulk` for async connections."""


@asks
def bulk(
    conn: object,
    action: str,
    *,
    state: str | Iterable[str] | None = None,
    queue: str | None = None,
    task: str | None = None,
    older_than: float | timedelta | str | None = None,
    error_type: str | None = None,
    ids: Iterable[int] | None = None,
    up_to: int | None = None,
    pace: float | str | None = None,
    reason: str | None = None,
    again: bool = False,
    at: datetime | None = None,
    note: str | None = None,
    actor: str | None = None,
) -> Statement[Bulk]:
    """Begin an operation on all jobs that fit: "cancel", "retry", "discard" or "reschedule". Return it.

    It is done after this transaction's COMMIT, by the worker that leads, in steps of at most 1,000 jobs, each a
    transaction of its own. A step passes over jobs that other transactions have locked; they are tried again at the
    end. `get_bulk` says how far it is, `stop_bulk` ends it.

    - The filter: `state`, one or several (default: those that the action is for; "retrying" are the scheduled jobs that
      wait for another attempt), `queue`, `task` (its name), and `older_than`, for jobs that ended longer ago (seconds,
      a timedelta, "2h"). A job fits if it does when its turn comes.
    - `error_type`: an attempt has failed with an exception of this class, as `find` asks for it.
    - `ids`: only these jobs, 1,000 at most. Those that do not fit otherwise are left alone, and not counted.
    - `up_to`: only jobs with at most this id, as of a preview. Default: all ids given by now. So a retry does not go
      after jobs that fail again meanwhile.
    - `pace`: jobs a second at most, as a number or "50/s", "300/minute".
    - `reason` is for a cancel, `at` (a datetime with a time zone; required) for a reschedule. With `again` a retry runs
      completed jobs, too, whose state must then be named.
    - `note`: why, for the record; 500 characters at most.

    The operation is one row of the record (`audit`), by `actor`, whose count grows with each step. Raises InvalidOption
    for an unknown action, a filter that would choose all jobs, and options that the action does not have.

        begun = pgqueue.bulk(conn, "retry", state="failed", task="mail.send", pace="50/s")
    """
    asked = _filter(
        action, again, state=state, queue=queue, task=task, older_than=older_than, error_type=error_type, ids=ids
    )
    options = _options(action, reason=reason, again=again, at=at)
    return named(
        "bulk_start",
        lambda rows: _read(rows[0]),
        **asked.of_operation(),
        actor=actor_of(actor),
        action=action,
        target=json.dumps(asked.named()),
        options=json.dumps(options),
        up_to=HIGHEST_ID if up_to is None else _whole(up_to, "up_to", 0),
        pace=None if pace is None else pace_of(pace),
        note=None if note is None else _noted(note),
        notify=client()[1],
    )


abulk = twin(bulk)
"""`bulk` for async connections."""


@asks
def get_bulk(conn: object, id: int) -> Statement[Bulk]:
    """Return an operation: how far it is, and the first 1,000 jobs of each reason. Raises BulkNotFound.

    done = pgqueue.get_bulk(conn, begun.id).counts
    """

    def read(rows: list[Row]) -> Bulk:
        if not rows:
            raise BulkNotFound(f"there is no operation {id}: it never was, or it is older than 90 days")
        return _read(rows[0])

    return named("bulk_get", read, bulk=_whole(id, "id", 1))


aget_bulk = twin(get_bulk)
"""`get_bulk` for async connections."""


@asks
def bulks(conn: object, *, limit: int = 50, before: int | None = None) -> Statement[list[Bulk]]:
    """Return the newest operations, the newest first, at most `limit` (1 to 1,000), without the ids of their jobs.

    `before` is the id of an operation: only older ones. They are kept for 90 days.

        [last] = pgqueue.bulks(conn, limit=1)
    """
    return named(
        "bulk_list",
        lambda rows: [_read(row) for row in rows],
        n=check_limit(limit, LIMIT_MOST),
        before=None if before is None else _whole(before, "before", 1),
    )


abulks = twin(bulks)
"""`bulks` for async connections."""


@asks
def stop_bulk(conn: object, id: int, *, actor: str | None = None) -> Statement[Bulk | None]:
    """End an operation, with this transaction's COMMIT, and return it with what it has done; None if none was open.

    A step that is under way is waited for, and counted; no other one begins. What was done stays done. Recorded.

        stopped = pgqueue.stop_bulk(conn, begun.id)
    """
    return named(
        "bulk_stop", lambda rows: _read(rows[0]) if rows else None, bulk=_whole(id, "id", 1), actor=actor_of(actor)
    )


astop_bulk = twin(stop_bulk)
"""`stop_bulk` for async connections."""


# What is given and what comes back -----------------------------------------------------------------------------------


def pace_of(pace: float | str) -> float:
    """Jobs a second, of a number or a text.

    >>> pace_of("50/s"), pace_of("300/minute"), pace_of(0.5)
    (50.0, 5.0, 0.5)
    """
    given: object = pace
    if isinstance(pace, str) and (found := per(pace.strip())):
        given = found[0] / found[1]
    if not number(given, 0.0001, 1e9):
        raise InvalidOption(
            f'pace {pace!r:.80}: give jobs a second, or "50/s", "300/minute", from one in 10,000 seconds on'
        )
    return float(given)


def _filter(action: str, again: bool, *, older_than: float | timedelta | str | None, **given: Any) -> Filter:
    if not isinstance(action, str) or action not in STATES:
        raise InvalidOption(f"action {action!r:.80}: use one of {', '.join(STATES)}")
    states, others = STATES[action]
    if older_than is not None:
        if action not in ("retry", "discard"):
            raise InvalidOption(f"older_than is for jobs that have ended: a {action} has none")
        given["older_than"] = older_than
    asked = filtered((), states, others if again or action != "retry" else (), **given)
    if asked is None:  # not reached: a filter was given, if only of None
        raise InvalidOption("give a filter")
    return asked


def _options(action: str, *, reason: str | None, again: bool, at: datetime | None) -> dict[str, object]:
    """What the statement of the action is told beside the filter."""
    for name, value, owner in (
        ("reason", reason, "cancel"),
        ("again", again or None, "retry"),
        ("at", at, "reschedule"),
    ):
        if value is not None and action != owner:
            raise InvalidOption(f"{name} is for a {owner}, and this is a {action}")
    if action == "cancel":
        return {"reason": checked_reason(BY_HAND if reason is None else reason)}
    if action == "retry":
        return {"again": bool(again)}
    if action == "reschedule":
        if not isinstance(at, datetime):
            raise InvalidOption(f"at {at!r}: give a datetime with a time zone")
        return {"at": str(aware(at))}
    return {}


def _noted(note: str) -> str:
    check_text(note, "note")
    if len(note) > NOTE_MOST:
        raise InvalidOption(f"note: give {NOTE_MOST} characters at most, not {len(note):,}")
    return note


def _whole(value: int, what: str, least: int) -> int:
    if whole(value, least):
        return value
    raise InvalidOption(f"{what} {value!r:.80}: give a whole number from {least} on")


def _read(row: Row) -> Bulk:
    said = json.loads(row[0])
    for name in ("started_at", "ended_at"):
        said[name] = shown.moment(said[name])
    state = "running" if said["ended_at"] is None else "done" if said["stopped_by"] is None else "stopped"
    ids = json.loads(row[1]) if isinstance(row[1], str) else {}
    return Bulk(**said, state=state, ids={reason: tuple(found) for reason, found in ids.items()})
