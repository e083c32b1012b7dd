"""`pgqueue doctor`: why jobs wait, and the health of what the queue stands on."""

from __future__ import annotations

from collections.abc import Iterator
from textwrap import wrap
from typing import TYPE_CHECKING

import click

from pgqueue.cli.database import reading
from pgqueue.cli.exit_codes import NO
from pgqueue.cli.json_document import document
from pgqueue.cli.options import as_json, database
from pgqueue.cli.queue_table import counted
from pgqueue.cli.tables import span, table, width
from pgqueue.plain_text import plain

if TYPE_CHECKING:
    from pgqueue.admin.doctor import Diagnosis, DutyInfo, Finding


@click.command("doctor")
@as_json
@database
def command(as_json: bool) -> None:
    """Say why jobs wait, and what is wrong below the queue.

    Exit code 0 if nothing is wrong, 1 with any finding. Each finding says what, since when, what to do, and where to
    read more. With --json its severity is `critical`, `warning` or `notice`. What this role may not see of other
    sessions is not looked at.

    \b
    Examples:
      pgqueue doctor
      pgqueue doctor --json | jq '.items[] | select(.severity == "critical")'
    """
    from pgqueue.admin import doctor

    with reading("doctor") as conn:
        found = doctor.doctor(conn)
    if as_json:
        click.echo(
            document(
                found.findings,
                reasons=found.reasons,
                duties=found.duties,
                at=found.at,
                counted_at=found.counted_at,
                number=found.number,
            )
        )
    else:
        click.echo("\n".join(_screen(found)))
    if found.findings:
        raise click.exceptions.Exit(NO)


def _screen(found: Diagnosis) -> Iterator[str]:
    if found.number:
        yield f"database number {found.number}"
        yield ""
    if found.reasons:
        rows = [[each.jobs, each.state, each.reason] for each in found.reasons]
        yield from table(["JOBS", "STATE", "REASON"], rows, right="JOBS")
        if found.at is not None and found.counted_at is not None:
            yield from counted(found.counted_at, found.at)
        yield ""
    if found.duties:
        yield from table(["DUTY", "LAST", "TOOK", "ERROR"], [_duty(each) for each in found.duties], gives="ERROR")
        yield ""
    if not found.findings:
        yield "No finding."
    for finding in found.findings:
        yield from _finding(finding)
    yield from _not_yet(found)


def _not_yet(found: Diagnosis) -> Iterator[str]:
    """Why jobs that are counted above as unserved are no finding: their worker may just be starting."""
    from pgqueue.admin.doctor import UNSERVED_SECONDS

    unserved = any(each.reason == "unserved" for each in found.reasons)
    if unserved and not any(each.name == "unserved" for each in found.findings):
        yield f"Jobs without a live worker are a finding once one has waited for {span(UNSERVED_SECONDS)}."


def _duty(duty: DutyInfo) -> list[object]:
    ran = "never" if duty.ran is None else f"{span(duty.ran)} ago"
    error = "" if duty.error is None else f"{span(duty.failed)} ago: {duty.error}"
    return [duty.name, ran, span(duty.took), error]


def _finding(finding: Finding) -> Iterator[str]:
    since = "" if finding.seconds is None else f" (for {span(finding.seconds)})"
    yield from _wrapped(f"{finding.severity.upper()} {finding.name}: {finding.what}{since}", "  ")
    yield from _wrapped(f"  {finding.todo}; see {finding.page}", "  ")


def _wrapped(line: str, indent: str) -> list[str]:
    columns = width()
    shown = plain(line)
    return [shown] if columns is None else wrap(shown, columns, subsequent_indent=indent, break_on_hyphens=False)
