"""`pgqueue workers`: every worker process, with the jobs that run on it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import click

from pgqueue.admin.bounded import cut_at
from pgqueue.cli.database import reading
from pgqueue.cli.json_document import document
from pgqueue.cli.options import as_json, database
from pgqueue.cli.tables import cut_line, fitting, span, table

if TYPE_CHECKING:
    from pgqueue.admin.workers import WorkerNow

JOBS_MOST = 5


@click.command("workers")
@click.option("--host", metavar="NAME", help="Only those of this host.")
@as_json
@database
def command(host: str | None, as_json: bool) -> None:
    """Show the worker processes, and which jobs run where.

    Shown is the state at each worker's last heartbeat; the column BEAT is its age. RSS is the memory of the process. If
    a worker has sent no heartbeat for its lease, it is LATE, and about to be declared dead.

    \b
    Examples:
      pgqueue workers
      pgqueue workers --host web1 --json
    """
    from pgqueue.admin import workers as listing

    with reading("workers") as conn:
        found = listing.workers(conn, host=host)
    cut = cut_at(found, listing.WORKERS_MOST)
    if as_json:
        click.echo(document(found, cut_at=cut))
    else:
        click.echo("\n".join([*_screen(found), *cut_line(cut, "workers", "by host", "--host")]))


def _screen(workers: Sequence[WorkerNow]) -> Iterator[str]:
    if not workers:
        yield "No workers."
        return
    rows = [_row(worker) for worker in workers]
    heads = ["WORKER", "PROCESS", "SUPERVISOR", "STATE", "BUSY", "RSS", "BEAT", "VERSION", "JOBS"]
    yield from table(heads, rows, right="WORKER SUPERVISOR BUSY RSS BEAT", gives="JOBS PROCESS VERSION")


def _row(worker: WorkerNow) -> list[object]:
    state = f"{worker.lost} LOST, {worker.state}" if worker.lost else worker.state
    shown, more = fitting(worker.jobs, JOBS_MOST)
    jobs = [f"{job.id} {job.task} {span(job.age)}" for job in shown]
    return [
        worker.id,
        f"{worker.host}:{worker.pid}",
        "" if worker.supervisor_id is None else worker.supervisor_id,
        f"{state}, LATE" if worker.beat_age > worker.lease else state,
        f"{worker.busy}/{worker.concurrency}",
        "" if worker.rss is None else f"{worker.rss >> 20}M",
        f"{span(worker.beat_age)} ago",
        worker.version_tag,
        ", ".join(jobs) + (f", {more} more" if more > 0 else ""),
    ]
