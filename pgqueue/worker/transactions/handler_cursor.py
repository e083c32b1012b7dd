"""The cursors that handlers get: they note a statement that ends the transaction, and keep its mark at a RESET ALL.

Used by `handler_pool`, as the cursor class of each connection. An answer that leaves no transaction open says the same
(`handler_connection`), but it does not always come:

1. After `COMMIT AND CHAIN`, or a COMMIT and a BEGIN in one text, a transaction is open again.
2. If the session ends at a COMMIT, there is no answer. Whether it took place is then unknown.

Only the first word of a text is looked at. A text that begins with COMMIT is nothing else, so no other handler is taken
for one that ends its transaction. A COMMIT further on in a text is not seen, nor one by a cursor class of its own. For
those there is the mark of the transaction (`commit`), which a RESET ALL takes away, too:

1. Before a text that begins with RESET ALL the server is asked for the mark. What it says is set again afterwards.
2. So what ended the transaction before that text is found all the same.
3. A RESET ALL further on in a text takes the mark away, and the job fails. That says too much, but loses nothing.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from psycopg import AsyncCursor, Cursor
from psycopg.sql import SQL

from pgqueue.worker.transactions.commit_message import MARK, SHOW

if TYPE_CHECKING:
    from psycopg.pq.abc import PGresult

# Nothing of it is tried twice: a text may begin with any number of comments.
_SPACE = r"(?>\s+|;|--[^\n]*|/\*(?>.*?\*/))*+"
_ENDS = re.compile(rf"{_SPACE}(?:COMMIT(?!\s+PREPARED)|END|PREPARE\s+TRANSACTION)\b", re.IGNORECASE | re.DOTALL)
# SELECT, UPDATE, INSERT, DELETE, WITH: known by the first letter. Measured: 0.1 µs a text, with the pattern 0.3 µs.
_OTHERS = "SsUuIiDdWw"
_ENDS_BYTES = re.compile(_ENDS.pattern.encode(), re.IGNORECASE | re.DOTALL)
_RESETS = re.compile(rf"{_SPACE}RESET\s+ALL\b", re.IGNORECASE | re.DOTALL)
_RESETS_BYTES = re.compile(_RESETS.pattern.encode(), re.IGNORECASE | re.DOTALL)


def ends_transaction(query: object) -> bool:
    """Whether this text begins with what commits or prepares its transaction."""
    return _begins(query, _ENDS, _ENDS_BYTES)


def resets_all(query: object) -> bool:
    """Whether this text begins with what takes the mark of its transaction away."""
    return _begins(query, _RESETS, _RESETS_BYTES)


def _begins(query: object, pattern: re.Pattern[str], in_bytes: re.Pattern[bytes]) -> bool:
    if isinstance(query, str):
        return query[:1] not in _OTHERS and pattern.match(query) is not None
    if isinstance(query, SQL):
        return _begins(query.as_string(), pattern, in_bytes)
    return isinstance(query, bytes) and in_bytes.match(query) is not None


def _setting(mark: PGresult | None) -> bytes:
    """What sets the mark to what it was; in a pipeline no answer has come yet, and it is gone."""
    value = b"" if mark is None else mark.get_value(0, 0) or b""
    return MARK + (value if value.isdigit() else b"0")


class HandlerCursor(Cursor[Any]):
    """A cursor of a thread's connection."""

    def execute(self, query: Any, *args: Any, **options: Any) -> Any:
        conn: Any = self.connection
        if ends_transaction(query):
            conn.note_own_end()
        elif conn.kept and resets_all(query):
            mark = super().execute(SHOW).pgresult
            super().execute(query, *args, **options)
            return super().execute(_setting(mark))
        return super().execute(query, *args, **options)


class AsyncHandlerCursor(AsyncCursor[Any]):
    """The same for the loop."""

    async def execute(self, query: Any, *args: Any, **options: Any) -> Any:
        conn: Any = self.connection
        if ends_transaction(query):
            conn.note_own_end()
        elif conn.kept and resets_all(query):
            mark = (await super().execute(SHOW)).pgresult
            await super().execute(query, *args, **options)
            return await super().execute(_setting(mark))
        return await super().execute(query, *args, **options)
