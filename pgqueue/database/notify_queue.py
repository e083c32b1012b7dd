"""The server's NOTIFY queue is full: how that error is told from others, and a statement without its NOTIFY.

Used wherever a statement of ours is sent. NOTIFY is only a hint. Our statements look at the queue before they notify
(`may_notify` in sql/fragments.sql), but it may fill up between that look and the COMMIT. Then:

1. The server refuses the notification before it writes the COMMIT. So the transaction was undone, and nothing of it is
   left: it may be sent again.
2. Sent again without its NOTIFY it meets that error no more. Workers that were not told look by themselves.

The error's SQLSTATE, 54000, stands for any limit of the server: a text that is too long, transaction ids that run out.
So it is not judged by that alone. The name of the server's source file comes with every error, in every language.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pgqueue.database.foreign_errors import attribute, wrapped
from pgqueue.database.statements import Statement

_LIMIT, _SOURCE = "54000", "async.c"
_OFF: dict[str, object] = {"notify": False, "heard": ""}
"""The parameters by which our statements are told to notify, and what they are when they must not."""


def is_full(error: BaseException) -> bool:
    """Whether the server refused a COMMIT because its NOTIFY queue is full, whatever driver raised the error."""
    for each in wrapped(error):
        # Every failure of a handler comes by here: what is no such limit is asked for nothing more.
        if each is None or (attribute(each, "sqlstate") or attribute(each, "pgcode")) != _LIMIT:
            continue
        source = attribute(attribute(each, "diag"), "source_file") or attribute(each, "server_source_filename")
        if str(source).rpartition("/")[2] == _SOURCE:
            return True
    return False


def notifies(statements: Sequence[Statement[Any]]) -> bool:
    """Whether one of these statements may notify."""
    return any(each.params.get(name) for each in statements for name in _OFF)


def silent(statement: Statement[Any]) -> Statement[Any]:
    """The statement without its NOTIFY."""
    off = {name: value for name, value in _OFF.items() if name in statement.params}
    return replace(statement, params={**statement.params, **off}) if off else statement
