"""A Django project with our app: where its database is, its tasks, every command, and what `check` says."""

from __future__ import annotations

from pathlib import Path
from signal import SIGTERM
from typing import Any

import pytest
from django_projects import DjangoProject, database
from psycopg.conninfo import conninfo_to_dict
from workers import Eyes, wait_until

pytestmark = pytest.mark.promise("F270")

QUEUE = "from pgqueue.config import config; print(config().require_dsn())"
ENQUEUE = "from shop.tasks import greet; from django.db import connection; print(greet.enqueue(connection, 'Ann').id)"


def queue_of(project: DjangoProject, **environ: str) -> dict[str, Any]:
    """The parameters of the DSN that the project has for its queue."""
    return conninfo_to_dict(project.python(QUEUE, environ=environ).strip())


def test_the_tasks_of_all_apps_run_by_one_line_in_the_settings(tmp_path: Path, dsn: str, eyes: Eyes) -> None:
    project = DjangoProject(tmp_path, {"default": database(dsn)})
    job = int(project.python(ENQUEUE))
    with project.working() as worker:
        worker.says("ready")
        wait_until(eyes.is_in(job, "completed"))
        worker.signal(SIGTERM)
        assert worker.ends() == 0, worker.output
    assert eyes.one("SELECT result FROM pgqueue.job_done WHERE id = %s", job) == "hello Ann"


def test_a_command_is_run_on_the_database_of_the_project(tmp_path: Path, dsn: str) -> None:
    project = DjangoProject(tmp_path, {"default": database(dsn)})
    elsewhere = "postgresql://nobody@/nowhere"  # the alias comes before it
    assert "greet" in project.manage("pgqueue", "tasks", "shop.tasks", PGQUEUE_DSN=elsewhere)
    assert "--dsn: the database is an alias" in project.manage("pgqueue", "status", "--dsn", "x", code=1)
    called = "from django.core.management import call_command as call\ncall('pgqueue', 'tasks', 'shop.tasks')"
    assert "greet" in project.python(called)
    refused = "from django.core.management import call_command as call\ncall('pgqueue', 'cancel', '1')"
    assert "pgqueue cancel 1: exit code 1" in project.python(refused, code=1)


@pytest.mark.second
def test_a_worker_of_several_processes_and_one_that_reloads_are_set_up_as_well(tmp_path: Path, dsn: str) -> None:
    """The processes of a supervisor are programs of their own, started from the same arguments, elsewhere as well."""
    project = DjangoProject(tmp_path, {"default": database(dsn)})
    (tmp_path / "away").mkdir()
    with project.working("--reload", "--app-dir", str(tmp_path)) as worker:
        worker.says("ready")
        tasks = tmp_path / "shop" / "tasks.py"
        tasks.write_text(tasks.read_text().replace("greet", "salute"))
        worker.says("tasks.salute")
        worker.signal(SIGTERM)
        assert worker.ends() == 0, worker.output


@pytest.mark.second
def test_another_alias_is_named_in_the_settings_or_on_the_command_line(
    tmp_path: Path, dsn: str, empty_dsn: str
) -> None:
    databases = {"default": database(empty_dsn), "jobs": database(dsn)}
    project = DjangoProject(tmp_path, databases, more='PGQUEUE = {"DATABASE": "jobs"}')
    assert "greet" in project.manage("pgqueue", "tasks", "shop.tasks")
    # Exit code 4: the schema is missing.
    assert "not there" in project.manage("pgqueue", "--database", "default", "status", code=4)
    assert "no alias 'other'" in project.manage("pgqueue", "--database=other", "status", code=1)


