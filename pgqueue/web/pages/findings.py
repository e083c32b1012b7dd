"""What the overview says first: a verdict in one sentence; each finding of the doctor, since when, and where to look.

Called by the overview. Pure: it reads no database.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any
from urllib.parse import urlencode

from pgqueue.admin.doctor import Finding
from pgqueue.plain_text import plural
from pgqueue.web.pages.page import plain

NEEDS = ("critical", "warning")
"""The severities that need somebody."""
WORDS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")

STATES: Mapping[str, tuple[str, ...]] = {
    "growth": ("available", "blocked"),
    "overdue": ("scheduled",),
    "stuck": ("blocked",),
    "unknown": ("available", "scheduled", "blocked"),
    "unserved": ("available", "scheduled", "blocked"),
}
"""Findings about a queue: the states of the jobs that they mean."""
PLACES: Mapping[str, tuple[str, str]] = {
    "duty": ("/workers", "Workers"),
    "fence": ("/outbox", "Outbox"),
    "leader": ("/workers", "Workers"),
    "listen": ("/workers", "Workers"),
    "relay": ("/outbox", "Outbox"),
    "schedule": ("/schedules", "Schedules"),
    "unreleased": ("/jobs?state=blocked", "Blocked jobs"),
    "undeclared": ("/limits", "Locks and limits"),
    "versions": ("/workers", "Workers"),
}
"""The other findings that a page says more of."""
ELSEWHERE = frozenset(
    {"connections", "index", "notify", "prepared", "read_only", "schema", "sequences", "slot", "snapshot", "vacuum"}
)
"""Findings about the server or the tables. No page shows these; the docs do."""


def verdict(findings: Sequence[Finding] | None, failed: int | None) -> dict[str, str]:
    """Whether all is well, in one sentence, and how severe it is. `failed`: jobs in the last hour; None: not known.

    >>> verdict([], 0)["title"], verdict([], 3)["title"], verdict(None, 0)["title"]
    ('All is well', 'Jobs fail', 'Not all could be looked at')
    """
    needs = [each for each in findings or () if each.severity in NEEDS]
    text = "" if failed is None else plural(failed, "job failed", "jobs failed", str(failed) if failed else "No")
    text = f"{text} in the last hour." if text else ""
    if findings is None:
        return {"level": "warning", "title": "Not all could be looked at", "text": text}
    if needs:
        level = "critical" if any(each.severity == "critical" for each in needs) else "warning"
        count = WORDS[len(needs)] if len(needs) < len(WORDS) else f"{len(needs):,}"
        things = "thing needs you" if len(needs) == 1 else "things need you"
        return {"level": level, "title": f"{count.capitalize()} {things}", "text": text}
    if failed:
        return {"level": "warning", "title": "Jobs fail", "text": f"{text} Nothing else is wrong."}
    return {"level": "well", "title": "All is well", "text": text}


def told(finding: Finding, now: datetime) -> dict[str, Any]:
    """The finding, since when it is so, and the place below the mount where one looks."""
    since = None if finding.seconds is None else now - timedelta(seconds=finding.seconds)
    path, label = PLACES.get(finding.name, (None, None))
    if finding.queue is not None:
        query = [("queue", finding.queue), *(("state", state) for state in STATES[finding.name])]
        path, label = f"/jobs?{urlencode(query)}", "Look at the jobs"
    return dict(plain(finding)) | {"since": since, "place": path, "place_label": label}
