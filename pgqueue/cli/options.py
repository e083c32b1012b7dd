"""Options that commands share, and types of values: durations, sizes, moments.

`--dsn` and `--schema` become this process's configuration (`pgqueue.configure`), which comes before the environment's.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import wraps
from typing import Any, TypeVar, cast

import click

from pgqueue.config import configure
from pgqueue.databases import VARIABLE, Database, named, of_environment, only
from pgqueue.errors import InvalidOption
from pgqueue.jobs.values import length

F = TypeVar("F", bound=Callable[..., Any])

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", re.IGNORECASE)
_GIVEN = "pgqueue.cli.given"


class Duration(click.ParamType):  # type: ignore[type-arg]  # generic only since click 8.4
    """A length of time, written `30s`, `5m`, `2h`, `1.5s`, `250ms` or as plain seconds; converted to seconds."""

    name = "duration"

    def __init__(self, least: float = 0.0) -> None:
        self._least = least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        seconds = length(str(value).strip().lower(), "s")
        if seconds is None:
            self.fail(f"{value!r}: write 30s, 5m, 2h or a number of seconds", param, ctx)
        if seconds < self._least:
            self.fail(f"{value!r}: at least {self._least:g}s", param, ctx)
        return seconds


class Size(click.ParamType):  # type: ignore[type-arg]
    """A size, written `500M`, `1.5G`, `800K` or as plain bytes; converted to bytes, by powers of 1024."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = _SIZE.fullmatch(str(value).strip())
        if match is None or not float(match[1]):
            self.fail(f"{value!r}: write 500M, 2G or a number of bytes", param, ctx)
        return int(float(match[1]) * 1024 ** "bkmgt".index((match[2] or "b").lower()))


class Whole(click.IntRange):
    """A whole number in a range; an error calls it that, and not an `integer range`."""

    name = "whole number"


class Moment(click.ParamType):  # type: ignore[type-arg]
    """A moment in ISO 8601 with its offset from UTC: `2026-12-24T18:00+01:00`, `2026-12-24 17:00Z`.

    With `ago` a duration is one, too: `2h` is two hours ago.
    """

    name = "time"

    def __init__(self, ago: bool = False) -> None:
        self._ago = ago

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> datetime:
        if isinstance(value, datetime):
            return value
        if self._ago and (ago := length(str(value).strip().lower(), "s")) is not None:
            try:
                return datetime.now(UTC) - timedelta(seconds=ago)
            except OverflowError:
                self.fail(f"{value!r:.80}: that is before the year 1", param, ctx)
        try:
            moment = datetime.fromisoformat(str(value).strip())
        except ValueError:
            self.fail(f"{value!r}: write it like 2026-12-24T18:00+01:00", param, ctx)
        if moment.utcoffset() is None:
            self.fail(f"{value!r}: say the offset from UTC, like 2026-12-24T18:00+01:00 or …Z", param, ctx)
        try:
            return moment.astimezone(UTC)  # the server knows no offset of 16 hours and more
        except OverflowError:
            self.fail(f"{value!r}: in UTC that is not within the years 1 to 9999", param, ctx)


def database(command: F) -> F:
    """Add --dsn and --schema, and for several databases --database and --only (over_databases.py)."""

    @wraps(command)
    def called(**params: Any) -> Any:
        ctx = click.get_current_context()
        said, only = databases_said(ctx)
        if not said and only is None and not os.environ.get(VARIABLE):
            return command(**params)
        from pgqueue.cli.over_databases import over

        if "dsn" in given(ctx):
            if said or only is not None:
                raise click.UsageError("--dsn and --database exclude each other, as do --dsn and --only")
            return command(**params)
        return over(ctx, said, only, command, params)

    chosen = click.option("--only", metavar="NAME", expose_value=False, callback=_chosen, help="Only this database.")
    several = click.option(
        "--database",
        metavar="NAME=DSN",
        multiple=True,
        expose_value=False,
        callback=_chosen,
        help="One of several databases; repeat it. Better in PGQUEUE_DATABASES.",
    )
    found = several(chosen(called))
    found = click.option(
        "--schema", metavar="NAME", expose_value=False, callback=_configured, help="Schema of the tables [pgqueue]."
    )(found)
    dsn = click.option(
        "--dsn",
        metavar="DSN",
        multiple=True,
        expose_value=False,
        callback=_one_dsn,
        help="Database, as a URL or key=value; better in PGQUEUE_DSN, which `ps` never shows.",
    )
    return cast(F, dsn(found))


