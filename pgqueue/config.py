"""Where the database is and how pgqueue speaks to it: one frozen `Config`.

Each value comes from the argument of the call, else from `pgqueue.configure(...)`, else from the environment, else it
is the default. Where a framework names the database (`find_dsn`), its DSN comes before the environment's. The client
side, the worker and the CLI ask this module for them. It never connects and never prints a password.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from pgqueue.databases import current
from pgqueue.errors import InvalidOption, NotConfigured
from pgqueue.options import checks_options

EMBEDDED = "embedded:"
OFF = "off"
"""As `listen_dsn`: no LISTEN, workers poll. For a pooler in transaction mode if there is no direct connection, too."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_SCHEMA = re.compile(r"[a-z_][a-z0-9_]{0,21}")
# The words of PostgreSQL 15 to 18 that cannot name a schema without quotes (pg_get_keywords(), catcode R and T). A test
# compares them with the server's. Because they are refused, no SQL of ours needs to quote the schema.
_RESERVED = _words("""
    all analyse analyze and any array as asc asymmetric authorization binary both case cast check collate collation
    column concurrently constraint create cross current_catalog current_date current_role current_schema current_time
    current_timestamp current_user default deferrable desc distinct do else end except false fetch for foreign freeze
    from full grant group having ilike in initially inner intersect into is isnull join lateral leading left like limit
    localtime localtimestamp natural not notnull null offset on only or order outer overlaps placing primary references
    returning right select session_user similar some symmetric system_user table tablesample then to trailing true union
    unique user using variadic verbose when where window with
""")

_URL = re.compile(r"(?P<scheme>postgres(?:ql)?)(?:\+(?P<driver>\w+))?://", re.IGNORECASE)
_OTHER_URL = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
# Both read a text once, however long it is: each begins with a fixed text, and what follows cannot be read in two ways.
_USER = re.compile(r"://[^:@/?]*+:")
_PASSWORD = re.compile(
    r"(?P<name>passw(?:or)?d\s*+=\s*+)(?:'(?:[^'\\]|\\.)*+'?|(?:\\.|[^\s&])*+)", re.IGNORECASE | re.DOTALL
)

# Options that only asyncpg or SQLAlchemy's asyncpg dialect understand: their own caches and timeouts.
_ASYNCPG_ONLY = _words("""
    async_fallback command_timeout connection_class direct_tls json_deserializer json_serializer
    max_cacheable_statement_size max_cached_statement_lifetime prepared_statement_cache_size
    prepared_statement_name_func record_class statement_cache_size
""")
_ASYNCPG_NAMES = {"ssl": "sslmode", "timeout": "connect_timeout", "database": "dbname"}
_SSL_WORDS = {"true": "require", "1": "require", "on": "require", "false": "disable", "0": "disable", "off": "disable"}

_YES = frozenset({"1", "on", "true", "yes"})
_NO = frozenset({"0", "off", "false", "no"})


@dataclass(frozen=True, slots=True, repr=False)
class Config:
    """The settings of one process.

    - `listen_dsn`: the DSN for LISTEN. It is the same as `dsn`, unless `dsn` leads to a pooler. None (given as `off`)
      means no LISTEN: workers poll.
    - `prepare=False`: for poolers without prepared statements.
    - `notify=False`: for two-phase commit.
    - `outbox=True`: `enqueue` stages jobs in the outbox of the database that it is given; a relay delivers them.
    """

    dsn: str | None = None
    listen_dsn: str | None = None
    schema: str = "pgqueue"
    notify: bool = True
    prepare: bool = True
    outbox: bool = False

    def require_dsn(self) -> str:
        """Return the DSN, or raise NotConfigured naming the ways to give one."""
        if self.dsn is None:
            raise NotConfigured(
                "no database configured: pass dsn=… (on the command line --dsn), call pgqueue.configure(dsn=…), "
                "or set PGQUEUE_DSN, for example PGQUEUE_DSN=postgresql://user@host/database"
            )
        return self.dsn

    def __repr__(self) -> str:
        shown = (
            f"{field.name}={safe(value) if isinstance(value, str) else value!r}"
            for field in fields(self)
            for value in (getattr(self, field.name),)
        )
        return f"Config({', '.join(shown)})"


@dataclass(frozen=True, slots=True)
class DatabaseOfTests:
    """A database that is there for tests, and the framework's alias of its connection if there is one."""

    dsn: str
    alias: str | None = None


_configured: dict[str, str | bool] = {}
_find: Callable[[], str] | None = None
_find_database_of_tests: Callable[[], DatabaseOfTests | None] | None = None


