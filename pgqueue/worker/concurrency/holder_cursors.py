"""Where to begin to read the holders of a key: after those that have gone.

An index keeps the entries of deleted rows until vacuum may remove them. Vacuum may not while a transaction holds an
older snapshot. Then a statement that reads the rows of a key from the first one reads all that ever went before. So a
worker remembers for each key of a lock where to begin, by what it saw when it gave the key last. (For the jobs that
wait: see waiter_cursors.)

Why the cursor of a lock is exact:

1. A row that enters any table as a holder draws a `hold_pos` from one sequence.
2. A holder is made only under the key's lock. A holder that is being moved (claimed, rescued, put back) is seen where
   it was until the move commits.
3. So if a transaction that has locked the key counts its holders in all tables and finds none, no transaction under way
   can make one.
4. The job that is then unblocked draws a number, and every later holder a higher one. No holder will ever have a lower
   one.
5. So reading may begin after that number less one, or after any lower number. The lowest number that a statement drew
   does for all jobs that it unblocked.
6. If other jobs held the lock before, nothing is learned.

Why the cursor of a limit is exact:

1. A limit usually has holders. Its cursor is learned when all of them were counted.
2. No holder then has a number below the oldest one's. New holders and moved holders always draw higher numbers.
3. A holder that is being moved is visible under its old number until the move commits.
4. So a limit is read from its oldest holder on. While a snapshot is held, a holder that runs for very long has those
   that came and went beside it read again.

After a failover the new server may have lost the last numbers of a sequence, and begin again below. So a cursor holds
on one connection only, to one server process: statements are sent with the connection they were made for
(`Session.run(on=…)`). Behind a pooler nothing is remembered. If the numbers go back all the same, everything is
forgotten.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec

KEYS_MOST = 4_096
"""The number of keys that are remembered, and of older keys beside them."""
SENT_MOST, SENT_LEAST = 256, 8
"""How many cursors go with a claim, which does not know the keys it will meet. Only keys given that often are sent."""


class HolderCursors:
    """What one session remembers of the keys it gives."""

    def __init__(self) -> None:
        self._on: int | None = None
        self._forget()

    def _forget(self) -> None:
        # Two dicts of two ages instead of an order of use: most keys come once only, and that should cost little.
        self._after: dict[str, int] = {}
        self._before: dict[str, int] = {}
        self._again: Counter[str] = Counter()
        """How often each of these keys was given once more."""
        self._often: dict[str, int] = {}
        """The cursors of the keys that were given often; the key given last stands last."""
        self._lowest = 0

    def on(self, connection: int | None) -> None:
        """The next statements go to this connection. None: it is not ours alone, or not the same for long."""
        if connection != self._on or connection is None:
            self._on = connection
            self._forget()

    def after(self, key: str) -> int:
        """The `hold_pos` after which the holders of this key are to be read."""
        return self._after.get(key, self._before.get(key, 0))

    def often(self) -> str:
        """The cursors of the keys that were given often, as a JSON object."""
        return msgspec.json.encode(self._often).decode() if self._often else "{}"

    def granted(self, keys: Iterable[str], lowest: int) -> None:
        """These keys, which no job held, were given to jobs with a `hold_pos` of `lowest` or higher."""
        if self._on is None:
            return
        self._drawn(lowest)
        after, before, start = self._after, self._before, lowest - 1
        for key in keys:
            if key in after or key in before:
                self._once_more(key, start)
            after[key] = start
        self._age()

    def counted(self, oldest: Iterable[tuple[str, int]], lowest: int | None) -> None:
        """All holders of these limits were counted, and the oldest have these `hold_pos`. Jobs unblocked now have
        `lowest` or higher."""
        if self._on is None:
            return
        if lowest is not None:
            self._drawn(lowest)
        self._after.update((key, hold_pos - 1) for key, hold_pos in oldest)
        self._age()

    def _drawn(self, lowest: int) -> None:
        if lowest <= self._lowest:  # each statement draws higher numbers than the statement before
            self._forget()
        self._lowest = lowest

    def _age(self) -> None:
        after = self._after
        if len(after) > KEYS_MOST:
            self._after, self._before = {}, after
            self._again = Counter({key: count for key, count in self._again.items() if key in after})

    def _once_more(self, key: str, start: int) -> None:
        self._again[key] += 1
        if self._again[key] >= SENT_LEAST:
            self._often.pop(key, None)
            self._often[key] = start
            if len(self._often) > SENT_MOST:
                del self._often[next(iter(self._often))]
