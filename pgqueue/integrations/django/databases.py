"""An alias of Django's DATABASES as a DSN of libpq: where workers, commands and the dashboard connect to.

Asked whenever a DSN is wanted, not once: Django's tests give an alias another database after the start.
"""

from __future__ import annotations

from django.db import connections
from psycopg import pq
from psycopg.conninfo import make_conninfo

from pgqueue.config import DatabaseOfTests
from pgqueue.errors import InvalidOption
from pgqueue.integrations.django import project_settings


def queue_dsn() -> str:
    """The DSN of the alias in which the queue is."""
    return dsn_of(project_settings.alias())


def remember() -> None:
    """Called when Django starts: what the settings name is no database of tests."""
    _named_by_settings.update({alias: connections[alias].settings_dict["NAME"] for alias in connections})


def of_tests() -> DatabaseOfTests | None:
    """The queue's database of the tests that run, if Django has put it in the place of that of the settings."""
    alias = project_settings.alias()
    name = connections[alias].settings_dict["NAME"]
    if name == _named_by_settings.get(alias, name):
        return None
    return DatabaseOfTests(dsn_of(alias), alias)


_named_by_settings: dict[str, str] = {}


def dsn_of(alias: str) -> str:
    """What Django connects with, as a DSN: name, address, account, and those OPTIONS that libpq knows.

    `assume_role` becomes the role of the session. Django's other options are about its own connections.
    Raises InvalidOption if the alias is no PostgreSQL.
    """
    wrapper = connections[alias]
    if wrapper.vendor != "postgresql":
        raise InvalidOption(
            f"PGQUEUE: the database {alias!r} of Django is {wrapper.vendor}, and a queue lives in PostgreSQL: name "
            'another alias, PGQUEUE = {"DATABASE": …}'
        )
    words = {option.keyword.decode() for option in pq.Conninfo.get_defaults()}
    given = {name: value for name, value in wrapper.get_connection_params().items() if name in words}
    if role := wrapper.settings_dict["OPTIONS"].get("assume_role"):
        given["options"] = f"{given.get('options', '')} -c role={_escaped(role)}".strip()
    return make_conninfo("", **given)


def _escaped(value: str) -> str:
    """A value in libpq's `options`, where a backslash keeps the next character."""
    return "".join(f"\\{each}" if each in "\\ \t\n" else each for each in value)