@checks_options
def configure(
    *,
    dsn: str | None = None,
    listen_dsn: str | None = None,
    schema: str | None = None,
    notify: bool | None = None,
    prepare: bool | None = None,
    outbox: bool | None = None,
) -> None:
    """Set this process's configuration. Values that are left out stay as they are.

    - `dsn`: the database: `postgresql://…`, a URL of SQLAlchemy, `host=… dbname=…`, or `embedded:`.
    - `listen_dsn`: where LISTEN goes, past a pooler; `off`: nowhere, workers poll. Default: the `dsn`.
    - `schema`: the schema of the tables, 1 to 22 lower-case letters, digits or `_`.
    - `notify`: whether enqueues notify workers. Without it they poll; two-phase commit wants that.
    - `prepare`: whether statements are prepared. Poolers without prepared statements want that off.
    - `outbox`: whether each enqueue stages its job in the outbox of the database that it is given.

    A wrong value raises InvalidOption here, not at its first use.

        pgqueue.configure(dsn="postgresql://app@db/shop", schema="jobs")
    """
    global _configured
    for name, text in ("dsn", dsn), ("listen_dsn", listen_dsn), ("schema", schema):
        if text is not None and not isinstance(text, str):
            raise InvalidOption(f"configure: {name} is a text, not {type(text).__name__}")
    for name, switch in ("notify", notify), ("prepare", prepare), ("outbox", outbox):
        if switch is not None and not isinstance(switch, bool):
            raise InvalidOption(f"configure: {name} is True or False, not {switch!r}")
    named = _named(dsn=dsn, listen_dsn=listen_dsn, schema=schema, notify=notify, prepare=prepare, outbox=outbox)
    changed = _configured | named
    _resolve(changed)
    _configured = changed


def find_dsn(find: Callable[[], str]) -> None:
    """Ask this function for the DSN whenever one is wanted: a framework knows its database, which changes in tests.

    A DSN of `configure` comes before it, and it comes before PGQUEUE_DSN.
    """
    global _find
    _find = find


def find_database_of_tests(find: Callable[[], DatabaseOfTests | None]) -> None:
    """Ask this function for the database of the tests that run. A fixture and a framework know one."""
    global _find_database_of_tests
    _find_database_of_tests = find


def database_of_tests() -> DatabaseOfTests | None:
    """The database of the tests that run, None outside of tests. What is configured may be another one."""
    return _find_database_of_tests() if _find_database_of_tests is not None else None


def config(*, dsn: str | None = None, listen_dsn: str | None = None, schema: str | None = None) -> Config:
    """Return the configuration in force. An argument that is not None comes before everything else.

    In a worker of one of several databases the DSN is that database's, and so is that of LISTEN unless it is `off`.
    """
    configured, database = _configured, current.get()
    if database is not None:
        off = OFF in (listen_dsn, configured.get("listen_dsn") or os.environ.get("PGQUEUE_LISTEN_DSN"))
        configured = configured | _named(dsn=database.dsn, listen_dsn=OFF if off else database.dsn)
    given = configured | _named(dsn=dsn, listen_dsn=listen_dsn, schema=schema)
    if _find is not None and "dsn" not in given:
        given = given | _named(dsn=_find())
    return _resolve(_environment() | given)


def client() -> tuple[str, bool]:
    """Return schema and notify of the configuration in force. Faster than `config`: enqueue needs only these."""
    schema, notify = _configured.get("schema"), _configured.get("notify")
    if schema is None:
        schema = os.environ.get("PGQUEUE_SCHEMA") or "pgqueue"
    if notify is None:
        notify = _switch("PGQUEUE_NOTIFY")
    return check_schema(str(schema)), notify is not False


def stages() -> bool:
    """Whether `enqueue` stages jobs in an outbox."""
    return bool(_configured.get("outbox", False))


def normalize(dsn: str) -> str:
    """Return `dsn` as libpq reads it: `postgres://` and `postgresql+asyncpg://` (SQLAlchemy) become `postgresql://`.

    asyncpg's own options are dropped, `ssl=` and `timeout=` are translated. Keyword strings (`host=… dbname=…`) and
    `embedded:` stay as they are. Another database's URL raises InvalidOption.
    """
    if dsn.strip()[:1] in ("'", '"'):
        raise InvalidOption(
            "dsn: it begins with a quotation mark, as of an .env file that is read as it stands: leave the quotes out. "
            "It is not shown, for it may hold a password"
        )
    try:
        return _normalized(dsn.strip())
    except InvalidOption:
        raise
    except ValueError:  # of urllib, which quotes what it cannot read: that may be the password
        raise InvalidOption(
            "dsn: its host or port cannot be read; use postgresql://user@host:5432/database. "
            "It is not shown, for it may hold a password"
        ) from None


def safe(dsn: str) -> str:
    """Return `dsn` with every password replaced by `***`, for messages and logs.

    It hides too much rather than too little: a password with an unescaped `@` or `/` in it is hidden as a whole. It may
    be given any text; the time grows with its length only.
    """
    end = dsn.rfind("@")
    if end >= 0 and (user := _USER.search(dsn, 0, end)):
        dsn = f"{dsn[: user.end()]}***{dsn[end:]}"
    return _PASSWORD.sub(r"\g<name>***", dsn)


