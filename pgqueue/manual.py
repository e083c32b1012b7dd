"""The manual: the one place that knows the address of its pages.

Errors, log lines, `doctor`, `why` and the dashboard name a page by `page`, or a symptom of the page for the night by
`at_night`. A test looks that each page and each section that is named so is there. Where the pages are published, only
`ROOT` changes.
"""

from __future__ import annotations

from enum import StrEnum

ROOT = "docs/"


class Symptom(StrEnum):
    """What an operator sees: each is a section of the page for the night."""

    STANDS_STILL = "the-queue-stands-still"
    STARTS_LATE = "jobs-start-late"
    FAILS = "many-jobs-fail"
    RUNS_LONG = "a-job-runs-for-hours"
    DISK = "the-disk-fills"
    WORKERS_RESTART = "workers-restart"
    DEPLOY = "a-deploy-hangs"
    FAILED_OVER = "the-database-failed-over"
    WRONG_JOB = "the-wrong-job-was-deleted"


def page(name: str, section: str = "") -> str:
    """Return the address of a page of the manual, or of one of its sections.

    >>> page("rates"), page("relay", "copies")
    ('docs/rates.md', 'docs/relay.md#copies')
    """
    return f"{ROOT}{name}.md" + (f"#{section}" if section else "")


def is_published(address: str) -> bool:
    """Whether a browser can open this address of the manual. Else it is a file of pgqueue.

    >>> is_published(page("rates")), is_published("https://pgqueue.example/rates")
    (False, True)
    """
    return address.startswith(("https://", "http://"))


def at_night(symptom: Symptom) -> str:
    """Return the address of what to do about a symptom.

    >>> at_night(Symptom.DISK)
    'docs/night.md#the-disk-fills'
    """
    return page("night", symptom.value)
