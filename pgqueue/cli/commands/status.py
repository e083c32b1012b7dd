"""`pgqueue status`: states, queues and workers on one screen."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from textwrap import wrap
from typing import TYPE_CHECKING

import click

from pgqueue.admin.bounded import cut_at
from pgqueue.cli.database import connected, reading
from pgqueue.cli.json_document import document
from pgqueue.cli.options import as_json, database
from pgqueue.cli.queue_table import counted, pauses, queue_table
from pgqueue.cli.tables import cut_line, fitting, short, span, table, width
from pgqueue.jobs.states import STATES
from pgqueue.plain_text import plain, plural

if TYPE_CHECKING:
    from pgqueue.admin.depth import UnknownTask
    from pgqueue.admin.lag import HeldFence, Lag, RelayLag
    from pgqueue.admin.limits import Undeclared
    from pgqueue.admin.queries import Status, WorkerInfo

WATCH_SECONDS = 2.0
WORKERS_MOST = 40
UNDECLARED_MOST = 10
UNKNOWN_MOST, NAME_MOST = 10, 60


@click.command("status")
@click.option("--watch", is_flag=True, help="Repeat every 2 s until Ctrl-C; with --json one line each time.")
@as_json
@database
def command(watch: bool, as_json: bool) -> None:
    """Show jobs by state, queues and workers.

    Numbers up to 10,000 are counted; larger ones are estimates, marked ~. Large tables are counted by the leading
    worker every few seconds: a line says how long ago. OLDEST is how long the first job that could run has waited,
    STUCK how long a job is blocked although its key has room. A queue is NOT SERVED if no worker serves it
    that takes jobs and has sent a heartbeat within three leases. A line for each PAUSED queue and task says since when,
    and by which actor. Jobs wait for an UNDECLARED limit or rate until a worker declares it. Tasks that no live worker
    of their queue knows are named, too. In a database with an outbox the staged jobs that wait for a relay are counted,
    and how long the oldest has waited; in the queue's database there is what each relay has reported, and, as HELD,
    which session keeps it from delivering.

    \b
    Examples:
      pgqueue status
      pgqueue status --watch
      pgqueue status --json | jq '.items[0].queues[].name'
    """
    if not watch:
        click.echo(_now(as_json))
        return
    try:
        _watch(as_json)
    except KeyboardInterrupt:
        click.echo("", err=True)


def _watch(as_json: bool) -> None:
    """Repeat the status. Each time has a new connection, so that it goes on after a restart of the database."""
    from pgqueue.cli.exit_codes import DATABASE, code_of

    text = _now(as_json)
    while True:
        if not as_json:
            click.clear()
        click.echo(text)
        time.sleep(WATCH_SECONDS)
        try:
            text = _now(as_json)
        except Exception as error:
            if code_of(error) != DATABASE:
                raise
            click.echo(f"database unreachable, trying again: {' '.join(str(error).split())}", err=True)


def _now(as_json: bool) -> str:
    """The status as text: that of the queue, or of the outbox where there is nothing else."""
    from pgqueue.errors import SchemaMissing

    try:
        status, undeclared, lag, relays, held = _read()
    except SchemaMissing:
        if (alone := _read_outbox()) is None:
            raise
        return document([{"outbox": alone}]) if as_json else "\n".join(_outbox(alone))
    if as_json:
        others = {"undeclared": undeclared, "outbox": lag, "relays": relays, "held": held}
        return document([asdict(status) | {"workers_cut_at": _cut_at(status)} | others])
    lines = [
        *(line for relay in relays for line in _relay(relay)),
        *map(_held, held),
        *([] if lag is None else _outbox(lag)),
    ]
    return "\n".join([*_screen(status, undeclared), *(["", *lines] if lines else [])])


def _read() -> tuple[Status, list[Undeclared] | None, Lag | None, list[RelayLag], list[HeldFence]]:
    """The status, the undeclared limits and rates, the lag of an outbox that lies here, too, and of those whose jobs
    come here, and which of these are held up. None is for what this role may not see, or what is not there."""
    import psycopg

    from pgqueue.admin import lag, limits, queries

    with reading("status") as conn:
        status = queries.status(conn)
        outbox = lag.lag(conn) if lag.visible(conn) else None
        relays, held = lag.relays(conn), lag.held(conn)
        try:
            with conn.transaction():
                return status, limits.undeclared(conn), outbox, relays, held
        except psycopg.errors.InsufficientPrivilege:  # the role's grants are older than the schema
            return status, None, outbox, relays, held


def _read_outbox() -> Lag | None:
    """The lag of an outbox in a database that has no queue; None if there is no outbox."""
    from pgqueue.admin import lag
    from pgqueue.config import config
    from pgqueue.database import migrations

    with connected("status", check=False) as conn:
        if not lag.visible(conn):
            return None
        migrations.require(conn, config().schema, migrations.OUTBOX)
        return lag.lag(conn)


def _outbox(lag: Lag) -> Iterator[str]:
    yield f"OUTBOX: staged jobs that wait for a relay: {_behind(lag)}."
    if lag.refused:
        yield f"REFUSED staged jobs: {_number(lag.refused)}; `pgqueue relay --list-refused` says why."


def _relay(relay: RelayLag) -> Iterator[str]:
    name = plain(relay.name)
    if relay.stopped is not None:
        yield f"STOPPED, the relay of {name}: {plain(relay.stopped)}."
    if relay.is_silent:
        since = span(relay.reported)
        yield f"NO RELAY of {name} has reported for {since}; staged jobs that waited then: {_behind(relay)}."
    else:
        yield f"RELAY of {name}: staged jobs that wait: {_behind(relay)} ({span(relay.reported)} ago)."
    if relay.refused:
        yield f"REFUSED staged jobs of {name}: {_number(relay.refused)}; `pgqueue relay --list-refused` says why."


def _held(fence: HeldFence) -> str:
    return (
        f"HELD for {span(fence.seconds)}: {plain(fence.said)}; what is staged there waits. `pgqueue doctor` says more."
    )


def _behind(lag: Lag | RelayLag) -> str:
    return _number(lag.waiting) + ("" if lag.oldest is None else f", the oldest for {span(lag.oldest)}")


def _number(number: int) -> str:
    from pgqueue.admin.lag import COUNTED_MOST

    return f"more than {COUNTED_MOST:,}" if number > COUNTED_MOST else f"{number:,}"


def _screen(status: Status, undeclared: Sequence[Undeclared] | None) -> Iterator[str]:
    server = status.server_version.split()[0]
    yield f"database {plain(status.database)}" + (f", number {status.number}" if status.number else "")
    yield f"schema {status.schema} version {status.version}, PostgreSQL {server}, {status.at:%Y-%m-%d %H:%M:%S %Z}"
    if status.read_only:
        yield "READ ONLY: default_transaction_read_only is on, so workers take nothing until it is off."
    yield ""
    yield from _states(status)
    yield ""
    yield from _queues(status)
    yield from counted(status.counted_at, status.at)
    yield from _pauses(status)
    yield from _unknown(status.unknown)
    yield from _undeclared(undeclared)
    yield ""
    yield from _workers(status.workers)
    yield from cut_line(_cut_at(status), "workers", "from the newest on")


def _states(status: Status) -> list[str]:
    rows = [STATES[:4], [status.states[state] for state in STATES[:4]]]
    more = [STATES[4:], [status.states[state] for state in STATES[4:]]]
    return ["  ".join(str(cell).rjust(16) for cell in row) for row in (*rows, *more)]


def _queues(status: Status) -> Iterator[str]:
    if not status.queues:
        yield "No queue has jobs or workers."
        yield "`pgqueue enqueue NAME` puts a job in, `pgqueue work MODULE` runs them."
        return
    yield from queue_table(status.queues)


def _pauses(status: Status) -> Iterator[str]:
    queues = [("queue", each.name, each.paused_at, each.paused_by) for each in status.queues]
    tasks = [("task", each.name, each.paused_at, each.paused_by) for each in status.paused_tasks]
    lines = list(pauses([*queues, *tasks], status.at))
    yield from ["", *lines] if lines else []


def _unknown(unknown: Sequence[UnknownTask]) -> Iterator[str]:
    if not unknown:
        return
    yield ""
    names: Counter[str] = Counter()
    for each in unknown:
        names[each.task] += each.jobs.n
    least = "" if all(each.jobs.exact for each in unknown) else "at least "
    jobs = plural(names.total(), "job", "jobs")
    columns = width()
    shown, rest = fitting(names.most_common(), UNKNOWN_MOST)
    most = [f"{plain(name) if columns is None else short(plain(name), NAME_MOST)} {number:,}" for name, number in shown]
    if rest:
        most.append(plural(rest, "more task", "more tasks"))
    line = f"{least}{jobs} of tasks no live worker knows: {', '.join(most)}"
    yield from [line] if columns is None else wrap(line, columns, subsequent_indent="  ", break_on_hyphens=False)


def _undeclared(undeclared: Sequence[Undeclared] | None) -> Iterator[str]:
    if undeclared is None:
        yield "Limits and rates: this role may not see them; run `pgqueue grants ROLE --for read` once more."
        return
    if undeclared:
        yield ""
    shown, rest = fitting(undeclared, UNDECLARED_MOST)
    for each in shown:
        jobs = plural(each.waiting, "job waits", "jobs wait", "more than 10,000" if each.waiting > 10_000 else None)
        yield f"UNDECLARED {each.kind} {plain(each.name)}: {jobs} for it, and no worker has declared it."
    if rest:
        yield f"… and {rest} more; `pgqueue limits` shows them"


def _cut_at(status: Status) -> int | None:
    from pgqueue.admin.workers import WORKERS_MOST as READ_MOST

    return cut_at(status.workers, READ_MOST)


def _workers(workers: Sequence[WorkerInfo]) -> Iterator[str]:
    if not workers:
        yield "No workers."
        return
    alive_first = sorted(workers, key=lambda worker: (worker.state == "dead", -worker.id))
    shown, rest = fitting(alive_first, WORKERS_MOST)
    rows = [
        [
            worker.id,
            f"{worker.host}:{worker.pid}",
            f"{worker.lost} LOST, {worker.state}" if worker.lost else worker.state,
            f"{worker.running}/{worker.concurrency}",
            f"{span(worker.beat_age)} ago",
            worker.version_tag,
            worker.tasks,
            ",".join(worker.queues),
        ]
        for worker in shown
    ]
    heads = ["WORKER", "PROCESS", "STATE", "BUSY", "BEAT", "VERSION", "TASKS", "QUEUES"]
    yield from table(heads, rows, right="WORKER BUSY BEAT TASKS", gives="QUEUES PROCESS VERSION")
    if rest:
        yield f"… and {plural(rest, 'more worker', 'more workers')}; --json prints all"
