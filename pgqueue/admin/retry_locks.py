"""Lock what a retry of many jobs will change, before it changes anything.

Called by `actions` if a retry changes more jobs than one statement, inside a transaction of the caller. In autocommit
mode each statement is a transaction of its own, and a lock taken here would be gone before it is of use.

Why such a retry waits for no other operation in a circle:
1. It first locks all its jobs that have ended, in the order of their ids. Other retries and discards do the same;
   nothing else locks these rows.
2. Then it locks all keys of these jobs, in the order of their bytes, as every enqueue does. A key without a row gets
   one that names no job.
3. A key that a living job has is not locked. The jobs that want it are refused, and not asked for again.
4. So the statements that follow, a thousand jobs each, take keys that this transaction has locked. They wait for
   nothing, in whatever order they come.

The server never has more than 1,000 jobs or keys of it at once. This process has the keys of all jobs, as it has an
answer for each.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, islice
from operator import itemgetter
from typing import NamedTuple

from pgqueue.database.statements import Statement, integers, text
from pgqueue.database.steps import Steps

KEYS_MOST = 1_000
"""Keys per statement."""


class Refused(NamedTuple):
    """A job that is not to be retried: its state, and the job that has one of its keys. `holder` None: it lives."""

    state: str
    holder: int | None


Wanted = tuple[bytes, int]
"""A key, and a job that wants it. Bytes are sorted as the server sorts keys."""


def locking(batches: Iterable[Sequence[int]], live: Sequence[str], schema: str) -> Steps[dict[int, Refused]]:
    """Lock these jobs, whose ids come in order, and then their keys. Return the jobs that are not to be retried."""
    refused: dict[int, Refused] = {}
    states: dict[int, str] = {}
    wanted: list[Wanted] = []
    for batch in batches:
        statement = Statement(text("actions_retry_lock", schema), {"ids": integers(batch)}, list)
        for id, state, *keys in (yield statement):
            if state in live:
                refused[id] = Refused(state, None)
            for key in filter(None, keys):
                wanted.append((key.encode(), id))
                states[id] = state
    wanted.sort()
    for few in _some_keys(wanted):
        names = json.dumps([key.decode() for key in few])
        for key, holder in (yield Statement(text("actions_retry_keys", schema), {"keys": names}, list)):
            for id in few[key.encode()]:
                refused.setdefault(id, Refused(states[id], holder))
    return refused


def _some_keys(wanted: Sequence[Wanted]) -> Iterator[dict[bytes, list[int]]]:
    """The jobs of each key, for so many keys as one statement locks. `wanted` is sorted."""
    keys = groupby(wanted, itemgetter(0))
    while few := {key: [id for _, id in jobs] for key, jobs in islice(keys, KEYS_MOST)}:
        yield few
