"""The setting PGQUEUE of a Django project: a dict, of which every key may be left out.

    PGQUEUE = {"DATABASE": "jobs", "SCHEMA": "pgqueue", "LISTEN_DSN": "off", "PREPARE": False, "NOTIFY": True}

DATABASE is the alias of the database in which the queue is. The others are those of `pgqueue.configure`.
"""

from __future__ import annotations

import os
from typing import Any

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.db import DEFAULT_DB_ALIAS

from pgqueue.config import configure
from pgqueue.errors import InvalidOption

ALIAS_VARIABLE = "PGQUEUE_DJANGO_DATABASE"
"""The alias that `manage.py pgqueue --database ALIAS` names, for this process and the worker processes it starts."""
OTHERS = ("SCHEMA", "LISTEN_DSN", "PREPARE", "NOTIFY")


def apply() -> None:
    """Configure pgqueue as the settings say. Raises ImproperlyConfigured."""
    given = _given()
    if unknown := given.keys() - {"DATABASE", *OTHERS}:
        raise ImproperlyConfigured(
            f"PGQUEUE has {', '.join(sorted(map(str, unknown)))}; it may have DATABASE, {', '.join(OTHERS)}"
        )
    try:
        configure(**{name.lower(): given[name] for name in OTHERS if name in given})
    except InvalidOption as error:
        raise ImproperlyConfigured(f"PGQUEUE: {error}") from None
    if alias() not in settings.DATABASES:
        raise ImproperlyConfigured(
            f"PGQUEUE: DATABASES has no alias {alias()!r}; it has {', '.join(settings.DATABASES)}"
        )


def alias() -> str:
    """The alias of the queue's database."""
    return os.environ.get(ALIAS_VARIABLE) or str(_given().get("DATABASE", DEFAULT_DB_ALIAS))


def _given() -> dict[str, Any]:
    given = getattr(settings, "PGQUEUE", {})
    if not isinstance(given, dict):
        raise ImproperlyConfigured(f"PGQUEUE is a dict, not {type(given).__name__}")
    return given
