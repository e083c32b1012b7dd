"""Named statements: what is read from `sql/`, and what happens to the schema's name in it."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from pgqueue.database import statements
from pgqueue.database.statements import Statement, in_schema
from pgqueue.errors import InvalidOption

# What is no code: comments, texts. Dollar-quoted bodies are code and stay.
NOT_CODE = re.compile(r"--[^\n]*|'(?:[^']|'')*'")
PLACEHOLDER = re.compile(r"%\((\w+)\)s")


def sql_sources() -> list[Path]:
    """The files of statements, their fragments, and the migrations."""
    directory = statements.sql_directory()
    return sorted([*statements._files().values(), directory / "fragments.sql", *directory.glob("migrations/*.sql")])


@pytest.mark.parametrize(
    ("written", "elsewhere"),
    [
        ("SELECT * FROM pgqueue.job", "SELECT * FROM other.job"),
        ("nextval('pgqueue.job_id_seq')", "nextval('other.job_id_seq')"),
        ("pg_notify('pgqueue.' || queue, '')", "pg_notify('other.' || queue, '')"),
        ("CREATE SCHEMA IF NOT EXISTS pgqueue;", "CREATE SCHEMA IF NOT EXISTS other;"),
        ("GRANT USAGE ON SCHEMA pgqueue TO r", "GRANT USAGE ON SCHEMA other TO r"),
        ("SET search_path = pgqueue, pg_temp", "SET search_path = other, pg_temp"),
        ("WHERE nspname = 'pgqueue'", "WHERE nspname = 'other'"),
        ("format('DROP TABLE pgqueue.%I', leaf)", "format('DROP TABLE other.%I', leaf)"),
        ("HINT = 'run `pgqueue migrate`'", "HINT = 'run `pgqueue migrate`'"),
        ("SELECT app.pgqueue.id, my_pgqueue.x", "SELECT app.pgqueue.id, my_pgqueue.x"),
    ],
)
def test_another_schema_is_a_change_of_its_name_only(written: str, elsewhere: str) -> None:
    assert in_schema(written, "other") == elsewhere
    assert in_schema(written, "pgqueue") == written


@pytest.mark.promise("F19")
@pytest.mark.parametrize(
    "schema", ["", "Jobs", "1st", "pg_jobs", "a b", 'a"b', "a;drop", "x" * 23, "jobs\n", "order", "é"]
)
def test_a_name_that_could_change_the_sql_is_refused(schema: str) -> None:
    with pytest.raises(InvalidOption, match="schema"):
        in_schema("SELECT 1 FROM pgqueue.job", schema)


def test_no_sql_names_the_schema_in_a_way_the_substitution_misses() -> None:
    for source in sql_sources():
        elsewhere = in_schema(source.read_text(encoding="utf-8"), "elsewhere")
        assert re.search(r"\bpgqueue\b", NOT_CODE.sub("", elsewhere)) is None, source.name
        assert "pgqueue." not in elsewhere, source.name


def test_no_schema_name_we_accept_needs_quotes(empty_dsn: str) -> None:
    with psycopg.connect(empty_dsn) as conn:
        words = [word for (word,) in conn.execute("SELECT word FROM pg_get_keywords()").fetchall()]
        for word in filter(_accepted, words):
            conn.execute(f"CREATE SCHEMA {word}")
            conn.execute(f"CREATE TABLE {word}.job (id int DEFAULT 1)")
            conn.execute(f"CREATE FUNCTION {word}.now() RETURNS int LANGUAGE sql RETURN 1")
            conn.execute(f"SELECT {word}.now() FROM {word}.job WHERE {word}.now() = 1")  # noqa: S608
            conn.rollback()
    assert not all(map(_accepted, words))


def _accepted(schema: str) -> bool:
    try:
        statements.check_schema(schema)
    except InvalidOption:
        return False
    return True


def test_every_placeholder_says_its_type_and_no_percent_is_left_bare() -> None:
    for name in statements.names():
        sql = statements.text(name, "pgqueue")
        untyped = [match[1] for match in PLACEHOLDER.finditer(sql) if not sql[match.end() :].lstrip().startswith("::")]
        assert untyped == [], name
        assert "%" not in PLACEHOLDER.sub("", sql).replace("%%", ""), name


@pytest.fixture
def sql_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A wing's folder, in a directory that statements are read from instead of `sql/`."""
    monkeypatch.setattr(statements, "sql_directory", lambda: tmp_path)
    (tmp_path / "wing").mkdir()
    _forget()
    yield tmp_path / "wing"
    _forget()


