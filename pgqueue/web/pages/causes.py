"""What causes of failures say, for the overview, the errors and the page of a task.

A message may quote an argument. So it is read from the newest job of the cause, and is hidden as on the page of that
job: by the job's own values. Without that job it is hidden while anything is. Only then the first line is taken: of a
part of a text no secret is found that goes on behind it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pgqueue.admin.cause_errors import CauseError
from pgqueue.admin.error_groups import ErrorGroup
from pgqueue.web.pages.page import plain
from pgqueue.web.redaction import HIDDEN, Redaction

LINE_MOST = 500
"""So many characters of the first line are shown."""


def messages(errors: Sequence[CauseError], groups: Sequence[ErrorGroup], redaction: Redaction) -> dict[str, str]:
    """By fingerprint: what is shown of each cause's message, of those that have one. `errors` are those of the causes'
    newest jobs."""
    found = {(each.job.id, each.error_type): _shown(each, redaction) for each in errors}
    return {group.fingerprint: text for group in groups if (text := _message(group, found, redaction))}


def first_line(text: str) -> str:
    """What is shown of an error at a glance."""
    return text.lstrip(" \n\r\t").partition("\n")[0][:LINE_MOST]


def _message(group: ErrorGroup, found: Mapping[tuple[int, str], str], redaction: Redaction) -> str | None:
    said = found.get((group.job_ids[0], group.error_type)) if group.job_ids else None
    return said or (HIDDEN if redaction.active else group.message)


def _shown(each: CauseError, redaction: Redaction) -> str:
    attempts = [{"error_type": each.error_type, "message": each.message}]
    key = each.job.key and redaction.awaited(each.job.key)
    shown = redaction.shown(plain(each.job) | {"key": key, "attempts": attempts})
    return first_line(str(shown["attempts"][0]["message"]))
