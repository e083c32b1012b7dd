"""What a DSN says: whether libpq can read it, and how long a connection may take.

Of what libpq cannot read no word stands in any message: it may be the password.
libpq's own errors quote the part that they stumble over. If a password has an `@`, a `/` or a space that is not
escaped, that part is of the password; so is the host that is then looked up. Every DSN that is connected with goes
through here first: `embedded.resolve`, and the command line.

Each connection that pgqueue opens takes its timeout from `connect_timeout` or `connect_timeout_at_most`. Naive: psycopg
waits two minutes for each host that is frozen.
"""

from __future__ import annotations

import os
import re
from typing import Any

from pgqueue.errors import InvalidOption

_QUOTED = re.compile(r"\".*\"", re.DOTALL)
_PORTS = re.compile(r"[0-9]*(?:,[0-9]*)*")
CONNECT_SECONDS = 10
"""To connect with one host may take so long, unless the DSN says otherwise."""
ESCAPE = "in a URL write %40 for @, %2F for /, %3A for :, %25 for % and %20 for a space, in a password, too"


def parts_of(dsn: str) -> dict[str, Any]:
    """The parameters of a DSN. InvalidOption: libpq cannot read it, or takes a part of the password for the host."""
    import psycopg
    from psycopg.conninfo import conninfo_to_dict

    try:
        parts = conninfo_to_dict(dsn)
    except (psycopg.Error, UnicodeError) as error:
        # The longest quoted part: a value may have quotes in it.
        why = _QUOTED.sub('"…"', " ".join(str(error).split())) if isinstance(error, psycopg.Error) else "no UTF-8 text"
        raise _unreadable(why) from None
    if "@" in str(parts.get("host", "")) or _PORTS.fullmatch(str(parts.get("port", ""))) is None:
        raise _unreadable("its host or its port cannot be one")
    return parts


def names(dsn: str, name: str) -> bool:
    """Whether a DSN, or the environment of libpq, gives this parameter.

    >>> names("host=db connect_timeout=2", "connect_timeout")
    True
    """
    return _named(dsn, name) is not None


def connect_timeout(dsn: str) -> dict[str, Any]:
    """The option of this name: to connect with one host may take so long. What the DSN or the environment names stays.

    >>> connect_timeout("host=a,b"), connect_timeout("host=a,b connect_timeout=2")
    ({'connect_timeout': 10}, {})
    """
    return {} if names(dsn, "connect_timeout") else {"connect_timeout": CONNECT_SECONDS}


def connect_timeout_at_most(dsn: str, seconds: float) -> dict[str, Any]:
    """`connect_timeout` of a connection that is of no use later: what the DSN names stays if it is shorter.

    libpq takes no time below 2 s, and 0 for no limit.

    >>> [connect_timeout_at_most(f"host=a connect_timeout={named}", 5)["connect_timeout"] for named in (0, 2, 9)]
    [5, 2, 5]
    """
    most = max(2, int(seconds))
    try:
        named = int(float(_named(dsn, "connect_timeout") or most))
    except ValueError:  # the driver refuses it
        return {}
    return {"connect_timeout": min(named, most) if named > 0 else most}


def _named(dsn: str, name: str) -> str | None:
    from psycopg import pq
    from psycopg.conninfo import conninfo_to_dict

    parts = conninfo_to_dict(dsn)
    if name in parts:
        return str(parts[name])
    variables = (each.envvar for each in pq.Conninfo.get_defaults() if each.keyword == name.encode())
    return next((os.environ[each.decode()] for each in variables if each and each.decode() in os.environ), None)


def _unreadable(why: str) -> InvalidOption:
    return InvalidOption(f"libpq cannot read the DSN: {why}; {ESCAPE}. It is not shown, for it may hold a password")
