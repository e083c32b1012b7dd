"""The schema as migrations of Django: one for each release, on the queue's database only, forth and back."""

from __future__ import annotations

import textwrap
from importlib import import_module
from pathlib import Path

import psycopg
import pytest
from django_projects import DjangoProject, database
from made_up_files import THREE, written

from pgqueue.database import migrations
from pgqueue.database.migrations import require

pytestmark = pytest.mark.promise("F278")

OURS = Path(__file__).parents[2] / "pgqueue" / "integrations" / "django" / "migrations"
LAST = migrations.files()[-1]


def marked(conn: psycopg.Connection) -> list[str]:
    """Our migrations of which Django knows that they were applied."""
    with conn.transaction():
        return [name for (name,) in conn.execute("SELECT name FROM django_migrations WHERE app = 'pgqueue'")]


def schemas(conn: psycopg.Connection) -> set[str]:
    with conn.transaction():
        return {name for (name,) in conn.execute("SELECT nspname FROM pg_namespace WHERE nspname !~ '^pg_'")}


def names() -> list[str]:
    return sorted(path.stem for path in OURS.glob("0*.py"))


def test_the_last_migration_ends_at_the_newest_version_of_this_release() -> None:
    """A file more in `sql/migrations` needs a migration more, unless that of this release is not released yet."""
    ends = [
        import_module(f"pgqueue.integrations.django.migrations.{name}").Migration.operations[0].version
        for name in names()
    ]
    assert ends == sorted(set(ends)) and ends[-1] == LAST.version


def test_migrate_brings_the_schema_and_zero_takes_it_away_and_says_what_is_lost(tmp_path: Path, empty_dsn: str) -> None:
    project = DjangoProject(tmp_path, {"default": database(empty_dsn)})
    said = project.manage("migrate", "--plan") + project.manage("migrate")
    assert f"Bring schema pgqueue to {LAST}" in said and "pgqueue.W" not in said  # what it mends is no warning
    with psycopg.connect(empty_dsn) as conn:
        assert require(conn, "pgqueue").version == LAST.version
        assert marked(conn) == names()
        conn.execute("INSERT INTO pgqueue.job (task) SELECT 'a.task' FROM generate_series(1, 3)")
        conn.commit()
        assert "No planned migration operations" in project.manage("migrate", "--plan")
        assert "No changes detected" in project.manage("makemigrations", "--check", "--dry-run")
        plan = project.manage("migrate", "pgqueue", "zero", "--plan")
        assert "DROP it with all jobs and results" in plan
        assert "with 3 unfinished jobs, all results" in project.manage("migrate", "pgqueue", "zero")
        assert "pgqueue" not in schemas(conn) and marked(conn) == []
        project.manage("migrate", "pgqueue")
        assert require(conn, "pgqueue").version == LAST.version
        conn.execute("DROP SCHEMA pgqueue CASCADE")
        conn.commit()
        assert "(pgqueue.W001)" in project.manage("migrate")  # Django thinks that all is there


def test_what_sqlmigrate_prints_does_the_same(tmp_path: Path, empty_dsn: str) -> None:
    project = DjangoProject(tmp_path, {"default": database(empty_dsn)}, more='PGQUEUE = {"SCHEMA": "jobs"}')
    with psycopg.connect(empty_dsn, autocommit=True) as conn:
        conn.execute(project.manage("sqlmigrate", "pgqueue", names()[-1]).encode())
        assert require(conn, "jobs").version == LAST.version
        backwards = project.manage("sqlmigrate", "pgqueue", names()[0], "--backwards")
        conn.execute(backwards.encode())
        assert "jobs" not in schemas(conn)


def test_on_a_database_that_pgqueue_migrate_has_brought_up_it_is_only_marked(tmp_path: Path, dsn: str) -> None:
    project = DjangoProject(tmp_path, {"default": database(dsn)})
    with psycopg.connect(dsn) as conn:
        rows = conn.execute("SELECT xmin::text, * FROM pgqueue.migration").fetchall()
        project.manage("migrate")
        assert conn.execute("SELECT xmin::text, * FROM pgqueue.migration").fetchall() == rows
        assert marked(conn) == names()


def test_only_the_alias_of_the_queue_gets_tables(tmp_path: Path, dsn: str, empty_dsn: str) -> None:
    """Whatever a router says of an app of which it knows nothing."""
    router = """
class Router:
    def allow_migrate(self, db, app_label, **hints):
        return db == "default"

DATABASE_ROUTERS = [f"{__name__}.Router"]
PGQUEUE = {"DATABASE": "jobs"}
"""
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute("DROP SCHEMA pgqueue CASCADE")
        project = DjangoProject(tmp_path, {"default": database(dsn), "jobs": database(empty_dsn)}, more=router)
        assert "-- (no-op)" in project.manage("sqlmigrate", "pgqueue", names()[-1])
        project.manage("migrate")
        project.manage("migrate", "pgqueue", "zero")
        project.manage("migrate")
        assert "pgqueue" not in schemas(conn)
    project.manage("migrate", "--database", "jobs")
    with psycopg.connect(empty_dsn) as conn:
        assert require(conn, "pgqueue").version == LAST.version