def databases_said(ctx: click.Context) -> tuple[tuple[str, ...], str | None]:
    """The values of --database and --only on this command line."""
    return ctx.meta.get(f"{_GIVEN}.database", ()), ctx.meta.get(f"{_GIVEN}.only")


def databases_of(ctx: click.Context) -> tuple[Database, ...]:
    """The databases that --database or PGQUEUE_DATABASES names; none if there is one database. --dsn comes first."""
    said, chosen = databases_said(ctx)
    found = () if "dsn" in given(ctx) else named(said) or of_environment()
    if chosen is None:
        return found
    if not found:
        raise click.UsageError("--only is for several databases: name them by --database or PGQUEUE_DATABASES")
    return (only(found, chosen),)


def log_options(command: F) -> F:
    """Add --log-level and --log-format (logs.py)."""
    form = click.option(
        "--log-format",
        type=click.Choice(("text", "json")),
        default="text",
        show_default=True,
        help="Lines for people, or one JSON object a line; to stderr.",
    )
    level = click.option(
        "--log-level",
        type=click.Choice(("debug", "info", "warning", "error"), case_sensitive=False),
        default="info",
        show_default=True,
        help="Log this and what is worse.",
    )
    return level(form(command))


def app_dir(command: F) -> F:
    """Add --app-dir, for commands that import modules (task_modules.py)."""
    return click.option(
        "--app-dir",
        type=click.Path(exists=True, file_okay=False),
        default=".",
        show_default=True,
        help="The directory where modules are looked for first.",
    )(command)


def as_json(command: F) -> F:
    """Add --json (json_document.py)."""
    return click.option("--json", "as_json", is_flag=True, help='Print JSON: {"items": [...], ...}.')(command)


def actor(command: F) -> F:
    """Add --actor: what the record of changes by hand says of the one that runs the command."""
    return click.option(
        "--actor",
        metavar="NAME",
        envvar="PGQUEUE_ACTOR",
        expose_value=False,
        callback=_acting,
        help="By which name the change is recorded [the database role].",
    )(command)


def queue_or_task(queue: str | None, task: str | None) -> dict[str, str]:
    """The one of the two that was given, by its name."""
    if task is not None and queue is None:
        return {"task": task}
    if queue is not None and task is None:
        return {"queue": queue}
    raise click.UsageError("give a QUEUE, or --task NAME")


def given(ctx: click.Context) -> dict[str, str]:
    """The values of --dsn and --schema on this command line."""
    found: dict[str, str] = ctx.meta.setdefault(_GIVEN, {})
    return found


def _acting(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    from pgqueue.jobs.actors import act_as

    if value is not None:
        try:
            act_as(value)
        except InvalidOption as error:
            raise click.BadParameter(str(error), ctx, param) from None


def _chosen(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    if value:
        ctx.meta[f"{_GIVEN}.{param.name}"] = value


def _one_dsn(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> None:
    if len(value) > 1:
        raise click.BadParameter("is given twice; for several databases there is --database NAME=DSN", ctx, param)
    _configured(ctx, param, *value or (None,))


def _configured(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    if value is None:
        return
    if not value:
        raise click.BadParameter("is empty", ctx, param)
    try:
        configure(**{str(param.name): value})  # type: ignore[arg-type]
    except InvalidOption as error:
        raise click.BadParameter(str(error), ctx, param) from None
    given(ctx)[str(param.name)] = value
