"""Every statement of sql/ is one the server understands, with typed parameters, and says what it promises."""

from __future__ import annotations

import re
from collections.abc import Iterator

import psycopg
import pytest

from pgqueue.database import migrations, statements
from pgqueue.pytest_plugin import Databases

PLACEHOLDER = re.compile(r"%\((\w+)\)s(?:::([a-z0-9]+(?:\[\])?))?")
SOURCES = {
    file.name: file.read_text(encoding="utf-8")
    for file in [*statements._files().values(), statements.sql_directory() / "fragments.sql"]
}
MIGRATIONS = {
    file.name: file.read_text(encoding="utf-8")
    for file in sorted((statements.sql_directory() / "migrations").rglob("*.sql"))
}


def code(source: str) -> str:
    """The source without comments."""
    return re.sub(r"--[^\n]*", "", source)


@pytest.fixture(scope="module")
def shared(pgqueue_databases: Databases) -> Iterator[psycopg.Connection]:
    """One database for all statements: none of them is run."""
    with pgqueue_databases.copy() as dsn, psycopg.connect(dsn) as conn:
        migrations.migrate(dsn, line=migrations.OUTBOX)  # statements of the outbox are planned, too
        yield conn


def test_the_server_plans_it_with_null_for_every_parameter(shared: psycopg.Connection) -> None:
    for name in statements.names():
        sql = statements.text(name, "pgqueue")
        params = dict.fromkeys(found for found, _ in PLACEHOLDER.findall(sql))
        shared.execute("SET search_path = ''")
        shared.execute("SET plan_cache_mode = force_generic_plan")
        assert shared.execute(f"EXPLAIN {sql}".encode(), params or None).fetchall(), name
        shared.rollback()


def test_every_placeholder_has_a_type_and_stands_in_no_quotes() -> None:
    for name in statements.names():
        sql = statements.text(name, "pgqueue")
        assert [found for found, cast in PLACEHOLDER.findall(sql) if not cast] == [], name
        assert [text for text in re.findall(r"'(?:[^']|'')*'", sql) if "%(" in text] == [], name
        assert len(re.findall(r"%(?!%|\()", sql)) == len(re.findall(r"(?<=%)%", sql)) == sql.count("%%"), name


def numbered(sql: str) -> str:
    """With numbers for its parameters, as the worker prepares it."""
    names = list(dict.fromkeys(found for found, _ in PLACEHOLDER.findall(sql)))
    return PLACEHOLDER.sub(
        lambda match: f"${names.index(match[1]) + 1}" + (f"::{match[2]}" if match[2] else ""), sql
    ).replace("%%", "%")


def test_the_planner_guesses_no_type_another_than_the_cast_says(shared: psycopg.Connection) -> None:
    """Every parameter is a typed one, `unknown` is an error of the server."""
    for name in statements.names():
        shared.execute(f"PREPARE {name} AS {numbered(statements.text(name, 'pgqueue'))}".encode())
    prepared = shared.execute("SELECT name, parameter_types::text[] FROM pg_prepared_statements").fetchall()
    assert {name for name, _ in prepared} >= set(statements.names())
    assert [name for name, types in prepared if "unknown" in types] == []
    shared.execute("DEALLOCATE ALL")
    shared.rollback()


def test_times_have_a_zone_and_come_from_one_place() -> None:
    for file, source in (SOURCES | MIGRATIONS).items():
        text = code(source)
        assert re.findall(r"\btimestamp\b(?!tz)", text) == [], file
        asked = re.findall(
            r"\b(?:current_timestamp|localtimestamp|statement_timestamp|transaction_timestamp|timeofday)\b", text
        )
        assert asked == [], file
        assert re.findall(r"(?<![.\w])now\(\)", text) == [], file
        assert file not in SOURCES or "clock_timestamp" not in text, file


def test_no_update_of_jobs_and_no_ddl() -> None:
    for file, source in SOURCES.items():
        assert re.findall(r"\bUPDATE\s+pgqueue\.job\w*", code(source)) == [], file
        assert re.findall(r"\b(?:CREATE|ALTER|DROP|TRUNCATE|ATTACH|DETACH)\b", code(source)) == [], file


def inserts(name: str) -> list[set[str]]:
    """The columns of each INSERT of jobs in this statement."""
    lists = re.findall(r"INSERT INTO pgqueue\.job(?:_[a-z]+)?\s*\(([^)]*)\)", code(statements.text(name, "pgqueue")))
    return [set(re.findall(r"\w+", columns)) for columns in lists]


def test_no_statement_of_ours_names_pos_in_an_insert() -> None:
    """A moved row that kept its old position would be stranded behind the watermark."""
    assert [name for name in statements.names() if any("pos" in columns for columns in inserts(name))] == []


def test_a_job_that_moves_keeps_all_that_it_is() -> None:
    """Into history, too: from there it may be retried."""
    kept = set(re.findall(r"\w+", statements._fragments()["job"]))
    assert {"task", "lock_key", "unique_key"} <= kept
    moves = [columns for name in statements.names() for columns in inserts(name) if {"id", "enqueued_at"} <= columns]
    assert len(moves) > 30
    assert [columns for columns in moves if not kept <= columns] == []


def test_a_volatile_clock_bounds_no_scan() -> None:
    """As `run_at <= pgqueue.now()` it is a filter, and the scan reads on to the end of the index."""
    bound = r"\b(?:WHERE|AND|OR)\s+(?:\w+\.)?(?:run|enqueued|finished|expires)_at\s*[<>]=?\s*pgqueue\.now\(\)"
    assert [name for name in statements.names() if re.search(bound, statements.text(name, "pgqueue"))] == []


def test_another_schema_is_named_everywhere() -> None:
    for name in statements.names():
        sql = statements.text(name, "jobs")
        assert re.findall(r"(?<![\w$\"])pgqueue\.", sql) == [], name


def test_a_session_keeps_all_that_its_transactions_would_set() -> None:
    """Else a role's setting, or a compiler, gets into them."""
    settings, keep = (statements.text(name, "pgqueue") for name in ("sessions_settings", "sessions_keep"))
    assert re.findall(r"'(\w+)'", keep) == re.findall(r"set_config\('(\w+)'", settings)