def test_the_databases_of_tests_have_the_tables(tmp_path: Path, dsn: str, empty_dsn: str) -> None:
    aliases = {"default": database(empty_dsn), "jobs": database(dsn)}
    project = DjangoProject(tmp_path, aliases, more='PGQUEUE = {"DATABASE": "jobs"}')
    (tmp_path / "shop" / "tests.py").write_text("""
from django.db import connections
from django.test import TestCase
from pgqueue.testing import drain
from shop.tasks import greet

class Queue(TestCase):
    databases = ["default", "jobs"]

    def test_it(self):
        self.assertTrue(connections["jobs"].settings_dict["NAME"].startswith("test_"))
        greet.enqueue("jobs", "Ann")
        drain(connections["jobs"])
        with connections["jobs"].cursor() as cursor:
            cursor.execute("SELECT result FROM pgqueue.job_done")
            self.assertEqual(cursor.fetchall(), [('"hello Ann"',)])
        with connections["default"].cursor() as cursor:
            cursor.execute("SELECT to_regnamespace('pgqueue')")
            self.assertEqual(cursor.fetchone(), (None,))
""")
    said = project.manage("test")
    assert "Ran 1 test" in said and "pgqueue.W" not in said


LATER = """
from django.db import migrations
from pgqueue.integrations.django.schema_operations import UpTo

class Migration(migrations.Migration):
    dependencies = [("pgqueue", {before!r})]
    operations = [UpTo({end})]
"""


def releases(home: Path, dsn: str, *, newest: int, known: int) -> DjangoProject:
    """A project on a made-up pgqueue: files up to `newest`, Django's migrations up to `known`."""
    home.mkdir()
    files = written(home, *THREE[:newest])
    more = textwrap.dedent(f"""
        from pathlib import Path
        from pgqueue.database import migrations
        migrations.sql_directory = lambda: Path({str(files)!r})
        MIGRATION_MODULES = {{"pgqueue": "made_up"}}
    """)
    project = DjangoProject(home, {"default": database(dsn)}, more=more)
    (home / "made_up").mkdir()
    (home / "made_up" / "__init__.py").touch()
    (home / "made_up" / f"{names()[0]}.py").write_text((OURS / f"{names()[0]}.py").read_text())
    if known == 2:
        (home / "made_up" / "0002_later.py").write_text(LATER.format(before=names()[0], end=2))
    return project


def applied(conn: psycopg.Connection) -> list[int]:
    with conn.transaction():
        return [number for (number,) in conn.execute("TABLE pgqueue.log ORDER BY file")]


def test_a_later_release_is_a_second_migration(tmp_path: Path, empty_dsn: str) -> None:
    before = releases(tmp_path / "before", empty_dsn, newest=1, known=1)
    after = releases(tmp_path / "after", empty_dsn, newest=2, known=2)
    with psycopg.connect(empty_dsn) as conn:
        before.manage("migrate")
        assert (applied(conn), marked(conn)) == ([1], ["0001_release_1_0"])
        after.manage("migrate")
        assert (applied(conn), marked(conn)) == ([1, 2], ["0001_release_1_0", "0002_later"])

        said = after.manage("migrate", "pgqueue", "0001")
        assert "stays as it is: it only goes forward" in said
        assert (applied(conn), marked(conn)) == ([1, 2], ["0001_release_1_0"])
        after.manage("migrate")
        assert (applied(conn), marked(conn)) == ([1, 2], ["0001_release_1_0", "0002_later"])

        plan = after.manage("migrate", "pgqueue", "zero", "--plan")
        assert plan.index("stays as it is") < plan.index("DROP it with all jobs")


@pytest.mark.second
def test_both_migrations_go_on_an_empty_database_with_the_library_ahead_of_them(tmp_path: Path, empty_dsn: str) -> None:
    ahead = releases(tmp_path / "ahead", empty_dsn, newest=3, known=2)
    ahead.manage("migrate")
    with psycopg.connect(empty_dsn) as conn:
        assert applied(conn) == [1, 2]
        ahead.manage("pgqueue", "migrate")
        assert applied(conn) == [1, 2, 3]
        ahead.manage("migrate", "--fake", "pgqueue", "zero")
        ahead.manage("migrate")
        assert applied(conn) == [1, 2, 3]


def test_a_database_that_is_no_postgresql_gets_nothing(tmp_path: Path) -> None:
    """The tests of a project may run on SQLite, where they need no queue."""
    lite = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": str(tmp_path / "lite")}}
    project = DjangoProject(tmp_path, lite)
    project.manage("migrate", "--skip-checks")
    assert "is sqlite" in project.manage("migrate", code=1)
