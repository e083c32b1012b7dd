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


@pytest.mark.parametrize("name", statements.names())
def test_the_server_plans_it_with_null_for_every_parameter(name: str, shared: psycopg.Connection) -> None:
    sql = statements.text(name, "pgqueue")
    params = dict.fromkeys(found for found, _ in PLACEHOLDER.findall(sql))
    shared.execute("SET search_path = ''")
    shared.execute("SET plan_cache_mode = force_generic_plan")
    assert shared.execute(f"EXPLAIN {sql}".encode(), params or None).fetchall()
    shared.rollback()


@pytest.mark.parametrize("name", statements.names())
def test_every_placeholder_has_a_type_and_stands_in_no_quotes(name: str) -> None:
    sql = statements.text(name, "pgqueue")
    assert [found for found, cast in PLACEHOLDER.findall(sql) if not cast] == []
    assert [text for text in re.findall(r"'(?:[^']|'')*'", sql) if "%(" in text] == []
    assert len(re.findall(r"%(?!%|\()", sql)) == len(re.findall(r"(?<=%)%", sql)) == sql.count("%%")


@pytest.mark.parametrize("name", statements.names())
def test_the_planner_guesses_no_type_another_than_the_cast_says(name: str, shared: psycopg.Connection) -> None:
    """Prepared as the worker prepares it: every parameter is a typed one, `unknown` is an error of the server."""
    sql = statements.text(name, "pgqueue")
    names = list(dict.fromkeys(found for found, _ in PLACEHOLDER.findall(sql)))
    numbered = PLACEHOLDER.sub(
        lambda match: f"${names.index(match[1]) + 1}" + (f"::{match[2]}" if match[2] else ""), sql
    ).replace("%%", "%")
    shared.execute(f"PREPARE one AS {numbered}".encode())
    [types] = shared.execute("SELECT parameter_types::text[] FROM pg_prepared_statements WHERE name = 'one'").fetchall()
    assert "unknown" not in types[0]
    shared.execute("DEALLOCATE one")
    shared.rollback()


@pytest.mark.parametrize("file", [*SOURCES, *MIGRATIONS])
def test_times_have_a_zone_and_come_from_one_place(file: str) -> None:
    text = code((SOURCES | MIGRATIONS)[file])
    assert re.findall(r"\btimestamp\b(?!tz)", text) == []
    asked = re.findall(
        r"\b(?:current_timestamp|localtimestamp|statement_timestamp|transaction_timestamp|timeofday)\b", text
    )
    assert asked == []
    assert re.findall(r"(?<![.\w])now\(\)", text) == []
    if file in SOURCES:
        assert "clock_timestamp" not in text


@pytest.mark.parametrize("file", SOURCES)
def test_no_update_of_jobs_and_no_ddl(file: str) -> None:
    text = code(SOURCES[file])
    assert re.findall(r"\bUPDATE\s+pgqueue\.job\w*", text) == []
    assert re.findall(r"\b(?:CREATE|ALTER|DROP|TRUNCATE|ATTACH|DETACH)\b", text) == []


def inserts(name: str) -> list[set[str]]:
    """The columns of each INSERT of jobs in this statement."""
    lists = re.findall(r"INSERT INTO pgqueue\.job(?:_[a-z]+)?\s*\(([^)]*)\)", code(statements.text(name, "pgqueue")))
    return [set(re.findall(r"\w+", columns)) for columns in lists]


@pytest.mark.parametrize("name", statements.names())
def test_no_statement_of_ours_names_pos_in_an_insert(name: str) -> None:
    """A moved row that kept its old position would be stranded behind the watermark."""
    assert [columns for columns in inserts(name) if "pos" in columns] == []


def test_a_job_that_moves_keeps_all_that_it_is() -> None:
    """Into history, too: from there it may be retried."""
    kept = set(re.findall(r"\w+", statements._fragments()["job"]))
    assert {"task", "lock_key", "unique_key"} <= kept
    moves = [columns for name in statements.names() for columns in inserts(name) if {"id", "enqueued_at"} <= columns]
    assert len(moves) > 30
    assert [columns for columns in moves if not kept <= columns] == []


@pytest.mark.parametrize("name", statements.names())
def test_a_volatile_clock_bounds_no_scan(name: str) -> None:
    """As `run_at <= pgqueue.now()` it is a filter, and the scan reads on to the end of the index."""
    sql = statements.text(name, "pgqueue")
    bounds = re.findall(
        r"\b(?:WHERE|AND|OR)\s+(?:\w+\.)?(?:run|enqueued|finished|expires)_at\s*[<>]=?\s*pgqueue\.now\(\)", sql
    )
    assert bounds == []


def test_another_schema_is_named_everywhere() -> None:
    for name in statements.names():
        sql = statements.text(name, "jobs")
        assert re.findall(r"(?<![\w$\"])pgqueue\.", sql) == [], name


def test_a_session_keeps_all_that_its_transactions_would_set() -> None:
    """Else a role's setting, or a compiler, gets into them."""
    settings, keep = (statements.text(name, "pgqueue") for name in ("sessions_settings", "sessions_keep"))
    assert re.findall(r"'(\w+)'", keep) == re.findall(r"set_config\('(\w+)'", settings)
