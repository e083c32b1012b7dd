"""One body for threads and for the loop: how its steps are waited for, and what runs it in a thread.

Used by `commit`, `in_doubt`, `handler_pool`, `handler_connection`. Their bodies are coroutines, and each stands once:

1. A body waits for a step with `await side.wait(conn.close())`. On the loop that awaits the step. In a thread the step
   has blocked, and `wait` has its answer.
2. On the loop a body is awaited. A cancellation lands at an `await`, as in any coroutine.
3. In a thread a body never suspends. So `run` has its result after one `send`.
4. In a thread a body is therefore a stack of plain calls: its `except` and `finally` see, in that thread, what a step
   raises.
5. In a thread a body is made and run only where nothing is raised into it from outside (RunningJobs.shield,
   RunningJobs.uninterruptible). So none is dropped before its first step, and none is left half-way.
"""

from __future__ import annotations

from collections.abc import Awaitable, Coroutine
from typing import Any, TypeVar

from psycopg import AsyncConnection, AsyncCursor, Connection, Cursor
from psycopg.rows import tuple_row

from pgqueue.database.own_adapters import adapted
from pgqueue.database.statements import Row, Statement

T = TypeVar("T")


def run(body: Coroutine[Any, Any, T]) -> T:
    """The result of a body whose steps are those of a thread."""
    try:
        body.send(None)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    body.close()
    raise RuntimeError("a step in a thread was suspended")


async def blocked(answer: Any) -> Any:
    """How a body waits in a thread: the step has its answer."""
    return answer


def awaited(step: Awaitable[Any]) -> Awaitable[Any]:
    """How a body waits on the loop."""
    return step


def send(conn: Connection[Any], statement: Statement[Any]) -> Cursor[Row]:
    """Send a statement; its rows are tuples, its parameters named, whatever factories the connection has. What they are
    read and written with is pgqueue's own."""
    cursor = Cursor(conn, row_factory=tuple_row)
    return cursor.execute(adapted(cursor, statement.sql), statement.params)


async def asend(conn: AsyncConnection[Any], statement: Statement[Any]) -> AsyncCursor[Row]:
    """`send` on the loop."""
    cursor = AsyncCursor(conn, row_factory=tuple_row)
    return await cursor.execute(adapted(cursor, statement.sql), statement.params)
