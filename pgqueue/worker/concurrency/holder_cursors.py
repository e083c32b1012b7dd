"""Where to begin to read the holders of a key: behind those that have gone.

An index keeps the entries of deleted rows until vacuum may remove them, and it may not while a transaction holds a
snapshot from before. A statement that reads the rows of a key from the first one then reads all that ever went before.
So a worker remembers for each key of a lock that it gives where to begin, by what it has seen when it gave it last.
(For the jobs that wait: see waiter_cursors.)

Why holders are exact. A row that enters a table as a holder draws a `hold_pos` from one sequence, whichever the table
is. When a transaction that has locked a key (see admit) counts its holders and finds none, anywhere, no transaction
under way can make one: a holder is made only under that lock, and a holder that is being moved (claimed, rescued, put
back) is still seen where it was. So whatever holds the key from then on draws later than that, and what has a lower
number is gone for ever. The number of the row that was let in at that moment, less one, is where to begin; so is any
lower one, and one number, the lowest, does for all that were let in by one statement. Where others held a lock before
nothing is learned.

A limit is seldom without a holder. But when all its holders were counted, what has a lower number than the oldest of
them is gone as well. A job that is let in later draws a higher number than all of them, and so does each of them when
it is moved. Until that is committed it is seen where it was, with the number it had there. So a limit is read from its
oldest holder on: one that runs for very long has the others that came and went beside it read again, where there is a
snapshot.

A server that others took over from may have lost the last of a sequence, and begin again below. So what was learned
holds on one connection only, to one server process: statements are sent with the connection they were made for
(`Session.run(on=…)`), and behind a pooler nothing is remembered. Should the numbers go back all the same, everything is
forgotten.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec

KEYS_MOST = 4_096
"""Of so many keys it is remembered where their holders begin, and of as many that were given before them."""
SENT_MOST, SENT_LEAST = 256, 8
"""So many of them go with a claim, which does not know the keys it will meet: those given so often at least."""


class HolderCursors:
    """What one session remembers of the keys it gives."""

    def __init__(self) -> None:
        self._on: int | None = None
        self._forget()

    def _forget(self) -> None:
        # Two of each age instead of the order of their use: most keys come once only, and that should cost little.
        self._after: dict[str, int] = {}
        self._before: dict[str, int] = {}
        self._again: Counter[str] = Counter()
        """How often each of these was given once more."""
        self._often: dict[str, int] = {}
        """After which `hold_pos` the holders are, of those that were given often; the last given last."""
        self._lowest = 0

    def on(self, connection: int | None) -> None:
        """The next statements go to this connection; None: to one that is not ours alone, or not the same for long."""
        if connection != self._on or connection is None:
            self._on = connection
            self._forget()

    def after(self, key: str) -> int:
        """After which `hold_pos` the holders of this key are to be looked for."""
        return self._after.get(key, self._before.get(key, 0))

    def often(self) -> str:
        """The same of the keys that were given often, as a JSON object."""
        return msgspec.json.encode(self._often).decode() if self._often else "{}"

    def granted(self, keys: Iterable[str], lowest: int) -> None:
        """These, which no job held, were given to jobs that have `lowest` as their `hold_pos` or more."""
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
        """Of these limits all holders were counted, and the oldest have these `hold_pos`; jobs that were let in now
        have `lowest` or more."""
        if self._on is None:
            return
        if lowest is not None:
            self._drawn(lowest)
        self._after.update((key, hold_pos - 1) for key, hold_pos in oldest)
        self._age()

    def _drawn(self, lowest: int) -> None:
        if lowest <= self._lowest:  # each statement draws higher ones than the one before
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