def _forget() -> None:
    statements._files.cache_clear()
    statements._file.cache_clear()
    statements._fragments.cache_clear()
    statements.text.cache_clear()


def test_a_statement_is_read_without_its_comments(sql_files: Path) -> None:
    (sql_files / "one.sql").write_text(
        "-- head\n\n-- name: one\n-- Promises 1.\nSELECT 1\n\n-- name: one_more\nSELECT 2\n"
    )
    assert statements.names() == ["one", "one_more"]
    assert statements.text("one", "pgqueue") == "SELECT 1"


def test_one_statement_is_one_file_read(sql_files: Path) -> None:
    (sql_files / "one.sql").write_text("-- name: one_thing\nSELECT 1\n-- name: other\nSELECT 2\n")
    (sql_files / "two.sql").write_bytes(b"-- name: two_things\nSELECT '\xff'\n")
    assert statements.text("one_thing", "pgqueue") == "SELECT 1"
    with pytest.raises(UnicodeDecodeError):
        statements.text("two_things", "pgqueue")
    with pytest.raises(KeyError, match="other"):  # no file says that the statement is in it: nothing is read
        statements.text("other", "pgqueue")


def test_the_longest_name_of_a_file_is_a_statements_home(sql_files: Path) -> None:
    (sql_files / "one.sql").write_text("-- name: one_by_one\nSELECT 1\n")
    (sql_files / "one_by.sql").write_text("-- name: one_by_one\nSELECT 2\n")
    assert [statements.home(name) for name in ("one", "one_of_them", "one_by", "one_by_one")] == [
        "one",
        "one",
        "one_by",
        "one_by",
    ]
    assert statements.text("one_by_one", "pgqueue") == "SELECT 2"


def test_two_statements_of_one_name_are_an_error(sql_files: Path) -> None:
    (sql_files / "one.sql").write_text("-- name: one_same\nSELECT 1\n-- name: one_same\nSELECT 2\n")
    with pytest.raises(ValueError, match=r"one\.sql.*'one_same' is defined twice"):
        statements.names()


def test_two_files_of_one_name_are_an_error(sql_files: Path) -> None:
    (sql_files.parent / "other").mkdir()
    for folder in (sql_files.parent / "other", sql_files):
        (folder / "one.sql").write_text("-- name: one\nSELECT 1\n")
    with pytest.raises(ValueError, match=r"there is another one\.sql, in other/"):
        statements.names()


@pytest.mark.parametrize("folder", statements.NO_STATEMENTS)
def test_migrations_and_grants_are_no_statements(sql_files: Path, folder: str) -> None:
    (sql_files.parent / folder).mkdir()
    (sql_files.parent / folder / "one.sql").write_text("-- name: one\nSELECT 1\n")
    assert statements.names() == []


def test_a_fragment_is_put_in_where_it_is_named(sql_files: Path) -> None:
    (sql_files.parent / "fragments.sql").write_text(
        "-- head\n-- name: keys\n-- Two keys.\na,\nb\n\n-- name: all\nid, {{keys}}\n"
    )
    (sql_files / "one.sql").write_text("-- name: one\nSELECT (\n    SELECT {{all}} FROM {{keys}}\n)\n")
    assert statements.text("one", "pgqueue") == "SELECT (\n    SELECT id, a,\n    b FROM a,\n    b\n)"
    assert statements.names() == ["one"]


def test_a_fragment_of_another_schema_names_that(sql_files: Path) -> None:
    (sql_files.parent / "fragments.sql").write_text("-- name: jobs\npgqueue.job\n")
    (sql_files / "one.sql").write_text("-- name: one\nSELECT FROM {{jobs}}\n")
    assert statements.text("one", "other") == "SELECT FROM other.job"


def test_a_fragment_that_is_not_there_is_an_error(sql_files: Path) -> None:
    (sql_files.parent / "fragments.sql").write_text("-- name: a\n{{b}}\n-- name: b\n1\n")
    (sql_files / "one.sql").write_text("-- name: one\nSELECT {{c}}\n")
    with pytest.raises(KeyError, match=r"'b'.*behind the fragment that uses it"):
        statements.text("one", "pgqueue")
    (sql_files.parent / "fragments.sql").write_text("-- name: b\n1\n")
    with pytest.raises(KeyError, match="no fragment 'c'"):
        statements.text("one", "pgqueue")


