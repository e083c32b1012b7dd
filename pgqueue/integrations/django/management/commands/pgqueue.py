"""`manage.py pgqueue COMMAND …`: every command of pgqueue, on the database of the project.

`work` and `dev` need no MODULE: they run the tasks of all apps. Worker processes are started as `pgqueue work` with
the module that sets Django up, so they are recycled and reloaded as any others.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError

from pgqueue import databases
from pgqueue.integrations.django import project_settings

WORKER = "pgqueue.integrations.django.worker"
WITH_TASKS = ("work", "dev")
"""Commands that take the modules of tasks."""


class Command(BaseCommand):  # type: ignore[misc]  # Django has no types
    """Every command of pgqueue, on the database of this project."""

    help = "Every command of pgqueue, on the database of this project: manage.py pgqueue status. See pgqueue --help."
    requires_system_checks: Sequence[str] = ()

    def run_from_argv(self, argv: list[str]) -> None:
        """Run `manage.py pgqueue …` as the program `pgqueue` would, and end the process with its exit code."""
        from pgqueue.__main__ import main

        # From here on the process is a `pgqueue`: a supervisor starts its worker processes with these arguments.
        sys.argv = ["pgqueue", *_arguments(argv[2:])]
        main()

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """For `call_command("pgqueue", "status", …)`."""
        parser.add_argument("arguments", nargs=argparse.REMAINDER)

    def handle(self, *, arguments: list[str], **_: Any) -> None:
        """Run one command to its end, inside this process. Raises CommandError if its exit code is not 0."""
        from pgqueue.cli import main as cli

        before = os.environ.get(project_settings.ALIAS_VARIABLE, "")
        try:
            cli(_arguments(arguments), prog_name="pgqueue")
        except SystemExit as end:
            if end.code:
                code = end.code if isinstance(end.code, int) else 1
                raise CommandError(f"pgqueue {' '.join(arguments)}: exit code {code}", returncode=code) from None
        finally:
            os.environ[project_settings.ALIAS_VARIABLE] = before


def _arguments(given: list[str]) -> list[str]:
    """What the program `pgqueue` is given: without Django's own options, with the tasks of the project."""
    mine = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for option in ("--settings", "--pythonpath", "--database"):
        mine.add_argument(option)
    ours = given.index("--") if "--" in given else len(given)
    options, words = mine.parse_known_args(given[:ours])
    words += given[ours:]
    if any(word.split("=", 1)[0] == "--dsn" for word in words):
        raise CommandError("--dsn: the database is an alias of DATABASES; --database ALIAS names another one")
    if options.database is not None:
        os.environ[project_settings.ALIAS_VARIABLE] = options.database
        os.environ.pop(databases.VARIABLE, None)  # the alias is said, as --dsn is elsewhere
        project_settings.apply()
    if words[:1] and words[0] in WITH_TASKS:
        directory = [] if any(word.split("=", 1)[0] == "--app-dir" for word in words) else ["--app-dir", _directory()]
        words[1:1] = [WORKER, *directory]
    return words


def _directory() -> str:
    """The directory in which Python found the project, which is the one that holds the package of its settings."""
    if settings.SETTINGS_MODULE is None:
        raise CommandError("a worker process needs the name of your settings: set DJANGO_SETTINGS_MODULE")
    top = sys.modules[settings.SETTINGS_MODULE.partition(".")[0]]
    if getattr(top, "__path__", None):
        return str(Path(next(iter(top.__path__))).parent)
    return str(Path(top.__file__ or ".").parent)
