"""What `why` answers: reasons, each with a code, a sentence, numbers, and the jobs or sessions behind it.

The values only; the modules beside this one decide which reasons there are. A code never changes its meaning, so that
programs may rely on it. The page on `why` says of each what to do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from difflib import get_close_matches
from typing import Any

from pgqueue.admin.queries import JobInfo
from pgqueue.database import shown
from pgqueue.jobs.values import UNITS
from pgqueue.manual import Symptom, at_night, page

CODES = {
    # A job that waits, in the order of the claim.
    "not_due": "its time has not come",
    "promotion_overdue": "its time has come, and no worker has made it available yet",
    "deadline": "its deadline passes before it can start: it will be cancelled",
    "queue_paused": "its queue is paused",
    "task_paused": "its task is paused",
    "no_worker": "no live worker takes jobs of its queue",
    "unknown_task": "no live worker of its queue knows its task",
    "poison": "it was running when a worker died, and waits to run apart from others",
    "slots_busy": "every slot that may run it has a job",
    "behind": "jobs of its queue come before it",
    "lock": "other jobs hold its lock, or wait for it before this one",
    "limit": "as many jobs hold its limit as may, or wait for it before this one",
    "limit_undeclared": "no worker has declared its limit",
    "rate": "its rate lets no job start yet",
    "rate_undeclared": "no worker has declared its rate",
    "node": "other jobs of its flow have not ended",
    "release_overdue": "all jobs that it waits for have ended, and no worker has released it yet",
    "about_to_run": "nothing holds it back",
    # A job that runs.
    "running": "its handler runs",
    "gathers": "a worker has claimed it for a batch, and its call had not begun at the last heartbeat",
    "at_hand": "a worker has claimed it and did not run it at its last heartbeat",
    "chain": "it runs in the same worker as soon as the job before it has freed its lock",
    "cancel_requested": "it was asked to stop",
    "transaction_waits": "its transaction waits for another session",
    "worker_silent": "its worker gives no sign of life",
    "worker_dead": "its worker is dead: the job is about to be given to another one",
    # A job that has ended.
    "completed": "it completed",
    "skipped": "it was skipped, for its lock or because no job that it waited for failed",
    "failed": "it failed for good",
    "cancelled": "it was cancelled",
    # An id without a job.
    "never_given": "no job has ever had this id",
    "not_committed": "the transaction that enqueued it may still be open",
    "pruned": "it may have ended so long ago that it was removed",
    "gone": "it was rolled back, discarded, or deleted",
}
"""Every code with what it means."""
_AT_NIGHT = {
    Symptom.STANDS_STILL: (
        "promotion_overdue queue_paused task_paused no_worker unknown_task lock limit limit_undeclared rate "
        "rate_undeclared"
    ),
    Symptom.STARTS_LATE: "slots_busy behind",
    Symptom.RUNS_LONG: "running transaction_waits cancel_requested",
    Symptom.WORKERS_RESTART: "poison worker_silent worker_dead",
    Symptom.FAILS: "failed",
    Symptom.WRONG_JOB: "gone pruned cancelled",
}
_PAGES = {code: at_night(symptom) for symptom, codes in _AT_NIGHT.items() for code in codes.split()}


@dataclass(frozen=True, slots=True)
class Holder:
    """A job that another job waits for. `since` is when it started; None if it does not run yet."""

    id: int
    task: str
    queue: str
    state: str
    worker: int | None = None
    process: str | None = None
    since: datetime | None = None

    def __str__(self) -> str:
        return f"job {self.id} ({self.task})" + (f" on {self.process}" if self.process else "")


@dataclass(frozen=True, slots=True)
class Session:
    """A session of the database. `since` is when its transaction began. `pid` is None for a prepared transaction."""

    pid: int | None
    application: str | None
    state: str | None
    since: datetime | None

    def __str__(self) -> str:
        name = f" ({self.application})" if self.application else ""
        return f"prepared transaction{name}" if self.pid is None else f"pid {self.pid}{name}"


@dataclass(frozen=True, slots=True)
class Reason:
    """One rule that holds the job back, or one fact about it.

    - `code`: one of `CODES`; it never changes its meaning.
    - `text`: a sentence for people.
    - `since`: since when the rule holds, if that is known.
    - `details`: its numbers and names; the page on `why` says which.
    - `holders`, `sessions`: the jobs and the sessions behind it, at most 10 of each.
    """

    code: str
    text: str
    since: datetime | None = None
    details: Mapping[str, Any] = field(default_factory=dict)
    holders: tuple[Holder, ...] = ()
    sessions: tuple[Session, ...] = ()

    @property
    def page(self) -> str:
        """The page of the manual that says what to do."""
        return _PAGES.get(self.code, page("why"))


@dataclass(frozen=True, slots=True)
class Why:
    """The answer of `why`: the job and its state (both None if there is no such job), and the reasons in order."""

    id: int
    state: str | None
    reasons: tuple[Reason, ...]
    at: datetime
    job: JobInfo | None

    @property
    def codes(self) -> tuple[str, ...]:
        """The codes of the reasons, in order."""
        return tuple(reason.code for reason in self.reasons)


Facts = Mapping[str, Any]
"""What a statement has answered: a JSON object."""

HOLDERS_MOST = 10
"""A reason names no more jobs or sessions than this."""


def holders_of(rows: Iterable[Facts]) -> tuple[Holder, ...]:
    """The first jobs of these rows."""
    return tuple(
        Holder(
            row["id"],
            row["task"],
            row["queue"],
            row.get("state") or "running",
            row["worker"],
            process_of(row),
            shown.moment(row["since"]),
        )
        for row in list(rows)[:HOLDERS_MOST]
    )


def sessions_of(rows: Iterable[Facts]) -> tuple[Session, ...]:
    """The first sessions of these rows."""
    return tuple(
        Session(row["pid"], row["application"], row["state"], shown.moment(row["since"]))
        for row in list(rows)[:HOLDERS_MOST]
    )


def process_of(worker: Facts) -> str | None:
    """The process of a worker, as host:pid."""
    return None if worker.get("host") is None else f"{worker['host']}:{worker['pid']}"


def counted(n: int, whole: bool = True, most: int = 1_000) -> str:
    """A number of jobs. Beyond `most`, or if not all were looked at, it is at least so many: `~1,000`."""
    return f"{n:,}" if n <= most and whole else f"~{min(n, most):,}"


def lasting(seconds: float) -> str:
    """A length of time for people, with two units at most.

    >>> [lasting(each) for each in (0.8, 9, 192, 7_260, 200_000)]
    ['0.8 s', '9 s', '3 m 12 s', '2 h 1 m', '2 d 7 h']
    """
    seconds = max(0.0, seconds)
    if round(seconds, 1) < 2:
        return f"{seconds:.1f} s"
    rest, parts = round(seconds), []
    for unit in "dhms":
        n, rest = divmod(rest, round(UNITS[unit]))
        if n:
            parts.append(f"{n} {unit}")
        elif parts:
            break
    return " ".join(parts[:2])


def close_names(name: str, known: Iterable[str]) -> list[str]:
    """The names that this one may be mistyped for, the closest first.

    >>> close_names("email", ["emails", "reports"]), close_names("Mail.Send", ["mail.send"])
    (['emails'], ['mail.send'])
    """
    names = sorted(set(known))
    found = get_close_matches(name, names, 3)
    return found or [each for each in names if each.lower() == name.lower()][:3]