def test_options_a_service_and_a_role_go_with_the_alias(tmp_path: Path, dsn: str) -> None:
    options = {"connect_timeout": 7, "options": "-c statement_timeout=5s", "assume_role": "pg monitor", "pool": True}
    project = DjangoProject(tmp_path, {"default": database(dsn, OPTIONS=options)})
    found = queue_of(project)
    given = conninfo_to_dict(dsn)
    assert {name: found.get(name) for name in ("dbname", "user", "host")} == {
        name: given.get(name) for name in ("dbname", "user", "host")
    }
    assert found["connect_timeout"] in (7, "7")
    assert found["options"].endswith("-c statement_timeout=5s -c role=pg\\ monitor") and "pool" not in found

    served = tmp_path / "served"
    served.mkdir()
    service = {"ENGINE": "django.db.backends.postgresql", "OPTIONS": {"service": "shop"}}
    (served / "services").write_text("[shop]\n" + "\n".join(f"{name}={value}" for name, value in given.items()))
    project = DjangoProject(served, {"default": service})
    assert queue_of(project)["service"] == "shop"
    connected = "import pgqueue\nwith pgqueue.connect() as conn: print(conn.info.dbname)"
    assert project.python(connected, environ={"PGSERVICEFILE": str(served / "services")}).strip() == given["dbname"]


def test_in_tests_the_queue_is_in_the_database_of_the_tests(tmp_path: Path, dsn: str) -> None:
    name = conninfo_to_dict(dsn)["dbname"]
    project = DjangoProject(tmp_path, {"default": database(dsn)})
    (tmp_path / "shop" / "tests.py").write_text(f"""
from django.test import TestCase
from pgqueue.config import config
from psycopg.conninfo import conninfo_to_dict

class Names(TestCase):
    def test_name(self):
        self.assertEqual(conninfo_to_dict(config().require_dsn())["dbname"], "test_{name}")
""")
    said = project.manage("test")
    assert "Ran 1 test" in said and "OK" in said
    assert "pgqueue.W" not in said


def test_a_wrong_setting_is_named(tmp_path: Path, dsn: str) -> None:
    project = DjangoProject(tmp_path, {"default": database(dsn)}, more='PGQUEUE = {"DATABASES": "jobs"}')
    assert "PGQUEUE has DATABASES; it may have DATABASE, SCHEMA" in project.manage("check", code=1)
    (tmp_path / "shop" / "settings.py").write_text(
        (tmp_path / "shop" / "settings.py").read_text() + '\nPGQUEUE = {"SCHEMA": "No Schema"}'
    )
    assert "schema 'No Schema': use 1 to 22" in project.manage("check", code=1)


def test_check_says_that_the_database_is_none_for_a_queue(tmp_path: Path) -> None:
    lite = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}
    project = DjangoProject(tmp_path, lite)
    assert "(pgqueue.E001) the queue's database 'default' is sqlite" in project.manage("check", code=1)
    assert "is sqlite" in project.manage("pgqueue", "status", code=2)


def test_check_of_the_database_says_that_the_schema_is_behind(tmp_path: Path, empty_dsn: str) -> None:
    project = DjangoProject(tmp_path, {"default": database(empty_dsn)})
    assert "no issues" in project.manage("check")
    said = project.manage("check", "--database", "default")
    assert "(pgqueue.W001)" in said and "HINT: manage.py migrate" in said
    project.manage("migrate")
    assert "no issues" in project.manage("check", "--database", "default")


@pytest.mark.second
def test_check_of_the_database_names_a_queue_that_no_worker_serves(tmp_path: Path, dsn: str, conn: Any) -> None:
    tasks = """
import pgqueue

@pgqueue.task
def greet() -> None: ...

@pgqueue.task(queue="mail")
def send() -> None: ...
"""
    project = DjangoProject(tmp_path, {"default": database(dsn)}, tasks)
    assert "no issues" in project.manage("check", "--database", "default")  # as after a `migrate`, or in tests
    project.python("from shop.tasks import greet; from django.db import connection; greet.enqueue(connection)")
    assert "(pgqueue.W003) no worker serves queue 'default'" in project.manage("check", "--database", "default")
    with project.working("-q", "default") as worker:
        worker.says("ready")
        said = project.manage("check", "--database", "default")
    assert "no worker serves queue 'mail'" in said and "'default'" not in said
