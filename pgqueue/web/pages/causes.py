"""What causes of failures say, for the overview, the errors and the page of a task.

A message may quote an argument. So it is read from the newest job of the cause, and is hidden as on the page of that
job: by the job's own values. Without that job it is hidden while anything is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pgqueue.admin.cause_errors import CauseError
from pgqueue.admin.error_groups import ErrorGroup
from pgqueue.web.pages.page import plain
from pgqueue.web.redaction import HIDDEN, Redaction


def messages(errors: Sequence[CauseError], groups: Sequence[ErrorGroup], redaction: Redaction) -> dict[str, str]:
    """By fingerprint: what is shown of each cause's message, of those that have one. `errors` are those of the causes'
    newest jobs."""
    found = {(each.job.id, each.error_type): _shown(each, redaction) for each in errors}
    return {group.fingerprint: text for group in groups if (text := _message(group, found, redaction))}


def _message(group: ErrorGroup, found: Mapping[tuple[int, str], str], redaction: Redaction) -> str | None:
    said = found.get((group.job_ids[0], group.error_type)) if group.job_ids else None
    return said or (HIDDEN if redaction.active else group.message)


def _shown(each: CauseError, redaction: Redaction) -> str:
    attempts = [{"error_type": each.error_type, "message": each.message}]
    key = each.job.key and redaction.awaited(each.job.key)
    return str(redaction.shown(plain(each.job) | {"key": key, "attempts": attempts})["attempts"][0]["message"])
