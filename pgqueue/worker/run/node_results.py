"""`job.results` and `job.aresults`: the results of the jobs of a node, read page by page while the handler runs.

Called by the context of a worker's jobs, and by that of a drain. A page is one statement and its own transaction: so a
handler that works for an hour holds no snapshot. It ends behind 1,000 jobs, or behind 1 MB: so a handler has at most
that and one result in memory, however many there are. The next page begins behind the last id. So no job comes twice,
and of a node that has ended none is left out.

A thread that waited for its own loop would wait for ever, and the whole worker with it. So each of the two is refused
where the other belongs, when it is called, and again at each page: an iterator may be carried to another thread.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

from pgqueue.database.backoff import Backoff, transient
from pgqueue.database.drivers import running_loop
from pgqueue.database.sessions import Session
from pgqueue.database.statements import Row, Statement, text
from pgqueue.errors import Error, InvalidOption
from pgqueue.jobs.job import Job
from pgqueue.plain_text import plain
from pgqueue.steady_clock import monotonic

PAGE_JOBS, PAGE_BYTES = 1_000, 1_000_000
NAMED_MOST = 20
"""So many names an error lists."""
PATIENCE_SECONDS = 30.0
"""For so long a page is asked for again while the database is away."""

Rows = Statement[list[Row]]


def results(job: Job, name: str, schema: str, ask: Callable[[Rows], list[Row]]) -> Iterator[Any]:
    """The results of the node of this name, in the flow of the job."""
    node, after = _found(job, name, ask(_named(job, name, schema))), 0
    while rows := ask(_page(node, after, schema)):
        for id, result in rows:
            after = id
            yield None if result is None else json.loads(result)


async def aresults(job: Job, name: str, schema: str, ask: Callable[[Rows], Awaitable[list[Row]]]) -> AsyncIterator[Any]:
    """The same on the loop."""
    node, after = _found(job, name, await ask(_named(job, name, schema))), 0
    while rows := await ask(_page(node, after, schema)):
        for id, result in rows:
            after = id
            yield None if result is None else json.loads(result)


class NodeResults:
    """Reads for the jobs of a worker, over one of its sessions, which belongs to the loop."""

    def __init__(self, session: Session, loop: asyncio.AbstractEventLoop) -> None:
        self._session = session
        self._loop = loop

    def results(self, job: Job, name: str) -> Iterator[Any]:
        """The results, in the thread of the job."""

        def ask(statement: Rows) -> list[Row]:
            refuse_async(job, here=running_loop() is not None)
            return asyncio.run_coroutine_threadsafe(self._ask(statement), self._loop).result()

        refuse_async(job, here=running_loop() is not None)
        return results(job, name, self._session.link.schema, ask)

    def aresults(self, job: Job, name: str) -> AsyncIterator[Any]:
        """The results, on the loop."""

        async def ask(statement: Rows) -> list[Row]:
            refuse_sync(job, here=running_loop() is not self._loop)
            return await self._ask(statement)

        refuse_sync(job, here=running_loop() is not self._loop)
        return aresults(job, name, self._session.link.schema, ask)

    async def _ask(self, statement: Rows) -> list[Row]:
        """Only read, so it may be asked for again. With pauses: a standby that is not promoted yet answers at once."""
        until, backoff = monotonic() + PATIENCE_SECONDS, Backoff()
        while True:
            try:
                [rows] = await self._session.run(statement)
            except Exception as error:
                if not transient(error) or monotonic() >= until:
                    raise
                await asyncio.sleep(backoff.pause())
            else:
                return list(rows)


def refuse_async(job: Job, *, here: bool) -> None:
    """Raise if this is an async handler, or its loop: `job.results` is for sync handlers."""
    if here:
        raise _refusal(job, "results", "async", "aresults")


def refuse_sync(job: Job, *, here: bool) -> None:
    """Raise if this is a sync handler, or a loop that it runs itself: `job.aresults` is for async handlers."""
    if here:
        raise _refusal(job, "aresults", "sync", "results")


def _refusal(job: Job, what: str, kind: str, instead: str) -> Error:
    loop = "async for" if kind == "async" else "for"
    return Error(
        f"job {job.id} ({job.task}): no job.{what} here: its handler is {kind}: `{loop} … in job.{instead}(…)`",
        job_id=job.id,
    )


def _named(job: Job, name: str, schema: str) -> Rows:
    return Statement(text("node_results_named", schema), {"flow": job.flow, "name": name, "n": NAMED_MOST + 1}, list)


def _page(node: int, after: int, schema: str) -> Rows:
    about = {"node": node, "after": after, "n": PAGE_JOBS, "most": PAGE_BYTES}
    return Statement(text("node_results_page", schema), about, list)


def _found(job: Job, name: str, rows: list[Row]) -> int:
    [(node, said)] = rows
    if node is not None:
        return int(node)
    names = [repr(plain(each)) for each in json.loads(said)]
    listed = ", ".join(names[:NAMED_MOST]) + (" and others" if len(names) > NAMED_MOST else "")
    known = f"its nodes are {listed}" if names else "none of its nodes has a name: flow.add(…, name=…)"
    raise InvalidOption(f"job {job.id} ({job.task}): no node of flow {job.flow} has the name {name!r:.200}; {known}")
