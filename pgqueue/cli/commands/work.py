"""`pgqueue work`: a worker process for the tasks of the named modules."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from pgqueue.cli.options import Duration, Size, database, given

if TYPE_CHECKING:
    from pgqueue.worker.worker import Worker

LEVELS = ("debug", "info", "warning", "error")


@click.command("work")
@click.argument("modules", metavar="MODULE...", nargs=-1, required=True)
@click.option(
    "-q",
    "--queues",
    metavar="NAME[:SLOTS],…",
    multiple=True,
    help="Only these; SLOTS are a queue's own [all queues of the tasks].",
)
@click.option("--concurrency", type=click.IntRange(1), default=10, show_default=True, help="Jobs at once.")
@click.option(
    "--processes", type=click.IntRange(1, 1000), default=1, show_default=True, help="So many, kept by a supervisor."
)
@click.option("--memory-limit", type=Size(), help="Replace a process that has more, such as 500M.")
@click.option("--max-jobs", type=click.IntRange(1), help="Replace a process after so many jobs.")
@click.option(
    "--check-every",
    type=Duration(least=0.1),
    default="5s",
    show_default=True,
    help="How often the supervisor looks at the memory.",
)
@click.option("--reload", is_flag=True, help="Restart when a file of --app-dir changes, for development.")
@click.option("--supervised", metavar="FD", type=int, hidden=True)
@click.option("--listen-dsn", metavar="DSN", help="Where LISTEN goes, past a pooler; off: poll only [the DSN].")
@click.option(
    "--pool-size",
    type=click.IntRange(1),
    help="Connections that handlers are lent at once, sync and async ones each [one for each slot].",
)
@click.option(
    "--fail-unknown",
    type=Duration(),
    default="24h",
    show_default=True,
    help="Fail a job whose task no live worker has known for so long.",
)
@click.option("--poll", type=Duration(least=0.01), default="1s", show_default=True, help="Look without being told.")
@click.option(
    "--lease",
    type=Duration(least=1.0),
    default="15s",
    show_default=True,
    help="Without a sign of life for so long, its jobs go to others.",
)
@click.option(
    "--grace", type=Duration(), default="25s", show_default=True, help="How long running jobs may go on at shutdown."
)
@click.option(
    "--stuck",
    type=Duration(least=1.0),
    default="10m",
    show_default=True,
    help="End the process (exit code 6) when its loop stands still for so long.",
)
@click.option("--version-tag", help="Of the code, kept with each attempt [pgqueue's version].")
@click.option(
    "--app-dir",
    type=click.Path(exists=True, file_okay=False),
    default=".",
    show_default=True,
    help="Where modules are looked for first.",
)
@click.option("--log-level", type=click.Choice(LEVELS, case_sensitive=False), default="info", show_default=True)
@click.option("--log-format", type=click.Choice(("text", "json")), default="text", show_default=True)
@click.option(
    "--log-config",
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="JSON for logging.config.dictConfig, instead of the two above.",
)
@database
@click.pass_context
def command(
    ctx: click.Context,
    modules: tuple[str, ...],
    queues: tuple[str, ...],
    concurrency: int,
    processes: int,
    memory_limit: int | None,
    max_jobs: int | None,
    check_every: float,
    reload: bool,
    supervised: int | None,
    listen_dsn: str | None,
    pool_size: int | None,
    fail_unknown: float,
    poll: float,
    lease: float,
    grace: float,
    stuck: float,
    version_tag: str | None,
    app_dir: str,
    log_level: str,
    log_format: str,
    log_config: Path | None,
) -> None:
    """Run the jobs of a module's tasks.

    Imports each MODULE and takes the jobs of the queues their tasks name. SIGTERM or Ctrl-C: take no more jobs,
    finish those that run, leave; what still runs after --grace is cancelled and given back (exit code 5). A second
    signal leaves at once (130); the jobs run again when the lease is over. An outage of the database is waited out;
    only at the start it is an error (3). SIGUSR1: take no more jobs, finish those that run, leave.

    With --processes a supervisor keeps so many, whatever happens: SIGHUP or `pgqueue restart` replaces them, new ones
    first, SIGUSR1 or `pgqueue quiet` lets them finish, SIGTTIN and SIGTTOU or `pgqueue scale` change their number.

    A failed attempt n is made again after min(most, first x factor^(n-1)) seconds, times a random 0.5 to 1: by default
    min(21600, 10 x 3^(n-1)), ten attempts within 7 to 15 hours. A task's retry= says otherwise.

    \b
    Examples:
      pgqueue work myapp.tasks
      pgqueue work myapp.tasks otherapp.tasks -q mail:5,default --concurrency 20
      pgqueue work tasks --app-dir src --log-format json
      pgqueue work tasks --processes 4 --memory-limit 500M
    """
    from pgqueue.cli import logs
    from pgqueue.cli.task_modules import look_in

    directory = look_in(app_dir)
    if log_config is None:
        logs.set_up(log_level, log_format)
    elif _said(ctx, "log_level") or _said(ctx, "log_format"):
        raise click.UsageError("--log-config says it all: give it, or --log-level and --log-format")
    else:
        logs.load(log_config)
    if supervised is None and (_said(ctx, "processes") or memory_limit or max_jobs or reload):
        from pgqueue.supervisor.recycling import Terms
        from pgqueue.supervisor.supervisor import keep

        # What is started gets the same command line.
        arguments, watched = tuple(sys.argv[1:]), directory if reload else None
        terms = Terms(processes, arguments, grace, memory_limit, max_jobs, check_every, watched)
        raise click.exceptions.Exit(keep(terms))

    from pgqueue.cli.task_modules import import_tasks
    from pgqueue.cli.worker_process import serve, worker_end_of

    with worker_end_of(supervised) as worker_end:
        import_tasks(modules, directory)
        how: dict[str, Any] = {"queues": _names(queues), "concurrency": concurrency, "poll": poll, "lease": lease}
        how |= {"version_tag": version_tag, "pool_size": pool_size, "fail_unknown": fail_unknown}
        worker = _worker(given(ctx), listen_dsn, how)
    code = serve(worker, grace, stuck, worker_end)
    sys.stderr.flush()
    raise click.exceptions.Exit(code)


def _worker(said: dict[str, str], listen_dsn: str | None, how: dict[str, Any]) -> Worker:
    from pgqueue.cli.database import parts_of
    from pgqueue.config import OFF, config, configure
    from pgqueue.database import embedded
    from pgqueue.worker.worker import Worker

    configure(**said)  # type: ignore[arg-type]  # what a module configured does not win over the command line
    settings = config(listen_dsn=listen_dsn)
    dsn = embedded.resolve(settings.require_dsn())
    listen_dsn = OFF if settings.listen_dsn is None else embedded.resolve(settings.listen_dsn)
    for each in {dsn, listen_dsn} - {OFF}:
        parts_of(each)
    return Worker(dsn=dsn, listen_dsn=listen_dsn, **how)


def _said(ctx: click.Context, option: str) -> bool:
    return ctx.get_parameter_source(option) is not ParameterSource.DEFAULT


def _names(queues: tuple[str, ...]) -> list[str] | None:
    names = [name.strip() for given in queues for name in given.split(",") if name.strip()]
    return names or None
