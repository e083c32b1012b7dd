"""Where the configuration comes from, which DSNs are understood, and that no password is ever shown."""

from __future__ import annotations

import time
from collections.abc import Iterator
from urllib.parse import quote

import asyncpg
import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st
from psycopg.conninfo import conninfo_to_dict

from pgqueue import config as configuration
from pgqueue.config import Config, config, configure, normalize, safe
from pgqueue.errors import InvalidOption, NotConfigured

A, B, C = "postgresql://a@h/a", "postgresql://b@h/b", "postgresql://c@h/c"


@pytest.fixture(autouse=True)
def nothing_configured(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("DSN", "LISTEN_DSN", "SCHEMA", "NOTIFY", "PREPARE"):
        monkeypatch.delenv(f"PGQUEUE_{name}", raising=False)
    monkeypatch.setattr(configuration, "_configured", {})
    yield


def test_the_argument_wins_over_configure_over_the_environment_over_the_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert config() == Config(dsn=None, listen_dsn=None, schema="pgqueue", notify=True, prepare=True, outbox=False)
    monkeypatch.setenv("PGQUEUE_DSN", A)
    monkeypatch.setenv("PGQUEUE_SCHEMA", "from_env")
    assert (config().dsn, config().schema) == (A, "from_env")
    configure(dsn=B)
    assert (config().dsn, config().schema) == (B, "from_env")
    assert config(dsn=C, schema="given") == Config(dsn=C, listen_dsn=C, schema="given")
    assert config().dsn == B


def test_a_second_configure_changes_what_it_names_only() -> None:
    configure(dsn=A, notify=False)
    configure(schema="jobs")
    assert config() == Config(dsn=A, listen_dsn=A, schema="jobs", notify=False)
    configure(notify=True)
    assert config().notify


def test_a_refused_configure_changes_nothing() -> None:
    configure(dsn=A)
    with pytest.raises(InvalidOption):
        configure(dsn=B, schema="No Schema")
    assert config().dsn == A


def test_listen_goes_where_the_jobs_are_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    configure(dsn=A)
    assert config().listen_dsn == A
    monkeypatch.setenv("PGQUEUE_LISTEN_DSN", B)
    assert (config().dsn, config().listen_dsn) == (A, B)
    assert config(listen_dsn=C).listen_dsn == C


@pytest.mark.parametrize(("word", "on"), [("off", False), ("0", False), ("False", False), ("on", True), ("yes", True)])
def test_switches_of_the_environment(monkeypatch: pytest.MonkeyPatch, word: str, on: bool) -> None:
    monkeypatch.setenv("PGQUEUE_NOTIFY", word)
    assert (config().notify, config().prepare) == (on, True)
    monkeypatch.setenv("PGQUEUE_PREPARE", word)
    assert (config().notify, config().prepare) == (on, on)


def test_a_switch_that_says_neither_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGQUEUE_NOTIFY", "maybe")
    with pytest.raises(InvalidOption, match="PGQUEUE_NOTIFY='maybe': say on or off"):
        config()


def test_without_a_dsn_the_three_ways_to_give_one_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGQUEUE_DSN", "")
    with pytest.raises(NotConfigured, match=r"--dsn.*configure\(dsn=…\).*PGQUEUE_DSN"):
        config().require_dsn()
    assert config(dsn=A).require_dsn() == A


@pytest.mark.parametrize(
    ("given", "understood"),
    [
        ("postgresql://u@h:5433/d?sslmode=require", "postgresql://u@h:5433/d?sslmode=require"),
        ("postgres://u@h/d", "postgresql://u@h/d"),
        (" postgres://u@h/d\n", "postgresql://u@h/d"),
        ("postgresql+psycopg://u:p%40ss@h/d", "postgresql://u:p%40ss@h/d"),
        ("postgresql+psycopg2://u@/d?host=/run/pg", "postgresql://u@/d?host=/run/pg"),
        ("postgresql+psycopg://u@/d?host=a:5433&host=b", "postgresql://u@/d?host=a,b&port=5433,5432"),
        ("postgresql+psycopg://u@/d?host=[::1]:5433", "postgresql://u@/d?host=::1&port=5433"),
        ("postgresql+asyncpg://u@h/d?ssl=require", "postgresql://u@h/d?sslmode=require"),
        ("postgresql+asyncpg://u@h/d?ssl=true", "postgresql://u@h/d?sslmode=require"),
        ("postgresql+asyncpg://u@h/d?prepared_statement_cache_size=0", "postgresql://u@h/d"),
        ("postgresql+asyncpg://u@h/d?timeout=4.6&command_timeout=9", "postgresql://u@h/d?connect_timeout=5"),
        ("postgresql+asyncpg://u@h/d?options=-c+jit%3Doff", "postgresql://u@h/d?options=-c%20jit%3Doff"),
        ("host=h dbname=d user=u", "host=h dbname=d user=u"),
        ("embedded:", "embedded:"),
    ],
)
def test_dsns_become_what_libpq_reads(given: str, understood: str) -> None:
    assert normalize(given) == understood
    assert normalize(understood) == understood
    if understood != "embedded:":
        conninfo_to_dict(understood)


@pytest.mark.parametrize("given", ['"postgresql://u:secret@h/d"', "'host=h password=secret'", ' "secret'])
def test_quotes_around_a_dsn_are_named_and_nothing_of_it_is_shown(given: str) -> None:
    """As a container gets them of an .env file."""
    with pytest.raises(InvalidOption, match="begins with a quotation mark") as refused:
        normalize(given)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("given", ["mysql://u:secret@h/d", "sqlite:///x", "just-a-name", "embedded:elsewhere"])
def test_what_is_no_postgres_is_refused_without_its_password(given: str) -> None:
    with pytest.raises(InvalidOption, match="dsn") as refused:
        normalize(given)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    "given", ["embedded", "Embedded:", "embeded:", "EMBEDDED", "embedded;", "embedded://", "embedded:/x"]
)
def test_a_misspelt_embedded_server_is_answered_with_the_right_form(given: str) -> None:
    with pytest.raises(InvalidOption, match=r"embedded: .*the server in \.pgqueue of the working directory"):
        normalize(given)


