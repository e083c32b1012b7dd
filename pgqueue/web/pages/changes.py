"""What an operator changes: one job, a schedule, or the pause of a queue or a task.

By the functions that the command line calls. A change is a POST and one transaction, and a row of the record with the
visitor's name. A browser goes on to a page that says what was done; a script gets the answer as JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from urllib.parse import urlencode

from pgqueue.admin.actions import acancel, adiscard, areschedule, aretry
from pgqueue.admin.answers import WORDS, Answer
from pgqueue.admin.queues import apause, aresume
from pgqueue.client import schedules
from pgqueue.jobs.values import UNIX_EPOCH
from pgqueue.web.pages.jobs import APART, LISTED
from pgqueue.web.pages.page import Asked, Page, plain, read_time
from pgqueue.web.problems import Problem

"""A time that has come by every server's clock."""

NOTICES: Mapping[str, str] = {
    **{did: words.notice for did, words in WORDS.items() if words.notice},
    "paused": "It is paused. What runs goes on to its end.",
    "paused before": "Nothing was done: it was paused already.",
    "resumed": "It goes on.",
    "resumed before": "Nothing was done: it was not paused.",
    "enqueued": "This job was enqueued for the schedule just now.",
    "begun": "The operation has begun.",
    "stopped": "The operation is stopped. What was done stays done.",
    "over before": "Nothing was done: no such operation is open.",
    "flow cancel": "The jobs of the flow are cancelled. Those that ran are stopped by their workers.",
    "flow retry": "The jobs of the flow run again, or wait again for the jobs before them.",
    "flow before": "Nothing was done: no job of the flow was in such a state.",
    "limit set": "The limit is set, for all workers. No job is stopped.",
    "limit back": "The limit is what the code declares.",
    "rate set": "The rate is set, for all workers.",
    "rate back": "The rate is what the code declares.",
    "released": "The key is taken from the jobs that do not run. They wait for it again.",
    "key kept": "Nothing was done: a running job keeps the key until it ends. It can be cancelled.",
    "key free": "Nothing was done: no job holds this key.",
    "made": "The job is enqueued.",
    "key taken": "Nothing was enqueued: this job was enqueued before, with the same key or by the same form.",
    "ordered": "The order is given. The table of supervisors says what becomes of it.",
}
"""What a page says after a change. The URL has the word before the colon, and no text: a link cannot make one up."""


async def cancel(asked: Asked) -> Page:
    """Cancel the job, or ask its worker to stop it."""
    return _answered(asked, await asked.change(lambda conn: acancel(conn, asked.id)))


async def retry(asked: Asked) -> Page:
    """Make an ended job available again; a completed one is run as a new job, but not with `again=0`.

    The button of a failed job sends that: the job may have completed since the page was made.
    """
    again = asked.field("again") != "0"
    return _answered(asked, await asked.change(lambda conn: aretry(conn, asked.id, again=again)))


async def discard(asked: Asked) -> Page:
    """Delete an ended job."""
    return _answered(asked, await asked.change(lambda conn: adiscard(conn, asked.id)))


async def run_now(asked: Asked) -> Page:
    """Let a job that waits start at once."""
    return _answered(asked, await asked.change(lambda conn: areschedule(conn, asked.id, at=UNIX_EPOCH)))


async def reschedule(asked: Asked) -> Page:
    """Let a job that waits start at the time in the field `at`."""
    at = time_of(asked)
    return _answered(asked, await asked.change(lambda conn: areschedule(conn, asked.id, at=at)))


def time_of(asked: Asked) -> datetime:
    """The time in the field `at`, without a zone in UTC. Raises Problem for anything else: `2h` means no direction."""
    try:
        return read_time(asked.field("at") or "")
    except ValueError:
        raise Problem(400, "This cannot be done", "at: give a time like 2026-12-24T18:00") from None


async def pause(asked: Asked) -> Page:
    """Pause the queue or the task that is named."""
    kind, name = _named(asked)
    done = await asked.change(lambda conn: apause(conn, **{kind: name}))
    return _paused(kind, name, "paused", done, _page_of(asked, kind, name))


async def resume(asked: Asked) -> Page:
    """Let it go on."""
    kind, name = _named(asked)
    done = await asked.change(lambda conn: aresume(conn, **{kind: name}))
    return _paused(kind, name, "resumed", done, _page_of(asked, kind, name))


async def run_schedule(asked: Asked) -> Page:
    """Enqueue one job of the schedule now."""
    name = _schedule(asked)
    handle = await asked.change(lambda conn: schedules.arun(conn, name))
    return Page(
        "", [{"schedule": name, "id": handle.id}], {"changed": True}, after=f"/jobs/{handle.id}", did="enqueued"
    )


async def pause_schedule(asked: Asked) -> Page:
    """Let the schedule make no ticks."""
    name = _schedule(asked)
    return _ticking(name, "paused", await asked.change(lambda conn: schedules.apause(conn, name)))


async def resume_schedule(asked: Asked) -> Page:
    """Let it tick again."""
    name = _schedule(asked)
    return _ticking(name, "resumed", await asked.change(lambda conn: schedules.aresume(conn, name)))


def _answered(asked: Asked, answers: list[Answer]) -> Page:
    """To the page of the job, which keeps the list that the visitor came from. Discarded jobs have none.

    Raises Problem if there is no such job.
    """
    [answer] = answers
    if answer.did == "missing":
        raise Problem(
            404, f"There is no job {answer.id}", "It is not committed, was discarded, or retention removed it."
        )
    kept = [part for part in asked.given if LISTED in asked.given]
    if answer.did == "discarded":
        place = f"/jobs?{urlencode([part for part in kept if part[0] not in APART])}" if kept else "/jobs"
    else:
        place = f"/jobs/{answer.new or answer.id}" + (f"?{urlencode(kept)}" if kept else "")
    return Page("", [plain(answer)], {"changed": answer.changed}, after=place, did=answer.did)


def _page_of(asked: Asked, kind: str, name: str) -> str:
    """Where the button stood: on the page of a task or of a queue, else on the list of queues."""
    return f"/{kind}?{urlencode({'name': name})}" if kind == "task" or asked.field("page") else "/queues"


def _paused(kind: str, name: str, did: str, done: bool, after: str) -> Page:
    item = {kind: name, "did": did if done else f"{did} before"}
    return Page("", [item], {"changed": done}, after=after, did=item["did"])


def _ticking(name: str, did: str, done: bool) -> Page:
    return _paused("schedule", name, did, done, after="/schedules")


def _schedule(asked: Asked) -> str:
    return asked.needed("name", "give the name of a schedule")


def _named(asked: Asked) -> tuple[str, str]:
    given = [(kind, name) for kind in ("queue", "task") if (name := asked.field(kind)) is not None]
    if len(given) != 1:
        raise Problem(400, "This cannot be done", "Name a queue or a task, and not both.")
    return given[0]