def test_two_fragments_of_one_name_are_an_error(sql_files: Path) -> None:
    (sql_files.parent / "fragments.sql").write_text("-- name: a\n1\n-- name: a\n2\n")
    (sql_files / "one.sql").write_text("-- name: one\nSELECT {{a}}\n")
    with pytest.raises(ValueError, match=r"fragments\.sql: fragment 'a' is defined twice"):
        statements.text("one", "pgqueue")


def test_a_statement_without_fragments_reads_no_fragment(sql_files: Path) -> None:
    """`pgqueue health` reads one file."""
    (sql_files / "one.sql").write_text("-- name: one\nSELECT 1\n")
    assert statements.text("one", "pgqueue") == "SELECT 1"
    assert not (sql_files.parent / "fragments.sql").exists()
    assert all("{{" not in body for body in statements._file("one").values())


def test_health_names_no_fragment_and_has_one_written_out() -> None:
    """What a probe asks, `status` and `doctor` ask, too: they must agree."""
    text = " ".join("".join(statements._file("health").values()).split())
    assert "{{" not in text
    read_only = (
        (statements.sql_directory() / "fragments.sql").read_text(encoding="utf-8").partition("-- name: read_only\n")
    )
    condition = [line for line in read_only[2].partition("\n\n")[0].splitlines() if not line.startswith("--")]
    assert " ".join(" ".join(condition).split()) in text


def test_every_fragment_is_used_at_least_twice_and_says_what_it_is() -> None:
    fragments = (statements.sql_directory() / "fragments.sql").read_text(encoding="utf-8")
    everything = fragments + "".join(path.read_text(encoding="utf-8") for path in statements._files().values())
    uses = {name: everything.count("{{" + name + "}}") for name in statements._fragments()}
    assert {name for name, count in uses.items() if count < 2} == set()
    assert re.findall(r"^-- name: (\w+)\n(?!-- \S)", fragments, flags=re.MULTILINE) == []


def test_no_fragment_is_left_to_be_put_in() -> None:
    assert [name for name in statements.names() if re.search(r"\{\{|\}\}", statements.text(name, "pgqueue"))] == []


def test_a_statement_is_printed_as_the_server_gets_it() -> None:
    module = [sys.executable, "-m", "pgqueue.database.statements", "fetch_claim"]
    printed = subprocess.run(module, capture_output=True, text=True, check=True)
    assert printed.stdout == statements.text("fetch_claim", "pgqueue") + "\n"
    assert printed.stderr == ""


def test_an_unknown_name_says_so() -> None:
    with pytest.raises(KeyError, match="no_such_statement"):
        statements.text("no_such_statement", "pgqueue")


def test_a_statement_carries_what_reads_its_rows() -> None:
    count = Statement("SELECT %(n)s::int", {"n": 2}, read=lambda rows: int(rows[0][0]))
    assert count.read([(2,)]) == 2


TEXTS = ["", " ", "NULL", 'say "b"', "back\\slash", "{a,b}", "é\n\t", "a,b", "'", '\\"\\']


def test_arrays_of_texts_and_integers_arrive_as_they_are(conn: psycopg.Connection) -> None:
    params = {"texts": statements.texts(TEXTS), "integers": statements.integers([-1, 0, 2**62]), "none": "{}"}
    query = "SELECT %(texts)s::text[], %(integers)s::bigint[], %(none)s::text[]"
    assert conn.execute(query, params).fetchall() == [(TEXTS, [-1, 0, 2**62], [])]


NOTIFIES = re.compile(r"pg_notify\(")
GUARDED = re.compile(r"pg_notification_queue_usage\(\) < 0\.9 THEN pg_notify\(")


@pytest.mark.promise("F28")
@pytest.mark.parametrize(
    "name", [name for name in statements.names() if NOTIFIES.search(statements.text(name, "pgqueue"))]
)
def test_every_notification_may_be_left_out(name: str) -> None:
    """By the server, if its queue is full; and by the client, if the server refuses it all the same."""
    sql = statements.text(name, "pgqueue")
    assert len(NOTIFIES.findall(sql)) == len(GUARDED.findall(sql))
    assert {"notify", "heard"} & set(PLACEHOLDER.findall(sql))


@pytest.mark.promise("F28")
def test_no_notification_stands_elsewhere() -> None:
    """In Python there is none, and no function of the schema has one without the condition."""
    package = Path(statements.__file__).parent.parent
    assert [path for path in package.rglob("*.py") if "pg_notify" in path.read_text(encoding="utf-8")] == []
