"""Schedules as monitors of Sentry's crons: a job that a schedule has made checks in when it starts and when it ends.

    started (attempt 1)  ->  in_progress
    completed            ->  ok
    failed, cancelled    ->  error

Between attempts nothing is sent: the check-in stays in progress until the job has ended. Its id is made from the job's,
so that every worker names the same one. The job's headers have the schedule's line and zone; with these the monitor is
made, or changed, by the check-in itself. Sentry knows minutes and cron lines of five fields. A schedule that says more
(seconds, `L`, `5#2`) checks in to a monitor that was made by hand.
"""

from __future__ import annotations

import hashlib
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pgqueue.client.job_outcome import JobOutcome
from pgqueue.distribution import needs_extra
from pgqueue.jobs.cron import LINE, SCHEDULE, ZONE
from pgqueue.jobs.job import Job
from pgqueue.jobs.values import PERIODS
from pgqueue.telemetry.carrier import headers_of

with needs_extra("sentry"):
    from sentry_sdk.crons import capture_checkin

EVERY_MOST = 366 * 86_400.0
"""No schedule has a longer interval, in seconds."""
SLUG_MOST = 50
STATUS = {"completed": "ok", "failed": "error", "cancelled": "error"}

_PLAIN_CRON = re.compile(r"[\dA-Za-z*/,\-]+( [\dA-Za-z*/,\-]+){4}")
_UNITS = {"week": 7 * PERIODS["day"], **{unit: PERIODS[unit] for unit in ("day", "hour", "minute")}}


@dataclass(frozen=True, slots=True)
class CheckIns:
    """Sends check-ins. `margin`: how many minutes a job may start late; `runtime`: how many it may run."""

    margin: int | None
    runtime: int | None

    def started(self, job: Job) -> None:
        """The first attempt of a job begins."""
        headers = headers_of(job)
        if isinstance(name := headers.get(SCHEDULE), str):
            self._send(job, headers, name, "in_progress", None)

    def ended(self, job: Job, outcome: JobOutcome) -> None:
        """A job has ended, for good or not."""
        headers, status = headers_of(job), STATUS.get(outcome.name)
        if status is not None and isinstance(name := headers.get(SCHEDULE), str):
            self._send(job, headers, name, status, outcome.seconds)

    def _send(self, job: Job, headers: Mapping[str, Any], name: str, status: str, seconds: float | None) -> None:
        capture_checkin(slug(name), check_in_id(job), status, seconds, self.config(headers))

    def config(self, headers: Mapping[str, Any]) -> Any:
        """The monitor of the schedule in these headers; None if Sentry has no such schedules.

        >>> CheckIns(5, None).config({"pgqueue:line": "0 6 * * MON", "pgqueue:zone": "Europe/Berlin"})
        {'schedule': {'type': 'crontab', 'value': '0 6 * * MON'}, 'timezone': 'Europe/Berlin', 'checkin_margin': 5}
        """
        line, zone = headers.get(LINE), headers.get(ZONE)
        schedule = _schedule(line) if isinstance(line, str) else None
        if schedule is None or not isinstance(zone, str):
            return None
        said: dict[str, Any] = {"schedule": schedule, "timezone": zone}
        if self.margin is not None:
            said["checkin_margin"] = self.margin
        if self.runtime is not None:
            said["max_runtime"] = self.runtime
        return said


def slug(name: str) -> str:
    """The monitor of the schedule of this name: Sentry takes 50 characters of a-z, 0-9, - and _.

    >>> slug("reports.daily"), slug("report:7")
    ('reports-daily', 'report-7')
    """
    plain = re.sub(r"[^a-z0-9_-]+", "-", name.lower()).strip("-")
    if plain and len(plain) <= SLUG_MOST:
        return plain
    return f"{plain[: SLUG_MOST - 9]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}".strip("-")


def check_in_id(job: Job) -> str:
    """The id of this job's check-in: the same on every worker, another one for a job with this id after a restore."""
    return uuid.uuid5(uuid.NAMESPACE_OID, f"pgqueue:{job.id}:{job.enqueued_at.isoformat()}").hex


def _schedule(line: str) -> dict[str, Any] | None:
    """Sentry's words for a schedule's line; None if it has none.

    >>> _schedule("every 900"), _schedule("every 5"), _schedule("30 0 6 * * *")
    ({'type': 'interval', 'value': 15, 'unit': 'minute'}, None, None)
    """
    kind, _, rest = line.partition(" ")
    if kind != "every":
        plain = _PLAIN_CRON.fullmatch(line) and not re.search(r"(^|[ ,])\d?L", line)
        return {"type": "crontab", "value": line} if plain else None
    # A header may say anything.
    try:
        every = float(rest)
    except ValueError:
        return None
    for unit, seconds in _UNITS.items():
        if seconds <= every <= EVERY_MOST and every % seconds == 0:
            return {"type": "interval", "value": int(every // seconds), "unit": unit}
    return None
