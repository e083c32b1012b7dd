"""`pgqueue work`: a worker process for the tasks of the named modules."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from pgqueue import early_signals
from pgqueue.cli.options import Duration, Size, Whole, app_dir, database, databases_of, given, log_options

if TYPE_CHECKING:
    from pgqueue.databases import Database
    from pgqueue.worker.worker import Worker


WORKER_OPTIONS = ("concurrency", "poll", "lease", "version_tag", "pool_size", "fail_unknown", "idle")
"""What goes to the worker as it was given."""


@click.command("work")
@click.argument("modules", metavar="MODULE...", nargs=-1, required=True)
@click.option(
    "-q",
    "--queues",
    metavar="NAME[:SLOTS],…",
    multiple=True,
    help="Only these; SLOTS gives a queue its own slots [all queues of the tasks].",
)
@click.option("-c", "--concurrency", type=Whole(1), default=10, show_default=True, help="Jobs at once.")
@click.option("--processes", type=Whole(1, 1000), default=1, show_default=True, help="This many, kept by a supervisor.")
@click.option("--memory-limit", type=Size(), help="Replace a process that has more, such as 500M.")
@click.option("--max-jobs", type=Whole(1), help="Replace a process after this many jobs.")
@click.option(
    "--check-every",
    type=Duration(least=0.1),
    default="5s",
    show_default=True,
    help="How often the supervisor checks the memory.",
)
@click.option("--reload", is_flag=True, help="Restart when a file of --app-dir changes, for development.")
@click.option("--supervised", metavar="FD", type=int, hidden=True)
@click.option("--listen-dsn", metavar="DSN", help="Where LISTEN goes, past a pooler; off: poll only [the DSN].")
@click.option(
    "--pool-size",
    type=Whole(1),
    help="Most connections of handlers at once, for sync and for async ones each [one for each slot].",
)
@click.option(
    "--fail-unknown",
    type=Duration(),
    default="24h",
    show_default=True,
    help="Fail a job if no live worker has known its task for this time.",
)
@click.option("--poll", type=Duration(least=0.01), default="1s", show_default=True, help="Time between polls.")
@click.option(
    "--idle",
    type=Duration(),
    default="0s",
    show_default=True,
    help="For a database that sleeps: send nothing for this time while nothing happens.",
)
@click.option(
    "--lease",
    type=Duration(least=1.0),
    default="15s",
    show_default=True,
    help="After this time without a heartbeat its jobs go to other workers.",
)
@click.option(
    "--grace", type=Duration(), default="25s", show_default=True, help="How long running jobs may go on at shutdown."
)
@click.option(
    "--stuck",
    type=Duration(least=1.0),
    default="10m",
    show_default=True,
    help="End the process (exit code 6) if its loop stands still for this time.",
)
@click.option("--metrics", metavar="[HOST]:PORT", help="Serve /metrics for Prometheus; without a host: to all.")
@click.option("--version-tag", help="Version of the code, kept with each attempt [pgqueue's version].")
@app_dir
@log_options
@click.option(
    "--log-jobs/--no-log-jobs",
    default=None,
    help="A line for each job that went well, too [yes if the log is text on a terminal].",
)
@click.option(
    "--log-config",
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="JSON for logging.config.dictConfig, instead of the two above.",
)
@database
@click.pass_context
def command(ctx: click.Context, /, **options: Any) -> None:
    """Run the jobs of a module's tasks.

    Imports each MODULE and takes the jobs of the queues their tasks name. During an outage of the database the worker
    waits; only at the start an outage is an error (exit code 3), unless the server is just starting up.

    SIGTERM or Ctrl-C: take no more jobs, finish those that run, leave. Jobs that still run after --grace are cancelled
    and given back (exit code 5). A second signal leaves at once (130); the jobs run again when the lease is over.
    SIGUSR1: take no more jobs, finish those that run, leave.

    With --processes a supervisor keeps this many processes. SIGHUP or `pgqueue restart` replaces them, new ones first.
    SIGUSR1 or `pgqueue quiet` lets them finish. SIGTTIN and SIGTTOU or `pgqueue scale` change their number.

    With several databases, by --database or PGQUEUE_DATABASES, there is a worker for each in this one process, with
    --concurrency each. One that is away is waited for, and the others go on. If a worker fails, the others go on, and
    the exit code at the end says it.

    A failed attempt n is made again after min(most, first x factor^(n-1)) seconds, times a random 0.5 to 1. The default
    is min(21600, 10 x 3^(n-1)): ten attempts within 7 to 15 hours. A task's retry= may say otherwise.

    \b
    Examples:
      pgqueue work myapp.tasks
      pgqueue work myapp.tasks otherapp.tasks -q mail:5,default --concurrency 20
      pgqueue work tasks --app-dir src --log-format json
      pgqueue work tasks --processes 4 --memory-limit 500M --metrics :9000
      pgqueue work tasks --database a=DSN --database b=DSN
    """
    from pgqueue.cli.task_modules import import_tasks, look_in

    directory = look_in(options["app_dir"])
    several = _databases(ctx, options)
    _set_up_logs(ctx, options)
    if several:
        raise click.exceptions.Exit(_work_for(several, options, directory))
    if _is_supervisor(ctx, options):
        _hold_embedded(given(ctx).get("dsn"))
        raise click.exceptions.Exit(_supervise(options, directory))

    if options["supervised"] is None:
        early_signals.give_back(signal.SIGHUP, signal.SIGTTIN, signal.SIGTTOU)  # one worker has no answer to them
    from pgqueue.cli.metrics import serving
    from pgqueue.cli.worker_process import serve, worker_end_of  # with all of a worker: a supervisor needs none of it
    from pgqueue.worker.complete import job_logger

    if _logs_jobs(options):
        job_logger.success_level = logging.INFO

    supervised = options["supervised"] is not None
    with serving(None if supervised else options["metrics"]) as answer:
        with worker_end_of(options["supervised"]) as worker_end:
            import_tasks(options["modules"], directory)
            how = {name: options[name] for name in WORKER_OPTIONS} | {"queues": _names(options["queues"])}
            worker = _worker(given(ctx), options["listen_dsn"], how)
        if worker_end is not None and options["metrics"]:
            from pgqueue.telemetry.gauges import Reader

            worker_end.gauges = Reader().begin
        answer(worker.ask_numbers)
        code = serve(worker, options["grace"], options["stuck"], worker_end)
    sys.stderr.flush()
    raise click.exceptions.Exit(code)


def _databases(ctx: click.Context, options: Mapping[str, Any]) -> tuple[Database, ...]:
    """The databases of this command line, if one process can work for them; none if there is one database."""
    from pgqueue.config import OFF

    found = databases_of(ctx)
    if not found:
        return ()
    if (options["listen_dsn"] or os.environ.get("PGQUEUE_LISTEN_DSN") or OFF) != OFF:
        raise click.UsageError(
            f"with several databases --listen-dsn and PGQUEUE_LISTEN_DSN can only be {OFF}: each has a DSN of its own"
        )
    if _is_supervisor(ctx, options) or options["supervised"] is not None:
        raise click.UsageError(
            "with several databases there is one process: leave out --processes, --memory-limit, --max-jobs and "
            "--reload, and start the command several times instead"
        )
    return found


def _work_for(databases: tuple[Database, ...], options: Mapping[str, Any], directory: Path) -> int:
    """Work for several databases, a worker for each; the exit code."""
    early_signals.give_back(signal.SIGHUP, signal.SIGTTIN, signal.SIGTTOU)
    from pgqueue.cli.many_workers import Own, serve, warn_of_schedules
    from pgqueue.cli.metrics import serving_many
    from pgqueue.cli.task_modules import import_tasks
    from pgqueue.client.tasks import declared
    from pgqueue.worker.complete import job_logger

    if _logs_jobs(options):
        job_logger.success_level = logging.INFO
    with serving_many(options["metrics"]) as answer:
        import_tasks(options["modules"], directory)
        how = {name: options[name] for name in WORKER_OPTIONS} | {"queues": _names(options["queues"])}
        warn_of_schedules(databases, declared())
        owns = [Own(each, lambda: _worker({}, options["listen_dsn"], how)) for each in databases]
        answer({own.database: own.worker.ask_numbers for own in owns})
        code = serve(owns, options["grace"], options["stuck"])
    sys.stderr.flush()
    return code


def _set_up_logs(ctx: click.Context, options: Mapping[str, Any]) -> None:
    from pgqueue.cli import logs

    logs.write_whole_lines()
    if options["log_config"] is None:
        logs.set_up(options["log_level"], options["log_format"])
    elif _said(ctx, "log_level") or _said(ctx, "log_format"):
        raise click.UsageError("--log-config says it all: give it, or --log-level and --log-format")
    else:
        logs.load(options["log_config"])


def _logs_jobs(options: Mapping[str, Any]) -> bool:
    from pgqueue.cli import logs

    if options["log_jobs"] is None:
        return options["log_config"] is None and options["log_format"] == "text" and logs.on_terminal()
    wanted: bool = options["log_jobs"]
    return wanted


def _is_supervisor(ctx: click.Context, options: Mapping[str, Any]) -> bool:
    """Whether this process shall keep others that work; not if it is one of those."""
    wanted = _said(ctx, "processes") or any(options[name] for name in ("memory_limit", "max_jobs", "reload"))
    return wanted and options["supervised"] is None


def _hold_embedded(dsn: str | None) -> None:
    """Use the server of `embedded:` until the end: the last worker, which ends before its supervisor, would stop it."""
    from pgqueue.config import EMBEDDED

    if (dsn or os.environ.get("PGQUEUE_DSN")) == EMBEDDED:
        from pgqueue.database import embedded

        embedded.resolve(EMBEDDED)


def _supervise(options: Mapping[str, Any], directory: Path) -> int:
    """Keep processes until told to end; the exit code."""
    from pgqueue.cli.metrics import serving
    from pgqueue.supervisor.recycling import Terms
    from pgqueue.supervisor.supervisor import Supervisor, keep

    terms = Terms(
        options["processes"],
        tuple(sys.argv[1:]),  # the worker processes get the same command line
        options["grace"],
        options["memory_limit"],
        options["max_jobs"],
        options["check_every"],
        directory if options["reload"] else None,
    )
    with serving(options["metrics"]) as answer:
        supervisor = Supervisor(terms)
        answer(supervisor.ask_numbers)
        return keep(supervisor)


def _worker(said: dict[str, str], listen_dsn: str | None, how: dict[str, Any]) -> Worker:
    from pgqueue.config import OFF, config, configure
    from pgqueue.database import embedded
    from pgqueue.worker.worker import Worker

    configure(**said)  # type: ignore[arg-type]  # the command line comes before what a module has configured
    settings = config(listen_dsn=listen_dsn)
    dsn = embedded.resolve(settings.require_dsn())
    listen_dsn = OFF if settings.listen_dsn is None else embedded.resolve(settings.listen_dsn)
    return Worker(dsn=dsn, listen_dsn=listen_dsn, **how)


def _said(ctx: click.Context, option: str) -> bool:
    return ctx.get_parameter_source(option) is not ParameterSource.DEFAULT


def _names(queues: tuple[str, ...]) -> list[str] | None:
    names = [name.strip() for given in queues for name in given.split(",") if name.strip()]
    return names or None
