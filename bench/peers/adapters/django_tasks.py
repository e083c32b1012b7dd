"""django-tasks-db: the tasks of Django 6, in a table. A worker process runs one job at a time."""

from __future__ import annotations

import time
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import django
from django.conf import settings

from bench.peers.adapters import handler
from bench.peers.adapters.handler import DSN, SETTINGS

_URL = urlsplit(DSN)
_QUERY = {key: values[-1] for key, values in parse_qs(_URL.query).items()}
DATABASE = {
    "ENGINE": "django.db.backends.postgresql",
    "NAME": unquote(_URL.path.lstrip("/")),
    "USER": _URL.username or "",
    "HOST": _URL.hostname or _QUERY.get("host", ""),
    "PORT": _URL.port or _QUERY.get("port", ""),
    "CONN_MAX_AGE": None,
}
if not settings.configured:
    settings.configure(
        INSTALLED_APPS=["django_tasks_db"],
        DATABASES={"default": DATABASE},
        TASKS={"default": {"BACKEND": "django_tasks_db.DatabaseBackend", "QUEUES": ["default", "elsewhere"]}},
        USE_TZ=True,
    )
    django.setup()

from django.core.management import call_command  # noqa: E402 - Django is to be set up first
from django.db import connection, transaction  # noqa: E402
from django.tasks import task  # noqa: E402


@task  # type: ignore[untyped-decorator]
def noop(number: int) -> None:
    handler.ran(number)


@task  # type: ignore[untyped-decorator]
def application(number: int, text: str) -> None:
    handler.ran(number)
    time.sleep(handler.WORK_SECONDS)


@task(queue_name="elsewhere")  # type: ignore[untyped-decorator]
def elsewhere(number: int) -> None:
    """No worker serves its queue."""


TASKS: dict[str, Any] = {"noop": noop, "application": application, "elsewhere": elsewhere}


class Peer:
    def setup(self) -> None:
        call_command("migrate", verbosity=0)

    def open(self) -> None:
        """The connection is made with the first job."""

    def close(self) -> None:
        connection.close()

    def one(self, task: str, job: dict[str, Any]) -> None:
        TASKS[task].enqueue(**job)

    def many(self, task: str, jobs: list[dict[str, Any]]) -> None:
        for low in range(0, len(jobs), SETTINGS["bulk"]):
            with transaction.atomic():
                for job in jobs[low : low + SETTINGS["bulk"]]:
                    TASKS[task].enqueue(**job)

    def work(self) -> None:
        options = {"interval": SETTINGS["interval"], "reload": False, "startup_delay": False, "verbosity": 0}
        call_command("db_worker", queue_name="default", **options)
