"""Whether libpq can read a DSN, without a word of it in any message: what libpq cannot read may be the password.

libpq's own errors quote the part that they stumble over. If a password has an `@`, a `/` or a space that is not
escaped, that part is of the password; so is the host that is then looked up. Every DSN that is connected with goes
through here first: `embedded.resolve`, and the command line.
"""

from __future__ import annotations

import os
import re
from typing import Any

from pgqueue.errors import InvalidOption

_QUOTED = re.compile(r"\".*\"", re.DOTALL)
_PORTS = re.compile(r"[0-9]*(?:,[0-9]*)*")
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
    from psycopg import pq
    from psycopg.conninfo import conninfo_to_dict

    return name in conninfo_to_dict(dsn) or any(
        each.keyword == name.encode() and each.envvar and each.envvar.decode() in os.environ
        for each in pq.Conninfo.get_defaults()
    )


def _unreadable(why: str) -> InvalidOption:
    return InvalidOption(f"libpq cannot read the DSN: {why}; {ESCAPE}. It is not shown, for it may hold a password")
