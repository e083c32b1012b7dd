"""`pgqueue jobs`: list the jobs that fit, or show everything about one job."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from pgqueue.admin.bounded import cut_at
from pgqueue.cli.database import clock, reading
from pgqueue.cli.job_filter import choosing, read
from pgqueue.cli.json_document import document, fields_of
from pgqueue.cli.options import Moment, Whole, as_json, database
from pgqueue.cli.tables import cut_line, span, table, width
from pgqueue.jobs.nodes import NODES_MOST
from pgqueue.jobs.states import ASKED
from pgqueue.jobs.values import HIGHEST_ID, digits
from pgqueue.plain_text import plain, plain_json, plain_lines, plural

if TYPE_CHECKING:
    from pgqueue.admin.queries import JobInfo, Page

SHOWN_MOST = 2_000
"""At most this many characters of a value are shown on a terminal; --json prints all."""


class Place(click.ParamType):  # type: ignore[type-arg]
    """Where a list goes on: the id of a job, or a time and an id, as the list before has said."""

    name = "place"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        return str(value) if (id := digits(str(value))) is None else id


@click.command("jobs")
@click.argument("id", type=Whole(1), required=False)
@choosing(ASKED, only=True)
@click.option("--key", help="Only with this lock key, unique key or idempotency key.")
@click.option(
    "--arg", "arguments", metavar="NAME=VALUE", multiple=True, help="Only with this argument; VALUE as JSON or text."
)
@click.option("--node", metavar="N", type=Whole(1, NODES_MOST), help="Only of this node of the flow.")
@click.option("--worker", metavar="ID", type=Whole(1, HIGHEST_ID), help="Only what ran or runs on this worker.")
@click.option("--error-type", metavar="NAME", help="Only with an attempt that failed with this exception.")
@click.option("--error", metavar="TEXT", help="Only with this in the reason or in the error of an attempt.")
@click.option("--since", type=Moment(ago=True), help="Only enqueued since then; 2h is two hours ago.")
@click.option("--until", type=Moment(ago=True), help="Only enqueued before then.")
@click.option("--after", metavar="PLACE", type=Place(), help="Go on behind this place: what a list has said.")
@click.option("--limit", type=Whole(1, 10_000), default=20, show_default=True, help="List at most this many.")
@as_json
@database
def command(id: int | None, arguments: tuple[str, ...], as_json: bool, **given: Any) -> None:
    """List jobs, or show one.

    With an ID it shows everything about that job and its failed attempts. Scheduled jobs alone are listed as they are
    due, the first one first; ended jobs alone as they ended, the last one first; others by ID, the newest first.
    `retrying` are the scheduled jobs that wait for another attempt. A search looks at 20,000 jobs of the states at a
    time, in this order. If it has found too few, it says so, and --after goes on. A VALUE that is no JSON is text; the
    text 7 is '"7"'. Exit code 1: no job has this ID.

    \b
    Examples:
      pgqueue jobs --state failed --task mail.send
      pgqueue jobs --state retrying --queue mail
      pgqueue jobs --arg order_id=7 --since 2h
      pgqueue jobs --worker 12 --state running
      pgqueue jobs --error-type ConnectionError --state retrying
      pgqueue jobs 4711
      pgqueue jobs --json --limit 1000 | jq '.items[] | select(.attempt > 3)'
    """
    asked = read(given | {"args": _arguments(arguments)})
    if id is None:
        _list(asked, as_json)
    elif asked.keys() - {"limit"}:
        raise click.UsageError("an ID and the options of a search exclude each other")
    else:
        _one(id, as_json)


def _arguments(given: Sequence[str]) -> dict[str, Any] | None:
    """The arguments of --arg. A value that is no JSON is a text."""
    found: dict[str, Any] = {}
    for each in given:
        name, separator, value = each.partition("=")
        if not name or not separator:
            raise click.BadParameter(f"{each!r}: write NAME=VALUE, such as order_id=7", param_hint="--arg")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found or None


def _one(id: int, as_json: bool) -> None:
    from pgqueue.admin import queries

    with reading("jobs") as conn:
        job = queries.get(conn, id)
    if as_json:
        click.echo(document([fields_of(job) | {"steps_cut_at": cut_at(job.steps, queries.STEPS_MOST)}]))
    else:
        click.echo("\n".join(_details(job, cut_at(job.steps, queries.STEPS_MOST))))


def _list(asked: dict[str, Any], as_json: bool) -> None:
    from pgqueue.admin import queries
    from pgqueue.cli import known_names

    with reading("jobs") as conn:
        page = queries.search(conn, **asked)
        now = clock(conn)
        if not page.jobs and (queue := asked.get("queue")):
            known_names.warn(conn, queue, asked.get("task"))
    if as_json:
        own = ("attempts", "steps")  # of one job only
        jobs = [{name: value for name, value in fields_of(job).items() if name not in own} for job in page.jobs]
        click.echo(document(jobs, searched=page.searched, complete=page.complete, after=page.after))
        return
    if page.jobs:
        click.echo("\n".join(_rows(page, now)))
    note = _note(page)
    if note:
        click.echo(note, err=True)


def _rows(page: Page, now: datetime) -> list[str]:
    rows = [[job.id, job.state, job.queue, job.task, _attempts(job), _when(job, now)] for job in page.jobs]
    heads = ["ID", "STATE", "QUEUE", "TASK", "ATTEMPT", "WHEN"]
    return table(heads, rows, right="ID ATTEMPT", gives="TASK QUEUE")


def _note(page: Page) -> str:
    if page.searched is not None and page.after is not None:
        return (
            f"Searched {plural(page.searched, 'job', 'jobs')} of these states, as far as {page.after}; "
            f"others may fit too: --after {page.after} goes on."
        )
    return "" if page.jobs else "No job fits."


def _attempts(job: JobInfo) -> str:
    return f"{job.attempt}/{job.max_attempts}" if job.max_attempts else str(job.attempt)


def _when(job: JobInfo, now: datetime) -> str:
    if job.finished_at:
        return f"{span(now - job.finished_at)} ago"
    if job.state == "running" and job.started_at:
        return f"for {span(now - job.started_at)}" + (f", {job.progress}" if job.progress else "")
    if job.state == "scheduled" and job.run_at:
        return f"in {span(job.run_at - now)}"
    return f"since {span(now - max(job.enqueued_at, job.run_at or job.enqueued_at))}"


def _details(job: JobInfo, steps_cut_at: int | None) -> Iterator[str]:
    for name, value in fields_of(job).items():
        if name in ("attempts", "steps") or value is None:
            continue
        yield f"{name + ':':<16} {_value(str(job.progress) if name == 'progress' else value)}"
    for step in job.steps:
        yield ""
        yield f"step {plain(step.name)}: recorded {step.at:%Y-%m-%d %H:%M:%S} UTC"
        yield f"  {_value(step.result)}"
    if steps_cut_at is not None:
        yield ""
        yield from cut_line(steps_cut_at, "steps", "by their ends")
    for attempt in job.attempts:
        yield ""
        yield (
            f"attempt {attempt.attempt}: {attempt.outcome} after {span(attempt.finished_at - attempt.started_at)}, "
            f"{attempt.finished_at:%Y-%m-%d %H:%M:%S} UTC, worker {attempt.worker_id}"
        )
        said = ": ".join(text for text in (attempt.error_type, attempt.message) if text)
        for line in _cut(plain_lines(said)).split("\n"):
            yield f"  {line}"
        for line in (attempt.traceback or "").splitlines():
            yield f"  {plain(line)}"


def _value(value: Any) -> str:
    match value:
        case datetime():
            return value.isoformat(sep=" ", timespec="milliseconds")
        case str():
            return _cut(plain_lines(value)).replace("\n", "\n" + " " * 15)
        case _:
            return _cut(plain_json(value))


def _cut(text: str) -> str:
    if len(text) <= SHOWN_MOST or width() is None:
        return text
    return f"{text[:SHOWN_MOST]}… ({len(text):,} characters; --json prints all)"