@lru_cache(maxsize=64)
def check_schema(schema: str) -> str:
    """Return `schema` if it can name pgqueue's schema, else raise InvalidOption.

    A schema has at most 22 characters, because the channel name `schema.queue` must fit PostgreSQL's 63 bytes.
    """
    if _SCHEMA.fullmatch(schema) is None or schema.startswith("pg_"):
        raise InvalidOption(
            f"schema {schema!r}: use 1 to 22 lower-case letters, digits or _, not starting with a digit or pg_"
        )
    if schema in _RESERVED:
        raise InvalidOption(f"schema {schema!r}: a reserved word of SQL, choose another name")
    return schema


def _named(**values: str | bool | None) -> dict[str, str | bool]:
    """The values that were given. An empty text counts as not given."""
    return {name: value for name, value in values.items() if value is not None and value != ""}


def _resolve(values: dict[str, str | bool]) -> Config:
    return _resolved(tuple(values.items()))


@lru_cache(maxsize=64)  # every enqueue asks
def _resolved(values: tuple[tuple[str, str | bool], ...]) -> Config:
    chosen = Config(**dict(values))  # type: ignore[arg-type]
    dsn = chosen.dsn and normalize(chosen.dsn)
    listen_dsn = normalize(chosen.listen_dsn) if chosen.listen_dsn else dsn
    if listen_dsn == OFF:
        listen_dsn = None
    return replace(chosen, dsn=dsn, listen_dsn=listen_dsn, schema=check_schema(chosen.schema))


def _environment() -> dict[str, str | bool]:
    return _named(
        dsn=os.environ.get("PGQUEUE_DSN"),
        listen_dsn=os.environ.get("PGQUEUE_LISTEN_DSN"),
        schema=os.environ.get("PGQUEUE_SCHEMA"),
        notify=_switch("PGQUEUE_NOTIFY"),
        prepare=_switch("PGQUEUE_PREPARE"),
    )


def _switch(name: str) -> bool | None:
    word = os.environ.get(name, "").strip().lower()
    if word in _YES or word in _NO:
        return word in _YES
    if word:
        raise InvalidOption(f"{name}={word!r}: say on or off")
    return None


@lru_cache(maxsize=64)
def _normalized(dsn: str) -> str:
    url = _URL.match(dsn)
    if url is not None:
        rest = dsn[url.end() :]
        return f"postgresql://{rest if url['driver'] is None else _translated(rest)}"
    if dsn.startswith(EMBEDDED) and dsn != EMBEDDED:
        where = "it is the server in .pgqueue of the working directory"
        raise InvalidOption(f"dsn {safe(dsn)!r}: {EMBEDDED} takes nothing after it; {where}")
    if _OTHER_URL.match(dsn) or (dsn not in (EMBEDDED, OFF) and "=" not in dsn):
        # Without `://` nothing says where a password begins.
        shown = safe(dsn) if "://" in dsn else f"***{dsn[dsn.rfind('@') :]}" if "@" in dsn else dsn
        raise InvalidOption(
            f"dsn {shown!r}: use {_meant(dsn)}postgresql://user@host/database, or host=… dbname=… user=…"
        )
    return dsn


def _meant(dsn: str) -> str:
    """`embedded:` and its meaning, if that may be what was meant."""
    from difflib import get_close_matches  # imported here: a program without mistakes needs none of it

    near = get_close_matches(dsn.lower(), [EMBEDDED], 1, 0.8)
    return f"{EMBEDDED} (with its colon) for the server in .pgqueue of the working directory, " if near else ""


def _translated(rest: str) -> str:
    """The part after `scheme://` of a SQLAlchemy URL, with the query as libpq reads it."""
    address, mark, query = rest.partition("?")
    if not mark:
        return rest
    options = [
        _option(name, value) for name, value in parse_qsl(query, keep_blank_values=True) if name not in _ASYNCPG_ONLY
    ]
    hosts = [value for name, value in options if name == "host"]
    plain = [(name, value) for name, value in options if name != "host"]
    # `&` and `=` in values are escaped. A space becomes %20, because libpq takes a `+` literally.
    text = urlencode([*_hosts(hosts), *plain], quote_via=quote, safe="/,:")
    return f"{address}?{text}" if text else address


def _option(name: str, value: str) -> tuple[str, str]:
    if name == "ssl":
        value = _SSL_WORDS.get(value.lower(), value)
    if name == "timeout" and value.replace(".", "", 1).isdecimal():
        value = str(round(float(value)))  # libpq counts whole seconds
    return _ASYNCPG_NAMES.get(name, name), value


def _hosts(hosts: list[str]) -> list[tuple[str, str]]:
    """SQLAlchemy writes several servers as host=a:5432&host=b:5433, libpq as host=a,b&port=5432,5433."""
    if not hosts:
        return []
    split = [(host, None) if host.startswith("/") else _host_and_port(host) for host in hosts]
    named = [("host", ",".join(host for host, _ in split))]
    if any(port for _, port in split):
        named.append(("port", ",".join(str(port or 5432) for _, port in split)))
    return named


def _host_and_port(host: str) -> tuple[str, int | None]:
    parts = urlsplit(f"//{host}")
    return (parts.hostname or host, parts.port) if "," not in host else (host, None)
