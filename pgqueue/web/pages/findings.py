"""What the overview says first: a verdict in one sentence; each finding of the doctor, since when, and where to look.

Called by the overview and by the page of all databases. Pure: it reads no database.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any
from urllib.parse import urlencode

from pgqueue.admin.depth import Count
from pgqueue.admin.doctor import Finding
from pgqueue.manual import is_published
from pgqueue.plain_text import plural
from pgqueue.web.pages.page import plain
from pgqueue.web.pages.queues_in_need import InNeed

NEEDS = ("critical", "warning")
"""The severities that need somebody."""
WORDS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
VERBS: Mapping[str, tuple[str, str]] = {
    "no worker": ("has no worker", "have no worker"),
    "stuck": ("is stuck", "are stuck"),
    "behind": ("is behind", "are behind"),
    "paused": ("is paused", "are paused"),
}
"""What is said of one queue in need, and of several."""

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
_SESSIONS = "SELECT pid, usename, application_name, state, xact_start FROM pg_stat_activity ORDER BY xact_start"
COMMANDS: Mapping[str, str] = {
    "connections": "SELECT usename, application_name, count(*) FROM pg_stat_activity GROUP BY 1, 2 ORDER BY 3 DESC",
    "index": "pgqueue doctor",
    "notify": _SESSIONS,
    "prepared": "SELECT * FROM pg_prepared_xacts",
    "read_only": "SHOW default_transaction_read_only",
    "schema": "pgqueue version --check",
    "sequences": "pgqueue migrate",
    "slot": "SELECT * FROM pg_replication_slots",
    "snapshot": _SESSIONS,
    "vacuum": "SELECT relname, n_dead_tup, last_autovacuum FROM pg_stat_user_tables ORDER BY n_dead_tup DESC",
}
"""Findings about the server or the tables. No page shows these: a command does, or puts it right."""


def verdict(
    findings: Sequence[Finding] | None, failed: int | None, queues: Sequence[InNeed] | None = ()
) -> dict[str, str]:
    """Whether all is well, in one sentence, and how severe it is. `failed`: jobs in the last hour. `queues`: those in
    need. What is None is not known, and then it is not said that all is well.

    >>> verdict([], 0)["title"], verdict([], 3)["title"], verdict(None, 0)["title"]
    ('All is well', 'Jobs fail', 'Not all could be looked at')
    >>> verdict([], 0, [InNeed("mail", "paused", Count(7))])["title"]
    'Queue mail is paused, and 7 jobs wait'
    """
    needs = [each for each in findings or () if each.severity in NEEDS]
    text = "" if failed is None else plural(failed, "job failed", "jobs failed", str(failed) if failed else "No")
    text = f"{text} in the last hour." if text else ""
    if needs:
        level = "critical" if any(each.severity == "critical" for each in needs) else "warning"
        things = "thing needs you" if len(needs) == 1 else "things need you"
        return {"level": level, "title": f"{_word(len(needs)).capitalize()} {things}", "text": text}
    if findings is None or queues is None:
        return {"level": "warning", "title": "Not all could be looked at", "text": text}
    if queues:
        title, kinds = _of_queues(queues)
        return {"level": "warning", "title": title, "text": f"{kinds} {text}".strip()}
    if failed is None:
        return {"level": "warning", "title": "Not all could be looked at", "text": text}
    if failed:
        return {"level": "warning", "title": "Jobs fail", "text": f"{text} Nothing else is wrong."}
    return {"level": "well", "title": "All is well", "text": text}


def _of_queues(queues: Sequence[InNeed]) -> tuple[str, str]:
    """What is said of queues in need; and how many there are of each kind, if there is more than one kind.

    >>> _of_queues([InNeed("a", "behind", Count(1)), InNeed("b", "behind", Count(2)), InNeed("c", "paused", Count(3))])
    ('Three queues need you', 'Two are behind, one is paused.')
    """
    kinds: dict[str, list[InNeed]] = {}
    for each in queues:
        kinds.setdefault(each.need, []).append(each)
    if len(kinds) > 1:
        said = ", ".join(f"{_word(len(each))} {VERBS[need][len(each) > 1]}" for need, each in kinds.items())
        return f"{_word(len(queues)).capitalize()} queues need you", f"{said.capitalize()}."
    [need] = kinds
    one, more = VERBS[need]
    several = f"{_word(len(queues)).capitalize()} queues {more}"
    title = f"Queue {queues[0].queue} {one}" if len(queues) == 1 else several
    if need == "paused":
        waiting = Count(sum(each.waiting.n for each in queues), all(each.waiting.exact for each in queues))
        title += f", and {plural(waiting.n, 'job waits', 'jobs wait', str(waiting))}"
    return title, ""


def _word(n: int) -> str:
    return WORDS[n] if n < len(WORDS) else f"{n:,}"


def told(finding: Finding, now: datetime) -> dict[str, Any]:
    """The finding, since when it is so, and where one looks: a place below the mount, else a page of the manual if it
    is published, else a command."""
    since = None if finding.seconds is None else now - timedelta(seconds=finding.seconds)
    path, label = PLACES.get(finding.name, (None, None))
    if finding.queue is not None:
        query = [("queue", finding.queue), *(("state", state) for state in STATES[finding.name])]
        path, label = f"/jobs?{urlencode(query)}", "Look at the jobs"
    elif finding.name in STATES:  # it is about several queues: there are more than are listed
        path, label = "/queues", "Queues"
    return dict(plain(finding)) | {
        "since": since,
        "place": path,
        "place_label": label,
        "manual": finding.page if is_published(finding.page) else None,
        "command": COMMANDS.get(finding.name),
    }