@pytest.mark.parametrize("given", ["just-a-name", "postgres", "bed", "mysql://embedded"])
def test_nothing_else_is_taken_for_the_embedded_server(given: str) -> None:
    with pytest.raises(InvalidOption) as refused:
        normalize(given)
    assert "embedded:" not in str(refused.value)


async def test_a_sqlalchemy_url_reaches_the_same_database(dsn: str) -> None:
    normal = normalize(dsn.replace("postgresql://", "postgresql+asyncpg://") + "&prepared_statement_cache_size=0")
    with psycopg.connect(normal) as conn:
        assert conn.info.dbname == conninfo_to_dict(dsn)["dbname"]
    connection = await asyncpg.connect(normal)
    assert await connection.fetchval("SELECT current_database()") == conninfo_to_dict(dsn)["dbname"]
    await connection.close()


@pytest.mark.parametrize(
    ("dsn", "shown"),
    [
        ("postgresql://u:secret@h/d", "postgresql://u:***@h/d"),
        ("postgresql://u:sec:r/e?t@x@h:1/d", "postgresql://u:***@h:1/d"),
        ("postgresql://:secret@h/d", "postgresql://:***@h/d"),
        ("postgresql://u@h/d?password=secret&sslmode=require", "postgresql://u@h/d?password=***&sslmode=require"),
        ("postgresql://u@h/d?sslpassword=secret", "postgresql://u@h/d?sslpassword=***"),
        ("host=h password=secret dbname=d", "host=h password=*** dbname=d"),
        ("host=h password = 'se cr\\'et' dbname=d", "host=h password = *** dbname=d"),
        ("host=h PASSWORD='unfinished secret", "host=h PASSWORD=***"),
        ("postgresql://u@h:5432/d", "postgresql://u@h:5432/d"),
    ],
)
def test_safe_hides_the_password_and_little_else(dsn: str, shown: str) -> None:
    assert safe(dsn) == shown


# Long enough not to occur in the rest by chance.
passwords = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20).map(
    lambda text: f"S3cr{text}eT!"
)


@given(passwords)
def test_no_way_to_write_a_dsn_shows_its_password(password: str) -> None:
    quoted = password.replace("\\", "\\\\").replace("'", "\\'")
    escaped = quote(password, safe="")
    for dsn in (
        f"postgresql://user:{password}@host/db",
        f"postgresql+asyncpg://user:{escaped}@host:5432/db?ssl=true",
        f"postgresql://user@host/db?password={escaped}&sslmode=require",
        f"host=host password='{quoted}' dbname=db",
    ):
        for text in (safe(dsn), repr(Config(dsn=dsn, listen_dsn=dsn))):
            assert password not in text
            assert escaped not in text
            assert quoted not in text
            assert "host" in text


def test_a_text_of_any_length_is_read_once() -> None:
    """Log lines and arguments of jobs are read, too. A pattern that tries each letter anew would take minutes."""
    texts = {
        "A" * 1_000_000 + "://": None,
        "x://" * 250_000: None,
        "x://a:" * 150_000: None,
        "x://a:b@" * 100_000: "x://a:***@",
        " ".join(f"http://host{n}:8080/path" for n in range(40_000)): None,
        "password" * 125_000: None,
        "password" + " " * 1_000_000: None,
        "password=" * 100_000: "password=***",
        "password='\\" + "a" * 1_000_000: "password=***",
    }
    begun = time.perf_counter()
    for text, shown in texts.items():
        assert safe(text) == (shown or text), text[:20]
    assert time.perf_counter() - begun < 10


def test_the_repr_shows_everything_else() -> None:
    shown = repr(Config(dsn="postgresql://u:secret@h/d", listen_dsn=None, schema="jobs"))
    assert shown == (
        "Config(dsn='postgresql://u:***@h/d', listen_dsn=None, schema='jobs', notify=True, prepare=True, outbox=False)"
    )
