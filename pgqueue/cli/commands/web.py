"""`pgqueue web`: the dashboard as a process of its own."""

from __future__ import annotations

import os
from collections.abc import Sequence

import click

from pgqueue.cli.options import app_dir, database, databases_of, given, log_options


@click.command("web")
@click.argument("modules", metavar="[MODULE]...", nargs=-1)
@click.option("--auth", is_flag=True, help="Ask for a secret: of the reader, or of the operator.")
@click.option("--open", "is_open", is_flag=True, help="Ask for nothing; only on loopback, for this machine.")
@click.option("--read-only", is_flag=True, help="Change nothing, whoever asks.")
@click.option("--bind", metavar="HOST:PORT", default="127.0.0.1:8300", show_default=True, help="Where to listen.")
@click.option("--public-url", metavar="URL", help="Where browsers find it, behind a proxy.")
@click.option(
    "--trusted-proxy", "proxies", metavar="ADDRESS", multiple=True, help="Believe what this proxy says of a browser."
)
@click.option("--redact", "patterns", metavar="PATTERN", multiple=True, help="Hide the values of these keys, too.")
@click.option("--no-redaction", is_flag=True, help="Hide nothing, also no passwords in arguments.")
@app_dir
@log_options
@database
@click.pass_context
def command(
    ctx: click.Context,
    modules: Sequence[str],
    auth: bool,
    is_open: bool,
    read_only: bool,
    bind: str,
    public_url: str | None,
    proxies: Sequence[str],
    patterns: Sequence[str],
    no_redaction: bool,
    app_dir: str,
    log_level: str,
    log_format: str,
) -> None:
    """Serve the dashboard for browsers.

    It shows jobs, queues, locks, limits, schedules, workers and errors, and does not start without --auth or --open.
    Operators change jobs, queues, limits and workers there, unless it is --read-only. With the MODULEs of an
    application they enqueue its tasks by a form; without them, they write a job's arguments as JSON.

    With --auth the secrets of the reader and of the operator come from PGQUEUE_WEB_READER and PGQUEUE_WEB_OPERATOR: two
    different texts of 20 characters or more. With --redact and a pattern such as '*iban*' the values of these keys are
    hidden, as those of passwords and tokens are.

    With several databases, of --database or PGQUEUE_DATABASES, the first page has a row for each, and each has its own
    dashboard below /db/NAME/.

    \b
    Examples:
      PGQUEUE_WEB_READER=… PGQUEUE_WEB_OPERATOR=… pgqueue web --auth
      pgqueue web --open
      pgqueue web myapp.tasks --open
      pgqueue web --auth --bind 0.0.0.0:8300 --public-url https://ops.example.com
    """
    if auth == is_open:
        raise click.UsageError("say how it is closed: --auth asks for a secret, --open is for this machine only")
    if patterns and no_redaction:
        raise click.UsageError("--redact and --no-redaction exclude each other")
    from pgqueue.cli import logs
    from pgqueue.cli.task_modules import declared_in
    from pgqueue.config import config, configure
    from pgqueue.distribution import needs_extra

    with needs_extra("web"):
        from pgqueue.web import dashboard, gate, redaction, secrets, server

    host, port = server.address_of(bind)
    if is_open:
        server.check_open(host, {"--public-url": public_url, "--trusted-proxy": proxies})
    logs.set_up(log_level, log_format)
    declared_in(modules, app_dir)
    configure(**given(ctx))  # type: ignore[arg-type]  # the command line comes before what a module has configured
    databases = databases_of(ctx)
    if not databases:
        config().require_dsn()
    made = dashboard.made(
        secrets.from_environment(os.environ) if auth else gate.Open(),
        public_url=public_url,
        trusted=proxies,
        read_only=read_only,
        redact=() if no_redaction else (*redaction.DEFAULT_PATTERNS, *patterns),
        databases=databases,
    )
    server.serve(made, host, port)
